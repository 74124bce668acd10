"""Trains a small character-level transformer on Python's own sources, data-parallel with pycomm.

.. code-block:: shell

    python examples/train_lm.py --mode ddp --compression int8
    torchrun --nproc-per-node 2 examples/train_lm.py --mode wrapper --compression topk:0.01
    python examples/train_lm.py --mode wrapper --shard gradients
    python examples/train_lm.py --compression topk:0.03:values=int8 --error-reset
    python examples/train_lm.py --autocast float16 --grad-scaler --accumulate 2 --recompute
    python examples/train_lm.py --device cuda --mode graph --compression int8 --compile
    torchrun --nproc-per-node 2 examples/train_lm.py --save out/model.pt  # also if SIGTERM ends it

`parallelise` makes the model data-parallel, with torch's DistributedDataParallel and one of
pycomm's hooks, or with pycomm's own wrapper. The training loop is the same for both. With ``--mode
graph`` a CUDA graph holds a whole step, in which the program averages the gradients itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from devices import DTYPES, add_device, add_dtype, count, device_of
from showing import Screen, draw_losses
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm import hooks, optim
from pycomm.bench import launch

VOCABULARY = 128  # ASCII
CONTEXT = 64
BATCH = 16
WIDTH = 128
LAYERS = 2
HEADS = 4
CORPUS_BYTES = 4 << 20
TALK_EVERY = 10  # steps
LAST = 50  # steps in the mean that is the final loss
TRACED = 5  # steps in the trace
HEAP_BYTES = 64 << 20  # of GPU memory that ranks share, for shards
WARM_UP = 3  # steps before one is captured
OUT = Path(__file__).resolve().parent.parent / "out"


State = hooks.CommState | hooks.LocalSGDState
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Causal attention, then a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, length, _ = x.shape
        packed = self.query_key_value(self.norm_attention(x))
        heads = packed.view(batch, length, 3, -1, WIDTH // HEADS)  # all, or one rank's
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heard.transpose(1, 2).flatten(2))
        changed: torch.Tensor = x + self.network(self.norm_network(x))
        return changed


class Embedding(nn.Module):
    """A vector for each character, plus one for its place."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time) of characters to (batch, time, width)."""
        x: torch.Tensor = self.characters(characters) + self.places.weight[: characters.shape[1]]
        return x


class Transformer(nn.Sequential):
    """Predicts the next character from up to `CONTEXT` characters before it.

    Maps (batch, time) of characters to (batch, time, vocabulary) of logits.

    Args:
        recompute: keep only the blocks' inputs, and compute a block anew in backward.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(
            Embedding(),
            *(Block() for _ in range(LAYERS)),
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        )
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        for layer in self:
            if self._recompute and isinstance(layer, Block):  # which draws no random numbers
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        return x


def read_corpus(rank: int, size: int) -> torch.Tensor:
    """This rank's share of the standard library's sources, as ASCII codes."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:CORPUS_BYTES]
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return codes[codes < VOCABULARY].tensor_split(size)[rank].long()


