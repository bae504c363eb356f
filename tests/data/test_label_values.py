"""What the values of a label column mean: a class, several classes, or no label."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from reading import read_task

import kdcli
from kdcli.data.demo import demo_task
from kdcli.errors import UsageError
from kdcli.types import Head

QUIET = {"measure": {"latency": False}}
SETS = [["food"], ["price", "room"], ["food", "staff"], ["room"], ["staff"], ["price"]]


def write(folder, labels, name="train.csv"):
    """Write a row for each label, as CSV or as JSON."""
    file = folder / name
    rows = [{"text": f"words {n}", "label": label} for n, label in enumerate(labels)]
    if name.endswith("csv"):
        with file.open("w", encoding="utf-8", newline="") as opened:
            writer = csv.DictWriter(opened, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return file


# The labels, the classes that remain, and the value that is no class.
MISSING = {
    "-1 of SNLI": ([0, 1, 2] * 20 + [-1], "0 1 2", "-1"),
    "ratings from 1": ([1, 2, 3, 4, 5] * 12 + [-1], "1 2 3 4 5", "-1"),
    "ignore_index": ([0, 1] * 30 + [-100], "0 1", "-100"),
    "an unsigned byte": ([0, 1, 2] * 20 + [255], "0 1 2", "255"),
    "a survey's code": ([1, 2, 3] * 20 + [99], "1 2 3", "99"),
    "an unsigned integer": ([0, 1, 2] * 20 + [2**64 - 1], "0 1 2", str(2**64 - 1)),
    "two codes": ([0, 1, 2] * 20 + [-9, -99], "0 1 2", "-9"),
    "a word among numbers": (["0", "1"] * 30 + ["N/A"], "0 1", "N/A"),
    "nan among numbers": (["0", "1", "2"] * 20 + ["NaN"], "0 1 2", "NaN"),
    "null among numbers": (["0", "1"] * 30 + ["null"], "0 1", "null"),
    "pandas' word among numbers": (["0", "1"] * 30 + ["<NA>"], "0 1", "<NA>"),
    "-1 among words": (["bad", "good"] * 30 + ["-1"], "bad good", "-1"),
    "unknown among numbers": (["1", "2", "3"] * 20 + ["unknown"], "1 2 3", "unknown"),
}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize(("labels", "classes", "missing"), MISSING.values(), ids=MISSING)
def test_a_value_that_stands_for_no_label_is_no_class(tmp_path, labels, classes, missing, suffix):
    file = write(tmp_path, labels, f"train.{suffix}")
    with pytest.raises(UsageError) as error:
        read_task("own", file)
    place = str(next(n for n, label in enumerate(labels) if str(label) == missing))
    line = int(place) + (2 if suffix == "csv" else 1)
    assert f"{file}:{line}: 'label' of your data must be one of" in error.value.message
    assert "looks like a missing label" in error.value.hint
    assert "data.skip_bad=true" in error.value.hint
    log = []
    data = read_task("own", file, log, skip_bad=True)
    assert data.task.labels == tuple(classes.split())
    assert any(line.startswith(f"label {missing!r} (1 times, first in {file}:") for line in log)
    assert any(line.startswith("skipped ") for line in log)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([-1, 1] * 30, "-1 1"),
        ([-1, 0, 1] * 20, "-1 0 1"),
        ([-2, -1, 0, 1, 2] * 12, "-2 -1 0 1 2"),
        ([0, 255] * 30, "0 255"),
        (list(range(120)) * 4, " ".join(map(str, range(120)))),
        (["none", "some", "all"] * 20, "all none some"),
        (["nan", "deu"] * 30, "deu nan"),
    ],
)
def test_a_value_that_may_be_a_class_is_one(tmp_path, labels, classes):
    assert read_task("own", write(tmp_path, labels)).task.labels == tuple(classes.split())


def test_an_empty_cell_and_nan_are_missing_labels(tmp_path):
    for n, value in enumerate((None, float("nan"), "")):
        labels = ["0", "1"] * 30 if value == "" else [0.0, 1.0] * 30
        file = write(tmp_path, [*labels, value], f"rows{n}.jsonl")
        with pytest.raises(UsageError, match=f"rows{n}.jsonl:61: there is no label in 'label'"):
            read_task("own", file)


def test_a_score_that_may_be_missing_is_a_warning(tmp_path):
    log = []
    labels = [0.5, 1.5, 2.5, 3.0] * 20 + [-1.0]
    data = read_task("own", write(tmp_path, labels, "train.jsonl"), log)
    assert data.task.kind == "score"
    assert any(line.startswith("score '-1.0' (1 times, first in ") for line in log)
    file = write(tmp_path, [*labels, "NaN"], "other.csv")
    assert len(read_task("own", file, log, skip_bad=True).train) < len(labels)
    why = "looks like a missing label, so its rows cannot be used"
    assert f"score 'NaN' (1 times, first in {file}:83) {why}" in log


def test_words_with_the_label_to_ignore_are_neither_learned_nor_scored(tmp_path):
    tags = [["O", "B-A", -100], [-100, "O", "O"]] * 20
    rows = [{"tokens": ["a", "b", f"w{n}"], "tags": each} for n, each in enumerate(tags)]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    log = []
    data = read_task("own", file, log)
    assert data.task.labels == ("O", "B-A")
    assert {e.label for e in data.train} == {(0, 1, -100), (-100, 0, 0)}
    assert "40 words with the label -100 are ignored" in log[0]


FORMS = {
    "Python's repr": repr,
    "a tuple": lambda names: repr(tuple(names)),
    "JSON": json.dumps,
    "NumPy's repr": lambda names: "[" + " ".join(map(repr, names)) + "]",
    "pandas' repr": lambda names: f"array({names!r}, dtype=object)",
    "a frozen set": lambda names: repr(frozenset(names)),
    "no quotes": lambda names: "[" + ", ".join(names) + "]",
    "a set": lambda names: "{" + ", ".join(map(repr, names)) + "}",
    "a bar": "|".join,
    "a bar and spaces": " | ".join,
    "a semicolon": "; ".join,
    "a comma": ",".join,
    "a comma and a space": ", ".join,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_list_of_labels_in_a_cell_is_several_labels(tmp_path, form):
    sets = SETS * 10
    log = []
    data = read_task("own", write(tmp_path, map(form, sets)), log, training=False)
    assert (data.task.kind, data.task.labels) == ("multi", ("food", "price", "room", "staff"))
    names = [sorted(data.task.labels[n] for n in e.label) for e in data.sets[""]]
    assert names == sets
    assert any(line.startswith("'label' holds lists of labels ") for line in log)


@pytest.mark.parametrize(
    ("name", "cell"), [("a.csv", json.dumps), ("a.csv", repr), ("a.jsonl", lambda value: value)]
)
def test_choices_of_label_studio_are_labels_with_and_without_a_head(tmp_path, name, cell):
    """Its exports write one choice as a name, and several as an object."""
    names = ("food", "price", "room", "staff")
    labels = [each[0] if len(each) == 1 else cell({"choices": each}) for each in SETS * 10]
    file = write(tmp_path, labels, name)
    for head in (None, Head("multi", names)):
        data = read_task("own", file, head=head, training=False)
        assert (data.task.kind, data.task.labels) == ("multi", names)
        assert [[names[n] for n in e.label] for e in data.sets[""]] == SETS * 10


@pytest.mark.parametrize(
    ("form", "nothing"), [(FORMS["a bar"], "none"), (FORMS["a bar"], "[]"), (repr, "[]")]
)
def test_an_empty_list_in_a_cell_is_no_class(tmp_path, form, nothing):
    data = read_task("own", write(tmp_path, [*map(form, SETS * 10), nothing]), training=False)
    assert data.task.labels == ("food", "price", "room", "staff")
    assert data.sets[""][-1].label == ()


@pytest.mark.parametrize(
    "labels", [["Paris, FR", "Bonn, DE", "Rome, IT"], ["a|b", "c|d"], ["C", "C++", "(other)"]]
)
def test_names_with_separators_are_one_class_each(tmp_path, labels):
    data = read_task("own", write(tmp_path, labels * 20))
    assert (data.task.kind, set(data.task.labels)) == ("class", set(labels))


@pytest.mark.parametrize("separator", ["/", " & ", "+", "\n", "\t", " "])
def test_a_separator_that_names_may_hold_is_a_warning_with_the_way_to_lists(tmp_path, separator):
    file = write(tmp_path, map(separator.join, SETS * 10))
    log = []
    data = read_task("own", file, log)
    assert (data.task.kind, len(data.task.labels)) == ("class", len(SETS))
    shown = repr(separator.strip(" ") or separator)
    warning = f"20 labels that contain {shown} are each read as one class; if "
    (line,) = [line for line in log if line.startswith(warning)]
    assert "data.columns.kind=multi" in line
    data = read_task("own", file, training=False, columns={"kind": "multi"})
    names = [sorted(data.task.labels[n] for n in e.label) for e in data.sets[""]]
    assert names == SETS * 10


def test_names_with_separators_stay_whole_among_several_labels(tmp_path):
    labels = [["R&B"], ["R&B", "AC/DC"], ["AC/DC"], ["C++"]]
    file = write(tmp_path, map("|".join, labels * 15))
    assert read_task("own", file).task.labels == ("AC/DC", "C++", "R&B")
    log = []
    file = write(tmp_path, ["news/world", "news/local", "sport/ball", "C++"] * 15)
    assert read_task("own", file, log).task.kind == "class"
    assert not any("are each read as one class" in line for line in log)


@pytest.mark.parametrize("form", [list, json.dumps, repr])
def test_a_0_or_1_for_each_class_is_no_list_of_classes(tmp_path, form):
    labels = [form([n % 2, int(n % 3 == 0), int(n % 5 == 0)]) for n in range(60)]
    file = write(tmp_path, labels, "rows.jsonl")
    with pytest.raises(UsageError, match=r"rows.jsonl:1: 'label' holds a class twice") as error:
        read_task("own", file)
    assert "not a 0 or 1 for each class" in error.value.hint


def test_each_text_may_have_one_of_several_labels(tmp_path):
    file = write(tmp_path, ["a", "b"] * 30)
    data = read_task("own", file, columns={"kind": "multi"})
    assert {e.label for e in data.train} == {(0,), (1,)}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_lists_of_one_label_are_classes_for_a_head_that_has_classes(tmp_path, name):
    file, head = write(tmp_path, [["good"], ["bad"]] * 30, name), Head("class", ("good", "bad"))
    log = []
    data = read_task("own", file, log, head=head, training=False)
    assert (data.task.kind, [e.label for e in data.sets[""]]) == ("class", [0, 1] * 30)
    lists = "each list in 'label' holds one label"
    assert f"{lists}, which is read as the class of its text" in log
    several = read_task("own", file, head=head, training=False, columns={"kind": "multi"})
    assert several.task.kind == "multi"
    log = []
    assert read_task("own", file, log).task.kind == "multi"
    assert f"{lists}; if each text has one class, give --set data.columns.kind=class" in log


def test_the_kind_makes_lists_of_one_label_classes(tmp_path):
    file = write(tmp_path, [["good"], ["bad"]] * 30, "a.jsonl")
    data = read_task("own", file, columns={"kind": "class"})
    assert (data.task.kind, data.task.labels) == ("class", ("bad", "good"))
    assert {e.label for e in data.train} == {0, 1}


def test_a_0_and_a_1_for_each_of_two_classes_are_refused(tmp_path):
    file = write(tmp_path, [[0, 1], [1, 0]] * 30, "a.jsonl")
    with pytest.raises(UsageError) as caught:
        read_task("own", file, head=Head("class", ("bad", "good")), training=False)
    assert "not a 0 or 1 for each class" in caught.value.hint


def test_equal_lists_in_strings_teach_nothing(tmp_path):
    file = write(tmp_path, ["['a', 'b']", "['b', 'a']"] * 30)
    with pytest.raises(UsageError, match="nothing to learn"):
        read_task("own", file)


def test_percentages_are_refused(tmp_path):
    file = write(tmp_path, ["0%", "50 %", "99.5%"] * 20)
    with pytest.raises(UsageError, match=r"train.csv:2: the label '0%' in 'label' may be a number"):
        read_task("own", file)
    assert read_task("own", file, columns={"kind": "class"}).task.kind == "class"


# A head with one output cannot tell which of two labels its output stands for.
DETECTOR = Head("score", ("spam",))
TWO_LABELS = ([0, 1], ["0", "1"], [0.0, 1.0], [-1, 1], ["ham", "spam"], [True, False])


@pytest.mark.parametrize("head", [DETECTOR, Head("score"), Head("multi", ("spam",))])
@pytest.mark.parametrize("labels", TWO_LABELS, ids=repr)
def test_one_output_does_not_decide_between_two_labels(tmp_path, labels, head):
    file = write(tmp_path, labels * 30, "rows.jsonl")
    places = rf"two labels: .* \({file}:1\) and .* \({file}:2\)"
    for training in (True, False):
        with pytest.raises(UsageError, match=places) as error:
            read_task("own", file, training=training, head=head)
        assert ('[] or ["spam"]' in error.value.hint) == bool(head.labels)
        assert ("data.columns.kind=score" in error.value.hint) == (head.kind == "score")


def test_a_detector_decides_what_lists_hold_and_scores_what_numbers_say(tmp_path):
    lists = write(tmp_path, [[], ["spam"]] * 30, "lists.jsonl")
    task = read_task("own", lists, training=False, head=DETECTOR).task
    assert (task.kind, task.labels) == ("multi", ("spam",))
    numbers = write(tmp_path, [0, 1] * 30, "numbers.jsonl")
    as_score = {"columns": {"kind": "score"}, "training": False, "head": DETECTOR}
    assert read_task("own", numbers, **as_score).task.kind == "score"


def test_two_outputs_with_one_name_are_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(Path(kdcli.__file__).parent / "data" / "demo_classifier", model)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["id2label"]["2"] = "topic-0"
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    file = write(tmp_path, ["topic-0", "topic-1"] * 30)
    with pytest.raises(UsageError, match="outputs 0 and 2 the same name, 'topic-0'") as error:
        kdcli.evaluate(model, data=file, config=QUIET, output_dir=tmp_path / "out")
    assert "config.json" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_rows_that_an_annotator_did_not_accept_are_bad(tmp_path):
    answers = ["accept", "reject", "ignore"]
    rows = [
        {"text": f"words {n}", "label": "ab"[n // 3 % 2], "answer": answers[n % 3]}
        for n in range(60)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row | {"_input_hash": 7}) for row in rows), "utf-8")
    with pytest.raises(UsageError, match="40 of 60 rows cannot be used") as error:
        read_task("own", file)
    assert f"{file}:2: the annotator's answer is not 'accept', but 'reject'" in error.value.message
    data = read_task("own", file, training=False, skip_bad=True)
    assert len(data.sets[""]) == 20
    columns = {"label": "answer"}
    assert read_task("own", file, columns=columns).task.labels == ("accept", "ignore", "reject")
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert len(read_task("own", file, training=False).sets[""]) == 60


def test_evaluated_rows_without_text_are_a_warning(tmp_path):
    file = tmp_path / "rows.csv"
    rows = "".join(f"{' ' if n in (3, 7) else f'words {n}'},{'ab'[n % 2]}\n" for n in range(60))
    file.write_text(f"text,label\n{rows}", "utf-8")
    log = []
    notes = read_task("own", file, log, training=False).notes
    warning = f"2 evaluated rows without any text: {file}:5, {file}:9"
    assert warning in log
    assert warning in notes


def test_a_column_of_splits_is_a_warning(tmp_path):
    rows = "".join(f"words {n},{'ab'[n % 2]},{('Train', 'dev')[n % 3 == 0]}\n" for n in range(60))
    file = tmp_path / "rows.csv"
    file.write_text(f"text,label,part\n{rows}", "utf-8")
    log = []
    read_task("own", file, log)
    assert any(
        line.startswith("warning: column 'part' holds dev, Train, but all rows are") for line in log
    )


def test_the_kind_decides_whether_a_cell_is_a_list(tmp_path):
    several = {"columns": {"kind": "multi"}}
    file = write(tmp_path, ["a|b", "c|d", "a"] * 20)
    assert read_task("own", file, **several).task.labels == ("a", "b", "c", "d")
    assert read_task("own", file).task.kind == "class"
    one = {"columns": {"kind": "class"}}
    file = write(tmp_path, map("|".join, SETS * 10))
    assert "price|room" in read_task("own", file, **one).task.labels


def write_scores(folder, scores, column="score"):
    """Write a row for each score, as spreadsheets do where the decimal sign is a comma."""
    file = folder / "train.csv"
    rows = (f"words {n};{score}\n" for n, score in enumerate(scores))
    file.write_text(f"text;{column}\n{''.join(rows)}", "utf-8")
    return file


def test_decimal_commas_in_other_columns_than_scores_are_refused(tmp_path):
    file = write_scores(tmp_path, ["0,5", "1,5", "2", "3,5"] * 20, "label")
    with pytest.raises(UsageError, match=r"train.csv:2: the label '0,5' in 'label' may be a num"):
        read_task("own", file)
    assert read_task("own", file, columns={"kind": "score"}).task.kind == "score"


def test_decimal_commas_are_read_if_all_scores_have_them(tmp_path):
    data = read_task("own", write_scores(tmp_path, ["4,2", "3,667", "5"] * 20), training=False)
    assert [example.label for example in data.sets[""]][:3] == [4.2, 3.667, 5.0]
    (tmp_path / "validation.jsonl").write_text('{"text": "words", "score": "4.2"}\n', "utf-8")
    with pytest.raises(UsageError, match=r"jsonl:1: .* finite number, got '4\.2'") as caught:
        read_task("own", tmp_path)
    assert "such as 4,2" in caught.value.hint


UNCLEAR = {
    "4,2 3.75": r":2: the number in 'score' has a decimal comma, but the one at .*:3 has a point",
    "1,234 2,345 7": ":2: the number in 'score' has a comma that may separate thousands",
    "4.2/5 3/5": ":2: the label '4.2/5' in 'score' may be a number",
}


@pytest.mark.parametrize(("scores", "problem"), UNCLEAR.items())
def test_numbers_that_can_be_read_in_two_ways_are_refused(tmp_path, scores, problem):
    file = write_scores(tmp_path, scores.split() * 20)
    with pytest.raises(UsageError, match=problem):
        read_task("own", file)


def test_numbers_are_no_classes_of_a_file_with_names(tmp_path):
    """Their order is that of the alphabet, in which `fake` comes before `real`."""
    write(tmp_path, ["real", "fake"] * 30)
    write(tmp_path, ["0", "1"], "validation.csv")
    with pytest.raises(UsageError, match="must be one of fake, real, got '0'"):
        read_task("own", tmp_path)


@pytest.mark.parametrize("other", ["pos\u200b", "pos ", "pos\u00a0"])
def test_labels_that_look_the_same_are_named(tmp_path, other):
    file = write(tmp_path, ["pos", "neg", other] * 20)
    with pytest.raises(UsageError, match="is spelled 'pos' at "):
        read_task("own", file)


def test_a_file_follows_the_spelling_of_the_training_file(tmp_path):
    write(tmp_path, [1.0, 0.0] * 30, "train.jsonl")
    rows = "".join(f"other {n},{1 - n % 2}\n" for n in range(10))
    (tmp_path / "validation.csv").write_text("text,label\n" + rows, "utf-8")
    data = read_task("own", tmp_path)
    assert data.task.labels == ("0.0", "1.0")
    assert [e.label for e in data.sets[""]] == [1, 0] * 5


# The classes of a model decide, whichever of them a file has.
HEAD = Head("class", ("NEGATIVE", "NEUTRAL", "POSITIVE"))
UNNAMED = Head("class", ("LABEL_0", "LABEL_1", "LABEL_2"), named=False)


@pytest.mark.parametrize(
    ("labels", "head", "classes", "account"),
    [
        (["positive", "negative"], HEAD, HEAD.labels, ("head", "name", {})),
        (["POSITIVE", "POSITIVE"], HEAD, HEAD.labels, ("head", "name", {})),
        ([0, 2], HEAD, HEAD.labels, ("head", "number", {"0": "NEGATIVE", "2": "POSITIVE"})),
        ([0, 1], UNNAMED, ("0", "1", "2"), ("values", "number", {})),
        (["a", "b", "c"], UNNAMED, ("a", "b", "c"), ("values", "order", {})),
        (["a", "b"], None, ("a", "b"), ("values", "name", {})),
    ],
)
def test_the_account_of_the_labels(tmp_path, labels, head, classes, account):
    log = []
    file = write(tmp_path, labels * 20, "rows.jsonl")
    task = read_task("own", file, log, training=False, head=head).task
    assert task.labels == classes
    found = task.account
    assert (found.names_from, found.mapping, dict(found.numbers)) == account
    (line,) = [line for line in log if line.startswith("classes of your data: ")]
    assert all(name in line for name in classes)


def test_a_report_has_the_account_of_the_labels_whichever_are_present(tmp_path):
    examples = [e for e in demo_task("demo-topic", "validation") if e.label == 0][:40]
    rows = [{"text": e.text, "label": e.label} for e in examples]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    result = kdcli.evaluate("demo-classifier", data=file, config=QUIET, output_dir=tmp_path / "out")
    (evaluation,) = result.report.evaluations
    classes = evaluation.classes
    assert list(classes.names) == [f"topic-{n}" for n in range(6)]
    assert (classes.names_from, classes.mapping) == ("head", "number")
    assert classes.numbers == {"0": "topic-0"}
    # The model decides what is measured, not the file.
    assert list(evaluation.metrics) == ["accuracy", "macro_f1"]


def test_whole_numbers_are_scores_for_a_model_that_predicts_scores(tmp_path):
    file = write(tmp_path, [0, 1, 2, 3, 4, 5] * 10, "rows.jsonl")
    task = read_task("own", file, training=False, head=Head("score")).task
    assert (task.kind, task.metrics) == ("score", ("pearson", "spearman", "mse"))


def test_numbers_in_another_order_are_a_warning_with_the_map_that_helps(tmp_path):
    order = [2, 0, 1, 5, 3, 4]
    examples = demo_task("demo-topic", "validation")[:120]
    rows = [{"text": e.text, "label": order[e.label]} for e in examples]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    options = {"data": file, "output_dir": tmp_path / "out", "overwrite": True}
    report = kdcli.evaluate("demo-classifier", config=QUIET, **options).report
    assert report.evaluations[0].metrics["accuracy"] < 0.5
    (note,) = [note for note in report.notes if "may be in another order" in note]
    assert f"with head.label_map='{order}' the accuracy would be 1.000" in note
    with_map = QUIET | {"head": {"label_map": order}}
    report = kdcli.evaluate("demo-classifier", config=with_map, **options).report
    assert report.evaluations[0].metrics["accuracy"] == 1.0
    assert list(report.evaluations[0].classes.names) == [str(n) for n in range(6)]


def test_other_names_are_refused_with_both_and_the_map(tmp_path):
    examples = demo_task("demo-topic", "validation")[:60]
    rows = [{"text": e.text, "label": f"t{e.label}"} for e in examples]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    wanted = r"it predicts topic-0, .*, but your data has t\d, t"
    with pytest.raises(UsageError, match=wanted) as error:
        kdcli.evaluate("demo-classifier", data=file, config=QUIET, output_dir=tmp_path / "out")
    assert "--set head.label_map='[0, 1, 2, 3, 4, 5]'" in error.value.hint


NAMED = [{"text": f"words {n}", "label": n % 3, "label_text": "abc"[n % 3]} for n in range(60)]


def test_a_column_that_names_the_numbers_of_the_label_is_told(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, NAMED)), "utf-8")
    log = []
    assert read_task("own", file, log).task.labels == ("0", "1", "2")
    (said,) = [line for line in log if "label_text" in line and "names" in line]
    assert said.startswith("column 'label_text' names the classes (0 a, 1 b, 2 c); use these names")


@pytest.mark.parametrize(("labels", "fits"), [("abc", True), ("acb", False)])
def test_numbers_whose_names_are_others_in_the_head_are_refused(tmp_path, labels, fits):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, NAMED)), "utf-8")
    head = Head("class", tuple(labels), named=True)
    if fits:
        assert read_task("own", file, head=head).task.account.numbers == {
            "0": "a",
            "1": "b",
            "2": "c",
        }
        return
    why = r"class 1 of 'label' is 'b' in column 'label_text', but 'c' in the head of the model"
    with pytest.raises(UsageError, match=why) as error:
        read_task("own", file, head=head)
    assert "data.columns.label=label_text" in error.value.hint
    names = read_task("own", file, head=head, columns={"label": "label_text"})
    assert names.task.account.mapping == "name"
