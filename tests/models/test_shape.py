"""Shapes and the initialisation of students."""

from __future__ import annotations

import pytest
import torch
from encoders import tiny_encoder
from hypothesis import given
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.models.shape import build_student, parse_shape
from kdcli.types import ModelShape

TEACHER = ModelShape(12, 768, 3072, 12)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("6x768", ModelShape(6, 768, 3072, 12)),
        ("4x312:1200", ModelShape(4, 312, 1200, 12)),
        ("4x312:1200@12", ModelShape(4, 312, 1200, 12)),
        ("6x384@6", ModelShape(6, 384, 1536, 6)),
    ],
)
def test_grammar(text, shape):
    assert parse_shape(text, TEACHER) == shape


@given(st.integers(1, 12), st.integers(1, 64), st.integers(1, 4000), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_shape_reads_back_what_it_prints(layers, width, ffn, heads):
    shape = ModelShape(layers, width * 12, ffn, heads)
    assert parse_shape(str(shape), TEACHER) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("banana", "not a shape"),
        ("6x", "not a shape"),
        ("6x768@", "not a shape"),
        ("0x768", "zero"),
        ("6x100", "12 heads do not divide a width of 100"),
        ("13x768", "larger than its teacher 12x768"),
        ("6x1024@16", "larger than its teacher"),
    ],
)
def test_a_wrong_shape_says_what_is_allowed(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        parse_shape(text, TEACHER)
    assert caught.value.hint


def test_same_width_copies_evenly_spaced_layers_and_the_last():
    teacher = tiny_encoder("bert", num_hidden_layers=6)
    student = build_student(teacher, parse_shape("3x32", ModelShape(6, 32, 128, 4))).model
    for m, n in enumerate((2, 4, 6)):
        of_student, of_teacher = student.encoder.layer[m].state_dict(), teacher.encoder.layer[n - 1].state_dict()
        assert all(torch.equal(of_student[k], of_teacher[k]) for k in of_teacher)
    assert torch.equal(student.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight)


def test_a_student_of_the_teachers_shape_is_the_teacher():
    teacher = tiny_encoder("bert")
    student = build_student(teacher, ModelShape(2, 32, 128, 4)).model
    assert all(
        torch.equal(a, b) for a, b in zip(student.state_dict().values(), teacher.state_dict().values(), strict=True)
    )


def test_a_narrow_student_keeps_one_set_of_residual_dimensions_everywhere():
    teacher = tiny_encoder("bert")
    with torch.no_grad():
        # Half of the dimensions carry nothing at all: the reduction must keep exactly the others.
        for name, parameter in teacher.named_parameters():
            for dim, size in enumerate(parameter.shape):
                if size == 32 and "self" not in name and (dim == 0 or "dense" not in name or "intermediate" in name):
                    parameter.index_fill_(dim, torch.arange(0, 32, 2), 0.0)
    student = build_student(teacher, parse_shape("2x16", ModelShape(2, 32, 128, 4))).model
    kept = teacher.embeddings.word_embeddings.weight[:, 1::2]
    assert torch.equal(student.embeddings.word_embeddings.weight, kept)
    assert torch.equal(
        student.encoder.layer[1].output.LayerNorm.weight, teacher.encoder.layer[1].output.LayerNorm.weight[1::2]
    )


def test_a_reduced_linear_keeps_the_norm_of_its_rows():
    teacher = tiny_encoder("bert")
    student = build_student(teacher, parse_shape("2x16:128", ModelShape(2, 32, 128, 4))).model
    before, after = (m.encoder.layer[0].intermediate.dense.weight.norm() for m in (teacher, student))
    torch.testing.assert_close(before, after)


def test_initialisation_is_a_function_of_the_seed():
    teacher = tiny_encoder("bert")
    shape = parse_shape("1x16", ModelShape(2, 32, 128, 4))
    one, two, three = (build_student(teacher, shape, init="random", seed=s).model for s in (1, 1, 2))
    weights = [m.encoder.layer[0].output.dense.weight for m in (one, two, three)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_dropout_is_set_for_training_and_not_saved():
    student = build_student(tiny_encoder("bert"), ModelShape(1, 32, 128, 4), dropout=0.0).model
    assert {m.p for m in student.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    assert student.config.hidden_dropout_prob == 0.1


def test_layers_to_copy_are_checked():
    with pytest.raises(UsageError, match="must name 2 of the teacher's layers 1 to 2"):
        build_student(tiny_encoder("bert"), ModelShape(2, 32, 128, 4), layers=[1, 3])
