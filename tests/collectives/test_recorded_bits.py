"""The bits of collectives, codecs and steps are those recorded once, on every node and version.

``python tests/collectives/test_recorded_bits.py`` records them anew. Do so only for a change of
bits that is meant, and say why in CHANGELOG.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import pycomm

RECORD = Path(__file__).with_name("recorded_bits.json")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8),
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("sum", "avg", "min", "max", "prod")
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring", "tree")
WORLDS = {"2": (2,), "3": (3,), "5": (5,), "2+1": (2, 1), "2+2": (2, 2)}
COMPRESSIONS = {
    "identity": (pycomm.Identity(), ("two_shot", "ring", "tree")),
    "bf16": (pycomm.Cast(torch.bfloat16), ("two_shot", "ring", "tree")),
    "fp16": (pycomm.Cast(torch.float16), ("two_shot", "ring", "tree")),
    "int8": (pycomm.Int8(), ("two_shot", "ring", "tree")),
    "int8 stochastic": (pycomm.Int8(block=128, rounding="stochastic"), ("two_shot",)),
    "top-k": (pycomm.TopK(density=0.02), ("two_shot",)),
    "top-k int8": (pycomm.TopK(density=0.1, values=torch.int8), ("two_shot",)),
    "top-k momentum": (pycomm.TopK(density=0.02, momentum=0.9), ("two_shot",)),
}
OPTIMIZERS = {
    "adam": lambda p, **more: pycomm.optim.FusedAdam(p, lr=0.01, amsgrad=True, **more),
    "adamw": lambda p, **more: pycomm.optim.FusedAdamW(p, lr=0.01, **more),
    "sgd": lambda p, **more: pycomm.optim.FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True, **more),
    "lion": lambda p, **more: pycomm.optim.FusedLion(p, lr=0.001, **more),
    "lamb": lambda p, **more: pycomm.optim.FusedLAMB(p, lr=0.01, **more),
}
STORAGES = (
    *(
        (torch.float32, {}),
        (torch.float32, {"states": "8bit"}),
        (torch.float32, {"states": "fp16"}),
    ),
    *((torch.bfloat16, {"master_weights": "remainder"}), (torch.bfloat16, {"states": "bf16"})),
    (torch.float16, {"master_weights": "fp32"}),
)


@functools.lru_cache(128)  # ranks, steps and types have the same
def numbers(n: int, seed: int) -> np.ndarray:
    """Numbers from -1 to 1 of many magnitudes, made by integer arithmetic: the same everywhere."""
    x = np.arange(n, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    mantissa = (x >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1
    return np.ldexp(mantissa, -(x & np.uint64(7)).astype(np.int32))


def tensor(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = numbers(n, seed)
    return torch.from_numpy(values if dtype.is_floating_point else np.abs(100 * values)).to(
        dtype, copy=True
    )


class Hash:
    """The hash of tensors' bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            self._hash.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


def collectives(hosts: tuple[int, ...]) -> dict[str, str]:
    hashes = {}
    with pycomm.LocalWorld(sum(hosts), nodes=hosts) as world:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            for algorithm in ALGORITHMS[: 5 if len(hosts) == 1 else 1]:
                hashes[f"all_reduce {algorithm} {name}"] = all_reduces(world, algorithm, dtype)
            hashes[f"other collectives {name}"] = others(world, dtype)
    return hashes


def all_reduces(world: pycomm.LocalWorld, algorithm: str, dtype: torch.dtype) -> str:
    result = Hash()

    def body(group):
        made = []
        for op in OPS:
            for n in (1, 67, 20_001):
                x = tensor(n, dtype, seed=1 + group.rank)
                made.append(pycomm.all_reduce(x, op=op, algorithm=algorithm, group=group))
        return made

    for made in world.run(body):
        result.add(made)
    return str(result)


def others(world: pycomm.LocalWorld, dtype: torch.dtype) -> str:
    result = Hash()

    def body(group):
        x = tensor(5_001 * group.size, dtype, seed=1 + group.rank)
        block, whole = torch.empty(5_001, dtype=dtype), torch.empty_like(x)
        made = [pycomm.reduce_scatter(block, x, op=op, group=group).clone() for op in OPS]
        pycomm.all_gather(whole, block, group=group)
        return [*made, whole, pycomm.broadcast(x, group.size - 1, group=group)]

    for made in world.run(body):
        result.add(made)
    return str(result)


def compressed(hosts: tuple[int, ...]) -> dict[str, str]:
    hashes = {}
    with pycomm.LocalWorld(sum(hosts), nodes=hosts) as world:
        for name, (compression, algorithms) in COMPRESSIONS.items():
            for dtype in FLOATS:
                for algorithm in algorithms[: None if len(hosts) == 1 else 1]:
                    key = f"{name} {algorithm} {str(dtype).removeprefix('torch.')}"
                    hashes[key] = steps(world, compression, algorithm, dtype)
    return hashes


def steps(world, compression, algorithm, dtype) -> str:
    result = Hash()

    def body(group):
        made = []
        for n in (130, 200_003):
            residual = torch.zeros(n)
            velocity = torch.zeros(n) if compression.momentum > 0 else None
            for step in range(3):
                made.append(
                    pycomm.compressed_all_reduce(
                        tensor(n, dtype, seed=group.rank + 100 * step),
                        compression,
                        residual=residual,
                        velocity=velocity,
                        algorithm=algorithm,
                        step=step,
                        group=group,
                    )
                )
            made.append(residual)
        return made

    for made in world.run(body):
        result.add(made)
    return str(result)


def optimizers() -> dict[str, str]:
    hashes = {}
    for name, make in OPTIMIZERS.items():
        for dtype, storage in STORAGES:
            sizes = (3, 1_000, 70_001)
            params = [torch.nn.Parameter(tensor(n, dtype, seed=n)) for n in sizes]
            optimizer, result = make(params, **storage), Hash()
            for step in range(4):
                for param in params:
                    param.grad = tensor(param.numel(), dtype, seed=step)
                optimizer.step()
                result.add(list(params))
            options = " ".join(f"{key}={value}" for key, value in storage.items())
            hashes[f"{name} {str(dtype).removeprefix('torch.')} {options}".rstrip()] = str(result)
    return hashes


def everything() -> dict[str, dict[str, str]]:
    made = {f"collectives {name}": collectives(hosts) for name, hosts in WORLDS.items()}
    made |= {f"compressed {name}": compressed(hosts) for name, hosts in WORLDS.items()}
    return made | {"optimizers": optimizers()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("part", [collectives, compressed])
def test_collectives(part, world):
    assert part(WORLDS[world]) == json.loads(RECORD.read_text())[f"{part.__name__} {world}"]


def test_optimizers():
    assert optimizers() == json.loads(RECORD.read_text())["optimizers"]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(everything(), indent=1) + "\n")
