"""Build the engine's job for co-training: two modules, and a step that runs each model once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.losses.ctcd import STUDENT_MODEL, TEACHER_MODEL, Weights, ctcd, reverse_kl
from kdcli.models.capture import Capture
from kdcli.report.schema import Quality
from kdcli.targets.teacher import Teacher
from kdcli.types import Batch, Job, ParamGroup, Schedule, Signals, StepLoss, Term
from kdcli.verbs.cotrain.models import PAIR_ROLES, ModelPair
from kdcli.verbs.cotrain.settings import CotrainRecipe
from kdcli.workloads.training import first_rows, freeze_unused, total_loss, training_job
from kdcli.workloads.workload import Workload

PARTNERS = ("student-1", "student-2")
"""Names of the two models if a community teacher teaches both."""
STANDALONE = "standalone"
"""Directory of the comparison run, and suffix of its models' names."""
HELD_OUT_MLM = "held-out MLM loss"
"""Name of the loss on masked tokens of held-out text in the table of qualities."""

SoftDivergence = Callable[[Signals, Signals], Tensor]


def pair_names(recipe: CotrainRecipe) -> dict[str, str]:
    """Return the name of each role in logs, reports and directories."""
    return dict(
        zip(PAIR_ROLES, PARTNERS if weights_of(recipe).community else PAIR_ROLES, strict=True)
    )


def weights_of(recipe: CotrainRecipe) -> Weights:
    """Return the weights of the loss terms.

    Raises:
        UsageError: The weights are wrong, or leave a mode nothing to learn.
    """
    community = recipe.community.model is not None
    return Weights.of(recipe.weights, recipe.mode, community=community)


class PairStep:
    """The step of a job: sums the terms of `kdcli.losses.ctcd.ctcd` with their weights."""

    def __init__(
        self,
        recipe: CotrainRecipe,
        workload: Workload,
        models: Mapping[str, Capture],
        community: Teacher | None = None,
    ) -> None:
        self.workload, self.models, self.community = workload, models, community
        self.recipe, self.train = recipe, recipe.train
        self.names, self.weights = pair_names(recipe), weights_of(recipe)
        self.modules = {name: models[role] for role, name in self.names.items()}

    def __call__(self, batch: Batch) -> StepLoss:
        workload = self.workload
        frozen = self.community.signals(batch) if self.community is not None else None
        signals = {role: workload.forward(model, batch) for role, model in self.models.items()}
        student = signals[STUDENT_MODEL]

        def hard(of: Signals) -> Tensor:
            return total_loss(workload.hard(of, batch), of)

        def soft(source: Signals, learner: Signals) -> Tensor:
            losses = workload.soft(source, learner, batch, self.recipe.temperature)
            return total_loss(losses, learner)

        terms = ctcd(hard, soft, signals, self.weights, frozen, self._community_divergence())
        if not torch.is_grad_enabled():
            # Runs are compared by their held-out losses against the labels, even if the models
            # learn nothing from labels.
            for role in PAIR_ROLES:
                if f"{role}/hard" not in terms:
                    terms[f"{role}/hard"] = 0.0, hard(signals[role])
        named: dict[str, Term] = {}
        for key, (weight, value) in terms.items():
            role, _, name = key.partition("/")
            named[f"{self.names[role]}/{name}"] = Term(value, workload.over, weight)
        return StepLoss(named, workload.outputs(student, batch))

    def _community_divergence(self) -> SoftDivergence | None:
        recipe = self.recipe
        if not recipe.community.printed_order:
            return None

        def divergence(frozen: Signals, learner: Signals) -> Tensor:
            assert frozen.logits is not None
            assert learner.logits is not None
            return reverse_kl(frozen.logits, learner.logits, recipe.temperature)

        return divergence

    def param_group(self, parameter: str) -> ParamGroup:
        """Return the learning rate of a parameter, relative to `train.lr`."""
        is_teacher = parameter.partition(".")[0] == self.names[TEACHER_MODEL]
        rate = self.train.teacher_lr if is_teacher else self.train.student_lr
        return ParamGroup(lr=(rate or self.train.lr) / self.train.lr)

    def freeze_idle(self, batch: Batch) -> None:
        """Freeze the parameters without a gradient.

        Otherwise several processes would sum zeros, and weight decay would shrink the parameters.
        """
        for role, name in self.names.items():
            if self.weights.reaches(role):
                outputs = self.workload.forward(self.models[role], batch).logits
                assert outputs is not None
                freeze_unused(self.models[role], outputs.sum())
            else:
                self.models[role].requires_grad_(False)
                Progress.log(f"{name} learns nothing with these weights and stays unchanged")


def pair_job(
    recipe: CotrainRecipe, workload: Workload, pair: ModelPair
) -> tuple[Job, Schedule, float]:
    """Build the job that trains both models.

    Returns:
        The job, its schedule, and the number of steps in one pass over the examples.
    """
    frozen = pair.community
    community = None
    if frozen is not None:
        community = Teacher.frozen(frozen.source, frozen.model, workload.needs, workload.session)
    models = pair.captured(recipe.dropout, workload)
    step = PairStep(recipe, workload, models, community)
    step.freeze_idle(first_rows(workload.examples))
    plan = workload.plan(recipe.train)
    job = training_job(workload, step.modules, step, plan.order, recipe.keep)
    return replace(job, param_group=step.param_group), plan.schedule, plan.steps_per_pass


def held_out_mlm_losses(recipe: CotrainRecipe, run_dir: RunDir) -> dict[str, tuple[float, float]]:
    """Return each model's held-out loss against the labels, before and after training."""
    held = [r["held_out"] for r in run_dir.read_log() if "held_out" in r]
    return {n: (held[0][f"{n}/hard"], held[-1][f"{n}/hard"]) for n in pair_names(recipe).values()}


def gains(recipe: CotrainRecipe, run_dir: RunDir, quality: Quality) -> list[str]:
    """Describe what each model gained from the other, and which of two students is better."""
    losses, lines = held_out_mlm_losses(recipe, run_dir), []
    for name, (before, after) in losses.items():
        line = f"{name}: {HELD_OUT_MLM} {before:.4f} before, {after:.4f} after"
        alone = f"{name} {STANDALONE}"
        if alone in quality[HELD_OUT_MLM]:
            other = quality[HELD_OUT_MLM][alone]["loss"]
            word = "better" if after < other else "worse"
            line += (
                f", {other:.4f} {STANDALONE}: {abs(other - after):.4f} {word} with the other model"
            )
        lines.append(line)
    if TEACHER_MODEL not in losses:
        best, worse = sorted(losses, key=lambda name: losses[name][1])
        both = f"{losses[best][1]:.4f} against {losses[worse][1]:.4f}"
        lines.append(f"{best} is the better student: {HELD_OUT_MLM} {both}")
    return lines
