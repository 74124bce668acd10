"""One bucket's exchange: the operations for its parameters.

All operations of a bucket are submitted in one call. The group's worker (on CUDA, a separate
stream) runs them while backward goes on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.futures import Future

from pycomm import _C
from pycomm._inputs import check_compressible, operation_of
from pycomm._runtime.log import operations
from pycomm._runtime.ranges import record_range, watched
from pycomm._runtime.torch_private import future_is_set, init_future, queue_callback, set_future
from pycomm._training.parameters import Entry, Parameters
from pycomm._work import Work
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm._nccl.process_groups import InternodeProcessGroups
    from pycomm._runtime.cuda import HostMirror
    from pycomm._training.residuals import Residuals
    from pycomm.compression import Compression
    from pycomm.group import Group

    # Runs an operation over NCCL at a step.
    StepFlow = Callable[[InternodeProcessGroups, int], object]

T = TypeVar("T")


@dataclass(frozen=True)
class BucketOperation:
    """One operation: an average in place.

    Attributes:
        call: the operation; between nodes over NCCL, a function that runs it at a step.
        tensor: the gradients.
        kept: other tensors that the operation reads and writes, by name.
        wire_bytes: the most bytes that this rank reads from other ranks, or receives from other
            nodes; by tree, a rank's mean.
    """

    call: _C.Call | StepFlow
    tensor: torch.Tensor
    kept: dict[str, torch.Tensor]
    wire_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that must stay alive until the operation has run."""
        return self.tensor, *self.kept.values()


class BucketExchange:
    """A bucket's operations, to be run at every step.

    Args:
        parts: the operations, in their order.
        stand_in: host memory for the bucket, if the group exchanges through it.
        names: the bucket in traces, records and errors.
        strides: the parameters' strides.
        state: what else the operations depend on.
        place: the bucket, True if it is encoded, and its algorithm.

    Attributes:
        wire_bytes: the sum over all parts.
        tensors: all tensors that must stay alive until the operations have run.
        stand_in, names, strides, state, place: as given.
    """

    def __init__(
        self,
        parts: Sequence[BucketOperation],
        stand_in: HostMirror | None,
        names: BucketNames,
        strides: Sequence[tuple[int, ...]],
        state: tuple[object, ...],
        place: tuple[torch.Tensor, bool, str],
    ) -> None:
        self._parts, self.state, self.place = parts, state, place
        self.stand_in, self.names, self.strides = stand_in, names, strides
        self.wire_bytes = sum(part.wire_bytes for part in parts)
        self.tensors = tuple(tensor for part in parts for tensor in part.tensors)

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def _calls(self) -> list[_C.Call]:
        calls = [part.call for part in self._parts if isinstance(part.call, _C.Call)]
        assert len(calls) == len(self._parts)
        return calls

    @cached_property
    def on_host(self) -> _C.Exchange:
        """The operations, for the group's worker."""
        return _C.Exchange(self._calls)

    def enqueue(self, step: int, group: Group, device: torch.device) -> None:
        """Enqueues the operations on the current stream."""
        if (span := group._span) is not None:
            span.enqueue(device, lambda: self._run_flows(span, step), self.tensors)
            return
        for call in self._calls:
            call.set_step(step)
        group._cuda_side(device).run_bucket(self._calls, self.tensors)

    def _run_flows(self, span: InternodeProcessGroups, step: int) -> None:
        for part in self._parts:
            assert not isinstance(part.call, _C.Call)
            part.call(span, step)

    def give_back(self) -> None:
        """Adds the means to this rank's residuals, after an exchange whose result is dropped."""
        for part in self._parts:
            residual, scale = part.kept.get("residual"), part.kept.get("scale")
            # After an overflow the mean may not be finite, and residuals were not changed.
            if residual is not None and bool(part.tensor.isfinite().all()):
                residual.add_(part.tensor if scale is None else part.tensor.float() / scale)


def dense_wire_bytes(nbytes: int, group: Group) -> int:
    """Bytes that a rank reads from other ranks in an uncompressed two-shot all-reduce.

    If the group spans nodes, the bytes that the carrier of a stripe receives from other nodes.
    """
    ranks, stripes = parties(group)
    return 2 * (ranks - 1) * nbytes // ranks // stripes


def parties(group: Group) -> tuple[int, int]:
    """The number of parties in this rank's exchange, and of exchanges that share the work."""
    if not group.stripes:
        return group.size, 1
    node = next(ranks for ranks in group.nodes if group.rank in ranks)
    carries = node.index(group.rank) < group.stripes
    return (len(group.nodes), group.stripes) if carries else (1, 1)


# Plans exchanges: which operations a bucket's parameters need.
#
# A bucket is a flat tensor with the gradients of some parameters, in order. Each compressed
# parameter has its own operation, so that blocks, selections and owners follow the parameter.
# Neighbouring uncompressed parameters share an operation.


class Planner:
    """Makes a bucket's exchange once, and again if buckets, the step's phase or the scale change.

    Args:
        compression: compression of parameters that are not dense; None compresses nothing.
        parameters: the model's parameters.
        residuals: their residuals.
        tag: a number that distinguishes these exchanges from others on the group.
        algorithm: the algorithm of all exchanges; "auto" does not depend on buckets.

    Attributes:
        made: the exchanges, by a bucket's address and its parameters' ids.
    """

    def __init__(
        self,
        compression: Compression | None,
        parameters: Parameters,
        residuals: Residuals,
        tag: int,
        algorithm: str,
    ) -> None:
        self._compression, self._algorithm = compression, algorithm
        self._parameters = parameters
        self._residuals = residuals
        self._tag = tag
        self.made: dict[tuple[int, ...], BucketExchange] = {}
        self._planned: set[int] = set()  # parameters that have been in a bucket

    def exchange_of(
        self,
        key: tuple[int, ...],
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        begins: Sequence[int] | None,
        step: int,
        scale: torch.Tensor | None,
        group: Group,
    ) -> BucketExchange:
        """Returns a bucket's exchange.

        Args:
            key: address of the bucket, and ids of its parameters.
            buffer: the bucket.
            parameters: the parameters of its gradients.
            begins: the offset of each gradient, if there are gaps between them.
            step: number of the step since compression began, from 0; negative before.
            scale: the loss scale, as a tensor on the same device; None if gradients are not scaled.
            group: the group that exchanges.

        Raises:
            ValueError: `buffer` does not consist of the parameters' gradients.
        """
        phase = max(-1, min(step, getattr(self._compression, "density_steps", 0)))
        scaled = 0 if scale is None else scale.data_ptr()
        state = (phase, scaled, buffer.dtype, buffer.numel())
        found = self.made.get(key)
        if found is not None and found.state == state:
            return found
        if found is None:
            self.forget(set(key[1:]))
        entries = self._parameters.of(parameters)
        if begins is None:
            begins = list(itertools.accumulate((e.numel for e in entries[:-1]), initial=0))
        _check_bucket(buffer, entries, begins)
        stand_in = None
        if group._exchanges_on_host(buffer.device):
            from pycomm._runtime.cuda import HostMirror

            stand_in = HostMirror(buffer)
        flat = buffer if stand_in is None else stand_in.host
        parts = self._parts(flat, entries, begins, step, scale, group)
        names = BucketNames(self._parameters, buffer, parameters)
        strides = [parameter.stride() for parameter in parameters]
        encoded = self._compression is not None and step >= 0 and not all(e.dense for e in entries)
        place = (buffer, encoded, self._algorithm)
        if buffer.is_cuda:
            from pycomm._training.explain import warn_if_slow

            warn_if_slow(group, buffer, encoded)
        exchange = BucketExchange(parts, stand_in, names, strides, state, place)
        operations.debug(
            "rank %d: bucket of %d bytes, %s: %d operations, %s, at most %d bytes in",
            group.rank,
            buffer.nbytes,
            buffer.dtype,
            len(exchange),
            self._compression if step >= 0 else None,
            exchange.wire_bytes,
        )
        self.made[key] = exchange
        return exchange

    def forget(self, ids: set[int]) -> None:
        """Drops the exchanges of buckets with any of these parameters, and so the buckets' memory.

        DistributedDataParallel makes new ones.
        """
        for old in [key for key in self.made if not ids.isdisjoint(key[1:])]:
            del self.made[old]

    def follow_formats(self, parameters: Sequence[torch.Tensor], rebuilt: bool) -> None:
        """Adapts residuals to new memory formats, or raises if the bucket has the old formats.

        DDP lays out buckets in the parameters' memory formats, and rebuilds buckets once. It reads
        results in the present formats, so a bucket must have these formats.

        Args:
            parameters: the parameters of the bucket.
            rebuilt: True if the bucket is new.
        """
        entries = self._parameters.of(parameters)
        for parameter, entry in zip(parameters, entries, strict=True):
            strides = entry.changed_strides(parameter)
            if strides is not None:
                if not rebuilt or id(parameter) not in self._planned:
                    raise ValueError(
                        f"parameters must keep their memory format under DistributedDataParallel, "
                        f"but {entry.name!r} has another one since: change it before wrapping"
                    )
                self._residuals.reorder(entry, strides)
            self._planned.add(id(parameter))

    def _parts(
        self,
        flat: torch.Tensor,
        entries: Sequence[Entry],
        begins: Sequence[int],
        step: int,
        scale: torch.Tensor | None,
        group: Group,
    ) -> list[BucketOperation]:
        """The operations for a bucket; the gradients begin at `begins`."""
        parts = []
        first = 0  # the first of the neighbours that share an operation
        for index, entry in enumerate(entries):
            if self._compression is None or step < 0 or entry.dense or not entry.numel:
                continue
            begin = begins[index]
            if first < index:
                end = begins[index - 1] + entries[index - 1].numel
                parts += self._dense(flat[begins[first] : end], entries[first], group)
            tensor = flat[begin : begin + entry.numel]
            parts.append(self._compressed(self._compression, tensor, entry, step, scale, group))
            first = index + 1
        if first < len(entries):
            parts += self._dense(flat[begins[first] :], entries[first], group)
        return parts

    def _dense(self, tensor: torch.Tensor, first: Entry, group: Group) -> list[BucketOperation]:
        """The operation for neighbouring uncompressed parameters that begin with `first`."""
        if tensor.numel() == 0:
            return []
        call: _C.Call | StepFlow
        if group._spans(tensor.device):
            from pycomm._nccl.collectives import mean_flow

            call = mean_flow(tensor, self._algorithm)
        else:
            algorithm = group._core.in_rank_order(self._algorithm)
            call = self._call(tensor, first, algorithm, _C.Codec(0))
        return [BucketOperation(call, tensor, {}, dense_wire_bytes(tensor.nbytes, group))]

    def _compressed(
        self,
        compression: Compression,
        tensor: torch.Tensor,
        entry: Entry,
        step: int,
        scale: torch.Tensor | None,
        group: Group,
    ) -> BucketOperation:
        check_compressible(f"gradient of {entry.name or 'a parameter'}", tensor)
        codec = compression.codec(entry.numel, tensor.dtype, step)
        kept: dict[str, torch.Tensor] = {}
        for kind in self._residuals.kinds:
            kept[kind] = self._residuals.of(entry, kind)
            before = self._residuals.before(entry, kind)
            if before is not None:
                kept[f"{kind}_before"] = before
        if scale is not None:
            kept["scale"] = scale
        for kind, other in kept.items():
            if other.device != tensor.device:
                raise ValueError(
                    "compressed gradients must lie on one device, with their loss scale: that of "
                    f"{entry.name or 'a parameter'} is on {tensor.device}, {kind} on {other.device}"
                )
        call: _C.Call | StepFlow
        if group._spans(tensor.device):
            from pycomm._nccl.compressed import coded_mean_flow

            call = coded_mean_flow(tensor, compression, entry.first, step, kept, self._algorithm)
        else:
            pointers = {name: part.data_ptr() for name, part in kept.items()}
            more = {"momentum": compression.momentum, "seed": compression.seed, "hold_unused": True}
            call = self._call(tensor, entry, self._algorithm, codec, **more, **pointers)
        ranks, stripes = parties(group)
        wire_bytes = compression.wire_bytes(entry.numel, ranks, tensor.dtype, step=step)
        return BucketOperation(call, tensor, kept, wire_bytes // stripes)

    def _call(
        self, tensor: torch.Tensor, first: Entry, algorithm: str, codec: _C.Codec, **options: Any
    ) -> _C.Call:
        """An average in place; ranks compare tag and place in the model."""
        defaults = {"residual": 0, "velocity": 0, "momentum": 0.0, "seed": 0}
        return _C.Call(
            operation_of("all_reduce", algorithm, tensor.dtype, "avg"),
            count=tensor.numel(),
            input=tensor.data_ptr(),
            output=tensor.data_ptr(),
            codec=codec,
            step=0,
            offset=first.first,
            tag=self._tag,
            **(defaults | options),
        )


def _check_bucket(buffer: torch.Tensor, entries: Sequence[Entry], begins: Sequence[int]) -> None:
    count = begins[-1] + entries[-1].numel if entries else 0
    if buffer.numel() != count or not buffer.is_contiguous():
        raise ValueError(
            f"a bucket must hold the {count} elements of its parameters one behind the other, "
            f"got {buffer.numel()}"
        )


# Running exchanges, by the backward that started them.


class BucketFuture(Future[Any]):
    """The future of a bucket, or of a function that runs after its exchange.

    The end of backward completes it. An earlier wait, as in another hook, completes it, too.
    ``torch.futures.wait_all`` waits in C++, where nothing completes it.
    """

    _flight: weakref.ref[PendingExchange] | None = None

    has_follower = False  # True if another future takes the errors

    def __init__(self, devices: list[torch.device]) -> None:
        init_future(self, devices)
        self._devices = devices

    def follow(self, flight: PendingExchange) -> None:
        """Makes waits for this future wait for the exchange."""
        self._flight = weakref.ref(flight)

    def done(self) -> bool:
        """True if the exchange has ended; see :meth:`torch.futures.Future.done`."""
        flight = self._flight and self._flight()
        if flight and flight.is_completed() and not future_is_set(self):
            flight.wait()
        return future_is_set(self)

    def wait(self) -> Any:
        """See :meth:`torch.futures.Future.wait`; raises the error of the exchange."""
        flight = self._flight and self._flight()
        if flight and not future_is_set(self):
            flight.wait()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], Any]) -> BucketFuture:
        """See :meth:`torch.futures.Future.then`."""
        following, flight = BucketFuture(self._devices), self._flight and self._flight()
        self.has_follower = True
        if flight:
            following.follow(flight)

        def run(_: Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)
                if flight:
                    flight.failures.append((following, error))

        self.add_done_callback(run)
        return following


