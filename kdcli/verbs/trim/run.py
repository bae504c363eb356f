"""`kdcli trim`: remove the tokens that a text does not need from a model's vocabulary."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.data.labelled.partition import (
    SELECTION_SIZE,
    VERIFICATION_SIZE,
    Partition,
    choose_partition,
)
from kdcli.deploy.sparse.loading import load_network
from kdcli.engine.device import TORCH_DTYPES
from kdcli.engine.inputs import check_not_input
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session
from kdcli.errors import GateError, UsageError
from kdcli.messages import log
from kdcli.metrics.resolution import exceeds
from kdcli.models.cross_encoder import standing_alone
from kdcli.models.custom_class import HEADS
from kdcli.models.embedding_format import EmbeddingFormat, read_format, save_embedder
from kdcli.models.layout import has_encoder_class
from kdcli.models.load import check_case, load_tokenizer, location
from kdcli.models.model import Model, training_rows
from kdcli.recipe.resolve import Resolved, inherited, resolve
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import Entry, ReportContents, RunResult
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import Trimming
from kdcli.report.text import short
from kdcli.run.context import open_run
from kdcli.types import Array
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads import open_evaluation, open_rows
from kdcli.workloads.cut_vocabulary import (
    TokenUse,
    cut,
    kept_note,
    new_tokens_notes,
    sources_of,
    trimmed,
)
from kdcli.workloads.detect import as_trained, task_of_model
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import EvaluationResult, ModelScores
from kdcli.workloads.settings import FinetuneRecipe, TaskHeadSettings
from kdcli.workloads.workload import Workload


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
    fmt, tokenizer = read_format(source), load_tokenizer(source)
    model = load_network(source)
    if not has_encoder_class(str(model.config.model_type)):
        raise UsageError(
            f"a trimmed {model.config.model_type} cannot be saved: its encoder is part of a class "
            "with a decoder",
            "distil its vectors: --to static:256, or --student MODEL",
        )
    if fmt is not None:
        check_case(tokenizer, source)
    whole = Model(model, tokenizer, source, "")
    if fmt is None:
        whole = standing_alone(whole)
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
    before = Entry.loaded(BEFORE, "baseline", whole)
    # The rows that are left are unchanged, so the type of the checkpoint holds them exactly. The
    # layers after the pooling are saved in float32, and must have the type of what they read.
    has_layers = fmt is not None and bool(fmt.layers)
    held_in = "fp32" if before.card is None or has_layers else before.card.held_in
    smaller.model.to(TORCH_DTYPES.get(held_in, torch.float32))
    save_embedder(smaller.model, smaller.tokenizer, fmt, folder, training_rows(location(source)))
    smaller.model.float()
    for note in notes:
        log(note)
    made = f"made from {short(source)} by {kept_tokens(recipe, trimming)}"
    after = Entry.saved(AFTER, "trimmed", smaller.model, folder, BEFORE, made=made, source=source)
    contents = ReportContents(
        "trim",
        recipe,
        [before, after],
        evaluations=result.evaluations,
        comparisons=result.comparisons,
        notes=notes,
        trimming=trimming,
        auto_class=EMBEDDER if fmt else auto_class_of(model),
    )
    return TrimResult(context.report(contents, recipe.measure), missed)


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


BEFORE, AFTER = "untrimmed", "trimmed"
MIN_ROWS = 20
"""Minimum number of rows that choose the size, and of rows that verify it."""
SIZES = 24
"""Number of sizes, each smaller than the next by the same ratio. A bisection tries five of them."""


@dataclass(frozen=True)
class ScoredPart:
    """A part of the rows, and the score of the whole vocabulary on it."""

    workload: Workload
    model: Model
    scores: ModelScores

    @property
    def metric(self) -> str:
        """The metric that the bound is for."""
        return self.workload.gated_metrics[0]

    def compare(self, kept: Array) -> EvaluationResult:
        """Score the model with fewer tokens next to the whole vocabulary."""
        scores = {BEFORE: self.scores, AFTER: self.workload.score(cut(self.model, kept))}
        return self.workload.compare(scores)

    def lost(self, result: EvaluationResult) -> tuple[float, float, float]:
        """Return the points that the metric loses on the set that loses most, and the ends of their
        interval."""
        rows = [row for row in result.comparisons if row.metric == self.metric]
        worst = min(rows, key=lambda row: row.difference)
        return -100 * worst.difference, -100 * worst.high, -100 * worst.low


@dataclass(frozen=True)
class BoundedVocabulary:
    """The chosen vocabulary.

    Attributes:
        kept: The ids of its tokens.
        trimming: The share of the training rows that they cover.
        notes: Sentences on the rows that they cover and the points lost on the verification rows.
        result: The scores on the verification rows.
        missed: Why the verification rows miss the bound; None if they keep it.
    """

    kept: Array
    trimming: Trimming
    notes: list[str]
    result: EvaluationResult
    missed: str | None


def smallest_vocabulary(
    recipe: TrimRecipe, fmt: EmbeddingFormat | None, session: Session
) -> BoundedVocabulary:
    """Find the smallest vocabulary that loses at most `max_drop` points.

    Raises:
        UsageError: The model's task is unknown, or there are too few rows.
        GateError: The tokens of the training rows are not enough.
    """
    assert recipe.max_drop is not None
    request = _request(recipe)
    rows = open_rows(request, session)
    known = np.unique(np.concatenate(list(request.trained.values())))
    partition = choose_partition(
        rows.pools(known),
        selection=SELECTION_SIZE,
        verification=VERIFICATION_SIZE,
        seed=0,
    )
    if min(len(partition.selection), len(partition.verification)) < MIN_ROWS:
        raise UsageError(
            f"{recipe.data.source} has too few rows: {len(partition.selection)} would choose the "
            f"vocabulary and {len(partition.verification)} would verify it",
            f"give --data with at least {10 * MIN_ROWS} rows on which the model was not trained; "
            "they need no labels",
        )
    selection = _open(request, partition, "validation", session)
    texts = rows.training_texts(partition)
    prompts = fmt.prompts.values() if fmt else ()
    use = TokenUse.of_texts(selection.model, texts, prompts)
    kept, trimming = _fewest(recipe.max_drop, selection, use)
    verification = _open(request, partition, "verification", session)
    result = verification.compare(kept)
    points, low, high = verification.lost(result)
    count = sum(each.n for each in result.evaluations if each.model == AFTER)
    sentence = (
        f"{len(kept):,} of {len(verification.model.tokenizer):,} tokens lose {points:z.2f} "
        f"points of {verification.metric}, between {low:z.2f} and {high:z.2f} with 95 % "
        f"confidence, on {count:,} verification rows"
    )
    missed = (
        f"{sentence}: more than {recipe.max_drop:g}" if exceeds(points, recipe.max_drop) else None
    )
    notes = [sentence, kept_note(trimming), *new_tokens_notes(trimming)]
    return BoundedVocabulary(kept, trimming, notes, result, missed)


def _request(recipe: TrimRecipe) -> EvaluationRequest:
    """Return the request for the rows, which a model's task decides unless it is given."""
    source = str(recipe.model)
    task = recipe.task or task_of_model(source, recipe.data.source, recipe.pooling)
    options = {"task": task, "data.source": recipe.data.source}
    resolved = resolve(FinetuneRecipe, recipe=None, options=options)
    resolved = as_trained(resolved, source, trains=False)
    log(*inherited(resolved))
    data = resolved.recipe.data
    trained = {source: training_rows(location(source))}
    return EvaluationRequest(task, [source], data, trained, pooling=recipe.pooling)


