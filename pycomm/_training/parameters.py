"""A model's parameters: their names and positions, and a record of each.

Blocks, owners and random bits of a parameter follow only its position in the model, so results do
not depend on how gradients are packed into buckets.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from pycomm._inputs import check_compressible, check_memory

if TYPE_CHECKING:
    from pycomm.compression import Compression

# A multiple of every block.
_ALIGNMENT = 4096
_SMALL = 4096
_LONGEST, _LONGEST_OF_TWO = 120, 46  # characters that fit into log records
_WRAPPERS = ("_orig_mod.", "module.")

Exclude = Callable[[str, torch.Tensor], bool]


@dataclass
class Entry:
    """One parameter.

    Attributes:
        name: the name without prefixes of wrappers; empty if names are unknown.
        shape: the parameter's shape.
        strides: strides of its gradient in a bucket: the parameter's strides when the bucket was
            made, if they are dense.
        first: index of its first element in the whole model.
        dense: True if it is sent uncompressed.
    """

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    first: int
    dense: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """A flat part of a bucket, viewed in the parameter's shape."""
        return part.as_strided(self.shape, self.strides)

    def changed_strides(self, parameter: torch.Tensor) -> tuple[int, ...] | None:
        """The strides of a gradient in the parameter's present format; None if they are the same.

        Other strides are the same if they place elements alike.
        """
        if parameter.stride() == self.strides:
            return None
        strides = dense_strides(as_real(parameter))
        return None if same_places(self.shape, strides, self.strides) else strides


