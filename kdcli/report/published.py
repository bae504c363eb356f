"""Find the rows of the papers' tables that belong next to a run's results."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdcli.report.schema import ModelEntry, PublishedRow, Role
from kdcli.report.tables import published_tables
from kdcli.report.text import paper_shape


class PaperRow(PublishedRow):
    """A row of published.toml, with the runs that it is shown for.

    Attributes:
        shapes: The shapes of models that it is shown for.
        role: The only role of these models; None for every role but the teacher's.
        density: The share of the weights that the run keeps.
        on_task: Whether the row is shown only for runs on a task.
        method: The method of an ablation.
        variant: The variant of this method.
    """

    shapes: Sequence[str] = ()
    role: Role | None = None
    density: float | None = None
    on_task: bool = False
    method: str | None = None
    variant: str | None = None

    def shown(self, **changes: object) -> PublishedRow:
        """Return the row as a report has it."""
        facts = self.model_dump(include=set(PublishedRow.model_fields))
        return PublishedRow.model_validate(facts | changes)

    def fits(self, models: Sequence[ModelEntry], sparsities: Sequence[float]) -> bool:
        """Whether a model has one of the shapes and the role, and the run has the density."""
        shapes = {
            paper_shape(model.card)
            for model in models
            if model.card is not None
            and (model.role == self.role if self.role else model.role != "teacher")
        }
        is_kept = self.density is None or any(
            math.isclose(1 - sparsity, self.density) for sparsity in sparsities
        )
        return is_kept and not shapes.isdisjoint(self.shapes)


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
    tasks, task = content["tasks"], recipe.get("task")
    papers = [PaperRow.model_validate(row) for row in content["row"]]
    evaluated = {task, *((recipe.get("eval") or {}).get("tasks") or ())} - {None}
    rows = []
    for row in papers:
        if row.task is not None or not row.fits(models, recipe.get("sparsity") or ()):
            continue
        if task is None:
            values = {} if row.on_task else row.values
        else:
            values = {k: v for k, v in row.values.items() if tasks.get(k, task) == task}
        if values and (task is None or not tasks.keys().isdisjoint(values)):
            rows.append(row.shown(values=values))
    rows += [row.shown() for row in papers if row.task in evaluated and not row.variant]
    of_method = [row for row in papers if row.variant and row.method == recipe.get("method")]
    return rows + [row for row in _variants(of_method, models) if row.task in evaluated]


def _variants(ablation: Sequence[PaperRow], models: Sequence[ModelEntry]) -> Iterator[PublishedRow]:
    """Yield what a paper reports for the variants of an ablation.

    The rows have the model's shape or, if there are none, the paper's smallest shape.
    """
    variants = [model for model in models if model.variant is not None]
    # A single variant has nothing to be compared with.
    for model in variants if len(variants) > 1 else []:
        assert model.card is not None
        same = [row for row in ablation if row.variant == model.variant]
        shapes = [row.shape for row in same]
        shape = paper_shape(model.card)
        shape = shape if shape in shapes or not shapes else shapes[-1]
        yield from (row.shown(model=model.name) for row in same if row.shape == shape)
