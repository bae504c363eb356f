"""Shards of tokens: what they hold does not depend on how they were made; nothing damaged or
foreign is read."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from encoders import foreign_tokenizer, tiny_tokenizer
from forked import Forked
from texts import DOCUMENTS, corpus, tokens, write
from typer.testing import CliRunner

from kdcli.cli import app, main
from kdcli.data.readers import COLUMN_HINT
from kdcli.data.sources import open_source
from kdcli.data.text.corpus import open_corpus
from kdcli.data.text.tokenise import tokenise
from kdcli.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(small_shards):
    pass


@pytest.fixture
def text(tmp_path):
    write(tmp_path / "text" / "train.jsonl", DOCUMENTS)
    write(tmp_path / "text" / "validation.txt", ["w50 w51 w52"] * 40)
    return tmp_path / "text"


def made(source, folder, share=1.0, **how):
    opened = open_source(str(source), share)
    return tokenise(opened, tiny_tokenizer(), None, folder, **how)


def expected(documents=DOCUMENTS):
    tokenizer = tiny_tokenizer()
    return [i for d in documents for i in (*tokenizer(d, add_special_tokens=False)["input_ids"], 3)]


def test_another_share_of_the_generated_text_is_other_tokens(tmp_path):
    before = made("demo", tmp_path, share=0.02)
    after = made("demo", tmp_path, share=0.01)
    assert after.tokens_of("train") < before.tokens_of("train")


def test_a_parquet_file_is_cut_between_its_row_groups(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "text").mkdir()
    pq.write_table(
        pa.table({"text": DOCUMENTS}), tmp_path / "text" / "train.parquet", row_group_size=70
    )
    meta = made(tmp_path / "text", tmp_path / "out")
    assert 3 < len(meta.shards) <= 6
    assert tokens(corpus(tmp_path / "out")).tolist() == expected()


def test_small_files_share_a_shard(tmp_path):
    for n in range(40):
        write(tmp_path / "text" / f"part-{n:02}.txt", DOCUMENTS[n * 10 : n * 10 + 10])
    meta = made(tmp_path / "text", tmp_path / "out")
    assert 4 < len(meta.shards) < 20
    assert tokens(corpus(tmp_path / "out")).tolist() == expected()
    assert not list(tmp_path.glob(".*.lock"))


def test_workers_write_the_same_bytes_as_one_process(text, tmp_path):
    made(text, tmp_path / "one")
    made(text, tmp_path / "two", workers=2)
    read = [
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")
    ]
    assert read[0] == read[1]


def test_a_wrong_line_in_a_worker_is_named_and_the_other_shards_stay(text, tmp_path):
    rows = [json.dumps({"text": d}) for d in DOCUMENTS]
    rows[300] = json.dumps({"text": 3})
    (text / "train.jsonl").write_text("\n".join(rows), "utf-8")
    for workers in (None, 2):
        with pytest.raises(
            UsageError, match=r"train\.jsonl:301: column 'text' holds int"
        ) as caught:
            made(text, tmp_path / f"{workers}", workers=workers)
        assert caught.value.hint == COLUMN_HINT
    assert len(list((tmp_path / "None").glob("*.bin"))) > 5


def test_only_shards_of_changed_text_are_made_again(tmp_path):
    monday = DOCUMENTS[:200], DOCUMENTS[200:]
    for n, documents in enumerate(monday):
        write(tmp_path / "text" / f"part-{n}.txt", documents)
    made(tmp_path / "text", tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.bin")}
    write(tmp_path / "text" / "part-1.txt", ["w58 w57 w56"] * 5)
    meta = made(tmp_path / "text", tmp_path / "out")
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.bin")}
    assert set(after) == {shard.file for shard in meta.shards} < set(before)
    kept = [name for name in after if after[name] == before[name]]
    assert len(kept) >= 3
    assert tokens(corpus(tmp_path / "out")).tolist() == expected([*monday[0], *["w58 w57 w56"] * 5])


def test_a_directory_of_something_else_is_left_alone(text, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match="is not empty"):
        made(text, tmp_path / "mine")
    made(text, tmp_path / "out")
    write(tmp_path / "other.txt", DOCUMENTS[:50])
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(UsageError, match=r"holds shards of .*text by .*, not of .*other\.txt"):
        made(tmp_path / "other.txt", tmp_path / "out")
    with pytest.raises(UsageError, match="column None, not text"):
        tokenise(open_source(str(text)), tiny_tokenizer(), "text", tmp_path / "out")
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def of_kdcli(folder, text):
    made(text, folder)
    return sorted(folder.glob("train-*.bin"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"train-00001\.bin is missing, one of \d+ shards"),
        ("cut", r"train-00001\.bin is cut: it has \d+ bytes, not \d+"),
        ("longer", r"train-00001\.bin is cut"),
        ("meta", r"meta\.json was not written by this kdcli"),
        ("json", r"meta\.json is not valid JSON"),
        ("key", r"meta\.json was not written by this kdcli"),
        ("outside", r"meta\.json was not written by this kdcli"),
    ],
)
def test_damaged_shards_are_named(text, tmp_path, damage, message):
    _, second, *_ = of_kdcli(tmp_path / "out", text)
    meta = tmp_path / "out" / "meta.json"
    if damage == "missing":
        second.unlink()
    elif damage == "meta":
        meta.write_text("{}", "utf-8")
    elif damage == "outside":
        meta.write_text(meta.read_text("utf-8").replace("train-00001", "../train-00001"), "utf-8")
    elif damage == "key":
        known = json.loads(meta.read_text("utf-8"))
        meta.write_text(json.dumps(known | {"reversed": True}), "utf-8")
    elif damage == "json":
        meta.write_bytes(meta.read_bytes()[:-9])
    else:
        os.truncate(second, second.stat().st_size + (2 if damage == "longer" else -2))
    with pytest.raises(UsageError, match=message):
        corpus(tmp_path / "out")
    if damage in ("missing", "cut", "longer"):
        made(text, tmp_path / "out")
        assert tokens(corpus(tmp_path / "out")).tolist() == expected()


def test_tokens_of_another_tokenizer_are_refused(text, tmp_path):
    made(text, tmp_path / "out")
    how = {
        "max_length": 16,
        "column": None,
        "isolated": False,
        "held_out_blocks": 4,
    }
    with pytest.raises(UsageError, match="not of the tokenizer of"):
        open_corpus(str(tmp_path / "out"), foreign_tokenizer(), **how)
    # What a tokenizer adds around a text does not touch the shards.
    saved = tiny_tokenizer()
    saved.backend_tokenizer.post_processor = None
    saved(["w1 w2 w3"], truncation=True, max_length=2)
    assert len(open_corpus(str(tmp_path / "out"), saved, **how).train) > 50


def ds(
    folder,
    name="00000_shuffled.ds",
    documents=DOCUMENTS,
    tokenizer="nowhere/tiny",
    size=2,
    frame=((), (3,)),
):
    """A file as `DocumentTokenizer(eos_token="[SEP]", shuffle_documents=False)` of datatrove 0.10.1
    writes it, compared byte for byte."""
    folder.mkdir(exist_ok=True)
    read = tiny_tokenizer()
    ids = [
        [*frame[0], *read(d, add_special_tokens=False)["input_ids"], *frame[1]] for d in documents
    ]
    flat = np.concatenate([*ids, []]).astype(f"<u{size}")
    flat.tofile(folder / name)
    np.cumsum([len(i) for i in ids], dtype="<u8").tofile(folder / f"{name}.index")
    (folder / f"{name}.metadata").write_text(f"{tokenizer}|{size}\n{len(flat)}\n2.0 kT", "utf-8")
    return folder / name


@pytest.mark.parametrize("size", [2, 4])
def test_files_of_datatrove_are_read_in_order(tmp_path, size):
    log = []
    for n in range(3):
        ds(tmp_path / "out", f"{n:05}_shuffled.ds", DOCUMENTS[n * 100 : n * 100 + 100], size=size)
    ds(tmp_path / "out", "validation_00000_shuffled.ds", ["w50 w51 w52"] * 40, size=size)
    found = corpus(tmp_path / "out", log=log)
    assert tokens(found).tolist() == expected(DOCUMENTS[:300])
    assert len(found.held_out.batch(np.arange(2))["input_ids"][:, 1:-1].unique()) == 4
    assert "tokenizer nowhere/tiny is not on this machine" in log[0]


def test_files_of_datatrove_without_metadata_follow_its_rule(tmp_path):
    file = ds(tmp_path / "out")
    for ending in (".metadata", ".index"):
        file.with_name(file.name + ending).unlink()
    assert tokens(corpus(tmp_path / "out")).tolist() == expected()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"00000_shuffled\.ds is missing \(1 of 2 files\)"),
        ("cut", r"00000_shuffled\.ds is cut: it has [\d,]+ bytes, not [\d,]+ tokens of 2 bytes"),
        ("half", r"00000_shuffled\.ds is cut"),
        ("metadata", r"00000_shuffled\.ds\.metadata is not metadata of datatrove"),
        ("mixed", "tokens of 2 and of 4 bytes"),
        ("vocabulary", r"holds token 9,000; the vocabulary of the model has 64"),
        ("framed", r"documents must end with the token 3 \(\[SEP\]\) and have no other frame"),
        ("unframed", r"documents must end with the token 3"),
        ("tokenizer", "whose vocabulary differs"),
    ],
)
def test_damaged_and_foreign_files_of_datatrove_are_named(tmp_path, damage, message):
    out = tmp_path / "out"
    ds(out, "00001_shuffled.ds")
    file = ds(out)
    if damage == "missing":
        file.unlink()
    elif damage in ("cut", "half"):
        os.truncate(file, file.stat().st_size - (2 if damage == "cut" else 1))
    elif damage == "metadata":
        Path(f"{file}.metadata").write_text("tiny\n12", "utf-8")
    elif damage == "mixed":
        ds(out, size=4)
    elif damage == "vocabulary":
        np.full(file.stat().st_size // 2, 9000, "<u2").tofile(file)
    elif damage in ("framed", "unframed"):
        ds(out, frame=((2,), (3,)) if damage == "framed" else ((), ()))
    else:
        foreign_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
        ds(out, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match=message) as caught:
        corpus(out)
    assert "\n" not in caught.value.message


def run_command(*arguments):
    """Run `kdcli tokenize` in a forked process."""
    sys.argv = ["kdcli", "tokenize", *map(str, arguments)]
    main()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_signal_stops_the_command_and_its_workers(tmp_path, model_dir, number, code):
    write(tmp_path / "train.txt", [" ".join(DOCUMENTS)] * 20_000)  # 66 MB: two shards
    line = (
        tmp_path / "train.txt",
        "--tokenizer",
        model_dir,
        "-o",
        tmp_path / "out",
        "--workers",
        2,
    )
    running = Forked(run_command, *line)
    while not list(tmp_path.glob("out/.*.bin.part")):
        assert running.returncode is None, running.communicate()
        time.sleep(0.05)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.kill(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == code, said
    assert ("finished shards are kept" in said) == (code == 75)
    deadline = time.monotonic() + 30
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_dry_run_estimates_and_writes_nothing(text, tmp_path, model_dir):
    for source in (text / "train.jsonl", text):
        line = ("tokenize", source, "--tokenizer", model_dir, "-o", tmp_path / "out")
        done = CliRunner().invoke(app, [*map(str, line), "--dry-run", "--json"])
        found = json.loads(done.stdout)
        files = [source] if source.is_file() else list(source.iterdir())
        assert found["source_bytes"] == sum(file.stat().st_size for file in files)
        assert found["bytes"] == 2 * found["tokens"]
        assert found["hours"] > 0
        assert not (tmp_path / "out").exists()
    assert found["tokens"] == pytest.approx(
        len(expected()) + len(expected(["w50 w51 w52"] * 40)), rel=0.02
    )


@pytest.mark.parametrize(
    "name",
    [f"c.{kind}{gz}" for kind in ("txt", "jsonl", "csv", "tsv", "parquet") for gz in ("", ".gz")],
)
def test_a_sample_says_which_part_of_the_source_it_is(tmp_path, name):
    documents = [hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(20_000)]
    write(tmp_path / name, documents)
    source = open_source(str(tmp_path / name))
    (piece,) = source.pieces("train", 1 << 30)
    texts, size = source.sample("train", piece, None)
    assert 2600 < len(texts) < 5300
    assert texts == documents[: len(texts)]
    # Of a parquet file in gzip the size of a part is not known.
    if not name.endswith(".parquet.gz"):
        assert size / piece.size == pytest.approx(len(texts) / 20_000, rel=0.1)
        fewer, size = source.sample("train", piece._replace(share=0.25), None)
        assert size / piece.size == pytest.approx(len(fewer) / 5000, rel=0.1)


def test_a_sample_of_a_share_is_as_much_of_a_json_file(tmp_path):
    write(tmp_path / "c.json", [f"w{n} w{n * n}" for n in range(8000)])
    source = open_source(str(tmp_path / "c.json"))
    (piece,) = source.pieces("train", 1 << 30)
    whole, part = (
        source.sample("train", piece._replace(share=share), None) for share in (1.0, 0.25)
    )
    assert len(part.texts) < len(whole.texts) / 3
    assert part.size == pytest.approx(whole.size, rel=0.1)
