"""Reports of benchmarks: what every view shows of latency, speed-ups, failures and agreement."""

import csv
import io
import re

import pytest
import reports
from reports import (
    HOSTILE,
    benchmark_models,
    benchmark_row,
    benchmark_values,
    made,
    missing,
    model,
    report_of,
    views,
    without_files,
    words,
)

from kdcli.deploy.measurements import Agreement
from kdcli.report.charts.charts import quality_against, report_pictures
from kdcli.report.schema import Report
from kdcli.report.sections import latency as section_of
from kdcli.report.sections.latency import latency, latency_csv, not_measured
from kdcli.report.sections.overview import facts, overview, title
from kdcli.report.views import html, markdown
from kdcli.verbs.benchmark.compare import gather

pytestmark = pytest.mark.slow

FAILED = (
    "12x768 on torch fp32, 64 × 512 tokens: out of memory",
    "3x384 on openvino int8: openvino is not installed",
    "6x384 on onnx int8: output differs (relative error 0.31, limit 0.1): not measured",
)


def tables(report: Report):
    """The table of each cell."""
    return {part.title: part.table for part in latency(report)[0].parts}


def csv_of(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(latency_csv(report))))


def test_titles(benchmark):
    assert title(benchmark) == "6x384, 3x384 compared with 12x768"
    nothing = {"latency": [], "failures": [], "agreements": []}
    for names, text in (
        *((["6x384"], "6x384"), (["teacher", "mine"], "mine compared with teacher")),
        ([str(i) for i in range(8)], "1, 2, 3, 4, 5 and 2 more compared with 0"),
    ):
        assert title(report_of(models=dict.fromkeys(names, model("candidate")), **nothing)) == text


@pytest.mark.parametrize("kind", ["benchmark", "runs"])
def test_every_view_shows_speedups_and_failures(request, kind):
    parts = ("10.00x (9.00–12.00)", *FAILED, section_of.NOISE, "noisy")
    assert [missing(text, *parts) for text in views(request.getfixturevalue(kind))] == [[]] * 3


def test_a_table_for_each_cell_as_measured(benchmark):
    found = tables(benchmark)
    assert list(found) == [f"{c} tokens" for c in ("1 × 128", "8 × 128", "1 × 32", "1 × 512")]
    table = found["8 × 128 tokens"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["model"].partition(" ")[0] for row in rows] == [
        r.model for r in benchmark.latency if r.batch_size == 8
    ]
    assert rows[-1] == {
        **{
            "model": "3x384 onnx-int8",
            "p50 ms": "24.00",
            "p90 ms": "26.40",
            "p95 ms": "28.80",
            "p99 ms": "31.20",
        },
        **{
            "IQR / p50": "5%",
            "status": "ok",
            "tokens/s": "25,600",
            "speed-up": "20.00x (18.00–24.00)",
        },
        **{"peak memory": "120.0 MB", "first call ms": "72.00", "load s": "0.42", "runs": "60"},
    }
    assert (rows[0]["speed-up"], rows[0]["p50 ms"]) == ("1 (baseline)", "480.0")


def test_models_by_row_with_the_counts_of_the_papers(benchmark, runs):
    table = overview(benchmark)
    papers = ("papers: embedding", "papers: transformer")
    assert table.columns == [
        "model",
        "parameters",
        "(embedding)",
        "(transformer)",
        *papers,
        "weights",
        "multiply-adds",
    ]
    assert table.rows[0] == [
        "12x768",
        "109 M",
        "23.8 M",
        "85.6 M",
        "23.4 M",
        "85.1 M",
        "438.0 MB",
        "11.2 G",
    ]
    table = overview(runs)
    assert table.columns[1] == "shape", "a name that is no shape needs one next to it"
    assert table.columns[-1] == "sst2 accuracy"
    assert [row[-1] for row in table.rows] == ["0.9300", "0.9100", "0.8800", "0.8700"]


