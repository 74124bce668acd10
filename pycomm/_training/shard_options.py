"""The wrapper's options of sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from pycomm._init import check_group
from pycomm._training.comm_state import CommState
from pycomm._training.flat import home_of
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.parameters import common_parameters
from pycomm._training.shards import part_of
from pycomm.compression import Compression, check_lossy_once
from pycomm.group import Group

SHARDS = ("optimizer", "gradients")


@dataclass(frozen=True)
class Sharding:
    """What a wrapper divides among ranks.

    Attributes:
        stage: ``"optimizer"`` or ``"gradients"``.
        group: the ranks.
        publish: compression of the parameters' changes between nodes.
        replicas: copies of the optimizer's states.
    """

    stage: str
    group: Group
    publish: Compression | None
    replicas: int


class ShardOptions(NamedTuple):
    """A wrapper's options of sharding, as it was given them.

    Attributes:
        shard: see :class:`pycomm.DataParallel`.
        replicas: likewise.
        publish: likewise.
        has_group: True if there is a `shard_group`.
    """

    shard: str | None
    replicas: int
    publish: Compression | None
    has_group: bool = False

    def over(self, group: Group) -> Sharding | None:
        """What these ranks divide; None if nothing is divided."""
        if self.shard is None:
            return None
        return Sharding(self.shard, group, self.publish, self.replicas)


def check_sharding(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    comm_state: CommState | LocalSGDState,
    group: Group,
    options: ShardOptions,
    shard_group: Group | None,
) -> None:
    """Checks the options of a wrapper, or that it can go on with another group.

    Args:
        module: the module.
        exchanged: those of its parameters that the wrapper exchanges.
        comm_state: the wrapper's state.
        group: its group, or the other one.
        options: its options.
        shard_group: the ranks that divide the states, if they are not those of the group.

    Raises:
        ValueError, TypeError: an option is not as the wrapper describes it.
    """
    check_group(shard_group)
    shard, replicas, publish, _ = options
    if shard is None:
        given: dict[str, object] = {"shard_group": shard_group, "publish": publish}
        given["replicas"] = None if replicas == 1 else replicas
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} must come with shard")
        return
    if shard not in SHARDS:
        raise ValueError(f"shard must be None, 'optimizer' or 'gradients', got {shard!r}")
    check_lossy_once("publish", publish)
    if isinstance(comm_state, LocalSGDState):
        raise ValueError("shard must be None with local_sgd, whose ranks step on their own")
    for name, parameter in common_parameters(module):
        if home_of(parameter) is not None and part_of(parameter) is None:
            raise ValueError(f"shard flattens parameters itself, got {name} that was flattened")
    divides = group if shard_group is None else shard_group
    _check_device(exchanged, divides)
    plain = comm_state.compression is None and divides is group
    if shard == "gradients" and not plain:
        raise ValueError(
            "shard='gradients' takes no compression and no shard_group: use shard='optimizer' with "
            "these"
        )
    if replicas not in (1, 2):
        raise ValueError(f"replicas must be 1 or 2, got {replicas!r}")
    if replicas == 2:
        _check_replicas(module, divides, options)


def _check_replicas(module: nn.Module, group: Group, options: ShardOptions) -> None:
    """Raises ValueError if states cannot have replicas."""
    cannot = {
        "parameters on the CPU": any(
            not parameter.is_cpu for _, parameter in common_parameters(module)
        ),
        "no shard_group": options.has_group,
        "ranks that are processes, or a group on one node": not group._decides,
    }
    for wanted, missing in cannot.items():
        if missing:
            raise ValueError(f"replicas=2 needs {wanted}")


def _check_device(parameters: Sequence[torch.Tensor], group: Group) -> None:
    """Checks that a sharded step can run where the parameters lie.

    Connects the group's CUDA side, if they lie on CUDA.

    Raises:
        ValueError: it cannot.
    """
    devices = dict.fromkeys(parameter.device for parameter in parameters)
    if len(devices) > 1 or not all(device.type in ("cpu", "cuda") for device in devices):
        found = ", ".join(map(str, devices))
        raise ValueError(f"shard needs parameters on the CPU or on one CUDA device, got {found}")
    (device,) = devices or (torch.device("cpu"),)
    if device.type == "cpu":
        return
    if len(group.nodes) > 1:
        raise ValueError(
            f"on CUDA, shard needs a group on one node, got {len(group.nodes)} nodes: give the "
            "ranks of a node as shard_group"
        )
    side = group._cuda_side(device)
    if side.transport == "pinned host memory":
        raise ValueError(
            "on CUDA, shard needs GPUs with access to each other's memory, and a pair of this "
            "group's has none"
        )
    if side.shares_device:
        raise ValueError(
            "ranks that are threads must have a GPU each to share a model's shards, got "
            f"{device} for all: autograd has one thread per device"
        )
