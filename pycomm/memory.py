"""Reports of the memory that training uses: what it holds, and its peaks in each phase of a step.

.. code-block:: python

    print(pycomm.memory.report(model, optimizer))  # between steps

    with pycomm.memory.record(model, optimizer) as recording:
        for batch in batches:
            ...  # some steps
    print(recording)

A recording is a ``TorchDispatchMode``, as torch's ``MemTracker`` is. The tracker knows neither the
optimizer's step nor memory of this package, stops at a second step, and its hooks are the
process's, so that ranks that are threads would share them.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pycomm._init import resolve_group
from pycomm._inputs import local
from pycomm._peaks import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GAUGES,
    KINDS,
    OTHER,
    PHASES,
    REST,
    STEP,
    MemoryPeak,
    larger_values,
    memory_numbers,
    memory_peaks,
)
from pycomm._runtime import host
from pycomm._runtime.torch_private import TorchDispatchMode, backward_id, pytree
from pycomm._training.agree import gather_rows
from pycomm._training.flat import home_of, place_of
from pycomm._training.parameters import part_of
from pycomm._training.shards import Shards
from pycomm.data_parallel import DataParallel

if TYPE_CHECKING:
    from pycomm._training.comm_state import CommState
    from pycomm._training.local_sgd import LocalSGDState
    from pycomm.group import Group

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


def report(
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
    return _report_of(model, _take_census(model, optimizer, _comm_states(model), communication))


memory_report = report


# What training holds.


class _Census:
    """The storages that training holds: each once, padding included, with its bytes by kind.

    Attributes:
        storages: by address, a storage and its bytes of each kind.
        outside: bytes of each kind that are in no tensor.
    """

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, dict[str, int]]] = {}
        self.outside: dict[str, int] = {}

    def add(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Adds the tensors' storages that are new."""
        for tensor in map(local, tensors):
            storage = tensor.untyped_storage()
            self.storages.setdefault(storage.data_ptr(), (storage, {kind: storage.nbytes()}))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind."""
        return _sums([self.outside, *(by_kind for _, by_kind in self.storages.values())])


def _sums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums = dict.fromkeys(KINDS, 0)
    for part in parts:
        for kind, size in part.items():
            sums[kind] = sums.get(kind, 0) + size
    return sums


def _comm_states(model: torch.nn.Module) -> list[CommState | LocalSGDState]:
    return [module.comm_state for module in model.modules() if isinstance(module, DataParallel)]


def _take_census(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    comm_states: Sequence[CommState | LocalSGDState],
    communication: Iterable[torch.Tensor] = (),
) -> _Census:
    params = list(model.parameters())
    named = list(_states(optimizer))
    census = _Census()
    _add_arenas(params, census)
    census.add("parameters", map(_memory_of, params))
    census.add("buffers", model.buffers())
    census.add("gradients", _gradients(params))
    census.add("states", (tensor for name, tensor in named if name not in MASTERS))
    census.add("communication", communication)
    # With replicas, master weights lie among the states.
    census.add("master weights", (tensor for name, tensor in named if name in MASTERS))
    for state in comm_states:
        census.add("communication", state.tensors())
    groups = {state.group for state in comm_states}
    census.outside["communication"] = sum(group.staging_bytes for group in groups)
    return census


def _report_of(model: torch.nn.Module, census: _Census) -> MemoryReport:
    params, sizes = list(model.parameters()), census.bytes
    held = sizes["master weights"] + sizes["states"]
    return MemoryReport(sum(map(torch.numel, params)), sizes, _formula(params, held))


def _shards(params: Iterable[torch.Tensor]) -> set[Shards]:
    return {part.shards for param in params if (part := part_of(param)) is not None}


def _add_arenas(params: Iterable[torch.Tensor], census: _Census) -> None:
    """Adds the shards' memory; in their arenas, several kinds share a storage."""
    for shards in _shards(params):
        pieces = shards.layout.pieces
        parameters = sum(p.parameters.nbytes for p in pieces if p.parameters is not None)
        gradients = sum(piece.gradients.nbytes for piece in pieces) if shards.averages else 0
        arena = shards.arena.untyped_storage()
        others = arena.nbytes() - parameters - gradients
        census.storages[arena.data_ptr()] = (
            arena,
            {"parameters": parameters, "gradients": gradients, "communication": others},
        )
        if shards.own_gradients is not None:
            census.add("gradients", shards.own_gradients.buffers)
            census.add("communication", [shards.own_gradients.memory])
        if shards.all_gather is not None:
            census.add("communication", shards.all_gather.errors)


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
        place = place_of(param)
        if place is not None and not place.piece.gradients.is_meta:
            yield place.piece.gradients
            if param.grad is not None and place.holds_gradient(param.grad):
                continue
        if param.grad is not None:
            yield param.grad


# Peaks in each phase of a step.

_MIB = 2**20


