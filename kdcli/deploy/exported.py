"""A directory that `kdcli export` wrote, run by the runtime it was written for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from kdcli.deploy.export import FILES, RUNTIMES
from kdcli.deploy.runners import Runner, file_runner
from kdcli.deploy.sessions import library
from kdcli.errors import UsageError, first_line
from kdcli.models.load import load_config
from kdcli.types import Card

FACTS = "export.json"
EMBEDDING = "embedding"
"""Kind of an export with vectors of texts."""


class RuntimeNetwork(Protocol):
    """A network that its own runtime computes, not torch."""

    @property
    def config(self) -> PreTrainedConfig: ...

    def runner(self, threads: int) -> Runner: ...


@dataclass(frozen=True)
class RunnerNetwork:
    """A network that is ready to run on some backend."""

    ready: Runner
    config: PreTrainedConfig

    def runner(self, threads: int) -> Runner:
        """The runner, which has its threads already."""
        return self.ready


@dataclass(frozen=True)
class Export:
    """An exported model: its directory, the content of export.json and the configuration of the
    model it was made of. `card` is that model's, with the bytes and the hash of what was written.
    """

    folder: Path
    facts: Mapping[str, Any]
    config: PreTrainedConfig

    @property
    def format(self) -> str:
        """`onnx` or `openvino`, a backend of `kdcli.deploy.runners`."""
        return str(self.facts["format"])

    @property
    def precision(self) -> str:
        """`fp32`, `fp16`, `int8` or `q4`."""
        return str(self.facts["precision"])

    @property
    def file(self) -> Path:
        """The file that a runtime loads."""
        return self.folder / file_in(self.facts)

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs, in order."""
        return list(self.facts["outputs"])

    @property
    def card(self) -> Card:
        return Card(**self.facts["card"])

    def runner(self, threads: int) -> Runner:
        """The file, loaded; outputs in the order of `kdcli.deploy.export.OUTPUTS`. Raises
        MachineError: the runtime is missing; UsageError: it cannot load the file."""
        file, name = self.file, RUNTIMES[self.format][-1]
        library(name, self.format)
        try:
            return file_runner(file, threads=threads)
        except Exception as error:  # noqa: BLE001  # the runtimes raise types of their own
            raise UsageError(
                f"{name} cannot load {file}: {first_line(error)}", "export the model again"
            ) from None


def file_in(facts: Mapping[str, Any]) -> str:
    """The place in an export's directory of the file to load, by its export.json. Raises KeyError:
    an unknown format or precision."""
    return FILES[facts["format"], facts["precision"]]


def is_export(source: str) -> bool:
    """Whether a source is a directory that `kdcli export` wrote."""
    return (Path(source) / FACTS).is_file()


def open_export(source: str, device: torch.device | None = None) -> Export:
    """Read an export and check its files. Raises UsageError: damaged, incomplete, of an earlier
    version, or to be run on a `device` other than the CPU."""
    folder, again = Path(source), "export the model again"
    if device is not None and device.type != "cpu":
        raise UsageError(
            f"{source} is an export, which runs on the CPU only, not on {device}",
            "add --device cpu",
        )
    try:
        facts = json.loads((folder / FACTS).read_text("utf-8"))
        sizes = dict(facts["files"])
        if (facts["format"], facts["precision"]) not in FILES or file_in(facts) not in sizes:
            raise ValueError("it names another format")
        if not isinstance(facts["outputs"], list):
            raise ValueError("it names no outputs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder / FACTS} cannot be read: {type(error).__name__} {error}", again
        ) from None
    if not isinstance(facts.get("card"), dict):
        raise UsageError(
            f"{folder / FACTS} is of an earlier kdcli: it does not describe the model", again
        )
    for name, size in sizes.items():
        # A name is a file of the directory, not a path out of it.
        inside = Path(name).parent.name if Path(name).parent.name in RUNTIMES else ""
        file = folder / inside / Path(name).name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise UsageError(f"{file} {problem}", again)
    return Export(folder, facts, load_config(source, weights=False, compacted=True))


def in_own_runtime(network: Any) -> RuntimeNetwork | None:
    """The network, if its own runtime computes it; None for a network of torch."""
    return network if isinstance(network, Export | RunnerNetwork) else None
