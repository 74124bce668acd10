"""``python -m pycomm.top`` sees ranks from outside, also those that hang."""

import contextlib
import io
import json
import mmap
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest
import torch

import pycomm
from pycomm import top
from pycomm._peaks import MemoryPeak, memory_numbers

MARKUP = "user/[/item].weight"  # a parameter's name, which rich would take for its own
TOP = [sys.executable, "-m", "pycomm.top"]


def hang(rank, size, store):
    """Runs two groups; rank 1 does not join the last operation of the second one."""
    with helpers.member(rank, size, store) as group, pycomm.init() as other:
        for _ in range(3):
            pycomm.all_reduce(torch.ones(1000), group=group)
        kinds = {"parameters": 1 << 20, "activations": (4 + rank) << 20}
        peaks = {
            "forward": MemoryPeak({"activations": 1 << 20}, {}, rank),
            "backward": MemoryPeak(kinds, {"resident": 1 << 30}, rank),
        }
        group._core.show_memory(memory_numbers(peaks))
        pycomm.barrier(group=other)
        if rank == 1:
            time.sleep(60)
        other._core.subject = MARKUP
        pycomm.broadcast(torch.ones(77), group=other)


def print_as_json(_rank, _size, _store, pid):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        top.main([str(pid), "--json"])
    return said.getvalue()


def look(pid):
    """What the program prints, in another process that has imported torch already."""
    return json.loads(helpers.run_ranks(1, print_as_json, pid)[0])


def gone(pid):
    """True if a process has ended, whether or not its parent knows."""
    try:
        return not Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def both_wait(pid):
    groups = look(pid)["groups"]
    return any(group["late"] == [1] for group in groups) and groups


@pytest.fixture
def hanging():
    with helpers.Ranks(3, hang) as ranks:
        helpers.wait_until(lambda: both_wait(ranks.pids[0]), 60)
        yield ranks


def test_a_job_that_hangs(hanging):
    """Also if the late rank is stopped, or asked for by another rank's process."""
    hanging.signal(1, signal.SIGSTOP)
    for pid in hanging.pids:
        first, second = sorted(both_wait(pid), key=lambda group: len(group["late"]))
        assert [rank["pid"] for rank in first["ranks"]] == hanging.pids
        assert [o["sequence"] for o in first["ranks"][2]["operations"]] == [1, 2, 3]
        assert all(o["done"] > o["entered"] - 1e-6 for o in first["ranks"][2]["operations"])
        assert "1000 elements" in first["ranks"][0]["operations"][0]["description"]
        assert [rank["waits_for"] for rank in second["ranks"]] == [1, None, 1]
        peaks = [{"forward": 1 << 20, "backward": (5 + rank) << 20} for rank in range(3)]
        assert [rank["memory"] for rank in first["ranks"]] == peaks
        assert [rank["memory"] for rank in second["ranks"]] == [{}, {}, {}]
        last = second["ranks"][2]["operations"][-1]
        assert (last["operation"], last["done"]) == ("broadcast", None)


def test_the_dead_are_shown(hanging):
    hanging.signal(0, signal.SIGSTOP)  # so that it does not end with an error
    hanging.signal(1, signal.SIGKILL)
    helpers.wait_until(lambda: gone(hanging.pids[1]))  # but nobody has waited for it yet
    groups = look(hanging.pids[0])["groups"]
    assert all(group["ranks"][1]["gone"] for group in groups)
    assert not any(group["ranks"][0]["gone"] for group in groups)


def test_the_table(hanging):
    """It is drawn again and again, for all processes, until Ctrl-C."""
    expected = [
        "group of 3 ranks, waiting for 1",
        str(hanging.pids[1]),
        MARKUP,
        *(f"{5 + rank}.0 in backward" for rank in range(3)),
    ]
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*TOP, "--interval", "0.2"],
        stdout=follower,
        stderr=follower,
        # High enough for groups of other tests, too.
        env={**os.environ, "COLUMNS": "200", "LINES": "500", "TERM": "xterm"},
    ) as shown:
        os.close(follower)
        text = ""
        while text.count("waits for rank 1") < 6 or not all(each in text for each in expected):
            text += os.read(leader, 1 << 16).decode(errors="replace")
        shown.send_signal(signal.SIGINT)
        while True:
            try:
                if not os.read(leader, 1 << 16):
                    break
            except OSError:  # a terminal's end
                break
        assert shown.wait(30) == 0
    os.close(leader)


