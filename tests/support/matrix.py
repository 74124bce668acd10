"""What operations do with tensors of a device: the tables of docs/reference/api.md, by running."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

import pycomm
from pycomm._runtime.cuda import HostMirror

OPS = torch.ops.pycomm
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/api.md"
RESULTS = ROOT / "benchmarks/results"
COLUMNS = (
    "CPU, one node",
    "CPU, several nodes",
    "CUDA, one node",
    "CUDA, several nodes, NCCL",
    "CUDA, several nodes, Gloo",
)
RANKS = 3
ROWS = 4  # of a rank's block
MANY = 200  # blocks of all ranks in a message

Results = Iterator[tuple[torch.Tensor, torch.Tensor]]


def given(rank: int) -> torch.Tensor:
    """A rank's input on the CPU: a block for every rank."""
    return torch.arange(RANKS * ROWS * 2.0).view(-1, 2) + 100 * rank


EVERY = [given(rank) for rank in range(RANKS)]
TOTAL = sum(EVERY, torch.zeros(()))
BLOCKS = [x.view(RANKS, ROWS, 2) for x in EVERY]


class Programs:
    """Runs operations on a rank; each yields results, and what they must be."""

    def __init__(self, group: pycomm.Group, device: str) -> None:
        self.group, self.device, self.rank = group, device, group.rank
        self.name = group.name

    @property
    def x(self) -> torch.Tensor:
        return given(self.rank).to(self.device)

    def block(self) -> torch.Tensor:
        return torch.zeros(ROWS, 2, device=self.device)

    def sizes(self) -> list[torch.Tensor]:
        """Memory for a block of a different size from each rank."""
        return [torch.zeros(r + 1, 2, device=self.device) for r in range(RANKS)]

    def all_reduce(self, algorithm: str) -> Results:
        yield pycomm.all_reduce(self.x, algorithm=algorithm, group=self.group), TOTAL
        yield OPS.all_reduce(self.x, "sum", algorithm, self.name), TOTAL
        work = pycomm.all_reduce(x := self.x, algorithm=algorithm, group=self.group, async_op=True)
        work.wait()
        yield x, TOTAL

    def compressed_all_reduce(self, algorithm: str) -> Results:
        cast, x = pycomm.Cast(torch.float16), self.x
        options = {"op": "sum", "algorithm": algorithm, "group": self.group}
        yield pycomm.compressed_all_reduce(x, cast, **options), TOTAL
        coded = OPS.compressed_all_reduce(self.x, "fp16", "sum", algorithm, 0, 0, False, self.name)
        yield coded, TOTAL

    def reduce(self) -> Results:
        x = pycomm.reduce(self.x, 1, group=self.group)
        yield x, TOTAL if self.rank == 1 else EVERY[self.rank]
        yield OPS.reduce(self.x, 1, self.name), TOTAL * (self.rank == 1)

    def reduce_scatter(self) -> Results:
        mine = TOTAL.view(RANKS, ROWS, 2)[self.rank]
        yield pycomm.reduce_scatter(self.block(), self.x, group=self.group), mine
        yield OPS.reduce_scatter(self.x, "sum", RANKS, self.name), mine

    def compressed_reduce_scatter(self) -> Results:
        cast, mine = pycomm.Cast(torch.float16), TOTAL.view(RANKS, ROWS, 2)[self.rank]
        out, residual = self.block(), torch.zeros_like(self.x)
        pycomm.compressed_reduce_scatter(
            out, self.x, cast, residual=residual, op="sum", group=self.group
        )
        yield out, mine
        yield residual, torch.zeros_like(EVERY[0])  # fp16 holds these numbers
        rest = ("sum", 0, 0, False, RANKS, self.name)
        yield OPS.compressed_reduce_scatter(self.x, "fp16", *rest), mine

    def all_gather(self) -> Results:
        out = torch.zeros(RANKS, *self.x.shape, device=self.device)
        yield pycomm.all_gather(out, self.x, group=self.group), torch.stack(EVERY)
        yield OPS.all_gather(self.x, RANKS, self.name), torch.cat(EVERY)

    def broadcast(self) -> Results:
        yield pycomm.broadcast(self.x, 2, group=self.group), EVERY[2]
        yield OPS.broadcast(self.x, 2, self.name), EVERY[2]

    def barrier(self) -> Results:
        pycomm.barrier(group=self.group)
        yield torch.zeros(()), torch.zeros(())

    def gather(self) -> Results:
        out = torch.zeros(RANKS, *self.x.shape, device=self.device) if self.rank == 1 else None
        pycomm.gather(self.x, out, 1, group=self.group)
        if out is not None:
            yield out, torch.stack(EVERY)

    def scatter(self) -> Results:
        out, whole = self.block(), self.x if self.rank == 1 else None
        yield pycomm.scatter(out, whole, 1, group=self.group), BLOCKS[1][self.rank]

    def all_to_all(self) -> Results:
        wanted = torch.cat([blocks[self.rank] for blocks in BLOCKS])
        out = torch.zeros_like(self.x)
        yield pycomm.all_to_all(out, self.x, group=self.group), wanted
        yield OPS.all_to_all(self.x, self.name), wanted

    def lists_of_tensors(self) -> Results:
        outs = [torch.zeros_like(self.x).t() for _ in range(RANKS)]  # not contiguous
        pycomm.all_gather(outs, self.x.t(), group=self.group)
        yield torch.stack(outs), torch.stack(EVERY).transpose(1, 2)
        out = self.block()
        pycomm.reduce_scatter(out, list(self.x.chunk(RANKS)), group=self.group)
        yield out, TOTAL.view(RANKS, ROWS, 2)[self.rank]
        outs = [self.block() for _ in range(RANKS)]
        work = pycomm.all_to_all(outs, list(self.x.chunk(RANKS)), group=self.group, async_op=True)
        work.wait()
        yield torch.stack(outs), torch.stack([blocks[self.rank] for blocks in BLOCKS])
        outs = [torch.zeros_like(self.x) for _ in range(RANKS)]
        pycomm.gather(self.x, outs if self.rank == 0 else None, 0, group=self.group)
        yield torch.stack(outs), torch.stack(EVERY) * (self.rank == 0)
        out = self.block()
        blocks = list(self.x.chunk(RANKS)) if self.rank == 2 else None
        work = pycomm.scatter(out, blocks, 2, group=self.group, async_op=True)
        work.wait()
        yield out, BLOCKS[2][self.rank]

    def blocks_of_different_sizes(self) -> Results:
        rows, outs = self.rank + 1, self.sizes()
        pycomm.all_gather(outs, self.x[:rows], group=self.group)
        yield torch.cat(outs), torch.cat([x[: r + 1] for r, x in enumerate(EVERY)])
        out = torch.zeros(RANKS * rows, 2, device=self.device)
        pycomm.all_to_all(out, self.x[:6], [rows] * RANKS, [1, 2, 3], group=self.group)
        begin = rows * (rows - 1) // 2
        yield out, torch.cat([x[begin : begin + rows] for x in EVERY])

    def message(self) -> tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Destination and source; what to send, memory, and what arrives: more than 16 KiB."""
        to, source = (self.rank + 1) % RANKS, (self.rank - 1) % RANKS
        wanted = EVERY[source].repeat(MANY, 1).t()
        return to, source, self.x.repeat(MANY, 1).t(), torch.zeros_like(wanted).to(self.x), wanted

    def send_and_recv(self) -> Results:
        to, source, given, x, wanted = self.message()
        if self.rank == 0:
            pycomm.send(given, to, group=self.group)
        assert pycomm.recv(x, source, group=self.group) == source
        if self.rank > 0:
            pycomm.send(given, to, group=self.group)
        yield x, wanted

    def isend_and_irecv(self) -> Results:
        to, source, given, x, wanted = self.message()
        received = pycomm.irecv(x, source, group=self.group)
        sent = pycomm.isend(given, to, group=self.group)
        received.wait()
        sent.wait()
        yield x, wanted


# The operations, as the table names them.
PROGRAMS: dict[str, Callable[..., Results]] = {
    "`all_reduce`": Programs.all_reduce,
    "`compressed_all_reduce`": Programs.compressed_all_reduce,
    "`reduce_scatter`": Programs.reduce_scatter,
    "`all_gather`": Programs.all_gather,
    "`broadcast`": Programs.broadcast,
    "`barrier`": Programs.barrier,
    "`reduce`": Programs.reduce,
    "`gather`": Programs.gather,
    "`scatter`": Programs.scatter,
    "`all_to_all`": Programs.all_to_all,
    "`compressed_reduce_scatter`": Programs.compressed_reduce_scatter,
    "lists of tensors": Programs.lists_of_tensors,
    "blocks of different sizes": Programs.blocks_of_different_sizes,
    "`send`": Programs.send_and_recv,
    "`recv`": Programs.send_and_recv,
    "`isend`": Programs.isend_and_irecv,
    "`irecv`": Programs.isend_and_irecv,
}


def _run(programs: Programs, program: Callable[..., Results], *algorithm: str) -> None:
    for result, wanted in program(programs, *algorithm):
        assert torch.equal(result.cpu(), wanted), (program.__name__, *algorithm)


def _cell(programs: Programs, program: Callable[..., Results], mirrors: list[object]) -> str:
    """`mirrors` gets an entry for each tensor that goes through host memory."""
    has_algorithms = program in (Programs.all_reduce, Programs.compressed_all_reduce)
    mirrors.clear()
    _run(programs, program, *(["auto"] if has_algorithms else []))
    said = ["through host memory"] if mirrors else []
    if has_algorithms:
        try:
            _run(programs, program, "ring")
        except ValueError:
            said.append("two-shot")
    return ", ".join(said) or "yes"


def cells(group: pycomm.Group, device: str) -> dict[str, str]:
    """The cells of a column, after running every operation on this rank.

    On CUDA, ranks must be processes.
    """
    programs, mirrors = Programs(group, device), []
    if device == "cpu":
        return {name: _cell(programs, program, mirrors) for name, program in PROGRAMS.items()}
    init = HostMirror.__init__

    def count(mirror: HostMirror, tensor: torch.Tensor) -> None:
        mirrors.append(mirror)
        init(mirror, tensor)

    side_stream = torch.cuda.stream(torch.cuda.Stream())  # which nothing else orders
    with side_stream, mock.patch.object(HostMirror, "__init__", count):
        found = {name: _cell(programs, program, mirrors) for name, program in PROGRAMS.items()}
    torch.cuda.synchronize()
    return found


def documented(column: str) -> dict[str, str]:
    """A column of the table in the page, by operation."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(f"| operation | {' | '.join(COLUMNS)} |")
    table: dict[str, str] = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        names, *row = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            table[name] = row[COLUMNS.index(column)]
    return table


