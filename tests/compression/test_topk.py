"""Top-k: selection and the fused all-reduce equal the model exactly, with feedback and momentum."""

import compressing
import pytest
import sweep
import torch
from compressing import FLOATS, Case

import pycomm

VALUES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_many_steps_with_feedback(values, size):
    turn = size + VALUES.index(values)
    compression = pycomm.TopK(0.02, values=values, momentum=0.9 * (turn % 2))
    dtype, op = FLOATS[turn % 3], ("avg", "sum")[size % 2]
    compressing.check(Case(compression, dtype, 1501, op=op, steps=30, scale=0.01), size)


@pytest.mark.parametrize(("values", "size"), sweep.a_third_of(VALUES, range(1, 6)), ids=str)
def test_many_regions(values, size):
    """Several chunks per owner, owners with more, fewer and no chunks; shares and capacities."""
    for turn, count in enumerate((65_536, 65_537, 2 * 65_536 - 1, 3 * 65_536 + 1111, 390_001)):
        compression = pycomm.TopK(
            k=(1, 7, 1000, 16_000, 3)[turn], values=values, momentum=0.5 * (turn % 2)
        )
        compressing.check(Case(compression, FLOATS[turn % 3], count, steps=2, scale=0.01), size)


def test_a_sample_that_misleads():
    """All elements are large in the sample for the threshold, and none is elsewhere."""
    count, k = 1 << 17, 5000
    x = torch.rand(count, generator=torch.Generator().manual_seed(0)) + 1
    x[:: count // (count // 128) - 1] += 100
    wire = pycomm.TopK(k=k).encode(x)
    made = pycomm.TopK(k=k).decode(wire, count)
    wanted = torch.zeros(count)
    at = x.topk(k).indices
    wanted[at] = x[at]
    assert torch.equal(made, wanted)
