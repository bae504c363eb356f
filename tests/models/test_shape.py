"""Shapes and the initialisation of students."""

import pytest
import torch
from encoders import TYPES, assert_same_state, tiny_encoder
from hypothesis import given
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.models.grammar import parse_shape
from kdcli.models.layout import layout_for, linears
from kdcli.models.shape import build_student, longest_input, shape_of
from kdcli.types import ModelShape, Start

pytestmark = pytest.mark.slow

TEACHER = ModelShape(12, 768, 3072, 12)


def test_defaults_of_the_grammar():
    for text, *sizes in (
        ("6x768", 6, 768, 3072, 12),
        ("4x312:9", 4, 312, 9, 12),
        ("6x384@6", 6, 384, 1536, 6),
    ):
        assert parse_shape(text, TEACHER) == ModelShape(*sizes)


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_reads_its_longest_input(kind):
    model = tiny_encoder(kind).eval()
    length = longest_input(model.config) or 2 * model.config.max_position_embeddings
    ids_BL = torch.full((1, length), 9)
    assert model(input_ids=ids_BL).last_hidden_state.shape[1] == length


@given(
    st.integers(1, 12),
    st.integers(1, 64),
    st.integers(1, 4000),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_a_shape_reads_back_what_it_prints(layers, width, ffn, heads):
    shape = ModelShape(layers, width * 12, ffn, heads)
    assert parse_shape(str(shape), TEACHER) == shape


SYNTAX = ["banana", "6x", "6x768@", "-6x768", "6X768", "٦x٧٦٨", "9" * 5000 + "x768"]
WRONG = dict.fromkeys(SYNTAX, "not a shape") | {"0x768": "zero", "6x768@0": "zero"}
WRONG |= {
    "6x100": "12 heads do not divide a width of 100",
    "13x768": "larger than its teacher 12x768",
}
WRONG |= dict.fromkeys(["12x769@769", "6x1024@16"], "larger than its teacher")


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_wrong_shape_says_what_is_allowed(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_shape(text, TEACHER)
    assert caught.value.hint


def test_heads_that_do_not_divide_are_answered_with_the_nearest_that_do():
    nearest = {
        "6x320": ("8, 10, 16", "(write 6x320@10)", "312, 324"),
        "2x7": ("widths that 12 heads divide: 12",),
    }
    for text, hints in nearest.items():
        with pytest.raises(UsageError) as caught:
            parse_shape(text, TEACHER)
        assert [hint for hint in hints if hint not in caught.value.hint] == []


@pytest.mark.parametrize("kind", ["modernbert", "roformer", "eurobert"])
def test_rotary_heads_have_an_even_width(kind):
    teacher = tiny_encoder(kind)
    with pytest.raises(UsageError, match="a head cannot have the odd width 3") as caught:
        build_student(teacher, parse_shape("1x12", shape_of(teacher.config)))
    assert "a multiple of 8" in caught.value.hint


def test_a_bottleneck_keeps_its_width():
    teacher = tiny_encoder("mobilebert")
    with pytest.raises(UsageError, match="attends in a width of 32, which 5 heads do not divide"):
        build_student(teacher, parse_shape("1x20@5", shape_of(teacher.config)))


def test_key_heads_keep_their_ratio_to_the_query_heads_or_the_nearest_that_divides():
    teacher = tiny_encoder("eurobert", num_attention_heads=4, num_key_value_heads=2)
    student = build_student(teacher, parse_shape("1x30@5", shape_of(teacher.config))).model
    assert student.config.num_key_value_heads == 1
    student = build_student(teacher, parse_shape("1x32@8", shape_of(teacher.config))).model
    assert student.config.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("kind", "path", "others"),
    [
        ("deberta", "in_proj", "pos_proj pos_q_proj"),
        ("deberta-v2", "query_proj", "pos_key_proj pos_query_proj"),
    ],
)
def test_position_projections_keep_the_dimensions_of_q(kind, path, others):
    teacher = tiny_encoder(kind)
    with torch.no_grad():
        for layer in teacher.encoder.layer:
            ((linear, rows),) = linears(layout_for(teacher.config), layer)["Q"]
            for name in others.split():
                position = getattr(layer.attention.self, name)
                position.weight.copy_(linear.weight if rows is None else linear.weight[rows])
    student = build_student(teacher, parse_shape("2x16", shape_of(teacher.config))).model
    for layer in student.encoder.layer:
        ((linear, rows),) = linears(layout_for(student.config), layer)["Q"]
        assert linear is getattr(layer.attention.self, path)
        own = linear.weight if rows is None else linear.weight[rows]
        for name in others.split():
            torch.testing.assert_close(getattr(layer.attention.self, name).weight, own)


def test_what_starts_at_random_is_named():
    teacher = tiny_encoder("bert")
    notes = build_student(teacher, ModelShape(1, 32, 200, 4)).notes
    assert notes[0] == "initialised from teacher layers 2"
    assert "3 tensors have no counterpart and start at random" in notes[1]
    assert "encoder.layer.0.intermediate.dense.weight" in notes[1]
    assert len(build_student(teacher, ModelShape(1, 16, 64, 4)).notes) == 1
    # RoFormer's table of sinusoids is made for its shape: nothing about it is random.
    assert len(build_student(tiny_encoder("roformer"), ModelShape(1, 16, 64, 4)).notes) == 1


@pytest.mark.parametrize(("init", "same"), [("teacher", True), ("random", False)])
def test_a_student_is_a_function_of_its_teacher_or_its_seed_alone(init, same):
    teacher = tiny_encoder("bert")
    before = torch.get_rng_state()
    one, two, other = (
        build_student(teacher, ModelShape(1, 16, 64, 2), Start(init=init, seed=s)).model
        for s in (0, 0, 1)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert_same_state(one, two)
    assert torch.equal(*[m.encoder.layer[0].output.dense.weight for m in (one, other)]) == same


def test_same_width_copies_evenly_spaced_layers_and_the_last():
    teacher = tiny_encoder("bert", num_hidden_layers=6)
    student = build_student(teacher, parse_shape("3x32", ModelShape(6, 32, 128, 4))).model
    for m, n in enumerate((2, 4, 6)):
        of_student, of_teacher = (
            student.encoder.layer[m].state_dict(),
            teacher.encoder.layer[n - 1].state_dict(),
        )
        assert all(torch.equal(of_student[k], of_teacher[k]) for k in of_teacher)
    assert torch.equal(
        student.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight
    )


def test_a_narrow_student_has_one_basis_of_the_residual_stream_everywhere():
    teacher = tiny_encoder("bert")
    with torch.no_grad():
        # Half of the dimensions carry nothing at all: the basis must span exactly the others.
        for name, parameter in teacher.named_parameters():
            for dim, size in enumerate(parameter.shape):
                if (
                    size == 32
                    and "self" not in name
                    and (dim == 0 or "dense" not in name or "intermediate" in name)
                ):
                    parameter.index_fill_(dim, torch.arange(0, 32, 2), 0.0)
    built = build_student(teacher, parse_shape("2x16", ModelShape(2, 32, 128, 4)))
    student, basis_DN = built.model, built.basis_DN.float()
    torch.testing.assert_close(basis_DN.T @ basis_DN, torch.eye(16))
    words, of_teacher = (m.embeddings.word_embeddings.weight for m in (student, teacher))
    torch.testing.assert_close(words @ basis_DN.T, of_teacher)
    gains = [m.encoder.layer[1].output.LayerNorm.weight for m in (student, teacher)]
    torch.testing.assert_close(gains[0], (basis_DN.T @ gains[1].diag() @ basis_DN).diag())


def test_dropout_is_set_for_training_and_not_saved():
    student = build_student(
        tiny_encoder("bert"), ModelShape(1, 32, 128, 4), Start(dropout=0.0)
    ).model
    assert {m.p for m in student.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    assert student.config.hidden_dropout_prob == 0.1


def test_layers_to_copy_are_checked():
    with pytest.raises(UsageError, match="must name 2 of the teacher's layers 1 to 2"):
        build_student(tiny_encoder("bert"), ModelShape(2, 32, 128, 4), Start(layers=[1, 3]))
