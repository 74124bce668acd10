"""Trials: which rank dies, when and in which operation; and how the kill is aimed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pycomm
from pycomm._runtime import rendezvous

PHASES = ("rendezvous", "staging", "reducing", "gathering", "pipelining", "idling", "closing")
SIZES_IN_BYTES = (4, 4096, 1 << 20, 16 << 20)
TILED = {"staging": (0, 0), "reducing": (1, 0), "gathering": (1, 1)}  # tiles staged and reduced
POINTS = ("before joining", "after joining", "after taking the window")
OPERATION_TIMEOUT = 30.0  # far more than a detection may take
RENDEZVOUS_TIMEOUT = 1.0
WARM_UP = 3  # operations before the kill


@dataclass(frozen=True)
class Trial:
    """One kill."""

    phase: str
    size: int
    victim: int
    nbytes: int
    algorithm: str
    seed: int

    @property
    def staging_bytes(self) -> int:
        """Enough for one tile."""
        return max(2 << 20, 8 * self.nbytes + 4096)

    @property
    def point(self) -> str:
        """The point in the rendezvous at which the victim dies."""
        return POINTS[self.seed % len(POINTS)]

    @property
    def operations_under_way(self) -> int:
        """When the victim closes: enough to take a while."""
        return 8 + (8 << 20) // (self.nbytes + 4096)

    @property
    def killer(self) -> int:
        return 0 if self.victim != 0 else 1


def make_trial(phase: str, seed: int) -> Trial:
    rng = random.Random(f"{phase} {seed}")
    size = rng.choice((2, 3, 4))
    algorithms = {
        "pipelining": ("ring", "tree"),
        "idling": ("one_shot", "tree"),
        "closing": ("auto",),
    }
    algorithm = rng.choice(algorithms.get(phase, ("two_shot",)))
    # Every number of bytes gets its turn; in a rendezvous every point, for rank 0 and for another.
    nbytes = SIZES_IN_BYTES[seed % len(SIZES_IN_BYTES)]
    victim = rng.randrange(size)
    if phase == "rendezvous":
        victim, nbytes = (size - 1) * (seed // len(POINTS) % 2), 4
    return Trial(phase, size, victim, nbytes, algorithm, seed)


class Progress:
    """The victim's progress, in memory that all processes of a trial map."""

    WHERE = ("nowhere", "rendezvous", "idle", "operation", "closing", "left")
    RECORD = struct.Struct("=iid")

    def __init__(self, path: str) -> None:
        with Path(path).open("a+b") as file:
            file.truncate(self.RECORD.size)
            self._memory = mmap.mmap(file.fileno(), self.RECORD.size)

    def mark(self, where: str, operation: int = 0) -> None:
        struct.pack_into("=ii", self._memory, 0, self.WHERE.index(where), operation)

    def kill(self, pid: int) -> None:
        struct.pack_into("=d", self._memory, 8, time.monotonic())
        os.kill(pid, signal.SIGKILL)

    def read(self) -> tuple[str, int, float]:
        where, operation, killed_at = self.RECORD.unpack_from(self._memory)
        return self.WHERE[where], operation, killed_at


def kill_myself_in_rendezvous(progress: Progress, point: str) -> None:
    """Arranges the end of this process at a step of the rendezvous."""

    def ending(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if not first:
                function(*args)
            progress.kill(os.getpid())

        return wrapped

    names = {"before joining": ["store_all_gather"], "after joining": ["store_all_gather"]}
    for name in names.get(point, ["_take", "_hand_out"]):
        original = getattr(rendezvous, name)
        setattr(rendezvous, name, ending(original, point == "before joining"))


class Killer(threading.Thread):
    """On a survivor: waits until the victim is at the trial's point, and kills it."""

    def __init__(self, group: pycomm.Group, trial: Trial, progress: Progress, pid: int) -> None:
        super().__init__(daemon=True)
        self.group, self.trial, self.progress, self.pid = group, trial, progress, pid
        self.rng = random.Random(trial.seed)
        self.now = (0, 0, (0, 0, 0, 0))  # the main thread's attempt, its sequence, flags before it

    def aimed_at(self) -> bool:
        where, operation, _ = self.progress.read()
        phase, (attempt, sequence, before) = self.trial.phase, self.now
        if phase == "closing":
            return where == "closing"
        if operation < WARM_UP:
            return False
        if phase == "idling":
            return where == "idle"
        announced, *flags = self.group._core.published(self.trial.victim)
        done = tuple(flag - start for flag, start in zip(flags, before, strict=True))
        if where != "operation" or operation != attempt or announced != sequence:
            return False
        return done[:2] == TILED[phase] if phase in TILED else True

    def run(self) -> None:
        if self.trial.phase in TILED:
            pin(1)
        while True:
            if self.aimed_at():
                self.linger()
                # Stopped, it cannot leave the phase between the look and the kill.
                os.kill(self.pid, signal.SIGSTOP)
                wait_until_stopped(self.pid)
                if self.aimed_at():
                    self.progress.kill(self.pid)
                    return
                os.kill(self.pid, signal.SIGCONT)
            time.sleep(0)

    def linger(self) -> None:
        """Waits for a random part of the phase's duration."""
        longest = 2e-6 + self.trial.nbytes / 16e9
        end = time.monotonic() + self.rng.random() * longest
        while time.monotonic() < end:
            pass


def wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0)


def pin(core: int) -> None:
    """Ranks on one core, the killer on another: it sees a phase at once, and kills within it."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
