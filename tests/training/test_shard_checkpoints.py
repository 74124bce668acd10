"""Checkpoints of sharded optimizer states: gathered, and through torch.distributed.checkpoint."""

import copy
import math
import pickle
import threading
import weakref

import golden
import helpers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizing import Case
from torch import nn
from torch.distributed import tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from wrapping import data_parallel

import pycomm
from pycomm.optim import _checkpoint
from pycomm.optim._checkpoint import TensorPart, boxes

BF16 = torch.bfloat16
CASES = [
    Case("adamw", {"amsgrad": True}, BF16, None, "remainder", "8bit"),
    Case("adamw"),
    Case("adam", {"amsgrad": True}, torch.float16, None, "fp32", "fp16"),
    Case("sgd", {"dampening": 0.2}, BF16, None, "fp32", "bf16"),
    Case("lion", dtype=BF16, states="8bit", stochastic=True, seed=3),
    Case("lamb", dtype=BF16, master="remainder", states="bf16"),
]


class Net(nn.Module):
    """Parameters of all kinds: tied, frozen, tiny, empty, a scalar, and one in another order."""

    def __init__(self, seed):
        super().__init__()
        self.conv = nn.Conv2d(16, 36, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(36, 130)
        self.second = nn.Linear(130, 36)
        self.tied = nn.Linear(36, 130)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(130), requires_grad=False)
        self.cube = nn.Parameter(torch.zeros(3, 137, 41))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.zeros(()))
        generator = torch.Generator().manual_seed(seed)  # threads share torch's own
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        x = self.tied(self.second(self.first(x) + self.frozen))
        rest = (self.cube * self.cube.detach()).mean() + self.empty.sum()
        return x.square().mean() * self.scale + rest


def make(group, case, seed, shard="optimizer", **options):
    """A wrapped model and its optimizer, with two groups."""
    net = Net(seed).to(case.dtype)
    model = data_parallel(net, shard=shard, group=group, **options)
    named = dict(model.named_parameters())
    first = [named.pop("second.weight"), named.pop("scale")]
    groups = [{"params": first, "lr": 2e-3}, {"params": list(named.values())}]
    return model, case.make(groups)


