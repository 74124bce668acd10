"""Joining a group that runs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from pycomm._init import _adopt, _make_larger
from pycomm._inputs import seconds
from pycomm._runtime.grow import Address, enter, read_addresses
from pycomm.group import DEFAULT_TIMEOUT, Group


def join(address: str | os.PathLike[str], timeout: float | timedelta | None = None) -> Group:
    """Joins a running group, as soon as its members call :meth:`pycomm.Group.grow`.

    This process needs neither torchrun nor torch.distributed. It becomes one of the last ranks of
    the larger group, and takes over the group's options. The larger group becomes the default group
    if there is none.

    Args:
        address: the group's :attr:`pycomm.Group.address`, a text; or the :class:`pathlib.Path` of a
            file with an address per line. Each try reads the file again, so the members may write
            new addresses.
        timeout: how long to wait until the members let this process in, in seconds or as a
            timedelta.

    Returns:
        This rank's membership in the larger group.

    Raises:
        ValueError: `address` is not an address; or the group refuses this process, because the
            secret is not the group's, this process runs another build of pycomm, or it belongs to
            another user than the ranks of this node.
        pycomm.Timeout: the members have not let this process in before the timeout; the error tells
            whether anybody listens at the address.
        pycomm.CollectiveError: letting this process in has failed until the timeout.
    """
    patience = seconds(timeout, DEFAULT_TIMEOUT)
    if isinstance(address, str):
        addresses = [Address.parse(address)]
        return _adopt(enter(lambda: addresses, patience, _make_larger))
    path = Path(address)
    return _adopt(enter(lambda: read_addresses(path), patience, _make_larger, f" (file {path})"))
