"""Two copies of each rank's tensors, so that they outlive the rank.

Before a step changes its tensors and the parameters, a rank copies them. After the step, all ranks
decide together whether it counts. So no rank begins a step before the last one is decided, and if
a step does not count, the copies are whole.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm import _C
from pycomm._runtime import host
from pycomm._training.agree import gather_rows
from pycomm.p2p import OWN_TAG, irecv, isend

if TYPE_CHECKING:
    from pycomm.group import Group

_LINE = 64  # bytes


class StateKind(NamedTuple):
    """A tensor of which every rank has a part.

    Attributes:
        dtype: its type.
        counts: each rank's number of elements.
    """

    dtype: torch.dtype
    counts: tuple[int, ...]

    def nbytes(self, rank: int) -> int:
        """The size of a rank's part."""
        return self.counts[rank] * self.dtype.itemsize


class Replicas(ABC):
    """Tensors of all ranks of a group, each in two copies. All ranks make it together.

    Args:
        group: the ranks.
        tensors: this rank's tensors, which are copied.
        kinds: their kinds, the same on all ranks.
        parameters: kinds of the parameters; a rank's steps write its part of each.
        label: further text that must be the same on all ranks.

    Attributes:
        reaches_all: True if every rank has the copies of all ranks.
        tensors: this rank's tensors, flat. Steps change them.
        steps: the number of steps that count.
        copied: the ranks whose parts of parameters this rank copies before a step.

    Raises:
        MemoryError: a rank lacks memory; on all ranks.
        OSError: a rank cannot make or open a file in memory.
        RuntimeError: the ranks have different tensors; on all ranks.
    """

    reaches_all: bool
    tensors: list[torch.Tensor]
    copied: Sequence[int]

    def __init__(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[StateKind],
        parameters: Sequence[StateKind],
        label: str,
    ) -> None:
        self._group, self._rank, self.steps = group, group.rank, 0
        crc = zlib.crc32(repr((list(kinds), list(parameters), label)).encode())
        if len(set(map(tuple, gather_rows([crc], group)))) > 1:  # the same on all ranks
            raise RuntimeError("ranks have optimizer states of different kinds or parameters")
        with contextlib.ExitStack() as until_made:
            error = self._allocate(kinds, parameters, until_made)
            if error is None:
                for memory, tensor in zip(self.tensors, tensors, strict=True):
                    memory.view(tensor.shape).copy_(tensor)
            if not group.should_commit(error is None):
                if isinstance(error, OSError):
                    raise error
                raise MemoryError("a rank lacks memory for replicas of its states") from error
        self._decide()

    @abstractmethod
    def _allocate(
        self,
        kinds: Sequence[StateKind],
        parameters: Sequence[StateKind],
        until_made: contextlib.ExitStack,
    ) -> Exception | None:
        """Allocates `tensors` and their copies; all ranks call this.

        Args:
            kinds: the tensors' kinds.
            parameters: the parameters' kinds.
            until_made: a context that ends once all ranks have called this.

        Returns:
            The error if there is no memory.
        """

    @abstractmethod
    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Copies everything that a step is about to change.

        Args:
            parameters: parts of the parameters of all ranks in `copied`.

        Raises:
            pycomm.GroupUnusable: the group has failed, so the copies of a failed step must stay.
        """

    def end_step(self) -> None:
        """Decides that the step counts; all ranks must call this.

        Raises:
            pycomm.CollectiveError: it does not count on any rank.
        """
        self._decide()
        self.steps += 1

    def _decide(self) -> None:
        """Decides that the present tensors count."""
        self._group.should_commit()

    @property
    @abstractmethod
    def ranks_in_step(self) -> list[int]:
        """The ranks in a step that does not count, of the ranks whose copies this rank has."""

    @abstractmethod
    def of(self, rank: int) -> list[torch.Tensor]:
        """A rank's tensors after the last step that counts, if this rank has a copy of them."""

    @abstractmethod
    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """A rank's parts of parameters before the last step, if this rank has a copy of them."""

    @abstractmethod
    def keepers(self, rank: int) -> list[int]:
        """The ranks that have copies of a rank's tensors, that rank first."""


