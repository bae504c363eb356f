"""The names of the backends. This module loads no large library."""

from collections.abc import Mapping

from kdcli.errors import UsageError, did_you_mean

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "torch": ("fp32", "bf16", "fp16"),
    "compile": ("fp32", "bf16", "fp16"),
    "onnx": ("fp32", "fp16", "int8", "q4"),
    "openvino": ("fp32", "bf16", "int8"),
    "sparse": ("fp32",),
}
"""Backend -> its precisions. `sparse` multiplies sparse matrices, for a pruned model in torch."""

FORMATS = ("onnx", "openvino")
"""The formats of `kdcli export`."""


def check_format(name: str) -> None:
    """Raise a UsageError if a format of exports is unknown."""
    if name not in FORMATS:
        raise UsageError(
            f"unknown format '{name}'{did_you_mean(name, FORMATS)}",
            f"allowed: {', '.join(FORMATS)}",
        )


def check_name(backend: str, precision: str) -> None:
    """Raise a UsageError if a backend is unknown or does not have a precision."""
    if backend not in BACKENDS:
        raise UsageError(
            f"unknown backend '{backend}'{did_you_mean(backend, BACKENDS)}",
            f"allowed: {', '.join(BACKENDS)}",
        )
    precisions = BACKENDS[backend]
    if precision not in precisions:
        raise UsageError(
            f"backend {backend} has no precision "
            f"'{precision}'{did_you_mean(precision, precisions)}",
            f"allowed: {', '.join(precisions)}",
        )
