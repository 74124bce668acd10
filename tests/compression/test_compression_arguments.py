"""Bad arguments of compressions and compressed all-reduces."""

import re

import numpy as np
import pytest
import torch

import pycomm
from pycomm import parse_compression

X = torch.ones(600)
R = torch.zeros(600)
MOMENTUM = pycomm.TopK(0.01, momentum=0.9)


def reduce_with(group, tensor=X, compression=pycomm.Int8(), **options):  # noqa: B008 - it is frozen
    return pycomm.compressed_all_reduce(tensor, compression, group=group, **options)


def read_only():
    array = np.ones(600, np.float32)
    array.flags.writeable = False
    return array


# The call, the type of the exception, a part of its message.
BAD_COMPRESSIONS = {
    "block of 100": (
        lambda: pycomm.Int8(100),
        "block must be a power of two from 128 to 4096, got 100",
    ),
    "block of 64": (lambda: pycomm.Int8(64), "from 128 to 4096, got 64"),
    "block of 8192": (lambda: pycomm.Int8(8192), "from 128 to 4096, got 8192"),
    "rounding": (
        lambda: pycomm.Int8(rounding="down"),
        "rounding must be nearest or stochastic, got 'down'",
    ),
    "negative seed": (lambda: pycomm.Int8(seed=-1), "seed must be from 0 to 2^64 - 1, got -1"),
    "large seed": (lambda: pycomm.Int8(seed=2**64), f"2^64 - 1, got {2**64}"),
    "cast to float64": (
        lambda: pycomm.Cast(torch.float64),
        "dtype must be torch.bfloat16 or torch.float16, got torch.float64",
    ),
    "cast to int8": (lambda: pycomm.Cast(torch.int8), "got torch.int8"),
    "neither density nor k": (lambda: pycomm.TopK(), "exactly one of density and k must be given"),
    "density and k": (lambda: pycomm.TopK(0.1, k=3), "exactly one of density and k must be given"),
    "density 0": (lambda: pycomm.TopK(0.0), "density must be above 0 and at most 1, got 0.0"),
    "density 1.5": (lambda: pycomm.TopK(1.5), "at most 1, got 1.5"),
    "density NaN": (lambda: pycomm.TopK(float("nan")), "at most 1, got nan"),
    "k 0": (lambda: pycomm.TopK(k=0), "k must be at least 1, got 0"),
    "values": (
        lambda: pycomm.TopK(0.1, values=torch.float64),
        "values must be torch.float32, torch.bfloat16, torch.float16 or torch.int8, "
        "got torch.float64",
    ),
    "negative warm-up": (
        lambda: pycomm.TopK(0.1, density_steps=-1),
        "density_steps must not be negative, got -1",
    ),
    "warm-up of k": (
        lambda: pycomm.TopK(k=3, density_steps=5),
        "density_steps must be given with density, not with k",
    ),
    "momentum 1": (
        lambda: pycomm.TopK(0.1, momentum=1.0),
        "momentum must be at least 0 and below 1, got 1.0",
    ),
    "negative momentum": (lambda: pycomm.TopK(0.1, momentum=-0.1), "below 1, got -0.1"),
    "unknown name": (
        lambda: parse_compression("zip"),
        "compression must be none, bf16, fp16, int8",
    ),
    "top-k without density": (lambda: parse_compression("topk"), "density and k must be given"),
    "a bad block": (lambda: parse_compression("int8:100"), "from 128 to 4096, got 100"),
    "no number": (lambda: parse_compression("topk:abc"), "got 'topk:abc'"),
    "twice": (lambda: parse_compression("topk:0.1:0.2"), "each option once"),
    "an option of another": (lambda: parse_compression("bf16:block=256"), "got 'bf16:block=256'"),
}


@pytest.mark.parametrize("name", BAD_COMPRESSIONS)
def test_compressions(name):
    call, message = BAD_COMPRESSIONS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


