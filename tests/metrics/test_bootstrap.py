"""Confidence intervals; and for every kind of task, its scorer next to its `evaluate.Metric`."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import evaluate
import numpy as np
import pytest
from scipy.special import xlogy
from scipy.stats import multinomial
from sklearn.metrics import f1_score

import kdcli
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import FEW_EXAMPLES, paired_bootstrap, tango_interval
from kdcli.metrics.library import TaskMetric
from kdcli.metrics.per_class import class_scorer, count_classes
from kdcli.types import Task

pytestmark = pytest.mark.slow

TEXT, PAIR = ("text",), ("question", "context")
N = 60
TAGS = ("O", "B-PER", "I-PER", "PER")
BEST_EXACT = ("best_exact", "best_exact_threshold")
TASKS = {
    "class": Task(
        "t", "class", TEXT, ("matthews", "f1", "accuracy", "macro_f1"), labels=("a", "b", "c")
    ),
    "multi": Task("t", "multi", TEXT, ("exact", "macro_f1", "micro_f1"), labels=("a", "b")),
    "score": Task("t", "score", TEXT, ("spearman", "mse", "pearson")),
    "tokens": Task("t", "tokens", TEXT, ("recall", "f1", "accuracy", "precision"), labels=TAGS),
    "span": Task(
        *("t", "span", PAIR),
        (
            "best_f1",
            "best_f1_threshold",
            "f1",
            "exact",
            "no_answer_accuracy",
            "answer_f1",
            *BEST_EXACT,
        ),
        impossible=True,
    ),
}
ACCURACY = Task("t", "class", TEXT, ("accuracy",), labels=("a", "b"))


def judged(kind, seed=0):
    """Random predictions and references of a kind of task, of which a good part agree."""
    generator = np.random.default_rng(seed)

    def noisy(true, other):
        return [
            t if keep else o
            for t, o, keep in zip(true, other, generator.random(len(true)) < 0.7, strict=True)
        ]

    if kind == "class":
        true, other = generator.integers(3, size=(2, N)).tolist()
        return noisy(true, other), true
    if kind == "multi":
        true, other = generator.integers(2, size=(2, N, 2)).tolist()
        return noisy(true, other), true
    if kind == "score":
        true, other = generator.normal(size=(2, N)).tolist()
        return noisy(true, other), true
    if kind == "tokens":
        lengths = generator.integers(0, 8, size=N)
        true = [generator.choice(TAGS, size=length).tolist() for length in lengths]
        return [noisy(tags, generator.choice(TAGS, size=len(tags)).tolist()) for tags in true], true
    words = np.array(["red cat", "cat", "the dog", "dog", ""])
    true = [
        [word for word in generator.choice(words, size=2) if word][: generator.integers(3)]
        for _ in range(N)
    ]
    texts = noisy(
        [golds[0] if golds else "" for golds in true], generator.choice(words, size=N).tolist()
    )
    predictions = [
        {"id": str(i), "text": t, "no_answer": generator.normal()} for i, t in enumerate(texts)
    ]
    return predictions, [{"id": str(i), "answers": golds} for i, golds in enumerate(true)]


@pytest.mark.parametrize("kind", TASKS)
def test_a_metric_is_its_scorer_over_everything(kind):
    task, (predictions, references) = TASKS[kind], judged(kind)
    metric = TaskMetric(task)
    assert isinstance(metric, evaluate.Metric)
    found = metric.compute(predictions=predictions, references=references)
    assert list(found) == list(task.metrics)
    assert found == pytest.approx(scorer(task, predictions, references)(np.arange(N)), abs=1e-15)
    # Once more with the same object, as a training loop does.
    assert metric.compute(predictions=predictions, references=references) == found


@pytest.mark.parametrize("kind", TASKS)
def test_a_selection_is_scored_like_a_data_set_of_its_own(kind):
    task, pair = TASKS[kind], judged(kind)
    score, given = scorer(task, *pair), dict(zip(("predictions", "references"), pair, strict=True))
    for seed in range(5):
        indices = np.random.default_rng(seed).integers(N, size=N // 2)
        chosen = {k: [of[i] for i in indices] for k, of in given.items()}
        assert score(indices) == pytest.approx(TaskMetric(task).compute(**chosen), abs=1e-12)


@pytest.mark.parametrize("kind", TASKS)
def test_the_metrics_of_a_task_are_those_it_names(kind):
    task, (predictions, references) = TASKS[kind], judged(kind)
    every = scorer(task, predictions, references)(np.arange(N))
    for name in task.metrics:
        assert scorer(replace(task, metrics=(name,)), predictions, references)(np.arange(N)) == {
            name: every[name]
        }
    with pytest.raises(ValueError, match=f"no metric 'bleu' for tasks of kind {kind}"):
        scorer(replace(task, metrics=("bleu",)), predictions, references)(np.arange(N))
    with pytest.raises(ValueError, match="59 predictions, 60 references"):
        scorer(task, predictions[1:], references)
    with pytest.raises(ValueError, match="0 predictions, 0 references"):
        scorer(task, [], [])


def test_metrics_need_neither_network_nor_cache(tmp_path):
    # Directories below a file cannot be made, not even by root.
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "cache")
    caches = (
        "HOME",
        "HF_HOME",
        "HF_METRICS_CACHE",
        "HF_DATASETS_CACHE",
        "HF_MODULES_CACHE",
        "XDG_CACHE_HOME",
    )
    code = (
        "from kdcli.metrics.library import TaskMetric\n"
        "from kdcli.types import Task\n"
        "task = Task('t', 'class', ('text',), ('accuracy',), labels=('a', 'b'))\n"
        "print(TaskMetric(task).compute(predictions=[0, 1], references=[1, 1]))\n"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    environment = (
        os.environ
        | dict.fromkeys(caches, nowhere)
        | {"PYTHONPATH": str(Path(kdcli.__file__).parents[1])}
    )
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("{'accuracy': 0.5}\n", 0), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def accuracy_of(right):
    """A scorer of accuracy out of which examples are right."""
    return scorer(ACCURACY, np.asarray(right, dtype=np.int64), np.ones(len(right), dtype=np.int64))


@pytest.mark.parametrize("kind", TASKS)
def test_a_model_differs_from_itself_by_0_but_not_with_certainty(kind):
    score = scorer(TASKS[kind], *judged(kind))
    for difference, low, high in paired_bootstrap(score, score, N, resamples=20).values():
        assert difference == 0
        assert low == pytest.approx(-high)
        # A difference in one of 60 texts is missed with a probability of 37 %.
        assert high > 2.7 / N


def test_no_model_agrees_better_with_the_baseline_than_the_baseline():
    truth = np.zeros(200, dtype=np.int64)
    baseline = scorer(ACCURACY, truth, truth)
    model = scorer(ACCURACY, np.arange(200) < 1, truth)
    free, ended = (
        paired_bootstrap(model, baseline, 200, resamples=20, baseline_is_reference=is_reference)
        for is_reference in (False, True)
    )
    assert free["accuracy"][2] > 0
    assert ended["accuracy"] == (*free["accuracy"][:2], 0.0)


def spans(answers):
    predictions = [{"id": "1", "text": "".join(a), "no_answer": 0.0 if a else 1.0} for a in answers]
    return predictions, [{"id": "1", "answers": a} for a in answers]


FEW = {
    "class": ([*[1] * 7, *[0] * 42],) * 2,
    "multi": ([*[[1, 0]] * 7, *[[0, 0]] * 42],) * 2,
    "tokens": ([*[["PER"]] * 7, *[["O"]] * 42],) * 2,
    "span": spans([*[["cat"]] * 7, *[[]] * 42]),
}


@pytest.mark.parametrize(
    ("kind", "metric", "count"),
    [
        ("class", "f1", 7),
        # The mean of two classes varies as much as the mean of 4 / (1 / 7 + 1 / 42) equal rows.
        ("class", "macro_f1", 24),
        ("class", "matthews", 24),
        ("class", "accuracy", 49),
        ("multi", "micro_f1", 7),
        ("multi", "exact", 49),
        ("tokens", "recall", 7),
        ("tokens", "accuracy", 49),
        ("span", "answer_f1", 7),
        ("span", "no_answer_accuracy", 42),
        ("span", "exact", 49),
    ],
)
def test_without_a_change_an_interval_is_about_the_examples_that_the_metric_reads(
    kind, metric, count
):
    labels = {"class": ("a", "b"), "multi": ("a", "b")}.get(kind, TASKS[kind].labels)
    task = replace(TASKS[kind], labels=labels, metrics=(metric,))
    score = scorer(task, *FEW[kind])
    _, low, high = paired_bootstrap(score, score, 49, resamples=20)[metric]
    assert -low == pytest.approx(high)
    assert high == pytest.approx(1.96**2 / (count + 1.96**2), abs=1e-4)


@pytest.mark.parametrize("n", [1, 1000, FEW_EXAMPLES + 1])
def test_no_interval_is_a_point_where_no_example_differs(n):
    right = accuracy_of(np.arange(n) % 10 > 0)
    difference, low, high = paired_bootstrap(right, right, n, resamples=10)["accuracy"]
    assert difference == 0
    assert 2.7 / n <= high <= 4 / n or n < 10
    assert low == -high < 0


def test_numbers_that_differ_a_little_everywhere_keep_their_narrow_interval():
    task, (numbers, true) = TASKS["score"], judged("score")
    noise = np.random.default_rng(1).normal(size=N) * 1e-6
    model, baseline = scorer(task, numbers + noise, true), scorer(task, numbers, true)
    _, low, high = paired_bootstrap(model, baseline, N, resamples=100)["pearson"]
    assert -1e-5 < low < high < 1e-5


def likelihood_interval(b, c, n, grid=1000):
    """The differences that a score test keeps, from the law's likelihood on a grid."""
    # In whole numbers, so that no probability is below 0 by rounding.
    only_c, delta = np.arange(grid + 1)[None, :], np.arange(-grid, grid + 1)[:, None]
    neither = grid - 2 * only_c - delta
    allowed = (only_c + delta >= 0) & (neither >= 0)
    parts = ((b, only_c + delta), (c, only_c + 0 * delta), (n - b - c, neither))
    logs = sum(xlogy(count, np.maximum(part, 0) / grid) for count, part in parts)
    q = np.where(allowed, logs, -np.inf).argmax(axis=1) / grid
    d = delta[:, 0] / grid
    kept = d[((b - c) / n - d) ** 2 <= 1.959964**2 * (2 * q + d - d**2) / n]
    return kept.min(), kept.max()


