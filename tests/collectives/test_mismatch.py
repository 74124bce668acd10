"""If ranks disagree, every rank raises Mismatch with both calls, and the group is unusable."""

import os
import re
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch

import pycomm
from pycomm._inputs import operation_of
from pycomm._runtime import log as runtime_log

# The call of most ranks, the call of one rank, and the parts of both that messages must have.
DISAGREEMENTS = {
    "count": ("sum(8)", "sum(9)", "8 elements", "9 elements"),
    "dtype": ("sum(8)", "sum(8, torch.float16)", "float32", "float16"),
    "op": ("sum(8)", "all_reduce(8, 'max')", "op=sum", "op=max"),
    "algorithm": ("ring(8)", "tree(8)", "algorithm=ring", "algorithm=tree"),
    "auto and ring": ("sum(8)", "ring(8)", "algorithm=one_shot", "algorithm=ring"),
    "src": ("broadcast(8, 0)", "broadcast(8, 1)", "src=0", "src=1"),
    "operation": ("sum(8)", "broadcast(8, 0)", "all_reduce(", "broadcast("),
    "barrier": ("sum(8)", "barrier()", "all_reduce(", "barrier("),
    "blocks": ("gather(8)", "gather(4)", "8 elements", "4 elements"),
    "scattered op": ("scatter(8, 'min')", "scatter(8, 'sum')", "op=min", "op=sum"),
    "gather and scatter": ("gather(8)", "scatter(8, 'sum')", "all_gather(", "reduce_scatter("),
    "shape": ("shaped(2, 3)", "shaped(3, 2)", "shape=(2, 3)", "shape=(3, 2)"),
    "dimensions": ("shaped(2, 3)", "sum(6)", "shape=(2, 3)", "6 elements"),
    "many dimensions": ("shaped(1, 2, 1, 3, 2)", "shaped(1, 2, 1, 2, 3, 1)", "(1, 2", "(1, 2"),
    "scattered shape": ("scatter(8, 'sum')", "scatter((2, 4), 'sum')", "_scatter(", "(2, 4)"),
    "gathered shape": ("gather((4, 2))", "gather(8)", "(4, 2)", "all_gather("),
    "broadcast shape": ("broadcast((2, 4), 0)", "broadcast(8, 0)", "(2, 4)", "broadcast("),
    "tag": ("tagged('weights')", "tagged('biases')", "tag='weights'", "tag='biases'"),
    "a tag and none": ("tagged(7)", "sum(8)", "tag=7", "op=sum"),
    "a number and a name": ("tagged(7)", "tagged('7')", "tag=7", "tag='7'"),
    "long tags": ("tagged('x' * 200 + 'y')", "tagged('x' * 200 + 'z')", "tag='xxx", "tag='xxx"),
    "tag of a barrier": ("barrier(7)", "barrier(8)", "barrier(tag=7)", "barrier(tag=8)"),
    "seed": ("stochastic(1, 2)", "stochastic(3, 2)", "seed=1", "seed=3"),
    "step": ("stochastic(1, 2)", "stochastic(1, 4)", "step=2", "step=4"),
    "momentum": ("momentum(0.5)", "momentum(0.9)", "momentum=0.5", "momentum=0.9"),
    "scale": ("scaled(2.0)", "scaled(1024.0)", "scale=2", "scale=1024"),
    "large count": ("two_shot(700_001)", "two_shot(700_000)", "700001", "700000"),
}


