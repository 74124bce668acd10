"""Ranks as processes: starts them, runs a function on each, and collects the outcomes."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm

# One clean process has imported torch and forks the others: a rank starts in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch._dynamo",  # DDP imports it
        # What ranks use of pycomm:
        "pycomm.backend",
        "pycomm.data_parallel",
        "pycomm.hooks",
        "pycomm.local_world",
        "pycomm.optim.adam",
        "pycomm.p2p",
        "pycomm.recovery",
        "numpy",
        "pytest",  # the modules of tests import it
    ]
)

# Seconds after which processes count as stuck. Machines are at times several times slower.
LIMIT = 300.0


@dataclass
class Outcome:
    """The outcome of one rank."""

    pid: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None


def join_world(rank: int, size: int, store: str, seconds: float = 60) -> None:
    """torch.distributed's default group over a file."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def pretend_torchrun(rank: int, size: int) -> None:
    """Sets a launcher's environment variables, where the process group exists already."""
    sizes = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(size))
    ranks = dict.fromkeys(["RANK", "LOCAL_RANK"], str(rank))
    run = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(sizes | ranks | run | where)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def as_torchrun(rank: int, size: int, port: int) -> None:
    """Gives this process the environment in which torchrun starts a rank."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }


def _body(
    pipe: Connection, function: Callable[..., Any], rank: int, size: int, store: str, args: tuple
) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has set
    outcome = Outcome(os.getpid())
    try:
        outcome.value = function(rank, size, store, *args)
    except BaseException as error:  # a KeyboardInterrupt is a result, too
        outcome.error, outcome.trace = error, traceback.format_exc()
    # By value: torch's own pickling for processes would go through files in shared memory.
    try:
        message = pickle.dumps(outcome)
    except Exception:
        outcome.value, outcome.error = None, RuntimeError(f"{outcome.value!r}, {outcome.error!r}")
        message = pickle.dumps(outcome)
    pipe.send_bytes(message)
    pipe.close()


class Ranks:
    """Processes that run ``function(rank, size, store, *args)``; for use in a ``with`` block."""

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-test-")
        self.store = str(Path(self._folder.name) / "store")
        self.outcomes: list[Outcome | None] = [None] * size
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_body, args=(theirs, function, rank, size, self.store, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal; returns when, by the clock that all processes share."""
        now = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return now

    def wait_for(self, ranks: Iterable[int], limit: float = LIMIT) -> list[Outcome]:
        """The outcomes of these ranks; fails the test if they do not end in time."""
        end = time.monotonic() + limit
        ranks = list(ranks)
        missing = {self._pipes[rank]: rank for rank in ranks if self.outcomes[rank] is None}
        while missing:
            ready = wait(list(missing), timeout=max(end - time.monotonic(), 0))
            stuck = sorted(missing.values())
            assert ready, f"ranks {stuck} had not ended after {limit} s"
            for pipe in ready:
                rank = missing.pop(pipe)
                self.outcomes[rank] = Outcome(self.processes[rank].pid)
                with suppress(EOFError):  # it died without a word
                    self.outcomes[rank] = pickle.loads(pipe.recv_bytes())
        return [self.outcomes[rank] for rank in ranks]

    def join(self, limit: float = LIMIT) -> list[Outcome]:
        """All outcomes, once all processes have ended."""
        end = time.monotonic() + limit
        outcomes = self.wait_for(range(len(self.processes)), limit)
        for outcome, process in zip(outcomes, self.processes, strict=True):
            process.join(max(end - time.monotonic(), 0.1))
            outcome.exitcode = process.exitcode
        return outcomes

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *details: object) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT
) -> list[Any]:
    """The results of all ranks; raises a rank's exception with its traceback."""
    with Ranks(size, function, *args) as ranks:
        outcomes = ranks.join(limit)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise AssertionError(f"rank {rank} failed:\n{outcome.trace}") from outcome.error
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def wait_until(condition: Callable[[], bool], limit: float = 30) -> None:
    """Polls; fails the test if it does not come true in time."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"did not happen within {limit} s"
        time.sleep(0.002)


def pass_barrier(group: pycomm.Group, path: str) -> None:
    """A barrier that every rank has left when this returns, so that a failure finds nobody in it.

    `path`: a file for the calls of these ranks.
    """
    pycomm.barrier(group=group)
    with Path(path).open("ab", buffering=0) as file:
        file.write(b".")
        passed = file.tell()
    everyone = -(-passed // group.size) * group.size
    wait_until(lambda: Path(path).stat().st_size >= everyone)


@contextmanager
def member(rank: int, size: int, store: str, **options: Any) -> Iterator[pycomm.Group]:
    """A rank's group, over a world of its own."""
    join_world(rank, size, store)
    with pycomm.init(**options) as group:
        yield group
    dist.destroy_process_group()


def in_group(
    rank: int, size: int, store: str, function: Callable[..., Any], options: dict, *args: Any
) -> Any:
    """For :class:`Ranks`: ``function(group, *args)`` in a new group."""
    with member(rank, size, store, **options) as group:
        return function(group, *args)


def run_group(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """:func:`run_ranks` for functions that take a group; `options` are those of ``pycomm.init``."""
    return run_ranks(size, in_group, function, options, *args)


def data_begin(size: int) -> int:
    """The offset of staging in a rank's slice: after flags, packets, mailboxes and two records."""
    packets, mailboxes = 2 * size * 2 * 64, size * 256
    records = 2 * pycomm._C.most_recorded * 64  # of operations, and of launches on a device
    return 4096 + sum(-(-area // 4096) * 4096 for area in (packets, mailboxes, records))


@functools.cache
def whole_way(name: str = "all_reduce") -> Callable[..., Any]:
    """A collective's function in Python, which calls do not reach if they can go the short way."""
    module = getattr(pycomm, name).__module__
    objects = (found for found in gc.get_objects() if type(found) is types.FunctionType)
    return next(f for f in objects if (f.__module__, f.__qualname__) == (module, name))


# In the class, instead of each group's own: no call goes the short way.
NO_SHORT_WAY = property(lambda _: None, lambda *_: None)


def publish(summary: dict[str, Any], path: Path | None) -> None:
    """Prints a summary as JSON, and writes it to a file if there is one."""
    text = json.dumps(summary, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n")
