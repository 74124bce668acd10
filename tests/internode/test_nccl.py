"""What a group that spans nodes does with CUDA tensors over NCCL, with imagined streams."""

from __future__ import annotations

import contextlib
import os
import threading
import types

import helpers
import pytest
import spanning
import torch

import pycomm
from pycomm import _init
from pycomm._nccl import connect, process_groups
from pycomm._runtime.lifetime import Nodes

TIMEOUT = 0.2


class Point:
    """An event of an imagined stream."""

    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def watch():
    """A watch and an event that says that a deadline has been overrun."""
    overrun = threading.Event()
    watch = process_groups.DeadlineThread(TIMEOUT, overrun.set)
    yield watch, overrun
    watch.end()


def test_work_that_overruns_its_deadline(watch):
    watch, overrun = watch
    watch.add(Point(True), Point(True))
    watch.add(Point(True), Point(False))
    assert overrun.wait(10 * TIMEOUT)


def test_work_that_has_not_begun_has_no_deadline(watch):
    watch, overrun = watch
    begin, end = Point(False), Point(False)
    watch.add(begin, end)
    assert not overrun.wait(3 * TIMEOUT)
    begin.reached = True
    assert overrun.wait(10 * TIMEOUT)


class Stream:
    """Notes what is enqueued, in one list of all streams."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.reached = True

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Point:
        return Point(self.reached)

    def synchronize(self) -> None:
        self.log.append(f"await {self.name}")


class Core:
    """A group's core that can only be aborted."""

    aborted = False

    def check_usable(self) -> None:
        if self.aborted:
            raise pycomm.GroupUnusable("aborted")

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def device(monkeypatch):
    """A span over an imagined device: its current stream, its own one, and the log of both."""
    log: list[str] = []
    current, own = Stream("current", log), Stream("own", log)

    @contextlib.contextmanager
    def entered(stream):
        log.append(f"enter {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    fake = types.SimpleNamespace(
        current_stream=lambda _: current,
        Stream=lambda _: own,
        stream=entered,
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setattr(process_groups.torch, "cuda", fake)
    monkeypatch.setattr(process_groups, "Point", lambda event: event)
    imagined = types.SimpleNamespace(
        abort=lambda: log.append("abort"), close=lambda: log.append("close")
    )
    core = Core()
    made = process_groups.InternodeProcessGroups(
        core, Nodes(((0,), (1,)), 0), 0, None, imagined, {}, TIMEOUT
    )
    yield made, log, own, fake
    made.close()


def enqueue(made, log) -> None:
    tensor = types.SimpleNamespace(
        record_stream=lambda stream: log.append(f"keep for {stream.name}")
    )
    made.enqueue("cuda", lambda: log.append("exchange"), [tensor])


ENQUEUED = [
    "own waits for current",
    "enter own",
    "exchange",
    "current waits for own",
    "keep for own",
    "leave own",
]


def test_a_watch_that_is_dropped_ends_its_thread():
    watch = process_groups.DeadlineThread(TIMEOUT, threading.Event().set)
    thread = watch._thread
    watch.add(Point(True), Point(False))
    del watch
    thread.join(10)
    assert not thread.is_alive()


def test_an_operation_runs_on_a_stream_of_its_own(device):
    made, log, _, _ = device
    enqueue(made, log)
    assert log == ENQUEUED
    made.check()


def test_closing_waits_for_what_is_enqueued(device):
    """A backend that is dropped aborts what it still runs."""
    made, log, _, _ = device
    enqueue(made, log)
    made.close()
    assert log == [*ENQUEUED, "await own", "close"]


def test_an_interrupt_of_close_ends_the_group(device):
    made, log, own, _ = device
    enqueue(made, log)

    def interrupt() -> None:
        raise KeyboardInterrupt

    real, own.synchronize = own.synchronize, interrupt
    with pytest.raises(KeyboardInterrupt):
        made.close()
    own.synchronize = real
    assert log == [*ENQUEUED, "abort", "close"]
    with pytest.raises(pycomm.GroupUnusable):
        enqueue(made, log)


def test_a_failure_while_enqueuing_ends_the_group_and_keeps_the_tensors(device):
    made, log, _, _ = device

    def fail() -> None:
        raise MemoryError

    tensor = types.SimpleNamespace(record_stream=lambda _: log.append("keep"))
    with pytest.raises(MemoryError):
        made.enqueue("cuda", fail, [tensor])
    assert log[2:] == ["abort", "current waits for own", "keep"]
    with pytest.raises(pycomm.GroupUnusable):
        enqueue(made, log)


def test_a_deadline_of_the_device_becomes_a_timeout(device):
    """The communicator is aborted, and the next call raises."""
    made, log, own, _ = device
    own.reached = False
    real, states = own.record_event, iter([True, False])
    own.record_event = lambda: Point(next(states))
    enqueue(made, log)
    helpers.wait_until(lambda: "abort" in log)
    own.record_event = real
    with pytest.raises(pycomm.Timeout, match=r"took longer than 0\.2 s: NCCL was"):
        enqueue(made, log)
    with pytest.raises(pycomm.GroupUnusable):
        enqueue(made, log)


def test_a_captured_operation_has_no_deadline(device):
    """A replay may come at any time."""
    made, log, own, fake = device
    fake.is_current_stream_capturing = lambda: True
    own.record_event = lambda: pytest.fail("captures allow no events to be asked")
    enqueue(made, log)
    assert log == ENQUEUED


def test_a_failure_inside_the_node_ends_the_others(device):
    made, log, _, _ = device

    def fail() -> None:
        raise pycomm.PeerDied("gone", rank=0, pid=7)

    with pytest.raises(pycomm.PeerDied, match="inside node 0: gone") as raised:
        made.enqueue("cuda", fail, [])
    assert (raised.value.rank, raised.value.pid) == (0, 7)
    assert "abort" in log


@pytest.mark.parametrize(
    ("backends", "gpus", "wanted"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, True, True),
        ({"cpu": "gloo", "cuda": "nccl"}, False, False),
        ({"cpu": "gloo", "cuda": "gloo"}, True, False),
        ({"cpu": "pycomm"}, True, False),
    ],
)
def test_which_ranks_have_nccl(monkeypatch, backends, gpus, wanted):
    monkeypatch.setattr(_init, "backends_of", lambda _: dict(backends))
    monkeypatch.setattr(_init.torch.cuda, "is_available", lambda: gpus)
    assert _init.has_nccl(None) is wanted


