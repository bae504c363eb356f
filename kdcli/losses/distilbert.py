"""DistilBERT: soft targets, masked language modelling and the direction of the last states (Sanh et al. 2019,
https://arxiv.org/abs/1910.01108, §3).

    L = 5 · T² · KL(softmax(z_T / T) ‖ softmax(z_S / T)) + 2 · L_MLM + 1 · (1 - cos(h_T, h_S)),  T = 2

The first two are means over the masked tokens, the third over all real ones. The paper gives no weights: they are those
of the command that its authors published. Their code takes soft targets of all tokens, or on request of the masked ones
alone; here they are always those of the masked ones, so that no other logits over the vocabulary are ever computed.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.types import ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"masked"})


class Settings(BaseModel):
    """Keys of the recipe's `loss:` section under `method: distilbert`. A term of weight 0 is not computed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: float = Field(2.0, gt=0)
    soft_weight: float = Field(5.0, ge=0)
    mlm_weight: float = Field(2.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Bind the loss to one teacher and one student.

    Raises:
        ValueError: all weights are 0; or the directions of states of two widths are to be compared.
    """
    if not (settings.soft_weight or settings.mlm_weight or settings.hidden_weight):
        raise ValueError("loss.soft_weight, loss.mlm_weight and loss.hidden_weight are all 0: nothing is left to learn")
    if settings.hidden_weight and teacher.hidden != student.hidden:
        raise ValueError(
            f"DistilBERT compares the directions of last hidden states: the teacher is {teacher.hidden} wide, the "
            f"student {student.hidden}. Give the student {student.layers}x{teacher.hidden}, or set "
            "loss.hidden_weight=0"
        )

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        found = {}
        if settings.soft_weight:
            assert t.logits is not None
            assert s.logits is not None
            found["soft"] = settings.soft_weight * soft_kl(t.logits, s.logits, settings.temperature)
        if settings.mlm_weight:
            assert s.logits is not None
            found["mlm"] = settings.mlm_weight * masked_ce(s.logits, labels_of(s))
        if settings.hidden_weight:
            cosine = cosine_distance(t.hidden[teacher.layers], s.hidden[student.layers], s.mask)
            found["hidden"] = settings.hidden_weight * cosine
        return found

    def needs(layers: int, *, logits: bool) -> Needs:
        return Needs(hidden=frozenset({layers} if settings.hidden_weight else ()), masked_logits=logits)

    return Objective(
        teacher_needs=needs(teacher.layers, logits=settings.soft_weight > 0),
        student_needs=needs(student.layers, logits=settings.soft_weight + settings.mlm_weight > 0),
        projections=nn.ModuleDict(),
        terms=terms,
    )


def cosine_distance(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """1 - cosine of two states, a mean over the real tokens, in float32; no gradient reaches the teacher.

    Args:
        mask: [B, L], non-zero at real tokens; or [B, 1, L, L], True where a token may attend; or None.
    """
    distance_BL = 1 - F.cosine_similarity(teacher_BLD.detach().float(), student_BLD.float(), dim=-1)
    if mask is None:
        return distance_BL.mean()
    real_BL = (mask if mask.dim() == 2 else mask.any(-1)[:, 0]).to(distance_BL.dtype)
    return (distance_BL * real_BL).sum() / real_BL.sum().clamp(min=1)
