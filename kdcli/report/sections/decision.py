"""Show what distinguishes a model from its baseline, class by class and row by row."""

import math

import numpy as np

from kdcli.listing import class_name, listed
from kdcli.report.schema import Report
from kdcli.report.schema_decisions import ClassChange, Decision, OperatingPoint
from kdcli.report.sections.evaluations import (
    CHOSEN,
    MAX_SHORT_EVALUATIONS,
    MAX_SHORT_LABELS,
    MAX_TEXT,
    least_view,
    set_name,
)
from kdcli.report.text import (
    ReportSection,
    View,
    filled,
    lost_points,
    number,
    percent,
    shortened_line,
    signed,
)

TOO_FEW = "not enough rows to tell"
LOW_TEMPERATURE = 0.1
LOW = (
    f"below {LOW_TEMPERATURE}: nearly every prediction on the rows of the fit is right, or the "
    "model's logits are very small. If all answers look certain now, fit it to more rows"
)
"""What a temperature below this one means."""


def decision_section(report: Report) -> ReportSection:
    """Show the worst class of every model in a sentence, and the details of each comparison."""
    least = View.MARKDOWN if len(report.decisions) <= MAX_SHORT_EVALUATIONS else View.HTML
    alone = len(report.decisions) == 1
    lost = report.compression is not None
    sentences, parts = [], []
    for sets in _by_model(report):
        sentences.append(worst_class(min(sets, key=_largest_loss), lost=lost))
        if len(sets) == 1:
            sentences.append(_small(sets[0]))
        for d in sets:
            where = set_name(d.task, d.set)
            facts = [
                f"The models predict the same for {percent(d.agreement)} % of the {_unit(d)}.",
                _small(d) if len(sets) > 1 else "",
                CHOSEN.format(where) if d.chosen_on_these_rows else "",
            ]
            part = ReportSection(
                f"{d.model} compared with {d.baseline} on {where}",
                sentences=[fact for fact in facts if fact],
                parts=[
                    _classes(d, lost=lost),
                    _confusion(d),
                    _calibration(d),
                    _thresholds(d),
                    _rows(d),
                ],
                least=least,
                open=alone,
            )
            parts.append(part)
    return ReportSection("Class by class", sentences=[s for s in sentences if s], parts=parts)


