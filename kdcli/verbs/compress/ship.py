"""Fill best/, and store the temperature that the selection rows choose.

The selection rows choose a temperature. It is kept if it lowers the calibration error on the
verification rows.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from kdcli.deploy.cascade import FIRST
from kdcli.deploy.export import add_second_names
from kdcli.deploy.exported import FACTS
from kdcli.disk import read_json
from kdcli.models.files import CONFIG_FILE, WEIGHT_FILES, file_beside
from kdcli.models.load import location
from kdcli.models.temperature import remove_temperature, store_temperature
from kdcli.recipe.sections import RunOptions
from kdcli.report.publish import Upload
from kdcli.report.schema_decisions import Calibration, Decision
from kdcli.report.sections.repeat import repeat_command
from kdcli.report.text import fenced

FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
"""The front matter of a model card."""
SCORE_KEYS = ("model-index", "metrics")
COMMAND = re.compile(r"\n## Repeat it\n\n(`{3,})\n.*?\n\1\n", re.DOTALL)
"""The section of a model card that repeats the step which made the model."""
MAX_LISTED = 10
"""Maximum number of classes that a note names."""


def fill_best(folder: Path, sources: Sequence[Path], options: RunOptions, sentence: str) -> None:
    """Copy a candidate's model in torch and its file for a backend into a directory.

    Its README.md gets the result and the command. Anybody may read it once the model is pushed, so
    the command has no directories of this machine.
    """
    for place in dict.fromkeys(sources):
        config = file_beside(location(str(place)), CONFIG_FILE)
        assert config is not None
        source = config.parent
        for name in Upload.of(source).files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)
    add_second_names(folder)
    readme = folder / "README.md"
    command = repeat_command("compress", options.command_line("compress"), public=True)
    text = without_command(without_scores(readme.read_text("utf-8"))) if readme.is_file() else ""
    readme.write_text(with_summary(text, sentence + measured_file(folder), command), "utf-8")


def measured_file(folder: Path) -> str:
    """Return a sentence on the file that was measured, if it is not the model in torch."""
    if not (folder / FACTS).is_file() or (folder / FIRST).is_dir():
        return ""
    files: list[str] = sorted(read_json(folder / FACTS)["files"])
    model = next(name for name in files if name.endswith((".onnx", ".xml")))
    return (
        f"\n\nThese numbers are for `{model}`. `pipeline` and `AutoModel` load "
        f"`{WEIGHT_FILES[0]}`, the same model in float32."
    )


def without_scores(card: str) -> str:
    """Return a model card without the scores in its front matter.

    They are from the selection rows, so they are too good for the model that was chosen by them.
    """
    match = FRONT.match(card)
    if match is None:
        return card
    kept = {k: v for k, v in yaml.safe_load(match[1]).items() if k not in SCORE_KEYS}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{card[match.end() :]}"


def without_command(card: str) -> str:
    """Return a model card without the command of the step that made the model.

    The command of the whole compression stands at the top instead.
    """
    return COMMAND.sub("", card)


def with_summary(card: str, sentence: str, command: str) -> str:
    """Return a model card with the result and the command below its title."""
    summary = f"{sentence}\n\nMade by:\n\n{fenced(command)}\n"
    before, title, rest = card.partition("\n# ")
    if not title:
        return f"{summary}\n{card}"
    heading, _, body = rest.partition("\n")
    return f"{before}{title}{heading}\n\n{summary}{body}"


def fit_temperature(folder: Path, decisions: Sequence[Decision], model: str) -> None:
    """Store the temperature that the selection rows give a classifier in its configuration.

    Rows without labels give none, because they cannot tell how often a prediction is right.

    Args:
        folder: The directory of the chosen model.
        decisions: The comparisons on the selection rows.
        model: The model's name in them.
    """
    found, _ = _calibration(decisions, model)
    if found is None:
        return
    if found.temperature is None:
        remove_temperature(folder)
    else:
        store_temperature(folder, found.temperature)


def check_temperature(folder: Path, decisions: Sequence[Decision], model: str) -> list[str]:
    """Remove a stored temperature that does not help on the verification rows.

    Args:
        folder: The directory of the chosen model.
        decisions: The comparisons on the verification rows.
        model: The model's name in them.

    Returns:
        A note on the temperature. Empty if the model has no temperature.
    """
    found, name = _calibration(decisions, model)
    if found is None or found.stored_temperature is None or found.stored_error is None:
        return []
    of_set = f" of {name}" if name else ""
    change = (
        f"on the verification rows{of_set}, the temperature {found.stored_temperature:.3g} of the "
        f"selection rows changes the calibration error from {found.error:.3f} to "
        f"{found.stored_error:.3f}"
    )
    if found.stored_error >= found.error:
        remove_temperature(folder)
        return [f"{change}, so it is not stored"]
    return [
        f"{change}: config.json stores it as kdcli_temperature; divide the logits by it to get "
        "calibrated probabilities"
    ]


def _calibration(decisions: Sequence[Decision], model: str) -> tuple[Calibration | None, str]:
    """Return the calibration of a model on the first set with labels, and the name of the set.

    The name is empty if there is only one set.
    """
    own = [decision for decision in decisions if decision.model == model]
    for decision in own:
        if decision.reference == "labels":
            return decision.calibration.get(model), decision.set if len(own) > 1 else ""
    return None, ""


def never_predicted(decisions: Sequence[Decision]) -> list[str]:
    """Return a note for classes that the chosen model, or its teacher, never predicts."""
    notes = []
    for decision in decisions:
        by_teacher = {one.name for one in decision.classes if one.both + one.only_baseline}
        by_model = {one.name for one in decision.classes if one.both + one.only_model}
        names = [one.name for one in decision.classes]
        if lost := [name for name in names if name in by_teacher - by_model]:
            notes.append(
                f"the chosen model never predicts {_listed(lost)} on the verification rows, but "
                "the teacher does; if you need these classes, set --max-class-drop or a smaller "
                "--max-drop"
            )
        absent = [name for name in names if name not in by_teacher]
        if absent and decision.reference == "teacher":
            notes.append(
                f"the teacher never predicts {_listed(absent)} on the verification rows, so these "
                "classes were not checked; give --data that contains them"
            )
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    more = len(names) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
