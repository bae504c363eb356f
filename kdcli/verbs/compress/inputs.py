"""Refuse to reuse what was tried on other data or with another model of the same name."""

from contextlib import suppress
from pathlib import Path

from kdcli.data.sources import open_source
from kdcli.data.storage import content_hash
from kdcli.disk import HASHES, cache_key, user_path
from kdcli.engine.processes import StopRequest
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import KdcliError, UsageError
from kdcli.models.files import CONFIG_FILE, file_beside
from kdcli.models.load import commit_of, location
from kdcli.recipe.sections import RecipeValues
from kdcli.report.publish import Upload
from kdcli.verbs.compress.journal import Journal
from kdcli.verbs.compress.recipes import STEPS, base_recipe, dotted
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.workloads.vocabulary import sources_of

NOT_OF_MODEL = ("README.md", "LICENSE", "export.json", "onnx/", "openvino/")
"""Beginnings of the names of files that do not change what a model in torch computes."""


def check_inputs(runner: StepRunner) -> None:
    """Check that the data, the model and the recipes of steps are those with which the run began.

    Raises UsageError: a file has another content.
    """
    changed = changed_inputs(runner.recipe, runner.journal)
    if changed:
        have = "has" if len(changed) == 1 else "have"
        raise UsageError(
            f"{' and '.join(changed)} {have} changed since the run in {runner.folder} began",
            "choose another directory with -o, or start again with --overwrite",
        )


def warn_of_changes(recipe: CompressRecipe, folder: Path) -> None:
    """Log which inputs of a finished run have changed since it began, if they can be read."""
    journal = Journal(None, StopRequest())
    with suppress(KdcliError):
        journal.read(RunDir(folder))
        for name in journal.once("inputs", dict[str, str], dict):
            with suppress(KdcliError):
                open_source(name)
        if changed := changed_inputs(recipe, journal):
            Progress.log(
                f"{' and '.join(changed)} changed after this run began, so the answer may be "
                "outdated; start again with --overwrite"
            )


def changed_inputs(recipe: CompressRecipe, journal: Journal) -> list[str]:
    """Return the names of the inputs that have another content than when the run began.

    The first call of a run writes their hashes to its journal.
    """
    now = hashes_of_inputs(recipe)
    before = journal.once("inputs", dict[str, str], lambda: now)
    return [name for name in now if before.get(name, now[name]) != now[name]]


def hashes_of_inputs(recipe: CompressRecipe) -> dict[str, str]:
    """Return hashes of the data, of the recipes of steps and of the model, by name.

    Data at a URL has a hash of the sizes and versions that its server reports. Data sets on the hub
    have none.
    """
    named = [dotted(keys).get("data.source") for keys in _keys_of(recipe, "trim")]
    trimmed = [str(name) for name in named if name]
    texts = [source for name in trimmed for source in sources_of(name).values()]
    texts += [recipe.text] if recipe.text else []
    for name in texts:
        open_source(name)
    # The data was opened before. A directory is opened file by file.
    roots = [name for name in (recipe.data.source, recipe.data.train, *texts) if name]
    hashes = {root: cache_key(open_source(root).identity) for root in roots if "://" in root}
    hashes |= {
        name: value
        for name, value in HASHES.items()
        if name in roots or any(Path(name).is_relative_to(user_path(root)) for root in roots)
    }
    plans = [recipe.plan.finetune, recipe.plan.distill, recipe.plan.prune or {}]
    plans += _keys_of(recipe, *STEPS)
    # A text of a trimming may be a file that lists texts.
    for file in [recipe.data.partition, *trimmed, *map(base_recipe, plans)]:
        if file is not None and Path(file).is_file():
            hashes[file] = content_hash(Path(file))
    model = str(recipe.model)
    version = version_of_model(model)
    return hashes if version is None else hashes | {model: version}


def _keys_of(recipe: CompressRecipe, *verbs: str) -> list[RecipeValues]:
    """Return the keys of the steps that run these verbs."""
    return [keys for step in recipe.steps for verb, keys in step.items() if verb in verbs]


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
