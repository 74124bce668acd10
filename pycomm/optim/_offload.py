"""Optimizer states in pinned host memory, and the two ways to step CUDA parameters with them.

On the device, the states pass through it in pieces:

  1. In: a piece of the states is copied to one of a few slots on the device, on its own stream.
  2. Step: the kernel of every step runs on the caller's stream, with the states in the slot.
  3. Out: the slot is copied back to the host on a third stream, also during the next forward.

The first ones come in during the end of backward. The device holds the slots.

On the host, the states stay where they are, and the slots are pinned memory:

  1. In: a piece of the gradients is copied to a slot, with the parameters if the step reads them.
  2. Step: the caller's thread waits for the piece, and steps it on torch's threads.
  3. Out: the new parameters are copied to the device, which waits for them before it goes on.

Both ways overlap: while a piece steps, the next one comes in and the last one goes out. A piece has
a fixed number of bytes, however large the parameters are. The device holds each parameter's step
number, and measures norms. The bits are the same, so the faster way is taken: what moves, at the
measured rate of the link, is compared with the measured rate of the step on the host.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import mmap
import os
import sys
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import _C
from pycomm._runtime.host import pinned
from pycomm.optim._cuda_executors import OnCuda
from pycomm.optim._executors import Prepared, Step, Table, is_capturing
from pycomm.optim._storage import BLOCK, CODE8, FP32, MASTER, STORAGE_BYTES, State, on_meta

SLOT_BYTES = 32 << 20  # a copy of this size takes 0.6 ms at 55 GB/s, far longer than to begin it
SLOTS = 3  # one comes in, one steps, one goes out
LEAST_BLOCK_BYTES = 4 << 20  # of memory for states that come one by one
_ALIGNMENT = 256
SCALE_BYTES = 4  # of a block in 8 bits
_WORDS = _C.segment_words
_GAP = _ALIGNMENT  # after a block, so that no copy goes through two blocks
_UNIT = 1024  # a part of a parameter begins at a multiple: kSumBlock of core/optim/square_sum.h
_MEASURED_BYTES = 16 << 20  # each way
_MOST_MEASURED = 1 << 24  # elements of a measured step: more bytes than most caches hold

_log = logging.getLogger("pycomm.optim")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# The states' memory.


class _Pages(mmap.mmap):
    """Pages that are pinned for a device as long as they live.

    They are shared with forked processes. A fork would give this process copies of private pages,
    while the device would go on to use the first ones.
    """

    address = 0
    device: torch.device | None = None  # once they are pinned
    process = 0  # that has pinned them

    def pin(self, device: torch.device) -> None:
        """Pins the pages, or raises RuntimeError."""
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        _C.advise_huge_pages(self.address, len(self))
        with torch.cuda.device(device):
            error = int(_runtime().cudaHostRegister(self.address, len(self), 0))
        if error != 0:
            with contextlib.suppress(RuntimeError):  # the first launch reports the error again
                torch.zeros(1, dtype=torch.uint8, device=device)
            raise RuntimeError(
                f"cannot pin {len(self):,} bytes for optimizer states (CUDA error {error}): raise "
                "the limit of locked memory (ulimit -l), or leave out offload='pinned'"
            )
        self.device, self.process = device, os.getpid()
        pinned[self] = len(self)

    def __del__(self) -> None:
        if self.process == os.getpid() and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)  # a copy may be under way
            _runtime().cudaHostUnregister(self.address)


class PinnedMemory:
    """Host memory for states, pinned for a device, in blocks of exactly the bytes that are needed.

    torch's pinned memory comes in powers of two, which can be twice the states' bytes. Small states
    that come one by one share blocks. A block lives as long as one of its tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[int, weakref.ref[_Pages]] = {}  # by address
        self._addresses: list[int] = []  # of the blocks, in order
        self._newest: _Pages | None = None
        self._placed = 0  # bytes of the newest block

    def reserve(self, sizes: Iterable[int]) -> None:
        """Makes one block for tensors of these bytes, which are placed next."""
        size = sum(map(_aligned, sizes))
        if size > 0 and not self._has_room(size):
            self._newest, self._placed = self._map(size), 0

    def place(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros with the shape, strides and type of a dense tensor."""
        if like.numel() == 0:
            return torch.empty_like(like, device="cpu")
        size = _aligned(like.nbytes)
        if size >= LEAST_BLOCK_BYTES and not self._has_room(size):
            at, pages = 0, self._map(size)  # a block of its own
        else:
            if not self._has_room(size):
                self.reserve([LEAST_BLOCK_BYTES])
            assert self._newest is not None
            at, pages = self._placed, self._newest
            self._placed += size
            if self._placed + _GAP == len(pages):
                self._newest = None  # it is full
        placed = torch.frombuffer(pages, dtype=like.dtype, offset=at, count=like.numel())
        return placed.as_strided(like.shape, like.stride())

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies in this memory; of empty ones, if it lies on the host."""
        if tensor.numel() == 0 or not tensor.is_cpu:
            return tensor.is_cpu
        return self._find(tensor.data_ptr()) is not None

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """The bytes at an address in this memory."""
        pages = self._find(address)
        assert pages is not None
        at = address - pages.address
        return torch.frombuffer(pages, dtype=torch.uint8, offset=at, count=size)

    def _has_room(self, size: int) -> bool:
        return self._newest is not None and self._placed + size < len(self._newest)

    def _map(self, size: int) -> _Pages:
        """A new block for so many bytes."""
        try:
            pages = _Pages(-1, size + _GAP)
        except OSError as error:
            raise MemoryError(f"no memory for {size:,} bytes of optimizer states") from error
        pages.pin(self._device)
        alive = {begin: block for begin, block in self._blocks.items() if block() is not None}
        self._blocks = {**alive, pages.address: weakref.ref(pages)}
        self._addresses = sorted(self._blocks)
        return pages

    def _find(self, address: int) -> _Pages | None:
        """The block at an address."""
        number = bisect.bisect(self._addresses, address) - 1
        pages = self._blocks[self._addresses[number]]() if number >= 0 else None
        return pages if pages is not None and address < pages.address + len(pages) else None


# The pieces of a step.

_Copy = tuple[int, int, int]


@dataclass
class _Piece:
    """What fills a slot at most, of parameters of one table.

    Attributes:
        table: the number of the parameters' table.
        on_host: True if the slot is on the host, for gradients and parameters; otherwise it is on
            the device, for states.
        words: their segments, where addresses of what is in the slot are offsets in it.
        ins: what is copied into the slot: offsets in it, addresses, and bytes.
        outs: what is copied back.
        counted: segments with a step number of their own, and the parameter's number: those that
            begin inside a parameter, because each part's step counts, and on the host all.
        used: bytes of the slot.
    """

    table: int
    on_host: bool
    words: array[int] = field(default_factory=lambda: array("q"))
    ins: list[_Copy] = field(default_factory=list)
    outs: list[_Copy] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)
    used: int = 0

    def add(self, address: int, size: int, goes_in: bool, goes_out: bool) -> int:
        """Adds bytes at an address; returns their offset in the slot."""
        at, self.used = self.used, self.used + _aligned(size)
        if size > 0:  # not of an empty parameter
            for copies, goes in ((self.ins, goes_in), (self.outs, goes_out)):
                if goes:
                    self._add_copy(copies, (at, address, size))
        return at

    def _add_copy(self, copies: list[_Copy], copy: _Copy) -> None:
        if copies and not self.on_host:  # a copy goes through one tensor of the device
            (begin, first, _), (at, address, size) = copies[-1], copy
            if at - begin == address - first:  # it follows the last one, here as there
                copies[-1] = (begin, first, at + size - begin)
                return
        copies.append(copy)

    def segments(self, slot: int, steps: Iterator[int]) -> array[int]:
        """The segments with addresses in a slot, and the next step numbers."""
        words = self.words[:]
        for begin in range(0, len(words), _WORDS):
            for word, _ in _travelling(words[begin : begin + _WORDS], self.on_host):
                words[begin + word] += slot
        for number, _ in self.counted:
            words[number * _WORDS + 9] = next(steps)
        return words


