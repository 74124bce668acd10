"""The table "What runs where" of docs/reference/api.md, for CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_nodes
import gpu_ranks
import matrix
import pytest
import spanning

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("column", "run", "where"),
    [
        ("CUDA, one node", gpu_ranks.run, (matrix.RANKS, gpu_ranks.PEER)),
        pytest.param(
            "CUDA, several nodes, NCCL", gpu_nodes.run, ([2, 1],), marks=gpu_nodes.needs_gpus
        ),
        ("CUDA, several nodes, Gloo", spanning.run, ([2, 1],)),
    ],
)
def test_what_runs_on_cuda(column: str, run: Callable[..., Any], where: tuple[Any, ...]) -> None:
    assert run(*where, matrix.cells, "cuda") == [matrix.documented(column)] * matrix.RANKS
