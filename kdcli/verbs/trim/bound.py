"""The smallest vocabulary with which a model keeps its score.

The rows of the data are divided. Training rows give the frequencies of the tokens, selection rows
choose the number of tokens, and verification rows score the chosen vocabulary once.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kdcli.data.labelled.partition import choose_partition
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.errors import GateError, UsageError
from kdcli.models.embedder import EmbeddingFormat
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.training_rows import training_rows
from kdcli.report.schema import Comparison
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads import open_evaluation, open_rows
from kdcli.workloads.detect import task_of_model
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import EvaluationResult, ModelScores
from kdcli.workloads.settings import LabelledSettings, TaskHeadSettings
from kdcli.workloads.vocabulary import trimmed
from kdcli.workloads.workload import Workload

BEFORE, AFTER = "untrimmed", "trimmed"
SELECTION_ROWS, VERIFICATION_ROWS = 2000, 5000
"""Maximum numbers of rows that choose the size and that verify it."""
MIN_ROWS = 20
"""Minimum number of rows for each of them."""
STEP = 0.85
"""Ratio of neighbouring sizes."""
SIZES = 24
"""Number of sizes, of which a bisection tries about five."""


@dataclass(frozen=True)
class Scored:
    """A workload, the score of the whole vocabulary on it, and the model that has it."""

    workload: Workload
    model: Model
    scores: ModelScores

    @property
    def metric(self) -> str:
        """The metric that the bound is for."""
        return self.workload.gated_metrics[0]

    def compare(self, smaller: Model) -> EvaluationResult:
        """Score a model with a smaller vocabulary next to the whole one."""
        scores = {BEFORE: self.scores, AFTER: self.workload.score(smaller)}
        return self.workload.compare(scores)

    def lost(self, result: EvaluationResult) -> Comparison:
        """Return the difference of the metric on the set that loses most."""
        rows = [row for row in result.comparisons if row.metric == self.metric]
        return min(rows, key=lambda row: row.difference)


@dataclass(frozen=True)
class BoundedVocabulary:
    """The chosen vocabulary.

    Attributes:
        text: A file with the training texts, whose frequent tokens are kept.
        size: The number of tokens.
        result: The scores on the verification rows.
        sentence: What is kept and lost.
        met: Whether the verification rows lose at most the bound.
    """

    text: Path
    size: int
    result: EvaluationResult
    sentence: str
    met: bool


@contextmanager
def smallest_vocabulary(
    recipe: TrimRecipe, fmt: EmbeddingFormat | None, session: Session
) -> Iterator[BoundedVocabulary]:
    """Find the smallest vocabulary that loses at most `max_drop` points.

    The file of its text exists inside the `with` block.

    Raises:
        UsageError: the model's task is unknown, or there are too few rows.
        GateError: the tokens of the training rows do not suffice.
    """
    request = _request(recipe, session)
    rows = open_rows(request, session)
    known = np.unique(np.concatenate(list(request.trained.values())))
    partition = choose_partition(
        rows.pools(known),
        selection_rows=SELECTION_ROWS,
        verification_rows=VERIFICATION_ROWS,
        seed=0,
    )
    if min(len(partition.selection), len(partition.verification)) < MIN_ROWS:
        raise UsageError(
            f"{recipe.data.source} has too few rows to choose a vocabulary and to verify it: "
            f"{len(partition.selection)} and {len(partition.verification)} are left for it",
            f"give --data with at least {10 * MIN_ROWS} other rows; they need no labels",
        )
    with TemporaryDirectory() as temporary:
        file, text = Path(temporary) / "partition.safetensors", Path(temporary) / "text.jsonl"
        partition.write(file)
        lines = (
            json.dumps({"text": each}, ensure_ascii=False) + "\n"
            for each in dict.fromkeys(rows.training_texts(partition))
        )
        text.write_text("".join(lines), "utf-8")
        prompts = list(fmt.prompts.values()) if fmt else []
        selection = _open(request, file, "validation", session)
        size = _smallest(recipe, selection, text, prompts)
        verification = _open(request, file, "verification", session)
        smaller, _ = trimmed(verification.model, str(text), size=size, prompts=prompts)
        result = verification.compare(smaller)
        lost = verification.lost(result)
        count = sum(each.n for each in result.evaluations if each.model == AFTER)
        sentence = (
            f"{len(smaller.tokenizer):,} of {len(verification.model.tokenizer):,} tokens lose "
            f"{-100 * lost.difference:.2f} points of {verification.metric}, between "
            f"{-100 * lost.high:.2f} and {-100 * lost.low:.2f} with 95 % confidence, on "
            f"{count:,} verification rows"
        )
        assert recipe.max_drop is not None
        met = -100 * lost.difference <= recipe.max_drop
        yield BoundedVocabulary(text, size, result, sentence, met)


def _request(recipe: TrimRecipe, session: Session) -> EvaluationRequest:
    """Return the request for the rows, which a model's task decides unless it is given."""
    source = str(recipe.model)
    task = recipe.task or task_of_model(
        source,
        recipe.data.source,
        recipe.pooling,
        trust_remote_code=session.trust_remote_code,
    )
    data = LabelledSettings(source=recipe.data.source)
    trained = {source: training_rows(location(source))}
    return EvaluationRequest(task, [source], data, trained, pooling=recipe.pooling)


def _open(request: EvaluationRequest, file: Path, split: str, session: Session) -> Scored:
    """Open a part of the rows, and score the model with its whole vocabulary on it."""
    data = request.data.model_copy(update={"partition": str(file), "split": split})
    workload = open_evaluation(replace(request, data=data), session)
    model = workload.load(request.models[0], head=TaskHeadSettings(), new_head=False)
    if workload.needs_reference:
        workload = workload.with_reference(model)
    return Scored(workload, model, workload.score(model))


def _smallest(recipe: TrimRecipe, selection: Scored, text: Path, prompts: list[str]) -> int:
    """Return the smallest number of tokens that keeps the score on the selection rows.

    Fewer tokens lose more, so a bisection finds it.

    Raises GateError: all tokens of the training rows lose more than the bound.
    """
    assert recipe.max_drop is not None

    def lost(size: int | None) -> tuple[float, int]:
        smaller, _ = trimmed(selection.model, str(text), size=size, prompts=prompts)
        points = 0.0 - 100 * selection.lost(selection.compare(smaller)).difference
        count = len(smaller.tokenizer)
        Progress.log(f"{count:,} tokens: {points:.2f} points of {selection.metric} lost")
        return points, count

    points, largest = lost(None)
    if points > recipe.max_drop:
        raise GateError(
            f"the {largest:,} tokens of the training rows lose {points:.2f} points of "
            f"{selection.metric} on other rows, more than {recipe.max_drop:g}",
            "give more text, or allow a larger --max-drop",
        )
    sizes = [round(largest * STEP**n) for n in range(SIZES)]
    # The first `good` size meets the bound, the one at `bad` does not.
    good, bad = 0, len(sizes)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            met = lost(sizes[middle])[0] <= recipe.max_drop
        except UsageError:
            # Fewer tokens than are always kept.
            met = False
        good, bad = (middle, bad) if met else (good, middle)
    return sizes[good]
