"""What a report says, as rows of text; the terminal table and the model card."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from rich.markup import escape
from rich.table import Table

from kdcli.report.console import latency_parts, rich_table, section
from kdcli.report.schema import Card, Report
from kdcli.report.sections.cotraining import COTRAIN, pair_made, pair_origin, pair_title
from kdcli.report.sections.evaluations import (
    MOST_LABELS,
    comparisons,
    confusion_listing,
    matrix,
    scores,
    set_name,
    tasks,
)
from kdcli.report.sections.latency import BENCHMARK, Cell, cells, interval, not_measured, speedup_of
from kdcli.report.sections.pruning import by_type, methods, sparsities
from kdcli.report.sections.selection import setting_table
from kdcli.report.text import Listing, count, duration, filled, names_of, number, on_disk, percent, plain, table

TEACHER = "teacher"
"""Name of the model that a report of `distill` compares with."""

FINETUNED = "finetuned"
"""Name of the one model of a report of `finetune`."""

UNDISTILLED = " undistilled"
"""Suffix of the name under which a student's quality before training stands."""

ASSISTANT = "assistant"
"""Name of the model between teacher and student."""

SIZES = (
    *("parameters", "(embedding)", "(transformer)", "papers: embedding", "papers: transformer", "not zero"),
    *("size", "multiply-adds"),
)
"""Columns of the main table on what a model weighs."""

FEW_SETS = 3
"""Sets of a task up to which each stands in the main table too."""

FEW_NAMES = 5
"""Models up to which a title names each that was measured beside another."""

FEW_LABELS = 10
"""Labels up to which a confusion matrix is shown as text."""

PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""What the hub calls the task of a class."""


def overview(report: Report) -> tuple[list[str], list[list[str]]]:
    """The main table: one row a model, teacher first, then what the undistilled student achieves and how fast a form
    of a model is that has no files of its own."""
    # Those of a benchmark have a table of their own for each cell.
    batches = [] if report.command == BENCHMARK else sorted(cells(report))
    columns = [(task, metric) for task, of in _quality_shown(report).items() for metric in names_of(of.values())]
    header = ["model", "shape", *SIZES, "weights kept, %"]
    kept = {p.model: percent(p.density, 1) for p in report.pruning}
    header += [f"ms {b}x{length}" for b, length in batches]
    header += [f"speed-up {b}x{length}" for b, length in batches]
    header += [_quality_name(report, *column) for column in columns]
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in report.models.items()}
    named = report.command == BENCHMARK and all(name == shape for name, shape in shapes.items())
    rows = [
        [name, "" if named else shapes[name], *_sizes(card, bool(report.pruning)), kept.get(name, "")]
        for name, card in report.models.items()
    ]
    further = [n + UNDISTILLED for n in report.models if any(n + UNDISTILLED in of for of in report.quality.values())]
    further += dict.fromkeys(row.model for row in report.latency if batches and row.model not in report.models)
    rows += [[name] + [""] * (len(SIZES) + 2) for name in further]
    for row in rows:
        name = row[0]
        row += [_latency(report, name, cell) for cell in batches]
        row += [_speedup(report, name, cell) for cell in batches]
        row += [_quality(report, name, *column) for column in columns]
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


def title(report: Report) -> str:
    """What the report is of: `bert-base-uncased → 12x384 (assistant) → 6x384`, `bert-base-uncased on sst2`,
    `bert-base-uncased on sst2, smp 90 %`, or `6x384, 3x384 beside 12x768`."""
    if report.command == BENCHMARK:
        baseline, *measured = report.models
        if len(measured) > FEW_NAMES:
            return f"{', '.join(measured[:FEW_NAMES])} and {len(measured) - FEW_NAMES} more beside {baseline}"
        return f"{', '.join(measured)} beside {baseline}" if measured else baseline
    if report.command == COTRAIN:
        return pair_title(report, short)
    if report.pruning:
        of = " on ".join(filter(None, [short(_origin(report)), ", ".join(_tasks(report))]))
        return f"{of}, {methods(report)} {sparsities(report)}"
    if TEACHER not in report.models:
        models = [short(_origin(report)) if name == FINETUNED else name for name in report.models]
        return " on ".join(filter(None, [", ".join(models), ", ".join(_tasks(report))]))
    (_, teacher), *others = report.models.items()
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in others}
    steps = [short(teacher.id)]
    if len(shapes) > 1 and ASSISTANT in shapes:
        steps.append(f"{shapes.pop(ASSISTANT)} (assistant)")
    of_one = variants(report)
    students = f"{shapes[of_one[0]]} in {len(of_one)} variants" if of_one else ", ".join(shapes.values())
    led = " → ".join(filter(None, [*steps, students]))
    # Tasks that only judge a distillation on text are no part of what it was.
    task = report.recipe.get("task")
    return f"{led} on {short(str(task))}" if task else led


def variants(report: Report) -> list[str]:
    """The students of an ablation, which have one shape and differ in how they were made; the first is the recipe as
    it is. None where students differ in shape, or there is one."""
    students = {name: card for name, card in report.models.items() if name not in (TEACHER, ASSISTANT)}
    alike = TEACHER in report.models and len({(card.layers, card.hidden) for card in students.values()}) == 1
    return list(students) if alike and len(students) > 1 else []


def _tasks(report: Report) -> list[str]:
    """Names of the tasks that were judged; before any was, that of the recipe."""
    asked = report.recipe.get("task")
    return list(tasks(report)) or ([short(str(asked))] if asked else [])


def short(model: str) -> str:
    """A hub id as it is; of a directory or file its last part, since the rest is nobody else's business."""
    here = model.startswith((".", "/", "~")) or Path(model).exists()
    return Path(model).resolve().name or model if here else model


