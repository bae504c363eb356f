"""`kdcli doctor`: what this machine can run, each thing tried."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from kdcli.bench.device import choose_device, choose_dtype
from kdcli.bench.environment import environment, versions
from kdcli.errors import MachineError


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    facts: dict[str, Any]

    def to_json(self) -> str:
        """All facts."""
        return json.dumps(self.facts, indent=2)

    def renderables(self) -> Iterable[Any]:
        """One table of facts."""
        table = Table("", "found", show_header=False, box=None)
        for key, value in (self.facts["environment"] | self.facts["versions"]).items():
            table.add_row(key, ", ".join(value) or "none" if isinstance(value, list) else f"{value}")
        for device, verdict in self.facts["devices"].items():
            table.add_row(device, verdict)
        yield table


def examine() -> Diagnosis:
    """Try the processor and every CUDA device."""
    devices = {}
    for name in ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))):
        try:
            device = choose_device(name)
            devices[name] = f"works; --dtype auto is {str(choose_dtype('auto', device)).removeprefix('torch.')}"
        except MachineError as error:
            devices[name] = f"{error.message}\n{error.hint or ''}"
    return Diagnosis({"environment": environment(), "versions": versions(), "devices": devices})