def train(model, optimizer, rank, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(2, 16, 4, 4, generator=generator).to(model.module.scale.dtype)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def flat(saved):
    return {
        (number, name): value
        for number, state in saved["state"].items()
        for name, value in state.items()
    }


def same_checkpoints(one, other):
    assert one.keys() == other.keys() == {"state", "param_groups"}
    assert one["param_groups"] == other["param_groups"]
    same_tensors(flat(one), flat(other))


def same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert value.shape == other[name].shape, name
        assert golden.same_bits(value.detach(), other[name].detach()), name


def everything(model, optimizer):
    """Copies of the model's tensors and of the gathered states."""
    return copy.deepcopy([dict(model.state_dict()), optimizer.state_dict()])


def same_everything(one, other):
    same_tensors(one[0], other[0])
    same_checkpoints(one[1], other[1])


# Gathered on one rank.


def gathered(group, case):
    model, optimizer = make(group, case, 0)
    train(model, optimizer, group.rank, range(3))
    for form in ("pycomm", "torch"):
        whole = optimizer.state_dict(format=form)
        for to in range(group.size):
            saved = optimizer.state_dict(format=form, to=to)
            if group.rank == to:
                same_checkpoints(saved, whole)
            else:
                groups = whole["param_groups"]
                assert saved == {"state": {}, "param_groups": groups, "states_on_rank": to}
    with pytest.raises(ValueError, match="to must be a rank from 0 to"):
        optimizer.state_dict(to=group.size)
    return everything(model, optimizer), optimizer.state_dict(format="torch")


def unsharded(group, case):
    model, optimizer = make(group, case, 0, shard=None)
    train(model, optimizer, group.rank, range(3))
    same_checkpoints(optimizer.state_dict(to=0), optimizer.state_dict())
    return everything(model, optimizer), optimizer.state_dict(format="torch")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_gets_what_an_unsharded_optimizer_saves(case, world):
    expected = world(3).run(unsharded, case)[0]
    for got in world(3).run(gathered, case):
        same_everything(got[0], expected[0])
        same_checkpoints(got[1], expected[1])


def test_gathering_holds_the_states_of_one_parameter_besides_its_result(world, monkeypatch):
    """In torch's form, which takes a copy of each state."""
    gather, seen = _checkpoint.gathered, threading.local()

    def watched(part, param, state, to=None):
        assert all(before() is None for before in getattr(seen, "states", ()))
        made = gather(part, param, state, to)
        values = [] if made is None else made.values()  # fp32 ones are in the result
        seen.states = [weakref.ref(value) for value in values if value.dtype != torch.float32]
        return made

    monkeypatch.setattr(_checkpoint, "gathered", watched)

    def save(group):
        model, optimizer = make(group, CASES[0], 0)
        train(model, optimizer, group.rank, range(1))
        optimizer.state_dict(format="torch", to=1)

    world(2).run(save)


def test_torch_loads_what_one_rank_gets(world):
    def save(group):
        model, optimizer = make(group, CASES[0], 0)
        train(model, optimizer, group.rank, range(3))
        return optimizer.state_dict(format="torch", to=1)

    saved = world(3).run(save)[1]
    net = Net(0)
    named = dict(net.named_parameters())
    first = [named.pop("second.weight"), named.pop("scale")]
    peer = torch.optim.AdamW([{"params": first}, {"params": list(named.values())}], amsgrad=True)
    peer.load_state_dict(saved)
    same_tensors(flat(peer.state_dict()), flat(saved))
    train(pycomm.DataParallel(net, group=world(1).groups[0]), peer, 0, [3])


# From n ranks to m.


def save(group, case, shard, folder):
    """Three steps, all forms of checkpoints, and two more steps."""
    model, optimizer = make(group, case, 0, shard)
    train(model, optimizer, group.rank, range(3))
    last = group.size - 1
    saved = optimizer.state_dict(to=last)
    if group.rank == last:
        torch.save({"model": model.state_dict(), "optimizer": saved}, folder / "gathered.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict(model)}
    assert {*state["optimizer"]["state"]} == {*dict(trained(model))}
    dcp.save(state, checkpoint_id=folder / "sync")
    saving = dcp.async_save(state, **asynchronous(folder / "async", shard))
    train(model, optimizer, group.rank, range(3, 5))
    saving.result()
    return everything(model, optimizer)


def asynchronous(folder, shard):
    """The arguments of async_save for its own writer, and for one of the user."""
    if shard == "optimizer":
        return {"checkpoint_id": folder}
    stager = DefaultStager(StagingOptions(False, False, False, False))
    return {"storage_writer": dcp.FileSystemWriter(folder), "async_stager": stager}


def trained(model):
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def resume(group, case, folder):
    """From each form, with and without shards, to the same bits; two more steps."""
    seen = []
    for form in ("gathered.pt", "sync", "async"):
        for shard in ("optimizer", "gradients", None):
            model, optimizer = make(group, case, len(seen) + 1, shard)
            if form == "gathered.pt":
                saved = torch.load(folder / form)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            else:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.sharded_state_dict(model),
                }
                dcp.load(state, checkpoint_id=folder / form)
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
                model.load_state_dict(state["model"])
            train(model, optimizer, group.rank, range(3, 5))
            seen.append(everything(model, optimizer))
    for other in seen[1:]:
        same_everything(other, seen[0])
    return seen[0]


@pytest.mark.parametrize(
    ("case", "shard", "ranks", "then"),
    [
        pytest.param(CASES[0], "optimizer", 3, (2, 3), marks=pytest.mark.slow),
        (CASES[1], "gradients", 2, (1, 2)),
        (CASES[2], "optimizer", 1, (1, 4)),
        pytest.param(CASES[3], "gradients", 4, (3,), marks=pytest.mark.slow),
        pytest.param(CASES[4], "optimizer", 4, (4, 1), marks=pytest.mark.slow),
        (CASES[5], None, 2, (3,)),
    ],
    ids=str,
)
def test_resuming_on_other_ranks(case, shard, ranks, then, tmp_path):
    went_on = helpers.run_group(ranks, save, case, shard, tmp_path)
    for number in then:
        resumed = helpers.run_group(number, resume, case, tmp_path)
        for got in resumed:
            same_everything(got, went_on[0] if number == ranks else resumed[0])


def replicated(group, folder):
    """Two copies of the states, each on two ranks."""
    model, optimizer = make(group, CASES[0], 0, shard_group=halves(group))
    train(model, optimizer, group.rank, range(3))
    dcp.save({"optimizer": optimizer.sharded_state_dict(model)}, checkpoint_id=folder)
    expected = copy.deepcopy(optimizer.state_dict())
    other = make(group, CASES[0], 1)
    state = {"optimizer": other[1].sharded_state_dict(other[0])}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(*other, state["optimizer"])
    same_checkpoints(other[1].state_dict(), expected)


def halves(group):
    """The group of this rank and its neighbour."""
    both = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return pycomm.init(both[group.rank // 2])


def test_copies_of_states_are_saved_once(tmp_path):
    helpers.run_group(4, replicated, tmp_path)


def empty_like(value, mesh):
    """As FSDP2 would have it: divided among ranks in its first dimension."""
    if value.dim() == 0 or len(value) % mesh.size():
        return torch.zeros_like(value)
    options = {"device_mesh": mesh, "placements": [Shard(0)]}
    return tensor.zeros(value.shape, dtype=value.dtype, **options)


def by_others(group, folder):
    """The file has whole tensors under the names that torch gives them; ranks wrote their parts."""
    model, optimizer = make(group, CASES[0], 0)
    train(model, optimizer, group.rank, range(3))
    state = {"optimizer": optimizer.sharded_state_dict(model)}
    dcp.save(state, checkpoint_id=folder)
    expected = get_optimizer_state_dict(model, optimizer)
    assert expected["state"].keys() == state["optimizer"]["state"].keys()
    mesh = init_device_mesh("cpu", (group.size,))
    read = {
        name: {key: empty_like(value, mesh) for key, value in values.items()}
        for name, values in expected["state"].items()
    }
    dcp.load({"optimizer": {"state": read}}, checkpoint_id=folder)
    for name, values in expected["state"].items():
        for key, value in values.items():
            got = read[name][key]
            if isinstance(got, DTensor):
                got, value = got.to_local(), value.chunk(group.size)[group.rank]
            assert golden.same_bits(got.contiguous(), value.contiguous()), (name, key)
    other = make(group, CASES[0], 1)
    set_optimizer_state_dict(*other, expected)
    same_checkpoints(other[1].state_dict(), optimizer.state_dict())
    parts = [v for v in flat(state["optimizer"]).values() if isinstance(v, TensorPart)]
    most = max(len(part.__create_chunk_list__()) for part in parts)
    return sum(part.own.nbytes for part in parts), most


def test_others_read_the_checkpoint(tmp_path):
    sizes, numbers = zip(*helpers.run_group(3, by_others, tmp_path), strict=True)
    assert max(numbers) >= 3
    files = [path.stat().st_size for path in sorted(tmp_path.glob("__*"))]
    assert len(files) == len(sizes)
    assert max(sizes) < sum(sizes) * 0.4
    assert max(files) < sum(files) * 0.45


# Parameters that have had no gradient.


class Experts(nn.Module):
    """Some of them are not used."""

    def __init__(self, seed):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(70, 70) for _ in range(3))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x, used):
        return sum(self.experts[number](x) for number in used).square().mean()


def with_experts(group, case, seed, shard):
    net = Experts(seed).to(case.dtype)
    model = pycomm.DataParallel(net, shard=shard, group=group)
    return model, case.make(model.parameters())


def train_experts(model, optimizer, group, steps, used):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + group.rank)
        batch = torch.randn(2, 70, generator=generator).to(model.module.experts[0].weight.dtype)
        optimizer.zero_grad()
        model(batch, used).backward()
        optimizer.step()


