"""`kdcli trim`: remove the tokens that a text does not need from a model's vocabulary."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from kdcli.deploy.sparse.loading import load
from kdcli.engine.inputs import check_not_input
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, UsageError
from kdcli.models.custom_class import HEADS
from kdcli.models.embedding_format import EmbeddingFormat, read_format, save_embedder
from kdcli.models.layout import has_encoder_class
from kdcli.models.load import check_case, load_tokenizer, location, save_model
from kdcli.models.model import Model
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.entry import Entry
from kdcli.report.finish import ReportContents, RunResult
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import Trimming
from kdcli.report.text import short
from kdcli.run.context import open_run
from kdcli.verbs.trim.bound import AFTER, BEFORE, smallest_vocabulary
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads.cut_vocabulary import cut, sources_of, trimmed
from kdcli.workloads.scores import EvaluationResult


@dataclass(frozen=True)
class TrimResult:
    """The report of a trimmed model, and why it misses its bound; None if it does not."""

    run: RunResult
    missed: str | None

    def check(self) -> None:
        """Raise a GateError if the bound is missed."""
        if self.missed is not None:
            raise GateError(
                self.missed,
                f"the model is in {self.run.folder}; a search with a stricter --max-drop, or with "
                "more text, keeps more tokens",
                folder=self.run.folder,
            )


def trim(resolved: Resolved[TrimRecipe], options: RunOptions) -> TrimResult | None:
    """Trim a model's vocabulary and report. Returns None in a process that prints nothing.

    Raises:
        KdcliError: The run fails. If the model or the data cannot be used, or every token is
            needed, nothing is written.
    """
    recipe = resolved.recipe
    if recipe.data.source is None:
        raise UsageError(
            "no text given", "kdcli trim MODEL --data TEXT keeps the tokens of the text"
        )
    check_bound(recipe)
    source = str(recipe.model)
    context = open_run(resolved, options, f"trim-{Path(source).name}", dtype="fp32", evaluates=True)
    if context is None:
        return None
    folder = context.folder
    texts = list(sources_of(recipe.data.source).values())
    check_not_input(folder, texts, "--overwrite")
    fmt, tokenizer, model = read_format(source), load_tokenizer(source), load(source)
    if not has_encoder_class(str(model.config.model_type)):
        raise UsageError(
            f"a trimmed {model.config.model_type} cannot be saved: its encoder is part of a class "
            "with a decoder",
            "distil its vectors: --to static:256, or --student MODEL",
        )
    if fmt is not None:
        check_case(tokenizer, source)
    whole = Model(model, tokenizer, source, "")
    result = EvaluationResult()
    missed = None
    if recipe.max_drop is None:
        smaller, trimming, notes = trimmed(
            whole,
            recipe.data.source,
            size=recipe.vocab_size,
            column=recipe.data.column,
            share=recipe.data.share,
            prompts=fmt.prompts.values() if fmt else (),
        )
    else:
        RunDir(folder).check(resolved.to_yaml(), resume=False, overwrite=options.overwrite)
        bounded = smallest_vocabulary(recipe, fmt, context.session)
        smaller, trimming, notes = cut(whole, bounded.kept), bounded.trimming, bounded.notes
        result, missed = bounded.result, bounded.missed
    RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
    _save(smaller, fmt, folder)
    for note in notes:
        Progress.log(note)
    made = f"made from {short(source)} by {kept_tokens(recipe, trimming)}"
    after = Entry.saved(AFTER, "trimmed", smaller.model, folder, BEFORE, made=made, source=source)
    contents = ReportContents(
        "trim",
        recipe,
        [Entry.loaded(BEFORE, "baseline", whole), after],
        evaluations=result.evaluations,
        comparisons=result.comparisons,
        notes=notes,
        trimming=trimming,
        auto_class=EMBEDDER if fmt else auto_class_of(model),
    )
    return TrimResult(context.report(contents, recipe.measure), missed)


def _save(model: Model, fmt: EmbeddingFormat | None, folder: Path) -> None:
    rows = training_rows(location(model.source))
    if fmt is not None:
        save_embedder(model.model, model.tokenizer, fmt, folder, rows)
    else:
        save_model(model.model, model.tokenizer, folder, rows)


def auto_class_of(model: PreTrainedModel) -> str:
    """Return the name of the transformers class that loads a model with its head."""
    head = next((h for h in HEADS if type(model).__name__.endswith(f"For{h}")), None)
    return f"AutoModelFor{head}" if head else "AutoModel"


def kept_tokens(recipe: TrimRecipe, trimming: Trimming) -> str:
    """Describe which tokens a trimmed model keeps."""
    source, points = short(str(recipe.data.source)), recipe.max_drop
    if trimming.kept == trimming.needed:
        return f"removing the tokens that do not occur in the training text of {source}"
    text = (
        f"keeping {trimming.kept:,} of its {trimming.whole:,} tokens: special tokens, single "
        f"characters and the most frequent tokens of {source}, which cover {trimming.covered}"
    )
    if points is not None:
        text += (
            f" ({trimming.kept:,} is the smallest size tried that loses at most {points:g} points "
            "on the selection rows)"
        )
    return text


def check_bound(recipe: TrimRecipe) -> None:
    """Check the options of a bound.

    Raises:
        UsageError: They do not fit together.
    """
    if recipe.max_drop is None:
        if recipe.task is not None or recipe.pooling is not None:
            raise UsageError(
                "--task and --pooling are for --max-drop, which scores the model",
                "add --max-drop POINTS, or omit them",
            )
        return
    if recipe.vocab_size is not None:
        raise UsageError(
            "--vocab-size and --max-drop both choose the number of tokens", "give one of them"
        )
    in_part = recipe.data.column is not None or recipe.data.share < 1
    if in_part or str(recipe.data.source).endswith((".yaml", ".yml")):
        raise UsageError(
            "--max-drop scores the rows of one source, with the texts that its task reads",
            "omit data.column and data.share, and trim for several languages by --vocab-size",
        )
