"""Groups of ranks."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs import host
from pycomm._inputs.dtypes import check_dtype
from pycomm._runtime import log
from pycomm._runtime.elastic import Elastic
from pycomm._runtime.internode import Nodes
from pycomm._runtime.open_groups import OpenGroups
from pycomm._runtime.span import Span

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm._runtime.cuda import CudaSide
    from pycomm._runtime.rendezvous import Membership

DEFAULT_TIMEOUT = 300.0
DEFAULT_STAGING_BYTES = 2 << 20

_names = itertools.count()
_open_groups: OpenGroups[Group] = OpenGroups()


class Group(Elastic):
    """One rank's membership in a group of ranks, on one node or several.

    :func:`init` and :class:`pycomm.LocalWorld` make groups. Operations on a group run in the order
    in which they were called, from whichever threads. All ranks must call the same operations in
    the same order.

    A group is a context manager: it is closed at the end of the block. If an exception ends the
    block while operations are running, the group is aborted first.

    If operations of other threads are still running when the interpreter exits, they have half a
    second to complete; then the group is aborted.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        timeout: how long ranks wait for another rank, in seconds.
        staging_bytes: shared memory of this rank, in bytes, for tensors that are not in the window.
        name: the group's name in ``torch.ops.pycomm``.
        nodes: the ranks of each node, ascending; nodes are ordered by their first rank.
        stripes: the number of ranks of every node that exchange with other nodes. These are its
            first ranks, and the i-th ranks of all nodes exchange with each other. 0 on one node.
        ranks: for each rank, its number in the group from which this one has shrunk, over however
            many steps; for a new group or one that has grown, 0, 1, ...
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
        self.ranks = tuple(range(self.size))
        self._window = window
        self._pids, self._processes, self._cores = pids, processes, cores
        local = nodes.local
        index, size = local.index(rank), len(local)
        self._core = _C.Group(
            window, pids, processes, index, size, cores, timeout, first_epoch, local
        )
        self._link = link
        if len(nodes.ranks) > 1:
            self._core.span(nodes.ranks, nodes.here, link, timeout)
        self._handle = self._core.handle
        # The handle for the short way of collectives; None while a trace runs.
        self._short_way: object = self._handle
        self._tags = itertools.cycle(range(1, 1 << 16))
        self._told: set[str] = set()  # messages that are logged once
        self._span: Span | None = None  # NCCL between nodes
        self._cuda: CudaSide | None = None
        self._join_cuda: Callable[[torch.device], CudaSide] = _no_cuda
        # Catches up with the exchange of gradients that a forward has promised last.
        self._catch_up: weakref.WeakMethod[Callable[[], None]] | None = None
        self._preserved = itertools.count()  # numbers of operations with preserve=True
        self._begin_elastic()
        _C.register_group(self.name, self._core)
        _open_groups.add(self)

    def empty(
        self,
        *size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Makes an uninitialised tensor in the window; collectives on it need no staging copy.

        Staging is avoided if the tensors of all ranks lie in the window. On the CPU, the memory is
        freed together with the tensor. On CUDA, it comes from the heap that
        ``init(cuda_heap_bytes=...)`` has reserved and is freed together with the group, and all
        ranks must make the first call together.

        Args:
            size: the shape, as for :func:`torch.empty`.
            dtype: one of the supported dtypes.
            device: ``"cpu"`` or a CUDA device.

        Returns:
            The tensor. In a group that spans nodes, a CUDA tensor is an ordinary one.

        Raises:
            ValueError: an argument is not as described.
            MemoryError: the node has too little memory.
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
            return host.empty(*shape, dtype=dtype)
        allocation = self._core.allocate(count * dtype.itemsize)
        return torch.frombuffer(allocation, dtype=torch.uint8).view(dtype)[:count].view(shape)

    def check(self) -> None:
        """Raises the error of CUDA kernels that have run so far, if there is one.

        Operations on CUDA tensors return before they run, so this method or the group's next
        operation raises their errors. Synchronise with the stream first to cover all operations.
        Without an error this returns at once; with one it waits until no other rank uses this
        rank's tensors.
        """
        if self._cuda is not None:
            self._cuda.check()
        if self._span is not None:
            self._span.check()

    def trim(self) -> None:
        """Frees memory that operations keep for later ones of their kind.

        Top-k and operations between nodes keep their working memory on the CPU, which grows with
        the largest tensor so far. This method waits for running operations. Other ranks need not
        call it.

        Raises:
            pycomm.GroupUnusable: the group is closed or has failed.
        """
        self._core.trim()

    def abort(self) -> None:
        """Makes every rank that is in an operation, or enters one, raise :class:`pycomm.Aborted`.

        Any thread may call this. Afterwards the group cannot be used any more. If this rank is in
        :meth:`shrink`, that ends, too.
        """
        self._abort_operations()
        self._stop_shrinking()

    def _abort_operations(self) -> None:
        self._core.abort()
        span = self._span
        if span is not None:
            span.abort()

    def close(self) -> None:
        """Finishes running operations, then leaves the group without waiting for other ranks."""
        try:
            self._leave()
        finally:
            self._close_doors()

    def _leave(self) -> None:
        self._join_cuda, self._succession = _no_cuda, None  # which refer to this group
        side, self._cuda = self._cuda, None
        span, self._span = self._span, None
        with contextlib.ExitStack() as last_first:  # the others also if one raises
            last_first.callback(self._core.close)
            if span is not None:
                last_first.callback(span.close)
            if side is not None:
                last_first.callback(side.close)

    def _smaller(self, window: _C.Window, members: list[int]) -> Group:
        """The group of some ranks of this one, which are on one node."""
        smaller = Group(
            window,
            Nodes((tuple(range(len(members))),), 0),
            [self._pids[rank] for rank in members],
            [self._processes[rank] for rank in members],
            members.index(self.rank),
            self._cores,
            self.timeout,
            self.staging_bytes,
        )
        smaller.ranks = tuple(self.ranks[rank] for rank in members)
        return smaller

    def _keep_promise(self) -> None:
        """Takes part in an exchange of gradients that this rank has promised, if others are in it.

        So a rank whose backward has raised can call other operations with the others.
        """
        catch_up = None if self._catch_up is None else self._catch_up()
        if catch_up is not None:
            catch_up()

    def _next_tag(self) -> int:
        """A number, compared by ranks, that distinguishes one user's operations. 0 means none."""
        return next(self._tags)

    def _spans(self, device: torch.device) -> bool:
        """True if tensors on `device` travel between nodes over NCCL."""
        return self._span is not None and device.type == "cuda"

    def _exchanges_on_host(self, device: torch.device) -> bool:
        """True if gradients on `device` are exchanged through host memory."""
        return not self._spans(device) and self._stages(device)

    def _stages(self, device: torch.device) -> bool:
        """True if operations that do not go over NCCL take tensors on `device` to the host."""
        stages = device.type == "cuda" and len(self.nodes) > 1
        if stages:
            log.fallback(self, "CUDA tensors go through host memory: the group spans nodes")
        return stages

    def _cuda_side(self, device: torch.device) -> CudaSide:
        """This rank's CUDA side; all ranks together make theirs at the first call."""
        self._core.check_usable()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._cuda is None:
            try:
                self._cuda = self._join_cuda(device)
            except BaseException:
                self._core.abort()  # so that other ranks do not wait for this one
                raise
        if self._cuda.device != device:
            raise ValueError(
                f"device must be {self._cuda.device}, where this rank has been so far, got {device}"
            )
        return self._cuda

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self._core.idle():
            self.abort()  # other ranks may never do their part of running operations
        self.close()

    def __repr__(self) -> str:
        return f"pycomm.Group({self.name!r}, rank={self.rank}, size={self.size})"


def make_group(
    members: Membership, rank: int, timeout: float, staging_bytes: int = DEFAULT_STAGING_BYTES
) -> Group:
    """Makes a group of ranks that know each other, without a CUDA side."""
    made = Group(
        members.window,
        members.nodes,
        members.pids,
        members.processes,
        rank,
        members.cores,
        timeout,
        staging_bytes,
        members.link,
    )
    log.group_made(
        made, members.cores, "NCCL for cuda, Gloo for the rest" if members.nccl else "Gloo"
    )
    return made


def find_group(name: str) -> Group:
    """The group with this name; for operators, which cannot take objects."""
    return _open_groups.find(name)


def _no_cuda(device: torch.device) -> CudaSide:
    raise ValueError(f"the group must be open to take tensors, it is closed: got one on {device}")
