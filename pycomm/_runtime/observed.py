"""What a rank can learn about its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.dtypes import check_dtype
from pycomm._runtime.plan import Plan, make_cuda_plan, make_plan, make_spanning_plan
from pycomm.report import Report, make_report
from pycomm.stats import Stats, make_stats

if TYPE_CHECKING:
    from pycomm._runtime.cuda import CudaSide


class Observed:
    """The methods of :class:`pycomm.Group` that only look."""

    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...]
    stripes: int
    _core: _C.Group
    _cuda: CudaSide | None

    def explain(
        self,
        nbytes: int,
        dtype: torch.dtype = torch.float32,
        *,
        algorithm: str = "auto",
        in_window: bool = False,
        device: str = "cpu",
    ) -> Plan:
        """Explains how this group would run an all-reduce of `nbytes` bytes.

        The choice is the same on every rank; steps and bytes are this rank's own.

        Args:
            nbytes: the tensor's size in bytes.
            dtype: the tensor's dtype.
            algorithm: as for :func:`pycomm.all_reduce`.
            in_window: True if all ranks' tensors come from :meth:`empty`.
            device: ``"cpu"`` or ``"cuda"``.

        Returns:
            The algorithm, its steps and bytes; ``print`` shows a table.
        """
        check_dtype("dtype", dtype)
        if len(self.nodes) > 1:
            return make_spanning_plan(
                self._core, nbytes, dtype, len(self.nodes), self.stripes, algorithm
            )
        if device == "cuda":
            transport = "not connected yet" if self._cuda is None else self._cuda.transport
            return make_cuda_plan(nbytes, self.size, algorithm, transport)
        return make_plan(self._core, nbytes, dtype, self.size, algorithm, in_window)

    def report(self, operations: int = 8) -> Report:
        """Reports what the ranks of this node do, and their last operations.

        Any thread may call this at any time, also while operations run or after the group has
        failed. Other ranks need not call it, and are not slowed down.

        Args:
            operations: how many of each rank's operations to report, 1 to 128.

        Returns:
            The report; ``print`` shows it as text.

        Raises:
            ValueError: `operations` is out of range.
            pycomm.GroupUnusable: the group is closed.
        """
        if not 1 <= operations <= _C.most_recorded:
            raise ValueError(f"operations must be 1 to {_C.most_recorded}, got {operations}")
        return make_report(self._core.state(operations))

    def stats(self, since: Stats | None = None) -> Stats:
        """Tells what this rank's operations have taken, by kind, device and size.

        Every operation that has succeeded counts. Of those on CPU tensors of less than 64 KiB that
        wait for less than about a microsecond, one in 16 is timed and stands for all.

        Those on CUDA tensors count within about 5 ms of their end, with times of the device's
        clock; so does every replay of a graph. If the device ends more than 4096 of them while this
        process does not run, the oldest are missing. In a group that spans nodes, CUDA tensors that
        go through host memory count as CPU tensors.

        Any thread may call this at any time, also while operations run. Other ranks need not call
        it, and nothing is synchronised. In a group that spans nodes, the wait for a late rank of
        another node belongs to the exchange.

        Args:
            since: an earlier result, to tell only what has come after it.

        Returns:
            The statistics; ``print`` shows a table.

        Raises:
            ValueError: `since` is of another rank or group.
            pycomm.GroupUnusable: the group is closed.
        """
        stats = make_stats(self._core.statistics(), self.rank, self.size)
        return stats if since is None else stats.since(since)

    def skew(self, since: Stats | None = None) -> dict[int, float]:
        """Scores the ranks of this node by their own time, that is, outside of operations.

        In synchronous training all ranks take the same time for a step, because the fast ones wait
        for the slow one. This takes the time in which a rank's program is blocked in operations of
        this group, or waits for works, off the whole. What is left is the rank's own: computing,
        reading data, and also waits that this group does not see, such as those for messages or for
        a CUDA device.

        Args:
            since: an earlier result of :meth:`stats`, to score only what has come after it.

        Returns:
            By rank, the fastest rank's own time divided by this rank's: 1 is the fastest, and 0.83
            needs 20 % longer. Empty before two operations on CPU tensors have been timed.

        Raises:
            ValueError: `since` is of another rank or group.
            pycomm.GroupUnusable: the group is closed.
        """
        return self.stats(since).skew

    def traffic(self) -> tuple[int, int, int]:
        """Signals, bytes read from and bytes written to other ranks in the last operation."""
        return self._core.traffic

    def link_traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other nodes in this rank's last operation."""
        return self._core.link_traffic
