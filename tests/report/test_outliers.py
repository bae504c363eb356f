"""An outlier neither flattens a chart nor disappears from it, and an axis ends where scores do."""

import re

import pytest
from reports import candidate, compress_values, made

from kdcli.report.charts.drawing import (
    Line,
    Scatter,
    cost_range,
    figure,
    line_chart,
    outliers,
    scatter_chart,
    score_range,
)
from kdcli.report.charts.tradeoff import compression_pictures

SCORES = {"a": 0.930, "b": 0.929, "c": 0.921, "d": 0.925}


def test_a_huge_outlier_does_not_stretch_the_axis():
    reach = score_range(SCORES | {"bad": 0.1})
    assert reach.outside == {"bad"}
    assert (reach.low, reach.high) == pytest.approx((0.9201, 0.9309))
    assert reach.place(0.1) == reach.low
    assert score_range(SCORES).outside == frozenset()


def test_a_value_on_the_axis_is_not_outside():
    # The axis of costs begins at 0, so it shows the small value too.
    assert cost_range({"dense": 10.0, "masked": 10.1, "compact": 7.1}).outside == frozenset()


def test_the_goal_and_the_models_that_matter_stay_inside():
    assert score_range(SCORES | {"bad": 0.1}, kept=["bad"]).outside == frozenset()
    assert score_range(SCORES, fixed=[0.2]).low < 0.2
    # With the goal on the axis, a score near the goal is no outlier.
    assert outliers(SCORES | {"bad": 0.85}, fixed=[0.83]) == frozenset()


def with_outlier():
    """A compression with a candidate that is bad in every way."""
    values = compress_values()
    values["compression"]["candidates"] += [
        candidate("4x384-onnx-int8", 0.925, 8.0, 80.0),
        candidate("pruned", 0.11, 90000.0, 90.0),
    ]
    return made(values).compression


def test_a_compression_labels_the_outlier_at_the_edge():
    for picture in compression_pictures(with_outlier()):
        assert "↓ 0.11" in picture.svg
        assert "At the edge, since the rest would be too close together: pruned." in picture.shown
        assert picture.shown.split(" At the edge")[1] in picture.caption
        # The axis of scores has ticks for the others, a thousandth apart.
        assert ">0.9200</text>" in picture.svg or ">0.920</text>" in picture.svg
    for picture in compression_pictures(made(compress_values()).compression):
        assert "At the edge" not in picture.caption
        assert "↓" not in picture.svg


def test_a_chart_of_models_labels_the_outlier_too():
    points = {"a": (10.0, 1.0), "b": (11.0, 1.1), "c": (12.0, 1.05), "slow": (11.0, 5000.0)}
    drawing = scatter_chart(points, {name: name for name in points}, "MB", "ms")
    assert "5,000 ↑" in drawing
    assert ">5000</text>" not in drawing


def test_the_bar_of_a_score_outside_its_interval_has_one_side():
    _, axes = figure()
    reach = score_range({"a": 0.9}, bars={"a": (0.92, 0.95)})
    points, costs = {"a": (1.0, 0.9)}, cost_range({"a": 1.0})
    Scatter(points, {"a": "a"}, "MB", "F1", costs, reach, ends={"a": (0.92, 0.95)}).draw(axes)
    (bar,) = axes.collections
    assert bar.get_segments()[0][:, 1] == pytest.approx([0.9, 0.95])


@pytest.mark.parametrize(
    ("scores", "bounds", "ends"),
    [
        ({"a": 1.0, "b": 0.8}, (0.0, 1.0), (0.78, 1.0)),
        ({"a": -0.95, "b": 0.95}, (-1.0, 1.0), (-1.0, 1.0)),
        ({"a": 0.0}, (0.0, 1.0), (0.0, 1.0)),
        # A metric of another library has a scale of its own.
        ({"a": 90.0, "b": 80.0}, (0.0, 1.0), (79.0, 91.0)),
    ],
)
def test_an_axis_of_scores_ends_at_the_bound_of_the_metric(scores, bounds, ends):
    reach = score_range(scores, bounds=bounds)
    assert (reach.low, reach.high) == pytest.approx(ends)
    assert not reach.outside
    _, axes = line_chart([Line("", list(enumerate(scores.values())), "k")], "step", bounds=bounds)
    low, high = axes.get_ylim()
    assert (low >= bounds[0] and high <= bounds[1]) == (max(scores.values()) <= bounds[1])


def on_few_rows(metric="accuracy", score=0.983, low=0.82, high=1.18):
    """A compression on few rows: wide intervals, and two candidates at the place of the chosen."""
    values = compress_values()
    teacher, other, chosen, _ = values["compression"]["candidates"]
    at = {"score": score, "low": low, "high": high, "ms": 6.0, "mb": 69.6}
    values["compression"]["metric"] = metric
    values["compression"]["candidates"] = [
        teacher | {"score": score + 0.017, "low": None, "high": None},
        other | at,
        other | at | {"name": "openvino-int8"},
        chosen | at,
    ]
    return made(values).compression


def test_no_interval_of_a_share_reaches_beyond_1():
    for picture in compression_pictures(on_few_rows()):
        assert "(0.82 to 1)" in picture.svg
        assert "1.18" not in picture.svg
        ticks = [float(text) for text in re.findall(r">(\d\.\d+)</text>", picture.svg)]
        assert max(tick for tick in ticks if tick > 0.8) == 1.0


def test_an_interval_is_whole_on_a_scale_of_its_own():
    for metric, *ends in [("bleu", 34, 33, 35), ("cosine", 0.1, -0.1, 0.3)]:
        for picture in compression_pictures(on_few_rows(metric, *ends)):
            assert "{} ({} to {})".format(*ends) in picture.svg


def test_the_chosen_model_hides_no_other_one():
    for picture in compression_pictures(on_few_rows()):
        order = re.findall(r"<title>([\w-]+):", picture.svg)
        assert order.index("3x384-onnx-int8") < order.index("onnx-int8")
