"""Reports that ranks compare before they exchange parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm._inputs import host
from pycomm.collectives import all_gather
from pycomm.errors import Mismatch

if TYPE_CHECKING:
    from pycomm.group import Group


class Report(NamedTuple):
    """The progress of a rank.

    Attributes:
        steps: number of steps it has made.
        period: steps from one exchange to the next.
        options: a hash of the other options.
        parameters: a fingerprint of the parameters that all ranks should have in common.
        pending: steps since the last exchange.
        left: 1 if it has no more batches.
    """

    steps: int
    period: int
    options: int
    parameters: int
    pending: int
    left: int

    def fits(self, other: Report) -> bool:
        """True if the two ranks may exchange parameters."""
        here, there = self[1:4], other[1:4]
        return here == there and (bool(self.left) or self.steps == other.steps)

    def __str__(self) -> str:
        return (
            f"at step {self.steps}, period {self.period}, options {self.options:08x}, "
            f"parameters {self.parameters:08x}"
        )


def compare(mine: Report, group: Group) -> list[Report]:
    """Collects every rank's report, in rank order; a collective call.

    Raises:
        pycomm.Mismatch: the reports do not fit each other.
    """
    table = host.empty(group.size, len(mine), dtype=torch.int64)
    all_gather(table, host.tensor(mine), group=group)
    reports = [Report(*row) for row in table.tolist()]
    against = next((rank for rank, report in enumerate(reports) if not report.left), 0)
    for rank, report in enumerate(reports):
        if not report.fits(reports[against]):
            raise Mismatch(
                f"ranks must exchange parameters at the same step, with the same settings and "
                f"from the same parameters: rank {against} {reports[against]}, rank {rank} "
                f"{report}",
                rank=rank,
                operation="local_sgd",
            )
    return reports
