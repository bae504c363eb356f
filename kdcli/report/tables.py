"""Read published.toml. Shell completion imports this file, so it must load fast."""

import importlib.resources
import tomllib
from typing import NotRequired, TypedDict, cast


class PaperRow(TypedDict):
    """A row of a paper's table: values by column, for models of some shapes."""

    row: str
    source: str
    shapes: list[str]
    values: dict[str, float]
    shape: NotRequired[str]
    density: NotRequired[float]
    role: NotRequired[str]
    on_task: NotRequired[bool]


class AblationRow(TypedDict):
    """A paper's results for one variant of a method. A column is `TASK METRIC SET`."""

    method: str
    variant: str
    shape: str
    source: str
    values: dict[str, float]


class PublishedTables(TypedDict):
    """The content of published.toml.

    `tasks` gives the task of a column, and `by_set` has rows of report.json.
    """

    tasks: dict[str, str]
    row: list[PaperRow]
    by_set: list[dict[str, object]]
    ablation: list[AblationRow]


def published_tables() -> PublishedTables:
    """Return the content of published.toml."""
    file = importlib.resources.files("kdcli") / "report" / "published.toml"
    return cast(PublishedTables, tomllib.loads(file.read_text("utf-8")))


def published_shapes() -> list[str]:
    """Return every shape that has a row, the largest first."""
    shapes = {shape for row in published_tables()["row"] for shape in row["shapes"]}
    return sorted(shapes, key=lambda shape: [-int(part) for part in shape.split("x")])
