"""How weights and states lie in memory, and the words that tell the extension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pycomm import _C
from pycomm._training.parameters import dense_strides
from pycomm.optim.flat import Buffers, zeros_for

State = dict[str, Any]

BLOCK = 256  # elements of an 8-bit state that share a scale
SMALL = 4096  # tensors with fewer elements keep fp32 where 8 bits are asked for
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STATES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "8bit": torch.uint8}
MASTERS = (None, "fp32", "remainder")
MASTER, REMAINDER = "master_param", "remainder"


# enum class Storage of csrc/core/optim/optimizer.h.
_KINDS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 5}
_MASTER_KINDS = {
    "fp32": (MASTER, 1 << 16, torch.float32, (torch.float16, torch.bfloat16)),
    "remainder": (REMAINDER, 4 << 16, torch.int16, (torch.bfloat16,)),
}


def scale_name(name: str) -> str:
    """Where a state in 8 bits keeps the largest magnitudes of its blocks."""
    return f"{name}_absmax"


def place_of(name: str, dtype: torch.dtype) -> str:
    """Under which name a state of a type is kept.

    Codes and the roots of second moments are no values: torch.optim must not take them for some.
    """
    if dtype == torch.uint8:
        return f"{name}_code"
    return f"{name}_root" if dtype == torch.float16 and squares(name) else name


def place_in(state: Mapping[str, Any], name: str) -> str:
    """Under which name a state is kept there, if it is."""
    return next((name + end for end in ("", "_root", "_code") if name + end in state), name)


def wanted_dtype(param: torch.Tensor, states: str) -> torch.dtype:
    """In which type a group's option stores the states of a parameter."""
    if states == "8bit" and param.numel() < SMALL:
        return torch.float32
    return STATES[states]


def buffers_for(param: torch.Tensor, states: str, buffers: Buffers) -> Buffers | None:
    """Where a parameter's states may lie: the few of another type would need buffers as long."""
    return buffers if wanted_dtype(param, states) == STATES[states] else None


def master_beside(param: torch.Tensor, master: str | None) -> str | None:
    """What of a group's `master_weights` stands beside a parameter."""
    return master if param.dtype != torch.float32 else None


def blocks_of(param: torch.Tensor) -> int:
    """How many blocks of a parameter's state in 8 bits have a scale."""
    return -(-param.numel() // BLOCK)


def make_state(
    param: torch.Tensor, name: str, dtype: torch.dtype, buffers: Buffers | None = None
) -> State:
    """A state of zeros, in an optimizer's buffers where the parameter is flattened."""
    place = place_of(name, dtype)
    state: State = {place: zeros_for(buffers, param, place, dtype)}
    if dtype == torch.uint8:
        state[scale_name(name)] = torch.zeros(blocks_of(param), device=param.device)
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
    """A state with these values."""
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


def squares(name: str) -> bool:
    """Whether a state holds second moments, which have a code of their own."""
    return name.endswith("_sq")


def holds_weights(state: Mapping[str, Any]) -> bool:
    """Whether there is more of the weights in a state than in the parameter."""
    return MASTER in state or REMAINDER in state


def joined(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """The weights of a parameter in fp32, with all that is known of them.

    A parameter that has become fp32 counts where it is not what they were rounded to.
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
    """Which elements are those weights rounded to a type, whichever way ties go."""
    same = own == weights.to(dtype)
    return same | (own == split(weights)[0]) if dtype == torch.bfloat16 else same


def split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 parameter and its remainder, from fp32 weights."""
    bits = weights.view(torch.int32)
    nan = weights.isnan()
    high = ((bits + 0x8000) >> 16).to(torch.int16).masked_fill(nan, 0x7FC0)
    return high.view(torch.bfloat16), bits.to(torch.int16).masked_fill(nan, 0)


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
    group: Mapping[str, Any],
    stream: int,
) -> list[int]:
    """The words of a parameter: struct Segment of csrc/core/optim/segment.h.

    Raises:
        ChangedError: the parameter is not dense, or states are missing, or not of its device, shape
            and order and of the types that its group asks for.
        ValueError: parameter or gradient have lost their memory.
    """
    # Hundreds of parameters go through here in every step.
    shape, stride, count = param.shape, param.stride(), param.numel()
    step, dtype = state["step"], wanted_dtype(param, group["states"])
    if step.get_device() != param.get_device() or step.dtype != torch.float32:
        raise ChangedError
    # Without states that are known to be dense, there is nothing that strides could be compared to.
    if not names and not param.is_contiguous() and dense_strides(param) != stride:
        raise ChangedError
    words = [param.data_ptr(), grad.data_ptr(), 0, 0, 0, 0, 0, 0, 0]
    words += [step.data_ptr(), count, stream, 0]
    kinds = _KINDS[param.dtype] | _KINDS[grad.dtype] << 8
    for place, name in enumerate(names, 3):
        tensor = state.get(place_of(name, dtype))
        if tensor is None or not _fits(tensor, dtype, shape, stride):
            raise ChangedError
        words[place] = tensor.data_ptr()
        kinds |= _KINDS[dtype] << 8 * place
        if dtype == torch.uint8:
            scales = state[scale_name(name)]
            if scales.numel() * BLOCK < count:
                raise ChangedError
            words[place + 3] = scales.data_ptr()
    master = master_beside(param, group["master_weights"])
    for option, (name, kind, dtype, beside) in _MASTER_KINDS.items():
        tensor = state.get(name)
        if (tensor is not None) != (option == master):
            raise ChangedError
        if tensor is not None:
            if param.dtype not in beside or not _fits(tensor, dtype, shape, stride):
                raise ChangedError
            words[2] = tensor.data_ptr()
            kinds |= kind
    if count and not (words[0] and words[1]):
        raise ValueError(f"a parameter of shape {tuple(shape)} or its gradient has no memory")
    words[12] = kinds
    return words


def _fits(
    tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> bool:
    return tensor.dtype == dtype and tensor.shape == shape and tensor.stride() == stride