def test_facts(benchmark):
    assert facts(benchmark) == [
        ("20.0×", "the speed of 12x768: 3x384 onnx-int8, 1 × 128 tokens (18.0–24.0)"),
        ("69.6 MB", "on disk; 12x768 438.0 MB"),
    ]
    assert "3x384 onnx-int8 is 20.0 times as fast as" in words(benchmark)
    alone = report_of(
        models={"12x768": model("baseline")},
        latency=[benchmark_row("12x768", ("torch", "fp32"), 1, 128)],
        failures=[],
        agreements=[],
    )
    assert facts(alone) == [("60.0 ms", "1 × 128 tokens"), ("438.0 MB", "on disk")]


def test_what_was_not_measured(benchmark):
    assert tuple(item for (item,) in not_measured(benchmark)[0].items) == FAILED
    assert not_measured(report_of(failures=[], agreements=[])) == []


def test_remarks_explain_the_protocol_and_warn_of_noise(benchmark):
    how, noise = latency(benchmark)[0].sentences
    quiet = report_of(latency=[benchmark_row("12x768", ("torch", "fp32"), 1, 128, padding="full")])
    (calm,) = latency(quiet)[0].sentences
    assert (how.partition(";")[0], noise) == ("On cpu, random lengths, padded", section_of.NOISE)
    assert "A speed-up over 12x768 is the median of paired ratios" in how
    assert calm.startswith("On cpu, torch fp32, no padding.")


def test_agreement(benchmark):
    (section,) = section_of.agreements(benchmark)
    assert section.table.rows == [
        ["3x384 onnx-int8", "0.02", "0.1", "0.5", "0.999000", "ok"],
        ["6x384 onnx-int8", "0.31", "0.1", "0.5", "0.999000", "wrong"],
    ]
    scored = [a.model_dump() | {"metric": 0.91} for a in benchmark.agreements]
    (section,) = section_of.agreements(report_of(agreements=scored))
    assert (section.table.columns[-2:], section.table.rows[0][-2]) == (
        ["metric", "output"],
        "0.9100",
    )
    assert section_of.agreements(report_of(agreements=[])) == []


def test_an_output_that_is_no_number_is_shown_and_read_back(benchmark):
    broken = {
        "max_abs": float("inf"),
        "relative": float("nan"),
        "cosine": float("nan"),
        "wrong": True,
    }
    report = report_of(agreements=[benchmark.agreements[0].model_dump() | broken])
    assert (report.agreements[0].relative, Report.model_validate_json(report.to_json())) == (
        None,
        report,
    )
    assert "relative error not a number, limit 0.1" in not_measured(report)[0].items[-1][0]
    assert "| not a number | 0.1 | not a number | not a number | wrong |" in markdown(report)
    assert Agreement.model_validate(report.agreements[0].model_dump()) == report.agreements[0]


def test_published_speedups_beside_ours(benchmark, runs):
    (section,) = section_of.published_speedups(benchmark)
    assert section.table.columns == ["model", "published", "measured", "row", "source"]
    minilm = ["6x384", "5.3x", "6.00x (5.40–7.20)"]
    assert [r[:3] for r in section.table.rows][:3] == [minilm] * 2 + [
        ["3x384", "10.1x", "10.00x (9.00–12.00)"]
    ]
    assert section.table.note.endswith(
        "Ours: over 12x768; measured with 1 × 128 tokens on torch fp32."
    )
    assert section_of.published_speedups(report_of(published=[])) == []
    nothing = {"latency": [], "failures": [], "agreements": []}
    for layers, hidden in ((12, 768), (3, 384)):
        others = {
            "base": model("baseline", layers=layers, hidden=hidden),
            "other": model("candidate", "base", layers=layers, hidden=hidden),
        }
        assert section_of.published_speedups(report_of(models=others, **nothing)) == [], (
            "no paper has what its own shape gains, or a speed-up over a small model"
        )
    for view in (words, markdown):
        assert "SQuAD" not in view(benchmark), (
            "scores of papers mean nothing where none was taken here"
        )
        assert "SQuAD 2.0 F1" in view(runs)


