"""Writing a report: report.json and its views, each file atomic; report.json last, since it says the run is done."""

from __future__ import annotations

import functools
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from kdcli.disk import write_atomic
from kdcli.report.markdown import markdown
from kdcli.report.pictures.curves import pictures
from kdcli.report.pictures.drawing import Picture
from kdcli.report.pictures.pruning import of_model
from kdcli.report.schema import Report
from kdcli.report.sections.evaluations import comparisons, headline, matrix, per_class, scores, set_name, tasks, worst
from kdcli.report.sections.latency import (
    BENCHMARK,
    NOISE,
    agreement_table,
    cell_tables,
    facts,
    latency_csv,
    not_measured,
    projection_table,
    published_speedups,
    remarks,
)
from kdcli.report.sections.pruning import by_layer, by_type, foremost
from kdcli.report.sections.pruning import facts as pruning_facts
from kdcli.report.sections.selection import run_table, setting_table
from kdcli.report.text import Listing, bytes_of, cut, duration, names_of, number, on_disk
from kdcli.report.views import (
    ASSISTANT,
    FEW_SETS,
    TEACHER,
    UNDISTILLED,
    overview,
    title,
    variants,
)

FEW_CELLS = 4
"""Cells up to which the table of each is open."""

FEW_PRUNED = 3
"""Pruned models up to which the pictures of each are open."""


def write_views(folder: Path, report: Report) -> None:
    """Write latency.csv, report.md, report.html and report.json.

    Raises:
        MachineError: the disk is full or not writable.
    """
    write_atomic(folder / "latency.csv", latency_csv(report))
    write_atomic(folder / "report.md", markdown(report))
    write_atomic(folder / "report.html", html(report))
    write_atomic(folder / "report.json", report.to_json())


def html(report: Report) -> str:
    """report.html: one file, nothing loaded from elsewhere, everything from outside escaped."""
    header, rows = overview(report)
    benchmark = report.command == BENCHMARK
    beyond = (agreement_table(report), published_speedups(report), projection_table(report)) if benchmark else ()
    return _template().render(
        report=report,
        title=title(report),
        facts=facts(report) if benchmark else _facts(report),
        cells=cell_tables(report) if benchmark else [],
        few_cells=FEW_CELLS,
        remarks=remarks(report) if benchmark else [],
        not_measured=not_measured(report),
        beyond=[listing for listing in beyond if listing is not None],
        noise=NOISE,
        scores=scores(report),
        evaluations=[(f"{e.model} on {headline(e)}", matrix(e), per_class(e), worst(e)) for e in report.evaluations],
        comparisons=comparisons(report),
        selection=(setting_table(report.selection), run_table(report.selection)) if report.selection else None,
        pruning=by_type(report),
        pruned=[(p.model, by_layer(p), _drawn(of_model(p))) for p in report.pruning],
        few_pruned=FEW_PRUNED,
        about=_about(report),
        heading=_heading(report),
        overview=Listing("", header, rows),
        undistilled=any(row[0].endswith(UNDISTILLED) for row in rows),
        on_task=bool(report.recipe.get("task")),
        pictures=_drawn(pictures(report)),
        # A benchmark that judged nothing has a table of the published speed-ups alone.
        published=names_of(row.values for row in report.published) if report.quality or not benchmark else [],
        chain=ASSISTANT in report.models and len(report.models) > 2,
        cut=cut,
        duration=duration,
        bytes_of=bytes_of,
        number=number,
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump({**report.environment, **report.versions}, sort_keys=False, allow_unicode=True),
    )


