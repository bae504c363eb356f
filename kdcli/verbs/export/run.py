"""`kdcli export`: write an encoder or a fine-tuned model for ONNX Runtime or OpenVINO.

The directory holds the model file, the tokenizer, config.json with the labels, README.md with
example code, and export.json with the measured error. It is written atomically, and running the
model needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.labelled.features import pad_id
from kdcli.data.sources import open_source
from kdcli.data.text.sentences import sentences
from kdcli.deploy.codebook import CODED_ROWS
from kdcli.deploy.environment import versions
from kdcli.deploy.export import FILES, RUNTIMES, add_second_names, recorded
from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.deploy.integer_training import ROWS
from kdcli.deploy.sessions import library
from kdcli.deploy.usable import Usable
from kdcli.disk import STAGED, check_writable, content_of, fill_dir, read_json, write_atomic
from kdcli.engine.inputs import check_no_foreign_files, check_not_input, texts_in
from kdcli.engine.run_dir import lock_directory, numbered
from kdcli.errors import MachineError, UsageError
from kdcli.messages import log
from kdcli.models.card import describe
from kdcli.models.cross_encoder import activation_of, standing_alone, with_own_settings
from kdcli.models.custom_class import custom_class, save_network
from kdcli.models.embedding_format import EmbeddingFormat, Pool, read_format, save_format
from kdcli.models.files import CONFIG_FILE, FACTS
from kdcli.models.heads import AUTO_CLASS, check_head, head_of, tokenizer_for, tuned_length
from kdcli.models.load import (
    load_config,
    load_tokenizer,
    load_weights,
    location,
    save_tokenizer,
    tidy_config,
)
from kdcli.models.model import TYPE_IDS, Model, training_rows, write_training_rows
from kdcli.models.shape import positions_of
from kdcli.models.static import is_static
from kdcli.report.text import bytes_of
from kdcli.report.views import short
from kdcli.run.context import cpu_session
from kdcli.types import OWN, task_name, task_title
from kdcli.verbs.export.export_check import (
    CALIBRATION_TEXTS,
    CheckTexts,
    ExportCheck,
    check_can_train,
    divide,
    texts_of_package,
    texts_of_task,
    with_calibration,
)
from kdcli.verbs.export.facts import ExportFacts, FileFacts, GatedFile
from kdcli.verbs.export.gate import write_gated
from kdcli.verbs.export.readme import (
    CONFIG_KEY,
    TYPED_TOKENIZERS,
    JsModel,
    default_dtype,
    difference_text,
    file_loss,
    readme,
)
from kdcli.workloads import open_evaluation
from kdcli.workloads.detect import task_of_model, training_of
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding_texts import column_of_texts
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.settings import LabelledSettings, PoolingName
from kdcli.workloads.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

TEXTS_COMPARED, VECTORS_COMPARED = 64, 256
NO_DATA = LabelledSettings()  # the texts of the package


def export(
    source: str,
    *,
    format: str,
    precisions: Sequence[str] = ("fp32",),
    data: LabelledSettings = NO_DATA,
    pooling: PoolingName | None = None,
    task: str | None = None,
    max_drop: float | None = None,
    of_run: bool = False,
    notes: Sequence[str] = (),
    exact: bool = False,
    steps: int = 0,
    weights: bool = False,
    output_dir: Path | None = None,
    overwrite: bool = False,
) -> Exported:
    """Export a model and compare each file with torch.

    An embedding model, or an encoder with `pooling`, gives vectors of texts. With `max_drop`,
    products stay in float32 until a file loses at most this many points of the first metric.

    Args:
        source: A hub id, a directory or `demo`.
        format: `onnx` or `openvino`.
        precisions: The precisions of the files. Of several, the first is `fp32`, and export.json
            has the others under `also`.
        data: The data on which each file is compared with torch; by default sentences
            that come with kdcli.
        pooling: How an encoder makes the vector of a text.
        task: The task on which the model and each file are scored.
        max_drop: The maximum drop of the task's first metric, in points.
        of_run: Whether task and data are those of the model's training run, which give texts to
            compare and no scores. If they cannot be read, sentences of kdcli replace them.
        notes: Lines for the log, after the arguments are checked.
        exact: Refuse an excess over `max_drop` of less than one row too.
        steps: The number of steps for which the integers of `int8-packed` are trained.
        weights: Write model.safetensors too.
        output_dir: The directory; by default runs/export-NAME-FORMAT, numbered.
        overwrite: Replace the export that the directory holds.

    Raises:
        UsageError: The format or a precision is unknown, the directory is not an export, or the
            model cannot be loaded or exported.
        GateError: A file loses too much.
        MachineError: A library is missing, the disk is full, or a file differs from torch.
    """
    if task is None and max_drop is not None and data.source is not None:
        task = task_of_model(source, data.source, pooling)
    check_request(format, precisions, task, max_drop)
    smaller = [precision for precision in precisions if precision != "fp32"]
    name = "-".join(["export", Path(short(source)).name, format, *smaller])
    folder = output_dir or numbered(name, taken=overwrite)
    sources = [source, *texts_in(data.model_dump())]
    check_folder(folder, overwrite, sources)
    log(*notes)
    load = _load_vectors if pooling is not None or read_format(source) is not None else _load_head
    loaded = load(source, pooling, CheckedRows(data, task, of_run, steps * ROWS))
    log(f"exporting {short(source)} to {format}, {', '.join(precisions)}")
    with lock_directory(folder):
        # Another process may have written here since the first check.
        check_folder(folder, overwrite, sources)
        with fill_dir(folder, last=FACTS, clear=True) as staged:
            files = _write_files(
                loaded, staged, format, precisions, max_drop, exact=exact, steps=steps
            )
            facts = _facts(loaded, source, format, files, staged)
            if task is not None and not of_run:
                rows = data.source and short(data.source)
                facts = facts.model_copy(update={"task": task, "data": rows})
            _write_rest(loaded, facts, source, staged, weights)
    return Exported(facts, folder)


def _write_files(
    loaded: _Loaded,
    staged: Path,
    format: str,
    precisions: Sequence[str],
    max_drop: float | None,
    *,
    exact: bool,
    steps: int,
) -> dict[str, GatedFile]:
    """Write a file in each precision. Returns the files by precision."""
    files = {}
    if "attention_mask" not in loaded.tokenizer.model_input_names:
        raise UsageError(
            f"the tokenizer of {loaded.tokenizer.name_or_path} returns no attention_mask, which "
            "an exported file reads",
            "add it to model_input_names in tokenizer_config.json, in a copy of the model",
        )
    token_types = TYPE_IDS in loaded.tokenizer.model_input_names
    with recorded(
        loaded.model, staged, format, precisions[0], pool=loaded.pool, token_types=token_types
    ) as graph:
        for precision in precisions:
            is_vectors = loaded.kind == EMBEDDING_KIND and precision != "fp32"
            scored = max_drop is not None or is_vectors
            files[precision] = write_gated(
                graph.at(precision, scored_on_text=scored),
                loaded.check,
                max_drop,
                exact=exact,
                steps=steps,
            )
    return files


def _facts(
    loaded: _Loaded, source: str, format: str, files: dict[str, GatedFile], staged: Path
) -> ExportFacts:
    """Return the content of export.json for files in a staged directory."""
    written = {precision: _parts(gated.file.path) for precision, gated in files.items()}
    main, *also = (
        FileFacts.of(
            precision,
            gated,
            notes=_notes(gated),
            size=sum(part.stat().st_size for part in written[precision]),
        )
        for precision, gated in files.items()
    )
    file = files[main.precision].file
    parts = sorted(part for parts in written.values() for part in parts)
    card = replace(
        describe(loaded.model, short(source), None),
        bytes=main.bytes,
        held_in=main.precision,
        sha256=_sha256(written[main.precision]),
    )
    return ExportFacts(
        **dict(main.model_copy(update={"notes": [*loaded.notes, *main.notes]})),
        source=short(source),
        format=format,
        architecture=type(loaded.model).__name__,
        kind=loaded.kind,
        inputs=list(file.inputs),
        outputs=list(file.outputs),
        files={part.relative_to(staged).as_posix(): part.stat().st_size for part in parts},
        card=card,
        also=also,
        trained_on=training_of(source),
        versions=versions()
        | {name: library(name, format).__version__ for name in RUNTIMES[format]},
    )


def _write_rest(
    loaded: _Loaded, facts: ExportFacts, source: str, staged: Path, weights: bool
) -> None:
    """Write the files next to the model files. export.json comes last."""
    model = loaded.model
    add_second_names(staged)
    save_network(model, staged, weights=weights)
    dtype = default_dtype([file.precision for file in facts.by_file])
    defaults = {CONFIG_KEY: {"dtype": dtype}} if facts.format == "onnx" and dtype else {}
    tidy_config(model, staged / CONFIG_FILE, defaults)
    if loaded.format is not None:
        static = is_static(model.config)
        fmt = replace(loaded.format, max_length=loaded.max_length)
        save_format(fmt, model.config.hidden_size, staged, static=static)
    save_tokenizer(loaded.tokenizer, staged)
    write_training_rows(staged, training_rows(location(source)))
    text = readme(facts, model, _js_model(loaded, facts), loaded.max_length, location(source))
    write_atomic(staged / "README.md", text)
    write_atomic(staged / FACTS, facts.to_json())


def _js_model(loaded: _Loaded, facts: ExportFacts) -> JsModel:
    """Return what decides how transformers.js runs the files."""
    tokenizer = type(loaded.tokenizer).__name__.removesuffix("Fast")
    return JsModel(
        kind=facts.kind,
        model_type=loaded.model.config.model_type,
        format=loaded.format,
        ranks=facts.kind == "score"
        and activation_of(facts.source, loaded.model.config) is not None,
        loses_types=TYPE_IDS in facts.inputs and tokenizer not in TYPED_TOKENIZERS,
    )


def _parts(file: Path) -> list[Path]:
    """Return a model file and the file of its weights, if the weights lie in a second file.

    This is `openvino_model.bin`, or `model.onnx.data` above 2 GB.
    """
    return sorted(
        part for part in file.parent.iterdir() if part.name.split(".")[0] == file.name.split(".")[0]
    )


def check_request(
    format: str, precisions: Sequence[str], task: str | None, max_drop: float | None
) -> None:
    """Check the arguments of `export` before a model is loaded.

    Raises:
        UsageError: The format has no such precision, or a bound is negative or has no task.
        MachineError: A library is missing.
    """
    for precision in precisions:
        if (format, precision) not in FILES:
            allowed = ", ".join(p for f, p in FILES if f == format)
            raise UsageError(f"{format} is not written in {precision}", f"allowed: {allowed}")
    for name in RUNTIMES[format]:
        library(name, format)
    if max_drop is not None and task is None:
        raise UsageError(
            "--max-drop needs a task to judge the file on", "add --task TASK [--data SOURCE]"
        )
    if max_drop is not None and not max_drop >= 0:
        raise UsageError(f"--max-drop must be at least 0 points, got {max_drop:g}")


@dataclass(frozen=True)
class _Loaded:
    """A model that is ready to export.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        kind: The kind of its head; `embedding` for vectors, None for an encoder without a head.
        notes: Sentences for the reader.
        check: Compares a file with the model.
        format: How vectors are made; None for a model that gives no vectors.
        max_length: The maximum number of tokens of a text; None for texts of any length.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: str | None
    notes: list[str]
    check: ExportCheck
    format: EmbeddingFormat | None = None
    max_length: int | None = None

    @property
    def pool(self) -> Pool | None:
        """The layer that turns hidden states into the vectors of texts."""
        return None if self.format is None else Pool(self.format).eval()


