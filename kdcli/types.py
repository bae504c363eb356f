"""Types that every room shares.

Shape legend, a suffix of tensor names: B sequences, L tokens, A attention heads, K head width, D
hidden width, F feed-forward width, V vocabulary, P labelled tokens of a batch, C classes, N layers;
`q_BALK` has shape [B, A, L, K]. Layers are numbered as in TinyBERT: 0 is the embedding output, 1 to
N are the encoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Arguments of an encoder: `input_ids` [B, L] int64; `attention_mask` [B, L] int64 (1 = real token)
or, for isolated documents in one block, [B, 1, L, L] bool (True = attend); optional
`token_type_ids`, `position_ids` [B, L] int64; for a labelled task `labels`, see `Kind`; of masked
text also `labelled`, see `labelled_places`."""

RowHashes = np.ndarray[Any, np.dtype[np.uint64]]
"""Hashes of the texts of labelled rows, see `kdcli.data.labelled.rows`."""

Kind = Literal["class", "multi", "score", "tokens", "span", "text"]
"""The prediction of a task, and the `labels` of its batches:

* `class`: one label a text or pair; [B] int64.
* `multi`: any number of labels; [B, C] float32 of 0 and 1.
* `score`: a real number; [B] float32.
* `tokens`: one label a word; [B, L] int64, IGNORED except at the first piece of a word.
* `span`: an answer in a context; [B, 2] int64, first and last token; both 0 if the window holds
  none.
* `text`: a text, the target of a source; [B, L] int64, the ids of the target, IGNORED at the
  source. The batch also has `sources` [B] int64: how many tokens of each row are the source.
"""

IGNORED = -100
"""Label of a token that counts nowhere."""

Count = Literal["rows", "tokens", "labels"]
"""The unit that a mean is taken over: rows; tokens that are no padding; labels that are not
IGNORED."""
COUNTS: tuple[Count, ...] = get_args(Count)


@dataclass(frozen=True)
class Card:
    """The size of a model in numbers, as reports show it.

    Attributes:
        id: the hub id, directory or shape that the model was given as.
        revision: commit of the hub that it was loaded from.
        params_total: with the head.
        params_embedding: parameters of the embedding layer.
        params_transformer: all the others.
        params_nonzero: parameters that are not zero.
        multiply_adds: of one sequence of 128 tokens, without the head.
        bytes: size of the weights on disk; in float32 if the model was never saved.
        held_in: number format of the weights on disk.
        sha256: hash of the weights on disk; None if the model was never saved.
        paper_params_embedding: the embedding's parameters as papers count them.
        paper_params_transformer: the layers' parameters as papers count them.
    """

    id: str
    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    params_total: int
    params_embedding: int
    params_transformer: int
    params_nonzero: int
    multiply_adds: int
    bytes: int
    sha256: str | None
    revision: str | None = None
    held_in: str = "fp32"
    paper_params_embedding: int | None = None
    paper_params_transformer: int | None = None


@dataclass(frozen=True)
class Task:
    """A labelled task: columns, labels, metrics, where its data are.

    Attributes:
        texts: columns: one or two texts, of `text` those of the source; the words of `tokens`;
            question and context of `span`.
        label: column of the label; of `text` the target.
        labels: class names in order of their numbers; empty for `score`, `span` and `text`.
        metrics: names; the first is the one that a single number means.
        hub: data set and configuration on the hub; `{set}` stands for a set's name.
        sets: sets that are evaluated apart, such as MNLI's two or languages; empty for one set.
        split: the hub's name of the validation split; may hold `{set}`.
        hub_train: data set of the training split, if another.
        impossible: a `span` context may hold no answer (SQuAD 2.0).
        glue: set -> file name for the GLUE server.
        glue_words: the GLUE server takes label names, not numbers.
        max_length: tokens a row in the benchmark's protocol.
        words: label words (SMP), one an output of the head: in the order of `labels`, one for
            `score`, start and end for `span`.
    """

    name: str
    kind: Kind
    texts: tuple[str, ...]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    label: str = "label"
    hub: tuple[str, str | None] | None = None
    sets: tuple[str, ...] = ()
    split: str = "validation"
    hub_train: tuple[str, str | None] | None = None
    impossible: bool = False
    glue: Mapping[str, str] = field(default_factory=dict)
    glue_words: bool = False
    max_length: int = 128
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A gold answer of a `span` task and its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True)
class Example:
    """One example of a labelled task.

    Attributes:
        where: `file:line`, for messages.
        id: the data set's, else its number in the file.
        texts: one or two texts; the words of `tokens`; question and context of `span`.
        label: class number; numbers (`multi`); a real number (`score`); a number a word (`tokens`);
            gold answers (`span`, empty if unanswerable); the target (`text`). None if withheld.
    """

    where: str
    id: str
    texts: tuple[str, ...]
    label: int | float | str | tuple[int, ...] | tuple[Answer, ...] | None


