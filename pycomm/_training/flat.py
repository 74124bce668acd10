"""Flat memory: parameters side by side, with their gradients and states at the same offsets.

A layout assigns places to parameters, and memory to their gradients (for the wrapper, in the
window). Flattened parameters themselves lie in these places, and stay there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from pycomm._runtime.host import huge_page_zeros
from pycomm._runtime.torch_private import fix_weak_reference, not_compiled
from pycomm._training.parameters import dense_strides, known_of, record_of

ALIGN = 64  # elements: places begin at whole cache lines in every type, 8-bit states included

Memory = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Kind(NamedTuple):
    """The properties shared by parameters whose gradients lie together."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device


class Piece:
    """Flat memory of one kind.

    Attributes:
        kind: the kind of the parameters.
        gradients: memory for their gradients, each in its place.
        parameters: memory for flattened parameters. Without any, it is None, and places may change.
    """

    def __init__(self, kind: Kind, gradients: torch.Tensor) -> None:
        self.kind = kind
        self.gradients = gradients
        self.parameters: torch.Tensor | None = None
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # gradients here, by address
        self._apart: dict[tuple[int, torch.Size], torch.Tensor] = {}  # places as storages

    def give(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Makes the values in `view` the parameter's gradient."""
        address = view.data_ptr()
        if self.parameters is not None:  # share_memory_() frees a gradient's storage
            place = address, view.shape
            if (kept := self._apart.get(place)) is None or kept.data_ptr() != address:
                kept = self._apart[place] = with_own_storage(view)
            view = kept
        parameter.grad = gradient = view.data  # of its own, because module.to() changes it
        self._given[address] = weakref.ref(gradient)

    def put(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Moves a gradient to `view`. A missing one counts as zeros, and ``grad`` stays None."""
        gradient, address = parameter.grad, view.data_ptr()
        if gradient is not None and gradient.data_ptr() == address:
            return
        last = self._given.pop(address, None)
        if last is not None and last() is not None:
            _evict(last, address)
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient.detach())
            self.give(parameter, view)

    def clear(self) -> None:
        """Zeroes the memory of all gradients; gradients that the user holds move out first."""
        for address, given in self._given.items():
            _evict(given, address)
        self._given.clear()
        self.gradients.zero_()


def _evict(given: weakref.ref[torch.Tensor], address: int) -> None:
    """Moves away a gradient that the user has kept, before its memory is overwritten."""
    if (kept := given()) is None:
        return
    fix_weak_reference(kept)
    if kept.data_ptr() == address:
        kept.data = kept.detach().clone()


class Place(NamedTuple):
    """A parameter's present or possible place in flat memory, and its memory format."""

    piece: Piece
    offset: int
    strides: tuple[int, ...]

    def of(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A view of this place in a buffer, with the parameter's shape and memory format."""
        part = buffer[self.offset : self.offset + like.numel()]
        return part.as_strided(like.shape, self.strides)

    def holds(self, parameter: torch.Tensor) -> bool:
        """True if the parameter lies here."""
        whole = self.piece.parameters
        if whole is None or (self.piece.kind, self.strides) != (
            kind_of(parameter),
            parameter.stride(),
        ):
            return False
        return parameter.data_ptr() == self._address(whole) or parameter.numel() == 0

    def holds_gradient(self, gradient: torch.Tensor) -> bool:
        """True if this gradient lies here."""
        return gradient.data_ptr() == self._address(self.piece.gradients)

    def take_in(self, parameter: torch.Tensor) -> None:
        """Moves a parameter here, and from now on also its gradients."""
        piece = self.piece
        if piece.parameters is None:
            length, kind = len(piece.gradients), piece.kind
            piece.parameters = huge_page_zeros(length, kind.dtype, kind.device)
        view = self.of(piece.parameters, parameter)
        parameter.data = with_own_storage(view.copy_(parameter.detach()))
        record = record_of(parameter)
        record.home = self
        if not record.has_home_hook:
            record.has_home_hook = True
            parameter.register_post_accumulate_grad_hook(settle)  # type: ignore[no-untyped-call]
        settle(parameter)

    def _address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr() + self.offset * buffer.itemsize


class Layout:
    """Places for parameters: their present places, or new ones.

    Args:
        parameters: the parameters, each once.
        memory: allocates memory for a number of gradients of a type on a device.
        keep_homes: False gives flattened parameters new places, too.
        rooms: the elements that each parameter takes, by its id; by default :func:`room`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        memory: Memory,
        keep_homes: bool = True,
        rooms: Mapping[int, int] | None = None,
    ) -> None:
        self._rooms = {id(p): room(p) for p in parameters} if rooms is None else rooms
        self._places: dict[int, Place] = {}
        lengths: dict[Kind, int] = {}
        for parameter in parameters:
            home, kind = home_of(parameter), kind_of(parameter)
            if home is not None and keep_homes:
                self._places[id(parameter)] = home
            else:
                lengths[kind] = lengths.get(kind, 0) + self.room(parameter)
        for piece in self.pieces:
            held, kind = piece.gradients, piece.kind
            piece.gradients = memory(len(held), kind.grad_dtype, kind.device).copy_(held)
        new = {
            kind: Piece(kind, memory(length, kind.grad_dtype, kind.device))
            for kind, length in lengths.items()
        }
        for parameter in parameters:
            if id(parameter) not in self._places:
                self._places[id(parameter)] = Place(
                    new[kind_of(parameter)], 0, dense_strides(parameter)
                )
            record_of(parameter).layout = weakref.ref(self)
        self.arrange(parameters)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in which the places lie."""
        return list(dict.fromkeys(place.piece for place in self._places.values()))

    def __getitem__(self, parameter: torch.Tensor) -> Place:
        return self._places[id(parameter)]

    def room(self, parameter: torch.Tensor) -> int:
        """Elements that a parameter takes, padding included."""
        return self._rooms[id(parameter)]

    def arrange(self, parameters: Sequence[torch.Tensor]) -> None:
        """Assigns places in this order, in pieces without flattened parameters, and zeroes them."""
        used = {piece: 0 for piece in self.pieces if piece.parameters is None}
        for piece in used:
            piece.clear()  # because the gaps between places are exchanged, too
        for parameter in parameters:
            piece = self[parameter].piece
            if piece in used:
                self._places[id(parameter)] = self[parameter]._replace(offset=used[piece])
                used[piece] += self.room(parameter)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory with a storage of its own, so that saves and copies hold only this view.

    torch saves and copies whole storages, and safetensors treats tensors of one storage as one.
    """
    return from_dlpack(to_dlpack(view.detach()))


def room(parameter: torch.Tensor) -> int:
    """Elements that a parameter takes, padding included; an empty one has its own place, too."""
    return -(-max(parameter.numel(), 1) // ALIGN) * ALIGN


def kind_of(parameter: torch.Tensor) -> Kind:
    """The kind that a parameter's place must have."""
    return Kind(parameter.dtype, parameter.grad_dtype or parameter.dtype, parameter.device)


def home_of(parameter: torch.Tensor) -> Place | None:
    """The place of a flattened parameter; None if it is not flattened or has been moved away."""
    place: Place | None = known_of(parameter).home
    return place if place is not None and place.holds(parameter) else None


def move_out(parameter: torch.Tensor) -> None:
    """Moves a flattened parameter to memory of its own."""
    parameter.data = parameter.detach().clone()
    record_of(parameter).home = None  # an empty parameter would still seem to lie there


def place_of(parameter: torch.Tensor) -> Place | None:
    """The place of a parameter or at least of its gradient; None if there is none."""
    home, reference = home_of(parameter), known_of(parameter).layout
    if home is not None or reference is None:
        return home
    layout: Layout | None = reference()
    place = layout[parameter] if layout is not None else None
    return place if place is not None and place.piece.kind == kind_of(parameter) else None


@not_compiled
def settle(parameter: torch.Tensor) -> None:
    """Moves a flattened parameter's gradient into its place, if it can lie there.

    This is needed because backward makes new gradients after ``zero_grad(set_to_none=True)``.
    """
    home, gradient = home_of(parameter), parameter.grad
    if home is None or gradient is None or gradient.requires_grad:
        return
    buffer = home.piece.gradients
    if buffer.is_meta:
        return
    if gradient.layout == torch.strided and gradient.dtype == buffer.dtype:
        home.piece.put(parameter, home.of(buffer, parameter))
