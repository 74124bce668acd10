"""The short way of all_reduce, a function in C: it does what the way in Python does."""

import copy
import gc
import inspect
import itertools
import pickle
import pydoc
import subprocess
import sys
import threading
import time
import weakref

import helpers
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import _C
from pycomm.collectives import all_reduce

OPS = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: (a + b) / 2,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": lambda a, b: a * b,
}
TORCHS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "prod",
}
GIVEN = {**{name: name for name in OPS}, **TORCHS}
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring", "tree")
REORDERING = ("ring", "tree")
MISSING = object()


def own(rank):
    """Small integers, whose results are exact."""
    return torch.arange(1.0, 7.0).view(2, 3) + 2 * rank


def called(function, *positional, **named):
    """What a call returns, or its error."""
    try:
        return "returned", function(*positional, **named)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("op", GIVEN, ids=str)
def test_every_accepted_combination(world, op):
    """Results are those of torch's own arithmetic."""
    expected = OPS[GIVEN[op]](own(0), own(1))

    def body(group):
        choices = itertools.product(
            (MISSING, *ALGORITHMS),
            (MISSING, False, True, 0, 1),
            (MISSING, False, 0),
            (MISSING, None),
            (MISSING, None, 7, "name"),
            (False, True),
        )
        for algorithm, deterministic, asynchronous, out, tag, by_position in choices:
            named = {
                "algorithm": algorithm,
                "deterministic": deterministic,
                "async_op": asynchronous,
                "out": out,
                "tag": tag,
            }
            named = {name: value for name, value in named.items() if value is not MISSING}
            if deterministic in (True, 1) and algorithm in REORDERING:
                continue
            tensor = own(group.rank)
            version = tensor._version
            if by_position:
                result = pycomm.all_reduce(tensor, op, group=group, **named)
            else:
                result = pycomm.all_reduce(tensor=tensor, op=op, group=group, **named)
            assert result is tensor
            assert torch.equal(tensor, expected), (named, by_position)
            assert tensor._version > version  # or autograd would not notice
        return True

    assert world(2).run(body) == [True, True]


NONSENSE = {
    "tensor": (MISSING, 3.0, None, "x", [1.0]),
    "op": ("mean", "SUM", None, 2.5, [], object, b"sum", dist.ReduceOp.PREMUL_SUM, 17),
    "algorithm": ("nccl", None, 0, (), b"auto"),
    "deterministic": ("", [], 2.0),
    "group": ("world", 3, object, pycomm.Group),
    "async_op": ("", 0.0, []),
    "tag": (True, 2.5, [], b"name"),
    "out": (3, "x", torch.ones(2), torch.ones(6, dtype=torch.int32)),
    "stream": (1,),
    "handle": (None,),
}


def same_answer(tensor, *positional, **named):
    """Compares the two ways, each with a tensor of its own."""
    answers = []
    for function in (pycomm.all_reduce, helpers.whole_way()):
        own_tensor = tensor() if callable(tensor) else tensor
        given = () if own_tensor is MISSING else (own_tensor,)
        kind, value = called(function, *given, *positional, **named)
        if kind == "returned":
            assert value is own_tensor or value is named.get("out")
            value = value.tolist()
        answers.append((kind, value))
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_raises_the_same(world, name):
    """Bad arguments alone and in pairs; of a pair, both ways name the same argument."""
    group = world(1).groups[0]
    for value in NONSENSE[name]:
        for other, others in [("", ()), *NONSENSE.items()]:
            for beside in (MISSING, *others):
                if other == name or (beside is MISSING) == bool(other):
                    continue
                named = {"group": group, name: value}
                if other:
                    named[other] = beside
                tensor = named.pop("tensor", lambda: torch.ones(6))
                same_answer(tensor, **named)
    for value in NONSENSE["op"]:
        assert same_answer(lambda: torch.ones(6), value, group=group)[0] != "returned"


def test_wrong_numbers_of_arguments(world):
    group = world(1).groups[0]
    for positional in ((), ("sum",), ("sum", None), ("sum", None, "auto", False, group)):
        same_answer(lambda: torch.ones(6), *positional, group=group)
        same_answer(lambda: torch.ones(6), *positional, op="sum", group=group)
        same_answer(MISSING, *positional, group=group)
    kind, text = called(pycomm.all_reduce, torch.ones(6), tensor=torch.ones(6), group=group)
    assert kind is TypeError
    assert "multiple values for argument 'tensor'" in text


def test_names_that_are_not_interned(world):
    group = world(1).groups[0]
    name, op, key = "".join(["al", "gorithm"]), "".join(["s", "um"]), "".join(["o", "p"])
    tensor = own(0)
    assert (
        pycomm.all_reduce(tensor, **{key: op, name: "".join(["ri", "ng"])}, group=group) is tensor
    )


