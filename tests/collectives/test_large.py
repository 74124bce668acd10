"""Large tensors: outputs that are stored around the caches, and counts beyond 2^31."""

import pytest
import torch

import pycomm

COUNT = 2**31 + 8


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_more_elements_than_an_int_can_count(world):
    """Two ranks with tensors that differ at both ends and around 2^31."""
    marks = torch.tensor([0, 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, COUNT - 1])

    def body(group):
        x = torch.zeros(COUNT, dtype=torch.uint8)
        x[marks] = torch.arange(1, 8, dtype=torch.uint8) * (group.rank + 1)
        pycomm.all_reduce(x, group=group)
        assert x[marks].tolist() == [3, 6, 9, 12, 15, 18, 21]
        x[marks] = 0
        # Viewed as numbers of 8 bytes, a count is fast.
        assert int(x.view(torch.int64).count_nonzero()) == 0
        return group.explain(COUNT, torch.uint8).algorithm, group.traffic()

    for rank, (algorithm, traffic) in enumerate(world(2, timeout=200).run(body)):
        assert algorithm == "two_shot"
        tiles = -(-COUNT // (256 << 10))
        assert traffic[0] == 2 * tiles
        # Of every tile each rank reads its own part once to reduce it, the rest once to copy it.
        assert traffic[1:] == (COUNT, 0), rank


RANKS, BLOCK = 3, 2**21 + 3  # an output of three blocks of float32 is larger than 16 MiB


def block(sender, receiver):
    return torch.arange(BLOCK, dtype=torch.float32) + 1000 * sender + 100 * receiver


@pytest.mark.parametrize("first", [0, 1, 15])
def test_streamed_outputs(world, first):
    """The output begins anywhere within a cache line; its neighbours stay as they are."""

    def framed(count):
        return torch.full((count + 32,), -1.0)

    def body(group):
        me = group.rank
        whole = torch.cat([block(me, r) for r in range(RANKS)])
        sums = torch.cat([sum(block(s, r) for s in range(RANKS)) for r in range(RANKS)])
        wanted = {
            "all_gather": torch.cat([block(s, 0) for s in range(RANKS)]),
            "all_to_all": torch.cat([block(s, me) for s in range(RANKS)]),
            "all_reduce": sums,
        }
        for name, want in wanted.items():
            frame = framed(len(want))
            output = frame[first : first + len(want)]
            if name == "all_reduce":
                pycomm.all_reduce(whole, out=output, group=group)
            else:
                given = block(me, 0) if name == "all_gather" else whole
                getattr(pycomm, name)(output, given, group=group)
            assert torch.equal(output, want), name
            output.fill_(-1.0)
            assert torch.equal(frame, framed(len(want))), name
        return True

    assert world(RANKS).run(body) == [True] * RANKS
