"""Beside torch.optim: 200 steps over its options, checkpoints both ways, schedulers, scalers."""

import copy

import pytest
import torch
from optimizing import gradients, parameters

import pycomm.optim as optim

TORCH = {
    "Adam": (torch.optim.Adam, optim.FusedAdam),
    "AdamW": (torch.optim.AdamW, optim.FusedAdamW),
    "SGD": (torch.optim.SGD, optim.FusedSGD),
}
CASES = [
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-4}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {}),
    ("AdamW", {"lr": torch.tensor(3e-3), "amsgrad": True}),
    ("AdamW", {"maximize": True, "weight_decay": 0.3, "capturable": False, "fused": True}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.4, "maximize": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
]


def advance(optimizer, params, steps):
    for step in steps:
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad
        optimizer.step()


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_trajectory_and_checkpoints(name, options):
    """100 steps apart, then each goes on from the other's checkpoint."""
    theirs_class, ours_class = TORCH[name]
    theirs, ours = parameters(seed=1), parameters(seed=1)
    their, our = theirs_class(theirs, **options), ours_class(ours, **options)
    advance(their, theirs, range(100))
    advance(our, ours, range(100))
    close(ours, theirs)
    crossed, back = ours_class(ours, **options), theirs_class(theirs, **options)
    crossed.load_state_dict(copy.deepcopy(their.state_dict()))
    back.load_state_dict(copy.deepcopy(our.state_dict(format="torch")))
    advance(crossed, ours, range(100, 200))
    advance(back, theirs, range(100, 200))
    close(ours, theirs)
    assert crossed.state_dict(format="torch")["state"].keys() == back.state_dict()["state"].keys()
    for param, other in zip(ours, theirs, strict=True):
        state = crossed.state[param]
        assert set(back.state[other]) <= set(state)
        for key, value in back.state[other].items():
            assert state[key].dtype == value.dtype == torch.float32
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_clipping_is_torchs():
    theirs, ours = parameters(seed=2), parameters(seed=2)
    their, our = torch.optim.AdamW(theirs), optim.FusedAdamW(ours, max_norm=0.7)
    for step in range(30):
        grads = gradients(theirs, step)
        for param, other, grad in zip(theirs, ours, grads, strict=True):
            param.grad, other.grad = grad.clone(), grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        their.step()
        our.step()
        assert our.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        for other, grad in zip(ours, grads, strict=True):
            assert torch.equal(other.grad, grad)  # not written
    close(ours, theirs)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, optim.GradScaler])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_scalers(scaler_class, early, enabled):
    """As with torch's optimizer: scales, skipped steps, counters, with and without unscale_()."""

    def train(optimizer_class, scaler_class, params):
        optimizer = optimizer_class(params, lr=1e-2)
        scaler = scaler_class("cpu", init_scale=2.0**14, growth_interval=3, enabled=enabled)
        scales = []
        for step in range(12):
            loss = sum((p * g).sum() for p, g in zip(params, gradients(params, step), strict=True))
            optimizer.zero_grad()
            overflows = enabled and step in (2, 3, 7)
            scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
            if early:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [optimizer.state[p]["step"].item() for p in params]

    theirs, ours = parameters(seed=3), parameters(seed=3)
    expected = train(torch.optim.AdamW, torch.amp.GradScaler, theirs)
    assert train(optim.FusedAdamW, scaler_class, ours) == expected
    assert expected[1] == [9 if enabled else 12] * len(ours)
    close(ours, theirs)


def test_our_scaler_serves_other_optimizers_and_reads_gradients_only():
    param = torch.nn.Parameter(torch.ones(5000))
    scaler = optim.GradScaler("cpu", init_scale=1024.0)
    fused, plain = optim.FusedSGD([param], lr=0.1), torch.optim.SGD([param], lr=0.1)
    for optimizer in (fused, plain):
        param.grad = None
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        assert torch.equal(
            param.grad, torch.full_like(param, 1024.0 if optimizer is fused else 1.0)
        )
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.8))
    assert not hasattr(fused, "grad_scale")
    assert not hasattr(fused, "found_inf")


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=20),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedulers(kind, tensor_lr):
    theirs, ours = parameters(seed=4), parameters(seed=4)
    rate = torch.tensor(1e-2) if tensor_lr else 1e-2
    pairs = []
    for optimizer_class, params in ((torch.optim.AdamW, theirs), (optim.FusedAdamW, ours)):
        optimizer = optimizer_class(params, lr=rate.clone() if tensor_lr else rate)
        pairs.append((optimizer, params, SCHEDULERS[kind](optimizer)))
    for step in range(10):
        for optimizer, params, scheduler in pairs:
            advance(optimizer, params, [step])
            scheduler.step(*([1.0] if kind == "Plateau" else []))
    assert float(pairs[0][0].param_groups[0]["lr"]) == float(pairs[1][0].param_groups[0]["lr"])
    close(ours, theirs)


def test_closures_groups_and_hooks():
    def train(optimizer_class, params):
        optimizer = optimizer_class([{"params": params[:2], "weight_decay": 0.5}], lr=1e-2)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))

        def closure():
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(5)]
        optimizer.add_param_group({"params": params[2:], "lr": 0.1, "betas": (0.8, 0.9)})
        losses += [optimizer.step(closure).item() for _ in range(5)]
        return losses, len(calls)

    theirs, ours = parameters(seed=5), parameters(seed=5)
    expected, seen = train(torch.optim.AdamW, theirs), train(optim.FusedAdamW, ours)
    assert seen[1] == expected[1] == 10
    assert seen[0] == pytest.approx(expected[0], rel=1e-5)
    close(ours, theirs)


def test_channels_last_and_transposed_gradients():
    weights = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    theirs, ours = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    assert ours.stride() == weights.stride()
    their, our = torch.optim.AdamW([theirs]), optim.FusedAdamW([ours])
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(8, 4, 3, 3, generator=generator)
        theirs.grad, ours.grad = grad.clone(), grad
        their.step()
        our.step()
    close([ours], [theirs])


def test_compiled_training_step():
    def loss_of(model, x):
        return model(x).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    other = copy.deepcopy(model)
    our, their = optim.FusedAdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    compiled = torch.compile(loss_of, backend="aot_eager")
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for network, optimizer, function in ((model, our, compiled), (other, their, loss_of)):
            optimizer.zero_grad()
            function(network, x).backward()
            optimizer.step()

    @torch.compile(backend="eager")
    def whole(x):
        our.zero_grad()
        loss_of(model, x).backward()
        our.step()

    whole(x)
    their.zero_grad()
    loss_of(other, x).backward()
    their.step()
    close(list(model.parameters()), list(other.parameters()))
