"""torch.ops.pycomm on CUDA tensors: opcheck, values, errors, gradients, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compiled_step
import gpu_ranks
import pytest
import torch
from operators import close, expected_gradients, gradients

import pycomm

pytestmark = pytest.mark.gpu
OPS = torch.ops.pycomm
INT8 = ("int8:128", 3, 256, False)


def whole(rank: int, rows: int = 6) -> torch.Tensor:
    """A rank's input, on the CPU: whole numbers, not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, (5, rows), generator=generator).float().t()


@pytest.fixture(scope="module")
def alone() -> Any:
    with pycomm.LocalWorld(1) as world:
        yield world.groups[0].name


def calls(name: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """A call of every operation, by the only rank of the group `name`."""
    x, dense = whole(0).cuda(), whole(0).contiguous().cuda()
    out, residual = torch.empty_like(dense), torch.zeros_like(dense)
    text, *step = INT8
    return [
        (OPS.all_reduce, (x, "sum", "ring", name)),
        (OPS.reduce, (x, 0, name)),
        (OPS.reduce_scatter, (x, "avg", 1, name)),
        (OPS.all_gather, (x, 1, name)),
        (OPS.all_to_all, (x, name)),
        (OPS.broadcast, (x, 0, name)),
        (OPS.all_reduce_, (dense, "max", "two_shot", name)),
        (OPS.reduce_scatter_, (out, dense, "min", name)),
        (OPS.all_gather_, (out, dense, name)),
        (OPS.broadcast_, (dense, 0, name)),
        (OPS.compressed_all_reduce, (x, text, "sum", "tree", *step, name)),
        (OPS.compressed_all_reduce_, (dense, text, residual, None, "avg", "auto", *step, name)),
        (OPS.compressed_reduce_scatter, (x, text, "sum", *step, 1, name)),
        (OPS.compressed_reduce_scatter_, (out, dense, text, residual, "avg", *step, name)),
        (OPS.encode, (x, text, 3, 256)),
        (OPS.decode, (OPS.encode(x, text, 3, 256), text, 30, torch.float32)),
    ]


@pytest.mark.parametrize("index", range(16))
def test_opcheck(alone: str, index: int) -> None:
    op, arguments = calls(alone)[index]
    torch.library.opcheck(op, arguments)
    if op.__name__ in ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"):
        tensor, *rest = arguments
        torch.library.opcheck(op, (tensor.requires_grad_(), *rest))


def test_values_after_the_streams_own_work() -> None:
    """Each input is made, and each result used, on a stream without other order."""
    size, src = 3, 1
    inputs = torch.stack([whole(rank) for rank in range(size)])
    total = inputs.sum(0)

    def body(group: pycomm.Group) -> None:
        rank, name = group.rank, group.name
        mine = slice(2 * rank, 2 * rank + 2)
        with torch.cuda.stream(torch.cuda.Stream()):

            def given() -> torch.Tensor:
                return whole(rank).cuda() * 2 / 2

            def equal(result: torch.Tensor, wanted: torch.Tensor) -> None:
                assert result.is_contiguous()
                assert torch.equal((result + 0).cpu(), wanted)

            x = given()
            equal(OPS.all_reduce(x, "sum", "auto", name), total)
            dense = x.contiguous()
            equal(OPS.all_reduce(dense, "max", "one_shot", name), inputs.amax(0))
            on_dst = total if rank == src else torch.zeros_like(total)
            equal(OPS.reduce(x, src, name), on_dst)
            equal(OPS.reduce_scatter(x, "sum", size, name), total[mine])
            equal(OPS.all_gather(x, size, name), inputs.reshape(-1, 5))
            equal(OPS.all_to_all(x, name), inputs[:, mine].reshape(-1, 5))
            equal(OPS.broadcast(dense, src, name), inputs[src])
            coded = OPS.compressed_all_reduce(dense, "int8", "sum", "auto", 0, 0, False, name)
            assert coded.is_contiguous()
            torch.testing.assert_close(coded.cpu(), total, rtol=0, atol=2.0)
            for given_before in (x.contiguous(), dense):  # no operation has changed them
                equal(given_before, inputs[rank])
            dense = given().contiguous()
            OPS.all_reduce_(dense, "min", "ring", name)
            equal(dense, inputs.amin(0))
            part, gathered = torch.empty(2, 5, device="cuda"), torch.empty(18, 5, device="cuda")
            OPS.reduce_scatter_(part, given().contiguous(), "sum", name)
            equal(part, total[mine])
            OPS.all_gather_(gathered, given().contiguous(), name)
            equal(gathered, inputs.reshape(-1, 5))
            dense = given().contiguous()
            OPS.broadcast_(dense, src, name)
            equal(dense, inputs[src])
        torch.cuda.synchronize()

    with pycomm.LocalWorld(size, timeout=60) as world:
        world.run(body)


BAD_CALLS: dict[str, Callable[[Any, str], Any]] = {
    "group": lambda x, _: OPS.all_reduce(x, "sum", "auto", "nobody"),
    "op": lambda x, name: OPS.all_reduce(x, "mean", "auto", name),
    "algorithm": lambda x, name: OPS.all_reduce_(x, "sum", "x", name),
    "reduction of a dtype": lambda x, name: OPS.all_reduce(x.bool(), "avg", "auto", name),
    "dst": lambda x, name: OPS.reduce(x, 2, name),
    "src": lambda x, name: OPS.broadcast(x, -1, name),
    "src in place": lambda x, name: OPS.broadcast_(x, 2, name),
    "size": lambda x, name: OPS.all_gather(x, 3, name),
    "no size": lambda x, name: OPS.reduce_scatter(x, "sum", 0, name),
    "no dimension": lambda x, name: OPS.all_gather(x.sum(), 2, name),
    "rows to scatter": lambda x, name: OPS.reduce_scatter(x[:3], "sum", 2, name),
    "rows to exchange": lambda x, name: OPS.all_to_all(x[:3], name),
    "elements of the input": lambda x, name: OPS.reduce_scatter_(x, x.clone(), "sum", name),
    "elements of the output": lambda x, name: OPS.all_gather_(x, x.clone(), name),
    "strides": lambda x, name: OPS.all_reduce_(x.t(), "sum", "auto", name),
    "strides of the output": lambda x, name: OPS.all_gather_(
        x.new_empty(5, 12).t(), x.clone(), name
    ),
    "gradient in place": lambda x, name: OPS.all_reduce_(
        x.requires_grad_() * 1, "sum", "auto", name
    ),
    "gradient of max": lambda x, name: OPS.all_reduce(x.requires_grad_(), "max", "auto", name),
    "gradient of compressed": lambda x, name: OPS.compressed_all_reduce(
        x.requires_grad_(), "int8", "sum", "auto", 0, 0, False, name
    ),
    "compression": lambda x, name: OPS.compressed_all_reduce(
        x, "int7", "sum", "auto", 0, 0, False, name
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_errors_are_the_cpus(what: str) -> None:
    """They are raised before the ranks meet, so one of two ranks suffices."""
    texts = []
    with pycomm.LocalWorld(2, timeout=5) as world:
        for device in ("cpu", "cuda"):
            with pytest.raises(ValueError, match=r"\w") as caught:
                BAD_CALLS[what](whole(0).contiguous().to(device), world.groups[0].name)
            texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("separate_launches", [False, True])
def test_backward_of_threads_that_share_a_device(separate_launches: bool) -> None:
    """Autograd has one thread for the device, where one rank would wait for the other."""

    def body(group: pycomm.Group) -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        refused = "ranks that are threads must have a GPU each"
        total = OPS.all_reduce(x, "sum", "auto", group.name).sum()
        with pytest.raises(ValueError, match=refused):
            total.backward()
        pycomm.all_reduce(torch.ones(4, device="cuda"), group=group)  # by the short way
        doubled = x * 2
        doubled.register_hook(lambda gradient: pycomm.all_reduce(gradient, group=group))
        with pytest.raises(ValueError, match=refused):
            doubled.backward(torch.ones_like(doubled))

    with pycomm.LocalWorld(2, timeout=20, separate_launches=separate_launches) as world:
        world.run(body)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_equal_those_of_one_process(backend: str | None) -> None:
    found = gpu_ranks.run(2, gpu_ranks.PEER, gradients, backend, "cuda")
    close(found, expected_gradients(2))


@pytest.mark.parametrize(
    ("backend", "compression"),
    [
        ("aot_eager", "int8:128"),
        pytest.param("inductor", "", marks=pytest.mark.hardware),
        pytest.param("inductor", "int8:128", marks=pytest.mark.hardware),
    ],
)
def test_a_compiled_training_step(backend: str, compression: str) -> None:
    arguments = (compiled_step.train, "cuda", backend, compression)
    for found in gpu_ranks.run(2, gpu_ranks.PEER, *arguments):
        compiled_step.check(found, 2, compression)
