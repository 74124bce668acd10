"""Runs a rank's code up to its next question to the network.

The code is deterministic but for the answers that it gets: whether a connection has bytes, who has
connected, what a Store contains, whether time is over. So a list of answers is a state of the rank.
A run with one more answer gives the next state, and nothing needs to be suspended meanwhile.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Collection, Hashable
from datetime import timedelta
from typing import Any

from pycomm import _C
from pycomm._runtime.sockets import Connection

Effect = tuple[Any, ...]  # on the network: a verb and its objects
Request = tuple[Any, ...]  # a question to it
GO = "go"  # the answer to a question without a choice

# Variables that make no difference: an address, and how long a rank sleeps.
_IGNORED = {"at", "nap", "seconds"}
# Between two of these questions, a rank runs without interruption, but for `preemptions`.
YIELDS = {"wait", "join", "operate", "rest", "end"}
# What the network may always answer: it has nothing yet.
NOTHING = {"read": None, "writable": None, "accept": None}


class Pause(BaseException):
    """The run is over, because the next answer is not known."""


class Run:
    """One run of a rank's code.

    Args:
        rank: the rank.
        answers: the answers that are known.

    Attributes:
        now: the rank's clock, which moves only if time is over.
        asked: every question so far, with the effects before it.
    """

    def __init__(self, rank: int, answers: Collection[Hashable]) -> None:
        self.rank, self.answers = rank, list(answers)
        self.live, self.now = True, 0.0
        self.asked: list[tuple[Request, list[Effect]]] = []
        self.state: Hashable = None  # at the last question, if the rank yields there
        self._effects: list[Effect] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, what: Hashable) -> int:
        """Numbers from 0 on, for each kind of thing."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def do(self, *effect: Any) -> None:
        """Changes the network."""
        if self.live:
            self._effects.append(effect)

    def ask(self, *request: Any) -> Any:
        """The answer; ends the run if it is not known."""
        if not self.live:
            raise Pause
        at = len(self.asked)
        self.asked.append((request, self._effects))
        self._effects = []
        if at < len(self.answers):
            return self.answers[at]
        if request[0] in NOTHING:
            self.answers.append(NOTHING[request[0]])
            return self.answers[at]
        self.live = False
        if request[0] in YIELDS:
            self.state = (request, self.now, tuple(self._numbers.items()), _stack())
        raise Pause


class Unknown(BaseException):
    """A variable has a value that cannot be compared."""


class Point:
    """A state of a rank: where it waits for an answer."""

    __slots__ = ("answers", "next", "request")

    def __init__(self, request: Request, answers: tuple[Hashable, ...]) -> None:
        self.request, self.answers = request, answers
        self.next: dict[Hashable, tuple[list[Effect], Point]] = {}


class Rank:
    """All states that a rank's code can come to.

    Args:
        rank: the rank.
        life: its code.
    """

    def __init__(self, rank: int, life: Callable[[Run], None]) -> None:
        self._rank, self._life = rank, life
        self._points: dict[Hashable, Point] = {}
        self.runs = 0
        self.first = Point(("begin",), ())
        self.advance(self.first, GO)

    def advance(self, point: Point, answer: Hashable) -> tuple[list[Effect], Point]:
        """What the rank does after the answer, and its next question."""
        if answer not in point.next:
            self._run(point, answer)
        return point.next[answer]

    def _run(self, point: Point, answer: Hashable) -> None:
        run = Run(self._rank, (*point.answers, answer))
        self.runs += 1
        try:
            run.ask("begin")
            self._life(run)
        except Pause:
            pass
        for at in range(len(point.answers) + 1, len(run.asked)):
            request, effects = run.asked[at]
            answers = tuple(run.answers[:at])
            if at == len(run.asked) - 1 and run.state is not None:
                following = self._points.setdefault(run.state, Point(request, answers))
            else:
                following = Point(request, answers)
            if answers[-1] in point.next:  # an earlier run has come here
                following = point.next[answers[-1]][1]
            else:
                point.next[answers[-1]] = (effects, following)
            point = following


def _stack() -> Hashable:
    """The state of the rank's code: where it is, and all that its variables refer to."""
    frame, found, seen = sys._getframe(2), [], {}
    while frame.f_code is not Rank._run.__code__:
        local = [item for item in frame.f_locals.items() if item[0] not in _IGNORED]
        found.append((frame.f_code, frame.f_lasti, _fields(local, seen)))
        frame = frame.f_back
    return tuple(found)


def _fields(items: Any, seen: dict[int, tuple[int, Any]]) -> Hashable:
    return tuple((name, _frozen(value, seen)) for name, value in items)


_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    timedelta,
)


def _frozen(value: Any, seen: dict[int, tuple[int, Any]]) -> Hashable:
    """A value that is equal for equal states."""
    if isinstance(value, types.TracebackType):
        return "traceback"
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, _C.Operation):
        return repr(value)
    if id(value) in seen:
        return ("again", seen[id(value)][0])
    seen[id(value)] = len(seen), value
    if isinstance(value, Run):
        return "run"
    if isinstance(value, dict):
        return tuple(sorted((repr(key), _frozen(each, seen)) for key, each in value.items()))
    if isinstance(value, (list, tuple, range)):
        return (type(value), tuple(_frozen(each, seen) for each in value))
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, functools.partial):
        return ("partial", _frozen([value.func, value.args], seen))
    if isinstance(value, types.MethodType):
        return (value.__func__, _frozen(value.__self__, seen))
    if isinstance(value, BaseException):
        return (type(value), str(value))
    if hasattr(value, "tolist"):
        return ("tensor", str(value.tolist()))
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return (value.__code__, tuple(_frozen(cell.cell_contents, seen) for cell in cells))
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_code, frame.f_lasti, _fields(frame.f_locals.items(), seen))
    fields = getattr(value, "__dict__", None)
    if isinstance(value, Connection) and value._socket.closed:
        return "closed"
    if fields is None:
        raise Unknown(f"a state cannot contain {value!r}")
    return (type(value), _fields(sorted(fields.items()), seen))
