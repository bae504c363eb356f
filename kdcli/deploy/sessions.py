"""Run model files with ONNX Runtime and OpenVINO, which are optional extras, on the CPU."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from kdcli.errors import MachineError
from kdcli.types import Array, Batch
from kdcli.version import install_command


class Caller:
    """A loaded file.

    `feed` converts a batch to inputs. A call runs the file and returns the outputs in order. The
    next call may overwrite them.
    """

    def __init__(
        self, names: Sequence[str], run: Callable[[Mapping[str, Array]], list[Array]]
    ) -> None:
        self.names = tuple(names)
        self._run = run

    def feed(self, batch: Batch) -> dict[str, Array]:
        """Return the file's inputs as arrays on the CPU.

        A missing mask or missing token types are filled in.
        """
        ids_BL = batch["input_ids"]
        absent = {
            "attention_mask": torch.ones_like(ids_BL),
            "token_type_ids": torch.zeros_like(ids_BL),
        }
        inputs = absent | batch
        return {name: np.ascontiguousarray(inputs[name].cpu().numpy()) for name in self.names}

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        return self._run(inputs)


def onnx_caller(path: Path, *, threads: int) -> Caller:
    """Load an ONNX file with ONNX Runtime.

    With `threads=0`, it has as many threads as PyTorch, so that processes share the cores.
    """
    runtime = library("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    # By default, threads keep spinning after a call and take the cores of the model whose turn is
    # next: torch then took 48 ms instead of 20 ms (docs/evidence/speed.md).
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Log errors only, because warnings about nodes and fused operators are for its developers.
    options.log_severity_level = 3
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Caller([i.name for i in session.get_inputs()], lambda inputs: session.run(None, inputs))


def openvino_caller(path: Path, *, threads: int, precision: str = "f32") -> Caller:
    """Load an OpenVINO file, tuned for latency.

    With `threads=0`, it has as many threads as PyTorch. `precision` is the precision of the
    computation, `f32` or `bf16`. It is always set, because OpenVINO's default is the processor's
    fastest precision, so the same file would give other numbers on another machine.
    """
    openvino = library("openvino", "openvino")
    settings: dict[str, str | int] = {
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
    }
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()

    def run(inputs: Mapping[str, Array]) -> list[Array]:
        return list(request.infer(inputs, share_inputs=True, share_outputs=True).values())

    return Caller([i.any_name for i in request.get_compiled_model().inputs], run)


def library(name: str, extra: str) -> ModuleType:
    """Import an optional library of one of kdcli's extras.

    Raises MachineError if the library is missing or broken; the hint says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{name} cannot be imported: {error}"
        raise MachineError(message, install_command(extra)) from None
