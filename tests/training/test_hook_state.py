"""States save and restore residuals, refuse wrong ones, and report statistics."""

import io
import time

import ddp
import helpers
import pytest
import torch
from ddp import COMPRESSIONS, LAYOUTS, Watched
from golden import same_tensors, tensors_in
from torch import nn

import pycomm
from pycomm import hooks

LINE = 64  # bytes
HELD = [name for name in COMPRESSIONS if name != "dense"]


def saved(state_dict):
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save({"comm": state_dict}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["comm"]


def train(group, name, layout, steps, start, gathered):
    """Goes on from `start`, a model's and a state's dict per rank; returns the same."""
    watched = Watched(ddp.network(), COMPRESSIONS[name], layout=LAYOUTS[layout])
    if start is not None:
        model, state = start[0 if gathered else group.rank]
        watched.model.module.load_state_dict(model)
        watched.state.load_state_dict(saved(state))
    optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        watched.backward(watched.model(ddp.batch(group.rank, step)).square().mean())
        optimizer.step()
    assert watched.state.step == steps.stop
    return watched.model.module.state_dict(), watched.state.state_dict(gathered)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name, gathered):
    """Resumes in new processes, with other initial buckets than at saving."""

    def run(layout, steps, start=None):
        return helpers.run_group(2, train, name, layout, steps, start, gathered)

    through = run("tiny buckets", range(6))
    resumed = run("some buckets", range(3, 6), run("one bucket", range(3)))
    for (model, state), (other_model, other_state) in zip(through, resumed, strict=True):
        assert same_tensors(model, other_model)
        assert same_tensors(state, other_state)
    assert bool(tensors_in(through[1][1])) is not gathered  # all of it is with rank 0


def make(group, name="int8", seed=None, module=None):
    """A state that has something to remember, without a training."""
    named = list((module or ddp.Given()).named_parameters())
    state, _ = ddp.make_state(COMPRESSIONS[name], named, group=group)
    for one in ("wide", "square") if seed is not None else ():
        generator = torch.Generator().manual_seed(seed)
        state.residual(one).copy_(torch.randn(ddp.SHAPES[one], generator=generator))
    return state


def test_a_dict_does_not_change_with_its_state(world):
    state = make(world(1).groups[0], seed=3)
    before = state.state_dict()
    copy = saved(before)
    state.residual("wide").zero_()
    assert same_tensors(before, copy)
    state.load_state_dict(before)
    state.residual("wide").add_(1)
    assert same_tensors(before, copy)


def test_every_rank_finds_its_own_in_a_gathered_dict(world):
    def body(group):
        state = make(group, "momentum", seed=group.rank)
        everyone = state.state_dict(gathered=True)
        return everyone, state.state_dict()

    (everyone, _), *others = given = world(3).run(body)
    assert [dump for dump, _ in others] == [{}, {}]

    def again(group):
        state = make(group, "momentum")
        state.load_state_dict(saved(everyone))
        return state.state_dict()

    for now, (_, then) in zip(world(3).run(again), given, strict=True):
        assert same_tensors(now, then)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_ranks_gets_the_mean(world, before, after):
    """The mean over ranks of the values that are still to be sent stays the same."""

    def save(group):
        state = make(group, seed=group.rank)
        return state.state_dict(gathered=True), state.residual("wide").clone()

    given = world(before).run(save)
    everyone = saved(given[0][0])

    def load(group):
        state = make(group)
        state.load_state_dict(everyone)
        return state.residual("wide").clone()

    mean = sum(residual.double() for _, residual in given) / before
    for residual in world(after).run(load):
        torch.testing.assert_close(residual.double(), mean, rtol=1e-6, atol=1e-6)


def refused(state, state_dict, match):
    """Loading is refused with a reason, and the state does not change."""
    before = state.state_dict()
    with pytest.raises(ValueError, match=match):
        state.load_state_dict(state_dict)
    assert same_tensors(before, state.state_dict())


