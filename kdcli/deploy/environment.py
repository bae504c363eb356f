"""Describe the machine and the package versions of a measurement.

The description contains nothing that identifies a person or a host.
"""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import TypedDict

import psutil

from kdcli.deploy.old_machines.measure_encoders import cpu_name
from kdcli.engine.device import accelerators, device_name
from kdcli.version import full_version

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)


class MachineFacts(TypedDict):
    """The machine of a measurement, with the number of threads of latency measurements."""

    cpu: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    gpus: list[str]
    os: str
    python: str
    latency_threads: int


def describe_environment() -> MachineFacts:
    """Return the processor, cores, memory, GPUs, operating system and Python version."""
    return {
        "cpu": cpu_name(),
        "physical_cores": psutil.cpu_count(logical=False) or 1,
        "logical_cores": psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [device_name(device) for device in accelerators()],
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "latency_threads": latency_threads(),
    }


def latency_threads() -> int:
    """Return the number of threads for latency measurements.

    This is the number of physical cores that the process may use, whatever a launcher set.
    """
    cores = psutil.cpu_count(logical=False) or 1
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution that is installed, by name."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def versions() -> dict[str, str]:
    """Return the versions of kdcli and of the libraries that results depend on."""
    return {"kdcli": full_version()} | {
        name: importlib.metadata.version(name) for name in LIBRARIES
    }