def _open(
    request: EvaluationRequest, partition: Partition, split: str, session: Session
) -> ScoredPart:
    """Open a part of the rows, and score the model with its whole vocabulary on it."""
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "partition.safetensors"
        partition.write(file)
        data = request.data.model_copy(update={"partition": str(file), "split": split})
        workload = open_evaluation(replace(request, data=data), session)
    model = workload.load(request.models[0], head=TaskHeadSettings(), new_head=False)
    if workload.needs_reference:
        workload = workload.with_reference(model)
    return ScoredPart(workload, model, workload.score(model))


def _fewest(max_drop: float, selection: ScoredPart, use: TokenUse) -> tuple[Array, Trimming]:
    """Return the fewest tokens that keep the score on the selection rows, and what they cover.

    It assumes that fewer tokens lose more.

    Raises:
        UsageError: No token can be left out.
        GateError: All tokens of the training rows lose more than the bound.
    """
    model = selection.model
    least, most = use.sizes(model)

    def lost(size: int) -> float:
        kept, _ = use.keep(model, size)
        points, *_ = selection.lost(selection.compare(kept))
        log(f"{len(kept):,} tokens: {points:z.2f} points of {selection.metric} lost")
        return points

    if most < len(model.tokenizer) and exceeds(points := lost(most), max_drop):
        raise GateError(
            f"the {most:,} tokens of the training rows lose {points:.2f} points of "
            f"{selection.metric} on the selection rows, more than {max_drop:g}",
            "give more text, or allow a larger --max-drop",
        )
    sizes = sorted({round(most * (least / most) ** (n / SIZES)) for n in range(SIZES + 1)})
    # The largest size is known to be enough.
    enough = bisect_left(sizes[:-1], True, key=lambda size: not exceeds(lost(size), max_drop))
    return use.keep(model, sizes[enough])