def terminal(report: Report) -> Iterable[Table | str]:
    """The report for a terminal: the overview, on its side for its few models and many facts; what was scored."""
    header, rows = overview(report)
    # A title of the table itself would be folded to the table's width.
    yield f"[bold]kdcli {escape(report.command)}: {escape(title(report))}[/bold]"
    if report.command == BENCHMARK:
        yield rich_table(Listing("", header, rows))
        yield from latency_parts(report)
    else:
        main = Table(header_style="bold")
        main.add_column("")
        for row in rows:
            main.add_column(escape(row[0]), justify="right", overflow="fold")
        for i, fact in enumerate(header[1:], 1):
            main.add_row(escape(fact), *(escape(row[i]) for row in rows))
        yield main
    several = {
        name
        for name, found in tasks(report).items()
        # The main table of a benchmark has a row a model, not one for each backend it ran on.
        if report.command == BENCHMARK or len({e.set for e in found}) > FEW_SETS
    }
    listings = [listing for name, listing in zip(tasks(report), scores(report), strict=True) if name in several]
    if report.pruning:
        yield from map(escape, not_measured(report))
    # What has few sets stands in the table above; here only how much it was judged on.
    for name, found in tasks(report).items():
        if name not in several:
            sizes = dict.fromkeys(f"{e.set} {e.n:,}".strip() for e in found)
            yield escape(f"{name}: judged on {', '.join(sizes)} examples ({found[0].split})")
    if len(report.evaluations) == 1 and (shown := matrix(report.evaluations[0])) and len(shown.labels) <= FEW_LABELS:
        listings.append(confusion_listing(shown))
    chosen = setting_table(report.selection) if report.selection is not None else None
    listings += [found for found in (comparisons(report), chosen, by_type(report)) if found is not None]
    for listing in listings:
        yield from section(listing)
    yield from map(escape, report.notes)


def model_card(report: Report, name: str, auto_class: str = "AutoModel", *, own_code: bool = False) -> str:
    """README.md of a model directory: what it is, from what, how, results, how to repeat it.

    Args:
        name: of the model in `report.models`.
        auto_class: the class of transformers that loads it with its head, `AutoModel` when it has none.
        own_code: its class is none of transformers, but in the file beside its weights.
    """
    trusted = ", trust_remote_code=True" if own_code else ""
    card, origin, has_head = report.models[name], _origin(report), auto_class != "AutoModel"
    front: dict[str, object] = {"library_name": "transformers", "tags": ["kdcli", report.command, card.model_type]}
    if auto_class in PIPELINES:
        front["pipeline_tag"] = PIPELINES[auto_class]
    if _on_hub(origin):
        front["base_model"] = origin
    what = title(report) if has_head else f"{card.layers}x{card.hidden} {card.model_type}"
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).strip(),
            "---",
            plain(f"# {what}, made by kdcli {report.command}"),
            "",
            f"{count(card.params_total)} parameters ({count(card.params_embedding)} of them embeddings),",
            f"{plain(_how_made(report))}.",
            "",
            "```python",
            f"from transformers import {auto_class}, AutoTokenizer",
            "",
            f'model = {auto_class}.from_pretrained("path/to/this/directory"{trusted})',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")',
            "```",
            "",
            *_head(report, name, origin, has_head),
            "",
            "## Results",
            "",
            *_results(report, name, has_head),
            "",
            "## Repeat it",
            "",
            f"`kdcli {report.command} --recipe recipe.yaml -o NEW_DIRECTORY`",
            "with the recipe.yaml beside this file or one directory up.",
            "",
            f"Versions: {', '.join(f'{k} {v}' for k, v in report.versions.items())}.",
            "",
        ]
    )


