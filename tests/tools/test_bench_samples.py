"""What a sample of the benchmark is, and the floor that it is compared with."""

import json
import re
import time
from itertools import product

import pytest
import torch
from helpers import join_world, run_group, run_ranks

import pycomm
from pycomm import _C
from pycomm.bench import cli, collectives, floor, measure
from pycomm.bench.contestants import Case, Pycomm
from pycomm.bench.floor import Route
from pycomm.bench.measure import Prepared
from pycomm.bench.report import KIB


def late_call(group):
    """Rank 1 takes 30 ms for each call, and rank 0 takes 30 ms before each call."""
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
        prepared = Pycomm(group=world.groups[0]).prepare(case)
        prepared.source.fill_(77)
        prepared.rewrite()
        assert prepared.source.unique().numel() > 2
        assert torch.equal(prepared.source, prepared.data)
        assert not (prepared.source == 77).any()


COLLECTIVES = {
    route: (collective, buffer)
    for collective, routes in floor.ROUTES.items()
    for buffer, several in routes.items()
    for route in several
}


def given_by(rank, turn, route, count, ranks):
    """What a rank gives: fp32 numbers that name the rank, the turn and the element."""
    collective, _ = COLLECTIVES[route]
    own = count // ranks if collective == "all_gather" else count
    return torch.arange(own) + 1e6 * rank + 1e5 * turn


def taken_by(rank, turn, route, count, ranks):
    """What a rank has at the end; where a collective adds, the numbers of the rank before."""
    collective, _ = COLLECTIVES[route]
    given = [given_by(r, turn, route, count, ranks) for r in range(ranks)]
    if collective == "broadcast":
        return given[0]
    if collective == "all_gather":
        return torch.cat(given)
    if route == Route.one_shot:
        return given[rank - 1]
    parts = [given[p - 1].chunk(ranks)[p] for p in range(ranks)]
    return parts[rank] if collective == "reduce_scatter" else torch.cat(parts)


def crossings(group):
    """Whether every route's result is right, whole and in tiles."""
    found = {}
    me, ranks = group.rank, group.size
    tiles = [(0, 6), (0, 6000), *((16 * KIB, n) for n in (6, 9000, 60000))]
    for route, (tile, count) in product(COLLECTIVES, tiles):
        if route == Route.one_shot and tile:
            continue
        collective, buffer = COLLECTIVES[route]
        case = Case(collective, torch.float32, "sum", count, ranks, "cpu")
        probe = floor.CrossingProbe(
            group=group, collective=collective, route=route, tile=tile, buffer=buffer
        )
        run = probe.prepare(case)
        for turn in range(6):
            run.result.fill_(-1)
            run.source.copy_(given_by(me, turn, route, count, ranks))
            pycomm.barrier(group=group)
            run.call()
            pycomm.barrier(group=group)
            right = torch.equal(run.result, taken_by(me, turn, route, count, ranks))
            found.setdefault((route.name, tile, count), []).append(right)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_crossings_move_what_they_say(ranks):
    for found in run_group(ranks, crossings):
        assert len(found) == 2 + 5 * 10
        wrong = {what: right for what, right in found.items() if not all(right)}
        assert not wrong


def test_a_crossing_ends_if_another_rank_does_not_come():
    flags, memory = torch.zeros(64, dtype=torch.int32), torch.zeros(256, dtype=torch.uint8)
    at = [flags.data_ptr() + i * _C.Crossing.flag_bytes for i in range(2)]
    slots = [memory.data_ptr() + i * _C.Crossing.turns * 16 for i in range(2)]
    crossing = _C.Crossing(Route.two_shot, at, slots, 0, 16, 16)
    with pytest.raises(RuntimeError, match="did not take part in time"):
        crossing.run(memory.data_ptr() + 128, memory.data_ptr() + 192, 0.05)
    for rank, nbytes in ((2, 16), (0, 15)):
        with pytest.raises(ValueError, match="must be"):
            _C.Crossing(Route.two_shot, at, slots, rank, nbytes, 16)


