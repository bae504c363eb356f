"""The memory of a command depends on the texts that it uses, not on the size of the source."""

import json
import os
import platform
import resource
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kdcli.data.objects import write_object

SOURCE_BYTES = 2_000_000_000
MAX_BYTES = 1_000_000_000  # Half of it is torch and transformers.
MAX_ADDRESSES = 1_200_000_000  # above those that the libraries reserve when they are imported
LINES = 1000  # that are written at once
QUICK = ["--device", "cpu", "--overwrite", "--set", "measure.latency=false"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Different texts of two thousand characters, but few tokens, each one sentence."""
    file = tmp_path_factory.mktemp("source") / "texts.txt"
    rest = f"is a text with a word of unusual length: {'x' * 1950}"
    written, number = 0, 0
    with file.open("w") as opened:
        while written < SOURCE_BYTES:
            written += opened.write("".join(f"{number + n} {rest}\n" for n in range(LINES)))
            number += LINES
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def vectors(source):
    """A vector for each text, in a file of about half a gigabyte."""
    with source.open("rb") as opened:
        count = sum(1 for _ in opened)
    file = source.with_name("vectors.npy")
    array = np.lib.format.open_memmap(file, "w+", np.float32, (count, 128))
    part = np.random.default_rng(0).normal(size=(LINES, 128))
    for begin in range(0, count, LINES):
        array[begin : begin + LINES] = part
    yield file
    file.unlink()


def libraries_addresses():
    """The most bytes of addresses of a process that imports the large libraries."""
    script = "import torch, transformers; print(open('/proc/self/status').read())"
    status = subprocess.check_output([sys.executable, "-c", script], text=True)
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmPeak"))
    return int(peak) * 1024


def peak_memory(folder, limit, *words):
    """Run a command with a limit of addresses, and return the most bytes of memory it had."""
    command = [sys.executable, "-m", "kdcli", *map(str, words)]
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=said,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=folder,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "said.txt").read_text()
    return usage.ru_maxrss * 1024


FAULTS = """
import resource
from kdcli.engine.allocator import keep_freed_memory

keeps = keep_freed_memory()
for _ in range(20):
    b"x" * 20_000_000
print(keeps, resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False),
    ],
)
def test_freed_memory_is_used_again_unless_the_user_chose(settings, keeps):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    printed = subprocess.check_output(command, text=True, env=env | settings).split()
    assert printed[0] == str(keeps)
    assert (int(printed[1]) < 200_000_000) == keeps


@pytest.mark.long
@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux limits addresses")
def test_a_source_of_two_gigabytes_needs_less_than_one_to_distil_and_to_evaluate(
    source, vectors, tmp_path
):
    limit = libraries_addresses() + MAX_ADDRESSES
    texts = ["--data", source, "--set", "data.max_length=32", *QUICK]
    training = ["--max-steps", "2", "--set", "train.warmup_steps=0", "--set", "workload.rows=1000"]
    embedding = ["--method", "embedding", "--set", "workload.unit=document"]
    distilled = ["distill", "demo", "--to", "1x32", *embedding, *training, *texts, "-o", "student"]
    distilled += ["--teacher-vectors", vectors]
    assert peak_memory(tmp_path, limit, *distilled) < MAX_BYTES
    (account,) = json.loads((tmp_path / "student" / "report.json").read_text())["accounts"]
    assert account["kept"] == 1000
    assert account["read"] > 900_000
    evaluated = ["evaluate", "student", "student", *texts, "-o", "scores"]
    assert peak_memory(tmp_path, limit, *evaluated) < MAX_BYTES
    report = json.loads((tmp_path / "scores" / "report.json").read_text())
    assert {evaluation["n"] for evaluation in report["evaluations"]} == {5000}


def test_rows_in_memory_are_written_without_a_copy_of_them_all(tmp_path, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path))
    texts = [f"{n} is a text of {'many ' * 40}words" for n in range(20_000)]
    tracemalloc.start()
    path = write_object(texts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 2_000_000
