"""Converts saved states of other optimizers, and of these optimizers with other options."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycomm._inputs import check_rank, is_dtensor, local
from pycomm._runtime import host
from pycomm._runtime.torch_private import wrapper_tensor
from pycomm._training.parameters import part_of
from pycomm.optim import _storage
from pycomm.optim._storage import BLOCK, MASTER, OWN, REMAINDER, State
from pycomm.optim.flat import Buffers, zeros_for

if TYPE_CHECKING:
    from pycomm._training.shards import Part
    from pycomm.optim._offload import OffloadedStates

_WEIGHTS = (MASTER, REMAINDER)
# States that exist from the first step; momentum and the largest second moments may begin later.
_ALWAYS = ("exp_avg", "exp_avg_sq")
# Settings of groups that distinguish kinds of optimizers: Adam's, LAMB's, SGD's, NAdam's.
_TELLING = ("amsgrad", "always_adapt", "nesterov", "momentum_decay")


class Sealed:
    """Wraps a parameter's saved state, so that torch does not convert it."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state


class Adopted:
    """A parameter's saved state, checked and converted to the form that its group asks for.

    The parameter and the optimizer change only in :meth:`settle`, which cannot fail.

    Args:
        param: the parameter.
        group: its group.
        saved: its state; for a DTensor, the state of its local tensor. It is copied.
        names: the states that the optimizer needs.

    Raises:
        ValueError: the state is from another kind of optimizer or parameter.
    """

    def __init__(
        self,
        param: torch.Tensor,
        group: Mapping[str, Any],
        saved: Mapping[str, Any],
        names: tuple[str, ...],
    ) -> None:
        self.param = param
        own = local(param)
        dtype = _storage.wanted_dtype(param, group["states"])
        self._states = group["states"]
        self._state: State = {}
        self._weights: torch.Tensor | None = None
        self._on_host = False
        if not saved:
            return
        # torch.optim.SGD and Lion have no counter; apex and TransformerEngine keep it in the group.
        started = any(saved.get(_storage.place_in(saved, name)) is not None for name in names)
        step = saved.get("step", group.get("step", float(started)))
        self._state["step"] = torch.tensor(float(step), dtype=torch.float32, device=param.device)
        for name in names:
            self._state.update(_adopt_state(own, dtype, saved, name))
        master = _storage.master_beside(param, group["master_weights"])
        if master == "remainder" and REMAINDER in saved:
            self._state[REMAINDER] = _like(own, saved[REMAINDER])
            return
        if master is not None:
            self._state.update(_storage.make_master(own, master))
        elif param.dtype != torch.float32:
            return  # the group asks for rounded weights only
        if _storage.holds_weights(saved):
            self._weights = _storage.joined(own, saved).clone()

    def offload(self, offloaded: OffloadedStates) -> None:
        """Moves the state to the host, so that never all states are on the device."""
        offloaded.take_in(self._state, list(self._state))
        if self._weights is not None:
            self._weights = self._weights.cpu()
        self._on_host = True

    def settle(self, buffers: Buffers) -> State:
        """The state; for a flattened parameter, in views of the optimizer's buffers.

        For a sharded parameter, the state of this rank's part.
        """
        flat = _storage.buffers_for(self.param, self._states, buffers)
        part = part_of(self.param)
        param = local(self.param) if part is None else part.own
        for name, tensor in self._state.items():
            if name == "step" or self._on_host:
                continue
            own = self._state[name] = self._own(name, tensor)
            if not name.endswith(_storage.SCALE):
                place = zeros_for(buffers if name in _WEIGHTS else flat, param, name, own.dtype)
                self._state[name] = place.copy_(own)
        if self._weights is not None:
            whole = local(self.param)
            _storage.write_weights(whole, self._state, self._weights, part)
        return self._state

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a state that this rank keeps."""
        part: Part | None = part_of(self.param)
        if part is not None and name.endswith(_storage.SCALE):
            return part.units_of(tensor, BLOCK)
        return _storage.part_in(tensor, self.param, part)


def copied(values: Mapping[str, Any], param: torch.Tensor) -> State:
    """A copy of what a program has added to a state, on the parameter's device as in torch."""
    return {
        name: value.to(param.device, copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in values.items()
    }


# The key, in a checkpoint without states, of the rank that has gathered them.
ELSEWHERE = "states_on_rank"


def complete(
    state_dict: dict[str, Any],
    params: Sequence[torch.Tensor],
    held: Mapping[torch.Tensor, Part],
    to: int | None,
    names: Collection[str] | None,
) -> None:
    """Gathers sharded states, and converts all to torch.optim's form if `names` are given.

    Takes one parameter at a time, so that there are never two copies of all states.
    """
    states = state_dict["state"]
    for number, param in enumerate(params):
        if number in states:
            whole, part = states.pop(number), held.get(param)
            if part is not None:
                whole = gathered(part, param, whole, to)
            if whole is not None and names is not None:
                whole = _for_torch(param, whole, names)
            if whole is not None:
                states[number] = whole
            else:
                state_dict[ELSEWHERE] = to


def _for_torch(param: torch.Tensor, state: Mapping[str, Any], names: Collection[str]) -> State:
    if not is_dtensor(param):
        return for_torch(param, state, names)
    from pycomm.optim import _dtensor

    own = for_torch(local(param), _dtensor.local_state(state), names)
    return _dtensor.wrapped(param, own, state)


def for_torch(param: torch.Tensor, state: Mapping[str, Any], names: Collection[str]) -> State:
    """A parameter's state in torch.optim's form."""
    kept = [name for name in names if _storage.place_in(state, name) in state]
    made: State = {name: _storage.to_fp32(state, name) for name in kept}
    if "exp_avg" in names:
        made["step"] = state["step"].clone()
    if _storage.holds_weights(state):
        made[MASTER] = _storage.joined(param, state)
    return made | _storage.added_to(state)


def gathered(
    part: Part, param: torch.Tensor, state: Mapping[str, Any], to: int | None = None
) -> State | None:
    """The whole state of a sharded parameter, from all ranks. All ranks must call this.

    Args:
        part: this rank's part.
        param: the parameter.
        state: the state of the part.
        to: the rank that gets the result; None for all. The others get None.
    """
    group = part.group
    if to is not None:
        check_rank("to", to, group.size)
    made: State = _storage.added_to(state)
    for name in sorted(state.keys() & OWN):  # in the same order on all ranks
        tensor = state[name]
        if name == "step":
            made[name] = tensor
        elif name.endswith(_storage.SCALE):
            made[name] = part.gather(
                tensor, host.empty(_storage.blocks_of(param), dtype=torch.float32), BLOCK, to=to
            )
        else:
            made[name] = part.gather(tensor, param, to=to)
    return {name: made[name] for name in state} if to in (None, group.rank) else None


def check_groups(
    optimizer: str, defaults: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Checks by its groups that a checkpoint is from this kind of optimizer.

    Names of states do not suffice: several kinds use the same names.

    Raises:
        ValueError: the groups have settings that this kind does not know.
    """
    for group in groups:
        for name in _TELLING:
            if name in group and name not in defaults:
                raise ValueError(
                    f"the checkpoint is of another kind of optimizer: its groups have {name!r}, "
                    f"which {optimizer} does not know"
                )


def checked(
    param: torch.Tensor, saved: Mapping[str, Any], names: tuple[str, ...]
) -> Mapping[str, Any]:
    """Checks a saved state, and returns it with pycomm's names.

    Raises:
        ValueError: the state is from another kind of optimizer or parameter.
    """
    missing = [n for n, value in saved.items() if isinstance(value, dict) and n in OWN]
    if missing:  # torch puts an empty dictionary in its place
        raise ValueError(
            f"the checkpoint must have {missing[0]} if it is flattened, because torch then loads "
            "only names that are in optimizer.state: leave out flatten_optimizer_state_dict=True"
        )
    for name in _ALWAYS:
        if name not in names and _storage.place_in(saved, name) in saved:
            raise ValueError(
                f"a state of the checkpoint has {name}: it is of another kind of optimizer"
            )
    for name in names if saved else ():
        place = _storage.place_in(saved, name)
        if name in _ALWAYS and place not in saved:
            raise ValueError(f"a state of the checkpoint has no {name}, only {', '.join(saved)}")
        stored = saved.get(place)
        if stored is None:
            continue
        _check_shape(place, stored, param)
        code = _storage.place_of(name, torch.uint8)
        if (stored.dtype == torch.uint8) != (place == code):
            raise ValueError(
                f"{place} has dtype {stored.dtype}: states with dtype uint8 must be under {code}, "
                "and all others under other names"
            )
        if place == code:
            _check_scales(_storage.scale_name(name), saved, param)
    step = saved.get("step")
    if isinstance(step, torch.Tensor) and step.numel() != 1:
        raise ValueError(f"step must be one number, got shape {tuple(step.shape)}")
    for name in (MASTER, REMAINDER):
        if name in saved:
            _check_shape(name, saved[name], param)
    master = saved.get(MASTER)
    if master is not None and master.dtype == torch.int16:  # TransformerEngine's remainders
        others = {name: value for name, value in saved.items() if name != MASTER}
        saved = {**others, REMAINDER: master}
    if REMAINDER in saved and saved[REMAINDER].dtype != torch.int16:
        raise ValueError(f"remainders are of type int16, got {saved[REMAINDER].dtype}")
    if REMAINDER in saved and param.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"the checkpoint has remainders of bfloat16 parameters, got one of {param.dtype}"
        )
    _check_forms(saved, names)
    return saved


def _check_forms(saved: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises ValueError for a state in two forms, one from the checkpoint and one from here.

    torch.distributed.checkpoint makes such states if the checkpoint and the optimizer store a state
    under different names: it keeps both.
    """
    forms = [[name + end for end in _storage.FORMS] for name in names]
    for places in (*forms, [MASTER, REMAINDER]):
        found = [place for place in places if saved.get(place) is not None]
        if len(found) > 1:
            raise ValueError(
                f"the checkpoint must have one form of each state, got {' and '.join(found)}: save "
                "it with state_dict(format='torch'), or load it with load_state_dict()"
            )


def _check_shape(name: str, stored: torch.Tensor, param: torch.Tensor) -> None:
    if stored.shape != param.shape:
        raise ValueError(
            f"{name} has shape {tuple(stored.shape)}, but its parameter {tuple(param.shape)}"
        )


def _check_scales(name: str, saved: Mapping[str, Any], param: torch.Tensor) -> None:
    scales, blocks = saved.get(name), _storage.blocks_of(param)
    if scales is None:
        raise ValueError(f"an 8-bit state of the checkpoint has no {name}")
    if scales.shape != (blocks,):
        raise ValueError(f"{name} must have shape {(blocks,)}, got {tuple(scales.shape)}")


def _adopt_state(
    param: torch.Tensor, dtype: torch.dtype, saved: Mapping[str, Any], name: str
) -> State:
    place = _storage.place_in(saved, name)
    stored = saved.get(place)
    if stored is None:
        return _storage.make_state(param, name, dtype)
    coded = stored.dtype == torch.uint8
    if coded and stored.stride() != param.stride():  # its blocks are in another order
        return _storage.from_fp32(_like(param, _storage.to_fp32(saved, name)), name, dtype)
    kept = _like(param, stored)
    same: State = {place: kept}
    if coded:
        scale = _storage.scale_name(name)
        same[scale] = saved[scale].detach().to(param.device, torch.float32, copy=True)
    if kept.dtype == dtype and place == _storage.place_of(name, dtype):
        return same
    return _storage.from_fp32(_storage.to_fp32(same, name), name, dtype)


def _like(param: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A copy on the parameter's device and in its memory format."""
    return torch.empty_like(param, dtype=stored.dtype).copy_(stored)


# Sharded states in checkpoints of torch.distributed.checkpoint.
#
# torch.distributed.checkpoint stores boxes: sub-tensors of a tensor. A part of a parameter is a
# range of its elements in memory, so it consists of a few boxes.


class Box(NamedTuple):
    """A sub-tensor that holds consecutive elements of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Divides a range of a contiguous tensor's elements into at most 2 * ndim - 1 boxes."""
    if begin == end:
        return
    if len(shape) < 2:
        yield Box((begin,) * len(shape), (end - begin,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], begin, end):
        yield Box((row, *offsets), (1, *sizes))


class TensorPart(torch.Tensor):
    """This rank's elements of a tensor, for torch.distributed.checkpoint.

    It has the whole tensor's shape, but only these elements, so nothing can be computed with it.

    Args:
        own: the elements, flat, in the order in which they lie in memory.
        begin: the position of the first element in this order.
        shape: the whole tensor's shape.
        order: the whole tensor's dimensions, in the order of their strides.
    """

    own: torch.Tensor
    begin: int
    order: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, own: torch.Tensor, begin: int, shape: Sequence[int], order: tuple[int, ...]
    ) -> TensorPart:
        part = wrapper_tensor(cls, shape, own)
        part.own, part.begin, part.order = own, begin, order
        return part

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        end = self.begin + self.own.numel()
        return f"TensorPart(shape={tuple(self.shape)}, elements {self.begin} to {end})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), _options: Any = None
    ) -> Any:
        # Copies of a state_dict need these operations; they replace `own` of a new, empty part.
        part, aten = args[0], torch.ops.aten
        if func in (aten.new_empty.default, aten.detach.default, aten.clone.default):
            own = part.own if func is aten.detach.default else part.own.clone()
            return TensorPart(own, part.begin, part.shape, part.order)
        raise NotImplementedError(
            "a part of an optimizer's state is for torch.distributed.checkpoint only, which must "
            "get it through save(), or through async_save() with the default stager; for whole "
            f"tensors, call state_dict() of the optimizer ({func})"
        )

    def _boxes(self) -> list[Box]:
        """The boxes of these elements, with the dimensions in the order of their strides."""
        dense = [self.shape[dim] for dim in self.order]
        return list(boxes(dense, self.begin, self.begin + self.own.numel()))

    def _sorted(self, values: Sequence[int]) -> torch.Size:
        """One value per dimension, in the order of the tensor's own dimensions."""
        by_dimension = dict(zip(self.order, values, strict=True))
        return torch.Size(by_dimension[dim] for dim in range(len(values)))

    # The protocol of torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, _part: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        properties = TensorProperties.create_from_tensor(self.own)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=self._sorted(offsets), sizes=self._sorted(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        begin = 0
        for offsets, sizes in self._boxes():
            end = begin + math.prod(sizes)
            if self._sorted(offsets) == index.offset:
                inverse = self._sorted(range(len(sizes)))
                return self.own[begin:end].view(sizes).permute(inverse)
            begin = end
        raise ValueError(f"{index.fqn}: no chunk of this rank begins at {index.offset}")


def _order_of(part: Part) -> tuple[int, ...]:
    return tuple(sorted(range(len(part.strides)), key=lambda dim: -part.strides[dim]))


def _in_parts(part: Part, param: torch.Tensor, state: Mapping[str, Any]) -> State:
    """A sharded parameter's state with this rank's part as a :class:`TensorPart`."""
    if part.in_pieces:  # on all ranks
        raise RuntimeError(
            "sharded_state_dict() must be called after a step: parts of lost ranks have not "
            "moved yet"
        )
    made: State = {}
    order = _order_of(part)
    for name, tensor in state.items():
        if name == "step" or name not in OWN:
            made[name] = tensor
        elif name.endswith(_storage.SCALE):
            made[name] = TensorPart(tensor, part.first // BLOCK, (_storage.blocks_of(param),), (0,))
        elif param.numel():
            made[name] = TensorPart(tensor, part.first, param.shape, order)
        else:  # no rank has elements to write
            made[name] = tensor.view(param.shape)
    return made


class _InParts:
    """An optimizer's stand-in whose checkpoint holds only this rank's parts."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        saved: Callable[[], dict[str, Any]],
        held: Mapping[torch.Tensor, Part],
    ) -> None:
        self._optimizer, self._saved, self._held = optimizer, saved, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        saved = self._saved()
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            part = self._held.get(param)
            if part is not None and number in saved["state"]:
                saved["state"][number] = _in_parts(part, param, saved["state"][number])
        return saved


def by_name(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Callable[[], dict[str, Any]],
    held: Mapping[torch.Tensor, Part],
) -> dict[str, Any]:
    """A checkpoint with the names of parameters, and with parts of sharded states.

    Args:
        model: the model, or its wrapper.
        optimizer: the optimizer of its parameters.
        saved: returns the optimizer's checkpoint, with this rank's elements of sharded states.
        held: the parameters whose states are of a part, with that part.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    stand_in: Any = _InParts(optimizer, saved, held)
    return dict(get_optimizer_state_dict(model, [stand_in]))


class AdoptedParts(Adopted):
    """The saved state of this rank's part of a parameter, checked. The parameter stays as it is.

    Args:
        param: the parameter.
        group: its group.
        saved: its state, with a :class:`TensorPart` per tensor.
        names: the states that the optimizer needs.

    Raises:
        ValueError: the state is of another part of the parameter, or in another form.
    """

    def __init__(
        self,
        param: torch.Tensor,
        group: Mapping[str, Any],
        saved: Mapping[str, Any],
        names: tuple[str, ...],
    ) -> None:
        super().__init__(param, group, {}, names)
        part, kept = part_of(param), _storage.stored_names(param, group, names)
        own = saved.keys() & OWN
        if part is None or kept != own:
            raise ValueError(
                f"the checkpoint has parts of {', '.join(sorted(own))}, but the optimizer keeps "
                f"{'all' if part is None else 'parts'} of {', '.join(sorted(kept))}: load "
                "state_dict() of the optimizer that made the parts, or give both the same options"
            )
        for name, value in saved.items():  # in the order of all ranks
            if name not in kept:
                continue
            if name == "step":
                self._state[name] = value.detach().to(param.device, torch.float32, copy=True)
                continue
            unit = BLOCK if name.endswith(_storage.SCALE) else 1
            begin, count = part.first // unit, -(-part.own.numel() // unit)
            order = _order_of(part) if unit == 1 else (0,)
            if not isinstance(value, TensorPart) or (value.begin, len(value.own), value.order) != (
                begin, count, order,
            ):  # fmt: skip
                raise ValueError(
                    f"{name} must have its elements {begin} to {begin + count}, with dimensions in "
                    f"the order {order}, got {value!r}: after a step, load the checkpoint into "
                    "sharded_state_dict() of this optimizer"
                )
            self._state[name] = value

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        assert isinstance(tensor, TensorPart)
        return tensor.own.clone()  # it may share the memory of the new state


def adopted(
    param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], names: tuple[str, ...]
) -> Adopted:
    """A parameter's saved state, whole or in parts."""
    if any(isinstance(value, TensorPart) for value in saved.values()):
        return AdoptedParts(param, group, saved, names)
    saved = checked(param, saved, names)
    if is_dtensor(param):
        from pycomm.optim import _dtensor

        return Adopted(param, group, _dtensor.own_saved(param, saved, names), names)
    divided = [name for name, value in saved.items() if is_dtensor(value)]
    if divided:
        raise ValueError(
            f"{divided[0]} is a DTensor, but its parameter of shape {tuple(param.shape)} is not: "
            "save with StateDictOptions(full_state_dict=True), or load with "
            "torch.distributed.checkpoint into sharded_state_dict() of this optimizer"
        )
    return Adopted(param, group, saved, names)
