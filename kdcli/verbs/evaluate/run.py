"""`kdcli evaluate`: evaluate models on held-out rows, and compare them.

Data flow: examples -> rows of tokens -> outputs of each model -> scores, differences -> report.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.deploy.sparse.loading import describe_head, load_network, published_mask, with_head
from kdcli.deploy.sparse.mask_file import PUBLISHED, apply_masks, open_mask
from kdcli.disk import (
    LOG_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    check_writable,
    write_atomic,
)
from kdcli.engine.inputs import check_output_file, texts_in
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, UsageError, did_you_mean
from kdcli.messages import log, log_fact, named, one_of_each
from kdcli.models.heads import tokenizer_for
from kdcli.models.load import location
from kdcli.models.model import Model, training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import Entry, RunResult, with_baseline
from kdcli.report.schema_decisions import Decision
from kdcli.report.text import directory_word
from kdcli.report.views import short
from kdcli.run.context import RunContext, open_run
from kdcli.types import RowHashes, Task, task_title
from kdcli.verbs.evaluate.settings import EvaluateRecipe
from kdcli.workloads import modules_by_task, open_evaluation
from kdcli.workloads.beir import RETRIEVAL
from kdcli.workloads.cascades import answers_of
from kdcli.workloads.decisions import KINDS, class_drop_miss, decisions
from kdcli.workloads.detect import as_trained, with_split, with_task
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embeddings import METHOD
from kdcli.workloads.finetuning import baseline_notes, with_trivial_answer
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.mteb_tasks import PREFIX
from kdcli.workloads.predictions import shown_label, summed_up
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.workload import Workload

OF_RUN = (RECIPE_FILE, LOG_FILE, REPORT_FILE, "report.md", "report.html", "latency.csv")
"""The files of a run, which no other file may replace."""


def predicts_rows(task: str | None) -> bool:
    """Return whether a task's models predict labels of rows.

    The models of tasks with a module of their own are scored otherwise, such as by their rankings.
    """
    return task not in modules_by_task() and not str(task).startswith(PREFIX)


@dataclass(frozen=True)
class Extras:
    """Names in the report of `evaluate`, and files and gates in addition to it.

    Attributes:
        predictions: A jsonl file with one object for each model and example.
        submission: A directory of files for the GLUE server, from the test split.
        gates: The minimum value of each metric, for every model.
        names: The models' names in the report; None takes their short names.
        thresholds_from: Comparisons on the rows that chose thresholds; see `decisions`.
        answers: A file for each model's answers, from which `compress` makes cascades.
        outputs_only: Only compute the outputs, which `keep_results` stores for a later evaluation,
            and the answers.
    """

    predictions: Path | None = None
    submission: Path | None = None
    gates: Mapping[str, float] = field(default_factory=dict)
    names: Sequence[str] | None = None
    thresholds_from: Sequence[Decision] = ()
    answers: Path | None = None
    outputs_only: bool = False


def evaluate(
    resolved: Resolved[EvaluateRecipe], options: RunOptions, extras: Extras
) -> RunResult | None:
    """Evaluate every model and compare the later ones with the first.

    Returns:
        The report; None in a process that prints nothing, and if only outputs are wanted.
    """
    recipe = resolved.recipe
    first = next(iter(recipe.models), None)
    if not recipe.masks:
        classes = recipe.data.labels != "teacher"
        resolved = with_task(resolved, first, recipe.data.source, recipe.pooling, classes=classes)
    resolved = as_trained(resolved, first, trains=False)
    recipe = resolved.recipe
    if first is not None:
        resolved = with_split(resolved, recipe.task, first, recipe.data.source, recipe.pooling)
        recipe = resolved.recipe
    check_recipe(recipe, extras)
    word = directory_word(str(recipe.task), recipe.data.source)
    name = f"evaluate-{Path(recipe.models[0]).name}-{word}"
    beside = tuple(path for path in (extras.predictions, extras.submission) if path is not None)
    options = replace(options, written=beside)
    context = open_run(resolved, options, name, dtype=recipe.dtype, evaluates=True)
    if context is None:
        return None
    _check_predictions_file(extras.predictions, context.folder)
    sources = recipe.masks or recipe.models
    names = extras.names or _short_names(sources)
    makes_several = bool(recipe.dimensions or recipe.vector_formats)
    if recipe.task == METHOD and not (makes_several or recipe.data.columns):
        # Otherwise the reader of the texts may ask for a column first.
        _check_compared(recipe, extras, names)
    workload = open_evaluation(_request(recipe), context.session)
    labelled = workload if isinstance(workload, LabelledWorkload) else None
    _check_workload(recipe, extras, workload, options)
    # All models are loaded before the first is evaluated, because the last may be unusable.
    models: dict[str, Model] = {}
    for name, source in zip(names, sources, strict=True):
        models |= _load(context, workload, name, source)
    if workload.needs_reference:
        _check_compared(recipe, extras, list(models))
        workload = workload.with_reference(next(iter(models.values())))
    scores = {n: workload.score(model, worst=recipe.worst) for n, model in models.items()}
    if extras.outputs_only:
        _write_answers(extras.answers, scores)
        return None
    to_submit: dict[str, list[float]] = {}
    if extras.submission is not None:
        assert labelled is not None
        to_submit = _predict_test(labelled, next(iter(models.values())))
    context.session.accelerator.end_training()
    if not context.is_main:
        return None
    # Claim the directory only now, because `--predictions` and `--submission` may lie in it.
    RunDir.claim(
        context.folder, resolved.to_yaml(), overwrite=options.overwrite, written=options.written
    )
    for name, values in to_submit.items():
        assert extras.submission is not None
        assert labelled is not None
        file = write_submission(extras.submission, labelled.data.task, name, values)
        log(f"to submit: {file}")
    if extras.predictions is not None:
        predicted = workload.predicted
        assert predicted is not None
        _write_predictions(extras.predictions, predicted, scores)
    _write_answers(extras.answers, scores)
    return _report(context, workload, models, scores, extras.thresholds_from)


def _write_answers(file: Path | None, scores: Mapping[str, ModelScores]) -> None:
    """Write each model's answers to a file, if one is given."""
    if file is None:
        return
    parts = {name: answers_of(each).model_dump() for name, each in scores.items()}
    write_atomic(file, json.dumps(parts, ensure_ascii=False))


