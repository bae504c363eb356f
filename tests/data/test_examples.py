"""Rows of labelled data: each kind of task reads its rows, and names file and row of those that do
not fit."""

import math

import pytest

from kdcli.data.labelled.splits import example_of
from kdcli.data.tasks import task_of
from kdcli.errors import UsageError
from kdcli.types import Answer, Task

COLA, STSB, MNLI = task_of("cola"), task_of("stsb"), task_of("mnli")
SQUAD, SQUAD2, ASK = task_of("squad"), task_of("squad_v2"), task_of("squad-qg")
TOPICS = Task("topics", "multi", ("text",), ("micro_f1",), ("sport", "art", "war"))
TAGS = Task("tags", "tokens", ("tokens",), ("f1",), ("O", "B-PER", "I-PER"), label="ner_tags")
STARS = Task("own", "class", ("text",), ("accuracy",), ("1", "2", "5"))
HALF = "\ud83d"

# Kind → its task, and a row of it that is right.
RIGHT = {
    "class": (COLA, {"sentence": "w1 w2", "label": 1, "idx": 7}),
    "multi": (TOPICS, {"text": "w1", "label": [0, 2]}),
    "score": (STSB, {"sentence1": "w1", "sentence2": "w2", "label": 2.5}),
    "tokens": (TAGS, {"tokens": ["w1", "w2"], "ner_tags": [1, 0]}),
    "span": (
        SQUAD,
        {"question": "w1", "context": "w2 w3", "answers": {"text": ["w3"], "answer_start": [3]}},
    ),
    "text": (
        ASK,
        {
            "context": "w2 w3",
            "answers": {"text": ["w3", "w2"], "answer_start": [3, 0]},
            "question": "w1",
        },
    ),
}


def read(task, values, **how):
    return example_of(task, ("some.jsonl:7", values), 6, **how)


def refused(task, values, **how):
    """The error of a row; it names file and row."""
    with pytest.raises(UsageError) as error:
        read(task, values, **how)
    assert error.value.message.startswith("some.jsonl:7")
    return error.value.message


READ = {
    "class": (("w1 w2",), 1),
    "multi": (("w1",), (0, 2)),
    "score": (("w1", "w2"), 2.5),
    "tokens": (("w1", "w2"), (1, 0)),
    "span": (("w1", "w2 w3"), (Answer("w3", 3),)),
    "text": (("w2 w3", "w3"), "w1"),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_row_of_each_kind(kind):
    found, (texts, label) = read(*RIGHT[kind]), READ[kind]
    assert (found.where, found.texts, found.label) == ("some.jsonl:7", texts, label)
    assert type(found.label) is type(label)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "6"),
        ({"guid": "d-1"}, "d-1"),
        ({"id": "a", "idx": 3}, "a"),
        ({"id": None, "idx": 0}, "0"),
    ],
)
def test_an_example_is_named_by_its_row_or_by_its_place(more, name):
    assert read(COLA, {"sentence": "w1", "label": 0} | more).id == name


@pytest.mark.parametrize(
    ("kind", "name"), [(k, c) for k, (t, _) in RIGHT.items() for c in [*t.texts, t.label]]
)
def test_a_missing_column_is_named_with_those_there_are(kind, name):
    task, row = RIGHT[kind]
    less = {c: v for c, v in row.items() if c != name} | {"body": "w1"}
    message = refused(task, less)
    assert f"'{name}'" in message
    assert f"the columns are {', '.join(less)}" in message


@pytest.mark.parametrize("kind", RIGHT)
def test_an_empty_label_is_refused(kind):
    task, row = RIGHT[kind]
    assert f"'{task.label}', the label of task {task.name}, is empty" in refused(
        task, row | {task.label: None}
    )


NO_TEXTS = [
    (kind, wrong) for kind in RIGHT for wrong in (None, 3, 2.5, True, {"a": 1}, [1, 2], [None])
]
NO_TEXTS += [("tokens", wrong) for wrong in ([], "w1 w2", ["w1", 2], ["w1", None])]


@pytest.mark.parametrize(("kind", "wrong"), NO_TEXTS)
def test_a_text_of_another_type_is_refused(kind, wrong):
    task, row = RIGHT[kind]
    column = task.texts[-1]
    what = "hold a list of words" if kind == "tokens" else "hold "
    # Answers as in SQuAD are a text of the source.
    what = "be " if kind == "text" and isinstance(wrong, dict) else what
    assert f"'{column}' must {what}" in refused(task, row | {column: wrong})


