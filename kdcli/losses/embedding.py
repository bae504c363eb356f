"""Embedding distillation: compare a student's vector of a text with its teacher's.

With the vectors s of the student and t of the teacher in R^D:

    `vectors`      L_vec = 1/B Σ_i (1 - cos(s_i, t_i))   or   1/(B·D) Σ_i ‖s_i - t_i‖²
    `similarity`   L_sim = 1/B Σ_i KL(softmax_r(cos(t_i, a_r)/τ) ‖ softmax_r(cos(s_i, a_r)/τ))
    `pairs`        L_pair = 1/B Σ_i KL(softmax_j≠i(cos(t_i, t_j)/τ) ‖ softmax_j≠i(cos(s_i, s_j)/τ))
    `contrastive`  L_con = -1/B Σ_i log(e(p_i) / (e(p_i) + Σ_n e(n))),  e(x) = exp(cos(s_i, x)/τ)

The anchors a_r are the teacher's vectors of fixed texts of the corpus (CompRess,
https://arxiv.org/abs/2010.14713). p_i is the teacher's vector of the text's positive, if the text
has one. The n are the vectors of its negatives and the anchors (InfoNCE,
https://arxiv.org/abs/1807.03748), except the anchors that are the text itself or its positive.

Except for `pairs`, these terms compare a student's vector only with vectors of the teacher, which
are computed once. `pairs` compares the student's vectors of a batch with each other, as a search
among them does (probabilistic knowledge transfer, https://arxiv.org/abs/1803.10837). So it is the
only term that changes with the size of a micro-batch or the number of processes.

`relations` adds MiniLMv2's loss of the last layer, and `hidden` adds the cosine distance of its
token states. Both run the teacher in every step, on the student's tokens. `dimensions` (Matryoshka,
https://arxiv.org/abs/2205.13147) averages L_vec, L_sim and L_pair over several prefixes of the
vectors.

When to use: the teacher is an embedding model. Prefer `minilm` or `tinybert` for other encoders:
they compare token states and ignore the pooling.

    method: embedding
    loss: {similarity_weight: 1.0, dimensions: [384, 256, 128, 64]}
"""

from collections.abc import Mapping, Sequence
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
    **dict.fromkeys(("vectors", "similarity", "pairs", "contrastive"), "rows"),
    **dict.fromkeys(("relations", "hidden"), "tokens"),
}

SAME_TEXT = 1 - 1e-5
"""Cosine above which two vectors of one teacher are taken for the vectors of one text."""
MIN_TEXTS_FOR_PAIRS = 3
"""Minimum number of texts in a micro-batch for `pairs_weight`."""


class Settings(Section):
    """Settings of embedding distillation.

    `dimensions` lists the lengths of the compared prefixes in decreasing order, the first one being
    the width of the vectors. Null compares whole vectors only.
    """

    vectors: Literal["cosine", "mse"] = "cosine"
    vectors_weight: float = Field(1.0, ge=0)
    similarity_weight: float = Field(0.0, ge=0)
    pairs_weight: float = Field(0.0, ge=0)
    contrastive_weight: float = Field(0.0, ge=0)
    relations_weight: float = Field(0.0, ge=0)
    hidden_weight: float = Field(0.0, ge=0)
    temperature: float = Field(0.05, gt=0)
    dimensions: list[int] | None = None


def check_dimensions(loss: Mapping[str, Any], width: int) -> None:
    """Check that `dimensions` decreases from the width of the vectors.

    Raises UsageError if it does not.
    """
    cuts = loss.get("dimensions") or [width]
    if cuts[0] != width or cuts[-1] < 1 or any(low >= high for high, low in pairwise(cuts)):
        raise UsageError(
            f"loss.dimensions is {cuts}, but the vectors have width {width}",
            f"give decreasing numbers that start with the width, such as [{width}, {width // 2}]",
        )


