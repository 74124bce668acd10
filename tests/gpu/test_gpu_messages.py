"""Messages of CUDA tensors, which other ranks of the node copy between devices.

The emulated devices end the process if two streams use the same memory without an order.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import gpu_ranks
import helpers
import pytest
import torch
import torch.distributed as dist
from test_gpu_backend import run as run_backend

import pycomm
from pycomm._runtime import cuda, log

pytestmark = pytest.mark.gpu

EAGER = 16 << 10  # bytes of the largest message that goes through host memory
CYCLES = 100_000_000  # for which a stream sleeps: a moment
LARGE = 3_000_001  # elements; in float32 more than all slots hold
SIZES = (0, 1, 4096, 4097, 100_000, LARGE)
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex64)


def pattern(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def same(on_device: torch.Tensor, on_host: torch.Tensor) -> bool:
    return torch.equal(on_device.cpu().view(torch.uint8), on_host.view(torch.uint8))


class Messages:
    """What a rank of two sends and receives; each method compares with what the peer must send."""

    def __init__(self, group: pycomm.Group) -> None:
        self.group, self.rank, self.peer = group, group.rank, 1 - group.rank
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.seed = 0

    def pair(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor to send, and what the peer sends at the same time."""
        self.seed += 2
        mine, theirs = (pattern(count, dtype, self.seed + r) for r in (self.rank, self.peer))
        return mine.to(self.device), theirs

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device=self.device)

    def stays_on_devices(self) -> Any:
        """Fails if a call takes its tensor to pinned memory."""
        wrong = AssertionError("through host memory")
        return mock.patch.object(self.group, "_takes_to_host", side_effect=wrong)

    def sizes_and_dtypes(self) -> None:
        for count in SIZES:
            for dtype in DTYPES if count < LARGE else DTYPES[:1]:
                mine, theirs = self.pair(count, dtype)
                got = self.empty(theirs)
                stays = count * dtype.itemsize > EAGER
                with self.stays_on_devices() if stays else contextlib.nullcontext():
                    if self.rank == 0:
                        pycomm.send(mine, self.peer, group=self.group)
                        assert pycomm.recv(got, self.peer, group=self.group) == self.peer
                    else:
                        assert pycomm.recv(got, group=self.group) == self.peer
                        pycomm.send(mine, self.peer, group=self.group)
                assert same(got, theirs)

    def crossing_and_out_of_order(self) -> None:
        pairs = [self.pair(count, torch.float32) for count in (LARGE, 5, 100_000, LARGE)]
        got = [self.empty(theirs) for _, theirs in pairs]
        requests = [
            pycomm.isend(mine, self.peer, tag=tag, group=self.group)
            for tag, (mine, _) in enumerate(pairs)
        ]
        requests += [
            pycomm.irecv(got[tag], None if tag == 2 else self.peer, tag=tag, group=self.group)
            for tag in sorted(range(len(pairs)), reverse=self.rank == 1)
        ]
        for request in reversed(requests):
            request.wait()
            assert request.is_completed()
        for x, (_, theirs) in zip(got, pairs, strict=True):
            assert same(x, theirs)

    def streams(self) -> None:
        """Written just before on one stream, received and read on others, and freed at once."""
        writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
        mine, theirs = self.pair(100_000, torch.float32)
        writer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(writer):
            x = mine * 1
            sent = pycomm.isend(x, self.peer, group=self.group)
        del x
        got = torch.full((100_000,), 7.0, device=self.device)
        received = pycomm.irecv(got, self.peer, group=self.group)
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            received.wait()
            assert same(got + 0, theirs)
        got.record_stream(reader)
        mine.record_stream(writer)
        del got, received
        sent.wait()

    def a_tensor_that_is_still_in_use(self) -> None:
        """The message waits in other memory, not for the stream."""
        mine, theirs = self.pair(100_000, torch.float32)
        got = torch.full((100_000,), 7.0, device=self.device)
        torch.cuda._sleep(CYCLES)
        with self.stays_on_devices():
            received = pycomm.irecv(got, self.peer, group=self.group)
            sent = pycomm.isend(mine, self.peer, group=self.group)
            received.wait()
            sent.wait()
        assert same(got, theirs)
        with torch.cuda.stream(cuda._idle_streams[self.device]):
            torch.cuda._sleep(CYCLES)  # torch has given this stream to somebody else, too
        torch.cuda._sleep(CYCLES)
        sent = pycomm.isend(mine, self.peer, group=self.group)
        pycomm.recv(got.zero_(), self.peer, group=self.group)
        sent.wait()
        assert same(got, theirs)

    def strided(self) -> None:
        mine, theirs = self.pair(60_000, torch.float32)
        got = torch.zeros(600, 200, device=self.device)
        sent = pycomm.isend(mine.view(200, 300).t(), self.peer, group=self.group)
        with self.stays_on_devices():
            pycomm.irecv(got[::2], self.peer, group=self.group).wait()
        sent.wait()
        assert same(got[::2].contiguous(), theirs.view(200, 300).t().contiguous())
        assert (got[1::2] == 0).all()

    def devices_on_one_side(self) -> None:
        for count in (100, 100_000, LARGE):
            for on_device in (0, 1):  # the rank whose tensors are on its device
                mine, theirs = self.pair(count, torch.float32)
                if self.rank != on_device:
                    mine = mine.cpu()
                got = torch.empty_like(theirs, device=mine.device)
                sent = pycomm.isend(mine, self.peer, group=self.group)
                assert pycomm.recv(got, group=self.group) == self.peer
                sent.wait()
                assert same(got, theirs)

    def to_itself(self) -> None:
        for count in (100, 100_000):
            mine, _ = self.pair(count, torch.float32)
            got = self.empty(mine)
            received = pycomm.irecv(got, None, tag=9, group=self.group)
            pycomm.send(mine, self.rank, tag=9, group=self.group)
            received.wait()
            assert received.source == self.rank
            assert torch.equal(got, mine)

    def dropped(self) -> None:
        """Requests that nobody waits for keep their tensors."""
        mine, theirs = self.pair(100_000, torch.float32)
        pycomm.isend(mine, self.peer, tag=4, group=self.group)
        del mine
        torch.zeros(100_000, device=self.device)  # would overwrite memory that is free
        pycomm.irecv(torch.empty(100_000, device=self.device), self.peer, tag=5, group=self.group)
        pycomm.barrier(group=self.group)
        got = self.empty(theirs)
        pycomm.recv(got, self.peer, tag=4, group=self.group)
        assert same(got, theirs)
        pycomm.send(got, self.peer, tag=5, group=self.group)

    def beside_collectives(self) -> None:
        """A message need not be in the order of collectives."""
        mine, theirs = self.pair(100_000, torch.float32)
        got, total = self.empty(theirs), torch.ones(1000, device=self.device)
        received = pycomm.irecv(got, self.peer, group=self.group)
        if self.rank == 0:
            sent = pycomm.isend(mine, self.peer, group=self.group)
            pycomm.all_reduce(total, group=self.group)
        else:
            pycomm.all_reduce(total, group=self.group)
            sent = pycomm.isend(mine, self.peer, group=self.group)
        received.wait()
        sent.wait()
        assert same(got, theirs)
        assert (total == 2).all()

    def in_the_heap(self) -> None:
        mine, theirs = self.pair(LARGE, torch.float32)
        x = self.group.empty(LARGE, device="cuda").copy_(mine)
        got = self.group.empty(LARGE, device="cuda")
        with self.stays_on_devices():
            sent = pycomm.isend(x, self.peer, group=self.group)
            pycomm.recv(got, self.peer, group=self.group)
            sent.wait()
        assert same(got, theirs)

    def captured(self) -> None:
        x = torch.ones(100_000, device=self.device)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for call in (pycomm.send, pycomm.recv, pycomm.isend, pycomm.irecv):
                with pytest.raises(ValueError, match="a CUDA graph cannot capture a message"):
                    call(x, self.peer, group=self.group)

    ALL = (
        sizes_and_dtypes,
        crossing_and_out_of_order,
        streams,
        strided,
        devices_on_one_side,
        to_itself,
        dropped,
        beside_collectives,
    )