def _check_predictions_file(file: Path | None, folder: Path) -> None:
    """Refuse a file for predictions whose name the run needs in its directory.

    Raises:
        UsageError: The run would overwrite the file.
    """
    if file is None or file.name not in OF_RUN:
        return
    if file.resolve().parent == folder.resolve():
        raise UsageError(
            f"--predictions {file}: the run writes its own {file.name} there",
            "give it another name",
        )


def _check_compared(recipe: EvaluateRecipe, extras: Extras, models: Sequence[str]) -> None:
    """Check that there is a model to compare with the reference, or something else to report.

    Raises:
        UsageError: There is only the reference.
    """
    has_other_use = extras.predictions is not None or extras.outputs_only
    if len(models) > 1 or has_other_use or recipe.measure.latency:
        return
    [name] = models
    hint = "also give the models to compare with it"
    if recipe.dimensions:
        hint += ", or its whole width in `dimensions`"
    if recipe.task == METHOD:
        hint += ", pairs of texts with a score, or texts with classes in train.* and test.*"
    elif recipe.data.labels == "teacher":
        hint += ", or remove data.labels=teacher"
    else:
        hint += ", or rows with labels; --predictions FILE needs neither"
    raise UsageError(f"without labels, {name} would only be compared with itself", hint)


def _check_workload(
    recipe: EvaluateRecipe, extras: Extras, workload: Workload, options: RunOptions
) -> None:
    """Check that the workload supports the options, before anything is computed.

    Raises:
        UsageError: The task has no head, no such metric, no classes or no submission.
    """
    labelled = workload if isinstance(workload, LabelledWorkload) else None
    if labelled is None and (recipe.metrics or extras.submission is not None):
        raise UsageError(
            "--metric and --submission are for models with a head, but these are scored by their "
            "vectors",
            "omit them, or evaluate a model that was fine-tuned on the task",
        )
    if extras.predictions is not None and workload.predicted is None:
        raise UsageError(
            "--predictions: several regressions on vectors classify each row, so a row has no "
            "single prediction",
            "omit it, or fine-tune the model: kdcli finetune",
        )
    check_gate_names(workload, extras)
    if recipe.max_class_drop is not None:
        check_has_classes(workload)
    if extras.submission is not None:
        assert labelled is not None
        check_submission(labelled.data.task)
    if labelled is not None:
        check_outputs(recipe, extras, labelled.data.task, options)


