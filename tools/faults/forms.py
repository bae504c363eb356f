"""The same rows in every form that can hold them.

kdcli must read the same examples from each, and a fixed model must have the same scores on them.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.material import ROOT, words_model
from tools.faults.process import kdcli

Row = dict[str, Any]
ROWS = 200
SCORE_EVERY = 40
"""One case of this number compares scores of a model, which takes seconds."""
WORDS = (
    *(
        "the",
        "room",
        "was",
        "cold",
        "Caf\u00e9",
        "cafe\u0301",
        "\u65e5\u672c",
        "\U0001f600",
        "it's",
    ),
    *('"quoted"', 'a"b', "'", ";", "a,b", "|", "#", "=1+1", "007", "1.0", "1e5", "-3", "NaN", "NA"),
    *(
        "it's",
        "null",
        "None",
        "true",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "<br>",
        "\\n",
        "\\",
        "{x}",
    ),
)
BETWEEN = (" ",) * 12 + ("  ", "\t", "\n", "\n\n", "\u2028", "\u00a0")
PLAIN = ("Ann", "left", "the", "room", "Caf\u00e9", "\u65e5\u672c", "2020", ",", ".", "#", "(", '"')
"""Words that a text with positions of entities is cut into, too."""
NAMES = ("calm", "B risk", "\u00e9t\u00e9", "say 'x'", "no", "x-1", "Zed", "not calm")
TOPICS = tuple(f"topic-{n}" for n in range(6))
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@dataclass(frozen=True)
class Table:
    """Rows, and what is known about them.

    Attributes:
        kind: The kind of the task, or one of `RANKED` or `EMBEDDED`.
        rows: The rows, whose classes are names, or numbers if they have no names.
        meaning: The texts and the label of each row, as kdcli must read them.
        label: The column of the label.
        classes: The names of classes, in the order of a schema.
    """

    kind: str
    rows: list[Row]
    meaning: list[tuple[tuple[str, ...], object]]
    label: str
    classes: tuple[str, ...] = ()

    def shuffled(self, rng: random.Random) -> Table:
        """Return the table with another order of its columns and classes."""
        names = rng.sample(list(self.rows[0]), len(self.rows[0]))
        classes = tuple(rng.sample(self.classes, len(self.classes)))
        rows = [{name: row[name] for name in names} for row in self.rows]
        return replace(self, rows=rows, classes=classes)

    def columns(self) -> dict[str, list[Any]]:
        """Return the values of each column."""
        return {name: [row[name] for row in self.rows] for name in self.rows[0]}

    def dataset(self) -> Any:
        """Return a `Dataset`, whose schema has the names of the classes."""
        import datasets

        data = datasets.Dataset.from_dict(self.columns())
        if not self.classes:
            return data
        names = datasets.ClassLabel(names=list(self.classes))
        is_list = self.kind in ("multi", "tokens")
        feature = datasets.Sequence(names) if is_list else names
        number = {name: n for n, name in enumerate(self.classes)}
        labels = [
            [number[name] for name in value] if is_list else number[value]
            for value in self.columns()[self.label]
        ]
        features = datasets.Features({**data.features, self.label: feature})
        return datasets.Dataset.from_dict({**self.columns(), self.label: labels}, features)


Writer = Callable[[Table, Path, random.Random], object]
"""Write a table in a directory that exists, and return the path, or return an object."""


def _text(rng: random.Random, words: Sequence[str] = WORDS) -> str:
    parts = [rng.choice(words)]
    for _ in range(rng.randrange(8)):
        parts += rng.choice(BETWEEN), rng.choice(words)
    return "".join(parts)


def _tags(rng: random.Random, count: int) -> list[str]:
    tags: list[str] = []
    for _ in range(count):
        previous = tags[-1] if tags else "O"
        inside = [] if previous == "O" else [f"I-{previous[2:]}"]
        tags.append(rng.choice(["O", "O", "B-PER", "B-LOC", *inside, *inside]))
    return tags


def _ranked(kind: str, rng: random.Random) -> Table:
    """Return random queries with grades of their passages, in rows of one or of many passages."""
    rows: list[Row] = []
    meaning: list[tuple[tuple[str, ...], object]] = []
    for n in range(ROWS // (1 if kind == "lists" else 4)):
        query = f"{_text(rng)} {n}"
        passages = [f"{_text(rng)} {at}" for at in range(rng.randrange(1, 6))]
        grades = [rng.randrange(4) for _ in passages]
        if kind == "lists":
            rows.append({"query": query, "passages": passages, "labels": grades})
        else:
            pairs = zip(passages, grades, strict=True)
            rows += [{"query": query, "passage": p, "label": grade} for p, grade in pairs]
        meaning.append(((query, *passages), tuple(map(float, grades))))
    return Table(kind, rows, meaning, "labels" if kind == "lists" else "label")


def _embedded(kind: str, rng: random.Random) -> Table:
    """Return random documents, or queries with a positive and a negative."""
    names = ("text",) if kind == "documents" else ("query", "positive", "negative")
    rows = [{name: f"{_text(rng)} {name} {n}" for name in names} for n in range(ROWS)]
    return Table(kind, rows, [(tuple(row.values()), "") for row in rows], names[-1])


def table_of(kind: str, rng: random.Random, classes: Sequence[str] = NAMES) -> Table:
    """Return random rows of a kind."""
    if kind in RANKED:
        return _ranked(kind, rng)
    if kind in EMBEDDED:
        return _embedded(kind, rng)
    label = "label"
    rows: list[Row] = []
    meaning: list[tuple[tuple[str, ...], object]] = []
    named = tuple(rng.sample(classes, rng.randrange(2, len(classes) + 1)))
    numbered = kind == "class" and classes is NAMES and rng.random() < 0.25
    first = rng.choice(("text", "sentence", "review"))
    pair = rng.choice((("sentence1", "sentence2"), ("premise", "hypothesis")))
    for n in range(ROWS):
        # Every class occurs.
        name = named[n] if n < len(named) else rng.choice(named)
        value: Any = 1 + named.index(name) if numbered else name
        if kind == "class":
            row, read = {first: _text(rng), label: value}, value
            texts: tuple[str, ...] = (row[first],)
        elif kind == "pair":
            texts = _text(rng), _text(rng)
            row, read = {**dict(zip(pair, texts, strict=True)), label: name}, name
        elif kind == "multi":
            names = [name, *(other for other in named if other != name and rng.random() < 0.3)]
            texts = (_text(rng),)
            row, read = {first: texts[0], label: names}, frozenset(names)
        elif kind == "score":
            texts, value = (_text(rng),), rng.randrange(1000) / 8 + 0.125
            row, read = {first: texts[0], label: value}, value
        elif kind == "tokens":
            texts = tuple(rng.choice(PLAIN) for _ in range(rng.randrange(1, 9)))
            tags = list(TAGS) if n == 0 else _tags(rng, len(texts))
            texts = ("Ann",) * len(TAGS) if n == 0 else texts
            label = "tags"
            row, read = {"tokens": list(texts), label: tags}, tuple(tags)
        elif kind == "span":
            before, answer, context = _text(rng), rng.choice(PLAIN[:7]), ""
            context, label = f"{before} {answer} {_text(rng)}", "answers"
            found = [(answer, len(before) + 1)] if rng.random() < 0.8 else []
            answers = {"text": [a for a, _ in found], "answer_start": [s for _, s in found]}
            texts = _text(rng), context
            row = {"question": texts[0], "context": context, label: answers}
            read = tuple(found)
        else:
            label, read = "target", _text(rng)
            texts = (_text(rng),)
            row = {"source": texts[0], label: read}
        rows.append(row)
        meaning.append((texts, read))
    if rng.random() < 0.5:
        rows = [{"id": str(n), **row} for n, row in enumerate(rows)]
    if kind == "tokens":
        named = TAGS
    has_classes = kind in ("class", "pair", "multi", "tokens") and not numbered
    return Table(kind, rows, meaning, label, named if has_classes else ())


def _json_lines(table: Table) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in table.rows)


def _write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def _of_lines(ending: str) -> Writer:
    return lambda table, folder, rng: _write(folder / f"rows.{ending}", _json_lines(table))


def _of_json(shape: Callable[[Table], object]) -> Writer:
    def write(table: Table, folder: Path, rng: random.Random) -> Path:
        indent, ascii_only = rng.choice((None, 2)), rng.random() < 0.5
        text = json.dumps(shape(table), indent=indent, ensure_ascii=ascii_only)
        return _write(folder / "rows.json", text)

    return write


def _delimited(table: Table, rng: random.Random, delimiter: str) -> str:
    file = io.StringIO()
    quotings: tuple[Literal[0, 1, 2], ...] = (
        csv.QUOTE_ALL,
        csv.QUOTE_MINIMAL,
        csv.QUOTE_NONNUMERIC,
    )
    end = rng.choice(("\n", "\r\n"))
    writer = csv.writer(file, delimiter=delimiter, quoting=rng.choice(quotings), lineterminator=end)
    as_text = rng.choice((json.dumps, repr))
    writer.writerow(table.rows[0])
    for row in table.rows:
        writer.writerow([as_text(v) if isinstance(v, list) else v for v in row.values()])
    return rng.choice(("", "", "\ufeff")) + file.getvalue()


def _of_cells(ending: str, delimiter: str, before: str = "") -> Writer:
    return lambda table, folder, rng: _write(
        folder / f"rows.{ending}", before + _delimited(table, rng, delimiter).lstrip("\ufeff")
    )


def _with_mark(table: Table, folder: Path, rng: random.Random) -> Path:
    return _write(folder / "rows.csv", _delimited(table, rng, ","))


def _pandas_csv(table: Table, folder: Path, rng: random.Random) -> Path:
    _frame(table, folder, rng).to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def _frame(table: Table, folder: Path, rng: random.Random) -> Any:
    import pandas as pd

    frame = pd.DataFrame(table.columns())
    if isinstance(table.rows[0][table.label], str) and table.classes and rng.random() < 0.5:
        frame[table.label] = pd.Categorical(frame[table.label], categories=list(table.classes))
    return frame


def _pandas_parquet(table: Table, folder: Path, rng: random.Random) -> Path:
    _frame(table, folder, rng).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def _plain_parquet(table: Table, folder: Path, rng: random.Random) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(table.columns()), folder / "rows.parquet", row_group_size=70)
    return folder / "rows.parquet"


def _schema_parquet(table: Table, folder: Path, rng: random.Random) -> Path:
    table.dataset().to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


def _arrow(table: Table, folder: Path, rng: random.Random) -> Path:
    import pyarrow as pa

    data = rng.choice((table.dataset().data.table, pa.table(table.columns())))
    opened = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with opened(str(folder / "rows.arrow"), data.schema) as file:
        file.write_table(data, max_chunksize=64)
    return folder / "rows.arrow"


def _saved(table: Table, folder: Path, rng: random.Random) -> Path:
    table.dataset().save_to_disk(str(folder / "saved"), num_shards=rng.choice((1, 3)))
    return folder / "saved"


def _saved_splits(table: Table, folder: Path, rng: random.Random) -> Path:
    import datasets

    datasets.DatasetDict(train=table.dataset()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _splits(table: Table, folder: Path, rng: random.Random) -> object:
    import datasets

    return datasets.DatasetDict(train=table.dataset())


def _clone(table: Table, folder: Path, rng: random.Random) -> Path:
    """Write a clone of a hub repository, whose card has the features and a configuration."""
    import datasets
    from datasets.info import DatasetInfosDict

    name = rng.choice(("default", "plain_text"))
    place, clone = rng.choice(("data", name)), folder / "clone"
    (clone / place).mkdir(parents=True)
    data = table.dataset()
    ending = rng.choice(("parquet", "jsonl", "csv")) if table.kind == "class" else "parquet"
    file = clone / place / f"train-00000-of-00001.{ending}"
    plain = data.with_format("arrow").data.table.replace_schema_metadata(None)
    if ending == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(plain, file)
    elif ending == "csv":
        data.to_csv(str(file))
    else:
        data.to_json(str(file), force_ascii=rng.random() < 0.5)
    splits = [{"split": "train", "path": f"{place}/train-*"}]
    card = datasets.DatasetInfo(features=data.features, config_name=name)
    DatasetInfosDict({name: card}).write_to_directory(str(clone))
    text = (clone / "README.md").read_text("utf-8")
    configs = json.dumps([{"config_name": name, "data_files": splits}])
    _write(clone / "README.md", text.replace("---\n", f"---\nconfigs: {configs}\n", 1))
    return clone


def _packed(ending: str, pack: Callable[[bytes], bytes]) -> Writer:
    def write(table: Table, folder: Path, rng: random.Random) -> Path:
        inner = "csv" if table.kind in FLAT and rng.random() < 0.5 else "jsonl"
        text = _delimited(table, rng, ",") if inner == "csv" else _json_lines(table)
        path = folder / f"rows.{inner}.{ending}"
        path.write_bytes(pack(text.encode()))
        return path

    return write


def _pack_zstd(data: bytes) -> bytes:
    import pyarrow as pa

    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(data)
    return bytes(file.getvalue())


def _zip(table: Table, folder: Path, rng: random.Random) -> Path:
    inner = rng.choice((_of_lines("jsonl"), _plain_parquet, _schema_parquet))
    path = inner(table, folder, rng)
    assert isinstance(path, Path)
    place = rng.choice(("train", "data/train"))
    with zipfile.ZipFile(folder / "rows.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write(path, f"{place}{path.suffix}")
    return folder / "rows.zip"


def _shards(table: Table, folder: Path, rng: random.Random) -> Path:
    cut = rng.randrange(len(TAGS) + len(NAMES), len(table.rows))
    (folder / "data").mkdir()
    for number, rows in enumerate((table.rows[:cut], table.rows[cut:])):
        part = replace(table, rows=rows)
        _write(folder / "data" / f"train-0000{number}-of-00002.jsonl", _json_lines(part))
    return folder / "data"


def _conll(table: Table, folder: Path, rng: random.Random) -> Path:
    gap, has_middle, has_start = rng.choice(" \t"), rng.random() < 0.5, rng.random() < 0.5
    lines = [gap.join(["-DOCSTART-", *["-X-"] * has_middle, "O"]), ""] if has_start else []
    for row in table.rows:
        for word, tag in zip(row["tokens"], row["tags"], strict=True):
            lines.append(gap.join([word, *["NN"] * has_middle, tag]))
        lines.append("")
    path = folder / f"rows.{rng.choice(('conll', 'bio', 'iob2'))}"
    return _write(path, rng.choice(("\n", "\r\n")).join([*lines, ""]))


def _entities(table: Table) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Return the text of each row, and the begin, the end and the label of its entities."""
    placed = []
    for row in table.rows:
        found: list[tuple[int, int, str]] = []
        position = 0
        for word, tag in zip(row["tokens"], row["tags"], strict=True):
            end = position + len(word)
            if tag.startswith("I"):
                found[-1] = found[-1][0], end, tag[2:]
            elif tag != "O":
                found.append((position, end, tag[2:]))
            position = end + 1
        placed.append((" ".join(row["tokens"]), found))
    return placed


