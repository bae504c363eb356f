"""Every supported model type: signals are what the model computes, and students train, save and
reload."""

import pytest
import torch
from encoders import (
    DERIVED,
    OWN_CODE,
    TYPES,
    padded_batch,
    tiny_encoder,
    tiny_tokenizer,
    write_own_code,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from kdcli.custom_code import custom_code
from kdcli.losses import build_objective
from kdcli.models.capture import Capture, capture, params_without_grad, prepare_teacher
from kdcli.models.custom_class import save_network
from kdcli.models.grammar import parse_shape
from kdcli.models.layout import base_class, has_decoder, layout_for, linears
from kdcli.models.load import load_encoder, save_model
from kdcli.models.shape import build_student, shape_of
from kdcli.types import Needs

pytestmark = pytest.mark.slow

FURTHER = ("gemma3_text", "layoutlm", "markuplm", "qwen3", "t5", "xmod")
UNUSUAL = ("nystromformer", "opt", "phi3")
"""A convolution, one row for each token, heads that share q, k and v."""
CONTRACT = [*TYPES, *DERIVED, *FURTHER, *UNUSUAL, *OWN_CODE]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def needs_of(*layers: int, hidden: tuple[int, ...] = ()) -> Needs:
    of = frozenset(layers)
    return Needs(q=of, k=of, v=of, hidden=frozenset(hidden))


def signals_of(model: PreTrainedModel, needs: Needs) -> Capture:
    """Capture also what relation losses refuse, such as the q and k of causal models."""
    return capture(model, needs, layout=layout_for(model.config))


@pytest.fixture(params=CONTRACT)
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    if request.param not in OWN_CODE:
        yield tiny_encoder(request.param)
        return
    folder = write_own_code(request.param, tmp_path_factory.mktemp("own"))
    with custom_code(allowed=True):
        yield load_encoder(str(folder)).model


@torch.no_grad()
def test_softmax_of_captured_q_and_k_is_the_models_own_attention(model):
    batch, last = padded_batch(model), len(layout_for(model.config).modules(model))
    captured = signals_of(model, needs_of(1, last))(batch)
    model.set_attn_implementation("eager")
    own = model(**batch, output_attentions=True).attentions
    for n in (1, last):
        q, k = captured.q[n], captured.k[n]
        assert q.shape == k.shape == captured.v[n].shape
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        allowed = batch["attention_mask"][:, None, None, :].bool()
        if (
            layout_for(model.config).local
            and model.config.layer_types[n - 1] == "sliding_attention"
        ):
            allowed = allowed & (own[n - 1] > 0)
        if layout_for(model.config).causal:
            allowed = allowed & torch.ones(own[n - 1].shape[-2:]).tril().bool()
        attention = scores.masked_fill(~allowed, -1e30).softmax(-1)
        difference = (
            ((attention - own[n - 1]) * batch["attention_mask"][:, None, :, None]).abs().max()
        )
        if layout_for(model.config).other_term is None:
            assert difference < 1e-6
        else:
            # The row says that the model adds a term of its own; if it did not, the row would be
            # wrong.
            assert difference > 1e-6


@torch.no_grad()
def test_captured_hidden_states_are_the_models_own(model):
    batch, layers = padded_batch(model), len(layout_for(model.config).modules(model))
    captured = signals_of(model, Needs(hidden=frozenset(range(layers + 1))))(batch)
    alone = signals_of(model, Needs(hidden=frozenset({layers})))(batch).hidden
    own = model(**batch, output_hidden_states=True)
    for n in range(layers + 1):
        torch.testing.assert_close(captured.hidden[n], own.hidden_states[n])
    for last in (captured.hidden[layers], alone[layers]):
        torch.testing.assert_close(last, own.last_hidden_state)


def test_all_that_makes_the_last_hidden_state_gets_a_gradient(model):
    """A final norm above all: without it a loss on the last state would leave it as it was."""
    batch, layers = padded_batch(model), len(layout_for(model.config).modules(model))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = model(**batch).last_hidden_state.square().sum()
    captured = (
        signals_of(model, Needs(hidden=frozenset({layers})))(batch).hidden[layers].square().sum()
    )
    assert params_without_grad(parameters, captured) == params_without_grad(parameters, own)


@torch.no_grad()
def test_padding_changes_nothing(model):
    if model.config.model_type in ("convbert", "nystromformer"):
        pytest.skip(
            "its convolution reads neighbouring tokens, padding or not, whatever the mask says"
        )
    last = len(layout_for(model.config).modules(model))
    batch = padded_batch(model, length=10, real=10)
    padded = {
        "input_ids": torch.nn.functional.pad(
            batch["input_ids"], (0, 5), value=model.config.pad_token_id
        ),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 5)),
    }
    run = signals_of(model, needs_of(last, hidden=(last,)))
    plain, wide = run(batch), run(padded)
    for kind in ("q", "k", "v"):
        torch.testing.assert_close(
            getattr(plain, kind)[last], getattr(wide, kind)[last][:, :, :10], **CLOSE
        )
    torch.testing.assert_close(plain.hidden[last], wide.hidden[last][:, :10], **CLOSE)


