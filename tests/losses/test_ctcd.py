"""Co-distillation's terms: their values, where their gradients go, what is not computed, what is
refused."""

import pytest
import torch
import torch.nn.functional as F

from kdcli.errors import UsageError
from kdcli.losses.ctcd import CHUNK_LOGITS, STUDENT_MODEL, TEACHER_MODEL, Weights, ctcd, reverse_kl
from kdcli.losses.vocabulary import masked_ce, soft_kl

P, V, T = 9, 17, 2.0
ALL = Weights(1.0, 2.0, 3.0, 4.0, 5.0)


def drawn(seed, dtype=torch.float32):
    return torch.randn(P, V, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


@pytest.fixture
def logits():
    return {TEACHER_MODEL: drawn(0).requires_grad_(), STUDENT_MODEL: drawn(1).requires_grad_()}


@pytest.fixture
def labels():
    return torch.randint(V, (P,), generator=torch.Generator().manual_seed(2))


def terms(logits, labels, weights=ALL, kl=None):
    frozen = drawn(3)
    return ctcd(
        lambda x: masked_ce(x, labels), lambda a, b: soft_kl(a, b, T), logits, weights, frozen, kl
    )


def kl(p, q):
    """T² · KL(p ‖ q) as one writes it."""
    log_p, log_q = (F.log_softmax(x / T, -1) for x in (p, q))
    return T * T * (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def test_values_are_those_of_equations_1_to_5(logits, labels):
    teacher, student, frozen = logits[TEACHER_MODEL], logits[STUDENT_MODEL], drawn(3)
    expected = {
        "teacher/hard": (3.0, F.cross_entropy(teacher, labels)),
        "teacher/soft": (4.0, kl(student, teacher)),
        "teacher/community": (5.0, kl(frozen, teacher)),
        "student/hard": (1.0, F.cross_entropy(student, labels)),
        "student/soft": (2.0, kl(teacher, student)),
        "student/community": (5.0, kl(frozen, student)),
    }
    named = terms(logits, labels)
    assert list(named) == list(expected)
    for name, (weight, value) in expected.items():
        assert named[name][0] == weight
        torch.testing.assert_close(named[name][1], value.detach())


def test_the_gradient_of_the_whole_is_that_of_the_formula(logits, labels):
    teacher, student, frozen = logits[TEACHER_MODEL], logits[STUDENT_MODEL], drawn(3)
    whole = sum(weight * value for weight, value in terms(logits, labels).values())
    gradients = torch.autograd.grad(whole, [teacher, student])
    plain = (
        F.cross_entropy(student, labels)
        + 2 * kl(teacher.detach(), student)
        + 5 * kl(frozen, student)
    )
    plain = (
        plain
        + 3 * F.cross_entropy(teacher, labels)
        + 4 * kl(student.detach(), teacher)
        + 5 * kl(frozen, teacher)
    )
    for one, other in zip(gradients, torch.autograd.grad(plain, [teacher, student]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        ("standalone", {"teacher/hard", "student/hard"}),
        ("one-way", {"teacher/hard", "student/hard", "student/soft"}),
        ("reversed", {"teacher/hard", "student/hard", "teacher/soft"}),
        ("co-distillation", {"teacher/hard", "student/hard", "student/soft", "teacher/soft"}),
    ],
)
def test_a_mode_is_the_same_loss_with_weights_of_zero_and_those_are_not_computed(
    logits, labels, mode, left
):
    calls = []

    def soft(of, to):
        calls.append((of is logits[TEACHER_MODEL], to is logits[TEACHER_MODEL]))
        return soft_kl(of, to, T)

    named = ctcd(lambda x: masked_ce(x, labels), soft, logits, Weights.of([1, 2, 3, 4], mode))
    assert (set(named), len(calls)) == (left, sum(name.endswith("soft") for name in left))
    whole = terms(logits, labels)
    for name in left:
        assert named[name][0] == whole[name][0]
        assert torch.equal(named[name][1], whole[name][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_printed_order_turns_the_arguments_round(dtype, monkeypatch):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 2 * V)
    frozen, model = drawn(3, dtype), drawn(1, dtype).requires_grad_()
    frozen.requires_grad_()
    value = reverse_kl(frozen, model, T)
    plain_model = model.detach().float().requires_grad_()
    plain = kl(plain_model, frozen.detach().float())
    torch.testing.assert_close(value, plain.detach())
    (gradient,) = torch.autograd.grad(plain, plain_model)
    value.backward()
    assert frozen.grad is None
    torch.testing.assert_close(
        model.grad.float(), gradient, atol=2e-3 if dtype == torch.bfloat16 else 1e-6, rtol=2e-2
    )
    assert reverse_kl(torch.zeros(0, V), torch.zeros(0, V, requires_grad=True), T) == 0


def test_the_printed_order_is_for_the_frozen_model_alone(logits, labels):
    plain, printed = (
        terms(logits, labels),
        terms(logits, labels, kl=lambda a, b: reverse_kl(a, b, T)),
    )
    differing = {name for name in plain if not torch.equal(plain[name][1], printed[name][1])}
    assert differing == {"teacher/community", "student/community"}


def test_the_frozen_models_logits_are_required(logits, labels):
    with pytest.raises(ValueError, match="frozen"):
        ctcd(lambda x: masked_ce(x, labels), lambda a, b: soft_kl(a, b, T), logits, ALL)


@pytest.mark.parametrize(
    ("numbers", "mode", "message"),
    [
        *(([1.0] * n, "co-distillation", "four numbers") for n in (0, 3, 5)),
        *(
            ([1, bad, 1, 1], "co-distillation", "four numbers")
            for bad in (-1, float("nan"), float("inf"))
        ),
        ([0, 0, 0, 0], "co-distillation", "every weight that mode co-distillation uses is 0"),
        ([0, 1, 0, 1], "standalone", "every weight that mode standalone uses is 0"),
        ([0, 0, 0, 1], "one-way", "every weight that mode one-way uses is 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(numbers, mode, message):
    with pytest.raises(UsageError, match=message):
        Weights.of(numbers, mode)


def test_which_models_learn():
    weights = Weights.of([1, 1, 0, 4], "one-way")
    assert (weights.reaches(STUDENT_MODEL), weights.reaches(TEACHER_MODEL), weights.mutual) == (
        True,
        False,
        True,
    )
    assert Weights.of([1, 1, 0, 4], "one-way", community=True).reaches(TEACHER_MODEL)
    assert not Weights.of([1, 1, 1, 4], "standalone").mutual
