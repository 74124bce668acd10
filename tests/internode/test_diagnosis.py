"""What differs between ranks, and slow links between nodes."""

from __future__ import annotations

import io
import logging
import os
import sys

import helpers
import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import diagnosis


def member(**facts):
    usual = {"asks": True, "host": "somewhere", "torch": "2.13.0", "cores": 8, "threads": 4}
    return usual | facts


def test_the_ranks_that_differ_are_named():
    everyone = [member(), member(threads=1), member(host="b"), member(threads=2, torch="2.12.0")]
    found = diagnosis.differences(everyone)
    assert found == {
        "torch": {"2.13.0": [0, 1, 2], "2.12.0": [3]},
        "threads": {4: [0, 2], 1: [1], 2: [3]},
    }
    assert diagnosis.in_words("torch", found["torch"]) == (
        "ranks differ in torch, 2.13.0 on most, 2.12.0 on rank 3"
    )
    assert diagnosis.in_words("threads", found["threads"]).startswith(
        "ranks differ in threads, 4 on most, 1 on rank 1, 2 on rank 3: the rank with the fewest"
    )
    assert not diagnosis.differences([member()] * 3)


def test_of_many_ranks_the_first_are_named():
    everyone = [member(cores=2 if rank % 3 == 0 else 4) for rank in range(40)]
    told = diagnosis.in_words("cores", diagnosis.differences(everyone)["cores"])
    assert told == "ranks differ in cores, 4 on most, 2 on ranks 0, 3, 6, 9, 12, 15, 18, 21 ..."


def test_links_below_half_of_the_median_are_slow():
    rates = {(0, 1): 100e6, (1, 0): 110e6, (0, 2): 49e6, (2, 0): 51e6, (1, 2): 104e6, (2, 1): 9e6}
    assert list(diagnosis.slow_links(rates)) == [(2, 1)]  # the median is 75.5
    told = diagnosis.table([[0, 1], [2], [3]], [7] * 4, [member()] * 4, rates)
    assert "6 links between nodes: 9.0 to 110.0 MB/s, median 75.5" in told
    assert told.endswith("slow link: node 2 (rank 3) to node 1 (rank 2), 9.0 MB/s\n")


def test_all_differences_are_logged(caplog, world):
    (group,) = world(1)
    quiet = {"asks": False}
    diagnosis.look_around(group, [1, 2], [member(**quiet), member(**quiet, cores=4, threads=2)])
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "ranks differ in cores" in text]
    assert [text for text in told if "ranks differ in threads" in text]


def made(rank, size, store, nodes, slow):
    """Makes a group, of which rank 1 wants a diagnosis; returns what this rank prints and logs."""
    spanning.pretend(nodes[rank])
    torch.set_num_threads(2 if rank == 1 else 1)
    if rank == 1:
        os.environ["PYCOMM_DIAGNOSE"] = "1"
    if rank == slow:
        seconds_of = diagnosis._round

        def slow_round(group, firsts, shift, count):
            from_last = firsts[firsts.index(rank) - shift] == size - 1
            return seconds_of(group, firsts, shift, count) + (0.5 if from_last else 0.0)

        diagnosis._round = slow_round
    printed, logged = io.StringIO(), io.StringIO()
    logging.getLogger("pycomm").addHandler(logging.StreamHandler(logged))
    sys.stderr = printed
    torch.set_default_dtype(torch.float64)
    with helpers.member(rank, size, store) as group:
        assert pycomm.all_reduce(torch.ones(3), group=group).tolist() == [size] * 3
    return printed.getvalue(), logged.getvalue()


@pytest.mark.parametrize("nodes", ["aab", "abc", "aa"])
def test_a_rank_asks_for_the_table(nodes):
    size, links = len(nodes), len(set(nodes)) * (len(set(nodes)) - 1)
    slow = 0 if links else None
    results = helpers.run_ranks(size, made, nodes, slow)
    assert [printed for printed, _ in results[1:]] == [""] * (size - 1)
    table, logged = results[0]
    lines = table.splitlines()
    assert lines[0].startswith("pycomm:")
    assert lines[0].endswith(f": {size} ranks on {len(set(nodes))} nodes")
    assert lines[1].split()[:5] == ["rank", "node", "process", "host", "torch"]
    rows = [line.split() for line in lines[2 : 2 + size]]
    assert [int(row[0]) for row in rows] == list(range(size))
    assert ["abc"[int(row[1])] for row in rows] == list(nodes)
    assert [row[-1] for row in rows] == ["1", "2", "1"][:size]
    assert "ranks differ in threads" in table
    assert "ranks differ in threads" in logged
    if links:
        last = len(set(nodes)) - 1
        assert f"{links} links between nodes" in table
        if links > 2:  # with two, none is below half of their median
            assert f"slow link: node {last} (rank {size - 1}) to node 0 (rank 0)" in table
    else:
        assert "link" not in table


def asks_in_vain(rank, size, store):
    os.environ["PYCOMM_DIAGNOSE"] = "yes"
    helpers.join_world(rank, size, store)
    pycomm.init()


def test_only_0_and_1_are_values():
    with helpers.Ranks(1, asks_in_vain) as ranks:
        (outcome,) = ranks.join()
    assert str(outcome.error) == "PYCOMM_DIAGNOSE must be one of 0, 1, got 'yes'"
