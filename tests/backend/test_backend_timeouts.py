"""Timeouts of the backend: set later, per call, and impossible ones."""

import time
from datetime import timedelta

import backends
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def outcome(call):
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


WAITS = {
    "collective": lambda: dist.all_reduce(torch.ones(3)),
    "receive": lambda: dist.recv(torch.ones(3), 1),
    "any source": lambda: dist.recv(torch.ones(3)),
    "large send": lambda: dist.send(torch.ones(100_000), 1),
}


def wait_in_vain(rank, _size, what):
    dist.barrier()
    backend().set_timeout(timedelta(seconds=0.5))
    if rank == 1:
        time.sleep(3)
        return None
    return outcome(WAITS[what])


@pytest.mark.parametrize("what", WAITS)
def test_set_timeout(what):
    name, _, took = backends.run(2, wait_in_vain, what, seconds=60)[0]
    assert name == "Timeout"
    assert took < 2.5


def over_gloo(rank, size, store, early):
    """Sparse tensors go over Gloo, whose group is made when it is needed."""
    spanning.pretend("ab"[rank])
    backends.join(rank, size, store)
    x = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    if not early:
        dist.all_reduce(x)
    backend().set_timeout(timedelta(seconds=0.5))
    if rank == 1:
        time.sleep(3)
        return None
    return outcome(lambda: dist.all_reduce(x))


@pytest.mark.parametrize("early", [True, False])
def test_set_timeout_reaches_gloo(early):
    name, _, took = helpers.run_ranks(2, over_gloo, early)[0]
    assert name is not None
    assert took < 2.5


def one_rank(_rank, _size):
    x = torch.ones(3)
    options = dist.AllreduceOptions()
    found = []
    for seconds in (0, -3, 1e12):
        timeout = options.timeout = timedelta(seconds=seconds)
        work = dist.all_reduce(x, async_op=True)
        for call in (
            lambda timeout=timeout: backend().set_timeout(timeout),
            lambda: backend().allreduce([x], options),
            lambda timeout=timeout, work=work: work.wait(timeout),
        ):
            found.append(outcome(call)[:2])
        work.wait()
    dist.all_reduce(x)
    return found


def test_impossible_timeouts():
    found = backends.run(1, one_rank)[0]
    without_limit = found.pop(2)  # wait(0)
    assert without_limit[0] is None
    for name, text in found:
        assert name == "ArgumentError"
        assert "timeout must be positive and at most 1000000000 s" in text


@pytest.mark.parametrize("timeout", [timedelta.max, timedelta(0)])
def test_impossible_timeouts_of_groups(tmp_path, timeout):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(ValueError, match="timeout must be"):
        dist.init_process_group("pycomm", store=store, rank=0, world_size=1, timeout=timeout)


@pytest.mark.parametrize("timeout", [-1.0, float("inf"), float("nan"), 1e10])
def test_impossible_timeouts_of_messages(world, timeout):
    group = world(1).groups[0]
    x = torch.ones(3)
    with pytest.raises(ValueError, match="timeout must be"):
        group._core.isend(x.data_ptr(), x.nbytes, 0, 0, 0, timeout)
    with pytest.raises(ValueError, match="timeout must be"):
        pycomm.isend(x, 0, group=group, timeout=timeout)
