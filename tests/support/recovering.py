"""Kills ranks at random moments of preserved operations; the survivors recover each operation.

``python tests/support/recovering.py --kills 1000`` prints what was seen. Rank r contributes 2^r, so
a sum tells who is in it. No rank ever goes back in its program.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import torch

import pycomm

LIMIT = 60.0  # seconds after which a world counts as stuck
COUNTS = (1, 100, 5000, 300_000)


class Survivor:
    """A rank that recovers its operations, in ever smaller groups."""

    def __init__(self, group: pycomm.Group) -> None:
        self.group = group
        self.recovered = 0

    def run(self, call: Callable[[pycomm.Group], Any]) -> Any:
        """The result of an operation."""
        while True:
            try:
                return call(self.group)
            except pycomm.CollectiveError as error:
                self.group = self.group.shrink()
                self.recovered += 1
                call = self.recovering(error)

    def wait(self, works: list[pycomm.Work], results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of works that were submitted to the same group."""
        begun_in = self.group
        for work, result in zip(works, results, strict=True):
            if self.group is begun_in:
                assert self.run(lambda _, w=work: w.wait()) in (None, result)
            else:
                assert self.run(self.recovering(work)) is result
        return results

    @staticmethod
    def recovering(failed: pycomm.CollectiveError | pycomm.Work) -> Callable[[pycomm.Group], Any]:
        return lambda group: pycomm.recover(failed, group=group)


def operate(survivor: Survivor, mine: float, rng: random.Random) -> list[torch.Tensor]:
    """Runs a random operation, the same on all ranks."""
    kind = rng.choice(["in place", "out", "window", "async", "broadcast"])
    count, algorithm = rng.choice(COUNTS), rng.choice(["auto", "one_shot", "two_shot", "ring"])
    x = torch.full((count,), mine)
    options = {"preserve": True, "algorithm": algorithm}
    if kind == "window":
        x = survivor.group.empty(count).fill_(mine)
    if kind == "out":
        y = torch.empty(count)
        survivor.run(lambda g: pycomm.all_reduce(x, out=y, group=g, **options))
        assert (x == mine).all()
        return [y]
    if kind == "async":
        tensors = [x.clone() for _ in range(3)]
        group = survivor.group
        works = [pycomm.all_reduce(y, group=group, async_op=True, **options) for y in tensors]
        return survivor.wait(works, tensors)
    if kind == "broadcast":
        source = rng.randrange(survivor.group.size)
        try:
            survivor.run(lambda g: pycomm.broadcast(x, source, group=g, preserve=True))
        except pycomm.NotRecoverable:
            return []
        return [x]
    survivor.run(lambda g: pycomm.all_reduce(x, group=g, **options))
    return [x]


def live(rank: int, size: int, store: str, seed: int) -> dict[str, Any]:
    """A rank's life: operations until all are told to stop. Logs all results."""
    helpers.join_world(rank, size, store)
    survivor = Survivor(pycomm.init(timeout=20, staging_bytes=1 << 20))
    Path(f"{store}.{rank}").touch()
    log: list[Any] = []
    while True:
        before = survivor.group.ranks
        # A rank may learn of a failure only in its next operation, so the group says nothing.
        rng = random.Random(f"{seed} {len(log)}")
        rng.randrange = lambda n, r=rng: int(r.random() * n)  # the same draws for every size
        results = operate(survivor, 2.0**rank, rng)
        for result in results:
            assert (result == result[0]).all(), result
        digest = hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest()
        values = sorted({int(r[0]) for r in results})
        log.append((digest, values, len(before), survivor.group.ranks))
        stop = torch.tensor([float(Path(f"{store}.stop").exists())])
        survivor.run(lambda g, s=stop: pycomm.all_reduce(s, "max", group=g, preserve=True))
        if stop:
            break
    survivor.group.close()
    return {"log": log, "recovered": survivor.recovered}


def run_world(seed: int) -> dict[str, Any]:
    """Kills some ranks of a world; returns what the survivors have seen."""
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    victims = rng.sample(range(size), rng.randint(1, size - 1))
    with helpers.Ranks(size, live, seed) as ranks:
        for rank in range(size):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        for victim in victims:
            time.sleep(rng.choice([0.0, rng.random() / 500, rng.random() / 20]))
            ranks.signal(victim, signal.SIGKILL)
        time.sleep(0.1 + 0.02 * size)
        Path(f"{ranks.store}.stop").touch()
        survivors = sorted(set(range(size)) - set(victims))
        outcomes = ranks.wait_for(survivors, LIMIT)
    return {
        "seed": seed,
        "size": size,
        "left": survivors,
        "survivors": [outcome.value or {"trace": outcome.trace} for outcome in outcomes],
    }


def complaints(world: dict[str, Any]) -> list[str]:
    """Every way in which a world breaks the promises."""
    found = [seen["trace"] for seen in world["survivors"] if "trace" in seen]
    if found:
        return found
    logs = [seen["log"] for seen in world["survivors"]]
    everyone = 2 ** world["size"] - 1
    survivors = sum(2**rank for rank in world["left"])
    for number, entries in enumerate(zip(*logs, strict=True)):
        if len({digest for digest, *_ in entries}) > 1:
            found.append(f"operation {number} gave different bits: {entries}")
        for value in entries[0][1]:
            contributed = value & survivors == survivors or value.bit_count() == 1
            if not contributed or value > everyone:
                found.append(f"operation {number} gave the sum {value:b}")
    return found


def main() -> None:
    """Kills as often as asked for, and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills, seed, seen, wrong = 0, options.seed, Counter(), []
    while kills < options.kills:
        world = run_world(seed)
        kills += world["size"] - len(world["left"])
        wrong += [f"seed {seed}: {what}" for what in complaints(world)]
        for survivor in world["survivors"]:
            seen["recoveries"] += survivor.get("recovered", 0)
            seen["operations"] += len(survivor.get("log", []))
        # Results in which a rank that was already lost takes part: its result was adopted.
        for _, values, _, ranks in world["survivors"][0].get("log", []):
            left = sum(2**rank for rank in ranks)
            seen["adopted"] += any(v & ~left for v in values if v.bit_count() > 1)
            seen["not recoverable"] += not values
        seed += 1
    summary = {"kills": kills, "worlds": seed - options.seed, **seen, "wrong": wrong}
    helpers.publish(summary, None)


if __name__ == "__main__":
    main()
