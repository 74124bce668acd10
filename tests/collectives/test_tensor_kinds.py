"""Every function takes every kind of tensor, or refuses it by name; nothing crashes."""

import helpers
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import pycomm

COUNT = 8
INT8 = pycomm.Int8()


class Plain(torch.Tensor):
    """A subclass that leaves operations alone."""


def ones():
    return torch.ones(COUNT)


def distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(ones(), init_device_mesh("cpu", (1,)), [Shard(0)])


def made_for_inference():
    with torch.inference_mode():
        return ones()


def freed():
    tensor = ones()
    tensor.untyped_storage().resize_(0)
    return tensor


# Elements in memory of their own.
SERVED = {
    "tensor": ones,
    "parameter": lambda: nn.Parameter(ones(), requires_grad=False),
    "buffer": lambda: nn.Buffer(ones()),
    "of inference mode": made_for_inference,
    "plain subclass": lambda: ones().as_subclass(Plain),
    "copied when written": lambda: torch._lazy_clone(ones()),
    "strided": lambda: torch.ones(2 * COUNT)[::2],
}

ORDINARY, MEMORY, DENSE = "must be an ordinary tensor, got a ", "must have memory", "must be dense"
REFUSED = {
    "DTensor": (distributed, TypeError, ORDINARY + "DTensor: pass its to_local()"),
    "parameter of a DTensor": (
        lambda: nn.Parameter(distributed(), requires_grad=False),
        TypeError,
        ORDINARY + "DTensor: pass its to_local()",
    ),
    "FakeTensor": (
        lambda: FakeTensorMode().from_tensor(ones()),
        TypeError,
        ORDINARY + "FakeTensor",
    ),
    "MaskedTensor": (
        lambda: masked_tensor(ones(), ones().bool()),
        TypeError,
        ORDINARY + "MaskedTensor",
    ),
    "TwoTensor": (lambda: TwoTensor(ones(), ones()), TypeError, ORDINARY + "TwoTensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([ones()], layout=torch.jagged),
        TypeError,
        ORDINARY + "NestedTensor",
    ),
    "functional": (lambda: torch._to_functional_tensor(ones()), TypeError, MEMORY),
    "zero": (lambda: torch._efficientzerotensor(COUNT), TypeError, MEMORY),
    "freed": (freed, TypeError, MEMORY),
    "nested": (lambda: torch.nested.nested_tensor([ones()]), ValueError, DENSE),
    "sparse": (lambda: ones().to_sparse(), ValueError, DENSE),
    "csr": (lambda: torch.eye(COUNT).to_sparse_csr(), ValueError, DENSE),
    "mkldnn": (lambda: ones().to_mkldnn(), ValueError, DENSE),
    "quantized": (
        lambda: torch.quantize_per_tensor(ones(), 1.0, 0, torch.quint8),
        ValueError,
        "quint8",
    ),
    "meta": (lambda: torch.ones(COUNT, device="meta"), ValueError, "must lie on the CPU"),
    "negated view": (lambda: torch._neg_view(ones()), ValueError, "must be materialised"),
    "uninitialised": (
        lambda: nn.UninitializedParameter(requires_grad=False),
        ValueError,
        "uninitialized parameter",
    ),
}

