"""Futures at the interpreter's exit, after a fork, and without threads to complete them."""

import os
import resource
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist

import pycomm


class Slow:
    """Gives threads time to come back while the interpreter takes itself apart."""

    sleep = staticmethod(time.sleep)

    def __del__(self):
        self.sleep(0.3)


def new_group(size=1, rank=0, store=None):
    dist.init_process_group(
        "pycomm",
        store=dist.FileStore(store or tempfile.mkdtemp() + "/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def exit_with_pending_futures(start):
    """Exits with pending callbacks and an existing process group; rank 1 never comes."""
    store = tempfile.mkdtemp() + "/store"
    pid = os.fork()
    new_group(2, 0 if pid else 1, store)
    if pid == 0:
        time.sleep(60)

    def called(_):
        for _ in range(30):  # ends in the middle of the interpreter's end, if that does not wait
            time.sleep(0.01)
        print("called", flush=True)

    sys.kept = [start() for _ in range(3)]
    sys.kept += [work.get_future() for work in sys.kept]
    for future in sys.kept[3:]:
        future.add_done_callback(called)
    sys.kept += [future.then(called) for future in sys.kept[3:]]
    os.kill(pid, 9)
    sys.slow = Slow()
    sys.exit(7)


def fork():
    """The child has none of the threads that complete its parent's futures."""
    new_group()
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    pid = os.fork()
    dist.destroy_process_group()
    new_group()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    future.wait()
    assert future.value()[0].tolist() == [1, 1, 1]
    if pid == 0:
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def wait_in_a_fork():
    """Operations of the parent never complete in the child."""
    store = tempfile.mkdtemp() + "/store"
    rank = 0 if os.fork() else 1
    new_group(2, rank, store)
    if rank == 1:
        time.sleep(1)
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(3), 0)
        dist.destroy_process_group()
        os._exit(0)
    works = [dist.all_reduce(torch.ones(3), async_op=True), dist.irecv(torch.ones(3), 1)]
    pid = os.fork()
    if pid == 0:
        for work in works:
            with pytest.raises(pycomm.GroupUnusable, match="forked process"):
                work.wait()
        os._exit(0)
    for work in works:
        work.wait()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    dist.destroy_process_group()


def no_threads():
    """If no thread can complete it, a future is refused, and its operation goes on."""
    new_group()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    x = torch.zeros(3)
    work = backend.recv([x], 0, 0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    with pytest.raises(RuntimeError, match="unavailable"):
        work.get_future()
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    future = work.get_future()
    backend.send([torch.ones(3)], 0, 0).wait()
    future.wait()
    print(x.tolist())
    dist.destroy_process_group()


PROGRAMS = {
    "collective": lambda: exit_with_pending_futures(
        lambda: dist.all_reduce(torch.ones(3), async_op=True)
    ),
    "receive": lambda: exit_with_pending_futures(lambda: dist.irecv(torch.ones(3), 1)),
    "fork": fork,
    "wait in a fork": wait_in_a_fork,
    "no threads": no_threads,
}


def large_stacks():
    """Makes the stacks of threads so large that the C library keeps none for the next thread."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, hard))


def test_exits_and_forks():
    """Each program runs in a process of its own, at the same time as the others."""
    texts = {name: f"import {__name__}\n{__name__}.PROGRAMS[{name!r}]()" for name in PROGRAMS}
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ends = programs.run_all(texts, env=env, before=large_stacks)
    for name in ("collective", "receive"):  # with callbacks to come
        assert ends[name].status == 7, ends[name]
        assert "terminate" not in ends[name].stderr, ends[name]
        assert ends[name].stdout.count("called") == 6, ends[name]
    for name in ("fork", "wait in a fork"):
        assert ends[name][:2] == (0, "0\n"), ends[name]
    # A future that no thread would complete.
    assert ends["no threads"][:2] == (0, "[1.0, 1.0, 1.0]\n"), ends["no threads"]
