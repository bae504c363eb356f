"""The main table of a report, and the few numbers to see first."""

from __future__ import annotations

from statistics import fmean

from kdcli.report.schema import ASSISTANT, TEACHER, UNDISTILLED, Card, LatencyRow, Report, Speedup
from kdcli.report.sections.evaluations import set_name, tasks
from kdcli.report.sections.latency import BENCHMARK, Cell, cells, interval, ran_as, speedup_of
from kdcli.report.sections.pruning import best_pruned
from kdcli.report.sections.title import variants
from kdcli.report.text import Section, Table, count, filled, names_of, number, on_disk, percent

SIZES = (
    *("parameters", "(embedding)", "(transformer)", "papers: embedding", "papers: transformer", "not zero"),
    *("size", "multiply-adds"),
)
"""Columns of the main table on what a model weighs."""

FEW_SETS = 3  # Sets of a task up to which each stands in the main table too


def overview(report: Report) -> Table:
    """One row a model, teacher first, then undistilled students and forms of a model without files of their own."""
    # Those of a benchmark have a table of their own for each cell.
    batches = [] if report.command == BENCHMARK else sorted(cells(report))
    quality = _quality(report)
    columns = [(task, metric) for task, models in quality.items() for metric in names_of(models.values())]
    kept = {p.model: percent(p.density, 1) for p in report.pruning}
    header = ["model", "shape", *SIZES, "weights kept, %"]
    header += [f"ms {b}x{length}" for b, length in batches]
    header += [f"speed-up {b}x{length}" for b, length in batches]
    header += [task if metric == "loss" else f"{task} {metric}" for task, metric in columns]
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in report.models.items()}
    named = report.command == BENCHMARK and all(name == shape for name, shape in shapes.items())
    rows = [
        [name, "" if named else shapes[name], *_sizes(card, bool(report.pruning)), kept.get(name, "")]
        for name, card in report.models.items()
    ]
    further = [n + UNDISTILLED for n in report.models if any(n + UNDISTILLED in m for m in report.quality.values())]
    further += dict.fromkeys(row.model for row in report.latency if batches and row.model not in report.models)
    rows += [[name] + [""] * (len(SIZES) + 2) for name in further]
    for row in rows:
        measured = [_row_of(report, row[0], cell) for cell in batches]
        row += ["" if r is None else f"{r.p50_ms:.1f}" + f" ({r.status})" * (r.status != "ok") for r in measured]
        row += ["" if r is None else interval(speedup_of(report, r)) for r in measured]
        row += [number(quality[task].get(row[0], {}).get(metric)) for task, metric in columns]
    return filled(header, rows)


def _sizes(card: Card, pruned: bool) -> list[str]:
    of_papers = [card.paper_params_embedding, card.paper_params_transformer]
    return [
        *map(count, (card.params_total, card.params_embedding, card.params_transformer)),
        *("" if value is None else count(value) for value in of_papers),
        count(card.params_nonzero) if pruned else "",
        on_disk(card),
        count(card.multiply_adds),
    ]


def _row_of(report: Report, name: str, cell: Cell) -> LatencyRow | None:
    return next((row for row in cells(report).get(cell, []) if row.model == name), None)


