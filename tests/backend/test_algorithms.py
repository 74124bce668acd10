"""The algorithm in the options of a group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import golden
import golden_nodes
import helpers
import pytest
import spanning
import torch
import torch.distributed as dist

import pycomm
import pycomm.backend

COUNT = 50_003


def inputs(size: int) -> list[torch.Tensor]:
    return [torch.randn(COUNT, generator=torch.Generator().manual_seed(r)) for r in range(size)]


def member(rank, size, store, nodes, function, algorithms):
    """For :class:`helpers.Ranks`: `function` in a default group with this rank's algorithm."""
    spanning.pretend(nodes[rank])
    dist.init_process_group(
        "pycomm",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
        pg_options=pycomm.backend.options(algorithm=algorithms[rank]),
    )
    result = function(rank, size)
    dist.destroy_process_group()
    return result


def summed(rank, size):
    """Sums of the default group, in several ways, and of groups that are made from it."""
    mine = inputs(size)[rank]
    results = [mine.clone() for _ in range(4)]
    dist.all_reduce(results[0])
    dist.all_reduce(results[1], async_op=True).wait()
    dist.all_reduce_coalesced([results[2]])
    part = dist.group.WORLD.split_group(list(range(size)))
    part.allreduce([results[3]]).wait()
    others = []
    for options in (None, pycomm.backend.options(algorithm="tree")):
        group = dist.new_group(backend="pycomm", pg_options=options)
        dist.all_reduce(others.append(mine.clone()) or others[-1], group=group)
    return results, others


@pytest.mark.parametrize("nodes", ["aabc", "aaaa"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
def test_sums_have_the_bits_of_the_algorithm(nodes, algorithm):
    def wanted(name):
        if nodes == "aabc":
            return golden_nodes.all_reduced(given, "sum", [2, 1, 1], name)
        return golden.all_reduced(
            name, given, "sum", staging_bytes=pycomm.group.DEFAULT_STAGING_BYTES, zero_copy=False
        )

    given = inputs(4)
    names = {"auto": "two_shot"}
    for results, others in helpers.run_ranks(4, member, nodes, summed, [algorithm] * 4):
        named = wanted(names.get(algorithm, algorithm))
        assert all(golden.same_bits(result, named) for result in results)
        assert golden.same_bits(others[0], wanted("two_shot"))
        assert golden.same_bits(others[1], wanted("tree"))


def disagreeing(rank, _size):
    with pytest.raises(pycomm.Mismatch, match=r"algorithm=|called another operation"):
        dist.all_reduce(torch.ones(COUNT))
    return rank


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_ranks_with_different_algorithms(nodes):
    assert helpers.run_ranks(2, member, nodes, disagreeing, ["ring", "tree"]) == [0, 1]


@pytest.mark.parametrize("name", ["one_shot", "rings", "", None])
def test_what_is_refused(name):
    with pytest.raises(
        ValueError, match=f"algorithm must be one of auto, two_shot, ring, tree, got {name!r}"
    ):
        pycomm.backend.options(algorithm=name)
