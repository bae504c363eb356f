"""A sample of text for a model, and the states that it computes from it."""

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.types import Batch, Examples

SAMPLE_TOKENS = 8192
"""Number of tokens of a sample, unless more are needed."""
LONGEST_ROW = 1.25
"""Longer rows are truncated, relative to the mean length. This leaves little padding."""


def sample_of(
    text: Examples | None,
    config: PreTrainedConfig,
    longest: int | None,
    tokens: int = SAMPLE_TOKENS,
) -> Batch:
    """Return evenly spaced rows of text, truncated, with about this many tokens.

    Args:
        text: The text; None for random tokens.
        config: The configuration of the model that reads the sample.
        longest: The model's maximum number of tokens.
        tokens: The number of tokens of text, without padding.
    """
    rows, width = 64, min(128, longest or 128)
    if text is None:
        ids_BL = torch.randint(
            int(config.vocab_size), (rows, width), generator=torch.Generator().manual_seed(0)
        )
        # Some model types number only the positions that are not padding.
        ids_BL[ids_BL == config.pad_token_id] = ((config.pad_token_id or 0) + 1) % config.vocab_size
        return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
    few = rows_of(text, rows, width)
    lengths = few["attention_mask"].sum(1).float()
    # A few long rows would fill all others with padding.
    cut = min(width, math.ceil(LONGEST_ROW * float(lengths.mean())))
    return rows_of(text, round(tokens / float(lengths.clamp(max=cut).mean())), cut)


def rows_of(text: Examples, count: int, width: int) -> Batch:
    """Return `count` evenly spaced rows, or all if there are fewer, truncated to `width` tokens."""
    count = min(len(text), count)
    batch = text.batch(np.arange(count) * len(text) // count)
    mask_BL = batch.get("attention_mask")
    if mask_BL is None or mask_BL.dim() > 2:
        mask_BL = torch.ones_like(batch["input_ids"])
    rows = {"input_ids": batch["input_ids"], "attention_mask": mask_BL}
    if "token_type_ids" in batch:
        rows["token_type_ids"] = batch["token_type_ids"]
    return {name: x[:, :width] for name, x in rows.items()}


def run_sample(model: PreTrainedModel, sample: Batch, dtype: torch.dtype = torch.float32) -> None:
    """Run a model on a sample, for the hooks on its modules.

    If `dtype` is bfloat16, its matrix products run in bfloat16. In float16, states could overflow,
    so the model then runs in float32.
    """
    # A hook may change weights, so their bfloat16 copies are not kept.
    in_bfloat16 = torch.autocast(
        model.device.type, torch.bfloat16, dtype == torch.bfloat16, cache_enabled=False
    )
    with in_bfloat16:
        model(**{name: x.to(model.device) for name, x in sample.items()})


def real_states(x_BLD: Tensor, sample: Batch) -> Tensor:
    """Return the states of all tokens that are not padding, [R, D] float32 on the CPU.

    Raises UsageError if one is NaN or infinite, as where half precision is too small for a model.
    """
    states_RD = x_BLD.cpu()[sample["attention_mask"].bool()].float()
    if not torch.isfinite(states_RD).all():
        raise UsageError(
            "the model computes NaN or infinity on the texts",
            "if its weights are right, compute in float32: --set train.dtype=fp32",
        )
    return states_RD
