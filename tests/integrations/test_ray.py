"""Ray Train's workers exchange gradients by a hook, and go on from their checkpoint."""

import os
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples/frameworks"))


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/frameworks")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


def fit(folder, steps, checkpoint=None):
    import ray.train
    from ray.train.torch import TorchTrainer
    from with_ray import train

    return TorchTrainer(
        train,
        train_loop_config={"steps": steps, "checkpoint": checkpoint},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(folder)),
    ).fit()


@pytest.mark.usefixtures("cluster")
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    whole = fit(tmp_path / "whole", 4)
    half = fit(tmp_path / "half", 2)
    assert half.metrics["norm"] != whole.metrics["norm"]
    rest = fit(tmp_path / "rest", 4, half.checkpoint)
    assert rest.metrics["norm"] == whole.metrics["norm"]
