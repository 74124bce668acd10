"""The command line of the benchmark: refusals, tables, and runs that are cut short."""

import json
import os
import signal
import subprocess
import sys

import pytest

from pycomm.bench import cli, launch
from pycomm.bench.gpu import session
from pycomm.bench.report import TimedRow

LINE = 80


def refusal(argv, capsys):
    """What the command says instead of running."""
    with pytest.raises(SystemExit) as ended:
        cli.parse(argv.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-J", "--plot"])
def test_files_are_checked_before_the_run(flag, tmp_path, capsys):
    there_not = tmp_path / "none" / "file.png"
    assert f"there is no folder {there_not.parent}" in refusal(f"step {flag} {there_not}", capsys)
    assert "that can be written" in refusal(f"step -J {tmp_path}", capsys)
    good = tmp_path / "file.png"
    assert cli.parse(["step", flag, str(good)]).benchmark == "step"
    assert not good.exists()


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch, capsys):
    """The system says which; this user may be root, who may write everywhere."""
    asked = []
    monkeypatch.setattr(os, "access", lambda place, mode: asked.append((place, mode)))
    assert "that can be written" in refusal(f"step -J {tmp_path}/results.json", capsys)
    assert asked == [(tmp_path, os.W_OK)]


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    find = launch.importlib.util.find_spec
    monkeypatch.setattr(
        launch.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    with pytest.raises(SystemExit, match="needs matplotlib: pip install matplotlib"):
        cli.parse(["step", "--plot", str(tmp_path / "file.png")])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("all_reduce -b 64 -e 8", "--minbytes must not exceed --maxbytes"),
        ("all_reduce --shard", "unrecognized arguments: --shard"),
        ("step --device tpu", "(choose from"),
        ("step --mode fsdp", "expected some of ddp, wrapper, got 'fsdp'"),
        ("overlap -p 1M,2M", "--parameters must be one number"),
    ],
)
def test_an_error_shows_the_usage_of_its_command(argv, reason, capsys):
    said = refusal(argv, capsys)
    assert said.startswith(f"usage: python -m pycomm.bench {argv.split()[0]} ")
    assert reason in said.splitlines()[-1]


def test_an_unknown_command_names_the_others(capsys):
    said = refusal("all_reduces", capsys)
    assert all(repr(name) in said for name in cli.BENCHMARKS if name != "shard")


ROWS = TimedRow.__subclasses__()


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.__name__)
def test_tables_fit_a_terminal(kind):
    assert session.KernelRow in ROWS
    narrow = [column for column in kind.columns if not column.wide]
    assert sum(abs(column.width) + 1 for column in narrow) - 1 <= LINE
    assert all(len(line) <= LINE for line in kind.header(wide=False).splitlines())
    assert set(kind.header(wide=False).split()) < set(kind.header(wide=True).split())
    for column in kind.columns:
        assert len(column.title) <= abs(column.width)
        assert len(column.unit) <= abs(column.width)


def test_wide_tables_have_every_column(capsys):
    what = "optimizer --scheme bf16_remainder_bf16 --peer torch -b 4K -e 4K -n 2"
    for more in ("", " --wide"):
        cli.main((what + more).split())
        table = [line for line in capsys.readouterr().out.splitlines() if line[:2] != "# "]
        rows = [line.split() for line in table if "adamw" in line]
        assert rows[0][-5 if more else -1] == "1.000"  # the ratio, before the percentiles
        assert all(len(line) <= LINE for line in table) is not bool(more)
        assert {len(row) for row in rows} == {14 if more else 7}


class Run:
    """``python -m pycomm.bench`` in a session of its own, whose errors go to a file."""

    def __init__(self, argv, folder):
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pycomm.bench", *argv.split()],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdout.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def rows(self, most):
        """The first rows of the table."""
        found = []
        while len(found) < most and (line := self.process.stdout.readline()):
            found += [line.split()] if line[:1] == " " else []
        return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all_reduce -b 8 -e 1G --ranks 2", "codec -b 36K -e 8G"])
def test_ctrl_c_keeps_what_was_measured(what, tmp_path):
    """Ctrl-C reaches the ranks, too."""
    path = tmp_path / "results.json"
    with Run(f"{what} -n 20 -J {path}", tmp_path) as run:
        shown = run.rows(4)
        os.killpg(run.process.pid, signal.SIGINT)
        shown += run.rows(10**6)
        assert run.process.wait(30) == 130
    stored = json.loads(path.read_text())
    assert stored["meta"]["complete"] is False
    assert abs(len(stored["rows"]) - len(shown)) <= 1  # a row that was on its way
    assert [row["bytes"] for row in stored["rows"]][:4] == sorted(
        row["bytes"] for row in stored["rows"]
    )[:4]
    assert run.errors.read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all_reduce -b 8 -e 1G --ranks 2", "codec -b 36K -e 8G"])
def test_a_reader_that_leaves_ends_the_run(what, tmp_path):
    with Run(f"{what} -n 20", tmp_path) as run:
        assert run.process.stdout.readline().startswith("# ")
        run.process.stdout.close()
        assert run.process.wait(60) == 128 + signal.SIGPIPE
    assert run.errors.read_text() == ""


def test_a_run_that_ends_is_complete(tmp_path):
    path = tmp_path / "results.json"
    cli.main(["codec", "-b", "36K", "-e", "36K", "-n", "2", "-J", str(path)])
    assert json.loads(path.read_text())["meta"]["complete"] is True
    assert list(tmp_path.iterdir()) == [path]
