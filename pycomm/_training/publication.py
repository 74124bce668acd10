"""Sends new parameters from their owners to ranks on other nodes.

With a compression, owners send the difference between a parameter's exact values and those that all
ranks see. All ranks add the decoded difference to what they see, so they see the same bits. The
owner keeps what this leaves of the difference in `error`, which is part of the next difference
(Li et al. 2024, "SDP4Bit: toward 4-bit communication quantization in sharded data parallelism").
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from pycomm._runtime.torch_private import is_transformed
from pycomm._spanning.collectives import launch
from pycomm._training.pending import expect, settle
from pycomm._training.step_guard import StepGuard
from pycomm._work import Work
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._training.shard_options import Sharding


class Spread(NamedTuple):
    """A bucket's parameters, of which each rank owns a block.

    Attributes:
        whole: the parameters, flat, padding included.
        own: this rank's block of them.
        parameters: weak references to the parameters, with their ranges in this rank's block.
    """

    whole: torch.Tensor
    own: torch.Tensor
    parameters: tuple[tuple[TensorWeakRef, int, int], ...]


class _Flight(NamedTuple):
    """A bucket on its way."""

    work: Work
    rows: torch.Tensor | None  # the encoded differences of all ranks


class Publication:
    """Sends the parameters of all buckets, in the order in which forward needs them.

    Args:
        sharding: the ranks, the compression of the differences (None sends the parameters
            themselves), and whether to return before all parameters have arrived. A parameter that
            is on its way waits for itself when anybody uses it.
        spreads: the buckets.
        guard: is told of failures.

    Attributes:
        errors: for each bucket, exact parameters minus those that all ranks see, of this rank's
            block; empty without a compression.
    """

    def __init__(self, sharding: Sharding, spreads: Sequence[Spread], guard: StepGuard) -> None:
        self._group, self._spreads, self._guard = sharding.group, spreads, guard
        self._compression, self._overlaps = sharding.publish, sharding.overlaps
        self.errors: list[torch.Tensor] = []
        if sharding.publish is not None:
            self.errors = [torch.zeros(len(s.own), dtype=torch.float32) for s in spreads]
        self._versions: dict[int, int] = {}  # of parameters, after what is in errors
        # In a step, what all ranks see of this rank's blocks that it changes, by number.
        self._seen: dict[int, torch.Tensor | None] = {}
        self._flights: dict[int, _Flight] = {}  # by the bucket's number
        self._lock = threading.RLock()

    def forget_written(self) -> None:
        """Drops the errors of parameters that others than steps have written."""
        self.finish()
        for spread, error in zip(self._spreads, self.errors, strict=False):
            for parameter, begin, end in _alive(spread):
                if self._versions.get(id(parameter)) != parameter._version:
                    error[begin:end] = 0.0
                    self._versions[id(parameter)] = parameter._version

    def begin(self, stepped: Iterable[torch.Tensor]) -> None:
        """Gives this rank's blocks their exact values, for an update of some parameters."""
        ids = set(map(id, stepped))
        self._seen = {}
        for number, spread in enumerate(self._spreads):
            if not ids.isdisjoint(id(p) for p, _, _ in _alive(spread)):
                self._seen[number] = self._make_exact(number)

    def _make_exact(self, number: int) -> torch.Tensor | None:
        """Returns what all ranks see of this rank's block, if it differs from the exact values."""
        if not self.errors:
            return None
        spread, error = self._spreads[number], self.errors[number]
        seen = spread.own.clone()
        spread.own.add_(error)
        return seen

    def send(self) -> None:
        """Sends this rank's blocks, and receives the others'."""
        for number, seen in self._seen.items():
            self._flights[number] = self._start(number, seen)
        for number in self._seen:
            parameters = _alive(self._spreads[number])
            with self._lock:  # a parameter must not arrive before the bucket's others are expected
                if not (self._overlaps and all(expect(p, self, number) for p, _, _ in parameters)):
                    self.arrive(number)
        self._seen = {}

    def end_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """Records that a step has written these parameters."""
        self._versions |= {id(p): p._version for p in stepped}

    def finish(self) -> None:
        """Waits until all parameters have arrived."""
        for number in list(self._flights):
            self.arrive(number)

    def arrive(self, number: int) -> None:
        """Waits until the parameters of a bucket have arrived."""
        with self._lock:  # any thread may use a parameter
            flight = self._flights.pop(number, None)
            if flight is None:
                return
            try:
                flight.work.wait()
                if flight.rows is not None:
                    _outside(functools.partial(self._add, number, flight.rows))
            except BaseException:
                self._give_up()
                raise
            finally:
                self._settle(number)

    def _give_up(self) -> None:
        """Lets nobody wait for what has not arrived, so that a checkpoint can be loaded."""
        self._guard.step_failed()
        while self._flights:
            number, flight = self._flights.popitem()
            with contextlib.suppress(PycommError):
                flight.work.wait()
            self._settle(number)

    def _settle(self, number: int) -> None:
        for parameter, _, _ in _alive(self._spreads[number]):
            settle(parameter)

    def _start(self, number: int, seen: torch.Tensor | None) -> _Flight:
        """Sends a bucket."""
        group, spread, compression = self._group, self._spreads[number], self._compression
        source, result, rows = spread.own, spread.whole, None
        if compression is not None and seen is not None:
            exact = spread.own.float()
            self.errors[number].copy_(exact)
            source = compression.encode(exact.sub_(seen))
            result = rows = torch.empty(group.size, len(source), dtype=torch.uint8, device="cpu")
            spread.own.copy_(seen)
        work = launch(
            group, "all_gather", source, result, source.shape,
            label="new parameters", async_op=True,
        )  # fmt: skip
        return _Flight(work, rows)

    def _add(self, number: int, rows: torch.Tensor) -> None:
        """Adds decoded differences to what all ranks see."""
        assert self._compression is not None
        spread = self._spreads[number]
        blocks = spread.whole.view(self._group.size, -1)
        difference = torch.empty(len(spread.own), dtype=torch.float32, device="cpu")
        for row, block in zip(rows, blocks, strict=True):
            block.add_(self._compression.decode(row, len(block), out=difference))
        self.errors[number].sub_(spread.own)


def _outside(function: Callable[[], None]) -> None:
    """Calls a function outside of the transforms and traces of this thread."""
    if not is_transformed():
        function()
        return
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


def _alive(spread: Spread) -> list[tuple[torch.Tensor, int, int]]:
    """A bucket's parameters and their ranges."""
    return [(p, begin, end) for ref, begin, end in spread.parameters if (p := ref()) is not None]
