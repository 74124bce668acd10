"""Facts for bug reports: ``python -m pycomm.collect_env``. Names no host, user or path."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from pycomm import __version__

GIB = 1 << 30
# Packages whose versions may explain wrong or slow behaviour.
PACKAGES = ("torch", "numpy", "mpi4py", "deepspeed")
VARIABLES = ("PYCOMM_LOG", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    with contextlib.suppress(OSError):  # /proc may be mounted with subset=pid
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Processor"):
                return value.strip()
    return platform.machine()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_gib() -> float:
    """The machine's memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of pycomm, Python and those of the named packages that are installed."""
    found = {"pycomm": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _vector_sets() -> str:
    flags = Path("/proc/cpuinfo").read_text().split()
    return ", ".join(name for name in ("avx2", "avx512f", "avx512_bf16") if name in flags) or "none"


def _devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))


def _extension() -> str:
    from pycomm import _C

    return f"loaded, {'CUDA' if getattr(_C, 'has_cuda', False) else 'CPU only'}"


def _shared_memory() -> str:
    status = os.statvfs("/dev/shm")
    total, free = (status.f_frsize * n / GIB for n in (status.f_blocks, status.f_bavail))
    return f"{free:.1f} of {total:.1f} GiB free (pycomm itself leaves nothing there)"


def _memfd() -> str:
    from pycomm import _C

    os.close(_C.create_file(os.sysconf("SC_PAGE_SIZE"), "pycomm-probe"))
    return "works"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "works"


def _environment() -> str:
    return (
        ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "-"
    )


PROBES: dict[str, Callable[[], object]] = {
    "versions": lambda: ", ".join(f"{name} {version}" for name, version in versions().items()),
    "extension": _extension,
    "torch CUDA": lambda: torch.version.cuda or "not built in",
    "GPUs": _devices,
    "kernel": platform.release,
    "C library": lambda: " ".join(platform.libc_ver()),
    "CPU": cpu_model,
    "vector sets": _vector_sets,
    "cores usable": lambda: f"{usable_cores()} of {os.cpu_count()}",
    "load": lambda: " ".join(f"{load:.2f}" for load in os.getloadavg()),
    "memory": lambda: f"{memory_gib()} GiB",
    "/dev/shm": _shared_memory,
    "memfd": _memfd,
    "pidfd": _pidfd,
    "environment": _environment,
}


def facts() -> dict[str, str]:
    """All facts by name; a probe that fails says so instead of raising."""
    found = {}
    for name, probe in PROBES.items():
        try:
            found[name] = str(probe())
        except Exception as error:
            found[name] = f"unknown ({type(error).__name__}: {error})"
    return found


def report(found: Mapping[str, str]) -> str:
    """One line per fact."""
    return "\n".join(f"{name + ':':14} {fact}" for name, fact in found.items())


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m pycomm.collect_env",
        description="Prints the facts that a bug report needs. It names no host, user or path.",
    ).parse_args()
    sys.stdout.write(report(facts()) + "\n")
