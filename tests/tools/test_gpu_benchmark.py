"""Parts of ``python -m pycomm.bench gpu`` that need no GPU."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
import torch

from pycomm.bench import cli, optimizers
from pycomm.bench.gpu import cases, machine, ranks, session, small
from pycomm.bench.measure import Prepared
from pycomm.bench.report import GIB, KIB, MIB, Settings

ROOT = Path(__file__).resolve().parents[2]
NBYTES = 256 * KIB
# The rows that the project's goals speak of.
NAMES = (
    "adamw_fp32",
    "adamw_bf16_remainder",
    "adamw_bf16_remainder_bf16_states",
    "adamw_8bit_states",
    "int8_encode",
    "int8_decode_add",
    "topk_select",
    "all_reduce_loopback",
)


class Event:
    """A CUDA event on the host's clock."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def pretended(monkeypatch):
    """A device that the CPU emulates, on little data; records the order of calls."""
    calls = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(session, "keep_device_busy", lambda _: calls.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ranks.Loopback, "capture", lambda self: self)
    monkeypatch.setattr(ranks, "large_cases", lambda device: large(device, NBYTES))
    monkeypatch.setattr(ranks, "SMALL_REPEATS", 3)
    monkeypatch.setattr(session, "STEP_SIZES", {NBYTES // 4: "_small", NBYTES: ""})
    monkeypatch.setattr(session, "CODEC_SIZES", {NBYTES: ""})
    monkeypatch.setattr(session, "RULE_BYTES", NBYTES)
    monkeypatch.setattr(session, "LEAST_COPIED", 0)
    monkeypatch.setattr(session, "streams", streams)
    monkeypatch.setattr(session, "gpu", lambda: {"name": "pretended"})
    return calls


large = ranks.large_cases


def settings(*arguments):
    """From the command line, whose default names all sets on a real GPU."""
    names = ",".join(name for name, _ in session.sets("cpu"))
    only = () if "--only" in arguments else ("--only", names)
    return cli.parse(["gpu", *only, *arguments])


def streams(mix, device):
    source, target = torch.zeros(2, mix.total // 8, device=device).unbind()
    return {"copy": Prepared(source, target, lambda: target.copy_(source))}


def stems(cases):
    with cases as made:
        return {case.stem: case for case in made}


# Bytes per element, read and written, by hand: parameter, gradient, what completes the weight, and
# two states, which a step reads and, but for the gradient, writes.
@pytest.mark.parametrize(
    ("stem", "moved", "gradient", "held"),
    [
        ("adamw_fp32", 28, 4, 4 + 4 + 8),
        ("adamw_bf16_remainder", 26, 2, 2 + 2 + 2 + 8),
        ("adamw_bf16_remainder_bf16_states", 18, 2, 2 + 2 + 2 + 4),
        ("adamw_8bit_states", 14 + 4 * 4 / 256, 2, 2 + 2 + 2 + 2 * (1 + 4 / 256)),
    ],
)
def test_bytes_of_steps(stem, moved, gradient, held):
    found = stems(cases.step_cases(stem, NBYTES, "_small", "cpu"))
    count = int(NBYTES / held) // 4096 * 4096
    assert found[stem].name == f"{stem}_small"
    assert found[stem].moved_bytes == pytest.approx(moved * count)
    assert found[stem].data_bytes == pytest.approx(held * count)
    assert found[f"{stem}_full"].moved_bytes == pytest.approx((moved + gradient) * count)


def test_bytes_of_codecs():
    count = NBYTES // 4
    wire = count + 4 * count // 256  # a byte per element, a scale per 256
    found = stems(cases.int8_cases(NBYTES, "", "cpu"))
    assert found["int8_encode"].moved_bytes == NBYTES + wire + 16
    assert found["int8_decode_add"].moved_bytes == 4 * (2 * NBYTES + wire + 16)
    assert stems(cases.topk_cases(NBYTES, "", "cpu"))["topk_select"].moved_bytes == NBYTES


def test_bytes_of_all_reduces():
    """Four ranks read and write a tensor each, once."""
    assert ranks.moved_bytes(256 * MIB, 4) == 2 * GIB
    assert ranks.SIZE == 256 * MIB
    assert ranks.SMALL == KIB


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
def test_every_set_runs_is_right_and_reported(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    results = session.measure_sets(settings("-n", "2", "-J", str(path)), "cpu")
    assert results.meta["failed"] == {}
    assert results.good()
    stored = json.loads(path.read_text())
    assert stored["meta"]["gpu"] == {"name": "pretended"}
    rows = {row["name"]: row for row in stored["rows"]}
    assert len(rows) == len(stored["rows"])
    assert set(NAMES) <= rows.keys()
    assert {f"{name}_small" for name in cases.STEPS} < rows.keys()
    assert set(cases.GOALS) <= rows.keys()
    for rule in optimizers.OPTIMIZERS:
        assert {f"{rule}_fp16_master_256MiB", f"{rule}_bf16_master_256MiB"} < rows.keys()
    for way in ("ring", "tree", "int8", "topk"):
        assert rows[f"{way}_all_reduce_loopback"]["over"] > 0
    for row in rows.values():
        assert row["bytes"] > 0
        assert row["time_us"] > 0
        assert row["share"] == pytest.approx(row["floor_us"] / row["time_us"], rel=0.05, abs=1e-3)
        assert row["p10_us"] <= row["time_us"] * 1.001
        unchecked = (*optimizers.OPTIMIZERS, "read", "write", "zeros", "sparse")
        assert row["wrong"] == (None if any(part in row["name"] for part in unchecked) else 0)
        if row["base"]:
            base = rows[row["base"]]
            assert row["over"] == pytest.approx(row["time_us"] / base["time_us"], rel=0.01)
    text = capsys.readouterr().out
    assert session.KernelRow.header(wide=False) in text
    assert all(name in text for name in rows)


@pytest.mark.usefixtures("pretended")
def test_a_set_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    @contextlib.contextmanager
    def broken(*_):
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(session, "int8_cases", broken)
    results = session.measure_sets(settings("-n", "2", "--only", "int8,topk"), "cpu")
    assert results.meta["failed"] == {"int8": "RuntimeError: no such kernel"}
    assert [row.name for row in results.rows] == ["topk_select", "topk_encode"]
    assert not results.good()
    assert "int8 FAILED" in capsys.readouterr().out


def test_wrong_elements_are_told():
    case = cases.KernelCase("topk_encode", 1, 1, lambda: None)
    (row,) = session.make_rows([case], {"topk_encode": [1.0, 1.0]}, 1.0, {"topk_encode": 3})
    results = session.KernelResults(Settings())
    results.add([row])
    assert row.wrong == 3
    assert not results.good()
    assert "WRONG" in row.line()
    assert "3 WRONG" in row.line(wide=True)


@pytest.mark.usefixtures("pretended")
def test_loopback_counts_wrong_elements():
    with ranks.large_cases("cpu") as made:
        assert [case.wrong() for case in made] == [0] * 6

    class Idle(ranks.Loopback):
        def enqueue(self):
            pass

    idle = Idle([0, 1], 100, "cpu")
    assert idle.wrong() == 200  # the ranks differ, and none has the mean


def test_figures():
    """A copy of 10 bytes takes 1 us; the case moves 100 in 20, twice per call."""
    base = cases.KernelCase("all_reduce_loopback", 50, 100, lambda: None, repeats=2)
    peer = cases.KernelCase(
        "int8_all_reduce_loopback", 50, 200, lambda: None, suffix="_x",
        base="all_reduce_loopback", peer_name="another", peer=lambda: None,
    )  # fmt: skip
    samples = {
        "all_reduce_loopback": [39.0, 40.0, 41.0],
        "int8_all_reduce_loopback": [25.0, 25.0, 40.0],
        "int8_all_reduce_loopback, peer": [50.0, 100.0, 100.0],
    }
    first, second = session.make_rows([base, peer], samples, 0.1, {})
    assert (first.time_us, first.floor_us, first.share) == (20.0, 10.0, 0.5)
    assert first.goals == {"share >= 0.8": False}
    assert "MISSED" in first.line()
    assert (second.name, second.base) == ("int8_all_reduce_loopback_x", "all_reduce_loopback_x")
    assert (second.over, second.peer_ratio) == (1.25, 4.0)
    assert second.goals == {"over <= 1.4": True}


def test_rounds_rotate_and_the_host_has_a_head_start(pretended):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = session.interleave(calls, 3)
    warm = 3 * session.WARM_UP
    assert order[:warm] == [name for name in "abc" for _ in range(session.WARM_UP)]
    assert "".join(order[warm:]) == "abc" + "bca" + "cab"
    assert pretended == ["synchronize"] + 3 * (3 * ["sleep"] + ["synchronize"])
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abc", 3)


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cli.main(["gpu"])
    assert capsys.readouterr().out == "skipped: torch finds no CUDA device\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine._C, "has_cuda", False)
    cli.main(["gpu"])
    assert capsys.readouterr().out == "skipped: this build of pycomm has no CUDA\n"


def test_arguments(capsys):
    options = cli.parse(["gpu"])
    assert (options.iters, options.warmup_iters, options.json) == (None, None, None)
    assert options.only == tuple(name for name, _ in session.sets("cuda"))
    assert cli.parse(["gpu", "--only", "topk,int8_256MiB"]).only == ("topk", "int8_256MiB")
    for wrong in (["-n", "0"], ["--only", "int4"]):
        with pytest.raises(SystemExit):
            cli.parse(["gpu", *wrong])
        assert "expected" in capsys.readouterr().err


def test_a_run_that_went_wrong_says_so(monkeypatch):
    monkeypatch.setattr(session, "missing", lambda: None)
    results = session.KernelResults(Settings())
    monkeypatch.setattr(session, "measure_sets", lambda _: results)
    session.run(cli.parse(["gpu"]))
    results.fail("int8", RuntimeError("no such kernel"))
    with pytest.raises(SystemExit, match="1"):
        session.run(cli.parse(["gpu"]))


def test_a_program_that_hangs_or_is_missing_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_smi("topo", "-m").startswith("unknown: ")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec /bin/sleep 100\n")
    program.chmod(0o700)
    monkeypatch.setattr(machine, "PATIENCE_S", 0.2)
    assert "timed out" in machine.nvidia_smi("topo", "-m")


def test_what_sanitizers_watch_runs():
    small.run("cpu")


def table_of_gpus():
    """The cells of each row of the GPU table in docs/lab/performance.md, by name."""
    head = (ROOT / "docs/lab/performance.md").read_text().partition("### ")[0]
    lines = (line.strip("| \n").split(" | ") for line in head.splitlines() if line[:3] == "| `")
    return {cells[0].strip("`"): cells for cells in lines if "*" not in cells[0]}


def test_the_table_says_what_was_measured():
    stored = json.loads((ROOT / "benchmarks/results/h200/gpu.json").read_text())["rows"]
    rows, table = {row["name"]: row for row in stored}, table_of_gpus()
    assert set(NAMES) <= set(table) <= set(rows)
    units = {"share": (100, " %"), "over": (1, " times"), "time_us": (1, " us")}
    for name, (_, _, _, least, _, _, reached, _) in table.items():
        row = rows[name]
        goals = {goal.split()[0]: met for goal, met in row["goals"].items()}
        shown = next((figure for figure in goals if figure != "peer_ratio"), "share")
        factor, unit = units[shown]
        figure, told_unit = re.match(r"([\d.]+)( %| times| us)", reached).groups()
        decimals = len(figure.partition(".")[2])
        assert (f"{factor * row[shown]:.{decimals}f}", unit) == (figure, told_unit), name
        for ratio in re.findall(r", ([\d.]+) times", reached):
            assert f"{row['peer_ratio']:.{len(ratio.partition('.')[2])}f}" == ratio, name
        assert ("**missed**" in reached) == (not all(goals.values())), name
        floor = row["floor_us"]
        if "of the step's" in least:
            of_the_step = floor / rows[row["base"]]["floor_us"]
            assert least == f"{of_the_step:.2f} of the step's", name
        else:
            assert least == ("-" if shown == "time_us" else f"{floor:,.0f}"), name