@pytest.mark.parametrize("kind", RIGHT)
def test_half_a_surrogate_is_no_text(kind):
    task, row = RIGHT[kind]
    broken = ["w1", f"w2 {HALF}"] if kind == "tokens" else f"w2 {HALF}"
    message = refused(task, row | {task.texts[-1]: broken})
    assert f"half a surrogate pair at character 3 of '{task.texts[-1]}'" in message


def test_half_a_surrogate_is_no_answer_and_no_name_either():
    task, row = RIGHT["span"]
    answers = {"text": [HALF], "answer_start": [0]}
    assert "half a surrogate pair at character 0 of 'answers'" in refused(
        task, row | {"answers": answers}
    )
    assert "half a surrogate pair" in refused(task, row | {"id": HALF})


@pytest.mark.parametrize(
    "label",
    [
        2,
        -1,
        "2",
        "-1",
        0.5,
        math.nan,
        math.inf,
        -math.inf,
        "nan",
        True,
        False,
        "acceptably",
        "",
        " 2",
        "1.5",
        [0, 1],
        {},
    ],
)
def test_a_label_that_is_no_class_gets_the_classes_that_are(label):
    message = refused(COLA, {"sentence": "w1", "label": label})
    assert "'label' of task cola must be one of 0 (unacceptable), 1 (acceptable), got " in message
    assert repr(label) in message


def test_where_names_are_numbers_a_number_is_a_name():
    assert [read(STARS, {"text": "w1", "label": x}).label for x in (1, 2, 5, "5")] == [0, 1, 2, 2]
    # 0 is no star, though there is a class of that number.
    for wrong in (0, "0", 3, "1.5"):
        assert "must be one of 1, 2, 5, got" in refused(STARS, {"text": "w1", "label": wrong})


@pytest.mark.parametrize("names", [("1.0", "2.0"), ("-1", "1"), ("+1", "+2"), ("1e0", "2e0")])
def test_a_number_is_the_name_that_spells_it_and_never_a_place(names):
    """A validation file that spells 1.0 as 1 must not be scored with the second class."""
    task = Task("own", "class", ("text",), ("accuracy",), names)
    assert read(task, {"text": "w1", "label": "1"}).label == names.index(
        next(name for name in names if float(name) == 1)
    )
    assert f"must be one of {', '.join(names)}, got" in refused(task, {"text": "w1", "label": "0"})


SAME = [
    (("negative", "Positive"), ["Positive", " Positive ", "POSITIVE", "positive\u200b"]),
    (("True", "False"), [True, "true", "TRUE"]),
    (("caf\u00e9", "bar"), ["cafe\u0301", "Caf\u00c9"]),
    (("not_entailment", "entailment"), ["not-entailment", "Not Entailment"]),
    (("1", "0"), [1, 1.0, "1.0", "1", "01"]),
    (("it", "IT"), ["it", " it "]),
]


@pytest.mark.parametrize(("names", "spellings"), SAME)
def test_spellings_of_a_class_are_one_class(names, spellings):
    task = Task("own", "class", ("text",), ("accuracy",), names)
    place = {"negative": 1, "it": 0}.get(names[0], 0)
    assert {read(task, {"text": "w1", "label": each}).label for each in spellings} == {place}


@pytest.mark.parametrize(
    ("names", "label"),
    [(("A", "B"), "A-"), (("it", "IT"), "It"), (("C", "Java"), "C++"), (("12", "3"), "1-2")],
)
def test_what_may_be_another_class_is_refused(names, label):
    task = Task("own", "class", ("text",), ("accuracy",), names)
    assert f"got {label!r}" in refused(task, {"text": "w1", "label": label})


def test_of_many_classes_only_some_are_listed():
    task = Task("own", "class", ("text",), ("accuracy",), tuple(f"c{i}" for i in range(40)))
    message = refused(task, {"text": "w1", "label": "x" * 1000})
    assert "9 (c9) and 30 more" in message
    assert "c12" not in message
    assert len(message) < 400


