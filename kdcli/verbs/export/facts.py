"""The content of export.json: an export's model and files, and how they compare with torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from kdcli.deploy.export import FILES, ModelFile
from kdcli.deploy.sums import MAX_SUM
from kdcli.report.schema import Comparison
from kdcli.types import Card


@dataclass(frozen=True)
class FileScores:
    """The scores of torch and of a file on one set of rows."""

    task: str
    set: str
    split: str
    n: int
    torch: dict[str, float]
    file: dict[str, float]


@dataclass(frozen=True)
class FileComparison:
    """The differences between a file and torch.

    Attributes:
        agreement: How closely the predictions or vectors of texts agree.
        scores: The scores of both on each set of a workload.
        comparisons: The paired differences between these scores.
        drop: The points (hundredths) of the first metric that the file loses on its worst set.
        points_per_row: What one row of the largest set is worth, in points, if every row counts 0
            or 1; else 0.
    """

    agreement: dict[str, float]
    scores: list[FileScores] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    drop: float | None = None
    points_per_row: float = 0.0

    def chosen_by_search(self) -> FileComparison:
        """Mark that a file was chosen on these rows."""
        marked = [row.model_copy(update={"chosen_on_these_rows": True}) for row in self.comparisons]
        return replace(self, comparisons=marked)


@dataclass(frozen=True)
class Attempt:
    """One version of a file that was written and checked.

    Attributes:
        in_float: The number of products in float32.
        drop: The points that the version loses; None without a task.
        holds: Whether the version may be used.
    """

    in_float: int
    drop: float | None
    holds: bool


@dataclass(frozen=True)
class Product:
    """A product of a quantised file.

    Attributes:
        name: The name of its linear layer.
        error: The relative error of the outputs if this product alone is quantised.
        in_float: Whether it stays in float32.
    """

    name: str
    error: float
    in_float: bool


@dataclass(frozen=True)
class GatedFile:
    """A file that passed its check.

    Attributes:
        file: The file.
        comparison: The differences between the file and torch.
        max_drop: The points that it was allowed to lose; None for any number.
        tolerance: The excess over `max_drop` from which a file is refused, in points; 0 if every
            excess is.
        attempts: The versions that were tried, in order.
        products: The products by their error, the largest first; empty if no error was measured.
        calibrated_on: The texts on which its integers were chosen, none of which is compared.
    """

    file: ModelFile
    comparison: FileComparison
    max_drop: float | None = None
    tolerance: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    calibrated_on: str = ""


@dataclass(frozen=True)
class FileFacts:
    """The entry of one file in export.json.

    Attributes:
        precision: `fp32`, `fp16`, `int8` or `q4`.
        gated: The file, and how it compares with torch.
        notes: Sentences for the reader.
        bytes: The size of the file and its weights.
    """

    precision: str
    gated: GatedFile
    notes: list[str]
    bytes: int

    @property
    def agreement(self) -> dict[str, float]:
        """How closely the predictions or vectors of texts agree with torch's."""
        return self.gated.comparison.agreement

    @property
    def scores(self) -> list[FileScores]:
        """The scores of torch and the file; empty without a task."""
        return self.gated.comparison.scores

    def to_dict(self) -> dict[str, object]:
        """Return the values as export.json holds them."""
        file, gated = self.gated.file, self.gated
        values: dict[str, object] = {
            "precision": self.precision,
            "max_abs": file.max_abs,
            "relative": file.relative,
            "agreement": self.agreement,
            # The largest errors that were allowed. JSON has no infinity.
            "limits": {
                name: limit if math.isfinite(limit) else None
                for name, limit in (
                    ("max_abs", file.max_abs_limit),
                    ("relative", file.relative_limit),
                )
            },
        }
        if self.scores:
            values["scores"] = [asdict(row) for row in self.scores]
            values["comparisons"] = [row.model_dump() for row in gated.comparison.comparisons]
        if gated.max_drop is not None or gated.products:
            values["max_drop"] = gated.max_drop
            values["tolerance"] = gated.tolerance
            values["attempts"] = [asdict(each) for each in gated.attempts]
        if gated.products:
            values["products"] = [
                {"name": each.name, "error": each.error, "float": each.in_float}
                for each in gated.products
            ]
        if file.sums:
            values["sums"] = {
                "limit": MAX_SUM,
                "can_saturate": any(each.can_saturate for each in file.sums),
                "products": [asdict(each) for each in file.sums],
            }
        return values | {"notes": self.notes, "bytes": self.bytes}


@dataclass(frozen=True)
class ExportFacts:
    """The content of export.json.

    Attributes:
        source: The exported model: a hub id, a directory or `demo`.
        format: `onnx` or `openvino`.
        architecture: The class of the model.
        kind: The kind of its head; `embedding` for vectors, None for an encoder without a head.
        inputs: The names of the inputs, in order.
        outputs: The names of the outputs, in order.
        files: The size of every model file, by its path in the directory.
        card: The size of the model, with the bytes and the hash of the main file.
        main: The file that other verbs load.
        also: The files in other precisions.
        versions: The version of each library.
        task: The task on which the files were scored; None if they were not scored.
        data: The source of the task's rows; None for the task's own data set.
    """

    source: str
    format: str
    architecture: str
    kind: str | None
    inputs: list[str]
    outputs: list[str]
    files: dict[str, int]
    card: Card
    main: FileFacts
    also: list[FileFacts]
    versions: Mapping[str, str]
    task: str | None = None
    data: str | None = None

    @property
    def by_file(self) -> list[FileFacts]:
        """The entries of all files, the main one first."""
        return [self.main, *self.also]

    def path_of(self, file: FileFacts) -> str:
        """Return the path of a file in the directory."""
        return FILES[self.format, file.precision]

    def to_dict(self) -> dict[str, object]:
        """Return the values as export.json holds them."""
        values: dict[str, object] = {
            "source": self.source,
            "format": self.format,
            "architecture": self.architecture,
            "kind": self.kind,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "files": self.files,
            "card": asdict(self.card),
        }
        values |= self.main.to_dict() | {"also": [file.to_dict() for file in self.also]}
        values |= {} if self.task is None else {"task": self.task, "data": self.data}
        return values | {"versions": self.versions}
