"""The table of algorithms, made from measurements that are made up; and what ncu profiles."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

from pycomm.bench import cli
from pycomm.bench.gpu import kernels, sweep
from pycomm.bench.report import KIB, MIB

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/gpu.json"


def rows(crossovers, among="threads"):
    """One-shot is faster up to the given size by number of ranks."""
    return [
        {
            "among": among,
            "ranks": ranks,
            "bytes": nbytes,
            "max_blocks": 32,
            "algorithm": algorithm,
            "time_us": 2.0 if (algorithm == "one_shot") == (nbytes <= largest) else 3.0,
        }
        for ranks, largest in crossovers.items()
        for nbytes in sweep.SIZES
        for algorithm in sweep.ALGORITHMS
    ]


def number(text):
    """A number of the source."""
    return float("inf") if text.startswith("kAny") else eval(text)


def chosen(table, ranks, nbytes):
    return next(
        algorithm
        for most, largest, algorithm in table
        if ranks <= number(most) and nbytes <= number(largest)
    )


@pytest.mark.parametrize(
    "crossovers",
    [
        {2: 512 * KIB, 4: 256 * KIB, 8: 64 * KIB},
        {2: 64 * KIB, 4: 256 * KIB, 8: 256 * KIB},
        {2: 0, 4: 16 * KIB, 8: 0},
        {2: 4 * MIB, 4: 4 * MIB, 8: 4 * MIB},
        {2: 0, 4: 0, 8: 0},
        {2: 2 * KIB, 4: KIB, 8: 4 * KIB},
    ],
    ids=str,
)
def test_the_table_chooses_what_was_faster(crossovers):
    made = rows(crossovers)
    assert sweep.crossovers(made) == crossovers
    table = sweep.table(crossovers)
    for ranks, largest in crossovers.items():
        for nbytes in sweep.SIZES:
            want = "one_shot" if nbytes <= largest else "two_shot"
            assert chosen(table, ranks, nbytes) == want, (ranks, nbytes)
    assert chosen(table, 64, 1 << 40) == "two_shot"


def test_one_fast_size_beyond_the_crossover_changes_nothing():
    made = rows({2: 64 * KIB})
    for row in made:
        if row["bytes"] == MIB:
            row["time_us"] = 1.0 if row["algorithm"] == "one_shot" else 2.0
    assert sweep.crossovers(made) == {2: 64 * KIB}


def test_the_source_is_rewritten(tmp_path, monkeypatch, capsys):
    text = sweep.TABLE.read_text()
    copy = tmp_path / "select.h"
    copy.write_text(text)
    monkeypatch.setattr(sweep, "TABLE", copy)
    large = [
        {"among": "threads", "ranks": 4, "bytes": sweep.LARGE, "max_blocks": blocks,
         "algorithm": algorithm, "time_us": abs(blocks - 16) + 1.0}
        for blocks in sweep.BLOCKS for algorithm in sweep.ALGORITHMS
    ]  # fmt: skip
    stored = {
        "meta": {"gpu": {"name": "Fast GPU"}},
        "rows": rows({2: MIB, 4: 128 * KIB, 8: 128 * KIB}) + large,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    for _ in range(2):  # it finds what it has written
        assert sweep.main(["--choose", str(tmp_path / "sweep.json"), "--write"]) == 0
    before, after = text.splitlines(), copy.read_text().splitlines()
    assert [line for line in after if line not in before] == [
        "    // CUDA: measured in the memory of one Fast GPU.",
        "    {Device::cuda, 2, 1024 << 10, Algorithm::one_shot},",
        "    {Device::cuda, kAnyRanks, 128 << 10, Algorithm::one_shot},",
    ]
    assert [line for line in before if "Device::cpu" in line or "cuda" not in line.lower()] == [
        line for line in after if "Device::cpu" in line or "cuda" not in line.lower()
    ]
    told = capsys.readouterr().out
    assert "max_blocks of a large two-shot: 16" in told
    assert "8 ranks, 2048 bytes: 2.0 us in packets, 2.0 with flags" in told
    with pytest.raises(ValueError, match="CUDA rows"):
        sweep.rewrite("no table", "")


def test_processes_with_a_gpu_each_count_more():
    of_threads = rows({2: 64 * KIB, 4: 64 * KIB})
    of_processes = rows({4: 512 * KIB}, "processes")
    for made in (of_threads + of_processes, of_processes + of_threads):
        assert sweep.crossovers(made) == {2: 64 * KIB, 4: 512 * KIB}


@pytest.mark.parametrize("lost", [0, 7, -1])
def test_truncated_results_choose_nothing(lost):
    made = rows({2: 64 * KIB, 4: 64 * KIB})
    del made[lost]
    with pytest.raises(ValueError, match=r"the results for [24] ranks lack tensors of \[\d+\]"):
        sweep.crossovers(made)


def test_the_largest_packet_is_that_of_the_kernels():
    (limit,) = re.findall(
        r"kPacketBytes = (\d+) << 10;", (sweep.TABLE.parents[2] / "cuda/layout.h").read_text()
    )
    assert int(limit) * KIB == sweep.PACKETS
    assert sweep.SIZES[sweep.SIZES.index(sweep.PACKETS) + 1] == sweep.PACKETS + 128


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_case_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, gpus):
    def measure(ranks, nbytes, max_blocks, _device):
        if (ranks, nbytes) == (4, MIB):
            raise RuntimeError("the device is gone")
        return [{"among": "threads", "ranks": ranks, "bytes": nbytes, "max_blocks": max_blocks,
                 "algorithm": "one_shot", "time_us": 1.0}]  # fmt: skip

    def of_processes(ranks, least, most):
        assert ranks == gpus
        if least == most:
            raise RuntimeError("it hangs")
        return [{"among": "processes", "ranks": ranks, "bytes": most, "algorithm": "one_shot",
                 "time_us": 1.0}]  # fmt: skip

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "measure_processes", of_processes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sweep, "gpu", lambda: {"name": "pretended"})
    assert not sweep.run(str(tmp_path / "sweep.json"))
    stored = json.loads((tmp_path / "sweep.json").read_text())
    failed = ["RuntimeError: the device is gone", "RuntimeError: it hangs"]
    assert list(stored["meta"]["failed"].values()) == failed[: 1 if gpus == 1 else 2]
    among = [row["among"] for row in stored["rows"]]
    assert among.count("threads") == len(sweep.RANKS) * len(sweep.SIZES) - 1 + len(sweep.BLOCKS)
    assert among.count("processes") == (gpus > 1)


def test_processes_are_timed_by_the_command_line(monkeypatch):
    """Their times are those of its file."""

    def run(argv):
        settings = cli.parse([*argv, "--device", "cpu"])
        assert settings.sizes == (1024, 2048)
        assert (settings.ranks, settings.algorithms) == (2, sweep.ALGORITHMS)
        row = {"ranks": 2, "bytes": 1024, "algorithm": "one_shot", "time_us": 3.0, "impl": "pycomm"}
        Path(settings.json).write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(sweep.cli, "main", run)
    assert sweep.measure_processes(2, 1024, 2048) == [
        {"among": "processes", "ranks": 2, "bytes": 1024, "algorithm": "one_shot", "time_us": 3.0}
    ]


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main(["--json", "nothing"]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no CUDA device\n"


def test_what_is_profiled_runs():
    with contextlib.ExitStack() as stack:
        made = kernels.calls("cpu", stack, count=1 << 14)
        rows = json.loads(RESULTS.read_text())["rows"]
        assert len(made) == 8
        assert made.keys() <= {row["name"] for row in rows}
        for call in made.values():
            call()


def test_the_worst_kernels_are_profiled(tmp_path):
    results = tmp_path / "gpu.json"
    assert kernels.worst(str(results), ["a", "b"]) == ["a", "b"]
    rows = [{"name": name, "share": share} for name, share in (("a", 0.9), ("b", 0.4), ("c", 0.6))]
    results.write_text(json.dumps({"rows": rows}))
    assert kernels.worst(str(results), ["a", "b", "c", "new"], 3) == ["new", "b", "c"]
