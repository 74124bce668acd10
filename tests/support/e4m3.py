"""The compression of docs/contributing/extending.md, which is not in the library."""

from dataclasses import dataclass

import torch

from pycomm import _C
from pycomm.compression import Compression, _codec


@dataclass(frozen=True)
class E4M3(Compression):
    """8-bit floats in blocks that share an fp32 scale."""

    block: int = 256

    def __post_init__(self) -> None:
        if self.block not in (128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"block must be a power of two from 128 to 4096, got {self.block}")

    def codec(self, n: int, dtype: torch.dtype, step: int = 0) -> _C.Codec:  # noqa: ARG002
        """See :meth:`Compression.codec`."""
        return _codec("e4m3", block=self.block)
