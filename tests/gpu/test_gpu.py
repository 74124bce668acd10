"""The kernels on a real device: the same bits as the CPU, in every way ranks can be laid out."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import gpu_ranks
import helpers
import pytest
import sweep
import torch

import pycomm
from pycomm._inputs import DTYPES, OPS
from pycomm._runtime import cuda

pytestmark = pytest.mark.gpu

COUNTS = (0, 1, 17, 1000, 4099, 300_007)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's values, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (count,), generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("dtype", "algorithm", "size", "staged"),
    sweep.a_third_of(DTYPES, sweep.ALGORITHMS, gpu_ranks.SIZES, [False, True]),
    ids=str,
)
def test_all_reduce_has_the_bits_of_the_cpu(
    staged: bool, size: int, algorithm: str, dtype: torch.dtype
) -> None:
    """One-shot and two-shot add in rank order on both devices; ring and tree need exact values."""
    in_rank_order = algorithm in ("one_shot", "two_shot")

    @functools.cache
    def inputs(rank: int, count: int) -> torch.Tensor:
        tensor = values(rank, count, dtype)
        whole = tensor.to(torch.float64).round().clamp(-3, 3) + 0.0  # no negative zeros
        return tensor if in_rank_order else whole.to(dtype)

    with pycomm.LocalWorld(size, _stage_always=staged) as world, pycomm.LocalWorld(size) as on_cpu:
        for count in COUNTS:
            for op in OPS:
                if op in ("band", "bor", "bxor") and dtype.is_floating_point:
                    continue
                if not in_rank_order and op == "prod" and size > 4:
                    continue  # 3^8 is no half-precision number

                def body(
                    group: pycomm.Group, device: str, count: int = count, op: str = op
                ) -> torch.Tensor:
                    tensor = inputs(group.rank, count).to(device, copy=True)
                    pycomm.all_reduce(tensor, op, algorithm=algorithm, group=group)
                    return tensor.cpu()

                want = on_cpu.run(body, "cpu")[0]
                for got in world.run(body, "cuda"):
                    assert bits(got) == bits(want), (count, op)


@pytest.mark.parametrize("staged", [False, True], ids=["zero_copy", "staged"])
def test_other_collectives(staged: bool) -> None:
    with pycomm.LocalWorld(4, _stage_always=staged) as world:
        for count in (1, 33, 100_003):

            def body(group: pycomm.Group, count: int = count) -> None:
                whole = torch.arange(4 * count, device="cuda") + group.rank
                block = torch.empty(count, dtype=torch.int64, device="cuda")
                pycomm.reduce_scatter(block, whole, group=group)
                begin = group.rank * count
                want = 4 * torch.arange(begin, begin + count) + 6
                assert torch.equal(block.cpu(), want)
                gathered = torch.empty(4 * count, dtype=torch.int64, device="cuda")
                pycomm.all_gather(gathered, block, group=group)
                assert torch.equal(gathered.cpu(), 4 * torch.arange(4 * count) + 6)
                for src in range(4):
                    tensor = torch.full((count,), group.rank, device="cuda")
                    pycomm.broadcast(tensor, src, group=group)
                    assert torch.equal(tensor.cpu(), torch.full((count,), src))
                    pycomm.reduce(tensor, src, group=group)
                    want = 4 * src if group.rank == src else src
                    assert torch.equal(tensor.cpu(), torch.full((count,), want))
                    everyone = torch.full_like(gathered, -1) if group.rank == src else None
                    pycomm.gather(block, everyone, src, group=group)
                    assert everyone is None or torch.equal(everyone, gathered)
                    received = torch.empty_like(block)
                    pycomm.scatter(received, everyone, src, group=group)
                    assert torch.equal(received, block)
                exchanged = torch.empty_like(gathered)
                pycomm.all_to_all(exchanged, gathered + 1000 * group.rank, group=group)
                senders = 1000 * torch.arange(4).repeat_interleave(count)
                assert torch.equal(exchanged.cpu(), block.cpu().repeat(4) + senders)
                pycomm.barrier(group=group)

            world.run(body)


def test_runs_on_side_streams_and_after_what_is_queued_there() -> None:
    with pycomm.LocalWorld(3) as world:

        def body(group: pycomm.Group) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                tensor = torch.zeros(1 << 20, device="cuda")
                for _ in range(50):
                    tensor += 1
                pycomm.all_reduce(tensor, group=group)
                tensor += 1
                assert torch.equal(tensor.cpu(), torch.full((1 << 20,), 151.0))

        world.run(body)


def test_operations_on_changing_streams_run_one_after_the_other() -> None:
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            streams = [torch.cuda.Stream() for _ in range(3)]
            tensors = [torch.full((1 << 18,), float(k), device="cuda") for k in range(30)]
            torch.cuda.synchronize()
            for k, tensor in enumerate(tensors):
                with torch.cuda.stream(streams[k % 3]):
                    pycomm.all_reduce(tensor, group=group)
            torch.cuda.synchronize()
            for k, tensor in enumerate(tensors):
                assert torch.equal(tensor.cpu(), torch.full((1 << 18,), 2.0 * k))

        world.run(body)


def test_closing_lets_enqueued_work_end() -> None:
    tensors = [torch.ones(1 << 20, device="cuda") for _ in range(2)]
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            tensor = tensors[group.rank]
            for _ in range(200):
                tensor += 1
            pycomm.all_reduce(tensor, group=group)

        world.run(body)
    for tensor in tensors:
        assert torch.equal(tensor.cpu(), torch.full((1 << 20,), 402.0))


def reduce_in_every_way(group: pycomm.Group) -> None:
    total = sum(range(group.size))
    for count in (1, 1000, 300_007):
        for algorithm in ("one_shot", "two_shot", "ring", "tree"):
            tensor = torch.full((count,), float(group.rank), device="cuda")
            pycomm.all_reduce(tensor, algorithm=algorithm, group=group)
            assert tensor.cpu().eq(total).all(), (count, algorithm)
    if group.explain(4, device="cuda").path == gpu_ranks.PEER:
        tensor = group.empty(4099, device="cuda").fill_(group.rank)
        pycomm.all_reduce(tensor, algorithm="two_shot", group=group)
        assert tensor.cpu().eq(total).all()
    reduce_in_the_switch(group)


def reduce_in_the_switch(group: pycomm.Group) -> None:
    x = torch.full((4099,), float(group.rank), device="cuda")
    if os.environ.get(cuda.MULTICAST) != "1" or not gpu_ranks.has_multicast():
        with pytest.raises(ValueError, match=r"algorithm must be .*no multicast address"):
            pycomm.all_reduce(x, algorithm="multicast", group=group)
        with pytest.raises(ValueError, match=r"algorithm must be .*no multicast address"):
            group.explain(4, algorithm="multicast", device="cuda")
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for make in (torch.empty, group.empty):
            x = make(4099, dtype=dtype, device="cuda").fill_(group.rank)
            pycomm.all_reduce(x, "avg", algorithm="multicast", group=group)
            assert x.cpu().eq((group.size - 1) / 2).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pycomm.all_reduce(x, "sum", algorithm="multicast", group=group)
    for _ in range(2):
        graph.replay()
    assert x.cpu().eq((group.size - 1) / 2 * group.size**2).all()
    with pytest.raises(ValueError, match="got max of float16"):
        pycomm.all_reduce(x, "max", algorithm="multicast", group=group)
    assert group.explain(4, algorithm="multicast", device="cuda").algorithm == "multicast"


@pytest.mark.parametrize(
    ("size", "layout"),
    sweep.half_of([2, 4], [gpu_ranks.MULTICAST, gpu_ranks.PINNED, gpu_ranks.ONE_VISIBLE]),
)
def test_processes(size: int, layout: str) -> None:
    """On one GPU they take turns, so this says nothing about speed."""
    gpu_ranks.run(size, layout, reduce_in_every_way, cuda_heap_bytes=4 << 20)


def test_two_groups_at_once() -> None:
    with pycomm.LocalWorld(2) as first, pycomm.LocalWorld(2) as second:

        def body(group: pycomm.Group, other: pycomm.LocalWorld) -> None:
            for k in range(20):
                a = torch.full((5000,), float(k), device="cuda")
                b = torch.full((5000,), float(-k), device="cuda")
                pycomm.all_reduce(a, group=group)
                pycomm.all_reduce(b, group=other.groups[group.rank])
                assert a[0].item() == 2 * k
                assert b[-1].item() == -2 * k

        first.run(body, second)


def test_replays_in_a_graph() -> None:
    with pycomm.LocalWorld(2) as world:
        tensors = [torch.ones(4099, device="cuda") for _ in range(2)]
        graph = gpu_ranks.capture_averages(world, tensors)
        for _ in range(100):
            for rank, tensor in enumerate(tensors):
                tensor.fill_(rank)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(t.cpu(), torch.full((4099,), 0.5)) for t in tensors)


def test_disagreement_is_told_and_the_context_survives() -> None:
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            with pytest.raises(pycomm.Mismatch, match=r"10 elements.*11 elements"):
                pycomm.all_reduce(torch.ones(10 + group.rank, device="cuda"), group=group)
            with pytest.raises(pycomm.GroupUnusable):
                pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)

        world.run(body)
    assert torch.ones(3, device="cuda").sum().item() == 3


def average_forever(x: torch.Tensor, algorithm: str, group: pycomm.Group) -> None:
    while True:
        pycomm.all_reduce(x, "avg", algorithm=algorithm, group=group)


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "tree"])
def test_a_rank_that_raises_has_its_tensor_to_itself(algorithm: str) -> None:
    with pycomm.LocalWorld(2, timeout=20) as world:

        def body(group: pycomm.Group) -> bool:
            x = torch.ones(4 << 20, device="cuda")
            pycomm.all_reduce(x, algorithm=algorithm, group=group)
            if group.rank == 0:
                threading.Timer(0.05, group.abort).start()
            with pytest.raises(pycomm.Aborted) as caught:
                average_forever(x, algorithm, group)
            assert caught.value.rank == 0
            x.fill_(-7)
            time.sleep(0.1)
            return bool((x == -7).all())

        assert world.run(body) == [True, True]


def test_mixed_devices_are_refused() -> None:
    with pycomm.LocalWorld(1) as world:
        group = world.groups[0]
        with pytest.raises(ValueError, match="out must lie on"):
            pycomm.all_reduce(torch.ones(2, device="cuda"), out=torch.ones(2), group=group)


def python_calls(function: Callable[[], object]) -> list[str]:
    """The Python functions that a call runs, without itself."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called[1:]


