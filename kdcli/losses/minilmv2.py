"""MiniLMv2: multi-head self-attention relation distillation (Wang et al. 2020, https://arxiv.org/abs/2012.15828).

Queries, keys and values of one teacher layer are concatenated over heads and split again into A_r relation heads, so
that teacher and student may have different head counts. Three relations, each softmax(XXᵀ/√d_r), are matched (eq. 5–6):

    L = Σ_{X ∈ {Q, K, V}} w_X · 1/(A_r·|x|) Σ_a Σ_t KL(R_T,X[a,t] ‖ R_S,X[a,t])      `query`, `key`, `value`

The student's layer is always its last; the teacher's is a setting (the last of a base model, an upper-middle one of a
large model).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from kdcli.losses.relation import regroup, relation_kl
from kdcli.types import ModelShape, Needs, Objective, Signals

INPUTS = frozenset({"text", "task"})
STAGE = "separate"
KD = {"weight": 1.0, "temperature": 1.0}


class Settings(BaseModel):
    """Keys of the recipe's `loss:` section under `method: minilmv2`.

    `relation_heads: null` means heads of width 16 of the teacher (48 for a base model, 64 for a large one).
    `teacher_layer: null` means the last layer, or 21 when the teacher has 24.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    relation_heads: int | None = Field(None, gt=0)
    teacher_layer: int | None = Field(None, gt=0)
    query_weight: float = Field(1.0, ge=0)
    key_weight: float = Field(1.0, ge=0)
    value_weight: float = Field(1.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Bind the loss to one teacher and one student.

    Raises:
        ValueError: if the relation heads divide one of the widths not, or the teacher has no such layer.
    """
    heads = settings.relation_heads or max(1, teacher.hidden // 16)
    for name, width in (("teacher", teacher.hidden), ("student", student.hidden)):
        if width % heads:
            fitting = [h for h in range(1, heads + 1) if teacher.hidden % h == 0 and student.hidden % h == 0]
            raise ValueError(
                f"{heads} relation heads do not divide the {name}'s width {width}; set loss.relation_heads to one of "
                f"{', '.join(map(str, fitting[-4:]))}"
            )
    n = settings.teacher_layer or (21 if teacher.layers == 24 else teacher.layers)
    if n > teacher.layers:
        raise ValueError(f"loss.teacher_layer is {n}, but the teacher has layers 1 to {teacher.layers}")
    m = student.layers

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        found = {}
        for name, weight, of_teacher, of_student in (
            ("query", settings.query_weight, t.q[n], s.q[m]),
            ("key", settings.key_weight, t.k[n], s.k[m]),
            ("value", settings.value_weight, t.v[n], s.v[m]),
        ):
            x_T, x_S = regroup(of_teacher, heads), regroup(of_student, heads)
            found[name] = weight * relation_kl(x_T, x_T, x_S, x_S, s.mask)
        return found

    def needs(layer: int) -> Needs:
        one = frozenset({layer})
        return Needs(q=one, k=one, v=one)

    return Objective(teacher_needs=needs(n), student_needs=needs(m), projections=nn.ModuleDict(), terms=terms)
