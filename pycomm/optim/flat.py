"""Parameters, gradients and states side by side in flat buffers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch

from pycomm._runtime.host import huge_page_zeros, huge_page_zeros_like
from pycomm._training.flat import Layout, Piece, home_of, place_of
from pycomm._training.parameters import dense_strides, known_of

# An optimizer's state buffers, by the piece whose layout they share, the state's name and its type.
# Buffers live as long as the piece: a model that is moved and flattened again gets new buffers.
Buffers = weakref.WeakKeyDictionary[Piece, dict[tuple[str, torch.dtype], torch.Tensor]]


class FlatParameters:
    """Flat buffers: a pair (parameters, gradients) for every type and device.

    A wrapped module has the wrapper's buffers.

    Attributes:
        padding: the share of the buffers that these parameters do not use.
    """

    def __init__(self, pieces: Sequence[Piece], used: int) -> None:
        self._pieces = pieces
        total = sum(len(piece.gradients) for piece in pieces)
        self.padding = 1 - used / total if total else 0.0

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The buffers of parameters."""
        return [piece.parameters for piece in self._pieces if piece.parameters is not None]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The buffers of gradients, at the same offsets; undefined where a gradient is None."""
        return [piece.gradients for piece in self._pieces]


def flatten(params: Iterable[torch.Tensor]) -> FlatParameters:
    """Moves parameters into flat buffers. The parameter objects stay the same.

    Gradients lie at the same offsets of buffers of their own, and so do the states of optimizers
    that are made afterwards. If a :class:`pycomm.DataParallel` keeps the gradients in the window,
    they stay there, and parameters follow their order. Parameters that do not require grad stay
    where they are.

    Args:
        params: parameters of any types and devices, such as ``model.parameters()``.

    Returns:
        The buffers.

    Raises:
        TypeError: `params` are not tensors.
        ValueError: one of them is not a leaf, is not dense, has been flattened already, or shares
            memory with another.
    """
    found = _checked(params)
    new = Layout([param for param in found if place_of(param) is None], huge_page_zeros)
    places = [place_of(param) or new[param] for param in found]
    for param, place in zip(found, places, strict=True):
        place.take_in(param)
    return FlatParameters(
        list(dict.fromkeys(place.piece for place in places)), sum(p.numel() for p in found)
    )


def zeros_for(
    buffers: Buffers | None, param: torch.Tensor, name: str, dtype: torch.dtype
) -> torch.Tensor:
    """A state of zeros; for a flattened parameter, a view of the optimizer's buffer."""
    # A rank's part of a sharded parameter does not lie in the place of its states.
    place = known_of(param).states_place or home_of(param)
    if buffers is None or place is None:
        return huge_page_zeros_like(param, dtype)
    own = buffers.setdefault(place.piece, {})
    if (name, dtype) not in own:
        own[name, dtype] = huge_page_zeros(
            len(place.piece.gradients), dtype, place.piece.kind.device
        )
    return place.of(own[name, dtype], param).zero_()


def _checked(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Checks the parameters, and returns those that require gradients, each once."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be tensors, such as model.parameters(), got a single one")
    found = list(dict.fromkeys(params))
    for param in found:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"params must be tensors, such as model.parameters(), got {type(param).__name__}"
            )
    found = [param for param in found if param.requires_grad]
    for param in found:
        shape = f"one of shape {tuple(param.shape)}"
        if not param.is_leaf:
            raise ValueError(f"params must be leaves, got {shape} that was computed")
        if param.layout != torch.strided or dense_strides(param) != param.stride():
            raise ValueError(f"params must be dense, got {shape}")
        if home_of(param) is not None:
            raise ValueError(f"params must not have been flattened before, got {shape} that has")
    ordered = sorted(found, key=lambda param: (str(param.device), param.data_ptr()))
    for one, other in itertools.pairwise(ordered):
        end = one.data_ptr() + one.nbytes
        if one.device == other.device and one.data_ptr() <= other.data_ptr() < end:
            raise ValueError(
                f"params must not share memory without being the same, got shapes "
                f"{tuple(one.shape)} and {tuple(other.shape)}"
            )
    return found
