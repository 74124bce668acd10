"""FSDP2 with pycomm's all-gather and reduce-scatter, uncompressed and compressed."""

from pathlib import Path

import backends
import helpers
import numpy as np
import pytest
import sweep
import torch
import torch.distributed as dist
from composing import make_net, mean_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import pycomm

WIDTH = 64
INT8 = pycomm.Int8()
CAST = pycomm.Cast()


def int8_bits(x, block=256):
    """The codec of docs/reference/wire-format.md in NumPy."""
    x = x.float().numpy()
    padded = np.zeros(-(-x.size // block) * block, np.float32)
    padded[: x.size] = x
    blocks = padded.reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = largest / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        integers = np.where(scale == 0, 0, np.rint(blocks * (np.float32(127) / largest)))
    return torch.from_numpy((integers.astype(np.float32) * scale).reshape(-1)[: x.size])


def bfloat16_bits(x):
    return x.bfloat16().float()


DECODED = {"int8": int8_bits, "cast": bfloat16_bits, "none": lambda x: x.float()}
COMPRESSIONS = {"int8": INT8, "cast": CAST, "none": None}


def block_of(rank, index, n, dtype):
    generator = torch.Generator().manual_seed(100 * rank + index)
    scales = torch.randn(n, generator=generator).exp()
    return (scales * torch.randn(n, generator=generator)).to(dtype)


def gathered(rank, size, name, n, dtype, async_op):
    from pycomm.fsdp import AllGather

    gather = AllGather(dist.group.WORLD, COMPRESSIONS[name])
    output = gather.allocate((n * size,), dtype=dtype, device=torch.device("cpu"))
    mine = output[rank * n : (rank + 1) * n].copy_(block_of(rank, 0, n, dtype))  # as FSDP does
    work = gather(output, mine, dist.group.WORLD, async_op=async_op)
    assert (work is not None) == async_op
    if async_op:
        work.wait()
    return output


SIZES = [1, 255, 70_001]
OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_all_gather(name, async_op):
    """Every rank decodes every block, its own included, to the same bits."""
    for n, dtype in zip(SIZES, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        blocks = [DECODED[name](block_of(r, 0, n, dtype)).to(dtype) for r in range(3)]
        for output in backends.run(3, gathered, name, n, dtype, async_op):
            assert torch.equal(output, torch.cat(blocks))


def scattered(rank, size, name, n, dtype, op, async_op):
    from pycomm.fsdp import ReduceScatter

    scatter = ReduceScatter(dist.group.WORLD, COMPRESSIONS[name])
    device = torch.device("cpu")
    whole = scatter.allocate((n * size,), dtype=dtype, device=device)
    whole.copy_(torch.cat([block_of(rank, i, n, dtype) for i in range(size)]))
    output = scatter.allocate((n,), dtype=dtype, device=device)
    work = scatter(output, whole, dist.group.WORLD, op, async_op=async_op)
    if async_op:
        work.wait()
    return output


@pytest.mark.parametrize(
    ("name", "op", "async_op"), sweep.a_third_of(COMPRESSIONS, OPS, [False, True])
)
def test_reduce_scatter(name, op, async_op):
    """The decoded contributions, added in rank order in fp32 and rounded once."""
    for n, dtype in zip(SIZES, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        outputs = backends.run(3, scattered, name, n, dtype, OPS[op], async_op)
        for index, output in enumerate(outputs):
            total = torch.zeros(n)
            for r in range(3):
                total += DECODED[name](block_of(r, index, n, dtype))
            expected = total / 3 if op == "avg" else total
            assert torch.equal(output, expected.to(dtype))


def replace(net, group, name):
    """Sets pycomm's objects on every module that FSDP manages."""
    from pycomm.fsdp import AllGather, ReduceScatter

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather(group, COMPRESSIONS[name]))
            module.set_custom_reduce_scatter(ReduceScatter(group, COMPRESSIONS[name]))


def trained(rank, size, name, mesh_shape, policy, steps=30, prepare=None):
    """Losses and final parameters; `name` is None for FSDP's own operations."""
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :]
    )
    net = make_net(2, WIDTH)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if name is not None:
        replace(net, mesh["shard"], name)
    if prepare is not None:
        prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / 8
    losses = []
    for step in range(steps):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(size * step + rank))
        loss = (net(x).float() - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
    return losses, [p.full_tensor().detach() for p in net.parameters()]


FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def same(results, others):
    for (losses, params), (other_losses, other_params) in zip(results, others, strict=True):
        assert losses == other_losses
        assert all(map(torch.equal, params, other_params))


KINDS = pytest.mark.parametrize(
    ("mesh_shape", "policy"), [((2,), BF16), ((2, 2), FP32)], ids=["fsdp-bf16", "hsdp-fp32"]
)


@KINDS
def test_uncompressed_training_has_the_same_bits(mesh_shape, policy):
    size = 2 * len(mesh_shape)
    default = backends.run(size, trained, None, mesh_shape, policy, 5)
    same(default, backends.run(size, trained, "none", mesh_shape, policy, 5))


@pytest.mark.slow
@KINDS
def test_int8_training_converges(mesh_shape, policy):
    """All ranks have the same parameters, and losses are about those without compression."""
    size = 2 * len(mesh_shape)
    (dense, _), *_ = backends.run(size, trained, None, mesh_shape, policy)
    coded = backends.run(size, trained, "int8", mesh_shape, policy)
    same(coded, [coded[0]] * size)
    losses, _ = coded[0]
    assert losses != dense
    assert losses == pytest.approx(dense, rel=0.01)
    assert losses[-1] < 0.5 * losses[0]


def prefetching(net):
    for module in (*net, net):
        module.unshard(async_op=True)  # FSDP waits for the Work in the first forward


def dividing(net):
    for module in (*net, net):
        module.set_gradient_divide_factor(2)
        module.set_force_sum_reduction_for_comms(True)


@pytest.mark.parametrize("prepare", [prefetching, dividing])
def test_options_of_fsdp_do_not_change_int8(prepare):
    """Dividing by 2 is exact, so the place does not matter."""
    expected = backends.run(2, trained, "int8", (2,), FP32, 4)
    same(expected, backends.run(2, trained, "int8", (2,), FP32, 4, prepare))


def on_gloo(rank, size, store, name):
    backends.join(rank, size, store, "gloo")
    result = trained(rank, size, name, (2,), FP32, 4)
    dist.destroy_process_group()
    return result


def test_int8_over_gloo_gives_the_same_bits():
    same(backends.run(2, trained, "int8", (2,), FP32, 4), helpers.run_ranks(2, on_gloo, "int8"))


def counted(rank, size, name):
    """The bytes that a rank sends in one step, and what FSDP's own operations would send."""
    from pycomm import fsdp

    sent = []

    def counting(operation, tensor_index, copies):
        def run(*args, **options):
            sent.append(args[tensor_index].nbytes * copies)
            return operation(*args, **options)

        return run

    fsdp._all_gather = counting(fsdp._all_gather, 1, size - 1)
    fsdp._reduce_scatter = counting(fsdp._reduce_scatter, 1, (size - 1) / size)
    dist.all_to_all_single = counting(dist.all_to_all_single, 1, (size - 1) / size)
    trained(rank, size, name, (size,), FP32, 1)
    return sum(sent)


def test_int8_sends_a_quarter():
    dense = backends.run(3, counted, "none")
    int8 = backends.run(3, counted, "int8")
    for before, after in zip(dense, int8, strict=True):
        assert 3.8 < before / after < 4


def with_errors(rank, _size):
    from pycomm.fsdp import AllGather, ReduceScatter

    group = dist.group.WORLD
    pair = dist.new_group([0, 1])
    for bad, error, words in [
        ((None,), TypeError, "must be FSDP's process group"),
        ((pycomm.default_group(),), TypeError, "must be a torch.distributed process group"),
        ((group, "int8"), TypeError, "must be pycomm.Int8"),
        ((group, pycomm.TopK(density=0.01)), TypeError, "without a residual"),
        ((group, pycomm.Int8(rounding="stochastic")), ValueError, "random bits are made"),
        ((dist.new_group(backend="gloo"),), ValueError, "must be on the backend pycomm"),
    ]:
        for kind in (AllGather, ReduceScatter):
            with pytest.raises(error, match=words):
                kind(*bad)
    x, y = torch.zeros(12), torch.zeros(4)
    gather, scatter = AllGather(group, INT8), ReduceScatter(group, INT8)
    doubles, average = (y.double(), x.double()), dist.ReduceOp.AVG
    for words, call in [
        ("output_tensor must have 3 times 4", lambda: gather(x[:11], y, group)),
        ("input_tensor must have 3 times 4", lambda: scatter(y, x[:11], group, average)),
        ("must have one dtype", lambda: gather(x.byte(), y.byte(), group)),
        ("must have one of the dtypes", lambda: scatter(*doubles, group, average)),
        ("op must be one of sum, avg", lambda: scatter(y, x, group, dist.ReduceOp.MAX)),
        (r"has ranks \[0, 1\], got one of ranks \[0, 1, 2\]", lambda: gather(x[:8], y, pair)),
    ]:
        if rank < 2 or "ranks" not in words:
            with pytest.raises(ValueError, match=words):
                call()
    if rank < 2:
        AllGather(pair, INT8)(
            torch.empty(8), y, dist.new_group([0, 1], use_local_synchronization=True)
        )


def test_errors():
    backends.run(3, with_errors)


def overflowing(rank, size):
    from pycomm.fsdp import ReduceScatter

    x = torch.ones(size * 600)
    if rank == 1:
        x[300] = float("inf")
    output = torch.empty(600)
    ReduceScatter(dist.group.WORLD, INT8)(output, x, dist.group.WORLD, dist.ReduceOp.AVG)
    return output.isnan().nonzero().flatten().tolist()


def test_infinities_reach_the_owner():
    """The owner gets NaN in the whole block of 256."""
    assert backends.run(2, overflowing) == [list(range(256, 512)), []]


def shared(tensor):
    """True if other processes can map the tensor's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= tensor.data_ptr() < end:
            return permissions.endswith("s")
    raise AssertionError("the memory is not mapped")


def in_window(_rank, _size):
    from pycomm import fsdp

    device, group = torch.device("cpu"), dist.group.WORLD
    buffers = [
        kind(group, compression).allocate((10,), dtype=torch.float32, device=device)
        for kind in (fsdp.AllGather, fsdp.ReduceScatter)
        for compression in (None, INT8)
    ]
    exchanged = []
    all_to_all = dist.all_to_all_single

    def watched(*tensors, **options):
        exchanged.extend(tensors)
        return all_to_all(*tensors, **options)

    dist.all_to_all_single = watched
    fsdp.ReduceScatter(group, INT8)(torch.empty(2), torch.empty(4), group, dist.ReduceOp.SUM)
    return [*map(shared, buffers), *map(shared, exchanged)]


def test_what_is_exchanged_lies_in_the_window():
    assert backends.run(2, in_window) == [[True, False, True, False, True, True]] * 2


def taken(rank, size):
    """Checks when memory is used again, and that training keeps a bounded number of buffers."""
    from pycomm.fsdp import buffers_of

    group = dist.group.WORLD
    buffers = buffers_of(group)
    first = buffers.take(group, 1000, torch.float32)
    view, address = first[10:20], first.data_ptr()
    del first
    other = buffers.take(group, 1000, torch.float32)
    assert other.data_ptr() != address  # a view still uses it
    del view
    assert buffers.take(group, 600, torch.bfloat16).data_ptr() != address  # less than half
    assert buffers.take(group, 1200, torch.bfloat16).data_ptr() == address
    with torch.inference_mode():
        made = buffers.take(group, 50_000, torch.float32)
    address = made.data_ptr()
    del made
    again = buffers.take(group, 50_000, torch.float32).zero_()
    assert again.data_ptr() == address
    assert buffers.take(group, 0, torch.float32).numel() == 0
    kept = []
    for _ in range(3):
        trained(rank, size, "int8", (size,), FP32, 3)
        kept.append(len(buffers._kept))
    return kept[0] < 20, kept[2] == kept[1]


def test_buffers_are_used_again():
    assert backends.run(2, taken) == [(True, True)] * 2
