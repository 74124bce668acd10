"""Groups take limited address space and little memory that containers count."""

import contextlib
import os
from pathlib import Path

import programs
import pytest

# A limit on the growth of a program's address space.
LIMIT = """
import resource, torch, pycomm
pages = int(open('/proc/self/statm').read().split()[0])
most = pages * resource.getpagesize() + {}
resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

# Sixteen ranks, eight groups, and tensors in the window fit into a free gigabyte.
MANY_GROUPS = """
import contextlib
def body(group):
    x = group.empty(1 << 18).fill_(group.rank)
    return pycomm.all_reduce(x, op="sum", group=group)[0].item()
with contextlib.ExitStack() as stack:
    worlds = [stack.enter_context(pycomm.LocalWorld(16)) for _ in range(8)]
    print({total for world in worlds for total in world.run(body)})
"""
TOO_LITTLE = """
with pycomm.LocalWorld(1) as world:
    try:
        world.groups[0].empty(1 << 28)
    except MemoryError as error:
        print(error)
    print(pycomm.all_reduce(world.groups[0].empty(4).fill_(1), group=world.groups[0]))
"""
# More than the usual limit of a process's mappings; with a higher limit, nothing is tested.
MANY_TENSORS = """
import torch, pycomm
from pathlib import Path
most = int(Path('/proc/sys/vm/max_map_count').read_text())
with pycomm.LocalWorld(2) as world:
    group = world.groups[0]
    tensors = [group.empty(4).fill_(i) for i in range(min(most, 100_000) + 5_000)]
    del tensors[1::2]
    group.empty(1 << 20)
    print(all(tensor[3].item() == 2 * i for i, tensor in enumerate(tensors)))
"""


@pytest.mark.slow
def test_groups_take_the_address_space_that_they_use():
    """Too little of it is an exception."""
    ends = programs.run_all(
        {
            "many groups": LIMIT.format(1 << 30) + MANY_GROUPS,
            "too little": LIMIT.format(128 << 20) + TOO_LITTLE,
            "many tensors": MANY_TENSORS,
        },
        env=ENVIRONMENT,
    )
    assert [ended.status for ended in ends.values()] == [0] * 3, ends
    assert ends["many groups"].stdout == "{120.0}\n"
    first, second = ends["too little"].stdout.splitlines()
    assert first.startswith("no room to map 1073741824 bytes of the shared window: ")
    assert second == "tensor([1., 1., 1., 1.])"
    assert ends["many tensors"].stdout == "True\n"


@contextlib.contextmanager
def control_group(limit):
    """A control group of this node with this much memory; returns the file for its processes."""
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
import os, pycomm
open({!r}, "w").write(str(os.getpid()))
with pycomm.LocalWorld(1) as world:
    world.groups[0].empty(1 << 20)
    try:
        world.groups[0].empty(1 << 28)
    except MemoryError as error:
        print(error)
"""
    with control_group(700 << 20) as processes:
        text = program.format(str(processes))
        (ended,) = programs.run_all({"limited": text}, env=ENVIRONMENT).values()
    assert ended.stdout.startswith(
        "the shared window needs 1073741824 bytes, the node or its control"
    )


@pytest.mark.slow
def test_memory_between_operations_can_be_given_back():
    program = """
import re, torch, pycomm
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
    ends = programs.run_all(
        {
            what: f"what = {what!r}\n{program}"
            for what in ("reduce_scatter", "top-k", "top-k between nodes")
        },
        env=ENVIRONMENT,
    )
    for what, ended in ends.items():
        assert ended.status == 0, (what, ended)
        grown, kept = map(int, ended.stdout.split())
        assert grown > 40, what
        assert kept < grown / 4, what
