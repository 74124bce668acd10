"""Runs torch's own tests of its backends, ``distributed_test.py``, with pycomm in Gloo's place.

``python tests/support/torch_suite.py WORLD_SIZE [TEST ...]``

The tests decide by the name "gloo" which of them run, so torch.distributed is patched: a call that
asks for Gloo gets pycomm, and a call that asks for a backend's name gets "gloo". Every rank of
every test is a fork of this process, because importing torch takes longer than most tests.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

PATIENCE = 60.0  # seconds for a test
# Asserts that DistributedDataParallel logs the name "gloo".
EXCEPT = ("test_ddp_logging_data_cpu",)


def prepare(world_size: int) -> None:
    """Sets what the tests' module reads when it is imported."""
    folder = Path(tempfile.mkdtemp())
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": str(folder)}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


def put_in_place_of_gloo(dist, dt) -> None:
    """Patches torch.distributed, and the name that the profiler's events have in the tests."""
    profiled = dt.get_profiling_event

    def patched_profiled(name, *args, **kwargs):
        events = profiled(name.replace("gloo:", "pycomm:"), *args, **kwargs)
        for event in events:
            event.name = event.name.replace("pycomm:", "gloo:")
        return events or profiled(name, *args, **kwargs)

    dt.get_profiling_event = patched_profiled
    init, new_group, get_backend = dist.init_process_group, dist.new_group, dist.get_backend

    def pycomm_for(backend):
        return "pycomm" if backend == "gloo" else backend

    def patched_init(backend=None, *args, **kwargs):
        return init(pycomm_for(backend), *args, **kwargs)

    def patched_new_group(ranks=None, timeout=None, backend=None, **kwargs):
        return new_group(ranks, timeout, pycomm_for(backend), **kwargs)

    def patched_get_backend(group=None):
        name = get_backend(group)
        return dist.Backend("gloo") if name == "pycomm" else name

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = patched_init
        module.new_group = patched_new_group
        module.get_backend = patched_get_backend


def run_rank(kind, name: str, rank: int, file: str, dt) -> int:
    """Runs one rank's part of a test; returns the exit status, as torch's harness does."""
    case = kind(name)
    case.rank, case.file_name = rank, file
    timeout = dt.CUSTOM_PG_TIMEOUT.get(name, dt.default_pg_timeout)
    dt.dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=rank,
        timeout=timedelta(seconds=timeout),
    )
    backend = dt.dist.group.WORLD._get_backend(dt.torch.device("cpu"))
    assert type(backend).__module__.startswith("pycomm._c10d_"), type(backend)
    dt.dist.barrier()
    getattr(case, name)()
    dt.dist.barrier()
    dt.dist.destroy_process_group()
    return 0


def forked(kind, name: str, rank: int, file: str, dt, log: Path) -> int:
    """Starts a process for one rank; returns its pid."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        status = run_rank(kind, name, rank, file, dt)
    except SystemExit as end:
        status = int(end.code or 0)
    except unittest.SkipTest as skip:
        print(skip)
        status = SKIPPED
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


SKIPPED = 200


def run_test(kind, name: str, dt) -> tuple[str, str]:
    """Runs a test; returns "ok", "skipped" or "failed", and what its ranks printed."""
    with tempfile.TemporaryDirectory() as folder:
        dt.Barrier.init()
        file = f"{folder}/store"
        logs = [Path(folder) / f"log{r}" for r in range(int(os.environ["WORLD_SIZE"]))]
        pids = [forked(kind, name, r, file, dt, log) for r, log in enumerate(logs)]
        statuses, deadline = [], time.monotonic() + PATIENCE
        for pid in pids:
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    for other in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(other, signal.SIGKILL)
            statuses.append(os.waitstatus_to_exitcode(ended[1]))
        text = "".join(f"rank {r}: {log.read_text()}" for r, log in enumerate(logs))
    skips = {skip.exit_code for skip in dt.TEST_SKIPS.values()} | {SKIPPED}
    if all(status in skips for status in statuses):
        return "skipped", text
    return ("ok" if not any(statuses) else "failed"), f"{statuses}\n{text}"


def main() -> int:
    """Runs the named tests, or all of them; the exit status tells whether one failed."""
    prepare(int(sys.argv[1]))
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as dt

    import pycomm  # noqa: F401 - registers the backend

    put_in_place_of_gloo(dist, dt)

    class Suite(dt.TestDistBackend, dt.DistributedTest._DistTestBase):
        pass

    names = sys.argv[2:] or unittest.TestLoader().getTestCaseNames(Suite)
    names = [
        name
        for name in names
        if name not in EXCEPT and not getattr(getattr(Suite, name), "__unittest_skip__", False)
    ]
    count = {"ok": 0, "skipped": 0, "failed": 0}
    for name in names:
        start = time.monotonic()
        result, text = run_test(Suite, name, dt)
        count[result] += 1
        if result != "skipped":
            print(f"{result:8}{time.monotonic() - start:6.1f} s  {name}", flush=True)
        if result == "failed":
            print(text, flush=True)
    print(", ".join(f"{n} {result}" for result, n in count.items()))
    return int(count["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
