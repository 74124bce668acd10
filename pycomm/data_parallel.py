"""A data-parallel wrapper of a module, with the exchange overlapping backward.

Gradients lie in flat buckets in the group's shared window, so that they are reduced where backward
leaves them. A bucket's exchange starts when its last gradient is there, and backward goes on
meanwhile. In which order gradients come is learned in the first backward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from pycomm._inputs.arguments import renamed
from pycomm._inputs.tensors import check_memory
from pycomm._runtime.torch_private import backward_id, backward_node, not_compiled
from pycomm._training.buckets import broadcast_all
from pycomm._training.comm_state import CommState
from pycomm._training.gradient_exchange import GradientExchange
from pycomm._training.graphs import tensors_in
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.parameters import Exclude
from pycomm._training.prefixes import without_prefix
from pycomm._training.weighing import Weighing
from pycomm.collectives import all_reduce
from pycomm.compression import Compression
from pycomm.group import Group

_MIB = 1 << 20
_BUCKET_CAP_MB = 25  # torch's default, too


class DataParallel(nn.Module):
    """Runs a module on every rank and averages its gradients in backward.

    .. code-block:: python

        model = pycomm.DataParallel(model, compression=pycomm.Int8())

    All ranks begin with rank 0's parameters and buffers. Works among processes and among the
    threads of a :class:`pycomm.LocalWorld`, each with a module of its own. A parameter belongs to
    the wrapper that was made last: an older one that has it, too, raises in its next forward.

    Args:
        module: what to train.
        compression: of the gradients; None sends them as they are.
        bucket_cap_mb: the most MiB in a bucket of several parameters; models of less than 16 such
            have smaller ones.
        group: by default the default group.
        feedback: keep what compression loses, and send it later.
        exclude: see :class:`pycomm.hooks.CommState`.
        grad_scaler: see :class:`pycomm.hooks.CommState`.
        warmup_steps: see :class:`pycomm.hooks.CommState`.
        broadcast_buffers: give everyone rank 0's buffers before every forward with gradients; with
            `local_sgd`, before the first one after an exchange.
        local_sgd: exchanges parameters every so many steps instead of gradients in backward; its
            ``step()`` must be called after every optimizer's. It has its own options in place of
            those above.
        bucket_mb: the old name of `bucket_cap_mb`.

    Attributes:
        module: what was wrapped; ``state_dict`` and ``load_state_dict`` are its own.
        comm_state: statistics, and residuals to save: `local_sgd` if given, else a
            :class:`pycomm.hooks.CommState`.
        require_backward_grad_sync: as in DistributedDataParallel: as long as it is False, as in
            :meth:`no_sync`, gradients only add up.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

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
        local_sgd: LocalSGDState | None = None,
        bucket_mb: float | None = None,
    ) -> None:
        super().__init__()
        bucket_cap_mb = renamed(
            "bucket_mb", bucket_mb, "bucket_cap_mb", bucket_cap_mb, _BUCKET_CAP_MB
        )
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            check_memory(f"module: {name}", tensor)
        self.module = module
        options: dict[str, Any] = {
            "group": group,
            "exclude": exclude,
            "grad_scaler": grad_scaler,
            "warmup_steps": warmup_steps,
            "feedback": feedback,
        }
        self.comm_state: CommState | LocalSGDState
        if local_sgd is None:
            self.comm_state = CommState(compression, module.named_parameters(), **options)
        else:
            self.comm_state = _checked(local_sgd, compression=compression, **options)
        self._broadcast_buffers = broadcast_buffers
        self._agreements_seen = -1  # of local SGD, when buffers were broadcast
        broadcast_all([*module.parameters(), *module.buffers()], 0, self._group)
        self._bucket_bytes = bucket_cap_mb * _MIB
        self._own_exchange: GradientExchange | None = self._make_exchange()
        self._module_takes_weight = "weight" in inspect.signature(module.forward).parameters
        self._next_weight: float | None = None
        self._joined_steps: int | None = None  # none outside of join()
        self.require_backward_grad_sync = True
        self.register_load_state_dict_pre_hook(_insert_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Args:
            args: for the module.
            kwargs: for the module. A `weight` is for :meth:`weigh`, unless the module's forward
                has an argument of that name.
        """
        training = torch.is_grad_enabled()
        weight = None if self._module_takes_weight else kwargs.pop("weight", None)
        if training:
            self._prepare(weight)
        outputs = self.module(*args, **kwargs)
        if training and self.require_backward_grad_sync:
            self._watch(outputs)
        return outputs

    def weigh(self, weight: float | None) -> None:
        """Says how much this rank's gradients count in the mean, for batches of different sizes.

        The mean is sum(weight * gradient) / sum(weight).

        Args:
            weight: of the next forward with gradients, on all ranks or none. Of several forwards
                before a backward, the last one's counts for all.
        """
        self._next_weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here (their forwards, too) only add up gradients; the next one exchanges."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        except BaseException:
            self._exchange.promise.open = True  # others go on to an exchange
            raise
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop: ranks may have different numbers of batches.

        One that has run out takes part in the others' exchanges without counting in the mean. In
        the end all have the parameters and buffers of a rank that was the last to stop; buffers are
        not exchanged before, and optimizers' states not at all. With `local_sgd`, see
        :meth:`pycomm.hooks.LocalSGDState.join`; all end with rank 0's buffers.
        """
        if isinstance(self.comm_state, LocalSGDState):
            with self.comm_state.join():
                yield
            broadcast_all(self.module.buffers(), 0, self._group)
            return
        self._joined_steps = 0
        try:
            yield
            while self._prepare(0.0, active=False):
                self._exchange.stand_in()
            last = torch.tensor([self._joined_steps * self._group.size + self._group.rank])
            all_reduce(last, "max", group=self._group)
            source = int(last) % self._group.size
            tensors = [*self.module.parameters(), *self.module.buffers()]
            broadcast_all(tensors, source, self._group)
            increment_version(self._exchange.parameters)  # else remainders would stay
        finally:
            self._joined_steps = self._exchange.weighing = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads what the module has saved, by itself or under DistributedDataParallel."""
        return self.module.load_state_dict(without_prefix(state_dict, self.module), *args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's, under the names of its ``state_dict``."""
        if recurse:
            yield from self.module.named_parameters(prefix, True, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's, under the names of its ``state_dict``."""
        if recurse:
            yield from self.module.named_buffers(prefix, True, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint where the names of ``state_dict`` begin."""
        own = self.module
        names = (*own._modules, *own._parameters, *own._buffers)
        return dict.fromkeys(names, "module")

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: with the state, but without what is under way."""
        return {**vars(self), "_own_exchange": None, "_joined_steps": None, "_next_weight": None}

    @property
    def _group(self) -> Group:
        return self.comm_state.group

    @property
    def _exchange(self) -> GradientExchange:
        """A copy makes its own when it is trained: one that is only evaluated needs no memory."""
        if self._own_exchange is None:
            self._own_exchange = self._make_exchange()
        return self._own_exchange

    def _make_exchange(self) -> GradientExchange:
        arrived = functools.partial(_arrived, weakref.ref(self))
        return GradientExchange(self.module, self.comm_state, self._bucket_bytes, arrived)

    @not_compiled
    def _prepare(self, weight: float | None, active: bool = True) -> bool:
        """Before a forward with gradients, or instead of one; whether any rank still goes on."""
        if weight is None:
            weight = self._next_weight
        self._next_weight = None
        exchange, syncing = self._exchange, self.require_backward_grad_sync
        inside_backward = backward_id() >= 0
        if exchange.promise.open and not inside_backward:
            exchange.catch_up()
        exchange.members.check(self.module)
        group = self.comm_state.gradient_group if syncing else None
        if weight is not None and group is None:
            raise ValueError("weight must be given where gradients are exchanged, not elsewhere")
        if not syncing:
            return True
        exchange.weighing = None
        if group is not None and (weight is not None or self._joined_steps is not None):
            exchange.weighing = Weighing(1.0 if weight is None else weight, active, group)
        if exchange.weighing is not None and self._joined_steps is not None:
            self._joined_steps += active
            exchange.promise.open = active
            return exchange.weighing.active_ranks() > 0
        if self._broadcast_buffers and self._agree_anew():
            broadcast_all(self.module.buffers(), 0, self._group)
        exchange.promise.make(inside_backward)
        return True

    def _agree_anew(self) -> bool:
        """Whether ranks have come to the same parameters since this was asked last."""
        state = self.comm_state
        if not isinstance(state, LocalSGDState):
            return True
        before, self._agreements_seen = self._agreements_seen, state.agreements
        return before != state.agreements and not state.joining

    @not_compiled
    def _watch(self, outputs: Any) -> None:
        """Has the backward that begins at these tensors end with the exchange."""
        began = functools.partial(_began, weakref.ref(self))
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.register_hook(began)  # type: ignore[no-untyped-call]


def _checked(local_sgd: object, **options: Any) -> LocalSGDState:
    """Refuses options that the state has for itself."""
    if not isinstance(local_sgd, LocalSGDState):
        raise TypeError(f"local_sgd must be a pycomm.hooks.LocalSGDState, got {local_sgd!r}")
    for name, value in options.items():
        if value != inspect.signature(DataParallel).parameters[name].default:
            raise ValueError(f"{name} must be given to LocalSGDState where there is one")
    return local_sgd


@not_compiled
def _arrived(model: weakref.ref[DataParallel], parameter: torch.Tensor) -> None:
    if (alive := model()) is not None and alive.require_backward_grad_sync:
        alive._exchange.arrive(parameter)


@not_compiled
def _began(model: weakref.ref[DataParallel], gradient: torch.Tensor) -> None:  # noqa: ARG001
    if (alive := model()) is not None and alive.require_backward_grad_sync:
        alive._exchange.begin_backward(backward_node())


def _insert_prefix(
    wrapper: DataParallel, state_dict: dict[str, Any], prefix: str, *_details: Any
) -> None:
    """Where the wrapper is part of another module, which loads its children by their names."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    own = {key.removeprefix(prefix): state_dict.pop(key) for key in keys}
    for key, value in without_prefix(own, wrapper.module).items():
        state_dict[f"{prefix}module.{key}"] = value
