"""One step of each optimizer as papers and torch's documentation write it, in fp64.

Every result comes with what fp32 may make of it: 2 ulps of the largest term of each sum (relative
to a result that cancels, errors are anything), half an ulp for each other operation, and what these
errors become on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Options = dict[str, Any]
ULP = 2.0**-23


@dataclass
class Near:
    """Numbers, and how far fp32 may be off; fp64."""

    value: torch.Tensor
    off: torch.Tensor | float = 0.0

    def times(self, factor: float | torch.Tensor, operations: int = 0) -> Near:
        """Multiplied, with `operations` more roundings than the sum that follows allows for."""
        value = self.value * factor
        return Near(value, self.off * abs(factor) + value.abs() * (operations * ULP / 2))

    def squared(self) -> Near:
        """One rounding."""
        value = self.value**2
        return Near(value, (2 * self.value.abs() + self.off) * self.off + value * (ULP / 2))

    def root(self) -> Near:
        """The square root of a value that is not negative, with one rounding."""
        root = self.value.sqrt()
        below = root - (self.value - self.off).clamp(min=0).sqrt()
        above = (self.value + self.off).sqrt() - root
        return Near(root, torch.maximum(below, above) + root * (ULP / 2))

    def over(self, divisor: Near) -> Near:
        """Division by a value that is above zero even with its error; one rounding."""
        value, least = self.value / divisor.value, divisor.value - divisor.off
        inherited = self.off / least + value.abs() * (divisor.off / least)
        return Near(value, inherited + value.abs() * (ULP / 2))


def add(*terms: torch.Tensor | Near) -> Near:
    """A sum, within 2 ulps of its largest term."""
    nears = [term if isinstance(term, Near) else Near(term) for term in terms]
    value, off = nears[0].value, nears[0].off
    largest = value.abs()
    for near in nears[1:]:
        value, off = value + near.value, off + near.off
        largest = torch.maximum(largest, near.value.abs())
    return Near(value, off + 2 * ULP * largest + 2.0**-148)  # there is nothing finer than 2^-149


def step(
    rule: str, o: Options, t: int, p: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor]
) -> list[Near]:
    """Step `t`, counted from 1: the new weights, then the new states.

    The last dimension of `p`, `g` and `states` runs over the elements of a parameter.
    """
    gradient = Near(-g if o.get("maximize") else g)
    if rule == "lion":
        return lion(o, p, gradient, *states)
    if rule in ("adam", "sgd") and o["weight_decay"]:
        gradient = add(gradient, o["weight_decay"] * p)
    if rule == "sgd":
        return sgd(o, t, p, gradient, *states)
    made = moments(o, gradient, *states)
    change = direction(o, t, made)
    if rule == "lamb":
        return [lamb(o, p, change), *made]
    decay = o["weight_decay"] if rule == "adamw" else 0.0
    return [add(p * (1 - o["lr"] * decay), change.times(-o["lr"])), *made]


def moments(o: Options, g: Near, *old: torch.Tensor) -> list[Near]:
    beta1, beta2 = o["betas"]
    m = add(beta1 * old[0], g.times(1 - beta1))
    v = add(beta2 * old[1], g.squared().times(1 - beta2))
    if not o.get("amsgrad"):
        return [m, v]
    return [m, v, Near(torch.maximum(old[2], v.value), v.off)]


def direction(o: Options, t: int, made: list[Near]) -> Near:
    """m^ / (sqrt(v^) + eps), with two more roundings: of the corrections, and of their product."""
    beta1, beta2 = o["betas"]
    root = made[-1].times(1 / (1 - beta2**t)).root()
    divisor = Near(root.value + o["eps"], root.off + (root.value + o["eps"]) * (ULP / 2))
    return made[0].over(divisor).times(1 / (1 - beta1**t), operations=2)


def lamb(o: Options, p: torch.Tensor, change: Near) -> Near:
    change = add(change, o["weight_decay"] * p)
    ratio: torch.Tensor | float = 1.0
    if o["weight_decay"] or o.get("always_adapt"):
        norms = [x.norm(dim=-1, keepdim=True) for x in (p, change.value)]
        ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
    return add(p, change.times(-o["lr"] * ratio, operations=2))


def sgd(o: Options, t: int, p: torch.Tensor, g: Near, *buffer: torch.Tensor) -> list[Near]:
    if not o["momentum"]:
        return [add(p, g.times(-o["lr"]))]
    kept = g.times(1 - o["dampening"] if t > 1 else 1.0)
    made = add(o["momentum"] * buffer[0], kept)
    change = add(g, made.times(o["momentum"])) if o["nesterov"] else made
    return [add(p, change.times(-o["lr"])), made]


def lion(o: Options, p: torch.Tensor, g: Near, m: torch.Tensor) -> list[Near]:
    beta1, beta2 = o["betas"]
    mixed = add(beta1 * m, g.times(1 - beta1))
    new = add(p * (1 - o["lr"] * o["weight_decay"]), -o["lr"] * mixed.value.sign())
    unsure = (mixed.value.abs() <= mixed.off) & (mixed.off > 2.0**-148)  # any sign is right
    new.off = new.off + torch.where(unsure, 2 * o["lr"], 0.0)
    return [new, add(beta2 * m, g.times(1 - beta2))]


def nearest_bf16(values: torch.Tensor) -> torch.Tensor:
    """Finite fp32 numbers, with ties away from zero."""
    mantissa, exponent = torch.frexp(values.double())
    whole = (mantissa.abs() * 256 + 0.5).floor().copysign(mantissa)
    return torch.ldexp(whole, exponent - 8).to(torch.bfloat16)
