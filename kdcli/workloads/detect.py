"""Find out from a model's files and from the data which task a model is for."""

from collections.abc import Iterator
from pathlib import Path

from kdcli.data.labelled.columns import Columns
from kdcli.data.labelled.label_values import may_be_number
from kdcli.data.labelled.lists import RERANK_TASK
from kdcli.data.labelled.own import own_task
from kdcli.data.readers import format_of
from kdcli.data.rows import BadRow, Row, names_in, take_first
from kdcli.data.sources import FileSource, open_source
from kdcli.data.storage import NotFound, base_name
from kdcli.data.tasks import named_tasks
from kdcli.data.text.sentences import QUERIES, usual_names
from kdcli.deploy.exported import TrainedOn, trained_on
from kdcli.disk import RECIPE_FILE, holds_run
from kdcli.errors import UsageError
from kdcli.messages import log, silenced
from kdcli.models.cross_encoder import activation_of
from kdcli.models.embedding_format import is_embedder
from kdcli.models.heads import head_of
from kdcli.models.load import load_config, location
from kdcli.recipe.resolve import TRAINING_RUN, RecipeT, Resolved, defaulted, read_recipe
from kdcli.recipe.sections import RecipeValues
from kdcli.types import OWN, task_title
from kdcli.workloads.beir import RETRIEVAL, is_retrieval, relevance_files
from kdcli.workloads.embeddings import METHOD
from kdcli.workloads.eval_sets import by_vectors, scores_classes, scores_pairs
from kdcli.workloads.settings import LabelledSettings


def task_of_model(
    model: str,
    data: str | None,
    pooling: str | None = None,
) -> str:
    """Return the task that a model is for; see `known_task`.

    Raises:
        UsageError: The model cannot be read, or it is a plain encoder without `pooling`.
    """
    task = known_task(model, data, pooling)
    if task is None:
        raise UsageError(
            f"{model} is a plain encoder: it has no head and no pooling, so its task is unknown",
            "add --pooling mean to use it as an embedding model, --task own to fine-tune it on the "
            "labels of your data first, or --task TASK for a benchmark",
        )
    return task


def known_task(
    model: str, data: str | None, pooling: str | None = None, *, classes: bool = False
) -> str | None:
    """Return the task that a model is for, if the user names none; None for a plain encoder.

    * A model that kdcli trained: the task that it was trained on, unless `data` is plain text or
      lacks the columns of that task's texts.
    * An embedding model, or an encoder with `pooling`: scored pairs or retrieval if the data are
      such, else agreement of its vectors on texts.
    * A cross-encoder: `rerank`, unless the data have no queries. Any other head: the user's own
      rows.

    Args:
        model: The model.
        data: The value of `--data`.
        pooling: The value of `--pooling`.
        classes: Whether an embedding model may also be scored on texts with classes, if there are
            rows to train and to evaluate on.

    Raises:
        UsageError: The model cannot be read.
    """
    trained = trained_task(model) if pooling is None else None
    # The data decide what the vectors of a model are scored on, whoever made it.
    has_vectors = pooling is not None or trained in (METHOD, RETRIEVAL)
    if trained is not None and not has_vectors and _has_texts_of(trained, data):
        return trained
    if has_vectors or is_embedder(model):
        return _task_of_vectors(data, classes=classes)
    config = load_config(model, compacted=True, weights=False)
    head = head_of(config)
    if head is None:
        return None
    is_scorer = head.kind == "score" and config.problem_type != "regression"
    if is_scorer or activation_of(model, config) is not None:
        # A head with one output may also be a detector, or score pairs.
        return RERANK_TASK.name if _may_be_lists(data) else OWN
    return OWN


def task_to_distill(teacher: str, data: str | None) -> str | None:
    """Return the task on which a teacher with a head is distilled; None to distil its encoder.

    A teacher that cannot be read gives None, because its loading reports the error.
    """
    try:
        task = known_task(teacher, data)
    except UsageError:
        return None
    if task in (METHOD, RETRIEVAL) or (task == OWN and data is None):
        return None
    if task == OWN and is_embedder(teacher):
        return None
    return task