def draw_batch(corpus: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random passages, and as targets the character after each character."""
    starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH, 1), generator=random)
    passages = corpus[starts + torch.arange(CONTEXT + 1)]
    return passages[:, :-1], passages[:, 1:]


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    Attributes:
        compression: a name for :func:`pycomm.parse_compression`.
        mode: ``"ddp"``, ``"wrapper"`` or ``"graph"``.
        steps: number of steps.
        trace: file for a trace of the last steps.
        save: file for the model after the last step, also if a signal asks to stop before.
        shard: the wrapper's option: ``"optimizer"``, ``"gradients"`` or None.
        error_reset: compress each rank's update instead of its gradients
            (docs/how-to/data-parallel.md).
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of parameters, a key of `DTYPES`.
        autocast: of forwards, ``"bfloat16"``, ``"float16"`` or None.
        grad_scaler: scale the loss, and skip steps that overflow.
        accumulate: batches in a step.
        recompute: activations, in backward.
        compile: the model, with torch.compile.
    """

    compression: str = "none"
    mode: str = "ddp"
    steps: int = 1500
    trace: str | None = None
    save: str | None = None
    shard: str | None = None
    error_reset: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    autocast: str | None = None
    grad_scaler: bool = False
    accumulate: int = 1
    recompute: bool = False
    compile: bool = False

    @property
    def name(self) -> str:
        """Describes the model and how it is trained."""
        sharding = f", shard={self.shard!r}" if self.shard else ""
        reset = ", error reset" if self.error_reset else ""
        return f"{self.mode}, {self.compression}{sharding}{reset}"


@dataclass(frozen=True)
class Run:
    """Results of a training. Losses are means over all ranks; the rest is this rank's.

    Attributes:
        losses: the mean of every `TALK_EVERY` steps; the last one may have fewer.
        steps: the number of steps.
        seconds: the total time.
        step_ms: the time of the median step.
        exchange_ms: the time that exchanges ran, as a mean over all steps.
        stats: statistics of the exchange after the last step.
        memory: the memory of training.
        digest: a hash of the parameters, the same on all ranks.
    """

    losses: list[float]
    steps: int
    seconds: float
    step_ms: float
    exchange_ms: float
    stats: dict[str, float]
    memory: pycomm.memory.MemoryReport
    digest: str

    @property
    def final_loss(self) -> float:
        """The mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST // TALK_EVERY :])

    @property
    def exposed_ms(self) -> float:
        """The time that backward waited for the exchange at its end, as a mean over all steps."""
        return self.stats["exposed_ms_mean"]


def parallelise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: optim.GradScaler | None,
    settings: Settings,
    group: pycomm.Group,
) -> tuple[nn.Module, State]:
    """Returns a model whose backward averages gradients over all ranks, and its state.

    With error reset, ``state.step()`` averages updates instead after each step of the optimizer.
    """
    compression = compression_of(settings)
    if settings.mode == "wrapper":
        wrapped = pycomm.DataParallel(
            model, compression=compression, group=group, shard=settings.shard, grad_scaler=scaler
        )
        assert isinstance(wrapped.comm_state, hooks.CommState)  # it exchanges gradients
        return wrapped, wrapped.comm_state
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = model.named_parameters()
    state: State
    if settings.error_reset:
        state = hooks.LocalSGDState(
            parameters, optimizer, period=1, compression=compression, local_residuals=True,
            gradient_steps=settings.steps // 10, group=group,
        )  # fmt: skip
    else:
        state = hooks.CommState(compression, parameters, grad_scaler=scaler, group=group)
    state.register(ddp)
    return ddp, state


def compression_of(settings: Settings) -> pycomm.Compression | None:
    """The compression; None for none."""
    return (
        None if settings.compression == "none" else pycomm.parse_compression(settings.compression)
    )


def add_gradients(
    model: nn.Module, scaler: optim.GradScaler | None, settings: Settings, batches: Batches
) -> torch.Tensor:
    """Adds the gradients of batches; only the last one's backward averages over ranks.

    Returns:
        The mean loss.
    """
    total = torch.zeros((), dtype=torch.float32, device=batches[0][0].device)
    kind = getattr(torch, settings.autocast) if settings.autocast else None
    for number, (inputs, targets) in enumerate(batches, 1):
        exchanges = number == len(batches) or settings.mode == "graph"
        hold: Any = contextlib.nullcontext() if exchanges else model.no_sync()  # type: ignore[operator]
        with hold, torch.autocast(settings.device, kind, enabled=kind is not None):
            logits = model(inputs).flatten(0, 1)
            loss = functional.cross_entropy(logits, targets.flatten()) / len(batches)
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


class CapturedStep:
    """Takes steps; after the first ones, a CUDA graph holds a whole step, and is replayed.

    A step computes gradients, averages them over the ranks, and updates the parameters.

    Args:
        module: a rank's own model.
        optimizer: of its parameters.
        settings: of the training.
        group: the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        group: pycomm.Group,
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._settings, self._group = settings, group
        self._compression = compression_of(settings)
        parameters = list(module.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        self._gradients = torch.zeros(count, device=parameters[0].device)
        self._residual = torch.zeros_like(self._gradients)
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.grad, begin = self._gradients[begin:end].view_as(parameter), end
        self._batches: Batches = []  # a graph reads its inputs at the same addresses
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._taken = 0

    def __call__(self, batches: Batches) -> torch.Tensor:
        """Takes a step; returns the mean loss of its batches."""
        self._batches = self._batches or [(x.clone(), y.clone()) for x, y in batches]
        for mine, given in zip(self._batches, batches, strict=True):
            for tensor, values in zip(mine, given, strict=True):
                tensor.copy_(values)
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._taken == WARM_UP:  # ranks have connected, and the optimizer has its states
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._run()
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                self._loss = self._run()
            else:
                self._graph.replay()
        self._taken += 1
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._loss

    def _run(self) -> torch.Tensor:
        self._gradients.zero_()
        loss = add_gradients(self._module, None, self._settings, self._batches)
        if self._compression is None:
            pycomm.all_reduce(self._gradients, "avg", group=self._group)
        else:
            pycomm.compressed_all_reduce(
                self._gradients, self._compression, residual=self._residual, group=self._group
            )
        self._optimizer.step()
        return loss


def check_same(model: nn.Module, group: pycomm.Group) -> str:
    """Returns a hash of the parameters; exits if ranks' parameters differ in any bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyone = torch.empty(group.size * len(mine), dtype=torch.uint8)
    pycomm.all_gather(everyone, mine, group=group)
    if (everyone.view(group.size, -1) != mine).any():
        raise SystemExit("the ranks' parameters differ")
    return digest.hexdigest()


class Log:
    """Collects the results of a training; rank 0 shows progress."""

    def __init__(self, settings: Settings, group: pycomm.Group, state: State) -> None:
        self._group, self._state = group, state
        self._tokens = BATCH * settings.accumulate * CONTEXT * group.size  # of a step
        self._screen = Screen(settings.name, settings.steps, group.rank)
        self._recent = torch.zeros(1, dtype=torch.float32)
        self._losses: list[float] = []
        self._exchanging = 0.0
        self._stamps = [time.perf_counter()]

    def add(self, loss: torch.Tensor) -> None:
        """Records the end of a step."""
        self._exchanging += sum(end - begin for _, begin, end in self._state.intervals())
        self._recent += loss
        self._stamps.append(time.perf_counter())
        if self.steps % TALK_EVERY == 0:
            self._show(TALK_EVERY)

    @property
    def steps(self) -> int:
        """The steps so far."""
        return len(self._stamps) - 1

    def _show(self, recent: int) -> None:
        """Shows the mean loss of the last `recent` steps."""
        pycomm.all_reduce(self._recent, "avg", group=self._group)
        self._losses.append(self._recent.item() / recent)
        self._screen.show(self.steps, self._losses[-1], self.steps * self._tokens / self._seconds)
        self._recent.zero_()

    def close(self, memory: pycomm.memory.MemoryReport, digest: str) -> Run:
        """Returns the results."""
        if rest := self.steps % TALK_EVERY:
            self._show(rest)
        self._screen.close()
        steps = [after - before for before, after in pairwise(self._stamps)]
        step_ms, exchange_ms = statistics.median(steps), self._exchanging / len(steps)
        return Run(
            losses=self._losses,
            steps=len(steps),
            seconds=self._seconds,
            step_ms=1e3 * step_ms,
            exchange_ms=1e3 * exchange_ms,
            stats=self._state.stats(),
            memory=memory,
            digest=digest,
        )

    @property
    def _seconds(self) -> float:
        return self._stamps[-1] - self._stamps[0]


def train(settings: Settings, group: pycomm.Group) -> Run:
    """Trains on every rank; rank 0 shows progress."""
    device = device_of(settings.device, group.rank)
    torch.set_default_dtype(DTYPES[settings.dtype])
    torch.manual_seed(0)  # the same model on all ranks, ...
    module = Transformer(settings.recompute).to(device)
    if settings.compile:
        module.compile()
    # With Adam, top-k's loss is further behind (docs/how-to/data-parallel.md).
    kind = optim.FusedSGD if settings.shard or settings.mode == "graph" else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=0.2, momentum=0.9)
    scaler = optim.GradScaler(settings.device) if settings.grad_scaler else None
    corpus = read_corpus(group.rank, group.size)  # ... on different text
    random = torch.Generator().manual_seed(group.rank)

    def draw() -> Batches:
        batches = [draw_batch(corpus, random) for _ in range(settings.accumulate)]
        return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]

    model: nn.Module
    state: State
    if settings.mode == "graph":
        model, state = module, hooks.AllReduceState(group=group)  # which exchanges nothing
        take_step: Callable[[Batches], torch.Tensor] = CapturedStep(
            module, optimizer, settings, group
        )
    else:
        model, state = parallelise(module, optimizer, scaler, settings, group)

        def take_ordinary_step(batches: Batches) -> torch.Tensor:
            loss = add_gradients(model, scaler, settings, batches)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if isinstance(state, hooks.LocalSGDState):
                state.step()
            return loss

        take_step = take_ordinary_step

    log = Log(settings, group, state)
    with contextlib.ExitStack() as traced:
        trace = None
        for step in range(1, settings.steps + 1):
            if settings.trace and step > settings.steps - TRACED and trace is None:
                trace = traced.enter_context(pycomm.trace(settings.trace, group=group))
            log.add(take_step(draw()).cpu())
            if trace is not None:
                trace.step()
            if settings.save and group.stop_requested((signal.SIGTERM, signal.SIGUSR1)):
                break
    with contextlib.ExitStack() as shown:
        if isinstance(state, hooks.LocalSGDState):  # apart from the outer ones, parameters differ
            shown.enter_context(state.outer_parameters())
        if settings.save and group.rank == 0:
            torch.save({"steps": log.steps, "model": module.state_dict()}, settings.save)
        return log.close(pycomm.memory_report(model, optimizer), check_same(model, group))


def summarise(run: Run, settings: Settings, ranks: int) -> str:
    """Formats the results in a few lines."""
    tokens = run.steps * BATCH * settings.accumulate * CONTEXT * ranks
    lines = [
        f"final loss {run.final_loss:.3f}, {tokens / run.seconds:,.0f} tokens/s on {ranks} ranks",
        f"step {run.step_ms:.1f} ms",
    ]
    if run.exchange_ms:
        lines[-1] += (
            f"; exchanges run for {run.exchange_ms:.2f} ms, of which "
            f"{run.exposed_ms / run.exchange_ms:.0%} ({run.exposed_ms:.2f} ms) stay exposed"
        )
        lines.append(
            f"read from peers {run.stats['bytes_wire']:,.0f} B per step, for gradients of "
            f"{run.stats['bytes_in']:,.0f} B: {run.stats['ratio']:.1f} times less than uncompressed"
        )
    if run.memory.formula is not None:
        lines.append(f"memory: {run.memory.formula}")
    lines.append(f"parameters bit-equal on all ranks (sha256 {run.digest[:16]})")
    return "\n".join(lines)


def compression_name(name: str) -> str:
    """Checks the name of a compression."""
    try:
        pycomm.parse_compression(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def run_rank(settings: Settings, plot: str) -> None:
    """Trains on one rank, and prints and draws the results on rank 0."""
    on_gpus = settings.shard and settings.device == "cuda"
    with pycomm.init(cuda_heap_bytes=HEAP_BYTES if on_gpus else 0) as group:
        run = train(settings, group)
    if group.rank == 0:
        print(summarise(run, settings, group.size))
        draw_losses(plot, {settings.name: run.losses}, TALK_EVERY)
        print(f"drawn in {plot}")
        if settings.save:
            print(f"step {run.steps} is in {settings.save}")
        if settings.trace:
            print(f"the last {TRACED} steps are in {settings.trace}, for https://ui.perfetto.dev")


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--ranks", type=count, default=2, help="processes to start (default 2)")
    add("--steps", type=count, default=1500, help="training steps (default 1500)")
    add("--mode", choices=("ddp", "wrapper", "graph"), default="ddp",
        help="torch's DDP, pycomm's own wrapper, or a captured step")  # fmt: skip
    add(
        "--compression",
        type=compression_name,
        default="none",
        help="none, bf16, int8, topk:DENSITY (default none)",
    )
    add(
        "--plot", default=str(OUT / "train_lm.png"), help="the loss, as a PNG (default %(default)s)"
    )
    add("--shard", choices=("optimizer", "gradients"),
        help="divide these among the ranks, with the wrapper")  # fmt: skip
    add("--error-reset", action="store_true",
        help="compress updates instead of gradients, with DDP")  # fmt: skip
    add_device(parser)
    add_dtype(parser)
    add("--autocast", choices=("bfloat16", "float16"), help="the type of forwards")
    add("--grad-scaler", action="store_true", help="scale the loss, for float16")
    add("--accumulate", type=count, default=1, help="batches in a step (default 1)")
    add("--recompute", action="store_true", help="activations, instead of keeping them")
    add("--compile", action="store_true", help="the model, with torch.compile")
    add("--save", help="a file for the model after the last step, or after SIGTERM or SIGUSR1")
    add("--trace", help=f"writes a trace of the last {TRACED} steps")
    arguments = parser.parse_args()
    check(parser, arguments)
    launch.require("rich", "matplotlib")
    settings = Settings(**{each.name: getattr(arguments, each.name) for each in fields(Settings)})
    launch.run(run_rank, settings, arguments.plot, ranks=arguments.ranks, device=arguments.device)


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exits with a message if options do not fit together."""
    device_of(given.device, 0)
    if given.shard and given.mode != "wrapper":
        parser.error("--shard needs --mode wrapper")
    if given.error_reset and (given.mode != "ddp" or given.compression == "none"):
        parser.error("--error-reset needs --mode ddp and a --compression")
    if given.grad_scaler and (given.error_reset or given.mode == "graph"):
        parser.error("--grad-scaler does not go with --error-reset or --mode graph")
    if given.mode == "graph" and given.device == "cpu":
        parser.error("--mode graph captures a CUDA graph, so it needs --device cuda")


if __name__ == "__main__":
    main()
