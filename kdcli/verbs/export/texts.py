"""The texts of an export: some choose the integers, and others are compared with torch."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from kdcli.data.demo import demo_sentences
from kdcli.data.labelled.lists import ListSplits
from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.data.labelled.splits import Splits
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.report.text import short
from kdcli.run.context import cpu_session
from kdcli.types import Array, Batch, Example
from kdcli.workloads import open_rows
from kdcli.workloads.mteb_tasks import PREFIX
from kdcli.workloads.requests import EvaluationRequest

CALIBRATION_TEXTS = 256
"""Maximum number of texts on which integers are chosen."""
MIN_CALIBRATION_TEXTS = 16
"""With fewer texts of the user's data, integers are chosen on the texts of the package."""
MIN_TRAINING_TEXTS = 1000
"""Minimum number of texts on which integers are trained."""
MAX_UNKNOWN = 0.3
"""Maximum share of unknown tokens in texts that a tokenizer can read."""

TextRow = tuple[str, ...]
"""A text, or a pair of texts."""


@dataclass(frozen=True)
class CheckTexts:
    """The texts of an export. No text is in both lists, not even in other case or spacing.

    Attributes:
        compared: Texts on which each file is compared with torch.
        compared_from: Describes these texts.
        calibration: Rows on which integers are chosen.
        calibration_from: Describes these rows.
        from_package: Whether the calibration rows are not the user's.
    """

    compared: Sequence[str]
    compared_from: str
    calibration: Sequence[TextRow]
    calibration_from: str
    from_package: bool = False


