"""The state of a communication hook or of the wrapper."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.futures import Future

from pycomm._init import check_group, default_group
from pycomm._inputs import check_coded_algorithm, check_memory, check_whole
from pycomm._runtime import host
from pycomm._runtime.ranges import record_range
from pycomm._runtime.torch_private import backward_id, backward_node, not_compiled, scale_of
from pycomm._training.exchange import (
    BucketExchange,
    PendingExchange,
    PendingExchanges,
    Planner,
    StepStatistics,
    dense_wire_bytes,
)
from pycomm._training.hook_state import HookState, move_into_window
from pycomm._training.parameters import Exclude, Parameters, common_parameters
from pycomm._training.residuals import FORMAT, residuals_for
from pycomm.collectives import all_gather
from pycomm.compression import Cast, Compression, Identity, Int8, TopK
from pycomm.errors import PycommError
from pycomm.group import Group

if TYPE_CHECKING:
    from typing import Self

    from pycomm._runtime.cuda import ExchangeStream, HostMirror
    from pycomm._training.explain import ExchangePlan


class LossScale:
    """Reads the scale of a GradScaler, if there is one."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._staged: HostMirror | None = None

    @property
    def known(self) -> bool:
        """True if there is a GradScaler."""
        return self._scaler is not None

    def read(self, group: Group) -> torch.Tensor | None:
        """The scale, as a tensor on the device where gradients are exchanged; None without one."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale = scale_of(self._scaler)  # none before the first loss was scaled
        if scale is None or not group._exchanges_on_host(scale.device):
            return scale
        from pycomm._runtime.cuda import HostMirror, fetch

        if self._staged is None:
            self._staged = HostMirror(scale)
        self._staged.tensor = scale
        fetch(self._staged)
        return self._staged.host

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying."""
        return {"_scaler": self._scaler, "_staged": None}


# Attributes of this process or of a running exchange; copies and pickles leave them out.
_NOT_COPIED = ("_group", "_planner", "_flying", "_now", "_stream", "_placed", "_wishes")

LOCAL_SGD, UNKNOWN = "local SGD", "unknown"  # kinds of saved states; earlier versions saved no kind

NamedParameters = Iterable[tuple[str, torch.Tensor]]


