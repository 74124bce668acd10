"""Prepared calls of compressed operations, and the handles of those under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pycomm._runtime.cuda import NonfiniteFlag
from pycomm._spanning.between import Between
from pycomm._work import Work
from pycomm.errors import NonFinite

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm import _C
    from pycomm._spanning.call import Flow
    from pycomm.group import Group

_NONFINITE = "a gradient has an infinity or a NaN, on this rank or another"


@dataclass(frozen=True)
class PreparedCall:
    """Contiguous stand-ins for a call's tensors, and a function that copies results back.

    Attributes:
        source: the stand-in for the gradient.
        result: the stand-in for the result.
        others: other tensors that must stay alive until the operation is complete.
        finish: copies results back.
        strict: raise NonFinite if a value is not finite.
    """

    source: torch.Tensor
    result: torch.Tensor
    others: tuple[torch.Tensor, ...]
    finish: Callable[[], None]
    strict: bool

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that must stay alive until the operation is complete."""
        return (self.source, self.result, *self.others)

    def on_cpu(self, group: Group, call: _C.Call, async_op: bool) -> Work | None:
        """Runs the call, or hands it to the group's worker."""
        if async_op:
            work = group._core.submit_call(call)
            return _CompressedWork(work, self.tensors(), self.finish, self.strict)
        self._conclude(group._core.run_call(call))
        return None

    def on_stream(self, group: Group, call: _C.Call, async_op: bool) -> Work | None:
        """Enqueues the call; waits for it only if strict."""
        side = group._cuda_side(self.source.device)
        flag = NonfiniteFlag(side.device, side.check) if async_op or self.strict else None
        side.run_bucket([call], self.tensors(), flag)
        return self._enqueued(flag, async_op)

    def on_span(self, group: Group, flow: Flow, async_op: bool) -> Work | None:
        """Enqueues the flow of the call over NCCL; waits for it only if strict."""
        span = group._span
        assert span is not None
        device = self.source.device
        flag = NonfiniteFlag(device, group.check) if async_op or self.strict else None

        def run() -> None:
            found = flow(Between(span, device), flag is not None)
            if flag is not None and found is not None:
                flag.set(found)

        span.enqueue(device, run, self.tensors())
        return self._enqueued(flag, async_op)

    def _enqueued(self, flag: NonfiniteFlag | None, async_op: bool) -> Work | None:
        if async_op:
            self.finish()
            return _StreamWork(flag, self.strict)
        self._conclude(flag is not None and flag.read())
        return None

    def _conclude(self, nonfinite: bool) -> None:
        self.finish()
        if self.strict and nonfinite:
            raise NonFinite(_NONFINITE)


class _CompressedWork(Work):
    def __init__(self, *details: Any) -> None:
        *rest, self._strict = details
        super().__init__(*rest)

    def wait(self) -> None:
        """Blocks until the operation is complete, and raises its error if it failed."""
        super().wait()
        if self._strict and self._core is not None and self._core.nonfinite():
            raise NonFinite(_NONFINITE)


class _StreamWork(Work):
    """An operation on a CUDA stream. Later work on the stream need not wait for it."""

    def __init__(self, flag: NonfiniteFlag | None, strict: bool) -> None:
        super().__init__(None)
        self._flag = flag
        self._strict = strict

    def wait(self) -> None:
        """If strict, blocks until the stream has run the operation, and raises its error."""
        if self._strict and self.nonfinite:
            raise NonFinite(_NONFINITE)

    @property
    def nonfinite(self) -> bool:
        """See :attr:`Work.nonfinite`. Waits until the stream has run the operation."""
        return self._flag is not None and self._flag.read()

    def is_completed(self) -> bool:
        """True if :attr:`nonfinite` would return at once."""
        return self._flag is None or self._flag.event.query()  # type: ignore[no-untyped-call]
