"""init without torchrun: alone, and with the variables of srun and mpirun."""

import os
import re
import shutil
import subprocess
import sys

import programs
import pytest

from pycomm._runtime import launchers

# What launchers set, so that the programs here see only what a test gives.
OTHERS = re.compile(r"RANK|WORLD_SIZE|MASTER_|SLURM|OMPI_|PMI|MPI_LOCAL|LOCAL_RANK")
BARE = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}

ALONE = """
import warnings, torch, pycomm
import torch.distributed as dist
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    group = pycomm.init()
    net = torch.nn.Linear(300, 2)
    model = torch.nn.parallel.DistributedDataParallel(net)
    state = pycomm.hooks.Int8State(net.named_parameters())
    state.register(model)
    model(torch.ones(1, 300)).sum().backward()
    assert (group.rank, group.size, state.step) == (0, 1, 1)
    assert net.weight.grad.tolist() == [[1.0] * 300] * 2
    wrapped = pycomm.DataParallel(torch.nn.Linear(3, 2), compression=pycomm.Int8())
    wrapped(torch.ones(1, 3)).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[1.0] * 3] * 2
    for name in ("all_reduce", "reduce", "broadcast"):
        assert getattr(pycomm, name)(torch.ones(2)).tolist() == [1.0] * 2
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        out = torch.zeros(2)
        getattr(pycomm, name)(out, torch.ones(2))
        assert out.tolist() == [1.0] * 2
    assert dist.get_backend() == "gloo"
    dist.all_reduce(torch.ones(2), group=dist.new_group())
    for again in range(2):
        pycomm.default_group().close()
        dist.destroy_process_group()
        with pycomm.init() as group:
            assert pycomm.all_reduce(torch.ones(2), group=group).tolist() == [1.0] * 2
(alone,) = [each for each in told if "one process" in str(each.message)]
assert "torchrun" in str(alone.message) and "pycomm.launch" in str(alone.message), alone
assert "launchers.py" not in alone.filename and "_init.py" not in alone.filename, alone
"""
FIRST_USE = """
import torch, pycomm
assert pycomm.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
assert pycomm.default_group().size == 1
"""
IN_THREADS = """
import torch, pycomm
with pycomm.LocalWorld(2) as world:
    try:
        world.run(lambda group: pycomm.all_reduce(torch.ones(3)))
    except ValueError as error:
        assert "have no default group" in str(error)
    else:
        raise AssertionError
"""


def test_alone():
    named = {"alone": ALONE, "first use": FIRST_USE, "in threads": IN_THREADS}
    for name, end in programs.run_all(named).items():
        assert end.status == 0, (name, end.stderr)
        warned = "a group of one process" in end.stderr
        assert warned == (name == "first use"), end.stderr


SUM = """
import os, torch, pycomm
group = pycomm.init(timeout=60)
total = pycomm.all_reduce(torch.ones(1) + group.rank).item()
print(group.rank, group.size, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], total)
"""
SRUN = {
    "SLURM_JOB_ID": f"{os.getpid()}",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node7",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
PLACES = {
    "srun": (SRUN, "SLURM_PROCID", "SLURM_LOCALID"),
    "Open MPI": (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": (HYDRA, "PMI_RANK", "MPI_LOCALRANKID"),
    # srun starts mpirun's daemon, whose variables the ranks inherit
    "Open MPI in SLURM": (
        SRUN | OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    # srun --mpi=pmi2
    "PMI in SLURM": (SRUN | {"PMI_RANK": "0", "PMI_SIZE": "2"}, "SLURM_PROCID", "SLURM_LOCALID"),
}


@pytest.mark.parametrize("launcher", PLACES)
def test_variables_of_launchers(launcher):
    shared, rank, local = PLACES[launcher]
    ranks = {
        str(r): f"import os; os.environ |= {shared | {rank: str(r), local: str(r)}}\n{SUM}"
        for r in range(2)
    }
    for r, end in programs.run_all(ranks).items():
        assert end.status == 0, end.stderr
        assert end.stdout.split() == [r, "2", r, "127.0.0.1", "3.0"]
        assert "a group of one process" not in end.stderr


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0"}, ["torchrun", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, ["missing are MASTER_ADDR;"]),
        ({"MASTER_ADDR": "a"}, ["given are MASTER_ADDR", "RANK, WORLD_SIZE, MASTER_PORT"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, ["srun", "SLURM_NTASKS, SLURM_LOCALID"]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            ["missing are SLURM_JOB_ID"],
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["Open MPI", "missing are OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPICH", "missing are MPI_LOCALRANKID"]),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3",
                        "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            ["several nodes", "MASTER_ADDR", "MASTER_PORT"],
        ),
    ],
)  # fmt: skip
def test_missing_variables(variables, missing, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    with pytest.raises(ValueError) as caught:
        launchers.set_variables(in_threads=False)
    assert all(words in str(caught.value) for words in missing), caught.value
    assert os.environ == variables


def translated(monkeypatch, **variables):
    monkeypatch.setattr(
        os, "environ", SRUN | {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"} | variables
    )
    assert launchers.set_variables(in_threads=False)
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_where_ranks_meet(monkeypatch):
    """At the first host of the step, on a port of the step's own; or where the user says."""
    host, port = translated(monkeypatch, SLURM_STEP_NODELIST="gpu[08-10,12],cpu1")
    assert host == "gpu08"
    assert 20000 <= int(port) < 32000
    assert translated(monkeypatch, SLURM_STEP_NODELIST="gpu[08-10,12],cpu1") == (host, port)
    assert translated(monkeypatch, SLURM_STEP_ID="4")[1] != port
    assert translated(monkeypatch, MASTER_ADDR="here") == ("here", port)
    assert translated(monkeypatch, MASTER_ADDR="here", MASTER_PORT="7") == ("here", "7")


def test_a_batch_script_is_no_rank(monkeypatch):
    """It has the job's variables, but those of a step only if srun starts it."""
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    monkeypatch.setattr(os, "environ", dict(batch))
    launchers._warn_of_one.cache_clear()
    with pytest.warns(UserWarning, match="a group of one process"):
        assert not launchers.set_variables(in_threads=False)
    assert os.environ == batch


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", "a"),
        ("node[1-3,7],b2", "node1 node2 node3 node7 b2"),
        ("n[08-10]x[1-2].de,m", "n08x1.de n08x2.de n09x1.de n09x2.de n10x1.de n10x2.de m"),
        ("a-b[3],c-1", "a-b3 c-1"),
    ],
)
def test_hosts_of_slurm(hosts, expected):
    assert list(launchers._expand(hosts)) == expected.split()


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_under_mpirun():
    """Through a shell, too, whose process lies between mpirun and the rank."""
    command = ["mpirun", "-n", "2", "sh", "-c", 'LC_ALL=C "$0" -c "$1"; exit $?']
    done = subprocess.run(
        [*command, sys.executable, SUM],
        env=BARE | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("127.0.0.1 3.0") == 2
