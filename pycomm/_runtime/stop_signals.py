"""Signals that ask a program to stop, such as SIGTERM before a machine is taken away."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from pycomm._inputs import operation_of
from pycomm._runtime import ranges
from pycomm._runtime.threads import Deadline

if TYPE_CHECKING:
    from pycomm._runtime.lifetime import Member

_SHAPE = torch.Size([1])  # of the word that ranks exchange


class _Caught:
    """What this process has caught.

    Attributes:
        previous: for each caught signal, the handler from before: a function, or what stands for
            one in :func:`signal.signal`.
        arrived: True once one of these signals has come.
    """

    previous: dict[int, Any] = {}  # noqa: RUF012 - one for the process
    arrived = False


class _RankThread(threading.local):
    """In a thread that is a rank: lets the thread that has started it call a function."""

    let_call: Callable[[Callable[[], None]], None] | None = None


rank_thread = _RankThread()


def stop_requested(group: Member, signals: Iterable[int]) -> bool:
    """See :meth:`pycomm.Group.stop_requested`."""
    missing = [number for number in signals if number not in _Caught.previous]
    if missing:
        _catch_in_main_thread(group, missing)
    word = ctypes.c_int32(_Caught.arrived)
    _take_largest(group, "all_reduce", ctypes.addressof(word))
    return bool(word.value)


@ranges.of_calls
def _take_largest(group: Member, collective: str, address: int) -> None:
    operation = operation_of(collective, "auto", torch.int32, "max")
    group._core.run(operation, 1, address, address, _SHAPE, "stop_requested")


def _catch_in_main_thread(group: Member, signals: list[int]) -> None:
    """Catches signals; a rank of a LocalWorld asks the thread that waits for the ranks."""
    if rank_thread.let_call is None:
        _catch(signals)
        return
    called, errors = threading.Event(), []

    def call() -> None:
        try:
            _catch(signals)
        except Exception as error:
            errors.append(error)
        called.set()

    rank_thread.let_call(call)
    Deadline(group.timeout).await_event(called, group._core.check_usable)
    if errors:
        raise errors[0]


def _catch(signals: list[int]) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "only the main thread can catch signals: make the first call of stop_requested() there"
        )
    for number in signals:
        if number not in _Caught.previous:  # else another rank was first
            _Caught.previous[number] = signal.getsignal(number)
            try:
                signal.signal(number, _note)
            except BaseException:
                del _Caught.previous[number]
                raise


def _note(number: int, frame: Any) -> None:
    _Caught.arrived = True
    previous = _Caught.previous[number]
    # Python's own handler of SIGINT would interrupt the step.
    if callable(previous) and previous is not signal.default_int_handler:
        previous(number, frame)


def _restore() -> None:
    """In a forked child, signals do what they did, as its parent may end it by one."""
    for number, previous in _Caught.previous.items():
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
    _Caught.previous, _Caught.arrived = {}, False


os.register_at_fork(after_in_child=_restore)
