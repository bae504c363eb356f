"""MiniLMv2: multi-head self-attention relation distillation.

Wang et al. 2020, https://arxiv.org/abs/2012.15828. The queries, keys and values of one teacher
layer are concatenated over the heads and split again into A_r relation heads, so that teacher and
student may have different numbers of attention heads. Three relations softmax(XXᵀ/√d_r) are
compared (eq. 5-6):

    L = Σ_{X ∈ {Q, K, V}} w_X · 1/(A_r·|x|) Σ_a Σ_t KL(R_T,X[a,t] ‖ R_S,X[a,t])

The terms are called `query`, `key` and `value`.

When to use: the numbers of heads differ, or the teacher is large; the student of a large teacher
learns from one of its upper middle layers. Prefer `minilm` otherwise, because it has two relations
instead of three, with fewer and wider heads.

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
    """Settings of MiniLMv2.

    `relation_heads: null` uses the teacher's width / 16 heads, which is 48 for base and 64 for
    large models. `teacher_layer: null` uses the last layer, or layer 21 of 24; negative numbers
    count from the last layer. `masked_lm_weight` adds the loss of
    `kdcli.losses.masked_lm`; both models then read masked text.
    """

    relation_heads: int | None = Field(None, gt=0)
    teacher_layer: int | None = None
    query_weight: float = Field(1.0, ge=0)
    key_weight: float = Field(1.0, ge=0)
    value_weight: float = Field(1.0, ge=0)
    masked_lm_weight: float = Field(0.0, ge=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its terms are weighted float32 scalars.

    They read q, k and v [B, A, L, K] of one layer per model. Raises ValueError if the relation
    heads do not divide both widths, or if the teacher does not have the layer.
    """
    heads = settings.relation_heads or max(1, teacher.hidden // 16)
    for name, width in (("teacher", teacher.hidden), ("student", student.hidden)):
        if width % heads:
            divisors = (h for h in range(1, heads + 1) if teacher.hidden % h == 0)
            common = [h for h in divisors if student.hidden % h == 0]
            raise ValueError(
                f"{heads} relation heads do not divide the {name}'s width {width}; "
                f"set loss.relation_heads to one of {', '.join(map(str, common[-4:]))}"
            )
    m, n = student.layers, teacher_layer(settings, teacher)

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        values = {}
        for name, weight, x_T, x_S in (
            ("query", settings.query_weight, t.q[n], s.q[m]),
            ("key", settings.key_weight, t.k[n], s.k[m]),
            ("value", settings.value_weight, t.v[n], s.v[m]),
        ):
            x_T, x_S = regroup(x_T, heads), regroup(x_S, heads)
            values[name] = weight * relation_kl(x_T, x_T, x_S, x_S, s.mask)
        return values | masked_lm_term(settings.masked_lm_weight, s)

    t_needs, s_needs = (Needs(*(frozenset({layer}),) * 3) for layer in (n, m))
    s_needs |= Needs(masked_logits=settings.masked_lm_weight > 0)
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=nn.ModuleDict(),
        terms=terms,
        over=OVER,
    )


def teacher_layer(settings: Settings, teacher: ModelShape) -> int:
    """Return the teacher layer that is compared, 1 ... N.

    Raises ValueError if it does not exist.
    """
    layer = settings.teacher_layer
    if layer is None:
        return 21 if teacher.layers == 24 else teacher.layers
    from_first = layer + teacher.layers if layer < 0 else layer
    if not 0 < from_first <= teacher.layers:
        raise ValueError(
            f"loss.teacher_layer is {layer}, but the teacher has layers 1 to {teacher.layers}"
        )
    return from_first
