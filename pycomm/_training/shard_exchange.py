"""Exchanges of sharded gradients and parameters, a bucket at a time, between nodes.

Ranks on several nodes cannot write to each other's memory. Backward reduces every block of a bucket
to its owner, as buckets fill; a step updates the block's parameters and sends them to all ranks. An
all-reduce would move the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from pycomm._runtime import host
from pycomm._runtime.host import huge_page_zeros
from pycomm._work import Work, launch
from pycomm.collectives import all_reduce
from pycomm.compressed import compressed_reduce_scatter
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._training.comm_state import CommState
    from pycomm.compression import Compression
    from pycomm.group import Group

# Averages buckets of gradients. A bucket has equal blocks, and every rank gets its own block.
#
# With a compression, all ranks send encoded contributions, and residuals keep the encoding's error.
# Parameters that are sent uncompressed go through one all-reduce, as they are few and small.


class Blocks(NamedTuple):
    """A bucket's gradients, with a block per rank.

    Attributes:
        gradients: flat, padding included.
        own: this rank's block of them.
        begins: where each parameter's gradient begins, by the parameter's id.
        first: the offset of the first element in all buckets together.
    """

    gradients: torch.Tensor
    own: torch.Tensor
    begins: Mapping[int, int]
    first: int


class BucketReduceScatter:
    """The exchange of a wrapper's gradients.

    Args:
        state: has the compression and the residuals.
    """

    def __init__(self, state: CommState) -> None:
        self._state, self._group = state, state.group
        self._works: list[tuple[Work, Callable[[], object]]] = []
        # Gradients that are sent uncompressed, with their places in buckets.
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._residual: torch.Tensor | None = None
        self._sent = 0  # bytes

    def place_residuals(self, buckets: Iterable[Blocks]) -> None:
        """Moves residuals to the places of their gradients."""
        state, buckets = self._state, list(buckets)
        if "residual" not in state._residuals.kinds:
            return
        total = sum(len(bucket.gradients) for bucket in buckets)
        entries = state._parameters.entries
        begins = {
            entries[number].name: bucket.first + begin
            for bucket in buckets
            for number, begin in bucket.begins.items()
        }
        for entry in entries.values():
            if entry.name not in begins:  # its parameter is frozen since, or not exchanged
                begins[entry.name] = total
                total += entry.numel
        self._residual = huge_page_zeros(total, torch.float32, torch.device("cpu"))
        state._residuals.lie_in(self._residual, begins)

    @property
    def compression(self) -> Compression | None:
        """The compression of this step."""
        state = self._state
        return state.compression if state.step >= state._warmup_steps else None

    def start(self, bucket: Blocks, parameters: Sequence[torch.Tensor]) -> None:
        """Starts to average a bucket; every rank gets its block, in place."""
        state = self._state
        dense = [p for p in parameters if state._parameters[p].dense]
        if self.compression is None or len(dense) == len(parameters):
            self._sent += bucket.gradients.nbytes
            work = launch(
                self._group, "reduce_scatter", bucket.gradients, bucket.own, bucket.own.shape,
                "avg", label="gradients to their owners", async_op=True,
            )  # fmt: skip
            self._works.append((work, lambda: None))
            return
        for parameter in dense:
            begin = bucket.begins[id(parameter)]
            place = bucket.gradients[begin : begin + parameter.numel()]
            self._exact.append((place, place.clone()))
            place.zero_()
        self._encode(bucket)

    def finish(self) -> int:
        """Waits until all buckets that were started are averaged.

        Returns:
            The bytes of the buckets as they were sent.
        """
        exact, self._exact = self._exact, []
        if exact:
            self._average([values for _, values in exact])
        works, self._works = self._works, []
        for work, take in works:
            work.wait()
            take()
        for place, values in exact:
            place.copy_(values)
        sent, self._sent = self._sent, 0
        return sent

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Starts to average some gradients uncompressed."""
        flats = {
            tensor.dtype: [t for t in tensors if t.dtype == tensor.dtype] for tensor in tensors
        }
        for members in flats.values():
            flat = torch.cat(members)
            self._sent += flat.nbytes
            work = all_reduce(flat, "avg", group=self._group, deterministic=True, async_op=True)
            self._works.append((work, functools.partial(_split, flat, members)))

    def _encode(self, bucket: Blocks) -> None:
        """Starts to average a bucket with encoded contributions."""
        state, mean, count = self._state, torch.empty_like(bucket.own), len(bucket.gradients)
        assert state.compression is not None
        self._sent += encoded_bytes(state.compression, bucket.gradients)
        residual = self._residual
        if residual is not None:
            state._residuals.note_before(bucket.first, bucket.first + count)
            residual = residual[bucket.first : bucket.first + count]
        work = compressed_reduce_scatter(
            mean, bucket.gradients, state.compression, residual=residual,
            step=state.step - state._warmup_steps, offset=bucket.first, group=self._group,
            async_op=True, tag="gradients to their owners",
        )  # fmt: skip
        self._works.append((work, lambda: bucket.own.copy_(mean)))


