"""`kdcli trim`: remove the tokens that a text does not need from a model's vocabulary."""

from pathlib import Path

from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.load import load
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.models.card import describe, describe_source
from kdcli.models.custom_class import HEADS
from kdcli.models.embedder import read_format, save_embedder
from kdcli.models.load import load_tokenizer, location, save_model
from kdcli.models.model import Model
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
)
from kdcli.report.front import EMBEDDER
from kdcli.run.context import open_run
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads.vocabulary import trimmed

BEFORE, AFTER = "untrimmed", "trimmed"


def trim(resolved: Resolved[TrimRecipe], options: RunOptions) -> RunResult | None:
    """Trim a model's vocabulary and report. Returns None in a process that prints nothing.

    Raises KdcliError: the run fails. If the model or the data cannot be used, or every token is
        needed, nothing is written.
    """
    recipe = resolved.recipe
    if recipe.data.source is None:
        raise UsageError(
            "no text given", "kdcli trim MODEL --data TEXT keeps the tokens of the text"
        )
    source = str(recipe.model)
    context = open_run(resolved, options, f"trim-{Path(source).name}", dtype="fp32", evaluates=True)
    if context is None:
        return None
    folder, trusted = context.folder, context.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    model, fmt = load(source, trust_remote_code=trusted), read_format(source)
    smaller, notes = trimmed(
        Model(model, tokenizer, source, ""),
        recipe.data.source,
        size=recipe.vocab_size,
        column=recipe.data.column,
        prompts=fmt.prompts.values() if fmt else (),
    )
    RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
    rows = training_rows(location(source))
    if fmt is not None:
        save_embedder(smaller.model, smaller.tokenizer, fmt, folder, rows)
    else:
        save_model(smaller.model, smaller.tokenizer, folder, rows)
    head = next((h for h in HEADS if type(model).__name__.endswith(f"For{h}")), None)
    for note in notes:
        Progress.log(note)
    before = describe_source(model, source)
    after = describe(smaller.model, str(folder), folder)
    contents = ReportContents(
        "trim",
        recipe,
        [
            ReportedModel(BEFORE, "baseline", before, timed=Subject(BEFORE, location(source))),
            ReportedModel(
                AFTER, "trimmed", after, BEFORE, folder, timed=Subject(AFTER, str(folder))
            ),
        ],
        notes=notes,
        auto_class=EMBEDDER if fmt else f"AutoModelFor{head}" if head else "AutoModel",
    )
    return context.report(contents, recipe.measure)
