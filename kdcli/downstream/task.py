"""Fine-tuning a model on a labelled task and judging it: one run, for whichever verb wants to know a score.

Data flow: examples → rows of tokens → batches of similar length → logits → loss → engine → predictions → evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.spans import misplaced
from kdcli.data.labelled.task_data import Labelled, check_training, open_labelled
from kdcli.data.tasks import OWN
from kdcli.downstream.predictions import Evaluator, Features, Prediction
from kdcli.downstream.settings import LabelledSettings, TaskRecipe
from kdcli.errors import UsageError
from kdcli.losses.hard import hard_loss, labelled
from kdcli.models.capture import Capture, capture, params_without_grad
from kdcli.models.heads import GENERIC, TaskModel, load_for_task
from kdcli.models.label_words import load_with_label_words
from kdcli.models.load import load_config
from kdcli.models.shape import positions_of
from kdcli.training.engine import train
from kdcli.training.evaluation import evaluate
from kdcli.training.launch import make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Batch, Examples, Job, Kind, Needs, Order, Outcome, Schedule, Signals, StepLoss, Task

GROUP, SHORT = 8, 20
"""Rows of similar length that are padded together, twice as many where the mean row has at most `SHORT` tokens; a batch
is made of several such groups."""

MISPLACED_ALLOWED = 0.01
"""Share of answers that may not be in their context; more is a mistake in the data and not of an annotator."""


@dataclass(frozen=True)
class PreparedTask:
    """A task made ready for models with one tokenizer.

    Attributes:
        train: None where nothing is trained.
        notes: what a reader of a report should know of the data.
        max_length: tokens of a row at most.
    """

    session: Session
    data: Labelled
    train: Features | None
    evaluator: Evaluator
    notes: list[str]
    max_length: int


@dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned model, what its training took, and its predictions for the judged examples."""

    headed: TaskModel
    outcome: Outcome
    predictions: list[Prediction]


def prepare(
    recipe: TaskRecipe,
    session: Session,
    *,
    new_head: bool = True,
    trust_remote_code: bool,
) -> tuple[PreparedTask, TaskModel]:
    """Read a task's data, check model and data against each other, tokenise.

    Args:
        new_head: see `checked`.

    Returns:
        The task, and the model as it was loaded for the checks.

    Raises:
        UsageError: see `checked` and `Features.of`.
    """
    data, headed, notes = checked(recipe, new_head=new_head, trust_remote_code=trust_remote_code)
    how = features_of(recipe.data, data.task, headed)
    train = Features.of(data.task, data.train, headed.tokenizer, **how)
    evaluator = Evaluator.of(data.task, data.sets, headed.tokenizer, choose_on=recipe.choose_on, **how)
    cut = train.rows.truncated / len(data.train)
    said = "need more than one window of" if data.task.kind == "span" else "were cut at"
    notes.append(f"{cut:.1%} of the training examples {said} {how['max_length']} tokens")
    if data.split != "validation":
        notes.append(f"judged on {data.split}")
    for note in notes:
        Progress.log(note)
    return PreparedTask(session, data, train, evaluator, notes, how["max_length"]), headed


def checked(
    recipe: TaskRecipe, *, new_head: bool = True, trust_remote_code: bool
) -> tuple[Labelled, TaskModel, list[str]]:
    """Read a task's data and check model and data against each other, as far as that goes without tokenising.

    Args:
        new_head: the model may be given a head for the task; else it must have been fine-tuned for it.

    Returns:
        The data without what was left out of it, the model, and notes on what that was.

    Raises:
        UsageError: the data or the model cannot be used; too many answers are not in their contexts.
    """
    data = open_labelled(
        str(recipe.task),
        source=recipe.data.source,
        train_source=recipe.data.train,
        columns=recipe.data.columns,
        split=recipe.data.split,
        train_rows=recipe.data.train_rows,
        judged_rows=recipe.data.judged_rows,
        log=Progress.log,
    )
    check_training(data)
    if recipe.choose_on is not None and recipe.choose_on not in data.sets:
        raise UsageError(
            f"choose_on {recipe.choose_on} is none of the judged sets: "
            f"{', '.join(filter(None, data.sets)) or 'there is only one'}"
        )
    headed = load_model(recipe, data.task, new_head=new_head, trust_remote_code=trust_remote_code)
    Progress.log(f"{recipe.model}: {headed.note}")
    notes: list[str] = []
    if data.task.kind == "span":
        data, notes = _without_misplaced(data)
    return data, headed, notes


