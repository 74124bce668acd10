"""Sharded steps without a wrapper and backwards, for ranks that are threads on one GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from optimizing import Case, gradients, parameters

import pycomm
from pycomm._training.shards import Shards

SHAPES = ((33, 7), (5000,), (64, 80), (0, 3), (1,), (1024,), (300, 100))


def scaled_step(optimizer: Any) -> None:
    """A step that unscales by 4 and looks for infinities."""
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    optimizer.found_inf = None
    optimizer.step()


def steps(group: pycomm.Group, case: Case, device: str, count: int = 3) -> list[Any]:
    """Takes sharded steps; returns this rank's parameters, states, and each step's norm.

    The gradients of the second step have an infinity.
    """
    params = [
        torch.nn.Parameter(p.detach().to(device)) for p in parameters(case.dtype, shapes=SHAPES)
    ]
    for param in params:
        param.grad_dtype = case.grad_dtype or case.dtype
    shards = Shards(params, group, None, math.inf)
    shards.assign([params])
    optimizer = case.make(params, max_norm=1.0)
    norms = []
    for step in range(count):
        drawn = gradients(params, 10 * step + group.rank, case.grad_dtype)
        if step == 1 and group.rank == group.size - 1:
            drawn[1][7] = float("inf")
        for param, gradient in zip(params, drawn, strict=True):
            place = shards.layout[param]
            view = place.of(place.piece.gradients, param)
            view.copy_(gradient)
            place.piece.give(param, view)
        shards.note_backward(params)
        scaled_step(optimizer)
        norms += [optimizer.grad_norm, optimizer.found_inf]
    states = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    return [tensor.detach().cpu() for tensor in (*params, *states, *norms)]


def steps_of_the_whole(case: Case, ranks: int, count: int = 3) -> list[torch.Tensor]:
    """The parameters after the same steps, on averages and without shards."""
    params = parameters(case.dtype, shapes=SHAPES)
    for param in params:
        param.grad_dtype = case.grad_dtype or case.dtype
    optimizer = case.make(params, max_norm=1.0)
    for step in range(count):
        drawn = [gradients(params, 10 * step + rank, case.grad_dtype) for rank in range(ranks)]
        if step == 1:
            drawn[-1][1][7] = float("inf")
        for param, *terms in zip(params, *drawn, strict=True):
            total = terms[0].float()
            for term in terms[1:]:
                total = total + term.float()
            param.grad = (total / ranks).to(terms[0].dtype)
        scaled_step(optimizer)
    return [param.detach() for param in params]
