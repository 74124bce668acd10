"""Trains a small character-level transformer on Python's own sources, data-parallel with pycomm.

.. code-block:: shell

    python examples/train_lm.py --ranks 2
    torchrun --nproc-per-node 2 examples/train_lm.py

What makes it data-parallel is `flatten_gradients` and one line of `train`: every gradient is a
view of one buffer in the group's shared window, and ``pycomm.all_reduce`` averages it in place.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import pycomm
from pycomm.bench import extras, launch

VOCABULARY = 128  # ASCII
CONTEXT = 64
BATCH = 16
WIDTH = 128
LAYERS = 2
HEADS = 4
CORPUS_BYTES = 4 << 20
SHOWN = 10  # lines about the loss
TALK_EVERY = 10  # steps


class Block(nn.Module):
    """Attention to what came before, then a small network, each added to its input."""

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
        query, key, value = packed.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heard.transpose(1, 2).reshape(batch, length, WIDTH))
        changed: torch.Tensor = x + self.network(self.norm_network(x))
        return changed


class Transformer(nn.Module):
    """Predicts the next character from up to `CONTEXT` before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Maps (batch, time) of characters to (batch, time, vocabulary) of logits."""
        x = self.characters(characters) + self.places.weight[: characters.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_corpus(rank: int, size: int) -> torch.Tensor:
    """This rank's share of the standard library's sources, as ASCII codes."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:CORPUS_BYTES]
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return codes[codes < VOCABULARY].tensor_split(size)[rank].long()


def draw_batch(corpus: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random passages, and for each character the one that follows it."""
    starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH, 1), generator=random)
    passages = corpus[starts + torch.arange(CONTEXT + 1)]
    return passages[:, :-1], passages[:, 1:]


def flatten_gradients(model: nn.Module, group: pycomm.Group) -> torch.Tensor:
    """Makes every gradient a view of one buffer in shared memory, and returns the buffer."""
    parameters = list(model.parameters())
    flat = group.empty(sum(parameter.numel() for parameter in parameters)).zero_()
    begin = 0
    for parameter in parameters:
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat


def same_on_all_ranks(model: nn.Module, group: pycomm.Group) -> tuple[bool, str]:
    """Whether all ranks' parameters agree in every bit, and this rank's hash of them."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes(parameter.detach().view(-1).view(torch.uint8).tolist()))
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyone = torch.empty(group.size * len(mine), dtype=torch.uint8)
    pycomm.all_gather(everyone, mine, group=group)
    return bool((everyone.view(group.size, -1) == mine).all()), digest.hexdigest()


def train(steps: int) -> None:
    """Trains on every rank; rank 0 shows progress and a summary."""
    group = pycomm.init()
    torch.manual_seed(0)  # the same model everywhere, ...
    model = Transformer()
    corpus = read_corpus(group.rank, group.size)  # ... on different text
    random = torch.Generator().manual_seed(group.rank)
    gradients = flatten_gradients(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    screen = Screen(steps, group.rank == 0)
    begin, exchanging, losses = time.perf_counter(), 0.0, torch.zeros(1)
    for step in range(1, steps + 1):
        inputs, targets = draw_batch(corpus, random)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        gradients.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        before = time.perf_counter()
        pycomm.all_reduce(gradients, "avg", group=group)
        exchanging += time.perf_counter() - before
        optimizer.step()
        losses += loss.detach()
        if step % TALK_EVERY == 0:
            pycomm.all_reduce(losses, "avg", group=group)
            screen.show(step, losses.item() / TALK_EVERY)
            losses.zero_()
    screen.close()
    elapsed = time.perf_counter() - begin
    same, digest = same_on_all_ranks(model, group)
    if group.rank == 0:
        rate = steps * BATCH * CONTEXT * group.size / elapsed
        size, each = gradients.nbytes / (1 << 20), 1e6 * exchanging / steps
        print(f"{rate:,.0f} characters/s on {group.size} ranks, {elapsed:.0f} s in all")
        print(
            f"{exchanging / elapsed:.1%} of it in all_reduce: {each:,.0f} us for {size:.1f} MiB of"
        )
        print("gradients, waiting for the slower rank included")
        print(
            f"parameters bit-equal on all ranks: {'yes' if same else 'NO'} (sha256 {digest[:16]})"
        )
    group.close()
    if not same:
        raise SystemExit("the ranks' parameters differ")


class Screen:
    """The progress bar, and a line about the loss now and then; silent on all ranks but one."""

    def __init__(self, steps: int, active: bool) -> None:
        from rich import progress

        self._active = active
        self._line_every = max(steps // SHOWN // TALK_EVERY, 1) * TALK_EVERY
        self._bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]:.3f}"),
            progress.TimeRemainingColumn(),
            disable=not active,
        )
        self._task = self._bar.add_task("", total=steps, loss=float("nan"))
        self._bar.start()

    def show(self, step: int, loss: float) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step, loss=loss)
        if self._active and (step == TALK_EVERY or step % self._line_every == 0):
            self._bar.console.print(f"step {step:5}  loss {loss:.3f}", highlight=False)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._bar.stop()


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--steps", type=int, default=1500, help="training steps (default 1500)")
    arguments = parser.parse_args()
    extras.require("rich")
    launch.run(train, arguments.steps, ranks=arguments.ranks)


if __name__ == "__main__":
    main()
