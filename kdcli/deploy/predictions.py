"""The predictions of a model: classes, entities and answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from kdcli.types import Array

Text = str | Sequence[str]
"""A text; a pair of texts; or the words of a text, for a model that labels words."""


@dataclass(frozen=True)
class Label:
    """The class of a text.

    Attributes:
        label: its name.
        score: its probability.
        scores: the probability of every class, by name.
    """

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Labels:
    """The classes of a text that may have several, or none.

    Attributes:
        labels: the names of the classes with a probability above 0.5.
        scores: the probability of every class, by name.
    """

    labels: list[str]
    scores: dict[str, float]


@dataclass(frozen=True)
class Entity:
    """Words with a common label.

    Attributes:
        label: the type, without `B-` or `I-`.
        text: the words.
        score: the mean probability of the words' labels.
        start, end: the first character and the one after the last; numbers of words if the text
            was given as a list of words.
    """

    label: str
    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class AnswerSpan:
    """The answer to a question.

    Attributes:
        text: the best span of the context.
        margin: the span's logit minus the logit of "no answer". For a model that was trained with
            unanswerable questions, a margin below 0 means that there is no answer.
    """

    text: str
    margin: float


def most_probable(names: Sequence[str], probs_C: Array) -> Label:
    """Return the most probable class."""
    best = int(probs_C.argmax())
    scores = dict(zip(names, probs_C.tolist(), strict=True))
    return Label(names[best], float(probs_C[best]), scores)


def several_labels(names: Sequence[str], probs_C: Array) -> Labels:
    """Return the classes that are more probable than not."""
    scores = dict(zip(names, probs_C.tolist(), strict=True))
    return Labels([name for name, prob in scores.items() if prob > 0.5], scores)