def compete(rank, size, store, argv):
    join_world(rank, size, store)
    collectives.run(cli.parse(argv))


@pytest.mark.slow
def test_rows_stand_beside_the_floor(tmp_path):
    path = tmp_path / "results.json"
    argv = "all_reduce -b 4K -e 64K -f 16 --buffer both --compression none,int8 -n 5 -J"
    run_ranks(2, compete, [*argv.split(), str(path)])
    results = json.loads(path.read_text())
    probes = results["meta"]["floor"]
    assert [p["bytes"] for p in probes if p["impl"] == "one rank"] == [4096]
    for row in results["rows"]:
        able = [p for p in probes if p["bytes"] == row["bytes"] and p["impl"] == "floor"]
        if row["buffer"] == "tensor":
            able = [p for p in able if p["buffer"] == "tensor"]
        least = min(p["time_us"] for p in able)
        expected = None if row["compression"] == "int8" else row["time_us"] / least
        assert row["over_floor"] == (expected and pytest.approx(expected, rel=0.02, abs=0.01))
    small, large = floor.describe(probes, ("tensor", "window"))
    assert small.startswith("floor at 4 KiB float32: tensor ")
    one_rank = next(p for p in probes if p["impl"] == "one rank")
    assert re.search(r"us \((one|two)_shot[^)]*\), window ", small)
    assert small.endswith(f"one rank {one_rank['time_us']:,.2f} us")
    assert "one rank" not in large


STREAMS = {
    "all_reduce": {"y *= 1", "y = a"},
    "reduce_scatter": {"y = a, max(x)", "y = a, sum(x)"},
    "all_gather": {"y = a, memset(y)"},
    "broadcast": {"y = a"},
}
ROUTES = {
    "all_reduce": {"one_shot", "two_shot", "two_shot_window"},
    "reduce_scatter": {"reduce_scatter", "reduce_scatter_window"},
    "all_gather": {"all_gather", "all_gather_push", "all_gather_pull"},
    "broadcast": {"broadcast", "broadcast_pull", "broadcast_share"},
}


@pytest.mark.parametrize("collective", ROUTES)
def test_every_collective_has_probes_of_its_own(collective, tmp_path):
    """Small tensors cross whole, larger ones in tiles; large ones in the window stream, too."""
    path = tmp_path / "results.json"
    argv = f"{collective} -b 4K -e 16M -f 64 --buffer both -n 1 -w 0 -J"
    run_ranks(2, compete, [*argv.split(), str(path)])
    results = json.loads(path.read_text())
    tiles = {4: [], 256: [16, 64, 256], 16384: [16, 64, 256, 1024]}
    expected = set()
    for size, route in product(tiles, ROUTES[collective]):
        own = [] if route == "one_shot" else tiles[size]
        expected |= {(size, f"{route}, tiles of {tile} KiB") for tile in own}
        expected |= {(size, route)} if size <= 256 else set()
    probes = [p for p in results["meta"]["floor"] if p["impl"] == "floor"]
    found = {(p["bytes"] // KIB, p["algorithm"]) for p in probes}
    assert found == expected | {(16384, name) for name in STREAMS[collective]}
    assert all(row["over_floor"] > 0 for row in results["rows"])
    assert [p["bytes"] for p in results["meta"]["floor"] if p["impl"] == "one rank"] == [4096]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("collective", "read", "write"),  # in n-th parts of the tensor, for n ranks
    [
        ("all_reduce", lambda n: n, lambda n: n),
        ("reduce_scatter", lambda n: n, lambda _: 1),
        ("all_gather", lambda _: 1, lambda n: n),
        ("broadcast", lambda _: 1, lambda n: n - 1),
    ],
)
def test_streams_have_the_mix_of_the_collective(collective, read, write, ranks):
    mix = floor._mix(collective, 1200 * ranks, ranks)
    assert (mix.read, mix.write) == (1200 * read(ranks), 1200 * write(ranks))
