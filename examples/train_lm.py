"""Trains a small character-level transformer on Python's own sources, data-parallel with pycomm.

.. code-block:: shell

    python examples/train_lm.py --mode ddp --compression int8
    torchrun --nproc-per-node 2 examples/train_lm.py --mode wrapper --compression topk:0.01
    python examples/train_lm.py --mode wrapper --shard gradients
    python examples/train_lm.py --compression topk:0.03:values=int8 --error-reset

`parallelise` makes the model data-parallel, with torch's DistributedDataParallel and one of
pycomm's hooks, or with pycomm's own wrapper. The training loop is the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from showing import Screen, draw_losses
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
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
OUT = Path(__file__).resolve().parent.parent / "out"


State = hooks.CommState | hooks.LocalSGDState


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
    """

    def __init__(self) -> None:
        super().__init__(
            Embedding(),
            *(Block() for _ in range(LAYERS)),
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        )


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
        mode: ``"ddp"`` or ``"wrapper"``.
        compression: a name for :func:`pycomm.parse_compression`.
        steps: number of steps.
        trace: file for a trace of the last steps.
        shard: the wrapper's option: ``"optimizer"``, ``"gradients"`` or None.
        error_reset: compress each rank's update instead of its gradients (docs/data-parallel.md).
    """

    mode: str
    compression: str
    steps: int
    trace: str | None = None
    shard: str | None = None
    error_reset: bool = False

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
        losses: the mean of every `TALK_EVERY` steps.
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
        return self.stats["exposed_ms_total"] / self.stats["steps"]


def parallelise(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, group: pycomm.Group
) -> tuple[nn.Module, State]:
    """Returns a model whose backward averages gradients over all ranks, and its state.

    With error reset, ``state.step()`` averages updates instead after each step of the optimizer.
    """
    compression = None
    if settings.compression != "none":
        compression = pycomm.parse_compression(settings.compression)
    if settings.mode == "wrapper":
        wrapped = pycomm.DataParallel(
            model, compression=compression, group=group, shard=settings.shard
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
        state = hooks.CommState(compression, parameters, group=group)
    state.register(ddp)
    return ddp, state


def check_same(model: nn.Module, group: pycomm.Group) -> str:
    """Returns a hash of the parameters; exits if ranks' parameters differ in any bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
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
        self._screen = Screen(settings.name, settings.steps, group.rank)
        self._recent = torch.zeros(1)
        self._losses: list[float] = []
        self._exchanging = 0.0
        self._stamps = [time.perf_counter()]

    def add(self, loss: torch.Tensor) -> None:
        """Records the end of a step."""
        self._exchanging += sum(end - begin for _, begin, end in self._state.intervals())
        self._recent += loss
        self._stamps.append(time.perf_counter())
        step = len(self._stamps) - 1
        if step % TALK_EVERY == 0:
            pycomm.all_reduce(self._recent, "avg", group=self._group)
            self._losses.append(self._recent.item() / TALK_EVERY)
            tokens = step * BATCH * CONTEXT * self._group.size
            self._screen.show(step, self._losses[-1], tokens / self._seconds)
            self._recent.zero_()

    def close(self, memory: pycomm.memory.MemoryReport, digest: str) -> Run:
        """Returns the results."""
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
    torch.manual_seed(0)  # the same model on all ranks, ...
    module = Transformer()
    # With Adam, top-k's loss is further behind (docs/data-parallel.md).
    kind = pycomm.optim.FusedSGD if settings.shard else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=0.2, momentum=0.9)
    model, state = parallelise(module, optimizer, settings, group)
    corpus = read_corpus(group.rank, group.size)  # ... on different text
    random = torch.Generator().manual_seed(group.rank)
    log = Log(settings, group, state)
    with contextlib.ExitStack() as traced:
        trace = None
        for step in range(1, settings.steps + 1):
            if settings.trace and step > settings.steps - TRACED and trace is None:
                trace = traced.enter_context(pycomm.trace(settings.trace, group=group))
            inputs, targets = draw_batch(corpus, random)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(state, hooks.LocalSGDState):
                state.step()
            log.add(loss.detach())
            if trace is not None:
                trace.step()
    with contextlib.ExitStack() as shown:
        if isinstance(state, hooks.LocalSGDState):  # apart from the outer ones, parameters differ
            shown.enter_context(state.outer_parameters())
        return log.close(pycomm.memory_report(model, optimizer), check_same(model, group))


def summarise(run: Run, ranks: int) -> str:
    """Formats the results in a few lines."""
    tokens = run.steps * BATCH * CONTEXT * ranks
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
    """Parses the name of a compression."""
    pycomm.parse_compression(name)
    return name


def run_rank(settings: Settings, plot: str) -> None:
    """Trains on one rank, and prints and draws the results on rank 0."""
    with pycomm.init() as group:
        run = train(settings, group)
    if group.rank == 0:
        print(summarise(run, group.size))
        draw_losses(plot, {settings.name: run.losses}, TALK_EVERY)
        print(f"drawn in {plot}")
        if settings.trace:
            print(f"the last {TRACED} steps are in {settings.trace}, for https://ui.perfetto.dev")


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start (default 2)")
    add("--steps", type=int, default=1500, help="training steps (default 1500)")
    add("--mode", choices=("ddp", "wrapper"), default="ddp", help="torch's DDP, or pycomm's own")
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
    add("--trace", help=f"writes a trace of the last {TRACED} steps")
    arguments = parser.parse_args()
    if arguments.steps < TALK_EVERY:
        parser.error(f"--steps must be at least {TALK_EVERY}")
    mode, shard = arguments.mode, arguments.shard
    if shard and mode == "ddp":
        parser.error("--shard needs --mode wrapper")
    if arguments.error_reset and (mode == "wrapper" or arguments.compression == "none"):
        parser.error("--error-reset needs --mode ddp and a --compression")
    launch.require("rich", "matplotlib")
    settings = Settings(
        mode, arguments.compression, arguments.steps, arguments.trace, shard, arguments.error_reset
    )
    launch.run(run_rank, settings, arguments.plot, ranks=arguments.ranks)


if __name__ == "__main__":
    main()
