"""How a group connects its nodes over process groups of torch.distributed.

Torch's constructors wait for the other nodes, and nothing ends them before their timeouts. So a
thread of every rank connects. Meanwhile the ranks tell each other over the group, again and again,
whether they are connected. These operations fail if a rank has died, and they end the wait on all
ranks if one could not connect. All of it has one deadline, which begins once all ranks have come.
If it passes, the rank to blame is the one that has done the least of its own part.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pycomm._inputs.dtypes import operation_of
from pycomm._runtime import rendezvous
from pycomm._runtime.carriers import Carriers, Worker, subgroup_of
from pycomm._runtime.cuda_windows import join_processes
from pycomm._runtime.internode import LookedAfter
from pycomm._runtime.span import Span
from pycomm._runtime.waiting import Deadline
from pycomm.errors import CollectiveError
from pycomm.group import Group, make_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.rendezvous import Membership

_LOOK_EVERY = 0.01  # seconds
_PATIENCE_AT_END = 0.2  # seconds
_LONGEST_REASON = 500  # bytes


def connect_nodes(
    made: Group, members: Membership, process_group: dist.ProcessGroup, max_blocks: int
) -> Span:
    """Connects the nodes over process groups; a collective call.

    Args:
        made: the group; none of its operations is running.
        members: this rank's membership in it.
        process_group: the process group that has its ranks, by the numbers ``made.ranks``.
        max_blocks: the largest number of thread blocks on a GPU.

    Raises:
        pycomm.CollectiveError: a rank has died, and the group has failed; or one could not connect
            within the group's timeout, and the group can be used. On all ranks.
    """
    made._core.run(operation_of("barrier", "one_shot", torch.uint8), 0, 0, 0, None, "connect")
    attempt = _Attempt(made, members, process_group, max_blocks)
    try:
        return attempt.await_all()
    except BaseException:
        attempt.end()
        raise


class _Attempt:
    """One rank's part; for the arguments see :func:`connect_nodes`."""

    def __init__(
        self, made: Group, members: Membership, process_group: dist.ProcessGroup, max_blocks: int
    ) -> None:
        self._made, self._members = made, members
        self._process_group, self._max_blocks = process_group, max_blocks
        self._deadline = Deadline(made.timeout)
        self._over = threading.Event()
        self._spans: list[Span] = []  # one, once this rank is connected
        self._steps = 1 + 2 * len(members.backends)  # of a rank's own part
        self._joined = False  # True once this rank is in the group of its node
        self._made_carriers = 0
        self._stores: list[LookedAfter] = []  # in which others find it
        on_cuda = "cuda" in members.backends
        self._device = torch.cuda.current_device() if on_cuda else None
        self._worker = Worker(self._over.set)
        self._task = self._worker.submit(self._connect)

    def await_all(self) -> Span:
        """This rank's connections, once all ranks have theirs."""
        made, task, size = self._made, self._task, self._made.size
        # Whether a rank waits; whether one has failed; and which one has the most steps left.
        state = torch.zeros(3, dtype=torch.int64)
        operation, at = operation_of("all_reduce", "auto", state.dtype, "max"), state.data_ptr()
        while True:
            waits, error = not task.ended.wait(_LOOK_EVERY), task.error
            over = self._deadline.over()
            fails = error is not None and not over  # else it only ends a wait for others
            connected = not waits and error is None
            left = self._steps + 1 if fails else self._steps - self._done()
            state[0], state[1] = waits, fails or (over and not connected)
            state[2] = 0 if connected else (left + 1) * size - made.rank
            made._core.run(operation, len(state), at, at, None, "connect")
            waits = bool(state[0])
            if state[1]:
                culprit = -int(state[2]) % size
                why = _told(made, culprit, self._reason())
                raise CollectiveError(
                    f"process groups between nodes could not be made (rank {culprit}: {why})",
                    rank=culprit,
                )
            if not waits:
                self._worker.end()
                return self._spans[0]

    def end(self) -> None:
        """Gives up, and waits for a short time until the thread has ended."""
        self._over.set()
        self._worker.end(_PATIENCE_AT_END)
        for span in self._spans:
            _drop(span)

    def _done(self) -> int:
        """The steps that this rank has done."""
        return self._joined + self._made_carriers + sum(s.has_address for s in self._stores)

    def _reason(self) -> str:
        error = self._task.error
        if error is None:
            return f"not connected within {self._made.timeout:g} s"
        return f"{type(error).__name__}: {error}"

    def _connect(self) -> int:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        node = self._join_node()
        self._joined = True
        try:
            span = self._make_span(node)
        except BaseException:
            if node is not None:
                node.close()
            raise
        self._spans.append(span)
        if self._over.is_set():  # perhaps end() has come before
            _drop(span)
        span.connect()
        return 0

    def _join_node(self) -> Group | None:
        """A group of this node's ranks; None if there is only one."""
        made, members = self._made, self._members
        local = members.nodes.local
        if len(local) == 1:
            return None
        index, patience = local.index(made.rank), self._deadline.left()
        inside = PrefixStore(f"node/{members.nodes.here}", members.store)
        mine = rendezvous.introduction(made.staging_bytes)
        joined = rendezvous.join(inside, index, len(local), patience, mine)
        node = make_group(joined, index, made.timeout, made.staging_bytes)
        ranks, process_group = [made.ranks[rank] for rank in local], self._process_group
        blocks, timeout = self._max_blocks, made.timeout
        node._join_cuda = lambda device: join_processes(
            node, device, lambda: subgroup_of(process_group, ranks, timeout), blocks, 0
        )
        return node

    def _make_span(self, node: Group | None) -> Span:
        made, members = self._made, self._members
        nodes, index = members.nodes, members.nodes.local.index(made.rank)
        carriers: dict[str, Carriers | None] = {}
        for device, name in members.backends.items():
            carriers[device] = None
            if index < nodes.stripes:
                store: Store = PrefixStore(f"carriers/{index}/{device}", members.store)
                if name == "gloo":  # whose constructor waits for the others
                    store = LookedAfter(store, self._deadline, self._look)
                    self._stores.append(store)
                ranks = [
                    dist.get_global_rank(self._process_group, made.ranks[local[index]])
                    for local in nodes.ranks
                ]
                carriers[device] = Carriers(name, store, ranks, nodes.here, made.timeout)
                self._made_carriers += 1
        return Span(made._core, nodes, made.rank, node, carriers, made.timeout)

    def _look(self) -> None:
        if self._over.is_set():
            raise RuntimeError("another rank has died or could not connect")


def _drop(span: Span) -> None:
    span.abort()
    span.close()


def _told(made: Group, culprit: int, reason: str) -> str:
    """The culprit's reason, on all ranks."""
    text = torch.zeros(_LONGEST_REASON, dtype=torch.uint8)
    if made.rank == culprit:
        given = reason.encode()[:_LONGEST_REASON]
        text[: len(given)] = torch.tensor(list(given), dtype=torch.uint8)
    operation, at = operation_of("broadcast", "auto", text.dtype, root=culprit), text.data_ptr()
    made._core.run(operation, len(text), at, at, None, "connect")
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