def calls_of_each(group: pycomm.Group) -> dict[str, list[str]]:
    whole, block = torch.ones(2, group.size, 3, device="cuda")[0], torch.ones(3, device="cuda")
    mine = group.rank == 0
    shared, of_all = group.empty(3, device="cuda").fill_(1), group.empty(6, device="cuda").fill_(1)
    calls = {
        "all_reduce": lambda: pycomm.all_reduce(block, group=group),
        "out": lambda: pycomm.all_reduce(block, "avg", out=shared, group=group),
        "async": lambda: pycomm.all_reduce(block, group=group, async_op=True),
        "reduce": lambda: pycomm.reduce(block, 1, group=group),
        "broadcast": lambda: pycomm.broadcast(block, group=group),
        "reduce_scatter": lambda: pycomm.reduce_scatter(block, whole, group=group),
        "all_gather": lambda: pycomm.all_gather(whole, block, group=group),
        "all_to_all": lambda: pycomm.all_to_all(of_all.clone(), of_all, group=group),
        "gather": lambda: pycomm.gather(shared, whole if mine else None, group=group),
        "scatter": lambda: pycomm.scatter(block, of_all if mine else None, group=group),
    }
    for call in calls.values():
        call()  # loads what is loaded at the first use
    return {name: python_calls(call) for name, call in calls.items()}


