"""Failures for any length of time: the survivors' resources must not grow.

``python tests/support/soaking.py --minutes 60 --json FILE`` runs two ranks that live on. In every
round a third one joins them, on their node or on another, all run random operations with checked
results, and the third is killed at a random moment. The two shrink the group, check an operation in
the smaller one, and close it. Memory, file descriptors and threads of the two are noted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import random
import signal
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import helpers
import shrinking
import torch
from torch.distributed import PrefixStore, TCPStore

import pycomm
from pycomm import _init
from pycomm._runtime import rendezvous
from pycomm.bench.report import circumstances

SIZE, VICTIM = 3, 2


def make_group(store: Any, rank: int, number: int) -> pycomm.Group:
    """A group without torch's process groups, which every round would have to make anew."""
    spans = number % 2 == 1
    os.environ["PYCOMM_NODE"] = str(rank > 0) if spans else ""
    store = PrefixStore(str(number), store)
    introduce = functools.partial(rendezvous.introduction, 1 << 20)
    members = rendezvous.join(store, rank, SIZE, 30.0, introduce, listens=True)
    options = _init._Options(None, rank, members.everyone[rank], 30.0, 1)
    return _init._complete(members, range(SIZE), options)


def operate(group: pycomm.Group, number: int) -> None:
    """Random operations until one fails."""
    for iteration in range(10**9):
        shrinking.operate(group, group.rank, random.Random(f"{number} {iteration}"))


def be_killed(port: int, number: int) -> None:
    """The life of the third rank."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    operate(make_group(store, VICTIM, number), number)


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count(),
        "private_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def live_on(pipe: Connection, port: int, rank: int) -> None:
    """The life of the first two: a round for each number that the parent sends."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    while (number := pipe.recv()) is not None:
        holds = held()  # of the rounds before, whose threads have ended meanwhile
        group = make_group(store, rank, number)
        pipe.send("ready")
        error, began = "", 0.0
        try:
            operate(group, number)
        except pycomm.CollectiveError as raised:
            began, error = time.monotonic(), f"{type(raised).__name__} {raised.rank}"
        group = group.shrink()
        took = time.monotonic() - began
        total = pycomm.all_reduce(torch.tensor([1.0 + group.rank]), group=group).item()
        group.close()
        del group
        pipe.send((error, took, total, holds))


def soak(seconds: float, pause: float = 2.0) -> dict[str, Any]:
    """Rounds for this long; returns what was seen."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    choice, pipes, survivors = random.Random(0), [], []
    for rank in range(VICTIM):
        ours, theirs = helpers.CONTEXT.Pipe()
        survivors.append(helpers.CONTEXT.Process(target=live_on, args=(theirs, store.port, rank)))
        survivors[-1].start()
        theirs.close()
        pipes.append(ours)
    wrong, shrinks, states = [], [], []
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        next_at = time.monotonic() + pause
        victim = helpers.CONTEXT.Process(target=be_killed, args=(store.port, number))
        victim.start()
        for pipe in pipes:
            pipe.send(number)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        time.sleep(choice.random() / 20)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        state = []
        for pipe in pipes:
            assert pipe.poll(30), f"round {number}: a rank hangs"
            error, took, total, holds = pipe.recv()
            shrinks.append(1e3 * took)
            state.append(holds)
            if error != f"PeerDied {VICTIM}" or total != 3:
                wrong.append(f"round {number}: {error}, sum {total}")
        states.append(state)
        number += 1
        time.sleep(max(next_at - time.monotonic(), 0))
    for pipe in pipes:
        pipe.send(None)
    for process in survivors:
        process.join(30)
    return {"rounds": number, "wrong": wrong, "shrink_ms": shrinks, "held": states}


def growth(states: list[Any]) -> dict[str, list[int]]:
    """For each thing held: on both ranks, the last quarter's median less the first one's."""
    part = max(len(states) // 4, 1)

    def middle(some: list[Any], rank: int, name: str) -> int:
        return int(statistics.median(state[rank][name] for state in some))

    return {
        name: [
            middle(states[-part:], rank, name) - middle(states[:part], rank, name)
            for rank in range(VICTIM)
        ]
        for name in states[0][0]
    }


def main() -> None:
    """Soaks for as long as asked for, and prints or writes a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seen = soak(60 * options.minutes)
    summary = {
        "meta": circumstances(f"python tests/support/soaking.py --minutes {options.minutes:g}"),
        "rounds": seen["rounds"],
        "wrong": seen["wrong"],
        "shrink_ms": {
            "median": statistics.median(seen["shrink_ms"]),
            "max": max(seen["shrink_ms"]),
        },
        "held_at_first": seen["held"][0],
        "held_at_last": seen["held"][-1],
        "growth": growth(seen["held"]),
    }
    helpers.publish(summary, options.json)


if __name__ == "__main__":
    main()
