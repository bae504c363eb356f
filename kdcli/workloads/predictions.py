"""From a model's outputs to its evaluation in a report: predictions, metrics, confusion, the worst
examples."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit, log_softmax
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.features import Array, TokenizedRows, encode
from kdcli.data.labelled.spans import Windows, decode, windows
from kdcli.data.labelled.targets import encode_targets
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.classification import confusion, per_class
from kdcli.metrics.spans import score_answer
from kdcli.report.schema import ClassScore, Confusion, Evaluation, Mistake
from kdcli.types import Answer, Example, Task

if TYPE_CHECKING:
    from kdcli.metrics.library import LibraryMetric


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one example. `value`: in the format of the task's metrics, see
    `kdcli.metrics.scorer`.
    `shown`: the same for people and for prediction files. `scores`: class probabilities, if there
    are classes; for `span` the margin of no answer over the best span. `error`: a loss, an absolute
    error, or the share of wrong words; 0 for `span` and `text` and where the label is withheld."""

    value: Any
    shown: Any
    scores: list[float]
    error: float = 0.0


@dataclass(frozen=True)
class Features:
    """A task's examples as rows of tokens; the rows of a `span` task are windows."""

    task: Task
    examples: list[Example]
    rows: TokenizedRows
    windows: Windows | None
    tokenizer: PreTrainedTokenizerBase | None = None  # of `text`

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
        target: Mapping[str, int] | None = None,
    ) -> Features:
        """Tokenise examples; see `encode`, `windows` and, of which `target` are two arguments,
        `encode_targets`."""
        if task.kind == "text":
            assert target is not None
            rows = encode_targets(
                examples, tokenizer, max_length=max_length, token_types=token_types, **target
            )
            return cls(task, examples, rows, None, tokenizer)
        if task.kind == "span":
            cut = windows(
                examples, tokenizer, max_length=max_length, stride=stride, token_types=token_types
            )
            return cls(task, examples, cut.rows, cut)
        rows = encode(task, examples, tokenizer, max_length=max_length, token_types=token_types)
        return cls(task, examples, rows, None)

    def by_length(self) -> Features:
        """The same rows, shortest first, to evaluate with little padding."""
        cut = None if self.windows is None else self.windows.by_length()
        return replace(self, rows=self.rows.by_length() if cut is None else cut.rows, windows=cut)

    def predictions(self, outputs: Sequence[Array]) -> list[Prediction]:
        """Predictions in the order of `examples`, from the model's output for each row."""
        if self.windows is not None:
            # The metric tries every threshold, so it gets the best span even where no answer is
            # likelier.
            return [
                Prediction(
                    {"id": d.id, "text": d.text, "no_answer": d.no_answer},
                    "" if self.task.impossible and d.no_answer > 0 else d.text,
                    [d.no_answer],
                )
                for d in decode(self.windows, outputs, self.examples)
            ]
        row_of = {int(example): row for row, example in enumerate(self.rows.example)}
        return [
            self._prediction(e, row_of[i], outputs[row_of[i]]) for i, e in enumerate(self.examples)
        ]

    def _prediction(self, example: Example, row: int, output: Array) -> Prediction:
        task, error = self.task, 0.0
        label: Any = example.label
        if task.kind == "text":
            assert self.tokenizer is not None
            text = str(
                self.tokenizer.decode(output.astype(np.int64), skip_special_tokens=True)
            ).strip()
            return Prediction(text, text, [])
        if task.kind == "class":
            logs = log_softmax(output.astype(np.float64))
            index = int(logs.argmax())
            error = 0.0 if label is None else float(-logs[label])
            return Prediction(index, task.labels[index], np.exp(logs).tolist(), error)
        if task.kind == "multi":
            likely = expit(output.astype(np.float64))
            chosen = (likely > 0.5).astype(int)
            if label is not None:
                truth = np.isin(np.arange(len(likely)), label)
                error = float(-np.log(np.where(truth, likely, 1 - likely).clip(1e-12)).mean())
            names = [name for name, c in zip(task.labels, chosen, strict=True) if c]
            return Prediction(chosen.tolist(), names, likely.tolist(), error)
        if task.kind == "score":
            score = float(output[0])
            return Prediction(score, score, [], 0.0 if label is None else abs(score - float(label)))
        tags = self._tags(example, row, output)
        if label is not None:
            error = sum(a != b for a, b in zip(tags, reference(task, example), strict=True)) / len(
                label
            )
        return Prediction(tags, tags, [], error)

    def _tags(self, example: Example, row: int, output_LC: Array) -> list[str]:
        """A label per word; truncated words get `O`, or the first label if there is no `O`."""
        assert self.rows.words_T is not None
        end, labels = int(self.rows.ends[row]), self.task.labels
        words_L = self.rows.words_T[end - int(self.rows.lengths[row]) : end]
        tags = ["O" if "O" in labels else labels[0]] * len(example.texts)
        for token in np.flatnonzero(words_L >= 0):
            tags[int(words_L[token])] = labels[int(output_LC[token].argmax())]
        return tags


