"""Provide transformers.js with the dtype that selects a file, and write example code."""

from collections.abc import Sequence
from dataclasses import dataclass

from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.models.heads import AUTO_CLASS
from kdcli.report.front import PIPELINES, template

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
