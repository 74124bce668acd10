"""Shows what each primitive does: through torch.distributed, and through pycomm's own functions.

.. code-block:: shell

    python examples/primitives.py
    torchrun --nproc-per-node 4 examples/primitives.py
    python examples/primitives.py --device cuda

Both halves run on the same group. `with_torch` uses torch.distributed's functions on the backend
"pycomm". `with_pycomm` uses pycomm's functions, which take their arguments in the same order; where
torch needs a list with a tensor per rank, they also take one tensor that holds all blocks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from devices import add_device, count, device_of

import pycomm
from pycomm.bench import launch

Results = dict[str, torch.Tensor]


def initial(rank: int, ranks: int) -> torch.Tensor:
    """What a rank has before each primitive: 10, 11, 12 on rank 1 of three."""
    return 10 * rank + torch.arange(ranks)


def with_torch(rank: int, ranks: int, device: torch.device) -> Results:
    """What this rank has after each primitive of torch.distributed."""
    mine, results = initial(rank, ranks).to(device), Results()
    is_first = rank == 0

    results["broadcast"] = mine.clone()
    dist.broadcast(results["broadcast"], src=0)

    results["scatter"] = mine[:1].clone()
    dist.scatter(results["scatter"], list(mine.chunk(ranks)) if is_first else None, src=0)

    blocks = [torch.empty_like(mine[:1]) for _ in range(ranks)]
    dist.gather(mine[:1], blocks if is_first else None, dst=0)
    if is_first:
        results["gather"] = torch.cat(blocks)

    blocks = [torch.empty_like(mine[:1]) for _ in range(ranks)]
    dist.all_gather(blocks, mine[:1])
    results["all_gather"] = torch.cat(blocks)

    total = mine.clone()
    dist.reduce(total, dst=0)
    if is_first:  # what the others have in `total` now is undefined
        results["reduce"] = total

    results["all_reduce"] = mine.clone()
    dist.all_reduce(results["all_reduce"])

    results["reduce_scatter"] = torch.empty_like(mine[:1])
    dist.reduce_scatter(results["reduce_scatter"], list(mine.chunk(ranks)))

    results["all_to_all"] = torch.empty_like(mine)
    dist.all_to_all_single(results["all_to_all"], mine)

    # A ring: to the next rank, from the one before. If every rank began with send() and the message
    # were large, every rank would wait for a receiver; so both messages begin together.
    results["send, recv"] = torch.empty_like(mine)
    sending = dist.P2POp(dist.isend, mine, (rank + 1) % ranks)
    receiving = dist.P2POp(dist.irecv, results["send, recv"], (rank - 1) % ranks)
    for request in dist.batch_isend_irecv([sending, receiving]):
        request.wait()

    dist.barrier()  # returns when every rank has come to it
    return results


def with_pycomm(group: pycomm.Group, device: torch.device) -> Results:
    """What this rank has after each of pycomm's functions, on the CPU or on a GPU."""
    rank, ranks = group.rank, group.size
    mine, results = initial(rank, ranks).to(device), Results()
    is_first = rank == 0

    results["broadcast"] = pycomm.broadcast(mine.clone(), src=0)

    block = torch.empty_like(mine[:1])
    results["scatter"] = pycomm.scatter(block, mine if is_first else None, src=0)

    blocks = torch.empty_like(mine) if is_first else None
    pycomm.gather(mine[:1], blocks, dst=0)
    if blocks is not None:
        results["gather"] = blocks

    results["all_gather"] = pycomm.all_gather(torch.empty_like(mine), mine[:1])

    total = pycomm.reduce(mine.clone(), dst=0)
    if is_first:
        results["reduce"] = total

    results["all_reduce"] = pycomm.all_reduce(mine, out=torch.empty_like(mine))

    results["reduce_scatter"] = pycomm.reduce_scatter(torch.empty_like(mine[:1]), mine)

    results["all_to_all"] = pycomm.all_to_all(torch.empty_like(mine), mine)

    results["send, recv"] = torch.empty_like(mine)
    sending = pycomm.isend(mine, (rank + 1) % ranks)
    pycomm.recv(results["send, recv"], (rank - 1) % ranks)
    sending.wait()

    pycomm.barrier()
    return results


def as_texts(results: Results) -> dict[str, str]:
    """The numbers of each result, with spaces between them."""
    return {name: " ".join(map(str, values.tolist())) for name, values in results.items()}


def print_table(everyone: list[Any]) -> None:
    """Prints a line per primitive, with what each rank has."""
    rows = [("", [f"rank {rank}" for rank in range(len(everyone))])]
    rows += [(name, [results.get(name, "-") for results in everyone]) for name in everyone[0]]
    width = max(len(text) for _, texts in rows for text in texts) + 3
    for name, texts in rows:
        print(f"{name:16}" + "".join(f"{text:{width}}" for text in texts).rstrip())


def run_rank(device: str) -> None:
    """Runs all primitives on one rank; rank 0 prints what every rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = device_of(device, rank)
    before = {"before": initial(rank, ranks)}
    torchs = as_texts(before | with_torch(rank, ranks, place))
    with pycomm.init() as group:
        ours = as_texts(before | with_pycomm(group, place))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (torchs, ours))
    if rank == 0:
        print_table([ours for _, ours in everyone])
        same = all(torchs == ours for torchs, ours in everyone)
        print(f"\ntorch.distributed and pycomm gave {'the same' if same else 'DIFFERENT results'}")


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=count, default=3, help="without torchrun (default 3)")
    add_device(parser)
    options = parser.parse_args()
    device_of(options.device, 0)  # raises here, rather than in every process
    launch.run(run_rank, options.device, ranks=options.ranks, backend="pycomm")


if __name__ == "__main__":
    main()
