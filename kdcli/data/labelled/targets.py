"""Sources and targets of generation as rows `[CLS] source [SEP] target [SEP]`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.features import EXAMPLES_PER_CALL, Array, TokenizedRows, pad_id, were_cut
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Example

LEAST = 8  # Tokens that a source must have room for.


def encode_targets(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    target_length: int,
    end_id: int,
    token_types: bool,
) -> TokenizedRows:
    """Tokenise sources and their targets. `max_length`: tokens of a row at most, of which
    `target_length` are the target's with `end_id`, the last one; of a source in two texts the
    longer is cut. `token_types`: 0 for the source, 1 for the target. An example without a target is
    its source alone. Raises UsageError: no room for a source; no padding token."""
    room = max_length - target_length
    if room < LEAST:
        raise UsageError(
            f"rows of {max_length} tokens with targets of {target_length} leave {max(0, room)} for "
            "the source",
            "raise data.max_length (at most the model's positions), or lower generation.max_tokens",
        )
    rows: list[Array] = []
    sources: list[int] = []
    truncated = 0
    for begin in range(0, len(examples), EXAMPLES_PER_CALL):
        portion = examples[begin : begin + EXAMPLES_PER_CALL]
        how: dict[str, Any] = {"return_attention_mask": False, "truncation": True, "verbose": False}
        source = tokenizer(
            *map(list, zip(*(e.texts for e in portion), strict=True)), max_length=room, **how
        )
        targets = [str(e.label or "") for e in portion]
        target = tokenizer(targets, add_special_tokens=False, max_length=target_length - 1, **how)
        truncated += sum(map(max, were_cut(source, room), were_cut(target, target_length - 1)))
        for example, ids, ended in zip(
            portion, source["input_ids"], target["input_ids"], strict=True
        ):
            rows.append(
                np.asarray(ids if example.label is None else [*ids, *ended, end_id], dtype=np.int32)
            )
            sources.append(len(ids))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids_T = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    at_T = np.arange(len(ids_T)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_target_T = at_T >= np.repeat(np.array(sources, dtype=np.int64), lengths)
    return TokenizedRows(
        ids_T=ids_T,
        types_T=of_target_T.astype(np.int8) if token_types else None,
        ends=np.cumsum(lengths),
        labels=np.where(of_target_T, ids_T, IGNORED).astype(np.int64),
        example=np.arange(len(rows)),
        truncated=truncated,
        pad_id=pad_id(tokenizer),
        kind="text",
        sources=np.array(sources, dtype=np.int64),
    )
