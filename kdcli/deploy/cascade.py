"""Cascades: directories with a larger model and, in `first/`, a small one that is asked first.

The directory itself is an export of the larger model, which any tool can load. A key of its
config.json names the threshold. `first/` has no tokenizer if both models share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedConfig

from kdcli.deploy.exported import open_export
from kdcli.deploy.sessions import library
from kdcli.disk import user_path
from kdcli.errors import UsageError, first_problem
from kdcli.models.load import load_config

if TYPE_CHECKING:
    import onnx

KEY = "kdcli_cascade"
"""The key of config.json."""
FIRST = "first"
"""The directory of the small model."""
SINGLE_FILE = "onnx/model_cascade.onnx"
"""A file with both models, for one text at a time."""
WORDS = "word_starts"
"""Its input for models that label words: 1 at the first token of each word, else 0."""
ASKED = "asked"
"""Its output that tells whether the larger model was asked."""
TOKENIZER_FILE = "tokenizer.json"


class CascadeSettings(BaseModel):
    """When the larger model is asked.

    Attributes:
        threshold: About texts whose answer has a lower `kdcli.metrics.cascade.sureness`.
        keep: Of rerankers: about so many candidates of a query, the best by the small model.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    threshold: float | None = Field(None, ge=0, le=1)
    keep: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.threshold is None) == (self.keep is None):
            raise ValueError("it needs either a threshold or keep")
        return self


@dataclass(frozen=True)
class CascadeParts:
    """The small model of a cascade.

    Attributes:
        settings: When the larger model is asked.
        first: The directory of the small model.
        tokenizer: The directory of its tokenizer.
    """

    settings: CascadeSettings
    first: str
    tokenizer: str


def cascade_parts(source: str, config: PreTrainedConfig) -> CascadeParts | None:
    """Return the small model of a cascade; None if the source is no cascade.

    Args:
        source: The directory.
        config: Its configuration.

    Raises:
        UsageError: The settings are wrong, or the models are damaged or have different labels.
    """
    given = getattr(config, KEY, None)
    if given is None:
        return None
    again = "write it again with kdcli compress --cascade"
    try:
        settings = CascadeSettings.model_validate(given)
    except ValidationError as error:
        where = f"{KEY} in the config.json of {source}"
        raise UsageError(f"{where}: {first_problem(error, given)}", again) from None
    first = user_path(source) / FIRST
    own, other = load_config(str(first), weights=False).id2label, config.id2label
    if own != other:
        raise UsageError(
            f"the models of the cascade {source} have different labels: "
            f"{', '.join(own.values())} and {', '.join(other.values())}",
            again,
        )
    open_export(str(first))
    tokenizer = first if (first / TOKENIZER_FILE).is_file() else user_path(source)
    return CascadeParts(settings, str(first), str(tokenizer))


def write_single_file(
    first: Path, second: Path, file: Path, kind: str, threshold: float, *, shared: bool
) -> None:
    """Write one ONNX file that runs the larger model only if the small one is unsure.

    It takes one text. Its inputs are those of the models, with the prefix `second_` for the larger
    one if it has a tokenizer of its own.

    Args:
        first: The ONNX file of the small model.
        second: The ONNX file of the larger model.
        file: The file to write.
        kind: The kind of the answers: `class`, `multi` or `tokens`.
        threshold: The threshold of the cascade.
        shared: Whether both models read the same tokens.
    """
    onnx = library("onnx", "onnx")
    node, prefix = onnx.helper.make_node, onnx.compose.add_prefix
    small = prefix(onnx.load(first), "first_", rename_inputs=False)
    large = prefix(onnx.load(second), "second_", rename_inputs=not shared)
    (own,), (other,) = (list(model.graph.output) for model in (small, large))
    nodes = _sureness_nodes(onnx, kind, own.name)
    nodes += [node("Less", ["sureness", "threshold"], [ASKED])]
    answer, copied = "logits", onnx.ValueInfoProto()
    copied.CopyFrom(own)
    copied.name = "first_answer"
    keep = node("Identity", [own.name], [copied.name])
    branches = {
        "then_branch": onnx.helper.make_graph(
            large.graph.node, "second", [], [other], large.graph.initializer
        ),
        "else_branch": onnx.helper.make_graph([keep], "first", [], [copied]),
    }
    nodes += [node("If", [ASKED], [answer], **branches)]
    inputs = {value.name: value for value in [*large.graph.input, *small.graph.input]}
    if kind == "tokens":
        ids = next(iter(inputs.values())).type.tensor_type.elem_type
        inputs[WORDS] = onnx.helper.make_tensor_value_info(WORDS, ids, [None, None])
    final = onnx.ValueInfoProto()
    final.CopyFrom(own)
    final.name = answer
    np = library("numpy", "onnx")
    # The runtime warns of a constant that no node reads.
    of_words = {"one": np.float32(1), "last": np.array([-1])} if kind == "tokens" else {}
    constants = [
        onnx.numpy_helper.from_array(value, name)
        for name, value in {"threshold": np.float32(threshold), **of_words}.items()
    ]
    graph = onnx.helper.make_graph(
        [*small.graph.node, *nodes],
        "cascade",
        list(inputs.values()),
        [final, onnx.helper.make_tensor_value_info(ASKED, onnx.TensorProto.BOOL, [])],
        [*small.graph.initializer, *constants],
    )
    versions = {opset.domain: opset for opset in [*small.opset_import, *large.opset_import]}
    model = onnx.helper.make_model(graph, opset_imports=list(versions.values()))
    model.functions.extend([*small.functions, *large.functions])
    model.ir_version = small.ir_version
    onnx.save(model, file)


def _sureness_nodes(onnx: object, kind: str, logits: str) -> list[onnx.NodeProto]:
    """Return nodes that compute `kdcli.metrics.cascade.sureness` of one text."""
    node = library("onnx", "onnx").helper.make_node
    if kind == "multi":
        return [
            node("Abs", [logits], ["distances"]),
            node("Sigmoid", ["distances"], ["probabilities"]),
            node("ReduceMin", ["probabilities"], ["sureness"], keepdims=0),
        ]
    softmax = node("Softmax", [logits], ["probabilities"], axis=-1)
    if kind == "class":
        return [softmax, node("ReduceMax", ["probabilities"], ["sureness"], keepdims=0)]
    return [
        softmax,
        node("ReduceMax", ["probabilities", "last"], ["largest"], keepdims=0),
        node("Cast", [WORDS], ["is_word"], to=library("onnx", "onnx").TensorProto.BOOL),
        node("Where", ["is_word", "largest", "one"], ["of_words"]),
        node("ReduceMin", ["of_words"], ["sureness"], keepdims=0),
    ]
