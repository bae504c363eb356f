"""DistilBERT: soft targets, masked language modelling and the direction of the last states (Sanh et al. 2019,
https://arxiv.org/abs/1910.01108, §3).

    L = 5 · T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)) + 2 · L_MLM + 1 · (1 - cos(h_T, h_S)),  T = 2

The first two are means over the masked tokens, the third over all real ones. The paper gives no weights; these are from
the authors' published command. Their code can take soft targets of all tokens; here they are always of the masked.

Relations: take it for a student of its teacher's width with the usual half of the layers. `mlm-kd` is its first term
alone and takes any width; `minilm` needs no vocabulary head and is the better default.

    method: distilbert
    loss: {temperature: 2.0, soft_weight: 5.0, mlm_weight: 2.0, hidden_weight: 1.0}
"""

from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.states import cosine_distance
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"soft": "labels", "mlm": "labels", "hidden": "tokens"}
INPUTS = frozenset({"masked"})


class Settings(Section):
    """A term of weight 0 is not computed."""

    temperature: float = Field(2.0, gt=0)
    soft_weight: float = Field(5.0, ge=0)
    mlm_weight: float = Field(2.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Raises ValueError if all weights are 0, or if states of two widths are to be compared."""
    if not (settings.soft_weight or settings.mlm_weight or settings.hidden_weight):
        raise ValueError(
            "loss.soft_weight, loss.mlm_weight and loss.hidden_weight are all 0: nothing is left to learn"
        )
    if settings.hidden_weight and teacher.hidden != student.hidden:
        raise ValueError(
            f"DistilBERT compares the directions of last hidden states: the teacher is {teacher.hidden} wide, the "
            f"student {student.hidden}. Give the student {student.layers}x{teacher.hidden}, or set "
            "loss.hidden_weight=0"
        )

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        named = {}
        if settings.soft_weight:
            assert t.logits is not None
            assert s.logits is not None
            named["soft"] = settings.soft_weight * soft_kl(t.logits, s.logits, settings.temperature)
        if settings.mlm_weight:
            assert s.logits is not None
            named["mlm"] = settings.mlm_weight * masked_ce(s.logits, labels_of(s))
        if settings.hidden_weight:
            cosine = cosine_distance(t.hidden[teacher.layers], s.hidden[student.layers], s.mask)
            named["hidden"] = settings.hidden_weight * cosine
        return named

    t_last, s_last = (
        frozenset({net.layers} if settings.hidden_weight else ()) for net in (teacher, student)
    )
    t_needs = Needs(hidden=t_last, masked_logits=settings.soft_weight > 0)
    s_needs = Needs(hidden=s_last, masked_logits=settings.soft_weight + settings.mlm_weight > 0)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )
