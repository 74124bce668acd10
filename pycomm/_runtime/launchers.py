"""Which rank this process is, as the variables of its launcher tell.

torch.distributed reads torchrun's variables. srun and mpirun set others, from which this module
sets torchrun's, so that the program finds ``LOCAL_RANK``, too.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from pycomm._runtime.rendezvous import TORCHRUN
from pycomm._runtime.sockets import first_of_node

_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that the system gives to connections


def set_variables(in_threads: bool) -> bool:
    """Sets torchrun's variables from those of another launcher.

    Args:
        in_threads: the ranks are threads.

    Returns:
        False if no launcher has started this process: it is the only one. A warning says so.

    Raises:
        ValueError: some of a launcher's variables are missing; or there is no launcher, and the
            ranks are threads, which pass their groups.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _require("torchrun", *TORCHRUN)
        return True
    for launcher in _LAUNCHERS:
        if any(name in os.environ for name in launcher.marks):
            launcher.translate()
            return True
    if any(name in os.environ for name in TORCHRUN):
        _require("torchrun", *TORCHRUN)
    if in_threads:
        raise ValueError(
            "group must be given by the ranks of a pycomm.LocalWorld, which have no default group: "
            "pass the group that LocalWorld.run gave to this rank"
        )
    _warn_of_one()
    return False


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(("pycomm.", "torch."))


@functools.cache  # torch's own use of filters makes Python forget which warnings it has shown
def _warn_of_one() -> None:
    frame, level = sys._getframe(), 1  # of the program's own line
    while (caller := frame.f_back) and _is_library(caller):
        frame, level = caller, level + 1
    warnings.warn(
        "a group of one process, as no launcher has started it: start with torchrun, "
        "python -m pycomm.run or pycomm.launch for more",
        stacklevel=level + 1,
    )


def _require(launcher: str, *names: str) -> list[str]:
    """The values of variables; ``A|B`` is the first one of them that is set."""
    options = [name.split("|") for name in names]
    values = [next(filter(None, map(os.environ.get, each)), None) for each in options]
    missing = [" or ".join(each) for each, value in zip(options, values, strict=True) if not value]
    if missing:
        given = [each[0] for each, value in zip(options, values, strict=True) if value]
        found = f"given are {', '.join(given)}, " if given else ""
        raise ValueError(
            f"variables of {launcher}: {found}missing are {', '.join(missing)}; all must be given"
        )
    return [value for value in values if value]


class _Launcher(NamedTuple):
    """A launcher's variables.

    Attributes:
        name: of the launcher.
        marks: one of these tells that it has started this process.
        place: of the rank, of the number of ranks, and of the rank among those of its node.
        meeting: returns the address of the first rank's node, and what all ranks know and other
            jobs do not.
    """

    name: str
    marks: tuple[str, ...]
    place: tuple[str, str, str]
    meeting: Callable[[int], tuple[str, str]]

    def translate(self) -> None:
        """Sets torchrun's variables."""
        rank, size, local = _require(self.name, *self.place)
        told = {name: os.environ[name] for name in TORCHRUN if name in os.environ}
        if not {"MASTER_ADDR", "MASTER_PORT"} <= told.keys():
            address, job = self.meeting(int(size))
            port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
            told = {"MASTER_ADDR": address, "MASTER_PORT": str(port)} | told
        os.environ |= told | {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}


def _meeting_in_slurm(_: int) -> tuple[str, str]:
    step = _require("srun", "SLURM_JOB_ID|SLURM_JOBID", "SLURM_STEP_ID")
    if address := os.environ.get("MASTER_ADDR"):
        return address, ".".join(step)
    (hosts,) = _require("srun", "SLURM_STEP_NODELIST|SLURM_NODELIST|SLURM_JOB_NODELIST")
    first, second = (*_expand(hosts), "", "")[:2]
    return first if second else first_of_node(), ".".join(step)


def _expand(hosts: str) -> Iterator[str]:
    """The hosts of SLURM's list: ``node[1-3,07],b`` are node1, node2, node3, node07 and b."""
    for item in re.findall(r"(?:[^,\[]|\[[^]]*\])+", hosts):
        before, bracket, rest = item.partition("[")
        if not bracket:
            yield item
            continue
        numbers, _, after = rest.partition("]")
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                for end in _expand(after) if after else ("",):
                    yield f"{before}{number:0{len(first)}}{end}"


def _meeting_in_mpi(rank: str, local_size: str) -> Callable[[int], tuple[str, str]]:
    def meeting(size: int) -> tuple[str, str]:
        if int(*_require("mpirun", local_size)) == size:
            return os.environ.get("MASTER_ADDR", first_of_node()), _starter(rank)
        raise ValueError(
            "mpirun has started ranks on several nodes, which cannot tell where to meet: set "
            "MASTER_ADDR to the address of rank 0's node, and MASTER_PORT to a free port there, "
            "with mpirun's -x (Open MPI) or -genv (MPICH)"
        )

    return meeting


def _starter(variable: str) -> str:
    """Identifies the process that has started the ranks of this node.

    It is the nearest ancestor without the variable; a rank may be the child of a shell.
    """
    pid, name = os.getppid(), f"{variable}=".encode()
    try:
        while True:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if not any(each.startswith(name) for each in variables):
                return f"{os.uname().nodename} {pid} {state[19]}"  # with the time of its start
            pid = int(state[1])
    except OSError as error:
        raise ValueError(f"mpirun's process cannot be seen ({error}): set MASTER_PORT") from error


def _mpi(name: str, place: tuple[str, str, str], local_size: str, *marks: str) -> _Launcher:
    return _Launcher(name, marks or place, place, _meeting_in_mpi(place[0], local_size))


_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
# mpirun's ranks may inherit srun's variables, and srun sets PMI's, too. In a batch script that no
# srun has started there is no SLURM_STEP_ID.
_LAUNCHERS = [
    _mpi("mpirun (Open MPI)", _OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _mpi("mpirun (MPICH)", _HYDRA, "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "srun",
        ("SLURM_STEP_ID",),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS|SLURM_NTASKS", "SLURM_LOCALID"),
        _meeting_in_slurm,
    ),
    _mpi("mpirun (MPICH)", _HYDRA, "MPI_LOCALNRANKS"),
]
