"""Show latency cell by cell, what could not be measured, and the papers' speed-ups."""

import csv
import io
from collections import Counter

from kdcli.deploy.measurements import (
    UNSTABLE_PHRASE,
    Agreement,
    Failure,
    LatencyRow,
    Speedup,
)
from kdcli.report.schema import ModelEntry, Report, Throughput
from kdcli.report.text import (
    ReportSection,
    View,
    bytes_of,
    filled,
    number,
    paper_shape,
)

PLAIN = {("torch", "fp32"), ("portable", "fp32")}  # backends that change no output
PADDING = {
    "full": "no padding",
    "random": "random lengths, padded",
    "data": "the lengths of real text, padded",
}
NOISE = (
    "Noisy or unstable: the middle half of the runs spreads over more than a tenth, or a quarter, "
    "of the median, so the machine had other work too. Then rely on the paired ratios, not on the "
    "milliseconds. A measurement whose middle 80 % spread over more than half of the median, or "
    "whose fastest run took less than half of it, is also unstable. kdcli repeats an unstable "
    "measurement, up to three times in all. If it stays unstable, the table gives bounds, from the "
    "90th percentile of the times and the baseline's fastest run: a lower bound of a speed-up (≥), "
    "an upper bound of a time (≤). A speed-up whose bound is below 1 is not given."
)
NOISY_NOTE = "Noisy: the middle half of the runs spreads over more than a tenth of the median."
UNSTABLE_NOTE = (
    "“unstable” marks an unstable measurement: ≥ gives a lower bound of its speed-up or rate, "
    "≤ an upper bound of its time or cost, the 90th percentile. Without a bound, the model may "
    "even be slower."
)
BERT_BASE = "12x768"
"""The shape over which the papers state speed-ups."""
MAX_OPEN_CELLS = 4  # with more cells, only the first table is open in HTML
Cell = tuple[int, int]
"""Batch size and tokens."""


def cells(report: Report) -> dict[Cell, list[LatencyRow]]:
    """Group the rows by cell, in the order they were measured in."""
    by_cell: dict[Cell, list[LatencyRow]] = {}
    for row in report.latency:
        by_cell.setdefault(row.cell, []).append(row)
    return by_cell


def first_cell(report: Report) -> list[LatencyRow]:
    """Return the rows of the first cell, or none if nothing was measured."""
    return next(iter(cells(report).values()), [])


def cell_name(cell: Cell) -> str:
    """Write a cell: `8 × 128 tokens`."""
    return f"{cell[0]} × {cell[1]} tokens"


def ran_as(row: LatencyRow | Agreement | Failure) -> str:
    """Name a model together with its backend: `6x384 onnx-int8`."""
    return f"{row.model} {row.backend}-{row.dtype}"


def form_of(report: Report, row: LatencyRow) -> ModelEntry:
    """Return the model whose scores belong to a row.

    That is the model's form on the row's backend if the report has one, else the model itself.
    """
    for model in report.with_role("form"):
        if (model.of, model.backend, model.dtype) == (row.model, row.backend, row.dtype):
            return model
    return report.model(row.model)


def of_runs(report: Report) -> bool:
    """Return whether the report compares several runs, each measured on its own."""
    return any(model.run is not None for model in report.models)


def interval(speedup: Speedup | None) -> str:
    """Write a speed-up for a table: `2.50x (2.31–2.71)` or, if unstable, `≥2.31x, unstable`.

    An inconclusive speed-up is only `unstable`. A table with an unstable cell needs
    `UNSTABLE_NOTE` below it.
    """
    if speedup is None:
        return ""
    if speedup.is_inconclusive:
        return "unstable"
    if speedup.unstable:
        return f"≥{speedup.low:.2f}x, unstable"
    return f"{speedup.phrase('x', digits=2)} ({speedup.trust(digits=2)})"


def comparable(report: Report) -> list[LatencyRow]:
    """Return the rows of the first cell whose times can be compared with each other.

    They are the rows of the backend and number format that most models ran on.
    """
    rows = first_cell(report)
    counts = Counter((row.backend, row.dtype) for row in rows)
    usual = counts.most_common(1)[0][0] if counts else None
    return [row for row in rows if (row.backend, row.dtype) == usual]


def latency(report: Report) -> ReportSection:
    """Show a table for each cell, and how it was measured.

    The main table of a report about quality already has the medians, so a terminal skips the rest.
    """
    by_cell = cells(report)
    if not by_cell:
        return ReportSection("Latency")
    tables = []
    for number_of_cell, (cell, rows) in enumerate(by_cell.items()):
        is_open = number_of_cell == 0 or len(by_cell) <= MAX_OPEN_CELLS
        facts = [_facts(report, row) for row in rows]
        tables.append(filled(cell_name(cell), facts, narrow=9, style="tight", open=is_open))
    least = View.TERMINAL if report.focus == "latency" else View.MARKDOWN
    return ReportSection("Latency", sentences=_remarks(report), parts=tables, least=least)


