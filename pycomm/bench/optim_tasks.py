"""The tasks of the optimizer benchmark: storage schemes, the bytes of a step, and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import optim
from pycomm.bench.streams import Mix

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    # The class, options, and the number of states that it keeps with them.
    "adamw": (optim.FusedAdamW, {}, 2),
    "adam": (optim.FusedAdam, {}, 2),
    "sgd": (optim.FusedSGD, {"momentum": 0.9}, 1),
    "lion": (optim.FusedLion, {}, 1),
    "lamb": (optim.FusedLAMB, {}, 2),
}
TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
PEERS = ("torch", "deepspeed")
SMALL = (500, 1 << 10, 100 << 10)  # tensors, elements of the smallest and the largest


@dataclass(frozen=True)
class OptimizerSettings:
    """A whole run, as asked for; see ``python -m pycomm.bench optimizer -h``."""

    name: str
    schemes: tuple[str, ...]
    count: int
    small: bool
    full: bool
    peers: tuple[str, ...]
    device: str
    threads: int
    iters: int | None
    json: str | None
    command: str


@dataclass(frozen=True)
class Scheme:
    """How parameters, gradients and states are stored."""

    dtype: torch.dtype
    options: dict[str, Any]
    master_bytes: int
    state_bytes: float

    def mix(self, name: str, count: int, full: bool) -> Mix:
        """Bytes that a step must read and write."""
        item, states = self.dtype.itemsize, OPTIMIZERS[name][2] * self.state_bytes
        weights = 4 if self.master_bytes == 4 else item + self.master_bytes
        read = item + weights + states
        read += read if name == "lamb" else 0  # a pass for the norms
        read += item if full else 0
        write = item + self.master_bytes + states
        return Mix(int(read * count), int(write * count))


BF16 = torch.bfloat16
REMAINDER = {"master_weights": "remainder"}
SCHEMES = {
    "fp32": Scheme(torch.float32, {}, 0, 4),
    "fp32_8bit": Scheme(torch.float32, {"states": "8bit"}, 0, 1 + 4 / 256),
    "bf16_master": Scheme(BF16, {"master_weights": "fp32"}, 4, 4),
    "bf16_remainder": Scheme(BF16, REMAINDER, 2, 4),
    "bf16_remainder_bf16": Scheme(BF16, {**REMAINDER, "states": "bf16"}, 2, 2),
    "bf16_remainder_8bit": Scheme(BF16, {**REMAINDER, "states": "8bit"}, 2, 1 + 4 / 256),
    "bf16": Scheme(BF16, {"states": "bf16"}, 0, 2),
    "bf16_stochastic": Scheme(BF16, {"states": "bf16", "stochastic_rounding": True}, 0, 2),
}


def make_params(settings: OptimizerSettings, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Makes parameters with random gradients."""
    sizes = [settings.count]
    if settings.small:
        tensors, least, most = SMALL
        generator = torch.Generator().manual_seed(0)
        powers = torch.rand(tensors, generator=generator, dtype=torch.float64)
        sizes = (least * (most / least) ** powers).long().tolist()
    params = []
    generator = torch.Generator(settings.device).manual_seed(0)
    for size in sizes:
        values, grad = (
            torch.randn(size, generator=generator, device=settings.device) for _ in range(2)
        )
        params.append(torch.nn.Parameter(values.to(dtype)))
        params[-1].grad = grad.to(dtype)
    return params


def our_step(settings: OptimizerSettings, scheme: Scheme, full: bool) -> Callable[[], object]:
    """A step; `full`: with unscaling, the check for infinities and clipping."""
    kind, options, _ = OPTIMIZERS[settings.name]
    more: dict[str, Any] = {"max_norm": 1.0} if full else {}
    optimizer = kind(make_params(settings, scheme.dtype), **options, **scheme.options, **more)
    if full:
        optimizer.grad_scale = torch.tensor(2.0, device=settings.device)  # type: ignore[attr-defined]
    return optimizer.step


def peer_step(peer: str, settings: OptimizerSettings, scheme: Scheme) -> Callable[[], object]:
    """A peer's step on the same parameters; raises ImportError or ValueError without one.

    torch has neither master weights nor 8-bit states: it keeps everything in the parameters' type.
    """
    params = make_params(settings, scheme.dtype)
    if peer == "torch":
        if settings.name not in TORCH:
            raise ValueError(f"torch.optim has no {settings.name}")
        _, options, _ = OPTIMIZERS[settings.name]
        step: Callable[[], object] = TORCH[settings.name](params, fused=True, **options).step
        return step
    if settings.name not in ("adam", "adamw") or settings.device != "cpu":
        raise ValueError(f"DeepSpeed's CPUAdam is no {settings.name} on {settings.device}")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made = DeepSpeedCPUAdam(params, adamw_mode=settings.name == "adamw", fp32_optimizer_states=True)
    deep: Callable[[], object] = made.step
    return deep
