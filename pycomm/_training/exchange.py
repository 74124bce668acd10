"""One bucket's exchange: what is called for its parameters, and what is under way.

A bucket is a flat tensor with the gradients of some parameters, in order. Parameters that are
compressed have an operation each, so that blocks, selections and owners follow them;
neighbours that are not share one. All of a bucket's operations are handed over in one call, and the
group's worker (or on CUDA a stream of its own) runs them while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs.dtypes import ALGORITHMS, COLLECTIVES, DTYPES, OPS
from pycomm._runtime.log import operations
from pycomm._runtime.staging import StandIn, fetch
from pycomm.collectives import Work
from pycomm.compression import Compression, check_compressible

if TYPE_CHECKING:
    from pycomm._training.parameters import Entry
    from pycomm._training.residuals import Residuals
    from pycomm.group import Group

_AVG = OPS["avg"]


@dataclass(frozen=True)
class Recipe:
    """What all exchanges of a state have in common.

    Attributes:
        compression: of the parameters that are not dense; None compresses nothing.
        residuals: what is fed back.
        step: since compression began, from 0; for its own warm-up.
        scale: of the gradients, as a tensor beside them; None where they are not scaled.
        tag: tells these exchanges from others on the group.
    """

    compression: Compression | None
    residuals: Residuals
    step: int
    scale: torch.Tensor | None
    tag: int


@dataclass
class Plan:
    """A bucket's operations, made once per layout.

    Attributes:
        calls: the operations.
        parts: what each is about.
        wire_bytes: that this rank reads from its peers, or receives from other nodes, at most.
        stand_in: for the bucket, where the group stages.
    """

    calls: list[_C.Call] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    wire_bytes: int = 0
    stand_in: StandIn | None = None

    @cached_property
    def exchange(self) -> _C.Exchange:
        """All of them as one."""
        return _C.Exchange(self.calls)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that must live until they have run."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def give_back(self) -> None:
        """Adds the means to this rank's residuals, after an exchange whose result is dropped."""
        for part in self.parts:
            residual, scale = part.kept.get("residual"), part.kept.get("scale")
            # With an overflow there may be no number to add, and residuals were left alone.
            if residual is not None and bool(part.tensor.isfinite().all()):
                residual.add_(part.tensor if scale is None else part.tensor.float() / scale)


@dataclass(frozen=True)
class _Part:
    """What a call is about, for a device."""

    tensor: torch.Tensor
    codec: _C.Codec | None
    kept: dict[str, torch.Tensor]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tensor, *self.kept.values()


def make_plan(
    buffer: torch.Tensor,
    entries: Sequence[Entry],
    begins: Sequence[int],
    recipe: Recipe,
    group: Group,
) -> Plan:
    """The operations for a bucket; each entry's gradient begins where `begins` says.

    Raises:
        ValueError: `buffer` is not what the entries' gradients make up.
    """
    ends = [begin + entry.numel for begin, entry in zip(begins, entries, strict=True)]
    count = ends[-1] if ends else 0
    if buffer.numel() != count or not buffer.is_contiguous():
        raise ValueError(
            f"a bucket must hold the {count} elements of its parameters one behind the other, "
            f"got {buffer.numel()}"
        )
    plan = Plan()
    if group._stages(buffer.device):
        plan.stand_in = StandIn(buffer)
        buffer = plan.stand_in.host
    first = 0  # of neighbours that share an operation
    for index, entry in enumerate(entries):
        if recipe.compression is None or entry.dense or not entry.numel:
            continue
        if first < index:
            shared = buffer[begins[first] : ends[index - 1]]
            _add_dense(plan, shared, entries[first], recipe, group)
        _add_compressed(plan, buffer[begins[index] : ends[index]], entry, recipe, group)
        first = index + 1
    if first < len(entries):
        _add_dense(plan, buffer[begins[first] :], entries[first], recipe, group)
    operations.debug(
        "rank %d: bucket of %d bytes, %s: %d operations, %s, at most %d bytes in",
        group.rank,
        buffer.nbytes,
        buffer.dtype,
        len(plan.calls),
        recipe.compression,
        plan.wire_bytes,
    )
    return plan


