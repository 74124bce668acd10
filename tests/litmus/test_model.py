"""The checker of the PTX memory model gives the known results for small programs.

What PTX says of message passing, store buffering and the like is in "Memory Consistency Model" of
the PTX ISA, and in the paper that tests/support/ptx.py names.
"""

from itertools import pairwise

import pytest
from ptx import BLOCK, GPU, SYSTEM, WEAK, Program


def message_passing(store, load, gpus=1):
    """The data that a thread can see once it has seen the flag, and the races."""
    program = Program()
    writer, reader = program.thread(0, 0), program.thread(gpus - 1, 1)
    writer.store("data", 1)
    writer.store("flag", 1, **store)
    flag = reader.load("flag", **load)
    data = reader.load("data")
    outcome = program.run({flag: {1}})
    return outcome.values[data], outcome.races


@pytest.mark.parametrize("scope", [GPU, SYSTEM])
def test_a_release_and_an_acquire_pass_a_message(scope):
    store, load = {"scope": scope, "order": "release"}, {"scope": scope, "order": "acquire"}
    assert message_passing(store, load) == ({1}, set())


@pytest.mark.parametrize(
    ("store", "load", "gpus"),
    [
        ({"scope": SYSTEM}, {"scope": SYSTEM, "order": "acquire"}, 1),
        ({"scope": SYSTEM, "order": "release"}, {"scope": SYSTEM}, 1),
        ({"scope": GPU, "order": "release"}, {"scope": GPU, "order": "acquire"}, 2),
        ({"scope": BLOCK, "order": "release"}, {"scope": GPU, "order": "acquire"}, 1),
        ({"scope": WEAK}, {"scope": WEAK}, 1),
    ],
)
def test_less_does_not_pass_a_message(store, load, gpus):
    values, races = message_passing(store, load, gpus)
    assert values == {0, 1}
    assert "data" in races


@pytest.mark.parametrize(("order", "forbidden"), [("sc", True), ("acq_rel", False)])
def test_store_buffering_needs_fences_that_are_sequentially_consistent(order, forbidden):
    program = Program()
    loads = []
    for mine, other in (("x", "y"), ("y", "x")):
        thread = program.thread(gpu=len(loads))
        thread.store(mine, 1, SYSTEM)
        thread.fence(SYSTEM, order=order)
        loads.append(thread.load(other, SYSTEM))
    assert (not program.run({load: {0} for load in loads}).values) == forbidden


def test_fences_of_a_gpu_do_not_order_two_gpus():
    program = Program()
    loads = []
    for mine, other in (("x", "y"), ("y", "x")):
        thread = program.thread(gpu=len(loads))
        thread.store(mine, 1, SYSTEM)
        thread.fence(GPU)
        loads.append(thread.load(other, SYSTEM))
    assert program.run({load: {0} for load in loads}).values


@pytest.mark.parametrize(("scope", "forbidden"), [(GPU, True), (WEAK, False)])
def test_loads_of_one_location_do_not_go_back(scope, forbidden):
    program = Program()
    program.thread(block=0).store("x", 1, scope)
    reader = program.thread(block=1)
    first, second = reader.load("x", scope), reader.load("x", scope)
    assert (not program.run({first: {1}, second: {0}}).values) == forbidden


@pytest.mark.parametrize(("order", "forbidden"), [("sc", True), ("acq_rel", False)])
def test_two_readers_agree_on_the_order_of_two_stores_only_with_such_fences(order, forbidden):
    program = Program()
    for gpu, where in enumerate("xy"):
        program.thread(gpu).store(where, 1, SYSTEM)
    given = {}
    for gpu, (first, second) in enumerate(("xy", "yx")):
        reader = program.thread(2 + gpu)
        given[reader.load(first, SYSTEM)] = {1}
        reader.fence(SYSTEM, order=order)
        given[reader.load(second, SYSTEM)] = {0}
    assert (not program.run(given).values) == forbidden


def test_messages_pass_through_a_third_thread():
    program = Program()
    first, middle, last = (program.thread(gpu) for gpu in range(3))
    first.store("data", 1)
    given = {}
    for sender, receiver, flag in ((first, middle, "a"), (middle, last, "b")):
        sender.store(flag, 1, SYSTEM, order="release")
        given[receiver.load(flag, SYSTEM, order="acquire")] = {1}
    data = last.load("data")
    assert program.run(given).values[data] == {1}


@pytest.mark.parametrize(("scope", "sums"), [(GPU, {3}), (BLOCK, {1, 2, 3})])
def test_additions_count_if_their_scope_includes_the_others(scope, sums):
    program = Program()
    for block in range(3):
        program.thread(block=block).add("x", scope)
    assert program.run().final["x"] == sums


def test_a_release_is_acquired_through_additions_of_others():
    program = Program()
    first, second, third = (program.thread(block=block) for block in range(3))
    first.store("data", 1)
    first.fence(GPU)
    additions = [thread.add("x", GPU) for thread in (first, second, third)]
    third.fence(GPU)
    data = third.load("data")
    given = {read: {value} for value, read in enumerate(additions)}
    assert program.run(given).values[data] == {1}


@pytest.mark.parametrize(("name", "seen"), [("b", {1}), ("c", {0, 1})])
def test_threads_of_a_block_meet_at_a_barrier(name, seen):
    program = Program()
    writer, reader = program.thread(), program.thread()
    writer.store("data", 1)
    writer.barrier("b")
    reader.barrier(name)
    data = reader.load("data")
    outcome = program.run()
    assert outcome.values[data] == seen
    assert outcome.races == (set() if name == "b" else {"data"})


def test_a_weak_flag_is_a_race_in_every_order():
    program = Program()
    threads = [program.thread(block=block) for block in range(3)]
    for first, second in pairwise(threads):
        first.store("x", 1)
        second.load("x")
    assert program.run().races == {"x"}
