"""Every supported model type: what is heard is what the model computes, and what is built trains, saves and reloads."""

from __future__ import annotations

import pytest
import torch
from encoders import tiny_encoder, tiny_tokenizer
from transformers import AutoModel

from kdcli.losses import bind
from kdcli.models.capture import capture, unreached
from kdcli.models.layout import LAYOUTS, layout_for, linears
from kdcli.models.load import load_encoder, save_encoder
from kdcli.models.shape import build_student, parse_shape, shape_of
from kdcli.types import Needs

TYPES = sorted(LAYOUTS)
CONVOLVING = {"convbert": "its convolution runs over neighbouring tokens, padding or not, whatever the mask says"}


def test_there_are_at_least_twenty_types():
    assert len(TYPES) >= 20


def needs_of(*layers: int, hidden: tuple[int, ...] = ()) -> Needs:
    of = frozenset(layers)
    return Needs(q=of, k=of, v=of, hidden=frozenset(hidden))


def batch_of(model, length: int = 10, real: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (2, length))
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(params=TYPES)
def model(request):
    torch.manual_seed(0)
    return tiny_encoder(request.param)


@torch.no_grad()
def test_softmax_of_captured_q_and_k_is_the_models_own_attention(model):
    batch, last = batch_of(model), len(layout_for(model.config).modules(model))
    heard = capture(model, needs_of(1, last))(batch)
    model.set_attn_implementation("eager")
    own = model(**batch, output_attentions=True).attentions
    for n in (1, last):
        q, k = heard.q[n], heard.k[n]
        assert q.shape == k.shape == heard.v[n].shape
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        allowed = batch["attention_mask"][:, None, None, :].bool()
        if layout_for(model.config).local and model.config.layer_types[n - 1] == "sliding_attention":
            at = torch.arange(q.shape[2])
            allowed = allowed & ((at[:, None] - at[None]).abs() <= model.config.sliding_window)
        attention = scores.masked_fill(~allowed, -1e30).softmax(-1)
        real = batch["attention_mask"][:, None, :, None]
        difference = ((attention - own[n - 1]) * real).abs().max()
        if layout_for(model.config).other_term is None:
            assert difference < 1e-6
        else:
            # The row says that the model adds a term of its own; if it did not, the row would be wrong.
            assert difference > 1e-6


@torch.no_grad()
def test_captured_hidden_states_are_the_models_own(model):
    batch, layers = batch_of(model), len(layout_for(model.config).modules(model))
    heard = capture(model, Needs(hidden=frozenset(range(layers))))(batch)
    own = model(**batch, output_hidden_states=True).hidden_states
    for n in range(layers):
        torch.testing.assert_close(heard.hidden[n], own[n])


@torch.no_grad()
def test_padding_changes_nothing(model):
    if model.config.model_type in CONVOLVING:
        pytest.skip(CONVOLVING[model.config.model_type])
    last = len(layout_for(model.config).modules(model))
    batch = batch_of(model, length=10, real=10)
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 5), value=model.config.pad_token_id),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 5)),
    }
    listen = capture(model, needs_of(last, hidden=(last,)))
    plain, wide = listen(batch), listen(padded)
    for kind in ("q", "k", "v"):
        torch.testing.assert_close(
            getattr(plain, kind)[last], getattr(wide, kind)[last][:, :, :10], atol=1e-5, rtol=1e-4
        )
    torch.testing.assert_close(plain.hidden[last], wide.hidden[last][:, :10], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_nothing_runs_behind_the_last_signal(model):
    layers = layout_for(model.config).modules(model)
    (output, _), *_ = linears(layout_for(model.config), layers[-1])["D"]
    runs = []
    hook = output.register_forward_hook(lambda *_: runs.append(1))
    capture(model, needs_of(1))(batch_of(model))
    stopped = len(runs)
    model(**batch_of(model))
    hook.remove()
    assert stopped == 0
    assert len(runs) >= 1


@torch.no_grad()
def test_the_model_works_as_before_after_it_was_listened_to(model):
    batch = batch_of(model)
    before = model(**batch).last_hidden_state
    capture(model, needs_of(1))(batch)
    torch.testing.assert_close(model(**batch).last_hidden_state, before, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_document_does_not_see_its_neighbour_in_the_block(model):
    last = len(layout_for(model.config).modules(model))
    torch.manual_seed(2)
    ids = torch.randint(5, 60, (1, 12))
    other = ids.clone()
    other[:, 6:] = torch.randint(5, 60, (1, 6))
    document = (torch.arange(12) >= 6).long()
    mask = (document[:, None] == document[None])[None, None]
    listen = capture(model, needs_of(last, hidden=(last,)))
    extra = {"attention_mask": mask, "position_ids": torch.arange(12)[None] % 6}
    if layout_for(model.config).leaks:
        with pytest.raises(ValueError, match="cannot keep documents apart"):
            listen({"input_ids": ids, **extra})
        return
    one, two = (listen({"input_ids": x, **extra}) for x in (ids, other))
    torch.testing.assert_close(one.hidden[last][:, :6], two.hidden[last][:, :6], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(one.hidden[last][:, 6:], two.hidden[last][:, 6:])


def test_one_step_lowers_the_loss_and_the_student_reloads(model, tmp_path):
    teacher_shape = shape_of(model.config)
    shape = parse_shape(f"{max(1, teacher_shape.layers - 1)}x16", teacher_shape)
    student = build_student(model, shape).model.train(False)
    objective = bind("minilm", {}, teacher_shape, shape)
    batch = batch_of(model)
    with torch.no_grad():
        signals = capture(model, objective.teacher_needs)(batch)
    listen = capture(student, objective.student_needs)

    def loss():
        return sum(objective.terms(signals, listen(batch)).values())

    before = loss()
    reached = {name: p for name, p in student.named_parameters() if p.requires_grad}
    for name in unreached(reached, loss()):
        del reached[name]
    gradients = torch.autograd.grad(before, list(reached.values()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(reached.values(), gradients, strict=True):
            parameter -= 0.05 * gradient / norm
    assert loss() < before
    save_encoder(student, tiny_tokenizer(), tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    assert shape_of(again.config) == shape
    own = student(**batch).last_hidden_state
    torch.testing.assert_close(again(**batch).last_hidden_state, own, atol=1e-5, rtol=1e-4)
    assert load_encoder(str(tmp_path)).shape == shape
