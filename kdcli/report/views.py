"""What a report says, as rows of text: the terminal table, report.md, latency.csv and the model card share them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from rich.markup import escape
from rich.table import Table

from kdcli.report.schema import Report

UNDISTILLED = " undistilled"
"""Suffix of the name under which a student's quality before training stands."""

ASSISTANT = "assistant"
"""Name of the model between teacher and student."""


def overview(report: Report) -> tuple[list[str], list[list[str]]]:
    """The main table: one row a model, teacher first, then what the undistilled student achieves."""
    batches = sorted({(r.batch_size, r.seq_len) for r in report.latency})
    columns = [(task, metric) for task, of in report.quality.items() for metric in _metrics(of)]
    header = ["model", "shape", "parameters", "(embedding)", "(transformer)", "size", "multiply-adds"]
    header += [f"ms {b}x{length}" for b, length in batches]
    header += [f"speed-up {b}x{length}" for b, length in batches]
    header += [task if metric in ("accuracy", "loss") else f"{task} {metric}" for task, metric in columns]
    rows = []
    for name, card in report.models.items():
        row = [
            name,
            f"{card.layers}x{card.hidden}",
            count(card.params_total),
            count(card.params_embedding),
            count(card.params_transformer),
            megabytes(card.bytes),
            count(card.multiply_adds),
        ]
        row += [_latency(report, name, cell) for cell in batches]
        row += [_speedup(report, name, cell) for cell in batches]
        row += [_quality(report, name, *column) for column in columns]
        rows.append(row)
    for name in [n for n in report.models if any(n + UNDISTILLED in of for of in report.quality.values())]:
        row = [name + UNDISTILLED] + [""] * (len(header) - 1 - len(columns))
        rows.append(row + [_quality(report, name + UNDISTILLED, *column) for column in columns])
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows]


def title(report: Report) -> str:
    """From which model to which shapes: `bert-base-uncased → 12x384 (assistant) → 6x384`."""
    (_, teacher), *others = report.models.items()
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in others}
    steps = [short(teacher.id)]
    if len(shapes) > 1 and ASSISTANT in shapes:
        steps.append(f"{shapes.pop(ASSISTANT)} (assistant)")
    return " → ".join([*steps, ", ".join(shapes.values())])


def short(model: str) -> str:
    """A hub id as it is; of a directory or file its last part, since the rest is nobody else's business."""
    here = model.startswith((".", "/", "~")) or Path(model).exists()
    return Path(model).resolve().name or model if here else model


