"""Copies of each rank's tensors that outlive the rank.

Every rank makes a file in memory, which all ranks of its node map. It has no name, and lasts as
long as any rank maps it: when a rank is lost, the others of its node still read its tensors. If
there are several nodes, every rank also has a buddy on another one, which keeps a copy of its
tensors, and is the buddy of one rank, its ward. On one node, each rank is its own buddy.

    | number of the step that the rank has begun |
    | its tensors | the same before the step | its parameters before the step |
    | its ward's tensors | room for the next ones | the ward's parameters before the step |

1. Before a step, a rank copies its tensors, and the parameters of itself and its ward. Between
   steps, all ranks have all parameters. Then it writes the step's number.
2. After the step, it sends its tensors to its buddy, which keeps the ones before the step.
3. All ranks decide together whether the step counts. So no rank begins a step before the last one
   is decided, and if a step does not count, the copies are whole.

If a rank has begun a step that does not count, its copies are valid. Otherwise its tensors are.
Every rank that has begun the step may have parameters that are partly new. It takes back those that
it reaches copies of; ranks of different nodes send each other the others.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm import _C
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


class Kinds(NamedTuple):
    """What replicas copy: tensors, and each rank's part of the parameters."""

    tensors: Sequence[StateKind]
    parameters: Sequence[StateKind]

    @property
    def copies(self) -> list[StateKind]:
        """The copies of one rank: tensors in two versions, then parameters."""
        return [*self.tensors, *self.tensors, *self.parameters]

    def places(self, rank: int, first: int) -> list[int]:
        """Offsets of a rank's copies, from `first` on in whole cache lines, and their end."""
        lines = (-(-kind.nbytes(rank) // _LINE) * _LINE for kind in self.copies)
        return list(itertools.accumulate(lines, initial=first))

    def nbytes(self, ranks: Iterable[int]) -> int:
        """The size of a file with the copies of these ranks."""
        end = _LINE
        for rank in ranks:
            end = self.places(rank, end)[-1]
        return end


class _Copies:
    """A rank's copies.

    Attributes:
        versions: its tensors in two versions. In its own file these are the present ones and the
            ones before the step; in its buddy's file, those after an even and an odd number of
            steps.
        bytes: the memory of both versions.
        parameters: its parts of parameters before the step.
        end: where the copies end in memory.
    """

    def __init__(self, memory: torch.Tensor, kinds: Kinds, rank: int, first: int) -> None:
        places, count = kinds.places(rank, first), len(kinds.tensors)
        views = [
            memory[begin : begin + kind.nbytes(rank)].view(kind.dtype)
            for begin, kind in zip(places, kinds.copies, strict=False)
        ]
        self.versions = views[:count], views[count : 2 * count]
        self.parameters = views[2 * count :]
        first, middle, last = places[0], places[count], places[2 * count]
        self.bytes = memory[first:middle], memory[middle:last]
        self.end = places[-1]


class _Area:
    """One rank's file.

    Args:
        file: its descriptor.
        ranks: the rank, and its ward if that is another rank.
        kinds: what is copied.

    Attributes:
        own: the rank's own copies.
        copies: all copies, by the rank that they are of.
    """

    def __init__(self, file: int, ranks: Sequence[int], kinds: Kinds) -> None:
        self._map = mmap.mmap(file, kinds.nbytes(ranks))  # lives as long as any of the tensors
        memory, end = torch.frombuffer(self._map, dtype=torch.uint8), _LINE
        self._begun = memory[:8].view(torch.int64)
        self.copies: dict[int, _Copies] = {}
        for rank in ranks:
            self.copies[rank] = _Copies(memory, kinds, rank, end)
            end = self.copies[rank].end
        self.own = self.copies[ranks[0]]

    def make_private_in_children(self, file: int) -> None:
        """Makes the tensors private to forked children, as tensors in the window are.

        This lasts as long as any of the tensors, which an optimizer may keep for some time.
        """
        begin, page = self._begun.data_ptr(), os.sysconf("SC_PAGE_SIZE")
        nbytes, file = -(-(_LINE + self.own.bytes[0].nbytes) // page) * page, os.dup(file)
        _C.make_private_in_children(begin, nbytes, file, 0)
        weakref.finalize(self._map, _leave_as_is_in_children, begin, nbytes, file)

    def begin_step(self, number: int, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Copies everything that a step is about to change."""
        present, before = self.own.bytes
        before.copy_(present)
        for rank, copies in self.copies.items():
            for former, parameter in zip(copies.parameters, parameters[rank], strict=True):
                former.copy_(parameter)
        self._begun.fill_(number + 1)

    def has_begun(self, number: int) -> bool:
        """True if the rank has begun this step."""
        return int(self._begun) == number + 1


class Replicas:
    """Tensors of all ranks of a group, each in several copies. All ranks make it together.

    Args:
        group: the ranks.
        tensors: this rank's tensors, which are copied.
        kinds: the kinds of the tensors and the parameters, the same on all ranks.
        label: further text that must be the same on all ranks.

    Attributes:
        tensors: this rank's tensors, flat. Steps change them.
        steps: the number of steps that count.

    Raises:
        MemoryError: a rank lacks memory; on all ranks.
        OSError: a rank cannot make or open a file in memory.
        RuntimeError: the ranks have different tensors; on all ranks.
    """

    def __init__(
        self, group: Group, tensors: Sequence[torch.Tensor], kinds: Kinds, label: str
    ) -> None:
        self._group, self._rank, self.steps = group, group.rank, 0
        self._buddies = buddies(group.nodes)
        crc = zlib.crc32(repr((kinds, label)).encode())
        if len(set(map(tuple, gather_rows([crc], group)))) > 1:  # the same on all ranks
            raise RuntimeError("ranks have optimizer states of different kinds or parameters")
        self._areas: dict[int, _Area] = {}  # of the ranks of this node
        with contextlib.ExitStack() as until_made:
            error = self._map_files(kinds, until_made)
            if error is None:
                self.tensors = self._areas[self._rank].own.versions[0]
                for memory, tensor in zip(self.tensors, tensors, strict=True):
                    memory.view(tensor.shape).copy_(tensor)
            if not group.should_commit(error is None):
                if isinstance(error, OSError):
                    raise error
                raise MemoryError("a rank lacks memory for replicas of its states") from error
        self._decide(0)

    def _map_files(self, kinds: Kinds, until_made: contextlib.ExitStack) -> Exception | None:
        """Maps the files of all ranks of this node. All ranks call this.

        Args:
            kinds: what is copied.
            until_made: a context that ends once all ranks have called this.

        Returns:
            The error if a rank of any node has none.
        """
        group, error, own, inode = self._group, None, -1, -1
        try:
            own = _make_file(kinds.nbytes(self.copied_by(self._rank)), until_made)
            inode = os.fstat(own).st_ino
        except (OSError, MemoryError) as raised:
            error, own = raised, -(getattr(raised, "errno", None) or errno.ENOMEM)
        told, here = gather_rows([own, inode], group), self._node_of(self._rank)
        try:
            for rank, (number, inode) in enumerate(told):
                if number < 0:
                    raise _failure(rank, -number)
                if rank in here:
                    file = _open_file(group._pids[rank], number, inode, until_made)
                    self._areas[rank] = _Area(file, self.copied_by(rank), kinds)
            self._areas[self._rank].make_private_in_children(own)
        except (OSError, MemoryError, RuntimeError) as raised:
            return error or raised
        return error

    def copied_by(self, rank: int) -> list[int]:
        """The ranks whose copies lie in a rank's file: that rank, and its ward."""
        return list(dict.fromkeys([rank, self._buddies.index(rank)]))

    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Copies everything that a step is about to change.

        Args:
            parameters: the parts of the parameters of the ranks whose copies this rank keeps.

        Raises:
            pycomm.GroupUnusable: the group has failed, so the copies of a failed step must stay.
        """
        self._group._core.check_usable()
        self._areas[self._rank].begin_step(self.steps, parameters)

    def end_step(self) -> None:
        """Decides that the step counts; all ranks must call this.

        Raises:
            pycomm.CollectiveError: it does not count on any rank.
        """
        self._decide(self.steps + 1)

    def _decide(self, steps: int) -> None:
        """Decides that the present tensors count as those after so many steps."""
        self._send(steps)
        self._group.should_commit()
        self.steps = steps

    def _send(self, steps: int) -> None:
        """Sends this rank's tensors to its buddy, and receives those of its ward."""
        area, (*_, ward) = self._areas[self._rank], self.copied_by(self._rank)
        if ward == self._rank:
            return
        room = area.copies[ward].bytes[steps % 2]
        received = irecv(room, ward, tag=OWN_TAG, group=self._group)
        buddy = self._buddies[self._rank]
        sent = isend(area.own.bytes[0], buddy, tag=OWN_TAG, group=self._group)
        sent.wait()
        received.wait()

    # What ranks have copies of.

    @property
    def in_step(self) -> bool:
        """True if this rank has begun a step that does not count."""
        return self._areas[self._rank].has_begun(self.steps)

    @property
    def reaches_all(self) -> bool:
        """True if every rank reaches the files of all ranks."""
        return len(self._areas) == self._group.size

    def parameters_before(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Ranks, and their parts of parameters before a step that does not count."""
        for area in self._areas.values():
            if area.has_begun(self.steps):
                for rank, copies in area.copies.items():
                    yield rank, copies.parameters

    def of(self, rank: int) -> list[torch.Tensor]:
        """A rank's tensors after the last step that counts; this rank is one of its keepers."""
        if rank in self._areas:
            area = self._areas[rank]
            return area.own.versions[area.has_begun(self.steps)]
        return self._areas[self._rank].copies[rank].versions[self.steps % 2]

    def keepers(self, rank: int) -> list[int]:
        """The ranks that reach copies of a rank's tensors, that rank first.

        The other ranks of the buddy's node are none: if the buddy is lost before it begins a step
        that the rank has begun, nobody has the parameters before the step.
        """
        node = self._node_of(rank)
        index = node.index(rank)
        return [*node[index:], *node[:index], self._buddies[rank]]

    def _node_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node."""
        return next(ranks for ranks in self._group.nodes if rank in ranks)


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


def buddies(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The buddy of each rank; every rank is the buddy of one rank.

    A buddy is on another node, and on one node it is the rank itself. If a node has more than half
    of all ranks, some of its ranks have their buddy on the same node.
    """
    ranks = [rank for node in nodes for rank in node]
    ahead = max(map(len, nodes))
    found = dict(zip(ranks, ranks[ahead:] + ranks[:ahead], strict=True))
    return [found[rank] for rank in range(len(ranks))]
