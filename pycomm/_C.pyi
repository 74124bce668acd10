"""The extension module: numbers and pointers, no tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from typing_extensions import Buffer

_Function = TypeVar("_Function", bound=Callable[..., Any])

dtypes: dict[str, int]
elements: list[str]
reduce_ops: dict[str, int]
algorithms: dict[str, int]
codecs: dict[str, int]
rules: dict[str, int]
coded_algorithms: list[str]
partial_sum_algorithms: list[str]
zero_copy_algorithms: list[str]
has_cuda: bool
backend_table: object  # a PyCapsule, for pycomm._c10d
window_layout: int
window_magic: int
most_recorded: int
timed_from_bytes: int
pipeline_depth: int
internode_tiles: int
smallest_block: int
most_topk_elements: int
sum_block: int
segment_words: int
shard_words: int
shard_sums: int
owned_elements: int
topk_chunk: int
topk_spread: int
result_stream: int
least_transfer_bytes: int
most_tile_bytes: int
sent_whole_bytes: int

class _Metaclass(type): ...

class _Object(metaclass=_Metaclass):
    """What pybind11 gives every class: a metaclass, and a constructor that raises TypeError."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

class Codec(_Object):
    def __init__(
        self, kind: int, values: int = 0, stochastic: bool = False, block: int = 0, k: int = 0
    ) -> None: ...

class Operation(_Object):
    def __init__(
        self, *, collective: str, algorithm: str, dtype: str, op: str = "sum", root: int = 0
    ) -> None: ...

class Call(_Object):
    def __init__(
        self,
        operation: Operation,
        count: int,
        input: int,
        output: int,
        codec: Codec,
        residual: int,
        velocity: int,
        momentum: float,
        seed: int,
        step: int,
        offset: int,
        hold_unused: bool = False,
        scale: int = 0,
        residual_before: int = 0,
        velocity_before: int = 0,
        tag: int = 0,
        shape: Sequence[int] | None = None,
        label: str = "",
    ) -> None: ...
    def set_step(self, step: int, /) -> None: ...

class Blocks(_Object):
    def __init__(self, addresses: Sequence[int], counts: Sequence[int] = ()) -> None: ...

def call_in_blocks(
    operation: Operation,
    count: int,
    input: int,
    output: int,
    inputs: Blocks | None,
    outputs: Blocks | None,
    shape: Sequence[int] | None = None,
    label: str = "",
) -> Call: ...
def encoded_bytes(codec: Codec, n: int) -> int: ...
def wire_bytes(codec: Codec, n: int, ranks: int) -> int: ...
def cost(
    group: Group, operation: Operation, count: int, zero_copy: bool
) -> tuple[int, int, int]: ...
def cost_by_rank(
    group: Group, operation: Operation, count: int, zero_copy: bool
) -> list[tuple[int, int]]: ...
def link_cost_by_node(group: Group, operation: Operation, count: int) -> list[tuple[int, int]]: ...
def messages_of_whole_stripe(nodes: int) -> tuple[int, int]: ...
def stripes(nodes: Sequence[Sequence[int]]) -> int: ...
def encode(
    codec: Codec,
    dtype: int,
    x: int,
    n: int,
    wire: int,
    seed: int,
    step: int,
    offset: int,
) -> bool: ...
def decode(
    codec: Codec, wire: int, bytes: int, n: int, dtype: int, output: int, add: bool
) -> bool: ...
def largest_safe(codec: Codec, dtype: int, op: int, nodes: int, world: int) -> float: ...
def select(dtype: int, x: int, n: int, k: int, indices: int, values: int) -> int: ...

class Crossing(_Object):
    class Route(_Object):
        one_shot: ClassVar[Crossing.Route]
        two_shot: ClassVar[Crossing.Route]
        reduce_scatter: ClassVar[Crossing.Route]
        all_gather: ClassVar[Crossing.Route]
        broadcast: ClassVar[Crossing.Route]
        two_shot_window: ClassVar[Crossing.Route]
        reduce_scatter_window: ClassVar[Crossing.Route]
        all_gather_push: ClassVar[Crossing.Route]
        all_gather_pull: ClassVar[Crossing.Route]
        broadcast_pull: ClassVar[Crossing.Route]
        broadcast_share: ClassVar[Crossing.Route]
        __members__: ClassVar[dict[str, Crossing.Route]]
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...
        def __index__(self) -> int: ...
        def __int__(self) -> int: ...

    flag_bytes: int
    turns: int

    def __init__(
        self,
        route: Route,
        flags: Sequence[int],
        slots: Sequence[int],
        rank: int,
        bytes: int,
        tile: int,
    ) -> None: ...
    def run(self, input: int, output: int, timeout: float) -> None: ...

