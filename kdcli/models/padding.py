"""Find out whether a network's answers change when a row is padded to the length of another one."""

from torch import Tensor, no_grad, tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError, first_line
from kdcli.models.model import TYPE_IDS, reads_token_types
from kdcli.models.shape import longest_input
from kdcli.models.tokenizer_files import AS_LOADED

TEXT = "a b c d"
LENGTH = 6
"""Maximum number of tokens of the row that is tried, and of its padding."""
CHANGE = 0.01
"""Rounding changes outputs by less than this share of the largest one."""


def settle_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> str:
    """Set the tokenizer's padding side so that padding changes no output, if that is possible.

    kdcli pads on the right. Padding on the left changes the answers of most encoders, and of every
    model that is saved with such a tokenizer.

    Args:
        model: An encoder, or an encoder with a head, in eval mode.
        tokenizer: Its tokenizer.
        source: The model, for messages.

    Returns:
        A note if padding changes outputs, or if the side was changed; else an empty string.

    Raises:
        UsageError: Only padding on the left changes no answer, or the head cannot read two rows.
    """
    length = min(LENGTH, (longest_input(model.config) or 2 * LENGTH) // 2)
    ids = tokenizer(TEXT)["input_ids"][:length]
    filler = tokenizer.pad_token_id or 0
    if not ids:
        return ""
    types = reads_token_types(model.config, tokenizer)

    def outputs(before: int, after: int) -> Tensor:
        # A head that does not know the padding token reads one row, but not two.
        row_BL = pad(tensor([ids, ids]), (before, after), value=filler)
        batch = {"input_ids": row_BL, "attention_mask": row_BL.new_zeros(row_BL.shape)}
        batch["attention_mask"][:, before : before + len(ids)] = 1
        if types:
            batch[TYPE_IDS] = row_BL.new_zeros(row_BL.shape)
        try:
            with no_grad():
                first: Tensor = model(**batch)[0]
        except ValueError as error:
            raise UsageError(
                f"{source} cannot read several rows: {first_line(error)}",
                f"set pad_token_id to {filler} in the config.json of a copy of the model",
            ) from None
        return first

    alone = outputs(0, 0)

    def changes(before: int, after: int) -> bool:
        padded = outputs(before, after)
        if padded.shape != alone.shape:
            # States of tokens. Those of the padding do not count.
            padded = padded[:, before : before + len(ids)]
        return bool((padded - alone).abs().max() > CHANGE * alone.abs().max())

    if changes(0, len(ids)):
        if not changes(len(ids), 0):
            raise UsageError(
                f"the head of {source} reads the last token of a row, even if it is padding; "
                "kdcli pads on the right",
                "use a model of another type, or the vectors of this one",
            )
        return "its answers depend on padding, so on the other rows of a batch"
    if tokenizer.padding_side == "left" and changes(len(ids), 0):
        _pad_on_the_right(tokenizer)
        return "padding on the left, as its tokenizer does, changes its answers: kdcli pads right"
    return ""


def _pad_on_the_right(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    truncation, padding = getattr(tokenizer, AS_LOADED, (None, None))
    if padding is not None:
        setattr(tokenizer, AS_LOADED, (truncation, padding | {"direction": "right"}))
