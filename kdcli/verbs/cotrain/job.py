"""Co-training as the engine sees it: two modules, one step that runs each model once.

Text and task differ in their two loss functions, in their examples and in how the models are evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.text.corpus import Corpus
from kdcli.data.text.masking import Masked, PassOrder, tokens_of
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.losses.ctcd import STUDENT, TEACHER, Weights, ctcd, reverse_kl
from kdcli.losses.hard import hard_loss, mean_over
from kdcli.losses.soft_targets import soft_loss
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.models.capture import Capture
from kdcli.models.model import Model
from kdcli.models.training_rows import NO_ROWS
from kdcli.report.finish import quality_of
from kdcli.report.schema import Evaluation, Quality
from kdcli.targets.teacher import Teacher
from kdcli.types import (
    Batch,
    Count,
    Job,
    Needs,
    ParamGroup,
    RowHashes,
    Schedule,
    Signals,
    StepLoss,
    Term,
)
from kdcli.verbs.cotrain.models import ROLES, Pair, load_task_pair, load_text_pair
from kdcli.verbs.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.workloads.compare import Tasks
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.run import WORST
from kdcli.workloads.task import PreparedTask, build_job, freeze_unused, predict

PARTNERS = (
    "student-1",
    "student-2",
)  # Names of the two models beside a community teacher, where neither is one
STANDALONE = "standalone"  # Directory of the comparison run, and suffix of its models' names
HELD_OUT = "held-out MLM loss"  # Quality row with the loss on masked tokens of held-out text

Recipe = CotrainRecipe | CotrainTaskRecipe


def names_of(recipe: Recipe) -> dict[str, str]:
    """Role -> name in logs, reports and directories."""
    return dict(zip(ROLES, PARTNERS if weights_of(recipe).community else ROLES, strict=True))


def weights_of(recipe: Recipe) -> Weights:
    """The weights of the loss terms; raises as `Weights.of`."""
    community = isinstance(recipe, CotrainRecipe) and recipe.community.model is not None
    return Weights.of(recipe.weights, recipe.mode, community=community)


@dataclass(frozen=True)
class Losses:
    """The losses on one batch: `hard(logits)` against the labels, `soft(from, to)` between the models; all are means
    over `over`."""

    over: Count
    hard: Callable[[Tensor], Tensor]
    soft: Callable[[Tensor, Tensor], Tensor]
    community: Callable[[Tensor, Tensor], Tensor] | None = None


MakeLosses = Callable[
    [Signals, Batch], Losses
]  # The losses of a batch, from the student's signals and the batch


class PairStep:
    """The step of a job: batch -> the weighted sum of the terms in `kdcli.losses.ctcd.ctcd`; `models` are by role."""

    def __init__(
        self,
        recipe: Recipe,
        models: Mapping[str, Capture],
        losses: MakeLosses,
        community: Teacher | None = None,
    ) -> None:
        self.models, self.losses, self.community, self.train = (
            models,
            losses,
            community,
            recipe.train,
        )
        self.names, self.weights = names_of(recipe), weights_of(recipe)
        self.modules = {name: models[role] for role, name in self.names.items()}

    def __call__(self, batch: Batch) -> StepLoss:
        frozen = self.community.signals(batch).logits if self.community is not None else None
        signals = {role: model(batch) for role, model in self.models.items()}
        student = signals[STUDENT]
        if student.labels is None:
            return StepLoss({"loss": Term(student.logits.new_zeros(()), "rows")}, student.logits)
        logits, losses = (
            {role: s.logits for role, s in signals.items()},
            self.losses(student, batch),
        )
        terms = ctcd(losses.hard, losses.soft, logits, self.weights, frozen, losses.community)
        if not torch.is_grad_enabled():
            # Held-out losses against the labels compare runs, also where nothing is learned from labels.
            terms |= {
                f"{role}/hard": (0.0, losses.hard(logits[role]))
                for role in ROLES
                if f"{role}/hard" not in terms
            }
        named = {
            name.partition("/"): Term(value, losses.over, weight)
            for name, (weight, value) in terms.items()
        }
        return StepLoss(
            {f"{self.names[role]}/{name}": term for (role, _, name), term in named.items()},
            student.logits,
        )

    def param_group(self, parameter: str) -> ParamGroup:
        """The learning rate of a parameter, relative to `train.lr`."""
        is_teacher = parameter.partition(".")[0] == self.names[TEACHER]
        rate = self.train.teacher_lr if is_teacher else self.train.student_lr
        return ParamGroup(lr=(rate or self.train.lr) / self.train.lr)

    def freeze_idle(self, batch: Batch) -> None:
        """Freeze what gets no gradient: zeros would be summed over processes, and weight decay would shrink it."""
        for role, name in self.names.items():
            if self.weights.reaches(role):
                freeze_unused(self.models[role], self.models[role](batch).logits.sum())
            else:
                self.models[role].requires_grad_(False)
                Progress.log(
                    f"{name}: with these weights it has nothing to learn from and stays as it is"
                )


@dataclass(frozen=True)
class OnText:
    """Masked language modelling by both models on the same masked blocks; `tasks` compare the models afterwards."""

    recipe: CotrainRecipe
    session: Session
    corpus: Corpus
    schedule: Schedule
    tasks: Tasks = field(default_factory=dict)
    auto_class: str = "AutoModelForMaskedLM"
    rows: RowHashes = field(default_factory=NO_ROWS.copy)  # labelled ones: none

    def load(self) -> Pair:
        return load_text_pair(self.recipe, trust_remote_code=self.session.trust_remote_code)

    def build(self, recipe: CotrainRecipe, pair: Pair) -> tuple[Job, Schedule, float]:
        mask, temperature, schedule = recipe.data.mask, recipe.temperature, self.schedule
        tokens = tokens_of(pair.models[TEACHER].tokenizer, str(recipe.teacher))
        how = tokens, mask.share, mask.whole_words, mask.static, schedule.seed
        train, held_out = (
            Masked(blocks, *how) for blocks in (self.corpus.train, self.corpus.held_out)
        )
        needs, frozen = Needs(masked_logits=True), pair.community
        community = (
            Teacher.frozen(frozen.source, frozen.model, needs, self.session) if frozen else None
        )
        divergence = reverse_kl if recipe.community.printed_order else soft_kl

        def losses(signals: Signals, batch: Batch) -> Losses:
            labels_P = labels_of(signals)
            return Losses(
                "labels",
                lambda logits_PV: masked_ce(logits_PV, labels_P),
                lambda from_PV, to_PV: soft_kl(from_PV, to_PV, temperature),
                lambda from_PV, to_PV: divergence(from_PV, to_PV, temperature),
            )

        step = PairStep(recipe, pair.captured(recipe.dropout, needs), losses, community)
        step.freeze_idle(train.batch(np.arange(1)))
        order = PassOrder(BatchOrder(len(train), schedule.batch_size, schedule.seed))
        job = Job(step.modules, step, train, order, held_out, param_group=step.param_group)
        return job, schedule, len(train) / schedule.batch_size

    def evaluate(self, pair: Pair, folder: Path) -> tuple[list[Evaluation], Quality]:
        """Evaluations (none) and held-out losses of a finished run."""
        return [], {
            HELD_OUT: {name: {"loss": after} for name, (_, after) in self.held_out(folder).items()}
        }

    def held_out(self, folder: Path) -> dict[str, tuple[float, float]]:
        """Name -> held-out loss against the labels before and after training."""
        held = [r["held_out"] for r in RunDir(folder).read_log() if "held_out" in r]
        return {
            n: (held[0][f"{n}/hard"], held[-1][f"{n}/hard"]) for n in names_of(self.recipe).values()
        }

    def gains(self, folder: Path, quality: Quality) -> list[str]:
        """Notes on what each model gained from the other, and on the better of two students."""
        losses, lines = self.held_out(folder), []
        for name, (before, after) in losses.items():
            line, alone = (
                f"{name}: {HELD_OUT} {before:.4f} before, {after:.4f} after",
                f"{name} {STANDALONE}",
            )
            if alone in quality[HELD_OUT]:
                other = quality[HELD_OUT][alone]["loss"]
                word = "better" if after < other else "worse"
                line += f", {other:.4f} {STANDALONE}: {abs(other - after):.4f} {word} with the other model"
            lines.append(line)
        if TEACHER not in losses:
            best, worse = sorted(losses, key=lambda name: losses[name][1])
            of_both = f"{losses[best][1]:.4f} against {losses[worse][1]:.4f}"
            lines.append(f"{best} is the better student: {HELD_OUT} {of_both}")
        return lines


@dataclass(frozen=True)
class OnTask:
    """Fine-tuning of both models on the same rows; metrics during training are the student's."""

    recipe: CotrainTaskRecipe
    task: PreparedTask
    auto_class: str

    @property
    def rows(self) -> RowHashes:
        return self.task.data.rows

    def load(self) -> Pair:
        return load_task_pair(self.recipe, self.task)

    def build(self, recipe: CotrainTaskRecipe, pair: Pair) -> tuple[Job, Schedule, float]:
        task, kind, student = self.task, self.task.data.task.kind, pair.models[STUDENT]
        assert isinstance(student, Model)
        models = pair.captured(recipe.dropout, Needs(logits=True))
        plain, schedule = build_job(task, as_finetune(recipe, student.source), student)

        def losses(signals: Signals, batch: Batch) -> Losses:
            labels, mask_BL = signals.labels, batch["attention_mask"]
            assert labels is not None
            return Losses(
                mean_over(kind),
                lambda logits: hard_loss(kind, logits, labels, mask_BL),
                lambda of, to: soft_loss(kind, of, to, labels, mask_BL, recipe.temperature),
            )

        step = PairStep(recipe, models, losses)
        step.freeze_idle(plain.examples.batch(np.arange(min(2, len(plain.examples)))))
        job = replace(plain, modules=step.modules, step=step, param_group=step.param_group)
        assert isinstance(job.order, BucketOrder)
        return job, schedule, job.order.steps_of_pass

    def evaluate(self, pair: Pair, folder: Path) -> tuple[list[Evaluation], Quality]:
        task, evaluations = self.task, list[Evaluation]()
        for name, model in pair.models.items():
            assert isinstance(model, Model)
            predictions = predict(task.session, task.evaluator, model)
            evaluations += task.evaluator.evaluations(name, task.data.split, predictions, WORST)
        return evaluations, quality_of(evaluations)
