"""Pictures of latency: over lengths and batches, against size, against quality."""

from __future__ import annotations

import re

from benchmark_reports import benchmark_row, benchmark_values, compared_benchmark_values, report_of

from kdcli.report.pictures.curves import pictures
from kdcli.report.pictures.latency import MOST_LINES
from kdcli.report.schema import Report


def test_pictures_over_length_and_batch(benchmark):
    captions = [p.caption for p in pictures(benchmark)]
    assert len(captions) == 3
    assert captions[0].startswith(
        "Median milliseconds by tokens, batch size 1, both axes logarithmic: "
        "12x768 torch-fp32 15 (32), 60 (128), 240 (512); 6x384 torch-fp32 2.5 (32)"
    )
    assert captions[1].startswith("Median milliseconds by batch size, 128 tokens")
    assert captions[2].startswith("Size and latency, 1 × 128 tokens: 12x768 438.0 MB, 60 ms;")
    assert "onnx" not in captions[2]
    assert pictures(benchmark) == pictures(benchmark)
    one = Report.model_validate(benchmark_values(((1, 128),)))
    assert len(pictures(one)) == 1


def test_pictures_hold_no_more_lines_than_can_be_told_apart():
    names = [f"model-{i}" for i in range(MOST_LINES + 3)]
    rows = [benchmark_row(name, ("torch", "fp32"), 1, n) for n in (128, 32) for name in names]
    (picture,) = [p for p in pictures(report_of(latency=rows)) if p.caption.startswith("Median")]
    assert picture.caption.endswith(f"The first {MOST_LINES} of {MOST_LINES + 3} lines.")
    assert f"model-{MOST_LINES}" not in picture.svg


def test_quality_against_latency_and_size(runs):
    first, second, third = (p.caption for p in pictures(runs))
    assert first.startswith(
        "accuracy on sst2 against latency (median ms, 1 × 128 tokens, torch fp32): 12x768 60 ms, 0.93"
    )
    assert second.startswith("accuracy on sst2 against size (weights, MB): 12x768 438 MB, 0.93")
    for caption in (first, second):
        assert "On the line: 3x384, 6x384, 12x768." in caption
        assert caption.endswith("Hollow, since another is at least as good in both: slow.")
    assert third.startswith("Size and latency")
    hollow = [len(re.findall(r"fill: none; stroke: #a855f7", p.svg)) for p in pictures(runs)]
    assert hollow == [1, 1, 0]


def test_quality_of_other_formats_is_said_to_be_of_the_weights(runs):
    rows = [row.model_dump() | {"backend": "onnx", "dtype": "int8"} for row in runs.latency]
    first, second, _ = (
        p.caption for p in pictures(Report.model_validate(compared_benchmark_values() | {"latency": rows}))
    )
    assert first.endswith("The quality is that of the weights, not of this backend.")
    assert "of the weights, not" not in second


def test_no_front_of_what_less_is_better_of():
    losses = {"held-out loss": {m: {"loss": 0.5} for m in ("12x768", "6x384")}}
    values = compared_benchmark_values() | {"quality": losses}
    assert [p.caption[:16] for p in pictures(Report.model_validate(values))] == ["Size and latency"]
