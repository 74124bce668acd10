"""The table of algorithms between nodes, chosen from times that are made up."""

from __future__ import annotations

import itertools
import json
import math
import random

import helpers
import pytest
import spanning

from pycomm._runtime import algorithm_table
from pycomm.bench import choose, cli

SIZES = [1000 * 3**i for i in range(8)]


def results(path, nodes, ranks, times, cases=(("float32", "sum"),), **more):
    """Writes times, by bytes and algorithm, as ``pycomm.bench all_reduce -J`` does."""
    kind = {"collective": "all_reduce", "impl": "pycomm", "compression": "none", "device": "cpu",
            "buffer": "tensor", "wrong": 0}  # fmt: skip
    rows = [
        kind | {"algorithm": name, "bytes": size, "time_us": time, "dtype": dtype, "op": op} | more
        for size, of in times.items()
        for name, time in of.items()
        for dtype, op in cases
    ]
    path.write_text(json.dumps({"meta": {"nodes": nodes, "ranks": ranks}, "rows": rows}))
    return str(path)


def times(*rows):
    """Times for sizes in ascending order, of two-shot, ring and tree (which may be absent)."""
    return {
        size: dict(zip(algorithm_table.ALGORITHMS, row, strict=False))
        for size, row in zip(SIZES, rows, strict=False)
    }


def table_of(tmp_path, *files):
    path = tmp_path / "table.json"
    cli.main(["choose", *files, "--write", str(path)])
    return algorithm_table.read(path)


def chosen(rows, nodes, ranks, nbytes):
    """What a group would run."""
    for row in rows:
        limits = [(nodes, "nodes"), (ranks, "ranks"), (nbytes, "bytes")]
        if all(value <= row.get(name, value) for value, name in limits):
            return row["algorithm"]
    return "two_shot"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([(9, 9, 9), (9, 9, 9)], ["two_shot", "two_shot"]),
        ([(9, 5, 9), (9, 5, 9), (9, 9, 9)], ["ring", "ring", "two_shot"]),
        ([(9, 5, 9), (9, 9, 9), (9, 5, 9)], ["two_shot"] * 3),  # no neighbours
        ([(9, 5, 9), (9, 9, 5), (9, 9, 9)], ["two_shot"] * 3),
        ([(100, 96, 99), (100, 96, 99)], ["two_shot"] * 2),  # within the margin
        ([(100, 95, 99), (100, 95, 99)], ["ring", "ring"]),
        ([(9, 5, 6), (9, 6, 5), (9, 6, 5)], ["ring", "tree", "tree"]),
        ([(9, 5, 6), (9, 9, 6), (9, 9, 9)], ["tree", "tree", "two_shot"]),
        ([(900, 500, 501), (900, 501, 500), (900, 520, 500)], ["ring"] * 3),  # within the margin
        ([(900, 500, 501), (900, 501, 500), (900, 530, 500)], ["ring", "ring", "tree"]),
        ([(9, 9, 9), (9, 9, 9), (9, 9, 5), (9, 9, 5)], ["two_shot"] * 2 + ["tree"] * 2),
    ],
)
def test_what_wins_at_two_neighbouring_sizes(tmp_path, rows, wanted):
    made = table_of(tmp_path, results(tmp_path / "times.json", 4, 8, times(*rows)))
    assert [chosen(made, 4, 8, size) for size in SIZES[: len(rows)]] == wanted
    for (size, before), (larger, after) in itertools.pairwise(zip(SIZES, wanted, strict=False)):
        middle = math.sqrt(size * larger)
        assert chosen(made, 4, 8, math.floor(middle)) == before
        assert chosen(made, 4, 8, math.floor(middle) + 1) == after
    assert chosen(made, 2, 3, 1) == wanted[0]
    assert chosen(made, 4, 8, 1 << 50) == wanted[-1]
    assert chosen(made, 5, 8, SIZES[0]) == chosen(made, 4, 9, SIZES[0]) == "two_shot"
    assert len(made) == len([*itertools.groupby(wanted)])


