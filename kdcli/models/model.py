"""A model as every verb handles it: weights, tokenizer and what is known about their origin."""

from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.disk import write_atomic
from kdcli.errors import UsageError
from kdcli.models.files import file_beside
from kdcli.models.shape import shape_of
from kdcli.types import ModelShape, RowHashes

ROWS_FILE, TENSOR = "training_rows.safetensors", "row_hashes"
NO_ROWS: RowHashes = np.empty(0, np.uint64)


def training_rows(where: str) -> RowHashes:
    """Return the sorted hashes of the rows that trained a model; empty if nothing is recorded.

    `where` is a directory or a hub id, as in `from_pretrained`. Raises UsageError if the file is
    damaged.
    """
    if (file := file_beside(where, ROWS_FILE)) is None:
        return NO_ROWS
    try:
        rows = load(file.read_bytes())[TENSOR]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UsageError(
            f"{file} is damaged: {error}", "copy the model again from the original directory"
        ) from None
    if rows.dtype != np.uint64 or rows.ndim != 1:
        raise UsageError(
            f"{file} must hold one dimension of uint64, but it holds {rows.ndim} dimensions of "
            f"{rows.dtype}",
            "copy the model again from the original directory",
        )
    return all_rows(rows)


def write_training_rows(folder: Path, rows: RowHashes) -> None:
    """Record the rows in a model's directory; without rows, no file is written.

    Raises MachineError if the file cannot be written.
    """
    if len(rows):
        write_atomic(folder / ROWS_FILE, save({TENSOR: all_rows(rows)}))


def all_rows(*parts: RowHashes) -> RowHashes:
    """Return the rows of several models, sorted and without duplicates."""
    return reduce(np.union1d, parts, NO_ROWS)


TYPE_IDS = "token_type_ids"


@dataclass(frozen=True)
class Model:
    """An encoder, bare or under a head, with its tokenizer.

    Attributes:
        model: The network in float32 and eval mode. An export takes its place where models are
            only evaluated.
        tokenizer: The tokenizer that produces the network's token ids.
        source: The hub id or directory that the model was loaded from.
        note: Where the head comes from, for the log.
        tuned_length: Maximum number of tokens in a row that the model's own head reads; None for
            a new head and if the task's protocol sets it.
        rows: Hashes of the labelled rows that trained this model or a model it was made from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    note: str = ""
    tuned_length: int | None = None
    rows: RowHashes = field(default_factory=NO_ROWS.copy)

    @property
    def shape(self) -> ModelShape:
        """The encoder's layers and widths."""
        return shape_of(self.model.config)

    @property
    def token_types(self) -> bool:
        """Whether the network is given token types, which distinguish the two texts of a pair."""
        return reads_token_types(self.model.config, self.tokenizer)


def has_token_types(config: PreTrainedConfig) -> bool:
    """Return whether a network has more than one token type."""
    return int(getattr(config, "type_vocab_size", 0) or 0) > 1


def reads_token_types(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a network is given token types.

    The tokenizer decides, as in every other library. A network may have types that it was trained
    without, because its tokenizer does not return them.
    """
    return has_token_types(config) and TYPE_IDS in tokenizer.model_input_names


def return_token_types(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer return token types, also after it is saved, if the network has them.

    A new head is trained with them, so whoever loads the model must feed them too.
    """
    names = list(tokenizer.model_input_names)
    if has_token_types(config) and TYPE_IDS not in names:
        names.insert(1, TYPE_IDS)
        tokenizer.model_input_names = names
        tokenizer.init_kwargs["model_input_names"] = names
