"""The backend is set up and destroyed several times in one process, with groups of every kind."""

import gc
import threading
import time
from datetime import timedelta

import helpers
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from usage import descriptors, mappings, threads

import pycomm
from pycomm.group import make_group

DIAGONALS = ([0, 3], [1, 2])


def left_over():
    """Mappings of windows, descriptors and threads."""
    gc.collect()
    return mappings(), descriptors(), threads()


def use_mesh(rank):
    """Collectives and messages along both dimensions and both diagonals; returns all groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    diagonals = [dist.new_group(ranks) for ranks in DIAGONALS]
    groups = [mesh.get_group("row"), mesh.get_group("column"), diagonals[rank in DIAGONALS[1]]]
    tensors = [torch.full((1000 + i,), float(rank)) for i in range(3)]
    works = [
        dist.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, groups, strict=True)
    ]
    for work in works:
        work.wait()
    for x, group in zip(tensors, groups, strict=True):
        assert x.eq(sum(dist.get_process_group_ranks(group))).all()
        other = 1 - dist.get_rank(group)
        for count in (10, 50_000):
            got = torch.empty(count)
            sent = dist.isend(torch.full((count,), float(rank)), group=group, group_dst=other)
            dist.recv(got, group=group, group_src=other)
            sent.wait()
            assert got.eq(dist.get_global_rank(group, other)).all()
    return groups


def live_again(rank, size, path):
    counts = []
    for life in range(3):
        store = dist.PrefixStore(f"life {life}", dist.FileStore(path, size))
        dist.init_process_group(
            "pycomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        held = use_mesh(rank)
        held.append(dist.new_group(range(size)))  # not used while the default group is there
        dist.barrier()
        dist.destroy_process_group()
        for group in held:
            with pytest.raises(pycomm.GroupUnusable):
                group.allreduce([torch.ones(3)]).wait()
        del held, group
        counts.append(left_over())
    return counts


def test_three_lives_with_a_mesh():
    for first, second, third in helpers.run_ranks(4, live_again):
        assert first[0] == 0
        assert first == second == third


def live_alone(_rank, _size, _path):
    counts = []
    for _ in range(3):
        dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
        for group in (dist.group.WORLD, dist.new_group([0])):
            x = torch.arange(5.0)
            sent = dist.isend(x, 0, group=group)
            got = torch.zeros(5)
            dist.recv(got, 0, group=group)
            sent.wait()
            dist.all_reduce(got, group=group)
            assert got.tolist() == x.tolist()
        dist.destroy_process_group()
        del group, sent
        counts.append(left_over())
    return counts


def test_three_lives_on_a_hash_store():
    ((first, second, third),) = helpers.run_ranks(1, live_alone)
    assert first[0] == 0
    assert first == second == third


def test_ranks_as_threads_on_a_hash_store():
    """They watch each other while rank 0 is late, and two of them use a group in the window."""
    store, found = dist.HashStore(), {}

    def run(rank):
        ranks = pycomm.backend._Ranks(store, rank, 3, 20, "0")
        ranks.meet()
        world = pycomm.backend._World(ranks._members)
        x = torch.full((1000,), float(rank))
        time.sleep(0.05 if rank == 0 else 0)
        pycomm.all_reduce(x, group=ranks.connect())
        if rank > 0:
            part = world.subgroup([1, 2], rank - 1, "part")
            with make_group(part.join(), rank - 1, 20) as group:
                pycomm.all_reduce(x, group=group)
        found[rank] = x[-1].item()
        ranks.close()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert found == {0: 3.0, 1: 6.0, 2: 6.0}
