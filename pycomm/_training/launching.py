"""The launch of a bucket's exchange, with what traces, records and errors say about it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pycomm._runtime.ranges import named

if TYPE_CHECKING:
    import torch

    from pycomm._training.parameters import Parameters
    from pycomm.group import Group


@contextlib.contextmanager
def launching(
    group: Group,
    number: int,
    bucket: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    model: Parameters,
) -> Iterator[None]:
    """Surrounds the launch of a bucket's exchange on `group`.

    Traces show it as a range, and records and errors of its operations name the parameters.
    """
    core = group._core
    core.subject = model.subject(parameters)
    try:
        with named(
            group, f"bucket {number}", functools.partial(model.describe, bucket, parameters)
        ):
            yield
    finally:
        core.subject = ""
