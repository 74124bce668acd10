"""The GPU of this machine."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from pycomm import _C
from pycomm.bench.cases import GIB, MIB


def missing() -> str | None:
    """The reason why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not _C.has_cuda:
        return "this build of pycomm has no CUDA"
    return None


def gpu() -> dict[str, Any]:
    """Describes the device for the file."""
    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "name": found.name,
        "memory_GiB": round(found.total_memory / GIB, 1),
        "multiprocessors": found.multi_processor_count,
        "L2_MiB": round(found.L2_cache_size / MIB, 1),
        "capability": f"{found.major}.{found.minor}",
        "driver": driver,
        "cuda": torch.version.cuda,
    }