BAD_CODINGS = {
    "doubles": (
        lambda: pycomm.Int8().encode(X.double()),
        ValueError,
        "x must have one of the dtypes float32, float16, bfloat16, got torch.float64",
    ),
    "a list": (lambda: pycomm.Int8().encode([1.0]), TypeError, "x must be a torch.Tensor or an"),
    "short out": (
        lambda: pycomm.Int8().encode(X, torch.empty(100, dtype=torch.uint8)),
        ValueError,
        f"out must have {16 + 608 + 12} bytes, got 100",
    ),
    "float out": (
        lambda: pycomm.Int8().encode(X, torch.empty(636)),
        ValueError,
        "out must be contiguous and uint8, got torch.float32",
    ),
    "strided out": (
        lambda: pycomm.Int8().encode(X, torch.empty(1272, dtype=torch.uint8)[::2]),
        ValueError,
        "out must be contiguous and uint8",
    ),
    "odd out": (
        lambda: pycomm.Int8().encode(X, torch.empty(637, dtype=torch.uint8)[1:]),
        ValueError,
        "out must be aligned to 4 bytes",
    ),
    "more than it is worth": (
        lambda: pycomm.TopK(0.95).encode(X),
        ValueError,
        "density 0.95 would send 4.04 bytes per element, where dense float32 takes 4: "
        "send fewer elements, or use pycomm.Identity()",
    ),
    "more than it is worth of fp16": (
        lambda: pycomm.TopK(k=120).encode(X[:250].half()),
        ValueError,
        "k = 120 of 250 would send 2.10 bytes per element, where dense float16 takes 2",
    ),
    "too many elements": (
        lambda: pycomm.TopK(0.001).encoded_bytes(2**32),
        ValueError,
        f"tensor must have fewer than 2^32 elements for top-k, got {2**32}",
    ),
    "a meta tensor": (
        lambda: pycomm.Int8().encode(torch.ones(3, device="meta")),
        ValueError,
        "must lie on the CPU",
    ),
    "a negative count": (
        lambda: pycomm.Int8().encoded_bytes(-1),
        ValueError,
        "n must not be negative, got -1",
    ),
    "a negative count of elements": (
        lambda: pycomm.Int8().decode(torch.empty(16, dtype=torch.uint8), -1),
        ValueError,
        "n must not be negative, got -1",
    ),
    "no ranks": (
        lambda: pycomm.Int8().wire_bytes(10, 0),
        ValueError,
        "ranks must be at least 1, got 0",
    ),
    "a wire of floats": (
        lambda: pycomm.Int8().decode(torch.empty(636), 600),
        ValueError,
        "wire must be contiguous and uint8, got torch.float32",
    ),
    "a wire that is a list": (
        lambda: pycomm.Int8().decode([1], 600),
        TypeError,
        "wire must be a torch.Tensor or an array with __dlpack__, got list",
    ),
    "an odd wire": (
        lambda: pycomm.Int8().decode(torch.empty(637, dtype=torch.uint8)[1:], 600),
        ValueError,
        "wire must be aligned to 4 bytes",
    ),
    "adding to nothing": (
        lambda: pycomm.Int8().decode(pycomm.Int8().encode(X), 600, add=True),
        ValueError,
        "out must be given if add=True",
    ),
    "adding to halves": (
        lambda: pycomm.Int8().decode(pycomm.Int8().encode(X), 600, X.half(), add=True),
        ValueError,
        "out must be float32 if add=True, got torch.float16",
    ),
    "out of doubles": (
        lambda: pycomm.Int8().decode(pycomm.Int8().encode(X), 600, X.double()),
        ValueError,
        "out must have one of the dtypes float32, float16, bfloat16, got torch.float64",
    ),
    "out of another length": (
        lambda: pycomm.Int8().decode(pycomm.Int8().encode(X), 600, X[:599].clone()),
        ValueError,
        "out must be contiguous and have 600 elements, got 599",
    ),
    "out with strides": (
        lambda: pycomm.Int8().decode(pycomm.Int8().encode(X), 600, torch.empty(1200)[::2]),
        ValueError,
        "out must be contiguous and have 600 elements",
    ),
    "a negative step": (
        lambda: pycomm.Int8().encode(X, step=-1),
        ValueError,
        "step must be from 0 to 2^32 - 1, got -1",
    ),
    "a large step": (
        lambda: pycomm.Int8().encode(X, step=2**32),
        ValueError,
        f"step must be from 0 to 2^32 - 1, got {2**32}",
    ),
    "a negative offset": (
        lambda: pycomm.Int8().encode(X, offset=-256),
        ValueError,
        "offset must",
    ),
    "a negated view": (
        lambda: pycomm.Int8().encode(torch._neg_view(X)),
        ValueError,
        "x must be materialised",
    ),
}


