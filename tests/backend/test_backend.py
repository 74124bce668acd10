"""torch.distributed on pycomm: works, futures, errors, groups, memory, the profiler."""

import os
import signal
import threading
import time
from datetime import timedelta

import backends
import helpers
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import pycomm


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), isinstance(error, dist.DistBackendError)
    return None


def work_and_future(rank, _size):
    x = torch.full((1000,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    tripled = future.then(lambda done: 3 * done.value()[0][0].item())
    assert work.wait()
    assert work.is_completed()
    return future.wait()[0][0].item(), tripled.wait(), work.get_future().wait()[0][0].item()


def test_works_have_futures():
    assert backends.run(3, work_and_future) == [(3.0, 9.0, 3.0)] * 3


def futures(rank, size):
    """For each operation: whether its future holds just the tensors that it has written."""
    group, x = dist.group.WORLD, torch.ones(4)
    whole, part = torch.ones(4 * size), torch.empty(4)
    blocks, others = ([torch.empty(4) for _ in range(size)] for _ in range(2))
    first = rank == 0
    calls = {
        "all_reduce": (dist.all_reduce(x, async_op=True), [x]),
        "broadcast": (dist.broadcast(x, 0, async_op=True), [x]),
        "reduce": (dist.reduce(x, 0, async_op=True), [x]),
        "all_gather": (dist.all_gather(blocks, x, async_op=True), blocks),
        "all_gather_into_tensor": (
            dist.all_gather_into_tensor(whole, x, async_op=True),
            [whole],
        ),
        "allgather_into_tensor_coalesced": (
            group.allgather_into_tensor_coalesced([whole, torch.empty(2 * size)], [x, x[:2]]),
            [whole, None],
        ),
        "reduce_scatter": (dist.reduce_scatter(part, blocks, async_op=True), [part]),
        "reduce_scatter_tensor": (
            dist.reduce_scatter_tensor(part, whole, async_op=True),
            [part],
        ),
        "gather": (
            dist.gather(x, blocks if first else None, async_op=True),
            blocks if first else [],
        ),
        "scatter": (dist.scatter(part, blocks if first else None, async_op=True), [part]),
        "all_to_all_single": (
            dist.all_to_all_single(torch.empty(4 * size), whole, async_op=True),
            [None],
        ),
        "all_to_all": (dist.all_to_all(others, blocks, async_op=True), others),
        "barrier": (dist.barrier(async_op=True), []),
    }
    found = {}
    for name, (work, outputs) in calls.items():
        values = work.get_future().wait()
        found[name] = type(values) is list and len(values) == len(outputs)
        for value, output in zip(values, outputs, strict=False):
            found[name] &= output is None or value.data_ptr() == output.data_ptr()
            found[name] &= output is None or value.shape == output.shape
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_futures_hold_the_outputs_of_the_call():
    """As with Gloo; for all_gather_into_tensor as with NCCL: the tensor, not views of it."""
    for found in backends.run(2, futures):
        assert all(found.values()), found


def nested(_rank, _size):
    """A callback that runs another operation and waits for it, as in PowerSGD's hook."""

    def again(_):
        y = torch.ones(10)
        return dist.all_reduce(y, async_op=True).get_future().wait()[0][0].item()

    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
    return [work.get_future().then(again).wait() for work in works]


def test_callbacks_may_wait_for_operations():
    assert backends.run(2, nested) == [[2.0] * 4] * 2


def test_torch_translates_its_own_errors():
    """pycomm and torch may share pybind11's list of functions that translate C++ exceptions."""
    with pytest.raises(dist.DistStoreError):
        dist.HashStore().wait(["never set"], timedelta(milliseconds=1))


def premultiplied(rank, size):
    op = dist._make_nccl_premul_sum(0.5)
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, op)
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, torch.full((size,), 2.0), op)
    return x.tolist(), out.item()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_premul_sum():
    assert backends.run(2, premultiplied) == [([1.5] * 3, 2.0)] * 2


def refused(_rank, _size):
    f = torch.ones(4)
    return [
        raised(lambda: dist.all_reduce(f, dist.ReduceOp.BXOR)),
        raised(lambda: dist.all_reduce(f.to(torch.bool), dist.ReduceOp.AVG)),
        raised(lambda: dist.all_reduce(f.to(torch.float8_e5m2))),
        raised(lambda: dist.all_to_all_single(torch.empty(5), torch.empty(5))),
        raised(lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(4))),
        raised(lambda: dist.all_gather([torch.empty(4)], f)),
        raised(lambda: dist.barrier()),
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bad_arguments_raise_before_any_rank_begins():
    for results in backends.run(2, refused):
        kinds = [result and result[0] for result in results]
        assert kinds == ["ArgumentError"] * 6 + [None]
        texts = [result[1] for result in results[:6]]
        assert "float32, got bxor" in texts[0]
        assert "bool, got avg" in texts[1]
        assert "float8_e5m2 can be moved but not reduced" in texts[2]
        assert "output must have 8 elements" in texts[4]


