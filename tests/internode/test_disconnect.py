"""Gloo has no abort, so its connections are closed to end operations."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pycomm._runtime.internode import disconnect, interfaces

TIMEOUT = timedelta(seconds=60)


@pytest.mark.parametrize("names", ["lo", "lo,lo"])
def test_disconnecting_ends_operations_on_both_sides(monkeypatch, names):
    """Gloo has a connection for each interface, and takes them in turn."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    count, store = interfaces(), dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        here, other = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT), [0, 1])
    works = [here._allgather_base(torch.empty(2), torch.zeros(1)) for _ in range(3)]
    begin = time.monotonic()
    threading.Timer(0.2, disconnect, (here, [1], count)).start()
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    with pytest.raises(RuntimeError):
        other._allgather_base(torch.empty(2), torch.zeros(1)).wait()
    del here, other, work, works  # Gloo's threads end with their operations
    gc.collect()
    assert time.monotonic() - begin < 30