def test_csv_has_every_column_and_the_speedups(benchmark, hostile_latency):
    rows = csv_of(benchmark)
    assert (rows[0]["speedup"], rows[1]["speedup"], rows[1]["speedup_low"], rows[1]["p99_ms"]) == (
        "",
        "6.0",
        "5.4",
        "13.0",
    )
    for row, measured in zip(rows, benchmark.latency, strict=True):
        assert (row["peak_memory_bytes"], row["p50_ms"]) == (
            str(measured.peak_memory_bytes),
            str(measured.p50_ms),
        )
    assert HOSTILE in [row["backend"] for row in csv_of(hostile_latency)]


def test_comparable_rows_ran_where_most_models_ran():
    onnx = [benchmark_row(m, ("onnx", "fp32"), 1, 128) for m in ("12x768", "6x384")]
    first = benchmark_row("12x768", ("torch", "fp32"), 1, 128)
    later = [benchmark_row(m, ("torch", "fp32"), 8, 128) for m in ("12x768", "6x384", "3x384")]
    found = section_of.comparable(report_of(latency=[first, *onnx, *later]))
    assert [(row.model, row.backend, row.batch_size) for row in found] == [
        ("12x768", "onnx", 1),
        ("6x384", "onnx", 1),
    ]
    assert section_of.comparable(report_of(latency=[])) == []


def test_nothing_measured_yet():
    report = report_of(latency=[], agreements=[], failures=[], published=[])
    assert (facts(report), latency_csv(report)) == ([("69.6 MB", "on disk; 12x768 438.0 MB")], "")
    for text in views(report):
        assert missing(text, "Latency", "6x384, 3x384 compared with 12x768") == ["Latency"]


def test_many_cells_are_folded(benchmark):
    def unfolded(report: Report) -> list[bool]:
        return [
            "open" in tag
            for tag in re.findall(r"<details([^>]*)><summary [^>]*>\d+ × \d+ tokens<", html(report))
        ]

    assert unfolded(benchmark) == [True] * 4
    assert unfolded(made(benchmark_values(tuple((1, n) for n in (128, 8, 16, 32, 64))))) == [
        True,
        *[False] * 4,
    ]


def test_pictures_over_length_and_batch(benchmark):
    by_length, by_batch, sizes = (p.caption for p in report_pictures(benchmark))
    assert by_length.startswith(
        "Median milliseconds by tokens, batch size 1, both axes logarithmic: "
        "12x768 torch-fp32 15 (32), 60 (128), 240 (512); 6x384 torch-fp32 2.5 (32)"
    )
    assert by_batch.startswith("Median milliseconds by batch size, 128 tokens")
    assert sizes.startswith("Size and latency, 1 × 128 tokens: 12x768 438.0 MB, 60 ms;")
    assert "onnx" not in sizes
    assert (
        len(report_pictures(made(benchmark_values(((1, 128),))))),
        report_pictures(benchmark),
    ) == (
        1,
        report_pictures(benchmark),
    )


def test_quality_against_latency_and_size(runs):
    first, second, third = report_pictures(runs)
    start = "accuracy on sst2 against"
    assert first.caption.startswith(
        f"{start} latency (median ms, 1 × 128 tokens, torch fp32): 12x768 60 ms, 0.9300"
    )
    assert second.caption.startswith(f"{start} size (weights, MB): 12x768 438 MB, 0.9300")
    for picture in (first, second):
        assert "On the line: 3x384, 6x384, 12x768." in picture.caption
        assert picture.caption.endswith("Hollow, since another is at least as good in both: slow.")
    assert third.caption.startswith("Size and latency")
    assert [
        len(re.findall(r"fill: none; stroke: #a855f7", p.svg)) for p in (first, second, third)
    ] == [1, 1, 0]
    rows = [row.model_dump() | {"backend": "onnx", "dtype": "int8"} for row in runs.latency]
    first, second, _ = report_pictures(made(reports.compared_benchmark_values(), latency=rows))
    assert first.caption.endswith("The quality belongs to the weights, not to this backend.")
    assert "of the weights, not" not in second.caption


