"""Masked language models of every type that has them: loaded, captured, and students under their
teacher's head."""

import pytest
import torch
from encoders import TYPES, tiny_config, tiny_encoder, tiny_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining

from kdcli.errors import UsageError
from kdcli.models.capture import capture, params_without_grad
from kdcli.models.grammar import parse_shape
from kdcli.models.layout import layout_for
from kdcli.models.load import save_model
from kdcli.models.masked_head import load_masked_lm, student_with_head
from kdcli.models.shape import build_student, shape_of
from kdcli.types import IGNORED, Needs, Start

pytestmark = pytest.mark.slow

WITH_HEAD = sorted(set(TYPES) - {"splinter"})  # it was pre-trained to find spans
FRESH = {"mobilebert": ["cls.predictions.dense.weight"]}
"""Parts of a head without a subset of dimensions: MobileBERT widens the embeddings there."""
LOGITS = Needs(masked_logits=True)


def tiny_masked_lm(kind, **changes):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(tiny_config(kind, **changes)).eval()
    for parameter in model.parameters():
        # Biases of 0 and norms of 1 would be equal wherever they come from.
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(params=WITH_HEAD)
def model(request):
    return tiny_masked_lm(request.param)


def batch_of(length=10, real=7):
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (3, length))
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    ids[mask == 0] = 0
    labels = torch.where((torch.rand(3, length) < 0.3) & (mask == 1), ids, IGNORED)
    labels[2] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def own_logits(model, batch):
    return model(**{k: v for k, v in batch.items() if k != "labels"}).logits


def test_a_student_of_an_encoder_gets_a_random_head_and_that_is_said(model):
    encoder = model.base_model
    made = student_with_head(
        encoder, build_student(encoder, parse_shape("1x16", shape_of(model.config))), seed=3
    )
    assert type(made.model) is type(model)
    assert (
        made.notes[-1]
        == "head initialised at random: the teacher has no masked-language-model head"
    )
    assert own_logits(made.model.eval(), batch_of()).isfinite().all()


@pytest.mark.parametrize("headed", [True, False])
def test_a_checkpoint_without_a_head_may_be_loaded_as_an_encoder(tmp_path, headed):
    save_model(
        tiny_masked_lm("bert") if headed else tiny_encoder("bert"), tiny_tokenizer(), tmp_path
    )
    found = load_masked_lm(str(tmp_path), otherwise="x", bare=True).model
    assert type(found).__name__ == ("BertForMaskedLM" if headed else "BertModel")


def test_these_are_the_types_with_a_head():
    assert [
        k for k in TYPES if type(tiny_config(k)) in AutoModelForMaskedLM._model_mapping
    ] == WITH_HEAD


@torch.no_grad()
def test_logits_at_labelled_tokens_are_the_models_own_and_the_head_reads_no_others(model):
    batch = batch_of()
    labelled = batch["labels"] != IGNORED
    assert 0 < labelled.sum() < labelled.numel()
    expected = own_logits(model, batch)[labelled]
    last = len(layout_for(model.config).modules(model.base_model))
    captured = capture(model, LOGITS | Needs(hidden=frozenset({last}), q=frozenset({1})))(batch)
    assert captured.logits.shape == (labelled.sum(), 64)
    torch.testing.assert_close(captured.logits, expected, atol=1e-5, rtol=1e-4)
    assert captured.labels is batch["labels"]
    assert captured.hidden[last].shape == (3, 10, 32)
    # And the model works as before.
    torch.testing.assert_close(own_logits(model, batch)[labelled], expected, atol=1e-5, rtol=1e-4)


