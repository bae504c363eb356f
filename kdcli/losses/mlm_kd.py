"""MLM-KD: the soft targets of a teacher's masked-language-model head, MiniLM's baseline.

Wang et al. 2020, https://arxiv.org/abs/2002.10957, §4.1:

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)), a mean over the masked tokens

When to use: only the models' predictions can be compared; their shapes may differ in every size.
Prefer `distilbert` if the widths are equal, because it adds labels and hidden states.

    method: mlm-kd
    loss: {temperature: 2.0}
"""

from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.vocabulary import soft_kl
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"soft": "labels"}
INPUTS = frozenset({"masked"})


class Settings(Section):
    """Settings of MLM-KD. `temperature` is T."""

    temperature: float = Field(1.0, gt=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss for two arbitrary shapes. Its term `soft` is a float32 scalar.

    It reads the logits [P, V] of the masked tokens, so both models need a head over the same
    vocabulary.
    """

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        assert t.logits is not None
        assert s.logits is not None
        return {"soft": soft_kl(t.logits, s.logits, settings.temperature)}

    needs = Needs(masked_logits=True)
    return Objective(
        teacher_needs=needs,
        student_needs=needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )
