"""Averages buckets of gradients in equal blocks, of which every rank gets its own.

With a compression, all ranks send what they contribute encoded, and residuals keep what that loses.
Parameters that are sent uncompressed go through one all-reduce, as they are few and small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm._spanning.collectives import launch
from pycomm._training.zeros import zeros
from pycomm._work import Work
from pycomm.collectives import all_reduce
from pycomm.compressed import compressed_reduce_scatter

if TYPE_CHECKING:
    from pycomm._training.comm_state import CommState
    from pycomm.compression import Compression


class Blocks(NamedTuple):
    """A bucket's gradients, with a block per rank.

    Attributes:
        gradients: flat, padding included.
        own: this rank's block of them.
        begins: where each parameter's gradient begins, by the parameter's id.
        first: the place of the first element among those of all buckets.
    """

    gradients: torch.Tensor
    own: torch.Tensor
    begins: Mapping[int, int]
    first: int


class Scatter:
    """The exchange of a wrapper's gradients.

    Args:
        state: has the compression and the residuals.
    """

    def __init__(self, state: CommState) -> None:
        self._state, self._group = state, state.group
        self._works: list[tuple[Work, Callable[[], object]]] = []
        # Gradients that are sent uncompressed, with their places in buckets.
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._residual: torch.Tensor | None = None
        self._sent = 0  # bytes

    def place_residuals(self, buckets: Iterable[Blocks]) -> None:
        """Moves residuals to the places of their gradients."""
        state, buckets = self._state, list(buckets)
        if "residual" not in state._residuals.kinds:
            return
        total = sum(len(bucket.gradients) for bucket in buckets)
        self._residual = zeros(total, torch.float32, torch.device("cpu"))
        entries = state._parameters.entries
        begins = {
            entries[number].name: bucket.first + begin
            for bucket in buckets
            for number, begin in bucket.begins.items()
        }
        state._residuals.lie_in(self._residual, begins)

    @property
    def compression(self) -> Compression | None:
        """The compression of this step."""
        state = self._state
        return state.compression if state.step >= state._warmup_steps else None

    def start(self, bucket: Blocks, parameters: Sequence[torch.Tensor]) -> None:
        """Starts to average a bucket; every rank gets its block, in place."""
        state = self._state
        dense = [p for p in parameters if state._parameters[p].dense]
        if self.compression is None or len(dense) == len(parameters):
            self._sent += bucket.gradients.nbytes
            work = launch(
                self._group, "reduce_scatter", bucket.gradients, bucket.own, bucket.own.shape,
                "avg", label="gradients to their owners", async_op=True,
            )  # fmt: skip
            self._works.append((work, lambda: None))
            return
        for parameter in dense:
            begin = bucket.begins[id(parameter)]
            place = bucket.gradients[begin : begin + parameter.numel()]
            self._exact.append((place, place.clone()))
            place.zero_()
        self._encode(bucket)

    def finish(self) -> int:
        """Waits until all that was started are averages.

        Returns:
            The bytes of the buckets as they were sent.
        """
        exact, self._exact = self._exact, []
        if exact:
            self._average([values for _, values in exact])
        works, self._works = self._works, []
        for work, take in works:
            work.wait()
            take()
        for place, values in exact:
            place.copy_(values)
        sent, self._sent = self._sent, 0
        return sent

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Starts to average some gradients uncompressed."""
        flats = {
            tensor.dtype: [t for t in tensors if t.dtype == tensor.dtype] for tensor in tensors
        }
        for members in flats.values():
            flat = torch.cat(members)
            self._sent += flat.nbytes
            work = all_reduce(flat, "avg", group=self._group, deterministic=True, async_op=True)
            self._works.append((work, functools.partial(_split, flat, members)))

    def _encode(self, bucket: Blocks) -> None:
        """Starts to average a bucket with encoded contributions."""
        state, mean, count = self._state, torch.empty_like(bucket.own), len(bucket.gradients)
        assert state.compression is not None
        self._sent += encoded_bytes(state.compression, bucket.gradients)
        residual = self._residual
        if residual is not None:
            residual = residual[bucket.first : bucket.first + count]
        work = compressed_reduce_scatter(
            mean, bucket.gradients, state.compression, residual=residual,
            step=state.step - state._warmup_steps, offset=bucket.first, group=self._group,
            async_op=True, tag="gradients to their owners",
        )  # fmt: skip
        self._works.append((work, lambda: bucket.own.copy_(mean)))


def encoded_bytes(compression: Compression | None, bucket: torch.Tensor) -> int:
    """The bytes of a bucket as it is sent."""
    return bucket.nbytes if compression is None else compression.encoded_bytes(len(bucket))


def _split(flat: torch.Tensor, members: Sequence[torch.Tensor]) -> None:
    """Copies a flat tensor back to the tensors that it was made of."""
    begin = 0
    for member in members:
        member.copy_(flat[begin : begin + len(member)])
        begin += len(member)
