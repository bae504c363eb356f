"""Masked language modelling (Devlin et al. 2018, https://arxiv.org/abs/1810.04805, §3.1), without any teacher.

The first step of pre-trained distillation (Turc et al. 2019, https://arxiv.org/abs/1908.08962), in which a small model
is pre-trained itself before a teacher's soft targets on a task are learned; and what a distillation has to beat.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from kdcli.losses.vocabulary import labels_of, masked_ce
from kdcli.types import ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"masked"})


class Settings(BaseModel):
    """Keys of the recipe's `loss:` section under `method: masked-lm`: there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Cross-entropy at the masked tokens; nothing is asked of the teacher."""

    def terms(of_teacher: Signals, of_student: Signals) -> dict[str, Tensor]:
        assert of_student.logits is not None
        return {"mlm": masked_ce(of_student.logits, labels_of(of_student))}

    return Objective(
        teacher_needs=Needs(), student_needs=Needs(masked_logits=True), projections=nn.ModuleDict(), terms=terms
    )
