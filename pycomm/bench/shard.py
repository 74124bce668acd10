"""Exchange and optimizer step together, sharded or not: ``python -m pycomm.bench step --shard``.

Forward and backward are not in the times. pycomm's contestants are timed without them: backward has
left gradients in the window, and a call averages them and steps. Repeated calls find the same
gradients, unsharded ones their average, so every call moves the same bytes. If gradients are
divided, the memory in the window is used again, so there the copy into it counts, too.

Peers cannot exchange without a backward. They take whole steps, and the time of the same step
without exchange and optimizer is subtracted: that of DDP with a hook that does nothing for DDP and
ZeroRedundancyOptimizer, so that its copies of gradients into buckets do not count; that of the bare
model for FSDP2 and DeepSpeed, whose copies into and out of buffers are a part of their exchange. If
an exchange hides behind backward, only its exposed part counts, which favours peers.

All of them run interleaved with streams that read and write as much as a sharded step must. The
fastest stream is the floor. With clipping there is a floor of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

import pycomm
from pycomm.bench import measure, report
from pycomm.bench.contestants import Prepared
from pycomm.bench.optim_tasks import SCHEMES, Scheme
from pycomm.bench.shard_peers import IDLE, find_absent, make_peer
from pycomm.bench.shard_tasks import MAX_NORM, Own, Stepper, count_different, count_far, mix
from pycomm.bench.streams import streams
from pycomm.bench.training import SETTLING, TrainingSettings, begin

MODES = {"unsharded": None, "optimizer": "optimizer", "gradients": "gradients"}
BOUNDS = {"": None, " clipped": MAX_NORM}


@dataclass(frozen=True)
class ShardSettings(TrainingSettings):
    """A run, as asked for on the command line; see ``python -m pycomm.bench step -h``."""

    sizes: tuple[int, ...] = ()
    schemes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardRow:
    """The result of one way to exchange and step; the keys of the JSON file.

    Attributes:
        name: a mode of the wrapper, ``clipped`` with `max_norm`; or a peer.
        time_us: exchange and step.
        ratio: the time of the unsharded wrapper over this one; with clipping if this one clips.
        floor_percent: the floor's time over this one's.
        wrong: parameters, over all ranks, that differ from the unsharded wrapper's after some
            steps: in any bit, or for peers by a tenth of a step. None if peers keep fewer bits.
    """

    scheme: str
    name: str
    ranks: int
    parameters: int
    iterations: int
    time_us: float
    ratio: float
    floor_us: float
    floor_percent: float
    wrong: int | None


HEADER = """\
#             scheme               name  parameters      time  unsharded    floor  #wrong
#                                                        (ms)     / this      (%)"""


def format_row(row: ShardRow) -> str:
    """Formats a line of the table."""
    wrong = "-" if row.wrong is None else row.wrong
    return (
        f"{row.scheme:>20} {row.name:>18} {row.parameters:11} {row.time_us / 1e3:9.2f} "
        f"{row.ratio:10.2f} {row.floor_percent:8.1f} {wrong:>7}"
    )


def run(settings: TrainingSettings) -> None:
    """Measures all schemes and sizes; rank 0 prints and writes."""
    assert isinstance(settings, ShardSettings)
    rows: list[ShardRow] = []
    with pycomm.init(timeout=settings.timeout) as group:
        absent = find_absent(settings.peers)
        peers = tuple(peer for peer in settings.peers if peer not in absent)
        settings = replace(settings, peers=peers)
        notes = "".join(f"# no {peer}: {reason}\n" for peer, reason in absent.items())
        meta = begin(settings, group, notes + HEADER) | {"absent_peers": absent}
        for scheme in settings.schemes:
            for size in settings.sizes:
                found = _measure(scheme, replace(settings, parameters=size), group)
                rows += found
                if group.rank == 0:
                    print("\n".join(map(format_row, found)), flush=True)
    if group.rank == 0 and settings.json is not None:
        report.write_json(settings.json, meta, map(asdict, rows))


