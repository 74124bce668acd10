"""The table of algorithms, made from measurements that are made up; and what ncu profiles."""

import contextlib
import json

import pytest
import torch

from pycomm.bench.cases import KIB, MIB
from pycomm.bench.gpu import kernels, sweep


def rows(crossovers):
    """One-shot is faster up to the given size by number of ranks."""
    return [
        {
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
        {"ranks": 4, "bytes": sweep.LARGE, "max_blocks": blocks, "algorithm": algorithm,
         "time_us": abs(blocks - 16) + 1.0}
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
    assert "max_blocks of a large two-shot: 16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="CUDA rows"):
        sweep.rewrite("no table", "")


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main(["--json", "nothing"]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no CUDA device\n"


def test_what_is_profiled_runs():
    with contextlib.ExitStack() as stack:
        made = kernels.calls("cpu", stack, count=1 << 14)
        assert len(made) == 8
        for call in made.values():
            call()
