"""The beginning of a wrapper, or with another group: all ranks have the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycomm._inputs import host
from pycomm._training.buckets import broadcast_all
from pycomm._training.comm_state import CommState
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.newcomers import check_alike, number_of, source_among
from pycomm._training.parameters import (
    bare_names,
    common_buffers,
    common_parameters,
    describe_tensor,
)
from pycomm._training.step_guard import STEPPED_BY_SOME, differ
from pycomm.collectives import all_gather

if TYPE_CHECKING:
    from pycomm._training.survival import ShardSurvival
    from pycomm.group import Group


def begin_alike(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    group: Group,
    survival: ShardSurvival,
    is_new: bool,
    options: Mapping[str, object],
) -> None:
    """Makes all ranks begin with the same parameters and buffers; a collective call.

    Args:
        module: this rank's module.
        exchanged: those of its parameters that the wrapper exchanges.
        state: its wrapper's state.
        group: the ranks: those that make a wrapper, and those that go on with theirs.
        survival: of the wrapper's sharded states.
        is_new: True on the former, which get the model of the first of the latter.
        options: the wrapper's options, which must be the same on all ranks.

    Raises:
        ValueError: models are not alike; or there is a `shard_group`, and ranks go on. Each is
            raised on all ranks, on those that go on the former as CollectiveError.
        RuntimeError: parameters of ranks that go on differ; on all ranks.
        The errors of :meth:`ShardSurvival.agree`.
    """
    parameters = [parameter for _, parameter in common_parameters(module)]
    tensors = [*parameters, *(buffer for _, buffer in common_buffers(module))]
    lines = _describe(module, exchanged, state, options)
    mine = host.tensor([is_new, bool(options["has_group"]), number_of(lines)])
    told = mine.new_empty(group.size, 3)
    all_gather(told, mine, group=group)
    news = list(map(bool, told[:, 0].tolist()))
    others = not all(news)
    if others and told[:, 1].any():
        raise ValueError("shard_group must be None on all ranks to go on with another group")
    if any(news):
        check_alike(lines, told[:, 2].tolist(), news, group, "module and options")
    if others:
        if options["shard"] is not None:
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
        broadcast_all(tensors, source_among(news), group, receives=is_new, keeps_equal=True)


def _describe(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    options: Mapping[str, object],
) -> list[str]:
    """What must be the same on all ranks, in words: a line per option, parameter and buffer."""
    named = [*common_parameters(module), *common_buffers(module)]
    chosen = set(map(id, exchanged))
    lines = [f"{name}={value!r}" for name, value in options.items()]
    for name, (_, tensor) in zip(bare_names([name for name, _ in named]), named, strict=True):
        lines.append(describe_tensor(name, tensor))
        if isinstance(tensor, nn.Parameter) and id(tensor) not in chosen:
            lines[-1] += ", frozen"
        if id(tensor) in chosen:
            compressed = isinstance(state, CommState) and not state.sends_dense(tensor)
            lines[-1] += ", compressed" if compressed else ", uncompressed"
    return lines
