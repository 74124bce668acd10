"""Storage formats of weights and states, and their descriptions for the extension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._training.parameters import dense_strides
from pycomm.optim.flat import Buffers, zeros_for

if TYPE_CHECKING:
    from pycomm._training.shards import Part

State = dict[str, Any]

BLOCK = 256  # elements of an 8-bit state that share a scale
SMALL = 4096  # tensors with fewer elements keep fp32 even if the group asks for 8 bits
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STATES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "8bit": torch.uint8}
MASTERS = (None, "fp32", "remainder")
MASTER, REMAINDER = "master_param", "remainder"
SCALE = "_absmax"  # ends the names of scales
CODE = "_code"  # ends the names of 8-bit states
ROOT = "_root"  # ends the names of second moments in fp16
FORMS = ("", ROOT, CODE)  # a state is stored under one of these names
_KEPT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
# The entries of a state that optimizers make. Programs may add others.
OWN = {"step", MASTER, REMAINDER, *(name + end for name in _KEPT for end in (*FORMS, SCALE))}


# enum class Storage of csrc/core/optim/optimizer.h.
_KINDS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 5}
FP32, CODE8 = 1, 5
STORAGE_BYTES = (0, 4, 2, 2, 2, 1)  # of an element
_MASTER_KINDS = {
    "fp32": (MASTER, 1 << 16, torch.float32, (torch.float16, torch.bfloat16)),
    "remainder": (REMAINDER, 4 << 16, torch.int16, (torch.bfloat16,)),
}


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, without memory."""
    return torch.empty_like(tensor, device="meta")


def added_to(state: Mapping[str, Any]) -> State:
    """What programs have added to a state, such as Lookahead's weights. It stays as it is."""
    return {name: value for name, value in state.items() if name not in OWN}


def scale_name(name: str) -> str:
    """The name under which an 8-bit state stores the largest magnitudes of its blocks."""
    return name + SCALE


def place_of(name: str, dtype: torch.dtype) -> str:
    """The name under which a state of this type is stored.

    Codes and roots have other names than the moments, so that torch.optim cannot mistake them.
    """
    if dtype == torch.uint8:
        return name + CODE
    return name + ROOT if dtype == torch.float16 and squares(name) else name


def place_in(state: Mapping[str, Any], name: str) -> str:
    """The name under which `state` stores this state; `name` itself if it is missing."""
    return next((name + end for end in FORMS if name + end in state), name)


def wanted_dtype(param: torch.Tensor, states: str) -> torch.dtype:
    """The type in which a parameter's states are stored under the option `states`."""
    if states == "8bit" and param.numel() < SMALL:
        return torch.float32
    return STATES[states]


def buffers_for(param: torch.Tensor, states: str, buffers: Buffers) -> Buffers | None:
    """The buffers for a parameter's states; None if their type differs from the option's.

    Buffers are as long as all parameters together, which would waste memory on a few small states.
    """
    return buffers if wanted_dtype(param, states) == STATES[states] else None


def master_beside(param: torch.Tensor, master: str | None) -> str | None:
    """The kind of master weights that a parameter needs; None for fp32 parameters."""
    return master if param.dtype != torch.float32 else None


