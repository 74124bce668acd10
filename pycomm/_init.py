"""Making groups of processes, and the default group."""

from __future__ import annotations

import functools
import os
import platform
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pycomm._inputs import (
    check_choice,
    check_is_rank,
    check_process_group,
    process_group_of,
    seconds,
)
from pycomm._names import refuse_retired
from pycomm._runtime import rendezvous
from pycomm._runtime.torch_private import backends_of, is_alive, store_of
from pycomm.group import (
    DEFAULT_MAX_BLOCKS,
    DEFAULT_STAGING_BYTES,
    DEFAULT_TIMEOUT,
    Group,
    _open_groups,
    make_group,
    take_cuda,
    when_replaced,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pycomm._runtime.grow import Growth
    from pycomm._runtime.rendezvous import RendezvousResult

TRANSPORTS = {"auto": 0, "gloo": 1}

_default: Group | None = None
_default_lock = threading.Lock()
_over: dict[dist.ProcessGroup, Group] = {}  # groups of hooks without a state
_joining: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by prefix in the Store


@refuse_retired("init")
def init(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    cuda_heap_bytes: int = 0,
    transport: str = "auto",
    algorithms: str | os.PathLike[str] | None = None,
) -> Group:
    """Makes a group of the processes of a torch.distributed group; a collective call.

    Ranks on the same node (with the same boot id and the same network, pid and ipc namespaces)
    share memory. Between nodes, data is exchanged over torch.distributed, by as many ranks of each
    node as the smallest node has.

    The first group made becomes the default group of every operation. When it is closed or has
    failed, the next group made takes its place.

    If torch.distributed is not set up yet, this function sets it up, from the variables of
    torchrun, pycomm.launch, srun or mpirun; without any, for one process, with a warning. It takes
    Gloo for CPU tensors and, where torch has NCCL and every rank a GPU of its own, NCCL
    for CUDA tensors. A rank's GPU is the current device if the process has used CUDA, otherwise the
    one that ``LOCAL_RANK`` names, modulo the number of visible devices, which then becomes the
    current one. Otherwise all have Gloo alone, and a warning says why. To choose yourself, call
    ``torch.cuda.set_device`` or ``init_process_group`` before. Torch's own operations have torch's
    default timeout (30 minutes), whatever `timeout` is.

    Args:
        group: a torch.distributed process group, or a DeviceMesh of one dimension; by default the
            default process group. Its Store serves as the rendezvous.
        timeout: how long ranks wait for another rank, here and in every operation, in seconds or as
            a timedelta. Ranks may pass different values; the shortest ends a wait for all.
        staging_bytes: shared memory per rank, in bytes, for tensors that are not in the window. The
            same on every rank.
        max_blocks: the largest number of thread blocks that an operation uses on a GPU.
        cuda_heap_bytes: device memory per rank, in bytes, for ``group.empty(..., device="cuda")``.
            The same on every rank.
        transport: what carries tensors between nodes; the same on every rank. ``"gloo"``: Gloo;
            CUDA tensors go through host memory. ``"auto"``: NCCL for CUDA tensors if every rank has
            it in `group`, otherwise Gloo (docs/how-to/clusters.md).
        algorithms: a file with the table by which ``algorithm="auto"`` chooses between nodes, with
            the same rows on every rank (docs/explanation/between-nodes.md).

    Returns:
        This rank's membership in the group.

    Raises:
        ValueError: `transport` has another value; this process is not in `group`; some of a
            launcher's variables are missing; or, on every rank, ranks passed different values for
            an argument that must be the same, run incompatible builds of pycomm, or one of them has
            no valid table in `algorithms`.
        pycomm.Timeout: a rank did not arrive in time; on all ranks that arrived.
        pycomm.PeerDied: a rank died after all had arrived; on all ranks.
        pycomm.Aborted: a rank was interrupted; on all other ranks that had arrived.
    """
    timeout = seconds(timeout, DEFAULT_TIMEOUT)
    check_choice("transport", transport, TRANSPORTS)
    check_process_group(group)
    if group is None:
        check_is_rank()
    warn = None
    if not dist.is_initialized():
        from pycomm._runtime import torch_distributed

        in_threads = _default is None and _open_groups.any_usable()
        warn = torch_distributed.set_up(timeout, in_threads)
        take_down = torch_distributed.take_down
        _open_groups.after_end(functools.partial(take_down, os.getpid(), dist.group.WORLD))
    process_group = process_group_of(group)
    given = staging_bytes, max_blocks, cuda_heap_bytes, transport, algorithms
    made = _adopt(_meet(process_group, timeout, *given))
    if warn is not None:
        warn(made)
    return made


def _meet(
    process_group: dist.ProcessGroup,
    timeout: float = DEFAULT_TIMEOUT,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    cuda_heap_bytes: int = 0,
    transport: str = "auto",
    algorithms: str | os.PathLike[str] | None = None,
) -> Group:
    """Makes a group of the ranks of a process group; a collective call. See :func:`init`."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("group must contain this process")
    # Always the same prefix, so that ranks meet although their numbers of attempts differ.
    prefix = f"pycomm/{process_group.group_name}"
    store = PrefixStore(prefix, store_of(process_group))

    def introduce() -> dict[str, Any]:
        nccl = transport == "auto" and has_nccl(process_group)
        given = staging_bytes, cuda_heap_bytes, transport, nccl, algorithms
        return {**rendezvous.introduction(*given), "surroundings": _surroundings()}

    with _joining[prefix]:
        members = rendezvous.join(store, rank, size, timeout, introduce, listens=True)
        described = "" if process_group is dist.group.WORLD else process_group.group_desc
        world = described, dist.get_process_group_ranks(process_group), dist.get_world_size()
        mine = members.everyone[rank]
        options = _Options(process_group, rank, mine, timeout, max_blocks, world)
        made = _complete(members, range(size), options)
    found = [member["surroundings"] for member in members.everyone]
    if found[0]["asks"] or any(each != found[0] for each in found):
        from pycomm._runtime import diagnosis

        diagnosis.look_around(made, members.pids, found)
    return made


def _surroundings() -> dict[str, Any]:
    """What slows all ranks down, or changes their results, if it differs on one of them."""
    asks = os.environ.get("PYCOMM_DIAGNOSE", "0")
    check_choice("PYCOMM_DIAGNOSE", asks, {"0": 0, "1": 1})
    return {
        "asks": asks == "1",  # for a diagnosis
        "host": platform.node(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "Linux": platform.release(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }


def has_nccl(group: dist.ProcessGroup) -> bool:
    """True if the process group has NCCL for CUDA tensors, and this rank has a device."""
    return backends_of(group).get("cuda") == "nccl" and torch.cuda.is_available()


@dataclass(frozen=True)
class _Options:
    """The options of a group and of the groups to which it shrinks.

    Attributes:
        process_group: the process group that has all ranks; None if the group has grown.
        rank: this process's rank in the process group, or in the group that has grown.
        mine: the introduction of this rank.
        timeout: seconds that an operation may take.
        max_blocks: the largest number of thread blocks on a GPU.
        world: the process group's description, its world ranks and the size of the world, from
            then, because torch.distributed may end before the group.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    mine: Mapping[str, Any]
    timeout: float
    max_blocks: int
    world: tuple[str, Sequence[int], int] = "", (), 0


def _complete(members: RendezvousResult, ranks: Sequence[int], options: _Options) -> Group:
    """Makes a group of ranks of the process group that know each other; a collective call."""
    rank = ranks.index(options.rank)
    try:
        return _make(members, rank, ranks, options)
    except BaseException:
        members.leave(rank)  # others may have their groups, and wait for this rank
        raise


def _make(members: RendezvousResult, rank: int, ranks: Sequence[int], options: _Options) -> Group:
    staging_bytes = options.mine["settings"]["staging_bytes"]
    title = _title(ranks, options)
    made = make_group(members, rank, options.timeout, staging_bytes, title)
    made.ranks = tuple(ranks)
    if len(made.nodes) == 1:
        _serve(made, members.everyone, options)
        return made
    _let_grow(made, members.everyone, options)
    if members.listener is not None:
        made._survive(
            members.listener,
            options.rank,
            options.mine,
            lambda members, ranks: _complete(members, ranks, options),
        )
    if members.nccl:
        from pycomm._nccl.connect import join_nodes

        made._span = join_nodes(made, members, options.process_group, options.max_blocks)
    return made


def _title(ranks: Sequence[int], options: _Options) -> tuple[str, Sequence[int]]:
    """What distinguishes a group of these ranks of the process group, and its world ranks."""
    description, numbers, size = options.world
    world_ranks = [numbers[rank] for rank in ranks] if numbers else []
    if not description and len(world_ranks) in (0, size):
        return "", world_ranks
    from pycomm._runtime.subgroup import title_of

    return title_of(description, world_ranks, size)


def _serve(group: Group, everyone: Sequence[Mapping[str, Any]], options: _Options) -> None:
    """Lets a group on one node, and the groups it shrinks to, take CUDA tensors and grow."""

    def go_on(larger: Group, smaller: Group) -> None:
        left = [everyone[larger.ranks.index(number)] for number in smaller.ranks]
        smaller._entitle(*_title(smaller.ranks, options))
        _serve(smaller, left, options)

    _connect_cuda(group, options)
    _let_grow(group, everyone, options)
    group._succession = go_on


def _connect_cuda(group: Group, options: _Options) -> None:
    """Lets a group on one node take CUDA tensors."""
    process_group = options.process_group

    def members() -> Any:
        if process_group is None:
            raise RuntimeError("torch.distributed has no process group of a group that has grown")
        if group.size == dist.get_world_size(process_group):
            return process_group
        from pycomm._nccl.process_groups import subgroup_of

        return subgroup_of(process_group, group.ranks, group.timeout)

    heap = options.mine["settings"]["cuda_heap_bytes"]
    take_cuda(group, members, options.max_blocks, heap)


def _let_grow(group: Group, everyone: Sequence[Mapping[str, Any]], options: _Options) -> None:
    """Lets newcomers join a group of processes that have introduced themselves."""
    rank, terms = group.rank, {"timeout": group.timeout, "max_blocks": options.max_blocks}

    def make() -> Growth[Group]:
        from pycomm._runtime.grow import Growth

        return Growth(everyone, terms, lambda members: _make_larger(members, rank, terms))

    group._make_growth = make


def _make_larger(members: RendezvousResult, rank: int, terms: Mapping[str, Any]) -> Group:
    """Makes a group that has grown; a collective call of its members and the newcomers."""
    mine = members.everyone[rank]
    options = _Options(None, rank, mine, terms["timeout"], terms["max_blocks"])
    return _complete(members, range(len(members.everyone)), options)


def default_group() -> Group:
    """Returns the default group; the first use makes it from torch's default group."""
    return _default if _default is not None else init()


def group_over(process_group: dist.ProcessGroup | None) -> Group:
    """The group of a process group's ranks; the first use makes it, in a collective call.

    None stands for the default group, which is also that of torch.distributed's default process
    group if it has all its ranks.
    """
    if process_group is None:
        return default_group()
    if process_group is dist.group.WORLD and default_group().size == dist.get_world_size():
        return default_group()
    if process_group not in _over:
        for destroyed in [known for known in _over if not is_alive(known)]:
            _over.pop(destroyed).close()
        _over[process_group] = _meet(process_group)
    return _over[process_group]


def _adopt(made: Group) -> Group:
    """Makes a new group the default group if there is none."""
    global _default
    with _default_lock:
        if _default is None or not _default._core.usable():
            _default = made
    return made


def _replace_default(before: Group, successor: Group) -> None:
    global _default
    with _default_lock:
        if _default is before:
            _default = successor


when_replaced.append(_replace_default)


def set_default_group(group: Group | None) -> None:
    """Replaces the default group; with None, the next use makes a new one."""
    global _default
    if not (group is None or isinstance(group, Group)):
        raise TypeError(f"group must be a pycomm.Group or None, got {group!r}")
    _default = group


# The argument `group` of operations.


def resolve_group(group: Group | None) -> Group:
    """Returns the group, or the default group for None."""
    check_group(group)
    return group if group is not None else default_group()


def check_group(group: object) -> None:
    """Raises TypeError unless `group` is a pycomm.Group or None."""
    if group is None or isinstance(group, Group):
        return
    torchs = isinstance(group, dist.ProcessGroup) or hasattr(group, "get_group")
    hint = ": make a pycomm.Group from it, once, with pycomm.init(group)" if torchs else ""
    raise TypeError(f"group must be a pycomm.Group or None, got {group!r}{hint}")
