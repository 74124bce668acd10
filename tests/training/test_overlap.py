"""Training examples and benchmarks: their output, and exchanges that overlap backward."""

import json
import runpy
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from helpers import join_world, run_group, run_ranks

from pycomm import hooks
from pycomm.bench import cli, plot, timeline, training, verify
from pycomm.bench.training import EmulatedLink

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LATE_US = 1000.0  # how far two readings of the clock may seem to be apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "mode", "compression"), [([], "wrapper", "int8"), (TORCHRUN, "ddp", "topk:0.01")]
)
def test_example(launcher, mode, compression, tmp_path):
    """It prints its results, and its trace shows every exchange at the right time."""
    trace, plot = tmp_path / "trace.json", tmp_path / "loss.png"
    what = ["--steps", "20", "--mode", mode, "--compression", compression]
    files = ["--trace", str(trace), "--plot", str(plot)]
    command = [sys.executable, *launcher, str(EXAMPLES / "train_lm.py"), *what, *files]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    for words in ("tokens/s on 2 ranks", "exposed", "B per step", "bit-equal on all ranks"):
        assert words in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    steps = [e for e in events if e["pid"] == 0 and e["name"].startswith("ProfilerStep#")]
    assert len(steps) == 5
    goes_on = []
    for traced in steps:
        starts, exchanges = about_step(events, traced)
        assert len(exchanges) == len(starts) > 1
        for start, exchange in zip(starts, exchanges, strict=True):
            assert exchange["ts"] > start["ts"] - LATE_US
        # Backward goes on before the first bucket's exchange has ended. That may not even have
        # begun: it is up to the scheduler.
        goes_on.append(end_of(starts[0]) < min(end_of(exchanges[0]), starts[1]["ts"]))
    assert any(goes_on)


def short_training(folder, *options):
    """What the example says of 20 steps."""
    plot = str(folder / "loss.png")
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py"), "--steps", "20", "--plot", plot, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout


@pytest.mark.slow
def test_example_with_shards(tmp_path):
    """The model is the same for each value of `shard`."""
    digests = set()
    for shard, formula in (("optimizer", "p + g + K/n"), ("gradients", "p + (g + K)/n")):
        said = short_training(tmp_path, "--mode", "wrapper", "--shard", shard)
        assert formula in said
        digests.add(said.partition("sha256")[2].split(")")[0])
    assert len(digests) == 1


@pytest.mark.slow
def test_example_that_survives():
    """Two of four ranks are killed; the others take all steps, and end with the same parameters."""
    command = [sys.executable, str(EXAMPLES / "survive.py"), "--steps", "50", "--seed", "3"]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=True
    ).stdout.splitlines()
    assert any(line.startswith("step 50: 2 ranks, loss ") for line in said)
    assert sum("go on after" in line for line in said) == 2
    assert "have the same parameters, bit for bit" in said[-1]


@pytest.mark.slow
def test_example_in_which_killed_ranks_are_replaced():
    command = [sys.executable, str(EXAMPLES / "survive.py"), "--steps", "50", "--seed", "3"]
    said = subprocess.run(
        [*command, "--rejoin"], capture_output=True, text=True, timeout=200, check=True
    ).stdout.splitlines()
    assert sum("go on after" in line for line in said) == 2
    assert said[-1].startswith("4 ranks have the same parameters, bit for bit")


@pytest.mark.slow
def test_example_with_error_reset(tmp_path):
    """All ranks end with the same outer parameters, and send half a bit per parameter."""
    said = short_training(tmp_path, "--compression", "topk:0.03:values=int8", "--error-reset")
    assert "bit-equal on all ranks" in said
    assert 30 < float(said.partition(" times less than uncompressed")[0].split()[-1]) < 60


@pytest.mark.parametrize(
    ("what", "needed"),
    [
        (["--shard", "optimizer"], "--shard needs --mode wrapper"),
        (["--error-reset"], "--error-reset needs --mode ddp and a --compression"),
        (["--mode", "graph"], "--mode graph captures a CUDA graph, so it needs --device cuda"),
        (["--mode", "graph", "--grad-scaler"], "--grad-scaler does not go with --error-reset or"),
        (["--accumulate", "0"], "argument --accumulate: must be a number from 1 on"),
    ],
)
def test_example_refuses(what, needed, monkeypatch, capsys):
    program = str(EXAMPLES / "train_lm.py")
    monkeypatch.setattr(sys, "argv", [program, *what])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    assert ended.value.code == 2
    assert needed in capsys.readouterr().err


def end_of(event):
    return event["ts"] + event["dur"]


def about_step(events, traced):
    """Rank 0's starts of buckets in a step, and their exchanges."""
    own = [e for e in events if e["pid"] == 0 and "ts" in e]
    inside = [e for e in own if traced["ts"] <= e["ts"] <= end_of(traced)]
    starts = [e for e in inside if e["name"].startswith("pycomm:bucket ")]
    exchanges = [e for e in inside if e["cat"] == "bucket"]
    return [sorted(found, key=lambda e: e["ts"]) for found in (starts, exchanges)]


def exchange_through_link(group):
    state = hooks.AllReduceState(group=group)
    link = EmulatedLink(state)
    buffers = [torch.full((1000,), float(group.rank + i)) for i in range(2)]
    parameters = [torch.nn.Parameter(torch.empty(1000)) for _ in range(2)]
    taken = []
    for link.seconds_per_byte, pause in ((0, 0), (1e-4, 0), (1e-4, 0.5)):
        begin = time.perf_counter()
        for buffer, parameter in zip(buffers, parameters, strict=True):
            state.start(buffer, [parameter])
        time.sleep(pause)
        taken.append(time.perf_counter() - begin)
        state.finish()
        taken.append(time.perf_counter() - begin)
    link.exchange()
    means = [(buffer == 0.5 + i).all() for i, buffer in enumerate(buffers)]
    return taken, len(link.buckets), all(means), state.stats()["exposed_ms"]


