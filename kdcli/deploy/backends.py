"""The names of the backends. This module loads no large library."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from kdcli.errors import UsageError, did_you_mean

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "torch": ("fp32", "bf16", "fp16"),
    "compile": ("fp32", "bf16", "fp16"),
    "onnx": ("fp32", "fp16", "int8", "int8-packed", "q4"),
    "openvino": ("fp32", "bf16", "int8"),
    "sparse": ("fp32",),
}
"""Backend -> its precisions. `sparse` multiplies sparse matrices, for a pruned model in torch."""

PACKED = "int8-packed"
"""The precision of an int8 file whose weights are stored in about half the size."""


def kept_in(precision: str) -> str:
    """Return the precision of the products that a file's own precision changes too much."""
    return "int8" if precision == PACKED else "float32"


FORMATS = ("onnx", "openvino")
"""The formats of `kdcli export`."""


def check_backend_name(text: str) -> str:
    """Return the name of a backend, such as `onnx` or `onnx-int8`.

    Raises UsageError if the backend is unknown or does not have the precision.
    """
    backend, _, precision = text.partition("-")
    if backend in BACKENDS and not precision:
        return text
    check_name(backend, precision)
    return text


def check_name(backend: str, precision: str) -> None:
    """Raise a UsageError if a backend is unknown or does not have a precision."""
    if backend not in BACKENDS:
        raise UsageError(
            f"unknown backend '{backend}'{_near(backend, precision)}",
            f"allowed: {', '.join(BACKENDS)}, perhaps with a number format, such as onnx-int8",
        )
    if precision not in BACKENDS[backend]:
        names = [f"{backend}-{name}" for name in BACKENDS[backend]]
        raise UsageError(
            f"backend {backend} has no precision "
            f"'{precision}'{did_you_mean(f'{backend}-{precision}', names)}",
            f"allowed: {', '.join(names)}",
        )


def _near(backend: str, precision: str) -> str:
    """Return a question for the backend that an unknown name may stand for."""
    names = [f"{name}-{each}" for name, formats in BACKENDS.items() for each in formats]
    typed = f"{backend}-{precision}".removesuffix("-")
    # A number format alone stands for the first backend that has it.
    close = [name for name in names if name.endswith(f"-{typed}")]
    return did_you_mean(backend, BACKENDS) or did_you_mean(typed, close or names)


BackendName = Annotated[str, AfterValidator(check_backend_name)]
"""A key of a recipe that holds the name of a backend."""