@dataclass(frozen=True)
class CheckedRows:
    """The rows on which an export is checked.

    Attributes:
        data: Where they are.
        task: The task that they are read for; None for plain texts, or for texts of kdcli.
        of_run: Whether they are the training run's, which are compared and not scored.
        most_trained: The maximum number of rows on which integers are trained.
    """

    data: LabelledSettings
    task: str | None
    of_run: bool
    most_trained: int


def _load_vectors(source: str, pooling: PoolingName | None, rows: CheckedRows) -> _Loaded:
    """Load an embedding model, or an encoder with a pooling."""
    embedder = Embedder.open(source, pooling=pooling, compacted=True)
    pad_id(embedder.tokenizer)
    texts, workload = _open_texts(rows, source, pooling, embedder.tokenizer, by_head=False)
    if workload is not None and workload.needs_reference:
        workload = workload.with_reference(embedder)
    max_length = limit_tokens(embedder.tokenizer, embedder.max_length)
    return _Loaded(
        embedder.model,
        embedder.tokenizer,
        EMBEDDING_KIND,
        [embedder.note],
        ExportCheck(embedder, None, texts, workload),
        embedder.format,
        max_length,
    )


def _load_head(source: str, _: str | None, rows: CheckedRows) -> _Loaded:
    """Load an encoder, or a model with the head that its config.json names.

    Raises:
        UsageError: There is a task, but no head.
    """
    config = load_config(source, compacted=True)
    tokenizer = load_tokenizer(source)
    pad_id(tokenizer)  # Texts are compared in padded batches.
    architecture = next(iter(config.architectures or ()), type(config).__name__)
    head = head_of(config)
    kind = head.kind if head is not None else None
    if rows.task is not None and kind is None and not rows.of_run:
        raise UsageError(
            f"{source} has no head for {task_title(rows.task)}",
            "--pooling makes an encoder an embedding model",
        )
    auto = custom_class(config) or (AUTO_CLASS[kind] if kind else AutoModel)
    network = load_weights(source, auto).eval()
    notes = []
    if kind is None and architecture != type(network).__name__:
        notes = [f"the head of {architecture} is left out: the file outputs the last hidden state"]
    positions = positions_of(network.config) or VERY_LARGE_INTEGER
    length = min(tokenizer.model_max_length, positions)
    model = standing_alone(Model(network, tokenizer, source, tuned_length=length))
    max_length = limit_tokens(tokenizer, model.tuned_length or length)
    texts, workload = _open_texts(rows, source, None, tokenizer, by_head=True)
    if isinstance(workload, LabelledWorkload):
        model = _model_of_task(model, workload)
    if workload is not None and workload.needs_reference:
        workload = workload.with_reference(model)
    check = ExportCheck(model, kind, texts, workload)
    return _Loaded(network, tokenizer, kind, notes, check, max_length=max_length)


