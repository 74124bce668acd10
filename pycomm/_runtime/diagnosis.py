"""What slows a group down although it works: ranks that differ, and slow links between nodes.

``pycomm.init`` compares the ranks' surroundings and logs what differs. With ``PYCOMM_DIAGNOSE=1``
on any rank, it also measures the links between nodes, and rank 0 prints a table to stderr.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pycomm import _C
from pycomm._inputs import operation_of
from pycomm._runtime import host, log

if TYPE_CHECKING:
    from pycomm._runtime.lifetime import Member

    Link: TypeAlias = tuple[int, int]  # the numbers of two nodes: from, to

_PROBE_BYTES = 1 << 18
_MOST_BYTES = 1 << 24
_MOST_ROUNDS = 15  # each node sends to so many others
_SECONDS = 0.2  # for all rounds, as far as _PROBE_BYTES allow
_SLOW = 0.5  # of the median rate
_LABEL = "diagnosis"
_TAG = -(1 << 31)  # of the library's messages (pycomm/p2p.py)
_OWN = {"asks", "host"}  # facts that may differ
_COSTS = {
    "threads": "the rank with the fewest computes longest (OMP_NUM_THREADS)",
    "vectors": "results of torch's own operations may differ between these ranks",
}


def differences(surroundings: Sequence[Mapping[str, Any]]) -> dict[str, dict[Any, list[int]]]:
    """The facts in which ranks differ: for each value the ranks that have it."""
    found = {}
    for fact in surroundings[0].keys() - _OWN:
        ranks = defaultdict(list)
        for rank, mine in enumerate(surroundings):
            ranks[mine[fact]].append(rank)
        if len(ranks) > 1:
            found[fact] = dict(ranks)
    return {fact: found[fact] for fact in surroundings[0] if fact in found}


def in_words(fact: str, ranks: Mapping[Any, Sequence[int]]) -> str:
    """A sentence about a fact in which ranks differ."""
    most = max(ranks, key=lambda value: len(ranks[value]))
    others = [value for value in ranks if value != most]
    told = ", ".join(f"{value} on {_listed(ranks[value])}" for value in others)
    cost = f": {_COSTS[fact]}" if fact in _COSTS else ""
    return f"ranks differ in {fact}, {most} on most, {told}{cost}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' ...' if len(ranks) > 8 else ''}"


def look_around(
    group: Member, pids: Sequence[int], surroundings: Sequence[Mapping[str, Any]]
) -> None:
    """Logs on rank 0 in what the ranks differ.

    If a rank asks for it, also measures the links between nodes, and prints a table on rank 0; then
    it is a collective call.
    """
    if group.rank == 0:
        for fact, ranks in differences(surroundings).items():
            log.fallback(group, in_words(fact, ranks).replace("%", "%%"))  # each text once
    if any(mine["asks"] for mine in surroundings):
        rates = measure_links(group) if len(group.nodes) > 1 else {}
        if group.rank == 0:
            sys.stderr.write(f"{group.name}: {table(group.nodes, pids, surroundings, rates)}")


def measure_links(group: Member) -> dict[Link, float]:
    """The rates at which nodes receive from each other, in bytes per second; a collective call.

    In each round, the first rank of each node sends to another node while it receives from a third
    one, so both directions of a link are in use. All ranks know all rates in the end.
    """
    firsts = [ranks[0] for ranks in group.nodes]
    shifts = range(1, min(len(firsts) - 1, _MOST_ROUNDS) + 1)
    _round(group, firsts, 1, 1)  # opens connections
    seconds = host.tensor([_round(group, firsts, 1, _PROBE_BYTES)], dtype=torch.float64)
    slowest = float(_all_gather(group, seconds).max())
    count = int(_PROBE_BYTES * _SECONDS / len(shifts) / max(slowest, 1e-6))
    count = min(max(count, _PROBE_BYTES), _MOST_BYTES)
    mine = host.zeros(len(firsts), dtype=torch.float64)
    for shift in shifts:
        _round(group, firsts, shift, 1)
        taken = _round(group, firsts, shift, count)
        if group.rank in firsts:
            mine[firsts.index(group.rank) - shift] = count / taken
    rows = _all_gather(group, mine)
    return {
        (source, node): float(rows[first, source])
        for node, first in enumerate(firsts)
        for source in range(len(firsts))
        if rows[first, source] > 0
    }


def _round(group: Member, firsts: Sequence[int], shift: int, count: int) -> float:
    """Sends to the node `shift` further on; returns the seconds until `count` bytes have come."""
    group._core.run(operation_of("barrier", "one_shot", torch.uint8), 0, 0, 0, None, _LABEL)
    if group.rank not in firsts:
        return 0.0
    node = firsts.index(group.rank)
    to, source = firsts[(node + shift) % len(firsts)], firsts[node - shift]
    byte = _C.element_numbers["uint8"]
    sent, arriving = (host.empty(count, dtype=torch.uint8) for _ in range(2))
    began = time.perf_counter()
    request = group._core.isend(sent.data_ptr(), count, byte, to, _TAG)
    group._core.recv(arriving.data_ptr(), count, byte, source, _TAG)
    taken = time.perf_counter() - began
    request.wait()
    return taken


def _all_gather(group: Member, mine: torch.Tensor) -> torch.Tensor:
    """A row of numbers from each rank."""
    rows = host.empty(group.size, *mine.shape, dtype=torch.float64)
    operation = operation_of("all_gather", "auto", torch.float64)
    group._core.run(operation, len(mine), mine.data_ptr(), rows.data_ptr(), None, _LABEL)
    return rows


def slow_links(rates: Mapping[Link, float]) -> dict[Link, float]:
    """Links far below the median rate, the slowest first."""
    median = statistics.median(rates.values()) if rates else 0.0
    slow = {link: rate for link, rate in rates.items() if rate < _SLOW * median}
    return dict(sorted(slow.items(), key=lambda item: item[1]))


def table(
    nodes: Sequence[Sequence[int]],
    pids: Sequence[int],
    surroundings: Sequence[Mapping[str, Any]],
    rates: Mapping[Link, float],
) -> str:
    """A row per rank, what differs, and the links."""
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    facts = [fact for fact in surroundings[0] if fact != "asks"]
    rows = [["rank", "node", "process", *facts]]
    for rank, (pid, mine) in enumerate(zip(pids, surroundings, strict=True)):
        rows.append(list(map(str, (rank, node_of[rank], pid, *map(mine.get, facts)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [in_words(*found) for found in differences(surroundings).items()]
    lines += _links_in_words(nodes, rates) if rates else []
    return "\n".join([f"{len(pids)} ranks on {len(nodes)} nodes", *lines, ""])


def _links_in_words(nodes: Sequence[Sequence[int]], rates: Mapping[Link, float]) -> Iterator[str]:
    low, median, high = min(rates.values()), statistics.median(rates.values()), max(rates.values())
    yield (
        f"{len(rates)} links between nodes: {low / 1e6:,.1f} to {high / 1e6:,.1f} MB/s, "
        f"median {median / 1e6:,.1f}"
    )
    for (source, node), rate in slow_links(rates).items():
        yield (
            f"slow link: node {source} (rank {nodes[source][0]}) to node {node} "
            f"(rank {nodes[node][0]}), {rate / 1e6:,.1f} MB/s"
        )
