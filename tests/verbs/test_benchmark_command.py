"""`kdcli benchmark`: requests to the worker, report, gates, refusals."""

import functools
import json
import shlex
from dataclasses import replace

import own_files
import pytest
from forked import script

from kdcli.deploy.latency import Latency
from kdcli.deploy.measurements import Agreement, Failure, LatencyRow, Speedup
from kdcli.errors import KdcliError, MachineError
from kdcli.verbs.benchmark import backend_scores
from kdcli.verbs.benchmark import run as command
from kdcli.verbs.benchmark.settings import BenchmarkRecipe

PAPERS = ["12x768", "6x768", "12x384", "6x384", "4x384", "3x384"]
SMALL = ["2x24:48@12", "1x24:48@12"]
FEW = shlex.split(
    "--set measure.min_runs=3 --set measure.min_seconds=0.0 --seq-len 16 --batch-size 1"
)


run, succeeds = (functools.partial(of, "benchmark") for of in (own_files.kdcli, own_files.succeeds))


@pytest.fixture
def requests(answered_by):
    """Every request to a worker; each subject takes half as long as the one before, the first 8
    ms."""
    requests = []

    def measured(subjects, protocol):
        requests.append((subjects, protocol))
        found = Latency()
        for batch_size, seq_len in protocol.cells:
            for n, subject in enumerate(subjects):
                speedup = ratio(subjects[0], 2.0**n, 1.9**n, 2.1**n) if n else None
                ms = 8.0 / 2**n
                found.rows.append(row(subject, protocol, batch_size, seq_len, ms, speedup=speedup))
        return found

    answered_by(measured)
    return requests


def ratio(baseline, median, low, high, *, unstable=False):
    ends = {"median": median, "low": low, "high": high}
    return Speedup(baseline=baseline.name, unstable=unstable, **ends)


def row(subject, protocol, batch_size, seq_len, ms, status="ok", *, speedup=None):
    times = dict.fromkeys(("p50_ms", "mean_ms"), ms) | {"p75_ms": 1.1 * ms}
    times |= dict.fromkeys(("p90_ms", "p95_ms"), 1.25 * ms)
    return LatencyRow(
        model=subject.name,
        backend=subject.backend,
        device=protocol.device,
        dtype=subject.precision,
        batch_size=batch_size,
        seq_len=seq_len,
        padding=protocol.padding,
        n=60,
        iqr_over_p50=0.01,
        status=status,
        speedup=speedup,
        **times,
    )


@pytest.mark.parametrize("price", ["-1", "0", "nan", "inf"])
def test_a_price_is_positive(price, requests, tmp_path):
    done = run(SMALL[0], *FEW, "--price-per-hour", price, "-o", tmp_path / "out")
    assert (done.exit_code, requests, list(tmp_path.iterdir())) == (2, [], [])
    assert done.stderr.count("price") == 1, done.stderr


def test_a_price_gives_the_cost_of_a_million_texts(requests, tmp_path):
    done = succeeds(*SMALL, *FEW, "--price-per-hour", "0.36", "-o", tmp_path / "out")
    first, second = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))["latency"]
    assert (first["texts_per_second"], first["cost_per_million"]) == pytest.approx((125, 0.8))
    assert (second["texts_per_second"], second["cost_per_million"]) == pytest.approx((250, 0.4))
    assert "a million texts cost 0.40 instead of 0.80" in " ".join(done.stdout.split())


def test_every_backend_has_a_worker_with_the_baseline_in_it(requests, tmp_path):
    backends = ["--backend", "torch", "--backend", "compile", "--backend", "torch-bf16"]
    succeeds(SMALL[1], "--baseline", SMALL[0], *backends, "-o", tmp_path / "out")
    names = [[(s.name, s.backend, s.precision) for s in subjects] for subjects, _ in requests]
    plain, bf16 = ("torch", "fp32"), ("torch", "bf16")
    assert names == [
        [(SMALL[0], *plain), (SMALL[1], *plain), (SMALL[0], *bf16), (SMALL[1], *bf16)],
        [(SMALL[0], *plain), (SMALL[0], "compile", "fp32"), (SMALL[1], "compile", "fp32")],
    ]
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    kept = [
        (r["model"], r["backend"], r["dtype"]) for r in report["latency"] if r["batch_size"] == 1
    ]
    assert len(set(kept)) == len(kept) == 6, "the baseline's rows stand once"


