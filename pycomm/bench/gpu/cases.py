"""The cases on a GPU: optimizer steps and codecs, with their bytes, peers and goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import pycomm
from pycomm import optim
from pycomm.bench.codecs import UNIT, CodecTask, make_tasks
from pycomm.bench.optimizers import (
    OPTIMIZERS,
    SCHEMES,
    OptimizerBenchSettings,
    make_params,
    make_sizes,
    our_step,
    peer_step,
)
from pycomm.bench.peers import TORCH_RULES
from pycomm.bench.report import GIB, MIB

Call = Callable[[], object]
RANKS = 4  # in all-reduces, and in the sum of encoded gradients
TOPK = pycomm.TopK(density=0.001)
MAX_NORM = 1.0

# The rows of optimizers, with pycomm.bench's names of their storage.
STEPS = {
    "adamw_fp32": "fp32",
    "adamw_bf16_remainder": "bf16_remainder",
    "adamw_bf16_remainder_bf16_states": "bf16_remainder_bf16",
    "adamw_8bit_states": "bf16_remainder_8bit",
}
# Bytes of the data of steps and codecs, and the suffixes of the rows' names.
STEP_SIZES = {256 * MIB: "_256MiB", 2 * GIB: ""}
CODEC_SIZES = {256 * MIB: "_256MiB", GIB: ""}
# Every rule's storage, besides what `STEPS` has of AdamW, and the bytes of its data.
RULE_SCHEMES = ("fp32", "fp16_master", "bf16_master", "bf16_remainder")
RULE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Goal:
    """A bound for one of a row's figures.

    Attributes:
        figure: ``share``, ``time_us``, ``over`` or ``peer_ratio``.
        limit: the bound.
        at_least: True if it is a lower bound.
    """

    figure: str
    limit: float
    at_least: bool = True

    def reached(self, value: float | None) -> bool:
        """True if the figure keeps the bound."""
        if value is None:
            raise ValueError(f"{self.figure} has not been measured")
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {self.limit:g}"


GOALS = {
    "adamw_fp32": (Goal("share", 0.9),),
    "adamw_bf16_remainder": (Goal("share", 0.9),),
    "adamw_bf16_remainder_bf16_states": (Goal("share", 0.9),),
    "adamw_8bit_states": (Goal("share", 0.8),),
    **{f"{name}_full": (Goal("over", 1.15, at_least=False),) for name in STEPS},
    "adamw_fp32_scaler": (Goal("peer_ratio", 1.5),),
    "adamw_bf16_remainder_scaler": (Goal("peer_ratio", 1.5),),
    "int8_encode": (Goal("share", 0.85),),
    "int8_decode_add": (Goal("share", 0.85),),
    "topk_select": (Goal("peer_ratio", 16), Goal("share", 0.7)),
    "all_reduce_loopback": (Goal("share", 0.8),),
    "all_reduce_1KiB": (Goal("time_us", 6, at_least=False),),
    "all_reduce_1KiB_replay": (Goal("time_us", 6, at_least=False),),
    "int8_all_reduce_loopback": (Goal("over", 1.4, at_least=False),),
}


@dataclass(frozen=True)
class KernelCase:
    """A case to time, which becomes a row.

    Attributes:
        stem: the row's name without suffix, under which goals are listed.
        data_bytes: bytes of its tensors.
        moved_bytes: bytes that it must read from and write to device memory.
        call: runs the case `repeats` times.
        suffix: of the row's name.
        base: the stem of the case with whose time this one's is compared.
        peer_name: the name of `peer`, another way to compute the same.
        wrong: returns the number of wrong elements.
    """

    stem: str
    data_bytes: int
    moved_bytes: int
    call: Call
    repeats: int = 1
    suffix: str = ""
    base: str | None = None
    peer_name: str | None = None
    peer: Call | None = None
    wrong: Callable[[], int] | None = None

    @property
    def name(self) -> str:
        """The name of the row."""
        return self.stem + self.suffix

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of the row."""
        return GOALS.get(self.stem, ())


