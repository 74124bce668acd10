"""The shared file: its header, and its flags in the kernel."""

import fcntl
import os
import re
import struct
from pathlib import Path

import pytest

from pycomm import _C

RANKS, SLICE, STAGING = 2, 1 << 20, 64 << 10
SIZES = (RANKS, SLICE, STAGING)
# The fields at the start of the file: magic, layout, ranks, slice_bytes, staging_bytes.
HEADER = struct.Struct("QQqqq")


@pytest.fixture
def fd():
    made = _C.create_window(*SIZES)
    yield made
    if Path(f"/proc/self/fd/{made}").exists():
        os.close(made)


def test_a_window_as_it_should_be(fd):
    magic, layout, *sizes = HEADER.unpack(os.pread(fd, HEADER.size, 0))
    assert magic.to_bytes(8, "little") == b"pycomm w"
    assert layout == _C.window_layout
    assert tuple(sizes) == SIZES
    assert os.fstat(fd).st_size == RANKS * SLICE
    _C.Window(fd, *SIZES)


@pytest.mark.parametrize(
    ("field", "name"),
    list(enumerate(["", "layout", "number of ranks", "slice_bytes", "staging_bytes"])),
)
def test_a_header_that_differs(fd, field, name):
    values = list(HEADER.unpack(os.pread(fd, HEADER.size, 0)))
    expected = values[field]
    values[field] += 1
    os.pwrite(fd, HEADER.pack(*values), 0)
    message = f"the window's {name} is {expected + 1}, this rank's is {expected}"
    if field == 0:
        message = "the file is not a pycomm window"
    with pytest.raises(ValueError, match=re.escape(message)):
        _C.Window(fd, *SIZES)
    assert not Path(f"/proc/self/fd/{fd}").exists()  # it was the window's, which is not there


@pytest.mark.parametrize("field", range(3))
def test_a_rank_that_expects_something_else(fd, field):
    sizes = list(SIZES)
    sizes[field] *= 2
    with pytest.raises(ValueError, match=f"is {SIZES[field]}, this rank's is {sizes[field]}"):
        _C.Window(fd, *sizes)


def test_a_file_that_is_no_window(tmp_path):
    for content in (b"", b"short", bytes(1 << 20)):
        path = tmp_path / "file"
        path.write_bytes(content)
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(ValueError, match="the file is not a pycomm window"):
            _C.Window(fd, *SIZES)


def test_a_file_that_has_been_cut_short(fd, tmp_path):
    """Otherwise reading beyond its end would raise SIGBUS."""
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    os.pwrite(copy, os.pread(fd, 4096, 0), 0)
    os.ftruncate(copy, RANKS * SLICE - 1)
    message = f"the window's size is {RANKS * SLICE - 1}, this rank's is {RANKS * SLICE}"
    with pytest.raises(ValueError, match=re.escape(message)):
        _C.Window(copy, *SIZES)


@pytest.mark.parametrize("size", [0, RANKS * SLICE - 4096, RANKS * SLICE + 4096])
def test_its_size_is_final(fd, size):
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    os.posix_fallocate(fd, SLICE - 4096, 4096)  # a hole at the end of a slice


def test_its_seals_are_final(fd):
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def kernel_version():
    return tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.mark.skipif(kernel_version() < (6, 3), reason="older kernels have no such seal")
def test_it_never_becomes_executable(fd):
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.fchmod(fd, 0o700)


def flags_of_mappings():
    """The kernel's flags of every mapping of a window here."""
    flags, is_window = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_window = "memfd:pycomm" in line
        elif is_window and line.startswith("VmFlags:"):
            flags.append(line.split()[1:])
    return flags


def test_a_core_dump_leaves_it_out(fd):
    """Otherwise each hole in the file would take memory, up to all memory of the node."""
    before = len(flags_of_mappings())
    window = _C.Window(fd, *SIZES)
    found = flags_of_mappings()
    assert len(found) > before
    assert all("dd" in flags for flags in found)
    del window
