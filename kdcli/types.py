"""Types that all packages share.

The suffix of a tensor's name gives its shape: B sequences, L tokens, A attention heads, K head
width, D hidden width, F feed-forward width, V vocabulary, P labelled tokens of a batch, C classes,
N layers. For example, `q_BALK` has shape [B, A, L, K]. Layers are numbered as in TinyBERT: 0 is the
embedding output, and 1 to N are the encoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

Array = np.ndarray[Any, Any]
"""An array of NumPy, whose name and comments give its shape and its type of numbers."""

Batch = dict[str, "Tensor"]
"""The arguments of an encoder:

* `input_ids`: [B, L] int64.
* `attention_mask`: [B, L] int64 (1 = real token) or, for isolated documents in one block,
  [B, 1, L, L] bool (True = attend).
* `token_type_ids`, `position_ids`: [B, L] int64, optional.
* `labels`: for a labelled task, see `Kind`.
* `labelled`: for masked text, see `labelled_places`.
"""

RowHashes = np.ndarray[Any, np.dtype[np.uint64]]
"""Hashes of labelled rows' texts, see `kdcli.data.labelled.partition`."""

Kind = Literal["class", "multi", "score", "tokens", "span", "text"]
"""The prediction of a task, and the `labels` of its batches:

* `class`: one label per text or pair; [B] int64.
* `multi`: any number of labels; [B, C] float32 of 0 and 1.
* `score`: a real number; [B] float32.
* `tokens`: one label per word; [B, L] int64, IGNORED except at the first piece of a word.
* `span`: an answer in a context; [B, 2] int64, its first and last token. Both are 0 if the window
  does not contain the answer.
* `text`: a target text for a source text; [B, L] int64, the ids of the target, IGNORED at the
  source. The batch also has `sources` [B] int64, the number of source tokens in each row.
"""

IGNORED = -100
"""The label of a token that losses and metrics ignore."""

Count = Literal["rows", "tokens", "labels"]
"""The unit of a mean: rows, tokens that are not padding, or labels that are not IGNORED."""
COUNTS: tuple[Count, ...] = get_args(Count)


@dataclass(frozen=True)
class Card:
    """The size of a model, as reports show it.

    Attributes:
        id: The hub id, directory or shape with which the user named the model.
        revision: The hub commit from which the model was loaded.
        params_total: Number of parameters, with the head.
        params_embedding: Number of parameters in the embedding layer.
        params_transformer: Number of all other parameters.
        params_nonzero: Number of parameters that are not zero.
        multiply_adds: Multiply-adds for one sequence of 128 tokens, without the head.
        bytes: Size of the weights on disk, or in float32 if the model was never saved.
        held_in: Number format of the weights on disk.
        sha256: Hash of the weights on disk; None if the model was never saved.
        paper_params_embedding: The embedding's parameters as papers count them.
        paper_params_transformer: The layers' parameters as papers count them.
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

    @property
    def is_served(self) -> bool:
        """Whether a server computes the model, so that only the width of its vectors is known."""
        return not self.params_total


OWN = "own"
"""The name of the task that kdcli derives from a user's own rows."""


def task_name(name: str) -> str:
    """Name a task in a table: `sst2`, or `your data` for a user's own rows."""
    return "your data" if name == OWN else name


def task_title(name: str) -> str:
    """Name a task in a message: `task sst2`, or `your data` for a user's own rows."""
    return task_name(name) if name == OWN else f"task {name}"


NAMED_BY = {
    "schema": "the schema of the data",
    "head": "the model",
    "values": "the labels in the data",
    "task": "the task",
}
"""The sources of the names of classes, in words."""


