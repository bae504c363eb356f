"""Capture: what runs and what does not, several models at once, training through it."""

import pytest
import torch
from encoders import tiny_encoder

from kdcli.models.capture import capture, prepare_teacher
from kdcli.types import Needs

BATCH = {
    "input_ids": torch.arange(5, 25).view(2, 10),
    "attention_mask": torch.ones(2, 10, dtype=torch.long),
}


def only(*layers: int) -> Needs:
    of = frozenset(layers)
    return Needs(q=of, k=of, v=of)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roformer", "albert"])
def test_two_models_of_one_type_run_in_turns(kind):
    one, two = tiny_encoder(kind), tiny_encoder(kind)
    apart = [capture(m, only(2))(BATCH).q[2] for m in (one, two)]
    first, second = capture(one, only(2)), capture(two, only(1, 2))
    turns = [first(BATCH).q[2], second(BATCH).q[2], first(BATCH).q[2]]
    assert all(map(torch.equal, turns, (*apart, apart[0])))
    assert not torch.equal(turns[0], turns[1])


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


def test_a_prepared_teacher_is_frozen_in_the_compute_dtype():
    teacher = prepare_teacher(tiny_encoder("modernbert").train(), torch.bfloat16)
    assert not teacher.training
    assert {(p.dtype, p.requires_grad) for p in teacher.parameters()} == {(torch.bfloat16, False)}
    # A rotary table in bfloat16 would move every position.
    assert {b.dtype for b in teacher.buffers() if b.is_floating_point()} == {torch.float32}
    assert capture(teacher, only(2))(BATCH).q[2].dtype == torch.bfloat16
