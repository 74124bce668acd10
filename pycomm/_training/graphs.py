"""Finds the tensors in a module's outputs, and searches autograd's graph."""

from __future__ import annotations

import collections
import copyreg
import types
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pycomm._runtime.torch_private import pytree

# Types that refer to many objects, but to no outputs.
_NO_OUTPUTS = (nn.Module, type, types.ModuleType, types.FunctionType)
_PLAIN = (str, bytes, int, float, complex, types.NoneType)
_MOST_OBJECTS = 10_000


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's outputs: in containers, and in attributes of the first objects."""
    seen: set[int] = set()
    ahead = collections.deque([outputs])
    while ahead:
        for leaf in pytree.tree_leaves(ahead.popleft()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif (
                len(seen) < _MOST_OBJECTS
                and not isinstance(leaf, _PLAIN)
                and id(leaf) not in seen
                and not isinstance(leaf, _NO_OUTPUTS)
            ):
                seen.add(id(leaf))
                ahead.append(_attributes(leaf))


def _attributes(leaf: object) -> list[Any]:
    slots = copyreg._slotnames(type(leaf))  # type: ignore[attr-defined]
    found = [getattr(leaf, name) for name in slots if hasattr(leaf, name)]
    return [*found, *getattr(leaf, "__dict__", {}).values()]


def leads_to(node: Node, parameters: Container[int]) -> bool:
    """True if a gradient that enters the graph at `node` could reach one of the parameters."""
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
