"""Embedding distillation: the vector that a student gives a text against its teacher's, s and t in R^D.

    L_vec = 1/B Σ_i (1 - cos(s_i, t_i))   or   1/(B·D) Σ_i ‖s_i - t_i‖²                       `vectors`
    L_sim = 1/B Σ_i KL(softmax_r(cos(t_i, a_r)/τ) ‖ softmax_r(cos(s_i, a_r)/τ))               `similarity`
    L_con = -1/B Σ_i log(exp(cos(s_i, p_i)/τ) / (exp(cos(s_i, p_i)/τ) + Σ_n exp(cos(s_i, n)/τ)))  `contrastive`

The anchors a_r are the teacher's vectors of fixed texts of the corpus (CompRess, https://arxiv.org/abs/2010.14713). p_i
is the teacher's vector of a text's positive, if it has one; the n are those of its negatives and the anchors (InfoNCE,
https://arxiv.org/abs/1807.03748). So a text's loss depends on no other text of its batch: micro-batches and processes
change nothing, and the teacher computes each vector once.

Relations: for embedding models only; the other methods compare token states and leave the pooling aside. `relations`
adds MiniLMv2's loss of the last layer and `hidden` the cosine distance of its token states; both need the
teacher in every step, with the student's tokenizer. `dimensions` (Matryoshka, https://arxiv.org/abs/2205.13147) takes
L_vec and L_sim of the first d components too, and their mean.

    method: embedding
    loss: {similarity_weight: 1.0, dimensions: [384, 256, 128, 64]}
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from kdcli.errors import UsageError
from kdcli.losses import minilmv2
from kdcli.losses.states import StateProjection, cosine_distance
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"sentences"})
OVER: Mapping[str, Count] = {
    **dict.fromkeys(("vectors", "similarity", "contrastive"), "rows"),
    **dict.fromkeys(("relations", "hidden"), "tokens"),
}


class Settings(Section):
    """`dimensions` null is all of them; else in falling order, the first one the vector's width."""

    vectors: Literal["cosine", "mse"] = "cosine"
    vectors_weight: float = Field(1.0, ge=0)
    similarity_weight: float = Field(0.0, ge=0)
    contrastive_weight: float = Field(0.0, ge=0)
    relations_weight: float = Field(0.0, ge=0)
    hidden_weight: float = Field(0.0, ge=0)
    temperature: float = Field(0.05, gt=0)
    dimensions: list[int] | None = None


def check_dimensions(loss: Mapping[str, Any], width: int) -> None:
    """Raises UsageError: `dimensions` that do not fall from the width of the vectors."""
    cuts = loss.get("dimensions") or [width]
    if cuts[0] != width or cuts[-1] < 1 or any(low >= high for high, low in pairwise(cuts)):
        raise UsageError(
            f"loss.dimensions {cuts} of vectors of width {width}",
            f"they must fall from the whole width, such as [{width}, {width // 2}]",
        )


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Raises ValueError: no term has a weight, or MiniLMv2's relation heads do not divide both widths."""
    weights = {
        n.removesuffix("_weight"): w
        for n, w in settings.model_dump().items()
        if n.endswith("_weight")
    }
    if not any(weights.values()):
        raise ValueError(
            f"every term of the loss has weight 0: set one of {', '.join(f'loss.{n}_weight' for n in weights)}"
        )
    projections = nn.ModuleDict()
    t_needs = s_needs = Needs()
    inner = None
    if settings.relations_weight:
        inner = minilmv2.objective(minilmv2.Settings(), teacher, student)
        t_needs, s_needs = inner.teacher_needs, inner.student_needs
    if settings.hidden_weight:
        t_needs |= Needs(hidden=frozenset({teacher.layers}))
        s_needs |= Needs(hidden=frozenset({student.layers}))
        if student.hidden != teacher.hidden:
            last = student.layers, teacher.layers
            projections["hidden"] = StateProjection(student.hidden, teacher.hidden, last)

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        assert t.pooled is not None
        assert s.pooled is not None
        s_BD, t_BD = s.pooled.float(), t.pooled.detach().float()
        cuts = settings.dimensions or [t_BD.shape[1]]
        named: dict[str, Tensor] = {}
        if weights["vectors"]:
            compare = cosine_of if settings.vectors == "cosine" else F.mse_loss
            named["vectors"] = torch.stack([compare(s_BD[:, :d], t_BD[:, :d]) for d in cuts]).mean()
        if weights["similarity"]:
            assert t.anchors is not None
            of_teacher = log_similarities(t_BD, t.anchors, settings.temperature)
            parts = [
                log_similarities(s_BD[:, :d], t.anchors[:, :d], settings.temperature) for d in cuts
            ]
            kls = [
                F.kl_div(part, of_teacher, reduction="batchmean", log_target=True) for part in parts
            ]
            named["similarity"] = torch.stack(kls).mean()
        if weights["contrastive"]:
            named["contrastive"] = info_nce(s_BD, t, settings.temperature)
        if inner is not None:
            named["relations"] = torch.stack(list(inner.terms(t, s).values())).sum()
        if weights["hidden"]:
            h_S = s.hidden[student.layers]
            h_S = projections["hidden"](h_S) if "hidden" in projections else h_S
            named["hidden"] = cosine_distance(t.hidden[teacher.layers], h_S, s.mask)
        return {name: weights[name] * value for name, value in named.items()}

    s_needs |= Needs(pooled=True)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=projections,
        terms=terms,
        over=OVER,
    )


def cosine_of(s_BD: Tensor, t_BD: Tensor) -> Tensor:
    """Mean of 1 - cos over the batch."""
    return (1 - F.cosine_similarity(s_BD, t_BD, dim=-1)).mean()


def log_similarities(x_BD: Tensor, anchors_RD: Tensor, temperature: float) -> Tensor:
    """Log of the distribution of a text's cosines over the anchors, [B, R]."""
    cosines_BR = F.normalize(x_BD, dim=-1) @ F.normalize(anchors_RD.float(), dim=-1).T
    return (cosines_BR / temperature).log_softmax(-1)


def info_nce(s_BD: Tensor, teacher: Signals, temperature: float) -> Tensor:
    """InfoNCE, 0 of a row without a positive; the mean over all rows."""
    assert teacher.positive is not None
    assert teacher.anchors is not None
    s_BD = F.normalize(s_BD, dim=-1)
    has_B = teacher.positive.abs().sum(-1) > 0
    right_B1 = (s_BD * F.normalize(teacher.positive.float(), dim=-1)).sum(-1, keepdim=True)
    wrong = [s_BD @ F.normalize(teacher.anchors.float(), dim=-1).T]
    if teacher.negatives is not None:
        n_BMD = F.normalize(teacher.negatives.float(), dim=-1)
        cosines_BM = torch.einsum("bd,bmd->bm", s_BD, n_BMD)
        wrong.append(cosines_BM.masked_fill(n_BMD.abs().sum(-1) == 0, -torch.inf))
    logits = torch.cat([right_B1, *wrong], -1) / temperature
    losses_B = logits.logsumexp(-1) - logits[:, 0]
    return (losses_B * has_B).mean()
