"""Parts of pycomm.bench.gpu.processes that need no GPU."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from pycomm.bench.gpu import machine, processes
from pycomm.bench.report import MIB

GROUP = SimpleNamespace(group_name="world")


def test_a_contestant_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(processes, "CONTESTANTS", {"nobody": None})  # the process knows none
    monkeypatch.setattr(processes, "LIMIT_S", 90.0)
    assert processes.measure("nobody", 1) == "KeyError: 'nobody'"


def test_a_gpu_per_process_where_there_are_several():
    assert [processes.ranks_for(gpus) for gpus in (1, 2, 8, 16)] == [4, 2, 8, 8]


def test_a_program_that_hangs_or_is_missing_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_smi("topo", "-m").startswith("unknown: ")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec /bin/sleep 100\n")
    program.chmod(0o700)
    monkeypatch.setattr(machine, "PATIENCE_S", 0.2)
    assert "timed out" in machine.nvidia_smi("topo", "-m")


def test_bus_bandwidth():
    """Each of four ranks must move 1.5 times the tensor's bytes."""
    (row,) = processes.rows("pycomm", 4, {64 * MIB: 1000.0})
    assert row["busbw_GBps"] == round(1.5 * 64 * MIB / 1e6, 2)


def test_symmetric_memory_is_made_without_multicast(monkeypatch):
    """As for pycomm's own windows: on some machines setting it up hangs."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    seen = []

    def tensor(nbytes, _device):
        seen.append(os.environ.get(name))
        return torch.ones(nbytes, dtype=torch.uint8)

    def handle(memory, group):
        assert memory.eq(0).all()
        seen.append((os.environ.get(name), group))

    monkeypatch.setattr(processes, "symmetric_tensor", tensor)
    monkeypatch.setattr(processes, "symmetric_handle", handle)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(processes.dist, "group", SimpleNamespace(WORLD=GROUP))
    processes.CONTESTANTS["symmetric memory, two-shot"](1000)
    assert seen == ["1", ("1", GROUP)]
    assert name not in os.environ


@pytest.mark.parametrize(("gpus", "count"), [(1, 3), (2, 4)])
def test_what_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys, gpus, count):
    """NCCL refuses ranks that share a GPU, so it is left out on one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (0, 1))
    monkeypatch.setattr(processes, "gpu", lambda: {"name": "pretended"})
    monkeypatch.setattr(
        processes, "measure", lambda name, _: {1024: 2.0} if name == "pycomm" else "it hangs"
    )
    path = tmp_path / "processes.json"
    assert not processes.run(str(path))
    stored = json.loads(path.read_text())
    assert [row["impl"] for row in stored["rows"]] == ["pycomm"]
    assert len(stored["meta"]["failed"]) == count - 1
    assert ("NCCL" in stored["meta"]["failed"]) == (gpus > 1)
    assert stored["meta"]["peer_access"] == {1: [[True]], 2: [[True, True], [False, True]]}[gpus]
    assert stored["meta"]["nvlink"].keys() >= {"before", "pycomm"}
    assert "it hangs" in capsys.readouterr().out
    monkeypatch.setattr(processes, "measure", lambda *_: {1024: 2.0})
    assert processes.run(None)


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert processes.main([]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no CUDA device\n"
