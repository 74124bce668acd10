"""The benchmark of compression: contestants, detection of wrong results, output."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import join_world, run_group, run_ranks

import pycomm
from pycomm.bench import cli, codecs, measure, peers, plot, streams, verify
from pycomm.bench.contestants import Case, Compressed, Pycomm
from pycomm.bench.report import Settings

CASE = Case("all_reduce", torch.float32, "avg", 5000, 2, "cpu")


def run_session(rank, size, store, argv):
    join_world(rank, size, store)
    cli.measure(cli.parse(argv))


@pytest.mark.slow
def test_compressions_compete(tmp_path):
    """All compressions run beside uncompressed; impossible cases are left out and named once."""
    path = tmp_path / "results.json"
    what = "-b 64K -e 64K -o avg,min -a two_shot,ring --compression none,int8,topk:0.01"
    picture = tmp_path / "results.png"
    argv = ["all_reduce", *what.split(), "-n", "7", "-J", str(path), "--plot", str(picture)]
    run_ranks(2, run_session, argv)
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(path.read_text())
    rows = {(r["op"], r["compression"], r["algorithm"]): r for r in results["rows"]}
    plain = {("none", "two_shot"), ("none", "ring")}
    compressed = {("int8", "two_shot"), ("int8", "ring"), ("topk:0.01", "two_shot")}
    assert set(rows) == {("avg", *c) for c in plain | compressed} | {("min", *c) for c in plain}
    assert all(row["wrong"] == 0 for row in rows.values())
    assert results["meta"]["refused"] == ["topk:0.01 by ring", "min"]
    assert rows["avg", "none", "ring"]["wire_bytes"] == 65536
    for name in ("int8", "topk:0.01"):
        row = rows["avg", name, "two_shot"]
        assert row["wire_bytes"] == pycomm.parse_compression(name).wire_bytes(16384, 2)
        assert row["algbw_GBps"] == pytest.approx(65536 / row["time_us"] / 1e3, abs=1e-3)


def count_wrong(group, name, algorithm, case, spoil=0.0):
    """Wrong elements on this rank, if rank 1 adds `spoil` to an element of its result."""
    contestant = Compressed(group=group, algorithm=algorithm, compression=name)
    prepared = contestant.prepare(case)

    def call():
        prepared.call()
        if group.rank == 1:
            prepared.result[7] += spoil

    return verify.count_wrong_compressed(case, group.rank, contestant, replace(prepared, call=call))


def count_every(group):
    counts = {}
    for name in ("int8", "bf16", "fp16", "topk:0.01"):
        for algorithm in ("auto", "ring", "tree"):
            for dtype, op in product((torch.float32, torch.bfloat16), ("avg", "sum")):
                case = replace(CASE, dtype=dtype, op=op, ranks=group.size)
                if Compressed(group=group, algorithm=algorithm, compression=name).supports(case):
                    counts[name, algorithm, dtype, op] = count_wrong(group, name, algorithm, case)
    return counts


def test_right_results_are_right():
    for counts in run_group(3, count_every):
        assert len(counts) == 4 * (3 * 3 + 1)
        assert not any(counts.values()), counts


def count_spoilt(group):
    spoils = [("topk:0.01", 1e-3), ("int8", 1e-3), ("int8", 1.0), ("bf16", float("nan"))]
    return [count_wrong(group, name, "auto", CASE, spoil) for name, spoil in spoils]


def test_wrong_results_are_found():
    """A rank with other bits, and a value with too large an error, are found."""
    assert run_group(2, count_spoilt) == [[0, 0, 0, 0], [1, 1, 2, 2]]


def count_in_collectives(group):
    """Wrong elements on this rank of each collective by pycomm and Gloo: right, and one spoilt."""
    counts = {}
    for collective, spoil in product(cli.COLLECTIVES, (0, 1)):
        case = Case(collective, torch.float32, "sum", 510, group.size, "cpu")
        for contestant in (Pycomm(group=group), *peers.COLLECTIVES["gloo"]()):
            prepared = contestant.prepare(case)

            def call(prepared=prepared, spoil=spoil):
                prepared.call()
                prepared.result[7] += spoil

            wrong = verify.count_wrong(case, group.rank, replace(prepared, call=call))
            counts[collective, contestant.impl, spoil] = wrong
    return counts


def test_every_collective_is_checked():
    """Some have a result on rank 0 only."""
    for rank, counts in enumerate(run_group(3, count_in_collectives)):
        assert len(counts) == 2 * 2 * len(cli.COLLECTIVES)
        for (collective, impl, spoil), wrong in counts.items():
            at_root = collective in ("reduce", "gather")
            assert wrong == (0 if at_root and rank > 0 else spoil), (collective, impl)


def residual_after_checks(group):
    contestant = Compressed(group=group, compression="int8", feedback=True)
    prepared = contestant.prepare(CASE)
    assert verify.count_wrong_compressed(CASE, group.rank, contestant, prepared) == 0
    return prepared.residual.any().item()


def test_checks_leave_no_residual():
    assert run_group(2, residual_after_checks) == [False, False]


@pytest.mark.parametrize("read", [0, 4, 16 * 127, 16 * 500, 16 * 1000, 16 * 3900, 16 * 9000])
@pytest.mark.parametrize("write", [0, 16, 16 * 1000])
def test_streams_move_what_they_say(read, write):
    loops = {loop.call: loop for ladder in streams.LADDERS for loop in ladder}
    source, target = torch.ones(read // 4), torch.ones(write // 4)
    for ladder in streams.LADDERS:
        _, calls = streams._compose(source, target, ladder, "sum(x)")
        reads = writes = 0
        for call in calls:
            n, loop = call.args[0].numel(), loops.get(call.func)
            writes += n if loop else 0
            reads += n * (loop.reads if loop else 1)
            assert all(operand.numel() == n for operand in call.args)
        assert writes == target.numel()
        assert reads == source.numel()


def test_a_task_has_the_fastest_stream_as_its_floor():
    mix = streams.Mix(4096, 4096)
    outcome = streams.Task("nothing", mix, {"ours": int, "theirs": int}).compete(Settings(iters=7))
    assert list(outcome.figures) == ["ours", "theirs"]
    assert all(figures.iterations == 7 for figures in outcome.figures.values())
    assert outcome.stream in streams.streams(mix, "cpu")
    assert outcome.stream_us > 0


def stream_together(group, path):
    """Whether rank 1 has begun when rank 0 has ended."""
    stream = next(iter(streams.streams(streams.Mix(64, 64), "cpu", group=group).values()))
    pycomm.barrier(group=group)
    if group.rank == 1:
        time.sleep(0.2)
        path.touch()
    stream.call()
    return path.exists()


def test_streams_of_a_group_end_together(tmp_path):
    assert run_group(2, stream_together, tmp_path / "begun") == [True, True]


def test_codecs(tmp_path, capsys):
    path = tmp_path / "codecs.json"
    what = [
        "--compression",
        "int8,bf16",
        "--compression",
        "topk:0.01",
        "-b",
        "36K",
        "-e",
        "36K",
        "-d",
        "float32,bfloat16",
    ]
    cli.main(["codec", *what, "-n", "7", "-J", str(path)])
    rows = json.loads(path.read_text())["rows"]
    operations = {
        "int8": ["encode", "decode", "decode_add"],
        "bf16": ["encode", "decode"],
        "topk:0.01": ["select", "encode", "decode"],
    }
    expected = [(codec, name) for codec, names in operations.items() for name in names]
    assert [(row["codec"], row["operation"]) for row in rows] == 2 * expected
    for row in rows:
        assert row["wrong"] == 0
        assert row["count"] == {"float32": 8192, "bfloat16": 16384}[row["dtype"]]
        assert row["iterations"] == 7
        codec = pycomm.parse_compression(row["codec"])
        assert row["encoded_bytes"] == codec.encoded_bytes(
            row["count"], getattr(torch, row["dtype"])
        )
    assert capsys.readouterr().out.count("times faster than torch.topk") == 4


class WrongInt8(pycomm.Int8):
    def decode(self, wire, n, out=None, **options):
        taken = super().decode(wire, n, out, **options)
        taken[5] += 1
        return taken


class WrongTopK(pycomm.TopK):
    def select(self, x, **options):
        indices, values = super().select(x, **options)
        return indices.flip(0), values.flip(0)


def test_wrong_codecs_are_found():
    x = torch.randn(8192)
    assert [task.count_wrong() for task in codecs.make_tasks(WrongInt8(), x)] == [1, 1, 1]
    selecting, *_ = codecs.make_tasks(WrongTopK(k=100), x)
    assert selecting.count_wrong() == 99


@pytest.mark.parametrize(
    "argv",
    [
        "all_reduce --compression int9",
        "all_reduce -n -1",
        "all_reduce -n 0",
        "all_reduce -w -1",
        "all_reduce -b 0",
        "all_reduce -b 3",
        "all_reduce -b 4 -d float32,float64",
        "all_reduce -i 6",
        "all_reduce --ranks 0",
        "all_reduce --timeout nan",
        "all_reduce --timeout 1e300",
        "all_reduce --plot results.txt",
        "codec --compression topk",
        "codec -d int32",
        "codec -b many",
        "codec -n 0",
        "step --plot steps.pdf",
        "optimizer --name adagrad",
        "optimizer --threads 0",
        "step --ranks 1",
        "step --batch 0",
    ],
)
def test_nonsense_is_refused(argv, capsys):
    with pytest.raises(SystemExit):
        cli.parse(argv.split())
    assert "expected" in (message := capsys.readouterr().err) or "must be" in message


def test_percentiles():
    """The samples take 1 to 100 us, in two rounds."""
    rounds = [list(range(1, 51)), list(range(100, 50, -1))]
    figures = measure.summarise(rounds, unit=0.5)
    assert (figures.p50_us, figures.p95_us, figures.p99_us, figures.max_us) == (100, 190, 198, 200)
    assert figures.columns(without_us=90.0) == {
        "iterations": 100, "time_us": 2 * (25.5 + 75.5) / 2 - 90,
        "p50_us": 10, "p95_us": 100, "p99_us": 108, "max_us": 110,
    }  # fmt: skip


def test_deepspeed_shards_on_the_cpu_alone(monkeypatch, capsys):
    monkeypatch.setattr(cli._C, "has_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    able = ("ddp", "zero", "fsdp2", "fsdp2_pycomm")
    assert cli.parse(["step", "--shard", "--device", "cuda"]).peers == able
    assert cli.parse(["step", "--shard"]).peers == peers.TRAINEES
    with pytest.raises(SystemExit):
        cli.parse(["step", "--shard", "--device", "cuda", "--peer", "ddp,deepspeed_zero1"])
    message = capsys.readouterr().err
    assert f"expected some of {', '.join(able)} with --shard --device cuda" in message
    assert "got 'deepspeed_zero1'" in message


@pytest.mark.parametrize("iters", [1, 2, 7, 23])
def test_as_many_calls_as_asked_for(iters):
    prepared = [measure.Prepared(torch.ones(1), torch.ones(1), lambda: None) for _ in range(2)]
    figures = measure.interleave(None, prepared, iters)
    assert [figure.iterations for figure in figures] == [iters] * 2


def is_rank(pid):
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and "sys.path[:]" in path.read_text()  # as pycomm.launch starts them


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them():
    """Ctrl-C that only the parent hears, while the ranks work."""
    command = "-m pycomm.bench all_reduce -b 8 -e 8 -n 2000000 --timeout 300"
    with subprocess.Popen(
        [sys.executable, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        parent.stdout.readline()  # the ranks have met
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        ranks = list(filter(is_rank, children))
        parent.send_signal(signal.SIGINT)
        try:
            parent.wait(30)
        finally:
            parent.kill()
    assert len(ranks) == 2
    assert not any(map(is_rank, ranks))


def test_optimizers(tmp_path, capsys):
    """Every scheme, plain and full, beside torch; the bytes are those of the storage."""
    path = tmp_path / "optimizers.json"
    what = "-b 32K -e 32K --scheme all --full --peer torch --threads 1 -n 7"
    cli.main(["optimizer", *what.split(), "-J", str(path)])
    rows = {(r["scheme"], r["impl"]): r for r in json.loads(path.read_text())["rows"]}
    assert {impl for _, impl in rows} == {"pycomm", "pycomm full", "torch"}
    per_parameter = {
        s: r["bytes"] / r["count"] for (s, impl), r in rows.items() if impl == "pycomm"
    }
    assert per_parameter["fp32"] == 28
    assert per_parameter["bf16_master"] == 28
    assert per_parameter["bf16_remainder"] == 26
    assert per_parameter["bf16_remainder_bf16"] == 18
    assert per_parameter["bf16_remainder_8bit"] == pytest.approx(14.06, abs=0.01)
    assert rows["fp32", "pycomm full"]["bytes"] == 32 * 8192
    what = "--name lion --small --peer torch --threads 1 -n 7"
    cli.main(["optimizer", *what.split()])
    shown = capsys.readouterr().out
    assert "no torch: torch.optim has no lion" in shown
    assert "lion      fp32 " in shown


PLOTS = {
    "codec": "-b 16K -e 32K",
    "optimizer": "-b 4K -e 4K --name all --scheme fp32,fp16_master --threads 1",
}


@pytest.mark.parametrize("table", PLOTS)
def test_every_table_is_drawn(tmp_path, monkeypatch, table):
    """Lines over sizes, or bars where there is one size."""
    path, drawn = tmp_path / "result.png", []
    monkeypatch.setattr(plot, "save", lambda figure, to: drawn.append(figure) or save(figure, to))
    argv = [table, *PLOTS[table].split(), "-n", "2", "--plot", str(path)]
    cli.main(argv)
    assert path.read_bytes().startswith(b"\x89PNG")
    (panel, *_) = drawn[0].axes
    if table == "optimizer":
        assert len(panel.patches) == 10
        assert panel.get_yticklabels()[-1].get_text() == "lamb fp16_master pycomm"
    else:
        assert all(len(line.get_xdata()) == 2 for line in panel.lines)


save = plot.save
