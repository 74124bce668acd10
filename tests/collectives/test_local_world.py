"""LocalWorld: ranks as threads, and their exceptions."""

import threading
import time

import pytest
import torch

import pycomm


def test_results_come_in_rank_order(world):
    local_world = world(5)
    assert len(local_world) == 5
    assert [group.rank for group in local_world] == [0, 1, 2, 3, 4]
    assert {group.size for group in local_world} == {5}
    assert local_world.run(lambda group, factor: group.rank * factor, 10) == [0, 10, 20, 30, 40]


def test_every_rank_has_a_thread_of_its_own(world):
    local_world = world(4)
    meeting = threading.Barrier(4, timeout=30)

    def body(group):
        meeting.wait()
        assert threading.current_thread() is not threading.main_thread()
        return threading.get_ident(), group.name

    threads, names = zip(*local_world.run(body), strict=True)
    assert len(set(threads)) == len(set(names)) == 4


def gradient_of_a_convolution(_=None):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(36, 16, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    batch = torch.randn(2, 16, 4, 4, generator=generator)
    weight.requires_grad_()
    torch.nn.functional.conv2d(batch, weight).mean((2, 3)).square().mean().backward()
    return weight.grad


def test_ranks_compute_with_as_many_threads_as_the_process(world):
    """OpenMP begins with its own number in a new thread, and convolutions round otherwise."""
    wanted = gradient_of_a_convolution()
    assert all(map(wanted.equal, world(2).run(gradient_of_a_convolution)))


class OwnError(Exception):
    pass


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_releases_the_others(world, culprit):
    seen = {}

    def body(group):
        if group.rank == culprit:
            raise OwnError("of one rank")
        try:
            pycomm.all_reduce(torch.ones(4), group=group)
        except pycomm.PycommError as error:
            seen[group.rank] = error
            raise

    local_world = world(3)
    local_world.run(lambda group: pycomm.all_reduce(torch.ones(4), group=group))
    with pytest.raises(OwnError, match="of one rank"):
        local_world.run(body)
    assert sorted(seen) == [rank for rank in range(3) if rank != culprit]
    for error in seen.values():
        assert type(error) is pycomm.PeerDied
        assert error.rank == culprit


def returning_early(group, culprit, seen):
    """After two operations; the others call a third one."""
    for _ in range(2):
        pycomm.barrier(group=group)
    if group.rank == culprit:
        return pycomm.all_reduce(torch.ones(4), group=group, async_op=True)
    work = pycomm.all_reduce(torch.ones(4), group=group, async_op=True)
    with pytest.raises(pycomm.PeerDied, match="has returned from its function") as caught:
        pycomm.all_reduce(torch.ones(4), group=group)
    seen[group.rank] = caught.value
    return work


@pytest.mark.parametrize("nodes", [[3], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_returns_early_releases_the_others(world, culprit, nodes):
    """It releases them at once; its pending work still completes for all ranks."""
    seen = {}
    for work in world(3, nodes=nodes).run(returning_early, culprit, seen):
        work.wait()
    assert sorted(seen) == [rank for rank in range(3) if rank != culprit]
    for error in seen.values():
        assert (error.rank, error.sequence) == (culprit, 4)
        assert error.completed >= 2  # of several nodes one less is known


def test_a_rank_that_returns_first_disturbs_nobody(world):
    """Operations for which it has done its part succeed, and so do its later operations."""

    def body(group, turn):
        x = pycomm.all_reduce(torch.ones(100_000), algorithm="ring", group=group)
        if group.rank != turn % 3:
            time.sleep(0.05)
        return x[0].item()

    local_world = world(3)
    for turn in range(6):
        assert local_world.run(body, turn) == [3.0] * 3


def test_runs_more_than_once(world):
    local_world = world(3)
    for turn in range(20):
        x = local_world.run(
            lambda g, t: pycomm.all_reduce(torch.tensor([g.rank + t]), group=g), turn
        )
        assert [t.item() for t in x] == [3 + 3 * turn] * 3


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        pycomm.LocalWorld(size)


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match=f"timeout must be positive, got {timeout}"):
        pycomm.LocalWorld(2, timeout)


@pytest.mark.parametrize("staging_bytes", [-1, 0, 8 * 64 * 4 - 1])
def test_staging_must_hold_a_line_per_rank(staging_bytes):
    with pytest.raises(ValueError, match="staging_bytes must be at least 2048"):
        pycomm.LocalWorld(4, staging_bytes=staging_bytes)


def test_the_least_staging_works(world):
    for size in (2, 3, 9):
        local_world = world(size, staging_bytes=8 * 64 * size)
        for algorithm in ("one_shot", "two_shot", "ring", "tree"):

            def body(group, algorithm=algorithm):
                x = torch.arange(3001) + group.rank
                return pycomm.all_reduce(x, algorithm=algorithm, group=group)

            expected = size * torch.arange(3001) + size * (size - 1) // 2
            assert all(torch.equal(x, expected) for x in local_world.run(body))


def test_a_huge_staging_is_refused_for_lack_of_memory():
    with pytest.raises(MemoryError, match="shared window needs 2251799813"):
        pycomm.LocalWorld(2, staging_bytes=1 << 50)


def test_many_more_ranks_than_cores(world):
    results = world(24).run(lambda g: pycomm.all_reduce(torch.tensor([g.rank]), group=g).item())
    assert results == [24 * 23 // 2] * 24
