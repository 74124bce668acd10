"""Kills ranks at random moments; the survivors shrink their group and go on, with checked results.

``python tests/support/shrinking.py --kills 1000 --json FILE`` writes what was seen. A world has 2
to 8 ranks, which run random operations and check the results. With ``--nodes``, they take
themselves for ranks of 2 to 4 nodes. Some kills follow the one before at once, so that they fall
into the recovery from it.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import helpers
import spanning
import torch

import pycomm
from pycomm.bench.report import circumstances

LIMIT = 60.0  # seconds after which a world counts as stuck
COUNTS = (1, 16, 1000, 5000, 100_000, 1_000_000)


def operate(group: pycomm.Group, number: int, rng: random.Random) -> None:
    """Runs a random operation, the same on all ranks, and checks its result."""
    count = rng.choice(COUNTS)
    kinds = ["all_reduce", "window", "async", "int8", "topk", "broadcast", "gather"]
    kind = rng.choice(kinds if len(group.nodes) > 1 else [*kinds, "p2p"])
    mine, total = float(number + 1), float(sum(group.ranks) + group.size)
    x = torch.full((count,), mine)
    wanted = torch.full((count,), total)
    if kind == "all_reduce":
        algorithms = ["auto", "two_shot"]
        if len(group.nodes) == 1:
            algorithms += ["one_shot", "ring", "tree"]
        algorithm = rng.choice(algorithms)
        pycomm.all_reduce(x, algorithm=algorithm, group=group)
    elif kind == "window":
        x = group.empty(count).fill_(mine)
        pycomm.all_reduce(x, group=group)
    elif kind == "async":
        others = [torch.full((count,), mine) for _ in range(3)]
        works = [pycomm.all_reduce(y, group=group, async_op=True) for y in others]
        for work in works:
            work.wait()
        x = others[-1]
    elif kind == "int8":
        pycomm.compressed_all_reduce(x, pycomm.Int8(), op="sum", group=group)
    elif kind == "topk":
        x, wanted = torch.zeros(count + 1000), torch.zeros(count + 1000)
        x[count], wanted[count] = mine, total
        pycomm.compressed_all_reduce(x, pycomm.TopK(density=0.01), op="sum", group=group)
    elif kind == "broadcast":
        source = rng.randrange(group.size)
        pycomm.broadcast(x, source, group=group)
        wanted.fill_(group.ranks[source] + 1)
    elif kind == "gather":
        gathered = torch.empty(group.size * count)
        x = pycomm.all_gather(gathered, x, group=group)
        wanted = torch.tensor(group.ranks).float().add_(1).repeat_interleave(count)
    elif group.size > 1:
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        request = pycomm.isend(x, to, group=group)
        x = torch.empty(count)
        pycomm.recv(x, source, group=group)
        request.wait()
        wanted.fill_(group.ranks[source] + 1)
    else:
        return
    tolerance = 0.02 * total if kind == "int8" else 0.0
    assert torch.allclose(x, wanted, rtol=0, atol=tolerance), f"{kind}: {x[0]} for {wanted[0]}"


def live(rank: int, size: int, store: str, seed: int, nodes: str) -> dict[str, Any]:
    """A rank's life: operations until told to stop, in ever smaller groups."""
    if nodes:
        spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=20, staging_bytes=1 << 20)
    Path(f"{store}.{rank}").touch()
    seen: dict[str, Any] = {"failures": [], "operations": 0}
    iteration, stop = 0, torch.zeros(1)
    while True:
        rng = random.Random(f"{seed} {group.ranks} {iteration}")
        try:
            stop.fill_(Path(f"{store}.stop").exists())
            pycomm.broadcast(stop, 0, group=group)
            if stop and iteration > 0:  # every group has operated
                break
            operate(group, rank, rng)
            if seen["failures"] and "continued" not in seen["failures"][-1]:
                seen["failures"][-1]["continued"] = time.monotonic()
            seen["operations"] += 1
            iteration += 1
        except pycomm.CollectiveError as error:
            failure = {
                "error": type(error).__name__,
                "culprit": group.ranks[error.rank],
                "raised": time.monotonic(),
                "operation": error.operation,
            }
            group = group.shrink()
            seen["failures"].append(failure | {"shrunk": time.monotonic(), "ranks": group.ranks})
            iteration = 0
    seen["ranks"] = group.ranks
    group.close()
    return seen


