"""DTensors as parameters: sharded by fully_shard or by hand, on meshes of one and two dimensions.

Most tests give the parameters gradients of known values, so that an unsharded optimizer is an exact
reference. Those of torch's optimizers train by backward.
"""

import copy
import functools
import math
import subprocess
import sys

import backends
import golden
import helpers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizing import Case
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pycomm
from pycomm import optim

BF16, FP16 = torch.bfloat16, torch.float16
# With 3 ranks: uneven shards, and shards without elements. Some have 8-bit states, some are small.
SHAPES = {
    "matrix": (70, 133),
    "vector": (5000,),
    "row": (1, 3),
    "cube": (6, 32, 40),
    "none": (0, 3),
}
# Nothing in these is rounded at random, and no blocks are shared: the bits are the unsharded ones.
EXACT = [
    Case("adamw"),
    Case("adam", {"amsgrad": True, "weight_decay": 0.1}, BF16, None, "remainder"),
    Case("adamw", {"maximize": True}, FP16, None, "fp32"),
    Case("sgd", {"dampening": 0.2, "weight_decay": 0.1}, BF16, torch.float32, "fp32"),
    Case("sgd", {"momentum": 0.0}),
    Case("lion", dtype=BF16, master="remainder"),
]
ROUNDED = [
    Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "8bit"),
    Case("adamw", {}, torch.float32, None, None, "fp16"),
    Case("adamw", {}, BF16, None, None, "bf16", stochastic=True, seed=5),
    Case("lion", dtype=BF16, states="8bit", stochastic=True, seed=3),
    Case("sgd", {"dampening": 0.2, "weight_decay": 0.1}, BF16, None, "fp32", "bf16"),
]


def member(rank, size, store, function, *args):
    helpers.join_world(rank, size, store)
    result = function(*args)
    dist.destroy_process_group()
    return result


def on_pycomm(_rank, _size, function, *args):
    return function(*args)


def run(size, function, *args):
    """Results of ``function(*args)`` on ranks that are connected by Gloo."""
    return helpers.run_ranks(size, member, function, *args)


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


class Net(nn.Module):
    """Parameters without a forward."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES):
        super().__init__()
        for number, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(values(shape, dtype, number)))


def placed(whole, like):
    """A tensor with all elements, divided as a DTensor."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def give_gradients(net, step, dtype=None):
    """The same ones on every number of ranks."""
    for number, param in enumerate(net.parameters()):
        whole = values(param.shape, dtype or param.dtype, 100 * step + number + 10)
        if whole.dtype != param.dtype:
            param.grad_dtype = whole.dtype
        param.grad = placed(whole, param) if isinstance(param, DTensor) else whole


def take_steps(net, optimizer, steps, dtype=None):
    for step in steps:
        give_gradients(net, step, dtype)
        optimizer.step()


def copy_parameters(net, values):
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), values, strict=True):
            parameter.copy_(value)


def line():
    """A mesh of all ranks in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(case):
    net = Net(case.dtype)
    fully_shard(net, mesh=line())
    return net, case.make(net.parameters())


def whole(tensor):
    """All elements, plain; int16 goes by another type, because Gloo does not gather it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if tensor.dtype == torch.int16:
        local = tensor.to_local().view(FP16)
        options = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        same = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **options)
        return same.full_tensor().view(torch.int16)
    return tensor.detach().full_tensor()


def everything(net, optimizer):
    """All elements of parameters and states, by name."""
    seen = {name: whole(param) for name, param in net.named_parameters()}
    for name, param in net.named_parameters():
        for key, value in optimizer.state[param].items():
            seen[f"{name}.{key}"] = whole(value)
    return seen


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert golden.same_bits(value, other[name]), name


def close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        got, expected = value.float(), other[name].float()
        assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance), name


def alone(case, steps=4):
    """What an unsharded optimizer makes of the same gradients."""
    net = Net(case.dtype)
    optimizer = case.make(net.parameters())
    take_steps(net, optimizer, range(steps), case.grad_dtype)
    return everything(net, optimizer)