def test_another_kind_of_state_is_refused(world):
    """All pairs of kinds; a state's dict from before kinds were saved loads as ever."""

    def make_all(group):
        named = list(ddp.Given().named_parameters())
        optimizer = torch.optim.SGD([parameter for _, parameter in named], 0.1)
        return {
            "none": hooks.AllReduceState(group=group),
            "Cast": hooks.CommState(pycomm.Cast(), named, group=group),
            "Identity": hooks.CommState(pycomm.Identity(), named, group=group),
            "Int8": hooks.Int8State(named, group=group),
            "TopK": hooks.TopKState(named, group=group),
            "local SGD": hooks.LocalSGDState(named, optimizer, period=2, group=group),
        }

    states = make_all(world(1).groups[0])
    for saved_kind, giver in states.items():
        given = saved(giver.state_dict())
        for kind, taker in states.items():
            if kind == saved_kind:
                taker.load_state_dict(given)
            else:
                name = "LocalSGDState" if kind == "local SGD" else kind
                refused(taker, given, f"of .*{name}, got (that|one) of .*{saved_kind}$")
    old = saved(states["Int8"].state_dict())
    del old["compression"]
    states["Int8"].load_state_dict(old)


def save_together(group, folder):
    """Saves with torch.distributed.checkpoint, which keeps one tensor of each name."""
    from torch.distributed import checkpoint

    state = make(group, "momentum", seed=group.rank)
    checkpoint.save({"comm": state.state_dict()}, checkpoint_id=folder)
    return state.state_dict()


def load_together(group, folder, name="momentum"):
    """The residuals that ranks then have, or their errors."""
    from torch.distributed import checkpoint

    state = make(group, name)
    loaded = {"comm": state.state_dict()}
    try:
        checkpoint.load(loaded, checkpoint_id=folder)
        state.load_state_dict(loaded["comm"])
    except (ValueError, checkpoint.CheckpointException) as error:  # the latter is no Exception
        return str(error)
    return state.state_dict()


def test_every_rank_finds_its_own_in_a_distributed_checkpoint(tmp_path):
    given = helpers.run_group(2, save_together, tmp_path)
    for now, then in zip(helpers.run_group(2, load_together, tmp_path), given, strict=True):
        assert same_tensors(now, then)


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_refuse_a_distributed_checkpoint_of_another_number(tmp_path, size):
    helpers.run_group(2, save_together, tmp_path)
    for said in helpers.run_group(size, load_together, tmp_path):
        assert isinstance(said, str)
        assert "of 2, this is rank" in said or "Missing key" in said


def test_another_ranks_dict_is_refused(world):
    dumps = world(2).run(lambda group: make(group, seed=group.rank).state_dict())
    groups = world(2).groups
    refused(make(groups[0], seed=5), dumps[1], "rank 1 of 2, this is rank 0 of 2")
    refused(make(world(3).groups[1], seed=5), dumps[1], "rank 1 of 2, this is rank 1 of 3")


class Renamed(nn.Module):
    """:class:`ddp.Given`, with one parameter called otherwise."""

    def __init__(self):
        super().__init__()
        for name, parameter in ddp.Given().named_parameters():
            self.register_parameter(name.replace("square", "cube"), parameter)


def test_another_models_dict_is_refused(world):
    group = world(1).groups[0]
    other = nn.Sequential(nn.Linear(100, 100))
    renamed, foreign = make(group, module=Renamed()), make(group, module=other)
    given = make(group, seed=5)
    refused(given, renamed.state_dict(), "(square|cube)")
    refused(given, foreign.state_dict(), "this model")
    refused(given, foreign.state_dict(gathered=True), "this model")
    module = ddp.Given()
    module.wide = nn.Parameter(torch.zeros(250, 280))
    refused(given, make(group, module=module).state_dict(), "wide")


def test_another_compressions_dict_is_refused_where_something_is_missing(world):
    group = world(1).groups[0]
    refused(make(group, "momentum"), make(group, "topk", seed=1).state_dict(), "velocity")
    without = hooks.Int8State(group=group).state_dict()
    refused(make(group, seed=1), without, "residual")


