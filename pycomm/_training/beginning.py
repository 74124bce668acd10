"""The beginning of a wrapper, or with another group: all ranks have the same model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycomm._training.buckets import broadcast_all
from pycomm._training.comm_state import CommState
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.step_guard import STEPPED_BY_SOME, differ
from pycomm.collectives import all_gather
from pycomm.errors import CollectiveError

if TYPE_CHECKING:
    from pycomm._training.survival import ShardSurvival
    from pycomm.group import Group


def begin_alike(
    module: nn.Module,
    state: CommState | LocalSGDState,
    group: Group,
    sharded: bool,
    survival: ShardSurvival | None = None,
) -> None:
    """Makes all ranks begin with the same parameters and buffers; a collective call.

    Args:
        module: this rank's module.
        state: its wrapper's state.
        group: the ranks: those that make a wrapper, and those that go on with theirs.
        sharded: True if the wrapper divides states of optimizers.
        survival: of the latter; None on the former, which get the model of the first of these.
    """
    is_new, parameters = survival is None, [*module.parameters()]
    tensors = [*parameters, *module.buffers()]
    has_more = sharded or isinstance(state, LocalSGDState)
    mine = torch.tensor([is_new, has_more, _kind(tensors, has_more)])
    told = mine.new_empty(group.size, 3)
    all_gather(told, mine, group=group)
    news = told[:, 0]
    others = [rank for rank, new in enumerate(news.tolist()) if not new]
    if news.any():
        if told[others, 1].any():
            raise ValueError(
                "local_sgd and shard must be None on all ranks to go on with ranks that are new"
            )
        _check_alike(told[:, 2].tolist(), others, group)
    if others:
        state.regroup(group)
        if survival is not None:
            survival.undo_steps()
        if state.gradient_group is not None:  # else ranks have parameters of their own
            flat = (p.detach().contiguous().view(-1) for p in parameters if not is_new)
            if differ(flat, group, counts=not is_new):
                raise RuntimeError(STEPPED_BY_SOME)
    if news.any():
        broadcast_all(tensors, others[0] if others else 0, group, receives=is_new)


def _kind(tensors: Sequence[torch.Tensor], has_more: bool) -> int:
    """A number of a model's tensors, without their values, and of whether ranks' states differ."""
    kinds = [(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
    return zlib.crc32(repr((kinds, has_more)).encode())


def _check_alike(kinds: Sequence[int], others: Sequence[int], group: Group) -> None:
    """Raises an error on all ranks if models are not of one kind.

    Ranks that go on with theirs need only leave out the one that is new and of another kind.
    """
    source = others[0] if others else 0
    wrong = [rank for rank, kind in enumerate(kinds) if kind != kinds[source]]
    if wrong:
        message = (
            "module must have parameters and buffers of the same shapes, dtypes and requires_grad "
            "on all ranks, and local_sgd or shard on all or none: those of rank "
            f"{wrong[0]} are not like those of rank {source}"
        )
        if others and group.rank not in wrong:
            raise CollectiveError(message, rank=wrong[0], operation="regroup")
        raise ValueError(message)