def by_definition(of, sizes):
    """What should be chosen, by another text."""
    won = {
        name: [of[size]["two_shot"] / of[size][name] > choose.MARGIN for size in sizes]
        for name in ("ring", "tree")
    }
    found = []
    for i, size in enumerate(sizes):
        beside = [j for j in (i - 1, i + 1) if 0 <= j < len(sizes)]
        able = [name for name in won if won[name][i] and any(won[name][j] for j in beside)]
        able.sort(key=of[size].get)
        if len(able) == 2 and found and found[-1] == able[1]:
            slower = of[size][able[1]] / of[size][able[0]]
            able = able if slower > choose.MARGIN else able[1:]
        found.append(able[0] if able else "two_shot")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_several_files_in_any_order(tmp_path, seed):
    draw = random.Random(seed)
    places = [(2, 2), (2, 8), (4, 4), (4, 16)]
    made = {
        place: times(*[[draw.uniform(1, 1.3) for _ in range(3)] for _ in SIZES]) for place in places
    }
    draw.shuffle(places)
    files = [results(tmp_path / f"{place}.json", *place, made[place]) for place in places]
    rows = table_of(tmp_path, *files)
    for place, of in made.items():
        assert [chosen(rows, *place, size) for size in SIZES] == by_definition(of, SIZES), place
    for size in SIZES:  # in between
        assert chosen(rows, 3, 3, size) == chosen(rows, 4, 4, size)
        assert chosen(rows, 2, 5, size) == chosen(rows, 2, 8, size)
        assert chosen(rows, 3, 9, size) == chosen(rows, 4, 16, size)


def test_other_rows_count_for_nothing(tmp_path):
    path = tmp_path / "times.json"
    results(path, 2, 2, times((9, 5, 9), (9, 5, 9)), cases=[("float32", "sum"), ("int8", "max")])
    stored = json.loads(path.read_text())
    for other in ({"impl": "gloo"}, {"compression": "int8"}, {"device": "cuda"},
                  {"collective": "reduce"}, {"algorithm": "auto"}):  # fmt: skip
        stored["rows"] += [row | {"time_us": 1e9} | other for row in stored["rows"][2:4]]
    path.write_text(json.dumps(stored))
    assert table_of(tmp_path, str(path)) == [{"nodes": 2, "ranks": 2, "algorithm": "ring"}]


def test_output(tmp_path, capsys):
    path = results(tmp_path / "times.json", 4, 8, times((9, 5, 9), (9, 5, 9), (9, 9, 9)))
    cli.main(["choose", path])
    out = capsys.readouterr().out
    assert "# 4 nodes, 8 ranks: times in us\n" in out
    assert [line.split() for line in out.splitlines()[2:5]] == [
        ["1000", "9.00", "5.00", "9.00", "ring"],
        ["3000", "9.00", "5.00", "9.00", "ring"],
        ["9000", "9.00", "9.00", "9.00", "two_shot"],
    ]
    assert json.loads(out[out.index("[") :]) == [
        {"nodes": 4, "ranks": 8, "bytes": 5196, "algorithm": "ring"},
        {"nodes": 4, "ranks": 8, "algorithm": "two_shot"},
    ]


def measure_between_nodes(rank, size, store, argv):
    spanning.pretend("ab"[rank])
    helpers.join_world(rank, size, store)
    cli.measure(cli.parse(argv))


@pytest.mark.slow
def test_times_between_nodes(tmp_path):
    """The benchmark's own file; one-shot, which does not run between nodes, is left out."""
    path = tmp_path / "times.json"
    what = "all_reduce -a all -b 1000 -e 9000 -f 3 --buffer both -n 3"
    helpers.run_ranks(2, measure_between_nodes, [*what.split(), "-J", str(path)])
    stored = json.loads(path.read_text())
    assert stored["meta"]["nodes"] == 2
    assert {row["algorithm"] for row in stored["rows"]} == {"auto", *algorithm_table.ALGORITHMS}
    assert {row["over_floor"] for row in stored["rows"]} == {None}
    made = table_of(tmp_path, str(path))
    assert {(row["nodes"], row["ranks"]) for row in made} == {(2, 2)}
    assert [row["bytes"] for row in made[:-1]] == [
        size for size in (1732, 5196) if size in [row.get("bytes") for row in made]
    ]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"nodes": 1}, "must have times between nodes, got those of one node"),
        ({"wrong": 3}, "has wrong results"),
        ({"times": times((9, 9, 9))}, "must have all-reduces of at least two sizes, got 1"),
        ({"times": times((9, 9), (9, 9, 9))}, "must have the same cases of .* at 1000 bytes"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, changed, error):
    given = {"nodes": 2, "ranks": 2, "times": times((9, 9, 9), (9, 9, 9))} | changed
    path = results(tmp_path / "times.json", **given)
    with pytest.raises(SystemExit, match=f"times.json {error}"):
        cli.main(["choose", path])


def test_two_files_of_the_same_place(tmp_path):
    paths = [
        results(tmp_path / name, 2, 4, times((9, 9, 9), (9, 9, 9))) for name in ("a.json", "b.json")
    ]
    with pytest.raises(SystemExit, match=r"b.json is the second file of 2 nodes with 4 ranks"):
        cli.main(["choose", *paths])


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"meta": {"ranks": 2, "nodes": 2}}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "times.json"
    with pytest.raises(SystemExit, match=r"No such file or directory: .*times\.json"):
        cli.main(["choose", str(path)])
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"times\.json must be a file that -J has written"):
        cli.main(["choose", str(path)])
