"""Choose the device and the dtype of a run.

A small kernel tests the device, because PyTorch's flags are not reliable: PyTorch reports CUDA as
available on a card for which it has no kernels, and bfloat16 as supported if it is only emulated.
Everything that is not specific to CUDA goes through `torch.accelerator`, so MPS and XPU take the
same branches. `devices.toml` has a date and describes each GPU generation.
"""

import functools
import importlib.resources
import json
import os
import re
import statistics
import time
import tomllib
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from kdcli.disk import cache_dir, cache_key, disk_errors, read_json, use_entry, write_atomic
from kdcli.errors import MachineError, UsageError

DRIVER = Path("/proc/driver/nvidia")
"""Files of a loaded NVIDIA driver: `version` and `gpus/*/information`."""

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALED = ("cuda", "xpu")
"""Kinds of device that train in float16, with loss scaling."""
ABSENT = {
    "cuda": ("", ""),  # See `no_cuda`.
    "mps": (
        "this PyTorch finds no Metal device here",
        "it needs an Apple chip, macOS 14 and PyTorch's macOS wheel; use --device auto",
    ),
    "xpu": (
        "this PyTorch finds no Intel GPU here",
        "it needs the GPU's driver and pip install torch --index-url "
        "https://download.pytorch.org/whl/xpu; "
        "or --device auto",
    ),
}
"""Kind of accelerator -> the message and the hint if it is absent."""


class Generation(TypedDict):
    """A GPU generation in devices.toml.

    `name` lists its cards, separated by `, `. `capability` is the compute capability, such as
    `7.5`. `last_torch` is the last PyTorch with kernels for it; without it, the newest has them.
    """

    capability: str
    name: str
    tensor_cores: bool
    bf16: bool
    install: str
    last_torch: NotRequired[str]
    remark: NotRequired[str]


class DeviceTable(TypedDict):
    """The content of devices.toml."""

    as_of: str
    device: list[Generation]


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that PyTorch finds, without an index; None without any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def accelerators() -> list[torch.device]:
    """List the accelerators of this machine. All are of one kind."""
    present = accelerator()
    if present is None:
        return []
    return [torch.device(present.type, i) for i in range(torch.accelerator.device_count())]


