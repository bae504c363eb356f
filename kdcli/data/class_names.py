"""Names of classes in the schema of a table, whose rows hold only their numbers.

`datasets` writes the names of a `ClassLabel` into the schema of a Parquet or Arrow file, and the
card of a data set may hold them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdcli.data.rows import Row
from kdcli.errors import UsageError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

HUGGING_FACE = b"huggingface"
CARD, INFOS = "README.md", "dataset_infos.json"  # The second is of older data sets.
CLASS_LABEL, CLASS_LABEL_TYPE, MAX_CARD_BYTES = b"class_label", b"ClassLabel", 1 << 20
NUMBER = re.compile(r"-?\d+")


class ClassName(str):
    """The name of a class, with its number in the schema of its source."""

    number: int

    def __new__(cls, name: str, number: int) -> "ClassName":
        """Create the name with its number."""
        named = super().__new__(cls, name)
        named.number = number
        return named


@dataclass(frozen=True)
class ClassNames:
    """The columns of a table whose classes have names, each with its feature of `datasets`."""

    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, features: Mapping[str, Any] | None) -> "ClassNames":
        """Take the features of a data set, if they are known."""
        named = {name: each for name, each in (features or {}).items() if _has_names(each)}
        return cls(named)

    @classmethod
    def of_schema(cls, schema: "pa.Schema", file: object) -> "ClassNames":
        """Read the names from the schema of an Arrow table.

        Raises:
            UsageError: `datasets` cannot read the description in the schema.
        """
        if HUGGING_FACE not in (schema.metadata or {}):
            return cls()
        import datasets

        with _feature_errors(f"the schema of {file}"):
            return cls.of(datasets.Features.from_arrow_schema(schema))

    @classmethod
    def of_card(cls, folder: Path) -> "ClassNames":
        """Read the names from the card of a data set, which may describe one configuration.

        Raises:
            UsageError: `datasets` cannot read the description in the card.
        """
        cards = [folder / name for name in (CARD, INFOS) if (folder / name).is_file()]
        marks = (CLASS_LABEL, CLASS_LABEL_TYPE)
        contents = [card.read_bytes()[:MAX_CARD_BYTES] for card in cards]
        if not any(mark in content for content in contents for mark in marks):
            return cls()
        from datasets.info import DatasetInfosDict

        with _feature_errors(" or ".join(map(str, cards))):
            infos = list(DatasetInfosDict.from_directory(str(folder)).values())
        return cls.of(infos[0].features if len(infos) == 1 else None)

    def name_row(self, row: Row) -> Row:
        """Replace the numbers of classes in a row by their names."""
        if not self.columns:
            return row
        values = {
            name: _named(self.columns[name], value) if name in self.columns else value
            for name, value in row.values.items()
        }
        return Row(row.where, values)


@contextmanager
def _feature_errors(place: str) -> Iterator[None]:
    """Turn errors of `datasets` about features into a UsageError that names their place."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # Readers of YAML raise their own classes.
        raise UsageError(
            f"the features in {place} cannot be read: {first_line(error)}",
            "write the data again with datasets, or remove the description of its features",
        ) from None


def _has_names(feature: Any) -> bool:
    """Whether a feature holds a class with a name that is not its number."""
    if isinstance(feature, Mapping):
        return any(map(_has_names, feature.values()))
    if names := getattr(feature, "names", None):
        return bool(names != [str(number) for number in range(len(names))])
    return _has_names(feature.feature) if hasattr(feature, "feature") else False


def _named(feature: Any, value: Any) -> Any:
    """Name the classes in a value. A negative number stands for no label."""
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {
            key: _named(feature[key], each) if key in feature else each
            for key, each in value.items()
        }
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_named(feature.feature, each) for each in value]
    names = getattr(feature, "names", None)
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()) and names and value not in names:
        # A cell of CSV.
        value = int(value)
    if not names or not isinstance(value, int) or value >= len(names):
        return value
    return None if value < 0 else ClassName(names[value], value)
