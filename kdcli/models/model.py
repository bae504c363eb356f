"""A model as every verb handles it: weights, tokenizer and what is known about their origin."""

from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.models.shape import shape_of
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import ModelShape, RowHashes


@dataclass(frozen=True)
class Model:
    """An encoder, bare or under a head, with its tokenizer.

    Attributes:
        model: the network in float32 and eval mode. An export takes its place where models are
            only evaluated.
        tokenizer: the tokenizer that produces the network's token ids.
        source: the hub id or directory that the model was loaded from.
        note: where the head comes from, for the log.
        tuned_length: maximum number of tokens in a row if the model was fine-tuned on this very
            task; None otherwise.
        rows: hashes of the labelled rows that trained this model or a model it was made from.
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
        """Whether token types distinguish the two texts of a pair."""
        return int(getattr(self.model.config, "type_vocab_size", 0) or 0) > 1
