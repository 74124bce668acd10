"""Reports about steps of several batches, and about batches that some ranks skip; see README.md."""

import contextlib

import habits
import pytest
import torch
from habits import MODES, SHARDED, assert_alike, batch, loss_of, network

import pycomm


@pytest.mark.parametrize("mode", MODES)
def test_every_backward_of_a_step_counts(world, mode):
    """open-instruct#1498."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, 3 * s + k) for k in range(3)])

    def backward(model, rank, step):
        for part in range(3):
            loss_of(model, rank, 3 * step + part).backward()

    habits.check_training(world, mode, wanted, backward)


@pytest.mark.parametrize("mode", ["plain", "optimizer", "gradients"])
def test_the_last_batch_of_a_step_counts_in_fp32(world, mode):
    """DeepSpeed#7985: bf16 parameters with gradients in fp32."""
    batches = range(3)

    def backward(model, rank, number):
        model(batch(rank, number).bfloat16()).float().square().mean().backward()

    sums = [torch.zeros(parameter.shape) for parameter in network().parameters()]
    for rank in range(2):
        for number in batches:
            module = network().bfloat16()
            backward(module, rank, number)
            for total, parameter in zip(sums, module.parameters(), strict=True):
                total += parameter.grad.float() / 2

    def body(group):
        module = network().bfloat16()
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        model = habits.wrap(module, group, mode)
        for number in batches:
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                backward(model, group.rank, number)
        model.reduce_gradients()
        for total, parameter in zip(sums, module.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, total)

    world(2).run(body)


@pytest.mark.parametrize("mode", MODES)
def test_the_flag_is_set_between_forward_and_backward(world, mode):
    """build-nanogpt#30."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, 3 * s + k) for k in range(3)])

    def backward(model, rank, step):
        for part in range(3):
            loss = loss_of(model, rank, 3 * step + part)
            model.require_backward_grad_sync = part == 2
            loss.backward()

    habits.check_training(world, mode, wanted, backward)


@pytest.mark.parametrize("mode", SHARDED)
def test_a_step_whose_last_backward_was_not_sent_raises(world, mode):
    """FunASR#3472: the condition for no_sync() is off by one."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for number in range(2):
            with model.no_sync() if number % 2 else contextlib.nullcontext():
                loss_of(model, group.rank, number).backward()
        with pytest.raises(RuntimeError, match=r"last backward was inside of no_sync\(\)"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        loss_of(model, group.rank, 2).backward()
        optimizer.step()
        assert_alike(model.module, wanted, mode)

    wanted = habits.alone(network, lambda m, r, _: [loss_of(m, r, 2)], steps=[0])
    world(2).run(body)


@pytest.mark.parametrize("sends_first", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_reduced_gradients_of_backwards_that_were_not_sent(world, mode, ranks, sends_first):
    """FunASR#3472, mended by a call that makes gradients whole averages."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                sends = sends_first and number == 0
                with contextlib.nullcontext() if sends else model.no_sync():
                    loss_of(model, group.rank, 2 * step + number).backward()
            model.reduce_gradients()
            optimizer.step()
        assert_alike(model.module, wanted, mode)
        habits.assert_same_on_all_ranks(model, group)

    def losses(module, rank, step):
        return [loss_of(module, rank, 2 * step + number) for number in range(2)]

    wanted = habits.alone(network, losses, ranks=ranks)
    world(ranks).run(body)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_needs_no_backward_that_is_sent(world, mode):
    """FunASR#3472 in a group of one rank."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, group.rank, step).backward()
            optimizer.step()
        assert_alike(model.module, wanted, mode)

    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, s)], ranks=1)
    world(1).run(body)


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, loss):  # noqa: ARG004
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        raise ArithmeticError


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_reduced_gradients_after_an_error_on_one_rank(world, mode, local):
    """FunASR#3472, and the last backward of a step fails on one rank, perhaps not the first."""

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        if local:
            with model.no_sync():
                loss_of(model, group.rank, 9).backward()
        if group.rank == 1:
            with pytest.raises(ArithmeticError):
                Failing.apply(loss_of(model, 1, 9)).backward()
        else:
            with pytest.raises(RuntimeError, match=r"backward has raised on ranks \[1\]"):
                loss_of(model, 0, 9).backward()
        model.reduce_gradients()
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
        habits.assert_same_on_all_ranks(model, group)

    world(2).run(body)


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_means_over_tokens(world, mode):
    """transformers#37474, torchtune#1917: ranks and their batches have different sizes."""
    tokens = {0: (3, 8), 1: (16, 5)}
    total = sum(map(sum, tokens.values()))

    def sum_of(model, rank, step, part, **options):
        data = batch(rank, 2 * step + part, tokens[rank][part])
        return model(data, **options).square().mean(1).sum()

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            optimizer.zero_grad()
            mine = sum(tokens[group.rank])
            with model.no_sync():
                (sum_of(model, group.rank, step, 0) / mine).backward()
            (sum_of(model, group.rank, step, 1, weight=mine) / mine).backward()
            optimizer.step()
        assert_alike(model.module, wanted, mode)

    wanted = habits.alone(
        network, lambda m, r, s: [sum_of(m, r, s, part) * 2 / total for part in range(2)]
    )
    world(2).run(body)


