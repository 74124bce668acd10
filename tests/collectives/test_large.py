"""More than 2^31 elements: offsets and counts are 64 bits wide all the way."""

import pytest
import torch

import pycomm

COUNT = 2**31 + 8


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
