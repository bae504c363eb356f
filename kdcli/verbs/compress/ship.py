"""Fill best/, and store the temperature that the selection rows choose.

The selection rows choose a temperature. It is kept if it lowers the calibration error on the
verification rows.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from huggingface_hub import ModelCard, ModelCardData

from kdcli.deploy.cascade import FIRST, SINGLE_FILE
from kdcli.deploy.export import add_second_names
from kdcli.disk import read_json
from kdcli.listing import class_names, joined
from kdcli.models.files import CONFIG_FILE, FACTS, WEIGHT_FILES, file_beside
from kdcli.models.load import location
from kdcli.models.model import all_rows, training_rows, write_training_rows
from kdcli.models.temperature import remove_temperature, store_temperature
from kdcli.recipe.sections import RunOptions
from kdcli.report.front import METHOD_TAGS, Score, store_scores
from kdcli.report.publish import Upload
from kdcli.report.schema_decisions import Calibration, Decision
from kdcli.report.sections.decision import LOW, LOW_TEMPERATURE
from kdcli.report.sections.repeat import repeat_command
from kdcli.report.sections.summary import card_sentence
from kdcli.report.text import fenced, plain, without_owner

METHOD_NAMES = {
    "distillation": "distillation",
    "pruned": "pruning",
    "quantized": "quantization",
}
"""Tag of the hub -> the method."""
COMMAND = re.compile(r"\n## Repeat it\n\n(`{3,})(?:sh)?\n.*?\n\1\n", re.DOTALL)
"""The section of a model card that repeats the step which made the model."""
LEAD = re.compile(r"\A\s*# .*\s+(?:.* and runs with .*\.\n)?")
"""The title and the first sentence of a model card."""
OF_STEP = "These scores are on the selection rows, by which this model was chosen."
"""The sentence below the heading of the scores of the step that made the model."""
SCORES = re.compile(r"^#+ Scores on .*$", re.MULTILINE)
"""The heading of a task's scores in a model card."""


@dataclass(frozen=True)
class Shipped:
    """What the model card of best/ states about the chosen model.

    Attributes:
        model: The name of the model that was compressed.
        name: The name of the chosen candidate.
        facts: Its loss, size and speed, as predicates of a sentence.
        remarks: Further sentences; may be empty.
        scores: Its scores on the verification rows.
        dataset: The data set of the hub that these rows are from, if there is one.
        first: Of a cascade, the directory of the small model's export.
    """

    model: str
    name: str
    facts: list[str]
    remarks: str
    scores: list[Score]
    dataset: str | None
    first: Path | None = None


def fill_best(folder: Path, sources: Sequence[Path], options: RunOptions, shipped: Shipped) -> None:
    """Copy a candidate's model in torch and its file for a backend into a directory.

    Its README.md gets the result and the command. Anybody may read it once the model is pushed, so
    the command has no directories of this machine. `push` leaves the hashes of the training rows.
    """
    for place in dict.fromkeys(sources):
        config = file_beside(location(str(place)), CONFIG_FILE)
        assert config is not None
        source = config.parent
        for name in Upload.of(source).files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)
    rows = (training_rows(location(str(place))) for place in sources)
    write_training_rows(folder, all_rows(*rows))
    add_second_names(folder)
    readme = folder / "README.md"
    command = repeat_command("compress", options.command_line("compress"), public=True)
    text = readme.read_text("utf-8") if readme.is_file() else "---\n{}\n---\n"
    readme.write_text(best_card(text, folder, shipped, command), "utf-8")


def best_card(text: str, folder: Path, shipped: Shipped, command: str) -> str:
    """Return the model card of best/.

    The step that made the model wrote a card with scores on the selection rows. They are too good
    for a model that was chosen by them, so the scores on the verification rows replace them.

    Args:
        text: The card of the step that made the model.
        folder: The directory of the model.
        shipped: What the card states.
        command: The command of the compression, which replaces the step's.
    """
    card = ModelCard(text, ignore_metadata_errors=True)
    library, runs_with = _libraries(folder)
    data = cast(ModelCardData, card.data)
    data.library_name = library
    tags = data.tags or []
    if shipped.first is not None:
        small = ModelCard.load(shipped.first / "README.md", ignore_metadata_errors=True)
        tags = data.tags = list(dict.fromkeys([*tags, *(small.data.tags or [])]))
    name = f"{without_owner(shipped.model)}-{shipped.name}".replace(" ", "-")
    store_scores(data, name, shipped.scores, shipped.dataset)
    methods = [METHOD_NAMES[tag] for tag in METHOD_TAGS if tag in tags]
    made = f"made from {shipped.model} by {joined(methods) or 'kdcli compress'}"
    title = f"# {plain(shipped.model)} compressed to {plain(shipped.name)}"
    lead = card_sentence(made, shipped.facts, runs_with)
    body = LEAD.sub("", card.text)
    repeat = f"\n## Repeat it\n\n{fenced(command, 'sh')}\n"
    body, replaced = COMMAND.subn(lambda _: repeat, body)
    body = SCORES.sub(lambda heading: f"{heading[0]}\n\n{OF_STEP}", body, count=1)
    parts = [title, lead, plain(shipped.remarks), body.strip(), "" if replaced else repeat.strip()]
    card.text = "\n\n".join(filter(None, parts)) + "\n"
    return str(card)


def _libraries(folder: Path) -> tuple[str, str]:
    """Return the Python library that loads the weights, and a phrase on what runs the model."""
    torch = "sentence-transformers" if (folder / "modules.json").is_file() else "transformers"
    if not (folder / FACTS).is_file():
        return torch, torch
    model = _model_file(folder)
    if (folder / FIRST / FACTS).is_file():
        both = f"`{FIRST}/{_model_file(folder / FIRST)}` and `{model}`"
        return torch, f"ONNX Runtime ({both}, which these numbers are for)"
    backend = "ONNX Runtime" if model.endswith(".onnx") else "OpenVINO"
    weights = WEIGHT_FILES[0]
    measured = f"{backend} (`{model}`, which these numbers are for)"
    return torch, f"{measured} or, as `{weights}` in float32, with {torch}"


def _model_file(folder: Path) -> str:
    """Return the file of an export, or of the larger model of a cascade."""
    files = sorted(read_json(folder / FACTS)["files"])
    models = (name for name in files if name.endswith((".onnx", ".xml")) and name != SINGLE_FILE)
    return str(next(models))


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
    low = f". It is {LOW}" if found.stored_temperature < LOW_TEMPERATURE else ""
    return [
        f"{change}: config.json stores it as kdcli_temperature; divide the logits by it to get "
        f"calibrated probabilities{low}"
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
                f"the chosen model never predicts {class_names(lost)} on the verification rows, "
                "but the teacher does; if you need these classes, set --max-class-drop or a "
                "smaller --max-drop"
            )
        absent = [name for name in names if name not in by_teacher]
        if absent and decision.reference == "teacher":
            notes.append(
                f"the teacher never predicts {class_names(absent)} on the verification rows, so "
                "these classes were not checked; give --data that contains them"
            )
    return notes
