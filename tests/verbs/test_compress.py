"""`kdcli compress`: goals, pipelines, what is resumed. Its steps are other verbs; they and their latency workers run in
this process here."""

import itertools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kdcli.verbs.compress.verbs import Verbs
from kdcli.verbs.compress.work import Work
from own_files import encoder, headed, kdcli, own, refused, report_of, said_by, same_weights, write

from kdcli.deploy.latency import Latency
from kdcli.deploy.worker import serve
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, MachineError, Stopped
from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.recipe.sections import RunOptions
from kdcli.report import finish
from kdcli.types import ModelShape
from kdcli.verbs.compress import plan, run, work
from kdcli.verbs.compress.judge import Judged, Measured, choose, conflict, misses, sentence
from kdcli.verbs.compress.plan import Search, halve, shapes_of, str_of
from kdcli.verbs.compress.recipes import sets_of
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings, seconds_of

FAST = (
    "--set",
    "measure.min_runs=2",
    "--set",
    "measure.min_seconds=0.0",
    "--set",
    "data.max_length=24",
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


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A fine-tuned model of two layers, with its data beside it."""
    folder = tmp_path_factory.mktemp("tuned")
    headed(folder / "teacher", ("brisk", "calm"), num_hidden_layers=2)
    own(folder / "data", "class", n=64, judged=32)
    return folder / "teacher"


@pytest.fixture
def here(monkeypatch):
    """Runs the steps in this process; returns the verbs that were run."""
    ran = []

    def here(self, arguments, *, until=None):
        result = kdcli(*arguments)
        ran.append(
            (
                arguments[0],
                Path(arguments[arguments.index("-o") + 1]).name if "-o" in arguments else "dry run",
            )
        )
        error = next(
            (line for line in result.stderr.splitlines() if line.startswith("error: ")), ""
        )
        return result.exit_code, result.stdout, error.removeprefix("error: ")

    def latency(subjects, protocol):
        found = Latency()
        with tempfile.TemporaryDirectory() as aside:
            request = {"subjects": list(map(asdict, subjects)), "threads": 1} | asdict(protocol)
            serve(request, Path(aside), found.add)
        return found

    monkeypatch.setattr(Verbs, "run", here)
    for module in (plan, finish):
        monkeypatch.setattr(module, "measure_latency", latency)
    return ran


def measured(name, score, ms, mb, low=None, high=None):
    return Measured(
        name, Path(name), score, low or score, high or score, ms, 10 / ms, mb, (4.0, 6.0)
    )


def judged_of(*candidates):
    return Judged(None, "accuracy", 500, measured("teacher", 0.9, 10.0, 8.0), list(candidates))


def search_of(tmp_path, **goal):
    recipe = CompressRecipe(model="m", task="own", goal=GoalSettings(**goal))
    return Search(Work(recipe, RunOptions(), tmp_path, StopRequest(), "task"), "m")


def test_the_fastest_that_keeps_the_quality_is_chosen_and_the_smallest_of_those_alike():
    one, small, bad = (
        measured("a", 0.895, 2.0, 4.0),
        measured("b", 0.893, 2.05, 2.0),
        measured("c", 0.8, 1.0, 1.0),
    )
    assert choose(GoalSettings(max_drop=1.0), judged_of(one, small, bad)) == (small, {})
    assert choose(GoalSettings(speedup=4.0), judged_of(one, small, bad)) == (one, {})
    chosen, missed = choose(GoalSettings(max_drop=1.0, speedup=8.0), judged_of(one, bad))
    assert (chosen, missed) == (one, {"speedup": "5.00 times as fast, not 8"})
    said = sentence(judged_of(one), one, missed, GoalSettings(max_drop=1.0, speedup=8.0))
    assert said.startswith(
        "The goal cannot be met with what was tried. Nearest: a is 5.0 times as fast as the teacher (4.0-6.0; "
    )


def test_strict_asks_the_lower_end_of_the_interval():
    one = measured("a", 0.895, 2.0, 4.0, low=0.885, high=0.905)
    teacher = judged_of().teacher
    assert misses(GoalSettings(max_drop=1.0), teacher, one) == {}
    assert list(misses(GoalSettings(max_drop=1.0, strict=True), teacher, one)) == ["max_drop"]
    strict = GoalSettings(max_drop=1.0, strict=True)
    assert choose(strict, judged_of(one, measured("safe", 0.9, 9.0, 8.0)))[0].name == "safe"
    assert "1.50 points lost at the interval's lower end" in sentence(
        judged_of(one), *choose(strict, judged_of(one)), strict
    )
    # What is allowed exactly is allowed, whatever floating point makes of it.
    assert misses(GoalSettings(max_drop=1.0), teacher, measured("b", 0.89, 2.0, 4.0)) == {}
    assert list(misses(GoalSettings(max_latency_ms=1.0, max_mb=3.0), teacher, one)) == [
        "max_latency_ms",
        "max_mb",
    ]


def test_limits_that_contradict_each_other_are_named():
    good, fast = measured("a", 0.9, 9.0, 8.0), measured("b", 0.5, 1.0, 8.0)
    goal = GoalSettings(max_drop=1.0, speedup=5.0)
    judged = judged_of(good, fast)
    said = "--max-drop and --speedup contradict each other here: each can be met, but not both."
    assert sentence(judged, *choose(goal, judged), goal).endswith(said)
    assert (
        conflict(
            [misses(goal, judged.teacher, one) for one in (good, measured("c", 0.9, 1.0, 8.0))]
        )
        == ""
    )
    assert conflict([misses(goal, judged.teacher, good)]) == ""


def test_the_better_half_stays_and_within_the_goal_the_faster_is_better(tmp_path):
    scores = {"4x8": 0.9, "3x8": 0.895, "2x8": 0.7, "1x8": 0.5}
    times = {name: {"ms": float(name[0])} for name in scores}
    assert halve(search_of(tmp_path, max_drop=1.0), scores, times, last=False) == (
        ["3x8", "4x8"],
        ["2x8", "1x8"],
    )
    assert halve(search_of(tmp_path, speedup=2.0), scores, times, last=True)[0] == ["4x8"]


def test_shapes_come_from_large_to_small_and_smaller_than_the_model():
    names = [str_of(shape) for shape in shapes_of([], ModelShape(6, 384, 1536, 12))]
    assert names == ["4x384", "3x384", "2x384", "3x192", "2x192"]
    assert [str_of(shape) for shape in shapes_of(["1x16", "2x16:8"], ModelShape(4, 16, 64, 2))] == [
        "1x16",
        "2x16:8",
    ]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0)])
def test_a_budget_is_a_time(text, seconds):
    assert seconds_of(text) == seconds


def test_keys_of_a_step_are_values_of_set():
    assert sets_of({"student": {"to": ["2x16"]}, "train": {"lr": 1e-4}}) == [
        'student.to=["2x16"]',
        "train.lr=0.0001",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--task", "demo-topic"], "no goal given"),
        (["demo", "--max-drop", "1"], "no task given"),
        (["--task", "demo-topic", "--max-drop", "1"], "no model given"),
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
            ["demo", "-r", "trim-int8", "--task", "demo-topic"],
            "steps: step 1, trim: no text whose tokens are kept",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--pooling", "mean"],
            "task demo-topic is not judged by vectors",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.distill.methd=x"],
            "plan.distill: unknown key 'methd'",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "steps=[{distil: {}}]"],
            "distil: no such step; did you mean 'distill'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.backends=[onx]"],
            "unknown backend 'onx'; did you mean 'onnx'?",
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


GOAL = ("--max-drop", "100")


def times(ms, speedup, best):
    """As `measure_untrained` gives them; `best` times better at the better quartile."""
    return {"ms": ms, "speedup": speedup, "best_ms": ms / best, "best_speedup": speedup * best}


TIMES = times(10.0, 1.0, 1.0)
SHAPES = {
    "2x16": times(5.0, 2.0, 1.5) | {"layers_mb": 0.1},
    "1x16": times(1.0, 9.0, 1.0) | {"layers_mb": 3.0},
}
UNTRAINED = {"teacher": TIMES, "backends": {"onnx": TIMES}, "fastest": "onnx", "shapes": SHAPES}


def test_unsteady_times_leave_a_shape_out_only_where_another_is_fast_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "estimate", lambda *_: ({}, "no time"))
    why = "untrained it is 6.0 times as fast, not 8"
    for shapes, expected in (
        (
            {"3x32": times(2.0, 6.0, 1.5), "1x32": times(1.0, 9.0, 1.0)},
            {"3x32": why, "1x32": "no time"},
        ),
        (
            {"3x32": times(2.0, 6.0, 1.5), "4x32": times(3.0, 4.0, 1.5)},
            {"3x32": "no time", "4x32": why},
        ),
    ):
        search = search_of(tmp_path, speedup=8.0)
        plan.try_shapes(search, shapes)
        assert {name: one.left_out for name, one in search.candidates.items()} == expected


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (["--max-mb", "100"], 2, "meets every limit already"),
        (
            ["--speedup", "20"],
            5,
            "2x16: untrained it is 3.0 times as fast, not 20; 1x16: untrained it is 9.0 times",
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
    limits, code, said, tmp_path, monkeypatch, tuned, here
):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: UNTRAINED)
    monkeypatch.setattr(Work, "seconds", 10.0)
    task = (
        "--task",
        "own",
        "--data",
        tuned.parent / "data",
        "--set",
        "plan.backends=[onnx]",
        *FAST,
    )
    done = kdcli(
        "compress", tuned, *task, "--set", "plan.prune=null", *limits, "-o", tmp_path / "out"
    )
    assert (done.exit_code, here, list(tmp_path.iterdir())) == (code, [], []), done.output
    assert said in said_by(done)


def test_a_budget_that_timing_alone_breaks_is_refused_at_once(tmp_path):
    given = "demo --task demo-topic --max-drop 1 --set plan.backends=[onnx] --set measure.min_seconds=3 --budget 5s"
    assert "timing the backends takes 6 s at least" in refused(tmp_path, "compress", *given.split())


def test_a_budget_that_fine_tuning_alone_breaks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: UNTRAINED)
    monkeypatch.setattr(Work, "seconds", 10.0)
    monkeypatch.setattr(plan, "dry_run", lambda *_: {"steps": 9, "seconds": 99.0})
    said = refused(
        tmp_path, "compress", "demo", "--task", "demo-topic", "--max-drop", "1", "--budget", "60s"
    )
    assert "fine-tuning comes first, and it takes about 99 s, 50 s are left" in said


def test_no_backend_at_all_is_refused(tmp_path, monkeypatch, tuned):
    monkeypatch.setattr(plan, "check_backend", missing("onnx", "openvino"))
    task = ("--task", "own", "--data", tuned.parent / "data", *GOAL)
    done = kdcli("compress", tuned, *task, "-o", tmp_path / "out")
    assert (done.exit_code, list(tmp_path.iterdir())) == (MachineError.exit_code, [])
    assert "none of the backends is installed here" in said_by(done)


def missing(*names):
    def check(name, precision):
        if name in names:
            raise MachineError(f"{name} needs a library")

    return check


def test_the_budget_ends_a_training_that_has_begun(tmp_path, monkeypatch):
    clock, ran = itertools.count(), []

    def training(self, arguments, *, until=None):
        ran.append(arguments[0])
        while arguments[0] != "export":
            if until():
                return Stopped.exit_code, "", ""
        return 0, "", ""

    monkeypatch.setattr(Verbs, "run", training)
    monkeypatch.setattr(work.time, "monotonic", lambda: float(next(clock)))
    recipe = CompressRecipe(model="m", task="own", budget=20.0)
    one = Work(recipe, RunOptions(), tmp_path, StopRequest(), "task")
    assert (one.step("a", ["distill"]), ran) == (work.OVER, ["distill"])
    assert 20 <= one.seconds < 25
    # What is left then is judged: no training begins, an export does.
    assert (one.step("b", ["prune"]), one.step("c", ["export"]), ran) == (
        work.OVER,
        "",
        ["distill", "export"],
    )
    with pytest.raises(GateError, match="teacher: --budget ended before its training did"):
        one.must("teacher", ["finetune"])
    assert "run teacher" not in {record["key"] for record in one.records}
    one = Work(recipe, RunOptions(), tmp_path, StopRequest(), "task")
    reached = iter([False, False, True, True, True])
    assert one.step("a", ["distill"], until=lambda: next(reached)) == ""


def test_a_signal_that_came_before_the_verb_ends_it(tmp_path, monkeypatch):
    stop = StopRequest()

    def starting(self, arguments, *, until=None):
        assert not until()
        stop.signalled = True
        return (Stopped.exit_code if until() else 0), "", ""

    monkeypatch.setattr(Verbs, "run", starting)
    recipe = CompressRecipe(model="m", task="own")
    with pytest.raises(Stopped, match="stopped in teacher"):
        Work(recipe, RunOptions(), tmp_path, stop, "task").must("teacher", ["finetune"])


def test_a_pipeline_is_resumed_where_it_was_stopped(tmp_path, tuned, here, monkeypatch):
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
        ("evaluate", "judged"),
    ]
    assert here == steps
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
        32,
    )
    assert list(report.cards) == ["teacher", "3-export"]
    assert (tmp_path / "whole" / "best" / "onnx" / "model.onnx").is_file()
    assert (tmp_path / "whole" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert any(note.startswith("only 32 held-out rows") for note in report.notes)
    # Stopped after its first step, the rest is made later and nothing twice.
    here.clear()
    whole = Work.once

    def once(self, key, compute):
        if key == "run 2-prune":
            raise Stopped("stopped")
        return whole(self, key, compute)

    # Of no goal that can be met: the last step is there all the same.
    task = (*task, *GOAL, "--max-mb", "0.001", "-o", tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(Work, "once", once)
        assert kdcli(*task).exit_code == 75
    done = kdcli(*task, "--resume")
    assert (done.exit_code, here) == (5, steps)
    assert "The goal cannot be met with what was tried. Nearest: 3-export" in said_by(done)
    assert same_weights(
        tmp_path / "whole" / "steps" / "2-prune", tmp_path / "parts" / "steps" / "2-prune"
    )
    again = kdcli(*task, "--resume")
    assert (again.exit_code, here, "is done already" in said_by(again)) == (5, steps, True)


def test_a_goal_is_planned_for(tmp_path, tuned, here, monkeypatch):
    monkeypatch.setattr(plan, "check_backend", missing("openvino"))
    sets = {
        "plan.backends": "[onnx, openvino-int8]",
        "plan.shapes": "[2x16, 1x16]",
        "plan.prune": "null",
    }
    sets |= {f"plan.distill.train.{key}": value for key, value in TRAIN.items()}
    sets |= {
        "plan.distill.method": "soft-targets",
        "plan.trim_from": "1.0",
        "plan.undistilled": "false",
    }
    task = ("--task", "own", "--data", tuned.parent / "data", *FAST)
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    done = kdcli("compress", tuned, *task, *options, *GOAL, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "openvino-int8 is left out: openvino needs a library" in said_by(done)
    found = report_of(tmp_path / "out").compression
    assert found is not None
    assert "openvino needs a library" in {row.outcome for row in found.candidates}
    # Both shapes reach the last rung at different times; one of them is trained to the end.
    kept = {row.name for row in found.candidates if row.score is not None} - {"teacher", "onnx"}
    assert len(kept) == 1
    assert here[-1][0] == "evaluate"
    assert ("distill", "dry run") in here


def test_int8_gets_what_training_left_of_the_goal(tmp_path, monkeypatch):
    one, ran, failing = search_of(tmp_path, max_drop=1.0), [], {"--max-drop"}
    scores = [("teacher", 0.9), ("student", 0.894), ("undistilled", 0.5)]
    rows = [
        SimpleNamespace(model=name, metrics={"accuracy": score, "f1": 0.0})
        for name, score in scores
    ]
    models = [SimpleNamespace(name=name, role=name) for name, _ in scores]
    report = SimpleNamespace(
        evaluations=rows, with_role=lambda role: [m for m in models if m.role == role]
    )
    monkeypatch.setattr(Work, "judged", lambda self, name: SimpleNamespace(report=report))

    def export(self, arguments, *, until=None):
        ran.append(list(itertools.takewhile(lambda word: word != "--overwrite", arguments))[4:])
        return (5, "", "too much is lost") if failing & set(arguments) else (0, "", "")

    monkeypatch.setattr(Verbs, "run", export)
    gated = ["--int8", "--task", "own", "--max-drop"]
    # Too much lost with a bound: the plain file stays a candidate.
    assert (one.write("a", "teacher", "onnx-int8", None), ran) == ("", [[*gated, "1"], ["--int8"]])
    failing.clear(), ran.clear()
    assert (one.write("b", "2x16", "onnx-int8", "2x16"), ran) == ("", [[*gated, "0.4"]])
    ran.clear()
    assert (one.write("c", "2x16", "onnx", "2x16"), ran) == ("", [[]])
    rows[1].metrics["accuracy"] = 0.7
    ran.clear()
    assert (one.write("d", "2x16", "onnx-int8", "2x16"), ran) == ("", [["--int8"]])
    (tmp_path / "export.json").write_text(
        '{"products": [{"name": "q", "float": true}, {"name": "k", "float": false}]}'
    )
    assert run.in_float(replace(measured("a", 0.9, 1.0, 1.0), folder=tmp_path)).endswith(
        "1 of 2 products stay in float32: q"
    )


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


@pytest.mark.parametrize(
    ("make", "metric"), [(embedder, "spearman"), (plain, "spearman"), (reranker, "ndcg@10")]
)
def test_other_models_are_judged_by_their_own_measure(make, metric, tmp_path, monkeypatch, here):
    monkeypatch.setattr(
        run, "measure_untrained", lambda *_: UNTRAINED | {"shapes": {"1x32": TIMES}}
    )
    task, sets = make(tmp_path)
    sets |= {f"plan.distill.train.{key}": value for key, value in TRAIN.items()}
    sets |= {
        "plan.shapes": "[1x32]",
        "plan.backends": "[onnx]",
        "plan.trim_from": 1.0,
        "plan.prune": "null",
    }
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    given = ("--task", task, "--data", tmp_path / "data", *options, *FAST[:4])
    done = kdcli("compress", tmp_path / "model", *given, *GOAL, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = report_of(tmp_path / "out").compression
    assert found is not None
    assert {row.name for row in found.candidates} >= {"teacher", "onnx", "1x32-onnx"}
    assert found.metric == metric
    assert (tmp_path / "out" / "best" / "onnx" / "model.onnx").is_file()


def test_the_journal_gives_what_was_found_before(tmp_path):
    one = search_of(tmp_path / "out").work
    assert one.once("a", lambda: {"ms": 1.5}) == {"ms": 1.5}
    one.claim(RunDir.claim(tmp_path / "out", "verb: compress\n"))
    assert one.once("b", lambda: 2) == 2
    with (tmp_path / "out" / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"key": "c", "val')
    other = search_of(tmp_path / "out").work
    other.records = RunDir(tmp_path / "out").read_log()
    assert other.once("a", lambda: None) == {"ms": 1.5}
    one.run.release()
    other.claim(RunDir.claim(tmp_path / "out", "verb: compress\n", resume=True))
    assert other.once("c", lambda: 3) == 3
    assert [record["key"] for record in RunDir(tmp_path / "out").read_log()] == ["a", "b", "c"]
    other.stop.signalled = True
    with pytest.raises(Stopped):
        other.once("d", lambda: 4)
