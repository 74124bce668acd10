"""Measures the constants of this node, and under torchrun of its links: ``--measure``.

Takes some seconds. Codecs run in one process, as in ``python -m pycomm.bench codec``. Collectives
and messages run in two processes started for this purpose, or in torchrun's processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm
from pycomm._runtime.rendezvous import node_identity
from pycomm.advise.constants import COMPRESSIONS, Constant, Constants
from pycomm.advise.model import compression_of
from pycomm.bench import launch, report
from pycomm.bench.measure import compete
from pycomm.bench.report import MIB, Settings

CODED_ELEMENTS = 4 * MIB  # 16 MiB: more than a core's caches hold
DENSITY = 0.01
CALLS = Settings(iters=7)
LARGE, SMALL = 16 * MIB, 8  # bytes of all-reduces and messages
BLOCKS, TRIPS, TRANSFERS = 7, 40, 1  # of small messages and of large ones, in each block
BUSY_TRIPS = 10  # of small messages while the cores compute, which takes milliseconds
PRODUCT = 256  # rows of the matrices that are multiplied meanwhile
ETHERNET_MTU, HEADERS, FRAME = 1500, 52, 14  # bytes; IP and TCP with time stamps; of Ethernet


def measure() -> Constants:
    """Measures all constants. Under torchrun all ranks call this.

    Returns:
        The constants. All but the codecs' are the same on all ranks. They include
        ``link.rate`` only if ranks are on several nodes.
    """
    command = shlex.join(["python", "-m", "pycomm.advise", *sys.argv[1:]])
    machine = report.circumstances(command)
    torch.set_num_threads(1)
    # Gloo's thread spins while another thread of its process holds a connection's lock. With this
    # policy, which child processes inherit, it does not preempt that thread in order to spin.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    values = codec_constants()
    with tempfile.TemporaryDirectory(prefix="pycomm-advise-") as folder:
        path = Path(folder, "measured")
        launch.run(_measure_ranks, path, ranks=2)
        measured = json.loads(path.read_text())
    values |= {name: Constant(**entry) for name, entry in measured.items()}
    values["link.payload"] = Constant(
        (ETHERNET_MTU - HEADERS) / (ETHERNET_MTU + FRAME),
        "ratio",
        "not measured: TCP over Ethernet frames of 1,500 bytes, 52 of them headers, and 14 more",
    )
    return Constants(machine, values)


def codec_constants() -> dict[str, Constant]:
    """The time to encode and decode an element, for every compression."""
    x = torch.randn(CODED_ELEMENTS, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(x)
    calls = {
        f"{compression}.{operation}": call
        for compression in COMPRESSIONS
        for operation, call in _codec_calls(compression, x, out).items()
    }
    source = f"pycomm.bench.measure, one thread, {CODED_ELEMENTS} elements (top-k of 1 %)"
    return {
        name: Constant(_rounded(figure.time_us * 1e3 / CODED_ELEMENTS), "ns/element", source)
        for name, figure in compete(None, calls, CALLS).items()
    }


def _codec_calls(
    compression: str, x: torch.Tensor, out: torch.Tensor
) -> dict[str, Callable[[], object]]:
    codec = compression_of(compression, DENSITY)
    wire = codec.encode(x)

    def add() -> object:
        return codec.decode(wire, x.numel(), out, add=True)

    if compression == "none":
        return {"add": add}
    return {
        "encode": lambda: codec.encode(x, wire),
        "decode": lambda: codec.decode(wire, x.numel(), out),
        "decode_add": add,
    }


def _measure_ranks(path: Path) -> None:
    """Runs on every rank. All ranks write the same file, as they may not share a file system."""
    nodes = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, node_identity())
    found = [local_constants(nodes), link_constants(nodes)]
    dist.broadcast_object_list(found, src=0)
    entries = {name: vars(constant) for part in found for name, constant in part.items()}
    path.write_text(json.dumps(entries))


def local_constants(nodes: list[str]) -> dict[str, Constant]:
    """Measures an all-reduce of this node's ranks in shared memory."""
    mine = None
    for node in dict.fromkeys(nodes):  # all ranks make all groups
        members = dist.new_group([r for r, where in enumerate(nodes) if where == node])
        if node == nodes[dist.get_rank()]:
            mine = members
    with pycomm.init(mine) as group:
        calls = {
            f"{nbytes} bytes": partial(pycomm.all_reduce, torch.zeros(nbytes // 4), group=group)
            for nbytes in (SMALL, LARGE)
        }
        small, large = compete(group, calls, CALLS).values()
        ranks = group.size
    source = f"pycomm.all_reduce of {ranks} ranks on one node,"
    per_byte = max((large.time_us - small.time_us) * 1e3 / LARGE, 1e-3)  # one rank has no bytes
    return {
        "local.latency": Constant(_rounded(small.time_us), "us", f"{source} {SMALL} bytes"),
        "local.all_reduce": Constant(_rounded(per_byte), "ns/byte", f"{source} {LARGE} bytes"),
        "local.ranks": Constant(float(ranks), "ranks", f"{source} the number of ranks"),
    }


def link_constants(nodes: list[str]) -> dict[str, Constant]:
    """Measures messages between rank 0 and the first rank on another node, or over loopback."""
    far = next((r for r, where in enumerate(nodes) if where != nodes[0]), None)
    peer = 1 if far is None else far
    small, large = torch.zeros(SMALL // 4), torch.zeros(LARGE // 4)
    blocks = [
        [*_trips(peer, small, TRIPS), *_trips(peer, large, TRANSFERS), _crossing(peer, large)]
        for _ in range(1 + BLOCKS)
    ]
    seconds, core, large_seconds, _, crossing = map(
        statistics.median, zip(*blocks[1:], strict=True)
    )
    with _computing():
        busy = statistics.median(_trips(peer, small, BUSY_TRIPS)[0] for _ in range(BLOCKS))
    where = "loopback" if far is None else "the link"
    source = f"Gloo's send and recv over {where}, median of {BLOCKS} blocks,"
    per_byte = max(crossing - 2 * core, 0.0) / (2 * LARGE)
    found = {
        "link.latency": Constant(_rounded(1e6 * seconds), "us", f"{source} {SMALL} bytes"),
        "link.busy": Constant(_rounded(1e6 * busy), "us",
                              f"{source} {SMALL} bytes: while each rank's only core computes"),
        "link.message": Constant(_rounded(1e6 * core), "us",
                                 f"{source} {SMALL} bytes: time of both ranks' cores"),
        "link.core": Constant(_rounded(1e9 * per_byte), "ns/byte",
                              f"{source} {LARGE} bytes each way: time of both ranks' cores"),
    }  # fmt: skip
    if far is not None:
        gigabits = 8e-9 * LARGE / (large_seconds - seconds)
        found["link.rate"] = Constant(_rounded(gigabits), "Gbit/s", f"{source} {LARGE} bytes")
    return found


def _trips(peer: int, message: torch.Tensor, trips: int) -> tuple[float, float]:
    """Seconds of a message from rank 0 to its peer or back, and both ranks' core seconds for it."""

    def go(other: int) -> None:
        steps = (dist.send, dist.recv) if other else (dist.recv, dist.send)
        for _ in range(trips):
            for step in steps:
                step(message, other)

    seconds, core = _timed(peer, go)
    return seconds / (2 * trips), core / (2 * trips)


def _crossing(peer: int, message: torch.Tensor) -> float:
    """Core seconds of both ranks for a message in each direction at once, as in an exchange."""
    received = torch.empty_like(message)

    def go(other: int) -> None:
        sent = dist.isend(message, other)
        dist.recv(received, other)
        assert sent is not None
        sent.wait()

    return _timed(peer, go)[1]


def _timed(peer: int, go: Callable[[int], None]) -> tuple[float, float]:
    """The mean of rank 0's and its peer's seconds, and the sum of both ranks' core seconds."""
    rank = dist.get_rank()
    dist.barrier()
    began, core = time.perf_counter(), _core_seconds()
    if rank in (0, peer):
        go(0 if rank else peer)
    took = torch.tensor([time.perf_counter() - began, _core_seconds() - core])
    if rank not in (0, peer):
        took.zero_()
    dist.all_reduce(took)
    return float(took[0]) / 2, float(took[1])


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """Runs all threads of this process on one core, and another process that computes there."""
    usual = os.sched_getaffinity(0)
    cores = sorted(usual)
    done = threading.Event()

    def compute() -> None:
        x = torch.ones(PRODUCT, PRODUCT)
        while not done.is_set():
            torch.mm(x, x)

    thread = threading.Thread(target=compute, name="pycomm-advise-computing")
    try:
        _pin({cores[dist.get_rank() % len(cores)]})
        thread.start()
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        _pin(usual)


def _pin(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
