"""A hub id is streamed: against a server on loopback that speaks as much of the hub's protocol as `datasets` needs."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from texts import DOCUMENTS, corpus

HERE = Path(__file__).parent
NAME = "someone/some-text"
COMMIT = "a" * 40
CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: plain/train.jsonl}
  - {split: validation, path: plain/validation.jsonl}
- config_name: no-training
  data_files:
  - {split: validation, path: plain/validation.jsonl}
---
"""
FILES = {
    "README.md": CARD.encode(),
    "plain/train.jsonl": "".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS).encode(),
    "plain/validation.jsonl": b'{"text": "w50 w51 w52"}\n' * 40,
}


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        file = re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/(.*)", path)
        tree = re.fullmatch(rf"/api/datasets/{NAME}/tree/\w+/?(.*)", path)
        if file and file[1] in FILES:
            content = FILES[file[1]]
            self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        elif tree:
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
                if name.startswith(tree[1])
            ]
            self.answer(200, json.dumps(rows).encode())
        elif re.fullmatch(rf"/api/datasets/{NAME}(/revision/\w+)?", path):
            files = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": files, "tags": []}).encode())
        else:
            self.answer(404, headers={"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """Address of a hub that holds one data set."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


READ = """
import json, sys
import numpy as np
from kdcli.data.files import open_source
from kdcli.errors import UsageError
from texts import corpus
source = open_source(sys.argv[1] + ":plain")
said = []
for config in ("no-training", "unknown"):
    try:
        corpus(sys.argv[1] + ":" + config)
    except UsageError as error:
        said.append(error.message)
print(json.dumps([list(source.documents("train", None)), len(corpus(sys.argv[1] + ":plain").train), said]))
"""


@pytest.mark.slow
def test_a_hub_id_is_streamed_and_once_tokenised_needs_no_network(hub, tmp_path, monkeypatch):
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "KDCLI_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
    }
    # The address is read when the libraries are imported, hence another process.
    done = subprocess.run(
        [sys.executable, "-c", READ, NAME], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    documents, blocks, said = json.loads(done.stdout.splitlines()[-1])
    assert documents == DOCUMENTS
    assert "no-training has no train split; it has validation" in said[0]
    assert "BuilderConfig 'unknown' not found" in said[1]
    # This process is offline.
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    again = corpus(f"{NAME}:plain")
    assert len(again.train) == blocks
    held_out = again.held_out.batch(np.arange(len(again.held_out)))["input_ids"]
    assert len(held_out[:, 1:-1].unique()) == 4
