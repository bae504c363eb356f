"""CTCD: two models trained together that learn from each other (Lee et al. 2023, https://arxiv.org/abs/2311.02849, §3).

    L = [α_h H(y, p_S) + α_s KL(sg(p_T) ‖ p_S)] + [β_h H(y, p_T) + β_s KL(sg(p_S) ‖ p_T)]        eq. 1–4

H is the loss against the labels: of masked tokens in pre-training, of the examples in fine-tuning. sg stops the
gradient, so each bracket moves one model. Each model is run once: what it is judged by is also what it teaches. With a
frozen pre-trained third model φ (Community KD, eq. 5) each bracket gains KL(p_φ ‖ p).

Softmaxes are at temperature T and every divergence is times T², as `kdcli.losses.vocabulary.soft_kl` has it, so that
the weights mean the same at every temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kdcli.errors import UsageError
from kdcli.losses.vocabulary import CHUNK_LOGITS

TEACHER, STUDENT = "teacher", "student"
"""The two models. They differ in nothing but the weights of their terms; eq. 5 calls them students both."""

Mode = Literal["standalone", "one-way", "reversed", "co-distillation"]
SILENCED: Mapping[str, tuple[int, ...]] = {
    "standalone": (1, 3),
    "one-way": (3,),
    "reversed": (1,),
    "co-distillation": (),
}
"""Mode → which of the four weights it sets to 0."""


@dataclass(frozen=True)
class Weights:
    """α_h, α_s, β_h and β_s, and the weight of the frozen third model in both brackets."""

    student_hard: float
    student_soft: float
    teacher_hard: float
    teacher_soft: float
    community: float = 0.0

    @classmethod
    def of(cls, numbers: Sequence[float], mode: Mode, *, community: bool = False) -> Weights:
        """Weights as they are written, α_h:α_s:β_h:β_s, without those that the mode sets to 0.

        Raises:
            UsageError: not four finite numbers from 0 on, or nothing left to learn from.
        """
        shown = ":".join(f"{number:g}" for number in numbers)
        if len(numbers) != 4 or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise UsageError(
                f"weights must be four numbers from 0 on, got {shown or 'none'}",
                "in the order student against labels : student from teacher : teacher against labels : teacher from "
                "student, for example 1:1:1:4",
            )
        kept = [0.0 if place in SILENCED[mode] else float(number) for place, number in enumerate(numbers)]
        if not any(kept):
            raise UsageError(
                f"of the weights {shown} nothing is left to learn from in mode {mode}",
                "at least one of the four must be above 0, for example 1:1:1:4",
            )
        return cls(kept[0], kept[1], kept[2], kept[3], float(community))

    def hard(self, model: str) -> float:
        """Of the loss of a model against the labels."""
        return self.student_hard if model == STUDENT else self.teacher_hard

    def soft(self, model: str) -> float:
        """Of what a model learns from the other one."""
        return self.student_soft if model == STUDENT else self.teacher_soft

    def reaches(self, model: str) -> bool:
        """Whether a model has anything to learn from."""
        return self.hard(model) + self.soft(model) + self.community > 0

    @property
    def mutual(self) -> bool:
        """Whether one of the two learns from the other."""
        return self.student_soft + self.teacher_soft > 0


def ctcd(
    hard: Callable[[Tensor], Tensor],
    soft: Callable[[Tensor, Tensor], Tensor],
    logits: Mapping[str, Tensor],
    weights: Weights,
    community: Tensor | None = None,
    community_kl: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, tuple[float, Tensor]]:
    """The terms of one forward pass of both models: name → its weight and its value, a float32 scalar.

    Args:
        hard: logits → loss against the labels.
        soft: (of whom to learn, who learns) → divergence; its gradient must not reach the first.
        logits: of `teacher` and `student`, of any one shape.
        community: logits of the frozen model; needed where its weight is not 0.
        community_kl: as `soft`; None takes `soft`.

    Returns:
        `MODEL/hard`, `MODEL/soft` and `MODEL/community` of both, without what has no weight: that is not computed.
    """
    teacher, student, terms = logits[TEACHER], logits[STUDENT], dict[str, tuple[float, Tensor]]()
    if weights.community and community is None:
        raise ValueError("the logits of the frozen model are needed for its term")
    frozen_kl = community_kl or soft
    if weights.teacher_hard:
        terms["teacher/hard"] = weights.teacher_hard, hard(teacher)
    if weights.teacher_soft:
        terms["teacher/soft"] = weights.teacher_soft, soft(student, teacher)
    if community is not None and weights.community:
        terms["teacher/community"] = weights.community, frozen_kl(community, teacher)
    if weights.student_hard:
        terms["student/hard"] = weights.student_hard, hard(student)
    if weights.student_soft:
        terms["student/soft"] = weights.student_soft, soft(teacher, student)
    if community is not None and weights.community:
        terms["student/community"] = weights.community, frozen_kl(community, student)
    return terms


def reverse_kl(frozen_PV: Tensor, model_PV: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(model / T) ‖ softmax(frozen / T)), a mean over P positions: eq. 5 in the order it is printed in.

    Chunks of rows are computed again for their gradients, so that float32 copies of a few rows exist at once. No
    gradient reaches the frozen model.

    Args:
        frozen_PV: logits of the model that is learned from.
        model_PV: logits of the one that learns, in the compute dtype.
        temperature: T > 0.
    """
    rows, words = model_PV.shape
    at_once = max(1, CHUNK_LOGITS.get(model_PV.device.type, CHUNK_LOGITS["cuda"]) // words)
    frozen_PV = frozen_PV.detach()

    def of_rows(frozen_CV: Tensor, model_CV: Tensor) -> Tensor:
        log_p_CV = F.log_softmax(model_CV.float() / temperature, -1)
        log_q_CV = F.log_softmax(frozen_CV.float() / temperature, -1)
        return (log_p_CV.exp() * (log_p_CV - log_q_CV)).sum()

    total = torch.zeros((), device=model_PV.device)
    # Not slices: the gradient of each would be a tensor as large as all rows together.
    for frozen_CV, model_CV in zip(torch.split(frozen_PV, at_once), torch.split(model_PV, at_once), strict=True):
        total = total + checkpoint(of_rows, frozen_CV, model_CV, use_reentrant=False, preserve_rng_state=False)
    return total * (temperature**2 / max(1, rows))