class Parameters:
    """The parameters of a model that require gradients, in the model's order.

    Args:
        params: ``model.named_parameters()``; None if names do not matter.
        exclude: true for parameters to send uncompressed; by default parameters with one dimension
            or fewer than 4,096 elements.

    Attributes:
        entries: the entries by the parameter's id.
        tensors: the parameters, in the order of `entries`, kept alive.
    """

    def __init__(
        self, params: Iterable[tuple[str, torch.Tensor]] | None, exclude: Exclude | None
    ) -> None:
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude must be a function of name and parameter, got {exclude!r}")
        if exclude is not None and params is None:
            raise ValueError("exclude must come with params: it is asked by name")
        self.known = params is not None
        self.tensors: list[torch.Tensor] = []
        self.entries: dict[int, Entry] = {}
        first = 0
        for name, parameter in () if params is None else _checked(params):
            entry = self._add(name, parameter, first, exclude or is_small)
            first += -(-entry.numel // _ALIGNMENT) * _ALIGNMENT

    def __getitem__(self, parameter: torch.Tensor) -> Entry:
        entry = self.entries.get(id(parameter))
        if entry is not None:
            return entry
        if self.known:
            raise ValueError(
                f"params must name every parameter that is exchanged; one of shape "
                f"{tuple(parameter.shape)} is not among them: pass model.named_parameters() of the "
                "model whose gradients these are"
            )
        return self._add("", parameter, 0, is_small)

    def of(self, parameters: Sequence[torch.Tensor]) -> list[Entry]:
        """The entries of these parameters."""
        entries = self.entries
        return [entries.get(id(parameter)) or self[parameter] for parameter in parameters]

    def describe(self, bucket: torch.Tensor, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What a trace shows of a bucket: its size, and the parameters' names if they are known."""
        names = [name for entry in self.of(parameters) if (name := entry.name)]
        return {"bytes": bucket.nbytes} | ({"parameters": names} if names else {})

    def subject(self, parameters: Sequence[torch.Tensor]) -> str:
        """A bucket's parameters in short, for records and errors; empty if names are unknown."""
        first, last = self[parameters[0]].name, self[parameters[-1]].name
        if not first or len(parameters) == 1:
            return _ending(first, _LONGEST)
        both = f"{_ending(first, _LONGEST_OF_TWO)} ... {_ending(last, _LONGEST_OF_TWO)}"
        return f"{both} ({len(parameters)} parameters)"

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without ids, which differ for other objects."""
        return {**vars(self), "entries": list(self.entries.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.entries = dict(zip(map(id, self.tensors), state["entries"], strict=True))

    def _add(self, name: str, parameter: torch.Tensor, first: int, exclude: Exclude) -> Entry:
        dense = bool(exclude(name, parameter))
        real = as_real(parameter)
        entry = Entry(name, real.shape, dense_strides(real), first, dense)
        self.tensors.append(parameter)
        self.entries[id(parameter)] = entry
        return entry


def _ending(name: str, most: int) -> str:
    """A name in ASCII. A long one loses its beginning, since its end tells more."""
    name = name.encode("ascii", "backslashreplace").decode()  # records are in ASCII
    return name if len(name) <= most else f"...{name[3 - most :]}"


def as_real(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as DistributedDataParallel puts it into buckets: complex ones as real pairs."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides of a gradient that fills flat memory in the parameter's memory format."""
    outer_first = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(outer_first).is_contiguous():
        return parameter.stride()
    return torch.empty_like(
        parameter, device="meta", memory_format=torch.contiguous_format
    ).stride()


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """Text that must be the same on all ranks; strides of dimensions of size 1 do not matter."""
    strides = [
        stride if n > 1 else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name}: {dtype}, shape {tuple(tensor.shape)}, strides {tuple(strides)}"


def same_places(shape: Sequence[int], strides: Sequence[int], other_strides: Sequence[int]) -> bool:
    """True if both strides place elements alike; dimensions of size 1 do not matter."""
    triples = zip(shape, strides, other_strides, strict=True)
    return all(size <= 1 or one == other for size, one, other in triples)


def is_small(name: str, parameter: torch.Tensor) -> bool:  # noqa: ARG001 - an Exclude
    """True if compression does not pay: for biases, norms, and other small parameters."""
    return parameter.dim() <= 1 or parameter.numel() < _SMALL


def _checked(params: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Checks the pairs; returns parameters that require gradients, with their bare names."""
    named = []
    for item in params if isinstance(params, Iterable) else (params,):
        if (
            not isinstance(item, tuple)
            or len(item) != 2
            or not isinstance(item[0], str)
            or not isinstance(item[1], torch.Tensor)
        ):
            raise TypeError(
                f"params must be pairs of name and parameter, as model.named_parameters() gives "
                f"them, got {type(item).__name__}"
            )
        if item[1].requires_grad:
            check_memory(f"params: {item[0]}", item[1])
            named.append(item)
    names = bare_names([name for name, _ in named])
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"params must have names of their own, got {twice!r} twice")
    if not named:
        raise ValueError("params must hold a parameter that requires grad, got none")
    for name, (_, parameter) in zip(names, named, strict=True):
        if not parameter.dtype.is_floating_point:
            raise ValueError(f"params must be real floats, got {parameter.dtype} for {name}")
    return [(name, parameter) for name, (_, parameter) in zip(names, named, strict=True)]


def bare_names(names: list[str]) -> list[str]:
    """Removes the prefixes of DistributedDataParallel and torch.compile."""
    for wrapper in _WRAPPERS * 2:
        if all(name.startswith(wrapper) for name in names):
            names = [name.removeprefix(wrapper) for name in names]
    return [_not_compiled(name) for name in names]


def _not_compiled(name: str) -> str:
    """A name without the prefix that ``torch.compile(module)`` inserts."""
    return name.replace("._orig_mod.", ".").removeprefix("_orig_mod.")


def ignored(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that each rank keeps for itself, such as its experts.

    DistributedDataParallel leaves them out, too.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def common_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that all ranks have in common, with their names."""
    names = ignored(module)
    return [(n, each) for n, each in module.named_parameters() if _not_compiled(n) not in names]


def common_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that all ranks have in common, with their names."""
    names = ignored(module)
    return [(n, each) for n, each in module.named_buffers() if _not_compiled(n) not in names]


def check_exchangeable(parameters: Parameters, compression: Compression | None) -> None:
    """Raises early the errors that an exchange would raise after a whole period."""
    from pycomm.compression import Compression

    entries = parameters.entries.values()
    for parameter, entry in zip(parameters.tensors, entries, strict=True):
        if not parameter.is_floating_point():
            raise ValueError(f"params must be real floats, got {parameter.dtype} for {entry.name}")
        if isinstance(compression, Compression) and not entry.dense:
            check_compressible(f"params: {entry.name}", parameter)
            compression.codec(entry.numel, torch.float32)


# What the package knows of a parameter, in one record that lives as long as the parameter.


@dataclass(eq=False)
class ParamRecord:
    """What the package knows of one parameter.

    Nothing here may refer to the parameter, or it would live forever. Types from modules that
    import this module are written as Any.

    Attributes:
        owner: the wrapper that averages its gradients: the last one made.
        hook: calls the owner when a gradient is ready.
        layout: a weak reference to the Layout (flat.py) that has given its gradient a place.
        home: its own Place (flat.py) in flat memory, if it was flattened.
        has_home_hook: True once gradients move into that place.
        states_place: the Place of its states, if it is one rank's part of a parameter.
        part: this rank's Part of it (shards.py), if a wrapper shards it.
        local_gradient: a Snapshot (step_guard.py) of a gradient that no exchange has averaged, and
            the reason.
    """

    owner: weakref.ref[ParamOwnership] | None = None
    hook: RemovableHandle | None = None
    layout: weakref.ref[Any] | None = None
    home: Any = None
    has_home_hook: bool = False
    states_place: Any = None
    part: Any = None
    local_gradient: tuple[Any, str] | None = None


_records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_EMPTY = ParamRecord()  # never written


def record_of(parameter: torch.Tensor) -> ParamRecord:
    """The parameter's record, to be written."""
    made: ParamRecord = _records.setdefault(parameter, ParamRecord())  # type: ignore[no-untyped-call]
    return made


def known_of(parameter: torch.Tensor) -> ParamRecord:
    """The parameter's record, to be read only; an empty one if there is none."""
    found: ParamRecord = _records.get(parameter, _EMPTY)  # type: ignore[no-untyped-call]
    return found


# This rank's part of a parameter, if a wrapper shards it (shards.py).

_divisions = 0


def part_of(parameter: torch.Tensor) -> Any:
    """This rank's Part of a parameter; None if no wrapper shards it.

    Raises:
        ValueError: the parameter has been moved out of the memory in which it is sharded.
    """
    part = known_of(parameter).part
    if part is not None and not part.shards.layout[parameter].holds(parameter):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has left the memory in which the "
            "wrapper shards it, as by model.to() or p.data = ...: use p.copy_(), or wrap anew"
        )
    return part


def complete_parts(parameters: Iterable[torch.Tensor]) -> None:
    """Completes gradients that a wrapper has left to a step, before another wrapper replaces it."""
    for parameter in parameters:
        if (part := known_of(parameter).part) is not None:
            part.shards.guard.check()
            part.shards.complete(parameter)


def divisions() -> int:
    """A number that changes if any parameter's part does."""
    return _divisions


def count_division() -> None:
    """Changes the number of :func:`divisions`."""
    global _divisions
    _divisions += 1


# The parameters that a wrapper averages, and a check that they are still its own.
#
# A wrapper takes the parameters that require gradients when it is made. A parameter that is frozen
# later stays: its gradient counts as zeros, as if the model did not use it.


def is_averaged(parameter: torch.Tensor) -> bool:
    """True if a wrapper averages the parameter's gradient."""
    owner = known_of(parameter).owner
    return owner is not None and owner() is not None


class ParamOwnership:
    """The parameters of a wrapper.

    A parameter belongs to the wrapper that was made last. An older wrapper must not average the
    same gradient, and raises an error.

    Args:
        module: the wrapped module.
        parameters: the parameters.
        arrived: called with a parameter whose gradient is ready, as long as it belongs here.
    """

    _module: nn.Module | None

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        self._names: dict[int, str] = {}
        self._lost: str | None = None
        chosen = set(map(id, parameters))
        for name, parameter in module.named_parameters():
            if id(parameter) in chosen:
                self._names[id(parameter)] = name
                self._claim(parameter, arrived)
        self._look(module)
        self._module = None  # so that the first forward checks

    def check(self, module: nn.Module) -> None:
        """Raises ValueError if other parameters of the module would get gradients."""
        self.check_owned()
        same = module is self._module and list(map(id, self._parts())) == self._ids
        if same and not any(parameter.requires_grad for parameter in self._frozen):
            return
        for name, parameter in common_parameters(module):
            gets_gradients = parameter.requires_grad and parameter.is_leaf
            if gets_gradients and id(parameter) not in self._names:
                raise ValueError(
                    f"module must keep the parameters that it was wrapped with, but {name!r} is "
                    "new, or began to require grad since: wrap it anew"
                )
        self._look(module)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of one of the parameters."""
        return self._names[id(parameter)]

    def check_owned(self) -> None:
        """Raises ValueError if a later wrapper has taken one of the parameters."""
        if self._lost is not None:
            raise ValueError(
                f"module must not share its parameter {self._lost!r} with a pycomm.DataParallel "
                "that was made later and averages it now: use that one, or wrap one module that "
                "holds both"
            )

    def _look(self, module: nn.Module) -> None:
        """Records the modules and parameters, so that a change is detected quickly."""
        self._module = module
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._registries = [d for m in module.modules() for d in (m._parameters, m._modules)]
        self._held = list(self._parts())  # kept alive, so that no other object gets an id
        self._ids = list(map(id, self._held))

    def _parts(self) -> Iterable[object]:
        """All modules and parameters in the module."""
        return itertools.chain.from_iterable(registry.values() for registry in self._registries)

    def _claim(self, parameter: torch.Tensor, arrived: Callable[[torch.Tensor], None]) -> None:
        record = record_of(parameter)
        if record.hook is not None:
            record.hook.remove()
        if record.owner is not None and (owner := record.owner()) is not None:
            owner._lost = owner._lost or owner._names[id(parameter)]
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # else torch refuses the hook
        hook = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(not frozen)
        record.owner, record.hook = weakref.ref(self), hook
