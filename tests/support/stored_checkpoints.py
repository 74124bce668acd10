"""Checkpoints of every kind, stored in tests/checkpoints, and the training that they come from.

    python tests/support/stored_checkpoints.py

writes the files that are missing. Files that exist stay: they show that the present code loads what
earlier code wrote. A file has records. Each holds `saved`, a checkpoint as a program saves it after
a few steps, and `after`, the digest of the same training's checkpoint some steps later.

`after` of states in 8 bits was made again, from the same `saved`, when steps began to round codes
in another way (version 0.2.0).

All values of parameters and gradients are multiples of 1/16. Unless the wrapper has residuals, its
ranks average gradients without rounding, so training has the same bits on any number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import torch
import torch.distributed.checkpoint as dcp
from optimizing import Case
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from wrapping import data_parallel

import pycomm
from pycomm import hooks, optim

FOLDER = Path(__file__).parents[1] / "checkpoints"
PARTS = "parts"  # a folder, of torch.distributed.checkpoint

SAVED, END = 3, 7  # steps

BF16, FP16 = torch.bfloat16, torch.float16
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "adam": ("adam", {"weight_decay": 0.125}),
    "amsgrad": ("adam", {"amsgrad": True}),
    "sgd": ("sgd", {"dampening": 0.25, "weight_decay": 0.125}),
    "lion": ("lion", {}),
    "lamb": ("lamb", {}),
}
# The types of parameters, master weights and states; and whether rounding is stochastic.
FORMS: dict[str, tuple[torch.dtype, str | None, str, bool]] = {
    "fp32": (torch.float32, None, "fp32", False),
    "bf16": (BF16, None, "bf16", True),
    "remainder": (BF16, "remainder", "bf16", False),
    "masters": (FP16, "fp32", "fp16", False),
    "8bit": (BF16, "remainder", "8bit", False),
}


def case(rule: str, form: str) -> Case:
    name, options = RULES[rule]
    dtype, master, states, stochastic = FORMS[form]
    return Case(name, options, dtype, None, master, states, stochastic, seed=5)


class Model(nn.Module):
    """Parameters whose gradients are inputs. The matrix lies column by column.

    Args:
        dtype: the parameters' type.
        large: the matrix is long enough for states in 8 bits, and is divided among ranks.
        seed: of the first values.
    """

    def __init__(self, dtype: torch.dtype, large: bool, seed: int = 0) -> None:
        super().__init__()
        self.matrix = nn.Parameter(sixteenths((71, 61) if large else (7, 13), seed).to(dtype).t())
        self.cube = nn.Parameter(sixteenths((3, 5, 7), seed + 1).to(dtype))
        self.vector = nn.Parameter(sixteenths((11,), seed + 2).to(dtype))
        self.scalar = nn.Parameter(sixteenths((), seed + 3).to(dtype))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g).sum().float() for p, g in pairs]).sum()


def sixteenths(shape: tuple[int, ...], seed: int, most: int = 48) -> torch.Tensor:
    """Numbers that look random, the same everywhere: multiples of 1/16."""
    index = torch.arange(1, torch.Size(shape).numel() + 1)
    mixed = (index * 2654435761 + (seed + 1) * 2246822519) % 2**32 // 2**16
    return ((mixed * 40503 % 65521 % (2 * most + 1) - most) / 16).view(shape)


def gradients(model: nn.Module, step: int, rank: int, size: int) -> list[torch.Tensor]:
    """A rank's gradients, whose mean over all ranks does not depend on their number."""
    made = []
    for number, parameter in enumerate(model.parameters()):
        seed = 100 * step + 10 * number
        common = sixteenths(tuple(parameter.shape), seed)
        apart = sixteenths(tuple(parameter.shape), seed + 1, most=2)
        made.append((common + (2 * rank - size + 1) * apart).to(parameter.dtype))
    return made


