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
from kdcli.report.sections import timings as section_of
from kdcli.report.sections.overview import title
from kdcli.report.sections.summary import summary
from kdcli.report.sections.timings import latency_csv
from kdcli.report.views import html, markdown
from kdcli.verbs.benchmark.run import gather

pytestmark = pytest.mark.slow


def csv_of(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(latency_csv(report))))


def test_titles():
    nothing = {"latency": [], "failures": [], "agreements": []}
    for names, text in (
        (["6x384"], "6x384"),
        (["teacher", "mine"], "mine compared with teacher"),
        ([str(i) for i in range(8)], "1, 2, 3, 4, 5 and 2 more compared with 0"),
    ):
        assert title(report_of(models=dict.fromkeys(names, model("candidate")), **nothing)) == text


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
    assert "relative error not a number, limit 0.1" in markdown(report)
    assert "| not a number | 0.1 | not a number | not a number | wrong |" in markdown(report)
    assert Agreement.model_validate(report.agreements[0].model_dump()) == report.agreements[0]


def test_only_models_of_the_papers_shapes_have_published_speedups(benchmark, runs):
    title = "Published speed-ups"
    assert title in words(benchmark)
    assert title not in words(report_of(published=[]))
    nothing = {"latency": [], "failures": [], "agreements": []}
    for layers, hidden in ((12, 768), (3, 384)):
        others = {
            "base": model("baseline", layers=layers, hidden=hidden),
            "other": model("candidate", "base", layers=layers, hidden=hidden),
        }
        assert title not in words(report_of(models=others, **nothing)), (
            "no paper has what its own shape gains, or a speed-up over a small model"
        )
    for view in (words, markdown):
        assert "SQuAD" not in view(benchmark), (
            "scores of papers mean nothing where none was taken here"
        )
        assert "SQuAD 2.0 F1" in view(runs)


def test_the_metric_of_an_output_is_shown_if_it_was_measured(benchmark):
    scored = [a.model_dump() | {"metric": 0.91} for a in benchmark.agreements]
    assert "| 0.999000 | 0.9100 | wrong |" in markdown(report_of(agreements=scored))


def test_quality_on_another_backend_belongs_to_the_weights(runs):
    onnx = {"backend": "onnx", "dtype": "int8"}
    rows = [row.model_copy(update=onnx) for row in runs.latency]
    first, second = report_pictures(runs.model_copy(update={"latency": rows}))
    assert first.caption.endswith("The quality belongs to the weights, not to this backend.")
    assert "of the weights, not" not in second.caption
    # The hollow point and its entry in the legend.
    hollow = [
        len(re.findall("fill-opacity: 0; stroke: #a855f7", p.svg)) for p in report_pictures(runs)
    ]
    assert hollow == [2, 2]


def test_names_in_the_csv_are_as_they_were(hostile_latency):
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


def test_the_first_sentence_is_about_the_fastest_backend():
    (sentence,) = summary(judged_on_two_backends())
    assert "6x384 onnx-int8 is 12.0 times as fast as 12x768 (11.0–13.0;" in sentence


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
