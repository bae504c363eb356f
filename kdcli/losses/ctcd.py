"""CTCD: two models trained together that learn from each other (Lee et al. 2023, https://arxiv.org/abs/2311.02849, §3).

    L = [α_h H(y, p_S) + α_s KL(sg(p_T) ‖ p_S)] + [β_h H(y, p_T) + β_s KL(sg(p_S) ‖ p_T)]        eq. 1-4

H is the loss against the labels of masked tokens or of examples. sg stops the gradient: each bracket trains one model.
With a frozen pre-trained third model φ (Community KD, eq. 5) each bracket gains KL(p_φ ‖ p). Divergences are at
temperature T and times T², as in `kdcli.losses.vocabulary.soft_kl`.

Relations: take it when there is no teacher yet, or to improve a large model with a small one. With a finished teacher
the losses of `kdcli distill` cost one backward pass less.

    weights: [1, 1, 1, 4]
    mode: co-distillation
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

TEACHER, STUDENT = (
    "teacher",
    "student",
)  # the two models; they differ only in the weights of their terms

Mode = Literal["standalone", "one-way", "reversed", "co-distillation"]
# Mode -> the weights that it sets to 0.
SILENCED: dict[str, tuple[int, ...]] = {
    "standalone": (1, 3),
    "one-way": (3,),
    "reversed": (1,),
    "co-distillation": (),
}


@dataclass(frozen=True)
class Weights:
    """α_h, α_s, β_h, β_s and the weight of the frozen third model in both brackets."""

    student_hard: float
    student_soft: float
    teacher_hard: float
    teacher_soft: float
    community: float = 0.0

    @classmethod
    def of(cls, numbers: Sequence[float], mode: Mode, *, community: bool = False) -> Weights:
        """The weights α_h:α_s:β_h:β_s, with those that the mode silences set to 0. Raises UsageError: not four finite
        numbers from 0 on, or all of them are 0."""
        shown = ":".join(f"{number:g}" for number in numbers)
        if len(numbers) != 4 or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise UsageError(
                f"weights must be four numbers from 0 on, got {shown or 'none'}",
                "in the order student against labels : student from teacher : teacher against labels : teacher from "
                "student, for example 1:1:1:4",
            )
        kept = [
            0.0 if place in SILENCED[mode] else float(number)
            for place, number in enumerate(numbers)
        ]
        if not any(kept):
            raise UsageError(
                f"of the weights {shown} nothing is left to learn from in mode {mode}",
                "at least one of the four must be above 0, for example 1:1:1:4",
            )
        return cls(kept[0], kept[1], kept[2], kept[3], float(community))

    def hard(self, model: str) -> float:
        """Weight of a model's loss against the labels."""
        return self.student_hard if model == STUDENT else self.teacher_hard

    def soft(self, model: str) -> float:
        """Weight of what a model learns from the other one."""
        return self.student_soft if model == STUDENT else self.teacher_soft

    def reaches(self, model: str) -> bool:
        """Whether a model has a term at all."""
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
    """The terms of one forward pass of both models: name -> weight and value, a float32 scalar. The names are
    `MODEL/hard`, `MODEL/soft` and `MODEL/community`; a term of weight 0 is neither computed nor returned. `hard`:
    logits -> loss against the labels. `soft`: (logits to learn from, logits of the learner) -> divergence; no gradient
    may reach the first. `logits`: of `teacher` and `student`. `community`: logits of the frozen model; needed if its
    weight is not 0. `community_kl`: as `soft`, which is the default."""
    if weights.community and community is None:
        raise ValueError("the logits of the frozen model are needed for its term")
    terms: dict[str, tuple[float, Tensor]] = {}
    for model, other in ((TEACHER, STUDENT), (STUDENT, TEACHER)):
        if weight := weights.hard(model):
            terms[f"{model}/hard"] = weight, hard(logits[model])
        if weight := weights.soft(model):
            terms[f"{model}/soft"] = weight, soft(logits[other], logits[model])
        if community is not None and weights.community:
            terms[f"{model}/community"] = (
                weights.community,
                (community_kl or soft)(community, logits[model]),
            )
    return terms


def reverse_kl(frozen_PV: Tensor, model_PV: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(model / T) ‖ softmax(frozen / T)), a mean over P positions: eq. 5 in its printed order. Logits
    are in the compute dtype, T > 0; no gradient reaches the frozen model."""
    rows, words = model_PV.shape
    at_once = max(1, CHUNK_LOGITS.get(model_PV.device.type, CHUNK_LOGITS["cuda"]) // words)
    frozen_PV = frozen_PV.detach()

    def chunk_kl(frozen_CV: Tensor, model_CV: Tensor) -> Tensor:
        log_p_CV = F.log_softmax(model_CV.float() / temperature, -1)
        log_q_CV = F.log_softmax(frozen_CV.float() / temperature, -1)
        return (log_p_CV.exp() * (log_p_CV - log_q_CV)).sum()

    total = torch.zeros((), device=model_PV.device)
    # Not slices: the gradient of each slice would be as large as all rows together.
    for frozen_CV, model_CV in zip(
        torch.split(frozen_PV, at_once), torch.split(model_PV, at_once), strict=True
    ):
        # Recomputed in the backward pass, so that float32 copies of few rows exist at once.
        total = total + checkpoint(
            chunk_kl, frozen_CV, model_CV, use_reentrant=False, preserve_rng_state=False
        )
    return total * (temperature**2 / max(1, rows))