@torch.no_grad()
def test_capture_stops_at_the_last_signal_and_leaves_nothing_behind(model):
    row, batch, runs = layout_for(model.config), padded_batch(model), []
    layers = row.modules(model)
    before = model(**batch, output_hidden_states=True)
    hook = linears(row, layers[-1])["D"][0][0].register_forward_hook(lambda *_: runs.append(1))
    run = signals_of(model, needs_of(1))
    first = run(batch)
    assert runs == []
    after = model(**batch, output_hidden_states=True)
    assert runs
    hook.remove()
    assert len(after.hidden_states) == len(before.hidden_states) == len(layers) + 1
    torch.testing.assert_close(after.last_hidden_state, before.last_hidden_state, **CLOSE)
    assert torch.equal(run(batch).q[1], first.q[1])


@torch.no_grad()
def test_a_document_does_not_see_its_neighbour_in_the_block(model):
    last = len(layout_for(model.config).modules(model))
    torch.manual_seed(2)
    ids = torch.randint(5, 60, (1, 12))
    other = ids.clone()
    other[:, 6:] = torch.randint(5, 60, (1, 6))
    document = (torch.arange(12) >= 6).long()
    mask = (document[:, None] == document[None])[None, None]
    run = signals_of(model, needs_of(last, hidden=(last,)))
    extra = {"attention_mask": mask, "position_ids": torch.arange(12)[None] % 6}
    if layout_for(model.config).leaks:
        with pytest.raises(ValueError, match="cannot keep documents apart"):
            run({"input_ids": ids, **extra})
        return
    one, two = (run({"input_ids": x, **extra}) for x in (ids, other))
    torch.testing.assert_close(one.hidden[last][:, :6], two.hidden[last][:, :6], **CLOSE)
    assert not torch.allclose(one.hidden[last][:, 6:], two.hidden[last][:, 6:])
    # And the second one is what it would be in a block of its own.
    alone = run({"input_ids": ids[:, 6:], "attention_mask": torch.ones(1, 6, dtype=torch.long)})
    torch.testing.assert_close(one.hidden[last][:, 6:], alone.hidden[last], **CLOSE)
    torch.testing.assert_close(one.v[last][:, :, 6:], alone.v[last], **CLOSE)
    relation, relation_alone = (
        x.q[last][:, :, -6:] @ x.k[last][:, :, -6:].transpose(-1, -2) for x in (one, alone)
    )
    torch.testing.assert_close(relation, relation_alone, **CLOSE)


