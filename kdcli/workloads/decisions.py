"""The facts by which a person decides whether a model can replace its baseline.

An average hides which classes and rows change. For every model and its baseline, this module
computes the change of each class, where the two models disagree, how far their probabilities can be
trusted, and the thresholds at which the model reaches the baseline's precision and recall.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdcli.listing import class_name, listed
from kdcli.messages import log
from kdcli.metrics.calibration import (
    calibration_error,
    class_calibration_error,
    fit_class_temperature,
    fit_label_temperature,
    scale_classes,
    scale_labels,
)
from kdcli.metrics.classification import confusion
from kdcli.metrics.per_class import (
    class_metrics,
    class_names,
    class_scorer,
    count_classes,
    largest_confusions,
)
from kdcli.metrics.resolution import exceeds
from kdcli.metrics.thresholds import (
    DEFAULT_THRESHOLD,
    ThresholdPoint,
    point_at,
    precision_recall_curve,
    reaching_precision,
    reaching_recall,
)
from kdcli.metrics.tokens import type_of
from kdcli.report.schema import Evaluation
from kdcli.report.schema_decisions import (
    Calibration,
    ClassChange,
    ConfusedPair,
    Confusion,
    Decision,
    DifferingRow,
    LabelThresholds,
    OperatingPoint,
    PairedValue,
)
from kdcli.report.sections.decision import metric_name
from kdcli.types import Array, Example, Kind, Task
from kdcli.workloads.predictions import Prediction, readable, reference, shown_label
from kdcli.workloads.scores import RESAMPLES, ModelScores, paired_differences

KINDS: tuple[Kind, ...] = ("class", "multi", "tokens")
"""The kinds of task that have classes."""
MAX_DIFFERING = 20
"""Maximum number of rows on which the models differ that are listed."""
MAX_CONFUSED = 20
"""Maximum number of cells off the diagonal of the confusion matrix that are listed."""
MAX_MATRIX = 40
"""Maximum number of classes of a complete confusion matrix."""
MIN_COUNT = 30
"""With fewer examples, the score of a class takes too few values for a bootstrap interval."""
POINT = 0.01


class _Pair(NamedTuple):
    """The predictions of a model and its baseline for the examples of one set."""

    task: Task
    examples: Sequence[Example]
    model: Sequence[Prediction]
    baseline: Sequence[Prediction]
    evaluation: Evaluation

    @property
    def by_teacher(self) -> bool:
        """Whether the baseline's predictions take the place of the labels."""
        return self.evaluation.reference == "teacher"


def _pairs_by_set(task: Task, model: ModelScores, baseline: ModelScores) -> Iterator[_Pair]:
    """Yield the predictions of a model and its baseline, set by set."""
    begin = 0
    for evaluation in model.evaluations:
        examples = model.examples[evaluation.set]
        rows = slice(begin, begin + len(examples))
        begin = rows.stop
        predictions = model.predictions[rows], baseline.predictions[rows]
        yield _Pair(task, examples, *predictions, evaluation)


def decisions(
    scores: Mapping[str, ModelScores],
    *,
    chosen: Collection[str] = (),
    thresholds_from: Sequence[Decision] = (),
    max_class_drop: float | None = None,
    differing: int = MAX_DIFFERING,
    resamples: int = RESAMPLES,
) -> list[Decision]:
    """Compare models with the first one class by class and row by row.

    Args:
        scores: model -> its scores.
        chosen: Models whose step or settings were selected on the same rows.
        thresholds_from: Comparisons on the rows that chose the thresholds, which their
            `thresholds_on` names. By default, and for other models or sets, these rows choose.
        max_class_drop: The limit that `class_drop_miss` will check, in points. It raises the
            number of examples that a class needs; see `min_count`.
        differing: Number of rows to list on which the models differ most, at most 20.
        resamples: Number of bootstrap resamples.

    Returns:
        One entry for each pair of models and each set. Empty if the task has no classes.
    """
    baseline, *others = scores
    all_decisions = []
    for model in others:
        ours, theirs = scores[model], scores[baseline]
        task = ours.task
        if task is None or task.kind not in KINDS:
            continue
        log(f"{model} compared with {baseline} class by class")
        for pair in _pairs_by_set(task, ours, theirs):
            evaluation = pair.evaluation
            predictions = {baseline: pair.baseline, model: pair.model}
            matrix = _confusion(pair)
            has_probs = task.kind in ("class", "multi")
            key = model, evaluation.set
            origin = next((d for d in thresholds_from if (d.model, d.set) == key), None)
            all_decisions.append(
                Decision(
                    model=model,
                    baseline=baseline,
                    task=evaluation.task,
                    set=evaluation.set,
                    n=len(pair.examples),
                    reference=evaluation.reference,
                    metric=class_metrics(task)[0],
                    min_count=min_count(max_class_drop),
                    classes=_classes(pair, min_count(max_class_drop), resamples),
                    agreement=_agreement(pair),
                    confusion=matrix if matrix and len(matrix.labels) <= MAX_MATRIX else None,
                    confused=_confused(matrix),
                    differing=_differing(pair, min(differing, MAX_DIFFERING)),
                    calibration=_calibrations(pair, predictions, scores) if has_probs else {},
                    thresholds=_thresholds(pair, origin) if has_probs else [],
                    thresholds_on=origin.thresholds_on if origin else "",
                    chosen_on_these_rows=model in chosen,
                )
            )
    return all_decisions


