"""Contract of every method, and what only one of them has; TinyBERT and PKD have files of their
own."""

import importlib
import pkgutil
import re

import pytest
import torch
import torch.nn.functional as F
import yaml
from references import LABELLED, LABELS, PADDED, leaves, normal, of_layers, signals

import kdcli.losses
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs_of, masks_text, methods
from kdcli.losses.relation import relation_kl
from kdcli.losses.states import cosine_distance
from kdcli.types import (
    IGNORED,
    ModelShape,
    Needs,
    Signals,
    counts_of,
    labelled_places,
)

TEACHER = ModelShape(layers=4, hidden=32, ffn=64, heads=4)
STUDENT = ModelShape(layers=2, hidden=16, ffn=32, heads=4)
AS_WIDE = ModelShape(layers=2, hidden=32, ffn=64, heads=4)
MINILM = [{"value": "none"}, {"value": "mse"}, {"layers": "uniform"}, {"hidden": "relation"}]
TINYBERT = [
    {"layers": "top", "share_projection": True},
    {"layers": "0:0,1:3", "layer_weights": [0.5, 2.0, 0.0]},
]
DISTILBERT = [{"temperature": 1.0, "soft_weight": 0.5, "mlm_weight": 0.25, "hidden_weight": 3.0}]
DISTILBERT += [{weight: 0.0} for weight in ("soft_weight", "mlm_weight", "hidden_weight")]
OF_LAYERS = {
    "minilm": [{}, *MINILM, {"hidden": "mse", "hidden_weight": 0.5}, {"masked_lm_weight": 0.5}],
    "minilmv2": [
        {},
        {"relation_heads": 8, "teacher_layer": 3},
        {"value_weight": 0.0},
        {"masked_lm_weight": 2.0},
    ],
    "pkd": [{}, {"layers": "last"}, {"layers": "0:0,2:4", "weight": 10.0}],
    "tinybert": [
        {},
        *TINYBERT,
        {"embedding_weight": 0.0, "hidden_weight": 0.0},
        {"attention_weight": 0.0},
    ],
}
MASKED = {
    "distilbert": [{}, *DISTILBERT],
    "mlm-kd": [{}, {"temperature": 4.0}],
    "masked-lm": [{}],
}
CASES = [(method, keys) for method, variants in (OF_LAYERS | MASKED).items() for keys in variants]
MASKED_CASES = [case for case in CASES if case[0] in MASKED]


def student_of(method):
    return AS_WIDE if method in MASKED else STUDENT


def build(method, keys, student=None):
    return build_objective(method, keys, TEACHER, student or student_of(method))


def pair(made, student, *, grad=False):
    return signals(made.teacher_needs, TEACHER, 0, grad=grad), signals(
        made.student_needs, student, 1, grad=grad
    )


def test_every_loss_file_is_under_contract():
    names = {m.name for m in pkgutil.iter_modules(kdcli.losses.__path__)} - {
        "relation_triton"
    }  # needs triton
    modules = [importlib.import_module(f"kdcli.losses.{name}") for name in names]
    assert {
        m.__name__.split(".")[-1].replace("_", "-") for m in modules if hasattr(m, "objective")
    } == set(methods())
    # Soft targets add no terms of their own: see test_task_losses.py; vectors: see
    # test_embedding.py.
    assert set(methods()) == {*OF_LAYERS, *MASKED, "soft-targets", "embedding"}
    assert all(inputs_of(method) == {"masked"} for method in MASKED)
    assert all({"text", "task"} >= inputs_of(method) for method in (*OF_LAYERS, "soft-targets"))
    assert all(
        m.STAGE in ("separate", "joint") for m in modules if "task" in getattr(m, "INPUTS", ())
    )
    assert build("soft-targets", {}).student_needs == Needs()


