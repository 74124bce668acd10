"""How weights and states lie in memory, and the words that tell the extension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pycomm import _C
from pycomm._parameters import dense_strides
from pycomm.optim.flat import Buffers, zeros_for

State = dict[str, Any]

BLOCK = 256  # elements of an 8-bit state that share a scale
SMALL = 4096  # tensors with fewer elements keep fp32 where 8 bits are asked for
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STATES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "8bit": torch.uint8}
MASTERS = (None, "fp32", "remainder")
MASTER, REMAINDER = "master_param", "remainder"


# enum class Storage of csrc/core/optimizer.h.
_KINDS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 5}
_MASTER_KINDS = (
    (MASTER, 1 << 16, (torch.float16, torch.bfloat16)),
    (REMAINDER, 4 << 16, (torch.bfloat16,)),
)


def scale_name(name: str) -> str:
    """Where a state in 8 bits keeps the largest magnitudes of its blocks."""
    return f"{name}_absmax"


def place_of(name: str, dtype: torch.dtype) -> str:
    """Under which name a state of a type is kept: second moments in fp16 as their roots."""
    return f"{name}_root" if dtype == torch.float16 and squares(name) else name


def place_in(state: Mapping[str, Any], name: str) -> str:
    """Under which name a state is kept there, if it is."""
    return name if name in state else f"{name}_root"


def wanted_dtype(param: torch.Tensor, states: str) -> torch.dtype:
    """In which type a group's option stores the states of a parameter."""
    if states == "8bit" and param.numel() < SMALL:
        return torch.float32
    return STATES[states]


def buffers_for(param: torch.Tensor, states: str, buffers: Buffers) -> Buffers | None:
    """Where a parameter's states may lie: the few of another type would need buffers as long."""
    return buffers if wanted_dtype(param, states) == STATES[states] else None


def wants_master(param: torch.Tensor, master: str | None) -> bool:
    """Whether a parameter needs weights of higher precision beside it."""
    return master is not None and param.dtype != torch.float32


