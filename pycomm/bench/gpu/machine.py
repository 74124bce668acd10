"""The GPU of this machine."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from pycomm import _C
from pycomm.bench.report import GIB, MIB

PATIENCE_S = 10.0  # with nvidia-smi


def missing() -> str | None:
    """The reason why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not _C.has_cuda:
        return "this build of pycomm has no CUDA"
    return None


def nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi, or the reason why there is none."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return done.stdout.strip()


def links() -> dict[str, Any]:
    """How the GPUs are connected, and the bytes that each has sent and received over NVLink."""
    gpus = range(torch.cuda.device_count())
    access = torch.cuda.can_device_access_peer
    return {
        "gpus": len(gpus),
        "peer_access": [[i == j or access(i, j) for j in gpus] for i in gpus],
        "topology": nvidia_smi("topo", "-m"),
        "nvlink": nvidia_smi("nvlink", "--getthroughput", "d").splitlines(),
    }


def gpu() -> dict[str, Any]:
    """Describes the device for the file."""
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "memory_GiB": round(found.total_memory / GIB, 1),
        "multiprocessors": found.multi_processor_count,
        "L2_MiB": round(found.L2_cache_size / MIB, 1),
        "capability": f"{found.major}.{found.minor}",
        "driver": nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
    }
