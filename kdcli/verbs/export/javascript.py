"""Provide transformers.js with the dtype that selects a file, and write example code."""

from collections.abc import Sequence

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
JS_TEXTS = '["A first text.", "A second and somewhat longer one."]'
PAIR = '"Where is it?"', '"It is in the house."'
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


def has_pipeline(kind: str | None, model_type: str) -> bool:
    """Return whether `pipeline` of transformers.js loads the model."""
    return model_type not in UNKNOWN_TYPES[JS_TASKS[kind]]


def javascript(
    kind: str | None, model_type: str, precision: str, fmt: EmbeddingFormat | None
) -> str:
    """Return code that loads a file with transformers.js and runs it on example texts.

    The code uses `pipeline` if its results equal the file's outputs, and `AutoModel` otherwise.

    Args:
        kind: The kind of the head; `embedding` for vectors, None for an encoder without a head.
        model_type: The type of the model.
        precision: The precision of the file.
        fmt: How vectors are made; None for a model that gives no vectors.
    """
    dtype = JS_DTYPES[precision]
    pooled = fmt is not None and fmt.dense is None and fmt.pooling in JS_POOLINGS
    # The pipeline takes the softmax of a single score, which is 1 for every text.
    piped = (
        kind != "score" and has_pipeline(kind, model_type) and (kind != EMBEDDING_KIND or pooled)
    )
    if piped:
        arguments, shown = JS_TEXTS, "output"
        if kind == EMBEDDING_KIND:
            assert fmt is not None
            normalize = "true" if fmt.normalize else "false"
            arguments += f', {{ pooling: "{fmt.pooling}", normalize: {normalize} }}'
        if kind in (EMBEDDING_KIND, None):
            shown = "output.tolist()" if kind == EMBEDDING_KIND else "output.dims"
        elif kind == "multi":
            arguments += ", { top_k: null }"
        elif kind == "span":
            arguments = ", ".join(PAIR)
        return JS_PIPELINE.format(
            task=JS_TASKS[kind], dtype=dtype, arguments=arguments, shown=shown
        )
    arguments, outputs, shown = f"{JS_TEXTS}, {{ ", "logits", "logits.tolist()"
    if kind == EMBEDDING_KIND:
        outputs, shown = "sentence_embedding", "sentence_embedding.tolist()"
    elif kind == "span":
        question, context = PAIR
        arguments = f"{question}, {{ text_pair: {context}, "
        outputs, shown = "start_logits, end_logits", "start_logits.tolist(), end_logits.tolist()"
    return AUTO_MODEL.format(dtype=dtype, arguments=arguments, outputs=outputs, shown=shown)