@contextmanager
def step_cases(stem: str, nbytes: int, suffix: str, device: str) -> Iterator[list[KernelCase]]:
    """A step; a step with unscaling, check and clipping; the second one with a GradScaler."""
    scheme = SCHEMES[STEPS[stem]]
    held = 2 * scheme.dtype.itemsize + scheme.master_bytes + 2 * scheme.state_bytes
    count = int(nbytes / held) // UNIT * UNIT
    settings = OptimizerBenchSettings(name="adamw", count=count, device=device)
    plain, full = (scheme.mix("adamw", settings.count, full).total for full in (False, True))
    with_masters = STEPS[stem] == "bf16_remainder"
    peer: Call
    if with_masters:
        peer_name, peer = "torch, fp32 masters", TorchStep(settings, scheme.dtype).step
    else:
        peer_name = "torch" if scheme.dtype == torch.float32 else "torch, all bf16"
        peer = peer_step("torch", settings, scheme)
    step = KernelCase(
        stem, int(held * settings.count), plain, our_step(settings, scheme, full=False),
        suffix=suffix, peer_name=peer_name, peer=peer,
    )  # fmt: skip
    alone = replace(step, peer_name=None, peer=None)
    cases = [
        step,
        replace(alone, stem=f"{stem}_full", moved_bytes=full, base=stem,
                call=our_step(settings, scheme, full=True)),
    ]  # fmt: skip
    if with_masters or scheme.dtype == torch.float32:  # where torch has the same precision
        ours = optim.FusedAdamW(
            make_params(settings, scheme.dtype), max_norm=MAX_NORM, **scheme.options
        )
        cases.append(
            replace(alone, stem=f"{stem}_scaler", moved_bytes=full, base=stem,
                    call=scaled(optim.GradScaler(device, init_scale=1.0), ours, lambda: None),
                    peer_name=f"{peer_name}, GradScaler, clip_grad_norm_",
                    peer=TorchStep(settings, scheme.dtype).scaled_step())
        )  # fmt: skip
    yield cases


@contextmanager
def rule_cases(rule: str, nbytes: int, device: str) -> Iterator[list[KernelCase]]:
    """A step of a rule with each storage, beside torch's of the same parameters, if it has one."""
    states, cases = OPTIMIZERS[rule][2], []
    for name in RULE_SCHEMES:
        if f"{rule}_{name}" in STEPS:
            continue
        scheme = SCHEMES[name]
        held = 2 * scheme.dtype.itemsize + scheme.master_bytes + states * scheme.state_bytes
        count = int(nbytes / held) // UNIT * UNIT
        settings = OptimizerBenchSettings(name=rule, count=count, device=device)
        peer = peer_step("torch", settings, scheme) if rule in TORCH_RULES else None
        cases.append(
            KernelCase(
                f"{rule}_{name}", int(held * count), scheme.mix(rule, count, False).total,
                our_step(settings, scheme, full=False), suffix="_256MiB", peer=peer,
                peer_name=peer and f"torch, all {scheme.dtype}".replace("torch.", ""),
            )
        )  # fmt: skip
    yield cases


class TorchStep:
    """torch's fused AdamW on fp32 weights: the parameters, or masters of 16-bit ones."""

    def __init__(self, settings: OptimizerBenchSettings, dtype: torch.dtype) -> None:
        self._params = make_params(settings, dtype)
        self._masters = self._params
        if dtype != torch.float32:
            self._masters = [torch.nn.Parameter(param.detach().float()) for param in self._params]
        self._device = settings.device
        self._optimizer = torch.optim.AdamW(self._masters, fused=True)

    def step(self) -> None:
        """Converts gradients to fp32, steps, and converts parameters from fp32."""
        self._take_gradients()
        self._optimizer.step()
        self._give_weights()

    def scaled_step(self) -> Call:
        """A step with unscaling, check and clipping."""
        scaler = torch.amp.GradScaler(self._device, init_scale=1.0)

        def prepare() -> None:
            self._take_gradients()
            scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)

        step = scaled(scaler, self._optimizer, prepare)

        def call() -> None:
            step()
            self._give_weights()

        return call

    def _take_gradients(self) -> None:
        for master, param in zip(self._masters, self._params, strict=True):
            if master is not param:
                assert param.grad is not None
                master.grad = param.grad.float()

    @torch.no_grad()
    def _give_weights(self) -> None:
        for master, param in zip(self._masters, self._params, strict=True):
            if master is not param:
                param.copy_(master)


