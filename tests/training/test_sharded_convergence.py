"""Sharded training ends where unsharded training does; short forms of ``convergence.shards``."""

import pytest
from convergence import shards


def check(steps, storages):
    """The sharded bits are those of unsharded training, and only broken versions leave the band."""
    verdicts = shards.judge((0,), steps, storages)
    seen = {(v.storage, v.shard, v.broken): v for v in verdicts}
    assert len(seen) == 3 * len(storages) + len(shards.STAGES)
    for (_, shard, broken), verdict in seen.items():
        works = broken is None
        assert (abs(verdict.difference) <= shards.BAND) == works, verdict
        assert verdict.same_bits == (works if shard else None), verdict
        assert verdict.as_claimed, verdict


@pytest.mark.slow
def test_sharded_training_has_the_bits_and_the_loss_of_unsharded_training():
    check(8, ["fp32"])


@pytest.mark.slow
def test_so_does_every_storage():
    check(16, list(shards.STORAGES))