def run_world(seed: int, spans: bool = False) -> dict[str, Any]:
    """Kills all but one or a few ranks of a world; returns what the survivors have seen."""
    rng = random.Random(seed)
    size = rng.randint(2, 8)
    nodes = ""
    while spans and len(set(nodes)) < 2:
        nodes = "".join(rng.choice("abcd") for _ in range(size))
    victims = rng.sample(range(size), rng.randint(1, size - 1))
    killed = {}
    hung = False
    with helpers.Ranks(size, live, seed, nodes) as ranks:
        for rank in range(size):
            helpers.wait_until(Path(f"{ranks.store}.{rank}").exists)
        for victim in victims:
            time.sleep(rng.choice([0.0, rng.random() / 500, rng.random() / 20]))
            killed[victim] = ranks.signal(victim, signal.SIGKILL)
        time.sleep(1.0 if spans else 0.3 + 0.02 * size)
        Path(f"{ranks.store}.stop").touch()
        survivors = sorted(set(range(size)) - set(victims))
        try:
            outcomes = ranks.wait_for(survivors, LIMIT)
        except AssertionError:
            hung, outcomes = True, []
    return {
        "seed": seed,
        "size": size,
        "nodes": nodes,
        "killed": killed,
        "hung": hung,
        "survivors": [
            outcome.value or {"error": repr(outcome.error), "trace": outcome.trace}
            for outcome in outcomes
        ],
    }


def complaints(world: dict[str, Any]) -> list[str]:
    """Every way in which a world breaks the promises."""
    found = ["a rank hung"] if world["hung"] else []
    left = tuple(sorted(set(range(world["size"])) - set(world["killed"])))
    for seen in world["survivors"]:
        if "error" in seen:
            found.append(f"a survivor raised {seen['error']}: {seen['trace']}")
            continue
        if tuple(seen["ranks"]) != left:
            found.append(f"the group that is left is {seen['ranks']}, not {left}")
        for failure in seen["failures"]:
            if failure["error"] not in ("PeerDied", "Aborted"):
                found.append(f"raised {failure['error']}")
            died = failure["error"] == "PeerDied"
            if died and failure["culprit"] not in world["killed"]:
                found.append(f"rank {failure['culprit']} was blamed, and lives")
    return found


def recovery_times(world: dict[str, Any]) -> list[float]:
    """Milliseconds from the last kill to each survivor's next result."""
    last = max(world["killed"].values())
    seen = [survivor["failures"][-1] for survivor in world["survivors"] if survivor.get("failures")]
    return [1e3 * (failure["continued"] - last) for failure in seen]


def main() -> None:
    """Kills as often as asked for, and prints or writes a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", action="store_true", help="ranks on several nodes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kills, seed, begin = 0, options.seed, time.monotonic()
    wrong, recoveries, shrinks, failures, operations = [], [], [], Counter(), 0
    while kills < options.kills:
        world = run_world(seed, options.nodes)
        kills += len(world["killed"])
        seed += 1
        wrong += [f"seed {world['seed']}: {what}" for what in complaints(world)]
        for seen in world["survivors"]:
            operations += seen.get("operations", 0)
            for failure in seen.get("failures", []):
                failures[failure["operation"]] += 1
                shrinks.append(1e3 * (failure["shrunk"] - failure["raised"]))
        recoveries += recovery_times(world)
    command = f"python tests/support/shrinking.py --kills {options.kills}"
    summary = {
        "meta": circumstances(f"{command} --nodes" if options.nodes else command),
        "kills": kills,
        "worlds": seed - options.seed,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "operations": operations,
        "failed_operations": dict(failures),
        "shrink_ms": {"median": statistics.median(shrinks), "max": max(shrinks)},
        "kill_to_next_result_ms": {"median": statistics.median(recoveries), "max": max(recoveries)},
        "over_a_second": sum(time > 1000 for time in recoveries),
        "complaints": wrong,
    }
    helpers.publish(summary, options.json)


if __name__ == "__main__":
    main()
