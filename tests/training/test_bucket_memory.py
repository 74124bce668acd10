"""DDP's buckets move into the window, with all that shares their memory."""

import gc
import logging

import ddp
import helpers
import pytest
import torch
from ddp import Reference, Watched
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm._training import comm_state, hook_state

LAYOUT = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05}
STEPS = 3  # DDP makes its final buckets in the second


def in_window(group, tensors):
    return {group._core.offset_of(tensor.data_ptr()) >= 0 for tensor in tensors}


def train(group, compression=None, layout=LAYOUT):
    watched = Watched(ddp.Given(), compression, layout=layout)
    steps, buckets, grads = [], [], []
    for step in range(STEPS):
        steps += watched.run(group.rank, [step])
        buckets.append(in_window(group, [bucket for bucket, _ in watched.exchanges]))
        grads.append(in_window(group, [p.grad for p in watched.model.parameters()]))
    return steps, buckets, grads


def check(runs, buckets, grads):
    """Results are the reference's; `buckets` and `grads` are true if they lie in the window."""
    Reference(2, None).check([run[0] for run in runs])
    for run in runs:
        assert run[1:] == ([{buckets}] * STEPS, [{grads}] * STEPS)


@pytest.mark.parametrize("views", [True, False])
def test_buckets_and_gradients_that_are_views_lie_in_the_window(views):
    layout = {**LAYOUT, "gradient_as_bucket_view": views}
    check(helpers.run_group(2, train, None, layout), buckets=True, grads=views)


def test_compressed_buckets_stay_as_their_exchange_copies_them_anyway():
    for _, buckets, _ in helpers.run_group(2, train, pycomm.Int8()):
        assert buckets == [{False}] * STEPS


def wrapped_in_16_bits(group):
    model, state = DistributedDataParallel(ddp.Given()), hooks.AllReduceState()
    seen = []

    def inner(state, bucket):
        future = hooks.all_reduce_hook(state, bucket)
        seen.append((bucket.buffer().dtype, in_window(group, [bucket.buffer()])))
        return future

    model.register_comm_hook(state, fp16_compress_wrapper(inner))
    for step in range(STEPS):
        model(ddp.gradients(model, group.rank, step)).backward()
    assert set(map(str, seen)) == {str((torch.float16, {False}))}


def test_copies_that_another_hook_has_made_for_a_step_stay():
    helpers.run_group(2, wrapped_in_16_bits)


def train_alone(group):
    assert train(group)[1] == [{False}] * STEPS


def test_a_rank_alone_moves_nothing():
    helpers.run_group(1, train_alone)