class PendingExchange(Work):
    """One bucket's exchange in one step; :meth:`wait` completes its future with the bucket."""

    _given_back = False

    def __init__(
        self,
        exchange: BucketExchange,
        buffer: torch.Tensor,
        core: _C.Work | None,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(core, exchange.tensors, finish)
        self._exchange, self.buffer = exchange, buffer
        # Errors of functions that run after the exchange, with their futures.
        self.failures: list[tuple[BucketFuture, Exception]] = []
        self.future = BucketFuture([buffer.device] if buffer.is_cuda else [])
        self.future._flight = weakref.ref(self)

    def give_back(self) -> None:
        """Adds the unused means to residuals, once."""
        if not self._given_back:
            self._given_back = True
            self._exchange.give_back()

    def wait(self) -> None:
        """Waits for the exchange, completes the future, and raises the error if one failed."""
        self._complete()
        if future_is_set(self.future):
            Future.wait(self.future)  # on CUDA only the current stream waits
        else:
            set_future(self.future, self.buffer)
        for future, error in self.failures:
            if not future.has_follower:
                raise error

    def wire_bytes(self) -> int:
        """Bytes that this rank has moved; on CUDA, an upper bound."""
        return self.moved() or self._exchange.wire_bytes


class PendingExchanges:
    """All exchanges that have not been waited for.

    A backward that raises drops its final callbacks without calling them. This distinguishes it
    from an outer backward that still runs, as with reentrant checkpoints.

    Attributes:
        ends: the final callbacks of backwards, by their numbers.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[PendingExchange]] = {}
        self.ends: dict[int, weakref.ref[functools.partial[None]]] = {}

    def add(self, backward: int, flight: PendingExchange) -> None:
        """Adds an exchange."""
        self._of.setdefault(backward, []).append(flight)

    def wait_in_end(self, backward: int, finish: Callable[[int], None]) -> None:
        """Makes the running backward, number `backward`, call ``finish(backward)`` at its end."""
        end = functools.partial(finish, backward)
        self.ends[backward] = weakref.ref(end)
        queue_callback(end)

    def take(self, backward: int) -> list[PendingExchange]:
        """Removes and returns the exchanges of a backward, to be waited for."""
        self.ends.pop(backward, None)
        return self._of.pop(backward, [])

    def take_dropped(self) -> list[PendingExchange]:
        """Removes and returns the exchanges of backwards that have raised."""
        raised = [backward for backward, end in self.ends.items() if end() is None]
        return [flight for backward in raised for flight in self.take(backward)]

    def clear(self) -> None:
        """Removes all exchanges."""
        self._of.clear()
        self.ends.clear()


# The launch of a bucket's exchange, with its description for traces, records and errors.


class BucketNames:
    """A bucket as traces, records and errors name it.

    Args:
        model: the model's parameters.
        bucket: the bucket.
        parameters: the parameters of its gradients.
    """

    def __init__(
        self, model: Parameters, bucket: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.subject = model.subject(parameters)
        self._details = functools.partial(model.describe, bucket, parameters)

    def launch(self, group: Group, number: int, start: Callable[[], T]) -> T:
        """Calls a function that launches the bucket's operations on `group`.

        Traces show the call as a range, and records and errors name the parameters.
        """
        core = group._core
        core.subject = self.subject
        try:
            if not watched():
                return start()
            with record_range(group, f"bucket {number}", self._details):
                return start()
        finally:
            core.subject = ""


# Statistics of a training step, with the time for which backward has waited.


@dataclass
class StepStatistics:
    """One step.

    Attributes:
        scale: the loss scale, if gradients are scaled.
        parameters: ids of the parameters that have been exchanged in the step.
        flights: their exchanges.
        bytes_in: bytes of gradients that shards average.
        bytes_wire: bytes that this rank reads or receives for gradients of shards and for new
            parameters.
        undecided: True while the ranks have not agreed to take the step.
        waited: seconds for which backward has waited for exchanges, on the CPU.
    """

    scale: torch.Tensor | None = None
    parameters: set[int] = field(default_factory=set)
    flights: list[PendingExchange] = field(default_factory=list)
    bytes_in: int = 0
    bytes_wire: int = 0
    undecided: bool = False
    waited: float = 0.0

    def wait(self) -> None:
        """Waits until all exchanges have succeeded or failed, and none uses memory."""
        for flight in self.flights:
            with contextlib.suppress(PycommError):
                flight._complete()

    def give_back(self) -> None:
        """Adds the unused means to residuals, so that nothing is lost."""
        for flight in self.flights:
            flight.give_back()

    def give_back_if_failed(self) -> None:
        """After a failure of the group, adds the means of completed exchanges to residuals.

        On CUDA nothing is added: it is not known which exchanges have completed.
        """
        landed, failed = [], self.undecided
        for flight in self.flights:
            try:
                flight._complete()
            except PycommError:
                failed = True
            else:
                landed.append(flight)
        for flight in landed if failed else ():
            if flight.buffer.is_cpu:
                flight.give_back()
