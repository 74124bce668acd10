"""Groups: who reduces with whom, in which shared memory."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pycomm import _C
from pycomm._inputs.arguments import (
    check_is_rank,
    check_process_group,
    not_set_up,
    process_group_of,
    seconds,
)
from pycomm._inputs.dtypes import check_dtype
from pycomm._runtime import log
from pycomm._runtime.cuda_windows import DEFAULT_MAX_BLOCKS, join_processes
from pycomm._runtime.internode import Nodes
from pycomm._runtime.open_groups import OpenGroups
from pycomm._runtime.plan import Plan, make_cuda_plan, make_plan, make_spanning_plan
from pycomm._runtime.rendezvous import WindowMaker, join, set_up_torch_distributed, slice_bytes
from pycomm._runtime.torch_private import store_of

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed.device_mesh import DeviceMesh

    from pycomm._runtime.cuda import CudaSide

DEFAULT_TIMEOUT = 300.0
DEFAULT_STAGING_BYTES = 2 << 20

_names = itertools.count()
_open_groups: OpenGroups[Group] = OpenGroups()


class Group:
    """One rank's membership in a group of ranks, on one node or several.

    Made by :func:`init` or :class:`pycomm.LocalWorld`. Operations on a group run in the order in
    which they were called, whichever thread calls; all ranks must call the same ones in the same
    order.

    As a context manager it is closed at the end; if an exception ends the block while operations
    are under way, it is aborted first.

    Operations that other threads have under way when the interpreter exits have half a second to
    complete; then the group is aborted.

    Attributes:
        rank: this rank, from 0.
        size: how many ranks.
        timeout: seconds that a rank may leave the others waiting.
        staging_bytes: shared memory of this rank for tensors that do not lie in the window.
        name: what ``torch.ops.pycomm`` calls the group.
        nodes: the ranks of each node, ascending; nodes by their first rank.
        stripes: how many ranks of every node exchange with other nodes, each with its like
            there (the first ones); 0 on one node.
    """

    def __init__(
        self,
        window: _C.Window,
        nodes: Nodes,
        pids: list[int],
        processes: Sequence[_C.Process | None],
        rank: int,
        cores: int,
        timeout: float,
        staging_bytes: int,
        link: _C.Transport | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, nodes.ranks))
        self.timeout = timeout
        self.staging_bytes = staging_bytes
        self.name = f"pycomm:{next(_names)}"
        self.nodes = nodes.ranks
        self.stripes = nodes.stripes
        local = nodes.local
        self._core = _C.Group(
            window,
            pids,
            processes,
            local.index(rank),
            len(local),
            cores,
            timeout,
            first_epoch,
            local,
        )
        if len(nodes.ranks) > 1:
            self._core.span(nodes.ranks, nodes.here, link, timeout)
        self._handle = self._core.handle
        self._tags = itertools.cycle(range(1, 1 << 16))
        self._told: set[str] = set()  # what is logged once
        self._cuda: CudaSide | None = None
        self._join_cuda: Callable[[torch.device], CudaSide] = _no_cuda
        _C.register_group(self.name, self._core)
        _open_groups.add(self)

    def empty(
        self,
        *size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """An uninitialised tensor in the shared window; collectives on it need no staging copy.

        The saving takes effect when the tensors of all ranks lie in their windows. On the CPU the
        memory is the tensor's own and goes back when the tensor does; on CUDA it comes from the
        heap that ``init(cuda_heap_bytes=...)`` set aside, goes back with the group, and the first
        call is one for all ranks together.

        Args:
            size: the shape, as for :func:`torch.empty`.
            dtype: one of the supported dtypes.
            device: ``"cpu"`` or a CUDA device.

        Raises:
            ValueError: an argument is not as described.
            MemoryError: the node lacks the memory.
        """
        check_dtype("dtype", dtype)
        self._core.check_usable()
        shape = torch.Size(size)
        if any(n < 0 for n in shape):
            raise ValueError(f"size must not be negative, got {tuple(shape)}")
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
        if self._stages(torch.device(device)):
            return torch.empty(shape, dtype=dtype, device=device)
        if torch.device(device).type == "cuda":
            return self._cuda_side(torch.device(device)).empty(shape, dtype)
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        allocation = self._core.allocate(count * dtype.itemsize)
        return torch.frombuffer(allocation, dtype=dtype, count=count).view(shape)

    def explain(
        self,
        nbytes: int,
        dtype: torch.dtype = torch.float32,
        *,
        algorithm: str = "auto",
        in_window: bool = False,
        device: str = "cpu",
    ) -> Plan:
        """What an all-reduce of `nbytes` bytes would do here, and why.

        The choice is the same on every rank; steps and bytes are this rank's own.

        Args:
            nbytes: bytes of the tensor.
            dtype: its dtype.
            algorithm: as for :func:`pycomm.all_reduce`.
            in_window: whether all ranks' tensors come from :meth:`empty`.
            device: ``"cpu"`` or ``"cuda"``.
        """
        check_dtype("dtype", dtype)
        if len(self.nodes) > 1:
            return make_spanning_plan(nbytes, dtype, self.rank, self.nodes, algorithm)
        if device == "cuda":
            transport = "not connected yet" if self._cuda is None else self._cuda.transport
            return make_cuda_plan(nbytes, self.size, algorithm, transport)
        return make_plan(
            nbytes=nbytes,
            dtype=dtype,
            rank=self.rank,
            size=self.size,
            algorithm=algorithm,
            in_window=in_window,
            slot_bytes=self._core.slot_bytes,
        )

    def check(self) -> None:
        """Raises if something has gone wrong in CUDA kernels that have run so far.

        Operations on CUDA tensors return before they run; their errors come out of here, or of the
        group's next operation. Waits only to raise, until no other rank uses this rank's tensors:
        synchronise first to know of all.
        """
        if self._cuda is not None:
            self._cuda.check()

    def traffic(self) -> tuple[int, int, int]:
        """Of this rank's last operation: signals given, bytes read from and written to others."""
        return self._core.traffic

    def link_traffic(self) -> tuple[int, int]:
        """Of this rank's last operation: bytes sent to and received from other nodes."""
        return self._core.link_traffic

    def trim(self) -> None:
        """Gives back memory that operations have left to the next ones of their kind.

        That is what top-k and operations between nodes work in on the CPU. It grows to what the
        largest tensor so far has needed. Waits for operations under way; other ranks need not call
        it.

        Raises:
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        self._core.trim()

    def abort(self) -> None:
        """Makes every rank that is in an operation, or enters one, raise :class:`pycomm.Aborted`.

        From any thread; the group is of no further use.
        """
        self._core.abort()

    def close(self) -> None:
        """Finishes what was started, then leaves the group. Idempotent; waits for no other rank."""
        side, self._cuda, self._join_cuda = self._cuda, None, _no_cuda
        if side is not None:
            side.close()
        self._core.close()

    def _next_tag(self) -> int:
        """What tells one user's operations from another's: ranks compare it. 0 is nobody's."""
        return next(self._tags)

    def _stages(self, device: torch.device) -> bool:
        """Whether host memory stands in for tensors there: nodes are joined by their CPUs."""
        stages = device.type == "cuda" and len(self.nodes) > 1
        if stages:
            log.fallback(self, "CUDA tensors go through host memory: the group spans nodes")
        return stages

    def _cuda_side(self, device: torch.device) -> CudaSide:
        """This rank's CUDA side; made at the first call, by all ranks together."""
        self._core.check_usable()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._cuda is None:
            try:
                self._cuda = self._join_cuda(device)
            except BaseException:
                self._core.abort()  # the peers must not wait for this rank
                raise
        if self._cuda.device != device:
            raise ValueError(
                f"device must be {self._cuda.device}, where this rank has been so far, got {device}"
            )
        return self._cuda

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The old name of `nodes`."""
        warnings.warn("hosts is called nodes now", DeprecationWarning, stacklevel=2)
        return self.nodes

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self._core.idle():
            self.abort()  # the others may never do their part of what is under way
        self.close()

    def __repr__(self) -> str:
        return f"pycomm.Group({self.name!r}, rank={self.rank}, size={self.size})"


def find_group(name: str) -> Group:
    """The group of that name; for operators, which take no objects."""
    return _open_groups.find(name)


def _no_cuda(device: torch.device) -> CudaSide:
    raise ValueError(f"the group must be open to take tensors, it is closed: got one on {device}")


_default: Group | None = None
_default_lock = threading.Lock()
_joining: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by prefix in the Store


def init(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    cuda_heap_bytes: int = 0,
) -> Group:
    """Makes a group of the processes of a torch.distributed group; a collective call.

    Those that share a node (the same boot and the same network, pid and ipc namespaces) share
    memory. Between nodes, as many ranks of each as the smallest has exchange over
    torch.distributed (Gloo), and host memory stands in for CUDA tensors.

    The first group made becomes the default of every operation, and once that is closed or has
    failed, the next one made. Where torch.distributed is not set up yet, it is, from torchrun's
    environment, with Gloo.

    Args:
        group: a torch.distributed process group, or a DeviceMesh of one dimension; by default the
            default group. Its Store serves as the rendezvous.
        timeout: seconds, or a timedelta, that a rank may leave the others waiting, here and in
            every operation. Ranks may differ in it: the least patient one ends it for all.
        staging_bytes: shared memory per rank for tensors that do not lie in the window. The same on
            every rank.
        max_blocks: the most blocks of threads that an operation may take from a GPU.
        cuda_heap_bytes: device memory per rank for ``group.empty(..., device="cuda")``. The same on
            every rank.

    Raises:
        ValueError: this process is not in `group`; or, on every rank, the ranks differ in what must
            be the same, or run builds of pycomm that lay out their shared memory differently.
        pycomm.Timeout: a rank did not come in time; on all ranks that came.
        pycomm.PeerDied: a rank died after all had come; on all ranks.
        pycomm.Aborted: a rank was interrupted; on all other ranks that had come.
    """
    global _default
    timeout = seconds(timeout, DEFAULT_TIMEOUT)
    check_process_group(group)
    if group is None:
        check_is_rank()
    if not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            raise not_set_up(in_threads=_open_groups.any_usable())
        set_up_torch_distributed(timeout)
    process_group = process_group_of(group)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("group must contain this process")
    # Always the same prefix: ranks that have tried unequally often meet all the same (see meet).
    prefix = f"pycomm/{process_group.group_name}"
    store = PrefixStore(prefix, store_of(process_group))
    windows = WindowMaker(
        create=lambda ranks: _C.create_window(ranks, slice_bytes(), staging_bytes),
        map=lambda fd, ranks: _C.Window(fd, ranks, slice_bytes(), staging_bytes),
    )
    settings = {
        "the window layout of pycomm's build": _C.window_layout,
        "the message format of pycomm's build": _C.message_version,
        "staging_bytes": int(staging_bytes),
        "cuda_heap_bytes": int(cuda_heap_bytes),
    }
    with _joining[prefix]:
        members = join(store, rank, size, windows, settings, timeout)
    nodes = members.nodes
    made = Group(
        members.window,
        nodes,
        members.pids,
        members.processes,
        rank,
        members.cores,
        timeout,
        staging_bytes,
        members.link,
    )
    if len(nodes.ranks) == 1:
        made._join_cuda = lambda device: join_processes(
            made, device, process_group, max_blocks, cuda_heap_bytes
        )
    log.group_made(made, members.cores, "Gloo")
    with _default_lock:
        if _default is None or not _default._core.usable():
            _default = made
    return made


def default_group() -> Group:
    """The default group; made on first use, on torch.distributed's default group."""
    return _default if _default is not None else init()


def set_default_group(group: Group | None) -> None:
    """Replaces the default group; None makes the next use make a new one."""
    global _default
    if not (group is None or isinstance(group, Group)):
        raise TypeError(f"group must be a pycomm.Group or None, got {group!r}")
    _default = group
