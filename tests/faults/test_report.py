"""Reports: what ranks did, which rank is late, and where each was when an operation failed."""

import json
import os
import pickle
import signal
import threading
import time

import helpers
import pytest
import torch

import pycomm
from pycomm.report import make_report

MOST_BYTES = 20_000


def run_sizes(group):
    """Runs small and large operations, with the clock read before and after each."""
    clock = []
    for count in (8, 250_000, 2, 50_000):
        begin = time.monotonic()
        pycomm.all_reduce(torch.ones(count), group=group)
        clock.append((begin, time.monotonic()))
    report = group.report()
    pycomm.barrier(group=group)  # nobody goes on until all have looked
    return clock, report


def test_operations_are_recorded():
    """Recorded times agree with the clock that Python reads."""
    for rank, (clock, report) in enumerate(helpers.run_group(2, run_sizes)):
        assert [told.rank for told in report.ranks] == [0, 1]
        mine = report.ranks[rank]
        assert mine.pid > 0
        assert not mine.gone
        assert [told.sequence for told in mine.operations] == [1, 2, 3, 4]
        assert [told.bytes for told in mine.operations] == [32, 1_000_000, 8, 200_000]
        assert "all_reduce(float32, 250000 elements, op=sum" in mine.operations[1].description
        for told, (begin, end) in zip(mine.operations, clock, strict=True):
            assert begin - 1e-3 < told.entered <= told.done < end + 1e-3
            assert told.bytes < 65536 or told.done > told.entered


def run_many(group):
    for _ in range(300):
        pycomm.barrier(group=group)
    return [len(group.report(most).ranks[1 - group.rank].operations) for most in (1, 100, 128)]


def test_the_last_ones_are_kept():
    assert helpers.run_group(2, run_many) == [[1, 100, 128]] * 2


def be_late(group, culprit):
    for _ in range(20):
        if group.rank == culprit:
            time.sleep(0.02)  # longer than a busy machine keeps another rank from a core
        pycomm.all_reduce(torch.ones(10), group=group)
    return group.report(20).lateness


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_late_rank_is_named(culprit):
    for lateness in helpers.run_group(3, be_late, culprit):
        assert max(lateness, key=lateness.get) == culprit
        assert lateness[culprit] > 0.015
        assert min(lateness.values()) < 0.015


def stay_away(group):
    pycomm.all_reduce(torch.ones(10), group=group)
    if group.rank == 1:
        time.sleep(1.5)
        return None
    with pytest.raises(pycomm.Timeout) as caught:
        pycomm.all_reduce(torch.ones(1000), group=group)
    time.sleep(0.5)  # so that the other's report does not find this rank gone
    return caught.value


def test_an_error_tells_who_is_late():
    for rank, error in enumerate(helpers.run_group(3, stay_away, timeout=0.5)):
        if rank == 1:
            continue
        assert error.report.late == (1,)
        others = [error.report.ranks[r] for r in (0, 2)]
        assert all(told.waits_for == 1 for told in others)
        assert all(told.operations[-1].done is None for told in others)
        assert error.report.ranks[1].operations[-1].sequence == 1
        text = str(error.report)
        assert "waited for: rank 1" in text
        assert "): after operation 1, all_reduce(float32, 10 elements" in text
        assert "ranks 0, 2: in operation 2, all_reduce(float32, 1000 elements" in text
        told = json.loads(error.report.json())
        assert (told["late"], told["omitted"], told["failed"]) == ([1], 0, True)
        if hasattr(error, "__notes__"):  # from Python 3.11 on
            assert error.__notes__ == [text]
        assert pickle.loads(pickle.dumps(error)).report == error.report


def die(group):
    pycomm.barrier(group=group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerDied) as caught:
        pycomm.all_reduce(torch.ones(1000), group=group)
    time.sleep(0.5)
    return caught.value.report


def in_dying_group(rank, size, store):
    with helpers.member(rank, size, store, timeout=20) as group:
        return die(group)


def test_the_dead_keep_their_records():
    with helpers.Ranks(3, in_dying_group) as ranks:
        for outcome in ranks.wait_for((0, 2)):
            report = outcome.value
            assert [told.gone for told in report.ranks] == [False, True, False]
            assert report.ranks[1].operations[0].operation == "barrier"
            assert f"rank 1 (pid {ranks.pids[1]}): gone; after operation 1" in str(report)


def cross(group):
    """Two groups in opposite orders: each rank waits in a group that the other has not come to."""
    with pycomm.init(timeout=1.0) as other:
        first = group if group.rank == 0 else other
        with pytest.raises(pycomm.CollectiveError) as caught:
            pycomm.barrier(group=first)
        return caught.value.report


def test_a_circle_of_two_groups():
    reports = helpers.run_group(2, cross, timeout=1.0)
    assert any("in different orders" in str(report) for report in reports)


