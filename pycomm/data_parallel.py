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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo as not_compiled
from torch.autograd import Variable
from torch.autograd.graph import Node, increment_version

from pycomm._buckets import Bucket, Slab, broadcast_all
from pycomm._comm_state import CommState
from pycomm._graphs import leads_to, tensors_in
from pycomm._local_sgd import LocalSGDState
from pycomm._members import Members
from pycomm._parameters import Exclude
from pycomm._promise import Promise, compare
from pycomm._tensors import check_memory
from pycomm._weighing import Weighing
from pycomm.collectives import all_reduce, broadcast
from pycomm.compression import Compressor
from pycomm.errors import GroupUnusable
from pycomm.group import Group

_MIB = 1 << 20


class DataParallel(nn.Module):
    """Runs a module on every rank and averages its gradients in backward.

    .. code-block:: python

        model = pycomm.DataParallel(model, compression=pycomm.Int8())

    All ranks begin with rank 0's parameters and buffers. Works among processes and among the
    threads of a :class:`pycomm.LocalWorld`, each with a module of its own. A parameter belongs to
    the wrapper that was made last: an older one that has it, too, raises in its next forward.

    Args:
        module: what to train.
        compression: a compressor for the gradients, or None.
        bucket_mb: the most MiB in a bucket of several parameters; models of less than 16 such have
            smaller ones.
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

    Attributes:
        module: what was wrapped; ``state_dict`` and ``load_state_dict`` are its own.
        comm_state: statistics, and residuals to save: `local_sgd` if given, else a
            :class:`pycomm.hooks.CommState`.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compression: Compressor | None = None,
        bucket_mb: float = 25,
        group: Group | None = None,
        feedback: bool = True,
        exclude: Exclude | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        warmup_steps: int = 0,
        broadcast_buffers: bool = True,
        local_sgd: LocalSGDState | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be positive, got {bucket_mb}")
        if "weight" in inspect.signature(module.forward).parameters:
            raise ValueError(
                "module must not have an argument `weight` in its forward, which is the wrapper's"
            )
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
        self._parameters_in_order = [p for p in module.parameters() if p.requires_grad][::-1]
        broadcast_all([*module.parameters(), *module.buffers()], 0, self._group)
        self._slab = Slab(self._parameters_in_order, bucket_mb * _MIB, self._group)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._lay_out()
        self._ready: list[torch.Tensor] | None = []  # in the order of the first backward
        self._repeated: set[int] = set()  # ids of those that come several times in a backward
        self._had_backward = False  # one that was through: what is repeated is known
        self._syncing = True
        self._in_backward = False
        self._promise = Promise()
        self._next = 0  # bucket to be exchanged
        self._weighing: Weighing | None = None
        self._joined_steps: int | None = None  # none outside of join()
        self._members = Members(module, functools.partial(_arrived, weakref.ref(self)))
        self.register_load_state_dict_pre_hook(_insert_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, weight: float | None = None, **kwargs: Any) -> Any:
        """The module's forward.

        Args:
            args: for the module.
            weight: how much this rank's gradients count in the mean, for batches of different
                sizes: sum(weight * gradient) / sum(weight). On all ranks or none. Of several
                forwards before a backward, the last one's counts for all.
            kwargs: for the module.
        """
        training = torch.is_grad_enabled()
        if training:
            self._prepare(weight)
        outputs = self.module(*args, **kwargs)
        if training and self._syncing:
            self._watch(outputs)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here (their forwards, too) only add up gradients; the next one exchanges."""
        before, self._syncing = self._syncing, False
        try:
            yield
        except BaseException:
            self._promise.open = True  # others go on to an exchange
            raise
        finally:
            self._syncing = before

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
                self._reset()
                self._exchange_nothing()
            last = torch.tensor([self._joined_steps * self._group.size + self._group.rank])
            all_reduce(last, "max", group=self._group)
            source = int(last) % self._group.size
            tensors = [*self.module.parameters(), *self.module.buffers()]
            broadcast_all(tensors, source, self._group)
            increment_version(self._parameters_in_order)  # else remainders would stay
        finally:
            self._joined_steps = self._weighing = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    @property
    def _group(self) -> Group:
        return self.comm_state.group

    @not_compiled
    def _prepare(self, weight: float | None, active: bool = True) -> bool:
        """Before a forward with gradients, or instead of one; whether any rank still goes on."""
        inside_backward = torch._C._current_graph_task_id() >= 0
        if self._promise.open and not inside_backward:
            self._catch_up()
        self._members.check(self.module)
        group = self.comm_state.gradient_group if self._syncing else None
        if weight is not None and group is None:
            raise ValueError("weight must be given where gradients are exchanged, not elsewhere")
        if not self._syncing:
            return True
        self._weighing = None
        if group is not None and (weight is not None or self._joined_steps is not None):
            self._weighing = Weighing(1.0 if weight is None else weight, active, group)
        if self._weighing is not None and self._joined_steps is not None:
            self._joined_steps += active
            self._promise.open = active
            return self._weighing.active_ranks() > 0
        if self._broadcast_buffers and self._agree_anew():
            broadcast_all(self.module.buffers(), 0, self._group)
        self._promise.make(inside_backward)
        return True

    def _catch_up(self) -> None:
        """Takes part in an exchange of the others whose backward has raised here."""
        group = self.comm_state.gradient_group
        if group is not None and self._promise.is_broken(group):
            if not self._in_backward:
                self._reset()
            self._exchange_nothing(raised=True)
        self._in_backward = False

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

    def _begin_backward(self, first: Node | None = None) -> None:
        if self._in_backward or not self._syncing:
            return
        self._members.check_owned()
        self._reset()
        end = functools.partial(self._end_backward, first, torch.is_grad_enabled())
        Variable._execution_engine.queue_callback(end)

    def _reset(self) -> None:
        self._in_backward = self._promise.open = True
        self._next = 0
        if self._ready is not None:
            self._ready = []
        for bucket in self._buckets:
            bucket.reset()

    def _arrive(self, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated."""
        if not self._syncing:
            return
        self._begin_backward()
        if self._ready is not None:
            self._ready.append(parameter)
        bucket = self._bucket_of[id(parameter)]
        if bucket.sent:
            raise RuntimeError(
                f"gradient of a parameter of shape {tuple(parameter.shape)} came again after it "
                "had been sent: the parameter is used in more reentrant checkpoints than in the "
                "backwards before; call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if id(parameter) not in bucket.waiting:
            self._repeated.add(id(parameter))
        bucket.put(parameter)
        if self._had_backward:
            self._start_full()

    def _start_full(self, last: bool = False) -> None:
        """Starts what is complete, always in the same order; what may come again only at last."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waiting or not (last or self._repeated.isdisjoint(bucket.ids)):
                return
            if (group := self.comm_state.gradient_group) is not None:
                self._promise.announce(group)
            if self._weighing is not None:
                self._weighing.scale(bucket.flat)
            try:
                self.comm_state.start(bucket.flat, bucket.parameters, begins=bucket.begins)
            except GroupUnusable:
                self._promise.wait()  # raises what has made it so
                raise
            bucket.sent = True
            self._next += 1

    @not_compiled
    def _end_backward(self, first: Node | None, creates_graph: bool) -> None:
        """Backward is through; `first` is where it entered the module, if it began in outputs."""
        arrived = any(bucket.arrived for bucket in self._buckets)
        if not arrived and first is not None and leads_to(first, self._bucket_of):
            self._in_backward = False  # torch.autograd.grad for something else
            if not creates_graph:  # else it becomes part of a loss
                self._promise.settle()
        else:
            self._exchange_rest()

    def _exchange_rest(self, raised: bool | None = False) -> None:
        """Sends what has not been sent, with zeros for what was not used, and waits.

        `raised`: whether backward has; None where there was none. If it has on any rank, gradients
        are dropped on all, and all that have not raised yet do.
        """
        unused = [parameter for bucket in self._buckets for parameter in bucket.complete()]
        self._start_full(last=True)
        self._promise.wait()
        self.comm_state.finish()
        used_elsewhere, raised_on = self._compare(unused, raised is True)
        self._in_backward = False
        self._promise.settle(dropped=bool(raised_on))
        if raised_on:
            self.comm_state.give_back()
            self._drop_gradients()
            if raised is False:
                raise RuntimeError(
                    f"backward has raised on ranks {raised_on} of {self._group.size}, or they have "
                    "made another forward instead (evaluate under torch.no_grad()): gradients are "
                    "dropped on all; go on with the next forward"
                )
            return
        self._had_backward |= raised is False
        for parameter in used_elsewhere:
            if parameter.grad is None:
                self._bucket_of[id(parameter)].adopt(parameter)
        if self._ready is not None:
            if self.comm_state.gradient_group is not None:
                self._learn_order(self._ready)
            self._ready = None

    def _exchange_nothing(self, raised: bool | None = None) -> None:
        """Sends zeros instead of what has not been sent, and forgets the result."""
        self._weighing = None
        self._drop_gradients()
        try:
            self._exchange_rest(raised)
        finally:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters_in_order:
            parameter.grad = None

    def _compare(
        self, unused: Sequence[torch.Tensor], raised: bool
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Which parameters that are unused here others have used; where backward has raised."""
        group = self.comm_state.gradient_group
        if group is None:
            return [], []
        without = set(map(id, unused))
        used = [id(p) not in without for p in self._parameters_in_order]
        used_anywhere, raised_on = compare(used, raised, group)
        found = zip(self._parameters_in_order, used_anywhere, strict=True)
        return [p for p, is_used in found if is_used and id(p) in without], raised_on

    def _learn_order(self, ready: Sequence[torch.Tensor]) -> None:
        """Lays buckets out in rank 0's order of the first backward; last what came repeatedly."""
        index = {id(p): i for i, p in enumerate(self._parameters_in_order)}
        arrived = sorted(ready, key=lambda parameter: id(parameter) in self._repeated)
        seen = list(dict.fromkeys(index[id(parameter)] for parameter in arrived))
        order = torch.tensor([*seen, *sorted(set(index.values()) - set(seen))])
        broadcast(order, 0, group=self._group)
        self._parameters_in_order = [self._parameters_in_order[i] for i in order.tolist()]
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes new buckets, and moves gradients there."""
        self._buckets = self._slab.cut(self._parameters_in_order)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in self._parameters_in_order:
            if parameter.grad is not None:
                self._bucket_of[id(parameter)].put(parameter)


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
    if (alive := model()) is not None:
        alive._arrive(parameter)


@not_compiled
def _began(model: weakref.ref[DataParallel], gradient: torch.Tensor) -> None:  # noqa: ARG001
    if (alive := model()) is not None:
        alive._begin_backward(torch._C._current_autograd_node())


def _insert_prefix(
    _module: nn.Module, state_dict: dict[str, Any], prefix: str, *_details: Any
) -> None:
    """Where the wrapper is part of another module, which loads its children by their names."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
