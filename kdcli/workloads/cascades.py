"""Score cascades: a small model, and a larger one where the small one is unsure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kdcli.deploy.cascade import CascadeParts, CascadeSettings
from kdcli.metrics.cascade import Answers, Rankings
from kdcli.models.model import Model
from kdcli.workloads.predictions import Prediction
from kdcli.workloads.scores import ModelScores


@dataclass(frozen=True, kw_only=True)
class Cascade(Model):
    """A larger model that is only asked where a small one is unsure.

    It reads rows as the larger model does.

    Attributes:
        first: The small model.
        second: The larger model alone.
        settings: When the larger model is asked.
    """

    first: Model
    second: Model
    settings: CascadeSettings

    def answers(self, predict: Callable[[Model], list[Prediction]]) -> list[Prediction]:
        """Return the answers of both models.

        The larger one predicts all rows, so that its stored outputs do for every threshold.
        """
        assert self.settings.threshold is not None
        pairs = zip(predict(self.first), predict(self.second), strict=True)
        threshold = self.settings.threshold
        return [replace(b, asked=True) if a.sure < threshold else a for a, b in pairs]


def as_cascade(second: Model, parts: CascadeParts | None, load: Callable[..., Model]) -> Model:
    """Return a cascade, or the model itself if the directory holds no small model.

    Args:
        second: The model of the directory.
        parts: The small model.
        load: Loads it, given its directory and that of its tokenizer.
    """
    if parts is None:
        return second
    first = load(parts.first, parts.tokenizer)
    note = f"a cascade of first/, {first.note}, and a larger model, {second.note}"
    own = vars(second) | {"note": note}
    return Cascade(**own, first=first, second=second, settings=parts.settings)


def describe_asked(predictions: Sequence[Prediction]) -> list[str]:
    """Say how often the larger model of a cascade was asked; empty for other models."""
    asked = sum(each.asked for each in predictions)
    if not asked:
        return []
    return [f"the larger model gave {asked:,} of {len(predictions):,} answers"]


def answers_of(scores: ModelScores) -> Answers | Rankings:
    """Return what `kdcli.metrics.cascade` needs to know of a model's answers.

    The task is one for which there are cascades.
    """
    if scores.rankings is not None:
        return scores.rankings
    predictions = scores.predictions
    shown, sure = ([getattr(each, key) for each in predictions] for key in ("shown", "sure"))
    return Answers(shown=shown, sure=sure)