def with_task(
    resolved: Resolved[RecipeT],
    model: str | None,
    data: str | None,
    pooling: str | None = None,
    *,
    classes: bool = False,
) -> Resolved[RecipeT]:
    """Fill in the task of a recipe that names none; see `known_task`.

    Raises:
        UsageError: The model cannot be read.
    """
    if "task" in resolved.origins or model is None:
        return resolved
    task = known_task(model, data, pooling, classes=classes)
    # The data of the user's own rows must be given.
    if task is None or (data is None and task in (OWN, METHOD, RETRIEVAL)):
        return resolved
    log(f"{model}: using {task_title(task)}, as the model's files and the data suggest")
    return defaulted(resolved, {"task": task}, f"the files of {model}")


def _has_texts_of(task: str, data: str | None) -> bool:
    """Whether the data are not plain text, and the first row has the texts of a named task.

    True if there are no data, or if they cannot be read, because their reading reports the error.
    """
    if data is None:
        return True
    named = named_tasks().get(task)
    try:
        if _is_text(data):
            return False
        first, _ = take_first(_rows(data))
    except (NotFound, UsageError):
        return True
    return named is None or not first or set(named.texts) <= set(names_in(first))


def _may_be_lists(data: str | None) -> bool:
    """Whether the first rows have queries; also true if they cannot be read."""
    if data is None:
        return True
    try:
        first, _ = take_first(_rows(data))
    except (NotFound, UsageError):
        return True
    return not set(QUERIES).isdisjoint(usual_names(dict.fromkeys(names_in(first))))


def _rows(data: str) -> Iterator[Row]:
    """Yield the rows of the first split, without the bad ones, which their reader reports."""
    opened = open_source(data)
    split = opened.splits()[0]
    return (row for table in opened.tables(split, _skip) for row in table.rows)


def _skip(bad: BadRow) -> None:
    """Skip a bad row, which tells nothing about the task."""


def _is_text(data: str | None) -> bool:
    """Whether the data are plain text, which has no columns for a task."""
    if data is None:
        return False
    try:
        opened = open_source(data)
    except NotFound:
        return False
    if not isinstance(opened, FileSource):
        return False
    files = (file for files in opened.files.values() for file in files)
    forms = [format_of(base_name(file)) for file in files]
    return all(form is not None and form.name == "txt" for form in forms)


def with_split(
    resolved: Resolved[RecipeT], task: str | None, model: str, data: str | None, pooling: str | None
) -> Resolved[RecipeT]:
    """Evaluate on the test split if the data have no validation split, unless the user chose one.

    If kdcli trained a head on data without a validation split, a part of the training split was
    held back for it, which is evaluated instead. Searches use the test split if there is one.

    Raises:
        UsageError: The model cannot be read.
    """
    if task is None or data is None or {"data.split", "data.partition"} & resolved.origins.keys():
        return resolved
    if task == RETRIEVAL:
        test = {"data.split": "test"} if "test" in relevance_files(data) else {}
        return defaulted(resolved, test, "the splits of the data")
    try:
        opened = open_source(data)
    except NotFound:
        return resolved
    if opened.has("validation") or not opened.has("test"):
        return resolved
    is_trained = trained_task(model) == task and not by_vectors(task, model, pooling)
    if opened.has("train") and is_trained:
        return resolved
    log(f"{data} has no validation split: evaluating on its test split")
    return defaulted(resolved, {"data.split": "test"}, "the splits of the data")


def _task_of_vectors(data: str | None, *, classes: bool) -> str:
    """Return the task of an embedding model on these data."""
    if data is None or _is_text(data):
        return METHOD
    if is_retrieval(data):
        return RETRIEVAL
    are_pairs = False
    try:
        opened = open_source(data)
        may_have_classes = classes and opened.has("train") and len(opened.splits()) > 1
        first, rows = take_first(_rows(data))
        if not first:
            return METHOD
        kind, texts, label = Columns(first, {}).choose(None)
        are_pairs = len(texts) == 2 and any(
            may_be_number(str(values.get(label, ""))) for _, values in first
        )
        if kind is not None or not (are_pairs or (may_have_classes and len(texts) == 1)):
            return METHOD
        with silenced():
            # Rows that are sorted by label begin with a single one, so all of them are read.
            task = own_task(rows, {}, _skip)
    except (NotFound, UsageError):
        # The reader of the pairs says what is wrong with their numbers.
        return OWN if are_pairs else METHOD
    is_classified = may_have_classes and scores_classes(task)
    return OWN if scores_pairs(task) or is_classified else METHOD


