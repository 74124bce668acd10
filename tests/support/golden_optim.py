"""The expected results of every optimizer step, computed with numpy without pycomm.

One parameter at a time, flat. Arithmetic is fp32 in the order that is written here; factors of a
whole step are Python's doubles. Formats follow docs/how-to/optimizers.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import golden
import numpy as np
import torch
from golden_compression import philox

F = np.float32
BLOCK = 256


def power(base: float, n: int) -> float:
    result = 1.0
    while n:
        if n % 2:
            result *= base
        base, n = base * base, n // 2
    return result


def canonical(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.uint32(0x7FC00000).view(F), values)


# Formats: fp32 values after they have been stored.


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bf16 patterns and remainders."""
    bits = canonical(values).view(np.uint32).astype(np.uint64)
    return ((bits + 0x8000) >> 16).astype(np.uint16), (bits & 0xFFFF).astype(np.uint16)


def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    signed = low.astype(np.int64) - (low.astype(np.int64) >> 15 << 16)
    return ((high.astype(np.int64) << 16) + signed).astype(np.uint32).view(F)


def rounding_bits(count: int, step: int, stream: int, seed: int) -> np.ndarray:
    """A word for each element: its place, mixed with a key for every 1,024."""
    low = np.uint64(0xFFFFFFFF)
    run, place = np.divmod(np.arange(count), 1024)
    keys = philox(run, step, stream, seed).astype(np.uint64)
    bits = keys[:, 0] + place.astype(np.uint64) & low
    bits = (bits ^ bits >> np.uint64(16)) * np.uint64(0x7FEB352D) & low
    bits = (bits ^ bits >> np.uint64(15) ^ keys[:, 1]) * np.uint64(0x846CA68B) & low
    return bits.astype(np.uint32)


def rounds_up(
    values: np.ndarray, below: np.ndarray, above: np.ndarray, random: np.ndarray
) -> np.ndarray:
    """From 23 bits, taken as the middle of their share."""
    share = (F(2) * (random >> 9).astype(F) + F(1)) * F(2**-24)
    return values - below > (above - below) * share