def test_smaller_groups_are_seen():
    """They lie in a rank's heap."""
    with helpers.Ranks(3, shrink_and_hang) as ranks:

        def seen():
            groups = look(ranks.pids[0])["groups"]
            return [group for group in groups if (group["size"], group["late"]) == (2, [1])]

        helpers.wait_until(seen, 60)
        last = seen()[0]["ranks"][0]["operations"][-1]
        assert (last["operation"], last["sequence"]) == ("barrier", 2)


def shrink_and_hang(rank, size, store):
    with helpers.member(rank, size, store) as group:
        group.should_commit()
        if rank == 2:
            group.close()
            time.sleep(60)
        smaller = group.shrink()
        smaller.should_commit()
        if rank == 1:
            time.sleep(60)
        pycomm.barrier(group=smaller)


def test_mapped_files_have_any_name(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        assert look(os.getpid())["groups"] == []


def test_no_job(capsys):
    """A process without a group has none; one that does not exist is refused."""
    assert look(os.getpid())["groups"] == []
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    for pid, words in ((ended.pid, "No such file"), ("x", "invalid int")):
        with pytest.raises(SystemExit, match="2"):
            top.main([str(pid)])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["layout", "ranks", "short"])
def test_files_that_are_no_windows_of_ours(damage):
    """A window of another version is reported; a damaged window is left out."""
    header = pycomm._C.window_magic.to_bytes(8, "little")
    layout = pycomm._C.window_layout ^ (damage == "layout")
    header += layout.to_bytes(8, "little")
    header += (10**9 if damage == "ranks" else 2).to_bytes(8, "little")
    fd = os.memfd_create("pycomm")
    os.ftruncate(fd, 4096 if damage == "short" else 1 << 24)
    os.pwrite(fd, header + (1 << 22).to_bytes(8, "little") + (1 << 20).to_bytes(8, "little"), 0)
    with mmap.mmap(fd, 4096):
        told = look(os.getpid())
    os.close(fd)
    strangers = [os.getpid()] if damage == "layout" else []
    assert told == {"groups": [], "other_versions": strangers}


def look_at_the_other(group):
    """All windows of a file share the locks, whichever process's they are."""
    pids = [rank.pid for rank in group.report().ranks]
    found = [top.Jobs(pid).reports() for pid in (*pids, None)]
    time.sleep(0.1)
    pycomm.barrier(group=group)
    return len(found)


def test_a_rank_does_not_look_at_its_own_groups():
    assert helpers.run_group(2, look_at_the_other) == [3, 3]


def fork_and_hang(rank, size, store):
    with helpers.member(rank, size, store) as group:
        if rank == 0 and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        pycomm.barrier(group=group)
        time.sleep(60)


def test_a_child_does_not_keep_a_dead_job_alive():
    """It maps the window, too, but it is no rank."""
    with helpers.Ranks(2, fork_and_hang) as ranks:
        child = Path(f"/proc/{ranks.pids[0]}/task/{ranks.pids[0]}/children")
        helpers.wait_until(lambda: child.read_text().split() and both_joined(ranks.pids[0]), 60)
        forked = int(child.read_text().split()[0])
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
        helpers.wait_until(lambda: all(map(gone, ranks.pids)))
        assert top._mapped(forked)
        assert look(forked)["groups"] == []
        os.kill(forked, signal.SIGKILL)


def both_joined(pid):
    return any(len(group["ranks"]) == 2 for group in look(pid)["groups"])


def rank_at(number, pid, sequence, waits_for=None):
    done = pycomm.RecordedOperation(sequence, "barrier", "barrier()", 0, 1.0, 1.0)
    return pycomm.RankReport(number, pid, False, waits_for, "", (done,))