@dataclass(frozen=True)
class LabelAccount:
    """The classes of a task, and how the labels of the data were read as classes.

    Attributes:
        names: The classes, in the order of their numbers.
        names_from: The source of the names: the `schema` of the data, the `head` of the model, the
            `values` of the labels, or the `task`.
        mapping: Whether labels were read by `name`, by `number`, or by the `order` of the names if
            those of the model are unknown; `none` if no labels are read.
        numbers: The class of each number, if numbers without names were read by a head with names.
    """

    names: tuple[str, ...]
    names_from: Literal["schema", "head", "values", "task"]
    mapping: Literal["name", "number", "order", "none"]
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A labelled task: its columns, labels and metrics, and the location of its data.

    Attributes:
        texts: Columns of the one or two texts. For `text`, the columns of the source; for `tokens`,
            the words; for `span`, the question and the context.
        label: Column of the label; for `text`, column of the target. Empty if the rows of an own
            task have no labels.
        metrics: Names of the metrics. A single number always means the first one.
        labels: Class names in the order of their numbers; empty for `span` and `text`. A `score`
            has one if the model's output is the logit of one label.
        hub: Data set and configuration on the hub; `{set}` stands for a set's name.
        sets: Sets that are evaluated separately, such as MNLI's two sets or languages; empty for a
            single set.
        split: The hub's name of the validation split; may contain `{set}`.
        hub_train: Data set of the training split, if it is another one.
        impossible: Whether a `span` context may lack an answer (SQuAD 2.0).
        glue: set -> file name for the GLUE server.
        glue_words: Whether the GLUE server takes label names instead of numbers.
        max_length: Tokens per row in the benchmark's protocol.
        words: Label words (SMP), one per output of the head: in the order of `labels`, one for
            `score`, and start and end for `span`.
        rows_of_labels: label -> its first row, in the order of a user's own rows, for messages.
        account: Where the `labels` of a user's own rows come from.
        score_name: The name of a `score`, if the model has one, such as `toxicity`.
        decimal_comma: Whether the numbers of a user's own rows have a decimal comma.
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
    rows_of_labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    account: LabelAccount | None = field(default=None, compare=False)
    score_name: str = field(default="", compare=False)
    decimal_comma: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        """The name of the task in a message."""
        return task_title(self.name)


@dataclass(frozen=True)
class Head:
    """The predictions that a model's head can make.

    Attributes:
        kind: The kind of its predictions.
        labels: Class names in the order of its outputs; empty for `span` and for regression.
        named: Whether the names are the model's own, not `LABEL_0` ...
        score_name: The name of a regression's output; empty without one.
    """

    kind: Kind
    labels: tuple[str, ...] = ()
    named: bool = True
    score_name: str = ""


@dataclass(frozen=True)
class Answer:
    """A gold answer of a `span` task, and the index of its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True)
class Example:
    """One example of a labelled task.

    Attributes:
        where: `file:line`, for messages.
        id: The data set's id, or the number of the example in the file.
        texts: One or two texts; for `tokens`, the words; for `span`, the question and the context.
        label: A class number (`class`); class numbers (`multi`); a real number (`score`); a class
            number per word (`tokens`); gold answers (`span`, empty if unanswerable); the target
            (`text`). None if it is withheld.
    """

    where: str
    id: str
    texts: tuple[str, ...]
    label: int | float | str | tuple[int, ...] | tuple[Answer, ...] | None

    @property
    def file(self) -> str:
        """The file of the example, for messages."""
        return self.where.rpartition(":")[0]


@dataclass(frozen=True)
class ModelShape:
    """The size of an encoder. A static model has no layers."""

    layers: int
    hidden: int
    ffn: int
    heads: int

    @property
    def is_static(self) -> bool:
        """Whether the shape is that of a table of token vectors."""
        return not self.layers

    def __str__(self) -> str:
        """Format the shape as for `--to`, with FFN and heads: `6x768:3072@12`."""
        if self.is_static:
            return f"static:{self.hidden}"
        return f"{self.layers}x{self.hidden}:{self.ffn}@{self.heads}"

    @property
    def short(self) -> str:
        """The shape without heads: `3x384`, `3x384:600` or `static:256`.

        A feed-forward width that is four times the hidden width, as in BERT, is not shown.
        """
        if self.is_static:
            return str(self)
        ffn = "" if self.ffn == 4 * self.hidden else f":{self.ffn}"
        return f"{self.layers}x{self.hidden}{ffn}"


@dataclass(frozen=True)
class Start:
    """How a student starts from its teacher.

    Attributes:
        init: `teacher` copies weights and fits them to the teacher's outputs
            (`kdcli.models.reduce`). `copied` does not fit them. `random` draws them from `seed`, as
            the model type does.
        layers: The teacher layers 1 ... N to copy, one per student layer. None selects evenly
            spaced layers, including the last one.
        dropout: The rate of every dropout in memory; None keeps the teacher's rates. The saved
            configuration always keeps them.
        seed: The seed of random weights.
    """

    init: str = "teacher"
    layers: list[int] | None = None
    dropout: float | None = None
    seed: int = 0


FITTED = Start()
"""Copies evenly spaced layers and fits them to the teacher's outputs."""


