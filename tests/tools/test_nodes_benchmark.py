"""Parts of benchmarks.nodes that need neither root nor nodes."""

import argparse
import json
import os

import pytest
import spanning
import torch
from imagined import TYPICAL

from benchmarks.nodes import cli, counted, namespaces, ranks, sharded
from benchmarks.nodes.cases import (
    ALGORITHMS,
    COMPRESSIONS,
    FEEDBACK,
    GOALS,
    HEADER,
    SHARDED_GOALS,
    SIZES,
    TRAINEES,
    WITH_FEEDBACK,
    Layout,
    algorithm_cases,
    algorithm_rows,
    all_reduce_rows,
    sharded_rows,
    training_rows,
)
from benchmarks.nodes.sharded import STEPPERS
from pycomm.bench.report import MIB

SIZE = 64 * MIB


def rows_of(nodes=2, ranks=1, rate="1gbit", nbytes=SIZE):
    rows = all_reduce_rows(Layout((ranks,) * nodes, rate), nbytes, TYPICAL, 2)
    return {row.contestant: row for row in rows}


def test_without_root(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["nodes"])
    cli.main()
    assert capsys.readouterr().out == "skipped: needs root, to make network namespaces\n"


def test_without_the_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda *_args, **_options: None)
    assert namespaces.missing().startswith("needs the command ip")


