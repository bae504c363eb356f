"""Compare reading and tokenising text with the `datasets` library.

    python benchmarks/reading.py make PARAGRAPHS.jsonl.gz FOLDER [--megabytes 120]
    python benchmarks/reading.py read FOLDER [--rounds 3]
    python benchmarks/reading.py rows FILE... [--rounds 3]
    python benchmarks/reading.py tokenise FOLDER/text.jsonl --tokenizer MODEL [--rounds 3]
    python benchmarks/reading.py blocks FOLDER/text.jsonl --tokenizer MODEL
    python benchmarks/reading.py promises

* `make` writes paragraphs as txt, jsonl, csv and parquet. It repeats them until the files are large
  enough, each time with another first sentence.
* `read` reads every document of each file, and `rows` reads every row of labelled files.
* `tokenise` writes the tokens with two workers.
* `blocks` reads random blocks of 128 tokens.
* `promises` shows how both libraries read unusual files.

Each way runs in a new process, and the ways take turns. The table has the medians of the rounds:
seconds, CPU seconds of all processes, peak memory of the largest process, and disk space of the
result. docs/architecture.md has the conclusion.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from kdcli.data.rows import Piece
    from kdcli.data.text.tokenise import ShardWriter
    from kdcli.types import Array

KINDS = ("txt", "jsonl", "csv", "parquet")
LOADERS = {"txt": "text", "jsonl": "json", "csv": "csv", "parquet": "parquet"}
LENGTH, BATCH, STEPS = 128, 256, 100
WORKERS = 2
SHARD_BYTES = 1 << 22
"""A short text with shards of this size has as many shards as a long text has by default."""


# Making the files.


def make(paragraphs: Path, folder: Path, megabytes: int) -> None:
    with gzip.open(paragraphs, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"].replace("\n", " ") for line in file]
    folder.mkdir(parents=True, exist_ok=True)
    varied = list(_varied(texts, megabytes * 1_000_000))
    with (folder / "text.txt").open("w", encoding="utf-8") as file:
        file.writelines(f"{text}\n" for text in varied)
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'text': text, 'id': n})}\n" for n, text in enumerate(varied))
    with (folder / "text.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "id"])
        writer.writerows((text, n) for n, text in enumerate(varied))
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": varied, "id": list(range(len(varied)))})
    pq.write_table(table, folder / "text.parquet", row_group_size=10_000)
    for path in sorted(folder.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1e6:,.0f} MB, {len(varied):,} documents")


def _varied(texts: list[str], size: int) -> Iterator[str]:
    for turn in itertools.count():
        for text in texts:
            sentences = re.split(r"(?<=[.!?]) ", text)
            at = turn % len(sentences)
            varied = " ".join([*sentences[at:], *sentences[:at], f"({turn})"])
            yield varied
            if (size := size - len(varied.encode()) - 1) < 0:
                return


# Ways to read documents. Each returns the number of documents.


def read_ours(file: str) -> int:
    from kdcli.data.sources import open_source

    return sum(1 for _ in open_source(file).documents("train", None))


def read_streaming(file: str) -> int:
    """Read a streamed data set row by row."""
    return sum(1 for row in _load(file, streaming=True) if row["text"].strip())


def read_batches(file: str) -> int:
    """Read the column of a streamed data set from Arrow, a thousand rows at a time."""
    batches = _load(file, streaming=True).with_format("arrow").iter(batch_size=1000)
    texts = (text for batch in batches for text in batch["text"].to_pylist())
    return sum(1 for text in texts if text.strip())


def read_cached(file: str) -> int:
    """Read the column of a data set from its memory map, after it was written as Arrow."""
    texts = _load(file, streaming=False).with_format("arrow").iter(batch_size=1000)
    return sum(1 for batch in texts for text in batch["text"].to_pylist() if text.strip())


def _load(file: str, *, streaming: bool) -> Dataset | IterableDataset:
    import datasets

    datasets.disable_progress_bars()
    kind = Path(file).name.removesuffix(".gz").rsplit(".", 1)[-1]
    return datasets.load_dataset(LOADERS[kind], data_files=file, split="train", streaming=streaming)


# Ways to read rows as Python objects, as labelled tasks do. Each returns the number of rows.


def rows_ours(file: str) -> int:
    from kdcli.data.sources import open_source

    return sum(1 for _, rows in open_source(file).tables("train") for _ in rows)


def rows_streaming(file: str) -> int:
    return sum(1 for _ in _load(file, streaming=True))


def rows_cached(file: str) -> int:
    return sum(1 for _ in _load(file, streaming=False))


# Ways to tokenise. Each writes a folder and returns the number of tokens.


def tokenise_ours(file: str, tokenizer: str, out: Path) -> int:
    from kdcli.data.sources import open_source
    from kdcli.data.text import shards
    from kdcli.data.text.tokenise import tokenise
    from kdcli.models.load import load_tokenizer

    shards.SHARD_BYTES = SHARD_BYTES
    source, loaded = open_source(file), load_tokenizer(tokenizer)
    meta = tokenise(source, loaded, None, out, workers=WORKERS)
    return sum(shard.tokens or 0 for shard in meta.shards)


def tokenise_mapped(file: str, tokenizer: str, out: Path) -> int:
    """Tokenise with `map`, as the scripts of transformers do. A row is a document."""
    tokens = _mapped(file, tokenizer, lambda ids: ids)
    tokens.save_to_disk(str(out), num_proc=WORKERS)
    return sum(len(chunk.values) for chunk in tokens.data.column("ids").chunks)


def tokenise_joined(file: str, tokenizer: str, out: Path) -> int:
    """Tokenise with `map`. A row is a batch, which makes the memory map as simple as kdcli's."""
    tokens = _mapped(file, tokenizer, lambda ids: [[i for row in ids for i in row]])
    tokens.save_to_disk(str(out), num_proc=WORKERS)
    return sum(len(chunk.values) for chunk in tokens.data.column("ids").chunks)


