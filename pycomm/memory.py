"""A report of the memory that training uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pycomm._training.flat import place_of
from pycomm.data_parallel import DataParallel

MASTERS = ("master_param", "remainder")


@dataclass(frozen=True)
class MemoryReport:
    """The memory of training by kind; ``print`` shows a table.

    Attributes:
        elements: the number of elements of all parameters.
        bytes: the bytes of each kind; each storage counts once.
    """

    elements: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.bytes.values())

    def per_parameter(self, kind: str) -> float:
        """Bytes of a kind per element of the parameters."""
        return self.bytes[kind] / max(self.elements, 1)

    def __str__(self) -> str:
        lines = [f"{'':16}{'MiB':>12}  bytes per parameter   share"]
        lines += [self._line(kind, size) for kind, size in self.bytes.items()]
        return "\n".join([*lines, self._line("total", self.total)])

    def _line(self, kind: str, size: int) -> str:
        per_parameter, share = size / max(self.elements, 1), size / max(self.total, 1)
        return f"{kind:16}{size / 2**20:12.3f}  {per_parameter:19.3f}  {share:6.1%}"

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
        axes.set(xlim=(0, left or 1), yticks=[], xlabel=f"bytes per parameter: {left:.3g} in total")
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.legend(ncols=len(self.bytes), fontsize="x-small", loc="lower center",
                    bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip
        figure.savefig(file, dpi=150)


def memory_report(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    communication: Iterable[torch.Tensor] = (),
) -> MemoryReport:
    """Counts the memory that training holds on this rank between steps, with any optimizer.

    Args:
        model: counts its parameters, its buffers and its gradients, or the memory reserved for
            gradients. For a :class:`pycomm.DataParallel` in it, also counts the residuals and the
            group's staging areas.
        optimizer: counts its present states; most are made by the first step. If it wraps another
            optimizer, as ``ZeroRedundancyOptimizer`` does, counts that one's states, too.
        communication: further tensors that the exchange of gradients needs, such as
            ``comm_state.tensors()`` of a hook.

    Returns:
        The bytes by kind.
    """
    params = list(model.parameters())
    named = list(_states(optimizer))
    wrappers = [module for module in model.modules() if isinstance(module, DataParallel)]
    counted = _Storages()
    sizes = {
        "parameters": counted.add(params),
        "buffers": counted.add(model.buffers()),
        "gradients": counted.add(_gradients(params)),
        "master weights": counted.add(tensor for name, tensor in named if name in MASTERS),
        "states": counted.add(tensor for name, tensor in named if name not in MASTERS),
        "communication": counted.add(communication),
    }
    for wrapper in wrappers:
        sizes["communication"] += counted.add(wrapper.comm_state.tensors())
    groups = {wrapper.comm_state.group for wrapper in wrappers}
    sizes["communication"] += sum(group.staging_bytes for group in groups)
    return MemoryReport(sum(param.numel() for param in params), sizes)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the optimizer's states, and of optimizers that it wraps, with their names."""
    for state in optimizer.state.values():
        yield from _named("", state)
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            yield from _states(value)


def _named(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, which may be a list: LBFGS keeps its history in one."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _named(str(key), part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _named(name, part)


def _gradients(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Gradients, and the flat memory that is reserved for them."""
    for param in params:
        if param.grad is not None:
            yield param.grad
        place = place_of(param)
        if place is not None:
            yield place.piece.gradients


class _Storages:
    """Counts each storage once, padding included, even if many tensors are views of it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the tensors' storages that have not been counted yet."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        new = storages.keys() - self._seen
        self._seen |= new
        return sum(storages[address].untyped_storage().nbytes() for address in new)