def _request(recipe: EvaluateRecipe) -> EvaluationRequest:
    """Build the request for a recipe's workload."""
    trained: dict[str, RowHashes] = {s: training_rows(location(s)) for s in recipe.models}
    for file in recipe.masks:
        if Path(file).suffix != PUBLISHED:
            trained[file] = open_mask(Path(file)).rows
    return EvaluationRequest(
        str(recipe.task),
        recipe.models,
        recipe.data,
        trained,
        recipe.metrics,
        recipe.pooling,
        by_head=bool(recipe.masks),
        documents=recipe.documents,
        divided=True,
        label_map=recipe.head.label_map,
        samples_per_label=recipe.samples_per_label,
    )


def check_recipe(recipe: EvaluateRecipe, extras: Extras) -> None:
    """Check a recipe and its options before data and models are read.

    Raises:
        UsageError: There is no model or no task, or options contradict each other.
    """
    if not recipe.models:
        raise UsageError(
            "no model given", "kdcli evaluate MODEL [MODEL...] --task TASK [--data SOURCE]"
        )
    if recipe.task is None:
        data = "" if recipe.data.source is not None else " and --data SOURCE"
        raise UsageError(
            f"no task given, and the files of {recipe.models[0]} do not name one",
            f"add --pooling mean{data} to score an encoder without a head as an embedding model, "
            "or --task TASK",
        )
    if recipe.masks and (len(recipe.models) > 1 or recipe.measure.latency):
        raise UsageError(
            "--mask takes one model, the base of every mask, and measures no latency",
            "kdcli evaluate BASE --mask FILE [--mask FILE]; kdcli mask apply saves a model to "
            "measure",
        )
    bits = bool(recipe.masks) and all(Path(mask).suffix == PUBLISHED for mask in recipe.masks)
    if not bits and (recipe.head.kind is not None or recipe.head.words is not None):
        raise UsageError(
            "head.kind and head.words are for a mask without a head, an .npy of the SMP authors",
            "omit them: these models have their own heads",
        )
    if recipe.masks and recipe.head.label_map is not None:
        raise UsageError(
            "head.label_map is for models, not for masks",
            "choose the words of an .npy by head.words",
        )
    if recipe.task != RETRIEVAL and (recipe.documents is not None or recipe.vector_formats):
        raise UsageError(
            f"--documents and vector_formats are for task {RETRIEVAL}, not for {recipe.task}",
            "omit them",
        )
    if recipe.task == RETRIEVAL and recipe.data.labels == "teacher":
        raise UsageError(
            f"data.labels=teacher does not apply to task {RETRIEVAL}, which is scored by the "
            "relevances of the data",
            "remove it; to compare the vectors of models, give --data a file of texts",
        )
    if not predicts_rows(recipe.task) and (
        recipe.masks or recipe.metrics or extras.predictions or extras.submission
    ):
        raise UsageError(
            f"--mask, --metric, --predictions and --submission are not for {recipe.task}"
        )
    if extras.submission is not None and (count := max(len(recipe.models), len(recipe.masks))) > 1:
        raise UsageError(f"--submission takes one model, not {count}")
    if recipe.max_class_drop is not None and len(recipe.masks or recipe.models) < 2:
        raise UsageError(
            "--max-class-drop compares models with the first one, and only one is given",
            "kdcli evaluate BASELINE MODEL [MODEL...] --task TASK --max-class-drop POINTS",
        )


def check_outputs(recipe: EvaluateRecipe, extras: Extras, task: Task, options: RunOptions) -> None:
    """Check that no option writes over an input, or over another file without `--overwrite`."""
    sources, overwrite = list(texts_in(recipe.model_dump())), options.overwrite
    if extras.predictions is not None:
        check_output_file(extras.predictions, sources, "--predictions", overwrite=overwrite)
    if extras.submission is not None:
        check_writable(extras.submission, directory=True)
        for name in task.glue.values():
            file = extras.submission / f"{name}.tsv"
            check_output_file(file, sources, "--submission", overwrite=overwrite)


