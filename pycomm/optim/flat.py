"""Parameters, gradients and states side by side in flat buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pycomm.optim._memory import zeros_like

Buffers = dict[tuple[int, str, torch.dtype], torch.Tensor]

ALIGN = 32  # elements: parameters begin at whole cache lines in every type

# Where a flattened parameter lies.
_homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class FlatParameters:
    """One buffer for all parameters of a type, and one for their gradients.

    Attributes:
        parameters: the buffers, by type.
        gradients: the same for gradients; each parameter's ``grad`` is a view of its place.
        padding: the share of the buffers that no parameter uses.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self._params = list(dict.fromkeys(params))
        self._offsets: dict[torch.dtype, int] = {}
        self.parameters: dict[torch.dtype, torch.Tensor] = {}
        self.gradients: dict[torch.dtype, torch.Tensor] = {}
        places = [self._place(param) for param in self._params]
        for dtype, length in self._offsets.items():
            device = next(p.device for p in self._params if p.dtype == dtype)
            self.parameters[dtype] = torch.zeros(length, dtype=dtype, device=device)
            self.gradients[dtype] = torch.zeros(length, dtype=dtype, device=device)
        for param, offset in zip(self._params, places, strict=True):
            view = view_at(self.parameters[param.dtype], offset, param)
            view.copy_(param.detach())
            param.data = view
            _homes[param] = (self, offset)
        self.zero_grad()
        used = sum(param.numel() for param in self._params)
        total = sum(self._offsets.values())
        self.padding = 1 - used / total if total else 0.0

    def zero_grad(self) -> None:
        """Zeroes all gradients at once and puts each back into its place.

        Instead of the optimizer's, after which gradients would lie elsewhere: steps stay right, but
        buffers go stale.
        """
        for gradients in self.gradients.values():
            gradients.zero_()
        for param in self._params:
            _, offset = _homes[param]
            param.grad = view_at(self.gradients[param.dtype], offset, param)

    def _place(self, param: torch.nn.Parameter) -> int:
        if param in _homes:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} has been flattened before")
        if any(p.device != param.device for p in self._params if p.dtype == param.dtype):
            raise ValueError("params must lie on one device")
        if torch.empty_like(param, device="meta").stride() != param.stride():
            raise ValueError(f"params must be dense, got stride {param.stride()}")
        offset = self._offsets.get(param.dtype, 0)
        self._offsets[param.dtype] = offset + -(-param.numel() // ALIGN) * ALIGN
        return offset


def flatten(params: Iterable[torch.nn.Parameter]) -> FlatParameters:
    """Moves parameters into flat buffers; the model that holds them does not notice.

    States of optimizers made afterwards lie at the same places of buffers of their own.
    """
    return FlatParameters(params)


def zeros_for(buffers: Buffers, param: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A state of zeros; of a flattened parameter, in its place of an optimizer's buffer."""
    if param not in _homes:
        return zeros_like(param, dtype)
    flat, offset = _homes[param]
    whole = flat.parameters[param.dtype]
    key = (whole.data_ptr(), name, dtype)
    if key not in buffers:
        buffers[key] = zeros_like(whole, dtype)
    return view_at(buffers[key], offset, param)


def view_at(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A parameter's place, in its shape and order of elements."""
    return buffer.as_strided(like.shape, like.stride(), offset)
