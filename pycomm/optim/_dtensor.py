"""DTensors as parameters, from FSDP2's ``fully_shard`` or tensor parallelism.

Each rank steps its local tensor. The states are DTensors of the parameter's mesh and placements
around states of the local tensor, so that torch.distributed.checkpoint takes them; ``"step"``, and
the codes and scales of 8-bit states, are plain tensors. Importing DTensor takes seconds, so this
module is imported when the first DTensor arrives.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from pycomm import _C
from pycomm._inputs import local
from pycomm._runtime import host
from pycomm._runtime.torch_private import local_tensor
from pycomm.optim import _options, _storage
from pycomm.optim._executors import Control, OnCpu, Row, Step, is_capturing
from pycomm.optim._storage import CODE, MASTER, REMAINDER, ROOT, SCALE, State

# The random bits of a parameter's shard i begin at i times this offset.
_SHARD_PLACES = 1 << 40


class Division(NamedTuple):
    """How ranks divide a DTensor.

    Attributes:
        mesh: its mesh.
        dims: the mesh's dimensions along which ranks have different elements.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]

    def shard(self) -> int:
        """The number of this rank's shard; copies of a shard have the same number."""
        number, here = 0, self.mesh.get_coordinate() or ()
        for dim in self.dims:
            number = number * self.mesh.size(dim) + here[dim]
        return number

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of the values of all shards, with the same bits on all ranks.

        All ranks of the mesh must call this. The values are exchanged on the mesh's device. If the
        parameters are offloaded, they lie on another device.
        """
        kind, device = self.mesh.device_type, value.device
        value = value if device.type == kind else value.to(kind)
        for dim in self.dims:
            group = self.mesh.get_group(dim)
            values = [torch.empty_like(value) for _ in range(self.mesh.size(dim))]
            dist.all_gather(values, value, group=group)
            value = functools.reduce(torch.add, values)
        return value.to(device)


def division_of(param: torch.Tensor) -> Division | None:
    """How ranks divide a parameter; None if each rank has the whole one."""
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    dims = tuple(
        dim
        for dim, placement in enumerate(param.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return Division(mesh, dims) if dims else None


def place_of(param: torch.Tensor) -> int:
    """The offset of a local tensor's random bits, the same for all copies of a shard."""
    division = division_of(param)
    return 0 if division is None else division.shard() * _SHARD_PLACES


# Checks.


def check_param(optimizer: str, param: Any, needs_whole_norms: bool) -> None:
    """Raises an error for DTensors that a fused step cannot update.

    Args:
        optimizer: the optimizer's name.
        param: a DTensor.
        needs_whole_norms: the optimizer's steps depend on norms of whole parameters.
    """
    told = f"a DTensor of shape {tuple(param.shape)} with placements {param.placements}"
    if param.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{optimizer} takes DTensors of meshes that have this rank, got {told} on "
            f"{param.device_mesh}"
        )
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{optimizer} takes DTensors that are Shard or Replicate, got {told}")
    on_cpu = local_tensor(param).device.type == "cpu"
    if needs_whole_norms and division_of(param) is not None and not on_cpu:
        raise ValueError(
            f"{optimizer} needs the norm of each whole parameter: elsewhere than on the CPU, it "
            "takes plain tensors and DTensors that are Replicate on every mesh dimension of "
            f"several ranks, got {told}"
        )
    _options.check_param(optimizer, local_tensor(param))


def own_gradient(optimizer: str, param: Any, grad: Any) -> torch.Tensor:
    """This rank's elements of a DTensor's gradient.

    A gradient with other placements is redistributed, as in torch's fused optimizers: all ranks of
    the mesh must call this.

    Raises:
        TypeError, ValueError: the gradient is no DTensor, or has another shape or mesh.
    """
    told = f"a parameter of shape {tuple(param.shape)} that is a DTensor"
    if not isinstance(grad, DTensor):
        raise TypeError(f"{optimizer}: {told} needs a DTensor as gradient, got {type(grad)}")
    if grad.shape != param.shape:
        raise ValueError(
            f"{optimizer} takes gradients of their parameters' shapes, got one of shape "
            f"{tuple(grad.shape)} of {told}"
        )
    if grad.device_mesh != param.device_mesh:
        raise ValueError(
            f"{optimizer}: {told} on {param.device_mesh} needs a gradient on the same mesh, got "
            f"one on {grad.device_mesh}"
        )
    return local_tensor(_placed_as(param, grad))


