"""Trains in a loop of one's own: gradients by hand, averaged in 8 bits with error feedback.

.. code-block:: shell

    python examples/custom_loop.py                  # two ranks, as threads of this process
    python examples/custom_loop.py --arrays numpy   # the same without torch's tensors
    python examples/custom_loop.py --device cuda    # torch's tensors on a GPU
    python examples/custom_loop.py --arrays cupy    # CuPy's there, with a CUDA kernel of its own
    torchrun --nproc-per-node 2 examples/custom_loop.py

A network with one hidden layer learns a function of two numbers. All of its weights lie in one
array, and so do their gradients. Each step adds the gradients of several batches, averages them
over the ranks, and goes down the slope. The first steps send gradients in full, as a warm-up. Later
ones send 8 bits per gradient; what the rounding loses stays in `residual`, and is sent later.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy
from devices import add_device, count, device_of

import pycomm

HIDDEN, BATCH, RATE = 64, 256, 0.3
SHAPES = [(2, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
STEP = """
extern "C" __global__ void step(float* weights, const float* gradients, float rate, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) weights[i] -= rate * gradients[i];
}
"""


def views_of(flat: Any) -> list[Any]:
    """The weights of each layer in one array."""
    views, begin = [], 0
    for shape in SHAPES:
        count = int(numpy.prod(shape))
        views.append(flat[begin : begin + count].reshape(shape))
        begin += count
    return views


def add_gradients(library: Any, weights: Any, gradients: Any, x: Any, y: Any) -> Any:
    """Adds the gradients of half the mean squared error over a batch; returns that error."""
    (w1, b1, w2, b2), (g1, c1, g2, c2) = views_of(weights), views_of(gradients)
    hidden = library.tanh(x @ w1 + b1)
    error = (hidden @ w2 + b2 - y) / len(x)
    back = (error @ w2.T) * (1 - hidden * hidden)
    g1 += x.T @ back
    c1 += back.sum(0)
    g2 += hidden.T @ error
    c2 += error.sum(0)
    return (error * error).sum() * len(x) / 2


def stepper(arrays: str) -> Callable[[Any, Any], None]:
    """A function that takes a step of gradient descent."""
    if arrays == "cupy":
        kernel = importlib.import_module("cupy").RawKernel(STEP, "step")

        def take_step(weights: Any, gradients: Any) -> None:
            count = weights.size
            arguments = (weights, gradients, numpy.float32(RATE), numpy.int32(count))
            kernel((-(-count // 256),), (256,), arguments)

        return take_step

    def take_step_in_place(weights: Any, gradients: Any) -> None:
        weights -= RATE * gradients

    return take_step_in_place


def train(
    group: pycomm.Group, arrays: str, steps: int, warmup: int, batches: int, device: str = "cpu"
) -> list[float]:
    """Trains on one rank.

    Args:
        group: the ranks.
        arrays: the library of arrays: torch, numpy or cupy.
        steps: the number of steps.
        warmup: how many of them send gradients in full.
        batches: the number of batches in a step.
        device: of torch's tensors.

    Returns:
        The mean error over all ranks in each step.
    """
    library = importlib.import_module(arrays)
    where = {"device": device_of(device, group.rank)} if arrays == "torch" else {}
    same, own = numpy.random.default_rng(0), numpy.random.default_rng(1 + group.rank)
    count = sum(int(numpy.prod(shape)) for shape in SHAPES)
    weights = (same.standard_normal(count) / 4).astype(numpy.float32)
    weights = library.asarray(weights, **where)
    gradients, residual = library.zeros_like(weights), library.zeros_like(weights)
    take_step, compression, errors = stepper(arrays), pycomm.Int8(), []
    for step in range(steps):
        gradients *= 0
        error = library.zeros_like(weights[:1])
        for _ in range(batches):
            points = own.uniform(-2, 2, (BATCH, 2)).astype(numpy.float32)
            values = numpy.sin(points[:, :1] * 2) * points[:, 1:]
            x, y = (library.asarray(numbers, **where) for numbers in (points, values))
            error += add_gradients(library, weights, gradients, x, y) / batches
        gradients /= batches
        if step < warmup:
            pycomm.all_reduce(gradients, op="avg", group=group)
        else:
            pycomm.compressed_all_reduce(
                gradients, compression, op="avg", residual=residual, step=step, group=group
            )
        take_step(weights, gradients)
        pycomm.all_reduce(error, op="avg", group=group)
        errors.append(float(error[0]))
        if group.rank == 0 and (step + 1) % max(steps // 5, 1) == 0:
            print(f"step {step + 1:4}  error {errors[-1]:.4f}")
    check_weights(library, weights, group)
    return errors


def check_weights(library: Any, weights: Any, group: pycomm.Group) -> None:
    """Raises an error unless all ranks have the same weights, to the bit."""
    everyones = library.stack([weights] * group.size)
    pycomm.all_gather(everyones, weights, group=group)
    if not bool((everyones == weights).all()):
        raise RuntimeError("the ranks' weights differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", choices=["torch", "numpy", "cupy"], default="torch")
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--warmup", type=int, default=20, help="steps in full")
    parser.add_argument("--batches", type=int, default=2, help="batches of a step")
    add_device(parser)
    options = vars(parser.parse_args())
    if options["device"] == "cuda" and options["arrays"] == "numpy":
        parser.error("--device cuda needs --arrays torch or cupy")
    device_of(options["device"], 0)  # raises here, rather than in every process
    if "WORLD_SIZE" in os.environ:  # torchrun
        train(pycomm.init(), **options)
    else:
        with pycomm.LocalWorld(2) as world:
            world.run(train, *options.values())