def _facts(report: Report, row: LatencyRow) -> dict[str, str]:
    """Return all columns of a row, the ones for a narrow terminal first."""
    speedup = interval(row.speedup)
    if of_runs(report) and row.speedup is not None:
        speedup += f" over {row.speedup.baseline}"
    elif row.speedup is None and row.model in baselines(report):
        speedup = "1 (baseline)"
    facts = {
        "model": row.model if len(_ran_on(report)) == 1 else ran_as(row),
        "p50 ms": milliseconds(row.p50_ms),
        "p90 ms": milliseconds(row.p90_ms),
        "p99 ms": milliseconds(row.p99_ms),
        "tokens/s": "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        **price_columns(row),
        "speed-up": speedup,
        "status": row.status,
        "p95 ms": milliseconds(row.p95_ms),
        "IQR / p50": f"{row.iqr_over_p50:.0%}",
        "peak memory": "" if row.peak_memory_bytes is None else bytes_of(row.peak_memory_bytes),
        "first call ms": milliseconds(row.first_call_ms),
        "load s": "" if row.load_seconds is None else f"{row.load_seconds:.2f}",
        "runs": f"{row.n:,}",
    }
    if len({r.device for r in report.latency}) > 1:
        facts["device"] = row.device
    if len({r.padding for r in report.latency}) > 1:
        facts["padding"] = row.padding
    return facts


def baselines(report: Report) -> list[str]:
    """Return the models that speed-ups are measured over."""
    return list(dict.fromkeys(row.speedup.baseline for row in report.latency if row.speedup))


def _ran_on(report: Report) -> list[str]:
    return list(dict.fromkeys(f"{row.backend} {row.dtype}" for row in report.latency))


def milliseconds(value: float | None, *, unstable: bool = False) -> str:
    """Write milliseconds: `2.36`, `1,234.5` or, if unstable, `≤2.51, unstable`."""
    if value is None:
        return ""
    text = f"{value:.2f}" if value < 100 else f"{value:,.1f}"
    return f"≤{text}, unstable" if unstable else text


def _remarks(report: Report) -> list[str]:
    """Explain how the latency was measured, and how far to trust it."""
    devices = " and ".join(dict.fromkeys(row.device for row in report.latency))
    paddings = dict.fromkeys(PADDING.get(row.padding, row.padding) for row in report.latency)
    ran_on = f", {_ran_on(report)[0]}" if len(_ran_on(report)) == 1 else ""
    text = f"On {devices}{ran_on}, {' and '.join(paddings)}"
    if of_runs(report):
        text += (
            "; each run was measured on its own, maybe on another machine or under another load, "
            "so there are no ratios between models of two runs. A speed-up within a run is the "
            "median of paired ratios, with its quartiles in brackets"
        )
    elif names := baselines(report):
        text += (
            "; the models of a backend ran in turns in one process. A speed-up over "
            f"{' or '.join(names)} is the median of paired ratios, with its quartiles in brackets"
        )
    text += ". tokens/s counts real tokens, without padding."
    text = f"{text} {price_note(report.price_per_hour)}".rstrip()
    if all(row.status == "ok" for row in report.latency):
        return [text]
    smallest = "Of the bounds of a speed-up in several cells, all cells have the smallest one."
    return [text, f"{NOISE} {smallest}" if report.compression is not None else NOISE]


def not_measured(report: Report) -> ReportSection:
    """List what failed, and the backends that were skipped because their output is wrong."""
    items = []
    for f in report.failures:
        where = ""
        if f.batch_size is not None and f.seq_len is not None:
            where = f", {cell_name((f.batch_size, f.seq_len))}"
        items.append((f"{f.model} on {f.backend} {f.dtype}{where}: {f.reason}",))
    for a in report.agreements:
        if a.wrong:
            error = f"output differs (relative error {_finite(a.relative)}, limit {a.limit:g})"
            items.append((f"{a.model} on {a.backend} {a.dtype}: {error}: not measured",))
    return ReportSection("Not measured", items=items)


def agreements(report: Report) -> ReportSection:
    """Show how far the backends' outputs are from the outputs of torch in float32."""
    rows = [
        {
            "model": ran_as(a),
            "relative error": _finite(a.relative),
            "limit": f"{a.limit:g}",
            "largest error": _finite(a.max_abs),
            "cosine": "not a number" if a.cosine is None else f"{a.cosine:.6f}",
            "metric": number(a.metric),
            "output": "wrong" if a.wrong else "ok",
        }
        for a in report.agreements
    ]
    note = (
        "Compared with the outputs of the same weights under torch in float32. A backend beyond "
        "the limit is not measured."
    )
    return filled("Agreement of outputs", rows, note)


