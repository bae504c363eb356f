"""The methods that learn from masked text: their formulas in float64, who gets a gradient, padding, micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from encoders import tiny_config
from transformers import AutoModelForMaskedLM

from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs, methods
from kdcli.losses.states import cosine_distance
from kdcli.models.capture import capture
from kdcli.models.masked_lm import student_with_head
from kdcli.models.shape import build_student, parse_shape, shape_of
from kdcli.types import IGNORED, ModelShape, Needs, Signals

TEACHER = ModelShape(layers=4, hidden=16, ffn=64, heads=4)
STUDENT = ModelShape(layers=2, hidden=16, ffn=32, heads=4)
WORDS = 23
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
LABELS = torch.full((3, 6), IGNORED)
LABELS[0, 2], LABELS[0, 4], LABELS[1, 0], LABELS[2, 1] = 7, 0, 22, 3
VARIANTS = {
    "distilbert": [
        {},
        {"temperature": 1.0, "soft_weight": 0.5, "mlm_weight": 0.25, "hidden_weight": 3.0},
        {"soft_weight": 0.0},
        {"mlm_weight": 0.0},
        {"hidden_weight": 0.0},
    ],
    "mlm-kd": [{}, {"temperature": 4.0}],
    "masked-lm": [{}],
}
CASES = [(method, keys) for method, variants in VARIANTS.items() for keys in variants]


def signals(needs: Needs, shape: ModelShape, seed, grad=False) -> Signals:
    g = torch.Generator().manual_seed(seed)

    def drawn(*size):
        return torch.randn(*size, generator=g).requires_grad_(grad)

    rows = int((LABELS != IGNORED).sum())
    return Signals(
        mask=MASK,
        labels=LABELS,
        hidden={n: drawn(*MASK.shape, shape.hidden) for n in sorted(needs.hidden)},
        logits=drawn(rows, WORDS) if needs.masked_logits else None,
    )


def leaves(s: Signals):
    return [*s.hidden.values(), *([s.logits] if s.logits is not None else [])]


def pair(made, grad=False):
    return signals(made.teacher_needs, TEACHER, 0, grad), signals(made.student_needs, STUDENT, 1, grad)


def by_hand(method, keys, t, s):
    """The loss in float64, token by token, weighted as the settings say."""
    keys = check_settings(method, keys).model_dump()
    labels = [int(label) for label in LABELS.flatten() if label != IGNORED]
    found = {}
    soft = keys.get("soft_weight", {"mlm-kd": 1.0}.get(method, 0.0))
    if soft:
        temperature, total = keys["temperature"], 0.0
        for z_t, z_s in zip(t.logits.tolist(), s.logits.tolist(), strict=True):
            (p, q) = ([math.exp(z / temperature) for z in row] for row in (z_t, z_s))
            total += sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True))
        found["soft"] = soft * temperature**2 * total / len(labels)
    mlm = keys.get("mlm_weight", {"masked-lm": 1.0}.get(method, 0.0))
    if mlm:
        total = 0.0
        for row, label in zip(s.logits.tolist(), labels, strict=True):
            total -= math.log(math.exp(row[label]) / sum(map(math.exp, row)))
        found["mlm"] = mlm * total / len(labels)
    if keys.get("hidden_weight"):
        distances = []
        for h_t, h_s, real in zip(t.hidden[4].flatten(0, 1), s.hidden[2].flatten(0, 1), MASK.flatten(), strict=True):
            if real:
                dot = sum(a * b for a, b in zip(h_t.tolist(), h_s.tolist(), strict=True))
                distances.append(1 - dot / math.hypot(*h_t.tolist()) / math.hypot(*h_s.tolist()))
        found["hidden"] = keys["hidden_weight"] * sum(distances) / len(distances)
    return found


def test_these_are_the_methods_that_learn_from_masked_text():
    assert {method for method in methods() if "masked" in inputs(method)} == set(VARIANTS)
    assert all(inputs(method) == {"masked"} for method in VARIANTS)


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_the_terms_are_those_of_the_formula(method, keys):
    made = build_objective(method, keys, TEACHER, STUDENT)
    t, s = pair(made)
    found = made.terms(t, s)
    expected = by_hand(method, keys, t, s)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(expected[name], rel=1e-5)
    assert sum(p.numel() for p in made.projections.parameters()) == 0


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_learns_and_is_deterministic_and_the_teacher_gets_no_gradient(method, keys):
    made = build_objective(method, keys, TEACHER, STUDENT)
    t, s = pair(made, grad=True)
    first = sum(made.terms(t, s).values())
    assert torch.equal(first, sum(made.terms(t, s).values()))
    first.backward()
    assert all(x.grad is None for x in leaves(t))
    assert all(x.grad is not None and x.grad.any() for x in leaves(s))
    with torch.no_grad():
        for x in leaves(s):
            x -= 0.5 * x.grad
    assert sum(made.terms(t, s).values()) < first


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_padding_changes_neither_value_nor_gradient(method, keys):
    made = build_objective(method, keys, TEACHER, STUDENT)
    found = []
    for noise in (0.0, 100.0):
        t, s = pair(made, grad=True)
        with torch.no_grad():
            for x in (*t.hidden.values(), *s.hidden.values()):
                x += noise * (1 - MASK)[:, :, None]
        loss = sum(made.terms(t, s).values())
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves(s))])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("method", "keys"), [c for c in CASES if c[0] == "mlm-kd" or c[1].get("mlm_weight") == 0])
def test_zero_when_the_student_is_the_teacher(method, keys):
    made = build_objective(method, keys, TEACHER, TEACHER)
    t = signals(made.teacher_needs, TEACHER, 0)
    assert sum(made.terms(t, t).values()).item() == pytest.approx(0, abs=1e-5)


def test_the_weights_are_those_published():
    assert check_settings("distilbert", {}).model_dump() == {
        "temperature": 2.0,
        "soft_weight": 5.0,
        "mlm_weight": 2.0,
        "hidden_weight": 1.0,
    }


@pytest.mark.parametrize(
    ("method", "keys", "teacher", "student"),
    [
        ("distilbert", {}, Needs(hidden=frozenset({4}), masked_logits=True), Needs(frozenset(), masked_logits=True)),
        ("distilbert", {"soft_weight": 0.0}, Needs(hidden=frozenset({4})), Needs(masked_logits=True)),
        ("distilbert", {"soft_weight": 0.0, "hidden_weight": 0.0}, Needs(), Needs(masked_logits=True)),
        ("mlm-kd", {}, Needs(masked_logits=True), Needs(masked_logits=True)),
        ("masked-lm", {}, Needs(), Needs(masked_logits=True)),
    ],
)
def test_no_more_is_asked_of_the_models_than_the_terms_read(method, keys, teacher, student):
    made = build_objective(method, keys, TEACHER, STUDENT)
    assert made.teacher_needs == teacher
    hidden = frozenset({2}) if teacher.hidden else frozenset()
    assert made.student_needs == student | Needs(hidden=hidden)


def test_masked_language_modelling_reads_no_teacher():
    made = build_objective("masked-lm", {}, TEACHER, STUDENT)
    _, s = pair(made)
    assert torch.equal(made.terms(Signals(), s)["mlm"], made.terms(s, s)["mlm"])


def test_distilbert_refuses_another_width_and_names_the_way_out():
    narrow = ModelShape(2, 8, 32, 4)
    with pytest.raises(UsageError, match=r"16 wide, the student 8\. Give the student 2x16.*loss\.hidden_weight=0"):
        build_objective("distilbert", {}, TEACHER, narrow)
    made = build_objective("distilbert", {"hidden_weight": 0.0}, TEACHER, narrow)
    assert set(made.terms(*pair(made))) == {"soft", "mlm"}


@pytest.mark.parametrize(
    ("method", "keys", "said"),
    [
        ("distilbert", {"soft_weight": 0.0, "mlm_weight": 0.0, "hidden_weight": 0.0}, "nothing is left to learn"),
        ("distilbert", {"temperature": 0.0}, "'loss.temperature' .*greater than 0, got 0.0"),
        ("distilbert", {"mlm": 1.0}, r"unknown key 'loss\.mlm'"),
        ("mlm-kd", {"temperature": -1.0}, "greater than 0"),
        ("masked-lm", {"temperature": 1.0}, "unknown key"),
    ],
)
def test_settings_that_cannot_be(method, keys, said):
    with pytest.raises(UsageError, match=said):
        build_objective(method, keys, TEACHER, STUDENT)


def test_a_batch_without_labels_is_an_error():
    made = build_objective("masked-lm", {}, TEACHER, STUDENT)
    with pytest.raises(ValueError, match="has no labels"):
        made.terms(Signals(), Signals(logits=torch.zeros(1, 4)))


def test_cosine_distance_reads_every_form_of_mask():
    g = torch.Generator().manual_seed(0)
    t, s = (torch.randn(3, 6, 8, generator=g) for _ in range(2))
    document = torch.where(MASK == 1, 0, -1)
    isolated = ((document[:, :, None] == document[:, None]) & (MASK[:, None] == 1))[:, None]
    torch.testing.assert_close(cosine_distance(t, s, isolated), cosine_distance(t, s, MASK))
    torch.testing.assert_close(cosine_distance(t, s, None), cosine_distance(t, s, torch.ones_like(MASK)))
    assert cosine_distance(t, 3 * t, MASK).item() == pytest.approx(0, abs=1e-6)
    assert cosine_distance(t, -t, MASK).item() == pytest.approx(2, abs=1e-6)
    assert cosine_distance(t, s, torch.zeros_like(MASK)).item() == 0


@pytest.fixture
def models():
    torch.manual_seed(0)
    teacher = AutoModelForMaskedLM.from_config(tiny_config("bert", num_hidden_layers=4, initializer_range=0.3)).eval()
    shape = parse_shape("2x32", shape_of(teacher.config))
    student = student_with_head(teacher, build_student(teacher.base_model, shape)).model.eval()
    return teacher, student


def gradients_of(models, made, rows):
    """Gradients of the student on some rows of a batch, weighted by their labelled tokens, and that weight."""
    teacher, student = models
    batch = {name: x[rows] for name, x in batch_of_equal_rows().items()}
    with torch.no_grad():
        of_teacher = capture(teacher, made.teacher_needs)(batch)
    loss = sum(made.terms(of_teacher, capture(student, made.student_needs)(batch)).values())
    weight = float((batch["labels"] != IGNORED).sum())
    parameters = [p for p in student.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss * weight, parameters, allow_unused=True)
    return weight, [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def batch_of_equal_rows():
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (5, 12), generator=g)
    labels = torch.full_like(ids, IGNORED)
    for row in range(5):
        at = torch.randperm(12, generator=g)[:2]
        labels[row, at] = ids[row, at]
    return {"input_ids": ids.masked_fill(labels != IGNORED, 4), "labels": labels}


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_micro_batches_add_up_to_the_batch(models, method, keys):
    made = build_objective(method, keys, *(shape_of(m.config) for m in models))
    weight, whole = gradients_of(models, made, slice(0, 5))
    parts = [gradients_of(models, made, rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 5))]
    assert sum(w for w, _ in parts) == weight
    for gradient, *pieces in zip(whole, *(g for _, g in parts), strict=True):
        torch.testing.assert_close(sum(pieces), gradient, rtol=1e-4, atol=1e-5)
