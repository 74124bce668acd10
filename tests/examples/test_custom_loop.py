"""The example of a loop of one's own: it learns, and libraries of arrays do not matter."""

import subprocess
import sys
from pathlib import Path

import pytest

import pycomm

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_the_loop_learns_in_8_bits_as_in_full(arrays):
    from custom_loop import train

    with pycomm.LocalWorld(2) as world:
        in_full = world.run(train, arrays, 150, 150, 2)[0]
        in_8_bits = world.run(train, arrays, 150, 20, 2)[0]
    assert in_8_bits[:20] == in_full[:20]
    assert in_8_bits[20:] != in_full[20:]
    assert in_8_bits[-1] < 0.6 * in_full[0]
    assert abs(in_8_bits[-1] - in_full[-1]) < 0.1 * in_full[-1]


def test_different_weights_are_noticed(world):
    import torch
    from custom_loop import check_weights

    def body(group):
        check_weights(torch, torch.ones(3), group)
        with pytest.raises(RuntimeError, match="the ranks' weights differ"):
            check_weights(torch, torch.full((3,), float(group.rank)), group)

    world(2).run(body)


def test_the_command_line():
    command = [
        sys.executable,
        str(EXAMPLES / "custom_loop.py"),
        "--arrays",
        "numpy",
        "--steps",
        "5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["step", str(number)] for number in range(1, 6)
    ]
