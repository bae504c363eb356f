"""Metrics of the `evaluate` library next to a task's own: formats, refusals, and metrics written by
the user."""

import pytest

from kdcli.custom_code import custom_code
from kdcli.errors import UsageError
from kdcli.metrics.library import load_metrics
from kdcli.types import Task

LABELS = ("no", "yes")
TASKS = {
    kind: Task("t", kind, ("text",), (), labels=LABELS)
    for kind in ("class", "multi", "score", "tokens", "span")
}
SPAN = {"id": "0", "text": "a cat", "no_answer": 0.0}, {"id": "0", "answers": ["cat", "a cat"]}
SCRIPT = """
import datasets
import evaluate


class Own(evaluate.Metric):
    def _info(self):
        features = datasets.Features(dict.fromkeys(("predictions", "references"), FORMAT))
        text = dict.fromkeys(("description", "citation", "inputs_description"), "")
        return evaluate.MetricInfo(features=features, **text)

    def _compute(self, predictions, references):
        RESULT
"""
SHARE = "return {'share': sum(map(lambda p, r: p == r, predictions, references)) / len(references)}"


def script(folder, form, result=SHARE, name="own_metric"):
    """A directory of a metric: the format of its columns and the body of `_compute`."""
    (folder / name).mkdir()
    (folder / name / f"{name}.py").write_text(
        SCRIPT.replace("FORMAT", form).replace("RESULT", result), "utf-8"
    )
    return str(folder / name)


def load(source, kind, references):
    with custom_code(True):
        (metric,) = load_metrics([source], TASKS[kind], references)
    return metric


@pytest.mark.parametrize(
    ("kind", "form", "predictions", "references"),
    [
        ("class", "datasets.Value('int64')", [0, 1], [1, 1]),
        ("class", "datasets.Value('string')", [0, 1], [1, 1]),
        ("multi", "datasets.Sequence(datasets.Value('int64'))", [[0, 1], [1, 1]], [[1, 1], [1, 1]]),
        ("score", "datasets.Value('float64')", [0.5, 1.0], [2.0, 1.0]),
        (
            "tokens",
            "datasets.Sequence(datasets.Value('string'))",
            [["no"], ["yes"]],
            [["yes"], ["yes"]],
        ),
    ],
)
def test_formats(tmp_path, kind, form, predictions, references):
    metric = load(script(tmp_path, form), kind, references)
    assert metric.compute(predictions, references) == {"own_metric.share": 0.5}
    assert metric.compute(references, references) == {"own_metric.share": 1.0}, "used again"


def test_strings_of_a_span(tmp_path):
    result = "return {'last': sum(p.endswith(r) for p, r in zip(predictions, references))}"
    metric = load(script(tmp_path, "datasets.Value('string')", result), "span", [SPAN[1]])
    assert metric.compute([SPAN[0]], [SPAN[1]]) == {"own_metric.last": 1.0}


def test_every_finite_number_is_kept(tmp_path):
    result = "return {'a': 1, 'b': 0.5, 'c': float('nan'), 'd': 'text', 'e': [1.0], 'f': None}"
    metric = load(script(tmp_path, "datasets.Value('int64')", result), "class", [0, 1])
    assert metric.compute([0, 1], [0, 1]) == {"own_metric.a": 1.0, "own_metric.b": 0.5}


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("span", SHARE, "metric 'own_metric' fails on task t"),
        (
            "class",
            "raise RuntimeError('out of order')",
            "fails on task t: RuntimeError: out of order",
        ),
        ("class", "return {'a': float('inf')}", "returns no finite number on task t"),
    ],
)
def test_a_metric_that_fails_is_refused_when_it_is_loaded(tmp_path, kind, result, message):
    references = [SPAN[1]] if kind == "span" else [0, 1]
    with pytest.raises(UsageError, match=message):
        load(script(tmp_path, "datasets.Value('int64')", result), kind, references)


@pytest.mark.parametrize(
    "source", ["own_metric", "own_metric/own_metric.py", "./own_metric", "someone/metric"]
)
def test_code_is_not_run_without_trust(tmp_path, monkeypatch, source):
    """A directory in the current one must not stand in for a name of the library."""
    script(tmp_path, "datasets.Value('int64')", "raise SystemExit('the code was run')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="so it is not run") as caught:
        load_metrics([source], TASKS["class"], [0, 1])
    assert "--trust-remote-code" in caught.value.hint


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            ["accuracyy"],
            "'accuracyy' is neither in the cache of the evaluate library nor on the hub",
        ),
        (["./nowhere.py"], "no metric script or directory at ./nowhere.py"),
        (["own_metric", "./own_metric/own_metric.py"], "two metrics have the name own_metric"),
        (["broken"], "metric 'broken' cannot be loaded: SyntaxError"),
    ],
)
def test_metrics_that_cannot_be_loaded(tmp_path, monkeypatch, sources, message):
    script(tmp_path, "datasets.Value('int64')")
    script(tmp_path, "datasets.Value('int64')", "return {", name="broken")
    monkeypatch.chdir(tmp_path)
    with custom_code(True), pytest.raises(UsageError, match=message):
        load_metrics(sources, TASKS["class"], [0, 1])
