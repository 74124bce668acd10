"""Two copies of each rank's tensors, in memory that outlives the rank, on one node.

The ranks of a node map a file of each of them. It has no name, and lasts as long as any rank maps
it: when a rank is lost, the others still read its tensors.

    | number of the step that the rank has begun | tensors | the same before that step, parameters |

Before a step, a rank makes the copies, and then writes the step's number. If a rank has begun a
step that does not count, its copy is whole. Otherwise its tensors are.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from pycomm import _C
from pycomm._inputs import host
from pycomm._training.replicas import Kind, Replicas, places_of, views_in
from pycomm.collectives import all_reduce

_FIRST = 64  # bytes before the tensors, for the number


class _Area:
    """One rank's file.

    Attributes:
        tensors: the rank's tensors.
        former: the tensors before the step that it has begun last.
        parameters: its parts of parameters before that step.
    """

    def __init__(
        self, file: int, rank: int, kinds: Sequence[Kind], parameters: Sequence[Kind]
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

        This ends with the last tensor. An optimizer may keep them when it has other replicas.
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
    """Of ranks on one node."""

    reaches_all = True

    def _allocate(
        self,
        kinds: Sequence[Kind],
        parameters: Sequence[Kind],
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
        told = host.zeros(group.size, 2, dtype=torch.int64)
        told[self._rank] = host.tensor([own, inode])
        all_reduce(told, group=group)
        self._areas: list[_Area] = []
        try:
            for rank, (number, inode) in enumerate(told.tolist()):
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
    """The error of a rank that could not make its file, by its number."""
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