def test_rows_begin_with_the_ranks_that_hold_others_up():
    ranks = tuple(rank_at(r, 10 + r, 7, 2 if r != 2 else None) for r in range(4))
    rows = list(top._rows(pycomm.Report(3.0, 4, False, ranks), None))
    assert [(row[0], holds_up) for row, holds_up in rows] == [
        ("2", True), ("0", False), ("1", False), ("3", False)
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "rate"), [(5, "1"), (9, "")])
def test_rates(before, rate):
    """None if the operations' numbers have begun anew, in another group."""
    reports = [
        pycomm.Report(t, 1, False, (rank_at(0, 1, n),)) for t, n in ((1.0, before), (3.0, 7))
    ]
    [(row, _)] = top._rows(reports[1], reports[0])
    assert row[4] == rate


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--interval", "nan"], "more than 0 and at most 3600, got nan"),
        (["--interval", "0"], "got 0.0"),
        (["--interval", "inf"], "got inf"),
        ([], "the table needs a terminal"),
    ],
)
def test_refusals(options, words, capsys):
    with pytest.raises(SystemExit) as refused:
        top.main(options)
    assert refused.value.code != 0
    assert words in f"{refused.value} {capsys.readouterr().err}"


def work(rank, size, store, path):
    """Operations in two groups, until a file is there."""
    with helpers.member(rank, size, store) as group, pycomm.init() as other:
        x = torch.ones(50_000)
        while (
            pycomm.all_reduce(torch.tensor([Path(path).exists()]), "min", group=group).item() == 0
        ):
            pycomm.all_reduce(x, group=group)
            pycomm.barrier(group=other)


def record_from_outside(_rank, _size, _store, pid, path, seconds):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        top.main([str(pid), "--trace", path, "--seconds", seconds])
    return said.getvalue().split()


def test_a_trace_from_outside(tmp_path):
    """The trace has each rank's operations in order, without gaps; the job is not prepared."""
    with helpers.Ranks(2, work, str(tmp_path / "over")) as ranks:
        helpers.wait_until(lambda: len(look(ranks.pids[0])["groups"]) == 2, 60)
        arguments = ranks.pids[1], str(tmp_path / "trace.json"), "0.5"
        (files,) = helpers.run_ranks(1, record_from_outside, *arguments)
        (tmp_path / "over").touch()
        assert [outcome.error for outcome in ranks.join()] == [None, None]
    assert files == [str(tmp_path / f"group{n}.trace.json") for n in range(2)]
    kinds = set()
    for file in files:
        trace = json.loads(Path(file).read_text())
        assert trace["distributedInfo"]["world_size"] == 2
        for rank in range(2):
            of_rank = [e for e in trace["traceEvents"] if e["pid"] == rank]
            assert {e["name"] for e in of_rank if e["ph"] == "M"} >= {"process_name"}
            found = [e for e in of_rank if e.get("cat") == "operation"]
            lost = trace["lostOperations"].get(str(rank), 0)
            numbers = [e["args"]["sequence"] for e in found]
            assert len(numbers) > 3
            assert numbers[-1] - numbers[0] + 1 == len(numbers) + lost
            assert sorted(set(numbers)) == numbers
            kinds |= {e["name"] for e in found}
        assert any(e.get("cat") == "wait" for e in trace["traceEvents"])
    assert kinds == {"all_reduce 195 KiB float32", "all_reduce 1 B bool", "barrier"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--trace", "there/is/none.json"], "--trace must name a file in a folder that exists"),
        (["--trace", "/tmp"], "--trace must name a file in a folder that exists"),
        (["--json", "--trace", "x.json"], "without --json, got x.json"),
        (["--trace", "x.json", "--seconds", "0"], "--seconds must be more than 0, got 0.0"),
    ],
)
def test_a_trace_that_cannot_be(words, reason, capsys):
    with pytest.raises(SystemExit):
        top.main(words)
    assert reason in capsys.readouterr().err
