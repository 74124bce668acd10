"""tests/run.py: the second try, the output, and the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "run.py"
TESTS = """
import os, pathlib, pytest

def passes_at_second_try(name):
    mark = pathlib.Path(name)
    if not mark.exists():
        mark.touch()
        raise AssertionError(f"{name} fails at first")

def test_passes():
    pass

def test_is_skipped():
    pytest.skip("needs root")

@pytest.mark.parametrize("number", range(int(os.environ["FLAKY"])))
def test_flaky(number):
    passes_at_second_try(f"flaky {number}")

def test_fails():
    assert "fails" not in os.environ["ALSO"]

def test_dies():
    if "dies" in os.environ["ALSO"]:
        os._exit(1)
"""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    # Other plugins take longer to import than these tests to run.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_ADDOPTS": "-p xdist.plugin",
}


@pytest.fixture
def run(tmp_path):
    """Runs these tests in a folder of their own; returns the exit status and what it printed."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()

    def call(*options, flaky=0, also=""):
        done = subprocess.run(
            [sys.executable, RUN, *options, "-n1", "-p", "no:cacheprovider", "tests"],
            cwd=tmp_path, env={"FLAKY": str(flaky), "ALSO": also, **ENVIRONMENT},
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        return done.returncode, done.stdout

    return call


def test_all_is_well(run):
    status, told = run()
    assert status == 0
    assert "5 of 5 tests" in told
    assert "skipped 1: needs root" in told
    assert "FLAKY" not in told


def test_flaky_tests_are_listed(run):
    status, told = run(flaky=2)
    assert status == 0
    listed = told.split("\nFLAKY ")[1:]
    assert len(listed) == 2
    for number, text in enumerate(listed):
        assert text.startswith(f"tests/test_some.py::test_flaky[{number}]")
        assert f"flaky {number} fails at first" in text


@pytest.mark.slow
def test_a_third_flaky_test_is_too_many(run):
    status, told = run(flaky=3)
    assert status != 0
    assert "more than 2 tests are flaky" in told


@pytest.mark.parametrize("also", ["fails", "dies"])
def test_a_test_that_fails_twice_fails_the_run(run, also):
    status, told = run(also=also)
    assert status != 0
    assert f"FAILED twice: tests/test_some.py::test_{also}" in told


def test_once_gives_no_second_try(run):
    status, told = run("--once", flaky=1)
    assert status != 0
    assert "again" not in told