def _gpus(file: Path) -> int:
    """On how many GPUs these results were measured."""
    meta = json.loads(file.read_text()).get("meta", {})
    return int(meta.get("gpus", 1)) if "gpu" in meta else 0


def status() -> list[str]:
    """The table of what each column has run on, by the tests and the files of results.

    A column is tested by the file that names it. If that lies in tests/gpu, the test awaits a
    device and runs on emulated ones.
    """
    tests = [*ROOT.glob("tests/collectives/test_*.py"), *ROOT.glob("tests/gpu/test_*.py")]
    gpus = {file: _gpus(file) for file in RESULTS.rglob("*.json")}
    most = max(gpus.values())
    lines = ["| tensors, transport | every row is tested on | real runs |", "|---|---|---|"]
    for column in COLUMNS:
        (test,) = [file for file in tests if f'"{column}",' in file.read_text()]
        emulated = test.parent.name == "gpu"
        if not emulated:
            ran = "the same"
        elif "several" in column:
            ran = "never"
        else:
            model = {json.loads(f.read_text())["meta"]["gpu"]["name"] for f in gpus if gpus[f]}
            ran = f"{most} {', '.join(sorted(model))}"
        lines.append(f"| {column} | {'emulated devices' if emulated else 'CPUs'} | {ran} |")
    lines.append(f"| CUDA, several GPUs | emulated devices | {'never' if most < 2 else most} |")
    return lines
