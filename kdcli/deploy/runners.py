"""Run a forward pass on a backend: torch, torch.compile, ONNX Runtime, OpenVINO or sparse."""

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
from transformers.utils import ModelOutput

from kdcli.deploy.backends import check_name
from kdcli.deploy.export import (
    FILE_LIMITS,
    FILES,
    GRAPH_OUTPUTS,
    RUNTIMES,
    difference,
    export_model,
)
from kdcli.deploy.sessions import library, onnx_caller, openvino_caller
from kdcli.deploy.sparse.csr import sparsify
from kdcli.disk import disk_errors
from kdcli.engine.device import TORCH_DTYPES, choose_dtype
from kdcli.errors import MachineError, UsageError, first_line
from kdcli.models.capture import prepare_teacher
from kdcli.types import Array, Batch

# Maps a precision to the largest relative error of a correct backend. In bf16, all-MiniLM-L6-v2 has
# 0.011.
ERROR_LIMITS: Mapping[str, float] = {**FILE_LIMITS, "bf16": 0.1}
# Maximum number of compilations of one model class in a process. Beyond the limit, which is 8 by
# default, torch silently stops compiling.
COMPILED_SHAPES = 1000
COMPILED_STEP = 64
"""Batches for torch.compile are padded to a multiple of this number of tokens."""


@dataclass(frozen=True)
class Runner:
    """One way to run an encoder.

    `output` converts a result of `call`, and must run before the next call. It returns those
    outputs of `kdcli.deploy.export.GRAPH_OUTPUTS` that the model has, in float32 and in that order.
    """

    prepare: Callable[[Batch], Any]  # batch -> inputs on the backend's device; not timed
    call: Callable[[Any], Any]  # one forward pass, which is complete when the call returns
    output: Callable[[Any], list[Array]]
    # Batches are padded to a multiple of this number of tokens. It is 1 unless every new shape
    # costs a compilation.
    length_step: int = 1


def check_backend(name: str, precision: str) -> None:
    """Check that a backend can be used on this machine, before anything is loaded.

    Raises UsageError if the backend is unknown or does not have the precision. Raises MachineError
    if its library is missing or the processor lacks the precision.
    """
    check_name(name, precision)
    for needed in RUNTIMES.get(name, ()):
        library(needed, name)
    if (name, precision) == ("openvino", "bf16"):
        types = library("openvino", name).Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in types:
            raise MachineError("OpenVINO finds no bf16 support in this processor", "use fp32")


def runner(
    model: PreTrainedModel,
    backend: str,
    precision: str,
    *,
    device: torch.device,
    threads: int,
    folder: Path,
) -> Runner:
    """Prepare a model, with or without a head, to run on a backend.

    The model is in float32 and eval mode on `device`, and is not changed.

    * `backend` and `precision`: checked by `check_backend`.
    * `threads`: number of threads of ONNX Runtime and OpenVINO. The caller sets torch's threads.
    * `folder`: a directory for exported files. It must exist as long as the runner is used.

    Raises UsageError if the backend does not run on `device` or cannot export the architecture.
    Raises MachineError if the GPU has no bf16, or if an exported file differs from torch.
    """
    if backend in ("torch", "compile"):
        return _torch_runner(model, precision, device, compiled=backend == "compile")
    if device.type != "cpu":
        raise UsageError(
            f"backend {backend} runs on the CPU only, not on {device}", "add --device cpu"
        )
    if backend == "sparse":
        return _torch_runner(sparsify(model), precision, device, compiled=False)
    with disk_errors(folder):
        # For bf16, OpenVINO computes in bf16 from float32 weights.
        file = export_model(
            model, folder, backend, precision if (backend, precision) in FILES else "fp32"
        ).path
    # With int8 weights, softmax and normalisation stay in float32.
    return file_runner(file, threads=threads, precision="bf16" if precision == "bf16" else "f32")


def compare_states(reference: Array, other: Array, mask: Array) -> dict[str, float]:
    """Compare two last hidden states [B, L, D] over the real tokens of a mask [B, L].

    * `max_abs`: the largest absolute difference.
    * `relative`: the Frobenius norm of the difference, divided by the reference's norm. Compare it
      with `ERROR_LIMITS`, and test `not relative <= limit`, so that NaN counts as wrong.
    * `cosine`: the mean cosine similarity of the tokens.
    """
    real = mask.astype(bool)
    reference_TD = reference[real].astype(np.float64)
    other_TD = other[real].astype(np.float64)
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
        # `choose_dtype` refuses fp16 on a CPU, because training lacks loss scaling there. A forward
        # pass does not need it.
        dtype = choose_dtype("bf16", device) if precision == "bf16" else TORCH_DTYPES[precision]
        model = prepare_teacher(copy.deepcopy(model), dtype)
    run: Callable[..., ModelOutput] = model
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

    def call(inputs: Batch) -> ModelOutput:
        try:
            with torch.inference_mode():
                outputs = run(**inputs)
        except BackendCompilerFailed as error:
            raise MachineError(
                f"torch.compile failed: {first_line(error.inner_exception)}",
                "install a C++ compiler (g++) and, for a GPU, triton; or use the torch backend",
            ) from None
        if wait is not None:
            wait()
        return outputs

    return Runner(
        lambda batch: {name: x.to(device) for name, x in batch.items()},
        call,
        lambda outputs: [
            outputs[name].float().cpu().numpy() for name in GRAPH_OUTPUTS if name in outputs
        ],
        COMPILED_STEP if compiled else 1,
    )


def file_runner(file: Path, *, threads: int, precision: str = "f32") -> Runner:
    """Load an ONNX or OpenVINO file.

    `threads` is the number of threads, or 0 for as many as PyTorch has. Only OpenVINO uses
    `precision`, which is `f32` or `bf16`.
    """
    if file.suffix == ".onnx":
        caller = onnx_caller(file, threads=threads)
    else:
        caller = openvino_caller(file, threads=threads, precision=precision)
    return Runner(
        caller.feed, caller, lambda outputs: [np.array(x, dtype=np.float32) for x in outputs]
    )
