"""Every kind of kernel on a few thousand elements, for compute-sanitizer; see benchmarks/gpu.sh."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

import pycomm
from pycomm._training.shards import Shards
from pycomm.bench.optimizers import OPTIMIZERS, SCHEMES

COUNT = 20_003  # several blocks of a codec, and a tail
TIMEOUT_S = 20.0  # a sanitizer that keeps ranks from meeting ends in an error
COMPRESSIONS = (
    pycomm.Int8(),
    pycomm.Int8(block=512, rounding="stochastic"),
    pycomm.Cast(),
    pycomm.TopK(0.01),
)


def all_reduces(group: pycomm.Group, device: str) -> None:
    """Every algorithm, with packets and without."""
    for dtype in (torch.float32, torch.bfloat16):
        for algorithm in ("one_shot", "two_shot", "ring", "tree"):
            for count in (100, COUNT):  # the smaller one travels in packets
                tensor = torch.ones(count, dtype=dtype, device=device)
                pycomm.all_reduce(tensor, algorithm=algorithm, group=group)


def other_collectives(group: pycomm.Group, device: str) -> None:
    """The other collectives."""
    block = torch.ones(COUNT, device=device)
    whole = torch.ones(group.size * COUNT, device=device)
    pycomm.reduce_scatter(block, whole, group=group)
    pycomm.all_gather(whole, block, group=group)
    pycomm.broadcast(block, group=group)
    pycomm.barrier(group=group)


def compressed(group: pycomm.Group, device: str) -> None:
    """Every codec with every algorithm that supports it."""
    for compression in COMPRESSIONS:
        dense = not isinstance(compression, pycomm.TopK)
        for algorithm in ("two_shot", "ring", "tree") if dense else ("two_shot",):
            tensor = torch.linspace(-1, 1, COUNT, device=device)
            residual = torch.zeros(COUNT, device=device)
            pycomm.compressed_all_reduce(
                tensor, compression, residual=residual, algorithm=algorithm, group=group
            )


def codecs(device: str) -> None:
    """Encoding, decoding and selecting alone."""
    x = torch.linspace(-1, 1, COUNT, device=device)
    for compression in COMPRESSIONS:
        wire = compression.encode(x)
        compression.decode(wire, COUNT, torch.zeros_like(x), add=True)
        compression.decode(wire, COUNT)
    pycomm.TopK(0.01).select(x)


def steps(device: str) -> None:
    """Every optimizer with every storage."""
    for kind, options, _ in OPTIMIZERS.values():
        for scheme in SCHEMES.values():
            params = [
                torch.nn.Parameter(torch.ones(count, dtype=scheme.dtype, device=device))
                for count in (100, COUNT)
            ]
            more: dict[str, Any] = {"max_norm": 1.0, **options, **scheme.options}
            optimizer = kind(params, **more)
            optimizer.grad_scale = torch.tensor(2.0, device=device)  # type: ignore[attr-defined]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()


def sharded(group: pycomm.Group, device: str) -> None:
    """Sharded steps of every optimizer with every storage."""
    for kind, options, _ in OPTIMIZERS.values():
        for scheme in SCHEMES.values():
            params = [
                torch.nn.Parameter(torch.ones(count, dtype=scheme.dtype, device=device))
                for count in (100, COUNT)
            ]
            shards = Shards(params, group, None, math.inf)
            shards.assign([params])
            more: dict[str, Any] = {"max_norm": 1.0, **options, **scheme.options}
            optimizer = kind(params, **more)
            for param in params:
                place = shards.layout[param]
                view = place.of(place.piece.gradients, param).fill_(group.rank)
                place.piece.give(param, view)
            shards.note_backward(params)
            optimizer.step()


def run(device: str) -> None:
    """Runs everything, with zero copy and staged."""
    for staged in (False, True):
        with pycomm.LocalWorld(2, TIMEOUT_S, max_blocks=2, _stage_always=staged) as world:
            for body in (all_reduces, other_collectives, compressed):
                world.run(body, device)
            if not staged:  # it needs zero copy
                world.run(sharded, device)
    codecs(device)
    steps(device)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device")
    run("cuda")
    torch.cuda.synchronize()
