"""Sharded states in the checkpoints of torch.distributed.checkpoint.

torch.distributed.checkpoint stores boxes: sub-tensors of a tensor. A part of a parameter is a range
of its elements in memory, so it consists of a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pycomm._inputs.tensors import is_dtensor
from pycomm._runtime.torch_private import wrapper_tensor
from pycomm._training.shards import Part, part_of
from pycomm.optim import _storage
from pycomm.optim._checkpoint import Adopted, checked
from pycomm.optim._storage import BLOCK, State


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

    It has the whole tensor's shape, but no other elements, so nothing can be computed with it.

    Args:
        own: the elements, flat, in the order in which they lie in memory.
        begin: the first one's position in this order.
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
        # What copies of a state_dict need; they replace `own` of a new, empty part.
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
        raise ValueError(f"{index.fqn}: no box of this rank begins at {index.offset}")


def _in_parts(part: Part, param: torch.Tensor, state: Mapping[str, Any]) -> State:
    """A sharded parameter's state, of which each rank has a part."""
    if part.in_pieces:  # on all ranks
        raise RuntimeError(
            "sharded_state_dict() must come after a step: parts of lost ranks have not moved yet"
        )
    made: State = {}
    order = tuple(sorted(range(param.dim()), key=lambda dim: -param.stride()[dim]))
    for name, tensor in state.items():
        if name == "step":
            made[name] = tensor
        elif name.endswith(_storage.SCALE):
            made[name] = TensorPart(tensor, part.first // BLOCK, (_storage.blocks_of(param),), (0,))
        elif param.numel():
            made[name] = TensorPart(tensor, part.first, param.shape, order)
        else:  # no rank has elements to write
            made[name] = tensor.view(param.shape)
    return made


class _InParts:
    """Stands for an optimizer whose checkpoint holds this rank's parts."""

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
        held: the parts of which it has states.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    stand_in: Any = _InParts(optimizer, saved, held)
    return dict(get_optimizer_state_dict(model, [stand_in]))


class AdoptedParts(Adopted):
    """The saved state of this rank's part of a parameter, checked. The parameter stays as it is.

    Args:
        param: the parameter.
        group: its group.
        saved: its state, of :class:`TensorPart`.
        names: the states that the optimizer needs.

    Raises:
        ValueError: the state is of another part of the parameter, or stored in another form.
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
        if part is None or kept != saved.keys():
            raise ValueError(
                f"the checkpoint has parts of {', '.join(sorted(saved))}, but the optimizer keeps "
                f"{'all' if part is None else 'parts'} of {', '.join(sorted(kept))}: load "
                "state_dict() of the optimizer that made the parts, or give both the same options"
            )
        for name, value in saved.items():
            if name == "step":
                self._state[name] = value.detach().to(param.device, torch.float32, copy=True)
                continue
            unit = BLOCK if name.endswith(_storage.SCALE) else 1
            begin, count = part.first // unit, -(-part.own.numel() // unit)
            if not isinstance(value, TensorPart) or (value.begin, len(value.own)) != (begin, count):
                raise ValueError(
                    f"{name} must be elements {begin} to {begin + count} of it, got {value!r}: "
                    "load the checkpoint into sharded_state_dict() of this optimizer"
                )
            self._state[name] = value

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        assert isinstance(tensor, TensorPart)
        return tensor.own.clone()  # it may lie where the state will lie


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
