"""Starts ranks on this machine: ``pycomm.launch`` a function, ``python -m pycomm.run`` a script.

.. code-block:: shell

    python -m pycomm.run --ranks 4 train.py --epochs 3
    python -m pycomm.run --ranks 4 --nodes 2 -m package.train

Each rank is a process with the variables that torchrun sets, so ``pycomm.init()`` and
``torch.distributed.init_process_group()`` work in it. The process that starts the ranks serves the
Store in which they meet, prints what they write, and ends the others once one has failed. No rank
outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's stubs lack it

from pycomm._inputs import check_whole
from pycomm._runtime.sockets import first_of_node
from pycomm.errors import Aborted, PeerDied

if TYPE_CHECKING:
    from types import TracebackType

_GRACE = 5.0  # seconds in which ranks may end themselves
_LOOK_EVERY = 0.05  # seconds between looks for processes that have ended
_NUMA = Path("/sys/devices/system/node")

# Becomes the rank's process. It ends with its parent, whose death before prctl shows in getppid.
_BECOME = """
import ctypes, os, signal, sys
parent, cores, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(command[0], command)
"""


def launch(function: Callable[..., Any], *args: Any, ranks: int = 2, nodes: int = 1) -> list[Any]:
    """Calls ``function(*args)`` on each of several new processes; for notebooks and scripts.

    .. code-block:: python

        def train(steps):
            group = pycomm.init()
            ...

        losses = pycomm.launch(train, 100, ranks=4)

    The function finds what it would find under torchrun: ``pycomm.init()``, the first operation
    without a group, or ``init_process_group()`` makes the group. What ranks print comes with
    ``[rank]`` before each line.

    A function of a notebook or of the script itself travels by cloudpickle, with what it refers to;
    so a script needs no ``if __name__ == "__main__"``. Results and exceptions come back alike.

    Each rank has its share of the cores as ``OMP_NUM_THREADS``, unless that is set. On a machine
    with several NUMA nodes, each rank runs on the cores of one.

    Args:
        function: what to call.
        args: its arguments.
        ranks: the number of processes.
        nodes: the number of nodes that are emulated: ranks of different nodes share no memory, and
            exchange over Gloo. ``LOCAL_RANK`` counts all ranks, as they share the machine's GPUs.

    Returns:
        The results, in rank order.

    Raises:
        Exception: what the first failing rank raised, with a note of its rank and its traceback.
            The others have been ended.
        pycomm.PeerDied: a rank ended without a result; `rank` and `pid` tell which.
        ValueError: `ranks` or `nodes` is out of range.
        TypeError: the function cannot be called, or it or an argument cannot be sent to another
            process.
    """
    return call_on_ranks(function, args, ranks, nodes)


def call_on_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    ranks: int,
    nodes: int = 1,
    *,
    forward: bool = True,
) -> list[Any]:
    """:func:`launch`; without `forward`, ranks write to this process's own files."""
    check_ranks(ranks, nodes)
    with contextlib.ExitStack() as files:
        call = files.enter_context(_memory_file())
        call.write(_pack(function, args))
        answers = [files.enter_context(_memory_file()) for _ in range(ranks)]
        path = [each for each in sys.path if isinstance(each, str)]  # imports ignore others, too
        command = f"import sys; sys.path[:] = {path}; from pycomm.run import serve; serve"
        commands = [["-c", f"{command}({call.fd}, {each.fd})"] for each in answers]
        descriptors = [call.fd, *(each.fd for each in answers)]
        with _Ranks(commands, nodes, descriptors, forward) as processes:
            outcomes = _outcomes(processes, answers)
    return [outcome.result for outcome in outcomes]


def check_ranks(ranks: int, nodes: int) -> None:
    """Raises an error unless so many ranks can be on so many nodes."""
    check_whole("ranks", ranks)
    check_whole("nodes", nodes)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if not 1 <= nodes <= ranks:
        raise ValueError(f"nodes must be from 1 to ranks, {ranks}, got {nodes}")


# Functions, results and exceptions on their way between processes.


class _Outcome(NamedTuple):
    """How a rank's call has ended; `when` is the time of its error, by the machine's clock."""

    result: Any
    error: Exception | None = None
    trace: str = ""
    when: float = 0.0


class _MemoryFile(NamedTuple):
    """A file without a name. Its first byte tells that it is complete."""

    fd: int

    def write(self, data: bytes) -> None:
        with open(self.fd, "wb", closefd=False) as file:
            file.write(b"\0" + data)
        os.pwrite(self.fd, b"\1", 0)

    def read(self) -> bytes:
        """The data; nothing if they are not complete."""
        if os.pread(self.fd, 1, 0) != b"\1":
            return b""
        with Path(f"/proc/self/fd/{self.fd}").open("rb") as file:  # with its own position
            file.seek(1)
            return file.read()


@contextlib.contextmanager
def _memory_file() -> Iterator[_MemoryFile]:
    fd = os.memfd_create("pycomm-launch")
    try:
        yield _MemoryFile(fd)
    finally:
        os.close(fd)


