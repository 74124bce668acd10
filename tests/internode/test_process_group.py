"""Groups that span nodes, over process groups of torch.distributed."""

from __future__ import annotations

import concurrent.futures
import gc
import hashlib
import os
import threading
import time
from types import SimpleNamespace

import compressing
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm
from pycomm import _connecting, _init
from pycomm._runtime import carriers

LAYOUTS = [[1, 1], [2, 2], [2, 1], [1, 1, 1], "abba"]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ARITHMETIC = ("sum", "avg", "min", "max", "prod")
BITWISE = ("band", "bor", "bxor")
REDUCTIONS = [
    *((dtype, op) for dtype in FLOATS for op in ARITHMETIC),
    *((dtype, op) for dtype in INTEGERS for op in (*ARITHMETIC, *BITWISE)),
    *((torch.bool, op) for op in ("sum", "min", "max", "prod", *BITWISE)),
    *((torch.uint16, op) for op in ("sum", "prod", *BITWISE)),
    *((torch.complex64, op) for op in ("sum", "avg")),
]
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 65504.0]


def values(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Random values; floats begin with special ones, each meeting each on some two ranks."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 200, (count,), generator=generator).to(dtype)
    x = torch.randn(count, generator=generator)
    special = torch.tensor(SPECIAL)
    first = special.repeat(8) if rank % 2 else special.repeat_interleave(8)
    x[:64] = first[: min(count, 64)]
    return torch.complex(x, x.flip(0)) if dtype.is_complex else x.to(dtype)


def digests(tensors: list[torch.Tensor]) -> list[str]:
    """Of their bytes, which are many, and which torch cannot pickle by value for all dtypes."""
    found = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        found.append(hashlib.sha1(data.numpy()).hexdigest())
    return found


def reductions(group: pycomm.Group) -> list[str]:
    return digests(
        [
            pycomm.all_reduce(values(dtype, 1003, group.rank), op, group=group)
            for dtype, op in REDUCTIONS
        ]
    )


def collectives(group: pycomm.Group) -> list[str]:
    """All of them; of odd sizes and of several tiles, strided, out of place, async."""
    made = []
    for count in (0, 1, 7, 3_000_001):
        x = values(torch.float32, max(count, 64), group.rank)[:count]
        made.append(pycomm.all_reduce(x, "avg", out=torch.empty(count), group=group))
        made.append(later := x.clone())
        pycomm.all_reduce(later, group=group, async_op=True).wait()
        made.append(pycomm.broadcast(x.clone(), group.size - 1, group=group))
    for dtype in (torch.bfloat16, torch.bool, torch.float8_e5m2):
        for block in (0, 3, 70_001):
            x = values(torch.float32, 64 + block * group.size, group.rank)[64:].to(dtype)
            gathered = torch.empty(block * group.size, dtype=dtype)
            made.append(pycomm.all_gather(gathered, x[:block], group=group))
            if dtype != torch.float8_e5m2:
                output = torch.empty(block, dtype=dtype)
                made.append(pycomm.reduce_scatter(output, x, group=group))
    x = values(torch.float32, 64, group.rank).view(8, 8)
    made.append(pycomm.all_reduce(x.clone().t(), group=group))
    twice = x.clone()
    works = [pycomm.all_reduce(twice, group=group, async_op=True) for _ in range(2)]
    pycomm.barrier(group=group)
    for work in reversed(works):
        work.wait()
        begin, end = work.interval()
        assert work.is_completed()
        assert begin < end
    return digests([*made, twice])


@pytest.mark.parametrize(
    ("function", "nodes"),
    [(reductions, [1, 1, 1]), (reductions, [2, 1]), *((collectives, nodes) for nodes in LAYOUTS)],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_the_bits_of_the_other_transport(world, function, nodes):
    names = spanning.names(nodes)
    over_gloo = (
        spanning.run(nodes, function)
        if names == "abba"
        else world(len(names), nodes=nodes).run(function)
    )
    over_groups = spanning.run(nodes, function, transport="process_group")
    assert over_groups == over_gloo


def on_pycomms_backend(rank: int, size: int, store: str) -> tuple:
    """The backend "pycomm" between the nodes."""
    spanning.pretend("ab"[rank])
    dist.init_process_group("pycomm", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with pycomm.init(transport="process_group", timeout=30) as group:
        x = values(torch.float32, 1003, rank)
        made = pycomm.all_reduce(x, group=group), pycomm.broadcast(x.clone(), 1, group=group)
    dist.destroy_process_group()
    return made


def test_any_backend_of_torch(world):
    def body(group):
        x = values(torch.float32, 1003, group.rank)
        return pycomm.all_reduce(x, group=group), pycomm.broadcast(x.clone(), 1, group=group)

    wanted = world(2, nodes=[1, 1]).run(body)
    for made, expected in zip(helpers.run_ranks(2, on_pycomms_backend), wanted, strict=True):
        for got, other in zip(made, expected, strict=True):
            compressing.compare("tensor", got, other)


def refused(group: pycomm.Group) -> None:
    x = torch.ones(1000)
    with pytest.raises(ValueError, match="algorithm must be auto or two_shot"):
        pycomm.all_reduce(x, algorithm="ring", group=group)
    with pytest.raises(ValueError, match="cannot run in a group that spans nodes"):
        pycomm.reduce(x, group=group)
    pycomm.barrier(group=group)  # the group is as good as before


def test_what_is_refused():
    spanning.run([1, 1], refused, transport="process_group")


def one_node(group: pycomm.Group) -> float:
    return float(pycomm.all_reduce(torch.ones(3), group=group)[0])


def test_on_one_node_there_is_no_transport():
    assert spanning.run([2], one_node, transport="process_group") == [2.0, 2.0]


def differing(rank: int, size: int, store: str) -> str:
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    with pytest.raises(ValueError, match="transport must be one of auto, gloo, process_group"):
        pycomm.init(transport="nccl")
    with pytest.raises(ValueError) as raised:
        pycomm.init(transport=["gloo", "process_group"][rank], timeout=20)
    dist.destroy_process_group()
    return str(raised.value)


def test_ranks_that_want_different_transports():
    expected = "transport must be the same on every rank: rank 0 has gloo, rank 1 has process_group"
    assert helpers.run_ranks(2, differing) == [expected] * 2


def unconnected(rank: int, size: int, store: str, transport: str) -> tuple[str, float]:
    """A rank's process group cannot be made."""
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    real = _connecting.Carriers

    def carriers_of(*args):
        if rank == 1:
            raise RuntimeError("no link")
        return real(*args)

    _connecting.Carriers = carriers_of
    _init.backends_to_make = lambda *_: {"cpu": "gloo"}
    told, total = "", 0.0
    try:
        with pycomm.init(transport=transport, timeout=2) as group:
            total = float(pycomm.all_reduce(torch.ones(3), group=group)[0])
    except pycomm.CollectiveError as error:
        told = str(error)
    dist.destroy_process_group()
    return told, total


def test_a_process_group_that_cannot_be_made():
    """All ranks say so; by default they do without it."""
    told = helpers.run_ranks(2, unconnected, "process_group")
    assert told[0] == told[1]
    assert "rank 1: RuntimeError: no link" in told[0][0]
    assert helpers.run_ranks(2, unconnected, "auto") == [("", 2.0)] * 2


def late(group: pycomm.Group) -> type:
    """Rank 1 comes when rank 0 has given up and ended the connections."""
    start = carriers.Carriers._start
    if group.rank == 1:
        carriers.Carriers._start = lambda *given: time.sleep(3) or start(*given)
    with pytest.raises(pycomm.CollectiveError) as raised:
        pycomm.all_reduce(torch.ones(9), group=group)
    return raised.type


def test_all_ranks_call_an_overrun_a_timeout():
    options = {"transport": "process_group", "timeout": 2}
    assert spanning.run([1, 1], late, **options) == [pycomm.Timeout] * 2


def interrupted(group: pycomm.Group) -> list[str]:
    """close() is interrupted while it waits for the operations."""
    if group.rank == 1:
        group.close()
        return []
    span, log = group._span, []
    real = span._worker.end

    def end() -> None:
        span._worker.end = real
        raise KeyboardInterrupt

    span._worker.end = end
    abort = span.abort
    span.abort = lambda: [log.append("abort"), abort()]
    with pytest.raises(KeyboardInterrupt):
        group.close()
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        pycomm.barrier(group=group)
    return log


def test_an_interrupt_of_close_ends_the_group():
    assert spanning.run([1, 1], interrupted, transport="process_group") == [["abort"], []]


def test_a_thread_that_nobody_needs_ends():
    """As when a group is dropped without being closed."""
    worker = carriers.Worker(lambda: None)
    thread, task = worker._thread, worker.submit(lambda: None)
    task.wait()
    assert not worker.busy()
    del worker
    thread.join(20)
    assert not thread.is_alive()


def two_carriers() -> list[carriers.Carriers]:
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = pool.map(
            lambda rank: carriers.Carriers("gloo", store, [0, 1], rank, timeout=60), range(2)
        )
        return list(made)


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_an_abort_ends_what_gloo_would_not_end(monkeypatch, interfaces):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    here, other = two_carriers()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    transfers = [here.all_gather(torch.empty(2), torch.zeros(1)) for _ in range(3)]
    begin = time.monotonic()
    threading.Timer(0.2, here.abort).start()
    for transfer in transfers:
        with pytest.raises(RuntimeError) as raised:
            transfer.wait()
        assert not isinstance(raised.value, carriers.Overrun)
    with pytest.raises(RuntimeError):  # the other node does not wait, either
        other.all_gather(torch.empty(2), torch.zeros(1)).wait()
    del here, other, transfer, transfers  # Gloo's threads end with their operations
    gc.collect()
    assert time.monotonic() - begin < 30  # the timeout is 60


@pytest.mark.parametrize("aborted", [False, True])
def test_only_a_backend_that_was_not_aborted_is_shut_down(aborted):
    """NCCL still sends when a stream has come to the end of an operation; shutdown() waits."""
    made, log = two_carriers()[0], []
    made._backend = SimpleNamespace(
        shutdown=lambda: log.append("shutdown"), recv=made._backend.recv
    )
    if aborted:
        made.abort()
    made.close()
    assert log == ([] if aborted else ["shutdown"])


def abort_in_a_child(*_):
    here, other = two_carriers()
    pid = os.fork()
    if pid == 0:
        here.abort()
        os._exit(7)
    helpers.wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), 20)
    status = os.waitpid(pid, 0)[1]
    results = [torch.empty(2), torch.empty(2)]
    first = here.all_gather(results[0], torch.ones(1))
    other.all_gather(results[1], torch.ones(1)).wait()
    first.wait()
    return os.waitstatus_to_exitcode(status), [result.tolist() for result in results]


def test_a_forked_childs_abort_leaves_the_parents_connections():
    assert helpers.run_ranks(1, abort_in_a_child) == [(7, [[1.0, 1.0]] * 2)]
