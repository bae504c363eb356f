"""How often an exported file predicts what torch predicts, on real text: what its error means for a user."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.labelled.task_data import Labelled
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.export import OUTPUTS, ModelFile
from kdcli.deploy.exported import EMBEDDING
from kdcli.deploy.runners import Runner, file_runner, runner
from kdcli.deploy.sessions import Array
from kdcli.engine.progress import Progress
from kdcli.models.heads import check_head, tokenizer_for, tuned_length
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.training_rows import training_rows
from kdcli.report.schema import Comparison
from kdcli.types import Batch, Kind
from kdcli.verbs.export.gate import Found
from kdcli.workloads.predictions import Evaluator, Prediction, compared
from kdcli.workloads.runtimes import runner_predictions
from kdcli.workloads.settings import LabelledSettings
from kdcli.workloads.task import evaluator_of, open_judged

ROWS, TOKENS = 8, 128
"""Texts of a batch, and tokens of a text at most."""
CALIBRATED = 32  # Rows on which the error of each product is measured
RESAMPLES = 1000


@dataclass(frozen=True)
class TaskJudge:
    """A labelled task on which a file is judged: its rows as the model reads them, and torch's predictions."""

    data: Labelled
    evaluator: Evaluator
    by_torch: list[Prediction]
    positions: int | None

    @classmethod
    def open(
        cls,
        task: str,
        settings: LabelledSettings,
        source: str,
        model: PreTrainedModel,
        *,
        trust_remote_code: bool,
    ) -> "TaskJudge":
        """Read a task's rows and predict them in torch. Raises UsageError: unusable data; a head for another task."""
        rows = training_rows(location(source))
        trusted = trust_remote_code
        opened = open_judged(task, settings, source, {source: rows}, trust_remote_code=trusted)
        check_head(source, model.config, opened.task)
        tokenizer = tokenizer_for(
            source, of_words=opened.task.kind == "tokens", trust_remote_code=trusted
        )
        length = tuned_length(model.config, tokenizer, opened.task)
        evaluator, _ = evaluator_of(
            opened, settings, Model(model, tokenizer, source, "", length, rows)
        )
        positions = positions_of(model.config)
        Progress.log(f"{task}: {len(evaluator.features.examples):,} examples in torch")
        with tempfile.TemporaryDirectory() as aside:
            how: dict[str, Any] = {
                "device": model.device,
                "threads": latency_threads(),
                "folder": Path(aside),
            }
            by_torch = runner_predictions(
                runner(model, "torch", "fp32", **how), evaluator, positions
            )
        return cls(opened, evaluator, by_torch, positions)

    def scores(self, made: Runner) -> tuple[list[dict[str, Any]], list[Comparison]]:
        """A row of scores for each set, of torch and of the file, and the paired comparisons."""
        both = {
            "torch": self.by_torch,
            "file": runner_predictions(made, self.evaluator, self.positions),
        }
        found = {
            name: self.evaluator.evaluations(name, self.data.split, rows, worst=0)
            for name, rows in both.items()
        }
        scores = [
            a.model_dump(include={"task", "set", "split", "n"})
            | {"torch": a.metrics, "file": b.metrics}
            for a, b in zip(found["torch"], found["file"], strict=True)
        ]
        torch_side, file_side = (
            (name, self.evaluator.scorers(rows)) for name, rows in both.items()
        )
        return scores, compared(self.evaluator, file_side, torch_side, RESAMPLES)

    def calibration(self) -> list[Batch]:
        """Rows of the task, evenly spaced."""
        rows = self.evaluator.features.rows
        chosen = np.unique(np.linspace(0, len(rows) - 1, CALIBRATED).astype(int))
        return [rows.batch(chosen[begin : begin + ROWS]) for begin in range(0, len(chosen), ROWS)]


