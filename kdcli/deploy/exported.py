"""Read a directory that `kdcli export` wrote, and run it with the runtime it was written for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    InstanceOf,
    ValidationError,
    model_validator,
)
from transformers import PreTrainedConfig

from kdcli.deploy.export import FILES, RUNTIMES
from kdcli.deploy.runners import Runner, file_runner
from kdcli.deploy.sessions import library
from kdcli.disk import read_json, user_path
from kdcli.errors import UsageError, first_line, first_problem, raise_machine_error
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


class _Training(BaseModel):
    trained_on: TrainedOn | None = None


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


class Export(BaseModel):
    """An exported model: what its export.json says, and the original model's configuration.

    Attributes:
        folder: Its directory.
        config: The configuration.
        format: `onnx` or `openvino`, a backend of `kdcli.deploy.runners`.
        precision: `fp32`, `fp16`, `int8`, `int8-packed` or `q4`.
        files: The size of every model file, by its path in the directory.
        outputs: The names of the outputs, in order.
        card: The size of the original model, with the size and the hash of the exported files.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    config: InstanceOf[PreTrainedConfig]
    format: str
    precision: str
    files: dict[str, int]
    outputs: list[str]
    card: Card

    @property
    def file(self) -> Path:
        """The file that the runtime loads."""
        return self.folder / FILES[self.format, self.precision]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        name = FILES.get((self.format, self.precision))
        if name not in self.files:
            missing = "a format that kdcli reads" if name is None else name
            raise ValueError(f"it does not name {missing}")
        return self

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
    facts = _facts(folder)
    try:
        return _Training.model_validate(facts).trained_on
    except ValidationError as error:
        raise _damaged(folder, error, facts) from None


def _facts(folder: Path) -> dict[str, object]:
    """Read the facts of an export. Raises UsageError if they cannot be read."""
    try:
        facts: dict[str, object] = read_json(folder / FACTS)
    except UsageError as error:
        raise UsageError(error.message, AGAIN) from None
    return facts


def _damaged(folder: Path, error: ValidationError, facts: object) -> UsageError:
    """Return the error for an export whose facts cannot be read."""
    return UsageError(
        f"{folder / FACTS} is damaged or from an earlier kdcli: {first_problem(error, facts)}",
        AGAIN,
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
    config = load_config(source, weights=False, compacted=True)
    facts = _facts(folder) | {"folder": folder, "config": config}
    try:
        export = Export.model_validate(facts)
    except ValidationError as error:
        raise _damaged(folder, error, facts) from None
    for name, size in export.files.items():
        # A name must be a file of the directory, not a path out of it.
        inside = Path(name).parent.name if Path(name).parent.name in RUNTIMES else ""
        file = folder / inside / Path(name).name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual:,} bytes, not {size:,}"
            raise UsageError(f"{file} {problem}", AGAIN)
    return export


def in_own_runtime(network: object) -> RuntimeNetwork | None:
    """Return the network if its own runtime computes it, and None if it is a torch network."""
    return network if isinstance(network, Export | RunnerNetwork) else None
