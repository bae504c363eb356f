"""Reports of fine-tuned and evaluated models: scores, differences, selection and details."""

import pytest
from reports import (
    compress_values,
    decision,
    evaluate_values,
    evaluation,
    finetune_values,
    made,
    missing,
    model,
    run_row,
    selection_values,
    views,
    without_files,
    words,
)

from kdcli.data.tasks import task_of
from kdcli.report.charts.charts import report_pictures
from kdcli.report.finish import published_for
from kdcli.report.schema import Evaluation, Selection
from kdcli.report.sections.evaluations import (
    MAX_TEXT,
    MEAN,
    details,
    matrix,
    scores,
)
from kdcli.report.sections.grid import selection_section
from kdcli.report.sections.overview import overview, title
from kdcli.report.views import markdown, model_card, sections

pytestmark = pytest.mark.slow

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def test_a_model_in_a_directory_is_named_by_its_last_part(tmp_path):
    (tmp_path / "mine").mkdir()
    values = finetune_values()
    values["models"]["finetuned"]["source"] = str(tmp_path / "mine")
    assert title(made(values, evaluations=[])) == "mine on sst2"


def test_columns_of_quality_name_the_metric():
    values = {
        "sst2": {"accuracy": 1.0},
        "mrpc": {"accuracy": 0.9, "f1": 0.8},
        "held-out loss": {"loss": 0.5},
    }
    table = overview(
        made(finetune_values(), quality={name: {"finetuned": of} for name, of in values.items()})
    )
    assert table.columns[-4:] == ["sst2 accuracy", "mrpc accuracy", "mrpc f1", "held-out loss"]
    assert table.rows[0][-4:] == ["1.000", "0.9000", "0.8000", "0.5000"]


def test_one_metric_of_several_models_is_a_column_a_model_and_a_missing_set_has_no_mean():
    values = evaluate_values(("de", "en"), "xnli")
    evaluations = [e | {"metrics": {"accuracy": 0.5}} for e in values["evaluations"]]
    (section,) = scores(made(values, evaluations=evaluations))
    assert section.title == "Scores on xnli, accuracy (validation)"
    assert section.columns[:3] == ["set", "bert-base-uncased", "all-MiniLM-L6-v2"]
    (section,) = scores(made(values, evaluations=values["evaluations"][:-1]))
    assert section.rows[-1][1:3] == ["0.9250", ""]


def test_means_of_seeds_have_deviations_and_the_papers_of_a_single_set_are_a_column():
    values = evaluate_values(("matched", "mismatched"), "mnli")
    seeds = {"seeds": 2, "deviations": {"accuracy": 0.012}, "metrics": {"accuracy": 0.8}}
    scored = [one | seeds for one in values["evaluations"]]
    name = scored[0]["model"]
    paper = {"row": "12x768, full", "source": "a paper", "shape": "12x768", "model": name}
    paper |= {"task": "mnli", "metric": "accuracy", "values": {"matched": 80.9}}
    by_set, published = scores(made(values, evaluations=scored, published=[paper]))
    assert by_set.rows[0][1] == "0.8000 ± 0.012"
    assert "sample standard deviation of 2 runs" in by_set.note
    assert published.rows[0] == ["matched", "0.8090"]
    of_one = [one for one in scored if one["set"] == "matched"]
    (by_model,) = scores(made(values, evaluations=of_one, published=[paper]))
    assert by_model.title == "Scores on mnli matched"
    assert by_model.columns == ["model", "accuracy", "published", "examples", "split"]
    assert by_model.rows[0][:3] == [name, "0.8000 ± 0.012", "0.8090"]


def test_published_scores_by_language_stand_behind_ours():
    rows = published_for([], {"eval": {"tasks": ["xnli"]}})
    assert published_for([], {"task": "xnli"}) == rows
    ours, papers = scores(made(evaluate_values(("de", "en"), "xnli"), published=rows))
    assert papers.title == "Published on xnli, accuracy"
    columns = [list(column) for column in zip(*[papers.columns, *papers.rows], strict=True)]
    assert columns[0] == ["set", *[row[0] for row in ours.rows]] == ["set", "de", "en", MEAN]
    assert ["MiniLM 6x384 with assistant", "0.7030", "0.7920", "0.7475"] in columns
    assert "table 11, test" in papers.note


