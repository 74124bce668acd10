"""benchmarks/gpu.sh and benchmarks/parts.sh with programs that pretend."""

import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import helpers
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu.sh"
PARTS = ROOT / "benchmarks/parts.sh"
OBEY = "trap 'echo >${0%/*}/told; exit' INT"


def summary(out):
    return [line.split(",")[0] for line in (out / "summary.txt").read_text().splitlines()]


@pytest.fixture
def tools(tmp_path):
    """Writes programs into a folder; returns it and an environment that has no others."""
    folder = tmp_path / "tools"
    folder.mkdir()

    def write(**programs):
        for name, body in programs.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(stat.S_IRWXU)
        return {"PATH": f"{folder}:/usr/bin:/bin", "PYTHON": "python"}

    return write


PROBE = "for path; do :; done; printf '#!/bin/sh\necho probed' >$path; chmod +x $path"
PARTS_OF = {
    "kernels": ["tests", "benchmarks", "baseline", "probe", "profile"],
    "communication": [
        "small", "loopback", "host", "separate", "inductor", "captured", "processes",
    ],
    "tables": [
        "benchmarks", "sweep", "sanitizer-memcheck", "sanitizer-synccheck", "sanitizer-initcheck",
        "sanitizer-racecheck", "modes-blocking", "modes-eager", "modes-expandable",
    ],
}  # fmt: skip
FAIL = {"kernels": "tests", "communication": "separate", "tables": "sanitizer-racecheck"}


