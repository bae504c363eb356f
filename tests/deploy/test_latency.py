"""The worker process and its protocol; no test asserts a time."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder
from forked import workers_are_forked

from kdcli.deploy import latency as latency_file
from kdcli.deploy import worker
from kdcli.deploy.environment import describe_environment, latency_threads, versions
from kdcli.deploy.latency import Latency, Protocol, Subject, measure_latency
from kdcli.errors import MachineError

pytestmark = pytest.mark.slow

FEW = Protocol(device="cpu", min_runs=12, min_seconds=0.01)


def test_two_models_in_one_real_worker(tmp_path, monkeypatch):
    names, cells = ["teacher", "student"], [(1, 16), (2, 8)]
    torch.manual_seed(0)
    for name, layers in zip(names, (3, 1), strict=True):
        tiny_encoder("bert", num_hidden_layers=layers).save_pretrained(tmp_path / name)
    # Neither the current directory nor a launcher's threads may matter.
    (tmp_path / "types.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = measure_latency(
        [Subject(name, str(tmp_path / name)) for name in names], replace(FEW, cells=tuple(cells))
    )
    rows = found.rows
    assert [(r.model, (r.batch_size, r.seq_len)) for r in rows] == [
        (name, cell) for cell in cells for name in names
    ]
    for row in rows:
        assert (row.backend, row.device, row.dtype, row.padding) == ("torch", "cpu", "fp32", "full")
        assert row.n >= 12
        assert row.p50_ms <= row.p75_ms <= row.p90_ms <= row.p95_ms
        assert None not in (row.tokens_per_second, row.load_seconds, row.first_call_ms)
    assert rows[0].n == rows[1].n, "runs are paired"
    assert [r.speedup and r.speedup.baseline for r in rows] == [None, "teacher"] * 2
    speedups = [r.speedup for r in rows if r.speedup]
    assert all(0 < s.low <= s.median <= s.high for s in speedups)


def test_the_message_of_a_failed_worker(tmp_path, monkeypatch):
    workers_are_forked(monkeypatch)
    with pytest.raises(MachineError, match=r"the latency worker failed: .*nowhere") as caught:
        measure_latency([Subject("teacher", str(tmp_path / "nowhere"))], FEW)
    assert (caught.value.exit_code, "measure.latency=false" in str(caught.value.hint)) == (3, True)


def workers_run(monkeypatch, code, start=subprocess.Popen):
    """Let a process with other code stand in for the worker."""
    stand_in = lambda command, **how: start([sys.executable, "-c", code], **how)  # noqa: E731
    # Other tests may run workers that are forked.
    monkeypatch.setattr(latency_file, "subprocess", SimpleNamespace(Popen=stand_in, PIPE=-1))


def test_the_signal_of_a_killed_worker(monkeypatch):
    workers_run(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(MachineError, match="was ended by SIGKILL: it left no message"):
        measure_latency([Subject("teacher", "x")], FEW)


PRINTS = """
import json, sys, time
sys.stdin.read()
print("a library says hello")
failure = {"model": "a", "backend": "torch", "dtype": "fp32", "reason": "out of memory"}
print(json.dumps({"failures": [failure]}), flush=True)
"""


def test_ctrl_c_keeps_finished_cells(monkeypatch):
    class Stopped(subprocess.Popen):
        stopped = False

        def wait(self, *arguments, **how):
            if self.poll() is None and not self.stopped:
                self.stopped = True
                raise KeyboardInterrupt
            return super().wait(*arguments, **how)

    workers_run(monkeypatch, PRINTS + "import os; os.close(1); time.sleep(60)", Stopped)
    found = measure_latency([Subject("a", "x")], FEW)
    assert found.interrupted
    assert [(f.model, f.reason) for f in found.failures] == [("a", "out of memory")]


def test_the_deadline_ends_a_measurement(monkeypatch):
    workers_run(monkeypatch, PRINTS + "time.sleep(60)")
    assert measure_latency([Subject("a", "x")], FEW, deadline=time.monotonic()).interrupted


@pytest.mark.parametrize(
    ("most", "end"), [(3, "about 9 s, longer if the times are unstable"), (1, "about 9 s")]
)
def test_a_slow_measurement_logs_its_progress(most, end, capsys):
    lines = latency_file._Lines((*SHAPES, Subject("another", LARGE)))
    lines.show({"prepared": [LARGE]}, 1)
    assert lines.first is not None
    lines.first -= 60
    lines.last -= 60
    lines.show({"prepared": [SMALL]}, 2)
    lines.show({"measuring": [1, 128, 9, most]}, 3)
    lines.show({"measuring": [8, 128, 1, most]}, 3)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "2 of 3 models prepared  0:01:00 left"
    assert second == f"timing 3 models in turns on 1 x 128 tokens: {end}"


LARGE, SMALL = "2x24:48@12", "1x24:48@12"
SHAPES = (Subject(LARGE, LARGE), Subject(SMALL, SMALL))


@pytest.fixture
def served(at_once, tmp_path):
    """A function that measures subjects in this process."""

    def serve(subjects=SHAPES, cells=((1, 16), (2, 8)), **settings):
        protocol, found = replace(FEW, min_runs=3, min_seconds=0.0, cells=cells), Latency()
        protocol = replace(protocol, **settings)
        worker.serve(subjects, protocol, tmp_path, found.read)
        return found

    return serve


def test_shapes_need_no_weights(served):
    found = served()
    assert [r.model for r in found.rows] == [LARGE, SMALL] * 2
    assert [r.speedup and r.speedup.baseline for r in found.rows] == [None, LARGE] * 2


STEADY, WILD = [0.004] * 30, 6 * [0.001, 0.001, 0.002, 0.004, 0.004]  # seconds


@pytest.mark.parametrize(("baseline", "candidate"), [(STEADY, WILD), (WILD, STEADY)])
def test_what_stays_unstable_is_stated_by_its_worse_end(served, times, baseline, candidate):
    asked = times(*[{0: baseline, 1: candidate}] * 3)
    rows = served(cells=[(1, 16)]).rows
    assert len(asked) == 3
    ratio = rows[1].speedup
    assert ratio.unstable
    assert ratio.stated == (ratio.low if ratio.low >= 1 else None)
    assert ratio.low < ratio.median
    assert [row.unstable for row in rows] == [of is WILD for of in (baseline, candidate)]
    assert rows[1].stated_ms == pytest.approx(4.0)
    assert rows[1].tokens_per_second == pytest.approx(16 / 0.004)


def test_only_the_first_cell_is_measured_again(served, times):
    asked = times(*[{0: WILD, 1: STEADY}] * 4)
    assert len(served(only_first_again=True).rows) == 4
    assert [is_warm for *_, is_warm in asked] == [False, True, True, False]


def test_out_of_memory_in_one_cell(monkeypatch, served):
    of, calls = worker.peak_of, iter(range(100))

    def peak_of(call, device):
        if next(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return of(call, device)

    monkeypatch.setattr(worker, "peak_of", peak_of)
    found = served()
    (failure,) = found.failures
    assert (failure.model, failure.batch_size, failure.reason) == (SMALL, 1, "out of memory")
    assert [(r.model, r.batch_size) for r in found.rows] == [
        (LARGE, 1),
        (LARGE, 2),
        (SMALL, 2),
    ]


def test_no_cell_is_longer_than_what_the_models_read(served, tmp_path):
    short = tiny_encoder("bert", max_position_embeddings=12)
    on_disk(short, tmp_path / "short")
    found = served([*SHAPES, Subject("short", str(tmp_path / "short"))], [(1, 16), (1, 128)])
    assert [(r.model, r.seq_len) for r in found.rows] == [(LARGE, 12), (SMALL, 12), ("short", 12)]


def test_a_backend_that_is_wrong_is_not_measured(monkeypatch, served):
    subjects = [Subject("a", SMALL), Subject("a", SMALL, "torch", "bf16")]
    rows = served(subjects, [(1, 16)]).rows
    measured = [(row.dtype, row.speedup and row.speedup.baseline) for row in rows]
    assert measured == [("fp32", None), ("bf16", "a")]
    monkeypatch.setitem(worker.ERROR_LIMITS, "bf16", 0.0)
    found = served(subjects, [(1, 16)])
    (row,) = found.agreements
    assert row.wrong
    assert row.relative > 0
    assert [r.dtype for r in found.rows] == ["fp32"]


def test_lengths_of_a_cell():
    assert worker.lengths_of("full", (), 3, 16) == [16, 16, 16]
    drawn = worker.lengths_of("random", (), 200, 16)
    assert drawn == worker.lengths_of("random", (), 200, 16)
    assert (min(drawn), max(drawn), {type(n) for n in drawn}) == (4, 16, {int})
    assert set(worker.lengths_of("data", (5, 90), 50, 16)) == {5, 16}


def test_a_batch_is_padded_on_the_right():
    batch = worker.cell_batch(tiny_config("bert"), [3, 5])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["input_ids"][0, 3:].tolist() == [0, 0]
    assert 0 not in batch["input_ids"][1].tolist()


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "esm"])
def test_inputs_hold_no_special_token(model_type):
    words = 33 if model_type == "esm" else 64
    config = tiny_config(
        model_type, vocab_size=words, mask_token_id=words - 1, pad_token_id=words // 2
    )
    ids = worker.full_length_ids(config, 4, 200)
    assert ids.shape == (4, 200)
    assert torch.equal(ids, worker.full_length_ids(config, 4, 200))
    present = set(ids.flatten().tolist())
    assert len(present) > 10
    assert not present & {0, 1, 2, 3, 4, words // 2, words - 1}


def test_environment_names_nobody():
    found = describe_environment()
    assert found["memory_bytes"] > 10**8
    assert 1 <= found["latency_threads"] <= found["physical_cores"] <= found["logical_cores"]
    assert not [
        name
        for name in (json.dumps(str(Path.home())), str(Path.cwd()))
        if name in json.dumps(found)
    ]
    assert set(versions()) >= {"kdcli", "torch", "transformers"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes")
def test_latency_keeps_to_the_cores_it_may_use():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        assert latency_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
