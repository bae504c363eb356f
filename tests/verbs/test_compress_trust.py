"""The drop that `compress` prints, simulated: equally good candidates, and rows drawn at random."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdcli.deploy.measurements import Speedup
from kdcli.metrics.bootstrap import tango_interval
from kdcli.verbs.compress.limits import GoalSettings, ScoredModel
from kdcli.verbs.compress.scored import CandidateScores

DIFFERING = 0.08
"""Share of the rows on which exactly one of teacher and candidate is right."""
TEACHER = 0.92


class Outcome(NamedTuple):
    """Means over all repetitions: printed minus true drop in points, and the share of "met"."""

    bias: float
    met: float


def scored(name, wins, losses, rows):
    """A candidate that is right on `wins` rows where its teacher is wrong, and the reverse."""
    low, high = tango_interval(wins, losses, rows)
    score = TEACHER + (wins - losses) / rows
    ratio = Speedup(baseline="teacher", median=4.0, low=3.9, high=4.1, unstable=False)
    # All candidates count as equally fast, so that the smallest of those within the goal wins.
    return ScoredModel(name, Path(name), score, TEACHER + low, TEACHER + high, 1.0, ratio, 1.0)


def simulated(drop, *, candidates, selection, verification, goal, repetitions, seed=0):
    """Choose among candidates with the same true drop, and print one drop.

    Args:
        drop: the true drop of every candidate, in points.
        candidates: number of candidates.
        selection: number of selection rows.
        verification: number of verification rows; None prints the selection's numbers.
        goal: the limits.
        repetitions: number of data sets.
        seed: seed of the data sets.
    """
    generator = np.random.default_rng(seed)
    lose = (DIFFERING + drop / 100) / 2
    shares = [DIFFERING - lose, lose, 1 - DIFFERING]
    teacher = ScoredModel("teacher", Path(), TEACHER, TEACHER, TEACHER, 4.0, None, 4.0)
    biases, met = [], []
    for _ in range(repetitions):
        counts = generator.multinomial(selection, shares, size=candidates)
        models = [
            scored(str(n), int(wins), int(losses), selection)
            for n, (wins, losses, _) in enumerate(counts)
        ]
        # Without a limit on speed, the smallest drop decides among the candidates.
        models.sort(key=lambda one: -one.score)
        scores = CandidateScores(goal, None, "accuracy", selection, teacher, models)
        best, missed = scores.choose()
        if verification is not None:
            wins, losses, _ = generator.multinomial(verification, shares)
            best = scored(best.name, int(wins), int(losses), verification)
            missed = goal.misses(best, teacher)
        biases.append(100 * (TEACHER - best.score) - drop)
        met.append(not missed)
    return Outcome(float(np.mean(biases)), float(np.mean(met)))


def test_the_printed_drop_is_the_true_one_and_a_strict_goal_holds():
    how = {"candidates": 8, "selection": 2000, "repetitions": 500}
    goal = GoalSettings(max_drop=1.0)
    # 5,000 verification rows leave a standard error of 0.02 points.
    verified = simulated(2.0, verification=5000, goal=goal, **how)
    assert abs(verified.bias) < 0.05
    # The rows that chose are optimistic, which is why the verification rows exist.
    assert simulated(2.0, verification=None, goal=goal, **how).bias < -0.4
    strict = GoalSettings(max_drop=1.0, strict=True)
    for rows in (1000, 5000):
        assert simulated(1.0001, verification=rows, goal=strict, **how).met <= 0.05
    # Half of the allowed drop is accepted.
    assert simulated(0.5, verification=5000, goal=goal, **how).met > 0.85
