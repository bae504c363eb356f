"""Published rows for the shapes of a run."""

import importlib.resources
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any


def published_for(
    shapes: Iterable[str], command: str = "", recipe: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The rows of published.toml that belong to any of the shapes (`6x384`), to a verb and to its recipe: on a task
    with its columns alone, of a pruning at the density of one of its runs."""
    text = (importlib.resources.files("kdcli") / "report" / "published.toml").read_text("utf-8")
    wanted, content, recipe = set(shapes), tomllib.loads(text), recipe or {}
    task, densities = recipe.get("task"), [1 - sparsity for sparsity in recipe.get("sparsity") or ()]
    rows = []
    for row in content["row"]:
        at, own = row.get("density"), {k: v for k, v in row["values"].items() if content["tasks"].get(k, task) == task}
        of_task = any(name in content["tasks"] for name in own)
        if (
            wanted.isdisjoint(row["shapes"])
            or row.get("command", command) != command
            or (at is not None and not any(math.isclose(at, density) for density in densities))
            or (task is None and row.get("on_task", False))
            or (task is not None and not of_task)
        ):
            continue
        values = row["values"] if task is None else own
        found = {"row": row["row"], "source": row["source"]}
        rows.append(found | {"values": {name: float(value) for name, value in values.items()}})
    return rows
