"""`kdcli trim`: a model without the tokens that a text does not need."""

from pathlib import Path

from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.load import load
from kdcli.engine.launch import choose_output_dir, launch
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
    measure,
    write_report,
)
from kdcli.report.front import EMBEDDER
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads.vocabulary import trimmed

BEFORE, AFTER = "untrimmed", "trimmed"


def run(resolved: Resolved[TrimRecipe], invocation: RunOptions) -> RunResult | None:
    """Trim a model and report; None in a process that prints nothing. Raises KdcliError: see
    `kdcli.errors`; nothing was written if model or data cannot be used, or every token is needed.
    """
    recipe = resolved.recipe
    if recipe.data.source is None:
        raise UsageError(
            "no text given", "kdcli trim MODEL --data TEXT: the tokens of the text are kept"
        )
    session = launch("fp32", invocation, judging=True)
    if session is None:
        return None
    source, trusted = str(recipe.model), session.trust_remote_code
    folder = choose_output_dir(f"trim-{Path(source).name}", resolved, invocation, session)
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    model, fmt = load(source, trust_remote_code=trusted), read_format(source)
    smaller, notes = trimmed(
        Model(model, tokenizer, source, ""),
        recipe.data.source,
        size=recipe.vocab_size,
        column=recipe.data.column,
        prompts=fmt.prompts.values() if fmt else (),
    )
    RunDir.claim(folder, resolved.to_yaml(), overwrite=invocation.overwrite)
    rows = training_rows(location(source))
    if fmt is not None:
        save_embedder(smaller.model, smaller.tokenizer, fmt, folder, rows)
    else:
        save_model(smaller.model, smaller.tokenizer, folder, rows)
    head = next((h for h in HEADS if type(model).__name__.endswith(f"For{h}")), None)
    for note in notes:
        Progress.log(note)
    subjects = [Subject(BEFORE, location(source)), Subject(AFTER, str(folder))]
    after = describe(smaller.model, str(folder), folder)
    contents = ReportContents(
        "trim",
        recipe,
        [
            ReportedModel(BEFORE, "baseline", describe_source(model, source)),
            ReportedModel(AFTER, "trimmed", after, BEFORE, folder),
        ],
        latency=measure(subjects, recipe.measure, session),
        notes=notes,
        auto_class=EMBEDDER if fmt else f"AutoModelFor{head}" if head else "AutoModel",
    )
    return write_report(RunDir(folder), contents)
