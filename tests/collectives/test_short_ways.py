"""The short ways of all collectives: each call does what the function in Python does."""

import itertools

import helpers
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import pycomm

RANKS = 2


class Subclass(torch.Tensor):
    """It has memory, but another type."""


def numbers(rank, *shape, dtype=torch.float32):
    """Small integers, whose results are exact, others on each rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + rank + 1).view(shape).to(dtype)


def on_root(rank, tensor):
    return tensor if rank == 0 else None


# The arguments of the usual call, by name, for a block of this shape.
USUAL = {
    "all_reduce": lambda _rank, block: {"tensor": block},
    "reduce": lambda _rank, block: {"tensor": block},
    "reduce_scatter": lambda rank, block: {"output": block, "input": whole(rank, block)},
    "all_gather": lambda rank, block: {"output": whole(rank, block), "input": block},
    "broadcast": lambda _rank, block: {"tensor": block},
    "barrier": lambda _rank, _block: {},
    "gather": lambda rank, block: {
        "tensor": block,
        "gather_list": on_root(rank, whole(rank, block)),
    },
    "scatter": lambda rank, block: {
        "tensor": block,
        "scatter_list": on_root(rank, whole(rank, block)),
    },
    "all_to_all": lambda rank, block: {
        "output": whole(rank, block),
        "input": whole(rank, block) * 3,
    },
    "compressed_all_reduce": lambda _rank, block: {
        "tensor": block,
        "compression": pycomm.Int8(),
    },
    "compressed_reduce_scatter": lambda rank, block: {
        "output": block,
        "input": whole(rank, block),
        "compression": pycomm.Int8(),
    },
}
NAMES = list(USUAL)
WITH_TENSORS = [name for name in NAMES if name != "barrier"]
COMPRESSED = [name for name in NAMES if name.startswith("compressed")]
REDUCING = [name for name in NAMES if "reduce" in name]
ROOTED = {"reduce": "dst", "broadcast": "src", "gather": "dst", "scatter": "src"}


def whole(rank, block):
    """A tensor with a block per rank."""
    return numbers(rank, RANKS, *block.shape, dtype=block.dtype)


def usual(name, rank, *shape, dtype=torch.float32):
    return USUAL[name](rank, numbers(rank, *(shape or (4, 8)), dtype=dtype))


def bits(value):
    """A value that can be compared; for a tensor its type, shape, version and elements."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    version = None if value.is_inference() else value._version
    elements = value.detach().resolve_neg().resolve_conj().as_subclass(torch.Tensor).tolist()
    return (type(value).__name__, tuple(value.shape), value.stride(), version, str(elements))


def answer(function, given, group, positional=()):
    """The argument that a call returns, or its error; and all its tensors afterwards."""
    try:
        value = function(*positional, **given, group=group)
        if isinstance(value, pycomm.Work):
            value.wait()
            told = ("work", value.nonfinite, value.is_completed())
        else:
            names = [name for name, argument in given.items() if argument is value]
            told = ("returned", names if value is not None else None)
    except Exception as error:
        told = (type(error).__name__, str(error))
    return told, {name: bits(value) for name, value in given.items()}


def both_ways(world, name, given, ranks=RANKS, context=None):
    """Compares both ways on all ranks; returns what the ranks were told.

    Each way has groups of its own, because errors may end a group.
    """
    answers = []
    for function in (getattr(pycomm, name), helpers.whole_way(name)):

        def body(group, function=function):
            arguments = given(group.rank)
            if context is None:
                return answer(function, arguments, group)
            with context():
                return answer(function, arguments, group)

        answers.append(world(ranks).run(body))
    assert answers[0] == answers[1]
    return [told for told, _ in answers[0]]


def runs_itself(monkeypatch, world, name, given):
    """True on each rank whose call reaches no function in Python."""
    reached = []
    monkeypatch.setattr("pycomm._init.check_group", lambda group: reached.append(group.rank))
    world(RANKS).run(lambda group: answer(getattr(pycomm, name), given(group.rank), group))
    return [rank not in reached for rank in range(RANKS)]


