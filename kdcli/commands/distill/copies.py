"""`--augment-only`: write the copies of a task's examples and train nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kdcli.commands.distill.augment import augmented, open_words
from kdcli.commands.distill.settings import TaskDistillRecipe
from kdcli.commands.distill.task import check_teacher, load_task
from kdcli.data.augment.copies import rows
from kdcli.disk import write_atomic
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.training.launch import launch


@dataclass(frozen=True)
class Copies:
    """A file of copies, and notes on how they were made."""

    file: Path
    count: int
    notes: list[str]

    def to_json(self) -> str:
        """All fields."""
        return json.dumps({"file": str(self.file), "copies": self.count, "notes": self.notes}, indent=2)

    def renderables(self) -> Iterable[str]:
        """The same as text."""
        yield from self.notes
        yield f"{self.count:,} rows in {self.file}"


def write_copies(resolved: Resolved[TaskDistillRecipe], invocation: Invocation, file: Path) -> Copies | None:
    """Write the copies that `--augment` would train on, as jsonl in the task's columns.

    Raises:
        KdcliError: as `run_on_task`; or the file exists and is not to be overwritten.
    """
    recipe = resolved.recipe
    check_teacher(recipe)
    if file.is_dir() or not file.parent.is_dir():
        problem = "it is a directory" if file.is_dir() else "its directory is not there"
        raise UsageError(f"--augment-only {file}: {problem}")
    if file.exists() and not invocation.overwrite:
        raise UsageError(f"--augment-only {file}: there is such a file", "--overwrite replaces it; or name another")
    # A dry run starts no further processes.
    session = launch(recipe.train.dtype, replace(invocation, dry_run=True))
    if session is None:
        return None
    task, teacher = load_task(recipe, session)
    words = open_words(recipe.augment, task, teacher, trust_remote_code=session.trust_remote_code)
    made = augmented(recipe.augment, task, teacher, words, seed=recipe.train.seed)
    copies = made.examples[len(task.data.train) :]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(task.data.task, copies)]
    write_atomic(file, "".join(f"{line}\n" for line in lines))
    return Copies(file, len(copies), made.notes)
