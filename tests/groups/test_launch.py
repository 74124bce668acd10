"""pycomm.launch and python -m pycomm.run: results, failures, Ctrl-C, and what remains: nothing."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch

import pycomm
from pycomm import run

NEEDS_CLOUDPICKLE = pytest.mark.skipif(
    importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle"
)


def facts(x):
    group = pycomm.init(timeout=60)
    total = pycomm.all_reduce(x + group.rank)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return group.rank, group.nodes, total, [os.environ.get(name) for name in names]


def test_results_in_rank_order(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = pycomm.launch(facts, torch.ones(2), ranks=3)
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, (own, nodes, total, variables) in enumerate(found):
        assert (own, nodes, total.tolist()) == (rank, ((0, 1, 2),), [6.0, 6.0])
        assert variables == [str(rank), "3", str(rank), "3", threads]
    assert capsys.readouterr().out == ""


@NEEDS_CLOUDPICKLE
def test_closures_on_emulated_nodes(capsys):
    """Functions, and classes of results and errors, that no module has."""

    class Result(list):
        pass

    local = torch.ones(2)

    def body(scale):
        group = pycomm.init(timeout=60)
        print(f"rank {group.rank}\nhas two lines")
        print("warned", file=sys.stderr, end="")
        return Result([len(group.nodes), (pycomm.all_reduce(local) * scale).tolist()])

    found = pycomm.launch(body, 5, ranks=2, nodes=2)
    assert [type(each) for each in found] == [Result, Result]
    assert found == [[2, [10.0, 10.0]]] * 2
    told = capsys.readouterr()
    lines = [f"[{rank}] {text}" for rank in range(2) for text in ("has two lines", f"rank {rank}")]
    assert sorted(told.out.splitlines()) == lines
    assert [line for line in told.err.splitlines() if "warned" in line] in (
        ["[0] warned", "[1] warned"],
        ["[1] warned", "[0] warned"],
    )


def test_paths_that_imports_ignore(monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("/elsewhere"), *sys.path])
    assert pycomm.launch(os.path.basename, "a/b", ranks=1) == ["b"]


class Unusual(Exception):
    """Can be pickled, and not be made from the pickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def fail(how, loser):
    """The loser fails; the others wait for it and fail, too."""
    with pycomm.init(timeout=60) as group:
        if group.rank == loser:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                sys.exit(3)
            raise {"error": KeyError, "unusual": lambda why: Unusual(why, "thing")}[how]("a reason")
        pycomm.barrier()


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("error", KeyError, "'a reason'"),
        ("unusual", TypeError, "Unusual: a reason thing (which cannot be pickled"),
        ("kill", pycomm.PeerDied, "was killed by SIGKILL before its result"),
        ("exit", pycomm.PeerDied, "exited with 3 before its result"),
    ],
)
def test_the_first_failure_is_raised(how, kind, text, capfd):
    """Not those that follow from it; its traceback is told once."""
    with pytest.raises(kind) as caught:
        pycomm.launch(fail, how, 1, ranks=3)
    assert text in str(caught.value)
    if kind is pycomm.PeerDied:
        assert caught.value.rank == 1
    else:
        (note,) = caught.value.__notes__
        assert note.startswith("Raised on rank 1 of 3:\n\nTraceback")
        assert "in fail\n" in note
    assert "Traceback" not in "".join(capfd.readouterr())


def generator():
    return (i for i in range(3))


def test_what_cannot_travel():
    with pytest.raises(TypeError, match=r"the result .which cannot be pickled.*generator"):
        pycomm.launch(generator, ranks=1)
    with pytest.raises(TypeError, match=r"must go to other processes.*cannot pickle"):
        pycomm.launch(print, generator())
    with pytest.raises(TypeError, match=r"function must be callable, got 'train\.py'"):
        pycomm.launch("train.py")
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        pycomm.launch(print, ranks=0)
    with pytest.raises(ValueError, match="nodes must be from 1 to ranks, 2, got 3"):
        pycomm.launch(print, nodes=3)


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setattr(run, "_has_cloudpickle", lambda: False)
    assert pycomm.launch(os.path.basename, "a/b", ranks=1) == ["b"]
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        pycomm.launch(lambda: 1)
    function = type(generator)(generator.__code__, {"__name__": "__main__"})
    with pytest.raises(TypeError, match=r"__main__.*pip install cloudpickle"):
        pycomm.launch(function)


# Tells its ranks' pids and those of their children, and waits for ever.
WAITING = """
import os, subprocess, sys, time
def wait():
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    try:
        time.sleep(1000)
    finally:
        print("cleaned up", flush=True)
"""
CALL = "import pycomm\ntry:\n    pycomm.launch(wait)\nexcept KeyboardInterrupt:\n    sys.exit(9)\n"


