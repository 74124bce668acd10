"""What can go wrong in a group, as exceptions."""

from __future__ import annotations


class PycommError(RuntimeError):
    """Base of pycomm's own errors. Bad arguments raise ValueError or TypeError instead."""


class CollectiveError(PycommError):
    """An operation failed; the group is of no further use.

    Every rank's next operation raises, if not this one: a rank that had done its part before the
    failure may have seen this operation succeed. :attr:`completed` tells which operations have
    succeeded on all ranks. When the error is raised no other rank touches this rank's tensors any
    more (on CUDA a stopped process may, see docs/cuda.md). What the failed operation was to
    overwrite is undefined.

    Attributes:
        rank: the rank to blame, within the group. All ranks name the same one.
        pid: that rank's process.
        operation: the collective this rank was in, such as ``"all_reduce"``.
        sequence: its number in the group, counted from 1.
        completed: operations up to this number are known to have succeeded on every rank; 0 if
            none is.
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
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.operation = operation
        self.sequence = sequence
        self.completed = completed

    def __reduce__(self) -> tuple[object, ...]:
        """Survives pickling, so that it can cross from a worker process to its parent."""
        return (_rebuild, (type(self), str(self), self.__dict__))


def _rebuild(kind: type[CollectiveError], message: str, state: dict[str, int]) -> CollectiveError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class PeerDied(CollectiveError):
    """A rank can do no more of what others need.

    Its process has ended, it has closed the group, or its function in ``LocalWorld.run`` has
    returned.
    """


class Timeout(CollectiveError):
    """A rank did not answer within the group's timeout.

    The message tells who waited for whom. If the rank to blame waits in another group of this
    node, it tells that, too: often the ranks use the two groups in different orders.
    """


class Mismatch(CollectiveError):
    """Ranks called different operations, or one with different counts, dtypes or options."""


class ProtocolError(CollectiveError):
    """A rank sent bytes that are no message of this group, or not of this version of pycomm."""


class Aborted(CollectiveError):
    """A rank called ``abort()``, or was interrupted in the middle of an operation."""


class NonFinite(PycommError):
    """A gradient had an infinity or a NaN; raised on every rank, and the group goes on."""


class GroupUnusable(PycommError):
    """The group is closed, has failed, or belongs to the parent of this forked process.

    What made it fail is raised first: by the operation, by ``Work.wait()``, or by the next call.
    """
