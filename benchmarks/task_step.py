"""Compare a step of task distillation with TextBrewer, for 6x384 to 3x384 and a batch of 32.

    python benchmarks/task_step.py [--data SST2_DIR --model DIR] [--textbrewer DIR]
                                   [--groups 8 16 32] [--rounds 5] [--device cpu]

Both use the same losses: the squared error of attention scores (three layers), the squared error of
hidden states (the embeddings and three layers, each through a learned matrix), and soft targets.

* kdcli: the engine's own loop. Rows are in groups of similar length, with one result for each size
  of group. The teacher stops at its logits. In `cached`, the teacher's signals are read from a
  store on disk, which is made beforehand and not timed.
* TextBrewer (`--textbrewer`: the directory where it is installed with tensorboard): the step of its
  GeneralDistiller on random batches, padded to their longest row, in float32. Its models return
  scores instead of probabilities, so that its losses are the same. This is checked first.

`--data` reads the rows of SST-2, and `--model` is the teacher and tokenizer for them. Without them,
weights and rows are random, with lengths similar to SST-2's. Prints real tokens per second and the
median ratios of interleaved rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask
from transformers.modeling_outputs import SequenceClassifierOutput

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.features import TokenizedRows, encode_examples
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.task_data import open_labelled
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.losses import build_objective
from kdcli.losses.soft_targets import soft_loss
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.models.grammar import parse_shape
from kdcli.models.heads import load_for_task
from kdcli.models.shape import build_student, shape_of
from kdcli.targets.cache import SignalStore, StorePlace
from kdcli.targets.targets import Teacher
from kdcli.types import Batch, Examples, Job, Objective, Schedule, Signals, StepLoss, real_tokens
from kdcli.verbs.distill.student import Student

BATCH, ROWS = 32, 2048
PAIRS = {0: 0, 1: 2, 2: 4, 3: 6}
Way = Callable[[int], tuple[int, float]]
"""Runs a number of steps and returns the number of real tokens and the seconds."""


def random_rows() -> TokenizedRows:
    """Return rows of random ids with lengths similar to SST-2's.

    The mean is 13 tokens, and few rows have more than 40.
    """
    rng = np.random.default_rng(0)
    lengths = np.clip(3 + rng.exponential(10, ROWS).astype(np.int64), 3, 64)
    ids_T = rng.integers(1000, 30000, lengths.sum(), dtype=np.int32)
    labels = rng.integers(0, 2, ROWS)
    return TokenizedRows(ids_T, None, np.cumsum(lengths), labels, np.arange(ROWS), 0, 0, "class")


def teacher_and_rows(options: argparse.Namespace) -> tuple[PreTrainedModel, TokenizedRows]:
    if not options.data:
        torch.manual_seed(0)
        shape = {
            "num_hidden_layers": 6,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_attention_heads": 12,
        }
        return AutoModelForSequenceClassification.from_config(BertConfig(**shape)), random_rows()
    request = RowsRequest("sst2", options.data, train_rows=ROWS, judged_rows=1)
    data = open_labelled(request)
    headed = load_for_task(options.model, data.task, new_head=True)
    rows = encode_examples(
        data.task, data.train, headed.tokenizer, max_length=64, token_types=False
    )
    return headed.model, rows


def student_of(teacher: PreTrainedModel) -> PreTrainedModel:
    built = build_student(teacher.base_model, parse_shape("3x384", shape_of(teacher.config))).model
    student = AutoModelForSequenceClassification.from_config(built.config)
    student.base_model.load_state_dict(built.state_dict(), strict=False)
    return student.train()


def with_logits(teacher: PreTrainedModel, student: PreTrainedModel) -> Objective:
    """Return the objective of both stages together. `kdcli` runs them one after the other."""
    layers = build_objective("tinybert", {}, shape_of(teacher.config), shape_of(student.config))

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        assert t.logits is not None
        assert s.logits is not None
        assert s.labels is not None
        return {
            **layers.terms(t, s),
            "soft": soft_loss("class", t.logits, s.logits, s.labels, None, 1.0),
        }

    t_needs, s_needs = (
        replace(needs, logits=True) for needs in (layers.teacher_needs, layers.student_needs)
    )
    over = {**layers.over, "soft": "rows"}
    return replace(layers, teacher_needs=t_needs, student_needs=s_needs, terms=terms, over=over)


def kdcli_way(
    session: Session,
    student: Student,
    rows: Examples,
    lengths: np.ndarray,
    group: int,
    signals: Callable[[Batch], Signals],
) -> Way:
    order = BucketOrder(lengths, BATCH, group, 0)

    def step(batch: Batch) -> StepLoss:
        of_teacher = signals(batch)
        return StepLoss(student(batch, of_teacher))

    job = Job({"student": student}, step, rows, order, None)

    def go(steps: int) -> tuple[int, float]:
        schedule = Schedule(
            steps, BATCH, 5e-5, 0, micro_batch_size=group, log_every=10**6, checkpoint_every=10**6
        )
        outcome = train(session, job, schedule, None)
        return outcome.tokens, sum(outcome.step_seconds)

    return go


def scores_and_output(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Compute eager attention, and return its scores instead of their softmax."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), scores


class TextBrewer:
    """TextBrewer's distiller, and its step in the form that its training loop uses."""

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
        from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig

        AttentionInterface.register("scores", scores_and_output)
        AttentionMaskInterface.register("scores", eager_mask)
        for model in (teacher, student):
            model.set_attn_implementation("scores")
        width = teacher.config.hidden_size
        matches = [
            {
                "layer_T": n - 1,
                "layer_S": m - 1,
                "feature": "attention",
                "loss": "attention_mse",
                "weight": 1,
            }
            for m, n in PAIRS.items()
            if m
        ] + [
            {
                "layer_T": n,
                "layer_S": m,
                "feature": "hidden",
                "loss": "hidden_mse",
                "weight": 1,
                "proj": ["linear", student.config.hidden_size, width, {}],
            }
            for m, n in PAIRS.items()
        ]

        def adaptor(batch: Batch, output: SequenceClassifierOutput) -> dict[str, object]:
            return {
                "logits": [output.logits],
                "hidden": output.hidden_states,
                "attention": output.attentions,
                "inputs_mask": batch["attention_mask"],
            }

        folder = tempfile.mkdtemp()
        self.distiller = GeneralDistiller(
            train_config=TrainingConfig(
                device="cpu", output_dir=folder, log_dir=None, ckpt_steps=10**9
            ),
            distill_config=DistillationConfig(
                temperature=1, kd_loss_weight=1, intermediate_matches=matches
            ),
            model_T=teacher.eval(),
            model_S=student,
            adaptor_T=adaptor,
            adaptor_S=adaptor,
        )
        self.student = student
        learned = [
            *student.parameters(),
            *(p for j in self.distiller.projs if j is not None for p in j.parameters()),
        ]
        self.optimizer = torch.optim.AdamW(learned, lr=5e-5, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        loss: Tensor
        loss, _ = self.distiller.train_on_batch(
            inputs, {"output_hidden_states": True, "output_attentions": True}
        )
        return loss

    def way(self, rows: TokenizedRows) -> Way:
        def drawn() -> Iterator[Batch]:
            order = BatchOrder(len(rows), BATCH, 0)
            step = 0
            while True:
                step += 1
                yield rows.batch(order.indices(step))

        batches = drawn()

        def go(steps: int) -> tuple[int, float]:
            self.student.train()
            tokens, began = 0, time.perf_counter()
            for _ in range(steps):
                batch = next(batches)
                tokens += int(real_tokens(batch))
                torch.autograd.backward(self.loss(batch))
                nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            return tokens, time.perf_counter() - began

        return go


def check_same_losses(
    peer: TextBrewer, ours: Student, listened: Capture, rows: TokenizedRows
) -> None:
    """Check that both libraries compute the same loss.

    The rows have one length, there is no dropout, and the learned matrices are identities.

    Raises:
        RuntimeError: the losses differ.
    """
    lengths = rows.lengths
    batch = rows.batch(np.flatnonzero(lengths == np.bincount(lengths).argmax())[:4])
    peer.student.eval()
    ours.eval()
    before = copy.deepcopy([None if j is None else j.state_dict() for j in peer.distiller.projs])
    with torch.no_grad():
        for matrix in (j for j in peer.distiller.projs if j is not None):
            nn.init.eye_(matrix.weight)
            nn.init.zeros_(matrix.bias)
        signals = Teacher("teacher", listened).signals(batch)
        assert signals.logits is not None
        # TextBrewer's soft targets use the cross-entropy, which adds the teacher's entropy.
        log_p = signals.logits.float().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        own_loss = float(sum(ours(batch, signals).values()) + entropy)
        peer_loss = float(peer.loss(batch))
    for matrix, state in zip(peer.distiller.projs, before, strict=True):
        if matrix is not None:
            matrix.load_state_dict(state)
    print(f"loss of one batch: kdcli {own_loss:.6f}, TextBrewer {peer_loss:.6f}")
    if abs(own_loss - peer_loss) > 1e-3 * abs(peer_loss):
        raise RuntimeError("the two do not compute the same losses")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data")
    parser.add_argument("--model")
    parser.add_argument("--textbrewer", type=Path)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if bool(options.data) != bool(options.model):
        parser.error("--data and --model go together")
    torch.set_num_threads(options.threads)
    teacher, rows = teacher_and_rows(options)
    fresh = student_of(teacher)
    lengths = rows.lengths
    print(f"{len(rows)} rows of {lengths.mean():.1f} tokens")
    ways: dict[str, Way] = {}
    if options.textbrewer:
        sys.path.insert(0, str(options.textbrewer))
        peer = TextBrewer(copy.deepcopy(teacher), copy.deepcopy(fresh))
        probe = copy.deepcopy(fresh)
        student = Student(probe, with_logits(teacher, probe))
        listened = capture(copy.deepcopy(teacher).eval(), student.objective.teacher_needs)
        check_same_losses(peer, student, listened, rows)
        ways["TextBrewer"] = peer.way(rows)
    device = choose_device(options.device)
    auto = choose_dtype("auto", device)
    print(f"--dtype auto is {str(auto)[6:]} here")
    with tempfile.TemporaryDirectory() as folder:
        for dtype in dict.fromkeys((auto, torch.float32)):
            ways |= kdcli_ways(teacher, fresh, rows, (device, dtype), options.groups, Path(folder))
        compare(ways, options)


def kdcli_ways(
    teacher: PreTrainedModel,
    fresh: PreTrainedModel,
    rows: TokenizedRows,
    where: tuple[torch.device, torch.dtype],
    groups: list[int],
    folder: Path,
) -> dict[str, Way]:
    """Return a way for each size of group, and one with cached signals."""
    (device, dtype), objective = where, with_logits(teacher, fresh)
    listened = capture(
        prepare_teacher(copy.deepcopy(teacher), dtype).to(device), objective.teacher_needs
    )
    AcceleratorState._reset_state()
    store = SignalStore.open(
        StorePlace(folder, 1 << 33),
        rows,
        listened,
        objective.teacher_needs,
        str(dtype),
        Session(start(device, dtype), device),
    )
    assert store is not None, "no room for the store"
    name, ways = str(dtype)[6:], {}

    def way(group: int, examples: Examples, signals: Callable[[Batch], Signals]) -> Way:
        encoder = copy.deepcopy(fresh)
        student = Student(encoder, with_logits(teacher, encoder))

        def go(steps: int) -> tuple[int, float]:
            # The accelerator has one number format per process, so it must be reset.
            AcceleratorState._reset_state()
            session = Session(start(device, dtype), device)
            return kdcli_way(session, student, examples, rows.lengths, group, signals)(steps)

        return go

    for group in groups:
        ways[f"kdcli {name}, groups of {group}"] = way(
            group, rows, Teacher("teacher", listened).signals
        )
    ways[f"kdcli {name}, groups of {groups[-1]}, cached"] = way(groups[-1], store, store.signals)
    return ways


def compare(ways: dict[str, Way], options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            tokens, seconds = way(2 if number == 0 else options.steps)
            rates[name].append(tokens / seconds)
    base = next(iter(ways))
    for name, values in rates.items():
        ratios = [v / b for v, b in zip(values[1:], rates[base][1:], strict=True)]
        ratio = f"{statistics.median(ratios):.2f}x {base} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(
            f"{name:34} {statistics.median(values[1:]):7.0f} tokens/s   "
            f"{'' if name == base else ratio}"
        )


if __name__ == "__main__":
    main()
