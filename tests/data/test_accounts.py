"""Every source has an account of its rows that adds up, in the log and in the report."""

import csv
import json
import random

import pytest

import kdcli
from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.sources import open_source
from kdcli.errors import UsageError
from kdcli.workloads.beir import read_retrieval

COUNTED = (("documents", 5), ("queries", 3))
FAST = {"measure": {"latency": False}}


def logged(caplog):
    """Return what was logged since the last call."""
    messages = "\n".join(caplog.messages)
    caplog.clear()
    return messages


def test_texts_and_their_sentences_have_accounts(tmp_path):
    file = tmp_path / "texts.txt"
    lines = ["A first sentence here. And one more.", "", "x", "A first sentence here."]
    file.write_text("\n".join([*lines, *(f"Text {n} is long." for n in range(20))]))
    result = kdcli.distill(
        "demo",
        data=str(file),
        to="1x32",
        method="embedding",
        max_steps=1,
        output_dir=tmp_path / "run",
        config=FAST | {"train": {"warmup_steps": 0}},
    )
    texts, sentences = result.report.accounts
    assert (texts.rows, texts.read, texts.kept) == ("rows", 24, 22)
    assert [(o.reason, o.count, o.first) for o in texts.left_out] == [
        ("empty", 1, f"{file.name}:2"),
        ("without a sentence of 2 words", 1, f"{file.name}:3"),
    ]
    assert (sentences.rows, sentences.read, sentences.kept) == ("sentences", 23, 22)
    assert [(o.reason, o.first) for o in sentences.left_out] == [("repeated", f"{file.name}:4")]


def test_queries_and_their_rows_have_accounts(tmp_path):
    file = tmp_path / "lists.jsonl"
    lists = [
        {"query": f"query {n}", "positive": f"good {n}", "negative": f"bad {n}"} for n in range(30)
    ]
    file.write_text("\n".join(map(json.dumps, [*lists, lists[0]])))
    result = kdcli.evaluate(
        ["demo"], task="rerank", data=str(file), output_dir=tmp_path / "run", config=FAST
    )
    of_rows, of_queries = result.report.accounts
    assert (of_rows.read, of_rows.kept) == (31, 30)
    assert [(o.reason, o.first) for o in of_rows.left_out] == [("repeated", f"{file.name}:31")]
    assert (of_queries.rows, of_queries.read, of_queries.kept) == ("queries", 30, 30)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("columns", [1, 2])
def test_rows_and_line_breaks_are_the_lines_of_a_file(tmp_path, columns, delimiter, quoting):
    rng = random.Random(f"{columns} {delimiter} {quoting}")
    texts = ["".join(rng.choices("ab \n,'", k=9)).strip() + "." for _ in range(60)]
    if (columns, delimiter) == (1, "\t"):
        # Such cells are refused, because nothing tells where they end.
        texts = [text.replace("\n", " ") for text in texts]
    file = tmp_path / ("rows.csv" if delimiter == "," else "rows.tsv")
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened, delimiter=delimiter, quoting=quoting)
        writer.writerows([text, f"{n}"][:columns] for n, text in enumerate(["text", *texts]))
    account = RowAccount(str(file))
    found = [text for _, text in open_source(str(file)).placed_documents("train", "text", account)]
    assert found == texts
    lines = len(file.read_bytes().splitlines())
    breaks = account.line_breaks
    assert account.read + (breaks.count if breaks else 0) + 1 == lines
    if breaks:
        first = next(n for n, text in enumerate(texts) if "\n" in text)
        place = first + 2 + "".join(texts[:first]).count("\n")
        assert (breaks.first, breaks.count) == (f"{file}:{place}", "".join(texts).count("\n"))
        assert account.line.endswith(f"; {breaks}")


def test_an_account_that_does_not_add_up_is_refused():
    account = RowAccount("rows.csv", read=10)
    account.leave_out("empty", "rows.csv:3")
    with pytest.raises(UsageError, match="2 rows are not accounted for"):
        ACCOUNTS.close(account, 7)


def test_a_source_that_is_read_in_part_says_so(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(["a", "", "b", "", "c"]))
    for needed, line in (
        (1, "rows of texts.txt: the first 3 read, more are not needed, 1 kept; left out: 2 empty"),
        (3, "rows of texts.txt: 5 read, 3 kept; left out: 2 empty"),
    ):
        account = RowAccount(str(file))
        rows = open_source(str(file)).placed_documents("train", None, account)
        account.kept = len([next(rows) for _ in range(needed)])
        account.end_before(rows)
        assert account.line.startswith(line)
        assert account.kept == account.used


