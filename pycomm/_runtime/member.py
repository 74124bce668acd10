"""The interface of a group for the modules that it is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from pycomm import _C
    from pycomm._runtime.listener import Listener
    from pycomm._runtime.plan import Plan


class Member(Protocol):
    """One rank's membership; :class:`pycomm.Group` documents the members."""

    rank: int
    size: int
    timeout: float
    staging_bytes: int
    name: str
    nodes: tuple[tuple[int, ...], ...]
    stripes: int
    ranks: tuple[int, ...]
    _core: _C.Group
    _told: set[str]
    _growth: Any

    def explain(
        self,
        nbytes: int,
        dtype: torch.dtype = ...,
        *,
        algorithm: str = ...,
        in_window: bool = ...,
        device: str = ...,
    ) -> Plan:
        """Explains how an all-reduce would run."""

    @property
    def _listener(self) -> Listener | None:
        """How ranks of other nodes reach this one after a failure, if they do."""

    def should_commit(self, ready: bool = ...) -> bool:
        """Decides whether all ranks are ready."""

    def abort(self) -> None:
        """Ends every rank's operations."""

    def close(self) -> None:
        """Leaves the group."""
