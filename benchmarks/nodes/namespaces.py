"""Several nodes on one Linux machine: network namespaces, joined by a bridge in one of its own.

Needs root. Everything lies in namespaces with this process's number in their names: where they are
deleted, which happens however the process ends but by SIGKILL, links and limits go with them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INTERFACE = "eth0"  # of every node
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
BURST_BYTES = 1 << 20  # that tc calls 1mb
_SEARCHED = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing() -> str | None:
    """The reason why nodes cannot be emulated here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for tool in ("ip", "tc", "taskset", "unshare"):
        if shutil.which(tool, path=_SEARCHED) is None:
            return f"needs the command {tool} (packages iproute2 and util-linux)"
    try:
        with Nodes(2, "1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` fails here: {error.stderr.strip()}"


def sent_bytes(interface: str = INTERFACE) -> int:
    """Bytes that have left the node on which this process runs."""
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())


def address(node: int) -> str:
    """The address of a node; nodes count from 0."""
    return f"10.77.0.{node + 1}"


class Nodes:
    """Emulated nodes, which exist in a ``with`` block.

    Args:
        count: the number of nodes, at least 2.
        rate: rate of every node's link in both directions, in tc's form: ``"1gbit"``.
    """

    def __init__(self, count: int, rate: str) -> None:
        if count < 2:
            raise ValueError(f"count must be at least 2, got {count}")
        self.count, self._rate = count, rate
        self._switch = f"pycomm-{os.getpid()}-switch"
        self._names = [f"pycomm-{os.getpid()}-{node}" for node in range(count)]
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Nodes:
        atexit.register(self.close)
        for number in ENDINGS:
            signal.signal(number, lambda *_: sys.exit(1))  # by way of atexit
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes on the nodes, and removes the nodes."""
        before = [
            signal.signal(number, signal.SIG_IGN) for number in ENDINGS
        ]  # `timeout` sends two
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # --kill-child: with it goes all that is in its namespace of pids
            process.wait()
        for name in (*self._names, self._switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)
        atexit.unregister(self.close)
        for number, handler in zip(ENDINGS, before, strict=True):
            signal.signal(number, handler)

    def set_rate(self, rate: str) -> None:
        """Sets the rate of both ends of every link."""
        self._rate = rate
        for name, interface in self._ends():
            limit = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", interface, "root",
                 *limit)  # fmt: skip

    def set_link(self, node: int, state: str) -> None:
        """Cuts a node's link, ``"down"``, or mends it, ``"up"``, at the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", state)

    def start(
        self, node: int, command: Sequence[str], env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Runs a command on a node, with its own pid and IPC namespaces and cores."""
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[node :: self.count] or [cores[node % len(cores)]]
        inside = (
            "taskset", "--cpu-list", ",".join(map(str, mine)),
            "unshare", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
        )  # fmt: skip
        process = subprocess.Popen(
            [_found("ip"), "netns", "exec", self._names[node], *inside, *command], env=env
        )
        self._started.append(process)
        return process

    def _ends(self) -> list[tuple[str, str]]:
        ports = [(self._switch, f"port{node}") for node in range(self.count)]
        return [*((name, INTERFACE) for name in self._names), *ports]

    def _build(self) -> None:
        for name in (*self._names, self._switch):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            port = f"port{node}"
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth",
                 "peer", "name", port, "netns", self._switch)  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        self.set_rate(self._rate)


def _found(tool: str) -> str:
    return shutil.which(tool, path=_SEARCHED) or tool


def _run(tool: str, *arguments: str) -> None:
    subprocess.run(
        [_found(tool), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": _SEARCHED},
    )
