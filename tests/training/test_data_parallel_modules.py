"""pycomm.DataParallel around modules of many kinds; gradients are torch's mean in rank order."""

import collections
import copy
import dataclasses
import io

import ddp
import golden
import helpers
import pytest
import torch
import wrapped
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from wrapped import TINY
from wrapping import data_parallel

import pycomm


def compare(group, make, loss, wrap=None, steps=3, **options):
    """Some steps of the wrapped module beside the plain one; returns the wrapper."""
    model, alone = data_parallel(make(), bucket_cap_mb=TINY, **options), make()
    run = wrap(model) if wrap else model
    for step in range(steps):
        model.zero_grad(set_to_none=step != 1)
        loss(run, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, loss)
        got = wrapped.gradients_of(model)
        assert wrapped.same(got, zeros_for_none(expected, got) if step == 1 else expected)
        assert model.comm_state.step == step + 1
    return model


def zeros_for_none(expected, got):
    """Gradients that were kept as zeros stay zeros if no rank used the parameter."""
    return {n: got[n] * 0 if g is None and got[n] is not None else g for n, g in expected.items()}


def inputs(rank, step):
    return ddp.batch(rank, step).requires_grad_()


class Checkpointed(nn.Module):
    """Segments that run again in backward; `pack` makes the output of the last."""

    def __init__(self, reentrant=False, pack=None):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.reentrant, self.pack = reentrant, pack or (lambda x: x)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self.reentrant)
        return self.pack(x)


@dataclasses.dataclass
class Output:
    hidden: list
    name: str = "of the model"


class Plain:
    """Knows nothing of containers; refers to itself, and to more than outputs."""

    def __init__(self, hidden):
        self.hidden, self.me, self.kind = [hidden], self, Plain


class Slotted:
    __slots__ = ("hidden", "unset")

    def __init__(self, hidden):
        self.hidden = hidden


PACKS = {
    "tensor": (lambda x: x, lambda out: out),
    "dict": (lambda x: {"loss": [x, 3]}, lambda out: out["loss"][0]),
    "tuple": (lambda x: (None, "text", x), lambda out: out[2]),
    "ordered dict": (lambda x: collections.OrderedDict(a=x), lambda out: out["a"]),
    "dataclass": (lambda x: Output([x]), lambda out: out.hidden[0]),
    "dataclasses in a dict": (lambda x: {"a": Output([Output([x])])},
                              lambda out: out["a"].hidden[0].hidden[0]),
    "plain object": (Plain, lambda out: out.hidden[0]),
    "slots": (lambda x: Plain(Slotted(x)), lambda out: out.hidden[0].hidden),
}  # fmt: skip


def checkpointed(group):
    for reentrant in (False, True):
        for pack, unpack in PACKS.values():

            def loss(module, rank, step, unpack=unpack):
                return unpack(module(inputs(rank, step))).square().mean()

            compare(group, lambda r=reentrant, p=pack: Checkpointed(r, p), loss, steps=2)


def inside_a_checkpoint(group):
    """The wrapper itself runs again in backward."""
    for reentrant in (False, True):

        def loss(module, rank, step, reentrant=reentrant):
            x = checkpoint(module, inputs(rank, step), use_reentrant=reentrant)
            return x.square().mean()

        compare(group, ddp.network, loss)
        compare(group, with_batch_norm, loss)


def with_batch_norm():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def shared(times, module=None):
    """Reentrant checkpoints, of which several hold the same layer."""
    module = module or Checkpointed(reentrant=True)
    first, second = module.layers[0], module.layers[1]
    module.layers = nn.ModuleList([second, first] + [second] * (times - 1))
    return module


def shared_among_reentrant_checkpoints(group):
    """Its gradient comes several times; it is sent after the last time, from the first step on."""

    def loss(module, rank, step):
        return module(inputs(rank, step)).square().mean()

    model = compare(group, lambda: shared(3), loss, steps=4)
    assert model._exchange._buckets[-1].parameters[0] is model.module.layers[0].weight


def more_often_in_later_steps(group):
    """A parameter that would be sent before its last gradient is refused; the wrapper goes on."""
    model = pycomm.DataParallel(shared(1), bucket_cap_mb=TINY)
    model(inputs(group.rank, 0)).sum().backward()
    shared(2, model.module)
    model.module.layers[0], model.module.layers[1] = model.module.layers[1], model.module.layers[0]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(inputs(group.rank, 0)).sum().backward()
    model.module.reentrant = False
    model.zero_grad()
    wrapped.batch_loss(model, group.rank, 1).backward()
    expected = wrapped.mean_gradients(copy.deepcopy(model.module), group.size, 1)
    assert wrapped.same(wrapped.gradients_of(model), expected)