def make_state(
    param: torch.Tensor, name: str, dtype: torch.dtype, buffers: Buffers | None = None
) -> State:
    """A state of zeros, in an optimizer's buffers where the parameter is flattened."""
    place = place_of(name, dtype)
    state: State = {place: zeros_for(buffers, param, place, dtype)}
    if dtype == torch.uint8:
        blocks = -(-param.numel() // BLOCK)
        state[scale_name(name)] = torch.zeros(blocks, device=param.device)
    return state


def make_master(param: torch.Tensor, master: str, buffers: Buffers | None = None) -> State:
    """Weights of higher precision that equal the parameter."""
    if master == "fp32":
        return {MASTER: zeros_for(buffers, param, MASTER, torch.float32).copy_(param.detach())}
    return {REMAINDER: zeros_for(buffers, param, REMAINDER, torch.int16)}


def to_fp32(state: Mapping[str, Any], name: str) -> torch.Tensor:
    """A state's values."""
    place = place_in(state, name)
    stored: torch.Tensor = state[place]
    if place != name:
        return stored.float().square()
    if stored.dtype != torch.uint8:
        return stored.float()
    codes, scales = stored.cpu(), state[scale_name(name)].cpu()
    values = torch.empty_like(codes, dtype=torch.float32)
    _C.decode_state(
        codes.data_ptr(), scales.data_ptr(), codes.numel(), squares(name), values.data_ptr()
    )
    return values.to(stored.device)


def from_fp32(values: torch.Tensor, name: str, dtype: torch.dtype) -> State:
    """A state with these values."""
    if place_of(name, dtype) != name:
        roots = values.sqrt().to(dtype)
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        return {place_of(name, dtype): roots.masked_fill((values > 0) & (roots == 0), least)}
    if dtype != torch.uint8:
        return {name: values.to(dtype)}
    on_cpu = values.cpu()
    state = make_state(on_cpu, name, dtype)
    codes, scales = state[name], state[scale_name(name)]
    _C.encode_state(
        on_cpu.data_ptr(), on_cpu.numel(), squares(name), codes.data_ptr(), scales.data_ptr()
    )
    return {key: tensor.to(values.device) for key, tensor in state.items()}


def squares(name: str) -> bool:
    """Whether a state holds second moments, which have a code of their own."""
    return name.endswith("_sq")


def joined(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """The weights of a parameter in fp32, with all that is known of them."""
    master: torch.Tensor | None = state.get(MASTER)
    if master is not None:
        return master.detach().float()
    if REMAINDER not in state:
        return param.detach().float()
    low: torch.Tensor = state[REMAINDER].to(torch.int32)
    high = param.detach().view(torch.int16).to(torch.int32) << 16
    sums = (high + low).view(torch.float32)
    return torch.where(sums.isnan(), high.view(torch.float32), sums)


def split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 parameter and its remainder, from fp32 weights."""
    bits = weights.view(torch.int32)
    nan = weights.isnan()
    high = ((bits + 0x8000) >> 16).to(torch.int16).masked_fill(nan, 0x7FC0)
    return high.view(torch.bfloat16), bits.to(torch.int16).masked_fill(nan, 0)


def set_weights(param: torch.Tensor, state: State, master: str, weights: torch.Tensor) -> None:
    """Puts fp32 weights into a parameter and a new tensor beside it."""
    name, dtype = (MASTER, torch.float32) if master == "fp32" else (REMAINDER, torch.int16)
    state[name] = torch.empty_like(param, dtype=dtype)
    write_weights(param, state, weights)


def write_weights(param: torch.Tensor, state: Mapping[str, Any], weights: torch.Tensor) -> None:
    """Writes fp32 weights to a parameter and what it has beside it, where they lie.

    A bf16 parameter with something beside it is rounded as by a step.
    """
    rounded = weights
    if param.dtype == torch.bfloat16 and (MASTER in state or REMAINDER in state):
        rounded, low = split(weights)
        if REMAINDER in state:
            state[REMAINDER].copy_(low)
    if MASTER in state:
        state[MASTER].copy_(weights)
    param.detach().copy_(rounded)


class ChangedError(Exception):
    """A parameter is not what its states were made for."""


def segment(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, Any],
    names: tuple[str, ...],
    stream: int,
) -> list[int]:
    """The words of a parameter: struct Segment of csrc/core/segment.h.

    Raises:
        ChangedError: the parameter is not dense, or states are missing, or not of the parameter's
            device, type, shape and order.
        ValueError: parameter or gradient have lost their memory.
    """
    # Hundreds of parameters go through here in every step.
    shape, stride = param.shape, param.stride()
    if state["step"].get_device() != param.get_device():
        raise ChangedError
    # Without states that are known to be dense, there is nothing that strides could be compared to.
    if not names and not param.is_contiguous() and dense_strides(param) != stride:
        raise ChangedError
    step, count = state["step"].data_ptr(), param.numel()
    words = [param.data_ptr(), grad.data_ptr(), 0, 0, 0, 0, 0, 0, 0, step, count, stream, 0]
    kinds = _KINDS[param.dtype] | _KINDS[grad.dtype] << 8
    for place, name in enumerate(names, 3):
        tensor = state.get(place_in(state, name))
        if tensor is None or tensor.shape != shape or tensor.stride() != stride:
            raise ChangedError
        dtype = tensor.dtype
        words[place] = tensor.data_ptr()
        kinds |= _KINDS[dtype] << 8 * place
        if dtype == torch.uint8:
            words[place + 3] = state[scale_name(name)].data_ptr()
    for name, kind, fits in _MASTER_KINDS:
        if name in state:
            tensor = state[name]
            if param.dtype not in fits or tensor.shape != shape or tensor.stride() != stride:
                raise ChangedError
            words[2] = tensor.data_ptr()
            kinds |= kind
    if count and not (words[0] and words[1]):
        raise ValueError(f"a parameter of shape {tuple(shape)} or its gradient has no memory")
    words[12] = kinds
    return words
