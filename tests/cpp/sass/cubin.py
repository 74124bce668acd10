"""Reads from a cubin what the disassembly lacks: the kernels' symbols and resources."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Attributes of kernels, as `cuobjdump -elf` names them.
MAX_THREADS, MIN_STACK_SIZE, REGISTER_COUNT = 0x05, 0x12, 0x2F
WITH_PAYLOAD = 4  # the format of attributes that are longer than two bytes


@dataclass(frozen=True)
class Resources:
    """What a kernel takes. `symbol` is its index in the cubin's table of symbols."""

    symbol: int
    registers: int
    threads: int  # of a block, at most
    shared: int
    stack: int


class Cubin:
    """A cubin, which is an ELF file."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        table, size, count, names = struct.unpack_from("<40xQ10xHHH", self._data)[:4]
        headers = [
            struct.unpack_from("<I4x16xQQII", self._data, table + i * size) for i in range(count)
        ]
        text = headers[names][1]
        self._sections = {
            self._string(text + name): (offset, length, link)
            for name, offset, length, link, _ in headers
        }

    def kernels(self) -> dict[str, Resources]:
        """All kernels by their mangled names."""
        symbols = list(self._symbols())
        registers, stacks = {}, {}
        for attribute, value in self._attributes(".nv.info"):
            if attribute == REGISTER_COUNT:
                registers[value[0]] = value[1]
            elif attribute == MIN_STACK_SIZE:
                stacks[value[0]] = value[1]
        found = {}
        for index, name in enumerate(symbols):
            if f".text.{name}" not in self._sections:
                continue
            threads = dict(self._attributes(f".nv.info.{name}")).get(MAX_THREADS, (1024, 1, 1))
            _, shared, _ = self._sections.get(f".nv.shared.{name}", (0, 0, 0))
            found[name] = Resources(
                index, registers[index], threads[0] * threads[1] * threads[2], shared,
                stacks.get(index, 0),
            )  # fmt: skip
        return found

    def _string(self, at: int) -> str:
        return self._data[at : self._data.index(b"\0", at)].decode()

    def _symbols(self) -> Iterator[str]:
        offset, length, _ = self._sections[".symtab"]
        names, _, _ = self._sections[".strtab"]
        for at in range(offset, offset + length, 24):
            yield self._string(names + struct.unpack_from("<I", self._data, at)[0])

    def _attributes(self, section: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        at, length, _ = self._sections.get(section, (0, 0, 0))
        end = at + length
        while at < end:
            format_, attribute, size = struct.unpack_from("<BBH", self._data, at)
            at += 4
            if format_ == WITH_PAYLOAD:
                yield attribute, struct.unpack_from(f"<{size // 4}I", self._data, at)
                at += size
