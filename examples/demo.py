"""Everything at one glance: a training that exchanges with pycomm, and pycomm beside Gloo.

Takes under three minutes on two cores; ``make demo`` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import train_lm

from pycomm.bench import cli, extras, launch
from pycomm.bench.report import human_bytes

RANKS = 2
STEPS = 1000
OUT = Path(__file__).resolve().parent.parent / "out"
BENCHMARK = "all_reduce -b 256 -e 64M -f 8 --buffer both --peer gloo"
NEXT = """\
Next:
  python -m pycomm.bench all_reduce -h                 every flag of the benchmark
  python -m pycomm.bench all_reduce -a all --peer all  every algorithm, every peer that is installed
  torchrun --nproc-per-node 2 examples/train_lm.py     the training again, under torchrun
  make test                                            the tests"""


def summarise(rows: list[dict[str, Any]]) -> list[str]:
    """A line per size: Gloo, pycomm on ordinary tensors and in the window, and the ratios."""
    lines = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        times = {
            (row["impl"], row["buffer"]): row["p50_us"] for row in rows if row["bytes"] == size
        }
        gloo = times["gloo", "tensor"]
        words = [f"  {human_bytes(size):>8}: Gloo {gloo:8,.0f} us"]
        for name, buffer in (("pycomm", "tensor"), ("in its window", "window")):
            ours = times["pycomm", buffer]
            words.append(f"{name} {ours:7,.1f} us, {gloo / ours:3,.0f} times as fast")
        lines.append("; ".join(words))
    return lines


def main() -> None:
    """Trains, measures, draws, and says what it all means."""
    extras.require("rich", "matplotlib")
    results, picture = OUT / "demo.json", OUT / "demo.png"
    print(f"1. Training a small transformer on {RANKS} ranks, gradients averaged by pycomm\n")
    launch.run(train_lm.train, STEPS, ranks=RANKS)
    print(f"\n2. All-reduce among {RANKS} ranks, pycomm beside Gloo in the same rounds\n")
    files = ["-J", str(results), "--plot", str(picture)]
    cli.main([*BENCHMARK.split(), "--ranks", str(RANKS), *files])
    print("\n3. At one glance (medians)\n")
    print("\n".join(summarise(json.loads(results.read_text())["rows"])))
    print(f"\nDrawn in {picture}\n\n{NEXT}")


if __name__ == "__main__":
    main()
