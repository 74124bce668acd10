"""A data-parallel wrapper of a module, with an exchange that overlaps backward.

Gradients lie in flat buckets in the group's window, so that they are reduced in place. The exchange
of a bucket starts when its last gradient is ready, while backward goes on. The first backward shows
the order in which gradients become ready.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from pycomm._inputs import check_memory
from pycomm._names import refuse_retired
from pycomm._runtime import host
from pycomm._runtime.torch_private import (
    backward_id,
    backward_node,
    internal_overlap,
    not_compiled,
)
from pycomm._training.agree import largest, sync_initial_state
from pycomm._training.buckets import WeightedMean, broadcast_all
from pycomm._training.comm_state import CommState, check_successor
from pycomm._training.hook_state import HookState
from pycomm._training.parameters import (
    common_buffers,
    common_parameters,
    ignored,
    is_averaged,
    known_of,
)
from pycomm._training.reducer import Reducer, tensors_in
from pycomm._training.strategy import Strategy
from pycomm._training.wrapper import ModuleProxy
from pycomm.compression import Compression
from pycomm.errors import Mismatch, PycommError
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm._training.explain import ExchangePlan
    from pycomm._training.local_sgd import LocalSGDState
    from pycomm._training.sharding import Sharding
    from pycomm._training.survival import ShardSurvival

_MIB = 1 << 20
_BUCKET_CAP_MB = 25  # torch's default, too


class DataParallel(ModuleProxy):
    """Runs a module on every rank and averages its gradients in backward.

    .. code-block:: python

        model = pycomm.DataParallel(model, compression=pycomm.Int8())

    All ranks begin with rank 0's parameters and buffers. Ranks may be processes, or the threads of
    a :class:`pycomm.LocalWorld`, each with a module of its own. A parameter belongs to the wrapper
    that was made last: an older wrapper of it raises in its next forward.

    Args:
        module: the module to train. Parameters and buffers that its attribute
            ``_ddp_params_and_buffers_to_ignore`` names, such as each rank's experts, are neither
            exchanged nor compared, as in DistributedDataParallel.
        compression: compression of the gradients; None sends them uncompressed. Residuals keep what
            it loses of each parameter, and send it later.
        bucket_cap_mb: the largest size, in MiB, of a bucket of several parameters. Models with
            fewer than 16 such buckets get smaller buckets.
        group: by default the default group.
        grad_scaler: see :class:`pycomm.hooks.CommState`.
        broadcast_buffers: send rank 0's buffers to all ranks before every forward that records
            gradients, unless a backward of another forward is still to come; with local SGD, only
            before the first such forward after an exchange.
        shard: ``"optimizer"`` divides the optimizer's states among the ranks. The step of a fused
            optimizer then averages the gradients of its rank's share, updates it, and writes the
            new parameters to all ranks. ``"gradients"`` divides gradients, too: backward averages
            them, and each rank keeps its share. Parameters get the same bits as without it. See
            :meth:`reduce_gradients` to read or change gradients before the step. A
            :class:`pycomm.Sharding` has more options: replicas that survive a lost rank, the ranks
            that divide, a compression of new parameters.
        state: a state of :mod:`pycomm.hooks` that exchanges gradients, made with this module's
            parameters; with `shard`, no other wrapper may have it. Its options replace
            `compression`, `group` and `grad_scaler`. It also has options that this wrapper lacks:
            which parameters are sent uncompressed, a warm-up, no residuals, the algorithm. A
            :class:`pycomm.hooks.LocalSGDState` exchanges parameters every few steps instead of
            gradients in backward: call its ``step()`` after every step of the optimizer.

    Attributes:
        module: the wrapped module; ``state_dict`` and ``load_state_dict`` are the module's.
        comm_state: statistics, and residuals to save: `state` if given, else a
            :class:`pycomm.hooks.CommState`.
        require_backward_grad_sync: as in DistributedDataParallel. While it is False, as in
            :meth:`no_sync`, gradients are only added up.

    Raises:
        ValueError, TypeError: an argument is not as described; or the options, or the names, order,
            shapes, strides, dtypes or requires_grad of the modules' parameters and buffers, differ
            between ranks. It names the first difference.
        MemoryError: a rank lacks memory for its shards; on all ranks of a group on one node or of
            processes.
        pycomm.CollectiveError: the module or options of another rank, which has joined, differ.
    """

    @refuse_retired("DataParallel")
    def __init__(
        self,
        module: nn.Module,
        *,
        compression: Compression | None = None,
        bucket_cap_mb: float = _BUCKET_CAP_MB,
        group: Group | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        broadcast_buffers: bool = True,
        shard: str | Sharding | None = None,
        state: CommState | LocalSGDState | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        sharding = None
        if shard is not None:
            from pycomm._training.sharding import sharding_of

            sharding = sharding_of(shard)
        parameters = common_parameters(module)
        for name, tensor in (*parameters, *common_buffers(module)):
            check_memory(f"module: {name}", tensor)
            _check_overlap(name, tensor)
        _check_dense(module)
        if state is None:
            state = CommState(compression, parameters, group=group, grad_scaler=grad_scaler)
        else:
            given = {"compression": compression, "group": group, "grad_scaler": grad_scaler}
            _check_state(state, module, given)
            _check_unshared(state, module, sharding is not None)
        super().__init__(module)
        self.comm_state: CommState | LocalSGDState = state
        self.require_backward_grad_sync = True
        self._sharding = sharding
        self._bucket_bytes = bucket_cap_mb * _MIB
        self._broadcast_buffers = broadcast_buffers
        self._options = {"bucket_cap_mb": float(bucket_cap_mb), **state.options()}
        self._options["broadcast_buffers"] = broadcast_buffers
        self._buffer_shapes = {name: buffer.shape for name, buffer in common_buffers(module)}
        self._agreements_seen = -1  # of local SGD, when buffers were broadcast
        self._module_takes_weight = _takes_weight(module)
        self._next_weight: float | None = None
        self._joined_steps: int | None = None  # None outside of join()
        # The parameters that are exchanged, including parameters that are frozen later.
        self._kept = [p for _, p in common_parameters(module) if p.requires_grad]
        self._own_exchange: Reducer | None = None
        exchanged = self._exchanged()
        self._begin_in(self._group, exchanged, is_new=True)
        self._own_exchange = self._make_on_all(exchanged)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward.

        Args:
            args: passed to the module.
            kwargs: passed to the module, except for `weight`, which is passed to :meth:`weigh`
                unless the module's forward has an argument of that name.

        Returns:
            The module's outputs.
        """
        training = torch.is_grad_enabled() and not self._is_frozen_copy()
        self._check_parameters()
        weight = None if self._module_takes_weight else kwargs.pop("weight", None)
        if training:
            self._prepare(weight)
        outputs = self.module(*args, **kwargs)
        if training and (self.require_backward_grad_sync or self._sharding is not None):
            self._watch(outputs)
        return outputs

    def _is_frozen_copy(self) -> bool:
        """True for a copy that is only evaluated, such as a moving average."""
        return self._own_exchange is None and not any(
            parameter.requires_grad for parameter in self.module.parameters()
        )

    def weigh(self, weight: float | None) -> None:
        """Sets the weight of this rank's gradients in the mean, for batches of different sizes.

        The mean is sum(weight * gradient) / sum(weight). A parameter gets no gradient if only ranks
        with weight 0 have used it.

        Args:
            weight: the weight for the next forward that records gradients. Set it on all ranks or
                on none. If several forwards come before a backward, the last weight counts for all.
        """
        self._next_weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surrounds backwards that only add up gradients; the next backward outside exchanges them.

        The forwards of these backwards must be inside, too.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        except BaseException:
            self._exchange.handshake.promise()  # other ranks go on to an exchange
            raise
        finally:
            self.require_backward_grad_sync = before

    def reduce_gradients(self) -> None:
        """Makes every parameter's gradient the whole average, for reading or changing it.

        All ranks must call this. It also averages the gradients of backwards in :meth:`no_sync`.
        Without `shard`, other backwards have averaged their gradients already.

        Raises:
            RuntimeError: inside of :meth:`join`, the last backward was in :meth:`no_sync`.
        """
        if self._joined_steps is None:
            self._exchange.reduce()
        elif self._exchange.has_local:
            raise RuntimeError(
                "reduce_gradients() inside of join() must come after a backward outside of "
                "no_sync(), because ranks without batches take part in the exchanges of backwards "
                "only"
            )

    def sync_buffers(self) -> None:
        """Sends rank 0's buffers to all ranks, such as the statistics of batch normalisation.

        All ranks must call this. A forward in training sends the buffers first (see
        `broadcast_buffers`), and then changes each rank's own. So call this before an evaluation
        that must have the same results on all ranks.

        Raises:
            ValueError: elements of a buffer share memory; or a buffer has changed its size, but not
                on all ranks alike; the cause is the error of the operation.
        """
        buffers = common_buffers(self.module)
        for name, buffer in buffers:
            _check_overlap(name, buffer)
        try:
            broadcast_all((buffer for _, buffer in buffers), 0, self._group)
        except Mismatch as error:
            grown = [n for n, buffer in buffers if self._buffer_shapes.get(n) != buffer.shape]
            raise ValueError(
                "buffers must have the same shapes on all ranks, got other ones than at first for "
                f"{', '.join(grown) or 'none on this rank'}"
            ) from error

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Surrounds a training loop in which ranks may have different numbers of batches.

        A rank that has no more batches takes part in the others' exchanges without counting in the
        mean. At the end all ranks get the parameters and buffers of a rank that stopped last.
        Inside, buffers are not exchanged. Optimizer states are never exchanged. With local SGD, see
        :meth:`pycomm.hooks.LocalSGDState.join`; all ranks end with rank 0's buffers.

        Raises:
            ValueError: with `shard`, every rank must take every step: use
                :func:`pycomm.even_batches`.
        """
        if self._sharding is not None:
            raise ValueError(
                "join() cannot be used with shard, because every rank must take every step: use "
                "pycomm.even_batches"
            )
        if self.comm_state.averages_parameters:
            with cast("LocalSGDState", self.comm_state).join():
                yield
            self.sync_buffers()
            return
        self._joined_steps = 0
        try:
            yield
            while self._prepare(0.0, active=False):
                self._exchange.contribute_zeros()
            mine = self._joined_steps * self._group.size + self._group.rank
            (last,) = largest([mine], self._group)
            named = [*common_parameters(self.module), *common_buffers(self.module)]
            broadcast_all((tensor for _, tensor in named), last % self._group.size, self._group)
            increment_version(self._exchange.parameters)  # so that optimizers notice the write
        finally:
            self._joined_steps = self._exchange.handshake.weighing = None

    def explain(self) -> ExchangePlan:
        """See :meth:`pycomm.hooks.CommState.explain`; with `shard`, it lists no buckets."""
        return self.comm_state.explain()

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether all ranks take the step; see :meth:`pycomm.Group.should_commit`.

        .. code-block:: python

            try:
                if model.comm_state.group is not group:
                    model.regroup(group)
                model(batch).backward()
                commits = model.should_commit()
            except pycomm.CollectiveError:
                group = group.shrink()
                continue  # with the next batch
            if commits:
                optimizer.step()

        With replicas, the step itself may raise such an error, so put it inside of ``try``. A rank
        that has no more batches decides nothing, so :meth:`join` excludes this.
        """
        if self._joined_steps is not None:
            raise ValueError(
                "should_commit() cannot be used inside of join(), because ranks without batches do "
                "not call it: use pycomm.even_batches"
            )
        if self._sharding is not None and self._sharding.replicas == 1:
            raise ValueError(
                "a lost rank takes its part of the optimizer's states with it: load a checkpoint "
                "in a new wrapper; to survive failures, shard needs replicas=2, as in "
                f"shard=pycomm.Sharding({self._sharding.stage!r}, replicas=2)"
            )
        if self._exchange.handshake.open:
            raise RuntimeError(
                "should_commit() must come after a backward, but this rank's has not come or has "
                "raised, and the others wait for it: go on with the next forward"
            )
        return self.comm_state.should_commit(ready)

    def regroup(self, group: Group) -> None:
        """Continues with another group: a smaller one after a failure, or one that has grown.

        All ranks of the new group call this, except for newcomers. Newcomers make a wrapper
        meanwhile, and get the other ranks' parameters and buffers. Gradients are dropped, and
        residuals stay, see :meth:`pycomm.hooks.CommState.regroup`; with local SGD, see
        :meth:`pycomm.hooks.LocalSGDState.regroup`. With `shard`, the states of fused optimizers are
        divided anew. If there are newcomers, all ranks call :func:`pycomm.share_state`, and the
        next step divides the states. With replicas, the states of lost ranks are restored, and a
        step that has failed is undone.

        Raises:
            ValueError: this is called inside :meth:`join`; with `shard` and without replicas, a
                lost rank's part of the states is lost; or a Sharding has a group of its own.
            RuntimeError: the ranks' parameters differ, because only some of them took a step; or
                states have no replicas yet; or between nodes, all copies of a rank's states are
                lost; on all ranks.
            MemoryError: a rank lacks memory for shards or replicas; on all ranks.
            pycomm.CollectiveError: a newcomer's module differs, and its wrapper raises ValueError:
                shrink the group.
        """
        if self._joined_steps is not None:
            raise ValueError("regroup must be called outside of join(): leave it, and join anew")
        check_successor(group)
        self._next_weight = None
        exchanged = self._exchanged()
        survival = self._begin_in(group, exchanged, is_new=False)
        for parameter in self.module.parameters():
            parameter.grad = None
        self._own_exchange = None  # before there are new buckets
        self._own_exchange = self._make_on_all(exchanged)
        if survival is not None:
            survival.divide_anew()
        self._agreements_seen = -1  # a broadcast of buffers may have failed on some ranks only

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``state_dict``."""
        self._check_parameters()
        return super().state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without running exchanges, groups, and :meth:`join`."""
        own = {**super().__getstate__(), "_own_exchange": None}
        if self._sharding is not None:
            own["_sharding"] = dataclasses.replace(self._sharding, group=None)
        return {**own, "_joined_steps": None, "_next_weight": None}

    # The exchange.

    @property
    def _group(self) -> Group:
        return self.comm_state.group

    @property
    def _exchange(self) -> Reducer:
        """The exchange. A copy makes its own when it is trained; evaluation needs none."""
        if self._own_exchange is None:
            self._own_exchange = host.ordinary(self._make_exchange, self._exchanged())
        return self._own_exchange

    def _exchanged(self) -> list[torch.Tensor]:
        """The kept parameters that the module still has, in its order."""
        kept = set(map(id, self._kept))
        return [p for p in self.module.parameters() if id(p) in kept]

    def _make_exchange(self, exchanged: list[torch.Tensor]) -> Reducer:
        parameters = list(reversed(exchanged))  # roughly the order of backward
        if self._sharding is None:
            strategy = Strategy(self.comm_state, parameters)
        else:
            from pycomm._training.sharding import strategy_of

            state = cast("CommState", self.comm_state)
            strategy = strategy_of(self._sharding, state, parameters, self._bucket_bytes)
        arrived = functools.partial(_arrived, weakref.ref(self))
        return Reducer(self.module, parameters, strategy, self._bucket_bytes, arrived)

    def _make_on_all(self, exchanged: list[torch.Tensor]) -> Reducer:
        """Makes the exchange on all ranks, or raises on all if one lacks memory for its shards."""
        group = self._group
        if self._sharding is None or not group._decides:
            return self._make_exchange(exchanged)
        try:
            made = self._make_exchange(exchanged)
        except PycommError:
            raise
        except (MemoryError, OSError, RuntimeError):  # torch's allocator raises the last one
            group.should_commit(False)
            raise
        if not group.should_commit():
            raise MemoryError(
                "another rank got no memory for its shards of the model: its own error tells why"
            )
        return made

    def _begin_in(
        self, group: Group, exchanged: list[torch.Tensor], is_new: bool
    ) -> ShardSurvival | None:
        """Makes all ranks of a group begin or continue with the same model."""
        module, state, sharding, survival = self.module, self.comm_state, self._sharding, None
        options: dict[str, object] = {**self._options, "shard": None, "has_group": False}
        wishes = None
        if sharding is not None:
            from pycomm._training.sharding import check_sharding, wishes_of_shards
            from pycomm._training.survival import ShardSurvival

            wishes = wishes_of_shards(group, exchanged, state, sharding, self._bucket_bytes)
            check_sharding(module, exchanged, state, group, sharding)
            survival = ShardSurvival(
                cast("CommState", state),
                () if is_new else module.parameters(),
                group,
                sharding.replicas > 1,
            )
            options |= {"shard": sharding.stage, "has_group": sharding.group is not None}
            options |= {"replicas": sharding.replicas, "publish": sharding.publish}
        elif any(p.is_cuda for p in exchanged) and state.exchanges_in_place(exchanged):
            from pycomm._training.heap import wishes_of_gradients

            wishes = wishes_of_gradients(group, exchanged)
        sync_initial_state(module, exchanged, state, group, survival, is_new, options)
        if wishes is not None:
            wishes.fulfil()
        return survival

    def _check_parameters(self) -> None:
        """Raises RuntimeError after a failed step; a copy that was not trained has not stepped."""
        if self._own_exchange is not None:
            self._own_exchange.strategy.check()

    @not_compiled
    def _prepare(self, weight: float | None, active: bool = True) -> bool:
        """Prepares a forward that records gradients, or replaces one in :meth:`join`.

        Returns:
            True if any rank still has batches.
        """
        if weight is None:
            weight = self._next_weight
        self._next_weight = None
        exchange, syncing = self._exchange, self.require_backward_grad_sync
        inside_backward = backward_id() >= 0
        if not inside_backward:
            self._group._keep_promise()  # of any model
            exchange.catch_up()
        exchange.members.check(self.module)
        group = self.comm_state.gradient_group if syncing else None
        if weight is not None and group is None:
            raise ValueError("weight must be given where gradients are exchanged, not elsewhere")
        if not syncing:
            return True
        exchange.handshake.weighing = None
        if group is not None and (weight is not None or self._joined_steps is not None):
            exchange.handshake.weighing = WeightedMean(1.0 if weight is None else weight, group)
        if group is not None and self._joined_steps is not None:
            self._joined_steps += active
            exchange.handshake.expect(active)
            (some_active,) = largest([active], group)
            return bool(some_active)
        # A backward that is still to come may need the buffers of its forward.
        waits = exchange.handshake.awaits_backward
        if self._broadcast_buffers and not waits and self._agree_anew():
            self.sync_buffers()
        exchange.promise_backward(inside_backward)
        return True

    def _agree_anew(self) -> bool:
        """True if ranks have agreed on parameters since the last call."""
        if not self.comm_state.averages_parameters:
            return True
        state = cast("LocalSGDState", self.comm_state)
        before, self._agreements_seen = self._agreements_seen, state.agreements
        return before != state.agreements and not state.joining

    @not_compiled
    def _watch(self, outputs: Any) -> None:
        """Makes the backward that begins at these tensors end with the exchange."""
        began = functools.partial(_began, weakref.ref(self), self._exchange.handshake.latest)
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.register_hook(began)  # type: ignore[no-untyped-call]


