"""Turns: ranks that are threads run one at a time, each with its own random state."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._runtime.torch_private import before_checkpoints
from pycomm.errors import Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds that the next rank may take to come back from a wait, before others overtake it. This is
# much longer than a collective takes to end on all ranks, so the order of turns depends on time
# only if a rank waits for another rank's next turn.
_PATIENCE = 0.01


@dataclass(frozen=True)
class RandomState:
    """The global generators of torch, NumPy (the legacy one) and Python."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor] | None  # None if CUDA was not initialised
    numpy: Any  # None if NumPy was not imported
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        """The present state."""
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if _cuda_runs() else None,
            None if numpy is None else numpy.get_state(),
            random.getstate(),
        )

    def restore(self) -> None:
        """Makes this the present state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        elif _cuda_runs():  # initialised since; torch.manual_seed() seeds all devices alike
            torch.cuda.manual_seed_all(torch.initial_seed())
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        random.setstate(self.python)


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Is(enum.Enum):
    """A rank's activity."""

    RUNNING = enum.auto()
    READY = enum.auto()  # waits for its turn
    AWAY = enum.auto()  # waits for something else
    LATE = enum.auto()  # like AWAY, and others have overtaken it
    ENDED = enum.auto()


class Turns:
    """The turns of one run: round robin, by rank, among ranks that need not wait.

    A rank gives up its turn in each call of pycomm that releases the interpreter's lock, and takes
    the next one before the call returns. The rank whose turn begins exchanges the global random
    state for its own.

    Attributes:
        states: the random state of each rank; the caller's state until a rank has had a turn.
    """

    def __init__(self, states: list[RandomState]) -> None:
        self.states = states
        self._caller = RandomState.capture()
        self._loaded: int | None = None  # the rank whose random state is the global one
        self._changed = threading.Condition()
        self._is = [_Is.READY] * len(states)
        self._running: int | None = None
        self._last = len(states) - 1  # the rank of the last turn
        self._since = time.monotonic()  # when this turn began, or the next one could have begun
        self._over = False

    def take(self, rank: int) -> None:
        """Waits for a rank's turn."""
        with self._changed:
            if self._running is None and _Is.READY not in self._is:
                self._since = time.monotonic()
            self._is[rank] = _Is.READY
            self._changed.notify_all()
            while not self._over and self._next() != rank:
                self._changed.wait(self._patience())
            if self._over:
                return
            self._is[rank] = _Is.RUNNING
            self._running, self._since = rank, time.monotonic()
        self._load(rank)

    def give_up(self, rank: int, to: _Is = _Is.AWAY) -> None:
        """Ends a rank's turn, if it has one."""
        with self._changed:
            self._is[rank] = to
            if self._running == rank:
                self._running, self._last, self._since = None, rank, time.monotonic()
            self._changed.notify_all()

    def _next(self) -> int | None:
        """The rank whose turn can begin; None if the next rank is away, or a turn is not over."""
        if self._running is not None:
            return None
        for rank in self._order():
            if self._is[rank] is _Is.READY:
                return rank
            if self._is[rank] is _Is.AWAY:
                return None
        return None

    def _order(self) -> list[int]:
        size = len(self._is)
        return [(self._last + 1 + i) % size for i in range(size)]

    def _patience(self) -> float | None:
        """Seconds for the next rank to come back; None if a rank runs or is about to.

        After this time, the first rank that is ready overtakes the ranks before it.
        """
        if self._running is not None or self._next() is not None:
            return None
        left = self._since + _PATIENCE - time.monotonic()
        if left > 0:
            return left
        for rank in self._order():
            if self._is[rank] is _Is.READY:
                break
            if self._is[rank] is _Is.AWAY:
                self._is[rank] = _Is.LATE
        self._changed.notify_all()
        return 0.0

    def _load(self, rank: int) -> None:
        if self._loaded == rank:
            return
        if self._loaded is not None:
            self.states[self._loaded] = RandomState.capture()
        self.states[rank].restore()
        self._loaded = rank

    def check(self, timeout: float) -> None:
        """Raises pycomm.Timeout if a turn takes longer than this while other ranks wait."""
        with self._changed:
            waiting = [rank for rank, does in enumerate(self._is) if does is _Is.READY]
            if self._running is None or not waiting or time.monotonic() - self._since <= timeout:
                return
            raise Timeout(
                f"rank {self._running} did not give up its turn for {timeout:g} s, and ranks "
                f"{waiting} waited for their turns. If a rank waits for another one outside of "
                "pycomm, it must wait in the context pycomm.LocalWorld.others_run()",
                rank=self._running,
            )

    def end(self) -> None:
        """Restores the caller's random state; remaining ranks run freely."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            if self._loaded is not None:
                self.states[self._loaded] = RandomState.capture()
                self._loaded = None
                self._caller.restore()

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Makes this thread a rank's thread, and waits for the rank's first turn."""
        turn, forks = _Turn(self, rank), _forks
        try:
            turn.take()
            _mine.set(turn)
            yield
        finally:
            if forks == _forks:  # else this is a forked child, without other ranks
                _mine.set(None)
                self.give_up(rank, _Is.ENDED)


