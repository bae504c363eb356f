"""TinyBERT: embeddings, hidden states and attention scores of many layers (Jiao et al. 2019,
https://arxiv.org/abs/1909.10351, §3.1).

    L_embd = MSE(E_S W_0, E_T)                                    eq. 9    `embedding`
    L_hidn = MSE(H_S W_m, H_T)                                    eq. 8    `hidden`
    L_attn = 1/A Σ_a MSE(Q_S K_Sᵀ/√K, Q_T K_Tᵀ/√K)                eq. 7    `attention`, before the softmax
    L      = Σ_m λ_m L_layer(student layer m, teacher layer g(m)) eq. 6    m = 0 ... M, g(0) = 0

The learned W, one per layer, belong to the run, not to the student. Means are over real tokens. The prediction loss of
eq. 10 is `soft-targets`, in a stage of its own.

Relations: take it to imitate every layer, on text and again on a task with augmented data; it needs more of the teacher
than `minilm`, which compares one layer, and a stage more than `pkd`.

    method: tinybert
    loss: {layers: uniform, share_projection: false}
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.layer_map import layer_map
from kdcli.losses.relation import regroup, score_mse
from kdcli.losses.states import StateProjection, masked_mse
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"embedding": "tokens", "hidden": "tokens", "attention": "tokens"}
INPUTS = frozenset({"text", "task"})
STAGE = "separate"
KD = {"weight": 1.0, "temperature": 1.0}

SHARED = "shared"  # name of the one matrix of all layers


class Settings(Section):
    """`layers` is a map of `kdcli.losses.layer_map`; `layer_weights` are λ_0 ... λ_M, null for all 1."""

    layers: str = "uniform"
    embedding_weight: float = Field(1.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)
    attention_weight: float = Field(1.0, ge=0)
    layer_weights: list[Annotated[float, Field(ge=0)]] | None = None
    share_projection: bool = False


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Raises ValueError if these shapes do not have such a map or number of λ, or if nothing is left to compare."""
    weights = (
        [1.0] * (student.layers + 1) if settings.layer_weights is None else settings.layer_weights
    )
    if len(weights) != student.layers + 1:
        raise ValueError(
            f"loss.layer_weights holds {len(weights)} numbers, but the student has an embedding and {student.layers} "
            f"layers: give {student.layers + 1}, that of the embedding first"
        )
    pairs = {
        m: n
        for m, n in layer_map(settings.layers, teacher.layers, student.layers).items()
        if weights[m]
    }
    states = {
        m: n
        for m, n in pairs.items()
        if (settings.hidden_weight if m else settings.embedding_weight)
    }
    scores = {m: n for m, n in pairs.items() if m and settings.attention_weight}
    if not states and not scores:
        raise ValueError(
            "nothing is left to compare: give loss.embedding_weight, loss.hidden_weight or loss.attention_weight, and "
            "the loss.layer_weights of a layer in loss.layers, a value above 0"
        )
    keys = {m: SHARED if settings.share_projection else str(m) for m in states}
    projections = nn.ModuleDict()
    for key in sorted(set(keys.values())):
        compared = [(m, n) for m, n in states.items() if keys[m] == key]
        projections[key] = StateProjection(student.hidden, teacher.hidden, *compared)
    heads = common_heads(teacher, student)

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        named: dict[str, list[Tensor]] = {}
        for m, n in states.items():
            error = masked_mse(t.hidden[n], projections[keys[m]](s.hidden[m]), s.mask)
            weight = settings.hidden_weight if m else settings.embedding_weight
            named.setdefault("hidden" if m else "embedding", []).append(weight * weights[m] * error)
        for m, n in scores.items():
            q_T, k_T, q_S, k_S = (regroup(x, heads) for x in (t.q[n], t.k[n], s.q[m], s.k[m]))
            error = score_mse(q_T, k_T, q_S, k_S, s.mask)
            named.setdefault("attention", []).append(settings.attention_weight * weights[m] * error)
        return {name: torch.stack(values).sum() for name, values in named.items()}

    counts = f"the teacher has {teacher.heads} attention heads and the student {student.heads}"
    t_scores, s_scores, regrouped = (
        frozenset(scores.values()),
        frozenset(scores),
        teacher.heads != student.heads,
    )
    return Objective(
        teacher_needs=Needs(q=t_scores, k=t_scores, hidden=frozenset(states.values())),
        student_needs=Needs(q=s_scores, k=s_scores, hidden=frozenset(states)),
        projections=projections,
        terms=terms,
        over=OVER,
        notes=(f"{counts}: both are compared regrouped into {heads}",)
        if scores and regrouped
        else (),
    )


def common_heads(teacher: ModelShape, student: ModelShape) -> int:
    """The heads of both, or the largest number below that divides both widths."""
    if teacher.heads == student.heads:
        return teacher.heads
    most = min(teacher.heads, student.heads)
    return max(h for h in range(1, most + 1) if teacher.hidden % h == 0 and student.hidden % h == 0)
