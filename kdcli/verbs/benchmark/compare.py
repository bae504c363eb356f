"""Gather the reports of several runs into one report, without measuring anything."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kdcli.deploy.latency import Latency
from kdcli.deploy.old_machines.portable import read_portable
from kdcli.disk import MAX_REPORT_BYTES, read_json
from kdcli.report.finish import Entry, checked_report, with_baseline
from kdcli.report.schema import Quality, Report, renamed
from kdcli.report.sections.evaluations import set_name
from kdcli.types import Card


@dataclass
class Gathered:
    """The parts of a report, with each model under the name of its run.

    Attributes:
        models: The models of all runs.
        latency: Their measurements.
        quality: Their metrics by task.
        notes: Sentences for the reader.
        evaluated_on: The hash and the description of the examples, by task and run.
    """

    models: list[Entry] = field(default_factory=list)
    latency: Latency = field(default_factory=Latency)
    quality: Quality = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evaluated_on: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def differing(self) -> list[str]:
        """Return a sentence for every task that runs were evaluated on with different examples."""
        sentences = []
        for task, runs in self.evaluated_on.items():
            if len({rows for rows, _ in runs.values()}) > 1:
                examples = "; ".join(f"{run}: {words}" for run, (_, words) in runs.items())
                sentences.append(
                    f"the scores on {task} cannot be compared, because the runs were evaluated on "
                    f"different examples ({examples})"
                )
        return sentences


def gather(sources: Sequence[Path], card_of: Callable[[str], Card]) -> Gathered:
    """Read run directories, `report.json` files and results of the portable runner.

    `card_of` describes a shape that the portable runner measured.

    Raises:
        UsageError: A file is missing, damaged, or neither a report nor a portable result.
    """
    gathered = Gathered()
    for source in sources:
        file = source / "report.json" if source.is_dir() else source
        run = file.parent.name if file.name == "report.json" else file.stem
        raw = read_json(file, max_bytes=MAX_REPORT_BYTES)
        if "models" in raw and "command" in raw:
            _add_report(gathered, run, checked_report(raw, file))
        else:
            _add_portable(gathered, file, card_of)
    return gathered


def _add_report(gathered: Gathered, run: str, report: Report) -> None:
    """Add a report under the name of its run."""
    measured = {row.model for row in report.latency}
    # Untrained students and checkpoints only matter within their own run.
    listed = [m for m in report.models if m.card or m.role == "form" or m.name in measured]
    alone = len(listed) == 1
    names = {model.name: run if alone else f"{run}: {model.name}" for model in listed}
    own = report.renamed(names)
    gathered.models += [replace(Entry.reported(m), variant=None, run=run) for m in own.models]
    gathered.latency.rows += own.latency
    for task, by_model in own.quality.items():
        gathered.quality.setdefault(task, {}).update(by_model)
    data = report.recipe.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    for e in report.evaluations:
        words = f"{e.n:,} examples of {source or 'its own data'}, {e.split}"
        runs = gathered.evaluated_on.setdefault(set_name(e.task, e.set), {})
        runs[run] = e.rows_sha256 or words, words


def _add_portable(gathered: Gathered, file: Path, card_of: Callable[[str], Card]) -> None:
    """Add a result of the portable runner under the name of its file."""
    result, run = read_portable(file), file.stem
    names = {shape: f"{run}: {shape}" for shape in result.shapes}
    shapes = [Entry(name, "candidate", card_of(shape), run=run) for shape, name in names.items()]
    gathered.models += with_baseline(shapes)
    gathered.latency.rows += [renamed(row, names) for row in result.rows]
    gathered.notes.append(f"{run}: {json.dumps(result.environment, ensure_ascii=False)}")