@pytest.mark.parametrize("name", BAD_CODINGS)
def test_encode_and_decode(name):
    call, kind, message = BAD_CODINGS[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


BAD_CALLS = {
    "a class": (
        {"compression": pycomm.Int8},
        TypeError,
        "compression must be pycomm.Int8(), TopK(...), Cast() or Identity(), got <class",
    ),
    "a name": ({"compression": "int8"}, TypeError, "or Identity(), got 'int8'"),
    "op": ({"op": "max"}, ValueError, "op must be one of avg, sum, got 'max'"),
    "algorithm": (
        {"algorithm": "one_shot"},
        ValueError,
        "algorithm must be one of auto, two_shot, ring, tree, got 'one_shot'",
    ),
    "ring of top-k": (
        {"compression": pycomm.TopK(0.1), "algorithm": "ring"},
        ValueError,
        "algorithm must be auto or two_shot for top-k, got 'ring'",
    ),
    "tree of top-k": (
        {"compression": pycomm.TopK(0.1), "algorithm": "tree"},
        ValueError,
        "algorithm must be auto or two_shot for top-k, got 'tree'",
    ),
    "negative step": ({"step": -1}, ValueError, "step must be from 0 to 2^32 - 1, got -1"),
    "large step": ({"step": 2**32}, ValueError, f"2^32 - 1, got {2**32}"),
    "odd offset": (
        {"offset": 128},
        ValueError,
        "offset must be a multiple of the block, 256, got 128",
    ),
    "negative offset": ({"offset": -256}, ValueError, "offset must be a multiple of the block"),
    "a list": (
        {"tensor": [1.0]},
        TypeError,
        "tensor must be a torch.Tensor or an array with __dlpack__, got list",
    ),
    "integers": (
        {"tensor": torch.ones(6, dtype=torch.int32)},
        ValueError,
        "tensor must have one of the dtypes float32, float16, bfloat16, got torch.int32",
    ),
    "an array of doubles": ({"tensor": np.ones(6)}, ValueError, "got torch.float64"),
    "an array of strings": (
        {"tensor": np.array(["a"])},
        ValueError,
        "tensor must be an array that torch can take",
    ),
    "an array of the other byte order": (
        {"tensor": np.ones(6, ">f4" if np.little_endian else "<f4")},
        ValueError,
        "tensor must be an array that torch can take",
    ),
    "an array that runs backwards": (
        {"tensor": np.ones(6, np.float32)[::-1]},
        ValueError,
        "tensor must not have negative strides",
    ),
    "a read-only array": (
        {"tensor": read_only()},
        ValueError,
        "tensor must be writable",
    ),
    "requires grad": (
        {"tensor": torch.ones(6, requires_grad=True)},
        ValueError,
        "tensor must not require grad",
    ),
    "an expanded tensor": (
        {"tensor": torch.ones(1).expand(600)},
        ValueError,
        "tensor must not overlap itself in memory",
    ),
    "a negated view": (
        {"tensor": torch._neg_view(X)},
        ValueError,
        "tensor must be materialised",
    ),
    "out of another dtype": (
        {"out": X.half()},
        ValueError,
        "out must have tensor's dtype torch.float32, got torch.float16",
    ),
    "out of another shape": (
        {"out": torch.empty(20, 30)},
        ValueError,
        "out must have tensor's shape (600,), got (20, 30)",
    ),
    "out that overlaps": (
        {"tensor": (long := torch.ones(700))[:600], "out": long[100:]},
        ValueError,
        "out must not overlap tensor in memory",
    ),
    "a residual of halves": (
        {"residual": R.half()},
        ValueError,
        "residual must be float32, got torch.float16",
    ),
    "a residual of another shape": (
        {"residual": R.view(20, 30)},
        ValueError,
        "residual must have tensor's shape and device, (600,) on cpu, got (20, 30) on cpu",
    ),
    "a strided residual": (
        {"residual": torch.zeros(1200)[::2]},
        ValueError,
        "residual must be contiguous",
    ),
    "the tensor as residual": (
        {"residual": X},
        ValueError,
        "residual must not overlap tensor in memory",
    ),
    "a residual that overlaps out": (
        {"out": long[:600], "residual": long[:600]},
        ValueError,
        "residual must not overlap out in memory",
    ),
    "a residual that requires grad": (
        {"residual": torch.zeros(600, requires_grad=True)},
        ValueError,
        "residual must not require grad",
    ),
    "a residual that is a list": (
        {"residual": [0.0]},
        TypeError,
        "residual must be a torch.Tensor or an array",
    ),
    "no velocity": (
        {"compression": MOMENTUM, "residual": R},
        ValueError,
        "velocity must be given if, and only if, the compression has momentum",
    ),
    "velocity without momentum": (
        {"residual": R, "velocity": torch.zeros(600)},
        ValueError,
        "velocity must be given if, and only if, the compression has momentum",
    ),
    "momentum without residual": (
        {"compression": MOMENTUM, "velocity": R},
        ValueError,
        "residual must be given if the compression has momentum",
    ),
    "a velocity of doubles": (
        {"compression": MOMENTUM, "residual": R, "velocity": R.double()},
        ValueError,
        "velocity must be float32, got torch.float64",
    ),
    "the residual as velocity": (
        {"compression": MOMENTUM, "residual": R, "velocity": R},
        ValueError,
        "must not overlap",
    ),
    "more than it is worth": (
        {"compression": pycomm.TopK(0.95)},
        ValueError,
        "density 0.95 would send 4.04 bytes per element",
    ),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_compressed_all_reduce(world, name, asynchronous):
    """Rank 0 of two raises before it waits for rank 1, and the group still works."""
    options, kind, message = BAD_CALLS[name]
    group = world(2, timeout=2).groups[0]
    sequence = group._core.sequence
    with pytest.raises(kind, match=re.escape(message)):
        reduce_with(group, **options, async_op=asynchronous)
    assert group._core.sequence == sequence
    group._core.check_usable()


def test_staging_that_is_too_small_says_what_would_do(world):
    """Every rank gets the error; with the bytes that it names, the call works."""
    size = 5

    def body(group):
        return reduce_with(group, torch.ones(600), pycomm.Identity())[0].item()

    with pytest.raises(ValueError, match=r"staging_bytes is too small .* 5 ranks") as caught:
        world(size, staging_bytes=8_000).run(body)
    enough = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert world(size, staging_bytes=enough).run(body) == [1.0] * size
