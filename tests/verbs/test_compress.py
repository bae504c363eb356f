"""`kdcli compress` end to end on tiny models: goals, pipelines, signals, and errors of a step."""

import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import measured_quickly
from own_files import encoder, headed, kdcli, own, refused, report_of, said_by, same_weights, write

from kdcli.deploy.latency import Latency
from kdcli.deploy.untrained import UntrainedTimes
from kdcli.deploy.worker import serve
from kdcli.disk import as_directory
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, MachineError, Stopped, UsageError
from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.report import finish
from kdcli.report.schema import Evaluation
from kdcli.report.titles import step_title
from kdcli.verbs.compress import budget, run, search, shapes
from kdcli.verbs.compress.budget import TIMED, TrainingCost
from kdcli.verbs.compress.journal import Journal, Record
from kdcli.verbs.compress.shapes import Untrained
from kdcli.verbs.compress.steps import Step
from kdcli.verbs.compress.teacher import teacher_notes

FAST = (
    *("--set", "measure.min_runs=2", "--set", "measure.min_seconds=0.0"),
    *("--set", "data.max_length=24"),
)
TRAIN = {"max_steps": 4, "batch_size": 16, "lr": 3e-3, "dtype": "fp32"}
PIPELINE = {
    "verb": "compress",
    "steps": [
        {"distill": {"student": {"to": ["2x16"]}, "method": "soft-targets", "train": TRAIN}},
        {"prune": {"method": "magnitude", "sparsity": [0.5], "train": TRAIN}},
        {"export": {"format": "onnx"}},
    ],
}
PLAN = {
    "plan.backends": "[onnx, openvino-int8]",
    "plan.shapes": "[2x16, 1x16]",
    "plan.prune": "null",
    "plan.distill.method": "soft-targets",
    "plan.trim_from": "1.0",
    "plan.undistilled": "false",
    **{f"plan.distill.train.{key}": value for key, value in TRAIN.items()},
}
LAST_STEP = {"steps": "[{distill: {student: {to: [2x16]}}}, {quantize: {format: openvino}}]"}
GOAL = ("--max-drop", "100")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A fine-tuned model of two layers, and its data next to it."""
    folder = tmp_path_factory.mktemp("tuned")
    headed(folder / "teacher", ("brisk", "calm"), num_hidden_layers=2)
    own(folder / "data", "class", n=64, judged=32)
    return folder / "teacher"


def measured_here(subjects, protocol, **_):
    """Measure in this process. Shorter names count as faster, so that a choice can be repeated."""
    latency = Latency()
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        measured_quickly(patch)
        request = {"subjects": list(map(asdict, subjects)), "threads": 1} | asdict(protocol)
        serve(request, Path(temporary), latency.read)
    for number, row in enumerate(latency.rows):
        ms = float(len(row.model))
        latency.rows[number] = row.model_copy(update={"p50_ms": ms, "p90_ms": ms})
    return latency


def ended_by_the_budget(calls):
    """A `measure_latency` whose second call takes the rest of the budget. `calls` gets names."""

    def timed(subjects, protocol, deadline=math.inf):
        calls.append([subject.name for subject in subjects])
        if len(calls) == 2:
            time.sleep(max(0.0, deadline - time.monotonic()))
            return Latency(prepared=1, interrupted=True)
        return measured_here(subjects, protocol)

    return timed


@pytest.fixture
def ran(monkeypatch):
    """The steps that were run: verb and directory, or `dry run`."""
    steps, run_step, estimate = [], Step.run, Step.estimate

    def recorded(self, options):
        name = options.output_dir.name
        # The rest of the name is a hash of the candidates' names.
        steps.append((self.verb, "selection" if name.startswith("selection-") else name))
        run_step(self, options)

    def estimated(self, options):
        steps.append((self.verb, "dry run"))
        return estimate(self, options)

    monkeypatch.setattr(Step, "run", recorded)
    monkeypatch.setattr(Step, "estimate", estimated)
    for module in (shapes, finish):
        monkeypatch.setattr(module, "measure_latency", measured_here)
    return steps


def words_of(sets):
    return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


def planned(tuned, **sets):
    data = ("--task", "own", "--data", tuned.parent / "data")
    return ["compress", tuned, *data, *FAST, *words_of(PLAN | sets), *GOAL]


def missing(*names):
    def check(name, precision):
        if name in names:
            raise MachineError(f"{name} needs a library")

    return check


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--task", "demo-topic"], "no goal given"),
        (["demo", "--max-drop", "1"], "demo is a plain encoder: it has no head and no pooling"),
        (["--task", "demo-topic", "--max-drop", "1"], "no model given kdcli compress MODEL --data"),
        (
            ["demo", "--task", "demo-topic", "--speedup", "0.5"],
            "'goal.speedup' must be greater than 1",
        ),
        (
            ["demo", "--task", "demo-topic", "--speedup", "2", "--strict"],
            "--strict is about --max-drop",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--budget", "soon"],
            "--budget takes a time",
        ),
        (
            ["demo", "-r", "trim-int8", "--task", "demo-topic", "--budget", "9m"],
            "a recipe with steps has one",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--pooling", "mean"],
            "task demo-topic is not scored by vectors",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.distill.methd=x"],
            "plan.distill: unknown key 'methd'",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.distill.recipe=5"],
            "plan.distill: recipe must be the name of a recipe or the path of a file, got 5",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "steps=[{distil: {}}]"],
            "distil: no such step; did you mean 'distill'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--set", "steps=[{}]"],
            "step 1 must name one of distill, prune, trim, quantize, export, got an empty step",
        ),
        (["--front", "run"], "--front and --output-dir contradict each other"),
        (["--front", "run", "--speedup", "9"], "--front and --speedup contradict each other"),
        (["--front", "run", "--budget", "9m"], "--front and --budget contradict each other"),
        (["--front", "run", "-r", "trim-int8"], "--front and --recipe contradict each other"),
        (["--front", "run", "--set", "seed=3"], "--front and --set contradict each other"),
        (
            ["--front", "run", "--price-per-hour", "3"],
            "--front and --price-per-hour contradict each other",
        ),
        (
            [
                "demo",
                "--task",
                "demo-topic",
                "--set",
                "steps=[{trim: {}}, {quantize: {format: 5}}]",
            ],
            "steps: step 2, quantize: unknown format '5'",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.backends=[onx]"],
            "unknown backend 'onx'; did you mean 'onnx'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.backends=[torch]"],
            "torch runs no exports",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said, tmp_path):
    assert said in refused(tmp_path, "compress", *arguments)


def test_rows_without_labels_are_refused(tmp_path, tuned):
    write(tmp_path / "data" / "train.jsonl", [{"text": "w1 w2"}, {"text": "w3"}])
    said = refused(
        tmp_path, "compress", tuned, "--task", "own", "--data", tmp_path / "data", *GOAL, *FAST
    )
    assert "label" in said


TIMES = UntrainedTimes(10.0, 1.0, 10.0, 1.0)
SHAPES = {
    "2x16": UntrainedTimes(5.0, 2.0, 5.0 / 1.5, 3.0, min_mb=0.1),
    "1x16": UntrainedTimes(1.0, 9.0, 1.0, 9.0, min_mb=3.0),
}
UNTRAINED = Untrained(TIMES, {"onnx": TIMES}, "onnx", SHAPES)


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (["--max-mb", "100"], 2, "meets every limit already"),
        (
            ["--speedup", "20"],
            5,
            "2x16: even untrained, it is only 3.0 times as fast; the goal is 20; 1x16: even",
        ),
        (
            ["--speedup", "4", "--max-mb", "1"],
            5,
            "--max-mb and --speedup contradict each other here",
        ),
        (
            ["--max-drop", "1", "--budget", "9s"],
            2,
            "--budget is too small for any candidate: timing the backends",
        ),
    ],
)
def test_what_timing_tells_is_said_before_anything_is_written(
    limits, code, said, tmp_path, monkeypatch, tuned, ran
):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: UNTRAINED)
    monkeypatch.setattr(Journal, "seconds", 10.0)
    task = ("--task", "own", "--data", tuned.parent / "data", *FAST)
    sets = words_of({"plan.backends": "[onnx]", "plan.prune": "null"})
    done = kdcli("compress", tuned, *task, *sets, *limits, "-o", tmp_path / "out")
    assert (done.exit_code, ran, list(tmp_path.iterdir())) == (code, [], []), done.output
    assert said in said_by(done)


def test_a_budget_that_timing_alone_breaks_is_refused_at_once(tmp_path):
    sets = ("--set", "plan.backends=[onnx]", "--set", "measure.min_seconds=3")
    given = ("demo", "--task", "demo-topic", "--max-drop", "1", *sets, "--budget", "5s")
    assert "timing the backends takes 6 s at least" in refused(tmp_path, "compress", *given)


def test_a_budget_that_fine_tuning_alone_breaks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: UNTRAINED)
    monkeypatch.setattr(Journal, "seconds", 10.0)
    monkeypatch.setattr(budget, "training_cost", lambda *_: TrainingCost(9, 99.0))
    given = ("demo", "--task", "demo-topic", "--max-drop", "1", "--budget", "60s")
    said = refused(tmp_path, "compress", *given)
    assert "fine-tuning comes first, and it takes about 99 s, 50 s are left" in said


def test_a_budget_that_ends_while_models_are_timed_keeps_the_finished_timings(
    tmp_path, tuned, ran, monkeypatch
):
    calls = []
    monkeypatch.setattr(shapes, "measure_latency", ended_by_the_budget(calls))
    given = (*planned(tuned, **{"plan.backends": "[onnx]"}), "-o", tmp_path / "out")
    # The command that is repeated is this process's, which may be pytest's.
    monkeypatch.setattr(sys, "argv", ["kdcli", *map(str, given)])
    done = kdcli(*given, "--budget", "2s")
    assert (done.exit_code, ran) == (2, [])
    assert "too small for any candidate: it ended while models were timed and compared" in said_by(
        done
    )
    again = r"use --budget \d+m or more; .* has the timings so far: .* --budget \d+m --resume"
    assert re.search(again, said_by(done))

    once = Journal.once

    def stop(self, key, kind, compute):
        if len(calls) == 3 and not key.startswith(TIMED):
            raise Stopped("the models are timed")
        return once(self, key, kind, compute)

    monkeypatch.setattr(Journal, "once", stop)
    done = kdcli(*given, "--budget", "9m", "--resume")
    assert done.exit_code == Stopped.exit_code, done.output
    assert calls == [["teacher", "onnx"], *2 * [["teacher", "2x16", "1x16"]]]


def test_all_timings_of_a_goal_share_one_budget(monkeypatch):
    deadlines = []
    # Twelve seconds for three calls. The journal counts them only once all are finished.
    clock = iter([10.0, 22.0, 22.0])

    def timed(subjects, protocol, deadline=math.inf):
        deadlines.append(deadline)
        return Latency(prepared=1, interrupted=len(deadlines) == 3)

    monkeypatch.setattr(shapes, "measure_latency", timed)
    monkeypatch.setattr(shapes, "times_of", lambda subjects, latency: {})
    monkeypatch.setattr(shapes.time, "monotonic", lambda: next(clock))
    journal = Journal(15.0, StopRequest(), [Record("timed backends", {}, 3.0, 1)])
    runner = SimpleNamespace(
        journal=journal, folder="out", continuing_command=str, replaces_run=False
    )
    timing = shapes._Timing(runner, None, total=10)
    pair = ["teacher", "2x16"]
    assert timing.times(pair, "2x16") == timing.times(pair, "1x16") == {}
    # Five of ten models took 3 + 12 seconds.
    with pytest.raises(UsageError, match="which takes about 30 s in all"):
        timing.times(pair, "3x16")
    assert deadlines == [22.0, 22.0, 22.0]


def test_no_backend_at_all_is_refused(tmp_path, monkeypatch, tuned):
    monkeypatch.setattr(search, "check_backend", missing("onnx", "openvino"))
    task = ("--task", "own", "--data", tuned.parent / "data", *GOAL)
    done = kdcli("compress", tuned, *task, "-o", tmp_path / "out")
    assert (done.exit_code, list(tmp_path.iterdir())) == (MachineError.exit_code, [])
    assert "none of the backends is installed here" in said_by(done)
    # Every step of a pipeline is needed.
    done = kdcli("compress", tuned, *task, *words_of(LAST_STEP), "-o", tmp_path / "out")
    assert (done.exit_code, list(tmp_path.iterdir())) == (MachineError.exit_code, [])
    assert "openvino needs a library" in said_by(done)


def test_a_pipeline_is_resumed_where_it_was_stopped(tmp_path, tuned, ran, monkeypatch):
    teacher, file = tuned, tmp_path / "mine.yaml"
    file.write_text(json.dumps(PIPELINE), "utf-8")
    task = (
        "compress",
        teacher,
        "-r",
        file,
        "--task",
        "own",
        "--data",
        teacher.parent / "data",
        *FAST,
    )
    done = kdcli(*task, *GOAL, "-o", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    steps = [
        ("distill", "1-distill"),
        ("prune", "2-prune"),
        ("export", "3-export"),
        ("evaluate", "selection"),
        ("evaluate", "verification-3-export"),
    ]
    assert ran == steps
    report = report_of(tmp_path / "whole")
    assert report.compression is not None
    assert [row.name for row in report.compression.candidates] == [
        "teacher",
        "1-distill",
        "2-prune",
        "3-export",
    ]
    assert (report.compression.chosen, report.compression.met, report.compression.rows) == (
        "3-export",
        True,
        16,
    )
    assert list(report.cards) == ["teacher", "3-export"]
    assert (tmp_path / "whole" / "best" / "onnx" / "model.onnx").is_file()
    assert (tmp_path / "whole" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert report.compression.verification is not None
    assert report.compression.verification.rows == 16
    assert {row.split for row in report.evaluations} == {"verification"}
    assert any(note.startswith("only 16 verification rows") for note in report.notes)
    # Stopped after its first step, the rest is made later and nothing twice.
    ran.clear()
    whole = Journal.once

    def once(self, key, kind, compute):
        if key == "run 2-prune":
            raise Stopped("stopped")
        return whole(self, key, kind, compute)

    # Of no goal that can be met: the last step is there all the same.
    task = (*task, *GOAL, "--max-mb", "0.001", "-o", tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "once", once)
        assert kdcli(*task).exit_code == 75
    done = kdcli(*task, "--resume")
    assert (done.exit_code, ran) == (5, steps)
    assert "The goal cannot be met with what was tried. Nearest: 3-export" in said_by(done)
    assert same_weights(
        tmp_path / "whole" / "steps" / "2-prune", tmp_path / "parts" / "steps" / "2-prune"
    )
    again = kdcli(*task, "--resume")
    assert (again.exit_code, ran, "is done already" in said_by(again)) == (5, steps, True)


def signals_at_every_step(monkeypatch):
    """Send SIGTERM and SIGINT in turn: at the start of every step, and within every training."""
    sent, armed = [], []
    run_step, log = Step.run, RunDir.log

    def send(place):
        sent.append(place)
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGINT)[len(sent) % 2])

    def interrupted(self, options):
        place = options.output_dir.name, options.stop_after
        if place not in sent and not self.trains:
            send(place)
        elif place not in sent:
            armed.append(place)
        run_step(self, options)

    def logged(self, record):
        log(self, record)
        if armed and record["step"] and self.path.name == armed[0][0]:
            send(armed.pop())

    monkeypatch.setattr(Step, "run", interrupted)
    monkeypatch.setattr(RunDir, "log", logged)
    return sent


def test_a_plan_interrupted_at_every_step_ends_with_the_same_choice(
    tmp_path, tuned, ran, monkeypatch
):
    monkeypatch.setattr(search, "check_backend", missing("openvino"))
    done = kdcli(*planned(tuned), "-o", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    said = said_by(done)
    assert "openvino-int8 is skipped: openvino needs a library" in said
    assert "stopping" in said
    assert "stopped" not in said
    assert "--resume" not in said
    # Both shapes are trained to the first rung, and the better one to its end.
    better = next(name for verb, name in ran[4:] if verb == "distill")
    whole = report_of(tmp_path / "whole").compression
    assert whole is not None
    assert ran == [
        ("export", "onnx"),
        ("distill", "dry run"),
        ("distill", "2x16"),
        ("distill", "1x16"),
        ("distill", better),
        ("export", f"{better}-onnx"),
        ("evaluate", "selection"),
        ("evaluate", f"verification-{whole.chosen}"),
    ]
    assert "openvino needs a library" in {row.outcome for row in whole.candidates}
    scored = {row.name for row in whole.candidates if row.score is not None}
    assert scored == {"teacher", "onnx", f"{better}-onnx"}
    with monkeypatch.context() as patch:
        sent = signals_at_every_step(patch)
        parts = [*map(str, planned(tuned)), "-o", str(tmp_path / "parts"), "--resume"]
        # The command that is repeated is this process's, which may be pytest's.
        patch.setattr(sys, "argv", ["kdcli", *parts])
        stops = 0
        while (done := kdcli(*parts)).exit_code == Stopped.exit_code:
            stops += 1
            name = sent[-1][0]
            hint = f"continue with: {shlex.join(['kdcli', *parts])}"
            assert done.stderr.endswith(f"stopped in {step_title(name)}\n{hint}\n")
    assert (done.exit_code, stops) == (0, len(sent)), done.output
    names = {"selection" if n.startswith("selection-") else n for n, _ in sent}
    assert names == {name for _, name in ran if name != "dry run"}
    resumed = report_of(tmp_path / "parts").compression
    assert resumed is not None
    same = ("name", "score", "ms", "mb", "outcome")
    assert [[getattr(row, key) for key in same] for row in resumed.candidates] == [
        [getattr(row, key) for key in same] for row in whole.candidates
    ]
    assert resumed.chosen == whole.chosen
    folder = Path("steps", better)
    assert same_weights(tmp_path / "whole" / folder, tmp_path / "parts" / folder)


def test_a_signal_before_anything_is_written_leaves_nothing(tmp_path, tuned, ran, monkeypatch):
    def stopped(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not interrupt")

    monkeypatch.setattr(run, "measure_untrained", stopped)
    done = kdcli(*planned(tuned), "-o", tmp_path / "out")
    assert (done.exit_code, list(tmp_path.iterdir())) == (130, [])
    assert said_by(done).endswith("stopped before anything was written")


def test_an_error_of_a_step_skips_its_candidate_and_a_bug_ends_the_run(
    tmp_path, tuned, ran, monkeypatch
):
    untrained = Untrained(TIMES, {"onnx": TIMES}, "onnx", {"2x16": TIMES})
    monkeypatch.setattr(run, "measure_untrained", lambda *_: untrained)
    given = planned(tuned, **{"plan.backends": "[onnx]", "plan.shapes": "[2x16]"})
    # No learning rate of this size keeps the weights finite.
    diverging = ["--set", "plan.distill.train.lr=1e38"]
    done = kdcli(*given, *diverging, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "2x16 is skipped: training diverged at step" in said_by(done)
    compression = report_of(tmp_path / "out").compression
    assert compression is not None
    assert compression.chosen == "onnx"
    assert any("training diverged" in row.outcome for row in compression.candidates)

    def broken(self, options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Step, "run", broken)
    done = kdcli(*given, "-o", tmp_path / "broken")
    assert (done.exit_code, type(done.exception)) == (1, ZeroDivisionError)


@pytest.mark.parametrize(("lr", "learns"), [("1e-9", False), ("3e-3", True)])
def test_a_teacher_that_has_learned_nothing_is_named_at_once(
    lr, learns, tmp_path, monkeypatch, ran
):
    notes = []

    def follow(search, untrained):
        notes.extend(search.notes)
        raise GateError("far enough")

    monkeypatch.setattr(run, "measure_untrained", lambda *_: UNTRAINED)
    monkeypatch.setattr(run, "follow_plan", follow)
    encoder(tmp_path / "model", num_hidden_layers=2)
    own(tmp_path / "data", "class", n=256, judged=64)
    training = TRAIN | {"lr": lr, "max_steps": 60}
    sets = words_of({f"plan.finetune.train.{key}": value for key, value in training.items()})
    given = ("compress", tmp_path / "model", "--task", "own", "--data", tmp_path / "data")
    done = kdcli(*given, *FAST, *sets, *GOAL, "-o", tmp_path / "out")
    said = said_by(done)
    assert said.endswith("error: far enough"), done.output
    assert ran == [("finetune", "teacher")]
    (scored,) = (note for note in notes if note.startswith("the fine-tuned teacher has accuracy "))
    assert scored in said
    assert re.search(r"answering (brisk|calm) to every text has 0\.\d+", scored)
    warnings = [note for note in notes if "--set plan.finetune.train.lr=" in note]
    assert len(warnings) == (not learns)
    assert all(warning in said for warning in warnings)
    # The score alone is a reason for the warning.
    assert all("its score is not clearly better than always" in note for note in warnings)


@pytest.mark.parametrize(
    ("is_beaten", "last", "signs"),
    [
        (True, 0.5, []),
        (False, 0.5, ["may have learned little or nothing: its score is not clearly better"]),
        # The loss alone says less: contradicting labels limit how far it can fall.
        (
            True,
            1.087,
            ["may not have learned all that it can: its training loss only went from 1.105 to "],
        ),
        (False, 1.087, ["little or nothing: its score is not", " and its training loss only went"]),
        (None, 1.087, ["may not have learned all that it can: "]),
        (None, 0.5, []),
    ],
)
def test_the_signs_of_a_teacher_that_learned_little(is_beaten, last, signs):
    trivial = {"answer": "tech", "metrics": {"accuracy": 0.26}, "is_beaten": is_beaten}
    evaluation = Evaluation(
        model="finetuned",
        task="own",
        set="",
        split="validation",
        n=50,
        metrics={"accuracy": 0.54, "macro_f1": 0.4},
        trivial=None if is_beaten is None else trivial,
    )
    curve = [SimpleNamespace(loss=loss) for loss in [None, *4 * [1.105], *4 * [last]]]
    score, *warning = teacher_notes(SimpleNamespace(evaluations=[evaluation], curve=curve))
    same = "" if is_beaten is None else "; answering tech to every text has 0.2600"
    assert score == f"the fine-tuned teacher has accuracy 0.5400 on 50 selection rows{same}"
    assert len(warning) == bool(signs)
    assert all(sign in warning[0] for sign in signs)


@pytest.mark.parametrize(
    ("losses", "warns"),
    [
        # A single batch may be easy or difficult.
        ([0.7] * 99 + [0.5], True),
        ([0.5] + [0.7] * 4 + [0.55] * 94 + [0.7], False),
        ([0.9, 0.5], False),
        ([0.9, 0.3, 0.6, 0.6, 0.6, 0.6], True),
        ([0.7], False),
        ([], False),
    ],
)
def test_the_loss_of_a_training_is_a_mean_over_batches(losses, warns):
    curve = [SimpleNamespace(loss=loss) for loss in losses]
    assert bool(teacher_notes(SimpleNamespace(evaluations=[], curve=curve))) == warns


def embedder(folder):
    """A model judged by its vectors, and the options of its task."""
    base = load_encoder(str(encoder(folder / "base", num_hidden_layers=2)))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean"), folder / "model")
    write(
        folder / "data" / "validation.jsonl",
        [{"a": f"w{n}", "b": f"w{n * 7 % 50}", "label": n % 6 + 0.5} for n in range(40)],
    )
    (folder / "texts.txt").write_text("\n".join(f"w{n} w{n % 7} w{n % 11}" for n in range(50)))
    sets = {
        "text": folder / "texts.txt",
        "data.columns": "{text: a, pair: b}",
        "plan.distill.data.held_out_blocks": 8,
    }
    return "own", sets


def reranker(folder):
    headed(folder / "model", num_labels=1, num_hidden_layers=2, type_vocab_size=2)
    rows = [
        {"query": f"w{n}", "positive": f"w{n} w{n % 7}", "negative": [f"w{n % 11}", f"w{n % 5} w9"]}
        for n in range(40)
    ]
    write(folder / "data" / "train.jsonl", rows[:24])
    write(folder / "data" / "validation.jsonl", rows[24:])
    return "rerank", {"data.max_length": 24}


def plain(folder):
    task, sets = embedder(folder)
    (folder / "model" / "modules.json").unlink()
    return task, sets | {"pooling": "mean"}


@pytest.mark.parametrize(("make", "metric"), [(plain, "spearman"), (reranker, "ndcg@10")])
def test_other_models_are_judged_by_their_own_measure(make, metric, tmp_path, monkeypatch, ran):
    untrained = Untrained(TIMES, {"onnx": TIMES}, "onnx", {"1x32": TIMES})
    monkeypatch.setattr(run, "measure_untrained", lambda *_: untrained)
    task, sets = make(tmp_path)
    sets |= {f"plan.distill.train.{key}": value for key, value in TRAIN.items()}
    sets |= {
        "plan.shapes": "[1x32]",
        "plan.backends": "[onnx]",
        "plan.trim_from": 1.0,
        "plan.prune": "null",
    }
    given = ("--task", task, "--data", tmp_path / "data", *words_of(sets), *FAST[:4])
    done = kdcli("compress", tmp_path / "model", *given, *GOAL, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    compression = report_of(tmp_path / "out").compression
    assert compression is not None
    assert {row.name for row in compression.candidates} >= {"teacher", "onnx", "1x32-onnx"}
    assert compression.metric == metric
    assert (tmp_path / "out" / "best" / "onnx" / "model.onnx").is_file()


def test_a_budget_that_is_too_small_keeps_the_run_that_it_would_overwrite(
    tmp_path, tuned, ran, monkeypatch
):
    sets = {"plan.backends": "[onnx]", "plan.shapes": "[1x16]"}
    given = (*planned(tuned, **sets), "-o", tmp_path / "out")
    assert kdcli(*given).exit_code == 0
    before = {path.relative_to(tmp_path) for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(shapes, "measure_latency", ended_by_the_budget([]))
    more_shapes = (*planned(tuned, **{"plan.backends": "[onnx]"}), "-o", tmp_path / "out")
    done = kdcli(*more_shapes, "--overwrite", "--budget", "2s")
    assert done.exit_code == UsageError.exit_code
    assert "has the timings" not in said_by(done)
    assert {path.relative_to(tmp_path) for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("shape", ["3x32", "3x32:64"])
def test_the_time_of_the_chosen_model_is_not_counted_as_dropped(shape):
    names = {shape: 7.0, f"{shape}-onnx": 3.0, "4x32": 20.0, "selection-ab": 1.0}
    records = [Record(f"run {name}", "", spent, 1) for name, spent in names.items()]
    candidate = search.Candidate(f"{shape}-onnx", parent=shape)
    found = SimpleNamespace(
        candidates={candidate.name: candidate},
        runner=SimpleNamespace(
            recipe=SimpleNamespace(steps=None), journal=SimpleNamespace(records=records)
        ),
    )
    folder = Path("steps") / as_directory(candidate.name)
    chosen = SimpleNamespace(name=candidate.name, folder=folder)
    assert run.seconds_dropped(found, chosen) == 20.0
