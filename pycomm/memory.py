"""A report of the memory that training uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pycomm._inputs import local
from pycomm._training.flat import home_of, place_of
from pycomm._training.parameters import part_of
from pycomm._training.shards import Shards
from pycomm.data_parallel import DataParallel

MASTERS = ("master_param", "remainder")


@dataclass(frozen=True)
class ShardFormula:
    """The memory of sharded training by its formula, in bytes per element of the parameters.

    Attributes:
        parameters: p, the bytes of parameters.
        gradients: g, the bytes of gradients.
        states: K, the bytes of master weights and optimizer states on all ranks together.
        ranks: n, the number of ranks that divide the states.
        divides_gradients: True if the ranks divide the gradients, too.
    """

    parameters: float
    gradients: float
    states: float
    ranks: int
    divides_gradients: bool = False

    @property
    def per_parameter(self) -> float:
        """The bytes on one rank, if shards have equal sizes, without buckets."""
        if self.divides_gradients:
            return self.parameters + (self.gradients + self.states) / self.ranks
        return self.parameters + self.gradients + self.states / self.ranks

    def __str__(self) -> str:
        p, g, k = (f"{size:.4g}" for size in (self.parameters, self.gradients, self.states))
        if self.divides_gradients:
            sums = f"p + (g + K)/n = {p} + ({g} + {k})/{self.ranks}"
        else:
            sums = f"p + g + K/n = {p} + {g} + {k}/{self.ranks}"
        return f"{sums} = {self.per_parameter:.4g} bytes per parameter"


@dataclass(frozen=True)
class MemoryReport:
    """The memory of training by kind; ``print`` shows a table.

    Attributes:
        elements: the number of elements of all parameters.
        bytes: the bytes of each kind; each storage counts once.
        formula: the memory that is expected if a wrapper shards the parameters' optimizer states.
    """

    elements: int
    bytes: dict[str, int]
    formula: ShardFormula | None = None

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
        lines.append(self._line("total", self.total))
        if self.formula is not None:
            lines.append(f"{'formula':16}{self.formula}")
        return "\n".join(lines)

    def _line(self, kind: str, size: int) -> str:
        per_parameter, share = size / max(self.elements, 1), size / max(self.total, 1)
        return f"{kind:16}{size / 2**20:12.3f}  {per_parameter:19.3f}  {share:6.1%}"

    def plot(self, file: str | Path) -> None:
        """Draws bytes per parameter as a bar, one piece for each kind. Needs matplotlib."""
        plot_reports({"": self}, file)


def plot_reports(reports: Mapping[str, MemoryReport], file: str | Path) -> None:
    """Draws bytes per parameter of several reports, a bar for each. Needs matplotlib.

    Args:
        reports: the reports by the names of their bars, the first one on top.
        file: the picture's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.1 + 0.7 * len(reports)), layout="constrained")
    axes = figure.add_subplot()
    kinds = list(dict.fromkeys(kind for report in reports.values() for kind in report.bytes))
    rows = range(len(reports))
    lefts = [0.0] * len(reports)
    for kind in kinds:
        widths = [report.per_parameter(kind) for report in reports.values()]
        label = f"{kind}: {widths[0]:.3g}" if len(reports) == 1 else kind
        axes.barh(rows, widths, left=lefts, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    names = [f"{name}  {total:.3g}".strip() for name, total in zip(reports, lefts, strict=True)]
    axes.set(xlim=(0, max(lefts) or 1), xlabel="bytes per parameter")
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.legend(ncols=3, fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0),
                frameon=False)  # fmt: skip
    figure.savefig(file, dpi=150)


