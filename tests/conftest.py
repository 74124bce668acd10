"""Fixtures for all tests."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import settings

import pycomm

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
# A shell starts what it runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