def limit_tokens(tokenizer: PreTrainedTokenizerBase, length: int) -> int | None:
    """Make a tokenizer cut texts at a number of tokens, which the card states too.

    Returns:
        The number; None if it stands for texts of any length.
    """
    tokenizer.model_max_length = length
    return length if length < VERY_LARGE_INTEGER else None


def _open_texts(
    rows: CheckedRows,
    source: str,
    pooling: PoolingName | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    by_head: bool,
) -> tuple[CheckTexts, Workload | None]:
    """Return the texts of an export and the rows on which its files are scored, if there are any.

    Rows that trained the model are not scored.
    """
    try:
        texts, workload = _texts_and_scored(rows, source, pooling, tokenizer, by_head=by_head)
    except (UsageError, MachineError) as error:
        if not rows.of_run:
            raise
        log(f"the data of the run in {source} are not used: {error.message}")
        rows = replace(rows, data=NO_DATA, task=None, of_run=False)
        return _open_texts(rows, source, pooling, tokenizer, by_head=by_head)
    if rows.most_trained:
        check_can_train(texts, rows.most_trained)
    return texts, workload


def _texts_and_scored(
    rows: CheckedRows,
    source: str,
    pooling: PoolingName | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    by_head: bool,
) -> tuple[CheckTexts, Workload | None]:
    data, task = rows.data, rows.task
    most = TEXTS_COMPARED if by_head else VECTORS_COMPARED
    if task is not None:
        trained = {source: training_rows(location(source))}
        request = EvaluationRequest(task, [source], data, trained, pooling=pooling, by_head=by_head)
        workload = open_evaluation(request, cpu_session())
        texts = with_calibration(texts_of_task(request, workload.texts_of_rows()), tokenizer)
        texts = replace(texts, compared=texts.compared[:most])
        return texts, None if rows.of_run else workload
    if data.source is None:
        return texts_of_package(tokenizer, most), None
    account = RowAccount(data.source)
    placed = open_source(data.source).placed_documents("train", column_of_texts(data), account)
    documents = (document for _, document in placed)
    if not by_head:
        documents = (text for document in documents for text in sentences(document))
    most_calibration = max(CALIBRATION_TEXTS, rows.most_trained)
    texts = divide(documents, most, f"texts of {short(data.source)}", most_calibration)
    account.end_before(placed)
    ACCOUNTS.close(account, account.used)
    return with_calibration(texts, tokenizer), None