def test_means_of_published_sets_are_those_of_the_papers():
    rows = published_for([], {"eval": {"tasks": ["xnli", "mlqa"]}})
    means = {(r.row, r.metric): round(sum(r.values.values()) / len(r.values), 1) for r in rows}
    assert means["MiniLM 12x384", "accuracy"] == 71.1
    assert means["MiniLM 6x384 with assistant", "accuracy"] == 68.0
    assert (means["MiniLM 12x384", "f1"], means["MiniLM 12x384", "exact"]) == (63.2, 44.7)
    assert (means["MiniLM 6x384 with assistant", "f1"], means["mBERT", "exact"]) == (53.7, 41.6)
    for row in rows:
        assert set(row.values) == set(task_of(row.task).sets)
        assert row.metric in task_of(row.task).metrics


@pytest.mark.parametrize(
    ("low", "cells"),
    [
        (0.01, "| +0.0200 | +0.0100 to +0.0300 | higher |"),
        (-0.01, "| +0.0200 | -0.0100 to +0.0300 |\n"),
    ],
)
def test_only_a_difference_whose_interval_excludes_zero_has_a_word(compared, low, cells):
    difference = {"difference": 0.02, "low": low, "high": 0.03}
    row = compared.comparisons[0].model_dump() | difference
    assert cells in markdown(made(evaluate_values(), comparisons=[row]))


def test_a_compression_has_points_lost_everywhere():
    chosen = "3x384-onnx-int8"
    worse = {"model": chosen, "baseline": "teacher", "task": "sst2", "set": ""}
    worse |= {"metric": "accuracy", "difference": -0.06, "low": -0.09, "high": -0.03}
    error = worse | {"metric": "mse", "difference": 0.02, "low": -0.01, "high": 0.05}
    better = worse | {"metric": "f1", "difference": 0.02, "low": 0.01, "high": 0.03}
    labels = ("negative", "positive", "mixed")
    report = made(
        compress_values(),
        comparisons=[worse, error, better],
        decisions=[decision(chosen, "teacher", labels)],
    )
    candidates, _, differences, classes, *_ = sections(report)
    assert candidates.columns[2] == "points lost (+), selection"
    assert [row[2] for row in candidates.rows] == ["", "+0.10", "+0.90"]
    assert (differences.title, differences.columns[3:5]) == (
        "Points lost",
        ["points lost (+)", "95% interval"],
    )
    assert [row[3:] for row in differences.rows] == [
        ["+6.00", "+3.00 to +9.00", "lost"],
        ["+2.00", "-1.00 to +5.00", ""],
        ["-2.00", "-3.00 to -1.00", "gained"],
    ]
    assert "5.00 points lost (95 % interval 2.00 to 8.00)" in classes.sentences[0]
    by_class = next(part for part in classes.parts[0].parts if part.title == "By class")
    assert by_class.columns[3] == "recall, points lost (+)"
    assert by_class.rows[0][3] == "+5.00 (+2.00 to +8.00)"


def test_selection_over_many_sets_keeps_to_their_means():
    of_sets = {f"{name}/accuracy": 0.5 for name in ("ar", "de", "en", "sw", "zh", "fr")}
    runs = [
        run_row(seed, 0.8) | {"metrics": {"accuracy": 0.5 + seed / 10} | of_sets} for seed in (0, 1)
    ]
    values = selection_values() | {
        "on": "the mean over all sets",
        "settings": {},
        "seed": 1,
        "runs": runs,
    }
    table = selection_section(Selection.model_validate(values))
    assert table.columns == ["settings", "seeds", "accuracy", ""]
    assert "report.json has the scores on every set." in table.note


