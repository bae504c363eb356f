"""The content of export.json: an export's model and files, and how they compare with torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from kdcli.deploy.export import FILES, MAX_SUM, LargestSum, ModelFile
from kdcli.deploy.exported import TrainedOn
from kdcli.deploy.measurements import SchemaPart
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
        points_per_row: The weight of one row of the largest set, in points, if every row counts 0
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


class Product(SchemaPart):
    """A product of a quantised file.

    Attributes:
        name: The name of its linear layer.
        error: The relative error of the outputs if this product alone is quantised.
        is_kept: Whether it stays in float32, or in plain int8 in a packed file.
    """

    name: str
    error: float
    is_kept: bool = Field(serialization_alias="float")


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
        compared_on: Describes the texts on which it was compared with torch.
        calibrated_on: Describes the texts on which its integers were chosen, none of which is
            compared; empty if it has no integers.
        nodes_in_float: The number of nodes of a file in half precision that are in float32.
        kept_in: The precision of the products that the file's precision changes too much.
    """

    file: ModelFile
    comparison: FileComparison
    max_drop: float | None = None
    tolerance: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    compared_on: str = ""
    calibrated_on: str = ""
    nodes_in_float: int = 0
    kept_in: str = "float32"


class Sums(SchemaPart):
    """The largest sums of the products of an int8 file for ONNX Runtime."""

    limit: int = MAX_SUM
    can_saturate: bool
    products: list[LargestSum]


class FileFacts(SchemaPart):
    """The entry of one file in export.json. It has no keys for what was not measured.

    Attributes:
        precision: `fp32`, `fp16`, `int8`, `int8-packed` or `q4`.
        max_abs: The largest difference of an output from torch's.
        relative: The norm of all differences, divided by the norm of torch's outputs.
        agreement: How closely the predictions or vectors of texts agree with torch's.
        compared_on: These texts: their number and their source.
        calibrated_on: The texts on which the integers were chosen. None of them was compared.
        limits: The largest errors that were allowed. JSON has no infinity.
        scores: The scores of torch and the file.
        comparisons: The paired differences between these scores.
        max_drop: The largest drop that was allowed, in points.
        tolerance: The smallest excess over `max_drop` that counts, in points.
        attempts: The versions of a bounded file.
        products: The products of a quantised file, the one with the largest error first.
        sums: The largest sums of an int8 file.
        notes: Sentences for the reader.
        bytes: The size of the file and its weights.
    """

    precision: str
    max_abs: float
    relative: float
    agreement: dict[str, float]
    compared_on: str
    calibrated_on: str | None
    limits: dict[str, float]
    scores: list[FileScores] | None
    comparisons: list[Comparison] | None
    max_drop: float | None
    tolerance: float | None
    attempts: list[Attempt] | None
    products: list[Product] | None
    sums: Sums | None
    notes: list[str]
    bytes: int

    @classmethod
    def of(cls, precision: str, gated: GatedFile, notes: list[str], size: int) -> FileFacts:
        """Describe a file of `size` bytes."""
        file, comparison = gated.file, gated.comparison
        is_bounded = gated.max_drop is not None or bool(gated.products)
        can_saturate = any(each.can_saturate for each in file.sums)
        return FileFacts(
            precision=precision,
            max_abs=file.max_abs,
            relative=file.relative,
            agreement=comparison.agreement,
            compared_on=gated.compared_on,
            calibrated_on=gated.calibrated_on or None,
            limits={"max_abs": file.max_abs_limit, "relative": file.relative_limit},
            scores=comparison.scores or None,
            comparisons=comparison.comparisons if comparison.scores else None,
            max_drop=gated.max_drop,
            tolerance=gated.tolerance if is_bounded else None,
            attempts=gated.attempts if is_bounded else None,
            products=gated.products or None,
            sums=Sums(can_saturate=can_saturate, products=list(file.sums)) if file.sums else None,
            notes=notes,
            bytes=size,
        )

    @model_serializer(mode="wrap")
    def _present(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        # An encoder without a head has no kind, which readers may ask for.
        kept = {"kind"}
        return {k: value for k, value in dump(self).items() if value is not None or k in kept}


class ExportFacts(FileFacts):
    """The content of export.json: the main file, which other verbs load, and what all files share.

    Attributes:
        source: The exported model: a hub id, a directory or `demo`.
        format: `onnx` or `openvino`.
        architecture: The class of the model.
        kind: The kind of its head; `embedding` for vectors, None for an encoder without a head.
        inputs: The names of the inputs, in order.
        outputs: The names of the outputs, in order.
        files: The size of every model file, by its path in the directory.
        card: The size of the model, with the bytes and the hash of the main file.
        also: The files in other precisions.
        task: The task on which the files were scored; None if they were not scored.
        data: The source of the task's rows; None for the task's own data set.
        trained_on: The task and the columns of the run that trained the model.
        versions: The version of each library.
    """

    source: str
    format: str
    architecture: str
    kind: str | None
    inputs: list[str]
    outputs: list[str]
    files: dict[str, int]
    card: Card
    also: list[FileFacts]
    task: str | None = None
    data: str | None = None
    trained_on: TrainedOn | None = None
    versions: dict[str, str]

    @property
    def by_file(self) -> list[FileFacts]:
        """The entries of all files, the main one first."""
        return [self, *self.also]

    def path_of(self, file: FileFacts) -> str:
        """Return the path of a file in the directory."""
        return FILES[self.format, file.precision]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, by_alias=True)