@pytest.mark.parametrize("method", methods())
def test_the_docstring_names_the_paper_and_when_to_use_it_and_its_example_is_a_recipe(method):
    text = str(importlib.import_module(f"kdcli.losses.{method.replace('-', '_')}").__doc__)
    assert "https://arxiv.org/abs/" in text
    assert "\nWhen to use: " in text
    assert "Prefer" in text.split()
    example = yaml.safe_load(
        "\n".join(re.findall(r"^    ((?:method|loss): .*)$", text, re.MULTILINE))
    )
    assert example["method"] == method
    check_settings(method, example.get("loss", {}))


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_it_learns_deterministically_and_sends_the_teacher_no_gradient(method, keys):
    made = build(method, keys)
    t, s = pair(made, student_of(method), grad=True)
    first = sum(made.terms(t, s).values())
    assert torch.equal(first, sum(made.terms(t, s).values()))
    first.backward()
    assert all(x.grad is None for x in leaves(t))
    assert all(x.grad is not None and (x.grad.any() or "value_weight" in keys) for x in leaves(s))
    with torch.no_grad():
        for x in leaves(s):
            x -= 0.5 * x.grad
    assert sum(made.terms(t, s).values()) < first


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_padding_changes_neither_value_nor_gradient(method, keys):
    made, results = build(method, keys), []
    for noise in (0.0, 100.0):
        t, s = pair(made, student_of(method), grad=True)
        with torch.no_grad():
            for x in (*of_layers(t), *of_layers(s)):
                x += noise * (1 - PADDED).view(3, *[1] * (x.dim() - 3), 5, 1)
        loss = sum(made.terms(t, s).values())
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in leaves(s))])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def rows_of(s, at):
    """Return the signals of some rows and of their labelled tokens."""
    picked = {kind: {n: x[at] for n, x in getattr(s, kind).items()} for kind in ("q", "k", "v")}
    hidden = {n: x[at] for n, x in s.hidden.items()}
    labels, rows_P = LABELS[at], LABELLED // LABELS.shape[1]
    chosen_P = torch.isin(rows_P, torch.tensor(at))
    logits = None if s.logits is None else s.logits[chosen_P]
    labelled = labelled_places({"labels": labels})
    return Signals(
        PADDED[at], **picked, hidden=hidden, logits=logits, labels=labels, labelled=labelled
    )


@pytest.mark.parametrize(("method", "keys"), CASES)
def test_the_terms_of_a_batch_are_the_means_of_its_parts(method, keys):
    made = build(method, keys)
    t, s = pair(made, student_of(method))
    whole, parts = made.terms(t, s), ([0, 1], [2])
    terms = [made.terms(rows_of(t, at), rows_of(s, at)) for at in parts]
    batches = [
        {"input_ids": LABELS[at], "attention_mask": PADDED[at], "labels": LABELS[at]}
        for at in parts
    ]
    counts = [counts_of(batch) for batch in batches]
    for name, value in whole.items():
        shares = [count[made.over[name]] for count in counts]
        weighted = sum(n * part[name] for n, part in zip(shares, terms, strict=True))
        torch.testing.assert_close(weighted / sum(shares), value)


def can_be_zero(method, keys):
    """No labels take part, and no learned matrix between values."""
    against_labels = method == "masked-lm" or (
        method == "distilbert" and keys.get("mlm_weight") != 0
    )
    against_labels |= "masked_lm_weight" in keys
    return not against_labels and keys.get("value") != "mse"


@pytest.mark.parametrize(("method", "keys"), [case for case in CASES if can_be_zero(*case)])
def test_a_student_with_its_teachers_signals_has_no_loss(method, keys):
    made = build(method, keys, AS_WIDE)
    one = signals(Needs(*(frozenset({1}),) * 4, masked_logits=True), TEACHER, 0)
    # All layers are alike, so whichever are compared agree; matrices of equal widths start as the
    # identity.
    layers = {
        kind: dict.fromkeys(range(5), getattr(one, kind)[1]) for kind in ("q", "k", "v", "hidden")
    }
    alike = Signals(mask=PADDED, labels=LABELS, labelled=LABELLED, logits=one.logits, **layers)
    assert sum(made.terms(alike, alike).values()).item() == pytest.approx(0, abs=1e-5)