def mismatched(rank, _size):
    return raised(lambda: dist.all_reduce(torch.ones(4 + rank)))


def test_ranks_that_disagree_all_learn_of_it():
    for kind, text, is_backend_error in backends.run(2, mismatched):
        assert kind == "Mismatch"
        assert "4 elements" in text
        assert "5 elements" in text
        assert is_backend_error


def killed(rank, _size):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    except pycomm.PeerDied as error:
        return error.rank, time.monotonic() - start
    return None


def test_a_rank_that_dies():
    with backends.ranks(3, killed) as ranks:
        outcomes = ranks.wait_for([0, 2])
        for outcome in outcomes:
            assert outcome.value is not None, outcome.trace
            assert outcome.value[0] == 1
            assert outcome.value[1] < 10


def late(rank, _size):
    dist.barrier()
    if rank == 0:
        time.sleep(3)
        return None
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.5))
    return raised(lambda: dist.all_reduce(torch.ones(4)))


def test_timeouts_can_be_set():
    kind, text, _ = backends.run(2, late)[1]
    assert kind == "Timeout"
    assert "rank 1 waited 0.5 s" in text


def wait_with_timeout(rank, _size):
    dist.barrier()
    if rank == 0:
        time.sleep(1)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    first = raised(lambda: work.wait(timedelta(milliseconds=50))) if rank else None
    return first, work.wait()


def test_a_wait_that_times_out_leaves_the_operation_running():
    first, second = backends.run(2, wait_with_timeout)[1]
    assert first[0] == "DistBackendError"
    assert "pycomm:all_reduce is not complete after 50 ms" in first[1]
    assert second is True


def interrupted(rank, _size):
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
        return raised(lambda: dist.all_reduce(torch.ones(4)))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4))
    except KeyboardInterrupt:
        return time.monotonic() - start
    return None


def test_ctrl_c_ends_a_wait():
    other, mine = backends.run(2, interrupted)
    assert mine < 1.4
    assert other[0] == "Aborted"


def model_steps(rank, _size, hook):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, matrix_approximation_rank=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if hook == "int8":
        model.register_comm_hook(pycomm.hooks.Int8State(), pycomm.hooks.int8_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return [p.detach().flatten()[:3].tolist() for p in net.parameters()]


@pytest.mark.parametrize("hook", ["none", "power", "int8"])
def test_ddp(hook):
    first, second = backends.run(2, model_steps, hook)
    assert first == second


def one_process(steps=6, ranks=2):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            torch.manual_seed(100 * step + rank)
            (net(torch.randn(8, 20)).square().mean() / ranks).backward()
        optimizer.step()
    return [p.detach().flatten()[:3].tolist() for p in net.parameters()]


def test_ddp_trains_as_one_process():
    for ours, expected in zip(backends.run(2, model_steps, "none")[0], one_process(), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


def in_window(rank, _size):
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert group.supports_tensor_alloc(torch.device("cpu"))
    x = group.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    x.fill_(rank + 1)
    dist.all_reduce(x)
    view = x[10:20]
    del x
    return view.sum().item()


def test_tensors_in_the_window():
    assert backends.run(2, in_window) == [30.0] * 2


def profiled(_rank, _size):
    x = torch.ones(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(x)
        dist.broadcast(x, 0, async_op=True).wait()
    return {event.name for event in profile.events() if event.name.startswith("pycomm:")}


def test_profiler_sees_operations():
    assert backends.run(2, profiled) == [{"pycomm:all_reduce", "pycomm:broadcast"}] * 2


def functional(rank, _size):
    from torch.distributed import _functional_collectives as functional

    def step(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = functional.all_gather_tensor(y, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(z, "avg", 0, dist.group.WORLD) + 1

    x = torch.arange(4.0) + rank
    return step(x).tolist(), torch.compile(step, backend="aot_eager")(x).tolist()


def test_functional_collectives_also_compiled():
    expected = [2 * (2 * i + 1) + 1.0 for i in range(4)]
    assert backends.run(2, functional) == [(expected, expected)] * 2


def over_gloo(_rank, _size, interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    x = torch.eye(2).to_sparse()
    dist.all_reduce(x)
    return x.to_dense().tolist()


def test_gloo_uses_the_interface_of_the_environment():
    assert backends.run(2, over_gloo, "lo") == [[[2.0, 0.0], [0.0, 2.0]]] * 2
    with pytest.raises(AssertionError, match="no-such-one"):
        backends.run(2, over_gloo, "no-such-one")


def destroyed(_rank, _size):
    group = dist.new_group([0, 1])
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(x)
    return x.tolist()


def test_groups_can_be_destroyed():
    assert backends.run(2, destroyed) == [[4.0] * 3] * 2


def again(rank, size, store, backend):
    for attempt in range(3):
        backends.join(rank, size, f"{store}-{attempt}", backend)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [size, size]
        module = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__
        assert module.startswith("pycomm._c10d_")
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["pycomm", "cpu:pycomm,cuda:gloo"])
def test_default_groups_one_after_another(backend):
    helpers.run_ranks(2, again, backend)
