"""The expected results of every compressed all-reduce, computed with numpy without pycomm.

The arithmetic follows docs/reference/wire-format.md and docs/explanation/algorithms.md: everything
is fp32, in the order that is written here. Residuals and velocities are fp32 arrays, one per rank,
and change in place as the ranks' own do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import golden
import numpy as np
import torch

OWNED = 16384  # elements that one owner has before it is the next one's turn
CHUNK = 65536  # of top-k; and of stored int8
RESULT = 0xFFFFFFFF  # the stream of what owners encode
DTYPE_NUMBERS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int8: 6}
NAN = np.uint32(0x7FC00000).view(np.float32)


def magnitude(values: np.ndarray) -> np.ndarray:
    """Orders floats by magnitude, NaN above infinity."""
    return np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To a float type and back."""
    return golden.in_fp32(golden.narrow(np.array(values, dtype=np.float32), dtype)).numpy()


# Random bits.


def philox(counters: np.ndarray, step: int, stream: int, seed: int) -> np.ndarray:
    """Philox4x32-10: a row of four words per counter (Salmon, Moraes, Dror, Shaw 2011)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    counters = np.asarray(counters, dtype=np.uint64)
    words = [counters & low, counters >> shift]
    words += [np.full_like(counters, step), np.full_like(counters, stream)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for turn in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        key, other = (
            np.uint64((k + turn * w) & 0xFFFFFFFF)
            for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        words = [
            second >> shift ^ words[1] ^ key,
            second & low,
            first >> shift ^ words[3] ^ other,
            first & low,
        ]
    return np.stack(words, axis=-1).astype(np.uint32)


def random_bits(index: np.ndarray, step: int, stream: int, seed: int) -> np.ndarray:
    """A run of 64 counters serves 256 elements: word w of counter c the element 64 w + c."""
    run, place = np.divmod(np.asarray(index, dtype=np.int64), 256)
    rows = philox(run * 64 + place % 64, step, stream, seed)
    return rows[np.arange(len(rows)), place // 64]


# Codecs: fp32 values after encoding and decoding. `index` is each value's index in the whole.


@dataclass(frozen=True)
class Int8:
    block: int = 256
    stochastic: bool = False
    seed: int = 0
    step: int = 0

    payload_size = 1

    @property
    def unit(self) -> int:
        """The number of elements that no split divides."""
        return self.block

    def encode(
        self, values: np.ndarray, stream: int, index: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Integers and the scale of each block."""
        blocks = -(-len(values) // self.block)
        padded = np.zeros(blocks * self.block, np.float32)
        padded[: len(values)] = values
        with np.errstate(all="ignore"):
            largest = magnitude(padded).reshape(blocks, self.block).max(1, initial=0)
            largest = largest.view(np.float32)
            scales = largest / np.float32(127)
            usable = np.isfinite(largest) & (scales >= np.finfo(np.float32).tiny)
            inverse = np.where(usable, np.float32(127) / largest, np.float32(0))
            scales = np.where(usable, scales, np.float32(0))
            scales[~np.isfinite(largest)] = NAN
            scaled = padded * np.repeat(inverse, self.block)
        scaled[~np.isfinite(scaled)] = 0  # means nothing beside a NaN
        if self.stochastic:
            scaled = np.clip(scaled, -127, 127)
            below = np.floor(scaled)
            bits = np.zeros(len(padded), np.uint32)
            bits[: len(values)] = random_bits(index, self.step, stream, self.seed)
            chance = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
            whole = below + (chance < scaled - below)
        else:
            whole = np.rint(scaled)
        return whole[: len(values)].astype(np.int8), scales.astype(np.float32)

    def through(self, values: np.ndarray, stream: int, index: np.ndarray) -> np.ndarray:
        whole, scales = self.encode(values, stream, index)
        with np.errstate(all="ignore"):
            return whole.astype(np.float32) * np.repeat(scales, self.block)[: len(whole)]


@dataclass(frozen=True)
class Cast:
    dtype: torch.dtype

    unit = 128

    @property
    def payload_size(self) -> int:
        return self.dtype.itemsize

    def through(self, values: np.ndarray, stream: int, index: np.ndarray) -> np.ndarray:
        del stream, index
        return rounded(values, self.dtype)


Codec = Int8 | Cast


# All-reduces through a codec of blocks. Each rank's part in what is encoded, and what it keeps.


@dataclass
class Reduction:
    """Flat tensors, one per rank, with residuals."""

    inputs: list[torch.Tensor]
    codec: Codec
    op: str = "avg"
    residuals: list[np.ndarray] | None = None
    offset: int = 0
    staging_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        self.size, self.count = len(self.inputs), self.inputs[0].numel()
        self.dtype = self.inputs[0].dtype
        self.divisor = np.float32(self.size if self.op == "avg" else 1)
        self.index = np.arange(self.offset, self.offset + self.count)
        self.result = torch.empty(self.count, dtype=self.dtype)
        with np.errstate(all="ignore"):
            self.own = [golden.widen(x) + 0 for x in self.inputs]
            if self.residuals is not None:
                self.own = [
                    x + residual for x, residual in zip(self.own, self.residuals, strict=True)
                ]
        self.kept = [np.zeros(self.count, np.float32) for _ in self.inputs]

    def pass_on(self, rank: int, values: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The values that other ranks decode from a rank's encoding."""
        sent = self.codec.through(values, rank, self.index[at])
        with np.errstate(all="ignore"):
            self.kept[rank][at] = values - sent
        return sent

    def complete(self, rank: int, total: np.ndarray, at: np.ndarray, again: bool = False) -> None:
        """The result that all ranks get of a sum that a rank completes, in the tensor's type.

        `again`: the rank has encoded its own contribution to it before.
        """
        with np.errstate(all="ignore"):
            mean = total / self.divisor
            made = self.codec.through(mean, RESULT, self.index[at])
            self.result[torch.from_numpy(at)] = golden.narrow(made, self.dtype)
            sent = rounded(made, self.dtype)
            lost = (mean - sent) * self.divisor
            self.kept[rank][at] = self.kept[rank][at] + lost if again else lost

    def finish(self, overflow: bool) -> torch.Tensor:
        if self.residuals is not None and not overflow:
            for residual, kept in zip(self.residuals, self.kept, strict=True):
                residual[:] = kept
        return self.result

    def cut(self, begin: int, count: int, parts: int) -> list[np.ndarray]:
        """As evenly as whole blocks allow, the longer parts first."""
        unit = self.codec.unit
        pieces = np.array_split(np.arange(-(-count // unit)), parts)
        ends = np.minimum(np.cumsum([len(piece) for piece in pieces]) * unit, count)
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        return [np.arange(begin + a, begin + b) for a, b in bounds]

    def slot(self) -> int:
        """Elements of a tile of the ring; half the staging holds four, payload and scales."""
        unit = self.codec.unit
        blocks = self.staging_bytes // 2 // 256 * 256 // (unit * self.codec.payload_size + 4)
        return blocks // golden.SLOTS * unit


def two_shot(work: Reduction, overflow: bool = False) -> torch.Tensor:
    """All ranks encode everything; owners decode, add in rank order and encode the sum."""
    everything = np.arange(work.count)
    sent = [work.pass_on(rank, own, everything) for rank, own in enumerate(work.own)]
    with np.errstate(all="ignore"):
        total = np.array(sent[0])
        for one in sent[1:]:
            total = total + one
    owners = work.index // OWNED % work.size
    for rank in range(work.size):
        at = np.flatnonzero(owners == rank)
        work.complete(rank, total[at], at, again=True)
    return work.finish(overflow)


def ring(work: Reduction, overflow: bool = False) -> torch.Tensor:
    """Chunk c of a tile travels from rank c on; each rank adds its own and encodes the sum."""
    size = work.size
    for begin in range(0, work.count, work.slot()):
        chunks = work.cut(begin, min(work.slot(), work.count - begin), size)
        for chunk, at in enumerate(chunks):
            travelling = work.pass_on(chunk, work.own[chunk][at], at)
            for hop in range(1, size):
                rank = (chunk + hop) % size
                with np.errstate(all="ignore"):
                    total = travelling + work.own[rank][at]
                if hop < size - 1:
                    travelling = work.pass_on(rank, total, at)
                else:
                    work.complete(rank, total, at)
    return work.finish(overflow)


def tree(work: Reduction, overflow: bool = False) -> torch.Tensor:
    """Each half climbs its tree: left child, own, right child; every node encodes its sum."""
    halves = work.cut(0, work.count, 2)
    for root, at in zip(golden.double_tree(work.size), halves, strict=True):

        def gathered(node: golden.Node, at: np.ndarray = at) -> np.ndarray:
            terms = [work.own[node.rank][at]]
            if node.left is not None:
                terms.insert(0, work.pass_on(node.left.rank, gathered(node.left), at))
            if node.right is not None:
                terms.append(work.pass_on(node.right.rank, gathered(node.right), at))
            with np.errstate(all="ignore"):
                total = terms[0]
                for term in terms[1:]:
                    total = total + term
            return total

        work.complete(root.rank, gathered(root), at)
    return work.finish(overflow)


ALGORITHMS: dict[str, Callable[..., torch.Tensor]] = {
    "auto": two_shot,
    "two_shot": two_shot,
    "ring": ring,
    "tree": tree,
}


def all_reduced(algorithm: str, work: Reduction, overflow: bool = False) -> torch.Tensor:
    """The result; residuals change in place unless there is an overflow."""
    return (two_shot if work.size == 1 else ALGORITHMS[algorithm])(work, overflow)


# Top-k.


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest by magnitude, ascending; of equals the first; never a zero."""
    sizes = magnitude(values).astype(np.int64)
    candidates = np.flatnonzero(sizes)
    order = np.lexsort((candidates, -sizes[candidates]))
    return np.sort(candidates[order[:k]])


def through_wire(values: np.ndarray, index: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Values after encoding and decoding; int8 has a scale per chunk of 65,536 elements."""
    if kind != torch.int8:
        return rounded(values, kind)
    sent = np.empty_like(values)
    for chunk in np.unique(index // CHUNK):
        here = index // CHUNK == chunk
        sent[here] = scaled_int8(values[here])[2]
    return sent


def scaled_int8(values: np.ndarray) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Integers with one common scale, and their values."""
    if len(values) == 0:
        return np.zeros(0, np.int8), np.float32(0), values
    whole, scales = Int8(block=len(values)).encode(values, 0, np.zeros(0))
    with np.errstate(all="ignore"):
        return whole, scales[0], whole.astype(np.float32) * scales[0]


@dataclass(frozen=True)
class Regions:
    """The owners of elements, and the number of elements that may be sent."""

    count: int
    size: int
    k: int
    offset: int = 0

    def owner(self, index: np.ndarray) -> np.ndarray:
        return (index // CHUNK + self.offset // CHUNK) % self.size

    def elements(self, owner: int) -> int:
        lengths = [min(CHUNK, self.count - b) for b in range(0, self.count, CHUNK)]
        return sum(lengths[(owner - self.offset // CHUNK) % self.size :: self.size])

    def share(self, owner: int) -> int:
        return -(-self.k * self.elements(owner) // self.count) if self.count else 0

    def capacity(self, owner: int) -> int:
        return min(2 * self.share(owner), self.elements(owner))


def top_k(
    inputs: list[torch.Tensor],
    k: int,
    values: torch.dtype = torch.float32,
    op: str = "avg",
    residuals: list[np.ndarray] | None = None,
    velocities: list[np.ndarray] | None = None,
    momentum: float = 0.0,
    offset: int = 0,
    ranks: int | None = None,
) -> torch.Tensor:
    """Two-shot: ranks send what they select to its owner, who sends what it selects of the sums.

    `ranks`: how many an average is over, if not one per input.
    """
    size, count, dtype = len(inputs), inputs[0].numel(), inputs[0].dtype
    regions = Regions(count, size, k, offset)
    divisor = np.float32((ranks or size) if op == "avg" else 1)
    sums = np.zeros(count, np.float32)
    for rank, x in enumerate(inputs):
        own = golden.widen(x) + 0
        if velocities is not None:
            velocities[rank][:] = np.float32(momentum) * velocities[rank] + own
            own = velocities[rank].copy()
        if residuals is not None:
            own = own + residuals[rank]
            residuals[rank][:] = own
        selected = largest(own, k)
        owners = regions.owner(selected)
        for owner in range(size):
            at = selected[owners == owner]
            at = at[largest(own[at], regions.capacity(owner))]
            sent = through_wire(own[at], at, values)
            sums[at] += sent
            if residuals is not None:
                residuals[rank][at] = own[at] - sent
            if velocities is not None:
                velocities[rank][at] = 0
    result = torch.zeros(count, dtype=dtype)
    everywhere = regions.owner(np.arange(count))
    for owner in range(size):
        found = np.flatnonzero((everywhere == owner) & (sums != 0))
        at = found[largest(sums[found], regions.share(owner))]
        means = sums[at] / divisor
        made = through_wire(means, at, values)
        result[torch.from_numpy(at)] = golden.narrow(made, dtype)
        if residuals is not None:
            dropped = np.setdiff1d(found, at)
            residuals[owner][dropped] += sums[dropped]
            residuals[owner][at] += (means - rounded(made, dtype)) * divisor
    return result


# Bytes that leave the window: a header of 16, then what is encoded.


def header(kind: int, parameter: int, count: int, version: int = 1) -> bytes:
    return struct.pack("<2sBBIq", b"PC", version, kind, parameter, count)


def pad(data: bytes, unit: int) -> bytes:
    return data + bytes(-len(data) % unit)


def int8_wire(x: torch.Tensor, codec: Int8, offset: int = 0) -> bytes:
    values, wire = golden.widen(x), header(2, codec.block, x.numel())
    for begin in range(0, len(values), CHUNK):
        tile = values[begin : begin + CHUNK]
        index = np.arange(offset + begin, offset + begin + len(tile))
        whole, scales = codec.encode(tile, 0, index)
        wire += pad(whole.tobytes(), 16) + scales.tobytes()
    return wire


def cast_wire(x: torch.Tensor, dtype: torch.dtype) -> bytes:
    payload = golden.bits(golden.narrow(golden.widen(x), dtype)).numpy().tobytes()
    return header(1, DTYPE_NUMBERS[dtype], x.numel()) + payload


def top_k_wire(x: torch.Tensor, k: int, kind: torch.dtype = torch.float32) -> bytes:
    """Counts, scales of int8 values, values, indices; with zeros up to the most that k take."""
    values = golden.widen(x)
    at = largest(values, k)
    starts = range(0, len(values), CHUNK)
    parts = [at[at // CHUNK == start // CHUNK] for start in starts]
    counts = np.array([len(part) for part in parts], np.uint32).tobytes()
    indices = b"".join(
        elias_fano(part - start, min(CHUNK, len(values) - start))
        for start, part in zip(starts, parts, strict=True)
    )
    scales = b""
    if kind == torch.int8:
        made = [scaled_int8(values[part]) for part in parts]
        scales = np.array([scale for _, scale, _ in made], np.float32).tobytes()
        payload = b"".join(whole.tobytes() for whole, _, _ in made)
    else:
        payload = golden.bits(golden.narrow(values[at], kind)).numpy().tobytes()
    wire = header(3, DTYPE_NUMBERS[kind], len(values), version=2) + counts + scales
    wire += pad(payload, 4) + indices
    return wire + bytes(top_k_bytes(len(values), min(k, len(values)), kind) - len(wire))


def elias_fano(indices: np.ndarray, count: int) -> bytes:
    """The indices of a chunk of `count` elements, as a number whose bits are the sequence."""
    if not len(indices):
        return b""
    low = (count // len(indices)).bit_length() - 1
    whole = 0
    for i, index in enumerate(indices.tolist()):
        whole |= (index % 2**low) << (i * low)
        whole |= 1 << (len(indices) * low + (index >> low) + i)
    bits = len(indices) * (low + 1) + (count - 1) // 2**low
    return whole.to_bytes(-(-bits // 32) * 4, "little")


def top_k_bytes(count: int, entries: int, kind: torch.dtype) -> int:
    """The greatest length with a header: with entries spread evenly, and whole words per chunk."""
    chunks = -(-count // CHUNK)
    per_chunk = 8 if kind == torch.int8 else 4
    words = 0
    if entries:
        low = min((count // entries).bit_length() - 1, 16)
        bits = entries * (low + 1) + -(-count // 2**low) - chunks
        words = (bits + 31 * min(chunks, entries)) // 32
    return 16 + chunks * per_chunk + -(-entries * kind.itemsize // 4) * 4 + words * 4
