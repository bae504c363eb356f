"""A user's own rows: the task they are read as, and the errors for rows that are none."""

import csv
import io
import json
from datetime import date
from decimal import Decimal

import pytest
from reading import logged_to, read_task

from kdcli.data.labelled.label_values import number_of
from kdcli.data.labelled.labels import MANY_ROWS, MAX_CLASSES
from kdcli.data.labelled.own import own_task
from kdcli.data.rows import FIRST_ROWS
from kdcli.data.sources import open_source
from kdcli.data.tasks import task_of
from kdcli.errors import UsageError
from kdcli.types import Task


def found(rows, log=None, **columns) -> Task:
    """The task of rows that stand in `train.jsonl`, a line each."""
    numbered = ((f"train.jsonl:{n}", row) for n, row in enumerate(rows, 1))
    with logged_to([] if log is None else log):
        return own_task(numbered, columns)


def table(columns, *values):
    return [dict(zip(columns.split(" "), v, strict=True)) for v in values]


def labelled(*labels, **more):
    return [{"text": f"some words {n}", "label": label, **more} for n, label in enumerate(labels)]


def tagged(*labels):
    return [{"tokens": ["w"] * len(tags), "ner_tags": tags} for tags in labels]


def answered(*answers):
    return [{"id": "a", "question": "who ?", "context": "w1 w2", "answers": a} for a in answers]


ONE = {"text": ["w1"], "answer_start": [0]}
NONE = {"text": [], "answer_start": []}
METRICS = {
    "class": ("accuracy", "macro_f1"),
    "score": ("pearson", "spearman", "mse"),
    "span": ("exact", "f1"),
}
METRICS |= {"text": ("rougeL", "rouge1", "rouge2", "bleu", "exact")}
METRICS |= {
    "multi": ("micro_f1", "macro_f1", "exact"),
    "tokens": ("f1", "precision", "recall", "accuracy"),
}
STARS = table(" comment stars", (0, "a", 5), (1, "b", 1), (2, "c", 3))

# The conventions of docs/tasks.md: rows -> kind, texts, label, classes.
FLAT = {
    "sst2": (
        table("idx sentence label", (0, "hides", 0), (1, "gem", 1), (2, "so", 0)),
        "class sentence -> label 0 1",
    ),
    "imdb": (
        table("review sentiment", ("a gem", "pos"), ("drab", "neg")),
        "class review -> sentiment neg pos",
    ),
    "mnli": (
        table("premise hypothesis label idx", ("a", "b", 2, 0), ("c", "d", 0, 1), ("e", "f", 1, 2)),
        "class premise hypothesis -> label 0 1 2",
    ),
    "sts": (
        table("pair_ID Sentence_1 sentence2 score", ("1", "a", "b", 4.5), ("2", "c", "d", 3)),
        "score Sentence_1 sentence2 -> score",
    ),
    "booleans": (
        table("query passage label", ("is it", "it is", True), ("is it", "it was", False)),
        "class query passage -> label False True",
    ),
    "texts to generate": (
        table("id source target", (0, "a b", "c"), (1, "d", "c")),
        "text source -> target",
    ),
    "a target of a text from a source": (
        table("source text target", ("web", "a b", "x"), ("book", "d", "y")),
        "class text -> target x y",
    ),
    "negative numbers": (
        table("text label", ("a", 10), ("b", -1), ("c", 9)),
        "class text -> label -1 9 10",
    ),
    "a frame of pandas": (STARS, "class comment -> stars 1 3 5"),
    "a text before a title": (
        table("title text label", ("A", "a", "x"), ("B", "b", "y")),
        "class text -> label x y",
    ),
    "nan is a language": (
        table("text label", ("a", "nan"), ("b", "deu")),
        "class text -> label deu nan",
    ),
}
NESTED = {
    "go-emotions": (
        table("text labels id", ("a", [2, 27], "e1"), ("b", [], "e2"), ("c", [10], "e3")),
        "multi text -> labels 2 10 27",
    ),
    "conll": (
        [
            {
                "id": "0",
                "tokens": ["EU", "x"],
                "pos_tags": [1, 2],
                "chunk_tags": [3, 4],
                "ner_tags": [3, 0],
            }
        ],
        "tokens tokens -> ner_tags 0 3",
    ),
    "names of tags": (
        table("words labels", (["Ann", "ran"], ["I-PER", "O"]), (["in", "Bonn"], ["O", "B-LOC"])),
        "tokens words -> labels O B-LOC I-PER",
    ),
    "squad 2": (answered(ONE, NONE), "span question context -> answers"),
}


