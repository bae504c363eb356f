"""PKD: which layers are compared, and the error of normalised first-token states."""

import pytest
import torch

from kdcli.losses.pkd import Settings, objective
from kdcli.types import ModelShape, Needs, Signals

TEACHER = ModelShape(12, 24, 48, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])


def signals(layers, width, seed):
    g = torch.Generator().manual_seed(seed)
    states = {n: torch.randn(3, 4, width, generator=g).requires_grad_() for n in sorted(layers)}
    return Signals(mask=MASK, hidden=states)


@pytest.mark.parametrize(
    ("layers", "n", "m", "student", "teacher"),
    [
        ("skip", 12, 6, {1, 2, 3, 4, 5}, {2, 4, 6, 8, 10}),
        ("last", 12, 6, {1, 2, 3, 4, 5}, {7, 8, 9, 10, 11}),
        ("skip", 12, 3, {1, 2}, {4, 8}),
        ("last", 12, 3, {1, 2}, {10, 11}),
        ("skip", 6, 4, {1, 2, 3}, {2, 3, 4}),
        ("1:1,6:12", 12, 6, {1, 6}, {1, 12}),
    ],
)
def test_layers_are_those_of_the_paper(layers, n, m, student, teacher):
    made = objective(Settings(layers=layers), ModelShape(n, 24, 48, 4), ModelShape(m, 24, 48, 4))
    assert made.student_needs == Needs(hidden=frozenset(student))
    assert made.teacher_needs == Needs(hidden=frozenset(teacher))
    assert not list(made.projections.parameters())


@pytest.mark.parametrize("width", [24, 12])
def test_value_and_gradient_are_those_of_the_formula(width):
    made = objective(Settings(weight=50), TEACHER, ModelShape(3, width, 48, 4))
    t, s = signals({4, 8}, 24, 0), signals({1, 2}, width, 1)
    total = made.terms(t, s)["patience"]
    total.backward()
    trained = [*s.hidden.values(), *made.projections.parameters()]
    gradients = [x.grad for x in trained]
    errors = []
    for m, n in ((1, 4), (2, 8)):
        for row in range(3):
            x, y = s.hidden[m][row, 0].double(), t.hidden[n][row, 0].double()
            if width != 24:
                x = made.projections[str(m)].weight.double() @ x
            errors += [(x / x.norm() - y / y.norm()) ** 2]
    expected = 50 * torch.stack(errors).mean()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-7)
    for one, other in zip(gradients, torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert all(x.grad is None for x in t.hidden.values())


@pytest.mark.parametrize(
    ("layers", "student", "message"),
    [
        ("skip", 1, "the student has a single layer; give a list of pairs, such as 1:12"),
        ("uniform", 6, "neither skip, last nor a list of student:teacher pairs"),
        ("1:13", 6, "layer 13 of the teacher"),
    ],
)
def test_maps_that_cannot_be(layers, student, message):
    with pytest.raises(ValueError, match=message):
        objective(Settings(layers=layers), TEACHER, ModelShape(student, 24, 48, 4))
