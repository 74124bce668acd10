"""init: under torchrun, on an existing process group, and when ranks do not come."""

import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm
from pycomm._runtime import rendezvous, torch_distributed
from pycomm._runtime.subgroup import title_of

SCRIPT = """
import os
import torch, pycomm
group = pycomm.init()
rank = torch.distributed.get_rank()
x = torch.full((1000,), float(rank + 1))
y = pycomm.all_reduce(x.clone(), group=group)
pycomm.all_reduce(x)
assert x.tolist() == y.tolist() == [6.0] * 1000, (x, y)
assert pycomm.default_group().size == 3
assert os.environ["_PYCOMM_RANK"].split()[:2] == [str(os.getpid()), str(rank)]
print(f"rank {rank} is fine", flush=True)
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=3", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # They write at once, so lines may run into each other.
    assert sorted(re.findall(r"rank (\d) is fine", done.stdout)) == ["0", "1", "2"]


def test_a_child_with_its_parents_variables(monkeypatch):
    """Such a child would wait for ranks that have met without it, unless these have ended."""
    window = os.memfd_create("pycomm")  # as a group's, see test_top.py
    assert torch_distributed._has_groups(str(os.getpid()))
    os.close(window)
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    check = torch_distributed._check_no_parent_has_them
    monkeypatch.setenv("_PYCOMM_RANK", f"{os.getppid()} 1 3 127.0.0.1 29")
    check()  # the parent is no rank
    monkeypatch.setattr(torch_distributed, "_has_groups", str(os.getppid()).__eq__)
    with pytest.raises(RuntimeError, match=rf"from rank 1 \(pid {os.getppid()}\)"):
        pycomm.init()
    with monkeypatch.context() as changed:
        changed.setenv("MASTER_PORT", "30")
        check()
    with monkeypatch.context() as changed:
        changed.delenv("RANK")
        check()
    monkeypatch.setenv("_PYCOMM_RANK", f"{os.getpid()} 1 3 127.0.0.1 29")
    check()
    monkeypatch.setenv("_PYCOMM_RANK", "0 1 3 127.0.0.1 29")  # no process has this number
    check()


def sub_group_without_a_rank(rank, size, store):
    helpers.join_world(rank, size, store)
    pair = dist.new_group([1, 2], group_desc="tp")
    if rank == 0:
        return None
    group = pycomm.init(pair, timeout=20)
    if rank == 2:
        group.close()
        return group.title
    with pytest.raises(pycomm.PeerDied, match=r"^rank 1 ") as caught:
        pycomm.barrier(group=group)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.group == error.report.group == group.title
    assert str(error).endswith(f"; group {group.title}")
    assert repr(group) == f"pycomm.Group({group.title!r}, rank=0, size=2)"
    assert group.world_ranks[error.rank] == 2
    dist.destroy_process_group()  # which a group does not need any more
    survivor = group.shrink()
    assert survivor.world_ranks == (1,)
    assert survivor.title == f"{survivor.name} (tp, rank 1 of the default process group)"
    return group.title


def test_errors_tell_which_group():
    first, *titles = helpers.run_ranks(3, sub_group_without_a_rank)
    told = "pycomm:0 (tp, ranks 1, 2 of the default process group)"
    assert (first, titles) == (None, [told, told])


def test_titles_of_large_groups():
    title, ranks = title_of("mesh_dp", range(0, 1024, 8), 1024)
    assert title == "mesh_dp, 128 ranks, 0 to 1016, of the default process group"
    assert ranks == range(0, 1024, 8)


@pytest.mark.parametrize("timeout", [0, -3])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match=f"timeout must be positive, got {timeout}"):
        pycomm.init(timeout=timeout)


def defaults(rank, size, store):
    helpers.join_world(rank, size, store)
    first, second = pycomm.init(), pycomm.init(timeout=7.0)
    assert pycomm.default_group() is first
    assert (first.timeout, second.timeout) == (300.0, 7.0)
    assert first.name != second.name
    assert repr(first) == f"pycomm.Group({first.name!r}, rank={rank}, size={size})"
    x = torch.ones(3)
    pycomm.all_reduce(x)
    assert first._core.sequence == 1
    pycomm.set_default_group(second)
    pycomm.all_reduce(x)
    assert second._core.sequence == 1
    pycomm.set_default_group(None)
    third = pycomm.default_group()
    assert third not in (first, second)
    return pycomm.all_reduce(x).tolist()


def test_defaults():
    assert helpers.run_ranks(2, defaults) == [[8.0] * 3] * 2


def torchs_timeouts(rank, size, _, port):
    helpers.as_torchrun(rank, size, port)
    group = pycomm.init(timeout=20)
    found = [dist.group.WORLD, dist.new_group()]
    cpu = torch.device("cpu")
    seconds = [each._get_backend(cpu).options._timeout.total_seconds() for each in found]
    dist.barrier(found[1])  # a rank that ends now could still be connecting to the other one
    return seconds, group.timeout


def test_timeouts_of_torchs_own_groups():
    """They are torch's own, which init leaves as they are."""
    for found in helpers.run_ranks(2, torchs_timeouts, helpers.free_port()):
        assert found == ([1800.0, 1800.0], 20.0)


