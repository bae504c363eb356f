"""Turn a model's outputs into predictions, and predictions into the evaluations of a report.

An evaluation holds metrics, a confusion matrix, scores per class and the worst mistakes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit, log_softmax
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.answer_windows import Windows, decode_answers, windows
from kdcli.data.labelled.features import TokenizedRows, encode_examples, encode_targets
from kdcli.data.labelled.partition import choose_subset
from kdcli.listing import class_names
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.cascade import sureness
from kdcli.metrics.classification import confusion, per_class
from kdcli.metrics.spans import score_answer
from kdcli.report.schema import ClassScore, Evaluation, Mistake
from kdcli.report.schema_decisions import Confusion
from kdcli.types import IGNORED, Answer, Array, Example, Task

if TYPE_CHECKING:
    from kdcli.metrics.library import LibraryMetric

MAX_TRIVIAL_ROWS, MAX_TRIVIAL_ANSWERS = 2000, 10
"""Maximum number of training rows, and of labels and of sets of labels, that are tried to find the
best answer to every text."""

MUCH_BETTER = 0.3
"""From this gain in accuracy on, a warning says that the labels may be in another order."""


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one example.

    Attributes:
        value: The prediction in the format of the task's metrics, see `kdcli.metrics.scorer`.
            Without the words that metrics ignore.
        shown: The prediction in the format of reports and prediction files.
        scores: Class probabilities if the task has classes; for `span`, how much higher "no
            answer" scores than the best span.
        error: The loss, the absolute error, or the share of wrong words. It is 0 for `span` and
            `text`, and if the label is withheld.
        sure: The `sureness` of classes, several labels and labels of words; 1 for other kinds.
        asked: Whether the larger model of a cascade gave the answer.
    """

    value: Any
    shown: Any
    scores: list[float]
    error: float = 0.0
    sure: float = 1.0
    asked: bool = False


@dataclass(frozen=True)
class RowFormat:
    """The form of the rows that a model reads.

    Attributes:
        max_length: Maximum number of tokens in a row.
        stride: Number of tokens shared by consecutive windows, for `span`.
        token_types: Whether the model reads token types.
        target_length: Number of tokens reserved for the target, for `text`.
        end_id: The token that ends a target, for `text`.
    """

    max_length: int
    stride: int
    token_types: bool
    target_length: int | None = None
    end_id: int | None = None


