"""Co-training as the engine sees it: two modules, one step in which each is run once, on text or on a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.commands.cotrain.models import Pair
from kdcli.commands.cotrain.plan import ROLES, names_of, weights_of
from kdcli.commands.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.data.batches import BatchOrder
from kdcli.data.text.corpus import Corpus
from kdcli.data.text.masking import Masked, PassOrder, tokens_of
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import PreparedTask, build_job
from kdcli.losses.ctcd import STUDENT, TEACHER, Weights, ctcd, reverse_kl
from kdcli.losses.hard import hard_loss, labelled
from kdcli.losses.soft_targets import soft_loss
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.models.capture import Capture, capture, params_without_grad
from kdcli.models.heads import TaskModel
from kdcli.models.shape import set_dropout
from kdcli.teachers.teacher import Teacher
from kdcli.training.progress import Progress
from kdcli.training.session import Session
from kdcli.types import Batch, Job, Needs, ParamGroup, Schedule, StepLoss


@dataclass(frozen=True)
class _Losses:
    """What one batch is judged by: the loss against its labels, the two divergences."""

    hard: Callable[[Tensor], Tensor]
    soft: Callable[[Tensor, Tensor], Tensor]
    community: Callable[[Tensor, Tensor], Tensor] | None = None


def on_text(pair: Pair, corpus: Corpus, recipe: CotrainRecipe, schedule: Schedule, session: Session) -> Job:
    """Masked language modelling of both models on the same masked blocks."""
    weights, names, mask = weights_of(recipe), names_of(recipe), recipe.data.mask
    tokens = tokens_of(pair.tokenizer, str(recipe.teacher))
    train, held_out = (
        Masked(blocks, tokens, mask.share, mask.whole_words, mask.static, schedule.seed)
        for blocks in (corpus.train, corpus.held_out)
    )
    needs = Needs(masked_logits=True)
    _set_dropout(pair.models.values(), recipe)
    models = {role: capture(model, needs) for role, model in pair.models.items()}
    frozen = Teacher.frozen(pair.community.source, pair.community.model, needs, session) if pair.community else None
    temperature = recipe.temperature
    divergence = reverse_kl if recipe.community.printed_order else soft_kl

    def step(batch: Batch) -> StepLoss:
        of_frozen = frozen.signals(batch).logits if frozen is not None else None
        signals = {role: model(batch) for role, model in models.items()}
        labels_P = labels_of(signals[STUDENT])
        losses = _Losses(
            lambda logits_PV: masked_ce(logits_PV, labels_P),
            lambda of_PV, to_PV: soft_kl(of_PV, to_PV, temperature),
            lambda of_PV, to_PV: divergence(of_PV, to_PV, temperature),
        )
        return _summed(losses, {r: s.logits for r, s in signals.items()}, weights, names, of_frozen)

    job = Job(
        modules={names[role]: model for role, model in models.items()},
        step=step,
        examples=train,
        order=PassOrder(BatchOrder(len(train), schedule.batch_size, schedule.seed)),
        held_out=held_out,
        batch_weight=lambda batch: labelled("tokens", batch["labels"]),
        param_group=_paces(recipe),
    )
    for role, model in models.items():
        _freeze_idle(names[role], model, train.batch(np.arange(1)), learns=weights.reaches(role))
    return job


def on_task(task: PreparedTask, recipe: CotrainTaskRecipe, headed: Mapping[str, TaskModel]) -> tuple[Job, Schedule]:
    """Fine-tuning of both models on the same rows; the student is judged while they train.

    Args:
        headed: by role, on the CPU.
    """
    weights, names, kind = weights_of(recipe), names_of(recipe), task.data.task.kind
    _set_dropout((model.model for model in headed.values()), recipe)
    fits = {role: build_job(task, finetune_recipe(recipe, headed[role].source), headed[role]) for role in ROLES}
    models = {role: job.modules["model"] for role, (job, _) in fits.items()}
    plain, schedule = fits[STUDENT]

    def step(batch: Batch) -> StepLoss:
        signals = {role: model(batch) for role, model in models.items()}
        student = signals[STUDENT]
        labels, mask_BL = student.labels, batch["attention_mask"]
        if labels is None:
            return StepLoss(student.logits.new_zeros(()), {}, student.logits)
        losses = _Losses(
            lambda logits: hard_loss(kind, logits, labels, mask_BL),
            lambda of, to: soft_loss(kind, of, to, labels, mask_BL, recipe.temperature),
        )
        found = _summed(losses, {role: s.logits for role, s in signals.items()}, weights, names)
        return replace(found, outputs=student.logits)

    for role, model in models.items():
        if not weights.reaches(role):
            _freeze(names[role], model)
    modules = {names[role]: models[role] for role in ROLES}
    return replace(plain, modules=modules, step=step, param_group=_paces(recipe)), schedule


def finetune_recipe(recipe: CotrainTaskRecipe, model: str, *, label_map: bool = False) -> FinetuneRecipe:
    """What the parts that train one model on a task want to know; `head.label_map` is the teacher's."""
    shared = {key: getattr(recipe, key) for key in ("task", "keep", "choose_on", "data", "train", "measure")}
    head = recipe.head if label_map else recipe.head.model_copy(update={"label_map": None})
    return FinetuneRecipe(model=model, head=head, **shared)


def _summed(
    losses: _Losses,
    logits: Mapping[str, Tensor],
    weights: Weights,
    names: Mapping[str, str],
    of_frozen: Tensor | None = None,
) -> StepLoss:
    """The weighted sum, and every term as it is without its weight.

    What is held out is judged by the labels too where nothing is learned from them, so that runs can be compared.
    """
    terms = ctcd(losses.hard, losses.soft, logits, weights, of_frozen, losses.community)
    total = torch.stack([weight * value.float() for weight, value in terms.values()]).sum()
    values = {name: value for name, (_, value) in terms.items()}
    if not torch.is_grad_enabled():
        values |= {f"{role}/hard": losses.hard(logits[role]) for role in ROLES if f"{role}/hard" not in values}
    renamed = {name.partition("/"): value for name, value in values.items()}
    return StepLoss(total, {f"{names[role]}/{term}": value for (role, _, term), value in renamed.items()})


def _set_dropout(models: Iterable[PreTrainedModel], recipe: CotrainRecipe | CotrainTaskRecipe) -> None:
    if recipe.dropout is not None:
        for model in models:
            set_dropout(model, recipe.dropout)


def _paces(recipe: CotrainRecipe | CotrainTaskRecipe) -> Callable[[str], ParamGroup]:
    train, names = recipe.train, names_of(recipe)
    rates = {names[TEACHER]: train.teacher_lr, names[STUDENT]: train.student_lr}
    paces = {name: ParamGroup(lr=(rate or train.lr) / train.lr) for name, rate in rates.items()}
    return lambda parameter: paces[parameter.partition(".")[0]]


def _freeze_idle(name: str, model: Capture, batch: Batch, *, learns: bool) -> None:
    """Take out of the training what has no gradient: between several processes zeros would be summed and decayed."""
    if not learns:
        _freeze(name, model)
        return
    logits_PV = model(batch).logits
    assert logits_PV is not None
    for parameter in params_without_grad(dict(model.named_parameters()), logits_PV.sum()):
        model.get_parameter(parameter).requires_grad_(False)


def _freeze(name: str, model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    Progress.log(f"{name}: with these weights it has nothing to learn from and stays as it is")
