"""Find the rows of the papers' tables that belong next to a run's results."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdcli.report.schema import ModelEntry, PublishedRow, Role
from kdcli.report.schema_decisions import SchemaPart
from kdcli.report.tables import published_tables
from kdcli.report.text import paper_shape


class PaperRow(PublishedRow):
    """A row of published.toml, with the runs that it is shown for.

    Attributes:
        shapes: The shapes of models that it is shown for.
        role: The only role of these models; None for every role but the teacher's.
        density: The share of the weights that the run keeps.
        on_task: Whether the row is shown only for runs on a task.
    """

    shapes: Sequence[str] = ()
    role: Role | None = None
    density: float | None = None
    on_task: bool = False

    def shown(self, values: Mapping[str, float] | None = None) -> PublishedRow:
        """Return the row as a report has it, with all of its values or some."""
        facts = self.model_dump(include=set(PublishedRow.model_fields))
        return PublishedRow.model_validate(facts | ({} if values is None else {"values": values}))

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


class PaperAblation(SchemaPart):
    """A paper's scores for the variants of one of the lists in recipes/ablations.

    Attributes:
        ablate: The name of the list.
        shape: The shape of the paper's model.
        source: The paper and its tables.
        task: The task.
        metric: Its metric.
        values: The name of a variant -> its scores by set, in per cent.
    """

    ablate: str
    shape: str
    source: str
    task: str
    metric: str
    values: Mapping[str, dict[str, float]]

    def row(self, variant: str, model: str) -> PublishedRow:
        """Return the scores of a variant as a report has them, for our model."""
        return PublishedRow(
            row=f"{self.shape}, {variant}",
            source=self.source,
            values=self.values[variant],
            shape=self.shape,
            task=self.task,
            metric=self.metric,
            model=model,
        )


def published_for(
    models: Sequence[ModelEntry],
    recipe: Mapping[str, Any] | None = None,
    *,
    embeds: bool = False,
) -> list[PublishedRow]:
    """Return the rows of published.toml for the models of a run, except its teacher.

    They are the rows of the models' shapes and roles. On a task they have that task's columns only;
    for a pruning they are the rows of its densities. Tasks on which the run evaluates models add
    rows by set, and the papers' results for the variants of its `--ablate`. A run that only trims a
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
    rows += [row.shown() for row in papers if row.task in evaluated]
    listed = recipe.get("ablate")
    # Another method has variants of the same names.
    if recipe.get("method", listed) != listed:
        return rows
    ablations = [PaperAblation.model_validate(one) for one in content["ablation"]]
    of_list = [one for one in ablations if one.ablate == listed and one.task in evaluated]
    return rows + list(_variants(of_list, models))


def _variants(
    ablations: Sequence[PaperAblation], models: Sequence[ModelEntry]
) -> Iterator[PublishedRow]:
    """Yield what a paper reports for the variants of a list.

    The rows have the model's shape or, if there are none, the paper's smallest shape.
    """
    variants = [model for model in models if model.variant is not None]
    # A single variant has nothing to be compared with.
    for model in variants if len(variants) > 1 else []:
        assert model.card is not None
        same = [one for one in ablations if model.variant in one.values]
        shapes = [one.shape for one in same]
        shape = paper_shape(model.card)
        shape = shape if shape in shapes or not shapes else shapes[-1]
        yield from (one.row(str(model.variant), model.name) for one in same if one.shape == shape)
