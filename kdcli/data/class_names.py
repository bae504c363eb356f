"""Names of classes in the schema of a table, whose rows hold only their numbers.

`datasets` writes the names of a `ClassLabel` into the schema of a Parquet or Arrow file.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kdcli.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

HUGGING_FACE = b"huggingface"


class ClassName(str):
    """The name of a class, with its number in the schema of its source."""

    number: int

    def __new__(cls, name: str, number: int) -> "ClassName":
        """Create the name with its number."""
        named = super().__new__(cls, name)
        named.number = number
        return named


class ClassNames:
    """The columns of a table whose classes have names."""

    def __init__(self, features: "Mapping[str, Any] | None") -> None:
        """Take the features of a data set, if they are known."""
        self.columns = {
            name: feature for name, feature in (features or {}).items() if _has_names(feature)
        }

    @classmethod
    def of_schema(cls, schema: "pa.Schema", file: object) -> "ClassNames":
        """Read the names from the schema of an Arrow table.

        Raises:
            UsageError: `datasets` cannot read the description in the schema.
        """
        if HUGGING_FACE not in (schema.metadata or {}):
            return cls(None)
        import datasets

        try:
            return cls(datasets.Features.from_arrow_schema(schema))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the features in the schema of {file} cannot be read: {error}",
                "write the file again with .to_parquet() of datasets, or without its metadata",
            ) from None

    def name(self, values: dict[str, Any]) -> dict[str, Any]:
        """Replace the numbers of classes in a row by their names."""
        for column, feature in self.columns.items():
            if column in values:
                values[column] = _named(feature, values[column])
        return values


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
        return {key: _named(feature[key], each) for key, each in value.items()}
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_named(feature.feature, each) for each in value]
    names = getattr(feature, "names", None)
    if not names or not isinstance(value, int) or value >= len(names):
        return value
    return None if value < 0 else ClassName(names[value], value)
