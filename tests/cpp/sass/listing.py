"""Parses the output of nvdisasm: functions, instructions, and what these read, write and move."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

INSTRUCTION = re.compile(
    r"\s+/\*(?P<at>[0-9a-f]+)\*/\s+(?:@(?P<guard>!?U?P[0-9T]+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)
SECTION = re.compile(r"\s+\.section\s+\.text\.([$\w]+),")
LABEL = re.compile(r"([.$\w]+):$")
REGISTER = re.compile(r"(?<![\w.])(R\d+)(\.64)?\b")
LABEL_OPERAND = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction. `guard` is the predicate under which it runs, "" if it always does."""

    guard: str
    opcode: str
    operands: str

    @cached_property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """What follows the opcode's name."""
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def target(self) -> str:
        """The label that it names, or ""."""
        found = LABEL_OPERAND.search(self.operands)
        return found.group(1) if found else ""

    @cached_property
    def width(self) -> int:
        """Bytes that a memory access moves per thread."""
        for modifier, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2)):
            if modifier in self.modifiers:
                return width
        return 1 if self.modifiers & {"U8", "S8"} else 4

    @property
    def is_load(self) -> bool:
        """True for a load from global memory, also through a generic address."""
        return self.name in ("LD", "LDG")

    @property
    def is_store(self) -> bool:
        """True for a store to global memory, also through a generic address."""
        return self.name in ("ST", "STG")

    @property
    def is_strong(self) -> bool:
        """True for an access that synchronizes: a flag's, a packet's, a ticket's."""
        return "STRONG" in self.modifiers

    @cached_property
    def loaded(self) -> frozenset[str]:
        """The registers that a load fills."""
        found = REGISTER.match(self.operands) if self.is_load else None
        if found is None:
            return frozenset()
        first = int(found.group(1)[1:])
        return frozenset(f"R{first + i}" for i in range(max(1, self.width // 4)))

    @cached_property
    def written(self) -> str:
        """The first register that it writes, or ""."""
        found = REGISTER.match(self.operands)
        return "" if found is None or self.is_store else found.group(1)

    @cached_property
    def used(self) -> frozenset[str]:
        """The registers that it reads; a pair by both of its numbers."""
        operands = self.operands
        if not (self.is_store or self.name in ("RED", "EXIT", "BRA")):
            operands = operands.partition(",")[2]  # what comes first is written
        found = set()
        for register, pair in REGISTER.findall(operands):
            found.add(register)
            if pair:
                found.add(f"R{int(register[1:]) + 1}")
        return frozenset(found)


@dataclass
class Function:
    """A kernel or a function that it calls, and the labels of its instructions."""

    name: str
    kernel: str
    code: list[Instruction]
    labels: dict[str, int]


def parse(text: str) -> list[Function]:
    """All functions of a listing."""
    functions: list[Function] = []
    kernel = ""
    for line in text.splitlines():
        if found := INSTRUCTION.match(line):
            functions[-1].code.append(
                Instruction(found["guard"] or "", found["opcode"], found["operands"])
            )
        elif found := SECTION.match(line):
            kernel = found.group(1)
        elif found := LABEL.match(line):
            name = found.group(1)
            if name.startswith(".L"):
                functions[-1].labels[name] = len(functions[-1].code)
            elif not name.startswith(".text."):
                functions.append(Function(name, kernel, [], {}))
    return functions
