"""Groups take limited address space and little memory that containers count."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(program, *, limit=None):
    """The output of a program with a limit on the growth of its address space after imports."""
    lines = ["import resource, torch, pycomm"]
    if limit is not None:
        lines += [
            "pages = int(open('/proc/self/statm').read().split()[0])",
            f"most = pages * resource.getpagesize() + {limit}",
            "resource.setrlimit(resource.RLIMIT_AS, (most, most))",
        ]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, program])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_groups_take_the_address_space_that_they_use():
    """Sixteen ranks, eight groups, and tensors in the window fit into a free gigabyte."""
    program = """
import contextlib
def body(group):
    x = group.empty(1 << 18).fill_(group.rank)
    return pycomm.all_reduce(x, op="sum", group=group)[0].item()
with contextlib.ExitStack() as stack:
    worlds = [stack.enter_context(pycomm.LocalWorld(16)) for _ in range(8)]
    print({total for world in worlds for total in world.run(body)})
"""
    assert run(program, limit=1 << 30) == "{120.0}"


def test_too_little_address_space_is_an_exception():
    program = """
with pycomm.LocalWorld(1) as world:
    try:
        world.groups[0].empty(1 << 28)
    except MemoryError as error:
        print(error)
    print(pycomm.all_reduce(world.groups[0].empty(4).fill_(1), group=world.groups[0]))
"""
    first, second = run(program, limit=128 << 20).splitlines()
    assert first.startswith("no room to map 1073741824 bytes of the shared window: ")
    assert second == "tensor([1., 1., 1., 1.])"


@contextlib.contextmanager
def control_group(limit):
    """A control group of this node's, of so much memory; its processes' file."""
    name = f"pycomm-test-{os.getpid()}"
    for parent, file in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        made = Path(parent) / name
        try:
            made.mkdir()
            (made / file).write_text(str(limit))
        except OSError:
            with contextlib.suppress(OSError):
                made.rmdir()
            continue
        try:
            yield made / "cgroup.procs"
        finally:
            made.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_control_group_is_asked_before_the_node():
    program = """
import os, sys
open(sys.stdin.readline().strip(), "w").write(str(os.getpid()))
with pycomm.LocalWorld(1) as world:
    world.groups[0].empty(1 << 20)
    try:
        world.groups[0].empty(1 << 28)
    except MemoryError as error:
        print(error)
"""
    with control_group(700 << 20) as processes:
        said = run(f"import io, sys; sys.stdin = io.StringIO({str(processes)!r})\n{program}")
    assert said.startswith("the shared window needs 1073741824 bytes, the node or its control")


@pytest.mark.parametrize("what", ["reduce_scatter", "top-k", "top-k between nodes"])
def test_memory_between_operations_can_be_given_back(what):
    program = """
import re
def resident():
    fields = dict(re.findall(r"Rss(Anon|Shmem):\\s*(\\d+)", open("/proc/self/status").read()))
    return sum(int(kib) for kib in fields.values()) >> 10
def body(group, x, y):
    if "top-k" in what:
        pycomm.compressed_all_reduce(x, pycomm.TopK(0.5), group=group)
    else:
        pycomm.reduce_scatter(y, x, op="sum", group=group)
    pycomm.barrier(group=group)
    return resident()
x, y = torch.ones(2, 6 << 20), torch.empty(6 << 20)
nodes = None if what == "top-k" else [1, 1]
with pycomm.LocalWorld(2, nodes=nodes) as world:
    run = lambda: max(world.run(lambda group: body(group, x.clone(), y.clone())))
    before = resident()
    grown = run() - before
    for group in world:
        group.trim()
    kept = resident() - before
    run()
    print(grown, kept)
"""
    grown, kept = map(int, run(f"what = {what!r}\n{program}").split())
    assert grown > 40
    assert kept < grown / 4


def test_more_tensors_than_a_process_may_have_mappings():
    """As the usual limit is; a node with a higher one shows nothing."""
    program = """
from pathlib import Path
most = int(Path('/proc/sys/vm/max_map_count').read_text())
with pycomm.LocalWorld(2) as world:
    group = world.groups[0]
    tensors = [group.empty(4).fill_(i) for i in range(min(most, 100_000) + 5_000)]
    del tensors[1::2]
    group.empty(1 << 20)
    print(all(tensor[3].item() == 2 * i for i, tensor in enumerate(tensors)))
"""
    assert run(program) == "True"