def terminal(report: Report) -> Iterable[Table | str]:
    """The overview for a terminal, turned on its side: it has few models and many facts."""
    header, rows = overview(report)
    table = Table(title=f"kdcli {report.command}: {escape(title(report))}", title_justify="left", header_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(escape(row[0]), justify="right", overflow="fold")
    for i, fact in enumerate(header[1:], 1):
        table.add_row(escape(fact), *(escape(row[i]) for row in rows))
    yield table
    yield from map(escape, report.notes)


def markdown(report: Report) -> str:
    """report.md."""
    header, rows = overview(report)
    lines = [
        f"# {_plain(title(report))}",
        "",
        f"kdcli {report.command}, {report.created}.",
        "",
        *_table(header, rows),
        "",
    ]
    if report.training:
        t = report.training
        lines += [
            "## Training",
            "",
            f"{t.steps:,} steps, {t.tokens:,} tokens in {duration(t.seconds)} ({t.tokens_per_second:,.0f} tokens/s), "
            f"peak memory {megabytes(t.peak_memory_bytes)}; loss {number(t.loss_first)} → {number(t.loss_last)}."
            + (f" Resumed after step {t.resumed_from_step}." if t.resumed_from_step else ""),
            "",
        ]
    held = [p for p in report.curve if p.held_out]
    if held:
        names = list(held[0].held_out or {})
        shown = held if len(held) <= 12 else held[:: max(1, len(held) // 10)] + held[-1:]
        lines += ["## Held-out loss", ""]
        lines += _table(
            ["step", *names], [[str(p.step), *(number((p.held_out or {})[n]) for n in names)] for p in shown]
        )
        lines.append("")
    if report.published:
        lines += ["## Published", ""]
        for row in report.published:
            values = ", ".join(f"{k} {v:g}" for k, v in row.values.items())
            lines.append(_plain(f"* {row.row}: {values} ({row.source})"))
        lines.append("")
    if report.notes:
        lines += ["## Notes", "", *(f"* {_plain(note)}" for note in report.notes), ""]
    facts = [f"{k} {v}" for k, v in report.versions.items()]
    lines += [_plain(f"Measured on {report.environment.get('cpu')}; {', '.join(facts)}."), ""]
    return "\n".join(lines)


def latency_csv(report: Report) -> str:
    """latency.csv: the latency rows as they stand in report.json."""
    text = io.StringIO()
    rows = [row.model_dump() for row in report.latency]
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def model_card(report: Report, name: str) -> str:
    """README.md of a model directory: what it is, from what, how, results, how to repeat it."""
    card, teacher = report.models[name], next(iter(report.models.values()))
    front = {"library_name": "transformers", "tags": ["kdcli", report.command, card.model_type]}
    if _on_hub(teacher.id):
        front["base_model"] = teacher.id
    header, rows = overview(report)
    method, source = report.recipe.get("method"), (report.recipe.get("data") or {}).get("source")
    how = f"distilled from {short(teacher.id)} ({teacher.layers}x{teacher.hidden})"
    how += f" with {method}" if method else ""
    how += f" on {short(source)}" if source else ""
    if report.training:
        t = report.training
        how += f": {t.steps:,} steps, {t.tokens:,} tokens, {duration(t.seconds)}"
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).strip(),
            "---",
            _plain(f"# {card.layers}x{card.hidden} {card.model_type}, made by kdcli {report.command}"),
            "",
            f"{count(card.params_total)} parameters ({count(card.params_embedding)} of them embeddings),",
            f"{_plain(how)}.",
            "",
            "```python",
            "from transformers import AutoModel, AutoTokenizer",
            "",
            'model = AutoModel.from_pretrained("path/to/this/directory")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")',
            "```",
            "",
            "It has no task head: fine-tune it as you would its teacher, whose licence and limits it inherits.",
            "",
            "## Results",
            "",
            *_table(header, rows),
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


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def number(value: float | None) -> str:
    """A loss or metric with four significant digits."""
    return "" if value is None else f"{value:.4g}"


def _on_hub(model: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model)) and model != "demo" and not Path(model).exists()


def _metrics(of_task: dict[str, dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(metric for of_model in of_task.values() for metric in of_model))


def _latency(report: Report, name: str, cell: tuple[int, int]) -> str:
    for row in report.latency:
        if row.model == name and (row.batch_size, row.seq_len) == cell:
            return f"{row.p50_ms:.1f}" + ("" if row.status == "ok" else f" ({row.status})")
    return ""


def _speedup(report: Report, name: str, cell: tuple[int, int]) -> str:
    for key, s in report.speedup.items():
        if key.split("@")[0].startswith(f"{name}_vs_") and (s.batch_size, s.seq_len) == cell:
            return f"{s.median:.2f}x ({s.low:.2f}–{s.high:.2f})"
    return ""


def _quality(report: Report, name: str, task: str, metric: str) -> str:
    value = report.quality[task].get(name, {}).get(metric)
    return number(value)


def count(value: int) -> str:
    """A number of things in thousands, millions or billions."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def megabytes(value: int) -> str:
    """A number of bytes."""
    return f"{value / 10**6:,.1f} MB" if value < 10**9 else f"{value / 10**9:,.2f} GB"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    line, *lines = ["| " + " | ".join(map(_plain, row)) + " |" for row in (header, *rows)]
    return [line, "|" + "---|" * len(header), *lines]


def _plain(text: str) -> str:
    """Text from outside that stays text in Markdown, and in one cell of a table."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")
