"""README.md of an export: what it is, how far it is from torch, and the lines that run it."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kdcli.deploy.exported import EMBEDDING, file_in
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.shape import positions_of
from kdcli.report.front import EMBEDDER, PIPELINES, Score, front_matter
from kdcli.verbs.export.agreement import said

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

TEXTS = '["A first text.", "A second and somewhat longer one."]'
USE: dict[str | None, tuple[str, str]] = {
    EMBEDDING: (
        TEXTS,
        "_, vectors = run(inputs)  # of tokens, of texts\nprint((vectors @ vectors.T).tolist())",
    ),
    None: (
        TEXTS,
        "(last_hidden_state,) = run(inputs)\nprint(last_hidden_state.shape)  # texts, tokens, "
        "width",
    ),
    "class": (TEXTS, "(logits,) = run(inputs)\nprint([labels[i] for i in logits.argmax(-1)])"),
    "multi": (
        TEXTS,
        "(logits,) = run(inputs)\nprint([[labels[i] for i in (row > 0).nonzero()[0]] for row in "
        "logits])",
    ),
    "score": (TEXTS, "(logits,) = run(inputs)\nprint(logits[:, 0].tolist())"),
    "tokens": (
        TEXTS,
        "(logits,) = run(inputs)\nprint([[labels[i] for i in row] for row in logits.argmax(-1)])",
    ),
    "span": (
        '["Where is it?"], ["It is in the house."]',
        "start_logits, end_logits = run(inputs)\n"
        "begin, end = start_logits[0].argmax(), end_logits[0].argmax()\n"
        'print(tokenizer.decode(inputs["input_ids"][0][begin : end + 1]))',
    ),
}
"""Kind of the head (None: no head) -> the tokenised texts, and the code that uses the inputs."""


PIPELINE = {kind: PIPELINES[auto.__name__] for kind, auto in AUTO_CLASS.items()} | {
    None: PIPELINES["AutoModel"],
    EMBEDDING: PIPELINES[EMBEDDER],
}
"""Kind of the head -> what the hub calls its task."""


def error_of(of: dict[str, Any], kind: str | None) -> str:
    """How far a file is from torch, in words."""
    # What a quantised file's relative error means for its predictions nobody can tell.
    exact = f"; the largest difference is {of['max_abs']:.1e}" if of["precision"] == "fp32" else ""
    return said(of["agreement"], kind) + exact


def readme(
    facts: dict[str, Any], model: PreTrainedModel, kind: str | None, most: int | None, source: str
) -> str:
    """Front matter, title, inputs, outputs, error and example code of the directory."""
    texts, rest = USE[kind]
    positions = most or positions_of(model.config)
    options = [
        *(["truncation=True", f"max_length={positions}"] if positions else []),
        "padding=True",
    ]
    options += ["return_token_type_ids=True"] if "token_type_ids" in facts["inputs"] else []
    labelled = "labels[" in rest
    imports = "from transformers import " + ("AutoConfig, " * labelled) + "AutoTokenizer\n"
    labels = ['labels = AutoConfig.from_pretrained(".").id2label'] if labelled else []
    inputs = f'inputs = tokenizer({texts}, {", ".join(options)}, return_tensors="np")'
    code = "\n".join(
        [OPEN[facts["format"]].format(imports=imports, file=file_in(facts)), *labels, inputs, rest]
    )
    install = {"onnx": "onnxruntime", "openvino": "openvino"}[facts["format"]]
    lines = list(facts["notes"])
    for of in facts["also"]:
        lines += [f"`{file_in(facts | of)}`, {of['precision']}: {error_of(of, kind)}", *of["notes"]]
    notes = "".join(f"\n* {line}" for line in lines)
    precisions = [of["precision"] for of in (facts, *facts["also"])]
    front = front_matter(
        f"{Path(facts['source']).name}-{facts['format']}-{'-'.join(precisions)}",
        base=source,
        relation="quantized" if precisions != ["fp32"] else None,
        library={"onnx": "transformers.js", "openvino": "openvino"}[facts["format"]],
        tags=["kdcli", facts["format"], *precisions, model.config.model_type],
        pipeline=PIPELINE[kind],
        task=facts.get("task"),
        data=facts.get("data"),
        scores=[
            Score(row["task"], row["set"], row["split"], row["file"])
            for row in facts.get("scores", ())
        ],
    )
    return f"""---
{front}
---
# {facts["source"]} as {facts["format"]}, {", ".join(precisions)}

{facts["architecture"]}, exported by kdcli. Any batch size and length.

* inputs: {", ".join(facts["inputs"])}
* outputs: {", ".join(facts["outputs"])}
* next to torch in float32: {error_of(facts, kind)}{notes}

`pip install {install} transformers`, then in this directory:

```python
{code}
```
"""