def python(*words, **options):
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, bufsize=1, **options
    )


def shared_files():
    return {path.name for path in Path("/dev/shm").iterdir() if "torch" in path.name}


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@NEEDS_CLOUDPICKLE
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("way", ["launch", "run"])
def test_ranks_end_with_their_parent(way, number, tmp_path):
    """Ctrl-C lets them clean up, and what they have started ends, too."""
    script = tmp_path / "script.py"
    script.write_text(WAITING + {"launch": CALL, "run": "wait()"}[way])
    words = [str(script)] if way == "launch" else ["-m", "pycomm.run", str(script)]
    with python(*words, stderr=subprocess.DEVNULL) as process:
        pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
        assert len(pids) == 4
        assert all(map(alive, pids))
        process.send_signal(number)
        rest = process.stdout.read() if number == signal.SIGINT else ""
        code = process.wait(helpers.LIMIT)
    by_hand = (way, number) in {("launch", signal.SIGTERM)} or number == signal.SIGKILL
    ranks = pids[::2] if by_hand else pids  # a parent that dies at once cannot end grandchildren
    helpers.wait_until(lambda: not any(map(alive, ranks)))
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)
    assert rest.count("cleaned up") == 2 * (number == signal.SIGINT)
    if number == signal.SIGINT:
        assert code == (9 if way == "launch" else 130)
    else:
        assert code == (-number if by_hand else 143)


SCRIPT = """
import os, signal, sys, torch, pycomm
with pycomm.init(timeout=60) as group:
    total = pycomm.all_reduce(torch.ones(1)).item()
    print(*sys.argv[1:], __name__, len(group.nodes), total, os.environ["GROUP_RANK"])
    pycomm.barrier()
if "fail" in sys.argv:
    os._exit(5) if group.rank else signal.pause()
"""


@pytest.mark.slow
def test_scripts_and_modules(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    for words, expected in [
        (["program.py", "--ranks", "2", "--nodes=2", "x", "--ranks"], "x --ranks __main__ 2 2.0"),
        (
            ["--ranks=3", "--nodes", "2", "-m", "program", "--nodes", "y"],
            "--nodes y __main__ 2 3.0",
        ),
    ]:
        with python("-m", "pycomm.run", *words, cwd=tmp_path, env=importing(tmp_path)) as process:
            told = process.communicate(timeout=helpers.LIMIT)[0]
        assert process.returncode == 0
        ranks = 3 if "3" in words[0] else 2
        lines = [f"[{r}] {expected} {r * 2 // ranks}" for r in range(ranks)]
        assert sorted(told.splitlines()) == lines


def importing(folder):
    paths = [str(folder), str(Path(pycomm.__file__).parents[1])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_the_status_is_that_of_the_first_failure(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    command = ["-m", "pycomm.run", "program.py", "fail"]
    with python(*command, cwd=tmp_path, env=importing(tmp_path), stderr=subprocess.PIPE) as process:
        told = process.communicate(timeout=helpers.LIMIT)[1]
    assert process.returncode == 5
    assert "pycomm.run: rank 1 exited with 5; the others are ended" in told


def test_a_reader_that_leaves_ends_the_run(tmp_path):
    """Quietly."""
    script = tmp_path / "script.py"
    script.write_text("import os\nwhile True:\n    print(os.getpid())\n")
    with python("-m", "pycomm.run", str(script), stderr=subprocess.PIPE) as process:
        pid = int(process.stdout.readline().split()[1])
        process.stdout.close()
        assert process.wait(helpers.LIMIT) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
    assert not alive(pid)


@pytest.mark.parametrize(
    "words", [[], ["-m"], ["--ranks"], ["--ranks", "0", "x"], ["--other", "x"]]
)
def test_bad_command_lines(words, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert "usage: python -m pycomm.run" in capsys.readouterr().err


def test_cores_of_numa_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1, 24)))
    assert run._cores_by_numa_node(tmp_path) == [list(range(1, 24))]
    lists = {0: "0-3,12-15", 1: "", 2: "4-7", 10: "8", 11: "40-50"}
    for node, cores in lists.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    found = [[1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7], [8]]
    assert run._cores_by_numa_node(tmp_path) == found
    monkeypatch.setattr(run, "_cores_by_numa_node", lambda: found)
    assert [run._cores_of(r, 4) for r in range(4)] == [
        (found[0], 2), (found[0], 2), (found[1], 1), (found[2], 1)
    ]  # fmt: skip
    assert [run._cores_of(r, 2)[0] for r in range(2)] == [found[0], found[1]]