@pytest.mark.parametrize(
    ("b", "c", "n"), [(0, 0, 100), (3, 0, 50), (0, 1, 20), (12, 5, 90), (40, 41, 400), (7, 1, 10)]
)
def test_tangos_interval_holds_what_the_score_test_keeps(b, c, n):
    assert tango_interval(b, c, n) == pytest.approx(likelihood_interval(b, c, n), abs=2e-3)
    assert tango_interval(c, b, n) == pytest.approx(np.negative(tango_interval(b, c, n))[::-1])


@pytest.mark.parametrize("n", [50, 100])
@pytest.mark.parametrize(("drop", "differing"), [(0, 0.02), (0, 0.06), (0.01, 0.03), (0.01, 0.07)])
@pytest.mark.parametrize("more", [0, 0.02])
def test_intervals_of_accuracy_hold_the_truth(n, drop, differing, more):
    """The exact coverage, summed over all counts; drops of 0 to 3 points."""
    drop, differing = drop + more, differing + more
    only_model, only_baseline = (differing - drop) / 2, (differing + drop) / 2
    law = multinomial(n, [only_model, only_baseline, 1 - differing])
    coverage = 0.0
    for b, c in itertools.product(range(25), range(25)):
        low, high = tango_interval(b, c, n)
        if low - 1e-9 <= -drop <= high + 1e-9:
            coverage += law.pmf([b, c, n - b - c])
    assert coverage >= 0.93


