"""A rank's connections to other nodes over process groups, and the order of operations on them.

A thread runs the operations of a group one after another. The group's own link
(pycomm/_runtime/internode.py) remains for what ranks tell each other: which operation comes next,
and after a failure, whose fault it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycomm._inputs.dtypes import operation_of
from pycomm._runtime.carriers import Overrun, Task, Worker
from pycomm.errors import CollectiveError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pycomm import _C
    from pycomm._runtime.carriers import Carriers
    from pycomm._runtime.internode import Nodes
    from pycomm._runtime.member import Member


class Span:
    """The connections of one rank.

    Args:
        core: the group's core.
        nodes: the ranks of each node.
        rank: this rank.
        node: a group of this node's ranks; None if there is only one.
        carriers: for each type of device, the ranks that carry the same stripe; None if this rank
            carries none.

    Attributes:
        world: the number of ranks.
        here: the index of this node.
        index: the index of this rank among those of its node.
        stripes: the number of ranks of every node that carry stripes.
        even: True if every node has as many ranks.
    """

    def __init__(
        self,
        core: _C.Group,
        nodes: Nodes,
        rank: int,
        node: Member | None,
        carriers: Mapping[str, Carriers | None],
    ) -> None:
        self.node, self.carriers = node, carriers
        self.nodes, self.here, self.stripes = nodes.ranks, nodes.here, nodes.stripes
        self.rank, self.index = rank, nodes.local.index(rank)
        self.world = sum(map(len, nodes.ranks))
        self.even = {len(ranks) for ranks in nodes.ranks} == {nodes.stripes}
        self._core = core
        self._worker = Worker(self.abort)

    def serves(self, device: torch.device) -> bool:
        """True if tensors on the device go over a process group."""
        return device.type in self.carriers

    def place_of(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its index there."""
        node = next(m for m, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)

    def run(
        self, operation: _C.Operation, shape: torch.Size, label: str, flow: Callable[[], None]
    ) -> Task:
        """Runs the flow of an operation once all ranks have called it.

        Raises:
            ValueError: the operation does not span nodes.
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        agreed = self._core.submit(operation, 0, 0, 0, shape, label)

        def run() -> None:
            agreed.wait()
            try:
                flow()
            except RuntimeError as error:
                raise self._failure(error) from error

        return self._worker.submit(run)

    def busy(self) -> bool:
        """True if an operation is under way."""
        return self._worker.busy()

    def abort(self) -> None:
        """Ends operations that are under way, here and, if their backend tells them, elsewhere."""
        for carriers in self.carriers.values():
            if carriers is not None:
                carriers.abort()
        if self.node is not None:
            self.node.abort()

    def close(self) -> None:
        """Finishes operations that are under way."""
        self._worker.end()
        self.carriers = dict.fromkeys(self.carriers)
        if self.node is not None:
            self.node.close()

    def _failure(self, error: RuntimeError) -> CollectiveError:
        """The reason for a failure, the same on every rank; afterwards the group has failed.

        All ranks come to a barrier, in which those that are gone or do not answer are noticed.
        """
        self.abort()
        try:
            self._core.run(operation_of("barrier", "one_shot", torch.uint8), 0, 0, 0)
        except CollectiveError as found:
            return found
        self._core.abort()
        kind = Timeout if isinstance(error, Overrun) else CollectiveError
        return kind(f"the process group between nodes failed: {error}", rank=self.rank)
