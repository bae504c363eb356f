"""Implement `kdcli doctor`: run a test kernel on the processor and on every GPU."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.table import Table

from kdcli.deploy.environment import MachineFacts, describe_environment, installed, versions
from kdcli.engine.device import accelerators, choose_device, choose_dtype, device_table, no_cuda
from kdcli.errors import MachineError

TRACKER_PACKAGES = sorted(name.replace("_", "-") for name in LOGGER_TYPE_TO_CLASS)
OPTIONAL_LIBRARIES = {
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "pip install 'kdcli[onnx]'"),
    "openvino": "pip install 'kdcli[openvino]'",
    **dict.fromkeys(("sacrebleu", "rouge-score"), "pip install 'kdcli[generation]'"),
    **dict.fromkeys(("sentence-transformers", "mteb"), "pip install 'kdcli[embed]'"),
    **{name: f"--report-to {name}" for name in TRACKER_PACKAGES},
}
"""Optional libraries, each with the command that installs it or the option that needs it."""


class DoctorFacts(TypedDict):
    """What `examine` finds out.

    `devices` maps each device to a verdict, and `optional` each optional library to its version or
    to a way to install it. `devices_known_as_of` is the month of the table of GPU generations.
    """

    environment: MachineFacts
    versions: dict[str, str]
    devices: dict[str, str]
    optional: dict[str, str]
    devices_known_as_of: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`, as JSON and as a table."""

    facts: DoctorFacts

    def to_json(self) -> str:
        return json.dumps(self.facts, indent=2)

    def renderables(self) -> Iterable[Table]:
        table = Table("", "found", show_header=False, box=None)
        for key, value in {**self.facts["environment"], **self.facts["versions"]}.items():
            table.add_row(
                key, ", ".join(value) or "none" if isinstance(value, list) else f"{value}"
            )
        for name, version in self.facts["optional"].items():
            table.add_row(name, version)
        for device, verdict in self.facts["devices"].items():
            table.add_row(device, verdict)
        yield table


def examine() -> Diagnosis:
    """Run a kernel on the processor and on every accelerator.

    Without an accelerator, the diagnosis says why CUDA is unavailable.
    """
    devices = {name: _verdict(name) for name in ("cpu", *map(str, accelerators()))}
    if len(devices) == 1:
        devices["cuda"] = _failure(no_cuda())
    optional = {
        name: installed([name]).get(name, f"not installed: {remedy}")
        for name, remedy in OPTIONAL_LIBRARIES.items()
    }
    return Diagnosis(
        {
            "environment": describe_environment(),
            "versions": versions(),
            "devices": devices,
            "optional": optional,
            "devices_known_as_of": device_table()["as_of"],
        }
    )


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