@pytest.mark.parametrize(
    ("settings", "models", "cells"),
    [
        ({"preset": "tinybert"}, ["12x768", "4x312:1200@12", "6x768"], [(128, 128)]),
        (
            {"preset": "tinybert", "batch_sizes": [1, 2]},
            ["12x768", "4x312:1200@12", "6x768"],
            [(1, 128), (2, 128)],
        ),
        (
            {"models": ["6x384", "12x768"], "baseline": "12x768"},
            ["12x768", "6x384"],
            [(1, 128), (8, 128)],
        ),
        ({}, [*PAPERS, "4x312:1200@12"], [(1, 128)]),
        ({"models": ["a"], "preset": "minilm", "seq_lens": [16]}, ["a"], [(128, 16)]),
    ],
)
def test_models_and_cells(settings, models, cells):
    assert command.models_and_cells(BenchmarkRecipe(**settings)) == (models, cells)


def test_dtype_is_that_of_baseline_and_backends_without_their_own(requests, tmp_path):
    succeeds(
        *SMALL, *shlex.split(f"--dtype bf16 --backend torch --backend onnx-int8 -o {tmp_path}/out")
    )
    names = [[(s.backend, s.precision) for s in subjects] for subjects, _ in requests]
    bf16, int8 = ("torch", "bf16"), ("onnx", "int8")
    assert names == [[bf16, bf16], [bf16, int8, int8]]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--dtype", "bf16", "--backend", "onnx"], 2, "backend onnx has no precision 'bf16'"),
        (
            ["--dtype", "fp16", "--backend", "openvino"],
            2,
            "backend openvino has no precision 'fp16'",
        ),
        (["--dtype", "int8"], 2, "'dtype' must be"),
        (["--dtype", "bf16"], 3, "an old card has no bf16"),
    ],
)
def test_a_dtype_that_is_not_there_is_refused_by_name(
    monkeypatch, tmp_path, options, code, message
):
    def choose(wanted, device):
        raise MachineError("an old card has no bf16", "use --dtype fp16 or fp32")

    monkeypatch.setattr(command, "choose_dtype", choose)
    result = run(*SMALL, *options, "-o", tmp_path / "out")
    assert (result.exit_code, message in own_files.said_by(result)) == (code, True), result.output
    assert not (tmp_path / "out").exists()


def test_gates_are_held_after_the_table_is_printed(requests, tmp_path):
    succeeds(
        *SMALL, "--min-speedup", "1.5", "--max-latency-ms", "5", "--strict", "-o", tmp_path / "a"
    )
    result = run(*SMALL, "--min-speedup", "2.5", "-o", tmp_path / "b")
    assert result.exit_code == 5
    assert "2.00 times as fast, below 2.5" in result.stderr
    assert SMALL[1] in result.stdout
    result = run(*SMALL, "--max-latency-ms", "3", "-o", tmp_path / "c")
    assert result.exit_code == 5
    assert "4.00 ms, above 3 ms" in result.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([SMALL[0]], "8.00 ms, above 5 ms"),
        ([*SMALL, "--baseline", SMALL[1]], "4.00 ms, above 3 ms"),
        ([SMALL[0], "--backend", "torch", "--backend", "onnx-int8"], "4.00 ms, above 3 ms"),
    ],
)
def test_a_gate_holds_for_whatever_is_no_baseline(requests, tmp_path, given, message):
    limit = message.split()[-2]
    result = run(*given, *FEW, "--max-latency-ms", limit, "-o", tmp_path / "out")
    assert (result.exit_code, message in result.stderr) == (5, True)


