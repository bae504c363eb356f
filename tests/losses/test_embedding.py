"""The embedding loss against float64 numpy, and what it must not depend on."""

import numpy as np
import pytest
import torch
from references import PADDED, normal, signals

from kdcli.errors import UsageError
from kdcli.losses import build_objective
from kdcli.types import ModelShape, Signals
from kdcli.verbs.distill.space import projected

TEACHER = ModelShape(layers=4, hidden=32, ffn=64, heads=4)
STUDENT = ModelShape(layers=2, hidden=32, ffn=64, heads=4)
NONE = {"vectors_weight": 0.0}
CASES = [
    {},
    {"vectors": "mse"},
    {"dimensions": [6, 4, 2]},
    NONE | {"similarity_weight": 1.0},
    {"similarity_weight": 0.5, "dimensions": [6, 3], "temperature": 0.2},
    NONE | {"contrastive_weight": 1.0},
    NONE | {"pairs_weight": 1.0},
    {"pairs_weight": 0.1, "dimensions": [6, 3], "temperature": 0.2},
    {"vectors_weight": 0.3, "similarity_weight": 2.0, "contrastive_weight": 0.5},
]


def pair(*, grad: bool = False) -> tuple[Signals, Signals]:
    """A teacher's and a student's signals.

    The second row has no positive, the third no first negative; the first row and the positive of
    the fourth are among the anchors.
    """
    t = Signals(pooled=normal(5, 6, seed=1), anchors=normal(7, 6, seed=2))
    t.positive, t.negatives = normal(5, 6, seed=3), normal(5, 2, 6, seed=4)
    t.positive[1], t.negatives[2, 0] = 0, 0
    t.anchors[2], t.anchors[5] = t.pooled[0], t.positive[3]
    s_BD = normal(5, 6, seed=5)
    # A student that has learned something is near its teacher.
    s_BD[0], s_BD[3] = t.pooled[0] + 0.3 * s_BD[0], t.positive[3] + 0.3 * s_BD[3]
    return t, Signals(pooled=s_BD.requires_grad_(grad))


