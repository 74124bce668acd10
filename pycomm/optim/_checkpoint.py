"""States of other optimizers, and of this one in other forms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from pycomm.optim import _storage
from pycomm.optim._storage import MASTER, REMAINDER, State
from pycomm.optim.flat import Buffers, zeros_for

# What all states have of these optimizers; momentum and the largest second moments may begin later.
_ALWAYS = ("exp_avg", "exp_avg_sq")


class Sealed:
    """A parameter's saved state, as it is."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state


def for_torch(param: torch.Tensor, state: Mapping[str, Any], names: Collection[str]) -> State:
    """A parameter's state as torch.optim has it."""
    kept = [name for name in names if _storage.place_in(state, name) in state]
    made: State = {name: _storage.to_fp32(state, name) for name in kept}
    if "exp_avg" in names:
        made["step"] = state["step"].clone()
    if MASTER in state or REMAINDER in state:
        made[MASTER] = _storage.joined(param, state)
    return made


def adopt(
    param: torch.Tensor,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    names: tuple[str, ...],
    buffers: Buffers,
) -> State:
    """A parameter's saved state, checked, in the form that the group's options ask for."""
    if not saved:
        return {}
    # torch.optim.SGD and Lion have no counter; apex and TransformerEngine keep it in the group.
    started = any(saved.get(_storage.place_in(saved, name)) is not None for name in names)
    step = saved.get("step", group.get("step", float(started)))
    state: State = {"step": torch.tensor(float(step), device=param.device)}
    for name in names:
        state.update(_adopt_state(param, group, saved, name))
    if _storage.wants_master(param, group["master_weights"]):
        _adopt_master(param, group["master_weights"], saved, state)
    flat = _storage.buffers_for(param, group["states"], buffers)
    for name, tensor in state.items():
        if tensor.shape == param.shape and name != "step":
            own = buffers if name in (MASTER, REMAINDER) else flat
            state[name] = zeros_for(own, param, name, tensor.dtype).copy_(tensor)
    return state


def checked(
    param: torch.Tensor, saved: Mapping[str, Any], names: tuple[str, ...]
) -> Mapping[str, Any]:
    """A saved state, named as here.

    Raises:
        ValueError: it is of another kind of optimizer or parameter.
    """
    for name in names if saved else ():
        place = _storage.place_in(saved, name)
        if name in _ALWAYS and place not in saved:
            raise ValueError(f"a state of the checkpoint has no {name}, but {', '.join(saved)}")
        stored = saved.get(place)
        if stored is not None and stored.shape != param.shape:
            raise ValueError(
                f"{place} has shape {tuple(stored.shape)}, its parameter {tuple(param.shape)}"
            )
    master = saved.get(MASTER)
    if master is not None and master.dtype == torch.int16:  # TransformerEngine's remainders
        others = {name: value for name, value in saved.items() if name != MASTER}
        saved = {**others, REMAINDER: master}
    if REMAINDER in saved and param.dtype != torch.bfloat16:
        raise ValueError(
            f"the checkpoint has remainders of bfloat16 parameters, got one of {param.dtype}"
        )
    return saved


def _adopt_state(
    param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], name: str
) -> State:
    dtype = _storage.wanted_dtype(param, group["states"])
    place = _storage.place_in(saved, name)
    stored = saved.get(place)
    if stored is None:
        return _storage.make_state(param, name, dtype)
    scale = _storage.scale_name(name)
    if scale in saved and stored.stride() != param.stride():  # blocks of another order
        return _storage.from_fp32(_like(param, _storage.to_fp32(saved, name)), name, dtype)
    kept = _like(param, stored)
    same: State = {place: kept}
    if scale in saved:
        same[scale] = saved[scale].detach().to(param.device, copy=True)
    if kept.dtype == dtype and place == _storage.place_of(name, dtype):
        return same
    return _storage.from_fp32(_storage.to_fp32(same, name), name, dtype)


def _adopt_master(param: torch.Tensor, master: str, saved: Mapping[str, Any], state: State) -> None:
    if master == "remainder" and REMAINDER in saved:
        state[REMAINDER] = _like(param, saved[REMAINDER])
    elif MASTER in saved or REMAINDER in saved:
        _storage.set_weights(param, state, master, _storage.joined(param, saved).to(param.device))
    else:
        state.update(_storage.make_master(param, master))


def _like(param: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A copy in the parameter's place and order of elements."""
    return torch.empty_like(param, dtype=stored.dtype).copy_(stored)
