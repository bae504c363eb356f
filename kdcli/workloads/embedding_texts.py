"""The texts of embedding models: tokenised rows, and the split into held-out and training texts."""

from dataclasses import dataclass

import numpy as np

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.data.sources import open_source
from kdcli.data.text.sentences import Texts, read_texts
from kdcli.errors import UsageError
from kdcli.types import Array, Batch
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.settings import LabelledSettings

MAX_EVALUATED = 5000
"""Maximum number of texts that are scored if no partition chooses them."""


@dataclass(frozen=True)
class TextRows:
    """A selection of the texts, tokenised.

    Attributes:
        rows: All texts.
        numbers: The numbers of the selected texts.
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


def evaluated_texts(request: EvaluationRequest) -> tuple[Texts, str]:
    """Read the texts on which models are compared with a teacher, and name their split.

    Raises:
        UsageError: There are no texts, no such split, or the partition names none of the texts.
    """
    if (file := request.data.partition) is None:
        split = _split_of(request)
        # Texts are chosen by their hashes, so this is a random sample.
        texts = read_all(request, split, rows=request.data.judged_rows or MAX_EVALUATED)
        return texts, "all texts" if split == "train" else split
    texts, split = read_all(request), request.data.split
    chosen = Partition.read(file).is_evaluated(text_hashes(texts.texts), split)
    if not chosen.any():
        raise UsageError(
            f"data.partition names no {split} text of this data",
            "give the data for which kdcli compress wrote the file",
        )
    return texts.take(np.flatnonzero(chosen)), split


def _split_of(request: EvaluationRequest) -> str:
    """Return the split to read: `train` if texts are not divided, or have no validation split."""
    source, split = request.data.source, request.data.split
    if not request.divided or source is None:
        return "train"
    return split if split != "validation" or open_source(source).has(split) else "train"


def column_of_texts(data: LabelledSettings) -> str | None:
    """Return the column of plain text; None if none is named.

    Raises:
        UsageError: Several columns, or the column of another role, such as a label.
    """
    named = data.columns.get("text", [])
    columns = [named] if isinstance(named, str) else named
    others = ", ".join(f"data.columns.{role}" for role in data.columns if role != "text")
    if others:
        labelled = "for rows with labels, add --task own; otherwise "
        raise UsageError(
            f"without a task, texts are read from one column, data.columns.text; got {others}",
            f"{labelled if 'label' in data.columns else ''}remove {others}, or rename the key to "
            "data.columns.text",
        )
    if len(columns) > 1:
        raise UsageError(
            f"without a task, texts are read from one column; got data.columns.text={named}",
            "give one of these columns",
        )
    return columns[0] if columns else None


def read_all(request: EvaluationRequest, split: str = "train", *, rows: int | None = None) -> Texts:
    """Read the texts of a request, at most `rows` of them.

    Raises:
        UsageError: There are no texts, or no such split.
    """
    if request.data.source is None:
        raise UsageError("no text given", "give --data TEXT, a file or directory of texts")
    request.data.refuse_choices("texts without a task", allowed=["columns", "judged_rows"])
    return read_texts(
        request.data.source,
        column=column_of_texts(request.data),
        unit="sentence",
        rows=rows,
        split=split,
    )
