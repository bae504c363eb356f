"""The examples of a task: those trained on, those evaluated on, and the names of their sets."""

import gzip
import json

import pytest
from hub_server import hub  # noqa: F401
from reading import read_task

from kdcli.data.demo import demo_task
from kdcli.data.labelled.kept import keep_rows
from kdcli.data.labelled.task_data import Labelled, check_training
from kdcli.errors import UsageError
from kdcli.types import Answer, Example, Head, Task


def nli(count, begin=0):
    places = range(begin, begin + count)
    return [
        {"premise": f"w{i}", "hypothesis": f"w{i % 7}", "label": i % 3, "idx": i} for i in places
    ]


def sentences(count, begin=0):
    return [{"sentence": f"w{i}", "label": i % 2, "idx": i} for i in range(begin, begin + count)]


def questions(count):
    answers = [{"text": ["w2"], "answer_start": [len(f"w{i} ")]} for i in range(count)]
    return [
        {"id": f"q{i}", "question": "w1", "context": f"w{i} w2", "answers": a}
        for i, a in enumerate(answers)
    ]


def put(path, rows):
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def splits(folder, **rows):
    for name, of_split in rows.items():
        put(folder / f"{name}.jsonl", of_split)


def read(name, source, log=None, **how):
    return read_task(name, source, log, **how)


def ids(examples):
    return [int(e.id) for e in examples]


def refused(name, source, **how):
    with pytest.raises(UsageError) as error:
        read(name, source, **how)
    return error.value


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_directory_with_both_splits(tmp_path, ending):
    put(tmp_path / f"train{ending}", sentences(20))
    put(tmp_path / f"validation{ending}", sentences(5, 100))
    log: list[str] = []
    found = read("cola", tmp_path, log)
    assert (ids(found.train), ids(found.sets[""])) == (list(range(20)), list(range(100, 105)))
    assert (list(found.sets), found.split, found.task.sets) == ([""], "validation", ())
    assert log == [f"rows of {tmp_path.name}: 25 read, 25 kept"]
    assert found.train[3] == Example(f"{tmp_path / f'train{ending}'}:4", "3", ("w3",), 1)


@pytest.mark.parametrize(
    ("name", "row", "how"),
    [
        ("stsb", {"sentence1": "w1", "sentence2": "w2", "score": 2.5}, {}),
        ("stsb", {"sentence_A": "w1", "sentence_B": "w2", "relatedness_score": 2.5}, {}),
        ("stsb", {"text1": "w1", "text2": "w2", "similarity_score": 2.5}, {}),
        ("sst2", {"text": "w1", "Label": 1}, {}),
        ("qnli", {"question": "w1", "sentence": "w2", "gold_label": "entailment"}, {}),
        ("xsum", {"source": "w1 w2", "target": "w1"}, {}),
        ("squad", {"Question": "w1", "context": "w2", "answers": None}, {}),
        ("stsb", {"a": "w1", "b": "w2", "c": 2.5}, {"text": ["a", "b"], "label": "c"}),
    ],
)
def test_a_named_task_reads_the_columns_that_own_recognises(tmp_path, name, row, how):
    if "answers" in row:
        row = row | {"answers": {"text": ["w2"], "answer_start": [0]}}
    splits(tmp_path, validation=[row])
    log: list[str] = []
    (example,) = read(name, tmp_path, log, columns=how, training=False).sets[""]
    *texts, label = row
    assert example.texts == tuple(row[name] for name in texts)
    file, names = tmp_path / "validation.jsonl", " and ".join(texts)
    assert log[0] == f"{file}: task {name} reads {names} -> {label}"


@pytest.mark.parametrize(
    ("row", "columns", "message", "hint"),
    [
        (
            {"sentence1": "w1", "sentence2": "w2", "grade": 2.5},
            {},
            "which column holds the label? the columns are sentence1, sentence2, grade",
            "give --set data.columns.label=grade",
        ),
        (
            {"sentence1": "w1", "sentence2": "w2"},
            {},
            "which column holds the label? the columns are sentence1, sentence2",
            "learn from the answers of a fine-tuned model",
        ),
        (
            {"text": "w1", "score": 2.5},
            {},
            "task stsb needs the columns sentence1, sentence2, label; the columns are text, score",
            "--set data.columns.ROLE=NAME (ROLE: text, pair, label)",
        ),
        (
            {"sentence1": "w1", "sentence2": "w2", "score": 2.5},
            {"kind": "class"},
            "data.columns.kind=class, but task stsb is of kind score",
            "--task own",
        ),
        (
            {"sentence1": "w1", "sentence2": "w2", "score": 2.5, "other": "w3"},
            {"pair": "other"},
            "data.columns.pair is 'other', but task stsb reads sentence1 and sentence2 -> score",
            "remove data.columns.pair",
        ),
        (
            {"sentence1": "w1", "sentence2": "w2", "score": 2.5, "other": "w3"},
            {"text": "other"},
            "task stsb reads 2 columns of text, but data.columns names other",
            "name each one with --set data.columns.ROLE=NAME",
        ),
    ],
)
def test_columns_that_a_named_task_cannot_read(tmp_path, row, columns, message, hint):
    splits(tmp_path, train=[row, row], validation=[row])
    error = refused("stsb", tmp_path, columns=columns)
    assert message in error.message
    assert hint in error.hint


