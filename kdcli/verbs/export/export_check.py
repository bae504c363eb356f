"""Compare an exported file with torch: its outputs on texts, and its scores."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.deploy.export import GRAPH_OUTPUTS, ModelFile, without_padding
from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.deploy.runners import Runner, file_runner
from kdcli.engine.progress import Progress
from kdcli.metrics.finite import check_finite
from kdcli.metrics.resolution import points_per_row
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.report.schema import Comparison
from kdcli.run.context import cpu_session
from kdcli.types import Array, Batch, Kind, task_title
from kdcli.verbs.export.facts import FileComparison, FileScores
from kdcli.verbs.export.texts import CheckTexts, TextRow, TrainingRows, chosen_rows
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.workload import Workload

ROWS, MAX_TEXT_TOKENS = 8, 128
"""Number of texts in a batch, and maximum number of tokens in a text."""
CALIBRATION_TOKENS = 4096
"""Maximum number of tokens on which integers are chosen."""
SAME = 0.99
"""Minimum mean cosine to torch's vectors."""


@dataclass(frozen=True)
class ExportCheck:
    """Compares a model's file with torch on texts, and on the rows of a workload if there is one.

    Attributes:
        model: The model in torch.
        kind: The kind of its head; None for an encoder without a head.
        texts: The texts on which the outputs are compared, and those for calibration.
        workload: The rows on which both are scored; None for no scores.
    """

    model: Model
    kind: Kind | None
    texts: CheckTexts
    workload: Workload | None

    @functools.cached_property
    def vectors_of_torch(self) -> Array:
        """The embedding model's vectors of the texts."""
        assert isinstance(self.model, Embedder)
        return self.model.vectors(self.texts.compared, "", cpu_session())

    @functools.cached_property
    def scores_of_torch(self) -> ModelScores:
        """The model's scores in torch."""
        assert self.workload is not None
        Progress.log(f"{task_title(self.workload.name)}: scoring the model in torch")
        return self.workload.score(self.model)

    def compare(self, file: ModelFile) -> FileComparison:
        """Compare a file with torch."""
        agreement = self._agreement(file)
        workload = self.workload
        if workload is None:
            return FileComparison(agreement)
        runner = file_runner(file.path, threads=0)
        of_file = workload.score(workload.run_by(self.model, runner, file.outputs))
        scores = {"torch": self.scores_of_torch, "file": of_file}
        result = workload.compare(scores, {"file": "torch"})
        rows = zip(self.scores_of_torch.evaluations, of_file.evaluations, strict=True)
        both = [FileScores(a.task, a.set, a.split, a.n, a.metrics, b.metrics) for a, b in rows]
        metric = next(iter(self.scores_of_torch.evaluations[0].metrics))
        points = min(
            points_per_row([each.scorers[name] for each in scores.values()], metric, count)
            for name, count in of_file.counts.items()
        )
        drop = worst_drop(result.comparisons, metric)
        return FileComparison(agreement, both, result.comparisons, drop, points)

    def _agreement(self, file: ModelFile) -> dict[str, float]:
        """Compare the predictions or vectors of the texts."""
        runner = file_runner(file.path, threads=0)
        if not isinstance(self.model, Embedder):
            network, tokenizer = self.model.model, self.model.tokenizer
            return compare_outputs(network, tokenizer, runner, self.kind, self.texts.compared)
        in_file = replace(self.model, runner=runner, outputs=file.outputs)
        in_torch_NE = self.vectors_of_torch
        in_file_NE = in_file.vectors(self.texts.compared, "", cpu_session())
        # The vector of a text without any token that a static model knows is zero.
        equal_N = (in_torch_NE == in_file_NE).all(axis=1)
        values = np.where(equal_N, 1, cosines(in_torch_NE, in_file_NE))
        least = float(values.min())
        return {"texts": len(values), "cosine": float(values.mean()), "least": least}

    def too_far(self, comparison: FileComparison) -> str | None:
        """Return why a file may not be used, whatever it scores; None if it may."""
        if not isinstance(self.model, Embedder):
            return None
        # Not `<`: a NaN must fail too.
        cosine = comparison.agreement["cosine"]
        if cosine >= SAME:
            return None
        return f"the mean cosine of its vectors to torch's is {cosine:.3f}"

    def calibration(self) -> list[Batch]:
        """Return rows on which integers are chosen, in padded batches."""
        batches: list[Batch] = []
        tokens = 0
        for batch in self._padded(chosen_rows(self.texts)):
            tokens += int(batch["attention_mask"].sum())
            if tokens > CALIBRATION_TOKENS and batches:
                break
            batches.append(batch)
        return batches

    def training_rows(self, count: int) -> TrainingRows:
        """Return at most this many rows on which integers are trained."""
        return TrainingRows(chosen_rows(self.texts, count), self._short_batch)

    def _short_batch(self, rows: Sequence[TextRow]) -> Batch:
        return next(self._padded(rows, sum(map(len, rows)), MAX_TEXT_TOKENS))

    def batches(self) -> list[Batch]:
        """Return the rows for calibration and the texts that are compared, in padded batches."""
        compared = [(text,) for text in self.texts.compared]
        return [*self.calibration(), *self._padded(compared)]

    def _padded(
        self, rows: Sequence[TextRow], size: int | None = None, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        if self.kind == "span" and all(len(row) == 1 for row in rows):
            rows = _with_contexts([text for (text,) in rows])
        # Few rows still are several batches.
        size = size or min(ROWS, max(1, len(rows) // ROWS))
        if not isinstance(self.model, Embedder):
            yield from tokenized_rows(self.model.model, self.model.tokenizer, rows, size)
            return
        roles = [""]
        if self.model.format.prompt_counts:
            # Every prompt that the model puts before a text takes part.
            by_prompt = {self.model.prompt(each): each for each in ("query", "document", "")}
            roles = list(by_prompt.values())
        texts = [text for row in rows for text in row]
        roles_of_texts = [roles[n % len(roles)] for n in range(len(texts))]
        tokens = self.model.tokenize(texts, roles_of_texts, max_tokens)
        for begin in range(0, len(texts), size):
            yield tokens.batch(np.arange(begin, min(begin + size, len(texts))))


def worst_drop(comparisons: Sequence[Comparison], metric: str) -> float:
    """Return the points (hundredths) that a file loses on its worst set, or NaN if a set has NaN.

    NaN is no score, so no bound allows it.
    """
    differences = [row.difference for row in comparisons if row.metric == metric]
    return 0.0 - 100 * float(np.min(differences))


def compare_outputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    runner: Runner,
    kind: Kind | None,
    texts: Sequence[str],
) -> dict[str, float]:
    """Compare a runner with torch in float32 on texts.

    Returns `texts`, the number of texts, and values that depend on the kind of the head:

    * None, an encoder: `cosine` and `least`, the mean and the smallest cosine between the mean
      vectors of the last hidden states over real tokens.
    * `score`: `mean` and `most`, the mean and the largest absolute difference.
    * `tokens`: `same`, the share of real tokens with equal predictions.
    * other kinds: `same`, the share of texts with equal predictions.

    Raises:
        UsageError: An output of the model or of the runner is NaN or infinite.
    """
    differences: list[Array] = []
    rows = _with_contexts(texts) if kind == "span" else [(text,) for text in texts]
    for batch in tokenized_rows(model, tokenizer, rows, ROWS):
        with torch.no_grad():
            outputs = model(**batch)
        names = [name for name in GRAPH_OUTPUTS if name in outputs]
        sides = {
            "torch": [outputs[name].float().numpy() for name in names],
            "the file": runner.output(runner.call(runner.prepare(batch))),
        }
        for name, side in sides.items():
            # A most probable class, for example, can be the same although it is that of NaN.
            check_finite(without_padding(names, side, batch), f"outputs of {name} for some texts")
        mask_BL = batch["attention_mask"].numpy().astype(bool)
        predicted = [_predicted(side, kind, mask_BL) for side in sides.values()]
        differences.append(
            _cosine(*predicted) if kind is None else np.abs(predicted[0] - predicted[1])
        )
    values = np.concatenate(differences)
    if kind is None:
        return {"texts": len(texts), "cosine": float(values.mean()), "least": float(values.min())}
    if kind == "score":
        return {"texts": len(texts), "mean": float(values.mean()), "most": float(values.max())}
    same = values == 0
    return {"texts": len(texts), "same": float((same if same.ndim == 1 else same.all(1)).mean())}


def _with_contexts(texts: Sequence[str]) -> list[TextRow]:
    """Return each text as a question, with the next text as its context."""
    return list(zip(texts, [*texts[1:], *texts[:1]], strict=True))


def tokenized_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TextRow],
    size: int,
) -> Iterator[Batch]:
    """Yield texts, or pairs of texts, as batches of a number of rows."""
    length = min(MAX_TEXT_TOKENS, positions_of(model.config) or MAX_TEXT_TOKENS)
    for begin in range(0, len(rows), size):
        columns = map(list, zip(*rows[begin : begin + size], strict=True))
        encoded = tokenizer(
            *columns, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        names = ("input_ids", "attention_mask", "token_type_ids")
        yield {name: encoded[name] for name in names if name in encoded}


def agreement_text(values: dict[str, float], kind: str | None) -> str:
    """Describe the result of `compare_outputs`. `kind` is the head's, `embedding` or None."""
    texts = f"on {values['texts']:.0f} texts"
    if kind == EMBEDDING_KIND:
        return (
            f"cosine of the vectors {values['cosine']:.4f} {texts}, the least {values['least']:.4f}"
        )
    if kind is None:
        cosine, least = values["cosine"], values["least"]
        return f"cosine of the mean vectors {cosine:.4f} {texts}, the least {least:.4f}"
    if kind == "score":
        return f"scores differ by {values['mean']:.3g} {texts}, at most by {values['most']:.3g}"
    predictions = "labels of tokens" if kind == "tokens" else "predictions"
    return f"{values['same']:.1%} of the {predictions} are the same {texts}"


def _predicted(outputs: Sequence[Array], kind: Kind | None, mask_BL: Array) -> Array:
    """Return predictions as numbers.

    A row is a text, for `tokens` a token. An encoder gives its mean vectors [B, D].
    """
    first = outputs[0]
    if kind is None:
        return np.asarray((first * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdims=True))
    if kind == "span":
        ends = [np.where(mask_BL, side, -np.inf).argmax(-1) for side in outputs]
        return np.stack(ends, -1)
    if kind == "tokens":
        return np.asarray(first[mask_BL].argmax(-1))
    if kind == "class":
        return np.asarray(first.argmax(-1))
    return (first > 0).astype(int) if kind == "multi" else first[:, 0]


def _cosine(one_BD: Array, other_BD: Array) -> Array:
    """Return the cosine of each pair of rows [B]."""
    lengths_B = np.linalg.norm(one_BD, axis=-1) * np.linalg.norm(other_BD, axis=-1)
    return np.asarray((one_BD * other_BD).sum(-1) / lengths_B)