def drawn(generator, n, drop, differing, positives):
    """Labels and the predictions of a teacher, right in 92 %, and of a student that is worse by
    `drop`. The two differ in `differing` of all texts."""
    only_student, only_teacher = (differing - drop) / 2, (differing + drop) / 2
    both = 0.92 - only_teacher
    shares = [both, only_teacher, only_student, 1 - both - differing]
    cell = generator.choice(4, size=n, p=shares)
    true = (generator.random(n) < positives).astype(int)
    teacher = np.where(np.isin(cell, (0, 1)), true, 1 - true)
    student = np.where(np.isin(cell, (0, 2)), true, 1 - true)
    return true, teacher, student


BINARY = Task("t", "class", TEXT, ("f1", "macro_f1"), labels=("a", "b"))


def differences(rows):
    """The student's metrics minus the teacher's, as scikit-learn computes them."""
    true, teacher, student = rows
    return np.array(
        [
            f1_score(true, student) - f1_score(true, teacher),
            f1_score(true, student, average="macro") - f1_score(true, teacher, average="macro"),
        ]
    )


def coverage(n, drop, differing, positives, draws, resamples):
    """The share of draws whose intervals of F1 and macro F1 hold the true difference."""
    generator = np.random.default_rng(0)
    truth = differences(drawn(generator, 1_000_000, drop, differing, positives))
    held = np.zeros(2)
    for seed in range(draws):
        true, teacher, student = drawn(generator, n, drop, differing, positives)
        pair = [scorer(BINARY, predicted, true) for predicted in (student, teacher)]
        ends = paired_bootstrap(*pair, n, resamples=resamples, seed=seed).values()
        held += [low <= value <= high for value, (_, low, high) in zip(truth, ends, strict=True)]
    return held / draws


