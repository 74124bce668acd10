"""Encoded parts of a compressed operation, in the format of Compression.encode().

The size of an encoded part depends only on the number of its elements, so the host need not read
anything to send it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.dtypes import CODECS, DTYPES
from pycomm._runtime.cuda import Codecs
from pycomm.compression import VALUES, TopK

if TYPE_CHECKING:
    from pycomm.compression import Compression

_ALIGNMENT = 16  # bytes


class Wires:
    """Encodes parts of a tensor and decodes them, on the tensor's device.

    Args:
        compression: the compression.
        step: the training step.
        device: where the tensor lies.
        codec: the codec of the whole tensor.
        count: the number of its elements.
        k: how many of them top-k selects.
    """

    def __init__(
        self,
        compression: Compression,
        step: int,
        device: torch.device,
        codec: _C.Codec,
        count: int,
        k: int,
    ) -> None:
        self._compression, self._step, self._device = compression, step, device
        self._codec, self._count, self._k = codec, count, k
        self._codecs = Codecs(device, checks=False)

    def codec_of(self, count: int, spread: int = 1) -> _C.Codec:
        """The codec of a part; a list of top-k has room for `spread` times the part's share."""
        if not isinstance(self._compression, TopK):
            return self._codec
        return self._list(min(spread * self._share(count), count), self._compression.values)

    def rooms(self, counts: list[int], spread: int = 1) -> torch.Tensor:
        """Memory for encoded parts: rows of one length."""
        most = max(_C.encoded_bytes(self.codec_of(count, spread), count) for count in counts)
        width = -(-most // _ALIGNMENT) * _ALIGNMENT
        return torch.empty((len(counts), width), dtype=torch.uint8, device=self._device)

    def encode(
        self,
        part: torch.Tensor,
        wire: torch.Tensor,
        spread: int = 1,
        *,
        stream: int,
        places: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Encodes fp32 elements.

        Args:
            part: the elements.
            wire: receives the bytes.
            spread: see :meth:`codec_of`.
            stream: a number that distinguishes the random bits.
            places: the index of the first element, and if they do not lie in a row, the length of
                runs and the distance between their beginnings.
        """
        self._encode(self.codec_of(len(part), spread), part, wire, stream, places)

    def decode(
        self, wire: torch.Tensor, output: torch.Tensor, spread: int = 1, *, add: bool = False
    ) -> None:
        """Decodes a part, or adds it to `output`."""
        self._decode(self.codec_of(len(output), spread), wire, output, add)

    def largest(self, values: torch.Tensor, spread: int = 1) -> torch.Tensor:
        """The elements of a part that top-k selects as its share, and zeros."""
        count = len(values)
        codec = self._list(min(spread * self._share(count), count), torch.float32)
        nbytes = _C.encoded_bytes(codec, count)
        wire = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._encode(codec, values, wire, 0, (0, 0, 0))
        selected = torch.empty_like(values)
        self._decode(codec, wire, selected, False)
        return selected

    def _list(self, k: int, values: torch.dtype) -> _C.Codec:
        return _C.Codec(CODECS["topk"], values=VALUES[values], k=k)

    def _share(self, count: int) -> int:
        return -(-self._k * count // self._count)

    def _encode(
        self,
        codec: _C.Codec,
        part: torch.Tensor,
        wire: torch.Tensor,
        stream: int,
        places: tuple[int, int, int],
    ) -> None:
        first, run, stride = places
        self._codecs.encode(
            codec, DTYPES[torch.float32], part.data_ptr(), len(part), wire.data_ptr(),
            self._compression.seed, self._step, first, stream, run, stride,
        )  # fmt: skip

    def _decode(self, codec: _C.Codec, wire: torch.Tensor, output: torch.Tensor, add: bool) -> None:
        nbytes = _C.encoded_bytes(codec, len(output))
        self._codecs.decode(
            codec, wire.data_ptr(), nbytes, len(output), DTYPES[output.dtype], output.data_ptr(),
            add,
        )  # fmt: skip
