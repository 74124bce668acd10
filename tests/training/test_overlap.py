"""Training examples and benchmarks: their output, and exchanges that overlap backward."""

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import join_world, run_group, run_ranks

from pycomm import hooks
from pycomm.bench import cli, training, verify
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
        (["--accumulate", "0"], "--accumulate must be at least 1"),
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
    assert rows["step", "gloo"]["speedup"] == 1


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