def all_messages(group: pycomm.Group) -> None:
    messages = Messages(group)
    for check in Messages.ALL:
        check(messages)
    messages.a_tensor_that_is_still_in_use()  # threads would end each other's sleep
    if group.explain(4, device="cuda").path != gpu_ranks.PINNED:
        messages.in_the_heap()
    messages.captured()


@pytest.mark.parametrize("layout", gpu_ranks.LAYOUTS)
def test_between_processes(layout: str) -> None:
    gpu_ranks.run(2, layout, all_messages, cuda_heap_bytes=64 << 20)


def against_the_order(group: pycomm.Group) -> None:
    """Rank 1's stream waits for a kernel that rank 0 launches when rank 1 has its message."""
    x, total = torch.full((LARGE,), 1.0, device="cuda"), torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    if group.rank == 0:
        pycomm.send(x, 1, group=group)
        pycomm.all_reduce(total, group=group)
    else:
        pycomm.all_reduce(total, group=group)
        pycomm.recv(x.zero_(), 0, group=group)
    assert (x == 1).all()
    assert (total == 2).all()


@pytest.mark.hardware  # emulated streams never have anything left to do
def test_a_message_does_not_wait_for_the_receivers_stream() -> None:
    gpu_ranks.run(2, gpu_ranks.PEER, against_the_order)