def test_layouts_and_rates():
    assert cli.layouts("2x1,3x2,1+2+3") == ((1, 1), (2, 2, 2), (1, 2, 3))
    assert cli.rates("1gbit,10gbit") == ("1gbit", "10gbit")
    for text in ("1x2", "9x1", "2x0", "2", "axb", "2x", "1+0", "1+", "1+2x2", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected 2 to 8 nodes"):
            cli.layouts(text)
    with pytest.raises(argparse.ArgumentTypeError, match="expected some of 100mbit"):
        cli.rates("2gbit")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_formula(count, ranks):
    """In pycomm, a node sends as much as with one rank per node; in Gloo's ring it sends more."""
    rows = rows_of(count, ranks)
    shares = {name: row.predicted_link_bytes / SIZE for name, row in rows.items()}
    once = 2 * (count - 1) / count
    assert shares["pycomm none"] == pytest.approx(once)
    assert shares["pycomm bf16"] == pytest.approx(once / 2, rel=1e-4)
    assert shares["pycomm int8"] == pytest.approx(once * 1.015625 / 4, rel=1e-4)
    assert shares["pycomm topk:0.01"] == pytest.approx(once * 0.01 * 40.6 / 32, rel=0.01)
    total = count * ranks
    assert shares["gloo"] == pytest.approx(2 * (total - 1) / total)


def test_algorithms_are_compared_with_two_shot_at_the_same_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nodes"])
    made = algorithm_cases("1gbit", 4)
    path = tmp_path / "nodes.json"
    results = cli.NodeResults(cli.parse(["--algorithms", "--json", str(path)]), TYPICAL)
    results.predict(algorithm_rows(Layout((1, 1, 1), "1gbit"), made))
    figures = {name: {"time_us": 4.0, "link_bytes": 1, "rounds": 3} for name in ALGORITHMS}
    figures["ring"] |= {"time_us": 2.0}
    answered = {"figures": figures, "base": "two_shot", "losses": {}, "late_us": 3.0, **made[1]}
    results.fill(answered, Layout((1, 1, 1), "1gbit"))
    rows = [row for row in json.loads(path.read_text())["rows"] if row["time_us"] is not None]
    assert [(row["contestant"], row["bytes"], row["ratio"]) for row in rows] == [
        (name, SIZES[1], 2.0 if name == "ring" else 1.0) for name in ALGORITHMS
    ]
    assert rows[0]["predicted_link_bytes"] == round(4 / 3 * SIZES[1])
    assert capsys.readouterr().out.count("all_reduce +0 ms") == 3
    late = {"ranks": [1, 1, 1], "case": "all_reduce +0 ms", "bytes": SIZES[1], "late_us": 3.0}
    assert json.loads(path.read_text())["meta"]["lateness"] == [late]


def test_each_case_of_algorithms_has_its_rate_before_it_is_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(ranks, "interleave", lambda calls, _: asked.append(list(calls)))

    class Asking:
        def ask(self, what, **details):
            asked.append((what, details["rate"]))

    ranks.algorithms(
        None, Asking(), [*algorithm_cases("1gbit", 1)[:1], *algorithm_cases("100mbit", 1)[:1]]
    )
    assert asked == [
        each
        for rate in ("1gbit", "100mbit")
        for each in (("rate", rate), list(ALGORITHMS), ("result", rate))
    ]


def test_a_file_is_complete_once_all_layouts_have_run(tmp_path, monkeypatch):
    path = tmp_path / "nodes.json"
    seen = []
    monkeypatch.setattr("sys.argv", ["nodes", "--algorithms", "--json", str(path)])
    monkeypatch.setattr(cli, "missing", lambda: None)
    monkeypatch.setattr(cli.constants, "load", lambda: TYPICAL)
    monkeypatch.setattr(cli, "exchange", lambda *args: seen.append(args[-1].meta["complete"]))
    cli.main()
    assert seen == [False, False]
    assert json.loads(path.read_text())["meta"]["complete"]


def test_rows_are_predictions_until_they_are_filled():
    row = rows_of()["pycomm int8"]
    assert row.time_us is None
    assert row.link_bytes is None
    assert row.goal == GOALS[1, "pycomm int8"]
    before = (row.predicted_us, row.predicted_link_bytes)
    row.fill(time_us=2 * row.predicted_us, base_us=6 * row.predicted_us, link_bytes=7, rounds=3)
    assert (row.predicted_us, row.predicted_link_bytes) == before
    assert row.ratio == 3.0
    assert "+100.0" in row.line()


def test_nodes_may_differ_in_size_for_algorithms_alone(capsys):
    made = algorithm_rows(Layout((1, 2, 3), "1gbit"), algorithm_cases("1gbit", 1))
    assert {(row.nodes, row.ranks_per_node) for row in made} == {(3, "1+2+3")}
    assert "3 x 1+2+3" in made[0].line()
    assert cli.parse(["--layouts", "1+2+3", "--algorithms"]).layouts == ((1, 2, 3),)
    with pytest.raises(SystemExit):
        cli.parse(["--layouts", "1+2+3"])
    assert "--layouts must have as many ranks on each node" in capsys.readouterr().err


def test_goals_are_for_their_case_alone():
    assert all(row.goal is None for row in rows_of(rate="10gbit").values())
    assert all(row.goal is None for row in rows_of(nodes=3).values())
    assert rows_of(ranks=2)["pycomm none"].goal == 1.3


def test_the_row_with_a_residual_has_the_formula_but_no_prediction():
    rows = rows_of()
    fed, plain = rows[f"pycomm {WITH_FEEDBACK}{FEEDBACK}"], rows[f"pycomm {WITH_FEEDBACK}"]
    assert fed.predicted_us is None
    assert fed.predicted_link_bytes == plain.predicted_link_bytes
    assert fed.goal == 12.0


def test_training_rows():
    rows = training_rows(Layout((1, 1), "1gbit"), 10**7, 0.2, TYPICAL, 2)
    assert [row.contestant for row in rows] == list(TRAINEES)
    predicted = {row.contestant: row.predicted_us for row in rows}
    assert predicted["gloo PowerSGD hook"] is None
    assert 2e5 < predicted["pycomm int8_hook"] < predicted["gloo"]


def test_predictions_are_in_the_file_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nodes"])
    path = tmp_path / "nodes.json"
    results = cli.NodeResults(cli.parse(["--json", str(path)]), TYPICAL)
    results.predict(list(rows_of().values()))
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 + len(COMPRESSIONS)
    assert all(row["predicted_link_bytes"] > 0 and row["time_us"] is None for row in rows)
    figures = {row["contestant"]: {"time_us": 5.0, "link_bytes": 1, "rounds": 3} for row in rows}
    answered = {"case": "all_reduce", "rate": "1gbit", "figures": figures}
    results.fill(answered, Layout((1, 1), "1gbit"))
    assert all(row["time_us"] == 5.0 for row in json.loads(path.read_text())["rows"])
    assert HEADER in capsys.readouterr().out


def test_cuts_are_judged():
    def outcome(error, at):
        return {"error": error, "message": "", "at": at}

    good = [outcome("Timeout", 13.4), outcome("PeerDied", 13.9)]
    assert cli.judge(0, "int8", 10.0, good)["complaints"] == []
    assert cli.judge(0, "int8", 10.0, good)["seconds"] == [3.4, 3.9]
    late = [outcome("Timeout", 14.5), None]
    assert cli.judge(0, "int8", 10.0, late)["complaints"] == ["rank 0 took 4.5 s", "rank 1 hung"]
    wrong = [outcome("RuntimeError", 10.5), outcome("Timeout", 13.0)]
    assert cli.judge(0, "none", 10.0, wrong)["complaints"] == ["rank 0 raised RuntimeError: "]
    cuts = [cli.judge(0, "int8", 10.0, good), cli.judge(1, "none", 10.0, late)]
    assert cli.summarise(cuts) == {
        "trials": 2,
        "errors": {"Timeout": 2, "PeerDied": 1},
        "seconds": {"min": 3.4, "median": 3.9, "max": 4.5},
        "broken_promises": cuts[1:],
    }


def test_steps_of_sharded_wrappers_are_compared_with_one_without():
    rows = sharded_rows(Layout((1, 1), "1gbit"), 100, STEPPERS)
    assert {row.contestant: row.goal for row in rows if row.goal} == SHARDED_GOALS
    assert all(row.bytes == 400 for row in rows)
    assert not any(row.goal for row in sharded_rows(Layout((2, 2), "1gbit"), 100, STEPPERS))


def parameters_after_steps(group):
    steppers = sharded.make(group, 20_000)
    for call in sharded.cases(steppers)["step"].values():
        call()
    return {
        name: [p.detach().clone() for p in stepper.model.parameters()]
        for name, stepper in steppers.items()
    }


def test_contestants_step_alike_without_compression():
    for found in spanning.run([1, 1], parameters_after_steps):
        assert all(map(torch.equal, found["sharded"], found[sharded.BASE]))


@pytest.mark.slow
def test_counts_are_those_of_the_closed_forms(monkeypatch, tmp_path):
    """Messages and bytes, and times without latency, bandwidth or cores for messages."""
    monkeypatch.setattr(counted, "NODES", (8, 9, 64))
    monkeypatch.setattr(counted, "SIZES", (256, 4 * MIB))
    found = counted.count(0.0)
    rows = {(row.nodes, row.nbytes, row.algorithm): row for row in found}
    for nodes in (8, 9, 64):
        others = nodes - 1
        handshakes, share = 80 * others, 2 * others / nodes * 4 * MIB
        for algorithm in ("two_shot", "ring"):
            sent = rows[nodes, 4 * MIB, algorithm].sent
            assert sent == pytest.approx(share + handshakes, rel=0.01)
        assert rows[nodes, 4 * MIB, "tree"].sent <= 8 * MIB + handshakes
        ring, tree, small = (
            rows[nodes, n, name]
            for n, name in ((4 * MIB, "ring"), (256, "tree"), (256, "two_shot"))
        )
        assert ring.in_sequence == 2 * others
        assert tree.in_sequence <= 2 * nodes.bit_length()
        assert small.sent == (256 + 80) * others + (80 if nodes > 8 else 0)
        wanted = {8: (14, 1), 9: (6, 2), 64: (10, 3)}
        assert (small.messages, small.in_sequence) == wanted[nodes]
        latency, gbit = counted.LATENCIES_MS[-1], counted.GBITS[-1]
        assert (small.latency_ms, small.gbit) == (latency, gbit)
        carried = small.in_sequence * latency
        assert carried <= small.ms < carried + 0.1
    picture = tmp_path / "picture.png"
    counted.draw(str(picture), found)
    assert picture.read_bytes().startswith(b"\x89PNG")
