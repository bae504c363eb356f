"""A labelled task, ready to fine-tune one model on and evaluate it.

Data flow: examples -> rows of tokens -> batches of similar length -> logits -> loss -> engine -> predictions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.checks import looked_over
from kdcli.data.labelled.spans import check_answers, misplaced
from kdcli.data.labelled.task_data import Labelled, check_training, open_labelled
from kdcli.data.tasks import OWN
from kdcli.deploy.exported import is_export
from kdcli.engine.evaluation import evaluate
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.losses.hard import hard_loss, mean_over
from kdcli.models.capture import Capture, capture, params_without_grad
from kdcli.models.generation import load_generator
from kdcli.models.heads import GENERIC, load_for_task
from kdcli.models.label_words import load_with_label_words
from kdcli.models.load import load_config, location
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.training_rows import training_rows
from kdcli.types import (
    Batch,
    Examples,
    Job,
    Kind,
    Needs,
    Order,
    Outcome,
    RowHashes,
    Schedule,
    Signals,
    StepLoss,
    Task,
    Term,
)
from kdcli.workloads.generation import check_no_text, generation_job, set_decoding
from kdcli.workloads.predictions import Evaluator, Features, Prediction
from kdcli.workloads.settings import (
    FinetuneRecipe,
    GenerationSettings,
    LabelledSettings,
    TaskRecipe,
)

GROUP, SHORT = (
    8,
    20,
)  # rows padded together; twice as many if the mean row has at most `SHORT` tokens
DATA_KEYS = {
    "source",
    "columns",
    "split",
    "split_seed",
    "judged_rows",
    "skip_bad",
    "judge_trained_rows",
}
MISPLACED_ALLOWED = (
    0.01  # share of answers missing from their context; above it the data are wrong, no annotator
)


@dataclass(frozen=True)
class PreparedTask:
    """A task tokenised for models with one tokenizer; `max_length` is the row limit in tokens."""

    session: Session
    data: Labelled
    train: Features | None
    evaluator: Evaluator
    notes: list[str]
    max_length: int

    def load(self, recipe: TaskRecipe) -> Model:
        """The recipe's model, see `load_model`."""
        return load_model(recipe, self.data.task, trust_remote_code=self.session.trust_remote_code)


@dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned model, what its training took, and its predictions for the evaluated examples."""

    headed: Model
    outcome: Outcome
    predictions: list[Prediction]


def prepare(
    recipe: TaskRecipe,
    session: Session,
    *,
    new_head: bool = True,
    beside: Mapping[str, RowHashes] | None = None,
    generates: bool = False,
) -> tuple[PreparedTask, Model]:
    """Check a task's data and model and tokenise; return the task and the model. Arguments and errors as of
    `check_task_data`."""
    data, headed, notes = check_task_data(
        recipe, session, new_head=new_head, beside=beside, generates=generates
    )
    how = features_of(recipe.data, data.task, headed)
    train = Features.of(data.task, data.train, headed.tokenizer, **how)
    evaluator = Evaluator.of(
        data.task, data.sets, headed.tokenizer, choose_on=recipe.choose_on, **how
    )
    if isinstance(recipe, FinetuneRecipe):
        evaluator = evaluator.with_metrics(
            recipe.metrics, trust_remote_code=session.trust_remote_code
        )
    truncated = train.rows.truncated / len(data.train)
    verb = "need more than one window of" if data.task.kind == "span" else "were cut at"
    found = [f"{truncated:.1%} of the training examples {verb} {how['max_length']} tokens"]
    if data.split != "validation":
        found.append(f"judged on {data.split}")
    Progress.log(*found)
    return PreparedTask(
        session, data, train, evaluator, [*notes, *found], how["max_length"]
    ), headed


def read_by(task: PreparedTask, settings: LabelledSettings, headed: Model) -> PreparedTask:
    """The same examples as another model reads them."""
    how = features_of(settings, task.data.task, headed)
    before = task.evaluator
    evaluator = Evaluator.of(
        task.data.task, task.data.sets, headed.tokenizer, choose_on=before.choose_on, **how
    )
    train = (
        None
        if task.train is None
        else Features.of(task.data.task, task.train.examples, headed.tokenizer, **how)
    )
    evaluator = replace(evaluator, extra_metrics=before.extra_metrics)
    return replace(task, train=train, evaluator=evaluator, max_length=how["max_length"])


def check_task_data(
    recipe: TaskRecipe,
    session: Session,
    *,
    new_head: bool = True,
    beside: Mapping[str, RowHashes] | None = None,
    generates: bool = False,
) -> tuple[Labelled, Model, list[str]]:
    """Load and check a task's data and model without tokenising; also return notes on them. `new_head`: create a head
    for the task if the model has none; False requires a fine-tuned model. `beside`: further models that the run judges
    or learns from -> the rows that trained them. `generates`: the verb takes tasks that generate text. Raises
    UsageError: unusable data or model; too many answers missing from their contexts."""
    trained = {str(recipe.model): training_rows(location(str(recipe.model))), **(beside or {})}
    how = recipe.data.model_dump(include=DATA_KEYS) | {"trained": trained, "log": Progress.log}
    data = open_labelled(
        str(recipe.task), train_source=recipe.data.train, train_rows=recipe.data.train_rows, **how
    )
    check_no_text(data.task, generates)
    check_training(data)
    notes = [*data.notes, *(looked := looked_over(data.task, data.train))]
    Progress.log(*looked)
    if recipe.choose_on is not None and recipe.choose_on not in data.sets:
        judged = ", ".join(filter(None, data.sets)) or "there is only one"
        raise UsageError(f"choose_on {recipe.choose_on} is none of the judged sets: {judged}")
    headed = load_model(
        recipe, data.task, new_head=new_head, trust_remote_code=session.trust_remote_code
    )
    Progress.log(f"{recipe.model}: {headed.note}")
    if data.task.kind == "span":
        data, left_out = without_misplaced(data)
        notes += left_out
        Progress.log(*left_out)
    return data, headed, notes


def open_judged(
    task: str,
    data: LabelledSettings,
    model: str,
    trained: Mapping[str, RowHashes],
    *,
    trust_remote_code: bool,
) -> Labelled:
    """The examples to evaluate on; an own task takes its classes from `model` if that names them. `trained`: judged
    models, by name -> the rows that trained them."""
    weights = not is_export(model)
    config = load_config(
        model, trust_remote_code=trust_remote_code, weights=weights, compacted=True
    )
    named = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    own = task == OWN and not any(GENERIC.fullmatch(name) for name in named)
    how = data.model_dump(include=DATA_KEYS) | {"trained": trained, "log": Progress.log}
    return open_labelled(task, training=False, labels=named if own else None, **how)


def evaluator_of(
    data: Labelled, settings: LabelledSettings, headed: Model
) -> tuple[Evaluator, int]:
    """The evaluated sets as a fine-tuned model reads them, and its tokens a row; see `features_of`."""
    how = features_of(settings, data.task, headed, as_tuned=True)
    return Evaluator.of(data.task, data.sets, headed.tokenizer, **how), how["max_length"]


def load_model(
    recipe: TaskRecipe, task: Task, *, new_head: bool = True, trust_remote_code: bool
) -> Model:
    """The recipe's model with its own head, one of label words, or a new one drawn from the seed. Raises as
    `kdcli.models.heads.load_for_task` and `kdcli.models.label_words.load_with_label_words`."""
    source, head = str(recipe.model), recipe.head
    how: dict[str, Any] = {"seed": recipe.train.seed, "trust_remote_code": trust_remote_code}
    if isinstance(recipe, FinetuneRecipe) and task.kind == "text":
        headed = load_generator(source, task, new_head=new_head, **how)
        set_decoding(headed.model, recipe.generation)
        return headed
    if head.kind in ("embedding", "mlm"):
        return load_with_label_words(source, task, kind=head.kind, words=head.words, **how)
    return load_for_task(source, task, label_map=head.label_map, new_head=new_head, **how)


def features_of(
    settings: LabelledSettings, task: Task, headed: Model, *, as_tuned: bool = False
) -> dict[str, Any]:
    """Keyword arguments of `Features.of`, `max_length` clipped to the model's positions. `as_tuned`: if the settings
    give no length, use the one the model was fine-tuned with."""
    length = settings.max_length or task.max_length
    tuned = headed.tuned_length if as_tuned else None
    if tuned is not None and tuned != length:
        how = f"with {length}, as data.max_length says"
        if not settings.max_length:
            how, length = f"so too, not with the task's {length}", tuned
        Progress.log(
            f"{headed.source} was fine-tuned with {tuned} tokens a row and is judged {how}"
        )
    positions = positions_of(headed.model.config)
    if positions is not None and positions < length:
        Progress.log(
            f"{headed.source} reads at most {positions} tokens, so data.max_length is {positions}"
        )
        length = positions
    found: dict[str, Any] = {
        "max_length": length,
        "stride": settings.stride,
        "token_types": headed.token_types,
    }
    if task.kind == "text":
        decoding: Any = headed.model.generation_config
        found["target"] = {
            "target_length": decoding.max_new_tokens,
            "end_id": decoding.eos_token_id,
        }
    return found


def without_misplaced(data: Labelled) -> tuple[Labelled, list[str]]:
    """Drop training questions with an answer outside its context, and list them; a `UsageError` above 1 %."""
    lines = check_answers(data.train)
    if not lines:
        return data, []
    if len(lines) > MISPLACED_ALLOWED * len(data.train):
        message = f"{len(lines)} of {len(data.train)} answers are not where they are said to be, for example"
        raise UsageError(
            "\n".join([message, *lines[:5]]),
            "answer_start counts characters of the context, from 0",
        )
    shown = lines[:20] + ([f"... {len(lines) - 20} more"] if len(lines) > 20 else [])
    kept = [example for example in data.train if misplaced(example) is None]
    return replace(data, train=kept), [f"{len(lines)} training questions were left out:", *shown]


def order_and_schedule(task: PreparedTask, recipe: TaskRecipe) -> tuple[BucketOrder, Schedule]:
    """The order of training examples and the schedule; a `UsageError` if the warm-up is as long as the run."""
    assert task.train is not None
    lengths, settings = task.train.rows.lengths, recipe.train
    # Too few tokens would leave the processor waiting for the weights.
    group = settings.micro_batch_size or (2 * GROUP if lengths.mean() <= SHORT else GROUP)
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, settings.pool)
    return order, replace(make_schedule(settings, order.steps_of_pass), micro_batch_size=group)


def build_job(task: PreparedTask, recipe: TaskRecipe, headed: Model) -> tuple[Job, Schedule]:
    """The job that fine-tunes one model, and its schedule."""
    assert task.train is not None
    rows, (order, schedule) = task.train.rows, order_and_schedule(task, recipe)
    best = task.evaluator.task.metrics[0] if recipe.keep == "best" else None
    if isinstance(recipe, FinetuneRecipe) and task.evaluator.task.kind == "text":
        seed = recipe.train.seed
        job = generation_job(
            task.evaluator, headed, rows, order, recipe.generation, seed=seed, best=best
        )
    else:
        job = _job(task.evaluator, headed, rows, order, best)
    # Weight decay would shrink what the head does not read, such as a pooler below a token head.
    freeze_unused(job.modules["model"], job.step(rows.batch(np.arange(min(2, len(rows))))).total)
    return job, schedule


def freeze_unused(model: Any, loss: Tensor) -> list[str]:
    """Exclude parameters without a gradient from training; return their names."""
    names = params_without_grad(dict(model.named_parameters()), loss)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def _job(
    evaluator: Evaluator, headed: Model, examples: Examples, order: Order, best: str | None
) -> Job:
    kind, model = evaluator.task.kind, capture(headed.model, Needs(logits=True))

    def step(batch: Batch) -> StepLoss:
        loss, signals = task_loss(kind, model, batch)
        return StepLoss({"loss": Term(loss, mean_over(kind))}, signals.logits)

    rows, metrics = evaluator.features.rows, evaluator.metrics
    return Job({"model": model}, step, examples, order, rows, compute_metrics=metrics, best=best)


def task_loss(kind: Kind, model: Capture, batch: Batch) -> tuple[Tensor, Signals]:
    """The loss against a batch's labels, 0 if they are withheld, and the model's signals."""
    signals: Signals = model(batch)
    logits, labels = signals.logits, signals.labels
    assert logits is not None
    loss = (
        logits.new_zeros(())
        if labels is None
        else hard_loss(kind, logits, labels, batch["attention_mask"])
    )
    return loss, signals


def trained_model(task: PreparedTask, headed: Model, outcome: Outcome) -> TrainedModel:
    """A model after its training, with its predictions; sets its tokenizer's row limit."""
    if outcome.best_step is not None:
        Progress.log(f"the best weights are those of step {outcome.best_step}")
    # Saved with the model: `features_of` reads it, and so does any other user of the model.
    headed.tokenizer.model_max_length = task.max_length
    return TrainedModel(headed, outcome, predict(task.session, task.evaluator, headed))


def predict(session: Session, evaluator: Evaluator, headed: Model) -> list[Prediction]:
    """A model's predictions for all evaluated examples."""
    rows = evaluator.features.rows
    order = BatchOrder(max(1, len(rows)), 1, 0)
    if evaluator.task.kind == "text":
        job = generation_job(evaluator, headed, rows, order, GenerationSettings(), decodes=True)
    else:
        job = _job(evaluator, headed, rows, order, None)
    return evaluator.features.predictions(evaluate(session, job).outputs)


def log_padding(order: BucketOrder) -> None:
    """Log the share of padding, beside that of random batches."""
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    drawn = [lengths[plain.indices(step)] for step in range(1, min(200, order.steps_of_pass) + 1)]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    share = f"{order.padding():.1%} padding (in random batches {random:.1%})"
    Progress.log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens in groups of similar length: {share}"
    )
