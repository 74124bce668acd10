"""States of fused optimizers: options, full-precision weights, checkpoints, and sharded states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pycomm import _C
from pycomm._inputs import is_dtensor, local
from pycomm._runtime import host
from pycomm._runtime.torch_private import not_compiled
from pycomm._training.parameters import divisions, part_of
from pycomm.optim import _executors, _options, _storage
from pycomm.optim._executors import Row, is_capturing
from pycomm.optim._options import Group, Options
from pycomm.optim._storage import MASTER, REMAINDER, State, is_rounded
from pycomm.optim.flat import Buffers

if TYPE_CHECKING:
    from pycomm._training.shards import Part, Shards
    from pycomm.optim import _checkpoint
    from pycomm.optim._offload import OffloadedStates
    from pycomm.optim._replicas import ReplicatedStates

# Writes to parameters between steps, for parameters with weights of higher precision.


class ExternalWrites:
    """Applies writes to a parameter to its master weights or remainders.

    torch counts writes to a tensor, but not writes through ``.data``. After a possible write,
    master weights are compared with their parameter, and elements that differ are replaced. With
    remainders, changed elements cannot be found, so all remainders of the parameter become zero.
    The state of a DTensor is the state of its local tensor.
    """

    def __init__(self) -> None:
        self._marks: dict[torch.Tensor, tuple[int, int]] = {}
        self._steps: _C.StepDescription | None = None  # has newer marks
        self._changed: set[torch.Tensor] = set()  # states were adapted after that step

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Records that the parameters agree with their states."""
        for param in params:
            self._seen[param] = _mark(param)
            self._changed.discard(param)

    def note_steps(self, steps: _C.StepDescription) -> None:
        """Records that parameters agree with their states, now and after its further steps."""
        self._steps = steps

    @property
    def _seen(self) -> dict[torch.Tensor, tuple[int, int]]:
        """Each parameter's version and address, after its last step."""
        if self._steps is not None:
            self._marks.update(self._steps.marks())
            self._steps = None
        return self._marks

    def forget(self, param: torch.Tensor) -> None:
        """Forgets the version of a resharded parameter or part, to free its memory."""
        self._seen.pop(param, None)
        self._changed.discard(param)

    def take_given(self, part: torch.Tensor, given: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Adapts a state that this rank contributes to writes to the parameter.

        The state may have elements of other parts, which were not adapted when this part's were.

        Args:
            part: the part that this rank has stepped.
            given: the contributed elements of the parameter.
            state: their state.
        """
        if self._is_written(part):
            self._changed.add(part)
        before = self._seen.get(part)
        if part not in self._changed and before == _mark(part):
            return
        if REMAINDER in state and part in self._changed:
            state[REMAINDER].zero_()
        self.take(given, state)

    def settled(self, part: torch.Tensor) -> None:
        """Records that the last write to a part has written its own weights."""
        if part in self._seen:
            self._seen[part] = _mark(part)

    def take(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Adapts the state to writes to its parameter.

        A newly loaded state belongs to the parameters as they are at the first step, so model and
        optimizer can be restored in either order.
        """
        before, now = self._seen.get(param), _mark(param)
        # A captured graph would repeat this in every replay.
        if before == now or param.dtype == torch.float32 or is_capturing(param.device):
            return
        elements = local(param).detach()
        if MASTER in state and state[MASTER].shape == elements.shape:
            master = state[MASTER]
            own = elements.to(master.device)
            master.copy_(torch.where(is_rounded(own, master, own.dtype), master, own.float()))
            if self._is_written(param):
                self._changed.add(param)
        elif REMAINDER in state and self._is_written(param):
            state[REMAINDER].zero_()
            self._changed.add(param)
        if before is not None:
            self._seen[param] = now

    def _is_written(self, param: torch.Tensor) -> bool:
        """True if torch has counted writes since the state was adapted to them."""
        before = self._seen.get(param)
        return before is not None and before[0] != _mark(param)[0]


def _mark(param: torch.Tensor) -> tuple[int, int]:
    """A parameter's version and its address."""
    elements = local(param)
    # A DTensor and its local tensor have separate versions.
    count = param._version + (0 if elements is param else elements._version)
    return count, elements.data_ptr()


# States of fused optimizers: options, full-precision weights, checkpoints, and sharded states.


class StatefulOptimizer(torch.optim.Optimizer):
    """Keeps the states of a fused optimizer; :class:`FusedOptimizer` steps them.

    Attributes:
        max_norm: bound of the norm of all gradients together, or None.
        offload: ``"pinned"`` if the states of CUDA parameters lie in pinned host memory, or None.
        in_step: True if it has replicas of its states, and its last step has failed.
    """

    in_step = False
    offload: str | None = None
    _offloaded: OffloadedStates | None = None  # once a CUDA parameter has states on the host
    _has_dtensors = False
    # True if a step depends on norms of whole parameters (not only on the norm of all gradients).
    _needs_whole_norms: ClassVar[bool] = False
    _divided: tuple[tuple[int, int], set[Shards]] = (-1, -1), set()  # see _divisions()

    def __init__(self, params: Any, defaults: Group, options: Options) -> None:
        own, self.max_norm = _options.with_defaults(type(self).__name__, options)
        self.offload = options.get("offload")
        if self.offload is not None:
            from pycomm.optim import _offload

            _offload.check(self)
        self._buffers = Buffers()
        self._edits = ExternalWrites()
        self._rows: dict[int, Row] = {}  # by the parameter's id
        # Parts with states of their own. Other states are of whole parameters, sharded or not.
        self._held: dict[torch.Tensor, Part] = {}
        self._replicas: ReplicatedStates | None = None
        self._new: list[torch.Tensor] = []  # parameters whose states this step has made
        super().__init__(params, {**defaults, **own})

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """The names of a parameter's states, in the order of the rule's arguments."""
        raise NotImplementedError

    def _check_shared(self) -> None:
        """Raises RuntimeError if other ranks cannot take part in a collective call."""

    # Parameters.

    def _divisions(self) -> set[Shards]:
        """The wrappers' divisions of the parameters."""
        key = divisions(), sum(len(group["params"]) for group in self.param_groups)
        if key != self._divided[0]:
            parts = map(part_of, self._params())
            self._divided = key, {part.shards for part in parts if part is not None}
        return self._divided[1]

    def _complete_exchanges(self) -> None:
        """Takes part in an exchange in which others wait because this rank's backward has raised.

        All collective calls begin with this.
        """
        for division in self._divisions():
            division.exchange_group._keep_promise()

    def _await_states(self) -> None:
        """Waits until states on the host are those of the last step."""
        if self._offloaded is not None:
            self._offloaded.wait()

    def add_param_group(self, param_group: Group) -> None:
        """See :meth:`torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        try:
            _options.check_torch_flags(param_group)
            if param_group.get("max_norm", self.max_norm) != self.max_norm:
                raise ValueError("max_norm is for all groups together: pass it beside the groups")
            self._check_group(self.param_groups[-1])
        except Exception:
            del self.param_groups[-1]
            raise

    def _check_group(self, group: Group) -> None:
        _options.check_groups(type(self).__name__, self.param_groups)
        for param in group["params"]:
            self._check_param(param)
            self._has_dtensors = self._has_dtensors or is_dtensor(param)
        self._check_options(group)
        _options.check_remainder(group)

    def _check_param(self, param: torch.Tensor) -> None:
        if not is_dtensor(param):
            _options.check_param(type(self).__name__, param)
            return
        from pycomm.optim import _dtensor

        _dtensor.check_param(type(self).__name__, param, self._needs_whole_norms)

    def _check_options(self, group: Group) -> None:
        _options.check_options(group, has_states=bool(self._state_names(group)))

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # Full-precision weights, for callers that change weights between steps.

    @torch.no_grad()
    def full_weights(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's weights at full precision. If it is sharded, all ranks must call this.

        Args:
            param: a parameter of this optimizer.

        Returns:
            An fp32 tensor if the parameter has master weights or a remainder, otherwise the
            parameter itself, detached. For a DTensor, the result is a DTensor.
        """
        self._complete_exchanges()
        self._await_states()
        state, part = self._own_state(param), self._held.get(param)
        if not _storage.holds_weights(state):
            return param.detach()
        own = self._own(param)
        self._edits.take(own, state)
        weights = _storage.joined(local(own), state)
        if is_dtensor(param):
            from pycomm.optim import _dtensor

            return _dtensor.wrap(param, weights)
        return weights if part is None else part.gather(weights, param)

    @torch.no_grad()
    def set_full_weights(self, param: torch.Tensor, weights: torch.Tensor) -> None:
        """Sets a parameter, and its master weights or remainder, to `weights`, in place.

        Args:
            param: a parameter of this optimizer.
            weights: fp32, of the parameter's shape; for a DTensor also a DTensor on its mesh.
        """
        self._await_states()
        part = self._held.get(param)
        if is_dtensor(param):
            from pycomm.optim import _dtensor

            weights = _dtensor.own_elements(param, "weights", weights)
        _storage.write_weights(local(param), self._own_state(param), weights, part)
        if part is None or not part.in_pieces:
            self._edits.note([self._own(param)])

    # Checkpoints.

    def state_dict(self, *, format: str = "pycomm", to: int | None = None) -> dict[str, Any]:  # noqa: A002
        """Returns a checkpoint.

        With sharded states, all ranks must call this. The checkpoint is the same as without shards.

        Args:
            format: ``"pycomm"`` keeps everything bit for bit. ``"torch"`` is for torch.optim: it
                has states in fp32, full-precision weights as ``master_param``, and no options of
                pycomm.
            to: with sharded states, the only rank that gets the states, by its number in the group
                that divides them. On the others ``"state"`` is empty, and :meth:`load_state_dict`
                refuses such a checkpoint. By default all get the states.
        """
        from pycomm.optim import _checkpoint

        if format not in ("pycomm", "torch"):
            raise ValueError(f"format must be pycomm or torch, got {format!r}")
        self._check_shared()
        self._complete_exchanges()
        state_dict, params = self._state_dict(), self._params()
        names = dict.fromkeys(n for group in self.param_groups for n in self._state_names(group))
        wanted = names if format == "torch" else None
        _checkpoint.complete(state_dict, params, self._held, to, wanted)
        if format == "torch":
            _options.remove(state_dict["param_groups"])
        return state_dict

    def sharded_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Returns a checkpoint for torch.distributed.checkpoint, to save or to load into.

        It has the keys of ``get_optimizer_state_dict``; pass it to ``set_optimizer_state_dict``
        after loading. With sharded states, each rank saves and loads only its part, and all ranks
        must call this. Parameters that have had no gradient yet, such as unused experts, get the
        states that their first step would make.

        Args:
            model: the model, or its wrapper, that has this optimizer's parameters.
        """
        from pycomm.optim import _checkpoint

        self._check_shared()
        self._complete_exchanges()
        self._make_missing_states()
        return _checkpoint.by_name(model, self, self._state_dict, self._held)

    @host.makes_lasting
    @torch.no_grad()
    def _make_missing_states(self) -> None:
        """Makes the states of parameters that have had no gradient yet.

        torch.distributed.checkpoint loads what is in both the file and the optimizer. torch makes
        missing states only if an optimizer has none at all.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self.state.get(param):
                    self._init_state(param, group)

    def _state_dict(self) -> dict[str, Any]:
        """Torch's state_dict, with sharded states in parts."""
        self._await_states()
        for group in self.param_groups:
            for param in group["params"]:
                self._take_assigned(param, group)
        self._take_edits()
        state_dict = super().state_dict()
        if self._has_dtensors:
            self._save_dtensors(state_dict["state"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if saved.get("capturable") and all(param.is_cpu for param in group["params"]):
                saved["capturable"] = False  # torch.optim accepts nothing else on the CPU
        return state_dict

    @torch.no_grad()
    def _save_dtensors(self, states: dict[int, State]) -> None:
        """Converts the states of DTensors to a form that other meshes can load."""
        from pycomm.optim import _dtensor

        for number, param in enumerate(self._params()):
            if number in states and is_dtensor(param):
                states[number] = _dtensor.to_save(param, states[number])

    @not_compiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class, or of the class in torch, apex or TransformerEngine.

        States are converted to the form of this optimizer. Full-precision weights come from the
        checkpoint or, if it has none, from the parameters.

        Raises:
            ValueError: the checkpoint is from another kind of optimizer or from other parameters,
                or its states are on another rank.
        """
        from pycomm.optim import _checkpoint

        before, hooks = self.__dict__.copy(), self._optimizer_load_state_dict_pre_hooks
        state_dict = state_dict.copy()
        for hook in hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if _checkpoint.ELSEWHERE in state_dict:
            raise ValueError(
                "the checkpoint has no states, because only rank "
                f"{state_dict[_checkpoint.ELSEWHERE]} has gathered them: load that rank's "
                "checkpoint on all ranks"
            )
        _checkpoint.check_groups(type(self).__name__, self.defaults, state_dict["param_groups"])
        # torch would cast states to the parameter's type, which ruins them, so hide them from it.
        sealed = {key: _checkpoint.Sealed(value) for key, value in state_dict["state"].items()}
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        try:
            super().load_state_dict({**state_dict, "state": sealed})
        except Exception:
            self.__dict__.update(before)
            raise
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling and copying.

        Raises:
            TypeError: states are sharded, and this rank has only its part.
        """
        if self._held:
            raise TypeError(
                f"{type(self).__name__} with sharded states cannot be copied or pickled: save "
                "state_dict(), which gathers them"
            )
        self._await_states()
        self._take_edits()
        return {**super().__getstate__(), "max_norm": self.max_norm, "offload": self.offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state; :meth:`load_state_dict` calls this, too."""
        self._buffers = getattr(self, "_buffers", Buffers())
        self._edits = ExternalWrites()
        self._rows = {}
        self._held = {}
        self._replicas, self._new = None, []
        groups = getattr(self, "param_groups", ())
        own = [{key: group[key] for key in _options.DEFAULTS} for group in groups]
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch has added it for its own steps
        for number, group in enumerate(self.param_groups):
            if own:
                group.update(own[number])
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            self._check_group(group)
        self._unseal()

    @torch.no_grad()
    def _unseal(self) -> None:
        """Adopts the states that are being loaded, or none of them if one is refused."""
        from pycomm.optim import _checkpoint

        sealed = {
            key: s.state for key, s in self.state.items() if isinstance(s, _checkpoint.Sealed)
        }
        loaded = []
        for group in self.param_groups:
            names = self._state_names(group)
            for param in group["params"]:
                if param in sealed:
                    saved = sealed.pop(param)
                    adopted = _checkpoint.adopted(param, group, saved, names)
                    self._offload(adopted)
                    loaded.append((adopted, _checkpoint.copied(_storage.added_to(saved), param)))
        for adopted, added in loaded:
            self.state[adopted.param] = added
            self._put_state(adopted.param, adopted.settle(self._buffers))
            self._hold(adopted.param)
        self.state.update(sealed)  # states that belong to no parameter

    @torch.no_grad()
    def _take_edits(self) -> None:
        for param, state in self.state.items():
            if _storage.holds_weights(state):
                self._edits.take(self._own(param), self._own_state(param))

    # The states of one parameter.

    def _own_state(self, param: torch.Tensor) -> State:
        """A parameter's state; for a DTensor, a new dictionary with its local tensor's state."""
        state: State = self.state.get(param, {})
        if not is_dtensor(param):
            return state
        return {name: local(value) for name, value in state.items()}

    def _put_state(
        self, param: torch.Tensor, state: State, before: Mapping[str, Any] | None = None
    ) -> None:
        """Sets a parameter's state; for a DTensor, `state` is wrapped in DTensors.

        DTensors of the state `before` are reused if their local tensors are in `state`.
        """
        if is_dtensor(param):
            from pycomm.optim import _dtensor

            state = _dtensor.wrapped(param, state, before or {})
        state.update(_storage.added_to(self.state.get(param, {})))
        self.state[param] = state

    @torch.no_grad()
    def _take_assigned(self, param: torch.Tensor, group: Group) -> None:
        """Takes states that the user has assigned; see :func:`_storage.take_assigned`."""
        state: State = self.state.get(param, {})
        before = state
        if state:
            names, dtype = self._state_names(group), _storage.wanted_dtype(param, group["states"])
            if is_dtensor(param):
                from pycomm.optim import _dtensor

                state = _dtensor.own_assigned(param, state, names)
            _storage.take_assigned(local(param), state, names, dtype, self._held.get(param))
            self._put_state(param, state, before)

    def _follow(self, param: torch.Tensor, group: Group, names: tuple[str, ...]) -> None:
        """Converts a parameter's states after the parameter or its part has changed, or raises.

        If the states are of a part, all ranks must call this.
        """
        from pycomm.optim import _checkpoint

        self._check_param(param)
        self._check_options(group)
        state: Any = self._own_state(param)
        held = self._held.get(param)
        if held is not None:
            own = self._own(param)
            self._edits.take(own, state)
            self._edits.forget(own)
            self._edits.forget(param)
            state = _checkpoint.gathered(held, param, state)
        self._edits.take(param, state)
        state = _checkpoint.checked(local(param), state, names)
        adopted = _checkpoint.Adopted(param, group, state, names)
        self._offload(adopted)
        self._put_state(param, adopted.settle(self._buffers))
        self._hold(param)
        if "momentum_buffer" in names and _storage.place_in(state, "momentum_buffer") not in state:
            self.state[param]["step"].zero_()  # the momentum begins with the gradient

    def _own(self, param: torch.Tensor) -> torch.Tensor:
        """The elements of a parameter whose states this rank has."""
        part = self._held.get(param)
        if part is None:
            return param
        return part.of(param) if part.in_pieces else part.own

    def _hold(self, param: torch.Tensor) -> None:
        """Records whether the states of a parameter are of its part or of the whole."""
        part = part_of(param)
        if part is not None:
            self._held[param] = part
        else:
            self._held.pop(param, None)

    def _init_state(self, param: torch.Tensor, group: Group) -> None:
        """Makes the state of a parameter, or of this rank's elements of it."""
        self._check_param(param)
        if _executors.is_capturing(param.device):
            raise RuntimeError(
                f"{type(self).__name__}: take one step before capturing a step, to make the states"
            )
        self._hold(param)
        self._new.append(param)
        own = local(self._own(param))
        offloaded = self._offloaded_for(param)
        if offloaded is None:
            state = self._zero_state(param, own, group)
        else:
            state = offloaded.zero_state(own, self._zero_state(param, _storage.on_meta(own), group))
        self._put_state(param, state)

    def _zero_state(self, param: torch.Tensor, own: torch.Tensor, group: Group) -> State:
        """The state of elements of a parameter before their first step."""
        state: State = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
        dtype = _storage.wanted_dtype(param, group["states"])
        buffers = _storage.buffers_for(param, group["states"], self._buffers)
        for name in self._state_names(group):
            state.update(_storage.make_state(own, name, dtype, buffers))
        master = _storage.master_beside(param, group["master_weights"])
        if master is not None:
            state.update(_storage.make_master(own, master, self._buffers))
        return state

    def _offloaded_for(self, param: torch.Tensor) -> OffloadedStates | None:
        """The states on the host; None if the parameter's states lie beside it."""
        if self.offload is None or not param.is_cuda:
            return None
        if is_dtensor(param) or part_of(param) is not None:  # which the step refuses
            return None
        if self._offloaded is None or self._offloaded.device != param.device:
            from pycomm.optim._offload import OffloadedStates

            self._await_states()
            self._offloaded = OffloadedStates(param.device)
        return self._offloaded

    def _to_host(self, param: torch.Tensor, group: Group, names: tuple[str, ...]) -> None:
        """Offloads states that a program has put elsewhere."""
        if param in self.state and (offloaded := self._offloaded_for(param)) is not None:
            offloaded.take_in(self.state[param], _storage.stored_names(param, group, names))

    def _offload(self, adopted: _checkpoint.Adopted) -> None:
        """Offloads a state that is being loaded or converted."""
        if (offloaded := self._offloaded_for(adopted.param)) is not None:
            adopted.offload(offloaded)
