"""Encoder classes that transformers lacks. kdcli writes this file next to the weights.

It needs only torch and transformers. `CompactBertModel` is transformers' `BertModel` with layers of
the sizes in the configuration's `compact_layers`. `LabelWordsBertForMaskedLM` is `BertForMaskedLM`
as a classifier, whose vocabulary is the configuration's `label_words`.
`CompactLabelWordsBertForMaskedLM` is both.

    AutoModel.from_pretrained(directory, trust_remote_code=True)
    AutoModelForSequenceClassification.from_pretrained(directory, trust_remote_code=True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_outputs as outputs


def layer_paths(model_type: str) -> tuple[str, str | None, str, str]:
    """Return the paths of a layer's attention, attention output, feed-forward up and down."""
    if model_type == "distilbert":
        return "attention", None, "ffn.lin1", "ffn.lin2"  # its attention contains the output
    return "attention.self", "attention.output.dense", "intermediate.dense", "output.dense"


class CompactLinear(nn.Module):
    """A linear without its empty columns and rows, which still reads and writes full vectors.

    `size` holds the numbers of full columns, full rows, kept columns and kept rows.
    """

    inputs: Tensor | None
    outputs: Tensor | None

    def __init__(self, size: tuple[int, int, int, int]) -> None:
        super().__init__()
        wide_in, wide_out, kept_in, kept_out = size
        self.weight = nn.Parameter(torch.empty(kept_out, kept_in))
        self.bias = nn.Parameter(torch.empty(wide_out))
        # `inputs` holds the columns to read. `outputs` holds, for each full row, its place among
        # the computed rows. A removed row's place is the last computed row, which is all zeros.
        self.register_buffer(
            "inputs", torch.empty(kept_in, dtype=torch.long) if kept_in < wide_in else None
        )
        self.register_buffer(
            "outputs", torch.empty(wide_out, dtype=torch.long) if kept_out != wide_out else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., columns] -> [..., rows]."""
        if self.inputs is not None:
            x = x.index_select(-1, self.inputs)
        if self.outputs is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return nn.functional.linear(x, self.weight).index_select(-1, self.outputs) + self.bias


class CompactAttention(nn.Module):
    """Self-attention with the kept heads, which have one width and the scale of the full heads."""

    def __init__(self, config: Any, sizes: dict[str, Any], output_inside: bool) -> None:
        super().__init__()
        self.num_attention_heads = sizes["heads"]
        self.scale = (config.hidden_size // config.num_attention_heads) ** -0.5
        self.dropout = getattr(
            config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0)
        )
        self.query, self.key, self.value = (CompactLinear(sizes[name]) for name in ("Q", "K", "V"))
        self.output = CompactLinear(sizes["O"]) if output_inside else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **ignored: Any
    ) -> tuple[Tensor, None]:
        """Attend within `attention_mask`.

        The mask is True where a token may attend, or a bias on the scores.
        """
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, -1)
        q, k, v = (
            part(hidden_states).view(shape).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        context = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        context = context.transpose(1, 2).flatten(2)
        return (context if self.output is None else self.output(context)), None


class _Compact:
    """A mixin for classes of transformers: layers get the sizes in `config.compact_layers`."""

    _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attention, attention_output, up, down = layer_paths(config.model_type)
        base: Any = self.base_model  # type: ignore[attr-defined]
        layers = base.transformer.layer if config.model_type == "distilbert" else base.encoder.layer
        # A class with a head first builds its encoder in the original sizes.
        for layer, sizes in zip(layers, config.compact_layers, strict=True):
            layer.set_submodule(
                attention, CompactAttention(config, sizes, attention_output is None)
            )
            for path, letter in ((attention_output, "O"), (up, "U"), (down, "D")):
                if path is not None:
                    layer.set_submodule(path, CompactLinear(sizes[letter]))


class _LabelWords:
    """A mixin for classes with a masked-language-model head: keeps only the label words' rows.

    The words are `config.label_words["ids"]`. `config.label_words["auto_class"]` selects the
    output: a class per text, read at its first token; a class per token; or the start and end of an
    answer.
    """

    # A decoder with a few rows of the vocabulary cannot be tied to the embeddings.
    _tied_weights_keys: Any = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for name, tensor in vocabulary_of_head(self).items():
            sizes = [
                len(config.label_words["ids"]) if n == config.vocab_size else n
                for n in tensor.shape
            ]
            path, _, leaf = name.rpartition(".")
            owner: Any = self.get_submodule(path)  # type: ignore[attr-defined]
            setattr(owner, leaf, nn.Parameter(tensor.new_zeros(sizes)))
            if isinstance(owner, nn.Linear):
                owner.out_features, owner.in_features = owner.weight.shape


def vocabulary_of_head(model: Any) -> dict[str, nn.Parameter]:
    """Return name -> parameter of the head's parameters over the vocabulary.

    They are the parameters outside the encoder with one row, column or number per word.
    """
    inside = set(model.base_model.modules())
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if module not in inside
        for name, parameter in module.named_parameters(recurse=False)
        if model.config.vocab_size in parameter.shape
    }


def _classifying(forward: Callable[..., Any]) -> Callable[..., outputs.ModelOutput]:
    """Wrap a masked language model's forward so that it returns a classifier's output.

    The wrapper keeps the signature.
    """

    @functools.wraps(forward)
    def classify(
        self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any
    ) -> outputs.ModelOutput:
        if labels is not None:
            raise TypeError(f"{type(self).__name__} cannot compute a loss: call it without labels")
        output = forward(self, *args, **kwargs)
        auto_class = self.config.label_words["auto_class"]
        states = {"hidden_states": output.hidden_states, "attentions": output.attentions}
        if auto_class == "AutoModelForQuestionAnswering":
            start_BL, end_BL = output.logits.unbind(-1)
            return outputs.QuestionAnsweringModelOutput(
                start_logits=start_BL, end_logits=end_BL, **states
            )
        if auto_class == "AutoModelForTokenClassification":
            return outputs.TokenClassifierOutput(logits=output.logits, **states)
        return outputs.SequenceClassifierOutput(logits=output.logits[:, 0], **states)

    return classify


def __getattr__(name: str) -> Any:
    """Create `CompactX` or `LabelWordsX` from X on first access.

    X is a class of transformers or of this file.
    """
    for prefix, added in (("Compact", _Compact), ("LabelWords", _LabelWords)):
        rest = name.removeprefix(prefix)
        if rest == name:
            continue
        plain = getattr(transformers, rest, None) or __getattr__(rest)
        # Otherwise transformers would search this module's source for its attention interface.
        can_set = staticmethod(plain._can_set_attn_implementation)
        members: dict[str, Any] = {"__module__": __name__, "_can_set_attn_implementation": can_set}
        if added is _LabelWords:
            members["forward"] = _classifying(plain.forward)
        globals()[name] = type(name, (added, plain), members)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
