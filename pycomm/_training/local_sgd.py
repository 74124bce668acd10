"""Local SGD: exchanges parameters every few steps instead of gradients in every step."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pycomm._inputs import check_whole
from pycomm._runtime import host
from pycomm._runtime.torch_private import not_compiled
from pycomm._training.agree import (
    STEPPED_BY_SOME,
    check_same,
    checksum,
    gather_rows,
    source_rank,
)
from pycomm._training.comm_state import (
    LOCAL_SGD,
    CommState,
    NamedParameters,
    check_successor,
    saved_kind,
)
from pycomm._training.explain import ExchangePlan
from pycomm._training.hook_state import HookState
from pycomm._training.outer import InnerOptimizers, Outer, Rule
from pycomm._training.parameters import (
    Exclude,
    Parameters,
    check_exchangeable,
    describe_tensor,
    ignored,
)
from pycomm._training.residuals import FORMAT
from pycomm.compression import Compression
from pycomm.errors import Mismatch
from pycomm.group import Group

# Reports that ranks compare before they exchange parameters.


class LocalSGDStatus(NamedTuple):
    """The progress of a rank.

    Attributes:
        steps: number of steps it has made.
        period: steps from one exchange to the next.
        options: a hash of the other options.
        parameters: a fingerprint of the parameters that all ranks should have in common.
        pending: steps since the last exchange.
        left: 1 if it has no more batches.
    """

    steps: int
    period: int
    options: int
    parameters: int
    pending: int
    left: int

    def fits(self, other: LocalSGDStatus) -> bool:
        """True if the two ranks may exchange parameters."""
        here, there = self[1:4], other[1:4]
        return here == there and (bool(self.left) or self.steps == other.steps)

    def __str__(self) -> str:
        return (
            f"at step {self.steps}, period {self.period}, options {self.options:08x}, "
            f"parameters {self.parameters:08x}"
        )


def compare(mine: LocalSGDStatus, group: Group) -> list[LocalSGDStatus]:
    """Collects every rank's report, in rank order; a collective call.

    Raises:
        pycomm.Mismatch: the reports do not fit each other.
    """
    reports = [LocalSGDStatus(*row) for row in gather_rows(mine, group)]
    against = next((rank for rank, report in enumerate(reports) if not report.left), 0)
    for rank, report in enumerate(reports):
        if not report.fits(reports[against]):
            raise Mismatch(
                f"ranks must exchange parameters at the same step, with the same settings and "
                f"from the same parameters: rank {against} {reports[against]}, rank {rank} "
                f"{report}",
                rank=rank,
                operation="local_sgd",
            )
    return reports


class _Account(NamedTuple):
    """A rank's state, as it reports it to a new group.

    Attributes:
        is_new: True if it has not trained with any of the others.
        came_late: True if its steps of this round do not count.
        steps: the number of its steps.
        pending: the number of its steps in this round.
        owed: True if it has failed in an exchange.
        agreements: how many times it has had the same parameters as the others.
        has_snapshot: True if it has the common parameters of the last exchange.
        divides: True if it has an `inner_group`.
        number: the checksum of its parameters and options.
    """

    is_new: int
    came_late: int
    steps: int
    pending: int
    owed: int
    agreements: int
    has_snapshot: int
    divides: int
    number: int


# The state.


class LocalSGDState(HookState):
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

    or ``model = pycomm.DataParallel(model, state=local)`` instead of `register`.

    By default parameters are averaged (local SGD; Stich, "Local SGD converges fast and communicates
    little", 2019; with `gradient_steps` post-local SGD; Lin et al., "Don't use large mini-batches,
    use local SGD", 2020). With `outer_momentum`, the mean change of parameters since the last
    exchange is the gradient of an outer Nesterov step (:meth:`diloco`; Douillard et al., "DiLoCo:
    distributed low-communication training of language models", 2023).

    After every exchange all ranks have the same parameters, bit for bit. Optimizer states and
    buffers are not exchanged.

    With `local_residuals`, each rank continues from these *outer* parameters plus its own residuals
    instead (error reset; Xie et al., "CSER: communication-efficient SGD with error reset", 2020).
    So changes that it has made, but not sent yet, stay in its parameters, and small densities lose
    far less. Then only the outer parameters are the same on all ranks, bit for bit;
    :meth:`outer_parameters` gives them to the model. A residual also holds the part of all ranks'
    sums that this rank, as the owner of a region, has not sent back.

    Args:
        params: ``model.named_parameters()``.
        optimizer: the optimizer, or optimizers, of these parameters and no others. If one of
            pycomm's optimizers keeps full-precision weights, these weights are exchanged.
        period: steps from one exchange to the next.
        compression: compression of the changes since the last exchange, or None. Residuals keep
            what it loses of each parameter and send it later.
        outer_lr: learning rate of the outer step; 1 goes all the way to the mean.
        outer_momentum: momentum of the outer steps.
        local_residuals: each rank continues from the outer parameters plus its own residuals. Needs
            a compression without momentum correction; :meth:`join` is refused.
        gradient_steps: the number of first steps that exchange gradients instead, uncompressed.
        inner_group: ranks that also exchange gradients in every step after the warm-up, such as the
            ranks of one node.
        group: the group that exchanges parameters; by default the default group.
        exclude: see :class:`pycomm.hooks.CommState`.
        algorithm: as for :class:`pycomm.hooks.CommState`, of the exchanges in `group`.

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

    averages_parameters = True
    # _changes_lost is a number of ranks. _owed is True until a begun exchange succeeds, _is_new
    # until this rank has the common parameters, _came_late until the round in which it joined is
    # over. These are the defaults of states that older versions have pickled.
    _changes_lost, _owed, _is_new, _came_late = 0, False, False, False

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
        algorithm: str = "auto",
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
        differences = CommState(
            compression, named, group=group, exclude=exclude, algorithm=algorithm
        )
        if local_residuals and (compression is None or compression.momentum):
            raise ValueError(
                "local_residuals needs a compression without momentum correction, "
                f"got {compression}"
            )
        self.period = period
        self.steps = self.agreements = 0
        self.joining = self._left = self._shown = False
        self._parameters, self._optimizers = parameters, optimizers
        self._outer, self._differences = Outer(parameters, optimizers, rule), differences
        self.algorithm = algorithm
        self._options = repr((rule, gradient_steps, compression, inner_group is None, algorithm))
        self._gradient_steps = gradient_steps
        # These average gradients, during the warm-up and after it.
        self._early = (
            CommState(group=differences.group, algorithm=algorithm) if gradient_steps else None
        )
        self._late = None if inner_group is None else CommState(group=inner_group)
        self._had_backward = False
        self._pending = 0  # steps since the last exchange
        self._stepped: set[int] = set()  # numbers of optimizers, since the last step()
        optimizers.watch(self)

    @classmethod
    def diloco(
        cls,
        params: NamedParameters,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        period: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Any,
    ) -> Self:
        """DiLoCo with the values of its paper.

        Args:
            params: see :class:`LocalSGDState`, like all arguments.
            optimizer: in the paper, AdamW.
            period: steps from one exchange to the next; the paper's H.
            outer_lr: learning rate of the outer step.
            outer_momentum: momentum of the outer steps.
            options: the other options.
        """
        options |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        return cls(params, optimizer, period=period, **options)

    def register(self, model: DistributedDataParallel) -> None:
        """See :meth:`CommState.register`."""
        self.check_module(model.module)
        super().register(model)

    def options(self) -> dict[str, object]:
        """The options that all ranks of a wrapper compare; :meth:`exchange` compares the rest."""
        return {"local_sgd": True}

    def check_module(self, module: nn.Module) -> None:
        """Raises ValueError if this exchanges parameters that each rank keeps for itself."""
        for name, parameter in module.named_parameters():
            if name in ignored(module) and self.exchanges_parameter(parameter):
                raise ValueError(
                    f"params must leave out {name}, which module._ddp_params_and_buffers_to_ignore "
                    "names: give the state the other parameters, with an optimizer of their own"
                )

    # Backward: gradients are exchanged only in the warm-up, or with an inner group.

    def exchanges_parameter(self, tensor: torch.Tensor) -> bool:
        """True for a parameter that ranks exchange."""
        return id(tensor) in self._parameters.entries

    def sends_dense(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002
        """True: gradients are never compressed."""
        return True

    @property
    def gradient_group(self) -> Group | None:
        """The group that exchanges gradients in this step, or None."""
        gradients = self._gradients
        return None if gradients is None else gradients.group

    def start(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        backward: int = -1,
        *,
        begins: Sequence[int] | None = None,
    ) -> Future[Any]:
        """Takes a bucket of gradients, and exchanges it only if this step exchanges gradients.

        See :meth:`CommState.start`.
        """
        gradients = self._note_backward(parameters)
        if gradients is not None:
            return gradients.start(buffer, parameters, backward, begins=begins)
        return _done(buffer)

    @not_compiled
    def start_in_backward(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Future[Any]:
        """See :meth:`start` and :meth:`CommState.start_in_backward`."""
        gradients = self._note_backward(parameters)
        if gradients is not None:
            return gradients.start_in_backward(buffer, parameters)
        return _done(buffer)

    def finish(self, backward: int = -1) -> None:
        """See :meth:`CommState.finish`."""
        if self._gradients is not None:
            self._gradients.finish(backward)

    def give_back(self) -> None:
        """See :meth:`CommState.give_back`."""
        if self._gradients is not None:
            self._gradients.give_back()

    def note_failure(self) -> None:
        """See :meth:`CommState.note_failure`."""
        if self._gradients is not None:
            self._gradients.note_failure()

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether a step of the optimizer is taken, before the optimizer's step.

        In the warm-up, or with `inner_group`, all ranks that exchange gradients take the step or
        none does; see :meth:`CommState.should_commit`. Otherwise every rank decides for itself:
        this returns `ready`. Call :meth:`step` after a step that is not taken, too.
        """
        if not isinstance(ready, bool):
            raise TypeError(f"ready must be True or False, got {ready!r}")
        gradients = self._gradients
        return ready if gradients is None else gradients.should_commit(ready)

    @property
    def _gradients(self) -> CommState | None:
        return self._early if self.steps < self._gradient_steps else self._late

    def _note_backward(self, parameters: Sequence[torch.Tensor]) -> CommState | None:
        if not self._had_backward:
            self._parameters.of(parameters)  # raises if they are another model's
        self._had_backward = True
        return self._gradients

    # Rounds: when ranks exchange parameters, and which of them count.

    @property
    def group(self) -> Group:
        """The group whose ranks exchange parameters."""
        return self._differences.group

    @not_compiled
    @host.makes_lasting
    def step(self) -> bool:
        """Counts a step, and exchanges if a period ends. Call it after every step of the optimizer.

        A step that a GradScaler has skipped counts, too, as other ranks may not have skipped it.

        Returns:
            True if all ranks have the same (outer) parameters now.

        Raises:
            RuntimeError: there has been no backward of the model since the last call.
            pycomm.CollectiveError: as in :meth:`exchange`.
        """
        if not self._had_backward:
            raise RuntimeError(
                "step() must come once after every optimizer step, and after a backward of a model "
                "that leaves its gradients to this state: call register(model), or pass "
                "state= to pycomm.DataParallel"
            )
        self._had_backward = False
        self._stepped.clear()
        self.steps += 1
        if self.steps <= self._gradient_steps:
            self.agreements += 1
            return True
        self._pending += 1
        return self._is_due and self.exchange()

    @not_compiled
    @host.makes_lasting
    def exchange(self) -> bool:
        """Exchanges now, at any point of the period: after training or before an evaluation.

        All ranks must call this. It does nothing if no rank has made a step since the last
        exchange. If the group fails, all surviving ranks have taken the outer step, or none has and
        nothing has changed. :meth:`regroup` continues.

        Returns:
            True if there was an exchange.

        Raises:
            pycomm.Mismatch: ranks are not at the same step, or differ in their settings or in their
                common parameters.
            pycomm.CollectiveError: as in :func:`pycomm.all_reduce`.
        """
        if self.steps < self._gradient_steps:
            return False
        self._owed = True
        reports = self._meet()
        self._owed = False
        return any(report.pending for report in reports)

    @not_compiled
    @host.makes_lasting
    def regroup(self, group: Group) -> None:
        """Continues with another group: a smaller one after a failure, or one that has grown.

        All ranks of the new group call this. Each keeps its parameters, the changes that it has
        made since the last exchange, its optimizer states and its residuals. All ranks adopt the
        largest number of steps. If an exchange has failed on any rank, in :meth:`step` or in
        :meth:`exchange`, it is repeated now. Lost ranks' changes since the last exchange are lost,
        and so are their residuals; :meth:`stats` counts both.

        Newcomers call this with the state that they have just made in `group`. They get the
        parameters after the last exchange and the outer momentum. Without compression, `outer_lr`
        and `outer_momentum`, they get the present parameters of the first rank that is not new. If
        others have made steps since the last exchange, newcomers do not count in the next exchange.

        Raises:
            TypeError: `group` is not a group.
            ValueError: this is called inside of :meth:`join`, any rank has an `inner_group`, or
                this newcomer's parameters or options differ from the others'.
            RuntimeError: only some ranks took the last step of the warm-up; on all ranks.
            pycomm.CollectiveError: a newcomer's parameters or options differ: shrink the group; and
                as in :meth:`exchange`.
        """
        self._check_not_shown()
        if self.joining:
            raise ValueError(
                "regroup must be called outside of join(): leave join() and enter it again"
            )
        check_successor(group)
        self._is_new |= group is self.group and not (self.steps or self._had_backward)
        accounts = self._compare_accounts(group)
        if self._pending:
            left = sum(not account.is_new for account in accounts)
            self._changes_lost += max(self.group.size - left, 0)
        for state in (self._differences, self._early):
            if state is not None:
                state.regroup(group)
        self._outer.doubt()
        self._had_backward = False
        self._stepped.clear()
        self._adopt(accounts)
        if self._owed:
            self.exchange()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Surrounds a training loop in which ranks may have different numbers of batches.

        A rank that has no more batches takes part in the others' exchanges. It counts in the mean
        only if it has made steps since its last exchange. At the end all ranks have the same
        parameters.

        Raises:
            ValueError: in the warm-up, with `inner_group` or with `local_residuals`.
        """
        if self._outer.rule.local_residuals:
            raise ValueError(
                "join() must be used without local_residuals: residuals would be scaled to the "
                "ranks that still have batches"
            )
        if self.steps < self._gradient_steps or self._late is not None:
            raise ValueError(
                "join() must be used after the warm-up, and without inner_group: both exchange "
                "gradients in every step"
            )
        self.joining = True
        try:
            yield
            self._left = True
            reports = self._meet()
            while not all(report.left for report in reports):
                reports = self._meet()
            self.steps = max(report.steps for report in reports)
        finally:
            self.joining = self._left = False

    @property
    def _is_due(self) -> bool:
        """True if a period ends with the last step."""
        return (self.steps - self._gradient_steps) % self.period == 0

    def _compare_accounts(self, group: Group) -> list[_Account]:
        """Collects every rank's account, in rank order; a collective call."""
        named = zip(self._parameters.tensors, self._parameters.entries.values(), strict=True)
        lines = [f"period={self.period}", self._options]
        lines += [describe_tensor(entry.name, tensor) for tensor, entry in named]
        mine = _Account(
            self._is_new,
            self._came_late,
            self.steps,
            self._pending,
            self._owed,
            self.agreements,
            self._outer.has_snapshot,
            self._late is not None,
            checksum(lines),
        )
        accounts = [_Account(*row) for row in gather_rows(mine, group)]
        if any(account.divides for account in accounts):
            raise ValueError("inner_group must be None to continue with another group")
        news = [bool(account.is_new) for account in accounts]
        if any(news):
            numbers = [account.number for account in accounts]
            check_same(lines, numbers, news, group, "params and options of LocalSGDState")
        return accounts

    def _adopt(self, accounts: Sequence[_Account]) -> None:
        """Adopts the largest counts of all ranks, and gives new ranks the common parameters.

        All ranks must call this.
        """
        others = [account for account in accounts if not account.is_new] or accounts
        if len({account.agreements for account in others}) > 1:
            raise RuntimeError(STEPPED_BY_SOME)
        news = [bool(account.is_new) for account in accounts]
        source = source_rank(news)
        if any(news):
            has_snapshot = any(account.has_snapshot for account in others)
            self._outer.hand_on(source, self._is_new, has_snapshot, self.group)
        self.steps = max(account.steps for account in accounts)
        self._pending = max(account.pending for account in accounts)
        self._owed = any(account.owed for account in accounts)
        self.agreements = accounts[source].agreements
        counts = any(account.pending and not account.came_late for account in others)
        self._came_late = counts and (self._is_new or self._came_late)
        self._is_new = False

    def _check_not_shown(self) -> None:
        if self._shown:
            raise RuntimeError("a LocalSGDState must not be used inside of its outer_parameters()")

    def before_step(self, number: int) -> None:
        """Runs before each step of the optimizer with this number."""
        self._check_not_shown()
        if number in self._stepped:
            raise RuntimeError(
                "step() of the LocalSGDState must be called after every step of the optimizer"
            )
        self._stepped.add(number)
        if self.steps >= self._gradient_steps and not self._outer.has_snapshot:
            self._outer.snapshot()

    def _meet(self) -> list[LocalSGDStatus]:
        """Exchanges if any rank has made a step; returns the ranks' reports from before."""
        self._check_not_shown()
        self._optimizers.check(self._parameters)
        if not self._outer.has_snapshot:
            self._outer.snapshot()
        reports = compare(self._report(), self.group)
        active = sum(report.pending > 0 for report in reports)
        if active:
            # Local residuals belong to this rank's parameters, so they must not be scaled.
            scaled = 1.0 if self._outer.rule.local_residuals else self.group.size / active
            self._outer.exchange(self._differences, scaled if self._counted else 0.0)
            self._pending, self._came_late = 0, False
            self.agreements += 1
        return reports

    def _report(self) -> LocalSGDStatus:
        fingerprint = self._outer.fingerprint()
        options = zlib.crc32(self._options.encode())
        return LocalSGDStatus(
            self.steps, self.period, options, fingerprint, self._counted, self._left
        )

    @property
    def _counted(self) -> int:
        """The steps of this round, if they count."""
        return 0 if self._came_late else self._pending

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Gives the model the outer parameters, for an evaluation or for saving the model.

        These are the parameters after the last exchange, the same on all ranks. Afterwards the
        model has this rank's own parameters again; a copy keeps them meanwhile. Inside, steps and
        exchanges raise RuntimeError, and so do saving, loading and copying this state, because it
        belongs to the rank's own parameters.

        Raises:
            ValueError: this state averages plain parameters, so the model already has them.
        """
        if not self._outer.rule.on_differences:
            raise ValueError(
                "outer_parameters() needs compression, outer_lr or outer_momentum: without them, "
                "the model itself has the averages after exchange()"
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
            the numbers of :meth:`CommState.stats`;
            ``changes_lost``: the number of ranks that were lost with changes since the last
            exchange.
        """
        return {**self._differences.stats(), "changes_lost": float(self._changes_lost)}

    def explain(self) -> ExchangePlan:
        """Explains the last exchanges of parameters; see :meth:`CommState.explain`."""
        return self._differences.explain()

    def intervals(self) -> list[tuple[int, float, float]]:
        """Times of the last exchange of parameters; see :meth:`CommState.intervals`."""
        return self._differences.intervals()

    def residual(self, name: str) -> torch.Tensor:
        """The residual of a parameter's changes: an fp32 view in the parameter's shape."""
        return self._differences.residual(name)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are kept from step to step, and the working memory of exchanges."""
        return [*self._differences.tensors(), *self._outer.tensors()]

    def state_dict(self, gathered: bool = False) -> dict[str, Any]:
        """Returns what must be saved with the model and the optimizer, after :meth:`step`.

        Parameters differ between ranks except right after an exchange, and optimizer states always
        do. To resume with the same bits, every rank must save the model, the optimizer and this.

        Args:
            gathered: collect the residuals of all ranks on rank 0, right after an exchange; see
                :meth:`CommState.state_dict`.

        Raises:
            ValueError: `gathered` is True with `local_residuals`, or after steps since the last
                exchange.
        """
        self._check_not_shown()
        if gathered and self._outer.rule.local_residuals:
            raise ValueError("gathered must be False with local_residuals: save on every rank")
        if gathered and self._pending:
            raise ValueError(
                f"gathered must be False {self._pending} steps after the last exchange, because "
                "ranks have different parameters: call exchange() before"
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
            ValueError: the dict is from another model, another rank or other options.
        """
        if (kind := saved_kind(state_dict)) != LOCAL_SGD:
            got = "" if kind is None else f", got one of a state with the compression {kind}"
            raise ValueError(f"state_dict must come from state_dict() of a LocalSGDState{got}")
        self._check_not_shown()
        saved = state_dict.get("local_residuals", False)
        if saved != self._outer.rule.local_residuals:
            raise ValueError(
                f"state_dict must come from a state with local_residuals={not saved}, got {saved}"
            )
        self._outer.check(state_dict["outer"])
        self._differences.load_state_dict(state_dict["differences"])
        self.steps = state_dict["steps"]
        # The warm-up ends with a snapshot.
        self._outer.load(state_dict["outer"] if self.steps >= self._gradient_steps else {})
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


def _done(buffer: torch.Tensor) -> Future[Any]:
    future: Future[Any] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


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
