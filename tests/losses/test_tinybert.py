"""TinyBERT: equal to formulas written for one token at a time in float64, sums over layers, and what it says."""

import pytest
import torch
from pydantic import ValidationError

from kdcli.losses import relation
from kdcli.losses.relation import regroup, score_mse
from kdcli.losses.states import masked_mse
from kdcli.losses.tinybert import Settings, objective
from kdcli.types import ModelShape, Needs, Signals

TEACHER = ModelShape(layers=6, hidden=24, ffn=48, heads=4)
STUDENT = ModelShape(layers=3, hidden=12, ffn=24, heads=4)
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signals(needs, shape, mask, seed, grad=False, dtype=torch.float32):
    batch, length = mask.shape[0], mask.shape[-1]

    def made(n, *sizes):
        return normal(*sizes, seed=seed * 1000 + n).to(dtype).requires_grad_(grad)

    heads = (batch, shape.heads, length, shape.hidden // shape.heads)
    return Signals(
        mask=mask,
        q={n: made(n, *heads) for n in needs.q},
        k={n: made(100 + n, *heads) for n in needs.k},
        hidden={n: made(200 + n, batch, length, shape.hidden) for n in needs.hidden},
    )


def isolated(batch, length):
    document = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])[:batch, :length]
    allowed = (document[:, :, None] == document[:, None, :])[:, None]
    allowed[0, 0, length - 1] = False  # a row that is nothing but padding
    return allowed


def attention_reference(tq, tk, sq, sk, mask):
    """A query at a time over the keys that it sees, in float64: no mask arithmetic at all."""
    batch, heads, length, _ = tq.shape
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch):
        for i in range(length):
            if mask is None:
                keys = list(range(length))
            elif mask.dim() == 2:
                keys = [j for j in range(length) if mask[b, j]] if mask[b, i] else []
            else:
                keys = [j for j in range(length) if mask[b, 0, i, j]]
            rows += bool(keys)
            for a in range(heads if keys else 0):
                t = tk[b, a, keys].double() @ tq[b, a, i].double() / tq.shape[-1] ** 0.5
                s = sk[b, a, keys].double() @ sq[b, a, i].double() / sq.shape[-1] ** 0.5
                total = total + ((t - s) ** 2).mean()
    return total / (heads * max(rows, 1))


def hidden_reference(teacher, student, mask):
    rows = [
        ((teacher[b, i].double() - student[b, i].double()) ** 2).mean()
        for b in range(mask.shape[0])
        for i in range(mask.shape[1])
        if mask[b, i]
    ]
    return torch.stack(rows).mean()


@pytest.mark.parametrize("kind", ["none", "padded", "isolated"])
@pytest.mark.parametrize("block", [1, 80, 1 << 19])
def test_score_error_and_its_gradients_equal_the_float64_reference(kind, block, monkeypatch):
    monkeypatch.setitem(relation.BLOCK_SCORES, "cpu", block)
    length = 6 if kind == "isolated" else 5
    mask = {"none": None, "padded": PADDED, "isolated": isolated(3, 6)}[kind]
    tq, tk = normal(3, 4, length, 8, seed=0), normal(3, 4, length, 8, seed=1)
    sq, sk = (normal(3, 4, length, 3, seed=n).requires_grad_() for n in (2, 3))
    sq64, sk64 = (x.detach().double().requires_grad_() for x in (sq, sk))
    expected = attention_reference(tq, tk, sq64, sk64, mask)
    (3 * expected).backward()
    got = score_mse(tq, tk, sq, sk, mask)
    (3 * got).backward()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sq.grad.double(), sq64.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sk.grad.double(), sk64.grad, rtol=1e-5, atol=1e-6)


