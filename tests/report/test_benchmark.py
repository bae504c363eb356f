"""Reports of benchmarks: what every view says of latency, speed-ups, failures, agreement and projections."""

from __future__ import annotations

import csv
import io
import re

import pytest
from benchmark_reports import benchmark_row, benchmark_values, compared_benchmark_values, report_of
from reports import HOSTILE, card
from test_evaluations import words
from test_views import Page, shown

from kdcli.report.build import html, write_views
from kdcli.report.markdown import markdown
from kdcli.report.schema import Agreement, Report
from kdcli.report.sections.latency import (
    NOISE,
    agreement_table,
    cell_tables,
    comparable,
    facts,
    latency_csv,
    not_measured,
    projection_table,
    published_speedups,
    remarks,
    speedup_of,
)
from kdcli.report.views import overview, title

FAILED = (
    "12x768 on torch fp32, 64 × 512 tokens: out of memory",
    "3x384 on openvino int8: openvino is not installed",
    "6x384 on onnx int8: output differs (relative error 0.31, limit 0.1): not measured",
)


def test_titles(benchmark):
    assert title(benchmark) == "6x384, 3x384 beside 12x768"
    alone = report_of(models={"6x384": card()})
    assert title(alone) == "6x384"
    assert title(report_of(models={str(i): card() for i in range(8)})) == "1, 2, 3, 4, 5 and 2 more beside 0"
    assert title(report_of(models={"teacher": card(), "mine": card()})) == "mine beside teacher"


@pytest.mark.parametrize("kind", ["benchmark", "runs"])
def test_every_view_is_written(request, tmp_path, kind):
    report = request.getfixturevalue(kind)
    write_views(tmp_path, report)
    assert Report.model_validate_json((tmp_path / "report.json").read_text("utf-8")) == report
    for text in (words(report), markdown(report), shown(report)):
        said = re.sub("their (own )?teacher", "", " ".join(text.split()))
        for part in (title(report), "10.00x (9.00–12.00)", *FAILED, "Projected, not measured", NOISE, "noisy"):
            assert part in said
        assert not re.search("teacher|student|undistilled", said, re.I)


def test_a_table_for_each_cell_as_measured(benchmark):
    tables = cell_tables(benchmark)
    assert [t.title for t in tables] == [f"Latency, {c} tokens" for c in ("1 × 128", "8 × 128", "1 × 32", "1 × 512")]
    rows = [dict(zip(tables[1].header, row, strict=True)) for row in tables[1].rows]
    assert [row["model"] for row in rows] == [r.model for r in benchmark.latency if r.batch_size == 8]
    assert rows[-1] == {
        **{"model": "3x384", "backend": "onnx", "dtype": "int8", "p50 ms": "24.00", "p90 ms": "26.40"},
        **{"p95 ms": "28.80", "p99 ms": "31.20", "IQR / p50": "5%", "status": "ok", "tokens/s": "25,600"},
        **{"speed-up": "20.00x (18.00–24.00)", "peak memory": "120.0 MB", "first call ms": "72.00", "load s": "0.42"},
        "runs": "60",
    }
    assert rows[0]["speed-up"] == "1 (baseline)"
    assert rows[0]["p50 ms"] == "480.0"


def test_columns_that_say_nothing_are_left_out():
    rows = [
        benchmark_row("12x768", ("torch", "fp32"), 1, 128, p99_ms=None, peak_memory_bytes=None, device=d) for d in "ab"
    ]
    (listing,) = cell_tables(report_of(latency=rows))
    assert "p99 ms" not in listing.header
    assert "peak memory" not in listing.header
    assert "device" in listing.header, "it differs"
    assert "padding" not in listing.header, "it does not"


def test_terminal_stays_within_a_hundred_characters(benchmark):
    text = shown(benchmark, 100)
    assert max(map(len, text.splitlines())) <= 100
    for row in benchmark.latency:
        line = f"{row.model} {row.backend}-{row.dtype}"
        assert re.search(rf"│ {line} +│ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │ +[\d,]+ │ +[^│]+ │ +(ok|noisy) │", text)
    alone = Report.model_validate(compared_benchmark_values())
    assert "6x384 torch-fp32" not in shown(alone, 100).split("Agreement")[0]