# Steps.


def stepped(cases):
    seen = []
    for case in cases:
        net, optimizer = sharded(case)
        before = [param.to_local().data_ptr() for param in net.parameters()]
        take_steps(net, optimizer, range(4), case.grad_dtype)
        assert before == [param.to_local().data_ptr() for param in net.parameters()]
        seen.append(everything(net, optimizer))
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_are_those_of_an_unsharded_optimizer(ranks):
    expected = [alone(case) for case in EXACT]
    for results in run(ranks, stepped, EXACT):
        for got, reference in zip(results, expected, strict=True):
            same(got, reference)


def test_bits_on_the_backend_pycomm():
    expected = [alone(case) for case in EXACT[:2]]
    for results in backends.run(2, on_pycomm, stepped, EXACT[:2]):
        for got, reference in zip(results, expected, strict=True):
            same(got, reference)


def parameters_of(seen):
    return {name: value for name, value in seen.items() if name in SHAPES}


def locals_of(cases):
    """Copies of the local tensors after some steps."""
    seen = []
    for case in cases:
        net, optimizer = sharded(case)
        take_steps(net, optimizer, range(4))
        seen.append({name: p.to_local().detach().clone() for name, p in net.named_parameters()})
    return seen


def test_forms_with_random_rounding():
    """One rank: the unsharded bits. Two: those of plain parameters of shard 0; near by on 1."""
    expected = [alone(case) for case in ROUNDED]
    (single,) = run(1, stepped, ROUNDED)
    for got, reference in zip(single, expected, strict=True):
        same(got, reference)
    for rank, results in enumerate(run(2, locals_of, ROUNDED)):
        for case, got, reference in zip(ROUNDED, results, expected, strict=True):
            chunks = {
                name: reference[name].chunk(2)[rank:][:1] for name in got if got[name].numel()
            }
            parts = {name: chunk[0] for name, chunk in chunks.items()}
            close({name: got[name] for name in parts}, parts, 0.06 if case.name == "lion" else 0.03)
            if case.states != "8bit" and rank == 0:  # without blocks, elements are rounded alike
                same({name: got[name] for name in parts}, parts)


def rounded_alike():
    """One value, stepped on each shard of one parameter, and of a copied one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    param = nn.Parameter(
        distribute_tensor(torch.ones(8192).bfloat16(), mesh, [Replicate(), Shard(0)])
    )
    optimizer = optim.FusedAdamW([param], lr=1e-3, stochastic_rounding=True)
    for _ in range(3):
        param.grad = placed(torch.ones(8192).bfloat16(), param)
        optimizer.step()
    return param.to_local().detach().clone()


def test_shards_are_rounded_independently_and_copies_alike():
    copies = run(4, rounded_alike)
    assert golden.same_bits(copies[0], copies[2])
    assert golden.same_bits(copies[1], copies[3])
    assert 0.1 < (copies[0] != copies[1]).float().mean() < 0.9


# Beside torch's own optimizers.


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(19, 40), nn.Tanh(), nn.Linear(40, 3))


def hsdp(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh)


def fsdp(net):
    mesh = line()
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(net):
    """With plain parameters, too."""
    net = nn.Sequential(nn.LayerNorm(19), *net)
    return parallelize_module(net, line(), {"1": ColwiseParallel(), "3": RowwiseParallel()})


def both(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["data"])


def trained(spread, kinds):
    """Weights and norms after some steps, by a fused optimizer and by torch's."""
    seen = []
    for make, clip in kinds:
        net = spread(mlp())
        optimizer, norms = make(net.parameters()), []
        for step in range(4):
            x = values((4, 19), torch.float32, step)
            optimizer.zero_grad()
            (50 * net(x).square().sum()).backward()
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            if clip is None:
                norms.append(optimizer.grad_norm)
        seen.append(([whole(param) for param in net.parameters()], norms))
    return seen


FUSED = functools.partial(optim.FusedAdamW, lr=1e-2, max_norm=0.7)
UNCLIPPED = functools.partial(optim.FusedAdamW, lr=1e-2)
TORCH = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)


