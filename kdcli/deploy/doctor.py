"""Implement `kdcli doctor`: describe a machine, and try its devices and backends.

The result contains nothing that identifies a person or a host, because it is meant for bug reports.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from kdcli.deploy.environment import describe_environment, installed, versions
from kdcli.deploy.sessions import Caller, library, onnx_caller, openvino_caller
from kdcli.disk import cache_dir, without_home
from kdcli.engine.allocator import keep_freed_memory
from kdcli.engine.device import (
    accelerators,
    choose_device,
    choose_dtype,
    cpu_flags,
    device_table,
    no_cuda,
)
from kdcli.errors import MachineError, first_line
from kdcli.version import install_command

TRACKER_PACKAGES = sorted(name.replace("_", "-") for name in LOGGER_TYPE_TO_CLASS)
OPTIONAL_LIBRARIES = {
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), install_command("onnx")),
    "openvino": install_command("openvino"),
    **dict.fromkeys(("sacrebleu", "rouge-score"), install_command("generation")),
    "mteb": install_command("embed"),
    **{name: f"--report-to {name}" for name in TRACKER_PACKAGES},
}
"""Optional libraries, each with the command that installs it or the option that needs it."""

MISSING = "not installed"

FEATURES = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX BF16",
    "asimddp": "dot product",
    "i8mm": "i8mm",
    "bf16": "BF16",
    "sve": "SVE",
}
"""Instruction sets that matter for speed: the name that Linux gives them, and their usual name."""

AVX512_CORE = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
INT8_KERNELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("AMX", frozenset({"avx2", "fma", "amx_tile", "amx_int8"})),
    ("AVX-512 VNNI", AVX512_CORE | {"avx512_vnni"}),
    ("AVX-512 without VNNI", AVX512_CORE),
    ("AVX-VNNI", frozenset({"avx2", "fma", "avx_vnni"})),
    ("AVX2 without VNNI", frozenset({"avx2", "fma"})),
    ("i8mm", frozenset({"i8mm"})),
    ("dot product", frozenset({"asimddp"})),
)
"""Kernels of ONNX Runtime for products of uint8 and int8, and the instruction sets that each needs.
ONNX Runtime uses the first one that it can: see MLAS_PLATFORM in its mlas/lib/platform.cpp."""

VALUES_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "GLIBC_TUNABLES",
    "HF_DATASETS_OFFLINE",
    "HF_HUB_ETAG_TIMEOUT",
    "HF_HUB_OFFLINE",
    "KDCLI_DEVICE",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "TRANSFORMERS_OFFLINE",
)
DEVICE_ID = re.compile(r"\b(GPU|MIG)-[\w/-]+")
"""The identifier of one GPU or of a part of it, which is the same in every report of a machine."""
VALUES_HIDDEN = (
    "ALL_PROXY",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "KDCLI_CACHE",
    "KDCLI_OUTPUT_DIR",
    "LD_PRELOAD",
    "REQUESTS_CA_BUNDLE",
)
"""Variables that may name a person or a host or hold a password. Only their names are shown."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`, as JSON and as a block of Markdown.

    Attributes:
        facts: The values that `--json` prints.
        rows: The names and values of the block.
    """

    facts: Mapping[str, object]
    rows: list[tuple[str, str]]

    def to_json(self) -> str:
        return without_home(json.dumps(self.facts, indent=2))

    def to_markdown(self) -> str:
        """Return a fenced block with a line for each fact."""
        width = max(len(name) for name, _ in self.rows) + 2
        lines = (f"{name:{width}}{value.strip()}" for name, value in self.rows)
        lines = (line.replace("\n", "\n" + " " * width) for line in lines)
        return without_home("\n".join(["```text", *lines, "```"]))


def examine() -> Diagnosis:
    """Describe the machine, and run a kernel on every device and in every backend.

    Without an accelerator, the diagnosis says why CUDA is unavailable.
    """
    devices = {name: _verdict(name) for name in ("cpu", *map(str, accelerators()))}
    if len(devices) == 1:
        devices["cuda"] = _failure(no_cuda())
    optional = {
        name: installed([name]).get(name, f"{MISSING}: {remedy}")
        for name, remedy in OPTIONAL_LIBRARIES.items()
    }
    machine, flags = describe_environment(), cpu_flags()
    features = [name for flag, name in FEATURES.items() if flag in flags]
    kernel, threads = int8_kernel(flags), torch.get_num_threads()
    available, free = psutil.virtual_memory().available, _free_space()
    # A path that the user chose may contain the name of a customer or a project.
    cache = "$KDCLI_CACHE" if os.environ.get("KDCLI_CACHE") else str(cache_dir())
    libraries, backends, named = versions(), _backends(optional), variables(os.environ)
    keeps_memory = keep_freed_memory()
    facts = {
        "environment": machine,
        "processor": {"features": features, "onnx_int8_kernel": kernel},
        "threads": {"latency": machine["latency_threads"], "torch": threads},
        "space": {
            "memory_bytes": machine["memory_bytes"],
            "memory_available_bytes": available,
            "freed_memory_is_kept": keeps_memory,
            "cache": cache,
            "cache_free_bytes": free,
        },
        "versions": libraries,
        "devices": devices,
        "backends": backends,
        "optional": optional,
        "variables": named,
        "devices_known_as_of": device_table()["as_of"],
    }
    absent = [n for n in TRACKER_PACKAGES if optional[n].startswith(MISSING)]
    cores = f"{machine['physical_cores']} physical and {machine['logical_cores']} logical cores"
    rows = [
        *libraries.items(),
        ("python", f"{machine['python']} on {machine['os']}"),
        ("processor", f"{machine['cpu']}, {cores}"),
        ("features", ", ".join(features) or "unknown"),
        ("int8 kernel", kernel),
        ("threads", f"{machine['latency_threads']} for latency, {threads} for torch"),
        ("memory", f"{_gb(machine['memory_bytes'])}, {_gb(available)} available"),
        ("freed memory", "kept for reuse" if keeps_memory else "left to the allocator"),
        ("cache", f"{cache}, {'unknown space' if free is None else _gb(free)} free"),
        ("gpus", ", ".join(machine["gpus"]) or "none"),
        *((f"device {name}", verdict) for name, verdict in devices.items()),
        *((f"backend {name}", verdict) for name, verdict in backends.items()),
        *((name, version) for name, version in optional.items() if name not in absent),
        *([("--report-to", f"{MISSING}: {', '.join(absent)}")] if absent else []),
        ("variables", ", ".join(f"{n}={value}" for n, value in named.items()) or "none"),
    ]
    return Diagnosis(facts, rows)


def int8_kernel(flags: frozenset[str]) -> str:
    """Return the kernel that ONNX Runtime uses for int8 products.

    Args:
        flags: The names of the processor's instruction sets, as Linux lists them.
    """
    for name, needed in INT8_KERNELS:
        if needed <= flags:
            return name
    return "the portable one" if flags else "unknown"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what kdcli does, without values that may be private."""
    shown = {
        name: DEVICE_ID.sub(r"\1-...", environment[name])
        for name in VALUES_SHOWN
        if name in environment
    }
    hidden = [name for name in VALUES_HIDDEN if name in environment or name.lower() in environment]
    return shown | dict.fromkeys(hidden, "(set)")


