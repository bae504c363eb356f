"""`kdcli export`: an encoder or a fine-tuned model as a directory for ONNX Runtime or OpenVINO, without torch.

The directory holds the model file, the tokenizer, config.json with the labels, README.md with example code, and
export.json with the measured error. It is written atomically.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.backends.export import EXACT, LIMITS, export_onnx, export_openvino
from kdcli.backends.exported import EMBEDDING, FACTS, file_in
from kdcli.backends.runners import engine_runner
from kdcli.backends.sessions import library, onnx_caller, openvino_caller
from kdcli.bench.environment import versions
from kdcli.commands.export.agreement import agreement, said
from kdcli.commands.export.vectors import VectorsFile, judged_on, judged_texts
from kdcli.data.files import open_source
from kdcli.disk import STAGED, check_writable, content_of, fill_dir, write_atomic
from kdcli.downstream.embedder import Embedder
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.card import describe
from kdcli.models.custom_class import custom_class
from kdcli.models.embedder import read_format, save_format
from kdcli.models.heads import AUTO_CLASS, PROBLEM, kind_of_head
from kdcli.models.load import load_config, load_tokenizer, load_weights, location, save_tokenizer
from kdcli.models.shape import positions_of
from kdcli.models.training_rows import training_rows, write_training_rows
from kdcli.report.text import bytes_of
from kdcli.report.views import short
from kdcli.training.progress import Progress
from kdcli.training.run_dir import numbered
from kdcli.types import Kind

FORMATS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
"""Format -> libraries it needs."""
OPEN = {
    "onnx": """import onnxruntime
{imports}
tokenizer = AutoTokenizer.from_pretrained(".")
session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])


def run(inputs):
    return session.run(None, {{i.name: inputs[i.name] for i in session.get_inputs()}})

""",
    "openvino": """import openvino
{imports}
tokenizer = AutoTokenizer.from_pretrained(".")
# By default OpenVINO computes in lower precision if the processor has one.
model = openvino.Core().compile_model("{file}", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})


def run(inputs):
    return list(model({{i.any_name: inputs[i.any_name] for i in model.inputs}}).values())