def choose_device(wanted: str) -> torch.device:
    """Return the device with a name, after a test that it can run a kernel.

    Args:
        wanted: `auto`, `cpu`, or a kind of accelerator with or without `:INDEX`.

    Raises:
        UsageError: The name is unknown.
        MachineError: The device is absent (see `no_cuda`), or this PyTorch has no kernels for it.
    """
    kind, colon, index = wanted.partition(":")
    present = accelerator()
    kinds = list(dict.fromkeys([*ABSENT, *([present.type] if present else [])]))
    if kind not in ("auto", "cpu", *kinds) or (colon and not (kind in kinds and index.isdecimal())):
        raise UsageError(
            f"unknown device '{wanted}'; allowed: auto, cpu, {', '.join(kinds)}, or with an index "
            "as in cuda:0"
        )
    if kind == "cpu" or (kind == "auto" and present is None):
        return torch.device("cpu")
    if present is None or kind not in ("auto", present.type):
        cause = no_cuda() if kind == "cuda" else MachineError(*ABSENT[kind])
        raise MachineError(f"--device {wanted}: {cause.message}", cause.hint)
    number, count = int(index or 0), torch.accelerator.device_count()
    if number >= count:
        last = f"{present.type}:{count - 1}"
        raise MachineError(
            f"--device {wanted}: the last such device here is {last}",
            f"the first one is {present.type}:0",
        )
    device = torch.device(present.type, number)
    _try_kernel(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the product name of an accelerator, or its kind if PyTorch does not know the name."""
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products.

    `auto` chooses bfloat16 if the hardware has it. On a CPU, bfloat16 must also be measurably
    faster; on MPS, `auto` never chooses it, because it was not measured there. Otherwise, `auto` is
    float16 on GPUs with tensor cores, and float32 elsewhere.

    Args:
        wanted: `auto`, `fp32`, `bf16` or `fp16`.
        device: The device of the products.

    Raises:
        MachineError: The device only emulates bfloat16, or float16 has no loss scaling on it.
    """
    if wanted == "auto":
        if device.type != "mps" and has_bf16(device) and (device.type != "cpu" or _cpu_bf16_pays()):
            return torch.bfloat16
        has_tensor_cores = device.type == "cuda" and _generation(device).get("tensor_cores")
        return torch.float16 if has_tensor_cores else torch.float32
    if wanted == "fp16" and device.type not in SCALED:
        raise MachineError(
            f"fp16 training needs a CUDA or XPU device, not {device.type}",
            "use --dtype bf16 or fp32",
        )
    if wanted == "bf16" and device.type != "cpu" and not has_bf16(device):
        others = "fp16 or fp32" if device.type in SCALED else "fp32"
        raise MachineError(f"{device_name(device)} has no bf16", f"use --dtype {others}")
    return TORCH_DTYPES[wanted]


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware supports bfloat16 products."""
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device):
            return bool(module.is_bf16_supported(including_emulation=False))
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_bf16_pays() -> bool:
    """Whether a bfloat16 product is at least 10 % faster than float32.

    The result is cached by processor and PyTorch build, so that all ranks get the same answer.
    """
    models = [line for line in _cpuinfo() if line.startswith("model name")]
    key = cache_key(models[:1], sorted(cpu_flags()), torch.__version__)
    cached = cache_dir() / f"cpu-bf16-{key}.json"
    use_entry(cached, "speed of bfloat16 products on this processor")
    with disk_errors(cached):
        if cached.is_file() and "pays" in (result := read_json(cached)):
            return bool(result["pays"])
    ratio = cpu_bf16_speed()
    try:
        write_atomic(cached, json.dumps({"bf16_over_fp32": ratio, "pays": ratio > 1.1}))
    except MachineError:
        # Another process, started at the same time, may have written its own result.
        if not cached.is_file():
            raise
    return ratio > 1.1


def cpu_bf16_speed() -> float:
    """Measure how much faster a bfloat16 matrix product is than float32.

    The result is the median of interleaved pairs.
    """
    a, b = torch.ones(2048, 768), torch.ones(768, 768)
    pairs = {torch.float32: (a, b), torch.bfloat16: (a.bfloat16(), b.bfloat16())}
    ratios = []
    for _ in range(12):
        seconds = {}
        for dtype, (x, y) in pairs.items():
            began = time.perf_counter()
            torch.mm(x, y)
            seconds[dtype] = time.perf_counter() - began
        ratios.append(seconds[torch.float32] / seconds[torch.bfloat16])
    return statistics.median(ratios[2:])


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the processor, as Linux names them; empty elsewhere."""
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def device_table() -> DeviceTable:
    """Read devices.toml: `as_of` is its month, and `device` lists the GPU generations."""
    file = importlib.resources.files("kdcli") / "engine" / "devices.toml"
    table: DeviceTable = tomllib.loads(file.read_text("utf-8"))  # type: ignore[assignment]
    return table


def known_devices() -> list[Generation]:
    """List the known GPU generations, oldest first."""
    return device_table()["device"]


def no_cuda() -> MachineError:
    """Explain why torch.cuda is not available, and what to do.

    The driver is not loaded or too old, PyTorch is built without CUDA, or CUDA itself gives the
    reason.
    """
    version = _driver_file("version")
    if not version:
        build = (
            ""
            if torch.version.cuda
            else f"; PyTorch {torch.__version__} is built without CUDA, too"
        )
        return MachineError(
            f"no CUDA device here: no NVIDIA driver is loaded ({DRIVER / 'version'} is "
            f"absent){build}",
            "use --device cpu, or install the driver of the GPU",
        )
    number = re.search(r"\b\d{3}\.[\d.]+", version[0])
    driver = f"NVIDIA driver {number[0]}" if number else "NVIDIA driver"
    models = sorted(
        {
            m
            for text in _driver_file("gpus/*/information")
            for m in re.findall(r"Model:\s*(.+)", text)
        }
    )
    install = f"{' or '.join(_install_lines(models))}   (or --device cpu)"
    if torch.version.cuda is None:
        return MachineError(
            f"no CUDA device here: PyTorch {torch.__version__} is built without CUDA, but there is "
            f"an {driver} for {', '.join(models) or 'a card'}",
            install,
        )
    try:
        torch.cuda.current_device()
        reason = "torch.cuda can be initialised but is not available"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if too_old := re.search(r"driver on your system is too old \(found version (\d+)", reason):
        supported = f"{int(too_old[1]) // 1000}.{int(too_old[1]) % 1000 // 10}"
        return MachineError(
            f"no CUDA device here: the {driver} is too old: it supports CUDA {supported}, but "
            f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}",
            f"update the driver, or install a PyTorch that it supports: {install}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return MachineError(
        f"no CUDA device here, although there is an {driver}: {reason}"
        + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"),
        "check the output of nvidia-smi, or use --device cpu",
    )