def _doccano(table: Table, folder: Path, rng: random.Random) -> Path:
    rows = [{"text": text, "label": [*map(list, found)]} for text, found in _entities(table)]
    return _write(folder / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def _spacy(table: Table, folder: Path, rng: random.Random) -> Path:
    rows = [[text, {"entities": found}] for text, found in _entities(table)]
    return _write(folder / "rows.json", json.dumps(rows))


def _label_studio(table: Table, folder: Path, rng: random.Random) -> Path:
    """Write the JSON export of Label Studio, for words or for one choice."""
    tasks = []
    if table.kind == "tokens":
        for text, found in _entities(table):
            values = [
                {"start": start, "end": end, "text": text[start:end], "labels": [label]}
                for start, end, label in found
            ]
            results = [{"type": "labels", "from_name": "tag", "value": value} for value in values]
            tasks.append({"data": {"text": text}, "annotations": [{"result": results}]})
    else:
        for row in table.rows:
            value = {"choices": [row[table.label]]}
            result = {"type": "choices", "from_name": "topic", "value": value}
            data = {name: each for name, each in row.items() if name != table.label}
            tasks.append({"data": data, "annotations": [{"result": [result]}]})
    return _write(folder / "rows.json", json.dumps(tasks))


def _squad(table: Table, folder: Path, rng: random.Random) -> Path:
    paragraphs = []
    for number, row in enumerate(table.rows):
        lists = row["answers"]
        pairs = zip(lists["text"], lists["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        question = {"id": str(number), "question": row["question"], "answers": answers}
        if rng.random() < 0.5:
            question["is_impossible"] = not answers
        paragraphs.append({"context": row["context"], "qas": [question]})
    parts = [paragraphs[:70], paragraphs[70:]]
    articles = [{"title": f"part {n}", "paragraphs": part} for n, part in enumerate(parts)]
    return _write(folder / "rows.json", json.dumps({"version": "v2.0", "data": articles}))


def _answer_objects(table: Table, folder: Path, rng: random.Random) -> Path:
    rows = []
    for row in table.rows:
        lists = row["answers"]
        pairs = zip(lists["text"], lists["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        rows.append({**row, "answers": answers})
    return _write(folder / "rows.jsonl", _json_lines(replace(table, rows=rows)))


RANKED, EMBEDDED = ("lists", "candidates"), ("documents", "triples")
KIND_NAMES = ("class", "pair", "multi", "score", "tokens", "span", "text", *RANKED, *EMBEDDED)
FLAT = ("class", "pair", "score", "text", "multi", "candidates", *EMBEDDED)
"""Kinds whose rows fit into cells."""
_EVERY: dict[str, Writer] = {
    "jsonl": _of_lines("jsonl"),
    "ndjson": _of_lines("ndjson"),
    "lines in .json": _of_lines("json"),
    "json list": _of_json(lambda table: table.rows),
    "json object": _of_json(lambda table: {"version": "1", "rows": table.rows}),
    "json columns": _of_json(Table.columns),
    "json of pandas": _of_json(
        lambda table: {n: {str(i): v for i, v in enumerate(c)} for n, c in table.columns().items()}
    ),
    "parquet": _plain_parquet,
    "parquet with a schema": _schema_parquet,
    "parquet of pandas": _pandas_parquet,
    "arrow": _arrow,
    "Dataset": lambda table, folder, rng: table.dataset(),
    "DatasetDict": _splits,
    "DataFrame": _frame,
    "list of dicts": lambda table, folder, rng: table.rows,
    "dict of lists": lambda table, folder, rng: table.columns(),
    "save_to_disk": _saved,
    "save_to_disk of splits": _saved_splits,
    "clone": _clone,
    "gz": _packed("gz", gzip.compress),
    "bz2": _packed("bz2", bz2.compress),
    "xz": _packed("xz", lzma.compress),
    "zst": _packed("zst", _pack_zstd),
    "zip": _zip,
    "shards": _shards,
}
_CELLS: dict[str, Writer] = {
    "csv": _with_mark,
    "csv with ;": _of_cells("csv", ";"),
    "csv with tabs": _of_cells("csv", "\t"),
    "csv with sep=": _of_cells("csv", ";", "sep=;\n"),
    "csv of pandas": _pandas_csv,
    "tsv": _of_cells("tsv", "\t"),
}
FORMS: dict[str, dict[str, Writer]] = {
    kind: _EVERY | (_CELLS if kind in FLAT else {}) for kind in KIND_NAMES
}
ONE_COLUMN_IS_UNCLEAR = ("csv with ;", "csv with tabs", "tsv")
"""A name alone does not tell the separator, and a line of TSV not where its only cell ends."""
for unclear in ONE_COLUMN_IS_UNCLEAR:
    del FORMS["documents"][unclear]
FORMS["tokens"] |= {
    "CoNLL": _conll,
    "doccano": _doccano,
    "spaCy": _spacy,
    "Label Studio": _label_studio,
}
FORMS["class"] |= {"Label Studio": _label_studio}
FORMS["span"] |= {"SQuAD": _squad, "answers as objects": _answer_objects}


def _source(value: object) -> str:
    """Return the value of `--data` for a path or an object."""
    from kdcli.data.objects import write_object

    return str(value if isinstance(value, Path) else write_object(value, lambda message: None))


def _read_ranked(source: str) -> list[tuple[tuple[str, ...], object]]:
    """Return each query with its passages, and their grades."""
    from kdcli.data.labelled.lists import read_list_splits

    lists = read_list_splits(source, lambda message: None).train
    begins = lists.ends - lists.sizes
    return [
        ((query, *lists.passages[begin:end]), tuple(lists.labels[begin:end].tolist()))
        for query, begin, end in zip(lists.queries, begins, lists.ends, strict=True)
    ]


def _read_embedded(source: str) -> list[tuple[tuple[str, ...], object]]:
    """Return each document, or each query with its positive and its negatives."""
    from kdcli.data.text.sentences import read_texts

    read = read_texts(source, column=None, unit="document", rows=None, log=lambda message: None)
    rows: list[tuple[tuple[str, ...], object]] = []
    for n, text in enumerate(read.texts):
        if read.rows[n] >= 0:
            others = [m for m in (read.positive[n], *read.negatives[n]) if m >= 0]
            rows.append(((text, *(read.texts[m] for m in others)), ""))
    return rows


def _read(source: str, kind: str) -> list[list[tuple[tuple[str, ...], object]]]:
    """Return the texts and the meaning of the training rows, and of the rows held out."""
    if kind in (*RANKED, *EMBEDDED):
        return [_read_ranked(source) if kind in RANKED else _read_embedded(source), []]
    from kdcli.data.labelled.request import RowsRequest
    from kdcli.data.labelled.task_data import open_labelled

    data = open_labelled(RowsRequest("own", source), log=lambda message: None)
    names = data.task.labels

    def meaning(label: Any) -> object:
        kind = data.task.kind
        if kind == "class":
            return names[label]
        if kind == "multi":
            return frozenset(names[n] for n in label)
        if kind == "tokens":
            return tuple(names[n] for n in label)
        if kind == "span":
            return tuple((answer.text, answer.start) for answer in label)
        return label

    held_out = itertools.chain.from_iterable(data.sets.values())
    return [[(e.texts, meaning(e.label)) for e in rows] for rows in (data.train, held_out)]


def compare(what: str, wanted: Sequence[object], found: Sequence[object]) -> None:
    """Compare what was read with what was written. Raises a Fault with the first difference."""
    if len(wanted) != len(found):
        raise Fault(f"{what}: {len(found)} rows, not {len(wanted)}")
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one != other:
            raise Fault(f"{what}: row {number} is {other!r:.300}, not {one!r:.300}")


def check_form(table: Table, form: str, value: object, baseline: str) -> str:
    """Compare the rows in a form with the rows that were written, and with the JSON Lines.

    Returns:
        The source of the rows in this form.
    """
    from kdcli.data.delimited import UNCLEAR_QUOTE
    from kdcli.errors import KdcliError

    what = f"{table.kind} as {form}"
    try:
        source = _source(value)
        found, plain = (_read(each, table.kind) for each in (source, baseline))
    except KdcliError as error:
        if UNCLEAR_QUOTE in error.message:
            # A text with separators and line breaks may look like rows, and is refused.
            return baseline
        raise Fault(f"{what}: {error.message} {error.hint or ''}") from None
    wanted = [(t, str(v) if table.kind in ("class", "pair") else v) for t, v in table.meaning]
    rows = [row for part in found for row in part]
    missing, extra = Counter(wanted) - Counter(rows), Counter(rows) - Counter(wanted)
    if missing or extra:
        compare(f"{what}, in some order", [*missing][:1], [*extra][:1])
        raise Fault(f"{what}: other numbers of equal rows")
    for part, other, name in zip(plain, found, ("training", "held-out"), strict=True):
        compare(f"{what}, {name} rows", part, other)
    return source


def forms(case: Case) -> None:
    """Read the same rows from JSON Lines and from another form, and compare them.

    Some cases also compare the scores of a model on both.
    """
    rng, folder = case.rng, case.folder / "form"
    os.environ["KDCLI_CACHE"] = str(case.folder / "cache")
    folder.mkdir()
    kind = rng.choice(KIND_NAMES)
    scores = case.number % SCORE_EVERY == 0 and kind not in ("text", *EMBEDDED)
    table = table_of(kind, rng, TOPICS if scores and kind == "class" else NAMES)
    form = rng.choice(list(FORMS[kind]))
    if form == "Label Studio" and kind == "class" and not table.classes:
        form = "jsonl"
    value = FORMS[kind][form](table.shuffled(rng), folder, rng)
    baseline = _write(case.folder / "plain.jsonl", _json_lines(table))
    source = check_form(table, form, value, str(baseline))
    if scores:
        model = ROOT / "kdcli/data/demo_classifier"
        if kind != "class":
            of_head = "score" if kind in RANKED else kind
            model = words_model(case.folder / "model", of_head, table.classes)
        _compare_scores(case, model, f"{kind} as {form}", baseline, source)


def _compare_scores(case: Case, model: Path, what: str, baseline: Path, source: str) -> None:
    """Evaluate a model on both sources. Raises a Fault unless the scores are equal."""
    found = []
    for number, data in enumerate((baseline, source)):
        out = case.folder / f"scores-{number}"
        task = "rerank" if what.startswith(RANKED) else "own"
        own = ["--task", task, "--data", data, "-o", out, "-q", "--device", "cpu"]
        if what.startswith("span"):
            # The tiny model has few positions.
            own += ["--set", "data.stride=8"]
        environment = {"KDCLI_CACHE": str(case.folder / "cache")}
        done = kdcli(case.folder, "evaluate", model, *own, environment=environment)
        done.check(0)
        report = json.loads((out / "report.json").read_text("utf-8"))
        found.append([each["metrics"] for each in report["evaluations"]])
    compare(f"the scores of {what}", *found)


KINDS = [Kind("forms", 20_000, forms, chunk=40)]