def reference(keys, t, s):
    """Each term by its formula, row after row."""
    tau, x = (
        keys.get("temperature", 0.05),
        {n: getattr(t, n).double().numpy() for n in ("pooled", "anchors")},
    )
    positive, negatives = t.positive.double().numpy(), t.negatives.double().numpy()
    student, terms = s.pooled.detach().double().numpy(), {}

    def cos(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    def softmax(v):
        return np.exp(v - v.max()) / np.exp(v - v.max()).sum()

    cuts = keys.get("dimensions", [6])
    if keys.get("vectors", "cosine") == "cosine":
        each = [
            [1 - cos(a[:d], b[:d]) for a, b in zip(student, x["pooled"], strict=True)] for d in cuts
        ]
    else:
        each = [
            [np.mean((a[:d] - b[:d]) ** 2) for a, b in zip(student, x["pooled"], strict=True)]
            for d in cuts
        ]
    terms["vectors"] = keys.get("vectors_weight", 1.0) * np.mean(each)
    kls = []
    for d in cuts:
        for a, b in zip(student, x["pooled"], strict=True):
            p = softmax(np.array([cos(b, r) for r in x["anchors"]]) / tau)
            q = softmax(np.array([cos(a[:d], r[:d]) for r in x["anchors"]]) / tau)
            kls.append((p * np.log(p / q)).sum())
    terms["similarity"] = keys.get("similarity_weight", 0.0) * np.mean(kls)
    of_pairs = []
    for d in cuts:
        for i, (a, b) in enumerate(zip(student, x["pooled"], strict=True)):
            others = [j for j in range(len(student)) if j != i]
            p = softmax(np.array([cos(b, x["pooled"][j]) for j in others]) / tau)
            q = softmax(np.array([cos(a[:d], student[j][:d]) for j in others]) / tau)
            of_pairs.append((p * np.log(p / q)).sum())
    terms["pairs"] = keys.get("pairs_weight", 0.0) * np.mean(of_pairs)
    nce = []
    for a, own, p, ns in zip(student, x["pooled"], positive, negatives, strict=True):
        if p.any():
            anchors = [r for r in x["anchors"] if not ((r == own).all() or (r == p).all())]
            wrong = [cos(a, n) for n in (*anchors, *ns) if n.any()]
            nce.append(-np.log(softmax(np.array([cos(a, p), *wrong]) / tau)[0]))
        else:
            nce.append(0.0)
    terms["contrastive"] = keys.get("contrastive_weight", 0.0) * np.mean(nce)
    return {
        name: value
        for name, value in terms.items()
        if keys.get(f"{name}_weight", float(name == "vectors"))
    }


@pytest.mark.parametrize("keys", CASES)
def test_the_terms_are_their_formulas_and_the_teacher_gets_no_gradient(keys):
    t, s = pair(grad=True)
    t.pooled.requires_grad_()
    terms = build_objective("embedding", keys, TEACHER, STUDENT).terms(t, s)
    wanted = reference(keys, Signals(**{**vars(t), "pooled": t.pooled.detach()}), s)
    assert terms.keys() == wanted.keys()
    for name, value in terms.items():
        assert value.item() == pytest.approx(wanted[name], rel=1e-5)
    sum(terms.values()).backward()
    assert t.pooled.grad is None
    assert s.pooled.grad.any()


@pytest.mark.parametrize("keys", CASES)
def test_the_terms_are_computed_in_float32_under_autocast(keys):
    t, s = pair()
    with torch.autocast("cpu", torch.bfloat16):
        terms = build_objective("embedding", keys, TEACHER, STUDENT).terms(t, s)
    wanted = reference(keys, t, s)
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(wanted, rel=1e-5)


def test_targets_are_projected_in_float32_under_autocast():
    t, s = pair()
    basis_ED = np.linalg.qr(normal(6, 3, seed=6).numpy())[0].astype(np.float32)
    s.pooled = normal(5, 3, seed=7)
    with torch.autocast("cpu", torch.bfloat16):
        objective = projected(build_objective("embedding", {}, TEACHER, STUDENT), basis_ED)
        (value,) = objective.terms(t, s).values()
    t_BD, s_BD = t.pooled.double().numpy() @ basis_ED, s.pooled.double().numpy()
    lengths_B = np.linalg.norm(t_BD, axis=1) * np.linalg.norm(s_BD, axis=1)
    wanted = 1 - np.mean((t_BD * s_BD).sum(1) / lengths_B)
    assert value.item() == pytest.approx(wanted, rel=1e-5)


def test_a_text_alone_has_no_pairs():
    t, s = pair(grad=True)
    made = build_objective("embedding", NONE | {"pairs_weight": 1.0}, TEACHER, STUDENT)
    alone = made.terms(Signals(pooled=t.pooled[:1]), Signals(pooled=s.pooled[:1]))["pairs"]
    alone.backward()
    assert alone.item() == 0
    assert not s.pooled.grad.any()


def test_relations_and_hidden_states_join_in_one_total():
    keys = {"relations_weight": 0.5, "hidden_weight": 2.0}
    narrow = ModelShape(layers=2, hidden=16, ffn=32, heads=4)
    made = build_objective("embedding", keys, TEACHER, narrow)
    assert made.student_needs.pooled
    assert not made.teacher_needs.pooled, "the teacher's vectors are computed once, not in a step"
    t, s = (
        signals(made.teacher_needs, TEACHER, 0),
        signals(made.student_needs, narrow, 1, grad=True),
    )
    t.pooled, s.pooled = normal(len(PADDED), 6, seed=7), normal(len(PADDED), 6, seed=8)
    terms = made.terms(t, s)
    assert set(terms) == {"vectors", "relations", "hidden"}
    sum(terms.values()).backward()
    assert made.projections["hidden"].weight.grad.any()
    half = build_objective("embedding", {"relations_weight": 0.25}, TEACHER, narrow).terms(t, s)
    assert half["relations"].item() == pytest.approx(terms["relations"].item() / 2)


def test_a_loss_without_terms_is_refused():
    with pytest.raises(UsageError, match="weight 0"):
        build_objective("embedding", NONE, TEACHER, STUDENT)


def test_no_row_with_a_positive_is_no_contrastive_loss():
    t, s = pair()
    t.positive = torch.zeros_like(t.positive)
    made = build_objective("embedding", {"contrastive_weight": 1.0}, TEACHER, STUDENT)
    assert made.terms(t, s)["contrastive"].item() == 0