def test_an_operation_is_one_call_in_c() -> None:
    with pycomm.LocalWorld(2) as threads:
        called_by_each = threads.run(calls_of_each)
    called_by_each += gpu_ranks.run(2, gpu_ranks.PEER, calls_of_each, cuda_heap_bytes=1 << 20)
    for called in called_by_each:
        assert called.pop("async") == ["__init__", "__del__"]  # of the Work
        assert not any(called.values()), called


def test_a_group_of_one_makes_no_kernels() -> None:
    x, strided = torch.ones(4, device="cuda"), torch.ones(4, 2, device="cuda")[:, 0]
    with pycomm.LocalWorld(1) as world:
        group = world.groups[0]
        version = x._version
        assert python_calls(lambda: pycomm.all_reduce(x, "avg", group=group)) == []
        assert pycomm.broadcast(x, group=group) is x
        assert pycomm.all_reduce(x, group=group, async_op=True).is_completed()
        assert x._version == version + 3
        assert x.tolist() == [1, 1, 1, 1]
        assert group._cuda is None
    for given in (x, strided):  # in C, in Python
        with pytest.raises(pycomm.GroupUnusable, match="closed"):
            pycomm.all_reduce(given, group=group)


def refused_calls() -> dict[str, dict[str, Any]]:
    x = torch.ones(4, device="cuda")
    refused: dict[str, dict[str, Any]] = {
        "op": {"op": "median"},
        "bitwise": {"op": "band"},
        "algorithm": {"algorithm": "star"},
        "order": {"algorithm": "ring", "deterministic": True},
        "switch": {"algorithm": "multicast"},
        "host": {"out": torch.ones(4)},
        "dtype": {"out": x.double()},
        "shape": {"out": x.view(2, 2)},
        "overlap": {"tensor": x[:3], "out": x[1:]},
        "itself": {"tensor": x[:1].expand(4)},
        "gradient": {"tensor": x.clone().requires_grad_()},
        "no tensor": {"tensor": 3},
        "tag": {"tag": 1.5},
        "group": {"group": "group"},
    }
    if torch.cuda.device_count() > 1:
        refused["device"] = {"tensor": torch.ones(4, device="cuda:1")}
    return refused


