"""Describe the parts of an encoder that distillation and pruning need: its layout.

A layout is derived from the network (`kdcli.models.derived_layout`). The six matrix types follow
the pruning papers: Q, K, V, O, U (feed-forward up, together with its gate in gated units) and D
(down).
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from kdcli.custom_code import CODE_FAILS, custom_code_allowed
from kdcli.errors import UsageError
from kdcli.models.custom_class import runs_own_code
from kdcli.models.files import LIBRARY_TYPE
from kdcli.models.modeling_kdcli import layer_paths
from kdcli.models.static import MODEL_TYPE as STATIC_TYPE
from kdcli.types import Needs

LAYERS_HINT = (
    "evaluate or export it, or distil its vectors: --to static:256, or --student MODEL; the "
    "page 'Add a model type' of the documentation lists what smaller models need"
)
ENCODERS_HINT = (
    "give a model whose transformers class is an encoder, such as bert, modernbert or t5"
)
NEEDED_HINT = (
    "give a text encoder that needs only token ids and returns a last_hidden_state for each token"
)
Rotary: TypeAlias = Literal["halves", "pairs", "partial"]
MATRICES = ("Q", "K", "V", "O", "U", "D")


@dataclass(frozen=True)
class Written:
    """What a forward pass of a base model does not show, so that it is written in `WRITTEN`."""

    # The linear before the text classifier, and its activation or the setting that names it.
    # Label words make both the identity. `{base}` is the base model.
    head: tuple[str, str] | None = None
    # The heads of all tasks normalise after their activation.
    head_norm: bool = False
    # The `classifier_pooling` with which the head reads the first token's state.
    pooling: str | None = None
    # `modeling_kdcli.layer_paths` finds the parts of its layers.
    compact: bool = False


@dataclass(frozen=True)
class Layout(Written):
    """The parts of an encoder, and how they work together.

    Paths are relative to the base model (`AutoModel`), and paths of a layer's parts are relative to
    the layer.
    """

    layers: str = "encoder.layer"
    # Linears of a layer. Linears with the same name are one fused linear.
    q: str = "attention.self.query"
    k: str = "attention.self.key"
    v: str = "attention.self.value"
    o: str = "attention.output.dense"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    gate: str | None = None
    # Name prefixes of the parameters that count as embeddings.
    embeddings: tuple[str, ...] = ("embeddings.", "embeddings_project.")
    # Attention goes through transformers' attention interface; otherwise the linears are hooked.
    interface: bool = True
    # Its q, k and v are found where its own code computes attention.
    products: bool = False
    # Row order of a fused q/k/v linear: [3, A, K], with fewer heads of k and v if they are shared,
    # or [A, 3, K].
    fused: Literal["blocks", "heads"] | None = None
    # Other linears whose rows are dimensions of q. Some configurations lack them.
    like_q: tuple[str, ...] = ()
    # Biases that are added to q and v after a fused projection without bias.
    bias: tuple[str, str] | None = None
    # Rotary embeddings, by the dimensions that form a pair: (i, i + K/2) or (2i, 2i + 1). If layers
    # rotate only a part of each head, heads keep their width.
    rotary: Rotary | None = None
    # v is rotated too. `layout_for` reads this from the configuration.
    rotary_value: bool = False
    # The module that computes the rotary table, if the hooks must apply it to q and k.
    positions: str | None = None
    # A term that is added to q·k before the softmax, so that q·k alone is not the attention.
    other_term: str | None = None
    # A token attends to itself and to earlier tokens only.
    causal: bool = False
    # The attribute of the attention, or of its configuration, with its number of heads.
    head_count: str = "num_attention_heads"
    # All layers are one module.
    shared: bool = False
    # The configuration key of the feed-forward width.
    ffn: str = "intermediate_size"
    # Position ids start at the padding index + 1.
    position_offset: bool = False
    # Some layers attend within a window, so losses should choose a global layer.
    local: bool = False
    # False if the model fails under autocast, such as by masking with the smallest float32 number.
    autocast: bool = True
    # Why neighbouring documents of a block see each other despite the mask.
    leaks: str | None = None
    # Why nothing is known about its layers: only its last hidden states can be used.
    missing: str | None = None

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the encoder layers in the order in which they run.

        A shared layer is repeated for every run. Raises UsageError if the layers are unknown.
        """
        self.check_layers()
        layers = list(submodule(model, self.layers))
        if self.shared:
            return [layers[0]] * int(model.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
        return layers

    def check_layers(self) -> None:
        """Check that the layers are known.

        Raises UsageError otherwise, with the step of the derivation that failed.
        """
        if self.missing is not None:
            raise UsageError(self.missing, LAYERS_HINT)

    def attention(self, layer: nn.Module) -> Any:
        """Return the module of a layer that holds its q, k and v."""
        return submodule(layer, self.q.rpartition(".")[0])

    def heads(self, layer: nn.Module) -> int:
        """Return the number of attention heads of a layer.

        The number comes from the layer, because ConvBERT has fewer heads than its configuration
        says.
        """
        owner = self.attention(layer)
        return int(getattr(owner, self.head_count, 0) or getattr(owner.config, self.head_count))


_POOLER, _DENSE = ("{base}.pooler.dense", "tanh"), ("classifier.dense", "tanh")
_ROBERTA = Written(head=_DENSE, compact=True)

WRITTEN: dict[str, Written] = {
    "albert": Written(head=("{base}.pooler", "tanh")),
    "bert": Written(head=_POOLER, compact=True),
    "camembert": _ROBERTA,
    "convbert": Written(head=("classifier.dense", "hidden_act")),
    "data2vec-text": _ROBERTA,
    "deberta": Written(head=("pooler.dense", "pooler_hidden_act")),
    "deberta-v2": Written(head=("pooler.dense", "pooler_hidden_act")),
    "distilbert": Written(head=("pre_classifier", "relu"), compact=True),
    "electra": Written(head=("classifier.dense", "gelu"), compact=True),
    "ernie": Written(head=_POOLER, compact=True),
    "esm": Written(head=_DENSE),
    "eurobert": Written(head=("dense", "gelu"), pooling="bos"),
    "megatron-bert": Written(head=_POOLER),
    "modernbert": Written(head_norm=True, pooling="cls"),
    "mpnet": Written(head=_DENSE),
    "nomic_bert": Written(head=_POOLER),
    "rembert": Written(head=_POOLER),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": Written(head=_DENSE),
    "roformer": Written(head=("classifier.dense", "hidden_act")),
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": Written(head=_DENSE),
}
"""What is known of model types beyond the layout that their networks show."""
# A static model has no layers, so it can be neither pruned nor distilled further.
STATIC = Layout(layers="layers", interface=False, embeddings=("embeddings",))
LIBRARY = Layout(missing="sentence-transformers computes the model as a whole", interface=False)
# Model types that can be compacted, with the paths of a layer's attention, attention output,
# feed-forward up and feed-forward down.
COMPACT_PATHS = {kind: layer_paths(kind) for kind, row in WRITTEN.items() if row.compact}


def layout_for(config: PreTrainedConfig) -> Layout:
    """Return the layout of a configuration's base model, which is derived from its network.

    Raises UsageError if the model is a decoder, or if it has no states that kdcli can use.
    """
    kind = str(config.model_type)
    check_type(
        kind,
        decodes=any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder")),
    )
    if kind == STATIC_TYPE:
        return STATIC
    if kind == LIBRARY_TYPE:
        return LIBRARY
    # The derivation runs the modules that read layouts.
    from kdcli.models.derived_layout import NotDerivedError
    from kdcli.models.layout_cache import cached_layout

    try:
        return cached_layout(config)
    except NotDerivedError as error:
        place = f"{config.name_or_path}: " if config.name_or_path else ""
        code_fails = runs_own_code(config) and error.__cause__ is not None
        raise UsageError(
            f"{place}kdcli cannot use a model of type '{kind}': {error}",
            CODE_FAILS if code_fails else NEEDED_HINT,
        ) from None


def check_packing(config: PreTrainedConfig, *, isolated: bool) -> None:
    """Check that the architecture can keep the documents of a block apart, if they are `isolated`.

    Raises UsageError if it cannot.
    """
    if isolated and (leaks := layout_for(config).leaks):
        raise UsageError(
            f"data.pack_isolated: {config.model_type} cannot keep documents apart: {leaks}",
            "set data.pack_isolated=false",
        )


def check_relations(config: PreTrainedConfig, needs: Needs) -> None:
    """Check that a teacher's q, k and v can be compared with a student's, if they are needed.

    Raises UsageError if the teacher is causal.
    """
    if needs.q | needs.k | needs.v and layout_for(config).causal:
        raise UsageError(
            f"{config.model_type} is causal: its tokens attend to earlier ones only, but losses on "
            "q, k and v compare all tokens",
            "distil its vectors (--method embedding), or on a task its outputs (--method "
            "soft-targets)",
        )


def has_decoder(kind: str) -> bool:
    """Return whether a type is an encoder-decoder."""
    from transformers.models.auto import modeling_auto as auto

    return kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def has_encoder_class(kind: str) -> bool:
    """Return whether a type's encoder alone has a class, as of T5; BART's encoder has none."""
    from transformers.models.auto import modeling_auto as auto

    return not has_decoder(kind) or kind in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES


def base_class(config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
    """Return the auto class of a configuration's base network; see `without_decoder`."""
    encoder: type[_BaseAutoModelClass] = AutoModelForTextEncoding
    kind = str(config.model_type)
    return encoder if has_decoder(kind) and has_encoder_class(kind) else AutoModel


def without_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder of a base network, which is the whole network for most types."""
    if has_encoder_class(str(model.config.model_type)):
        return model
    encoder: PreTrainedModel = model.get_encoder()
    return encoder


def check_type(kind: str, *, decodes: bool) -> None:
    """Check that models of a type can be text encoders.

    `decodes` means that the configuration describes a decoder. Raises UsageError otherwise.
    """
    from transformers.models.auto import modeling_auto as auto

    if kind in (STATIC_TYPE, LIBRARY_TYPE) or has_decoder(kind):
        return
    if decodes:
        raise UsageError(
            f"'{kind}' is a decoder or an encoder-decoder; kdcli compresses encoders only",
            ENCODERS_HINT,
        )
    of_images = kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    if of_images or kind in auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES:
        raise UsageError(
            f"'{kind}' is a model of {'images' if of_images else 'audio'}; kdcli compresses text "
            "encoders only",
            ENCODERS_HINT,
        )
    if kind not in auto.MODEL_MAPPING_NAMES and not custom_code_allowed():
        raise UsageError(
            f"unknown model type '{kind}': transformers {transformers.__version__} has no such "
            "model",
            "check the model_type in its config.json; a newer version of transformers may have it",
        )


Rows = slice | Tensor  # rows of a linear that belong to a matrix: a slice or indices


def linears(layout: Layout, layer: nn.Module) -> dict[str, list[tuple[nn.Linear, Rows]]]:
    """Return the prunable matrices of one layer: type letter -> linears, each with its rows.

    Rows matter if several matrices share one linear. The rows of Q, K and V are in the order [A,
    K]. In gated feed-forward blocks, `U` also holds the gate.
    """
    names = {"Q": [layout.q], "K": [layout.k], "V": [layout.v], "O": [layout.o], "D": [layout.down]}
    names["U"] = [layout.up] if layout.gate in (None, layout.up) else [layout.up, str(layout.gate)]
    matrices: dict[str, list[tuple[nn.Linear, Rows]]] = {}
    for letter in MATRICES:
        modules = [submodule(layer, name) for name in names[letter]]
        rows: Rows = slice(None)
        if layout.fused and letter in "QKV":
            part, size = "QKV".index(letter), modules[0].out_features
            width = submodule(layer, layout.o).in_features
            shared = (size - width) // 2
            starts = (0, width, width + shared, size)
            rows = slice(starts[part], starts[part + 1])
            if layout.fused == "heads":
                rows = torch.arange(size).view(layout.heads(layer), 3, -1)[:, part].reshape(-1)
        matrices[letter] = [(linear, rows) for linear in modules]
    return matrices


def submodule(module: nn.Module, path: str) -> Any:
    """Return the module at a path, untyped, because its class depends on the model type."""
    return module.get_submodule(path)
