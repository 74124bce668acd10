"""Differentiable operations of torch.ops.pycomm, and the same in one process."""

import torch

OPS = torch.ops.pycomm
WIDTH = 3


def mean(tensors):
    return sum(tensors) / len(tensors)


def every(value, tensors):
    return [value] * len(tensors)


# An operator on a rank, and the same function of all ranks' inputs in one process.
OPERATORS = {
    "all_reduce sum": (
        lambda x, group: OPS.all_reduce(x, "sum", "ring", group.name),
        lambda xs: every(sum(xs), xs),
    ),
    "all_reduce avg": (
        lambda x, group: OPS.all_reduce(x, "avg", "auto", group.name),
        lambda xs: every(mean(xs), xs),
    ),
    "reduce": (
        lambda x, group: OPS.reduce(x, group.size - 1, group.name),
        lambda xs: [torch.zeros_like(x) for x in xs[:-1]] + [sum(xs)],
    ),
    "reduce_scatter sum": (
        lambda x, group: OPS.reduce_scatter(x, "sum", group.size, group.name),
        lambda xs: list(sum(xs).chunk(len(xs))),
    ),
    "reduce_scatter avg": (
        lambda x, group: OPS.reduce_scatter(x, "avg", group.size, group.name),
        lambda xs: list(mean(xs).chunk(len(xs))),
    ),
    "all_gather": (
        lambda x, group: OPS.all_gather(x, group.size, group.name),
        lambda xs: every(torch.cat(xs), xs),
    ),
    "all_to_all": (
        lambda x, group: OPS.all_to_all(x, group.name),
        lambda xs: [torch.cat(b) for b in zip(*(x.chunk(len(xs)) for x in xs), strict=True)],
    ),
    "broadcast": (
        lambda x, group: OPS.broadcast(x, group.size - 1, group.name),
        lambda xs: every(xs[-1], xs),
    ),
}


def data(rank, size):
    """A rank's input; its first dimension has a block for every rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 * size, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(y, rank):
    """Differs from rank to rank, and has a second derivative."""
    weight = torch.linspace(0.1, 1, y.numel(), dtype=y.dtype, device=y.device)
    return ((weight.view(y.shape) + rank) * y).sin().sum()


def derivatives(loss, inputs):
    """First derivatives, and the derivatives of the sum of their squares."""
    first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
    squares = sum((g * g).sum() for g in first)
    second = torch.autograd.grad(squares, inputs, materialize_grads=True)
    return [g.detach() for g in first], second


def reference(function, size):
    """All ranks' derivatives, in one process."""
    xs = [data(rank, size).requires_grad_() for rank in range(size)]
    ys = function(xs)
    return derivatives(sum(loss_of(y, rank) for rank, y in enumerate(ys)), xs)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def layer(x, weight, rank, group):
    """Sequence-parallel: gathered, a part of the sum per rank, scattered; then all others."""
    name, size = group.name, group.size
    gathered = OPS.all_gather(x, size, name) @ weight
    mine = OPS.all_to_all(OPS.reduce_scatter(gathered.tanh(), "avg", size, name), name)
    scale = OPS.all_reduce((mine * mine).sum(), "sum", "auto", name)
    shared = OPS.broadcast(weight.sum(0), size - 1, name)
    return loss_of(OPS.reduce(mine / scale + shared, 0, name) + mine, rank)


def layer_alone(xs, weights):
    gathered = torch.cat(xs)
    blocks = mean([(gathered @ w).tanh() for w in weights]).chunk(len(xs))
    mine = OPERATORS["all_to_all"][1](blocks)
    scale = sum((m * m).sum() for m in mine)
    shared = weights[-1].sum(0)
    reduced = sum(m / scale + shared for m in mine)
    return sum(loss_of(m + reduced if rank == 0 else m, rank) for rank, m in enumerate(mine))


def weight_of(rank):
    return data(10 + rank, WIDTH)[:WIDTH].clone()


def gradients(group, backend, device="cpu"):
    """This rank's gradients of :func:`layer`, compiled if there is a backend."""
    x, weight = (t.to(device) for t in (data(group.rank, group.size), weight_of(group.rank)))
    x.requires_grad_()
    weight.requires_grad_()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        x.grad = weight.grad = None
        run(x, weight, torch.tensor(group.rank), group).backward()
    return x.grad.cpu(), weight.grad.cpu()


def expected_gradients(size):
    """All ranks' :func:`gradients`, in one process."""
    xs = [data(rank, size).requires_grad_() for rank in range(size)]
    weights = [weight_of(rank).requires_grad_() for rank in range(size)]
    layer_alone(xs, weights).backward()
    return [(x.grad, weight.grad) for x, weight in zip(xs, weights, strict=True)]
