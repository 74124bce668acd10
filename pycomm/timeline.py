"""A picture of one training step, from a trace."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's colours, which every kind of eye tells apart.
_COLOURS = {"compute": "#0072B2", "exchange": "#D55E00", "wait": "#F0C48A"}
_READABLE = 0.007  # the share of the picture that a letter needs

Event = Mapping[str, Any]
Span = tuple[float, float]  # begin and end


class _Lane(NamedTuple):
    """What one rank did in a step, in microseconds since the step began."""

    rank: int
    computes: list[Span]
    transfers: list[tuple[Span, str]]  # with a label
    waits: list[tuple[Span, str]]

    def shares(self, length: float) -> str:
        """How the step divides."""
        computed, moved = _total(self.computes), _total(span for span, _ in self.transfers)
        waited = _total(span for span, _ in self.waits)
        words = zip(_COLOURS, (computed, moved, waited), strict=True)
        return "\n".join(f"{name} {100 * total / length:.0f} %" for name, total in words)


def plot_step(
    trace: str | os.PathLike[str] | Mapping[str, Any],
    file: str | os.PathLike[str] | None = None,
    *,
    step: int = -1,
) -> Figure:
    """Draws one training step: what each rank computed, exchanged and waited for.

    Each rank has two lanes. The upper one shows when its program computed; the program stands still
    in calls that wait for an operation. The lower one shows the operations: the wait until the last
    rank had come to them, and the transfer. What lies below the upper lane's bars is hidden behind
    computation. Needs matplotlib.

    Args:
        trace: a file that :func:`pycomm.trace` has written, or its content, from ``json.load``.
        file: where to save the picture; by default it is only returned.
        step: the number of the step, counted from 0, or from -1 backwards.

    Returns:
        The picture, which notebooks show.

    Raises:
        ValueError: the trace has no such step.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = _load(trace)["traceEvents"]
    ranks = sorted({event["pid"] for event in events if event.get("cat") == "user_annotation"})
    bounds = {rank: _steps(events, rank) for rank in ranks}
    count = min(map(len, bounds.values()), default=0)
    if not -count <= step < count:
        raise ValueError(f"step must be one of the trace's {count} steps, got {step}")
    number = step % count
    begin = min(bounds[rank][number][0] for rank in ranks)
    length = max(bounds[rank][number][1] for rank in ranks) - begin
    lanes = [_lane(events, rank, bounds[rank][number], begin) for rank in ranks]
    figure = Figure(figsize=(11, 1.3 + 0.85 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        _draw(axes, row, lane, length)
    axes.set(xlabel="ms", xlim=(0, length / 1e3), ylim=(len(ranks) - 0.5, -0.5))
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_title(f"step {number}: {length / 1e3:.1f} ms", loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    names = ("compute", "exchange of a bucket or other operation", "wait for the last rank")
    patches = [Patch(color=c, label=name) for c, name in zip(_COLOURS.values(), names, strict=True)]
    axes.legend(handles=patches, ncols=3, frameon=False, loc="lower right",
                bbox_to_anchor=(1, 1), borderaxespad=0.2)  # fmt: skip
    if file is not None:
        figure.savefig(os.fspath(file), dpi=150)
    return figure


def _load(trace: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(trace, Mapping):
        return trace
    data = Path(trace).read_bytes()
    loaded: dict[str, Any] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return loaded


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _steps(events: Iterable[Event], rank: int) -> list[Span]:
    """A rank's steps, in order."""
    own = (e for e in events if e["pid"] == rank and e.get("cat") == "user_annotation")
    return sorted(_span(event) for event in own if event["name"].startswith("ProfilerStep#"))


def _lane(events: Iterable[Event], rank: int, bounds: Span, begin: float) -> _Lane:
    """What a rank did within the bounds of its step; `begin` is the picture's left edge."""
    kinds: dict[str, list[tuple[Span, Event]]] = {}
    for event in events:
        if event["pid"] != rank or event["ph"] != "X":
            continue
        first, last = (min(max(time, bounds[0]), bounds[1]) - begin for time in _span(event))
        if last > first:
            kinds.setdefault(event["cat"], []).append(((first, last), event))
    buckets = kinds.get("bucket", [])
    stands = [span for span, e in kinds.get("call", []) if e["name"].startswith("pycomm:wait for ")]
    stands += [span for span, e in kinds.get("operation", []) if not e["args"]["asynchronous"]]
    own = (bounds[0] - begin, bounds[1] - begin)
    return _Lane(
        rank,
        _without(own, stands),
        [(span, _bucket_of(span, buckets)) for span, _ in kinds.get("transfer", [])],
        [(span, e["name"].removeprefix("wait for ")) for span, e in kinds.get("wait", [])],
    )


def _bucket_of(span: Span, buckets: Iterable[tuple[Span, Event]]) -> str:
    """The number of the bucket that a transfer belongs to."""
    for (first, last), event in buckets:
        if first <= span[0] < last:
            return str(event["name"].removeprefix("bucket "))
    return ""


def _without(whole: Span, parts: Iterable[Span]) -> list[Span]:
    """A span without some of its parts."""
    left, now = [], whole[0]
    for first, last in sorted(parts):
        if first > now:
            left.append((now, first))
        now = max(now, last)
    return [*left, (now, whole[1])] if now < whole[1] else left


def _total(spans: Iterable[Span]) -> float:
    return sum(last - first for first, last in spans)


def _draw(axes: Axes, row: int, lane: _Lane, length: float) -> None:
    """Draws the two lanes of a rank, and its shares at the right."""
    _bars(axes, lane.computes, (row - 0.36, 0.36), "compute")
    below = (row + 0.02, 0.3)
    _bars(axes, [span for span, _ in lane.transfers], below, "exchange")
    _bars(axes, [span for span, _ in lane.waits], below, "wait")
    for (first, last), text in (*_joined(lane.transfers), *lane.waits):
        if last - first > _READABLE * length * (len(text) + 1):
            middle = (first + last) / 2e3
            axes.text(middle, row + 0.17, text, ha="center", va="center", fontsize=7)
    axes.text(1.01 * length / 1e3, row, lane.shares(length), va="center", fontsize=8)


def _bars(axes: Axes, spans: Sequence[Span], place: tuple[float, float], kind: str) -> None:
    bars = [(first / 1e3, (last - first) / 1e3) for first, last in spans]
    axes.broken_barh(bars, place, color=_COLOURS[kind], linewidth=0)


def _joined(transfers: Iterable[tuple[Span, str]]) -> list[tuple[Span, str]]:
    """Neighbouring transfers of a bucket as one, for its label."""
    joined: list[tuple[Span, str]] = []
    for (first, last), bucket in transfers:
        if joined and bucket and joined[-1][1] == bucket:
            joined[-1] = ((joined[-1][0][0], last), bucket)
        else:
            joined.append(((first, last), bucket))
    return joined
