"""Fused optimizer steps, on the threads of one process: ``python -m pycomm.bench optimizer``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pycomm import optim
from pycomm.bench import peers
from pycomm.bench.report import Column, Results, Settings, TimedRow, cell, spread
from pycomm.bench.streams import Mix, Outcome, Task

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    # The class, options, and the number of states that it keeps with them.
    "adamw": (optim.FusedAdamW, {}, 2),
    "adam": (optim.FusedAdam, {}, 2),
    "sgd": (optim.FusedSGD, {"momentum": 0.9}, 1),
    "lion": (optim.FusedLion, {}, 1),
    "lamb": (optim.FusedLAMB, {}, 2),
}
SMALL = (500, 1 << 10, 100 << 10)  # tensors, elements of the smallest and the largest


@dataclass(frozen=True, kw_only=True)
class OptimizerBenchSettings(Settings):
    """A whole run, as asked for; see ``python -m pycomm.bench optimizer -h``.

    Attributes:
        names: the rules.
        sizes: bytes of all parameters, if they were fp32.
        name: the rule of a case.
        count: the elements of all its parameters.
    """

    names: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    name: str = "adamw"
    count: int = 0
    small: bool = False
    full: bool = False
    peers: tuple[str, ...] = ()
    device: str
    threads: int = 1


@dataclass(frozen=True)
class Scheme:
    """How parameters, gradients and states are stored."""

    dtype: torch.dtype
    options: dict[str, Any]
    master_bytes: int
    state_bytes: float

    def mix(self, name: str, count: int, full: bool) -> Mix:
        """Bytes that a step must read and write."""
        item, states = self.dtype.itemsize, OPTIMIZERS[name][2] * self.state_bytes
        weights = 4 if self.master_bytes == 4 else item + self.master_bytes
        read = item + weights + states
        read += read if name == "lamb" else 0  # a pass for the norms
        read += item if full else 0
        write = item + self.master_bytes + states
        return Mix(int(read * count), int(write * count))


FP16, BF16 = torch.float16, torch.bfloat16
REMAINDER = {"master_weights": "remainder"}
SCHEMES = {
    "fp32": Scheme(torch.float32, {}, 0, 4),
    "fp32_8bit": Scheme(torch.float32, {"states": "8bit"}, 0, 1 + 4 / 256),
    "fp16_master": Scheme(FP16, {"master_weights": "fp32"}, 4, 4),
    "bf16_master": Scheme(BF16, {"master_weights": "fp32"}, 4, 4),
    "bf16_remainder": Scheme(BF16, REMAINDER, 2, 4),
    "bf16_remainder_bf16": Scheme(BF16, {**REMAINDER, "states": "bf16"}, 2, 2),
    "bf16_remainder_8bit": Scheme(BF16, {**REMAINDER, "states": "8bit"}, 2, 1 + 4 / 256),
    "bf16": Scheme(BF16, {"states": "bf16"}, 0, 2),
    "bf16_stochastic": Scheme(BF16, {"states": "bf16", "stochastic_rounding": True}, 0, 2),
}


@dataclass(frozen=True)
class OptimizerRow(TimedRow):
    """One way to step one scheme.

    Attributes:
        impl: pycomm, ``pycomm full`` (unscaling, check and clipping too) or a peer.
        bytes: bytes that pycomm's step moves for this scheme; the same number for peers.
        ns_per_parameter: time per element.
        stream_percent: of the bandwidth of the fastest stream with the same reads and writes.
        ratio: the time over the time of pycomm's plain step in the same rounds.
    """

    optimizer: str
    scheme: str
    impl: str
    device: str
    threads: int
    count: int
    tensors: int
    bytes: int
    ns_per_parameter: float
    GBps: float
    stream_percent: float
    ratio: float

    columns: ClassVar[tuple[Column, ...]] = (
        Column("elements", "", 11, cell("count")),
        Column("tensors", "", 7, cell("tensors"), wide=True),
        Column("optimizer", "", -9, cell("optimizer")),
        Column("scheme", "", -19, cell("scheme")),
        Column("impl", "", -11, cell("impl")),
        Column("B/param", "", 7, lambda row: f"{row.bytes / row.count:.2f}", wide=True),
        Column("ns/param", "", 8, cell("ns_per_parameter", ".3f")),
        Column("GB/s", "", 7, cell("GBps", ".2f"), wide=True),
        Column("share", "(%)", 6, cell("stream_percent", ".1f")),
        Column("ratio", "", 7, cell("ratio", ".3f")),
        *spread(),
    )

    def point(self) -> tuple[str, int, str]:
        """See :meth:`TimedRow.point`."""
        return f"{self.optimizer} {self.scheme} {self.impl}", self.count, "parameters"


def run(settings: OptimizerBenchSettings) -> Results[OptimizerRow]:
    """Measures everything in the settings, prints and writes."""
    torch.set_num_threads(settings.threads)
    results: Results[OptimizerRow] = Results(settings)
    where = "CUDA" if settings.device == "cuda" else f"{settings.threads} threads"
    results.begin(f"optimizers on {where}; {results.place}", OptimizerRow.header(settings.wide))
    sizes = settings.sizes[:1] if settings.small else settings.sizes
    for name, scheme, nbytes in itertools.product(settings.names, settings.schemes, sizes):
        case = replace(settings, name=name, count=max(nbytes // 4, 1))
        task, absent = make_task(scheme, case)
        results.comment(*absent)
        results.add(_rows(task, task.compete(settings, settings.device), case))
    results.end()
    return results


def make_task(name: str, settings: OptimizerBenchSettings) -> tuple[Task, list[str]]:
    """A step of a scheme by every contestant, and the reasons of peers that have none."""
    scheme, absent = SCHEMES[name], []
    contestants = {"pycomm": our_step(settings, scheme, full=False)}
    if settings.full:
        contestants["pycomm full"] = our_step(settings, scheme, full=True)
    for peer in settings.peers:
        try:
            contestants[peer] = peer_step(peer, settings, scheme)
        except (ImportError, ValueError) as error:
            absent.append(f"no {peer}: {error}")
    mix = scheme.mix(settings.name, sum(make_sizes(settings)), full=False)
    return Task(name, mix, contestants), absent


def _rows(task: Task, outcome: Outcome, settings: OptimizerBenchSettings) -> list[OptimizerRow]:
    """A row for every way to step."""
    sizes, rows = make_sizes(settings), []
    count = sum(sizes)
    for impl, figures in outcome.figures.items():
        is_full = impl == "pycomm full"
        moved = SCHEMES[task.name].mix(settings.name, count, is_full).total
        floor_us = outcome.stream_us * moved / task.mix.total
        rows.append(
            OptimizerRow(
                optimizer=settings.name,
                scheme=task.name,
                impl=impl,
                device=settings.device,
                threads=settings.threads,
                count=count,
                tensors=len(sizes),
                bytes=moved,
                ns_per_parameter=round(figures.time_us / count * 1e3, 4),
                GBps=round(moved / figures.time_us / 1e3, 2),
                stream_percent=round(100 * floor_us / figures.time_us, 1),
                ratio=round(figures.time_us / outcome.figures["pycomm"].time_us, 3),
                **figures.columns(),
            )
        )
    return rows


def make_sizes(settings: OptimizerBenchSettings) -> list[int]:
    """The elements of each parameter."""
    if not settings.small:
        return [settings.count]
    tensors, least, most = SMALL
    generator = torch.Generator().manual_seed(0)
    powers = torch.rand(tensors, generator=generator, dtype=torch.float64)
    sizes: list[int] = (least * (most / least) ** powers).long().tolist()
    return sizes


def make_params(settings: OptimizerBenchSettings, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Makes parameters with random gradients."""
    params = []
    torch.manual_seed(0)
    for size in make_sizes(settings):
        values, grad = (torch.randn(size, device=settings.device) for _ in range(2))
        params.append(torch.nn.Parameter(values.to(dtype)))
        params[-1].grad = grad.to(dtype)
    return params


def our_step(settings: OptimizerBenchSettings, scheme: Scheme, full: bool) -> Callable[[], object]:
    """A step; `full`: with unscaling, the check for infinities and clipping."""
    kind, options, _ = OPTIMIZERS[settings.name]
    more: dict[str, Any] = {"max_norm": 1.0} if full else {}
    optimizer = kind(make_params(settings, scheme.dtype), **options, **scheme.options, **more)
    if full:
        optimizer.grad_scale = torch.tensor(2.0, device=settings.device)  # type: ignore[attr-defined]
    return optimizer.step


def peer_step(peer: str, settings: OptimizerBenchSettings, scheme: Scheme) -> Callable[[], object]:
    """A peer's step on the same parameters; raises ImportError or ValueError without one."""
    _, options, _ = OPTIMIZERS[settings.name]
    params = make_params(settings, scheme.dtype)
    return peers.make_optimizer(peer, settings.name, params, options).step
