"""What `compress` chooses among candidates, and how it says so."""

import io
import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from transformers import BertConfig, BertModel

from kdcli.deploy.measurements import Speedup
from kdcli.deploy.untrained import UntrainedTimes, min_mb
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, UsageError
from kdcli.models.card import describe
from kdcli.recipe.sections import RunOptions
from kdcli.report import schema
from kdcli.report.charts import compression as charts_module
from kdcli.report.schema import Compression, Throughput
from kdcli.report.schema_decisions import ClassChange, Decision, PairedValue
from kdcli.report.sections.price import price_sentence
from kdcli.types import ModelShape
from kdcli.verbs.compress import front, result
from kdcli.verbs.compress.choice import choose, dominated, verified_misses
from kdcli.verbs.compress.halving import RungScore, halve
from kdcli.verbs.compress.limits import GoalSettings, conflict
from kdcli.verbs.compress.recipes import dotted
from kdcli.verbs.compress.record import Record
from kdcli.verbs.compress.run import check_reachable, slow_backends
from kdcli.verbs.compress.runner import Steps
from kdcli.verbs.compress.scores import CandidateScores, ScoredModel, Verification, confidence_of
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.settings import CompressData, CompressRecipe, seconds_of
from kdcli.verbs.compress.shapes import Untrained, shapes_of
from kdcli.verbs.compress.summary import describe_next, sentence
from kdcli.verbs.compress.trainers import Trainer
from kdcli.verbs.compress.verbs import VERBS


def measured(name, score, ms, mb, low=None, high=None, unstable=False):
    ratio = 10 / ms
    quartiles = {"median": ratio, "low": 0.8 * ratio, "high": 1.2 * ratio}
    speedup = Speedup(baseline="teacher", unstable=unstable, **quartiles)
    ends = low or score, high or score
    return ScoredModel(
        name, Path(name), score, *ends, ms, None if name == "teacher" else speedup, mb, unstable
    )


def scores_of(*candidates):
    return CandidateScores(
        None, "accuracy", 500, measured("teacher", 0.9, 10.0, 8.0), list(candidates)
    )


def said_of(scores, chosen, missed, goal, **verified):
    verification = Verification(None, 500, scores.teacher, chosen, 1, 0.95)
    verification = replace(verification, **verified)
    return sentence(scores, verification, missed, goal, model="big", has_labels=True)


def compression_of(search, chosen):
    """The part of a report that holds the candidates of a search."""
    return Compression(
        task="own",
        metric="accuracy",
        rows=500,
        goal={limit.key: limit.value for limit in search.goal.limits},
        strict=search.goal.strict,
        met=True,
        chosen=chosen.name,
        sentence="",
        candidates=result.candidate_rows(search, chosen),
    )


def search_of(tmp_path, *, model="m", plan=None, **goal):
    recipe = CompressRecipe(model=model, task="own", goal=GoalSettings(**goal), plan=plan or {})
    steps = Steps(tmp_path, RunOptions(), math.inf, StopRequest(), Record(), time.monotonic)
    trainer = Trainer(recipe, VERBS, "rows")
    return Search(recipe, VERBS, steps, trainer, model, True, "class", known=0, missing={})


def test_the_fastest_that_keeps_the_quality_is_chosen_and_the_smallest_of_those_alike():
    one, small, bad = (
        measured("a", 0.895, 2.0, 4.0),
        measured("b", 0.893, 2.05, 2.0),
        measured("c", 0.8, 1.0, 1.0),
    )
    assert choose(GoalSettings(max_drop=1.0), scores_of(one, small, bad)) == (small, {})
    assert choose(GoalSettings(speedup=4.0), scores_of(one, small, bad)) == (one, {})
    chosen, missed = choose(GoalSettings(max_drop=1.0, speedup=8.0), scores_of(one, bad))
    assert (chosen, missed) == (one, {"speedup": "5.00 times as fast, not 8"})
    said = said_of(scores_of(one), one, missed, GoalSettings(max_drop=1.0, speedup=8.0))
    assert said.startswith(
        "The goal cannot be met with what was tried. Nearest: a is 5.0 times as fast as big "
        "(4.0–6.0; 2.00 ms a text instead of 10.00) "
    )


