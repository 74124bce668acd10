"""DDP models with pycomm's hooks: inputs, results, and expected results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import compressing
import golden
import golden_compression as reference
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks

SHAPES = {
    "wide": (280, 250),  # more than one of top-k's chunks, and more than one owner
    "square": (66, 66),
    "small": (50, 50),  # dense by default, as are the next two
    "line": (5000,),
    "bias": (7,),
}
COMPRESSIONS = {
    "dense": None,
    "int8": pycomm.Int8(),
    "stochastic": pycomm.Int8(512, "stochastic", seed=9),
    "topk": pycomm.TopK(0.02),
    "momentum": pycomm.TopK(0.05, values=torch.bfloat16, momentum=0.5),
}
LAYOUTS = {
    "one bucket": {},
    "tiny buckets": {"bucket_cap_mb": 0.001},
    "some buckets": {"bucket_cap_mb": 0.05},
    "static": {"static_graph": True, "bucket_cap_mb": 0.001},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02},
}


class Given(nn.Module):
    """A model with its gradients as inputs; parameters that are not named are unused."""

    def __init__(self, dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = (dtypes or {}).get(name, torch.float32)
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [(p * gradients[n]).sum() for n, p in self.named_parameters() if n in gradients]
        return torch.stack([part.float() for part in parts]).sum()


def gradients(
    model: nn.Module, rank: int, step: int, skip: Iterable[str] = ()
) -> dict[str, torch.Tensor]:
    """A rank's gradients for :class:`Given`."""
    return {
        name: compressing.gradient(p.dtype, p.numel(), rank, 10 * step + i).view(p.shape)
        for i, (name, p) in enumerate(unprefixed(model).items())
        if name not in skip
    }


def unprefixed(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that the user's own module gives them."""
    prefixes = re.compile(r"^(module\.|_orig_mod\.)+")
    return {prefixes.sub("", name): parameter for name, parameter in model.named_parameters()}


def network() -> nn.Sequential:
    """Something to train in earnest."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 200), nn.GELU(), nn.LayerNorm(200), nn.Linear(200, 30))


def batch(rank: int, step: int) -> torch.Tensor:
    """A rank's input for :func:`network`."""
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def first_elements(model: nn.Module) -> dict[str, int]:
    """Each parameter's first index in the whole model, a multiple of any block."""
    sizes = {name: -(-p.numel() // 4096) * 4096 for name, p in unprefixed(model).items()}
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))


def sent_dense(name: str, parameter: torch.Tensor) -> bool:
    """True if hooks do not compress a parameter by default."""
    del name
    return parameter.ndim <= 1 or parameter.numel() < 4096


def make_state(
    compression: pycomm.Compression | None, params: Any = None, **options: Any
) -> tuple[hooks.CommState, Callable[..., Any]]:
    """The state and the hook for it."""
    if compression is None:
        return hooks.AllReduceState(**options), hooks.all_reduce_hook
    if isinstance(compression, pycomm.Int8):
        kind = {name: getattr(compression, name) for name in ("block", "rounding", "seed")}
        return hooks.Int8State(params, **kind, **options), hooks.int8_hook
    kind = {name: getattr(compression, name) for name in ("density", "values", "momentum")}
    return hooks.TopKState(params, **kind, **options), hooks.topk_hook


@dataclass
class Step:
    """One rank's tensors in a step."""

    local: dict[str, torch.Tensor] = field(default_factory=dict)  # as the buckets had it
    result: dict[str, torch.Tensor | None] = field(default_factory=dict)
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    buckets: list[list[str]] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)  # elements, as the model counts them
    scale: float = 1.0