@pytest.mark.parametrize("devices", [1, 2])
def test_between_threads(devices: int) -> None:
    if devices > torch.cuda.device_count():
        pytest.skip("needs two GPUs")

    def body(group: pycomm.Group) -> None:
        torch.cuda.set_device(group.rank % devices)
        pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)  # connects
        messages = Messages(group)
        for check in Messages.ALL:
            check(messages)
        torch.cuda.synchronize()

    with pycomm.LocalWorld(2) as world:
        world.run(body)


def fail(rank: int, size: int, store: str, how: str) -> tuple[str, int, str]:
    """Rank 1 fails in a message of rank 0, which gets an error that names it."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=2 if how == "stopped" else 60)
    pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    x = torch.ones(LARGE, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "size": lambda: pycomm.recv(x[rank:], 1 - rank, group=group),
        "receiver": lambda: pycomm.send(x, 1, group=group),
    }
    if rank == 1:
        if how == "size":
            calls["size"] = lambda: pycomm.send(x[1:], 0, group=group)
        elif how == "receiver":
            pycomm.irecv(x[:EAGER], 0, tag=1, group=group)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            for _ in range(2):
                pycomm.isend(x, 0, group=group)  # the first one is on its way, or is not
            number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
            os.kill(os.getpid(), number)
    receive = lambda: [pycomm.recv(x, 1, group=group) for _ in range(3)]  # noqa: E731
    with pytest.raises(pycomm.CollectiveError) as caught:
        calls.get(how, receive)()
    assert torch.ones(3, device="cuda").sum().item() == 3  # the device still works
    return caught.type.__name__, caught.value.rank, str(caught.value)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("sender", "PeerDied"),
        ("receiver", "PeerDied"),
        ("stopped", "Timeout"),
        ("size", "Mismatch"),
    ],
)
def test_every_rank_learns_who_failed(how: str, kind: str) -> None:
    with helpers.Ranks(2, fail, how) as ranks:
        for outcome in ranks.wait_for([0, 1] if how == "size" else [0]):
            assert outcome.error is None, outcome.trace
            name, culprit, text = outcome.value
            assert name == kind
            assert how == "size" or culprit == 1
            assert how != "size" or "rank 1 sent 3000000 float32" in text


def batches(rank: int, size: int) -> list[bool]:
    """Batches of torch.distributed; ranks list their operations in opposite orders."""
    dist.all_reduce(torch.ones(1, device="cuda"))  # connects
    results = []
    staged = mock.patch.object(log, "backend_stages").start()
    for count in (100_000, LARGE, 100):
        for is_strided in (False, True):
            for is_busy in (False, True):
                x = torch.arange(2.0 * count, device="cuda").view(-1, 2)[:, 0] + rank
                y = torch.zeros(2, count, device="cuda")
                y = y.t()[:, 0] if is_strided else y[0]
                torch.cuda.synchronize()
                operations = [
                    dist.P2POp(dist.isend, x, (rank + 1) % size),
                    dist.P2POp(dist.irecv, y, (rank - 1) % size),
                ]
                if is_busy:
                    torch.cuda._sleep(CYCLES)
                for work in dist.batch_isend_irecv(operations[:: -1 if rank else 1]):
                    work.wait()
                wanted = torch.arange(0, 2 * count, 2) + float((rank - 1) % size)
                results.append(torch.equal(y.cpu(), wanted))
                results.append(staged.called == (count == 100))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_batches_of_torch_distributed(size: int) -> None:
    assert run_backend(size, batches) == [[True] * 24] * size