def test_link():
    """Carries one bucket after the other, as long as their bytes take, and leaves them right."""
    for taken, buckets, right, exposed_ms in run_group(2, exchange_through_link):
        assert right
        assert buckets == 2
        started, finished = taken[2:4]  # 4,000 bytes each, 0.4 s each
        assert finished >= 0.8 > started
        assert taken[5] >= 0.8
        assert exposed_ms < 500  # of the 800, backward's 500 hide most


def measure_training(rank, size, store, folder):
    join_world(rank, size, store)
    for name, run in (("overlap", training.run_overlap), ("step", training.run_steps)):
        what = f"{name} -p 2M --batch 2 -n 7 -J {folder}/{name}.json"
        run(cli.parse(what.split()))


@pytest.mark.slow
def test_benchmarks(tmp_path):
    run_ranks(2, measure_training, str(tmp_path))
    rows = {}
    for name in ("overlap", "step"):
        results = json.loads((tmp_path / f"{name}.json").read_text())
        assert results["meta"]["ranks"] == 2
        for row in results["rows"]:
            assert (row["wrong"], row["iterations"]) == (0, 7)
            rows[name, row.get("mode") or row["name"]] = row
    assert set(rows) == {
        *(("overlap", mode) for mode in training.MODES),
        *(("step", name) for name in (*training.MODES, "gloo")),
    }
    for mode in training.MODES:
        row = rows["overlap", mode]
        assert row["bytes"] == 4 * row["parameters"]
        assert row["exposed_us"] == pytest.approx(row["time_us"] - row["compute_us"], abs=0.2)
        assert row["buckets"] > 1
        check_timeline(row)
    assert rows["step", "gloo"]["speedup"] == 1


def check_timeline(row):
    """The buckets are those of the row, handed over in backward and exchanged one by one."""
    step, buckets = row["timeline"], row["timeline"]["buckets"]
    begin, end = step["backward_ms"]
    assert len(step["gradients_ms"]) == 4 * (row["parameters"] // 2**20)  # per layer
    assert begin <= min(step["gradients_ms"])
    assert max(step["gradients_ms"]) == end <= step["end_ms"]
    assert len(buckets) == row["buckets"]
    assert sum(bucket["bytes"] for bucket in buckets) == row["bytes"]
    free = 0
    for bucket in buckets:
        assert begin <= bucket["ready_ms"] <= bucket["begin_ms"] <= bucket["end_ms"]
        assert free <= bucket["begin_ms"]
        free = bucket["end_ms"]
    assert free <= step["end_ms"]


def test_times_count_from_the_step():
    """A step from 10 s on; its second exchange waits for the first, and the third does not."""
    handed = [(8, 10.2), (16, 10.3), (24, 10.8)]
    ran = [(10.2, 10.5), (10.3, 10.6), (10.9, 11.0)]
    made = timeline._timeline(10.0, 10.1, [10.2, 10.7, 10.3], handed, ran, 11.1)
    assert made.backward_ms == pytest.approx((100, 700))
    assert made.gradients_ms == pytest.approx((200, 700, 300))
    assert made.end_ms == pytest.approx(1100)
    assert [each.bytes for each in made.buckets] == [8, 16, 24]
    assert [each.ready_ms for each in made.buckets] == pytest.approx([200, 300, 800])
    spans = [time for each in made.buckets for time in (each.begin_ms, each.end_ms)]
    assert spans == pytest.approx([200, 500, 500, 600, 900, 1000])


def test_timelines_are_drawn(tmp_path, monkeypatch):
    """A panel per mode: a bar for backward, a mark per gradient, and a bar per bucket."""
    path, drawn = tmp_path / "steps.png", []
    monkeypatch.setattr(plot, "save", lambda figure, _: drawn.append(figure))
    times = dict.fromkeys(("time_us", "p50_us", "p95_us", "p99_us", "max_us"), 1.0)
    others = {each.name: 0 for each in fields(training.OverlapRow)} | times
    step = asdict(timeline._timeline(0.0, 0.1, [0.2, 0.4], [(8, 0.2)] * 3, [(0.2, 0.3)] * 3, 0.5))
    rows = [
        training.OverlapRow(**others | {"mode": mode, "timeline": step}) for mode in training.MODES
    ]
    plot.draw(str(path), "steps", rows)
    assert len(drawn[0].axes) == 2
    for panel in drawn[0].axes:
        bars = [(bar.get_x(), bar.get_width()) for bar in panel.patches]
        assert bars == [pytest.approx(bar) for bar in [(100, 300), (200, 100), (300, 0), (300, 0)]]
        assert panel.lines[0].get_xdata() == pytest.approx([200, 400])


def count_spoilt(group):
    settings = cli.parse(["overlap", "-p", "1M", "--batch", "2"])
    plain, trained = (training.make(name, settings, group) for name in ("plain", "ddp"))
    counts = [verify.count_wrong_gradients(trained.model, plain.model)]
    if group.rank == 1:
        next(trained.model.parameters()).grad[7] *= 1.01
    counts.append(verify.count_wrong_gradients(trained.model, plain.model))
    return counts


def test_wrong_gradients_are_found():
    assert run_group(2, count_spoilt) == [[0, 1], [0, 1]]