def calls(group, in_window):
    """The vocabulary of the table above."""

    def tensor(shape, dtype=torch.float32):
        shape = shape if isinstance(shape, tuple) else (shape,)
        empty = group.empty if in_window else torch.empty
        return empty(*shape, dtype=dtype).fill_(1)

    def all_reduce(n, op="sum", dtype=torch.float32, algorithm="auto"):
        pycomm.all_reduce(tensor(n, dtype), op, algorithm=algorithm, group=group)

    def compressed(compression, **options):
        pycomm.compressed_all_reduce(tensor(1000), compression, group=group, **options)

    def scaled(scale):
        """As the hooks do it, with a GradScaler."""
        x, residual, factor = tensor(1000), torch.zeros(1000), torch.tensor(scale)
        codec = pycomm.Int8().codec(1000, x.dtype)
        call = pycomm._C.Call(
            operation_of("all_reduce", "auto", x.dtype, "avg"), 1000, x.data_ptr(), x.data_ptr(),
            codec, residual.data_ptr(), 0, 0.0, 0, 0, 0, scale=factor.data_ptr(),
        )  # fmt: skip
        group._core.run_call(call)

    return {
        "torch": torch,
        "all_reduce": all_reduce,
        "sum": lambda n, dtype=torch.float32: all_reduce(n, "sum", dtype),
        "ring": lambda n: all_reduce(n, algorithm="ring"),
        "tree": lambda n: all_reduce(n, algorithm="tree"),
        "two_shot": lambda n: all_reduce(n, algorithm="two_shot"),
        "broadcast": lambda n, src: pycomm.broadcast(tensor(n), src, group=group),
        "barrier": lambda tag=None: pycomm.barrier(group=group, tag=tag),
        "gather": lambda n: pycomm.all_gather(
            tensor(tensor(n).numel() * group.size), tensor(n), group=group
        ),
        "scatter": lambda n, op: pycomm.reduce_scatter(
            tensor(n), tensor(tensor(n).numel() * group.size), op, group=group
        ),
        "shaped": lambda *shape: all_reduce(shape),
        "tagged": lambda tag: pycomm.all_reduce(tensor(8), group=group, tag=tag),
        "stochastic": lambda seed, step: compressed(
            pycomm.Int8(rounding="stochastic", seed=seed), step=step
        ),
        "momentum": lambda momentum: compressed(
            pycomm.TopK(0.01, momentum=momentum),
            residual=torch.zeros(1000),
            velocity=torch.zeros(1000),
        ),
        "scaled": scaled,
    }


def disagree(group, usual, odd, odd_rank, in_window):
    """A good operation, a bad one, and one more; the errors of the last two."""
    known = calls(group, in_window)
    known["sum"](8)
    error = None
    try:
        eval(odd if group.rank == odd_rank else usual, known)
    except pycomm.CollectiveError as caught:
        error = caught
    try:
        known["barrier"]()
    except pycomm.GroupUnusable as refused:
        return error, str(refused)
    return error, "still usable"