def test_intervals_of_f1_hold_the_truth():
    # The percentiles alone hold it in 60 to 65 %.
    assert coverage(50, 0.02, 0.02, 0.3, draws=150, resamples=100).min() >= 0.93


@pytest.mark.long
@pytest.mark.parametrize("n", [50, 100])
@pytest.mark.parametrize(("drop", "differing"), [(0, 0.06), (0.02, 0.02), (0.03, 0.06)])
def test_intervals_of_f1_hold_the_truth_in_many_draws(n, drop, differing):
    assert coverage(n, drop, differing, 0.3, draws=2000, resamples=200).min() >= 0.93


def test_the_interval_of_many_examples_is_that_of_the_normal_law():
    # Right where the baseline is wrong in 30 examples, the other way round in 10, of 400.
    model, baseline = (
        np.repeat([1, 0, 1, 0], [30, 10, 200, 160]),
        np.repeat([0, 1, 1, 0], [30, 10, 200, 160]),
    )
    difference, low, high = paired_bootstrap(
        accuracy_of(model), accuracy_of(baseline), 400, resamples=4000
    )["accuracy"]
    mean, deviation = 20 / 400, np.sqrt((40 / 400 - 0.05**2) / 400)
    assert difference == pytest.approx(mean)
    assert (low, high) == pytest.approx(
        (mean - 1.96 * deviation, mean + 1.96 * deviation), abs=0.004
    )


