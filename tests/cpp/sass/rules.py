"""Rules for kernels whose blocks meet those of other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sass.disassembler import Kernel
from sass.flow import Flow, Loop
from sass.listing import Instruction

# Of each such kernel, one type and reduction; the others are instances of the same template.
MEETING = re.compile(
    r"[EI](f|St4byte)(NS0_5KnownILNS_8ReduceOpE0EEEEE|NS_10CodecTable)|(meet|gather)_kernel|sharded_"
)
# Lanes of one rank meet here, too, by counters in their device's memory.
MEETS_ON_ONE_DEVICE = re.compile("sharded_")
# A fence of aliases has the scope of the device or the system, as the driver says at run time.
FENCES_ALIASES = re.compile("Multicast")
# Takes an announcement back: its flag publishes nothing.
RETRACTS = re.compile("withdraw")


def problems(kernel: Kernel) -> Iterator[str]:
    """What a kernel does against the rules."""
    one_device = bool(MEETS_ON_ONE_DEVICE.search(kernel.name))
    flows = kernel.flows.values()
    code = [one for flow in flows for one in flow.function.code]
    if not any(is_flag(one) for one in code):
        yield "stores no flag: is it a kernel that meets other ranks?"
    for opcode in sorted({one.opcode for one in code if is_of_device_scope(one)}):
        of_aliases = FENCES_ALIASES.search(kernel.name) and opcode == "MEMBAR.SC.GPU"
        if not one_device and not of_aliases:
            yield f"{opcode} orders nothing for peers on other devices"
    for flow in flows:
        unfenced = sum(1 for at, i in flags(flow) if not is_fenced(flow, at, i, one_device))
        if unfenced and not RETRACTS.search(flow.function.name):
            yield f"stores {unfenced} flags without a fence of system scope"
        for loop in flow.loops():
            if invalidates_while_it_spins(flow, loop):
                yield "empties the L1 cache at every spin (CCTL.IVALL): it polls with acquire"


def is_flag(one: Instruction) -> bool:
    """True for the store of a flag. Packets, which need no fence, are of 64 bits."""
    return one.is_store and {"STRONG", "SYS"} <= one.modifiers and one.width == 4


def is_fence(one: Instruction) -> bool:
    """True for a fence of system scope."""
    return one.name == "MEMBAR" and "SYS" in one.modifiers


def is_of_device_scope(one: Instruction) -> bool:
    """True for a fence, load or store that orders only what one device does."""
    fences = one.name == "MEMBAR" or one.is_load or one.is_store
    return fences and "GPU" in one.modifiers


def flags(flow: Flow) -> Iterator[tuple[int, int]]:
    """Where flags are stored: the block and the index in it."""
    for at, block in enumerate(flow.blocks):
        yield from ((at, i) for i, one in enumerate(block.code) if is_flag(one))


def is_fenced(flow: Flow, at: int, index: int, one_device: bool) -> bool:
    """True if no data can be stored after the fence before a flag, or if a fence follows the flag.

    A fence after the flag orders it before a later access, and publishes nothing.
    """
    return _fence_is_next(flow, at, index, one_device) or _fence_is_before(flow, at, index, set())


def _fence_is_next(flow: Flow, at: int, index: int, one_device: bool) -> bool:
    for one in flow.blocks[at].code[index + 1 :]:
        if one.name == "MEMBAR":
            return "SC" in one.modifiers and (one_device or is_fence(one))
        if one.is_load or one.is_store or one.name in ("ATOM", "ATOMG", "RED", "CALL"):
            return False
    return False


def _fence_is_before(flow: Flow, at: int, index: int, seen: set[int]) -> bool:
    for one in reversed(flow.blocks[at].code[:index]):
        if is_fence(one):
            return True
        if (one.is_store and not one.is_strong) or one.name == "CALL":
            return False
    before = [block for block in flow.before[at] if block not in seen]
    seen.update(before)
    return bool(flow.before[at]) and all(
        _fence_is_before(flow, block, len(flow.blocks[block].code), seen) for block in before
    )


def invalidates_while_it_spins(flow: Flow, loop: Loop) -> bool:
    """True if the shortest way around a loop that polls one flag empties the L1 cache."""
    way = flow.shortest_way_around(loop)
    written = {one.written for one in way}
    polls = any(
        one.is_load and {"STRONG", "SYS"} <= one.modifiers and not one.used & written for one in way
    )
    return polls and any(one.name == "CCTL" and "IVALL" in one.modifiers for one in way)
