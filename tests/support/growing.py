"""Processes that join running groups, while members and newcomers are killed at random moments.

``python tests/support/growing.py --worlds 100`` prints what was seen. Every process has a number of
its own, and contributes it to sums, which all check.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import helpers
import spanning
import torch

import pycomm

LIMIT = 60.0  # seconds after which a world counts as stuck


def publish(group: pycomm.Group, path: str) -> None:
    """Rank 0 writes the group's address for newcomers."""
    if group.rank == 0:
        written = Path(f"{path}.new")
        written.write_text(str(group.address))
        written.replace(path)


def numbers(group: pycomm.Group, number: int) -> list[int]:
    """The numbers of all ranks, from two operations that must agree."""
    everyone = torch.empty(group.size, dtype=torch.int64)
    pycomm.all_gather(everyone, torch.tensor([number]), group=group)
    total = pycomm.all_reduce(torch.full((3000,), float(number)), group=group)
    assert (total == everyone.sum()).all(), f"{total[0]} is not the sum of {everyone}"
    assert everyone[group.rank] == number
    return everyone.tolist()


def live(
    group: pycomm.Group, number: int, path: str, wanted: int = 0, patience: float = 5
) -> dict[str, Any]:
    """A rank's life: operations until told to stop, or until `wanted` ranks are there."""
    stop, seen = torch.zeros(1), []
    while not stop:
        try:
            ranks = numbers(group, number)
            if seen[-1:] != [ranks]:
                seen.append(ranks)
                Path(f"{path}.seen.{number}").write_text(str(sorted(ranks)))
            publish(group, path)
            stop.fill_(Path(f"{path}.stop").exists() or len(ranks) == wanted)
            pycomm.broadcast(stop, 0, group=group)
            if not stop:
                group = group.grow(patience)
        except pycomm.CollectiveError:
            group = group.shrink()
            stop.zero_()
    helpers.pass_barrier(group, f"{path}.end.{len(group.ranks)}")
    group.close()
    return {"seen": seen, "nodes": group.nodes}


def member(
    rank: int, size: int, store: str, path: str, nodes: str = "", wanted: int = 0, **options: float
) -> dict[str, Any]:
    """For :class:`helpers.Ranks`: one of the first ranks of the group."""
    if nodes:
        spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    return live(pycomm.init(timeout=20), rank, path, wanted, **options)


def newcomer(
    _rank: int, _size: int, _store: str, number: int, path: str, node: str = "", wanted: int = 0
) -> dict[str, Any]:
    """For :class:`helpers.Ranks`: a process that joins later."""
    if node:
        spanning.pretend(node)
    Path(f"{path}.{number}").touch()
    return live(pycomm.join(Path(path), 30), number, path, wanted)


def run_world(seed: int, spans: bool = False) -> list[str]:
    """Starts and kills processes at random; returns every way in which promises are broken."""
    choice = random.Random(seed)
    letters = "ab" if spans else " "
    nodes = "".join(choice.choice(letters) for _ in range(choice.randint(1, 3)))
    pick = (lambda: choice.choice("abc")) if spans else (lambda: "")
    wrong = []
    with helpers.Ranks(1, _nothing) as folder:
        path = f"{folder.store}.door"
        worlds = [helpers.Ranks(len(nodes), member, path, nodes if spans else "")]
        places = [(worlds[0], rank) for rank in range(len(nodes))]
        killed = set()
        try:
            helpers.wait_until(Path(path).exists)
            for number in range(len(nodes), len(nodes) + choice.randint(2, 4)):
                worlds.append(helpers.Ranks(1, newcomer, number, path, pick()))
                places.append((worlds[-1], 0))
                helpers.wait_until(Path(f"{path}.{number}").exists)
                time.sleep(choice.random() / 20)
                victim = choice.choice([number, number, choice.randrange(number), None])
                alive = set(range(len(places))) - killed
                if victim in alive and len(alive) > 2:
                    world, rank = places[victim]
                    world.signal(rank, signal.SIGKILL)
                    killed.add(victim)
            left = sorted(set(range(len(places))) - killed)
            seen = [Path(f"{path}.seen.{number}") for number in left]
            with contextlib.suppress(AssertionError):  # what they saw says more
                helpers.wait_until(lambda: all(_says(file, left) for file in seen), LIMIT)
            Path(f"{path}.stop").touch()
            for number in left:
                world, rank = places[number]
                try:
                    (outcome,) = world.wait_for([rank], LIMIT)
                except AssertionError:
                    wrong.append(f"process {number} hung")
                    continue
                if outcome.error is not None:
                    wrong.append(f"process {number} raised: {outcome.trace[-600:]}")
                elif sorted(outcome.value["seen"][-1]) != left:
                    wrong.append(f"process {number} saw {outcome.value['seen']}, not {left}")
        finally:
            for world in worlds:
                world.__exit__()
    return wrong


def _says(file: Path, ranks: list[int]) -> bool:
    return file.exists() and file.read_text() == str(ranks)


def _nothing(*_: Any) -> None:
    """A world for its folder only."""


def main() -> None:
    """Runs as many worlds as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", action="store_true", help="processes on several nodes")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.worlds):
        began = time.monotonic()
        for what in run_world(seed, options.nodes):
            print(f"seed {seed}: {what}")
        print(f"seed {seed}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
