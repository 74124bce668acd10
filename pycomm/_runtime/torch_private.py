"""All private parts of torch that pycomm uses.

They exist in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, profiler
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, which torch reads when it makes something, for a scope."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


T = TypeVar("T", bound=torch.Tensor)
F = TypeVar("F", bound="Callable[..., Any]")
_ALWAYS = timedelta(days=365)
# NCCL's watchdog would end the process after an abort or an error.
_HARMLESS_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

pytree = _pytree
TorchDispatchMode = _python_dispatch.TorchDispatchMode
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
# The number of the backward on this thread; -1 outside of one.
backward_id: Callable[[], int] = torch._C._current_graph_task_id
# The node that autograd executes on this thread, or None.
backward_node: Callable[[], Any] = torch._C._current_autograd_node
# Runs a function at the end of the backward on this thread.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
# torch.autograd.backward() without its checks, and without the Python objects that it adds.
run_backward: Callable[..., tuple[torch.Tensor, ...]] = Variable._execution_engine.run_backward
# 1 if two elements of a tensor share memory, 0 if none do, 2 if it is not known.
internal_overlap: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap
# True if torch's profiler runs in this process.
profiler_runs: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled")
# Makes the current CUDA stream wait for a number of cycles.
keep_device_busy: Callable[[int], None] = torch.cuda._sleep
# The Store through which a process group was made.
store_of: Callable[[ProcessGroup], Store] = distributed_c10d._get_process_group_store
# The process group with a name; raises RuntimeError if there is none.
named_process_group: Callable[[Any], ProcessGroup] = _distributed_c10d._resolve_process_group
# Sets the timeout of operations of a process group, by default of the default group.
set_timeout: Callable[[timedelta], None] = distributed_c10d._set_pg_timeout
# A storage over memory that it does not own: its address, device and bytes.
storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
after_autograd_keys = torch._C._after_autograd_keyset
# A context in which operations skip __torch_dispatch__.
no_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
# The __torch_function__ for a subclass that does not override functions.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# To be called with a tensor from a weak reference: only C++ may have held it.
fix_weak_reference: Callable[[torch.Tensor], None] = torch.Tensor._fix_weakref  # type: ignore[attr-defined]
# The methods of a future, without the calls in Python around them.
init_future: Callable[[Any, list[torch.device]], None] = torch._C.Future.__init__
future_is_set: Callable[[Any], bool] = torch._C.Future.done
set_future: Callable[[Any, Any], None] = torch._C.Future.set_result


def not_compiled(function: F) -> F:
    """Decorates a function that torch.compile leaves alone, with all that it calls.

    torch.compiler.disable() would add four calls in Python to each call. Functions that share this
    one's code, such as others with the same decorator, are left alone, too.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_recursive": True}
    vars(function).update(marks, _torchdynamo_disable_msg=None)  # where a caller is compiled
    return function


def backend_that_does_nothing() -> str:
    """The name of a torch.distributed backend whose operations return at once."""
    return "fake"


def schema_of(operation: Any) -> Any:
    """The schema of an operation in __torch_dispatch__: its name, and the arguments it writes."""
    return operation._schema


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend that runs a process group's operations on a device."""
    return group._get_backend(device)


def new_nccl(store: Store, rank: int, size: int) -> Any:
    """An NCCL backend among the users of a Store; the caller handles timeouts.

    Args:
        store: a Store that only these ranks use.
        rank: this rank's index among them.
        size: the number of ranks.
    """
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = _ALWAYS
    with environment(_HARMLESS_NCCL):
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def correct_shrunk_groups(name: str) -> None:
    """Corrects the type of process groups that torch's shrink_group() has made.

    shrink_group() labels every CPU backend as Gloo. DistributedDataParallel then treats the backend
    as a ProcessGroupGloo, and crashes.

    Args:
        name: the backend's name.
    """
    cpu, custom = torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.CUSTOM
    for group in list(distributed_c10d._world.pg_map):
        if group.name() != "gloo" or cpu not in group._device_types:
            continue
        if (backend := group._get_backend(cpu)).name() == name:
            for device in (cpu, torch.device("cuda")):
                group._register_backend(device, custom, backend)
            group._set_default_backend(custom)


def is_alive(group: ProcessGroup) -> bool:
    """False once torch.distributed.destroy_process_group() has destroyed a process group."""
    return group in distributed_c10d._world.pg_map


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The name of a process group's backend for each type of device."""
    pairs = torch.distributed.get_backend_config(group).split(",")
    return dict(pair.split(":") for pair in pairs)


def before_checkpoints(check: Callable[[], None]) -> None:
    """Calls `check` before each torch.utils.checkpoint that preserves random states.

    Callers look both functions up in their module, except for torch's composable checkpoint().
    """
    module: Any = checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(module, f"{name}_impl") else ""  # from torch 2.15 on

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        bind = inspect.signature(function).bind

        @functools.wraps(function)
        def wrapper(*args: Any, **named: Any) -> Any:
            if bind(*args, **named).arguments.get("preserve_rng_state", True):
                check()
            return function(*args, **named)

        return wrapper

    generator = checked(getattr(module, name))
    module.CheckpointFunction.forward = staticmethod(checked(module.CheckpointFunction.forward))
    for user in (module, sys.modules.get("torch.distributed._composable.checkpoint_activation")):
        if user is not None:
            setattr(user, name, generator)


def fsdp_interfaces() -> tuple[Any, Any]:
    """FSDP2's base classes of an all-gather and a reduce-scatter; takes seconds to import."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return AllGather, ReduceScatter


def storage_users(tensor: torch.Tensor) -> int:
    """A count that grows with the number of tensors that share this tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The tensor by which losses are multiplied; None before the first loss."""
    return scaler._scale


def when_out_of_memory(function: Callable[..., None]) -> None:
    """Calls a function before torch raises that CUDA memory is exhausted; it may raise instead."""
    torch._C._cuda_attach_out_of_memory_observer(function)  # type: ignore[attr-defined]


def symmetric_tensor(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that processes can share, directly from the allocator (an alpha API).

    A memory pool could recycle a block on some ranks only.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def symmetric_handle(memory: torch.Tensor, process_group: Any) -> Any:
    """A handle to every rank's memory (an alpha API); a collective call."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.rendezvous(memory, process_group)


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's elements of a DTensor.

    ``to_local()`` would make a view of a parameter's elements in every call. If a collective still
    fills the elements, the result waits for it.
    """
    local = tensor._local_tensor
    elements: torch.Tensor = local if type(local) is torch.Tensor else _complete(local)
    return elements


def _complete(local: Any) -> Any:
    return local.wait() if hasattr(local, "wait") else local


def wrapper_tensor(kind: type[T], shape: Sequence[int], like: torch.Tensor) -> T:
    """A tensor of a subclass of torch.Tensor that has a shape, but no memory.

    Args:
        kind: the subclass, which defines ``__torch_dispatch__``.
        shape: the tensor's shape.
        like: has the tensor's dtype and device.
    """
    made: T = torch.Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=like.dtype, device=like.device
    )
    return made
