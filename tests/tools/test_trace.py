"""Traces: their content for each rank, lost operations, several nodes, files."""

import gzip
import json
import re
import threading
import time

import pytest
import torch
from helpers import run_group
from torch import nn

import pycomm
from pycomm._runtime import ranges
from pycomm.tracing import Sampler, TracePart, make_trace

LATE = 0.2  # seconds, of which a busy machine may take half
LARGE = 300_000  # elements of an operation whose end is timed


def load(path):
    return json.loads(path.read_text())


def events_of(trace, rank, kind):
    found = [e for e in trace["traceEvents"] if e["pid"] == rank and e.get("cat") == kind]
    return sorted(found, key=lambda e: e["ts"])


def inside(event, outer):
    slack = 0.002  # of a microsecond, from rounding
    end, outer_end = event["ts"] + event["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] <= event["ts"] and end <= outer_end + slack


def be_late(group, path):
    """Rank 1 is late twice; returns when each operation began and ended, by Python's clock."""
    clock = []
    with pycomm.trace(path, group=group) as trace:
        for _ in range(2):
            if group.rank == 1:
                time.sleep(LATE)
            begin = time.time()
            pycomm.all_reduce(torch.ones(LARGE), group=group)
            clock.append((begin, time.time()))
            trace.step()
    return clock, trace.lost


def test_a_late_rank_is_blamed(tmp_path):
    path = tmp_path / "made" / "trace.json"
    told = run_group(3, be_late, str(path))
    trace = load(path)
    assert trace["lostOperations"] == {}
    for rank, (clock, lost) in enumerate(told):
        assert lost == 0
        operations = events_of(trace, rank, "operation")[1:]  # the first one is the trace's own
        assert [o["name"] for o in operations] == ["all_reduce 1.14 MiB float32"] * 2
        steps = events_of(trace, rank, "user_annotation")
        assert [step["name"] for step in steps] == ["ProfilerStep#0", "ProfilerStep#1"]
        for operation, step, (begin, end) in zip(operations, steps, clock, strict=True):
            assert operation["args"]["last rank"] == 1
            assert operation["args"]["after the first (us)"] > 0.5e6 * LATE
            assert inside(operation, step)
            moment = trace["baseTimeNanoseconds"] / 1e9 + operation["ts"] / 1e6
            assert begin - 0.005 < moment < end + 0.005
            children = [
                e
                for kind in ("wait", "transfer")
                for e in events_of(trace, rank, kind)
                if inside(e, operation)
            ]
            names = [e["name"] for e in children]
            assert names == (["transfer"] if rank == 1 else ["wait for rank 1", "transfer"])
            assert sum(e["dur"] for e in children) == pytest.approx(operation["dur"], abs=0.01)
            if rank != 1:
                assert children[0]["dur"] > 0.5e6 * LATE > children[1]["dur"]


def run_slowly(group, path):
    with pycomm.trace(path, group=group) as trace:
        for _ in range(400):
            pycomm.all_reduce(torch.ones(8), group=group)
            time.sleep(0.0005)
    return trace.lost


def run_too_fast(group, path):
    x = torch.ones(8)
    with pycomm.trace(path, group=group) as trace:
        for _ in range(20_000):
            pycomm.all_reduce(x, group=group)
    return trace.lost


def test_lost_operations_are_counted(world, tmp_path):
    path = tmp_path / "trace.json"
    (group,) = world(1)
    assert run_slowly(group, path) == 0
    assert len(events_of(load(path), 0, "operation")) == 401
    with pytest.warns(UserWarning, match="are not in the trace"):
        lost = run_too_fast(group, path)
    trace = load(path)
    assert lost > 0
    assert trace["lostOperations"] == {"0": lost}
    # With the operation with which the trace begins.
    found = events_of(trace, 0, "operation")
    assert len(found) + lost == 20_001
    ends = [event["ts"] + event["dur"] for event in found]
    assert all(end < after["ts"] + 0.1 for end, after in zip(ends, found[1:], strict=False))


def test_the_sampler_collects_what_the_record_forgets(world):
    (group,) = world(1)
    pycomm.barrier(group=group)
    sampler = Sampler(group)
    sampler.start()
    for _ in range(1000):
        pycomm.barrier(group=group)
        time.sleep(0.0001)
    sampler.stop()
    assert sampler.log.lost == 0
    assert list(sampler.log.operations) == list(range(1001))
    for number, last in zip(range(873, 1001), group.report(128).ranks[0].operations, strict=True):
        seen = sampler.log.operations[number]
        assert seen["sequence"] == last.sequence
        assert seen["entered"] == pytest.approx(last.entered, abs=1e-4)


class Recorded:
    """A group of one rank with a record that the test writes."""

    rank = 0

    def __init__(self, operations):
        self.operations = operations
        self._core = self

    def state(self, most, only_own):
        assert only_own
        return {"ranks": [{"rank": 0, "operations": self.operations[-most:]}]}


def test_an_end_that_nobody_has_seen():
    """The first operation runs when the sampler looks, and is forgotten when it looks again."""
    group = Recorded([operation(1, 10.0, None)])
    sampler = Sampler(group)
    sampler.start()
    for latest in (0, 327):
        end = time.monotonic() + 30
        while latest not in sampler.log.operations and time.monotonic() < end:
            time.sleep(0.001)
        group.operations = [operation(1 + i, 20.0 + i, 20.5 + i) for i in range(200, 328)]
    sampler.stop()
    sampler.log.finish()
    assert sampler.log.lost == 199
    assert sampler.log.operations[0]["done"] == sampler.log.operations[0]["entered"] == 10.0
    assert sampler.log.operations[327]["done"] == 347.5


def train(group, path, options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    model = pycomm.DataParallel(module, group=group, bucket_cap_mb=0.1, **options)
    optimizer = pycomm.optim.FusedSGD(module.parameters(), lr=0.1)
    with pycomm.trace(path, group=group) as trace:
        for _ in range(3):
            model(torch.ones(4, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.step()


@pytest.mark.parametrize(
    "options", [{}, {"compression": pycomm.Int8()}, {"shard": "gradients"}], ids=str
)
def test_buckets_are_named(options, tmp_path):
    path = tmp_path / "trace.json"
    run_group(2, train, str(path), options)
    trace = load(path)
    for rank in range(2):
        last = events_of(trace, rank, "user_annotation")[-1]
        buckets = [e for e in events_of(trace, rank, "bucket") if inside(e, last)]
        calls = [e for e in events_of(trace, rank, "call") if inside(e, last)]
        operations = [o for o in events_of(trace, rank, "operation") if inside(o, last)]
        names = sorted({bucket["name"] for bucket in buckets})
        assert names == [f"bucket {i}" for i in range(len(names))]
        weights = [name for bucket in buckets for name in bucket["args"]["parameters"]]
        assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for bucket in buckets:
            within = [o for o in operations if inside(o, bucket)]
            assert within
            assert all(o["args"]["launched in"] == bucket["name"] for o in within)
            assert all(o["args"]["asynchronous"] for o in within)
        waits = [call["name"] for call in calls if call["name"].startswith("pycomm:wait for")]
        assert {f"pycomm:wait for {name}" for name in names} <= set(waits)
        assert any(call["name"] == "pycomm:finish" for call in calls)


def traced_error(group, path):
    with pycomm.trace(path, group=group):
        pycomm.all_reduce(torch.ones(LARGE), group=group)
        group.should_commit()  # so that it has succeeded on both ranks
        if group.rank == 1:
            raise ZeroDivisionError


def raise_on_one(group, path):
    with pytest.raises(ZeroDivisionError if group.rank == 1 else pycomm.CollectiveError):
        traced_error(group, path)
    group.close()


def test_a_block_that_raises_leaves_each_rank_its_file(tmp_path):
    run_group(2, raise_on_one, str(tmp_path / "trace.json"), timeout=5)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "rank0.trace.json",
        "rank1.trace.json",
    ]
    for rank in range(2):
        trace = load(tmp_path / f"rank{rank}.trace.json")
        assert {e["pid"] for e in trace["traceEvents"]} == {rank}
        assert "all_reduce 1.14 MiB float32" in {e["name"] for e in trace["traceEvents"]}
        assert not events_of(trace, rank, "wait")  # it does not know when the others came


def test_a_file_per_rank(tmp_path):
    """As Holistic Trace Analysis reads them: it looks for the rank by this expression."""
    run_group(2, be_late, str(tmp_path / "{rank}.json.gz"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.json.gz", "1.json.gz"]
    for rank in range(2):
        text = gzip.decompress((tmp_path / f"{rank}.json.gz").read_bytes()).decode()
        assert re.search(r'"rank":\s+(\d+)', text).group(1) == str(rank)
        trace = json.loads(text)
        assert {e["pid"] for e in trace["traceEvents"]} == {rank}
        assert len(events_of(trace, rank, "wait")) >= (0 if rank == 1 else 2)


def operation(sequence, entered, done):
    told = "all_reduce(float32, 9 elements, op=sum)"
    return {"sequence": sequence, "operation": "all_reduce", "description": told, "bytes": 36,
            "entered": entered, "done": done, "subject": ""}  # fmt: skip


def test_clocks_of_nodes_are_aligned():
    """Two nodes whose clocks are 1000 s apart; rank 1 comes 2 s late, then 1 s early."""
    parts = []
    for rank, ahead in ((0, 0.0), (1, 1000.0)):
        came = [(10.0, 20.0), (12.0, 19.0)][rank]
        ends = [(12.1, 20.1), (12.1, 20.1)][rank]
        part = TracePart(
            rank, 2, 1, rank, 1e9 - ahead, ahead, ahead + 30.0, steps=[ahead, ahead + 30.0]
        )
        for sequence, (entered, done) in enumerate(zip(came, ends, strict=True)):
            part.operations.append(operation(sequence, ahead + entered, ahead + done))
        parts.append(part)
    trace = make_trace(parts, parts)
    for rank, wait in ((0, (10.0, 2.0, 1)), (1, (19.0, 1.0, 0))):
        (event,) = [e for e in events_of(trace, rank, "wait") if e["dur"] > 5e5]
        begin, lasts, last = wait
        zero = trace["baseTimeNanoseconds"] / 1e9 - 1e9
        assert event["name"] == f"wait for rank {last}"
        assert event["ts"] / 1e6 + zero == pytest.approx(begin, abs=0.11)  # as ends allow
        assert event["dur"] / 1e6 == pytest.approx(lasts, abs=0.11)


def test_an_object_that_is_used_twice(world, tmp_path):
    """Nothing of the first block is in the second one's file."""
    path = tmp_path / "trace.json"
    (group,) = world(1)
    trace = pycomm.trace(path, group=group)
    for count in (3, 1):
        with trace:
            for _ in range(count):
                pycomm.all_reduce(torch.ones(8), group=group)
                trace.step()
        found = load(path)
        assert len(events_of(found, 0, "user_annotation")) == count
        assert len(events_of(found, 0, "call")) == count
        assert len(events_of(found, 0, "operation")) == count + 1  # with the trace's own


def test_an_interrupt_at_the_beginning_leaves_nothing_behind(world, monkeypatch, tmp_path):
    (group,) = world(1)
    start, short_way = threading.Thread.start, group._short_way

    def interrupted(thread):
        start(thread)
        if thread.name == "pycomm trace":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pycomm.trace(tmp_path / "trace.json", group=group).__enter__()
    assert "pycomm trace" not in {thread.name for thread in threading.enumerate()}
    assert group not in ranges.watches
    assert group._short_way is short_way


def run_on_nodes(group, path):
    with pycomm.trace(path, group=group):
        for _ in range(5):
            pycomm.all_reduce(torch.ones(LARGE), group=group)


def test_a_trace_of_several_nodes(tmp_path):
    """Emulated nodes share one clock, so it must not be shifted by more than an operation takes."""
    path = tmp_path / "trace.json"
    with pycomm.LocalWorld(4, nodes=[2, 2]) as world:
        world.run(run_on_nodes, str(path))
    trace = load(path)
    ends = [events_of(trace, rank, "operation")[-1] for rank in range(4)]
    assert {end["args"]["sequence"] for end in ends} == {6}
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1, 2, 3}
    starts = [end["ts"] for end in ends]
    assert max(starts) < min(end["ts"] + end["dur"] for end in ends)


def test_one_trace_at_a_time(world, tmp_path):
    (group,) = world(1)
    with pycomm.trace(tmp_path / "a.json", group=group):
        second = pycomm.trace(tmp_path / "b.json", group=group)
        with pytest.raises(ValueError, match="another one"):
            second.__enter__()
    assert ranges.watches == {}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_the_profiler_sees_operations_and_buckets(world):
    (group,) = world(1)
    model = pycomm.DataParallel(nn.Linear(8, 8), group=group)
    x = torch.ones(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pycomm.all_reduce(x, group=group)
        pycomm.all_gather(torch.empty(8), x, group=group)
        pycomm.broadcast(x, group=group, async_op=True).wait()
        pycomm.compressed_all_reduce(x, pycomm.Int8(), group=group)
        pycomm.barrier(group=group)
        model(x).sum().backward()
    pycomm.all_gather(torch.empty(8), x, group=group)
    names = [event.name.removeprefix("pycomm:") for event in profile.events()]
    for name in (
        "all_reduce",
        "all_gather",
        "broadcast",
        "wait for broadcast",
        "compressed_all_reduce",
        "barrier",
        "bucket 0",
        "finish",
        "wait for bucket 0",
    ):
        assert name in names
    assert names.count("all_gather") == 1
