"""A rank of ``python -m benchmarks.nodes``, which torchrun starts on every node.

Rank 0 asks the main process, which alone can set rates and cut links, through files of a folder
that all nodes see: ``ask("rate", ...)`` returns when it has been done.
"""

import contextlib
import functools
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import pycomm
from benchmarks.nodes import sharded
from benchmarks.nodes.cases import (
    ALGORITHMS,
    COMPRESSIONS,
    FEEDBACK,
    TRAINEES,
    WITH_FEEDBACK,
)
from benchmarks.nodes.namespaces import sent_bytes
from pycomm._runtime import internode
from pycomm._runtime.torch_private import GradBucket
from pycomm.bench import training
from pycomm.bench.contestants import Case, Compressed, Contestant, Pycomm
from pycomm.bench.peers import TorchPeer
from pycomm.bench.training import EmulatedLink

POLL_S = 0.01
SETUP_S = 60.0
LEARNING_RATE = 0.01
ONE_BUCKET_MIB = 1 << 14


class Asking:
    """Rank 0's questions, numbered; the answers are JSON, and the same on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def ask(self, what: str, **details: Any) -> Any:
        """Asks a question; all ranks call this and get rank 0's answer."""
        self.number += 1
        answer = [None]
        if dist.get_rank() == 0:
            write(self.folder / f"question-{self.number}", {"what": what, **details})
            answer = [wait_for(self.folder / f"answer-{self.number}")]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]