def min_count(max_class_drop: float | None) -> int:
    """Return the number of examples that a class needs.

    That is 30 and, with a limit of D points, at least 100 / D. With fewer examples, a single one is
    worth more than D points and would decide alone.

    Args:
        max_class_drop: The limit, in points; None without one.
    """
    if max_class_drop is None:
        return MIN_COUNT
    return max(MIN_COUNT, math.ceil(100 / max_class_drop))


def for_limit(decision: Decision, max_class_drop: float | None) -> Decision:
    """Return a comparison with the number of examples that a class needs for another limit."""
    needed = min_count(max_class_drop)
    classes = [
        each.model_copy(update={"enough": each.count >= needed}) for each in decision.classes
    ]
    return decision.model_copy(update={"min_count": needed, "classes": classes})


def checked_classes(decision: Decision, max_class_drop: float) -> list[ClassChange]:
    """Return the classes with enough examples for a limit.

    The comparison may have been made for another limit, which needs other numbers of examples.
    """
    needed = min_count(max_class_drop)
    return [each for each in decision.classes if each.count >= needed]


def class_drop_miss(decision: Decision, max_class_drop: float) -> str:
    """Describe the classes that lose more than a limit; empty if no class does.

    Classes with too few examples are not checked. If all classes have too few, this is a miss too,
    because nothing shows that the limit is kept.

    Args:
        decision: The comparison.
        max_class_drop: Maximum drop of a class's main metric, in points (1 point = 0.01).
    """
    name = f"{decision.model} on {decision.task} {decision.set}".rstrip()
    checked = checked_classes(decision, max_class_drop)
    if not checked:
        needed = min_count(max_class_drop)
        return f"{name}: no class has the {needed} examples that the check needs"
    lost = [-each.metrics[decision.metric].difference / POINT for each in checked]
    missed = [n for n, points in enumerate(lost) if exceeds(points, max_class_drop)]
    if not missed:
        return ""
    worst, *others = sorted(missed, key=lambda n: -lost[n])
    names = [f"{class_name(each.name)} ({each.count:,} examples" for each in checked]
    more = listed(f"{names[n]}, {lost[n]:.2f} points)" for n in others)
    also = f"; too many also in {more}" if more else ""
    return (
        f"{name} loses {lost[worst]:.2f} points of {metric_name(decision)} in class "
        f"{names[worst]}), more than {max_class_drop:g}{also}"
    )