@pytest.mark.parametrize(
    ("too_large", "gate", "message"),
    [
        (SMALL[1], ("--max-latency-ms", "5"), "was not measured: out of memory"),
        (SMALL[0], ("--min-speedup", "1"), "no speed-up, because the baseline was not measured"),
    ],
)
def test_a_candidate_that_was_not_measured_misses_every_gate(
    answered_by, tmp_path, too_large, gate, message
):
    def measured(subjects, protocol):
        failure = Failure(
            model=too_large,
            backend="torch",
            dtype="fp32",
            batch_size=1,
            seq_len=16,
            reason="out of memory",
        )
        rows = [row(s, protocol, 1, 16, 1.0) for s in subjects if s.name != too_large]
        return Latency(rows, [failure])

    answered_by(measured)
    result = run(*SMALL, *FEW, *gate, "-o", tmp_path / "out")
    assert (result.exit_code, message in own_files.said_by(result)) == (5, True)


def test_what_cannot_be_measured_is_refused_before_anything_is(requests, tmp_path):
    alone = own_files.refused(tmp_path, "benchmark", SMALL[0], "--min-speedup", "2")
    assert f"only {SMALL[0]} on torch is measured" in alone
    long = own_files.refused(tmp_path, "benchmark", *SMALL, "--seq-len", "2048")
    assert "reads at most 512 tokens, but a cell has 2048" in long
    assert not requests


@pytest.fixture
def unstable(answered_by):
    """A function that makes the second model's times and its speed-up unstable."""

    def answer(low):
        def measured(subjects, protocol):
            speedup = ratio(subjects[0], 2.5, low, 4.0, unstable=True)
            second = row(subjects[1], protocol, 1, 16, 4.0, "unstable", speedup=speedup)
            return Latency([row(subjects[0], protocol, 1, 16, 8.0), second])

        answered_by(measured)

    return answer


@pytest.mark.parametrize(
    ("gate", "code", "message"),
    [
        (
            ["--min-speedup", "2"],
            5,
            "1.60 times as fast, the lower bound of an unstable measurement, below 2",
        ),
        (
            ["--min-speedup", "1.5"],
            0,
            "within the limits, but unstable: 1x24:48@12 on torch fp32: 1.60 times as fast, the "
            "lower bound of an unstable measurement",
        ),
        (
            ["--max-latency-ms", "4.5"],
            5,
            "5.00 ms, the 90th percentile of an unstable measurement, above 4.5 ms",
        ),
        (
            ["--max-latency-ms", "5.5"],
            0,
            "within the limits, but unstable: 1x24:48@12 on torch fp32: 5.00 ms, the 90th "
            "percentile of an unstable measurement",
        ),
    ],
)
def test_of_an_unstable_measurement_a_gate_takes_the_worse_end(
    unstable, tmp_path, gate, code, message
):
    unstable(low=1.6)
    result = run(*SMALL, *FEW, *gate, "-o", tmp_path / "out")
    assert result.exit_code == code
    assert message in own_files.said_by(result)


def test_a_gate_states_no_factor_of_times_that_may_even_be_slower(unstable, tmp_path):
    unstable(low=0.7)
    result = run(*SMALL, *FEW, "--min-speedup", "1.5", "-o", tmp_path / "out")
    assert result.exit_code == 5
    assert "the times are too unstable to show a speed-up" in own_files.said_by(result)
    assert "0.70" not in result.output


def test_strict_does_not_take_an_unstable_measurement(answered_by, tmp_path):
    def unstable(subjects, protocol):
        return Latency([row(s, protocol, 1, 16, 1.0, "unstable") for s in subjects])

    answered_by(unstable)
    succeeds(*SMALL, *FEW, "-o", tmp_path / "a")
    result = run(*SMALL, *FEW, "--strict", "-o", tmp_path / "b")
    assert result.exit_code == 6
    assert "2 of 2 measurements are unstable" in result.stderr
    assert "longer with --set measure.min_seconds=..." in result.stderr


def test_ctrl_c_keeps_what_was_measured(answered_by, tmp_path):
    def stopped(subjects, protocol):
        return Latency(rows=[row(subjects[0], protocol, 1, 16, 1.0)], interrupted=True)

    answered_by(stopped)
    result = run(*SMALL, *FEW, "-o", tmp_path / "out")
    assert result.exit_code == 130
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert [r["model"] for r in report["latency"]] == [SMALL[0]]
    assert "interrupted" in report["notes"][0]