def test_the_demo_has_no_columns_to_name():
    error = refused("demo-topic", "demo", columns={"label": "foo"})
    assert "data.columns.label cannot be used, because the demo has no columns" in error.message


def test_the_two_parts_of_mnli_are_judged_apart(tmp_path):
    splits(
        tmp_path, train=nli(9), validation_matched=nli(4, 100), validation_mismatched=nli(3, 200)
    )
    log: list[str] = []
    found = read("mnli", tmp_path, log)
    assert {n: ids(e) for n, e in found.sets.items()} == {
        "matched": [*range(100, 104)],
        "mismatched": [200, 201, 202],
    }
    assert found.task.sets == ("matched", "mismatched")
    assert log == [f"rows of {tmp_path.name}: 16 read, 16 kept"]


def test_a_plain_validation_split_of_mnli_is_the_matched_one(tmp_path):
    splits(tmp_path, train=nli(9), validation=nli(4, 100))
    log: list[str] = []
    found = read("mnli", tmp_path, log)
    assert (list(found.sets), found.task.sets) == (["matched"], ("matched",))
    assert log[:-1] == ["mnli: evaluating on matched; missing: mismatched"]


def test_test_splits_are_found_by_the_names_of_their_parts_too(tmp_path):
    put(tmp_path / "test_matched.jsonl", [r | {"label": -1} for r in nli(4)])
    put(tmp_path / "test_mismatched.jsonl", [r | {"label": None} for r in nli(3)])
    found = read("mnli", tmp_path, split="test", training=False, withheld=True)
    labels = {n: [e.label for e in of] for n, of in found.sets.items()}
    assert labels == {"matched": [None] * 4, "mismatched": [None] * 3}
    assert (found.split, found.train) == ("test", [])
    assert "must be one of" in refused("mnli", tmp_path, split="test", training=False).message


@pytest.mark.parametrize("home", [False, True])
def test_languages_are_folders_and_english_is_trained_on(tmp_path, monkeypatch, home):
    put(tmp_path / "en" / "train.jsonl", nli(9))
    for begin, language in ((100, "en"), (200, "de"), (300, "zh")):
        put(tmp_path / language / "validation.jsonl", nli(3, begin))
    # Only judged: no training split of another language replaces the English one.
    put(tmp_path / "de" / "train.jsonl", nli(9, 900))
    log: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    found = read("xnli", f"~/{tmp_path.name}" if home else tmp_path, log)
    assert ids(found.train) == list(range(9))
    assert {name: ids(e)[0] for name, e in found.sets.items()} == {"en": 100, "de": 200, "zh": 300}
    assert found.task.sets == ("en", "de", "zh")
    line, _ = log
    assert line.startswith("xnli: evaluating on en, de, zh; missing: fr, es, el")


def test_the_training_split_may_lie_elsewhere(tmp_path):
    squad = put(tmp_path / "squad" / "train.jsonl", questions(6)).parent
    put(squad / "validation.jsonl", questions(1))
    for language in ("en", "de"):
        put(
            tmp_path / "mlqa" / language / "validation.jsonl",
            [r | {"question": "w9"} for r in questions(2)],
        )
    found = read("mlqa", tmp_path / "mlqa", train_source=str(squad))
    assert ([e.id for e in found.train], found.train[3].label) == (
        [f"q{i}" for i in range(6)],
        (Answer("w2", 3),),
    )
    assert {name: len(e) for name, e in found.sets.items()} == {"en": 2, "de": 2}
    missing = refused("mlqa", tmp_path / "mlqa")
    assert "no training split" in missing.message
    assert "data.train" in missing.hint


