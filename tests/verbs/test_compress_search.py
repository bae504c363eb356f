"""What `compress` tries, keeps and answers, with verbs that train nothing."""

import functools
import json
import os
import re
import shutil
import signal

import pytest
from fake_verbs import LABELS, Fakes, Killed, tuned
from own_files import encoder, headed, lines_of, report_of, write
from own_files import rows as own_rows

from kdcli.errors import DivergedError, GateError, KdcliError, MachineError, Stopped, UsageError

MS = {"torch": 10.0, "teacher": 10.0, "onnx": 8.0, "4x32": 10.0, "2x32": 5.0, "1x32": 2.0}
SCORES = {"teacher": 0.9, "onnx": 0.9, "2x32": 0.893, "1x32": 0.86}
PLAN = {
    "plan__backends": ["onnx"],
    "plan__shapes": ["2x32", "1x32"],
    "plan__prune": None,
    "plan__trim_from": 1.0,
    "measure__min_seconds": 0.0,
}
WHOLE = [
    *("measure teacher onnx", "measure teacher 2x32 1x32"),
    *("dry run 2x32", "distill 2x32", "distill 1x32", "export onnx", "distill 2x32"),
    *("export 2x32-onnx", "evaluate selection", "measure teacher onnx 2x32-onnx"),
    "evaluate verification-2x32-onnx",
]
"""The calls of the plan."""


