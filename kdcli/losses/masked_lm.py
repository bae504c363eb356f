"""Masked language modelling, without a teacher.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805, §3.1:

    L = - log softmax(z_S)[y], a mean over the masked tokens with their original ids y

When to use: as the first step of pre-trained distillation (Turc et al. 2019,
https://arxiv.org/abs/1908.08962), before a task's soft targets, and as the baseline that every
distillation on masked text has to beat. Prefer `mlm-kd` if a teacher is available.

    method: masked-lm
    loss: {}
"""

from torch import Tensor, nn

from kdcli.losses.vocabulary import labels_of, masked_ce
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"mlm": "labels"}
INPUTS = frozenset({"masked"})


class Settings(Section):
    """Masked language modelling has no settings."""


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the cross-entropy at the masked tokens, a float32 scalar. The teacher is not run."""

    def terms(teacher: Signals, student: Signals) -> dict[str, Tensor]:
        return masked_lm_term(1.0, student)

    needs = Needs(masked_logits=True)
    return Objective(
        teacher_needs=Needs(),
        student_needs=needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )


def masked_lm_term(weight: float, student: Signals) -> dict[str, Tensor]:
    """Return the term `mlm` of a loss, or nothing if the weight is 0.

    The term is a float32 scalar and a mean over the masked tokens. It reads the student's logits
    [P, V] and labels.
    """
    if not weight:
        return {}
    assert student.logits is not None
    return {"mlm": weight * masked_ce(student.logits, labels_of(student))}
