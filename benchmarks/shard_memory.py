"""Draws the memory per rank with and without shards: ``python benchmarks/shard_memory.py FILE``.

Trains one step of a small bfloat16 model on threads as ranks, with every mode of
``pycomm.DataParallel(shard=)``, and draws what rank 0 then holds. Staging areas, whose size does
not depend on the model, are left out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import pycomm
from pycomm.memory import MemoryReport, plot_reports

RANKS = 4
WIDTH, LAYERS = 512, 48  # so many that the slots of divided gradients count for little
MODES = (None, "optimizer", "gradients")
STORAGE: dict[str, dict[str, Any]] = {"fp32 states": {}, "8-bit states": {"states": "8bit"}}


def measure(group: pycomm.Group, shard: str | None, options: dict[str, Any]) -> MemoryReport:
    """The memory that this rank holds after a step."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    model = pycomm.DataParallel(net, group=group, shard=shard, bucket_cap_mb=1)
    optimizer = pycomm.optim.FusedAdamW(model.parameters(), master_weights="remainder", **options)
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    report = pycomm.memory_report(model, optimizer)
    left = report.bytes["communication"] - group.staging_bytes
    return replace(report, bytes={**report.bytes, "communication": left})


def main() -> None:
    """Measures every mode, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", help="the picture, as a PNG")
    file = parser.parse_args().file
    reports = {}
    for storage, options in STORAGE.items():
        for shard in MODES:
            with pycomm.LocalWorld(RANKS) as world:
                report = world.run(measure, shard, options)[0]
            print(f"shard={shard!r}, {storage}\n{report}\n")
            reports[f"{storage}, shard={shard!r}"] = report
    plot_reports(reports, file)


if __name__ == "__main__":
    main()