@dataclass(frozen=True)
class Features:
    """A task's tokenised examples.

    Attributes:
        task: The task.
        examples: The examples.
        rows: The tokenised rows; `Windows` for `span`.
        tokenizer: Decodes the outputs of a `text` task, else None.
    """

    task: Task
    examples: list[Example]
    rows: TokenizedRows
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        examples: list[Example],
        tokenizer: PreTrainedTokenizerBase,
        form: RowFormat,
    ) -> Features:
        """Tokenise examples.

        Args:
            task: The task.
            examples: The examples.
            tokenizer: The tokenizer.
            form: The form of the rows.
        """
        max_length, token_types = form.max_length, form.token_types
        if task.kind == "text":
            assert form.target_length is not None
            assert form.end_id is not None
            rows = encode_targets(
                examples,
                tokenizer,
                max_length=max_length,
                target_length=form.target_length,
                end_id=form.end_id,
                token_types=token_types,
            )
            return cls(task, examples, rows, tokenizer)
        if task.kind == "span":
            rows = windows(
                examples,
                tokenizer,
                max_length=max_length,
                stride=form.stride,
                token_types=token_types,
            )
            return cls(task, examples, rows)
        rows = encode_examples(
            task, examples, tokenizer, max_length=max_length, token_types=token_types
        )
        return cls(task, examples, rows)

    def by_length(self) -> Features:
        """Sort the rows by length, so that evaluation needs little padding."""
        return replace(self, rows=self.rows.by_length())

    def predictions(self, outputs: Sequence[Array]) -> list[Prediction]:
        """Turn the model's output for each row into predictions in the order of `examples`."""
        if isinstance(self.rows, Windows):
            # `value` always has the best span, because the metric tries every threshold for
            # "no answer".
            return [
                Prediction(
                    {"id": d.id, "text": d.text, "no_answer": d.no_answer},
                    "" if self.task.impossible and d.no_answer > 0 else d.text,
                    [d.no_answer],
                )
                for d in decode_answers(self.rows, outputs, self.examples)
            ]
        row_of = {int(example): row for row, example in enumerate(self.rows.example)}
        predictions = [
            self._prediction(e, row_of[i], outputs[row_of[i]]) for i, e in enumerate(self.examples)
        ]
        if self.task.kind not in ("class", "multi", "tokens"):
            return predictions
        return [
            replace(each, sure=self._sureness(row_of[i], outputs[row_of[i]]))
            for i, each in enumerate(predictions)
        ]

    def _sureness(self, row: int, output: Array) -> float:
        words = None if self.rows.words_T is None else np.flatnonzero(self._words(row) >= 0)
        return sureness(self.task.kind, output.astype(np.float64), words)

    def _words(self, row: int) -> Array:
        """Return the number of the word that begins at each token of a row, or -1."""
        assert self.rows.words_T is not None
        end = int(self.rows.ends[row])
        return self.rows.words_T[end - int(self.rows.lengths[row]) : end]

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
            log_probs = log_softmax(output.astype(np.float64), axis=-1)
            index = int(log_probs.argmax())
            error = 0.0 if label is None else float(-log_probs[label])
            return Prediction(index, task.labels[index], np.exp(log_probs).tolist(), error)
        if task.kind == "multi":
            probs = expit(output.astype(np.float64))
            chosen = (probs > 0.5).astype(int)
            if label is not None:
                truth = np.isin(np.arange(len(probs)), label)
                error = float(-np.log(np.where(truth, probs, 1 - probs).clip(1e-12)).mean())
            names = [name for name, c in zip(task.labels, chosen, strict=True) if c]
            return Prediction(chosen.tolist(), names, probs.tolist(), error)
        if task.kind == "score":
            score = float(output[0])
            return Prediction(score, score, [], 0.0 if label is None else abs(score - float(label)))
        tags = self._tags(example, row, output)
        if label is None:
            return Prediction(tags, tags, [])
        value = [tag for tag, number in zip(tags, label, strict=True) if number != IGNORED]
        truth = reference(task, example)
        error = sum(a != b for a, b in zip(value, truth, strict=True)) / max(1, len(truth))
        return Prediction(value, tags, [], error)

    def _tags(self, example: Example, row: int, output_LC: Array) -> list[str]:
        """Return one label per word.

        Truncated words get the label `O`, or the first label if the task has no `O`.
        """
        words_L, labels = self._words(row), self.task.labels
        tags = ["O" if "O" in labels else labels[0]] * len(example.texts)
        for token in np.flatnonzero(words_L >= 0):
            tags[int(words_L[token])] = labels[int(output_LC[token].argmax())]
        return tags


