"""Read a directory that `kdcli export` wrote, and run it with the runtime it was written for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from kdcli.deploy.export import FILES, RUNTIMES
from kdcli.deploy.runners import Runner, file_runner
from kdcli.deploy.sessions import library
from kdcli.disk import read_json, user_path
from kdcli.errors import UsageError, first_line, one_line, raise_machine_error
from kdcli.models.files import FACTS
from kdcli.models.load import load_config
from kdcli.types import Card

EMBEDDING_KIND = "embedding"
"""The kind of an export that returns text embeddings."""
AGAIN = "export the model again"


@dataclass(frozen=True)
class TrainedOn:
    """The task that a run trained a model on, and the columns of its data by their role."""

    task: str
    columns: Mapping[str, str | list[str]]


class RuntimeNetwork(Protocol):
    """A network that its own runtime computes instead of torch."""

    @property
    def config(self) -> PreTrainedConfig: ...

    def runner(self, threads: int) -> Runner: ...


@dataclass(frozen=True)
class RunnerNetwork:
    """A network that is ready to run on some backend."""

    ready: Runner
    config: PreTrainedConfig

    def runner(self, threads: int) -> Runner:
        """Return the runner, which already has its threads."""
        return self.ready


@dataclass(frozen=True)
class Export:
    """An exported model: its directory, its export.json, and the original model's configuration.

    `card` describes the original model, with the size and the hash of the exported files.
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
        """The file that the runtime loads."""
        return self.folder / file_in(self.facts)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in order."""
        return list(self.facts["outputs"])

    @property
    def card(self) -> Card:
        return TypeAdapter(Card).validate_python(self.facts["card"])

    def runner(self, threads: int) -> Runner:
        """Load the file; its outputs have the order of `kdcli.deploy.export.GRAPH_OUTPUTS`.

        Raises MachineError if the runtime is missing, and UsageError if it cannot load the file.
        """
        file, name = self.file, RUNTIMES[self.format][-1]
        library(name, self.format)
        try:
            return file_runner(file, threads=threads)
        except Exception as error:  # noqa: BLE001  # the runtimes raise their own types
            raise_machine_error(error)
            raise UsageError(f"{name} cannot load {file}: {first_line(error)}", AGAIN) from None


def file_in(facts: Mapping[str, Any]) -> str:
    """Return the path, inside an export's directory, of the file to load, given its export.json.

    Raises KeyError if the format or the precision is unknown.
    """
    return FILES[facts["format"], facts["precision"]]


def is_export(source: str) -> bool:
    """Return whether a source is a directory that `kdcli export` wrote."""
    return (user_path(source) / FACTS).is_file()


def trained_on(folder: Path) -> TrainedOn | None:
    """Read what an export tells of the run that trained its model.

    Returns:
        None if the directory holds no export, or no run trained the model.

    Raises:
        UsageError: The export is damaged.
    """
    if not is_export(str(folder)):
        return None
    try:
        told = read_json(folder / FACTS).get("trained_on")
        return TypeAdapter(TrainedOn | None).validate_python(told)
    except ValidationError as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> UsageError:
    """Return the error for an export whose facts cannot be read."""
    return UsageError(
        f"{folder / FACTS} cannot be read: {type(error).__name__} {one_line(error)}", AGAIN
    )


def open_export(source: str, device: torch.device | None = None) -> Export:
    """Read an export and check its files.

    Raises UsageError if the export is damaged, incomplete or from an earlier version, or if
    `device` is not the CPU.
    """
    folder = user_path(source)
    if device is not None and device.type != "cpu":
        raise UsageError(
            f"{source} is an export, which runs on the CPU only, not on {device}",
            "add --device cpu",
        )
    try:
        facts = read_json(folder / FACTS)
        sizes = TypeAdapter(dict[str, int]).validate_python(facts["files"])
        if (facts["format"], facts["precision"]) not in FILES:
            raise ValueError("it names another format")
        if file_in(facts) not in sizes:
            raise ValueError(f"it does not name {file_in(facts)}")
        TypeAdapter(list[str]).validate_python(facts["outputs"])
    except (UsageError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None
    try:
        TypeAdapter(Card).validate_python(facts.get("card"))
    except ValidationError:
        raise UsageError(
            f"{folder / FACTS} is damaged or from an earlier kdcli: it does not describe the model",
            AGAIN,
        ) from None
    for name, size in sizes.items():
        # A name must be a file of the directory, not a path out of it.
        inside = Path(name).parent.name if Path(name).parent.name in RUNTIMES else ""
        file = folder / inside / Path(name).name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual:,} bytes, not {size:,}"
            raise UsageError(f"{file} {problem}", AGAIN)
    return Export(folder, facts, load_config(source, weights=False, compacted=True))


def in_own_runtime(network: object) -> RuntimeNetwork | None:
    """Return the network if its own runtime computes it, and None if it is a torch network."""
    return network if isinstance(network, Export | RunnerNetwork) else None