def save_experts(group, case, shard, folder):
    """With an expert that no step has used, and after steps that have used all."""
    model, optimizer = with_experts(group, case, 0, shard)
    seen = []
    for name, steps, used in (("some", range(3), (0, 1)), ("all", range(3, 5), (0, 1, 2))):
        train_experts(model, optimizer, group, steps, used)
        state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict(model)}
        dcp.save(state, checkpoint_id=folder / name)
        seen.append(everything(model, optimizer))
    return seen


def resume_experts(group, case, shard, folder):
    """In an optimizer without states, and in one that lacks those of an expert."""
    seen = []
    for steps in (range(0), range(1)):
        for name in ("some", "all"):
            model, optimizer = with_experts(group, case, 1, shard)
            train_experts(model, optimizer, group, steps, (0, 2))
            state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict(model)}
            dcp.load(state, checkpoint_id=folder / name)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            model.load_state_dict(state["model"])
            if name == "some":
                train_experts(model, optimizer, group, range(3, 5), (0, 1, 2))
            seen.append(everything(model, optimizer))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "shard"),
    [(CASES[0], "optimizer"), (CASES[3], "gradients"), (CASES[5], None)],
    ids=str,
)
def test_states_of_unused_experts(case, shard, tmp_path):
    _, expected = helpers.run_group(2, save_experts, case, shard, tmp_path)[0]
    for results in helpers.run_group(2, resume_experts, case, shard, tmp_path):
        for got in results:
            same_everything(got, expected)
    assert len(helpers.run_group(3, resume_experts, case, shard, tmp_path)) == 3


def resume_partly(group, case, folder):
    """From a file that lacks an expert's states, as torch's functions save it."""
    model, optimizer = with_experts(group, case, 0, "optimizer")
    train_experts(model, optimizer, group, range(3), (0, 1))
    saved = get_optimizer_state_dict(model, optimizer)
    assert "experts.2.weight" not in saved["state"]
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    other, fresh = with_experts(group, case, 1, "optimizer")
    state = {"optimizer": fresh.sharded_state_dict(other)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder, planner=planner)
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    other.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (other, fresh)):
        train_experts(*pair, group, range(3, 5), (0, 1, 2))
    same_everything(everything(other, fresh), everything(model, optimizer))