def test_both_models_are_judged_on_the_same_draws():
    seen = {"model": [], "baseline": []}

    def recording(name):
        def score(indices):
            seen[name].append(indices.copy())
            return {"sum": float(indices.sum())}

        return score

    found = paired_bootstrap(recording("model"), recording("baseline"), 50, resamples=30)
    assert found["sum"][0] == 0.0
    assert seen["model"][0].tolist() == list(range(50))
    assert all((m == b).all() for m, b in zip(seen["model"], seen["baseline"], strict=True))
    draws = seen["model"][:31]
    assert {len(draw) for draw in draws} == {50}
    assert len({tuple(draw) for draw in draws}) == 31
    assert any(len(set(draw)) < 50 for draw in draws)


def test_the_same_seed_gives_the_same_interval():
    true, model, baseline = drawn(np.random.default_rng(1), 300, 0.02, 0.1, 0.5)
    pair = [scorer(BINARY, predicted, true) for predicted in (model, baseline)]
    first = paired_bootstrap(*pair, 300, seed=3)
    assert paired_bootstrap(*pair, 300, seed=3) == first
    other = paired_bootstrap(*pair, 300, seed=4)
    assert other["f1"][0] == first["f1"][0]
    assert other["f1"] != first["f1"]


@pytest.mark.parametrize("kind", ["class", "multi", "score"])
@pytest.mark.parametrize("times", [2, 5])
def test_repeated_examples_add_no_certainty(kind, times):
    model, (baseline, true) = judged(kind, seed=1)[0], judged(kind)
    task = replace(TASKS[kind], metrics=(*TASKS[kind].metrics, *["accuracy"] * (kind == "class")))
    once = [scorer(task, predicted, true) for predicted in (model, baseline)]
    again = [scorer(task, times * predicted, times * true) for predicted in (model, baseline)]
    groups = np.tile(np.arange(N), times)
    single = paired_bootstrap(*once, N)
    together = paired_bootstrap(*again, times * N, groups=groups)
    apart = paired_bootstrap(*again, times * N)
    for metric, interval in single.items():
        assert together[metric] == pytest.approx(interval, rel=0.05, abs=0.01)
        width, narrow = (of[metric][2] - of[metric][1] for of in (together, apart))
        assert narrow < 0.85 * width


def width(ends):
    _, low, high = ends
    return high - low


@pytest.mark.parametrize("differing", [0, 5])
def test_a_frequent_text_without_a_difference_does_not_widen_an_interval(differing):
    # 900 rows have one text, on which both models are right; 1,000 have another text each.
    alone = np.arange(1000) >= differing
    groups = np.concatenate([np.arange(1000), np.full(900, 1000)])
    expected = paired_bootstrap(accuracy_of(alone), accuracy_of(alone | True), 1000)["accuracy"]
    right = np.concatenate([alone, np.ones(900, bool)])
    scorers = [accuracy_of(right), accuracy_of(right | True)]
    found = paired_bootstrap(*scorers, 1900, groups=groups)["accuracy"]
    assert 0.4 < width(found) / width(expected) <= 1.2
    assert found[1] <= -differing / 1900 <= found[2]


def test_a_text_with_a_difference_counts_once():
    # One text fills half of the rows, and the models differ on it alone.
    groups = np.array([0] * 50 + list(range(1, 51)))
    right = groups > 0
    scorers = [accuracy_of(right), accuracy_of(right | True)]
    _, low, high = paired_bootstrap(*scorers, 100, groups=groups)["accuracy"]
    assert (low, high) == pytest.approx(tango_interval(0, 1, 2))


def test_a_frequent_text_does_not_widen_the_interval_of_another_class():
    task = Task("t", "class", TEXT, ("macro_f1",), labels=("a", "b"))
    generator = np.random.default_rng(0)
    true = np.repeat([1, 0], [40, 1000])
    predicted = [np.where(generator.random(1040) < 0.1 * (true == 1), 0, true) for _ in range(2)]
    counts = [count_classes(task, each, true) for each in predicted]
    scorers = [class_scorer(task, each) for each in counts]
    groups = np.concatenate([np.arange(40), np.full(1000, 40)])
    own = paired_bootstrap(*scorers, 1040, resamples=200)
    found = paired_bootstrap(*scorers, 1040, resamples=200, groups=groups)
    assert width(found["recall b"]) <= 1.2 * width(own["recall b"])
    assert all(-1 <= low <= high <= 1 for _, low, high in found.values())