def test_refusals_are_those_of_the_function_in_python() -> None:
    with pycomm.LocalWorld(2) as world:
        world.run(lambda group: pycomm.all_reduce(torch.ones(4, device="cuda"), group=group))
        for name, given in refused_calls().items():
            arguments = {"tensor": torch.ones(4, device="cuda"), "group": world.groups[0]} | given
            texts = []
            for function in (pycomm.all_reduce, helpers.whole_way()):
                with pytest.raises((ValueError, TypeError)) as caught:
                    function(**arguments)
                texts.append((caught.type, str(caught.value)))
            assert texts[0] == texts[1], name


def freed_at_once(group: pycomm.Group) -> list[float]:
    """The operation runs on another stream than the one that has allocated its tensors."""
    side, kept = torch.cuda.Stream(), torch.ones(COUNTS[3], device="cuda")
    for _ in range(2):
        x, y = torch.ones_like(kept), torch.empty_like(kept)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pycomm.all_reduce(x, out=y, group=group)
            kept.copy_(y)
            del y
        del x
    torch.cuda.current_stream().wait_stream(side)
    return kept.unique().tolist()


def waited_for_elsewhere(group: pycomm.Group, on_side: bool) -> list[float]:
    """A stream runs the operations, and another one waits for each and reads its result."""
    x, strided = torch.ones(4099, device="cuda"), torch.ones(4, 2, device="cuda")
    lists = [torch.empty_like(x) for _ in range(group.size)]
    here = torch.cuda.current_stream()
    runs = torch.cuda.Stream() if on_side else torch.cuda.default_stream()
    reads = torch.cuda.Stream()
    runs.wait_stream(here)
    calls: list[Callable[[], pycomm.Work]] = [
        functools.partial(pycomm.all_reduce, x),
        functools.partial(pycomm.all_reduce, strided[:, 1]),
        functools.partial(pycomm.gather, x, lists if group.rank == 1 else None, 1),
        functools.partial(pycomm.compressed_all_reduce, x, pycomm.Int8()),
    ]
    results = []
    for call in calls:
        with torch.cuda.stream(runs):
            work = call(group=group, async_op=True)
        with torch.cuda.stream(reads):
            work.wait()
            results.append(sum(y.sum().item() for y in (x, strided, *lists[: group.rank])))
        runs.wait_stream(reads)
    here.wait_stream(reads)
    return results


def test_memory_that_streams_share() -> None:
    """The emulated device ends a process whose streams use memory without an order."""
    assert gpu_ranks.run(2, gpu_ranks.PEER, freed_at_once) == [[2], [2]]
    for on_side in (True, False):
        first, second = gpu_ranks.run(2, gpu_ranks.PEER, waited_for_elsewhere, on_side)
        assert first == [2 * 4099 + 8, 2 * 4099 + 12, 2 * 4099 + 12, 2 * 4099 + 12]
        assert second[2:] == [4 * 4099 + 12, 4 * 4099 + 12]


def count_meetings(group: pycomm.Group) -> tuple[int, float]:
    """How often ranks meet for the tiles of 80 MiB, and a result of 1 + 2.

    Lanes count signals in the window's first words. A third operation of the same kind changes the
    others there by at most 2, because announcements have two places.
    """
    x = torch.empty(20 << 20, device="cuda")
    side = group._cuda_side(x.device)
    window, *_ = side._keep
    counted = []
    for _ in range(3):
        x.fill_(1 + group.rank)
        pycomm.all_reduce(x, "sum", algorithm="two_shot", group=group)
        counted.append(window[:4096].view(torch.int32).cpu().long())
    (value,) = x.unique().tolist()
    return int((counted[2] - counted[1]).max()), value


def meetings_on_one_gpu(rank: int, size: int, store: str) -> tuple[int, float]:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # torch reads it when it first uses a device
    return gpu_ranks.member(rank, size, store, gpu_ranks.PEER, count_meetings, {})


def test_processes_that_share_a_gpu_meet_seldom() -> None:
    """Each meeting takes as many of the device's time slices as there are other processes."""
    assert helpers.run_ranks(2, meetings_on_one_gpu) == [(3, 3.0)] * 2  # tiles of 32 MiB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_a_gpu_each_need_little_memory() -> None:
    assert gpu_ranks.run(2, gpu_ranks.PEER, count_meetings) == [(20, 3.0)] * 2  # of 4 MiB
