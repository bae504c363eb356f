"""Provide transformers.js with the dtype that selects a file, and write example code."""

from collections.abc import Sequence
from dataclasses import dataclass

from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.models.embedder import EmbeddingFormat
from kdcli.models.heads import AUTO_CLASS
from kdcli.report.front import PIPELINES

CONFIG_KEY = "transformers.js_config"
"""The key of config.json that holds the defaults of transformers.js."""
JS_DTYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "q8", "q4": "q4"}
"""Precision -> the dtype with which transformers.js opens its file."""
DEFAULT_PRECISIONS = {"fp32", "int8"}
"""The precisions that transformers.js opens without a dtype: float32 in Node, int8 in browsers."""
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
JS_TEXTS = '["A first text.", "A second and somewhat longer one."]'
PAIR = '"Where is it?"', '"It is in the house."'
JS_PAIRS = '["Where is it?", "Where is it?"]', '["It is in the house.", "A first text."]'
JS_PIPELINE = """import {{ pipeline }} from "@huggingface/transformers";

const model = "./"; // this directory, or OWNER/NAME on the hub
const run = await pipeline("{task}", model, {{ dtype: "{dtype}" }});
const output = await run({arguments});
console.log({shown});"""
AUTO_MODEL = """import {{ AutoModel, AutoTokenizer }} from "@huggingface/transformers";

const name = "./"; // this directory, or OWNER/NAME on the hub
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, {{ dtype: "{dtype}" }});
const inputs = tokenizer({arguments}padding: true, truncation: true }});
const {{ {outputs} }} = await model(inputs);
console.log({shown});"""


def default_dtype(precisions: Sequence[str]) -> str | None:
    """Return the dtype that config.json must name, so that users of transformers.js need not.

    It is None if there is a file for the default dtype of every device.

    Args:
        precisions: The precisions of the files, the main file first.
    """
    return None if set(precisions) >= DEFAULT_PRECISIONS else JS_DTYPES[precisions[0]]


@dataclass(frozen=True)
class JsModel:
    """What decides how transformers.js runs an export.

    Attributes:
        kind: The kind of the head; `embedding` for vectors, None for an encoder without a head.
        model_type: The type of the model.
        format: How vectors are made; None for a model that gives no vectors.
        ranks: The model scores pairs of texts, as rerankers do.
        loses_types: The file reads token types, which transformers.js does not return unless asked.
        returns_types: The tokenizer returns token types, which the model was trained with.
    """

    kind: str | None
    model_type: str
    format: EmbeddingFormat | None = None
    ranks: bool = False
    loses_types: bool = False
    returns_types: bool = True

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
    def _equals_pipeline(self) -> bool:
        """Whether the results of `pipeline` equal the outputs of the file, up to normalisation."""
        # The pipeline takes the softmax of a single score, which is 1 for every text.
        if self.kind == "score" or not self.has_pipeline:
            return False
        pooled = (
            self.format is not None
            and self.format.dense is None
            and self.format.pooling in JS_POOLINGS
        )
        return pooled or self.kind != EMBEDDING_KIND

    @property
    def _shows_unit_vectors(self) -> bool:
        """Whether the code prints vectors of length 1, whose dot products are cosines."""
        return self.format is not None and (
            self.format.normalize or self.format.similarity == "cosine"
        )

    def code(self, precision: str) -> str:
        """Return code that loads the file of a precision and runs it on example texts.

        The code uses `pipeline` if its results equal the outputs of the file, and `AutoModel`
        otherwise.
        """
        dtype = JS_DTYPES[precision]
        if not self._equals_pipeline:
            return self._auto_model(dtype)
        arguments, shown = JS_TEXTS, "output"
        if self.kind == EMBEDDING_KIND:
            assert self.format is not None
            normalize = "true" if self._shows_unit_vectors else "false"
            arguments += f', {{ pooling: "{self.format.pooling}", normalize: {normalize} }}'
        if self.kind in (EMBEDDING_KIND, None):
            shown = "output.tolist()" if self.kind == EMBEDDING_KIND else "output.dims"
        elif self.kind == "multi":
            arguments += ", { top_k: null }"
        elif self.kind == "span":
            arguments = ", ".join(PAIR)
        return JS_PIPELINE.format(task=self.task, dtype=dtype, arguments=arguments, shown=shown)

    def _auto_model(self, dtype: str) -> str:
        """Return code that runs the file with `AutoModel`."""
        texts, outputs, shown = f"{JS_TEXTS}, {{ ", "logits", "logits.tolist()"
        if self.kind == EMBEDDING_KIND:
            assert self.format is not None
            scaled = self._shows_unit_vectors and not self.format.normalize
            outputs = "sentence_embedding"
            shown = f"{outputs}{'.normalize(2, -1)' * scaled}.tolist()"
        if self.kind == "span" or self.ranks:
            first, second = JS_PAIRS if self.ranks else PAIR
            types = "return_token_type_ids: true, " if self.loses_types else ""
            texts = f"{first}, {{\n  text_pair: {second}, {types}"
        if self.kind == "span":
            outputs = "start_logits, end_logits"
            shown = "start_logits.tolist(), end_logits.tolist()"
        return AUTO_MODEL.format(dtype=dtype, arguments=texts, outputs=outputs, shown=shown)