# Each gets the tensor in one place.
CALLS = {
    "all_reduce": lambda g, t: pycomm.all_reduce(t, group=g),
    "all_reduce later": lambda g, t: pycomm.all_reduce(t, group=g, async_op=True).wait(),
    "all_reduce into": lambda g, t: pycomm.all_reduce(ones(), out=t, group=g),
    "reduce_scatter": lambda g, t: pycomm.reduce_scatter(t, torch.ones(2 * COUNT), group=g),
    "reduce_scatter from": lambda g, t: pycomm.reduce_scatter(torch.ones(COUNT // 2), t, group=g),
    "all_gather": lambda g, t: pycomm.all_gather(t, torch.ones(COUNT // 2), group=g),
    "all_gather from": lambda g, t: pycomm.all_gather(torch.ones(2 * COUNT), t, group=g),
    "broadcast": lambda g, t: pycomm.broadcast(t, group=g),
    "compressed": lambda g, t: pycomm.compressed_all_reduce(t, INT8, group=g),
    "compressed into": lambda g, t: pycomm.compressed_all_reduce(ones(), INT8, out=t, group=g),
    "residual": lambda g, t: pycomm.compressed_all_reduce(ones(), INT8, residual=t, group=g),
    "encode": lambda _, t: INT8.encode(t),
    "encode into": lambda _, t: INT8.encode(ones(), t),
    "decode": lambda _, t: INT8.decode(t, COUNT),
    "decode into": lambda _, t: INT8.decode(INT8.encode(ones()), COUNT, t),
    "select": lambda _, t: pycomm.TopK(k=1).select(t),
}

TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(lambda t: (f(t), t)[1])(torch.ones(2, COUNT)),
    "grad": lambda f: torch.func.grad(lambda t: (f(t), t.sum())[1])(ones()),
    "functionalize": lambda f: torch.func.functionalize(lambda t: (f(t), t)[1])(ones()),
}


def refusal(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None, "no error"


def at_every_door(*_):
    """Runs in a process of its own, because an error here would end it."""
    with pycomm.LocalWorld(2, timeout=5) as pair:
        group = pair.groups[0]  # a bad argument must raise before a peer is waited for
        seen = {
            (kind, name): refusal(call, group, make())
            for kind, (make, *_) in REFUSED.items()
            for name, call in CALLS.items()
        }
        for transform, apply in TRANSFORMS.items():
            for name, call in CALLS.items():
                seen[transform, name] = refusal(apply, lambda t, call=call: call(group, t))
        return seen


@pytest.fixture(scope="module")
def seen():
    return helpers.run_ranks(1, at_every_door)[0]


@pytest.mark.parametrize("kind", [*REFUSED, *TRANSFORMS])
def test_refused_at_every_door(seen, kind):
    _, error, message = REFUSED.get(kind, (None, TypeError, MEMORY))
    for name in CALLS:
        found, text = seen[kind, name]
        assert found is error, (name, found, text)
        assert message in text, name


@pytest.mark.parametrize("kind", SERVED)
def test_served(world, kind):
    def body(group):
        for asynchronous in (False, True):
            tensor = SERVED[kind]()
            made = pycomm.all_reduce(tensor, group=group, async_op=asynchronous)
            if asynchronous:
                made.wait()
            assert tensor.tolist() == [2.0] * COUNT
            pycomm.compressed_all_reduce(tensor, pycomm.Cast(), group=group)
            assert tensor.tolist() == [2.0] * COUNT
        return True

    assert all(world(2).run(body))


def test_a_lazy_clone_leaves_its_original(world):
    def body(group):
        original = torch.ones(COUNT)
        pycomm.all_reduce(torch._lazy_clone(original), group=group)
        pycomm.broadcast(torch._lazy_clone(original), group=group)
        return original.tolist()

    assert world(2).run(body) == [[1.0] * COUNT] * 2


def operators(*_):
    """Calls pycomm's operators, which must not get tensors without memory from torch."""
    seen = {}
    with pycomm.LocalWorld(1) as alone:
        name = alone.groups[0].name
        for kind, (make, *_) in REFUSED.items():
            for call in (
                lambda t: torch.ops.pycomm.all_reduce_(t, "sum", "auto", name),
                lambda t: torch.ops.pycomm.encode(t, "int8", 0, 0),
            ):
                seen.setdefault(kind, []).append(refusal(call, make())[0])
    return seen


def test_operators_survive_them():
    seen = helpers.run_ranks(1, operators)[0]
    for kind in ("freed", "sparse", "nested", "quantized", "DTensor"):
        assert None not in seen[kind], kind


def under_a_fake_mode(*_):
    """Stand-ins that the library makes itself are fake, too."""
    with pycomm.LocalWorld(2, timeout=5) as pair, FakeTensorMode(allow_non_fake_inputs=True):
        group = pair.groups[0]
        real = torch.ones(2 * COUNT)[::2]
        return [
            refusal(lambda: pycomm.all_reduce(real, group=group)),
            refusal(lambda: pycomm.compressed_all_reduce(real, INT8, group=group)),
            refusal(lambda: INT8.encode(real)),
        ]


def test_fake_stand_ins_are_refused():
    assert all(error is not None for error, _ in helpers.run_ranks(1, under_a_fake_mode)[0])


def sharded(*_):
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    distributed()  # makes the process group
    fully_shard(module)
    with pycomm.LocalWorld(1) as alone:
        group = alone.groups[0]
        named = list(module.named_parameters())
        optimizer = torch.optim.SGD(module.parameters())
        return [
            refusal(lambda: pycomm.DataParallel(module, group=group)),
            refusal(lambda: pycomm.hooks.Int8State(named, group=group)),
            refusal(lambda: pycomm.hooks.LocalSGDState(named, optimizer, period=2, group=group)),
        ]


def test_a_sharded_module_is_refused():
    for error, text in helpers.run_ranks(1, sharded)[0]:
        assert error is TypeError, text
        assert "0.weight must be an ordinary tensor, got a DTensor" in text


@pytest.mark.parametrize("kind", ["FakeTensor", "MaskedTensor", "meta", "freed"])
def test_a_module_is_refused_with_the_name_of_its_tensor(world, kind):
    make, error, message = REFUSED[kind]
    module = nn.Linear(3, 3)
    module.register_buffer("mean", make())
    with pytest.raises(error, match=rf"module: mean {message}"):
        pycomm.DataParallel(module, group=world(1).groups[0])


def test_memory_of_the_window_is_asked_for_properly(world):
    group = world(1).groups[0]
    with pytest.raises(ValueError, match="size must not be negative"):
        group.empty(2, -1)
    with pytest.raises(ValueError, match="device must be a CPU or a CUDA device, got meta"):
        group.empty(2, device="meta")
    assert group.empty(0, 3).shape == (0, 3)
