"""How ranks agree on the state that all must share, including ranks that have just joined."""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from pycomm._runtime import host
from pycomm._training.buckets import broadcast_all
from pycomm._training.parameters import (
    bare_names,
    common_buffers,
    common_parameters,
    describe_tensor,
)
from pycomm.collectives import all_gather, all_reduce, broadcast
from pycomm.errors import CollectiveError

if TYPE_CHECKING:
    from pycomm._training.hook_state import HookState
    from pycomm.group import Group


# Whole numbers of all ranks, for decisions that all must take alike.


def gather_rows(row: Iterable[int], group: Group) -> list[list[int]]:
    """Every rank's row of whole numbers, in rank order; rows have the same length."""
    mine = host.tensor(list(map(int, row)))
    rows = host.empty(group.size, len(mine), dtype=mine.dtype)
    all_gather(rows, mine, group=group)
    found: list[list[int]] = rows.tolist()
    return found


def largest(row: Iterable[int], group: Group) -> list[int]:
    """For each place in the ranks' rows of whole numbers, the largest."""
    most: list[int] = all_reduce(host.tensor(list(map(int, row))), "max", group=group).tolist()
    return most


# Text that must be the same on all ranks.


def source_rank(news: Sequence[bool]) -> int:
    """Which rank initialises new ranks: the first rank that is not new, or 0 if all are new."""
    return [*news, False].index(False) % len(news)


def checksum(lines: Sequence[str]) -> int:
    """A checksum of the lines, for comparing ranks."""
    return zlib.crc32("\n".join(lines).encode())


def check_same(
    lines: Sequence[str], numbers: Sequence[int], news: Sequence[bool], group: Group, what: str
) -> None:
    """Raises an error on all ranks if a new rank differs from the others.

    Ranks that continue training can do so without the new rank. If ranks differ, this is a
    collective call.

    Args:
        lines: text that must be the same on all ranks.
        numbers: the :func:`checksum` of each rank's lines.
        news: for each rank, True if it is new.
        group: the ranks.
        what: a name of the lines, for the error.

    Raises:
        ValueError: this rank is new and differs, or all are new. It names the first difference.
        pycomm.CollectiveError: another rank differs.
    """
    source = source_rank(news)
    wrong = [rank for rank, number in enumerate(numbers) if number != numbers[source]]
    if not wrong:
        return
    difference = _first_difference(lines, source, wrong[0], group)
    message = f"{what} must be the same on all ranks: {difference}"
    if all(news) or group.rank in wrong:
        raise ValueError(message)
    raise CollectiveError(message, rank=wrong[0], operation="regroup")


def _first_difference(lines: Sequence[str], source: int, other: int, group: Group) -> str:
    """Describes on all ranks the first line in which ranks `other` and `source` differ."""
    theirs = _broadcast_text("\n".join(lines), source, group).split("\n")
    pairs = itertools.zip_longest(lines, theirs, fillvalue="nothing")
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    found = f"rank {group.rank} has {here}, but rank {source} has {there}"
    return _broadcast_text(found, other, group)


def _broadcast_text(text: str, source: int, group: Group) -> str:
    data = host.tensor(list(text.encode()), dtype=torch.uint8)
    length = host.tensor([len(data)])
    broadcast(length, source, group=group)
    if group.rank != source:
        data = host.empty(int(length), dtype=torch.uint8)
    broadcast(data, source, group=group)
    return bytes(data.tolist()).decode()


# Compares tensors between ranks.

_BELOW_ANY = -(1 << 32)  # less than any checksum

STEPPED_BY_SOME = (
    "the ranks' parameters differ: only some of them took a step before the group failed; ask "
    "should_commit() before every step, or load a checkpoint"
)


def tensor_checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of the elements' bits, in 32 bits."""
    crc = 0
    for tensor in tensors:
        data = tensor.reshape(-1).contiguous().view(torch.uint8).cpu()
        crc = zlib.crc32((ctypes.c_char * data.numel()).from_address(data.data_ptr()), crc)
    return crc


def differ(buffers: Iterable[torch.Tensor], group: Group, counts: bool = True) -> bool:
    """True if tensors differ between the ranks of a group; a collective call.

    Args:
        buffers: this rank's tensors.
        group: the group.
        counts: False excludes this rank from the comparison.
    """
    crc = tensor_checksum(buffers)
    most, least = largest((crc, -crc) if counts else (_BELOW_ANY, _BELOW_ANY), group)
    return most != -least


# Gives all ranks the same model when a wrapper is made, or when it continues with another group.


class Survival(Protocol):
    """Moves sharded optimizer states to another group: ShardSurvival in survival.py."""

    def agree(self) -> None:
        """Finds out which ranks have which parts; all ranks must call this."""

    def undo_steps(self) -> None:
        """Undoes steps that do not count; all ranks must call this."""


def sync_initial_state(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: HookState,
    group: Group,
    survival: Survival | None,
    is_new: bool,
    options: Mapping[str, object],
) -> None:
    """Makes all ranks begin with the same parameters and buffers; a collective call.

    Args:
        module: this rank's module.
        exchanged: the parameters that the wrapper exchanges.
        state: the wrapper's state.
        group: new ranks, which make a wrapper, and old ranks, which continue with theirs.
        survival: moves the sharded optimizer states; None without sharding.
        is_new: True on new ranks, which get the model of the first old rank.
        options: the wrapper's options, which must be the same on all ranks.

    Raises:
        ValueError: models or options differ, or there are old ranks and a Sharding has a group of
            its own; on all ranks. If models differ, old ranks raise CollectiveError instead.
        RuntimeError: the old ranks' parameters differ; on all ranks.
        pycomm.CollectiveError: as in :meth:`Survival.agree`.
    """
    parameters = [parameter for _, parameter in common_parameters(module)]
    tensors = [*parameters, *(buffer for _, buffer in common_buffers(module))]
    lines = _describe(module, exchanged, state, options)
    mine = int(is_new), int(bool(options["has_group"])), checksum(lines)
    newcomers, owning, sums = zip(*gather_rows(mine, group), strict=True)
    news = list(map(bool, newcomers))
    others = not all(news)
    if others and any(owning):
        raise ValueError(
            "a Sharding with a group of its own cannot go on with another group: make a new wrapper"
        )
    if any(news):
        check_same(lines, sums, news, group, "module and options")
    if others:
        if survival is not None:
            survival.agree()
        state.regroup(group)
        tensors = [each for each in tensors if not state.exchanges_parameter(each)]
        if survival is not None:
            survival.undo_steps()
        if state.gradient_group is not None:  # else each rank has its own parameters
            flat = (p.detach().contiguous().view(-1) for p in parameters if not is_new)
            if differ(flat, group, counts=not is_new):
                raise RuntimeError(STEPPED_BY_SOME)
    if any(news):
        broadcast_all(tensors, source_rank(news), group, receives=is_new, keeps_equal=True)


def _describe(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: HookState,
    options: Mapping[str, object],
) -> list[str]:
    """Text that must be the same on all ranks: a line per option, parameter and buffer."""
    named = [*common_parameters(module), *common_buffers(module)]
    chosen = set(map(id, exchanged))
    lines = [f"{name}={value!r}" for name, value in options.items()]
    for name, (_, tensor) in zip(bare_names([name for name, _ in named]), named, strict=True):
        lines.append(describe_tensor(name, tensor))
        if isinstance(tensor, nn.Parameter) and id(tensor) not in chosen:
            lines[-1] += ", frozen"
        if id(tensor) in chosen:
            lines[-1] += ", uncompressed" if state.sends_dense(tensor) else ", compressed"
    return lines