@dataclass(frozen=True)
class Evaluator:
    """The evaluated sets of a task as one list of examples; `bounds` gives each set's slice of
    it."""

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
        """Tokenise all sets; `how` goes to `Features.of`."""
        bounds = itertools.pairwise(itertools.accumulate(map(len, sets.values()), initial=0))
        features = Features.of(task, list(itertools.chain(*sets.values())), tokenizer, **how)
        return cls(features.by_length(), dict(zip(sets, bounds, strict=True)), choose_on)

    @property
    def task(self) -> Task:
        """The evaluated task."""
        return self.features.task

    def with_metrics(self, names: Sequence[str], *, trust_remote_code: bool) -> Evaluator:
        """The same with metrics of the `evaluate` library, each tried on the references of the
        first set. Raises UsageError: see `kdcli.metrics.library`."""
        if not names:
            return self
        # Imported on demand: the library takes seconds.
        from kdcli.metrics.library import load_metrics

        begin, end = next(iter(self.bounds.values()))
        references = [reference(self.task, e) for e in self.features.examples[begin:end]]
        loaded = load_metrics(names, self.task, references, trust_remote_code=trust_remote_code)
        return replace(self, extra_metrics=loaded)

    def scorers(self, predictions: Sequence[Prediction]) -> dict[str, Scorer]:
        """Set -> its scorer, see `kdcli.metrics.scorer`."""
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
        """The language whose rules compare the answers of a set; empty where they are SQuAD's."""
        return name if self.task.kind == "span" else ""

    def by_set(self, predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
        """Set -> metric -> value."""
        scorers = self.scorers(predictions)
        return {
            name: scorers[name](np.arange(end - begin))
            for name, (begin, end) in self.bounds.items()
        }

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        """The metrics during training, see `summed_up`."""
        return summed_up(self.by_set(self.features.predictions(outputs)), self.choose_on)

    def evaluations(
        self, model: str, split: str, predictions: Sequence[Prediction], worst: int
    ) -> list[Evaluation]:
        """Evaluate a model on each set, and keep the `worst` examples of each."""
        metrics, rows = self.by_set(predictions), []
        for name, (begin, end) in self.bounds.items():
            pairs = list(
                zip(self.features.examples[begin:end], predictions[begin:end], strict=True)
            )
            truth, predicted = (
                [reference(self.task, e) for e, _ in pairs],
                [p.value for _, p in pairs],
            )
            extra = {
                k: v
                for metric in self.extra_metrics
                for k, v in metric.compute(predicted, truth).items()
            }
            counts = None
            if self.task.kind == "class":
                cells = confusion(predicted, truth, len(self.task.labels)).astype(int).tolist()
                counts = Confusion(labels=list(self.task.labels), counts=cells)
            mistakes = _worst_examples(self.task, pairs, self.language(name))[:worst]
            classes = per_class(self.task, predicted, truth)
            rows.append(
                Evaluation(
                    model=model,
                    task=self.task.name,
                    set=name,
                    split=split,
                    n=end - begin,
                    metrics=metrics[name] | extra,
                    confusion=counts,
                    per_class={k: ClassScore.model_validate(v) for k, v in classes.items()},
                    worst=mistakes,
                    rows_sha256=_sha256([example for example, _ in pairs]),
                )
            )
        return rows


def _sha256(examples: Sequence[Example]) -> str:
    """The hash of texts and labels of some examples, in any order."""
    each = (
        hashlib.sha256(repr((e.texts, e.label)).encode("utf-8", "surrogatepass")).digest()
        for e in examples
    )
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()


def _worst_examples(
    task: Task, pairs: Sequence[tuple[Example, Prediction]], language: str
) -> list[Mistake]:
    """List all wrong predictions, the largest error first."""
    wrong: list[Mistake] = []
    for example, prediction in pairs:
        error, label, shown = prediction.error, shown_label(task, example), prediction.shown
        if task.kind == "span" and label is not None:
            error = 1.0 - score_answer(shown, label, language)[1]
        elif task.kind == "text" and label is not None:
            # Imported by kind, as metrics are.
            from kdcli.metrics.generation import rouge

            error = 1.0 - rouge(shown, label)[2]
        # A loss is above 0 for a right answer too.
        if error <= 0 or (
            task.kind in ("class", "multi") and prediction.value == reference(task, example)
        ):
            continue
        texts = [" ".join(example.texts)] if task.kind == "tokens" else list(example.texts)
        wrong.append(
            Mistake(
                id=example.id,
                texts=texts,
                label=readable(task, example, label, shown),
                predicted=readable(task, example, shown, label),
                badness=error,
            )
        )
    return sorted(wrong, key=lambda mistake: -mistake.badness)


def as_label(task: Task, example: Example, prediction: Prediction) -> Example:
    """The example with a model's prediction as its label."""
    value: Any = prediction.value
    if task.kind == "multi":
        label: Any = tuple(int(n) for n in np.flatnonzero(value))
    elif task.kind == "tokens":
        label = tuple(task.labels.index(name) for name in value)
    elif task.kind == "span":
        text = str(prediction.shown)
        start = example.texts[1].find(text) if text else -1
        label = (Answer(text, start),) if start >= 0 else ()
    else:
        label = value
    return replace(example, label=label)


def summed_up(by_set: Mapping[str, Mapping[str, float]], choose_on: str | None) -> dict[str, float]:
    """The metrics of set `choose_on`, else means over sets; with several sets also each, as
    `SET/METRIC`."""
    if choose_on is not None:
        total = dict(by_set[choose_on])
    else:
        first = next(iter(by_set.values()))
        shared = [m for m in first if all(m in metrics for metrics in by_set.values())]
        total = {m: float(np.mean([metrics[m] for metrics in by_set.values()])) for m in shared}
    if len(by_set) > 1:
        total |= {
            f"{name}/{m}": value for name, metrics in by_set.items() for m, value in metrics.items()
        }
    return total


def reference(task: Task, example: Example) -> Any:
    """An example's label in the format of the task's metrics; None if it is withheld."""
    label: Any = example.label
    if label is None or task.kind in ("class", "score", "text"):
        return label
    if task.kind == "multi":
        return [int(i in label) for i in range(len(task.labels))]
    if task.kind == "tokens":
        return [task.labels[i] for i in label]
    return {"id": example.id, "answers": [answer.text for answer in label]}


def shown_label(task: Task, example: Example) -> Any:
    """An example's label for people and for prediction files; None if it is withheld."""
    label: Any = example.label
    if label is None or task.kind in ("score", "text"):
        return label
    if task.kind == "span":
        return [answer.text for answer in label]
    return task.labels[label] if task.kind == "class" else [task.labels[i] for i in label]


def readable(task: Task, example: Example, value: Any, other: Any) -> str:
    """A label or prediction as text; for `tokens` only the words in which it differs from
    `other`."""
    if task.kind == "tokens":
        return ", ".join(
            f"{w} {v}" for w, v, o in zip(example.texts, value, other, strict=True) if v != o
        )
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value))) or "(none)"
    return f"{value:.3g}" if isinstance(value, float) else str(value) or "(none)"
