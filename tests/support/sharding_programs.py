"""Training programs drawn at random."""

import hypothesis.strategies as st
import sharding
import torch
from sharding import Parameter, Program, Step

import pycomm

SHAPES = [(), (0,), (1,), (7,), (1023,), (33, 31), (1025,), (64, 65), (3, 1111), (5000,), (130, 97)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def parameters(draw, ranks):
    shape = draw(st.sampled_from(SHAPES))
    unused = draw(st.sampled_from([(), (), (), (), (0,), (ranks - 1,), tuple(range(ranks))]))
    return Parameter(
        shape,
        transposed=len(shape) > 1 and draw(st.booleans()),
        unused_on=frozenset(unused),
        frozen=draw(st.integers(0, 7)) == 0,
        group=draw(st.integers(0, 1)),
    )


@st.composite
def options(draw, dtype, rule):
    """Storages that a rule may have beside parameters of a type."""
    sixteen = dtype != torch.float32
    masters = [None, None, *(["fp32"] if sixteen else [])]
    masters += ["remainder"] * 2 if dtype == torch.bfloat16 else []
    made = {
        "master_weights": draw(st.sampled_from(masters)),
        "states": draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16", "8bit"])),
        "max_norm": draw(st.sampled_from([None, 0.5, 1e9])),
        "seed": draw(st.integers(0, 3)),
    }
    squares = rule in ("adamw", "amsgrad", "lamb") and made["states"] != "fp32"
    bare = dtype == torch.bfloat16 and made["master_weights"] is None
    bad = dtype == torch.float16 and made["master_weights"] is None
    if (squares or bare) and not bad:
        made["stochastic_rounding"] = draw(st.booleans())
    return made


@st.composite
def steps(draw, ranks, weighs, scaled, uneven):
    regroups = draw(st.integers(0, 3)) == 0
    return Step(
        without_sync=draw(st.sampled_from([0, 0, 1, 2])),
        backwards=draw(st.sampled_from([1, 1, 1, 2])),
        zero=draw(st.sampled_from(["none", "optimizer", "model"])),
        set_to_none=draw(st.booleans()),
        zero_after_forward=draw(st.booleans()),
        overflows_on=draw(st.sampled_from([None, None, ranks - 1])) if scaled else None,
        weighs=weighs,
        reads=draw(st.integers(0, 4)) == 0,
        clips=uneven and not scaled and draw(st.integers(0, 4)) == 0,
        edits=(uneven or regroups) and draw(st.integers(0, 4)) == 0,
        steps=1 if scaled else draw(st.sampled_from([0, 1, 1, 2] if uneven else [1, 1, 1, 2])),
        checkpoint=draw(st.integers(0, 4)) == 0,
        wraps=None if uneven else draw(st.sampled_from([*[None] * 6, "shard", "whole"])),
        regroups=regroups,
    )


@st.composite
def programs(draw, uneven=False):
    """Programs; with `uneven`, those for ranks with different numbers of batches."""
    ranks = draw(st.integers(2, 4) if uneven else st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    rule = draw(st.sampled_from(sorted(sharding.RULES)))
    scaled = draw(st.booleans()) if dtype == torch.float16 else False
    weighs = draw(st.booleans())
    optimizers = draw(st.sampled_from([1, 1, 1, 2]))
    layouts = {2: [(1, 1)], 3: [(2, 1), (1, 1, 1)], 4: [(2, 2), (1, 3)], 5: [(2, 2, 1)]}
    # One that all ranks use, so that there is something to step.
    first = Parameter(draw(st.sampled_from([(40,), (50, 60)])))
    shard_ranks = draw(st.sampled_from([None, 1, 2])) if ranks == 4 else None
    nodes = draw(st.sampled_from([None, None, *layouts.get(ranks, [])]))
    return Program(
        ranks=ranks,
        dtype=dtype,
        parameters=(first, *draw(st.lists(parameters(ranks), max_size=7))),
        steps=tuple(draw(st.lists(steps(ranks, weighs, scaled, uneven), min_size=1, max_size=4))),
        rule=rule,
        options=draw(options(dtype, rule)),
        bucket_cap_mb=draw(st.sampled_from([1e-5, 0.004, 0.02, 25])),
        scaled=scaled,
        scheduled=draw(st.booleans()),
        tied=draw(st.booleans()),
        optimizers=optimizers,
        adds_group_at=None if uneven or optimizers != 1 else draw(st.sampled_from([None, None, 1])),
        shard_ranks=shard_ranks,
        begins=draw(st.sampled_from(["wrapped", "wrapped", "made", "stepped"])),
        compression=draw(st.sampled_from([None, None, None, pycomm.Int8()])),
        nodes=nodes,
        replicas=draw(st.sampled_from([1, 2])) if nodes is None and shard_ranks is None else 1,
    )