class _Turn:
    """The object that C++ calls on a rank's thread around all waits."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self._rank = rank

    def take(self) -> None:
        self._turns.take(self._rank)

    def give_up(self) -> None:
        self._turns.give_up(self._rank)


class _Mine(threading.local):
    """A thread's rank, if it has one."""

    turn: _Turn | None = None  # its turns; None without turns, or inside of others_run()
    shares_generators = False  # True for a rank that shares generators with other ranks

    def set(self, turn: _Turn | None) -> None:
        self.turn = turn
        _C.set_turn(turn)


_mine = _Mine()
_taken = threading.Lock()  # held while any ranks take turns
_forks = 0  # the number of forks from the first process to this one


def _begin_child() -> None:
    """A forked child has the thread of one rank, but no other ranks."""
    global _forks, _taken
    _forks += 1
    _mine.set(None)
    _mine.shares_generators = False
    _taken = threading.Lock()


os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def taking_turns(states: list[RandomState], ranks: int) -> Iterator[Turns]:
    """The turns of one run.

    Args:
        states: the ranks' random states, which are kept up to date; empty at first.
        ranks: the number of ranks.

    Raises:
        RuntimeError: other ranks take turns already, and there is only one global state.
    """
    taken = _taken
    if not taken.acquire(blocking=False):
        raise RuntimeError("a LocalWorld with serial=True runs already in this process")
    try:
        states += [RandomState.capture()] * (ranks - len(states))
        turns = Turns(states)
        try:
            yield turns
        finally:
            turns.end()
    finally:
        taken.release()


@contextlib.contextmanager
def sharing_generators(ranks: int) -> Iterator[None]:
    """Makes this thread a rank without turns; checkpoints that need random states then raise."""
    _refuse_checkpoints()
    _mine.shares_generators = ranks > 1
    try:
        yield
    finally:
        _mine.shares_generators = False


@functools.cache
def _refuse_checkpoints() -> None:
    before_checkpoints(_check_checkpoint)


def _check_checkpoint() -> None:
    if _mine.shares_generators:
        raise RuntimeError(
            "torch.utils.checkpoint saves and restores the state of torch's random generators, "
            "which the ranks of a LocalWorld share: use LocalWorld(..., serial=True), or "
            "checkpoint(..., preserve_rng_state=False) if the function draws no random numbers"
        )


@contextlib.contextmanager
def locked(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock under which a rank may give up its turn to a rank that waits for the lock."""
    with others_run():
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def others_run() -> Iterator[None]:
    """Gives up this thread's turn, and takes the next one; no effect if it has no turns."""
    turn, forks = _mine.turn, _forks
    if turn is None:
        yield
        return
    _mine.set(None)
    turn.give_up()
    try:
        yield
    finally:
        if forks == _forks:
            turn.take()
            _mine.set(turn)
