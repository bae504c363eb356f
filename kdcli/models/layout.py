"""Where the parts of an encoder live: one row for each model type. To support another type, add its row.

Paths are relative to the base model (`AutoModel`); those of a layer's parts, to the layer. The six matrix types are the
ones of the pruning papers: Q K V O, U (feed-forward up, with a gate beside it in gated units) and D (down).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from kdcli.errors import UsageError, did_you_mean

MATRICES = ("Q", "K", "V", "O", "U", "D")


@dataclass(frozen=True)
class Layout:
    """The row of one model type.

    Attributes:
        layers: path of the list of layers.
        q, k, v, o, up, down, gate: linears of a layer. The same name for several of them is one fused linear.
        embeddings: prefixes of what belongs to the embeddings, for counting.
        interface: attention goes through the attention interface of transformers; else its linears are hooked.
        fused: order of the rows of a fused q/k/v: `blocks` is [3, A, K], `heads` is [A, 3, K].
        bias: added to q and v after a bias-free fused projection (DeBERTa): attribute names beside the linear.
        rotary: rotary embedding's pairs, `halves` (i, i + K/2) or `pairs` (2i, 2i + 1); None without.
        positions: module whose output is the rotary table, where it has to be applied to hooked q and k.
        other_term: what the model adds to q·k before the softmax, so that q·k alone is not its attention.
        shared: all layers are one module (ALBERT).
        ffn: name of the feed-forward width in the configuration.
        position_offset: position ids start at padding index + 1 (RoBERTa and its descendants).
        local: some layers attend within a window; losses should choose a global one.
        leaks: what else lets neighbouring documents of a block see each other, so that no mask can isolate them.
    """

    layers: str = "encoder.layer"
    q: str = "attention.self.query"
    k: str = "attention.self.key"
    v: str = "attention.self.value"
    o: str = "attention.output.dense"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    gate: str | None = None
    embeddings: tuple[str, ...] = ("embeddings.", "embeddings_project.")
    interface: bool = True
    fused: Literal["blocks", "heads"] | None = None
    bias: tuple[str, str] | None = None
    rotary: Literal["halves", "pairs"] | None = None
    positions: str | None = None
    other_term: str | None = None
    shared: bool = False
    ffn: str = "intermediate_size"
    position_offset: bool = False
    local: bool = False
    leaks: str | None = None

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The encoder layers in the order they run; a shared one as often as it runs."""
        layers = list(_submodule(model, self.layers))
        if self.shared:
            return [layers[0]] * int(model.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
        return layers


_BERT = Layout()
_ROBERTA = replace(_BERT, position_offset=True)
_HOOKED = replace(_BERT, interface=False)
_LLAMA_LIKE = Layout(
    layers="layers",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    up="mlp.up_proj",
    gate="mlp.gate_proj",
    down="mlp.down_proj",
    embeddings=("embed_tokens.", "embeddings."),
    rotary="halves",
)

LAYOUTS: dict[str, Layout] = {
    "bert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "splinter": _HOOKED,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "esm": replace(_BERT, rotary="halves", position_offset=True, leaks="its embeddings take a mask of tokens only"),
    "mobilebert": replace(_BERT, leaks="its embeddings join each token with its neighbours"),
    "albert": replace(
        _BERT,
        layers="encoder.albert_layer_groups.0.albert_layers",
        q="attention.query",
        k="attention.key",
        v="attention.value",
        o="attention.dense",
        up="ffn",
        down="ffn_output",
        embeddings=("embeddings.", "encoder.embedding_hidden_mapping_in."),
        shared=True,
    ),
    "distilbert": replace(
        _BERT,
        layers="transformer.layer",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        o="attention.out_lin",
        up="ffn.lin1",
        down="ffn.lin2",
        ffn="hidden_dim",
    ),
    "modernbert": Layout(
        layers="layers",
        q="attn.Wqkv",
        k="attn.Wqkv",
        v="attn.Wqkv",
        o="attn.Wo",
        up="mlp.Wi",
        gate="mlp.Wi",
        down="mlp.Wo",
        fused="blocks",
        rotary="halves",
        local=True,
    ),
    "eurobert": _LLAMA_LIKE,
    "nomic_bert": _LLAMA_LIKE,
    "mpnet": replace(
        _HOOKED,
        q="attention.attn.q",
        k="attention.attn.k",
        v="attention.attn.v",
        o="attention.attn.o",
        other_term="relative position bias",
        position_offset=True,
    ),
    "deberta": replace(
        _HOOKED,
        q="attention.self.in_proj",
        k="attention.self.in_proj",
        v="attention.self.in_proj",
        fused="heads",
        bias=("attention.self.q_bias", "attention.self.v_bias"),
        other_term="disentangled position terms and their scale",
        leaks="its embeddings take a mask of tokens only",
    ),
    "deberta-v2": replace(
        _HOOKED,
        q="attention.self.query_proj",
        k="attention.self.key_proj",
        v="attention.self.value_proj",
        other_term="disentangled position terms and their scale",
        leaks="its embeddings take a mask of tokens only",
    ),
    "roformer": replace(_HOOKED, rotary="pairs", positions="encoder.embed_positions"),
    "convbert": replace(_HOOKED, leaks="its convolution runs over neighbouring tokens"),
    "megatron-bert": _HOOKED,
    "rembert": replace(_HOOKED, embeddings=("embeddings.", "encoder.embedding_hidden_mapping_in.")),
}


def layout_for(config: Any) -> Layout:
    """The row of a configuration's model type.

    Raises:
        UsageError: the model is a decoder, or its type has no row; the message names the known ones.
    """
    kind = str(config.model_type)
    if kind in LAYOUTS and not getattr(config, "is_decoder", False):
        row = LAYOUTS[kind]
        if kind == "esm" and getattr(config, "position_embedding_type", None) != "rotary":
            return replace(row, rotary=None)
        if kind == "albert" and (config.num_hidden_groups, config.inner_group_num) != (1, 1):
            raise UsageError("ALBERT with several layer groups is not supported: only one layer shared by all")
        return row
    if getattr(config, "is_encoder_decoder", False) or _is_decoder(config):
        raise UsageError(
            f"'{kind}' is a decoder or an encoder-decoder; kdcli compresses encoders", f"known types: {known()}"
        )
    raise UsageError(
        f"unknown model type '{kind}'{did_you_mean(kind, LAYOUTS)}",
        f"known: {known()}. Another encoder needs one row in kdcli/models/layout.py: see docs/add-a-model-type.md",
    )


def known() -> str:
    """The supported model types, for messages."""
    return ", ".join(sorted(LAYOUTS))


def linears(layout: Layout, layer: nn.Module) -> dict[str, list[tuple[nn.Linear, slice | None]]]:
    """The prunable matrices of one layer: type letter → linears, each with its rows when several share one linear.

    `U` holds the gate too in gated feed-forward blocks.
    """
    names = {"Q": [layout.q], "K": [layout.k], "V": [layout.v], "O": [layout.o], "D": [layout.down]}
    names["U"] = [layout.up] if layout.gate in (None, layout.up) else [layout.up, str(layout.gate)]
    found: dict[str, list[tuple[nn.Linear, slice | None]]] = {}
    for letter in MATRICES:
        of_letter = [_submodule(layer, name) for name in names[letter]]
        rows: slice | None = None
        if layout.fused == "blocks" and letter in "QKV":
            third = of_letter[0].out_features // 3
            start = "QKV".index(letter) * third
            rows = slice(start, start + third)
        found[letter] = [(linear, rows) for linear in of_letter]
    return found


def _is_decoder(config: Any) -> bool:
    """True for what transformers knows only as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    return config.model_type in CAUSAL and (config.model_type not in MASKED or bool(config.is_decoder))


def _submodule(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path)


def starts_with_any(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a parameter's name lies under one of the prefixes."""
    return name.startswith(tuple(prefixes))
