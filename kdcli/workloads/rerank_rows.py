"""Tokenised lists of candidates, and a teacher's scores for them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from kdcli.data.labelled.features import TokenizedRows, encode_examples
from kdcli.data.labelled.lists import RERANK_TASK, Lists
from kdcli.models.model import Model
from kdcli.types import Array, Batch, Examples, Signals
from kdcli.workloads.settings import LabelledSettings
from kdcli.workloads.task_models import row_format

SCORES_KEY = "scores"


@dataclass(frozen=True)
class ListRows:
    """Tokenised lists of candidates. Every example is a whole list.

    Attributes:
        lists: The queries and candidates.
        rows: Query and passage of each candidate, tokenised.
        scores: The teacher's score for each candidate, [R]; None without a teacher.
    """

    lists: Lists
    rows: TokenizedRows
    scores: Array | None = None

    def __len__(self) -> int:
        return len(self.lists)

    @property
    def lengths(self) -> Array:
        """Number of tokens in the longest row of each list, [Q]."""
        return np.maximum.reduceat(self.rows.lengths, self.lists.ends - self.lists.sizes)

    def batch(self, indices: Array) -> Batch:
        """Collate the rows of the given lists.

        Returns:
            The rows' tokens; `places` [Q, M], the row number of each candidate, or -1 past the end
            of a list; `labels` [Q], zeros that make every list count once in means over labels;
            `relevance` [R]; and `scores` [R] if the teacher's scores are known.
        """
        at = self.lists.rows_of(indices)
        batch = self.rows.batch(at)
        sizes = self.lists.sizes[indices]
        within = np.arange(sizes.max())
        begins = np.cumsum(sizes) - sizes
        places = np.where(within < sizes[:, None], begins[:, None] + within, -1)
        batch["places"] = torch.from_numpy(places)
        batch["labels"] = torch.zeros(len(indices), dtype=torch.int64)
        batch["relevance"] = torch.from_numpy(self.lists.labels[at].astype(np.float32))
        if self.scores is not None:
            batch[SCORES_KEY] = torch.from_numpy(self.scores[at].astype(np.float32))
        return batch


@dataclass(frozen=True)
class ScoreTargets:
    """A teacher's score for every candidate.

    Attributes:
        train_R: Scores for the training lists, [R].
        held_out_R: Scores for the held-out lists, [R].
    """

    train_R: Array
    held_out_R: Array

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        """Add the scores to the batches of both."""
        assert isinstance(examples, ListRows)
        assert isinstance(held_out, ListRows)
        train = replace(examples, scores=_known(self.train_R))
        return train, replace(held_out, scores=_known(self.held_out_R))

    def signals(self, batch: Batch) -> Signals | None:
        """Take the scores out of a batch."""
        scores_R = batch.pop(SCORES_KEY, None)
        if scores_R is None:
            return None
        return Signals(mask=batch["attention_mask"], logits=scores_R[:, None])


def _known(scores_R: Array) -> Array | None:
    """Return the scores if every candidate has one, otherwise None."""
    return None if np.isnan(scores_R).any() else scores_R


def tokenize_lists(lists: Lists, model: Model, max_length: int | None) -> TokenizedRows:
    """Tokenise the query and passage of each candidate for a model."""
    length = tokens_in_row(model, max_length)
    return encode_examples(
        RERANK_TASK,
        lists.examples,
        model.tokenizer,
        max_length=length,
        token_types=model.token_types,
    )


def tokens_in_row(model: Model, max_length: int | None) -> int:
    """Return the maximum row length for a model: the given one, its own or the task's."""
    return row_format(LabelledSettings(max_length=max_length), RERANK_TASK, model).max_length
