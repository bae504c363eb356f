"""Confidence intervals; and for every kind of task, its scorer next to its `evaluate.Metric`."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import evaluate
import numpy as np
import pytest

import kdcli
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.metrics.library import TaskMetric
from kdcli.types import Task

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
def test_a_model_does_not_differ_from_itself(kind):
    score = scorer(TASKS[kind], *judged(kind))
    assert paired_bootstrap(score, score, N, resamples=20) == dict.fromkeys(
        TASKS[kind].metrics, (0.0, 0.0, 0.0)
    )


def test_the_interval_is_that_of_the_normal_law():
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
    assert (found, len(seen["model"])) == ({"sum": (0.0, 0.0, 0.0)}, 31)
    assert seen["model"][0].tolist() == list(range(50))
    assert all((m == b).all() for m, b in zip(seen["model"], seen["baseline"], strict=True))
    assert len({tuple(draw) for draw in seen["model"]}) == 31
    assert any(len(set(draw)) < 50 for draw in seen["model"])


def test_the_same_seed_gives_the_same_interval():
    generator = np.random.default_rng(1)
    model, baseline = (
        accuracy_of(generator.random(300) < 0.8),
        accuracy_of(generator.random(300) < 0.7),
    )
    first = paired_bootstrap(model, baseline, 300, seed=3)
    assert paired_bootstrap(model, baseline, 300, seed=3) == first
    other = paired_bootstrap(model, baseline, 300, seed=4)
    assert other["accuracy"][0] == first["accuracy"][0]
    assert other["accuracy"] != first["accuracy"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="1000 times from 0 examples"):
        paired_bootstrap(accuracy_of([1]), accuracy_of([1]), 0)
    assert paired_bootstrap(accuracy_of([1]), accuracy_of([0]), 1, resamples=1) == {
        "accuracy": (1.0, 1.0, 1.0)
    }
    with pytest.raises(
        ValueError, match=r"model's metrics are \['accuracy'\], the baseline's \['mse'\]"
    ):
        paired_bootstrap(accuracy_of([1]), lambda indices: {"mse": 0.0}, 1)