def test_of_an_unstable_measurement_the_lower_bound_is_stated_and_must_meet_the_goal():
    one = measured("a", 0.9, 2.0, 4.0, unstable=True)
    judged = scores_of(one)
    met = GoalSettings(speedup=4.0)
    assert said_of(judged, *choose(met, judged), met).startswith(
        "a is at least 4.0 times as fast as big (unstable measurement; at most 2.00 ms a text) "
    )
    assert choose(GoalSettings(speedup=4.5), judged)[1] == {
        "speedup": "at least 4.00 times as fast (unstable measurement), not 4.5"
    }
    assert choose(GoalSettings(speedup=4.5), scores_of(measured("a", 0.9, 2.0, 4.0)))[1] == {}
    assert choose(GoalSettings(max_latency_ms=1.5), judged)[1] == {
        "max_latency_ms": "2.00 ms (unstable measurement), 0.50 above 1.5"
    }


def test_times_that_may_even_be_slower_give_no_factor_and_meet_no_speedup():
    ratio = Speedup(baseline="teacher", median=40.0, low=0.9, high=60.0, unstable=True)
    one = replace(measured("a", 0.9, 10.12, 4.0, unstable=True), speedup=ratio)
    judged, goal = scores_of(one), GoalSettings(max_drop=1.0)
    assert said_of(judged, *choose(goal, judged), goal).startswith(
        "a is 2.0 times smaller (4.00 MB instead of 8.00). The times are unstable (at most 10.12 "
        "ms a text) and give no speed-up; measure again on an idle machine, with kdcli benchmark. "
        "It loses no accuracy"
    )
    assert choose(GoalSettings(speedup=1.5), judged)[1] == {
        "speedup": "no speed-up (unstable measurement), not 1.5"
    }


def test_an_unstable_teacher_has_no_milliseconds_in_the_sentence():
    one = measured("a", 0.9, 2.0, 4.0, unstable=True)
    judged, goal = scores_of(replace(one, unstable=False)), GoalSettings(speedup=4.0)
    assert "(unstable measurement; 2.00 ms a text) and" in said_of(
        judged, *choose(goal, judged), goal
    )


def test_the_sentence_says_what_is_gained_and_lost_and_on_how_many_rows():
    one, goal = measured("a", 0.895, 2.0, 4.0, low=0.89, high=0.902), GoalSettings(max_drop=1.0)
    judged = scores_of(one)
    assert said_of(judged, *choose(goal, judged), goal) == (
        "a is 5.0 times as fast as big (4.0–6.0; 2.00 ms a text instead of 10.00) and 2.0 times "
        "smaller (4.00 MB instead of 8.00). It loses 0.50 points of accuracy (0.8950 instead of "
        "0.9000; 95 % interval of the loss -0.20 to 1.00) on 500 verification rows."
    )
    larger = scores_of(replace(one, mb=20.0))
    assert "and 2.5 times as large (20.0 MB instead of 8.00)" in said_of(
        larger, *choose(goal, larger), goal
    )
    better = scores_of(measured("a", 0.905, 2.0, 4.0, low=0.9, high=0.91))
    said = said_of(better, *choose(goal, better), goal)
    assert "It loses no accuracy (0.9050 instead of 0.9000; 95 % interval of the loss -1.00" in said


def batch(texts_per_second, price, unstable=False):
    """The throughput of a model, and its cost at a price per hour."""
    cost = price / 3600 / texts_per_second * 1e6
    return Throughput(
        batch_size=8,
        seq_len=128,
        texts_per_second=texts_per_second,
        unstable=unstable,
        cost_per_million=cost,
    )


@pytest.mark.parametrize(
    ("unstable", "cost"),
    [
        ((False, False), "cost 0.14 instead of 0.69"),
        ((True, False), "cost at most 0.14 (unstable measurement) instead of 0.69"),
        ((False, True), "cost 0.14"),
    ],
)
def test_the_price_has_a_sentence_of_its_own(unstable, cost):
    model, teacher = batch(1000, 0.5, unstable[0]), batch(200, 0.5, unstable[1])
    assert price_sentence(0.5, model, teacher) == (
        f"At 0.5 an hour, a million texts {cost}, in batches of 8 × 128 tokens."
    )
    assert price_sentence(None, model, teacher) == ""