def _classes(pair: _Pair, needed: int, resamples: int) -> list[ClassChange]:
    """Compare the scores of every class, with paired intervals."""
    task = pair.task
    truth = [reference(task, example) for example in pair.examples]
    ours, theirs = _values(pair.model), _values(pair.baseline)
    counts = count_classes(task, ours, truth)
    of_model = class_scorer(task, counts)
    of_baseline = class_scorer(task, count_classes(task, theirs, truth))
    n = len(truth)
    differences = paired_differences(
        of_model,
        of_baseline,
        n,
        resamples=resamples,
        baseline_is_reference=pair.by_teacher,
        examples=pair.examples,
    )
    model_values, baseline_values = of_model(np.arange(n)), of_baseline(np.arange(n))
    between = count_classes(task, ours, theirs)
    occurrences = (counts.true, between.hits, between.predicted, between.true)
    names = class_names(task)
    counted = (np.bincount(each.classes, minlength=len(names)).tolist() for each in occurrences)
    totals = zip(names, *counted, strict=True)
    changes = []
    for name, count, both, by_model, by_baseline in totals:
        metrics = {}
        for metric in class_metrics(task):
            key = f"{metric} {name}"
            _, low, high = differences[key]
            metrics[metric] = PairedValue(
                baseline=baseline_values[key], model=model_values[key], low=low, high=high
            )
        changes.append(
            ClassChange(
                name=name,
                count=count,
                enough=count >= needed,
                metrics=metrics,
                both=both,
                only_baseline=by_baseline - both,
                only_model=by_model - both,
            )
        )
    return changes


def _agreement(pair: _Pair) -> float:
    """Return the share of rows, or of words, for which both models predict the same."""
    ours, theirs = _values(pair.model), _values(pair.baseline)
    if pair.task.kind == "tokens":
        ours, theirs = [t for tags in ours for t in tags], [t for tags in theirs for t in tags]
    return float(np.mean([a == b for a, b in zip(ours, theirs, strict=True)]))


def _confusion(pair: _Pair) -> Confusion | None:
    """Count the baseline's classes (rows) and the model's (columns); None for `multi`.

    For `tokens`, words are counted by the types of their labels.
    """
    task = pair.task
    ours, theirs = _values(pair.model), _values(pair.baseline)
    if task.kind == "multi":
        return None
    names = list(task.labels)
    if task.kind == "tokens":
        types = {label: type_of(label, task.labels) for label in task.labels}
        names = list(dict.fromkeys(types.values()))
        ours, theirs = (
            [names.index(types[tag]) for tags in rows for tag in tags] for rows in (ours, theirs)
        )
    counts_CC = confusion(ours, theirs, len(names))
    return Confusion(labels=names, counts=counts_CC.tolist())


def _confused(matrix: Confusion | None) -> list[ConfusedPair]:
    if matrix is None:
        return []
    cells = largest_confusions(np.array(matrix.counts), MAX_CONFUSED)
    return [
        ConfusedPair(baseline=matrix.labels[row], model=matrix.labels[column], count=count)
        for row, column, count in cells
    ]


def _differing(pair: _Pair, limit: int) -> list[DifferingRow]:
    """List the rows on which the models differ most, with the largest difference first."""
    task = pair.task
    is_tokens, is_binary = task.kind == "tokens", task.kind == "class" and len(task.labels) == 2
    changes = []
    for i, (ours, theirs) in enumerate(zip(pair.model, pair.baseline, strict=True)):
        if is_tokens:
            differ = _differ(ours, theirs)
            change_C = np.array([sum(differ) / max(len(differ), 1)])
        else:
            change_C = np.abs(np.subtract(ours.scores, theirs.scores))
        # The probabilities of two classes change equally, up to rounding.
        c = 1 if is_binary else int(change_C.argmax())
        changes.append((float(change_C[c]), i, c))
    # Equal changes stay in the order of the rows.
    largest = sorted(changes, key=lambda each: -each[0])[:limit]
    rows = []
    for change, i, c in largest:
        if change == 0:
            break
        example, ours, theirs = pair.examples[i], pair.model[i], pair.baseline[i]
        shown = [theirs.shown, ours.shown]
        if not pair.by_teacher:
            shown.append(shown_label(task, example))
        if is_tokens:
            differ = _differ(ours, theirs)
            texts = [_tagged(example.texts, tags, differ) for tags in shown]
        else:
            texts = [readable(task, example, value, None) for value in shown]
        rows.append(
            DifferingRow(
                id=example.id,
                texts=[" ".join(example.texts)] if is_tokens else list(example.texts),
                baseline=texts[0],
                model=texts[1],
                label=None if pair.by_teacher else texts[2],
                change=change,
                changed=None if is_tokens else task.labels[c],
                baseline_probability=None if is_tokens else theirs.scores[c],
                model_probability=None if is_tokens else ours.scores[c],
            )
        )
    return rows


