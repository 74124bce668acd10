"""Misuse of a sharded model raises an error, or has the result of a model without shards."""

import copy
import pickle
import threading

import pytest
import sharding
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import pycomm
from pycomm import optim
from pycomm.optim import _storage

STAGES = ["optimizer", "gradients"]
both_stages = pytest.mark.parametrize("stage", STAGES)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 130), nn.GELU(), nn.Linear(130, 33))


def batch(rank, step):
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


NETWORK = network()


def make(group, stage, net=NETWORK, **options):
    model = pycomm.DataParallel(copy.deepcopy(net), group=group, shard=stage, bucket_cap_mb=0.01)
    return model, optim.FusedAdamW(model.parameters(), lr=0.01, **options)


def backward(model, rank, number):
    model.zero_grad()
    model(batch(rank, number)).square().mean().backward()


def step(model, optimizer, rank, number):
    backward(model, rank, number)
    optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def errors_of(world, size, body):
    """The error of every rank's body, which all end."""
    seen = [None] * size

    def caught(group):
        try:
            body(group)
        except Exception as error:
            seen[group.rank] = error

    world(size, timeout=10).run(caught)
    return seen


@both_stages
def test_copies_of_an_optimizer_are_refused(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        step(model, optimizer, group.rank, 0)
        for use in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="sharded states cannot be copied"):
                use(optimizer)
        pycomm.DataParallel(model.module, group=group)  # its states are still divided
        with pytest.raises(TypeError, match="sharded states cannot be copied"):
            copy.deepcopy(optimizer)

    world(2).run(body)


