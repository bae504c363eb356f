"""Score models on a task on every backend, because speed is worth little without accuracy.

A paired bootstrap compares each backend with torch in float32, and every model with the first one.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kdcli.deploy.environment import latency_threads
from kdcli.deploy.exported import Export
from kdcli.deploy.runners import runner
from kdcli.engine.session import Session, start
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.metrics.resolution import exceeds
from kdcli.models.grammar import is_shape
from kdcli.models.load import location
from kdcli.models.model import Model, training_rows
from kdcli.report.finish import Entry
from kdcli.report.schema import Comparison, Evaluation
from kdcli.types import task_title
from kdcli.verbs.benchmark.settings import BenchmarkRecipe
from kdcli.workloads import open_evaluation
from kdcli.workloads.beir import RETRIEVAL
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.workload import Workload

TORCH_FP32 = ("torch", "fp32")
PER_POINT = 0.01


@dataclass(frozen=True)
class BackendScores:
    """Scores of models on backends.

    Attributes:
        evaluations: The scores.
        comparisons: The paired differences between the scores.
        forms: The models on other backends than torch in float32, named `MODEL on onnx int8`.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    forms: list[Entry] = field(default_factory=list)

    def worse(self, max_drop: float) -> list[str]:
        """Return a sentence for each backend that loses more than `max_drop` points.

        A smaller model may lose more, but a backend with the same weights may not.
        """
        if not self.evaluations:
            return []
        first = next(iter(self.evaluations[0].metrics))
        same = {(form.name, form.of) for form in self.forms}
        points = {
            f"{row.model} {row.set}".rstrip(): -row.difference / PER_POINT
            for row in self.comparisons
            if row.metric == first and (row.model, row.baseline) in same
        }
        return [
            f"{name}: {lost:.2f} points of {first} lost"
            for name, lost in points.items()
            if exceeds(lost, max_drop)
        ]


@dataclass(frozen=True)
class ScoredTask:
    """The rows of a task and the models that are scored on it."""

    workload: Workload
    models: Mapping[str, Model]


def open_scored_task(
    recipe: BenchmarkRecipe,
    models: Mapping[str, str],
    device: torch.device,
) -> ScoredTask:
    """Open the recipe's task and load the models.

    Args:
        recipe: The recipe, which names a task.
        models: The sources of the models by name.
        device: The device that scores them.

    Raises:
        UsageError: A shape, a model without a head for the task, a task that this verb cannot
            score, or data that cannot be used.
    """
    task = str(recipe.task)
    if task == RETRIEVAL:
        raise UsageError(
            "--task retrieval is for kdcli evaluate and kdcli export",
            "choose stsb, or own pairs",
        )
    for model in models.values():
        if is_shape(model):
            raise UsageError(
                f"--task {task} needs trained models, but {model} is a shape", "omit --task"
            )
    trained = {name: training_rows(location(model)) for name, model in models.items()}
    session = Session(start(device, torch.float32), device)
    request = EvaluationRequest(task, list(models.values()), recipe.data, trained, divided=True)
    workload = open_evaluation(request, session)
    if not workload.one_pass:
        raise UsageError(
            f"task {task} generates text, which this verb cannot do", "use kdcli evaluate"
        )
    head = TaskHeadSettings()
    loaded = {n: workload.load(source, head=head, new_head=False) for n, source in models.items()}
    if workload.needs_reference:
        workload = workload.with_reference(next(iter(loaded.values())))
    return ScoredTask(workload, loaded)


def evaluate_backends(
    task: ScoredTask, backends: Sequence[tuple[str, str]], device: torch.device
) -> BackendScores:
    """Score every model on torch in float32 and on every backend, and compare.

    An export runs in its own runtime. Every model is compared with the first one, and every
    backend with torch.

    Raises UsageError or MachineError: a backend cannot run a model.
    """
    workload, forms = task.workload, list[Entry]()
    scores: dict[str, ModelScores] = {}
    for name, model in task.models.items():
        pairs = [TORCH_FP32] if isinstance(model.model, Export) else [TORCH_FP32, *backends]
        for pair in dict.fromkeys(pairs):
            label, (backend, dtype) = name, pair
            if pair != TORCH_FP32:
                label = f"{name} on {backend} {dtype}"
                forms.append(
                    Entry(label, "form", None, name, of=name, backend=backend, dtype=dtype)
                )
            log(f"scoring {label} on {task_title(workload.name)}")
            scores[label] = _score(workload, model, pair, device)
    first, *others = scores
    with_first = workload.compare(scores, dict.fromkeys(others, first))
    own = {form.name: str(form.of) for form in forms if form.of != first}
    with_torch = workload.compare(scores, own).comparisons
    comparisons = [*with_first.comparisons, *with_torch]
    return BackendScores(with_first.evaluations, comparisons, forms)


def _score(
    workload: Workload, model: Model, backend: tuple[str, str], device: torch.device
) -> ModelScores:
    """Score a model on a backend. An export is scored in its own runtime."""
    if isinstance(model.model, Export):
        return workload.score(model)
    if isinstance(model, Embedder) and model.runner is not None:
        return workload.score(model)
    with tempfile.TemporaryDirectory() as aside:
        network = model.model.to(device)
        threads = latency_threads()
        ready = runner(network, *backend, device=device, threads=threads, folder=Path(aside))
        return workload.score(workload.run_by(model, ready))