def _driver_file(pattern: str) -> list[str]:
    """Read the driver's files that match a pattern; empty without a readable driver."""
    try:
        return [path.read_text("utf-8", "replace") for path in sorted(DRIVER.glob(pattern))]
    except OSError:
        return []


def _install_lines(models: list[str]) -> list[str]:
    """Return install lines for the cards with known names, or for the newest generation."""
    rows = known_devices()
    matches = [
        r
        for r in rows
        if any(re.search(rf"\b{n}\b", m) for n in r["name"].split(", ") for m in models)
    ]
    return list(dict.fromkeys(_install_line(row) for row in matches or rows[-1:]))


def _install_line(row: Generation) -> str:
    """Return an install line with its date and remark."""
    remark = f"; {row['remark']}" if "remark" in row else ""
    return f"{row['install']}   (as of {device_table()['as_of']}{remark})"


def _generation(device: torch.device) -> Generation:
    """Return the newest known generation that is not newer than the card."""
    capability = torch.cuda.get_device_capability(device)
    older = [
        r for r in known_devices() if tuple(map(int, r["capability"].split("."))) <= capability
    ]
    return older[-1] if older else known_devices()[0]


def _try_kernel(device: torch.device) -> None:
    """Run a small kernel.

    The advice after a failure depends on whether this build has kernels for the card.
    """
    try:
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        problem = f"PyTorch {torch.__version__} cannot run on {device_name(device)}"
        if device.type != "cuda":
            raise MachineError(
                f"{problem}: {reason}", "the device or its driver fails; use --device cpu"
            ) from None
        major, minor = torch.cuda.get_device_capability(device)
        architectures = torch.cuda.get_arch_list()
        raise MachineError(
            f"{problem} (compute capability {major}.{minor}; this build has "
            f"{', '.join(architectures)}): {reason}",
            "the card or its driver fails; check the output of nvidia-smi, or use --device cpu"
            if _has_kernels(architectures, major, minor)
            else f"{_install_line(_generation(device))}   (or --device cpu)",
        ) from None


def _has_kernels(architectures: list[str], major: int, minor: int) -> bool:
    """Whether a build has machine code for the card's generation.

    Portable (`compute_`) code of an older generation also counts.
    """
    for kind, number in (architecture.split("_", 1) for architecture in architectures):
        code_major, code_minor = divmod(int(re.sub(r"\D", "", number)), 10)
        if (code_major == major and code_minor <= minor) or (
            kind == "compute" and (code_major, code_minor) <= (major, minor)
        ):
            return True
    return False
