"""Beside fp64: single steps over all magnitudes, and 1,000 steps of every form there is.

Steps are judged one by one, from what was stored before them, so that errors cannot hide in drift.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import textbook_optim as textbook
import torch
from optimizing import DEFAULTS, OPTIMIZERS, Case
from textbook_optim import Near

from pycomm.optim import _storage

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

OPTIONS = [
    Case("adam"),
    Case("adam", {"weight_decay": 0.1, "maximize": True}),
    Case("adam", {"amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-4}),
    Case("adamw", {"lr": 0.5}),
    Case("adamw", {"amsgrad": True, "betas": (0.45, 0.55)}),
    Case("sgd", {"momentum": 0.0, "weight_decay": 0.1}),
    Case("sgd", {"dampening": 0.3, "weight_decay": 0.1}),
    Case("sgd", {"nesterov": True, "maximize": True}),
    Case("lion"),
    Case("lion", {"betas": (0.5, 0.6), "maximize": True}),
    Case("lamb"),
    Case("lamb", {"weight_decay": 0.0}),
]


def draw(kind, generator, count=40_000):
    values = torch.randn(count, generator=generator)
    if kind == "alike":
        return values
    return values * torch.randint(-40, 16, (count,), generator=generator).exp2()


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["alike", "of all sizes", "cancelling"])
@pytest.mark.parametrize("t", [1, 2, 10, 1000, 10**6])
def test_single_steps(case, kind, t):
    """2 ulps of the largest term of each sum; `textbook_optim` follows these errors."""
    generator = torch.Generator().manual_seed(t)
    p, g, *states = (draw(kind, generator) for _ in range(5))
    o = case.all_options
    if kind == "cancelling":  # in the average, but for some ulps
        beta = o["betas"][0] if "betas" in o else 0.5
        g = -beta / (1 - beta) * states[0] * (1 - torch.randint(-4, 5, g.shape) * textbook.ULP)
    param = torch.nn.Parameter(p.clone())
    optimizer = case.make([param])
    names = optimizer._state_names(optimizer.param_groups[0])
    states = [s.square() if name.endswith("_sq") else s for name, s in zip(names, states)]  # noqa: B905
    saved = {"step": torch.tensor(t - 1.0), **dict(zip(names, states, strict=True))}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    param.grad = g
    optimizer.step()
    expected = textbook.step(case.name, o, t, *to_fp64(p, g), to_fp64(*states))
    got = [param.detach(), *(optimizer.state[param][name] for name in names)]
    for name, one, near in zip(["weights", *names], to_fp64(*got), expected, strict=True):
        within(name, one, near.value, near.off)


def to_fp64(*tensors):
    return [tensor.double() for tensor in tensors]


def within(what, got, expected, limit):
    off = (got - expected).abs()
    wrong = ~(off <= limit)
    if wrong.any():
        first = tuple(int(i) for i in wrong.nonzero()[0])
        share = (off / limit).max().item()
        pytest.fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} are wrong, by up to {share:.3g} times "
            f"what is allowed; at {first} {got[first]} instead of {expected[first]}"
        )


# 1,000 steps.

STEPS, FEW_STEPS = 1000, 60
COUNT = 264  # elements: a whole block of 8-bit states, and a short one
WEIGHTS = [
    *((FP32, None), (FP16, None), (FP16, "fp32")),
    *((BF16, None), (BF16, "fp32"), (BF16, "remainder")),
]
STATES = ("fp32", "fp16", "bf16", "8bit")
RULES = [
    ("adam", {"weight_decay": 0.01}),
    ("adamw", {"amsgrad": True}),
    ("sgd", {"momentum": 0.0, "weight_decay": 0.01}),
    ("sgd", {"dampening": 0.2}),
    ("lion", {}),
    ("lamb", {}),
]


@dataclass
class Form:
    """The storage of a parameter, its master weights and its states."""

    dtype: torch.dtype
    master: str | None
    states: str
    grad_dtype: torch.dtype
    stochastic: bool


def forms(rule, options):
    """Every one that is supported; `test_forms` says which are not."""
    made = []
    for (dtype, master), states, stochastic in itertools.product(WEIGHTS, STATES, (False, True)):
        params = [torch.nn.Parameter(torch.zeros(1, dtype=dtype))]
        case = Case(rule, options, dtype, None, master, states, stochastic)
        try:
            case.make(params)
        except ValueError:
            continue
        made += [Form(dtype, master, states, grad, stochastic) for grad in (FP32, FP16, BF16)]
    return made


@pytest.mark.parametrize(("rule", "options"), RULES, ids=str)
def test_forms(rule, options):
    """Options are refused only if they ask for stochastic rounding and nothing is rounded."""
    for (dtype, master), states in itertools.product(WEIGHTS, STATES):
        bare = dtype == BF16 and master is None
        moments = options.get("momentum") != 0.0 and states != "fp32"
        random = bare or (moments and (dtype == FP32 or master is not None))
        found = Counter((f.dtype, f.master, f.states) for f in forms(rule, options))
        assert found[dtype, master, states] == 3 * (1 + random)


# How a stored number is found again, and how far it may lie from what was to be stored.
DIGITS = {"fp32": (24, -149), "fp16": (11, -24), "bf16": (8, -133)}  # and the finest unit


def unit(kind, values):
    digits, least = DIGITS[kind]
    return torch.ldexp(torch.ones_like(values), (torch.frexp(values)[1] - digits).clamp(min=least))


@dataclass
class Part:
    """Some rows of a column, of one kind; `tensors` hold a list for each thing that is stored."""

    kind: str
    squares: bool
    rows: torch.Tensor
    tensors: list[list[torch.Tensor]]

    def decode(self):
        first, *others = (torch.stack(tensors) for tensors in self.tensors)
        if self.kind == "remainder":
            high, low = first.view(torch.int16).int() << 16, others[0].int()
            return (high + low).view(FP32).double()
        if self.kind == "roots":
            return first.double().square()
        if self.kind != "8bit":
            return first.double()
        largest = others[0].double().repeat_interleave(256, dim=1)[:, : first.shape[1]]
        if self.squares:
            return largest * (first.double() / 255) ** 4
        codes = first.view(torch.int8).double() / 127
        return largest * codes * codes.abs()

    def check(self, what, got, near):
        """Checks a stored value against the expected one."""
        if self.kind in ("fp32", "remainder"):
            return within(what, got, near.value, near.off)
        if self.squares and self.kind in ("roots", "8bit"):
            near, got = near.root(), got.sqrt()
        if self.kind == "8bit":
            limit = self.limit_of_codes(near)
        elif self.kind == "roots":
            limit = unit("fp16", near.value + near.off)
        else:
            limit = unit(self.kind.removesuffix(" at random"), near.value.abs() + near.off)
            limit *= 1 if self.kind.endswith("at random") else 0.5
        return within(what, got, near.value, near.off + limit)

    def limit_of_codes(self, near):
        """The bounds of docs/how-to/optimizers.md, of second moments for their roots."""
        rows, count = near.value.shape
        padded = torch.nn.functional.pad(near.value.abs(), (0, -count % 256)).view(rows, -1, 256)
        largest = padded.amax(-1, keepdim=True)
        share = (padded / largest).sqrt()
        most = 255 if self.squares else 127
        coded = 2 * share / most + 1 / most**2
        return (coded * largest * (1 + 1e-4)).view(rows, -1)[:, :count]


class Column:
    """A quantity of all parameters of one length: a row for each."""

    def __init__(self, name, stored):
        self.name = name
        kinds = {}
        for row, (kind, *tensors) in enumerate(stored):
            kinds.setdefault(kind, []).append((row, *tensors))
        self.parts = []
        for kind, members in kinds.items():
            rows, *tensors = (list(each) for each in zip(*members, strict=True))
            rows = torch.tensor(rows)
            self.parts.append(Part(kind, name.endswith("_sq"), rows, tensors))

    def decode(self):
        values = [part.decode() for part in self.parts]
        whole = torch.empty(sum(map(len, values)), values[0].shape[1], dtype=torch.float64)
        for part, value in zip(self.parts, values, strict=True):
            whole[part.rows] = value
        return whole

    def check(self, got, near):
        for part in self.parts:
            rows = part.rows
            part.check(
                f"{self.name} as {part.kind}", got[rows], Near(near.value[rows], near.off[rows])
            )


def kind_of_weights(form, param, state):
    if form.master == "fp32" and form.dtype != FP32:
        return "fp32", state["master_param"]
    if form.master == "remainder":
        return "remainder", param.detach(), state["remainder"]
    kind = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[form.dtype]
    return kind + (" at random" if kind == "bf16" and form.stochastic else ""), param.detach()


def kind_of_state(form, name, state):
    if form.states == "8bit":
        return "8bit", state[f"{name}_code"], state[f"{name}_absmax"]
    if form.states == "fp16" and name.endswith("_sq"):
        return "roots", state[f"{name}_root"]
    return form.states + ("" if form.states == "fp32" else " at random"), state[name]


class Stack:
    """Parameters of all forms, with the values decoded from them, a row for each."""

    def __init__(self, rule, options):
        generator = torch.Generator().manual_seed(0)
        self.forms = forms(rule, options)
        self.params = []
        for form in self.forms:
            values = torch.randn(COUNT, generator=generator).to(form.dtype)
            self.params.append(torch.nn.Parameter(values))
            self.params[-1].grad_dtype = form.grad_dtype
        self.random = torch.randn(2**18, generator=generator)
        sizes = torch.randint(-10, 3, (2**18 // 64,), generator=generator).exp2()
        self.random *= sizes.repeat_interleave(64)
        self.random[::31] = 0

    def groups(self):
        """Groups of parameters with the same options."""
        made = {}
        for form, param in zip(self.forms, self.params, strict=True):
            key = form.dtype, form.master, form.states, form.stochastic
            made.setdefault(key, []).append(param)
        names = "master_weights", "states", "stochastic_rounding"
        return [
            {"params": params, **dict(zip(names, key, strict=True))}
            for (_, *key), params in made.items()
        ]

    def columns(self, optimizer, names):
        states = [optimizer.state[param] for param in self.params]
        rows = list(zip(self.forms, self.params, states, strict=True))
        weights = Column("weights", [kind_of_weights(*row) for row in rows])
        others = [Column(n, [kind_of_state(f, n, state) for f, _, state in rows]) for n in names]
        return [weights, *others]

    def draw(self, step):
        """New gradients; returns them as they are stored."""
        need = len(self.forms) * COUNT
        begin = step * 7919 % (len(self.random) - need)
        values = self.random[begin : begin + need].view(-1, COUNT) * 2.0 ** (step % 5)
        stored = {dtype: values.to(dtype) for dtype in (FP32, FP16, BF16)}
        grads = [stored[form.grad_dtype][row] for row, form in enumerate(self.forms)]
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        return torch.stack([grad.float() for grad in grads]).double()


@pytest.mark.parametrize(
    "steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)], ids="{}-steps".format
)
@pytest.mark.parametrize(("rule", "options"), RULES, ids=str)
def test_steps(rule, options, steps, monkeypatch):
    """Steps of every form, from the stored values, are right up to rounding when stored.

    The first 100 steps are judged, and every tenth later one.
    """
    monkeypatch.setattr(_storage, "SMALL", 1)
    stack = Stack(rule, options)
    settings = {**DEFAULTS[rule], **options}
    optimizer = OPTIMIZERS[rule](stack.groups(), **settings)
    names = optimizer._state_names(optimizer.param_groups[0])
    p = torch.stack([param.detach().double() for param in stack.params])
    states = [torch.zeros_like(p) for _ in names]
    columns = []
    for t in range(1, steps + 1):
        judged = t <= 100 or t % 10 == 0
        if judged and columns:
            p, *states = [column.decode() for column in columns]
        grads = stack.draw(t)
        optimizer.step()
        columns = columns or stack.columns(optimizer, names)
        if judged:
            expected = textbook.step(rule, settings, t, p, grads, states)
            for column, near in zip(columns, expected, strict=True):
                column.check(column.decode(), near)
    for form, param in zip(stack.forms, stack.params, strict=True):
        state = optimizer.state[param]
        assert state["step"] == steps
        assert param.isfinite().all()
        if "master_param" in state:
            seen = state["master_param"].to(form.dtype)
            if form.dtype == BF16:  # ties away from zero
                seen = textbook.nearest_bf16(state["master_param"])
            assert torch.equal(param, seen)
