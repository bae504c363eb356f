"""Read published.toml. Shell completion imports this file, so it must load fast."""

import importlib.resources
import tomllib
from typing import Any


def published_tables() -> dict[str, Any]:
    """Return the content of published.toml: `row`, `ablation`, and in `tasks` a column's task."""
    file = importlib.resources.files("kdcli") / "report" / "published.toml"
    return tomllib.loads(file.read_text("utf-8"))


def published_shapes() -> list[str]:
    """Return every shape that has a row, the largest first."""
    shapes = {shape for row in published_tables()["row"] for shape in row.get("shapes", ())}
    return sorted(shapes, key=lambda shape: [-int(part) for part in shape.split("x")])
