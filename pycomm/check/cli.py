"""The command line, and the ranks that run the items."""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it

import pycomm
from pycomm import _C, collect_env
from pycomm.bench import launch
from pycomm.bench.report import writable
from pycomm.check import items
from pycomm.check.items import Item, Outcome, outcome

TIMEOUT = 60.0  # seconds that an operation may take
ITEM_LIMIT = 120.0  # seconds that an item may take
START_LIMIT = 180.0  # seconds in which ranks must have begun
HEAP_BYTES = 16 << 20  # of GPU memory that ranks share, for shards


@dataclass(frozen=True)
class Setting:
    """Where all items run.

    Attributes:
        name: for the reader.
        ranks: their number.
        device: ``"cpu"`` or ``"cuda"``.
        nodes: the ranks of each node if they are threads of one process; None for processes.
        parts: what runs: keys of `PARTS`.
    """

    name: str
    ranks: int
    device: str = "cpu"
    nodes: tuple[int, ...] | None = None
    parts: tuple[str, ...] = ("operations", "local", "wrapper", "hook")

    @property
    def items(self) -> dict[str, Item]:
        """What runs here, by name, in order."""
        spans = self.nodes is not None and len(self.nodes) > 1
        found: dict[str, Item] = {}
        for part in self.parts:
            found |= PARTS[part](spans)
        return found


PARTS: dict[str, Callable[[bool], dict[str, Item]]] = {
    "operations": items.operations,
    "local": lambda _: items.local(),
    "wrapper": lambda _: items.training("wrapper"),
    "hook": lambda _: items.training("hook"),
}


@dataclass(frozen=True)
class Line:
    """The line of an item.

    Attributes:
        place: the setting's name.
        item: the item's name.
        state: ``"ok"``, ``"FAILED"`` or ``"not here"``.
        detail: why.
        seconds: that the item took.
    """

    place: str
    item: str
    state: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.state:8}  {self.item:40}  {self.detail}".rstrip()


Tell = Callable[[int, str, Outcome], None]
START = "start of the ranks"


def settings() -> Iterator[Setting | Line]:
    """All settings of this machine; a line says why one is missing."""
    yield Setting("CPU, 3 processes", 3)
    among_nodes = ("operations", "wrapper")
    yield Setting("CPU, 4 threads as on 2 nodes", 4, nodes=(2, 2), parts=among_nodes)
    devices = torch.cuda.device_count()
    if not _C.has_cuda:
        why = "pycomm is built without CUDA (docs/how-to/build-options.md)"
        yield Line("CUDA", "all items", "not here", why)
    elif not devices:
        yield Line("CUDA", "all items", "not here", "torch sees no CUDA device")
    elif devices > 1:
        yield Setting(f"CUDA, {devices} processes, each with a GPU", devices, "cuda")
    else:
        in_threads, in_processes = ("operations", "local"), ("wrapper", "hook")
        yield Setting("CUDA, 3 threads on one GPU", 3, "cuda", nodes=(3,), parts=in_threads)
        yield Setting("CUDA, 2 processes on one GPU", 2, "cuda", parts=in_processes)


def run_items(group: pycomm.Group, setting: Setting, tell: Tell) -> None:
    """A rank's part in all items; `tell` gets its outcomes."""
    tell(group.rank, START, Outcome())
    for name, item in setting.items.items():
        tell(group.rank, name, outcome(item, name, group, setting.device))


def _serve(connection: Connection, setting: Setting, rank: int, port: int) -> None:
    """A process: a rank, or all if they are threads."""
    torch.set_num_threads(1)
    lock = threading.Lock()

    def tell(rank: int, name: str, found: Outcome) -> None:
        with lock:
            connection.send((rank, name, found))

    try:
        if setting.nodes is None:
            store = TCPStore(launch.LOOPBACK, port, is_master=False)
            launch.join(store, rank, setting.ranks, TIMEOUT, device=setting.device)
            heap = HEAP_BYTES if setting.device == "cuda" else 0
            with pycomm.init(timeout=TIMEOUT, cuda_heap_bytes=heap) as group:
                run_items(group, setting, tell)
            dist.destroy_process_group()
        else:
            with pycomm.LocalWorld(setting.ranks, TIMEOUT, nodes=setting.nodes) as world:
                world.run(run_items, setting, tell)
    except Exception as error:
        tell(rank, START, Outcome(f"{type(error).__name__}: {error}"))


