"""From a model's outputs to what a report says of them: predictions, metrics, confusion, the worst examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit, log_softmax
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.features import Array, Encoded, encode
from kdcli.data.labelled.spans import Windows, decode, windows
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import Scorer, paired_bootstrap
from kdcli.metrics.classification import confusion, per_class
from kdcli.metrics.spans import score_answer
from kdcli.types import Example, Task

if TYPE_CHECKING:
    from kdcli.metrics.library import LibraryMetric


@dataclass(frozen=True)
class Prediction:
    """What a model says of one example.

    Attributes:
        value: in the format of the task's metrics, see `kdcli.metrics.scorer`.
        shown: the same for people and for prediction files.
        scores: probabilities of the classes, where there are classes; of a `span` how much better no answer would be.
        badness: how wrong it is: a loss, an absolute error, or one minus F1; 0 where the label is withheld.
    """

    value: Any
    shown: Any
    scores: list[float]
    badness: float


@dataclass(frozen=True)
class Features:
    """Examples of a task as rows of tokens, and the way back: of `span` tasks rows are windows."""

    task: Task
    examples: list[Example]
    rows: Encoded
    windows: Windows | None

    @classmethod
    def of(
        cls,
        task: Task,
        examples: list[Example],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        stride: int,
        token_types: bool,
    ) -> Features:
        """Tokenise examples; see `encode` and `windows`."""
        if task.kind == "span":
            cut = windows(examples, tokenizer, max_length=max_length, stride=stride, token_types=token_types)
            return cls(task, examples, cut.rows, cut)
        rows = encode(task, examples, tokenizer, max_length=max_length, token_types=token_types)
        return cls(task, examples, rows, None)

    def by_length(self) -> Features:
        """The same with the rows shortest first, to be judged with little padding."""
        if self.windows is not None:
            cut = self.windows.by_length()
            return Features(self.task, self.examples, cut.rows, cut)
        return Features(self.task, self.examples, self.rows.by_length(), None)

    def predictions(self, outputs: Sequence[Array]) -> list[Prediction]:
        """The prediction for each example, in the order of `examples`, from the outputs for each row."""
        if self.windows is not None:
            # The metric wants the best span even where no answer is likelier: it tries every threshold.
            found = decode(self.windows, outputs, self.examples)
            none = [self.task.impossible and d.no_answer > 0 for d in found]
            return [
                Prediction(
                    {"id": d.id, "text": d.text, "no_answer": d.no_answer}, "" if n else d.text, [d.no_answer], 0.0
                )
                for d, n in zip(found, none, strict=True)
            ]
        at = {int(example): row for row, example in enumerate(self.rows.example)}
        return [self._prediction(i, at[i], outputs[at[i]]) for i in range(len(self.examples))]

    def _prediction(self, number: int, row: int, output: Array) -> Prediction:
        task = self.task
        label: Any = self.examples[number].label
        if task.kind == "class":
            logs = log_softmax(output.astype(np.float64))
            value = int(logs.argmax())
            badness = 0.0 if label is None else float(-logs[label])
            return Prediction(value, task.labels[value], np.exp(logs).tolist(), badness)
        if task.kind == "multi":
            likely = expit(output.astype(np.float64))
            chosen = (likely > 0.5).astype(int)
            truth = np.zeros(len(chosen), dtype=int)
            truth[list(label or ())] = 1
            badness = 0.0 if label is None else float(-np.log(np.where(truth, likely, 1 - likely).clip(1e-12)).mean())
            shown = [name for name, c in zip(task.labels, chosen, strict=True) if c]
            return Prediction(chosen.tolist(), shown, likely.tolist(), badness)
        if task.kind == "score":
            value_ = float(output[0])
            return Prediction(value_, value_, [], 0.0 if label is None else abs(value_ - float(label)))
        return self._of_words(number, row, output)

    def _of_words(self, number: int, row: int, output_LC: Array) -> Prediction:
        """A label a word; words that were cut off count as the commonest nothing: `O`, else the first label."""
        assert self.rows.words_T is not None
        example, end = self.examples[number], int(self.rows.ends[row])
        words_L = self.rows.words_T[end - int(self.rows.lengths[row]) : end]
        labels = self.task.labels
        found = ["O" if "O" in labels else labels[0]] * len(example.texts)
        for place in np.flatnonzero(words_L >= 0):
            found[int(words_L[place])] = labels[int(output_LC[place].argmax())]
        wrong = 0.0
        if example.label is not None:
            truth = reference(self.task, example)
            wrong = sum(a != b for a, b in zip(found, truth, strict=True)) / len(truth)
        return Prediction(found, found, [], wrong)


@dataclass(frozen=True)
class Evaluator:
    """The judged sets of a task, in one row of examples, and what outputs for them mean."""

    features: Features
    bounds: Mapping[str, tuple[int, int]]
    choose_on: str | None = None
    extra_metrics: Sequence[LibraryMetric] = ()

    @classmethod
    def of(
        cls,
        task: Task,
        sets: Mapping[str, list[Example]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        choose_on: str | None = None,
        **how: Any,
    ) -> Evaluator:
        """Tokenise all sets; `how` is what `Features.of` wants."""
        bounds: dict[str, tuple[int, int]] = {}
        everything: list[Example] = []
        for name, examples in sets.items():
            bounds[name] = (len(everything), len(everything) + len(examples))
            everything += examples
        return cls(Features.of(task, everything, tokenizer, **how).by_length(), bounds, choose_on)

    @property
    def task(self) -> Task:
        """The task that is judged."""
        return self.features.task

    def with_metrics(self, names: Sequence[str], *, trust_remote_code: bool) -> Evaluator:
        """The same with metrics of the `evaluate` library, each tried on the references of the first set.

        Raises:
            UsageError: see `kdcli.metrics.library`.
        """
        if not names:
            return self
        # Imported on demand: the library takes seconds.
        from kdcli.metrics.library import load_metrics

        begin, end = next(iter(self.bounds.values()))
        references = [reference(self.task, e) for e in self.features.examples[begin:end]]
        loaded = load_metrics(names, self.task, references, trust_remote_code=trust_remote_code)
        return replace(self, extra_metrics=loaded)

    def scorers(self, predictions: Sequence[Prediction]) -> dict[str, Scorer]:
        """Set → its scorer, see `kdcli.metrics.scorer`."""
        return {
            name: scorer(
                self.task,
                [p.value for p in predictions[begin:end]],
                [reference(self.task, e) for e in self.features.examples[begin:end]],
                language=self.language(name),
            )
            for name, (begin, end) in self.bounds.items()
        }

    def language(self, name: str) -> str:
        """The language in which the answers of a set are normalised."""
        return name if self.task.kind == "span" and name else "en"

    def by_set(self, predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
        """Set → metric → value."""
        return {
            n: s(np.arange(e - b))
            for (n, s), (b, e) in zip(self.scorers(predictions).items(), self.bounds.values(), strict=True)
        }

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        """The metrics while training, see `summed_up`."""
        return summed_up(self.by_set(self.features.predictions(outputs)), self.choose_on)

    def evaluations(
        self, model: str, split: str, predictions: Sequence[Prediction], worst: int
    ) -> list[dict[str, Any]]:
        """What the report shows of each set, as `kdcli.report.schema.Evaluation` takes it."""
        found = []
        for (name, (begin, end)), metrics in zip(self.bounds.items(), self.by_set(predictions).values(), strict=True):
            examples, of_set = self.features.examples[begin:end], predictions[begin:end]
            values, references = [p.value for p in of_set], [reference(self.task, e) for e in examples]
            extra = {k: v for metric in self.extra_metrics for k, v in metric.compute(values, references).items()}
            found.append(
                {
                    "model": model,
                    "task": self.task.name,
                    "set": name,
                    "split": split,
                    "n": end - begin,
                    "metrics": metrics | extra,
                    "confusion": self._confusion(examples, of_set),
                    "per_class": per_class(self.task, values, references),
                    "worst": self._worst(examples, of_set, self.language(name), worst),
                }
            )
        return found

    def _confusion(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, Any] | None:
        if self.task.kind != "class":
            return None
        truth: list[Any] = [e.label for e in examples]
        counts = confusion([p.value for p in predictions], truth, len(self.task.labels))
        return {"labels": list(self.task.labels), "counts": counts.astype(int).tolist()}

    def _worst(
        self, examples: Sequence[Example], predictions: Sequence[Prediction], language: str, count: int
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for example, prediction in zip(examples, predictions, strict=True):
            bad = badness(self.task, example, prediction, language)
            # A loss is not 0 where the answer is right, and may even be large there.
            is_loss = self.task.kind in ("class", "multi")
            if bad <= 0 or (is_loss and prediction.value == reference(self.task, example)):
                continue
            label, said = shown_label(self.task, example), prediction.shown
            found.append(
                {
                    "id": example.id,
                    "texts": [" ".join(example.texts)] if self.task.kind == "tokens" else list(example.texts),
                    "label": readable(self.task, example, label, said),
                    "predicted": readable(self.task, example, said, label),
                    "badness": bad,
                }
            )
        return sorted(found, key=lambda one: -one["badness"])[:count]


def summed_up(by_set: Mapping[str, Mapping[str, float]], choose_on: str | None) -> dict[str, float]:
    """The metrics of one set (`choose_on`), else their means over sets; of several sets also each, as `SET/METRIC`."""
    if choose_on is not None:
        total = dict(by_set[choose_on])
    else:
        first = next(iter(by_set.values()))
        shared = [m for m in first if all(m in of for of in by_set.values())]
        total = {m: float(np.mean([of[m] for of in by_set.values()])) for m in shared}
    if len(by_set) > 1:
        total |= {f"{name}/{m}": value for name, of in by_set.items() for m, value in of.items()}
    return total


def badness(task: Task, example: Example, prediction: Prediction, language: str) -> float:
    """How wrong a prediction is; see `Prediction`."""
    if task.kind != "span" or example.label is None:
        return prediction.badness
    return 1.0 - score_answer(prediction.shown, reference(task, example)["answers"], language)[1]


def reference(task: Task, example: Example) -> Any:
    """An example's label in the format of the task's metrics."""
    label: Any = example.label
    if task.kind == "multi":
        return [int(i in label) for i in range(len(task.labels))]
    if task.kind == "tokens":
        return [task.labels[i] for i in label]
    if task.kind == "span":
        return {"id": example.id, "answers": [answer.text for answer in label]}
    return label


def shown_label(task: Task, example: Example) -> Any:
    """An example's label for people and for prediction files; None when it is withheld."""
    label: Any = example.label
    if label is None or task.kind == "score":
        return label
    if task.kind == "span":
        return [answer.text for answer in label]
    return task.labels[label] if task.kind == "class" else [task.labels[i] for i in label]


