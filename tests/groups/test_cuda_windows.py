"""How ranks on CUDA decide where their windows lie. GPUs and kernels are fakes."""

import contextlib
import ctypes
import logging
import os
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import helpers
import pytest
import torch
import torch.distributed as dist

from pycomm import _C
from pycomm._runtime import cuda
from pycomm._runtime.cuda import LocalDevices, join_processes

BYTES = 1 << 20
FREE = 8 * BYTES
WISHES = BYTES, BYTES + 1000
SETTINGS = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
PINNED = "pinned host memory"


@dataclass(frozen=True)
class Machine:
    """What the ranks' GPUs can do. Rank r has GPU r, which is cuda:0 in its process."""

    visible: int = 1  # GPUs of a process; the second one is the other rank's
    access: bool = True
    no_memory: int = -1  # the rank for which each of these fails
    no_rendezvous: int = -1
    wrong_place: int = -1
    asks: tuple[int, ...] = ()  # ranks on GPUs of different numbers that ask for multicast
    no_multicast: int = -1
    # What growing meets.
    captures: int = -1
    no_extension: int = -1
    full: int = -1  # the rank whose device has no free memory
    room: int = -1  # the rank whose heap needs none


class Fakes:
    """Stands in for torch's GPUs and pycomm's kernels in one rank's process."""

    def __init__(self, machine, rank):
        self.machine = machine
        self.rank = rank
        self.settings = []
        self.unpinned = 0
        self.multicast = None
        self.regions = []

    def symmetric_tensor(self, nbytes, _device):
        self.settings.append([os.environ.get(name) for name in SETTINGS])
        if self.rank == self.machine.no_memory:
            raise RuntimeError("no memory")
        return torch.ones(nbytes, dtype=torch.uint8)

    def symmetric_handle(self, memory, _process_group):
        self.settings.append([os.environ.get(name) for name in SETTINGS])
        if self.rank == self.machine.no_rendezvous:
            raise RuntimeError("no rendezvous")
        mine = memory.data_ptr() + (self.rank == self.machine.wrong_place)
        asked = os.environ[SETTINGS[0]] == "0" and self.rank != self.machine.no_multicast
        return SimpleNamespace(buffer_ptrs=[mine, mine], multicast_ptr=4096 if asked else 0)

    def properties(self, device):
        index = torch.device(device).index
        gpu = index if self.machine.asks else (self.rank + index) % 2
        return SimpleNamespace(uuid=str(gpu + 1) * 32, multi_processor_count=100)

    def endpoint(self, *_, **__):
        window = self.regions[-1]
        self.multicast = window.multicast
        return SimpleNamespace(serve_messages=lambda _: None, extend=self.extend)

    def region(self, nbytes, here, there, multicast=0):
        self.regions.append(
            SimpleNamespace(nbytes=nbytes, here=here, there=there, multicast=multicast)
        )
        return self.regions[-1]

    def extend(self, region):
        assert region is self.regions[-1]
        if self.rank == self.machine.no_extension:
            raise RuntimeError("no table")

    def registration(self, _device, core, rank, offset, nbytes):
        fakes = self

        class Registration:
            def __init__(self):
                self.address = core.address(rank, offset, nbytes)

            def __del__(self):
                fakes.unpinned += 1

        return Registration()

    @contextlib.contextmanager
    def installed(self):
        native = SimpleNamespace(
            cuda_least_staging_bytes=lambda *_: 0,
            cuda_window_bytes=lambda *_: BYTES,
            cuda_heap_begin=lambda *_: BYTES // 2,
            CudaRegion=self.region,
            CudaEndpoint=self.endpoint,
            CudaSharedLaunch=lambda *_: SimpleNamespace(),
            CudaGroup=lambda *_: SimpleNamespace(close=lambda: None, check=lambda: None),
            DeviceHeap=lambda begin, nbytes, *_: _C.DeviceHeap(begin, nbytes, None, None),
            CudaHostRegistration=self.registration,
            Operation=_C.Operation,
        )
        windows = mock.patch.multiple(
            cuda,
            _C=native,
            symmetric_tensor=self.symmetric_tensor,
            symmetric_handle=self.symmetric_handle,
        )
        kernels = mock.patch("pycomm._runtime.cuda._C", native)
        devices = mock.patch.multiple(
            torch.cuda,
            get_device_properties=self.properties,
            device_count=lambda: self.machine.visible,
            can_device_access_peer=lambda *_: self.machine.access,
            synchronize=lambda *_: None,
            is_current_stream_capturing=lambda: self.rank == self.machine.captures,
            mem_get_info=lambda _: (0 if self.rank == self.machine.full else FREE, 2 * FREE),
        )
        with windows, kernels, devices:
            yield


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def connect(group, machine):
    """One rank's transport, what it warned of, and how much was pinned until it was closed."""
    for name in (*SETTINGS, cuda.MULTICAST):
        os.environ.pop(name, None)
    if group.rank in machine.asks:
        os.environ[cuda.MULTICAST] = "1"
    fakes, warnings = Fakes(machine, group.rank), Warnings()
    logging.getLogger("pycomm").addHandler(warnings)
    with fakes.installed():
        device = torch.device("cuda", group.rank if machine.asks else 0)
        side = join_processes(group, device, lambda: None, 32, BYTES // 2)
        transport, shares = side.transport, side.shares_device
        side.close()
        del side
    logging.getLogger("pycomm").removeHandler(warnings)
    left = [os.environ.get(name) for name in SETTINGS]
    return transport, shares, warnings.texts, fakes.settings, left, fakes.unpinned, fakes.multicast


def run(machine):
    return helpers.run_group(2, connect, machine, staging_bytes=4 << 20)


def test_one_visible_gpu_per_process_uses_peer_memory():
    for transport, shares, texts, settings, left, _, multicast in run(Machine()):
        assert transport == "peer memory"
        assert not shares
        assert texts == []
        assert settings == [["1", "1"], ["1", "1"]]  # no multicast; the same number is no overlap
        assert left == [None, None]
        assert multicast == 0


@pytest.mark.parametrize(
    ("asks", "lacks", "setting", "address"),
    [((0, 1), -1, "0", 4096), ((0, 1), 1, "0", 0), ((1,), -1, "1", 0)],
    ids=["all", "one lacks it", "one asks"],
)
def test_multicast_is_used_if_all_ranks_ask_for_it_and_have_it(asks, lacks, setting, address):
    for transport, _, _, settings, _, _, multicast in run(Machine(asks=asks, no_multicast=lacks)):
        assert transport == "peer memory"
        assert settings == [[setting, setting]] * 2
        assert multicast == address


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["no_memory", "no_rendezvous", "wrong_place"])
def test_all_ranks_fall_back_if_one_fails(fault, rank):
    causes = {
        "no_memory": "no memory",
        "no_rendezvous": "no rendezvous",
        "wrong_place": "not where its handle says",
    }
    seen = run(Machine(**{fault: rank}))
    for r, (transport, _, texts, _, left, unpinned, _) in enumerate(seen):
        assert transport == PINNED
        (text,) = texts
        assert (causes[fault] if r == rank else "another rank's GPU") in text
        assert left == [None, None]
        assert unpinned == 2


def grow(group, machines):
    """What became of one rank's heap on each machine, where it lies, and what was logged."""
    logger, seen = logging.getLogger("pycomm"), []
    for machine in machines:
        fakes, warnings = Fakes(Machine(), group.rank), Warnings()
        group._told.clear()
        logger.addHandler(warnings)
        with fakes.installed():
            side = join_processes(group, torch.device("cuda", 0), lambda: None, 32, BYTES // 2)
            heap, fakes.machine = side.heap, machine
            side.grow_heap(group, 0 if group.rank == machine.room else WISHES[group.rank])
            grown = heap.ranges.has_room(max(WISHES)), heap.ranges.has_room(max(WISHES) + 1)
            side.grow_heap(group, 100)  # there is room
            last = fakes.regions[-1]
            seen.append((grown, len(fakes.regions), last.here, last.there, warnings.texts))
            side.close()
        logger.removeHandler(warnings)
    return seen


def test_heaps_grow_on_all_ranks_or_on_none():
    faults = {
        "no_memory": "no memory",
        "no_rendezvous": "no rendezvous",
        "no_extension": "no table",
        "full": "half of a GPU's free memory is 0",
        "captures": "",
    }
    given = [(fault, rank) for fault in faults for rank in range(2)]
    machines = [Machine(), Machine(room=0)]
    machines += [Machine(**{fault: rank}) for fault, rank in given]
    every = helpers.run_group(2, grow, machines, staging_bytes=4 << 20)
    for seen in every:
        for i, (grown, regions, _, there, texts) in enumerate(seen[:2]):
            assert grown == (True, False)
            assert regions == 2
            assert there == [each[i][2][0] for each in every]
            assert texts == []
    for rank, seen in enumerate(every):
        for (fault, faulty), (grown, *_, texts) in zip(given, seen[2:], strict=True):
            assert grown == (False, False)
            why = faults[fault] if fault == "full" or rank == faulty else "another rank's GPU"
            assert len(texts) == (fault != "captures")
            assert all("heap cannot grow" in text and why in text for text in texts)


def leave_first(group):
    """Rank 0 leaves; the others return whether its pinned window is unchanged."""
    with Fakes(Machine(visible=2, access=False), group.rank).installed():
        side = join_processes(group, torch.device("cuda", 0), lambda: None, 32, 0)
        windows = [each.address for each in side._keep]
        assert ctypes.string_at(windows[group.rank], BYTES) == bytes(BYTES)
        ctypes.memset(windows[group.rank], 1 + group.rank, BYTES)
        dist.barrier()
        if group.rank == 0:
            side.close()
            del side
            group.close()
        dist.barrier()
        return [ctypes.string_at(window, BYTES) for window in windows] if group.rank > 0 else None


def test_a_pinned_window_outlasts_its_rank():
    """A kernel of another rank may still read it."""
    _, seen = helpers.run_group(2, leave_first, staging_bytes=4 << 20)
    assert seen == [bytes([1]) * BYTES, bytes([2]) * BYTES]


def test_no_attempt_without_peer_access():
    for transport, _, texts, settings, *_ in run(Machine(visible=2, access=False)):
        assert transport == PINNED
        assert settings == []
        assert "cuda:0 has no peer access to cuda:1" in texts[0]


def test_visible_peers_with_access_use_peer_memory():
    assert [seen[0] for seen in run(Machine(visible=2))] == ["peer memory"] * 2


def test_a_group_of_one_does_not_share_its_device(world):
    with world(1) as one:
        zeros = torch.zeros
        on_cpu = mock.patch("torch.zeros", lambda n, dtype, **_: zeros(n, dtype=dtype))
        with Fakes(Machine(), 0).installed(), on_cpu:
            side = LocalDevices(one.groups, 32).side(0, torch.device("cuda", 0))
        assert side.transport == "threads"
        assert not side.shares_device