@dataclass(frozen=True)
class HeadJudge:
    """Judges the file of an encoder, or of one with a head."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: Kind | None
    texts: Sequence[str]
    task: TaskJudge | None

    def judge(self, file: ModelFile) -> Found:
        made = file_runner(file.path, threads=0)
        alike = agreement(self.model, self.tokenizer, made, self.kind, self.texts)
        if self.task is None:
            return Found(alike)
        scores, comparisons = self.task.scores(made)
        return Found(
            alike, scores, comparisons, dropped(comparisons, self.task.data.task.metrics[0])
        )

    def too_far(self, found: Found) -> str | None:
        return None

    def calibration(self) -> list[Batch]:
        assert self.task is not None, "without a task nothing is bounded"
        return self.task.calibration()


def dropped(comparisons: Sequence[Comparison], metric: str) -> float:
    """Points (hundredths) that the file lost of a metric, in its worst set."""
    return max(-100 * row.difference for row in comparisons if row.metric == metric)


def agreement(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made: Runner,
    kind: Kind | None,
    texts: Sequence[str],
) -> dict[str, float]:
    """Compare a runner with torch in float32 on texts.

    `same`: the share of equal predictions: of texts; for `tokens` of real tokens. `mean` and `most`: of `score`, the
    absolute differences. `cosine` and `least`: of an encoder (kind None), the mean and least cosine between the two
    means of the last hidden states over real tokens."""
    found: list[Array] = []
    for begin in range(0, len(texts), ROWS):
        # A question is a text, its context the next one.
        pair = [[*texts[1:], texts[0]][begin : begin + ROWS]] if kind == "span" else []
        length = min(TOKENS, positions_of(model.config) or TOKENS)
        how: dict[str, Any] = {
            "padding": True,
            "truncation": True,
            "max_length": length,
            "return_tensors": "pt",
        }
        rows = tokenizer(list(texts[begin : begin + ROWS]), *pair, **how)
        batch = {k: rows[k] for k in ("input_ids", "attention_mask", "token_type_ids") if k in rows}
        with torch.no_grad():
            outputs = model(**batch)
        sides = (
            [outputs[name].float().numpy() for name in OUTPUTS if name in outputs],
            made.output(made.call(made.prepare(batch))),
        )
        mask_BL = batch["attention_mask"].numpy().astype(bool)
        predicted = [_predicted(side, kind, mask_BL) for side in sides]
        found.append(_cosine(*predicted) if kind is None else np.abs(predicted[0] - predicted[1]))
    values = np.concatenate(found)
    if kind is None:
        return {"texts": len(texts), "cosine": float(values.mean()), "least": float(values.min())}
    if kind == "score":
        return {"texts": len(texts), "mean": float(values.mean()), "most": float(values.max())}
    alike = values == 0
    return {"texts": len(texts), "same": float((alike if alike.ndim == 1 else alike.all(1)).mean())}


def said(of: dict[str, float], kind: str | None) -> str:
    """The agreement in words; `kind` of a head, `embedding` or None."""
    on = f"on {of['texts']:.0f} texts"
    if kind == EMBEDDING:
        return f"cosine of the vectors {of['cosine']:.4f} {on}, the least {of['least']:.4f}"
    if kind is None:
        return f"cosine of the mean vectors {of['cosine']:.4f} {on}, the least {of['least']:.4f}"
    if kind == "score":
        return f"scores differ by {of['mean']:.3g} {on}, at most by {of['most']:.3g}"
    return f"{of['same']:.1%} of the {'labels of tokens' if kind == 'tokens' else 'predictions'} are the same {on}"


def _predicted(outputs: Sequence[Array], kind: Kind | None, mask_BL: Array) -> Array:
    """Predictions as numbers: a row a text, of `tokens` a row a token; of an encoder the mean vectors [B, D]."""
    first = outputs[0]
    if kind is None:
        return np.asarray((first * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdims=True))
    if kind == "span":
        ends = [np.where(mask_BL, side, -np.inf).argmax(-1) for side in outputs]
        return np.stack(ends, -1)
    if kind == "tokens":
        return np.asarray(first.argmax(-1)[mask_BL])
    if kind == "class":
        return np.asarray(first.argmax(-1))
    return np.asarray((first > 0).astype(int) if kind == "multi" else first[:, 0])


def _cosine(one_BD: Array, other_BD: Array) -> Array:
    lengths_B = np.linalg.norm(one_BD, axis=-1) * np.linalg.norm(other_BD, axis=-1)
    return np.asarray((one_BD * other_BD).sum(-1) / lengths_B)
