"""A model as every verb handles it: weights, tokenizer and what is known about their origin."""

from dataclasses import dataclass, field

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.models.shape import shape_of
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import ModelShape, RowHashes

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