@dataclass(frozen=True)
class TrainingRows:
    """Rows on which integers are trained.

    Attributes:
        rows: The rows.
        padded: Tokenises rows into a padded batch.
    """

    rows: Sequence[TextRow]
    padded: Callable[[Sequence[TextRow]], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of characters of each row, which orders rows by their number of tokens."""
        return np.array([sum(map(len, row)) for row in self.rows])

    def batch(self, indices: Array) -> Batch:
        """Return the batch of some rows."""
        return self.padded([self.rows[n] for n in indices])


def texts_of_package(tokenizer: PreTrainedTokenizerBase, most_compared: int) -> CheckTexts:
    """Return sentences that come with kdcli, or words that the tokenizer knows."""
    file = Path(__file__).with_name("sentences.txt")
    blocks = file.read_text("utf-8").split("\n\n")
    calibration, compared = (block.splitlines() for block in blocks)
    demo = list(itertools.islice(demo_sentences("validation"), CALIBRATION_TEXTS + most_compared))
    unknown, tokens = _tokens_per_word(calibration, tokenizer)
    if 2 * _tokens_per_word(demo, tokenizer)[1] < tokens:
        return replace(divide(demo, most_compared, "sentences of 'demo'"), from_package=True)
    if unknown > MAX_UNKNOWN:
        words = _random_words(tokenizer, CALIBRATION_TEXTS + most_compared)
        texts = divide(words, most_compared, "texts of random words that the tokenizer knows")
        return replace(texts, from_package=True)
    rows = [(text,) for text in calibration]
    origin = "sentences that come with kdcli"
    return CheckTexts(compared[:most_compared], origin, rows, origin, from_package=True)


def _tokens_per_word(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[float, float]:
    """Return the share of unknown tokens, and the number of tokens per word."""
    ids = [n for text in texts for n in tokenizer.encode(text, add_special_tokens=False)]
    words = sum(len(text.split()) for text in texts)
    return ids.count(tokenizer.unk_token_id) / max(1, len(ids)), len(ids) / words


def _random_words(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Return texts of random tokens, for a tokenizer of no natural language."""
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    lengths = rng.integers(4, 24, count)
    return [str(tokenizer.decode(rng.choice(ids, length).tolist())) for length in lengths]


def divide(
    texts: Iterable[str],
    most_compared: int,
    origin: str,
    most_calibration: int = CALIBRATION_TEXTS,
) -> CheckTexts:
    """Divide different texts into texts to compare and texts for calibration.

    If there are few texts, both parts get half of them.

    Raises:
        UsageError: There are no texts.
    """
    different: dict[int, str] = {}
    for text in texts:
        different.setdefault(_hash(text), text)
        if len(different) == most_compared + most_calibration:
            break
    read = list(different.values())
    if not read:
        raise UsageError("--data has no text to compare the file on", "give texts with words")
    count = min(most_compared, -(-len(read) // 2))
    return CheckTexts(read[:count], origin, [(text,) for text in read[count:]], origin)


def _hash(text: str) -> int:
    """Return a hash that does not depend on case and spacing."""
    return int(text_hashes([text])[0])


def texts_of_task(request: EvaluationRequest, evaluated: Sequence[str]) -> CheckTexts:
    """Return the evaluated texts, and training rows of the same data for calibration."""
    rows = list(dict.fromkeys(_training_rows(request)))
    source = short(request.data.source) if request.data.source else request.task
    return CheckTexts(
        evaluated,
        f"evaluated texts of {source}",
        _without(evaluated, rows),
        f"training rows of {source}",
    )


def _without(evaluated: Sequence[str], rows: Sequence[TextRow]) -> list[TextRow]:
    """Return the rows that share no text with the evaluated ones.

    An evaluated text may be one text of a row, or all of its texts together.
    """
    known = set(text_hashes(evaluated).tolist())
    return [row for row in rows if known.isdisjoint(map(_hash, (" ".join(row), *row)))]


def _training_rows(request: EvaluationRequest) -> list[TextRow]:
    """Return the texts of the training rows; none if the data has no training rows."""
    if request.task.startswith(PREFIX):
        return []
    partition = Partition(np.empty(0, np.uint64), np.empty(0, np.uint64))
    if request.data.partition is not None:
        partition = Partition.read(request.data.partition)
    try:
        rows = open_rows(request, cpu_session())
    except UsageError as error:
        Progress.log(f"the training rows cannot be read: {error.message}")
        return []
    if isinstance(rows, ListSplits):
        kept = np.flatnonzero(partition.is_training(rows.train.query_hashes))
        return [example.texts for example in rows.train.take(kept).examples]
    if isinstance(rows, Splits):
        is_words = rows.task.kind == "tokens"
        return [_row(example, is_words) for example in rows.training(partition)]
    return [(text,) for text in rows.training_texts(partition)]


def _row(example: Example, is_words: bool) -> TextRow:
    return (" ".join(example.texts),) if is_words else example.texts


def with_calibration(texts: CheckTexts, tokenizer: PreTrainedTokenizerBase) -> CheckTexts:
    """Take the package's texts for calibration if the data has too few of them."""
    if len(texts.calibration) >= MIN_CALIBRATION_TEXTS:
        return texts
    package = texts_of_package(tokenizer, 1)
    calibration = _without(texts.compared, package.calibration)
    if not calibration:
        raise UsageError(
            "no text is left for calibration: the file is compared on all texts of kdcli",
            "give other texts with --data",
        )
    return replace(
        package,
        compared=texts.compared,
        compared_from=texts.compared_from,
        calibration=calibration,
    )


def check_can_train(texts: CheckTexts, most: int) -> None:
    """Raise a UsageError if there are too few texts to train integers on `most` of them."""
    count, needed = len(texts.calibration), min(most, MIN_TRAINING_TEXTS)
    if count < needed:
        raise UsageError(
            f"--steps trains on at least {needed:,} texts, and there are {count:,}: "
            f"{texts.calibration_from}",
            "give more texts with --data, or a task with more training rows",
        )


def chosen_rows(texts: CheckTexts, count: int = CALIBRATION_TEXTS) -> list[TextRow]:
    """Return at most `count` evenly spaced rows, in an order without a pattern.

    The limit of tokens may leave out the last of them.
    """
    places = np.linspace(0, len(texts.calibration) - 1, count).astype(int)
    order = np.random.default_rng(0).permutation(np.unique(places))
    return [texts.calibration[n] for n in order]
