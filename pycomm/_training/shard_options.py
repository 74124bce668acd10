"""The wrapper's options of sharding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pycomm._given import check_group
from pycomm._training.comm_state import CommState
from pycomm._training.flat import home_of
from pycomm._training.local_sgd import LocalSGDState
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
        overlaps: parameters are sent between nodes while the next forward begins.
    """

    stage: str
    group: Group
    publish: Compression | None
    overlaps: bool


def check_sharding(
    module: nn.Module,
    comm_state: CommState | LocalSGDState,
    shard: object,
    shard_group: Group | None,
    publish: object,
    overlap_params: object,
) -> None:
    """Checks the options of a wrapper.

    Raises:
        ValueError, TypeError: an option is not as the wrapper describes it.
    """
    check_group(shard_group)
    if shard is None:
        given = {"shard_group": shard_group, "publish": publish}
        given["overlap_params"] = overlap_params or None
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} must come with shard")
        return
    if shard not in SHARDS:
        raise ValueError(f"shard must be None, 'optimizer' or 'gradients', got {shard!r}")
    check_lossy_once("publish", publish)
    if not isinstance(overlap_params, bool):
        raise TypeError(f"overlap_params must be True or False, got {overlap_params!r}")
    if isinstance(comm_state, LocalSGDState):
        raise ValueError("shard must be None with local_sgd, whose ranks step on their own")
    for name, parameter in module.named_parameters():
        if not parameter.is_cpu:
            raise ValueError(f"shard needs parameters on the CPU, got {name} on {parameter.device}")
        if home_of(parameter) is not None and part_of(parameter) is None:
            raise ValueError(f"shard flattens parameters itself, got {name} that was flattened")
    group = comm_state.group if shard_group is None else shard_group
    plain = comm_state.compression is None and group is comm_state.group
    if shard == "gradients" and not (plain and len(group.nodes) == 1):
        raise ValueError(
            "shard='gradients' takes no compression, no shard_group and one node: use "
            "shard='optimizer' with these"
        )
