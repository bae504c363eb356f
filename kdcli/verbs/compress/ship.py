"""What is shipped: the files of best/, and what the selection rows decide about the chosen model.

The selection rows choose the temperature and the thresholds, as they chose the model. The
verification rows then tell what these are worth.
"""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from kdcli.models.files import CONFIG_FILE, file_beside
from kdcli.models.load import location
from kdcli.models.temperature import store_temperature
from kdcli.recipe.sections import RunOptions
from kdcli.report.publish import Upload
from kdcli.report.schema_decisions import Confusion, Decision
from kdcli.verbs.compress.search import Candidate

SELECTION = "selection"


def fill_best(folder: Path, candidate: Candidate, options: RunOptions, sentence: str) -> None:
    """Copy a candidate's model in torch and its file for a backend into a directory.

    Its README.md gets the result and the command.
    """
    assert candidate.folder is not None
    config = file_beside(location(candidate.model), CONFIG_FILE)
    assert config is not None
    for source in dict.fromkeys((config.parent, candidate.folder)):
        for name in Upload.of(source).files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)
    readme = folder / "README.md"
    command = shlex.join(["kdcli", *options.arguments]) if options.arguments else "kdcli.compress"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    readme.write_text(with_summary(text, sentence, command), "utf-8")


def with_summary(card: str, sentence: str, command: str) -> str:
    """Return a model card with the result and the command below its title."""
    summary = f"{sentence}\n\nMade by:\n\n```\n{command}\n```\n"
    before, title, rest = card.partition("\n# ")
    if not title:
        return f"{summary}\n{card}"
    heading, _, body = rest.partition("\n")
    return f"{before}{title}{heading}\n\n{summary}{body}"


def calibrate(folder: Path, decisions: Sequence[Decision], model: str) -> list[str]:
    """Store the temperature that the selection rows give a classifier in its configuration.

    Rows without labels give none, because they cannot tell how often a prediction is right.

    Args:
        folder: the directory of the chosen model.
        decisions: the comparisons on the selection rows.
        model: the model's name in them.

    Returns:
        A note on the temperature; empty if none was stored.
    """
    for decision in decisions:
        calibration = decision.calibration.get(model)
        if decision.model != model or decision.reference != "labels" or calibration is None:
            continue
        if calibration.temperature is not None:
            store_temperature(folder, calibration.temperature)
            return [
                f"config.json has the temperature {calibration.temperature:.3g} "
                f"(kdcli_temperature), fitted on the selection rows: divide the logits by it for "
                "probabilities that are as sure as they are right"
            ]
    return []


def with_thresholds(
    decision: Decision, chosen_on: Sequence[Decision], baseline: str, model: str
) -> Decision:
    """Return a decision of the verification rows with the thresholds of the selection rows.

    Args:
        decision: the comparison on the verification rows.
        chosen_on: the comparisons on the selection rows.
        baseline, model: the names of both models in `chosen_on`.
    """
    for other in chosen_on:
        if (other.baseline, other.model, other.set) == (baseline, model, decision.set):
            update = {"thresholds": other.thresholds, "thresholds_on": SELECTION}
            return decision.model_copy(update=update)
    return decision


def never_predicted(decisions: Sequence[Decision]) -> list[str]:
    """Return a note for classes that the chosen model, or its teacher, never predicts."""
    notes = []
    for decision in decisions:
        confusion = decision.confusion
        if confusion is None:
            continue
        by_teacher = _predicted(confusion, by_row=True)
        by_model = _predicted(confusion, by_row=False)
        if lost := [name for name in by_teacher if name not in by_model]:
            notes.append(
                f"the chosen model never predicts {', '.join(lost)} on the verification rows, "
                "which the teacher does: do not ship it if you need them; --max-class-drop "
                "refuses such models"
            )
        absent = [name for name in confusion.labels if name not in by_teacher]
        if absent and decision.reference == "teacher":
            notes.append(
                f"the teacher never predicts {', '.join(absent)} on the verification rows, so "
                "nothing is known about them: give --data with such texts"
            )
    return notes


def _predicted(confusion: Confusion, *, by_row: bool) -> list[str]:
    """Return the classes that the teacher (rows) or the model (columns) predicts at all."""
    counts = confusion.counts if by_row else list(zip(*confusion.counts, strict=True))
    return [label for label, row in zip(confusion.labels, counts, strict=True) if sum(row) > 0]