def _placed_as(param: Any, tensor: Any) -> Any:
    if tensor.placements == param.placements:
        return tensor
    return tensor.redistribute(placements=param.placements)


# States.


def own_elements(param: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor with a DTensor's shape.

    Args:
        param: the parameter.
        name: the tensor's name, for errors.
        value: a DTensor on the same mesh, or a plain tensor with all elements.

    Raises:
        ValueError: the tensor has another shape or mesh.
    """
    if value.shape != param.shape:
        raise ValueError(
            f"{name} must have the shape of its parameter, {tuple(param.shape)}, got "
            f"{tuple(value.shape)}"
        )
    if not isinstance(value, DTensor):
        whole = value.detach().to(param.device)
        value = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    elif value.device_mesh != param.device_mesh:
        raise ValueError(
            f"{name} must be on its parameter's mesh, {param.device_mesh}, got {value.device_mesh}"
        )
    return local_tensor(_placed_as(param, value))


def own_assigned(param: Any, state: Mapping[str, Any], names: Iterable[str]) -> State:
    """The state of a DTensor's local tensor, if a program may have assigned some of `names`.

    Raises:
        ValueError: an assigned state has another shape or mesh than the parameter.
    """
    own = local_state(state)
    for name in names:
        if name in state and isinstance(state[name], torch.Tensor):
            own[name] = own_elements(param, name, state[name])
    return own


def own_saved(param: Any, saved: Mapping[str, Any], names: Iterable[str]) -> State:
    """The state of a DTensor's local tensor, from a saved state that has been checked.

    8-bit states of whole parameters become fp32, because shards have other blocks.
    """
    own: State = {"step": saved["step"]} if "step" in saved else {}
    for name in names:
        place = _storage.place_in(saved, name)
        if place == name + CODE:
            own[name] = own_elements(param, name, _storage.to_fp32(saved, name))
        elif saved.get(place) is not None:
            own[place] = own_elements(param, place, saved[place])
    for name in (MASTER, REMAINDER):
        if saved.get(name) is not None:
            own[name] = own_elements(param, name, saved[name])
    return own


def local_state(state: Mapping[str, Any]) -> State:
    """A state in which local tensors replace DTensors."""
    return {name: local(value) for name, value in state.items()}


def wrapped(param: Any, state: Mapping[str, Any], before: Mapping[str, Any]) -> State:
    """A DTensor's state, with DTensors where the form of a state allows it.

    Args:
        param: the parameter.
        state: the state of its local tensor.
        before: the state until now. Its DTensors stay if their local tensors are in `state`.
    """
    made: State = {}
    for name, value in state.items():
        if name in before and local(before[name]) is value:
            made[name] = before[name]
        elif name == "step" or name.endswith((CODE, SCALE)):
            made[name] = value
        else:
            made[name] = wrap(param, value)
    return made


def wrap(param: Any, value: torch.Tensor) -> torch.Tensor:
    """A DTensor with a parameter's shape, mesh and placements around a tensor, or a copy of it."""
    if value.device.type == param.device_mesh.device_type:
        return DTensor.from_local(
            value,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    # from_local() would move the states of a parameter that is offloaded to the CPU.
    made = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
    local_tensor(made).copy_(value)
    return made


def to_save(param: Any, state: Mapping[str, Any]) -> State:
    """A DTensor's state for a checkpoint, which other meshes may load.

    It has torch's names. 8-bit states become fp32, because other meshes have other blocks. Roots of
    second moments become fp32, too. Loading gives the same bits, but for 8-bit blocks whose largest
    element was rounded down. Remainders become fp32 weights, because collectives do not take their
    type.
    """
    own = local_state(state)
    made: State = {}
    for name, value in own.items():
        if name.endswith((CODE, ROOT)):
            base = name.removesuffix(CODE).removesuffix(ROOT)
            made[base] = _storage.to_fp32(own, base)
        elif name == REMAINDER:
            made[MASTER] = _storage.joined(local_tensor(param), own)
        elif not name.endswith(SCALE):
            made[name] = value
    return wrapped(param, made, state)


# Norms.

# Rows by the division of their parameters; None for parameters that are not divided.
Divided: TypeAlias = "dict[Division | None, array[int]]"


def by_division(params: Sequence[torch.Tensor], rows: Iterable[Row]) -> Divided:
    """Sorts rows by their parameters' division.

    Args:
        params: all parameters, also without a gradient, because another rank may have one.
        rows: the rows.
    """
    found: Divided = {division_of(param): array("q") for param in params}
    for row in rows:
        row.add_to(found[division_of(row.param)])
    return found


class RowStep(NamedTuple):
    """The step of one parameter: its settings, and its row's words."""

    settings: _C.OptimizerSettings
    words: array[int]


class MeshNorms:
    """The norm of gradients that are divided among ranks."""

    def __init__(self) -> None:
        self._last: dict[Division | None, object] = {}  # executors

    def measure(self, device: torch.device, divided: Divided, step: Step) -> torch.Tensor:
        """Returns the norm of all gradients together, and fills in the step's numbers.

        All ranks of the meshes must call this. The norm has the same bits on all of them.
        """
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for division, words in divided.items():
            own = self._squares(device, division, words)
            squares = squares + (own if division is None else division.total(own))
        return _conclude(squares, step)

    def _squares(
        self, device: torch.device, division: Division | None, words: array[int]
    ) -> torch.Tensor:
        if not words:
            return torch.zeros((), dtype=torch.float64, device=device)
        if device.type == "cpu":
            return OnCpu([({}, words)]).squares()
        from pycomm.optim._cuda_executors import executor

        steps = executor(device, [({}, words)], self._last.get(division))
        if not is_capturing(device):
            self._last[division] = steps
        return steps.squares()


def adapt(params: Iterable[torch.Tensor], steps: Mapping[int, RowStep], control: Control) -> None:
    """Applies LAMB's ratios to divided parameters; they need norms of whole parameters.

    All ranks of the meshes must call this. The ratios have the same bits on all of them.

    Args:
        params: all parameters, also without a gradient, because another rank may have one.
        steps: the steps of parameters with gradients, by the parameters' ids. Learning rates of
            steps that adapt are multiplied by the ratios.
        control: the steps' :data:`Control`.
    """
    divided: dict[Division, list[int]] = {}
    for param in params:
        if (division := division_of(param)) is not None:
            divided.setdefault(division, []).append(id(param))
    for division, members in divided.items():
        adapts = [number in steps and steps[number].settings.adapt for number in members]
        own = host.zeros(len(members), 2, dtype=torch.float64)
        for number, sums, adapting in zip(members, own, adapts, strict=True):
            if adapting:
                found = _C.optimizer_lamb_sums(*steps[number], *control)
                sums.copy_(host.tensor(found[0], dtype=torch.float64))
        for number, sums, adapting in zip(members, division.total(own), adapts, strict=True):
            if adapting:
                settings = steps[number].settings
                settings.lr *= _C.lamb_ratio(*sums.tolist())
                settings.adapt = False


def _conclude(squares: torch.Tensor, step: Step) -> torch.Tensor:
    """The norm and the step's numbers from the sum of squares, as csrc/core/optim/segment.h."""
    norm = squares.sqrt()
    if step.scale is not None:
        norm = norm / step.scale.double()
    if step.found is not None and step.sets_found:
        step.found.copy_(~norm.isfinite())
    elif step.found is not None:
        step.found.masked_fill_(~norm.isfinite(), 1.0)
    if step.clip is not None and step.max_norm is not None:
        step.clip.copy_((step.max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
