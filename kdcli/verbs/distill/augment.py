"""Augment a task's examples with copies in which some words are replaced.

Candidates for words are kept in the cache.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kdcli.data.augment.copies import Augmented, augment, words_of
from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.storage import content_hash
from kdcli.disk import cache_dir, cache_key
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.models.identity import weights_hash
from kdcli.models.masked_head import load_masked_lm
from kdcli.models.model import Model
from kdcli.verbs.distill.settings import AugmentSettings
from kdcli.workloads.labelled import LabelledWorkload


@dataclass(frozen=True)
class WordSource:
    """The sources of candidates for words.

    Attributes:
        language_model: A masked language model; None if all words come from neighbours.
        neighbours: The nearest neighbours of words.
        fingerprint: A hash of both sources and the vocabulary.
    """

    language_model: Model | None
    neighbours: Neighbours
    fingerprint: str


def open_words(
    settings: AugmentSettings,
    task: LabelledWorkload,
    teacher: Model,
) -> WordSource:
    """Load and check the sources of words.

    Raises:
        UsageError: The masked language model has another vocabulary than the teacher.
    """
    model, hashed = None, [""]
    if settings.model is not None:
        otherwise = (
            "name another model for augment.model, or leave it unset to take nearest neighbours "
            "for all words"
        )
        model = load_masked_lm(settings.model, otherwise=otherwise)
        if model.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
            raise UsageError(
                f"augment.model {settings.model} has another vocabulary than teacher "
                f"{teacher.source}",
                "name the masked language model that the teacher was fine-tuned from, or one with "
                "the same tokenizer",
            )
        hashed = [weights_hash(model.model)]
    else:
        log("augment.model is not set, so all replacement words are nearest neighbours")
    if settings.glove is not None:
        path = Path(settings.glove)
        neighbours = Neighbours.of_glove(path, words_of(task.data.task, task.data.train))
        hashed.append(content_hash(path))
    else:
        neighbours = Neighbours.of_embeddings(teacher.model, teacher.tokenizer)
        hashed.append(weights_hash(teacher.model))
    log(neighbours.note)
    return WordSource(
        model, neighbours, cache_key(*hashed, sorted(teacher.tokenizer.get_vocab().items()))
    )


def augmented(
    settings: AugmentSettings,
    task: LabelledWorkload,
    teacher: Model,
    source: WordSource,
    *,
    seed: int,
) -> Augmented:
    """Return the task's training examples and their copies; see `augment`.

    Only one process may write the cache.
    """
    examples, model = task.data.train, source.language_model
    return augment(
        task.data.task,
        examples,
        teacher.tokenizer,
        copies=settings.copies,
        probability=settings.probability,
        candidates=settings.candidates,
        seed=seed,
        folder=cache_dir() / "candidates",
        fingerprint=source.fingerprint,
        neighbours=source.neighbours,
        masked_words=(
            MaskedWords(model.model, model.tokenizer, task.session.device) if model else None
        ),
    )


@dataclass(frozen=True)
class Copies:
    """A file of copies, their number, and notes on how they were made."""

    file: Path
    count: int
    notes: list[str]

    def to_json(self) -> str:
        return json.dumps(
            {"file": str(self.file), "copies": self.count, "notes": self.notes}, indent=2
        )

    def renderables(self) -> Iterable[str]:
        yield from self.notes
        yield f"{self.count:,} rows in {self.file}"
