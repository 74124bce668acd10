"""The argument `group` of operations."""

from __future__ import annotations

import torch.distributed as dist

from pycomm._init import default_group
from pycomm.group import Group


def given_group(group: Group | None) -> Group:
    """Returns the group, or the default group for None."""
    check_group(group)
    return group if group is not None else default_group()


def check_group(group: object) -> None:
    """Raises TypeError unless `group` is a pycomm.Group or None."""
    if group is None or isinstance(group, Group):
        return
    torchs = isinstance(group, dist.ProcessGroup) or hasattr(group, "get_group")
    hint = ": make one of it, once, with pycomm.init(group)" if torchs else ""
    raise TypeError(f"group must be a pycomm.Group or None, got {group!r}{hint}")
