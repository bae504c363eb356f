"""Published rows for the shapes of a run."""

import importlib.resources
import tomllib
from collections.abc import Iterable
from typing import Any


def published_for(shapes: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of published.toml that belong to any of the shapes (`6x384`)."""
    text = (importlib.resources.files("kdcli") / "report" / "published.toml").read_text("utf-8")
    wanted = set(shapes)
    rows = [row for row in tomllib.loads(text)["row"] if wanted.intersection(row.pop("shapes"))]
    return [row | {"values": {name: float(value) for name, value in row["values"].items()}} for row in rows]
