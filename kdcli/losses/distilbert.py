"""DistilBERT: soft targets, masked language modelling and the direction of the last states.

Sanh et al. 2019, https://arxiv.org/abs/1910.01108, §3:

    L = 5 · T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)) + 2 · L_MLM + 1 · (1 - cos(h_T, h_S))

with T = 2. The first two terms are means over the masked tokens, and the third is a mean over all
real tokens. The paper gives no weights; these come from the authors' published command. Their code
can use the soft targets of all tokens, but kdcli always uses the masked tokens.

When to use: the student has its teacher's width and, as usual, half of its layers. Prefer `mlm-kd`,
which is the first term alone, for a student of another width. `minilm` needs no vocabulary head and
is the better default.

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
    """Settings of DistilBERT. Terms of weight 0 are not computed."""

    temperature: float = Field(2.0, gt=0)
    soft_weight: float = Field(5.0, ge=0)
    mlm_weight: float = Field(2.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its terms `soft`, `mlm` and `hidden` are weighted float32 scalars.

    The states [B, L, D] come from the last layers, and the logits [P, V] from the masked tokens.

    Raises ValueError if all weights are 0, or if hidden states of different widths would be
    compared.
    """
    if not (settings.soft_weight or settings.mlm_weight or settings.hidden_weight):
        raise ValueError(
            "loss.soft_weight, loss.mlm_weight and loss.hidden_weight are all 0: "
            "give at least one a value above 0"
        )
    if settings.hidden_weight and teacher.hidden != student.hidden:
        raise ValueError(
            "DistilBERT compares the directions of the last hidden states: the teacher has width "
            f"{teacher.hidden}, but the student has {student.hidden}. "
            f"Give the student {student.layers}x{teacher.hidden}, or set loss.hidden_weight=0"
        )

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        values = {}
        if settings.soft_weight:
            assert t.logits is not None
            assert s.logits is not None
            values["soft"] = settings.soft_weight * soft_kl(
                t.logits, s.logits, settings.temperature
            )
        if settings.mlm_weight:
            assert s.logits is not None
            values["mlm"] = settings.mlm_weight * masked_ce(s.logits, labels_of(s))
        if settings.hidden_weight:
            cosine = cosine_distance(t.hidden[teacher.layers], s.hidden[student.layers], s.mask)
            values["hidden"] = settings.hidden_weight * cosine
        return values

    def last_layer(model: ModelShape) -> frozenset[int]:
        return frozenset({model.layers} if settings.hidden_weight else ())

    t_needs = Needs(hidden=last_layer(teacher), masked_logits=settings.soft_weight > 0)
    s_logits = settings.soft_weight + settings.mlm_weight > 0
    s_needs = Needs(hidden=last_layer(student), masked_logits=s_logits)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )
