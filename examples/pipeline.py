"""Trains a small transformer as a pipeline: each rank has some of the layers.

.. code-block:: shell

    python examples/pipeline.py --schedule gpipe
    torchrun --nproc-per-node 2 examples/pipeline.py

The batch is cut into microbatches. While a rank computes one of them, the next rank computes the
one before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from devices import CPU
from model_parallel import Log, loss_of, make_optimizer, parser_of, run
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from train_lm import Transformer

MICROBATCHES = 8
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def layers_of(rank: int, ranks: int) -> nn.Sequential:
    """This rank's part of the model."""
    torch.manual_seed(0)
    layers = list(Transformer())
    if ranks > len(layers):
        raise SystemExit(f"{len(layers)} layers cannot be split among {ranks} ranks")
    return nn.Sequential(*layers[rank * len(layers) // ranks : (rank + 1) * len(layers) // ranks])


def train(
    steps: int, plot: str | None = None, device: torch.device = CPU, schedule: str = "1f1b"
) -> Log:
    """Trains on every rank; rank 0 shows progress."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = layers_of(rank, ranks).to(device)
    stage = PipelineStage(layers, rank, ranks, device)
    pipeline = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = make_optimizer(layers.parameters())
    log = Log(f"pipeline, schedule {schedule}", steps, plot, device)
    for inputs, targets in log.batches():
        losses: list[torch.Tensor] = []
        with log.step():
            given = (inputs,) if stage.is_first else ()
            if stage.is_last:
                pipeline.step(*given, target=targets, losses=losses)
            else:
                pipeline.step(*given)
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.stack(losses).mean() if stage.is_last else torch.empty((), device=device)
        dist.broadcast(loss, ranks - 1)
        log.add(loss)
    log.close()
    return log


if __name__ == "__main__":
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    arguments = parser.parse_args()
    run(train, arguments, arguments.schedule)