def described(task):
    return " ".join((task.kind, *task.texts, "->", task.label, *task.labels))


def check(task, expected):
    assert described(task) == expected
    metrics = (
        METRICS[task.kind]
        if len(task.labels) != 2 or task.kind != "class"
        else ("accuracy", "f1", "matthews")
    )
    assert task.metrics == (task_of("squad_v2").metrics if task.impossible else metrics)


def in_csv(rows):
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize(("rows", "expected"), FLAT.values(), ids=FLAT)
def test_rows_and_the_task_they_hold(rows, expected, suffix, tmp_path):
    text = in_csv(rows) if suffix == "csv" else "\n".join(map(json.dumps, rows))
    (tmp_path / f"train.{suffix}").write_text(text, "utf-8")
    ((_, read),) = open_source(str(tmp_path)).tables("train")
    check(own_task(read, {}), expected)


@pytest.mark.parametrize(("rows", "expected"), NESTED.values(), ids=NESTED)
def test_rows_of_lists_and_the_task_they_hold(rows, expected):
    task = found(rows)
    check(task, expected)
    assert task.impossible == (rows == answered(ONE, NONE))


def test_numbers_of_a_csv_are_ordered_as_those_of_json():
    assert (
        found(labelled("10", "9", "1")).labels
        == found(labelled(10, 9, 1)).labels
        == ("1", "9", "10")
    )
    assert found(labelled("10", "9", "x")).labels == ("10", "9", "x")


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [
        ((Decimal("0.50"), Decimal("2.00")), "score", ()),
        ((Decimal("1.00"), Decimal("2.00")), "class", ("1", "2")),
        ((date(2020, 1, 2), date(2020, 1, 1)), "class", ("2020-01-01", "2020-01-02")),
        ((b"x", b"y"), "class", ("x", "y")),
        (([Decimal("1.00"), Decimal("2.00")], [Decimal("1.00")]), "multi", ("1", "2")),
    ],
)
def test_labels_of_parquet_are_read_as_in_csv(labels, kind, names):
    task = found(labelled(*labels))
    assert (task.kind, task.labels) == (kind, names)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"tokens": "Ann left", "tags": "B-PER O"}, "for a label of each word, write lists"),
        (
            {"text": "w1", "toxic": "0", "threat": "1"},
            "if toxic and threat say which labels",
        ),
        ({"text": "w1", "toxic": 0.0, "threat": True}, "if toxic and threat say which labels"),
    ],
)
def test_columns_in_other_forms_get_the_form_that_is_read(row, hint):
    with pytest.raises(UsageError) as caught:
        found([row, row])
    assert hint in caught.value.hint


def test_the_log_names_kind_columns_and_classes():
    log = []
    found(labelled("a", "b", "a", when="1999"), log)
    assert log == [
        "your data: 3 examples of kind class, text -> label, 2 classes (a, b); unused columns: when"
    ]
    found(labelled("a", "b", "a", **{"": "1999"}), log)
    assert log.pop().endswith("; unused columns: column 3 (without a name)")
    found(labelled("a", "b", "a", **{" when": "1999"}), log)
    assert log.pop().endswith("; unused columns: ' when'")
    found(table("premise hypothesis score", ("a", "b", 0.5), ("c", "d", 1)), log)
    assert log[1:] == ["your data: 2 examples of kind score, premise and hypothesis -> score"]
    found(labelled(*range(11)), log)
    assert log[2:] == ["your data: 11 examples of kind class, text -> label, 11 classes"]
    found(answered(ONE, NONE, NONE), log)
    assert log[3].endswith(
        "question and context -> answers, 2 without an answer; unused columns: id"
    )


LONG = "a body that is much longer than its headline is"