def _storage(segment: Sequence[int], number: int) -> int:
    """How a segment stores its parameter, gradient, weights or states: 0 to 5."""
    return segment[13] >> 8 * number & 255


def _arrays(segment: Sequence[int]) -> list[tuple[int, int]]:
    """A segment's weights and states: the word that has the address, and bytes per block."""
    kinds = [(number, _storage(segment, number)) for number in range(2, 6)]
    found = [(number, STORAGE_BYTES[kind] * BLOCK) for number, kind in kinds if kind]
    return found + [(number + 3, SCALE_BYTES) for number, kind in kinds if kind == CODE8]


def _tensors(segment: Sequence[int]) -> list[tuple[int, int]]:
    """The same for its parameter and gradient."""
    return [(word, STORAGE_BYTES[_storage(segment, word)] * BLOCK) for word in (0, 1)]


def _travelling(segment: Sequence[int], on_host: bool) -> list[tuple[int, int]]:
    """What a step on the host or on the device copies."""
    return _tensors(segment) if on_host else _arrays(segment)


def _reads_parameter(segment: Sequence[int]) -> bool:
    """True if a step reads the parameter, not only the fp32 weights beside it."""
    return _storage(segment, 2) != FP32


def _cut(tables: Sequence[Table], slot: int, on_host: bool) -> list[_Piece]:
    """Cuts the segments of tables into pieces that fit into a slot of so many bytes."""
    pieces: list[_Piece] = []
    parameter = 0
    for number, (_, words) in enumerate(tables):
        pieces.append(_Piece(number, on_host))
        for begin in range(0, len(words), _WORDS):
            _add(words[begin : begin + _WORDS], parameter, pieces, slot)
            parameter += 1
    return pieces


