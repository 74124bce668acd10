"""Where the memory of training goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

KINDS = ("parameters", "gradients", "master weights", "states", "communication")
MASTERS = ("master_param", "remainder")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by kind; ``print`` shows a table.

    Attributes:
        elements: of all parameters.
        bytes: by kind; each storage counts once.
    """

    elements: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())

    def per_parameter(self, kind: str) -> float:
        """Bytes of a kind per element of the parameters."""
        return self.bytes[kind] / max(self.elements, 1)

    def __str__(self) -> str:
        lines = [f"{'':16}{'MiB':>12}  bytes per parameter"]
        lines += [self._line(kind, size) for kind, size in self.bytes.items()]
        return "\n".join([*lines, self._line("total", self.total)])

    def _line(self, kind: str, size: int) -> str:
        return f"{kind:16}{size / 2**20:12.3f}  {size / max(self.elements, 1):19.3f}"

    def plot(self, file: str | Path) -> None:
        """Draws bytes per parameter as a bar, one piece for each kind. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 1.8), layout="constrained")
        axes = figure.add_subplot()
        left = 0.0
        for kind in self.bytes:
            width = self.per_parameter(kind)
            axes.barh(0, width, left=left, label=f"{kind}: {width:.3g}")
            left += width
        axes.set_yticks([])
        axes.set_xlabel("bytes per parameter")
        axes.legend(ncols=len(self.bytes), fontsize="x-small", loc="lower center",
                    bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip
        figure.savefig(file, dpi=150)


def memory_report(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    communication: Iterable[torch.Tensor] = (),
) -> MemoryReport:
    """Counts what training holds between steps, of any optimizer.

    Args:
        model: its parameters, and gradients where there are any.
        optimizer: its states, as they are now: most are made by the first step.
        communication: tensors that exchanging gradients needs, such as residuals.
    """
    seen: set[int] = set()
    params = list(model.parameters())
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    named = [
        item for state in states for item in state.items() if isinstance(item[1], torch.Tensor)
    ]
    kinds = (
        params,
        [param.grad for param in params if param.grad is not None],
        [tensor for name, tensor in named if name in MASTERS],
        [tensor for name, tensor in named if name not in MASTERS],
        communication,
    )
    counted = {kind: _bytes(tensors, seen) for kind, tensors in zip(KINDS, kinds, strict=True)}
    return MemoryReport(sum(param.numel() for param in params), counted)


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Of whole storages, which views of a flat buffer share, padding included."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
