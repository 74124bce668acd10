"""Sharded training between nodes, of which ranks are killed at chosen moments."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import sharding
import spanning
import torch
from surviving import STEPS, Training, common_end, expect

import pycomm
from pycomm._training import replicas, shard_exchange
from pycomm._training.replicas import Replicas
from pycomm._training.survival import ShardSurvival
from pycomm.optim._shard_executors import OnSpanningShards

REMAINDER = {"dtype": torch.bfloat16, "master_weights": "remainder"}
MASTER = {"dtype": torch.bfloat16, "master_weights": "fp32", "states": "8bit"}
Deaths = Mapping[int, tuple[int, str | float]]


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str) -> None:
    """Dies after the next call of a function, also if it raises because others have died."""
    function = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            function(*args, **kwargs)
        finally:
            kill()

    setattr(owner, name, run)


def before_second_call(owner: Any, name: str) -> None:
    """Dies before this call of a function."""
    function, calls = getattr(owner, name), []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            kill()
        return function(*args, **kwargs)

    setattr(owner, name, run)


def die_at(moment: str | float, training: Training) -> None:
    """Makes this rank die in its next step, or so many seconds later and before it goes on."""
    if moment == "backward":
        training.model.module.parts[2].register_hook(kill)
    elif moment == "copying":
        Replicas.begin_step = kill
    elif moment == "publishing":  # others may have some of its new parameters
        before_second_call(shard_exchange, "launch")
    elif moment == "updated":
        after(OnSpanningShards, "run")
    elif moment in ("replicating", "sending"):  # in the first step, in another one
        after(replicas, "isend")
    elif moment == "sent":
        after(Replicas, "_send")
    elif moment == "decided":
        after(Replicas, "end_step")
    elif isinstance(moment, float):
        timer, step = threading.Timer(moment, kill), training.optimizer.step
        training.optimizer.step = lambda: (step(), timer.join())
        timer.start()


def die_in_regroup(moment: str | float) -> None:
    if moment == "restoring":
        ShardSurvival._restore = kill
    elif moment == "moving":  # its new states are whole, and others wait for it
        after(Replicas, "_send")
        replicas._open_file = kill


def survive(group: pycomm.Group, deaths: Deaths, options: dict[str, Any]) -> Any:
    """Trains until this rank is killed, or to the end.

    Args:
        group: the ranks.
        deaths: for each victim, the step and the moment of its death.
        options: those of :class:`Training`.

    Returns:
        For each loss the number of steps that count, the ranks that are left and the sizes of their
        nodes; the state.
    """
    training, number, step = Training(group, replicas=2, **options), group.rank, 0
    when, moment = deaths.get(number, (-1, ""))
    losses = [(0, group.ranks, list(map(len, group.nodes)))]
    while step < STEPS or training.model.comm_state.group is not group:
        try:
            if training.model.comm_state.group is not group:
                if when == step:
                    die_in_regroup(moment)
                training.model.regroup(group)
                losses.append((step, group.ranks, list(map(len, group.nodes))))
                continue
            if when == step:
                die_at(moment, training)
            training.backward(number, step)
            training.optimizer.step()
            step += 1
        except pycomm.CollectiveError:
            with pytest.raises((pycomm.PycommError, RuntimeError)):
                training.optimizer.step()  # must leave the copies alone
            group = group.shrink()
    return losses, training.state()


def check(nodes: list[int] | str, deaths: Deaths, **options: Any) -> list[int]:
    """Kills ranks, and compares the survivors with training from checkpoints."""
    size = len(spanning.names(nodes))
    with spanning.ranks(nodes, survive, deaths, options, timeout=30) as ranks:
        outcomes = ranks.wait_for([rank for rank in range(size) if rank not in deaths])
    losses, state = common_end(outcomes)
    steps = [(count, left) for count, left, _ in losses]
    expected = expect(steps, nodes=[counts for _, _, counts in losses], **options)
    assert sharding.difference(expected, state) is None
    return [count for count, _ in steps[1:]]