class Ranks:
    """The processes of a setting, and their outcomes; for use in a ``with`` block."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._store = launch.host_store()
        self._outcomes: dict[str, dict[int, Outcome]] = {}
        self._processes: dict[Connection, Any] = {}
        context = multiprocessing.get_context("spawn")
        for rank in range(setting.ranks if setting.nodes is None else 1):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, setting, rank, self._store.port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process

    def outcomes(self, name: str, limit: float) -> dict[int, Outcome]:
        """The outcomes of an item, of those ranks that have told them within some seconds."""
        found, end = self._outcomes.setdefault(name, {}), time.monotonic() + limit
        open_ = [connection for connection in self._processes if not connection.closed]
        while len(found) < self._setting.ranks and open_:
            ready = wait(open_, max(end - time.monotonic(), 0))
            if not ready:
                break
            for connection in [each for each in open_ if each in ready]:
                try:
                    rank, told, outcome = connection.recv()
                    self._outcomes.setdefault(told, {})[rank] = outcome
                except EOFError:
                    open_.remove(connection)
                    connection.close()
        return found

    def ended(self, ranks: Sequence[int]) -> str:
        """How the processes of some ranks have ended, if they have."""
        processes, told = list(self._processes.values()), []
        for number in sorted({min(rank, len(processes) - 1) for rank in ranks}):
            processes[number].join(0.1)
            if (code := processes[number].exitcode) is not None:
                told.append(f"process {number} has ended with {code}")
        return "; ".join(told)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.join(5 if self._complete() else 0)
            process.kill()
            process.join()

    def _complete(self) -> bool:
        last = list(self._setting.items)[-1]
        return len(self._outcomes.get(last, {})) == self._setting.ranks


def examine(setting: Setting) -> Iterator[Line]:
    """Runs all items in a setting; the lines come as items end."""
    with Ranks(setting) as ranks:
        names = [START, *setting.items]
        for number, name in enumerate(names):
            began, limit = time.monotonic(), ITEM_LIMIT if number else START_LIMIT
            found = ranks.outcomes(name, limit)
            state, detail = _verdict(found)
            missing = [rank for rank in range(setting.ranks) if rank not in found]
            if missing and state != "FAILED":
                why = ranks.ended(missing) or f"no answer within {limit:g} s"
                state, detail = "FAILED", f"of ranks {missing}: {why}"
            seconds = round(time.monotonic() - began, 3)
            if name != START or state == "FAILED":
                yield Line(setting.name, name, state, detail, seconds)
            if missing or (name == START and state == "FAILED"):
                rest = len(names) - number - 1
                if rest:
                    yield Line(setting.name, f"the other {rest} items", "FAILED", "have not run")
                return


def _verdict(found: dict[int, Outcome]) -> tuple[str, str]:
    """The state and the detail of an item, from all ranks' outcomes."""
    for rank, each in sorted(found.items()):
        if each.problem:
            return "FAILED", f"rank {rank}: {each.problem}"
        if each.missing:
            return "not here", each.missing
        for name, digest in each.bits.items():
            if digest != found[min(found)].bits.get(name):
                return "FAILED", f"{name}: rank {rank} has other bits than rank {min(found)}"
    return "ok", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints facts, a line per item, and a summary; returns 1 if an item has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.check",
        description="Compares all that pycomm computes with plain torch, on this machine. Prints "
        "what a bug report needs.",
    )
    parser.add_argument("--json", metavar="FILE", type=writable, help="a file for the results, too")
    given = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(START_LIMIT, file=2, exit=True)
    # A driver that hangs ends this process.
    facts, here, began = collect_env.facts(), list(settings()), time.monotonic()
    faulthandler.cancel_dump_traceback_later()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the ranks
    lines: list[Line] = []
    say = partial(print, flush=True)
    say(collect_env.report(facts))
    for setting in here:
        say(f"\n{setting.name if isinstance(setting, Setting) else setting.place}")
        for line in examine(setting) if isinstance(setting, Setting) else [setting]:
            lines.append(line)
            say(f"  {line}")
    states = [line.state for line in lines]
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "FAILED", "not here"))
    say(f"\n{counted}; {time.monotonic() - began:.0f} s")
    if given.json is not None:
        found = {"environment": facts, "items": [asdict(line) for line in lines]}
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    return int("FAILED" in states)
