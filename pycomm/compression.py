"""Compressions of gradients. Formats: docs/reference/wire-format.md.

A compression is a plain value without state. State that lasts from step to step (a residual, a
velocity) is kept in the caller's tensors. :func:`pycomm.compressed_all_reduce` fuses a compression
into an all-reduce; :meth:`Compression.encode` and :meth:`Compression.decode` run the codec alone.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._inputs import (
    CODECS,
    COMPRESSIBLE,
    DTYPES,
    as_tensor,
    check_compressible,
    check_memory,
    check_no_gradient,
    check_step,
    check_whole,
    elements,
    like_input,
    on_stream_of_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Array = TypeVar("Array")  # a tensor, or an array of another library

SMALLEST_BLOCK: int = _C.smallest_block
# int8 values on the wire have uint8's number.
VALUES = {
    **{dtype: DTYPES[dtype] for dtype in COMPRESSIBLE},
    torch.int8: DTYPES[torch.uint8],
}


@functools.cache
def _codec(kind: str, values: int = 0, stochastic: bool = False, block: int = 0) -> _C.Codec:
    """A codec that is the same for all tensors; made once."""
    return _C.Codec(CODECS[kind], values, stochastic, block)


def _check_count(n: int) -> None:
    """Raises an error unless `n` can be a number of elements."""
    check_whole("n", n)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")


def _check_wire(argument: str, wire: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Raises ValueError unless encoded bytes can lie there; returns `wire`."""
    check_memory(argument, wire)
    if wire.dtype != torch.uint8 or not wire.is_contiguous():
        raise ValueError(f"{argument} must be contiguous and uint8, got {wire.dtype}")
    if wire.device != device:
        raise ValueError(f"{argument} must lie on {device}, got {wire.device}")
    if wire.data_ptr() % 4:
        raise ValueError(f"{argument} must be aligned to 4 bytes")
    return wire


def _check_target(target: torch.Tensor, n: int, device: torch.device, add: bool) -> None:
    """Raises ValueError unless `n` elements can be decoded into it."""
    check_memory("out", target)
    check_compressible("out", target)
    check_no_gradient("out", target)
    if target.numel() != n or not target.is_contiguous():
        raise ValueError(f"out must be contiguous and have {n} elements, got {target.numel()}")
    if target.device != device:
        raise ValueError(f"out must lie on {device}, got {target.device}")
    if add and target.dtype != torch.float32:
        raise ValueError(f"out must be float32 if add=True, got {target.dtype}")