def receive_in_vain(group):
    if group.rank == 1:
        time.sleep(1.2)
        return None
    with pytest.raises(pycomm.Timeout) as caught:
        pycomm.recv(torch.empty(4), 1, group=group)
    return caught.value.report


def test_waiting_for_a_message():
    report = helpers.run_group(2, receive_in_vain, timeout=0.5)[0]
    assert report.ranks[0].waits_for == 1


def test_from_another_thread(world):
    """While a rank waits, and after a failure; not after close()."""
    local_world = world(2)
    group = local_world.groups[0]
    seen = []

    def look():
        helpers.wait_until(lambda: group.report().ranks[0].waits_for == 1)
        seen.append(group.report())
        group.abort()

    thread = threading.Thread(target=look)
    thread.start()

    def body(mine):
        if mine.rank == 1:
            thread.join()
            return
        with pytest.raises(pycomm.Aborted):
            pycomm.barrier(group=mine)

    local_world.run(body)
    assert seen[0].late == (1,)
    assert "in operation 1, barrier()" in str(group.report())
    for wrong in (0, 129):
        with pytest.raises(ValueError, match=f"operations must be 1 to 128, got {wrong}"):
            group.report(wrong)
    group.close()
    with pytest.raises(pycomm.GroupUnusable, match="closed"):
        group.report()


def wait_late(group):
    """A failed work whose error is raised much later."""
    if group.rank == 1:
        time.sleep(2.5)
        return None
    work = pycomm.all_reduce(torch.ones(10), group=group, async_op=True)
    time.sleep(2)
    with pytest.raises(pycomm.Timeout) as caught:
        work.wait()
    return caught.value.report


def test_the_time_of_the_failure_counts():
    report = helpers.run_group(2, wait_late, timeout=0.5)[0]
    waited = report.time - report.ranks[0].operations[-1].entered
    assert 0.4 < waited < 1.5


def test_long_waits_of_small_operations_are_timed(world):
    def body(group):
        if group.rank == 1:
            time.sleep(0.3)
        pycomm.barrier(group=group)
        return group.report().ranks[0].operations[0]

    told = world(2).run(body)[0]
    assert told.done - told.entered > 0.2


def test_a_group_of_one(world):
    def body(group):
        pycomm.all_reduce(torch.ones(4), group=group)
        return group.report()

    report = world(1).run(body)[0]
    assert [told.operation for told in report.ranks[0].operations] == ["all_reduce"]


def test_a_smaller_group_begins_anew(world):
    local_world = world(3)

    def body(group):
        for _ in range(5):
            group.should_commit()  # succeeds on all ranks, although the others go on
        if group.rank == 1:
            group.close()
            return None
        smaller = group.shrink()
        pycomm.barrier(group=smaller)
        told = smaller.report()
        pycomm.barrier(group=smaller)
        smaller.close()
        return told

    report = local_world.run(body)[0]
    assert [told.rank for told in report.ranks] == [0, 1]
    assert [told.sequence for told in report.ranks[0].operations] == [1]


def state_of(rank, sequence, waits_for=None):
    """A rank's state that differs from all others, so that ranks cannot share lines."""
    operation = {
        "sequence": sequence,
        "operation": "all_reduce",
        "description": f"all_reduce({rank}{'x' * 200})",
        "bytes": 4,
        "entered": float(sequence),
        "done": None,
        "subject": "",
    }
    return {
        "rank": rank,
        "pid": 10**6 + rank,
        "gone": False,
        "waits_for": waits_for,
        "elsewhere": "waits for another rank in another group, " + 60 * "y",
        "operations": [operation] * 8,
        "launched": [],
        "memory": [0] * 60,
    }


def state_of_group(states, nodes=(), **others):
    """A group's state as the extension returns it."""
    told = {"time": 9.0, "size": len(states), "failed": False, "ranks": states, "nodes": nodes}
    return {**told, **others}


def node_state(node, told=""):
    return {"node": node, "ranks": [2 * node, 2 * node + 1], "peer": 2 * node,
            "awaited": False, "lost": False, "told": told}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_sizes_are_bounded(size):
    """Also if no two ranks do the same; the late rank is kept."""
    late = size - 1
    states = [state_of(rank, 5, late) for rank in range(late)] + [state_of(late, 4)]
    nodes = [node_state(1 + i, "z" * 200) for i in range(size)]
    report = make_report(state_of_group(states, nodes))
    text, told = str(report), report.json()
    assert len(text.encode()) < MOST_BYTES
    assert len(told.encode()) < MOST_BYTES
    kept = json.loads(told)
    assert kept["omitted"] + len(kept["ranks"]) == size
    assert kept["ranks"][-1]["rank"] == late
    assert f"rank {late} (pid {10**6 + late}): in operation 4" in text
    assert (" more ranks" in text) == (size > 40)
    assert (" more nodes" in text) == (size > 8)
    assert kept["nodes"]


