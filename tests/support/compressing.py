"""Compressed all-reduces step by step, as pycomm does them and as the references say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import golden
import golden_compression as reference
import numpy as np
import torch

import pycomm

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("two_shot", "ring", "tree")


def gradient(dtype: torch.dtype, count: int, rank: int, step: int = 0) -> torch.Tensor:
    """Random numbers with magnitudes that differ between ranges; some zeros, ties and outliers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(count, generator=generator)
    stretch = torch.randint(-6, 4, (count // 100 + 1,), generator=generator).double().exp2()
    values = values * stretch.repeat_interleave(100)[:count].float()
    kind = torch.randint(0, 40, (count,), generator=generator)
    values[kind == 0] = 0
    values[kind == 1] = 0.25
    values[kind == 2] *= 50
    return values.to(dtype)


@dataclass(frozen=True)
class Case:
    """The same compressed all-reduce, step after step."""

    compression: pycomm.Compression
    dtype: torch.dtype = torch.float32
    count: int = 1000
    algorithm: str = "two_shot"
    op: str = "avg"
    feedback: bool = True
    offset: int = 0
    steps: int = 1
    scale: float = 1.0

    def input(self, rank: int, step: int) -> torch.Tensor:
        return gradient(self.dtype, self.count, rank, step) * self.scale


@dataclass
class Step:
    """One rank's tensors after a step."""

    result: torch.Tensor
    residual: torch.Tensor | None
    velocity: torch.Tensor | None
    traffic: tuple[int, int, int] = (0, 0, 0)


def run(group: pycomm.Group, case: Case) -> list[Step]:
    """One rank's part, all steps."""
    residual = torch.zeros(case.count) if case.feedback else None
    velocity = torch.zeros(case.count) if case.compression.momentum else None
    seen = []
    for step in range(case.steps):
        result = pycomm.compressed_all_reduce(
            case.input(group.rank, step),
            case.compression,
            residual=residual,
            velocity=velocity,
            op=case.op,
            algorithm=case.algorithm,
            step=step,
            offset=case.offset,
            group=group,
        )
        kept = [None if t is None else t.clone() for t in (residual, velocity)]
        seen.append(Step(result, *kept, tuple(group.traffic())))
    return seen


def on_device(group: pycomm.Group, case: Case, device: str) -> list[torch.Tensor]:
    """One rank's results, and at the end residual and velocity."""
    feeds = case.feedback or case.compression.momentum > 0
    residual = torch.zeros(case.count, device=device) if feeds else None
    velocity = torch.zeros(case.count, device=device) if case.compression.momentum else None
    seen = [
        pycomm.compressed_all_reduce(
            case.input(group.rank, step).to(device),
            case.compression,
            residual=residual,
            velocity=velocity,
            op=case.op,
            algorithm=case.algorithm,
            step=step,
            offset=case.offset,
            group=group,
        )
        for step in range(case.steps)
    ]
    return [t.cpu() for t in (*seen, residual, velocity) if t is not None]


@dataclass
class Model:
    """The expected results of all ranks, step by step."""

    case: Case
    size: int
    staging_bytes: int = 2 << 20
    residuals: list[np.ndarray] | None = None
    velocities: list[np.ndarray] | None = None
    results: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        def zeros() -> list[np.ndarray]:
            return [np.zeros(self.case.count, np.float32) for _ in range(self.size)]

        if self.case.feedback:
            self.residuals = zeros()
        if self.case.compression.momentum:
            self.velocities = zeros()

    def step(self, step: int) -> torch.Tensor:
        case = self.case
        inputs = [case.input(rank, step) for rank in range(self.size)]
        if isinstance(case.compression, pycomm.TopK):
            k = sent_elements(case.compression, case.count)
            values, momentum = case.compression.values, case.compression.momentum
            return reference.top_k(
                inputs, k, values, case.op, self.residuals, self.velocities, momentum
            )
        work = reference.Reduction(
            inputs,
            codec_of(case.compression, case.dtype, step),
            case.op,
            self.residuals,
            case.offset,
            self.staging_bytes,
        )
        return reference.all_reduced(case.algorithm, work)


def sent_elements(compression: pycomm.TopK, count: int) -> int:
    if compression.k is not None:
        return min(compression.k, count)
    return min(math.ceil(compression.density * count), count)


def codec_of(compression: pycomm.Compression, dtype: torch.dtype, step: int = 0) -> reference.Codec:
    """The reference's codec."""
    if isinstance(compression, pycomm.Int8):
        stochastic = compression.rounding == "stochastic"
        return reference.Int8(compression.block, stochastic, compression.seed, step)
    return reference.Cast(getattr(compression, "dtype", dtype))


def check(case: Case, size: int, staging_bytes: int = 2 << 20) -> None:
    """Compares results, residuals and velocities of all ranks and steps, bit for bit."""
    with pycomm.LocalWorld(size, timeout=60, staging_bytes=staging_bytes) as world:
        seen = world.run(run, case)
    model = Model(case, size, staging_bytes)
    for step in range(case.steps):
        expected = model.step(step)
        for rank in range(size):
            where = f"{case}, step {step}, rank {rank} of {size}, staging_bytes={staging_bytes}"
            got = seen[rank][step]
            compare(f"result: {where}", got.result, expected)
            if model.residuals is not None:
                compare(f"residual: {where}", got.residual, torch.from_numpy(model.residuals[rank]))
            if model.velocities is not None:
                compare(
                    f"velocity: {where}", got.velocity, torch.from_numpy(model.velocities[rank])
                )


def compare(where: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape, where
    assert got.dtype == expected.dtype, where
    wrong = (golden.bits(got) != golden.bits(expected)).nonzero().flatten().tolist()
    assert not wrong, (
        f"{len(wrong)} of {got.numel()} elements are wrong, the first at {wrong[0]}: "
        f"{got[wrong[0]].item()!r} instead of {expected[wrong[0]].item()!r}: {where}"
    )
