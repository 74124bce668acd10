"""The examples of model parallelism: losses of one process, pictures, command lines."""

import subprocess
import sys
from pathlib import Path

import backends
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
CPU = torch.device("cpu")
STEPS = 6
PNG = b"\x89PNG"


def alone():
    """The losses of one process."""
    from model_parallel import batches, loss_of, make_optimizer
    from train_lm import Transformer

    torch.manual_seed(0)
    net = Transformer()
    optimizer = make_optimizer(net.parameters())
    losses = []
    for _, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        loss = loss_of(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(_rank, _size, name, *arguments):
    sys.path.append(str(EXAMPLES))
    example = __import__(name)
    return example.train(STEPS, *arguments).losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("fsdp", 2, []),
        ("tensor_parallel", 2, []),
        ("pipeline", 2, ["gpipe"]),
        ("pipeline", 4, ["1f1b"]),
    ],
)
def test_losses_are_those_of_one_process(name, ranks, more, tmp_path):
    """And the same bits on every rank and from run to run."""
    plot = tmp_path / "folder" / "plot.png"
    first = backends.run(ranks, trained, name, None, CPU, *more)
    assert first[0] == pytest.approx(alone(), rel=1e-4)
    assert first == [first[0]] * ranks
    assert backends.run(ranks, trained, name, str(plot), CPU, *more) == first
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize("compression", ["int8", "bf16"])
def test_compressed_losses(compression):
    first, second = backends.run(2, trained, "fsdp", None, CPU, compression)
    assert first == second
    assert first == pytest.approx(alone(), rel=0.01)
    assert first != pytest.approx(alone(), rel=1e-6)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "script", "words"),
    [
        (TORCHRUN, ["fsdp.py", "--compression", "int8"], "FSDP, compression int8"),
        ([], ["tensor_parallel.py", "--dtype", "bfloat16"], "tensor-parallel"),
        ([], ["pipeline.py", "--dtype", "bfloat16"], "pipeline, schedule 1f1b"),
    ],
)
def test_command_lines(launcher, script, words, tmp_path):
    name, *options = script
    options += ["--steps", "3", "--plot", str(tmp_path / "plot.png")]
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert words in ran.stdout
    assert "3/3" in ran.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_times():
    """Rank 1 is late for the collective, and rank 0 then waits for its message."""
    from model_parallel import RECEIVE, SEND, STEP, Interval, pieces_of, times_of

    ranks = [
        [Interval(STEP, 0, 10), Interval("pycomm:all_reduce", 2, 6), Interval(RECEIVE, 7, 9.5)],
        [Interval(STEP, 0, 10), Interval("pycomm:all_reduce", 5, 6), Interval(SEND, 9, 9.5)],
    ]
    times = times_of(ranks)
    assert times == [[(2, 5, 6), (7, 9, 9.5)], [(5, 5, 6)]]
    expected = [
        ("compute", 0, 2), ("wait", 2, 5), ("communicate", 5, 6),
        ("compute", 6, 7), ("wait", 7, 9), ("communicate", 9, 9.5),
        ("compute", 9.5, 10),
    ]  # fmt: skip
    assert pieces_of(0, 10, times[0]) == expected