def test_a_loss_of_nothing_has_neither_digits_nor_a_sign():
    one, goal = measured("a", 0.89998, 2.0, 4.0, low=0.89, high=0.90001), GoalSettings(max_drop=1.0)
    judged = scores_of(one)
    said = said_of(judged, *choose(goal, judged), goal)
    assert "It loses no accuracy (0.9000 instead of 0.9000; 95 % interval of the loss 0.00" in said


def test_strict_asks_the_lower_end_of_the_interval():
    one = measured("a", 0.895, 2.0, 4.0, low=0.885, high=0.905)
    teacher = scores_of().teacher
    assert GoalSettings(max_drop=1.0).misses(one, teacher) == {}
    assert list(GoalSettings(max_drop=1.0, strict=True).misses(one, teacher)) == ["max_drop"]
    strict = GoalSettings(max_drop=1.0, strict=True)
    assert choose(strict, scores_of(one, measured("safe", 0.9, 9.0, 8.0)))[0].name == "safe"
    assert "1.50 points lost at the interval's lower end" in said_of(
        scores_of(one), *choose(strict, scores_of(one)), strict
    )
    # What is allowed exactly is allowed, whatever floating point makes of it.
    assert GoalSettings(max_drop=1.0).misses(measured("b", 0.89, 2.0, 4.0), teacher) == {}
    assert list(GoalSettings(max_latency_ms=1.0, max_mb=3.0).misses(one, teacher)) == [
        "max_latency_ms",
        "max_mb",
    ]


def losing(points, count=100):
    """The comparison of a model that loses points in its only class, for a limit of 1 point."""
    value = PairedValue(baseline=0.9, model=0.9 - points / 100, low=0.0, high=0.0)
    changed = {"name": "yes", "metrics": {"f1": value}, "both": 1}
    one = ClassChange(**changed, count=count, enough=count >= 100, only_baseline=0, only_model=0)
    return Decision(
        model="a",
        baseline="teacher",
        task="own",
        set="",
        n=500,
        reference="labels",
        metric="f1",
        min_count=100,
        classes=[one],
        agreement=0.9,
    )


def test_a_limit_for_classes_chooses_among_the_candidates(tmp_path):
    fast = replace(measured("a", 0.9, 1.0, 4.0), decisions=(losing(6.0),))
    kept = replace(measured("b", 0.9, 5.0, 8.0), decisions=(losing(0.0),))
    scores = scores_of(fast, kept)
    goal = GoalSettings(max_drop=1.0, max_class_drop=2.0)
    assert choose(goal, scores) == (kept, {})
    search = search_of(tmp_path, max_drop=1.0, max_class_drop=2.0)
    search.scores = scores
    assert search.met == "b"
    outcomes = {row.name: row.outcome for row in result.candidate_rows(search, kept)}
    assert "6.00 points of F1 in class yes" in outcomes["a"]
    # Quality comes before speed, if no candidate meets the goal.
    faster = GoalSettings(max_class_drop=2.0, speedup=4.0)
    assert choose(faster, scores)[0] == kept
    # With too few selection rows in every class, only the verification rows can tell.
    few = replace(fast, decisions=(losing(6.0, count=49),))
    assert choose(goal, scores_of(few, kept)) == (few, {})
    verified = Verification(SimpleNamespace(decisions=few.decisions), 9, few, few, 1, 0.95)
    (missed,) = verified_misses(goal, {}, verified).values()
    assert "no class has the 50 examples" in missed


def test_another_limit_for_classes_needs_another_number_of_rows():
    # The comparison was made for a limit of 1 point, which needs 100 rows in a class.
    model = replace(measured("a", 0.9, 1.0, 4.0), decisions=(losing(6.0, count=60),))
    verified = Verification(None, 500, scores_of().teacher, model, 1, 0.95)
    (missed,) = verified_misses(GoalSettings(max_class_drop=2.0), {}, verified).values()
    assert "loses 6.00 points of F1 in class yes (60 examples), more than 2" in missed


def test_a_goal_that_only_the_verification_rows_miss_is_said_to_be_met_on_the_others():
    one, goal = measured("a", 0.895, 2.0, 4.0), GoalSettings(max_drop=1.0)
    worse = replace(one, score=0.88, low=0.87, high=0.89)
    missed = verified_misses(
        goal,
        {},
        Verification(SimpleNamespace(decisions=[]), 500, scores_of().teacher, worse, 1, 0.95),
    )
    said = sentence(
        scores_of(one),
        Verification(None, 500, scores_of().teacher, worse, 1, 0.95),
        missed,
        goal,
        model="big",
        has_labels=True,
    )
    assert said.startswith(
        "a met the goal on the selection rows but misses it on the verification rows: 2.00 points "
        "lost, 1.00 more than 1. a is 5.0 times as fast as big "
    )