@dataclass(frozen=True)
class Needs:
    """The signals that a loss reads.

    * `q`, `k`, `v`, `hidden`: layers whose signal is needed. In `hidden`, 0 is the embedding
      output.
    * `logits`: the logits of every row or token.
    * `masked_logits`: a masked language model's logits at labelled tokens only.
    * `pooled`: an embedding model's vector of each row.
    """

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
    """The signals of one forward pass.

    Attributes:
        mask: Attention mask, [B, L] or [B, 1, L, L]; None if every token is real.
        q, k, v: layer -> [B, A, L, K], after any rotary embedding. Grouped key/value heads are
            repeated to A heads.
        hidden: layer -> [B, L, D]. 0 is the embedding output, and the last one is the model's
            `last_hidden_state`.
        logits: [B, C] for rows; [B, L, C] for tokens; [B, L, 2] for spans (start, end); [P, V] for
            labelled tokens, row by row.
        labels: The batch's labels, if it has any; see `Kind`.
        labelled: The places of labelled tokens that `logits` belong to, see `labelled_places`.
        pooled: Vectors of an embedding model, [B, D].
        anchors: A teacher's vectors of the anchor texts, [R, D].
        positive: A teacher's vector of each row's positive, [B, D], zero if the row has none.
        negatives: A teacher's vectors of each row's negatives, [B, M, D], padded with zeros.
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
    """A distillation loss for one teacher's shape and one student's shape.

    Attributes:
        teacher_needs, student_needs: The signals to capture.
        projections: Learned matrices of the run, which are never part of the saved student.
        terms: A pure function (teacher, student) -> named scalars. Their sum is the loss.
        over: The unit of each term's mean.
        notes: Messages to the user about how the two shapes are compared.
    """

    teacher_needs: Needs
    student_needs: Needs
    projections: nn.Module
    terms: Callable[[Signals, Signals], Mapping[str, Tensor]]
    over: Mapping[str, Count]
    notes: tuple[str, ...] = ()


REGULARIZER = "regularizer"
"""The name of the term that a pruner adds to the training loss alone."""


@dataclass(frozen=True)
class Term:
    """A scalar of a loss, which is a mean over the rows, tokens or labels of a batch.

    A term that is the same for every batch may use any unit. `weight` is its weight in the loss;
    the log shows the term without it.
    """

    value: Tensor
    over: Count
    weight: float = 1.0


@dataclass(frozen=True)
class StepLoss:
    """The result of a training step.

    Attributes:
        terms: The terms whose weighted sum is minimised. A single term is named `loss`.
        outputs: [B, ...], for `Job.compute_metrics`.
    """

    terms: Mapping[str, Term]
    outputs: Tensor | None = None

    def totals(self) -> dict[Count, Tensor]:
        """Return the weighted sum of the terms, by unit.

        The mean over several batches is the mean of each total, weighted by the batches' counts of
        its unit.
        """
        groups: dict[Count, list[Tensor]] = {}
        for term in self.terms.values():
            if term.weight:
                groups.setdefault(term.over, []).append(term.weight * term.value.float())
        return {over: _sum(values) for over, values in groups.items()}

    def parts(self) -> list[tuple[str, Count, Tensor]]:
        """Return the name, unit and value of everything that is logged; `loss` has one part per
        unit."""
        parts = [("loss", over, total) for over, total in self.totals().items()]
        return parts + [
            (name, term.over, term.value) for name, term in self.terms.items() if name != "loss"
        ]

    @property
    def total(self) -> Tensor:
        """The loss of a single batch."""
        return _sum(list(self.totals().values()))


def _sum(values: list[Tensor]) -> Tensor:
    # Tasks and shapes are checked before torch is loaded, and they need the other types here.
    import torch

    return torch.stack(values).sum()


def counts_of(batch: Batch) -> dict[Count, float]:
    """Count the rows, tokens and labels of a batch."""
    labels = batch.get("labels")
    label_count = 0.0 if labels is None else float((labels != IGNORED).sum())
    return {
        "rows": float(len(batch["input_ids"])),
        "tokens": real_tokens(batch),
        "labels": label_count,
    }


def labelled_places(batch: Batch) -> Tensor:
    """Return the places of labels [B, L] that are not IGNORED, row by row, [P] int64 into B·L.

    A batch of masked text computes them on the CPU. On a device, finding them would wait for all
    queued work.
    """
    if "labelled" in batch:
        return batch["labelled"]
    return (batch["labels"] != IGNORED).flatten().nonzero()[:, 0]


class Examples(Protocol):
    """A data set in a fixed order; `batch` collates rows on the CPU."""

    def __len__(self) -> int: ...

    def batch(self, indices: Array) -> Batch: ...


class Order(Protocol):
    """The examples of each global batch: a pure function of the step, which is counted from 1."""

    def indices(self, step: int) -> Array: ...


def real_tokens(batch: Batch) -> float:
    """Return the number of tokens that are not padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        return float(batch["input_ids"].numel())
    return float((mask if mask.dim() == 2 else mask.any(-1)).sum())


