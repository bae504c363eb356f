"""Masked language modelling (Devlin et al. 2018, https://arxiv.org/abs/1810.04805, §3.1), without a teacher.

Relations: the first step of pre-trained distillation (Turc et al. 2019, https://arxiv.org/abs/1908.08962), before a
task's soft targets; and the baseline that every distillation on masked text has to beat.

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
    """It has no settings."""


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Cross-entropy at the masked tokens; the teacher is not run."""

    def terms(of_teacher: Signals, of_student: Signals) -> dict[str, Tensor]:
        return masked_lm_term(1.0, of_student)

    needs = Needs(masked_logits=True)
    return Objective(
        teacher_needs=Needs(),
        student_needs=needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )


def masked_lm_term(weight: float, student: Signals) -> dict[str, Tensor]:
    """The term `mlm` of a loss, a mean over masked tokens; nothing with weight 0."""
    if not weight:
        return {}
    assert student.logits is not None
    return {"mlm": weight * masked_ce(student.logits, labels_of(student))}