def test_no_interval_reaches_beyond_the_possible_difference():
    # The class has two texts, one of which is right, so nothing is known about its recall.
    task = Task("t", "class", TEXT, ("macro_f1",), labels=("a", "b"))
    true = np.repeat([1, 1, 0], [20, 20, 100])
    counts = count_classes(task, np.repeat([1, 0, 0], [20, 20, 100]), true)
    groups = np.repeat(np.arange(102), [20, 20, *[1] * 100])
    scorers = [class_scorer(task, counts)] * 2
    found = paired_bootstrap(*scorers, 140, resamples=50, groups=groups)
    assert found["recall b"] == (0.0, -1.0, 1.0)
    assert found["recall a"][2] < 0.05


def clustered(generator, texts, drop, differing):
    """Labels, the predictions of `drawn`, and the texts of rows; a text has 1 to 20 rows."""
    rows = drawn(generator, texts, drop, differing, 0.3)
    groups = np.repeat(np.arange(texts), generator.integers(1, 21, size=texts))
    return [each[groups] for each in rows], groups


class RightRows:
    """A scorer of accuracy that knows its rows, which saves the time of a jackknife."""

    def __init__(self, right):
        self.values = right.astype(np.float64)

    def __call__(self, rows):
        return {"accuracy": float(self.values[rows].mean())}

    def example_values(self):
        return {"accuracy": self.values}


CLUSTERS = [(0, 0.02), (0, 0.06), (0.02, 0.02), (0.02, 0.04), (0.02, 0.08)]


@pytest.mark.parametrize("texts", [50, 300])
@pytest.mark.parametrize(("drop", "differing"), [CLUSTERS[0], CLUSTERS[2], CLUSTERS[4]])
def test_intervals_of_accuracy_hold_the_truth_with_repeated_texts(texts, drop, differing):
    generator = np.random.default_rng(0)
    held = 0
    for seed in range(1000):
        (true, *predicted), groups = clustered(generator, texts, drop, differing)
        teacher, student = (RightRows(each == true) for each in predicted)
        _, low, high = paired_bootstrap(
            student, teacher, len(true), resamples=1, seed=seed, groups=groups
        )["accuracy"]
        held += low - 1e-9 <= -drop <= high + 1e-9
    assert held / 1000 >= 0.93


@pytest.mark.long
@pytest.mark.parametrize("texts", [50, 100])
@pytest.mark.parametrize(("drop", "differing"), CLUSTERS)
def test_intervals_of_f1_hold_the_truth_with_repeated_texts(texts, drop, differing):
    generator = np.random.default_rng(0)
    truth = differences(drawn(generator, 1_000_000, drop, differing, 0.3))
    held = np.zeros(2)
    for seed in range(500):
        (true, teacher, student), groups = clustered(generator, texts, drop, differing)
        pair = [scorer(BINARY, predicted, true) for predicted in (student, teacher)]
        ends = paired_bootstrap(*pair, len(true), resamples=200, seed=seed, groups=groups)
        held += [
            low <= value <= high for value, (_, low, high) in zip(truth, ends.values(), strict=True)
        ]
    assert (held / 500).min() >= 0.93


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="1000 times from 0 examples"):
        paired_bootstrap(accuracy_of([1]), accuracy_of([1]), 0)
    difference, low, high = paired_bootstrap(accuracy_of([1]), accuracy_of([0]), 1, resamples=1)[
        "accuracy"
    ]
    assert low < 0 < difference == 1.0 == high
    with pytest.raises(
        ValueError, match=r"model's metrics are \['accuracy'\], the baseline's \['mse'\]"
    ):
        paired_bootstrap(accuracy_of([1]), lambda indices: {"mse": 0.0}, 1)
