"""``make torch-check``: headers out of remote wheels, and the compile check against them."""

import io
import re
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "cpp"
HEADERS = {f"torch/include/{name}.h": f"// {name}\n" * 100 for name in ("a", "b/c", "b/d")}


@pytest.fixture
def torch_headers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import torch_headers

    return torch_headers


def wheel():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("torch/lib/libtorch.so", b"x" * 1000)
        for name, text in HEADERS.items():
            archive.writestr(name, text)
        archive.writestr("torch/version.py", "")
    return file.getvalue()


class Server(ThreadingHTTPServer):
    """Serves one file, in parts if asked to."""

    def __init__(self, content, parts):
        self.content, self.parts, self.requests = content, parts, 0
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content = self.server.content
        self.server.requests += 1
        if self.server.parts:
            first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(params=[True, False], ids=["parts", "whole"])
def server(request):
    with Server(wheel(), request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_headers_of_a_remote_wheel(torch_headers, server, tmp_path):
    url = f"http://127.0.0.1:{server.server_port}/torch.whl"
    folder = tmp_path / "headers" / "2.99"
    if not server.parts:
        with pytest.raises(OSError, match="does not answer range requests"):
            torch_headers.extract(url, folder)
        assert not folder.exists()
        return
    torch_headers.extract(url, folder)
    found = {f"torch/{path.relative_to(folder)}" for path in folder.rglob("*.h")}
    assert found == set(HEADERS)
    assert all(
        HEADERS[f"torch/{p.relative_to(folder)}"] == p.read_text() for p in folder.rglob("*.h")
    )
    assert server.requests < 8  # not one for each header


def test_headers_of_a_local_wheel(torch_headers, tmp_path):
    (tmp_path / "torch.whl").write_bytes(wheel())
    torch_headers.extract((tmp_path / "torch.whl").as_uri(), tmp_path / "2.99")
    assert (tmp_path / "2.99" / "include" / "b" / "c.h").exists()


def test_all_other_supported_versions_are_checked(torch_headers):
    first, last = re.search(
        r"\(2\.(\d+) to 2\.(\d+), CPU", (ROOT / "README.md").read_text()
    ).groups()
    assert tuple(f"2.{n}" for n in range(int(first), int(last) + 1)) == torch_headers.SUPPORTED
    others = torch_headers.others()
    assert len(others) == len(torch_headers.SUPPORTED) - 1
    assert not any(torch.__version__.startswith(f"{version}.") for version in others)


def run(script, folder):
    command = [sys.executable, FOLDER / script, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_missing_headers_are_no_success(tmp_path):
    done = run("torch_check.py", tmp_path)
    assert done.returncode == 1
    assert "does not compile against torch" in done.stderr


def test_an_unreachable_index_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    done = run("torch_headers.py", tmp_path)
    assert done.returncode == 1
    assert "no headers of torch 2.11: pip finds no wheel" in done.stderr