def _free_space() -> int | None:
    """Return the free bytes on the disk of the cache; None if they are unknown."""
    folder = cache_dir().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _backends(optional: Mapping[str, str]) -> dict[str, str]:
    """Return a verdict on each backend of `--backend`. ONNX Runtime and OpenVINO are tried."""
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++", "cl"]
    compiler = next((Path(each).name for each in compilers if each and shutil.which(each)), None)
    return {
        "compile": f"not tried; C++ compiler: {compiler or 'none'}",
        "onnx": _tried("onnxruntime", optional, onnx_caller),
        "openvino": _tried("openvino", optional, openvino_caller),
    }


def _tried(runtime: str, optional: Mapping[str, str], load: Callable[..., Caller]) -> str:
    """Run an int8 product in a runtime. Returns a verdict."""
    missing = next(
        (optional[name] for name in (runtime, "onnx") if optional[name].startswith(MISSING)), None
    )
    if missing is not None:
        return missing
    size = 64
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "product.onnx"
        try:
            _write_product(file, size)
            (result,) = load(file, threads=1)({"x": np.ones((1, size), np.uint8)})
        except Exception as error:  # noqa: BLE001  # The runtimes raise their own classes.
            # The directory of temporary files may name a person or a host.
            reason = first_line(error).replace(os.path.realpath(folder), "").replace(folder, "")
            return f"fails: {reason}"
    works = np.array_equal(np.asarray(result), np.full((1, size), size))
    return "works" if works else "fails: an int8 product has wrong values"


def _write_product(file: Path, size: int) -> None:
    """Write an ONNX file with the product of uint8 rows and an int8 matrix of ones."""
    onnx = library("onnx", "onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", kinds.UINT8, [1, size])],
        [helper.make_tensor_value_info("y", kinds.INT32, [1, size])],
        [onnx.numpy_helper.from_array(np.ones((size, size), np.int8), "w")],
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), file)


def _verdict(name: str) -> str:
    try:
        device = choose_device(name)
    except MachineError as error:
        return _failure(error)
    works = "works"
    if device.type == "cuda":
        works += " (compute capability {}.{})".format(*torch.cuda.get_device_capability(device))
    return f"{works}; --dtype auto is {str(choose_dtype('auto', device)).removeprefix('torch.')}"


def _failure(error: MachineError) -> str:
    return f"{error.message}\n{error.hint or ''}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
