"""MiniLM: deep self-attention distillation (Wang et al. 2020, https://arxiv.org/abs/2002.10957).

Only the last self-attention module of each network is compared (§3.1, §3.2):

    L_AT = 1/(A·|x|) Σ_a Σ_t KL(A_T[a,t] ‖ A_S[a,t])        eq. 6    A  = softmax(QKᵀ/√K)   `attention`
    L_VR = 1/(A·|x|) Σ_a Σ_t KL(VR_T[a,t] ‖ VR_S[a,t])      eq. 9    VR = softmax(VVᵀ/√K)   `value`
    L    = L_AT + L_VR                                      eq. 10

Nothing after the last layer's query, key and value takes part, so the student's last attention output, its last
feed-forward block and its pooler get no gradient; the teacher need not compute them. `Settings` also holds the paper's
ablations (§4.4: no value relation, value MSE, layer to layer; relations of hidden states), and one term the
paper does not have: `hidden: mse`, the last hidden states themselves, for short budgets (docs/results.md).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from kdcli.losses.layer_map import strategy_map
from kdcli.losses.relation import regroup, relation_kl
from kdcli.losses.states import masked_mse
from kdcli.types import ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"text", "task"})
STAGE = "separate"
KD = {"weight": 1.0, "temperature": 1.0}


class Settings(BaseModel):
    """Keys of the recipe's `loss:` section under `method: minilm`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    value: Literal["relation", "mse", "none"] = "relation"
    layers: Literal["last", "uniform"] = "last"
    hidden: Literal["none", "relation", "mse"] = "none"
    attention_weight: float = Field(1.0, ge=0)
    value_weight: float = Field(1.0, ge=0)
    hidden_weight: float = Field(1.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Bind the loss to one teacher and one student.

    Raises:
        ValueError: if the two have different head counts, which the attention of eq. 6 cannot bridge.
    """
    if teacher.heads != student.heads:
        raise ValueError(
            f"MiniLM compares attention head by head: the teacher has {teacher.heads} heads, the student "
            f"{student.heads}. Give the student '@{teacher.heads}', or use --method minilmv2 (heads may differ)"
        )
    layer_map = {student.layers: teacher.layers}
    if settings.layers == "uniform":
        # Relations are those of layers; the embedding has none.
        layer_map = {m: n for m, n in strategy_map("uniform", teacher.layers, student.layers).items() if m}
    projections = nn.ModuleDict()
    if settings.value == "mse":
        projections["value"] = nn.Linear(student.hidden, teacher.hidden, bias=False)
    if settings.hidden == "mse" and student.hidden != teacher.hidden:
        projections["hidden"] = nn.Linear(student.hidden, teacher.hidden, bias=False)

    def needs(layers: frozenset[int]) -> Needs:
        values = layers if settings.value != "none" else frozenset()
        return Needs(q=layers, k=layers, v=values, hidden=layers if settings.hidden != "none" else frozenset())

    def terms(of_teacher: Signals, of_student: Signals) -> dict[str, Tensor]:
        named: dict[str, list[Tensor]] = {}
        for m, n in layer_map.items():
            for name, value in _layer_terms(settings, of_teacher, n, of_student, m, teacher.heads, projections):
                named.setdefault(name, []).append(value)
        return {name: torch.stack(values).mean() for name, values in named.items()}

    return Objective(
        teacher_needs=needs(frozenset(layer_map.values())),
        student_needs=needs(frozenset(layer_map)),
        projections=projections,
        terms=terms,
    )


def _layer_terms(
    settings: Settings, t: Signals, n: int, s: Signals, m: int, heads: int, projections: nn.ModuleDict
) -> list[tuple[str, Tensor]]:
    """The weighted terms of one pair of layers: student layer m against teacher layer n."""
    found = [("attention", settings.attention_weight * relation_kl(t.q[n], t.k[n], s.q[m], s.k[m], s.mask))]
    if settings.value == "relation":
        found.append(("value", settings.value_weight * relation_kl(t.v[n], t.v[n], s.v[m], s.v[m], s.mask)))
    elif settings.value == "mse":
        v_S_BLD = projections["value"](regroup(s.v[m], 1)[:, 0])
        found.append(("value", settings.value_weight * masked_mse(regroup(t.v[n], 1)[:, 0], v_S_BLD, s.mask)))
    if settings.hidden == "relation":
        h_T, h_S = (regroup(x[:, None], heads) for x in (t.hidden[n], s.hidden[m]))
        found.append(("hidden", settings.hidden_weight * relation_kl(h_T, h_T, h_S, h_S, s.mask)))
    elif settings.hidden == "mse":
        h_S_BLD = projections["hidden"](s.hidden[m]) if "hidden" in projections else s.hidden[m]
        found.append(("hidden", settings.hidden_weight * masked_mse(t.hidden[n], h_S_BLD, s.mask)))
    return found