def _model_of_task(
    model: Model,
    workload: LabelledWorkload,
) -> Model:
    """Return the model with the tokenizer and the row length that its task uses.

    Raises:
        UsageError: The head is for another task.
    """
    task = workload.data.task
    check_head(model.source, model.model.config, task)
    of_words = task.kind == "tokens"
    tokenizer = tokenizer_for(model.source, of_words=of_words)
    length = tuned_length(model.model.config, tokenizer, task)
    rows = training_rows(location(model.source))
    return with_own_settings(Model(model.model, tokenizer, model.source, "", length, rows))


def _notes(gated: GatedFile) -> list[str]:
    """Return notes on the texts and the loss of a file, and on what it computes in float32."""
    notes = [f"compared with torch on {gated.compared_on}"]
    if gated.calibrated_on:
        notes[0] += f"; the integers were chosen on {gated.calibrated_on}, and no text is in both"
    if gated.nodes_in_float:
        notes.append(
            f"{gated.nodes_in_float} nodes are in float32, because some of their weights, or of "
            "their values on these texts, are too large for half precision"
        )
    if gated.kept_in == "int8":
        notes.append(
            f"its weights are stored packed, except for tables of fewer than {CODED_ROWS:,} rows. "
            "ONNX Runtime unpacks the weights when it opens the file; a runtime that does not fold "
            "constants unpacks them in every call, and is slow"
        )
    rows = {
        (scored.task, scored.set): f" on {scored.n:,} rows ({scored.split})"
        for scored in gated.comparison.scores
    }
    for row in gated.comparison.comparisons:
        # The card's readers are other people, for whom `your data` is another thing.
        task = "" if row.task == OWN else row.task
        lost = file_loss(row) + rows.get((row.task, row.set), "")
        notes.append(": ".join(filter(None, [f"{task} {row.set}".strip(), lost])))
    kept = [product for product in gated.products if product.is_kept]
    if kept:
        names = ", ".join(f"{product.name} ({product.error:.2g})" for product in kept)
        notes.append(
            f"{len(kept)} of {len(gated.products)} products are in {gated.kept_in}, by the error "
            f"that each alone causes: {names}. Their number was chosen on the compared rows"
        )
    return notes


