"""TinyBERT: equal to formulas written for one token at a time in float64, sums over layers, and
what is refused."""

import pytest
import torch
from references import (
    PADDED,
    hidden_reference,
    leaves,
    mse_of_row,
    relation_reference,
    signals,
)

from kdcli.losses.relation import regroup
from kdcli.losses.tinybert import Settings, objective
from kdcli.types import ModelShape, Needs

TEACHER = ModelShape(layers=6, hidden=24, ffn=48, heads=4)
STUDENT = ModelShape(layers=3, hidden=12, ffn=24, heads=4)


def pair(made, teacher=TEACHER, student=STUDENT, *, grad=False):
    return signals(made.teacher_needs, teacher, 0, grad=grad), signals(
        made.student_needs, student, 1, grad=grad
    )


def attention_reference(*given):
    return relation_reference(mse_of_row, *given, PADDED)


def expected_terms(made, t, s, pairs, weights, shared):
    """The paper's sums over layers, in float64."""
    named = {"embedding": 0.0, "hidden": 0.0, "attention": 0.0}
    for m, n in pairs.items():
        matrix = made.projections["shared" if shared else str(m)].weight.double()
        error = hidden_reference(t.hidden[n], s.hidden[m].double() @ matrix.T, PADDED)
        named["hidden" if m else "embedding"] += weights[m] * error
        if m:
            named["attention"] += weights[m] * attention_reference(t.q[n], t.k[n], s.q[m], s.k[m])
    return named


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("layers", "pairs"),
    [
        ("uniform", {0: 0, 1: 2, 2: 4, 3: 6}),
        ("top", {0: 0, 1: 4, 2: 5, 3: 6}),
        ("0:0,2:5", {0: 0, 2: 5}),
    ],
)
@pytest.mark.parametrize("weights", [None, [0.5, 1, 2, 3]])
def test_terms_and_gradients_are_the_papers_sums_over_layers(layers, pairs, weights, shared):
    made = objective(
        Settings(layers=layers, layer_weights=weights, share_projection=shared), TEACHER, STUDENT
    )
    layers_of_student, layers_of_teacher = frozenset(pairs), frozenset(pairs.values())
    assert made.student_needs == Needs(
        layers_of_student - {0}, layers_of_student - {0}, hidden=layers_of_student
    )
    assert made.teacher_needs == Needs(
        layers_of_teacher - {0}, layers_of_teacher - {0}, hidden=layers_of_teacher
    )
    t, s = pair(made, grad=True)
    got = made.terms(t, s)
    sum(got.values()).backward()
    trained = [*leaves(s), *made.projections.parameters()]
    gradients = [x.grad for x in trained]
    expected = expected_terms(made, t, s, pairs, weights or [1, 1, 1, 1], shared)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-6)
    for one, other in zip(
        gradients, torch.autograd.grad(sum(expected.values()), trained), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "terms", "needs"),
    [
        (
            {"embedding_weight": 0.0},
            {"hidden", "attention"},
            Needs({1, 2, 3}, {1, 2, 3}, hidden={1, 2, 3}),
        ),
        (
            {"hidden_weight": 0.0},
            {"embedding", "attention"},
            Needs({1, 2, 3}, {1, 2, 3}, hidden={0}),
        ),
        ({"attention_weight": 0.0}, {"embedding", "hidden"}, Needs(hidden={0, 1, 2, 3})),
        (
            {"layer_weights": [0, 1, 0, 1]},
            {"hidden", "attention"},
            Needs({1, 3}, {1, 3}, hidden={1, 3}),
        ),
        ({"layers": "2:3", "hidden_weight": 0.0}, {"attention"}, Needs({2}, {2})),
    ],
)
def test_a_term_of_weight_0_is_neither_computed_nor_needed(keys, terms, needs):
    made = objective(Settings(**keys), TEACHER, STUDENT)
    assert (made.student_needs, set(made.projections)) == (needs, {str(m) for m in needs.hidden})
    t, s = pair(made)
    assert set(made.terms(t, s)) == terms


@pytest.mark.parametrize(
    ("teacher", "student", "heads"),
    [
        (TEACHER, ModelShape(3, 12, 24, 2), 2),
        (TEACHER, ModelShape(3, 12, 24, 6), 4),
        (ModelShape(6, 768, 3072, 12), ModelShape(3, 320, 640, 5), 4),
        (ModelShape(6, 384, 1536, 12), ModelShape(3, 192, 768, 8), 8),
        (ModelShape(6, 7, 16, 7), ModelShape(3, 12, 24, 3), 1),
    ],
)
def test_other_heads_are_regrouped_with_a_note(teacher, student, heads):
    made = objective(Settings(), teacher, student)
    assert made.notes == (
        f"the teacher has {teacher.heads} attention heads and the student {student.heads}: "
        f"both are regrouped into {heads} heads before they are compared",
    )
    t, s = pair(made, teacher, student)
    layers = [(t.q[2 * m], t.k[2 * m], s.q[m], s.k[m]) for m in (1, 2, 3)]
    expected = sum(attention_reference(*(regroup(x, heads) for x in layer)) for layer in layers)
    torch.testing.assert_close(
        made.terms(t, s)["attention"].double(), expected, rtol=1e-5, atol=1e-6
    )


def test_without_regrouping_there_is_no_note():
    assert objective(Settings(), TEACHER, STUDENT).notes == ()
    assert objective(Settings(attention_weight=0.0), TEACHER, ModelShape(3, 12, 24, 2)).notes == ()


def test_matrices_are_shared_on_request_and_start_as_the_identity_between_equal_widths():
    assert set(objective(Settings(share_projection=True), TEACHER, STUDENT).projections) == {
        "shared"
    }
    made = objective(Settings(), TEACHER, ModelShape(3, 24, 48, 4))
    assert set(made.projections) == {"0", "1", "2", "3"}
    for p in made.projections.values():
        assert p.bias is None
        assert p.weight.requires_grad
        assert torch.equal(p.weight, torch.eye(24))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_weights": [1, 1, 1]}, "has 3 numbers.*give 4"),
        (
            {"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0},
            "every weight is 0",
        ),
        ({"layers": "0:0", "embedding_weight": 0.0}, "every weight is 0"),
        ({"layers": "1:7"}, "layer 7 of the teacher"),
    ],
)
def test_settings_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        objective(Settings(**keys), TEACHER, STUDENT)