def _pickler() -> Any:
    return importlib.import_module("cloudpickle") if _has_cloudpickle() else pickle


def _has_cloudpickle() -> bool:
    return importlib.util.find_spec("cloudpickle") is not None


def _pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickles a call; TypeError if it cannot be."""
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}")
    advice = "" if _has_cloudpickle() else ": pip install cloudpickle, or import it from a module"
    if advice and getattr(function, "__module__", None) == "__main__":
        raise TypeError(f"function is of __main__, which other processes cannot import{advice}")
    try:
        return bytes(_pickler().dumps((function, tuple(args))))
    except Exception as error:
        raise TypeError(
            f"function and its arguments must go to other processes, but pickling them raised "
            f"{type(error).__name__}: {error}{advice}"
        ) from error


def serve(call: int, answer: int) -> None:
    """The whole program of a process of :func:`launch`; gets the descriptors of memory files."""
    try:
        function, args = pickle.loads(_MemoryFile(call).read())
        outcome = _Outcome(function(*args))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        outcome = _Outcome(None, error, traceback.format_exc(), time.monotonic())
    _MemoryFile(answer).write(_pack_outcome(outcome))
    sys.exit(outcome.error is not None)


def _pack_outcome(outcome: _Outcome) -> bytes:
    """Pickles an outcome, or the error that it cannot be pickled."""
    dumps = _pickler().dumps
    try:
        data = dumps(outcome)
        if outcome.error is not None:
            pickle.loads(data)  # exceptions with arguments of their own often fail only here
    except Exception as error:
        told, when = outcome.error, outcome.when or time.monotonic()
        what = "the result" if told is None else f"{type(told).__name__}: {told}"
        said = TypeError(f"{what} (which cannot be pickled for another process: {error})")
        data = dumps(_Outcome(None, said, outcome.trace or traceback.format_exc(), when))
    return bytes(data)


def _outcomes(processes: _Ranks, answers: Sequence[_MemoryFile]) -> list[_Outcome]:
    """Waits for all ranks' outcomes; raises the first failure."""
    outcomes: dict[int, _Outcome] = {}

    def failures() -> list[tuple[bool, float, int]]:
        """Ranks that have failed; the first is to blame. The errors of others follow from it."""
        found = []
        for rank, code in enumerate(processes.codes):
            if rank not in outcomes and (data := answers[rank].read()):
                outcomes[rank] = pickle.loads(data)
            if rank not in outcomes:
                found += [(False, 0.0, rank)] * (code is not None)
            elif (error := outcomes[rank].error) is not None:
                found.append((isinstance(error, (PeerDied, Aborted)), outcomes[rank].when, rank))
        return sorted(found)

    processes.wait(lambda: bool(failures()))
    if (found := failures()) and found[0][0]:  # the rank to blame may still be about to tell
        processes.wait(lambda: not failures()[0][0], _GRACE)
    for *_, rank in failures():
        if rank not in outcomes:
            raise processes.death_of(rank)
        error, trace = outcomes[rank].error, outcomes[rank].trace
        assert error is not None
        error.add_note(f"Raised on rank {rank} of {len(answers)}:\n\n{trace}")
        raise error
    return [outcomes[rank] for rank in range(len(answers))]


# The processes.


