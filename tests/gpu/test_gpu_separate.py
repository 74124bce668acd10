"""Ranks of a LocalWorld that launch their own kernels, at the same time, on one GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import pycomm
from pycomm._runtime import cuda

pytestmark = pytest.mark.gpu


def results(group: pycomm.Group) -> list[torch.Tensor]:
    """The results of operations that use packets, flags, codecs and several kernels."""
    found = []
    for count, algorithms in (100, ["one_shot"]), (2049, ["one_shot", "two_shot", "ring", "tree"]):
        for algorithm in algorithms:
            x = torch.linspace(-1, 1, count, device="cuda") * (group.rank + 1)
            pycomm.all_reduce(x, algorithm=algorithm, group=group)
            found.append(x)
        for compression in (pycomm.Int8(), pycomm.TopK(0.1)):
            x = torch.linspace(-1, 1, count, device="cuda") * (group.rank + 1)
            residual = torch.zeros_like(x)
            pycomm.compressed_all_reduce(x, compression, residual=residual, group=group)
            found += [x, residual]
        block = torch.empty(count, device="cuda")
        pycomm.reduce_scatter(block, x.repeat(group.size), group=group)
        found.append(block)
    return [tensor.cpu() for tensor in found]


def test_bits_are_those_of_a_shared_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pycomm.LocalWorld(2) as shared, pycomm.LocalWorld(2, separate_launches=True) as world:
        wanted = shared.run(results)
        monkeypatch.setattr(cuda._C, "CudaSharedLaunch", None)
        found = world.run(results)
    for want, got in zip(wanted, found, strict=True):
        assert all(map(torch.equal, want, got))


def test_each_rank_works_on_a_stream_of_its_own() -> None:
    """After what the caller has enqueued, and before what it enqueues next."""
    tensors = [torch.zeros(1 << 16, device="cuda") for _ in range(2)]

    def body(group: pycomm.Group) -> int:
        tensor = tensors[group.rank]
        tensor += 1
        pycomm.all_reduce(tensor, group=group)
        return torch.cuda.current_stream().cuda_stream

    with pycomm.LocalWorld(2, separate_launches=True) as world:
        for tensor in tensors:
            tensor += 1
        streams = world.run(body)
        for tensor in tensors:
            tensor += 1
        assert len({*streams, torch.cuda.current_stream().cuda_stream}) == 3
    assert all(tensor.cpu().eq(5).all() for tensor in tensors)


def all_reduce_to_its_end(x: torch.Tensor, group: pycomm.Group) -> None:
    """Also raises what the kernel finds."""
    pycomm.all_reduce(x, group=group)
    torch.cuda.current_stream().synchronize()
    group.check()


def test_every_rank_tells_a_mismatch() -> None:
    with pycomm.LocalWorld(2, separate_launches=True) as world:

        def body(group: pycomm.Group) -> None:
            with pytest.raises(pycomm.Mismatch, match=r"10 elements.*11 elements"):
                all_reduce_to_its_end(torch.ones(10 + group.rank, device="cuda"), group)
            with pytest.raises(pycomm.GroupUnusable):
                pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)

        world.run(body)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize(
    ("how", "kind"),
    [("dies", pycomm.PeerDied), ("late", pycomm.Timeout), ("abort", pycomm.Aborted)],
)
def test_a_kernel_that_waits_alone_ends(how: str, kind: type[pycomm.CollectiveError]) -> None:
    """Rank 1 launches nothing while rank 0's kernel waits for it."""
    raised = threading.Event()

    def body(group: pycomm.Group) -> None:
        x = torch.ones(1 << 16, device="cuda")
        pycomm.all_reduce(x, group=group)
        if group.rank == 1 and how == "dies":
            raise ZeroDivisionError
        if group.rank == 1 and how == "abort":
            group.abort()
        elif group.rank == 1:
            assert raised.wait(30)
        with pytest.raises(kind) as caught:
            all_reduce_to_its_end(x, group)
        raised.set()
        errors[group.rank] = caught.value

    errors: dict[int, pycomm.CollectiveError] = {}
    with pycomm.LocalWorld(2, 1, separate_launches=True) as world:
        if how == "dies":
            with pytest.raises(ZeroDivisionError):
                world.run(body)
        else:
            world.run(body)
    assert {rank: error.rank for rank, error in errors.items()} == (
        {0: 1} if how == "dies" else {0: 1, 1: 1}
    )
    if how == "late":
        assert "when no operation of this rank ran on its device" in str(errors[1])
        assert (errors[0].operation, errors[1].operation) == ("all_reduce", "")
    assert torch.ones(3, device="cuda").sum().item() == 3


def refused(wanted: str, stream: torch.cuda.Stream | None) -> None:
    """Both ranks' first operation is refused, on a stream that both use or on one for each."""

    def body(group: pycomm.Group) -> None:
        with torch.cuda.stream(stream), pytest.raises(ValueError, match=wanted):
            pycomm.all_reduce(torch.ones(3, device="cuda"), group=group)

    with pycomm.LocalWorld(2, separate_launches=True) as world:
        world.run(body)


def test_what_cannot_run_at_the_same_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"separate_launches must be False.*serial=True"):
        pycomm.LocalWorld(2, serial=True, separate_launches=True)
    with pytest.raises(ValueError, match=r"separate_launches must be False.*nodes=\[1, 1\]"):
        pycomm.LocalWorld(2, nodes=[1, 1], separate_launches=True)
    refused("a stream for each rank.* got 1 on cuda:0 for 2 ranks", torch.cuda.current_stream())
    small = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    refused("a multiprocessor for.* cuda:0 has 1, got 2 ranks", None)
