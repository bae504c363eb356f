"""Published rows for the shapes of a run."""

import importlib.resources
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any


def published_shapes() -> list[str]:
    """Every shape that has a row, the largest first."""
    rows = tomllib.loads(_text())["row"]
    shapes = {shape for row in rows for shape in row["shapes"]}
    return sorted(shapes, key=lambda shape: [-int(part) for part in shape.split("x")])


def _text() -> str:
    return (importlib.resources.files("kdcli") / "report" / "published.toml").read_text("utf-8")


def published_for(
    shapes: Iterable[str],
    command: str = "",
    recipe: Mapping[str, Any] | None = None,
    students: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The rows of published.toml that belong to any of the shapes (`6x384`), to a verb and to its recipe: on a task
    with its columns alone, of a pruning at the density of one of its runs; and of the tasks that it judges those by set
    and those of `students`, name -> shape, that are variants in a paper."""
    wanted, content, recipe = set(shapes), tomllib.loads(_text()), recipe or {}
    task, densities = (
        recipe.get("task"),
        [1 - sparsity for sparsity in recipe.get("sparsity") or ()],
    )
    rows = []
    for row in content["row"]:
        at, own = (
            row.get("density"),
            {k: v for k, v in row["values"].items() if content["tasks"].get(k, task) == task},
        )
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
    judged = {task, *((recipe.get("eval") or {}).get("tasks") or ())}
    rows += [row for row in content["by_set"] if row["task"] in judged]
    of_method = [row for row in content["ablation"] if row["method"] == recipe.get("method")]
    return rows + [row for row in _variants(of_method, students or {}) if row["task"] in judged]


def _variants(ablations: list[dict[str, Any]], students: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a paper reports for the variants that students are named after, of their shape, else of its smallest."""
    rows = []
    for student, shape in students.items():
        alike = [
            row for row in ablations if student in (row["variant"], f"{row['variant']} {shape}")
        ]
        for row in [row for row in alike if row["shape"] == shape] or alike[-1:]:
            values: dict[tuple[str, str], dict[str, float]] = {}
            for column, value in row["values"].items():
                task, metric, *part = column.split(" ")
                values.setdefault((task, metric), {})[" ".join(part)] = float(value)
            about = {
                "row": f"{row['shape']}, {row['variant']}",
                "source": row["source"],
                "beside": student,
            }
            rows += [
                about | {"task": task, "metric": metric, "values": v}
                for (task, metric), v in values.items()
            ]
    # One student alone is no variant of anything.
    return rows if len(students) > 1 else []