class WindowReader(_Object):
    def __init__(self, fd: int, position: int) -> None: ...
    def state(self, most: int) -> dict[str, Any]: ...

class OptimizerSettings(_Object):
    amsgrad: bool
    decoupled: bool
    nesterov: bool
    maximize: bool
    adapt: bool
    stochastic: bool
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    seed: int
    def __init__(self, rule: int, **settings: float) -> None: ...

def optimizer_grad_norm(
    table: Buffer, grad_scale: int, found_inf: int, clip: int, max_norm: float
) -> float: ...
def lamb_ratio(weights: float, directions: float) -> float: ...
def optimizer_lamb_sums(
    settings: OptimizerSettings, table: Buffer, grad_scale: int, found_inf: int, clip: int
) -> list[tuple[float, float]]: ...
def optimizer_step(
    settings: OptimizerSettings, table: Buffer, grad_scale: int, found_inf: int, clip: int
) -> None: ...

class ShardedStep(_Object):
    def __init__(self, arena: int, arena_bytes: int, sums: int) -> None: ...
    def add(self, settings: OptimizerSettings, table: Buffer) -> None: ...
    def run(
        self,
        group: Group,
        grad_scale: int,
        found_inf: int,
        clip: int,
        max_norm: float,
        measures: bool,
        label: str,
    ) -> float: ...
    @property
    def half_done(self) -> bool: ...
    def begin(self, grad_scale: int, found_inf: int, clip: int, max_norm: float) -> None: ...
    def compared(self, label: str) -> str: ...
    @property
    def sums(self) -> int: ...
    def note_found(self, found: bool) -> None: ...
    def measure(self) -> None: ...
    def conclude_norm(self) -> float: ...
    def adapts(self) -> bool: ...
    def measure_ratios(self) -> None: ...
    def conclude_ratios(self) -> None: ...
    def skips(self) -> bool: ...
    def finish(self) -> None: ...

class CudaShardedStep(_Object):
    def __init__(self, arena: int, arena_bytes: int, sums: int) -> None: ...
    def clear(self) -> None: ...
    def add(
        self, settings: OptimizerSettings, table: Buffer, lr: int, lr_is_double: bool
    ) -> None: ...
    def set(
        self,
        grad_scale: int,
        found_inf: int,
        clip: int,
        max_norm: float,
        measures: bool,
        norm: int,
    ) -> int: ...
    def run(self, group: CudaGroup, memory: int, device: int, stream: int, label: str) -> None: ...

def advise_huge_pages(data: int, bytes: int) -> None: ...

class DeviceTable(_Object):
    def set(self, table: Buffer) -> int: ...
    def upload(self, memory: int, device: int, stream: int) -> None: ...
    def grad_norm(
        self,
        grad_scale: int,
        found_inf: int,
        clip: int,
        max_norm: float,
        sets_found: bool,
        norm: int,
    ) -> None: ...
    def step(
        self,
        settings: OptimizerSettings,
        first: int,
        count: int,
        grad_scale: int,
        found_inf: int,
        clip: int,
        lr: int,
        lr_is_double: bool,
    ) -> None: ...

def decode_state(codes: int, largest: int, n: int, squares: bool, values: int) -> None: ...
def encode_state(values: int, n: int, squares: bool, codes: int, largest: int) -> None: ...

class Work(_Object):
    def wait(self) -> None: ...
    def completed(self) -> bool: ...
    def nonfinite(self) -> bool: ...
    def interval(self) -> tuple[float, float]: ...
    def moved(self) -> int: ...

class Exchange(_Object):
    def __init__(self, calls: list[Call]) -> None: ...
    def submit(self, group: Group, step: int, /) -> Work: ...

class Allocation(_Object, Buffer):
    @staticmethod
    def lend(address: int) -> None: ...

class Window(_Object):
    def __init__(self, fd: int, ranks: int, slice_bytes: int, staging_bytes: int) -> None: ...
    def reserve(self, owner: int, ranks: int, departed: Sequence[int]) -> tuple[int, int, int]: ...
    def cancel(self, owner: int, offset: int, id: int) -> None: ...
    def part(
        self, members: Sequence[int], rank: int, owner: int, offset: int, id: int
    ) -> Window: ...
    def leave(self, rank: int) -> None: ...
    def depart(self) -> None: ...