def _origin(report: Report) -> str:
    """What the models of a report were made from: the teacher, or the recipe's model."""
    if report.command == COTRAIN:
        return pair_origin(report)
    if TEACHER in report.models and not report.pruning:
        return report.models[TEACHER].id
    return str(report.recipe.get("model") or next(iter(report.models.values())).id)


def _how_made(report: Report) -> str:
    if report.command == COTRAIN:
        how = pair_made(report, short)
    elif report.pruning:
        how = f"pruned from {short(_origin(report))} on {', '.join(_tasks(report))} with {report.pruning[0].method}"
        shares = ", ".join(f"{percent(p.density, 1)} %" for p in report.pruning)
        how += f", {shares} of the weights of its layers kept and the others zero"
    elif TEACHER in report.models:
        teacher = report.models[TEACHER]
        method, source = report.recipe.get("method"), (report.recipe.get("data") or {}).get("source")
        how = f"distilled from {short(teacher.id)} ({teacher.layers}x{teacher.hidden})"
        how += f" with {method}" if method else ""
        how += f" on {short(source)}" if source else ""
    else:
        how = f"fine-tuned from {short(_origin(report))}"
        how += f" on {', '.join(_tasks(report))}" if _tasks(report) else ""
    if report.training:
        t = report.training
        how += f": {t.steps:,} steps, {t.tokens:,} tokens, {duration(t.seconds)}"
    return how


def _head(report: Report, name: str, origin: str, has_head: bool) -> list[str]:
    """What the model predicts, or that it predicts nothing yet."""
    if not has_head:
        return ["It has no task head: fine-tune it as you would its teacher, whose licence and limits it inherits."]
    found = [e.confusion.labels if e.confusion else list(e.per_class) for e in report.evaluations if e.model == name]
    labels = next(filter(None, found), [])
    more = f" and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
    said = [plain(f"Classes: {', '.join(labels[:MOST_LABELS])}{more}."), ""] if labels else []
    return [*said, plain(f"It inherits licence and limits of {short(origin)}.")] if origin else said


def _results(report: Report, name: str, has_head: bool) -> list[str]:
    """The scores of a model with a head, else the main table; and how it was chosen."""
    lines: list[str] = []
    for listing in scores(report, name) if has_head else []:
        lines += [f"{plain(listing.title)}:", "", *table(listing.header, listing.rows), ""]
    if not lines:
        lines = [*table(*overview(report)), ""]
    if report.selection is not None:
        lines += [plain(setting_table(report.selection).note), ""]
    return lines[:-1]


def _on_hub(model: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model)) and model != "demo" and not Path(model).exists()


def _latency(report: Report, name: str, cell: Cell) -> str:
    row = next((row for row in cells(report).get(cell, []) if row.model == name), None)
    if row is None:
        return ""
    return f"{row.p50_ms:.1f}" + ("" if row.status == "ok" else f" ({row.status})")


def _speedup(report: Report, name: str, cell: Cell) -> str:
    row = next((row for row in cells(report).get(cell, []) if row.model == name), None)
    found = speedup_of(report, row) if row else None
    return interval(found) if found else ""


def _quality_shown(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """Quality but that of the sets of a task with many, which have a table of their own."""
    many = [found for found in tasks(report).values() if len({e.set for e in found}) > FEW_SETS]
    left = {set_name(e.task, e.set) for found in many for e in found}
    return {task: of for task, of in report.quality.items() if task not in left}


def _quality_name(report: Report, task: str, metric: str) -> str:
    """The task alone where it is clear what is meant, so that columns stay short."""
    alone = metric == "accuracy" and len(names_of(report.quality[task].values())) == 1
    return task if alone or metric == "loss" else f"{task} {metric}"


def _quality(report: Report, name: str, task: str, metric: str) -> str:
    value = report.quality[task].get(name, {}).get(metric)
    return number(value)
