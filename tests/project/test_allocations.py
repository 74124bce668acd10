"""Tensors of the package have the dtype and device that the code names, not torch's defaults."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The constructors of torch that follow the default dtype or the default device.
CONSTRUCTORS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "zeros",
}
# Programs of their own, which set no defaults.
PROGRAMS = ("bench", "advise", "check")


def nameless(source: str) -> list[str]:
    """The calls of constructors in a source that leave dtype or device to torch."""
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in CONSTRUCTORS
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize("call", ["torch.empty(3)", "torch.tensor([1], dtype=torch.int64)"])
def test_calls_that_follow_defaults_are_found(call):
    assert nameless(f"x = {call}") == [f"line 1: {call}"]


def test_constructors_name_dtype_and_device():
    files = [
        path
        for path in (ROOT / "pycomm").rglob("*.py")
        if path.relative_to(ROOT / "pycomm").parts[0] not in PROGRAMS
    ]
    assert len(files) > 50
    found = {str(path.relative_to(ROOT)): nameless(path.read_text()) for path in files}
    assert not {path: calls for path, calls in found.items() if calls}
