"""Titles of the steps of a compression."""

import pytest

from kdcli.report.titles import step_title


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("teacher", "teacher"),
        ("2x64", "2x64"),
        ("2x64-trimmed", "2x64, trimmed"),
        ("2x64-undistilled-onnx", "2x64, without its teacher, ONNX"),
        ("pruned-openvino-int8", "pruned, OpenVINO int8"),
        ("onnx-int8-within-1", "ONNX int8 (at most 1 point lost)"),
        ("2x64-onnx-int8-within-0.9", "2x64, ONNX int8 (at most 0.9 points lost)"),
        ("static:64-onnx", "static:64, ONNX"),
        ("2x64-onnx-int8+onnx", "2x64, ONNX int8 + ONNX"),
        ("3-quantize-within-0.5", "step 3 (at most 0.5 points lost)"),
        ("1-distill", "step 1"),
        ("selection-0f3a9c1e", "candidates on the selection rows"),
        ("verification-static_64-onnx", "static:64, ONNX on the verification rows"),
    ],
)
def test_a_step_has_a_title_that_says_what_it_is(name, title):
    assert step_title(name) == title
