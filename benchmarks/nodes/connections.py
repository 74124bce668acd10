"""Measures large messages between two emulated nodes over 1, 2 and 4 connections; needs root.

``python -m benchmarks.nodes.connections JSON`` sends tiles both ways at once, as a two-shot does,
and deals them to connections in turn. Gloo has a connection and a thread for each of its devices.
CPU time is that of both nodes, kernel included, for each byte that a node sends.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.nodes.cli import PORT, shared_folder
from benchmarks.nodes.namespaces import INTERFACE, Nodes, address, missing
from benchmarks.nodes.ranks import wait_for, write
from pycomm._runtime.internode import connect_lazily
from pycomm.bench.report import MIB, circumstances, write_json

CONNECTIONS = (1, 2, 4)
RATES = ("1gbit", "10gbit", "100gbit")  # the last one is no limit here
BYTES = 256 * MIB
TILE = MIB
ROUNDS = 7


def cpu_seconds() -> float:
    """The time of cores that this process has taken, in all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def exchange(gloo: Any, connections: int, other: int, tiles: list[Any]) -> None:
    """Sends all tiles and receives as many; a tag chooses the connection."""
    works = []
    for number, (sent, received) in enumerate(tiles):
        tag = number * connections + number % connections
        works += [gloo.recv([received], other, tag), gloo.send([sent], other, tag)]
    for work in works:
        work.wait()


def measure(folder: Path, rank: int) -> None:
    """One node's part: every number of connections in turn, in each round."""
    store = TCPStore(address(0), PORT, 2, is_master=rank == 0)
    groups = {}
    for count in CONNECTIONS:
        os.environ["GLOO_SOCKET_IFNAME"] = ",".join([INTERFACE] * count)
        prefixed = PrefixStore(f"{count}", store)
        groups[count] = connect_lazily(prefixed, rank, 2, 60.0)
    data = torch.ones(2, BYTES // TILE, TILE, dtype=torch.uint8)
    tiles = list(zip(*data, strict=True))
    taken: dict[int, list[list[float]]] = {count: [] for count in CONNECTIONS}
    for number in range(ROUNDS + 1):  # the first one warms up
        for count, gloo in groups.items():
            store.add(f"ready/{number}/{count}", 1)
            while store.add(f"ready/{number}/{count}", 0) < 2:
                time.sleep(0.001)
            began, before = time.perf_counter(), cpu_seconds()
            exchange(gloo, count, 1 - rank, tiles)
            if number > 0:
                taken[count].append([time.perf_counter() - began, cpu_seconds() - before])
    write(folder / f"taken-{rank}", taken)
    store.add("ended", 1)
    while store.add("ended", 0) < 2:  # rank 0 has the store
        time.sleep(0.001)
    os._exit(0)  # the other one's connections may have ended first


def rows_at(rate: str) -> list[dict[str, Any]]:
    """The rows of one rate of the link."""
    with shared_folder() as name, Nodes(2, "1gbit") as nodes:
        nodes.set_rate(rate)
        folder = Path(name)
        module = [sys.executable, "-m", "benchmarks.nodes.connections", name]
        for node in range(2):
            nodes.start(node, [*module, str(node)], dict(os.environ))
        taken = [wait_for(folder / f"taken-{node}") for node in range(2)]
    rows = []
    for count in map(str, CONNECTIONS):
        rounds = list(zip(taken[0][count], taken[1][count], strict=True))
        seconds = [max(one[0], other[0]) for one, other in rounds]
        cores = statistics.median(one[1] + other[1] for one, other in rounds)
        rows.append(
            {
                "rate": rate,
                "connections": int(count),
                "gbit_each_way": round(8e-9 * BYTES / statistics.median(seconds), 3),
                "least_gbit": round(8e-9 * BYTES / max(seconds), 3),
                "most_gbit": round(8e-9 * BYTES / min(seconds), 3),
                "cpu_ns_per_byte": round(1e9 * cores / BYTES, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Writes the file; or measures on a node, for it."""
    if len(sys.argv) == 3:
        measure(Path(sys.argv[1]), int(sys.argv[2]))
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    meta = circumstances("python -m benchmarks.nodes.connections FILE")
    meta |= {"bytes": BYTES, "tile": TILE, "rounds": ROUNDS}
    rows = [row for rate in RATES for row in rows_at(rate)]
    meta["load_after"] = os.getloadavg()[0]
    write_json(sys.argv[1], meta, rows)


if __name__ == "__main__":
    main()