def check(errors, name, odd_rank):
    _, _, usual_words, odd_words = DISAGREEMENTS[name]
    for error, refusal in errors:
        assert type(error) is pycomm.Mismatch, error
        message = str(error)
        assert usual_words in message, message
        assert odd_words in message, message
        assert f"rank {odd_rank}" in message, message
        assert error.sequence == 2
        assert message in refusal
    assert len({(str(error), error.rank, error.pid) for error, _ in errors}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_threads(world, name, size):
    usual, odd, *_ = DISAGREEMENTS[name]
    for in_window in (False, True):
        for odd_rank in range(size):
            local_world = world(size, timeout=20)
            check(local_world.run(disagree, usual, odd, odd_rank, in_window), name, odd_rank)


def disagree_on_everything(rank, size, store, names):
    """A group per disagreement, on one process group: each error leaves room for the next group."""
    helpers.join_world(rank, size, store)
    errors = []
    for name in names:
        with pycomm.init(timeout=20) as group:
            usual, odd, *_ = DISAGREEMENTS[name]
            errors.append(disagree(group, usual, odd, size - 1, False))
    return errors


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes(size):
    by_rank = helpers.run_ranks(size, disagree_on_everything, list(DISAGREEMENTS))
    for name, errors in zip(DISAGREEMENTS, zip(*by_rank, strict=True), strict=True):
        check(errors, name, size - 1)
        assert len({error.pid for error, _ in errors}) == 1


def test_asynchronous_work_raises_it_when_waited_for(world):
    def body(group):
        good = pycomm.all_reduce(torch.ones(4), group=group, async_op=True)
        bad = pycomm.all_reduce(torch.ones(4 + group.rank), group=group, async_op=True)
        # It is refused at once, or fails like the others: the rank may not know of the failure yet.
        with pytest.raises((pycomm.GroupUnusable, pycomm.Mismatch), match="5 elements"):
            pycomm.all_reduce(torch.ones(4), group=group, async_op=True).wait()
        good.wait()
        with pytest.raises(pycomm.Mismatch, match=r"4 elements.*5 elements"):
            bad.wait()

    world(2).run(body)


def swapped(group, tags):
    """Two all-reduces of one size, in another order on rank 1."""
    order = tags if group.rank == 0 else tags[::-1]
    for tag in order:
        pycomm.all_reduce(torch.ones(100), group=group, async_op=True, tag=tag).wait()


def mismatch_of_swapped(group, tags):
    with pytest.raises(pycomm.Mismatch) as error:
        swapped(group, tags)
    return str(error.value)


@pytest.mark.parametrize("nodes", [None, [1, 1]])
def test_a_tag_finds_calls_in_another_order(world, nodes):
    local_world = world(2, nodes=nodes)
    local_world.run(swapped, [None, None])
    local_world.run(swapped, ["weights", "weights"])
    errors = local_world.run(mismatch_of_swapped, ["weights", "biases"])
    # Between nodes, the other rank's abort may come before its call.
    assert any(re.search(r"rank 0 called .*, rank 1 called ", error) for error in errors), errors


def test_tags_are_numbers_or_names(world):
    group = world(1).groups[0]
    for tag in (1.0, b"name", True, object()):
        with pytest.raises(TypeError, match="tag must be an int or a str, got "):
            pycomm.all_reduce(torch.ones(1), group=group, tag=tag)


def harmless(group):
    """Calls with arguments that may differ between ranks, as they do not change the result."""
    x = torch.ones(6)
    pycomm.all_reduce(x, group=group, out=torch.empty(6) if group.rank else None, tag="a")
    first = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for compression in (pycomm.Int8(seed=group.rank), pycomm.Cast(), pycomm.TopK(0.01)):
        pycomm.compressed_all_reduce(first, compression, step=group.rank, group=group)
    return x.sum().item() if group.rank == 0 else 12.0


def test_what_may_differ(world):
    assert world(2).run(harmless) == [12.0, 12.0]


SITES = """
import torch, pycomm

def one(group): pycomm.all_reduce(torch.ones(4), group=group)
def same(group): pycomm.compressed_all_reduce(torch.ones(4), pycomm.Cast(), group=group); one(group)
def other(group):
    one(group) if group.rank == 0 else pycomm.all_reduce(torch.ones(4), group=group)

def wrong(group):
    if group.rank == 0: one(group)
    else: pycomm.barrier(group=group, tag="late")

with pycomm.LocalWorld(2) as world:
    world.run(same)
    world.run(other)
    print("no difference")
    try:
        world.run(wrong)
    except pycomm.Mismatch as error:
        print(error)
"""


@pytest.mark.parametrize("log", ["debug", "info"])
def test_where_calls_come_from(tmp_path, log):
    """The error has the lines of calls that differ; different lines alone are no mismatch."""
    script = tmp_path / "script.py"
    script.write_text(SITES)
    said = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYCOMM_LOG": log},
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    first, told = said.splitlines()
    assert first == "no difference"
    if log == "debug":
        name = f"{tmp_path.name}/script.py"
        assert f"algorithm=one_shot, called at {name}:4), rank 1 called barrier(" in told
        assert f"tag='late', called at {name}:11)" in told
    else:
        assert "called at" not in told


def call_with_log(group):
    """As if only rank 1 had PYCOMM_LOG=debug."""
    runtime_log.DEBUG = group.rank == 1
    pycomm.barrier(group=group, tag=7)
    return pycomm.broadcast(torch.full((3,), float(group.rank)), 0, group=group).tolist()


def test_a_log_on_one_rank_only():
    assert helpers.run_group(2, call_with_log, timeout=30) == [[0.0] * 3] * 2


@pytest.mark.parametrize("folder", ["", "_training", "optim"])
def test_calls_of_pycomm_itself_have_no_line(monkeypatch, folder):
    """They may come from several places; a caller's own call has one."""
    monkeypatch.setattr(runtime_log, "DEBUG", True)
    inside = Path(pycomm.__file__).parent / folder / "some.py"
    functions = {}
    exec(compile("def call(entry):\n    return entry()", str(inside), "exec"), functions)
    assert functions["call"](lambda: runtime_log.label_of(None)) == ""
    assert "test_mismatch.py:" in (lambda: runtime_log.label_of(None))()