def memory_report(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    communication: Iterable[torch.Tensor] = (),
) -> MemoryReport:
    """Counts the memory that training holds on this rank between steps, with any optimizer.

    Args:
        model: counts its parameters, its buffers and its gradients, or the memory reserved for
            gradients. For a :class:`pycomm.DataParallel` in it, also counts the residuals, the
            group's staging areas, and with `shard` the memory through which ranks exchange norms,
            the buckets of divided gradients, and what owners keep with `publish`.
        optimizer: counts its present states; most are made by the first step. With `replicas`, both
            copies and master weights count as states. If it wraps another optimizer, as
            ``ZeroRedundancyOptimizer`` does, also counts the wrapped optimizer's states.
        communication: further tensors that the exchange of gradients needs, such as
            ``comm_state.tensors()`` of a hook.

    Returns:
        The bytes by kind.
    """
    params = list(model.parameters())
    named = list(_states(optimizer))
    wrappers = [module for module in model.modules() if isinstance(module, DataParallel)]
    counted = _Storages()
    in_arenas = _count_arenas(params, counted)
    sizes = {
        "parameters": counted.add(map(_memory_of, params)),
        "buffers": counted.add(model.buffers()),
        "gradients": counted.add(_gradients(params)),
        "master weights": 0,
        "states": counted.add(tensor for name, tensor in named if name not in MASTERS),
        "communication": counted.add(communication),
    }
    masters = (tensor for name, tensor in named if name in MASTERS)
    sizes["master weights"] = counted.add(masters)  # with replicas, they lie among the states
    for wrapper in wrappers:
        sizes["communication"] += counted.add(wrapper.comm_state.tensors())
    groups = {wrapper.comm_state.group for wrapper in wrappers}
    sizes["communication"] += sum(group.staging_bytes for group in groups)
    for kind, size in in_arenas.items():
        sizes[kind] += size
    held = sizes["master weights"] + sizes["states"]
    return MemoryReport(sum(map(torch.numel, params)), sizes, _formula(params, held))


def _shards(params: Iterable[torch.Tensor]) -> set[Shards]:
    return {part.shards for param in params if (part := part_of(param)) is not None}


def _count_arenas(params: Iterable[torch.Tensor], counted: _Storages) -> dict[str, int]:
    """Bytes by kind in the shards' arenas, in which several kinds share a storage."""
    sizes = dict.fromkeys(("parameters", "gradients", "communication"), 0)
    for shards in _shards(params):
        pieces = shards.layout.pieces
        parameters = sum(p.parameters.nbytes for p in pieces if p.parameters is not None)
        gradients = sum(piece.gradients.nbytes for piece in pieces) if shards.averages else 0
        sizes["parameters"] += parameters
        sizes["gradients"] += gradients
        if shards.own_gradients is not None:
            sizes["gradients"] += counted.add(shards.own_gradients.buffers)
            sizes["communication"] += counted.add([shards.own_gradients.memory])
        if shards.all_gather is not None:
            sizes["communication"] += counted.add(shards.all_gather.errors)
        sizes["communication"] += counted.add([shards.arena]) - parameters - gradients
    return sizes


def _formula(params: Iterable[torch.Tensor], held: int) -> ShardFormula | None:
    """The expected memory; `held` are the bytes of this rank's states."""
    params = list(params)
    parts = [part for param in params if (part := part_of(param)) is not None]
    ranks = {part.shards.group.size for part in parts}
    if len(ranks) != 1:
        return None
    elements = sum(map(torch.numel, params))
    sharded = [param for param in params if part_of(param) is not None]
    owned = sum(part.own.numel() for part in parts)
    whole = sum(map(torch.numel, sharded))
    return ShardFormula(
        parameters=sum(param.nbytes for param in params) / elements,
        gradients=sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in sharded) / elements,
        states=held / max(owned, 1) * whole / elements,
        ranks=ranks.pop(),
        divides_gradients=any(part.shards.own_gradients is not None for part in parts),
    )


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


def _memory_of(param: torch.Tensor) -> torch.Tensor:
    """The flat memory that a parameter lies in; itself if it lies elsewhere."""
    home = home_of(param)
    whole = None if home is None else home.piece.parameters
    return param if whole is None else whole


def _gradients(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Gradients, and the flat memory that is reserved for them."""
    for param in params:
        if param.grad is not None:
            yield param.grad
        place = place_of(param)
        if place is not None and not place.piece.gradients.is_meta:
            yield place.piece.gradients


class _Storages:
    """Counts each storage once, padding included, even if many tensors are views of it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the tensors' storages that have not been counted yet."""
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in map(local, tensors)}
        new = storages.keys() - self._seen
        self._seen |= new
        return sum(storages[address].untyped_storage().nbytes() for address in new)