class Compression(ABC):
    """Base of all compressions. A codec of one's own needs C++ (docs/contributing/extending.md)."""

    momentum: float = 0.0
    seed: int = 0

    @abstractmethod
    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:
        """The codec for a tensor of `n` elements at `step`, on which all ranks must agree.

        Raises:
            ValueError: the compression is not suitable for this tensor.
        """

    def encoded_bytes(self, n: int, dtype: torch.dtype = torch.float32, *, step: int = 0) -> int:
        """The number of bytes that :meth:`encode` returns for `n` elements, 16 of them header."""
        _check_count(n)
        return _C.encoded_bytes(self.codec(n, dtype, step), n)

    def wire_bytes(
        self, n: int, ranks: int, dtype: torch.dtype = torch.float32, *, step: int = 0
    ) -> int:
        """Bytes that a rank reads from other ranks in one two-shot all-reduce of `n` elements.

        For top-k, and if ranks own unequal shares, this is the most that any rank reads.
        """
        _check_count(n)
        check_whole("ranks", ranks)
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        return _C.wire_bytes(self.codec(n, dtype, step), n, ranks)

    @on_stream_of_arrays
    def encode(
        self, x: Array, out: Array | None = None, *, step: int = 0, offset: int = 0
    ) -> Array:
        """Encodes a tensor.

        Args:
            x: float32, float16 or bfloat16, any shape, on the CPU or a CUDA device; or an array of
                NumPy, CuPy or another library with DLPack.
            out: receives the bytes: uint8, contiguous, :meth:`encoded_bytes` long, on the same
                device. By default a new tensor, or an array of the library of `x`.
            step: the training step, for stochastic rounding and warm-up.
            offset: index of the first element of `x` in a larger whole, for stochastic rounding.

        Returns:
            `out`, or the new tensor, which begins with the header. Elements that are not finite are
            encoded as NaN.

        Raises:
            ValueError: `x` or `out` has a wrong dtype, size or device, or `step` or `offset` is out
                of range.
        """
        check_step(step)
        if not 0 <= offset < 2**63:
            raise ValueError(f"offset must not be negative, got {offset}")
        dense = elements("x", x)
        codec = self.codec(dense.numel(), dense.dtype, step)
        nbytes = _C.encoded_bytes(codec, dense.numel())
        if out is None:
            wire = torch.empty(nbytes, dtype=torch.uint8, device=dense.device)
        else:
            wire = _check_wire("out", as_tensor("out", out, written=True), dense.device)
            if wire.numel() != nbytes:
                raise ValueError(f"out must have {nbytes} bytes, got {wire.numel()}")
        _backend(dense.device).encode(
            codec, DTYPES[dense.dtype], dense.data_ptr(), dense.numel(), wire.data_ptr(),
            self.seed, step, offset,
        )  # fmt: skip
        return like_input(x, wire) if out is None else out

    @on_stream_of_arrays
    def decode(
        self,
        wire: Array,
        n: int,
        out: Array | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        add: bool = False,
    ) -> Array:
        """Decodes the result of :meth:`encode`.

        Args:
            wire: the bytes: uint8, contiguous. Every bound in them is checked.
            n: the number of elements in `wire`.
            out: receives the elements: contiguous, `n` elements; by default a new tensor of
                `dtype`, or an array of the library of `wire`.
            dtype: the dtype of the new tensor: float32, float16 or bfloat16.
            add: add to `out`, which must be float32, instead of overwriting it.

        Returns:
            `out`, or the new tensor.

        Raises:
            ValueError: the bytes are not an encoding of `n` elements by this compression. A part of
                `out` may have been written.
        """
        _check_count(n)
        source = as_tensor("wire", wire, written=False)
        _check_wire("wire", source, source.device)
        if out is None and add:
            raise ValueError("out must be given if add=True")
        if out is None and dtype not in COMPRESSIBLE:
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        target = (
            torch.empty(n, dtype=dtype, device=source.device)
            if out is None
            else as_tensor("out", out, written=True)
        )
        _check_target(target, n, source.device, add)
        increment_version(target)
        _backend(source.device).decode(
            self._reading_codec(n, target.dtype), source.data_ptr(), source.numel(), n,
            DTYPES[target.dtype], target.data_ptr(), add,
        )  # fmt: skip
        return like_input(wire, target) if out is None else out

    def _reading_codec(self, n: int, dtype: torch.dtype) -> _C.Codec:
        return self.codec(n, dtype)


@dataclass(frozen=True)
class Cast(Compression):
    """Rounds to a narrower float type, to nearest even.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``. Values beyond float16's range become
            infinite, and are reported.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {self.dtype}")

    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:  # noqa: ARG002
        """See :meth:`Compression.codec`."""
        return _codec("cast", DTYPES[self.dtype])


@dataclass(frozen=True)
class Identity(Compression):
    """No compression: sends the tensor's own dtype. For comparisons."""

    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:  # noqa: ARG002
        """See :meth:`Compression.codec`."""
        return _codec("cast", DTYPES[dtype])


