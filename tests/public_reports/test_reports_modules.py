"""Reports about modules that change, share, skip or reorder their parts; see README.md."""

import habits
import pytest
import torch
from habits import MODES, assert_alike, batch, filled, loss_of, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm

UNCOMPRESSED = ["plain", "optimizer", "gradients"]


def train(model, optimizer, loss, ranks, steps=range(3), after=None):
    """On the mean of these ranks' losses."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (loss(model, rank, step) / len(ranks)).backward()
        optimizer.step()
        if after is not None:
            after(step)


def compare(world, make, loss, mode):
    """The wrapper beside plain torch."""
    wanted = make()
    train(wanted, habits.optimizer_for(wanted), loss, [0, 1])

    def body(group):
        model = habits.wrap(make(), group, mode)
        train(model, habits.optimizer_for(model, mode), loss, [group.rank])
        assert_alike(model.module, wanted, mode)

    world(2).run(body)


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_layers_that_are_unfrozen_need_another_wrapper(world, mode):
    """detectron2#2486: nothing told that unfrozen layers were not averaged."""

    def loss(model, rank, step):
        if step == 2:
            model[0].requires_grad_(True)
        return loss_of(model, rank, step)

    def make():
        module = network()
        module[0].requires_grad_(False)
        return module

    wanted = make()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=habits.RATE)
    train(wanted, optimizer, loss, [0, 1], range(4))

    def body(group):
        module = make()
        model = habits.wrap(module, group, mode)
        train(model, habits.optimizer_for(model, mode), loss_of, [group.rank], range(2))
        module[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"'0.weight' is new.*wrap it anew"):
            loss_of(model, group.rank, 2)
        model = habits.wrap(module, group, mode)
        train(model, habits.optimizer_for(model, mode), loss_of, [group.rank], range(2, 4))
        assert_alike(module, wanted, mode)

    world(2).run(body)


class Adapted(nn.Module):
    """A layer with adapters, one of which is active."""

    def __init__(self, base, names):
        super().__init__()
        self.base, self.active = base, names[0]
        self.down = nn.ModuleDict({name: nn.Linear(64, 2, bias=False) for name in names})
        self.up = nn.ModuleDict({name: nn.Linear(2, 64, bias=False) for name in names})

    def forward(self, x):
        return self.base(x) + self.up[self.active](self.down[self.active](x))


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_adapters_that_come_after_the_wrapper_raise(world, mode):
    """transformers#48873: each rank trained an adapter of its own."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        loss_of(model, group.rank, 0).backward()
        model.module[2] = Adapted(model.module[2], ["first"])
        with pytest.raises(ValueError, match=r"down.first.weight' is new.*wrap it anew"):
            loss_of(model, group.rank, 1)

    world(2).run(body)


@pytest.mark.parametrize("mode", MODES)
def test_only_one_of_several_adapters_is_active(world, mode):
    """peft#905: parameters that require grad and are not used."""

    def make():
        module = network().requires_grad_(False)
        module[2] = Adapted(module[2], ["first", "second"])
        return filled(module)

    def loss(model, rank, step):
        getattr(model, "module", model)[2].active = "first" if step == 1 else "second"
        return loss_of(model, rank, step)

    compare(world, make, loss, mode)


class Tied(nn.Module):
    """A language model whose first and last layer are one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers):
        return self.head(self.middle(self.embedding(numbers)).tanh())


@pytest.mark.parametrize("mode", MODES)
def test_tied_embeddings_get_both_gradients(world, mode):
    """Megatron-LM#844: divided gradients of a shared embedding were added up in parts."""

    def loss(model, rank, step):
        return model(torch.arange(rank + step, rank + step + 9)).logsumexp(-1).mean()

    compare(world, lambda: filled(Tied()), loss, mode)


class Ordered(nn.Module):
    """Uses its layers in an order that depends on the rank."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, rank):
        for layer in (self.one, self.other) if rank == 0 else (self.other, self.one):
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("mode", MODES)
def test_gradients_come_in_another_order_on_each_rank(world, mode):
    """DeepSpeed#2343."""

    def loss(model, rank, step):
        return model(batch(rank, step), rank).square().mean()

    compare(world, lambda: filled(Ordered()), loss, mode)


class Recomputed(nn.Module):
    """Checkpointed layers behind a frozen one."""

    def __init__(self, reentrant):
        super().__init__()
        self.embedding = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head, self.reentrant = nn.Linear(8, 2), reentrant

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(
                lambda y, one=layer: one(y).tanh(),
                x,
                use_reentrant=self.reentrant,
                preserve_rng_state=False,
            )
        return self.head(x)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_behind_a_frozen_layer(world, mode, reentrant):
    """transformers#21381, peft#1142: reentrant ones leave layers without gradients, as in torch."""
    compare(world, lambda: filled(Recomputed(reentrant)), loss_of, mode)


class Quantized(nn.Module):
    """Outputs are entries of a codebook, which follows the batches of all ranks."""

    def __init__(self, group=None):
        super().__init__()
        self.encoder, self.group = network(), group
        book = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)) / 10
        self.register_buffer("book", book)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", book.clone())

    def forward(self, x):
        encoded = self.encoder(x)
        chosen = torch.cdist(encoded, self.book).argmin(1)
        with torch.no_grad():
            hits = nn.functional.one_hot(chosen, 6).float()
            counts, sums = hits.sum(0), (encoded.T @ hits).T  # which is not contiguous
            if self.group is not None:
                pycomm.all_reduce(counts, group=self.group)
                pycomm.all_reduce(sums, group=self.group)
            entries = self.book[chosen]
            self.counts.lerp_(counts, 0.1)
            self.sums.lerp_(sums, 0.1)
            self.book.copy_(self.sums / self.counts[:, None])
        return encoded + (entries - encoded).detach()


