"""The wrapper's strategies that divide optimizer states, or gradients too, among ranks.

A step of a fused optimizer updates its rank's share of the parameters and writes the new ones to
all ranks. shards.py cuts parameters into shares; this file decides who averages their gradients:

- ranks on one node, without compression: the step itself, where it reads gradients anyway;
- ranks on several nodes: a reduce-scatter in backward, which gives each owner its averages;
- otherwise the wrapper's state, as without shards;
- with divided gradients: a reduce-scatter from three slots, so that no rank keeps whole gradients.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycomm._init import check_group
from pycomm._runtime.ranges import record_range
from pycomm._training import step_guard
from pycomm._training.buckets import Bucket, bucket_limit, gradient_memory
from pycomm._training.comm_state import CommState
from pycomm._training.exchange import BucketNames, dense_wire_bytes
from pycomm._training.flat import Memory, home_of
from pycomm._training.grad_shards import GradShardBuffers, slots_bytes
from pycomm._training.parameters import common_parameters, part_of
from pycomm._training.shard_exchange import BucketReduceScatter
from pycomm._training.shards import Shards, plan_arena
from pycomm._training.strategy import Strategy
from pycomm.compression import Compression, check_lossy_once
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm._runtime.cuda import HeapWishes
    from pycomm._training.buckets import WeightedMean
    from pycomm._training.hook_state import HookState

STAGES = ("optimizer", "gradients")


@dataclass(frozen=True)
class Sharding:
    """What :class:`pycomm.DataParallel` divides among ranks, and how.

    .. code-block:: python

        model = pycomm.DataParallel(model, shard=pycomm.Sharding("optimizer", replicas=2))

    Args:
        stage: ``"optimizer"`` or ``"gradients"``; see `shard` of :class:`pycomm.DataParallel`.
        group: the ranks that divide the states; by default the wrapper's group. With the ranks of
            this node, each node divides all states, and only gradients are sent between nodes.
        replicas: 2 keeps two copies of the optimizer's states, so that training continues if ranks
            are lost: a step then counts on all ranks or on none, and
            :meth:`pycomm.DataParallel.regroup` restores all states. Between nodes, every step sends
            a rank's states to another node, so that a whole node may be lost; that needs processes.
            CPU only.
        publish: compression of the parameters' changes that the owners of a share send to other
            nodes: :class:`Int8`, :class:`Cast` or :class:`Identity`. By default they send the
            parameters. On one node it has no effect.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    stage: str
    group: Group | None = None
    replicas: int = 1
    publish: Compression | None = None

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage must be 'optimizer' or 'gradients', got {self.stage!r}")
        check_group(self.group)
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas must be 1 or 2, got {self.replicas!r}")
        check_lossy_once("publish", self.publish)


def sharding_of(shard: object) -> Sharding:
    """The sharding for the wrapper's option `shard`."""
    if isinstance(shard, Sharding):
        return shard
    if isinstance(shard, str) and shard in STAGES:
        return Sharding(shard)
    raise ValueError(
        f"shard must be None, 'optimizer', 'gradients' or a pycomm.Sharding, got {shard!r}"
    )


# Whether a wrapper can shard.


def check_sharding(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: HookState,
    group: Group,
    sharding: Sharding,
) -> None:
    """Checks that a wrapper can shard, or that it can go on with another group.

    Args:
        module: the module.
        exchanged: the parameters that the wrapper exchanges.
        state: the wrapper's state.
        group: the wrapper's group, or the other group.
        sharding: what the wrapper divides.

    Raises:
        ValueError: the wrapper cannot shard.
    """
    if state.averages_parameters:
        raise ValueError("shard must be None with local SGD, whose ranks step on their own")
    for name, parameter in common_parameters(module):
        if home_of(parameter) is not None and part_of(parameter) is None:
            raise ValueError(
                f"shard flattens parameters itself, got {name}, which is flattened already"
            )
    divides = group if sharding.group is None else sharding.group
    _check_device(exchanged, divides)
    assert isinstance(state, CommState)
    plain = state.compression is None and divides is group
    if sharding.stage == "gradients" and not plain:
        raise ValueError(
            "shard='gradients' takes no compression and no group of its own: for these, use "
            "shard='optimizer'"
        )
    if sharding.replicas == 2:
        _check_replicas(module, divides, sharding)