def places_of(kinds: Sequence[StateKind], rank: int, first: int) -> list[int]:
    """Offsets of a rank's tensors, from `first` on in whole cache lines, and their end."""
    lines = (-(-kind.nbytes(rank) // _LINE) * _LINE for kind in kinds)
    return list(itertools.accumulate(lines, initial=first))


def views_in(
    memory: torch.Tensor, kinds: Sequence[StateKind], rank: int, first: int
) -> list[torch.Tensor]:
    """Views of a rank's tensors in memory, at the offsets of :func:`places_of`."""
    return [
        memory[begin : begin + kind.nbytes(rank)].view(kind.dtype)
        for begin, kind in zip(places_of(kinds, rank, first), kinds, strict=False)
    ]


# Two copies of each rank's tensors, in memory that outlives the rank, on one node.
#
# Every rank makes a file in memory, which all ranks of the node map. It has no name, and lasts as
# long as any rank maps it: when a rank is lost, the others still read its tensors.
#
#     | number of the step that the rank has begun | tensors | tensors and parameters before it |
#
# Before a step, a rank makes the copies, and then writes the step's number. If a rank has begun a
# step that does not count, its copies are valid. Otherwise its tensors are.

_FIRST = 64  # bytes before the tensors, for the number


class _Area:
    """One rank's file.

    Attributes:
        tensors: the rank's tensors.
        former: the tensors before the step that it has begun last.
        parameters: its parts of parameters before that step.
    """

    def __init__(
        self, file: int, rank: int, kinds: Sequence[StateKind], parameters: Sequence[StateKind]
    ) -> None:
        places = places_of([*kinds, *kinds, *parameters], rank, _FIRST)
        self._map = mmap.mmap(file, places[-1])  # lives as long as any of the tensors
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        views = views_in(memory, [*kinds, *kinds, *parameters], rank, _FIRST)
        count = len(kinds)
        self.tensors, self.former = views[:count], views[count : 2 * count]
        self.parameters = views[2 * count :]
        self._begun = memory[:8].view(torch.int64)
        self._now = memory[places[0] : places[count]]
        self._before = memory[places[count] : places[2 * count]]
        self._end = places[count]

    def make_private_in_children(self, file: int) -> None:
        """Makes the tensors private to forked children, as tensors in the window are.

        This lasts as long as any of the tensors, which an optimizer may keep for some time.
        """
        begin, page = self._begun.data_ptr(), os.sysconf("SC_PAGE_SIZE")
        nbytes, file = -(-self._end // page) * page, os.dup(file)
        _C.make_private_in_children(begin, nbytes, file, 0)
        weakref.finalize(self._map, _leave_as_is_in_children, begin, nbytes, file)

    def begin_step(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Copies everything that a step is about to change."""
        self._before.copy_(self._now)
        for former, parameter in zip(self.parameters, parameters, strict=True):
            former.copy_(parameter)
        self._begun.fill_(number + 1)

    def has_begun(self, number: int) -> bool:
        """True if the rank has begun this step."""
        return int(self._begun) == number + 1


class NodeReplicas(Replicas):
    """Replicas of ranks on one node."""

    reaches_all = True

    def _allocate(
        self,
        kinds: Sequence[StateKind],
        parameters: Sequence[StateKind],
        until_made: contextlib.ExitStack,
    ) -> Exception | None:
        group, error, own, inode = self._group, None, -1, -1
        self.copied = (self._rank,)
        try:
            nbytes = places_of([*kinds, *kinds, *parameters], self._rank, _FIRST)[-1]
            own = _make_file(nbytes, until_made)
            inode = os.fstat(own).st_ino
        except (OSError, MemoryError) as raised:
            error, own = raised, -(getattr(raised, "errno", None) or errno.ENOMEM)
        told = gather_rows([own, inode], group)
        self._areas: list[_Area] = []
        try:
            for rank, (number, inode) in enumerate(told):
                if number < 0:
                    raise _failure(rank, -number)
                file = _open_file(group._pids[rank], number, inode, until_made)
                self._areas.append(_Area(file, rank, kinds, parameters))
            self._areas[self._rank].make_private_in_children(own)
        except (OSError, MemoryError, RuntimeError) as raised:
            return error or raised
        self.tensors = self._areas[self._rank].tensors
        return error

    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """See :meth:`Replicas.begin_step`."""
        self._group._core.check_usable()
        self._areas[self._rank].begin_step(self.steps, parameters[self._rank])

    @property
    def ranks_in_step(self) -> list[int]:
        """See :attr:`Replicas.ranks_in_step`."""
        return [rank for rank, area in enumerate(self._areas) if area.has_begun(self.steps)]

    def of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.of`."""
        area = self._areas[rank]
        return area.former if area.has_begun(self.steps) else area.tensors

    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.parameters_of`."""
        return self._areas[rank].parameters

    def keepers(self, rank: int) -> list[int]:
        """See :meth:`Replicas.keepers`."""
        return [(rank + number) % self._group.size for number in range(self._group.size)]


def _leave_as_is_in_children(begin: int, nbytes: int, file: int) -> None:
    _C.leave_as_is_in_children(begin, nbytes)
    os.close(file)


def _make_file(nbytes: int, at_end: contextlib.ExitStack) -> int:
    """A file in memory that has no name; `at_end` closes it."""
    file = _C.create_file(nbytes, "pycomm replicas")
    at_end.callback(os.close, file)
    return file


def _failure(rank: int, number: int) -> Exception:
    """The error of a rank that could not make its file, by its errno."""
    what = f"rank {rank} cannot make a file for replicas of its states"
    if number in (errno.ENOMEM, errno.ENOSPC):
        return MemoryError(f"{what}: it lacks memory")
    return OSError(number, f"{what}: {os.strerror(number)}")


def _open_file(pid: int, number: int, inode: int, at_end: contextlib.ExitStack) -> int:
    """Another process's file; `at_end` closes it."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    at_end.callback(os.close, file)
    if os.fstat(file).st_ino != inode:  # the process has failed, and opened another one
        raise OSError(f"process {pid} has closed its replicas")
    return file


# Two copies of each rank's tensors, on several nodes: one on its own, one on another.
#
# Every rank has a buddy, which keeps a copy of its tensors, and is the buddy of one rank, its ward:
#
#     | tensors | the same before the step | the ward's tensors | room for its next ones |
#     | parameters before the step, of this rank and of its ward |
#
# 1. Before a step changes anything, a rank copies its tensors, and the parameters of its ward and
#    itself. Between steps, all ranks have all parameters.
# 2. After the step, it sends its new tensors to its buddy, which keeps the ones before the step.
# 3. All ranks decide together whether the step counts. Then the new tensors replace the old ones.
#
# If a step does not count, a rank goes back to its copies. The parameters may be partly new on
# every rank that has begun the step, so the ranks with copies send them to all.


class InternodeReplicas(Replicas):
    """Replicas of ranks on several nodes. Each rank has copies of its ward's tensors, too."""

    reaches_all = False

    def _allocate(
        self,
        kinds: Sequence[StateKind],
        parameters: Sequence[StateKind],
        until_made: contextlib.ExitStack,  # noqa: ARG002
    ) -> Exception | None:
        self._begun = 0
        self._buddies = buddies(self._group.nodes)
        self._ward = self._buddies.index(self._rank)
        self.copied = (self._rank, self._ward)
        length = max(places_of(kinds, rank, 0)[-1] for rank in range(self._group.size))
        ends = [4 * length]
        for rank in self.copied:
            ends.append(places_of(parameters, rank, ends[-1])[-1])
        try:  # all in one storage, so that memory_report() counts all of it
            memory = host.zeros(ends[-1], dtype=torch.uint8)
        except RuntimeError as raised:  # torch's error if there is no memory
            return raised
        self._now, self._before, *wards = memory[: ends[0]].view(4, length)
        self.tensors = views_in(self._now, kinds, self._rank, 0)
        self._former = views_in(self._before, kinds, self._rank, 0)
        # The ward's last tensors that count, and its next ones, each as bytes and as views.
        self._wards = [(each, views_in(each, kinds, self._ward, 0)) for each in wards]
        self._parameters = {
            rank: views_in(memory, parameters, rank, begin)
            for rank, begin in zip(self.copied, ends, strict=False)
        }
        return None

    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """See :meth:`Replicas.begin_step`."""
        self._group._core.check_usable()
        self._before.copy_(self._now)
        for rank in self.copied:
            for former, parameter in zip(self._parameters[rank], parameters[rank], strict=True):
                former.copy_(parameter)
        self._begun = self.steps + 1

    def _decide(self) -> None:
        self._send()
        super()._decide()
        self._wards.reverse()

    def _send(self) -> None:
        """Sends this rank's tensors to its buddy, and receives the next ones of its ward."""
        buddy = self._buddies[self._rank]
        received = irecv(self._wards[1][0], self._ward, tag=OWN_TAG, group=self._group)
        sent = isend(self._now, buddy, tag=OWN_TAG, group=self._group)
        sent.wait()
        received.wait()

    @property
    def ranks_in_step(self) -> list[int]:
        """See :attr:`Replicas.ranks_in_step`."""
        return list(self.copied) if self._begun > self.steps else []

    def of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.of`."""
        if rank == self._ward:
            return self._wards[0][1]
        assert rank == self._rank
        return self._former if self._begun > self.steps else self.tensors

    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """See :meth:`Replicas.parameters_of`."""
        return self._parameters[rank]

    def keepers(self, rank: int) -> list[int]:
        """See :meth:`Replicas.keepers`."""
        return [rank, self._buddies[rank]]


def buddies(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The buddy of each rank; every rank is the buddy of one rank.

    A buddy is on another node. If a node has more than half of all ranks, some of its ranks have
    their buddy on the same node.
    """
    ranks = [rank for node in nodes for rank in node]
    ahead = max(map(len, nodes))
    found = dict(zip(ranks, ranks[ahead:] + ranks[:ahead], strict=True))
    return [found[rank] for rank in range(len(ranks))]
