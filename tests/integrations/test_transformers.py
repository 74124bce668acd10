"""Trainer saves and loads residuals."""

import sys
from pathlib import Path

import golden
import helpers
import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples/frameworks"))


def resumed(rank, size, store):
    from with_transformers import train

    helpers.pretend_torchrun(rank, size)
    helpers.join_world(rank, size, store)
    whole = train(f"{store}.whole", 4, resume=False)
    train(f"{store}.half", 2, resume=False)
    return whole, train(f"{store}.half", 4, resume=True)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped():
    (whole, rest), (other, _) = helpers.run_ranks(2, resumed)
    assert golden.same_bits(whole, other)
    assert golden.same_bits(whole, rest)
