"""`kdcli export`: an encoder or a fine-tuned model as a directory for ONNX Runtime or OpenVINO,
without torch.

The directory holds the model file, the tokenizer, config.json with the labels, README.md with
example code, and export.json with the measured error. It is written atomically.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.sources import open_source
from kdcli.data.text.sentences import sentences
from kdcli.deploy.environment import versions
from kdcli.deploy.export import EXACT, FILES, LIMITS, RUNTIMES, ModelFile, recorded
from kdcli.deploy.exported import EMBEDDING, FACTS
from kdcli.deploy.sessions import library
from kdcli.disk import STAGED, check_writable, content_of, fill_dir, write_atomic
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import numbered
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.card import describe
from kdcli.models.custom_class import custom_class
from kdcli.models.embedder import EmbeddingFormat, Pool, read_format, save_format
from kdcli.models.heads import (
    AUTO_CLASS,
    PROBLEM,
    check_head,
    kind_of_head,
    tokenizer_for,
    tuned_length,
)
from kdcli.models.load import load_config, load_tokenizer, load_weights, location, save_tokenizer
from kdcli.models.model import Model
from kdcli.models.training_rows import training_rows, write_training_rows
from kdcli.report.text import bytes_of
from kdcli.report.views import short
from kdcli.run.context import cpu_session
from kdcli.types import Kind
from kdcli.verbs.export.agreement import ExportCheck
from kdcli.verbs.export.gate import Found, Judge, write_gated
from kdcli.verbs.export.readme import error_of, readme
from kdcli.workloads import open_evaluation
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.settings import LabelledSettings
from kdcli.workloads.workload import EvaluationRequest, Workload

TEXTS_COMPARED, VECTORS_COMPARED = 64, 256
TEXT = LabelledSettings()  # That of the demo


@dataclass(frozen=True)
class Exported:
    """The result of `kdcli export`; `facts` as in export.json."""

    facts: dict[str, Any]
    folder: Path

    def to_json(self) -> str:
        return json.dumps(self.facts, indent=2)

    def to_frame(self) -> pd.DataFrame:
        """One row a file: size, how far it is from torch, and the scores of both."""
        rows = []
        for of in self.by_file:
            row = {key: self.facts[key] for key in ("source", "format")}
            row |= {key: of[key] for key in ("precision", "max_abs", "relative", "bytes")} | of[
                "agreement"
            ]
            for scores in of.get("scores", ()):
                task = f"{scores['task']} {scores['set']}".strip()
                row |= {
                    f"{task} {m} {side}": v
                    for side in ("torch", "file")
                    for m, v in scores[side].items()
                }
            rows.append(row)
        return pd.DataFrame(rows)

    @property
    def by_file(self) -> list[dict[str, Any]]:
        """What is known of each file."""
        return [self.facts, *self.facts["also"]]

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False))

    def renderables(self) -> Iterable[Any]:
        table = Table("", "", show_header=False, box=None)
        for key in ("source", "format"):
            table.add_row(key, self.facts[key])
        table.add_row("inputs", ", ".join(self.facts["inputs"]))
        table.add_row("outputs", ", ".join(self.facts["outputs"]))
        for of in self.by_file:
            table.add_row("precision", of["precision"])
            table.add_row("size", bytes_of(of["bytes"]))
            table.add_row("next to torch", error_of(of, self.facts["kind"]))
            for row in of.get("scores", ()):
                values = ", ".join(
                    f"{m} {v:.4f} (torch {row['torch'][m]:.4f})" for m, v in row["file"].items()
                )
                table.add_row(row["task"], values)
        yield table
        yield from (note for of in self.by_file for note in of["notes"])
        yield f"model in {self.folder} (README.md shows how to run it)"


def export(
    source: str,
    *,
    format: str,
    precisions: Sequence[str] = ("fp32",),
    data: LabelledSettings = TEXT,
    pooling: str | None = None,
    task: str | None = None,
    max_drop: float | None = None,
    weights: bool = False,
    output_dir: Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Export a model (hub id, directory or `demo`) and compare each file with torch. An embedding
    model, or an encoder with `pooling`, gives vectors of texts. `precisions`: if several, the first
    is `fp32`; the files lie side by side, and export.json has the others under `also`. `data`: see
    `ExportRecipe`; text is by default the demo's. With `task` a file is judged on its data: then
    products stay in float32 until it loses at most `max_drop` points of the first metric.
    `weights`: model.safetensors too. `output_dir` is by default runs/export-NAME-FORMAT, numbered;
    `overwrite` replaces an export there. Raises UsageError: unknown format or precision, a
    directory that is not an export, a model that cannot be loaded or exported; GateError: too much
    is lost; MachineError: a library is missing, the disk is full, or the file differs from torch.
    """
    check_request(format, precisions, task, max_drop)
    name = "-".join(
        ["export", Path(short(source)).name, format, *(p for p in precisions if p != "fp32")]
    )
    folder = output_dir or numbered(name, taken=overwrite)
    check_folder(folder, overwrite)
    loaded = _load_vectors if pooling is not None or read_format(source) is not None else _load_head
    part = loaded(source, data, pooling, task, trust_remote_code)
    Progress.log(f"exporting {short(source)} to {format}, {', '.join(precisions)}")
    model, kind, tokenizer = part.model, part.kind, part.tokenizer
    with fill_dir(folder, last=FACTS, clear=True) as aside:
        made: list[tuple[ModelFile, dict[str, Any]]] = []
        with recorded(model, aside, format, precisions[0], pool=part.pool) as graph:
            for precision in precisions:
                judged = max_drop is not None or (kind == EMBEDDING and precision != "fp32")
                file, found, gate = write_gated(
                    graph.at(precision, scored_on_text=judged), part.judge, max_drop
                )
                made.append((file, _facts_of(precision, file, found, gate)))
        written = {file.path: _parts(file.path) for file, _ in made}
        for file, of in made:
            of["bytes"] = sum(part.stat().st_size for part in written[file.path])
        (file, main), *also = made
        facts: dict[str, Any] = {
            "source": short(source),
            "format": format,
            "architecture": type(model).__name__,
        }
        facts |= {"kind": kind, "inputs": list(file.inputs), "outputs": list(file.outputs)}
        parts = sorted(part for parts in written.values() for part in parts)
        facts["files"] = {f.relative_to(aside).as_posix(): f.stat().st_size for f in parts}
        card = replace(
            describe(model, short(source), None),
            bytes=main["bytes"],
            held_in=precisions[0],
            sha256=_sha256(written[file.path]),
        )
        facts["card"] = asdict(card)
        facts |= main | {"notes": [*part.notes, *main["notes"]], "also": [of for _, of in also]}
        facts |= {"task": task, "data": data.source} if task is not None else {}
        facts["versions"] = versions() | {
            name: library(name, format).__version__ for name in RUNTIMES[format]
        }
        (model if weights else model.config).save_pretrained(aside)
        if part.format is not None:
            save_format(part.format, model.config.hidden_size, aside)
        save_tokenizer(tokenizer, aside)
        write_training_rows(aside, training_rows(location(source)))
        write_atomic(
            aside / "README.md", readme(facts, model, kind, part.longest, location(source))
        )
        write_atomic(aside / FACTS, json.dumps(facts, indent=2))
    return Exported(facts, folder)