""",
}
"""Format -> code that loads a file and defines `run`: arrays by name -> list of outputs."""

TEXTS_COMPARED = 64
TEXTS = '["A first text.", "A second and somewhat longer one."]'
USE: dict[str | None, tuple[str, str]] = {
    EMBEDDING: (TEXTS, "_, vectors = run(inputs)  # of tokens, of texts\nprint((vectors @ vectors.T).tolist())"),
    None: (TEXTS, "(last_hidden_state,) = run(inputs)\nprint(last_hidden_state.shape)  # texts, tokens, width"),
    "class": (TEXTS, "(logits,) = run(inputs)\nprint([labels[i] for i in logits.argmax(-1)])"),
    "multi": (TEXTS, "(logits,) = run(inputs)\nprint([[labels[i] for i in (row > 0).nonzero()[0]] for row in logits])"),
    "score": (TEXTS, "(logits,) = run(inputs)\nprint(logits[:, 0].tolist())"),
    "tokens": (TEXTS, "(logits,) = run(inputs)\nprint([[labels[i] for i in row] for row in logits.argmax(-1)])"),
    "span": (
        '["Where is it?"], ["It is in the house."]',
        "start_logits, end_logits = run(inputs)\n"
        "begin, end = start_logits[0].argmax(), end_logits[0].argmax()\n"
        'print(tokenizer.decode(inputs["input_ids"][0][begin : end + 1]))',
    ),
}
"""Kind of the head (None: no head) -> the tokenised texts, and the code that uses the inputs."""


@dataclass(frozen=True)
class Exported:
    """The result of `kdcli export`; `facts` as in export.json."""

    facts: dict[str, Any]
    folder: Path

    def to_json(self) -> str:
        return json.dumps(self.facts, indent=2)

    def renderables(self) -> Iterable[Any]:
        table = Table("", "", show_header=False, box=None)
        for key in ("source", "format", "precision"):
            table.add_row(key, self.facts[key])
        table.add_row("inputs", ", ".join(self.facts["inputs"]))
        table.add_row("outputs", ", ".join(self.facts["outputs"]))
        table.add_row("size", bytes_of(sum(self.facts["files"].values())))
        table.add_row("beside torch", _error(self.facts))
        for row in self.facts.get("scores", ()):
            values = ", ".join(f"{m} {v:.4f} (torch {row['torch'][m]:.4f})" for m, v in row["file"].items())
            table.add_row(row["task"], values)
        yield table
        yield from self.facts["notes"]
        yield f"model in {self.folder} (README.md shows how to run it)"


def run(
    source: str,
    *,
    format: str,
    int8: bool,
    data: str | None = None,
    pooling: str | None = None,
    task: str | None = None,
    output_dir: Path | None,
    overwrite: bool,
    trust_remote_code: bool,
) -> Exported:
    """Export a model (hub id, directory or `demo`) and compare the file with torch; `int8` quantises weights and
    activations. An embedding model, or an encoder with `pooling`, gives vectors of texts. `data`: text on which
    predictions are compared, by default the demo's; with `task` the data on which vectors are judged. `output_dir` is
    by default runs/export-NAME-FORMAT, numbered; `overwrite` replaces an export there. Raises UsageError: unknown
    format, a directory that is not an export, a model that cannot be loaded or exported; MachineError: a library is
    missing, the disk is full, or the file differs from torch."""
    if format not in FORMATS:
        raise UsageError(f"unknown format '{format}'{did_you_mean(format, FORMATS)}", f"allowed: {', '.join(FORMATS)}")
    for name in FORMATS[format]:
        library(name, format)
    precision = "int8" if int8 else "fp32"
    name = f"export-{Path(short(source)).name}-{format}" + ("-int8" if int8 else "")
    folder = output_dir or numbered(name, taken=overwrite)
    check_folder(folder, overwrite)
    how = {"trust_remote_code": trust_remote_code}
    if pooling is None and read_format(source) is None:
        if task is not None:
            hint = "--pooling makes an encoder one; kdcli evaluate judges an export with a head"
            raise UsageError(f"--task judges embedding models; {source} has no modules.json", hint)
        texts = list(itertools.islice(open_source(data or "demo").documents("train", None), TEXTS_COMPARED))
        model, tokenizer, kind, notes = _load(source, trust_remote_code)
        vectors = None
    else:
        embedder = Embedder.open(source, pooling=pooling, compacted=True, **how)
        model, tokenizer, kind, notes = embedder.model, embedder.tokenizer, None, [embedder.note]
        judged = judged_on(task, data, source)
        texts = judged_texts(judged, data)
        vectors = VectorsFile(embedder, format, int8, texts, judged)
    Progress.log(f"exporting {short(source)} to {format}, {precision}")
    with fill_dir(folder, last=FACTS, clear=True) as aside:
        if vectors is None:
            file = {"onnx": export_onnx, "openvino": export_openvino}[format](model, aside, int8=int8)
            found: dict[str, Any] = {"agreement": _compared(file.path, format, model, tokenizer, kind, texts)}
        else:
            file, found = vectors.write(aside)
            notes += found.pop("notes")
        facts: dict[str, Any] = {"source": short(source), "format": format, "precision": precision}
        named = kind if vectors is None else EMBEDDING
        facts |= {"architecture": type(model).__name__, "kind": named}
        facts |= {"inputs": list(file.inputs), "outputs": list(file.outputs)}
        written = sorted(f for f in aside.rglob("*") if f.is_file())
        facts["files"] = {f.relative_to(aside).as_posix(): f.stat().st_size for f in written}
        card = describe(model, short(source), None) | {"bytes": sum(facts["files"].values()), "held_in": precision}
        facts["card"] = card | {"sha256": _sha256(written)}
        facts |= {"max_abs": file.max_abs, "relative": file.relative, **found}
        facts["limits"] = {"max_abs": None if int8 else EXACT, "relative": LIMITS[precision]}
        facts["notes"] = notes
        facts["versions"] = versions() | {name: library(name, format).__version__ for name in FORMATS[format]}
        model.config.save_pretrained(aside)
        if vectors is not None:
            save_format(vectors.format, model.config.hidden_size, aside)
            tokenizer.model_max_length = vectors.embedder.max_length
        save_tokenizer(tokenizer, aside)
        write_training_rows(aside, training_rows(location(source)))
        write_atomic(
            aside / "README.md", _readme(facts, model, named, vectors.embedder.max_length if vectors else None)
        )
        write_atomic(aside / FACTS, json.dumps(facts, indent=2))
    return Exported(facts, folder)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Allow a new or empty directory, and with `overwrite` an earlier export. Raises UsageError: a file, or another
    directory that is not empty."""
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
    """The model with the head that its config.json names, its tokenizer, the kind of the head, and notes."""
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
    notes = [f"the head of {architecture} is left out: the file outputs the last hidden state"] if headless else []
    return model, tokenizer, kind, notes


def _compared(
    file: Path,
    format: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind | None,
    texts: Sequence[str],
) -> dict[str, float]:
    load = {"onnx": onnx_caller, "openvino": openvino_caller}[format]
    return agreement(model, tokenizer, engine_runner(load(file, threads=0)), kind, texts)


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def _error(facts: dict[str, Any]) -> str:
    # What a quantised file's relative error means for its predictions nobody can tell.
    exact = f"; the largest difference is {facts['max_abs']:.1e}" if facts["precision"] == "fp32" else ""
    return said(facts["agreement"], facts["kind"]) + exact


def _readme(facts: dict[str, Any], model: PreTrainedModel, kind: str | None, most: int | None) -> str:
    """Title, inputs, outputs, error and example code of the directory."""
    texts, rest = USE[kind]
    positions = most or positions_of(model.config)
    options = [*(["truncation=True", f"max_length={positions}"] if positions else []), "padding=True"]
    options += ["return_token_type_ids=True"] if "token_type_ids" in facts["inputs"] else []
    labelled = "labels[" in rest
    imports = "from transformers import " + ("AutoConfig, " * labelled) + "AutoTokenizer\n"
    labels = ['labels = AutoConfig.from_pretrained(".").id2label'] if labelled else []
    inputs = f'inputs = tokenizer({texts}, {", ".join(options)}, return_tensors="np")'
    code = "\n".join([OPEN[facts["format"]].format(imports=imports, file=file_in(facts)), *labels, inputs, rest])
    install = {"onnx": "onnxruntime", "openvino": "openvino"}[facts["format"]]
    notes = "".join(f"\n* {note}" for note in facts["notes"])
    return f"""# {facts["source"]} as {facts["format"]}, {facts["precision"]}

{facts["architecture"]}, exported by kdcli. Any batch size and length.

* inputs: {", ".join(facts["inputs"])}
* outputs: {", ".join(facts["outputs"])}
* beside torch in float32: {_error(facts)}{notes}

`pip install {install} transformers`, then in this directory:

```python
{code}
```
"""