def test_nodes_with_news_come_first():
    nodes = [node_state(1), {**node_state(2), "awaited": True}, node_state(3, "it has left")]
    report = make_report(state_of_group([state_of(0, 5)], nodes))
    assert str(report).splitlines()[:3] == [
        "node 2 (ranks 4, 5): this rank waits for rank 4",
        "node 3 (ranks 6, 7): this rank exchanges with rank 6; it says: it has left",
        "node 1 (ranks 2, 3): this rank exchanges with rank 2",
    ]


def test_equal_ranks_share_a_line():
    states = [state_of(rank, 5, 3) for rank in range(9) if rank != 3]
    for state in states:
        state["operations"] = state_of(0, 5)["operations"]
    ranks = [*states[:3], state_of(3, 4), *states[3:]]
    report = make_report(state_of_group(ranks))
    lines = str(report).splitlines()
    assert lines[1].startswith("rank 3 (pid 1000003): in operation 4")
    assert lines[2].startswith("ranks 0 to 2, 4 to 8: in operation 5")
    assert "; wait for rank 3" in lines[2]


@pytest.mark.parametrize(
    ("seconds", "failed", "late"), [(0.005, False, ()), (0.02, False, (1,)), (0.005, True, (1,))]
)
def test_short_waits_name_nobody(seconds, failed, late):
    """Every rank has short waits when ranks meet."""
    states = [state_of(0, 5, 1), state_of(1, 4)]
    now = states[0]["operations"][-1]["entered"] + seconds
    report = make_report(state_of_group(states, time=now, failed=failed))
    assert report.late == late


def test_no_state_lasts_less_than_nothing():
    """A rank may have entered its operation just after the report's time."""
    report = make_report(state_of_group([state_of(0, 5)], time=4.99))
    assert ", for 0.0 s;" in str(report)


def test_the_end_of_a_chain_is_late():
    states = [state_of(0, 5, 1), state_of(1, 5, 2), state_of(2, 5)]
    report = make_report(state_of_group(states))
    assert report.late == (2,)


def launch_of(sequence, state, since=5.0, captured=False):
    """An operation on CUDA as the extension returns it."""
    return {
        "sequence": sequence,
        "operation": "all_reduce",
        "description": "all_reduce(float32, on CUDA)",
        "bytes": 4,
        "captured": captured,
        "launched": 5.0,
        "state": state,
        "since": since,
        "subject": "",
    }


def report_of_devices(*launches, **others):
    """A report of ranks that have used only their devices."""
    states = [
        {**state_of(rank, 1), "elsewhere": "", "operations": [], "launched": launched}
        for rank, launched in enumerate(launches)
    ]
    return make_report(state_of_group(states, **others))


def test_where_devices_are():
    report = report_of_devices(
        [launch_of(3, "done"), launch_of(4, "running", 7.0), launch_of(5, "launched")],
        [launch_of(3, "done", 6.0), launch_of(4, "launched")],
        [launch_of(3, "done", 6.5)],
        [launch_of(1, "running", 8.0, captured=True), launch_of(4, "done")],
        [],
    )
    assert report.late == (1, 2, 4)
    told = "all_reduce(float32, on CUDA)"
    assert str(report).splitlines() == [
        "waited for: ranks 1, 2, 4",
        "rank 4 (pid 1000004): before its first operation",
        f"rank 3 (pid 1000003): its device is in a replay of operation 1, {told}, for 1.0 s; "
        "launched up to operation 4",
        f"rank 2 (pid 1000002): its device is after operation 3, {told}, for 2.5 s",
        f"rank 1 (pid 1000001): its device is before operation 4, {told}, for 4.0 s",
        f"rank 0 (pid 1000000): its device is in operation 4, {told}, for 2.0 s; "
        "launched up to operation 5",
    ]


@pytest.mark.parametrize(
    ("seconds", "failed", "late"), [(0.005, False, ()), (0.02, False, (1,)), (0.005, True, (1,))]
)
def test_devices_that_have_just_begun_name_nobody(seconds, failed, late):
    launches = [launch_of(2, "running", 6.0)], [launch_of(1, "done", 4.0)]
    assert report_of_devices(*launches, time=6 + seconds, failed=failed).late == late


def test_devices_in_one_state_share_a_line():
    launches = [[launch_of(2, "running", 6.0 + rank)] for rank in range(3)]
    told = "devices are in operation 2, all_reduce(float32, on CUDA), for 3.0 s"
    assert str(report_of_devices(*launches)) == f"ranks 0 to 2: their {told}"


def test_the_operation_of_a_device_is_kept():
    """However many the host has launched since, in as many ranks."""
    launches = [
        [launch_of(1, "running"), *(launch_of(i, "launched") for i in range(2, 129))]
        for _ in range(64)
    ]
    told = report_of_devices(*launches).json()
    assert len(told.encode()) < MOST_BYTES
    assert all(rank["launched"][0]["state"] == "running" for rank in json.loads(told)["ranks"])