def test_what_stands_at_padded_positions_changes_neither_value_nor_gradient():
    tq, tk, sq, sk = (normal(3, 4, 5, 8, seed=n) for n in range(4))
    results = []
    for noise in (0.0, 50.0):
        there = noise * (1 - PADDED)[:, None, :, None]
        x, y = ((t + there).requires_grad_() for t in (sq, sk))
        loss = score_mse(tq + there, tk - there, x, y, PADDED)
        loss.backward()
        results.append((loss.detach(), x.grad, y.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_rows_cut_to_their_own_length_give_the_same_loss():
    tq, tk, sq, sk = (normal(3, 4, 5, 8, seed=n) for n in range(4))
    weights = PADDED.sum(-1)
    alone = [score_mse(*(x[b : b + 1, :, :n] for x in (tq, tk, sq, sk)), None) for b, n in enumerate(weights.tolist())]
    expected = (torch.stack(alone) * weights).sum() / weights.sum()
    torch.testing.assert_close(score_mse(tq, tk, sq, sk, PADDED), expected)


def test_a_perfect_student_has_no_error_and_no_real_token_none_either():
    tq, tk = normal(2, 4, 5, 8, seed=0), normal(2, 4, 5, 8, seed=1)
    assert score_mse(tq, tk, tq.clone(), tk.clone(), None).item() == pytest.approx(0, abs=1e-10)
    assert score_mse(tq, tk, tk, tq, torch.zeros(2, 5)).item() == 0


def test_bf16_signals_are_compared_in_float32_and_other_heads_refused():
    tq, tk, sq, sk = (normal(2, 4, 7, 8, seed=n).bfloat16() for n in range(4))
    sq.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = score_mse(tq, tk, sq, sk, None)
    got.backward()
    assert got.dtype == torch.float32
    assert sq.grad.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), attention_reference(tq, tk, sq.detach(), sk, None), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="regroup"):
        score_mse(tq, tk, sq[:, :1], sk[:, :1], None)


def expected_terms(made, t, s, pairs, weights, shared):
    """The paper's sums over layers, from the references above."""
    found = {"embedding": 0.0, "hidden": 0.0, "attention": 0.0}
    for m, n in pairs.items():
        matrix = made.projections["shared" if shared else str(m)].weight.double()
        error = hidden_reference(t.hidden[n], s.hidden[m].double() @ matrix.T, PADDED)
        found["hidden" if m else "embedding"] += weights[m] * error
        if m:
            found["attention"] += weights[m] * attention_reference(t.q[n], t.k[n], s.q[m], s.k[m], PADDED)
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("layers", "pairs"),
    [("uniform", {0: 0, 1: 2, 2: 4, 3: 6}), ("top", {0: 0, 1: 4, 2: 5, 3: 6}), ("0:0,2:5", {0: 0, 2: 5})],
)
@pytest.mark.parametrize("weights", [None, [0.5, 1, 2, 3]])
def test_terms_and_gradients_are_the_papers_sums_over_layers(layers, pairs, weights, shared):
    made = objective(Settings(layers=layers, layer_weights=weights, share_projection=shared), TEACHER, STUDENT)
    layers_of_student, layers_of_teacher = frozenset(pairs), frozenset(pairs.values())
    assert made.student_needs == Needs(layers_of_student - {0}, layers_of_student - {0}, hidden=layers_of_student)
    assert made.teacher_needs == Needs(layers_of_teacher - {0}, layers_of_teacher - {0}, hidden=layers_of_teacher)
    t = signals(made.teacher_needs, TEACHER, PADDED, 0, grad=True)
    s = signals(made.student_needs, STUDENT, PADDED, 1, grad=True)
    got = made.terms(t, s)
    sum(got.values()).backward()
    trained = [*(x for d in (s.q, s.k, s.hidden) for x in d.values()), *made.projections.parameters()]
    gradients = [x.grad for x in trained]
    expected = expected_terms(made, t, s, pairs, weights or [1, 1, 1, 1], shared)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients, torch.autograd.grad(sum(expected.values()), trained), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert all(x.grad is None for d in (t.q, t.k, t.hidden) for x in d.values())


def test_micro_batches_weighted_by_their_tokens_add_up_to_the_batch():
    made = objective(Settings(), TEACHER, STUDENT)
    t, s = signals(made.teacher_needs, TEACHER, PADDED, 0), signals(made.student_needs, STUDENT, PADDED, 1)

    def part(x, rows, length):
        return Signals(
            mask=PADDED[rows, :length],
            q={n: v[rows, :, :length] for n, v in x.q.items()},
            k={n: v[rows, :, :length] for n, v in x.k.items()},
            hidden={n: v[rows, :length] for n, v in x.hidden.items()},
        )

    whole = made.terms(t, s)
    one, two = (made.terms(part(t, r, n), part(s, r, n)) for r, n in ((slice(0, 1), 5), (slice(1, 3), 3)))
    for name, value in whole.items():
        torch.testing.assert_close((5 * one[name] + 4 * two[name]) / 9, value)


