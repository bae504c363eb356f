"""Measure tokenising with one and two workers, and opening a corpus of 10**8 blocks.

    python benchmarks/corpus.py tokenise TEXT.jsonl --tokenizer MODEL [--repeats 3]
    python benchmarks/corpus.py open

`tokenise` runs one worker and two workers in turns over the same shards. It prints the seconds with
the start of the workers, the CPU seconds of all processes, and the ratio. It also prints how much
two Python loops gain from running at the same time, which is the upper limit for two workers on
this machine at that moment. `open` creates sparse files of 10**8 blocks of 128 tokens (25 GB, which
take no space on the disk), opens them in a new process and draws batches. It prints the seconds and
the growth of the memory. docs/evidence/speed.md has the results.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

BLOCKS, LENGTH, SHARDS, BATCH, STEPS = 10**8, 128, 400, 256, 100
LOOP = "for _ in range(100_000_000): pass"
SHARD_BYTES = 1 << 20  # Many small shards, so that a short text keeps both workers busy to the end


def tokenise(text: str, model: str, repeats: int) -> None:
    from kdcli.data.sources import open_source
    from kdcli.data.text import shards
    from kdcli.data.text.tokenise import tokenise
    from kdcli.models.load import load_tokenizer

    shards.SHARD_BYTES = SHARD_BYTES
    tokenizer, source, ratios = load_tokenizer(model), open_source(text), []
    size = Path(text).stat().st_size
    for _ in range(repeats):
        took, spent = {}, {}
        for workers in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                began, before = time.perf_counter(), cpu_seconds()
                where = Path(folder) / "shards"
                tokenise(source, tokenizer, None, where, workers=workers)
                took[workers], spent[workers] = time.perf_counter() - began, cpu_seconds() - before
        ratios.append(took[1] / took[2])
        for n, seconds in took.items():
            print(
                f"{n} workers {seconds:.1f} s, {size / seconds / 1e6:.2f} MB/s, CPU {spent[n]:.1f} "
                "s",
                end="; ",
            )
        print(
            f"{ratios[-1]:.2f}x, two loops {capacity():.2f}x, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}x")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def capacity() -> float:
    """Return the speed-up of two loops that run at the same time."""
    took = []
    for count in (1, 2):
        began = time.perf_counter()
        loops = [subprocess.Popen([sys.executable, "-S", "-c", LOOP]) for _ in range(count)]
        for loop in loops:
            loop.wait()
        took.append(time.perf_counter() - began)
    return 2 * took[0] / took[1]


def sparse(folder: Path) -> None:
    """Create a directory of shards with `BLOCKS` blocks of zeros."""
    from kdcli.data.text.shards import Shard, TokenShards, tokenizer_hash
    from kdcli.models.load import load_tokenizer

    tokenizer, tokens = load_tokenizer("demo"), BLOCKS * (LENGTH - 2) // SHARDS
    shards = tuple(Shard(f"train-{n:05}.bin", "train", (), tokens) for n in range(SHARDS))
    meta = TokenShards(
        "zeros", None, tokenizer_hash(tokenizer), "demo", tokenizer.sep_token_id, "<u2", shards
    )
    meta.write(folder)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.truncate(meta.bytes_of(replace(shard)))


def opened(folder: str) -> None:
    from kdcli.data.batches import BatchOrder
    from kdcli.data.text.corpus import open_corpus
    from kdcli.models.load import load_tokenizer

    def held() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    tokenizer = load_tokenizer("demo")
    before, began = held(), time.perf_counter()
    corpus = open_corpus(
        folder,
        tokenizer,
        max_length=LENGTH,
        column=None,
        isolated=False,
        held_out_blocks=256,
    )
    order = BatchOrder(len(corpus.train), BATCH, 0)
    order.indices(1)
    took, grown = time.perf_counter() - began, held() - before
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        corpus.train.batch(order.indices(step))
    a_batch = (time.perf_counter() - began) / STEPS
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        order.indices(step)
    of_order = (time.perf_counter() - began) / STEPS
    names = ("blocks", "open_seconds", "open_bytes", "batch_ms", "order_ms", "bytes_after_batches")
    values = (len(corpus.train), took, grown, 1e3 * a_batch, 1e3 * of_order, held() - before)
    print(json.dumps(dict(zip(names, values, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tokenise", "open", "opened"])
    parser.add_argument("text", nargs="?")
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.what == "tokenise":
        tokenise(options.text, options.tokenizer, options.repeats)
    elif options.what == "opened":
        opened(options.text)
    else:
        with tempfile.TemporaryDirectory() as folder:
            sparse(Path(folder))
            # A new process, so that its peak memory only comes from opening the files.
            subprocess.run([sys.executable, __file__, "opened", folder], check=True)


if __name__ == "__main__":
    main()
