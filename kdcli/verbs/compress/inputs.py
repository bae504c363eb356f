"""Refuse to reuse what was tried on other data or with another model of the same name."""

from kdcli.data.sources import open_source
from kdcli.data.storage import content_hash
from kdcli.disk import HASHES, cache_key
from kdcli.errors import UsageError
from kdcli.models.files import CONFIG_FILE, file_beside
from kdcli.models.load import commit_of, location
from kdcli.report.publish import Upload
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.settings import CompressRecipe

NOT_OF_MODEL = ("README.md", "LICENSE", "export.json", "onnx/", "openvino/")
"""Beginnings of the names of files that do not change what a model in torch computes."""


def check_inputs(runner: StepRunner) -> None:
    """Check that the data and the model are those with which the run began.

    Raises UsageError: a file has another content.
    """
    now = hashes_of_inputs(runner.recipe)
    before = runner.journal.once("inputs", dict[str, str], lambda: now)
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        have = "has" if len(changed) == 1 else "have"
        raise UsageError(
            f"{' and '.join(changed)} {have} changed since the run in {runner.folder} began",
            "choose another directory with -o, or start again with --overwrite",
        )


def hashes_of_inputs(recipe: CompressRecipe) -> dict[str, str]:
    """Return hashes of the local data and of the model, by the names that the user gave."""
    if recipe.text is not None:
        open_source(recipe.text)
    # The data was opened before.
    sources = (recipe.data.source, recipe.text)
    hashes = {name: HASHES[name] for name in sources if name is not None and name in HASHES}
    model = str(recipe.model)
    version = version_of_model(model)
    return hashes if version is None else hashes | {model: version}


def version_of_model(model: str) -> str | None:
    """Return the commit of a model of the hub, or a hash of a local model's files.

    The hash covers the weights, the configuration, the tokenizer and code. The result is None if
    the hub does not answer.
    """
    # The weights of a model of the hub may not be downloaded yet.
    if (commit := commit_of(model)) is not None:
        return commit
    config = file_beside(location(model), CONFIG_FILE)
    if config is None:
        return None
    folder = config.parent
    names = [name for name in Upload.of(folder).files if not name.startswith(NOT_OF_MODEL)]
    return cache_key([(name, content_hash(folder / name)) for name in names])