@pytest.mark.parametrize("what", [None, 3, {}, {"comm": {}}, {"format": -1}])
def test_what_is_no_dict_of_a_state_is_refused(world, what):
    refused(make(world(1).groups[0], seed=1), what, "state_dict")


# Statistics.


def reporting(group, name, options):
    """For every step: statistics, residuals, and bytes that single calls read from peers."""
    watched = Watched(ddp.Given(), COMPRESSIONS[name], layout=LAYOUTS["views"], **options)
    memory, seen = {}, []
    for number in range(3):
        (step,) = watched.run(group.rank, [number])
        stats = watched.state.stats()
        read = sum(
            bytes_read(group, COMPRESSIONS[name], one, x, memory, step.first.get(one))
            for one, x in step.local.items()
        )
        seen.append((stats, step.residuals, read))
    return seen


def bytes_read(group, compression, name, x, memory, first):
    """Bytes that this rank reads if a gradient is exchanged alone."""
    if compression is None or ddp.sent_dense(name, x):
        return 2 * x.nbytes * (group.size - 1) // group.size
    kinds = ["residual", "velocity"] if compression.momentum else ["residual"]
    kept = memory.setdefault(name, {kind: torch.zeros_like(x) for kind in kinds})
    pycomm.compressed_all_reduce(x, compression, group=group, offset=first, **kept)
    return group.traffic()[1]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_numbers_for_loggers(name):
    elements = sum(parameter.numel() for parameter in ddp.Given().parameters())
    for steps in helpers.run_group(2, reporting, name, {}):
        total = 0
        for number, (stats, residuals, read) in enumerate(steps):
            assert all(isinstance(value, float) for value in stats.values())
            assert stats["steps"] == number + 1
            assert stats["bytes_in"] == 4 * elements
            # In the window, where uncompressed buckets lie, chunks are whole lines of the caches.
            slack = 2 * LINE if COMPRESSIONS[name] is None else 0
            assert stats["bytes_wire"] == pytest.approx(read, abs=slack, rel=0)
            assert stats["ratio"] == pytest.approx(4 * elements / stats["bytes_wire"], rel=1e-4)
            norm = sum(float(r.double().square().sum()) for r in residuals.values()) ** 0.5
            assert stats["residual_norm"] == pytest.approx(norm, rel=1e-6)
            total += stats["exposed_ms"]
            assert stats["exposed_ms_total"] == pytest.approx(total)
            assert stats["exposed_ms_mean"] == pytest.approx(total / (number + 1))


def test_a_warm_up_is_counted_as_dense():
    for steps in helpers.run_group(2, reporting, "int8", {"warmup_steps": 2}):
        dense = [True, True, False]
        assert [stats["bytes_wire"] == stats["bytes_in"] for stats, *_ in steps] == dense
        assert [stats["ratio"] == 1 for stats, *_ in steps] == dense


def with_a_late_peer(group, folder):
    """Rank 1 begins its second backward 0.3 s after rank 0 has handed over everything."""
    watched = Watched(ddp.Given(), pycomm.Int8())
    watched.run(group.rank, [0])
    loss = watched.model(ddp.gradients(watched.model, group.rank, 1))
    if group.rank == 0:
        loss.register_hook(lambda _: (folder / "begun").touch())
    else:
        helpers.wait_until((folder / "begun").exists)
        time.sleep(0.3)
    watched.backward(loss)
    before = watched.state.stats()
    watched.state.load_state_dict(watched.state.state_dict() | {"step": 1000})
    return before, watched.state.stats()


def test_waiting_for_a_peer_is_exposed(tmp_path):
    """The mean is of this process's two steps, although a loaded state has made a thousand."""
    (stats, loaded), _ = helpers.run_group(2, with_a_late_peer, tmp_path)
    assert 100 < stats["exposed_ms"] <= stats["exposed_ms_total"]
    assert loaded["steps"] == 1000
    assert loaded["exposed_ms_mean"] == pytest.approx(stats["exposed_ms_total"] / 2)
