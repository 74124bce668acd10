"""The beginning of a wrapper, or with another group: all ranks have the same model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycomm._inputs import host
from pycomm._training.buckets import broadcast_all
from pycomm._training.comm_state import CommState
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.newcomers import check_alike, source_among
from pycomm._training.step_guard import STEPPED_BY_SOME, differ
from pycomm.collectives import all_gather

if TYPE_CHECKING:
    from pycomm._training.shard_options import ShardOptions
    from pycomm._training.survival import ShardSurvival
    from pycomm.group import Group

_WANTED = (
    "module must have parameters and buffers of the same shapes, dtypes and requires_grad on all "
    "ranks, and the same options of shards, and local_sgd on all or none"
)


def begin_alike(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    group: Group,
    survival: ShardSurvival,
    is_new: bool,
    options: ShardOptions,
) -> None:
    """Makes all ranks begin with the same parameters and buffers; a collective call.

    Args:
        module: this rank's module.
        exchanged: those of its parameters that the wrapper exchanges.
        state: its wrapper's state.
        group: the ranks: those that make a wrapper, and those that go on with theirs.
        survival: of the wrapper's sharded states.
        is_new: True on the former, which get the model of the first of the latter.
        options: the wrapper's options of sharding, which must be the same on all ranks.

    Raises:
        ValueError: models are not alike; or there is a `shard_group`, and ranks go on. Each is
            raised on all ranks, on those that go on the former as CollectiveError.
        RuntimeError: parameters of ranks that go on differ; on all ranks.
        The errors of :meth:`ShardSurvival.agree`.
    """
    parameters = [*module.parameters()]
    tensors = [*parameters, *module.buffers()]
    mine = host.tensor([is_new, options.has_group, _kind(tensors, exchanged, state, options)])
    told = mine.new_empty(group.size, 3)
    all_gather(told, mine, group=group)
    news = list(map(bool, told[:, 0].tolist()))
    others = not all(news)
    if others and told[:, 1].any():
        raise ValueError("shard_group must be None on all ranks to go on with another group")
    if any(news):
        check_alike(told[:, 2].tolist(), news, group, _WANTED)
    if others:
        if options.shard is not None:
            survival.agree()
        state.regroup(group)
        if isinstance(state, LocalSGDState):  # it has sent parameters
            tensors = [each for each in tensors if not state.exchanges(each)]
        survival.undo_steps()
        if state.gradient_group is not None:  # else ranks have parameters of their own
            flat = (p.detach().contiguous().view(-1) for p in parameters if not is_new)
            if differ(flat, group, counts=not is_new):
                raise RuntimeError(STEPPED_BY_SOME)
    if any(news):
        broadcast_all(tensors, source_among(news), group, receives=is_new)


def _kind(
    tensors: Sequence[torch.Tensor],
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    options: ShardOptions,
) -> int:
    """A number of a model's tensors, without their values, and of what the wrapper does."""
    chosen = set(map(id, exchanged))
    kinds = [(tuple(each.shape), each.dtype, id(each) in chosen) for each in tensors]
    more = isinstance(state, LocalSGDState), *options
    return zlib.crc32(repr((kinds, more)).encode())
