"""The main table of a report, and the few numbers to see first."""

from __future__ import annotations

from kdcli.report.schema import ASSISTANT, TEACHER, UNDISTILLED, Card, LatencyRow, Report
from kdcli.report.sections.evaluations import set_name, tasks
from kdcli.report.sections.latency import BENCHMARK, Cell, cell_name, cells, interval, ran_as, speedup_of
from kdcli.report.sections.pruning import best_pruned
from kdcli.report.sections.title import variants
from kdcli.report.text import Section, Table, count, filled, names_of, number, on_disk, percent

SIZES = (
    *("parameters", "(embedding)", "(transformer)", "papers: embedding", "papers: transformer", "not zero"),
    *("size", "multiply-adds"),
)
"""Columns of the main table on what a model weighs."""

FEW_SETS = 3
"""Sets of a task up to which each stands in the main table too."""


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
    return foremost(report) if len(several) > 1 and report.command != BENCHMARK else ""


def foremost(report: Report) -> str:
    """The model that the first numbers are of: the last; the recipe itself of variants; the best of pruned ones."""
    return best_pruned(report) or (variants(report) or list(report.models)[-1:])[0]


def facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: value and what it is."""
    if report.command == BENCHMARK:
        return _measured(report)
    if TEACHER in report.models and len(report.models) > 1 and not report.pruning:
        return _distilled(report)
    return _pruned(report) + _scored(report)


def _fastest(report: Report) -> list[tuple[str, str]]:
    """The best speed-up of the first cell."""
    cell, rows = next(iter(cells(report).items()), ((0, 0), []))
    ratios = [(s, row) for row in rows if (s := speedup_of(report, row))]
    if not ratios:
        return []
    best, row = max(ratios, key=lambda pair: pair[0].median)
    name = ran_as(row) if report.command == BENCHMARK else row.model
    what = f"the speed of {next(iter(report.models))}: {name}, {cell_name(cell)} ({best.low:.1f}–{best.high:.1f})"
    return [(f"{best.median:.1f}×", what)]


def _measured(report: Report) -> list[tuple[str, str]]:
    """The best speed-up of the first cell, the smallest model, the fastest one."""
    baseline = next(iter(report.models))
    name, smallest = min(report.models.items(), key=lambda pair: pair[1].bytes)
    beside = "" if name == baseline else f", the smallest; {baseline} {on_disk(report.models[baseline])}"
    found = [*_fastest(report), (on_disk(smallest), f"on disk: {name}{beside}")]
    for cell, rows in list(cells(report).items())[:1]:
        row, first = min(rows, key=lambda row: row.p50_ms), rows[0]
        beside = "" if row is first else f"; {ran_as(first)} {first.p50_ms:.1f} ms"
        found.append((f"{row.p50_ms:.1f} ms", f"median of {ran_as(row)}, {cell_name(cell)}{beside}"))
    return found


def _pruned(report: Report) -> list[tuple[str, str]]:
    """The share kept of the best model, and the form that is fastest."""
    shown = [p for p in report.pruning if p.model == best_pruned(report)] or report.pruning
    found = [(f"{percent(p.density, 1)} %", f"of the layers' weights kept, {p.method}") for p in shown[:1]]
    return found + _fastest(report) if found else []


def _distilled(report: Report) -> list[tuple[str, str]]:
    """A student beside its teacher."""
    teacher, name = report.models[TEACHER], foremost(report)
    student = report.models[name]
    facts = [(f"{teacher.bytes / student.bytes:.1f}×", "smaller on disk")]
    facts += [
        (f"{s.median:.1f}×", f"faster, {s.batch_size} × {s.seq_len} tokens ({s.low:.1f}–{s.high:.1f})")
        for key, s in report.speedup.items()
        if key.startswith(f"{name}_vs_") and "@" not in key
    ][:1]
    facts.append((f"{teacher.multiply_adds / student.multiply_adds:.1f}×", "fewer multiply-adds"))
    for task, models in report.quality.items():
        own, before = models.get(name, {}), models.get(name + UNDISTILLED, {})
        # The first metric of a task is the one that matters.
        metric = next(iter(own), "loss")
        if metric != "loss" and metric in models.get(TEACHER, {}):
            facts.append((number(own[metric]), f"{task} {metric}; teacher {number(models[TEACHER][metric])}"))
        elif own.get("loss") and "loss" in before:
            facts.append((f"{before['loss'] / own['loss']:.1f}×", f"lower {task} than before distillation"))
    return facts


def _scored(report: Report) -> list[tuple[str, str]]:
    """A model by itself, or beside the first of several."""
    first, name = next(iter(report.models)), foremost(report)
    found: list[tuple[str, str, str | None]] = []
    for task, evaluations in tasks(report).items():
        own, base = ({e.set: e.metrics for e in evaluations if e.model == m} for m in (name, first))
        metric = next(iter(next(iter(own.values()), {})), "")
        beside = _first_scores(base, metric)
        for part, value in _first_scores(own, metric).items():
            other = number(beside[part]) if part in beside else None
            found.append((number(value), f"{metric} on {set_name(task, part)}", other))
    found.append((on_disk(report.models[name]), "on disk", on_disk(report.models[first])))
    rows = {row.model: row for row in reversed(report.latency)}
    # Of the forms of a pruned model the fastest one stands above.
    if name in rows and not report.pruning:
        row, slower = rows[name], rows.get(first)
        other = f"{slower.p50_ms:.1f} ms" if slower else None
        found.append((f"{row.p50_ms:.1f} ms", f"{row.batch_size} × {row.seq_len} tokens", other))
    return [(v, what if first == name or other is None else f"{what}; {first} {other}") for v, what, other in found]


def _first_scores(by_set: dict[str, dict[str, float]], metric: str) -> dict[str, float]:
    """A metric of each set; of more than FEW_SETS their mean."""
    found = {part: metrics[metric] for part, metrics in by_set.items() if metric in metrics}
    return {f"(mean of {len(found)} sets)": sum(found.values()) / len(found)} if len(found) > FEW_SETS else found