def _facts_of(
    precision: str, file: ModelFile, found: Found, gate: dict[str, Any]
) -> dict[str, Any]:
    """The entry of one file in export.json."""
    facts: dict[str, Any] = {
        "precision": precision,
        "max_abs": file.max_abs,
        "relative": file.relative,
    }
    facts |= {"agreement": found.agreement}
    facts["limits"] = {
        "max_abs": EXACT if precision == "fp32" else None,
        "relative": LIMITS[precision],
    }
    if found.scores:
        rows = [row.model_dump() for row in found.comparisons]
        facts |= {"scores": [asdict(row) for row in found.scores], "comparisons": rows}
    return facts | gate | {"notes": _notes(gate, found)}


def _parts(file: Path) -> list[Path]:
    """A model file and that of its weights: `openvino_model.bin`, or `model.onnx.data` above 2
    GB."""
    return sorted(
        part for part in file.parent.iterdir() if part.name.split(".")[0] == file.name.split(".")[0]
    )


def check_request(
    format: str, precisions: Sequence[str], task: str | None, max_drop: float | None
) -> None:
    """Check what needs no model. Raises UsageError, MachineError: see `run`."""
    if format not in RUNTIMES:
        raise UsageError(
            f"unknown format '{format}'{did_you_mean(format, RUNTIMES)}",
            f"allowed: {', '.join(RUNTIMES)}",
        )
    if wrong := next(
        (precision for precision in precisions if (format, precision) not in FILES), None
    ):
        allowed = ", ".join(p for f, p in FILES if f == format)
        raise UsageError(f"{format} is not written in {wrong}", f"allowed: {allowed}")
    for name in RUNTIMES[format]:
        library(name, format)
    if max_drop is not None and task is None:
        raise UsageError(
            "--max-drop needs a task to judge the file on", "add --task TASK [--data SOURCE]"
        )
    if max_drop is not None and not max_drop >= 0:
        raise UsageError(f"--max-drop must be at least 0 points, got {max_drop:g}")


