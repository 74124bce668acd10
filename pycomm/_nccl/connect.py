"""Connects the nodes of a group over NCCL.

NCCL's first operation waits for the other nodes, even dead ones, and cannot be interrupted. So a
thread of every rank connects. Meanwhile the ranks repeatedly tell each other over the group whether
they are connected. These operations fail if a rank has died, and they end the wait on all ranks if
one could not connect. Connecting has one deadline, which begins once all ranks have come. If it
passes, the error names the rank that has done the fewest steps before NCCL's first operation, or
the first waiting rank if all ranks have done these steps.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from pycomm._inputs import operation_of
from pycomm._nccl.collectives import COLLECTIVES
from pycomm._nccl.process_groups import InternodeProcessGroups, StripePeers, subgroup_of
from pycomm._runtime import host, log, rendezvous
from pycomm._runtime.cuda import join_processes
from pycomm._runtime.threads import Deadline, start_thread
from pycomm.errors import CollectiveError
from pycomm.group import Group, make_group

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm._runtime.rendezvous import RendezvousResult

_LOOK_EVERY = 0.01  # seconds
_PATIENCE_AT_END = 0.2  # seconds
_LONGEST_REASON = 500  # bytes
_STEPS = 2  # before NCCL's first operation: joins its node's group, and makes its carriers


def join_nodes(
    made: Group,
    members: RendezvousResult,
    process_group: dist.ProcessGroup | None,
    max_blocks: int,
) -> InternodeProcessGroups | None:
    """Connects the nodes of a new group; a collective call; arguments of :func:`connect_nodes`.

    Returns:
        None if that failed on a rank, so that Gloo is used instead.

    Raises:
        pycomm.CollectiveError: a rank has died.
    """
    assert process_group is not None, "a group that has grown has no NCCL"
    try:
        return connect_nodes(made, members, process_group, max_blocks)
    except CollectiveError as error:
        if not made._core.usable():
            made.close()  # not abort(), which could hide the failure from others
            raise
        log.fallback(made, "%s: Gloo carries CUDA tensors through host memory", error)
        return None


def connect_nodes(
    made: Group, members: RendezvousResult, process_group: dist.ProcessGroup, max_blocks: int
) -> InternodeProcessGroups:
    """Connects the nodes over NCCL; a collective call.

    Args:
        made: the group; none of its operations is running.
        members: this rank's membership in the group.
        process_group: the process group that has its ranks, by the numbers ``made.ranks``.
        max_blocks: the largest number of thread blocks on a GPU.

    Raises:
        pycomm.CollectiveError: a rank has died, and the group has failed; or a rank could not
            connect within the group's timeout, and the group stays usable. On all ranks.
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
        self,
        made: Group,
        members: RendezvousResult,
        process_group: dist.ProcessGroup,
        max_blocks: int,
    ) -> None:
        self._made, self._members = made, members
        self._process_group, self._max_blocks = process_group, max_blocks
        self._deadline = Deadline(made.timeout)
        self._over = False
        self._done = 0  # steps
        self._span: InternodeProcessGroups | None = None
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pycomm-nccl", daemon=True)
        start_thread(self._thread)
        _attempts.add(self)

    def await_all(self) -> InternodeProcessGroups:
        """This rank's connections, once all ranks are connected."""
        made, size = self._made, self._made.size
        # Whether any rank waits; whether any has failed; and the rank with the most steps left.
        state = host.zeros(3, dtype=torch.int64)
        operation, at = operation_of("all_reduce", "auto", state.dtype, "max"), state.data_ptr()
        while True:
            waits, error = not self._ended.wait(_LOOK_EVERY), self._error
            over = self._deadline.over()
            fails = error is not None and not over  # after the deadline, a failed wait for others
            connected = not waits and error is None
            left = _STEPS + 1 if fails else _STEPS - self._done
            state[0], state[1] = waits, fails or (over and not connected)
            state[2] = 0 if connected else (left + 1) * size - made.rank
            made._core.run(operation, len(state), at, at, None, "connect")
            waits = bool(state[0])
            if state[1]:
                culprit = -int(state[2]) % size
                why = _told(made, culprit, self._reason())
                raise CollectiveError(
                    f"NCCL could not connect the nodes (rank {culprit}: {why})",
                    rank=culprit,
                )
            if not waits:
                self._thread.join()
                assert self._span is not None
                return self._span

    def end(self) -> None:
        """Gives up, and waits for a short time until the thread has ended."""
        self._over = True
        if self._span is not None:
            self._span.abort()
        self._thread.join(_PATIENCE_AT_END)
        if self._span is not None:
            _drop(self._span)

    def end_now(self) -> None:
        """Gives up if the thread still runs."""
        if self._thread.is_alive():
            self.end()

    def _reason(self) -> str:
        if self._error is None:
            return f"not connected within {self._made.timeout:g} s"
        return f"{type(self._error).__name__}: {self._error}"

    def _run(self) -> None:
        try:
            self._connect()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def _connect(self) -> None:
        torch.cuda.set_device(self._device)
        node = self._join_node()
        self._done += 1
        try:
            carriers = self._make_carriers()
        except BaseException:
            if node is not None:
                node.close()
            raise
        self._done += 1
        made, nodes = self._made, self._members.nodes
        self._span = span = InternodeProcessGroups(
            made._core, nodes, made.rank, node, carriers, COLLECTIVES, made.timeout
        )
        span.node_order(torch.device("cuda", self._device))  # now: no graph can capture it
        if self._over:  # end() was called before
            _drop(span)
        elif carriers is not None:
            carriers.connect()

    def _join_node(self) -> Group | None:
        """A group of this node's ranks; None if there is only one."""
        made, members = self._made, self._members
        local = members.nodes.local
        if len(local) == 1:
            return None
        index, patience = local.index(made.rank), self._deadline.left()
        inside = PrefixStore(f"node/{members.nodes.here}", members.store)

        def introduce() -> dict[str, Any]:
            return rendezvous.introduction(made.staging_bytes)

        joined = rendezvous.join(inside, index, len(local), patience, introduce)
        node = make_group(joined, index, made.timeout, made.staging_bytes)
        ranks, process_group = [made.ranks[rank] for rank in local], self._process_group
        blocks, timeout = self._max_blocks, made.timeout
        node._join_cuda = lambda device: join_processes(
            node, device, lambda: subgroup_of(process_group, ranks, timeout), blocks, 0
        )
        return node

    def _make_carriers(self) -> StripePeers | None:
        nodes = self._members.nodes
        index = nodes.local.index(self._made.rank)
        if index >= nodes.stripes:
            return None
        store = PrefixStore(f"carriers/{index}", self._members.store)
        return StripePeers(store, nodes.here, len(nodes.ranks), self._made.timeout)


_attempts: weakref.WeakSet[_Attempt] = weakref.WeakSet()


@atexit.register
def _end_attempts() -> None:
    """Gives up: a thread that waits in torch when the interpreter ends aborts the process."""
    for attempt in list(_attempts):
        attempt.end_now()


def _drop(span: InternodeProcessGroups) -> None:
    span.abort()
    span.close()


def _told(made: Group, culprit: int, reason: str) -> str:
    """The culprit's reason, on all ranks."""
    text = host.zeros(_LONGEST_REASON, dtype=torch.uint8)
    if made.rank == culprit:
        given = reason.encode()[:_LONGEST_REASON]
        text[: len(given)] = host.tensor(list(given), dtype=torch.uint8)
    operation, at = operation_of("broadcast", "auto", text.dtype, root=culprit), text.data_ptr()
    made._core.run(operation, len(text), at, at, None, "connect")
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
