"""The same rows give the same examples in every form, and any other form is refused with words."""

import bz2
import gzip
import io
import json
import lzma
import shlex
import subprocess
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from reading import logged_to, read_task

from kdcli.data.readers import read_rows
from kdcli.data.rows import Piece
from kdcli.data.sources import open_source
from kdcli.data.text.sentences import read_texts
from kdcli.engine.inputs import local_paths
from kdcli.errors import UsageError
from kdcli.types import Answer, Head

ROWS = [
    {"text": text.format(n), "label": ("bad", "good", "mild")[n % 3]}
    for n, text in enumerate(
        ["film {} was, well; dull", 'it said "{}"', "a\tb | {}", "two\nlines {}", "Zoë ’{}’"] * 12
    )
]
TABLE = pd.DataFrame(ROWS)


def delimited(separator, **how):
    return TABLE.to_csv(sep=separator, index=False, **how)


# name -> content. Every form holds ROWS.
FORMS = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.json": json.dumps(ROWS),
    "object.json": json.dumps({"version": 1, "rows": ROWS}),
    "a.csv": delimited(","),
    "quoted.csv": delimited(",", quoting=1),
    "semicolons.csv": delimited(";"),
    "tabs.csv": delimited("\t"),
    "bars.csv": delimited("|"),
    "named.csv": "sep=;\n" + delimited(";"),
    "named-comma.csv": "SEP=,\r\n" + delimited(","),
    "spaces.csv": delimited(",", quoting=1).replace('","', '", "'),
    "mark.csv": "\ufeff" + delimited(","),
    "a.tsv": delimited("\t"),
    "commas.tsv": delimited(","),
}


def classes():
    """Numbers with names, in another order than the alphabet's."""
    names = ["mild", "bad", "good"]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    return Dataset.from_list(ROWS, features=features)


def save(folder, name, content):
    """Save rows in a directory, and return what `--data` takes."""
    file = folder / name
    if isinstance(content, str):
        file.write_text(content, "utf-8", newline="")
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        return content(file) or file
    return file


def save_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows/train.csv", FORMS["a.csv"])


