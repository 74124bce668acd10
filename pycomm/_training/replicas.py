"""Two copies of each rank's tensors, in memory that outlives the rank, on one node.

Ranks on several nodes keep them otherwise: pycomm/_training/spanning_replicas.py.

The ranks of a node map a file of each of them. It has no name, and lasts as long as any rank maps
it: when a rank is lost, the others still read its tensors.

    | number of the step that the rank has begun | tensors | the same before that step, parameters |

Before a step changes its tensors and the parameters, a rank copies them, and then writes the step's
number. After the step, all ranks decide together whether it counts. So no rank begins a step before
the last one is decided. If a rank has begun a step that does not count, its copy is whole.
Otherwise its tensors are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group

_LINE = 64  # bytes


class Kind(NamedTuple):
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
        places = places_of([*kinds, *kinds, *parameters], rank, _LINE)
        path = f"/proc/self/fd/{file}"
        memory = torch.from_file(path, shared=True, size=places[-1], dtype=torch.uint8)
        views = views_in(memory, [*kinds, *kinds, *parameters], rank, _LINE)
        count = len(kinds)
        self.tensors, self.former = views[:count], views[count : 2 * count]
        self.parameters = views[2 * count :]
        self._begun = memory[:8].view(torch.int64)
        self._now = memory[places[0] : places[count]]
        self._before = memory[places[count] : places[2 * count]]

    def begin_step(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Copies everything that a step is about to change."""
        self._before.copy_(self._now)
        for former, parameter in zip(self.parameters, parameters, strict=True):
            former.copy_(parameter)
        self._begun.fill_(number + 1)

    def has_begun(self, number: int) -> bool:
        """True if the rank has begun this step."""
        return int(self._begun) == number + 1


class Replicas:
    """Tensors of all ranks of a group on one node, each in two copies.

    All ranks make it together.

    Args:
        group: the ranks.
        tensors: this rank's tensors, which are copied.
        kinds: their kinds, the same on all ranks.
        parameters: parameters of which a rank's steps write its part on all ranks.
        label: what else must be alike on all ranks.

    Attributes:
        tensors: this rank's tensors, flat. Steps change them.
        steps: the number of steps that count.
        copied: the ranks whose parts of parameters this rank copies before a step.

    Raises:
        MemoryError: a rank could not share its memory; on all ranks.
        RuntimeError: the ranks have different tensors; on all ranks.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[Kind],
        parameters: Sequence[Kind],
        label: str,
    ) -> None:
        self.steps, self.copied = 0, (group.rank,)
        self._group, self._rank = group, group.rank
        own_bytes = places_of([*kinds, *kinds, *parameters], group.rank, _LINE)[-1]
        with contextlib.ExitStack() as at_end:
            error: Exception | None = None
            own = inode = -1
            try:
                own = _make_file(own_bytes, at_end)
                inode = os.fstat(own).st_ino
            except OSError as raised:
                error = raised
            crc = checksum(kinds, parameters, label)
            told = torch.zeros(group.size, 3, dtype=torch.int64)
            told[group.rank] = torch.tensor([own, inode, crc])
            all_reduce(told, group=group)
            check_same(told[:, 2])
            self._areas: list[_Area] = []
            try:
                for rank, (number, inode, _) in enumerate(told.tolist()):
                    file = _open_file(group._pids[rank], number, inode, at_end)
                    self._areas.append(_Area(file, rank, kinds, parameters))
                self.tensors = self._areas[group.rank].tensors
                for memory, tensor in zip(self.tensors, tensors, strict=True):
                    memory.view(tensor.shape).copy_(tensor)
            except (OSError, RuntimeError) as raised:
                error = error or raised
            ready = group.should_commit(error is None)
        if not ready:
            raise MemoryError("a rank could not share memory for replicas of its states") from error

    def begin_step(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Copies everything that a step is about to change.

        Args:
            parameters: parts of the parameters of all ranks in `copied`.

        Raises:
            pycomm.GroupUnusable: the group has failed, so the copies of a failed step must stay.
        """
        self._group._core.check_usable()
        self._areas[self._rank].begin_step(self.steps, parameters[self._rank])

    def end_step(self) -> None:
        """Decides that the step counts; all ranks must call this.

        Raises:
            pycomm.CollectiveError: it does not count on any rank.
        """
        self._group.should_commit()
        self.steps += 1

    @property
    def ranks_in_step(self) -> list[int]:
        """The ranks that have begun a step that does not count, as far as this one has copies."""
        return [rank for rank, area in enumerate(self._areas) if area.has_begun(self.steps)]

    def of(self, rank: int) -> list[torch.Tensor]:
        """A rank's tensors after the last step that counts."""
        area = self._areas[rank]
        return area.former if area.has_begun(self.steps) else area.tensors

    def parameters_of(self, rank: int) -> list[torch.Tensor]:
        """A rank's parts of parameters, before the step that it has begun last."""
        return self._areas[rank].parameters

    def keepers(self, rank: int) -> list[int]:
        """The ranks that have a rank's tensors, itself first."""
        return [(rank + number) % self._group.size for number in range(self._group.size)]


def places_of(kinds: Sequence[Kind], rank: int, first: int) -> list[int]:
    """Where each tensor of a rank begins behind `first`, in whole cache lines, and their end."""
    lines = (-(-kind.nbytes(rank) // _LINE) * _LINE for kind in kinds)
    return list(itertools.accumulate(lines, initial=first))


def views_in(
    memory: torch.Tensor, kinds: Sequence[Kind], rank: int, first: int
) -> list[torch.Tensor]:
    """A rank's tensors in memory, at these places."""
    return [
        memory[begin : begin + kind.nbytes(rank)].view(kind.dtype)
        for begin, kind in zip(places_of(kinds, rank, first), kinds, strict=False)
    ]


def checksum(kinds: Sequence[Kind], parameters: Sequence[Kind], label: str) -> int:
    """A number that is the same on all ranks if their tensors fit together."""
    return zlib.crc32(repr((list(kinds), list(parameters), label)).encode())


def check_same(checksums: torch.Tensor) -> None:
    """Raises RuntimeError, on all ranks, if ranks have tensors that do not fit together."""
    if not (checksums == checksums[0]).all():
        raise RuntimeError("ranks have optimizer states of different kinds or parameters")


def _make_file(nbytes: int, at_end: contextlib.ExitStack) -> int:
    """A file in memory that has no name; `at_end` closes it."""
    file = os.memfd_create("pycomm replicas", os.MFD_CLOEXEC)
    at_end.callback(os.close, file)
    os.fchmod(file, 0o600)
    os.posix_fallocate(file, 0, nbytes)  # so that lack of memory is an error now
    return file


def _open_file(pid: int, number: int, inode: int, at_end: contextlib.ExitStack) -> int:
    """Another process's file; `at_end` closes it."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    at_end.callback(os.close, file)
    if os.fstat(file).st_ino != inode:  # the process has failed, and opened another one
        raise OSError(f"process {pid} has closed its replicas")
    return file
