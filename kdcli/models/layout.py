"""Describe each architecture that kdcli knows, in one row per model type.

To support another type, add its row. Paths are relative to the base model (`AutoModel`), and paths
of a layer's parts are relative to the layer. The six matrix types follow the pruning papers: Q, K,
V, O, U (feed-forward up, together with its gate in gated units) and D (down).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from kdcli.custom_code import custom_code_allowed
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.custom_class import runs_own_code
from kdcli.models.modeling_kdcli import layer_paths
from kdcli.models.static import MODEL_TYPE as STATIC_TYPE

LAYERS_HINT = (
    "evaluate or export it, or distil its vectors: --to static:256, or --student MODEL; the "
    "page 'Add a model type' of the documentation lists what smaller models need"
)
MATRICES = ("Q", "K", "V", "O", "U", "D")


@dataclass(frozen=True)
class Layout:
    """The row of one model type."""

    layers: str = "encoder.layer"
    # Linears of a layer. Linears with the same name are one fused linear.
    q: str = "attention.self.query"
    k: str = "attention.self.key"
    v: str = "attention.self.value"
    o: str = "attention.output.dense"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    gate: str | None = None
    # The norm of the last layer's output in pre-norm models, whose layers begin with their norms.
    final_norm: str | None = None
    # Name prefixes of the parameters that count as embeddings.
    embeddings: tuple[str, ...] = ("embeddings.", "embeddings_project.")
    # Attention goes through transformers' attention interface; otherwise the linears are hooked.
    interface: bool = True
    # Its q, k and v are found where its own code computes attention.
    products: bool = False
    # Row order of a fused q/k/v linear: [3, A, K] or [A, 3, K].
    fused: Literal["blocks", "heads"] | None = None
    # Other linears whose rows are dimensions of q. Some configurations lack them.
    like_q: tuple[str, ...] = ()
    # Biases that are added to q and v after a fused projection without bias.
    bias: tuple[str, str] | None = None
    # Rotary embeddings, by the dimensions that form a pair: (i, i + K/2) or (2i, 2i + 1).
    rotary: Literal["halves", "pairs"] | None = None
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
    # False if the model masks with the smallest float32 number, which no half type can hold.
    autocast: bool = True
    # Why neighbouring documents of a block see each other despite the mask.
    leaks: str | None = None
    # Why nothing is known about its layers: only its last hidden states can be used.
    missing: str | None = None
    # `modeling_kdcli.layer_paths` finds the parts of its layers.
    compact: bool = False
    # The linear before the text classifier, and its activation or the setting that names it.
    # Label words make both the identity. `{base}` is the base model.
    head: tuple[str, str] | None = None
    # The heads of all tasks normalise after their activation.
    head_norm: bool = False
    # The `classifier_pooling` with which the head reads the first token's state.
    pooling: str | None = None

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
_BERT = Layout(compact=True, head=_POOLER)
_ROBERTA = replace(_BERT, position_offset=True, head=_DENSE)
_HOOKED = Layout(interface=False)
_LEAKS, _DISENTANGLED = (
    "its embeddings take a mask of tokens only",
    "disentangled position terms and their scale",
)
_LLAMA_LIKE = Layout(
    layers="layers",
    embeddings=("embed_tokens.", "embeddings."),
    rotary="halves",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    up="mlp.up_proj",
    gate="mlp.gate_proj",
    down="mlp.down_proj",
)

LAYOUTS: dict[str, Layout] = {
    "bert": _BERT,
    "electra": replace(_BERT, head=("classifier.dense", "gelu")),
    "ernie": _BERT,
    "splinter": _HOOKED,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": replace(_ROBERTA, compact=False, final_norm="encoder.LayerNorm"),
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "roberta-prelayernorm": replace(_ROBERTA, compact=False, final_norm="LayerNorm"),
    "esm": Layout(
        rotary="halves",
        position_offset=True,
        leaks=_LEAKS,
        head=_DENSE,
        final_norm="encoder.emb_layer_norm_after",
    ),
    "mobilebert": Layout(leaks="its embeddings join each token with its neighbours"),
    "albert": Layout(
        layers="encoder.albert_layer_groups.0.albert_layers",
        shared=True,
        embeddings=("embeddings.", "encoder.embedding_hidden_mapping_in."),
        head=("{base}.pooler", "tanh"),
        q="attention.query",
        k="attention.key",
        v="attention.value",
        o="attention.dense",
        up="ffn",
        down="ffn_output",
    ),
    "distilbert": Layout(
        layers="transformer.layer",
        ffn="hidden_dim",
        compact=True,
        head=("pre_classifier", "relu"),
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        o="attention.out_lin",
        up="ffn.lin1",
        down="ffn.lin2",
    ),
    "modernbert": Layout(
        layers="layers",
        rotary="halves",
        local=True,
        head_norm=True,
        pooling="cls",
        fused="blocks",
        q="attn.Wqkv",
        k="attn.Wqkv",
        v="attn.Wqkv",
        o="attn.Wo",
        up="mlp.Wi",
        gate="mlp.Wi",
        down="mlp.Wo",
        final_norm="final_norm",
    ),
    "eurobert": replace(_LLAMA_LIKE, head=("dense", "gelu"), pooling="bos", final_norm="norm"),
    "nomic_bert": replace(_LLAMA_LIKE, head=_POOLER),
    "mpnet": replace(
        _HOOKED,
        position_offset=True,
        other_term="relative position bias",
        head=_DENSE,
        q="attention.attn.q",
        k="attention.attn.k",
        v="attention.attn.v",
        o="attention.attn.o",
    ),
    "deberta": replace(
        _HOOKED,
        autocast=False,
        leaks=_LEAKS,
        head=("pooler.dense", "pooler_hidden_act"),
        fused="heads",
        q="attention.self.in_proj",
        k="attention.self.in_proj",
        v="attention.self.in_proj",
        like_q=("attention.self.pos_proj", "attention.self.pos_q_proj"),
        other_term=_DISENTANGLED,
        bias=("attention.self.q_bias", "attention.self.v_bias"),
    ),
    "deberta-v2": replace(
        _HOOKED,
        leaks=_LEAKS,
        head=("pooler.dense", "pooler_hidden_act"),
        q="attention.self.query_proj",
        k="attention.self.key_proj",
        v="attention.self.value_proj",
        like_q=("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
        other_term=_DISENTANGLED,
    ),
    "roformer": replace(
        _HOOKED,
        rotary="pairs",
        positions="encoder.embed_positions",
        head=("classifier.dense", "hidden_act"),
    ),
    "convbert": replace(
        _HOOKED,
        leaks="its convolution runs over neighbouring tokens",
        head=("classifier.dense", "hidden_act"),
    ),
    "megatron-bert": replace(_HOOKED, head=_POOLER, final_norm="encoder.ln"),
    "rembert": replace(
        _HOOKED, embeddings=("embeddings.", "encoder.embedding_hidden_mapping_in."), head=_POOLER
    ),
}
# A static model has no layers, so it can be neither pruned nor distilled further.
STATIC = Layout(layers="layers", interface=False, embeddings=("embeddings",))
# Model types that can be compacted, with the paths of a layer's attention, attention output,
# feed-forward up and feed-forward down.
COMPACT_PATHS = {kind: layer_paths(kind) for kind, row in LAYOUTS.items() if row.compact}


def layout_for(config: PreTrainedConfig) -> Layout:
    """Return the row of a configuration's model type, or derive one from the network.

    Raises UsageError if the model is a decoder, or if no layout can be derived.
    """
    kind = str(config.model_type)
    check_type(
        kind,
        decodes=any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder")),
    )
    if kind == STATIC_TYPE:
        return STATIC
    if kind not in LAYOUTS or runs_own_code(config):
        return _derived(config)
    row = LAYOUTS[kind]
    if kind == "esm" and getattr(config, "position_embedding_type", None) != "rotary":
        return replace(row, rotary=None)
    if kind == "roformer":
        return replace(row, rotary_value=config.rotary_value)
    if kind == "albert" and (config.num_hidden_groups, config.inner_group_num) != (1, 1):
        raise UsageError(
            "ALBERT with several layer groups is not supported: only one layer shared by all"
        )
    return row


def _derived(config: PreTrainedConfig) -> Layout:
    # The derivation runs the modules that read layouts.
    from kdcli.models.derived_layout import NotDerivedError, derived_layout

    try:
        return derived_layout(config)
    except NotDerivedError as error:
        message = f"kdcli cannot use a model of type '{config.model_type}': {error}"
        raise UsageError(message, "give a text encoder that needs only token ids") from None


def check_packing(config: PreTrainedConfig, *, isolated: bool) -> None:
    """Check that the architecture can keep the documents of a block apart, if they are `isolated`.

    Raises UsageError if it cannot.
    """
    if isolated and (leaks := layout_for(config).leaks):
        raise UsageError(
            f"data.pack_isolated: {config.model_type} cannot keep documents apart: {leaks}",
            "set data.pack_isolated=false",
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
    if kind in (STATIC_TYPE, *LAYOUTS) and not decodes:
        return
    from transformers.models.auto import modeling_auto as auto

    if has_decoder(kind):
        return
    if decodes:
        raise UsageError(
            f"'{kind}' is a decoder or an encoder-decoder; kdcli compresses encoders only",
            "give a model whose transformers class is an encoder, such as bert, modernbert or t5",
        )
    of_images = kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    if of_images or kind in auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES:
        raise UsageError(
            f"'{kind}' is a model of {'images' if of_images else 'audio'}; kdcli compresses text "
            "encoders only",
            f"supported types: {', '.join(sorted(LAYOUTS))}",
        )
    if kind not in auto.MODEL_MAPPING_NAMES and not custom_code_allowed():
        raise UsageError(
            f"unknown model type '{kind}'{did_you_mean(kind, auto.MODEL_MAPPING_NAMES)}; "
            "transformers has no such model",
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
            rows = slice(part * size // 3, (part + 1) * size // 3)
            if layout.fused == "heads":
                rows = torch.arange(size).view(layout.heads(layer), 3, -1)[:, part].reshape(-1)
        matrices[letter] = [(linear, rows) for linear in modules]
    return matrices


def submodule(module: nn.Module, path: str) -> Any:
    """Return the module at a path, untyped, because its class depends on the model type."""
    return module.get_submodule(path)
