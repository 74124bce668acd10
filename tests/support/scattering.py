"""Compressed reduce-scatters step by step, as pycomm does them and as the reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import compressing
import numpy as np
import torch
from compressing import Case
from golden_scatter import Scatter

import pycomm


@dataclass
class Step:
    """One rank's tensors after a step."""

    result: torch.Tensor
    residual: torch.Tensor | None


def run(group: pycomm.Group, case: Case, device: str = "cpu") -> list[Step]:
    """One rank's part, all steps. `case.count` is the number of elements of an input."""
    residual = torch.zeros(case.count, device=device) if case.feedback else None
    seen = []
    for step in range(case.steps):
        output = torch.full((case.count // group.size,), 7, dtype=case.dtype, device=device)
        pycomm.compressed_reduce_scatter(
            output,
            case.input(group.rank, step).to(device),
            case.compression,
            residual=residual,
            op=case.op,
            step=step,
            offset=case.offset,
            group=group,
        )
        seen.append(Step(output, None if residual is None else residual.clone()))
    return seen


def check(case: Case, nodes: list[list[int]], run_ranks: Callable[..., list[Any]]) -> None:
    """Every rank's every step, bit for bit. `run_ranks(function, case)` runs it on all ranks."""
    size = sum(map(len, nodes))
    residuals = [np.zeros(case.count, np.float32) for _ in range(size)] if case.feedback else None
    seen = run_ranks(run, case)
    for step in range(case.steps):
        inputs = [case.input(rank, step) for rank in range(size)]
        codec = compressing.codec_of(case.compression, case.dtype, step)
        wanted = Scatter(inputs, nodes, codec, case.op, residuals, case.offset).run()
        for rank in range(size):
            where = f"{case}, nodes {nodes}, step {step}, rank {rank}"
            got = seen[rank][step]
            compressing.compare(f"result: {where}", got.result, wanted[rank])
            if residuals is not None:
                kept = torch.from_numpy(residuals[rank])
                compressing.compare(f"residual: {where}", got.residual, kept)