@pytest.mark.parametrize("how", ["teacher", "student"])
def test_bfloat16_gives_close_signals_and_finite_gradients(model, how):
    last, batch = len(layout_for(model.config).modules(model)), padded_batch(model)
    needs = needs_of(last, hidden=(last,))
    with torch.no_grad():
        exact = signals_of(model, needs)(batch)
    if how == "teacher":
        with torch.no_grad():
            rough = signals_of(prepare_teacher(model, torch.bfloat16), needs)(batch)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = signals_of(model, needs)(batch)
        total = sum(
            x[last].float().square().mean() for x in (rough.q, rough.k, rough.v, rough.hidden)
        )
        gradients = torch.autograd.grad(
            total, [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
        assert all(g.isfinite().all() for g in gradients if g is not None)
    for kind in ("q", "k", "v", "hidden"):
        one, two = getattr(exact, kind)[last], getattr(rough, kind)[last].float()
        assert (one - two).norm() < 0.03 * one.norm()


def test_rows_that_may_attend_to_nothing_are_finite_in_both_directions(model):
    row = layout_for(model.config)
    if row.leaks:
        pytest.skip(row.leaks)
    last = len(row.modules(model))
    ids = torch.randint(5, 60, (1, 12))
    document = torch.tensor([0] * 7 + [-1] * 5)
    mask = ((document[:, None] == document[None]) & (document[None] >= 0))[None, None]
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(12)[None] % 7}
    captured = signals_of(model, needs_of(last, hidden=(last,)))(batch)
    assert captured.hidden[last].isfinite().all()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = captured.hidden[last][:, :7].square().sum() + captured.q[last][:, :, :7].square().sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("text", ["1x32@8", "1x24:80@3"])
def test_students_of_many_shapes_run_and_take_a_head(model, text, tmp_path):
    if model.config.model_type == "mobilebert" and text == "1x24:80@3":
        pytest.skip("its attention is as wide as its bottleneck")
    shape = parse_shape(text, shape_of(model.config))
    built = build_student(model, shape)
    with torch.no_grad():
        own = built.model.eval()(**padded_batch(model)).last_hidden_state
    assert own.isfinite().all()
    assert own.shape[-1] == shape.hidden
    save_network(built.model, tmp_path)
    if model.config.model_type == "splinter":
        return
    # A text classifier of T5 reads the decoder.
    is_part = has_decoder(str(model.config.model_type))
    auto = AutoModelForTokenClassification if is_part else AutoModelForSequenceClassification
    headed, info = auto.from_pretrained(tmp_path, output_loading_info=True, trust_remote_code=True)
    logits = headed.eval()(**padded_batch(model)).logits
    assert logits.shape == ((2, 10, 2) if is_part else (2, 2))
    assert not [
        name
        for name in info["missing_keys"]
        if name.startswith(f"{headed.base_model_prefix}.encoder.layer")
    ]


def test_one_step_lowers_the_loss_and_the_student_reloads(model, tmp_path):
    teacher_shape = shape_of(model.config)
    shape = parse_shape(f"{max(1, teacher_shape.layers - 1)}x16", teacher_shape)
    student = build_student(model, shape).model.train(False)
    # Without noise, the loss of some types is nothing but rounding.
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=noise)
    objective = build_objective("minilm", {}, teacher_shape, shape)
    batch = padded_batch(model)
    with torch.no_grad():
        signals = signals_of(model, objective.teacher_needs)(batch)
    run = signals_of(student, objective.student_needs)

    def loss():
        return sum(objective.terms(signals, run(batch)).values())

    before, parameters = loss(), [p for p in student.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(before, parameters, allow_unused=True, materialize_grads=True)
    norm = torch.stack([g.norm() for g in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.002 * gradient / norm
    assert before > 0.005
    assert before - loss() > 1e-4
    save_model(student, tiny_tokenizer(), tmp_path)
    auto = base_class(model.config)
    again = auto.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert shape_of(again.config) == shape
    own = student(**batch).last_hidden_state
    torch.testing.assert_close(again(**batch).last_hidden_state, own, **CLOSE)
    assert load_encoder(str(tmp_path)).shape == shape