def test_speedups_are_found_by_their_whole_name():
    """A shape may hold an @, and one name may be the beginning of another."""
    names = ("12x768", "4x312", "4x312:1200@12", "org/4x312_vs_12x768")
    ratio = {"low": 1.0, "high": 9.0, "batch_size": 1, "seq_len": 128}
    second = ratio | {"batch_size": 8}
    values = benchmark_values() | {
        "models": dict.fromkeys(names, card()),
        "latency": [benchmark_row(n, ("torch", "fp32"), b, 128) for b in (1, 8) for n in names],
        "speedup": {f"{n}_vs_12x768": ratio | {"median": 2.0 + i} for i, n in enumerate(names[1:])}
        | {f"{n}_vs_12x768@8x128": second | {"median": 5.0 + i} for i, n in enumerate(names[1:])},
    }
    report = Report.model_validate(values)
    found = [speedup_of(report, row) for row in report.latency]
    assert [s and s.median for s in found] == [None, 2.0, 3.0, 4.0, None, 5.0, 6.0, 7.0]
    distilled = Report.model_validate(values | {"command": "distill"})
    header, rows = overview(distilled)
    assert rows[2][header.index("speed-up 8x128")] == "6.00x (1.00–9.00)"


def test_old_and_new_names_of_float32_are_one():
    rows = [benchmark_row(m, ("torch", "fp32"), 1, 128, dtype="float32") for m in ("12x768", "6x384")]
    report = report_of(latency=rows)
    assert [row[7] for row in cell_tables(report)[0].rows if row[0] == "6x384"]
    assert cell_tables(report)[0].rows[0][cell_tables(report)[0].header.index("speed-up")] == "1 (baseline)"
    assert speedup_of(report, report.latency[1]) is not None


def test_models_by_row_with_the_counts_of_the_papers(benchmark, runs):
    header, rows = overview(benchmark)
    assert header == [
        *("model", "parameters", "(embedding)", "(transformer)", "papers: embedding", "papers: transformer", "size"),
        "multiply-adds",
    ]
    assert rows[0] == ["12x768", "109 M", "23.8 M", "85.6 M", "23.4 M", "85.1 M", "438.0 MB", "11.2 G"]
    header, rows = overview(runs)
    assert header[1] == "shape", "a name that is no shape needs one beside it"
    assert header[-1] == "sst2"
    assert [row[-1] for row in rows] == ["0.93", "0.91", "0.88", "0.87"]


def test_facts(benchmark):
    assert facts(benchmark) == [
        ("20.0×", "the speed of 12x768: 3x384 onnx-int8, 1 × 128 tokens (18.0–24.0)"),
        ("69.6 MB", "on disk: 3x384, the smallest; 12x768 438.0 MB"),
        ("3.0 ms", "median of 3x384 onnx-int8, 1 × 128 tokens; 12x768 torch-fp32 60.0 ms"),
    ]
    assert "In short" not in words(benchmark)
    alone = report_of(models={"12x768": card()}, latency=[benchmark_row("12x768", ("torch", "fp32"), 1, 128)])
    assert facts(alone) == [
        ("438.0 MB", "on disk: 12x768"),
        ("60.0 ms", "median of 12x768 torch-fp32, 1 × 128 tokens"),
    ]


def test_what_was_not_measured(benchmark):
    assert tuple(not_measured(benchmark)) == FAILED
    assert "Not measured" not in words(report_of(failures=[], agreements=[]))


def test_remarks_tell_how_and_when_not_to_trust(benchmark):
    said, noise = remarks(benchmark)
    assert said.startswith("On cpu, random lengths, padded;")
    assert noise == NOISE
    quiet = report_of(latency=[benchmark_row("12x768", ("torch", "fp32"), 1, 128, padding="full")])
    (said,) = remarks(quiet)
    assert "no padding" in said
    assert NOISE not in words(quiet)


def test_agreement(benchmark):
    listing = agreement_table(benchmark)
    assert listing is not None
    assert listing.rows == [
        ["3x384", "onnx", "int8", "0.02", "0.1", "0.5", "0.999000", ""],
        ["6x384", "onnx", "int8", "0.31", "0.1", "0.5", "0.999000", "wrong"],
    ]
    judged = report_of(agreements=[a.model_dump() | {"metric": 0.91} for a in benchmark.agreements])
    listing = agreement_table(judged)
    assert listing is not None
    assert listing.header[-2:] == ["metric", ""]
    assert listing.rows[0][-2] == "0.91"
    assert agreement_table(report_of(agreements=[])) is None


def test_an_output_that_is_no_number_is_said_and_read_back(benchmark):
    broken = {"max_abs": float("inf"), "relative": float("nan"), "cosine": float("nan"), "wrong": True}
    report = report_of(agreements=[benchmark.agreements[0].model_dump() | broken])
    assert report.agreements[0].relative is None
    assert Report.model_validate_json(report.to_json()) == report
    assert "relative error not a number, limit 0.1" in not_measured(report)[-1]
    assert "| not a number | 0.1 | not a number | not a number | wrong |" in markdown(report)
    assert Agreement.model_validate(report.agreements[0].model_dump()) == report.agreements[0]


