"""What a report shows of a model next to its baseline, class by class and row by row."""

import pytest
from reports import decision, evaluate_values, made, missing, model, printed, words

from kdcli.report.sections.decision import decision_section, worst_class
from kdcli.report.text import View
from kdcli.report.views import markdown

BASELINE, MODEL = "bert-base-uncased", "all-MiniLM-L6-v2"
LABELS = ("negative", "positive", "mixed")


def report_with(**changes):
    return made(evaluate_values(), decisions=[decision(MODEL, BASELINE, LABELS, **changes)])


def parts_of(report):
    section = decision_section(report)
    (each,) = section.parts
    return {part.title: part for part in each.parts if part.rows or part.items}


def test_texts_are_in_html_only():
    report = report_with()
    assert missing(words(report), "a film of which", "nobody heard", "0.1250 → 0.8750") == []
    for text in (markdown(report), printed(report)):
        assert "nobody heard" not in text
    assert "Also in report.html: Rows that differ most." in markdown(report)


def test_a_class_that_gains_is_no_worst_class():
    (each,) = report_with().decisions
    gaining = each.model_copy(update={"classes": each.classes[1:2]})
    assert worst_class(gaining, lost=False) == (
        f"{MODEL} on sst2: no class with enough rows loses recall against {BASELINE}."
    )
    assert worst_class(each.model_copy(update={"classes": each.classes[2:]}), lost=False) == ""


def test_confusion_with_the_baseline():
    part = parts_of(report_with())[f"Classes of {BASELINE} and {MODEL}"]
    assert part.shades[0] == pytest.approx([100 / 141, 41 / 141, 0])
    # With many classes, the largest cells are listed instead.
    part = parts_of(report_with(confusion=None))[f"Classes of {BASELINE} and {MODEL}"]
    assert part.rows == [["negative", "positive", "41"]]


def test_without_labels_the_values_are_agreement():
    report = report_with(reference="teacher")
    assert "agreement 0.8800" in printed(report)
    for name in ("By class", "Calibration", "Thresholds"):
        note = parts_of(report)[name].note
        assert f"The labels are the predictions of {BASELINE}: no labels were read." in note
        assert "The labels come from the data." in parts_of(report_with())[name].note
    assert "how sure the model is that both agree" in words(report)


def test_rows_that_also_chose_the_model_are_named():
    assert "also chose the model" in words(report_with(chosen_on_these_rows=True))


def test_many_comparisons_have_details_in_html_only():
    models = {"base": model("baseline")} | {f"m{i}": model("candidate", "base") for i in range(7)}
    decisions = [decision(name, "base", LABELS) for name in list(models)[1:]]
    values = evaluate_values() | {"evaluations": [], "comparisons": [], "quality": {}}
    report = made(values, models=models, decisions=decisions)
    section = decision_section(report)
    assert {part.least for part in section.parts} == {View.HTML}
    assert len(section.sentences) == 14


def test_of_several_sets_the_worst_one_has_a_sentence():
    decisions = [decision(MODEL, BASELINE, LABELS, set=name) for name in ("en", "de", "fr")]
    worse = {"baseline": 0.9, "model": 0.8, "low": -0.12, "high": -0.08}
    decisions[1]["classes"][1]["metrics"] = {"recall": worse}
    report = made(evaluate_values(), decisions=decisions)
    section = decision_section(report)
    assert section.sentences == [
        f"{MODEL} on sst2 de: the worst class is positive (400 rows): recall 0.8000, {BASELINE} "
        "0.9000, difference -0.1000 (95 % interval -0.1200 to -0.0800)."
    ]
    assert "not enough rows to tell" not in printed(report)
    assert markdown(report).count(f"{MODEL}: not enough rows to tell") == 3


def test_a_report_without_decisions_has_no_section():
    assert "Class by class" not in words(made(evaluate_values()))


def test_calibration_explains_only_the_temperatures_that_the_table_has():
    report = report_with()
    (each,) = report.decisions
    none = {
        name: one.model_copy(update={"temperature": None, "scaled_error": None})
        for name, one in each.calibration.items()
    }
    without = each.model_copy(update={"calibration": none})
    note = parts_of(report.model_copy(update={"decisions": [without]}))["Calibration"].note
    assert "The temperature divides" not in note
    assert f"No temperature for {BASELINE} and {MODEL}: " in note
    note = parts_of(report)["Calibration"].note
    assert "The temperature divides the logits." in note
    assert "is below 0.1" not in note
    low = {MODEL: each.calibration[MODEL].model_copy(update={"temperature": 0.016})}
    nearly = each.model_copy(update={"calibration": low})
    note = parts_of(report.model_copy(update={"decisions": [nearly]}))["Calibration"].note
    assert f"The temperature of {MODEL} is below 0.1: nearly every prediction" in note