def _check_replicas(module: nn.Module, group: Group, sharding: Sharding) -> None:
    """Raises ValueError if states cannot have replicas."""
    cannot = {
        "parameters on the CPU": any(
            not parameter.is_cpu for _, parameter in common_parameters(module)
        ),
        "the wrapper's own group": sharding.group is not None,
        "ranks that are processes, or a group on one node": not group._decides,
    }
    for wanted, missing in cannot.items():
        if missing:
            raise ValueError(f"replicas=2 needs {wanted}")


def _check_device(parameters: Sequence[torch.Tensor], group: Group) -> None:
    """Checks that a sharded step can run where the parameters lie.

    Connects the group's CUDA side if they lie on CUDA.

    Raises:
        ValueError: the step cannot run there.
    """
    devices = dict.fromkeys(parameter.device for parameter in parameters)
    if len(devices) > 1 or not all(device.type in ("cpu", "cuda") for device in devices):
        found = ", ".join(map(str, devices))
        raise ValueError(f"shard needs parameters on the CPU or on one CUDA device, got {found}")
    (device,) = devices or (torch.device("cpu"),)
    if device.type == "cpu":
        return
    if len(group.nodes) > 1:
        raise ValueError(
            f"on CUDA, shard needs a group on one node, got {len(group.nodes)} nodes: give the "
            'ranks of a node, as in shard=pycomm.Sharding("optimizer", group=node)'
        )
    side = group._cuda_side(device)
    if side.transport == "pinned host memory":
        raise ValueError(
            "on CUDA, shard needs GPUs with access to each other's memory, which two GPUs of this "
            "group do not have"
        )
    if side.shares_device:
        raise ValueError(
            "ranks that are threads must each have a GPU of their own for shard, got "
            f"{device} for all: autograd has one thread per device"
        )


def wishes_of_shards(
    group: Group,
    parameters: Sequence[torch.Tensor],
    state: HookState,
    sharding: Sharding,
    bucket_bytes: float,
) -> HeapWishes | None:
    """Wishes for room in CUDA windows, for the shards and what of the gradients lies there."""
    devices = [parameter.device for parameter in parameters if parameter.is_cuda]
    if state.averages_parameters or not devices:
        return None
    from pycomm._runtime.cuda import HeapWishes
    from pycomm._training.heap import ROUNDING, gradient_bytes

    wishes = HeapWishes(devices[0])
    divides = group if sharding.group is None else sharding.group
    parameters = list(reversed(parameters))  # as the wrapper cuts them into buckets
    limit = bucket_limit(parameters, bucket_bytes)
    in_place = state.exchanges_in_place(parameters)
    averages = sharding.stage == "optimizer" and divides is group and in_place
    arena = plan_arena(parameters, divides.size, limit, averages)
    wishes.add(divides, arena.nbytes + ROUNDING)
    if sharding.stage == "gradients":
        wishes.add(divides, slots_bytes(int(limit), divides.size) + ROUNDING)
    elif not averages and in_place:
        wishes.add(group, gradient_bytes(parameters))
    return wishes


# The strategies.


def strategy_of(
    sharding: Sharding, state: CommState, parameters: Sequence[torch.Tensor], bucket_bytes: float
) -> ShardOptimizer:
    """The strategy of a wrapper that shards."""
    kind = ShardGradients if sharding.stage == "gradients" else ShardOptimizer
    return kind(sharding, state, parameters, bucket_bytes)