@pytest.mark.parametrize(
    ("spread", "ranks"), [(fsdp, 1), (fsdp, 2), (fsdp, 3), (hsdp, 4), (both, 4)]
)
def test_training_is_that_of_torch(spread, ranks):
    """All ranks clip with the same bits; clip_grad_norm_ before a step has the same effect."""
    results = run(ranks, trained, spread, [(FUSED, None), (UNCLIPPED, 0.7), (TORCH, 0.7)])
    for (weights, norms), (clipped, _), (reference, expected) in results:
        for got, hand, right in zip(weights, clipped, reference, strict=True):
            assert torch.allclose(got, right, rtol=1e-5, atol=1e-6)
            assert torch.allclose(hand, right, rtol=1e-5, atol=1e-6)
        for got, right in zip(norms, expected, strict=True):
            assert math.isclose(got.item(), right.item(), rel_tol=1e-5)
        for got, first in zip(norms, results[0][0][1], strict=True):
            assert golden.same_bits(got, first)


LAMB = functools.partial(optim.FusedLAMB, lr=1e-2, weight_decay=0.1)
SMALL_LAMB = functools.partial(LAMB, max_norm=0.7)


@pytest.mark.parametrize(("spread", "ranks"), [(fsdp, 2), (fsdp, 3), (hsdp, 4), (both, 4)])
def test_lamb_has_the_ratios_of_whole_parameters(spread, ranks):
    """The sums of shards are added in another order, so the last places differ."""
    kinds = [(LAMB, None), (SMALL_LAMB, None)]
    expected = trained(lambda net: net, kinds)
    results = run(ranks, trained, spread, kinds)
    for result in results:
        for (weights, _), (right, _), (first, _) in zip(result, expected, results[0], strict=True):
            for got, whole_one, same_one in zip(weights, right, first, strict=True):
                assert torch.allclose(got, whole_one, rtol=1e-5, atol=1e-6)
                assert golden.same_bits(got, same_one)


LAMBS = [
    Case("lamb"),
    Case("lamb", {"always_adapt": True, "weight_decay": 0.0}, BF16, torch.float32, "fp32"),
    Case("lamb", {"weight_decay": 0.0}),
]


def test_lamb_in_several_forms():
    """Some shards have no elements. Without ratios, the bits are those of an unsharded LAMB."""
    expected = [alone(case) for case in LAMBS]
    for results in run(3, stepped, LAMBS):
        for case, got, reference in zip(LAMBS, results, expected, strict=True):
            close(got, reference, 1e-2 if case.dtype == BF16 else 1e-6)
        same(results[2], expected[2])


def lamb_without_some_gradients():
    """A rank without gradients takes part in norms, and a skipped step changes nothing."""
    params = [nn.Parameter(distribute_tensor(torch.ones(4), line(), [Shard(0)])) for _ in range(2)]
    optimizer = LAMB(params)
    for param in params:
        param.grad = placed(torch.full((4,), 3.0), param)
    if dist.get_rank() == 1:
        params[1].grad = None
    optimizer.step()
    before = [param.to_local().clone() for param in params]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, before, (param.to_local() for param in params)))
    return before


def test_lamb_where_a_rank_lacks_gradients():
    first, second = run(2, lamb_without_some_gradients)
    assert torch.equal(first[0], second[0])
    assert bool((first[0] < 1).all())
    assert torch.equal(second[1], torch.ones(2))


def unsharded(net):
    return nn.Sequential(nn.LayerNorm(19), *net)


def test_tensor_parallelism():
    """torch refuses to clip a mixture of DTensors and plain tensors; a step takes it."""
    ((reference, expected),) = trained(unsharded, [(TORCH, 0.7)])
    for ((weights, norms),) in run(2, trained, tensor_parallel, [(FUSED, None)]):
        for got, right in zip(weights, reference, strict=True):
            assert torch.allclose(got, right, rtol=1e-5, atol=1e-6)
        for got, right in zip(norms, expected, strict=True):
            assert math.isclose(got.item(), right.item(), rel_tol=1e-5)