farewell_bytes: int
message_version: int
element_numbers: dict[str, int]
any_source: int
most_seconds: int

class Transport(_Object):
    def __init__(self, secret: bytes) -> None: ...
    def complete(self) -> None: ...
    def lose(self, node: int) -> None: ...
    def fail(self, node: int) -> None: ...
    def finished(self, node: int) -> None: ...
    def heard(self, node: int, farewell: bytes) -> None: ...
    def told(self, node: int, word: int) -> None: ...
    def await_node(self, node: int) -> None: ...

class Port(_Object):
    def __init__(self, host: str) -> None: ...
    @property
    def address(self) -> tuple[str, int, bytes, str]: ...
    def meet(self, addresses: Sequence[tuple[str, int, bytes, str]]) -> None: ...
    def host_of(self, rank: int) -> str: ...

class LocalTransport(Transport):
    @staticmethod
    def make(nodes: int) -> list[LocalTransport]: ...

class Process(_Object):
    @staticmethod
    def find(pid: int) -> Process | None: ...
    @property
    def ended(self) -> bool: ...

class Request(_Object):
    def wait(self) -> None: ...
    def completed(self) -> bool: ...
    @property
    def source(self) -> int: ...
    @property
    def arrived_on_device(self) -> bool: ...

class Group(_Object):
    def __init__(
        self,
        window: Window,
        pids: Sequence[int],
        processes: Sequence[Process | None],
        rank: int,
        size: int,
        cores: int,
        timeout: float,
        first_epoch: int = 0,
        numbers: Sequence[int] = (),
    ) -> None: ...
    def span(
        self,
        nodes: Sequence[Sequence[int]],
        here: int,
        transport: Transport | None,
        port: Port | None,
        timeout: float,
        algorithms: Sequence[dict[str, Any]],
    ) -> None: ...
    def matching_row(self, bytes: int) -> int: ...
    def in_rank_order(self, algorithm: str) -> str: ...
    def run(
        self,
        operation: Operation,
        count: int,
        input: int,
        output: int,
        shape: Sequence[int] | None = None,
        label: str = "",
        /,
    ) -> None: ...
    def submit(
        self,
        operation: Operation,
        count: int,
        input: int,
        output: int,
        shape: Sequence[int] | None = None,
        label: str = "",
        /,
    ) -> Work: ...
    def run_call(self, call: Call, /) -> bool: ...
    def submit_call(self, call: Call, /) -> Work: ...
    def abort(self) -> None: ...
    @property
    def unresponsive(self) -> int: ...
    @property
    def ended_by(self) -> int: ...
    def raise_again(self) -> None: ...
    def trim(self) -> None: ...
    def leave(self) -> None: ...
    def end_waits_of(self, others: list[Group]) -> None: ...
    def should_commit(self, ready: bool) -> bool: ...
    def shrink(self, patience: float, excluded: list[int]) -> tuple[Window, list[int]]: ...
    def close(self) -> None: ...
    def idle(self) -> bool: ...
    def send(
        self,
        data: int,
        bytes: int,
        element: int,
        to: int,
        tag: int,
        timeout: float = 0.0,
        on_device: int = 0,
        stream: int = 0,
    ) -> None: ...
    def recv(
        self, data: int, bytes: int, element: int, source: int, tag: int, timeout: float = 0.0, /
    ) -> int: ...
    def isend(
        self,
        data: int,
        bytes: int,
        element: int,
        to: int,
        tag: int,
        timeout: float = 0.0,
        on_device: int = 0,
        stream: int = 0,
    ) -> Request: ...
    def irecv(
        self,
        data: int,
        bytes: int,
        element: int,
        source: int,
        tag: int,
        timeout: float = 0.0,
        on_device: int = 0,
    ) -> Request: ...
    def reaches(self, device: int, peer: int, bytes: int) -> bool: ...
    def allocate(self, bytes: int, /) -> Allocation: ...
    def allocate_for_good(self, bytes: int) -> int: ...
    def offset_of(self, data: int) -> int: ...
    def address(self, rank: int, offset: int, bytes: int) -> int: ...
    def published(self, rank: int) -> tuple[int, int, int, int, int]: ...
    @property
    def handle(self) -> object: ...
    def check_usable(self) -> None: ...
    subject: str
    def state(self, most: int, only_own: bool = False) -> dict[str, Any]: ...
    def statistics(self) -> dict[str, Any]: ...
    def show_memory(self, figures: Sequence[int]) -> None: ...
    def usable(self) -> bool: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def traffic(self) -> tuple[int, int, int]: ...
    @property
    def link_traffic(self) -> tuple[int, int]: ...

