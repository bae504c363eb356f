"""MLM-KD: the soft targets of a teacher's masked language model head, and nothing else.

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)), a mean over the masked tokens

The baseline of MiniLM (Wang et al. 2020, https://arxiv.org/abs/2002.10957, §4.1) that needs no more of the teacher than
its predictions, and so lets every size of student differ.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from kdcli.losses.vocabulary import soft_kl
from kdcli.types import ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"masked"})


class Settings(BaseModel):
    """Keys of the recipe's `loss:` section under `method: mlm-kd`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: float = Field(1.0, gt=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """The loss for any two shapes; both models need a head over the same vocabulary."""

    def terms(of_teacher: Signals, of_student: Signals) -> dict[str, Tensor]:
        assert of_teacher.logits is not None
        assert of_student.logits is not None
        return {"soft": soft_kl(of_teacher.logits, of_student.logits, settings.temperature)}

    needs = Needs(masked_logits=True)
    return Objective(teacher_needs=needs, student_needs=needs, projections=nn.ModuleDict(), terms=terms)
