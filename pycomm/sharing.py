"""States of training for ranks that have joined it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from pycomm._init import resolve_group
from pycomm._runtime import host
from pycomm.collectives import all_gather, broadcast

if TYPE_CHECKING:
    from pycomm.group import Group

_CHUNK = 16 << 20  # bytes; ranks that do not receive need no more memory


def share_state(*objects: Any, receive: bool = False, group: Group | None = None) -> None:
    """Sends states of training to ranks that have joined it; a collective call.

    .. code-block:: python

        progress = {"step": 0}
        pycomm.share_state(optimizer, scheduler, progress, receive=is_new)

    The first rank that does not receive sends the states of its objects. The others that do not
    receive keep theirs as they are, bit for bit. If no rank receives, nothing is sent. Of a fused
    optimizer whose states are sharded, ranks that receive get the options, and with the next step
    their part of the states; call the wrapper's ``regroup()`` before.

    Args:
        objects: optimizers, schedulers, scalers and other objects with ``state_dict`` and
            ``load_state_dict``; or dicts, which are updated. The same ones in the same order on all
            ranks. Their states may contain tensors, numbers, strings, and lists and dicts of them.
        receive: True on ranks that have joined, until this has succeeded there.
        group: by default the default group.

    Raises:
        TypeError: an object is none of these.
        ValueError: no rank has states to send, or the sending rank's cannot be sent; on all ranks.
        pycomm.CollectiveError: as in :func:`pycomm.broadcast`.
    """
    for index, each in enumerate(objects):
        if not (isinstance(each, dict) or hasattr(each, "load_state_dict")):
            raise TypeError(
                f"objects[{index}] must be a dict, or have state_dict and load_state_dict, "
                f"got {type(each).__name__}"
            )
    group = resolve_group(group)
    receives = host.empty(group.size, dtype=torch.bool)
    all_gather(receives, host.tensor([bool(receive)], dtype=torch.bool), group=group)
    if not receives.any():
        return
    if receives.all():
        raise ValueError("receive must be False on a rank that has the states, got True on all")
    source = receives.tolist().index(False)
    data = _send(objects, source, receive, group)
    found: list[Any] = [None] * len(objects)
    if receive:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for each, state in zip(objects, found, strict=True):
        if hasattr(each, "take_shared"):
            each.take_shared(state, group)
        elif state is not None:
            each.update(state) if isinstance(each, dict) else each.load_state_dict(state)


def _state_of(each: Any, group: Group) -> dict[str, Any]:
    """The state to send. If ranks share an optimizer's states, it tells who has which part."""
    if isinstance(each, dict):
        return each
    state: dict[str, Any] = (
        each.state_to_share(group) if hasattr(each, "state_to_share") else each.state_dict()
    )
    return state


def _send(objects: tuple[Any, ...], source: int, receive: bool, group: Group) -> bytes:
    """The states of rank `source`, written, on ranks that receive."""
    written, why = io.BytesIO(), None
    if group.rank == source:
        try:
            torch.save([_state_of(each, group) for each in objects], written)
            written.seek(0)
            torch.load(written, map_location="cpu", weights_only=True)  # as the receivers will
        except Exception as error:  # the others wait
            why = error
    size = host.tensor([-1 if why else written.getbuffer().nbytes])
    broadcast(size, source, group=group)
    count = int(size)
    if count < 0:
        raise ValueError(
            "objects must have states of tensors, numbers, strings, and lists and dicts of them on "
            f"rank {source}"
        ) from why
    keeps = receive or group.rank == source
    memory = bytearray(count if keeps else min(count, _CHUNK))
    if group.rank == source:
        memory[:] = written.getbuffer()
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for begin in range(0, count, _CHUNK):
        end = min(begin + _CHUNK, count)
        broadcast(whole[begin:end] if keeps else whole[: end - begin], source, group=group)
    return bytes(memory) if receive else b""