@dataclass(frozen=True)
class Evaluator:
    """The tokenised evaluation sets of a task.

    Attributes:
        features: The examples of all sets.
        bounds: set -> first and last index (exclusive) of its examples.
        choose_on: The set whose metrics count during training; None for the mean over all sets.
        extra_metrics: Additional metrics from the `evaluate` library.
    """

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
        form: RowFormat,
        *,
        choose_on: str | None = None,
    ) -> Evaluator:
        """Tokenise all sets.

        Args:
            task: The task.
            sets: name -> examples.
            tokenizer: The tokenizer.
            form: The form of the rows.
            choose_on: The set whose metrics count during training; None for the mean over all sets.
        """
        bounds = itertools.pairwise(itertools.accumulate(map(len, sets.values()), initial=0))
        features = Features.of(task, list(itertools.chain(*sets.values())), tokenizer, form)
        return cls(features.by_length(), dict(zip(sets, bounds, strict=True)), choose_on)

    @property
    def task(self) -> Task:
        """The task that is evaluated."""
        return self.features.task

    def without_row_labels(self) -> Evaluator:
        """Return a copy whose rows have no labels, so that no loss can read them.

        The examples keep theirs.
        """
        rows = replace(self.features.rows, labels=None)
        return replace(self, features=replace(self.features, rows=rows))

    def with_metrics(
        self,
        names: Sequence[str],
    ) -> Evaluator:
        """Return a copy with additional metrics from the `evaluate` library.

        Every metric is tried on the references of the first set.

        Args:
            names: Names, scripts or directories of metrics.

        Raises:
            UsageError: A metric cannot be loaded, or does not fit the task.
        """
        if not names:
            return self
        # Importing the library takes seconds.
        from kdcli.metrics.library import load_metrics

        begin, end = next(iter(self.bounds.values()))
        references = [reference(self.task, e) for e in self.features.examples[begin:end]]
        loaded = load_metrics(names, self.task, references)
        return replace(self, extra_metrics=loaded)

    def scorers(self, predictions: Sequence[Prediction]) -> dict[str, Scorer]:
        """Return the scorer of every set, set -> scorer; see `kdcli.metrics.scorer`."""
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
        """Return the language whose rules normalise a set's answers; empty for SQuAD's rules."""
        return name if self.task.kind == "span" else ""

    def by_set(self, predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
        """Compute the metrics of every set, set -> metric -> value."""
        scorers = self.scorers(predictions)
        return {
            name: scorers[name](np.arange(end - begin))
            for name, (begin, end) in self.bounds.items()
        }

    def metrics(self, outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the metrics during training; see `summed_up`."""
        return summed_up(self.by_set(self.features.predictions(outputs)), self.choose_on)

    def evaluations(
        self, model: str, split: str, predictions: Sequence[Prediction], worst: int
    ) -> list[Evaluation]:
        """Evaluate predictions on every set.

        Args:
            model: The model's name in the report.
            split: The evaluation split.
            predictions: The predictions for all examples.
            worst: Number of mistakes per set to list in the report.
        """
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
                    classes=self.task.account,
                )
            )
        return rows


def doubt_of_order(task: Task, evaluation: Evaluation) -> str | None:
    """Return a warning if another order of the classes would score much better.

    It is only possible if labels were not read by their names.
    """
    account = task.account
    if account is None or account.mapping not in ("number", "order") or not evaluation.confusion:
        return None
    # SciPy takes long to import.
    from scipy.optimize import linear_sum_assignment

    counts_CC = np.array(evaluation.confusion.counts)
    _, best_C = linear_sum_assignment(-counts_CC)
    accuracy = counts_CC.trace() / counts_CC.sum()
    best = counts_CC[np.arange(len(best_C)), best_C].sum() / counts_CC.sum()
    if best - accuracy < MUCH_BETTER:
        return None
    label_map = np.argsort(best_C).tolist()
    return (
        f"the labels of {task.title} may be in another order than the model's: with "
        f"head.label_map='{label_map}' the accuracy would be {best:.3f} instead of {accuracy:.3f}"
    )


def _sha256(examples: Sequence[Example]) -> str:
    """Hash the texts and labels of examples, whatever their order."""
    digests = (
        hashlib.sha256(repr((e.texts, e.label)).encode("utf-8", "surrogatepass")).digest()
        for e in examples
    )
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _worst_examples(
    task: Task, pairs: Sequence[tuple[Example, Prediction]], language: str
) -> list[Mistake]:
    """List all wrong predictions, with the largest error first."""
    wrong: list[Mistake] = []
    for example, prediction in pairs:
        error, label, shown = prediction.error, shown_label(task, example), prediction.shown
        if task.kind == "span" and label is not None:
            error = 1.0 - score_answer(shown, label, language)[1]
        elif task.kind == "text" and label is not None:
            # Only needed for this kind of task.
            from kdcli.metrics.generated_texts import rouge

            error = 1.0 - rouge(shown, label)[2]
        # The loss of a correct prediction is above 0 too.
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
                error=error,
            )
        )
    return sorted(wrong, key=lambda mistake: -mistake.error)


def as_label(task: Task, example: Example, prediction: Prediction) -> Example:
    """Return a copy of an example with a model's prediction as its label."""
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


def trivial_predictions(
    task: Task, train: Sequence[Example], examples: Sequence[Example]
) -> list[Prediction]:
    """Give every example the same answer, which the labels of `train` alone choose.

    It is the most frequent class, the most frequent tag for each word, the mean number, or no span.
    For `multi`, it is the label or set of labels with the best first metric on these rows.
    Of equally good answers it is the first one, and the next one is named. The list is empty for
    tasks that generate text.
    """
    if task.kind == "text":
        return []
    if task.kind == "span":
        nothing = {"text": "", "no_answer": 1.0}
        return [Prediction({"id": example.id, **nothing}, "nothing", []) for example in examples]
    if task.kind == "score":
        mean = float(np.mean([example.label for example in train]))
        return [Prediction(mean, f"{mean:.3g}", [])] * len(examples)
    best, *ties = _best_labels(task, train) if task.kind == "multi" else _most_frequent(task, train)
    answers = [_answered(task, example, best) for example in examples]
    shown = _shown_answer(task, best)
    if ties:
        other = _shown_answer(task, ties[0])
        more = f" and {len(ties) - 1:,} more" if len(ties) > 1 else ""
        equal = "good" if task.kind == "multi" else "frequent"
        shown = f"{shown} (as {equal} as {other}{more})"
    return [Prediction(reference(task, answer), shown, []) for answer in answers]


def _answered(task: Task, example: Example, answer: Any) -> Example:
    words: Any = example.label
    if task.kind == "tokens":
        answer = [i if i == IGNORED else answer for i in words]
    return replace(example, label=answer)


def _shown_answer(task: Task, answer: Any) -> str:
    if task.kind == "multi":
        return class_names(task.labels[i] for i in answer) or "no label"
    name = task.labels[answer]
    return f"{name} for each word" if task.kind == "tokens" else name


def _most_frequent(task: Task, train: Sequence[Example]) -> list[Any]:
    """Return the most frequent labels, which are equally frequent."""
    labels: list[Any] = [example.label for example in train]
    if task.kind == "tokens":
        labels = [i for i in itertools.chain.from_iterable(labels) if i != IGNORED]
    counts = Counter(labels)
    most = max(counts.values())
    return [label for label, count in counts.items() if count == most]


def _best_labels(task: Task, train: Sequence[Example]) -> list[Any]:
    """Return the labels or sets of labels that score best as the answer to every training row.

    Only frequent ones are tried, on a sample of the rows.
    """
    rows = choose_subset(train, MAX_TRIVIAL_ROWS)
    labels: list[Any] = [row.label for row in rows]
    sets = Counter(labels).most_common(MAX_TRIVIAL_ANSWERS)
    single = Counter(itertools.chain(*labels)).most_common(MAX_TRIVIAL_ANSWERS)
    answers = dict.fromkeys([*(each for each, _ in sets), *((each,) for each, _ in single)])
    judged = replace(task, metrics=task.metrics[:1])
    truth = [reference(task, row) for row in rows]

    def score(answer: Any) -> float:
        predicted = reference(task, replace(rows[0], label=answer))
        values = scorer(judged, [predicted] * len(rows), truth)(np.arange(len(rows)))
        return values[task.metrics[0]]

    scores = {answer: score(answer) for answer in answers}
    most = max(scores.values())
    return [answer for answer, value in scores.items() if value == most]


def summed_up(by_set: Mapping[str, Mapping[str, float]], choose_on: str | None) -> dict[str, float]:
    """Combine the metrics of all sets.

    Args:
        by_set: set -> metric -> value.
        choose_on: The set whose metrics to return; None for the means over all sets.

    Returns:
        Metric -> value. With several sets, it also has the metrics of every set as `SET/METRIC`.
    """
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
    """Return an example's label in the format of the task's metrics; None if it is withheld.

    Words that metrics ignore have no label in it.
    """
    label: Any = example.label
    if label is None or task.kind in ("class", "score", "text"):
        return label
    if task.kind == "multi":
        return [int(i in label) for i in range(len(task.labels))]
    if task.kind == "tokens":
        return [task.labels[i] for i in label if i != IGNORED]
    return {"id": example.id, "answers": [answer.text for answer in label]}


def shown_label(task: Task, example: Example) -> Any:
    """Return an example's label in the format of reports and prediction files; None if withheld."""
    label: Any = example.label
    if label is None or task.kind in ("score", "text"):
        return label
    if task.kind == "span":
        return [answer.text for answer in label]
    if task.kind == "class":
        return task.labels[label]
    return [None if i == IGNORED else task.labels[i] for i in label]


def readable(task: Task, example: Example, value: Any, other: Any) -> str:
    """Format a label or prediction as text.

    For `tokens`, only the words in which `value` and `other` differ are included.
    """
    if task.kind == "tokens":
        return ", ".join(
            f"{word} {tag}"
            for word, tag, o in zip(example.texts, value, other, strict=True)
            if tag != o and None not in (tag, o)
        )
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value))) or "(none)"
    return f"{value:.3g}" if isinstance(value, float) else str(value) or "(none)"
