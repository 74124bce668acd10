"""Divided gradients of ranks on several nodes.

A slot has an equal block for every rank, so a reduce-scatter gives each rank the averages of its
elements. They are added to those of earlier backwards as averages, because no rank has the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from pycomm._spanning.collectives import launch
from pycomm._training.gradient_ring import GradientRing, Run
from pycomm._training.shards import part_of


class SpanningRing(GradientRing):
    """The parts of averaged gradients that this rank keeps; see :class:`GradientRing`."""

    def _average(
        self, parameters: Sequence[torch.Tensor], runs: Iterable[Run], flat: torch.Tensor
    ) -> Callable[[], object]:
        """Starts to average this rank's part of a slot; returns what waits for it."""
        group, runs = self._shards.group, list(runs)
        means = flat.new_empty(len(flat) // group.size)
        work = launch(
            group, "reduce_scatter", flat, means, means.shape, "avg",
            label=f"{len(runs)} runs of divided gradients", async_op=True,
        )  # fmt: skip
        adds = frozenset(self._adds)

        def land() -> None:
            work.wait()
            for number, begin, end, offset, rank in runs:
                if rank != group.rank:
                    continue
                parameter = parameters[number]
                part = part_of(parameter)
                assert part is not None
                own = self.own(parameter)[begin - part.first : end - part.first]
                first = offset - rank * len(means)
                mean = means[first : first + end - begin]
                own.add_(mean) if id(parameter) in adds else own.copy_(mean)

        return land