@dataclass(frozen=True)
class Int8(Compression):
    """8-bit integers in blocks that share an fp32 scale: 8.125 bits per element.

    The scale of a block is its largest magnitude divided by 127. The error of a mean over n ranks
    is at most 2 A / 254 (two-shot), (n + 1) / 2 * A / 254 (ring) or (log2(n) + 1) * A / 254 (tree),
    plus some ulps, where A is the largest magnitude in all ranks' blocks. Zeros stay zeros. Scaling
    by a power of two before or after gives the same. A block of magnitudes below 127 * 2^-126
    becomes zero.

    Attributes:
        block: the number of elements that share a scale: a power of two from 128 to 4096.
        rounding: ``"nearest"`` (to even), or ``"stochastic"``, which is unbiased and has 1.4 times
            the error. Philox makes the random bits from seed, step, rank and the element's index in
            the whole, so the result of two-shot does not depend on how data is split.
        seed: the seed of the random bits.
    """

    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("block", self.block)
        check_whole("seed", self.seed)
        if self.block not in (128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"block must be a power of two from 128 to 4096, got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be nearest or stochastic, got {self.rounding!r}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2^64 - 1, got {self.seed}")

    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:  # noqa: ARG002
        """See :meth:`Compression.codec`."""
        return _codec("int8", stochastic=self.rounding == "stochastic", block=self.block)


@dataclass(frozen=True)
class TopK(Compression):
    """Sends exactly the k elements of largest magnitude; of equal ones those with lower indices.

    Elements that are not sent are lost unless there is a residual. Densities at which indices and
    values take as many bytes as the dense tensor are refused. In an all-reduce, the owner of a
    region takes at most twice the region's share of k from each rank, adds the elements, and sends
    its share of the largest sums to all ranks; the rest stays in residuals.

    Attributes:
        density: the share of the elements to send. Give either `density` or `k`.
        k: the number of elements to send.
        values: the dtype of sent values: ``torch.float32``, ``torch.bfloat16``, ``torch.float16``
            or ``torch.int8`` (a scale per 65,536 elements). The residual keeps what rounding loses.
        density_steps: the number of first steps in which the density falls exponentially from a
            quarter to `density` (Lin et al. 2018, "Deep gradient compression").
        momentum: factor of momentum correction with masking (the same paper), for optimizers
            without momentum of their own; needs ``velocity=``.
    """

    density: float | None = None
    k: int | None = None
    values: torch.dtype = torch.float32
    density_steps: int = 0
    momentum: float = 0.0

    FIRST_DENSITY = 0.25

    def __post_init__(self) -> None:
        if (self.density is None) == (self.k is None):
            raise ValueError("exactly one of density and k must be given")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")
        if self.k is not None:
            check_whole("k", self.k)
            if self.k < 1:
                raise ValueError(f"k must be at least 1, got {self.k}")
        if self.values not in VALUES:
            raise ValueError(
                "values must be torch.float32, torch.bfloat16, torch.float16 or torch.int8, "
                f"got {self.values}"
            )
        check_whole("density_steps", self.density_steps)
        if self.density_steps < 0:
            raise ValueError(f"density_steps must not be negative, got {self.density_steps}")
        if self.density_steps and self.density is None:
            raise ValueError("density_steps must be given with density, not with k")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")

    def density_at(self, step: int) -> float:
        """The density at a step; the first step is 0."""
        assert self.density is not None
        if step >= self.density_steps or self.density >= self.FIRST_DENSITY:
            return self.density
        ratio = self.density / self.FIRST_DENSITY
        return float(self.FIRST_DENSITY * ratio ** (step / self.density_steps))

    def count(self, n: int, step: int = 0) -> int:
        """The number of elements out of `n` that are sent at a step."""
        if self.k is not None:
            return min(self.k, n)
        return min(math.ceil(self.density_at(step) * n), n)

    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:
        """See :meth:`Compression.codec`."""
        if n > _C.most_topk_elements:
            raise ValueError(f"tensor must have fewer than 2^32 elements for top-k, got {n}")
        self._check_worth(n, dtype, step)
        return _C.Codec(CODECS["topk"], values=VALUES[self.values], k=self.count(n, step))

    @on_stream_of_arrays
    def select(self, x: Array, *, step: int = 0) -> tuple[Array, Array]:
        """Indices (int64, ascending) and values (float32) of the selected elements of `x`.

        Both are arrays of the library of `x`.

        Zeros are never selected, so there may be fewer elements than `k` or `density` say.
        """
        dense = elements("x", x)
        k = self.count(dense.numel(), step)
        self.codec(dense.numel(), dense.dtype, step)
        indices = torch.empty(k, dtype=torch.int64, device=dense.device)
        values = torch.empty(k, dtype=torch.float32, device=dense.device)
        found = _backend(dense.device).select(
            DTYPES[dense.dtype], dense.data_ptr(), dense.numel(), k,
            indices.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return like_input(x, indices[:found]), like_input(x, values[:found])

    def _check_worth(self, n: int, dtype: torch.dtype, step: int) -> None:
        share = self.density_at(step) if self.density is not None else self.count(n) / max(n, 1)
        many = 1 << 20  # so that no rounding counts
        codec = _C.Codec(CODECS["topk"], values=VALUES[self.values], k=math.ceil(share * many))
        sent = _C.encoded_bytes(codec, many) / many
        if sent >= dtype.itemsize and n > 1:
            what = f"density {share:g}" if self.density is not None else f"k = {self.k} of {n}"
            raise ValueError(
                f"{what} would send {sent:.2f} bytes per element, where dense "
                f"{str(dtype).removeprefix('torch.')} takes {dtype.itemsize}: send fewer elements, "
                "or use pycomm.Identity()"
            )

    def _reading_codec(self, n: int, dtype: torch.dtype) -> _C.Codec:  # noqa: ARG002
        return _C.Codec(CODECS["topk"], values=VALUES[self.values], k=n)


def check_lossy_once(argument: str, compression: object) -> None:
    """Checks a compression of tensors whose losses no residual keeps, and whose step is unknown.

    Raises:
        ValueError, TypeError: it loses too much, or needs to know the step.
    """
    if compression is None or isinstance(compression, Cast | Identity):
        return
    if not isinstance(compression, Int8):
        raise TypeError(
            f"{argument} must be pycomm.Int8(), pycomm.Cast(), pycomm.Identity() or None, got "
            f"{compression!r}: without a residual, other compressions lose too much"
        )
    if compression.rounding != "nearest":
        raise ValueError(
            f'{argument} must round to "nearest", got {compression.rounding!r}: the step, from '
            "which random bits are made, is not known"
        )


def _backend(device: torch.device) -> Any:
    if device.type == "cpu":
        return _C
    from pycomm._runtime.cuda import Codecs

    return Codecs(device)


# Compressions as text, for command lines and operators.

_NAMES: dict[str, Callable[..., Compression]] = {
    "none": Identity,
    "bf16": Cast,
    "fp16": functools.partial(Cast, torch.float16),
    "int8": Int8,
    "topk": TopK,
}
_FIRST_OPTION = {"int8": "block", "topk": "density"}
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "block": int,
    "rounding": str,
    "seed": int,
    "density": float,
    "k": int,
    "values": {str(dtype).removeprefix("torch."): dtype for dtype in VALUES}.__getitem__,
    "density_steps": int,
    "momentum": float,
}