@pytest.mark.parametrize(
    ("low", "score", "high", "is_stated"),
    [
        (0.846, 0.863, 0.882, True),
        (0.846, 0.863, 0.886, False),  # the intervals overlap
        (0.880, 0.881, 0.882, False),  # 0.4 points apart
        (0.897, 0.898, 0.899, True),  # the selection rows are the easier ones
    ],
)
def test_a_loss_that_differs_between_the_sets_of_rows_is_stated(low, score, high, is_stated):
    one = measured("a", score, 2.0, 4.0, low=low, high=high)
    chosen = replace(one, score=0.885, low=0.883, high=0.892)
    said = said_of(scores_of(one), chosen, {}, GoalSettings(max_drop=2.0))
    points, near, far = (100 * (0.9 - value) for value in (score, high, low))
    expected = (
        f". On the 500 selection rows it loses {points:.2f} points of accuracy (95 % interval of "
        f"the loss {near:.2f} to {far:.2f}). These losses differ by more than chance explains: "
        "expect the one whose rows resemble your own texts."
    )
    assert said.endswith(expected) == is_stated
    assert ("selection rows" in said) == is_stated


def verified(one, score):
    """The scores of a candidate on the verification rows, on which the teacher has 0.9."""
    chosen = replace(one, score=score, low=score, high=score)
    report = SimpleNamespace(decisions=[])
    return Verification(report, 500, scores_of().teacher, chosen, 1, 0.95)


MISSED = {"max_drop": "2.00 points lost"}


def test_a_goal_that_the_verification_rows_miss_names_the_next_candidate(tmp_path):
    # The candidate that failed dominates the next one on the selection rows.
    one, better = measured("a", 0.9, 2.0, 4.0), measured("b", 0.8976, 3.0, 5.5)
    search = search_of(tmp_path, max_drop=1.0)
    search.scores = scores_of(one, better, measured("c", 0.7, 1.0, 1.0))
    failed = verified(one, 0.88)
    assert result.next_candidate(search, MISSED, failed) == better
    assert describe_next(search.scores, better, "kdcli compress m") == (
        "The next candidate is b: 0.8976 accuracy on the selection rows, 3.3 times as fast, 5.50 "
        "MB. To verify it, run: kdcli compress m"
    )
    # A goal that is met needs no other candidate, and neither does one that the selection rows
    # miss.
    assert result.next_candidate(search, {}, verified(one, 0.9)) is None
    search.scores = scores_of(replace(one, score=0.7), better)
    assert result.next_candidate(search, MISSED, failed) is None
    # No other candidate meets the goal.
    search.scores = scores_of(one)
    assert result.next_candidate(search, MISSED, failed) is None


def test_a_candidate_that_failed_is_not_chosen_again_for_the_goal_or_a_tighter_one(tmp_path):
    one, two = measured("a", 0.9, 2.0, 4.0), measured("b", 0.896, 3.0, 5.0)
    known = replace(scores_of(one, two), verified={"a": verified(one, 0.88)})
    assert choose(GoalSettings(max_drop=1.0), known) == (two, {})
    assert choose(GoalSettings(max_drop=0.5), known) == (two, {})
    # It lost 2 points, which a looser goal allows.
    assert choose(GoalSettings(max_drop=2.0), known) == (one, {})
    search = search_of(tmp_path, max_drop=1.0)
    search.scores = known
    assert search.met == "b"
    outcomes = {row.name: row.outcome for row in result.candidate_rows(search, two)}
    assert outcomes == {
        "teacher": "",
        "a": "2.00 points lost, 1.00 more than 1, on the verification rows",
        "b": "chosen",
    }
    # If it is the only one, it stays the nearest.
    alone = replace(known, candidates=[one])
    chosen, missed = choose(GoalSettings(max_drop=1.0), alone)
    assert (chosen, missed.keys()) == (one, {"max_drop"})