def save_card(folder):
    folder.mkdir()
    card = {"dataset_info": [{"features": classes().features._to_yaml_list()}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n", "utf-8")
    numbers = TABLE.replace({"label": {"mild": 0, "bad": 1, "good": 2}})
    numbers.to_csv(folder / "train.csv", index=False)


FORMS |= {
    "categories.parquet": lambda file: TABLE.astype({"label": "category"}).to_parquet(file),
    "classes.parquet": lambda file: classes().to_parquet(file) and None,
    "classes": lambda folder: classes().save_to_disk(folder),
    "splits": lambda folder: DatasetDict(train=classes()).save_to_disk(folder),
    "a.zip": save_zip,
    "card": save_card,
}


def examples(path):
    data = read_task("own", path)
    found = [*data.train, *data.sets[""]]
    return sorted((e.texts, data.task.labels[e.label]) for e in found)


EXPECTED = sorted(((row["text"],), row["label"]) for row in ROWS)


@pytest.mark.parametrize("name", FORMS)
def test_the_same_rows_give_the_same_examples(tmp_path, cache, name):
    assert examples(save(tmp_path, name, FORMS[name])) == EXPECTED


def test_a_sign_in_names_of_two_columns_is_no_separator(tmp_path):
    """The usual separator wins if it separates the names."""
    (tmp_path / "a.csv").write_text("text;raw,label\nx;y,1\nz,2\n", "utf-8")
    rows = [row for _, row in next(open_source(str(tmp_path / "a.csv")).tables("train")).rows]
    assert rows == [{"text;raw": "x;y", "label": "1"}, {"text;raw": "z", "label": "2"}]


# Tagged words: a text, its entities, its words and their tags.
SENTENCES = [
    (f"{text} {n}", entities, [*words, str(n)], [*tags, "O"])
    for n, (text, entities, words, tags) in enumerate(
        [
            (
                "Ann Lee left Bonn-Beuel.",
                [(0, 7, "PER"), (13, 17, "LOC"), (18, 23, "LOC")],
                ["Ann", "Lee", "left", "Bonn", "-", "Beuel", "."],
                ["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC", "O"],
            ),
            (
                "# 😀 Ann's # Zoë",
                [(4, 7, "PER"), (12, 15, "PER")],
                ["#", "😀", "Ann", "'", "s", "#", "Zoë"],
                ["O", "O", "B-PER", "O", "O", "O", "B-PER"],
            ),
            ("Nobody left.", [], ["Nobody", "left", "."], ["O", "O", "O"]),
        ]
        * 12
    )
]


def conll(line, head=""):
    """Write each word with a line of its number, itself and its tag."""
    parts = [
        "".join(line.format(n, *pair) + "\n" for n, pair in enumerate(zip(w, t, strict=True), 1))
        for _, _, w, t in SENTENCES
    ]
    return head + "\n".join(parts)


def objects(column, keys, *, with_text=False):
    """Write each text with a list of objects for its entities."""
    return [
        {
            "text": text,
            column: [
                dict(zip(keys, entity, strict=True))
                | ({"text": text[entity[0] : entity[1]]} if with_text else {})
                for entity in entities
            ],
        }
        for text, entities, _, _ in SENTENCES
    ]


def tasks():
    """Write tasks as Label Studio does, which counts the units of UTF-16."""
    found = []
    for number, (text, entities, _, _) in enumerate(SENTENCES):
        results = []
        for entity in entities:
            start, end = (len(text[:n].encode("utf-16-le")) // 2 for n in entity[:2])
            inside = text[entity[0] : entity[1]]
            value = {"start": start, "end": end, "text": inside, "labels": [entity[2]]}
            names = {"from_name": "label", "to_name": "text", "type": "labels"}
            results.append({"value": value, **names})
        cancelled = {"was_cancelled": True, "result": []}
        annotations = [{"was_cancelled": False, "result": results}, cancelled]
        found.append({"id": number, "data": {"text": text}, "annotations": annotations})
    return found


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


START_END = ("start", "end", "label")
TAGGED = {
    "a.jsonl": lines({"tokens": w, "tags": t} for _, _, w, t in SENTENCES),
    "a.conll": conll("{1} {2}"),
    "tags-first.bio": conll("{2}\t{1}"),
    "tabs.bio": conll("{1}\t{2}").replace("\n", "\r\n"),
    "conll-2003.conll": conll("{1} NN B-NP {2}", "-DOCSTART- -X- -X- O\n\n"),
    "rules.conll": conll("{1} {2}", "--------\n\n-------- O\n\n"),
    "tagged-rules.conll": conll("{1} NN B-NP {2}", "==== -X- -X- O\n\n"),
    "germeval.iob2": "\n\n".join(
        f"# page {n}\n{part}" for n, part in enumerate(conll("{0}\t{1}\tO\t{2}").split("\n\n"))
    ),
    "doccano.jsonl": lines(
        {"id": n, "text": text, "label": entities}
        for n, (text, entities, _, _) in enumerate(SENTENCES)
    ),
    "doccano-new.jsonl": lines(
        row | {"relations": [], "Comments": []}
        for row in objects("entities", ("start_offset", "end_offset", "label"))
    ),
    "spacy.json": json.dumps([[text, {"entities": found}] for text, found, _, _ in SENTENCES]),
    "annotator.json": json.dumps(
        {
            "classes": ["PER", "LOC"],
            "annotations": [[text, {"entities": found}] for text, found, _, _ in SENTENCES],
        }
    ),
    "prodigy.jsonl": lines(row | {"answer": 1} for row in objects("spans", START_END)),
    "spacy-doc.jsonl": lines(
        row | {"tokens": [{"id": 0, "start": 0, "end": 3, "tag": "NNP"}]}
        for row in objects("ents", START_END)
    ),
    "studio.json": json.dumps(tasks()),
    "studio-min.json": json.dumps(
        [
            {"text": text, "label": [v["value"] for v in task["annotations"][0]["result"]], "id": 1}
            for (text, *_), task in zip(SENTENCES, tasks(), strict=True)
        ]
    ),
    "spaces.json": json.dumps(
        [
            [text, {"entities": [[s, e + (text[e : e + 1] == " "), x] for s, e, x in found]}]
            for text, found, _, _ in SENTENCES
        ]
    ),
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#a\tX\nb\tY\n\n#c\tX\n", "#a b #c"),
        ("a X\n\n#b Y\nc X\n\n# d\ne X\n", "a #b c e"),
        ("#\tpage 1\na\tX\tY\n\n#\tpage 2\nb\tX\tY\n", "a b"),
        ("#begin document (a); part 000\na\t0\tX\nb\t1\tY\n\n#end document\n", "a b"),
        ("#Token\tTag\na\tX\nb\tY\n", "a b"),
        ("#a\tB-X\nb\tY\n", "#a b"),
        ("a 1 x X\nb 2 y Y\n\n#sent id = 2\nc 1 x X\n", "a b c"),
    ],
)
def test_a_first_word_that_begins_like_a_comment_is_a_word(tmp_path, text, words):
    (tmp_path / "a.conll").write_text(text, "utf-8")
    rows = read_rows(Piece(str(tmp_path / "a.conll")))
    assert [word for _, row in rows for word in row["tokens"]] == words.split()


def test_a_line_that_may_name_the_columns_is_logged(tmp_path):
    (tmp_path / "a.conll").write_text("#word\tX\na\tY\nb\tZ\n", "utf-8")
    log = []
    read_task("own", tmp_path / "a.conll", log, training=False)
    [line] = [line for line in log if "names of the columns" in line]
    assert "a.conll:1: '#word\\tX' is read as the names of the columns" in line


@pytest.mark.parametrize("name", TAGGED)
def test_the_same_tagged_words_give_the_same_examples(tmp_path, name):
    (tmp_path / name).write_text(TAGGED[name], "utf-8", newline="")
    data = read_task("own", tmp_path / name)
    assert data.task.labels == ("O", "B-LOC", "B-PER", "I-PER")
    found = [
        (e.texts, tuple(data.task.labels[n] for n in e.label))
        for e in [*data.train, *data.sets[""]]
    ]
    assert sorted(found) == sorted((tuple(w), tuple(t)) for _, _, w, t in SENTENCES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.conll", b"w1 O\nw2 O\n\nw3 O\n\xff B-X\nw4 O\n\nw5 O\n"),
        ("a.csv", b"tokens,tags\n\"['w1', 'w2']\",1\n\"w3\n\xff\nw4\",2\nw5,3\n"),
    ],
)
def test_a_line_that_is_not_utf8_takes_its_row_along(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    bad = []
    rows = list(read_rows(Piece(str(tmp_path / name)), bad.append))
    assert len(rows) == 2
    assert "w3" not in str(rows)
    assert [error.problem for error in bad] == ["not UTF-8"]


def test_quotes_around_whole_lines_can_be_removed(tmp_path):
    quoted = "".join(
        f'"{line.replace(chr(34), 2 * chr(34))}"\n' for line in f"text,label\n{LINES}".splitlines()
    )
    (tmp_path / "a.csv").write_text(quoted, "utf-8")
    with pytest.raises(UsageError) as caught:
        read_task("own", tmp_path / "a.csv")
    command = caught.value.hint.partition(": ")[2].rpartition("; ")[0]
    subprocess.run(["bash", "-c", command], check=True)
    assert len(examples(tmp_path / "a.csv")) == 60


def test_universal_dependencies_have_their_own_columns(tmp_path):
    content = "".join(
        f"# sent_id = {n}\n# text = vámonos\n"
        "1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_\n"
        f"1\tvamos\tir\tVERB\tV{n}\t_\t0\troot\t_\t_\n"
        "2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_\n\n"
        for n in range(2)
    )
    (tmp_path / "a.conllu").write_text(content, "utf-8")
    rows = [row for _, row in next(open_source(str(tmp_path / "a.conllu")).tables("train")).rows]
    assert rows == [
        {"tokens": ["vamos", "nos"], "upos": ["VERB", "PRON"], "xpos": [f"V{n}", "P"]}
        for n in range(2)
    ]


def choices(*names):
    value = {"choices": list(names)}
    return [{"result": [{"type": "choices", "from_name": "mood", "value": value}]}]


@pytest.mark.parametrize("several", [False, True])
def test_choices_of_label_studio_are_labels(tmp_path, several):
    labels = [("bad",), ("good",), ("bad", "good") if several else ("mild",)] * 12
    content = [
        {"id": n, "data": {"text": f"w{n}"}, "annotations": choices(*names)}
        for n, names in enumerate(labels)
    ]
    (tmp_path / "a.json").write_text(json.dumps(content), "utf-8")
    assert list(open_source(str(tmp_path / "a.json")).documents("train", None))[:2] == ["w0", "w1"]
    data = read_task("own", tmp_path / "a.json")
    assert data.task.kind == ("multi" if several else "class")
    assert data.task.labels == (("bad", "good") if several else ("bad", "good", "mild"))


QUESTIONS = [
    {
        "question": f"who left {n}?",
        "context": f"It was Ann {n} who left.",
        "answers": {"text": ["Ann"] * (n % 3), "answer_start": [7] * (n % 3)},
    }
    for n in range(40)
]


def answer_objects(row):
    answers = row["answers"]
    pairs = zip(answers["text"], answers["answer_start"], strict=True)
    return [{"text": text, "answer_start": start} for text, start in pairs]


SQUAD = {
    "a.jsonl": lines(QUESTIONS),
    "objects.jsonl": lines(row | {"answers": answer_objects(row)} for row in QUESTIONS),
    "squad.json": json.dumps(
        {
            "version": "v2.0",
            "data": [
                {
                    "title": "Ann",
                    "paragraphs": [
                        {
                            "context": row["context"],
                            "qas": [
                                {
                                    "id": str(n),
                                    "question": row["question"],
                                    "is_impossible": n % 3 == 0,
                                    "answers": answer_objects(row),
                                }
                            ],
                        }
                    ],
                }
                for n, row in enumerate(QUESTIONS)
            ],
        }
    ),
}


@pytest.mark.parametrize("name", SQUAD)
def test_the_same_questions_give_the_same_examples(tmp_path, name):
    (tmp_path / name).write_text(SQUAD[name], "utf-8")
    data = read_task("own", tmp_path / name)
    assert (data.task.kind, data.task.impossible) == ("span", True)
    found = sorted((e.texts, e.label) for e in [*data.train, *data.sets[""]])
    assert found == sorted(
        (
            (row["question"], row["context"]),
            tuple(Answer(a["text"], a["answer_start"]) for a in answer_objects(row)),
        )
        for row in QUESTIONS
    )


# Forms that are refused: content -> the essential words of the message, and of the hint.
LINES = "".join(f"film {n} was dull,{('bad', 'good')[n % 2]}\n" for n in range(60))
REFUSED = {
    "unclear.csv": ("text;raw|label\nx;y|1\n", ["1: are the columns separated by ';' or '|'"]),
    "twice.csv": ("text,text,label\na,b,1\n", ["1: there are 2 columns 'text'"]),
    "quotes.csv": (
        "'text','label'\n'a, b','c'\n",
        ["1: the columns are in single quotes ('text', 'label')", "quotechar="],
    ),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n', ["1: ", "holds 'text' twice"]),
    "joined.csv": (
        f"text,label\n{LINES}text,label\n{LINES}",
        ["62: the row repeats the names of the columns", "remove the line"],
    ),
    "joined-mark.csv": (
        f"\ufefftext,label\n{LINES}\ufefftext,label\n{LINES}",
        ["62: the row repeats the names"],
    ),
    "turned.csv": (
        f"text,label\n{LINES}label,text\nbad,it was dull\n",
        ["62: from here on, the columns have another order: label, text"],
    ),
    "escaped.csv": (
        'text,label\n"it said \\"hi\\"",1\nb,2\n',
        ["2: not CSV", 'double the quotes in it ("", not \\")'],
    ),
    "wrapped.csv": (
        '"text,label"\n"it was, well, dull,bad"\n',
        ["1: the only column has the name 'text,label'", "sed -i 's/^\"//;"],
    ),
    "endless.conll": ("Ann B-PER\n" * 10_001, ["1: the sentence has more than 10,000 words"]),
    "headless.csv": (LINES, ["1 looks like a row", "'bad'", "such as text,label"]),
    "headless-scores.tsv": (
        "".join(f"film {n} was dull\t{n / 7}\n" for n in range(1, 60)),
        ["1 looks like a row", "separator of the other lines"],
    ),
    "unnamed.csv": ("a,b\nx y,1\nz y,2\n", ["which column holds the text?", "such as text,label"]),
    "tagged.txt": ("EU B-ORG\nrejects O\n", ["its lines hold no labels", "ends in .conll"]),
    "tagged.tsv": ("EU\tB-ORG\nrejects\tO\n\nAnn\tB-PER\n", ["words and tags", ".conll"]),
    "short.conll": ("EU B-ORG\nrejects O\n\nAnn\n", ["4: the line does not have 2 columns"]),
    "overlap.jsonl": (
        lines([{"text": "Ann Lee left", "label": [[0, 7, "PER"], [4, 7, "NAME"]]}]),
        ["1: two entities overlap: 'Ann Lee' and 'Lee'"],
    ),
    "outside.jsonl": (
        lines([{"text": "Ann left", "label": [[4, 9, "PER"]]}]),
        ["1: the entity 'PER' is not in the text: 4 to 9 of 8 letters is 'left'"],
    ),
    "elsewhere.json": (
        json.dumps(
            [
                {
                    "text": "Ann left",
                    "label": [{"start": 0, "end": 3, "text": "Bob", "labels": ["P"]}],
                }
            ]
        ),
        ["1: the entity 'P' is not in the text", "'Ann', not 'Bob'"],
    ),
    "disagreeing.json": (
        json.dumps([{"data": {"text": "a"}, "annotations": [*choices("x"), *choices("y")]}]),
        ["1: the annotations of the task differ"],
    ),
    "unannotated.json": (
        json.dumps([{"data": {"text": "a"}, "annotations": []}]),
        ["1: the task has no annotation"],
    ),
    "first.jsonl": (
        '{"text": "w"}\n' + "".join(f'{{"text": "w{n}", "label": {n % 2}}}\n' for n in range(60)),
        ["1: there is no column 'label'", "data.skip_bad"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_with_words(tmp_path, name):
    content, words = REFUSED[name]
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(UsageError) as caught:
        read_task("own", tmp_path / name)
    for word in words:
        assert word in f"{caught.value.message}\n{caught.value.hint}"


@pytest.mark.parametrize(
    ("ending", "encoding"),
    [
        *(("csv", each) for each in ("utf-16", "utf-16-le", "utf-16-be", "cp1252", "returns")),
        *(("json", each) for each in ("utf-16", "cp1252", "returns")),
        *(("jsonl", "utf-16"), ("csv.gz", "utf-16"), ("csv.gz", "returns")),
    ],
)
def test_the_line_that_converts_a_file_converts_it(tmp_path, ending, encoding):
    file = tmp_path / f"it's.{ending}"
    text = FORMS[f"a.{ending.removesuffix('.gz')}"]
    if encoding == "returns":
        text = text.replace("two\n", "two ").replace("two\\n", "two ").replace("\n", "\r")
    elif ending.startswith("json"):
        text = text.replace("\\u2019", "’").replace("\\u00eb", "ë")
    content = text.encode("utf-8" if encoding == "returns" else encoding)
    file.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    if ending == "json" and encoding != "cp1252":
        # JSON may have any of these encodings and line ends.
        assert len(examples(file)) == len(ROWS)
        return
    with pytest.raises(UsageError) as caught:
        read_task("own", file)
    names = {"cp1252": "cp1252", "returns": "carriage returns"}
    assert names.get(encoding, "UTF-16") in f"{caught.value.message} {caught.value.hint}"
    command = caught.value.hint.split("; ")[0].partition(": ")[2]
    assert shlex.quote(str(file)) in command
    subprocess.run(["bash", "-c", command], check=True)
    expected = [(tuple(t.replace("two\n", "two ") for t in texts), y) for texts, y in EXPECTED]
    assert examples(file) == (sorted(expected) if encoding == "returns" else EXPECTED)


def test_a_file_that_quotes_nothing_keeps_its_quotes(tmp_path):
    content = 'text,label\n"Yes" and "no",1\n"" x,2\n"all",3\n'
    (tmp_path / "a.csv").write_text(content, "utf-8")
    documents = open_source(str(tmp_path / "a.csv")).documents("train", "text")
    assert list(documents) == ['"Yes" and "no"', '"" x', "all"]


def test_survey_questions_are_names_of_columns(tmp_path):
    (tmp_path / "a.csv").write_text(
        "What did you think of it?,How many stars do you give?\n"
        + "".join(f"it was {n},{n % 3}\n" for n in range(60)),
        "utf-8",
    )
    columns = {"text": "What did you think of it?", "label": "How many stars do you give?"}
    assert len(read_task("own", tmp_path / "a.csv", columns=columns).task.labels) == 3


# The first row may lack a column.


@pytest.mark.parametrize("first", [{"title": "w0"}, {"title": "w0", "text": None}])
def test_documents_are_in_the_column_that_the_first_rows_have(tmp_path, first):
    rows = [first, *({"title": f"w{n}", "text": f"long text {n}"} for n in range(5))]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    documents = open_source(str(file)).documents("train", None)
    if "text" in first:
        assert list(documents) == [f"long text {n}" for n in range(5)]
    else:
        with pytest.raises(UsageError, match=r"a\.jsonl:1: there is no column 'text'"):
            list(documents)


def test_labels_after_the_first_rows_are_not_ignored(tmp_path):
    rows = [{"text": f"w{n}"} for n in range(150)] + [{"text": "w", "label": "bad"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    head = Head("class", ("bad", "good"))
    with pytest.raises(UsageError, match=r"a\.jsonl:151: there is a label, but none in the first"):
        read_task("own", file, training=False, head=head)
    assert len(read_task("own", file, training=False, head=head, withheld=True).sets[""]) == 151


# Files of one split.


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["train.csv", "train.old.csv"], "two files for the train split, train.csv and train.old"),
        (["train.csv", "train-old.csv"], "two files for the train split"),
        (["train.csv", "train.jsonl"], "two files for the train split, train.csv and train.jsonl"),
        (["train.csv", "train.csv.gz"], "two files for the train split"),
        (["de.train.csv", "en.train.csv"], "two files for the train split, de.train.csv and en."),
        (["train-0.csv", "train-0.csv.gz"], "two files for the train split"),
        (["rows.csv", "rows.jsonl"], "rows.csv and rows.jsonl, which may hold the same rows"),
        (["rows.csv", "rows.csv.gz"], "may hold the same rows"),
    ],
)
def test_two_versions_of_a_split_are_refused(tmp_path, names, problem):
    for name in names:
        (tmp_path / name).write_text("x", "utf-8")
    with pytest.raises(UsageError, match="away, or") as caught:
        open_source(str(tmp_path))
    assert problem in caught.value.message


def test_several_files_of_a_split_are_logged(tmp_path):
    for number in (1, 2):
        (tmp_path / f"part-{number}.csv").write_text(FORMS["a.csv"], "utf-8", newline="")
    log = []
    read_task("own", tmp_path, log)
    assert "train is read from 2 files: part-1.csv, part-2.csv" in log


def test_files_of_no_split_are_named(tmp_path):
    others = ("train (1).csv", "notice.csv", "train_more.csv", "test_hard.csv", ".hidden.csv")
    for name in ("train.csv", *others):
        (tmp_path / name).write_text(FORMS["a.csv"], "utf-8", newline="")
    log, of_text = [], []
    read_task("own", tmp_path, log)
    with logged_to(of_text):
        read_texts(str(tmp_path), column="text", unit="document", rows=None)
    unread = (
        "skipped: notice.csv, test_hard.csv, train (1).csv, train_more.csv; kdcli reads train, "
        "validation and test of one directory: rename the file, or give it alone as --data"
    )
    assert (log.count(unread), of_text.count(unread)) == (1, 1)
    single = []
    read_task("own", tmp_path / "train.csv", single)
    assert not any("skipped" in line for line in single)


def test_joined_files_of_json_lines_may_have_several_byte_order_marks(tmp_path):
    lines = ['\ufeff{"text": "w1"}\n', '{"text": "w2"}\n', '\ufeff{"text": "w3"}\n']
    (tmp_path / "a.jsonl").write_text("".join(lines), "utf-8")
    texts = open_source(str(tmp_path / "a.jsonl")).documents("train", None)
    assert list(texts) == ["w1", "w2", "w3"]


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "train.csv").write_text(FORMS["a.csv"], "utf-8", newline="")
    (tmp_path / "validation.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(UsageError, match=r"validation\.csv is a link to .*gone.csv, which"):
        read_task("own", tmp_path)


def test_rows_in_other_directories_and_in_zip_files_are_named(tmp_path):
    (tmp_path / "2020").mkdir()
    for name in ("rows.csv", "2020/more.csv"):
        (tmp_path / name).write_text(FORMS["a.csv"], "utf-8", newline="")
    log = []
    read_task("own", tmp_path, log)
    assert any("skipped: 2020/;" in line for line in log)
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        for name in ("train.csv", "sample_submission.csv"):
            archive.writestr(name, FORMS["a.csv"])
    read_task("own", tmp_path / "rows.zip", log)
    assert any("skipped: sample_submission.csv" in line for line in log)


def test_missing_parts_of_a_split_are_a_warning(tmp_path):
    log = []
    for number in (0, 3):
        rows = FORMS["a.csv"]
        (tmp_path / f"train-0000{number}-of-00004.csv").write_text(rows, "utf-8", newline="")
    read_task("own", tmp_path, log)
    assert "warning: train: 2 of 4 files are missing; the first is train-00001-of-00004" in log


@pytest.mark.parametrize(
    "names",
    [
        ("training", "eval", "testing"),
        ("Train", "DEV", "Test"),
        ("train", "val", "test"),
        ("train", "valid", "test"),
        ("reviews.train", "reviews.dev", "reviews.test"),
        ("en_train", "en-validation", "en test"),
    ],
)
def test_splits_have_other_names(tmp_path, names):
    for name in names:
        (tmp_path / f"{name}.csv").write_text("text\nw\n", "utf-8")
    assert sorted(open_source(str(tmp_path)).splits()) == ["test", "train", "validation"]


@pytest.mark.parametrize(
    "names",
    [
        ["train.csv", "train_2.csv"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        [
            "train-00000-of-00002-0123456789abcdef.parquet",
            "train-00001-of-00002-fedcba9876543210.parquet",
        ],
        ["train-0.txt", "train-1.txt.gz"],
        ["a.csv", "b.jsonl"],
    ],
)
def test_numbered_files_are_one_split(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("x", "utf-8")
    assert [file.name for file in open_source(str(tmp_path)).files["train"]] == names


# Clones of data sets of the hub.

CONFIGS = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train.csv
  - split: validation
    path: "en/d*.csv"
- config_name: de
{default}  data_files:
  - split: train
    path: de.csv
dataset_info:
- config_name: de
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': good
          '1': bad
---
"""


def clone(folder, default="  default: true\n"):
    """A clone with two configurations, and numbers for the classes of German texts."""
    (folder / "README.md").write_text(CONFIGS.format(default=default), "utf-8")
    (folder / "en").mkdir()
    (folder / "en" / "train.csv").write_text(FORMS["a.csv"], "utf-8")
    (folder / "en" / "dev.csv").write_text(FORMS["a.csv"], "utf-8")
    rows = "".join(f"Film {n},{n % 2}\n" for n in range(60))
    (folder / "de.csv").write_text(f"text,label\n{rows}", "utf-8")
    return folder


def test_the_default_configuration_of_a_clone_is_read_with_its_class_names(tmp_path):
    assert read_task("own", clone(tmp_path)).task.labels == ("good", "bad")
    assert examples(tmp_path)[:2] == [(("Film 0",), "good"), (("Film 1",), "bad")]
    assert open_source(str(tmp_path)).splits() == ["train"]


def test_other_configurations_of_a_clone_are_read_by_their_name(tmp_path):
    with pytest.raises(UsageError, match="has the configurations en, de, no default") as caught:
        open_source(str(clone(tmp_path, default="")))
    assert caught.value.hint == f"name one of them: --data {tmp_path}:en"
    with pytest.raises(UsageError, match="has no configuration fr; it has en, de"):
        open_source(f"{tmp_path}:fr")
    assert open_source(f"{tmp_path}:en").splits() == ["train", "validation"]
    assert read_task("own", f"{tmp_path}:de").task.labels == ("good", "bad")
    assert local_paths(f"{tmp_path}:de") == [tmp_path]
    assert open_source(str(tmp_path / "en")).splits() == ["validation", "train"]
    en = CONFIGS.format(default="").replace("name: en\n", "name: en\n  default: true\n")
    (tmp_path / "README.md").write_text(en, "utf-8")
    assert open_source(str(tmp_path)).splits() == ["train", "validation"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [('  sep: ";"\n', "has sep, which kdcli does not read"), ("  - broken\n", "cannot be read")],
)
def test_other_settings_of_a_configuration_are_refused(tmp_path, setting, problem):
    clone(tmp_path, default=f"  default: true\n{setting}")
    with pytest.raises(UsageError, match=problem):
        open_source(str(tmp_path))


def test_an_older_clone_has_its_class_names_in_another_file(tmp_path):
    (tmp_path / "data").mkdir()
    rows = "".join(f"film {n},{n % 2}\n" for n in range(60))
    (tmp_path / "data" / "train.csv").write_text(f"text,label\n{rows}", "utf-8")
    names = {"names": ["good", "bad"], "_type": "ClassLabel"}
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": names}
    info = {"default": {"features": features}}
    (tmp_path / "dataset_infos.json").write_text(json.dumps(info), "utf-8")
    assert read_task("own", tmp_path).task.labels == ("good", "bad")


def test_each_split_may_have_a_directory(tmp_path):
    for split, text in (("train", "w1"), ("dev", "w2"), ("images", "w3")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0000.txt").write_text(text, "utf-8")
    (tmp_path / "train" / "0001.txt").write_text("w4", "utf-8")
    opened = open_source(str(tmp_path))
    assert list(opened.documents("train", None)) == ["w1", "w4"]
    assert list(opened.documents("validation", None)) == ["w2"]


# Small files that hold gigabytes.


def constant(rows, value):
    """A column that holds one value, which Parquet stores once."""
    return pa.table(
        {"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([value]))}
    )


def write_parquet(file, table, **how):
    pq.write_table(table, file, compression="zstd", dictionary_pagesize_limit=1 << 30, **how)


def write_zip(file, content):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.txt", content)


BLANK = (b" " * 999 + b"\n") * 20_000
BOMBS = {
    "blank.jsonl.gz": lambda file: file.write_bytes(gzip.compress(BLANK)),
    "blank.txt.xz": lambda file: file.write_bytes(lzma.compress(BLANK)),
    "columns.csv.bz2": lambda file: file.write_bytes(bz2.compress(b"," * 20_000_000)),
    "objects.json.gz": lambda file: file.write_bytes(gzip.compress(b"[" + b"{}," * 7_000_000)),
    "blank.zip": lambda file: write_zip(file, BLANK),
    "rows.parquet": lambda file: write_parquet(file, constant(1_000_000, "a")),
    "dictionary.parquet": lambda file: write_parquet(file, constant(1000, "x" * (1 << 24))),
    "page.parquet": lambda file: write_parquet(file, pa.table({"text": ["x" * (1 << 24)]})),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path, name):
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 60_000
    with pytest.raises(UsageError, match="unpacks to more than 200 times its size") as caught:
        list(open_source(str(tmp_path / name)).documents("train", None))
    assert "save the rows as .jsonl" in caught.value.hint


def test_too_many_columns_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a," * 20_000, "utf-8")
    with pytest.raises(UsageError, match=r"a\.csv:1: there are 20,001 columns, more than 10,000"):
        list(open_source(str(tmp_path / "a.csv")).documents("train", None))


def test_a_damaged_page_takes_no_row_without_a_word(tmp_path):
    whole = io.BytesIO()
    pq.write_table(pa.table({"text": [f"w{n % 7}" for n in range(300)]}), whole)
    content, refused = whole.getvalue(), 0
    footer = int.from_bytes(content[-8:-4], "little")
    for at in range(4, len(content) - 8 - footer):
        for value in (0, 1, 0x7F, 0xFF):
            damaged = content[:at] + bytes([value]) + content[at + 1 :]
            (tmp_path / "a.parquet").write_bytes(damaged)
            try:
                rows = list(read_rows(Piece(str(tmp_path / "a.parquet"))))
            except UsageError:
                refused += 1
            else:
                assert len(rows) == 300, (at, value)
    assert refused > 100


def test_a_damaged_footer_does_not_end_the_process(tmp_path):
    whole = io.BytesIO()
    pq.write_table(pa.table({"text": ["w"] * 9, "tags": [[1, 2]] * 9}), whole)
    content, file = whole.getvalue(), tmp_path / "a.parquet"
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    messages = []
    for at in range(begin, len(content) - 8):
        for value in (0, 2, 4, 0xFF):
            file.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            try:
                list(read_rows(Piece(str(file))))
            except UsageError as error:
                messages.append(error.message)
    # pyarrow's metadata of a column end the process here.
    assert any("level histogram size mismatch" in message for message in messages)


def test_tables_may_repeat_long_values(tmp_path):
    text = "".join(map(chr, range(40, 120))) * 20
    write_parquet(tmp_path / "a.parquet", constant(20_000, text))
    assert len(list(open_source(str(tmp_path / "a.parquet")).documents("train", None))) == 20_000


def test_two_columns_of_a_table_have_two_names(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match=r"a\.arrow: there are 2 columns 'text'"):
        list(open_source(str(tmp_path / "a.arrow")).documents("train", None))


# Other forms of JSON, and files whose name tells another format.

JSON_FORMS = {
    "columns": {"text": ["a", "b"], "label": [1, 2]},
    "pandas": {"text": {"0": "a", "1": "b"}, "label": {"0": 1, "1": 2}},
    "pandas, shuffled": {"text": {"7": "a", "3": "b"}, "label": {"7": 1, "3": 2}},
    "pandas in parts": {
        "columns": ["text", "label"],
        "index": [0, 1],
        "data": [["a", 1], ["b", 2]],
    },
    "by id": {"x": {"text": "a", "label": 1}, "y": {"text": "b", "label": 2}},
    "list": [{"text": "a", "label": 1}, {"text": "b", "label": 2}],
    "in an object": {"version": 1, "rows": [{"text": "a", "label": 1}, {"text": "b", "label": 2}]},
}


@pytest.mark.parametrize("form", JSON_FORMS)
def test_json_has_many_forms(tmp_path, form):
    (tmp_path / "A.JSON").write_text(json.dumps(JSON_FORMS[form]), "utf-8")
    rows = [row for _, row in next(open_source(str(tmp_path / "A.JSON")).tables("train")).rows]
    assert rows == JSON_FORMS["list"]


@pytest.mark.parametrize("column", [["a", "b"], {"0": "a", "1": "b"}])
def test_json_may_have_one_column(tmp_path, column):
    (tmp_path / "a.json").write_text(json.dumps({"text": column}), "utf-8")
    assert list(open_source(str(tmp_path / "a.json")).documents("train", None)) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", ["pointer", "git lfs pull"]),
        ("a.csv", b"<!DOCTYPE html>\n<html>", ["is a web page"]),
        ("a.csv", b"PK\x03\x04", ["is a zip file", "save a spreadsheet as .csv"]),
        ("a.csv", b"%PDF-1.7\n\xff\n", ["is a PDF", "save its text as .txt"]),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), ["is gzip", "end its name in .gz"]),
        ("a.xlsx", b"PK\x03\x04", ["no known format", "save the sheet as CSV"]),
        ("a.pkl", b"", ["no known format", "save the rows as .parquet"]),
        (
            "a.jsonl",
            b'[{"text": "a"},\n{"text": "b"}]',
            ["1: not JSON", "is one list ends in .json"],
        ),
        ("a.jsonl", b'{\n"text": "a"}', ["1: not JSON", "jq -c . FILE"]),
        (
            "a.json",
            b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
            ["holds several lists of rows: train, test", "jq .train FILE"],
        ),
        ("a.json", b'[{"paragraphs": [{"text": "a"}]}]', ["not in the form of SQuAD: no 'qas'"]),
    ],
)
def test_files_of_other_formats_are_refused_with_words(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        list(open_source(str(tmp_path / name)).documents("train", None))
    for word in words:
        assert word in f"{caught.value.message}\n{caught.value.hint}"


def test_answers_that_are_objects_may_be_a_column_of_json(tmp_path):
    columns = {
        "question": ["who left?", "who came?"],
        "context": ["Ann left.", "Bob left."],
        "answers": [{"text": ["Ann"], "answer_start": [0]}, {"text": [], "answer_start": []}],
    }
    (tmp_path / "a.json").write_text(json.dumps(columns), "utf-8")
    rows = [row for _, row in next(open_source(str(tmp_path / "a.json")).tables("train")).rows]
    assert rows == [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]


@pytest.mark.parametrize("ending", ["tsv", "csv"])
@pytest.mark.parametrize("place", range(97, 101))
def test_quoted_cells_are_read_wherever_the_first_lines_end(ending, place, tmp_path):
    # The hundredth line may be any line of the text, or the last one before it.
    texts = ["a\tb", *(f"w{n}" for n in range(place - 2)), "one\ntwo\nthree", "a\nb", "c\td"]
    table = pd.DataFrame(
        {"text": texts, "label": ["bad", "good"] * (len(texts) // 2) + ["bad"] * (len(texts) % 2)}
    )
    table.to_csv(tmp_path / f"a.{ending}", sep="\t", index=False)
    rows = [row for _, row in next(open_source(str(tmp_path / f"a.{ending}")).tables("train")).rows]
    assert rows == table.to_dict("records")


def test_quoted_lines_of_tabs_that_look_like_rows_are_refused(tmp_path):
    rows = [f'"w{n}"\t{n}.5\n' for n in range(60)]
    text = "".join(["text\tscore\n", *rows, '"it was\t-3\nor so"\t4.5\n'])
    (tmp_path / "a.tsv").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"a.tsv:62: not TSV: the quote that opens here joins"):
        list(next(open_source(str(tmp_path / "a.tsv")).tables("train")).rows)


def test_texts_about_data_are_no_data(tmp_path):
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        (folder / "README.txt").write_text("a line", "utf-8")
        (folder / "LICENSE.txt").write_text("a line", "utf-8")
    (tmp_path / "data" / "rows.csv").write_text(FORMS["a.csv"], "utf-8", newline="")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in ("README.txt", "data/README.txt", "data/rows.csv"):
            archive.write(tmp_path / file, file)
    assert examples(tmp_path) == examples(tmp_path / "data.zip") == EXPECTED
    # Only the names of plain text tell that it is about the data.
    (tmp_path / "data" / "rows.csv").rename(tmp_path / "requirements.csv")
    assert examples(tmp_path) == EXPECTED


@pytest.mark.parametrize("folders", [["data"], ["train", "test"]])
def test_rows_are_read_before_folders(tmp_path, folders):
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text("a line", "utf-8")
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps(ROWS), "utf-8")
    files = open_source(str(tmp_path)).files
    assert [*files.values()] == [(tmp_path / "test.json",), (tmp_path / "train.json",)]


@pytest.mark.parametrize(
    ("name", "content", "problem", "hint"),
    [
        (
            "a.txt",
            b"one\ntwo\rthree\n",
            "a.txt:2: a carriage return within the line",
            r"tr '\r' '\n' < DIR/a.txt > fixed-a.txt",
        ),
        (
            "a.txt.gz",
            gzip.compress(b"two\rthree\n", mtime=0),
            "a.txt.gz:1: a carriage return within the line",
            "replace it by a line feed",
        ),
        (
            "a.csv",
            b"text,label,,\none,a,,\ntwo, b,a,\n",
            "a.csv:3: a cell is in a column without a",
            "or remove the column",
        ),
    ],
)
def test_what_has_no_place_in_its_line_is_named(tmp_path, name, content, problem, hint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem) as caught:
        list(open_source(str(tmp_path / name)).documents("train", "text"))
    assert str(caught.value.hint).replace(str(tmp_path), "DIR").endswith(hint)


def test_boxes_are_no_classes(tmp_path):
    value = {"globalOffsets": {"start": 0, "end": 3}, "hypertextlabels": ["PER"]}
    result = {"type": "hypertextlabels", "from_name": "ner", "value": value}
    task = {"data": {"text": "Ann left"}, "annotations": [{"result": [result]}]}
    (tmp_path / "a.json").write_text(json.dumps([task]), "utf-8")
    with pytest.raises(UsageError, match="the only column is text"):
        read_task("own", tmp_path / "a.json")
