"""Own labelled tasks that a tiny model learns, and helpers that run the commands on them."""

import itertools
import json
import os
import random
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kdcli.cli import app
from kdcli.engine.run_dir import RunDir
from kdcli.models.embedding_format import EmbeddingFormat, dense_layer, save_embedder
from kdcli.models.load import load_encoder
from kdcli.report.schema import Report

QUICK = shlex.split(
    "--max-steps 40 --batch-size 16 --lr 3e-3 --dtype fp32 --set data.max_length=24 "
    "--set data.stride=4 --set train.eval_every=20 --set train.log_every=5 "
    "--set train.checkpoint_every=10 --set measure.latency=false"
)
NAMES = ("calm", "brisk")
DENSE = dense_layer(
    torch.randn(8, 32, generator=torch.Generator().manual_seed(1)), torch.ones(8) / 7, "Tanh"
)
FEW = 6  # words of each class: w0 ... and w20 ...
REPORT = {"recipe.yaml", "report.json", "report.md", "report.html", "latency.csv", "log.jsonl"}
RUN = REPORT | {".manifest.jsonl"}
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
TUNED = MODEL | {"training_rows.safetensors"}


def _words(rng, halves, least=3, most=8):
    return [
        f"w{20 * rng.choice(halves) + rng.randrange(FEW)}"
        for _ in range(rng.randrange(least, most))
    ]


def _class(rng, i):
    return {"text": " ".join(_words(rng, [i % 2])), "label": NAMES[i % 2]}


def _pair(rng, i):
    pair = {"premise": " ".join(_words(rng, [i % 2])), "hypothesis": " ".join(_words(rng, [0, 1]))}
    return pair | {"label": ("same", "other")[i % 2]}


def _multi(rng, i):
    halves = [half for half in (0, 1) if i % 4 & 1 << half]
    words = [word for half in halves for word in _words(rng, [half], 2, 4)] or ["w40"]
    return {"text": " ".join(words), "label": [NAMES[half] for half in halves]}


def _score(rng, i):
    words = _words(rng, [i % 2])
    return {"text": " ".join(words), "label": 3.0 * (i % 2) + len(words) / 10}


def _tokens(rng, i):
    words = _words(rng, [0, 1])
    return {"tokens": words, "ner_tags": ["B-LOC" if int(w[1:]) >= 20 else "O" for w in words]}


def _span(rng, i):
    words = _words(rng, [0], 4, 8)
    place = rng.randrange(len(words))
    words[place] = "w30"
    answers = {"text": ["w30"], "answer_start": [len(" ".join([*words[:place], ""]))]}
    return {"id": f"q{i}", "question": "w40 w39", "context": " ".join(words), "answers": answers}


# Kind of an own task -> maker of a row.
ROWS = {
    "class": _class,
    "pair": _pair,
    "multi": _multi,
    "score": _score,
    "tokens": _tokens,
    "span": _span,
}


TEXTS = ("text", "premise", "hypothesis", "tokens", "question", "context")
# Rows of seed 0 that no other seed repeats. They train models and evaluate none.
SHARED = 256


def rows(kind: str, n: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    known = [texts_of(row) for row in rows(kind, SHARED)] if seed else []
    drawn = (ROWS[kind](rng, i) for i in itertools.count())
    return list(itertools.islice((row for row in drawn if texts_of(row) not in known), n))


def texts_of(row: dict) -> list:
    """What a row's identity is made of."""
    return [row[name] for name in TEXTS if name in row]


def write(path: Path, lines: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), "utf-8")
    return path


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def own(folder: Path, kind: str, n: int = 128, judged: int = 48) -> Path:
    """A directory of an own task with two splits."""
    write(folder / "train.jsonl", rows(kind, n))
    write(folder / "validation.jsonl", rows(kind, judged, seed=1))
    return folder


def spoil(lines: list[dict], kind: str) -> list[dict]:
    """The rows, some with wrong labels, so that no model scores 1."""
    for row, other in zip(lines[::12], lines[1::12], strict=True):
        if kind == "tokens":
            row["ner_tags"] = row["ner_tags"][::-1]
        elif kind == "span":
            row["answers"] = {"text": [row["context"].split()[0]], "answer_start": [0]}
        else:
            row["label"], other["label"] = other["label"], row["label"]
    return lines


def encoder(folder: Path, **changes: object) -> Path:
    """Save a tiny BERT that learns within a few steps, with its tokenizer."""
    torch.manual_seed(0)
    return on_disk(tiny_encoder("bert", initializer_range=0.1, **changes), folder)