@pytest.mark.parametrize(
    ("roles", "text", "warns"),
    [({}, "title", True), ({"text": "title"}, "title", False), ({"text": "note"}, "note", False)],
)
def test_a_much_longer_text_that_is_not_read_is_a_warning(roles, text, warns):
    log = []
    task = found([{"title": "short", "note": LONG, "label": label} for label in "ab"], log, **roles)
    assert task.texts == (text,)
    warning = "to use it instead, add --set data.columns.text=note"
    assert any(warning in line for line in log) == warns


def test_rows_are_read_once_and_not_held():
    read = []

    def rows():
        for n in range(5 * FIRST_ROWS):
            read.append(n)
            yield f"a:{n}", {"text": "w", "label": n % 3 if n < 4 * FIRST_ROWS else 7.5}

    assert (own_task(rows(), {}).kind, read) == ("score", list(range(5 * FIRST_ROWS)))


WIDE = table("a b c d", ("x1", "x2", 1, 0.5), ("y1", "y2", 2, 0.7), ("z1", "z2", 1, 0.7))
BOTH = [
    {"text": "w v", "label": n, "tokens": ["w", "v"], "tags": ["X", "O"], "kinds": ["p", f"q{n}"]}
    for n in (1, 2)
]


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (WIDE, {"text": "a", "label": "c"}, "class a -> c 1 2"),
        (WIDE, {"text": ["b", "a"], "label": "c"}, "class b a -> c 1 2"),
        (WIDE, {"text": "b", "pair": "a", "label": "c"}, "class b a -> c 1 2"),
        (WIDE, {"text": "a", "label": "c", "kind": "score"}, "score a -> c"),
        (
            WIDE,
            {"text": "a", "label": "d", "kind": "class"},
            "class a -> d 0.5 0.7",
        ),
        (labelled("1", "2"), {"kind": "score"}, "score text -> label"),
        (labelled(1.0, 2), {"kind": "class"}, "class text -> label 1.0 2"),
        (labelled("a", "b", id="7"), {"text": "id"}, "class id -> label a b"),
        (BOTH, {"kind": "class"}, "class text -> label 1 2"),
        (BOTH, {"kind": "tokens"}, "tokens tokens -> tags O X"),
        (BOTH, {"label": "label"}, "class text -> label 1 2"),
        (BOTH, {"label": "kinds"}, "tokens tokens -> kinds p q1 q2"),
        (
            BOTH,
            {"label": "kinds", "kind": "multi"},
            "multi text -> kinds p q1 q2",
        ),
        (
            table("q c a", ("who ?", "w1", ONE), ("what ?", "w1", ONE)),
            {"question": "q", "context": "c", "answers": "a"},
            "span q c -> a",
        ),
        (
            [{**row, "label": n} for n, row in enumerate(answered(ONE, ONE))],
            {"label": "label", "text": "question"},
            "class question -> label 0 1",
        ),
    ],
)
def test_given_columns_and_kinds_are_read(rows, columns, expected):
    assert described(found(rows, **columns)) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "message", "hint"),
    [
        (
            WIDE,
            {},
            "train.jsonl:1: which column holds the text? the columns are a, b, c, d",
            "columns.text=a (or b); for the labels also data.columns.label; for pairs",
        ),
        (
            WIDE,
            {"text": "a"},
            "train.jsonl:1: which column holds the label? the columns are",
            "data.columns.label=b (or c, d)",
        ),
        (
            table("guid wording label", ("u1", "some words", 1)),
            {},
            "which column holds the text? the columns are guid, wording, label",
            "data.columns.text=wording",
        ),
        (
            table("text verdict", ("a", "guilty"), ("b", "free")),
            {},
            "which column holds the label? the columns are text, verdict",
            "data.columns.label=verdict",
        ),
        (
            table("text", ("a",)),
            {},
            "which column holds the label? the only column is text",
            "add a column with the label of each row; without labels, kdcli compress",
        ),
        (
            table("text my;label", ("a", "guilty"), ("b", "free")),
            {},
            "which column holds the label?",
            "give --set 'data.columns.label=my;label'",
        ),
        (
            [{"tokens": ["a", "b"], "boundaries": ["s", "m"]}],
            {"kind": "tokens"},
            "which column holds the label?",
            "data.columns.label=boundaries",
        ),
        (
            table("comment review label", ("a", "b", 1)),
            {},
            "text, comment or review?",
            "columns.text=comment (or review)",
        ),
        (
            table("text topic rating", ("a", "b", 1)),
            {},
            "holds the label, topic or rating?",
            "label=topic (or rating)",
        ),
        (
            BOTH,
            {},
            "is the label tags of tokens (kind tokens), or label of the text?",
            "kind=class (or multi, score, tokens, span",
        ),
        (
            labelled(0, 1),
            {"kind": "tokens"},
            "which column holds the words?",
            "no column can hold it: add one",
        ),
        (
            labelled(0, 1),
            {"kind": "span"},
            "which column holds the question?",
            "data.columns.question=text (or label)",
        ),
        (
            WIDE,
            {"txt": "a"},
            "unknown role of data.columns 'txt'; did you mean 'text'?",
            "known: text, pair, label",
        ),
        (
            WIDE,
            {"kind": "clas"},
            "unknown kind 'data.columns.kind=clas'; did you mean 'class'?",
            "class, multi",
        ),
        (
            labelled(0, 1),
            {"text": "txt"},
            "train.jsonl:1: no column 'txt'; did you mean 'text'?",
            "are text, label",
        ),
        (
            WIDE,
            {"text": ["a", "b", "c"]},
            "data.columns.text takes one column, got ['a', 'b', 'c']",
            "for pairs, set data.columns.text",
        ),
        (
            WIDE,
            {"text": ["a", "b"], "pair": "c"},
            "data.columns.text takes one column",
            "for pairs, set data.columns.text",
        ),
        (WIDE, {"label": ["a", "b"]}, "data.columns.label takes one column", ""),
        (WIDE, {"text": "a", "label": "a"}, "data.columns gives column 'a' two roles", ""),
        (
            WIDE,
            {"text": "a", "words": "b"},
            "gives text, words, but no kind takes them all",
            "tokens takes words, l",
        ),
        (
            WIDE,
            {"text": "a", "kind": "span"},
            "gives text, but kind span does not take all of them",
            "span takes question, context",
        ),
    ],
)
def test_unclear_columns_are_named_with_the_option(rows, columns, message, hint):
    with pytest.raises(UsageError) as error:
        found(rows, **columns)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the training data holds no examples"),
        (
            labelled(0, "a"),
            "2: the label in 'label' is a string, 'a', but a number at train.jsonl:1",
        ),
        (labelled(0, True), "2: the label in 'label' is a boolean, True, but a number"),
        (
            labelled({"a": 1}),
            "1: the label in 'label' is an object, {'a': 1}; kind class, multi or score",
        ),
        (labelled(0, None), "2: there is no label in 'label'"),
        (labelled("a", " "), "2: there is no label in 'label'"),
        (labelled(0.5, float("nan")), "2: there is no label in 'label'"),
        (labelled(1, 10**400), "2: the label in 'label' is not a finite number"),
        (
            [*labelled(0, 1), {"text": "a"}],
            "3: there is no column 'label'; the only column is text",
        ),
        (
            labelled("x", "x"),
            "1: from here on every example has the label x in 'label': nothing to le",
        ),
        (
            labelled(["a", "b"], ["b", "a"]),
            "every example has the label a, b in 'label': nothing to learn",
        ),
        (tagged(["O", "O"], ["O"]), "1: from here on every word has the label O"),
        (
            labelled("pos", "neg", "pos "),
            "3: the label 'pos ' in 'label' is spelled 'pos' at train",
        ),
        (labelled("1", "2", "01"), "3: the label '01' in 'label' is spelled '1' at train.jsonl:1"),
        (labelled("a", "\ud800"), "2: half a surrogate pair at character 0 of 'label'"),
        (labelled([1], ["a"]), "2: an element of 'label' is a string, 'a', but a number"),
        (labelled([0.0, 1.0]), "1: an element of 'label' is a number with a point, 0.0"),
        (labelled([0, 1, 0]), "1: 'label' holds a class twice: [0, 1, 0]"),
        (
            table("tokens tags", (["a"], ["O"]), (["a"], "O")),
            "2: the label in 'tags' is a string, 'O'; ki",
        ),
        (answered(NONE, NONE), "1: from here on no example has an answer in 'answers'"),
    ],
)
def test_labels_that_are_no_task_are_named(rows, message):
    with pytest.raises(UsageError) as error:
        found(rows)
    # Most messages begin with the place, train.jsonl:LINE.
    assert message in error.value.message.removeprefix("train.jsonl:")


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (
            labelled("1", "1e999"),
            {"kind": "class"},
            "2: the label in 'label' is not a finite number",
        ),
        (
            labelled("1", "1.0"),
            {"kind": "score"},
            "has the label 1, 1.0 in 'label': nothing to learn",
        ),
        (labelled("a", "b"), {"kind": "score"}, "1: the score in 'label' is not a number: 'a'"),
        (
            labelled(["a", "b"]),
            {"kind": "class"},
            "1: the label in 'label' is a list, ['a', 'b']; kind class takes a ",
        ),
        (
            labelled("a;b"),
            {"kind": "multi"},
            "1: from here on every example has the label a, b in 'label': nothing to learn",
        ),
    ],
)
def test_labels_that_are_not_of_the_given_kind_are_named(rows, columns, message):
    with pytest.raises(UsageError) as error:
        found(rows, **columns)
    assert message in error.value.message.removeprefix("train.jsonl:")


