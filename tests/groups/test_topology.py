"""The links between ranks, by name: NUMA nodes from files, devices from a fake NVML."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import spanning
import torch

import pycomm
from pycomm._runtime import topology

UUIDS = [f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(4)]
NVML = r"""
#include <stdio.h>
#include <string.h>
static int opened = 0;
static struct device { int index; } devices[4] = {{0}, {1}, {2}, {3}};
int nvmlInit_v2(void) { ++opened; return INIT; }
int nvmlShutdown(void) { --opened; return 0; }
int still_open(void) { return opened; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 4; return opened ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device** device) {
  *device = &devices[3 - index];  /* the driver's order is not that of the program */
  return index == 0 ? 4 : 0;      /* no permission for device 3 */
}
int nvmlDeviceGetUUID(struct device* device, char* uuid, unsigned length) {
  return snprintf(uuid, length, "GPU-%08x-1111-2222-3333-444444444444", device->index) < 0;
}
/* 0 and 1 have NVLink, 2 reads over PCIe alone, and cannot read from 1. */
int nvmlDeviceGetP2PStatus(struct device* a, struct device* b, int index, int* status) {
  int nvlink = a->index < 2 && b->index < 2, barred = a->index + b->index == 3;
  *status = index == 2 ? (nvlink ? 0 : 5) : index == 0 ? (barred ? 1 : 0) : 6;
  return a == b ? 2 : 0;
}
"""


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory):
    """Makes a library that answers as NVML, and whose first call returns a number."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs cc")

    def make(init=0):
        folder = tmp_path_factory.mktemp("nvml")
        source, library = folder / "nvml.c", folder / "libnvml.so"
        source.write_text(NVML)
        command = [compiler, "-shared", "-fPIC", f"-DINIT={init}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return str(library)

    return make


def tree(folder, lists):
    for name, text in lists.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(text)
    return folder


def test_numa_nodes_are_read_from_the_system(tmp_path):
    lists = {"node0": "0-2,8\n", "node1": "3\n", "node2": "\n", "node10": "4-5\n"}
    assert topology.numa_nodes(tree(tmp_path, lists)) == {
        0: 0, 1: 0, 2: 0, 8: 0, 3: 1, 4: 10, 5: 10,
    }  # fmt: skip
    assert topology.numa_nodes(tmp_path / "nowhere") == {}


def test_links_of_memory():
    same, across = topology.memory_link((0,), (0,)), topology.memory_link((1,), (0,))
    assert same == "shared memory, both on NUMA node 0"
    assert across == "shared memory, across NUMA nodes 1 and 0"
    free = topology.memory_link((0,), (0, 1))
    assert free == "shared memory, not bound to one of the NUMA nodes 0, 1"
    assert topology.memory_link((), (0,)) == "shared memory, NUMA nodes unknown"


def test_ranks_that_are_bound_and_that_have_ended(monkeypatch):
    """The system is asked anew: a rank may be bound after the group has been made."""
    monkeypatch.setattr(topology, "numa_nodes", lambda: {0: 0, 1: 0, 2: 1, 3: 1})
    cores = {100: {0, 1}, 101: {1}, 102: {2}, 103: {3, 4}}

    def affinity(pid):
        if pid not in cores:
            raise ProcessLookupError
        return cores[pid]

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    names = topology._memory_links([100, 101, 102, 103, 104], 0)
    assert names[1:] == [
        "shared memory, both on NUMA node 0",
        "shared memory, across NUMA nodes 0 and 1",
        "shared memory, NUMA nodes unknown",  # core 4 is of no node
        "shared memory, NUMA nodes unknown",
    ]


def test_links_of_devices(fake_nvml, monkeypatch):
    """By P2P status; devices have the numbers of their UUIDs, whatever the process sees."""
    library = fake_nvml()
    monkeypatch.setattr(topology, "_NVML", library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    numbers = [topology.device_number(uuid) for uuid in UUIDS]
    assert topology.device_links([*numbers, numbers[0], 1], 0, "CUDA IPC") == [
        "CUDA IPC on one device",
        "CUDA IPC over NVLink",
        "CUDA IPC over PCIe",
        "CUDA IPC over an unknown link",  # NVML does not show device 3
        "CUDA IPC on one device",
        "CUDA IPC over an unknown link",  # nor a part of a device
    ]
    assert topology.device_links(numbers, 1, "peer access")[2] == "peer access over an unknown link"
    assert topology.ctypes.CDLL(library).still_open() == 0


@pytest.mark.parametrize("nvml", ["missing", "no driver"])
def test_without_nvml_torch_is_asked(fake_nvml, nvml, monkeypatch):
    path = "no such library" if nvml == "missing" else fake_nvml(9)
    monkeypatch.setattr(topology, "_NVML", path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(topology, "device_id", lambda device: 10 + device.index)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: other == 1)
    assert topology.device_links([10, 11, 12, 99], 0, "CUDA IPC")[1:] == [
        "CUDA IPC over NVLink or PCIe, unknown which",
        "CUDA IPC over an unknown link",
        "CUDA IPC over an unknown link",
    ]


def neighbours(group, algorithm, nbytes=1 << 20, **options):
    plan = group.explain(nbytes, algorithm=algorithm, **options)
    return [link.rank for link in plan.links]


def test_who_exchanges_with_whom(world):
    """As the algorithms' texts say: a ring reads from the left, a tree from its neighbours."""
    groups = world(7).groups
    for rank, group in enumerate(groups):
        others = [r for r in range(7) if r != rank]
        assert neighbours(group, "one_shot") == neighbours(group, "two_shot") == others
        assert neighbours(group, "ring") == [(rank - 1) % 7]
        of_trees = {n for tree in (0, 1) for n in pycomm._C.tree_node(tree, rank, 7)}
        assert set(neighbours(group, "tree")) == of_trees - {-1}
        assert neighbours(group, "auto", 0) == []
    assert world(1).groups[0].explain(64).links == ()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "tree"])