def parse_compression(text: str) -> Compression:
    """Makes a compression from its name, for command lines and ``torch.ops.pycomm``.

    Args:
        text: ``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"topk"``, followed by options:
            ``"topk:0.01"``, ``"topk:k=1000:values=bfloat16"``, ``"int8:512:rounding=stochastic"``.

    Raises:
        ValueError: the name or an option is unknown, or a value is not allowed.
    """
    name, *items = text.split(":")
    try:
        pairs = [item if "=" in item else f"{_FIRST_OPTION[name]}={item}" for item in items]
        options = [
            (key, _OPTIONS[key](value)) for key, _, value in (p.partition("=") for p in pairs)
        ]
        make = _NAMES[name]
    except (KeyError, ValueError) as error:
        raise ValueError(_HOW_TO_NAME + repr(text)) from error
    if len(dict(options)) < len(options):
        raise ValueError(f"compression must name each option once, got {text!r}")
    try:
        return make(**dict(options))
    except TypeError as error:  # an option of another compression
        raise ValueError(_HOW_TO_NAME + repr(text)) from error


_HOW_TO_NAME = (
    "compression must be none, bf16, fp16, int8[:BLOCK] or topk:DENSITY, or these with options "
    "such as topk:k=1000:values=bfloat16, got "
)
