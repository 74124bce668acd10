"""Processes of a group that spans nodes come to their end while others go on."""

import programs
import pytest

# Rank 1 ends while rank 0's interpreter finalizes: no thread that waits there may wake up.
SCRIPT = """
import os, sys, tempfile, time
import torch, torch.distributed as dist, pycomm

class Slow:
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(0.6)

folder = tempfile.TemporaryDirectory()
pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        folder._finalizer.detach()
        os.environ["PYCOMM_NODE"] = str(rank)
        store = dist.FileStore(folder.name + "/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert len(pycomm.init(timeout=20).nodes) == 2
        assert pycomm.all_reduce(torch.ones(9)).tolist() == [2.0] * 9
        if rank == 1:
            time.sleep(LATE)
        elif PENDING:
            work = pycomm.barrier(async_op=True)
        sys.slow = Slow()
        sys.exit()
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


# Rank 1 is interrupted while one of its threads waits for rank 0's address, and exits at once.
INTERRUPTED = """
import os, signal, sys, tempfile, time
import torch.distributed as dist, pycomm
from pycomm._runtime import internode

class Slow:
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(0.6)

def wait(self, keys, timeout=None):
    if keys != ["secret"]:
        os.kill(os.getpid(), signal.SIGINT)
    original(self, keys, timeout)

folder = tempfile.TemporaryDirectory()
pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        folder._finalizer.detach()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["PYCOMM_NODE"] = str(rank)
        original = internode.InterruptibleStore.wait
        if rank == 0:
            tell = internode.InterruptibleStore.set
            internode.InterruptibleStore.set = lambda self, key, value: (
                key == "secret" and tell(self, key, value)
            )
        else:
            internode.InterruptibleStore.wait = wait
        store = dist.FileStore(folder.name + "/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        try:
            pycomm.init(timeout=20)
        except (pycomm.Aborted, KeyboardInterrupt):
            sys.slow = Slow()
            sys.exit(7)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


@pytest.mark.slow
def test_who_exits_while_others_go_on_ends_well():
    """Also with a pending operation that the other rank never joins, and after an interrupt."""
    texts = {
        "leaves": f"PENDING, LATE = False, 0.3\n{SCRIPT}",
        "leaves with an operation under way": f"PENDING, LATE = True, 2\n{SCRIPT}",
        "is interrupted while nodes connect": INTERRUPTED,
    }
    for name, ended in programs.run_all(texts).items():
        statuses = "[7, 7]" if "interrupted" in name else "[0, 0]"
        assert ended.stdout.splitlines()[-1:] == [statuses], (name, ended)
        assert "terminate" not in ended.stderr, (name, ended)
