"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import settings
from parts import of_part

import pycomm

# Kernels without vectors: Inductor would compile programs to ask what the machine's vectors are.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process of a test that aborts says where
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
# A shell starts what it runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--part", type=int, help="0 to 4: a fifth of the long tests and of many sets")


def pytest_collection_modifyitems(config, items):
    # Long tests first, so that no process still runs one when the others have nothing left.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    part = config.getoption("part")
    if part is None:
        return
    kept = of_part(part, [(each.nodeid, bool(each.get_closest_marker("slow"))) for each in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


@pytest.fixture(autouse=True)
def no_default_group():
    """Every test starts and ends without one."""
    pycomm.set_default_group(None)
    yield
    pycomm.set_default_group(None)


@pytest.fixture
def world():
    """Makes worlds of threads and closes them."""
    made = []

    def make(size, timeout=60, **options):
        made.append(pycomm.LocalWorld(size, timeout, **options))
        return made[-1]

    yield make
    for local_world in made:
        local_world.close()
