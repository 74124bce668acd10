"""Local SGD after the optimizer: when ranks exchange parameters, and which of them count."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pycomm._inputs import host
from pycomm._runtime.torch_private import not_compiled
from pycomm._training.comm_state import CommState, check_successor
from pycomm._training.inner_optimizers import InnerOptimizers
from pycomm._training.local_gradients import LocalGradients
from pycomm._training.newcomers import check_alike, number_of, source_among
from pycomm._training.outer import Outer
from pycomm._training.parameters import Parameters, describe_tensor
from pycomm._training.reports import Report, compare
from pycomm._training.step_guard import STEPPED_BY_SOME
from pycomm.collectives import all_gather
from pycomm.group import Group


class _Account(NamedTuple):
    """What a rank brings to a new group.

    Attributes:
        is_new: True if it has not trained with any of the others.
        came_late: True if its steps of this round do not count.
        steps: the number of its steps.
        pending: those of this round.
        owed: True if it has failed in an exchange.
        agreements: how many times it has had the same parameters as the others.
        anchored: True if it has what all had in common.
        divides: True if it has an `inner_group`.
        number: of its parameters and options.
    """

    is_new: int
    came_late: int
    steps: int
    pending: int
    owed: int
    agreements: int
    anchored: int
    divides: int
    number: int


class LocalRounds(LocalGradients):
    """Counts steps, and exchanges parameters when a round of them is over.

    Args:
        parameters: the model's parameters.
        optimizers: change them.
        outer: what ranks have in common.
        differences: exchanges parameters.
        period: the steps of a round.
        options: a hash of all other options.
        gradient_steps: see :class:`LocalGradients`.
        inner_group: see :class:`LocalGradients`.

    Attributes:
        period: steps from one exchange to the next.
        steps: the number of steps so far.
        agreements: how many times all ranks have had the same (outer) parameters: steps of the
            warm-up, and exchanges.
        joining: True inside of :meth:`join`.
    """

    # Ranks; True from the call of exchange() to its success; True until this rank has what others
    # have in common; and True on such a rank until the round in which it came is over. States that
    # were pickled by older versions have none of these.
    _changes_lost, _owed, _is_new, _came_late = 0, False, False, False

    def __init__(
        self,
        parameters: Parameters,
        optimizers: InnerOptimizers,
        outer: Outer,
        differences: CommState,
        period: int,
        options: str,
        gradient_steps: int,
        inner_group: Group | None,
    ) -> None:
        super().__init__(parameters, gradient_steps, differences.group, inner_group)
        self.period = period
        self.agreements = 0
        self._optimizers, self._outer, self._differences = optimizers, outer, differences
        self._options = options
        self._pending = 0  # steps since the last exchange
        self.joining = self._left = self._shown = False
        self._stepped: set[int] = set()  # numbers of optimizers, since the last step()
        self._optimizers.watch(self)

    @property
    def group(self) -> Group:
        """The group whose ranks exchange parameters."""
        return self._differences.group

    @not_compiled
    @host.makes_lasting
    def step(self) -> bool:
        """Counts a step, and exchanges if it is time. Call it after every step of the optimizer.

        A step that a GradScaler has skipped counts, too, as other ranks may not have skipped it.

        Returns:
            True if all ranks have the same (outer) parameters now.

        Raises:
            RuntimeError: there has been no backward of the model since the last call.
            The errors of :meth:`exchange`.
        """
        if not self._had_backward:
            raise RuntimeError(
                "step() must come once after every optimizer step, and after a backward of a model "
                "that leaves its gradients to this state: call register(model), or pass "
                "local_sgd= to pycomm.DataParallel"
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
        exchange. If the group fails, all ranks that survive have taken the outer step, or none;
        then nothing has changed, and :meth:`regroup` goes on.

        Returns:
            True if there was an exchange.

        Raises:
            pycomm.Mismatch: ranks are not at the same step, or differ in their settings or in the
                parameters that they had in common.
            The errors of :func:`pycomm.all_reduce`.
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
        """Goes on with another group: a smaller one after a failure, or one that has grown.

        All ranks of the new group call this. Each keeps its parameters, the changes that it has
        made since the last exchange, its optimizer states and its residuals. All count as many
        steps as the one that has made most. If any of them has failed in an exchange, in
        :meth:`step` or in :meth:`exchange`, it is made now. What lost ranks had changed since the
        last exchange is lost, and so are their residuals; :meth:`stats` counts both.

        Newcomers call this with the state that they have just made in `group`. They get the
        parameters after the last exchange and the outer momentum; without compression,
        `outer_lr` and `outer_momentum`, the present parameters of the first rank that is not new.
        If others have made steps since the last exchange, newcomers count from the next one on.

        Raises:
            TypeError: `group` is no group.
            ValueError: this is called inside of :meth:`join`; there is an `inner_group`, on any
                rank; or this newcomer has other parameters or options than the others.
            RuntimeError: only some ranks took the last step of the warm-up; on all ranks.
            pycomm.CollectiveError: a newcomer has others: shrink the group.
            The errors of :meth:`exchange`.
        """
        self._check_not_shown()
        if self.joining:
            raise ValueError("regroup must be called outside of join(): leave it, and join anew")
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
                "join() must come without local_residuals: residuals would be scaled to the ranks "
                "that still have batches"
            )
        if self.steps < self._gradient_steps or self._late is not None:
            raise ValueError(
                "join() must come after the warm-up, and without inner_group: gradients are "
                "exchanged there in every step"
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
            self._outer.anchored,
            self._late is not None,
            number_of(lines),
        )
        table = host.empty(group.size, len(mine), dtype=torch.int64)
        all_gather(table, host.tensor(mine), group=group)
        accounts = [_Account(*row) for row in table.tolist()]
        if any(account.divides for account in accounts):
            raise ValueError("inner_group must be None to go on with another group")
        news = [bool(account.is_new) for account in accounts]
        if any(news):
            numbers = [account.number for account in accounts]
            check_alike(lines, numbers, news, group, "params and options of LocalSGDState")
        return accounts

    def _adopt(self, accounts: Sequence[_Account]) -> None:
        """Makes all ranks count as the one that has made most steps, and gives new ones the rest.

        All ranks must call this.
        """
        others = [account for account in accounts if not account.is_new] or accounts
        if len({account.agreements for account in others}) > 1:
            raise RuntimeError(STEPPED_BY_SOME)
        news = [bool(account.is_new) for account in accounts]
        source = source_among(news)
        if any(news):
            anchored = any(account.anchored for account in others)
            self._outer.hand_on(source, self._is_new, anchored, self.group)
        self.steps = max(account.steps for account in accounts)
        self._pending = max(account.pending for account in accounts)
        self._owed = any(account.owed for account in accounts)
        self.agreements = accounts[source].agreements
        counts = any(account.pending and not account.came_late for account in others)
        self._came_late = counts and (self._is_new or self._came_late)
        self._is_new = False

    def _check_not_shown(self) -> None:
        if self._shown:
            raise RuntimeError("this must not be called inside of outer_parameters()")

    def before_step(self, number: int) -> None:
        """Runs before each step of the optimizer with this number."""
        self._check_not_shown()
        if number in self._stepped:
            raise RuntimeError(
                "step() of the LocalSGDState must be called after every step of the optimizer"
            )
        self._stepped.add(number)
        if self.steps >= self._gradient_steps and not self._outer.anchored:
            self._outer.anchor()

    def _meet(self) -> list[Report]:
        """Exchanges if any rank has made a step; returns every rank's report from before."""
        self._check_not_shown()
        self._optimizers.check(self._parameters)
        if not self._outer.anchored:
            self._outer.anchor()
        reports = compare(self._report(), self.group)
        active = sum(report.pending > 0 for report in reports)
        if active:
            # Local residuals belong to this rank's parameters, so they must not be scaled.
            scaled = 1.0 if self._outer.rule.local_residuals else self.group.size / active
            self._outer.exchange(self._differences, scaled if self._counted else 0.0)
            self._pending, self._came_late = 0, False
            self.agreements += 1
        return reports

    def _report(self) -> Report:
        fingerprint = self._outer.fingerprint()
        options = zlib.crc32(self._options.encode())
        return Report(self.steps, self.period, options, fingerprint, self._counted, self._left)

    @property
    def _counted(self) -> int:
        """The steps of this round, if they count."""
        return 0 if self._came_late else self._pending