# Norms.

LAYOUTS = {
    "shard": ((2,), [Shard(0)]),
    "columns": ((3,), [Shard(1)]),
    "replicate": ((2,), [Replicate()]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "turned": ((2, 2), [Shard(1), Replicate()]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
}


def measured(shape, placements, plain):
    mesh = init_device_mesh("cpu", shape)
    grads = [values((5, 7), torch.float32, 0), values((3, 30), torch.float32, 1)]
    params = [nn.Parameter(distribute_tensor(torch.ones_like(g), mesh, placements)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = placed(grad, param)
    if plain:
        grads.append(values((11,), torch.float32, 2))
        params.append(nn.Parameter(torch.ones(11)))
        params[-1].grad = grads[-1].clone()
    optimizer = optim.FusedSGD(params, lr=1.0, max_norm=0.5)
    optimizer.step()
    norm = torch.cat([grad.double().flatten() for grad in grads]).norm()
    assert math.isclose(optimizer.grad_norm.item(), norm.item(), rel_tol=1e-12)
    for param, grad in zip(params, grads, strict=True):
        assert torch.allclose(whole(param), 1 - grad * (0.5 / norm).float(), atol=1e-6)
    return optimizer.grad_norm


@pytest.mark.parametrize("plain", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_of_the_whole_gradients(layout, plain):
    shape, placements = LAYOUTS[layout]
    norms = run(math.prod(shape), measured, shape, placements, plain)
    assert all(golden.same_bits(norm, norms[0]) for norm in norms)


def test_norm_on_the_backend_pycomm():
    norms = backends.run(4, on_pycomm, measured, *LAYOUTS["hybrid"], True)
    assert all(golden.same_bits(norm, norms[0]) for norm in norms)


def missing():
    """Gradients that one rank alone has, of one parameter or of all."""
    mesh = line()
    params = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = optim.FusedSGD(params, lr=1.0, max_norm=1.0)
    norms = []
    for lacking in ([params[0]], params):
        for param in params:
            param.grad = placed(torch.full((4,), 3.0), param)
        if dist.get_rank() == 1:
            for param in lacking:
                param.grad = None
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    return norms


def test_norm_if_a_rank_lacks_gradients():
    for norms in run(2, missing):
        assert norms == pytest.approx([math.sqrt(6 * 9), math.sqrt(4 * 9)])


# Gradients in other placements.


def moved():
    mesh = line()
    grad = values((6, 4), torch.float32, 1)
    seen = []
    for source in (
        lambda: distribute_tensor(grad, mesh, [Shard(1)], src_data_rank=None),
        lambda: distribute_tensor(grad, mesh, [Replicate()], src_data_rank=None),
        lambda: DTensor.from_local(grad / 2, mesh, [Partial()], run_check=False),
    ):
        for placements in ([Shard(0)], [Replicate()]):
            param = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, placements))
            param.grad = source()
            optim.FusedSGD([param], lr=1.0).step()
            seen.append(whole(param))
    return seen


def test_gradients_are_redistributed():
    for results in run(2, moved):
        assert all(torch.allclose(got, -values((6, 4), torch.float32, 1)) for got in results)


# Loss scaling.


def scaled(kind):
    mesh = line()
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]))
    optimizer = optim.FusedAdamW([param], lr=1e-2)
    scaler = kind("cpu", init_scale=4.0)
    seen = []
    for step in range(3):
        grad = values((64, 64), torch.float32, step)
        grad[-1, -1] = math.inf if step == 1 else 1.0  # on the last rank
        scaler.scale(torch.ones(()))
        param.grad = placed(4 * grad, param)
        scaler.step(optimizer)
        scaler.update(4.0)
        seen.append(whole(param))
    return seen


