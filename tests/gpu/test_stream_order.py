"""The emulated devices notice what two streams do to the same memory without an order."""

from __future__ import annotations

import json
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


# Runs each program in a fork, without an order and with one; prints how it ended and what it said.
RUN_EACH = """
import json, os, sys, tempfile, torch, pycomm
ends = {}
for name, program in json.load(sys.stdin).items():
    for ordered in ([], ["ordered"]):
        with tempfile.TemporaryFile() as said:
            pid = os.fork()
            if pid == 0:
                os.dup2(said.fileno(), 2)
                sys.argv[1:] = ordered
                exec(program, {})
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said.seek(0)
            ends.setdefault(name, []).append((status, said.read().decode()))
print(json.dumps(ends))
"""


def test_what_is_not_ordered_aborts_and_what_is_ordered_passes() -> None:
    programs = {name: BEGIN + textwrap.dedent(body) + END for name, body in PROGRAMS.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert ends.keys() == PROGRAMS.keys()
    for name, ((wrong, told), (right, said)) in ends.items():
        assert "is not ordered after" in told, (name, told)
        assert wrong < 0, (name, told)
        assert right == 0, (name, said)
