"""Plans exchanges: which operations a bucket's parameters need.

A bucket is a flat tensor with the gradients of some parameters, in order. Each compressed parameter
has its own operation, so that blocks, selections and owners follow the parameter. Neighbouring
uncompressed parameters share an operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs.dtypes import operation_of
from pycomm._inputs.encoding import check_compressible
from pycomm._runtime.log import operations
from pycomm._runtime.staging import StandIn
from pycomm._spanning.call import CodedCall
from pycomm._training.exchange import (
    BucketExchange,
    Part,
    StepFlow,
    dense_wire_bytes,
    parties,
    spanning_coded_mean,
    spanning_mean,
)
from pycomm._training.parameters import Entry, Parameters, as_real, dense_strides, same_places
from pycomm.compression import Compression

if TYPE_CHECKING:
    from pycomm._training.residuals import Residuals
    from pycomm.group import Group


class Planner:
    """Makes a bucket's exchange once, and again if buckets, the step's phase or the scale change.

    Args:
        compression: compression of parameters that are not dense; None compresses nothing.
        parameters: the model's parameters.
        residuals: their residuals.
        tag: a number that distinguishes these exchanges from others on the group.
    """

    def __init__(
        self,
        compression: Compression | None,
        parameters: Parameters,
        residuals: Residuals,
        tag: int,
    ) -> None:
        self._compression = compression
        self._parameters = parameters
        self._residuals = residuals
        self._tag = tag
        # By a bucket's address and parameters: phase, the scale's address, the bucket's dtype and
        # number of elements, and the exchange.
        self._made: dict[tuple[int, ...], tuple[tuple[object, ...], BucketExchange]] = {}
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
        found = self._made.get(key)
        if found is not None and found[0] == state:
            return found[1]
        if found is None:  # DDP has new buckets: free the old ones' memory
            ids = set(key[1:])
            for old in [k for k in self._made if not ids.isdisjoint(k[1:])]:
                del self._made[old]
        entries = self._parameters.of(parameters)
        if begins is None:
            begins = list(itertools.accumulate((e.numel for e in entries[:-1]), initial=0))
        _check_bucket(buffer, entries, begins)
        stand_in = StandIn(buffer) if group._exchanges_on_host(buffer.device) else None
        flat = buffer if stand_in is None else stand_in.host
        parts = self._parts(flat, entries, begins, step, scale, group)
        exchange = BucketExchange(parts, stand_in)
        operations.debug(
            "rank %d: bucket of %d bytes, %s: %d operations, %s, at most %d bytes in",
            group.rank,
            buffer.nbytes,
            buffer.dtype,
            len(exchange),
            self._compression if step >= 0 else None,
            exchange.wire_bytes,
        )
        self._made[key] = (state, exchange)
        return exchange

    def knows(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
        """True if the bucket has an exchange already."""
        return (buffer.data_ptr(), *map(id, parameters)) in self._made

    def follow_formats(self, parameters: Sequence[torch.Tensor], rebuilt: bool) -> None:
        """Adapts residuals to new memory formats, or raises if the bucket has old ones.

        DDP makes buckets in the parameters' memory formats, and makes new ones once. It reads
        results in the present formats, so a bucket must have those.

        Args:
            parameters: the parameters of the bucket.
            rebuilt: True if the bucket is new; see :meth:`knows`.
        """
        for parameter in parameters:
            entry, real = self._parameters[parameter], as_real(parameter)
            if real.stride() != entry.strides and not same_places(
                entry.shape, strides := dense_strides(real), entry.strides
            ):
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
    ) -> list[Part]:
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

    def _dense(self, tensor: torch.Tensor, first: Entry, group: Group) -> list[Part]:
        """The operation for uncompressed neighbours, of which `first` is the first."""
        if tensor.numel() == 0:
            return []
        call: _C.Call | StepFlow
        if group._spans(tensor.device):
            call = functools.partial(spanning_mean, tensor)
        else:
            call = self._call(tensor, first, _C.Codec(0))
        return [Part(call, tensor, {}, dense_wire_bytes(tensor.nbytes, group))]

    def _compressed(
        self,
        compression: Compression,
        tensor: torch.Tensor,
        entry: Entry,
        step: int,
        scale: torch.Tensor | None,
        group: Group,
    ) -> Part:
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
        call: _C.Call | StepFlow
        if group._spans(tensor.device):
            coded = CodedCall(
                tensor, tensor, compression, "avg", 0, entry.first, density_step=step,
                hold_unused=True, **kept,
            )  # fmt: skip
            call = functools.partial(spanning_coded_mean, coded)
        else:
            call = self._call(
                tensor,
                entry,
                codec,
                momentum=compression.momentum,
                seed=compression.seed,
                hold_unused=True,
                **{name: part.data_ptr() for name, part in kept.items()},
            )
        ranks, stripes = parties(group)
        wire_bytes = compression.wire_bytes(entry.numel, ranks, tensor.dtype, step=step)
        return Part(call, tensor, kept, wire_bytes // stripes)

    def _call(self, tensor: torch.Tensor, first: Entry, codec: _C.Codec, **options: Any) -> _C.Call:
        """An average in place, in rank order; ranks compare tag and place in the model."""
        defaults = {"residual": 0, "velocity": 0, "momentum": 0.0, "seed": 0}
        return _C.Call(
            operation_of("all_reduce", "auto", tensor.dtype, "avg"),
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