@pytest.mark.parametrize("name", NAMES)
def test_usual_calls_stay_in_c(monkeypatch, world, name):
    assert runs_itself(monkeypatch, world, name, lambda rank: usual(name, rank)) == [True, True]
    unusual = runs_itself(monkeypatch, world, name, lambda rank: usual(name, rank) | {"tag": 1})
    assert unusual == [False, False]


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (4, 8), (2, 1, 3, 1, 2), (0,), (3, 0)], ids=str)
def test_shapes(world, name, asynchronous, shape):
    def given(rank):
        return USUAL[name](rank, numbers(rank, *shape)) | {"async_op": asynchronous}

    for told in both_ways(world, name, given):
        assert told[0] == ("work" if asynchronous else "returned")


@pytest.mark.parametrize("asynchronous", [False, True, 1, 0, None, "x"])
def test_barriers(world, asynchronous):
    both_ways(world, "barrier", lambda _: {"async_op": asynchronous})


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.int8,
        torch.bool,
        torch.uint16,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_dtypes(world, name, dtype):
    def given(rank):
        return {
            key: value.to(dtype) if isinstance(value, torch.Tensor) else value
            for key, value in usual(name, rank).items()
        }

    both_ways(world, name, given)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize(
    "op",
    [
        "sum",
        "avg",
        "max",
        "prod",
        "bxor",
        "mean",
        3,
        None,
        [],
        dist.ReduceOp.SUM,
        dist.ReduceOp.MIN,
    ],
    ids=str,
)
def test_reductions(world, name, op):
    both_ways(world, name, lambda rank: usual(name, rank) | {"op": op})


@pytest.mark.parametrize(("name", "argument"), ROOTED.items())
@pytest.mark.parametrize("root", [0, 1, 2, -1, True, 1.0, "0", None, 1 << 70], ids=str)
def test_roots(world, name, argument, root):
    def given(rank):
        return usual(name, 0 if rank == root else 1) | {argument: root}

    both_ways(world, name, given)


def changed(name, change):
    """For each tensor of a call: the call in which `change` makes another of it."""
    for argument in usual(name, 0):
        if not isinstance(usual(name, 0)[argument], torch.Tensor):
            continue

        def given(rank, argument=argument):
            made = usual(name, rank)
            if made[argument] is not None:
                made[argument] = change(made[argument])
            return made

        yield given


def in_inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