def test_a_wrong_backend_is_an_error_and_the_rest_is_reported(answered_by, tmp_path):
    def wrong(subjects, protocol):
        of = {"model": SMALL[1], "backend": "torch", "dtype": "bf16", "limit": 0.1, "wrong": True}
        agreement = Agreement(**of, max_abs=9.0, relative=0.5, cosine=0.1)
        rows = [row(s, protocol, 1, 16, 1.0) for s in subjects if s.precision == "fp32"]
        return Latency(rows=rows, agreements=[agreement])

    answered_by(wrong)
    result = run(*SMALL, *FEW, "--backend", "torch-bf16", "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "wrong output" in result.stderr
    assert (tmp_path / "out" / "report.html").is_file()


def test_lengths_of_real_data(requests, tmp_path, model_dir, text_file):
    succeeds(model_dir, SMALL[0], "--padding", "data", "--data", text_file, "-o", tmp_path / "out")
    (_, protocol), *_ = requests
    assert set(protocol.lengths) == {4}, "four words a line"
    assert len(protocol.texts) == 16


def test_runs_side_by_side(requests, tmp_path):
    for name in ("one", "two"):
        succeeds(*SMALL, "-o", tmp_path / name)
    before = len(requests)
    succeeds(
        *shlex.split(
            f"--compare {tmp_path}/one --compare {tmp_path}/two/report.json -o {tmp_path}/both"
        )
    )
    assert len(requests) == before, "nothing is measured"
    report = json.loads((tmp_path / "both" / "report.json").read_text("utf-8"))
    assert [(m["name"], m["baseline"], m["run"]) for m in report["models"]] == [
        (f"{run}: {model}", baseline and f"{run}: {baseline}", run)
        for run in ("one", "two")
        for model, baseline in ((SMALL[0], None), (SMALL[1], SMALL[0]))
    ]
    assert len(report["latency"]) == 2 * len(
        json.loads((tmp_path / "one" / "report.json").read_text())["latency"]
    )


def test_the_runner_for_old_machines(tmp_path):
    result = succeeds(*SMALL, "--portable", tmp_path / "old")
    assert {p.name for p in (tmp_path / "old").iterdir()} == {"measure_encoders.py", "shapes.json"}
    assert "--compare result.json" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--padding", "data"], "needs --data"),
        ([SMALL[0], SMALL[0]], "two models are called"),
        (["./nowhere"], "no model directory"),
        (["--compare", "nowhere.json"], "cannot be read"),
        (["demo", "--portable", "old"], "is a model"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_nothing_written(
    requests, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert message in own_files.refused(tmp_path, "benchmark", *arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "serving"}, "no model given"),
        ({"models": SMALL, "backends": ["torch-int8"]}, "has no precision 'int8'"),
    ],
)
def test_recipes_that_cannot_be_measured(settings, message):
    with pytest.raises(KdcliError, match=message):
        command.models_and_cells(BenchmarkRecipe(**settings))