def test_states_that_a_checkpoint_lacks_begin_anew(tmp_path):
    helpers.run_group(2, resume_partly, CASES[1], tmp_path)


# Only the model.


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_loading_only_the_model_renews_full_precision_weights(case, world):
    """On all ranks, whichever rank holds them: to the bits of an unsharded optimizer."""

    def run(group, shard):
        model, optimizer = make(group, case, 0, shard)
        train(model, optimizer, group.rank, range(3))
        model.load_state_dict(Net(7).to(case.dtype).state_dict())
        train(model, optimizer, group.rank, range(3, 4))
        with torch.no_grad():
            model.module.cube[1].add_(1)  # some elements of some ranks
        train(model, optimizer, group.rank, range(4, 5))
        return everything(model, optimizer)

    expected = world(3).run(run, None)[0]
    for got in world(3).run(run, "optimizer"):
        same_everything(got, expected)


# Parts of tensors.


def lying(shape, order):
    """The numbers from 0, in the order in which dense memory holds them."""
    count = math.prod(shape)
    return torch.arange(count).view([shape[dim] for dim in order]).permute(inverse(order))


def inverse(order):
    return [order.index(dim) for dim in range(len(order))]


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((), ()),
        ((9,), (0,)),
        ((3, 4), (0, 1)),
        ((3, 4), (1, 0)),
        ((2, 1, 5), (0, 1, 2)),
        ((2, 3, 4), (0, 1, 2)),
        ((2, 3, 2, 2), (0, 2, 3, 1)),
    ],
)
def test_a_range_is_a_few_boxes(shape, order):
    whole, count = lying(shape, order), math.prod(shape)
    for begin in range(count + 1):
        for end in range(begin, count + 1):
            part = TensorPart(torch.arange(begin, end), begin, shape, order)
            chunks = part.__create_chunk_list__()
            assert len(chunks) <= max(2 * len(shape) - 1, 1)
            seen = []
            for item in part.__create_write_items__("name", part):
                chunk = item.tensor_data.chunk
                assert item.tensor_data.size == part.shape == torch.Size(shape)
                ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
                box = whole[tuple(map(slice, chunk.offsets, ends))]
                assert torch.equal(part.__get_tensor_shard__(item.index), box)
                seen += box.flatten().tolist()
            assert sorted(seen) == [*range(begin, end)]


def test_boxes_of_large_tensors():
    assert [*boxes((1 << 40, 4, 6), 30, 1 << 41)] == [
        ((1, 1, 0), (1, 3, 6)),
        ((2, 0, 0), ((1 << 41) // 24 - 2, 4, 6)),
        (((1 << 41) // 24, 0, 0), (1, 1, 6)),
        (((1 << 41) // 24, 1, 0), (1, 1, 2)),
    ]


def test_parts_are_copied_but_not_computed_with():
    part = TensorPart(torch.arange(3.0), 2, (4, 5), (0, 1))
    assert repr(part) == "TensorPart(shape=(4, 5), elements 2 to 5)"
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part)), part.detach()):
        assert isinstance(other, TensorPart)
        assert torch.equal(other.own, part.own)
        assert (other.begin, other.order, other.shape) == (2, (0, 1), (4, 5))
    assert part.detach().own.data_ptr() == part.own.data_ptr() != part.clone().own.data_ptr()
    with pytest.raises(NotImplementedError, match="for whole tensors, call state_dict"):
        part + 1
    with pytest.raises(NotImplementedError, match="the default stager"):
        torch.zeros(4, 5).copy_(part)


def test_parts_of_another_optimizer_are_refused(world):
    """Before anything has changed, on every rank."""

    def run(group):
        model, optimizer = make(group, CASES[1], 0)
        train(model, optimizer, group.rank, range(2))
        saved = optimizer.sharded_state_dict(model)
        for case, wrong in ((CASES[0], "has parts of exp_avg, exp_avg_sq, step, but"),
                            (CASES[1], "whole")):  # fmt: skip
            shard = None if case is CASES[1] else "optimizer"
            other = make(group, case, 1, shard)
            train(*other, group.rank, range(1))
            before = everything(*other)
            with pytest.raises(ValueError, match=wrong if shard else "keeps all of"):
                set_optimizer_state_dict(*other, copy.deepcopy(saved))
            same_everything(everything(*other), before)
        again = make(group, CASES[1], 1)
        name = "cube"
        part = saved["state"][name]["exp_avg"]
        part.begin += 1
        with pytest.raises(ValueError, match="exp_avg must have its elements"):
            set_optimizer_state_dict(*again, saved)

    world(2).run(run)
