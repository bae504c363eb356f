"""The vocabulary every part shares.

Shape legend, used as suffix of tensor names throughout the package:
B sequences in a batch, L tokens of a sequence, A attention heads, K width of one head, D hidden width,
F feed-forward width, V vocabulary, P labelled tokens of a batch, N layers. `q_BALK` is a tensor of shape [B, A, L, K].

Layers are numbered as in TinyBERT: 0 is the embedding output, 1 … N are the encoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Keyword arguments of an encoder's forward: `input_ids` [B, L] int64, `attention_mask` [B, L] int64 (1 = real token)
or, for isolated documents in one block, [B, 1, L, L] bool (True = may attend); optional `token_type_ids` and
`position_ids` [B, L] int64. A batch of a labelled task also holds `labels`, see `Kind`."""

Kind = Literal["class", "multi", "score", "tokens", "span"]
"""What a task predicts, and the `labels` of its batches:

* `class`: one of its labels for a text or a pair; [B] int64.
* `multi`: any of its labels; [B, C] float32 of 0 and 1.
* `score`: a real number; [B] float32.
* `tokens`: a label for each word; [B, L] int64, IGNORED at all but the first piece of a word.
* `span`: an answer within a context; [B, 2] int64, first and last token; both 0 where the window holds none.
"""

IGNORED = -100
"""Label of a token that is not judged."""


@dataclass(frozen=True)
class Task:
    """A labelled task: what it reads, what it predicts and how it is judged.

    Attributes:
        texts: columns of the texts: one or two; of `tokens` that of the words; of `span` question and context.
        label: column of the label.
        labels: names of the classes in the order of their numbers; empty for `score` and `span`.
        metrics: what is reported; the first is the one that a single number means.
        hub: data set and configuration on the hub; `{set}` in it stands for the name of a set.
        sets: names of what is judged apart, such as the two parts of MNLI or languages; empty when there is one.
        split: what the hub calls the validation split; `{set}` as in `hub`.
        hub_train: where the training split is, if not in `hub`.
        impossible: of `span`: a context need not hold an answer (SQuAD 2.0).
        glue: set → name of the file that the GLUE server takes; empty for other tasks.
        glue_words: the server wants the names of the labels, not their numbers.
        max_length: tokens of a row that the benchmark's protocol reads.
        words: label words (static model pruning): one for each output of the head, in the order of `labels`; of
            `score` one, of `span` those of start and end; empty where there are none to suggest.
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
    """A gold answer of a `span` task and the character at which it begins in its context."""

    text: str
    start: int


@dataclass(frozen=True)
class Example:
    """One example of a labelled task.

    Attributes:
        where: `file:line`, for messages.
        id: as the data set names it, else its number in its file.
        texts: one or two texts; of `tokens` the words; of `span` question and context.
        label: `class`: number of the class; `multi`: their numbers; `score`: the number; `tokens`: a number a word;
            `span`: gold answers, none when it has no answer. None where the label is withheld.
    """

    where: str
    id: str
    texts: tuple[str, ...]
    label: int | float | tuple[int, ...] | tuple[Answer, ...] | None


@dataclass(frozen=True)
class ModelShape:
    """Size of an encoder: layers, hidden width, feed-forward width, attention heads."""

    layers: int
    hidden: int
    ffn: int
    heads: int

    def __str__(self) -> str:
        """The shape in the grammar of `--to`, FFN and heads always written out: `6x768:3072@12`."""
        return f"{self.layers}x{self.hidden}:{self.ffn}@{self.heads}"


@dataclass(frozen=True)
class Needs:
    """Which signals of which layers a loss wants; `hidden` counts the embedding output as layer 0.

    `logits` are those of every row or token, `masked_logits` of a masked language model's head those of the tokens that
    have a label, and of no others.
    """

    q: frozenset[int] = frozenset()
    k: frozenset[int] = frozenset()
    v: frozenset[int] = frozenset()
    hidden: frozenset[int] = frozenset()
    logits: bool = False
    masked_logits: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.q | other.q,
            self.k | other.k,
            self.v | other.v,
            self.hidden | other.hidden,
            self.logits or other.logits,
            self.masked_logits or other.masked_logits,
        )


@dataclass
class Signals:
    """What `capture` took out of one forward pass.

    Attributes:
        mask: the batch's attention mask, [B, L] or [B, 1, L, L]; None when every token of every row is real.
        q, k, v: layer → [B, A, L, K], after any rotary embedding; grouped key/value heads are repeated to A.
        hidden: layer → [B, L, D]; 0 is the embedding output.
        logits: the model's logits, when asked for; of a question answering head [B, L, 2], start and end; of a masked
            language model those of the P tokens that have a label, [P, V], row after row.
        labels: the batch's labels, where it has any; see `Kind`.
    """

    mask: Tensor | None = None
    q: dict[int, Tensor] = field(default_factory=dict)
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """A distillation loss bound to the shapes of one teacher and one student.

    Attributes:
        teacher_needs, student_needs: what `capture` has to take from each.
        projections: learned matrices of the run (never of the saved student); empty for most losses.
        terms: pure function (teacher, student) → named scalars whose sum is the loss.
        notes: what a user should be told of how these two shapes are compared.
    """

    teacher_needs: Needs
    student_needs: Needs
    projections: nn.Module
    terms: Callable[[Signals, Signals], Mapping[str, Tensor]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepLoss:
    """What a command's step hands the engine: a scalar to descend and the named parts it is made of.

    `outputs` [B, …] are what a task is judged by; they are kept where the job has `compute_metrics`.
    """

    total: Tensor
    terms: Mapping[str, Tensor]
    outputs: Tensor | None = None


class Examples(Protocol):
    """A data set of fixed order; `batch` collates the rows of the given indices on the CPU."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray[Any, Any]) -> Batch: ...


