"""The example programs, on GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import backends
import gpu_ranks
import helpers
import pages
import pytest

import pycomm

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 10
BATCH = 3
HEAP = 16 << 20
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def said_by(program, *options, launcher=()):
    """What a program writes."""
    done = subprocess.run(
        [sys.executable, *launcher, str(program), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("spawn_ddp.py", ["--epochs", "1"], "epoch 1: loss 1.1"),  # 1.1300 on the CPU
        ("split_model.py", ["--steps", "5"], "    5  3.2728  3.2728"),  # as on the CPU
        ("primitives.py", [], "pycomm gave the same"),
        ("survive.py", ["--steps", "20", "--seed", "3", "--dtype", "bfloat16"], "bit for bit"),
    ],
)
def test_on_a_gpu(name, options, words):
    assert words in said_by(EXAMPLES / name, *options, "--device", "cuda")


def test_the_program_of_the_readme(tmp_path):
    """It learns with the device that its comment names."""
    program = next(pages.blocks_of("README.md", "python")).text
    on_the_cpu = 'torch.device("cpu")'
    assert on_the_cpu in program
    (tmp_path / "train.py").write_text(program.replace(on_the_cpu, 'torch.device("cuda")'))
    said = said_by(tmp_path / "train.py", launcher=TORCHRUN)
    losses = [float(loss) for loss in re.findall(r"rank \d: loss ([\d.]+),", said)]
    assert len(losses) == 2  # of ranks whose lines may have joined
    assert max(losses) < 20  # 64, the variance, without training


WAYS = [
    {"compression": "int8", "autocast": "float16", "grad_scaler": True, "accumulate": 2},
    {"mode": "wrapper", "recompute": True, "autocast": "bfloat16"},
    {"mode": "wrapper", "shard": "optimizer", "grad_scaler": True},
]


def train_on_both(group, ways, devices):
    """The loss of each way of train_lm.py on each device."""
    sys.path.append(str(EXAMPLES))
    import train_lm

    train_lm.BATCH = BATCH
    return [
        [
            train_lm.train(train_lm.Settings(steps=STEPS, device=device, **way), group).losses[0]
            for device in devices
        ]
        for way in ways
    ]


@pytest.mark.slow
def test_ways_to_train_have_the_losses_of_the_cpu():
    first, second = gpu_ranks.run(
        2, gpu_ranks.PEER, train_on_both, WAYS, ["cuda", "cpu"], cuda_heap_bytes=HEAP
    )
    assert first == second
    for on_a_gpu, on_the_cpu in first:
        assert on_a_gpu == pytest.approx(on_the_cpu, rel=1e-3)


def losses(*ways):
    return gpu_ranks.run(2, gpu_ranks.PEER, train_on_both, list(ways), ["cuda"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_captured_step_has_the_losses_of_ordinary_ones(compression):
    ways = [{"compression": compression, "mode": mode} for mode in ("graph", "ddp")]
    (captured,), (ordinary,) = losses(*ways)
    assert captured == pytest.approx(ordinary, rel=1e-3)


@pytest.mark.hardware
def test_a_captured_step_may_be_compiled():
    way = {"compression": "int8", "mode": "graph"}
    (captured,), (compiled,) = losses(way, way | {"compile": True, "accumulate": 2})
    assert compiled < 1.1 * captured


def test_a_loop_of_ones_own():
    sys.path.append(str(EXAMPLES))
    from custom_loop import train

    with pycomm.LocalWorld(2) as world:
        on_a_gpu, on_the_cpu = (
            world.run(train, "torch", 50, 10, 2, device)[0] for device in ("cuda", "cpu")
        )
    assert on_a_gpu == pytest.approx(on_the_cpu, rel=1e-2)


def trained_on_both(rank, size, store, name, *more):
    """The losses of an example of model parallelism on a GPU and on the CPU."""
    sys.path.append(str(EXAMPLES))
    from devices import CPU, device_of

    device = device_of("cuda", rank)
    backends.join(rank, size, store)
    train = __import__(name).train
    return [train(STEPS, None, where, *more).losses for where in (device, CPU)]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("tensor_parallel", []),
        ("pipeline", ["1f1b"]),
        pytest.param("fsdp", ["none"], marks=pytest.mark.hardware),
        pytest.param("fsdp", ["int8"], marks=pytest.mark.hardware),
    ],
)
def test_model_parallelism(name, more):
    first, second = helpers.run_ranks(2, trained_on_both, name, *more)
    assert first == second
    on_a_gpu, on_the_cpu = first
    assert on_a_gpu == pytest.approx(on_the_cpu, rel=1e-2)
