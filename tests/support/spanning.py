"""Processes of one node that behave as processes of several nodes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import helpers
import torch

import pycomm


def pretend(node: str) -> None:
    """From now on this process behaves as a process of that node."""
    os.environ["PYCOMM_NODE"] = node


def names(nodes: list[int] | str) -> str:
    """A letter for each rank's node: ``[2, 1]`` is ``"aab"``; ``"aba"`` is itself."""
    if isinstance(nodes, str):
        return nodes
    return "".join(letter * count for letter, count in zip("abcd", nodes, strict=False))


def member(
    rank: int, size: int, store: str, nodes: str, function: Callable[..., Any], options: dict,
    *args: Any,
) -> Any:  # fmt: skip
    """For :class:`helpers.Ranks`: ``function(group, *args)`` in a group that spans nodes."""
    pretend(nodes[rank])
    return helpers.in_group(rank, size, store, function, options, *args)


def run(
    nodes: list[int] | str, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Results of ``function(group, *args)`` on every rank; `options` are ``pycomm.init``'s."""
    nodes = names(nodes)
    return helpers.run_ranks(len(nodes), member, nodes, function, options, *args)


def ranks(
    nodes: list[int], function: Callable[..., Any], *args: Any, **options: Any
) -> helpers.Ranks:
    """The processes, which tests can kill or stop."""
    nodes = names(nodes)
    return helpers.Ranks(len(nodes), member, nodes, function, options, *args)


def shrink(group: pycomm.Group, timeout: float | None = None) -> tuple[int, ...]:
    """The ranks of the smaller group, once all of them have met in it.

    If a rank ends just when it has seen that the smaller group is complete, a rank that has not
    seen that yet may take it for dead, and shrink the group again.
    """
    smaller = group.shrink(timeout)
    pycomm.barrier(group=smaller)
    return smaller.ranks


def operate_until_failure(group: pycomm.Group) -> pycomm.CollectiveError:
    """Calls all-reduces until one fails; returns its error."""
    for count in itertools.count(1000):
        try:
            pycomm.all_reduce(torch.ones(count), group=group)
        except pycomm.CollectiveError as error:
            return error
    raise AssertionError


def train(
    group: pycomm.Group,
    loser: int,
    leave: Callable[[pycomm.Group], None],
    device: str = "cpu",
) -> tuple[pycomm.Group, list[torch.Tensor]] | None:
    """Trains on three ranks, of which `loser` leaves after three steps, and then on two.

    Returns:
        The last group and the parameters, on the CPU; None on the rank that has left.
    """
    torch.manual_seed(0)
    net = torch.nn.Linear(300, 20).to(device)
    model = pycomm.DataParallel(net, compression=pycomm.Int8(), group=group)
    optimizer, step = torch.optim.Adam(net.parameters(), lr=0.01), 0
    while step < 8:
        try:
            if model.comm_state.group is not group:
                model.regroup(group)
            model(torch.randn(8, 300).to(device)).square().mean().backward()
            commits = model.should_commit()
        except pycomm.CollectiveError:
            group = group.shrink()
            continue
        if commits:
            optimizer.step()
            step += 1
        optimizer.zero_grad()
        if step == 3 and group.size == 3 and group.rank == loser:
            leave(group)
            return None
    assert model.comm_state.stats()["residuals_lost"] == 1
    return group, [parameter.detach().cpu() for parameter in net.parameters()]
