"""The example of a language model: each way to train has the losses of one process."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import helpers
import pytest
import torch
from torch.nn import functional

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
STEPS, BATCH = 10, 3
WAYS = {
    "ddp": {},
    "recompute": {"recompute": True},
    "wrapper": {"mode": "wrapper"},
    "shards": {"mode": "wrapper", "shard": "gradients"},
    "int8": {"compression": "int8"},
    "bfloat16": {"autocast": "bfloat16"},
    "scaled": {"autocast": "float16", "grad_scaler": True, "mode": "wrapper", "shard": "optimizer"},
    "accumulated": {"accumulate": 2, "compression": "int8", "grad_scaler": True},
    "parameters": {"dtype": "bfloat16", "accumulate": 2, "mode": "wrapper"},
}
# The largest difference from one process, as a part of the loss, which ten steps reduce by a third.
LOST = {"int8": 1e-3, "bfloat16": 1e-3, "scaled": 1e-3, "accumulated": 1e-3, "parameters": 5e-3}


def train_each(group, ways):
    sys.path.append(str(EXAMPLES))
    import train_lm

    train_lm.BATCH = BATCH

    def train(way):
        run = train_lm.train(train_lm.Settings(steps=STEPS, **way), group)
        return run.losses[0], run.digest

    return {name: train(way) for name, way in ways.items()}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("train_lm.BATCH", BATCH)


def loss_alone(accumulate):
    """The mean loss of the steps of one process, which takes the batches of both ranks."""
    from train_lm import Transformer, draw_batch, read_corpus

    torch.manual_seed(0)
    net = Transformer()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    ranks = [(read_corpus(rank, 2), torch.Generator().manual_seed(rank)) for rank in range(2)]
    total, parts = 0.0, 2 * accumulate
    for _ in range(STEPS):
        for inputs, targets in (draw_batch(*rank) for rank in ranks for _ in range(accumulate)):
            loss = functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return total / STEPS


@pytest.mark.parametrize(
    "names",
    [("shards", "parameters"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_each_way_has_the_losses_of_one_process(names):
    expected = {accumulate: loss_alone(accumulate) for accumulate in (1, 2)}
    assert expected[1] != pytest.approx(expected[2], rel=5e-3)
    first, second = helpers.run_group(2, train_each, {name: WAYS[name] for name in names})
    assert first == second
    for name, (loss, _) in first.items():
        wanted = expected[WAYS[name].get("accumulate", 1)]
        assert loss == pytest.approx(wanted, rel=LOST.get(name, 1e-5)), name


@pytest.mark.slow
def test_recomputation_changes_no_bit():
    ways = {name: WAYS[name] for name in ("ddp", "recompute")}
    with_all, recomputed = helpers.run_group(2, train_each, ways)[0].values()
    assert with_all == recomputed


@pytest.mark.slow
def test_a_compiled_model():
    (loss, _), *_ = helpers.run_group(2, train_each, {"compiled": {"compile": True}})[0].values()
    assert loss == pytest.approx(loss_alone(1), rel=1e-4)


def train_until_stop(group, file):
    """Rank 1 gets SIGTERM while it draws the third step's batch."""
    sys.path.append(str(EXAMPLES))
    import train_lm

    train_lm.BATCH = BATCH
    draw_batch, drawn = train_lm.draw_batch, []

    def draw(*args):
        drawn.append(args)
        if group.rank == 1 and len(drawn) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw_batch(*args)

    train_lm.draw_batch = draw
    run = train_lm.train(train_lm.Settings(steps=STEPS, mode="wrapper", save=file), group)
    return run.steps, len(run.losses), run.digest


def test_a_signal_saves_and_ends(tmp_path):
    first, second = helpers.run_group(2, train_until_stop, str(tmp_path / "model.pt"))
    assert first == second
    assert first[:2] == (3, 1)
    saved = torch.load(tmp_path / "model.pt")
    assert saved["steps"] == 3
    digest = hashlib.sha256()
    for parameter in saved["model"].values():
        digest.update(parameter.numpy().tobytes())
    assert digest.hexdigest() == first[2]
