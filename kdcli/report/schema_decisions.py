"""The parts of report.json that compare a model with its baseline, by class and by row."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kdcli.deploy.measurements import SchemaPart


class Confusion(SchemaPart):
    """Counts by class.

    Rows are the true classes, in a `Decision` the baseline's. Columns are the model's classes.
    """

    labels: list[str]
    counts: list[list[Annotated[int, Field(ge=0, lt=2**63)]]]

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if {len(self.counts), *map(len, self.counts)} != {len(self.labels)}:
            raise ValueError("counts must have a row and a column for each label")
        return self


class PairedValue(SchemaPart):
    """A metric of a model and of its baseline on the same examples.

    `low` and `high` are the ends of the paired 95 % interval of the model's value minus the
    baseline's.
    """

    baseline: float
    model: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """The model's value minus the baseline's."""
        return self.model - self.baseline


class ClassChange(SchemaPart):
    """How the scores of a class differ between a model and its baseline.

    `count` is the number of rows of the class in the reference or, for `tokens`, the number of
    entities of the type. `enough` tells whether it is at least `Decision.min_count`. The other
    counts are predictions of the class by both models or by one of them.
    """

    name: str
    count: int
    enough: bool
    metrics: dict[str, PairedValue]
    both: int
    only_baseline: int
    only_model: int


class ConfusedPair(SchemaPart):
    """A number of rows, or words, with one class from the baseline and another from the model."""

    baseline: str
    model: str
    count: int


class DifferingRow(SchemaPart):
    """A row on which a model and its baseline differ.

    `change` is the largest change of a class's probability, and `changed` is this class. For
    `tokens`, which has no probabilities, `change` is the share of words with another label. `label`
    is null without labels.
    """

    id: str
    texts: list[str]
    label: str | None
    baseline: str
    model: str
    change: float
    changed: str | None = None
    baseline_probability: float | None = None
    model_probability: float | None = None


class Calibration(SchemaPart):
    """Expected calibration error of a model, with 15 bins of equal width.

    `temperature` has the smallest negative log likelihood on the same rows, so that `scaled_error`,
    the error of logits / temperature, is optimistic. Both are null if no temperature between 0.01
    and 100 is the best one. `stored_temperature` is the one in the model's configuration, and
    `stored_error` is the error with it.
    """

    error: float
    temperature: float | None
    scaled_error: float | None
    stored_temperature: float | None = None
    stored_error: float | None = None


class OperatingPoint(SchemaPart):
    """Precision and recall if a label is predicted above a threshold of its probability."""

    threshold: float
    precision: float
    recall: float


class LabelThresholds(SchemaPart):
    """Thresholds of a model for one label.

    `baseline` and `model` are both models at 0.5; null if the model predicts nothing there.
    `same_precision` reaches the baseline's precision with the highest recall, and `same_recall`
    reaches its recall with the highest precision. They are null if no threshold does, or if the
    one that other rows chose predicts nothing here.
    """

    label: str
    baseline: OperatingPoint
    model: OperatingPoint | None
    same_precision: OperatingPoint | None
    same_recall: OperatingPoint | None


class Decision(SchemaPart):
    """The differences between a model and its baseline on one set, beyond the averages.

    `reference` is what `classes`, `calibration` and `thresholds` are computed against: the labels
    of the rows, or the baseline's predictions. `metric` is the main metric of the classes, and
    classes with fewer than `min_count` examples are too small to tell. `agreement` is the share of
    rows, or words, for which both models predict the same. `confusion` has the baseline's classes
    as rows and the model's as columns, for at most 40 classes; `confused` lists its largest cells
    off the diagonal. `calibration` is by model. `thresholds_on` names the rows that chose the
    thresholds, if these are other rows than the ones that gave their precision and recall.
    `chosen_on_these_rows` is as in `Comparison`.
    """

    model: str
    baseline: str
    task: str
    set: str
    n: int
    reference: Literal["labels", "teacher"]
    metric: str
    min_count: int
    classes: list[ClassChange]
    agreement: float
    confusion: Confusion | None = None
    confused: list[ConfusedPair] = Field(default_factory=list)
    differing: list[DifferingRow] = Field(default_factory=list)
    calibration: dict[str, Calibration] = Field(default_factory=dict)
    thresholds: list[LabelThresholds] = Field(default_factory=list)
    thresholds_on: str = ""
    chosen_on_these_rows: bool = False
