"""The notebooks run from the first cell to the last, and print what they claim."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
NUMBER = r"([\d.]+)"
# As a kernel does: each cell alone, in a module __main__ that has no file.
KERNEL = """
import json, sys
sys.modules["__main__"].__dict__.pop("__file__", None)
for cell in json.loads(sys.stdin.read()):
    exec(compile(cell, "<cell>", "exec"), sys.modules["__main__"].__dict__)
"""


def printed(name, folder):
    """What the cells of a notebook print."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)  # none is stored
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL],
        input=json.dumps(["".join(cell["source"]) for cell in code]),
        cwd=folder, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_ddp_int8(tmp_path):
    told = re.search(
        f"loss {NUMBER} in fp32, {NUMBER} in int8, {NUMBER} times", printed("ddp_int8", tmp_path)
    )
    exact, coded, ratio = map(float, told.groups())
    assert coded == pytest.approx(exact, rel=0.05)
    assert 3.5 < ratio < 4


@pytest.mark.slow
def test_sharded_adamw(tmp_path):
    told = printed("sharded_adamw", tmp_path)
    assert re.findall(r"^shard=(.*)$", told, re.MULTILINE) == ["None", "'optimizer'", "'gradients'"]
    formulas = re.findall(rf"^formula .* = {NUMBER} bytes per parameter", told, re.MULTILINE)
    assert [float(each) for each in formulas] == pytest.approx([5.016, 3.516], rel=0.01)


@pytest.mark.slow
def test_codec(tmp_path):
    told = printed("codec", tmp_path)
    assert "3.94 times fewer bytes" in told
    assert re.search(r"lost: 0\.0000\d\d\n", told)