@dataclass
class MemoryRecording:
    """The peaks of training steps by phase; ``print`` shows a table.

    Attributes:
        peaks: the largest peak of each phase so far. ``"forward"`` ends when backward begins, so it
            includes the loss. ``"backward"`` ends with the last parameter's gradient.
            ``"exchange"`` is what then remains until the optimizer's step: the rest of the
            exchange, and what the loop does with gradients, such as clipping. ``"step"`` is the
            optimizer's step; with `shard`, it exchanges gradients and parameters. ``"other"`` is
            between a step and the next forward.
        steps: the number of optimizer steps.
        report: what training held at the end of the last phase.
        ended_in: the phase in which an exception has ended the recording, if one has.
    """

    peaks: dict[str, MemoryPeak] = field(default_factory=dict)
    steps: int = 0
    report: MemoryReport | None = None
    ended_in: str | None = None

    def over_ranks(self, group: Group | None = None) -> MemoryRecording:
        """Returns the largest peaks of all ranks; a collective call.

        Args:
            group: by default the default group.

        Returns:
            For each phase, the peak of the rank whose tensors took the most, with that rank's
            gauges.
        """
        group = resolve_group(group)
        rows = gather_rows(memory_numbers(self.peaks), group)
        every = [memory_peaks(row, rank) for rank, row in enumerate(rows)]
        peaks = {}
        for phase in PHASES:
            found = [each[phase] for each in every if phase in each]
            if found:
                peaks[phase] = max(found, key=lambda peak: peak.total)
        return MemoryRecording(peaks, self.steps, self.report, self.ended_in)

    def __str__(self) -> str:
        peaks = {phase: self.peaks[phase] for phase in PHASES if phase in self.peaks}
        parts = [{**peak.bytes, "total": peak.total, **peak.gauges} for peak in peaks.values()]
        every = (*KINDS, REST, "total", *GAUGES)
        columns = [name for name in every if any(part.get(name) for part in parts)]
        widths = [max(len(name), 9) for name in columns]
        cells = [f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)]
        lines = ["  ".join([f"{'peak, MiB':9}", *cells, "rank"])]
        for (phase, peak), part in zip(peaks.items(), parts, strict=True):
            cells = [
                f"{part[name] / _MIB:{width}.1f}" if name in part else " " * width
                for name, width in zip(columns, widths, strict=True)
            ]
            rank = "" if peak.rank is None else str(peak.rank)
            lines.append("  ".join([f"{phase:9}", *cells, f"{rank:>4}"]).rstrip())
        if self.ended_in is not None:
            lines.append(f"An exception has ended the recording in this phase: {self.ended_in}.")
        if self.report is not None and self.report.formula is not None:
            held = self.report.total - self.report.bytes["communication"]
            measured = held / max(self.report.elements, 1)
            lines.append(f"formula: {self.report.formula}; measured: {measured:.4g}")
        return "\n".join(lines)


@contextlib.contextmanager
def record(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: CommState | LocalSGDState | None = None,
) -> Iterator[MemoryRecording]:
    """Records the peaks of memory in each phase of the training steps in a ``with`` block.

    If an exception ends the block, for example because memory is exhausted, the recording so far is
    logged as an error of the logger ``pycomm.memory``.

    Each operation of torch on this thread and in its backwards takes about 20 us longer. What
    compiled models allocate inside is not seen: the total lacks it, unlike the gauges. Peaks of
    ``torch.cuda.memory_stats``, of its pinned memory, and of the process's resident memory
    (``VmHWM``) are reset at each phase. Ranks that are threads share these, so their gauges are
    those of all ranks together.

    Tensors count if :func:`report` knows them, or if operations of torch make them in the block.
    Storages that change their size, as those of FSDP, count with their first size.

    Args:
        model: as for :func:`report`; call the same object in the block.
        optimizer: as for :func:`report`.
        state: a state of :mod:`pycomm.hooks`, for a model that torch's DistributedDataParallel
            wraps.

    Yields:
        The recording, which grows with each phase.

    Raises:
        ValueError: the model's parameters lie on several devices.
    """
    recording = MemoryRecording()
    comm_states = _comm_states(model) if state is None else [*_comm_states(model), state]
    recorder = _Recorder(model, optimizer, comm_states, recording)
    try:
        with recorder.hooked(), recorder:
            yield recording
    except BaseException:
        recording.ended_in = recorder.phase
        with contextlib.suppress(RuntimeError):  # the device may be unusable
            recorder.begin(OTHER)
        logging.getLogger("pycomm.memory").error("%s", recording)
        raise
    recorder.begin(OTHER)


@dataclass(eq=False, slots=True)
class _Block:
    """A storage that lives or has lived, with its bytes by kind."""

    bytes: Mapping[str, int]