def _mapped(file: str, name: str, join: Callable[[list[list[int]]], list[list[int]]]) -> Dataset:
    """Tokenise a file with `map`, and combine the rows of each batch with `join`."""
    import datasets

    from kdcli.models.load import load_tokenizer

    tokenizer = load_tokenizer(name)
    wide = max(tokenizer.get_vocab().values()) >= 1 << 16

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(
            batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return {"ids": join([[*row, tokenizer.sep_token_id] for row in ids])}

    source = _load(file, streaming=False)
    kept = datasets.Features({"ids": datasets.List(datasets.Value("uint32" if wide else "uint16"))})
    return source.map(
        encode,
        batched=True,
        num_proc=WORKERS,
        remove_columns=source.column_names,
        features=kept,
    )


def tokenise_generated(file: str, tokenizer: str, out: Path) -> int:
    """Read and tokenise with kdcli, in the processes and files of `datasets`."""
    import datasets

    from kdcli.data.sources import open_source
    from kdcli.data.text.shards import Frame, TokenShards
    from kdcli.data.text.tokenise import ShardWriter
    from kdcli.models.load import load_tokenizer

    datasets.disable_progress_bars()
    source, loaded = open_source(file), load_tokenizer(tokenizer)
    meta = TokenShards.plan(source, loaded, Frame.of(loaded), None)
    kind = {"<u2": "uint16", "<u4": "uint32"}[meta.dtype]
    tokens = datasets.Dataset.from_generator(
        _generated,
        features=datasets.Features({"ids": datasets.List(datasets.Value(kind))}),
        cache_dir=str(out),
        gen_kwargs={
            "pieces": [piece for shard in meta.shards for piece in shard.pieces],
            "writer": ShardWriter.of(source, loaded, meta, out),
        },
        num_proc=WORKERS,
    )
    return sum(len(chunk.values) for chunk in tokens.data.column("ids").chunks)


def _generated(pieces: list[Piece], writer: ShardWriter) -> Iterator[dict[str, Array]]:
    import numpy as np

    from kdcli.data.accounts import RowAccount
    from kdcli.data.text.tokenise import calls_of

    account = RowAccount(writer.source.name)
    documents = (writer.source.documents_in("train", piece, None, account) for piece in pieces)
    for texts, ends in calls_of(itertools.chain.from_iterable(documents)):
        ids = zip(writer.encode(texts), ends, strict=True)
        rows = [np.asarray([*row, writer.sep_id] if end else row, writer.dtype) for row, end in ids]
        yield {"ids": np.concatenate(rows)}


# Reading random blocks.


def blocks(file: str, tokenizer: str) -> None:
    import numpy as np

    from kdcli.data.batches import BatchOrder

    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        count = tokenise_ours(file, tokenizer, Path(folder) / "ours")
        assert tokenise_mapped(file, tokenizer, Path(folder) / "mapped") == count
        assert tokenise_joined(file, tokenizer, Path(folder) / "joined") == count
        order = BatchOrder(count // LENGTH, BATCH, 0)
        milliseconds: dict[str, list[float]] = {}
        read: dict[str, list[Array]] = {}
        for name in ("ours", "mapped", "joined") * 3:
            began = time.perf_counter()
            stream = _open_tokens(Path(folder) / name)
            opened = time.perf_counter() - began
            began = time.perf_counter()
            batches = [
                np.stack([stream(int(n) * LENGTH, LENGTH) for n in order.indices(step)])
                for step in range(1, STEPS + 1)
            ]
            a_batch = 1e3 * (time.perf_counter() - began) / STEPS
            milliseconds.setdefault(name, []).append(a_batch)
            read[name] = batches
            print(f"{name}: opened in {1e3 * opened:.0f} ms, a batch {a_batch:.2f} ms")
        for name in ("mapped", "joined"):
            assert all(map(np.array_equal, read["ours"], read[name]))


def _open_tokens(folder: Path) -> Callable[[int, int], Array]:
    """Return a function that reads tokens, given their first position and their number."""
    import numpy as np

    if (folder / "meta.json").is_file():
        from kdcli.data.text.corpus import streams_of
        from kdcli.data.text.shards import TokenShards

        return streams_of(folder, TokenShards.read(folder))["train"].read
    import datasets

    chunks = datasets.load_from_disk(str(folder)).data.column("ids").chunks
    values = [chunk.flatten().to_numpy() for chunk in chunks]
    ends = np.cumsum([len(part) for part in values])

    def read(begin: int, count: int) -> Array:
        number = int(np.searchsorted(ends, begin, side="right"))
        at = begin - (int(ends[number - 1]) if number else 0)
        part: Array = values[number][at : at + count]
        if len(part) == count:
            return part
        return np.concatenate([part, read(begin + len(part), count - len(part))])

    return read


# Unusual files.


CASES = {
    "an empty file": ("a.txt", b""),
    "an empty json file": ("a.jsonl", b""),
    "line 2 is not UTF-8": ("a.txt", b"w1\nw2 \xff\n"),
    "line 2 is not JSON": ("a.jsonl", b'{"text": "w1"}\n{"text": "w2\n'),
    "a label of another type in line 2": ("a.jsonl", b'{"t": "a", "y": 1}\n{"t": "b", "y": "x"}\n'),
    "a column missing in line 2": ("a.jsonl", b'{"t": "a", "y": 1}\n{"t": "b"}\n'),
    "text that looks like a time": ("a.jsonl", b'{"text": "2024-01-01T00:00:00"}\n'),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud83d w2"}\n'),
    "text that reads NA": ("a.csv", b"text,label\nNA,1\n007,2\n"),
    "a cell too few in line 3": ("a.csv", b"text,label\nw1,1\nw2\n"),
    "a cell too many in line 3": ("a.csv", b"text,label\nw1,1\nw2,1,2\n"),
    "tabs": ("a.tsv", b"text\tlabel\nw1\t1\n"),
    "a damaged gzip file": ("a.txt.gz", gzip.compress(b"w1 w2\n" * 5000)[:-20]),
    "a gzipped parquet file": ("a.parquet.gz", b""),
}


def promises() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, (file_name, content) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / file_name
            file.write_bytes(content)
            if file_name.endswith("parquet.gz"):
                pq.write_table(pa.table({"text": ["w1"]}), folder + "/whole")
                file.write_bytes(gzip.compress((Path(folder) / "whole").read_bytes()))
            os.environ["HF_DATASETS_CACHE"] = folder
            print(f"{name}: {file_name} {file.read_bytes()[:60]!r}")
            print(f"  kdcli:    {_result(_kdcli_rows, str(file))}")
            print(f"  streamed: {_result(_datasets_rows, str(file), True)}")
            print(f"  cached:   {_result(_datasets_rows, str(file), False)}")


def _kdcli_rows(file: str) -> list[object]:
    from kdcli.data.sources import open_source

    return [row.values for table in open_source(file).tables("train") for row in table.rows]


def _datasets_rows(file: str, streaming: bool) -> list[object]:
    if ".tsv" not in file:
        return list(_load(file, streaming=streaming))
    import datasets

    return list(
        datasets.load_dataset("csv", data_files=file, sep="\t", split="train", streaming=streaming)
    )


def _result(read: Callable[..., list[object]], *arguments: object) -> str:
    """Return the first rows of a file, or the error, as text."""
    try:
        return f"{read(*arguments)[:3]}"
    except Exception as error:  # noqa: BLE001 - the class of the error is shown
        return f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"


# Measuring.


WAYS: dict[str, dict[str, Callable[..., int]]] = {
    "read": {
        "kdcli": read_ours,
        "datasets, streamed": read_streaming,
        "datasets, streamed as Arrow": read_batches,
        "datasets, cached as Arrow": read_cached,
    },
    "rows": {
        "kdcli": rows_ours,
        "datasets, streamed": rows_streaming,
        "datasets, cached": rows_cached,
    },
    "tokenise": {
        "kdcli": tokenise_ours,
        "datasets, a row a document": tokenise_mapped,
        "datasets, a row a batch": tokenise_joined,
        "datasets, from a generator": tokenise_generated,
    },
}


class Measured(NamedTuple):
    """Time and space of one run.

    Attributes:
        seconds: elapsed time.
        cpu_seconds: processor time of all processes.
        peak_mb: peak memory of the largest process.
        disk_mb: size of the files that it left.
    """

    seconds: float
    cpu_seconds: float
    peak_mb: float
    disk_mb: float


def compare(what: str, files: list[str], tokenizer: str, rounds: int) -> None:
    for file in files:
        measured: dict[str, list[Measured]] = {}
        counts = {}
        for _ in range(rounds):
            for name in WAYS[what]:
                counts[name], of_run = _measure(what, name, file, tokenizer)
                measured.setdefault(name, []).append(of_run)
        megabytes = Path(file).stat().st_size / 1e6
        print(f"{Path(file).name}, {megabytes:,.0f} MB, load {os.getloadavg()}")
        for name, runs in measured.items():
            medians = Measured(*(statistics.median(column) for column in zip(*runs, strict=True)))
            least = min(run.cpu_seconds for run in runs)
            print(
                f"  {name:30} {medians.seconds:7.1f} s "
                f"{medians.cpu_seconds:7.1f} CPU s (minimum {least:.1f}) "
                f"{medians.peak_mb:7.0f} MB peak {medians.disk_mb:7.0f} MB on disk, "
                f"{counts[name]:,}",
                flush=True,
            )


def _measure(what: str, name: str, file: str, tokenizer: str) -> tuple[int, Measured]:
    """Run a way once, and return its count and its time and space."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        used = _run_one(what, name, file, tokenizer, Path(folder))
        seconds = time.perf_counter() - began
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        count = int((Path(folder) / "count").read_text())
        cpu = used.ru_utime + used.ru_stime
        return count, Measured(seconds, cpu, used.ru_maxrss / 1024, disk / 1e6)


def _run_one(
    what: str, name: str, file: str, tokenizer: str, folder: Path
) -> resource.struct_rusage:
    """Run a way in a new process, and return the resources of the process and its children."""
    environment = os.environ | {"HF_DATASETS_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "one", what, name, file, tokenizer, f"{folder}/out"]
    with (folder / "count").open("w") as count:
        one = subprocess.Popen(command, env=environment, stdout=count)
    _, status, used = os.wait4(one.pid, 0)
    one.returncode = os.waitstatus_to_exitcode(status)
    assert one.returncode == 0, name
    return used


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        what, name, file, tokenizer, out = sys.argv[2:]
        way = WAYS[what][name]
        print(way(file, tokenizer, Path(out)) if what == "tokenise" else way(file))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "blocks", "promises", *WAYS])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=120)
    options = parser.parse_args()
    if options.what == "make":
        paragraphs, folder = options.files
        make(paragraphs, folder, options.megabytes)
    elif options.what == "promises":
        promises()
    elif options.what == "blocks":
        blocks(str(options.files[0]), options.tokenizer)
    else:
        files = options.files
        if options.what == "read":
            files = [files[0] / f"text.{kind}" for kind in KINDS]
        compare(options.what, [str(file) for file in files], options.tokenizer, options.rounds)


if __name__ == "__main__":
    main()
