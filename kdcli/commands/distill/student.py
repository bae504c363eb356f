"""Distilling as the engine sees it: students, each with a loss, against the signals of one teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.capture import capture, params_without_grad
from kdcli.training.progress import Progress
from kdcli.types import Batch, Examples, Job, Needs, Objective, Order, Signals, StepLoss, real_tokens


class Student(nn.Module):
    """An encoder, the projections of its loss, and the loss: what is trained, clipped and checkpointed together."""

    def __init__(self, encoder: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self.captured = capture(encoder, objective.student_needs)
        self.projections = objective.projections

    @property
    def encoder(self) -> PreTrainedModel:
        """The student itself, a stock model."""
        return self.captured.model

    def forward(self, batch: Batch, of_teacher: Signals) -> Mapping[str, Tensor]:
        return self.objective.terms(of_teacher, self.captured(batch))


def needs_of(students: Mapping[str, Student]) -> Needs:
    """What all their losses together want of the teacher."""
    needs = Needs()
    for student in students.values():
        needs |= student.objective.teacher_needs
    return needs


def freeze_unreached(students: Mapping[str, Student], teacher: PreTrainedModel, batch: Batch) -> None:
    """Take what a student's loss does not reach out of the training, and say so.

    Args:
        teacher: on the CPU, as the students are.
        batch: any.
    """
    with torch.no_grad():
        signals = capture(teacher, needs_of(students))(batch)
    for name, student in students.items():
        loss = torch.stack(list(student(batch, signals).values())).sum()
        idle = params_without_grad(dict(student.named_parameters()), loss)
        for parameter in idle:
            student.get_parameter(parameter).requires_grad_(False)
        if idle:
            Progress.log(
                f"{name}: no gradient reaches {len(idle)} tensors behind the last signal; they keep their initial "
                f"values: {', '.join(sorted({_module_of(p) for p in idle}))}"
            )


def _module_of(parameter: str) -> str:
    return parameter.removeprefix("captured.model.").rsplit(".", 1)[0]


def distilling(
    students: Mapping[str, Student],
    signals: Callable[[Batch], Signals],
    examples: Examples,
    order: Order,
    held_out: Examples,
    batch_weight: Callable[[Batch], float] = real_tokens,
) -> Job:
    """What the engine is handed: every student's loss against one teacher's signals for the batch.

    Args:
        batch_weight: as of `Job`.
    """
    alone = len(students) == 1

    def step(batch: Batch) -> StepLoss:
        of_teacher = signals(batch)
        terms: dict[str, Tensor] = {}
        for name, student in students.items():
            found = student(batch, of_teacher)
            terms |= dict(found) if alone else {f"{name}/{term}": value for term, value in found.items()}
        return StepLoss(torch.stack(list(terms.values())).sum(), terms)

    return Job(
        modules=students,
        step=step,
        examples=examples,
        order=order,
        held_out=held_out,
        batch_weight=batch_weight,
    )