def _by_model(report: Report) -> list[list[Decision]]:
    """Group the comparisons of each model with a baseline on the sets of a task."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for d in report.decisions:
        groups.setdefault((d.model, d.baseline, d.task), []).append(d)
    return list(groups.values())


def _largest_loss(decision: Decision) -> float:
    """Return the smallest difference of a class with enough examples, or infinity without one."""
    differences = [c.metrics[decision.metric].difference for c in decision.classes if c.enough]
    return min(differences, default=math.inf)


def worst_class(decision: Decision, *, lost: bool) -> str:
    """Describe the class that loses the most, among the classes with enough examples.

    Args:
        decision: The comparison.
        lost: Whether to write the points that the class lost instead of the difference.
    """
    d = decision
    where = f"{d.model} on {set_name(d.task, d.set)}"
    checked = [each for each in d.classes if each.enough]
    if not checked:
        return ""
    worst = min(checked, key=lambda each: each.metrics[d.metric].difference)
    value = worst.metrics[d.metric]
    if value.difference >= 0:
        return f"{where}: no class with enough rows loses {metric_name(d)} against {d.baseline}."
    if lost:
        points, ends = lost_points(value.difference, value.low, value.high, "-")
        change = f"{points} points lost (95 % interval {ends})"
    else:
        ends = f"{signed(value.low)} to {signed(value.high)}"
        change = f"difference {signed(value.difference)} (95 % interval {ends})"
    return (
        f"{where}: the worst class is {class_name(worst.name)} ({worst.count:,} {_counted(d)}): "
        f"{metric_name(d)} {number(value.model)}, {d.baseline} {number(value.baseline)}, {change}."
    )


def _small(decision: Decision) -> str:
    """List the classes with too few examples."""
    d = decision
    small = listed(f"{class_name(c.name)} ({c.count:,})" for c in d.classes if not c.enough)
    if not small:
        return ""
    return f"{d.model}: {TOO_FEW} (fewer than {d.min_count} {_counted(d)}): {small}."


def metric_name(decision: Decision) -> str:
    """Name the main metric of the classes: recall or F1 or, without labels, the agreement."""
    if decision.reference == "teacher":
        return "agreement" if decision.metric == "recall" else f"{decision.metric} of agreement"
    return {"f1": "F1"}.get(decision.metric, decision.metric)


def _unit(decision: Decision) -> str:
    """Name what `agreement` counts."""
    return "words" if _is_tokens(decision) else "rows"


def _counted(decision: Decision) -> str:
    """Name what the examples of a class are."""
    return "entities" if _is_tokens(decision) else "rows"


def _is_tokens(decision: Decision) -> bool:
    # Words have a confusion matrix, but no probabilities.
    return not decision.calibration


def _classes(decision: Decision, *, lost: bool) -> ReportSection:
    """Show a row for each class, the largest loss first and classes with few examples last.

    Args:
        decision: The comparison.
        lost: Whether to write the points that a class lost instead of the difference.
    """
    d = decision
    ordered = sorted(d.classes, key=lambda c: (not c.enough, c.metrics[d.metric].difference))
    rows = [_class_row(d, each, lost=lost) for each in ordered]
    unit = _counted(d)
    meaning = f"Difference: {d.model} minus {d.baseline}"
    if lost:
        meaning = f"Points lost: {d.baseline} minus {d.model}, so a gain is negative"
    note = (
        f"{meaning}, with the paired 95 % interval. “Only” counts the {unit} for which only one "
        "model predicts the class."
    )
    if not all(each.enough for each in d.classes):
        note += f" Classes with fewer than {d.min_count} {unit} are last."
    if len(d.classes) > 2:
        note += " The worst of many classes looks worse by chance than it is."
    note += f" {_reference(d)}"
    return filled("By class", rows, note, style="tight classes", least=least_view(len(rows)))


def _reference(decision: Decision) -> str:
    """Name the labels that the numbers of a section rest on."""
    if decision.reference == "teacher":
        return f"The labels are the predictions of {decision.baseline}: no labels were read."
    return "The labels come from the data."


def _class_row(decision: Decision, each: ClassChange, *, lost: bool) -> dict[str, str]:
    row = {"class": each.name, _counted(decision): f"{each.count:,}"}
    for metric, value in each.metrics.items():
        name = {"f1": "F1"}.get(metric, metric)
        row[f"{name} {decision.baseline} → {decision.model}"] = (
            f"{number(value.baseline)} → {number(value.model)}"
        )
        if lost:
            points, ends = lost_points(value.difference, value.low, value.high)
            row[f"{name}, points lost (+)"] = f"{points} ({ends})"
        else:
            row[f"{name} difference"] = (
                f"{signed(value.difference)} ({signed(value.low)} to {signed(value.high)})"
            )
    row[f"only {decision.baseline}"] = f"{each.only_baseline:,}"
    row[f"only {decision.model}"] = f"{each.only_model:,}"
    row[" "] = "" if each.enough else TOO_FEW
    return row


def _confusion(decision: Decision) -> ReportSection:
    """Show the matrix of both models' classes or, for many classes, its largest cells."""
    d = decision
    matrix = d.confusion
    title = f"Classes of {d.baseline} and {d.model}"
    if matrix is not None and len(matrix.labels) <= MAX_SHORT_LABELS:
        counts = np.array(matrix.counts, dtype=np.int64)
        shares = counts / np.maximum(counts.sum(1), 1)[:, None]
        rows = [
            [label, *(f"{n:,}" for n in row)]
            for label, row in zip(matrix.labels, matrix.counts, strict=True)
        ]
        header = [f"{d.baseline} ↓ {d.model} →", *matrix.labels]
        legend = f"Shaded by the share of {d.baseline}'s class, blue where both models agree."
        return ReportSection(
            title,
            header,
            rows,
            style="confusion",
            shades=shares.tolist(),
            legend=legend,
            least=View.MARKDOWN,
        )
    pairs = [
        {d.baseline: pair.baseline, d.model: pair.model, _unit(d): f"{pair.count:,}"}
        for pair in d.confused
    ]
    note = f"The largest of the {_unit(d)} with another class, of {len(d.classes)} classes."
    return filled(title, pairs, note, least=View.MARKDOWN)


