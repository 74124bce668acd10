"""Completing an operation in which a rank was lost: ``preserve=True`` and :func:`recover`.

A preserved operation ends with a decision (csrc/cpu/faults/decision.h). So it succeeds on all
survivors or raises on all of them, and no rank continues while another one needs its result. In the
smaller group, recover() takes these steps:

1. All ranks tell each other which operation failed, and what they have of it.
2. If any ranks hold the result, the first of them broadcasts it. Otherwise, if all contributions
   are intact, the ranks repeat the operation.
3. The ranks decide again. If that fails, all survivors raise, and begin again in the next smaller
   group.

All holders hold the same bits: a rank gets the result from the operation itself, from a holder's
broadcast, or from a repetition. Ranks repeat an operation only all together, and only if none of
them holds the result.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import zlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from pycomm._init import resolve_group
from pycomm._runtime import host
from pycomm._work import Work, launch
from pycomm.errors import CollectiveError, GroupUnusable, Mismatch, NotRecoverable, PycommError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm.group import Group

_FAILURES = (CollectiveError, GroupUnusable)


class _Has(enum.IntEnum):
    """What a rank has of an operation."""

    NOTHING = 0
    CONTRIBUTION = 1
    RESULT = 2
    SUCCEEDED = 3  # the caller has the result, and may have overwritten it


class _Kept:
    """A tensor that the caller must not change for now. Torch counts its own changes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.look()

    def look(self) -> None:
        """Records the tensor's present version."""
        self._version = self._count()

    def changed(self) -> bool:
        return self._count() != self._version

    def _count(self) -> int:
        return 0 if self.tensor.is_inference() else self.tensor._version


class Preserved:
    """An operation that was called with ``preserve=True``, with all that recover() needs."""

    def __init__(
        self,
        group: Group,
        collective: str,
        result: torch.Tensor,
        contribution: torch.Tensor | None,
        given: Any,
        *,
        holds: bool = False,
        **options: Any,
    ) -> None:
        """Prepares the operation.

        Args:
            group: the group that runs it.
            collective: ``"all_reduce"`` or ``"broadcast"``.
            result: receives the result.
            contribution: stays as it is, so that the operation can be repeated; None if it cannot.
            given: the caller's tensor or array for the result.
            holds: True if `result` holds the result already, as on the source of a broadcast.
            options: the operation's options, as for :func:`pycomm._work.launch`.
        """
        if result.device.type != "cpu":
            raise ValueError(f"preserve must be False for tensors on {result.device}, got True")
        if not group._decides:
            raise ValueError("preserve must be False for threads with simulated nodes, got True")
        self.given = given
        self._group = group
        self._collective = collective
        self._options = options
        self._result = _Kept(result)
        self._contribution = None if contribution is None else _Kept(contribution)
        self._holds = holds
        self._succeeded = False
        self._number = next(group._preserved)

    def start(self, source: torch.Tensor, async_op: bool) -> Any:
        """Runs the operation on `source`, or submits it; returns what the caller gets."""
        if not async_op:
            self.settle(lambda: self._run(self._group, source))
            return self.given
        try:
            work = self._run(self._group, source, async_op=True)
        except _FAILURES as error:  # an earlier operation's; other ranks may not know of it yet
            work = Work(None, (), functools.partial(_raise, error))
        self._result.look()
        work._settle = self.settle
        _operations[work] = self
        return work

    def settle(self, run: Callable[[], object]) -> None:
        """Runs the operation, or waits for it; returns if it has succeeded on all ranks."""
        if self._succeeded:
            return
        try:
            self._fill(run)
            if not self._group.should_commit():
                raise Mismatch("a rank called should_commit(False) beside a preserved operation")
        except _FAILURES as error:
            _operations[error] = self
            raise
        self.succeed()

    def succeed(self) -> None:
        """Leaves the result to the caller, and frees the contribution."""
        self._succeeded, self._contribution = True, None

    def find_out(self, work: Work) -> None:
        """Finds out whether `work`, without a wait so far, has completed on this rank."""
        if not (self._succeeded or self._holds or self._result.changed()):
            with contextlib.suppress(*_FAILURES):
                self._fill(work._complete)

    def claim(self) -> list[int]:
        """This rank's message to the others: which operation it is, and what the rank has of it."""
        self._holds = self._holds and not self._result.changed()
        if self._contribution is not None and self._contribution.changed():
            self._contribution = None
        shape, dtype = tuple(self._result.tensor.shape), self._result.tensor.dtype
        kind = self._collective, shape, dtype, self._options.get("op"), self._options.get("root")
        return [self._group._shrunk, self._number, zlib.crc32(repr(kind).encode()), self._has()]

    def finish(self, group: Group, all_have: list[int]) -> str:
        """Gives all ranks the result, or returns why that is impossible, the same on all ranks."""
        if min(all_have) >= _Has.RESULT:
            return ""
        if _Has.RESULT in all_have:
            self._share(group, all_have.index(_Has.RESULT))
            return ""
        contribution = self._contribution
        if contribution is not None and set(all_have) == {_Has.CONTRIBUTION}:
            self._fill(lambda: self._run(group, contribution.tensor))
            return ""
        if self._collective == "broadcast":
            return "the broadcast's source is lost, or has changed its tensor since"
        return "no survivor has the result, and a tensor has been changed since"

    def check_successor(self, group: Group) -> None:
        """Raises ValueError unless `group` has shrunk from the operation's group."""
        if group._origin != self._group._origin or group._shrunk <= self._group._shrunk:
            raise ValueError(
                f"group must come from shrink() of the group in which the operation failed, "
                f"{self._group!r}, got {group!r}"
            )

    def _run(self, group: Group, source: torch.Tensor, async_op: bool = False) -> Any:
        result = self._result.tensor
        return launch(
            group, self._collective, source, result, result.shape,
            async_op=async_op, **self._options,
        )  # fmt: skip

    def _share(self, group: Group, holder: int) -> None:
        """Broadcasts the result. Other holders receive a copy, so they never lose their own."""
        result = self._result.tensor
        aside = self._holds and group.rank != holder
        target = torch.empty_like(result) if aside else result
        self._fill(
            lambda: launch(
                group, "broadcast", target, target, target.shape,
                label=_LABEL, root=holder, async_op=False,
            )
        )  # fmt: skip

    def _fill(self, run: Callable[[], object]) -> None:
        """Runs a function that gives this rank the result, unless it raises."""
        try:
            run()
            self._holds = True
        finally:
            self._result.look()

    def _has(self) -> _Has:
        if self._succeeded:
            return _Has.SUCCEEDED
        if self._holds:
            return _Has.RESULT
        return _Has.NOTHING if self._contribution is None else _Has.CONTRIBUTION