def check_folder(folder: Path, overwrite: bool, sources: Sequence[str]) -> None:
    """Check that an export may be written to a directory.

    It may be new or empty, and with `overwrite` it may hold an earlier export.

    Raises:
        UsageError: The directory is a file, holds an input, holds no export but is not empty, or
            holds an export next to files that kdcli did not write.
    """
    check_writable(folder, directory=True)
    check_not_input(folder, sources, "the export")
    is_export = any(_is_export(place) for place in (folder, folder / STAGED))
    if folder.is_dir() and content_of(folder) and not (is_export and overwrite):
        raise UsageError(
            f"output directory {folder} is not empty",
            "--overwrite replaces its export; or choose another with -o"
            if is_export
            else "it holds no export of kdcli, so it is left alone; choose another with -o",
        )
    check_no_foreign_files(folder)


def _is_export(folder: Path) -> bool:
    """Whether a directory holds the facts of an export, and not another file of that name."""
    try:
        facts = read_json(folder / FACTS)
    except UsageError:
        return False
    return "format" in facts and "files" in facts


def _sha256(files: Iterable[Path]) -> str:
    """Return the hash of the files' contents, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


@dataclass(frozen=True)
class Exported(Usable):
    """The result of `kdcli export`.

    Attributes:
        facts: The content of export.json.
        folder: The directory of the export.
    """

    facts: ExportFacts = field(repr=False)
    folder: Path
    trust_remote_code: bool = False

    @property
    def best(self) -> Path:
        """The directory to ship."""
        return self.folder

    def to_json(self) -> str:
        """Return the content of export.json."""
        return self.facts.to_json()

    def to_frame(self) -> pd.DataFrame:
        """Return one row a file: its size, its difference from torch, and the scores of both."""
        import pandas as pd

        rows = []
        for file in self.facts.by_file:
            row: dict[str, object] = {
                "source": self.facts.source,
                "format": self.facts.format,
                "precision": file.precision,
                "max_abs": file.max_abs,
                "relative": file.relative,
                "bytes": file.bytes,
            }
            row |= file.agreement
            for scores in file.scores or ():
                task = f"{scores.task} {scores.set}".strip()
                row |= {f"{task} {name} torch": value for name, value in scores.torch.items()}
                row |= {f"{task} {name} file": value for name, value in scores.file.items()}
            rows.append(row)
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False))

    def renderables(self) -> Iterable[object]:
        """Return what the terminal shows: a table, notes, and the directory."""
        facts = self.facts
        table = Table("", "", show_header=False, box=None)
        table.add_row("source", facts.source)
        table.add_row("format", facts.format)
        table.add_row("inputs", ", ".join(facts.inputs))
        table.add_row("outputs", ", ".join(facts.outputs))
        for file in facts.by_file:
            table.add_row("precision", file.precision)
            table.add_row("size", bytes_of(file.bytes))
            table.add_row("next to torch", difference_text(file, facts.kind))
            for scores in file.scores or ():
                values = ", ".join(
                    f"{name} {value:.4f} (torch {scores.torch[name]:.4f})"
                    for name, value in scores.file.items()
                )
                table.add_row(task_name(scores.task), values)
        yield table
        yield from (note for file in facts.by_file for note in file.notes)
        yield f"model in {self.folder} (README.md shows how to run it)"