@dataclass(frozen=True)
class ModelShape:
    """Size of an encoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int

    def __str__(self) -> str:
        """As in `--to`, with FFN and heads: `6x768:3072@12`."""
        return f"{self.layers}x{self.hidden}:{self.ffn}@{self.heads}"


@dataclass(frozen=True)
class Needs:
    """The signals a loss reads: layers of q, k, v and hidden (0 = embedding output), logits of
    every row or token, a masked language model's logits of labelled tokens only (`masked_logits`),
    or an embedding model's vector of each row (`pooled`)."""

    q: frozenset[int] = frozenset()
    k: frozenset[int] = frozenset()
    v: frozenset[int] = frozenset()
    hidden: frozenset[int] = frozenset()
    logits: bool = False
    masked_logits: bool = False
    pooled: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.q | other.q,
            self.k | other.k,
            self.v | other.v,
            self.hidden | other.hidden,
            self.logits or other.logits,
            self.masked_logits or other.masked_logits,
            self.pooled or other.pooled,
        )


@dataclass
class Signals:
    """Signals of one forward pass.

    Attributes:
        mask: attention mask, [B, L] or [B, 1, L, L]; None if every token is real.
        q, k, v: layer -> [B, A, L, K], after rotary embedding; grouped key/value heads repeated to
        A.
        hidden: layer -> [B, L, D]; 0 is the embedding output, the last is the model's
        `last_hidden_state`.
        logits: [B, C]; [B, L, C] of tokens; [B, L, 2] of spans (start, end); [P, V] of labelled
        tokens, row by row.
        labels: the batch's labels, if any; see `Kind`.
        labelled: of logits of labelled tokens, their places, see `labelled_places`.
        pooled: vectors of an embedding model, [B, D]; of a teacher also those of other texts:
            `anchors` [R, D], of each row's `positive` [B, D] and `negatives` [B, M, D], all zero
            where a row has none.
    """

    mask: Tensor | None = None
    q: dict[int, Tensor] = field(default_factory=dict)
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    labels: Tensor | None = None
    labelled: Tensor | None = None
    pooled: Tensor | None = None
    anchors: Tensor | None = None
    positive: Tensor | None = None
    negatives: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """A distillation loss for one teacher's and one student's shape.

    Attributes:
        teacher_needs, student_needs: signals to capture.
        projections: learned matrices of the run, never part of the saved student.
        terms: pure function (teacher, student) -> named scalars whose sum is the loss.
        over: what each term is a mean over.
        notes: facts for the user about how the two shapes are compared.
    """

    teacher_needs: Needs
    student_needs: Needs
    projections: nn.Module
    terms: Callable[[Signals, Signals], Mapping[str, Tensor]]
    over: Mapping[str, Count]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Term:
    """A scalar of a loss that is a mean over the rows, tokens or labels of a batch. A term that is
    the same for every batch may take any of them. `weight` is that in the loss; the log shows the
    term without it."""

    value: Tensor
    over: Count
    weight: float = 1.0


@dataclass(frozen=True)
class StepLoss:
    """A step's result: the terms whose weighted sum is minimised, a single one named `loss`; and
    `outputs` [B, ...] for `Job.compute_metrics`."""

    terms: Mapping[str, Term]
    outputs: Tensor | None = None

    def totals(self) -> dict[Count, Tensor]:
        """The weighted sum of the terms over each count. The mean over several batches is that of
        each total, weighted by its own count."""
        groups: dict[Count, list[Tensor]] = {}
        for term in self.terms.values():
            if term.weight:
                groups.setdefault(term.over, []).append(term.weight * term.value.float())
        return {over: torch.stack(values).sum() for over, values in groups.items()}

    def parts(self) -> list[tuple[str, Count, Tensor]]:
        """Name, count and value of everything that is logged; `loss` has a part for each count."""
        parts = [("loss", over, total) for over, total in self.totals().items()]
        return parts + [
            (name, term.over, term.value) for name, term in self.terms.items() if name != "loss"
        ]

    @property
    def total(self) -> Tensor:
        """The loss of a single batch."""
        return torch.stack(list(self.totals().values())).sum()