def blocks_of(param: torch.Tensor) -> int:
    """The number of blocks in a parameter's 8-bit state."""
    return -(-param.numel() // BLOCK)


def make_state(
    param: torch.Tensor, name: str, dtype: torch.dtype, buffers: Buffers | None = None
) -> State:
    """A state of zeros, in the optimizer's buffers if the parameter is flattened."""
    place = place_of(name, dtype)
    state: State = {place: zeros_for(buffers, param, place, dtype)}
    if dtype == torch.uint8:
        state[scale_name(name)] = torch.zeros(
            blocks_of(param), dtype=torch.float32, device=param.device
        )
    return state


def make_master(param: torch.Tensor, master: str, buffers: Buffers | None = None) -> State:
    """Master weights or a remainder that equal the parameter."""
    if master == "fp32":
        return {MASTER: zeros_for(buffers, param, MASTER, torch.float32).copy_(param.detach())}
    return {REMAINDER: zeros_for(buffers, param, REMAINDER, torch.int16)}


def stored_names(param: torch.Tensor, group: Mapping[str, Any], names: tuple[str, ...]) -> set[str]:
    """The names in a parameter's state after a step."""
    dtype = wanted_dtype(param, group["states"])
    stored = {"step", *(place_of(name, dtype) for name in names)}
    if dtype == torch.uint8:
        stored.update(map(scale_name, names))
    master = master_beside(param, group["master_weights"])
    return stored if master is None else stored | {_MASTER_KINDS[master][0]}


def to_fp32(state: Mapping[str, Any], name: str) -> torch.Tensor:
    """A state's values in fp32."""
    place = place_in(state, name)
    stored: torch.Tensor = state[place]
    if place == name:
        return stored.float()
    if stored.dtype != torch.uint8:
        return stored.float().square()
    codes = torch.empty_like(stored, device="cpu").copy_(stored)  # dense
    scales = state[scale_name(name)].float().cpu().contiguous()
    values = torch.empty_like(codes, dtype=torch.float32)
    _C.decode_state(
        codes.data_ptr(), scales.data_ptr(), codes.numel(), squares(name), values.data_ptr()
    )
    return values.to(stored.device)


def from_fp32(values: torch.Tensor, name: str, dtype: torch.dtype) -> State:
    """Converts fp32 values to a state of this type."""
    place = place_of(name, dtype)
    if place == name:
        return {name: values.to(dtype)}
    if dtype != torch.uint8:
        roots = values.sqrt().to(dtype)
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        return {place: roots.masked_fill((values > 0) & (roots == 0), least)}
    on_cpu = values.cpu()
    state = make_state(on_cpu, name, dtype)
    codes, scales = state[place], state[scale_name(name)]
    _C.encode_state(
        on_cpu.data_ptr(), on_cpu.numel(), squares(name), codes.data_ptr(), scales.data_ptr()
    )
    return {key: tensor.to(values.device) for key, tensor in state.items()}


def take_assigned(
    param: torch.Tensor,
    state: State,
    names: tuple[str, ...],
    dtype: torch.dtype,
    part: Part | None,
) -> None:
    """Takes states that a program has assigned under torch's names, such as ``exp_avg``.

    Args:
        param: the parameter.
        state: the state of the parameter or of a part.
        names: the states' names.
        dtype: the type in which they are stored.
        part: the part; None for the whole parameter.

    Raises:
        ValueError: an assigned state has another shape than the parameter.
    """
    own = param if part is None else part.own
    for name in names:
        given, place = state.get(name), place_of(name, dtype)
        if given is None or (place == name and (given.shape, given.dtype) == (own.shape, dtype)):
            continue
        if given.shape == param.shape:
            given = part_in(torch.empty_like(param, dtype=given.dtype).copy_(given), param, part)
        elif given.shape != own.shape:
            raise ValueError(
                f"{name} must have the shape of its parameter, {tuple(param.shape)}, got "
                f"{tuple(given.shape)}"
            )
        del state[name]
        state.update(from_fp32(given.detach().to(param.device, torch.float32), name, dtype))
    if state and "step" not in state:
        state["step"] = torch.ones((), dtype=torch.float32, device=param.device)


def squares(name: str) -> bool:
    """True if a state holds second moments, which have their own code."""
    return name.endswith("_sq")


def holds_weights(state: Mapping[str, Any]) -> bool:
    """True if a state has master weights or a remainder."""
    return MASTER in state or REMAINDER in state


def joined(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """The weights of a parameter in fp32, at full precision.

    If the parameter has become fp32, elements that differ from the rounded weights are kept.
    """
    own = param.detach().float()
    if MASTER in state:
        weights: torch.Tensor = state[MASTER].detach().to(param.device, torch.float32)
    elif REMAINDER in state:
        low: torch.Tensor = state[REMAINDER].to(param.device, torch.int32)
        high = (own.view(torch.int32) >> 16) << 16
        sums = (high + low).view(torch.float32)
        weights = torch.where(sums.isnan(), high.view(torch.float32), sums)
    else:
        return own
    if param.dtype != torch.float32:
        return weights
    same = is_rounded(own, weights, torch.bfloat16) | is_rounded(own, weights, torch.float16)
    return torch.where(same, weights, own)


def is_rounded(own: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of elements that equal the weights rounded to a type; ties may round either way."""
    same = own == weights.to(dtype)
    return same | (own == split(weights)[0]) if dtype == torch.bfloat16 else same


def split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits fp32 weights into a bf16 parameter and its remainder."""
    bits = weights.view(torch.int32)
    nan = weights.isnan()
    high = ((bits + 0x8000) >> 16).to(torch.int16).masked_fill(nan, 0x7FC0)
    return high.view(torch.bfloat16), bits.to(torch.int16).masked_fill(nan, 0)


def write_weights(
    param: torch.Tensor, state: Mapping[str, Any], weights: torch.Tensor, part: Part | None = None
) -> None:
    """Writes fp32 weights in place to a parameter and to its master weights or remainder.

    A bf16 parameter with either of them is rounded as in a step. A sharded parameter is written as
    a whole, and its state is written for a part.
    """
    rounded = weights
    if param.dtype == torch.bfloat16 and (MASTER in state or REMAINDER in state):
        rounded, low = split(weights)
        if REMAINDER in state:
            state[REMAINDER].copy_(part_in(low, param, part))
    if MASTER in state:
        state[MASTER].copy_(part_in(weights, param, part))
    param.detach().copy_(rounded)


def part_in(tensor: torch.Tensor, param: torch.Tensor, part: Part | None) -> torch.Tensor:
    """A part's elements of a tensor of the parameter's shape; all of them without a part."""
    if part is None:
        return tensor
    whole = param.new_empty_strided(param.shape, part.strides, dtype=tensor.dtype)
    return part.of(whole.copy_(tensor))


class ChangedError(Exception):
    """A parameter has changed since its states were made."""


def segment(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, Any],
    names: tuple[str, ...],
    group: Mapping[str, Any],
    stream: int,
    dtype: torch.dtype,
    first: int = 0,
) -> list[int]:
    """A parameter's segment as integers: struct Segment of csrc/core/optim/segment.h.

    Args:
        param: the parameter, or a part of it.
        grad: the gradient of the same elements.
        state: their state.
        names: the states' names, in the order of the rule's arguments.
        group: the group's options.
        stream: the number of the parameter's stream of random bits.
        dtype: the states' type.
        first: the first element of a part.

    Raises:
        ChangedError: the parameter is not dense, or a state is missing or has the wrong device,
            shape, strides or type.
        ValueError: parameter, gradient or a state has lost its memory.
    """
    # This runs for hundreds of parameters in every step, so it is kept fast.
    shape, stride, count = param.shape, param.stride(), param.numel()
    step = state["step"]
    if step.get_device() != param.get_device() or step.dtype != torch.float32:
        raise ChangedError
    # Without states there are no dense strides to compare with.
    if not names and not param.is_contiguous() and dense_strides(param) != stride:
        raise ChangedError
    words = [_address("parameter", param), _address("gradient", grad), 0, 0, 0, 0, 0, 0, 0]
    words += [_address("step", step), count, first, stream, 0]
    kinds = _KINDS[param.dtype] | _KINDS[grad.dtype] << 8
    for place, name in enumerate(names, 3):
        tensor = state.get(place_of(name, dtype))
        if tensor is None or not _fits(tensor, dtype, shape, stride):
            raise ChangedError
        words[place] = _address(name, tensor)
        kinds |= _KINDS[dtype] << 8 * place
        if dtype == torch.uint8:
            scales = state[scale_name(name)]
            if scales.numel() * BLOCK < count:
                raise ChangedError
            words[place + 3] = _address(scale_name(name), scales)
    master = master_beside(param, group["master_weights"])
    for option, (name, kind, dtype, beside) in _MASTER_KINDS.items():
        tensor = state.get(name)
        if (tensor is not None) != (option == master):
            raise ChangedError
        if tensor is not None:
            if param.dtype not in beside or not _fits(tensor, dtype, shape, stride):
                raise ChangedError
            words[2] = _address(name, tensor)
            kinds |= kind
    words[13] = kinds
    return words


def _address(name: str, tensor: torch.Tensor) -> int:
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} has no memory")
    return address


def _fits(
    tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> bool:
    return tensor.dtype == dtype and tensor.shape == shape and tensor.stride() == stride
