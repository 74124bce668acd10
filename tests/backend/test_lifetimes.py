"""Works, futures, errors and groups of the backend that are used late, twice or not at all."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import backends
import pytest
import torch
import torch.distributed as dist

import pycomm


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


WRONG_LISTS = {
    "inputs larger than outputs": lambda: dist.all_gather([torch.zeros(4)] * 2, torch.ones(3000)),
    "inputs smaller than outputs": lambda: dist.all_gather([torch.zeros(8)] * 2, torch.ones(4)),
    "one output too large": lambda: dist.all_gather(
        [torch.zeros(4), torch.zeros(8)], torch.ones(4 if dist.get_rank() else 9)
    ),
    "a large output": lambda: dist.reduce_scatter(torch.zeros(3_000_000), [torch.ones(4)] * 2),
    "a small output": lambda: dist.reduce_scatter(
        torch.zeros(2), [torch.ones(400_000), torch.ones(300_000)]
    ),
    "overlapping lists": lambda: dist.all_to_all(*[list(torch.ones(2, 5))] * 2),
    "an overlapping tensor": lambda: dist.all_to_all_single(*[torch.ones(4)] * 2, [1, 3], [3, 1]),
}  # fmt: skip


def call_wrongly(_rank, _size, what):
    first = raised(WRONG_LISTS[what])
    dist.barrier()
    return first


@pytest.mark.parametrize("what", WRONG_LISTS)
def test_wrong_lists_are_refused(what):
    assert "ArgumentError" in backends.run(2, call_wrongly, what, seconds=20)


def fail_often(rank, _size):
    groups = dist.group.WORLD, dist.new_group()  # a group that has failed may refuse at once
    works = [dist.all_reduce(torch.ones(4 + rank), group=g, async_op=True) for g in groups]
    future = works[0].get_future()
    child = future.then(lambda done: done.value())
    results = [raised(works[0].wait) for _ in range(3)]
    results += [raised(future.wait) for _ in range(2)]
    results += [raised(future.value), raised(child.wait), raised(works[0].wait)]
    results.append(raised(lambda: works[1].get_future().wait()))
    return results, raised(lambda: dist.barrier())


def test_an_error_can_be_raised_many_times():
    for results, later in backends.run(2, fail_often):
        assert results[:3] == ["Mismatch"] * 3
        assert None not in results
        assert later in ("Mismatch", "GroupUnusable")


def futures_after_wait(_rank, _size):
    count = 0
    for _ in range(100):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        work.wait()
        count += future.done() and future.value()[0][0].item() == 2.0
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        count += work.get_future().done()
    return count


def test_futures_are_complete_once_their_work_is():
    assert backends.run(2, futures_after_wait) == [200, 200]


def destroy_early(rank, _size, what):
    group = dist.new_group([0, 1])
    dist.barrier(group)
    pending = {
        "receive": lambda: dist.irecv(torch.zeros(3), 1 - rank, group=group),
        "any source": lambda: dist.irecv(torch.zeros(3), group=group),
        "large send": lambda: dist.isend(torch.zeros(1_000_000), 1 - rank, group=group),
    }
    work = pending[what]()
    start = time.monotonic()
    dist.destroy_process_group(group)
    took = time.monotonic() - start
    del work
    dist.barrier()
    return took


@pytest.mark.parametrize("what", ["receive", "any source", "large send"])
def test_groups_with_pending_messages_can_be_destroyed(what):
    assert max(backends.run(2, destroy_early, what)) < 5


def drop_everything(rank, _size, what):
    group = dist.new_group([0, 1])
    x, y = torch.ones(1000), torch.ones(1000)
    dist.barrier(group)
    if rank == 0:
        time.sleep(0.5)
        if what == "collective":
            dist.all_reduce(x, group=group)
        else:
            dist.send(x, 1, group=group)
    elif what == "collective":
        dist.all_reduce(y, async_op=True, group=group)
    else:
        dist.irecv(y, 0, group=group)
    dist.distributed_c10d._world.pg_map.pop(group, None)
    del group
    gc.collect()
    time.sleep(1)
    dist.barrier()
    return True


@pytest.mark.parametrize("what", ["collective", "message"])
def test_groups_may_be_dropped_while_they_work(what):
    assert backends.run(2, drop_everything, what) == [True, True]


def interrupted_receive(rank, _size):
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
        return None
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dist.recv(torch.zeros(3), 0)
    except KeyboardInterrupt:
        return "interrupted"
    return None


def test_ctrl_c_ends_a_receive():
    assert backends.run(2, interrupted_receive)[1] == "interrupted"


def late_wait(rank, _size):
    group = pycomm.init()
    if rank == 0:
        request = pycomm.isend(torch.ones(3), 1, group=group)
    else:
        request = pycomm.irecv(torch.zeros(3), 0, group=group)
    request.wait()
    group.close()
    del group
    gc.collect()
    request.wait()
    return True


def test_requests_may_outlive_their_group():
    assert backends.run(2, late_wait) == [True, True]


def monitored(rank, _size):
    group = dist.group.WORLD
    group.monitored_barrier()
    if rank == 1:
        time.sleep(1.5)
        return None
    start = time.monotonic()
    name = raised(lambda: group.monitored_barrier(timeout=timedelta(seconds=0.3)))
    return name, time.monotonic() - start


@pytest.mark.parametrize("late", [False, True])
def test_monitored_barriers_leave_no_keys(late):
    store = dist.HashStore()
    found = {}

    def pass_barriers(rank):
        ranks = pycomm.backend._Ranks(store, rank, 3, 60, "0")
        for _ in range(3):
            ranks.monitored_barrier(60, wait_all_ranks=False)
        if late and rank == 2:
            time.sleep(0.5)
        seconds = 0.1 if late and rank == 0 else 60
        found[rank] = raised(lambda: ranks.monitored_barrier(seconds, wait_all_ranks=True))

    threads = [threading.Thread(target=pass_barriers, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), "Timeout" if late else None)
    assert store.num_keys() == 0


def test_monitored_barriers_wait():
    name, took = backends.run(2, monitored)[0]
    assert name == "Timeout"
    assert took > 0.25
