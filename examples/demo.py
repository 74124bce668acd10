"""A short demonstration: training with and without compression, and pycomm beside Gloo or NCCL.

Takes under three minutes on two cores; ``make demo`` runs it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import train_lm
from devices import add_device, device_of
from showing import draw_losses

import pycomm
from pycomm.bench import cli, launch

RANKS = 2
STEPS = 600
TRAININGS = {
    "none": train_lm.Settings(steps=STEPS),
    "int8": train_lm.Settings("int8", steps=STEPS),
    "top-k, reset": train_lm.Settings("topk:0.03:values=int8", steps=STEPS, error_reset=True),
}
OUT = Path(__file__).resolve().parent.parent / "out"
CURVES = OUT / "demo_losses.png"
BENCHMARK = "all_reduce -b 1K -e 64M -f 16 --buffer both"
PEERS = {"cpu": "--peer gloo --brief", "cuda": "--peer nccl"}  # NCCL may be missing
NEXT = """\
Next:
  torchrun --nproc-per-node 2 examples/train_lm.py     the training under torchrun
  python -m pycomm.bench all_reduce -a all --peer all  every algorithm, every peer that is installed
  make test                                            the tests"""


def train_all(device: str) -> None:
    """Trains the same model in every way; rank 0 prints and draws the results."""
    with pycomm.init() as group:
        runs = {
            name: train_lm.train(replace(settings, device=device), group)
            for name, settings in TRAININGS.items()
        }
    if group.rank == 0:
        print("\n".join(tabulate(runs)))
        curves = {name: run.losses for name, run in runs.items()}
        draw_losses(str(CURVES), curves, train_lm.TALK_EVERY)
        print(f"parameters bit-equal on all ranks in every one of them; drawn in {CURVES}")


def tabulate(runs: dict[str, train_lm.Run]) -> list[str]:
    """Formats a line per training."""
    lines = [
        f"\n  {'':12} {'final loss':>10} {'step':>9} {'on the wire per step':>22} {'ratio':>7}"
    ]
    lines += [
        f"  {name:12} {run.final_loss:10.3f} {run.step_ms:6.1f} ms "
        f"{run.stats['bytes_wire']:20,.0f} B {run.stats['ratio']:7.1f}"
        for name, run in runs.items()
    ]
    return lines


def main() -> None:
    """Trains, measures, draws, and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_device(parser)
    device = parser.parse_args().device
    device_of(device, 0)
    launch.require("rich", "matplotlib")
    OUT.mkdir(parents=True, exist_ok=True)
    results, picture = OUT / "demo.json", OUT / "demo.png"
    print(f"1. A small transformer under DDP on {RANKS} ranks, with and without compression\n")
    launch.run(train_all, device, ranks=RANKS, device=device)
    print(f"\n2. All-reduce among {RANKS} ranks, medians of both libraries in the same rounds\n")
    files = ["-J", str(results), "--plot", str(picture)]
    options = ["--ranks", str(RANKS), "--device", device, *PEERS[device].split(), *files]
    cli.main([*BENCHMARK.split(), *options])
    print(f"\nDrawn in {picture}\n\n{NEXT}")


if __name__ == "__main__":
    main()
