"""The exceptions that operations of a group raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pycomm.report import Report, make_report


class PycommError(RuntimeError):
    """Base of pycomm's own errors. Bad arguments raise ValueError or TypeError instead."""


class ArgumentError(ValueError, RuntimeError):
    """A bad argument of a function of torch.distributed, on the backend ``"pycomm"``.

    Gloo and NCCL raise RuntimeError for it, pycomm's own functions ValueError.
    """


class ArgumentTypeError(TypeError, RuntimeError):
    """A tensor of a dtype that the backend ``"pycomm"`` cannot exchange.

    Gloo and NCCL raise RuntimeError for it, pycomm's own functions TypeError.
    """


class CollectiveError(PycommError, dist.DistBackendError):
    """An operation failed, and the group can no longer be used.

    Every rank's next operation raises, if this one did not: a rank that had done its part before
    the failure may have seen this operation succeed. :attr:`completed` tells which operations have
    succeeded on all ranks. Once the error is raised, no other rank touches this rank's tensors (on
    CUDA a suspended process may, see docs/how-to/cuda.md). The tensors that the failed operation
    was to overwrite are undefined.

    Attributes:
        rank: the rank to blame, within the group. All ranks name the same one.
        pid: the process id of that rank.
        operation: the collective that this rank was running, such as ``"all_reduce"``.
        sequence: the operation's number in the group, counted from 1. All before it have succeeded
            on this rank.
        completed: operations up to this number are known to have succeeded on every rank; 0 if
            none is.
        group: the :attr:`pycomm.Group.title` of the group; empty while the group is being made.
        report: what the ranks of this node did when this one gave up, and their last operations,
            with the parameters of buckets, and what this rank knew of other nodes; None if there is
            none. From Python 3.11 on, tracebacks show its text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        pid: int = -1,
        operation: str = "",
        sequence: int = 0,
        completed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.group = "" if state is None else str(state["group"])
        distinguished = f"; group {self.group}" if "(" in self.group else ""
        super().__init__(message + distinguished)
        self.rank = rank
        self.pid = pid
        self.operation = operation
        self.sequence = sequence
        self.completed = completed
        self.report: Report | None = None
        if state is not None:
            self.report = make_report(state)
            if hasattr(self, "add_note"):
                self.add_note(str(self.report))

    def __reduce__(self) -> tuple[object, ...]:
        """Supports pickling, so that a worker process can pass the error to its parent."""
        return (_rebuild, (type(self), str(self), self.__dict__))


def _rebuild(kind: type[CollectiveError], message: str, state: dict[str, Any]) -> CollectiveError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class PeerDied(CollectiveError):
    """A rank has gone, and others still need it.

    Its process has ended, it has closed the group, or its function in ``LocalWorld.run`` has
    returned.
    """


class Timeout(CollectiveError):
    """A rank did not answer within the group's timeout.

    The message names the ranks that waited and the ranks that they waited for. If the rank to blame
    waits in another group of this node, the message says so: often the ranks use the two groups in
    different orders.
    """


class Mismatch(CollectiveError):
    """Ranks called different operations, or the same with different counts, dtypes or options."""


class ProtocolError(CollectiveError):
    """A rank sent bytes that are no message of this group, or of another version of pycomm."""


class Aborted(CollectiveError):
    """A rank called ``abort()``, or was interrupted in the middle of an operation."""


class NonFinite(PycommError):
    """A gradient had an infinity or a NaN. Raised on every rank; the group remains usable."""


class NotRecoverable(PycommError):
    """:func:`pycomm.recover` cannot complete an operation.

    Raised on every rank; the group remains usable.
    """


class GroupUnusable(PycommError, dist.DistBackendError):
    """The group is closed, has failed, or belongs to the parent of this forked process.

    The original failure is raised first: by the operation, by ``Work.wait()``, or by the next call.
    """
