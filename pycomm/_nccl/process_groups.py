"""A rank's connections to other nodes over NCCL, and the exchange over them.

Operations are enqueued on a separate stream, and a thread watches their deadlines. Tensors on the
CPU go over the group's own link (pycomm/_runtime/internode.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions

from pycomm import _C
from pycomm._runtime.threads import start_thread
from pycomm._runtime.torch_private import new_nccl
from pycomm.errors import CollectiveError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from pycomm._runtime.lifetime import Member, Nodes

# The exchange between nodes over NCCL.
#
# For each stripe, the ranks that carry it, one of each node, have an NCCL communicator. Tensors are
# sent as bytes.

_LOOK_EVERY = 0.02  # seconds between two queries of a device


def subgroup_of(group: Any, ranks: Sequence[int], timeout: float) -> Any:
    """A new process group of some ranks of another group; only these ranks call this."""
    found = [dist.get_global_rank(group, rank) for rank in ranks]
    patience = timedelta(seconds=timeout)
    return dist.new_group(found, patience, "gloo", use_local_synchronization=True)


class StripePeers:
    """The ranks of all nodes that carry one stripe.

    Transfers are torch's works, whose ``wait()`` makes the current stream wait, and raises no
    errors. Until then the caller keeps the tensors.

    Args:
        store: a Store that only these ranks use.
        here: the index of this rank among them, which is its node's index.
        nodes: the number of nodes.
        timeout: seconds that connecting may take.
    """

    def __init__(self, store: Store, here: int, nodes: int, timeout: float) -> None:
        self._nodes, self._timeout = nodes, timeout
        self._aborted = False  # no Event, because a signal handler may abort
        self._owner = os.getpid()
        self._backend = new_nccl(store, here, nodes)

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Sends part m of `given` to node m; `output` receives a part of each node, in order."""
        return self._backend.alltoall_base(_bytes(output), _bytes(given), [], [], AllToAllOptions())

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Collects all nodes' `given` in `output`, in the order of nodes."""
        return self._backend._allgather_base(_bytes(output), _bytes(given))

    def broadcast(self, tensor: torch.Tensor, node: int) -> Any:
        """Copies a node's tensor to all others."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = node, 0
        return self._backend.broadcast([_bytes(tensor)], options)

    def connect(self) -> None:
        """Makes NCCL connect now, on the current device, and not in the first operation.

        Raises:
            TimeoutError: another node has not come within the timeout.
        """
        if self._aborted:  # before this rank has come here
            raise TimeoutError("NCCL was aborted before it connected")
        numbers = torch.zeros(self._nodes, dtype=torch.float32, device="cuda")
        mine = numbers[:1].clone()
        self.all_gather(numbers, mine).wait()
        done = Point(torch.cuda.current_stream().record_event())
        deadline = time.monotonic() + self._timeout
        while not _happened(done):
            if self._aborted or time.monotonic() > deadline:
                self.abort()
                raise TimeoutError(f"NCCL has not connected within {self._timeout:g} s")
            time.sleep(_LOOK_EVERY)

    def abort(self) -> None:
        """Ends all transfers, also on other nodes that wait for this one."""
        if os.getpid() != self._owner:  # a forked child has the parent's connections
            return
        self._aborted = True
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._backend.abort()

    def close(self) -> None:
        """Ends the communicator. Data that this rank has sent still arrives."""
        if os.getpid() != self._owner:
            _inherited.append(self._backend)
            return
        if self._aborted:
            return
        with contextlib.suppress(RuntimeError):  # another node has gone
            self._backend.shutdown()  # otherwise NCCL aborts running transfers


_inherited: list[Any] = []  # in a forked child: their end would wait for threads


class DeadlineThread:
    """A thread that watches the deadlines of work on a device.

    It ends when this object is deleted.

    Args:
        timeout: seconds that a piece of work may take once it has begun.
        overrun: a method that is called when a piece takes longer; then the thread ends.
    """

    def __init__(self, timeout: float, overrun: Callable[[], None]) -> None:
        self._pairs: Pairs = queue.SimpleQueue()
        self._ending = threading.Event()
        arguments = (self._pairs, self._ending, timeout, weakref.WeakMethod(overrun))
        self._thread = threading.Thread(
            target=_watch_pairs, args=arguments, name="pycomm-watch", daemon=True
        )
        start_thread(self._thread)

    def add(self, begin: Point, end: Point) -> None:
        """Watches the work between two events."""
        self._pairs.put((begin, end))

    def end(self) -> None:
        """Ends the thread."""
        self._tell()
        self._thread.join()

    def _tell(self) -> None:
        self._ending.set()
        self._pairs.put(None)

    def __del__(self) -> None:
        self._tell()


def _watch_pairs(
    pairs: Pairs,
    ending: threading.Event,
    timeout: float,
    overrun: weakref.WeakMethod[Callable[[], None]],
) -> None:
    while (pair := pairs.get()) is not None:
        deadline = math.inf
        for event in pair:
            while not _happened(event):
                late = time.monotonic() > deadline and not ending.is_set()
                if late and (call := overrun()) is not None:
                    call()
                    return
                if ending.wait(_LOOK_EVERY):
                    return
            deadline = time.monotonic() + timeout


class Point:
    """An event of a CUDA stream that can be queried while another thread captures a graph."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        """True if the stream has come to the event."""
        return _C.cuda_completed(self._event.cuda_event)


def _happened(event: Point) -> bool:
    """True if the work has come to the event; a failed device never does."""
    try:
        return event.query()
    except RuntimeError:
        return False


Pairs: TypeAlias = "queue.SimpleQueue[tuple[Point, Point] | None]"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


# A rank's connections to other nodes over NCCL, and its operations on them.


# Runs a collective over NCCL; takes the connections, and arguments of pycomm._work.launch().
Collective: TypeAlias = "Callable[..., Any]"


class InternodeProcessGroups:
    """The connections of one rank.

    Args:
        core: the group's core.
        nodes: the ranks of each node.
        rank: this rank.
        node: a group of this node's ranks; None if there is only one.
        carriers: the ranks that carry the same stripe; None if this rank carries none.
        collectives: functions that run a collective on CUDA tensors, by its name.
        timeout: seconds that an operation may take.

    Attributes:
        world: the number of ranks.
        here: the index of this node.
        index: the index of this rank in its node.
        stripes: the number of ranks of every node that carry stripes.
        carries: True if this rank carries a stripe.
        stripe: the index of its stripe; if it carries none, of the last one.
        even: True if all nodes have the same number of ranks, and all ranks carry stripes.
        single: True if every node has one rank.
        ordered: True if the ranks are ascending from node to node.
    """

    def __init__(
        self,
        core: _C.Group,
        nodes: Nodes,
        rank: int,
        node: Member | None,
        carriers: StripePeers | None,
        collectives: Mapping[str, Collective],
        timeout: float,
    ) -> None:
        self.node, self._carriers, self.collectives = node, carriers, collectives
        self.nodes, self.here, self.stripes = nodes.ranks, nodes.here, nodes.stripes
        self.rank, self.index = rank, nodes.local.index(rank)
        self.world = sum(map(len, nodes.ranks))
        self.carries = self.index < nodes.stripes
        self.stripe = min(self.index, nodes.stripes - 1)
        self.even = {len(ranks) for ranks in nodes.ranks} == {nodes.stripes}
        self.single = self.world == len(nodes.ranks)
        self.ordered = [*itertools.chain(*nodes.ranks)] == [*range(self.world)]
        self._core, self._timeout = core, timeout
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._orders: dict[torch.device, torch.Tensor] = {}
        self._watch: DeadlineThread | None = None
        self._overrun = False

    @property
    def carriers(self) -> StripePeers:
        """The carriers of this rank's stripe."""
        assert self._carriers is not None
        return self._carriers

    def place_of(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its index there."""
        node = next(m for m, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)

    def node_order(self, device: torch.device) -> torch.Tensor:
        """All ranks, node by node."""
        if device not in self._orders:
            ranks = [*itertools.chain(*self.nodes)]
            self._orders[device] = torch.tensor(ranks, dtype=torch.int64, device=device)
        return self._orders[device]

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
            except CollectiveError as error:  # its rank is a number inside the node
                self._end_all()
                rank = self.nodes[self.here][error.rank]
                raise type(error)(
                    f"inside node {self.here}: {error}", rank=rank, pid=error.pid
                ) from error
            except BaseException:  # the other ranks wait for this one's operations
                self._end_all()
                raise
            finally:  # kernels that have been enqueued use the tensors
                current.wait_stream(stream)
                for tensor in tensors:
                    tensor.record_stream(stream)
            if begin is not None:
                if self._watch is None:
                    self._watch = DeadlineThread(self._timeout, self._end_overrun)
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
        """Ends running operations, here and on other nodes."""
        carriers = self._carriers  # another thread may close the group
        if carriers is not None:
            carriers.abort()
        if self.node is not None:
            self.node.abort()

    def close(self) -> None:
        """Finishes running operations."""
        try:
            for stream in self._streams.values():
                stream.synchronize()
        except BaseException:  # interrupted
            self._end_all()
            raise
        finally:
            if self._watch is not None:
                self._watch.end()
            carriers, self._carriers = self._carriers, None
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
