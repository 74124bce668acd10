"""The wrapper's exchange of gradients, while backward computes them."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import operator
import types
import weakref
from collections.abc import Callable, Container, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pycomm._runtime import host
from pycomm._runtime.torch_private import not_compiled, pytree, queue_callback
from pycomm._training import step_guard
from pycomm._training.buckets import Bucket, Slab
from pycomm._training.handshake import NO_ERRORS, BackwardHandshake, Errors, Phase, compare
from pycomm._training.parameters import ParamOwnership
from pycomm.collectives import broadcast
from pycomm.errors import GroupUnusable, PycommError

if TYPE_CHECKING:
    from pycomm._training.strategy import Strategy
    from pycomm.group import Group

# Tensors in a module's outputs, and their paths in autograd's graph.

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


def _keep_promise(
    exchange: weakref.ref[Reducer], handshake: BackwardHandshake, over: weakref.ref[Group]
) -> None:
    """Catches up with the promised exchange of a wrapper, which may be gone on some ranks only."""
    reducer, group = exchange(), over()
    if reducer is not None:
        reducer.catch_up()
    elif handshake.open and group is not None:
        handshake.is_broken(group)


_version_of = operator.attrgetter("_version")


class Reducer:
    """The gradients of a module, in buckets, and their running exchange.

    Args:
        module: the module.
        parameters: the parameters that are exchanged, in the order of backward.
        strategy: exchanges buckets.
        bucket_bytes: the largest size of a bucket of several parameters.
        arrived: called with a parameter whose gradient is ready; calls :meth:`arrive`.

    Attributes:
        parameters: the parameters, in the order of the buckets.
        strategy: exchanges buckets.
        members: the same parameters, with a check that they are still this module's.
        handshake: the phase between a forward and the end of its exchange.
        has_local: True if gradients have come that no exchange has averaged since.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        strategy: Strategy,
        bucket_bytes: float,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        self.strategy, self._state = strategy, strategy.state
        self._group = strategy.state.group
        self.parameters = list(parameters)
        self._slab = Slab(self.parameters, bucket_bytes, strategy.layout)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._lay_out()
        strategy.prepare(self._buckets)
        self._ready: list[torch.Tensor] | None = []  # in the order of the first backward
        self._repeated: set[int] = set()  # ids of parameters with several gradients in a backward
        self._had_backward = False  # True once repeated parameters are known
        self.has_local = False
        self._next = 0  # the next bucket to exchange
        # Parameters that only a step changes, with their versions when the backward began.
        embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        renormed = {id(each.weight) for each in embeddings if each.max_norm is not None}
        self._stepped = [p for p in self.parameters if id(p) not in renormed]
        self._versions: list[int] = []
        self.handshake = BackwardHandshake()
        self.members = ParamOwnership(module, self.parameters, arrived)

    def promise_backward(self, inside_backward: bool) -> None:
        """Promises an exchange; see :meth:`BackwardHandshake.note_forward`."""
        self.handshake.note_forward(inside_backward)
        if (group := self._state.gradient_group) is not None:
            self._group._catch_up = functools.partial(
                _keep_promise, weakref.ref(self), self.handshake, weakref.ref(group)
            )

    def catch_up(self) -> None:
        """Takes part in the others' exchange if this rank's backward has raised."""
        if not self.handshake.open:
            return
        group = self._state.gradient_group
        if group is not None and self.handshake.is_broken(group):
            if not self.handshake.in_backward:
                # Gradients that this rank has dropped since do not matter.
                noted = self.handshake.after_averages
                if noted:
                    self.strategy.average_noted(
                        self.parameters, self.handshake.weighing is not None
                    )
                self._reset(noted)
            self._exchange_nothing(raised=True)
        self.handshake.leave_backward()

    def contribute_zeros(self) -> None:
        """Takes part in the others' exchange without a backward on this rank."""
        self._reset()
        self._exchange_nothing()

    def begin_backward(self, first: Node | None = None, forward: int | None = None) -> None:
        """Makes the running backward end with the exchange.

        The backward entered the module at `first`, an output of the forward with this number.
        """
        if first is not None:
            self.handshake.enter(forward)
        if self.handshake.phase is Phase.BACKWARD:
            return
        self.members.check_owned()
        self._complete_last()
        self._reset()
        end = functools.partial(self._end_backward, first, torch.is_grad_enabled())
        queue_callback(end)

    def reduce(self) -> None:
        """Makes all gradients whole averages, also after backwards without an exchange."""
        group = self._state.gradient_group
        self.catch_up()
        if group is not None and self.handshake.ask(group, announces=self.has_local):
            learned = self._ready, self._had_backward
            self._ready = self.handshake.weighing = None
            self._reset()
            self._exchange_rest()
            self._ready, self._had_backward = learned  # the next backward shows the order
        self.average()

    def average(self) -> None:
        """Averages gradients that are left to the step, and makes divided gradients whole."""
        self.strategy.average(self.parameters)

    def arrive(self, parameter: torch.Tensor) -> None:
        """Handles a gradient that has been accumulated."""
        phase = self.handshake.phase
        if phase is Phase.IDLE and self._state.gradient_group is not None:
            self.keep_local(parameter)
            if self._group.size > 1:
                step_guard.note(parameter)
            return
        if phase is not Phase.BACKWARD:
            # The sum with an earlier gradient counts as this backward's gradient.
            self.strategy.forget_local(parameter)
            self.begin_backward()
        if self._ready is not None:
            self._ready.append(parameter)
        bucket = self._bucket_of[id(parameter)]
        if bucket.sent:
            raise RuntimeError(
                f"gradient of a parameter of shape {tuple(parameter.shape)} came again after it "
                "had been sent: the parameter is used in more reentrant checkpoints than in the "
                "backwards before; call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if id(parameter) not in bucket.waiting:
            self._repeated.add(id(parameter))
        bucket.put(parameter)
        if self._had_backward and not bucket.waiting:
            self._start_full()

    def keep_local(self, parameter: torch.Tensor) -> None:
        """Handles a gradient of a backward without an exchange."""
        self.has_local = True
        self.strategy.keep_local(parameter)

    def _complete_last(self) -> None:
        """Averages gradients that the last backward has left to a step, before others are added."""
        if not self.strategy.has_pending(self.parameters, self.handshake.weighing is not None):
            return
        if (group := self._state.gradient_group) is not None:
            self.handshake.announce(group, after_averages=True)
            self.average()

    def _reset(self, noted: bool = False) -> None:
        """Prepares for a backward; see :meth:`Strategy.begin`."""
        self.strategy.begin(self.parameters, noted)
        self.handshake.begin_backward(self)
        self._next = 0
        self._versions = list(map(_version_of, self._stepped))
        if self._ready is not None:
            self._ready = []
        for bucket in self._buckets:
            bucket.reset()

    def _start_full(self, last: bool = False) -> None:
        """Starts full buckets in a fixed order; buckets with repeated gradients only at `last`."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waiting or not (last or self._repeated.isdisjoint(bucket.ids)):
                return
            if self._next == 0:
                self._announce()
            try:
                self.strategy.send(bucket, self._next, self.handshake.weighing)
            except PycommError:
                # Raises the error that caused this one, if there is one; this one may be the cause.
                with contextlib.suppress(GroupUnusable):
                    self.handshake.wait()
                raise
            bucket.sent = True
            self._next += 1

    def _announce(self) -> None:
        """Announces the exchange; with weights, waits for their sum."""
        if (group := self._state.gradient_group) is None:
            return
        self.handshake.announce(group, self.strategy.sends_averages)
        if (weighing := self.handshake.weighing) is not None:
            weighing.total = self.handshake.total_weight()

    @not_compiled
    def _end_backward(self, first: Node | None, creates_graph: bool) -> None:
        """Ends a backward; it entered the module at `first` if it began in the outputs."""
        arrived = self._next > 0 or any(bucket.arrived for bucket in self._buckets)
        if not arrived and first is not None and leads_to(first, self._bucket_of):
            self.strategy.resume(self.parameters)  # torch.autograd.grad of other tensors
            if creates_graph:  # it becomes part of a loss
                self.handshake.withdraw()
                self.handshake.leave_backward()
            else:
                self.handshake.settle()
        else:
            self._exchange_rest()

    def _exchange_rest(self, raised: bool | None = False) -> None:
        """Sends the remaining buckets, with zeros for unused parameters, and waits.

        `raised` is True if backward has raised, and None if there was no backward. If backward has
        raised on any rank, all ranks drop their gradients, and the other ranks raise an error.
        """
        unused: set[int] = set()
        for bucket in self._buckets:
            if bucket.waiting:
                unused.update(map(id, bucket.complete()))
        if (weighing := self.handshake.weighing) is not None and weighing.is_zero:
            unused = set(map(id, self.parameters))
        self._start_full(last=True)
        self.handshake.wait()
        self.strategy.finish(self._buckets)
        try:
            used_nowhere, errors = self._compare(unused, raised is True)
        except PycommError:
            self._state.note_failure()
            raise
        self.has_local = False
        self.handshake.settle(dropped=bool(errors.raised))
        step_guard.forget(self.parameters)
        why = ""
        if errors is not NO_ERRORS:
            why = errors.explain(self._group, self._moved() if errors.moved else ())
        if why:
            self._state.give_back()
            self._drop_gradients()
            if raised is False:
                raise RuntimeError(f"{why}; gradients are dropped on all ranks")
            return
        self._had_backward |= raised is False
        self.strategy.keep(self.parameters, used_nowhere, self._bucket_of)
        if self._ready is not None:
            if self._state.gradient_group is not None:
                self._learn_order(self._ready)
            self._ready = None

    def _exchange_nothing(self, raised: bool | None = None) -> None:
        """Sends zeros as the remaining buckets, and drops the result."""
        self._drop_gradients()
        try:
            self._announce()  # other ranks count this rank's weight
            self.handshake.weighing = None
            self._exchange_rest(raised)
        finally:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _compare(self, unused: Set[int], raised: bool) -> tuple[Set[int], Errors]:
        """Ids of the parameters that no rank has used, and the ranks' errors in this backward."""
        group = self._state.gradient_group
        if group is None:
            return unused, NO_ERRORS
        used = [True] * len(self.parameters)
        if unused:
            used = [id(p) not in unused for p in self.parameters]
        changed = self.strategy.sees_change()
        stepped = self._versions != list(map(_version_of, self._stepped))
        moved = bool(self.strategy.moved(self.parameters))
        own = raised, self.handshake.is_repeated, stepped, moved
        (*used_anywhere, changed_anywhere), errors = compare([*used, changed], own, group)
        if changed_anywhere:
            self.strategy.compare()
        if all(used_anywhere):
            return set(), errors
        pairs = zip(self.parameters, used_anywhere, strict=True)
        return {id(p) for p, is_used in pairs if not is_used}, errors

    def _moved(self) -> list[str]:
        """Names of parameters that have left the memory in which they must lie."""
        return [self.members.name_of(p) for p in self.strategy.moved(self.parameters)]

    def _learn_order(self, ready: Sequence[torch.Tensor]) -> None:
        """Lays out buckets in the order of rank 0's first backward, repeated parameters last."""
        index = {id(p): i for i, p in enumerate(self.parameters)}
        arrived = sorted(ready, key=lambda parameter: id(parameter) in self._repeated)
        seen = list(dict.fromkeys(index[id(parameter)] for parameter in arrived))
        order = host.tensor([*seen, *sorted(set(index.values()) - set(seen))])
        broadcast(order, 0, group=self._group)
        self.parameters = [self.parameters[i] for i in order.tolist()]
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes new buckets, and moves gradients into them."""
        self._buckets = self._slab.cut(self.parameters)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._bucket_of[id(parameter)].put(parameter)
