"""Loops over batches that take the same number of steps on all ranks."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from pycomm._init import resolve_group
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group

_Batch = TypeVar("_Batch")


def even_batches(
    loader: Iterable[_Batch], group: Group | None = None
) -> Iterator[tuple[_Batch, float]]:
    """Yields as many batches on every rank as on the rank that has most, with their weights.

    .. code-block:: python

        for batch, weight in pycomm.even_batches(loader):
            loss_of(model(batch, weight=weight)).backward()  # model: pycomm.DataParallel
            optimizer.step()

    A rank whose `loader` has ended gets its last batch again, the same object, with weight 0, until
    all ranks' loaders have ended. So all ranks take every step, and only ranks with batches count
    in the mean. The weight concerns gradients only: a repeated forward still updates the running
    statistics of BatchNorm, for example.

    Before each batch, ranks exchange a few bytes. Between two batches nothing is under way, so a
    loop may be left early if all ranks leave it after the same batch.

    Args:
        loader: this rank's batches, at least one; its length need not be known.
        group: the ranks that take the steps; by default the default group.

    Yields:
        The batch and its weight: 1.0, or 0.0 if the batch is a repetition.

    Raises:
        TypeError: `group` is no group.
        ValueError: some ranks have no batch; on all ranks.
        RuntimeError: other ranks' loaders have raised an error, or other ranks have left the loop
            and begun another one.
        Exception: this rank's loader has raised it.
        pycomm.CollectiveError: as in :func:`pycomm.all_reduce`.
    """
    return _even_batches(loader, resolve_group(group))


class _State(enum.IntEnum):
    """What a rank's loader has done."""

    YIELDED = 0
    ENDED = 1
    RAISED = 2


def _even_batches(loader: Iterable[_Batch], group: Group) -> Iterator[tuple[_Batch, float]]:
    batches = itertools.chain.from_iterable([loader])  # calls iter() with the first next()
    for number in itertools.count():
        group._keep_promise()  # a rank may have caught an error while others wait in backward
        state = _State.YIELDED
        try:
            batch = next(batches)
        except StopIteration:
            state = _State.ENDED
        except Exception:
            with contextlib.suppress(RuntimeError):  # the loader's error says more
                _exchange(_State.RAISED, number, group)
            raise
        states = _exchange(state, number, group)
        if raised_on := _ranks_with(_State.RAISED, states):
            raise RuntimeError(f"loader has raised an error on ranks {raised_on} of {group.size}")
        ended_on = _ranks_with(_State.ENDED, states)
        if ended_on and number == 0:
            raise ValueError(
                f"loader must have a batch on every rank, got none on ranks {ended_on} of "
                f"{group.size}"
            )
        if len(ended_on) == group.size:
            return
        yield batch, float(state is _State.YIELDED)


def _ranks_with(state: _State, states: list[int]) -> list[int]:
    return [rank for rank, other in enumerate(states) if other == state]


def _exchange(state: _State, number: int, group: Group) -> list[int]:
    """All ranks' states before the batch of this number.

    Raises:
        RuntimeError: ranks have come to batches of different numbers; on all ranks.
    """
    words = torch.zeros(group.size + 2, dtype=torch.int64, device="cpu")
    words[group.rank] = state
    words[-2], words[-1] = number, -number
    all_reduce(words, "max", group=group)
    *states, last, first = words.tolist()
    if last != -first:
        raise RuntimeError(
            f"ranks are in different loops over even_batches(), at batches {-first} and {last}: "
            "leave a loop early on all ranks after the same batch, or on none"
        )
    return states
