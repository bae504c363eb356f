"""Capture: what runs and what does not, several models at once, training through it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from encoders import padded_batch, tiny_encoder

from kdcli.losses import build_objective
from kdcli.models import capture as module
from kdcli.models.capture import capture, params_without_grad, prepare_teacher
from kdcli.models.layout import layout_for
from kdcli.models.shape import shape_of
from kdcli.types import Needs

BATCH = {
    "input_ids": torch.arange(5, 25).view(2, 10),
    "attention_mask": torch.ones(2, 10, dtype=torch.long),
}


def only(*layers: int) -> Needs:
    of = frozenset(layers)
    return Needs(q=of, k=of, v=of)


@torch.no_grad()
def test_the_attention_of_the_last_needed_layer_is_not_computed(monkeypatch):
    runs = []
    real = module.sdpa_attention_forward
    monkeypatch.setattr(
        module, "sdpa_attention_forward", lambda *a, **k: runs.append(1) or real(*a, **k)
    )
    model = tiny_encoder("bert", num_hidden_layers=4)
    capture(model, only(3))(BATCH)
    assert len(runs) == 2
    capture(model, Needs(hidden=frozenset({0})))(BATCH)
    assert len(runs) == 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "megatron-bert"])
def test_only_what_is_needed_is_kept(kind):
    captured = capture(tiny_encoder(kind), Needs(q=frozenset({2}), hidden=frozenset({1})))(BATCH)
    assert (set(captured.q), set(captured.k), set(captured.v), set(captured.hidden)) == (
        {2},
        set(),
        set(),
        {1},
    )
    assert captured.logits is None
    assert captured.mask is BATCH["attention_mask"]
    assert len(capture(tiny_encoder("bert"), only(1)).state_dict()) == len(
        tiny_encoder("bert").state_dict()
    )
    without = {"input_ids": BATCH["input_ids"]}
    assert capture(tiny_encoder(kind), only(1))(without).mask is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roformer", "albert"])
def test_two_models_of_one_type_run_in_turns(kind):
    one, two = tiny_encoder(kind), tiny_encoder(kind)
    apart = [capture(m, only(2))(BATCH).q[2] for m in (one, two)]
    first, second = capture(one, only(2)), capture(two, only(1, 2))
    turns = [first(BATCH).q[2], second(BATCH).q[2], first(BATCH).q[2]]
    assert all(map(torch.equal, turns, (*apart, apart[0])))
    assert not torch.equal(turns[0], turns[1])


@torch.no_grad()
@torch.no_grad()
def test_the_last_state_is_that_of_the_model_at_any_depth():
    # The convolution follows the first layer, which is the last one here.
    model = tiny_encoder("deberta-v2", num_hidden_layers=1, conv_kernel_size=3)
    batch = padded_batch(model)
    states = capture(model, Needs(hidden=frozenset({1})))(batch).hidden[1]
    assert torch.equal(states, model(**batch).last_hidden_state)


def test_grouped_key_and_value_heads_are_repeated():
    captured = capture(tiny_encoder("eurobert", num_key_value_heads=2), only(1))(BATCH)
    assert captured.q[1].shape == captured.k[1].shape == captured.v[1].shape == (2, 4, 10, 8)
    assert torch.equal(captured.k[1][:, 0], captured.k[1][:, 1])
    assert not torch.equal(captured.k[1][:, 1], captured.k[1][:, 2])


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (only(0), r"layers \[0\] are needed, but the model has layers 1 to 2"),
        (only(3), r"layers \[3\] are needed"),
        (Needs(hidden=frozenset({-1})), r"layers \[-1\] are needed"),
        (Needs(logits=True), "BertModel has no head on top"),
    ],
)
def test_what_a_model_does_not_have(needs, message):
    with pytest.raises(ValueError, match=message):
        capture(tiny_encoder("bert"), needs)


def test_a_layout_with_the_wrong_interface_is_an_error():
    model = tiny_encoder("megatron-bert")
    layout = replace(layout_for(model.config), interface=True)
    with pytest.raises((RuntimeError, ValueError)):
        capture(model, only(1), layout=layout)(BATCH)


def test_a_prepared_teacher_is_frozen_in_the_compute_dtype():
    teacher = prepare_teacher(tiny_encoder("modernbert").train(), torch.bfloat16)
    assert not teacher.training
    assert {(p.dtype, p.requires_grad) for p in teacher.parameters()} == {(torch.bfloat16, False)}
    # A rotary table in bfloat16 would move every position.
    assert {b.dtype for b in teacher.buffers() if b.is_floating_point()} == {torch.float32}
    assert capture(teacher, only(2))(BATCH).q[2].dtype == torch.bfloat16


def test_no_gradient_reaches_the_teacher_and_every_one_the_student():
    teacher, student = (
        prepare_teacher(tiny_encoder("bert"), torch.float32),
        tiny_encoder("bert").train(),
    )
    shape = shape_of(teacher.config)
    objective = build_objective("minilm", {}, shape, shape)
    captured = capture(teacher, objective.teacher_needs)(BATCH)

    def loss():
        return sum(
            objective.terms(captured, capture(student, objective.student_needs)(BATCH)).values()
        )

    assert not captured.q[2].requires_grad
    left = params_without_grad(dict(student.named_parameters()), loss())
    parts = ("attention.output", "intermediate", "output")
    behind = (*(f"encoder.layer.1.{part}." for part in parts), "pooler.")
    assert left == [name for name, _ in student.named_parameters() if name.startswith(behind)]
    assert (
        params_without_grad(
            {name: p for name, p in student.named_parameters() if name not in left}, loss()
        )
        == []
    )


def test_checkpointed_activations_give_the_same_gradients():
    student = tiny_encoder("bert", num_hidden_layers=3)
    run = capture(student, only(3))
    trained = [
        p
        for n, p in student.named_parameters()
        if n.startswith(("embeddings.", "encoder.layer.0."))
    ]

    def gradients():
        captured = run(BATCH)
        return torch.autograd.grad(
            sum(x[3].square().sum() for x in (captured.q, captured.k, captured.v)), trained
        )

    plain = gradients()
    student.train().gradient_checkpointing_enable({"use_reentrant": False})
    for dropout in (m for m in student.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    for one, two in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_captured_student_trains_under_ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        student = tiny_encoder("bert")
        run = capture(student, only(2))
        total = run(BATCH).q[2].square().sum() + run(BATCH).k[2].sum() + run(BATCH).v[2].sum()
        for name in params_without_grad(dict(student.named_parameters()), total):
            student.get_parameter(name).requires_grad_(False)
        wrapped = torch.nn.parallel.DistributedDataParallel(run)
        for _ in range(2):
            captured = wrapped(BATCH)
            (captured.q[2].square().sum() + captured.k[2].sum() + captured.v[2].sum()).backward()
        trained = [p for p in student.parameters() if p.requires_grad]
        assert trained
        assert all(p.grad is not None for p in trained)
    finally:
        dist.destroy_process_group()
