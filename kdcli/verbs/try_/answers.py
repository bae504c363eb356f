"""What models say about texts, in the form in which the page of `kdcli try` shows it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.deploy.predict import RERANK_KIND, AnswerSpan, Label, Labels, Predictor, Text
from kdcli.errors import UsageError
from kdcli.types import Array

PAIR = "|||"
"""It separates the two texts of a pair."""
MAX_TEXTS = 50
RUNS = 3
"""How often a text is predicted, because other load on the machine makes single runs slow."""
MAX_CLASSES = 3
"""The number of classes of a text that are shown."""
HINTS = {
    EMBEDDING_KIND: "A text for each line. The other lines are sorted by their similarity to the "
    "first one.",
    RERANK_KIND: f"A query and a passage for each line, with {PAIR} between them.",
    "span": f"A question and its context for each line, with {PAIR} between them.",
}
"""Kind of model -> what to type."""
HINT = f"A text for each line. A pair has {PAIR} between its texts."


@dataclass(frozen=True)
class TriedModel:
    """A model on the page: its name, the size of its weights, and the model."""

    name: str
    size: str
    predictor: Predictor


@dataclass(frozen=True)
class Answer:
    """What a model says about a text.

    Attributes:
        headline: The answer.
        rows: Its parts with their probabilities or similarities.
        ms: The milliseconds that the model took for the text.
        compared: The parts that are equal if two models agree; none for scores.
    """

    headline: str
    rows: Sequence[tuple[str, float]]
    ms: float
    compared: tuple[str, ...]


@dataclass(frozen=True)
class Answers:
    """The answers of all models to a text. They are in the order of the models."""

    text: str
    by_model: Sequence[Answer]

    @property
    def differ(self) -> bool:
        """Whether the models give different answers. Scores are not compared."""
        return len({answer.compared for answer in self.by_model}) > 1


def answers(models: Sequence[TriedModel], typed: str) -> list[Answers]:
    """Return what models say about each line.

    Raises:
        UsageError: There are no lines or too many, or a model cannot read them.
    """
    texts = [line.strip() for line in typed.splitlines() if line.strip()]
    if not texts:
        raise UsageError("there is no text", "type a text for each line")
    if len(texts) > MAX_TEXTS:
        raise UsageError(f"there are {len(texts)} lines; at most {MAX_TEXTS} are allowed")
    if models[0].predictor.kind == EMBEDDING_KIND:
        if len(texts) < 2:
            raise UsageError("there is one text", "add the texts to compare it with")
        return [Answers(texts[0], [_neighbours(model.predictor, texts) for model in models])]
    return [Answers(text, [_answer(model.predictor, text) for model in models]) for text in texts]


def _timed(predictor: Predictor, text: Text) -> tuple[object, float]:
    """Return a prediction, and the milliseconds of the fastest of some runs."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        (prediction,) = predictor.predict([text])
        times.append(time.perf_counter() - begin)
    return prediction, 1000 * min(times)


def _answer(predictor: Predictor, text: str) -> Answer:
    parts = tuple(part.strip() for part in text.split(PAIR, 1))
    prediction, ms = _timed(predictor, parts if len(parts) > 1 else text)
    headline, rows = _headline_and_rows(prediction)
    compared = [headline]
    if isinstance(prediction, list):
        compared = [name for name, _ in rows]
    elif isinstance(prediction, float):
        compared = []
    return Answer(headline, rows, ms, tuple(compared))


def _headline_and_rows(prediction: object) -> tuple[str, list[tuple[str, float]]]:
    if isinstance(prediction, Label | Labels):
        names = [prediction.label] if isinstance(prediction, Label) else prediction.labels
        best = sorted(prediction.scores.items(), key=lambda pair: -pair[1])
        return ", ".join(names) or "no label", best[: max(MAX_CLASSES, len(names))]
    if isinstance(prediction, AnswerSpan):
        return prediction.text or "no answer", [("margin over no answer", prediction.margin)]
    if isinstance(prediction, list):
        rows = [(f"{entity.label}: {entity.text}", entity.score) for entity in prediction]
        return f"{len(rows)} entities" if len(rows) != 1 else "1 entity", rows
    return (f"{prediction:.4f}" if isinstance(prediction, float) else str(prediction)), []


def _neighbours(predictor: Predictor, texts: Sequence[str]) -> Answer:
    """Sort all texts but the first by their similarity to it."""

    def vectors() -> Iterator[tuple[Array, float]]:
        for text in texts:
            vector, ms = _timed(predictor, text)
            norm = float(np.linalg.norm(np.asarray(vector)))
            yield np.asarray(vector) / (norm or 1.0), ms

    units, times = zip(*vectors(), strict=True)
    similar = [float(unit @ units[0]) for unit in units[1:]]
    rows = sorted(zip(texts[1:], similar, strict=True), key=lambda pair: -pair[1])
    nearest = rows[0][0]
    return Answer(nearest, rows, sum(times) / len(times), (nearest,))
