"""Picks device and dtype by running a kernel, because flags lie.

PyTorch reports CUDA as available on a card for which it has no kernels, and bfloat16 as supported
by emulation. What is no CUDA matter goes through `torch.accelerator`, so that MPS and XPU take the
same branches. devices.toml, dated, holds what is known of each GPU generation.
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
from typing import Any

import torch

from kdcli.disk import cache_dir, cache_key, disk_errors, read_json, write_atomic
from kdcli.errors import MachineError, UsageError, did_you_mean

DRIVER = Path("/proc/driver/nvidia")
"""Files of a loaded NVIDIA driver: `version` and `gpus/*/information`."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALED = ("cuda", "xpu")
"""Kinds on which float16 is trained, with loss scaling."""
ABSENT = {
    "cuda": ("", ""),  # `no_cuda` finds out
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
"""Kinds of accelerator -> message and hint where there is none."""


def accelerator() -> torch.device | None:
    """The kind of accelerator that this PyTorch finds here, without an index; None if there is
    none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def accelerators() -> list[torch.device]:
    """Every accelerator here; all are of one kind."""
    here = accelerator()
    return (
        []
        if here is None
        else [torch.device(here.type, i) for i in range(torch.accelerator.device_count())]
    )


def choose_device(wanted: str) -> torch.device:
    """`auto`, `cpu`, or a kind of accelerator with or without `:INDEX` -> a device that has just
    run a kernel. Raises UsageError: none of these; MachineError: absent (see `no_cuda`), no such
    index, or this PyTorch has no kernels for it."""
    kind, colon, index = wanted.partition(":")
    here = accelerator()
    kinds = list(dict.fromkeys([*ABSENT, *([here.type] if here else [])]))
    if kind not in ("auto", "cpu", *kinds) or (colon and not (kind in kinds and index.isdecimal())):
        raise UsageError(
            f"unknown device '{wanted}'; allowed: auto, cpu, {', '.join(kinds)}, and such as "
            "cuda:INDEX"
        )
    if kind == "cpu" or (kind == "auto" and here is None):
        return torch.device("cpu")
    if here is None or kind not in ("auto", here.type):
        why = no_cuda() if kind == "cuda" else MachineError(*ABSENT[kind])
        raise MachineError(f"--device {wanted}: {why.message}", why.hint)
    number, count = int(index or 0), torch.accelerator.device_count()
    if number >= count:
        last = f"{here.type}:{count - 1}"
        raise MachineError(
            f"--device {wanted}: the last such device here is {last}", f"count from {here.type}:0"
        )
    device = torch.device(here.type, number)
    _try_kernel(device)
    return device


def device_name(device: torch.device) -> str:
    """The product name of an accelerator, or its kind if PyTorch does not know the name."""
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto`, `fp32`, `bf16` or `fp16` -> dtype of matrix products. `auto` is bfloat16 where the
    hardware has it (on a CPU: where it measures faster; not on MPS, where nothing was measured),
    else float16 on GPUs with tensor cores, else float32. Raises UsageError: none of these;
    MachineError: bfloat16 or float16 asked for where it is only emulated or has no loss scaling."""
    if wanted not in ("auto", *DTYPES):
        raise UsageError(
            f"unknown dtype '{wanted}'; allowed: auto, "
            f"{', '.join(DTYPES)}{did_you_mean(wanted, DTYPES)}"
        )
    if wanted == "auto":
        if device.type != "mps" and has_bf16(device) and (device.type != "cpu" or _cpu_bf16_pays()):
            return torch.bfloat16
        return (
            torch.float16
            if device.type == "cuda" and _row(device).get("tensor_cores")
            else torch.float32
        )
    if wanted == "fp16" and device.type not in SCALED:
        raise MachineError(
            f"fp16 training needs a CUDA or XPU device, not {device.type}",
            "use --dtype bf16 or fp32",
        )
    if wanted == "bf16" and device.type != "cpu" and not has_bf16(device):
        others = "fp16 or fp32" if device.type in SCALED else "fp32"
        raise MachineError(f"{device_name(device)} has no bf16", f"use --dtype {others}")
    return DTYPES[wanted]


def has_bf16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware."""
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device):
            return bool(module.is_bf16_supported(including_emulation=False))
    return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_bf16_pays() -> bool:
    """True if a bfloat16 product beats float32 by a tenth; cached by processor and build, so all
    ranks agree."""
    named = [line for line in _cpuinfo() if line.startswith("model name")]
    key = cache_key(named[:1], sorted(_cpu_flags()), torch.__version__)
    cached = cache_dir() / f"cpu-bf16-{key}.json"
    with disk_errors(cached):
        if cached.is_file() and "pays" in (known := read_json(cached)):
            return bool(known["pays"])
    ratio = cpu_bf16_speed()
    with disk_errors(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(cached, json.dumps({"bf16_over_fp32": ratio, "pays": ratio > 1.1}))
    except MachineError:
        # Another process that started at the same time has put its own there.
        if not cached.is_file():
            raise
    return ratio > 1.1


def cpu_bf16_speed() -> float:
    """Speed of a bfloat16 matrix product over float32, the median of interleaved pairs."""
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
def _cpu_flags() -> frozenset[str]:
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def device_table() -> dict[str, Any]:
    """devices.toml: `as_of`, the month it describes; `device`, what each GPU generation can do."""
    return tomllib.loads(
        (importlib.resources.files("kdcli") / "engine" / "devices.toml").read_text("utf-8")
    )


def known_devices() -> list[dict[str, Any]]:
    """What is known of each GPU generation, the oldest first."""
    rows: list[dict[str, Any]] = device_table()["device"]
    return rows


def no_cuda() -> MachineError:
    """Why torch.cuda is not available and what to do: no driver, a CPU build, a driver too old, or
    CUDA's reason."""
    version = _driver_file("version")
    if not version:
        built = (
            ""
            if torch.version.cuda
            else f"; PyTorch {torch.__version__} is built without CUDA, too"
        )
        return MachineError(
            f"no CUDA device here: no NVIDIA driver is loaded ({DRIVER / 'version'} is "
            f"absent){built}",
            "use --device cpu; a GPU needs its driver first",
        )
    found = re.search(r"\b\d{3}\.[\d.]+", version[0])
    driver = f"NVIDIA driver {found[0]}" if found else "NVIDIA driver"
    models = sorted(
        {
            m
            for text in _driver_file("gpus/*/information")
            for m in re.findall(r"Model:\s*(.+)", text)
        }
    )
    lines = f"{' or '.join(_installs(models))}   (or --device cpu)"
    if torch.version.cuda is None:
        return MachineError(
            f"no CUDA device here: PyTorch {torch.__version__} is built without CUDA, but there is "
            f"an {driver} for "
            f"{', '.join(models) or 'a card'}",
            lines,
        )
    try:
        torch.cuda.current_device()
        reason = "torch.cuda starts and yet is not available"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if too_old := re.search(r"driver on your system is too old \(found version (\d+)", reason):
        served = f"{int(too_old[1]) // 1000}.{int(too_old[1]) % 1000 // 10}"
        return MachineError(
            f"no CUDA device here: the {driver} is too old: it serves CUDA {served}, PyTorch "
            f"{torch.__version__} is "
            f"built for CUDA {torch.version.cuda}",
            f"update the driver, or install a PyTorch that it serves: {lines}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return MachineError(
        f"no CUDA device here, though there is an {driver}: {reason}"
        + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"),
        "see what nvidia-smi says, or use --device cpu",
    )


def _driver_file(pattern: str) -> list[str]:
    """The driver's files that match; empty without a readable driver."""
    try:
        return [path.read_text("utf-8", "replace") for path in sorted(DRIVER.glob(pattern))]
    except OSError:
        return []


def _installs(models: list[str]) -> list[str]:
    """Install lines for cards known by name, else for the newest generation."""
    rows = known_devices()
    named = [
        r
        for r in rows
        if any(re.search(rf"\b{n}\b", m) for n in r["name"].split(", ") for m in models)
    ]
    return list(dict.fromkeys(_install(row) for row in named or rows[-1:]))


def _install(row: dict[str, Any]) -> str:
    """The install line, its date and remark."""
    remark = f"; {row['remark']}" if "remark" in row else ""
    return f"{row['install']}   (as of {device_table()['as_of']}{remark})"


def _row(device: torch.device) -> dict[str, Any]:
    """The newest known generation not newer than the card."""
    own = torch.cuda.get_device_capability(device)
    older = [r for r in known_devices() if tuple(map(int, r["capability"].split("."))) <= own]
    return older[-1] if older else known_devices()[0]


def _try_kernel(device: torch.device) -> None:
    """Run one small kernel; the advice on failure depends on whether this build has kernels for the
    card."""
    try:
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        cannot = f"PyTorch {torch.__version__} cannot run on {device_name(device)}"
        if device.type != "cuda":
            raise MachineError(
                f"{cannot}: {first}", "the device or its driver refuses; use --device cpu"
            ) from None
        major, minor = torch.cuda.get_device_capability(device)
        built = torch.cuda.get_arch_list()
        raise MachineError(
            f"{cannot} (compute capability {major}.{minor}; this build has {', '.join(built)}): "
            f"{first}",
            "the card or its driver refuses; see what nvidia-smi says, or use --device cpu"
            if _has_kernels(built, major, minor)
            else f"{_install(_row(device))}   (or --device cpu)",
        ) from None


def _has_kernels(built: list[str], major: int, minor: int) -> bool:
    """True if the build has machine code for the card's generation, or portable (`compute_`) code
    of an older one."""
    for kind, number in (arch.split("_", 1) for arch in built):
        of_major, of_minor = divmod(int(re.sub(r"\D", "", number)), 10)
        if (of_major == major and of_minor <= minor) or (
            kind == "compute" and (of_major, of_minor) <= (major, minor)
        ):
            return True
    return False