@pytest.mark.parametrize(
    ("labels", "columns", "message", "hints"),
    [
        (
            [f"n{n}" for n in range(9999)],
            {},
            f"more than {MAX_CLASSES} different labels in 9999 examples",
            "",
        ),
        (
            range(9999),
            {},
            f"more than {MAX_CLASSES} different labels in 9999 examples",
            "kind=score",
        ),
        (
            [[n] for n in range(9999)],
            {},
            f"more than {MAX_CLASSES} different",
            "columns.label=NAME",
        ),
        (
            [f"n{n}" for n in range(MANY_ROWS)],
            {},
            f"{MANY_ROWS} different labels in {MANY_ROWS} exam",
            "kind=class",
        ),
        (range(MANY_ROWS), {}, f"{MANY_ROWS} different labels in {MANY_ROWS} exam", "kind=score"),
    ],
)
def test_too_many_labels_are_no_classes(labels, columns, message, hints):
    with pytest.raises(UsageError) as error:
        found(labelled(*labels), **columns)
    assert "too many for classes" in error.value.message
    assert message in error.value.message
    assert "data.columns.label=NAME" in error.value.hint
    assert hints in error.value.hint


def test_as_many_labels_as_there_may_be():
    names = [f"n{n}" for n in range(MAX_CLASSES)]
    assert len(found(labelled(*names, *names)).labels) == MAX_CLASSES
    few, half = names[: MANY_ROWS - 1], names[: MANY_ROWS // 2]
    assert len(found(labelled(*few)).labels) == MANY_ROWS - 1
    assert len(found(labelled(*half, *half)).labels) == MANY_ROWS // 2
    assert len(found(labelled(*names[:MANY_ROWS]), kind="class").labels) == MANY_ROWS


def test_scores_may_all_differ():
    assert found(labelled(*(n / 7 for n in range(3 * MAX_CLASSES)))).kind == "score"
    # Whole numbers up to the last row, which says that they are none of classes.
    assert found(labelled(*range(3 * MAX_CLASSES), 0.5)).kind == "score"
    assert found(labelled(*map(str, range(3 * MAX_CLASSES)), "0.5")).kind == "score"


NUMBERS = {
    "1": 1,
    "-1": -1,
    "+07": 7,
    " 3 ": 3,
    "1.": 1.0,
    ".5": 0.5,
    "1e3": 1000.0,
    "inf": float("inf"),
}
NO_NUMBERS = ["", ".", "1,5", "1_0", "0x1", "e3", "٣", "1 2", "9" * 5000]


@pytest.mark.parametrize(("text", "number"), (NUMBERS | dict.fromkeys(NO_NUMBERS)).items())
def test_what_spells_a_number(text, number):
    assert number_of(text) == number
    assert type(number_of(text)) is type(number)


def test_plain_text_holds_no_labels(tmp_path):
    (tmp_path / "train.txt").write_text("An ordinary sentence .\nAnother one .\n", "utf-8")
    with pytest.raises(UsageError, match="is plain text: its lines hold no labels") as caught:
        read_task("own", tmp_path / "train.txt", training=True)
    assert "with a column of labels" in caught.value.hint
