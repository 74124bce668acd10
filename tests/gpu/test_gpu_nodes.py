"""Groups that span nodes, over NCCL: the same bits as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import compressing
import gpu_nodes
import pytest
import torch

import pycomm

pytestmark = [pytest.mark.gpu, gpu_nodes.needs_gpus]

COUNTS = (0, 1, 1003, 300_001)
CASES = [
    compressing.Case(pycomm.Int8(), count=200_003, offset=65_536 + 256, steps=2),
    compressing.Case(pycomm.Int8(), torch.bfloat16, count=150_000, op="sum", steps=2),
    compressing.Case(pycomm.TopK(density=0.01), count=400_003, offset=3 << 17, steps=2),
    compressing.Case(pycomm.TopK(density=0.02, momentum=0.9), count=20_000, steps=2),
    compressing.Case(pycomm.Cast(), count=15_000, feedback=False),
]


def collectives(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """On a stream that is not the default one; nothing waits on the host before the end."""
    seen = []
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16):
            x = compressing.gradient(dtype, count, group.rank).to(device)
            for op in ("sum", "avg", "max"):
                seen.append(pycomm.all_reduce(x.clone(), op, group=group))
            seen.append(pycomm.broadcast(x.clone(), group.size - 1, group=group))
            gathered = torch.empty(count * group.size, dtype=dtype, device=device)
            seen.append(pycomm.all_gather(gathered, x, group=group))
            part = torch.empty(count, dtype=dtype, device=device)
            seen.append(pycomm.reduce_scatter(part, gathered.clone(), group=group))
            later = x.clone()
            pycomm.all_reduce(later, group=group, async_op=True).wait()
            seen.append(later)
    return seen


def compressed(group: pycomm.Group, device: str) -> list[torch.Tensor]:
    """Results, and what is left to send."""
    return [kept for case in CASES for kept in compressing.on_device(group, case, device)]


def abandoned(group: pycomm.Group) -> None:
    """A tensor of another stream, which is gone before the operation on it has ended."""
    for _ in range(2):
        given = torch.ones(1003, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pycomm.all_reduce(given, group=group)
        del given
    torch.cuda.synchronize()


def on_both(
    group: pycomm.Group, function: Callable[[pycomm.Group, str], list[torch.Tensor]]
) -> None:
    """Compares a GPU with the CPU."""
    assert group._spans(torch.device("cuda"))  # not through host memory
    with torch.cuda.stream(torch.cuda.Stream()):
        mine = [tensor.cpu() for tensor in function(group, "cuda")]
    wanted = function(group, "cpu")
    for index, (ours, other) in enumerate(zip(mine, wanted, strict=True)):
        assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8)), index


@pytest.mark.parametrize("function", [collectives, compressed])
@pytest.mark.parametrize("nodes", gpu_nodes.LAYOUTS, ids=lambda nodes: "-".join(map(str, nodes)))
def test_bits_of_the_cpu(
    nodes: list[int], function: Callable[[pycomm.Group, str], list[torch.Tensor]]
) -> None:
    gpu_nodes.run(nodes, on_both, function)


def test_memory_waits_for_the_streams_that_use_it() -> None:
    gpu_nodes.run([1, 1], abandoned)