def open_judged(task: str, data: LabelledSettings, model: str, *, trust_remote_code: bool) -> Labelled:
    """The judged examples of a task; the classes of an own task are those of `model`, where it names them.

    Raises:
        UsageError: see `kdcli.data.labelled.task_data`.
    """
    config = load_config(model, trust_remote_code=trust_remote_code, compacted=True)
    named = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    own = task == OWN and not any(GENERIC.fullmatch(name) for name in named)
    return open_labelled(
        task,
        source=data.source,
        columns=data.columns,
        split=data.split,
        judged_rows=data.judged_rows,
        training=False,
        labels=named if own else None,
        log=Progress.log,
    )


def load_model(recipe: TaskRecipe, task: Task, *, new_head: bool = True, trust_remote_code: bool) -> TaskModel:
    """The recipe's model with a head for the task: of label words, or a new one drawn from the recipe's seed where the
    model brings none.

    Raises:
        UsageError: see `kdcli.models.heads` and `kdcli.models.label_words`.
    """
    if recipe.head.kind in ("embedding", "mlm"):
        return load_with_label_words(
            str(recipe.model),
            task,
            kind=recipe.head.kind,
            words=recipe.head.words,
            seed=recipe.train.seed,
            trust_remote_code=trust_remote_code,
        )
    return load_for_task(
        str(recipe.model),
        task,
        label_map=recipe.head.label_map,
        new_head=new_head,
        seed=recipe.train.seed,
        trust_remote_code=trust_remote_code,
    )


def features_of(settings: LabelledSettings, task: Task, headed: TaskModel, *, as_tuned: bool = False) -> dict[str, Any]:
    """What `Features.of` wants to know; a model that cannot read so many tokens at once is given fewer.

    Args:
        as_tuned: where the settings do not say how many tokens, those that the model was fine-tuned with are taken.
    """
    length = settings.max_length or task.max_length
    tuned = headed.max_length if as_tuned else None
    if tuned is not None and tuned != length:
        said = (
            f"with {length}, as data.max_length says"
            if settings.max_length
            else f"so too, not with the task's {length}"
        )
        length = settings.max_length or tuned
        Progress.log(f"{headed.source} was fine-tuned with {tuned} tokens a row and is judged {said}")
    positions = positions_of(headed.model.config)
    if positions is not None and positions < length:
        Progress.log(f"{headed.source} reads at most {positions} tokens, so data.max_length is {positions}")
        length = positions
    return {"max_length": length, "stride": settings.stride, "token_types": headed.token_types}


def _without_misplaced(data: Labelled) -> tuple[Labelled, list[str]]:
    """Leave out training questions whose answer is not in its context, and list them.

    Raises:
        UsageError: they are more than one in a hundred.
    """
    wrong = {i: said for i, e in enumerate(data.train) if (said := misplaced(e)) is not None}
    if not wrong:
        return data, []
    lines = list(wrong.values())
    if len(wrong) > MISPLACED_ALLOWED * len(data.train):
        raise UsageError(
            f"{len(wrong)} of {len(data.train)} answers are not where they are said to be, for example\n"
            + "\n".join(lines[:5]),
            "answer_start counts characters of the context, from 0",
        )
    kept = [e for i, e in enumerate(data.train) if i not in wrong]
    shown = lines[:20] + ([f"… {len(lines) - 20} more"] if len(lines) > 20 else [])
    return replace(data, train=kept), [f"{len(wrong)} training questions were left out:", *shown]


def order_and_schedule(task: PreparedTask, recipe: TaskRecipe) -> tuple[BucketOrder, Schedule]:
    """In which order the examples of a task are trained on, and for how long.

    Raises:
        UsageError: the warm-up leaves nothing of the run.
    """
    assert task.train is not None
    lengths, settings = task.train.rows.lengths, recipe.train
    # So few tokens leave a processor waiting for the weights.
    group = settings.micro_batch_size or (2 * GROUP if lengths.mean() <= SHORT else GROUP)
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, settings.pool)
    return order, replace(make_schedule(settings, order.steps_of_pass), micro_batch_size=group)