@pytest.mark.parametrize("in_window", [False, True])
def test_bytes_of_links_add_up(world, algorithm, in_window):
    for size in (2, 3, 5):
        for group in world(size).groups:
            for nbytes in (4, 64, 1 << 20):
                plan = group.explain(nbytes, algorithm=algorithm, in_window=in_window)
                assert sum(link.bytes_in for link in plan.links) == plan.bytes_in
                assert sum(link.bytes_out for link in plan.links) == plan.bytes_out


def test_links_between_nodes(world):
    """Carriers exchange with carriers; the ranks of a node over memory, whatever the algorithm."""
    groups = world(6, nodes=[1, 2, 3]).groups
    found = {
        group.rank: {link.rank: link.link.split(",")[0] for link in group.explain(4096).links}
        for group in groups
    }
    memory, threads = "shared memory", "copies between threads"
    assert found == {
        0: {1: threads, 3: threads},
        1: {2: memory, 0: threads, 3: threads},
        2: {1: memory},
        3: {4: memory, 5: memory, 0: threads, 1: threads},
        4: {3: memory, 5: memory},
        5: {3: memory, 4: memory},
    }
    for group in groups:
        for algorithm in ("two_shot", "ring", "tree"):
            plan = group.explain(1 << 20, algorithm=algorithm)
            counted = [link for link in plan.links if link.bytes_in is not None]
            assert sum(link.bytes_out for link in counted) == plan.bytes_out
            assert sum(link.bytes_in for link in counted) == plan.bytes_in
    ring = groups[0].explain(1 << 20, algorithm="ring").links
    assert [(link.rank, link.bytes_in == 0, link.bytes_out == 0) for link in ring] == [
        (1, True, False),
        (3, False, True),
    ]


def told_by(group):
    """This rank's links and warnings, and the bytes that the core counts for its node's link."""
    plans = [group.explain(1 << 20, algorithm=name) for name in ("two_shot", "ring", "tree")]
    links = {link.rank: link.link for plan in plans for link in plan.links}
    return (
        links,
        [text for text in group._told if "alternate" in text],
        [(plan.bytes_out, plan.bytes_in) for plan in plans],
    )


def test_ranks_of_nodes_may_alternate(world):
    """No more bytes cross than with consecutive ranks; but the log warns."""
    in_order = [told_by(group) for group in world(4, nodes=[2, 2]).groups]
    assert not any(warnings for _, warnings, _ in in_order)
    found = spanning.run("abab", told_by)
    for rank, (links, warnings, counted) in enumerate(found):
        assert links.keys() == {(rank + 2) % 4, rank ^ 1}
        assert links[(rank + 2) % 4].startswith("shared memory, ")
        assert links[rank ^ 1].startswith("TCP to ")
        assert len(warnings) == (rank == 0)
        assert counted == in_order[2 * (rank % 2) + rank // 2][2]


def test_small_stripes_go_to_few_of_many_nodes(world):
    groups = world(16, nodes=[1] * 16).groups
    plan = groups[5].explain(400)
    assert {link.rank: link.bytes_out // 400 for link in plan.links if link.bytes_out} == {
        4: 1, 3: 1, 2: 1, 1: 4, 13: 4, 9: 4,
    }  # fmt: skip
    assert plan.bytes_out == sum(link.bytes_out for link in plan.links) == 15 * 400


def test_a_plan_is_printed_with_its_links(world):
    plan = world(3).groups[1].explain(1 << 20)
    first, *links = str(plan).splitlines()
    assert first.startswith("two_shot on cpu, staged: ")
    assert plan.why in first
    assert [line.split(",")[0] for line in links] == ["rank 0", "rank 2"]
    assert f"{plan.links[0].bytes_in} bytes in, {plan.links[0].bytes_out} out" in links[0]
    between = str(world(2, nodes=[1, 1]).groups[0].explain(400)).splitlines()
    assert between[1] == "rank 1, copies between threads: 400 bytes in, 400 out"


def test_devices_that_are_not_connected(world):
    plan = world(2).groups[0].explain(1 << 20, device="cuda")
    assert [str(link) for link in plan.links] == ["rank 1, not connected yet"]


def test_this_systems_numa_nodes():
    known = topology.numa_nodes()
    if not Path("/sys/devices/system/node").exists():
        assert known == {}
    else:
        assert known.keys() >= os.sched_getaffinity(0)


@pytest.mark.parametrize("nodes", [[1, 1], [1, 2, 3], [2, 2, 2, 2], [1] * 11], ids=str)
def test_both_ends_count_alike(world, nodes):
    groups = world(sum(nodes), nodes=nodes).groups
    for algorithm in ("two_shot", "ring", "tree"):
        for nbytes in (4, 4000, 1 << 20):
            plans = [group.explain(nbytes, algorithm=algorithm) for group in groups]
            ends = {
                (plan_rank, link.rank): (link.bytes_in, link.bytes_out)
                for plan_rank, plan in enumerate(plans)
                for link in plan.links
            }
            for (here, there), moved in ends.items():
                back = ends[there, here]
                assert moved == back if moved == (None, None) else back[::-1], (algorithm, nbytes)
