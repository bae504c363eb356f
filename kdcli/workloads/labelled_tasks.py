"""Open labelled tasks: check that data and model fit together, and tokenise the data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.answer_windows import check_answers, misplaced
from kdcli.data.labelled.partition import DividedRows
from kdcli.data.labelled.row_checks import describe_rows
from kdcli.data.labelled.splits import TaskSource, read_splits
from kdcli.data.labelled.task_data import Labelled, check_training, open_labelled
from kdcli.deploy.exported import is_export
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.messages import log_fact, silenced, warn
from kdcli.metrics.generated_texts import require_libraries
from kdcli.models.heads import head_of, load_for_task
from kdcli.models.load import load_config, location
from kdcli.models.model import Model, training_rows
from kdcli.recipe.methods import own_settings
from kdcli.types import OWN, Head, Kind, Task, task_title
from kdcli.workloads.labelled import (
    LabelledWorkload,
    describe_unknown,
)
from kdcli.workloads.predictions import Features
from kdcli.workloads.requests import EvaluationRequest, WorkloadRequest
from kdcli.workloads.settings import LabelledSettings
from kdcli.workloads.task_models import describe_cut, load_trained, row_format
from kdcli.workloads.text_generation import GenerationWorkload, Settings, load_generation

AGREEMENT: Mapping[Kind, tuple[str, ...]] = {
    "class": ("agreement", "macro_f1"),
    "multi": ("micro_f1", "macro_f1", "exact"),
    "score": ("spearman", "pearson", "mse"),
    "tokens": ("f1", "precision", "recall"),
    "span": ("f1", "exact"),
    "text": ("rougeL", "exact"),
}
"""Metrics of rows without labels, with the teacher's decisions as the reference."""
MISPLACED_ALLOWED = 0.01
"""Maximum share of answers that are missing from their contexts. Above it, the data is refused."""


def open_workload(request: WorkloadRequest, session: Session) -> tuple[LabelledWorkload, Model]:
    """Check a task's data and model, and tokenise the data.

    Raises:
        UsageError: The data or model cannot be used, or too many answers are missing from their
            contexts.
    """
    data, model, notes = check_task_data(request)
    workload = opened(request, session, data, model, notes)
    return workload, model


def opened(
    request: WorkloadRequest, session: Session, data: Labelled, model: Model, notes: list[str]
) -> LabelledWorkload:
    """Tokenise data that was checked by `check_task_data`."""
    form = row_format(request.data, data.task, model)
    train = Features.of(data.task, data.train, model.tokenizer, form)
    workload = new_workload(
        data.task.kind,
        session,
        data,
        request.data,
        train,
        max_length=form.max_length,
        tokenizer=model.tokenizer,
        metric_names=request.metrics,
        choose_on=request.choose_on,
        settings=_settings(request, data.task),
    )
    workload.evaluator = workload.make_evaluator(model, form)
    truncated = train.rows.truncated / len(data.train)
    of_cut = describe_cut(
        data.task.kind,
        "training examples",
        truncated,
        form.max_length,
        model,
        data.train[0].file,
    )
    unknown, warnings = describe_unknown(train.rows, model)
    facts = [*of_cut, *unknown]
    if data.split != "validation":
        facts.append(f"evaluated on {data.split}")
    log_fact(*facts)
    warn(*warnings)
    workload.notes = [*notes, *facts, *warnings]
    return workload


def _settings(request: WorkloadRequest, task: Task) -> Settings:
    """Return the recipe's `workload` section.

    Raises:
        UsageError: A key is unknown, or is set although the task generates no text.
    """
    settings = own_settings(Settings, request.settings, "workload", task_title(task.name))
    if task.kind != "text" and settings != Settings():
        raise UsageError(
            f"{task_title(task.name)} has no settings in workload: "
            f"{', '.join(request.settings)} are for tasks that generate text",
            "omit them",
        )
    return settings


def new_workload(
    kind: Kind,
    session: Session,
    data: Labelled,
    reading: LabelledSettings,
    train: Features | None = None,
    *,
    max_length: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    metric_names: Sequence[str] = (),
    choose_on: str | None = None,
    settings: Settings | None = None,
) -> LabelledWorkload:
    """Create the workload for a kind of labels."""
    workload = LabelledWorkload(
        session,
        data,
        reading,
        train,
        None,
        max_length,
        tokenizer,
        list(data.notes),
        metric_names,
        choose_on,
    )
    if kind != "text":
        return workload
    require_libraries()
    return GenerationWorkload(**vars(workload), generation=settings or Settings())


