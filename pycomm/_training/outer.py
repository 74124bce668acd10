"""The outer step of local SGD, and the common parameters of all ranks that it updates.

All arithmetic is elementwise, and every operation rounds separately. So ranks that begin with the
same bits and get the same mean end with the same bits, on any processor.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pycomm._training.buckets import broadcast_all, partition
from pycomm._training.comm_state import CommState
from pycomm._training.exchange import StepStatistics
from pycomm._training.parameters import Entry, Parameters

if TYPE_CHECKING:
    from pycomm.group import Group

# Exchanges that count on all surviving ranks or on none.


@contextlib.contextmanager
def on_all_or_none(state: CommState) -> Iterator[None]:
    """Surrounds exchanges whose results are used only afterwards.

    At the end all ranks decide whether the exchanges count. If the group fails before that, the
    state is restored, and can repeat the exchanges in a smaller group.
    """
    step, residuals = state.step, state._residuals.copy()
    try:
        yield
        if state.group._decides:
            state.group.should_commit()
    except BaseException:  # also if this rank is interrupted
        state._now.wait()
        state._now = StepStatistics()
        state._flying.clear()
        state._residuals.restore(residuals)
        state.step = step
        raise


# The optimizers that change parameters between two exchanges of local SGD.


class Watcher(Protocol):
    """An object that is told of steps."""

    def before_step(self, number: int) -> None:
        """Runs before each step of the optimizer with this number."""


class InnerOptimizers:
    """Optimizers of the same model.

    Args:
        given: an optimizer, or several. Wrappers of accelerate and Lightning are unwrapped.

    Raises:
        TypeError: `given` is something else.
    """

    def __init__(self, given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        several: Iterable[object] = given if isinstance(given, Iterable) else (given,)
        self._optimizers = [_unwrapped(each) for each in several]
        self._owner: dict[int, torch.optim.Optimizer] = {}  # by the parameter's id
        if not self._optimizers:
            raise TypeError("optimizer must be an optimizer or several, got none")

    def check(self, parameters: Parameters) -> None:
        """Checks that each of these parameters, and no other, is in exactly one optimizer.

        Raises:
            ValueError: they do not.
        """
        owner: dict[int, torch.optim.Optimizer] = {}
        for optimizer in self._optimizers:
            for param in _params_of(optimizer):
                if id(param) not in parameters.entries and param.requires_grad:
                    raise ValueError(
                        "params must name every parameter that the optimizer changes; one of shape "
                        f"{tuple(param.shape)} is not among them"
                    )
                if id(param) in owner:
                    name = parameters[param].name
                    raise ValueError(f"optimizer must have each parameter once, got {name} twice")
                owner[id(param)] = optimizer
        for param in parameters.tensors:
            if id(param) not in owner and param.requires_grad:
                raise ValueError(
                    f"optimizer must change all of params, but does not have "
                    f"{parameters[param].name}: pass all optimizers of the model as a list"
                )
        self._owner = owner

    def watch(self, watcher: Watcher) -> None:
        """Tells `watcher`, while it lives, before each step."""
        me = weakref.ref(watcher)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(_teller(me, number))

    def weights_of(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's weights at its optimizer's full precision; not a copy."""
        optimizer = self._of(param)
        if hasattr(optimizer, "full_weights"):
            weights: torch.Tensor = optimizer.full_weights(param)
            return weights
        return param.detach()

    def set_weights_of(self, param: torch.Tensor, weights: torch.Tensor) -> None:
        """Sets a parameter, and its optimizer's full-precision weights of it, to `weights`."""
        optimizer = self._of(param)
        if hasattr(optimizer, "set_full_weights"):
            optimizer.set_full_weights(param, weights)
        else:
            param.detach().copy_(weights)

    def _of(self, param: torch.Tensor) -> torch.optim.Optimizer:
        """The optimizer that changes a parameter; the first one if it is frozen."""
        return self._owner.get(id(param), self._optimizers[0])

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without ids, which differ for other objects."""
        return {**vars(self), "_owner": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._owner = {id(p): each for each in self._optimizers for p in _params_of(each)}


def _params_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    optimizer = given
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given!r}")
    return optimizer


def _teller(watcher: weakref.ref[Watcher], number: int) -> Callable[..., None]:
    def tell(*_: Any) -> None:
        if (alive := watcher()) is not None:
            alive.before_step(number)

    return tell


# The outer step of local SGD, and the common parameters of all ranks that it updates.

_PIECE_BYTES = 25 << 20

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Rule:
    """How the mean change becomes a step (Nesterov's, as in torch.optim.SGD).

    Attributes:
        lr: learning rate; 1 without momentum steps to the mean itself.
        momentum: factor of the previous steps.
        on_differences: exchange the changes since the last exchange, instead of parameters.
        local_residuals: each rank continues from the common parameters plus its residuals.
    """

    lr: float
    momentum: float
    on_differences: bool
    local_residuals: bool

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"outer_lr must be positive and finite, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum must be at least 0 and below 1, got {self.momentum}")


class _Piece:
    """Some parameters of one type, exchanged together: flat, in fp32 (doubles in fp64).

    Attributes:
        parameters: the parameters.
        kind: dtype and device of the flat tensors.
        count: number of elements.
        last: the parameters after the last exchange, before they were rounded to their type.
        velocity: momentum buffer of the outer steps.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], entries: Sequence[Entry]) -> None:
        self.parameters = list(parameters)
        self._entries = list(entries)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.kind: Kind = dtype, parameters[0].device
        self.count = sum(entry.numel for entry in entries)
        self.last: torch.Tensor | None = None
        self.velocity: torch.Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [entry.name for entry in self._entries]

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of each parameter's part of `flat`, in the parameter's shape, by name."""
        parts = torch.split(flat, [entry.numel for entry in self._entries])
        return {e.name: e.view(part) for e, part in zip(self._entries, parts, strict=True)}

    def snapshot(self, optimizers: InnerOptimizers, rule: Rule) -> None:
        """Records the present parameters as the common parameters of all ranks."""
        self.last, self.velocity = self._present(optimizers, rule)

    def common(
        self, optimizers: InnerOptimizers, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The common parameters and the momentum; without a snapshot, what it would record."""
        if self.last is None:
            return self._present(optimizers, rule)
        return self.last, self.velocity

    def _present(
        self, optimizers: InnerOptimizers, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype, device = self.kind
        flat = torch.empty(self.count, dtype=dtype, device=device)
        for parameter, place in zip(self.parameters, self.views(flat).values(), strict=True):
            place.copy_(optimizers.weights_of(parameter))
        return flat, torch.zeros_like(flat) if rule.momentum else None

    def contribute(
        self,
        optimizers: InnerOptimizers,
        flat: torch.Tensor,
        factor: float,
        residuals: dict[str, torch.Tensor],
    ) -> None:
        """Writes this rank's contribution, times `factor`, to `flat`."""
        starts: Iterable[torch.Tensor | None] = [None] * len(self.parameters)
        if self.last is not None:
            starts = self._starts(self.last, residuals)
        places = self.views(flat).values()
        for parameter, place, start in zip(self.parameters, places, starts, strict=True):
            weights = optimizers.weights_of(parameter)
            place.copy_(weights)
            if start is not None:
                place.sub_(start.to(weights.dtype))
        if factor != 1:
            flat.mul_(factor)

    def advance(
        self,
        optimizers: InnerOptimizers,
        rule: Rule,
        mean: torch.Tensor,
        residuals: dict[str, torch.Tensor],
    ) -> None:
        """Takes the outer step; overwrites `mean`."""
        if self.last is not None:
            if self.velocity is not None:
                self.velocity.mul_(rule.momentum).add_(mean)
                mean.add_(self.velocity * rule.momentum)
            mean = self.last.add_(mean.mul_(rule.lr))
        for parameter, start in zip(self.parameters, self._starts(mean, residuals), strict=True):
            optimizers.set_weights_of(parameter, start)

    def show(self, optimizers: InnerOptimizers, flat: torch.Tensor) -> None:
        """Gives the model these parameters."""
        for parameter, place in zip(self.parameters, self.views(flat).values(), strict=True):
            optimizers.set_weights_of(parameter, place)

    def _starts(
        self, common: torch.Tensor, residuals: dict[str, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Where this rank's optimizer begins: the common parameters, plus residuals if given."""
        for name, place in self.views(common).items():
            yield place + residuals[name].to(place.device) if name in residuals else place


class Outer:
    """The parameters that all ranks have in common, and the exchange that updates them.

    Args:
        parameters: the model's parameters.
        optimizers: change them between exchanges.
        rule: the rule of the outer step.

    Attributes:
        rule: the rule of the outer step.
    """

    def __init__(self, parameters: Parameters, optimizers: InnerOptimizers, rule: Rule) -> None:
        self._optimizers = optimizers
        self.rule = rule
        lists = partition(parameters.tensors, _PIECE_BYTES)
        self._pieces = [_Piece(members, parameters.of(members)) for members in lists]
        self._buffers: dict[_Piece, torch.Tensor] = {}
        self._checked = False  # True once ranks have compared fingerprints

    @property
    def has_snapshot(self) -> bool:
        """True if an exchange has the common parameters, or does not need them."""
        return not self.rule.on_differences or self._pieces[0].last is not None

    @torch.no_grad()
    def snapshot(self) -> None:
        """Records the present parameters as the common parameters of all ranks."""
        for piece in self._pieces:
            piece.snapshot(self._optimizers, self.rule)
        self._checked = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without working memory."""
        return {**vars(self), "_buffers": {}}

    def doubt(self) -> None:
        """Makes ranks compare fingerprints once more."""
        self._checked = False

    def fingerprint(self) -> int:
        """A hash of the common parameters; 0 if ranks have compared it already."""
        if self._checked:
            return 0
        sums = [
            int(_bits(p.last).sum(dtype=torch.int64)) for p in self._pieces if p.last is not None
        ]
        return zlib.crc32(repr(sums).encode())

    @torch.no_grad()
    def exchange(self, comm: CommState, factor: float) -> None:
        """Averages over all ranks, which have compared fingerprints, and takes the outer step.

        While a piece is being exchanged, the next one is prepared. The outer step waits for all
        pieces, so that all ranks that survive a failure have taken it, or none has.

        Args:
            comm: runs the exchange.
            factor: weight of this rank's contribution, for a mean over some ranks only; 0 if it
                does not count. It is applied before the exchange, so residuals contain it, too.
        """
        self._checked = True
        with on_all_or_none(comm):
            for piece in self._pieces:
                flat = self._buffer(piece)
                if factor:
                    piece.contribute(self._optimizers, flat, factor, self._residuals(piece, comm))
                else:
                    flat.zero_()
                comm.start(flat, piece.parameters)
            comm.finish()
        for piece in self._pieces:
            mean = self._buffer(piece)
            piece.advance(self._optimizers, self.rule, mean, self._residuals(piece, comm))

    @torch.no_grad()
    def hand_on(self, source: int, receives: bool, has_snapshot: bool, group: Group) -> None:
        """Sends the common parameters and the momentum to new ranks; a collective call.

        Args:
            source: the rank that sends. Without a snapshot, it sends its present parameters.
            receives: True on a new rank.
            has_snapshot: True if any rank that is not new has a snapshot.
            group: the ranks.
        """
        receives = receives and group.rank != source
        for piece in self._pieces if receives else ():
            piece.last = piece.velocity = None
        if has_snapshot and not self.has_snapshot:
            self.snapshot()
        for piece in self._pieces:
            if piece.last is None:
                flat = self._buffer(piece)
                piece.contribute(self._optimizers, flat, 1.0, {})
            else:
                flat = piece.last
            kept = [flat] if piece.velocity is None else [flat, piece.velocity]
            broadcast_all(kept, source, group, receives)
            if receives:
                piece.show(self._optimizers, flat)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Gives the model the common parameters; afterwards it has its own again."""
        with torch.no_grad():
            kept = [
                (parameter, self._optimizers.weights_of(parameter).clone())
                for piece in self._pieces
                for parameter in piece.parameters
            ]
        try:
            with torch.no_grad():
                for piece in self._pieces:
                    if piece.last is not None:
                        piece.show(self._optimizers, piece.last)
            yield
        finally:
            with torch.no_grad():
                for parameter, weights in kept:
                    self._optimizers.set_weights_of(parameter, weights)

    @torch.no_grad()
    def dump(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies by name.

        They have the same names before and after the first snapshot, because
        torch.distributed.checkpoint loads only what a new state's dict already names.
        """
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for piece in self._pieces if self.rule.on_differences else ():
            last, velocity = piece.common(self._optimizers, self.rule)
            for kind, flat in (("last", last), ("velocity", velocity)):
                if flat is not None:
                    views = piece.views(flat)
                    kept.setdefault(kind, {}).update({n: v.clone() for n, v in views.items()})
        return kept

    def load(self, dump: dict[str, Any]) -> None:
        """Restores the result of :meth:`dump`.

        Raises:
            ValueError: the dump is from another model or another rule.
        """
        self.check(dump)
        for piece in self._pieces:
            piece.last = piece.velocity = None
            if dump:
                piece.snapshot(self._optimizers, self.rule)
            for kind, saved in dump.items():
                for name, place in piece.views(getattr(piece, kind)).items():
                    place.copy_(saved[name])
        self._checked = False

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that this holds."""
        kept = [tensor for piece in self._pieces for tensor in (piece.last, piece.velocity)]
        return [*self._buffers.values(), *(tensor for tensor in kept if tensor is not None)]

    def check(self, dump: dict[str, Any]) -> None:
        """Raises ValueError for a dump from another model or another rule."""
        kinds = [["last"], ["last", "velocity"]][self.rule.momentum > 0]
        if dump and (not self.rule.on_differences or list(dump) != kinds):
            wanted = kinds if self.rule.on_differences else []
            raise ValueError(
                f"state_dict must have this state's entries, {wanted}, got {list(dump)}"
            )
        shapes = {e.name: tuple(e.shape) for piece in self._pieces for e in piece._entries}
        for kind, saved in dump.items():
            found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
            if found != shapes:
                wrong = sorted(dict(found.items() ^ shapes.items()))
                raise ValueError(
                    f"state_dict must be of this model: its {kind} differs in name or shape: "
                    f"{', '.join(wrong)}"
                )

    def _buffer(self, piece: _Piece) -> torch.Tensor:
        """The memory for a piece's contribution, and then for the mean."""
        if piece not in self._buffers:
            dtype, device = piece.kind
            self._buffers[piece] = torch.empty(piece.count, dtype=dtype, device=device)
        return self._buffers[piece]

    def _residuals(self, piece: _Piece, comm: CommState) -> dict[str, torch.Tensor]:
        """The residuals that this rank adds to the common parameters; exchanges may move them."""
        return comm.residuals(piece.names) if self.rule.local_residuals else {}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