class CommState(HookState):
    """The state that a hook, or the wrapper, keeps from step to step.

    Args:
        compression: compression of the gradients; None sends them uncompressed.
        params: ``model.named_parameters()``. With them, residuals keep what compression loses of
            each parameter and send it later (error feedback), and stochastic rounding does not
            depend on buckets.
        group: by default the default group. All ranks must make their states in the same order.
        exclude: ``exclude(name, parameter)`` is true for parameters to send uncompressed, in the
            same exchange; by default parameters with one dimension or fewer than 4,096 elements.
        grad_scaler: the ``torch.amp.GradScaler`` in use. Residuals are then kept unscaled, and
            restored after a step that overflowed. This doubles their memory.
        warmup_steps: the number of first steps that are sent uncompressed. A warm-up of the
            compression begins after them.
        feedback: False keeps no residuals even with `params`.
        algorithm: as for :func:`pycomm.compressed_all_reduce`. With ``"ring"`` and ``"tree"``, bits
            of averages depend on the buckets, and compression encodes at every hop.

    Attributes:
        step: the number of steps that have begun; a step exchanges every parameter once.
        group: the group that exchanges.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """

    _timed = 0  # steps whose waits are in _exposed_before or _now; not those before a load
    _residuals_lost = 0  # ranks; the default of states that older versions have pickled
    _holders = 0  # ranks that had residuals before a regroup() that has failed

    def __init__(
        self,
        compression: Compression | None = None,
        params: NamedParameters | None = None,
        *,
        group: Group | None = None,
        exclude: Exclude | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        warmup_steps: int = 0,
        feedback: bool = True,
        algorithm: str = "auto",
    ) -> None:
        _check_options(compression, group, grad_scaler, warmup_steps)
        check_coded_algorithm(algorithm, isinstance(compression, TopK))
        self.compression = compression
        self.algorithm = algorithm
        self.step = 0
        self._owner = (0, 0)  # rank and size of the group when the state was pickled
        self._parameters = Parameters(params, exclude)
        entries = self._parameters.entries.values()
        if compression is not None and entries and all(entry.dense for entry in entries):
            warnings.warn(f"{compression} compresses nothing: exclude= holds for all", stacklevel=2)
        self._scale = LossScale(grad_scaler)
        self._warmup_steps = warmup_steps
        self._residuals = residuals_for(
            compression, self._parameters, feedback=feedback, restorable=grad_scaler is not None
        )
        self._exposed_before = 0.0
        self._group: Group | None = group if group is not None else default_group()
        self._tag = self.group._next_tag()
        self._begin_anew()

    def _plan_anew(self) -> None:
        kept = self._parameters, self._residuals
        self._planner = Planner(self.compression, *kept, self._tag, self.algorithm)

    def _begin_anew(self) -> None:
        """Starts without plans and without running exchanges."""
        self._plan_anew()
        self._flying = PendingExchanges()
        self._now = StepStatistics()
        self._stream: ExchangeStream | None = None
        self._placed: torch.device | None = None  # where residuals are used, from the first step on

    @property
    def group(self) -> Group:
        """The group whose ranks exchange gradients."""
        if self._group is None:
            group = default_group()
            self._residuals.check_owner(self._owner, place_in(group))
            self._group = group
        return self._group

    @property
    def encodes_once(self) -> bool:
        """True if results need not be encoded, and residuals do not depend on a loss scale."""
        return isinstance(self.compression, Int8 | Cast | Identity) and not self._scale.known

    @property
    def gradient_group(self) -> Group | None:
        """The group that exchanges gradients in this step."""
        return self._group or self.group

    def options(self) -> dict[str, object]:
        """The options that must be the same on all ranks."""
        return {
            "compression": self.compression,
            "feedback": bool(self._residuals),
            "grad_scaler": self._scale.known,
            "warmup_steps": self._warmup_steps,
            "algorithm": self.algorithm,
        }

    def check_module(self, module: nn.Module) -> None:
        """Raises ValueError if this was made with the parameters of another module."""
        for name, parameter in common_parameters(module) if self._parameters.known else ():
            if parameter.requires_grad and id(parameter) not in self._parameters.entries:
                raise ValueError(
                    "state must be made with named_parameters() of this module, got one without "
                    f"{name}"
                )

    def follow_formats(self, parameters: Sequence[torch.Tensor]) -> None:
        """See :meth:`HookState.follow_formats`."""
        for parameter in parameters if self._residuals else ():
            entry = self._parameters[parameter]
            if (strides := entry.changed_strides(parameter)) is not None:
                self._residuals.reorder(entry, strides)

    def start(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        backward: int = -1,
        *,
        begins: Sequence[int] | None = None,
    ) -> Future[Any]:
        """Begins to average a bucket over all ranks, in place; for hooks.

        Args:
            buffer: a flat tensor on the CPU or a CUDA device, with the gradients of `parameters`
                one after the other.
            parameters: the parameters of these gradients.
            backward: the backward's number, for :meth:`finish`.
            begins: the offset of each gradient in `buffer`, if there are gaps between them.

        Returns:
            A future of `buffer`; on the CPU, :meth:`finish` completes it.
        """
        check_memory("gradients", buffer)
        key = (buffer.data_ptr(), *map(id, parameters))
        group, seen = self._group or self.group, self._now.parameters
        if not seen or not seen.isdisjoint(key[1:]):
            self._begin_step(buffer.device, group)
        now, step = self._now, self.step - 1 - self._warmup_steps
        exchange = self._planner.exchange_of(
            key, buffer, parameters, begins, step, now.scale, group
        )
        now.parameters.update(key[1:])
        launch = functools.partial(self._launch, exchange, buffer, group)
        try:
            flight = exchange.names.launch(group, len(now.flights), launch)
        except PycommError:
            self.finish(backward)  # raises the error that caused this one, if there is one
            raise
        now.flights.append(flight)
        self._flying.add(backward, flight)
        return flight.future

    @not_compiled
    def start_in_backward(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Future[Any]:
        """Calls :meth:`start`, and makes the running backward wait for the exchange at its end.

        If backward has ended already, as in the first iteration of a static graph, this waits.
        """
        backward = backward_id()
        ends = self._flying.ends
        if ends and backward not in ends:
            self._give_back_dropped()
        if buffer.layout == torch.strided:  # start() refuses other layouts
            known = self._planner.made.get((buffer.data_ptr(), *map(id, parameters)))
            strides = list(map(torch.Tensor.stride, parameters))
            if known is None or known.strides != strides:
                self._take_bucket(buffer, parameters, rebuilt=known is None)
        future = self.start(buffer, parameters, backward)
        if backward_node() is None:
            self.finish(backward)
        elif backward not in self._flying.ends:  # a new step has begun, or this is its first bucket
            self._flying.wait_in_end(backward, self.finish)
        return future

    def _take_bucket(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], rebuilt: bool
    ) -> None:
        """Prepares for a bucket that is new, or whose parameters have other memory formats."""
        # A copy in another dtype, which another hook has made, lives for a step only.
        lasts = buffer.dtype == parameters[0].dtype
        if rebuilt and lasts and self.compression is None:
            ids = set(map(id, parameters))
            if buffer.is_cuda and not self._planner.made:  # the first bucket, on all ranks alike
                from pycomm._training.heap import make_room

                wishes, self._wishes = self._wishes, None
                make_room(wishes, self.group, buffer, self._parameters.tensors or parameters)
            self._planner.forget(ids)  # old buckets, whose memory the new ones need
            if not self._now.parameters.isdisjoint(ids):  # start() begins a step
                self._now.flights.clear()
            move_into_window(buffer, self.group)
        self._planner.follow_formats(parameters, rebuilt)

    @not_compiled
    def finish(self, backward: int = -1) -> None:
        """Waits for the exchanges that were started with this number, and raises their errors."""
        flights = self._flying.take(backward)
        if not flights:
            return
        begin = time.perf_counter()
        if self._stream is not None:
            self._stream.note_end()
        with record_range(self._group or self.group, "finish"):
            for flight in flights:
                flight.wait()
        self._now.waited += time.perf_counter() - begin

    def count_step(self, bytes_in: int, bytes_wire: int, waited: float) -> None:
        """Counts a step whose gradients are averaged by shards; see :class:`Step`."""
        self._begin_statistics(StepStatistics(None, set(), [], bytes_in, bytes_wire, waited=waited))
        self.step, self._timed = self.step + 1, self._timed + 1

    def give_back(self) -> None:
        """Adds the step's unused means to the residuals, so that nothing is lost."""
        self._now.give_back()

    def should_commit(self, ready: bool = True) -> bool:
        """Decides whether all ranks take the step; see :meth:`pycomm.Group.should_commit`.

        Call it before anything changes the gradients. If the step is not taken, its means go into
        the residuals, and a later step sends them.
        """
        self._now.undecided = True
        commits = self.group.should_commit(ready)
        self._now.undecided = False
        if not commits:
            self.give_back()
        return commits

    def regroup(self, group: Group) -> None:
        """Continues with another group: a smaller one after a failure, or one that has grown.

        All ranks of the new group call this before anything changes the gradients; newcomers call
        it on the state that they have just made. Residuals stay, and newcomers begin with zeros.
        Continue with the next batch: the failed step's means go into the residuals, and a later
        step sends them. The residuals of lost ranks are lost. Torch's DistributedDataParallel must
        be made anew around the module, over a process group of the same ranks
        (docs/how-to/recovery.md).

        Raises:
            TypeError: `group` is not a group.
            pycomm.GroupUnusable: it is closed or has failed.
        """
        check_successor(group)
        self._give_back_dropped()
        self._now.give_back_if_failed()
        self._begin_statistics(StepStatistics())
        stays = False  # True on a rank with residuals from the previous group
        if group is not self._group:
            if self._group is not None and self._residuals and self.step > 0:
                stays, self._holders = True, self._holders or self._group.size
            self._group, self._tag = group, group._next_tag()
        self._begin_anew()
        told = host.empty(group.size, 2, dtype=torch.int64)
        all_gather(told, host.tensor([self.step, stays]), group=group)
        self.step = int(told[:, 0].max())
        if stays:  # group sizes hide losses if newcomers replace lost ranks
            self._residuals_lost += self._holders - int(told[:, 1].sum())
            self._holders = 0

    def undo_exchange(self) -> None:
        """Undoes what the last exchange has changed in the residuals, if its averages are not used.

        Call it on all ranks after the exchange, and drop the gradients: to skip a batch, or, on the
        discriminator's state, after a generator's backward through the discriminator. Otherwise
        later steps send what compression has not sent of these gradients.

        Residuals return to their values before the exchange. This needs copies, which are kept from
        the first call on. So call it once before the first step: if the first call comes after an
        exchange, residuals become zero. Without residuals it does nothing.
        """
        if not self._residuals:
            return
        self._settle()
        if (self._now.flights or self._now.bytes_in) and self.step > self._warmup_steps:
            self._residuals.undo_exchange()
            self._begin_statistics(StepStatistics())
        if self._residuals.keep_before():
            self._plan_anew()

    def sends_dense(self, parameter: torch.Tensor) -> bool:
        """True if this parameter's gradient is sent uncompressed."""
        return self.compression is None or self._parameters[parameter].dense

    def note_failure(self) -> None:
        """Records that the step has failed although its exchanges may have completed."""
        self._now.undecided = True

    def stats(self) -> dict[str, float]:
        """Numbers for a logger; sizes and times refer to the last step.

        Returns:
            ``steps``: the number of steps;
            ``bytes_in``: bytes of gradients in buckets;
            ``bytes_wire``: bytes that this rank moved from and to other ranks (on CUDA, an upper
            bound; by tree, a rank's mean; with `shard`, also the parameters that a step sends);
            ``ratio``: bytes of an uncompressed exchange divided by ``bytes_wire``;
            ``exposed_ms``: milliseconds that backward waited for exchanges at its end;
            ``exposed_ms_total``, ``exposed_ms_mean``: its sum and mean over this process's steps;
            ``residual_norm``: Euclidean norm of this rank's residuals;
            ``residuals_lost``: the number of ranks that were lost with their residuals.
        """
        self._settle()
        last, earlier = self._stream.waits() if self._stream else (0.0, 0.0)
        exposed, before = self._now.waited + last, self._exposed_before + earlier
        flights, group = self._now.flights, self.group
        sizes = [self._now.bytes_in, *(flight.buffer.nbytes for flight in flights)]
        bytes_dense = sum(dense_wire_bytes(size, group) for size in sizes)
        bytes_wire = self._now.bytes_wire + sum(flight.wire_bytes() for flight in flights)
        return {
            "steps": float(self.step),
            "bytes_in": float(sum(sizes)),
            "bytes_wire": float(bytes_wire),
            "ratio": bytes_dense / bytes_wire if bytes_wire else 1.0,
            "exposed_ms": 1e3 * exposed,
            "exposed_ms_total": 1e3 * (before + exposed),
            "exposed_ms_mean": 1e3 * (before + exposed) / max(self._timed, 1),
            "residual_norm": self._residuals.norm(),
            "residuals_lost": float(self._residuals_lost),
        }

    def explain(self) -> ExchangePlan:
        """Explains where the buckets of gradients lie, and how they are exchanged.

        Returns:
            The buckets exchanged so far: none before the first backward, and none of gradients that
            shards average.
        """
        from pycomm._training.explain import ExchangePlan, explain

        made = self._planner.made.values()
        return ExchangePlan(tuple(explain(self.group, *m.place, m.names.subject) for m in made))

    def intervals(self) -> list[tuple[int, float, float]]:
        """Bytes, start and end (by ``perf_counter``) of the last step's exchanges on the CPU."""
        return [(f.buffer.nbytes, *f.interval()) for f in self._now.flights]

    def residual(self, name: str) -> torch.Tensor:
        """The residual of a parameter: an fp32 view in the parameter's shape, unscaled."""
        self._settle()
        return self._residuals.find(name)

    def residuals(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Residuals of the named parameters, where they exist; see :meth:`residual`."""
        self._settle()
        return self._residuals.views(names)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors kept from step to step: residuals, and the copies for restoring them."""
        return self._residuals.tensors()

    # Checkpoints and copies.

    def state_dict(self, gathered: bool = False) -> dict[str, Any]:
        """Returns what must be saved with the model, at the end of a step.

        Args:
            gathered: collect the residuals of all ranks on rank 0, so that only rank 0 needs to
                save. All ranks must call this; ranks other than 0 get an empty dict.

        Returns:
            Copies of this rank's residuals. Every rank must save its own, in a file of its own or
            with torch.distributed.checkpoint. Residuals are stored under the rank's number, because
            torch.distributed.checkpoint keeps only one tensor of each name.
        """
        self._settle()
        kept = {
            "format": FORMAT,
            "compression": _kind(self.compression),
            "size": self.group.size,
            "step": self.step,
        }
        if not gathered:
            return kept | {"kept": {str(self.group.rank): self._residuals.dump()}}
        dumps = self._residuals.gather(self.group)
        return kept | {"gathered": dumps} if self.group.rank == 0 else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`, bit for bit.

        Every rank picks its own residuals from a gathered dict. If the number of ranks has changed,
        every rank gets the mean of the old residuals, so the mean that is still to be sent stays
        the same.

        Raises:
            ValueError: the dict is from another model, another rank or another kind of state.
        """
        if (kind := saved_kind(state_dict)) is None:
            raise ValueError("state_dict must come from state_dict() of a state of pycomm.hooks")
        if kind not in (own := _kind(self.compression), UNKNOWN):
            raise ValueError(
                f"state_dict must be that of a state of compression {own}, got that of {kind}"
            )
        (rank, size), saved = place_in(self.group), state_dict["size"]
        if "gathered" in state_dict:
            dumps = state_dict["gathered"]
            if len(dumps) != saved:
                raise ValueError(f"state_dict must be of all {saved} ranks, got {len(dumps)}")
            self._residuals.load([dumps[rank]] if saved == size else dumps)
        else:
            ((owner, dump),) = state_dict["kept"].items()
            self._residuals.check_owner((int(owner), saved), (rank, size))
            self._residuals.load([dump])
        self.step = state_dict["step"]
        self._begin_statistics(StepStatistics())
        self._flying.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying, between two backwards."""
        self._settle()
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        return kept if self._group is None else kept | {"_owner": place_in(self._group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An unpickled state belongs to the default group, which it looks up at its first use."""
        vars(self).update(state)
        self._group = None
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy has residuals of its own and belongs to the same group."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied._group = self._group
        return copied

    # Steps.

    def _begin_statistics(self, statistics: StepStatistics) -> None:
        self._exposed_before += self._now.waited + (self._stream.count() if self._stream else 0.0)
        self._now = statistics

    def _settle(self) -> None:
        """Updates residuals for steps whose means were not used."""
        self._give_back_dropped()
        self._residuals.settle(self._scale.read(self.group))

    def _give_back_dropped(self) -> None:
        """Adds the means of a backward that has raised to residuals.

        DistributedDataParallel cannot continue a backward that raised after it sent a bucket. So
        later buckets belong to another backward, and may begin with other parameters.
        """
        for flight in self._flying.take_dropped():
            self._now.parameters.clear()  # so that the next bucket begins a step
            with contextlib.suppress(PycommError):  # an exchange that failed has no mean
                flight.wait()
                flight.give_back()

    def _begin_step(self, device: torch.device, group: Group) -> None:
        place = torch.device("cpu") if group._exchanges_on_host(device) else device
        if place != self._placed:
            if self._placed is not None:  # the model has been moved
                self._plan_anew()
            self._residuals.to(place)
            self._placed, self._stream = place, None
        if (scale := self._scale.read(group)) is not None:
            self._residuals.settle(scale)
        self._begin_statistics(StepStatistics(scale))
        self._flying.clear()  # of backwards that never ended
        self.step, self._timed = self.step + 1, self._timed + 1
        if scale is not None and self.step > self._warmup_steps:
            self._residuals.begin_step(scale)

    def _launch(
        self, exchange: BucketExchange, buffer: torch.Tensor, group: Group
    ) -> PendingExchange:
        step, stand_in, finish = self.step - 1, exchange.stand_in, None
        if stand_in is not None:
            from pycomm._runtime.cuda import fetch

            fetch(stand_in)
            finish = stand_in.put_back
        if buffer.is_cpu or stand_in is not None:
            core = exchange.on_host.submit(group._core, step)
            return PendingExchange(exchange, buffer, core, finish)
        device = buffer.device
        if self._stream is None:
            from pycomm._runtime.cuda import ExchangeStream

            self._stream = ExchangeStream(device)
        with self._stream.follow() as stream:
            exchange.enqueue(step, group, device)
            buffer.record_stream(stream)
            flight = PendingExchange(exchange, buffer, None, group.check)
            flight.future.set_result(buffer)
        return flight


def _kind(compression: Compression | None) -> str:
    return "none" if compression is None else type(compression).__name__


def saved_kind(state_dict: object) -> str | None:
    """The kind of state that a dict was saved from: its compression, local SGD, or unknown.

    States of different kinds keep different things under the same names. None for other dicts.
    """
    if not isinstance(state_dict, dict) or state_dict.get("format") != FORMAT:
        return None
    return LOCAL_SGD if "outer" in state_dict else state_dict.get("compression", UNKNOWN)


def place_in(group: Group) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return group.rank, group.size


def check_successor(group: object) -> None:
    """Raises an error if training cannot continue with this group."""
    if not isinstance(group, Group):
        raise TypeError(f"group must be a pycomm.Group, got {group!r}")
    group._core.check_usable()


def _check_options(
    compression: object, group: object, grad_scaler: object, warmup_steps: int
) -> None:
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(
            f"compression must be pycomm.Int8(), TopK(...), Cast(), Identity() or None, "
            f"got {compression!r}"
        )
    check_group(group)
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")
    check_whole("warmup_steps", warmup_steps)
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
