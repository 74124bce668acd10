"""Goes on training when ranks die: four processes train a model, and two of them are killed.

.. code-block:: shell

    python examples/survive.py
    python examples/survive.py --rejoin
    python examples/survive.py --device cuda --dtype bfloat16

The model is that of ``train_lm.py``, on the standard library's sources. The survivors go on in a
smaller group, without a checkpoint and without new processes. Every step is taken by all of them or
by none, so at the end their parameters are the same, bit for bit. With ``--rejoin``, a new process
takes the place of each one that is killed, and gets the parameters and the optimizer's states.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from devices import DTYPES, add_device, add_dtype, count, device_of
from torch.nn import functional
from train_lm import VOCABULARY, Transformer, check_same, draw_batch, read_corpus

import pycomm

RANKS = 4


def train(
    number: int, steps: int, size: int, folder: str, progress: Any, device: str, dtype: str
) -> None:
    """Trains as one of the first ranks, or joins them if the number is higher.

    Args:
        number: of this process; the first ones are the ranks of these numbers.
        steps: the number of steps.
        size: how many ranks there must be at the end.
        folder: where the processes find each other.
        progress: shows the parent the number of steps.
        device: of the model, "cpu" or "cuda".
        dtype: of the model, a key of `DTYPES`.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(DTYPES[dtype])
    torch.manual_seed(0)
    place = device_of(device, number)
    door, is_new = Path(folder, "door"), number >= RANKS
    if is_new:
        group = pycomm.join(door, timeout=60)
    else:
        world = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=world, rank=number, world_size=RANKS)
        group = pycomm.init(timeout=30)
    net = Transformer().to(place)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    corpus, draw = read_corpus(number % RANKS, RANKS), torch.Generator().manual_seed(number)
    model: Any = None
    trained_by, done = None, {"steps": 0}
    while True:
        text, target = (part.to(place) for part in draw_batch(corpus, draw))
        optimizer.zero_grad()
        try:
            if trained_by is not group:
                if model is None:
                    model = pycomm.DataParallel(net, compression=pycomm.Int8(), group=group)
                else:
                    model.regroup(group)
                pycomm.share_state(optimizer, done, receive=is_new, group=group)
                trained_by, is_new = group, False
                if group.rank == 0:
                    door.write_text(str(group.address))
            loss = functional.cross_entropy(model(text).view(-1, VOCABULARY), target.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            if model.should_commit():
                optimizer.step()
                done["steps"] += 1
                progress.value = max(done["steps"], progress.value)
                if group.rank == 0 and done["steps"] % 25 == 0:
                    print(
                        f"step {done['steps']}: {group.size} ranks, loss {loss.item():.3f}",
                        flush=True,
                    )
            if done["steps"] >= steps and group.size >= size:
                break
            group = group.grow()
        except pycomm.CollectiveError as error:
            began = time.perf_counter()
            group = group.shrink()
            if group.rank == 0:
                took = 1e3 * (time.perf_counter() - began)
                print(f"{error}\n  {group.size} ranks go on after {took:.1f} ms", flush=True)
    digest = check_same(model, group)
    if group.rank == 0:
        print(f"{group.size} ranks have the same parameters, bit for bit (sha256 {digest[:16]})")


def main() -> int:
    """Starts the ranks, and kills two of them at random moments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=150)
    parser.add_argument("--rejoin", action="store_true", help="replace processes that are killed")
    parser.add_argument("--seed", type=int, default=None, help="of the victims and the moments")
    add_device(parser)
    add_dtype(parser)
    options = parser.parse_args()
    device_of(options.device, 0)  # raises here, rather than in every process
    choice = random.Random(options.seed)
    context = multiprocessing.get_context("spawn")
    progress = context.Value("i", 0, lock=False)
    victims = choice.sample(range(RANKS), 2)
    moments = sorted(choice.uniform(0.1, 0.8) * options.steps for _ in victims)
    processes: list[Any] = []

    def start(folder: str) -> None:
        size = RANKS if options.rejoin else 1
        arguments = (len(processes), options.steps, size, folder, progress)
        place = (options.device, options.dtype)
        processes.append(context.Process(target=train, args=(*arguments, *place)))
        processes[-1].start()

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RANKS):
            start(folder)
        for victim, moment in zip(victims, moments, strict=True):
            while progress.value < moment and processes[victim].is_alive():
                time.sleep(0.01)
            time.sleep(choice.uniform(0, 0.1))
            processes[victim].kill()
            if options.rejoin:
                start(folder)
        for process in processes:
            process.join()
    ends = [process.exitcode for process in processes]
    wanted = [-signal.SIGKILL if number in victims else 0 for number in range(len(processes))]
    return 0 if ends == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
