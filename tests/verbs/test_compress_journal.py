"""What a later command to a run of `kdcli compress` may reuse, and what it must do again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_files import encoder, headed, kdcli, own, report_of, said_by, succeeds
from test_compress import TIMES, measured_here, planned
from test_compress_choice import losing, measured, runner_of, scores_of, search_of
from test_compress_unlabelled import LABELS, arguments, classifier, stop

from kdcli.data import sources
from kdcli.data.labelled.partition import Partition
from kdcli.data.rows import BadRow
from kdcli.deploy.environment import describe_environment
from kdcli.deploy.measurements import Failure
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import DivergedError, Interrupted, MachineError, UsageError
from kdcli.models.training_rows import NO_ROWS
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RunOptions
from kdcli.report import finish
from kdcli.verbs.compress import budget, halving, inputs, judge, run, shapes
from kdcli.verbs.compress import runner as runner_module
from kdcli.verbs.compress import search as search_module
from kdcli.verbs.compress.budget import TrainingCost, check_budget
from kdcli.verbs.compress.halving import RungScore
from kdcli.verbs.compress.journal import Journal, Record
from kdcli.verbs.compress.judge import Verification
from kdcli.verbs.compress.moved import follow_move
from kdcli.verbs.compress.question import Question, choose_folder, scored_before
from kdcli.verbs.compress.search import Candidate, Search
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.shapes import Untrained
from kdcli.verbs.compress.steps import Step


@pytest.fixture(autouse=True)
def _measured_here(monkeypatch):
    for module in (shapes, finish):
        monkeypatch.setattr(module, "measure_latency", measured_here)


def timed(*names):
    return Untrained(TIMES, {"onnx": TIMES}, "onnx", dict.fromkeys(names, TIMES))


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory):
    """A compression that stopped one of two shapes after a quarter of its steps.

    Returns the command, the directory and the shape.
    """
    folder = tmp_path_factory.mktemp("half")
    headed(folder / "teacher", ("brisk", "calm"), num_hidden_layers=2)
    own(folder / "data", "class", n=64, judged=32)
    given = planned(folder / "teacher", **{"plan.backends": "[onnx]"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_untrained", lambda *_: timed("2x16", "1x16"))
        patch.setattr(finish, "measure_latency", measured_here)
        succeeds(*given, "-o", folder / "out")
    (stopped,) = (
        row.name
        for row in report_of(folder / "out").compression.candidates
        if row.outcome.startswith("trained for 1 of 4 steps only")
    )
    return given, folder / "out", stopped


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_a_stopped_shape_is_trained_on_for_another_goal(
    alone, moved, half_trained, tmp_path, monkeypatch
):
    given, made, stopped = half_trained
    # Without a move, it is the directory in which the shape was stopped.
    saved = shutil.copytree(made, tmp_path / "saved")
    out = shutil.copytree(made, tmp_path / "moved") if moved else made
    if moved:
        # This process still holds the lock of the stopped training, so a copy is moved.
        shutil.rmtree(made)
    names = [stopped] if alone else ["2x16", "1x16"]
    monkeypatch.setattr(run, "measure_untrained", lambda *_: timed(*names))
    # No candidate is as small as this.
    done = kdcli(*given, "--max-mb", "0.001", "-o", out)
    try:
        assert done.exit_code == 5, done.output
        rows = {row.name: row for row in report_of(out).compression.candidates}
        assert rows.keys() >= {f"{stopped}-onnx"}, said_by(done)
        assert rows[f"{stopped}-onnx"].score is not None
        assert "another recipe" not in said_by(done)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(saved, made)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_shape_that_began_without_rivals_is_scored_at_its_end(recorded, tmp_path, monkeypatch):
    search = search_of(tmp_path, max_drop=1.0)
    runner = search.runner
    recipe = f"train:\n  eval_every: {halving.NEVER}\n"
    made = RunDir.claim(runner.path("2x16"), recipe)
    (made.path / "log.jsonl").write_text('{"step": 8, "held_out": {"loss": 0.25}}\n')
    if recorded:
        runner.journal.once("evaluations of 2x16", int, lambda: halving.NEVER)
    steps = []
    monkeypatch.setattr(halving, "distilling", lambda search, shape, keys: keys)
    monkeypatch.setattr(
        runner, "step", lambda name, keys, *, stop_after, key: steps.append((keys, stop_after))
    )
    assert halving.rung_score(search, "2x16", 8, 1) == halving.RungScore(0.25)
    assert steps == [({"train.eval_every": halving.NEVER}, 8)]


@pytest.mark.parametrize("commit", ["0123abc", None])
def test_a_model_of_the_hub_is_compared_by_its_commit(commit, tmp_path, monkeypatch):
    model = encoder(tmp_path / "model")
    monkeypatch.setattr(inputs, "commit_of", lambda _: commit)
    before = inputs.version_of_model(str(model))
    # The files of a snapshot are not compared: some may not be downloaded yet.
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    after = inputs.version_of_model(str(model))
    assert (before == after) == (commit is not None)


def test_a_budget_is_not_spent_on_what_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "finetuning", lambda _: None)
    monkeypatch.setattr(budget, "training_cost", lambda *_: TrainingCost(9, 60.0))
    runner = runner_of(tmp_path, budget=100.0)
    runner.journal.records += [Record("timed backends", {}, 10.0, 1)]
    check_budget(runner, is_fine_tuned=False)
    # The teacher is fine-tuned, which leaves less time than it took.
    RunDir.claim(runner.path("teacher"), "verb: finetune\n")
    runner.journal.records += [Record("run teacher", "", 60.0, 2)]
    check_budget(runner, is_fine_tuned=False)
    # The budget ended during the training of a shape, and what is there can still be scored.
    runner.journal.records += [Record("spent run 2x16", None, 50.0, 3)]
    check_budget(runner, is_fine_tuned=True)


def test_a_shape_whose_training_has_begun_is_not_skipped_for_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "training_cost", lambda *_: TrainingCost(8, 60.0))
    monkeypatch.setattr(halving, "distill_keys", lambda *_: {})
    search = search_of(tmp_path, max_drop=1.0)
    search.runner.journal.budget = 100.0
    search.runner.journal.records += [Record("run 2x16 to 1/4", "", 50.0, 1)]
    RunDir.claim(search.runner.path("2x16"), "verb: distill\n")
    assert halving._affordable(search, ["2x16", "1x16"]).keys() == {"2x16"}
    assert search.candidates["1x16"].skipped == "it takes about 60 s, 50 s are left"


def test_a_later_goal_scores_on_the_selection_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: timed("1x32"))
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    succeeds(*given, "--max-drop", "100")
    before = report_of(tmp_path / "out").compression.rows
    # Other timings need another evaluation of the candidates, before the directory is claimed.
    succeeds(*given, "--max-drop", "90", "--set", "measure.min_runs=3")
    selections = [
        report_of(step).evaluations[0].n for step in (tmp_path / "out/steps").glob("selection-*")
    ]
    assert selections == [before, before]


def test_scores_stay_with_their_candidates_in_another_order(tmp_path, monkeypatch):
    runner = runner_of(tmp_path, max_drop=1.0)
    folders = {name: runner.path(name) for name in ("1x16-onnx", "2x16-onnx")}
    report = SimpleNamespace(cards=["teacher", *folders])
    monkeypatch.setattr(judge.RunResult, "read", lambda _: SimpleNamespace(report=report))
    monkeypatch.setattr(judge, "select", lambda *_: Step("evaluate", lambda _: None))
    seen = []

    def read(report, teacher, candidates, price):
        seen.append(list(candidates.items()))
        return scores_of()

    monkeypatch.setattr(judge, "read", read)
    judge.judge(runner, "m", folders)
    judge.judge(runner, "m", dict(reversed(folders.items())))
    assert seen == 2 * [list(folders.items())]


def test_all_parts_of_the_data_and_the_recipes_of_steps_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "HASHES", hashes := {})
    folder, more = tmp_path / "beir", tmp_path / "more.jsonl"
    hashes |= {str(folder / "corpus.jsonl"): "1", str(more): "2", str(tmp_path / "other.csv"): "3"}
    plan = tmp_path / "plan.yaml"
    plan.write_text("method: tinybert\n")
    options = {"model": str(encoder(tmp_path / "m")), "task": "retrieval"}
    options |= {"data.source": str(folder), "data.train": str(more)}
    options |= {"plan.distill.recipe": str(plan)}
    recipe = resolve(CompressRecipe, options=options, recipe=None).recipe
    found = inputs.hashes_of_inputs(recipe)
    assert found.keys() == {str(folder / "corpus.jsonl"), str(more), str(plan), recipe.model}
    plan.write_text("method: minilm\n")
    assert inputs.hashes_of_inputs(recipe)[str(plan)] != found[str(plan)]


def test_data_at_a_url_and_the_text_of_a_trimming_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "version_of_model", lambda _: None)
    data, text = tmp_path / "rows.jsonl", tmp_path / "words.txt"
    data.write_text('{"text": "w1", "label": "calm"}\n')
    text.write_text("w1\n")
    recipe = CompressRecipe(
        model="m",
        task="own",
        data={"source": data.as_uri()},
        steps=[{"trim": {"data": {"source": str(text)}}}, {"export": {}}],
    )
    journal = Journal(None, StopRequest())
    sources.HASHES.clear()
    assert inputs.changed_inputs(recipe, journal) == []
    data.write_text('{"text": "w2", "label": "brisk"}\n')
    assert inputs.changed_inputs(recipe, journal) == [data.as_uri()]
    sources.HASHES.clear()
    text.write_text("w2\n")
    assert inputs.changed_inputs(recipe, journal) == [data.as_uri(), str(text)]


def test_a_text_that_a_list_of_languages_names_is_hashed(tmp_path):
    text, languages = tmp_path / "de.txt", tmp_path / "languages.yaml"
    text.write_text("Ein Satz.\n")
    languages.write_text(f"de: {text}\n")
    recipe = CompressRecipe(
        model="m",
        steps=[{"trim": {"data": {"source": str(languages)}}}, {"export": {}}],
    )
    found = inputs.hashes_of_inputs(recipe)
    assert {str(text), str(languages)} <= found.keys()


def test_an_answer_says_that_its_data_changed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: timed("1x32"))
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "--max-drop", "100", "-o", tmp_path / "out")
    succeeds(*given)
    assert "changed" not in said_by(succeeds(*given, "--resume"))
    with data.open("a") as rows:
        rows.write('{"text": "w1 w2 w3 w4"}\n')
    assert f"{data} changed after this run began" in said_by(succeeds(*given, "--resume"))


@pytest.mark.parametrize(
    ("before", "rows"), [(".", "partition.safetensors"), ("/old", "/mine/partition.safetensors")]
)
def test_the_paths_of_a_step_follow_a_move_and_other_values_stay(before, rows, tmp_path):
    step = tmp_path / "steps" / "2x16"
    step.mkdir(parents=True)
    (tmp_path / "steps" / "teacher").mkdir()
    text = (
        "verb: distill-task  # default\nteacher: {}/steps/teacher  # option\n"
        "regularizer_schedule: steps  # default\n"
        "data:\n  source: data.csv  # option\n  partition: {}  # option\n"
    )
    teacher = "" if before == "." else before
    (step / "recipe.yaml").write_text(text.format(teacher, rows).replace(" /steps", " steps"))
    own = rows.startswith("/mine")
    here = rows if own else str(tmp_path / rows)
    options = {"model": "m", "task": "own", "data.source": "data.csv", "data.partition": here}
    follow_move(step, tmp_path, resolve(CompressRecipe, options=options, recipe=None).recipe)
    assert (step / "recipe.yaml").read_text() == text.format(tmp_path, here)


def test_resume_continues_a_run_beside_a_damaged_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = resolve(CompressRecipe, recipe=None, options={"model": "m", "task": "own"})
    for name in ("runs/x", "runs/x-2"):
        RunDir.claim(Path(name), recipe.to_yaml()).release()
    Path("runs/x-2/report.json").write_text('{"status": "do')
    assert choose_folder("x", recipe, RunOptions(resume=True)) == (Path("runs/x"), None)


def test_a_stopped_shape_needs_only_the_time_of_its_remaining_steps(tmp_path, monkeypatch):
    search = search_of(tmp_path, max_drop=1.0)
    search.runner.recipe = search.runner.recipe.model_copy(update={"budget": 70.0})
    search.runner.journal.budget = 70.0
    scores = {"a": 0.9, "b": 0.6, "c": 0.5}
    trained = []
    cost = TrainingCost(100, 100.0)
    monkeypatch.setattr(halving, "_affordable", lambda _, shapes: dict.fromkeys(shapes, cost))
    monkeypatch.setattr(
        halving, "rung_score", lambda _, shape, *__: RungScore(scores[shape], "accuracy")
    )
    monkeypatch.setattr(halving, "estimate", lambda *_: cost)
    monkeypatch.setattr(halving, "distilling", lambda *_: None)
    monkeypatch.setattr(halving, "train_fully", lambda _, shape, *__: trained.append(shape))
    monkeypatch.setattr(Search, "judge", lambda _: False)
    halving.try_shapes(search, dict.fromkeys(scores, TIMES))
    # Half of b's steps are left, and three quarters of c's.
    assert trained == ["a", "b"]
    assert search.candidates["c"].skipped.endswith("no time is left to finish its training")


def searching(folder, monkeypatch, budget, costs):
    """A search with a budget, and the costs of its shapes."""
    search = search_of(folder, max_drop=1.0)
    search.runner.recipe = search.runner.recipe.model_copy(update={"budget": budget})
    search.runner.journal.budget = budget
    monkeypatch.setattr(halving, "estimate", lambda _, shape, __: costs[shape])
    monkeypatch.setattr(halving, "distilling", lambda *_: None)
    monkeypatch.setattr(halving, "distill_keys", lambda *_: {})
    return search


@pytest.mark.parametrize(
    ("largest", "why"),
    [
        (TrainingCost(400, 3600.0), "it takes about 60 min, 30 min are left"),
        (TrainingCost(0, 0.0, "out of memory"), "out of memory"),
    ],
)
def test_a_small_shape_is_not_skipped_for_the_cost_of_the_largest(
    largest, why, tmp_path, monkeypatch
):
    costs = {"8x384": largest, "4x192": TrainingCost(400, 300.0)}
    search = searching(tmp_path, monkeypatch, 1800.0, costs)
    assert halving._affordable(search, list(costs)) == {"4x192": costs["4x192"]}
    assert {name: one.skipped for name, one in search.candidates.items()} == {"8x384": why}


def test_a_small_stopped_shape_needs_only_its_own_time(tmp_path, monkeypatch):
    costs = {"8x384": TrainingCost(400, 1000.0), "4x192": TrainingCost(400, 100.0)}
    search, trained = searching(tmp_path, monkeypatch, 1800.0, costs), []

    def rung_score(search, shape, *_):
        return RungScore({"8x384": 0.9, "4x192": 0.5}[shape], "accuracy")

    def train_fully(search, shape, *_):
        trained.append(shape)
        search.runner.journal.records += [Record(f"run {shape}", "", 1500.0, 1)]

    monkeypatch.setattr(halving, "rung_score", rung_score)
    monkeypatch.setattr(halving, "train_fully", train_fully)
    monkeypatch.setattr(Search, "judge", lambda _: False)
    halving.try_shapes(search, dict.fromkeys(costs, TIMES))
    assert (trained, search.candidates) == (["8x384", "4x192"], {})


def resumed(search, folder, monkeypatch, costs, *records):
    """The search of the next process, after the last one spent more seconds."""
    later = searching(folder, monkeypatch, search.runner.journal.budget, costs)
    later.runner.journal.records += [*search.runner.journal.records, *records]
    return later


def test_a_resumed_run_begins_the_trainings_for_which_there_was_time(tmp_path, monkeypatch):
    costs = dict.fromkeys(("4x32", "2x32"), TrainingCost(100, 60.0))
    search = searching(tmp_path, monkeypatch, 100.0, costs)
    assert halving._affordable(search, list(costs)).keys() == costs.keys()
    RunDir.claim(search.runner.path("4x32"), "verb: distill\n")
    spent = Record("run 4x32 to 1/4", "", 45.0, 9)
    later = resumed(search, tmp_path, monkeypatch, costs, spent)
    assert halving._affordable(later, list(costs)).keys() == costs.keys()
    # Another budget and another question decide by the time that is left now.
    other = resumed(later, tmp_path, monkeypatch, costs)
    other.runner.journal.budget = 101.0
    assert halving._affordable(other, list(costs)).keys() == {"4x32"}
    assert other.candidates["2x32"].skipped == "it takes about 60 s, 56 s are left"
    question = resumed(
        later, tmp_path, monkeypatch, costs, Record("verified before x", [], 0.0, 10)
    )
    assert halving._affordable(question, list(costs)).keys() == {"4x32"}


def test_a_resumed_run_finishes_a_stopped_shape_for_which_there_was_time(tmp_path, monkeypatch):
    cost = TrainingCost(100, 60.0)
    costs = {"2x32": cost}
    search = searching(tmp_path, monkeypatch, 100.0, costs)
    stopped = halving._Stopped("2x32", RungScore(0.5, "accuracy"), 25)
    assert halving.why_not_finished(search, stopped, cost) == ""
    spent = Record("spent run 2x32", None, 80.0, 9)
    later = resumed(search, tmp_path, monkeypatch, costs, spent)
    assert halving.why_not_finished(later, stopped, cost) == ""
    # A new decision would be another one.
    later.runner.journal.records = [spent]
    assert halving.why_not_finished(later, stopped, cost).endswith(
        "no time is left to finish its training"
    )


def test_a_stopped_shape_whose_dry_run_fails_is_not_trained_on(tmp_path, monkeypatch):
    failing = {"2x32": TrainingCost(100, 0.0, "out of memory")}
    search = searching(tmp_path, monkeypatch, 100.0, failing)
    stopped = halving._Stopped("2x32", RungScore(0.5, "accuracy"), 25)
    # The cost of a larger shape, for which there is no time.
    why = halving.why_not_finished(search, stopped, TrainingCost(100, 1000.0))
    assert why.endswith("no time is left to finish its training")


def test_changed_data_and_a_changed_model_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: timed("1x32"))
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    succeeds(*given, "--max-drop", "100")
    before = data.read_text("utf-8")
    data.write_text(before + '{"text": "w1 w2 w3 w4"}\n', "utf-8")
    other = (*given, "--max-drop", "99")
    done = kdcli(*other)
    assert done.exit_code == 2, done.output
    assert f"{data} has changed since the run in {tmp_path / 'out'} began" in said_by(done)
    data.write_text(before, "utf-8")
    weights = tmp_path / "model" / "model.safetensors"
    kept = weights.read_bytes()
    headed(tmp_path / "model", LABELS, seed=3, num_hidden_layers=2)
    done = kdcli(*other)
    assert done.exit_code == 2, done.output
    assert f"{tmp_path / 'model'} has changed since the run" in said_by(done)
    weights.write_bytes(kept)
    (tmp_path / "model" / "README.md").write_text("Read me.", "utf-8")
    succeeds(*other)


def test_a_step_that_the_machine_failed_is_tried_again(tmp_path):
    runner, tries = runner_of(tmp_path), []

    def fail(error):
        def call(options):
            tries.append(type(error))
            raise error

        return Step("export", call)

    for _ in range(2):
        assert runner.step("onnx", fail(MachineError("the disk is full"))) == "the disk is full"
        assert runner.step("trim", fail(UsageError("no text"))) == "no text"
    assert tries == [MachineError, UsageError, MachineError]


@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (MachineError("the disk is full", "free some space"), 3, "free some space"),
        (DivergedError("the loss is nan", "lower train.lr"), 4, "lower train.lr"),
        (BadRow("rows.csv:3", "no text"), 2, runner_module.TRY_AGAIN),
    ],
)
def test_a_required_step_keeps_the_exit_code_and_the_hint_of_its_error(error, code, hint, tmp_path):
    def fail(options):
        raise error

    problem = error.message
    with pytest.raises(type(error)) as caught:
        runner_of(tmp_path).require("teacher", Step("finetune", fail))
    assert (caught.value.exit_code, caught.value.hint) == (code, hint)
    assert caught.value.message == caught.value.args[0] == f"teacher failed: {problem}"
    assert caught.value.__notes__ == [hint]


def test_a_model_that_was_not_measured_is_named_and_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", lambda *_: timed("1x32"))
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "--max-drop", "100", "-o", tmp_path / "out")

    def without_memory(subjects, protocol, **_):
        latency = measured_here(subjects, protocol)
        large = [row for row in latency.rows if row.model == "onnx"]
        latency.rows = [row for row in latency.rows if row not in large]
        latency.failures += [
            Failure(model=row.model, backend=row.backend, dtype=row.dtype, reason="out of memory")
            for row in large
        ]
        return latency

    with monkeypatch.context() as patch:
        patch.setattr(finish, "measure_latency", without_memory)
        done = kdcli(*given)
    assert done.exit_code == 3, done.output
    why = "candidates on the selection rows failed: the latency of onnx was not measured: out of"
    assert why in said_by(done)
    succeeds(*given, "--resume")


def test_ctrl_c_that_fails_a_required_step_stops_the_compression(tmp_path):
    runner = runner_of(tmp_path)

    def fail(options):
        runner.journal.stop.signalled = True
        raise MachineError("the worker has ended")

    with pytest.raises(Interrupted):
        runner.require("teacher", Step("finetune", fail))


def test_a_question_that_another_process_answered_meanwhile_is_asked_again(tmp_path):
    options = {"model": "m", "task": "own", "goal.max_drop": 1.0}
    resolved = resolve(CompressRecipe, recipe=None, options=options)
    folder, nothing = tmp_path / "out", Partition(NO_ROWS, NO_ROWS)

    def process():
        runner = runner_of(folder, max_drop=1.0)
        runner.options, runner.asks_again = replace(runner.options, resume=True), True
        if folder.exists():
            runner.journal.read(RunDir(folder))
        return runner

    first = process()
    run.claim_folder(resolved, first, nothing)
    first.journal.run.release()
    second = process()
    run.claim_folder(resolved, first, nothing)
    first.journal.once("run verification-onnx", str, lambda: "")
    first.journal.run.release()
    with pytest.raises(UsageError, match=r"another kdcli process finished in"):
        run.claim_folder(resolved, second, nothing)
    RunDir(folder).release()
    run.claim_folder(resolved, process(), nothing)


def test_latencies_are_measured_again_on_another_machine(tmp_path, monkeypatch):
    runner, evaluated = runner_of(tmp_path, max_drop=2.0), []
    report = SimpleNamespace(evaluations=[], cards=["teacher", "onnx"], decisions=[])
    monkeypatch.setattr(judge.RunResult, "read", lambda folder: SimpleNamespace(report=report))
    monkeypatch.setattr(judge, "read", lambda *_: scores_of())
    monkeypatch.setattr(
        judge, "select", lambda *_: Step("evaluate", lambda options: evaluated.append("onnx"))
    )

    def judged():
        judge.judge(runner, "m", {"onnx": runner.path("onnx")})
        return len(evaluated)

    facts = describe_environment()
    assert (judged(), judged()) == (1, 1)
    for number, change in enumerate(({"cpu": "another"}, {"latency_threads": 99}), 2):
        monkeypatch.setattr(runner_module, "describe_environment", lambda c=change: facts | c)
        assert (judged(), judged()) == (number, number)
    longer = runner.recipe.measure.model_copy(update={"min_seconds": 9.0})
    runner.recipe = runner.recipe.model_copy(update={"measure": longer})
    assert judged() == 4


def test_candidates_on_a_backend_that_is_not_installed_any_more_answer_nothing(
    tmp_path, monkeypatch
):
    runner = runner_of(tmp_path, max_drop=1.0)
    scored = []

    def score(runner, teacher, folders):
        scored.append(set(folders))
        return scores_of(*(measured(name, 0.9, 5.0, 4.0) for name in folders))

    monkeypatch.setattr(search_module, "judge", score)
    tried = []
    for name, format in (("onnx", "onnx"), ("1x8-openvino-int8", "openvino"), ("1x8", "")):
        folder = runner.path(name)
        folder.mkdir(parents=True)
        if format:
            precision = "int8" if name.endswith("int8") else "fp32"
            facts = {"format": format, "precision": precision}
            (folder / "export.json").write_text(json.dumps(facts), "utf-8")
        tried.append(Candidate(name, folder))
    Search(runner, "m")._score(tried)
    runner.scored_before = runner.journal.known("scored ")
    search = Search(runner, "m")
    search.skip("openvino-int8", "openvino is not installed")
    assert search.answers_from_earlier()
    assert scored[-1] == {"onnx", "1x8"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished compression in `runs/`, and its command."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_untrained", lambda *_: timed("1x32"))
        patch.setattr(finish, "measure_latency", measured_here)
        given = arguments(folder, classifier(folder)[0])
        succeeds(*given, "--max-drop", "100", "-o", folder / "runs" / "compress-model-texts")
    return folder, given


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: json.dumps(json.loads(text) | {"schema": 1}), "is a report of schema 1"),
        (lambda text: text[: len(text) // 2], "not valid JSON"),
    ],
)
def test_a_report_that_cannot_be_read_answers_no_question(
    change, why, finished, tmp_path, monkeypatch
):
    folder, given = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    monkeypatch.setattr(run, "measure_untrained", stop)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "compress-model-texts" / "report.json"
    file.write_text(change(file.read_text("utf-8")), "utf-8")
    for options in ((), ("--max-drop", "90")):
        said = said_by(kdcli(*given, "--max-drop", "100", *options))
        assert why in said
        assert "output directory: runs/compress-model-texts-2" in said
    said = said_by(kdcli(*given, "--max-drop", "90", "-o", file.parent))
    assert "is not empty" in said
    said = said_by(kdcli(*given, "--max-drop", "90", "-o", file.parent, "--overwrite"))
    assert said.endswith("error: far enough")


class Changeable(SimpleNamespace):
    """A report as far as the choice of thresholds needs one."""

    def model_copy(self, update):
        return Changeable(**vars(self) | update)


def test_the_classes_of_a_report_are_for_the_limit_of_its_goal(tmp_path, monkeypatch):
    # The rows were scored for a limit of 1 point, which needs 100 rows in a class.
    rows = [losing(6.0, count=60)]
    report = Changeable(decisions=rows, cards={"teacher": None, "a": None}, notes=[])
    one = measured("a", 0.9, 1.0, 4.0)
    scores = replace(scores_of(one), report=report)
    verified = Verification(report, 500, scores.teacher, one, 1, 0.95)
    monkeypatch.setattr(run, "verify", lambda *_: verified)
    shown, _ = run.verify_decisions(runner_of(tmp_path, max_class_drop=2.0), scores, one)
    (decision,) = shown.report.decisions
    assert (decision.min_count, decision.classes[0].enough) == (50, True)


def test_another_price_chooses_among_the_candidates_of_its_answer():
    journal = Journal(None, StopRequest())
    keys = ["run onnx", "run selection-1", "scored onnx", "run 2x8", "run selection-2"]
    # The last two are of a question that was stopped.
    for key in [*keys, "scored 2x8 onnx", "run 1x8", "scored 1x8 2x8 onnx"]:
        journal.once(key, str, str)

    def scored(*, repeats, steps):
        rows = [SimpleNamespace(name=name) for name in steps]
        report = SimpleNamespace(compression=SimpleNamespace(steps=rows))
        earlier = SimpleNamespace(report=report)
        return scored_before(Question(earlier, False, "", repeats), journal)

    both = ["scored onnx", "scored 2x8 onnx"]
    assert scored(repeats=True, steps=["selection-1"]) == both[:1]
    assert scored(repeats=True, steps=["selection-1", "2x8", "selection-2"]) == both
    assert scored(repeats=False, steps=["selection-1"]) == [*both, "scored 1x8 2x8 onnx"]
