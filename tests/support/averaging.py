"""Models with local SGD, recorded step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ddp
import golden_local_sgd
import torch
import wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks, optim

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
# Options of LocalSGDState, but for the period.
RULES: dict[str, dict[str, Any]] = {
    "averages": {},
    "DiLoCo": DILOCO,
    "int8, DiLoCo": {"compression": pycomm.Int8(512, "stochastic", seed=9), **DILOCO},
    "top-k, error reset": {"compression": pycomm.TopK(0.05), "local_residuals": True},
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass
class Moment:
    """One rank, before and after a call of ``step()``: weights as the optimizer has them."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]  # after it, in their own types
    exchanged: bool


@dataclass
class Trainee:
    """A model, its optimizer, and the state that exchanges its parameters."""

    group: pycomm.Group
    front: str = "wrapper"
    module: nn.Module = field(default_factory=ddp.Given)
    make_optimizer: Any = sgd
    options: dict[str, Any] = field(default_factory=lambda: {"period": 2})

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer(p for p in self.module.parameters() if p.requires_grad)
        named = self.module.named_parameters()
        self.state = hooks.LocalSGDState(named, self.optimizer, group=self.group, **self.options)
        if self.front == "wrapper":
            self.model: nn.Module = pycomm.DataParallel(
                self.module, bucket_cap_mb=0.01, state=self.state
            )
        else:
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=0.01)
            self.model.register_comm_hook(self.state, hooks.local_sgd_hook)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights in the optimizer's precision."""
        full = getattr(self.optimizer, "full_weights", torch.Tensor.detach)
        return {name: full(p).clone() for name, p in ddp.unprefixed(self.model).items()}

    def backward(self, step: int) -> None:
        rank = self.group.rank
        if isinstance(self.module, ddp.Given):
            self.model(ddp.gradients(self.model, rank, step)).backward()
        else:
            wrapped.batch_loss(self.model, rank, step).backward()

    def step(self, step: int) -> Moment:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()
        before = self.weights()
        exchanged = self.state.step()
        return Moment(before, self.weights(), wrapped.parameters_of(self.model), exchanged)

    def run(self, steps: Iterable[int]) -> list[Moment]:
        return [self.step(step) for step in steps]


def train(group: pycomm.Group, front: str, steps: int, make: Any = None, **options: Any) -> Any:
    """A rank's part: the weights that it began with, and every step."""
    trainee = Trainee(group, front, options=options, **(make() if make else {}))
    began = trainee.weights()
    return began, trainee.run(range(steps))


def check(runs: list[Any], options: dict[str, Any]) -> None:
    """Compares every exchange of all ranks, bit for bit, with the golden model."""
    began = runs[0][0]
    sizes = {name: -(-w.numel() // 4096) * 4096 for name, w in began.items()}
    first = {name: sum(list(sizes.values())[:i]) for i, name in enumerate(sizes)}
    outer = golden_local_sgd.Outer(
        len(runs),
        first,
        options.get("outer_lr", 1.0),
        options.get("outer_momentum", 0.0),
        options.get("compression"),
        options.get("local_residuals", False),
    )
    if options.keys() & {"outer_lr", "compression"}:
        outer.last = {name: wide(w).numpy().ravel() for name, w in began.items()}
    for number, moments in enumerate(zip(*(run[1] for run in runs), strict=True), 1):
        due = number % options["period"] == 0
        assert [moment.exchanged for moment in moments] == [due] * len(runs)
        if due:
            one, other = (next(iter(moments[rank].before.values())) for rank in (0, -1))
            assert not torch.equal(one, other)  # they have been on their own
            expected = outer.exchange([moment.before for moment in moments])
        for rank, moment in enumerate(moments):
            assert wrapped.same(moment.after, expected[rank] if due else moment.before)
            for name, parameter in moment.parameters.items():
                close(parameter, moment.after[name])


def close(parameter: torch.Tensor, weights: torch.Tensor) -> None:
    """Checks that a parameter equals the weights up to its type's precision."""
    ulp = torch.finfo(parameter.dtype).eps
    torch.testing.assert_close(parameter.double(), weights.double(), rtol=ulp, atol=0)


def wide(weights: torch.Tensor) -> torch.Tensor:
    """Values in the type in which exchanges compute."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def in_bf16(**options: Any) -> dict[str, Any]:
    """Parameters in bf16, with one of pycomm's optimizers."""
    return {
        "module": ddp.Given(dict.fromkeys(ddp.SHAPES, torch.bfloat16)),
        "make_optimizer": lambda parameters: optim.FusedAdamW(parameters, lr=1e-2, **options),
    }
