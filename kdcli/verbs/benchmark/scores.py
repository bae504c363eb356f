"""Evaluates models on a task on every backend: a backend that is fast and less accurate is no speed-up.

Each backend is compared with torch in float32, and everything with the first model, by paired bootstrap.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kdcli.data.labelled.task_data import Labelled
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.exported import Export
from kdcli.deploy.runners import Runner, runner
from kdcli.engine.launch import Session, start
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Scorer
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.shape import is_shape, positions_of
from kdcli.models.training_rows import training_rows
from kdcli.report.schema import Comparison, Evaluation
from kdcli.verbs.benchmark.settings import BenchmarkRecipe
from kdcli.workloads.embedder import Embedder, as_task_model, predict_pairs
from kdcli.workloads.embedding_scores import RETRIEVAL, by_vectors, open_pairs
from kdcli.workloads.generation import check_no_text
from kdcli.workloads.predictions import Evaluator, Prediction, compared
from kdcli.workloads.runtimes import load_judged, runner_predictions
from kdcli.workloads.task import evaluator_of, open_judged

Judged = Model | Embedder
RESAMPLES = 1000
PLAIN = ("torch", "fp32")


@dataclass
class Scores:
    """Evaluations and comparisons as in `kdcli.report.schema`, and a sentence for each drop beyond `max_drop`. A model
    on a backend other than torch in float32 is named `MODEL on onnx int8`."""

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)


def open_task(
    recipe: BenchmarkRecipe, models: Mapping[str, str], *, trust_remote_code: bool
) -> tuple[Labelled, dict[str, Judged]]:
    """The evaluated examples of the recipe's task, and the models (name -> source) with their heads, or as embedding
    models. Raises UsageError: a shape, a model without a head for the task, retrieval, or see
    `kdcli.data.labelled.task_data`."""
    if recipe.task == RETRIEVAL:
        raise UsageError(
            "--task retrieval is for kdcli evaluate and kdcli export", "here: stsb, or own pairs"
        )
    for model in models.values():
        if is_shape(model):
            raise UsageError(
                f"--task {recipe.task} needs trained models, {model} is a shape", "leave --task out"
            )
    first = next(iter(models.values()))
    trained, trusted = (
        {name: training_rows(location(model)) for name, model in models.items()},
        trust_remote_code,
    )
    if by_vectors(str(recipe.task), first):
        data = open_pairs(str(recipe.task), recipe.data, trained)
        return data, {
            n: Embedder.open_judged(m, trust_remote_code=trusted) for n, m in models.items()
        }
    data = open_judged(str(recipe.task), recipe.data, first, trained, trust_remote_code=trusted)
    check_no_text(data.task, taken=False)
    return data, {
        n: load_judged(m, data.task, trust_remote_code=trusted) for n, m in models.items()
    }


def evaluate_backends(
    recipe: BenchmarkRecipe,
    data: Labelled,
    models: Mapping[str, Judged],
    backends: Sequence[tuple[str, str]],
    device: torch.device,
) -> Scores:
    """Evaluate every model on torch in float32 and on every backend, an export by its own runtime; compare all with the
    first model and each backend with torch. Raises UsageError, MachineError: see `kdcli.deploy.runners.runner`."""
    scores, first = Scores(), data.task.metrics[0]
    original: tuple[str, Mapping[str, Scorer]] | None = None
    for name, model in models.items():
        evaluator, _ = evaluator_of(
            data, recipe.data, as_task_model(model) if isinstance(model, Embedder) else model
        )
        plain: tuple[str, Mapping[str, Scorer]] | None = None
        for pair in (
            [PLAIN] if isinstance(model.model, Export) else dict.fromkeys([PLAIN, *backends])
        ):
            label = name if pair == PLAIN else f"{name} on {' '.join(pair)}"
            Progress.log(
                f"{label}: {len(evaluator.features.examples):,} examples of {data.task.name}"
            )
            predictions = _predict(model, evaluator, pair, device)
            scores.evaluations += evaluator.evaluations(label, data.split, predictions, worst=0)
            own = label, evaluator.scorers(predictions)
            original, plain = original or own, plain or own
            for other in {original[0]: original, plain[0]: plain}.values():
                if other is own:
                    continue
                scores.comparisons += (rows := compared(evaluator, own, other, RESAMPLES))
                lost = [
                    row
                    for row in rows
                    if row.metric == first and not row.difference >= -recipe.max_drop
                ]
                # A smaller model may lose more than that; a backend of the same weights may not.
                for row in lost if other is plain else ():
                    scores.worse.append(
                        f"{label} {row.set}".rstrip() + f": {first} {row.difference:+.4f}"
                    )
    return scores


def _predict(
    model: Judged, evaluator: Evaluator, backend: tuple[str, str], device: torch.device
) -> list[Prediction]:
    if isinstance(model.model, Export):
        return _by_runner(model, model.model.runner(latency_threads()), evaluator, device)
    with tempfile.TemporaryDirectory() as aside:
        how: dict[str, Any] = {
            "device": device,
            "threads": latency_threads(),
            "folder": Path(aside),
        }
        return _by_runner(model, runner(model.model.to(device), *backend, **how), evaluator, device)


def _by_runner(
    model: Judged, made: Runner, evaluator: Evaluator, device: torch.device
) -> list[Prediction]:
    if not isinstance(model, Embedder):
        return runner_predictions(made, evaluator, positions_of(model.model.config))
    return predict_pairs(
        replace(model, runner=made), evaluator, Session(start(device, torch.float32), device)
    )