def dense_wire_bytes(nbytes: int, group: Group) -> int:
    """Bytes that a rank reads from its peers in an uncompressed two-shot all-reduce.

    Where the group spans nodes, what the carrier of a stripe receives from other nodes.
    """
    parties, stripes = _parties(group)
    return 2 * (parties - 1) * nbytes // parties // stripes


def _parties(group: Group) -> tuple[int, int]:
    """How many take part in this rank's exchange, and how many such exchanges share the work."""
    if not group.stripes:
        return group.size, 1
    node = next(ranks for ranks in group.nodes if group.rank in ranks)
    carries = node.index(group.rank) < group.stripes
    return (len(group.nodes), group.stripes) if carries else (1, 1)


def _add_dense(
    plan: Plan, tensor: torch.Tensor, first: Entry, recipe: Recipe, group: Group
) -> None:
    if tensor.numel() == 0:
        return
    plan.calls.append(_call(tensor, first, recipe, _C.Codec(0)))
    plan.parts.append(_Part(tensor, None, {}))
    plan.wire_bytes += dense_wire_bytes(tensor.nbytes, group)


def _add_compressed(
    plan: Plan, tensor: torch.Tensor, entry: Entry, recipe: Recipe, group: Group
) -> None:
    compression, residuals = recipe.compression, recipe.residuals
    assert compression is not None
    check_compressible(f"gradient of {entry.name or 'a parameter'}", tensor)
    codec = compression.codec(entry.numel, tensor.dtype, recipe.step)
    kept: dict[str, torch.Tensor] = {}
    for kind in residuals.kinds:
        kept[kind] = residuals.of(entry, kind)
        before = residuals.before(entry, kind)
        if before is not None:
            kept[f"{kind}_before"] = before
    if recipe.scale is not None:
        kept["scale"] = recipe.scale
    pointers = {name: part.data_ptr() for name, part in kept.items()}
    plan.calls.append(
        _call(
            tensor,
            entry,
            recipe,
            codec,
            momentum=compression.momentum,
            seed=compression.seed,
            hold_unused=True,
            **pointers,
        )
    )
    plan.parts.append(_Part(tensor, codec, kept))
    parties, stripes = _parties(group)
    wire_bytes = compression.wire_bytes(entry.numel, parties, tensor.dtype, step=recipe.step)
    plan.wire_bytes += wire_bytes // stripes


def _call(
    tensor: torch.Tensor, first: Entry, recipe: Recipe, codec: _C.Codec, **options: Any
) -> _C.Call:
    """An average in place, in rank order; ranks compare tag and place in the model."""
    defaults = {"residual": 0, "velocity": 0, "momentum": 0.0, "seed": 0}
    return _C.Call(
        algorithm=ALGORITHMS["auto"],
        dtype=DTYPES[tensor.dtype],
        op=_AVG,
        count=tensor.numel(),
        input=tensor.data_ptr(),
        output=tensor.data_ptr(),
        codec=codec,
        step=0,
        offset=first.first,
        tag=recipe.tag,
        **(defaults | options),
    )


def run_on_worker(plan: Plan, step: int, group: Group) -> Work:
    """Hands a bucket to the group's worker."""
    finish = _nothing
    if plan.stand_in is not None:
        fetch(plan.stand_in)
        finish = plan.stand_in.put_back
    return Work(plan.exchange.submit(group._core, step), plan.tensors, finish)


def run_on_stream(plan: Plan, step: int, group: Group, device: torch.device) -> None:
    """Enqueues a bucket on the current stream."""
    side = group._cuda_side(device)
    for call, part in zip(plan.calls, plan.parts, strict=True):
        tensor = part.tensor
        if part.codec is None:
            side.run(
                COLLECTIVES["all_reduce"], ALGORITHMS["auto"], _AVG, 0, tensor.numel(), tensor,
                tensor,
            )  # fmt: skip
        else:
            call.set_step(step)
            side.run_compressed(call, part.codec, tensor.numel(), part.tensors, None)


def _nothing() -> None:
    """There is nothing to put anywhere: results are in place."""
