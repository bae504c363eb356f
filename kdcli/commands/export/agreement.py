"""How often an exported file predicts what torch predicts, on real text: what its error means for a user."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.backends.export import OUTPUTS
from kdcli.backends.exported import EMBEDDING
from kdcli.backends.runners import Runner
from kdcli.backends.sessions import Array
from kdcli.models.shape import positions_of
from kdcli.types import Kind

ROWS, TOKENS = 8, 128
"""Texts of a batch, and tokens of a text at most."""


def agreement(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, made: Runner, kind: Kind | None, texts: Sequence[str]
) -> dict[str, float]:
    """Compare a runner with torch in float32 on texts.

    `same`: the share of equal predictions: of texts; for `tokens` of real tokens. `mean` and `most`: of `score`, the
    absolute differences. `cosine` and `least`: of an encoder (kind None), the mean and least cosine between the two
    means of the last hidden states over real tokens."""
    found: list[Array] = []
    for begin in range(0, len(texts), ROWS):
        # A question is a text, its context the next one.
        pair = [[*texts[1:], texts[0]][begin : begin + ROWS]] if kind == "span" else []
        length = min(TOKENS, positions_of(model.config) or TOKENS)
        how: dict[str, Any] = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
        rows = tokenizer(list(texts[begin : begin + ROWS]), *pair, **how)
        batch = {k: rows[k] for k in ("input_ids", "attention_mask", "token_type_ids") if k in rows}
        with torch.no_grad():
            outputs = model(**batch)
        sides = (
            [outputs[name].float().numpy() for name in OUTPUTS if name in outputs],
            made.output(made.call(made.prepare(batch))),
        )
        mask_BL = batch["attention_mask"].numpy().astype(bool)
        predicted = [_predicted(side, kind, mask_BL) for side in sides]
        found.append(_cosine(*predicted) if kind is None else np.abs(predicted[0] - predicted[1]))
    values = np.concatenate(found)
    if kind is None:
        return {"texts": len(texts), "cosine": float(values.mean()), "least": float(values.min())}
    if kind == "score":
        return {"texts": len(texts), "mean": float(values.mean()), "most": float(values.max())}
    alike = values == 0
    return {"texts": len(texts), "same": float((alike if alike.ndim == 1 else alike.all(1)).mean())}


def said(of: dict[str, float], kind: str | None) -> str:
    """The agreement in words; `kind` of a head, `embedding` or None."""
    on = f"on {of['texts']:.0f} texts"
    if kind == EMBEDDING:
        return f"cosine of the vectors {of['cosine']:.4f} {on}, the least {of['least']:.4f}"
    if kind is None:
        return f"cosine of the mean vectors {of['cosine']:.4f} {on}, the least {of['least']:.4f}"
    if kind == "score":
        return f"scores differ by {of['mean']:.3g} {on}, at most by {of['most']:.3g}"
    return f"{of['same']:.1%} of the {'labels of tokens' if kind == 'tokens' else 'predictions'} are the same {on}"


def _predicted(outputs: Sequence[Array], kind: Kind | None, mask_BL: Array) -> Array:
    """Predictions as numbers: a row a text, of `tokens` a row a token; of an encoder the mean vectors [B, D]."""
    first = outputs[0]
    if kind is None:
        return np.asarray((first * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdims=True))
    if kind == "span":
        ends = [np.where(mask_BL, side, -np.inf).argmax(-1) for side in outputs]
        return np.stack(ends, -1)
    if kind == "tokens":
        return np.asarray(first.argmax(-1)[mask_BL])
    if kind == "class":
        return np.asarray(first.argmax(-1))
    return np.asarray((first > 0).astype(int) if kind == "multi" else first[:, 0])


def _cosine(one_BD: Array, other_BD: Array) -> Array:
    lengths_B = np.linalg.norm(one_BD, axis=-1) * np.linalg.norm(other_BD, axis=-1)
    return np.asarray((one_BD * other_BD).sum(-1) / lengths_B)