@pytest.mark.parametrize("kind", [optim.GradScaler, torch.amp.GradScaler], ids=["own", "torch"])
def test_all_ranks_skip_a_step_that_overflows_on_one(kind):
    plain = nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.AdamW([plain], lr=1e-2)
    expected = []
    for step in range(3):
        plain.grad = values((64, 64), torch.float32, step)
        plain.grad[-1, -1] = 1.0
        if step != 1:
            optimizer.step()
        expected.append(plain.detach().clone())
    for results in run(2, scaled, kind):
        for got, right in zip(results, expected, strict=True):
            assert torch.allclose(got, right, atol=1e-6)


# Between steps.


def edited(case, divides):
    """Writes to weights, assigned states, and changed options, as on plain parameters."""
    if divides:
        net, optimizer = sharded(case)
    else:
        net = Net(case.dtype)
        optimizer = case.make(net.parameters())
    take_steps(net, optimizer, range(2))
    with torch.no_grad():
        net.vector.mul_(0.5)
        weights = optimizer.full_weights(net.matrix)
        optimizer.set_full_weights(net.matrix, weights * 1.001)
        optimizer.set_full_weights(net.cube, values(SHAPES["cube"], torch.float32, 9))
    take_steps(net, optimizer, range(2, 3))
    state = optimizer.state[net.matrix]
    state["exp_avg"] = torch.zeros_like(net.matrix, dtype=torch.float32)
    optimizer.state[net.cube]["exp_avg"] = torch.ones(SHAPES["cube"])
    take_steps(net, optimizer, range(3, 4))
    optimizer.param_groups[0]["master_weights"] = "fp32"
    take_steps(net, optimizer, range(4, 5))
    return everything(net, optimizer)


@pytest.mark.parametrize("case", [Case("adamw", dtype=BF16, master="remainder"),
                                  Case("adamw", dtype=BF16, master="fp32")], ids=str)  # fmt: skip
def test_edits(case):
    expected = edited(case, False)
    for got in run(2, edited, case, True):
        same(got, expected)


# Checkpoints.


def kinds_of_states():
    net, optimizer = sharded(Case("adamw", dtype=BF16, master="fp32", states="bf16"))
    take_steps(net, optimizer, range(1))
    for param in net.parameters():
        state = optimizer.state[param]
        assert not isinstance(state.pop("step"), DTensor)
        for value in state.values():
            assert isinstance(value, DTensor)
            assert (value.shape, value.placements) == (param.shape, param.placements)
            assert value.device_mesh == param.device_mesh
            assert value.to_local().shape == param.to_local().shape


def test_states_are_dtensors():
    run(3, kinds_of_states)


def names_of_states():
    net, optimizer = sharded(ROUNDED[0])
    take_steps(net, optimizer, range(1))
    return {name: [*optimizer.state[param]] for name, param in net.named_parameters()}


def test_all_ranks_store_a_parameter_in_the_same_form():
    """Even if shards have fewer than 4,096 elements and the whole parameters have more."""
    (expected,) = run(1, names_of_states)
    assert "exp_avg_code" in expected["vector"]
    assert "exp_avg_code" not in expected["row"]
    assert run(3, names_of_states) == [expected] * 3


def save(case, folder):
    """Three steps, a checkpoint, and two more steps."""
    net, optimizer = sharded(case)
    take_steps(net, optimizer, range(3))
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder)
    take_steps(net, optimizer, range(3, 5))
    return everything(net, optimizer)


def resume(case, folder):
    net, optimizer = sharded(case)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
    take_steps(net, optimizer, range(3, 5))
    return everything(net, optimizer)


@pytest.mark.parametrize("case", [*EXACT[:2], EXACT[3], ROUNDED[0]], ids=str)
def test_resuming_on_other_ranks(case, tmp_path):
    went_on = run(2, save, case, tmp_path)
    for got, expected in zip(run(2, resume, case, tmp_path), went_on, strict=True):
        same(got, expected)
    for ranks in (1, 4):
        for got in run(ranks, resume, case, tmp_path):
            if case in EXACT:
                same(got, went_on[0])
            else:
                close(parameters_of(got), parameters_of(went_on[0]), 0.02)