_LABEL = "recover"
_NO_OPERATION = [-1, -1, 0, _Has.NOTHING]
# The operations of errors and works. No attributes, since errors are pickled, but tensors not.
_operations: WeakKeyDictionary[PycommError | Work, Preserved] = WeakKeyDictionary()


def recover(failed: CollectiveError | GroupUnusable | Work, *, group: Group | None = None) -> Any:
    """Completes an operation in which a rank was lost, among the survivors; a collective call.

    The operation must have been called with ``preserve=True``, on the CPU. All survivors first call
    :meth:`Group.shrink`, then this. If a survivor has completed the operation, all get its result.
    If none has, the survivors repeat an all-reduce: a sum then lacks the contributions of the lost
    ranks, and an average divides by the smaller size. All survivors get the same bits, or all
    raise. docs/how-to/recovery.md shows a loop.

    Do not change the operation's tensors between the error and this call. A tensor that torch has
    changed counts as lost; other changes are not noticed.

    Args:
        failed: the error that the operation, ``Work.wait()`` or an earlier :func:`recover` has
            raised; or the operation's :class:`Work`, even without a wait. If several works have
            failed, recover each, in the order of the calls.
        group: what :meth:`Group.shrink` has returned; by default the default group.

    Returns:
        What the operation would have returned: its `out` or `tensor`, with the result.

    Raises:
        TypeError, ValueError: an argument is not as described.
        pycomm.NotRecoverable: the result is lost; on all survivors.
        pycomm.CollectiveError: another rank was lost; on all survivors. Shrink `group` in turn, and
            call this again, with this error or with `failed`.
    """
    if not isinstance(failed, (*_FAILURES, Work)):
        raise TypeError(f"failed must be an error of an operation or a Work, got {failed!r}")
    group = resolve_group(group)
    operation = _operations.get(failed)
    if operation is not None:
        operation.check_successor(group)
        if isinstance(failed, Work):
            operation.find_out(failed)
    try:
        claims = _exchange(group, _NO_OPERATION if operation is None else operation.claim())
        refusal = _disagreement(claims)
        if operation is not None and not refusal:
            refusal = operation.finish(group, [has for *_, has in claims])
        group.should_commit()
    except _FAILURES as error:
        if operation is not None:
            _operations[error] = operation
        raise
    if operation is None or refusal:
        raise NotRecoverable(f"the operation cannot be recovered: {refusal}")
    operation.succeed()
    return operation.given


def _raise(error: Exception) -> None:
    raise error


def _exchange(group: Group, claim: list[int]) -> list[list[int]]:
    """The claims of all ranks."""
    mine = host.tensor(claim)
    everyone = host.empty(group.size, len(claim), dtype=torch.int64)
    launch(group, "all_gather", mine, everyone, mine.shape, label=_LABEL, async_op=False)
    return everyone.tolist()


def _disagreement(claims: list[list[int]]) -> str:
    """Why the ranks' operations are not the same operation; empty if they are."""
    without = [rank for rank, (_, number, _, _) in enumerate(claims) if number < 0]
    if without:
        who = f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))} of the smaller group"
        return f"{who} failed in an operation that was not called with preserve=True"
    if len({tuple(operation) for *operation, _ in claims}) > 1:
        return "the ranks failed in different operations"
    return ""
