"""A module with the exchange of its gradients. It has the module's names and checkpoints.

The wrapper shares the dictionaries that hold the module's parameters, buffers and children. So
``named_modules``, ``get_parameter``, ``torch.func.functional_call`` or ``torch.export`` find the
module's own names, also where the wrapper is a part of another module.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from pycomm._runtime import host
from pycomm._runtime.torch_private import not_compiled
from pycomm._training.agree import check_same, checksum, source_rank
from pycomm._training.buckets import broadcast_all
from pycomm._training.comm_state import CommState
from pycomm._training.local_sgd import LocalSGDState
from pycomm._training.parameters import (
    bare_names,
    common_buffers,
    common_parameters,
    describe_tensor,
)
from pycomm._training.reducer import Reducer
from pycomm._training.shard_options import ShardOptions, check_sharding
from pycomm._training.step_guard import STEPPED_BY_SOME, differ
from pycomm._training.survival import ShardSurvival
from pycomm.collectives import all_gather
from pycomm.errors import PycommError
from pycomm.group import Group

# The prefix of names in DistributedDataParallel's checkpoints.

_PREFIX = "module."


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The state dict with the module's own names, if all its names have DDP's prefix."""
    if not state_dict or not all(name.startswith(_PREFIX) for name in state_dict):
        return state_dict
    if not module.state_dict().keys().isdisjoint(state_dict):  # the module has a child `module`
        return state_dict
    plain = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        plain._metadata = state_dict._metadata.copy()  # type: ignore[attr-defined]
    consume_prefix_in_state_dict_if_present(plain, _PREFIX)
    return plain


def drop_prefix(state_dict: dict[str, Any], path: str, module: nn.Module) -> None:
    """Drops DDP's prefix from the names of a module that is part of another, after its path."""
    keys = [key for key in state_dict if key.startswith(path)]
    own = {key.removeprefix(path): state_dict.pop(key) for key in keys}
    for key, value in without_prefix(own, module).items():
        state_dict[path + key] = value


# The beginning of a wrapper, or with another group: all ranks have the same model.


def sync_initial_state(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    group: Group,
    survival: ShardSurvival,
    is_new: bool,
    options: Mapping[str, object],
) -> None:
    """Makes all ranks begin with the same parameters and buffers; a collective call.

    Args:
        module: this rank's module.
        exchanged: those of its parameters that the wrapper exchanges.
        state: its wrapper's state.
        group: the ranks: those that make a wrapper, and those that go on with theirs.
        survival: of the wrapper's sharded states.
        is_new: True on the former, which get the model of the first of the latter.
        options: the wrapper's options, which must be the same on all ranks.

    Raises:
        ValueError: models are not alike; or there is a `shard_group`, and ranks go on. Each is
            raised on all ranks, on those that go on the former as CollectiveError.
        RuntimeError: parameters of ranks that go on differ; on all ranks.
        The errors of :meth:`ShardSurvival.agree`.
    """
    parameters = [parameter for _, parameter in common_parameters(module)]
    tensors = [*parameters, *(buffer for _, buffer in common_buffers(module))]
    lines = _describe(module, exchanged, state, options)
    mine = host.tensor([is_new, bool(options["has_group"]), checksum(lines)])
    told = mine.new_empty(group.size, 3)
    all_gather(told, mine, group=group)
    news = list(map(bool, told[:, 0].tolist()))
    others = not all(news)
    if others and told[:, 1].any():
        raise ValueError("shard_group must be None on all ranks to go on with another group")
    if any(news):
        check_same(lines, told[:, 2].tolist(), news, group, "module and options")
    if others:
        if options["shard"] is not None:
            survival.agree()
        state.regroup(group)
        if isinstance(state, LocalSGDState):  # it has sent parameters
            tensors = [each for each in tensors if not state.exchanges(each)]
        survival.undo_steps()
        if state.gradient_group is not None:  # else ranks have parameters of their own
            flat = (p.detach().contiguous().view(-1) for p in parameters if not is_new)
            if differ(flat, group, counts=not is_new):
                raise RuntimeError(STEPPED_BY_SOME)
    if any(news):
        broadcast_all(tensors, source_rank(news), group, receives=is_new, keeps_equal=True)


