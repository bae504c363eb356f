"""An outlier neither flattens a chart nor disappears from it."""

import pytest
from reports import candidate, compress_values, made

from kdcli.report.charts.drawing import (
    Scatter,
    cost_range,
    figure,
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
