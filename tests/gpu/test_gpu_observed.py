"""Reports, errors and pycomm.top tell what ranks launch on devices, and how far these are."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_ranks
import helpers
import pytest
import torch

import pycomm
from pycomm import top
from pycomm._runtime.cuda import STAGING_BYTES

pytestmark = pytest.mark.gpu

SIZE = 3
COUNT = 1 << 12
BUCKET = "bias ... weight (2 parameters)"


def wait_for(
    group: pycomm.Group, ranks: Sequence[int], sequence: int, state: str
) -> pycomm.report.Report:
    """A report in which the devices of `ranks` have come to an operation.

    Each host notices by itself how far its device is, so the ranks' reports may differ for a while.
    """

    def reports() -> list[pycomm.report.Report]:
        report = group.report()
        current = [report.ranks[rank].on_device for rank in ranks]
        there = all(each and (each.sequence, each.state) == (sequence, state) for each in current)
        return [report] if there else []

    found: list[pycomm.report.Report] = []
    helpers.wait_until(lambda: found.extend(reports()) or found, 60)
    return found[0]


def run_some(group: pycomm.Group) -> list[list[tuple[int, str, int]]]:
    """Several kinds of operations; one of them has connected the group."""
    tensor = torch.ones(COUNT, device="cuda")
    pycomm.all_reduce(tensor, "avg", group=group)
    pycomm.compressed_all_reduce(tensor, pycomm.Int8(), group=group)
    pycomm.compressed_all_reduce(tensor, pycomm.TopK(density=0.1), group=group)
    pycomm.all_gather(torch.empty(group.size * COUNT, device="cuda"), tensor, group=group)
    torch.cuda.synchronize()
    report = wait_for(group, range(group.size), 5, "done")
    pycomm.barrier(group=group)  # nobody goes on until all have looked
    return [
        [(told.sequence, told.operation, told.bytes) for told in rank.launched]
        for rank in report.ranks
    ]


@pytest.mark.parametrize("layout", gpu_ranks.LAYOUTS)
def test_launches_are_recorded(layout: str) -> None:
    for ranks in gpu_ranks.run(SIZE, layout, run_some):
        for launched in ranks:
            assert launched == [
                (1, "all_reduce", 4),
                *((2 + i, "all_reduce", 4 * COUNT) for i in range(3)),
                (5, "all_gather", 4 * COUNT),
            ]


def counted(group: pycomm.Group) -> dict[tuple[str, str, int], tuple[int, int]]:
    """The number of operations on the device and their bytes, by kind."""
    rows = [row for row in group.stats().operations if row.device == "cuda"]
    return {(row.operation, row.codec, row.size): (row.count, row.bytes) for row in rows}


def await_counted(group: pycomm.Group, operations: int) -> pycomm.Stats:
    """The statistics once the host has heard of this many operations."""
    found: list[pycomm.Stats] = []

    def are_counted() -> bool:
        found[:] = [group.stats()]
        rows = [row for row in found[0].operations if row.device == "cuda"]
        return sum(row.exchange.count for row in rows) >= operations  # counted last

    helpers.wait_until(are_counted, 60)
    return found[0]


def run_counted(group: pycomm.Group) -> tuple[dict[tuple[str, str, int], tuple[int, int]], str]:
    run_some(group)
    before = await_counted(group, 5)
    pycomm.all_reduce(torch.ones(COUNT, device="cuda"), group=group)
    (row,) = await_counted(group, 6).since(before).operations
    assert (row.operation, row.device, row.count, row.bytes) == ("all_reduce", "cuda", 1, 4 * COUNT)
    for row in before.operations:
        if row.device == "cuda":
            assert row.whole.count == row.exchange.count == row.count
            assert row.exchange.seconds <= row.whole.seconds
    pycomm.barrier(group=group)
    return counted(group), str(before)


@pytest.mark.parametrize("layout", [gpu_ranks.PEER, gpu_ranks.PINNED])
def test_statistics_count_what_devices_do(layout: str) -> None:
    for rows, text in gpu_ranks.run(SIZE, layout, run_counted):
        assert rows == {
            ("all_reduce", "none", 4): (1, 4),
            ("all_reduce", "none", 4 * COUNT): (2, 8 * COUNT),
            ("all_reduce", "int8", 4 * COUNT): (1, 4 * COUNT),
            ("all_reduce", "topk", 4 * COUNT): (1, 4 * COUNT),
            ("all_gather", "none", 4 * COUNT): (1, 4 * COUNT),
        }
        assert "all_reduce, int8, cuda" in text


def be_late(group: pycomm.Group) -> pycomm.Stats:
    tensor = torch.ones(COUNT, device="cuda")
    for _ in range(5):
        if group.rank == 1:
            time.sleep(0.1)
        pycomm.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
    stats = await_counted(group, 6)
    pycomm.barrier(group=group)
    return stats


def test_devices_tell_who_is_late() -> None:
    late = []
    for stats in gpu_ranks.run(2, gpu_ranks.PEER, be_late):
        (row,) = (row for row in stats.operations if (row.device, row.size) == ("cuda", 4 * COUNT))
        late.append(row.late)
    assert 0.05 < late[0] < 1
    assert late[1] < 0.5 * late[0]


class Model(torch.nn.Linear):
    """With the parameters of BUCKET."""

    def __init__(self) -> None:
        super().__init__(64, 64, device="cuda")


def hang(rank: int, size: int, store: str, folder: str) -> Any:
    """Rank 1 does not come to its second backward, whose bucket the others exchange."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with helpers.member(rank, size, store, timeout=30) as group:
        model = pycomm.DataParallel(Model(), group=group)
        x = torch.ones(2, 64, device="cuda")
        model(x).sum().backward()
        torch.cuda.synchronize()
        Path(folder, str(rank)).touch()
        if rank == 1:
            time.sleep(120)
        try:
            while True:
                model(x).sum().backward()
                torch.cuda.synchronize()
                group.check()
        except pycomm.CollectiveError as error:
            return error