class Odd(nn.Module):
    """Tied, frozen, never used, empty and scalar parameters, and convolutions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.convolution = nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.doubles = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(5, 8).t())

    def forward(self, x):
        x = x.view(-1, 2, 4, 5).to(memory_format=torch.channels_last)
        x = self.convolution(x).mean((2, 3))
        x = self.frozen(self.tied(self.inner(x).relu())) * self.scalar + self.empty.sum()
        return (x.double() * self.doubles) @ self.transposed.double()


def odd_parameters(group):
    for compression in (None, pycomm.Identity()):
        model = compare(group, Odd, wrapped.batch_loss, compression=compression)
    module = model.module
    assert module.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert module.transposed.grad.stride() == module.transposed.stride()
    assert module.never.weight.grad is None
    assert module.frozen.weight.grad is None


def residuals_in_a_memory_format(group):
    """Element by element, the inputs equal the applied values plus those still waiting."""
    torch.manual_seed(9)
    convolution = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    model = pycomm.DataParallel(convolution, compression=pycomm.TopK(0.1))
    factor = torch.randn(32, 16, 3, 3)
    given, applied = torch.zeros_like(factor), torch.zeros_like(factor)
    for step in range(3):
        model.zero_grad()
        x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(step))
        factors = [x[0].mean(), x[1].mean()]
        ((factor * model.module.weight).sum() * factors[group.rank] + 0 * model(x).sum()).backward()
        given += factor * sum(factors)
        applied += model.module.weight.grad
    waiting = model.comm_state.residual("weight").clone()
    pycomm.all_reduce(waiting, group=group)
    torch.testing.assert_close(2 * applied + waiting, given, rtol=1e-5, atol=1e-5)
    saved = model.comm_state.state_dict()
    other = pycomm.DataParallel(nn.Conv2d(16, 32, 3), compression=pycomm.TopK(0.1))
    other.comm_state.load_state_dict(saved)
    residuals = [one.comm_state.residual("weight") for one in (model, other)]
    assert torch.equal(*residuals)


def many_buckets(group):
    def make():
        torch.manual_seed(7)
        return nn.Sequential(*[nn.Linear(40, 40) for _ in range(60)])

    model = compare(group, make, wrapped.batch_loss)
    assert len(model._exchange._buckets) == 120


def mixed_precision(group):
    """Autocast to bf16, and a scaler, which finds an infinity on any rank."""

    def loss(module, rank, step):
        with torch.autocast("cpu", torch.bfloat16):
            return module(ddp.batch(rank, step)).float().square().mean()

    compare(group, ddp.network, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    options = {"compression": pycomm.Int8(), "grad_scaler": scaler}
    model = data_parallel(ddp.network(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        before = wrapped.parameters_of(model)
        residual = model.comm_state.residual("0.weight").clone()
        optimizer.zero_grad()
        factor = torch.inf if (step, group.rank) == (2, 1) else 1.0
        scaler.scale(factor * loss(model, group.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = golden.same_bits(before["0.weight"], model.module[0].weight)
        assert skipped == (step == 2)
        kept = golden.same_bits(residual, model.comm_state.residual("0.weight"))
        assert kept == skipped
    assert scaler.get_scale() == 2.0**7


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "body",
    [
        checkpointed,
        inside_a_checkpoint,
        shared_among_reentrant_checkpoints,
        more_often_in_later_steps,
        odd_parameters,
        residuals_in_a_memory_format,
        many_buckets,
        mixed_precision,
    ],
)
def test_gradients_are_right_in(body):
    helpers.run_group(2, body)


def compiled(group):
    """The module, the wrapper, and functions that call it or run backward, too; graphs of each."""

    def compile_it(function):
        torch._dynamo.reset()
        counters.append(CompileCounterWithBackend("aot_eager"))
        return torch.compile(function, backend=counters[-1])

    def called(model):
        return compile_it(lambda x: model(x))

    counters = []
    compare(group, lambda: compile_it(ddp.network()), wrapped.batch_loss, steps=2)
    compare(group, ddp.network, wrapped.batch_loss, wrap=compile_it, steps=2)
    compare(group, with_batch_norm, wrapped.batch_loss, wrap=called, steps=2)
    graphs = [counter.frame_count for counter in counters]
    model = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY)
    step = compile_it(lambda x: model(x).sum().backward())
    step(ddp.batch(group.rank, 0))
    expected = wrapped.mean_gradients(ddp.network(), 2, 0, lambda m, r, s: m(ddp.batch(r, s)).sum())
    assert wrapped.same(wrapped.gradients_of(model), expected)
    return graphs


@pytest.mark.slow
def test_compiled():
    """The model is one graph: the wrapper's work before and after it is not compiled."""
    for graphs in helpers.run_group(2, compiled):
        assert set(graphs) == {1}