def _differ(ours: Prediction, theirs: Prediction) -> list[bool]:
    """Tell for every word of a sentence whether the models give it different labels."""
    return [a != b for a, b in zip(ours.shown, theirs.shown, strict=True)]


def _tagged(words: Sequence[str], tags: Sequence[str], chosen: Sequence[bool]) -> str:
    """Write the chosen words of a sentence with their labels."""
    pairs = zip(words, tags, chosen, strict=True)
    return ", ".join(f"{word} {tag}" for word, tag, is_chosen in pairs if is_chosen)


def _calibrations(
    pair: _Pair, predictions: Mapping[str, Sequence[Prediction]], scores: Mapping[str, ModelScores]
) -> dict[str, Calibration]:
    """Compute the calibration of both models, each with its predictions for the set.

    If the baseline's predictions are the reference, they are all correct. Its error is then how far
    its confidence is from 1, and a model that resembles it has the same error.
    """
    truth = np.array([reference(pair.task, example) for example in pair.examples])
    return {
        name: _calibration(pair.task.kind, _probs(of_model), truth, scores[name].temperature)
        for name, of_model in predictions.items()
    }


def _calibration(
    kind: Kind, probs_NC: Array, truth: Array, stored_temperature: float | None
) -> Calibration:
    error_of: Callable[[Array, Array], float]
    fit: Callable[[Array, Array], float | None]
    scale: Callable[[Array, float], Array]
    if kind == "class":
        error_of, fit, scale = class_calibration_error, fit_class_temperature, scale_classes
    else:
        error_of, fit, scale = calibration_error, fit_label_temperature, scale_labels

    def scaled_error(temperature: float | None) -> float | None:
        return None if temperature is None else error_of(scale(probs_NC, temperature), truth)

    fitted = fit(probs_NC, truth)
    return Calibration(
        error=error_of(probs_NC, truth),
        temperature=fitted,
        scaled_error=scaled_error(fitted),
        stored_temperature=stored_temperature,
        stored_error=scaled_error(stored_temperature),
    )


def _thresholds(pair: _Pair, origin: Decision | None) -> list[LabelThresholds]:
    """Compute thresholds for the second of two classes, or for each of several labels.

    With `origin`, its thresholds are taken, with their precision and recall on these rows.
    Labels are skipped if the baseline's precision or recall at 0.5 is undefined.
    """
    task = pair.task
    truth = [reference(task, example) for example in pair.examples]
    if task.kind == "class":
        if len(task.labels) != 2:
            return []
        columns, labels_NC = [1], np.array(truth)[:, None] == np.arange(2)
    else:
        columns, labels_NC = list(range(len(task.labels))), np.array(truth)
    ours_NC, theirs_NC = _probs(pair.model), _probs(pair.baseline)
    rows = []
    for c in columns:
        labels_N = labels_NC[:, c]
        baseline = point_at(theirs_NC[:, c], labels_N, DEFAULT_THRESHOLD)
        if baseline is None:
            continue
        at = functools.partial(point_at, ours_NC[:, c], labels_N)
        if origin is None:
            curve = precision_recall_curve(ours_NC[:, c], labels_N)
            same_precision = reaching_precision(curve, baseline.precision)
            same_recall = reaching_recall(curve, baseline.recall)
        else:
            known = next((row for row in origin.thresholds if row.label == task.labels[c]), None)
            points = (known.same_precision, known.same_recall) if known else (None, None)
            same_precision, same_recall = (at(p.threshold) if p else None for p in points)
        rows.append(
            LabelThresholds(
                label=task.labels[c],
                baseline=OperatingPoint(**baseline._asdict()),
                model=_reported(at(DEFAULT_THRESHOLD)),
                same_precision=_reported(same_precision),
                same_recall=_reported(same_recall),
            )
        )
    return rows


def _reported(point: ThresholdPoint | None) -> OperatingPoint | None:
    return None if point is None else OperatingPoint(**point._asdict())


def _values(predictions: Iterable[Prediction]) -> list[Any]:
    return [prediction.value for prediction in predictions]


def _probs(predictions: Iterable[Prediction]) -> Array:
    """Return the probabilities of the classes, [N, C] float64."""
    return np.array([prediction.scores for prediction in predictions], np.float64)