@dataclass(frozen=True)
class Schedule:
    """The steps, learning rates and intervals of a run.

    `batch_size` is global. If `micro_batch_size` is None, the engine chooses it. `stop_after` ends
    the training after this many steps without changing the learning rates. It serves dry runs, and
    runs that are continued later with a higher value.
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
        """Return the learning rate of a step (1 to steps).

        The rate warms up linearly. Then it is `constant`, or decays linearly (`linear`) to 0 just
        after the last step.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * (self.steps - step + 1) / (self.steps - self.warmup_steps)


@dataclass(frozen=True)
class ParamGroup:
    """How a parameter is trained: `lr` multiplies the schedule's rate, and `decayed` enables weight
    decay."""

    lr: float = 1.0
    decayed: bool = True


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        modules: The modules to train. Each one is clipped and checkpointed separately, so that
            modules in one job get the same updates as in separate jobs. Only parameters that
            require a gradient are trained.
        step: Batch on the device -> loss. Also called for the held-out loss, with the modules in
            eval mode and without gradients.
        examples: The training examples.
        order: The order of the training examples.
        held_out: The held-out examples, or None.
        compute_metrics: `outputs` of all held-out examples, float32, in their order -> metrics.
        best: The metric that selects the weights to keep; None keeps the last weights.
        best_from: The first step whose weights may be selected; 0 if the weights before the
            first step may be.
        param_group: Name of a parameter (module name first) -> how it is trained. None gives all
            parameters the same settings.
        shared: Micro-batch on the device -> tensors [B, ...] that losses of the whole batch read,
            without gradients. In its batch, `step` finds these tensors for all rows of all
            processes, [rows, ...], under the same names, and the places of its own rows among them,
            [B], as `own_rows`. In evaluations, there are none.
        on_step_end: Called with the number of finished steps: before the first (or next) step, and
            after each step.
        held_out_size: The maximum number of sequences of a held-out example, relative to a training
            example. A held-out pass takes fewer examples at once by this factor.
    """

    modules: Mapping[str, nn.Module]
    step: Callable[[Batch], StepLoss]
    examples: Examples
    order: Order
    held_out: Examples | None
    compute_metrics: Callable[[Sequence[Array]], Mapping[str, float]] | None = None
    best: str | None = None
    best_from: int = 1
    param_group: Callable[[str], ParamGroup] | None = None
    shared: Callable[[Batch], Mapping[str, Tensor]] | None = None
    on_step_end: Callable[[int], None] | None = None
    held_out_size: float = 1.0


@dataclass
class Outcome:
    """The totals of a run, including the time before a resume.

    `best_step` is the step of the kept weights. `finished` is False if `Schedule.stop_after` ended
    the training before its last step. `outputs` are the held-out outputs of the kept weights, or
    None if this process last evaluated other weights, or did not evaluate in float32.
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
    outputs: Sequence[Array] | None = None