def as_trained(
    resolved: Resolved[RecipeT], model: str | None, *, task: bool = True, trains: bool = True
) -> Resolved[RecipeT]:
    """Fill unset data settings of a recipe from the run that trained a model.

    These are the columns, the split seed, whether bad rows are skipped, the overlap of windows and
    the maximum length. Nothing changes if the recipe has a different task. A recipe without a task,
    such as export's, has the model's. The demo and plain text have no columns.

    Args:
        resolved: The recipe.
        model: The model; None leaves the recipe unchanged.
        task: Also fill the task if it is unset.
        trains: Also fill the maximum length. If False, every evaluated model uses its own.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    training = _recipe_of(model) if model is not None else {}
    data, has_task = training.get("data"), "task" in type(resolved.recipe).model_fields
    task_name = getattr(resolved.recipe, "task", None)
    if task_name is None and (task or not has_task):
        task_name = training.get("task")
    if not isinstance(data, dict) or task_name is None or task_name != training.get("task"):
        return resolved
    has_own_stride = data.get("stride") != LabelledSettings.model_fields["stride"].default
    keys = ["columns", "split_seed", "skip_bad", *["stride"] * has_own_stride]
    keys += ["max_length"] * trains
    source = getattr(getattr(resolved.recipe, "data", None), "source", None)
    if source == "demo" or _is_text(source):
        keys.remove("columns")
    settings = {"task": task_name} if has_task else {}
    settings |= {f"data.{key}": data[key] for key in keys if data.get(key)}
    # If the user sets one column, the other columns of the run do not apply either.
    settings = {
        key: value
        for key, value in settings.items()
        if not any(name.startswith(key) for name in resolved.origins)
    }
    return defaulted(resolved, settings, f"{TRAINING_RUN} {model}")


def data_of_run(resolved: Resolved[RecipeT], model: str) -> tuple[Resolved[RecipeT], str | None]:
    """Fill the data of a recipe from the run that trained a model.

    Returns:
        The recipe, unchanged if no run did, and the run's task; None if it trained on text.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    training = _recipe_of(model)
    task, data = training.get("task"), training.get("data")
    if not isinstance(data, dict):
        return resolved, None
    settings = {"data.source": data.get("source"), "data.train": data.get("train")}
    if task is None and data.get("column"):
        settings["data.columns"] = {"text": data["column"]}
    given = {key: value for key, value in settings.items() if value}
    resolved = defaulted(resolved, given, f"{TRAINING_RUN} {model}")
    return as_trained(resolved, model, task=False, trains=False), task


def _recipe_of(model: str) -> RecipeValues:
    """Read the recipe of the run that trained a model, or what an export tells of it.

    The run directory is the model's folder. For one model of a pair, or another form of a model, it
    is the parent. The result is empty if there is no run.

    Raises:
        UsageError: The `recipe.yaml` of the run, or the export, cannot be read.
    """
    folder = Path(location(model))
    places = (folder, folder.resolve().parent) if folder.is_dir() else ()
    for place in filter(holds_run, places):
        return read_recipe(str(place / RECIPE_FILE), None)
    for told in filter(None, map(trained_on, places)):
        return {"task": told.task, "data": {"columns": told.columns}}
    return {}


def trained_task(model: str | None) -> str | None:
    """Return the task on which a run trained a model, if any.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    return _recipe_of(model).get("task") if model is not None else None


def training_of(model: str) -> TrainedOn | None:
    """Return what an export tells of the run that trained a model; None if no task did.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    training = _recipe_of(model)
    task, data = training.get("task"), training.get("data")
    return TrainedOn(task, data.get("columns") or {}) if task and isinstance(data, dict) else None
