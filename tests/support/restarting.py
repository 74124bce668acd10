"""A training that saves a checkpoint after every step and resumes from the last one.

As a script under torchrun, with a folder and a number of steps; what torchrun starts first is
killed in mid-training.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ddp
import spanning
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks


def checkpoint(folder: Path, steps: int, rank: int) -> Path:
    """The file of a rank's checkpoint after a number of steps."""
    return folder / f"{steps}-{rank}.pt"


def steps_saved(folder: Path, size: int, steps: int) -> int:
    """The last step that all ranks have saved."""
    return max(
        n
        for n in range(steps + 1)
        if n == 0 or all(checkpoint(folder, n, rank).exists() for rank in range(size))
    )


def train(group: pycomm.Group, folder: Path, steps: int, killed_in: int | None = None) -> int:
    """Returns how many steps had been saved before; in step `killed_in` rank 1 dies in backward."""
    model = DistributedDataParallel(ddp.network(), bucket_cap_mb=0.001)
    comm = hooks.Int8State(model.named_parameters(), group=group)
    model.register_comm_hook(comm, hooks.int8_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "comm": comm}
    begin = steps_saved(folder, group.size, steps)
    if begin:
        saved = torch.load(checkpoint(folder, begin, group.rank), weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def die(_: torch.Tensor) -> None:
        if comm.step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == 1:
        next(model.parameters()).register_hook(die)  # when other buckets are on their way
    for step in range(begin, steps):
        optimizer.zero_grad()
        model(ddp.batch(group.rank, step)).square().mean().backward()
        optimizer.step()
        file = checkpoint(folder, step + 1, group.rank)
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{file}.new")
        Path(f"{file}.new").rename(file)  # never half of one
    return begin


def main(folder: str, steps: str) -> None:
    """Records after which restart it has finished, and the step that it resumed from."""
    spanning.pretend("aab"[int(os.environ["RANK"])])
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with pycomm.init(timeout=30) as group:
        assert len(group.nodes) == 2, group.nodes
        begin = train(group, Path(folder), int(steps), killed_in=4 if life == "0" else None)
        Path(folder, f"ended-{group.rank}").write_text(f"life {life} from {begin}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
