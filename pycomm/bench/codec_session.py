"""A run of the codec benchmark: one process, with one thread on the CPU."""

from __future__ import annotations

import os
from dataclasses import asdict

import torch

import pycomm
from pycomm.bench import codec_report, measure, report
from pycomm.bench.codec_report import CodecRow
from pycomm.bench.codec_tasks import CodecSettings, Task, tasks
from pycomm.bench.contestants import Prepared
from pycomm.bench.streams import streams


def run(settings: CodecSettings) -> None:
    """Measures everything in the settings, prints and writes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meta = report.circumstances(settings.command)
    print(codec_report.preamble(meta, settings), flush=True)
    rows: list[CodecRow] = []
    for name in settings.dtypes:
        x = torch.randn(settings.count, device=settings.device).to(getattr(torch, name))
        for codec in settings.codecs:
            compression = pycomm.parse_compression(codec)
            for task in tasks(compression, x):
                rows.append(_run_task(codec, task, x, settings))
                print(codec_report.format_row(rows[-1]), flush=True)
    meta["load_after"] = os.getloadavg()[0]
    print(f"# load {meta['load_after']:.2f}")
    for line in codec_report.compare(rows):
        print(f"# {line}")
    if settings.json is not None:
        report.write_json(settings.json, meta, map(asdict, rows))


def _run_task(codec: str, task: Task, x: torch.Tensor, settings: CodecSettings) -> CodecRow:
    """Checks an operation, then times it beside torch and the streams."""
    wrong = task.wrong()
    probes = streams(task.mix, settings.device)
    runs = [Prepared(x, x, task.ours), Prepared(x, x, task.by_torch), *probes.values()]
    ours, torchs, *figures = measure.interleave(None, runs, settings.iters)
    encoded_bytes = pycomm.parse_compression(codec).encoded_bytes(x.numel(), x.dtype)
    return codec_report.make_row(
        codec, task, x, encoded_bytes, ours, torchs, dict(zip(probes, figures, strict=True)), wrong
    )