def fakes(**changes):
    sizes = {"onnx": 8.0, "2x32": 4.0, "1x32": 2.0}
    return Fakes(**{"scores": dict(SCORES), "ms": dict(MS), "mb": sizes} | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The keys of a fine-tuned model and its rows, which tests do not change."""
    return tuned(tmp_path_factory.mktemp("tuned"))


@pytest.fixture
def given(model, tmp_path):
    """The keys of a compression in a directory of its own."""
    return {**model, **PLAN, "output_dir": tmp_path / "out"}


def calls_of(made):
    """The calls, without the hash of the scored candidates."""
    return ["evaluate selection" if "selection-" in call else call for call in made.calls]


def trained(made):
    """The trainings and exports that were called."""
    return [c for c in made.calls if c.split()[0] in ("finetune", "distill", "prune", "export")]


def answer_of(folder):
    return report_of(folder).compression


def same_answer(one, other):
    names = ("name", "score", "ms", "mb", "outcome")
    rows = [[[getattr(row, n) for n in names] for row in c.candidates] for c in (one, other)]
    assert rows[0] == rows[1]
    assert (one.chosen, one.sentence, one.verification) == (
        other.chosen,
        other.sentence,
        other.verification,
    )


GOAL = {"goal__max_drop": 1.0}


def test_one_training_of_a_family_serves_every_goal(given):
    made, given = fakes(), given | {"plan__family": True}
    made.compress(**given, goal__max_drop=1.0, goal__speedup=1.8)
    family = "4x32,2x32,1x32"
    assert trained(made) == [f"distill {family}", "export 2x32-onnx", "export 1x32-onnx"]
    assert made.recipes[family]["student"]["to"] == [family]
    assert answer_of(given["output_dir"]).chosen == "2x32-onnx"
    again = fakes()
    again.compress(**given, goal__max_drop=5.0, goal__speedup=4.0)
    assert trained(again) == []
    assert answer_of(given["output_dir"]).chosen == "1x32-onnx"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan__shapes": ["2x32", "1x16"]}, "differ in more than their layers"),
        ({"plan__shapes": ["2x"]}, "plan.shapes=2x has one candidate"),
        ({"plan__shapes": None}, "plan.shapes=null has none"),
    ],
)
def test_what_is_no_family_is_refused(given, changes, message):
    with pytest.raises(UsageError, match=message):
        fakes().compress(**given | {"plan__family": True} | changes, **GOAL)


@pytest.mark.parametrize(
    ("shapes", "made_of"),
    [(None, ["export onnx"]), ("1x32", ["distill 1x32", "export 1x32-onnx", "export onnx"])],
)
def test_no_shape_or_a_single_one_may_be_named(given, shapes, made_of):
    made = fakes()
    result = made.compress(**given | {"plan__shapes": shapes, "plan__prune": None}, **GOAL)
    assert trained(made) == made_of
    names = [row.name for row in answer_of(result.folder).candidates]
    assert ("1x32" in {name.partition("-")[0] for name in names}) == bool(shapes)


def test_a_plan_without_shapes_is_not_told_to_train_them_longer(given):
    plan = {"plan__shapes": None, "plan__prune": None}
    with pytest.raises(GateError) as missed:
        fakes().compress(**given | plan, goal__max_mb=0.24)
    ways = "Loosen the goal, or try students (remove plan.shapes=null)."
    assert missed.value.hint.endswith(ways)


def test_a_mistyped_shape_is_refused_before_anything_is_read(given):
    with pytest.raises(UsageError, match="'2y64' is not a shape"):
        fakes().compress(**given | {"plan__shapes": "2y64", "data__source": "none.csv"}, **GOAL)


def test_the_model_the_shapes_and_the_verification_come_in_this_order(given):
    made = fakes()
    result = made.compress(**given, **GOAL)
    assert calls_of(made) == WHOLE
    answer = answer_of(result.folder)
    assert (answer.chosen, answer.met, answer.verification.look) == ("2x32-onnx", True, 1)
    outcomes = {row.name: row.outcome for row in answer.candidates}
    assert outcomes == {
        "teacher": "",
        "onnx": "meets the goal",
        "2x32-onnx": "chosen",
        "1x32": "trained for 2 of 8 steps only: 2x32-onnx meets the goal",
    }
    assert (result.folder / "best" / "onnx" / "model.onnx").is_file()
    card = (result.folder / "best" / "README.md").read_text("utf-8")
    assert "# model compressed to 2x32-onnx\n\nMade from model by kdcli compress, it loses " in card
    assert "is 2.0 times as fast (2.0–2.0; 5.00 ms a text" in card
    assert answer.sentence.startswith("2x32-onnx is 2.0 times as fast as model (2.0–2.0; 5.00 ms")
    steps = [(step.name.partition("-")[0], step.command) for step in answer.steps]
    assert steps == [
        ("2x32", "distill"),
        ("selection", "evaluate"),
        ("verification", "evaluate"),
    ]
    assert all((result.folder / step.folder / "report.html").is_file() for step in answer.steps)


@pytest.mark.parametrize("how", [signal.SIGTERM, Killed()])
def test_a_run_that_ends_at_any_step_continues_to_the_same_answer(how, given, tmp_path):
    whole = fakes().compress(**given, **GOAL)
    parts = given | {"output_dir": tmp_path / "parts"}
    made, results = fakes(ends=("", how)), []
    while not results:
        try:
            results.append(made.compress(**parts, **GOAL, resume=parts["output_dir"].exists()))
        except (Stopped, Killed):
            with pytest.raises(UsageError, match="is not empty"):
                made.compress(**parts, **GOAL)
    same_answer(answer_of(whole.folder), answer_of(results[0].folder))
    assert len(made.ended) == len(
        [one for one in WHOLE if one.split()[0] not in ("measure", "dry")]
    )
    # Each step was called once more than without the ends, and no measurement was repeated.
    once = [call for call in calls_of(made) if call.startswith(("measure", "dry run"))]
    assert sorted([*calls_of(made), *once]) == sorted(2 * WHOLE)


def test_a_finished_run_answers_another_goal_without_training(given):
    made = fakes()
    first = made.compress(**given, **GOAL)
    made.calls.clear()
    made.compress(**given, goal__max_drop=1.0, goal__max_mb=100.0)
    second = answer_of(first.folder)
    assert (second.chosen, second.verification.look) == ("2x32-onnx", 1)
    assert second.goal == {"max_drop": 1.0, "max_mb": 100.0}
    assert made.calls == []
    # Another candidate is chosen, so the verification rows are looked at a second time.
    made.compress(**given, goal__max_drop=0.5)
    third = answer_of(first.folder)
    assert (third.chosen, third.verification.look) == ("onnx", 2)
    assert third.verification.confidence == pytest.approx(0.975)
    assert made.calls == ["evaluate verification-onnx"]
    with pytest.raises(UsageError, match="is not empty"):
        made.compress(**given, goal__max_drop=0.5)
    made.compress(**given, goal__max_drop=0.5, resume=True)
    assert made.calls == ["evaluate verification-onnx"]


@pytest.mark.parametrize("goal", [{"speedup": 99.0}, {"max_drop": 0.0, "speedup": 3.0}])
def test_a_goal_out_of_reach_is_answered_from_stored_times(given, goal):
    made = fakes()
    with pytest.raises(GateError):
        made.compress(**given, goal__max_drop=1.0, goal__speedup=4.0)
    made.calls.clear()
    with pytest.raises(GateError):
        made.compress(**given, **{f"goal__{key}": value for key, value in goal.items()})
    assert [call for call in made.calls if call.startswith("measure")] == []


def test_another_goal_trains_only_what_is_missing(given):
    made = fakes()
    first = made.compress(**given, **GOAL)
    made.calls.clear()
    with pytest.raises(GateError) as missed:
        made.compress(**given, goal__max_drop=1.0, goal__speedup=4.0)
    assert missed.value.exit_code == 5
    # The shape that was stopped is trained on, and the other one is there.
    assert trained(made) == ["distill 1x32", "export 1x32-onnx"]
    answer = answer_of(first.folder)
    assert (answer.chosen, answer.met) == ("1x32-onnx", False)
    assert str(missed.value) == f"goal missed: {answer.missed}"
    assert answer.missed == (
        "the nearest candidate is 1x32-onnx: 4.00 points lost, 3.00 more than 1, on 400 "
        "verification rows"
    )


@pytest.mark.parametrize("resume", [False, True])
def test_other_backends_and_shapes_are_another_question(given, resume):
    made = fakes()
    made.scores |= {"onnx-int8": 0.9, "4x16": 0.9}
    made.ms |= {"onnx-int8": 90.0, "4x16": 4.0}
    made.mb |= {"onnx-int8": 2.0, "4x16": 1.0}
    first = made.compress(**given, **GOAL)
    made.calls.clear()
    more = given | {"plan__backends": ["onnx", "onnx-int8"], "resume": resume}
    second = made.compress(**more, **GOAL)
    assert second.folder == first.folder
    # The shapes are trained already.
    assert [call for call in trained(made) if "distill" in call] == []
    assert "export onnx-int8-within-1" in trained(made)
    assert "onnx-int8" in {row.name for row in answer_of(first.folder).candidates}
    made.calls.clear()
    assert made.compress(**more | {"resume": True}, **GOAL).folder == first.folder
    assert made.calls == []
    made.compress(**more | {"plan__shapes": ["4x16"]}, **GOAL)
    assert [call for call in trained(made) if "distill" in call] == ["distill 4x16"]


def test_a_candidate_of_other_shapes_does_not_answer_another_goal(given):
    made = fakes()
    made.compress(**given | {"plan__shapes": ["2x32"]}, **GOAL)
    other = given | {"plan__shapes": ["1x32"]}
    for speedup in (3.0, 1.5):
        with pytest.raises(GateError):
            made.compress(**other, goal__max_drop=1.0, goal__speedup=speedup)
        names = {row.name for row in answer_of(given["output_dir"]).candidates}
        assert "2x32-onnx" not in names


def test_a_run_that_was_moved_continues_and_answers(given, tmp_path):
    made = fakes(ends=("1x32", signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped in 1x32"):
        made.compress(**given, **GOAL)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.copytree(given["output_dir"], moved)
    shutil.rmtree(given["output_dir"])
    made.compress(**given | {"output_dir": moved}, **GOAL, resume=True)
    assert trained(made) == [
        *("distill 2x32", "distill 1x32", "distill 1x32", "export onnx", "distill 2x32"),
        "export 2x32-onnx",
    ]
    assert str(tmp_path / "out") not in "".join(
        file.read_text("utf-8") for file in moved.rglob("recipe.yaml")
    )
    made.calls.clear()
    again = moved.rename(tmp_path / "again")
    made.compress(**given | {"output_dir": again}, goal__max_drop=1.0, goal__max_mb=100.0)
    assert made.calls == []
    assert (again / "best" / "onnx" / "model.onnx").is_file()


def test_after_a_failure_on_the_verification_rows_the_next_candidate_is_verified(given):
    made = fakes(verified={"2x32": 0.8})
    with pytest.raises(GateError) as missed:
        made.compress(**given, goal__max_drop=1.0)
    assert str(missed.value) == (
        "goal missed: 2x32-onnx meets it on the selection rows, but not on the 400 verification "
        "rows: 10.00 points lost, 9.00 more than 1"
    )
    assert re.search(
        "The next candidate is onnx: .* To verify it, run: the same call", missed.value.hint
    )
    folder = given["output_dir"]
    first = answer_of(folder)
    assert (first.chosen, first.next_candidate) == ("2x32-onnx", "onnx")
    assert report_of(folder).notes[0] == (
        "best/ holds the chosen model, and its README.md says how to run it. It misses the goal; "
        "onnx may meet it"
    )
    made.calls.clear()
    # A finished question is not asked again by --resume.
    with pytest.raises(GateError):
        made.compress(**given, goal__max_drop=1.0, resume=True)
    assert made.calls == []
    # It is stopped, and then another goal is asked that is stopped as well.
    made.ends = ("verification-onnx", signal.SIGTERM)
    with pytest.raises(Stopped):
        made.compress(**given, goal__max_drop=1.0)
    made.compress(**given, goal__max_drop=1.0, resume=True)
    second = answer_of(folder)
    assert (second.chosen, second.met, second.next_candidate) == ("onnx", True, None)
    assert (second.verification.look, second.verification.confidence) == (2, 0.975)
    outcomes = {row.name: row.outcome for row in second.candidates}
    assert outcomes["2x32-onnx"] == "10.00 points lost, 9.00 more than 1, on the verification rows"
    # A tighter goal does not return to the candidate that failed, and a looser one does.
    made.compress(**given, goal__max_drop=0.9)
    assert answer_of(folder).chosen == "onnx"
    made.compress(**given, goal__max_drop=11.0)
    assert answer_of(folder).chosen == "2x32-onnx"
    assert answer_of(folder).verification.look == 1


def test_another_price_repeats_the_choice(given):
    made = fakes(verified={"2x32": 0.8})
    for price in (None, 0.5, 0.7):
        with pytest.raises(GateError):
            made.compress(**given, goal__max_drop=1.0, price_per_hour=price)
        answer = answer_of(given["output_dir"])
        assert (answer.chosen, answer.verification.look) == ("2x32-onnx", 1)
        assert report_of(given["output_dir"]).price_per_hour == price
    assert "verification-onnx" not in " ".join(made.calls)


def test_the_budget_ends_a_training_and_a_larger_one_continues_it(given):
    # The dry run expects less time than the training takes.
    made = fakes(seconds={"2x32": 80.0}, estimates={"2x32": 40.0})
    keys = given | {"plan__shapes": ["2x32"]}
    made.compress(**keys, goal__max_drop=1.0, budget=50.0)
    answer = answer_of(given["output_dir"])
    outcomes = {row.name: row.outcome for row in answer.candidates}
    assert outcomes["2x32"] == "--budget ended before its training did"
    # What is there by then is exported and scored.
    assert (answer.chosen, made.now) == ("onnx", pytest.approx(50.0, abs=1.0))
    made.calls.clear()
    made.compress(**keys, goal__max_drop=1.0, goal__speedup=1.9, budget=200.0)
    assert trained(made) == ["distill 2x32", "export 2x32-onnx"]
    # It continues from its last whole step.
    assert made.now == pytest.approx(90.0, abs=1.0)


@pytest.mark.parametrize(
    ("budget", "steps", "is_what"),
    [
        # Four fifths of the time that is left.
        (100.0, 20, "is trained for 20 of 40 steps, because the budget ends"),
        (
            60.0,
            0,
            "is fitted by least squares, but not trained (40 steps were planned), because the",
        ),
    ],
)
def test_a_budget_trains_a_shape_for_the_steps_that_it_pays_for(budget, steps, is_what, given):
    made = fakes(seconds={"2x32": 160.0}, steps=40, ends=("2x32", signal.SIGTERM))
    keys = given | {"plan__distill": {"train": {"epochs": 9}}, "plan__shapes": ["2x32"]}
    with pytest.raises(Stopped):
        made.compress(**keys, goal__max_drop=1.0, goal__speedup=1.9, budget=budget)
    made.compress(**keys, goal__max_drop=1.0, goal__speedup=1.9, budget=budget, resume=True)
    assert made.recipes["2x32"]["train"]["max_steps"] == steps
    assert made.now == pytest.approx(4.0 * steps)
    assert answer_of(given["output_dir"]).chosen == "2x32-onnx"
    assert trained(made) == ["distill 2x32", "distill 2x32", "export 2x32-onnx"]
    (note,) = [one for one in report_of(given["output_dir"]).notes if "2x32 is" in one]
    assert f"2x32 {is_what}" in note
    # 160 seconds are four fifths of 200.
    assert "For the whole training: " in note
    assert "budget='4m'" in note
    card = (given["output_dir"] / "best" / "README.md").read_text()
    assert f"It {is_what.replace(' ends', '')}" in " ".join(card.split())


@pytest.mark.parametrize(
    ("seconds", "budget", "steps"),
    # The second training alone would fit into the 108 seconds that are left.
    [(160.0, 123.0, 20), (100.0, 118.0, 30)],
)
def test_the_budget_also_pays_for_what_follows_a_training(seconds, budget, steps, given):
    made = fakes(seconds={"2x32": seconds, "measure": 5.0}, steps=40)
    keys = given | {"plan__distill": {"train": {"epochs": 9}}, "plan__shapes": ["2x32"]}
    made.compress(**keys, goal__max_drop=1.0, goal__speedup=1.9, budget=budget)
    # Timing took 10 seconds. Exports and latencies will take as long again, and scores 2.5 seconds.
    assert made.recipes["2x32"]["train"]["max_steps"] == steps
    assert made.now < budget


def test_a_budget_is_kept_if_nothing_was_timed_before_the_training(given):
    seconds = {"2x32": 160.0, "export": 10.0, "evaluate": 5.0, "measure": 30.0}
    made = fakes(seconds=seconds, steps=80)
    keys = given | {"plan__distill": {"train": {"epochs": 9}}, "plan__shapes": ["2x32"]}
    made.compress(**keys, goal__max_drop=1.0, budget=150.0)
    # After the first export, 60 of 140 seconds are kept for what follows, and a fifth of the rest.
    assert made.recipes["2x32"]["train"]["max_steps"] == 32
    assert made.now <= 150.0


def test_the_shape_closest_to_the_teacher_is_trained_first_and_leaves_the_rest_of_the_budget(
    given, capsys
):
    shapes = ["2x32", "1x16", "1x8"]
    made = fakes(seconds=dict.fromkeys(shapes, 80.0), steps=40)
    made.ms |= dict.fromkeys(shapes, 5.0)
    made.scores |= dict.fromkeys(shapes, 0.8)
    keys = given | {"plan__shapes": shapes}
    with pytest.raises(GateError):
        made.compress(**keys, goal__max_drop=0.1, goal__speedup=1.9, budget=130.0)
    words = " ".join(capsys.readouterr().err.split())
    agreements = {shape: float(re.search(rf"{shape} (0\.\d+)", words)[1]) for shape in shapes}
    order = sorted(shapes, key=lambda shape: -agreements[shape])
    # A fit takes no time here.
    steps = {shape: recipe["train"]["max_steps"] for shape, recipe in made.recipes.items()}
    assert list(steps.items()) == [(order[0], None), (order[1], 20)]
    assert f"{order[2]} is skipped: not trained: the budget pays for 0 of 40 steps" in words


@pytest.mark.parametrize("budget", [115.0, 130.0, 180.0])
def test_a_budget_is_kept_with_all_that_takes_time(budget, given, capsys):
    seconds = {"dry-run": 12.0, "measure": 5.0, "export": 4.0, "evaluate": 3.0}
    seconds |= {"2x32": 150.0, "1x32": 100.0, "prune": 80.0}
    made = fakes(seconds=seconds, steps=40)
    made.scores |= {"2x32": 0.6, "1x32": 0.6}
    keys = given | {"plan__prune": {}}
    with pytest.raises(GateError):
        made.compress(**keys, goal__max_drop=0.1, goal__speedup=1.9, budget=budget)
    words = " ".join(capsys.readouterr().err.split())
    assert "2x32 is skipped: not trained: " in words
    assert "pruned is skipped: it takes about 91 s" in words
    # At least half of the budget trains.
    assert budget / 2 < made.now <= budget


def test_a_tenth_of_the_budget_times_the_shapes_that_may_meet_the_goal(given):
    made = fakes(seconds={"measure": 5.0})
    made.ms |= {"3x32": 6.0, "onnx": 9.0}
    shapes = {"plan__shapes": ["3x32", "2x32", "1x32"]}
    made.compress(**given | shapes, goal__max_drop=1.0, goal__speedup=1.5, budget=80.0)
    # Two models took 5 seconds, and 3 of the 8 are left.
    assert made.calls[:2] == ["measure teacher onnx", "measure teacher 2x32"]
    outcomes = {row.name: row.outcome for row in answer_of(given["output_dir"]).candidates}
    # Six timings of 2.5 seconds are a tenth of 150 seconds.
    assert outcomes["1x32"] == (
        "not timed, because timing may take a tenth of --budget: about --budget 3m times all shapes"
    )


def test_a_resumed_run_begins_the_trainings_for_which_there_was_time(given):
    made = fakes(seconds={"2x32": 60.0, "1x32": 60.0}, ends=("1x32", signal.SIGTERM))
    with pytest.raises(Stopped):
        made.compress(**given, goal__max_drop=1.0, budget=100.0)
    made.compress(**given, goal__max_drop=1.0, budget=100.0, resume=True)
    whole = given | {"output_dir": given["output_dir"].with_name("whole")}
    other = fakes(seconds={"2x32": 60.0, "1x32": 60.0})
    other.compress(**whole, goal__max_drop=1.0, budget=100.0)
    one, two = map(answer_of, (given["output_dir"], whole["output_dir"]))
    same_answer(one, two)


@pytest.mark.parametrize(
    ("score", "bounds"),
    [
        # Training lost 0.6 of 1 point.
        (0.894, [0.4, 1.0]),
        # Nothing is left, so nothing is bounded.
        (0.7, [None, 1.0]),
    ],
)
def test_int8_gets_what_training_left_of_the_goal(score, bounds, given):
    made = fakes()
    made.scores["2x32"] = score
    plan = {"plan__backends": ["onnx-int8"], "plan__shapes": ["2x32"]}
    made.compress(**given | plan, **GOAL)
    # The student's export, and then the model's own, which waited for the training.
    found = [export["max_drop"] for export in made.exports]
    assert [bound and round(bound, 6) for bound in found] == bounds


def test_packed_integers_are_trained_for_the_steps_of_the_plan(given):
    plan = {"plan__pack_steps": 7, "plan__shapes": ["2x32"]}
    with pytest.raises(UsageError, match=r"onnx-int8-packed, and plan.backends has onnx"):
        fakes().compress(**given | plan | {"plan__backends": ["onnx-int8"]}, **GOAL)
    made = fakes()
    backends = ["onnx-int8", "onnx-int8-packed"]
    made.compress(**given | plan | {"plan__backends": backends}, goal__max_drop=0.1)
    # The model's own exports follow the student's.
    assert [export["steps"] for export in made.exports][-2:] == [0, 7]


def test_int8_that_loses_too_much_is_quantised_without_a_bound(given):
    made = fakes(errors={"onnx-int8-within-1": GateError("too much is lost")})
    plan = {"plan__backends": ["onnx-int8"], "plan__shapes": ["2x32"]}
    result = made.compress(**given | plan, goal__max_drop=1.0)
    assert "export onnx-int8" in made.calls
    assert {row.name for row in answer_of(result.folder).candidates} >= {"onnx-int8"}


def test_a_step_that_fails_is_skipped_and_one_that_the_machine_failed_is_tried_again(given):
    made = fakes(errors={"2x32": DivergedError("training diverged at step 1")})
    made.errors["1x32-onnx"] = MachineError("the disk is full")
    result = made.compress(**given, goal__max_drop=5.0)
    outcomes = {row.name: row.outcome for row in answer_of(result.folder).candidates}
    assert outcomes["2x32"] == "training diverged at step 1"
    assert outcomes["1x32-onnx"] == "the disk is full"
    assert outcomes["onnx"] == "chosen"
    made.errors.clear()
    made.calls.clear()
    made.compress(**given, goal__max_drop=5.0, goal__speedup=4.9)
    assert trained(made) == ["export 1x32-onnx"]


def test_a_step_that_was_refused_is_tried_again_when_the_run_is_resumed(given):
    made = fakes(errors={"onnx": UsageError("onnx is not installed")})
    result = made.compress(**given, goal__max_drop=1.0)
    outcomes = {row.name: row.outcome for row in answer_of(result.folder).candidates}
    assert outcomes["onnx"] == "onnx is not installed"
    assert trained(made).count("export onnx") == 1
    made.errors.clear()
    made.calls.clear()
    result = made.compress(**given, goal__max_drop=0.5)
    assert trained(made) == ["export onnx"]
    assert answer_of(result.folder).chosen == "onnx"


@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (MachineError("the disk is full", "free some space"), 3, "free some space"),
        (DivergedError("the loss is nan", "lower train.lr"), 4, "lower train.lr"),
        (UsageError("no text"), 2, "fix it and run the same command with --resume"),
    ],
)
def test_a_teacher_that_fails_ends_the_run_with_the_exit_code_of_its_error(
    error, code, hint, given, tmp_path
):
    encoder(tmp_path / "plain", num_hidden_layers=4)
    made = fakes(errors={"teacher": error})
    with pytest.raises(KdcliError, match=r"^teacher failed: ") as caught:
        made.compress(**given | {"model": str(tmp_path / "plain")}, goal__max_drop=1.0)
    assert (caught.value.exit_code, caught.value.hint) == (code, hint)
    made.errors.clear()
    keys = given | {"model": str(tmp_path / "plain")}
    made.compress(**keys, goal__max_drop=1.0, resume=True)
    assert [call for call in made.calls if "teacher" in call and "measure" not in call] == [
        *("finetune teacher", "finetune teacher"),
    ]
    assert made.recipes["2x32"]["teacher"].endswith("teacher")


def test_a_pipeline_runs_its_steps_and_is_resumed_where_it_was_stopped(given):
    steps = [{"distill": {"student": {"to": ["2x32"]}}}, {"prune": {}}, {"export": {}}]
    made = fakes(ends=("2-prune", signal.SIGTERM), ms=MS | {"3-export": 5.0})
    with pytest.raises(Stopped, match="stopped in step 2"):
        made.compress(**given, steps=steps)
    result = made.compress(**given, steps=steps, resume=True)
    assert calls_of(made) == [
        *("distill 1-distill", "prune 2-prune", "prune 2-prune", "export 3-export"),
        *("evaluate selection", "measure teacher 1-distill 2-prune 3-export"),
        "evaluate verification-3-export",
    ]
    answer = answer_of(result.folder)
    names = ["teacher", "1-distill", "2-prune", "3-export"]
    assert [row.name for row in answer.candidates] == names
    assert (answer.chosen, answer.met) == ("3-export", True)
    made.calls.clear()
    with pytest.raises(GateError, match="goal missed: the nearest candidate is"):
        made.compress(**given, steps=steps, goal__max_mb=0.24)
    assert made.calls == []


def changed_rows(folder):
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text("utf-8") + '{"text": "w1 w2 w3", "label": "calm"}\n', "utf-8")


def changed_model(folder):
    headed(folder / "model", LABELS, seed=3, num_hidden_layers=4)


def changed_plan(folder):
    (folder / "plan.yaml").write_text("method: minilm\n", "utf-8")


@pytest.mark.parametrize(
    ("change", "name"),
    [(changed_rows, "rows.jsonl"), (changed_model, "model"), (changed_plan, "plan.yaml")],
)
def test_what_was_tried_on_other_inputs_is_not_reused(change, name, given, tmp_path, capsys):
    shutil.copytree(given["model"], tmp_path / "model")
    shutil.copy(given["data__source"], tmp_path / "rows.jsonl")
    (tmp_path / "plan.yaml").write_text("method: tinybert\n", "utf-8")
    keys = given | {"model": str(tmp_path / "model")}
    # A URL has no path that tells the file apart.
    keys |= {"data__source": (tmp_path / "rows.jsonl").as_uri()}
    keys |= {"plan__distill": {"recipe": str(tmp_path / "plan.yaml")}}
    made = fakes()
    made.compress(**keys, **GOAL)
    (tmp_path / "model" / "README.md").write_text("Read me.", "utf-8")
    made.compress(**keys, goal__max_drop=2.0)
    assert "changed" not in capsys.readouterr().err
    change(tmp_path)
    with pytest.raises(UsageError, match=f"{name} has changed since the run in"):
        made.compress(**keys, goal__max_drop=3.0)
    made.compress(**keys, goal__max_drop=2.0, resume=True)
    assert f"{name} has changed after this run began" in " ".join(capsys.readouterr().err.split())


def test_a_text_that_a_list_of_a_trimming_names_is_an_input(given, tmp_path):
    text, languages = tmp_path / "de.txt", tmp_path / "languages.yaml"
    text.write_text("w1 w2 w3\n", "utf-8")
    languages.write_text(f"de: {text}\n", "utf-8")
    steps = [{"trim": {"data": {"source": str(languages)}}}, {"export": {}}]
    made = fakes(scores=SCORES | {"2-export": 0.9})
    made.compress(**given, steps=steps)
    text.write_text("w4 w5 w6\n", "utf-8")
    with pytest.raises(UsageError, match=r"de\.txt has changed since the run in"):
        made.compress(**given, steps=steps, goal__max_drop=1.0)


def killed(*_, **__):
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("goal", [1.0, 0.5])
def test_a_kill_at_any_of_the_last_writes_changes_nothing(goal, given, tmp_path, monkeypatch):
    """What a kill would leave before each change of the file system is copied, and continued."""
    made, folder, copies = fakes(), given["output_dir"], []
    if goal != 1.0:
        made.compress(**given, **GOAL)
    verified = [*folder.glob("steps/*/verification*/report.json")]

    def change(*arguments, whole, **options):
        is_last = len([*folder.glob("steps/*/verification*/report.json")]) > len(verified)
        if is_last and str(folder) in str(arguments[0]):
            with monkeypatch.context() as patch:
                for each, original in originals.items():
                    patch.setattr(os, each, original)
                copies.append(tmp_path / str(len(copies)) / "out")
                shutil.copytree(folder, copies[-1])
        return whole(*arguments, **options)

    originals = {
        name: getattr(os, name) for name in ("rename", "replace", "unlink", "rmdir", "mkdir")
    }
    with monkeypatch.context() as patch:
        for name, whole in originals.items():
            patch.setattr(os, name, functools.partial(change, whole=whole))
        made.compress(**given, goal__max_drop=goal, resume=goal != 1.0)
    assert len(copies) > 20
    answer, files = answer_of(folder), state_of(folder)
    for copy in copies:
        made.calls.clear()
        made.compress(**given | {"output_dir": copy}, goal__max_drop=goal, resume=True)
        assert made.calls == []
        same_answer(answer, answer_of(copy))
        assert state_of(copy) == files


def state_of(folder):
    """The files of a compression, and the content of those that name neither times nor places."""
    # A lock that a killed process left locks nothing.
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    files = {path.relative_to(folder): path for path in left}
    timed = ("report", "log.jsonl", "latency", "README", ".manifest", "pareto", "recipe")
    return {
        name: b"" if name.name.startswith(timed) else path.read_bytes()
        for name, path in files.items()
    }


def test_texts_without_labels_are_compared_with_the_model(given, tmp_path):
    lines = [{"text": row["text"]} for row in own_rows("class", 400)]
    data = write(tmp_path / "texts.jsonl", lines)
    result = fakes().compress(**given | {"data__source": str(data)}, **GOAL)
    answer = answer_of(result.folder)
    assert answer.verification.reference == "teacher"
    assert "of agreement with the teacher (accuracy)" in answer.sentence


def test_repeated_texts_are_logged_once_in_a_run_that_reads_them_in_parts(given, caplog):
    caplog.set_level("INFO", "kdcli")
    fakes().compress(**given, **GOAL)
    assert caplog.text.count("repeat an earlier text") == 1


def test_a_vocabulary_is_trimmed_to_the_rows_that_train(given):
    made = fakes()
    result = made.compress(**given | {"plan__trim_from": 0.0}, **GOAL)
    assert "trim 2x32-trimmed" in made.calls
    (file,) = result.folder.rglob("text.train.jsonl")
    assert 0 < len(lines_of(file)) < 400
    assert {row.name for row in answer_of(result.folder).candidates} >= {"2x32-trimmed-onnx"}


@pytest.mark.parametrize("has_labels", [True, False])
def test_the_last_shape_is_trained_without_its_teacher_if_there_are_labels(
    has_labels, given, tmp_path
):
    made = fakes()
    lines = [r if has_labels else {"text": r["text"]} for r in own_rows("class", 400)]
    data = write(tmp_path / "texts.jsonl", lines)
    plan = {"plan__undistilled": True, "plan__shapes": ["2x32"], "data__source": str(data)}
    made.compress(**given | plan, **GOAL)
    assert ("distill 2x32-undistilled" in made.calls) == has_labels
    if has_labels:
        recipe = made.recipes["2x32-undistilled"]
        assert (recipe["method"], recipe["kd"]["weight"]) == ("soft-targets", 0.0)


def test_a_stopped_shape_needs_only_the_time_of_its_remaining_steps(given):
    made = fakes(seconds=dict.fromkeys(("3x32", "2x32", "1x32"), 100.0))
    made.scores |= {"3x32": 0.8, "2x32": 0.7, "1x32": 0.6}
    made.ms |= {"3x32": 6.0}
    shapes = {"plan__shapes": ["3x32", "2x32", "1x32"]}
    with pytest.raises(GateError):
        made.compress(**given | shapes, goal__max_drop=1.0, goal__speedup=1.5, budget=250.0)
    outcomes = {row.name: row.outcome for row in answer_of(given["output_dir"]).candidates}
    # 25 + 25 + 25, 25 for the second rung of two shapes, and 50 for the best one leave 75 seconds.
    assert outcomes.keys() >= {"3x32-onnx", "2x32-onnx"}
    assert outcomes["1x32"] == (
        "trained for 2 of 8 steps only: no time is left to finish its training"
    )


def test_each_kind_of_student_has_a_dry_run_of_its_largest_shape(given):
    made = fakes()
    made.ms |= {"static": 1.0, "3x32": 6.0}
    shapes = {"plan__shapes": ["3x32", "2x32", "static:8"]}
    made.compress(**given | shapes, **GOAL)
    dry_runs = [call for call in made.calls if call.startswith("dry run")]
    assert dry_runs == ["dry run 3x32", "dry run static:8"]


def test_a_single_shape_without_a_budget_is_trained_without_a_dry_run(given):
    made = fakes()
    made.compress(**given | {"plan__shapes": ["2x32"]}, **GOAL)
    assert [c for c in made.calls if "2x32" in c and "measure" not in c] == [
        *("distill 2x32", "export 2x32-onnx", "evaluate verification-2x32-onnx"),
    ]
    made = fakes()
    other = given | {"output_dir": given["output_dir"].with_name("budget")}
    made.compress(**other | {"plan__shapes": ["2x32"]}, **GOAL, budget=60.0)
    assert "dry run 2x32" in made.calls


def test_a_goal_in_the_plan_becomes_the_deepest_shape_that_is_fast_enough(given):
    made = fakes()
    made.ms |= {"3x32": 8.0}
    result = made.compress(**given | {"plan__shapes": ["2x"]}, **GOAL)
    assert [call for call in made.calls if call.startswith("distill")] == ["distill 2x32"]
    assert answer_of(result.folder).chosen == "2x32-onnx"


def test_a_later_goal_knows_the_candidates_of_all_earlier_ones(given):
    made = fakes()
    made.scores["1x32"] = 0.87
    made.compress(**given, **GOAL)
    made.compress(**given, goal__max_drop=5.0, goal__speedup=4.0)
    made.calls.clear()
    made.compress(**given, goal__max_drop=5.0, goal__max_mb=9.0)
    # All candidates are scored next to each other for the first time.
    assert trained(made) == []
    names = {row.name for row in answer_of(given["output_dir"]).candidates}
    assert names >= {"onnx", "2x32-onnx", "1x32-onnx"}


def test_another_bound_of_int8_neither_replaces_a_file_nor_takes_its_scores(given):
    made = fakes()
    made.scores["2x32"] = 0.9
    plan = given | {"plan__backends": ["onnx-int8"], "plan__shapes": ["2x32"]}
    looks = []
    for drop in (2.0, 0.5, 2.0):
        made.compress(**plan, goal__max_drop=drop)
        looks.append(answer_of(given["output_dir"]).verification.look)
    assert looks == [1, 1, 1]
    bounds = [export["max_drop"] for export in made.exports]
    assert bounds == [2.0, 2.0]


@pytest.mark.parametrize(
    ("backend", "reads_rows"), [("onnx-int8", True), ("openvino-int8", True), ("onnx", False)]
)
def test_integers_are_chosen_on_the_rows(backend, reads_rows, given):
    made = fakes()
    made.ms |= {backend: 5.0}
    made.compress(**given | {"plan__backends": [backend], "plan__shapes": ["2x32"]}, **GOAL)
    source = given["data__source"]
    found = {(export["task"], export["data"].source) for export in made.exports}
    assert found == {("own", source) if reads_rows else (None, None)}


def test_the_report_says_how_long_the_models_took_that_were_not_chosen(given):
    made = fakes(seconds={"2x32": 1200.0, "1x32": 2400.0})
    result = made.compress(**given, **GOAL)
    # A quarter of the training of 1x32.
    expected = "The run took 30 min; 10 min went into models that were not chosen"
    assert expected in report_of(result.folder).notes


def test_the_report_says_that_the_run_took_longer_than_its_budget(given):
    made = fakes(seconds={"2x32": 80.0, "evaluate": 20.0}, estimates={"2x32": 10.0})
    keys = given | {"plan__shapes": ["2x32"]}
    result = made.compress(**keys, goal__max_drop=1.0, budget=50.0)
    (took,) = [note for note in report_of(result.folder).notes if "The run took" in note]
    assert took.startswith(f"The run took {made.now:.0f} s, longer than --budget 50 s; ")


def test_backends_that_are_not_installed_are_skipped(given):
    made = fakes(missing={"openvino"})
    plan = {"plan__backends": ["onnx", "openvino-int8"]}
    result = made.compress(**given | plan, **GOAL)
    outcomes = {row.name: row.outcome for row in answer_of(result.folder).candidates}
    assert outcomes["openvino-int8"] == "openvino needs a library"
    # A candidate whose backend is gone answers nothing.
    made.missing.add("onnx")
    with pytest.raises(MachineError, match="none of the backends is installed here"):
        made.compress(**given | plan, goal__max_drop=2.0)
    steps = [{"distill": {"student": {"to": ["2x32"]}}}, {"quantize": {"format": "openvino"}}]
    other = given | {"output_dir": given["output_dir"].with_name("pipeline")}
    with pytest.raises(MachineError, match="openvino needs a library"):
        made.compress(**other, steps=steps)
    assert not other["output_dir"].exists()


@pytest.mark.parametrize(("speedup", "is_written"), [(6.0, False), (11.0, True)])
def test_a_backend_that_is_too_slow_is_written_only_if_every_shape_is_too_slow(
    speedup, is_written, given
):
    made = fakes()
    made.scores |= {"onnx-int8": 0.5}
    made.ms |= {"onnx": 5.0, "onnx-int8": 1.5, "1x32": 1.0}
    plan = {"plan__backends": ["onnx", "onnx-int8"], "plan__shapes": ["1x32"], "plan__prune": {}}
    with pytest.raises(GateError):
        made.compress(**given | plan, goal__max_drop=1.0, goal__speedup=speedup)
    assert ("export onnx" in made.calls) == is_written
    outcomes = {row.name: row.outcome for row in answer_of(given["output_dir"]).candidates}
    why = f"the model itself is only 2.0 times as fast on it; the goal is {speedup:g}"
    assert (outcomes["onnx"] == why) != is_written


def test_the_shapes_of_a_plan_without_any_come_from_large_to_small(given):
    made = fakes()
    made.ms |= {"3x32": 8.0, "1x16": 1.0}
    made.compress(**given | {"plan__shapes": []}, **GOAL)
    assert made.calls[1] == "measure teacher 3x32 2x32 1x32 2x16 1x16"


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"goal__max_mb": 100.0}, UsageError, "meets every limit already: 0.249 MB"),
        ({"goal__max_latency_ms": 99.0}, UsageError, "meets every limit already: 10.00 ms, 0.249"),
        *(
            (
                {"goal__speedup": 20.0, "plan__prune": prune},
                GateError,
                "1x32 comes closest: even untrained, it is only 5.0 times as fast; the goal is 20",
            )
            # 1x32 has a quarter of the layers' weights.
            for prune in (None, {"sparsity": [0.7]})
        ),
    ],
)
def test_what_timing_tells_is_said_before_anything_is_written(keys, error, said, given):
    made = fakes()
    with pytest.raises(error, match=said):
        made.compress(**given | keys)
    assert not given["output_dir"].exists()
    assert all(call.startswith("measure") for call in made.calls)


def test_a_limit_of_size_with_a_budget_measures_latencies_only_at_the_end(given):
    made = fakes(seconds={"measure": 60.0}, mb={"onnx": 0.24, "2x32": 0.21, "1x32": 0.1})
    keys = given | {"plan__backends": ["onnx", "onnx-int8"]}
    made.compress(**keys, goal__max_mb=0.2, budget=20.0)
    *_, measured, _ = made.calls
    assert [call for call in made.calls if call.startswith("measure")] == [measured]
    assert answer_of(given["output_dir"]).chosen == "1x32-onnx-int8"


def test_a_budget_that_ends_while_models_are_timed_says_how_long_that_takes(given):
    made = fakes(seconds={"measure": 60.0})
    why = "it ended while models were timed and compared, which takes about 5 min in all"
    with pytest.raises(UsageError, match=why) as refusal:
        made.compress(**given, **GOAL, budget=20.0)
    # One of five models was prepared by then.
    assert refusal.value.hint == (
        "use --budget 10m or more, because the candidates are trained after that"
    )
    assert not given["output_dir"].exists()


def test_a_budget_that_fine_tuning_alone_breaks_is_refused(given, tmp_path):
    encoder(tmp_path / "plain", num_hidden_layers=4)
    made = fakes(seconds={"finetune": 99.0})
    with pytest.raises(UsageError, match="fine-tuning comes first, and it takes about 99 s, 60 s"):
        made.compress(**given | {"model": str(tmp_path / "plain")}, **GOAL, budget=60.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: json.dumps(json.loads(text) | {"schema": 1}), "is a report of schema 1"),
        (lambda text: text[: len(text) // 2], "not valid JSON"),
    ],
)
def test_a_report_that_cannot_be_read_answers_nothing(change, why, given, capsys, tmp_path):
    made = fakes()
    made.compress(**given, **GOAL)
    file = given["output_dir"] / "report.json"
    file.write_text(change(file.read_text("utf-8")), "utf-8")
    capsys.readouterr()
    with pytest.raises(UsageError, match="is not empty"):
        made.compress(**given, goal__max_drop=2.0)
    assert why in " ".join(capsys.readouterr().err.split())


def test_other_timings_need_no_other_scores(given):
    made = fakes()
    made.compress(**given, **GOAL)
    made.calls.clear()
    made.compress(**given | {"measure__min_runs": 3}, goal__max_drop=2.0, resume=True)
    assert calls_of(made) == ["measure teacher onnx 2x32-onnx"]


def test_latencies_are_measured_when_they_can_decide(given):
    """As long as no candidate keeps the quality, the next one is tried without them."""
    made = fakes(scores=dict.fromkeys(SCORES, 0.5) | {"teacher": 0.9})
    with pytest.raises(GateError, match="goal missed: the nearest candidate is"):
        made.compress(**given, goal__max_drop=1.0, goal__speedup=1.1)
    scored = [call for call in calls_of(made) if call.split()[0] in ("evaluate", "measure")]
    assert scored[2:] == [
        *["evaluate selection"] * 3,
        "measure teacher onnx 1x32-onnx 2x32-onnx",
        "evaluate verification-1x32-onnx",
    ]


def test_a_model_that_was_not_measured_is_named_and_measured_again(given):
    made = fakes(unmeasured={"onnx"})
    why = "the latency of onnx was not measured: out of memory"
    with pytest.raises(MachineError, match=why):
        made.compress(**given, **GOAL)
    made.unmeasured.clear()
    made.compress(**given, **GOAL, resume=True)
    assert calls_of(made).count("evaluate selection") == 1
    assert calls_of(made).count("measure teacher onnx 2x32-onnx") == 2
