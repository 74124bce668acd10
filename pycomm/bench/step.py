"""Training steps with every exchange: ``python -m pycomm.bench step``.

The time of an exchange is its step's time minus that of DDP with a hook that does nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pycomm
from pycomm.bench import measure, report
from pycomm.bench.training import TrainingSettings, begin, count_parameters, count_wrong, make

PEER = "gloo"


@dataclass(frozen=True)
class StepRow:
    """The result of one way to exchange; the keys of the JSON file.

    Attributes:
        name: ``"ddp"`` is DDP with pycomm's hook, ``"wrapper"`` pycomm's own, ``"gloo"`` DDP alone.
        idle_us: a step of DDP with a hook that does nothing.
        step_us: a step.
        exchange_us: the difference.
        speedup: the exchange of DDP on Gloo over this one.
        wrong: gradients, over all ranks.
    """

    name: str
    ranks: int
    parameters: int
    iterations: int
    idle_us: float
    step_us: float
    exchange_us: float
    speedup: float
    wrong: int


HEADER = """\
#   name  parameters       step  without   exchange   gloo's  #wrong
#                          (ms)     (ms)       (ms)   / this"""


def format_row(row: StepRow) -> str:
    """Formats a line of the table."""
    return (
        f"{row.name:>8} {row.parameters:11} {row.step_us / 1e3:10.2f} {row.idle_us / 1e3:8.2f} "
        f"{row.exchange_us / 1e3:10.2f} {row.speedup:8.2f} {row.wrong:>7}"
    )


def run(settings: TrainingSettings) -> None:
    """Measures all exchanges in the same rounds; rank 0 prints and writes."""
    with pycomm.init(timeout=settings.timeout) as group:
        meta = begin(settings, group, HEADER)
        names = (*settings.modes, PEER)
        idle, *trainees = (make(name, settings, group) for name in ("idle", *names))
        wrong = [count_wrong(trainee, idle) for trainee in trainees]
        runs = [trainee.prepared() for trainee in (idle, *trainees)]
        idle_figures, *figures = measure.interleave(group, runs, settings.iters)
    idle_us = idle_figures.time_us
    exchanges = [figure.time_us - idle_us for figure in figures]
    rows = [
        StepRow(
            name=name,
            ranks=group.size,
            parameters=count_parameters(idle),
            iterations=figure.iterations,
            idle_us=round(idle_us, 1),
            step_us=round(figure.time_us, 1),
            exchange_us=round(exchange, 1),
            speedup=round(exchanges[-1] / exchange, 2),
            wrong=errors,
        )
        for name, figure, exchange, errors in zip(names, figures, exchanges, wrong, strict=True)
    ]
    if group.rank == 0:
        print("\n".join(map(format_row, rows)))
        if settings.json is not None:
            report.write_json(settings.json, meta, map(asdict, rows))