def readable(task: Task, example: Example, value: Any, other: Any) -> str:
    """A label or prediction in words; of `tokens` only the words in which it differs from the other one."""
    if task.kind == "tokens":
        return ", ".join(f"{w} {v}" for w, v, o in zip(example.texts, value, other, strict=True) if v != o)
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value))) or "(none)"
    return f"{value:.3g}" if isinstance(value, float) else str(value) or "(none)"


def compared(
    evaluator: Evaluator,
    of_model: tuple[str, Mapping[str, Scorer]],
    of_baseline: tuple[str, Mapping[str, Scorer]],
    resamples: int,
) -> list[dict[str, Any]]:
    """How much better a model is than another on every set, as `kdcli.report.schema.Comparison` takes it.

    Args:
        of_model, of_baseline: name and scorers of each; both were asked the same examples in the same order.
        resamples: of the bootstrap.
    """
    (model, scorers), (baseline, of_other) = of_model, of_baseline
    return [
        {
            "model": model,
            "baseline": baseline,
            "task": evaluator.task.name,
            "set": name,
            "metric": metric,
            "difference": difference,
            "low": low,
            "high": high,
        }
        for name, (begin, end) in evaluator.bounds.items()
        for metric, (difference, low, high) in paired_bootstrap(
            scorers[name], of_other[name], end - begin, resamples=resamples
        ).items()
    ]
