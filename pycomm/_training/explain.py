"""Explains where buckets of gradients lie, and what their exchange costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm._runtime.log import fallback
from pycomm.group import Group

_PATHS = {
    "in place": "other ranks read and write the bucket where it lies",
    "encoded": "gradients pass through the window encoded, but those of excluded parameters",
    "NCCL": "kernels inside a node, NCCL between nodes",
    "staged": "every byte is copied into the window and back, tile by tile",
    "pinned host memory": "every byte goes to host memory and back, over the device's bus",
}
_SLOW = ("staged", "pinned host memory")
_NO_ROOM = (
    "staged on CUDA: the window's heap has no room, and the log tells why it has not grown. Leave "
    "more memory of the device free, or give init(cuda_heap_bytes=...)"
)


@dataclass(frozen=True)
class BucketPlan:
    """How a bucket of gradients is exchanged.

    Attributes:
        nbytes: its size in bytes.
        dtype: the dtype of the gradients.
        device: their device.
        path: ``"in place"``, ``"encoded"``, ``"NCCL"``, ``"staged"`` or ``"pinned host memory"``.
        algorithm: the algorithm of an exchange of this size, ``"two_shot"`` if it is encoded and
            the state names none.
        why: the reason for the algorithm.
        parameters: the names of the first and the last parameter, if they are known.
    """

    nbytes: int
    dtype: torch.dtype
    device: torch.device
    path: str
    algorithm: str
    why: str
    parameters: str

    def __str__(self) -> str:
        mib = self.nbytes / (1 << 20)
        where = f"{mib:.3g} MiB, {self.dtype} on {self.device}, {self.path}: {self.parameters}"
        return f"{where}; {self.algorithm}, {self.why}"


@dataclass(frozen=True)
class ExchangePlan:
    """How a model's gradients are exchanged; ``print`` shows a list with what each path costs.

    Attributes:
        buckets: the buckets that have been exchanged since they were made, in this order.
    """

    buckets: tuple[BucketPlan, ...]

    def __str__(self) -> str:
        paths = {bucket.path for bucket in self.buckets}
        costs = [f"{path}: {cost}" for path, cost in _PATHS.items() if path in paths]
        if any(b.path == "staged" and b.device.type == "cuda" for b in self.buckets):
            costs.append(_NO_ROOM)
        return "\n".join([*map(str, self.buckets), *costs])


def path_of(group: Group, buffer: torch.Tensor, encoded: bool) -> str:
    """The path of a bucket, whose gradients are encoded or not."""
    device = buffer.device
    if group._spans(device):
        return "NCCL"
    if group._stages(device):
        return "pinned host memory"
    if buffer.is_cuda and group.size > 1:
        path = group._cuda_side(device).path_of(buffer)
    else:
        in_window = group.size == 1 or group._core.offset_of(buffer.data_ptr()) >= 0
        path = "in place" if in_window else "staged"
    return "encoded" if encoded and path != "pinned host memory" else path


def explain(
    group: Group, buffer: torch.Tensor, encoded: bool, algorithm: str, parameters: str
) -> BucketPlan:
    """The plan of a bucket with these parameters, whose state has this algorithm."""
    path = path_of(group, buffer, encoded)
    in_order = group._core.in_rank_order(algorithm)
    if encoded and algorithm == "auto":
        chosen, why = "two_shot", "encoded gradients take it at every size"
    elif in_order != algorithm:
        chosen, why = in_order, "gradients take it at every size, whatever the group's table says"
    else:
        plan = group.explain(
            buffer.nbytes, buffer.dtype, algorithm=algorithm, device=buffer.device.type
        )
        chosen, why = plan.algorithm, plan.why
    return BucketPlan(buffer.nbytes, buffer.dtype, buffer.device, path, chosen, why, parameters)


def warn_if_slow(group: Group, buffer: torch.Tensor, encoded: bool) -> None:
    """Logs, once per group, that buckets are copied, and what that costs."""
    path = path_of(group, buffer, encoded)
    if path in _SLOW:
        fallback(group, "buckets are %s: %s; see model.explain()", path, _PATHS[path])