def with_buffers(group, broadcast_buffers):
    """The model's initial state, and its buffers in every forward."""
    torch.manual_seed(group.rank)
    module = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    module.register_buffer("flags", torch.tensor([True, group.rank == 0]))
    module.register_buffer("none", torch.empty(0))
    module.register_buffer("step", torch.tensor(group.rank))
    model = pycomm.DataParallel(module, broadcast_buffers=broadcast_buffers)
    seen = [copy.deepcopy(model.state_dict())]
    module.register_forward_pre_hook(
        lambda m, _: seen.append(copy.deepcopy(dict(m.named_buffers())))
    )
    for step in range(3):
        first, second = (wrapped.batch_loss(model, group.rank, i) for i in (step, step + 5))
        (first + second).backward()  # with buffers that have changed since the first forward
    return seen


def test_everyone_has_the_first_ranks_parameters_and_buffers():
    """Buffers before the first forward of each backward, unless told not to."""
    for broadcast_buffers in (True, False):
        runs = helpers.run_group(2, with_buffers, broadcast_buffers)
        same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(*runs, strict=True)]
        expected = [True] + [True, False] * 3 if broadcast_buffers else [True, True] + [False] * 5
        assert same == expected


def evaluating_alone(group):
    """Without gradients, any rank can run a forward alone; in eval mode there is an exchange."""
    model, alone = pycomm.DataParallel(with_batch_norm(), bucket_cap_mb=TINY), with_batch_norm()
    if group.rank == 1:
        with torch.no_grad():
            wrapped.batch_loss(model.eval(), 1, 0)
        with torch.inference_mode():
            wrapped.batch_loss(model, 1, 0)
    wrapped.batch_loss(model.eval(), group.rank, 0).backward()
    expected = wrapped.mean_gradients(alone.eval(), group.size, 0)
    assert wrapped.same(wrapped.gradients_of(model), expected)


def test_a_rank_may_evaluate_alone():
    helpers.run_group(2, evaluating_alone)


class Parent(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(40, 40)
        self.module = wrap(with_batch_norm())

    def forward(self, x):
        return self.module(self.first(x))


def transparent(group):
    def wrap(module):
        return pycomm.DataParallel(module, group=group)

    for make in (lambda w: w(with_batch_norm()), lambda w: w(Parent(w)), Parent):
        plain, model = make(lambda module: module), make(wrap)
        assert list(plain.state_dict()) == list(model.state_dict())
        for other in (plain, model):
            for tensor in other.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape))
            file = io.BytesIO()
            torch.save(other.state_dict(), file)
            file.seek(0)
            saved = torch.load(file)
            target = model if other is plain else plain
            result = target.load_state_dict(saved)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert all(torch.equal(target.state_dict()[n], t) for n, t in saved.items())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**saved, "more": torch.ones(1)})
        result = model.load_state_dict({**saved, "more": torch.ones(1)}, strict=False)
        assert result.unexpected_keys == ["more"]


def test_state_dicts_are_the_modules_own(world):
    world(2).run(transparent)


def test_a_scripted_module(world):
    # Here, because threads cannot script at the same time.
    modules = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))) for _ in range(2)]

    def body(group):
        module = modules[group.rank]
        model = pycomm.DataParallel(module, group=group)
        model(torch.full((2, 4), group.rank + 1.0)).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    one, other = world(2).run(body)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(world, make):
    (group,) = world(1)
    module = nn.Sequential(make(4, 4, sparse=True))
    with pytest.raises(ValueError, match=r"sparse=True for 0\.weight"):
        pycomm.DataParallel(module, group=group)
    module.requires_grad_(False)
    pycomm.DataParallel(nn.Sequential(module, nn.Linear(4, 4)), group=group)


def test_a_module_with_names_of_torch_s_options(world):
    """`max_norm` and `sparse` say something of embeddings only."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.max_norm, self.sparse = nn.Linear(4, 4), 1.0, True

        def forward(self, batch):
            return self.net(batch)

    (group,) = world(1)
    pycomm.DataParallel(Named(), group=group)(torch.ones(2, 4)).sum().backward()


def test_statistics_of_a_module_that_is_a_normalisation_are_updated(world):
    (group,) = world(1)
    batches = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    module, alone = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    update_bn(batches, pycomm.DataParallel(module, group=group))
    update_bn(batches, alone)
    assert torch.equal(module.running_mean, alone.running_mean)
    assert module.num_batches_tracked == 3


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))])
def test_modules_of_a_wrapper_are_itself_and_the_modules_own(world, make):
    (group,) = world(1)
    module = make()
    model = pycomm.DataParallel(module, group=group)
    assert list(model.modules()) == [model, *module.modules()]
