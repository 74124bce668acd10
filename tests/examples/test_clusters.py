"""The scripts for clusters start ranks that meet, with the variables that the cluster would set."""

import os
import re
import shlex
import socket
import subprocess

import pages
import programs
import pytest
import yaml

NODES = 2
# torchrun, but for its last step: ranks are forks that run a function instead of train.py.
TORCHRUN = """
import os, sys
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

os.environ |= {variables}

def train():
    import pycomm, torch
    with pycomm.init(timeout=60) as group:
        total = pycomm.all_reduce(torch.ones(1) + group.rank).item()
        print(group.rank, group.size, os.environ["GROUP_RANK"], total, flush=True)

arguments = run.parse_args({words})
config, _, script = run.config_from_args(arguments)
assert script[-1] == "train.py"
config.start_method = "fork"
elastic_launch(config, train)()
"""


def nodes_of_kubernetes():
    """The command and the variables of each pod."""
    service, job = yaml.safe_load_all(
        (pages.ROOT / "examples/clusters/kubernetes.yaml").read_text()
    )
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # what gives the pods the names NAME-INDEX.SUBDOMAIN, before they are ready, too
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name}  # the label that a Job gives its pods
    assert service["metadata"]["name"] == pod["subdomain"]
    assert spec["completions"] == spec["parallelism"]
    command = " ".join(container["command"])
    for given, there in {
        f"--nnodes={spec['completions']}": f"--nnodes={NODES}",
        f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}": "",
        f"--master-addr={name}-0.{pod['subdomain']}": "--master-addr=127.0.0.1",
    }.items():
        assert given in command
        command = command.replace(given, there)
    given = {each["name"]: each["value"] for each in container["env"]}
    nodes = []
    for index in range(NODES):
        variables = given | {"JOB_COMPLETION_INDEX": str(index)}
        expanded = re.sub(r"\$\((\w+)\)", lambda each, known=variables: known[each[1]], command)
        nodes.append((shlex.split(expanded), variables))
    return nodes


# srun starts the step's command once per node; the command's words and variables are kept here.
SRUN = f"""#!/bin/sh
for node in $(seq 0 {NODES - 1}); do
  SLURM_STEP_ID=0 SLURM_NTASKS={NODES} SLURM_PROCID=$node SLURM_LOCALID=0 env -0 >node$node.env
done
printf '%s\\0' "$@" >words
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames gpu[1-2]" ] && printf '127.0.0.1\\ngpu2\\n'
"""
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_NNODES": str(NODES),
    "SLURM_CPUS_PER_TASK": "32",
}


def nodes_of_slurm(folder, **devices):
    """The command of the step, and its variables on each node."""
    script = (pages.ROOT / "examples/clusters/slurm.sh").read_text()
    blocks = pages.blocks_of("docs/how-to/clusters.md", "sh")
    (shown,) = (block.text for block in blocks if "scontrol" in block.text)
    assert set(shown.splitlines()) <= set(script.splitlines())
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    command = ["bash", "-eu", "-c", script]
    variables = BATCH | devices | {"PATH": path}
    subprocess.run(command, cwd=folder, env=variables, check=True, timeout=60)
    words = (folder / "words").read_text().split("\0")[:-1]
    return [(words, variables_in(folder / f"node{n}.env")) for n in range(NODES)]


def variables_in(path):
    """Variables as `env -0` prints them, but for this machine's paths."""
    pairs = (each.partition("=") for each in path.read_text().split("\0")[:-1])
    return {name: value for name, _, value in pairs if name not in ("PATH", "PWD", "OLDPWD")}


def test_nodes_without_gpus(tmp_path):
    """They have as many ranks as the script says, which share a node's cores."""
    for words, variables in nodes_of_slurm(tmp_path):
        assert words[words.index("--nproc-per-node") + 1] == "8"
        assert variables["OMP_NUM_THREADS"] == "4"
        assert variables["SRUN_CPUS_PER_TASK"] == "32"


@pytest.mark.slow
def test_ranks_meet(tmp_path):
    """Each cluster's ranks, on a free port of this machine."""
    slurm = nodes_of_slurm(tmp_path, SLURM_GPUS_ON_NODE="1")
    clusters = {"Kubernetes": nodes_of_kubernetes(), "SLURM": slurm}
    there = {}
    for cluster, nodes in clusters.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for node, (words, variables) in enumerate(nodes):
            assert words[0] == "torchrun"
            assert sum("29500" in word for word in words) == 1
            words = [word.replace("29500", port) for word in words[1:]]
            # a node has its own interface; here all have one
            variables = variables | {"GLOO_SOCKET_IFNAME": "lo"}
            there[f"{cluster} {node}"] = TORCHRUN.format(words=words, variables=variables)
    ends = programs.run_all(there)
    for cluster in clusters:
        mine = [end for name, end in ends.items() if name.startswith(cluster)]
        assert all(end.status == 0 for end in mine), [end.stderr for end in mine]
        assert sorted(end.stdout.split() for end in mine) == [
            ["0", "2", "0", "3.0"],
            ["1", "2", "1", "3.0"],
        ]