class Order(Protocol):
    """Which examples form the global batch of a step (1-based): a pure function of the step."""

    def indices(self, step: int) -> np.ndarray[Any, Any]: ...


def real_tokens(batch: Batch) -> float:
    """Tokens of a batch that are not padding; its mask is [B, L], [B, 1, L, L] or absent when all are real."""
    mask = batch.get("attention_mask")
    if mask is None:
        return float(batch["input_ids"].numel())
    return float((mask if mask.dim() == 2 else mask.any(-1)).sum())


@dataclass(frozen=True)
class Schedule:
    """How to train. `batch_size` is global; `micro_batch_size` None lets the machine decide; `stop_after` cuts the
    run short without changing its schedule (the probe of a dry run)."""

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
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
        """Learning rate of a step (1 … steps): linear warm-up to `lr`, then linear decay that would reach 0 after the
        last step, so that no step is spent at rate 0."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        return self.lr * (self.steps - step + 1) / (self.steps - self.warmup_steps)


@dataclass(frozen=True)
class ParamGroup:
    """How some parameters are trained: `lr` times the plan's rate, decayed or not."""

    lr: float = 1.0
    decayed: bool = True


@dataclass(frozen=True)
class Job:
    """What to train.

    Attributes:
        modules: trained, clipped and checkpointed apart from each other, so that several trained together move as each
            would alone; only parameters that require a gradient are handed to the optimiser.
        step: batch on the device -> loss, a mean over what `batch_weight` counts; also called for the held-out loss,
            with the modules in eval mode and without gradients.
        batch_weight: how much a batch counts in the mean over the global batch: its real tokens, its rows.
        compute_metrics: `outputs` of everything held out, float32, in its order -> metrics.
        best: the metric by which the best weights of all evaluations are kept; None keeps the last weights.
        param_group: name of a parameter (module name first) -> how it is trained; None trains all alike.
        on_step_end: called with the number of finished steps: before the first (or next) step, and after each.
    """

    modules: Mapping[str, nn.Module]
    step: Callable[[Batch], StepLoss]
    examples: Examples
    order: Order
    held_out: Examples | None
    batch_weight: Callable[[Batch], float]
    compute_metrics: Callable[[Sequence[np.ndarray[Any, Any]]], Mapping[str, float]] | None = None
    best: str | None = None
    param_group: Callable[[str], ParamGroup] | None = None
    on_step_end: Callable[[int], None] | None = None


@dataclass
class Outcome:
    """What became of a run; `seconds` counts earlier legs of a resumed run too, `best_step` is the one whose weights
    were kept where the best were asked for."""

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
