"""What a group that spans nodes does with CUDA tensors over NCCL, with imagined streams."""

from __future__ import annotations

import contextlib
import threading
import types

import helpers
import pytest

import pycomm
from pycomm._runtime import carriers, span
from pycomm._runtime.internode import Nodes

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
    watch = carriers.Watch(TIMEOUT, overrun.set)
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
    """A group's core that is only ever aborted."""

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
    monkeypatch.setattr(span.torch, "cuda", fake)
    monkeypatch.setattr(span, "Point", lambda event: event)
    imagined = types.SimpleNamespace(
        abort=lambda: log.append("abort"), close=lambda: log.append("close")
    )
    core = Core()
    made = span.Span(core, Nodes(((0,), (1,)), 0), 0, None, {"cuda": imagined}, TIMEOUT)
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
    watch = carriers.Watch(TIMEOUT, threading.Event().set)
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
    with pytest.raises(pycomm.Timeout, match=r"took longer than 0\.2 s: its process group was"):
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
    ("transport", "backends", "gpus", "wanted"),
    [
        ("auto", {"cpu": "gloo", "cuda": "nccl"}, True, {"cuda": "nccl"}),
        ("auto", {"cpu": "gloo", "cuda": "nccl"}, False, {}),
        ("auto", {"cpu": "gloo", "cuda": "gloo"}, True, {}),
        ("gloo", {"cpu": "gloo", "cuda": "nccl"}, True, {}),
        ("process_group", {"cpu": "gloo", "cuda": "nccl"}, True, {"cpu": "gloo", "cuda": "nccl"}),
        ("process_group", {"cpu": "gloo", "cuda": "gloo"}, True, {"cpu": "gloo"}),
    ],
)
def test_what_carries_which_tensors(monkeypatch, transport, backends, gpus, wanted):
    monkeypatch.setattr(carriers, "backends_of", lambda _: dict(backends))
    monkeypatch.setattr(carriers, "can_make_backend", lambda _: True)
    monkeypatch.setattr(carriers.torch.cuda, "is_available", lambda: gpus)
    assert carriers.backends_to_make(transport, None) == wanted


def test_an_event_of_a_device_that_has_failed_never_happens(watch):
    """Its deadline tells."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    watch, overrun = watch
    watch.add(Point(True), Broken())
    assert overrun.wait(10 * TIMEOUT)