def _calibration(decision: Decision) -> ReportSection:
    """Show how far the probabilities of both models are from the shares of correct predictions."""
    d = decision
    rows = [
        {
            "model": name,
            "calibration error": number(each.error),
            "temperature": number(each.temperature),
            "error after scaling": number(each.scaled_error),
            "stored temperature": number(each.stored_temperature),
            "error with it": number(each.stored_error),
        }
        for name, each in d.calibration.items()
    ]
    note = (
        "Expected calibration error: mean distance between confidence and share of correct "
        "predictions, in 15 bins (Guo et al. 2017)."
    )
    without = [name for name, each in d.calibration.items() if each.temperature is None]
    if len(without) < len(d.calibration):
        note += (
            " The temperature divides the logits. It was fitted on these rows, so the error after "
            "scaling is optimistic."
        )
    if any(each.stored_temperature is not None for each in d.calibration.values()):
        note += " The stored temperature is kdcli_temperature in config.json."
    if without:
        named = " and ".join(without)
        note += (
            f" No temperature for {named}: the best one is not between 0.01 and 100, as when every "
            "prediction is right, or when confidence does not tell right from wrong."
        )
    low = [n for n, each in d.calibration.items() if (each.temperature or 1) < LOW_TEMPERATURE]
    if low:
        note += f" The temperature of {' and '.join(low)} is {LOW}."
    note += f" {_reference(d)}"
    if d.reference == "teacher":
        note += (
            " The temperature therefore says how sure the model is that both agree, and not how "
            f"often it is right. All predictions of {d.baseline} count as right, so its "
            "calibration error measures how far its confidence is below 1. A similar error of the "
            "other model is not caused by compression."
        )
    return filled("Calibration", rows, note, least=View.MARKDOWN)


def _thresholds(decision: Decision) -> ReportSection:
    """Show the thresholds at which the model reaches the baseline's precision and recall."""
    d = decision
    rows = [
        {
            "label": each.label,
            f"{d.baseline} at 0.5": _precision_recall(each.baseline),
            f"{d.model} at 0.5": _precision_recall(each.model),
            "same precision": _at(each.same_precision),
            "same recall": _at(each.same_recall),
        }
        for each in d.thresholds
    ]
    origin = "these rows, and precision and recall come from the same rows, so they are optimistic"
    if d.thresholds_on:
        origin = f"the {d.thresholds_on} rows, and precision and recall come from these rows"
    note = (
        f"Precision / recall. The last two columns are thresholds at which {d.model} reaches the "
        f"precision or the recall of {d.baseline}, with its precision / recall there. They were "
        f"chosen on {origin}. {_reference(d)}"
    )
    return filled("Thresholds", rows, note, style="tight classes", least=least_view(len(rows)))


def _precision_recall(point: OperatingPoint | None) -> str:
    if point is None:
        return "predicts nothing"
    return f"{number(point.precision)} / {number(point.recall)}"


def _at(point: OperatingPoint | None) -> str:
    if point is None:
        return "not reached"
    return f"above {number(point.threshold)} ({_precision_recall(point)})"


def _rows(decision: Decision) -> ReportSection:
    """Quote the rows on which the models differ most. Only HTML shows them."""
    d, items = decision, []
    for row in d.differing:
        ours, theirs = shortened_line(row.model, MAX_TEXT), shortened_line(row.baseline, MAX_TEXT)
        head = f"{d.baseline}: {theirs}; {d.model}: {ours}"
        facts = [] if row.label is None else [f"label {shortened_line(row.label, MAX_TEXT)}"]
        if row.changed is not None:
            before, after = number(row.baseline_probability), number(row.model_probability)
            facts.append(f"probability of {row.changed} {before} → {after}")
        else:
            facts.append(f"{percent(row.change)} % of the words")
        facts.append(f"example {row.id}")
        items.append(
            (f"{head} ({', '.join(facts)})", *(shortened_line(t, MAX_TEXT) for t in row.texts))
        )
    return ReportSection("Rows that differ most", items=items, least=View.HTML, open=False)
