"""How examples and benchmarks set up torch.distributed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pycomm.bench import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def machine(monkeypatch):
    """Gives this process, which is rank 1 of two on its node, a number of GPUs."""

    def make(gpus, nccl=True):
        for name, number in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
            monkeypatch.setenv(name, str(number))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return make


def test_nccl_serves_ranks_with_a_gpu_each(machine):
    machine(gpus=2)
    own = torch.device("cuda", 1)
    expected = {"backend": "cpu:pycomm,cuda:nccl", "device_id": own}
    assert launch._backends("pycomm", "cuda") == expected
    assert launch._backends("pycomm", "cpu") == {"backend": "pycomm"}


@pytest.mark.parametrize("what", [{"gpus": 1}, {"gpus": 2, "nccl": False}], ids=str)
def test_without_nccl_torchs_operations_are_the_cpus(what, machine, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from model_parallel import check_gpus

    machine(**what)
    assert launch._backends("gloo", "cuda") == {"backend": "gloo"}
    with pytest.raises(SystemExit, match=r"needs NCCL and a GPU for each of the 2 ranks$"):
        check_gpus("cuda", 2)
    check_gpus("cpu", 2)