def run_script(what, out, environment):
    return subprocess.run(
        [SCRIPT, what, out], env=environment, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("what", PARTS_OF)
def test_all_parts_run_whatever_becomes_of_those_before(tmp_path, tools, what):
    fails = '*"-m pytest"*" tests"|*test_gpu_separate.py*'
    environment = tools(
        python=f'echo "python $*"; case "$*" in {fails}) exit 1;; esac',
        compute_sanitizer='echo "$*"; test "$2" != racecheck',
        ncu='echo "$*"',
        nvcc=PROBE,
        nvidia_smi='echo "clocks"; exec sleep 100',
    ) | {"BASELINE": "another"}
    out = tmp_path / "out"
    assert run_script(what, out, environment).returncode == 1
    assert summary(out) == ["build: passed"] + [
        f"{part}: {'failed (1)' if part == FAIL[what] else 'passed'}" for part in PARTS_OF[what]
    ]
    logs = {part.partition("-")[0] for part in ["build", *PARTS_OF[what]]}
    files = {"clocks.csv", "summary.txt", *(f"{name}.log" for name in logs)}
    assert {path.name for path in out.iterdir()} == files | ({"probe"} & logs)
    if what == "kernels":
        assert f"-m pycomm.bench gpu -J {out}/gpu.json" in (out / "benchmarks.log").read_text()
        assert f"kernels {out}/gpu.json" in (out / "profile.log").read_text()
        assert (out / "probe.log").read_text() == "== probe\nprobed\n"
    tools(python="", compute_sanitizer="")
    assert run_script(what, out, environment).returncode == 0


def test_what_is_missing_is_told(tmp_path, tools):
    environment = tools(python="", nvidia_smi="")
    assert run_script("kernels", tmp_path / "out", environment).returncode == 0
    assert {line for line in summary(tmp_path / "out") if "passed" not in line} == {
        "baseline: absent",
        "probe: absent",
        "profile: absent",
    }
    assert run_script("everything", tmp_path / "none", environment).returncode == 2
    assert not (tmp_path / "none").exists()


def test_limits_add_up():
    """The limits of a call add up to 8 minutes, including the time to stop the last part."""
    script = SCRIPT.read_text()
    ((build,),) = [re.findall(r"^part build (\d+)", script, re.MULTILINE)]
    bodies = dict(re.findall(r"^(\w+)\(\) \{[^\n]*\n(.*?)^\}", script, re.MULTILINE | re.DOTALL))
    seconds = {name: [int(n) for n in re.findall(r"\bpart \S+ (\d+)", body)]
               for name, body in bodies.items()}  # fmt: skip
    for what, parts in PARTS_OF.items():
        repeated = {"mode": "modes-", "sanitize": "sanitizer-"}
        total = int(build) + sum(seconds[what])
        for name, begin in repeated.items():
            total += seconds[name][0] * sum(part.startswith(begin) for part in parts)
        assert 400 < total <= 470, (what, total)


def test_the_tests_of_modes_exist():
    script = SCRIPT.read_text()
    for folder, names in re.findall(r"(tests/gpu/test_gpu_)\{(\S+)\}\.py", script):
        assert all((ROOT / f"{folder}{name}.py").exists() for name in names.split(","))
    file, names = re.search(r"(tests/gpu/\S+\.py)::test_\{(\S+)\}", script).groups()
    text = (ROOT / file).read_text()
    for name in names.split(","):
        assert f"def test_{name}(" in text


def run_parts(tmp_path, *lines):
    """Runs parts; returns the shell."""
    script = "\n".join([f"out={tmp_path}", f"source {PARTS}", "grace=1", *lines])
    return subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it has ended before, or just now
        return True


def pid_in(path):
    helpers.wait_until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def child(tmp_path, *lines):
    """A command that starts a process which ignores SIGINT, and writes its number to a file."""
    program = tmp_path / "child"
    start = f"(trap '' INT; exec sleep 300) &\necho $! >{tmp_path}/pid"
    program.write_text("\n".join([start, *lines]))
    return f"bash {program}"


@pytest.mark.parametrize(
    ("limit", "lines", "end"),
    [
        (60, ["exit 0"], "passed"),  # before its child
        (1, [OBEY, "wait"], "stopped after 1 s"),  # it obeys, its child does not
        (1, ["trap '' INT", "wait"], "stopped after 1 s"),
    ],
    ids=["ends", "obeys", "ignores"],
)
def test_no_process_outlives_its_part(tmp_path, limit, lines, end):
    shell = run_parts(tmp_path, f"part parent {limit} {child(tmp_path, *lines)}", "read")
    pid = pid_in(tmp_path / "pid")
    helpers.wait_until(lambda: ended(pid))
    shell.communicate(b"\n")
    assert summary(tmp_path) == [f"parent: {end}"]
    assert (tmp_path / "told").exists() == (OBEY in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_stopped_stops_its_part(tmp_path, number):
    shell = run_parts(tmp_path, f"part long 60 {child(tmp_path, 'wait')}", "part never 60 true")
    pid = pid_in(tmp_path / "pid")
    os.kill(shell.pid, number)
    assert shell.wait(30) == 130
    assert not (tmp_path / "summary.txt").exists()
    helpers.wait_until(lambda: ended(pid))


def test_a_script_that_is_stopped_as_a_part_begins_stops_it(tmp_path):
    stop = "until [[ -s $out/pid ]]; do sleep 0.01; done; kill -TERM $$"
    begins = f"trap '[[ $BASH_COMMAND != group=* ]] || {{ {stop}; }}' DEBUG"
    shell = run_parts(tmp_path, "set -T", begins, f"part long 60 {child(tmp_path, 'wait')}")
    pid = pid_in(tmp_path / "pid")
    assert shell.wait(30) == 130
    helpers.wait_until(lambda: ended(pid))


def test_time_that_is_left_passes_on(tmp_path):
    """Time that stopping a part takes is subtracted from the next part."""
    shell = run_parts(
        tmp_path,
        "part first 50 true",
        "part second 2 bash -c 'exit 3'",
        "echo $spare >$out/spare",
        "spare=0",
        # Long enough to set its trap on a busy machine. The signal may come twice: timeout sends it
        # to the process and to its group.
        f"part third 4 {child(tmp_path, 'trap : INT', 'wait', 'wait', 'wait')}",
        "echo $spare $failed >>$out/spare",
    )
    assert shell.wait(60) == 0
    assert summary(tmp_path) == ["first: passed", "second: failed (3)", "third: stopped after 4 s"]
    first, second = (tmp_path / "spare").read_text().splitlines()
    assert 50 <= int(first) <= 52
    assert second.split()[0] in ("-1", "-2")
    assert second.split()[1] == "1"
