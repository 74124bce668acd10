"""torchrun restarts a training that spans nodes; it goes on as if nothing had happened."""

import os
import subprocess
import sys

import golden
import pytest
import restarting
import spanning
import torch

STEPS = 6


def saved(folder, steps, rank):
    return torch.load(restarting.checkpoint(folder, steps, rank), weights_only=True)


@pytest.mark.slow
def test_a_restarted_training_has_the_bits_of_one_that_never_stopped(tmp_path):
    """Every rank's parameters, momentum and residuals, after rank 1 was killed in a backward."""
    restarted, through = tmp_path / "restarted", tmp_path / "through"
    restarted.mkdir()
    through.mkdir()
    spanning.run([2, 1], restarting.train, through, STEPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "--nproc-per-node=3", restarting.__file__, str(restarted), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (note,) = {(restarted / f"ended-{rank}").read_text() for rank in range(3)}
    assert note in ("life 1 from 3", "life 1 from 2")  # if one was killed before it had saved
    for rank in range(3):
        resumed_from, end = (saved(restarted, int(note[-1]), rank), saved(restarted, STEPS, rank))
        assert golden.same_tensors(end, saved(through, STEPS, rank))
        # Those who carry a stripe keep the residuals of their node.
        residuals = resumed_from["comm"]["kept"][str(rank)]["residual"].values()
        assert all(residual.any() for residual in residuals) == (rank in (0, 2))
