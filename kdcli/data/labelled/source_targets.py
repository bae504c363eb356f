"""Sources and targets of generation as rows `[CLS] source [SEP] target [SEP]`."""

from collections.abc import Sequence

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from kdcli.data.labelled.features import EXAMPLES_PER_CALL, TokenizedRows, pad_id, were_cut
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Array, Example

MIN_SOURCE_TOKENS = 8


def encode_targets(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    target_length: int,
    end_id: int,
    token_types: bool,
) -> TokenizedRows:
    """Tokenise sources and their targets.

    The row of an example without a target holds only the source. If a source has two texts, the
    longer one is truncated first.

    Args:
        examples: The examples.
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per row.
        target_length: How many of these tokens are reserved for the target, including `end_id`.
        end_id: The token that ends a target.
        token_types: Whether to add token types, 0 for the source and 1 for the target.

    Raises:
        UsageError: There is no room for a source, or the tokenizer has no padding token.
    """
    room = max_length - target_length
    if room < MIN_SOURCE_TOKENS:
        raise UsageError(
            f"rows of {max_length} tokens with targets of {target_length} tokens leave "
            f"{max(0, room)} tokens for the source; it needs {MIN_SOURCE_TOKENS}",
            "raise data.max_length (at most the model's positions), or lower workload.max_tokens",
        )
    rows: list[Array] = []
    sources: list[int] = []
    truncated = 0
    for begin in range(0, len(examples), EXAMPLES_PER_CALL):
        portion = examples[begin : begin + EXAMPLES_PER_CALL]
        source, target = _tokenize(portion, tokenizer, room, target_length - 1)
        truncated += sum(map(max, were_cut(source, room), were_cut(target, target_length - 1)))
        pairs = zip(source["input_ids"], target["input_ids"], strict=True)
        for example, (source_ids, target_ids) in zip(portion, pairs, strict=True):
            ids = source_ids if example.label is None else [*source_ids, *target_ids, end_id]
            rows.append(np.asarray(ids, dtype=np.int32))
            sources.append(len(source_ids))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids_T = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    at_T = np.arange(len(ids_T)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target_T = at_T >= np.repeat(np.array(sources, dtype=np.int64), lengths)
    return TokenizedRows(
        ids_T=ids_T,
        types_T=is_target_T.astype(np.int8) if token_types else None,
        ends=np.cumsum(lengths),
        labels=np.where(is_target_T, ids_T, IGNORED).astype(np.int64),
        example=np.arange(len(rows)),
        truncated=truncated,
        pad_id=pad_id(tokenizer),
        kind="text",
        sources=np.array(sources, dtype=np.int64),
    )


def _tokenize(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    source_length: int,
    target_length: int,
) -> tuple[BatchEncoding, BatchEncoding]:
    """Tokenise sources with special tokens and targets without, and truncate both."""
    options: dict[str, bool] = {
        "return_attention_mask": False,
        "truncation": True,
        "verbose": False,
    }
    columns = map(list, zip(*(e.texts for e in examples), strict=True))
    source = tokenizer(*columns, max_length=source_length, **options)
    texts = [str(e.label or "") for e in examples]
    target = tokenizer(texts, add_special_tokens=False, max_length=target_length, **options)
    return source, target