@both_stages
def test_a_copy_of_a_model_has_parameters_of_its_own(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        step(model, optimizer, group.rank, 0)
        copied, before = copy.deepcopy(model.module), values(model)
        step(model, optimizer, group.rank, 1)
        assert sharding.difference(values(copied), before) is None

    world(2).run(body)


def converted(model, optimizer, rank):
    model(batch(rank, 1).bfloat16()).square().mean().backward()
    optimizer.step()


@both_stages
def test_a_model_that_is_converted_must_be_wrapped_anew(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        step(model, optimizer, group.rank, 0)
        model.zero_grad()
        model.bfloat16()
        with pytest.raises(ValueError, match="wrap"):
            converted(model, optimizer, group.rank)
        model.zero_grad()
        model = pycomm.DataParallel(model.module, group=group, shard=stage)
        optimizer = optim.FusedAdamW(model.parameters())
        converted(model, optimizer, group.rank)
        return values(model)

    seen = world(2).run(body)
    assert sharding.difference(*seen) is None


def share(net):
    net.share_memory()


def reassign(net):
    for parameter in net.parameters():
        parameter.data = parameter.detach().clone()


def narrow(net):
    net.bfloat16().float()


@pytest.mark.parametrize("move", [share, reassign, narrow])
def test_a_model_that_was_moved_after_a_step_is_wrapped_anew(world, move):
    """With the last step's gradients still there."""

    def body(group):
        trained = []
        for stage in (None, *STAGES):
            model, optimizer = make(group, stage)
            step(model, optimizer, group.rank, 0)
            move(model.module)
            model = pycomm.DataParallel(model.module, group=group, shard=stage)
            step(model, optimizer, group.rank, 1)
            trained.append(values(model))
        for others in trained[1:]:
            assert all(map(torch.equal, others, trained[0]))

    world(2).run(body)


@both_stages
def test_a_model_that_was_moved_before_a_step_is_refused(world, stage):
    def body(group):
        model, _ = make(group, stage)
        backward(model, group.rank, 0)
        reassign(model.module)
        with pytest.raises(RuntimeError, match="waits for a step, but the parameter has been mov"):
            pycomm.DataParallel(model.module, group=group, shard=stage)

    world(2).run(body)


def test_gradients_that_are_shared_leave_the_parameters_where_they_are(world):
    """As by a queue of processes, for a logger."""

    def body(group):
        trained = []
        for shares in (False, True):
            model, optimizer = make(group, "optimizer")
            for number in range(3):
                backward(model, group.rank, number)
                model.reduce_gradients()
                if shares:
                    next(model.parameters()).grad.share_memory_()
                optimizer.step()
            trained.append(values(model))
        assert all(map(torch.equal, *trained))

    world(2).run(body)


@both_stages
def test_a_closed_group(world, stage):
    def body(group):
        model, optimizer = make(group, stage)
        step(model, optimizer, group.rank, 0)
        backward(model, group.rank, 1)
        before = values(model)
        group.close()
        with pytest.raises(pycomm.PycommError, match="closed"):
            optimizer.step()
        assert sharding.difference(values(model), before) is None

    world(2).run(body)


@both_stages
@pytest.mark.parametrize("masters", [None, "fp32", "remainder"])
def test_parameters_edited_by_hand(world, stage, masters):
    net = copy.deepcopy(NETWORK).bfloat16()

    def body(group, shard):
        model, optimizer = make(group, shard, net, master_weights=masters)
        for number in range(4):
            model.zero_grad()
            model(batch(group.rank, number).bfloat16()).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.module[0].weight[number].fill_(0.25)
        return values(model), optimizer.state_dict()

    plain, sharded = (world(3).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


def clip(model, optimizer):
    del optimizer
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def halve(model, optimizer):
    del optimizer
    model.module[2].bias.grad.mul_(0.5)


def replace(model, optimizer):
    del optimizer
    bias = model.module[2].bias
    bias.grad = torch.ones_like(bias)


@pytest.mark.parametrize("change", [clip, halve, replace])
@both_stages
def test_gradients_changed_before_a_step(world, stage, change):
    """An error, or the step that gradients give that all ranks change alike."""

    def changed(group, shard):
        model, optimizer = make(group, shard)
        backward(model, group.rank, 0)
        model.reduce_gradients()
        change(model, optimizer)
        optimizer.step()
        return values(model)

    plain, sharded = (world(2).run(changed, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None

    def unasked(group):
        model, optimizer = make(group, stage)
        backward(model, group.rank, 0)
        change(model, optimizer)
        optimizer.step()

    if (stage, change) == ("gradients", replace):
        return  # all ranks' own gradients count, as without shards
    for error in errors_of(world, 2, unasked):
        assert isinstance(error, RuntimeError), error


@pytest.mark.parametrize("call", ["step", "unscale_"])
@both_stages
def test_the_grad_scaler_of_torch(world, stage, call):
    """It looks for infinities in gradients that are not averages."""

    def body(group):
        model, optimizer = make(group, stage)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model.zero_grad()
        scaler.scale(model(batch(group.rank, 0)).square().mean()).backward()
        getattr(scaler, call)(optimizer)
        scaler.step(optimizer)

    for error in errors_of(world, 2, body):
        assert isinstance(error, RuntimeError), error
        assert "pycomm.optim.GradScaler" in str(error)


@pytest.mark.parametrize(
    "write",
    [
        lambda gradient: gradient.mul_(2),
        lambda gradient: gradient.add_(torch.ones(130, 40)),
        lambda gradient: gradient.copy_(torch.ones(130, 40)),
        lambda gradient: torch.mul(gradient, 2, out=gradient),
        lambda gradient: torch._foreach_mul_([gradient], 2.0),
    ],
)
def test_writing_to_a_divided_gradient(world, write):
    """An error where it is written, and one in the step. Zeroing is allowed, and so is reading."""

    def body(group):
        model, optimizer = make(group, "gradients")
        backward(model, group.rank, 0)
        gradient = next(model.parameters()).grad
        assert gradient.isnan().all()
        assert type(gradient + 1) is type(gradient.clone()) is torch.Tensor
        with pytest.raises(RuntimeError, match="reduce_gradients"):
            write(gradient)
        for zero in (gradient.zero_, lambda: optimizer.zero_grad(set_to_none=False)):
            zero()
            assert not gradient.any()
            optimizer.step()

    world(2).run(body)


@pytest.mark.parametrize("name", ["lr", "max_norm"])
@both_stages
def test_ranks_that_disagree_about_an_option(world, stage, name):
    def body(group):
        model, optimizer = make(group, stage, max_norm=1.0)
        step(model, optimizer, group.rank, 0)
        if name == "lr":
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + group.rank)
        else:
            optimizer.max_norm = 1.0 + group.rank
        step(model, optimizer, group.rank, 1)

    for error in errors_of(world, 2, body):
        assert isinstance(error, pycomm.Mismatch), error
        assert f"{name}=" in str(error)


@pytest.mark.parametrize("dropped", ["one", "all"])
@both_stages
def test_ranks_that_disagree_about_gradients(world, stage, dropped):
    """The step itself says so on all ranks, even if one of them has nothing to step."""

    def body(group):
        model, optimizer = make(group, stage)
        step(model, optimizer, group.rank, 0)
        backward(model, group.rank, 1)
        if group.rank == 1:
            for parameter in list(model.parameters())[: 1 if dropped == "one" else None]:
                parameter.grad = None
        optimizer.step()

    for error in errors_of(world, 2, body):
        assert isinstance(error, pycomm.Mismatch), error
        assert "4 gradients" in str(error)
        assert ("3 gradients" if dropped == "one" else "0 gradients") in str(error)


def test_only_one_rank_asks_for_the_checkpoint(world):
    """As programs do whose states are not divided."""

    def body(group):
        model, optimizer = make(group, "optimizer")
        step(model, optimizer, group.rank, 0)
        if group.rank == 0:
            optimizer.state_dict()
        pycomm.barrier(group=group)

    for error in errors_of(world, 2, body):
        assert isinstance(error, pycomm.Mismatch), error
        assert "shards that all ranks gather, as in state_dict()" in str(error)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@both_stages
def test_a_step_without_gradients_does_nothing(world, stage, max_norm):
    def body(group, shard):
        model, optimizer = make(group, shard, max_norm=max_norm)
        optimizer.step()
        step(model, optimizer, group.rank, 0)
        optimizer.zero_grad()
        optimizer.step()
        scaler = optim.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        step(model, optimizer, group.rank, 1)
        return values(model), optimizer.state_dict()

    plain, sharded = (world(2).run(body, shard) for shard in (None, stage))
    assert sharding.difference(plain, sharded) is None


@both_stages
def test_checkpoints_from_and_for_torch(world, stage):
    plain = torch.optim.AdamW(NETWORK.parameters(), lr=0.01)
    NETWORK(batch(0, 0)).square().mean().backward()
    plain.step()
    saved = plain.state_dict()
    NETWORK.zero_grad()

    def body(group, shard):
        model, optimizer = make(group, shard)
        optimizer.load_state_dict(copy.deepcopy(saved))
        loaded = optimizer.state_dict(format="torch")
        for one, other in zip(loaded["state"].values(), saved["state"].values(), strict=True):
            assert sharding.difference(one, other) is None
        step(model, optimizer, group.rank, 1)
        made = optimizer.state_dict(format="torch")
        torch.optim.AdamW(copy.deepcopy(NETWORK).parameters()).load_state_dict(made)
        return values(model), made

    runs = [world(3).run(body, shard) for shard in (None, stage)]
    assert sharding.difference(*runs) is None


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stage", [None, *STAGES])
def test_what_a_program_adds_to_states_stays_whole(world, stage, replicas):
    """As with torch's optimizers, in steps and in every checkpoint: such as Lookahead's weights."""
    if stage is None and replicas > 1:
        pytest.skip("nothing is divided")
    shard = stage and pycomm.Sharding(stage, replicas=replicas)

    def added(number, param):
        weights = torch.arange(float(param.numel())).view_as(param) + number
        return {"slow": weights, "count": number, "settings": {"alpha": 0.5}}

    def holds(states):
        for number, (state, param) in enumerate(zip(states, NETWORK.parameters(), strict=True)):
            for name, value in added(number, param).items():
                same = torch.equal if name == "slow" else value.__class__.__eq__
                if not same(state[name], value):
                    return False
        return True

    def body(group):
        model, optimizer = make(group, shard)
        parameters = list(model.parameters())

        def states():
            return [optimizer.state[p] for p in parameters]

        step(model, optimizer, group.rank, 0)
        for number, param in enumerate(parameters):
            optimizer.state[param].update(added(number, param))
        step(model, optimizer, group.rank, 1)
        saved = copy.deepcopy([optimizer.state_dict(), optimizer.state_dict(format="torch")])
        seen = [holds(states()), *(holds(each["state"].values()) for each in saved)]
        if stage:
            parts = optimizer.sharded_state_dict(model)["state"]
            seen.append(holds([parts[name] for name, _ in NETWORK.named_parameters()]))
        for param in parameters:
            optimizer.state[param]["slow"] = torch.zeros_like(param)
        optimizer.load_state_dict(saved[0])
        seen.append(holds(states()))
        step(model, optimizer, group.rank, 2)
        return [*seen, holds(states())]

    assert all(map(all, world(2).run(body)))


def test_ranks_gather_loaded_states_in_one_order(world, monkeypatch):
    """Sets of names have another order in each process, whose hashes differ."""

    class Names(frozenset):
        def __iter__(self):
            return iter(sorted(super().__iter__(), reverse=self_rank.value == 1))

    self_rank, names = threading.local(), _storage.stored_names
    monkeypatch.setattr(_storage, "stored_names", lambda *args: Names(names(*args)))

    def body(group):
        self_rank.value = group.rank
        model, optimizer = make(group, "optimizer")
        step(model, optimizer, group.rank, 0)
        before = optimizer.state_dict()
        set_optimizer_state_dict(model, optimizer, optimizer.sharded_state_dict(model))
        after = optimizer.state_dict()
        return [
            torch.equal(value, after["state"][number][name])
            for number, state in before["state"].items()
            for name, value in state.items()
        ]

    assert all(map(all, world(2).run(body)))
