"""pycomm.DataParallel with different sizes or numbers of batches on the ranks."""

import ddp
import golden
import helpers
import pytest
import torch
import wrapped
from wrapped import TINY

import pycomm

SIZES = [[16, 16, 16], [1, 15, 0], [0, 0, 7], [9, 2, 4]]  # samples, by step and rank


def samples(rank, step):
    return ddp.batch(rank, step)[: SIZES[step % len(SIZES)][rank]]


def mean_of_all_samples(module, size, step):
    """One process that has all ranks' samples."""
    module.zero_grad()
    everything = torch.cat([samples(rank, step) for rank in range(size)])
    module(everything).square().mean().backward()
    return wrapped.gradients_of(module)


def weighted(group, compression, bucket_cap_mb):
    model = pycomm.DataParallel(ddp.network(), compression=compression, bucket_cap_mb=bucket_cap_mb)
    alone = ddp.network()
    for step in range(len(SIZES)):
        model.zero_grad()
        x = samples(group.rank, step)
        out = model(x, weight=len(x))
        (out.square().mean() if len(x) else out.sum()).backward()
        expected = mean_of_all_samples(alone, group.size, step)
        yield step, wrapped.gradients_of(model), expected


def gradients_with_weights(group, bucket_cap_mb):
    seen = []
    for _, got, expected in weighted(group, None, bucket_cap_mb):
        for name in got:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-7)
        seen.append(got)
    return seen


@pytest.mark.parametrize("bucket_cap_mb", [TINY, 25])
def test_weights_give_the_mean_over_all_samples(bucket_cap_mb):
    runs = helpers.run_group(3, gradients_with_weights, bucket_cap_mb)
    for run in runs[1:]:
        assert all(wrapped.same(a, b) for a, b in zip(run, runs[0], strict=True))


def compressed_with_weights(group):
    """Compression loses no more than with equal batches."""
    for step, got, expected in weighted(group, pycomm.Int8(), 25):
        error = (got["0.weight"] - expected["0.weight"]).abs().max()
        assert error < 0.02 * expected["0.weight"].abs().max(), step


def test_weights_with_compression():
    helpers.run_group(3, compressed_with_weights)


def equal_weights(group):
    """Whatever they are, bits are those of a plain mean; they may be tensors."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY), ddp.network()
    for step, weight in enumerate([1, 4.0, torch.tensor(16), 0.5, None]):
        model.zero_grad()
        model(ddp.batch(group.rank, step), weight=weight).square().mean().backward()
        expected = wrapped.mean_gradients(alone, group.size, step)
        assert wrapped.same(wrapped.gradients_of(model), expected)


def accumulated_with_weights(group):
    """The weight applies to accumulated gradients; gradients averaged before do not change."""
    weights = [3.0, 1.0]
    model, alone = pycomm.DataParallel(ddp.network()), ddp.network()

    def loss(module, rank, step):
        scale = weights[rank] * len(weights) / sum(weights)
        return scale * sum(wrapped.batch_loss(module, rank, s) for s in (step, step + 5))

    with model.no_sync():
        wrapped.batch_loss(model, group.rank, 0).backward()
    model(ddp.batch(group.rank, 5), weight=weights[group.rank]).square().mean().backward()
    expected = wrapped.mean_gradients(alone, group.size, 0, loss)
    for turn in (1, 2):
        for name, got in wrapped.gradients_of(model).items():
            torch.testing.assert_close(got, turn * expected[name], rtol=1e-4, atol=1e-6)
        if turn == 1:
            with model.no_sync():
                wrapped.batch_loss(model, group.rank, 0).backward()
            x = ddp.batch(group.rank, 5)
            model(x, weight=weights[group.rank]).square().mean().backward()


def nothing_to_learn_from(group):
    """A rank with weight 0 may have a loss of NaN."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY), ddp.network()
    for step in range(2):
        model.zero_grad()
        out = model(ddp.batch(0, step), weight=float(group.rank == 0))
        (out * (torch.nan if group.rank else 1)).square().mean().backward()
        expected = wrapped.mean_gradients(alone, 1, step)
        for name, got in wrapped.gradients_of(model).items():
            torch.testing.assert_close(got, expected[name])


