"""No headline from noise: an unstable measurement is stated by a bound in every view."""

import csv
import io
import itertools
import json
from pathlib import Path

import pytest
import reports
from pydantic_core import to_json
from reports import latency_row, made, model, ratio
from rich.console import Console

from kdcli.deploy.measurements import LatencyRow, Speedup
from kdcli.report.charts.charts import AT_P90, latency_over, quality_against
from kdcli.report.charts.tradeoff import compression_pictures
from kdcli.report.finish import frame
from kdcli.report.schema import Report
from kdcli.report.sections.overview import foremost
from kdcli.report.sections.timings import latency_csv
from kdcli.report.views import markdown, model_card
from kdcli.verbs.compress.compress_candidates import Front
from kdcli.verbs.compress.limits import GoalSettings, ScoredModel
from kdcli.verbs.compress.scored import read

pytestmark = pytest.mark.slow

MEDIAN, LOW, HIGH = 43.5, 31.5, 57.0
P50, P90 = 4.25, 5.525


def unstable_ratio(baseline: str = "teacher") -> dict[str, object]:
    return ratio(baseline, MEDIAN, LOW, HIGH, unstable=True)


def distilled(student: str = "unstable") -> Report:
    """A distillation to one student that is measured in two cells."""
    rows = [latency_row("teacher", 1, 60.0), latency_row("3x384", 1, P50, student)]
    rows[1]["speedup"] = unstable_ratio()
    values = reports.report_values()
    del values["models"]["6x384"]
    scores = {"teacher": {"accuracy": 0.93}, "3x384": {"accuracy": 0.9}}
    return made(values, latency=rows, curve=[], published=[], quality={"sst2": scores})


def unstable_baseline() -> Report:
    """The student's own times are fine, but its teacher's are not."""
    report = distilled("ok")
    teacher = LatencyRow.model_validate(latency_row("teacher", 1, 60.0, "unstable"))
    return report.model_copy(update={"latency": [teacher, report.latency[1]]})


def benchmarked() -> Report:
    """A benchmark of a shape on two batch sizes."""
    rows = []
    for batch_size in (1, 8):
        row = latency_row("3x384", batch_size, P50, "unstable", unstable_ratio("12x768"))
        rows += [latency_row("12x768", batch_size, 60.0), row]
    cards = {"12x768": model("baseline"), "3x384": model("candidate", "12x768", bytes=69_600_000)}
    return made(
        reports.benchmark_values(),
        models=cards,
        latency=rows,
        published=[],
        failures=[],
        agreements=[],
        quality={"sst2": {"12x768": {"accuracy": 0.93}, "3x384": {"accuracy": 0.9}}},
    )


def compressed() -> Report:
    """A compression of the teacher to one candidate."""
    speedup = Speedup.model_validate(unstable_ratio())
    common = {"low": 0.9, "high": 0.9, "score": 0.9, "outcome": ""}
    compression = {
        "task": "sst2",
        "metric": "accuracy",
        "rows": 500,
        "goal": {"speedup": 20.0},
        "strict": False,
        "met": True,
        "chosen": "3x384",
        "sentence": f"3x384 is {speedup.phrase()} as the teacher ({speedup.trust()}).",
        "candidates": [
            {"name": "teacher", "ms": 60.0, "mb": 438.0} | common,
            {"name": "3x384", "ms": P90, "unstable": True, "mb": 69.6, "speedup": unstable_ratio()}
            | common,
        ],
    }
    values = json.loads(distilled().to_json()) | {"command": "compress"}
    return Report.model_validate_json(to_json(values | {"compression": compression}))


REPORTS = {
    "distill": distilled,
    "unstable baseline": unstable_baseline,
    "benchmark": benchmarked,
    "compress": compressed,
}
VIEWS = {
    "terminal": reports.printed,
    "markdown": markdown,
    "html": reports.words,
    "model card": lambda report: model_card(report, "3x384"),
}


@pytest.mark.parametrize(
    ("kind", "view"),
    # A benchmark makes no model, so it writes no model card.
    [(k, v) for k, v in itertools.product(REPORTS, VIEWS) if (k, v) != ("benchmark", "model card")],
)
def test_every_view_states_the_lower_bound_and_says_unstable(kind, view):
    text = " ".join(VIEWS[view](REPORTS[kind]()).split())
    assert "unstable measurement" in text
    assert "at least 31.5" in text or "≥31.5" in text
    assert "43.5" not in text, "the median of noise"