@functools.cache
def _template() -> Template:
    # Compiled once: a chain or a grid writes a report for each of its legs.
    environment = Environment(
        loader=PackageLoader("kdcli.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.jinja")


def _drawn(found: list[Picture]) -> list[tuple[str, Markup]]:
    # The SVG is made by matplotlib, which escapes the names in it.
    return [(p.caption, Markup(p.svg)) for p in found]  # noqa: S704


def _about(report: Report) -> str:
    """The model that the facts are about, where it needs to be said."""
    several = [name for name in report.models if name not in (TEACHER, ASSISTANT)]
    return _foremost(report) if len(several) > 1 and report.command != BENCHMARK else ""


def _foremost(report: Report) -> str:
    """The model that the first numbers are of: the last, of variants the recipe as it is, of pruned ones the best."""
    return foremost(report) or (variants(report) or list(report.models)[-1:])[0]


def _heading(report: Report) -> str:
    if TEACHER in report.models and report.command != BENCHMARK:
        return "Teacher and student"
    return "Models" if len(report.models) > 1 else "Model"


def _facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: of one model, beside the first."""
    if report.pruning:
        return pruning_facts(report) + _judged(report)
    return _distilled(report) if TEACHER in report.models and len(report.models) > 1 else _judged(report)


def _distilled(report: Report) -> list[tuple[str, str]]:
    """A student beside its teacher."""
    teacher, name = report.models[TEACHER], _foremost(report)
    student = report.models[name]
    facts = [(f"{teacher.bytes / student.bytes:.1f}×", "smaller on disk")]
    found = [s for key, s in report.speedup.items() if key.startswith(f"{name}_vs_") and "@" not in key]
    if found:
        s = found[0]
        facts.append((f"{s.median:.1f}×", f"faster, {s.batch_size} × {s.seq_len} tokens ({s.low:.1f}–{s.high:.1f})"))
    facts.append((f"{teacher.multiply_adds / student.multiply_adds:.1f}×", "fewer multiply-adds"))
    for task, of in report.quality.items():
        own, before = of.get(name, {}), of.get(name + UNDISTILLED, {})
        # The first metric of a task is the one that matters.
        metric = next(iter(own), None)
        if metric == "accuracy" and metric in of.get(TEACHER, {}):
            facts.append((f"{own[metric]:.1%}", f"{task}; teacher {of[TEACHER][metric]:.1%}"))
        elif metric not in (None, "loss") and metric in of.get(TEACHER, {}):
            facts.append((number(own[metric]), f"{task} {metric}; teacher {number(of[TEACHER][metric])}"))
        elif own.get("loss") and "loss" in before:
            facts.append((f"{before['loss'] / own['loss']:.1f}×", f"lower {task} than before distillation"))
    return facts


def _judged(report: Report) -> list[tuple[str, str]]:
    """A model by itself, or beside the first of several."""
    first, name = next(iter(report.models)), _foremost(report)
    facts = []
    for task, found in tasks(report).items():
        own, base = ({e.set: e.metrics for e in found if e.model == m} for m in (name, first))
        metric = next(iter(next(iter(own.values()), {})), None)
        if metric is None:
            continue
        for part, value in _first_scores(own, metric).items():
            beside = _first_scores(base, metric).get(part)
            facts.append(_fact(number(value), f"{metric} on {set_name(task, part)}", first, name, beside))
    card, baseline = report.models[name], report.models[first]
    facts.append(_fact(on_disk(card), "on disk", first, name, on_disk(baseline)))
    rows = {row.model: row for row in reversed(report.latency)}
    # Of the forms of a pruned model the fastest one is told of.
    if name in rows and not report.pruning:
        row, other = rows[name], rows.get(first)
        what = f"{row.batch_size} × {row.seq_len} tokens"
        facts.append(_fact(f"{row.p50_ms:.1f} ms", what, first, name, f"{other.p50_ms:.1f} ms" if other else None))
    return facts


def _first_scores(by_set: dict[str, dict[str, float]], metric: str) -> dict[str, float]:
    """A metric of each set; of more than FEW_SETS their mean."""
    found = {part: metrics[metric] for part, metrics in by_set.items() if metric in metrics}
    return {f"(mean of {len(found)} sets)": sum(found.values()) / len(found)} if len(found) > FEW_SETS else found


def _fact(value: str, what: str, first: str, name: str, beside: str | float | None) -> tuple[str, str]:
    if first == name or beside is None:
        return value, what
    return value, f"{what}; {first} {number(beside) if isinstance(beside, float) else beside}"
