"""A data-parallel wrapper of a module, with an exchange that overlaps backward.

Gradients lie in flat buckets in the group's window, so that they are reduced in place. The exchange
of a bucket starts when its last gradient is ready, while backward goes on. The first backward shows
the order in which gradients become ready.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from pycomm._inputs import check_memory
from pycomm._retired import refuse_retired
from pycomm._runtime import host
from pycomm._runtime.torch_private import (
    backward_id,
    backward_node,
    internal_overlap,
    not_compiled,
)
from pycomm._training.buckets import WeightedMean, broadcast_all
from pycomm._training.comm_state import CommState, check_successor
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.parameters import Exclude, common_buffers, common_parameters, ignored
from pycomm._training.reducer import tensors_in
from pycomm._training.shard_options import ShardOptions
from pycomm._training.wrapper import Wrapping
from pycomm.collectives import all_reduce
from pycomm.compression import Compression
from pycomm.errors import Mismatch
from pycomm.group import Group

_MIB = 1 << 20
_BUCKET_CAP_MB = 25  # torch's default, too


class DataParallel(Wrapping):
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
        compression: compression of the gradients; None sends them uncompressed.
        bucket_cap_mb: the largest size, in MiB, of a bucket of several parameters. Models of fewer
            than 16 such buckets have smaller ones.
        group: by default the default group.
        feedback: keep what compression loses in residuals, and send it later.
        exclude: see :class:`pycomm.hooks.CommState`.
        grad_scaler: see :class:`pycomm.hooks.CommState`.
        warmup_steps: see :class:`pycomm.hooks.CommState`.
        broadcast_buffers: send rank 0's buffers to all ranks before every forward that records
            gradients, unless a backward of another forward is still to come; with `local_sgd`,
            before the first one after an exchange.
        shard: ``"optimizer"`` divides the optimizer's states among the ranks. The step of a fused
            optimizer then averages the gradients of its rank's share, updates it, and writes the
            new parameters to all ranks. ``"gradients"`` divides gradients, too: backward averages
            them, and each rank keeps its share. Parameters get the same bits as without. See
            :meth:`reduce_gradients` to read or change gradients before the step.
        replicas: 2 keeps two copies of the optimizer's states, so that training goes on when ranks
            are lost: a step then counts on all ranks or on none, and :meth:`regroup` restores all
            states. Between nodes, every step sends a rank's states to another node, so that a whole
            node may be lost; that needs processes. CPU only.
        shard_group: the ranks that divide the states; by default those of `group`. With the ranks
            of this node, each node divides them anew, and only gradients are sent between nodes.
        publish: compression of the parameters' changes that the owners of a share send to other
            nodes: :class:`Int8`, :class:`Cast` or :class:`Identity`. By default they send the
            parameters. On one node it has no effect.
        local_sgd: exchanges parameters every few steps instead of gradients in backward. Call its
            ``step()`` after every step of the optimizer. It replaces the options above by its own.

    Attributes:
        module: the wrapped module; ``state_dict`` and ``load_state_dict`` are the module's.
        comm_state: statistics, and residuals to save: `local_sgd` if given, else a
            :class:`pycomm.hooks.CommState`.
        require_backward_grad_sync: as in DistributedDataParallel. While it is False, as in
            :meth:`no_sync`, gradients are only added up.

    Raises:
        ValueError, TypeError: an argument is not as described; or the modules' parameters and
            buffers have not the same names, order, shapes, strides, dtypes and requires_grad on all
            ranks, or the options are not the same. It names the first difference.
        MemoryError: a rank lacks memory for its shards; on all ranks of a group on one node or of
            processes.
        pycomm.CollectiveError: those of another rank that has joined are not.
    """

    @refuse_retired("DataParallel")
    def __init__(
        self,
        module: nn.Module,
        *,
        compression: Compression | None = None,
        bucket_cap_mb: float = _BUCKET_CAP_MB,
        group: Group | None = None,
        feedback: bool = True,
        exclude: Exclude | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        warmup_steps: int = 0,
        broadcast_buffers: bool = True,
        shard: str | None = None,
        replicas: int = 1,
        shard_group: Group | None = None,
        publish: Compression | None = None,
        local_sgd: LocalSGDState | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        parameters = common_parameters(module)
        for name, tensor in (*parameters, *common_buffers(module)):
            check_memory(f"module: {name}", tensor)
            _check_overlap(name, tensor)
        _check_dense(module)
        options: dict[str, Any] = {
            "group": group,
            "exclude": exclude,
            "grad_scaler": grad_scaler,
            "warmup_steps": warmup_steps,
            "feedback": feedback,
        }
        state: CommState | LocalSGDState
        if local_sgd is None:
            state = CommState(compression, parameters, **options)
        else:
            state = _checked(local_sgd, compression=compression, **options)
            state.check_ignored(module)
        division = ShardOptions(shard, replicas, publish)
        alike = {
            "compression": compression,
            "bucket_cap_mb": float(bucket_cap_mb),
            "feedback": feedback,
            "grad_scaler": grad_scaler is not None,
            "warmup_steps": warmup_steps,
            "broadcast_buffers": broadcast_buffers,
            "local_sgd": local_sgd is not None,
        }
        super().__init__(module, state, division, shard_group, bucket_cap_mb * _MIB, alike)
        self._broadcast_buffers = broadcast_buffers
        self._buffer_shapes = {name: buffer.shape for name, buffer in common_buffers(module)}
        self._agreements_seen = -1  # of local SGD, when buffers were broadcast
        self._module_takes_weight = _takes_weight(module)
        self._next_weight: float | None = None
        self._joined_steps: int | None = None  # none outside of join()

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
        if training and (self.require_backward_grad_sync or self._shard_group is not None):
            self._watch(outputs)
        return outputs

    def _is_frozen_copy(self) -> bool:
        """True for a copy to evaluate, such as a moving average."""
        return self._own_exchange is None and not any(
            parameter.requires_grad for parameter in self.module.parameters()
        )

    def weigh(self, weight: float | None) -> None:
        """Sets the weight of this rank's gradients in the mean, for batches of different sizes.

        The mean is sum(weight * gradient) / sum(weight). A parameter that only ranks with weight 0
        have used gets no gradient.

        Args:
            weight: the weight for the next forward that records gradients. Set it on all ranks or
                on none. If several forwards come before a backward, the last weight counts for all.
        """
        self._next_weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only adds up gradients inside; the next backward outside exchanges them.

        The forwards of these backwards belong inside, too.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        except BaseException:
            self._exchange.handshake.open = True  # other ranks go on to an exchange
            raise
        finally:
            self.require_backward_grad_sync = before

    def reduce_gradients(self) -> None:
        """Makes every parameter's gradient the whole average, for reading or changing it.

        All ranks must call this. It also averages the gradients of backwards in :meth:`no_sync`.
        Without `shard`, other backwards have averaged theirs already.

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

        All ranks must call this. A forward in training does so by itself (see `broadcast_buffers`),
        but what it changes after that is each rank's own: call this before an evaluation that shall
        have the same results on all ranks.

        Raises:
            ValueError: elements of a buffer share memory; or, with the error of the operation as
                its cause, a buffer has changed its size, and not alike on all ranks.
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
        mean. At the end all ranks have the parameters and buffers of one of the ranks that stopped
        last. Buffers are not exchanged before, and optimizer states not at all. With `local_sgd`,
        see :meth:`pycomm.hooks.LocalSGDState.join`; all ranks end with rank 0's buffers.

        Raises:
            ValueError: there is `shard`, with which every rank must take every step: use
                :func:`pycomm.even_batches`.
        """
        if self._shard_group is not None:
            raise ValueError(
                "join() cannot be used with shard, because every rank must take every step: use "
                "pycomm.even_batches"
            )
        if isinstance(self.comm_state, LocalSGDState):
            with self.comm_state.join():
                yield
            self.sync_buffers()
            return
        self._joined_steps = 0
        try:
            yield
            while self._prepare(0.0, active=False):
                self._exchange.contribute_zeros()
            last = host.tensor([self._joined_steps * self._group.size + self._group.rank])
            all_reduce(last, "max", group=self._group)
            named = [*common_parameters(self.module), *common_buffers(self.module)]
            broadcast_all(
                (tensor for _, tensor in named), int(last) % self._group.size, self._group
            )
            increment_version(self._exchange.parameters)  # so that optimizers drop remainders
        finally:
            self._joined_steps = self._exchange.weighing = None

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

        With `replicas`, the step itself may raise such an error, so it belongs inside of ``try``.
        """
        if self._shard_options.shard is not None and self._shard_options.replicas == 1:
            raise ValueError(
                "a lost rank takes its part of the optimizer's states with it: load a checkpoint "
                "in a new wrapper; to survive failures, shard needs replicas=2"
            )
        if self._exchange.handshake.open:
            raise RuntimeError(
                "should_commit() must come after a backward, but this rank's has not come or has "
                "raised, and the others wait for it: go on with the next forward"
            )
        return self.comm_state.should_commit(ready)

    def regroup(self, group: Group) -> None:
        """Goes on with another group: a smaller one after a failure, or one that has grown.

        All ranks of the new group call this, except for newcomers: these make a wrapper meanwhile,
        and get parameters and buffers, which stay as they are on the other ranks. Gradients are
        dropped, and residuals stay, as :meth:`pycomm.hooks.CommState.regroup` says; with
        `local_sgd`, see :meth:`pycomm.hooks.LocalSGDState.regroup`. With `shard`, the states of
        fused optimizers are divided anew; if there are newcomers, by the next step, before which
        all ranks call :func:`pycomm.share_state`. With `replicas`, also those of lost ranks, and a
        step that has failed is undone.

        Raises:
            ValueError: this is called inside :meth:`join`; with `shard` and without `replicas`, a
                lost rank has taken a part of the states with it; or there is a `shard_group`.
            RuntimeError: the ranks' parameters differ, because only some of them took a step; or
                states have no replicas yet; or between nodes, both copies of a rank's states are
                lost; on all ranks.
            MemoryError: a rank lacks memory for shards or replicas; on all ranks.
            pycomm.CollectiveError: a newcomer's module is of another kind, so that its wrapper
                raises ValueError: shrink the group.
        """
        if self._joined_steps is not None:
            raise ValueError("regroup must be called outside of join(): leave it, and join anew")
        check_successor(group)
        self._next_weight = None
        self._go_on_in(group)
        self._agreements_seen = -1  # a broadcast of buffers may have failed on some ranks only

    def __getstate__(self) -> dict[str, Any]:
        """See :class:`Wrapping`. A copy is outside of :meth:`join`."""
        return {**super().__getstate__(), "_joined_steps": None, "_next_weight": None}

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
            self._group._keep_promise()  # perhaps of another model
            exchange.catch_up()
        exchange.members.check(self.module)
        group = self.comm_state.gradient_group if syncing else None
        if weight is not None and group is None:
            raise ValueError("weight must be given where gradients are exchanged, not elsewhere")
        if not syncing:
            return True
        exchange.weighing = None
        if group is not None and (weight is not None or self._joined_steps is not None):
            exchange.weighing = WeightedMean(1.0 if weight is None else weight, active, group)
        if exchange.weighing is not None and self._joined_steps is not None:
            self._joined_steps += active
            exchange.handshake.open = active
            return exchange.weighing.active_ranks() > 0
        # While a backward is to come, it may need the buffers as its forward has seen them.
        waits = exchange.handshake.awaits_backward
        if self._broadcast_buffers and not waits and self._agree_anew():
            self.sync_buffers()
        exchange.promise_backward(inside_backward)
        return True

    def _agree_anew(self) -> bool:
        """True if ranks have come to the same parameters since the last call."""
        state = self.comm_state
        if not isinstance(state, LocalSGDState):
            return True
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
    """Raises ValueError if the module says that a gradient will be sparse."""
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


def _checked(local_sgd: object, **options: Any) -> LocalSGDState:
    """Raises an error for options that belong to the state."""
    if not isinstance(local_sgd, LocalSGDState):
        raise TypeError(f"local_sgd must be a pycomm.hooks.LocalSGDState, got {local_sgd!r}")
    for name, value in options.items():
        if value != inspect.signature(DataParallel).parameters[name].default:
            raise ValueError(f"{name} must be given to LocalSGDState where there is one")
    return local_sgd


@not_compiled
def _began(
    model: weakref.ref[DataParallel],
    forward: int | None,
    gradient: torch.Tensor,  # noqa: ARG001
) -> None:
    if (alive := model()) is None:
        return
    if alive.require_backward_grad_sync:
        alive._exchange.begin_backward(backward_node(), forward)
    else:
        alive._exchange.average()
