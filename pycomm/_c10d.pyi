"""The torch.distributed backend, built for one version of torch."""

from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Backend as _Backend

class Ranks(Protocol):
    def connect(self) -> Any: ...
    def connect_gloo(self, what: str) -> Any: ...
    def monitored_barrier(self, timeout: float, wait_all_ranks: bool) -> None: ...

class Backend(_Backend):
    def __init__(self, rank: int, size: int, timeout: timedelta, ranks: Ranks) -> None: ...
