"""Backends of a forward pass: torch, torch.compile, ONNX Runtime, OpenVINO and sparse, each with
its precisions."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import BackendCompilerFailed
from transformers import PreTrainedModel

from kdcli.deploy.export import FILES, OUTPUTS, RUNTIMES, difference, export_model
from kdcli.deploy.export import LIMITS as FILE_LIMITS
from kdcli.deploy.sessions import Array, library, onnx_caller, openvino_caller
from kdcli.deploy.sparse.csr import sparsify
from kdcli.disk import disk_errors
from kdcli.engine.device import DTYPES, choose_dtype
from kdcli.errors import MachineError, UsageError, did_you_mean, first_line
from kdcli.models.capture import prepare_teacher
from kdcli.types import Batch

BACKENDS: Mapping[str, tuple[str, ...]] = {  # Backend -> its precisions
    "torch": ("fp32", "bf16", "fp16"),
    "compile": ("fp32", "bf16", "fp16"),
    "onnx": ("fp32", "fp16", "int8", "q4"),
    "openvino": ("fp32", "bf16", "int8"),
    "sparse": ("fp32",),  # torch with sparse products for the linears of a pruned model
}
# Precision -> largest relative error of a correct backend; in bf16 all-MiniLM-L6-v2 has 0.011.
LIMITS: Mapping[str, float] = {**FILE_LIMITS, "bf16": 0.1}
# Compilations that a process may do for one model class. Beyond torch's default, 8, it silently
# stops compiling.
COMPILED_SHAPES = 1000


@dataclass(frozen=True)
class Runner:
    """One way to run an encoder. `output` turns a result of `call`, before the next call, into
    those of `kdcli.deploy.export.OUTPUTS` that the model has, float32, in that order."""

    prepare: Callable[[Batch], Any]  # Batch -> inputs on the backend's device; not timed
    call: Callable[[Any], Any]  # One forward pass; it is over when the call returns
    output: Callable[[Any], list[Array]]


def check_backend(name: str, precision: str) -> None:
    """Check that a backend can be used here, before anything is loaded. Raises UsageError: unknown
    backend, or a precision it does not have; MachineError: its library is missing, or the processor
    lacks the precision."""
    if name not in BACKENDS:
        raise UsageError(
            f"unknown backend '{name}'{did_you_mean(name, BACKENDS)}",
            f"allowed: {', '.join(BACKENDS)}",
        )
    if precision not in BACKENDS[name]:
        raise UsageError(
            f"backend {name} has no precision "
            f"'{precision}'{did_you_mean(precision, BACKENDS[name])}",
            f"allowed: {', '.join(BACKENDS[name])}",
        )
    for needed in RUNTIMES.get(name, ()):
        library(needed, name)
    if (name, precision) == ("openvino", "bf16"):
        types = library("openvino", name).Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in types:
            raise MachineError("OpenVINO finds no bf16 in this processor", "use fp32")


def runner(
    model: PreTrainedModel,
    backend: str,
    precision: str,
    *,
    device: torch.device,
    threads: int,
    folder: Path,
) -> Runner:
    """Make a model, with or without a head, ready to run: in float32 and eval mode, on `device`; it
    stays unchanged. `backend` and `precision` pass `check_backend`; `threads` are those of ONNX
    Runtime and OpenVINO, the caller sets those of torch; `folder`, for exported files, must exist
    as long as the runner is used. Raises UsageError: the backend does not run on `device`, or
    cannot export the architecture; MachineError: the GPU has no bf16, or an exported file differs
    from torch."""
    if backend in ("torch", "compile"):
        return _torch_runner(model, precision, device, compiled=backend == "compile")
    if device.type != "cpu":
        raise UsageError(
            f"backend {backend} runs on the CPU only, not on {device}", "add --device cpu"
        )
    if backend == "sparse":
        return _torch_runner(sparsify(model), precision, device, compiled=False)
    with disk_errors(folder):
        # With bf16 OpenVINO computes in it from weights in float32.
        file = export_model(
            model, folder, backend, precision if (backend, precision) in FILES else "fp32"
        ).path
    # With int8 weights, softmax and normalisation stay in float32.
    return file_runner(file, threads=threads, precision="bf16" if precision == "bf16" else "f32")


def agreement(reference: Array, other: Array, mask: Array) -> dict[str, float]:
    """Compare two last hidden states [B, L, D] over the real tokens of a mask [B, L]: `max_abs` is
    the largest absolute difference; `relative`, to compare with `LIMITS`, the Frobenius norm of the
    difference over that of the reference; `cosine` the mean over tokens. NaN counts as wrong: test
    `not relative <= limit`."""
    real = mask.astype(bool)
    reference_TD, other_TD = reference[real].astype(np.float64), other[real].astype(np.float64)
    max_abs, relative = difference(reference_TD, other_TD)
    lengths_T = np.linalg.norm(reference_TD, axis=-1) * np.linalg.norm(other_TD, axis=-1)
    cosine = float(
        (
            (reference_TD * other_TD).sum(-1) / np.maximum(lengths_T, np.finfo(np.float64).tiny)
        ).mean()
    )
    return {"max_abs": max_abs, "relative": relative, "cosine": cosine}


def _torch_runner(
    model: PreTrainedModel, precision: str, device: torch.device, *, compiled: bool
) -> Runner:
    if precision != "fp32":
        # `choose_dtype` refuses fp16 on a CPU, where training lacks loss scaling; a forward pass
        # needs none.
        dtype = choose_dtype("bf16", device) if precision == "bf16" else DTYPES[precision]
        model = prepare_teacher(copy.deepcopy(model), dtype)
    run: Callable[..., Any] = model
    if compiled:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = (
            COMPILED_SHAPES
        )
        run = torch.compile(model, dynamic=False)
    wait = (
        functools.partial(torch.accelerator.synchronize, device.index)
        if device.type != "cpu"
        else None
    )

    def call(inputs: Batch) -> Any:
        try:
            with torch.inference_mode():
                outputs = run(**inputs)
        except BackendCompilerFailed as error:
            raise MachineError(
                f"torch.compile failed: {first_line(error.inner_exception)}",
                "it needs a C++ compiler (g++) and, on a GPU, triton; or use torch",
            ) from None
        if wait is not None:
            wait()
        return outputs

    return Runner(
        lambda batch: {name: x.to(device) for name, x in batch.items()},
        call,
        lambda outputs: [
            outputs[name].float().cpu().numpy() for name in OUTPUTS if name in outputs
        ],
    )


def file_runner(file: Path, *, threads: int, precision: str = "f32") -> Runner:
    """Load a file of ONNX or OpenVINO; arguments as of the callers, `precision` for OpenVINO
    alone."""
    if file.suffix == ".onnx":
        caller = onnx_caller(file, threads=threads)
    else:
        caller = openvino_caller(file, threads=threads, precision=precision)
    return Runner(
        caller.feed, caller, lambda outputs: [np.array(x, dtype=np.float32) for x in outputs]
    )
