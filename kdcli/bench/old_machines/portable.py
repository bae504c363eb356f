"""Latency from machines on which kdcli does not run: the file that measures there, and what it brings back.

The file is `measure_encoders.py`, copied as it stands; encoders and cells are in shapes.json beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kdcli.bench.old_machines.measure_encoders import NOISY, OK, SCHEMA
from kdcli.bench.shapes import VOCABULARY, shape
from kdcli.disk import disk_errors, write_atomic
from kdcli.errors import UsageError
from kdcli.training.device import known_devices

SCRIPT, PLAN = "measure_encoders.py", "shapes.json"

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Cell(_Part):
    model: str
    backend: Literal["portable"]
    device: str
    dtype: Literal["fp32", "fp16"]
    batch_size: Count
    seq_len: Count
    padding: Literal["full", "random"]


class _Measured(_Cell):
    n: Count
    p50_ms: Positive
    p90_ms: Positive
    p95_ms: Positive
    p99_ms: Positive | None
    mean_ms: Positive
    iqr_over_p50: Annotated[float, Field(ge=0)]
    status: Literal["ok", "noisy", "unstable"]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.p50_ms <= self.p90_ms <= self.p95_ms <= (self.p99_ms or self.p95_ms):
            raise ValueError("the percentiles do not ascend")
        if self.status != ("ok" if self.iqr_over_p50 <= OK else "noisy" if self.iqr_over_p50 <= NOISY else "unstable"):
            raise ValueError(f"status {self.status} does not go with an iqr_over_p50 of {self.iqr_over_p50}")
        return self


class _TooLarge(_Cell):
    n: Literal[0]
    p50_ms: None
    p90_ms: None
    p95_ms: None
    p99_ms: None
    mean_ms: None
    iqr_over_p50: None
    status: Literal["out of memory"]


class _Speedup(_Part):
    median: Positive
    low: Positive
    high: Positive
    batch_size: Count
    seq_len: Count

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError("the median does not lie between the quartiles")
        return self


class _Result(_Part):
    """The file that `measure_encoders.py` leaves."""

    schema_version: Literal[1] = Field(alias="schema")
    kind: Literal["kdcli portable latency"]
    complete: bool
    created: str
    sha256: dict[str, str]
    settings: dict[str, Any]
    environment: dict[str, Any]
    models: Annotated[dict[str, dict[str, Count]], Field(min_length=1)]
    rows: Annotated[list[Annotated[_Measured | _TooLarge, Field(discriminator="status")]], Field(min_length=1)]
    speedup: dict[str, _Speedup]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        cells = [(row.model, row.batch_size, row.seq_len) for row in self.rows]
        if len(set(cells)) < len(cells):
            raise ValueError("a model stands twice in a cell")
        if strange := sorted({row.model for row in self.rows} - set(self.models)):
            raise ValueError(f"the row of {strange[0]} is of none of the models")
        baseline = next(iter(self.models))
        measured = {(r.model, r.batch_size, r.seq_len) for r in self.rows if isinstance(r, _Measured)}
        pairs = {(f"{m}_vs_{baseline}", b, n) for m, b, n in measured if m != baseline and (baseline, b, n) in measured}
        for key, ratio in self.speedup.items():
            size = (ratio.batch_size, ratio.seq_len)
            if not {(key, *size), (key.removesuffix(f"@{size[0]}x{size[1]}"), *size)} & pairs:
                raise ValueError(f"speed-up {key} is of no two rows")
        return self


def write_portable(
    folder: Path, shapes: Sequence[str], cells: Sequence[tuple[int, int]], vocab_size: int = VOCABULARY
) -> list[Path]:
    """Write what measures encoders on another machine: one file of plain torch, and shapes.json.

    Args:
        folder: made if it is missing.
        shapes: `LxH[:FFN][@HEADS]` as in `kdcli.bench.shapes`; the first is the baseline of every speed-up.
        cells: (batch size, tokens).
        vocab_size: rows of the word embeddings.

    Returns:
        The two files.

    Raises:
        UsageError: no shape or one that cannot be read, a number below 1, or another file of the same name there.
        MachineError: the folder cannot be written.
    """
    sizes = {text.strip(): dataclasses.asdict(shape(text)) for text in shapes}
    if not sizes or not cells or min(vocab_size, *(n for cell in cells for n in cell)) < 1:
        raise UsageError(
            f"nothing to measure in {len(sizes)} shapes, cells {list(cells)} and {vocab_size} words",
            "name at least one shape and one cell, every number at least 1",
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
                raise UsageError(f"{path} is there already and is another", "name another folder, or delete it")
    for path, text in contents.items():
        write_atomic(path, text)
    return list(contents)


def read_portable(path: Path) -> dict[str, Any]:
    """Read what `measure_encoders.py` has left.

    Returns:
        As in report.json: `rows` (LatencyRow; backend `portable`), `speedup` (named as in the file: SHAPE_vs_SHAPE, in
        every cell but the first with @BATCHxTOKENS), `failures` (cells that did not fit into memory), `environment`,
        and `notes` on an interrupted measurement or one taken by another version of the file.

    Raises:
        UsageError: not to be read, damaged, of another schema, or not such a file.
    """
    again = "write the file anew with `kdcli benchmark --portable DIR` and measure again"
    try:
        content = path.read_text("utf-8")
        found = json.loads(content)
    except OSError as error:
        raise UsageError(f"{path} could not be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", again) from None
    if not isinstance(found, dict) or found.get("kind") != "kdcli portable latency":
        raise UsageError(f"{path} is not a result of {SCRIPT}", "give the file that it wrote with --out")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{path} has schema {found.get('schema')}; this kdcli reads {SCHEMA}", again)
    try:
        result = _Result.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "as a whole"
        raise UsageError(f"{path} is damaged, {where}: {first['msg']}", again) from None
    notes = []
    if not result.complete:
        notes.append(f"{path.name} is of a measurement that was interrupted; only the finished cells are in it")
    if result.sha256.get(SCRIPT) != hashlib.sha256(_script().encode()).hexdigest():
        notes.append(f"{path.name} was measured by another version of {SCRIPT} than that of this kdcli")
    same = {"model", "backend", "dtype", "batch_size", "seq_len"}
    return {
        "rows": [row.model_dump() for row in result.rows if isinstance(row, _Measured)],
        "speedup": {key: ratio.model_dump() for key, ratio in result.speedup.items()},
        "failures": [
            {**row.model_dump(include=same), "reason": row.status} for row in result.rows if isinstance(row, _TooLarge)
        ],
        "environment": result.environment,
        "notes": notes,
    }


def _script() -> str:
    return (importlib.resources.files("kdcli") / "bench" / "old_machines" / SCRIPT).read_text("utf-8")
