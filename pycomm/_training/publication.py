"""Sends new parameters from their owners to ranks on other nodes.

With a compression, owners send the difference between a parameter's exact values and those that all
ranks see. All ranks add the decoded difference to what they see, so they see the same bits. The
owner keeps what this leaves of the difference in `error`, which is part of the next difference
(Li et al. 2024, "SDP4Bit: toward 4-bit communication quantization in sharded data parallelism").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from pycomm._inputs import host
from pycomm._spanning.collectives import launch
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

    number: int
    work: Work
    rows: torch.Tensor | None  # the encoded differences of all ranks


class Publication:
    """Sends the parameters of all buckets, in the order in which forward needs them.

    Args:
        sharding: the ranks, and the compression of the differences; None sends the parameters
            themselves.
        spreads: the buckets.

    Attributes:
        errors: for each bucket, exact parameters minus those that all ranks see, of this rank's
            block; empty without a compression.
    """

    def __init__(self, sharding: Sharding, spreads: Sequence[Spread]) -> None:
        self._group, self._spreads = sharding.group, spreads
        self._compression = sharding.publish
        self.errors: list[torch.Tensor] = []
        if sharding.publish is not None:
            self.errors = [host.zeros(len(s.own), dtype=torch.float32) for s in spreads]
        self._versions: dict[int, int] = {}  # of parameters, when errors were last updated
        # In a step, what all ranks see of this rank's blocks that it changes, by number.
        self._seen: dict[int, torch.Tensor | None] = {}

    def forget_written(self) -> None:
        """Drops the errors of parameters that others than steps have written."""
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
        seen, self._seen = self._seen, {}
        flights: list[_Flight] = []
        try:
            for number, values in seen.items():
                flights.append(self._start(number, values))
            for flight in flights:
                self._land(flight)
        except BaseException:
            for flight in flights:  # a late one must not write to parameters that are loaded
                with contextlib.suppress(PycommError):
                    flight.work.wait()
            raise

    def end_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """Records that a step has written these parameters."""
        self._versions |= {id(p): p._version for p in stepped}

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
        return _Flight(number, work, rows)

    def _land(self, flight: _Flight) -> None:
        """Waits for a bucket; adds decoded differences to what all ranks see."""
        flight.work.wait()
        if flight.rows is None:
            return
        assert self._compression is not None
        spread = self._spreads[flight.number]
        blocks = spread.whole.view(self._group.size, -1)
        difference = torch.empty(len(spread.own), dtype=torch.float32, device="cpu")
        for row, block in zip(flight.rows, blocks, strict=True):
            block.add_(self._compression.decode(row, len(block), out=difference))
        self.errors[flight.number].sub_(spread.own)


def _alive(spread: Spread) -> list[tuple[torch.Tensor, int, int]]:
    """A bucket's parameters and their ranges."""
    return [(p, begin, end) for ref, begin, end in spread.parameters if (p := ref()) is not None]