def judged_on_two_backends(**changes):
    """Two models on torch and on ONNX in int8, all four scored."""
    names, on = ("12x768", "6x384"), (("torch", "fp32"), ("onnx", "int8"))
    scores = {
        "12x768": 0.93,
        "12x768 on onnx int8": 0.92,
        "6x384": 0.91,
        "6x384 on onnx int8": 0.89,
    }
    rows = [benchmark_row(name, backend, 1, 128) for backend in on for name in names]
    rows[-1]["speedup"] = reports.ratio("12x768", 12.0, 11.0, 13.0)
    forms = {
        f"{name} on onnx int8": without_files("form", name, backend="onnx", dtype="int8")
        for name in names
    }
    return made(
        benchmark_values(),
        models=benchmark_models({name: {} for name in names}) | forms,
        latency=rows,
        quality={"sst2": {name: {"accuracy": value} for name, value in scores.items()}},
        failures=[],
        agreements=[],
        **changes,
    )


def test_the_picture_holds_every_backend_that_was_scored():
    caption = quality_against(judged_on_two_backends(), "latency").caption
    for name in (
        "12x768 60 ms, 0.9300",
        "12x768 on onnx int8 30 ms, 0.9200",
        "6x384 on onnx int8 5 ms, 0.8900",
    ):
        assert name in caption, caption
    assert "not of this backend" not in caption


def test_the_first_score_is_of_what_is_as_fast_as_is_said():
    found = facts(judged_on_two_backends())
    assert ("12.0×", "the speed of 12x768: 6x384 onnx-int8, 1 × 128 tokens (11.0–13.0)") in found
    assert ("0.8900", "accuracy on sst2; 12x768 0.9300") in found


def test_runs_side_by_side_have_no_ratio_between_them(tmp_path):
    values = benchmark_values()
    evaluation = {
        "model": "6x384",
        "task": "sst2",
        "set": "",
        "split": "validation",
        "n": 872,
        "metrics": {"accuracy": 0.9},
    }
    evaluation |= {"confusion": None, "per_class": {}, "worst": []}
    for name, rows, source in (("one", "a", None), ("two", "b", "mine.csv"), ("three", "a", None)):
        own = {"evaluations": [evaluation | {"rows_sha256": rows}]}
        # The recipe of a report is free.
        own["recipe"] = {"data": {"source": source} if name != "three" else "demo"}
        (tmp_path / f"{name}.json").write_text(made(values, **own).to_json(), "utf-8")
    gathered = gather([tmp_path / f"{name}.json" for name in ("one", "two")], no_shape)
    (sentence,) = gathered.differing()
    assert "the scores on sst2 cannot be compared, because the runs were evaluated on" in sentence
    assert "two: 872 examples of mine.csv, validation" in sentence
    alike = gather([tmp_path / f"{name}.json" for name in ("one", "three")], no_shape)
    assert alike.differing() == []
    report = made(
        values,
        models=[model.stored(tmp_path) for model in gathered.models],
        latency=gathered.latency.rows,
        failures=[],
        agreements=[],
        published=[],
    )
    row = next(r for r in report.latency if r.model == "two: 6x384" and r.backend == "torch")
    assert row.speedup.baseline == "two: 12x768"
    assert report.model("two: 6x384").baseline == "two: 12x768"
    for text in views(report):
        parts = ("10.00x (9.00–12.00) over two: 12x768", "each run was measured on its own")
        assert missing(text, *parts) == []
        assert "in turns in one process" not in text
        assert "the speed of one: 12x768: two" not in text


def no_shape(shape):
    raise AssertionError(f"no shape was measured, but {shape} is asked for")


def test_a_run_of_one_model_goes_by_its_name(tmp_path):
    rows = [benchmark_row("12x768", on, 1, 128) for on in (("torch", "fp32"), ("onnx", "int8"))]
    rows[1]["speedup"] = reports.ratio("12x768", 3.0, 2.0, 4.0)
    values = benchmark_values() | {"models": {"12x768": model("baseline")}, "latency": rows}
    report = made(values | {"failures": [], "agreements": []})
    (tmp_path / "mine.json").write_text(report.to_json(), "utf-8")
    gathered = gather([tmp_path / "mine.json"], no_shape)
    assert [(row.model, row.speedup and row.speedup.baseline) for row in gathered.latency.rows] == [
        ("mine", None),
        ("mine", "mine"),
    ]
