"""What a compression reads: its data, its model and the recipes of its steps, by content."""

from collections.abc import Mapping
from pathlib import Path

from kdcli.data.sources import open_source
from kdcli.disk import HASHES, cache_key
from kdcli.engine.inputs import content_of_inputs
from kdcli.models.load import commit_of
from kdcli.recipe.resolve import Resolved
from kdcli.verbs.compress.recipes import dotted
from kdcli.verbs.compress.record import Record
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.workloads.vocabulary import sources_of


def changed_inputs(now: Mapping[str, str], record: Record) -> str:
    """Say which inputs have another content than when the run began; empty for none."""
    before = record.inputs
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    have = "has" if len(changed) == 1 else "have"
    return f"{' and '.join(changed)} {have} changed" if changed else ""


def hashes_of_inputs(resolved: Resolved[CompressRecipe], folder: Path) -> dict[str, str]:
    """Return hashes of the data, of the recipes of steps and of the model, by name.

    Data at a URL has a hash of the sizes and versions that its server reports, and a model of the
    hub its commit. Data sets on the hub have none.
    """
    recipe = resolved.recipe
    trims = [keys for step in recipe.steps for verb, keys in step.items() if verb == "trim"]
    named = [str(name) for keys in trims if (name := dotted(keys).get("data.source"))]
    # The text of a trimming may be a file that lists texts.
    texts = [source for name in named for source in sources_of(name).values()]
    roots = [name for name in (recipe.data.source, recipe.data.train, recipe.text, *texts) if name]
    remote = {}
    for root in roots:
        source = open_source(root)
        if "://" in root:
            remote[root] = cache_key(source.identity)
    listed = {text: HASHES[text] for text in texts if text in HASHES}
    commit = commit_of(str(recipe.model))
    versions = {} if commit is None else {str(recipe.model): commit}
    return content_of_inputs(resolved.to_yaml(), folder) | listed | remote | versions