@pytest.mark.parametrize(
    ("keys", "terms", "needs"),
    [
        ({"embedding_weight": 0.0}, {"hidden", "attention"}, Needs({1, 2, 3}, {1, 2, 3}, hidden={1, 2, 3})),
        ({"hidden_weight": 0.0}, {"embedding", "attention"}, Needs({1, 2, 3}, {1, 2, 3}, hidden={0})),
        ({"attention_weight": 0.0}, {"embedding", "hidden"}, Needs(hidden={0, 1, 2, 3})),
        ({"layer_weights": [0, 1, 0, 1]}, {"hidden", "attention"}, Needs({1, 3}, {1, 3}, hidden={1, 3})),
        ({"layers": "2:3", "hidden_weight": 0.0}, {"attention"}, Needs({2}, {2})),
    ],
)
def test_what_weighs_nothing_is_neither_computed_nor_heard_nor_learned(keys, terms, needs):
    made = objective(Settings(**keys), TEACHER, STUDENT)
    assert made.student_needs == needs
    assert set(made.projections) == {str(m) for m in needs.hidden}
    t, s = signals(made.teacher_needs, TEACHER, PADDED, 0), signals(made.student_needs, STUDENT, PADDED, 1)
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
def test_other_heads_are_regrouped_and_that_is_said(teacher, student, heads):
    made = objective(Settings(), teacher, student)
    assert made.notes == (
        f"the teacher has {teacher.heads} attention heads and the student {student.heads}: both are compared regrouped "
        f"into {heads}",
    )
    t, s = signals(made.teacher_needs, teacher, PADDED, 0), signals(made.student_needs, student, PADDED, 1)
    expected = sum(
        attention_reference(*(regroup(x, heads) for x in (t.q[n], t.k[n], s.q[m], s.k[m])), PADDED)
        for m, n in ((1, 2), (2, 4), (3, 6))
    )
    torch.testing.assert_close(made.terms(t, s)["attention"].double(), expected, rtol=1e-5, atol=1e-6)


def test_equal_heads_need_no_note():
    assert objective(Settings(), TEACHER, STUDENT).notes == ()
    other = ModelShape(3, 12, 24, 2)
    assert objective(Settings(attention_weight=0.0), TEACHER, other).notes == ()


def test_matrices_are_shared_on_request_and_start_as_the_identity_between_equal_widths():
    assert set(objective(Settings(share_projection=True), TEACHER, STUDENT).projections) == {"shared"}
    made = objective(Settings(), TEACHER, ModelShape(3, 24, 48, 4))
    assert set(made.projections) == {"0", "1", "2", "3"}
    for p in made.projections.values():
        assert p.bias is None
        assert p.weight.requires_grad
        assert torch.equal(p.weight, torch.eye(24))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_weights": [1, 1, 1]}, "holds 3 numbers.*give 4"),
        ({"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0}, "nothing is left to compare"),
        ({"layers": "0:0", "embedding_weight": 0.0}, "nothing is left to compare"),
        ({"layers": "1:7"}, "layer 7 of the teacher"),
    ],
)
def test_settings_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        objective(Settings(**keys), TEACHER, STUDENT)


@pytest.mark.parametrize("keys", [{"hidden_weight": -1.0}, {"layer_weights": [1, -1]}, {"layers": 3}, {"layer": "top"}])
def test_mistyped_settings_are_refused(keys):
    with pytest.raises(ValidationError):
        Settings(**keys)


@pytest.mark.parametrize("mask", [None, PADDED, isolated(3, 5)])
def test_state_error_averages_over_real_tokens_and_components(mask):
    teacher, student = normal(3, 5, 8, seed=0), normal(3, 5, 8, seed=1)
    real = torch.ones(3, 5) if mask is None else mask if mask.dim() == 2 else mask.any(-1)[:, 0]
    torch.testing.assert_close(masked_mse(teacher, student, mask).double(), hidden_reference(teacher, student, real))
