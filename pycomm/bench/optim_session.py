"""A run of the optimizer benchmark: one process, on torch's threads."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch

from pycomm.bench import measure, report
from pycomm.bench.contestants import Prepared
from pycomm.bench.measure import Figures
from pycomm.bench.optim_tasks import (
    SCHEMES,
    OptimizerSettings,
    Scheme,
    make_params,
    our_step,
    peer_step,
)
from pycomm.bench.streams import streams


@dataclass(frozen=True)
class OptimizerRow:
    """One way to step one scheme; the keys of the JSON file.

    Attributes:
        impl: pycomm, ``pycomm full`` (unscaling, check and clipping too) or a peer.
        bytes: bytes that pycomm's step moves for this scheme; the same number for peers.
        ns_per_parameter: time per element.
        stream_percent: of the bandwidth of the fastest stream with the same reads and writes.
        ratio: time over that of pycomm's plain step in the same rounds.
    """

    optimizer: str
    scheme: str
    impl: str
    device: str
    threads: int
    count: int
    tensors: int
    bytes: int
    time_us: float
    ns_per_parameter: float
    GBps: float
    stream_percent: float
    ratio: float


HEADER = "#  elements  tensors  optimizer  scheme                impl         B/param  ns/param    GB/s  share(%)   ratio"  # noqa: E501


def run(settings: OptimizerSettings) -> None:
    """Measures everything in the settings, prints and writes."""
    torch.set_num_threads(settings.threads)
    meta = report.circumstances(settings.command)
    where = "CUDA" if settings.device == "cuda" else f"{settings.threads} threads"
    print(f"# optimizers on {where}; {report.place(meta)}")
    print(f"# {report.versions(meta)}\n# load {meta['load_before']:.2f}\n{HEADER}", flush=True)
    rows: list[OptimizerRow] = []
    for name in settings.schemes:
        for row in _run_scheme(name, SCHEMES[name], settings):
            print(_format(row), flush=True)
            rows.append(row)
    meta["load_after"] = os.getloadavg()[0]
    print(f"# load {meta['load_after']:.2f}")
    if settings.json is not None:
        report.write_json(settings.json, meta, map(asdict, rows))


def _run_scheme(name: str, scheme: Scheme, settings: OptimizerSettings) -> list[OptimizerRow]:
    """Times every way to step a scheme, interleaved with streams of as many bytes."""
    calls = {"pycomm": our_step(settings, scheme, full=False)}
    if settings.full:
        calls["pycomm full"] = our_step(settings, scheme, full=True)
    for peer in settings.peers:
        try:
            calls[peer] = peer_step(peer, settings, scheme)
        except (ImportError, ValueError) as error:
            print(f"# no {peer}: {error}")
    sizes = [param.numel() for param in make_params(settings, scheme.dtype)]
    count = sum(sizes)
    probes = list(streams(scheme.mix(settings.name, count, full=False), settings.device).values())
    nothing = torch.empty(0, device=settings.device)
    runs = [*(Prepared(nothing, nothing, call) for call in calls.values()), *probes]
    figures = measure.interleave(None, runs, settings.iters)
    fastest = min(figure.time_us for figure in figures[len(calls) :])
    rows = []
    for impl, figure in zip(calls, figures, strict=False):
        moved = scheme.mix(settings.name, count, full=impl == "pycomm full").total
        rows.append(
            _row(settings, name, impl, moved, (count, len(sizes)), figure, figures[0], fastest)
        )
    return rows


def _row(
    settings: OptimizerSettings,
    scheme: str,
    impl: str,
    moved: int,
    sizes: tuple[int, int],
    figure: Figures,
    ours: Figures,
    stream_us: float,
) -> OptimizerRow:
    count, tensors = sizes
    plain = SCHEMES[scheme].mix(settings.name, count, full=False).total
    return OptimizerRow(
        optimizer=settings.name,
        scheme=scheme,
        impl=impl,
        device=settings.device,
        threads=settings.threads,
        count=count,
        tensors=tensors,
        bytes=moved,
        time_us=round(figure.time_us, 3),
        ns_per_parameter=round(figure.time_us / count * 1e3, 4),
        GBps=round(moved / figure.time_us / 1e3, 2),
        stream_percent=round(100 * moved / plain * stream_us / figure.time_us, 1),
        ratio=round(figure.time_us / ours.time_us, 3),
    )


def _format(row: OptimizerRow) -> str:
    return (
        f"{row.count:11} {row.tensors:8}  {row.optimizer:9}  {row.scheme:20}  {row.impl:12}"
        f"{row.bytes / row.count:8.2f} {row.ns_per_parameter:9.3f} {row.GBps:7.2f} "
        f"{row.stream_percent:9.1f} {row.ratio:7.3f}"
    )