def connected(rank: int, size: int, store: str, transport: str, with_nccl: str) -> list[bool]:
    """Whether a rank would connect over NCCL, which only the given ranks have."""
    spanning.pretend("ab"[rank])
    seen: list[bool] = []
    _init.has_nccl = lambda _: str(rank) in with_nccl
    connect.connect_nodes = lambda *_: seen.append(True)
    with helpers.member(rank, size, store, transport=transport, timeout=30) as group:
        assert pycomm.all_reduce(torch.ones(3), group=group).tolist() == [2.0] * 3
    return seen


@pytest.mark.parametrize(
    ("transport", "with_nccl", "wanted"),
    [("auto", "01", [True]), ("auto", "0", []), ("gloo", "01", [])],
)
def test_every_rank_or_none_takes_nccl(transport, with_nccl, wanted):
    assert helpers.run_ranks(2, connected, transport, with_nccl) == [wanted] * 2


@pytest.fixture
def nccl(monkeypatch):
    """The carriers of a stripe on two nodes over an imagined NCCL, and the calls of NCCL."""
    log: list[str] = []
    backend = types.SimpleNamespace(
        abort=lambda: log.append("abort"), shutdown=lambda: log.append("shutdown")
    )
    monkeypatch.setattr(process_groups, "new_nccl", lambda *_: backend)
    return process_groups.StripePeers(None, 0, 2, TIMEOUT), log


def test_only_what_was_not_aborted_is_shut_down(nccl):
    """NCCL still sends when a stream has come to the end of an operation; shutdown() waits."""
    made, log = nccl
    made.close()
    assert log == ["shutdown"]
    made.abort()
    made.close()
    assert log == ["shutdown", "abort"]


def test_a_forked_child_leaves_the_parents_connections(nccl, monkeypatch):
    made, log = nccl
    child = os.getpid() + 1
    monkeypatch.setattr(process_groups.os, "getpid", lambda: child)
    made.abort()
    made.close()
    assert log == []


def test_connecting_ends_with_the_timeout(nccl, monkeypatch):
    """The other node does not come, so the device never completes the exchange."""
    made, log = nccl
    monkeypatch.setattr(process_groups.torch, "zeros", lambda *_, **__: torch.ones(2))
    monkeypatch.setattr(made, "all_gather", lambda *_: types.SimpleNamespace(wait=lambda: None))
    stream = types.SimpleNamespace(record_event=lambda: Point(False))
    monkeypatch.setattr(process_groups.torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(process_groups, "Point", lambda event: event)
    with pytest.raises(TimeoutError, match=r"NCCL has not connected within 0\.2 s"):
        made.connect()
    assert log == ["abort"]


def test_an_event_of_a_device_that_has_failed_never_happens(watch):
    """Its deadline still ends the wait."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    watch, overrun = watch
    watch.add(Point(True), Broken())
    assert overrun.wait(10 * TIMEOUT)