def _quality(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """Quality but that of the sets of a task with many, which have a table of their own."""
    many = [found for found in tasks(report).values() if len({e.set for e in found}) > FEW_SETS]
    left_out = {set_name(e.task, e.set) for found in many for e in found}
    return {task: models for task, models in report.quality.items() if task not in left_out}


def models_section(report: Report) -> Section:
    """The main table: a row a model of a benchmark; else a column a model, for there are few models and many facts."""
    table = overview(report)
    benchmark = report.command == BENCHMARK
    if TEACHER in report.models and not benchmark:
        title = "Teacher and student"
    else:
        title = "Models" if len(report.models) > 1 else "Model"
    if benchmark:
        return Section(title, Table(table.header, table.rows, style="tight"))
    note = ""
    if any(row[0].endswith(UNDISTILLED) for row in table.rows):
        chain = "; the notes say from which model" if ASSISTANT in report.models and len(report.models) > 2 else ""
        how = "fine-tuned without a teacher" if report.recipe.get("task") else f"not trained{chain}"
        note = f"Undistilled: a student of the same shape, started in the same way and {how}."
    first, *facts = map(list, zip(table.header, *table.rows, strict=True))
    return Section(title, Table(["", *first[1:]], facts, note, style="models narrow" if len(first) == 2 else "models"))


def about(report: Report) -> str:
    """The model that the facts are about, where several could be meant."""
    several = [name for name in report.models if name not in (TEACHER, ASSISTANT)]
    return foremost(report) if len(several) > 1 else ""


def foremost(report: Report) -> str:
    """The model of the first numbers: the fastest of a benchmark, the best pruned one, the recipe itself of variants,
    else the last."""
    if report.command == BENCHMARK and (fastest := _fastest(report)):
        return fastest[1].model
    return best_pruned(report) or (variants(report) or list(report.models)[-1:])[0]


def facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: of one model, beside the first."""
    first, name = next(iter(report.models)), foremost(report)
    card, baseline = report.models[name], report.models[first]
    pruned = [p for p in report.pruning if p.model == name] or report.pruning[:1]
    found = [(f"{percent(p.density, 1)} %", f"of the layers' weights kept, {p.method}", "") for p in pruned]
    for task, models in (_quality(report) | _means(report)).items():
        own, before, other = (models.get(n, {}) for n in (name, name + UNDISTILLED, first))
        # The first metric of a task is the one that matters.
        metric = next(iter(own), "loss")
        if metric != "loss":
            found.append((number(own[metric]), f"{metric} on {task}", number(other.get(metric))))
        elif own.get("loss") and "loss" in before:
            found.append((f"{before['loss'] / own['loss']:.1f}×", f"lower {task} than before distillation", ""))
    if fastest := _fastest(report):
        best, row = fastest
        ran = ran_as(row) if report.command == BENCHMARK else row.model
        where = f"{best.batch_size} × {best.seq_len} tokens ({best.low:.1f}–{best.high:.1f})"
        found.append((f"{best.median:.1f}×", f"the speed of {first}: {ran}, {where}", ""))
    rows = [row for row in report.latency if row.model == name and not pruned and not fastest]
    found += [(f"{row.p50_ms:.1f} ms", f"{row.batch_size} × {row.seq_len} tokens", "") for row in rows[:1]]
    found.append((on_disk(card), "on disk", on_disk(baseline)))
    if card.multiply_adds != baseline.multiply_adds:
        found.append((count(card.multiply_adds), "multiply-adds", count(baseline.multiply_adds)))
    return [(v, f"{what}; {first} {beside}" if beside and first != name else what) for v, what, beside in found]


def _fastest(report: Report) -> tuple[Speedup, LatencyRow] | None:
    """The best speed-up of the first cell: of the foremost student, else of any model."""
    rows = next(iter(cells(report).values()), [])
    if TEACHER in report.models and report.command != BENCHMARK and not report.pruning:
        rows = [row for row in rows if row.model == foremost(report)]
    ratios = [(s, row) for row in rows if (s := speedup_of(report, row))]
    return max(ratios, key=lambda pair: pair[0].median, default=None)


def _means(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """Means over the sets of a task with many, as `quality`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, evaluations in tasks(report).items():
        sets = len({e.set for e in evaluations})
        for model in dict.fromkeys(e.model for e in evaluations) if sets > FEW_SETS else ():
            own = [e.metrics for e in evaluations if e.model == model]
            means = {metric: fmean(m[metric] for m in own) for metric in own[0] if all(metric in m for m in own)}
            found.setdefault(f"{task} (mean of {sets} sets)", {})[model] = means
    return found
