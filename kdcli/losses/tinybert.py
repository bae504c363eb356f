"""TinyBERT: compare embeddings, hidden states and attention scores of many layers.

Jiao et al. 2019, https://arxiv.org/abs/1909.10351, §3.1:

    L_embd = MSE(E_S W_0, E_T)                      eq. 9    `embedding`
    L_hidn = MSE(H_S W_m, H_T)                      eq. 8    `hidden`
    L_attn = 1/A Σ_a MSE(Q_S K_Sᵀ/√K, Q_T K_Tᵀ/√K)  eq. 7    `attention`, before the softmax
    L      = Σ_m λ_m L_layer(m, g(m))               eq. 6    m = 0 ... M, g(0) = 0

Student layer m learns from teacher layer g(m). The learned matrices W, one per layer, belong to the
run and not to the student. Means are over real tokens. The prediction loss of eq. 10 is
`soft-targets`, in a stage of its own.

When to use: to imitate every layer, first on text and then on a task with augmented data. Prefer
`minilm`, which compares a single layer, to run less of the teacher, and `pkd` to save a stage.

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

SHARED_MATRIX = "shared"  # name of the matrix that all layers share


class Settings(Section):
    """Settings of TinyBERT.

    `layers` is a map of `kdcli.losses.layer_map`. `layer_weights` are λ_0 ... λ_M; null makes all
    of them 1.
    """

    layers: str = "uniform"
    embedding_weight: float = Field(1.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)
    attention_weight: float = Field(1.0, ge=0)
    layer_weights: list[Annotated[float, Field(ge=0)]] | None = None
    share_projection: bool = False


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its terms are weighted float32 scalars, each a sum over layers.

    They read q and k [B, A, L, K] and the states [B, L, D] of the compared layers. Raises
    ValueError if the map or the number of λ does not fit the two shapes, or if every weight is 0.
    """
    weights = settings.layer_weights
    if weights is None:
        weights = [1.0] * (student.layers + 1)
    if len(weights) != student.layers + 1:
        raise ValueError(
            f"loss.layer_weights has {len(weights)} numbers, but the student has an embedding and "
            f"{student.layers} layers: give {student.layers + 1} numbers, the embedding's first"
        )
    full_map = layer_map(settings.layers, teacher.layers, student.layers)
    pairs = {m: n for m, n in full_map.items() if weights[m]}
    state_weights = {m: settings.hidden_weight if m else settings.embedding_weight for m in pairs}
    states = {m: n for m, n in pairs.items() if state_weights[m]}
    scores = {m: n for m, n in pairs.items() if m and settings.attention_weight}
    if not states and not scores:
        raise ValueError(
            "every weight is 0: give loss.embedding_weight, loss.hidden_weight or "
            "loss.attention_weight, and the loss.layer_weights of a layer in loss.layers, a value "
            "above 0"
        )
    keys = {m: SHARED_MATRIX if settings.share_projection else str(m) for m in states}
    projections = nn.ModuleDict()
    for key in sorted(set(keys.values())):
        compared = [(m, n) for m, n in states.items() if keys[m] == key]
        projections[key] = StateProjection(student.hidden, teacher.hidden, *compared)
    heads = common_heads(teacher, student)

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for m, n in states.items():
            error = masked_mse(t.hidden[n], projections[keys[m]](s.hidden[m]), s.mask)
            value = state_weights[m] * weights[m] * error
            parts.setdefault("hidden" if m else "embedding", []).append(value)
        for m, n in scores.items():
            q_T, k_T, q_S, k_S = (regroup(x, heads) for x in (t.q[n], t.k[n], s.q[m], s.k[m]))
            error = score_mse(q_T, k_T, q_S, k_S, s.mask)
            parts.setdefault("attention", []).append(settings.attention_weight * weights[m] * error)
        return {name: torch.stack(values).sum() for name, values in parts.items()}

    t_scores, s_scores = frozenset(scores.values()), frozenset(scores)
    notes: tuple[str, ...] = ()
    if scores and teacher.heads != student.heads:
        notes = (
            f"the teacher has {teacher.heads} attention heads and the student {student.heads}: "
            f"both are regrouped into {heads} heads before they are compared",
        )
    return Objective(
        teacher_needs=Needs(q=t_scores, k=t_scores, hidden=frozenset(states.values())),
        student_needs=Needs(q=s_scores, k=s_scores, hidden=frozenset(states)),
        projections=projections,
        terms=terms,
        over=OVER,
        notes=notes,
    )


def common_heads(teacher: ModelShape, student: ModelShape) -> int:
    """Return the number of heads of both models, or the largest smaller divisor of both widths."""
    if teacher.heads == student.heads:
        return teacher.heads
    fewer = min(teacher.heads, student.heads)
    divisors = [h for h in range(1, fewer + 1) if teacher.hidden % h == 0]
    return max(h for h in divisors if student.hidden % h == 0)
