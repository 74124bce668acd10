"""The interpreter exits while threads are in operations that will not complete."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import pycomm

OPERATIONS = {
    "all_reduce": lambda group: pycomm.all_reduce(torch.ones(4), group=group),
    "broadcast": lambda group: pycomm.broadcast(torch.ones(4), group=group),
    "barrier": lambda group: pycomm.barrier(group=group),
    "wait": lambda group: pycomm.barrier(group=group, async_op=True).wait(),
}


class Slow:
    """Gives threads time to come back while the interpreter takes itself apart."""

    sleep = staticmethod(time.sleep)

    def __del__(self):
        self.sleep(0.3)


def exit_during(operation, told):
    """Rank 1 of 2 never comes. If the group is not `told` to end, its thread outlives Python."""
    group, _ = sys.groups = pycomm.LocalWorld(2, timeout=0.3 if not told else 60).groups
    if not told:
        pycomm.group._open_groups.forget()
    threading.Thread(target=operation, args=(group,), daemon=True).start()
    time.sleep(0.1)
    sys.slow = Slow()
    sys.exit(7)


def main():
    """Forks a process for each operation; prints their exit statuses."""
    for told in (True, False):
        pids = {}
        for name, operation in OPERATIONS.items():
            pids[name] = os.fork()
            if pids[name] == 0:
                exit_during(operation, told)
        for name, pid in pids.items():
            print(name, told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@pytest.mark.slow
def test_exit_while_a_daemon_thread_is_in_an_operation():
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=60, check=False
    )
    expected = [f"{name} {told} 7" for told in (True, False) for name in OPERATIONS]
    assert done.stdout.splitlines() == expected, done.stderr
    assert "terminate" not in done.stderr


# What is registered with the C library before the extension is loaded comes after its destructors.
OUTLIVES = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
usleep = ctypes.cast(libc.usleep, ctypes.c_void_p)
libc.__cxa_atexit(usleep, ctypes.c_void_p(300_000), None)
import pycomm
sys.worlds = [pycomm.LocalWorld(2) for _ in range(2)]
sys.work = pycomm.barrier(group=sys.worlds[0].groups[0], async_op=True)
pycomm.group._open_groups.forget()  # so that nothing ends it
time.sleep(0.1)
"""


def test_a_worker_waits_while_the_process_ends():
    done = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()


# At exit, the function that was registered first runs last.
TAKES_DOWN = """
import atexit, sys
import torch.distributed as dist
def tell(): print("left" if dist.is_initialized() else "taken down")
atexit.register(tell)
import pycomm
if sys.argv[1:] == ["own"]:
    dist.init_process_group("gloo")
pycomm.init()
"""


@pytest.mark.slow
def test_init_takes_down_what_it_has_set_up():
    """Torch's threads could end a finished process with an error; a user's own group is theirs."""
    for arguments, expected in (([], "taken down"), (["own"], "left")):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", TAKES_DOWN, *arguments],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"RANK": "0", "WORLD_SIZE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr
