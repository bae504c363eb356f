"""Copies of a task's examples with other words, as a recipe wants them; candidates are kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kdcli.commands.distill.settings import AugmentSettings
from kdcli.data.augment.copies import Augmented, augment, rows, words_of
from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.neighbours import Neighbours
from kdcli.disk import cache_dir, write_atomic
from kdcli.downstream.task import PreparedTask
from kdcli.errors import UsageError
from kdcli.models.card import weights_hash
from kdcli.models.heads import TaskModel
from kdcli.models.load import LoadedModel
from kdcli.models.masked_lm import load_masked_lm
from kdcli.training.progress import Progress


@dataclass(frozen=True)
class WordSource:
    """Where other words come from.

    Attributes:
        language_model: None where none was named, for a teacher that was fine-tuned has lost its own.
        neighbours: by word vectors.
        fingerprint: of both, and of the vocabulary.
    """

    language_model: LoadedModel | None
    neighbours: Neighbours
    fingerprint: str


def open_words(
    settings: AugmentSettings, task: PreparedTask, teacher: TaskModel, *, trust_remote_code: bool
) -> WordSource:
    """Read and check what words come from, before anything is trained.

    Raises:
        UsageError: see `load_masked_lm`; the model has another vocabulary than the teacher; a broken file of word
            vectors, or one without a word of the data; see `kdcli.data.augment.neighbours`.
    """
    model, asked = None, [""]
    if settings.model is not None:
        otherwise = "name another for augment.model, or none: then neighbours serve for all words"
        model = load_masked_lm(settings.model, otherwise=otherwise, trust_remote_code=trust_remote_code)
        if model.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
            raise UsageError(
                f"augment.model {settings.model} has another vocabulary than teacher {teacher.source}",
                "name the masked language model that the teacher was fine-tuned from, or one of the same tokenizer",
            )
        asked = [weights_hash(model.model)]
    else:
        Progress.log("no masked language model was named (augment.model), so neighbours serve for all words")
    if settings.glove is not None:
        path = Path(settings.glove)
        neighbours = Neighbours.of_glove(path, words_of(task.data.task, task.data.train))
        asked.append(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}")
    else:
        neighbours = Neighbours.of_embeddings(teacher.model, teacher.tokenizer)
        asked.append(weights_hash(teacher.model))
    Progress.log(neighbours.note)
    return WordSource(model, neighbours, _hash([*asked, sorted(teacher.tokenizer.get_vocab().items())]))


def augmented(
    settings: AugmentSettings, task: PreparedTask, teacher: TaskModel, source: WordSource, *, seed: int
) -> Augmented:
    """The task's training examples, and the copies of them; only one process may write the cache.

    Raises:
        UsageError: see `kdcli.data.augment.copies`.
        MachineError: the cache cannot be written.
    """
    of, examples, model = task.data.task, task.data.train, source.language_model
    return augment(
        of,
        examples,
        teacher.tokenizer,
        masked_words=MaskedWords(model.model, model.tokenizer, task.session.device) if model is not None else None,
        neighbours=source.neighbours,
        copies=settings.copies,
        probability=settings.probability,
        candidates=settings.candidates,
        seed=seed,
        folder=cache_dir() / "candidates",
        fingerprint=source.fingerprint,
        log=Progress.log,
    )


@dataclass(frozen=True)
class Copies:
    """The copies of a task's examples, written to a file."""

    file: Path
    count: int
    notes: list[str]

    def to_json(self) -> str:
        """Where they are, how many, and how they were made."""
        return json.dumps({"file": str(self.file), "copies": self.count, "notes": self.notes}, indent=2)

    def renderables(self) -> Iterable[str]:
        """The same in words."""
        yield from self.notes
        yield f"{self.count:,} rows in {self.file}"


def written_copies(
    settings: AugmentSettings,
    task: PreparedTask,
    teacher: TaskModel,
    source: WordSource,
    *,
    seed: int,
    file: Path,
) -> Copies:
    """Write the copies alone as jsonl, in the columns of the task; see `kdcli.data.augment.copies.rows`."""
    made = augmented(settings, task, teacher, source, seed=seed)
    copies = made.examples[len(task.data.train) :]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(task.data.task, copies)]
    write_atomic(file, "".join(f"{line}\n" for line in lines))
    return Copies(file, len(copies), made.notes)


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()
