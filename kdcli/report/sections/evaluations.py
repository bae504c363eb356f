"""Show scores of labelled tasks, differences between models, and each evaluation in detail."""

import numpy as np

from kdcli.report.schema import Evaluation, Report
from kdcli.report.text import (
    LOWER_IS_BETTER,
    ReportSection,
    View,
    filled,
    lost_points,
    names_in,
    number,
    shortened_line,
    signed,
)

MAX_LABELS = 40  # rows and columns of a confusion matrix
MAX_SHORT_LABELS = 10  # with more labels, confusions and classes are shown in HTML only
MAX_SHORT_EVALUATIONS = 6  # with more evaluations, the details are shown in HTML only
MAX_TEXT = 300  # characters that are shown of one text of an example
THEIR_OWN = "with their own teachers, data and budgets: not a result of this run"
CHOSEN = (
    "The examples of “{}” also chose the model, so its difference there is a little optimistic."
)
MEAN = "mean"  # name of the last row of a table by set


def set_name(task: str, part: str) -> str:
    """Name a task or one of its sets, as `report.quality` does: `sst2`, `mnli matched`."""
    return f"{task} {part}".strip()


def evaluations_by_task(report: Report, model: str | None = None) -> dict[str, list[Evaluation]]:
    """Group the evaluations of all models, or of one, by task, in the order of the report."""
    chosen = [e for e in report.evaluations if model in (None, e.model)]
    return {
        task: [e for e in chosen if e.task == task]
        for task in dict.fromkeys(e.task for e in chosen)
    }


def scores(report: Report, model: str | None = None) -> list[ReportSection]:
    """Show a table for each task.

    It has a row for each model or, if several sets were evaluated, a row for each set and the mean.
    """
    sections = []
    for task, own in evaluations_by_task(report, model).items():
        several = len({e.set for e in own}) > 1
        sections.append(_by_set(task, own) if several else _by_model(report, task, own))
        if own[0].set:
            sections += _published(report, task, own)
    return sections


def _by_model(report: Report, task: str, evaluations: list[Evaluation]) -> ReportSection:
    metrics, name = names_in(e.metrics for e in evaluations), evaluations[0].set
    papers = {
        row.model: row
        for row in report.published
        if row.model and row.task == task and name in row.values
    }
    rows = []
    for e in evaluations:
        row = {"model": e.model} | {metric: _value(e, metric) for metric in metrics}
        row["published"] = number(papers[e.model].values[name] / 100) if e.model in papers else ""
        # Labels need no word: they are the usual reference.
        reference = e.reference if e.reference != "labels" else ""
        row |= {"examples": f"{e.n:,}", "split": e.split, "reference": reference}
        rows.append(row)
    notes = [_note_on_seeds(evaluations)]
    if papers:
        sources = ", ".join(dict.fromkeys(row.source for row in papers.values()))
        shapes = ", ".join(dict.fromkeys(str(row.shape) for row in papers.values()))
        metric = next(iter(papers.values())).metric
        notes.append(f"Published: {metric} of {shapes}, {sources}; {THEIR_OWN}.")
    return filled(f"Scores on {set_name(task, name)}", rows, " ".join(filter(None, notes)))


def _note_on_seeds(evaluations: list[Evaluation]) -> str:
    seeds = max(e.seeds for e in evaluations)
    return f"Mean ± sample standard deviation of {seeds} runs." if seeds > 1 else ""


def _value(evaluation: Evaluation, metric: str) -> str:
    spread = evaluation.deviations.get(metric)
    value = number(evaluation.metrics.get(metric))
    return value if spread is None else f"{value} ± {spread:.2g}"


