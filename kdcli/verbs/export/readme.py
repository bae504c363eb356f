"""Write README.md of an export: its inputs, its difference from torch, and example code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from kdcli.deploy.export import SECOND_NAMES
from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.static import is_static
from kdcli.report.front import EMBEDDER, PIPELINES, Score, front_matter, template
from kdcli.report.schema import Comparison
from kdcli.report.sections.summary import card_sentence, change_text
from kdcli.report.text import bytes_of, plain, short
from kdcli.verbs.export.export_check import agreement_text
from kdcli.verbs.export.facts import ExportFacts, FileFacts

CONFIG_KEY = "transformers.js_config"
"""The key of config.json that holds the defaults of transformers.js."""
JS_DTYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "q8", "int8-packed": "q8", "q4": "q4"}
"""Precision -> the dtype with which transformers.js opens its file."""
DEFAULT_DTYPES = {"fp32", "q8"}
"""The dtypes that transformers.js opens if none is named: float32 in Node, int8 in browsers."""
JS_POOLINGS = ("mean", "cls")
"""The poolings of the `feature-extraction` pipeline that do not read padding."""
JS_TASKS: dict[str | None, str] = {
    None: PIPELINES["AutoModel"],
    EMBEDDING_KIND: PIPELINES["AutoModel"],
    **{kind: PIPELINES[auto.__name__] for kind, auto in AUTO_CLASS.items()},
}
"""Kind of the head (None: no head) -> the task of transformers.js."""
REFUSED_TYPES = frozenset(
    {
        "ernie",
        "splinter",
        "xlm-roberta-xl",
        "data2vec-text",
        "roberta-prelayernorm",
        "nomic_bert",
        "megatron-bert",
        "rembert",
    }
)
UNKNOWN_TYPES = {
    "feature-extraction": frozenset[str](),
    "text-classification": REFUSED_TYPES,
    "token-classification": REFUSED_TYPES | {"mobilebert", "albert"},
    "question-answering": REFUSED_TYPES | {"esm", "modernbert", "eurobert"},
}
"""Task -> the model types that the pipeline of transformers.js 4.3 refuses.

`AutoModel` runs every type.
"""
TYPED_TOKENIZERS = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Albert",
        "Bert",
        "ConvBert",
        "Deberta",
        "DebertaV2",
        "Electra",
        "Herbert",
        "MobileBert",
        "RoFormer",
        "SqueezeBert",
        "XLM",
    )
)
"""The tokenizers of transformers.js 4.3 that return token types without being asked.

With any other class, the types of a pair's second text are 0 instead of 1.
"""


def default_dtype(precisions: Sequence[str]) -> str | None:
    """Return the dtype that config.json must name, so that users of transformers.js need not.

    It is None if there is a file for the default dtype of every device.

    Args:
        precisions: The precisions of the files, the main file first.
    """
    dtypes = [JS_DTYPES[precision] for precision in precisions]
    return None if set(dtypes) >= DEFAULT_DTYPES else dtypes[0]


@dataclass(frozen=True)
class JsModel:
    """The facts that decide how transformers.js runs an export.

    Attributes:
        kind: The kind of the head; `embedding` for vectors, None for an encoder without a head.
        model_type: The type of the model.
        format: How vectors are made; None for a model that gives no vectors.
        ranks: The model scores pairs of texts, as rerankers do.
        loses_types: The file reads token types, which transformers.js does not return unless asked.
    """

    kind: str | None
    model_type: str
    format: EmbeddingFormat | None = None
    ranks: bool = False
    loses_types: bool = False

    @property
    def task(self) -> str:
        """The task of transformers.js."""
        return JS_TASKS[self.kind]

    @property
    def has_pipeline(self) -> bool:
        """Whether `pipeline` loads the model, and feeds the file what it was trained on."""
        reads_pairs = self.kind == "span"
        known = self.model_type not in UNKNOWN_TYPES[self.task]
        return known and not (reads_pairs and self.loses_types)

    @property
    def equals_pipeline(self) -> bool:
        """Whether the results of `pipeline` equal the outputs of the file, up to normalisation."""
        # The pipeline takes the softmax of a single score, which is 1 for every text.
        if self.kind == "score" or not self.has_pipeline:
            return False
        way = self.format
        return way is None or (not way.layers and way.pooling in JS_POOLINGS)

    def code(self, precision: str) -> str:
        """Return code that loads the file of a precision and runs it on example texts.

        The code uses `pipeline` if its results equal the outputs of the file, and `AutoModel`
        otherwise.
        """
        way = self.format
        # The dot products of vectors of length 1 are cosines.
        unit_vectors = way is not None and (way.normalize or way.similarity == "cosine")
        page = template("kdcli.verbs.export", "javascript.js.jinja")
        return page.render(js=self, dtype=JS_DTYPES[precision], unit_vectors=unit_vectors)


PIPELINE_BY_KIND = {kind: PIPELINES[auto.__name__] for kind, auto in AUTO_CLASS.items()} | {
    None: PIPELINES["AutoModel"],
    EMBEDDING_KIND: PIPELINES[EMBEDDER],
}
"""Kind of the head -> the hub's name of its task."""


LIBRARIES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
"""Format -> the library that runs it."""


def file_loss(row: Comparison) -> str:
    """Write what a file loses or gains compared with torch, with the interval, as a predicate."""
    return change_text(row, f"{row.metric} compared with the same model in torch")


def _file_facts(facts: ExportFacts) -> list[str]:
    """Return what the main file loses compared with torch, and its size."""
    lost = [
        f"{file_loss(row)} on {scored.n:,} rows"
        for row in (facts.comparisons or [])[:1]
        for scored in (facts.scores or [])[:1]
    ]
    return [*lost, f"takes {bytes_of(facts.bytes)}"]


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
        files=[facts.path_of(file) for file in facts.by_file],
        second_names=SECOND_NAMES,
    )
