"""A hub id is streamed from a hub on loopback, and needs no network once it is tokenised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import hub  # noqa: F401
from texts import DOCUMENTS, corpus

HERE = Path(__file__).parent
NAME = "someone/some-text"
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


READ = """
import json, sys
import numpy as np
from kdcli.data.files import open_source
from kdcli.errors import UsageError
from texts import corpus
source = open_source(sys.argv[1] + ":plain")
messages = []
for config in ("no-training", "unknown"):
    try:
        corpus(sys.argv[1] + ":" + config)
    except UsageError as error:
        messages.append(error.message)
print(json.dumps([list(source.documents("train", None)), len(corpus(sys.argv[1] + ":plain").train), messages]))
"""


@pytest.mark.slow
def test_a_hub_id_is_streamed_and_once_tokenised_needs_no_network(hub, tmp_path, monkeypatch):  # noqa: F811
    hub.repositories[NAME] = FILES
    paths = {"KDCLI_CACHE": str(tmp_path / "cache"), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    environment = hub.environment(tmp_path / "hf", **paths)
    # The address is read when the libraries are imported, hence another process.
    done = subprocess.run(
        [sys.executable, "-c", READ, NAME], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    documents, blocks, messages = json.loads(done.stdout.splitlines()[-1])
    assert documents == DOCUMENTS
    assert "no-training has no train split; it has validation" in messages[0]
    assert "BuilderConfig 'unknown' not found" in messages[1]
    # This process is offline.
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    again = corpus(f"{NAME}:plain")
    assert len(again.train) == blocks
    held_out = again.held_out.batch(np.arange(len(again.held_out)))["input_ids"]
    assert len(held_out[:, 1:-1].unique()) == 4