@pytest.mark.parametrize("mode", MODES)
def test_a_codebook_that_ranks_update_in_forward(world, mode):
    """vector-quantize-pytorch#101, espnet#6284: the sums were lost in a contiguous copy."""
    wanted = Quantized()
    optimizer = habits.optimizer_for(wanted)
    for step in range(4):
        optimizer.zero_grad()
        wanted(torch.cat([batch(rank, step) for rank in range(2)])).square().mean().backward()
        optimizer.step()

    def body(group):
        model = habits.wrap(Quantized(group), group, mode)
        train(model, habits.optimizer_for(model, mode), loss_of, [group.rank], range(4))
        assert_alike(model.module, wanted, mode)
        torch.testing.assert_close(model.module.book, wanted.book, rtol=0, atol=1e-3)

    world(2).run(body)


class Learning(nn.Module):
    """Steps its codebook inside of forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.book = network(), nn.Parameter(torch.empty(6, 4))
        self.step = None

    def forward(self, x):
        encoded = self.encoder(x)
        chosen = torch.cdist(encoded.detach(), self.book.detach()).argmin(1)
        (self.book[chosen] - encoded.detach()).square().mean().backward()
        self.step()
        return encoded + (self.book.detach()[chosen] - encoded).detach()


@pytest.mark.parametrize("mode", MODES)
def test_a_codebook_that_is_trained_in_forward(world, mode):
    """vector-quantize-pytorch#222: its gradients were not averaged."""

    def prepare(module, mode="plain"):
        optimizer = habits.optimizer_for([module.book], mode)

        def step():
            optimizer.step()
            optimizer.zero_grad()

        module.step = step
        return habits.optimizer_for(module.encoder, mode)

    wanted = filled(Learning())
    optimizer = prepare(wanted)
    for step in range(3):
        optimizer.zero_grad()
        wanted(torch.cat([batch(rank, step) for rank in range(2)])).square().mean().backward()
        optimizer.step()

    def body(group):
        module = filled(Learning())
        model = habits.wrap(module, group, mode)
        train(model, prepare(module, mode), loss_of, [group.rank])
        assert_alike(module, wanted, mode)

    world(2).run(body)


class Caching(nn.Module):
    """Makes a buffer for the positions when it first needs them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        if not hasattr(self, "positions") or len(self.positions) < len(x):
            self.register_buffer("positions", torch.arange(len(x)) / 100.0, persistent=False)
        return self.layer(x) + self.positions[: len(x), None]


def test_cached_buffers_of_different_sizes_raise(world):
    """CoCa-pytorch#17, Model-Optimizer#2342: they hung or failed without a name."""

    def loss(model, rank, step):
        return model(batch(rank, step, 5 + 3 * rank)).square().mean()

    def body(group):
        model = habits.wrap(filled(Caching()), group, "plain")
        loss(model, group.rank, 0).backward()
        with pytest.raises(ValueError, match=r"same shapes on all ranks.*positions"):
            loss(model, group.rank, 1)

    world(2).run(body)

    def left_alone(group):
        model = habits.wrap(filled(Caching()), group, "plain", broadcast_buffers=False)
        train(model, habits.optimizer_for(model), loss, [group.rank])
        assert_alike(model.module, wanted)

    wanted = filled(Caching())
    train(wanted, habits.optimizer_for(wanted), loss, [0, 1])
    world(2).run(left_alone)


@pytest.mark.parametrize("mode", UNCOMPRESSED)
def test_statistics_are_rank_0_s_before_an_evaluation(world, mode):
    """mmdetection#4582: each rank evaluated with its own."""

    def make():
        return filled(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))

    def body(group):
        model = habits.wrap(make(), group, mode)
        train(model, habits.optimizer_for(model, mode), loss_of, [group.rank])
        own = [buffer.clone() for buffer in model.buffers()]
        model.sync_buffers()
        model.eval()
        with torch.no_grad():
            return own, list(model.buffers()), model(batch(0, 99))

    (own, first, here), (_, second, there) = world(2).run(body)
    assert all(map(torch.equal, own, first))
    assert all(map(torch.equal, first, second))
    assert torch.equal(here, there)


@pytest.mark.parametrize("mode", MODES)
def test_a_moving_average_that_is_copied_back(world, mode):
    """ema-pytorch#9: all ranks must do it; on rank 0 alone it makes ranks differ."""

    def copy_back_after(module):
        average = network()
        average.load_state_dict(module.state_dict())

        def after(step):
            with torch.no_grad():
                for old, new in zip(average.parameters(), module.parameters(), strict=True):
                    old.lerp_(new, 0.5)
                    if step == 2:
                        new.copy_(old)

        return after

    wanted = network()
    optimizer = habits.optimizer_for(wanted)
    train(wanted, optimizer, loss_of, [0, 1], range(4), copy_back_after(wanted))

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        train(model, optimizer, loss_of, [group.rank], range(4), copy_back_after(model.module))
        assert_alike(model.module, wanted, mode)
        habits.assert_same_on_all_ranks(model, group)

    world(2).run(body)
