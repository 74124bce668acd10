"""Runs the Python tests: ``python tests/run.py [--once] [pytest's arguments]``.

Says ten times how far the tests are. A test that fails runs once more, alone, when the others have
ended. If it passes then, it is listed as FLAKY with its first output. A test that fails twice, or a
third flaky one, fails the run. ``--once`` gives no second try.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

MOST_FLAKY = 2
STAGES = 10  # progress is told so many times


class Recorder:
    """Counts the tests that have ended, and keeps the output of those that failed."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}  # first outputs, by the test's id
        self.skipped: Counter[str] = Counter()  # by reason
        self._began = time.monotonic()
        self._total = self._ended = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._total = len(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """No letter per test."""
        counts = report.when == "call" or not report.passed
        return (report.outcome if counts else "", "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.setdefault(report.nodeid, report.longreprtext)
            print(f"FAILED {report.nodeid}", flush=True)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            self._ended += 1
            if self._ended * STAGES // self._total > (self._ended - 1) * STAGES // self._total:
                seconds = time.monotonic() - self._began
                print(f"{self._ended:6,} of {self._total:,} tests, {seconds:4.0f} s", flush=True)


def try_again(tests: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Runs tests once more, each alone, until the outcome of the whole run is certain.

    Returns:
        The tests that passed, and those that failed again.
    """
    flaky: list[str] = []
    for test in tests:
        print(f"\nagain, alone: {test}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *options, "-n0", test]
        if subprocess.run(command, check=False).returncode != 0:
            return flaky, [test]
        flaky.append(test)
        if len(flaky) > MOST_FLAKY:
            break
    return flaky, []


def main(arguments: list[str]) -> int:
    """Runs the tests; the exit status says whether all is well."""
    once = "--once" in arguments
    arguments = [argument for argument in arguments if argument != "--once"]
    recorder = Recorder()
    quiet = ["-q", "-rN", "--disable-warnings", "-o", "console_output_style=classic"]
    status = int(pytest.main([*quiet, *arguments], plugins=[recorder]))
    for reason, count in sorted(recorder.skipped.items()):
        print(f"skipped {count}: {reason}")
    if status != pytest.ExitCode.TESTS_FAILED or once or not recorder.failures:
        return status
    options = [argument for argument in arguments if not argument.startswith("tests")]
    flaky, failed = try_again(list(recorder.failures), options)
    for test in flaky:
        print(f"\nFLAKY {test}: failed, and passed alone. What it said first:")
        print(recorder.failures[test])
    for test in failed:
        print(f"\nFAILED twice: {test}")
    if len(flaky) > MOST_FLAKY:
        print(f"more than {MOST_FLAKY} tests are flaky")
    return int(bool(failed) or len(flaky) > MOST_FLAKY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