@dataclass(frozen=True)
class _Part:
    """A model ready to export: `kind` of its head (`embedding`: vectors, None: no head), tokens
    that it reads at most (None: its positions), how vectors are made."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: str | None
    notes: list[str]
    judge: Judge
    format: EmbeddingFormat | None = None
    longest: int | None = None

    @property
    def pool(self) -> Pool | None:
        return None if self.format is None else Pool(self.format).eval()


def _load_vectors(
    source: str, data: LabelledSettings, pooling: str | None, task: str | None, trusted: bool
) -> _Part:
    embedder = Embedder.open(source, pooling=pooling, compacted=True, trust_remote_code=trusted)
    workload = _open_workload(task, data, source, pooling or embedder.format.pooling)
    if workload is None:
        documents = open_source(data.source or "demo").documents("train", None)
        texts = (text for document in documents for text in sentences(document))
        compared = list(itertools.islice(texts, VECTORS_COMPARED))
    else:
        compared = workload.texts_of_rows()[:VECTORS_COMPARED]
    embedder.tokenizer.model_max_length = longest = embedder.max_length
    check = ExportCheck(embedder, None, compared, workload)
    return _Part(
        embedder.model,
        embedder.tokenizer,
        EMBEDDING,
        [embedder.note],
        check,
        embedder.format,
        longest,
    )


def _load_head(
    source: str, data: LabelledSettings, _: str | None, task: str | None, trusted: bool
) -> _Part:
    texts: list[str] = []
    if task is None:
        documents = open_source(data.source or "demo").documents("train", None)
        texts = list(itertools.islice(documents, TEXTS_COMPARED))
    network, tokenizer, kind, notes = _load(source, trusted)
    model, workload = Model(network, tokenizer, source), None
    if task is not None:
        if kind is None:
            raise UsageError(
                f"{source} has no head for task {task}",
                "--pooling makes an encoder an embedding model",
            )
        workload = _open_workload(task, data, source, None)
        assert workload is not None
        if isinstance(workload, LabelledWorkload):
            model = _model_of_task(model, workload, trusted)
        texts = workload.texts_of_rows()[:TEXTS_COMPARED]
    return _Part(network, tokenizer, kind, notes, ExportCheck(model, kind, texts, workload))


def _open_workload(
    task: str | None, data: LabelledSettings, source: str, pooling: str | None
) -> Workload | None:
    """The rows that a file is scored on, without rows that trained the model."""
    if task is None:
        return None
    trained = {source: training_rows(location(source))}
    by_head = pooling is None
    request = EvaluationRequest(task, [source], data, trained, pooling=pooling, by_head=by_head)
    return open_evaluation(request, cpu_session())


def _model_of_task(model: Model, workload: LabelledWorkload, trusted: bool) -> Model:
    """The model with the tokenizer and the row length that its task uses.

    Raises:
        UsageError: a head for another task.
    """
    task = workload.data.task
    check_head(model.source, model.model.config, task)
    of_words = task.kind == "tokens"
    tokenizer = tokenizer_for(model.source, of_words=of_words, trust_remote_code=trusted)
    length = tuned_length(model.model.config, tokenizer, task)
    rows = training_rows(location(model.source))
    return Model(model.model, tokenizer, model.source, "", length, rows)


def _notes(gate: dict[str, Any], found: Found) -> list[str]:
    """Notes on the bound, and on the products that stay in float32."""
    notes = []
    for row in found.comparisons:
        name = f"{row.task} {row.set}".strip()
        between = f"95 % between {row.low:+.4f} and {row.high:+.4f}"
        notes.append(f"{name}: {row.metric} differs from torch by {row.difference:+.4f}, {between}")
    kept = [each for each in gate.get("products", ()) if each["float"]]
    if kept:
        names = ", ".join(f"{each['name']} ({each['error']:.2g})" for each in kept)
        notes.append(
            f"{len(kept)} of {len(gate['products'])} products are in float32, by the error that "
            "each alone causes: "
            f"{names}"
        )
    return notes


def check_folder(folder: Path, overwrite: bool) -> None:
    """Allow a new or empty directory, and with `overwrite` an earlier export. Raises UsageError: a
    file, or another directory that is not empty."""
    check_writable(folder, directory=True)
    is_export = any((place / FACTS).is_file() for place in (folder, folder / STAGED))
    if folder.is_dir() and content_of(folder) and not (is_export and overwrite):
        raise UsageError(
            f"output directory {folder} is not empty",
            "--overwrite replaces its export; or choose another with -o"
            if is_export
            else "it holds no export of kdcli, so it is left alone; choose another with -o",
        )


def _load(
    source: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Kind | None, list[str]]:
    """The model with the head that its config.json names, its tokenizer, the kind of the head, and
    notes."""
    config = load_config(source, trust_remote_code=trust_remote_code, compacted=True)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    architecture = next(iter(config.architectures or ()), type(config).__name__)
    kind: Kind | None = kind_of_head(config, architecture)
    auto = custom_class(config) or (AUTO_CLASS[kind] if kind else AutoModel)
    if kind == "class" and config.num_labels == 1 and config.problem_type is None:
        kind = "score"
    elif kind == "class":
        kind = next((k for k, problem in PROBLEM.items() if problem == config.problem_type), kind)
    model = load_weights(source, auto, trust_remote_code=trust_remote_code).eval()
    headless = kind is None and architecture != type(model).__name__
    notes = (
        [f"the head of {architecture} is left out: the file outputs the last hidden state"]
        if headless
        else []
    )
    return model, tokenizer, kind, notes


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