def test_folders_of_languages_without_any_validation_split_hold_some_of_the_training_examples_back(
    tmp_path,
):
    for begin, language in ((0, "en"), (900, "de")):
        put(tmp_path / language / "train.jsonl", nli(30, begin))
    log: list[str] = []
    found = read("xnli", tmp_path, log)
    held = ids(found.sets["en"])
    assert (list(found.sets), found.task.sets, found.split) == (
        ["en"],
        ("en",),
        "held-out rows",
    )
    assert sorted(ids(found.train) + held) == list(range(30))
    assert log[:-1] == [
        f"there is no validation split: {len(held)} of the 30 training examples are held out "
        "for evaluation"
    ]
    # The same without English, and from files that are not in folders.
    (tmp_path / "en" / "train.jsonl").unlink()
    (tmp_path / "en").rmdir()
    assert list(read("xnli", tmp_path).sets) == ["de"]
    put(tmp_path / "plain" / "train.jsonl", nli(30))
    assert list(read("mnli", tmp_path / "plain").sets) == ["matched"]
    wrong = refused("xnli", tmp_path, split="test", training=False)
    assert wrong.message == f"task xnli: no test split in {tmp_path}; it holds de/, plain/"
    # Whoever evaluates judges by the rows that a training run would hold back.
    assert read("xnli", tmp_path, training=False).sets == read("xnli", tmp_path).sets


def test_a_training_split_beside_the_folders_of_languages_comes_first(tmp_path):
    put(tmp_path / "train.jsonl", nli(9, 50))
    splits(tmp_path / "en", train=nli(9), validation=nli(3))
    assert ids(read("xnli", tmp_path).train)[0] == 50


def test_an_evaluation_needs_no_training_split_and_takes_a_single_file(tmp_path):
    put(tmp_path / "de" / "validation.jsonl", nli(3))
    found = read("xnli", tmp_path, training=False)
    assert (found.train, list(found.sets)) == ([], ["de"])
    assert ids(
        read("cola", put(tmp_path / "mine.jsonl", sentences(5)), training=False).sets[""]
    ) == [0, 1, 2, 3, 4]


def test_too_few_examples_cannot_be_held_back(tmp_path):
    put(tmp_path / "train.jsonl", sentences(2))
    assert "2 examples with 2 different texts are too few" in refused("cola", tmp_path).message


def test_a_test_split_is_not_made_up(tmp_path):
    splits(tmp_path, train=sentences(50), validation=sentences(50))
    found = refused("cola", tmp_path, split="test")
    assert "no test split" in found.message
    assert "test.*" in found.hint


def test_each_set_is_drawn_for_itself(tmp_path):
    splits(
        tmp_path, train=nli(9), validation_matched=nli(40, 100), validation_mismatched=nli(4, 200)
    )
    found = read("mnli", tmp_path, judged_rows=10)
    assert {name: len(e) for name, e in found.sets.items()} == {"matched": 10, "mismatched": 4}


def test_an_own_task_is_what_the_rows_say_that_are_trained_on(tmp_path):
    put(
        tmp_path / "elsewhere" / "train.jsonl",
        [{"text": f"w{i}", "label": "abc"[i % 3]} for i in range(9)],
    )
    put(
        tmp_path / "here" / "validation.jsonl",
        [{"text": "v1", "label": "b"}, {"text": "v2", "label": "c"}],
    )
    found = read("own", tmp_path / "here", train_source=str(tmp_path / "elsewhere"))
    assert (found.task.labels, len(found.train)) == (("a", "b", "c"), 9)
    assert [e.label for e in found.sets[""]] == [1, 2]


def test_labels_are_numbers_of_the_head_only_if_they_begin_with_0(tmp_path):
    head = Head("class", ("1 star", "2 stars", "3 stars"))
    for numbers, labels in (("0012", head.labels), ("1122", ("1", "2"))):
        rows = [{"text": "w1", "label": number} for number in numbers]
        file = put(tmp_path / f"{numbers}.jsonl", rows)
        assert read("own", file, training=False, head=head).task.labels == labels


def test_an_own_task_needs_data():
    assert "no data given" in refused("own", None).message


def test_the_demo_is_always_there():
    found = read("demo-topic", None)
    assert [e.texts for e in found.train] == [(e.text,) for e in demo_task("demo-topic", "train")]
    assert [e.label for e in found.sets[""]] == [
        e.label for e in demo_task("demo-topic", "validation")
    ]
    assert read("demo-topic", "demo").train == found.train
    assert "it has train, validation" in refused("demo-topic", None, split="test").message
    assert "the demo has no task cola" in refused("cola", "demo").message


FORMATS = "(.jsonl, .csv, .tsv, .parquet, each also .gz)"


