"""Names the links between ranks: what carries their bytes.

Ranks of a node share memory, of one NUMA node or of several. Their devices reach each other over
NVLink or PCIe, and ranks of different nodes over TCP. All of this is asked of the system when it is
needed: where a process may run and which devices reach each other can change after a group is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pycomm import _C

# Memory of a node.

_NUMA = Path("/sys/devices/system/node")


def numa_nodes(folder: Path = _NUMA) -> dict[int, int]:
    """The NUMA node of every core; empty if the system does not tell."""
    nodes = {}
    for path in folder.glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            for part in (path / "cpulist").read_text().strip().split(","):
                first, _, last = part.partition("-")
                if first:  # a NUMA node may have memory alone
                    cores = range(int(first), int(last or first) + 1)
                    nodes.update(dict.fromkeys(cores, int(path.name[4:])))
    return nodes


def _places(pid: int, nodes: dict[int, int]) -> tuple[int, ...]:
    """The NUMA nodes on whose cores a process may run; empty if that is unknown."""
    try:
        cores = os.sched_getaffinity(pid)
    except OSError:  # it has ended
        return ()
    return tuple(sorted({nodes[core] for core in cores})) if cores <= nodes.keys() else ()


def memory_link(mine: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    """The link of two ranks that share memory, which may run on these NUMA nodes."""
    if not mine or not theirs:
        return "shared memory, NUMA nodes unknown"
    if len(mine) > 1 or len(theirs) > 1:
        both = ", ".join(map(str, sorted({*mine, *theirs})))
        return f"shared memory, not bound to one of the NUMA nodes {both}"
    if mine == theirs:
        return f"shared memory, both on NUMA node {mine[0]}"
    return f"shared memory, across NUMA nodes {mine[0]} and {theirs[0]}"


# Devices.
#
# NVML's state of a link is that of a device's own lanes, whoever is at their other end. Its P2P
# status is that of a pair.

_NVML = "libnvidia-ml.so.1"
_OK = 0  # of a call, and of a pair
_READ, _NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t
_UUID_BYTES = 96


def device_number(uuid: str) -> int:
    """The same number for the same physical device in every process, whichever ones it sees."""
    return int(uuid.removeprefix("GPU-").replace("-", "")[:15], 16)


def device_id(device: torch.device) -> int:
    """The number of a device that this process sees."""
    return device_number(str(torch.cuda.get_device_properties(device).uuid))


class Nvml:
    """The driver's library, which knows all devices, also those that this process cannot see.

    Args:
        library: NVML.

    Raises:
        RuntimeError: it has no driver.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")
        self._devices = dict(self._find())

    def close(self) -> None:
        """Ends the use of the library."""
        self._call("nvmlShutdown")

    def _find(self) -> Iterator[tuple[int, ctypes.c_void_p]]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            with contextlib.suppress(RuntimeError):  # one that this user may not use
                self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
                self._call("nvmlDeviceGetUUID", device, uuid, _UUID_BYTES)
                yield device_number(uuid.value.decode()), device

    def link(self, one: int, other: int) -> str | None:
        """The link of two devices, which have these numbers; None if it is unknown."""
        if one not in self._devices or other not in self._devices:  # such as parts of a device
            return None
        for name, index in (("NVLink", _NVLINK), ("PCIe", _READ)):
            if self._has(one, other, index):
                return name
        return None

    def _has(self, one: int, other: int, index: int) -> bool:
        status = ctypes.c_int()
        pair = self._devices[one], self._devices[other]
        try:
            self._call("nvmlDeviceGetP2PStatus", *pair, index, ctypes.byref(status))
        except RuntimeError:
            return False
        return status.value == _OK

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _OK:
            raise RuntimeError(f"{name} has failed with {code}")


def _nvml() -> Nvml | None:
    try:
        return Nvml(ctypes.CDLL(_NVML))
    except (OSError, RuntimeError):
        return None


def _by_torch(one: int, other: int) -> str | None:
    """What torch knows of two devices, if this process sees both."""
    seen = {device_id(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    if one in seen and other in seen and torch.cuda.can_device_access_peer(seen[one], seen[other]):
        return "NVLink or PCIe, unknown which"
    return None


def device_links(devices: Sequence[int], rank: int, how: str) -> list[str]:
    """The link of a rank's device to that of every rank; devices have numbers."""
    nvml = _nvml()
    names = []
    for other in devices:
        if other == devices[rank]:
            names.append(f"{how} on one device")
            continue
        name = None if nvml is None else nvml.link(devices[rank], other)
        names.append(f"{how} over {name or _by_torch(devices[rank], other) or 'an unknown link'}")
    if nvml is not None:
        nvml.close()
    return names


# A group's.

_HOW = {"peer memory": "CUDA IPC", "threads": "peer access"}


def links_of(
    group: Any,
    device: str,
    transport: str = "not connected yet",
    devices: Sequence[int] = (),
    over_nccl: bool = False,
) -> dict[int, str]:
    """The links to the ranks with which this one exchanges tensors on a device, by rank.

    Args:
        group: this rank's membership.
        device: ``"cpu"`` or ``"cuda"``.
        transport: what carries CUDA tensors inside this node.
        devices: the numbers of its ranks' devices, once they are connected.
        over_nccl: True if NCCL connects the nodes for this device.
    """
    here = next(ranks for ranks in group.nodes if group.rank in ranks)
    index = here.index(group.rank)
    if device == "cpu" or (group.stripes and not over_nccl):
        names = _memory_links([group._pids[rank] for rank in here], index)
    elif transport in _HOW:
        names = device_links(devices, index, _HOW[transport])
    else:
        names = [transport] * len(here)
    links = dict(zip(here, names, strict=True)) | _between_nodes(group, index, over_nccl)
    del links[group.rank]
    return links


def _memory_links(pids: Sequence[int], index: int) -> list[str]:
    nodes = numa_nodes()
    places = [_places(pid, nodes) for pid in pids]
    return [memory_link(places[index], theirs) for theirs in places]


def _between_nodes(group: Any, index: int, over_nccl: bool) -> dict[int, str]:
    """The links to the ranks that carry this rank's stripe on other nodes."""
    ranks = [node[index] for node in group.nodes] if index < group.stripes else []
    if over_nccl:
        return dict.fromkeys(ranks, "NCCL, which chooses the link")
    if isinstance(group._link, _C.LocalTransport):
        return dict.fromkeys(ranks, "copies between threads")
    port = group._port
    return {} if port is None else {rank: f"TCP to {port.host_of(rank)}" for rank in ranks}
