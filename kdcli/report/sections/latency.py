"""Latency cell by cell, beside the papers, and what failed."""

import csv
import io
import re
from collections import Counter
from collections.abc import Container

from kdcli.report.schema import Agreement, Failure, LatencyRow, Report, Speedup
from kdcli.report.text import Section, Table, View, bytes_of, filled, names_of, number

BENCHMARK = "benchmark"  # The command whose reports are about latency
# Backend and number format that the name of a speed-up leaves out.
PLAIN = {("torch", "fp32"), ("torch", "float32"), ("portable", "fp32")}
PADDING = {
    "full": "no padding",
    "random": "random lengths, padded",
    "data": "the lengths of real text, padded",
}
NOISE = (
    "Noisy or unstable: the middle half of the runs spreads over more than a tenth, or a quarter, of the median, so "
    "the machine had other work too. Then rely on the paired ratios, not on the milliseconds."
)
FEW_CELLS = 4  # Cells up to which the table of each is unfolded
Cell = tuple[int, int]  # Batch size and tokens


def cells(report: Report) -> dict[Cell, list[LatencyRow]]:
    """The rows of each cell, both in the order they were measured in."""
    by_cell: dict[Cell, list[LatencyRow]] = {}
    for row in report.latency:
        by_cell.setdefault((row.batch_size, row.seq_len), []).append(row)
    return by_cell


def cell_name(cell: Cell) -> str:
    """`8 × 128 tokens`."""
    return f"{cell[0]} × {cell[1]} tokens"


def ran_as(row: LatencyRow | Agreement | Failure) -> str:
    """A model and what it ran on: `6x384 onnx-int8`."""
    return f"{row.model} {row.backend}-{row.dtype}"


def scored_as(row: LatencyRow, scored: Container[str]) -> str:
    """The name under which a row is scored on a task: of its backend, else of its model (an export, or torch)."""
    name = f"{row.model} on {row.backend} {row.dtype}"
    return name if name in scored else row.model


def speedup_of(report: Report, row: LatencyRow) -> Speedup | None:
    """The speed-up of a row over the first model of the report; None where it is that model, or none was taken."""
    return _ratio_of(report, row)[0]


def compared_with(report: Report, row: LatencyRow) -> str:
    """The model that the speed-up of a row is over: in a comparison of runs the baseline of its own run."""
    baseline = _ratio_of(report, row)[1]
    # Cells after the first have their size in the name; a name may hold an @ too.
    return (
        re.sub(rf"@{row.batch_size}x{row.seq_len}$", "", baseline)
        if of_runs(report)
        else next(iter(report.models))
    )


def of_runs(report: Report) -> bool:
    """Whether a report lays several runs side by side, each measured apart from the others."""
    return bool(report.runs)


def _ratio_of(report: Report, row: LatencyRow) -> tuple[Speedup | None, str]:
    """The speed-up of a row, and the second half of its name."""
    name = (
        row.model if (row.backend, row.dtype) in PLAIN else f"{row.model}/{row.backend}-{row.dtype}"
    )
    for key, ratio in report.speedup.items():
        named, over, rest = key.partition(f"{name}_vs_")
        if (
            over
            and not named
            and (ratio.batch_size, ratio.seq_len) == (row.batch_size, row.seq_len)
        ):
            return ratio, rest
    return None, ""


def interval(speedup: Speedup | None) -> str:
    """Median and quartiles."""
    return (
        "" if speedup is None else f"{speedup.median:.2f}x ({speedup.low:.2f}–{speedup.high:.2f})"
    )


def comparable(report: Report) -> list[LatencyRow]:
    """The rows of the first cell that may be laid beside each other: of the backend and number format most models ran
    on, the first of several."""
    rows = next(iter(cells(report).values()), [])
    ran_on = Counter((row.backend, row.dtype) for row in rows)
    usual = ran_on.most_common(1)[0][0] if ran_on else None
    return [row for row in rows if (row.backend, row.dtype) == usual]


def latency(report: Report) -> list[Section]:
    """A table a cell, and how it was measured. Reports of other verbs have the medians in their main table."""
    tables: list[Section] = []
    for cell, rows in cells(report).items():
        table = filled([_facts(report, row) for row in rows], narrow=7, style="tight")
        tables.append(
            Section(cell_name(cell), table, open=not tables or len(cells(report)) <= FEW_CELLS)
        )
    least = View.TERMINAL if report.command == BENCHMARK else View.MARKDOWN
    return (
        [Section("Latency", sentences=_remarks(report), parts=tables, least=least)]
        if tables
        else []
    )


def _facts(report: Report, row: LatencyRow) -> dict[str, str]:
    """All of a row: first what a terminal has room for; device and padding where they differ."""
    differ = {
        key: len({getattr(r, key) for r in report.latency}) > 1 for key in ("device", "padding")
    }
    speedup, first = speedup_of(report, row), next(iter(cells(report).values()))[0]
    # All are compared with the first model, on what it was measured on first.
    plain = (first.model, first.backend, first.dtype) == (row.model, row.backend, row.dtype)
    alike = plain and row.model == next(iter(report.models)) and not of_runs(report)
    over = f" over {compared_with(report, row)}" if speedup and of_runs(report) else ""
    return {
        "model": row.model if len(_ran_on(report)) == 1 else ran_as(row),
        "p50 ms": milliseconds(row.p50_ms),
        "p90 ms": milliseconds(row.p90_ms),
        "p99 ms": milliseconds(row.p99_ms),
        "tokens/s": "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "speed-up": "1 (baseline)" if alike else interval(speedup) + over,
        "status": row.status,
        "p95 ms": milliseconds(row.p95_ms),
        "IQR / p50": f"{row.iqr_over_p50:.0%}",
        "peak memory": "" if row.peak_memory_bytes is None else bytes_of(row.peak_memory_bytes),
        "first call ms": milliseconds(row.first_call_ms),
        "load s": "" if row.load_seconds is None else f"{row.load_seconds:.2f}",
        "runs": f"{row.n:,}",
        **{key: getattr(row, key) if several else "" for key, several in differ.items()},
    }


