"""Write README.md of an export: its inputs, its difference from torch, and example code."""

from pathlib import Path

from transformers import PreTrainedModel

from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.models.embedder import EmbeddingFormat
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.model import TYPE_IDS
from kdcli.report.front import EMBEDDER, PIPELINES, Score, front_matter
from kdcli.verbs.export.agreement import agreement_text
from kdcli.verbs.export.facts import ExportFacts, FileFacts
from kdcli.verbs.export.javascript import JsModel

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
"""Format -> code that loads a file and defines `run`, from arrays by name to a list of outputs."""

EXAMPLE_TEXTS = '["A first text.", "A second and somewhat longer one."]'
EXAMPLE_PAIRS = '["Where is it?"] * 2, ["It is in the house.", "A first text."]'
USE: dict[str | None, tuple[str, str]] = {
    EMBEDDING_KIND: (
        EXAMPLE_TEXTS,
        "_, vectors = run(inputs)  # of tokens, of texts\n{similarities}",
    ),
    None: (
        EXAMPLE_TEXTS,
        "(last_hidden_state,) = run(inputs)\nprint(last_hidden_state.shape)  # texts, tokens, "
        "width",
    ),
    "class": (
        EXAMPLE_TEXTS,
        "(logits,) = run(inputs)\nprint([labels[i] for i in logits.argmax(-1)])",
    ),
    "multi": (
        EXAMPLE_TEXTS,
        "(logits,) = run(inputs)\nprint([[labels[i] for i in (row > 0).nonzero()[0]] for row in "
        "logits])",
    ),
    "score": (EXAMPLE_TEXTS, "(logits,) = run(inputs)\nprint(logits[:, 0].tolist())"),
    "tokens": (
        EXAMPLE_TEXTS,
        "(logits,) = run(inputs)\nprint([[labels[i] for i in row] for row in logits.argmax(-1)])",
    ),
    "span": (
        '["Where is it?"], ["It is in the house."]',
        "start_logits, end_logits = run(inputs)\n"
        "begin, end = start_logits[0].argmax(), end_logits[0].argmax()\n"
        'print(tokenizer.decode(inputs["input_ids"][0][begin : end + 1]))',
    ),
}
"""Kind of the head (None: no head) -> texts to tokenise, and code that uses the inputs.

For an embedding model, the code has a place for the lines of `_similarities`.
"""

PIPELINE_BY_KIND = {kind: PIPELINES[auto.__name__] for kind, auto in AUTO_CLASS.items()} | {
    None: PIPELINES["AutoModel"],
    EMBEDDING_KIND: PIPELINES[EMBEDDER],
}
"""Kind of the head -> the hub's name of its task."""


def difference_text(file: FileFacts, kind: str | None) -> str:
    """Describe the difference between a file and torch."""
    text = agreement_text(file.agreement, kind)
    # The relative error of a quantised file says nothing about its predictions.
    return text + (
        f"; the largest difference is {file.gated.file.max_abs:.1e}"
        if file.precision == "fp32"
        else ""
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
    lines = list(facts.main.notes)
    for file in facts.also:
        difference = difference_text(file, facts.kind)
        lines += [f"`{facts.path_of(file)}`, {file.precision}: {difference}", *file.notes]
    notes = "".join(f"\n* {line}" for line in lines)
    install = {"onnx": "onnxruntime", "openvino": "openvino"}[facts.format]
    model_type = model.config.model_type
    library, pipeline, tags = _hub_library(facts, js)
    script = _script(js.code(facts.main.precision)) if facts.format == "onnx" else ""
    front = front_matter(
        f"{Path(facts.source).name}-{facts.format}-{'-'.join(precisions)}",
        base=source,
        relation="quantized" if precisions != ["fp32"] else None,
        library=library,
        tags=["kdcli", facts.format, *precisions, model_type, *tags],
        pipeline=pipeline,
        task=facts.task,
        data=facts.data,
        scores=[Score(row.task, row.set, row.split, row.file) for row in facts.main.scores],
    )
    return f"""---
{front}
---
# {facts.source} as {facts.format}, {", ".join(precisions)}

{facts.architecture}, exported by kdcli. Any batch size.

* length: {_length(max_length)}
* inputs: {", ".join(facts.inputs)}
* outputs: {", ".join(facts.outputs)}
* next to torch in float32: {difference_text(facts.main, facts.kind)}{notes}

`pip install {install} transformers`, then in this directory:

```python
{_code(facts, js, max_length)}
```
{script}"""


def _length(max_length: int | None) -> str:
    """Describe how much of a text the model reads."""
    if max_length is None:
        return "any number of tokens"
    return f"at most {max_length} tokens, special tokens included; the tokenizer cuts longer texts"


def _hub_library(facts: ExportFacts, js: JsModel) -> tuple[str, str, list[str]]:
    """Return the library and the task in the front matter of the card, and additional tags."""
    task = PIPELINE_BY_KIND[facts.kind]
    if facts.format != "onnx":
        return "openvino", task, []
    if not js.has_pipeline:
        return "onnx", task, []
    # The hub shows a snippet with this library's `pipeline` and the card's task.
    return "transformers.js", js.task, [task] if js.task != task else []


def _script(code: str) -> str:
    """Return the section of the card with code for transformers.js."""
    return f"""
With transformers.js (`npm install @huggingface/transformers`):

```js
{code}
```
"""


def _similarities(model: EmbeddingFormat) -> str:
    """Return code that prints the similarities of the texts' vectors."""
    if model.normalize:
        return "print((vectors @ vectors.T).tolist())  # cosines"
    if model.similarity == "dot":
        return "print((vectors @ vectors.T).tolist())  # dot products"
    if model.similarity != "cosine":
        manhattan = "abs(differences).sum(axis=-1)"
        euclidean = "((differences**2).sum(axis=-1) ** 0.5)"
        distances = euclidean if model.similarity == "euclidean" else manhattan
        return (
            "differences = vectors[:, None] - vectors[None]\n"
            f"print({distances}.tolist())  # distances"
        )
    return (
        "vectors /= (vectors**2).sum(axis=1, keepdims=True) ** 0.5\n"
        "print((vectors @ vectors.T).tolist())  # cosines"
    )


def _code(facts: ExportFacts, js: JsModel, max_length: int | None) -> str:
    """Return code that loads the main file and runs it on example texts."""
    texts, use = USE[facts.kind]
    if js.ranks:
        texts = EXAMPLE_PAIRS
    if js.format is not None:
        use = use.format(similarities=_similarities(js.format))
    has_labels = "labels[" in use
    imports = "from transformers import " + "AutoConfig, " * has_labels + "AutoTokenizer\n"
    labels = ['labels = AutoConfig.from_pretrained(".").id2label'] if has_labels else []
    options = ["truncation=True", f"max_length={max_length}"] if max_length else []
    options.append("padding=True")
    reads_types = TYPE_IDS in facts.inputs
    options += ["return_token_type_ids=True"] if reads_types and js.returns_types else []
    inputs = f'inputs = tokenizer({texts}, {", ".join(options)}, return_tensors="np")'
    if reads_types and not js.returns_types:
        inputs += f'\ninputs["{TYPE_IDS}"] = 0 * inputs["input_ids"]'
    load = OPEN[facts.format].format(imports=imports, file=facts.path_of(facts.main))
    return "\n".join([load, *labels, inputs, use])