def check_task_data(request: WorkloadRequest) -> tuple[Labelled, Model, list[str]]:
    """Load and check a task's data and model without tokenising the data.

    Returns:
        The data, the model, and notes on them for the report.

    Raises:
        UsageError: The data or model cannot be used, or too many answers are missing from their
            contexts.
    """
    trained = {
        source: training_rows(location(source))
        for source in dict.fromkeys([request.model, *request.other_models])
    }
    data = open_labelled(
        request.data.rows_request(request.task),
        trained=trained,
        withheld=request.data.labels == "teacher",
        head=_known_head(request),
    )
    if data.task.kind == "text" and not request.generates:
        raise UsageError(
            f"{data.task.title} generates text, which this verb cannot do",
            "use kdcli finetune or evaluate, or --eval-task of kdcli distill",
        )
    notes = list(data.notes)
    if not data.has_labels:
        data = without_labels(data)
    else:
        check_training(data)
        findings = describe_rows(
            data.task, data.train, with_whole=request.data.partition is not None
        )
        log_fact(*findings)
        notes += findings
    if request.choose_on is not None and request.choose_on not in data.sets:
        sets = ", ".join(filter(None, data.sets)) or "there is only one"
        raise UsageError(f"choose_on {request.choose_on} is not among the evaluated sets: {sets}")
    model = _load_model(request, data.task)
    log_fact(f"{request.model}: {model.note}")
    if data.task.kind == "span":
        data, dropped = without_misplaced(data)
        notes += dropped
        log_fact(*dropped)
    return data, model, notes


def open_evaluation(request: EvaluationRequest, session: Session) -> LabelledWorkload:
    """Open a task to evaluate models. Every model tokenises the rows with its own tokenizer."""
    first = request.models[0]
    weights = not is_export(first)
    config = load_config(first, weights=weights, compacted=True)
    data = open_labelled(
        request.data.rows_request(request.task),
        training=False,
        # With a map of labels, the classes are the data's.
        head=head_of(config) if request.label_map is None else None,
        trained=request.trained,
        withheld=request.data.labels == "teacher",
    )
    if not data.has_labels:
        data = without_labels(data)
    return new_workload(data.task.kind, session, data, request.data, metric_names=request.metrics)


def open_rows(request: EvaluationRequest, session: Session) -> DividedRows:
    """Read the rows of all splits of a task."""
    data = open_evaluation(request, session).data
    source = TaskSource(
        data.task,
        request.data.source,
        request.data.train,
        on_bad=lambda row: None,
        withheld=not data.has_labels,
        columns=request.data.columns,
    )
    with silenced():
        return read_splits(source)


def without_labels(data: Labelled) -> Labelled:
    """Remove the labels from all examples, and score agreement with the teacher."""
    task = replace(data.task, metrics=AGREEMENT[data.task.kind])
    train = [replace(example, label=None) for example in data.train]
    sets = {name: [replace(e, label=None) for e in rows] for name, rows in data.sets.items()}
    return replace(data, task=task, train=train, sets=sets)


def without_misplaced(data: Labelled) -> tuple[Labelled, list[str]]:
    """Drop training questions whose answer is not at the given place in the context.

    Returns:
        The remaining data, and notes that list the dropped questions.

    Raises:
        UsageError: More than 1 % of the answers are misplaced.
    """
    lines = check_answers(data.train)
    if not lines:
        return data, []
    if len(lines) > MISPLACED_ALLOWED * len(data.train):
        message = f"{len(lines)} of {len(data.train)} answers are not at answer_start, for example"
        raise UsageError(
            "\n".join([message, *lines[:5]]),
            "answer_start counts characters of the context, from 0",
        )
    listed = lines[:20] + ([f"... {len(lines) - 20} more"] if len(lines) > 20 else [])
    kept = [example for example in data.train if misplaced(example) is None]
    return replace(data, train=kept), [f"{len(lines)} training questions were dropped:", *listed]


def _known_head(
    request: WorkloadRequest,
) -> Head | None:
    """Return what the head of the first model that has one predicts, for the user's own rows."""
    if request.task != OWN:
        return None
    for source in dict.fromkeys([request.model, *request.other_models]):
        config = load_config(source, compacted=True, weights=False)
        if (head := head_of(config)) is not None:
            # A new head takes the order of the data, and so does a head that `label_map` reorders.
            by_data = request.new_head or request.head.label_map is not None
            return replace(head, named=False) if by_data else head
    return None


def _load_model(
    request: WorkloadRequest,
    task: Task,
) -> Model:
    """Load the model that reads the rows, with a new head if the request allows it."""
    if not request.new_head:
        return load_for_task(
            request.model, task, label_map=request.head.label_map, new_head=False, seed=request.seed
        )
    if task.kind == "text":
        return load_generation(request.model, task, _settings(request, task), seed=request.seed)
    return load_trained(request.model, task, request.head, seed=request.seed)
