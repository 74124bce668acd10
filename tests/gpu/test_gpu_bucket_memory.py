"""DistributedDataParallel's buckets on CUDA move into the window's heap, which has room."""

from __future__ import annotations

import gc
import logging
from typing import Any
from unittest import mock

import ddp
import golden
import pytest
import torch
from test_gpu_model_heap import heap_bytes, run
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm._runtime import c10d
from pycomm._runtime.cuda import MESSAGE_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(c10d.take_memory is None, reason="pycomm was installed for another torch"),
]

STEPS = 4  # DDP makes its final buckets in the second
VIEWS = {"gradient_as_bucket_view": True}
NBYTES = 4 * sum(torch.Size(shape).numel() for shape in ddp.SHAPES.values())
LANES = 1 << 18  # more bytes than what lies before the staging area of two ranks
NO_ROOM = "no memory for DistributedDataParallel's buckets, exchanges copy them: the CUDA window's "


def staging(group: pycomm.Group) -> torch.Tensor:
    """This rank's staging area, through which other ranks read what they cannot read in place."""
    side: Any = group._cuda
    window, *_ = side._keep
    return window[LANES : window.numel() - heap_bytes(group) - MESSAGE_BYTES]


def free_bytes(group: pycomm.Group) -> int:
    """The free bytes of this rank's heap, once all that is gone has been freed."""
    side: Any = group._cuda
    ranges = side.heap.ranges
    assert not ranges.take(heap_bytes(group) + 1, may_wait=True)
    return int(ranges.refusal(0).split(" bytes ")[1].split()[0])


def made(group: pycomm.Group, layout: dict[str, Any], by_hand: bool) -> Any:
    """A model, and the state of its hook."""
    model = DistributedDataParallel(ddp.Given().cuda(), bucket_cap_mb=0.01, **layout)
    state: hooks.CommState
    if by_hand:
        state = hooks.CommState(params=model.named_parameters(), group=group, algorithm="two_shot")
        model.register_comm_hook(state, hooks.comm_hook)
    else:
        state = hooks.AllReduceState(group=group, algorithm="two_shot")
        state.register(model)
    return model, state


def step(group: pycomm.Group, model: Any, number: int) -> None:
    """A step whose gradients are the means of the ranks', in rank order."""
    model.zero_grad(set_to_none=not model.gradient_as_bucket_view)
    every = [ddp.gradients(model, rank, number) for rank in range(group.size)]
    model({name: x.cuda() for name, x in every[group.rank].items()}).backward()
    for name, parameter in ddp.unprefixed(model).items():
        wanted = golden.in_rank_order([x[name].flatten() for x in every], "avg")
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.cpu().flatten(), wanted), name


def train(
    group: pycomm.Group,
    layout: dict[str, Any],
    by_hand: bool = False,
    connects: str = "",
    grows: bool = True,
) -> tuple[list[set[str]], list[bool], list[str]]:
    """The paths of the buckets in each step, if something was staged, and what the log says.

    Args:
        group: the ranks.
        layout: options of DistributedDataParallel.
        by_hand: the state is not registered, but made with the parameters.
        connects: "before" or "after" the state is made, there is an operation on CUDA.
        grows: False if a device has no free memory.
    """
    if not grows:
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 80 << 30)).start()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm.group").addHandler(handler)
    if connects == "before":
        pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)
    model, state = made(group, layout, by_hand)
    if connects == "after":
        pycomm.all_reduce(torch.ones(1, device="cuda"), group=group)
    paths, staged = [], []
    for number in range(STEPS):
        if number > 0:
            pycomm.barrier(group=group)  # until then, the other rank may read what is staged
            staging(group).zero_()
        step(group, model, number)
        torch.cuda.synchronize()
        paths.append({bucket.path for bucket in state.explain().buckets})
        staged.append(bool(staging(group).cpu().any()) if number > 0 else paths[0] != {"in place"})
    assert free_bytes(group) < heap_bytes(group) or paths[-1] == {"staged"}
    del model, state
    gc.collect()
    torch.cuda.synchronize()
    assert free_bytes(group) == heap_bytes(group)
    return paths, staged, [m for m in messages if "buckets" in m or "grow" in m]


@pytest.mark.parametrize(
    ("layout", "by_hand", "connects"),
    [({}, False, "after"), (VIEWS, False, "before"), ({}, True, "before"), (VIEWS, True, "")],
)
def test_buckets_need_no_option(layout: dict[str, Any], by_hand: bool, connects: str) -> None:
    for paths, staged, messages in run(train, layout, by_hand, connects):
        assert paths == [{"in place"}] * STEPS
        assert staged == [False] * STEPS
        assert messages == []


def test_buckets_stay_where_there_is_no_heap() -> None:
    for paths, staged, messages in run(train, VIEWS, False, "before", False):
        assert paths == [{"staged"}] * STEPS
        assert staged == [True] * STEPS
        assert "heap cannot grow: models need" in messages[0]
        assert [NO_ROOM in message for message in messages] == [False, True, False]
        assert "see model.explain()" in messages[2]


def test_a_small_heap_takes_what_fits() -> None:
    options = {"cuda_heap_bytes": NBYTES // 2}
    for paths, staged, messages in run(train, {}, False, "before", False, **options):
        assert paths[-1] == {"in place", "staged"}
        assert staged == [True] * STEPS
        assert len(messages) == 3


def compress(group: pycomm.Group) -> tuple[set[str], int]:
    model = DistributedDataParallel(ddp.Given().cuda())
    state = hooks.Int8State(model.named_parameters(), exclude=lambda *_: False, group=group)
    state.register(model)
    model({name: x.cuda() for name, x in ddp.gradients(model, group.rank, 0).items()}).backward()
    return {bucket.path for bucket in state.explain().buckets}, heap_bytes(group)


def test_encoded_buckets_take_no_room() -> None:
    assert run(compress) == [({"encoded"}, 0)] * 2