def encoded_bytes(compression: Compression | None, bucket: torch.Tensor) -> int:
    """The bytes of a bucket as it is sent."""
    return bucket.nbytes if compression is None else compression.encoded_bytes(len(bucket))


def _split(flat: torch.Tensor, members: Sequence[torch.Tensor]) -> None:
    """Copies a flat tensor back to the tensors that it was made of."""
    begin = 0
    for member in members:
        member.copy_(flat[begin : begin + len(member)])
        begin += len(member)


# Sends new parameters from their owners to ranks on other nodes.
#
# With a compression, the parameters that all ranks see are not exact. The owner sends the
# difference from its exact values. All ranks add the decoded difference, so they see the same bits.
# The owner keeps the encoding's error in `errors`, and the next difference includes it (Li et al.
# 2024, "SDP4Bit: toward 4-bit communication quantization in sharded data parallelism").


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


class _Message(NamedTuple):
    """A bucket on its way."""

    number: int
    work: Work
    rows: torch.Tensor | None  # the encoded differences of all ranks


class ParamAllGather:
    """Sends the parameters of all buckets, in the order in which forward needs them.

    Args:
        group: the ranks.
        compression: compression of the differences; None sends the parameters themselves.
        spreads: the buckets.

    Attributes:
        errors: for this rank's block of each bucket, exact parameters minus the parameters that all
            ranks see; empty without a compression.
    """

    def __init__(
        self, group: Group, compression: Compression | None, spreads: Sequence[Spread]
    ) -> None:
        self._group, self._compression, self._spreads = group, compression, spreads
        self.errors: list[torch.Tensor] = []
        if compression is not None:
            self.errors = [host.zeros(len(s.own), dtype=torch.float32) for s in spreads]
        self._versions: dict[int, int] = {}  # parameter versions when `errors` was last updated
        # In a step: the values that all ranks see of this rank's changed blocks, by bucket.
        self._seen: dict[int, torch.Tensor | None] = {}

    def forget_written(self) -> None:
        """Zeroes the errors of parameters that were written outside of a step."""
        for spread, error in zip(self._spreads, self.errors, strict=False):
            for parameter, begin, end in _alive(spread):
                if self._versions.get(id(parameter)) != parameter._version:
                    error[begin:end] = 0.0
                    self._versions[id(parameter)] = parameter._version

    def begin(self, stepped: Iterable[torch.Tensor]) -> None:
        """Gives this rank's blocks their exact values before a step updates some parameters."""
        ids = set(map(id, stepped))
        self._seen = {}
        for number, spread in enumerate(self._spreads):
            if not ids.isdisjoint(id(p) for p, _, _ in _alive(spread)):
                self._seen[number] = self._make_exact(number)

    def _make_exact(self, number: int) -> torch.Tensor | None:
        """Returns the values that all ranks see of this rank's block, if they are not exact."""
        if not self.errors:
            return None
        spread, error = self._spreads[number], self.errors[number]
        seen = spread.own.clone()
        spread.own.add_(error)
        return seen

    def send(self) -> None:
        """Sends this rank's blocks, and receives the others'."""
        seen, self._seen = self._seen, {}
        flights: list[_Message] = []
        try:
            for number, values in seen.items():
                flights.append(self._start(number, values))
            for flight in flights:
                self._land(flight)
        except BaseException:
            for flight in flights:  # a late one must not overwrite loaded parameters
                with contextlib.suppress(PycommError):
                    flight.work.wait()
            raise

    def end_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """Records that a step has written these parameters."""
        self._versions |= {id(p): p._version for p in stepped}

    def _start(self, number: int, seen: torch.Tensor | None) -> _Message:
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
        return _Message(number, work, rows)

    def _land(self, flight: _Message) -> None:
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