def _check_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if a tensor cannot be written because elements share memory."""
    if internal_overlap(tensor) == 1:
        raise ValueError(
            f"module must have tensors whose elements have memory of their own, got {name}, which "
            "is expanded: call clone()"
        )


def _check_dense(module: nn.Module) -> None:
    """Raises ValueError if an option of the module makes a gradient sparse."""
    names = ignored(module)
    for prefix, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse:
            name = f"{prefix}.weight".removeprefix(".")
            if each.weight.requires_grad and name not in names:
                raise ValueError(f"module must have dense gradients, got sparse=True for {name}")


def _takes_weight(module: nn.Module) -> bool:
    """True if forward has an argument `weight`; a scripted one may have no signature."""
    try:
        return "weight" in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False


def _check_state(state: object, module: nn.Module, given: Mapping[str, object]) -> None:
    """Raises an error if a state does not fit the module, or for options of the state."""
    if not isinstance(state, HookState):
        raise TypeError(f"state must be one of pycomm.hooks, got {state!r}")
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be given to the state where there is one")
    state.check_module(module)


def _check_unshared(state: CommState | LocalSGDState, module: nn.Module, shards: bool) -> None:
    """Raises ValueError if a state cannot serve shards, or those of another module's wrapper.

    A sharded wrapper moves the residuals, and counts the steps of its own parameters only.
    """
    if shards and (given := state.algorithm) not in ("auto", "two_shot"):
        raise ValueError(f"with shard, state.algorithm must be auto or two_shot, got {given!r}")
    own = set(map(id, module.parameters()))
    for known in state._parameters.tensors:
        is_sharded = known_of(known).part is not None
        if id(known) not in own and is_averaged(known) and (shards or is_sharded):
            raise ValueError(
                "with shard, state must be of one wrapper, got one with "
                f"{state._parameters[known].name}, which another pycomm.DataParallel averages: "
                "make a state for each"
            )


@not_compiled
def _arrived(model: weakref.ref[DataParallel], parameter: torch.Tensor) -> None:
    if (alive := model()) is None:
        return
    exchange = alive._own_exchange or alive._exchange
    if alive.require_backward_grad_sync:
        exchange.arrive(parameter)
    else:
        exchange.keep_local(parameter)


@not_compiled
def _began(
    model: weakref.ref[DataParallel],
    forward: int | None,
    gradient: torch.Tensor,  # noqa: ARG001
) -> None:
    if (alive := model()) is None:
        return
    exchange = alive._own_exchange or alive._exchange
    if alive.require_backward_grad_sync:
        exchange.begin_backward(backward_node(), forward)
    else:
        exchange.average()