def stochastic_bf16(values: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Rounds up in magnitude if adding 16 random bits carries."""
    bits = canonical(values).view(np.uint32).astype(np.uint64)
    carried = bits + np.where(np.isfinite(values), random.astype(np.uint64), 0)
    return (carried >> 16 << 16).astype(np.uint32).view(F)


def blocks(values: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, F)
    padded[: len(values)] = values
    return padded.reshape(-1, BLOCK)


def share_of(codes: np.ndarray) -> np.ndarray:
    q = codes.astype(F) * F(1 / 255)
    return (q * q) * (q * q)


def encode8(
    values: np.ndarray, squares: bool, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the largest magnitude of each block; at random, or to nearest without."""
    with np.errstate(all="ignore"):
        rows = blocks(values)
        largest = np.abs(rows).max(1)
        bad = ~np.isfinite(largest)
        dead = bad | (largest < np.finfo(F).tiny)
        factor = F(260100) / np.sqrt(largest) if squares else F(16129 - 2**-8) / F(4096) / largest
        share = np.sqrt(rows) if squares else np.abs(rows)
        share = share * np.where(dead, F(0), factor)[:, None]
        if random is None:
            codes = np.rint(np.sqrt(share) / F(2) if squares else np.sqrt(share) * F(64))
            codes = np.maximum(codes, 1) if squares else np.copysign(codes, rows)
        else:
            dice = np.resize(random, rows.size).reshape(rows.shape)
            codes = fourth_roots(share, dice) if squares else square_roots(rows, share, dice)
        if squares:
            codes = np.where(rows > 0, codes, F(0))
    codes[dead] = 0
    stored = np.where(bad, np.uint32(0x7FC00000).view(F), np.where(dead, F(0), largest))
    codes = codes.astype(np.uint8 if squares else np.int8).view(np.uint8)
    return codes.reshape(-1)[: len(values)], stored.astype(F)


def square_roots(values: np.ndarray, squares: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Signed roots of squares / 4,096, up by the low half of the random bits."""
    fraction = (random & 0xFFFF).astype(F) * F(2**-22) + F(2**-23)
    rest = F(2**-6) - fraction
    roots = np.sqrt(np.maximum(squares - fraction * rest, F(2**-101)))
    return np.floor((np.copysign(roots, values) + rest) * F(64))


def fourth_roots(share: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Roots of roots of share^2 / 16, at least 1, up by the high 23 random bits."""
    share = np.maximum(share, F(4))
    below = np.floor(np.minimum(np.sqrt(share), F(510 - 2**-15)) / F(2))
    middle = below + below + F(1)
    square = middle * middle + F(1)
    fraction = (random >> 9).astype(F) * F(2**-20) - F(4)
    limit = square * ((square + F(4)) + fraction * middle) - F(4)
    return below + (share * share > limit)


def decode8(codes: np.ndarray, largest: np.ndarray, squares: bool) -> np.ndarray:
    scale = np.repeat(largest, BLOCK)[: len(codes)]
    if squares:
        return share_of(codes) * scale
    q = codes.view(np.int8).astype(F) * F(1 / 127)
    return q * np.abs(q) * scale


def through(values: np.ndarray, storage: str, squares: bool, random: np.ndarray) -> np.ndarray:
    """A state as the next step finds it.

    Of an element's random bits, the low half rounds first moments, the high ones second moments;
    roots in fp16 take the exclusive or of both halves as the low half.
    """
    low, high = random & 0xFFFF, random >> 16
    if storage == "8bit" and len(values) >= 4096:
        return decode8(*encode8(values, squares, random), squares)
    if storage == "bf16":
        return stochastic_bf16(values, high if squares else low)
    if storage == "fp16":
        return roots(values, random ^ high) if squares else stochastic_fp16(values, low >> 3)
    return canonical(values)


def stochastic_fp16(values: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Rounds up in magnitude with 13 random bits, never to infinity."""
    with np.errstate(all="ignore"):
        exact = np.minimum(np.abs(values), F(65504)).astype(np.float64)
        unit = np.exp2(np.maximum(np.floor(np.log2(exact)), -14) - 10)
        made = np.floor(exact / unit + random.astype(np.float64) / 8192) * unit
        made = np.copysign(np.minimum(made, 65504), values).astype(F)
    return canonical(np.where(np.isfinite(values), made, values))


def roots(values: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Through their roots in fp16, never zero above zero, nor infinite of what is finite."""
    with np.errstate(all="ignore"):
        exact = np.sqrt(np.minimum(values, F(65504) * F(65504)))
        unit = np.maximum(np.exp2(np.floor(np.log2(exact)) - 10), 2.0**-24).astype(F)
        below = np.floor(exact / unit) * unit
        above = np.where(below < 65504, below + unit, F(np.inf))
        stored = np.where(rounds_up(values, below**2, above**2, random), above, below)
    stored = np.where((values > 0) & (stored == 0), F(2**-24), stored)
    return canonical(np.where(np.isfinite(values), stored * stored, values))


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return golden.in_fp32(golden.narrow(np.array(values, dtype=F), dtype)).numpy()


def square_sum(values: np.ndarray) -> float:
    return tree_sum(values.astype(np.float64) ** 2)


def tree_sum(terms: np.ndarray) -> float:
    """A tree of fan-in 1024 over 32 lanes, in double."""
    while len(terms) > 1:
        padded = np.zeros(-(-len(terms) // 1024) * 1024)
        padded[: len(terms)] = terms
        lanes = np.zeros((len(padded) // 1024, 32))
        for row in padded.reshape(-1, 32, 32).transpose(1, 0, 2):
            lanes = lanes + row
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        terms = lanes[:, 0]
    return float(terms[0]) if len(terms) else 0.0


# Optimizers.


def average(beta: float, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """As a step from whichever weighs more."""
    return old + F(1 - beta) * (new - old) if beta >= 0.5 else new - F(beta) * (new - old)


@dataclass
class Parameter:
    """One parameter and its states, all as fp32 values."""

    rule: str
    weights: np.ndarray
    options: dict
    dtype: torch.dtype = torch.float32
    master: str | None = None
    storage: str = "fp32"
    stochastic: bool = False
    seed: int = 0
    stream: int = 0
    step: int = 0
    states: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [np.zeros_like(self.weights) for _ in range(3)]

    def update(self, g: np.ndarray, scale: float = 1.0) -> None:
        self.step += 1
        factor = F(-scale if self.options.get("maximize") else scale)
        with np.errstate(all="ignore"):
            weights = getattr(self, self.rule)(g * factor, self.weights)
        random = rounding_bits(len(weights), self.step, self.stream, self.seed)
        self.states = [
            through(state, self.storage, place > 0, random)
            for place, state in enumerate(self.states)
        ]
        if self.dtype == torch.float32 or self.master is not None:
            self.weights = canonical(weights)
        elif self.stochastic:
            self.weights = stochastic_bf16(weights, (random ^ random >> 16) & 0xFFFF)
        else:
            self.weights = rounded(weights, self.dtype)

    @property
    def seen(self) -> np.ndarray:
        """The parameter itself."""
        if self.master is not None and self.dtype == torch.bfloat16:
            high, _ = split(self.weights)
            return (high.astype(np.uint32) << 16).view(F)
        return rounded(self.weights, self.dtype)

    def moments(self, g: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, F, F]:
        beta1, beta2 = self.options["betas"]
        m, v, _ = self.states
        m, v = average(beta1, m, g), average(beta2, v, g * g)
        root = math.sqrt(1 - power(beta2, self.step))
        factor = F(scale * root / (1 - power(beta1, self.step)))
        return m, v, factor, F(self.options["eps"] * root)

    def adam(self, g: np.ndarray, p: np.ndarray) -> np.ndarray:
        if self.options["weight_decay"]:
            g = g + F(self.options["weight_decay"]) * p
        return p - self.adam_step(g)

    def adamw(self, g: np.ndarray, p: np.ndarray) -> np.ndarray:
        o = self.options
        return p * F(1 - o["lr"] * o["weight_decay"]) - self.adam_step(g)

    def adam_step(self, g: np.ndarray) -> np.ndarray:
        o = self.options
        m, v, factor, eps = self.moments(g, o["lr"])
        most = np.maximum(self.states[2], v) if o.get("amsgrad") else self.states[2]
        self.states = [m, v, most]
        divisor = most if o.get("amsgrad") else v
        return factor * (m / (np.sqrt(divisor) + eps))

    def sgd(self, g: np.ndarray, p: np.ndarray) -> np.ndarray:
        o = self.options
        if o["weight_decay"]:
            g = g + F(o["weight_decay"]) * p
        if o["momentum"]:
            keep = F(1) if self.step == 1 else F(1 - o["dampening"])
            b = F(o["momentum"]) * self.states[0] + keep * g
            self.states[0] = b
            g = g + F(o["momentum"]) * b if o["nesterov"] else b
        return p - F(o["lr"]) * g

    def lion(self, g: np.ndarray, p: np.ndarray) -> np.ndarray:
        o = self.options
        (beta1, beta2), m = o["betas"], self.states[0]
        sign = np.sign(average(beta1, m, g))
        self.states[0] = average(beta2, m, g)
        return p * F(1 - o["lr"] * o["weight_decay"]) - F(o["lr"]) * sign

    def lamb(self, g: np.ndarray, p: np.ndarray) -> np.ndarray:
        o = self.options
        m, v, factor, eps = self.moments(g, 1.0)
        self.states[:2] = m, v
        u = factor * (m / (np.sqrt(v) + eps)) + F(o["weight_decay"]) * p
        weights, directions = square_sum(p), square_sum(u)
        ratio = 1.0
        if o["weight_decay"] and weights > 0 and directions > 0:
            ratio = math.sqrt(weights) / math.sqrt(directions)
        rate = o["lr"] * ratio
        return p - (np.finfo(F).max if rate > np.finfo(F).max else F(rate)) * u