def test_the_curve_of_a_run_stands_beside_the_runs_it_is_compared_with(values):
    def curve(last: float) -> list[dict[str, object]]:
        losses = {0: 5.0, 10: 1.0, 20: last}
        return [
            {"step": step, "loss": 1.0, "held_out": {"student": {"hard": loss}}}
            for step, loss in losses.items()
        ]

    values["models"]["student"] = model("peer")
    runs = {"standalone": curve(0.75)}
    first = report_pictures(made(values, curve=curve(0.5), compared_runs=runs))[0]
    ends = "together 1.0000 → 0.5000, standalone 1.0000 → 0.7500"
    assert first.caption == f"student: held-out loss against the labels, from step 10 on: {ends}."
    assert (
        "student"
        not in report_pictures(made(values, curve=curve(0.5)))[0].caption.partition(",")[0]
    )


@pytest.mark.filterwarnings("error")
def test_curve_of_a_student_that_equals_its_teacher(values):
    curve = [{"step": i, "loss": 0.0, "held_out": {"3x384": {"attention": 0.0}}} for i in range(3)]
    # A damaged log may lack a model or a term.
    curve += [{"step": 3, "loss": 0.0, "held_out": held} for held in ({}, {"3x384": {}})]
    assert "attention 0.000 → 0.000" in report_pictures(made(values, curve=curve))[0].caption


def test_confusion_has_shares_of_the_true_class():
    shown = matrix(Evaluation.model_validate(evaluation("m")), alone=True)
    assert shown.shades[0][1] == pytest.approx(40 / 428)
    empty = evaluation("m", confusion={"labels": ["a", "b"], "counts": [[0, 0], [1, 1]]})
    assert matrix(Evaluation.model_validate(empty), alone=True).shades[0] == [0.0, 0.0]


def test_long_texts_are_shortened_and_words_are_joined():
    (mistake,) = worst = evaluation("m")["worst"][:1]  # type: ignore[index]
    worst.append(mistake | {"texts": ["EU", "rejects", "German", "call"]})
    section = details(made(finetune_values(), evaluations=[evaluation("finetuned", worst=worst)]))
    (_, first, second), (_, joined) = section.parts[0].parts[-1].items
    assert first.endswith("very…")
    assert len(first) <= MAX_TEXT
    assert (second, joined) == ("second", "EU rejects German call")


def test_a_regression_has_neither_classes_nor_confusions():
    scored = evaluation(
        "finetuned", "stsb", metrics={"pearson": 0.88}, confusion=None, per_class={}, worst=[]
    )
    report = made(
        finetune_values(), evaluations=[scored], quality={"stsb": {"finetuned": {"pearson": 0.88}}}
    )
    absent = ["Confusion", "In detail"]
    assert missing(words(report), "0.8800", *absent) == absent
    assert "Classes" not in model_card(report, "finetuned", "AutoModelForSequenceClassification")


def test_distillation_with_scores(values):
    models = ("teacher", "6x384", "6x384 undistilled")
    values["models"]["6x384 undistilled"] = without_files("undistilled", "6x384")
    values["quality"]["sst2"] = {m: {"accuracy": 0.9} for m in models}
    report = made(values, evaluations=[evaluation(m) for m in models])
    assert [row[0] for row in scores(report)[0].rows] == list(models)
    assert "Teacher and student" in words(report)
    assert all("6x384 undistilled" in text for text in views(report))


def test_pairs_are_named_by_both_models(values):
    recipe = {
        "teacher": "6x128",
        "student": "3x128",
        "mode": "dml",
        "weights": [1, 1, 0.5, 0.5],
        "base": MODEL,
    }
    together = "trained together as 6x128 and 3x128, dml on sst2, weights 1:1:0.5:0.5"
    peers = {
        "teacher": model("peer", source=MODEL),
        "student": model("peer", layers=3, source=MODEL, made=together),
    }
    values |= {"command": "cotrain", "models": peers, "quality": {}, "latency": [], "curve": []}
    report = made(values, recipe=recipe | {"task": "sst2"})
    assert title(report) == "6x128 and 3x128, dml on sst2"
    assert not missing(
        model_card(report, "student"), f"{together[1:]}, it ", f"base_model: {MODEL}"
    )
    peers["student"] = model("peer", layers=3, source="org/frozen")
    peers["teacher"] = model("peer", source="org/frozen")
    frozen = made(values, recipe=recipe | {"community": {"model": "org/frozen"}})
    assert title(frozen) == "6x128 and 3x128, dml under org/frozen"
    assert "base_model: org/frozen" in model_card(frozen, "student")
