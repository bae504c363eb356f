"""Find the rows of the papers' tables that belong next to a run's results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kdcli.report.schema import ModelEntry, PublishedRow
from kdcli.report.tables import AblationRow, published_tables
from kdcli.report.text import paper_shape


def published_for(
    models: Sequence[ModelEntry],
    recipe: Mapping[str, Any] | None = None,
    *,
    embeds: bool = False,
) -> list[PublishedRow]:
    """Return the rows of published.toml for the models of a run, except its teacher.

    They are the rows of the models' shapes and roles. On a task they have that task's columns only;
    for a pruning they are the rows of its densities. Tasks on which the run evaluates models add
    rows by set, and the papers' results for the variants of an ablation. A run that only trims a
    vocabulary has no rows, because it trained no model. A run of embedding models (`embeds`) has
    none, because the papers score fine-tuned models.
    """
    if embeds or any(model.role == "trimmed" for model in models):
        return []
    content, recipe = published_tables(), recipe or {}
    task = recipe.get("task")
    densities = [1 - sparsity for sparsity in recipe.get("sparsity") or ()]
    tasks = content["tasks"]
    rows = []
    for row in content["row"]:
        density = row.get("density")
        if _shapes(models, row.get("role")).isdisjoint(row["shapes"]):
            continue
        if density is not None and not any(math.isclose(density, one) for one in densities):
            continue
        values = row["values"]
        if task is None:
            if row.get("on_task", False):
                continue
        else:
            values = {k: v for k, v in values.items() if tasks.get(k, task) == task}
            if not any(name in tasks for name in values):
                continue
        rows.append(
            PublishedRow(
                row=row["row"],
                source=row["source"],
                values={name: float(value) for name, value in values.items()},
                shape=row.get("shape"),
            )
        )
    evaluated = {task, *((recipe.get("eval") or {}).get("tasks") or ())}
    by_set = [PublishedRow.model_validate(row) for row in content["by_set"]]
    of_method = [row for row in content["ablation"] if row["method"] == recipe.get("method")]
    rows += by_set + _variants(of_method, models)
    return [row for row in rows if row.task is None or row.task in evaluated]


def _shapes(models: Sequence[ModelEntry], role: str | None) -> set[str]:
    """Return the papers' shapes among the models of a role, or among all but the teacher."""
    shapes = set()
    for model in models:
        fits = model.role != "teacher" if role is None else model.role == role
        if fits and model.card is not None and (shape := paper_shape(model.card)):
            shapes.add(shape)
    return shapes


def _variants(ablations: Sequence[AblationRow], models: Sequence[ModelEntry]) -> list[PublishedRow]:
    """Return what a paper reports for the variants of an ablation.

    The rows have the model's shape or, if there are none, the paper's smallest shape.
    """
    rows = []
    variants = [model for model in models if model.variant is not None]
    for model in variants:
        assert model.card is not None
        same = [row for row in ablations if row["variant"] == model.variant]
        own = [row for row in same if row["shape"] == paper_shape(model.card)]
        for row in own or same[-1:]:
            values: dict[tuple[str, str], dict[str, float]] = {}
            for column, value in row["values"].items():
                task, metric, *part = column.split(" ")
                values.setdefault((task, metric), {})[" ".join(part)] = float(value)
            rows += [
                PublishedRow(
                    row=f"{row['shape']}, {row['variant']}",
                    source=row["source"],
                    values=by_set,
                    shape=row["shape"],
                    task=task,
                    metric=metric,
                    model=model.name,
                )
                for (task, metric), by_set in values.items()
            ]
    # A single variant has nothing to be compared with.
    return rows if len(variants) > 1 else []
