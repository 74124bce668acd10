"""Outputs whose pages do not exist yet: the system gives them in large units."""

import mmap
import re
from pathlib import Path

import pytest
import torch

import pycomm

MIB = 1 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def fresh(mib):
    """A tensor of bytes in a mapping of its own, of which no page exists."""
    memory = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # so that the system merges it with no other mapping
    return torch.frombuffer(memory, dtype=torch.uint8)


def flags_of(address):
    """The flags of the mapping that has this address: "hg" if huge pages are asked for."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            begin, end = (int(bound, 16) for bound in bounds.groups())
            here = begin <= address < end
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping has this address")


def asked_for_huge_pages(tensor):
    return "hg" in flags_of(tensor.data_ptr() + tensor.nbytes // 2)


def gather(group, output):
    source = torch.full((output.numel() // 2,), group.rank + 1, dtype=torch.uint8)
    pycomm.all_gather(output, source, group=group)
    halves = output.view(2, -1)
    assert halves[0].eq(1).all()
    assert halves[1].eq(2).all()
    return output


def on_request():
    return SETTING.exists() and "[madvise]" in SETTING.read_text()


@pytest.mark.skipif(not on_request(), reason="the system does not give huge pages on request")
def test_only_large_outputs_without_pages_get_huge_ones(world):
    def body(group):
        small, large, kept = fresh(2), fresh(16), fresh(16)
        kept.fill_(1)
        return [asked_for_huge_pages(gather(group, output)) for output in (small, large, kept)]

    assert world(2).run(body) == [[False, True, False]] * 2


def test_parts_of_pages(world):
    """Outputs that begin and end inside of pages do not change the memory around them."""

    def body(group):
        whole = fresh(16)
        gather(group, whole[3 : 9 * MIB + 1])
        assert whole[:3].eq(0).all()
        assert whole[9 * MIB + 1 :].eq(0).all()
        return True

    assert world(2).run(body) == [True, True]


def test_outputs_in_the_window(world):
    def body(group):
        output = group.empty(8 * MIB, dtype=torch.uint8)
        asked_for_huge_pages(gather(group, output))
        return asked_for_huge_pages(output)

    assert world(2).run(body) == [False, False]
