"""Draws how all-reduces run, step by step: ``python docs/images/steps/draw.py [FOLDER]``.

The steps are those of the algorithms' own text, which `schedule.cpp` runs. A rank takes a step when
all steps that it waits for are done, and each step reads from, or writes to, other ranks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ALGORITHMS = ("one_shot", "two_shot", "ring", "tree")
RANKS = 4
INPUT, OUTPUT = 1, 2  # areas, in schedule.cpp

CELL, HIGH = 38, 26  # a chunk's width and height
GAP, ROW = 40, 84  # between ranks, and from step to step
LEFT, TOP = 62, 34
FILLS = ("#eef4f9", "#c3dcee", "#83b6da", "#0072b2")  # by the number of contributions
Place = tuple[int, int, int]  # rank, area, element


@dataclass
class Arrow:
    """Elements that another rank reads, or gets, in a step."""

    step: int
    source: Place
    target: Place
    count: int


@dataclass
class Run:
    """An all-reduce: who holds the sum of which contributions after which step."""

    sums: dict[Place, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    arrows: list[Arrow] = field(default_factory=list)
    steps: int = 0

    def at(self, place: Place, step: int) -> str:
        """The contributions in an element after a step, in the order in which they were added."""
        rank, area, _ = place
        sums = self.sums.get(place, {})
        found = [done for done in sums if done <= step]
        if found:
            return sums[max(found)]
        return str(rank) if area in (INPUT, OUTPUT) else ""


def compiled(folder: Path) -> Path:
    """The program `schedule.cpp`."""
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc"]
    subprocess.run([*command, HERE / "schedule.cpp", "-o", folder / "schedule"], check=True)
    return folder / "schedule"


def schedule(program: Path, algorithm: str) -> list[list[list[str]]]:
    """The program's lines as words, rank by rank."""
    command = [program, algorithm, str(RANKS)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in told.splitlines()]
    return [[line for line in lines if line[1] == str(rank)] for rank in range(RANKS)]


def place_of(word: str) -> Place:
    """A place as `schedule.cpp` prints it."""
    rank, area, element = map(int, word.split(":"))
    return rank, area, element


def move(run: Run, rank: int, now: int, words: list[str]) -> int:
    """Copies or adds elements; returns when the rank goes on."""
    split = words.index("<")
    count, targets = int(words[0]), [place_of(word) for word in words[1:split]]
    sources = [place_of(word) for word in words[split + 1 :]]
    done = now + any(source[0] != rank for source in sources)
    mine = next(target for target in targets if target[0] == rank)
    run.arrows += [Arrow(done, source, mine, count) for source in sources if source[0] != rank]
    for target in targets:
        far = target[0] != rank
        if far:
            run.arrows.append(Arrow(done + 1, mine, target, count))
        for i in range(count):
            added = "".join(run.at((r, area, at + i), now) for r, area, at in sources)
            run.sums[target[0], target[1], target[2] + i][done + far] = added
    return done


def simulate(programs: list[list[list[str]]]) -> Run:
    """Runs all ranks' steps, each as early as possible."""
    run = Run()
    clocks = [0] * RANKS
    nexts = [0] * RANKS
    signals: dict[tuple[int, int], list[int]] = defaultdict(list)
    met: dict[int, int] = {}
    while any(nexts[rank] < len(programs[rank]) for rank in range(RANKS)):
        before = list(nexts), len(met)
        for rank in range(RANKS):
            if nexts[rank] == len(programs[rank]):
                continue
            kind, _, *words = programs[rank][nexts[rank]]
            if kind == "meet":
                met[rank] = clocks[rank]
                if len(met) < RANKS:
                    continue
                clocks[rank] = max(met.values())
            elif kind == "wait":
                peer, channel, step = map(int, words)
                if len(signals[peer, channel]) < step:
                    continue
                clocks[rank] = max(clocks[rank], signals[peer, channel][step - 1])
            elif kind == "signal":
                signals[rank, int(words[0])].append(clocks[rank])
            else:
                clocks[rank] = move(run, rank, clocks[rank], words)
            nexts[rank] += 1
        assert before != (nexts, len(met)), "the ranks wait for each other"
    run.steps = max(max(done) for done in run.sums.values())
    return run


def x_of(rank: int, element: float) -> float:
    """Where an element of a rank's tensor begins."""
    return LEFT + rank * (RANKS * CELL + GAP) + element * CELL


def y_of(step: int) -> int:
    """Where the tensors after a step begin."""
    return TOP + step * ROW


def cells(run: Run) -> Iterator[str]:
    """All ranks' tensors after each step."""
    for step in range(run.steps + 1):
        name = "start" if step == 0 else f"step {step}"
        yield f'<text x="{LEFT - 12}" y="{y_of(step) + 18}" text-anchor="end">{name}</text>'
        for rank in range(RANKS):
            for element in range(RANKS):
                added = run.at((rank, OUTPUT, element), step)
                x, y, last = x_of(rank, element), y_of(step), len(added) == RANKS
                yield (
                    f'<rect x="{x:g}" y="{y}" width="{CELL}" height="{HIGH}" '
                    f'fill="{FILLS[len(added) - 1]}" stroke="#ffffff"/>'
                    f'<text x="{x + CELL / 2:g}" y="{y + 18}" text-anchor="middle" '
                    f'fill="{"#ffffff" if last else "#222222"}">{added}</text>'
                )


def arrows(run: Run) -> Iterator[str]:
    """What moves between ranks, from the row before a step to the row after it."""
    for arrow in run.arrows:
        (source, _, first), (target, _, place) = arrow.source, arrow.target
        x0 = x_of(source, first + arrow.count / 2)
        x1 = x_of(target, place + arrow.count / 2)
        x1 += (source - target) * 3  # so that arrows that meet stay apart
        y0, y1 = y_of(arrow.step - 1) + HIGH + 2, y_of(arrow.step) - 3
        bend = (y1 - y0) * 0.55
        yield (
            f'<path d="M{x0:g} {y0} C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1}" '
            'fill="none" stroke="#555555" stroke-width="1.2" marker-end="url(#head)"/>'
        )


def svg(algorithm: str, run: Run) -> str:
    """The picture of an algorithm."""
    width, height = x_of(RANKS - 1, RANKS) + 12, y_of(run.steps) + HIGH + 12
    heads = (
        f'<text x="{x_of(rank, RANKS / 2):g}" y="20" text-anchor="middle" font-weight="bold">'
        f"rank {rank}</text>"
        for rank in range(RANKS)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
            f'font-family="sans-serif" font-size="13" fill="#222222">',
            f"<title>{algorithm}: an all-reduce among {RANKS} ranks</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#555555"/></marker>',
            "</defs>",
            f'<rect width="{width:g}" height="{height}" fill="#ffffff"/>',
            *heads,
            *cells(run),
            *arrows(run),
            "</svg>\n",
        ]
    )


def draw(folder: Path) -> None:
    """Writes a picture of each algorithm."""
    with tempfile.TemporaryDirectory() as build:
        program = compiled(Path(build))
        for algorithm in ALGORITHMS:
            run = simulate(schedule(program, algorithm))
            (folder / f"{algorithm}.svg").write_text(svg(algorithm, run))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