class _Recorder(TorchDispatchMode):
    """Follows the storages that live, and the phases of steps.

    A phase's events are births and deaths of storages. Its peak is found when it has ended, because
    only then is it known which storages are gradients or states.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm_states: Sequence[CommState | LocalSGDState],
        recording: MemoryRecording,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"model must have its parameters on one device, got {names}")
        self.phase = OTHER
        self._model, self._optimizer = model, optimizer
        self._comm_states, self._recording = comm_states, recording
        self._device = next(iter(devices), torch.device("cpu"))
        self._rank = comm_states[0].group.rank if comm_states else None
        self._living: dict[int, _Block] = {}  # by address
        self._before: set[_Block] = set()  # lived when the phase began
        self._events: list[tuple[_Block, bool]] = []  # True: a birth
        self._gradients_end: int | None = None  # the number of events up to the last gradient
        self._backward: dict[str, int] = {}  # gauges up to the last gradient
        _read_gauges(self._device)
        self._close(OTHER)
        recording.peaks.clear()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Follows forwards, gradients and steps."""
        hooks = [
            self._model.register_forward_pre_hook(self._before_forward, prepend=True),
            self._optimizer.register_step_pre_hook(lambda *_: self.begin(STEP)),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(self._note_gradient))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to go on; else functions that run first in a recording stay eager."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and notes storages that it has made."""
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # such as DTensor, whose operations on plain tensors follow
        if backward_id() >= 0 and self.phase in (FORWARD, OTHER):
            self.begin(BACKWARD)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._note(tensor.untyped_storage())
        return result

    def begin(self, phase: str) -> None:
        """Ends the current phase, and begins another."""
        self._close(self.phase)
        self.phase = phase

    def _before_forward(self, *_: Any) -> None:
        if backward_id() < 0:  # else a checkpoint's
            self.begin(FORWARD)

    def _after_step(self, *_: Any) -> None:
        self._recording.steps += 1
        self.begin(OTHER)

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._gradients_end = len(self._events)
        self._backward = larger_values(self._backward, _read_gauges(self._device))

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address and address not in self._living:
            self._events.append((self._follow(address, storage, {REST: storage.nbytes()}), True))

    def _follow(
        self, address: int, storage: torch.UntypedStorage, by_kind: Mapping[str, int]
    ) -> _Block:
        block = self._living[address] = _Block(by_kind)
        weakref.finalize(storage, self._note_death, address, block).atexit = False
        return block

    def _note_death(self, address: int, block: _Block) -> None:
        self._events.append((block, False))
        if self._living.get(address) is block:
            del self._living[address]

    def _close(self, phase: str) -> None:
        """Finds the peak of a phase that ends."""
        census = _take_census(self._model, self._optimizer, self._comm_states)
        for address, (storage, by_kind) in census.storages.items():
            if address in self._living:
                self._living[address].bytes = by_kind
            elif address:  # no operation has made it
                self._before.add(self._follow(address, storage, by_kind))
        events, self._events = self._events, []
        gauges = _read_gauges(self._device)
        if phase == BACKWARD and (end := self._gradients_end) is not None:
            self._take(BACKWARD, events[:end], census.outside, self._backward)
            phase, events = EXCHANGE, events[end:]
            self._gradients_end, self._backward = None, {}
        self._take(phase, events, census.outside, gauges)
        self._recording.report = _report_of(self._model, census)
        for state in self._comm_states:
            state.group._core.show_memory(memory_numbers(self._recording.peaks))

    def _take(
        self,
        phase: str,
        events: Sequence[tuple[_Block, bool]],
        outside: Mapping[str, int],
        gauges: Mapping[str, int],
    ) -> None:
        """Adds the peak of a phase with these events to the recording."""
        most = held = at = 0  # relative to the beginning
        for number, (block, born) in enumerate(events, 1):
            held += sum(block.bytes.values()) * (1 if born else -1)
            if held > most:
                most, at = held, number
        self._apply(events[:at])
        by_kind = _sums([outside, *(block.bytes for block in self._before)])
        self._apply(events[at:])
        peak = MemoryPeak({REST: 0, **by_kind}, gauges, self._rank)
        self._recording.peaks[phase] = peak.or_larger(self._recording.peaks.get(phase))

    def _apply(self, events: Iterable[tuple[_Block, bool]]) -> None:
        for block, born in events:
            if born:
                self._before.add(block)
            else:
                self._before.discard(block)


def _read_gauges(device: torch.device) -> dict[str, int]:
    """The gauges' peaks since the last reading."""
    gauges = {"resident": _peak_resident()}
    if device.type == "cuda":
        stats, pinned = torch.cuda.memory_stats(device), torch.cuda.host_memory_stats()
        free, total = torch.cuda.mem_get_info(device)
        gauges["allocated"] = stats.get("allocated_bytes.all.peak", 0)
        gauges["reserved"] = stats.get("reserved_bytes.all.peak", 0)
        gauges["outside torch"] = total - free - stats.get("reserved_bytes.all.current", 0)
        gauges["pinned"] = pinned.get("allocated_bytes.peak", 0) + _pinned_beside_torch()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    return gauges


def _pinned_beside_torch() -> int:
    owners = [ref() for ref in host.pinned.keyrefs()]  # other threads may add some meanwhile
    return sum(host.pinned.get(owner, 0) for owner in owners if owner is not None)


def _peak_resident() -> int:
    """The process's peak of resident memory since the last call, or ever if it cannot be reset."""
    status = Path("/proc/self/status").read_text()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.split("VmHWM:", 1)[1].split(maxsplit=1)[0])