def counts_of(batch: Batch) -> dict[Count, float]:
    """How many rows, tokens and labels a batch has."""
    labels = batch.get("labels")
    of_labels = 0.0 if labels is None else float((labels != IGNORED).sum())
    return {
        "rows": float(len(batch["input_ids"])),
        "tokens": real_tokens(batch),
        "labels": of_labels,
    }


def labelled_places(batch: Batch) -> Tensor:
    """Places of the labels [B, L] that are not IGNORED, row by row, [P] int64 into B·L. A batch of
    masked text brings them from the CPU: on a device, finding them would wait for all that it still
    computes."""
    if "labelled" in batch:
        return batch["labelled"]
    return (batch["labels"] != IGNORED).flatten().nonzero()[:, 0]


class Examples(Protocol):
    """A data set of fixed order; `batch` collates rows on the CPU."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray[Any, Any]) -> Batch: ...


class Order(Protocol):
    """The examples of each global batch: a pure function of the step, counted from 1."""

    def indices(self, step: int) -> np.ndarray[Any, Any]: ...


def real_tokens(batch: Batch) -> float:
    """Number of tokens that are not padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        return float(batch["input_ids"].numel())
    return float((mask if mask.dim() == 2 else mask.any(-1)).sum())


@dataclass(frozen=True)
class Schedule:
    """Steps, rates and intervals of a run.

    `batch_size` is global. If `micro_batch_size` is None, the engine chooses it. `stop_after` ends
    the training after this many steps without changing the learning rates: in dry runs, and in runs
    that are continued later with a higher value.
    """

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    lr_schedule: str = "linear"
    weight_decay: float = 0.01
    beta2: float = 0.999
    clip: float = 1.0
    seed: int = 0
    micro_batch_size: int | None = None
    log_every: int = 10
    eval_every: int = 250
    checkpoint_every: int = 500
    stop_after: int | None = None

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (1 to steps): linear warm-up; then `constant`, or a `linear`
        decay to 0 just after the last step."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * (self.steps - step + 1) / (self.steps - self.warmup_steps)


@dataclass(frozen=True)
class ParamGroup:
    """`lr` multiplies the schedule's rate; `decayed` allows weight decay."""

    lr: float = 1.0
    decayed: bool = True


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        modules: each clipped and checkpointed on its own, so modules trained together move as they
            would alone; only parameters that require a gradient are trained.
        step: batch on the device -> loss; also called for the held-out loss, with the modules in
            eval mode and without gradients.
        compute_metrics: `outputs` of everything held out, float32, in its order -> metrics.
        best: the metric that selects the weights to keep; None keeps the last.
        best_from: the first step whose weights may be selected.
        param_group: name of a parameter (module name first) -> how it is trained; None gives all
        the same settings.
        shared: micro-batch on the device -> tensors [B, ...] that the losses of the whole batch
            read, without gradients. `step` finds those of all rows of all processes, [rows, ...],
            under the same names in its batch, and the places of its own rows among them, [B], as
            `own_rows`; none of them in evaluations.
        on_step_end: called with the number of finished steps: before the first (or next) step, and
        after each.
        held_out_size: sequences of an example held out, at most, over those of one trained on; a
            held-out pass takes so many fewer examples at once.
    """

    modules: Mapping[str, nn.Module]
    step: Callable[[Batch], StepLoss]
    examples: Examples
    order: Order
    held_out: Examples | None
    compute_metrics: Callable[[Sequence[np.ndarray[Any, Any]]], Mapping[str, float]] | None = None
    best: str | None = None
    best_from: int = 1
    param_group: Callable[[str], ParamGroup] | None = None
    shared: Callable[[Batch], Mapping[str, Tensor]] | None = None
    on_step_end: Callable[[int], None] | None = None
    held_out_size: float = 1.0


@dataclass
class Outcome:
    """Totals of a run, including the time before a resume.

    `best_step` is the step of the kept weights. `finished` is False if `Schedule.stop_after` ended
    the training before its last step.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    peak_memory_bytes: int = 0
    resumed_from_step: int | None = None
    best_step: int | None = None
    step_seconds: list[float] = field(default_factory=list)
    evaluation_seconds: float = 0.0
    finished: bool = True
