"""The paths of a compression that was moved, or that is named by another path than before."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from kdcli.disk import write_atomic
from kdcli.recipe.yaml import flow_style, read_yaml
from kdcli.verbs.compress.settings import CompressRecipe

STEPS = "steps"
"""The directory of the steps."""
TRAINING_TEXT = "training-text.jsonl"
"""The file of the training texts among the steps."""
PARTITION = "partition.safetensors"
"""The file of the chosen rows."""


def follow_move(step: Path, folder: Path, recipe: CompressRecipe) -> None:
    """Write the present paths of a compression into the recipes of a step that has begun.

    Otherwise its training would not continue, because its recipe names other files.

    Args:
        step: the directory of the step.
        folder: the directory of the compression.
        recipe: its recipe, whose own paths are the user's.
    """
    own = {recipe.model, recipe.text, recipe.data.source}
    if recipe.data.partition != str(folder / PARTITION):
        own.add(recipe.data.partition)
    for file in step.rglob("recipe.yaml"):
        try:
            before = text = file.read_text("utf-8")
            texts = set(_texts(read_yaml(text))) - own
        except (OSError, ValueError, yaml.YAMLError):
            continue  # The verb reports a damaged recipe.
        for old in folders_before(texts) - {folder}:
            for path in texts:
                if Path(path).is_relative_to(old):
                    here = str(folder / Path(path).relative_to(old))
                    text = text.replace(f" {flow_style(path)} ", f" {flow_style(here)} ")
        if text != before:
            write_atomic(file, text)


def folders_before(texts: Iterable[str]) -> set[Path]:
    """Return the directories that the compression had, from the paths in the recipe of a step.

    A step reads the chosen rows, whose file is in this directory, or the training text among the
    steps.
    """
    rows = {Path(text).parent for text in texts if Path(text).name == PARTITION}
    read = {Path(text).parent for text in texts if Path(text).name == TRAINING_TEXT}
    return rows | {steps.parent for steps in read if steps.name == STEPS}


def _texts(tree: object) -> Iterator[str]:
    """Yield the strings in a recipe."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _texts(value)