def _describe(
    module: nn.Module,
    exchanged: Sequence[torch.Tensor],
    state: CommState | LocalSGDState,
    options: Mapping[str, object],
) -> list[str]:
    """What must be the same on all ranks, in words: a line per option, parameter and buffer."""
    named = [*common_parameters(module), *common_buffers(module)]
    chosen = set(map(id, exchanged))
    lines = [f"{name}={value!r}" for name, value in options.items()]
    for name, (_, tensor) in zip(bare_names([name for name, _ in named]), named, strict=True):
        lines.append(describe_tensor(name, tensor))
        if isinstance(tensor, nn.Parameter) and id(tensor) not in chosen:
            lines[-1] += ", frozen"
        if id(tensor) in chosen:
            compressed = isinstance(state, CommState) and not state.sends_dense(tensor)
            lines[-1] += ", compressed" if compressed else ", uncompressed"
    return lines


# A module with the exchange of its gradients. It has the module's names and checkpoints.

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Wrapping(nn.Module):
    """The parts of a wrapper; :class:`pycomm.DataParallel` trains with them.

    All ranks begin with the same parameters and buffers.

    Args:
        module: the module.
        state: exchanges its gradients.
        division: what is divided among ranks.
        options: other options that must be the same on all ranks.
        shard_group: the ranks that divide it, if they are not those of the state's group.
        bucket_bytes: the largest size of a bucket of several parameters.

    Attributes:
        module: the module.
        comm_state: the state.
        require_backward_grad_sync: see :class:`pycomm.DataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        state: CommState | LocalSGDState,
        division: ShardOptions,
        shard_group: Group | None,
        bucket_bytes: float,
        options: Mapping[str, object],
    ) -> None:
        super().__init__()
        self.module = module
        self.comm_state = state
        self._shard_options, self._given_shard_group = division, shard_group
        self._bucket_bytes, self._options = bucket_bytes, options
        self.require_backward_grad_sync = True
        # Those that the wrapper exchanges, also if some are frozen since.
        self._kept = [p for _, p in common_parameters(module) if p.requires_grad]
        self._own_exchange: Reducer | None = None
        exchanged = self._exchanged()
        self._begin_in(self._group, exchanged, is_new=True)
        self._own_exchange = self._make_on_all(exchanged)
        self.register_load_state_dict_post_hook(_call_post_hooks)  # type: ignore[no-untyped-call]

    # Names and checkpoints.

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            # Not a child: the module's children are the wrapper's.
            vars(self).update({each: getattr(value, each) for each in _SHARED}, module=value)
        else:
            super().__setattr__(name, value)

    def _follow_module(self) -> None:
        """Shares anew what the module has replaced, as nn.Sequential does when it loses a child."""
        if any(vars(self)[each] is not getattr(self.module, each) for each in _SHARED):
            self.module = self.module

    @property
    def training(self) -> bool:
        """The module's mode."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # not yet, where nn.Module sets it
            self.module.training = mode

    def train(self, mode: bool = True) -> Wrapping:
        """Sets the mode of the module and its children."""
        self.module.train(mode)
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and all modules inside of the module, by the module's names."""
        self._follow_module()
        yield from super().named_modules(*args, **kwargs)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The wrapper, the module, and all modules inside of it."""
        yield self
        yield from self.module.modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's children."""
        self._follow_module()
        return super().named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> Wrapping:
        """Calls a function with every child of the module and with the module."""
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Wrapping:
        """For ``to()`` and the like. Modules such as nn.LSTM override it."""
        self.module._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``state_dict``."""
        self._check_parameters()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a ``state_dict`` of the module, saved with or without DistributedDataParallel."""
        own = without_prefix(state_dict, self.module)
        return self.module.load_state_dict(own, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads what is not a child's, where a module that has the wrapper loads all its parts."""
        self._follow_module()
        drop_prefix(state_dict, prefix, self.module)
        self.module._load_from_state_dict(state_dict, prefix, *args)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint that a child `module` is in :attr:`_wrapped`."""
        return {"module": "_wrapped"}

    @property
    def _wrapped(self) -> nn.Module:
        return self.module

    # The exchange.

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without running exchanges and `shard_group`."""
        own = {name: value for name, value in vars(self).items() if name not in _SHARED}
        not_copied = ("_own_exchange", "_given_shard_group", "_compiled_call_impl")
        return {**own, **dict.fromkeys(not_copied)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.module = state["module"]

    @property
    def _shard_group(self) -> Group | None:
        """The ranks that divide the states; None if they are not divided."""
        if self._shard_options.shard is None:
            return None
        return self._group if self._given_shard_group is None else self._given_shard_group

    @property
    def _group(self) -> Group:
        return self.comm_state.group

    @property
    def _exchange(self) -> Reducer:
        """The exchange. A copy makes its own when it is trained, as evaluation needs none."""
        if self._own_exchange is None:
            self._own_exchange = host.ordinary(self._make_exchange, self._exchanged())
        return self._own_exchange

    def _exchanged(self) -> list[torch.Tensor]:
        """The kept parameters that the module still has, in its order."""
        kept = set(map(id, self._kept))
        return [p for p in self.module.parameters() if id(p) in kept]

    def _make_exchange(self, parameters: list[torch.Tensor]) -> Reducer:
        arrived = functools.partial(_arrived, weakref.ref(self))
        sharding = self._shard_options.over(self._shard_group or self._group)
        return Reducer(
            self.module, parameters, self.comm_state, self._bucket_bytes, sharding, arrived
        )

    def _make_on_all(self, parameters: list[torch.Tensor]) -> Reducer:
        """Makes the exchange on all ranks, or raises on all if one lacks memory for its shards."""
        group = self._group
        if self._shard_options.shard is None or not group._decides:
            return self._make_exchange(parameters)
        try:
            made = self._make_exchange(parameters)
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

    def _check_parameters(self) -> None:
        """Raises RuntimeError after a failed step; a copy that was not trained has taken none."""
        if self._own_exchange is not None:
            self._own_exchange.check_parameters()

    # The group.

    def _begin_in(self, group: Group, exchanged: list[torch.Tensor], is_new: bool) -> ShardSurvival:
        """Makes all ranks of a group begin with the same model, or go on with it."""
        module, state = self.module, self.comm_state
        has_group = self._given_shard_group is not None
        options = self._shard_options._replace(has_group=has_group)
        check_sharding(module, exchanged, state, group, options, self._given_shard_group)
        sharded = () if is_new or options.shard is None else module.parameters()
        survival = ShardSurvival(state, sharded, group, options.replicas > 1)
        alike = {**self._options, **options._asdict()}
        sync_initial_state(module, exchanged, state, group, survival, is_new, alike)
        return survival

    def _go_on_in(self, group: Group) -> None:
        """Goes on with another group; gradients are dropped."""
        exchanged = self._exchanged()
        survival = self._begin_in(group, exchanged, is_new=False)
        for parameter in self.module.parameters():
            parameter.grad = None
        self._own_exchange = None  # before there are new buckets
        self._own_exchange = self._make_on_all(exchanged)
        survival.divide_anew()


@not_compiled
def _arrived(model: weakref.ref[Wrapping], parameter: torch.Tensor) -> None:
    if (alive := model()) is None:
        return
    if alive.require_backward_grad_sync:
        alive._exchange.arrive(parameter)
    else:
        alive._exchange.keep_local(parameter)


def _call_post_hooks(wrapper: Wrapping, incompatible_keys: Any) -> None:
    """Calls the module's own hooks, where a module that has the wrapper loads all its parts."""
    for hook in wrapper.module._load_state_dict_post_hooks.values():
        hook(wrapper.module, incompatible_keys)
