"""group.stop_requested(): a signal that any rank gets stops all ranks in the same step."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import growing
import helpers
import pytest
import spanning
import torch

import pycomm

STEPS = 1_000_000  # nobody gets so far
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
TRAINING = """
import json, os, sys
from pathlib import Path
import torch, pycomm
import spanning
rank = int(os.environ["RANK"])
spanning.pretend("aab"[rank])
group, folder, total = pycomm.init(timeout=60), Path(sys.argv[1]), torch.zeros(100)
for step in range(1_000_000):
    total += pycomm.all_reduce(torch.full((100,), float(step % 7)), group=group)
    if group.stop_requested():
        break
    if step == 3:
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
(folder / f"saved-{rank}").write_text(json.dumps([step, total.tolist()]))
pycomm.barrier(group=group)
torch.distributed.destroy_process_group()
"""


def get(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def steps_until_stop(group, getting=(), step=3, signals=(signal.SIGTERM,)):
    """In which step each call says that this rank shall stop, if these ranks get a signal."""
    for now in range(STEPS):
        if group.stop_requested(signals):
            assert group.stop_requested(signals), "it is no matter of one step"
            return now
        if now == step and group.rank in getting:
            get(signals[-1])
    return None


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a worker", "torchrun"])
def test_workers_of_torchrun_save_the_same_step(tmp_path, who):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(spanning.__file__).parent), *sys.path])
    with subprocess.Popen(
        [*TORCHRUN, script, tmp_path], env=env, stderr=subprocess.PIPE, text=True
    ) as torchrun:
        try:
            pids = [tmp_path / f"pid-{rank}" for rank in range(3)]
            helpers.wait_until(lambda: all(map(Path.exists, pids)) or torchrun.poll(), limit=200)
            assert torchrun.poll() is None, torchrun.stderr.read()
            helpers.wait_until(lambda: all(path.read_text() for path in pids))
            get_pid = torchrun.pid if who == "torchrun" else int(pids[1].read_text())
            os.kill(get_pid, signal.SIGTERM)
            said = torchrun.communicate(timeout=100)[1]
        finally:
            torchrun.kill()
    assert (torchrun.returncode == 0) == (who == "a worker"), said
    saved = [json.loads((tmp_path / f"saved-{rank}").read_text()) for rank in range(3)]
    assert saved[0][0] > 3
    assert saved == [saved[0]] * 3


@pytest.mark.parametrize("getting", [(1,), (0, 2), (0, 1, 2)])
def test_all_ranks_stop_in_the_same_step(getting):
    """Those that get a signal know it in their next call."""
    assert helpers.run_group(3, steps_until_stop, getting) == [4] * 3


def test_nodes():
    assert spanning.run([2, 1], steps_until_stop, (2,)) == [4] * 3


def test_other_signals():
    signals = (signal.SIGTERM, signal.SIGUSR1)
    assert helpers.run_group(2, steps_until_stop, (1,), 2, signals) == [3] * 2


def keep_handlers(group):
    """The program's own handlers, one from before and one from after the first call."""
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    if group.rank == 0:
        get()  # is not caught yet
    first = group.stop_requested(), group.stop_requested((signal.SIGTERM, signal.SIGUSR1))
    if group.rank == 0:
        get()
    second = group.stop_requested()
    return first, second, seen


def test_handlers_of_the_program_run_too():
    got = [signal.SIGTERM]
    expected = [((False, False), True, got * 2), ((False, False), True, [])]
    assert helpers.run_group(2, keep_handlers) == expected


def fork(group):
    """How a child ends that gets SIGTERM, and whether this rank shall stop then."""
    group.stop_requested()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(readable, 1)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, group.stop_requested()


def test_a_forked_child_ends_as_before():
    """Else a pool of processes would wait for it."""
    assert helpers.run_group(2, fork) == [(-signal.SIGTERM, False)] * 2


def interrupt(group):
    """Ctrl-C, if a program wants it so, ends no step."""
    stop = steps_until_stop(group, (0,), 2, (signal.SIGINT,))
    return stop, signal.getsignal(signal.SIGTERM)


def test_an_interrupt_may_be_such_a_signal():
    assert helpers.run_group(2, interrupt) == [(3, signal.SIG_DFL)] * 2


def wrong_signal(group):
    with pytest.raises(OSError, match="Invalid argument"):
        group.stop_requested((signal.SIGKILL,))
    return group.stop_requested()


def test_a_signal_that_cannot_be_caught():
    assert helpers.run_group(2, wrong_signal) == [False] * 2


def in_another_thread(group):
    errors = []

    def first():
        with pytest.raises(RuntimeError, match="main thread") as error:
            group.stop_requested()
        errors.append(error)

    for call in (first, group.stop_requested):
        thread = threading.Thread(target=call)
        if call is not first:
            group.stop_requested()
        thread.start()
        thread.join()
    return len(errors)


def test_the_first_call_belongs_to_the_main_thread():
    assert helpers.run_group(2, in_another_thread) == [1] * 2


def in_threads(_rank, _size, _store, options):
    """A signal of the process stops all ranks that are threads of it, in two worlds."""
    with pycomm.LocalWorld(3, **options) as world:
        first = world.run(steps_until_stop, (1,))
    with pycomm.LocalWorld(2) as world:
        return first, world.run(pycomm.Group.stop_requested)


@pytest.mark.parametrize("options", [{}, {"nodes": [2, 1]}, {"serial": True}], ids=str)
def test_threads(options):
    [(stops, later)] = helpers.run_ranks(1, in_threads, options)
    assert len(set(stops)) == 1
    assert stops[0] >= 3  # as soon as the main thread has run the handler
    assert later == [True] * 2


def in_threads_of_a_thread(_rank, _size, _store):
    errors = []

    def run():
        with pycomm.LocalWorld(2) as world, pytest.raises(RuntimeError, match="main thread") as e:
            world.run(pycomm.Group.stop_requested)
        errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return len(errors)


def test_threads_that_the_main_thread_does_not_wait_for():
    assert helpers.run_ranks(1, in_threads_of_a_thread) == [1]


def shrink_and_grow(rank, _size, store, path):
    """Rank 1 leaves, and rank 2 comes; it has not heard of the signal that rank 0 got before."""
    if rank == 2:
        group = pycomm.join(Path(path), 30)
        return group.stop_requested()
    helpers.join_world(rank, 2, store)
    group = pycomm.init(timeout=20)
    group.stop_requested()
    helpers.pass_barrier(group, f"{path}.barrier")
    if rank == 1:
        group.close()
        return None
    smaller = group.shrink()
    assert not smaller.stop_requested()
    get()
    growing.publish(smaller, path)
    larger = smaller
    end = time.monotonic() + 30
    while larger.size == 1 and time.monotonic() < end:
        larger = larger.grow()
    assert larger.size == 2
    return larger.stop_requested()


def test_groups_that_shrink_and_grow(tmp_path):
    assert helpers.run_ranks(3, shrink_and_grow, str(tmp_path / "door")) == [True, None, True]


def test_ranks_that_call_something_else_raise():
    def call(group):
        word = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(pycomm.Mismatch, match="stop_requested"):
            group.stop_requested() if group.rank else pycomm.all_reduce(word, "max", group=group)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pycomm.LocalWorld(2) as world:
            world.run(call)
    finally:
        signal.signal(signal.SIGTERM, before)
