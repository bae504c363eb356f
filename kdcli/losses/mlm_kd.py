"""MLM-KD: the soft targets of a teacher's masked-language-model head, the baseline of MiniLM (Wang et al. 2020,
https://arxiv.org/abs/2002.10957, §4.1).

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)), a mean over the masked tokens

Relations: take it when only the teacher's predictions are comparable, for the shapes may differ in every size. With
equal widths `distilbert` adds labels and hidden states.

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
    """`temperature` is T."""

    temperature: float = Field(1.0, gt=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """The loss for any two shapes; both models need a head over the same vocabulary."""

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