def test_resuming_in_another_form(tmp_path):
    """8-bit states and remainders become fp32 ones, and the other way round."""
    forms = ROUNDED[0], Case("adamw", {"amsgrad": True}, BF16, None, "fp32")
    for number, (before, after) in enumerate((forms, forms[::-1])):
        (expected, *_) = run(2, save, before, tmp_path / str(number))
        for got in run(3, resume, after, tmp_path / str(number)):
            close(parameters_of(got), parameters_of(expected), 0.02)


FULL = StateDictOptions(full_state_dict=True)


def through_full(case):
    """From shards to an unsharded optimizer and back to shards, by checkpoints of all elements."""
    net, optimizer = sharded(case)
    take_steps(net, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=FULL))
    plain = Net(case.dtype)
    copy_parameters(plain, map(whole, net.parameters()))
    plain_optimizer = case.make(plain.parameters())
    set_optimizer_state_dict(plain, plain_optimizer, copy.deepcopy(saved))
    again, again_optimizer = sharded(case)
    copy_parameters(again, net.parameters())
    set_optimizer_state_dict(again, again_optimizer, saved, options=FULL)
    third, third_optimizer = sharded(case)
    copy_parameters(third, net.parameters())
    third_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    pairs = (
        (net, optimizer),
        (again, again_optimizer),
        (plain, plain_optimizer),
        (third, third_optimizer),
    )
    for pair in pairs:
        take_steps(*pair, range(3, 5))
    return [everything(*pair) for pair in pairs]


@pytest.mark.parametrize("case", [*EXACT[:2], ROUNDED[0]], ids=str)
def test_checkpoints_of_all_elements(case):
    for went_on, again, plain, third in run(3, through_full, case):
        same(again, went_on)
        if case in EXACT:
            same(plain, went_on)
            same(third, went_on)
        else:
            close(parameters_of(plain), parameters_of(went_on), 0.02)
            close(parameters_of(third), parameters_of(went_on), 0.02)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flattened(case):
    net, optimizer = sharded(case)
    take_steps(net, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=FLAT))
    other, fresh = sharded(case)
    if case.states == "8bit":
        with pytest.raises(ValueError, match="must have exp_avg_code if it is flattened"):
            set_optimizer_state_dict(other, fresh, saved, options=FLAT)
        return
    set_optimizer_state_dict(other, fresh, saved, options=FLAT)
    copy_parameters(other, net.parameters())
    for pair in ((net, optimizer), (other, fresh)):
        take_steps(*pair, range(2, 3))
    same(everything(other, fresh), everything(net, optimizer))


@pytest.mark.parametrize("case", [EXACT[0], EXACT[2], ROUNDED[0]], ids=str)
def test_flattened_checkpoints(case):
    run(2, flattened, case)