def train_without_memory(group, refused):
    messages = []
    logger, handler = logging.getLogger("pycomm.group"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    tried = []

    def no_memory(*_, **__):
        tried.append(1)
        raise MemoryError

    if group.rank in refused:
        group.empty = no_memory
    result = train(group)
    logger.removeHandler(handler)
    return result, [m for m in messages if "buckets" in m], len(tried)


@pytest.mark.parametrize("refused", [{1}, {0, 1}])
def test_ranks_without_memory_copy_and_say_so_once(refused):
    runs = helpers.run_group(2, train_without_memory, refused)
    Reference(2, None).check([run[0][0] for run in runs])
    for rank, ((_, buckets, _), messages, tried) in enumerate(runs):
        assert buckets == [{rank not in refused}] * STEPS
        assert len(messages) == (rank in refused)
        # Each bucket is tried once; DDP makes new buckets once.
        assert (0 < tried < 12) == (rank in refused)


def train_without_module(group):
    hook_state.take_memory = None
    return train(group)


def test_buckets_stay_without_the_module_for_this_torch():
    check(helpers.run_group(2, train_without_module), buckets=False, grads=False)


def survive_the_group(group):
    """A gradient outlives the model and the group; the window gets the other buckets back."""
    layout = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    model = DistributedDataParallel(ddp.Given(), **layout)
    hooks.AllReduceState(group=group).register(model)
    for step in range(STEPS):
        model.zero_grad()
        model(ddp.gradients(model, group.rank, step)).backward()
    wide, square = model.module.wide.grad, model.module.square.grad
    freed, expected = group._core.offset_of(square.data_ptr()), wide.clone()
    del model, square
    gc.collect()
    made = [group.empty(1000) for _ in range(200)]
    assert torch.equal(wide, expected)
    group.close()
    assert torch.equal(wide.add_(0), expected)
    return freed in {group._core.offset_of(tensor.data_ptr()) for tensor in made}


def test_memory_is_freed_with_the_last_gradient():
    assert helpers.run_group(2, survive_the_group) == [True, True]


def exchange_a_part(group):
    whole = torch.full((1000,), float(group.rank))
    comm_state.move_into_window(whole[:600], group)
    comm_state.move_into_window(whole.view(torch.int32)[500:], group)
    assert in_window(group, [whole]) == {False}
    part, other = whole[:600], whole.view(torch.int32)
    comm_state.move_into_window(whole, group)
    assert in_window(group, [whole, part, other]) == {True}
    address = whole.data_ptr()
    comm_state.move_into_window(whole, group)
    assert whole.data_ptr() == address
    pycomm.all_reduce(part, "sum", group=group)
    assert torch.equal(whole, torch.tensor([1.0] * 600 + [float(group.rank)] * 400))


def test_only_what_has_its_memory_for_itself_moves_and_only_once():
    helpers.run_group(2, exchange_a_part)


def share_and_close(group):
    shared = torch.zeros(1000).share_memory_()
    comm_state.move_into_window(shared, group)
    assert shared.is_shared()
    group.close()
    kept = torch.zeros(1000)
    address = kept.data_ptr()
    comm_state.move_into_window(kept, group)  # raises nothing: the exchange does
    assert kept.data_ptr() == address


def test_shared_tensors_stay_and_so_does_what_a_closed_group_exchanges():
    helpers.run_group(2, share_and_close)


def explained(group):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(90, 90), torch.nn.Linear(90, 20))
    seen = []
    for compression in (None, pycomm.Int8()):
        state = hooks.CommState(compression, net.named_parameters(), group=group)
        assert state.explain().buckets == ()
        model = pycomm.DataParallel(net, state=state)
        model(torch.ones(2, 90)).sum().backward()
        seen.append(model.explain())
        assert state.explain() == seen[-1]
        count = sum(parameter.numel() for parameter in net.parameters())
        state.start(torch.ones(count), list(net.parameters()))
        state.finish()
        seen.append(state.explain())
    return [(str(plan), {bucket.path for bucket in plan.buckets}) for plan in seen]


def test_where_buckets_lie_is_told(world):
    """The wrapper's lie in the window, a tensor of the caller outside of it."""
    for found in world(2).run(explained):
        texts, paths = zip(*found, strict=True)
        assert paths == ({"in place"}, {"staged"}, {"encoded"}, {"encoded"})
        assert (
            " MiB, torch.float32 on cpu, in place: 1.bias ... 0.weight (4 parameters)" in texts[0]
        )
        assert "\nin place: other ranks read and write the bucket where it lies" in texts[0]


def test_where_local_sgd_exchanges_is_told(world):
    def body(group):
        net = torch.nn.Linear(90, 90)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = hooks.LocalSGDState(
            net.named_parameters(), optimizer, period=1, compression=pycomm.Int8(), group=group
        )
        model = pycomm.DataParallel(net, state=state)
        assert model.explain().buckets == ()
        model(torch.ones(2, 90)).sum().backward()
        optimizer.step()
        state.step()
        return [bucket.path for bucket in model.explain().buckets]

    assert world(2).run(body) == [["encoded"]] * 2


def test_a_compression_of_no_parameter_warns_and_is_not_shown_as_encoded(world):
    def body(group):
        net = torch.nn.Linear(16, 64)
        with pytest.warns(UserWarning, match="Int8.* compresses nothing: exclude= holds for all"):
            model = pycomm.DataParallel(net, compression=pycomm.Int8(), group=group)
        model(torch.ones(2, 16)).sum().backward()
        return [bucket.path for bucket in model.explain().buckets]

    assert world(1).run(body) == [["in place"]]


def test_memory_that_is_too_small_is_refused():
    if hook_state.take_memory is None:
        pytest.skip("pycomm was installed for another torch")
    taker, giver = torch.arange(100), torch.zeros(99, dtype=torch.int64)
    with pytest.raises(ValueError, match="giver must have 800 bytes of memory, got 792"):
        hook_state.take_memory(taker, giver)
    assert torch.equal(taker, torch.arange(100))
