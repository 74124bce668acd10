"""Output of the codec benchmark: its rows and its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pycomm.bench import report
from pycomm.bench.codec_tasks import CodecSettings, Task
from pycomm.bench.measure import Figures


@dataclass(frozen=True)
class CodecRow:
    """One operation of one codec; the keys of the JSON file.

    Attributes:
        count: number of elements.
        encoded_bytes: bytes of their encoding, header included.
        GBps: bytes that must be read plus bytes that must be written, per time.
        stream: the fastest stream with that mix of reads and writes, in the same rounds.
        stream_percent: our bandwidth over the stream's.
        torch_way: what torch did, for `torch_us`.
        torch_ratio: torch's time over ours.
        wrong: elements.
    """

    codec: str
    operation: str
    device: str
    dtype: str
    count: int
    bytes: int
    encoded_bytes: int
    iterations: int
    time_us: float
    p50_us: float
    p99_us: float
    GBps: float
    stream: str
    stream_GBps: float  # noqa: N815 - the unit
    stream_percent: float
    torch_way: str
    torch_us: float
    torch_ratio: float
    wrong: int


def make_row(
    codec: str,
    task: Task,
    x: torch.Tensor,
    encoded_bytes: int,
    ours: Figures,
    torchs: Figures,
    streams: dict[str, Figures],
    wrong: int,
) -> CodecRow:
    """Makes a row from the measured figures."""
    fastest = min(streams, key=lambda name: streams[name].time_us)
    stream_us = streams[fastest].time_us
    return CodecRow(
        codec=codec,
        operation=task.operation,
        device=x.device.type,
        dtype=str(x.dtype).removeprefix("torch."),
        count=x.numel(),
        bytes=x.nbytes,
        encoded_bytes=encoded_bytes,
        iterations=ours.iterations,
        time_us=round(ours.time_us, 3),
        p50_us=round(ours.p50_us, 3),
        p99_us=round(ours.p99_us, 3),
        GBps=round(task.mix.total / ours.time_us / 1e3, 3),
        stream=fastest,
        stream_GBps=round(task.mix.total / stream_us / 1e3, 3),
        stream_percent=round(100 * stream_us / ours.time_us, 1),
        torch_way=task.torch_way,
        torch_us=round(torchs.time_us, 3),
        torch_ratio=round(torchs.time_us / ours.time_us, 3),
        wrong=wrong,
    )


HEADER = """\
#  elements      type  codec       operation         time       p50       p99    rate  stream  share        torch   torch  #wrong  stream is
#                                                    (us)      (us)      (us)  (GB/s)  (GB/s)    (%)         (us)  / ours"""  # noqa: E501


def preamble(meta: dict[str, Any], settings: CodecSettings) -> str:
    """The lines above the table."""
    where = "one core" if settings.device == "cpu" else torch.cuda.get_device_name()
    lines = [
        f"codecs on {where}; {report.place(meta)}",
        report.versions(meta),
        f"load {meta['load_before']:.2f}",
    ]
    return "\n".join(f"# {line}" for line in lines) + "\n" + HEADER


def format_row(row: CodecRow) -> str:
    """Formats a line of the table."""
    return (
        f"{row.count:11} {row.dtype:>9}  {row.codec:11} {row.operation:10} "
        f"{row.time_us:11.2f} {row.p50_us:9.1f} {row.p99_us:9.1f} "
        f"{row.GBps:7.2f} {row.stream_GBps:7.2f} {row.stream_percent:6.1f} "
        f"{row.torch_us:12.2f} {row.torch_ratio:7.2f} {row.wrong:>7}  {row.stream}"
    )


def compare(rows: list[CodecRow]) -> list[str]:
    """The speed of a selection, in words."""
    return [
        f"{row.codec} {row.dtype}: {row.operation} {row.torch_ratio:.1f} times faster than "
        f"torch.topk, {100 / row.stream_percent:.2f} times a plain read"
        for row in rows
        if row.torch_way == "topk"
    ]
