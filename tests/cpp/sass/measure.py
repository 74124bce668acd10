"""Measures hot loops: instructions, loads in flight, and how many blocks a multiprocessor holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sass.cubin import Resources
from sass.disassembler import Kernel
from sass.hot import HotLoop
from sass.listing import Instruction
from sass.paths import Paths, Wanted

RESERVED_SHARED = 1024  # bytes of a block that the system takes
SHARED = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10}
REGISTERS, WARPS, BLOCKS = 1 << 16, 64, 32  # of a multiprocessor


@dataclass(frozen=True)
class Figures:
    """What a hot loop needs.

    Attributes:
        instructions: instructions per element.
        loads: loads of a thread that are in flight at once.
        rounds: how often a thread waits for memory in one pass.
        registers: registers of a thread.
        stack: bytes of a thread's stack.
        threads: threads of a block.
        blocks: blocks that a multiprocessor holds.
        bytes_in_flight: bytes that a multiprocessor waits for at once.
    """

    instructions: float
    loads: int
    rounds: int
    registers: int
    stack: int
    threads: int
    blocks: int
    bytes_in_flight: int


def measure(kernel: Kernel, hot: HotLoop, architecture: str) -> Figures:
    """The figures of a hot loop; ValueError if the kernel has no such loop."""
    entry = kernel.flows[kernel.name]
    wanted = hot.wanted
    paths = Paths(kernel.flows, wanted)
    # A loop around a call comes first: it costs something, too.
    flows = [entry, *(flow for flow in kernel.flows.values() if flow is not entry)]
    flows = [flow for flow in flows if hot.function in flow.function.name]
    way = next(filter(None, map(paths.best, flows)), None)
    if way is None:
        raise ValueError(
            f"no loop takes {hot.elements} elements, loads {hot.reads:g} and stores "
            f"{hot.writes:g} bytes of each: has what the kernel moves changed? (sass/hot.py)"
        )
    loads, held, rounds = in_flight(way, wanted)
    resources = kernel.resources
    blocks = resident_blocks(resources, architecture)
    at_once = min(blocks, hot.launched or blocks)
    return Figures(
        instructions=round(len(way) / hot.elements, 2), loads=loads, rounds=rounds,
        registers=resources.registers, stack=resources.stack, threads=resources.threads,
        blocks=blocks, bytes_in_flight=held * resources.threads * at_once,
    )  # fmt: skip


def in_flight(way: Iterable[Instruction], wanted: Wanted) -> tuple[int, int, int]:
    """How many loads, and bytes of them, are in flight at most, and how often the way waits.

    Loads return in the order in which they were issued, and those of one round together.
    """
    waiting: list[tuple[Instruction, int]] = []  # loads, and the round in which each was issued
    most = held = rounds = 0
    for one in way:
        used = [i for i, (load, _) in enumerate(waiting) if load.loaded & one.used]
        if used:
            rounds = max(rounds, waiting[used[-1]][1] + 1)
            del waiting[: used[-1] + 1]
        if one.is_load and wanted.is_data(one):
            waiting.append((one, rounds))
            most = max(most, len(waiting))
            held = max(held, sum(load.width for load, _ in waiting))
    return most, held, rounds


def resident_blocks(resources: Resources, architecture: str) -> int:
    """How many blocks of a kernel a multiprocessor holds at once."""
    warps = -(-resources.threads // 32)
    per_warp = -(-resources.registers * 32 // 256) * 256
    by_registers = REGISTERS // 4 // per_warp * 4 // warps
    by_shared = SHARED[architecture] // (resources.shared + RESERVED_SHARED)
    return min(by_registers, by_shared, WARPS // warps, BLOCKS)
