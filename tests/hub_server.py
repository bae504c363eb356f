"""A hub on loopback with as much of the protocol as `from_pretrained`, `huggingface_hub`, uploads
and `datasets` need.

`from hub_server import hub  # noqa: F401` gives a test module the fixture:
`hub.add("someone/tiny-bert", folder)` publishes a directory. Within `hub.known(home)` this process
knows no other hub, and `hub.environment(home)` is the environment of such a process.
"""

import base64
import hashlib
import importlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import datasets
import pytest
from huggingface_hub import HfFileSystem, constants, file_download, hf_api
from huggingface_hub.utils import close_session
from transformers.utils import hub as transformers_hub

from kdcli.data.hub import hub_configs, hub_files, hub_splits
from kdcli.disk import COMMITS

COMMIT = "a" * 40


class Hub:
    """The content of the server and its requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[
            str, dict[str, bytes]
        ] = {}  # id -> path in the repository -> content
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # id -> commit -> its files
        self.pull_requests: dict[str, dict[int, dict[str, bytes]]] = {}  # id -> number -> files
        self.private: set[str] = set()
        self.gated: set[str] = set()  # ids that answer 401, as private ones do without a token
        self.broken: set[str] = set()  # `id/path` of files whose content stops halfway
        self.asked: list[tuple[str, str]] = []  # (method, path) of every request

    def add(self, name: str, folder: Path) -> None:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.commit(
            name, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        )

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """A new commit of a repository, of these files alone: `COMMIT`, then those of the next
        letters."""
        commits = self.commits.setdefault(name, {})
        commit = chr(ord("a") + len(commits)) * 40
        self.repositories[name] = commits[commit] = files
        return commit

    def knows(self, name: str, revision: str) -> bool:
        """Whether there is such a revision; `main` is the only branch, `COMMIT` the one of files
        that were just put."""
        is_request = revision in self.requests_of(name)
        return (
            revision == "main"
            or is_request
            or any(commit.startswith(revision) for commit in self.commits.get(name, [COMMIT]))
        )

    def requests_of(self, name: str) -> dict[str, dict[str, bytes]]:
        """Revision and commit of each pull request -> its files."""
        requests = self.pull_requests.get(name, {})
        by_ref = {f"refs/pr/{number}": files for number, files in requests.items()}
        return by_ref | {f"{number:040x}": files for number, files in requests.items()}

    def files(self, name: str, revision: str | None) -> tuple[str, dict[str, bytes]]:
        """The commit that a revision is, and its files; the newest for a branch."""
        if revision in (requests := self.requests_of(name)):
            commit = next(
                name
                for name, files in requests.items()
                if files is requests[revision] and "/" not in name
            )
            return commit, requests[revision]
        commits = self.commits.get(name, {})
        found = [commit for commit in commits if revision and commit.startswith(revision)]
        files = commits[found[0]] if found else self.repositories[name]
        return found[0] if found else next(reversed(commits), COMMIT), files

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Environment of a process whose hub this is and whose cache lies under `home`."""
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE"))
        }
        direct = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        return kept | direct | own | more

    @contextmanager
    def known(self, home: Path, **more: str) -> Iterator[None]:
        """Let this process know no other hub; its cache lies under `home`.

        Libraries read the address of the hub when they are imported, so the modules that hold it
        are read again.
        """
        modules = constants, datasets.config
        before = [dict(vars(module)) for module in modules]
        with pytest.MonkeyPatch.context() as patch:
            environment = self.environment(home, **more)
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(hf_api.api, "endpoint", self.url)
            patch.setattr(transformers_hub, "_hf_api", None, raising=False)
            # A download that broke off is tried five times, a second apart.
            patch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
            try:
                for module in modules:
                    importlib.reload(module)
                _forget()
                yield
            finally:
                for module, names in zip(modules, before, strict=True):
                    vars(module).update(names)
                _forget()


def _forget() -> None:
    close_session()
    HfFileSystem.clear_instance_cache()
    for cached in (hub_configs, hub_files, hub_splits):
        cached.cache_clear()
    COMMITS.clear()


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append((self.command, path))
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        listing = re.fullmatch(
            r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path
        )
        refs = re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path)
        name = (file or listing or refs or [None, None])[1]
        if name in self.hub.gated:
            self.answer(401, {"X-Error-Code": "GatedRepo"}, b"")
        elif name not in self.hub.repositories:
            self.answer(
                404,
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
                b"",
            )
        elif refs:
            found = [
                {"name": ref.removeprefix("refs/"), "ref": ref, "targetCommit": COMMIT}
                for ref in self.hub.requests_of(name)
                if "/" in ref
            ]
            self.json({"branches": [], "converts": [], "tags": [], "pullRequests": found})
        elif (
            revision := unquote((file or listing)[2 if file else 3] or "")
        ) and not self.hub.knows(name, revision):
            self.answer(
                404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b""
            )
        elif file:
            self.file(name, file[3], *self.hub.files(name, revision))
        elif listing:
            self.listing(name, *self.hub.files(name, revision), listing[2], listing[4] or "")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self.path.split("?")[0], self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.asked.append((self.command, path))
        commit = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/[^/]+", path)
        if "authorization" not in self.headers:
            self.answer(401, {"X-Error-Message": "Invalid username or password."}, b"")
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
            there = name in self.hub.repositories
            if not there:
                self.hub.repositories[name] = {}
                self.hub.private |= (
                    {name}
                    if wanted.get("private") or wanted.get("visibility") == "private"
                    else set()
                )
            self.json({"url": f"{self.hub.url}/{name}", "id": name}, 409 if there else 200)
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif commit and commit[2] == "preupload":
            files = json.loads(body)["files"]
            self.json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        elif commit:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            oid = self.hub.commit(commit[1], self.hub.repositories[commit[1]] | files)
            self.json(
                {
                    "commitUrl": f"{self.hub.url}/{commit[1]}/commit/{oid}",
                    "commitOid": oid,
                    "success": True,
                }
            )

    def json(self, content: object, status: int = 200) -> None:
        self.answer(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def file(self, name: str, path: str, commit: str, files: dict[str, bytes]) -> None:
        if path not in files:
            self.answer(
                404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
            )
            return
        content = files[path]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if start:
            first, last = int(start[1]), int(start[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, headers, content[first : last + 1])
        elif f"{name}/{path}" in self.hub.broken and self.command == "GET":
            self.answer(200, headers, content, sent=len(content) // 2)
        else:
            self.answer(200, headers, content)

    def listing(
        self, name: str, commit: str, files: dict[str, bytes], kind: str | None, under: str
    ) -> None:
        if kind == "tree":
            below = f"{under}/" if under else ""
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)[:40]}
                for path, content in files.items()
                if path.startswith(below)
            ]
            if "recursive=true" not in self.path.lower():
                own = [e for e in entries if "/" not in e["path"].removeprefix(below)]
                inner = {e["path"].removeprefix(below).partition("/")[0] for e in entries}
                folders = {below + name for name in inner} - {e["path"] for e in own}
                entries = own + [
                    {"type": "directory", "path": path, "size": 0, "oid": _etag(b"")[:40]}
                    for path in sorted(folders)
                ]
            body = json.dumps(entries)
        else:
            siblings = [{"rfilename": path} for path in files]
            body = json.dumps(
                {
                    "id": name,
                    "modelId": name,
                    "sha": commit,
                    "siblings": siblings,
                    "tags": [],
                    "private": name in self.hub.private,
                }
            )
        self.answer(200, {"Content-Type": "application/json"}, body.encode())

    def answer(
        self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None
    ) -> None:
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