@pytest.mark.parametrize("kind", REPORTS)
def test_numbers_for_programs_state_the_lower_bound(kind):
    report = REPORTS[kind]()
    row = json.loads(report.to_json())["latency"][1]
    assert (row["speedup"]["low"], row["speedup"]["unstable"]) == (LOW, True)
    line = list(csv.DictReader(io.StringIO(latency_csv(report))))[1]
    assert (line["speedup"], line["speedup_unstable"]) == (str(LOW), "True")
    table = frame(report)
    assert table.loc["3x384", "speed-up 1x128"] == LOW
    assert table.loc["3x384", "unstable 1x128"]
    stable = kind == "unstable baseline"
    assert table.loc["3x384", "ms 1x128"] == pytest.approx(P50 if stable else P90)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: quality_against(benchmarked(), "latency"),
        lambda: latency_over(benchmarked(), "batch size"),
        lambda: compression_pictures(compressed().compression)[0],
    ],
    ids=["quality against latency", "latency over", "compression"],
)
def test_pictures_draw_the_slow_end_and_mark_it(drawn):
    picture = drawn()
    assert "3x384 (unstable)" in picture.svg
    assert "(unstable)" in picture.caption
    assert "5.5" in picture.caption
    assert "4.25" not in picture.caption, "the median of noise"
    assert picture.caption.endswith(AT_P90)


def test_size_is_drawn_without_a_mark():
    picture = compression_pictures(compressed().compression)[1]
    assert "unstable" not in picture.svg + picture.caption
    assert "3x384 (chosen)" in picture.svg


@pytest.mark.parametrize("unstable", [True, False])
def test_the_limit_of_a_speedup_is_drawn_only_from_a_stable_teacher(unstable):
    teacher = ScoredModel("teacher", Path(), 0.9, 0.9, 0.9, 10.0, None, 8.0, unstable)
    (limit,) = [each.of_report(teacher) for each in GoalSettings(speedup=4.0).limits]
    assert (limit.axis, limit.line) == ("ms", None if unstable else 2.5)
    compression = compressed().compression.model_copy(update={"limits": []})
    drawn = compression.model_copy(update={"limits": [limit]})
    dashed = [compression_pictures(each)[0].svg.count("dasharray") for each in (compression, drawn)]
    assert dashed[1] - dashed[0] == (not unstable)


def test_the_fastest_model_is_chosen_by_what_is_stated():
    report = benchmarked()
    steady = latency_row("6x384", 1, 2.0, speedup=ratio("12x768", 40.0, 39.0, 41.0))
    values = json.loads(report.to_json())
    values["latency"].insert(1, steady)
    values["models"].append(model("candidate", "12x768") | {"name": "6x384"})
    assert foremost(Report.model_validate_json(to_json(values))) == "6x384"


@pytest.mark.parametrize("unstable", [False, True])
def test_a_compression_judges_the_stated_figures(tmp_path, unstable):
    values = reports.report_values()
    status = "unstable" if unstable else "ok"
    speedup = ratio("teacher", 10.0, 9.0, 11.5, unstable=unstable)
    in_batches = ratio("teacher", 5.0, 4.0, 6.0, unstable=unstable)
    rows = [
        latency_row("teacher", 1, 60.0),
        latency_row("6x384", 1, 6.0, status, speedup),
        latency_row("6x384", 8, 60.0, status, in_batches),
    ]
    scored = [reports.evaluation(name) for name in ("teacher", "6x384")]
    del values["models"]["3x384"], values["models"]["3x384 undistilled"]
    report = made(values, latency=rows, evaluations=scored, quality={}, curve=[], published=[])
    # Directories, because other names would be looked up on the hub.
    folders = dict.fromkeys(("teacher", "6x384"), tmp_path)
    judged = read(report, folders, GoalSettings()).with_latencies(report)
    (one,) = judged.candidates
    assert (judged.teacher.ms, judged.teacher.speedup, judged.teacher.unstable) == (60, None, False)
    assert (one.ms, one.unstable) == (pytest.approx(7.8 if unstable else 6.0), unstable)
    # Other work may have slowed the teacher in one cell alone.
    assert one.speedup.stated == (4.0 if unstable else 10.0)


