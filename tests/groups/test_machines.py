"""Machines that hide, refuse or lack something that others have."""

import os
import time

import helpers
import pytest
import restricted
import spanning

import pycomm
from pycomm._runtime import rendezvous

SUMS = "import restricted; print([restricted.sums(nodes) for nodes in ([2], [1, 1])])"


@pytest.mark.parametrize(
    "proc", ["-t proc -o subset=pid proc", "-t tmpfs tmpfs"], ids=["without /proc/sys", "no /proc"]
)
def test_hidden_files(proc):
    """Ranks know that they share a node, and groups work on one node and between nodes."""
    found = restricted.run(SUMS, f"mount {proc} /proc", "--mount")
    assert found.splitlines()[-1] == str([[(3000.0, n)] * 2 for n in (1, 2)])


def test_nodes_without_a_boot_id(monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(rendezvous, "_MACHINE_ID", tmp_path / "machine-id")
    here = rendezvous.node_identity()
    assert here == rendezvous.node_identity()
    (tmp_path / "machine-id").write_text("another")
    another = rendezvous.node_identity()
    system = list(os.uname())
    system[1] = "elsewhere"
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(system))
    assert len({here, another, rendezvous.node_identity()}) == 3


def fail_alone(rank, size, store, nodes, odd_rank):
    """Each rank's error; afterwards they make a group as one should."""
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == odd_rank:

            def fail(*_):
                raise PermissionError("hidden, the test says")

            patch.setattr(rendezvous, "introduction", fail)
        with pytest.raises((ValueError, OSError)) as caught:
            pycomm.init(timeout=60)
    took = time.monotonic() - start
    pycomm.init(timeout=60).close()
    return type(caught.value), str(caught.value), took


@pytest.mark.parametrize("nodes", ["aaa", "aab"])
def test_a_failure_before_ranks_know_each_other(nodes):
    outcomes = helpers.run_ranks(3, fail_alone, nodes, 1)
    told = "rank 1 could not introduce itself: PermissionError: hidden, the test says"
    other = (ValueError, told)
    assert [o[:2] for o in outcomes] == [
        other, (PermissionError, "hidden, the test says"), other
    ]  # fmt: skip
    assert all(took < 30 for *_, took in outcomes)
