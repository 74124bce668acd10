"""The emulated devices notice what two streams do to the same memory without an order."""

from __future__ import annotations

import textwrap

import programs
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is not None, reason="real devices notice nothing"),
]

BEGIN = """
import torch, pycomm
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


def test_what_is_not_ordered_aborts_and_what_is_ordered_passes() -> None:
    texts = {name: BEGIN + textwrap.dedent(body) + END for name, body in PROGRAMS.items()}
    ends = programs.run_all(
        {
            f"{name}, {ordered}": f"ordered = {ordered}\n{text}"
            for name, text in texts.items()
            for ordered in (False, True)
        }
    )
    for name in PROGRAMS:
        wrong, right = ends[f"{name}, False"], ends[f"{name}, True"]
        assert "is not ordered after" in wrong.stderr, (name, wrong)
        assert wrong.status < 0, (name, wrong)
        assert right.status == 0, (name, right)