def look(pid: int) -> list[dict[str, Any]]:
    """The groups of a process in which somebody waits."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        top.main([str(pid), "--json"])
    return [group for group in json.loads(said.getvalue())["groups"] if group["late"]]


def test_a_job_that_hangs(tmp_path: Path) -> None:
    """Seen from another process; then rank 1 is killed, and the others' errors say the same."""
    with helpers.Ranks(SIZE, hang, str(tmp_path)) as ranks:
        helpers.wait_until(lambda: len(list(tmp_path.iterdir())) == SIZE, limit=60)
        helpers.wait_until(lambda: look(ranks.pids[1]), 20)
        (group,) = look(ranks.pids[1])
        assert group["late"] == [1]
        last = [rank["launched"][-1] for rank in group["ranks"]]
        number = last[0]["sequence"]
        assert [(each["sequence"], each["state"]) for each in last] == [
            (number, "running"),
            (number - 1, "done"),
            (number, "running"),
        ]
        assert [each["subject"] for each in last] == [BUCKET] * SIZE
        ranks.signal(1, signal.SIGKILL)
        for outcome in ranks.wait_for([0, 2]):
            assert outcome.error is None, outcome.trace
            report = outcome.value.report
            assert report.late == (1,)
            current = [rank.on_device for rank in report.ranks]
            assert (current[0].sequence, current[0].state) == (number, "running")
            assert (current[1].sequence, current[1].state) == (number - 1, "done")
            # The two share a line if they wait in the same operation of the host, too.
            where = rf"(its device is|their devices are) in operation {number}, all_reduce\("
            assert re.search(where, str(report))


def stay_away(rank: int, size: int, store: str) -> pycomm.CollectiveError | None:
    """Rank 1 does not launch the second operation."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with helpers.member(rank, size, store, timeout=30) as group:
        tensor = torch.ones(COUNT, device="cuda")
        pycomm.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        if rank == 1:
            wait_for(group, [0], 2, "running")
            group.abort()
            return None
        group._core.subject = BUCKET
        try:
            pycomm.all_reduce(tensor, group=group)
            torch.cuda.synchronize()
            group.check()
        except pycomm.Aborted as error:
            return error
    return None


def test_an_error_of_a_kernel_tells_where_it_was() -> None:
    error = helpers.run_ranks(2, stay_away)[0]
    assert (error.rank, error.sequence) == (1, 2)
    assert f"; this rank exchanged {BUCKET}" in str(error)
    assert error.report.late == (1,)
    current = [rank.on_device for rank in error.report.ranks]
    assert [(each.sequence, each.state) for each in current] == [(2, "running"), (1, "done")]


def test_replays_are_shown() -> None:
    with pycomm.LocalWorld(2) as world:
        tensors = [torch.ones(COUNT, device="cuda") for _ in range(2)]
        graph = gpu_ranks.capture_averages(world, tensors)
        for rank, group in enumerate(world.groups):
            first, second = wait_for(group, [rank], 1, "done").ranks[rank].launched
            assert (first.captured, second.captured) == (False, True)
            assert second.state == "launched"
        graph.replay()
        torch.cuda.synchronize()
        for group in world.groups:
            report = wait_for(group, range(2), 2, "done")
            assert "their devices are after a replay of operation 2, all_reduce(" in str(report)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        for group in world.groups:
            stats = await_counted(group, 5)
            (row,) = (row for row in stats.operations if row.device == "cpu")  # it connected them
            assert (row.operation, row.count) == ("barrier", 1)
            assert counted(group) == {("all_reduce", "none", 4 * COUNT): (5, 20 * COUNT)}


def test_peaks_of_memory_are_those_of_the_allocator() -> None:
    width, batch = 256, 512
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def run_step() -> None:
        model(torch.ones(batch, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run_step()  # makes the states, and the workspaces of libraries
    allocated = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    held = pycomm.memory.report(model, optimizer).total
    with pycomm.memory.record(model, optimizer) as recording:
        run_step()
    for phase in ("forward", "backward", "exchange", "step"):
        peak = recording.peaks[phase]
        found = peak.gauges["allocated"] - allocated
        assert found == pytest.approx(peak.total - held, rel=0.01, abs=1 << 15), phase
        assert peak.gauges["reserved"] >= peak.gauges["allocated"]
        assert peak.gauges["outside torch"] >= 0
    peaks = {phase: peak.gauges["allocated"] for phase, peak in recording.peaks.items()}
    assert peaks["backward"] > peaks["forward"] > peaks["exchange"]  # each has its own


def record_a_step(group: pycomm.Group) -> pycomm.memory.MemoryRecording:
    model = pycomm.DataParallel(torch.nn.Linear(8, 8, device="cuda"), group=group)
    optimizer = torch.optim.SGD(model.parameters())
    with pycomm.memory.record(model, optimizer) as recording:
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
    return recording.over_ranks(group)


def test_windows_are_memory_outside_of_torch() -> None:
    for recording in gpu_ranks.run(2, gpu_ranks.PEER, record_a_step):
        assert recording.peaks["step"].gauges["outside torch"] >= STAGING_BYTES
        assert "outside torch" in str(recording)
