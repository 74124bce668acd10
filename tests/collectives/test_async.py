"""async_op=True: in the order of the calls, with tensors that stay alive, mixed with the rest."""

import gc
import time
import weakref

import golden
import pytest
import sweep
import torch

import pycomm


@pytest.mark.parametrize("size", [1, 2, 4])
def test_order_is_kept(world, size):
    """Each operation reads the result of the one before."""

    def body(group):
        x = torch.full((257,), 1.0)
        works = []
        for turn in range(60):
            algorithm = sweep.ALGORITHMS[turn % 4]
            op = ("sum", "avg", "max")[turn % 3]
            works.append(pycomm.all_reduce(x, op, algorithm=algorithm, group=group, async_op=True))
            if turn % 7 == 0:  # a synchronous one in between
                pycomm.all_reduce(x, "avg", group=group)
        assert all(isinstance(work, pycomm.Work) for work in works)
        for work in reversed(works):
            work.wait()
        return x[0].item()

    assert world(size).run(body) == [float(size) ** 20] * size


def test_returns_before_the_others_come(world):
    local_world = world(2)
    x, y = torch.ones(3), torch.ones(3)
    work = pycomm.all_reduce(x, group=local_world.groups[0], async_op=True)
    time.sleep(0.05)
    assert not work.is_completed()
    pycomm.all_reduce(y, group=local_world.groups[1])
    work.wait()
    assert work.is_completed()
    work.wait()  # once more is fine
    assert x.tolist() == y.tolist() == [2, 2, 2]


def test_every_collective(world):
    size = 3

    def body(group):
        rank, device = group.rank, {"group": group, "async_op": True}
        a = torch.full((4,), float(rank))
        b, c = torch.empty(4), torch.full((12,), float(rank))
        d, e = torch.empty(12), torch.full((4,), float(rank))
        f = torch.full((5,), float(rank))
        works = [
            pycomm.all_reduce(a, "max", **device),
            pycomm.reduce_scatter(b, c, **device),
            pycomm.all_gather(d, e, **device),
            pycomm.broadcast(f, 2, **device),
            pycomm.barrier(**device),
        ]
        for work in works:
            work.wait()
        return [t.tolist() for t in (a, b, d, f)]

    gathered = [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert world(size).run(body) == [[[2.0] * 4, [3.0] * 4, gathered, [2.0] * 5]] * size


def test_out_and_strides(world):
    """Results that need a copy at the end are there after wait()."""

    def body(group):
        source = torch.arange(24.0).view(4, 6).t()[1:5]
        x = source + group.rank  # keeps the strides
        out = torch.zeros(4, 8)[:, ::2]
        strided = torch.zeros(6, 4).t()[:, 1:5].copy_(x)
        first = pycomm.all_reduce(x, out=out, group=group, async_op=True)
        second = pycomm.all_reduce(strided, group=group, async_op=True)
        second.wait()
        first.wait()
        expected = 2 * source + 1
        assert torch.equal(out, expected)
        assert torch.equal(strided, expected)
        assert torch.equal(x, source + group.rank)

    world(2).run(body)


def junk():
    """Tensors of NaN that reuse freed memory, so that reads of it are detected."""
    return [torch.full((size,), float("nan")) for size in (10_000, 10_000, 50_000, 10_001)]


def test_tensors_live_until_the_work_is_done(world):
    """Only the works refer to the inputs, and the peer is late."""
    local_world = world(2)
    late, early = local_world.groups
    outs, works = [], []
    for turn in range(20):
        outs.append(torch.empty(10_000))
        x = torch.full((10_000,), float(turn))
        works.append(pycomm.all_reduce(x, out=outs[-1], group=early, async_op=True))
        del x
    gc.collect()
    kept = junk()
    for _ in range(20):
        pycomm.all_reduce(torch.ones(10_000), group=late)
    for turn, (out, work) in enumerate(zip(outs, works, strict=True)):
        work.wait()
        assert torch.equal(out, torch.full((10_000,), turn + 1.0))
    del kept


def test_dropped_works_still_happen(world):
    """The program keeps neither the work nor the tensors while the peers are late."""
    local_world = world(2)
    late, early = local_world.groups
    x = torch.ones(10_000)
    gone = []
    for _ in range(10):
        temporary = torch.full((10_000,), 3.0)
        gone.append(weakref.ref(temporary))
        pycomm.all_reduce(temporary, group=early, async_op=True)
        del temporary
        pycomm.all_reduce(x, group=early, async_op=True)
    gc.collect()
    kept = junk()
    for turn in range(10):
        got = pycomm.all_reduce(torch.full((10_000,), 4.0), group=late)
        assert torch.equal(got, torch.full((10_000,), 7.0)), turn
        pycomm.all_reduce(torch.zeros(10_000), group=late)
    pycomm.all_reduce(torch.ones(1), group=early, async_op=True)
    pycomm.all_reduce(torch.ones(1), group=late)
    pycomm.barrier(group=late, async_op=True)
    pycomm.barrier(group=early)
    assert torch.equal(x, torch.ones(10_000))
    del kept
    # Tensors that were kept alive are freed at the latest when another work is dropped.
    pycomm.barrier(group=early, async_op=True)
    pycomm.barrier(group=late)
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []


def test_many_in_flight(world):
    count = 3000

    def body(group):
        xs = [torch.full((3,), float(i)) for i in range(count)]
        works = [pycomm.all_reduce(x, group=group, async_op=True) for x in xs]
        for work in works:
            work.wait()
        return [x[2].item() for x in xs]

    assert world(3).run(body) == [[3.0 * i for i in range(count)]] * 3


def test_one_rank_asynchronous_the_other_not(world):
    def body(group):
        results = []
        for turn, algorithm in enumerate(sweep.ALGORITHMS * 5):
            case = sweep.Case(algorithm, "sum", torch.bfloat16, 1001 + turn)
            x = case.input(group.rank)
            if (turn + group.rank) % 3:
                pycomm.all_reduce(x, algorithm=algorithm, group=group)
            else:
                pycomm.all_reduce(x, algorithm=algorithm, group=group, async_op=True).wait()
            expected = golden.all_reduced(
                algorithm,
                [case.input(rank) for rank in range(3)],
                "sum",
                staging_bytes=2 << 20,
                zero_copy=False,
            )
            results.append(golden.same_bits(x, expected))
        return results

    assert world(3).run(body) == [[True] * 20] * 3