def build_job(task: PreparedTask, recipe: TaskRecipe, headed: TaskModel) -> tuple[Job, Schedule]:
    """What the engine is handed to fine-tune a model, and for how long."""
    assert task.train is not None
    rows = task.train.rows
    order, schedule = order_and_schedule(task, recipe)
    best = task.evaluator.task.metrics[0] if recipe.keep == "best" else None
    job = _job(task.evaluator, headed, rows, order, best)
    (listened,) = job.modules.values()
    # What the head does not read (a pooler below a token head) would be decayed towards nothing.
    found = job.step(rows.batch(np.arange(min(2, len(rows)))))
    for parameter in params_without_grad(dict(listened.named_parameters()), found.total):
        listened.get_parameter(parameter).requires_grad_(False)
    return job, schedule


def _job(evaluator: Evaluator, headed: TaskModel, examples: Examples, order: Order, best: str | None) -> Job:
    kind = evaluator.task.kind
    listened: Capture = capture(headed.model, Needs(logits=True))

    def step(batch: Batch) -> StepLoss:
        loss, signals = task_loss(kind, listened, batch)
        return StepLoss(loss, {}, signals.logits)

    return Job(
        modules={"model": listened},
        step=step,
        examples=examples,
        order=order,
        held_out=evaluator.features.rows,
        batch_weight=lambda batch: (
            labelled(kind, batch["labels"]) if "labels" in batch else float(len(batch["input_ids"]))
        ),
        compute_metrics=evaluator.metrics,
        best=best,
    )


def task_loss(kind: Kind, listened: Capture, batch: Batch) -> tuple[Tensor, Signals]:
    """The loss against a batch's labels, 0 where they are withheld, and what was heard of the model."""
    signals: Signals = listened(batch)
    logits, labels = signals.logits, signals.labels
    assert logits is not None
    loss = logits.new_zeros(()) if labels is None else hard_loss(kind, logits, labels, batch["attention_mask"])
    return loss, signals


def train_model(
    task: PreparedTask, recipe: TaskRecipe, run_dir: RunDir, headed: TaskModel | None = None
) -> TrainedModel:
    """Fine-tune in a claimed directory, on from its last checkpoint if it has one, and judge.

    Args:
        headed: the recipe's model where it was just loaded; None loads it.
    """
    headed = headed or load_model(recipe, task.data.task, trust_remote_code=task.session.trust_remote_code)
    return train_job(task, headed, *build_job(task, recipe, headed), run_dir)


def train_job(task: PreparedTask, headed: TaskModel, job: Job, schedule: Schedule, run_dir: RunDir) -> TrainedModel:
    """Train what `fitting` made in a claimed directory, and judge."""
    assert isinstance(job.order, BucketOrder)
    log_padding(job.order)
    return trained_model(task, headed, train(task.session, job, schedule, run_dir))


def trained_model(task: PreparedTask, headed: TaskModel, outcome: Outcome) -> TrainedModel:
    """A model after its training, with its predictions."""
    if outcome.best_step is not None:
        Progress.log(f"the best weights are those of step {outcome.best_step}")
    # Saved with the model, it tells whoever uses it, and `features_of`, at how many tokens rows were cut.
    headed.tokenizer.model_max_length = task.max_length
    return TrainedModel(headed, outcome, predict(task.session, task.evaluator, headed))


def predict(session: Session, evaluator: Evaluator, headed: TaskModel) -> list[Prediction]:
    """The predictions of a model as it is, for all judged examples."""
    rows = evaluator.features.rows
    job = _job(evaluator, headed, rows, BatchOrder(max(1, len(rows)), 1, 0), None)
    return evaluator.features.predictions(evaluate(session, job).outputs)


def log_padding(order: BucketOrder) -> None:
    """Log the share of padding, beside that of random batches."""
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    drawn = [lengths[plain.indices(step)] for step in range(1, min(200, order.steps_of_pass) + 1)]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    Progress.log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens in groups of similar length: "
        f"{order.padding():.1%} padding (in random batches {random:.1%})"
    )


def quality_of(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Evaluations as `quality` of a report: task and set → model → metric → value."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for e in evaluations:
        found.setdefault(f"{e['task']} {e['set']}".strip(), {})[e["model"]] = dict(e["metrics"])
    return found
