"""The same rows give the same examples in every form, and any other form is refused with words."""

import gzip
import json
import shlex
import subprocess

import pandas as pd
import pytest
from reading import read_task

from kdcli.data.sources import open_source
from kdcli.errors import UsageError
from kdcli.types import Head

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


def examples(path):
    data = read_task("own", path)
    found = [*data.train, *data.sets[""]]
    return sorted((e.texts, data.task.labels[e.label]) for e in found)


EXPECTED = sorted(((row["text"],), row["label"]) for row in ROWS)


@pytest.mark.parametrize("name", FORMS)
def test_the_same_rows_give_the_same_examples(tmp_path, name):
    (tmp_path / name).write_text(FORMS[name], "utf-8", newline="")
    assert examples(tmp_path / name) == EXPECTED


def test_a_sign_in_names_of_two_columns_is_no_separator(tmp_path):
    """The usual separator wins if it separates the names."""
    (tmp_path / "a.csv").write_text("text;raw,label\nx;y,1\nz,2\n", "utf-8")
    rows = [row for _, row in next(open_source(str(tmp_path / "a.csv")).tables("train")).rows]
    assert rows == [{"text;raw": "x;y", "label": "1"}, {"text;raw": "z", "label": "2"}]


# Forms that are refused: content -> the essential words of the message, and of the hint.
LINES = "".join(f"film {n} was dull,{('bad', 'good')[n % 2]}\n" for n in range(60))
REFUSED = {
    "unclear.csv": ("text;raw|label\nx;y|1\n", ["1: are the columns separated by ';' or '|'"]),
    "twice.csv": ("text,text,label\na,b,1\n", ["1: there are 2 columns 'text'"]),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n', ["1: ", "holds 'text' twice"]),
    "joined.csv": (
        f"text,label\n{LINES}text,label\n{LINES}",
        ["62: the row repeats the names of the columns", "remove the line"],
    ),
    "joined-mark.csv": (
        f"\ufefftext,label\n{LINES}\ufefftext,label\n{LINES}",
        ["62: the row repeats the names"],
    ),
    "headless.csv": (LINES, ["1 looks like a row", "'bad'", "sed -i '1i text,label'"]),
    "headless-scores.tsv": (
        "".join(f"film {n} was dull\t{n / 7}\n" for n in range(1, 60)),
        ["1 looks like a row", r"sed -i '1i text\tlabel'"],
    ),
    "unnamed.csv": ("a,b\nx y,1\nz y,2\n", ["which column holds the text?", "sed -i '1i text,lab"]),
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


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "csv.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "cp1252", "returns"])
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
