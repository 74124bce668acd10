"""The wrapper and hooks tell where buckets of gradients lie on CUDA, and what that costs."""

from __future__ import annotations

import logging
from unittest import mock

import gpu_nodes
import gpu_ranks
import pytest
import spanning
import torch

import pycomm

pytestmark = pytest.mark.gpu


def explained(
    group: pycomm.Group, compression: pycomm.Compression | None, heap: bool
) -> tuple[set[str], list[str]]:
    """The paths of a wrapper's buckets or, without a heap, of a hook's; and their warnings."""
    net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 100)).cuda()
    state = pycomm.hooks.CommState(compression, net.named_parameters(), group=group)
    assert state.explain().buckets == ()
    model = pycomm.DataParallel(net, state=state) if heap else None
    with mock.patch.object(logging.getLogger("pycomm.group"), "warning") as warning:
        for _ in range(2):
            if model is not None:
                model(torch.ones(2, 200, device="cuda")).sum().backward()
                assert model.explain() == state.explain()
            else:
                state.start(torch.ones(90_400, device="cuda"), list(net.parameters())).wait()
    torch.cuda.synchronize()
    plan = state.explain()
    assert 0 <= sum(bucket.nbytes for bucket in plan.buckets) - 4 * 90_400 < 4096  # padding
    assert all("0.weight" in bucket.parameters for bucket in plan.buckets)
    texts = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return {b.path for b in plan.buckets}, [text for text in texts if "buckets are" in text]


INT8 = pycomm.Int8()
COSTS = {
    "staged": "every byte is copied into the window and back, tile by tile",
    "pinned host memory": "every byte goes to host memory and back, over the device's bus",
}


@pytest.mark.parametrize(
    ("layout", "compression", "heap", "path"),
    [
        (gpu_ranks.PEER, None, True, "in place"),
        (gpu_ranks.PEER, None, False, "staged"),
        (gpu_ranks.PEER, INT8, False, "encoded"),
        (gpu_ranks.PINNED, None, False, "pinned host memory"),
        (gpu_ranks.PINNED, INT8, False, "pinned host memory"),
    ],
)
def test_where_buckets_lie_is_told(
    layout: str, compression: pycomm.Compression | None, heap: bool, path: str
) -> None:
    options = {"cuda_heap_bytes": 4 << 20} if heap else {}
    for rank, (paths, told) in enumerate(
        gpu_ranks.run(2, layout, explained, compression, heap, **options)
    ):
        assert paths == {path}
        wanted = f"rank {rank}: buckets are {path}: {COSTS.get(path)}; see model.explain()"
        assert told == ([wanted] if path in COSTS else [])


def test_where_buckets_between_nodes_lie_is_told() -> None:
    found = gpu_nodes.run([1, 1], explained, None, False)
    assert found == [({"NCCL"}, [])] * 2
    for paths, told in spanning.run([1, 1], explained, None, False):
        assert paths == {"pinned host memory"}
        assert len(told) == 1


def links_of(group: pycomm.Group) -> dict[int, str]:
    pycomm.all_reduce(torch.ones(1000, device="cuda"), group=group)
    torch.cuda.synchronize()
    plan = group.explain(1 << 20, device="cuda")
    assert all(link.bytes_in is None for link in plan.links if link.link.startswith("CUDA"))
    return {link.rank: link.link for link in plan.links}


@pytest.mark.parametrize(
    ("layout", "link"), [(gpu_ranks.PEER, "CUDA IPC o"), (gpu_ranks.PINNED, "pinned host memory")]
)
def test_links_are_named(layout: str, link: str) -> None:
    """Once devices are connected; IPC goes over something or on one device."""
    for rank, found in enumerate(gpu_ranks.run(2, layout, links_of)):
        assert found.keys() == {1 - rank}
        assert found[1 - rank].startswith(link)


def test_links_between_nodes_are_named() -> None:
    """With three ranks on two nodes, the first rank of each node exchanges over NCCL."""
    first, second, third = gpu_nodes.run([2, 1], links_of)
    assert first[1].startswith("CUDA IPC o")
    assert second.keys() == {0}
    assert first[2] == third[0] == "NCCL, which chooses the link"
    assert third.keys() == {0}
