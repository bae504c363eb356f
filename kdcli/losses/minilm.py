"""MiniLM: deep self-attention distillation (Wang et al. 2020, https://arxiv.org/abs/2002.10957).

The loss compares the last self-attention module of each network (§3.1, §3.2):

    L_AT = 1/(A·|x|) Σ_a Σ_t KL(A_T[a,t] ‖ A_S[a,t])      eq. 6,   A  = softmax(QKᵀ/√K)
    L_VR = 1/(A·|x|) Σ_a Σ_t KL(VR_T[a,t] ‖ VR_S[a,t])    eq. 9,   VR = softmax(VVᵀ/√K)
    L    = L_AT + L_VR                                    eq. 10

The terms are called `attention` and `value`. The layers after q, k and v of the last layer get no
gradient, and the teacher does not compute them. `Settings` has the paper's ablations (§4.4) and one
term of our own: `hidden: mse` compares the last hidden states and helps in short runs.

When to use: by default, for text. Prefer `minilmv2` if the numbers of heads differ or the teacher
is large, `tinybert` to imitate every layer, and a method for masked text only if the student must
keep its vocabulary head.

    method: minilm
    loss: {hidden: mse, hidden_weight: 0.5}
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.layer_map import strategy_map
from kdcli.losses.masked_lm import masked_lm_term
from kdcli.losses.relation import regroup, relation_kl
from kdcli.losses.states import StateProjection, masked_mse
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {
    "attention": "tokens",
    "value": "tokens",
    "hidden": "tokens",
    "mlm": "labels",
}
INPUTS = frozenset({"text", "task"})
STAGE = "separate"
KD = {"weight": 1.0, "temperature": 1.0}


class Settings(Section):
    """Settings of MiniLM.

    `value`, `layers: uniform` and `hidden: relation` are the paper's ablations. `masked_lm_weight`
    adds the loss of `kdcli.losses.masked_lm`; both models then read masked text. It is 0 by default
    because the authors found that it hurts slightly. Set it for a student that must also predict
    words.
    """

    value: Literal["relation", "mse", "none"] = "relation"
    layers: Literal["last", "uniform"] = "last"
    hidden: Literal["none", "relation", "mse"] = "none"
    attention_weight: float = Field(1.0, ge=0)
    value_weight: float = Field(1.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)
    masked_lm_weight: float = Field(0.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its terms are weighted float32 scalars, each a mean over layers.

    They read q, k and v [B, A, L, K] and, with `hidden`, states [B, L, D] of the compared layers.
    Raises ValueError if the numbers of heads differ, because eq. 6 compares heads.
    """
    if teacher.heads != student.heads:
        raise ValueError(
            f"MiniLM compares attention head by head, but the teacher has {teacher.heads} heads "
            f"and the student {student.heads}. Add '@{teacher.heads}' to the student's shape, or "
            "use --method minilmv2, which allows the numbers to differ"
        )
    layer_map = {student.layers: teacher.layers}
    if settings.layers == "uniform":
        # The embedding has no relations.
        uniform = strategy_map("uniform", teacher.layers, student.layers)
        layer_map = {m: n for m, n in uniform.items() if m}
    projections = nn.ModuleDict()
    if settings.value == "mse":
        projections["value"] = nn.Linear(student.hidden, teacher.hidden, bias=False)
    if settings.hidden == "mse" and student.hidden != teacher.hidden:
        projections["hidden"] = StateProjection(student.hidden, teacher.hidden, *layer_map.items())

    def needs(layers: frozenset[int]) -> Needs:
        values = layers if settings.value != "none" else frozenset()
        hidden = layers if settings.hidden != "none" else frozenset()
        return Needs(q=layers, k=layers, v=values, hidden=hidden)

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for m, n in layer_map.items():
            attention = relation_kl(t.q[n], t.k[n], s.q[m], s.k[m], s.mask)
            parts.setdefault("attention", []).append(settings.attention_weight * attention)
            if settings.value != "none":
                has_projection = "value" in projections
                projection = projections["value"] if has_projection else None
                value = value_loss(t.v[n], s.v[m], s.mask, projection)
                parts.setdefault("value", []).append(settings.value_weight * value)
            if settings.hidden == "relation":
                h_T, h_S = (regroup(x[:, None], teacher.heads) for x in (t.hidden[n], s.hidden[m]))
                hidden = relation_kl(h_T, h_T, h_S, h_S, s.mask)
                parts.setdefault("hidden", []).append(settings.hidden_weight * hidden)
            elif settings.hidden == "mse":
                h_S_BLD = s.hidden[m]
                if "hidden" in projections:
                    h_S_BLD = projections["hidden"](h_S_BLD)
                hidden = masked_mse(t.hidden[n], h_S_BLD, s.mask)
                parts.setdefault("hidden", []).append(settings.hidden_weight * hidden)
        means = {name: torch.stack(values).mean() for name, values in parts.items()}
        return means | masked_lm_term(settings.masked_lm_weight, s)

    t_needs = needs(frozenset(layer_map.values()))
    s_needs = needs(frozenset(layer_map)) | Needs(masked_logits=settings.masked_lm_weight > 0)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=projections,
        terms=terms,
        over=OVER,
    )


def value_loss(
    v_T_BALK: Tensor, v_S_BALJ: Tensor, mask: Tensor | None, projection: nn.Module | None
) -> Tensor:
    """Compare the values of two layers.

    Args:
        v_T_BALK: The teacher's values.
        v_S_BALJ: The student's values.
        mask: The real tokens, [B, L].
        projection: Maps the student's values to the teacher's width, for the squared error. None
            compares the relations of the values (eq. 9).
    """
    if projection is None:
        return relation_kl(v_T_BALK, v_T_BALK, v_S_BALJ, v_S_BALJ, mask)
    v_S_BLD = projection(regroup(v_S_BALJ, 1)[:, 0])
    return masked_mse(regroup(v_T_BALK, 1)[:, 0], v_S_BLD, mask)