NO_DEVICE, NO_NCCL = "has no CUDA device", "has no NCCL in its torch"


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (["a"], ""),
        (["a", "c", "b"], ""),
        (["a", "b", "a"], "ranks 0 and 2 are on the same GPU"),
        (["a", NO_DEVICE, "b"], f"rank 1 {NO_DEVICE}"),
        (["a", "b", NO_NCCL], f"rank 2 {NO_NCCL}"),
        ([NO_DEVICE, NO_DEVICE], f"rank 0 {NO_DEVICE}"),
    ],
)
def test_what_keeps_ranks_from_nccl(gpus, why):
    assert torch_distributed._obstacle_to_nccl(gpus) == why


def sets_up(rank, size, _, port, machine):
    """The arguments of init_process_group and set_device, and the log, on an imagined machine.

    `machine`: by rank, the UUIDs of the visible GPUs, and the current device if CUDA was used.
    """
    gpus, used = machine[rank]
    helpers.as_torchrun(rank, size, port)
    imagined = {
        "is_available": lambda: bool(gpus),
        "is_initialized": lambda: used is not None,
        "current_device": lambda: used,
        "device_count": lambda: len(gpus),
        "get_device_properties": lambda device: SimpleNamespace(uuid=gpus[device.index]),
        "set_device": lambda device: chosen.append(device.index),
    }
    chosen, messages, make = [], [], dist.init_process_group

    def init_process_group(backend, *, device_id, **options):
        chosen.append((backend, device_id and device_id.index))
        make("gloo", **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in imagined.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(dist, "init_process_group", init_process_group)
        patch.setattr(
            logging.getLogger("pycomm.group"), "warning", lambda text, *_: messages.append(text)
        )
        groups = [pycomm.init(timeout=20) for _ in range(2)]
    assert pycomm.all_reduce(torch.ones(1), group=groups[0]).item() == size
    return chosen, sum("Gloo alone" in message for message in messages)


@pytest.mark.parametrize(
    ("machine", "device_ids"),
    [
        ([("ab", None), ("ab", None)], [0, 1]),  # torchrun alone
        ([("ab", 1), ("ab", 0)], [1, 0]),  # after torch.cuda.set_device
        ([("a", None), ("b", None)], [0, 0]),  # a visible GPU each
        ([("ab", 0), ("ab", 0)], None),  # CUDA was used on the same device
        ([("a", None), ("a", None)], None),  # a single GPU
        ([("ab", None), ("", None)], None),  # the second rank has no GPU
    ],
)
def test_backends_of_torch(machine, device_ids):
    found = helpers.run_ranks(2, sets_up, helpers.free_port(), machine)
    if device_ids is None:
        assert found == [([("gloo", None)], 1)] * 2
    else:
        assert found == [([d, ("cpu:gloo,cuda:nccl", d)], 0) for d in device_ids]


def test_no_word_of_nccl_without_cuda():
    found = helpers.run_ranks(2, sets_up, helpers.free_port(), [("", None)] * 2)
    assert found == [([("gloo", None)], 0)] * 2


def same_store(rank, size, store):
    """Over a TCP store, and over gloo's own default timeout."""
    dist.init_process_group("gloo", init_method=f"file://{store}.init", rank=rank, world_size=size)
    with pycomm.init() as group:
        return pycomm.all_reduce(torch.ones(2), group=group).tolist()


def test_on_a_group_with_an_init_method():
    assert helpers.run_ranks(2, same_store) == [[2.0, 2.0]] * 2


def absent(rank, size, store, missing):
    """All ranks join torch.distributed, and one never calls init."""
    helpers.join_world(rank, size, store)
    if rank == missing:
        end = time.monotonic() + 20
        while len(list(Path(store).parent.glob("gave-up-*"))) < size - 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        return None
    start = time.monotonic()
    try:
        pycomm.init(timeout=1.0)
    except pycomm.Timeout as error:
        took = time.monotonic() - start
        Path(f"{store}").parent.joinpath(f"gave-up-{rank}").touch()
        return str(error), error.operation, took
    return "joined"


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_rank(missing):
    for outcome in helpers.run_ranks(3, absent, missing):
        if outcome is None:
            continue
        message, operation, took = outcome
        assert operation == "rendezvous"
        assert "within 1.0 s" in message
        assert f"rank {missing}" in message
        assert 0.9 <= took <= 2.0


def two_timeouts(rank, size, store):
    """A group that failed to form does not spoil the next one."""
    helpers.join_world(rank, size, store)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # finds what rank 0 has left there
        store.wait(["failed/0"], timedelta(seconds=20))
    with pytest.raises(pycomm.CollectiveError):
        pycomm.init(timeout=0.5)
    store.set(f"failed/{rank}", "")
    store.wait([f"failed/{r}" for r in range(size)], timedelta(seconds=20))
    with pycomm.init() as group:
        return pycomm.all_reduce(torch.ones(1), group=group).item()


def test_init_again_after_it_failed():
    assert helpers.run_ranks(2, two_timeouts) == [2.0, 2.0]


def used_by_strangers(rank, size, store):
    """A process that does not know the secret gets nothing and disturbs no rank."""
    helpers.join_world(rank, size, store)
    if rank == 0:
        with pycomm.init() as group:
            return pycomm.all_reduce(torch.ones(1), group=group).item()
    original = rendezvous._take

    def take_after_a_stranger(address, *rest):
        for message in (b"wrong secret", b""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(f"\0{address}")
                stranger.send(message)
                if message:
                    assert stranger.recv(16) == b""
        return original(address, *rest)

    rendezvous._take = take_after_a_stranger
    with pycomm.init() as group:
        return pycomm.all_reduce(torch.ones(1), group=group).item()


def test_strangers_get_no_window():
    assert helpers.run_ranks(2, used_by_strangers) == [2.0, 2.0]


def test_what_makes_a_node():
    """Never the hostname."""
    here = rendezvous.node_identity()
    assert socket.gethostname() not in here
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in here
    assert all(f"{name}:[" in here for name in ("net", "pid", "ipc"))


def join_in_vain(rank, size, store, nodes, spoil, odd_rank):
    """Every rank's error; afterwards they make a group as one should."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        options = spoil(patch) if rank == odd_rank else {}
        with pytest.raises((ValueError, OSError, pycomm.Timeout)) as caught:
            pycomm.init(timeout=30, **options)
    took = time.monotonic() - start
    with pycomm.init(timeout=30) as group:
        assert pycomm.all_reduce(torch.ones(1), group=group).item() == size
    return type(caught.value), str(caught.value), took


def more_staging(_):
    return {"staging_bytes": 4 << 20}


def some_heap(_):
    return {"cuda_heap_bytes": 4096}


def no_nccl(_):
    return {"transport": "gloo"}


def another_build(patch):
    patch.setattr(pycomm._C, "window_layout", 1)
    return {}


SETTINGS = {
    more_staging: ("staging_bytes", 2 << 20, 4 << 20),
    some_heap: ("cuda_heap_bytes", 0, 4096),
    no_nccl: ("transport", "auto", "gloo"),
    another_build: ("the window layout of pycomm's build", pycomm._C.window_layout, 1),
}


@pytest.mark.parametrize("nodes", ["aaa", "aab"])
@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("spoil", SETTINGS)
def test_ranks_that_differ(spoil, odd_rank, nodes):
    name, usual, odd = SETTINGS[spoil]
    of_first, other, of_other = (odd, 1, usual) if odd_rank == 0 else (usual, 2, odd)
    expected = (
        f"{name} must be the same on every rank: rank 0 has {of_first}, rank {other} has {of_other}"
    )
    for kind, message, took in helpers.run_ranks(3, join_in_vain, nodes, spoil, odd_rank):
        assert (kind, message) == (ValueError, expected)
        assert took < 10


def test_transports():
    with pytest.raises(ValueError, match="transport must be one of auto, gloo, got 'nccl'"):
        pycomm.init(transport="nccl")
    with pytest.raises(TypeError, match='CUDA tensors take NCCL with "auto"'):
        pycomm.init(transport="process_group")


def another_slice(patch):
    """A slice of another size, as if this rank saw another size of the node's memory."""
    patch.setattr(rendezvous, "slice_bytes", lambda: 256 << 20)
    return {}


@pytest.mark.parametrize("nodes", ["aaa", "baa"])
def test_a_rank_that_refuses_the_window(nodes):
    """All ranks know at once, also those on other nodes."""
    outcomes = helpers.run_ranks(3, join_in_vain, nodes, another_slice, 2)
    expected = f"the window's slice_bytes is {rendezvous.slice_bytes()}, this rank's is {256 << 20}"
    for rank, (kind, message, took) in enumerate(outcomes):
        assert kind is ValueError
        assert expected in message
        assert message.startswith("the window" if rank == 2 else "rank 2 could not set up")
        assert took < 10


def no_memory(patch):
    def fail(*_):
        raise OSError("no more files")

    patch.setattr(pycomm._C, "create_window", fail)
    return {}


def test_a_rank_that_cannot_make_the_window():
    """All other ranks are told, on every node."""
    outcomes = helpers.run_ranks(3, join_in_vain, "aab", no_memory, 0)
    assert [kind for kind, *_ in outcomes] == [OSError, ValueError, ValueError]
    assert "rank 0 could not set up the group: no more files" in outcomes[2][1]
    assert all(took < 10 for *_, took in outcomes)


@pytest.mark.parametrize("late", range(3))
def test_a_store_with_the_keys_of_an_earlier_life(late):
    """torchrun has restarted the processes, whose earlier life died during the rendezvous."""
    from pycomm._runtime.rendezvous import Deadline, store_all_gather

    store = dist.HashStore()

    def live(rank):
        if rank == late:
            time.sleep(0.2)  # the others read what is there
        return store_all_gather(store, rank, 3, f"rank {rank}", Deadline(20))

    with ThreadPoolExecutor(3) as pool:
        for life in (b"first", b"second"):
            for rank in range(3):
                meeting = store.add("meeting", 0)
                store.set(f"{meeting}/member/{rank}", '["of the dead", "0"]')
            strings, stores = zip(*pool.map(live, range(3)), strict=True)
            assert list(strings) == [["rank 0", "rank 1", "rank 2"]] * 3
            assert not any(own.check(["key"]) for own in stores)
            stores[late].set("key", life)
            assert [own.get("key") for own in stores] == [life] * 3


def die_in_rendezvous(rank, size, store, nodes, victim, where):
    """The victim dies at a step after all have arrived; returns the others' errors and times."""
    from pycomm._runtime import rendezvous

    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    if rank == victim:

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(rendezvous, where, die)
    start = time.monotonic()
    with pytest.raises(pycomm.CollectiveError) as caught:
        pycomm.init(timeout=60)
    error = caught.value
    return type(error), error.rank, error.operation, time.monotonic() - start


@pytest.mark.parametrize(
    ("nodes", "victim", "where"),
    [
        ("aaa", 0, "_offer"),
        ("aaa", 0, "_hand_out"),
        ("aaa", 1, "_take"),
        ("aaa", 2, "check_same"),
        ("aab", 1, "_take"),  # the other node is told
    ],
)
def test_a_death_in_the_rendezvous(nodes, victim, where):
    with helpers.Ranks(3, die_in_rendezvous, nodes, victim, where) as ranks:
        outcomes = ranks.wait_for([rank for rank in range(3) if rank != victim], 40)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        *what, took = outcome.value
        assert what == [pycomm.PeerDied, victim, "rendezvous"]
        assert took < 20


def try_unequally(rank, size, store):
    """Rank 0 has tried twice in vain before rank 1 comes."""
    helpers.join_world(rank, size, store)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(pycomm.Timeout):
                pycomm.init(timeout=0.3)
        store.set("tried", "")
    store.wait(["tried"])
    with pycomm.init(timeout=20) as group:
        return pycomm.all_reduce(torch.ones(1), group=group).item()


def test_ranks_that_have_tried_unequally_often_meet():
    assert helpers.run_ranks(2, try_unequally) == [2.0, 2.0]


def anew_after_a_failure(rank, size, store):
    """As README says, the next group is the default one."""
    helpers.join_world(rank, size, store)
    first = pycomm.init(timeout=20)
    if rank == 0:
        first.abort()
    with pytest.raises(pycomm.Aborted):
        pycomm.barrier()
    second = pycomm.init(timeout=20)
    assert pycomm.default_group() is second
    return pycomm.all_reduce(torch.ones(1)).item()


def test_init_replaces_a_default_group_that_has_failed():
    assert helpers.run_ranks(2, anew_after_a_failure) == [2.0, 2.0]


def be_interrupted(rank, size, store):
    from pycomm._runtime import rendezvous

    helpers.join_world(rank, size, store)
    if rank == 1:

        def interrupt(*_):
            raise KeyboardInterrupt

        rendezvous._take = interrupt
    with pytest.raises((KeyboardInterrupt, pycomm.CollectiveError)) as caught:
        pycomm.init(timeout=60)
    return caught.type, getattr(caught.value, "rank", None)


def test_ctrl_c_in_the_rendezvous():
    found = helpers.run_ranks(3, be_interrupted, limit=40)
    assert found == [(pycomm.Aborted, 1), (KeyboardInterrupt, None), (pycomm.Aborted, 1)]