# MiniLM and MiniLMv2.


def test_minilm_is_eq_6_plus_eq_9_of_the_last_layers():
    made = build("minilm", {})
    assert (made.teacher_needs, made.student_needs) == (
        Needs(*(frozenset({4}),) * 3),
        Needs(*(frozenset({2}),) * 3),
    )
    t, s = pair(made, STUDENT)
    terms = made.terms(t, s)
    torch.testing.assert_close(
        terms["attention"], relation_kl(t.q[4], t.k[4], s.q[2], s.k[2], PADDED)
    )
    torch.testing.assert_close(terms["value"], relation_kl(t.v[4], t.v[4], s.v[2], s.v[2], PADDED))


@pytest.mark.parametrize("method", ["minilm", "minilmv2"])
def test_a_masked_language_model_term_is_added_and_needs_nothing_more_of_the_teacher(method):
    plain, made = build(method, {}), build(method, {"masked_lm_weight": 0.5})
    assert made.teacher_needs == plain.teacher_needs
    assert made.student_needs == plain.student_needs | Needs(masked_logits=True)
    t, s = pair(made, STUDENT)
    terms, labels = made.terms(t, s), LABELS[LABELS != IGNORED]
    expected = -0.5 * s.logits.double().softmax(-1)[torch.arange(len(labels)), labels].log().mean()
    assert terms.pop("mlm").item() == pytest.approx(expected.item(), rel=1e-5)
    assert terms == plain.terms(t, s)
    assert [masks_text(method, keys) for keys in ({}, {"masked_lm_weight": 0.5})] == [False, True]


def test_minilmv2_bridges_other_head_counts():
    student = ModelShape(2, 16, 32, 2)
    made = build("minilmv2", {"relation_heads": 4}, student)
    assert set(made.terms(*pair(made, student))) == {"query", "key", "value"}


@pytest.mark.parametrize(
    ("layers", "asked", "expected"), [(12, None, 12), (24, None, 21), (6, None, 6), (6, -1, 5)]
)
def test_minilmv2_teacher_layer(layers, asked, expected):
    made = build_objective(
        "minilmv2", {"teacher_layer": asked}, ModelShape(layers, 32, 64, 4), STUDENT
    )
    assert made.teacher_needs.q == {expected}


# Methods on masked text.


def by_hand(method, keys, t, s):
    """The terms in float64, weighted as the settings say."""
    keys, labels, named = check_settings(method, keys).model_dump(), LABELS[LABELS != IGNORED], {}
    soft = keys.get("soft_weight", {"mlm-kd": 1.0}.get(method, 0.0))
    if soft:
        p, q = ((x.logits.double() / keys["temperature"]).softmax(-1) for x in (t, s))
        named["soft"] = soft * keys["temperature"] ** 2 * (p * (p / q).log()).sum(-1).mean()
    mlm = keys.get("mlm_weight", {"masked-lm": 1.0}.get(method, 0.0))
    if mlm:
        named["mlm"] = (
            -mlm * s.logits.double().softmax(-1)[torch.arange(len(labels)), labels].log().mean()
        )
    if keys.get("hidden_weight"):
        h_t, h_s = (x.double()[PADDED == 1] for x in (t.hidden[4], s.hidden[2]))
        named["hidden"] = (
            keys["hidden_weight"]
            * (1 - (h_t * h_s).sum(-1) / h_t.norm(dim=-1) / h_s.norm(dim=-1)).mean()
        )
    return named


@pytest.mark.parametrize(("method", "keys"), MASKED_CASES)
def test_the_terms_of_masked_text_are_those_of_the_formula(method, keys):
    made = build(method, keys)
    t, s = pair(made, AS_WIDE)
    terms, expected = made.terms(t, s), by_hand(method, keys, t, s)
    assert set(terms) == set(expected)
    for name, value in terms.items():
        assert (value.dtype, value.item()) == (
            torch.float32,
            pytest.approx(expected[name].item(), rel=1e-5),
        )
    assert not list(made.projections.parameters())