CHANGES = {
    "transposed": lambda x: x.flatten().view(-1, 2).t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[:1].expand(x.numel()),
    "a column": lambda x: x.flatten().unsqueeze(1),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "a parameter without grad": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "a subclass": lambda x: x.as_subclass(Subclass),
    "negated": lambda x: torch._neg_view(x),
    "inference": in_inference,
    "another dtype": lambda x: x.to(torch.float64),
    "too long": lambda x: torch.cat([x.flatten(), x.flatten()[:1]]),
    "too short": lambda x: x.flatten()[1:].clone(),
    "an array": lambda x: x.numpy(),
    "a list": lambda x: list(x.flatten(0, -2)) if x.dim() > 1 else [x],
    "none": lambda _: None,
    "a number": lambda _: 3.0,
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize("change", CHANGES)
def test_unusual_tensors(world, name, change):
    for given in changed(name, CHANGES[change]):
        compare = both_ways if change not in ("sparse", "meta", "an array") else same_told
        compare(world, name, given)


def same_told(world, name, given):
    """As both_ways(), for tensors whose elements cannot be listed."""
    answers = []
    for function in (getattr(pycomm, name), helpers.whole_way(name)):

        def body(group, function=function):
            try:
                return type(function(**given(group.rank), group=group)).__name__
            except Exception as error:
                return type(error).__name__, str(error)

        answers.append(world(RANKS).run(body))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", [n for n in WITH_TENSORS if len(usual(n, 0)) > 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_overlapping_tensors(world, name, asynchronous):
    """The second tensor begins somewhere in the first."""
    for shift in (0, 1, 31, 32, 63, 64):

        def given(rank, shift=shift):
            made = usual(name, rank)
            base = numbers(rank, 192)
            tensors = [key for key, value in made.items() if isinstance(value, torch.Tensor)]
            for key, start in zip(tensors, (0, shift), strict=False):
                shape = made[key].shape
                made[key] = base[start : start + shape.numel()].view(shape)
            return made | {"async_op": asynchronous}

        both_ways(world, name, given)


@pytest.mark.parametrize("name", ["all_reduce", "compressed_all_reduce"])
def test_out(world, name):
    makers = [
        lambda x: torch.zeros_like(x),
        lambda x: x,
        lambda x: x.view(-1),
        lambda _: torch.zeros(32),
        lambda _: torch.zeros(8, 4).t(),
        lambda x: torch.zeros_like(x, dtype=torch.float64),
        lambda x: x.detach(),
        lambda _: None,
        lambda _: 3,
    ]
    for maker, asynchronous in itertools.product(makers, (False, True)):

        def given(rank, maker=maker, asynchronous=asynchronous):
            made = usual(name, rank)
            return made | {"out": maker(made["tensor"]), "async_op": asynchronous}

        both_ways(world, name, given)


RESIDUALS = {
    "zeros": lambda x: torch.zeros_like(x, dtype=torch.float32),
    "ones": lambda x: torch.ones_like(x, dtype=torch.float32),
    "none": lambda _: None,
    "a number": lambda _: 3,
    "float64": lambda x: torch.zeros_like(x, dtype=torch.float64),
    "flat": lambda x: torch.zeros(x.numel()),
    "strided": lambda x: torch.zeros(*x.shape, 2)[..., 0],
    "the tensor": lambda x: x,
    "its memory": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_residuals(world, name, residual, asynchronous):
    def given(rank):
        made = usual(name, rank, 100)
        source = made.get("input", made.get("tensor"))
        return made | {"residual": RESIDUALS[residual](source), "async_op": asynchronous}

    both_ways(world, name, given)


class Own(pycomm.Cast):
    """A user's own compression."""


COMPRESSIONS = [
    pycomm.Int8(),
    pycomm.Int8(block=128, rounding="stochastic", seed=5),
    pycomm.Int8(seed=2**64 - 1, rounding="stochastic"),
    pycomm.Cast(),
    pycomm.Cast(torch.float16),
    pycomm.Identity(),
    pycomm.TopK(density=0.1),
    pycomm.TopK(k=3, values=torch.int8),
    pycomm.TopK(density=0.1, momentum=0.9),
    pycomm.TopK(density=1.0),
    Own(),
    None,
    "int8",
    pycomm.Int8,
]
OPTIONS = [
    {},
    {"step": 7},
    {"step": 2**32 - 1},
    {"step": 2**32},
    {"step": -1},
    {"step": True},
    {"step": "1"},
    {"offset": 256},
    {"offset": 128},
    {"offset": 1},
    {"offset": -256},
    {"offset": 128 << 32},
    {"strict": True},
    {"strict": False},
    {"algorithm": "ring"},
    {"algorithm": "one_shot"},
    {"algorithm": "two_shot"},
    {"algorithm": "nccl"},
    {"velocity": 3},
    {"op": "sum"},
    {"op": "max"},
    {"stream": 1},
]


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_compressions(world, name, compression):
    for options in OPTIONS:

        def given(rank, options=options):
            made = usual(name, rank, 640) | {"compression": compression}
            return made | options

        both_ways(world, name, given)


@pytest.mark.parametrize("name", COMPRESSED)
def test_infinities_are_told(world, name):
    def given(rank):
        made = usual(name, rank, 256) | {"async_op": True}
        made.get("input", made.get("tensor")).view(-1)[3] = float("inf") if rank == 0 else 1.0
        return made

    assert both_ways(world, name, given) == [("work", True, True)] * RANKS


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments(world, name):
    """Missing ones, unknown ones, too many, the same twice, and by position."""
    made = usual(name, 0)
    group = world(1).groups[0]
    for positional, named in [
        ((), {}),
        (tuple(made.values()), {}),
        ((*made.values(), None, None, None, None, None), {}),
        ((torch.ones(4),), made),
        ((), made | {"stream": 1}),
        ((), made | {"tag": True}),
        ((), made | {"tag": "name"}),
        ((), made | {"preserve": False}),
        ((), made | {"preserve": 0}),
    ]:
        answers = []
        for function in (getattr(pycomm, name), helpers.whole_way(name)):
            try:
                function(*positional, **named, group=group)
                answers.append("returned")
            except Exception as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", ["world", 3, pycomm.Group], ids=str)
def test_no_groups(name, group):
    for function in (getattr(pycomm, name), helpers.whole_way(name)):
        with pytest.raises(TypeError, match=r"group must be a pycomm\.Group or None, got"):
            function(**usual(name, 0), group=group)


@pytest.mark.parametrize("name", NAMES)
def test_closed_groups(world, name):
    closed = world(1).groups[0]
    closed.close()
    for function in (getattr(pycomm, name), helpers.whole_way(name)):
        with pytest.raises(pycomm.GroupUnusable, match="group is closed"):
            function(**one_rank(name), group=closed)


def one_rank(name):
    """Arguments of the only rank: a block is the whole."""
    block = numbers(0, 4)
    made = USUAL[name](0, block)
    return {
        key: numbers(0, 4) if isinstance(value, torch.Tensor) else value
        for key, value in made.items()
    }


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_tangents_are_refused(world, name):
    group = world(1).groups[0]
    for argument in one_rank(name):
        given = one_rank(name)
        if not isinstance(given[argument], torch.Tensor):
            continue
        with forward_ad.dual_level():
            given[argument] = forward_ad.make_dual(given[argument], torch.ones(4))
            with pytest.raises(ValueError, match=f"{argument} must not carry a tangent"):
                getattr(pycomm, name)(**given, group=group)


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_dispatch_modes_see_calls(world, name):
    group = world(1).groups[0]
    given = one_rank(name)
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to Fake"):
        getattr(pycomm, name)(**given, group=group)


@pytest.mark.parametrize("name", NAMES)
def test_profilers_see_calls(world, name):
    group = world(1).groups[0]
    with torch.profiler.profile() as profile:
        getattr(pycomm, name)(**one_rank(name), group=group)
    assert f"pycomm:{name}" in {event.name for event in profile.events()}


@pytest.mark.parametrize("name", [n for n in WITH_TENSORS if n != "broadcast"])
def test_works_keep_memory(name):
    """The tensors get other memory while the operation waits for the other rank."""
    first, second = pycomm.LocalWorld(2, timeout=20).groups
    given = {0: usual(name, 0), 1: usual(name, 1)}
    result = given[0].get("output", given[0].get("gather_list", given[0].get("tensor")))
    kept = result.detach()
    work = getattr(pycomm, name)(**given[0], group=first, async_op=True)
    for tensor in given[0].values():
        if isinstance(tensor, torch.Tensor):
            tensor.data = torch.zeros(1)
    getattr(pycomm, name)(**given[1], group=second)
    work.wait()
    expected = {0: usual(name, 0), 1: usual(name, 1)}
    pycomm.LocalWorld(2).run(
        lambda group: helpers.whole_way(name)(**expected[group.rank], group=group)
    )
    wanted = expected[0].get("output", expected[0].get("gather_list", expected[0].get("tensor")))
    assert torch.equal(kept, wanted)


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_other_ranks_may_go_the_other_way(world, name):
    """Ranks announce the same operation by either way."""

    def body(group, ways):
        function = (getattr(pycomm, name), helpers.whole_way(name))[ways[group.rank]]
        return answer(function, usual(name, group.rank), group)

    results = [
        world(RANKS).run(lambda group, w=ways: body(group, w)) for ways in ((0, 0), (0, 1), (1, 0))
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", NAMES)
def test_serial_worlds(name):
    """Calls give up their turns."""
    results = []
    for function in (getattr(pycomm, name), helpers.whole_way(name)):
        with pycomm.LocalWorld(RANKS, serial=True, timeout=20) as serial:
            results.append(
                serial.run(
                    lambda g, f=function: [answer(f, usual(name, g.rank), g) for _ in range(3)]
                )
            )
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_reduce", "gather"])
def test_groups_that_span_nodes(world, name):
    answers = []
    for function in (getattr(pycomm, name), helpers.whole_way(name)):
        spanning = world(RANKS, nodes=[1, 1])
        answers.append(spanning.run(lambda g, f=function: answer(f, usual(name, g.rank), g)))
    assert answers[0] == answers[1]
