"""Kills ranks in every phase of their life, and records the survivors' errors and their times.

``python tests/support/faults.py --kills 60 --json FILE`` writes a summary. A kill aims at a
phase; the phase that it hit is read afterwards from what the victim had published by then: whether
it had announced the operation, and how many tiles it had staged and reduced. Aims:

- rendezvous: the victim kills itself at a chosen step of ``pycomm.init``;
- staging, reducing, gathering: phases of a two-shot all-reduce of one tile;
- pipelining: somewhere in a ring or tree;
- idling: between two operations; closing: while ``close()`` finishes operations under way.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import helpers
import torch
import torch.distributed as dist
from trials import (
    OPERATION_TIMEOUT,
    PHASES,
    RENDEZVOUS_TIMEOUT,
    TILED,
    WARM_UP,
    Killer,
    Progress,
    Trial,
    kill_myself_in_rendezvous,
    make_trial,
    pin,
)

import pycomm
from pycomm.bench.report import circumstances


def participate(rank: int, size: int, store: str, trial: Trial) -> dict[str, Any]:
    """A rank's life in a trial: ends by the kill, or by the error that it causes."""
    progress = Progress(store + ".progress")
    rng = random.Random(trial.seed + 1)
    is_victim = rank == trial.victim
    helpers.join_world(rank, size, store)
    wait_until_all_are_connected(size)
    in_rendezvous = trial.phase == "rendezvous"
    if is_victim:
        progress.mark("rendezvous")
        if in_rendezvous:
            kill_myself_in_rendezvous(progress, trial.point)
    report: dict[str, Any] = {"attempted": 0}
    try:
        group = pycomm.init(
            timeout=RENDEZVOUS_TIMEOUT if in_rendezvous else OPERATION_TIMEOUT,
            staging_bytes=trial.staging_bytes,
        )
    except Exception as error:
        return report | describe(error) | {"hit": "rendezvous"}
    x = torch.ones(trial.nbytes // 4)
    killer = None
    pids = pids_of(group) if not in_rendezvous else []
    if trial.phase in TILED:
        pin(0)
    if rank == trial.killer and not in_rendezvous:
        killer = Killer(group, trial, progress, pids[trial.victim])
        killer.start()
    sequence = group._core.sequence
    try:
        while True:
            if is_victim:
                progress.mark("idle", report["attempted"])
                if trial.phase == "closing" and report["attempted"] == WARM_UP:
                    for _ in range(trial.operations_under_way):
                        pycomm.all_reduce(x, "max", group=group, async_op=True)
                    progress.mark("closing", WARM_UP)
                    group.close()
                    progress.mark("left", WARM_UP)
                    time.sleep(1)
                if trial.phase == "idling":
                    time.sleep(rng.random() / 200)
            report["attempted"] += 1
            sequence += 1
            before = group._core.published(rank)[1:]
            if killer is not None:
                killer.now = (report["attempted"], sequence, before)
            if is_victim:
                progress.mark("operation", report["attempted"])
            pycomm.all_reduce(x, "max", algorithm=trial.algorithm, group=group)
    except Exception as error:
        report |= describe(error) | {"expected_sequence": sequence}
    report["hit"] = phase_hit(trial, progress, group, sequence, report["attempted"], before)
    try:
        pycomm.all_reduce(x, group=group)
        report["afterwards"] = "nothing"
    except Exception as error:
        report["afterwards"] = type(error).__name__
    group.close()
    return report


def pids_of(group: pycomm.Group) -> list[int]:
    """Every rank's process."""
    everyone = torch.empty(group.size, dtype=torch.int64)
    return pycomm.all_gather(everyone, torch.tensor([os.getpid()]), group=group).tolist()


def wait_until_all_are_connected(size: int) -> None:
    """A barrier over the store, so that a death cannot disturb torch.distributed's start."""
    store = dist.distributed_c10d._get_default_store()
    store.add("connected", 1)
    while store.add("connected", 0) < size:
        time.sleep(0.001)


def describe(error: Exception) -> dict[str, Any]:
    now = time.monotonic()
    fields = ("rank", "pid", "operation", "sequence")
    return {"at": now, "error": type(error).__name__, "message": str(error)} | {
        field: getattr(error, field, None) for field in fields
    }


def phase_hit(
    trial: Trial,
    progress: Progress,
    group: pycomm.Group,
    sequence: int,
    attempted: int,
    before: tuple[int, ...],
) -> str:
    """The phase in which the victim stopped, as far as its published data shows."""
    where, operation, _ = progress.read()
    if where != "operation":
        return {"idle": "idling", "left": "having left"}.get(where, where)
    announced, *flags = group._core.published(trial.victim)
    if operation == attempted and announced != sequence:
        return "entering"
    if trial.algorithm != "two_shot":
        return "pipelining" if trial.algorithm in ("ring", "tree") else trial.algorithm
    if operation < attempted:
        return "gathering"  # all signals of that operation were given
    done = tuple(flag - start for flag, start in zip(flags, before, strict=True))[:2]
    return next((phase for phase, tiles in TILED.items() if tiles == done), "gathering")


def run_trial(trial: Trial) -> dict[str, Any]:
    """Runs a trial for one row; repeats it if the victim had closed before the kill."""
    for _ in range(5):
        row = run_once(trial)
        if row["killed"]:
            break
    return row


def run_once(trial: Trial) -> dict[str, Any]:
    """Runs a trial; returns its description and each survivor's report."""
    with helpers.Ranks(trial.size, participate, trial) as ranks:
        pids = ranks.pids
        hung = False
        try:
            ranks.join(OPERATION_TIMEOUT)
        except AssertionError:
            hung = True
        outcomes = list(ranks.outcomes)
        progress = Progress(str(Path(ranks.store + ".progress")))
        _, _, killed_at = progress.read()
    row: dict[str, Any] = asdict(trial) | {
        "hung": hung,
        "killed": killed_at > 0,
        "victim_pid": pids[trial.victim],
    }
    survivors = [
        outcome.value or {"error": repr(outcome.error), "message": outcome.trace, "operation": ""}
        for rank, outcome in enumerate(outcomes)
        if rank != trial.victim and outcome is not None
    ]
    for survivor in survivors:
        survivor["ms"] = round((survivor.pop("at", float("nan")) - killed_at) * 1e3, 3)
    row["hit"] = survivors[0].get("hit", "unknown") if survivors else "unknown"
    row["survivors"] = survivors
    return row


def complaints(row: dict[str, Any]) -> list[str]:
    """Every way in which a row breaks the promises."""
    found = ["a rank hung"] if row["hung"] else []
    if not row["killed"]:
        found.append("the kill never came")
    if len(row["survivors"]) != row["size"] - 1:
        found.append("a survivor is missing")
    for survivor in row["survivors"]:
        kind = survivor["error"]
        in_rendezvous = survivor["operation"] == "rendezvous"
        if in_rendezvous and survivor["ms"] > (RENDEZVOUS_TIMEOUT + 1) * 1e3:
            found.append(f"rendezvous took {survivor['ms']} ms to fail")
        if in_rendezvous and kind == "Timeout":
            continue
        if kind != "PeerDied":
            found.append(f"raised {kind}: {survivor['message']}")
            continue
        culprit = (survivor["rank"], survivor["pid"])
        if culprit != (row["victim"], row["victim_pid"]):
            found.append(f"named rank and pid {culprit}")
        if in_rendezvous:
            continue
        named = (survivor["operation"], survivor["sequence"])
        if named != ("all_reduce", survivor["expected_sequence"]):
            found.append(f"named operation {named}")
        if not survivor["ms"] <= 1000:
            found.append(f"took {survivor['ms']} ms")
        if survivor["afterwards"] != "GroupUnusable":
            found.append(f"then gave {survivor['afterwards']}")
    return found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Survivors' errors, and ms from the kill to them, by the phase that was hit.

    Rows that break a promise are in it whole.
    """
    hit: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        hit.setdefault(row["hit"], []).append(row)
    outside = [row for row in rows if row["hit"] != "rendezvous"]
    return {
        "kills": len(rows),
        "broken_promises": [row for row in rows if row["complaints"]],
        "outside_rendezvous": summary_of(outside),
        "phases": {phase: summary_of(found) for phase, found in hit.items()},
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    survivors = [survivor for row in rows for survivor in row["survivors"]]
    times = [survivor["ms"] for survivor in survivors] or [float("nan")]
    return {
        "kills": len(rows),
        "errors": Counter(survivor["error"] for survivor in survivors),
        "ms": {"min": min(times), "median": statistics.median(times), "max": max(times)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for i in range(options.kills):
        trial = make_trial(PHASES[i % len(PHASES)], options.seed + i // len(PHASES))
        row = run_trial(trial)
        row["complaints"] = complaints(row)
        rows.append(row)
        slowest = max((s["ms"] for s in row["survivors"]), default=float("nan"))
        print(
            f"{i + 1:4} {row['phase']:>11} hit {row['hit']:<11} {row['size']} ranks "
            f"{row['nbytes']:>9} B {row['algorithm']:<8} {slowest:9.3f} ms",
            *row["complaints"],
            flush=True,
        )
    command = f"python tests/support/faults.py --kills {options.kills} --seed {options.seed}"
    helpers.publish({"meta": circumstances(command), **summarise(rows)}, options.json)
    raise SystemExit(any(row["complaints"] for row in rows))


if __name__ == "__main__":
    main()