class ShardOptimizer(Strategy):
    """Divides the optimizer's states among ranks.

    Args:
        sharding: what is divided.
        state: see :class:`Strategy`.
        parameters: see :class:`Strategy`.
        bucket_bytes: the largest size of a bucket of several parameters.

    Attributes:
        shards: the division of the parameters.
    """

    state: CommState
    shards: Shards

    def __init__(
        self,
        sharding: Sharding,
        state: CommState,
        parameters: Sequence[torch.Tensor],
        bucket_bytes: float,
    ) -> None:
        self._sharding, self._limit = sharding, bucket_limit(parameters, bucket_bytes)
        self._group = state.group if sharding.group is None else sharding.group
        self._owns = self._group is state.group  # the ranks that exchange gradients divide states
        self._scatter: BucketReduceScatter | None = None
        super().__init__(state, parameters)

    def _take_over(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._scatters():
            self._scatter = BucketReduceScatter(self.state)
        self.shards = Shards(
            parameters,
            self._group,
            self._memory(),
            self._limit,
            scatters=self._scatter is not None,
            publish=self._sharding.publish,
            replicates=self._sharding.replicas > 1,
        )
        self.shards.exchange_group = self.state.group
        self.layout = self.shards.layout

    def _memory(self) -> Memory | None:
        """Allocates memory for gradients; None leaves averaging to the step."""
        if len(self._group.nodes) == 1 and self._owns and self.state.compression is None:
            return None
        return functools.partial(gradient_memory, self.state.group)

    def _scatters(self) -> bool:
        """True if backward averages gradients at their owners only, between nodes."""
        if len(self._group.nodes) == 1 or not self._owns:
            return False
        encoded = self._sharding.publish is not None and self.state.encodes_once
        return self.state.compression is None or encoded

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """See :meth:`Strategy.prepare`."""
        sizes = (b.flat.itemsize * p.numel() for b in buckets for p in b.parameters)
        self._gradient_bytes = sum(sizes)
        self.shards.assign(bucket.parameters for bucket in buckets)
        if self._scatter is not None:
            self._scatter.place_residuals(self.shards.blocks.values())

    # A backward.

    def send(self, bucket: Bucket, number: int, weighing: WeightedMean | None) -> None:
        """See :meth:`Strategy.send`."""
        if self._scatter is None and not self.shards.averages:
            super().send(bucket, number, weighing)
            return
        if weighing is not None:
            weighing.scale(bucket.flat)
        if self._scatter is not None:
            blocks = self.shards.blocks[id(bucket.parameters[0])]
            start = functools.partial(self._scatter.start, blocks, bucket.parameters)
            self._launch(bucket, number, start)

    def _launch(self, bucket: Bucket, number: int, start: Callable[[], None]) -> None:
        """Starts a bucket that the state does not start itself."""
        names = BucketNames(self.state._parameters, bucket.flat, bucket.parameters)
        names.launch(self._group, number, start)

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """See :meth:`Strategy.finish`."""
        super().finish(buckets)
        began = time.perf_counter()
        with record_range(self.state.group, "finish"):
            sent, gathered = self._finish_own(buckets)
        if self._leaves_parts:
            waited = time.perf_counter() - began
            wire = self.shards.wire_bytes(sent)
            wire += dense_wire_bytes(gathered, self.state.group) // 2
            self.state.count_step(self._gradient_bytes, wire, waited)

    def _finish_own(self, buckets: Sequence[Bucket]) -> tuple[int, int]:  # noqa: ARG002
        """Waits for averages that do not go through the state.

        Returns:
            The bytes of gradients that were sent, and of earlier averages that were gathered.
        """
        if self._scatter is not None:
            return self._scatter.finish(), 0
        return self._gradient_bytes, 0  # a step reads no padding

    @property
    def _leaves_parts(self) -> bool:
        """True if this rank has only its part of the averages, or none, after a backward."""
        return self.shards.leaves_local

    def keep(
        self, parameters: Iterable[torch.Tensor], unused: Set[int], bucket_of: dict[int, Bucket]
    ) -> None:
        """See :meth:`Strategy.keep`."""
        parameters = list(parameters)
        super().keep(parameters, unused, bucket_of)
        if self.shards.leaves_local:
            self.shards.note_backward(parameters)
            self.shards.guard.await_step(parameters)

    # What a backward leaves to a step.

    def has_pending(self, parameters: Iterable[torch.Tensor], weighted: bool) -> bool:  # noqa: ARG002
        """See :meth:`Strategy.has_pending`."""
        return self.shards.has_pending(parameters)

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """See :meth:`Strategy.average`."""
        self.shards.average(parameters)

    def average_noted(self, parameters: Iterable[torch.Tensor], weighted: bool) -> None:  # noqa: ARG002
        """See :meth:`Strategy.average_noted`."""
        self.shards.average(parameters, noted=True)

    def forget_local(self, parameter: torch.Tensor) -> None:
        """See :meth:`Strategy.forget_local`."""
        self.shards.forget_local(parameter)

    def keep_local(self, parameter: torch.Tensor) -> None:
        """See :meth:`Strategy.keep_local`."""
        self.shards.forget_dropped(parameter)
        if self.state.group.size > 1:
            step_guard.note(parameter, inside_no_sync=True)

    # Parameters that only a step may change.

    def check(self) -> None:
        """See :meth:`Strategy.check`."""
        self.shards.guard.check()

    def sees_change(self) -> bool:
        """See :meth:`Strategy.sees_change`."""
        return self.shards.guard.sees_change()

    def compare(self, takes_nan: bool = True) -> None:
        """See :meth:`Strategy.compare`."""
        self.shards.guard.compare(self.shards.buffers(), takes_nan)

    def moved(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`Strategy.moved`."""
        return self.shards.moved(parameters)


def _no_memory(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ARG001
    """A meta tensor, for gradients that have places but no memory."""
    return torch.empty(count, dtype=dtype, device="meta")


class ShardGradients(ShardOptimizer):
    """Divides gradients, too: each rank keeps its part of the averages."""

    def _memory(self) -> Memory:
        return _no_memory

    def _scatters(self) -> bool:
        return False

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """See :meth:`Strategy.prepare`."""
        super().prepare(buckets)
        self._own = GradShardBuffers(self.shards, buckets, int(self._limit))
        self.shards.own_gradients = self._own

    def begin(self, parameters: Iterable[torch.Tensor], noted: bool) -> None:
        """See :meth:`Strategy.begin`."""
        self._own.begin(parameters, noted)

    @property
    def sends_averages(self) -> bool:
        """See :class:`Strategy`."""
        return self._own.adds

    def send(self, bucket: Bucket, number: int, weighing: WeightedMean | None) -> None:
        """See :meth:`Strategy.send`."""
        self._launch(bucket, number, functools.partial(self._own.send, bucket, weighing))

    def _finish_own(self, buckets: Sequence[Bucket]) -> tuple[int, int]:
        return sum(bucket.flat.nbytes for bucket in buckets), self._own.finish()

    @property
    def _leaves_parts(self) -> bool:
        return True

    def keep(
        self,
        parameters: Iterable[torch.Tensor],
        unused: Set[int],
        bucket_of: dict[int, Bucket],  # noqa: ARG002
    ) -> None:
        """See :meth:`Strategy.keep`."""
        parameters, own = list(parameters), self._own
        own.keep(p for p in parameters if id(p) not in unused or own.accumulates(p))
        self.shards.guard.await_step(parameters)

    def resume(self, parameters: Iterable[torch.Tensor]) -> None:
        """See :meth:`Strategy.resume`."""
        self._own.resume(parameters)

    def has_pending(self, parameters: Iterable[torch.Tensor], weighted: bool) -> bool:
        """See :meth:`Strategy.has_pending`: weights would scale the earlier averages, too."""
        return weighted and super().has_pending(parameters, weighted)

    def average_noted(self, parameters: Iterable[torch.Tensor], weighted: bool) -> None:
        """See :meth:`Strategy.average_noted`."""
        if weighted:
            super().average_noted(parameters, weighted)

    def compare(self, takes_nan: bool = False) -> None:
        """See :meth:`Strategy.compare`; a NaN may come from a stand-in."""
        super().compare(takes_nan)
