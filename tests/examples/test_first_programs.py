"""The short programs for newcomers: what they print is true, on every number of ranks."""

import runpy
import subprocess
import sys
from pathlib import Path

import backends
import helpers
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
CPU = torch.device("cpu")
EPOCHS, STEPS = 3, 40
MODULES = {"devices", "model_parallel", "showing"}  # of the programs
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in MODULES)


def ddp_losses(rank, size, store, compression):
    sys.path.append(str(EXAMPLES))
    import spawn_ddp

    with helpers.member(rank, size, store) as group:
        return spawn_ddp.train(group, CPU, EPOCHS, compression)


def losses_by_hand():
    """The losses of one process that takes the samples in the order of torch's sampler."""
    from spawn_ddp import BATCH, SAMPLES, make_dataset, make_model

    points, values = make_dataset().tensors
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for batch in order.split(BATCH):
            loss = (model(points[batch]) - values[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * BATCH / SAMPLES
        losses.append(total)
    return losses


def test_ddp_takes_the_steps_of_one_process():
    """So every sample is seen once per epoch, in an order that each epoch has for itself."""
    expected = losses_by_hand()
    assert expected[-1] < 0.5 * expected[0]
    first, second = helpers.run_ranks(2, ddp_losses, "none")
    assert first == second
    assert first == pytest.approx(expected, rel=1e-4)
    in_8_bits = helpers.run_ranks(2, ddp_losses, "int8")[0]
    assert in_8_bits == pytest.approx(expected, rel=0.05)
    assert in_8_bits != first


def split_losses(rank, size, store):
    sys.path.append(str(EXAMPLES))
    import split_model

    with helpers.member(rank, size, store):
        part = split_model.train_last if rank else split_model.train_first
        return part(STEPS, CPU)


def test_the_split_model_has_the_losses_of_the_whole_one():
    from split_model import train_whole

    none, losses = helpers.run_ranks(2, split_losses)
    assert none is None
    assert losses == train_whole(STEPS, CPU)
    assert losses[-1] < 0.5 * losses[0]


def both_halves(rank, size):
    sys.path.append(str(EXAMPLES))
    import primitives

    import pycomm

    with pycomm.init() as group:
        halves = primitives.with_torch(rank, size, CPU), primitives.with_pycomm(group, CPU)
    return [primitives.as_texts(half) for half in halves]


def text(*numbers):
    return " ".join(map(str, numbers))


def test_primitives():
    """Three ranks have 0 1 2, 10 11 12 and 20 21 22."""
    shared = {"broadcast": text(0, 1, 2), "all_gather": text(0, 10, 20)}
    shared["all_reduce"] = text(30, 33, 36)
    for rank, (torchs, ours) in enumerate(backends.run(3, both_halves)):
        before = (rank - 1) % 3
        of_the_first = {"gather": text(0, 10, 20), "reduce": text(30, 33, 36)}
        assert ours == shared | ({} if rank else of_the_first) | {
            "scatter": text(rank),
            "reduce_scatter": text(30 + 3 * rank),
            "all_to_all": text(rank, 10 + rank, 20 + rank),
            "send, recv": text(10 * before, 10 * before + 1, 10 * before + 2),
        }
        assert torchs == ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["spawn_ddp.py", "--epochs", "1"], ["epoch 1: loss", "3.2 times fewer bytes"]),
        (["split_model.py", "--steps", "5"], ["largest difference of a loss: 0\n"]),
        (
            ["split_model.py", "--steps", "5", "--dtype", "bfloat16"],
            ["    5  3.2969  3.2969", "largest difference of a loss: 0\n"],
        ),
        (["spawn_ddp.py", "--epochs", "1", "--dtype", "bfloat16"], ["1.8 times fewer bytes"]),
        (["primitives.py"], ["all_to_all      0 10 20    1 11 21    2 12 22", "gave the same"]),
    ],
)
def test_command_lines(command, words, tmp_path):
    name, *options = command
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in words:
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_gpu_is_one_sentence(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cuda"])
    with pytest.raises(SystemExit, match=r"^--device cuda needs a GPU that torch can use; .*here$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("option", ["steps", "ranks", "epochs"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_counts_begin_at_one(option, value, capsys, monkeypatch):
    """Every program that takes the option says so, and starts nothing."""
    asked = 0
    for program in PROGRAMS:
        text = (EXAMPLES / f"{program}.py").read_text()
        if f'"--{option}", type' not in text and not ("parser_of(" in text and option != "epochs"):
            continue
        monkeypatch.setattr(sys, "argv", [f"{program}.py", f"--{option}={value}"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLES / f"{program}.py"), run_name="__main__")
        said = capsys.readouterr().err
        assert f"argument --{option}: must be a number from 1 on, got '{value}'" in said, program
        asked += 1
    assert asked


def test_an_unknown_compression_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--compression=zip"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "train_lm.py"), run_name="__main__")
    assert "compression must be none, bf16" in capsys.readouterr().err