def test_projections_stand_by_themselves(benchmark):
    listing = projection_table(benchmark)
    assert listing is not None
    assert listing.rows == [
        ["6x384", "p100", "1 × 128", "2.50", "5.10x", "5.30x", "-4%"],
        ["6x384", "k80", "1 × 128", "12.50", "5.60x", "", ""],
    ]
    assert "Calculated, not run" in listing.note
    assert "p100: projection, memory-bound." in listing.note
    for table in cell_tables(benchmark):
        assert not any("p100" in cell or "k80" in cell for row in table.rows for cell in row)
    for table in csv.DictReader(io.StringIO(latency_csv(benchmark))):
        assert table["device"] == "cpu"
    assert projection_table(report_of(projections=[])) is None


def test_published_speedups_beside_ours(benchmark):
    listing = published_speedups(benchmark)
    assert listing is not None
    assert listing.header == ["model", "published", "measured", "projected", "row"]
    of_papers = [row[:4] for row in listing.rows]
    projected = "5.10x (p100), 5.60x (k80)"
    assert of_papers[0] == of_papers[1] == ["6x384", "5.3x", "6.00x (5.40–7.20)", projected]
    assert of_papers[2] == ["3x384", "10.1x", "10.00x (9.00–12.00)", ""]
    assert listing.note.endswith("Ours: over 12x768; measured with 1 × 128 tokens on torch fp32.")
    assert published_speedups(report_of(published=[])) is None
    pruned = {"dense": card(layers=6, hidden=384), "masked": card(layers=6, hidden=384)}
    assert published_speedups(report_of(models=pruned)) is None, "no paper says what its own shape gains by pruning"
    assert "SQuAD" not in words(benchmark), "scores of papers say nothing where none was taken here"
    assert "SQuAD" not in markdown(benchmark)


def test_scores_of_the_papers_where_models_were_judged(runs):
    assert "SQuAD 2.0 F1" in words(runs)
    assert "SQuAD 2.0 F1" in markdown(runs)


def test_csv_has_every_column_and_the_speedups(benchmark):
    rows = list(csv.DictReader(io.StringIO(latency_csv(benchmark))))
    assert len(rows) == len(benchmark.latency)
    assert rows[0]["speedup"] == ""
    assert (rows[1]["speedup"], rows[1]["speedup_low"], rows[1]["p99_ms"]) == ("6.0", "5.4", "13.0")
    for row, of in zip(rows, benchmark.latency, strict=True):
        assert row["peak_memory_bytes"] == str(of.peak_memory_bytes)


def test_comparable_rows_are_of_what_most_models_ran_on():
    onnx = [benchmark_row(m, ("onnx", "fp32"), 1, 128) for m in ("12x768", "6x384")]
    first = benchmark_row("12x768", ("torch", "fp32"), 1, 128)
    later = [benchmark_row(m, ("torch", "fp32"), 8, 128) for m in ("12x768", "6x384", "3x384")]
    found = comparable(report_of(latency=[first, *onnx, *later]))
    assert [(row.model, row.backend, row.batch_size) for row in found] == [("12x768", "onnx", 1), ("6x384", "onnx", 1)]
    assert comparable(report_of(latency=[])) == []


def test_nothing_measured_yet():
    report = report_of(latency=[], speedup={}, agreements=[], failures=[], projections=[], published=[])
    assert facts(report) == [("69.6 MB", "on disk: 3x384, the smallest; 12x768 438.0 MB")]
    for text in (words(report), markdown(report), shown(report)):
        assert "Latency" not in text
        assert "6x384, 3x384 beside 12x768" in text
    assert latency_csv(report) == ""


def test_many_cells_are_folded(benchmark):
    def folded(report: Report) -> list[bool]:
        return ["open" in tag for tag in re.findall(r"<details[^>]*><summary id=.latency-\d+", html(report))]

    assert folded(benchmark) == [True] * 3
    many = Report.model_validate(benchmark_values(tuple((1, n) for n in (128, 8, 16, 32, 64))))
    assert folded(many) == [False] * 4


def test_hostile_names_stay_text(hostile_latency):
    page = Page(html(hostile_latency))
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset", "action")]
    assert any(f"{HOSTILE} on {HOSTILE} {HOSTILE}, 1 × 128 tokens: {HOSTILE}" in text for text in page.text)
    assert "<script" not in markdown(hostile_latency)
    for table in re.findall(r"(?:^\|.*\n)+", markdown(hostile_latency), re.M):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1
    assert "[bold]" in shown(hostile_latency, 100)
    assert HOSTILE in [row["backend"] for row in csv.DictReader(io.StringIO(latency_csv(hostile_latency)))]
