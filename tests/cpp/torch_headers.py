"""Fetches the C++ headers of the supported versions of torch, without the rest of their wheels.

``python tests/cpp/torch_headers.py FOLDER [PART]`` makes ``FOLDER/2.11/include`` and so on, except
for the version that is installed; with PART, a number, it makes one of them. pip finds the wheels,
as it is configured; HTTP range requests read about 10 MB of the hundreds of each.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import Request, url2pathname, urlopen

SUPPORTED = ("2.11", "2.12", "2.13", "2.14")
READ_AHEAD = 16 << 20  # the headers lie together in the wheel


def others(part: str = "") -> list[str]:
    """The supported versions, without the one that is installed; with `part` one of them."""
    installed = importlib.metadata.version("torch")
    found = [version for version in SUPPORTED if not installed.startswith(f"{version}.")]
    return [found[int(part) % len(found)]] if part else found


class RemoteFile(io.RawIOBase):
    """A file on an HTTP server that answers range requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        with self._request(0, 0) as answer:
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _request(self, first: int, last: int) -> HTTPResponse:
        request = Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        answer: HTTPResponse = urlopen(request, timeout=60)
        if answer.status != 206:
            answer.close()
            raise OSError(f"{self._url}: the server does not answer range requests")
        return answer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer)
        end = min(self._at + len(view), self._size)
        if self._at >= end:
            return 0
        with self._request(self._at, end - 1) as answer:
            count = answer.readinto(view[: end - self._at])
        self._at += count
        return count


def wheel_of(version: str) -> str:
    """The address of the newest wheel of a minor version."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    options = ["--no-deps", "--only-binary", "torch", "--report", "-", f"torch=={version}.*"]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"pip finds no wheel of torch {version}:\n{done.stderr}")
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def opened(url: str) -> io.BufferedReader:
    """The file at an address, which may also be that of a local file."""
    if url.startswith("file:"):
        return Path(url2pathname(urlparse(url).path)).open("rb")
    return io.BufferedReader(RemoteFile(url), READ_AHEAD)


def extract(url: str, folder: Path) -> None:
    """Extracts ``torch/include`` of a wheel to a folder, which exists only once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as temporary,
        opened(url) as file,
        zipfile.ZipFile(file) as wheel,
    ):
        members = [item for item in wheel.infolist() if item.filename.startswith("torch/include/")]
        for item in sorted(members, key=lambda item: item.header_offset):
            wheel.extract(item, temporary)
        Path(temporary, "torch").rename(folder)


def fetch(version: str, folder: Path) -> None:
    """Fetches the headers of one version, unless they are there."""
    target = folder / version
    if not target.exists():
        extract(wheel_of(version), target)


def main() -> int:
    """Fetches the headers."""
    folder, versions = Path(sys.argv[1]), others(*sys.argv[2:])
    with ThreadPoolExecutor() as pool:
        jobs = {version: pool.submit(fetch, version, folder) for version in versions}
    failures = {version: error for version, job in jobs.items() if (error := job.exception())}
    for version, error in failures.items():
        print(f"no headers of torch {version}: {error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
