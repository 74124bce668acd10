"""Optimizer states in pinned host memory, which pass through the device in pieces.

A step of CUDA parameters whose states lie on the host:

  1. In: a piece of the states is copied to one of a few slots on the device, on its own stream.
  2. Step: the kernel of every step runs on the caller's stream, with the states in the slot.
  3. Out: the slot is copied back to the host on a third stream, also during the next forward.

While a piece steps, the next one comes in and the last one goes out. The first ones come in during
the end of backward. A step moves all states once in each direction: 8 bytes per parameter for two
moments in fp32, 2 in 8 bits, 4 more for master weights (2 for remainders). A piece has a fixed
number of bytes, however large the parameters are. The device holds the slots and each parameter's
step number. The bits are the bits of a step on the device.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import sys
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import _C
from pycomm._runtime.host import pinned
from pycomm.optim._cuda_executors import OnCuda
from pycomm.optim._executors import Step, Table, is_capturing
from pycomm.optim._storage import BLOCK, CODE8, MASTER, STORAGE_BYTES, State, on_meta

SLOT_BYTES = 32 << 20  # a copy of this size takes 0.6 ms at 55 GB/s, far longer than to begin it
SLOTS = 3  # one comes in, one steps, one goes out
LEAST_BLOCK_BYTES = 4 << 20  # of memory for states that come one by one
_ALIGNMENT = 256
SCALE_BYTES = 4  # of a block in 8 bits
_WORDS = _C.segment_words
_GAP = _ALIGNMENT  # after a block, so that no copy goes through two blocks
_UNIT = 1024  # a part of a parameter begins at a multiple: kSumBlock of core/optim/square_sum.h


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


@dataclass
class _Piece:
    """States that fill a slot at most, of parameters of one table.

    Attributes:
        table: the number of the parameters' table.
        words: their segments, where addresses of states are offsets in the slot.
        copies: offsets in the slot, addresses on the host, and bytes.
        counted: segments that begin inside a parameter, and the parameter's number. Such a part has
            a step number of its own, because each part's step counts.
        used: bytes of the slot.
    """

    table: int
    words: array[int] = field(default_factory=lambda: array("q"))
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)
    used: int = 0

    def add(self, host: int, size: int) -> int:
        """Adds bytes on the host; returns their offset in the slot."""
        at, self.used = self.used, self.used + _aligned(size)
        if size == 0:  # of an empty parameter
            return at
        if self.copies:
            begin, first, _ = self.copies[-1]
            if at - begin == host - first:  # they follow the last copy's, here as there
                self.copies[-1] = (begin, first, at + size - begin)
                return at
        self.copies.append((at, host, size))
        return at

    def segments(self, slot: int, steps: Iterator[int]) -> array[int]:
        """The segments with addresses in a slot, and the next step numbers for parts."""
        words = self.words[:]
        for begin in range(0, len(words), _WORDS):
            for word, _ in _arrays(words[begin : begin + _WORDS]):
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


def _cut(tables: Sequence[Table], slot: int) -> list[_Piece]:
    """Cuts the segments of tables into pieces that fit into a slot of so many bytes."""
    pieces: list[_Piece] = []
    parameter = 0
    for number, (_, words) in enumerate(tables):
        pieces.append(_Piece(number))
        for begin in range(0, len(words), _WORDS):
            _add(words[begin : begin + _WORDS], parameter, pieces, slot)
            parameter += 1
    return pieces


def _add(segment: array[int], parameter: int, pieces: list[_Piece], slot: int) -> None:
    """Adds a segment to the last piece, and what does not fit to new ones."""
    arrays = sorted(_arrays(segment), key=lambda one: segment[one[0]])  # as they lie on the host
    per_block = sum(size for _, size in arrays)
    count, done = segment[10], 0
    while True:
        piece, part = pieces[-1], count - done
        blocks = (slot - piece.used - _ALIGNMENT * len(arrays)) // max(per_block, 1)
        if part > blocks * BLOCK:
            part = max(blocks, 0) * BLOCK // _UNIT * _UNIT
            if part == 0:
                pieces.append(_Piece(piece.table))
                continue
        words = segment[:]
        for word in (0, 1):  # parameter and gradient
            words[word] += done * STORAGE_BYTES[_storage(segment, word)]
        for word, size in arrays:
            host, whole = segment[word] + done // BLOCK * size, -(-part // BLOCK) * size
            words[word] = piece.add(host, whole if size == SCALE_BYTES else part * size // BLOCK)
        if done:
            piece.counted.append((len(piece.words) // _WORDS, parameter))
        words[10], words[11] = part, segment[11] + done
        piece.words += words
        done += part
        if done == count:
            return


# Steps.


class Slots:
    """Memory on a device through which states pass, and the streams of their copies."""

    def __init__(self, device: torch.device) -> None:
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event] = []  # once the last piece in a slot has gone out
        self._device = device

    def make(self, count: int, size: int) -> list[int]:
        """Makes `count` slots of at least `size` bytes; returns their addresses."""
        if len(self._slots) < count or any(slot.numel() < size for slot in self._slots):
            current = torch.cuda.current_stream(self._device)
            self._slots = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)
            ]
            for slot in self._slots:
                for stream in (self._in, self._out):
                    slot.record_stream(stream)
            made = current.record_event()
            self._free = [made] * count
        return [slot.data_ptr() for slot in self._slots]

    def bring_in(self, number: int, piece: _Piece, memory: PinnedMemory) -> None:
        """Copies a piece into a slot; the current stream waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._in.wait_event(self._free[number])
        with torch.cuda.stream(self._in):
            for at, host, size in piece.copies:
                self._slots[number][at : at + size].copy_(
                    memory.bytes_at(host, size), non_blocking=True
                )
            current.wait_event(self._in.record_event())

    def bring_out(self, number: int, piece: _Piece, memory: PinnedMemory) -> None:
        """Copies a slot back after what the current stream has been given."""
        device = self._device
        self._out.wait_event(torch.cuda.current_stream(device).record_event())
        with torch.cuda.stream(self._out):
            for at, host, size in piece.copies:
                memory.bytes_at(host, size).copy_(
                    self._slots[number][at : at + size], non_blocking=True
                )
            self._free[number] = self._out.record_event()

    def wait(self) -> None:
        """Waits until all pieces have gone out."""
        self._out.synchronize()


