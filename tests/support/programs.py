"""Programs that run at once, each in a fork of one interpreter, to the interpreter's end.

The interpreter has imported torch, which takes longer than most of the programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

RUNNER = """
import json, os, sys, tempfile
import torch, torch.distributed

pids, files = {}, {}
for name, program in json.load(sys.stdin).items():
    files[name] = [tempfile.TemporaryFile() for _ in range(2)]
    pids[name] = os.fork()
    if pids[name] == 0:
        for number, file in enumerate(files[name], 1):
            os.dup2(file.fileno(), number)
        exec(program, {"__name__": "__main__"})
        break
else:
    ends = {}
    for name, pid in pids.items():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in files[name]:
            file.seek(0)
        ends[name] = status, *(file.read().decode() for file in files[name])
    print(json.dumps(ends))
"""


class Ended(NamedTuple):
    """The end of a program."""

    status: int
    stdout: str
    stderr: str


def run_all(
    programs: Mapping[str, str],
    *,
    env: Mapping[str, str] | None = None,
    before: Callable[[], Any] | None = None,
    timeout: float = 240,
) -> dict[str, Ended]:
    """How each program has ended; `before` runs in the interpreter's process before it starts."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(programs),
        env={**os.environ, **(env or {})},
        preexec_fn=before,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    ends = {name: Ended(*ended) for name, ended in json.loads(done.stdout).items()}
    assert ends.keys() == programs.keys()
    return ends
