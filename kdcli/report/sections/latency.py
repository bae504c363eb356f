"""What a report says of latency, as tables of text: cell by cell, beside the papers, what failed or was calculated."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable

from kdcli.report.schema import Agreement, Failure, LatencyRow, Report, Speedup
from kdcli.report.text import Listing, bytes_of, filled, number, on_disk

BENCHMARK = "benchmark"
"""The command whose reports are about latency."""

PLAIN = {("torch", "fp32"), ("torch", "float32"), ("portable", "fp32")}
"""Backend and number format that the name of a speed-up leaves out."""

PADDING = {"full": "no padding", "random": "random lengths, padded", "data": "the lengths of real text, padded"}

NOISE = (
    "Noisy or unstable: the middle half of the runs spreads over more than a tenth, or a quarter, of the median, so "
    "the machine had other work too. Then rely on the paired ratios, not on the milliseconds."
)

Cell = tuple[int, int]
"""Batch size and tokens."""

_Columns = list[tuple[str, Callable[[LatencyRow], str]]]


def cells(report: Report) -> dict[Cell, list[LatencyRow]]:
    """The rows of each cell, both in the order they were measured in."""
    found: dict[Cell, list[LatencyRow]] = {}
    for row in report.latency:
        found.setdefault((row.batch_size, row.seq_len), []).append(row)
    return found


def cell_name(cell: Cell) -> str:
    """`8 × 128 tokens`."""
    return f"{cell[0]} × {cell[1]} tokens"


def ran_as(row: LatencyRow | Agreement | Failure) -> str:
    """A model and what it ran on: `6x384 onnx-int8`."""
    return f"{row.model} {row.backend}-{row.dtype}"


def speedup_of(report: Report, row: LatencyRow) -> Speedup | None:
    """The speed-up of a row over the first model of the report; None where it is that model, or none was taken."""
    cell = (row.batch_size, row.seq_len)
    name = row.model if (row.backend, row.dtype) in PLAIN else f"{row.model}/{row.backend}-{row.dtype}"
    # In a comparison of runs each has a baseline of its own.
    of_row = (found for key, found in report.speedup.items() if key.startswith(f"{name}_vs_"))
    return next((found for found in of_row if (found.batch_size, found.seq_len) == cell), None)


def interval(speedup: Speedup) -> str:
    """Median and quartiles."""
    return f"{speedup.median:.2f}x ({speedup.low:.2f}–{speedup.high:.2f})"


def comparable(report: Report) -> list[LatencyRow]:
    """The rows of the first cell that may be laid beside each other: of the backend and number format most models ran
    on, the first of several."""
    rows = next(iter(cells(report).values()), [])
    of = Counter((row.backend, row.dtype) for row in rows)
    usual = of.most_common(1)[0][0] if of else None
    return [row for row in rows if (row.backend, row.dtype) == usual]


def cell_tables(report: Report, *, narrow: bool = False) -> list[Listing]:
    """A table a cell; with `narrow` only what a terminal has room for."""
    columns = _narrow(report) if narrow else _wide(report)
    header = [name for name, _ in columns]
    return [
        Listing(f"Latency, {cell_name(cell)}", *filled(header, [[text(row) for _, text in columns] for row in rows]))
        for cell, rows in cells(report).items()
    ]


def _narrow(report: Report) -> _Columns:
    alone = len({(row.backend, row.dtype) for row in report.latency}) == 1
    return [
        ("model", lambda row: row.model if alone else ran_as(row)),
        ("p50 ms", lambda row: _ms(row.p50_ms)),
        ("p90 ms", lambda row: _ms(row.p90_ms)),
        ("p99 ms", lambda row: _ms(row.p99_ms)),
        ("tokens/s", _tokens),
        ("speed-up", lambda row: _ratio(report, row)),
        ("status", lambda row: row.status),
    ]


def _wide(report: Report) -> _Columns:
    """All that is known of a row; device and padding where they differ."""
    devices, paddings = ({getattr(row, key) for row in report.latency} for key in ("device", "padding"))
    return [
        ("model", lambda row: row.model),
        ("backend", lambda row: row.backend),
        ("dtype", lambda row: row.dtype),
        ("device", lambda row: row.device if len(devices) > 1 else ""),
        ("padding", lambda row: row.padding if len(paddings) > 1 else ""),
        ("p50 ms", lambda row: _ms(row.p50_ms)),
        ("p90 ms", lambda row: _ms(row.p90_ms)),
        ("p95 ms", lambda row: _ms(row.p95_ms)),
        ("p99 ms", lambda row: _ms(row.p99_ms)),
        ("IQR / p50", lambda row: f"{row.iqr_over_p50:.0%}"),
        ("status", lambda row: row.status),
        ("tokens/s", _tokens),
        ("speed-up", lambda row: _ratio(report, row)),
        ("peak memory", lambda row: "" if row.peak_memory_bytes is None else bytes_of(row.peak_memory_bytes)),
        ("first call ms", lambda row: _ms(row.first_call_ms)),
        ("load s", lambda row: "" if row.load_seconds is None else f"{row.load_seconds:.2f}"),
        ("runs", lambda row: f"{row.n:,}"),
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.1f}"


def _tokens(row: LatencyRow) -> str:
    return "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"


def _ratio(report: Report, row: LatencyRow) -> str:
    if row.model == next(iter(report.models)) and (row.backend, row.dtype) in PLAIN:
        return "1 (baseline)"
    found = speedup_of(report, row)
    return interval(found) if found else ""


def not_measured(report: Report) -> list[str]:
    """A sentence for everything that failed, or was left out because its output is wrong."""
    failed = [
        f"{f.model} on {f.backend} {f.dtype}"
        + ("" if f.batch_size is None or f.seq_len is None else f", {cell_name((f.batch_size, f.seq_len))}")
        + f": {f.reason}"
        for f in report.failures
    ]
    wrong = [
        f"{a.model} on {a.backend} {a.dtype}: output differs (relative error {_finite(a.relative)}, limit {a.limit:g})"
        ": not measured"
        for a in report.agreements
        if a.wrong
    ]
    return failed + wrong


def remarks(report: Report) -> list[str]:
    """How the latency was measured, and how far it is to be believed."""
    if not report.latency:
        return []
    devices = " and ".join(dict.fromkeys(row.device for row in report.latency))
    paddings = " and ".join(dict.fromkeys(PADDING.get(row.padding, row.padding) for row in report.latency))
    said = (
        f"On {devices}, {paddings}; the models of a backend were taken in turns in one process. A speed-up over "
        f"{next(iter(report.models))} is the median of paired ratios, its quartiles in brackets. tokens/s counts real "
        "tokens, without padding."
    )
    return [said, NOISE] if any(row.status != "ok" for row in report.latency) else [said]


def agreement_table(report: Report, *, narrow: bool = False) -> Listing | None:
    """How far outputs are from those of torch in float32; None when nothing else was run."""
    if not report.agreements:
        return None
    metric = any(a.metric is not None for a in report.agreements)
    header = ["model"] if narrow else ["model", "backend", "dtype"]
    header += ["relative error", "limit", "largest error", "cosine", *(["metric"] if metric else []), ""]
    rows = [
        [
            *([ran_as(a)] if narrow else [a.model, a.backend, a.dtype]),
            *(_finite(a.relative), f"{a.limit:g}", _finite(a.max_abs)),
            "not a number" if a.cosine is None else f"{a.cosine:.6f}",
            *([number(a.metric)] if metric else []),
            "wrong" if a.wrong else "",
        ]
        for a in report.agreements
    ]
    note = "Beside the outputs of the same weights under torch in float32. What is beyond the limit is not measured."
    return Listing("Agreement of outputs", header, rows, note)


def _finite(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3g}"


def projection_table(report: Report) -> Listing | None:
    """What was calculated for devices that were not there; None when nothing was."""
    if not report.projections:
        return None
    rows = [
        [
            *(p.model, p.device, f"{p.batch_size} × {p.seq_len}", _ms(p.milliseconds), f"{p.speedup:.2f}x"),
            "" if p.published is None else f"{p.published:.2f}x",
            "" if p.error is None else f"{p.error:+.0%}",
        ]
        for p in report.projections
    ]
    header = ["model", "device", "batch × tokens", "projected ms", "projected", "published", "off by"]
    said = "Calculated, not run: the device was not here."
    if any(p.error is not None for p in report.projections):
        said += " “Off by” is the projected speed-up relative to the published one."
    notes = dict.fromkeys(f"{p.device}: {p.note}" for p in report.projections if p.note)
    note = " ".join([said, *(f"{note.rstrip('.')}." for note in notes)])
    return Listing("Projected, not measured", *filled(header, rows), note)


def published_speedups(report: Report, *, narrow: bool = False) -> Listing | None:
    """The papers' speed-ups beside ours, for models of the shape that a row names; None when there are none.

    A model of the baseline's own shape, pruned or fine-tuned, is faster for other reasons than those rows."""
    (baseline, card), *others = report.models.items()
    shape = f"{card.layers}x{card.hidden}"
    measured = {row.model: ratio for row in comparable(report) if (ratio := speedup_of(report, row))}
    rows = []
    for row in report.published:
        found = re.search(r"\b\d+x\d+\b", row.row)
        if found is None or "speed-up" not in row.values:
            continue
        for name in [n for n, c in others if f"{c.layers}x{c.hidden}" == found[0] != shape]:
            first = {p.device: p for p in reversed(report.projections) if p.model == name}
            projected = ", ".join(f"{p.speedup:.2f}x ({p.device})" for p in reversed(first.values()))
            ours = interval(measured[name]) if name in measured else ""
            of = row.row if narrow else f"{row.row} ({row.source})"
            rows.append([name, f"{row.values['speed-up']:g}x", ours, projected, of])
    if not rows:
        return None
    header = ["model", "published", "measured", "projected", "row"]
    over = baseline if baseline == shape else f"{baseline}, {shape}"
    note = f"Published: over BERT-base, 12x768, on the papers' devices. Ours: over {over}"
    if beside := comparable(report):
        first_row = beside[0]
        cell = cell_name((first_row.batch_size, first_row.seq_len))
        note += f"; measured with {cell} on {first_row.backend} {first_row.dtype}"
    return Listing("Published speed-ups", *filled(header, rows), f"{note}.")