def embedder(
    folder: Path,
    fmt: EmbeddingFormat | None = None,
    *,
    base: Path | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: object,
) -> Path:
    """Save an embedding model of a base, by default of a new tiny BERT next to it."""
    source = load_encoder(str(base or encoder(folder.with_name("base"), **changes)))
    save_embedder(source.model, tokenizer or source.tokenizer, fmt or EmbeddingFormat(), folder)
    return folder


def headed(folder: Path, labels: tuple[str, ...] = (), seed: int = 0, **settings: object) -> Path:
    """Save a tiny BERT with a random head that predicts every class; `labels` name its outputs."""
    names = (
        {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
        if labels
        else {}
    )
    torch.manual_seed(0)
    config = tiny_config("bert", initializer_range=0.3, **names | settings)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_config(config).eval(),
        tiny_tokenizer(),
    )
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.weight)
    texts = [row["premise"] for row in rows("pair", 64, seed=9)]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        # All classes about equally often; scores on both sides of 0 and of 5.
        mean, wide = (0.0, 2.0) if logits.shape[1] > 1 else (2.5, 4.0)
        model.classifier.weight *= wide / logits.std(0)[:, None]
        model.classifier.bias[:] = mean - logits.mean(0) * wide / logits.std(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teacher(folder: Path, kind: str) -> Path:
    """A tiny BERT of four layers, fine-tuned on an own task of `kind` with data in
    `folder/data`."""
    base = encoder(folder / "base", num_hidden_layers=4)
    data, out = own(folder / "data", kind, n=96, judged=32), folder / "teacher"
    succeeds(
        "finetune", base, "--task", "own", "--data", data, *QUICK, "--max-steps", "60", "-o", out
    )
    return out


def kdcli(*arguments: object):
    """Run a command in this process, in a fresh state of accelerate."""
    words, outer = list(map(str, arguments)), sys.argv
    sys.argv = ["kdcli", *words]
    try:
        result = CliRunner().invoke(app, words)
    finally:
        sys.argv = outer
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return result


def succeeds(*arguments: object):
    result = kdcli(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must exit with 2, print one message and write nothing in a directory; the
    message."""
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    result = kdcli(*arguments, "-o", folder / "refused")
    assert (result.exit_code, result.stdout, result.stderr.count("error: ")) == (2, "", 1), (
        result.output
    )
    assert "Traceback" not in result.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    return said_by(result)


def report_of(folder: Path) -> Report:
    return Report.model_validate_json((folder / "report.json").read_text("utf-8"))


def log_of(folder: Path) -> list[dict]:
    """The log of a run without what differs from run to run."""
    return [
        {k: v for k, v in row.items() if k != "seconds"} for row in lines_of(folder / "log.jsonl")
    ]


def same_logs(one: Path, other: Path, **near: float) -> None:
    """Equal to the bit, or up to rounding but for step and tokens."""
    for a, b in zip(log_of(one), log_of(other), strict=True):
        assert a == {
            k: v if k in ("step", "tokens") else pytest.approx(v, **near) for k, v in b.items()
        }


def said_by(result) -> str:
    """What a command said on stderr, on one line."""
    return " ".join(result.stderr.split())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    """Whether the weights in two directories are equal to the bit."""
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def times(folder: Path) -> dict[Path, int]:
    """Every file below a directory and when it was written."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def interrupted(monkeypatch, stage: str, step: int, *arguments: object):
    """Run a command and interrupt it after a step of the stage in this directory."""

    def ends(folder: Path, logged: int) -> bool:
        return (folder.name, logged) == (stage, step)

    return interrupted_when(monkeypatch, ends, *arguments)


def interrupted_when(monkeypatch, ends: Callable[[Path, int], bool], *arguments: object):
    """Run a command and interrupt it once `ends` is true of a run's directory and logged step."""
    whole = RunDir.log

    def log(self, record):
        whole(self, record)
        if ends(self.path, record["step"]):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "log", log)
        return kdcli(*arguments)


def terminate_in_training(folder: Path) -> None:
    """Send SIGTERM to this process once a training in a folder has logged a step."""

    def lines() -> int:
        return sum(log.read_text("utf-8").count("\n") for log in folder.rglob("log.jsonl"))

    logged = lines()

    def watch() -> None:
        while lines() < logged + 2:
            time.sleep(0.003)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