class Training:
    """A model on one rank, with its optimizer and all that a checkpoint holds.

    Args:
        of: the optimizer and its options.
        group: the ranks; None for one without a wrapper.
        large: see :class:`Model`.
        seed: see :class:`Model`.
        flat: flatten parameters.
        scales: use a GradScaler.
        local: options of a LocalSGDState.
        hook: makes the state of a hook, for DistributedDataParallel.
        keeps: save the wrapper's state, which has residuals.
        options: those of the wrapper.
    """

    def __init__(
        self,
        of: Case,
        group: pycomm.Group | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        flat: bool = False,
        scales: bool = False,
        local: dict[str, Any] | None = None,
        hook: Callable[..., hooks.CommState] | None = None,
        keeps: bool = False,
        **options: Any,
    ) -> None:
        self.net = Model(of.dtype, large, seed)
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)
        self.scaler = optim.GradScaler("cpu", 2.0**4, growth_interval=2) if scales else None
        self.comm: Any = None
        if flat:
            optim.flatten(self.net.parameters())
        if group is not None and hook is None and local is None:
            if self.scaler is not None:
                options["grad_scaler"] = self.scaler
            self.model = data_parallel(self.net, group=group, **options)
            self.comm = self.model.comm_state if keeps else None
        named = dict(self.net.named_parameters())
        first = [named.pop("matrix"), named.pop("scalar")]
        self.optimizer = of.make([{"params": first}, {"params": list(named.values()), "lr": 0.25}])
        if local is not None:
            params = self.net.named_parameters()
            self.comm = hooks.LocalSGDState(params, self.optimizer, group=group, **local)
            self.model = pycomm.DataParallel(self.net, state=self.comm)
        elif hook is not None:
            self.comm = hook(self.net.named_parameters(), group=group, exclude=excluded)
            self.model = DistributedDataParallel(self.net)
            self.comm.register(self.model)
        elif group is None:
            self.model = self.net

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(gradients(self.net, step, self.rank, self.size))
            if self.comm is not None:
                loss = loss / 3  # so that every compression loses something
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if isinstance(self.comm, hooks.LocalSGDState):
                self.comm.step()

    def save(self) -> dict[str, Any]:
        saved = {"model": dict(self.net.state_dict()), "optimizer": self.optimizer.state_dict()}
        if self.comm is not None:
            saved["comm"] = self.comm.state_dict()
        if self.scaler is not None:
            saved["scaler"] = self.scaler.state_dict()
        return copied(saved)

    def load(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.comm is not None:
            self.comm.load_state_dict(saved["comm"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])

    def record(self) -> dict[str, Any]:
        """Trains from the beginning to the end."""
        self.train(range(SAVED))
        saved = self.save()
        return {"saved": saved, "after": self.finish()}

    def finish(self) -> dict[str, Any]:
        """Trains from the checkpoint to the end; returns a digest of all states."""
        self.train(range(SAVED, END))
        saved = self.save()
        del saved["optimizer"]["param_groups"]
        return digest(saved)


def excluded(name: str, _parameter: torch.Tensor) -> bool:
    """True for the parameters that are sent uncompressed."""
    return name in ("vector", "scalar")


def copied(saved: Any) -> Any:
    """Copies that share no memory with others, which a file would contain, too."""
    if isinstance(saved, torch.Tensor):
        return saved.detach().clone()
    if isinstance(saved, dict):
        return {key: copied(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(copied, saved))
    return saved


def digest(saved: Any, path: str = "") -> dict[str, Any]:
    """All values by their path; of tensors type, shape and a hash of all bits."""
    if isinstance(saved, torch.Tensor):
        data = saved.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        kind = f"{saved.dtype} {tuple(saved.shape)}"
        return {path: f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"}
    if not isinstance(saved, (dict, list, tuple)):
        return {path: saved}
    items = saved.items() if isinstance(saved, dict) else enumerate(saved)
    return {k: v for key, value in items for k, v in digest(value, f"{path}/{key}").items()}


# Places to train in: they do not change bits, so every checkpoint loads in each.

Place = Callable[..., list[Any]]


def alone(**options: Any) -> Place:
    """One process without a wrapper."""
    return lambda of, body, **more: [body(Training(of, **options, **more))]


def on_ranks(size: int, nodes: tuple[int, ...] | None = None, **options: Any) -> Place:
    """A wrapper on threads."""

    def run(of: Case, body: Callable[[Training], Any], **more: Any) -> list[Any]:
        with pycomm.LocalWorld(size, 60, nodes=nodes) as ranks:
            return ranks.run(lambda group: body(Training(of, group, **options, **more)))

    return run


PLACES = {
    "alone": alone(),
    "flat": alone(flat=True),
    "not sharded": on_ranks(2),
    "sharded_states": on_ranks(3, shard="optimizer"),
    "sharded_gradients": on_ranks(2, shard="gradients"),
    "sharded_on_nodes": on_ranks(3, nodes=(1, 2), shard="optimizer"),
    "sharded_gradients_on_nodes": on_ranks(2, nodes=(1, 1), shard="gradients"),
    "replicas": on_ranks(3, shard="optimizer", replicas=2),
    "replicas_of_gradients": on_ranks(2, shard="gradients", replicas=2),
}
# Besides the checkpoints of optimizers that are not sharded, which are one for each rule:
IN_PLACES = {
    "flat": case("adamw", "remainder"),
    "sharded_states": case("adamw", "8bit"),
    "sharded_gradients": case("lion", "8bit"),
    "sharded_on_nodes": case("sgd", "remainder"),
    "sharded_gradients_on_nodes": case("lion", "bf16"),
    "replicas": case("lamb", "8bit"),
    "replicas_of_gradients": case("sgd", "8bit"),
}


def is_large(name: str) -> bool:
    return name == "8bit" or (name in IN_PLACES and name != "flat")


def of_rule(rule: str) -> dict[str, Any]:
    """A file's records: one for every form."""
    return {
        form: PLACES["alone"](case(rule, form), Training.record, large=is_large(form))[0]
        for form in FORMS
    }


def in_place(name: str) -> dict[str, Any]:
    """A file's record. All ranks have the same one."""
    return PLACES[name](IN_PLACES[name], Training.record, large=is_large(name))[0]


def in_form_of_torch() -> dict[str, Any]:
    """A checkpoint for torch.optim, of the record "remainder" of adamw."""

    def body(training: Training) -> dict[str, Any]:
        training.train(range(SAVED))
        saved = training.optimizer.state_dict(format="torch")
        return copied({"model": dict(training.net.state_dict()), "optimizer": saved})

    return {"saved": alone()(case("adamw", "remainder"), body)[0]}


# Parts of sharded states, each written by its rank.


def write_parts(group: pycomm.Group, folder: Path) -> dict[str, Any]:
    training = Training(IN_PLACES["sharded_states"], group, large=True, shard="optimizer")
    training.train(range(SAVED))
    dcp.save(parts_of(training), checkpoint_id=folder)
    if group.rank == 0:  # the file has the folder's name and a random number
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.storage_meta = None
        path.write_bytes(pickle.dumps(metadata))
    saved = digest(training.save())
    return {"loaded": saved, "after": training.finish()}


def parts_of(training: Training) -> dict[str, Any]:
    optimizer = training.optimizer.sharded_state_dict(training.model)
    return {"model": training.model.state_dict(), "optimizer": optimizer}


def load_parts(training: Training, folder: Path) -> None:
    state = parts_of(training)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
    training.model.load_state_dict(state["model"])


# States of hooks and of the wrapper. Ranks have different ones, so each saves its own.

SGD = Case("sgd", {"momentum": 0.0, "lr": 0.125})
INT8 = pycomm.Int8(block=128, rounding="stochastic", seed=3)
TOPK = pycomm.TopK(0.04, values=torch.int8, density_steps=6, momentum=0.75)
SPARSE = pycomm.TopK(0.1)
DILOCO = {"outer_lr": 0.75, "outer_momentum": 0.875, "exclude": excluded}

STATES: dict[str, tuple[Case, dict[str, Any]]] = {
    "dense": (SGD, {}),
    "int8": (SGD, {"compression": INT8, "exclude": excluded}),
    "topk": (SGD, {"compression": TOPK, "exclude": excluded, "warmup_steps": 1}),
    "cast": (SGD, {"compression": pycomm.Cast(torch.bfloat16), "exclude": excluded}),
    "warm_up": (SGD, {"compression": TOPK, "exclude": excluded, "warmup_steps": 5}),
    "scaled": (SGD, {"compression": INT8, "exclude": excluded, "scales": True}),
    "published": (
        SGD,
        {"compression": INT8, "publish": pycomm.Int8(), "shard": "optimizer", "exclude": excluded},
    ),
    "local_average": (case("adamw", "fp32"), {"local": {"period": 2}}),
    "local_changes": (
        case("adamw", "remainder"),
        {"local": {**DILOCO, "period": 2, "compression": INT8}},
    ),
    "local_residuals": (
        case("sgd", "fp32"),
        {
            "local": {
                "period": 2,
                "compression": SPARSE,
                "local_residuals": True,
                "exclude": excluded,
            }
        },
    ),
    "local_warm_up": (
        case("lion", "fp32"),
        {"local": {**DILOCO, "period": 2, "gradient_steps": 4}},
    ),
    "local_gathered": (SGD, {"local": {**DILOCO, "period": SAVED, "compression": SPARSE}}),
}
HOOKS: dict[str, Callable[..., hooks.CommState]] = {
    "hook_int8": functools.partial(hooks.Int8State, block=128),
    "hook_topk": functools.partial(hooks.TopKState, momentum=0.75),
    "hook_warm_up": functools.partial(hooks.CommState, INT8, warmup_steps=5),
}


def gathers(name: str) -> bool:
    """True if one rank can save for all."""
    return not name.startswith("local") or name == "local_gathered"


def with_state(name: str, size: int, body: Callable[[Training], Any], **more: Any) -> list[Any]:
    """Runs a body on threads with a state; one that publishes is for ranks on several nodes."""
    of, options = STATES[name]
    nodes = (1,) * size if "publish" in options else None
    return on_ranks(size, nodes, keeps=True)(of, body, **options, **more)


def with_hook(group: pycomm.Group, name: str, body: Callable[..., Any], *args: Any) -> Any:
    """Runs a body in a process of DistributedDataParallel."""
    return body(Training(SGD, group, hook=HOOKS[name]), *args)


def record_on_rank(training: Training, name: str) -> dict[str, Any]:
    """A rank's record, on rank 0 with the residuals of all."""
    training.train(range(SAVED))
    saved = training.save()
    gathered = copied(training.comm.state_dict(gathered=True)) if gathers(name) else {}
    if name == "published":  # loading drops what is kept of the exact parameters
        training.net.load_state_dict(saved["model"])
    return {"saved": saved, "gathered": gathered, "after": training.finish()}


def write_all(folder: Path) -> None:
    """Writes the files that are missing."""

    folder.mkdir(exist_ok=True)

    def write(name: str, make: Callable[..., Any], *args: Any) -> None:
        path = folder / f"{name}.pt"
        if not path.exists():
            torch.save(make(*args), path)

    for name in RULES:
        write(name, of_rule, name)
    for name in IN_PLACES:
        write(name, in_place, name)
    write("torch", in_form_of_torch)
    write(PARTS, lambda: helpers.run_group(3, write_parts, folder / PARTS)[0])
    for name in STATES:
        write(name, with_state, name, 2, functools.partial(record_on_rank, name=name))
    for name in HOOKS:
        write(name, helpers.run_group, 2, with_hook, name, record_on_rank, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