def _finite(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def published_speedups(report: Report) -> ReportSection:
    """Show the papers' speed-ups next to ours, for models of the papers' shapes.

    Papers and reports only compare if both have a baseline of BERT-base's shape. A model of this
    shape is skipped: if it is faster, it is so for other reasons.
    """
    title = "Published speed-ups"
    if report.focus != "latency":
        return ReportSection(title)
    (baseline, card), *others = report.cards.items()
    if paper_shape(card) != BERT_BASE:
        return ReportSection(title)
    rows_here = comparable(report)
    measured = {row.model: row.speedup for row in rows_here}
    rows = [
        {
            "model": name,
            "published": f"{row.values['speed-up']:g}x",
            "measured": interval(measured.get(name)),
            "row": row.row,
            "source": row.source,
        }
        for row in report.published
        for name, other in others
        if "speed-up" in row.values
        and row.shape not in (None, BERT_BASE)
        and paper_shape(other) == row.shape
    ]
    over = baseline if baseline == BERT_BASE else f"{baseline}, {BERT_BASE}"
    note = f"Published: over BERT-base, 12x768, on the papers' devices. Ours: over {over}"
    if rows_here:
        cell = cell_name(rows_here[0].cell)
        note += f"; measured with {cell} on {rows_here[0].backend} {rows_here[0].dtype}"
    note += "."
    if any(ratio is not None and ratio.unstable for ratio in measured.values()):
        note += f" {UNSTABLE_NOTE}"
    return filled(title, rows, note, narrow=4, style="papers")


def published(report: Report) -> ReportSection:
    """Show the papers' scores. A report of latencies alone shows the papers' speed-ups only."""
    papers = [row for row in report.published if row.task is None]
    if report.focus == "latency" and not report.quality:
        papers = []
    rows = [
        {"": f"{row.row} ({row.source})"}
        | {name: f"{value:g}" for name, value in row.values.items()}
        for row in papers
    ]
    note = (
        "The papers' results for this shape, with their own teacher, data and budget: not a result "
        "of this run."
    )
    return filled("Published", rows, note, style="published", least=View.MARKDOWN)


def latency_csv(report: Report) -> str:
    """Write latency.csv: the rows of report.json, each with the reported speed-up."""
    if not report.latency:
        return ""
    text = io.StringIO()
    measured = [name for name in LatencyRow.model_fields if name != "speedup"]
    of_speedup = ("speedup", "speedup_median", "speedup_low", "speedup_high", "speedup_unstable")
    names = [*measured, *of_speedup, "baseline"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in report.latency:
        columns = row.model_dump(exclude={"speedup"})
        if row.speedup is not None:
            columns["speedup"] = row.speedup.stated
            columns["speedup_median"] = row.speedup.median
            columns["speedup_low"] = row.speedup.low
            columns["speedup_high"] = row.speedup.high
            columns["speedup_unstable"] = row.speedup.unstable
            columns["baseline"] = row.speedup.baseline
        writer.writerow(columns)
    return text.getvalue()


def price_columns(batch: Throughput | LatencyRow | None) -> dict[str, str]:
    """Return the throughput and the cost of a million texts, with empty texts without a cost.

    A throughput is `1,234` or, if it is unstable, `≥1,234, unstable`.
    """
    rate = text = ""
    if batch is not None and batch.cost_per_million is not None:
        number = batch.texts_per_second or 0.0
        rate = f"{number:,.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")
        rate = f"≥{rate}, unstable" if batch.unstable else rate
        text = cost(batch.cost_per_million, unstable=batch.unstable)
    return {"texts/s": rate, "cost/M texts": text}


def cost(value: float, *, unstable: bool = False) -> str:
    """Write a price in a currency without a name: `0.29` or, if unstable, `≤0.29, unstable`."""
    text = f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
    return f"≤{text}, unstable" if unstable else text


def price_sentence(
    price_per_hour: float | None, model: Throughput | None, baseline: Throughput | None
) -> str:
    """State the cost of a million texts next to the baseline's.

    The result is empty without a price or a measurement.
    """
    if price_per_hour is None or model is None or model.cost_per_million is None:
        return ""
    text = f"At {price_per_hour:g} an hour, a million texts cost "
    if model.unstable:
        text += f"at most {cost(model.cost_per_million)} ({UNSTABLE_PHRASE})"
    else:
        text += cost(model.cost_per_million)
    # A cost that is only a bound says little next to another one.
    if baseline is not None and baseline.cost_per_million is not None and not baseline.unstable:
        text += f" instead of {cost(baseline.cost_per_million)}"
    return f"{text}, in batches of {model.batch_size} × {model.seq_len} tokens."


def price_note(price_per_hour: float | None) -> str:
    """Explain the column of costs; empty without a price."""
    if price_per_hour is None:
        return ""
    return (
        f"cost/M texts: the cost of a million texts, if an hour of this machine costs "
        f"{price_per_hour:g} and it does nothing else."
    )
