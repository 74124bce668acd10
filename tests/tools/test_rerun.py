"""All results made again: ``python -m benchmarks.rerun``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import rerun
from benchmarks.nodes import cli as nodes
from pycomm.bench import cli as bench

# Writes a file of results whose time is that of the run, which the file's folder names.
PROGRAM = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
time = {"1": 50.0, "2": 10.0, "3": 14.0}[path.parent.name]
rows = [
    {"impl": "pycomm", "bytes": 256, "p50_us": time, "iterations": int(path.parent.name)},
    {"impl": "pycomm", "bytes": 512, "p50_us": 7.0, "iterations": int(path.parent.name)},
    {"impl": "gloo", "bytes": 512, "correct": True, "iterations": int(path.parent.name)},
]
meta = {"date": path.parent.name, "load_before": 1.0, "load_after": 2.0}
path.write_text(json.dumps({"meta": meta, "rows": rows}))
pathlib.Path(path.parent.parent / "calls").open("a").write(path.parent.name)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for two commands, of which one always fails."""
    program = ["-c", PROGRAM, "--json", "somewhere.json"]
    wrong = ["-c", "print('out'); raise SystemExit('a reason')", "--json", "else.json"]
    monkeypatch.setattr(rerun, "commands", lambda: {"right.json": program, "wrong.json": wrong})
    return tmp_path / "results"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rerun", *map(str, arguments)])
    rerun.main()


def test_all_commands_are_understood(tmp_path):
    """Those of the stored files, with an output of their own."""
    found = rerun.commands()
    assert len(found) > 20
    for name, words in found.items():
        parse = {"pycomm.bench": bench.parse, "benchmarks.nodes": nodes.parse}[words[1]]
        settings = parse(rerun.into(words, tmp_path / name)[2:])
        assert settings.json == str(tmp_path / name)
        assert getattr(settings, "plot", None) in (None, str(tmp_path / name)[:-4] + "png")


def test_rows_of_the_median_run(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"failed: wrong\.json"):
        run(monkeypatch, folder, "--runs", 3)
    told = json.loads((folder / "right.json").read_text())
    timed, same, untimed = told["rows"]
    assert (timed["iterations"], timed["p50_us"], timed["range_us"]) == (3, 14.0, [10.0, 50.0])
    assert same["range_us"] == [7.0, 7.0]
    assert "range_us" not in untimed
    assert [each["date"] for each in told["meta"]["runs"]] == ["1", "2", "3"]
    here = subprocess.run(
        ["git", "-C", rerun.ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert told["meta"]["commit"] == here.stdout.strip()
    printed = capsys.readouterr().out
    assert "right.json: impl pycomm, bytes 256" in printed
    assert "10.0 to 50.0 us" in printed
    assert "bytes 512" not in printed
    assert printed.count("wrong.json failed:\nout\na reason") == 3
    assert not (folder / "wrong.json").exists()


def test_an_interrupted_run_goes_on(folder, monkeypatch):
    """Finished runs are kept. An unfinished run is measured again."""
    run(monkeypatch, folder, "--runs", 1, "--only", "right.json")
    (folder / "2").mkdir()
    (folder / "2" / "unfinished.right.json").write_text("{")
    run(monkeypatch, folder, "--runs", 3, "--only", "right.json")
    assert (folder / "calls").read_text() == "123"


def test_runs_of_another_commit_are_refused(folder, monkeypatch):
    folder.mkdir()
    (folder / "commit").write_text("0" * 40)
    with pytest.raises(SystemExit, match=f"has runs of commit {'0' * 40}: take another folder"):
        run(monkeypatch, folder)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--runs", "0"], "--runs must be at least 1, got 0"),
        (["--only", "none.json"], "--only must be of right.json, wrong.json, got none.json"),
    ],
)
def test_wrong_options(folder, monkeypatch, capsys, words, reason):
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, *words)
    assert reason in capsys.readouterr().err
