"""An outlier neither flattens a chart nor disappears from it."""

import pytest
from reports import candidate, compress_values, made

from kdcli.report.charts.compression import compression_pictures
from kdcli.report.charts.drawing import cost_range, outliers, scatter_chart, score_range

SCORES = {"a": 0.930, "b": 0.929, "c": 0.921, "d": 0.925}


def test_a_huge_outlier_does_not_stretch_the_axis():
    reach = score_range(SCORES | {"bad": 0.1})
    assert reach.outside == {"bad"}
    assert (reach.low, reach.high) == pytest.approx((0.9201, 0.9309))
    assert reach.place(0.1) == reach.low
    assert score_range(SCORES).outside == frozenset()


def test_the_goal_and_the_models_that_matter_stay_inside():
    assert score_range(SCORES | {"bad": 0.1}, kept=["bad"]).outside == frozenset()
    assert score_range(SCORES, fixed=[0.2]).low < 0.2
    # With the goal on the axis, a score near the goal is no outlier.
    assert outliers(SCORES | {"bad": 0.85}, fixed=[0.83]) == frozenset()


def test_many_values_are_no_outliers():
    values = {str(n): value for n, value in enumerate([1.0, 1.01, 1.02, 50.0, 51.0, 52.0])}
    assert outliers(values) == frozenset()
    assert outliers({"a": 1.0, "b": 1.0, "c": 1.0, "d": 9.0}) == frozenset()


@pytest.mark.parametrize(
    ("values", "log", "outside"),
    [
        ([1.0, 1.1, 1.3, 900.0], False, {"3"}),
        ([5.0, 10.0, 20.0, 150.0], True, set()),
        ([5.0, 10.0, 20.0, 30.0], False, set()),
    ],
)
def test_costs_are_linear_or_logarithmic_or_beyond_the_edge(values, log, outside):
    reach = cost_range({str(n): value for n, value in enumerate(values)})
    assert (reach.log, reach.outside) == (log, outside)
    assert reach.fraction(reach.value(0.25)) == pytest.approx(0.25)
    assert (reach.low > 0) == log


def test_a_cost_of_nothing_makes_the_axis_linear():
    reach = cost_range({"a": 0.0, "b": 5.0, "c": 100.0})
    assert (reach.low, reach.log) == (0.0, False)
    assert cost_range({"a": 0.0}).high > 0


def test_the_limit_of_a_cost_is_on_the_axis():
    assert cost_range({"a": 5.0, "b": 8.0}, fixed=[12.0]).high > 12
    # With the limit on the axis, a cost near the limit is no outlier.
    costs = {"a": 5.0, "b": 5.1, "c": 5.2, "slow": 90.0}
    assert cost_range(costs).outside == {"slow"}
    assert cost_range(costs, fixed=[100.0]).outside == frozenset()


def test_a_score_whose_own_bar_is_long_stays_an_outlier():
    bars = {"bad": [0.05, 0.93], "a": [0.9, 0.95]}
    reach = score_range(SCORES | {"bad": 0.1}, bars=bars)
    assert reach.outside == {"bad"}
    assert reach.low == pytest.approx(0.9 - 0.005)
    # The bar of another score does not make an outlier of one less.
    assert score_range(SCORES | {"bad": 0.1}, bars={"a": [0.3, 0.95]}).outside == {"bad"}


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
    drawing = scatter_chart(points, {name: name for name in points}, "MB", "ms", zero=True)
    assert "slow (5,000 ↑)" in drawing
    assert ">5000</text>" not in drawing
