"""How ranks agree on what must be the same on all of them, also if some have just joined."""

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
    """The rank that gives new ones what they need: the first that is not new, if there is one."""
    return [*news, False].index(False) % len(news)


def checksum(lines: Sequence[str]) -> int:
    """A number that is the same on two ranks if their lines are."""
    return zlib.crc32("\n".join(lines).encode())


def check_same(
    lines: Sequence[str], numbers: Sequence[int], news: Sequence[bool], group: Group, what: str
) -> None:
    """Raises an error on all ranks if one that is new differs from the others.

    Ranks that go on with what they have need only leave out one that is new. If ranks differ, this
    is a collective call.

    Args:
        lines: what must be the same on all ranks, in words.
        numbers: the :func:`checksum` of each rank's lines.
        news: True for ranks that are new.
        group: the ranks.
        what: whose lines they are.

    Raises:
        ValueError: this rank is new and differs, or all are new. It names the first difference.
        pycomm.CollectiveError: another one differs.
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
    """The first line that rank `other` has otherwise than rank `source`, on all ranks."""
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


# Whether tensors are the same on all ranks.

_BELOW_ANY = -(1 << 32)  # checksum

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
    """True if these elements are not the same on all ranks of a group; all must call this.

    Args:
        buffers: the elements.
        group: the group.
        counts: False leaves this rank out.
    """
    crc = tensor_checksum(buffers)
    most, least = largest((crc, -crc) if counts else (_BELOW_ANY, _BELOW_ANY), group)
    return most != -least


# The beginning of a wrapper, or of its way with another group: all ranks have the same model.


class Survival(Protocol):
    """What becomes of sharded states in another group: ShardSurvival in survival.py."""

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
        exchanged: those of its parameters that the wrapper exchanges.
        state: its wrapper's state.
        group: the ranks: those that make a wrapper, and those that go on with theirs.
        survival: of the wrapper's sharded states, if it shards.
        is_new: True on the former, which get the model of the first of the latter.
        options: the wrapper's options, which must be the same on all ranks.

    Raises:
        ValueError: models are not alike; or states have a group of their own, and ranks go on. Each
            is raised on all ranks, but models that differ as CollectiveError where ranks go on.
        RuntimeError: parameters of ranks that go on differ; on all ranks.
        The errors of :meth:`Survival.agree`.
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
        if state.gradient_group is not None:  # else ranks have parameters of their own
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
    """What must be the same on all ranks, in words: a line per option, parameter and buffer."""
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