def _add(segment: array[int], parameter: int, pieces: list[_Piece], slot: int) -> None:
    """Adds a segment to the last piece, and what does not fit to new ones."""
    on_host = pieces[-1].on_host
    arrays = _travelling(segment, on_host)
    arrays.sort(key=lambda one: segment[one[0]])  # as they lie in memory
    per_block = sum(size for _, size in arrays)
    count, done = segment[10], 0
    while True:
        piece, part = pieces[-1], count - done
        blocks = (slot - piece.used - _ALIGNMENT * len(arrays)) // max(per_block, 1)
        if part > blocks * BLOCK:
            part = max(blocks, 0) * BLOCK // _UNIT * _UNIT
            if part == 0:
                pieces.append(_Piece(piece.table, on_host))
                continue
        words = segment[:]
        for word, size in _tensors(segment) + _arrays(segment):
            words[word] += done // BLOCK * size
        for word, size in arrays:
            whole = -(-part // BLOCK) * size
            words[word] = piece.add(
                words[word],
                whole if size == SCALE_BYTES else part * size // BLOCK,
                goes_in=word > 0 or _reads_parameter(segment),
                goes_out=word != 1,
            )
        if done or on_host:
            piece.counted.append((len(piece.words) // _WORDS, parameter))
        words[10], words[11] = part, segment[11] + done
        piece.words += words
        done += part
        if done == count:
            return


# Steps.


class TensorBytes:
    """The bytes of dense tensors on a device."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = sorted(filter(torch.numel, tensors), key=torch.Tensor.data_ptr)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """The bytes at an address in one of the tensors."""
        number = bisect.bisect(self._addresses, address) - 1
        tensor, at = self._tensors[number].detach(), address - self._addresses[number]
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[at : at + size]


def _copy(
    stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> torch.cuda.Event:
    """Copies to the first of each pair on a stream; returns an event at the end."""
    with torch.cuda.stream(stream):
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        return event


class Slots:
    """Memory through which pieces pass, and the streams of their copies."""

    def __init__(self, device: torch.device) -> None:
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event] = []  # once the last piece in a slot has gone out
        self._device = device

    def make(self, count: int, size: int, on_host: bool) -> list[int]:
        """Makes `count` slots of at least `size` bytes; returns their addresses."""
        if len(self._slots) < count or any(
            slot.numel() < size or slot.is_cpu != on_host for slot in self._slots
        ):
            current = torch.cuda.current_stream(self._device)
            self._slots = self._on_host(count, size) if on_host else self._on_device(count, size)
            made = current.record_event()
            self._free = [made] * count
        return [slot.data_ptr() for slot in self._slots]

    def _on_host(self, count: int, size: int) -> list[torch.Tensor]:
        memory = PinnedMemory(self._device)
        memory.reserve([size] * count)
        like = torch.empty(size, dtype=torch.uint8, device="meta")
        return [memory.place(like) for _ in range(count)]

    def _on_device(self, count: int, size: int) -> list[torch.Tensor]:
        slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        for slot in slots:
            for stream in (self._in, self._out):
                slot.record_stream(stream)
        return slots

    def follow_current(self) -> None:
        """Lets later pieces come in after what the current stream has been given."""
        current = torch.cuda.current_stream(self._device)
        self._in.wait_event(current.record_event())

    def bring_in(
        self, number: int, piece: _Piece, memory: PinnedMemory | TensorBytes
    ) -> torch.cuda.Event:
        """Copies a piece into a slot; returns an event at the end of the copies."""
        slot = self._slots[number]
        self._in.wait_event(self._free[number])
        return _copy(
            self._in,
            ((slot[at : at + size], memory.bytes_at(where, size)) for at, where, size in piece.ins),
        )

    def bring_out(
        self, number: int, piece: _Piece, memory: PinnedMemory | TensorBytes
    ) -> torch.cuda.Event:
        """Copies a slot back after what the current stream has been given."""
        slot, current = self._slots[number], torch.cuda.current_stream(self._device)
        self._out.wait_event(current.record_event())
        self._free[number] = _copy(
            self._out,
            (
                (memory.bytes_at(where, size), slot[at : at + size])
                for at, where, size in piece.outs
            ),
        )
        return self._free[number]

    def wait(self) -> None:
        """Waits until all pieces have gone out."""
        self._out.synchronize()


class OnCudaFromHost(OnCuda):
    """Steps on a device whose states are in pinned memory."""

    on_host = False

    def __init__(
        self, device: torch.device, stream: int, memory: PinnedMemory, slots: Slots
    ) -> None:
        super().__init__(device, stream)
        self._pinned, self._slots = memory, slots
        self._parts = OnCuda(device, stream)  # steps the pieces; the whole tables are for norms
        self._pieces: list[_Piece] = []
        self._piece_tables: list[Table] = []
        self._own_steps: Sequence[torch.Tensor] = ()
        self._steps = torch.empty(0, dtype=torch.float32, device=device)

    def hold_pieces(self, steps: Sequence[torch.Tensor]) -> None:
        """Prepares for a step of the tables held, in pieces.

        Args:
            steps: the step numbers of the tables' parameters.
        """
        self._own_steps = steps
        self._pieces = _cut(self._tables, SLOT_BYTES, self.on_host)
        counted = [steps[parameter] for piece in self._pieces for _, parameter in piece.counted]
        if counted:
            self._steps = torch.stack(counted).to("cpu" if self.on_host else self._device)
        first = self._steps.data_ptr()
        numbers = iter(range(first, first + 4 * len(counted), 4))
        size = max((piece.used for piece in self._pieces), default=0)
        slots = self._slots.make(min(SLOTS, len(self._pieces)), size, self.on_host)
        self._piece_tables = [
            (self._tables[piece.table][0], piece.segments(slots[n % SLOTS], numbers))
            for n, piece in enumerate(self._pieces)
        ]

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`."""
        norm = self.measure(step)
        self._parts.hold(self._piece_tables)
        current = torch.cuda.current_stream(self._device)
        for number, piece in enumerate(self._pieces):
            slot = number % SLOTS
            current.wait_event(self._slots.bring_in(slot, piece, self._pinned))
            self._parts.step_table(number, step.settings[piece.table], step.control)
            self._slots.bring_out(slot, piece, self._pinned)
        return norm


class OnHostFromCuda(OnCudaFromHost):
    """Steps on the host, where the states are; parameters and gradients are on a device."""

    on_host = True

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings."""
        super().rate(lr)  # raises an error if it is on another device
        return float(lr)

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`."""
        norm = self.measure(step)
        self._slots.follow_current()
        tensors = TensorBytes((*step.params, *step.grads))
        current = torch.cuda.current_stream(self._device)
        arrivals = [
            self._slots.bring_in(slot, piece, tensors)
            for slot, piece in enumerate(self._pieces[:SLOTS])
        ]
        scale, found, clip = (
            None if number is None else number.cpu()
            for number in (step.scale, step.found, step.clip)
        )
        control = step._replace(scale=scale, found=found, clip=clip).control
        if found is not None and found != 0:
            for arrival in arrivals:
                current.wait_event(arrival)  # a program may free the gradients
            return norm
        for number, piece in enumerate(self._pieces):
            slot, later = number % SLOTS, number + SLOTS
            arrivals[number].synchronize()
            words = self._piece_tables[number][1]
            _C.optimizer_step(step.settings[piece.table], words, *control)
            current.wait_event(self._slots.bring_out(slot, piece, tensors))
            if later < len(self._pieces):
                arrivals.append(self._slots.bring_in(slot, self._pieces[later], tensors))
        for own in self._own_steps:
            own.add_(1.0)
        return norm


# The choice of the way.


@functools.cache
def link_rate(device: torch.device) -> float:
    """Bytes per second that go each way between a device and pinned memory, at the same time."""
    ways = []
    for goes_in in (True, False):
        there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
        here = torch.empty_like(there, device="cpu", pin_memory=True)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        ways.append((stream, [(there, here) if goes_in else (here, there)]))
    seconds = []
    for _ in range(4):  # the first time also waits for the current stream
        begin = time.perf_counter()
        for copied in [_copy(*way) for way in ways]:
            copied.synchronize()
        seconds.append(time.perf_counter() - begin)
    return _MEASURED_BYTES / min(seconds)


@functools.cache
def host_rate(rule: int, kinds: int, count: int, _threads: int) -> float:
    """Elements per second of a step of `count` elements on the host, stored as `kinds` says."""
    words = array("q", bytes(8 * _WORDS))
    words[10], words[13] = count, kinds
    arrays = [(word, -(-count // BLOCK) * size) for word, size in _tensors(words) + _arrays(words)]
    memory = {
        word: torch.full((size,), 60, dtype=torch.uint8, device="cpu")  # 0.01 as bf16 and fp32
        for word, size in (*arrays, (9, 4))
    }
    for word, tensor in memory.items():
        words[word] = tensor.data_ptr()
    settings = _C.OptimizerSettings(
        rule, lr=1e-3, beta1=0.9, beta2=0.99, momentum=0.9 if _storage(words, 3) else 0.0,
        amsgrad=_storage(words, 5) != 0,
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        _C.optimizer_step(settings, words, 0, 0, 0)
        seconds.append(time.perf_counter() - begin)
    return count / min(seconds)


def is_faster_on_host(optimizer: Any, device: torch.device, forms: Counter[int]) -> bool:
    """Compares both ways to step, and logs what it finds.

    Each way takes as long as the slowest of what it does at the same time.

    Args:
        optimizer: the optimizer.
        device: the device.
        forms: the number of elements of each form, which is the last word of their segments.
    """
    link, rule, threads = link_rate(device), _C.rules[optimizer._rule], torch.get_num_threads()
    states = down = up = on_host = 0.0
    for kinds, count in (+forms).items():  # without empty ones
        words = array("q", bytes(8 * _WORDS))
        words[13] = kinds
        (_, param), (_, grad) = _tensors(words)
        states += count / BLOCK * sum(size for _, size in _arrays(words))
        down += count / BLOCK * (grad + (param if _reads_parameter(words) else 0))
        up += count / BLOCK * param
        on_host += count / host_rate(rule, kinds, min(count, _MOST_MEASURED), threads)
    seconds = {"device": states / link, "host": max(down / link, up / link, on_host)}
    faster = min(seconds, key=seconds.__getitem__)
    _log.info(
        "%s with offload='pinned' steps on the %s: %.3g ms for %.3g MB of states each way, or %.3g "
        "ms for %.3g MB of gradients and parameters down, %.3g MB up, and %.3g ms of steps; the "
        "link moves %.3g GB/s each way",
        *(type(optimizer).__name__, faster, seconds["device"] * 1e3, states / 1e6),
        *(seconds["host"] * 1e3, down / 1e6, up / 1e6, on_host * 1e3, link / 1e9),
    )
    return faster == "host"


# An optimizer's states.


class OffloadedStates:
    """States of an optimizer's CUDA parameters in pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = PinnedMemory(device)
        self._slots = Slots(device)
        self._forms: set[int] = set()  # for which the way has been chosen
        self._kind = OnCudaFromHost

    def reserve(self, states: Iterable[State]) -> None:
        """Makes room for new states, in one block of memory."""
        self._memory.reserve(
            tensor.nbytes for state in states for name, tensor in state.items() if name != "step"
        )

    def zero_state(self, own: torch.Tensor, state: State) -> State:
        """Gives memory to a state that has none, for elements before their first step."""
        for name, tensor in state.items():
            if name != "step":
                state[name] = self._memory.place(tensor)
        if MASTER in state:
            state[MASTER].copy_(own)
        return state

    def take_in(self, state: State, names: Iterable[str]) -> None:
        """Moves states of these names that lie elsewhere into this memory."""
        for name in names:
            tensor = state.get(name)
            if name != "step" and tensor is not None and not self._memory.holds(tensor):
                state[name] = self._memory.place(on_meta(tensor)).copy_(tensor)

    def wait(self) -> None:
        """Waits until the states are those of the last step."""
        self._slots.wait()

    def executor(self, optimizer: Any, prepared: Prepared) -> OnCudaFromHost:
        """The executor of a step; it reuses the last step's if possible."""
        device, tables, last = self.device, prepared.tables, optimizer._on_cuda
        forms = Counter[int]()
        for _, words in tables:
            for begin in range(0, len(words), _WORDS):
                forms[words[begin + 13]] += words[begin + 10]
        if forms.keys() != self._forms:
            self._forms = set(forms)
            faster = is_faster_on_host(optimizer, device, forms)
            self._kind = OnHostFromCuda if faster else OnCudaFromHost
        stream = torch.cuda.current_stream(device).cuda_stream
        if type(last) is not self._kind or not last.is_for(device, stream):
            last = self._kind(device, stream, self._memory, self._slots)
        last.hold(tables)
        last.hold_pieces([optimizer.state[param]["step"] for param in prepared.params])
        return last


def check(optimizer: Any) -> None:
    """Raises ValueError if an optimizer cannot have its option `offload`."""
    name, offload = type(optimizer).__name__, optimizer.offload
    if offload != "pinned":
        raise ValueError(f"offload must be None or 'pinned', got {offload!r}")
    if optimizer._needs_whole_norms:
        raise ValueError(
            f"{name} takes no offload={offload!r}, because its step needs all states of a "
            "parameter at once: leave it out"
        )


def prepare(optimizer: Any) -> None:
    """Waits for the states of the last step, and makes room for those that this one makes.

    Raises:
        ValueError: parameters are sharded or DTensors.
        RuntimeError: the step is being captured.
    """
    name, option = type(optimizer).__name__, f"offload={optimizer.offload!r}"
    params = optimizer._params()
    if not params:
        return
    if optimizer._divisions() or optimizer._has_dtensors:
        kind = "DTensors" if optimizer._has_dtensors else "sharded parameters"
        raise ValueError(f"{name} with {option} takes no {kind}: leave this option out")
    if is_capturing(params[0].device):
        raise RuntimeError(f"{name}: a step with {option} cannot be captured")
    optimizer._await_states()
    new = [
        optimizer._zero_state(param, on_meta(param), group)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None and not optimizer.state.get(param)
    ]
    if new and (offloaded := optimizer._offloaded_for(params[0])) is not None:
        offloaded.reserve(new)
