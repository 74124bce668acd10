"""The wrapper's exchange of gradients, while backward computes them."""

from __future__ import annotations

import collections
import copyreg
import functools
import time
import types
import weakref
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pycomm._runtime import host
from pycomm._runtime.ranges import record_range
from pycomm._runtime.torch_private import not_compiled, pytree, queue_callback
from pycomm._training import step_guard
from pycomm._training.buckets import (
    Bucket,
    Slab,
    bucket_limit,
    gradient_memory,
    no_memory,
    window_layout,
)
from pycomm._training.comm_state import CommState
from pycomm._training.exchange import dense_wire_bytes, launching
from pycomm._training.grad_shards import GradShardBuffers
from pycomm._training.handshake import BackwardHandshake, Errors, compare
from pycomm._training.internode_shards import BucketReduceScatter, InternodeShards
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.parameters import ParamOwnership
from pycomm._training.shards import Shards, forget_parts
from pycomm.collectives import broadcast
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._training.buckets import WeightedMean
    from pycomm._training.shard_options import Sharding

# Finds the tensors in a module's outputs, and searches autograd's graph.

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


# The wrapper's exchange of gradients, while backward computes them.


class Reducer:
    """The gradients of a module, in buckets, and their running exchange.

    Args:
        module: the module.
        parameters: those of its parameters that are exchanged, in its order.
        comm_state: exchanges buckets.
        bucket_bytes: the largest size of a bucket of several parameters.
        sharding: what is divided among ranks; None for nothing.
        arrived: called with a parameter whose gradient is ready; calls :meth:`arrive`.

    Attributes:
        parameters: the parameters, in the order of the buckets.
        members: the same parameters, with a check that they are still this module's.
        promise: tells whether an exchange is still to come.
        has_local: True if gradients have come that no exchange has averaged since.
        weighing: the ranks' weights in the next exchange, if they differ.
        shards: the division of the parameters, if they are divided.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        comm_state: CommState | LocalSGDState,
        bucket_bytes: float,
        sharding: Sharding | None,
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        self._state = comm_state
        self._group = comm_state.group
        self.parameters = list(reversed(parameters))
        self.shards: Shards | None = None
        self._scatter: BucketReduceScatter | None = None
        if sharding is None:
            forget_parts(self.parameters)
            layout = window_layout(self.parameters, self._group)
        else:
            self.shards = self._make_shards(sharding, bucket_bytes)
            self.shards.exchange_group = self._group
            layout = self.shards.layout
        self._slab = Slab(self.parameters, bucket_bytes, layout)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._lay_out()
        self._ring: GradShardBuffers | None = None
        if self.shards is not None:
            self.shards.assign(bucket.parameters for bucket in self._buckets)
            if self._scatter is not None and isinstance(self.shards, InternodeShards):
                self._scatter.place_residuals(self.shards.blocks.values())
            if sharding is not None and sharding.stage == "gradients":
                slot_bytes = int(self._slab.limit)
                self._ring = self.shards.ring = GradShardBuffers(
                    self.shards, self._buckets, slot_bytes
                )
        self._ready: list[torch.Tensor] | None = []  # in the order of the first backward
        self._repeated: set[int] = set()  # ids of parameters that come several times in a backward
        self._had_backward = False  # a complete one, after which repeated parameters are known
        self._in_backward = False
        self.has_local = False
        self._next = 0  # bucket to be exchanged
        # Parameters that only a step changes, with their versions when the backward began.
        embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        renormed = {id(each.weight) for each in embeddings if each.max_norm is not None}
        self._stepped = [p for p in self.parameters if id(p) not in renormed]
        self._versions: list[int] = []
        self.handshake = BackwardHandshake()
        self.weighing: WeightedMean | None = None
        self.members = ParamOwnership(module, self.parameters, arrived)

    def _make_shards(self, sharding: Sharding, bucket_bytes: float) -> Shards:
        group, state = sharding.group, self._state
        assert isinstance(state, CommState)
        owns = group is self._group
        plain = owns and state.compression is None
        divides = sharding.stage == "gradients"
        memory = no_memory if divides else functools.partial(gradient_memory, self._group)
        if len(group.nodes) == 1:
            gradients = None if plain and not divides else memory
            return Shards(self.parameters, group, gradients, replicates=sharding.replicas > 1)
        limit = bucket_limit(self.parameters, bucket_bytes)
        scatters = plain or (owns and sharding.publish is not None and state.encodes_once)
        scatters = scatters and not divides
        self._scatter = BucketReduceScatter(state) if scatters else None
        return InternodeShards(self.parameters, group, memory, limit, scatters, sharding)

    def promise_backward(self, inside_backward: bool) -> None:
        """Promises an exchange; see :meth:`Promise.make`."""
        self.handshake.make(inside_backward)
        self._group._catch_up = weakref.WeakMethod(self.catch_up)

    def catch_up(self) -> None:
        """Takes part in the others' exchange if this rank's backward has raised."""
        if not self.handshake.open:
            return
        group = self._state.gradient_group
        if group is not None and self.handshake.is_broken(group):
            if not self._in_backward:
                # What it has dropped since does not matter: it takes part as the others do.
                noted = self.handshake.after_averages
                if noted and self.shards is not None and self._averages_last:
                    self.shards.average(self.parameters, noted=True)
                self._reset(noted)
            self._exchange_nothing(raised=True)
        self._in_backward = False

    def contribute_zeros(self) -> None:
        """Takes part in the others' exchange without a backward on this rank."""
        self._reset()
        self._exchange_nothing()

    def begin_backward(self, first: Node | None = None, forward: int | None = None) -> None:
        """Makes the running backward end with the exchange.

        It entered the module at `first`, in the outputs of the forward with this number.
        """
        if first is not None:
            self.handshake.enter(forward)
        if self._in_backward:
            return
        self.members.check_owned()
        self._complete_last()
        self._reset()
        end = functools.partial(self._end_backward, first, torch.is_grad_enabled())
        queue_callback(end)

    def reduce(self) -> None:
        """Makes all gradients whole averages, also those of backwards without an exchange."""
        group = self._state.gradient_group
        self.catch_up()
        if group is not None and self.handshake.ask(group, announces=self.has_local):
            learned = self._ready, self._had_backward
            self._ready = self.weighing = None
            self._reset()
            self._exchange_rest()
            self._ready, self._had_backward = learned  # the next backward shows the order
        self.average()

    def average(self) -> None:
        """Averages what exchanges have left to the step, and makes divided gradients whole."""
        if self.shards is not None:
            self.shards.average(self.parameters)

    def check_parameters(self) -> None:
        """Raises RuntimeError if a failed step may have changed only some of the parameters."""
        if self.shards is not None:
            self.shards.guard.check()

    def _compare_parameters(self) -> None:
        """Raises RuntimeError on all ranks if their parameters differ."""
        if self.shards is not None:
            self.shards.guard.compare(self.shards.buffers(), takes_nan=self._ring is None)

    def arrive(self, parameter: torch.Tensor) -> None:
        """Handles a gradient that has been accumulated."""
        if not (self._in_backward or self.handshake.open or self._state.gradient_group is None):
            self.keep_local(parameter)
            if self._group.size > 1:
                step_guard.note(parameter)
            return
        if not self._in_backward and self.shards is not None:
            # The sum of an earlier gradient and of this backward's counts as this backward's.
            self.shards.forget_local(parameter)
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
        if self._had_backward:
            self._start_full()

    def keep_local(self, parameter: torch.Tensor) -> None:
        """Handles a gradient of a backward without an exchange."""
        self.has_local = True
        if self.shards is not None:
            self.shards.forget_dropped(parameter)
            if self._group.size > 1:
                step_guard.note(parameter, inside_no_sync=True)

    def _complete_last(self) -> None:
        """Averages what the last backward has left to a step, before this one adds to it."""
        group, shards = self._state.gradient_group, self.shards
        if shards is None or not self._averages_last:
            return
        if group is not None and shards.has_pending(self.parameters):
            self.handshake.announce(group, after_averages=True)
            self.average()

    @property
    def _averages_last(self) -> bool:
        """False if a ring adds to its parts; but weights scale whole gradients."""
        return self._ring is None or self.weighing is not None

    def _reset(self, noted: bool = False) -> None:
        """Prepares for a backward; see :meth:`GradShardBuffers.begin`."""
        if self._ring is not None:
            self._ring.begin(self.parameters, noted)
        self._in_backward = self.handshake.open = True
        self._next = 0
        self._versions = [parameter._version for parameter in self._stepped]
        if self._ready is not None:
            self._ready = []
        for bucket in self._buckets:
            bucket.reset()

    def _start_full(self, last: bool = False) -> None:
        """Starts full buckets, always in the same order; those with repeated gradients at last."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waiting or not (last or self._repeated.isdisjoint(bucket.ids)):
                return
            if (group := self._state.gradient_group) is not None:
                self.handshake.announce(group, self._ring is not None and self._ring.adds)
            self._send(bucket)
            bucket.sent = True
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        try:
            if self._ring is not None:
                with self._launching(bucket):
                    self._ring.send(bucket, self.weighing)
                return
            if self.weighing is not None:
                self.weighing.scale(bucket.flat)
            if self._scatter is not None and isinstance(self.shards, InternodeShards):
                blocks = self.shards.blocks[id(bucket.parameters[0])]
                with self._launching(bucket):
                    self._scatter.start(blocks, bucket.parameters)
            elif self.shards is None or not self.shards.averages:
                self._state.start(bucket.flat, bucket.parameters, begins=bucket.begins)
        except PycommError:
            self.handshake.wait()  # raises the error that caused this one, if there is one
            raise

    def _launching(self, bucket: Bucket) -> AbstractContextManager[object]:
        """Surrounds the start of a bucket that the state does not start itself."""
        assert self.shards is not None
        assert isinstance(self._state, CommState)
        group, model = self.shards.group, self._state._parameters
        return launching(group, self._next, bucket.flat, bucket.parameters, model)

    @not_compiled
    def _end_backward(self, first: Node | None, creates_graph: bool) -> None:
        """Ends a backward; it entered the module at `first` if it began in the outputs."""
        arrived = any(bucket.arrived for bucket in self._buckets)
        if not arrived and first is not None and leads_to(first, self._bucket_of):
            self._in_backward = False  # torch.autograd.grad for something else
            if self._ring is not None:
                self._ring.resume(self.parameters)
            if creates_graph:  # it becomes part of a loss
                self.handshake.withdraw()
            else:
                self.handshake.settle()
        else:
            self._exchange_rest()

    def _exchange_rest(self, raised: bool | None = False) -> None:
        """Sends the remaining buckets, with zeros for unused parameters, and waits.

        `raised` is True if backward has raised, and None if there was none. If backward has raised
        on any rank, gradients are dropped on all ranks, and the ranks that have not raised do so.
        """
        unused = {id(parameter) for bucket in self._buckets for parameter in bucket.complete()}
        if self.weighing is not None and self.weighing.is_zero:
            unused = set(map(id, self.parameters))
        self._start_full(last=True)
        self.handshake.wait()
        self._state.finish()
        self._finish_shards()
        try:
            used_nowhere, errors = self._compare(unused, raised is True)
        except PycommError:
            if isinstance(self._state, CommState):
                self._state.note_failure()
            raise
        self._in_backward = self.has_local = False
        self.handshake.settle(dropped=bool(errors.raised))
        step_guard.forget(self.parameters)
        if why := errors.explain(self._group, self._moved() if errors.moved else ()):
            self._state.give_back()
            self._drop_gradients()
            if raised is False:
                raise RuntimeError(f"{why}; gradients are dropped on all ranks")
            return
        self._had_backward |= raised is False
        if self._ring is not None:
            ring = self._ring
            ring.keep(
                p for p in self.parameters if id(p) not in used_nowhere or ring.accumulates(p)
            )
        else:
            for parameter in self.parameters:
                if id(parameter) in used_nowhere:
                    parameter.grad = None  # a rank without weight may have used it
                elif parameter.grad is None:
                    self._bucket_of[id(parameter)].adopt(parameter)
        if self.shards is not None:
            if self.shards.leaves_local:
                self.shards.note_backward(self.parameters)
            if self.shards.leaves_local or self._ring is not None:
                self.shards.guard.await_step(self.parameters)
        if self._ready is not None:
            if self._state.gradient_group is not None:
                self._learn_order(self._ready)
            self._ready = None

    def _finish_shards(self) -> None:
        """Waits for the averages that shards make."""
        if isinstance(self._state, LocalSGDState) or self.shards is None:
            return
        began, gathered = time.perf_counter(), 0
        sent = nbytes = sum(bucket.flat.nbytes for bucket in self._buckets)
        with record_range(self._group, "finish"):
            if self._ring is not None:
                gathered = self._ring.finish()
            if self._scatter is not None:
                sent = self._scatter.finish()
        if self._ring is not None or self.shards.leaves_local:
            waited = time.perf_counter() - began
            wire = self.shards.wire_bytes(sent) + dense_wire_bytes(gathered, self._group) // 2
            self._state.count_step(nbytes, wire, waited)

    def _exchange_nothing(self, raised: bool | None = None) -> None:
        """Sends zeros as the remaining buckets, and drops the result."""
        self.weighing = None
        self._drop_gradients()
        try:
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
            return unused, Errors([], [], [], [])
        used = [id(p) not in unused for p in self.parameters]
        changed = self.shards is not None and self.shards.guard.sees_change()
        stepped = self._versions != [parameter._version for parameter in self._stepped]
        own = raised, self.handshake.is_repeated, stepped, bool(self._moved())
        (*used_anywhere, changed_anywhere), errors = compare([*used, changed], own, group)
        if changed_anywhere:
            self._compare_parameters()
        pairs = zip(self.parameters, used_anywhere, strict=True)
        return {id(p) for p, is_used in pairs if not is_used}, errors

    def _moved(self) -> list[str]:
        """Names of parameters that have left the memory of shards."""
        moved = [] if self.shards is None else self.shards.moved(self.parameters)
        return [self.members.name_of(parameter) for parameter in moved]

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
