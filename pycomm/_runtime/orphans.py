"""Keeps the tensors of running operations alive after the caller has dropped their handles."""

from __future__ import annotations

from typing import Protocol


class Running(Protocol):
    """An operation that uses the memory of tensors until it has completed."""

    def completed(self) -> bool: ...


_held: dict[int, tuple[Running, tuple[object, ...]]] = {}


def adopt(operation: Running, tensors: tuple[object, ...]) -> None:
    """Holds `tensors` until `operation` has completed."""
    # Each step is atomic: other threads and the garbage collector may run in between.
    _held[id(operation)] = (operation, tensors)
    for key, (old, _) in list(_held.items()):
        if old.completed():
            _held.pop(key, None)