def write(path: Path, content: Any) -> None:
    """Writes a file atomically, so that readers see all of it."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def wait_for(path: Path) -> Any:
    """Waits for a file, and returns its content."""
    while not path.exists():
        time.sleep(POLL_S)
    return json.loads(path.read_text())


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    rewrites: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Any]:
    """Medians of the slowest rank's time for a call, and of the bytes that the busiest node sent.

    Every round has every contestant once, in an order that rotates, with pauses between; calls are
    too long for the many that `pycomm.bench.measure` takes.

    Args:
        calls: the contestants.
        rounds: how many are timed.
        rewrites: what runs before each call, untimed.
    """
    names = list(calls)
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # the first one warms up
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            if rewrites is not None:
                rewrites[name]()
            dist.barrier()
            sent, began = sent_bytes(), time.perf_counter()
            calls[name]()
            took = time.perf_counter() - began
            dist.barrier()
            sample = torch.tensor([took, sent_bytes() - sent], dtype=torch.float64)
            dist.all_reduce(sample, dist.ReduceOp.MAX)
            if number > 0:
                samples[name].append(sample.tolist())
    medians = {}
    for name, taken in samples.items():
        seconds, sent = (statistics.median(values) for values in zip(*taken, strict=True))
        medians[name] = {"time_us": 1e6 * seconds, "link_bytes": int(sent), "rounds": rounds}
    return medians


def all_reduces(group: pycomm.Group, asking: Asking, cases: list[dict[str, Any]]) -> None:
    """Measures every contestant in every case."""
    for case in cases:
        asking.ask("rate", rate=case["rate"])
        what = Case("all_reduce", torch.float32, "sum", case["bytes"] // 4, group.size, "cpu")
        field: dict[str, Contestant] = {"gloo": TorchPeer.gloo()[0]}
        for name in COMPRESSIONS:
            make = Pycomm if name == "none" else Compressed
            field[f"pycomm {name}"] = make(group=group, compression=name)
        field[f"pycomm {WITH_FEEDBACK}{FEEDBACK}"] = Compressed(
            group=group, compression=WITH_FEEDBACK, feedback=True
        )
        prepared = {name: contestant.prepare(what) for name, contestant in field.items()}
        calls = {name: run.call for name, run in prepared.items()}
        rewrites = {name: run.rewrite for name, run in prepared.items()}
        figures = interleave(calls, case["rounds"], rewrites)
        asking.ask("result", case="all_reduce", figures=figures, **case)


class LateTransport(internode.GlooTransport):
    """A link whose batches complete `seconds` later, one after another, as on a longer way.

    Attributes:
        seconds: the latency that is added.
        late: by how many seconds more each batch was late, because a thread woke up late.
    """

    seconds = 0.0
    late: ClassVar[list[float]] = []

    def __init__(self, links: internode.CarrierLinks) -> None:
        self._due: queue.SimpleQueue[float] = queue.SimpleQueue()
        super().__init__(links)
        threading.Thread(target=self._pass_on, daemon=True).start()

    def complete(self) -> None:
        """See the base."""
        if self.seconds == 0:
            super().complete()
        else:
            self._due.put(time.perf_counter() + self.seconds)

    def _pass_on(self) -> None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # so that it wakes up in time
        while True:
            due = self._due.get()
            time.sleep(max(due - time.perf_counter(), 0))
            self.late.append(time.perf_counter() - due)
            super().complete()


def algorithms(group: pycomm.Group, asking: Asking, cases: list[dict[str, Any]]) -> None:
    """Measures pycomm's algorithms in every case."""
    for case in cases:
        asking.ask("rate", rate=case["rate"])
        LateTransport.seconds = case["latency_ms"] / 1e3
        x = torch.zeros(case["bytes"] // 4)
        calls = {
            name: functools.partial(pycomm.all_reduce, x, algorithm=name, group=group)
            for name in ALGORITHMS
        }
        LateTransport.late.clear()
        figures = interleave(calls, case["rounds"])
        late = LateTransport.late
        added = {"late_us": round(1e6 * statistics.median(late), 1)} if late else {}
        asking.ask("result", figures=figures, base="two_shot", **added, **case)


def bf16_over_gloo(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook under another name, as DDP refuses it by its name if there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def make_trainee(name: str, group: pycomm.Group, settings: training.TrainingSettings) -> Any:
    """A DistributedDataParallel with one of `TRAINEES`, with its final buckets."""
    if name in ("gloo", "idle"):
        return training.make(name, settings, group)
    if name == "pycomm all_reduce_hook":
        return training.make("ddp", settings, group)
    trainee = training.make("gloo", settings, group)
    ddp = trainee.model
    assert isinstance(ddp, DistributedDataParallel)
    if name == "gloo bf16 hook":
        ddp.register_comm_hook(None, bf16_over_gloo)
    elif name == "gloo PowerSGD hook":
        # In one bucket: it continues in callbacks, whose order among buckets differs between ranks.
        trainee.model = ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=ONE_BUCKET_MIB)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        trainee.state = pycomm.hooks.Int8State(ddp.module.named_parameters(), group=group)
        trainee.state.register(ddp)
    for _ in range(training.SETTLING):
        trainee.step()
    return trainee


def train(group: pycomm.Group, asking: Asking, case: dict[str, Any]) -> None:
    """Measures steps of every trainee, and for pycomm's also the exchange alone."""
    asking.ask("rate", rate=case["rate"])
    settings = training.TrainingSettings(
        ranks=group.size,
        parameters=case["parameters"],
        batch=case["batch"],
        bucket_cap_mb=case["bucket_cap_mb"],
    )
    idle = make_trainee("idle", group, settings)
    alone = interleave({"compute": idle.step}, case["rounds"])["compute"]["time_us"]
    parameters = idle.parameters
    asking.ask("predict", parameters=parameters, compute_us=alone, rate=case["rate"])
    trainees = {name: make_trainee(name, group, settings) for name in TRAINEES}
    calls = {"compute": idle.step, **{name: t.step for name, t in trainees.items()}}
    for name, trainee in trainees.items():
        if trainee.state is not None:
            link = EmulatedLink(trainee.state)
            trainee.step()  # so that it knows the buckets
            calls[f"{name}, exchange alone"] = link.exchange
    figures = interleave(calls, case["rounds"])
    losses = {
        name: loss_after(trainees[name], case["steps"]) for name in ("gloo", "pycomm int8_hook")
    }
    asking.ask("result", case="training", figures=figures, losses=losses, **case)


def loss_after(trainee: Any, steps: int) -> float:
    """The mean loss of all ranks after `steps` steps of plain SGD."""
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        trainee.step()
        optimizer.step()
    with torch.no_grad():
        loss = trainee.model(trainee.rows).square().mean()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def cut(folder: Path, trials: int, timeout: float, nbytes: int) -> None:
    """Exchanges until the link is cut, repeatedly, each time in a process of its own."""
    for trial in range(trials):
        child = os.fork()
        if child == 0:
            outcome: dict[str, Any] = {"error": None, "message": "", "at": None}
            try:
                exchange_until_error(folder, trial, timeout, nbytes)
            except Exception as error:
                outcome = {"error": type(error).__name__, "message": str(error)}
            outcome["at"] = time.monotonic()
            write(folder / f"outcome-{trial}-{os.environ['RANK']}", outcome)
            os._exit(0)  # torch.distributed would still wait for the link
        wait_for(folder / f"mended-{trial}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)  # the main process has taken note of who hangs
        os.waitpid(child, 0)


def exchange_until_error(folder: Path, trial: int, timeout: float, nbytes: int) -> None:
    """One trial on this rank; compressions take turns."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"]) + 1 + trial
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's Store is for one group only
    dist.init_process_group(
        "gloo", init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}", rank=rank,
        world_size=size, timeout=timedelta(seconds=SETUP_S),
    )  # fmt: skip
    group = pycomm.init(timeout=timeout)
    x = torch.ones(nbytes // 4)
    name = COMPRESSIONS[trial % len(COMPRESSIONS)]
    compression = pycomm.parse_compression(name)
    pycomm.all_reduce(x, "avg", group=group)
    write(folder / f"exchanging-{trial}-{rank}", {"compression": name})
    while True:
        if name == "none":
            pycomm.all_reduce(x, "avg", group=group)
        else:
            pycomm.compressed_all_reduce(x, compression, group=group)


def main() -> None:
    """Carries out the plan."""
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    # Gloo's thread spins while another one holds a connection's lock. With this policy it does not
    # preempt that one, on the only core, to do so.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if plan["what"] == "cut":
        cut(folder, plan["trials"], plan["timeout"], plan["bytes"])
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    internode.GlooTransport = LateTransport  # type: ignore[misc]
    group = pycomm.init(timeout=SETUP_S)
    torch.manual_seed(group.rank)
    asking = Asking(folder)
    asking.ask("nodes", nodes=group.nodes)
    all_reduces(group, asking, plan["all_reduce"])
    algorithms(group, asking, plan["algorithms"])
    for case in plan["training"]:
        train(group, asking, case)
    for case in plan["step"]:
        asking.ask("rate", rate=case["rate"])
        for name, calls in sharded.cases(sharded.make(group, case["parameters"])).items():
            figures = interleave(calls, case["rounds"])
            asking.ask("result", case=name, figures=figures, **case)
    group.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
