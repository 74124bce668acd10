"""Traces of training steps: what each rank computed, exchanged and waited for."""

from __future__ import annotations

import gzip
import json
import os
import time
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._chrome_trace import Part, make_trace
from pycomm._given import given_group
from pycomm._inputs import host
from pycomm._runtime.ranges import Range, Watch, watches
from pycomm._runtime.sampler import Sampler
from pycomm.collectives import all_gather, all_reduce

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm.group import Group

_RANK = "{rank}"


class Trace:
    """A running trace, made by :func:`trace`.

    Attributes:
        lost: at the end, the number of operations of this rank that are not in the trace, because
            more than 128 came between two looks at the record.
    """

    def __init__(self, path: str | os.PathLike[str], group: Group) -> None:
        self._path, self._group = os.fspath(path), group
        self._steps: list[float] = []
        self.lost = 0

    def step(self) -> None:
        """Ends a step; the first one begins with the ``with`` block. Call it on all ranks."""
        self._steps.append(time.monotonic())

    def __enter__(self) -> Trace:
        group = self._group
        if group in watches:
            raise ValueError("trace must end before another one of the same group begins")
        Path(self._path.replace(_RANK, str(group.rank))).parent.mkdir(parents=True, exist_ok=True)
        # Large enough for its end to be recorded.
        all_reduce(
            host.zeros(_C.timed_from_bytes // 4, dtype=torch.float32),
            group=group,
            tag="pycomm.trace",
        )
        node = next(index for index, ranks in enumerate(group.nodes) if group.rank in ranks)
        begin = time.monotonic()
        self._steps, self.lost = [], 0
        self._part = Part(
            group.rank, group.size, os.getpid(), node, time.time() - begin, begin, steps=self._steps
        )
        self._watch, self._sampler, self._short_way = Watch(), Sampler(group), group._short_way
        try:
            self._sampler.start()
            group._short_way = None  # it makes no ranges
            watches[group] = self._watch
            self._steps.append(time.monotonic())
        except BaseException:  # interrupted
            self._stop()
            raise
        return self

    def _stop(self) -> None:
        """Ends what the block has begun."""
        watches.pop(self._group, None)
        self._group._short_way = self._short_way
        self._sampler.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._finish_part()
        parts = [self._part]
        try:
            if kind is None:
                parts = self._gather()
        finally:
            self._write(parts)
        if self.lost:  # at the end, because programs may turn warnings into errors
            warnings.warn(
                f"{self.lost} operations of rank {self._part.rank} are not in the trace: they came "
                "faster than it could look",
                stacklevel=2,
            )

    def _finish_part(self) -> None:
        """Completes what this rank has seen."""
        part, sampler, watch = self._part, self._sampler, self._watch
        part.end = time.monotonic()
        if len(part.steps) == 1:
            part.steps.append(part.end)
        part.lost = self.lost = sampler.lost
        part.operations = [sampler.operations[number] for number in sorted(sampler.operations)]
        part.calls = watch.ranges
        for cause, work in watch.launched:
            if work.completed():
                part.runs.append(Range(cause.name, *work.interval(), 0, cause.details))

    def _gather(self) -> list[Part]:
        """Every rank's part; a collective call."""
        group = self._group
        mine = torch.frombuffer(
            bytearray(zlib.compress(json.dumps(asdict(self._part)).encode())), dtype=torch.uint8
        )
        sizes = host.empty(group.size, dtype=torch.int64)
        all_gather(sizes, host.tensor([len(mine)]), group=group, tag="pycomm.trace")
        padded = host.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyone = host.empty(group.size, len(padded), dtype=torch.uint8)
        all_gather(everyone, padded, group=group, tag="pycomm.trace")
        return [
            _parsed(zlib.decompress(bytes(row[:size].tolist())))
            for row, size in zip(everyone, sizes.tolist(), strict=True)
        ]

    def _write(self, parts: list[Part]) -> None:
        """Writes the file, or this rank's own."""
        rank, path = self._part.rank, self._path
        whole = len(parts) == self._part.size
        if whole and rank > 0 and _RANK not in path:
            return
        shown = parts
        if _RANK in path:
            path, shown = path.replace(_RANK, str(rank)), [parts[rank if whole else 0]]
        elif not whole:
            name = Path(path)
            path = str(name.with_name(f"rank{rank}.{name.name}"))
        data = json.dumps(make_trace(parts, shown)).encode()
        Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


def _parsed(text: bytes) -> Part:
    """A part that another rank has sent."""
    told = json.loads(text)
    for kind in ("calls", "runs"):
        told[kind] = [Range(**each) for each in told[kind]]
    return Part(**told)


def trace(path: str | os.PathLike[str], *, group: Group | None = None) -> Trace:
    """Traces the operations of a ``with`` block; all ranks enter and leave it together.

    .. code-block:: python

        with pycomm.trace("trace.json") as trace:
            for batch in batches:
                train(batch)
                trace.step()

    The trace shows on one clock what each rank did: its steps, its calls of pycomm, its buckets,
    and each operation as a wait until the last rank had come, and a transfer. ``ui.perfetto.dev``
    opens it, and so does Holistic Trace Analysis. docs/observing.md tells what is not in it.

    If the block raises, each rank writes what it has seen to a file of its own,
    ``rank0.trace.json`` and so on.

    Args:
        path: the file, in Chrome's trace event format, compressed if the name ends in ``.gz``. Rank
            0 writes it, with all ranks in it. If the name has ``{rank}`` in it, each rank writes
            its own file instead, as Holistic Trace Analysis needs them.
        group: by default the default group.

    Returns:
        The :class:`Trace`, a context manager.

    Raises:
        ValueError: another trace of the group is running.
        OSError: the file cannot be written.
        pycomm.CollectiveError: an operation of the trace itself failed: at the beginning, where
            ranks meet, or at the end, where rank 0 collects what they have seen.
    """
    return Trace(path, given_group(group))
