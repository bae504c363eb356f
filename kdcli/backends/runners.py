"""What a forward pass can run on: torch, torch.compile, ONNX Runtime, OpenVINO, each in the precisions it knows."""

from __future__ import annotations

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

from kdcli.backends.export import LIMITS as OF_FILES
from kdcli.backends.export import OUTPUTS, difference, export_onnx, export_openvino
from kdcli.backends.sessions import Array, Caller, library, onnx_caller, openvino_caller
from kdcli.errors import MachineError, UsageError, did_you_mean
from kdcli.models.capture import prepare_teacher
from kdcli.sparse.csr import sparsify
from kdcli.training.device import DTYPES, choose_dtype
from kdcli.types import Batch

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "torch": ("fp32", "bf16", "fp16"),
    "compile": ("fp32", "bf16", "fp16"),
    "onnx": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
    "sparse": ("fp32",),
}
"""Backend → precisions it knows. `sparse` is torch with the linears of a pruned model as sparse products."""

LIMITS: Mapping[str, float] = {"fp32": OF_FILES["fp32"], "fp16": 0.03, "bf16": 0.1, "int8": OF_FILES["int8"]}
"""Precision → relative error beyond which a backend is wrong. all-MiniLM-L6-v2 has 1e-6, 0.002, 0.011 and 0.17; the
error grows with the layers."""
COMPILED_SHAPES = 1000
"""How often a process may compile one class of models, each for each shape. Beyond torch's own limit, 8, it goes on
without compiling and without a word."""


@dataclass(frozen=True)
class Runner:
    """One way to run an encoder.

    Attributes:
        prepare: batch → inputs as the backend takes them, where it takes them; not to be timed.
        call: one forward pass; it is over when the call returns.
        output: what `call` returned → those of `kdcli.backends.export.OUTPUTS` that the model has, float32, in that
            order; to be read before the next call.
    """

    prepare: Callable[[Batch], Any]
    call: Callable[[Any], Any]
    output: Callable[[Any], list[Array]]


def check_backend(name: str, precision: str) -> None:
    """Say whether a backend can be used here, before anything is loaded.

    Raises:
        UsageError: no such backend, or it does not know the precision.
        MachineError: its library is missing, or the processor lacks the precision.
    """
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'{did_you_mean(name, BACKENDS)}", f"allowed: {', '.join(BACKENDS)}")
    if precision not in BACKENDS[name]:
        raise UsageError(
            f"backend {name} has no precision '{precision}'{did_you_mean(precision, BACKENDS[name])}",
            f"it knows {', '.join(BACKENDS[name])}",
        )
    if name in ("onnx", "openvino"):
        for needed in ("onnx", "onnxscript", "onnxruntime" if name == "onnx" else "openvino"):
            library(needed, name)
    if (name, precision) == ("openvino", "bf16"):
        known = library("openvino", name).Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in known:
            raise MachineError("OpenVINO finds no bf16 in this processor", "use fp32")


def runner(
    model: PreTrainedModel, backend: str, precision: str, *, device: torch.device, threads: int, folder: Path
) -> Runner:
    """Make an encoder, or one with a head, ready to run.

    Args:
        model: in float32 and eval mode, on `device`; it stays as it is.
        backend, precision: a pair that `check_backend` has let pass.
        threads: of ONNX Runtime and OpenVINO; those of torch the caller sets.
        folder: temporary; exported files go there and must stay while the runner is used.

    Raises:
        UsageError: the backend does not run on `device`, or cannot take the architecture.
        MachineError: the GPU has no bf16, or an exported file does not compute what torch does.
    """
    if backend in ("torch", "compile"):
        return _torch_runner(model, precision, device, compiled=backend == "compile")
    if device.type != "cpu":
        raise UsageError(f"backend {backend} runs on the CPU only, not on {device}", "add --device cpu")
    if backend == "sparse":
        return _torch_runner(sparsify(model), precision, device, compiled=False)
    if backend == "onnx":
        file = export_onnx(model, folder, int8=precision == "int8").path
        return _engine_runner(onnx_caller(file, threads=threads))
    file = export_openvino(model, folder, int8=precision == "int8").path
    # What is not a product of int8 numbers, softmax and normalisation among it, is in float32.
    hint = "bf16" if precision == "bf16" else "f32"
    return _engine_runner(openvino_caller(file, threads=threads, precision=hint))


def agreement(reference: Array, other: Array, mask: Array) -> dict[str, float]:
    """How near two last hidden states [B, L, D] are over the real tokens of a mask [B, L].

    Returns:
        `max_abs`: largest absolute difference; `relative`: norm of the difference over that of the reference
        (Frobenius), to be held against `LIMITS`; `cosine`: mean over the tokens. A value that is not a number is wrong
        however it is compared: use `not relative <= limit`.
    """
    real = mask.astype(bool)
    reference_TD, other_TD = reference[real].astype(np.float64), other[real].astype(np.float64)
    max_abs, relative = difference(reference_TD, other_TD)
    lengths_T = np.linalg.norm(reference_TD, axis=-1) * np.linalg.norm(other_TD, axis=-1)
    cosine = float(((reference_TD * other_TD).sum(-1) / np.maximum(lengths_T, np.finfo(np.float64).tiny)).mean())
    return {"max_abs": max_abs, "relative": relative, "cosine": cosine}


def _torch_runner(model: PreTrainedModel, precision: str, device: torch.device, *, compiled: bool) -> Runner:
    if precision != "fp32":
        # The precision of training would refuse fp16 on a CPU, for want of loss scaling; a forward pass needs none.
        dtype = choose_dtype("bf16", device) if precision == "bf16" else DTYPES[precision]
        model = prepare_teacher(copy.deepcopy(model), dtype)
    run: Callable[..., Any] = model
    if compiled:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = COMPILED_SHAPES
        run = torch.compile(model, dynamic=False)
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None

    def call(inputs: Batch) -> Any:
        """The model's outputs, once the device is done with them."""
        try:
            with torch.inference_mode():
                found = run(**inputs)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            first = next(iter(str(inner).strip().splitlines()), type(inner).__name__)
            raise MachineError(
                f"torch.compile failed: {first}", "it needs a C++ compiler (g++) and, on a GPU, triton; or use torch"
            ) from None
        if wait is not None:
            wait()
        return found

    return Runner(
        lambda batch: {name: x.to(device) for name, x in batch.items()},
        call,
        lambda found: [found[name].float().cpu().numpy() for name in OUTPUTS if name in found],
    )


def _engine_runner(caller: Caller) -> Runner:
    return Runner(caller.feed, caller, lambda found: [np.array(x, dtype=np.float32) for x in found])
