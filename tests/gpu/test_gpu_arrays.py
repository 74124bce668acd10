"""Arrays of other libraries on CUDA: their order, memory and results (a stand-in for CuPy).

The emulated devices end the process if two streams use the same memory without an order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cupy_stand_in
import pytest
import torch

import pycomm

pytestmark = pytest.mark.gpu
COUNT = 3000


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in; its current stream is not torch's."""
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    module = cupy_stand_in.install()
    cupy_stand_in.asked.clear()
    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            module.cuda.Stream(torch.cuda.Stream()).use()
    yield module
    torch.cuda.synchronize()
    cupy_stand_in._current.clear()


def on_ranks(body: Callable[[pycomm.Group], None], **options: Any) -> None:
    with pycomm.LocalWorld(2, **options) as world:
        world.run(body)


LAYOUTS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "staged": {"_stage_always": True},
    "two nodes": {"nodes": [1, 1]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_follow_the_current_stream_of_cupy(layout: str, cupy: Any) -> None:
    """Inputs are written just before, results read just after, and inputs freed at once."""

    def body(group: pycomm.Group) -> None:
        rank = group.rank
        for _ in range(3):
            x = cupy.full(COUNT, 1.0 + rank)
            assert pycomm.all_reduce(x, group=group) is x
            assert x.get() == [3.0] * COUNT
            x.fill(rank)
            out = cupy.full(COUNT, 0.0)
            assert pycomm.all_reduce(x, out=out, group=group) is out
            del x
            assert out.get() == [1.0] * COUNT
            everything = cupy.full(2 * COUNT, 0.0)
            assert pycomm.all_gather(everything, out, group=group) is everything
            own = cupy.full(COUNT, 0.0)
            assert pycomm.reduce_scatter(own, everything, group=group) is own
            del everything
            assert own.get() == [2.0] * COUNT
            own.fill(rank)
            assert pycomm.broadcast(own, 1, group=group) is own
            assert own.get() == [1.0] * COUNT
        torch.cuda.synchronize()

    on_ranks(body, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_asynchronous_operations_copy_results_back_on_the_stream_of_cupy(
    layout: str, cupy: Any
) -> None:
    def body(group: pycomm.Group) -> None:
        works = []
        for number in range(3):
            x = cupy.full(COUNT, float(number))
            works.append((x, pycomm.all_reduce(x, group=group, async_op=True)))
        for number, (x, work) in enumerate(works):
            work.wait()
            assert x.get() == [2.0 * number] * COUNT
        torch.cuda.synchronize()

    on_ranks(body, **LAYOUTS[layout])


def test_compressed_operations_follow_the_stream_of_cupy(cupy: Any) -> None:
    def body(group: pycomm.Group) -> None:
        x, residual = cupy.full(COUNT, 1.0), cupy.full(COUNT, 0.0)
        made = pycomm.compressed_all_reduce(x, pycomm.Int8(), residual=residual, group=group)
        assert made is x
        assert x.get() == [1.0] * COUNT
        assert residual.get() == [0.0] * COUNT
        torch.cuda.synchronize()

    on_ranks(body)


def test_messages_and_lists_follow_the_stream_of_cupy(cupy: Any) -> None:
    def body(group: pycomm.Group) -> None:
        rank, other = group.rank, 1 - group.rank
        x, out = cupy.full(COUNT, float(rank)), cupy.full(COUNT, 7.0)
        received = pycomm.irecv(out, other, group=group)
        pycomm.isend(x, other, group=group).wait()
        x.fill(-1.0)
        received.wait()
        assert out.get() == [float(other)] * COUNT
        for turn in range(2):
            if turn == rank:
                pycomm.send(out, other, group=group)
            else:
                pycomm.recv(x, other, group=group)
        assert x.get() == [float(rank)] * COUNT
        blocks = [cupy.full(COUNT, 7.0) for _ in range(2)]
        pycomm.all_gather(blocks, x, group=group)
        x.fill(-1.0)
        assert [block.get() for block in blocks] == [[0.0] * COUNT, [1.0] * COUNT]
        torch.cuda.synchronize()

    on_ranks(body)


def test_encoded_and_decoded_arrays_are_those_of_cupy(cupy: Any) -> None:
    x = cupy.full(COUNT, 1.0)
    wire = pycomm.Int8().encode(x)
    assert isinstance(wire, cupy.ndarray)
    decoded = pycomm.Int8().decode(wire, COUNT)
    assert isinstance(decoded, cupy.ndarray)
    del wire
    assert decoded.get() == [1.0] * COUNT
    out = cupy.full(COUNT, 0.0)
    assert pycomm.Int8().decode(pycomm.Int8().encode(x), COUNT, out) is out
    assert out.get() == [1.0] * COUNT


def test_selected_elements_are_arrays_of_cupy(cupy: Any) -> None:
    x = cupy.full(COUNT, 1.0)
    indices, values = pycomm.TopK(k=3).select(x)
    del x
    assert [len(set(indices.get())), values.get()] == [3, [1.0] * 3]


def test_tensors_of_torch_beside_arrays_are_in_order_with_both_streams(cupy: Any) -> None:
    def body(group: pycomm.Group) -> None:
        x, out = torch.full((COUNT,), 1.0, device="cuda"), cupy.full(COUNT, 0.0)
        pycomm.all_reduce(x, out=out, group=group)
        x.fill_(5.0)  # on torch's stream, after the operation has read it
        assert out.get() == [2.0] * COUNT
        torch.cuda.synchronize()

    on_ranks(body)


def test_no_stream_waits_for_another_one(cupy: Any) -> None:
    """Arrays are asked for with their own stream, so that nothing is to be ordered."""

    def body(group: pycomm.Group) -> None:
        pycomm.all_reduce(cupy.full(COUNT, 1.0), group=group)
        torch.cuda.synchronize()

    on_ranks(body)
    own = cupy.cuda.get_current_stream().ptr
    assert own != torch.cuda.current_stream().cuda_stream
    assert cupy_stand_in.asked == [own, own]


class Interface:
    """An array with `__cuda_array_interface__` alone."""

    def __init__(self, data: torch.Tensor, stream: int | None, read_only: bool = False) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": tuple(data.shape),
            "typestr": "<f4",
            "data": (data.data_ptr(), read_only),
            "strides": None,
            "version": 3,
            "stream": stream,
        }


@pytest.mark.hardware  # a torch without CUDA takes no such array
def test_arrays_with_an_interface_only_follow_its_stream() -> None:
    stream = torch.cuda.Stream()

    def body(group: pycomm.Group) -> None:
        with torch.cuda.stream(stream):
            data = torch.full((COUNT,), 1.0 + group.rank, device="cuda")
        x = Interface(data, stream.cuda_stream)
        assert pycomm.all_reduce(x, group=group) is x
        with torch.cuda.stream(stream):
            assert data.cpu().tolist() == [3.0] * COUNT

    on_ranks(body)


def test_arrays_with_an_interface_only_must_be_writable_where_they_are_written() -> None:
    data = torch.zeros(4, device="cuda")
    x = Interface(data, 1, read_only=True)

    def body(group: pycomm.Group) -> None:
        with pytest.raises(ValueError, match="tensor must be writable, got a read-only array"):
            pycomm.all_reduce(x, group=group)

    on_ranks(body)


def test_arrays_of_several_streams_are_refused() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    x, out = (Interface(torch.zeros(4, device="cuda"), s.cuda_stream) for s in (one, other))

    def body(group: pycomm.Group) -> None:
        with pytest.raises(ValueError, match="arrays must belong to one stream, got 2"):
            pycomm.all_reduce(x, out=out, group=group)

    on_ranks(body)


@contextlib.contextmanager
def captured(cupy: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of the work on CuPy's stream, of which torch's allocator does not know."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(cupy.cuda.get_current_stream().torch):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            yield graph
        finally:
            graph.capture_end()


def test_graphs_of_cupy_have_collectives(cupy: Any) -> None:
    """Several threads share a stream, and one of them captures it."""
    arrays = [cupy.full(COUNT, 1.0) for _ in range(2)]
    with pycomm.LocalWorld(2) as world:

        def body(group: pycomm.Group) -> None:
            pycomm.all_reduce(arrays[group.rank], group=group)

        world.run(body)  # connects outside the capture
        with captured(cupy) as graph:
            world.run(body)
        for array in arrays:
            array.fill(3.0)
        with torch.cuda.stream(arrays[0].stream):
            graph.replay()
        assert [array.get() for array in arrays] == [[6.0] * COUNT] * 2


def test_strided_arrays_are_refused_in_graphs_of_cupy(cupy: Any) -> None:
    """Their stand-ins would lie in torch's memory, which other work then uses."""
    x = cupy.full(2 * COUNT, 1.0)
    x.data = x.data[::2]
    with pycomm.LocalWorld(1) as world:

        def body(group: pycomm.Group) -> None:
            pycomm.all_reduce(x, group=group)  # connects
            with (
                captured(cupy),
                torch.cuda.stream(torch.cuda.default_stream()),
                pytest.raises(RuntimeError, match="does not know of another library's graph"),
            ):
                pycomm.all_reduce(x, group=group)

        world.run(body)


def test_codecs_refuse_graphs_of_cupy(cupy: Any) -> None:
    x = cupy.full(COUNT, 1.0)
    with (
        captured(cupy),
        torch.cuda.stream(torch.cuda.default_stream()),
        pytest.raises(RuntimeError, match="does not know of another library's graph"),
    ):
        pycomm.Int8().encode(x)