@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        (
            "sst2",
            {},
            f"a directory with train.*, validation.* {FORMATS} and the columns sentence, label "
            "(negative, po",
        ),
        (
            "sst2",
            {"split": "test", "training": False},
            f"a directory with test.* {FORMATS} and the columns sentence, ",
        ),
        (
            "mnli",
            {},
            "a directory with train.*, validation_matched.*, validation_mismatched.* (.jsonl",
        ),
        (
            "xnli",
            {},
            "a directory with train.* or en/train.*, LANGUAGE/validation.* (LANGUAGE: en, fr, es, ",
        ),
        (
            "mlqa",
            {"training": False},
            "a directory with LANGUAGE/validation.* (LANGUAGE: en, es, de, ar, hi, vi, zh) ",
        ),
        ("stsb", {}, "and the columns sentence1, sentence2, label"),
        ("own", {}, f"a file, or a directory with train.* and optionally validation.* {FORMATS}"),
        ("own", {"split": "test"}, f"a file, or a directory with train.* and test.* {FORMATS}"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is_and_what_should_be(
    tmp_path, monkeypatch, name, how, expected
):
    put(tmp_path / "tasks" / "rte" / "train.jsonl", nli(3))
    (tmp_path / "tasks" / "notes.md").write_text("w1", "utf-8")
    monkeypatch.chdir(tmp_path)
    for source, message in (
        ("tasks", "tasks has no file of a known format; it holds notes.md, rte/"),
        (
            f"{tmp_path}/tasks/qqp",
            f"no data at {tmp_path}/tasks/qqp; {tmp_path}/tasks holds notes.md, rte/",
        ),
        # Like a hub id, and not to be had from there.
        (
            "tasks/qqp",
            "data 'tasks/qqp' is neither a file nor a directory and cannot be loaded from the hub",
        ),
    ):
        wrong = refused(name, source, **how)
        assert wrong.message.startswith(f"task {name}: {message}")
        assert wrong.hint.startswith("give --data PATH (for distill: eval.source): a ")
        assert expected in wrong.hint
    assert wrong.message.endswith("; tasks holds notes.md, rte/")
    if name != "own":
        wrong = refused(name, None, **how)
        assert f"task {name}: data '" in wrong.message
        assert "cannot be loaded from the hub" in wrong.message
        assert expected in wrong.hint
    put(tmp_path / "tasks" / "validation.jsonl", nli(3))
    if how.get("training", True):
        wrong = refused(name, "tasks", **how)
        assert wrong.message == f"task {name}: tasks has no train split; it has validation"
        assert expected in wrong.hint


CARD = """---
configs:
- config_name: mnli
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test_matched, path: matched.jsonl}
  - {split: test_mismatched, path: mismatched.jsonl}
---
"""


def test_without_data_the_hub_is_asked_for_what_the_task_names(hub, tmp_path):  # noqa: F811
    parts = {"train": nli(6), "matched": nli(4, 100), "mismatched": nli(3, 200)}
    for name, rows in parts.items():
        put(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "README.md").write_text(CARD, "utf-8")
    hub.add("nyu-mll/glue", tmp_path)
    with hub.known(tmp_path / "hf"):
        data = read("mnli", None, split="test")
    assert {name: ids(examples) for name, examples in data.sets.items()} == {
        "matched": list(range(100, 104)),
        "mismatched": list(range(200, 203)),
    }
    assert data.train[0].where == "nyu-mll/glue train row 1"


def task(kind, labels):
    return Task("t", kind, ("text",), ("f1",), labels)


def examples(*labels):
    return [Example(f"a:{i}", str(i), ("w1",), label) for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("kind", "labels", "missing"),
    [
        ("class", (0, 2), "b"),
        ("class", (1,), "a, c"),
        ("multi", ((0, 1), ()), "c"),
        ("tokens", ((0, 0, 2), (2,)), "b"),
    ],
)
def test_a_class_that_nothing_is_trained_on_is_named(kind, labels, missing):
    data = Labelled(task(kind, ("a", "b", "c")), examples(*labels), {}, "validation")
    with pytest.raises(UsageError) as error:
        check_training(data)
    assert error.value.message == f"task t: no training example has the label {missing}"


def test_rows_are_read_once_while_they_are_kept(tmp_path):
    rows = [{"text": f"w{n}", "label": "ab"[n % 2]} for n in range(40)]
    file = put(tmp_path / "train.jsonl", rows)
    with keep_rows():
        first = read("own", file)
        put(file, [row | {"text": f"new {row['text']}"} for row in rows])
        assert read("own", file).train == first.train
        # Another choice has the same examples.
        fewer = read("own", file, train_rows=3).train
    assert len(fewer) == 3
    assert all(example in first.train for example in fewer)
    assert all(example.texts[0].startswith("new") for example in read("own", file).train)
