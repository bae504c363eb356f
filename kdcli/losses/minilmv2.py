"""MiniLMv2: multi-head self-attention relation distillation (Wang et al. 2020, https://arxiv.org/abs/2012.15828).

Queries, keys and values of one teacher layer are concatenated over heads and split again into A_r relation heads, so
that teacher and student may have different head counts. Three relations, each softmax(XXᵀ/√d_r), are matched (eq. 5-6):

    L = Σ_{X ∈ {Q, K, V}} w_X · 1/(A_r·|x|) Σ_a Σ_t KL(R_T,X[a,t] ‖ R_S,X[a,t])      `query`, `key`, `value`

Relations: take it in place of `minilm` when the head counts differ, or with a large teacher, from whose upper-middle
layer it learns. It costs a third relation, of more and narrower heads.

    method: minilmv2
    loss: {relation_heads: 48, teacher_layer: 21}
"""

from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.masked_lm import masked_lm_term
from kdcli.losses.relation import regroup, relation_kl
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"query": "tokens", "key": "tokens", "value": "tokens", "mlm": "labels"}
INPUTS = frozenset({"text", "task"})
STAGE = "separate"
KD = {"weight": 1.0, "temperature": 1.0}


class Settings(Section):
    """`relation_heads: null` is heads of the teacher's width / 16 (48 for base, 64 for large); `teacher_layer: null` is
    the last one, or 21 of 24; below 0 counts from the last. `masked_lm_weight` is that of `kdcli.losses.minilm`."""

    relation_heads: int | None = Field(None, gt=0)
    teacher_layer: int | None = None
    query_weight: float = Field(1.0, ge=0)
    key_weight: float = Field(1.0, ge=0)
    value_weight: float = Field(1.0, ge=0)
    masked_lm_weight: float = Field(0.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Raises ValueError if the relation heads do not divide both widths, or the teacher lacks the layer."""
    heads = settings.relation_heads or max(1, teacher.hidden // 16)
    for name, width in (("teacher", teacher.hidden), ("student", student.hidden)):
        if width % heads:
            common = [
                h
                for h in range(1, heads + 1)
                if teacher.hidden % h == 0 and student.hidden % h == 0
            ]
            raise ValueError(
                f"{heads} relation heads do not divide the {name}'s width {width}; set loss.relation_heads to one of "
                f"{', '.join(map(str, common[-4:]))}"
            )
    asked, m = settings.teacher_layer, student.layers
    n = (
        (21 if teacher.layers == 24 else teacher.layers)
        if asked is None
        else asked + teacher.layers * (asked < 0)
    )
    if not 0 < n <= teacher.layers:
        raise ValueError(
            f"loss.teacher_layer is {asked}, but the teacher has layers 1 to {teacher.layers}"
        )

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        named = {}
        for name, weight, x_T, x_S in (
            ("query", settings.query_weight, t.q[n], s.q[m]),
            ("key", settings.key_weight, t.k[n], s.k[m]),
            ("value", settings.value_weight, t.v[n], s.v[m]),
        ):
            x_T, x_S = regroup(x_T, heads), regroup(x_S, heads)
            named[name] = weight * relation_kl(x_T, x_T, x_S, x_S, s.mask)
        return named | masked_lm_term(settings.masked_lm_weight, s)

    t_needs, s_needs = (Needs(*(frozenset({layer}),) * 3) for layer in (n, m))
    s_needs |= Needs(masked_logits=settings.masked_lm_weight > 0)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )
