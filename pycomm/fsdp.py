"""The all-gather and reduce-scatter of FSDP2, through pycomm's window or compressed.

.. code-block:: python

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from pycomm.fsdp import AllGather, ReduceScatter

    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(net, mesh=mesh)
    net.set_custom_all_gather(AllGather(mesh, pycomm.Int8()))
    net.set_custom_reduce_scatter(ReduceScatter(mesh, pycomm.Int8()))

docs/how-to/torch-distributed.md#fsdp2 gives the bytes and the bounds. `import pycomm` does not
import this module, because FSDP2 takes seconds to import.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm._inputs import check_compressible, check_process_group, process_group_of, reduction
from pycomm._runtime import host
from pycomm._runtime.torch_private import backend_of, fsdp_interfaces, storage_users
from pycomm.compression import Compression, check_lossy_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Window memory of a process group that is reused instead of being freed.

_CPU = torch.device("cpu")


class Buffers:
    """Buffers for one process group.

    The kernel clears new memory of a window, which takes longer than exchanging it. So a buffer is
    kept, and reused when no other tensor shares its memory.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._users: list[int] = []  # of each buffer's memory when only this list refers to it

    def take(self, group: ProcessGroup, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of `count` elements in CPU memory, in the window if possible."""
        nbytes = count * dtype.itemsize
        unused = [
            buffer
            for buffer, users in zip(self._kept, self._users, strict=True)
            if nbytes <= buffer.numel() <= 2 * nbytes and storage_users(buffer) == users
        ]
        buffer = min(unused, key=torch.Tensor.numel) if unused else self._add(group, nbytes)
        return buffer[:nbytes].view(dtype)

    def _add(self, group: ProcessGroup, nbytes: int) -> torch.Tensor:
        backend = backend_of(group, _CPU)
        with torch.inference_mode(False):  # inference tensors could not be written later
            if backend.supports_tensor_alloc(_CPU):
                buffer: torch.Tensor = backend.allocate_tensor(
                    nbytes, dtype=torch.uint8, device=_CPU
                )
            else:
                buffer = host.empty(nbytes, dtype=torch.uint8)
        self._kept.append(buffer)
        self._users.append(storage_users(buffer))
        return buffer


_buffers: weakref.WeakKeyDictionary[ProcessGroup, Buffers] = weakref.WeakKeyDictionary()


def buffers_of(group: ProcessGroup) -> Buffers:
    """The buffers of a process group."""
    return _buffers.setdefault(group, Buffers())


# The all-gather and reduce-scatter of FSDP2, through pycomm's window or compressed.

_AllGather: Any
_ReduceScatter: Any
_AllGather, _ReduceScatter = fsdp_interfaces()
_ALIGNMENT = 16  # bytes, for each encoding in a buffer


class _Comm:
    """Buffers and checks that both operations share."""

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, compression: Compression | None = None
    ) -> None:
        check_process_group(group)
        if group is None:
            raise TypeError("group must be FSDP's process group, or its DeviceMesh, got None")
        check_lossy_once("compression", compression)
        self._group: dist.ProcessGroup = process_group_of(group)
        self._compression = compression
        backends = dist.get_backend_config(self._group)
        if compression is None and "cpu:pycomm" not in backends:
            raise ValueError(
                "group must be on the backend pycomm, unless there is a compression: got one on "
                f"{backends}, which has no window"
            )

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Makes a buffer for FSDP.

        Only uncompressed operations exchange the buffer itself, so only their buffers lie in the
        window. On the CPU, the memory of an unused earlier buffer is reused, if there is one.
        """
        if self._compression is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._buffer(math.prod(int(n) for n in size), dtype, device)

    def _buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the group exchanges without staging, if its backend supports that."""
        if device.type == "cpu":
            return buffers_of(self._group).take(self._group, count, dtype)
        backend = backend_of(self._group, device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(count, dtype=dtype, device=device)
        made: torch.Tensor = backend.allocate_tensor(count, dtype=dtype, device=device)
        return made

    def _check(
        self, whole: torch.Tensor, whole_name: str, block: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Checks one call; `block` is this rank's part of `whole`."""
        if group is not self._group:
            ours, theirs = map(dist.get_process_group_ranks, (self._group, group))
            if ours != theirs:
                raise ValueError(
                    f"group must be the one that FSDP shards over, which has ranks {theirs}, got "
                    f"one of ranks {ours}"
                )
        if whole.numel() != group.size() * block.numel():
            raise ValueError(
                f"{whole_name} must have {group.size()} times {block.numel()} elements, got "
                f"{whole.numel()}"
            )
        if self._compression is not None and block.dtype == torch.uint8:
            raise ValueError(
                "parameters that are gathered together must have one dtype to be compressed: pass "
                "MixedPrecisionPolicy(param_dtype=...) to fully_shard"
            )
        if self._compression is not None:
            check_compressible(whole_name, whole)

    def _encodings(self, n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer with an aligned row per rank, and its part for encodings of `n` elements."""
        assert self._compression is not None
        nbytes = self._compression.encoded_bytes(n, like.dtype)
        stride = math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffer(self._group.size() * stride, torch.uint8, like.device)
        rows = buffer.view(-1, stride)
        return rows, rows[:, :nbytes]


class AllGather(_Comm, _AllGather):  # type: ignore[misc]
    """Gathers sharded parameters, for ``FSDPModule.set_custom_all_gather``.

    With a compression, each rank encodes its shard, and every rank, the owner included, computes
    with the decoded shards. So all ranks compute with the same bits, and the optimizer updates the
    exact shards. With ``pycomm.Int8()`` the error of a parameter is at most A/254, plus rounding,
    where A is the largest magnitude in its block of 256.

    Args:
        group: the process group that FSDP shards over, or its DeviceMesh of one dimension; with
            HSDP, ``mesh["shard"]``. Uncompressed, it must be on the backend pycomm.
        compression: ``pycomm.Int8()``, ``pycomm.Cast()``, ``pycomm.Identity()`` or None.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers the inputs of all ranks, in rank order; FSDP calls this.

        Args:
            output_tensor: group size times as many elements as `input_tensor`.
            input_tensor: this rank's block, which may be a part of `output_tensor`. Compressed:
                float32, float16 or bfloat16.
            group: the group of the constructor, or another group of the same ranks.
            async_op: return a Work. With a compression, its ``wait`` decodes.

        Raises:
            ValueError: an argument is not as described.
        """
        self._check(output_tensor, "output_tensor", input_tensor, group)
        compression = self._compression
        if compression is None:
            return _all_gather(output_tensor, input_tensor, group, async_op)
        n = input_tensor.numel()
        rows, encodings = self._encodings(n, input_tensor)
        compression.encode(input_tensor, out=encodings[group.rank()])
        work = _all_gather(rows.view(-1), rows[group.rank()], group, async_op)

        def decode() -> None:
            for encoding, block in zip(encodings, output_tensor.view(-1, n), strict=True):
                compression.decode(encoding, n, out=block)

        return _finish(work, decode)


class ReduceScatter(_Comm, _ReduceScatter):  # type: ignore[misc]
    """Reduces gradients to sharded gradients, for ``FSDPModule.set_custom_reduce_scatter``.

    With a compression, each rank encodes all shards of its gradient and sends each shard to its
    owner. The owner decodes the shards and adds them in fp32 and in rank order. With
    ``pycomm.Int8()`` the error of a mean is at most A/254, plus rounding, where A is the largest
    magnitude in all ranks' blocks of 256. There is no error feedback, because each rank would need
    a residual as large as the whole model.

    Args:
        group: as for :class:`AllGather`.
        compression: as for :class:`AllGather`.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces the inputs of all ranks; rank r gets block r. FSDP calls this.

        Args:
            output_tensor: receives this rank's block.
            input_tensor: a block per rank. Compressed: float32, float16 or bfloat16.
            group: the group of the constructor, or another group of the same ranks.
            op: a ReduceOp; compressed SUM or AVG. FSDP's ``set_gradient_divide_factor`` needs
                PREMUL_SUM, unless ``set_force_sum_reduction_for_comms(True)`` was called.
            async_op: return a Work. With a compression, its ``wait`` decodes and adds.

        Raises:
            ValueError: an argument is not as described.
        """
        self._check(input_tensor, "input_tensor", output_tensor, group)
        compression = self._compression
        if compression is None:
            return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
        averages = reduction(op, ("sum", "avg")) == "avg"
        n = output_tensor.numel()
        rows, encodings = self._encodings(n, input_tensor)
        for encoding, block in zip(encodings, input_tensor.view(-1, n), strict=True):
            compression.encode(block, out=encoding)
        received_rows, received = self._encodings(n, input_tensor)
        work = dist.all_to_all_single(received_rows, rows, group=group, async_op=async_op)

        def reduce() -> None:
            total = compression.decode(received[0], n)
            for encoding in received[1:]:
                compression.decode(encoding, n, out=total, add=True)
            output_tensor.copy_(total.div_(group.size()) if averages else total)

        return _finish(work, reduce)


class _Work(dist.Work):
    """An operation on encoded data whose wait() decodes."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the output is complete."""
        self._work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def _finish(work: dist.Work | None, finish: Callable[[], None]) -> dist.Work | None:
    if work is not None:
        return _Work(work, finish)
    finish()
    return None


# torch 2.13 has new names and warns about the old ones.
_Operation = Callable[..., "dist.Work | None"]
_all_gather: _Operation = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: _Operation = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