class _Ranks:
    """The processes of all ranks; the end of the context ends them.

    Attributes:
        codes: the exit status of each rank, negative after a signal; None while it runs.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        nodes: int,
        descriptors: Sequence[int] = (),
        forward: bool = True,
    ) -> None:
        self.codes: list[int | None] = [None] * len(commands)
        self._commands, self._nodes = commands, nodes
        self._descriptors, self._forward = descriptors, forward
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[IO[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Ranks:
        host = first_of_node()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        try:
            for rank, command in enumerate(self._commands):
                self._start(rank, command, host)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _start(self, rank: int, command: Sequence[str], host: str) -> None:
        ranks, output = len(self._commands), subprocess.PIPE if self._forward else None
        node = rank * self._nodes // ranks
        cores, sharing = _cores_of(rank, ranks)
        bound = ",".join(map(str, cores)) if len(cores) < len(os.sched_getaffinity(0)) else ""
        variables = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self._nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "pycomm",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks connect to this process's Store
        }
        variables.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // sharing)))
        # By default Gloo looks up the host's name, which containers often cannot resolve.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._nodes > 1:
            variables["PYCOMM_NODE"] = str(node)
        program = [sys.executable, "-u", *command]
        process = subprocess.Popen(
            [sys.executable, "-ISc", _BECOME, str(os.getpid()), bound, *program],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=self._descriptors,
            process_group=0,  # Ctrl-C reaches this process alone, which passes it on
        )
        self._processes.append(process)
        tag = f"[{rank}] " if ranks > 1 else ""
        for pipe, target in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None:
                self._pipes.append(pipe)
                self._selector.register(pipe, selectors.EVENT_READ, _Lines(target, tag))

    def wait(self, is_over: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Prints what ranks write until all have ended, or `is_over`, or for so many seconds."""
        end = time.monotonic() + seconds
        while None in self.codes and not is_over() and time.monotonic() < end:
            self._print(_LOOK_EVERY)
            for rank, process in enumerate(self._processes):
                self.codes[rank] = _exit_status(process.pid)

    def _print(self, seconds: float) -> None:
        """Prints what is there, and waits for it if nothing is."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 1 << 16)
            try:
                key.data.write(data)
            except BrokenPipeError:  # nobody reads it: print no more
                for other in list(self._selector.get_map().values()):
                    self._selector.unregister(other.fileobj)
                raise
            if not data:
                self._selector.unregister(key.fileobj)

    def death_of(self, rank: int) -> PeerDied:
        """The error for a rank that ended without a result."""
        code = self.codes[rank] or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        pid = self._processes[rank].pid
        return PeerDied(f"rank {rank} (pid {pid}) {how} before its result", rank=rank, pid=pid)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        try:
            for process in self._processes:  # and what they have started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            self.wait(lambda: False, _GRACE)
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            while self._selector.get_map() and self._selector.select(0):
                self._print(0)
            for key in list(self._selector.get_map().values()):  # others have inherited them
                key.data.write(b"")
            self._selector.close()
            for pipe in self._pipes:
                pipe.close()
            del self._store  # and its port


def _exit_status(pid: int) -> int | None:
    """The exit status of a child, which stays a zombie, so that its process group stays its own."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class _Lines:
    """Prints a rank's output line by line."""

    def __init__(self, target: str, tag: str) -> None:
        self._target, self._tag, self._rest = target, tag, b""

    def write(self, data: bytes) -> None:
        """Prints the lines that are complete; without data, the rest."""
        lines = (self._rest + data).splitlines(keepends=True) or [b""]
        self._rest = b"" if not data or lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        file: TextIO = getattr(sys, self._target)
        for line in filter(None, lines):
            end = "" if line.endswith((b"\n", b"\r")) else "\n"
            file.write(self._tag + line.decode(errors="replace") + end)
        file.flush()


def _cores_of(rank: int, ranks: int) -> tuple[list[int], int]:
    """The cores that a rank may use, and the number of ranks that share them."""
    nodes = _cores_by_numa_node()
    mine = rank * len(nodes) // ranks
    return nodes[mine], sum(other * len(nodes) // ranks == mine for other in range(ranks))


def _cores_by_numa_node(folder: Path = _NUMA) -> list[list[int]]:
    """The cores that this process may use, by NUMA node; one list if the system names no nodes."""
    usable, found = os.sched_getaffinity(0), []
    for path in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: (len(str(path)), path)):
        spans = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        cores = {c for a, _, b in spans for c in range(int(a), int(b or a) + 1)} & usable
        if cores:
            found.append(sorted(cores))
    return found or [sorted(usable)]


# The command line.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a script or a module on each rank; the status is that of the first that failed."""
    parser = argparse.ArgumentParser(
        "python -m pycomm.run",
        usage="%(prog)s [--ranks N] [--nodes N] (SCRIPT | -m MODULE) [ARGUMENTS]",
        description="Runs a script on several ranks, which are processes on this machine.",
        epilog="The options may also stand directly behind the script, before its own arguments.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many processes (default 2)")
    parser.add_argument("--nodes", type=int, default=1, help="how many emulated nodes (default 1)")
    before, rest = _split(sys.argv[1:] if argv is None else argv)
    script = rest[: 2 if rest[:1] == ["-m"] else 1]
    if not script or script == ["-m"] or (script[0].startswith("-") and script[0] != "-m"):
        parser.parse_args([*before, *rest])  # --help, or an error
        parser.error("a script, or -m and a module, must be given")
    after, arguments = _split(rest[len(script) :]) if not before else ([], rest[len(script) :])
    options = parser.parse_args(before or after)
    try:
        check_ranks(options.ranks, options.nodes)
    except ValueError as error:
        parser.error(str(error))
    return _run([*script, *arguments], options.ranks, options.nodes)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """This command's own options at the head, and all behind them."""
    count = 0
    while count < len(words) and words[count].partition("=")[0] in ("--ranks", "--nodes"):
        count += 1 if "=" in words[count] else 2
    return list(words[:count]), list(words[count:])


class _Terminated(BaseException):
    """SIGTERM has arrived."""


def _run(command: list[str], ranks: int, nodes: int) -> int:
    def stop(*_: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        with _Ranks([command] * ranks, nodes) as processes:
            processes.wait(lambda: any(processes.codes))
            failed = [(code > 0, rank, code) for rank, code in enumerate(processes.codes) if code]
            if not failed:
                return 0
            _, rank, code = min(failed)  # a signal first: errors of other ranks follow from it
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            print(f"pycomm.run: rank {rank} {how}; the others are ended", file=sys.stderr)
            return code if code > 0 else 128 - code
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:  # for what Python prints at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