@pytest.mark.parametrize("group_given", [False, True])
def test_the_default_group(world, group_given):
    first, second = world(1).groups[0], world(1).groups[0]
    for default in (first, second):
        pycomm.set_default_group(default)
        begun = default._core.sequence
        pycomm.all_reduce(own(0), **({"group": None} if group_given else {}))
        assert default._core.sequence == begun + 1
    pycomm.set_default_group(None)
    with pytest.raises(ValueError, match="have no default group"):
        pycomm.all_reduce(own(0))


def test_a_default_group_that_goes_during_the_call():
    """The call keeps it alive."""
    pair = pycomm.LocalWorld(2, timeout=20)
    first, second = pair.groups
    pair.groups.clear()
    pycomm.set_default_group(first)
    gone = weakref.ref(first)
    del first
    results = []
    caller = threading.Thread(target=lambda: results.append(pycomm.all_reduce(torch.ones(4))))
    caller.start()
    while gone()._core.sequence == second._core.sequence:
        time.sleep(0.001)
    pycomm.set_default_group(None)
    gc.collect()
    pycomm.all_reduce(torch.ones(4), group=second)
    caller.join()
    assert results[0].tolist() == [2.0] * 4
    gc.collect()
    assert gone() is None


def test_a_closed_group_raises_the_same(world):
    closed = world(1).groups[0]
    closed.close()
    kind, text = same_answer(lambda: torch.ones(6), group=closed)
    assert (kind, text) == (pycomm.GroupUnusable, "group is closed")


def test_it_is_a_function_like_any_other():
    assert str(inspect.signature(all_reduce)) == (
        "(tensor, op='sum', *, out=None, algorithm='auto', deterministic=False, group=None, "
        "async_op=False, tag=None, preserve=False)"
    )
    assert pickle.loads(pickle.dumps(all_reduce)) is all_reduce is copy.deepcopy(all_reduce)
    assert (all_reduce.__name__, all_reduce.__module__) == ("all_reduce", "pycomm.collectives")
    assert all_reduce.__doc__.startswith("Reduces a tensor over all ranks of a group;")
    text = pydoc.plain(pydoc.render_doc(all_reduce))
    assert "all_reduce(tensor, op='sum', *, out=None" in text
    assert "GroupUnusable: the group is closed" in text


def test_no_references_are_kept(world):
    group = world(1).groups[0]
    tensor = torch.ones(6, 2)
    options = {"op": "max", "algorithm": "ring", "tag": None}
    watched = [tensor, group, _C.algorithms, *options.values(), group._handle]

    def calls():
        pycomm.all_reduce(tensor, group=group, **options)
        pycomm.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
        called(pycomm.all_reduce, tensor, [], group=group)
        called(pycomm.all_reduce, tensor, group=3)
        called(pycomm.all_reduce, tensor.t(), group=group)
        called(pycomm.all_reduce, tensor, "bxor", group=group)

    calls()
    gc.collect()
    before, blocks = [sys.getrefcount(item) for item in watched], sys.getallocatedblocks()
    for _ in range(1000):
        calls()
    gc.collect()
    assert [sys.getrefcount(item) for item in watched] == before
    assert sys.getallocatedblocks() - blocks < 200


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_compiled_functions(world, backend):
    """The compiler leaves the call to Python."""
    group = world(1).groups[0]

    def step(x):
        y = x * 2
        pycomm.all_reduce(y, "avg", group=group)
        return y + 1

    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(own(0)), own(0) * 2 + 1)


WITHOUT_A_READER = """
import sys, torch
major, minor = torch.__version__.split(".")[:2]
name = f"pycomm._c10d_{major}_{minor}"
sys.modules[name] = None  # it cannot be imported
import pycomm
assert sys.modules[name] is None
world = pycomm.LocalWorld(1)
pycomm.set_default_group(world.groups[0])
with torch.inference_mode():
    inferred = torch.ones(4)
for tensor in (torch.ones(4), torch.ones(2, 3), torch.ones(4, 4).t(), torch.ones(0), inferred):
    version = None if tensor.is_inference() else tensor._version
    assert pycomm.all_reduce(tensor) is tensor
    assert version is None or tensor._version > version
for tensor, why in [
    (torch.ones(4, requires_grad=True), "must not require grad"),
    (torch._neg_view(torch.ones(4)), "must be materialised"),
]:
    try:
        pycomm.all_reduce(tensor)
    except ValueError as error:
        assert why in str(error)
    else:
        raise AssertionError(why)
"""


def test_where_no_reader_is_compiled_for_this_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_A_READER], check=True)