def _ran_on(report: Report) -> list[str]:
    return list(dict.fromkeys(f"{row.backend} {row.dtype}" for row in report.latency))


def milliseconds(value: float | None) -> str:
    """`2.36` or `1,234.5`."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.1f}"


def _remarks(report: Report) -> list[str]:
    """How the latency was measured, and how far to trust it."""
    devices = " and ".join(dict.fromkeys(row.device for row in report.latency))
    paddings = " and ".join(
        dict.fromkeys(PADDING.get(row.padding, row.padding) for row in report.latency)
    )
    ran_on = f", {_ran_on(report)[0]}" if len(_ran_on(report)) == 1 else ""
    how = f"On {devices}{ran_on}, {paddings}; "
    if of_runs(report):
        how += "each run was measured apart, maybe on another machine or under another load, so models of two runs "
        how += "have no ratio. A speed-up within a run is the median of paired ratios, its quartiles in brackets. "
    else:
        how += "models of a backend were taken in turns in one process. A speed-up over "
        how += f"{next(iter(report.models))} is the median of paired ratios, its quartiles in brackets. "
    how += "tokens/s counts real tokens, without padding."
    return [how, NOISE] if any(row.status != "ok" for row in report.latency) else [how]


def not_measured(report: Report) -> list[Section]:
    """A sentence for everything that failed, or was left out because its output is wrong."""
    items = []
    for f in report.failures:
        cell = (
            ""
            if f.batch_size is None or f.seq_len is None
            else f", {cell_name((f.batch_size, f.seq_len))}"
        )
        items.append((f"{f.model} on {f.backend} {f.dtype}{cell}: {f.reason}",))
    for a in filter(lambda a: a.wrong, report.agreements):
        differs = f"output differs (relative error {_finite(a.relative)}, limit {a.limit:g})"
        items.append((f"{a.model} on {a.backend} {a.dtype}: {differs}: not measured",))
    return [Section("Not measured", items=items)] if items else []


def agreements(report: Report) -> list[Section]:
    """How far outputs are from those of torch in float32."""
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
    note = "Beside the outputs of the same weights under torch in float32. What is beyond the limit is not measured."
    return [Section("Agreement of outputs", filled(rows, note=note))] if rows else []


def _finite(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def published_speedups(report: Report) -> list[Section]:
    """The papers' speed-ups beside ours, for models of the shape that a row names.

    A model of the baseline's own shape, pruned or fine-tuned, is faster for other reasons than those rows."""
    (baseline, card), *others = report.models.items()
    shape = f"{card.layers}x{card.hidden}"
    beside = comparable(report)
    measured = {row.model: ratio for row in beside if (ratio := speedup_of(report, row))}
    rows = []
    for row in report.published:
        named = re.search(r"\b\d+x\d+\b", row.row)
        if named is None or "speed-up" not in row.values:
            continue
        rows += [
            {
                "model": name,
                "published": f"{row.values['speed-up']:g}x",
                "measured": interval(measured.get(name)),
                "row": row.row,
                "source": row.source,
            }
            for name, c in others
            if f"{c.layers}x{c.hidden}" == named[0] != shape
        ]
    if not rows or report.command != BENCHMARK:
        return []
    over = baseline if baseline == shape else f"{baseline}, {shape}"
    note = f"Published: over BERT-base, 12x768, on the papers' devices. Ours: over {over}"
    if beside:
        cell = cell_name((beside[0].batch_size, beside[0].seq_len))
        note += f"; measured with {cell} on {beside[0].backend} {beside[0].dtype}"
    return [Section("Published speed-ups", filled(rows, narrow=4, note=f"{note}.", style="papers"))]


def published(report: Report) -> list[Section]:
    """Scores of the papers; a benchmark that scored nothing shows their speed-ups alone."""
    found = [row for row in report.published if row.task is None]
    if not found or (report.command == BENCHMARK and not report.quality):
        return []
    names = names_of(row.values for row in found)
    rows = [
        [
            f"{row.row} ({row.source})",
            *(f"{row.values[n]:g}" if n in row.values else "" for n in names),
        ]
        for row in found
    ]
    note = "What papers report for this shape, with their own teacher, data and budget: not a result of this run."
    return [
        Section(
            "Published", Table(["", *names], rows, note, style="published"), least=View.MARKDOWN
        )
    ]


def latency_csv(report: Report) -> str:
    """latency.csv: the latency rows as they stand in report.json, each with its speed-up."""
    if not report.latency:
        return ""
    text = io.StringIO()
    names = [*LatencyRow.model_fields, "speedup", "speedup_low", "speedup_high"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in report.latency:
        s = speedup_of(report, row)
        ratio = {"speedup": s.median, "speedup_low": s.low, "speedup_high": s.high} if s else {}
        writer.writerow(row.model_dump() | ratio)
    return text.getvalue()
