"""Failures one after another: survivors keep working, and hold no more than before."""

import pytest
import soaking


@pytest.mark.slow
def test_survivors_of_many_failures_hold_no_more_than_before():
    seen = soaking.soak(6, pause=0.4)
    assert seen["wrong"] == []
    early, *_, late = seen["held"][2:]  # after a group on one node and one that spans two
    for before, after in zip(early, late, strict=True):
        for name in ("descriptors", "threads", "python_threads"):
            assert after[name] <= before[name], (name, before, after)
        assert after["shared_kib"] <= before["shared_kib"] + 1024