def scaled(scaler: Any, optimizer: torch.optim.Optimizer, prepare: Call) -> Call:
    """A step with a scaler; its scale of 1 does not change gradients."""
    scaler.scale(torch.ones((), device=scaler._device))  # makes the scale

    def step() -> None:
        prepare()
        scaler.step(optimizer)
        scaler.update()

    return step


def codec_case(stem: str, task: CodecTask, nbytes: int, suffix: str, peer_name: str) -> KernelCase:
    """An operation of a codec beside torch's."""
    return KernelCase(
        stem, nbytes, task.mix.total, task.contestants["pycomm"], suffix=suffix,
        peer_name=peer_name, peer=task.contestants["torch"], wrong=task.count_wrong,
    )  # fmt: skip


@contextmanager
def int8_cases(nbytes: int, suffix: str, device: str) -> Iterator[list[KernelCase]]:
    """Encoding, decoding, and adding up the peers' encoded gradients."""
    codec = pycomm.Int8()
    x = torch.randn(nbytes // 4, device=device)
    task = {task.name: task for task in make_tasks(codec, x)}
    wires = [codec.encode(torch.randn_like(x)) for _ in range(RANKS)]
    total = torch.zeros_like(x)

    def add_all() -> None:
        for wire in wires:
            codec.decode(wire, total.numel(), total, add=True)

    def add_all_by_torch() -> None:
        for _ in wires:
            task["decode_add"].contestants["torch"]()

    yield [
        codec_case(f"int8_{name}", task[name], task[name].mix.total, suffix,
                   f"torch, {task[name].torch_way}")
        for name in ("encode", "decode")
    ] + [
        KernelCase(
            "int8_decode_add", x.nbytes + sum(wire.nbytes for wire in wires),
            RANKS * task["decode_add"].mix.total, add_all, suffix=suffix,
            peer_name="torch, dequantise and add", peer=add_all_by_torch,
            wrong=task["decode_add"].count_wrong,
        )
    ]  # fmt: skip


@contextmanager
def stream_cases(nbytes: int, suffix: str, device: str) -> Iterator[list[KernelCase]]:
    """Reading and writing alone, the least that a kernel with such a mix can take."""
    x = torch.randn(nbytes // 4, device=device)
    total = torch.zeros((), device=device)
    yield [
        KernelCase("read", x.nbytes, x.nbytes, lambda: torch.sum(x, 0, out=total), suffix=suffix),
        KernelCase("write", x.nbytes, x.nbytes, x.zero_, suffix=suffix),
    ]


@contextmanager
def small_tensor_cases(device: str) -> Iterator[list[KernelCase]]:
    """A step of 500 small tensors."""
    scheme = SCHEMES["fp32"]
    settings = OptimizerBenchSettings(name="adamw", small=True, device=device)
    count = sum(make_sizes(settings))
    moved = scheme.mix("adamw", count, False).total
    yield [
        KernelCase(
            "adamw_fp32_500_tensors", 16 * count, moved, our_step(settings, scheme, full=False),
            peer_name="torch", peer=peer_step("torch", settings, scheme),
        )
    ]  # fmt: skip


@contextmanager
def extreme_cases(nbytes: int, suffix: str, device: str) -> Iterator[list[KernelCase]]:
    """Codecs on zeros, and on gradients with few elements that are not zero."""
    zeros = torch.zeros(nbytes // 4, device=device)
    sparse = zeros.clone()
    sparse[::5000] = 1.5
    made = []
    for what, x in {"zeros": zeros, "sparse": sparse}.items():
        for codec, name in ((pycomm.Int8(), "int8_encode"), (TOPK, "topk_select")):
            operation = name.rpartition("_")[2]
            (task,) = (task for task in make_tasks(codec, x) if task.name == operation)
            made.append(
                KernelCase(
                    f"{name}_{what}",
                    x.nbytes,
                    task.mix.total,
                    task.contestants["pycomm"],
                    suffix=suffix,
                )
            )
    yield made


@contextmanager
def topk_cases(nbytes: int, suffix: str, device: str) -> Iterator[list[KernelCase]]:
    """Selecting, which must read everything once, and encoding, which selects."""
    x = torch.randn(nbytes // 4, device=device)
    task = {task.name: task for task in make_tasks(TOPK, x)}
    yield [
        codec_case(f"topk_{name}", task[name], x.nbytes, suffix, "torch.topk")
        for name in ("select", "encode")
    ]
