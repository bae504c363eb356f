"""Write measure_encoders.py and its plan for machines that cannot run kdcli; read the result."""

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kdcli.deploy.measurements import Failure, LatencyRow, SchemaPart
from kdcli.deploy.old_machines.measure_encoders import SCHEMA
from kdcli.deploy.shapes import VOCABULARY, shape
from kdcli.disk import MAX_REPORT_BYTES, disk_errors, read_json, write_atomic
from kdcli.engine.device import known_devices
from kdcli.errors import UsageError, first_problem

SCRIPT, PLAN = "measure_encoders.py", "shapes.json"


class _Measured(LatencyRow):
    """The row of an encoder that was measured."""

    backend: Literal["portable"]
    dtype: Literal["fp32", "fp16"]
    batch_size: PositiveInt
    seq_len: PositiveInt
    padding: Literal["full", "random"]
    n: NonNegativeInt
    iqr_over_p50: NonNegativeFloat


class _OutOfMemory(SchemaPart):
    """The row of an encoder that did not fit."""

    model: str
    backend: Literal["portable"]
    device: str
    dtype: Literal["fp32", "fp16"]
    batch_size: PositiveInt
    seq_len: PositiveInt
    padding: Literal["full", "random"]
    n: Literal[0]
    p50_ms: None
    p75_ms: None
    p90_ms: None
    p95_ms: None
    p99_ms: None
    mean_ms: None
    iqr_over_p50: None
    status: Literal["out of memory"]
    speedup: None


class _Result(BaseModel):
    """The file that `measure_encoders.py` writes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[2] = Field(alias="schema")
    kind: Literal["kdcli portable latency"]
    complete: bool
    created: str
    sha256: dict[str, str]
    settings: dict[str, Any]
    environment: dict[str, Any]
    models: Annotated[dict[str, dict[str, PositiveInt]], Field(min_length=1)]
    rows: Annotated[
        list[Annotated[_Measured | _OutOfMemory, Discriminator("status")]], Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        cells = [(row.model, row.batch_size, row.seq_len) for row in self.rows]
        if len(set(cells)) < len(cells):
            raise ValueError("a model has two rows in a cell")
        names = {row.model for row in self.rows}
        names |= {row.speedup.baseline for row in self.rows if row.speedup is not None}
        if unknown := sorted(names - set(self.models)):
            raise ValueError(f"a row names {unknown[0]}, which is not among the models")
        return self


def write_portable(
    folder: Path,
    shapes: Sequence[str],
    cells: Sequence[tuple[int, int]],
    vocab_size: int = VOCABULARY,
) -> list[Path]:
    """Write measure_encoders.py and shapes.json to a folder, which is created if it is missing.

    `shapes` have the form `LxH[:FFN][@HEADS]`; the first one is the baseline of every speed-up.
    `cells` are pairs of batch size and tokens.

    Raises UsageError if there is no shape, if a shape is malformed, if a number is below 1, or if a
    different file of the same name exists. Raises MachineError if the folder cannot be written.
    """
    sizes = {text.strip(): dataclasses.asdict(shape(text)) for text in shapes}
    if not sizes or not cells or min(vocab_size, *(n for cell in cells for n in cell)) < 1:
        raise UsageError(
            f"nothing to measure: got {len(sizes)} shapes, cells {list(cells)} and a vocabulary of "
            f"{vocab_size}",
            "give at least one shape and one cell, with every number at least 1",
        )
    plan = {
        "schema": SCHEMA,
        "shapes": sizes,
        "cells": list(dict.fromkeys(cells)),
        "vocab_size": vocab_size,
        "install": {row["capability"]: row["install"] for row in known_devices()},
    }
    contents = {folder / SCRIPT: _script(), folder / PLAN: json.dumps(plan, indent=1) + "\n"}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            if path.exists() and path.read_bytes() != text.encode():
                raise UsageError(
                    f"{path} exists with other content", "choose another folder, or delete the file"
                )
    for path, text in contents.items():
        write_atomic(path, text)
    return list(contents)


@dataclass(frozen=True)
class PortableResult:
    """The measurements of `measure_encoders.py` on another machine.

    Attributes:
        shapes: The measured shapes, the baseline first.
        notes: Whether the measurement was interrupted, or made by another version of the file.
    """

    shapes: list[str]
    rows: list[LatencyRow]
    failures: list[Failure]
    environment: dict[str, Any]
    notes: list[str]


def read_portable(path: Path) -> PortableResult:
    """Read a result of `measure_encoders.py`.

    Raises UsageError if the file is unreadable or damaged, has another schema, or is not such a
    result.
    """
    hint = "write the file again with `kdcli benchmark --portable DIR` and measure again"
    raw = read_json(path, max_bytes=MAX_REPORT_BYTES)
    if raw.get("kind") != "kdcli portable latency":
        raise UsageError(
            f"{path} is not a result of {SCRIPT}", "give the file that it wrote to --out"
        )
    if raw.get("schema") != SCHEMA:
        raise UsageError(f"{path} has schema {raw.get('schema')}; this kdcli reads {SCHEMA}", hint)
    try:
        result = _Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {first_problem(error, raw)}", hint) from None
    notes = []
    if not result.complete:
        notes.append(
            f"{path.name}: the measurement was interrupted; only its finished cells are here"
        )
    if result.sha256.get(SCRIPT) != hashlib.sha256(_script().encode()).hexdigest():
        notes.append(f"{path.name} was measured by another version of {SCRIPT} than this kdcli has")
    cell = {"model", "backend", "dtype", "batch_size", "seq_len"}
    measured = dict.fromkeys(row.model for row in result.rows)
    return PortableResult(
        shapes=[shape for shape in result.models if shape in measured],
        rows=[row for row in result.rows if isinstance(row, LatencyRow)],
        failures=[
            Failure.model_validate(row.model_dump(include=cell) | {"reason": row.status})
            for row in result.rows
            if isinstance(row, _OutOfMemory)
        ],
        environment=result.environment,
        notes=notes,
    )


def _script() -> str:
    return (importlib.resources.files("kdcli") / "deploy" / "old_machines" / SCRIPT).read_text(
        "utf-8"
    )
