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
    own = set(_texts(recipe.model_dump())) - {str(folder / PARTITION)}
    for file in step.rglob("recipe.yaml"):
        try:
            before = text = file.read_text("utf-8")
            texts = set(_texts(read_yaml(text))) - own
        except (OSError, ValueError, yaml.YAMLError):
            continue  # The verb reports a damaged recipe.
        for old in folders_before(texts, folder) - {folder}:
            for path in texts:
                inside = relative_parts(path, old)
                if inside == (PARTITION,) or (len(inside) > 1 and inside[0] == STEPS):
                    here = str(folder.joinpath(*inside))
                    text = text.replace(f" {flow_style(path)} ", f" {flow_style(here)} ")
        if text != before:
            write_atomic(file, text)


def folders_before(texts: Iterable[str], folder: Path) -> set[Path]:
    """Return the directories that the compression had, from the paths in the recipe of a step.

    A step's recipe names the file of the chosen rows, which lies in this directory, or something
    among the steps. Paths among the steps count only if `folder` has the same.
    """
    paths = [Path(text) for text in texts]
    folders = {path.parent for path in paths if path.name == PARTITION}
    for path in paths:
        # A pruned model is in a directory of its step.
        for steps in (path.parent, path.parent.parent):
            if steps.name == STEPS and (folder / STEPS / path.relative_to(steps)).exists():
                folders.add(steps.parent)
    return folders


def relative_parts(path: str, folder: Path) -> tuple[str, ...]:
    """Return the parts of a path inside a directory; empty if it is outside."""
    return Path(path).relative_to(folder).parts if Path(path).is_relative_to(folder) else ()


def _texts(tree: object) -> Iterator[str]:
    """Yield the strings in a recipe."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value)