def test_a_damaged_report_is_named(tmp_path):
    (tmp_path / "report.json").write_text('{"models": {}', "utf-8")
    result = run("--compare", tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "report.json is not valid JSON" in result.stderr.replace("\n", "")
    (tmp_path / "report.json").write_text('{"models": {"a": {}}, "command": "x"}', "utf-8")
    assert "is not a report of kdcli" in run(
        "--compare", tmp_path, "-o", tmp_path / "out"
    ).stderr.replace("\n", "")
    for value in ("NaN", "-Infinity", "1e400"):
        text = '{"models": [], "command": "x", "price_per_hour": ' + value + "}"
        (tmp_path / "report.json").write_text(text, "utf-8")
        result = run("--compare", tmp_path, "-o", tmp_path / "out")
        assert (result.exit_code, "is NaN or infinite" in result.stderr) == (2, True)


@pytest.fixture
def on_task(tmp_path):
    """A model with a random head, and arguments that judge it on 40 examples."""
    model = own_files.headed(tmp_path / "model", tuple(sorted(own_files.NAMES)), seed=3)
    own_files.write(tmp_path / "data" / "validation.jsonl", own_files.rows("class", 40, seed=1))
    return [model, "--task", "own", "--data", tmp_path / "data", "-o", tmp_path / "out"]


def test_a_task_is_judged_on_every_backend(requests, on_task, tmp_path):
    result = succeeds(
        *on_task, "--backend", "torch", "--backend", "torch-bf16", "--backend", "onnx"
    )
    found = own_files.report_of(tmp_path / "out")
    assert [e.model for e in found.evaluations] == [
        "model",
        "model on torch bf16",
        "model on onnx fp32",
    ]
    assert all(e.n == 40 for e in found.evaluations)
    plain, _, onnx = found.evaluations
    assert 0 < plain.metrics["accuracy"] < 1
    assert onnx.metrics == pytest.approx(plain.metrics)
    own_files.succeeds("evaluate", *on_task[:-1], tmp_path / "own")
    assert own_files.report_of(tmp_path / "own").evaluations[0].metrics == pytest.approx(
        plain.metrics
    )
    assert {c.model for c in found.comparisons} == {"model on torch bf16", "model on onnx fp32"}
    assert [(m.name, m.role, m.of, m.backend, m.dtype) for m in found.models] == [
        ("model", "baseline", None, None, None),
        ("model on torch bf16", "form", "model", "torch", "bf16"),
        ("model on onnx fp32", "form", "model", "onnx", "fp32"),
    ]
    assert "model on onnx fp32" in result.stdout
    # The real texts on which outputs are compared are the task's.
    assert own_files.rows("class", 40, seed=1)[0]["text"] in requests[0][1].texts


def test_a_less_accurate_backend_is_an_error(requests, on_task, tmp_path, monkeypatch):
    made = backend_scores.runner

    def spoilt(model, backend, precision, **settings):
        runner = made(model, "torch", "fp32", **settings)
        if precision == "fp32":
            return runner
        return replace(runner, output=lambda found: [-x for x in runner.output(found)])

    monkeypatch.setattr(backend_scores, "runner", spoilt)
    result = run(*on_task, "--backend", "torch-bf16", "--set", "max_drop=1.0")
    assert result.exit_code == 5
    accuracy = [e.metrics["accuracy"] for e in own_files.report_of(tmp_path / "out").evaluations]
    assert accuracy[1] == pytest.approx(1 - accuracy[0])
    assert accuracy[1] < accuracy[0]
    assert (
        "less accurate than torch in float32 by more than 1 points: model on torch bf16: "
        f"{100 * (accuracy[0] - accuracy[1]):.2f} points of accuracy lost"
        in own_files.said_by(result)
    )


def test_a_shape_has_no_score(on_task):
    result = run("2x24:48@12", *on_task[1:])
    assert result.exit_code == 2
    assert "--task own needs trained models, but 2x24:48@12 is a shape" in result.output


@pytest.mark.slow
def test_what_the_portable_runner_brings_back_is_reported(tmp_path):
    succeeds(*SMALL, "--seq-len", "16", "--batch-size", "1", "--portable", tmp_path / "old")
    result = tmp_path / "k80.json"
    few = ("--min-runs", "4", "--min-seconds", "0.01")
    runner = script(tmp_path / "old" / "measure_encoders.py", "--out", result, *few)
    message = runner.communicate()
    assert runner.returncode == 0, message
    found = succeeds("--compare", result, "-o", tmp_path / "out")
    report = own_files.report_of(tmp_path / "out")
    names = [f"k80: {shape}" for shape in SMALL]
    assert list(report.cards) == names
    assert [row.model for row in report.latency] == names
    assert [model.role for model in report.models] == ["baseline", "candidate"]
    assert report.latency[0].speedup is None
    speedup = report.latency[1].speedup
    assert speedup.baseline == names[0]
    # Four runs of such small models may be too noisy for a speed-up.
    assert speedup.is_inconclusive or f"{speedup.stated:.2f}x" in found.stdout
