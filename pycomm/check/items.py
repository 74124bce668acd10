"""Items: what a rank runs, and what plain torch makes of the same.

Where the order of sums is fixed, results have torch's bits. Elsewhere, and for codecs, they are
within the documented bounds.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks, optim

COUNTS = (1, 1003, 70_001)  # elements: in a packet, in staging, over many pieces
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
REDUCTIONS = ("sum", "avg", "max")
ROOT = 1  # of rooted operations
STEPS = 3  # of optimizers and trainings
RATE = 0.01  # their learning rate
NEAR = 1e-6  # of a weight plus one: how far it may be from torch's in fp64
ULP = torch.finfo(torch.float32).eps
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Result(NamedTuple):
    """A result of an item.

    Attributes:
        name: what it is.
        found: the tensor.
        wanted: what plain torch makes of it, on the CPU; None if only the bits must agree.
        limit: how far they may differ, for all elements or for each; None for the same bits.
        alike: all ranks must have the same bits.
        as_on_cpu: on a GPU, the bits must be the CPU's.
    """

    name: str
    found: torch.Tensor
    wanted: torch.Tensor | None = None
    limit: torch.Tensor | float | None = None
    alike: bool = True
    as_on_cpu: bool = True


@dataclass(frozen=True)
class Place:
    """Where an item runs: a rank's group, and a device."""

    group: pycomm.Group
    device: str = "cpu"

    def inputs(self, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """All ranks' inputs, on the CPU."""
        return [_random(count, dtype, rank, seed) for rank in range(self.group.size)]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return tensor.to(self.device, copy=True)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, of numbers that no result has."""
        return torch.full((count,), 77, dtype=dtype, device=self.device)


Item = Callable[[Place], Iterable[Result]]


def _random(count: int, dtype: torch.dtype, *seeds: int) -> torch.Tensor:
    seed = reduce(lambda mixed, own: 1_000_003 * mixed + own + 1, (count, *seeds), 0)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    if dtype == torch.int64:
        return torch.randint(-1000, 1000, (count,), generator=generator)
    return torch.randn(count, generator=generator).to(dtype)


# Operations.


def _reduced(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Adds in rank order, 16-bit floats in fp32, and rounds once."""
    dtype = inputs[0].dtype
    wide = [x.float() if dtype.is_floating_point else x for x in inputs]
    if op == "max":
        return reduce(torch.maximum, wide).to(dtype)
    total = reduce(torch.add, wide)
    if op == "avg":
        mode = None if dtype.is_floating_point else "trunc"
        total = torch.div(total, len(inputs), rounding_mode=mode)
    return total.to(dtype)


def _any_order(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor | None:
    """How far a sum of floats may be off if it is added in another order."""
    dtype = inputs[0].dtype
    if op == "max" or not dtype.is_floating_point:
        return None
    magnitude = reduce(torch.add, [x.double().abs() for x in inputs])
    share = len(inputs) if op == "avg" else 1
    return len(inputs) * torch.finfo(dtype).eps * magnitude / share


def _cases(op: Iterable[str] = ("",)) -> Iterator[tuple[int, torch.dtype, str, str]]:
    """Elements, a dtype, a reduction, and a name of these."""
    for count, dtype, each in itertools.product(COUNTS, DTYPES, op):
        name = f"{count} {str(dtype).removeprefix('torch.')}"
        yield count, dtype, each, f"{each} of {name}" if each else name


def all_reduce(at: Place, algorithm: str) -> Iterator[Result]:
    """:func:`pycomm.all_reduce`."""
    in_pieces = algorithm in ("ring", "tree")  # whose lengths differ between devices
    ordered = not in_pieces and len(at.group.nodes) == 1
    for count, dtype, op, name in _cases(REDUCTIONS):
        inputs = at.inputs(count, dtype)
        mine = at.put(inputs[at.group.rank])
        pycomm.all_reduce(mine, op, algorithm=algorithm, group=at.group)
        limit = None if ordered else _any_order(inputs, op)
        yield Result(name, mine, _reduced(inputs, op), limit, as_on_cpu=not in_pieces)


def rooted_reduce(at: Place) -> Iterator[Result]:
    """:func:`pycomm.reduce`."""
    for count, dtype, op, name in _cases(REDUCTIONS):
        inputs = at.inputs(count, dtype)
        mine = at.put(inputs[at.group.rank])
        pycomm.reduce(mine, ROOT, op, group=at.group)
        if at.group.rank == ROOT:
            limit = None if len(at.group.nodes) == 1 else _any_order(inputs, op)
            yield Result(name, mine, _reduced(inputs, op), limit, alike=False)
        else:
            yield Result(f"{name}, which stays", mine, inputs[at.group.rank], alike=False)


def reduce_scatter(at: Place) -> Iterator[Result]:
    """:func:`pycomm.reduce_scatter`."""
    size, rank = at.group.size, at.group.rank
    for count, dtype, op, name in _cases(REDUCTIONS):
        inputs = at.inputs(size * count, dtype)
        block = at.empty(count, dtype)
        pycomm.reduce_scatter(block, at.put(inputs[rank]), op, group=at.group)
        blocks = [x.view(size, count)[rank] for x in inputs]
        limit = None if len(at.group.nodes) == 1 else _any_order(blocks, op)
        yield Result(name, block, _reduced(blocks, op), limit, alike=False)


def move(at: Place, name: str) -> Iterator[Result]:
    """An operation that moves blocks and changes no bit."""
    for count, dtype, _, case in _cases():
        found, wanted = MOVES[name](at, at.inputs(count, dtype))
        if found is not None:
            yield Result(case, found, wanted, alike=name in ("all_gather", "broadcast"))


Moved = tuple[torch.Tensor | None, torch.Tensor]  # this rank's result, and what it must be


def _all_gather(at: Place, blocks: list[torch.Tensor]) -> Moved:
    whole = torch.cat(blocks)
    found = at.empty(len(whole), whole.dtype)
    pycomm.all_gather(found, at.put(blocks[at.group.rank]), group=at.group)
    return found, whole


def _broadcast(at: Place, blocks: list[torch.Tensor]) -> Moved:
    found = at.put(blocks[at.group.rank])
    pycomm.broadcast(found, ROOT, group=at.group)
    return found, blocks[ROOT]


def _gather(at: Place, blocks: list[torch.Tensor]) -> Moved:
    whole = torch.cat(blocks)
    found = at.empty(len(whole), whole.dtype) if at.group.rank == ROOT else None
    pycomm.gather(at.put(blocks[at.group.rank]), found, ROOT, group=at.group)
    return found, whole


def _scatter(at: Place, blocks: list[torch.Tensor]) -> Moved:
    found = at.empty(len(blocks[0]), blocks[0].dtype)
    given = at.put(torch.cat(blocks)) if at.group.rank == ROOT else None
    pycomm.scatter(found, given, ROOT, group=at.group)
    return found, blocks[at.group.rank]


def _all_to_all(at: Place, blocks: list[torch.Tensor]) -> Moved:
    size, rank = at.group.size, at.group.rank
    inputs = [torch.cat([block + peer for peer in range(size)]) for block in blocks]
    found = at.empty(len(inputs[0]), inputs[0].dtype)
    pycomm.all_to_all(found, at.put(inputs[rank]), group=at.group)
    return found, torch.cat([x.chunk(size)[rank] for x in inputs])


def _send_recv(at: Place, blocks: list[torch.Tensor]) -> Moved:
    size, rank = at.group.size, at.group.rank
    found = at.empty(len(blocks[0]), blocks[0].dtype)
    request = pycomm.isend(at.put(blocks[rank]), (rank + 1) % size, group=at.group)
    pycomm.recv(found, (rank - 1) % size, group=at.group)
    request.wait()
    return found, blocks[rank - 1]


MOVES: dict[str, Callable[[Place, list[torch.Tensor]], Moved]] = {
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "messages": _send_recv,
}


def barrier(at: Place) -> Iterator[Result]:
    """:func:`pycomm.barrier`: what ranks write to shared memory before it, all read after it."""
    pycomm.barrier(group=at.group)
    if len(at.group.nodes) == 1:
        own = at.group.empty(1000)
        views = at.group.peers(own)
        own.fill_(at.group.rank)
        pycomm.barrier(group=at.group)
        found = torch.cat(views)
        pycomm.barrier(group=at.group)
        yield Result("peers", found, torch.arange(at.group.size).float().repeat_interleave(1000))


# Codecs, alone and on the way.

COMPRESSIONS = (
    "none",
    "bf16",
    "fp16",
    "int8",
    "int8:512:rounding=stochastic",
    "topk:0.05",
    "topk:0.05:values=bfloat16",
    "topk:0.05:values=int8",
)


def codec(at: Place, name: str) -> Iterator[Result]:
    """Encodes and decodes."""
    compression = pycomm.parse_compression(name)
    for count, dtype in itertools.product((1003, 70_001), DTYPES[:3]):
        x = _random(count, dtype)
        case = f"{count} {str(dtype).removeprefix('torch.')}"
        wire = compression.encode(at.put(x), step=3)
        yield Result(f"bytes of {case}", wire)
        decoded = dtype if isinstance(compression, pycomm.Identity) else torch.float32
        wanted, limit = _decoded(compression, x.float())
        yield Result(case, compression.decode(wire, count, dtype=decoded), wanted, limit)


def _decoded(
    compression: pycomm.Compression, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """What a codec makes of fp32 numbers, in plain torch, and its bound."""
    if isinstance(compression, pycomm.Cast):
        return x.to(compression.dtype).float(), None
    if isinstance(compression, pycomm.Int8):
        scales = _largest_in_blocks(x, compression.block) / 127
        return x, _steps_of(compression) * scales + 4 * ULP * x.abs()
    if isinstance(compression, pycomm.TopK):
        sent = torch.zeros_like(x)
        chosen = x.abs().sort(descending=True, stable=True).indices[: compression.count(len(x))]
        sent[chosen] = x[chosen]
        if compression.values == torch.int8:
            return sent, (sent != 0) * (sent.abs().max() / 254 + 4 * ULP * sent.abs())
        return sent.to(compression.values).float(), None
    return x, None


def _largest_in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """For each element, the largest magnitude in its block."""
    padded = nn.functional.pad(x.abs(), (0, -len(x) % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).flatten()[: len(x)]


def _steps_of(compression: pycomm.Int8) -> float:
    """The largest error of a rounding, in scales."""
    return 0.5 if compression.rounding == "nearest" else 1.0


def compressed(at: Place, name: str, algorithm: str = "auto") -> Iterator[Result]:
    """:func:`pycomm.compressed_all_reduce`, whose residuals keep what is lost."""
    compression, size = pycomm.parse_compression(name), at.group.size
    as_on_cpu = algorithm == "auto"
    for count in (1003, 70_001):
        inputs = at.inputs(count, torch.float32)
        mine = at.put(inputs[at.group.rank])
        residual = torch.zeros(count, device=at.device)
        pycomm.compressed_all_reduce(
            mine, compression, residual=residual, algorithm=algorithm, step=3, group=at.group
        )
        kept = at.empty(size * count, torch.float32)
        pycomm.all_gather(kept, residual, group=at.group)
        mean, magnitude = _reduced(inputs, "avg"), reduce(torch.add, [x.abs() for x in inputs])
        if not isinstance(compression, pycomm.TopK):
            limit = _bound(compression, algorithm, size, inputs) + 2 * ULP * magnitude
            yield Result(f"mean of {count}", mine, mean, limit, as_on_cpu=as_on_cpu)
        total = size * mine.cpu().double() + kept.cpu().double().view(size, count).sum(0)
        exact = torch.stack(inputs).double().sum(0)
        slack = 8 * size * ULP * (magnitude + magnitude.max() / 16)
        case = f"result and residuals of {count}"
        yield Result(case, total, exact, slack, as_on_cpu=as_on_cpu)
        yield Result(f"result of {count}", mine, as_on_cpu=as_on_cpu)


def _bound(
    compression: pycomm.Compression, algorithm: str, size: int, inputs: Sequence[torch.Tensor]
) -> torch.Tensor | float:
    """The documented error of a mean."""
    if isinstance(compression, pycomm.Int8):
        roundings = {"ring": (size + 1) / 2, "tree": math.ceil(math.log2(size)) + 1}
        largest = max(float(x.abs().max()) for x in inputs)
        return roundings.get(algorithm, 2) * 2 * _steps_of(compression) * largest / 254
    if isinstance(compression, pycomm.Cast):
        eps = torch.finfo(compression.dtype).eps
        return eps * reduce(torch.add, [x.abs() for x in inputs]) + 2**-24
    return 0.0


def compressed_scatter(at: Place) -> Iterator[Result]:
    """:func:`pycomm.compressed_reduce_scatter`, in 8 bits."""
    size, rank, count = at.group.size, at.group.rank, 20_480
    inputs = at.inputs(size * count, torch.float32)
    block = at.empty(count, torch.float32)
    pycomm.compressed_reduce_scatter(block, at.put(inputs[rank]), pycomm.Int8(), group=at.group)
    blocks = [x.view(size, count)[rank] for x in inputs]
    limit = _bound(pycomm.Int8(), "auto", size, blocks) + 8 * ULP
    yield Result("mean", block, _reduced(blocks, "avg"), limit, alike=False)


# Optimizers and training.

RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.FusedAdam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.FusedAdamW, {"weight_decay": 0.1}),
    "SGD": (optim.FusedSGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Lion": (optim.FusedLion, {"weight_decay": 0.1}),
    "LAMB": (optim.FusedLAMB, {"weight_decay": 0.1}),
}
# How weights and states are kept: the dtype of parameters, and options.
STORES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp16 with fp32 weights": (torch.float16, {"master_weights": "fp32"}),
    "bf16 with remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16, 8-bit states": (torch.bfloat16, {"master_weights": "remainder", "states": "8bit"}),
}


def optimizer(at: Place, name: str) -> Iterator[Result]:
    """A fused optimizer beside torch's, or beside its paper, in fp64."""
    kind, options = RULES[name]
    for store, (dtype, more) in STORES.items():
        begin = _random(5000, dtype)
        ours = nn.Parameter(at.put(begin))
        fused = kind([ours], lr=RATE, **options, **more)
        theirs = nn.Parameter(begin.double())
        step = _reference(name, theirs, options)
        for number in range(STEPS):
            gradient = _random(5000, dtype, number)
            ours.grad, theirs.grad = at.put(gradient), gradient.double()
            fused.step()
            step()
            limit = NEAR * (1 + theirs.abs()) + torch.finfo(dtype).eps / 2 * theirs.abs()
            known = number == 0 or "states" not in more  # states are rounded after a step
            case = f"weights after step {number + 1}, {store}"
            wanted = theirs.detach().clone() if known else None
            yield Result(case, ours.detach().clone(), wanted, limit.detach())


def _reference(name: str, parameter: nn.Parameter, options: dict[str, Any]) -> Callable[[], object]:
    """A step of torch's optimizer, or of a paper's."""
    if name not in ("Lion", "LAMB"):
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
        return kind([parameter], lr=RATE, **options).step  # type: ignore[call-arg]
    moments = torch.zeros(2, parameter.numel(), dtype=parameter.dtype)
    steps = itertools.count(1)
    decay = options["weight_decay"]
    rule = _lion if name == "Lion" else _lamb

    @torch.no_grad()
    def step() -> None:
        assert parameter.grad is not None
        parameter.sub_(RATE * rule(parameter, parameter.grad, moments, decay, next(steps)))

    return step


def _lion(
    p: torch.Tensor, g: torch.Tensor, moments: torch.Tensor, decay: float, _: int
) -> torch.Tensor:
    """Chen et al. 2023, algorithm 2."""
    change = (0.9 * moments[0] + 0.1 * g).sign() + decay * p
    moments[0].mul_(0.99).add_(g, alpha=0.01)
    return change


def _lamb(
    p: torch.Tensor, g: torch.Tensor, moments: torch.Tensor, decay: float, step: int
) -> torch.Tensor:
    """You et al. 2020, algorithm 2."""
    moments[0].mul_(0.9).add_(g, alpha=0.1)
    moments[1].mul_(0.999).addcmul_(g, g, value=0.001)
    mean, square = moments[0] / (1 - 0.9**step), moments[1] / (1 - 0.999**step)
    change = mean / (square.sqrt() + 1e-6) + decay * p
    adapted: torch.Tensor = change * p.norm() / change.norm()
    return adapted


class Given(nn.Module):
    """Parameters whose gradients are what forward gets, so that no device's products matter."""

    SIZES = (1, 1003, 5000, 70_001)

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(_random(n, torch.float32)) for n in self.SIZES)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """A loss with these gradients."""
        products = [(p * g).sum() for p, g in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def train(at: Place, front: str, compression: str = "none", shard: str = "") -> Iterator[Result]:
    """Some steps of the wrapper, or of torch's DistributedDataParallel with the hook."""
    module, size, chosen = Given().to(at.device), at.group.size, None
    if compression != "none":
        chosen = pycomm.parse_compression(compression)
    model: nn.Module
    if front == "wrapper":
        model = pycomm.DataParallel(module, compression=chosen, shard=shard or None, group=at.group)
    else:
        model = DistributedDataParallel(module)
        state = hooks.CommState(chosen, module.named_parameters(), group=at.group)
        state.register(model)
    fused = optim.FusedSGD(module.parameters(), lr=RATE)
    exact = [p.detach().cpu().double() for p in module.parameters()]
    for step in range(STEPS):
        given = [
            [_random(n, torch.float32, rank, step) for n in Given.SIZES] for rank in range(size)
        ]
        model([at.put(g) for g in given[at.group.rank]]).backward()
        fused.step()
        fused.zero_grad()
        for weight, *gradients in zip(exact, *given, strict=True):
            weight.sub_(RATE * torch.stack(gradients).double().mean(0))
    # Residuals are late, not lost: an error is what they hold at the end.
    limit = {"none": NEAR, "int8": NEAR + RATE * 12 / 254}.get(compression)
    for number, (ours, wanted) in enumerate(zip(module.parameters(), exact, strict=True)):
        near = None if limit is None else limit * (1 + wanted.abs())
        known = wanted if limit is not None else None
        yield Result(f"weights {number} after {STEPS} steps", ours.detach(), known, near)


def operations(spans: bool) -> dict[str, Item]:
    """What exchanges tensors; there is no one-shot all-reduce between nodes, if `spans`."""
    one_shot = () if spans else ("one_shot",)
    found: dict[str, Item] = {
        f"all_reduce {name}": partial(all_reduce, algorithm=name)
        for name in ("auto", *one_shot, "two_shot", "ring", "tree")
    }
    found |= {"reduce": rooted_reduce, "reduce_scatter": reduce_scatter, "barrier": barrier}
    found |= {name: partial(move, name=name) for name in MOVES}
    found |= {f"compressed {name}": partial(compressed, name=name) for name in COMPRESSIONS}
    for name in ("ring", "tree"):
        found[f"compressed int8 {name}"] = partial(compressed, name="int8", algorithm=name)
    return found | {"compressed_reduce_scatter": compressed_scatter}


def local() -> dict[str, Item]:
    """What each rank does for itself."""
    codecs: dict[str, Item] = {f"codec {name}": partial(codec, name=name) for name in COMPRESSIONS}
    return codecs | {f"Fused{name}": partial(optimizer, name=name) for name in RULES}


def training(front: str) -> dict[str, Item]:
    """Trainings with the wrapper or the hook."""
    found: dict[str, Item] = {
        f"{front} {name}": partial(train, front=front, compression=name)
        for name in ("none", "int8", "topk:0.05")
    }
    if front == "wrapper":
        for shard in ("optimizer", "gradients"):
            found[f"wrapper, {shard} divided"] = partial(train, front=front, shard=shard)
    return found


# What differs.


class Outcome(NamedTuple):
    """How an item went on a rank.

    Attributes:
        problem: what differs; an empty string if nothing does.
        missing: why it cannot run here; an empty string if it has run.
        bits: by result, a digest of what must be the same on all ranks.
    """

    problem: str = ""
    missing: str = ""
    bits: dict[str, str] = {}  # noqa: RUF012 - never changed


def _differs(result: Result, wanted: torch.Tensor, limit: torch.Tensor | float | None) -> str:
    """Names the first element that is not as wanted."""
    found = result.found.cpu()
    if found.shape != wanted.shape:
        return f"{result.name}: shape {tuple(found.shape)}, must be {tuple(wanted.shape)}"
    if limit is None:
        kind = BITS[found.element_size()]
        wrong = found.contiguous().view(kind) != wanted.to(found.dtype).contiguous().view(kind)
    else:
        wrong = ~((found.double() - wanted.double()).abs() <= limit)
    if not wrong.any():
        return ""
    index = int(wrong.flatten().nonzero()[0])
    within = ""
    if limit is not None:
        bound = limit.flatten()[index].item() if isinstance(limit, torch.Tensor) else limit
        within = f" within {bound:.3g}"
    return (
        f"{result.name}: element {index} is {found.flatten()[index].item()!r}, must be "
        f"{wanted.flatten()[index].item()!r}{within} ({int(wrong.sum())} of {wrong.numel()} differ)"
    )


def _digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    dense = tensor.cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(dense.data_ptr(), dense.nbytes)).hexdigest()


def outcome(item: Item, name: str, group: pycomm.Group, device: str) -> Outcome:
    """Runs an item; on a GPU, on the CPU as well, whose bits must be the same."""
    if name.startswith("hook") and device != "cpu" and "nccl" not in dist.get_backend_config():
        return Outcome(missing="DistributedDataParallel needs NCCL, and a GPU per rank")
    try:
        results = list(item(Place(group, device)))
        on_cpu = [None] * len(results) if device == "cpu" else list(item(Place(group)))
        problems, bits = [], {}
        for result, other in zip(results, on_cpu, strict=True):
            if result.wanted is not None:
                problems.append(_differs(result, result.wanted, result.limit))
            if other is not None and result.as_on_cpu:
                told = _differs(result, other.found, None)
                problems.append(told and f"not as on the CPU: {told}")
            if result.alike:
                bits[result.name] = _digest(result.found)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        said = " ".join(str(error).split())  # in one line
        return Outcome(problem=f"{type(error).__name__} at {at}: {said}")
    return Outcome(problem=next(filter(None, problems), ""), bits=bits)
