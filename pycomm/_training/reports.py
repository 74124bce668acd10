"""What ranks tell each other before they exchange parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.collectives import all_gather
from pycomm.errors import Mismatch

if TYPE_CHECKING:
    from pycomm.group import Group


class Report(NamedTuple):
    """Where a rank stands.

    Attributes:
        steps: that it has made.
        period: from exchange to exchange.
        options: a hash of the others.
        parameters: a fingerprint of what all should have in common.
        pending: steps since the last exchange.
        left: whether it has run out of batches.
    """

    steps: int
    period: int
    options: int
    parameters: int
    pending: int
    left: int

    def fits(self, other: Report) -> bool:
        """Whether their ranks may exchange."""
        here, there = self[1:4], other[1:4]
        return here == there and (bool(self.left) or self.steps == other.steps)

    def __str__(self) -> str:
        return (
            f"at step {self.steps}, period {self.period}, options {self.options:08x}, "
            f"parameters {self.parameters:08x}"
        )


def compare(mine: Report, group: Group) -> list[Report]:
    """Every rank's report, in rank order; a collective call.

    Raises:
        pycomm.Mismatch: they do not go together.
    """
    table = torch.empty(group.size, len(mine), dtype=torch.int64)
    all_gather(table, torch.tensor(mine, dtype=torch.int64), group=group)
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