def test_verified_quality_counts_for_another_goal_also_if_the_selection_rows_are_harder():
    small, large = measured("a", 0.86, 2.0, 4.0), measured("b", 0.9, 3.0, 9.0)
    goal = GoalSettings(max_drop=1.0, max_mb=5.0)
    chosen, missed = choose(goal, scores_of(small, large))
    assert (chosen, missed.keys()) == (large, {"max_mb"})
    known = replace(scores_of(small, large), verified={"a": verified(small, 0.895)})
    assert choose(goal, known) == (small, {})
    chosen, missed = choose(goal.model_copy(update={"max_mb": 3.0}), known)
    assert missed.keys() == {"max_mb"}


def test_after_a_failure_the_best_score_of_another_training_comes_first():
    failed = replace(measured("2x8-trimmed", 0.91, 2.0, 4.0), parent="2x8")
    same = replace(measured("2x8", 0.91, 2.1, 5.0), parent="2x8")
    fast, best = measured("int8", 0.895, 3.0, 8.0), measured("onnx", 0.9, 5.0, 9.0)
    known = replace(
        scores_of(failed, same, fast, best), verified={failed.name: verified(failed, 0.8)}
    )
    goal = GoalSettings(max_drop=1.0)
    assert choose(goal, known) == (best, {})
    known = replace(known, candidates=[failed, same])
    assert choose(goal, known) == (same, {})


def test_a_failure_that_the_selection_rows_foresaw_leaves_the_order_of_choice():
    fast, middle, slow = (
        measured("1x32", 0.87, 1.0, 2.0),
        measured("2x32", 0.893, 2.0, 3.0),
        measured("onnx", 0.9, 9.0, 8.0),
    )
    known = replace(scores_of(fast, middle, slow), verified={"1x32": verified(fast, 0.87)})
    assert choose(GoalSettings(max_drop=5.0), known) == (fast, {})
    # It fails a tighter goal on both parts of the rows, so the selection rows were right.
    assert choose(GoalSettings(max_drop=1.0), known) == (middle, {})
    # Had they been wrong, the best score would come first.
    wrong = replace(known, verified={"2x32": verified(middle, 0.87)})
    assert choose(GoalSettings(max_drop=1.0), wrong) == (slow, {})


def test_the_intervals_of_all_looks_together_err_in_at_most_a_tenth_of_the_cases():
    levels = [confidence_of(look) for look in range(1, 40)]
    assert levels[:4] == [0.95, 0.975, 0.9875, 0.99375]
    assert sum(1 - level for level in levels) <= 0.1
    assert levels == sorted(levels)


def test_the_front_of_a_directory_without_a_finished_run(tmp_path):
    with pytest.raises(UsageError, match="no run at") as caught:
        front.Front.read(tmp_path / "nowhere")
    assert "finished run" in caught.value.hint
    RunDir.claim(tmp_path / "started", "x: 1\n").release()
    with pytest.raises(UsageError, match="is not finished") as caught:
        front.Front.read(tmp_path / "started")
    assert "--resume" in caught.value.hint


LONG_NAME = "2x64-trimmed-onnx-int8-within-0.9"