class Watched:
    """A DDP model with one of pycomm's hooks, which records gradients and results."""

    def __init__(
        self,
        module: nn.Module,
        compression: pycomm.Compression | None,
        *,
        feedback: bool = True,
        layout: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        wrapped = isinstance(module, DistributedDataParallel)
        self.model = module if wrapped else DistributedDataParallel(module, **(layout or {}))
        params = self.model.named_parameters() if feedback else None
        self.feedback = feedback and compression is not None
        self.state, self._hook = make_state(compression, params, **options)
        self.exclude = options.get("exclude") or sent_dense
        self._names = {id(p): name for name, p in unprefixed(self.model).items()}
        self.begin()
        self.model.register_comm_hook(self.state, self.hook)

    def hook(self, state, bucket):  # DDP refuses annotations that are text
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        self.seen.buckets.append(names)
        for name, gradient in zip(names, bucket.gradients(), strict=True):
            self.seen.local[name] = gradient.clone()
        future = self._hook(state, bucket)
        self.exchanges.append((bucket.buffer(), future))
        return future

    def wrap_anew(self, layout: dict[str, Any]) -> None:
        """Goes on under another DistributedDataParallel, with the same state."""
        module = self.model.module
        del self.model  # as long as it lives it listens to the parameters
        self.model = DistributedDataParallel(module, **layout)
        self.model.register_comm_hook(self.state, self.hook)

    def begin(self, scale: float = 1.0) -> None:
        """Forgets the last step."""
        self.seen = Step(scale=scale)
        if self.feedback:
            self.seen.first = first_elements(self.model)
        self.exchanges: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def end(self) -> Step:
        """The step, once backward is through."""
        for name, parameter in unprefixed(self.model).items():
            grad = parameter.grad
            self.seen.result[name] = None if grad is None else grad.clone()
        self.seen.residuals = self.residuals()
        return self.seen

    def backward(self, loss: torch.Tensor, scale: float = 1.0) -> Step:
        """One exchange."""
        self.begin(scale)
        loss.backward()
        return self.end()

    def residuals(self) -> dict[str, torch.Tensor]:
        return {
            name: self.state.residual(name).clone()
            for name, parameter in unprefixed(self.model).items()
            if self.feedback and not self.exclude(name, parameter)
        }

    def run(self, rank: int, steps: Iterable[int], skip: Iterable[str] = ()) -> list[Step]:
        """Steps of :class:`Given`."""
        seen = []
        for step in steps:
            self.model.zero_grad()
            seen.append(self.backward(self.model(gradients(self.model, rank, step, skip))))
        return seen


class Reference:
    """The expected tensors of every rank, by parameter, from the golden models alone."""

    def __init__(
        self,
        size: int,
        compression: pycomm.Compression | None,
        *,
        feedback: bool = True,
        exclude: Callable[[str, torch.Tensor], bool] = sent_dense,
        warmup_steps: int = 0,
    ) -> None:
        self.size, self.compression, self.exclude = size, compression, exclude
        self.feedback = feedback and compression is not None
        self.warmup_steps = warmup_steps
        self.steps = 0
        self.residuals: dict[str, list[np.ndarray]] = {}
        self.velocities: dict[str, list[np.ndarray]] = {}

    def check(self, runs: list[list[Step]]) -> None:
        """Compares the ranks' steps, bit for bit."""
        for steps in zip(*runs, strict=True):
            if all(x.isfinite().all() for step in steps for x in step.local.values()):
                for name in steps[0].local:
                    self._check_parameter(name, steps)
            else:
                self._check_overflow(steps)
            self.steps += 1

    def _check_overflow(self, steps: tuple[Step, ...]) -> None:
        """Checks that every rank sees the overflow and has unchanged residuals."""
        for rank, step in enumerate(steps):
            assert not all(result.isfinite().all() for result in step.result.values())
            for name, residual in step.residuals.items():
                kept = self._kept(self.residuals, name, residual.numel())[rank]
                where = f"residual of {name}, overflow in step {self.steps}, rank {rank}"
                compressing.compare(where, residual.flatten(), torch.from_numpy(kept))

    def _check_parameter(self, name: str, steps: tuple[Step, ...]) -> None:
        inputs = [step.local[name] for step in steps]
        unused = not any(x.any() for x in inputs)
        result = torch.zeros_like(inputs[0]) if unused else self._mean(name, inputs, steps[0])
        for rank, step in enumerate(steps):
            where = f"{name}, step {self.steps}, rank {rank} of {self.size}"
            got = step.result[name]
            if not (unused and got is None):
                compressing.compare(f"gradient of {where}", got.flatten(), result.flatten())
            if self.feedback and not self.exclude(name, inputs[0]):
                kept = self._kept(self.residuals, name, inputs[0].numel())[rank]
                residual = step.residuals[name]
                assert residual.shape == inputs[0].shape, where
                compressing.compare(
                    f"residual of {where}", residual.flatten(), torch.from_numpy(kept)
                )

    def _mean(self, name: str, inputs: list[torch.Tensor], like: Step) -> torch.Tensor:
        compressed = self.compression is not None and self.steps >= self.warmup_steps
        flat = [x.flatten() for x in inputs]
        if not compressed or self.exclude(name, inputs[0]):
            return golden.in_rank_order(flat, "avg")
        scale = np.float32(like.scale)
        state = [
            [array * scale for array in self._kept(kept, name, len(flat[0]))]
            for kept in (self.residuals, self.velocities)
        ]
        result = self._compressed(flat, *state, like.first.get(name, 0))
        for kept, arrays in zip((self.residuals, self.velocities), state, strict=True):
            kept[name] = [array / scale for array in arrays]
        return result

    def _compressed(
        self,
        inputs: list[torch.Tensor],
        residuals: list[np.ndarray],
        velocities: list[np.ndarray],
        first: int,
    ) -> torch.Tensor:
        compression, fed_back = self.compression, residuals if self.feedback else None
        if not isinstance(compression, pycomm.TopK):
            codec = compressing.codec_of(compression, inputs[0].dtype, self.steps)
            return reference.two_shot(reference.Reduction(inputs, codec, "avg", fed_back, first))
        k = compressing.sent_elements(compression, len(inputs[0]))
        masked = velocities if compression.momentum else None
        options = (fed_back, masked, compression.momentum, first)
        return reference.top_k(inputs, k, compression.values, "avg", *options)

    def _kept(self, what: dict[str, list[np.ndarray]], name: str, count: int) -> list[np.ndarray]:
        zeros = [np.zeros(count, np.float32) for _ in range(self.size)]
        return what.setdefault(name, zeros)
