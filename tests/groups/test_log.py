"""Log messages: how a group is made up, what slows it down, how operations run."""

import logging
import os

import helpers
import programs
import pytest
import torch

import pycomm
from pycomm import collectives, compressed
from pycomm._runtime import host, log


@pytest.fixture(autouse=True)
def listening(caplog, monkeypatch):
    """Captures all messages, whatever PYCOMM_LOG is."""
    monkeypatch.setattr(logging.getLogger("pycomm"), "propagate", True)
    caplog.set_level(logging.DEBUG, "pycomm")


@pytest.fixture
def said(caplog):
    """Returns the messages so far of a logger below pycomm's, with the level, and forgets all."""

    def take(name, level):
        found = [r for r in caplog.records if (r.name, r.levelname) == (f"pycomm.{name}", level)]
        caplog.clear()
        return sorted(record.getMessage() for record in found)

    return take


@pytest.mark.parametrize("value", ["verbose", "Chatty", "0"])
def test_other_values_are_refused(value, monkeypatch):
    monkeypatch.setenv("PYCOMM_LOG", value)
    with pytest.raises(ValueError, match=f"PYCOMM_LOG must be one of info, debug, got {value!r}"):
        log._set_up()


MAKE = """
import logging, os, torch
os.environ["PYCOMM_LOG"] = LOG
import pycomm
os.sched_getaffinity = lambda _: {0}
if CONFIGURED: logging.basicConfig(format="root %(message)s", level=logging.INFO)
with pycomm.LocalWorld(2) as world:
    world.run(lambda group: pycomm.all_reduce(torch.ones(4), group=group, out=torch.empty(4)))
"""


def test_who_prints_what():
    """pycomm prints only if PYCOMM_LOG is set, to stderr; otherwise a program's handlers do."""
    cases = {
        "silent": ("", False, ""),
        "own handlers": ("", True, ""),
        "info": ("INFO", True, "INFO WARNING"),
        "debug": ("debug", False, "INFO WARNING DEBUG"),
    }
    ends = programs.run_all(
        {
            name: f"LOG, CONFIGURED = {level!r}, {configured}\n{MAKE}"
            for name, (level, configured, _) in cases.items()
        }
    )
    for name, (level, configured, levels) in cases.items():
        status, stdout, stderr = ends[name]
        assert (status, stdout) == (0, ""), (name, stderr)
        lines = stderr.splitlines()
        if level:
            assert {line.split()[4] for line in lines} == set(levels.split()), name
            links = sum(": rank " in line for line in lines)  # of each rank to the other
            assert links == (2 if level == "debug" else 0), name
            assert len(lines) - links == 2 * len(levels.split()), name
        elif configured:
            assert len(lines) == 4
            assert all(line.startswith("root rank") for line in lines)
        else:
            assert lines == []


def test_what_a_group_is_made_of(world, said):
    groups = world(3, timeout=9, nodes=[2, 1]).groups
    first, *others = said("group", "INFO")
    assert len(others) == 2
    for part in (
        "rank 0 of 3: ", groups[0].name, "nodes [[0, 1], [2]]", "stripes 1 over threads",
        "2 MiB of staging", f"{len(os.sched_getaffinity(0))} cores", "timeout 9 s",
    ):  # fmt: skip
        assert part in first


def break_cores(patch):
    patch.setattr(os, "sched_getaffinity", lambda _: {0})


def break_vectors(patch):
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    patch.setattr(log.platform, "machine", lambda: "x86_64")


def break_exchange(patch):
    patch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (break_cores, "2 ranks share 1 cores"),
        (break_vectors, "no AVX2"),
        (break_exchange, "DLPack exchange API"),
    ],
)
def test_what_slows_a_group_down(world, said, monkeypatch, spoil, words):
    with monkeypatch.context() as patch:
        spoil(patch)
        world(2)
    found = [line for line in said("group", "WARNING") if words in line]
    assert [line.split(":")[0] for line in found] == ["rank 0", "rank 1"]


def test_nodes_that_differ(world, said):
    world(3, nodes=[2, 1])
    assert len([line for line in said("group", "WARNING") if "differ in size" in line]) == 3
    world(2, nodes=[1, 1])
    assert not any("differ" in line for line in said("group", "WARNING"))


def test_cuda_through_host_memory(world, said):
    device = torch.device("cuda", 0)
    group = world(2).groups[1]
    log.cuda_made(group, device, "peer memory", 4)
    assert "rank 1: cuda:0 over peer memory, 4 blocks" in said("group", "INFO")
    spanning = world(2, nodes=[1, 1]).groups[0]
    said("group", "WARNING")
    assert spanning._stages(device)
    assert spanning._stages(device)
    assert len(said("group", "WARNING")) == 1


@pytest.mark.parametrize(
    ("setting", "warnings"),
    [("always [madvise] never", 0), ("[never]", 1), ("absent", 1), ("unreadable", 0)],
)
def test_huge_pages(tmp_path, said, monkeypatch, setting, warnings):
    monkeypatch.setattr(host, "_HUGE_PAGES", tmp_path / "enabled")
    if setting == "unreadable":
        host._HUGE_PAGES.mkdir()
    elif setting != "absent":
        host._HUGE_PAGES.write_text(setting)
    host._look_for_huge_pages.cache_clear()
    for _ in range(2):
        host.huge_page_zeros(4, torch.float32, torch.device("cpu"))
    host._look_for_huge_pages.cache_clear()
    assert len(said("memory", "WARNING")) == warnings


def operate(group, in_window=False):
    """Runs two kinds of operations, each twice."""
    large = group.empty(1 << 18) if in_window else torch.empty(1 << 18)
    for _ in range(2):
        pycomm.all_reduce(large.fill_(1), group=group)
        pycomm.all_reduce(torch.ones(8), group=group)
        pycomm.compressed_all_reduce(torch.ones(512), pycomm.Int8(), group=group)


def test_what_operations_do(world, said, caplog, monkeypatch):
    """Each kind of operation is logged once, and that tensors are staged, once for each group."""
    for module in (collectives, compressed):
        monkeypatch.setattr(module, "DEBUG", True)
    for name in ("all_reduce", "compressed_all_reduce"):
        monkeypatch.setattr(pycomm, name, helpers.whole_way(name))
    world(2).run(operate)
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "are staged" in line]) == 2
    lines = said("operations", "DEBUG")
    assert len(lines) == 6
    for size, what in [(1 << 20, "two_shot"), (32, "one_shot"), (2048, "Int8(block=256")]:
        (line,) = (line for line in lines if line.startswith(f"rank 1: all_reduce of {size} bytes"))
        assert what in line
    world(2).run(operate, True)
    assert not any("are staged" in record.getMessage() for record in caplog.records)


def test_what_buckets_do(world, said):
    """Each layout of buckets is logged once, not in each step."""

    def train(group):
        model = pycomm.DataParallel(torch.nn.Linear(64, 64), compression=pycomm.Int8(), group=group)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()

    world(2).run(train)
    lines = [line for line in said("operations", "DEBUG") if "bucket" in line]
    assert [line.split(" bucket")[0] for line in lines] == ["rank 0:", "rank 1:"]
    assert "Int8(block=256" in lines[0]
