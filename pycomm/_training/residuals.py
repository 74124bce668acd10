"""Residuals: the values that compression has not sent yet, for each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pycomm._runtime import host

if TYPE_CHECKING:
    from pycomm._training.parameters import Entry, Parameters
    from pycomm.compression import Compression
    from pycomm.group import Group

_LINE = 16  # elements
FORMAT = 2


class Residuals:
    """One fp32 tensor per kind ("residual", with momentum also "velocity"), for all parameters.

    A parameter's part does not depend on buckets, so nothing moves when buckets change.

    Args:
        entries: the parameters that are compressed.
        kinds: the kinds to keep.
        restorable: also keep the values from before a step.
    """

    def __init__(self, entries: Iterable[Entry], kinds: Sequence[str], restorable: bool) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._begin: dict[str, int] = {}
        count = 0
        for entry in self._entries.values():
            self._begin[entry.name] = count
            count += -(-entry.numel // _LINE) * _LINE
        self._flat = {kind: host.zeros(count, dtype=torch.float32) for kind in kinds}
        kept = count if restorable else 0
        self._before = {kind: host.zeros(kept, dtype=torch.float32) for kind in kinds}
        self._scale: torch.Tensor | None = None  # in the step that may have to be undone

    def __bool__(self) -> bool:
        return bool(self._flat)

    @property
    def kinds(self) -> list[str]:
        """The kinds that are kept."""
        return list(self._flat)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that this holds."""
        return [*self._flat.values(), *self._before.values()]

    def lie_in(self, flat: torch.Tensor, begins: Mapping[str, int]) -> None:
        """Moves residuals to other memory.

        Args:
            flat: the memory, fp32.
            begins: where each parameter's part begins in it.
        """
        entries = self._entries.values()
        parts = [self.of(entry, "residual") for entry in entries]
        copies = [self.before(entry, "residual") for entry in entries]
        self._begin = {name: begins[name] for name in self._entries}
        self._flat["residual"] = flat.zero_()
        if self._before["residual"].numel():
            self._before["residual"] = torch.zeros_like(flat)
        for entry, part, copy in zip(entries, parts, copies, strict=True):
            self.of(entry, "residual").copy_(part)
            if copy is not None and (before := self.before(entry, "residual")) is not None:
                before.copy_(copy)

    def note_before(self, begin: int, end: int) -> None:
        """Copies a range of what :meth:`lie_in` has moved, if copies are kept."""
        before = self._before["residual"]
        if before.numel():
            before[begin:end].copy_(self._flat["residual"][begin:end])

    def to(self, device: torch.device) -> None:
        """Moves everything, before its first use."""
        for tensors in (self._flat, self._before):
            for kind, tensor in tensors.items():
                tensors[kind] = tensor.to(device)

    def of(self, entry: Entry, kind: str) -> torch.Tensor:
        """A parameter's part, flat."""
        return self._part(self._flat[kind], entry)

    def before(self, entry: Entry, kind: str) -> torch.Tensor | None:
        """The copy of a parameter's part from before a step; None if nothing is restorable."""
        whole = self._before[kind]
        return self._part(whole, entry) if whole.numel() else None

    def find(self, name: str, kind: str = "residual") -> torch.Tensor:
        """A parameter's part by name, in the parameter's shape."""
        if kind not in self._flat or name not in self._entries:
            raise ValueError(
                f"name must be one of the parameters with a {kind}, {list(self._begin)}, "
                f"got {name!r}"
            )
        entry = self._entries[name]
        return entry.view(self.of(entry, kind))

    def views(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Residuals of the named parameters, where they exist, in the parameters' shapes."""
        return {name: self.find(name) for name in names if name in self._entries}

    def reorder(self, entry: Entry, strides: tuple[int, ...]) -> None:
        """Converts a parameter's parts to another memory format."""
        wholes = [whole for whole in self.tensors() if whole.numel() and entry.name in self._begin]
        parts = [self._part(whole, entry) for whole in wholes]
        values = [entry.view(part).clone() for part in parts]
        entry.strides = strides
        for part, value in zip(parts, values, strict=True):
            entry.view(part).copy_(value)

    def norm(self) -> float:
        """The Euclidean norm of all residuals."""
        if "residual" not in self._flat:
            return 0.0
        return float(torch.linalg.vector_norm(self._flat["residual"], dtype=torch.float64))

    def begin_step(self, scale: torch.Tensor) -> None:
        """Records the scale of this step's gradients for :meth:`settle`."""
        if self:
            self._scale = scale.clone()

    def settle(self, scale: torch.Tensor | None) -> None:
        """Restores residuals if the step before has overflowed, which has made the scale smaller.

        The optimizer has then skipped that step, so the sent values were not used. As long as the
        scale has not changed, it may still become smaller. On CUDA the host does not wait for the
        comparison.
        """
        noted = self._scale
        if noted is None or scale is None:
            return
        if noted.device.type == "cpu":
            if float(scale) < float(noted):
                self._scale = None
                for kind, before in self._before.items():
                    self._flat[kind].copy_(before)
            return
        for kind, before in self._before.items():
            flat = self._flat[kind]
            torch.where(scale < noted, before, flat, out=flat)

    def undo_exchange(self) -> None:
        """Restores the values from before the last exchange; without copies, all become zero."""
        for kind, flat in self._flat.items():
            before = self._before[kind]
            flat.copy_(before) if before.numel() else flat.zero_()

    def keep_before(self) -> bool:
        """From now on keeps the values from before each exchange; False if it already does."""
        begins = [kind for kind, before in self._before.items() if not before.numel()]
        for kind in begins:
            self._before[kind] = torch.zeros_like(self._flat[kind])
        return bool(begins)

    def copy(self) -> dict[str, torch.Tensor]:
        """Copies of everything, for :meth:`restore`."""
        return {kind: flat.clone() for kind, flat in self._flat.items()}

    def restore(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Restores the result of :meth:`copy`."""
        for kind, flat in self._flat.items():
            flat.copy_(copies[kind])

    def dump(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies by kind and name, in the parameters' shapes."""
        return {kind: self._split(flat) for kind, flat in self._flat.items()}

    def gather(self, group: Group) -> list[dict[str, dict[str, torch.Tensor]]]:
        """Every rank's :meth:`dump` on rank 0, and an empty list elsewhere. A collective call."""
        from pycomm.p2p import OWN_TAG, recv, send

        if group.rank != 0:
            for flat in self._flat.values():
                send(flat, 0, tag=OWN_TAG, group=group)
            return []
        everyone, theirs = [self.dump()], self.copy()
        for rank in range(1, group.size):
            for flat in theirs.values():
                recv(flat, rank, tag=OWN_TAG, group=group)
            everyone.append({kind: self._split(flat) for kind, flat in theirs.items()})
        return everyone

    def load(self, dumps: Sequence[dict[str, Any]]) -> None:
        """Loads the mean of dumps, added in their order. A single dump is loaded bit for bit."""
        for dump in dumps:
            self._check(dump)
        for kind in self._flat:
            for name in self._entries:
                part = self.find(name, kind)
                part.copy_(dumps[0][kind][name])
                for other in dumps[1:]:
                    part.add_(other[kind][name].to(part.device))
                if len(dumps) > 1:
                    part.div_(len(dumps))
        self._scale = None

    def check_owner(self, owner: tuple[int, int], here: tuple[int, int]) -> None:
        """Raises ValueError for another rank's residuals; `owner` and `here` are (rank, size)."""
        if self and owner != here:
            raise ValueError(
                "residuals must be this rank's own: they belong to rank {} of {}, this is rank {} "
                "of {}. A state_dict(gathered=True) can be loaded on every rank of any number of "
                "ranks".format(*owner, *here)
            )

    def _part(self, whole: torch.Tensor, entry: Entry) -> torch.Tensor:
        begin = self._begin[entry.name]
        return whole[begin : begin + entry.numel]

    def _split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: entry.view(self._part(flat, entry)).clone()
            for name, entry in self._entries.items()
        }

    def _check(self, dump: dict[str, Any]) -> None:
        """Raises ValueError for a dump of another model or of another kind of state."""
        if dump.keys() != self._flat.keys():
            raise ValueError(
                f"state_dict must have this state's entries, {self.kinds}, got {list(dump)}"
            )
        for kind in self._flat:
            shapes = {name: tuple(tensor.shape) for name, tensor in dump[kind].items()}
            wanted = {name: tuple(entry.shape) for name, entry in self._entries.items()}
            for name in wanted.keys() | shapes.keys():
                if wanted.get(name) != shapes.get(name):
                    raise ValueError(
                        f"state_dict must be of this model: {kind} of {name!r} has shape "
                        f"{shapes.get(name, 'none')}, the parameter {wanted.get(name, 'none')}"
                    )


def residuals_for(
    compression: Compression | None, parameters: Parameters, *, feedback: bool, restorable: bool
) -> Residuals:
    """Makes the residuals of a model's parameters."""
    kinds = []
    if compression is not None and feedback and parameters.known:
        kinds = ["residual"] + (["velocity"] if compression.momentum else [])
    elif compression is not None and compression.momentum:
        raise ValueError("params and feedback must be given if the compression has momentum")
    entries = parameters.entries.values() if kinds else ()
    return Residuals([entry for entry in entries if not entry.dense], kinds, restorable)
