"""Options of fused optimizers, and checks of options and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import torch

from pycomm._inputs import PLAIN
from pycomm._runtime.torch_private import is_traceable_wrapper_subclass
from pycomm.optim import _storage

Group = dict[str, Any]


class Options(TypedDict, total=False):
    """Options that every fused optimizer accepts besides its own arguments.

    Attributes:
        master_weights: for 16-bit parameters. ``"fp32"`` keeps fp32 weights beside them.
            ``"remainder"`` keeps the 16 bits of the fp32 weight that a bf16 parameter lacks, which
            is as exact. None (the default) keeps only the parameters. An fp32 parameter needs
            neither, until the model is converted to 16 bits; ``"remainder"`` raises ValueError if
            all parameters are fp32.
        states: ``"fp32"`` (the default), ``"bf16"``, ``"fp16"`` (second moments as their square
            roots) or ``"8bit"`` (blocks of 256; tensors below 4,096 elements keep fp32).
        stochastic_rounding: round bf16 parameters without master weights stochastically. States in
            less than fp32 are always rounded stochastically.
        seed: the seed of the random bits, which depend only on the seed, the parameter, the element
            and the step.
        max_norm: clips the norm of all gradients together, as
            :func:`torch.nn.utils.clip_grad_norm_` does, but does not write the gradients.
        offload: ``"pinned"`` keeps states and master weights of CUDA parameters in pinned host
            memory. Each step passes them through 96 MiB of the device, or is done on the host,
            whichever is faster; the bits stay the same. It changes nothing for parameters on the
            CPU. Not for LAMB, sharded parameters, DTensors and captured steps.
    """

    master_weights: str | None
    states: str
    stochastic_rounding: bool
    seed: int
    max_norm: float | None
    offload: str | None


# The options of a group. A checkpoint does not change them; its states are converted to fit.
DEFAULTS = {"master_weights": None, "states": "fp32", "stochastic_rounding": False, "seed": 0}


def with_defaults(optimizer: str, options: Options) -> tuple[Group, float | None]:
    """The options of groups with defaults filled in, and `max_norm`."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"{optimizer}() got an unexpected keyword argument {name!r}")
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be an integer from 0 to 2^64 - 1, got {seed!r}")
    max_norm = options.get("max_norm")
    check_max_norm(max_norm)
    return {name: options.get(name, default) for name, default in DEFAULTS.items()}, max_norm


def remove(groups: Iterable[Group]) -> None:
    """Removes pycomm's options from the groups of a checkpoint."""
    for group in groups:
        for option in DEFAULTS:
            group.pop(option, None)  # a hook may have removed it


def check_max_norm(max_norm: float | None) -> None:
    """Raises ValueError for bounds that are not positive, which would flip gradients."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")


def check_torch_flags(flags: Group) -> None:
    """Raises ValueError for flags of torch that a fused step does not support."""
    for name, allowed in (("foreach", (None, False)), ("fused", (None, True))):
        if flags.get(name) not in allowed:
            raise ValueError(f"{name}={flags[name]} is not supported: the step is always fused")
    if flags.get("differentiable"):
        raise ValueError("differentiable=True is not supported: the step is fused")


def check_rates(lr: float | torch.Tensor, **rates: float) -> None:
    """Raises ValueError for values that torch's optimizers also refuse."""
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element if it is a tensor, got {lr.numel()}")
    for name, value in {"lr": float(lr), **rates}.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def check_betas(betas: Iterable[float | torch.Tensor]) -> tuple[float, float]:
    """Checks the two betas and returns them as floats."""
    given = tuple(betas)
    if len({isinstance(beta, torch.Tensor) for beta in given}) > 1:
        raise ValueError(f"betas must be two numbers or two tensors, got {given}")
    first, second = map(float, given)
    for beta in (first, second):
        if not 0 <= beta < 1:
            raise ValueError(f"betas must be at least 0 and below 1, got {(first, second)}")
    return first, second


