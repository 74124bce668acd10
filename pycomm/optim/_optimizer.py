"""The base of all fused optimizers: the step."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pycomm import _C
from pycomm._inputs import is_dtensor, local
from pycomm._runtime import host
from pycomm._runtime.torch_private import not_compiled
from pycomm._training.optimizers import register
from pycomm._training.parameters import part_of
from pycomm.optim import _executors, _options, _storage
from pycomm.optim._divided import DividedOptimizer
from pycomm.optim._executors import OnCpu, Prepared, Row, Table, one_division
from pycomm.optim._options import Group, Options

if TYPE_CHECKING:
    from pycomm.optim._cuda_executors import OnCuda
    from pycomm.optim._dtensor import MeshNorms
    from pycomm.optim._shard_executors import OnCpuShards, OnCudaShards


class FusedOptimizer(DividedOptimizer):
    """Base of the fused optimizers.

    Attributes:
        max_norm: bound of the norm of all gradients together, or None.
        grad_norm: the norm before clipping, a float64 scalar tensor: of gradients without the loss
            scale, and not finite if the step was skipped. Only steps with `max_norm` or a
            :class:`GradScaler` measure it; None before the first one.
    """

    # torch.amp.GradScaler passes its scale and its flag in `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    grad_norm: torch.Tensor | None = None

    _on_cuda: OnCuda | OnCudaShards | None = None
    _last: Prepared | None = None  # of the last step, if the next one may use it
    _found: torch.Tensor | None = None  # the `found_inf` that the last step has made
    _mesh_norms: MeshNorms | None = None  # with DTensors

    _rule: ClassVar[str]  # a key of _C.rules

    def __init__(self, params: Any, defaults: Group, options: Options) -> None:
        super().__init__(params, defaults, options)
        register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :class:`StatefulOptimizer`."""
        super().__setstate__(state)
        self._last = None
        register(self)

    # Defined by each optimizer, with _state_names().

    def _own_settings(self, group: Group) -> dict[str, Any]:
        """The group's settings for the extension that only this optimizer has."""
        raise NotImplementedError

    def _settings(self, group: Group, lr: float) -> _C.OptimizerSettings:
        return _C.OptimizerSettings(
            _C.rules[self._rule],
            lr=lr,
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            stochastic=group["stochastic_rounding"],
            seed=group["seed"],
            **self._own_settings(group),
        )

    # Gradients.

    def average_gradients(self) -> None:
        """Averages now the gradients that the step would average, to read or change them.

        All ranks must call this. It does nothing unless a wrapper shards the parameters.

        Raises:
            RuntimeError: the last backward was inside of ``no_sync()``; the step would raise, too.
        """
        from pycomm._training import step_guard

        step_guard.check(self)
        parts = [(param, part) for param in self._params() if (part := part_of(param)) is not None]
        for shards in dict.fromkeys(part.shards for _, part in parts):  # all ranks in one order
            shards.average(param for param, part in parts if part.shards is shards)

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; see :meth:`torch.optim.Optimizer.step`.

        If the attribute ``grad_scale`` is set, gradients are divided by this tensor. If the
        attribute ``found_inf`` is set to a tensor that is not zero, the step changes nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @not_compiled
    @host.makes_lasting
    @torch.no_grad()
    def _step(self) -> None:
        self._check_shared()
        self._complete_exchanges()
        if self.offload is not None:
            from pycomm.optim import _offload

            _offload.prepare(self)
        prepared = self._unchanged() or self._prepared()
        if prepared is None:
            self._compare_with_others()
            return
        try:
            self._run(prepared)
        finally:
            if prepared.description is not None:
                prepared.description.let_go()

    def _run(self, prepared: Prepared) -> None:
        """Takes a step that has been prepared."""
        device, shards, rows = prepared.device, prepared.shards, prepared.rows
        steps = self._executor(prepared)
        # Everything that can raise comes before the first group changes.
        _options.check_max_norm(self.max_norm)
        settings = [self._settings(group, steps.rate(group["lr"])) for group, _ in prepared.tables]
        scale = _executors.attribute(self, "grad_scale", device)
        found = _executors.attribute(self, "found_inf", device)
        if found is self._found:  # set by an earlier step
            self.found_inf = self._found = found = None
        if shards is not None and shards.local and found is not None:
            raise RuntimeError(
                "a GradScaler has looked for infinities before step() has averaged the gradients, "
                "so ranks may differ: use pycomm.optim.GradScaler, which leaves that to the step"
            )
        sets_found = scale is not None and found is None
        if sets_found:
            self.found_inf = self._found = found = steps.scalar()
        clip = None if self.max_norm is None else steps.scalar()
        step = _executors.Step(
            settings,
            scale,
            found,
            clip,
            self.max_norm,
            sets_found,
            prepared.params,
            prepared.grads,
        )
        if self._has_dtensors and step.measures:
            self.grad_norm, step = self._measure(device, rows, step)
        if self._adapts_dtensors:
            self._adapt(prepared.tables, rows, step)
        with contextlib.nullcontext() if self._replicas is None else self._replicas.step():
            norm = steps.run(step)
        if norm is not None:
            self.grad_norm = norm
        self._conclude(prepared)

    def _conclude(self, prepared: Prepared) -> None:
        """Notes what a step has written, and what the next one may use again."""
        if prepared.description is not None:
            prepared.description.end()
            self._edits.note_steps(prepared.description)
            return
        torch.autograd.graph.increment_version(prepared.params)
        if prepared.shards is not None:
            prepared.shards.end_step(prepared.params)
        self.in_step = False
        self._edits.note(row.own for row in prepared.rows if row.holds_weights)
        if prepared.is_settled:
            prepared.describe(self._params(), self.state)
            self._last = prepared

    def _executor(self, prepared: Prepared) -> OnCpu | OnCuda | OnCpuShards | OnCudaShards:
        """What the step runs on."""
        device, tables, shards = prepared.device, prepared.tables, prepared.shards
        steps: OnCpu | OnCuda | OnCpuShards | OnCudaShards
        if shards is not None:
            from pycomm.optim._shard_executors import shard_executor

            steps = shard_executor(device, tables, shards, self._on_cuda)
        elif device.type == "cuda" and self._offloaded is not None:
            steps = self._offloaded.executor(self, prepared)
        elif device.type == "cpu":
            steps = OnCpu(tables)
        else:
            from pycomm.optim._cuda_executors import executor

            steps = executor(device, tables, self._on_cuda, prepared.edition)
        if not isinstance(steps, OnCpu) and not _executors.is_capturing(device):
            self._on_cuda = steps
        return steps

    def _measure(
        self, device: torch.device, rows: list[Row], step: _executors.Step
    ) -> tuple[torch.Tensor, _executors.Step]:
        """Measures the norm of all gradients, some of which are divided among ranks.

        Returns:
            The norm, and the step without the measurement.
        """
        from pycomm.optim import _dtensor

        if self._mesh_norms is None:
            self._mesh_norms = _dtensor.MeshNorms()
        divided = _dtensor.by_division(self._params(), rows)
        norm = self._mesh_norms.measure(device, divided, step)
        return norm, step._replace(max_norm=None, sets_found=False)

    @property
    def _adapts_dtensors(self) -> bool:
        """True if steps of DTensors may depend on norms of whole parameters."""
        return self._has_dtensors and self._needs_whole_norms

    def _adapt(self, tables: list[Table], rows: list[Row], step: _executors.Step) -> None:
        """Applies LAMB's ratios to parameters that are divided among ranks."""
        from pycomm.optim import _dtensor

        steps = {
            id(row.param): _dtensor.RowStep(settings, words)
            for row, settings, (_, words) in zip(rows, step.settings, tables, strict=True)
        }
        _dtensor.adapt(self._params(), steps, step.control)

    def _place(self, param: torch.Tensor) -> int:
        """The offset of a DTensor's random bits."""
        if not is_dtensor(param):
            return 0
        from pycomm.optim import _dtensor

        return _dtensor.place_of(param)

    def _compare_with_others(self) -> None:
        """Takes part in the others' step without a gradient; it raises if others have gradients."""
        if len(self._divisions()) == 1:
            from pycomm.optim._shard_executors import shard_executor

            (shards,) = self._divisions()
            steps = shard_executor(shards.arena.device, [], shards, None)
            steps.run(_executors.Step([], None, None, None, None, False, [], []))

    # The tables of a step.

    def _unchanged(self) -> Prepared | None:
        """The last step's tables, if nothing has changed but the places of gradients."""
        last, self._last = self._last, None
        if last is None or last.description is None or last.options != self._row_options():
            return None
        groups = [group["params"] for group in self.param_groups]
        if last.description.begin(groups, self.state):
            self._last = last
        return self._last

    def _row_options(self) -> list[tuple[Any, ...]]:
        return [
            (
                *(id(group), len(group["params"])),
                *_executors.row_options(group, self._state_names(group)),
            )
            for group in self.param_groups
        ]

    def _prepared(self) -> Prepared | None:
        """New tables; None without a gradient."""
        before = self._rows.copy()
        if before:  # no rows of a first step are used again, which loads less without this
            from pycomm._runtime.c10d import tensor_reader

            _C.set_tensor_reader(tensor_reader)
        tables, rows, grads = self._tables()
        if not rows and not self._has_dtensors:
            return None
        params = [row.param for row in rows]
        device = _options.one_device(type(self).__name__, params or self._params())
        shards = one_division(type(self).__name__, rows, self._has_dtensors)
        self.in_step = shards is not None and shards.replicates
        if self._replicate(shards):
            tables, rows, grads = self._tables()
        plain = shards is None and not self._has_dtensors and self.offload is None
        return Prepared(
            tables,
            rows,
            params,
            grads,
            device,
            shards,
            self._row_options(),
            is_settled=plain and all(before.get(id(row.param)) is row for row in rows),
        )

    def _tables(self) -> tuple[list[Table], list[Row], list[torch.Tensor]]:
        """Each group's table, all rows in them, and their gradients.

        The gradients must stay alive during the step.
        """
        tables: list[Table] = []
        rows: list[Row] = []
        grads: list[torch.Tensor] = []
        stream = 0
        for group in self.param_groups:
            names, table = self._state_names(group), array("q")
            for param in group["params"]:
                if param.grad is not None:
                    own = self._own_gradient(param, param.grad)
                    row, grad = self._row(param, own, group, names, stream)
                    rows.append(row)
                    grads.append(grad)
                    row.add_to(table)
                    if self._adapts_dtensors:  # each parameter with its own settings
                        tables.append((group, table))
                        table = array("q")
                stream += 1
            if table:
                tables.append((group, table))
        return tables, rows, grads

    def _own_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a DTensor's gradient; other gradients as they are."""
        if not (self._has_dtensors and is_dtensor(param)):
            return grad
        from pycomm.optim import _dtensor

        return _dtensor.own_gradient(type(self).__name__, param, grad)

    def _row(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        group: Group,
        names: tuple[str, ...],
        stream: int,
    ) -> tuple[Row, torch.Tensor]:
        """A parameter's row in its group's table, and its gradient.

        The last step's row is reused if nothing has moved since. The gradient is copied if its
        memory format differs from the parameter's.
        """
        state, rest = self._own_state(param), (group, names, stream)
        row = self._rows.get(id(param))
        if row is not None and row.is_of(param, grad, state, *rest):
            if row.part is not None:
                row.part.is_divided(param)  # zeroes its elements if the user has zeroed them
            if row.holds_weights:
                self._edits.take(row.own, state)
            return row, grad
        part = part_of(param)
        if part is None or not part.is_divided(param):
            grad = _options.usable_grad(type(self).__name__, local(param), grad)
        self._take_assigned(param, group)
        if len(state) == 0:
            self._init_state(param, group)
        elif self._held.get(param) is not part:
            self._follow(param, group, names)
        elif _storage.holds_weights(state):
            self._edits.take(self._own(param), state)
        self._to_host(param, group, names)
        place = self._place(param)
        try:
            row = Row(param, grad, self._own_state(param), *rest, place)
        except _storage.ChangedError:
            self._follow(param, group, names)
            row = Row(param, grad, self._own_state(param), *rest, place)
        self._rows[id(param)] = row
        return row, grad
