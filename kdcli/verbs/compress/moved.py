"""The paths of a compression that was moved, or that is named by another path than before."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from kdcli.disk import write_atomic
from kdcli.recipe.yaml import flow_style, read_yaml
from kdcli.verbs.compress.settings import CompressRecipe

STEPS = "steps"
"""The directory of the steps."""
PARTITION = "partition.safetensors"
"""The file of the chosen rows."""


def path_here(path: str, folder: Path) -> str:
    """Return the path of a file of a compression whose directory is now `folder`.

    Other paths are returned as they are.
    """
    parts = Path(path).parts
    if parts[-1:] == (PARTITION,):
        return str(folder / PARTITION)
    if STEPS not in parts:
        return path
    last = len(parts) - parts[::-1].index(STEPS)
    here = folder.joinpath(STEPS, *parts[last:])
    return str(here) if here.exists() else path


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
            tree = read_yaml(text)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # The verb reports a damaged recipe.
        for path in _texts(tree):
            if path not in own and (here := path_here(path, folder)) != path:
                text = text.replace(f" {flow_style(path)} ", f" {flow_style(here)} ")
        if text != before:
            write_atomic(file, text)


def _texts(tree: object) -> Iterator[str]:
    """Yield the strings in a recipe."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _texts(value)
