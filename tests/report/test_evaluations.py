"""Reports of fine-tuned and evaluated models: what every view of them says."""

from __future__ import annotations

import json
import re

import pytest
from reports import HOSTILE, card, evaluate_values, evaluation, finetune_values, run_row, selection_values
from test_views import Page, front_matter, shown

from kdcli.report.build import html, write_views
from kdcli.report.markdown import markdown
from kdcli.report.pictures.curves import pictures
from kdcli.report.schema import Evaluation, Report, Selection
from kdcli.report.sections.evaluations import (
    MEAN,
    MOST_LABELS,
    MOST_TEXT,
    comparisons,
    matrix,
    per_class,
    scores,
    worst,
)
from kdcli.report.sections.selection import run_table, setting_table
from kdcli.report.views import model_card, overview, title

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def words(report: Report) -> str:
    """What the page says, its style sheet and pictures aside."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", "", html(report), flags=re.S)
    return " ".join(" ".join(Page(text).text).split())


def test_titles(finetuned, compared, tmp_path):
    assert title(finetuned) == f"{MODEL} on sst2"
    assert title(compared) == "bert-base-uncased, all-MiniLM-L6-v2 on sst2"
    (tmp_path / "mine").mkdir()
    values = finetune_values() | {"recipe": {"model": str(tmp_path / "mine"), "task": "sst2"}, "evaluations": []}
    assert title(Report.model_validate(values)) == "mine on sst2"


@pytest.mark.parametrize("kind", ["finetuned", "grid", "labels", "compared", "languages"])
def test_every_view_is_written_and_speaks_of_no_teacher(request, tmp_path, kind):
    report = request.getfixturevalue(kind)
    write_views(tmp_path, report)
    assert Report.model_validate_json((tmp_path / "report.json").read_text("utf-8")) == report
    for text in (words(report), markdown(report), shown(report)):
        assert title(report) in " ".join(text.split())
        assert not re.search("teacher|student|undistilled", text, re.I)
        for one in report.evaluations:
            assert one.split in text
            assert f"{one.n}" in text


@pytest.mark.parametrize("kind", ["finetuned", "grid", "labels", "compared", "languages"])
def test_pages_load_and_run_nothing(request, kind):
    page = Page(html(request.getfixturevalue(kind)))
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset", "action")]


def test_facts_of_one_model_and_of_two(finetuned, compared, languages):
    text = words(finetuned)
    for fact in ("0.9174 accuracy on sst2", "90.9 MB on disk", "10.0 ms 1 × 128 tokens"):
        assert fact in text
    assert "In short" not in text
    text = words(compared)
    assert "In short, for all-MiniLM-L6-v2: 0.91 accuracy on sst2; bert-base-uncased 0.93" in text
    assert "90.9 MB on disk; bert-base-uncased 438.0 MB" in text
    assert "0.89 accuracy on xnli (mean of 5 sets); bert-base-uncased 0.91" in words(languages)


def test_facts_of_a_model_that_was_not_judged():
    values = finetune_values() | {"evaluations": [], "latency": [], "training": None, "quality": {}, "curve": []}
    report = Report.model_validate(values)
    assert "90.9 MB on disk" in words(report)
    assert f"{MODEL} on sst2" in shown(report)
    assert "AutoModelForSequenceClassification" in model_card(report, "finetuned", "AutoModelForSequenceClassification")


def test_a_teacher_alone_has_no_facts_to_divide_by(values):
    values["models"] = {"teacher": card()}
    report = Report.model_validate(values)
    assert "438.0 MB on disk" in words(report)
    assert title(report) == "google-bert/bert-base-uncased"


def test_columns_of_quality_are_short():
    of = {"accuracy": 0.9, "f1": 0.8}
    quality = {
        "sst2": {"finetuned": {"accuracy": 0.9}},
        "mrpc": {"finetuned": of},
        "cola": {"finetuned": {"matthews": 0.5}},
    }
    header, _ = overview(Report.model_validate(finetune_values() | {"quality": quality}))
    assert header[-4:] == ["sst2", "mrpc accuracy", "mrpc f1", "cola matthews"]


def test_scores_of_one_set_are_a_row_a_model(compared):
    (listing,) = scores(compared)
    assert listing.title == "sst2"
    assert listing.header == ["model", "accuracy", "f1", "examples", "split"]
    assert listing.rows == [
        ["bert-base-uncased", "0.93", "0.93", "872", "validation"],
        ["all-MiniLM-L6-v2", "0.91", "0.91", "872", "validation"],
    ]
    assert [row[0] for row in scores(compared, "all-MiniLM-L6-v2")[0].rows] == ["all-MiniLM-L6-v2"]


def test_scores_of_several_sets_are_a_row_a_set_and_their_mean(languages):
    (listing,) = scores(languages)
    assert [row[0] for row in listing.rows] == ["ar", "de", "en", "sw", "zh", MEAN]
    assert listing.header[1:3] == ["accuracy, bert-base-uncased", "accuracy, all-MiniLM-L6-v2"]
    assert listing.rows[0][1:3] == ["0.93", "0.91"]
    assert listing.rows[-1][1:3] == ["0.91", "0.89"]
    (alone,) = scores(languages, "all-MiniLM-L6-v2")
    assert alone.header[:3] == ["set", "accuracy", "f1"]
    header, _ = overview(languages)
    assert not [name for name in header if name.startswith("xnli")], "a table of its own is enough for many sets"
    header, _ = overview(Report.model_validate(evaluate_values(("matched", "mismatched"), "mnli")))
    assert "mnli matched accuracy" in header


def test_one_metric_of_several_models_is_a_column_a_model():
    values = evaluate_values(("de", "en"), "xnli")
    values["evaluations"] = [e | {"metrics": {"accuracy": 0.5}} for e in values["evaluations"]]
    (listing,) = scores(Report.model_validate(values))
    assert (listing.title, listing.header[:3]) == (
        "xnli, accuracy",
        ["set", "bert-base-uncased", "all-MiniLM-L6-v2"],
    )


def test_no_mean_where_a_set_is_missing():
    values = evaluate_values(("de", "en"), "xnli")
    values["evaluations"] = values["evaluations"][:-1]
    (listing,) = scores(Report.model_validate(values))
    assert listing.rows[-1][1:3] == ["0.925", ""]


def test_differences(compared):
    listing = comparisons(compared)
    assert listing is not None
    assert listing.rows == [
        ["sst2 accuracy", "all-MiniLM-L6-v2", "bert-base-uncased", "-0.0200", "-0.0312 to -0.0088", "lower"],
        ["sst2 f1", "all-MiniLM-L6-v2", "bert-base-uncased", "-0.0200", "-0.0412 to +0.0012", ""],
    ]
    for text in (words(compared), markdown(compared), shown(compared)):
        assert "-0.0312 to -0.0088" in text
        assert "excludes 0" in text
    values = evaluate_values()
    values["comparisons"] = [values["comparisons"][0] | {"difference": 0.02, "low": 0.01, "high": 0.03}]
    listing = comparisons(Report.model_validate(values))
    assert listing is not None
    assert listing.rows[0][3:] == ["+0.0200", "+0.0100 to +0.0300", "higher"]


def test_selection_by_setting(grid):
    assert grid.selection is not None
    listing = setting_table(grid.selection)
    assert listing.header == ["lr", "seeds", "accuracy", "f1", ""]
    assert listing.rows[1] == ["3e-05", "0, 1", "0.93 ± 0.014", "0.83 ± 0.014", "chosen"]
    assert listing.rows[3] == ["0.0003", "0", "0.5", "0.4", ""], "no deviation of a single seed"
    assert listing.marked == 1
    assert "one was chosen by accuracy (validation; mean over its seeds)" in listing.note
    every = run_table(grid.selection)
    assert [row[0] for row in every.rows].count("3e-05") == 2
    assert every.marked == 3
    for text in (words(grid), markdown(grid), shown(grid)):
        assert "0.93 ± 0.014" in text
        assert "a little optimistic" in " ".join(text.split())
    assert "Every run" in words(grid)
    assert "Every run" not in shown(grid)


def test_selection_by_seed_alone():
    selection = Selection.model_validate(
        selection_values() | {"settings": {}, "seed": 1, "runs": [run_row(0, 0.8), run_row(1, 0.9)]}
    )
    listing = setting_table(selection)
    assert listing.rows == [["as in the recipe", "0, 1", "0.85 ± 0.071", "0.75 ± 0.071", "chosen"]]
    assert listing.note.startswith("Of 2 runs, seed 1 was chosen by accuracy (validation).")


def test_selection_over_many_sets_keeps_to_their_means():
    of_sets = {f"{name}/accuracy": 0.5 for name in ("ar", "de", "en", "sw", "zh", "fr")}
    runs = [run_row(seed, 0.8) | {"metrics": {"accuracy": 0.5 + seed / 10} | of_sets} for seed in (0, 1)]
    values = selection_values() | {"on": "the mean over all sets", "settings": {}, "seed": 1, "runs": runs}
    listing = setting_table(Selection.model_validate(values))
    assert listing.header == ["settings", "seeds", "accuracy", ""]
    assert "The sets one by one: report.json." in listing.note


def test_pictures_of_training_and_of_a_grid(finetuned, grid, compared):
    captions = [p.caption for p in pictures(grid)]
    assert captions[0].startswith("Loss over 200 steps")
    assert "loss 0.6 → 0.2" in captions[0]
    assert captions[1] == "On the validation set while training: accuracy 0.5 → 0.9, f1 0.4 → 0.8."
    assert captions[2].startswith(
        "accuracy over lr, mean ± sample standard deviation over seeds: 1e-05 0.905 ± 0.0071;"
    )
    assert captions[2].endswith("0.0003 0.5.")
    assert len(pictures(finetuned)) == 2
    assert pictures(compared) == []
    assert pictures(grid) == pictures(grid)


@pytest.mark.parametrize(
    "runs",
    [
        [run_row(0, 0.8, lr=1e-5), run_row(1, 0.9, lr=1e-5)],
        [run_row(0, 0.8, lr=1e-5, epochs=1), run_row(0, 0.9, lr=3e-5, epochs=3)],
        [run_row(0, 0.8, head="a"), run_row(0, 0.9, head="b")],
        [run_row(0, 0.8, lr=1e-5), run_row(0, 0.9)],
    ],
)
def test_no_picture_of_settings_that_have_no_order(runs):
    values = finetune_values() | {"selection": selection_values() | {"runs": runs}}
    assert len(pictures(Report.model_validate(values))) == 2


def test_confusion_has_shares_of_the_true_class():
    shown_matrix = matrix(Evaluation.model_validate(evaluation("m")))
    assert shown_matrix is not None
    assert [[cell.count for cell in row] for row in shown_matrix.rows] == [[388, 40], [32, 412]]
    assert shown_matrix.rows[0][1].share == pytest.approx(40 / 428)
    assert [[cell.right for cell in row] for row in shown_matrix.rows] == [[True, False], [False, True]]
    assert shown_matrix.note == ""
    empty = evaluation("m", confusion={"labels": ["a", "b"], "counts": [[0, 0], [1, 1]]})
    shown_matrix = matrix(Evaluation.model_validate(empty))
    assert shown_matrix is not None
    assert [cell.share for cell in shown_matrix.rows[0]] == [0.0, 0.0]


def test_confusion_of_many_labels_shows_those_with_most_errors(labels):
    shown_matrix = matrix(labels.evaluations[0])
    assert shown_matrix is not None
    assert len(shown_matrix.labels) == len(shown_matrix.rows) == MOST_LABELS
    # Label i is missed i times and named i - 1 times for another; the last one is taken for the first.
    assert [int(label[-3:]) for label in shown_matrix.labels] == [0, *range(38, 77)]
    assert "Of 77 classes the 40 with the most errors" in words(labels)
    for text in (markdown(labels), shown(labels)):
        assert "card_payment_reason" not in text


def test_details_of_an_evaluation(finetuned):
    text, written = words(finetuned), markdown(finetuned)
    for fact in ("finetuned on sst2 (validation, 872 examples): accuracy 0.9174", "0.9238", "badness 7.5", "example 0"):
        assert fact in text
        assert fact in written
    assert "| negative | 388 | 40 |" in written
    assert "412" in shown(finetuned)
    assert "strange" not in shown(finetuned)
    assert written.count("strange") == 5
    assert "--share:41%" in html(finetuned)


def test_long_texts_are_shortened():
    mistakes = worst(Evaluation.model_validate(evaluation("m")))
    assert len(mistakes[0].texts[0]) <= MOST_TEXT
    assert mistakes[0].texts[0].endswith("very…")
    assert mistakes[0].texts[1] == "second text"
    words_of_one = evaluation("m")["worst"][0] | {"texts": ["EU", "rejects", "German", "call"]}  # type: ignore[index]
    of_tokens = Evaluation.model_validate(evaluation("m", worst=[words_of_one]))
    assert worst(of_tokens)[0].texts == ["EU rejects German call"]


def test_a_regression_has_neither_classes_nor_confusions():
    values = finetune_values()
    values["evaluations"] = [
        evaluation("finetuned", "stsb", metrics={"pearson": 0.88}, confusion=None, per_class={}, worst=[])
    ]
    report = Report.model_validate(values)
    assert matrix(report.evaluations[0]) is None
    assert per_class(report.evaluations[0]) is None
    assert "0.88 pearson on stsb" in words(report)
    assert "Confusion" not in words(report)
    assert "Classes" not in model_card(report, "finetuned", "AutoModelForSequenceClassification")


def test_distillation_with_scores(values):
    models = ("teacher", "6x384", "6x384 undistilled")
    values["evaluations"] = [evaluation(m) for m in models]
    values["quality"]["sst2"] = {m: {"accuracy": 0.9} for m in models}
    report = Report.model_validate(values)
    assert [row[0] for row in scores(report)[0].rows] == list(models)
    assert "Teacher and student" in words(report)
    for text in (words(report), markdown(report), shown(report)):
        assert "6x384 undistilled" in text


def test_undistilled_is_explained_with_and_without_an_assistant(values):
    assert "started in the same way and not trained." in words(Report.model_validate(values))
    models = values["models"]
    values["models"] = {"teacher": models["teacher"], "assistant": card(hidden=384), "3x384": models["3x384"]}
    assert "not trained; the notes say from which model." in words(Report.model_validate(values))
    values["recipe"] = {"task": "sst2"}
    report = Report.model_validate(values)
    assert "started in the same way and fine-tuned without a teacher." in words(report)
    assert title(report).endswith("3x384 on sst2")


@pytest.mark.parametrize(
    ("auto_class", "pipeline"),
    [
        ("AutoModelForSequenceClassification", "text-classification"),
        ("AutoModelForTokenClassification", "token-classification"),
        ("AutoModelForQuestionAnswering", "question-answering"),
    ],
)
def test_card_of_a_finetuned_model(grid, auto_class, pipeline):
    text = model_card(grid, "finetuned", auto_class)
    assert front_matter(text) == {
        "library_name": "transformers",
        "tags": ["kdcli", "finetune", "bert"],
        "pipeline_tag": pipeline,
        "base_model": MODEL,
    }
    for part in (
        f"from transformers import {auto_class}, AutoTokenizer",
        f"model = {auto_class}.from_pretrained",
        f"fine-tuned from {MODEL} on sst2: 200 steps",
        "Classes: negative, positive.",
        "| finetuned | 0.9174 | 872 | validation |",
        "a little optimistic",
        "kdcli finetune --recipe",
    ):
        assert part in text
    assert "no task head" not in text
    assert "distilled" not in text


def test_card_of_a_finetuned_model_keeps_directories_to_itself(tmp_path):
    folder = tmp_path / "somebody" / "mine"
    folder.mkdir(parents=True)
    report = Report.model_validate(finetune_values() | {"recipe": {"model": str(folder), "task": "sst2"}})
    text = model_card(report, "finetuned", "AutoModelForSequenceClassification")
    assert "fine-tuned from mine on sst2" in text
    assert "somebody" not in text
    assert "base_model" not in front_matter(text)


def test_hostile_names_stay_text(hostile):
    page = Page(html(hostile))
    styles = [value for name, value in page.attributes if name == "style"]
    assert styles
    assert HOSTILE in [value for name, value in page.attributes if name == "title"]
    allowed = re.compile(r"--share:\d+%|[^<>]*")
    assert all(allowed.fullmatch(style) for style in styles)
    assert "](" not in markdown(hostile)
    values = json.loads(hostile.to_json())
    values["evaluations"][0]["worst"][0]["texts"] = ["![x](http://example.org/x.png)", "a \\| b"]
    written = markdown(Report.model_validate(values))
    assert "![x](" not in written
    assert "!\\[x\\](http" in written
    assert "a \\\\\\| b" in written


def test_markdown_of_many_evaluations_stays_short(languages):
    assert "Confusion matrices, scores by class and the worst examples stand in report.html." in markdown(languages)
    assert "strange" not in markdown(languages)
    assert words(languages).count("Worst examples") == 10
