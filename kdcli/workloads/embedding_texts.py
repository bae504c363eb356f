"""The texts of embedding models: tokenised rows, and the split into held-out and training texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.data.text.sentences import Texts
from kdcli.types import Array, Batch


@dataclass(frozen=True)
class TextRows:
    """A selection of the texts, tokenised.

    Attributes:
        rows: all texts.
        numbers: the numbers of the selected texts.
    """

    rows: TokenizedRows
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> Array:
        """Number of tokens in each text."""
        return self.rows.lengths[self.numbers]

    def batch(self, indices: Array) -> Batch:
        """Collate a batch of texts."""
        return self.rows.batch(self.numbers[indices])


def divided_texts(texts: Texts, partition: str | None) -> tuple[Texts, int | None]:
    """Drop the verification texts of a partition and put its selection texts first.

    Returns:
        The texts, and the number of selection texts; None without a partition.
    """
    if partition is None:
        return texts, None
    chosen, hashes = Partition.read(partition), text_hashes(texts.texts)
    selected = np.flatnonzero(chosen.is_evaluated(hashes, "validation"))
    training = np.flatnonzero(chosen.is_training(hashes))
    if not len(selected) or not len(training):
        # The texts are others than the rows on which the models are scored.
        return texts.take(training), None
    return texts.take(np.concatenate([selected, training])), len(selected)