def with_low(report: Report, low: float) -> Report:
    """The same report, with another lower bound of the speed-up."""
    values = json.loads(report.to_json())
    for row in values["latency"]:
        if row["speedup"] is not None:
            row["speedup"] |= {"low": low}
    if values["compression"] is not None:
        values["compression"]["candidates"][1]["speedup"] |= {"low": low}
        values["compression"]["sentence"] = "3x384 is 6.3 times smaller."
    return Report.model_validate_json(to_json(values))


@pytest.mark.parametrize("kind", REPORTS)
@pytest.mark.parametrize("view", ["terminal", "markdown", "html"])
def test_times_that_may_even_be_slower_give_no_factor(kind, view):
    text = " ".join(VIEWS[view](with_low(REPORTS[kind](), 0.42)).split())
    # The sentence of a compression comes from its run.
    assert "no speed-up" in text or kind == "compress"
    assert not [figure for figure in ("0.42", "0.4 times", "43.5", "at least 0") if figure in text]
    if kind != "compress":
        assert "measure again on an idle machine, with kdcli benchmark" in text


def test_no_file_has_a_factor_of_times_that_may_even_be_slower(tmp_path):
    report = with_low(REPORTS["benchmark"](), 0.42)
    rows = list(csv.DictReader(io.StringIO(latency_csv(report))))
    assert "" in [row["speedup"] for row in rows if row["speedup_low"] == "0.42"]
    assert "0.42" not in [row["speedup"] for row in rows]
    table = frame(report).filter(like="speed-up")
    assert table.isna().any(axis=None)
    assert not (table == 0.42).any(axis=None)
    compression = with_low(compressed(), 0.42).compression
    front = Front(tmp_path, compression, fast=[], small=[])
    assert [row["speedup"] for row in json.loads(front.to_json())] == [1.0, None]
    assert "NaN" not in front.to_json()


def test_the_candidates_of_a_finished_run_say_unstable(tmp_path):
    compression = compressed().compression
    stable = compression.candidates[1].model_copy(update={"unstable": False})
    for candidate in (compression.candidates[1], stable):
        front = Front(
            tmp_path,
            compression.model_copy(update={"candidates": [compression.candidates[0], candidate]}),
            fast=[],
            small=[],
        )
        console = Console(width=200, file=io.StringIO(), record=True)
        for part in front.renderables():
            console.print(part)
        text = console.export_text()
        assert "≥31.50x, unstable" in text
        assert "43.5" not in text
        assert front.to_frame()["unstable"].tolist() == [False, True]


def test_a_model_on_a_single_backend_has_one_row_with_its_scores_and_times():
    chosen = "3x384-onnx-int8"
    values = reports.compress_values()
    values["quality"] = {"sst2": {name: {"accuracy": 0.92} for name in ("teacher", chosen)}}
    onnx = {"backend": "onnx", "dtype": "int8"}
    values["latency"][1] |= onnx
    table = frame(made(values))
    assert list(table.index) == ["teacher", chosen]
    assert table.loc[chosen, ["sst2 accuracy", "ms 8x128"]].tolist() == [0.92, 48.0]
    # On two backends, the other one than torch has a row of its own.
    values["latency"].append(latency_row("teacher", 8, 120.0) | onnx)
    table = frame(made(values))
    assert table["ms 8x128"].to_dict() == {
        "teacher": 480.0,
        chosen: 48.0,
        "teacher on onnx int8": 120.0,
    }


def test_phrases():
    values = {"baseline": "teacher", "median": 2.54, "low": 2.31, "high": 2.76}
    stable, unstable = (Speedup(**values, unstable=unstable) for unstable in (False, True))
    assert [stable.phrase(), unstable.phrase()] == [
        "2.5 times as fast",
        "at least 2.3 times as fast",
    ]
    assert [stable.trust(digits=2), unstable.trust()] == ["2.31–2.76", "unstable measurement"]
    assert [stable.stated, unstable.stated] == [2.54, 2.31]
    slower = Speedup(**values | {"low": 0.9}, unstable=False)
    assert [slower.stated, slower.is_inconclusive, unstable.is_inconclusive] == [2.54, False, False]
    inconclusive = slower.model_copy(update={"unstable": True})
    assert (inconclusive.stated, inconclusive.is_inconclusive) == (None, True)
