"""Goes on training when ranks die: four processes train a model, and two of them are killed.

.. code-block:: shell

    python examples/survive.py

The model is that of ``train_lm.py``, on the standard library's sources. The survivors go on in a
smaller group, without a checkpoint and without new processes. Every step is taken by all of them or
by none, so at the end their parameters are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from train_lm import VOCABULARY, Transformer, check_same, draw_batch, read_corpus

import pycomm

RANKS = 4


def train(rank: int, steps: int, store: str, progress: Any) -> None:
    """Trains as one of the ranks; `progress` shows the parent the number of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = dist.FileStore(store, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=world, rank=rank, world_size=RANKS)
    group = pycomm.init(timeout=30)
    model = pycomm.DataParallel(Transformer(), compression=pycomm.Int8())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus, draw = read_corpus(rank, RANKS), torch.Generator().manual_seed(rank)
    step = 0
    while step < steps:
        text, target = draw_batch(corpus, draw)
        try:
            if model.comm_state.group is not group:
                model.regroup(group)
            loss = functional.cross_entropy(model(text).view(-1, VOCABULARY), target.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            commits = model.should_commit()
        except pycomm.CollectiveError as error:
            began = time.perf_counter()
            group = group.shrink()
            if group.rank == 0:
                took = 1e3 * (time.perf_counter() - began)
                print(f"{error}\n  ranks {group.ranks} go on after {took:.1f} ms", flush=True)
            continue
        if commits:
            optimizer.step()
            step += 1
        optimizer.zero_grad()
        progress.value = max(step, progress.value)
        if group.rank == 0 and step % 25 == 0:
            print(f"step {step}: {group.size} ranks, loss {loss.item():.3f}", flush=True)
    digest = check_same(model, group)
    if group.rank == 0:
        print(f"ranks {group.ranks} have the same parameters, bit for bit (sha256 {digest[:16]})")


def main() -> int:
    """Starts the ranks, and kills two of them at random moments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=None, help="of the victims and the moments")
    options = parser.parse_args()
    choice = random.Random(options.seed)
    context = multiprocessing.get_context("spawn")
    progress = context.Value("i", 0, lock=False)
    victims = choice.sample(range(RANKS), 2)
    moments = sorted(choice.uniform(0.1, 0.8) * options.steps for _ in victims)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.steps, f"{folder}/store", progress)
        ranks = [context.Process(target=train, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for victim, moment in zip(victims, moments, strict=True):
            while progress.value < moment and ranks[victim].is_alive():
                time.sleep(0.01)
            time.sleep(choice.uniform(0, 0.1))
            ranks[victim].kill()
        for process in ranks:
            process.join()
    ends = [process.exitcode for process in ranks]
    wanted = [-signal.SIGKILL if rank in victims else 0 for rank in range(RANKS)]
    return 0 if ends == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