# Classes as csv spells them too; several labels are sorted and stand once; tags may be names.
SPELLED = {
    "class": [(0, 0), (1.0, 1), ("1", 1), ("unacceptable", 0), ("acceptable", 1)],
    "score": [(3, 3.0), ("2.5", 2.5), ("-3e2", -300.0), (0, 0.0), (-1, -1.0)],
    "multi": [
        ([], ()),
        ([2, 0], (0, 2)),
        (["war", "sport"], (0, 2)),
        (["1"], (1,)),
        ((1,), (1,)),
        ([1, "art"], (1,)),
    ],
    "tokens": [(["I-PER", "O"], (2, 0))],
}


@pytest.mark.parametrize(
    ("kind", "label", "expected"), [(k, *pair) for k, pairs in SPELLED.items() for pair in pairs]
)
def test_a_label_is_read_however_it_is_spelled(kind, label, expected):
    task, row = RIGHT[kind]
    found = read(task, row | {task.label: label}).label
    assert (found, type(found)) == (expected, type(expected))


NO_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    "inf",
    "",
    "good",
    True,
    False,
    [1.0],
    10**400,
    {},
]


@pytest.mark.parametrize(
    ("kind", "label", "message"),
    [
        *(("score", label, "must be a finite number, got") for label in NO_NUMBERS),
        ("multi", "sports", "must be one of 0 (sport), 1 (art), 2 (war), got 'sports'"),
        ("multi", 1, "must hold a list of labels, got 1"),
        ("multi", [3], "must be one of 0 (sport), 1 (art), 2 (war), got 3"),
        *(("multi", [0, wrong], f"got {wrong}") for wrong in (True, None, math.nan)),
        *(
            ("tokens", [0] * n, f"a label for each of the 2 words, got {n} labels")
            for n in (0, 1, 3)
        ),
        *(
            ("tokens", wrong, f"a label for each of the 2 words, got {wrong!r}")
            for wrong in ("B-PER", 1)
        ),
        ("tokens", [1, 3], "must be one of 0 (O), 1 (B-PER), 2 (I-PER), got 3"),
        *(("tokens", [1, wrong], f"got {wrong}") for wrong in (-1, None)),
    ],
)
def test_a_label_that_does_not_fit_is_refused(kind, label, message):
    task, row = RIGHT[kind]
    assert message in refused(task, row | {task.label: label})


STARTS = [3, ["3"], [3.0], [True], [3, 0], []]
TEXTS = ["w3", [3], ["w3", "w2"], [], [None]]


@pytest.mark.parametrize(
    "answers",
    [
        *("w3", ["w3"], {}, {"text": ["w3"]}),
        *({"text": ["w3"], "answer_start": starts} for starts in STARTS),
        *({"text": texts, "answer_start": [3]} for texts in TEXTS),
    ],
)
@pytest.mark.parametrize("task", [SQUAD, SQUAD2])
def test_answers_of_another_form_are_refused(task, answers):
    row = {"question": "w1", "context": "w2 w3", "answers": answers}
    assert '\'answers\' must be {"text": [...], "answer_start": [...]}' in refused(task, row)


def test_only_squad_2_knows_questions_without_an_answer():
    row = {"question": "w1", "context": "w2", "answers": {"text": [], "answer_start": []}}
    assert read(SQUAD2, row).label == ()
    with pytest.raises(UsageError, match="the question has no answer") as error:
        read(SQUAD, row)
    assert "squad_v2" in error.value.hint


@pytest.mark.parametrize("label", [-1, "-1", -1.0, "-1.0", None])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_withheld_label_is_none_but_only_where_labels_are_withheld(kind, label):
    task, row = RIGHT[kind]
    assert read(task, row | {task.label: label}, withheld=True).label is None
    if kind == "score" and label is not None:
        assert read(task, row | {task.label: label}).label == -1.0
    elif kind == "text" and isinstance(label, str):
        assert read(task, row | {task.label: label}).label == label
    else:
        refused(task, row | {task.label: label})


def test_a_split_without_labels_need_not_have_the_column():
    assert read(MNLI, {"premise": "a", "hypothesis": "b"}, withheld=True).label is None


def test_a_label_that_is_there_is_read_and_checked_although_it_might_be_withheld():
    assert read(COLA, {"sentence": "w1", "label": 1}, withheld=True).label == 1
    assert "must be one of" in refused(COLA, {"sentence": "w1", "label": -2}, withheld=True)
    # The text is never withheld.
    assert "'sentence'" in refused(COLA, {"label": -1}, withheld=True)
