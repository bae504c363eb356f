"""Write README.md of an export: its inputs, its difference from torch, and example code."""

from pathlib import Path

from transformers import PreTrainedModel

from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.static import is_static
from kdcli.report.front import EMBEDDER, PIPELINES, Score, front_matter, template
from kdcli.report.schema import Comparison
from kdcli.report.sections.summary import card_sentence, change_text
from kdcli.report.text import model_size, plain, short
from kdcli.verbs.export.export_check import agreement_text
from kdcli.verbs.export.facts import ExportFacts, FileFacts
from kdcli.verbs.export.javascript import JsModel

PIPELINE_BY_KIND = {kind: PIPELINES[auto.__name__] for kind, auto in AUTO_CLASS.items()} | {
    None: PIPELINES["AutoModel"],
    EMBEDDING_KIND: PIPELINES[EMBEDDER],
}
"""Kind of the head -> the hub's name of its task."""


LIBRARIES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
"""Format -> the library that runs it."""


def file_loss(row: Comparison) -> str:
    """Write what a file loses or gains compared with torch, with the interval, as a predicate."""
    return change_text(row, f"{row.metric} compared with torch")


def _file_facts(facts: ExportFacts) -> list[str]:
    """Return what the main file loses compared with torch, and its size."""
    lost = [
        f"{file_loss(row)} on {scored.n:,} rows"
        for row in (facts.comparisons or [])[:1]
        for scored in (facts.scores or [])[:1]
    ]
    return [*lost, f"takes {model_size(facts.bytes)}"]


def difference_text(file: FileFacts, kind: str | None) -> str:
    """Describe the difference between a file and torch."""
    text = agreement_text(file.agreement, kind)
    # The relative error of a quantised file says nothing about its predictions.
    return text + (
        f"; the largest difference is {file.max_abs:.1e}" if file.precision == "fp32" else ""
    )


def readme(
    facts: ExportFacts,
    model: PreTrainedModel,
    js: JsModel,
    max_length: int | None,
    source: str,
) -> str:
    """Return README.md: front matter, title, inputs, outputs, difference and example code.

    Args:
        facts: The content of export.json.
        model: The exported model.
        js: How transformers.js runs it.
        max_length: The maximum number of tokens of a text; None for texts of any length.
        source: The hub id or directory of the model.
    """
    precisions = [file.precision for file in facts.by_file]
    pipeline, tags = PIPELINE_BY_KIND[facts.kind], []
    if facts.format == "onnx" and js.has_pipeline:
        # With this tag, the hub also shows a snippet with the card's task in JavaScript.
        tags = ["transformers.js", *([pipeline] if js.task != pipeline else [])]
        pipeline = js.task
    quantized = ["quantized"] if set(precisions) - {"fp32", "fp16"} else []
    front = front_matter(
        f"{Path(facts.source).name}-{facts.format}-{'-'.join(precisions)}",
        base=source,
        relation="quantized" if quantized else None,
        library=facts.format,
        tags=["kdcli", facts.format, *precisions, model.config.model_type, *quantized, *tags],
        pipeline=pipeline,
        task=facts.task,
        data=facts.data,
        scores=[Score(row.task, row.set, row.split, row.file) for row in facts.scores or ()],
    )
    return template("kdcli.verbs.export", "readme.md.jinja").render(
        front=front,
        sentence=card_sentence(
            f"exported from {short(facts.source)} by kdcli",
            _file_facts(facts),
            LIBRARIES[facts.format],
        ),
        title=f"{short(facts.source)} for {LIBRARIES[facts.format]}, {', '.join(precisions)}",
        plain=plain,
        facts=facts,
        precisions=precisions,
        js=js,
        has_encoder=js.format is not None and not is_static(model.config),
        max_length=max_length,
        difference_text=difference_text,
    )
