"""Contract of every loss between signals of layers: zero for a perfect student, blind to padding, no gradient to the
teacher, it learns. Losses of masked language models are under theirs in test_masked_methods.py."""

import importlib
import pkgutil

import pytest
import torch
from pydantic import ValidationError

import kdcli.losses
from kdcli.losses import minilm, minilmv2
from kdcli.losses.relation import relation_kl
from kdcli.types import ModelShape, Needs, Signals

TEACHER = ModelShape(layers=4, hidden=32, ffn=64, heads=4)
STUDENT = ModelShape(layers=2, hidden=16, ffn=32, heads=4)
VARIANTS = {
    "minilm": [
        {},
        {"value": "none"},
        {"value": "mse"},
        {"layers": "uniform"},
        {"hidden": "relation"},
        {"hidden": "mse", "hidden_weight": 0.5},
    ],
    "minilmv2": [{}, {"relation_heads": 8, "teacher_layer": 3}, {"value_weight": 0.0}],
    "pkd": [{}, {"layers": "last"}, {"layers": "0:0,2:4", "weight": 10.0}],
    "tinybert": [
        {},
        {"layers": "top", "share_projection": True},
        {"layers": "0:0,1:3", "layer_weights": [0.5, 2, 0]},
        {"embedding_weight": 0.0, "hidden_weight": 0.0},
        {"attention_weight": 0.0},
    ],
}
CASES = [(method, keys) for method, variants in VARIANTS.items() for keys in variants]


def build(method, keys, teacher=TEACHER, student=STUDENT):
    module = importlib.import_module(f"kdcli.losses.{method}")
    return module.objective(module.Settings(**keys), teacher, student)


def signals(needs: Needs, shape: ModelShape, mask, seed, grad=False) -> Signals:
    g = torch.Generator().manual_seed(seed)
    batch, length = mask.shape

    def heads():
        return torch.randn(batch, shape.heads, length, shape.hidden // shape.heads, generator=g).requires_grad_(grad)

    return Signals(
        mask=mask,
        q={n: heads() for n in sorted(needs.q)},
        k={n: heads() for n in sorted(needs.k)},
        v={n: heads() for n in sorted(needs.v)},
        hidden={
            n: torch.randn(batch, length, shape.hidden, generator=g).requires_grad_(grad) for n in sorted(needs.hidden)
        },
    )


def leaves(s: Signals):
    return [t for d in (s.q, s.k, s.v, s.hidden) for t in d.values()]


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def hears(module):
    """Whether a method compares signals at all: soft targets alone ask for nothing but logits, which others add."""
    return module.objective(module.Settings(), TEACHER, STUDENT).student_needs != Needs()


def test_every_loss_file_is_under_contract():
    files = {m.name for m in pkgutil.iter_modules(kdcli.losses.__path__)}
    modules = {name: importlib.import_module(f"kdcli.losses.{name}") for name in files}
    methods = {name: module for name, module in modules.items() if hasattr(module, "objective")}
    assert all({"text", "masked", "task"} >= module.INPUTS for module in methods.values())
    assert all(module.STAGE in ("separate", "joint") for module in methods.values() if "task" in module.INPUTS)
    of_layers = {name for name, module in methods.items() if {"masked"} != module.INPUTS and hears(module)}
    assert of_layers == set(VARIANTS)


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_learns_and_is_deterministic_and_the_teacher_gets_no_gradient(method, keys):
    made = build(method, keys)
    t = signals(made.teacher_needs, TEACHER, MASK, 0, grad=True)
    s = signals(made.student_needs, STUDENT, MASK, 1, grad=True)
    first = sum(made.terms(t, s).values())
    assert torch.equal(first, sum(made.terms(t, s).values()))
    first.backward()
    assert all(x.grad is None for x in leaves(t))
    assert all(x.grad is not None for x in leaves(s))
    with torch.no_grad():
        for x in leaves(s):
            x -= 0.5 * x.grad
    assert sum(made.terms(t, s).values()) < first


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_padding_changes_nothing(method, keys):
    made = build(method, keys)
    t, s = signals(made.teacher_needs, TEACHER, MASK, 0), signals(made.student_needs, STUDENT, MASK, 1)
    before = sum(made.terms(t, s).values())
    for x in leaves(t) + leaves(s):
        x[1, ..., 3:, :] += 100
    torch.testing.assert_close(sum(made.terms(t, s).values()), before)


@pytest.mark.parametrize(("method", "keys"), [c for c in CASES if c[1].get("value") != "mse"])
def test_zero_when_the_student_has_the_signals_of_its_teacher(method, keys):
    # All layers of both are alike, so that whichever are compared agree; matrices of equal widths do nothing at first.
    student = ModelShape(STUDENT.layers, TEACHER.hidden, TEACHER.ffn, TEACHER.heads)
    made = build(method, keys, TEACHER, student)
    one = signals(Needs(*(frozenset({1}),) * 4), TEACHER, MASK, 0)
    layers = {kind: dict.fromkeys(range(5), getattr(one, kind)[1]) for kind in ("q", "k", "v", "hidden")}
    alike = Signals(mask=MASK, **layers)
    assert sum(made.terms(alike, alike).values()).item() == pytest.approx(0, abs=1e-6)


def test_minilm_is_eq_6_plus_eq_9_of_the_last_layers():
    made = build("minilm", {})
    assert made.teacher_needs == Needs(q=frozenset({4}), k=frozenset({4}), v=frozenset({4}))
    assert made.student_needs == Needs(q=frozenset({2}), k=frozenset({2}), v=frozenset({2}))
    t, s = signals(made.teacher_needs, TEACHER, MASK, 0), signals(made.student_needs, STUDENT, MASK, 1)
    terms = made.terms(t, s)
    torch.testing.assert_close(terms["attention"], relation_kl(t.q[4], t.k[4], s.q[2], s.k[2], MASK))
    torch.testing.assert_close(terms["value"], relation_kl(t.v[4], t.v[4], s.v[2], s.v[2], MASK))


def test_minilm_refuses_other_head_counts_and_names_the_way_out():
    with pytest.raises(ValueError, match=r"@4.*minilmv2"):
        build("minilm", {}, student=ModelShape(2, 16, 32, 2))


def test_minilmv2_bridges_other_head_counts():
    student = ModelShape(2, 16, 32, 2)
    made = build("minilmv2", {"relation_heads": 4}, student=student)
    t, s = signals(made.teacher_needs, TEACHER, MASK, 0), signals(made.student_needs, student, MASK, 1)
    assert set(made.terms(t, s)) == {"query", "key", "value"}


@pytest.mark.parametrize(("layers", "expected"), [(12, 12), (24, 21), (6, 6)])
def test_minilmv2_default_teacher_layer(layers, expected):
    made = minilmv2.objective(minilmv2.Settings(), ModelShape(layers, 32, 64, 4), STUDENT)
    assert made.teacher_needs.q == {expected}


@pytest.mark.parametrize(
    ("keys", "message"), [({"relation_heads": 5}, "set loss.relation_heads"), ({"teacher_layer": 9}, "1 to 4")]
)
def test_minilmv2_settings_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        build("minilmv2", keys)


def test_unknown_and_mistyped_settings_are_refused():
    with pytest.raises(ValidationError):
        minilm.Settings(valu="none")
    with pytest.raises(ValidationError):
        minilm.Settings(hidden_weight="1")