class CudaEndpoint(_Object):
    def __init__(
        self,
        device: int,
        rank: int,
        ranks: int,
        lanes: int,
        staging_bytes: int,
        window_bytes: int,
        timeout: float,
        windows: list[int],
        one_address_space: bool,
        stage_always: bool,
        message_bytes: int,
    ) -> None: ...
    def serve_messages(self, group: Group) -> None: ...

class DeviceHeap(_Object):
    def __init__(
        self, begin: int, bytes: int, endpoint: CudaEndpoint | None, host: Group | None
    ) -> None: ...
    def take(self, bytes: int, may_wait: bool) -> int: ...
    def release(self, address: int, /) -> None: ...
    def close(self) -> None: ...
    def refusal(self, bytes: int) -> str: ...

class CudaHostRegistration(_Object):
    def __init__(self, device: int, group: Group, rank: int, offset: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...

class CudaSharedLaunch(_Object):
    def __init__(self, endpoints: list[CudaEndpoint]) -> None: ...

class CudaGroup(_Object):
    def __init__(
        self, host: Group, endpoint: CudaEndpoint, shared: CudaSharedLaunch | None
    ) -> None: ...
    @property
    def handle(self) -> object: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def run(
        self,
        operation: Operation,
        count: int,
        input: int,
        output: int,
        stream: int,
        shape: Sequence[int] | None,
        label: str,
        /,
    ) -> None: ...
    def run_bucket(
        self, calls: Sequence[Call], nonfinite: int, workspace: int, stream: int, /
    ) -> None: ...

def set_up_short_way(
    group_type: type,
    module: dict[str, Any],
    ops: Mapping[Any, int],
    algorithms: dict[str, int],
    work_type: type,
    reader: object | None,
    /,
) -> None: ...
def set_compressions_of_short_way(compressions: tuple[type, ...], /) -> None: ...
def short_way_first(whole_way: _Function, doc: str, /) -> _Function: ...
def create_window(ranks: int, slice_bytes: int, staging_bytes: int) -> int: ...
def create_file(bytes: int, name: str) -> int: ...
def thread_limits() -> str: ...
def set_turn(turn: object) -> None: ...
def close_in_children(sockets: Sequence[int]) -> None: ...
def make_private_in_children(data: int, bytes: int, fd: int, position: int) -> None: ...
def leave_as_is_in_children(data: int, bytes: int) -> None: ...
def copy_at_fork() -> bool: ...
def register_group(name: str, group: Group) -> None: ...
def select_algorithm(bytes: int, ranks: int, device: str) -> str: ...
def tree_node(tree: int, rank: int, size: int) -> tuple[int, int, int]: ...
def cuda_window_bytes(ranks: int, lanes: int, staging_bytes: int, heap_bytes: int) -> int: ...
def cuda_heap_begin(ranks: int, lanes: int, staging_bytes: int) -> int: ...
def cuda_least_staging_bytes(ranks: int, lanes: int) -> int: ...
def cuda_completed(event: int) -> bool: ...
def open_mem_pool(heap: DeviceHeap, endpoint: CudaEndpoint) -> int: ...
def mem_pool_refusal() -> str: ...
def cuda_workspace_bytes(codec: Codec, n: int) -> int: ...
def cuda_bucket_workspace_bytes(calls: Sequence[Call], ranks: int) -> int: ...
def cuda_encode(
    device: int,
    stream: int,
    workspace: int,
    codec: Codec,
    dtype: int,
    x: int,
    n: int,
    wire: int,
    seed: int,
    step: int,
    offset: int,
    stream_of_bits: int,
    run: int,
    stride: int,
    /,
) -> None: ...
def cuda_decode(
    device: int,
    stream: int,
    workspace: int,
    codec: Codec,
    wire: int,
    bytes: int,
    n: int,
    dtype: int,
    output: int,
    add: bool,
    checks: bool,
    /,
) -> None: ...
def cuda_select(
    device: int,
    stream: int,
    workspace: int,
    codec: Codec,
    dtype: int,
    x: int,
    n: int,
    indices: int,
    values: int,
    /,
) -> int: ...
