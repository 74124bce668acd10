"""The tasks of the codec benchmark: operations, the bytes that they move, and torch's versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import pycomm
from pycomm.bench.streams import Mix

# The number of elements is a multiple of this, so that all blocks are complete.
UNIT = 4096


@dataclass(frozen=True)
class CodecSettings:
    """A whole run, as asked for on the command line; see ``python -m pycomm.bench codec -h``."""

    codecs: tuple[str, ...]
    count: int
    dtypes: tuple[str, ...]
    device: str
    iters: int | None
    json: str | None
    command: str


@dataclass(frozen=True)
class Task:
    """One operation of a codec. All calls work on existing memory.

    Attributes:
        operation: encode, decode, decode_add or select.
        mix: the bytes that it must read and write.
        ours: runs it.
        torch_way: torch's version, in a word.
        by_torch: the same by torch's own operators.
        wrong: elements of ours that are not what torch computes.
    """

    operation: str
    mix: Mix
    ours: Callable[[], object]
    torch_way: str
    by_torch: Callable[[], object]
    wrong: Callable[[], int]


def tasks(compression: pycomm.Compression, x: torch.Tensor) -> list[Task]:
    """All operations of a compression on the elements `x`."""
    if isinstance(compression, pycomm.Int8):
        return _int8(compression, x)
    if isinstance(compression, pycomm.TopK):
        return _topk(compression, x)
    return _cast(compression, x)


class PlainInt8:
    """Blockwise int8, as users would write it in torch."""

    def __init__(self, x: torch.Tensor, block: int) -> None:
        self.x = x.view(-1, block)
        self.scratch = torch.empty_like(self.x, dtype=torch.float32)
        self.scales = self.scratch.new_empty(self.x.shape[0], 1)
        self.integers = torch.empty_like(self.x, dtype=torch.int8)
        self.encode()

    def encode(self) -> None:
        """Computes scales and integers."""
        self.scratch.copy_(self.x).abs_()
        torch.amax(self.scratch, 1, keepdim=True, out=self.scales)
        self.scales.div_(127)
        torch.div(self.x, self.scales, out=self.scratch)
        self.integers.copy_(self.scratch.round_())

    def decode(self, out: torch.Tensor) -> None:
        """Decodes to `out`."""
        out.view_as(self.x).copy_(self.integers).mul_(self.scales)

    def decode_add(self, out: torch.Tensor) -> None:
        """Decodes and adds to `out`."""
        out.view_as(self.x).addcmul_(self.scratch.copy_(self.integers), self.scales)


def _int8(codec: pycomm.Int8, x: torch.Tensor) -> list[Task]:
    n, wire = x.numel(), codec.encode(x)
    plain = PlainInt8(x, codec.block)
    out, total = torch.empty_like(x), torch.zeros_like(x, dtype=torch.float32)

    def wrong(add: bool) -> int:
        """The number of elements with errors above half a scale plus rounding errors."""
        took = total.copy_(x) if add else out
        codec.decode(codec.encode(x, wire), n, took, add=add)
        blocks = x.float().view(-1, codec.block)
        limit = blocks.abs().amax(1, keepdim=True)
        limit *= 1 / 254 + torch.finfo(took.dtype).eps / 2 + 2**-21
        off = (took.float().view_as(blocks) - (2 if add else 1) * blocks).abs()
        return int((~(off <= limit)).sum())

    encoded, dense = wire.numel(), x.nbytes
    return [
        Task("encode", Mix(dense, encoded), lambda: codec.encode(x, wire),
             "quantise", plain.encode, lambda: wrong(False)),
        Task("decode", Mix(encoded, dense), lambda: codec.decode(wire, n, out),
             "dequantise", lambda: plain.decode(out), lambda: wrong(False)),
        Task("decode_add", Mix(encoded + total.nbytes, total.nbytes),
             lambda: codec.decode(wire, n, total, add=True),
             "dequantise and add", lambda: plain.decode_add(total), lambda: wrong(True)),
    ]  # fmt: skip


def _topk(codec: pycomm.TopK, x: torch.Tensor) -> list[Task]:
    n, k, wire = x.numel(), codec.count(x.numel()), codec.encode(x)
    out, magnitudes = torch.empty_like(x), torch.empty_like(x)
    best = (x.new_empty(k), torch.empty(k, dtype=torch.int64, device=x.device))

    def torch_topk() -> None:
        torch.topk(torch.abs(x, out=magnitudes), k, sorted=False, out=best)

    def torch_scatter() -> None:
        out.zero_()[indices] = values

    def wrong_selection() -> int:
        """Counts elements out of order, with wrong values, or smaller than torch's selection."""
        torch_topk()
        found, taken = codec.select(x)
        if len(found) != k or len(taken) != k:
            return k
        ours, theirs = taken.abs().sort().values, best[0].float().sort().values
        disorder = int((found[1:] <= found[:-1]).sum())
        return disorder + int((taken != x[found]).sum()) + int((ours != theirs).sum())

    def wrong_elements() -> int:
        torch_scatter()
        decoded = codec.decode(codec.encode(x, wire), n, dtype=x.dtype)
        return int((decoded != out).sum())

    indices, values = codec.select(x)
    values = values.to(x.dtype)
    read = Mix(x.nbytes, 0)  # what is selected, a small share, is not counted
    return [
        Task("select", read, lambda: codec.select(x), "topk", torch_topk, wrong_selection),
        Task("encode", read, lambda: codec.encode(x, wire), "topk", torch_topk, wrong_elements),
        Task("decode", Mix(wire.numel(), x.nbytes), lambda: codec.decode(wire, n, out),
             "scatter", torch_scatter, wrong_elements),
    ]  # fmt: skip


def _cast(codec: pycomm.Compression, x: torch.Tensor) -> list[Task]:
    n, wire = x.numel(), codec.encode(x)
    out = torch.empty_like(x)
    narrow = x.to(codec.dtype if isinstance(codec, pycomm.Cast) else x.dtype, copy=True)

    def wrong() -> int:
        decoded = codec.decode(codec.encode(x, wire), n, dtype=x.dtype)
        return int((decoded != narrow.to(x.dtype)).sum())

    return [
        Task("encode", Mix(x.nbytes, wire.numel()), lambda: codec.encode(x, wire),
             "to", lambda: narrow.copy_(x), wrong),
        Task("decode", Mix(wire.numel(), x.nbytes), lambda: codec.decode(wire, n, out),
             "to", lambda: out.copy_(narrow), wrong),
    ]  # fmt: skip