def check_pairs(loss: Mapping[str, Any], texts: int) -> None:
    """Check that micro-batches have enough texts for `pairs_weight`.

    `texts` is the number of texts in the smallest one. Raises UsageError if it is too small.
    """
    if loss.get("pairs_weight") and texts < MIN_TEXTS_FOR_PAIRS:
        raise UsageError(
            f"loss.pairs_weight needs at least {MIN_TEXTS_FOR_PAIRS} texts in a micro-batch, but "
            f"there are only {texts}",
            "raise train.batch_size or train.micro_batch_size, or set loss.pairs_weight to 0",
        )


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its terms are weighted float32 scalars with the names of their weights.

    They read the vectors [B, D] of both models and, for `relations` and `hidden`, the signals of
    the last layers.

    Raises ValueError if every weight is 0, or if MiniLMv2's relation heads do not divide both
    widths.
    """
    weights = {
        "vectors": settings.vectors_weight,
        "similarity": settings.similarity_weight,
        "pairs": settings.pairs_weight,
        "contrastive": settings.contrastive_weight,
        "relations": settings.relations_weight,
        "hidden": settings.hidden_weight,
    }
    if not any(weights.values()):
        keys = ", ".join(f"loss.{name}_weight" for name in weights)
        raise ValueError(f"every term of the loss has weight 0: set one of {keys}")
    projections = nn.ModuleDict()
    t_needs = s_needs = Needs()
    relations = None
    if settings.relations_weight:
        relations = minilmv2.objective(minilmv2.Settings(), teacher, student)
        t_needs, s_needs = relations.teacher_needs, relations.student_needs
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
        cuts, temperature = settings.dimensions or [t_BD.shape[1]], settings.temperature
        values: dict[str, Tensor] = {}
        # Cosines in half precision would be too coarse for the temperature.
        with torch.autocast(s_BD.device.type, enabled=False):
            if weights["vectors"]:
                compare = mean_cosine_distance if settings.vectors == "cosine" else F.mse_loss
                losses = [compare(s_BD[:, :d], t_BD[:, :d]) for d in cuts]
                values["vectors"] = torch.stack(losses).mean()
            if weights["similarity"]:
                assert t.anchors is not None
                values["similarity"] = similarity_loss(s_BD, t_BD, t.anchors, cuts, temperature)
            if weights["pairs"]:
                values["pairs"] = pairs_loss(s_BD, t_BD, cuts, temperature)
            if weights["contrastive"]:
                values["contrastive"] = info_nce(s_BD, t_BD, t, temperature)
        if relations is not None:
            values["relations"] = torch.stack(list(relations.terms(t, s).values())).sum()
        if weights["hidden"]:
            h_S = s.hidden[student.layers]
            h_S = projections["hidden"](h_S) if "hidden" in projections else h_S
            values["hidden"] = cosine_distance(t.hidden[teacher.layers], h_S, s.mask)
        return {name: weights[name] * value for name, value in values.items()}

    s_needs |= Needs(pooled=True)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=projections,
        terms=terms,
        over=OVER,
    )


def mean_cosine_distance(s_BD: Tensor, t_BD: Tensor) -> Tensor:
    """Return the mean of 1 - cos over the batch, a scalar, for vectors [B, D]."""
    return (1 - F.cosine_similarity(s_BD, t_BD, dim=-1)).mean()


def similarity_loss(
    s_BD: Tensor, t_BD: Tensor, anchors_RD: Tensor, cuts: Sequence[int], temperature: float
) -> Tensor:
    """Compute L_sim, a scalar and a mean over the batch and over several prefixes.

    Args:
        s_BD: The student's vectors.
        t_BD: The teacher's vectors of the same texts, which are compared as a whole.
        anchors_RD: The anchors.
        cuts: Lengths of the prefixes of the student's vectors and the anchors.
        temperature: τ > 0.
    """
    log_t_BR = log_similarities(t_BD, anchors_RD, temperature)
    divergences = []
    for d in cuts:
        log_s_BR = log_similarities(s_BD[:, :d], anchors_RD[:, :d], temperature)
        divergences.append(F.kl_div(log_s_BR, log_t_BR, reduction="batchmean", log_target=True))
    return torch.stack(divergences).mean()


def pairs_loss(s_BD: Tensor, t_BD: Tensor, cuts: Sequence[int], temperature: float) -> Tensor:
    """Compute L_pair, a scalar and a mean over the batch and over several prefixes.

    With one or two texts it is 0, because none has several others to compare.

    Args:
        s_BD: The student's vectors.
        t_BD: The teacher's vectors of the same texts, which are compared as a whole.
        cuts: Lengths of the prefixes of the student's vectors.
        temperature: τ > 0.
    """
    if len(s_BD) < 2:
        return 0 * s_BD.sum()
    log_t_BR = log_similarities_of_others(t_BD, temperature)
    divergences = []
    for d in cuts:
        log_s_BR = log_similarities_of_others(s_BD[:, :d], temperature)
        divergences.append(F.kl_div(log_s_BR, log_t_BR, reduction="batchmean", log_target=True))
    return torch.stack(divergences).mean()


def log_similarities_of_others(x_BD: Tensor, temperature: float) -> Tensor:
    """Return the logarithm of each text's softmax distribution over the other texts, [B, B - 1].

    The vectors are [B, D], and `temperature` is τ > 0.
    """
    unit_BD = F.normalize(x_BD, dim=-1)
    count = len(unit_BD)
    # Without its last entry, every (B + 1)-th entry of the flat matrix is on the diagonal.
    flat = (unit_BD @ unit_BD.T).flatten()[:-1].view(count - 1, count + 1)
    cosines_BR = flat[:, 1:].reshape(count, count - 1)
    return (cosines_BR / temperature).log_softmax(-1)


def log_similarities(x_BD: Tensor, anchors_RD: Tensor, temperature: float) -> Tensor:
    """Return the logarithm of each text's softmax distribution over the anchors, [B, R].

    The vectors are [B, D], and the anchors are [R, D]. `temperature` is τ > 0.
    """
    cosines_BR = F.normalize(x_BD, dim=-1) @ F.normalize(anchors_RD.float(), dim=-1).T
    return (cosines_BR / temperature).log_softmax(-1)


def info_nce(s_BD: Tensor, t_BD: Tensor, teacher: Signals, temperature: float) -> Tensor:
    """Compute L_con, a float32 scalar and a mean over all rows.

    A row without a positive counts as 0. An anchor is not a negative of a row if the teacher's
    vectors show that it is the row's own text or its positive.

    Args:
        s_BD: The student's vectors.
        t_BD: The teacher's vectors of the same texts.
        teacher: The teacher's `anchors` [R, D], `positive` [B, D] and, if there are any,
            `negatives` [B, M, D].
        temperature: τ > 0.
    """
    assert teacher.positive is not None
    assert teacher.anchors is not None
    s_BD, t_BD = F.normalize(s_BD, dim=-1), F.normalize(t_BD, dim=-1)
    p_BD = F.normalize(teacher.positive.float(), dim=-1)
    anchors_DR = F.normalize(teacher.anchors.float(), dim=-1).T
    has_positive_B = teacher.positive.abs().sum(-1) > 0
    positive_B1 = (s_BD * p_BD).sum(-1, keepdim=True)
    nearest_BR = torch.maximum(t_BD @ anchors_DR, p_BD @ anchors_DR)
    negatives = [(s_BD @ anchors_DR).masked_fill(nearest_BR > SAME_TEXT, -torch.inf)]
    if teacher.negatives is not None:
        n_BMD = F.normalize(teacher.negatives.float(), dim=-1)
        cosines_BM = torch.einsum("bd,bmd->bm", s_BD, n_BMD)
        negatives.append(cosines_BM.masked_fill(n_BMD.abs().sum(-1) == 0, -torch.inf))
    logits = torch.cat([positive_B1, *negatives], -1) / temperature
    losses_B = logits.logsumexp(-1) - logits[:, 0]
    return (losses_B * has_positive_B).mean()