def has_no_memory(rank, step):
    return (rank, step) == (1, 1)


@pytest.mark.parametrize("mode", ["plain", "optimizer", "gradients"])
def test_a_rank_that_runs_out_of_memory_makes_all_skip_the_batch(world, mode):
    """fairseq#1359."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, s)], steps=[0, 2, 3])

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(4):
            try:
                loss = loss_of(model, group.rank, step)
                if has_no_memory(group.rank, step):
                    raise torch.OutOfMemoryError
                loss.backward()
                optimizer.step()
            except RuntimeError:
                assert step == 1
            optimizer.zero_grad()
        assert_alike(model.module, wanted, mode)

    world(2).run(body)


@pytest.mark.parametrize("mode", ["plain", "optimizer", "gradients"])
def test_a_rank_that_goes_on_without_a_backward_makes_the_others_raise(world, mode):
    """Automodel#2468: a rank finds no valid sample and takes the next batch."""
    wanted = habits.alone(network, lambda m, r, s: [loss_of(m, r, s)], steps=[0, 2])
    told = []

    def body(group):
        model = habits.wrap(network(), group, mode)
        optimizer = habits.optimizer_for(model, mode)
        for step in range(3):
            loss = loss_of(model, group.rank, step)
            if has_no_memory(group.rank, step):
                continue
            try:
                loss.backward()
                optimizer.step()
            except RuntimeError as error:
                told.append((group.rank, step, str(error)))
            optimizer.zero_grad()
        assert_alike(model.module, wanted, mode)

    world(2).run(body)
    ((rank, step, message),) = told
    assert (rank, step) == (0, 1)
    assert "on ranks [1] of 2" in message


def test_an_error_on_one_rank_ends_the_others(world):
    """ace#850: a rank raises where its loss is NaN; the others must not wait for the timeout."""

    def body(group):
        model = habits.wrap(network(), group, "plain")
        loss = loss_of(model, group.rank, 0)
        if group.rank == 1:
            raise ArithmeticError("loss is nan")
        with pytest.raises(pycomm.CollectiveError) as raised:
            loss.backward()
        assert raised.value.rank == 1

    with pytest.raises(ArithmeticError, match="loss is nan"):
        world(2).run(body)


@pytest.mark.parametrize("compression", [pycomm.Int8(), pycomm.TopK(0.02)])
def test_averages_that_are_added_up_elsewhere(world, compression):
    """DeepSpeed#7985, written by hand: sums in fp32, and gradients are dropped after each backward.

    All ranks' gradients together are what has been used, and the mean of what waits.
    """

    def body(group):
        model = pycomm.DataParallel(network(), group=group, compression=compression)
        optimizer = habits.optimizer_for(model)
        weight = model.module[2].weight
        mine, used = torch.zeros(weight.shape), torch.zeros(weight.shape)

        def note(gradient):
            mine.add_(gradient)

        weight.register_hook(note)
        for step in range(4):
            sums = [torch.zeros(parameter.shape) for parameter in model.parameters()]
            for part in range(3):
                loss_of(model, group.rank, 3 * step + part).backward()
                used += weight.grad
                for total, parameter in zip(sums, model.parameters(), strict=True):
                    total += parameter.grad
                model.zero_grad()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                parameter.grad = total
            optimizer.step()
            model.zero_grad()
        waiting = model.comm_state.residual("2.weight").view(weight.shape).clone()
        for tensor in (mine, waiting):
            pycomm.all_reduce(tensor, "avg", group=group)
        torch.testing.assert_close(used + waiting, mine, rtol=0, atol=1e-5)

    world(2).run(body)


def test_reading_gradients_inside_of_join(world):
    """Ranks without batches answer to backwards only, so that reading must not communicate."""

    def body(group):
        model = habits.wrap(network(), group, "plain")
        with model.join():
            for step in range(1 + group.rank):
                model.zero_grad()
                loss_of(model, group.rank, step).backward()
                model.reduce_gradients()
        with model.join(), model.no_sync():
            loss_of(model, group.rank, 0).backward()
            with pytest.raises(RuntimeError, match=r"outside of no_sync\(\)"):
                model.reduce_gradients()

    world(2).run(body)
