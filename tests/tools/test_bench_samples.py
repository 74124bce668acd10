"""What a sample of the benchmark is, and the floor that it is compared with."""

import json
import time

import pytest
import torch
from helpers import join_world, run_group, run_ranks

import pycomm
from pycomm import _C
from pycomm.bench import cli, floor, measure, report, session
from pycomm.bench.cases import KIB, Case
from pycomm.bench.contestants import Prepared, Pycomm
from pycomm.bench.floor import Route


def late_call(group):
    """Rank 1 takes 30 ms for the calls, and rank 0 for what comes before them."""
    tensor, log = torch.zeros(4), []

    def call():
        log.append(tensor.tolist())
        tensor.add_(1)
        time.sleep(0.03 * group.rank)

    class Slow(Prepared):
        def rewrite(self):
            super().rewrite()
            time.sleep(0.5 * (1 - group.rank))

    figures = measure.interleave(group, [Slow(tensor, tensor, call, torch.ones(4))], iters=3)
    return log, figures


def test_a_sample_is_the_slowest_ranks_call_on_new_data():
    for log, (figure,) in (outcomes := run_group(2, late_call)):
        assert len(log) > 3
        assert all(given == [1.0] * 4 for given in log)
        assert 30_000 <= figure.p50_us < 450_000
        assert figure.iterations == 3
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_data_is_written_anew(dtype):
    with pycomm.LocalWorld(1) as world:
        case = Case("all_reduce", dtype, "sum", 1000, 1, "cpu")
        prepared = Pycomm(world.groups[0], "auto", "tensor").prepare(case)
        prepared.source.fill_(77)
        prepared.rewrite()
        assert prepared.source.unique().numel() > 2
        assert torch.equal(prepared.source, prepared.data)
        assert not (prepared.source == 77).any()


def parts_of(count, tile, ranks):
    """The part that each fp32 element is in, of a tile's as many parts as ranks."""
    whole = tile // (64 * ranks) * 64 * ranks // 4 if tile < 4 * count else count
    tiles = torch.arange(count).split(whole)
    return torch.cat([torch.arange(len(one)) // (len(one) // ranks) for one in tiles])


def crossings(group):
    """Each route's result: part p of it comes from the rank before p."""
    found = {}
    for route, tile, count in (
        (Route.one_shot, 0, 6),
        (Route.one_shot, 0, 6000),
        *((way, 16 * KIB, n) for way in (Route.two_shot, Route.window) for n in (6, 9000, 60000)),
    ):
        case = Case("all_reduce", torch.float32, "sum", count, group.size, "cpu")
        run = floor.Crossing(group, route, tile, "tensor").prepare(case)
        for turn in range(3):
            run.source.copy_(torch.arange(count) + 1e6 * group.rank + turn)
            pycomm.barrier(group=group)
            run.call()
            pycomm.barrier(group=group)
        parts = parts_of(count, tile if route == Route.two_shot else 4 * count, group.size)
        if route == Route.one_shot:
            parts = torch.full((count,), group.rank)
        before = (parts - 1) % group.size
        found[route.name, count] = torch.equal(run.result, torch.arange(count) + 1e6 * before + 2)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_crossings_move_what_they_say(ranks):
    for found in run_group(ranks, crossings):
        assert len(found) == 8
        assert all(found.values()), found


def test_a_crossing_ends_if_another_rank_does_not_come():
    flags, memory = torch.zeros(64, dtype=torch.int32), torch.zeros(256, dtype=torch.uint8)
    at = [flags.data_ptr() + i * _C.Crossing.flag_bytes for i in range(2)]
    slots = [
        memory.data_ptr() + i * _C.Crossing.slot_bytes(Route.two_shot, 16, 16) for i in range(2)
    ]
    crossing = _C.Crossing(Route.two_shot, at, slots, 0, 16, 16)
    with pytest.raises(RuntimeError, match="has not come in time"):
        crossing.run(memory.data_ptr() + 128, memory.data_ptr() + 192, 0.05)
    for rank, nbytes in ((2, 16), (0, 15)):
        with pytest.raises(ValueError, match="must be"):
            _C.Crossing(Route.two_shot, at, slots, rank, nbytes, 16)


def compete(rank, size, store, argv):
    join_world(rank, size, store)
    session.run(cli.parse(argv))


def test_rows_stand_beside_the_floor(tmp_path):
    path = tmp_path / "results.json"
    argv = "all_reduce -b 4K -e 64K -f 16 --buffer both --compression none,int8 -n 5 -J"
    run_ranks(2, compete, [*argv.split(), str(path)])
    results = json.loads(path.read_text())
    probes = results["meta"]["floor"]
    tiled = {f"{way}, tiles of {tile} KiB" for way in ("two_shot", "window") for tile in (16, 64)}
    expected = {(4096, "one_shot"), (65536, "one_shot"), *((65536, probe) for probe in tiled)}
    assert {(p["bytes"], p["algorithm"]) for p in probes if p["impl"] == "floor"} == expected
    assert [p["bytes"] for p in probes if p["impl"] == "one rank"] == [4096]
    for row in results["rows"]:
        able = [p for p in probes if p["bytes"] == row["bytes"] and p["impl"] == "floor"]
        if row["buffer"] == "tensor":
            able = [p for p in able if p["buffer"] == "tensor"]
        least = min(p["time_us"] for p in able)
        expected = None if row["compression"] == "int8" else row["time_us"] / least
        assert row["over_floor"] == (expected and pytest.approx(expected, rel=0.02, abs=0.01))
    small, large = report.floors(probes, ("tensor", "window"))
    assert small.startswith("floor at 4 KiB float32: tensor ")
    assert "us (one_shot), window " in small
    assert small.endswith(f"one rank {results['meta']['floor'][1]['time_us']:,.2f} us")
    assert "one rank" not in large