def without_gradient(folder):
    """A parameter that has had none is saved and loaded, too, by sharded_state_dict()."""
    net, optimizer = sharded(EXACT[0])
    give_gradients(net, 0)
    net.cube.grad = None
    optimizer.step()
    dcp.save({"optimizer": optimizer.sharded_state_dict(net)}, checkpoint_id=folder)
    other, fresh = sharded(EXACT[0])
    state = {"optimizer": fresh.sharded_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    copy_parameters(other, net.parameters())
    for pair in ((net, optimizer), (other, fresh)):
        take_steps(*pair, range(1, 3))
    same(everything(other, fresh), everything(net, optimizer))


def test_parameters_without_a_gradient(tmp_path):
    run(2, without_gradient, tmp_path)


def in_torchs_form():
    """torch's AdamW goes on with the checkpoint, and pycomm with one of torch."""
    net, optimizer = sharded(Case("adamw"))
    take_steps(net, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict(format="torch"))
    peer_net, _ = sharded(Case("adamw"))
    peer = torch.optim.AdamW(peer_net.parameters(), lr=1e-2, weight_decay=0.1)
    copy_parameters(peer_net, net.parameters())
    peer.load_state_dict(saved)
    take_steps(net, optimizer, range(3, 4))
    take_steps(peer_net, peer, range(3, 4))
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    take_steps(net, optimizer, range(4, 5))
    take_steps(peer_net, peer, range(4, 5))
    return [[whole(param) for param in each.parameters()] for each in (net, peer_net)]


def test_torchs_checkpoints():
    for ours, theirs in run(2, in_torchs_form):
        for got, right in zip(ours, theirs, strict=True):
            assert torch.allclose(got, right, rtol=1e-5, atol=1e-6)


def reported():
    net, optimizer = sharded(ROUNDED[0])
    take_steps(net, optimizer, range(1))
    values = [value for state in optimizer.state.values() for value in state.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    report = pycomm.memory_report(net, optimizer)
    held = report.bytes["states"] + report.bytes["master weights"]
    return held, sum(value.nbytes for value in local)


def test_memory_report_counts_local_tensors():
    for held, expected in run(2, reported):
        assert held == expected


# Errors.


def refused():
    mesh = line()
    other_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))

    def made(placements, on=mesh):
        return nn.Parameter(distribute_tensor(torch.ones(8, 8), on, placements))

    partial = nn.Parameter(DTensor.from_local(torch.ones(8, 8), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match=r"FusedSGD takes DTensors that are Shard or Replicate"):
        optim.FusedSGD([partial])
    on_meta = nn.Parameter(torch.empty_like(made([Shard(0)]), device="meta"))
    with pytest.raises(ValueError, match="FusedLAMB needs the norm of each whole parameter"):
        optim.FusedLAMB([on_meta])
    param = made([Replicate()])
    param.grad = placed(torch.ones(8, 8), param)
    optim.FusedLAMB([param]).step()
    with pytest.raises(TypeError, match="FusedSGD takes float32, float16 and bfloat16"):
        optim.FusedSGD([nn.Parameter(made([Shard(0)]).double())])
    param = made([Shard(0)])
    optimizer = optim.FusedSGD([param], lr=1.0)
    param.grad = placed(torch.ones(8, 8), made([Replicate(), Shard(0)], other_mesh))
    with pytest.raises(ValueError, match="needs a gradient on the same mesh"):
        optimizer.step()
    assert torch.equal(whole(param), torch.ones(8, 8))
    # States.
    adam = optim.FusedAdamW([param], lr=1e-3)
    param.grad = placed(torch.ones(8, 8), param)
    adam.step()
    plain = optim.FusedAdamW([nn.Parameter(torch.ones(8, 8))], lr=1e-3)
    with pytest.raises(ValueError, match="exp_avg is a DTensor, but its parameter of shape"):
        plain.load_state_dict(copy.deepcopy(adam.state_dict()))
    saved = adam.state_dict()
    saved["state"][0]["exp_avg_code"] = torch.zeros(8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="one form of each state, got exp_avg and exp_avg_code"):
        adam.load_state_dict(saved)
    adam.state[param]["exp_avg"] = torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"exp_avg must have the shape of its parameter, \(8, 8\)"):
        adam.step()
    elsewhere = made([Replicate(), Shard(0)], other_mesh)
    adam.state[param]["exp_avg"] = elsewhere.detach()
    with pytest.raises(ValueError, match="exp_avg must be on its parameter's mesh"):
        adam.step()


def test_refusals():
    run(2, refused)


def beside_a_wrapper(group):
    model = pycomm.DataParallel(nn.Linear(4, 4), shard="optimizer", group=group)
    param = nn.Parameter(distribute_tensor(torch.ones(4), line(), [Shard(0)]))
    optimizer = optim.FusedSGD([*model.parameters(), param], lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"takes parameters of one wrapper .* got DTensors, too"):
        optimizer.step()


def test_dtensors_beside_a_sharding_wrapper():
    helpers.run_group(2, beside_a_wrapper)


@pytest.mark.slow
def test_dtensor_is_not_imported_without_one():
    code = """
import sys, torch, pycomm
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
pycomm.optim.FusedAdamW([param], max_norm=1.0).step()
print("pycomm.optim._dtensor" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    got = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert got.stdout.split() == ["False"]
