"""Ranks that disagree about a compressed all-reduce."""

import pytest
import torch

import pycomm

# The call of most ranks, the call of one rank, and the parts of both that messages must have.
DISAGREEMENTS = {
    "compression": ("reduce(Int8())", "reduce(Cast())", "int8 in blocks of 256", "as bfloat16"),
    "none": ("reduce(Int8())", "plain()", "int8 in blocks of 256", "op=sum"),
    "block": ("reduce(Int8())", "reduce(Int8(512))", "blocks of 256", "blocks of 512"),
    "rounding": (
        "reduce(Int8())",
        "reduce(Int8(rounding='stochastic'))",
        "blocks of 256",
        "blocks of 256, stochastic",
    ),
    "dtype of the wire": (
        "reduce(Cast())",
        "reduce(Cast(torch.float16))",
        "as bfloat16",
        "as float16",
    ),
    "k": ("reduce(TopK(k=5))", "reduce(TopK(k=6))", "top 5 as float32", "top 6 as float32"),
    "density at a step": (
        "reduce(TopK(0.01, density_steps=9), step=0)",
        "reduce(TopK(0.01, density_steps=9), step=9)",
        "top 150 as",
        "top 6 as",
    ),
    "values": (
        "reduce(TopK(k=5))",
        "reduce(TopK(k=5, values=torch.int8))",
        "top 5 as float32",
        "top 5 as int8",
    ),
    "feedback": (
        "reduce(Int8())",
        "reduce(Int8(), residual=torch.zeros(600))",
        "blocks of 256",
        "blocks of 256, with feedback",
    ),
    "feedback of top-k": (
        "reduce(TopK(k=5), residual=torch.zeros(600))",
        "reduce(TopK(k=5))",
        "top 5 as float32, with feedback",
        "top 5 as float32",
    ),
    "op": ("reduce(Int8())", "reduce(Int8(), op='sum')", "op=avg", "op=sum"),
    "algorithm": (
        "reduce(Int8(), algorithm='ring')",
        "reduce(Int8())",
        "algorithm=ring",
        "algorithm=two_shot",
    ),
    "count": ("reduce(Int8())", "reduce(Int8(), torch.ones(601))", "600 elements", "601 elements"),
    "count of top-k": (
        "reduce(TopK(k=5))",
        "reduce(TopK(k=5), torch.ones(200_000))",
        "600 elements",
        "200000 elements",
    ),
    "dtype": ("reduce(Int8())", "reduce(Int8(), X.half())", "all_reduce(float32", "float16"),
    "offset": (
        "reduce(Int8(), torch.ones(40_000))",
        "reduce(Int8(), torch.ones(40_000), offset=256 * 99)",
        "40000 elements",
        "offset",
    ),
}


def disagree(group, usual, odd, odd_rank):
    """Runs a good operation, then a bad one: its error, and whether the group is still usable."""

    def reduce(compression, tensor=None, **options):
        tensor = torch.ones(600) if tensor is None else tensor
        pycomm.compressed_all_reduce(tensor, compression, group=group, **options)

    known = {name: getattr(pycomm, name) for name in ("Int8", "Cast", "TopK")}
    known |= {"torch": torch, "X": torch.ones(600), "reduce": reduce}
    known["plain"] = lambda: pycomm.all_reduce(torch.ones(600), group=group)
    reduce(pycomm.Int8())
    error = None
    try:
        eval(odd if group.rank == odd_rank else usual, known)
    except pycomm.CollectiveError as caught:
        error = caught
    with pytest.raises(pycomm.GroupUnusable):
        reduce(pycomm.Int8())
    return error


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(world, name, size):
    usual, odd, usual_words, odd_words = DISAGREEMENTS[name]
    for odd_rank in range(size):
        errors = world(size, timeout=5).run(disagree, usual, odd, odd_rank)
        for error in errors:
            assert type(error) is pycomm.Mismatch, error
            message = str(error)
            assert usual_words in message
            assert odd_words in message
            assert f"rank {odd_rank}" in message
        assert len({str(error) for error in errors}) == 1
