"""The emulated devices notice what two streams do to the same memory without an order."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is not None, reason="real devices notice nothing"),
]

BEGIN = """
import sys, torch, pycomm
ordered = len(sys.argv) > 1
x = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
"""
END = "torch.cuda.synchronize()"  # so that nothing is in use when the program frees it
PROGRAMS = {
    "write, then read": """
        x.fill_(1)
        if ordered: side.wait_stream(main)
        with torch.cuda.stream(side): y = x + 1
        """,
    "read, then write": """
        y = x + 1
        if ordered: side.wait_event(main.record_event())
        with torch.cuda.stream(side): x.fill_(1)
        """,
    "an event that comes too early": """
        early = main.record_event()
        x.fill_(1)
        side.wait_event(main.record_event() if ordered else early)
        with torch.cuda.stream(side): y = x + 1
        """,
    "freed while it is read": """
        with torch.cuda.stream(side): y = x + 1
        if ordered: x.record_stream(side)
        del x
        """,
    "a kernel of pycomm": """
        def body(group):
            given = torch.ones(1000, device="cuda")
            pycomm.all_reduce(given, group=group)
            if ordered: torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()): given.add_(1)
            torch.cuda.synchronize()
        with pycomm.LocalWorld(2) as world: world.run(body)
        """,
    "an encoder of pycomm": """
        x.fill_(1)
        if ordered: side.wait_stream(main)
        with torch.cuda.stream(side): pycomm.Int8().encode(x)
        """,
    "an optimizer of pycomm": """
        p = torch.nn.Parameter(x)
        optimizer = pycomm.optim.FusedSGD([p], lr=1.0)
        p.grad = torch.ones(1000, device="cuda")
        if ordered: side.wait_stream(main)
        with torch.cuda.stream(side): optimizer.step()
        """,
    "devices of two threads": """
        def body(group):
            torch.cuda.set_device(group.rank)
            given = torch.ones(1000, device="cuda")
            pycomm.all_reduce(given, group=group)
            if not ordered:
                with torch.cuda.stream(torch.cuda.Stream()): given.add_(1)
            assert given.sum().item() == 2000
        with pycomm.LocalWorld(2) as world: world.run(body)
        """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_ordered_aborts(name: str) -> None:
    program = [sys.executable, "-c", BEGIN + textwrap.dedent(PROGRAMS[name]) + END]
    wrong = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert "is not ordered after" in wrong.stderr, wrong.stderr
    assert wrong.returncode < 0


def test_what_is_ordered_passes() -> None:
    programs = [BEGIN + textwrap.dedent(program) + END for program in PROGRAMS.values()]
    right = subprocess.run(
        [sys.executable, "-c", f"for program in {programs}: exec(program, {{}})", "ordered"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert right.returncode == 0, right.stderr