def _short_names(sources: Sequence[str]) -> list[str]:
    """Return the short names of the sources, with numbers if two names are the same."""
    names: list[str] = []
    for name in map(short, sources):
        count = sum(n == name or n.startswith(f"{name} (") for n in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def _load(
    context: RunContext[EvaluateRecipe], workload: Workload, name: str, source: str
) -> dict[str, Model]:
    """Load a model, or the base under a mask. Returns it by its name.

    An embedding model is returned once for each number of dimensions to which its vectors are cut,
    and for each format in which they are stored.

    Raises:
        UsageError: `dimensions` is given for a model that is scored by its head.
    """
    recipe = context.recipe
    if recipe.masks:
        assert isinstance(workload, LabelledWorkload)
        model = _under_mask(recipe, Path(source), workload.data.task)
    else:
        head = TaskHeadSettings(label_map=recipe.head.label_map)
        model = workload.load(source, head=head, new_head=False)
    log_fact(f"{source}: {model.note}")
    if not (recipe.dimensions or recipe.vector_formats):
        return {name: model}
    if not isinstance(model, Embedder):
        raise UsageError(
            "dimensions cuts vectors, and these models are scored by their heads", "omit it"
        )
    loaded: dict[str, Model] = {}
    for cut_name, cut in model.cuts(name, recipe.dimensions).items():
        loaded |= cut.stored_as(cut_name, recipe.vector_formats)
    return loaded


def _under_mask(
    recipe: EvaluateRecipe,
    file: Path,
    task: Task,
) -> Model:
    """Load the base under a mask, with the head of the mask.

    Raises:
        UsageError: The mask cannot be read, is for another base, or is for another task or other
            labels.
    """
    base = recipe.models[0]
    tokenizer = tokenizer_for(base, of_words=task.kind == "tokens")
    if file.suffix == PUBLISHED:
        mask, encoder = published_mask(
            file, base, task, kind=recipe.head.kind or "mlm", words=recipe.head.words
        )
        apply_masks(encoder, mask.masks)
        model = with_head(encoder, mask.info, mask.head, str(file))
        note = f"taken for {describe_head(mask.info)}"
        return Model(model.eval(), tokenizer, str(file), note, mask.info.max_length)
    info = open_mask(file).info
    if (info.task, info.labels) != (task.name, task.labels):
        raise UsageError(
            f"{file} is for {task_title(str(info.task))} with labels "
            f"{', '.join(info.labels) or 'none'}; {task.title} has "
            f"{', '.join(task.labels) or 'none'}",
            "evaluate a mask on its own task",
        )
    note = f"{base} under a mask, with the head of the mask"
    return Model(load_network(base, file), tokenizer, str(file), note, info.max_length)


def _report(
    context: RunContext[EvaluateRecipe],
    workload: Workload,
    models: Mapping[str, Model],
    scores: Mapping[str, ModelScores],
    thresholds_from: Sequence[Decision],
) -> RunResult:
    recipe = context.recipe
    first, *_ = scores
    scores = {**scores, first: with_trivial_answer(workload, models[first], scores[first])}
    result = workload.compare(scores, resamples=recipe.resamples, confidence=recipe.confidence)
    entries = [Entry.loaded(name, "candidate", model) for name, model in models.items()]
    notes = one_of_each(named(name, note) for name, each in scores.items() for note in each.notes)
    notes += baseline_notes(first, scores[first].evaluations)
    contents = workload.report(
        "evaluate", recipe, with_baseline(entries), result=result, notes=notes
    )
    contents.decisions = decisions(
        scores,
        thresholds_from=thresholds_from,
        max_class_drop=recipe.max_class_drop,
        differing=recipe.worst,
        resamples=recipe.resamples,
    )
    return context.report(contents, recipe.measure)


def _write_predictions(file: Path, data: Labelled, scores: Mapping[str, ModelScores]) -> None:
    """Write every prediction to a jsonl file."""
    task, lines = data.task, []
    for name, model_scores in scores.items():
        predictions = iter(model_scores.predictions)
        for set_name, examples in data.sets.items():
            for example, prediction in zip(examples, predictions, strict=False):
                row: dict[str, object] = {"model": name, "set": set_name, "id": example.id}
                row["texts"] = list(example.texts)
                row["label"] = shown_label(task, example)
                row["predicted"] = prediction.shown
                # A window without any span has the score infinity, which JSON lacks.
                row["scores"] = [s if math.isfinite(s) else None for s in prediction.scores]
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(file, "".join(lines))
    log(f"{len(lines):,} predictions in {file}")


def _predict_test(workload: LabelledWorkload, model: Model) -> dict[str, list[float]]:
    """Predict the test split. Returns the predicted values of each set."""
    settings = workload.settings
    test = RowsRequest(workload.name, settings.source, columns=settings.columns, split="test")
    data = open_labelled(test, training=False, withheld=True)
    values: dict[str, list[float]] = {}
    for name, examples in data.sets.items():
        # Ignore the labels, which some test files have.
        unlabelled = replace(data, sets={name: [replace(e, label=None) for e in examples]})
        predictions = replace(workload, data=unlabelled, metric_names=()).predict(model)
        values[name] = [prediction.value for prediction in predictions]
    return values


def check_gate_names(workload: Workload, extras: Extras) -> None:
    """Check the metrics of `--min-metric` before anything is computed.

    Raises:
        UsageError: The task has no such metric, or a lower value of it is better.
    """
    metrics = workload.gated_metrics
    for metric in extras.gates:
        if metric not in metrics:
            raise UsageError(
                f"--min-metric {metric}: {task_title(workload.name)} has no such metric for which "
                f"higher is better{did_you_mean(metric, metrics)}",
                f"it has {', '.join(metrics)}",
            )


def check_has_classes(workload: Workload) -> None:
    """Check that `--max-class-drop` can be applied before anything is computed.

    Raises:
        UsageError: The task has no classes.
    """
    if isinstance(workload, LabelledWorkload) and workload.kind in KINDS:
        return
    raise UsageError(
        f"--max-class-drop: {task_title(workload.name)} has no classes",
        f"omit it: it is for tasks of kind {', '.join(KINDS)}, scored by a head",
    )


def check_score_gates(
    result: RunResult, extras: Extras, max_class_drop: float | None = None
) -> None:
    """Compare every model's metrics with the gates, and its classes with the baseline's.

    A metric is the mean over the sets, or the value on one set, as `SET/METRIC`.

    Args:
        result: The finished evaluation.
        extras: The gates.
        max_class_drop: Maximum drop of a class's metric against the baseline, in points.

    Raises:
        GateError: At least one gate was missed.
    """
    missed = []
    for name in result.report.cards if extras.gates else ():
        values = summed_up(
            {e.set: e.metrics for e in result.report.evaluations if e.model == name}, None
        )
        missed += [
            f"{name} has {m} {values[m]:.4f}, below {v:g}"
            for m, v in extras.gates.items()
            # Not `<`: NaN is a miss.
            if not values[m] >= v
        ]
    if max_class_drop is not None:
        for decision in result.report.decisions:
            missed.append(class_drop_miss(decision, max_class_drop))
    if missed := list(filter(None, missed)):
        hint = f"the report is in {result.folder}"
        raise GateError("; ".join(missed), hint, folder=result.folder)


MIN_SCORE, MAX_SCORE = 0.0, 5.0  # Of STS-B. The server rejects other scores.


def check_submission(task: Task) -> None:
    """Raise a UsageError if the server does not have this task."""
    if not task.glue:
        hint = "--submission is for cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli"
        raise UsageError(f"{task.title} is not a GLUE task, so there is no file to submit", hint)


def write_submission(folder: Path, task: Task, name: str, values: Sequence[float]) -> Path:
    """Write the file of one set of a task, and return its path.

    Args:
        folder: The directory of the file. It is created if necessary.
        task: A task of GLUE.
        name: The name of the set, or "" if the task has only one.
        values: The class number or score of each test example, in the order of the test file.

    Raises:
        MachineError: The disk is full or not writable.
    """
    file = f"{task.glue[name] if name else next(iter(task.glue.values()))}.tsv"
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "prediction"])
    cells: Sequence[object] = values
    if task.kind == "score":
        cells = [f"{min(max(float(value), MIN_SCORE), MAX_SCORE):.3f}" for value in values]
    elif task.glue_words:
        cells = [task.labels[int(value)] for value in values]
    writer.writerows(enumerate(cells))
    write_atomic(folder / file, text.getvalue())
    return folder / file
