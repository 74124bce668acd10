"""Codecs beside torch's operators, in one process: ``python -m pycomm.bench codec``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

import pycomm
from pycomm.bench import verify
from pycomm.bench.report import Column, Results, Settings, TimedRow, cell, human_bytes, spread
from pycomm.bench.streams import Mix, Task

# The number of elements is a multiple of this, so that all blocks are complete.
UNIT = 4096


@dataclass(frozen=True, kw_only=True)
class CodecSettings(Settings):
    """A whole run, as asked for on the command line; see ``python -m pycomm.bench codec -h``."""

    codecs: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    device: str
    check: int


@dataclass(frozen=True)
class CodecTask(Task):
    """encode, decode, decode_add or select, by pycomm and by torch.

    Attributes:
        torch_way: torch's version, in a word.
        count_wrong: counts the elements of pycomm's result that differ from torch's.
    """

    torch_way: str
    count_wrong: Callable[[], int]


@dataclass(frozen=True)
class CodecRow(TimedRow):
    """One operation of one codec.

    Attributes:
        count: number of elements.
        encoded_bytes: bytes of their encoding, header included.
        GBps: bytes that must be read plus bytes that must be written, per time.
        stream: the fastest stream with the same mix of reads and writes, in the same rounds.
        stream_percent: our bandwidth over the stream's.
        torch_way: what torch did, for `torch_us`.
        torch_ratio: torch's time over ours.
        wrong: elements; None if nothing was checked.
    """

    codec: str
    operation: str
    device: str
    dtype: str
    count: int
    bytes: int
    encoded_bytes: int
    GBps: float
    stream: str
    stream_GBps: float  # noqa: N815 - the unit
    stream_percent: float
    torch_way: str
    torch_us: float
    torch_ratio: float
    wrong: int | None

    columns: ClassVar[tuple[Column, ...]] = (
        Column("elements", "", 11, cell("count")),
        Column("type", "", 8, cell("dtype")),
        Column("codec", "", -10, cell("codec")),
        Column("operation", "", -10, cell("operation")),
        Column("time", "(us)", 10, cell("time_us", ".2f")),
        *spread(),
        Column("rate", "(GB/s)", 7, cell("GBps", ".2f"), wide=True),
        Column("stream", "(GB/s)", 7, cell("stream_GBps", ".2f"), wide=True),
        Column("share", "(%)", 6, cell("stream_percent", ".1f")),
        Column("torch", "(us)", 10, cell("torch_us", ".2f"), wide=True),
        Column("torch", "/ ours", 7, cell("torch_ratio", ".2f")),
        Column("#wrong", "", 6, cell("wrong", absent="N/A")),
        Column("stream is", "", -20, cell("stream"), wide=True),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return f"{self.codec} {self.operation} {self.dtype}", self.bytes, "bytes"


def run(settings: CodecSettings) -> Results[CodecRow]:
    """Measures everything in the settings, prints and writes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: Results[CodecRow] = Results(settings)
    where = "one core" if settings.device == "cpu" else torch.cuda.get_device_name()
    results.begin(f"codecs on {where}; {results.place}", CodecRow.header(settings.wide))
    for name, nbytes in itertools.product(settings.dtypes, settings.sizes):
        dtype: torch.dtype = getattr(torch, name)
        count = max(nbytes // dtype.itemsize // UNIT, 1) * UNIT
        x = torch.randn(count, device=settings.device).to(dtype)
        for codec in settings.codecs:
            for task in make_tasks(pycomm.parse_compression(codec), x):
                results.add([_run_task(codec, task, x, settings)])
    results.end(*_compare(results.rows))
    return results


def _run_task(codec: str, task: CodecTask, x: torch.Tensor, settings: CodecSettings) -> CodecRow:
    """Checks an operation, then times it beside torch and the streams."""
    wrong = task.count_wrong() if settings.check else None
    outcome = task.compete(settings, x.device.type)
    ours, torch_us = outcome.figures["pycomm"], outcome.figures["torch"].time_us
    return CodecRow(
        codec=codec,
        operation=task.name,
        device=x.device.type,
        dtype=str(x.dtype).removeprefix("torch."),
        count=x.numel(),
        bytes=x.nbytes,
        encoded_bytes=pycomm.parse_compression(codec).encoded_bytes(x.numel(), x.dtype),
        GBps=round(task.mix.total / ours.time_us / 1e3, 3),
        stream=outcome.stream,
        stream_GBps=round(task.mix.total / outcome.stream_us / 1e3, 3),
        stream_percent=round(100 * outcome.stream_us / ours.time_us, 1),
        torch_way=task.torch_way,
        torch_us=round(torch_us, 3),
        torch_ratio=round(torch_us / ours.time_us, 3),
        wrong=wrong,
        **ours.columns(),
    )


def _compare(rows: list[CodecRow]) -> list[str]:
    """The speed of a selection, in words."""
    return [
        f"{row.codec} {row.dtype} {human_bytes(row.bytes)}: {row.operation} "
        f"{row.torch_ratio:.1f} times faster than torch.topk, "
        f"{100 / row.stream_percent:.2f} times a plain read"
        for row in rows
        if row.torch_way == "topk"
    ]


def make_tasks(compression: pycomm.Compression, x: torch.Tensor) -> list[CodecTask]:
    """All operations of a compression on the elements `x`."""
    if isinstance(compression, pycomm.Int8):
        return _int8_tasks(compression, x)
    if isinstance(compression, pycomm.TopK):
        return _topk_tasks(compression, x)
    return _cast_tasks(compression, x)


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


def _int8_tasks(codec: pycomm.Int8, x: torch.Tensor) -> list[CodecTask]:
    n, wire = x.numel(), codec.encode(x)
    plain = PlainInt8(x, codec.block)
    out, total = torch.empty_like(x), torch.zeros_like(x, dtype=torch.float32)

    def count_wrong(add: bool) -> int:
        return verify.count_far_decoded(codec, x, wire, total if add else out, add)

    encoded, dense = wire.numel(), x.nbytes
    return [
        CodecTask(
            "encode", Mix(dense, encoded),
            {"pycomm": lambda: codec.encode(x, wire), "torch": plain.encode},
            "quantise", lambda: count_wrong(False),
        ),
        CodecTask(
            "decode", Mix(encoded, dense),
            {"pycomm": lambda: codec.decode(wire, n, out), "torch": lambda: plain.decode(out)},
            "dequantise", lambda: count_wrong(False),
        ),
        CodecTask(
            "decode_add", Mix(encoded + total.nbytes, total.nbytes),
            {"pycomm": lambda: codec.decode(wire, n, total, add=True),
             "torch": lambda: plain.decode_add(total)},
            "dequantise and add", lambda: count_wrong(True),
        ),
    ]  # fmt: skip


def _topk_tasks(codec: pycomm.TopK, x: torch.Tensor) -> list[CodecTask]:
    n, k, wire = x.numel(), codec.count(x.numel()), codec.encode(x)
    out, magnitudes = torch.empty_like(x), torch.empty_like(x)
    largest = (x.new_empty(k), torch.empty(k, dtype=torch.int64, device=x.device))

    def torch_topk() -> None:
        torch.topk(torch.abs(x, out=magnitudes), k, sorted=False, out=largest)

    def torch_scatter() -> None:
        out.zero_()[indices] = values

    def count_wrong_selection() -> int:
        torch_topk()
        return verify.count_unselected(codec, x, largest[0])

    def count_wrong_elements() -> int:
        torch_scatter()
        return verify.count_unlike(codec, x, wire, out)

    indices, values = codec.select(x)
    values = values.to(x.dtype)
    read = Mix(x.nbytes, 0)  # what is selected, a small share, is not counted
    return [
        CodecTask("select", read, {"pycomm": lambda: codec.select(x), "torch": torch_topk},
                  "topk", count_wrong_selection),
        CodecTask("encode", read, {"pycomm": lambda: codec.encode(x, wire), "torch": torch_topk},
                  "topk", count_wrong_elements),
        CodecTask("decode", Mix(wire.numel(), x.nbytes),
                  {"pycomm": lambda: codec.decode(wire, n, out), "torch": torch_scatter},
                  "scatter", count_wrong_elements),
    ]  # fmt: skip


def _cast_tasks(codec: pycomm.Compression, x: torch.Tensor) -> list[CodecTask]:
    n, wire = x.numel(), codec.encode(x)
    out = torch.empty_like(x)
    narrow = x.to(codec.dtype if isinstance(codec, pycomm.Cast) else x.dtype, copy=True)

    def count_wrong() -> int:
        return verify.count_unlike(codec, x, wire, narrow.to(x.dtype))

    return [
        CodecTask("encode", Mix(x.nbytes, wire.numel()),
                  {"pycomm": lambda: codec.encode(x, wire), "torch": lambda: narrow.copy_(x)},
                  "to", count_wrong),
        CodecTask("decode", Mix(wire.numel(), x.nbytes),
                  {"pycomm": lambda: codec.decode(wire, n, out),
                   "torch": lambda: out.copy_(narrow)},
                  "to", count_wrong),
    ]  # fmt: skip
