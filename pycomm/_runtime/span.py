"""A rank's connections to other nodes over NCCL, and its operations on them.

Operations are enqueued on a stream of their own, and a thread watches their deadlines. Tensors on
the CPU take the group's own link (pycomm/_runtime/internode.py).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pycomm._runtime.carriers import Point, Watch
from pycomm.errors import CollectiveError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        carriers: the ranks that carry the same stripe; None if this rank carries none.
        timeout: seconds that an operation may take.

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
        carriers: Carriers | None,
        timeout: float,
    ) -> None:
        self.node, self.carriers = node, carriers
        self.nodes, self.here, self.stripes = nodes.ranks, nodes.here, nodes.stripes
        self.rank, self.index = rank, nodes.local.index(rank)
        self.world = sum(map(len, nodes.ranks))
        self.even = {len(ranks) for ranks in nodes.ranks} == {nodes.stripes}
        self._core, self._timeout = core, timeout
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._orders: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        self._watch: Watch | None = None
        self._overrun = False

    def place_of(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its index there."""
        node = next(m for m, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)

    def by_index(self, device: torch.device) -> torch.Tensor:
        """All ranks, if nodes are of one size: the first of every node, then the second ones."""
        return self._order(itertools.chain(*zip(*self.nodes, strict=True)), device)

    def node_order(self, device: torch.device) -> torch.Tensor | None:
        """All ranks, node by node; None if that is their order anyway."""
        ranks = list(itertools.chain(*self.nodes))
        return None if ranks == sorted(ranks) else self._order(ranks, device)

    def _order(self, ranks: Iterable[int], device: torch.device) -> torch.Tensor:
        key = (*ranks,), device
        if key not in self._orders:
            self._orders[key] = torch.tensor(key[0], dtype=torch.int64, device=device)
        return self._orders[key]

    def enqueue(
        self, device: torch.device, flow: Callable[[], None], tensors: Iterable[torch.Tensor]
    ) -> None:
        """Enqueues the flow of an operation on a CUDA device, after the current stream's work.

        Later work on the current stream waits for it. A captured stream captures it.
        """
        self.check()
        self._core.check_usable()
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            captured = torch.cuda.is_current_stream_capturing()
            begin = None if captured else Point(stream.record_event())
            try:
                flow()
            except CollectiveError as error:  # the ranks of this node have numbers of their own
                self._end_all()
                rank = self.nodes[self.here][error.rank]
                raise type(error)(
                    f"inside node {self.here}: {error}", rank=rank, pid=error.pid
                ) from error
            except BaseException:  # the other ranks wait for what has not been enqueued
                self._end_all()
                raise
            finally:  # kernels that have been enqueued use the tensors
                current.wait_stream(stream)
                for tensor in tensors:
                    tensor.record_stream(stream)
            if begin is not None:
                if self._watch is None:
                    self._watch = Watch(self._timeout, self._end_overrun)
                self._watch.add(begin, Point(stream.record_event()))

    def check(self) -> None:
        """Raises Timeout, once, if work on a device has overrun its deadline."""
        if self._overrun:
            self._overrun = False
            raise Timeout(
                f"an operation between nodes took longer than {self._timeout:g} s: "
                "NCCL was aborted",
                rank=self.rank,
            )

    def abort(self) -> None:
        """Ends operations that are under way, here and on other nodes."""
        carriers = self.carriers  # another thread may close the group
        if carriers is not None:
            carriers.abort()
        if self.node is not None:
            self.node.abort()

    def close(self) -> None:
        """Finishes operations that are under way."""
        try:
            for stream in self._streams.values():
                stream.synchronize()
        except BaseException:  # interrupted
            self._end_all()
            raise
        finally:
            if self._watch is not None:
                self._watch.end()
            carriers, self.carriers = self.carriers, None
            if carriers is not None:
                carriers.close()
            if self.node is not None:
                self.node.close()

    def _end_overrun(self) -> None:
        """Ends everything, because work on a device has overrun its deadline."""
        self._overrun = True
        self._end_all()

    def _end_all(self) -> None:
        self.abort()
        self._core.abort()
