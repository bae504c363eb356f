"""Evaluates models on a task on every backend: a backend that is fast and less accurate is no speed-up.

Each backend is compared with torch in float32 by paired bootstrap.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from kdcli.backends.runners import Runner, runner
from kdcli.bench.environment import latency_threads
from kdcli.commands.benchmark.settings import BenchmarkRecipe
from kdcli.data.labelled.features import Array
from kdcli.data.labelled.task_data import Labelled
from kdcli.downstream.predictions import Evaluator, Prediction, compared
from kdcli.downstream.task import evaluator_of, open_judged
from kdcli.errors import UsageError
from kdcli.models.heads import TaskModel, load_for_task
from kdcli.models.load import location
from kdcli.models.shape import is_shape, positions_of
from kdcli.models.training_rows import training_rows
from kdcli.training.progress import Progress
from kdcli.types import Batch

FORWARD_ROWS = 16
LENGTH_STEP = 64  # Rows are padded to a multiple of this many tokens: torch.compile compiles anew for every shape
RESAMPLES = 1000
PLAIN = ("torch", "fp32")


@dataclass
class Scores:
    """Evaluations and comparisons as in `kdcli.report.schema`, and a sentence for each drop beyond `max_drop`. A model
    on a backend other than torch in float32 is named `MODEL on onnx int8`."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)


def open_task(
    recipe: BenchmarkRecipe, models: Mapping[str, str], *, trust_remote_code: bool
) -> tuple[Labelled, dict[str, TaskModel]]:
    """The evaluated examples of the recipe's task, and the models (name -> source) with their heads. Raises UsageError:
    a shape, a model without a head for the task, or see `kdcli.data.labelled.task_data`."""
    for model in models.values():
        if is_shape(model):
            raise UsageError(f"--task {recipe.task} needs trained models, {model} is a shape", "leave --task out")
    first = next(iter(models.values()))
    trained = {name: training_rows(location(model)) for name, model in models.items()}
    data = open_judged(str(recipe.task), recipe.data, first, trained, trust_remote_code=trust_remote_code)
    settings: dict[str, Any] = {"new_head": False, "compacted": True, "trust_remote_code": trust_remote_code}
    return data, {name: load_for_task(model, data.task, **settings) for name, model in models.items()}


def evaluate_backends(
    recipe: BenchmarkRecipe,
    data: Labelled,
    models: Mapping[str, TaskModel],
    backends: Sequence[tuple[str, str]],
    device: torch.device,
) -> Scores:
    """Evaluate every model on torch in float32 and on every backend. Raises UsageError, MachineError: see
    `kdcli.backends.runners.runner`."""
    scores, first = Scores(), data.task.metrics[0]
    for name, model in models.items():
        evaluator, _ = evaluator_of(data, recipe.data, model)
        plain: list[Prediction] = []
        for pair in dict.fromkeys([PLAIN, *backends]):
            label = name if pair == PLAIN else f"{name} on {' '.join(pair)}"
            Progress.log(f"{label}: {len(evaluator.features.examples):,} examples of {data.task.name}")
            predictions = _predict(model, evaluator, pair, device)
            scores.evaluations += evaluator.evaluations(label, data.split, predictions, worst=0)
            if pair == PLAIN:
                plain = predictions
                continue
            sides = (label, evaluator.scorers(predictions)), (name, evaluator.scorers(plain))
            scores.comparisons += (rows := compared(evaluator, *sides, RESAMPLES))
            lost = [row for row in rows if row["metric"] == first and not row["difference"] >= -recipe.max_drop]
            scores.worse += [f"{label} {r['set']}".rstrip() + f": {first} {r['difference']:+.4f}" for r in lost]
    return scores


def _predict(
    model: TaskModel, evaluator: Evaluator, backend: tuple[str, str], device: torch.device
) -> list[Prediction]:
    with tempfile.TemporaryDirectory() as aside:
        how: dict[str, Any] = {"device": device, "threads": latency_threads(), "folder": Path(aside)}
        made = runner(model.model.to(device), *backend, **how)
        return evaluator.features.predictions(_logits(made, evaluator, positions_of(model.model.config)))


def _logits(made: Runner, evaluator: Evaluator, positions: int | None) -> list[Array]:
    """The logits of each row; start and end logits of a question answering head are stacked, [L, 2]."""
    rows = evaluator.features.rows
    logits: list[Array] = []
    for begin in range(0, len(rows), FORWARD_ROWS):
        batch = rows.batch(np.arange(begin, min(begin + FORWARD_ROWS, len(rows))))
        outputs = made.output(made.call(made.prepare(_padded(batch, rows.pad_id, positions))))
        logits += list(outputs[0] if len(outputs) == 1 else np.stack(outputs, -1))
    return logits


def _padded(batch: Batch, pad_id: int, positions: int | None) -> Batch:
    """The inputs of a batch, padded to a multiple of `LENGTH_STEP` tokens, or to the model's positions."""
    length = batch["input_ids"].shape[1]
    longer = length + -length % LENGTH_STEP
    more = (longer if positions is None else min(longer, positions)) - length
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
    return {name: pad(batch[name], (0, more), value=pad_id if name == "input_ids" else 0) for name in names}