def _by_set(task: str, evaluations: list[Evaluation]) -> ReportSection:
    """Return a table with a column for each metric of each model."""
    models = list(dict.fromkeys(e.model for e in evaluations))
    metrics = names_in(e.metrics for e in evaluations)
    columns = [(model, metric) for metric in metrics for model in models]
    names, title = [f"{metric}, {model}" for model, metric in columns], f"Scores on {task}"
    if len(models) == 1:
        names = metrics
    elif len(metrics) == 1:
        names, title = models, f"{title}, {metrics[0]}"
    splits = dict.fromkeys(e.split for e in evaluations)
    if len(splits) == 1:
        title += f" ({', '.join(splits)})"
    values, rows = list[list[float | None]](), list[list[str]]()
    for name in dict.fromkeys(e.set for e in evaluations):
        own = {e.model: e for e in evaluations if e.set == name}
        cells = [(own.get(model), metric) for model, metric in columns]
        values.append([None if e is None else e.metrics.get(metric) for e, metric in cells])
        first = next(iter(own.values()))
        scores = ["" if e is None else _value(e, metric) for e, metric in cells]
        rows.append([name, *scores, f"{first.n:,}", *[first.split] * (len(splits) > 1)])
    columns_shown = ["set", *names, "examples", *["split"] * (len(splits) > 1)]
    means = list(map(number, _means(values)))
    rows.append([MEAN, *means, *[""] * (len(columns_shown) - 1 - len(means))])
    note = _note_on_seeds(evaluations)
    return ReportSection(title, columns_shown, rows, note, marked=len(rows) - 1)


def _means(values: list[list[float | None]]) -> list[float | None]:
    """Average each column. A column without a value for every set has no comparable mean."""
    return [
        None if None in column else float(np.mean([float(value or 0) for value in column]))
        for column in zip(*values, strict=True)
    ]


def _published(report: Report, task: str, evaluations: list[Evaluation]) -> list[ReportSection]:
    """Show what papers report for the evaluated sets, and the mean over these sets alone.

    The variants of one set have their published scores next to their own.
    """
    sets, sections = list(dict.fromkeys(e.set for e in evaluations)), []
    several = len(sets) > 1
    for metric in names_in(e.metrics for e in evaluations):
        of_metric = [row for row in report.published if (row.task, row.metric) == (task, metric)]
        papers = [row for row in of_metric if several or not row.model]
        if not papers:
            continue
        values = [
            [row.values[name] / 100 if name in row.values else None for row in papers]
            for name in sets
        ]
        rows = [
            [name, *map(number, row)]
            for name, row in zip([*sets, MEAN], [*values, _means(values)], strict=True)
        ]
        sources = ", ".join(dict.fromkeys(row.source for row in papers))
        note = f"{sources}; {THEIR_OWN}."
        columns = ["set", *(row.row for row in papers)]
        title = f"Published on {task}, {metric}"
        sections.append(ReportSection(title, columns, rows, note, marked=len(rows) - 1))
    return sections


def comparisons(report: Report, *, lost: bool = False) -> ReportSection:
    """Show the differences between models, with a word where an interval excludes zero.

    Args:
        report: The report.
        lost: Whether to show what each model lost, in the points and the direction of a goal such
            as `max_drop`.
    """
    title, column, formula = "Differences", "difference", "Difference: model minus baseline"
    up, down, gain = "higher", "lower", ""
    if lost:
        title, column, up, down = "Points lost", "points lost (+)", "gained", "lost"
        formula = "Points lost: the baseline's score minus the model's"
        gain = ", so a gain is negative; 1 point is 0.01"
    level = f"{100 * min((c.confidence for c in report.comparisons), default=0):.3g}"
    rows = []
    for c in report.comparisons:
        difference, low, high = c.difference, c.low, c.high
        if lost and c.metric in LOWER_IS_BETTER:
            difference, low, high = -difference, -high, -low
        values = signed(difference), f"{signed(low)} to {signed(high)}"
        if lost:
            values = lost_points(difference, low, high)
        row = {"metric": f"{set_name(c.task, c.set)} {c.metric}", "model": c.model}
        row |= {"baseline": c.baseline, column: values[0], f"{level}% interval": values[1]}
        rows.append(row | {"": up if low > 0 else down if high < 0 else ""})
    note = (
        f"{formula} on the same examples{gain}. Interval: covers the choice of these examples with "
        f"{level} % confidence; “{down if lost else up}” or “{up if lost else down}” where it "
        "excludes 0. It does not cover other seeds."
    )
    chosen = dict.fromkeys(
        set_name(c.task, c.set) for c in report.comparisons if c.chosen_on_these_rows and not lost
    )
    note = " ".join([note, *(CHOSEN.format(name) for name in chosen)])
    return filled(title, rows, note, style="differences")


