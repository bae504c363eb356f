"""A model that takes part in a run, as its report describes it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from transformers import PreTrainedModel

from kdcli.deploy.cascade import KEY as CASCADE
from kdcli.deploy.exported import Export
from kdcli.deploy.latency import Subject
from kdcli.models.card import describe, describe_source
from kdcli.models.files import LIBRARY_TYPE
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.report.schema import UNDISTILLED, ModelEntry, Role
from kdcli.report.text import short
from kdcli.types import Card


@dataclass(frozen=True)
class Entry:
    """A model that takes part in a run. Its name, role and other facts are as in `ModelEntry`.

    Attributes:
        card: The description; None for a model without files of its own.
        folder: The directory of a model that this run made, where its model card is written.
        made: How the run made the model, as the second half of a sentence: `distilled from ...`.
        source: The model that this one was made from.
        timed: The model as the latency worker loads it; None if its latency is not measured.
    """

    name: str
    role: Role
    card: Card | None
    baseline: str | None = None
    folder: Path | None = None
    made: str | None = None
    source: str | None = None
    of: str | None = None
    step: int | None = None
    backend: str | None = None
    dtype: str | None = None
    variant: str | None = None
    run: str | None = None
    timed: Subject | None = None

    @classmethod
    def loaded(cls, name: str, role: Role, model: Model, baseline: str | None = None) -> Self:
        """Describe a model that the run only reads."""
        network: object = model.model
        if isinstance(network, Export):
            timed = Subject(name, location(model.source), network.format, network.precision)
            if hasattr(network.config, CASCADE):
                # Its time depends on how often the larger model is asked.
                return cls(name, role, network.card, baseline)
            return cls(name, role, network.card, baseline, timed=timed)
        card = describe_source(model.model, model.source)
        return cls(name, role, card, baseline, timed=timed_subject(name, model))

    @classmethod
    def saved(
        cls,
        name: str,
        role: Role,
        network: PreTrainedModel,
        folder: Path,
        baseline: str | None = None,
        *,
        made: str | None = None,
        source: str | None = None,
    ) -> Self:
        """Describe a model that the run has made and saved in `folder`."""
        card, timed = describe(network, str(folder), folder), Subject(name, str(folder))
        return cls(name, role, card, baseline, folder, made, source, timed=timed)

    @classmethod
    def reported(cls, model: ModelEntry) -> Self:
        """Return the model of another report, which has no files here."""
        return cls(**dict(model))

    @classmethod
    def without_distillation(
        cls, student: str, role: Literal["untrained", "undistilled"] = "untrained"
    ) -> Self:
        """Name the student before its training, or the one that was trained without a teacher."""
        return cls(student + UNDISTILLED, role, None, of=student)

    def stored(self, run: Path) -> ModelEntry:
        """Return the entry of report.json.

        A model inside the run's directory is listed by its name, because the run may be moved.
        """
        card = self.card
        if card is not None and Path(card.id).is_relative_to(run):
            card = replace(card, id=short(card.id))
        facts = {name: getattr(self, name) for name in ModelEntry.model_fields}
        return ModelEntry.model_validate(facts | {"card": card})


def timed_subject(name: str, model: Model) -> Subject | None:
    """Return a model as the latency worker loads it; None if the worker cannot load it."""
    by_library = model.model.config.model_type == LIBRARY_TYPE
    return None if by_library else Subject(name, location(model.source))


def with_baseline(models: Iterable[Entry]) -> list[Entry]:
    """Make the first model the baseline of the others."""
    first, *others = models
    return [
        replace(first, role="baseline"),
        *(replace(other, baseline=first.name) for other in others),
    ]