def test_a_batch_without_a_label_has_no_logits_but_gradients_of_0(model):
    batch = batch_of() | {"labels": torch.full((3, 10), IGNORED)}
    logits = capture(model, LOGITS)(batch).logits
    assert logits.shape == (0, 64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
    assert all(not g.any() for g in gradients if g is not None)


def test_every_parameter_learns_from_the_logits_at_labelled_tokens(model):
    batch = batch_of()
    labels = batch["labels"][batch["labels"] != IGNORED]
    run = capture(model, LOGITS)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    idle = params_without_grad(
        parameters, torch.nn.functional.cross_entropy(run(batch).logits, labels)
    )
    assert [n for n in idle if not n.startswith(f"{model.base_model_prefix}.")] == []
    gradients, all_of_them = [], list(parameters.values())
    for logits in (run(batch).logits, own_logits(model, batch)[batch["labels"] != IGNORED]):
        loss = torch.nn.functional.cross_entropy(logits, labels)
        gradients.append(
            torch.autograd.grad(loss, all_of_them, allow_unused=True, materialize_grads=True)
        )
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("text", ["1x32", "1x16"])
def test_a_student_runs_under_its_teachers_head_and_reloads(model, text, tmp_path):
    kind = model.config.model_type
    shape = parse_shape(text, shape_of(model.config))
    built = build_student(model.base_model, shape, Start(dropout=0.25))
    words = built.model.get_input_embeddings().weight
    made = student_with_head(model, built)
    student = made.model
    assert type(student) is type(model)
    assert student.get_input_embeddings().weight is words
    narrower = shape.hidden < shape_of(model.config).hidden
    left = FRESH.get(kind, []) if narrower else []
    fresh = f", except {', '.join(left)}, which start at random" if left else ""
    assert made.notes[-1] == f"head initialised from the teacher's{fresh}"
    assert {m.p for m in student.base_model.modules() if isinstance(m, torch.nn.Dropout)} <= {0.25}
    assert (student.get_output_embeddings().weight is words) == bool(
        student.config.tie_word_embeddings
    )
    student.eval()
    own = own_logits(student, batch_of())
    assert own.isfinite().all()
    save_model(student, tiny_tokenizer(), tmp_path)
    again = load_masked_lm(str(tmp_path), otherwise="")
    assert again.shape == shape
    torch.testing.assert_close(own_logits(again.model, batch_of()), own, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        capture(student, LOGITS)(batch_of()).logits, own[batch_of()["labels"] != IGNORED]
    )
    _, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not [n for n in info["missing_keys"] if "pooler" not in n and "contact_head" not in n]


@torch.no_grad()
def test_a_student_of_all_of_its_teacher_is_its_teacher(model):
    student = student_with_head(
        model, build_student(model.base_model, shape_of(model.config))
    ).model.eval()
    torch.testing.assert_close(
        own_logits(student, batch_of()), own_logits(model, batch_of()), atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_a_narrower_head_has_the_basis_of_the_narrower_encoder():
    teacher = tiny_masked_lm("bert")
    built = build_student(teacher.base_model, parse_shape("1x16", shape_of(teacher.config)))
    student, basis_DN = student_with_head(teacher, built), built.basis_DN.float()
    (of_teacher, of_student) = (m.cls.predictions.transform for m in (teacher, student.model))
    gain = (basis_DN.T @ of_teacher.LayerNorm.weight.diag() @ basis_DN).diag()
    torch.testing.assert_close(of_student.LayerNorm.weight, gain)
    torch.testing.assert_close(of_student.LayerNorm.bias, of_teacher.LayerNorm.bias @ basis_DN)
    torch.testing.assert_close(
        of_student.dense.weight, basis_DN.T @ of_teacher.dense.weight @ basis_DN
    )
    assert torch.equal(student.model.cls.predictions.bias, teacher.cls.predictions.bias)


@torch.no_grad()
def test_a_random_head_is_a_function_of_its_seed():
    teacher = tiny_masked_lm("bert")
    shape = parse_shape("1x32", shape_of(teacher.config))
    built = [build_student(teacher.base_model, shape, Start(init="random")) for _ in range(3)]
    made = [
        student_with_head(teacher, x, init="random", seed=seed)
        for x, seed in zip(built, (1, 1, 2), strict=True)
    ]
    assert made[0].notes == ["initialised at random", "head initialised at random"]
    one, two, other = (x.model.cls.predictions.transform.dense.weight for x in made)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, teacher.cls.predictions.transform.dense.weight)


def saved(model, folder):
    save_model(model, tiny_tokenizer(), folder)
    return str(folder)


def test_a_checkpoint_of_the_head_beside_another_is_one_too(tmp_path):
    model = AutoModelForPreTraining.from_config(tiny_config("bert")).eval()
    loaded = load_masked_lm(saved(model, tmp_path), otherwise="")
    assert type(loaded.model).__name__ == "BertForMaskedLM"
    assert not loaded.model.training
    expected = model(**{k: v for k, v in batch_of().items() if k != "labels"}).prediction_logits
    torch.testing.assert_close(own_logits(loaded.model, batch_of()), expected)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_encoder("bert"), "is BertModel, without a masked-language-model head"),
        (
            lambda: tiny_encoder("splinter"),
            "splinter has no masked-language-model head in transformers",
        ),
        (
            lambda: AutoModelForPreTraining.from_config(tiny_config("electra")),
            "cannot be read as ElectraForMaskedLM: .* tensors are missing",
        ),
    ],
)
def test_a_checkpoint_without_the_head_is_refused_with_what_to_do(model, message, tmp_path):
    with pytest.raises(UsageError, match=message) as caught:
        load_masked_lm(saved(model(), tmp_path), otherwise="take another")
    assert caught.value.hint.endswith("take another")


@pytest.mark.parametrize(
    ("needs", "batch", "message"),
    [
        (LOGITS, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, "the batch has no labels"),
        (LOGITS | Needs(logits=True), None, "mutually exclusive"),
    ],
)
def test_needs_that_cannot_be_met(needs, batch, message):
    with pytest.raises(ValueError, match=message):
        capture(tiny_masked_lm("bert"), needs)(batch)
    with pytest.raises(ValueError, match="no head on top"):
        capture(tiny_encoder("bert"), LOGITS)
