"""Makes the results of all benchmarks on CPUs again, on one commit: ``make results``.

``python -m benchmarks.rerun FOLDER --runs 5`` takes the command from each file of results. It goes
through all commands several times, so that the runs of a command lie far apart, because a machine
may be slow for minutes. It does not measure again what the folder has. So Ctrl-C loses one command.
In the end each row is taken from the run with the median time; `range_us` has the least and the
most. All of it takes hours. Commands between nodes need root.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.report import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
MODULES = ("pycomm.bench", "benchmarks.nodes")
RENAMED = {  # words of older commands, and what they are today
    "benchmarks/hosts.py": "-m benchmarks.nodes",
    "-m pycomm.bench.nodes": "-m benchmarks.nodes",
    "--codec int8 --codec bf16 -n 64M": "--compression int8,bf16",
    "--codec topk:0.001 -n 26000000": "--compression topk:0.001 -b 104000000 -e 104000000",
    "--name adamw -n 64M": "--name adamw",
}
OUTPUTS = ("-J", "--json", "--plot")
TIMES = ("p50_us", "time_us", "step_us")
SETTINGS = ("bytes", "count", "tensors", "parameters", "ranks", "nodes", "ranks_per_node")
TOO_FAR = 3.0  # times the least: then something else than the contestant took the time

Row = dict[str, Any]


def commands() -> dict[str, list[str]]:
    """By each file of results that a benchmark of CPUs made: the words after ``python``."""
    found = {}
    for file in sorted(RESULTS.glob("*.json")):
        told = json.loads(file.read_text())
        command = told["meta"].get("command", "") if {"meta", "rows"} <= set(told) else ""
        for old, new in RENAMED.items():
            command = command.replace(old, new)
        words = shlex.split(command)[1:]
        if words[:1] == ["-m"] and words[1] in MODULES:
            found[file.name] = words
    return found


def into(words: Sequence[str], output: Path) -> list[str]:
    """The command with another file of results, and a picture beside it if it draws one."""
    ends = {"--plot": ".png"}
    return [
        str(output.with_suffix(ends.get(before, ".json"))) if before in OUTPUTS else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def measure(folder: Path, runs: int, wanted: Sequence[str]) -> set[str]:
    """Runs the commands whose results are not there yet; returns the names of those that failed."""
    failed = set()
    for run in range(1, runs + 1):
        (folder / str(run)).mkdir(parents=True, exist_ok=True)
        for name, words in commands().items():
            output = folder / str(run) / name
            if output.exists() or (wanted and name not in wanted):
                continue
            started = output.with_name(f"unfinished.{name}")
            print(f"run {run} of {runs}: {name}", flush=True)
            command = [sys.executable, *into(words, started)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failed.add(name)
                print(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
            else:
                started.replace(output)
    return failed


def combined(files: Sequence[dict[str, Any]], commit: str) -> tuple[dict[str, Any], list[Row]]:
    """The facts and rows of several runs as those of one."""
    facts = {**files[-1]["meta"], "commit": commit}
    kept = ("date", "load_before", "load_after")
    facts["runs"] = [{key: each["meta"].get(key) for key in kept} for each in files]
    by_setting: dict[str, list[Row]] = {}
    for each in files:
        for row in each["rows"]:
            by_setting.setdefault(setting(row), []).append(row)
    return facts, [median(rows) for rows in by_setting.values()]


def setting(row: Row) -> str:
    """What a row measures, in words."""
    told = {key: row[key] for key in row if key in SETTINGS or isinstance(row[key], str)}
    return ", ".join(f"{key} {value}" for key, value in told.items())


def time_of(row: Row) -> float:
    """The row's time, or 0 if it has none."""
    return next((row[name] for name in TIMES if row.get(name)), 0.0)


def median(rows: Sequence[Row]) -> Row:
    """The row of the median time, with the range of all."""
    ordered = sorted(rows, key=time_of)
    chosen = dict(ordered[(len(ordered) - 1) // 2])
    if time_of(chosen):
        chosen["range_us"] = [time_of(ordered[0]), time_of(ordered[-1])]
    return chosen


def doubtful(rows: Sequence[Row]) -> Iterator[str]:
    """Rows whose times differ between runs more than a table should hide."""
    for row in rows:
        least, most = row.get("range_us", (0.0, 0.0))
        if most > TOO_FAR * least:
            yield f"{setting(row)}: {least:,.1f} to {most:,.1f} us"


def commit_of(folder: Path) -> str:
    """This commit, which the folder's other runs must have, too."""
    tell = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(tell, capture_output=True, text=True, check=True).stdout.strip()
    note = folder / "commit"
    if note.exists() and note.read_text() != commit:
        raise SystemExit(f"{folder} has runs of commit {note.read_text()}: take another folder")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(commit)
    return commit


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rerun", description=__doc__)
    parser.add_argument("folder", type=Path, help="where runs and their combination go")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command")
    parser.add_argument("--only", default="", help="files, as in optimizer.json,overlap.json")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else []
    if unknown := set(wanted) - commands().keys():
        parser.error(f"--only must be of {', '.join(commands())}, got {', '.join(unknown)}")
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, got {options.runs}")
    folder = options.folder.absolute()
    commit = commit_of(folder)
    if os.geteuid() != 0:
        print("not root: benchmarks between nodes will fail")
    failed = measure(folder, options.runs, wanted)
    for name, words in commands().items():
        found = [folder / str(run) / name for run in range(1, options.runs + 1)]
        files = [json.loads(file.read_text()) for file in found if file.exists()]
        if files:
            facts, rows = combined(files, commit)
            facts["command"] = shlex.join(["python", *words])
            write_json(str(folder / name), facts, rows)
            for line in doubtful(rows):
                print(f"{name}: {line}")
    if failed:
        raise SystemExit(f"failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
