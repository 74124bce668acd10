"""Local SGD: exchanges parameters every few steps instead of gradients in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycomm._inputs.arguments import check_whole
from pycomm._training.comm_state import CommState, NamedParameters
from pycomm._training.inner_optimizers import InnerOptimizers
from pycomm._training.local_rounds import LocalRounds
from pycomm._training.outer import Outer, Rule
from pycomm._training.parameters import Exclude, Parameters, check_exchangeable, ignored
from pycomm._training.residuals import FORMAT
from pycomm._training.saved_state import LOCAL_SGD, saved_kind
from pycomm.compression import Compression
from pycomm.group import Group


class LocalSGDState(LocalRounds):
    """Lets every rank train separately, and averages parameters every `period` steps.

    Use it if links cannot carry gradients in every step. With DistributedDataParallel:

    .. code-block:: python

        optimizer = torch.optim.AdamW(model.parameters())
        local = pycomm.hooks.LocalSGDState(model.named_parameters(), optimizer, period=32)
        local.register(model)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            local.step()

    or ``model = pycomm.DataParallel(model, local_sgd=local)`` instead of `register`.

    By default parameters are averaged (local SGD; Stich, "Local SGD converges fast and communicates
    little", 2019; with `gradient_steps` post-local SGD; Lin et al., "Don't use large mini-batches,
    use local SGD", 2020). With ``outer_lr=0.7, outer_momentum=0.9``, the mean change of parameters
    since the last exchange is the gradient of an outer Nesterov step (DiLoCo; Douillard et al.,
    "DiLoCo: distributed low-communication training of language models", 2023).

    After every exchange all ranks have the same parameters, bit for bit. Optimizer states and
    buffers are not exchanged.

    With `local_residuals`, each rank continues from these *outer* parameters plus its own residuals
    instead (error reset; Xie et al., "CSER: communication-efficient SGD with error reset", 2020).
    So changes that it has made, but not sent yet, stay in its parameters, and small densities lose
    far less. Then only the outer parameters are the same on all ranks, bit for bit;
    :meth:`outer_parameters` gives them to the model. A residual also holds what this rank, as the
    owner of a region, has not sent back of the sums of all ranks.

    Args:
        params: ``model.named_parameters()``.
        optimizer: the model's optimizer, or several: those that change these parameters, and no
            others. If one of pycomm's optimizers keeps full-precision weights, those are exchanged.
        period: steps from one exchange to the next.
        compression: compression of the changes since the last exchange, or None. Residuals keep
            what it loses of each parameter and send it later.
        outer_lr: learning rate of the outer step; 1 goes all the way to the mean.
        outer_momentum: momentum of the outer steps.
        local_residuals: each rank continues from the outer parameters plus its own residuals. Needs
            a compression without momentum correction; :meth:`join` is refused.
        gradient_steps: the number of first steps that exchange gradients instead, uncompressed.
        inner_group: ranks that also exchange gradients in every step after the warm-up, such as
            those of one node.
        group: the group that exchanges parameters; by default the default group.
        exclude: see :class:`pycomm.hooks.CommState`.

    Attributes:
        group: the group that exchanges parameters.
        period: steps from one exchange to the next.
        steps: the number of steps so far.
        agreements: how many times all ranks have had the same (outer) parameters: steps of the
            warm-up, and exchanges.
        joining: True inside of :meth:`join`.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    def __init__(
        self,
        params: NamedParameters,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        period: int,
        compression: Compression | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        local_residuals: bool = False,
        gradient_steps: int = 0,
        inner_group: Group | None = None,
        group: Group | None = None,
        exclude: Exclude | None = None,
    ) -> None:
        if params is None:
            raise TypeError("params must be model.named_parameters(), got None")
        _check_options(period, gradient_steps, inner_group)
        plain = outer_lr == 1 and not outer_momentum
        rule = Rule(outer_lr, outer_momentum, compression is not None or not plain, local_residuals)
        named = list(params)
        parameters = Parameters(named, exclude)
        optimizers = InnerOptimizers(optimizer)
        optimizers.check(parameters)
        check_exchangeable(parameters, compression)
        differences = CommState(compression, named, group=group, exclude=exclude)
        if local_residuals and (compression is None or compression.momentum):
            raise ValueError(
                "local_residuals must come with a compression, and without momentum correction, "
                f"got {compression}"
            )
        options = repr((rule, gradient_steps, compression, inner_group is None))
        super().__init__(
            parameters,
            optimizers,
            Outer(parameters, optimizers, rule),
            differences,
            period,
            options,
            gradient_steps,
            inner_group,
        )

    def register(self, model: DistributedDataParallel) -> None:
        """See :meth:`CommState.register`."""
        self.check_ignored(model.module)
        super().register(model)

    def check_ignored(self, module: nn.Module) -> None:
        """Raises ValueError if this exchanges what each rank of the module keeps for itself."""
        for name, parameter in module.named_parameters():
            if name in ignored(module) and self.exchanges(parameter):
                raise ValueError(
                    f"params must leave out {name}, which module._ddp_params_and_buffers_to_ignore "
                    "names: give the state the other parameters, with an optimizer of their own"
                )

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Gives the model the outer parameters: for evaluations and for a model to keep.

        These are the parameters after the last exchange, the same on all ranks. Afterwards the
        model has this rank's own parameters again, of which there is a copy meanwhile. Inside,
        steps and exchanges raise RuntimeError, and so do saving, loading and copying this state,
        because it belongs to the rank's own parameters.

        Raises:
            ValueError: this state averages parameters as they are, and keeps no others.
        """
        if not self._outer.rule.on_differences:
            raise ValueError(
                "outer_parameters() must come with compression, outer_lr or outer_momentum: plain "
                "averages are in the model itself, after exchange()"
            )
        self._check_not_shown()
        self._shown = True
        try:
            with self._outer.shown():
                yield
        finally:
            self._shown = False

    # For loggers and checkpoints.

    def stats(self) -> dict[str, float]:
        """Numbers about the exchanges of parameters.

        Returns:
            those of :meth:`CommState.stats`;
            ``changes_lost``: the number of ranks that were lost with what they had changed since
            the last exchange.
        """
        return {**self._differences.stats(), "changes_lost": float(self._changes_lost)}

    def intervals(self) -> list[tuple[int, float, float]]:
        """Times of the last exchange of parameters; see :meth:`CommState.intervals`."""
        return self._differences.intervals()

    def residual(self, name: str) -> torch.Tensor:
        """The residual of a parameter's changes: an fp32 view in the parameter's shape."""
        return self._differences.residual(name)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are kept from step to step, and those that exchanges need."""
        return [*self._differences.tensors(), *self._outer.tensors()]

    def state_dict(self, gathered: bool = False) -> dict[str, Any]:
        """Returns what must be saved with the model and the optimizer, after :meth:`step`.

        Parameters differ between ranks except right after an exchange, and optimizer states always
        do. To resume with the same bits, every rank must save the model, the optimizer and this.

        Args:
            gathered: collect the residuals of all ranks on rank 0, right after an exchange; see
                :meth:`CommState.state_dict`.

        Raises:
            ValueError: `gathered`, and there have been steps since the last exchange, or there are
                `local_residuals`.
        """
        self._check_not_shown()
        if gathered and self._outer.rule.local_residuals:
            raise ValueError("gathered must be False with local_residuals: save on every rank")
        if gathered and self._pending:
            raise ValueError(
                f"gathered must be False, or exchange() be called before, {self._pending} steps "
                "after the last exchange: ranks have parameters of their own"
            )
        differences = self._differences.state_dict(gathered)
        if not differences:
            return {}
        return {
            "format": FORMAT,
            "steps": self.steps,
            "pending": self._pending,
            "came_late": self._came_late,
            "agreements": self.agreements,
            "local_residuals": self._outer.rule.local_residuals,
            "outer": self._outer.dump(),
            "differences": differences,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`, bit for bit.

        Raises:
            ValueError: it is of another model, another rank or other options.
        """
        if (kind := saved_kind(state_dict)) != LOCAL_SGD:
            got = "" if kind is None else f", got that of a state of compression {kind}"
            raise ValueError(f"state_dict must come from state_dict() of a LocalSGDState{got}")
        self._check_not_shown()
        saved = state_dict.get("local_residuals", False)
        if saved != self._outer.rule.local_residuals:
            raise ValueError(f"state_dict must be of the same local_residuals, it has {saved}")
        self._outer.check(state_dict["outer"])
        self._differences.load_state_dict(state_dict["differences"])
        self._outer.load(state_dict["outer"])
        self.steps = state_dict["steps"]
        self.agreements = state_dict["agreements"]
        self._pending = state_dict["pending"]
        self._came_late = state_dict.get("came_late", False)
        self._owed = self._is_new = False
        self._had_backward = False
        self._stepped.clear()

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying, optimizer included; see :class:`CommState`."""
        self._check_not_shown()
        if self._late is not None:
            raise TypeError(
                "a LocalSGDState with inner_group cannot be pickled or copied, because groups "
                "cannot: save its state_dict()"
            )
        return vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._optimizers.watch(self)


def _check_options(
    period: int,
    gradient_steps: int,
    inner_group: object,
) -> None:
    check_whole("period", period)
    if period < 1:
        raise ValueError(f"period must be at least 1, got {period}")
    check_whole("gradient_steps", gradient_steps)
    if gradient_steps < 0:
        raise ValueError(f"gradient_steps must not be negative, got {gradient_steps}")
    if inner_group is not None and not isinstance(inner_group, Group):
        raise TypeError(f"inner_group must be a pycomm.Group or None, got {inner_group!r}")