LAST, LOGITS = Needs(hidden=frozenset({4})), Needs(masked_logits=True)


@pytest.mark.parametrize(
    ("method", "keys", "teacher"),
    [
        ("distilbert", {}, LAST | LOGITS),
        ("distilbert", {"soft_weight": 0.0}, LAST),
        ("distilbert", {"soft_weight": 0.0, "hidden_weight": 0.0}, Needs()),
        ("mlm-kd", {}, LOGITS),
        ("masked-lm", {}, Needs()),
    ],
)
def test_only_what_the_terms_read_is_needed(method, keys, teacher):
    made = build(method, keys)
    assert made.teacher_needs == teacher
    assert made.student_needs == LOGITS | Needs(hidden=frozenset({2} if teacher.hidden else ()))


def test_distilbert_without_hidden_states_takes_another_width():
    made = build("distilbert", {"hidden_weight": 0.0}, STUDENT)
    assert set(made.terms(*pair(made, STUDENT))) == {"soft", "mlm"}


@pytest.mark.parametrize(
    ("method", "keys", "student", "message"),
    [
        ("minilm", {}, ModelShape(2, 16, 32, 2), "@4.*minilmv2"),
        ("minilm", {"valu": "none"}, STUDENT, "unknown key 'loss.valu'"),
        ("minilm", {"hidden_weight": "1"}, STUDENT, "'loss.hidden_weight' .*number"),
        ("minilmv2", {"relation_heads": 5}, STUDENT, "set loss.relation_heads"),
        ("minilmv2", {"teacher_layer": 9}, STUDENT, "1 to 4"),
        ("minilmv2", {"teacher_layer": 0}, STUDENT, "1 to 4"),
        ("minilmv2", {"teacher_layer": -4}, STUDENT, "1 to 4"),
        (
            "distilbert",
            {},
            STUDENT,
            r"width 32, but the student has 16\. Give the student 2x32.*loss\.hidden_weight=0",
        ),
        (
            "distilbert",
            dict.fromkeys(("soft_weight", "mlm_weight", "hidden_weight"), 0.0),
            AS_WIDE,
            "are all 0: give at least one",
        ),
        (
            "distilbert",
            {"temperature": 0.0},
            AS_WIDE,
            "'loss.temperature' .*greater than 0, got 0.0",
        ),
        ("mlm-kd", {"temperature": -1.0}, AS_WIDE, "greater than 0"),
        ("masked-lm", {"temperature": 1.0}, AS_WIDE, "unknown key"),
        ("pkd", {"weight": 0.0}, STUDENT, "greater than 0"),
        ("pkd", {"layers": 1}, STUDENT, "'loss.layers' .*string"),
        ("tinybert", {"hidden_weight": -1.0}, STUDENT, "at least 0"),
        ("tinybert", {"layer_weights": [1.0, -1.0]}, STUDENT, "at least 0"),
        ("tinybert", {"layer": "top"}, STUDENT, "unknown key 'loss.layer'"),
        ("tinybert", {"layers": "0:0,1:9"}, STUDENT, "names layer 9 of the teacher"),
    ],
)
def test_settings_that_cannot_be_are_refused(method, keys, student, message):
    with pytest.raises(UsageError, match=message):
        build(method, keys, student)


def test_cosine_distance_reads_every_form_of_mask():
    t, s = normal(3, 5, 8, seed=0), normal(3, 5, 8, seed=1)
    isolated = ((PADDED[:, :, None] == 1) & (PADDED[:, None] == 1))[:, None]
    torch.testing.assert_close(cosine_distance(t, s, isolated), cosine_distance(t, s, PADDED))
    torch.testing.assert_close(
        cosine_distance(t, s, None), (1 - F.cosine_similarity(t, s, dim=-1)).mean()
    )
    assert cosine_distance(t, -t, PADDED).item() == pytest.approx(2, abs=1e-6)
    assert cosine_distance(t, s, torch.zeros_like(PADDED)).item() == 0
