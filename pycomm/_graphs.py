"""A module's outputs, and what autograd's graph says about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's outputs."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def leads_to(node: Node, parameters: Container[int]) -> bool:
    """Whether a gradient that enters the graph here could get to one of these."""
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if id(getattr(node, "variable", None)) in parameters:
            return True
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return False