@pytest.mark.parametrize(("chosen", "marked"), [("teacher", ""), (LONG_NAME, "(chosen)")])
def test_no_name_on_the_front_is_cut_off_and_the_chosen_one_is_marked(chosen, marked):
    name = LONG_NAME
    candidate = schema.Candidate(name=name, score=0.9, ms=1.0, mb=1.0, outcome="")
    compression = SimpleNamespace(
        candidates=[candidate], metric="agreement", rows=400, chosen=chosen
    )
    table, *_ = front.Front(Path(), compression, [name], [name]).renderables()
    console = Console(width=60, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == f"{name}{marked}"


def test_a_candidate_that_is_worse_in_every_respect_is_not_offered(tmp_path):
    untrimmed = measured("2x8-int8", 0.895, 2.0, 4.0)
    # Other work makes the larger one look a little faster.
    larger = measured("2x8-trimmed-int8", 0.895, 1.95, 9.0)
    goal, scores = GoalSettings(max_drop=1.0), scores_of(untrimmed, larger)
    assert dominated(goal, scores) == {"2x8-trimmed-int8": "2x8-int8"}
    assert choose(GoalSettings(speedup=4.0), scores) == (untrimmed, {})
    search = search_of(tmp_path, max_drop=1.0)
    search.scores = scores
    outcomes = {row.name: row.outcome for row in result.candidate_rows(search, untrimmed)}
    assert outcomes["2x8-trimmed-int8"] == "no better than 2x8-int8"

    def fronts(search, chosen):
        compression = compression_of(search, chosen)
        drawn = tuple(
            charts_module._draw(Figure().add_subplot(), compression, cost, ranges)
            for cost in ("ms", "mb")
            for ranges in [charts_module._ranges(compression, cost)]
        )
        read = front.Front.of(tmp_path, compression)
        assert (read.fast, read.small) == drawn
        return drawn

    assert fronts(search, untrimmed) == (["2x8-int8", "teacher"],) * 2
    # Another limit that only the larger one meets keeps it in the choice and on the front.
    strict = GoalSettings(max_drop=1.0, strict=True)
    unsure = scores_of(replace(untrimmed, low=0.88), larger)
    assert choose(strict, unsure) == (larger, {})
    search = search_of(tmp_path, max_drop=1.0, strict=True)
    search.scores = unsure
    assert fronts(search, larger)[0] == ["2x8-trimmed-int8", "teacher"]
    for better in (replace(larger, score=0.896), replace(larger, ms=1.8), replace(larger, mb=3.9)):
        assert "2x8-trimmed-int8" not in dominated(goal, scores_of(untrimmed, better))


def test_only_a_candidate_that_is_offered_excludes_another_one():
    # Each is as fast as the next one, but the last one is 8 % slower than the first one.
    fast, middle, slow = (
        measured("fast", 0.895, 1.0, 4.0),
        measured("middle", 0.896, 1.04, 3.9),
        measured("slow", 0.897, 1.08, 3.8),
    )
    goal = GoalSettings(max_drop=1.0)
    for order in itertools.permutations((fast, middle, slow)):
        assert dominated(goal, scores_of(*order)) == {"middle": "slow"}
        assert choose(goal, scores_of(*order)) == (fast, {})


def test_the_same_limit_holds_on_the_selection_and_the_verification_rows():
    goal, teacher = GoalSettings(max_drop=0.3), measured("teacher", 0.9, 10.0, 8.0)
    # Both lose one or two of 400 rows.
    fast, kept = measured("a", 0.895, 2.0, 4.0), measured("b", 0.8975, 3.0, 4.0)
    assert choose(goal, scores_of(fast, kept)) == (kept, {})
    for one, missed in ((fast, {"max_drop"}), (kept, set())):
        verified = Verification(SimpleNamespace(decisions=[]), 400, teacher, one, 1, 0.95)
        assert verified_misses(goal, {}, verified).keys() == missed
        assert goal.misses(one, teacher).keys() == missed


def test_limits_that_contradict_each_other_are_named():
    good, fast = measured("a", 0.9, 9.0, 8.0), measured("b", 0.5, 1.0, 8.0)
    goal = GoalSettings(max_drop=1.0, speedup=5.0)
    judged = scores_of(good, fast)
    said = "--max-drop and --speedup contradict each other here: each can be met, but not both."
    assert said_of(judged, *choose(goal, judged), goal).endswith(said)
    assert (
        conflict([goal.misses(one, judged.teacher) for one in (good, measured("c", 0.9, 1.0, 8.0))])
        == ""
    )
    assert conflict([goal.misses(good, judged.teacher)]) == ""


def test_the_better_half_stays_and_within_the_goal_the_faster_is_better(capsys):
    points = {"4x8": 0.9, "3x8": 0.895, "2x8": 0.7, "1x8": 0.5}
    scores = {name: RungScore(value, "accuracy") for name, value in points.items()}
    times = {name: UntrainedTimes(ms=float(name[0])) for name in scores}
    goal = GoalSettings(max_drop=1.0)
    assert halve(goal, scores, times, last=False) == (["3x8", "4x8"], ["2x8", "1x8"])
    assert "stopping 2x8 (accuracy 0.7000): 4x8 has accuracy 0.9000\n" in capsys.readouterr().err
    assert halve(goal, scores, times, last=True)[0] == ["3x8"]
    why = "3x8 scores within --max-drop of the best and is faster"
    assert f"stopping 4x8 (accuracy 0.9000): {why}\n" in capsys.readouterr().err
    assert halve(GoalSettings(speedup=2.0), scores, times, last=True)[0] == ["4x8"]


def test_a_loss_has_no_unit_in_common_with_the_goal():
    scores = {"4x8": RungScore(0.100), "2x8": RungScore(0.105), "1x8": RungScore(0.100)}
    times = {name: UntrainedTimes(ms=float(name[0])) for name in scores}
    kept, stopped = halve(GoalSettings(max_drop=1.0), scores, times, last=False)
    assert (kept, stopped) == (["1x8", "4x8"], ["2x8"])


@pytest.mark.parametrize(
    ("rows", "epochs"), [(100, 10.0), (6_000, 10.0), (30_000, 3.0), (60_000, 1.5), (10**6, 1.0)]
)
def test_small_data_are_read_more_often(rows, epochs):
    keys = Trainer(CompressRecipe(), VERBS, "rows").distill_defaults("3x384", 768, lambda: rows)
    assert (keys["train.epochs"], keys["train.lr"]) == (epochs, 1.5e-4)


@pytest.mark.parametrize(
    ("keys", "schedule"),
    [
        ({}, (1.0, 2000)),
        ({"train.epochs": 2}, (2.0, None)),
        ({"train": {"epochs": 2, "max_steps": 50}}, (2.0, 50)),
    ],
)
def test_epochs_of_the_plan_replace_the_steps_of_the_embedding_recipe(keys, schedule):
    trained = []
    verbs = replace(VERBS, distill=lambda resolved, _: trained.append(resolved))
    recipe = CompressRecipe(model="m", task="embedding", data=CompressData(source="texts.txt"))
    keys = {"train.lr": 1e-3, **keys}
    Trainer(recipe, verbs, "text").distill("3x384", "m", keys, "3x384").call(RunOptions())
    train = trained[0].recipe.train
    assert (train.epochs, train.max_steps) == schedule
    assert (train.batch_size, train.lr) == (64, 1e-3)


@pytest.mark.parametrize(
    ("rows", "given", "keys"),
    [
        (500, {}, {"train.epochs": 10.0}),
        (12_799, {}, {"train.epochs": 10.0}),
        (12_800, {}, {}),
        (2_000, {"train": {"batch_size": 8}}, {}),
        (20_000, {"train.batch_size": 512}, {"train.epochs": 10.0}),
        (20_000, {"workload": {"rows": 500}}, {"train.epochs": 10.0}),
    ],
)
def test_an_embedding_model_reads_few_texts_at_most_ten_times(rows, given, keys):
    data = CompressData(source="texts.txt")
    recipe = CompressRecipe(model="m", task="embedding", data=data, plan={"distill": given})
    assert Trainer(recipe, VERBS, "text").distill_defaults("3x384", 384, lambda: rows) == keys
    assert Trainer(recipe, VERBS, "text").distill_defaults("static:16", 384, lambda: rows) == {}


@pytest.mark.parametrize(
    ("settings", "column"),
    [
        ({"task": "embedding"}, "body"),
        ({"task": "embedding", "text": "other.txt"}, None),
        # The rows are pairs, of which this column has the first texts.
        ({"task": "own", "pooling": "mean"}, None),
    ],
)
def test_a_student_learns_from_the_named_column(settings, column):
    trained = []
    verbs = replace(VERBS, distill=lambda resolved, _: trained.append(resolved))
    data = CompressData(source="rows.jsonl", columns={"text": "body"})
    recipe = CompressRecipe(model="m", data=data, **settings)
    Trainer(recipe, verbs, "text").distill("3x384", "m", {}, "3x384").call(RunOptions())
    assert trained[0].recipe.data.column == column


@pytest.mark.parametrize("text", [None, "other.txt"])
def test_texts_that_are_not_the_rows_do_not_bound_the_steps(text):
    recipe = CompressRecipe(model="m", task="stsb", text=text)
    assert Trainer(recipe, VERBS, "text").distill_defaults("3x384", 384, lambda: 500) == {}


def faster(speedup):
    return UntrainedTimes(1.0, speedup, 1.0, speedup)


@pytest.mark.parametrize(
    ("shapes", "slow"),
    [
        ({"1x8": faster(7.0)}, {"onnx"}),
        # If no shape is fast enough, the nearest model may be the model on a backend.
        ({"1x8": faster(4.0)}, set()),
    ],
)
def test_a_backend_that_is_too_slow_is_not_written(shapes, slow):
    backends = {"onnx": faster(2.0), "onnx-int8": faster(6.5)}
    untrained = Untrained(faster(1.0), backends, "onnx-int8", shapes)
    skipped = slow_backends(GoalSettings(speedup=6.0), untrained)
    assert set(skipped) == slow
    why = "the model itself is only 2.0 times as fast on it; the goal is 6"
    assert set(skipped.values()) <= {why}


def test_the_size_of_a_models_weights_has_a_lower_bound_on_each_backend():
    shape = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    card = describe(BertModel(BertConfig(vocab_size=40, intermediate_size=16, **shape)), "m", None)
    bounds = {
        name: 1e6 * min_mb(card, name, keeps_vocabulary=True) / card.params_total
        for name in ("onnx", "openvino-fp32", "onnx-fp16", "onnx-int8", "onnx-q4", "sparse")
    }
    assert list(bounds.values()) == pytest.approx([4.0, 4.0, 2.0, 1.0, 0.5, 0.0])
    layers = min_mb(card, "onnx-int8", keeps_vocabulary=False)
    assert 1e6 * layers == pytest.approx(card.params_transformer)


def test_a_backend_on_which_the_model_is_too_large_is_skipped(tmp_path):
    backends = {"onnx": replace(faster(9.0), min_mb=4.0), "onnx-int8": faster(9.0)}
    untrained = Untrained(faster(1.0), backends, "onnx-int8", {"1x8": faster(9.0)})
    why = "the model itself takes at least 4.0 MB, more than 2"
    assert slow_backends(GoalSettings(max_mb=2.0), untrained) == {"onnx": why}
    # Without a shape or a backend that can be small enough, nothing is trained.
    search = search_of(tmp_path, plan={"prune": None}, max_mb=2.0)
    large = {"1x8": replace(faster(9.0), min_mb=3.0)}
    check_reachable(search, replace(untrained, shapes=large), is_fine_tuned=True)
    backends = {"onnx": backends["onnx"]}
    with pytest.raises(GateError, match="no shape and no backend of the plan can meet the goal"):
        check_reachable(
            search, replace(untrained, shapes=large, backends=backends), is_fine_tuned=True
        )


@pytest.mark.parametrize(
    ("max_mb", "is_fine_tuned", "refused"),
    # The weights have 2 MB and the tokenizer 1 MB. The hashes of the training rows are not shipped.
    [(3.5, True, True), (2.5, True, False), (3.5, False, False)],
)
def test_a_model_that_meets_every_limit_is_refused(max_mb, is_fine_tuned, refused, tmp_path):
    sizes = {"model.safetensors": 2, "tokenizer.json": 1, "training_rows.safetensors": 5}
    for name, megabytes in sizes.items():
        (tmp_path / name).write_bytes(bytes(megabytes * 10**6))
    search = search_of(tmp_path, model=str(tmp_path), max_mb=max_mb)
    untrained = Untrained(faster(1.0), {}, "onnx", {"2x8": faster(2.0)})
    expected = pytest.raises(UsageError, match=r"meets every limit already: 1\.00 ms, 3\.0 MB")
    with expected if refused else nullcontext():
        check_reachable(search, untrained, is_fine_tuned=is_fine_tuned)


def test_shapes_come_from_large_to_small_and_smaller_than_the_model():
    names = [shape.short for shape in shapes_of([], ModelShape(6, 384, 1536, 12))]
    assert names == ["4x384", "3x384", "2x384", "3x192", "2x192"]
    assert [shape.short for shape in shapes_of(["1x16", "2x16:8"], ModelShape(4, 16, 64, 2))] == [
        "1x16",
        "2x16:8",
    ]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0)])
def test_a_budget_is_a_time(text, seconds):
    assert seconds_of(text) == seconds


def test_nested_keys_of_a_step_are_dotted_keys_of_its_recipe():
    keys = {"recipe": "mine", "student": {"to": ["2x16"]}, "train": {"lr": 1e-4}, "loss": {}}
    assert dotted(keys) == {"student.to": ["2x16"], "train.lr": 1e-4}


def test_the_report_names_the_products_that_stay_in_float32(tmp_path):
    products = '[{"name": "q", "float": true}, {"name": "k", "float": false}]'
    (tmp_path / "export.json").write_text(f'{{"products": {products}}}')
    model = replace(measured("a", 0.9, 1.0, 1.0), folder=tmp_path)
    assert result.in_float(model).endswith("1 of 2 products stay in float32: q")