def details(report: Report) -> ReportSection:
    """Show confusions, classes and the worst examples of each model on each set."""
    alone = len(report.evaluations) == 1
    least = View.TERMINAL if len(report.evaluations) <= MAX_SHORT_EVALUATIONS else View.HTML
    sections = [
        ReportSection(
            f"{e.model} on {headline(e)}",
            parts=(matrix(e, alone=alone), _per_class(e), _worst(e)),
            least=least,
            open=alone,
        )
        for e in report.evaluations
    ]
    return ReportSection("In detail", parts=sections)


def headline(evaluation: Evaluation) -> str:
    """Write the set and its metrics in a line."""
    e = evaluation
    metrics = ", ".join(f"{metric} {number(value)}" for metric, value in e.metrics.items())
    return f"{set_name(e.task, e.set)} ({e.split}, {e.n:,} examples): {metrics}"


def least_view(rows: int) -> View:
    """Return the first view that shows a table with a row for each class."""
    return View.MARKDOWN if rows <= MAX_SHORT_LABELS else View.HTML


def matrix(evaluation: Evaluation, *, alone: bool) -> ReportSection:
    """Return the confusion matrix of at most MAX_LABELS labels, the ones with the most errors.

    A terminal shows a small matrix if the report has no other evaluation.
    """
    title, confusion = "Confusion", evaluation.confusion
    if confusion is None or not confusion.labels:
        return ReportSection(title)
    counts = np.array(confusion.counts, dtype=np.int64)
    totals = counts.sum(1)
    chosen, note = np.arange(len(confusion.labels)), ""
    if len(chosen) > MAX_LABELS:
        # Both the missed examples of a class and those mistaken for it are its errors.
        errors = totals + counts.sum(0) - 2 * counts.diagonal()
        chosen = np.sort(np.argsort(-errors, kind="stable")[:MAX_LABELS])
        note = f"Of {len(confusion.labels)} classes the {MAX_LABELS} with the most errors."
    shares = (counts / np.maximum(totals, 1)[:, None])[np.ix_(chosen, chosen)]
    counts = counts[np.ix_(chosen, chosen)]
    labels = [confusion.labels[i] for i in chosen]
    is_small = len(labels) <= MAX_SHORT_LABELS
    # Many zeros would hide the errors.
    rows = [
        [label, *(f"{n:,}" if n or is_small else "" for n in row)]
        for label, row in zip(labels, counts.tolist(), strict=True)
    ]
    return ReportSection(
        title,
        ["true ↓ predicted →", *labels],
        rows,
        note,
        style="confusion" if is_small else "confusion many",
        shades=shares.tolist(),
        legend="Shaded by the share of the true class, blue where it is right.",
        least=View.TERMINAL if alone and is_small else least_view(len(rows)),
    )


def _per_class(evaluation: Evaluation) -> ReportSection:
    rows = [
        {
            "class": label,
            "precision": number(s.precision),
            "recall": number(s.recall),
            "F1": number(s.f1),
            "examples": f"{s.support:,}",
        }
        for label, s in evaluation.per_class.items()
    ]
    is_open = len(rows) <= MAX_SHORT_LABELS
    return filled("By class", rows, least=least_view(len(rows)), open=is_open)


def _worst(evaluation: Evaluation) -> ReportSection:
    items = []
    for m in evaluation.worst:
        label, predicted = shortened_line(m.label, MAX_TEXT), shortened_line(m.predicted, MAX_TEXT)
        # More than two texts are the words of one text.
        texts = m.texts if len(m.texts) < 3 else [" ".join(m.texts)]
        head = f"{label}, predicted {predicted} (error {m.error:.3g}, example {m.id})"
        items.append((head, *(shortened_line(text, MAX_TEXT) for text in texts)))
    return ReportSection("Worst examples", items=items, least=View.MARKDOWN, open=False)