@pytest.mark.parametrize("then", ["bad row", "empty file"])
def test_what_is_not_needed_is_not_refused(tmp_path, then):
    first, second = tmp_path / "train-0.jsonl", tmp_path / "train-1.jsonl"
    rows = [{"text": "a"}, {"text": "b"}, *([{"text": 7}] if then == "bad row" else [])]
    first.write_text("\n".join(map(json.dumps, rows)))
    second.write_text("")
    account = RowAccount(str(tmp_path))
    placed = open_source(account.source).placed_documents("train", None, account)
    used = len([next(placed) for _ in range(2)])
    account.end_before(placed)
    ACCOUNTS.close(account, used)
    assert "the first 2 read, more are not needed, 2 kept" in account.line


def test_tokenised_text_has_an_account_also_from_the_cache(tmp_path, caplog):
    file = tmp_path / "texts.txt"
    texts = [f"Text number {n} is long enough to fill some of a block." for n in range(200)]
    file.write_text("\n".join([texts[0], "", *texts[1:], " "]))
    for run in ("first", "again"):
        result = kdcli.distill(
            "demo",
            data=str(file),
            to="1x32",
            max_steps=1,
            output_dir=tmp_path / run,
            config=FAST | {"train": {"warmup_steps": 0}, "data": {"max_length": 16}},
        )
        (account,) = result.report.accounts
        assert (account.read, account.kept) == (202, 200)
        assert [(o.reason, o.count, o.first) for o in account.left_out] == [
            ("empty", 2, f"{file.name}:2")
        ]
        line = "rows of texts.txt: 202 read, 200 kept; left out: 2 empty"
        assert logged(caplog).count(line) == 1


def test_documents_and_queries_of_a_retrieval_task_have_accounts(tmp_path):
    lines = "\n".join(json.dumps({"_id": f"d{n}", "text": f"text {n}"}) for n in range(5))
    (tmp_path / "corpus.jsonl").write_text(lines)
    queries = "\n".join(json.dumps({"_id": f"q{n}", "text": f"text {n}"}) for n in range(3))
    (tmp_path / "queries.jsonl").write_text(queries)
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq2\td3\t1\n")
    read_retrieval(str(tmp_path))
    documents, queries = (ACCOUNTS.by_key[str(tmp_path), name, n] for name, n in COUNTED)
    assert (documents.kept, queries.kept) == (5, 2)
    assert [(o.count, o.first) for o in queries.left_out] == [(1, "query q1")]


# Every verb that reads text has one empty row and one that is repeated.
TEXTS = [f"Text number {n} is a sentence with words." for n in range(120)]
ROWS = [("rows", 122, 121, [("empty", 1, "texts.txt:2")])]
SENTENCES = [*ROWS, ("sentences", 121, 120, [("repeated", 1, "texts.txt:122")])]
NO_WARMUP = FAST | {"train": {"warmup_steps": 0}}
ONE_STEP = {"to": "1x32", "max_steps": 1}
LENGTHS = {"padding": "data", "measure": {"min_runs": 1, "min_seconds": 0}}
VERBS = {
    "distill": (ROWS, ONE_STEP | {"config": NO_WARMUP | {"data": {"max_length": 16}}}),
    "distill embedding": (
        SENTENCES,
        ONE_STEP | {"method": "embedding", "config": NO_WARMUP},
    ),
    "evaluate embedding": (
        SENTENCES,
        {"task": "embedding", "config": FAST},
    ),
    "benchmark": (ROWS, {"config": LENGTHS}),
    "export": (ROWS, {"file_format": "onnx"}),
    "export pooling": (ROWS, {"file_format": "onnx", "pooling": "mean"}),
    "trim": (ROWS, {}),
}


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_that_reads_text_has_an_account(tmp_path, name, caplog):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([TEXTS[0], "", *TEXTS[1:], TEXTS[5]]) + "\n")
    accounts, options = VERBS[name]
    verb = getattr(kdcli, name.split()[0])
    model = ["demo", "demo"] if name.startswith("evaluate") else "demo"
    result = verb(model, data=str(file), output_dir=tmp_path / "first", **options)
    log = logged(caplog)
    for kind, read, kept, [(reason, count, first)] in accounts:
        left_out = f"{count} {reason} (first: {tmp_path / first})"
        assert f"{kind} of texts.txt: {read} read, {kept} kept; left out: {left_out}" in log
    if not name.startswith("export"):
        stored = [
            (one.rows, one.read, one.kept, [(o.reason, o.count, o.first) for o in one.left_out])
            for one in result.report.accounts
        ]
        assert stored == accounts
    # The second run may read a cache.
    with pytest.raises(UsageError, match=r"1 empty \(first: .*texts.txt:2\)"):
        verb(model, data=str(file), output_dir=tmp_path / "again", strict_data=True, **options)
    assert not (tmp_path / "again").exists()
