"""Scores of labelled tasks, differences between models, and each evaluation in detail."""

import numpy as np

from kdcli.report.schema import Evaluation, Report
from kdcli.report.text import Section, Table, View, cut, filled, names_of, number, signed

MOST_LABELS = 40  # Rows and columns of a confusion matrix at most
FEW_LABELS = 10  # Labels up to which a confusion matrix or a table by class is shown outside HTML
FEW_EVALUATIONS = 6  # Evaluations up to which each is shown in detail outside HTML
MOST_TEXT = 300  # Characters that are shown of one text of an example
THEIR_OWN = "with their own teachers, data and budgets: not a result of this run"
MEAN = "mean"  # Name of the last row of a table by set


def set_name(task: str, part: str) -> str:
    """A task or one of its sets, as `report.quality` names it: `sst2`, `mnli matched`."""
    return f"{task} {part}".strip()


def tasks(report: Report, model: str | None = None) -> dict[str, list[Evaluation]]:
    """The evaluations of each task, in the order of the report; of all models or of one."""
    chosen = [e for e in report.evaluations if model in (None, e.model)]
    return {
        task: [e for e in chosen if e.task == task]
        for task in dict.fromkeys(e.task for e in chosen)
    }


def scores(report: Report, model: str | None = None) -> list[Section]:
    """A table a task: a row a model where it has one set; a row a set, and their mean, where it has several."""
    sections = []
    for task, own in tasks(report, model).items():
        by_set = any(e.set for e in own)
        sections += (
            [_by_set(task, own), *_published(report, task, own)]
            if by_set
            else [_by_model(report, task, own)]
        )
    return sections


def _by_model(report: Report, task: str, evaluations: list[Evaluation]) -> Section:
    metrics = names_of(e.metrics for e in evaluations)
    papers = {
        row.beside: row
        for row in report.published
        if row.beside and row.task == task and "" in row.values
    }
    rows = []
    for e in evaluations:
        row = {"model": e.model} | {metric: _value(e, metric) for metric in metrics}
        row["published"] = number(papers[e.model].values[""] / 100) if e.model in papers else ""
        rows.append(row | {"examples": f"{e.n:,}", "split": e.split})
    seeds = max(e.seeds for e in evaluations)
    notes = [f"Mean ± sample standard deviation of {seeds} fine-tunings."] * (seeds > 1)
    if papers:
        sources = ", ".join(dict.fromkeys(row.source for row in papers.values()))
        shapes = ", ".join(dict.fromkeys(row.row.split(",")[0] for row in papers.values()))
        metric = next(iter(papers.values())).metric
        notes.append(f"Published: {metric} of {shapes}, {sources}; {THEIR_OWN}.")
    return Section(f"Scores on {task}", filled(rows, note=" ".join(notes)))


def _value(evaluation: Evaluation, metric: str) -> str:
    spread = evaluation.deviations.get(metric)
    return number(evaluation.metrics.get(metric)) + (
        f" ± {spread:.2g}" if spread is not None else ""
    )


def _by_set(task: str, evaluations: list[Evaluation]) -> Section:
    """A column for each metric of each model, named by what of the two there is more than one of."""
    models = list(dict.fromkeys(e.model for e in evaluations))
    metrics = names_of(e.metrics for e in evaluations)
    columns = [(model, metric) for metric in metrics for model in models]
    one_model, one_metric = len(models) == 1, len(metrics) == 1
    names = [
        metric if one_model else model if one_metric else f"{metric}, {model}"
        for model, metric in columns
    ]
    sets = {
        name: [e for e in evaluations if e.set == name]
        for name in dict.fromkeys(e.set for e in evaluations)
    }
    values = [
        [
            next((e.metrics.get(metric) for e in own if e.model == model), None)
            for model, metric in columns
        ]
        for own in sets.values()
    ]
    rows = [
        [name, *map(number, row), f"{own[0].n:,}", own[0].split]
        for (name, own), row in zip(sets.items(), values, strict=True)
    ]
    # No mean where a set is missing: a mean over other sets could not be compared.
    means = [
        float(np.mean([float(v or 0) for v in c])) if None not in c else None
        for c in zip(*values, strict=True)
    ]
    rows.append([MEAN, *map(number, means), "", ""])
    title = f"Scores on {task}" + (f", {metrics[0]}" if one_metric and not one_model else "")
    return Section(title, Table(["set", *names, "examples", "split"], rows, marked=len(rows) - 1))


def _published(report: Report, task: str, evaluations: list[Evaluation]) -> list[Section]:
    """A table a metric: what papers report for the judged sets, and the mean over these alone."""
    sets, sections = list(dict.fromkeys(e.set for e in evaluations)), []
    for metric in names_of(e.metrics for e in evaluations):
        found = [row for row in report.published if (row.task, row.metric) == (task, metric)]
        values = [
            [row.values[name] / 100 if name in row.values else None for row in found]
            for name in sets
        ]
        means = [
            float(np.mean([float(v or 0) for v in c])) if None not in c else None
            for c in zip(*values, strict=True)
        ]
        rows = [
            [name, *map(number, of)]
            for name, of in zip([*sets, MEAN], [*values, means], strict=True)
        ]
        sources = ", ".join(dict.fromkeys(row.source for row in found))
        note = f"{sources}; {THEIR_OWN}."
        table = Table(["set", *(row.row for row in found)], rows, note, marked=len(rows) - 1)
        sections += [Section(f"Published on {task}, {metric}", table)] if found else []
    return sections


