"""Encoders whose layers differ in size: what `kdcli mask compact` writes beside the weights of a compacted model.

This file needs torch and transformers only. `CompactBertModel` is transformers' `BertModel` with the layers that the
configuration's `compact_layers` describes, `CompactRobertaForTokenClassification` likewise, and so on for every head:

    AutoModel.from_pretrained(directory, trust_remote_code=True)
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Model type -> paths of a layer's attention, attention output, feed-forward up and down. DistilBERT's attention has its
# output inside.
_BERT = ("attention.self", "attention.output.dense", "intermediate.dense", "output.dense")
PATHS = {
    **dict.fromkeys(("bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"), _BERT),
    "distilbert": ("attention", None, "ffn.lin1", "ffn.lin2"),
}


class CompactLinear(nn.Module):
    """A linear without its empty columns and rows, which reads and writes vectors of the full width.

    Args:
        size: columns it reads from, rows it writes to, columns and rows that are left.
    """

    inputs: Tensor | None
    outputs: Tensor | None

    def __init__(self, size: tuple[int, int, int, int]) -> None:
        super().__init__()
        wide_in, wide_out, kept_in, kept_out = size
        self.weight = nn.Parameter(torch.empty(kept_out, kept_in))
        self.bias = nn.Parameter(torch.empty(wide_out))
        # Which columns are read, and for each row written its place among those computed. A removed row's place is that
        # of an added row of zeros, the last one.
        self.register_buffer("inputs", torch.empty(kept_in, dtype=torch.long) if kept_in < wide_in else None)
        self.register_buffer("outputs", torch.empty(wide_out, dtype=torch.long) if kept_out != wide_out else None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., columns] -> [..., rows]."""
        if self.inputs is not None:
            x = x.index_select(-1, self.inputs)
        if self.outputs is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return nn.functional.linear(x, self.weight).index_select(-1, self.outputs) + self.bias


class CompactAttention(nn.Module):
    """Self-attention with as many heads as are left, all of one width, and the scale of the full ones."""

    def __init__(self, config: Any, sizes: dict[str, Any], output_inside: bool) -> None:
        super().__init__()
        self.num_attention_heads = sizes["heads"]
        self.scale = (config.hidden_size // config.num_attention_heads) ** -0.5
        self.dropout = getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0))
        self.query, self.key, self.value = (CompactLinear(sizes[name]) for name in ("Q", "K", "V"))
        self.output = CompactLinear(sizes["O"]) if output_inside else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **ignored: Any
    ) -> tuple[Tensor, None]:
        """Attend within `attention_mask`: True where a token may look, or what is added to the scores."""
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, -1)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        context = nn.functional.scaled_dot_product_attention(
            q, k, v, attention_mask, dropout_p=self.dropout if self.training else 0.0, scale=self.scale
        )
        context = context.transpose(1, 2).flatten(2)
        return (context if self.output is None else self.output(context)), None


class _Compact:
    """Before a class of transformers: replaces the parts of its layers by those of `config.compact_layers`."""

    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attention, attention_output, up, down = PATHS[config.model_type]
        base: Any = self.base_model  # type: ignore[attr-defined]
        layers = base.transformer.layer if config.model_type == "distilbert" else base.encoder.layer
        # A head's class builds its encoder as the plain one, and calls this when all is built.
        for layer, sizes in zip(layers, config.compact_layers, strict=True):
            layer.set_submodule(attention, CompactAttention(config, sizes, attention_output is None))
            if attention_output is not None:
                layer.set_submodule(attention_output, CompactLinear(sizes["O"]))
            layer.set_submodule(up, CompactLinear(sizes["U"]))
            layer.set_submodule(down, CompactLinear(sizes["D"]))


def __getattr__(name: str) -> Any:
    """Make `CompactX` of transformers' `X` when it is first asked for."""
    plain = getattr(transformers, name.removeprefix("Compact"), None) if name.startswith("Compact") else None
    if plain is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = type(name, (_Compact, plain), {"__module__": __name__})
    return globals()[name]