def bad_weights(group):
    """The wrapper still works afterwards."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY), ddp.network()
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=f"weight must be finite and not negative, got {weight}"
        ):
            model(ddp.batch(0, 0), weight=weight)
    for step in range(2):
        with pytest.raises(ValueError, match="weight must be positive on some rank, got 0 on all"):
            model(ddp.batch(group.rank, step), weight=0).square().mean().backward()
        model.zero_grad(set_to_none=step == 0)
        wrapped.batch_loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step)
        assert wrapped.same(wrapped.gradients_of(model), expected)


class Scaled(torch.nn.Sequential):
    """Has an argument of its own that is called weight."""

    def forward(self, x, weight):
        return weight * super().forward(x)


def weights_beside_arguments(group):
    """Each counts for one forward, and not for those without gradients."""
    model, alone = pycomm.DataParallel(Scaled(ddp.network())), Scaled(ddp.network())
    weights = [3.0, 1.0]

    def loss(module, rank, step):
        return module(ddp.batch(rank, step), weight=2.0).square().mean()

    def weighed(module, rank, step):
        return weights[rank] * len(weights) / sum(weights) * loss(module, rank, step)

    for step, expected_loss in enumerate([weighed, loss]):
        model.zero_grad()
        if step == 0:
            model.weigh(weights[group.rank])
            with torch.no_grad():
                model(ddp.batch(0, 0), 1.0)
        loss(model, group.rank, step).backward()
        expected = wrapped.mean_gradients(alone, group.size, step, expected_loss)
        for name, got in wrapped.gradients_of(model).items():
            torch.testing.assert_close(got, expected[name])


@pytest.mark.parametrize(
    "body",
    [
        equal_weights,
        accumulated_with_weights,
        nothing_to_learn_from,
        bad_weights,
        weights_beside_arguments,
    ],
)
def test_weights(body):
    helpers.run_group(2, body)


def operations_of_a_step(group):
    """A bucket, the announcement that carries the weights, and the comparison at the end."""
    model = pycomm.DataParallel(ddp.network(), broadcast_buffers=False)
    counts = []
    for weight in (None, None, 1 + group.rank):  # the first backward shows the order
        before = group.stats()
        model(ddp.batch(group.rank, 0), weight=weight).square().mean().backward()
        counts.append(sum(each.count for each in group.stats(since=before).operations))
    assert counts[1:] == [3, 3]


def test_weights_take_no_operation_of_their_own():
    helpers.run_group(2, operations_of_a_step)


def weight_on_one_rank(group):
    model = pycomm.DataParallel(ddp.network())
    with pytest.raises(pycomm.Mismatch):
        model(ddp.batch(0, 0), weight=1 if group.rank == 0 else None).mean().backward()


def test_a_weight_on_one_rank_alone_is_a_mismatch():
    helpers.run_group(2, weight_on_one_rank)


def with_batch_norm():
    torch.manual_seed(1)
    layers = torch.nn.Linear(40, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 3)
    return torch.nn.Sequential(*layers)


def joined(group, batches, options):
    """Trains while there are batches; returns gradients, and the states after them and join()."""
    model = pycomm.DataParallel(with_batch_norm(), bucket_cap_mb=TINY, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with model.join():
        for step in range(batches[group.rank]):
            optimizer.zero_grad()
            wrapped.batch_loss(model, group.rank, step).backward()
            seen.append(wrapped.gradients_of(model))
            optimizer.step()
        mine = {n: t.clone() for n, t in model.state_dict().items()}
    assert model.comm_state.step == max(batches)
    return seen, mine, {n: t.clone() for n, t in model.state_dict().items()}


def expected_gradients(batches):
    """The mean over the ranks that are active, by torch alone."""
    module = with_batch_norm()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if count > step]
        optimizer.zero_grad()
        sum(wrapped.batch_loss(module, rank, step) / len(active) for rank in active).backward()
        yield wrapped.gradients_of(module)
        optimizer.step()


PLANS = [[3, 5], [5, 3], [0, 4], [4, 0], [3, 3], [0, 0], [2, 6, 0], [1, 4, 4]]


@pytest.mark.parametrize("batches", PLANS, ids=str)
def test_ranks_that_run_out_of_batches_wait_for_the_others(batches):
    runs = helpers.run_group(len(batches), joined, batches, {})
    last = max(range(len(batches)), key=lambda rank: (batches[rank], rank))
    for _, _, state in runs:
        assert all(golden.same_bits(state[n], runs[last][1][n]) for n in state)
    for step, expected in enumerate(expected_gradients(batches)):
        for name, got in runs[last][0][step].items():
            torch.testing.assert_close(got, expected[name], rtol=1e-3, atol=1e-5)
        for rank in range(len(batches)):
            if batches[rank] > step:
                assert wrapped.same(runs[rank][0][step], runs[last][0][step])


def joined_in_other_ways(group, batches):
    """With weights and accumulation, twice, and training goes on afterwards."""
    model = pycomm.DataParallel(ddp.network(), compression=pycomm.TopK(0.1), bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join():
            for step in range(batches[group.rank]):
                with model.no_sync():
                    wrapped.batch_loss(model, group.rank, step).backward()
                x = ddp.batch(group.rank, step)
                model(x, weight=1 + group.rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert model._exchange.handshake.weighing is None
    return wrapped.train(model, group.rank, range(2))


@pytest.mark.parametrize("batches", [[2, 4, 0], [0, 1, 3]], ids=str)
def test_join_with_all_the_rest(batches):
    runs = helpers.run_group(3, joined_in_other_ways, batches)
    for run in runs[1:]:
        assert all(wrapped.same(a, b) for a, b in zip(run, runs[0], strict=True))


class OwnError(Exception):
    pass


def one_batch_and_an_error(model, rank):
    with model.join():
        wrapped.batch_loss(model, rank, 0).backward()
        raise OwnError


def raising_in_join(group):
    model = pycomm.DataParallel(ddp.network())
    with pytest.raises(OwnError):
        one_batch_and_an_error(model, group.rank)
    model.zero_grad()
    wrapped.batch_loss(model, group.rank, 1).backward()
    expected = wrapped.mean_gradients(ddp.network(), group.size, 1)
    assert wrapped.same(wrapped.gradients_of(model), expected)


def no_weight_left(group):
    """The last active rank is told, the other does not take it for the end, and both go on."""
    model, alone = pycomm.DataParallel(ddp.network(), bucket_cap_mb=TINY), ddp.network()
    with model.join():
        for step in range(3 if group.rank == 0 else 1):
            model.zero_grad()
            loss = model(ddp.batch(group.rank, step), weight=float(step != 1)).square().mean()
            if step == 1:
                with pytest.raises(ValueError, match="got 0 on all"):
                    loss.backward()
            else:
                loss.backward()
        if group.rank == 0:
            expected = wrapped.mean_gradients(alone, 1, 2)
            assert wrapped.same(wrapped.gradients_of(model), expected)
    assert model.comm_state.step == 3


@pytest.mark.parametrize("body", [raising_in_join, no_weight_left])
def test_errors_in_join(body):
    helpers.run_group(2, body)
