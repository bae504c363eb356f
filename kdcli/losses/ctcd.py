"""CTCD: train a teacher and a student together so that each learns from the other.

Lee et al. 2023, https://arxiv.org/abs/2311.02849, §3:

    L = [α_h H(y, p_S) + α_s KL(sg(p_T) ‖ p_S)] + [β_h H(y, p_T) + β_s KL(sg(p_S) ‖ p_T)]    eq. 1-4

H is the loss against the labels of masked tokens or of examples. sg stops the
gradient, so each bracket trains one model. With a frozen pre-trained third model φ (Community KD,
eq. 5), each bracket gains KL(p_φ ‖ p). Divergences use temperature T and are multiplied by T², as
in `kdcli.losses.vocabulary.soft_kl`.

When to use: there is no teacher yet, or a small model should improve a large one. Prefer the losses
of `kdcli distill` if the teacher is finished, because they need one backward pass less.

    weights: [1, 1, 1, 4]
    mode: co-distillation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kdcli.errors import UsageError
from kdcli.losses.vocabulary import CHUNK_LOGITS

# The two models. They differ only in the weights of their terms.
TEACHER_MODEL = "teacher"
STUDENT_MODEL = "student"

OutputsT = TypeVar("OutputsT")
Mode = Literal["standalone", "one-way", "reversed", "co-distillation"]
# Mode -> positions of the weights that it sets to 0.
ZEROED: dict[str, tuple[int, ...]] = {
    "standalone": (1, 3),
    "one-way": (3,),
    "reversed": (1,),
    "co-distillation": (),
}


@dataclass(frozen=True)
class Weights:
    """The weights of the terms.

    Attributes:
        student_hard: α_h.
        student_soft: α_s.
        teacher_hard: β_h.
        teacher_soft: β_s.
        community: Weight of the frozen third model, in both brackets.
    """

    student_hard: float
    student_soft: float
    teacher_hard: float
    teacher_soft: float
    community: float = 0.0

    @classmethod
    def of(cls, numbers: Sequence[float], mode: Mode, *, community: bool = False) -> Weights:
        """Make the weights from α_h:α_s:β_h:β_s, and set to 0 the ones that the mode does not use.

        Raises UsageError if they are not four finite numbers of at least 0, or if all of them are
        0.
        """
        text = ":".join(f"{number:g}" for number in numbers)
        if len(numbers) != 4 or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise UsageError(
                f"weights must be four numbers of at least 0, got {text or 'none'}",
                "give them in the order student against labels : student from teacher : "
                "teacher against labels : teacher from student, for example 1:1:1:4",
            )
        zeroed = ZEROED[mode]
        kept = [0.0 if i in zeroed else float(number) for i, number in enumerate(numbers)]
        if not any(kept):
            raise UsageError(
                f"weights {text}: every weight that mode {mode} uses is 0",
                "give at least one of them a value above 0, for example 1:1:1:4",
            )
        return cls(kept[0], kept[1], kept[2], kept[3], float(community))

    def hard(self, model: str) -> float:
        """Return the weight of a model's loss against the labels."""
        return self.student_hard if model == STUDENT_MODEL else self.teacher_hard

    def soft(self, model: str) -> float:
        """Return the weight of a model's divergence from the other model."""
        return self.student_soft if model == STUDENT_MODEL else self.teacher_soft

    def reaches(self, model: str) -> bool:
        """Return whether any term trains a model."""
        return self.hard(model) + self.soft(model) + self.community > 0

    @property
    def mutual(self) -> bool:
        """Whether either model learns from the other."""
        return self.student_soft + self.teacher_soft > 0


def ctcd(
    hard: Callable[[OutputsT], Tensor],
    soft: Callable[[OutputsT, OutputsT], Tensor],
    outputs: Mapping[str, OutputsT],
    weights: Weights,
    community: OutputsT | None = None,
    community_kl: Callable[[OutputsT, OutputsT], Tensor] | None = None,
) -> dict[str, tuple[float, Tensor]]:
    """Compute the weighted terms of one forward pass of both models (eq. 1-5).

    Args:
        hard: A model's outputs -> its loss against the labels, a float32 scalar.
        soft: (outputs to learn from, the learner's outputs) -> their divergence, a float32 scalar.
            No gradient may reach the first argument.
        outputs: Outputs of `teacher` and `student`.
        weights: The weights of the terms.
        community: Outputs of the frozen third model; needed if its weight is not 0.
        community_kl: The divergence from the frozen model; `soft` by default.

    Returns:
        Name -> weight and value. The names are `MODEL/hard`, `MODEL/soft` and `MODEL/community`.
        A term of weight 0 is neither computed nor returned.

    Raises ValueError if the frozen model has a weight but no outputs.
    """
    if weights.community and community is None:
        raise ValueError("weights.community is above 0: the frozen model's logits are required")
    terms: dict[str, tuple[float, Tensor]] = {}
    for model, other in ((TEACHER_MODEL, STUDENT_MODEL), (STUDENT_MODEL, TEACHER_MODEL)):
        if weight := weights.hard(model):
            terms[f"{model}/hard"] = weight, hard(outputs[model])
        if weight := weights.soft(model):
            terms[f"{model}/soft"] = weight, soft(outputs[other], outputs[model])
        if community is not None and weights.community:
            divergence = (community_kl or soft)(community, outputs[model])
            terms[f"{model}/community"] = weights.community, divergence
    return terms


def reverse_kl(frozen_PV: Tensor, model_PV: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(softmax(model / T) ‖ softmax(frozen / T)), a mean over P positions.

    This is eq. 5 in its printed order. The logits [P, V] are in the compute dtype, and T > 0. The
    result is a float32 scalar, which is 0 if P is 0. No gradient reaches the frozen model.
    """
    rows, words = model_PV.shape
    at_once = max(1, CHUNK_LOGITS.get(model_PV.device.type, CHUNK_LOGITS["cuda"]) // words)
    frozen_PV = frozen_PV.detach()

    def chunk_kl(frozen_CV: Tensor, model_CV: Tensor) -> Tensor:
        log_p_CV = F.log_softmax(model_CV.float() / temperature, -1)
        log_q_CV = F.log_softmax(frozen_CV.float() / temperature, -1)
        return (log_p_CV.exp() * (log_p_CV - log_q_CV)).sum()

    total = torch.zeros((), device=model_PV.device)
    # Split instead of slicing, because the gradient of each slice would be as large as all rows.
    frozen_chunks = torch.split(frozen_PV, at_once)
    model_chunks = torch.split(model_PV, at_once)
    for frozen_CV, model_CV in zip(frozen_chunks, model_chunks, strict=True):
        # Recompute each chunk in the backward pass, so that float32 copies exist of few rows only.
        total = total + checkpoint(
            chunk_kl, frozen_CV, model_CV, use_reentrant=False, preserve_rng_state=False
        )
    return total * (temperature**2 / max(1, rows))