def check_plain(optimizer: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for wrapper subclasses, which store their elements in other tensors."""
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{optimizer} takes plain tensors, got a {type(tensor).__name__}")


def check_param(optimizer: str, param: torch.Tensor) -> None:
    """Raises an error for parameters that a fused step cannot update."""
    shape = f"a parameter of shape {tuple(param.shape)}"
    check_plain(optimizer, param)
    if param.dtype not in _storage.FLOATS:
        raise TypeError(
            f"{optimizer} takes float32, float16 and bfloat16, got {shape} of {param.dtype}"
        )
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{optimizer} runs on the CPU and CUDA, got {shape} on {param.device}")
    if (
        param.layout != torch.strided
        or torch.empty_like(param, device="meta").stride() != param.stride()
    ):
        raise ValueError(
            f"{optimizer} takes dense parameters, got {shape}, stride {param.stride()}"
        )


def check_groups(optimizer: str, groups: Iterable[Group]) -> None:
    """Raises ValueError if a parameter occurs twice or parameters lie on several devices."""
    params = [param for group in groups for param in group["params"]]
    if len(set(params)) < len(params):
        raise ValueError(f"{optimizer} takes each parameter once, got one more than once")
    if params:
        one_device(optimizer, params)


def one_device(optimizer: str, params: Iterable[torch.Tensor]) -> torch.device:
    """The device of all parameters."""
    devices = {param.device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"{optimizer} takes parameters on one device, got {names}: make an optimizer for each"
        )
    return devices.pop()


def check_remainder(group: Group) -> None:
    """Raises ValueError for remainders in a group of fp32 parameters, which need none."""
    dtypes = {param.dtype for param in group["params"]}
    if group["master_weights"] == "remainder" and dtypes == {torch.float32}:
        raise ValueError(
            "master_weights='remainder' completes bfloat16 parameters, got float32 ones, which "
            "need no master weights: leave it out"
        )


def check_options(group: Group, has_states: bool) -> None:
    """Raises ValueError for options that contradict each other or the group's parameters."""
    master, states = group["master_weights"], group["states"]
    dtypes = {param.dtype for param in group["params"]}
    if master not in _storage.MASTERS:
        raise ValueError(f"master_weights must be None, 'fp32' or 'remainder', got {master!r}")
    if master == "remainder" and torch.float16 in dtypes:
        raise ValueError(
            "master_weights='remainder' completes bfloat16 parameters, got float16: use 'fp32'"
        )
    if states not in _storage.STATES:
        raise ValueError(f"states must be one of {', '.join(_storage.STATES)}, got {states!r}")
    if not group["stochastic_rounding"]:
        return
    bare = {dtype for dtype in dtypes if dtype != torch.float32} if master is None else set()
    if torch.float16 in bare:
        raise ValueError("stochastic_rounding=True rounds to bfloat16, got float16 parameters")
    if not bare and not (states != "fp32" and has_states) and dtypes:
        raise ValueError(
            "stochastic_rounding=True has nothing to round: it is for bfloat16 parameters without "
            "master weights and for states in less than fp32"
        )


def usable_grad(optimizer: str, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Checks a gradient; returns it, copied to the parameter's memory format if necessary."""
    if type(param) not in PLAIN or type(grad) not in PLAIN:  # a program may have replaced either
        check_plain(optimizer, param)
        check_plain(optimizer, grad)
    if grad.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not support sparse gradients")
    # Device numbers are quicker to compare than devices.
    if grad.get_device() != param.get_device() or not (grad.is_cpu or grad.is_cuda):
        raise ValueError(
            f"{optimizer} runs on the CPU and CUDA, got a gradient on {grad.device} of a parameter "
            f"on {param.device}"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"{optimizer} takes gradients of their parameters' shapes, got a gradient of shape "
            f"{tuple(grad.shape)} of a parameter of shape {tuple(param.shape)}"
        )
    if grad.dtype not in _storage.FLOATS:
        raise TypeError(f"{optimizer} takes floating-point gradients, got {grad.dtype}")
    same = (grad.is_contiguous() and param.is_contiguous()) or grad.stride() == param.stride()
    if same and not grad.is_neg():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