def facts(report: Report) -> list[tuple[str, str]]:
    """The best speed-up of the first cell, the smallest model, the fastest one."""
    baseline = next(iter(report.models))
    cell, rows = next(iter(cells(report).items()), ((0, 0), []))
    found = []
    if ratios := [(s, row) for row in rows if (s := speedup_of(report, row))]:
        best, row = max(ratios, key=lambda pair: pair[0].median)
        label = f"the speed of {baseline}: {ran_as(row)}, {cell_name(cell)} ({best.low:.1f}–{best.high:.1f})"
        found.append((f"{best.median:.1f}×", label))
    name, smallest = min(report.models.items(), key=lambda pair: pair[1].bytes)
    beside = "" if name == baseline else f", the smallest; {baseline} {on_disk(report.models[baseline])}"
    found.append((on_disk(smallest), f"on disk: {name}{beside}"))
    if rows:
        row, first = min(rows, key=lambda row: row.p50_ms), rows[0]
        beside = "" if row is first else f"; {ran_as(first)} {first.p50_ms:.1f} ms"
        found.append((f"{row.p50_ms:.1f} ms", f"median of {ran_as(row)}, {cell_name(cell)}{beside}"))
    return found


def latency_csv(report: Report) -> str:
    """latency.csv: the latency rows as they stand in report.json, each with its speed-up."""
    if not report.latency:
        return ""
    text = io.StringIO()
    names = ("speedup", "speedup_low", "speedup_high")
    writer = csv.DictWriter(text, [*LatencyRow.model_fields, *names], lineterminator="\n")
    writer.writeheader()
    for row in report.latency:
        found = speedup_of(report, row)
        values = (found.median, found.low, found.high) if found else (None, None, None)
        writer.writerow(row.model_dump() | dict(zip(names, values, strict=True)))
    return text.getvalue()