class OnCudaFromHost(OnCuda):
    """Steps on a device whose states are in pinned memory."""

    def __init__(
        self, device: torch.device, stream: int, memory: PinnedMemory, slots: Slots
    ) -> None:
        super().__init__(device, stream)
        self._pinned, self._slots = memory, slots
        self._parts = OnCuda(device, stream)  # steps the pieces; the whole tables are for norms
        self._pieces: list[_Piece] = []
        self._steps = torch.empty(0, dtype=torch.float32, device=device)

    def hold_pieces(self, steps: Sequence[torch.Tensor]) -> None:
        """Prepares for a step of the tables held, in pieces.

        Args:
            steps: the step numbers of the tables' parameters.
        """
        self._pieces = _cut(self._tables, SLOT_BYTES)
        counted = [steps[parameter] for piece in self._pieces for _, parameter in piece.counted]
        if counted:
            self._steps = torch.stack(counted)
        first = self._steps.data_ptr()
        numbers = iter(range(first, first + 4 * len(counted), 4))
        size = max((piece.used for piece in self._pieces), default=0)
        slots = self._slots.make(min(SLOTS, len(self._pieces)), size)
        self._parts.hold(
            [
                (self._tables[piece.table][0], piece.segments(slots[n % SLOTS], numbers))
                for n, piece in enumerate(self._pieces)
            ]
        )

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`."""
        norm = self.measure(step)
        for number, piece in enumerate(self._pieces):
            slot = number % SLOTS
            self._slots.bring_in(slot, piece, self._pinned)
            self._parts.step_table(number, step.settings[piece.table], step.control)
            self._slots.bring_out(slot, piece, self._pinned)
        return norm


# An optimizer's states.


class OffloadedStates:
    """States of an optimizer's CUDA parameters in pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = PinnedMemory(device)
        self._slots = Slots(device)

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

    def executor(
        self, tables: list[Table], steps: Sequence[torch.Tensor], last: object
    ) -> OnCudaFromHost:
        """The executor for these tables; it reuses `last`, from the last step, if possible.

        Args:
            tables: the tables.
            steps: the step numbers of their parameters.
            last: the executor of the last step.
        """
        device = self.device
        stream = torch.cuda.current_stream(device).cuda_stream
        if not (isinstance(last, OnCudaFromHost) and last.is_for(device, stream)):
            last = OnCudaFromHost(device, stream, self._memory, self._slots)
        last.hold(tables)
        last.hold_pieces(steps)
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