def comparisons(report: Report) -> list[Section]:
    """The differences between models, a word where an interval excludes zero."""
    rows = []
    for c in report.comparisons:
        word = "higher" if c.low > 0 else "lower" if c.high < 0 else ""
        metric, interval = (
            f"{set_name(c.task, c.set)} {c.metric}",
            f"{signed(c.low)} to {signed(c.high)}",
        )
        rows.append([metric, c.model, c.baseline, signed(c.difference), interval, word])
    note = "Difference: model minus baseline on the same examples. Interval: the middle 95 % of bootstrap resamples of "
    note += (
        "these examples; “higher” or “lower” where it excludes 0. It does not cover other seeds."
    )
    header = ["metric", "model", "baseline", "difference", "95% interval", ""]
    return [Section("Differences", Table(header, rows, note, style="differences"))] if rows else []


def details(report: Report) -> list[Section]:
    """Confusions, classes and the worst examples of each model on each set."""
    alone, few = len(report.evaluations) == 1, len(report.evaluations) <= FEW_EVALUATIONS
    shown = [
        Section(
            f"{e.model} on {headline(e)}",
            parts=parts,
            least=View.TERMINAL if few else View.HTML,
            open=alone,
        )
        for e in report.evaluations
        if (
            parts := [
                part
                for part in (_confusion(e, alone=alone), _per_class(e), _worst(e))
                if part is not None
            ]
        )
    ]
    return [Section("In detail", parts=shown)] if shown else []


def headline(evaluation: Evaluation) -> str:
    """The set and its metrics in a line."""
    metrics = ", ".join(f"{metric} {number(value)}" for metric, value in evaluation.metrics.items())
    return f"{set_name(evaluation.task, evaluation.set)} ({evaluation.split}, {evaluation.n:,} examples): {metrics}"


def _least(rows: int) -> View:
    return View.MARKDOWN if rows <= FEW_LABELS else View.HTML


def _confusion(evaluation: Evaluation, *, alone: bool) -> Section | None:
    if (shown := matrix(evaluation)) is None:
        return None
    least = View.TERMINAL if alone and len(shown.rows) <= FEW_LABELS else _least(len(shown.rows))
    return Section("Confusion", shown, least=least)


def matrix(evaluation: Evaluation) -> Table | None:
    """The confusion matrix; of more than MOST_LABELS labels those with the most errors, in their own order."""
    confusion = evaluation.confusion
    if confusion is None or not confusion.labels:
        return None
    counts = np.array(confusion.counts, dtype=np.int64)
    totals = counts.sum(1)
    shown, note = np.arange(len(confusion.labels)), ""
    if len(shown) > MOST_LABELS:
        # Missed and mistaken for: both are errors of a class.
        errors = totals + counts.sum(0) - 2 * counts.diagonal()
        shown = np.sort(np.argsort(-errors, kind="stable")[:MOST_LABELS])
        note = f"Of {len(confusion.labels)} classes the {MOST_LABELS} with the most errors."
    counts, shares = (
        counts[np.ix_(shown, shown)],
        (counts / np.maximum(totals, 1)[:, None])[np.ix_(shown, shown)],
    )
    labels = [confusion.labels[i] for i in shown]
    # Many zeros would hide the errors.
    cells = [
        [f"{n:,}" if n or len(labels) <= FEW_LABELS else "" for n in row] for row in counts.tolist()
    ]
    rows = [[label, *row] for label, row in zip(labels, cells, strict=True)]
    style = "confusion many" if len(labels) > FEW_LABELS else "confusion"
    return Table(["true ↓ predicted →", *labels], rows, note, style=style, shades=shares.tolist())


def _per_class(evaluation: Evaluation) -> Section | None:
    rows = [
        [label, number(s.precision), number(s.recall), number(s.f1), f"{s.support:,}"]
        for label, s in evaluation.per_class.items()
    ]
    table = Table(["class", "precision", "recall", "F1", "examples"], rows)
    return (
        Section("By class", table, least=_least(len(rows)), open=len(rows) <= FEW_LABELS)
        if rows
        else None
    )


def _worst(evaluation: Evaluation) -> Section | None:
    items = []
    for m in evaluation.worst:
        label, predicted = cut(m.label, MOST_TEXT), cut(m.predicted, MOST_TEXT)
        # More than a pair of texts: the words of one.
        texts = m.texts if len(m.texts) < 3 else [" ".join(m.texts)]
        head = f"{label}, predicted {predicted} (badness {m.badness:.3g}, example {m.id})"
        items.append((head, *(cut(text, MOST_TEXT) for text in texts)))
    return (
        Section("Worst examples", items=items, least=View.MARKDOWN, open=False) if items else None
    )