def _measure(name: str, settings: ShardSettings, group: pycomm.Group) -> list[ShardRow]:
    """Measures all contestants of a scheme and a size in the same rounds."""
    gc.collect()  # the models of the case before, which are in cycles
    scheme = SCHEMES[name]
    own = {mode: Own(settings, scheme, group, shard=shard) for mode, shard in MODES.items()}
    wrong: dict[str, int | None] = dict.fromkeys((*own, *settings.peers), None)
    peers = {
        peer: make_peer(peer, settings, scheme, group)
        for peer in dict.fromkeys((*settings.peers, *map(IDLE.__getitem__, settings.peers)))
    }
    for suffix, bound in BOUNDS.items():
        _train(own, bound)
        for mode, made in own.items():
            wrong[mode + suffix] = count_different(made.model, own["unsharded"].model)
        if bound is None and scheme.dtype == torch.float32 and not scheme.options:
            for peer in settings.peers:
                wrong[peer] = count_far(peers[peer].model, own["unsharded"].model)
    calls = _calls(own, peers)
    times, floors, iterations = _time(calls, scheme, own["unsharded"], settings, group)
    rows = []
    for contestant in calls:
        if contestant in IDLE.values():
            continue
        suffix = " clipped" if contestant.endswith(" clipped") else ""
        idle_us = times[IDLE[contestant]] if contestant in IDLE else 0.0
        time_us = times[contestant] - idle_us
        rows.append(
            ShardRow(
                scheme=name,
                name=contestant,
                ranks=group.size,
                parameters=_count(own["unsharded"]),
                iterations=iterations[contestant],
                time_us=round(time_us, 1),
                ratio=round(times["unsharded" + suffix] / time_us, 3),
                floor_us=round(floors[suffix], 1),
                floor_percent=round(100 * floors[suffix] / time_us, 1),
                wrong=wrong[contestant],
            )
        )
    return rows


def _train(own: dict[str, Own], bound: float | None) -> None:
    """Takes the steps after which parameters are compared."""
    for made in own.values():
        made.clip(bound)
        for _ in range(SETTLING):
            made.step()


def _calls(own: dict[str, Own], peers: dict[str, Stepper]) -> dict[str, Callable[[], object]]:
    """The function to time for each contestant."""
    calls: dict[str, Callable[[], object]] = {}
    for suffix, bound in BOUNDS.items():
        for mode, made in own.items():
            calls[mode + suffix] = partial(_finish, made, bound)
    return calls | {name: peer.step for name, peer in peers.items()}


def _finish(made: Own, bound: float | None) -> None:
    made.clip(bound).finish()


def _time(
    calls: dict[str, Callable[[], object]],
    scheme: Scheme,
    unsharded: Own,
    settings: ShardSettings,
    group: pycomm.Group,
) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """Microseconds by contestant, those of the floors by suffix, and samples by contestant."""
    nothing = torch.empty(0)
    runs = {name: Prepared(nothing, nothing, call) for name, call in calls.items()}
    for suffix, bound in BOUNDS.items():
        needed = mix(scheme, _count(unsharded), group.size, clips=bound is not None)
        for stream, prepared in streams(needed, "cpu").items():
            call = partial(_together, prepared.call, group)
            runs[f"{stream}|{suffix}"] = replace(prepared, call=call)
    figures = dict(
        zip(runs, measure.interleave(group, list(runs.values()), settings.iters), strict=True)
    )
    floors = {
        suffix: min(f.time_us for n, f in figures.items() if n.endswith(f"|{suffix}"))
        for suffix in BOUNDS
    }
    times = {name: figures[name].time_us for name in calls}
    return times, floors, {name: figures[name].iterations for name in calls}


def _together(stream: Callable[[], object], group: pycomm.Group) -> None:
    """Streams in all ranks at once, even if they share a core."""
    stream()
    pycomm.barrier(group=group)


def _count(made: Stepper) -> int:
    return sum(parameter.numel() for parameter in made.model.parameters())
