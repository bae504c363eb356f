"""What models score on a task on every backend they are measured on: fast and less accurate is no speed-up.

Data flow: examples → rows of tokens → batches → the backend's forward pass → predictions → evaluations, each backend
compared with torch in float32 by paired bootstrap.
"""

from __future__ import annotations

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
from kdcli.downstream.task import features_of, open_judged
from kdcli.errors import UsageError
from kdcli.models.heads import TaskModel, load_for_task
from kdcli.models.shape import is_shape, positions_of
from kdcli.training.progress import Progress
from kdcli.types import Batch

AT_ONCE = 16
"""Rows of a forward pass."""

ROUNDED = 64
"""Rows are padded to a multiple of so many tokens: torch.compile compiles every shape it meets."""

RESAMPLES = 1000
"""Of the bootstrap of a difference."""

PLAIN = ("torch", "fp32")
"""What every backend is compared with."""


@dataclass(frozen=True)
class Scores:
    """What was found.

    Attributes:
        evaluations, comparisons: as in `kdcli.report.schema`; a model on another backend than torch in float32 is named
            `MODEL on onnx int8`.
        worse: what fell by more than is allowed, as sentences.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)


def open_task(
    recipe: BenchmarkRecipe, names: Sequence[str], models: Sequence[str], *, trust_remote_code: bool
) -> tuple[Labelled, dict[str, TaskModel]]:
    """The judged examples of the recipe's task, and the models with their heads.

    Raises:
        UsageError: a shape, a model without a head for the task; see `kdcli.data.labelled.task_data`.
    """
    shapes = [model for model in models if is_shape(model)]
    if shapes:
        raise UsageError(f"--task {recipe.task} needs trained models, {shapes[0]} is a shape", "leave --task out")
    data = open_judged(str(recipe.task), recipe.data, models[0], trust_remote_code=trust_remote_code)
    headed = {
        name: load_for_task(model, data.task, new_head=False, compacted=True, trust_remote_code=trust_remote_code)
        for name, model in zip(names, models, strict=True)
    }
    return data, headed


def scores_on_backends(
    recipe: BenchmarkRecipe,
    data: Labelled,
    headed: Mapping[str, TaskModel],
    backends: Sequence[tuple[str, str]],
    device: torch.device,
) -> Scores:
    """Judge every model on torch in float32 and on every backend.

    Raises:
        UsageError, MachineError: see `kdcli.backends.runners.runner`.
    """
    evaluations: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for name, of in headed.items():
        evaluator = Evaluator.of(
            data.task, data.sets, of.tokenizer, **features_of(recipe.data, data.task, of, as_tuned=True)
        )
        plain: list[Prediction] = []
        for backend, precision in dict.fromkeys([PLAIN, *backends]):
            label = name if (backend, precision) == PLAIN else f"{name} on {backend} {precision}"
            Progress.log(f"{label}: {len(evaluator.features.examples):,} examples of {data.task.name}")
            with tempfile.TemporaryDirectory() as folder:
                made = runner(
                    of.model.to(device),
                    backend,
                    precision,
                    device=device,
                    threads=latency_threads(),
                    folder=Path(folder),
                )
                room = positions_of(of.model.config)
                predictions = evaluator.features.predictions(_outputs(made, evaluator, room))
            evaluations += evaluator.evaluations(label, data.split, predictions, worst=0)
            if (backend, precision) == PLAIN:
                plain = predictions
                continue
            of_both = (label, evaluator.scorers(predictions)), (name, evaluator.scorers(plain))
            comparisons += compared(evaluator, *of_both, RESAMPLES)
    first = data.task.metrics[0]
    worse = [
        f"{row['model']} {row['set']}".rstrip() + f": {first} {row['difference']:+.4f}"
        for row in comparisons
        if row["metric"] == first and not row["difference"] >= -recipe.max_drop
    ]
    return Scores(evaluations, comparisons, worse)


def _outputs(made: Runner, evaluator: Evaluator, room: int | None) -> list[Array]:
    """The logits of each row; a question answering head has two vectors in place of one matrix."""
    rows = evaluator.features.rows
    found: list[Array] = []
    for begin in range(0, len(rows), AT_ONCE):
        batch = _rounded(rows.batch(np.arange(begin, min(begin + AT_ONCE, len(rows)))), rows.pad_id, room)
        outputs = made.output(made.call(made.prepare(batch)))
        found += list(outputs[0] if len(outputs) == 1 else np.stack(outputs, -1))
    return found


def _rounded(batch: Batch, pad_id: int, room: int | None) -> Batch:
    """The inputs of a batch, padded to a multiple of `ROUNDED` tokens, or to the most that the model can read."""
    length = batch["input_ids"].shape[1]
    longer = length + -length % ROUNDED
    more = (longer if room is None else min(longer, room)) - length
    return {
        name: pad(batch[name], (0, more), value=pad_id if name == "input_ids" else 0)
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in batch
    }
