"""A hub on loopback with as much of the protocol as `from_pretrained`, `huggingface_hub` and `datasets` need.

`from hub_server import hub  # noqa: F401` gives a test module the fixture: `hub.add("someone/tiny-bert", folder)`
publishes a directory, `hub.environment(home)` is the environment of a process that knows no other hub.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "a" * 40


class Hub:
    """The content of the server and its requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, dict[str, bytes]] = {}  # id -> path in the repository -> content
        self.gated: set[str] = set()  # ids that answer 401, as private ones do without a token
        self.broken: set[str] = set()  # `id/path` of files whose content stops halfway
        self.asked: list[tuple[str, str]] = []  # (method, path) of every request

    def add(self, name: str, folder: Path) -> None:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.repositories[name] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Environment of a process whose hub this is and whose cache lies under `home`."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE"))}
        direct = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        return kept | direct | own | more


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append((self.command, path))
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        listing = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+(?:/(.*))?)?", path)
        name = (file or listing or [None, None])[1]
        if name in self.hub.gated:
            self.answer(401, {"X-Error-Code": "GatedRepo"}, b"")
        elif name not in self.hub.repositories:
            self.answer(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"")
        elif file:
            self.file(name, file[2])
        elif listing:
            self.listing(name, self.hub.repositories[name], listing[2], listing[3] or "")

    do_HEAD = do_GET

    def file(self, name: str, path: str) -> None:
        files = self.hub.repositories[name]
        if path not in files:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b"")
            return
        content = files[path]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if start:
            first, last = int(start[1]), int(start[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, headers, content[first : last + 1])
        elif f"{name}/{path}" in self.hub.broken and self.command == "GET":
            self.answer(200, headers, content, sent=len(content) // 2)
        else:
            self.answer(200, headers, content)

    def listing(self, name: str, files: dict[str, bytes], kind: str | None, under: str) -> None:
        if kind == "tree":
            found = [(path, content) for path, content in files.items() if path.startswith(under)]
            body = json.dumps([{"type": "file", "path": p, "size": len(c), "oid": _etag(c)[:40]} for p, c in found])
        else:
            siblings = [{"rfilename": path} for path in files]
            body = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []})
        self.answer(200, {"Content-Type": "application/json"}, body.encode())

    def answer(self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None) -> None:
        """Answer; with `sent`, hang up after so many bytes."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Print nothing: requests are in `Hub.asked`."""


@contextmanager
def serve() -> Iterator[Hub]:
    """Run an empty hub on a free port of loopback."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield handler.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as running:
        yield running
