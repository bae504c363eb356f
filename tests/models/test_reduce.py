"""Fitting a narrower student to its teacher, next to numpy in float64."""

from itertools import cycle, islice

import pytest
import torch
from encoders import TYPES, CountingRows, assert_same_state, padded_batch, tiny_encoder

from kdcli.models import reduce
from kdcli.models.capture import capture
from kdcli.models.grammar import parse_shape
from kdcli.models.layout import layout_for, linears
from kdcli.models.sample import sample_of
from kdcli.models.shape import build_student, shape_of
from kdcli.types import Needs, Start

pytestmark = pytest.mark.slow


def second(x, letter):
    """Return the second moments, or only their diagonal for feed-forward units."""
    return (x**2).mean(0) if letter == "D" else x.T @ x / len(x)


@torch.no_grad()
def test_the_units_that_vary_are_kept():
    teacher = tiny_encoder("bert", initializer_range=0.3).eval()
    for layer in teacher.encoder.layer:
        # These units have the largest weights, but they are always off.
        layer.intermediate.dense.bias[::4] = -1e4
        layer.output.dense.weight[:, ::4] *= 100
    student = build_student(teacher, parse_shape("2x32:96", shape_of(teacher.config))).model
    kept = torch.arange(128) % 4 > 0
    for wide, narrow in zip(teacher.encoder.layer, student.encoder.layer, strict=True):
        assert torch.equal(narrow.intermediate.dense.weight, wide.intermediate.dense.weight[kept])
        assert torch.equal(narrow.output.dense.weight, wide.output.dense.weight[:, kept])


ROTARY = ["esm", "eurobert", "modernbert", "nomic_bert", "roformer"]


def attention_of(model, number):
    """Return q, k, v [A, K, D] and o [D, A, K] of a layer, float64, with k and v for every head."""
    layout = layout_for(model.config)
    layer = layout.modules(model)[number]
    w = {
        letter: linear.weight[rows].double()
        for letter, ((linear, rows), *_) in linears(layout, layer).items()
    }
    heads = reduce.heads_of(layout, model)
    q_AKD = w["Q"].view(heads.count, heads.each, -1)
    k_AKD, v_AKD = (
        w[letter].view(heads.key_value, heads.each, -1).repeat_interleave(heads.group, 0)
        for letter in "KV"
    )
    return q_AKD, k_AKD, v_AKD, w["O"].view(-1, heads.count, heads.each)


def attentions(teacher, built):
    """Yield both models' matrices of each layer, the teacher's in the basis of the student."""
    layers = len(layout_for(teacher.config).modules(teacher))
    for number in range(layers):
        *qkv, o_DAK = attention_of(teacher, number)
        reduced = [x_AKD @ built.basis_DN for x_AKD in qkv]
        reduced.append(torch.einsum("dak,dn->nak", o_DAK, built.basis_DN))
        yield reduced, attention_of(built.model, number)


def outputs_of(v_AKD, o_DAK):
    """Return the product of v and o in each head, which no rotation of both changes."""
    return torch.einsum("dak,ake->ade", o_DAK, v_AKD)


CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.mark.parametrize("kind", ["bert", *ROTARY])
@torch.no_grad()
def test_the_heads_that_contribute_most_are_kept(kind):
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, initializer_range=0.3).eval()
    layout = layout_for(teacher.config)
    grouped = kind == "eurobert"
    kept = cycle([[2, 3], [0, 1]] if grouped else [[1, 3], [0, 3]])
    kept = list(islice(kept, len(layout.modules(teacher))))
    for layer, heads in zip(layout.modules(teacher), kept, strict=True):
        # These heads vary like the others, but the output projection hardly reads them.
        idle = [a for a in range(4) if a not in heads]
        linears(layout, layer)["O"][0][0].weight.view(32, 4, 8)[:, idle] *= 1e-3
    shape = parse_shape(f"{len(kept)}x16@2", shape_of(teacher.config))
    built = build_student(teacher, shape, Start(init="copied"))
    for heads, (wide, narrow) in zip(kept, attentions(teacher, built), strict=True):
        wide_q, wide_k, wide_v, wide_o = (x[heads] for x in (*wide[:3], wide[3].transpose(0, 1)))
        expected = outputs_of(wide_v, wide_o.transpose(0, 1))
        torch.testing.assert_close(outputs_of(*narrow[2:]), expected, **CLOSE)
        scores = [(q.mT @ k) for q, k in ((wide_q, wide_k), narrow[:2])]
        torch.testing.assert_close(*scores, **CLOSE)
        if layout.rotary:
            torch.testing.assert_close(narrow[0], wide_q, **CLOSE)


@pytest.mark.parametrize("kind", ROTARY)
@torch.no_grad()
def test_rotary_heads_keep_the_pairs_whose_frequencies_the_student_has(kind):
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, initializer_range=0.3).eval()
    layout = layout_for(teacher.config)
    for layer in layout.modules(teacher):
        # A student's head of half the width has every second frequency. The others are idle.
        for letter in "QK":
            linear, rows = linears(layout, layer)[letter][0]
            weight = linear.weight[rows]
            by_pair = weight.view((-1, 2, 4, 32) if layout.rotary == "halves" else (-1, 4, 2, 32))
            by_pair.select(-2 if layout.rotary == "halves" else -3, 1).zero_()
            by_pair.select(-2 if layout.rotary == "halves" else -3, 3).zero_()
            linear.weight[rows] = weight
    # Two of the student's heads share one of the teacher's heads: q and k have the same pairs, and
    # each has one half of v.
    shape = parse_shape(f"{teacher.config.num_hidden_layers}x32@8", shape_of(teacher.config))
    student = build_student(teacher, shape, Start(init="copied")).model.eval()
    for layer in layout.modules(teacher):
        # Each pair of the student also stands for its idle neighbour.
        linear, rows = linears(layout, layer)["Q"][0]
        linear.weight[rows] *= 2
    batch = padded_batch(teacher)
    torch.testing.assert_close(
        student(**batch).last_hidden_state, teacher(**batch).last_hidden_state, **CLOSE
    )


@pytest.mark.parametrize("shape", ["2x32:96@4", "2x16:96@2"])
@torch.no_grad()
def test_what_is_left_out_keeps_its_mean(shape):
    torch.manual_seed(0)
    teacher = tiny_encoder("bert", initializer_range=0.3).eval()
    for layer in teacher.encoder.layer:
        # Units with a large constant part and hardly any variance, and two heads like them.
        layer.intermediate.dense.weight[::4] *= 1e-3
        layer.intermediate.dense.bias[::4] = 3.0
        for rows in (slice(0, 8), slice(16, 24)):
            layer.attention.self.value.weight[rows] *= 1e-3
            layer.attention.self.value.bias[rows] = 0.3
    sample = sample_of(None, teacher.config, None)
    real = sample["attention_mask"].bool()
    to = parse_shape(shape, shape_of(teacher.config))
    built = build_student(teacher, to, Start(init="copied"))
    basis_DN = torch.eye(32).double() if built.basis_DN is None else built.basis_DN
    kept_E = torch.ones(32).bool()
    if shape.endswith("@2"):
        kept_E[:8] = kept_E[16:24] = False
    kept_F = torch.arange(128) % 4 > 0
    inputs = {}
    for wide in teacher.encoder.layer:
        for linear in (wide.attention.output.dense, wide.output.dense):
            linear.register_forward_hook(lambda one, args, _: inputs.update({one: args[0][real]}))
    teacher(**sample)
    for wide, narrow in zip(teacher.encoder.layer, built.model.encoder.layer, strict=True):
        for one, other, kept in (
            (wide.attention.output.dense, narrow.attention.output.dense, kept_E),
            (wide.output.dense, narrow.output.dense, kept_F),
        ):
            lost_D = one.weight[:, ~kept].double() @ inputs[one].double().mean(0)[~kept]
            expected_N = basis_DN.T @ (one.bias.double() + lost_D)
            torch.testing.assert_close(other.bias.double(), expected_N, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_without_biases_keeps_the_units_that_are_large():
    torch.manual_seed(0)
    teacher = tiny_encoder("modernbert", initializer_range=0.3, mlp_bias=False).eval()
    down_DF = [layer.mlp.Wo.weight.double() for layer in teacher.layers]
    shape = parse_shape("4x32:96", shape_of(teacher.config))
    student = build_student(teacher, shape, Start(init="copied")).model
    inputs = []
    for layer in teacher.layers:
        layer.mlp.Wo.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    teacher(**sample_of(None, teacher.config, None))
    for weight_DF, x_BLF, narrow in zip(down_DF, inputs, student.layers, strict=True):
        size_F = x_BLF.double().flatten(0, -2).square().mean(0) * weight_DF.square().sum(0)
        kept = size_F.topk(96).indices.sort().values
        assert torch.equal(narrow.mlp.Wo.weight.double(), weight_DF[:, kept])


UNUSUAL = ("glm", "nystromformer", "opt", "phi3", "xmod")


@pytest.mark.parametrize("kind", [*TYPES, *UNUSUAL])
def test_a_student_of_the_same_shape_is_its_teacher(kind):
    teacher = tiny_encoder(kind)
    student = build_student(teacher, shape_of(teacher.config), text=CountingRows(width=8)).model
    assert_same_state(student, teacher)


@pytest.mark.parametrize("kind", [*TYPES, *UNUSUAL])
@torch.no_grad()
def test_a_narrower_student_starts_near_its_teacher_in_that_basis(kind):
    torch.manual_seed(1)
    teacher = tiny_encoder(kind)
    shape = shape_of(teacher.config)
    to = parse_shape(f"{shape.layers}x24", shape)
    built, drawn = (
        build_student(teacher, to, text=CountingRows(width=8)),
        build_student(teacher, to, Start(init="random")),
    )
    batch, last = padded_batch(teacher), shape.layers
    needs = Needs(hidden=frozenset({last}))
    target = capture(teacher, needs)(batch).hidden[last].double() @ built.basis_DN
    real = batch["attention_mask"].bool()

    def error(model):
        own = capture(model.eval(), needs)(batch).hidden[last].double()
        return float((own - target)[real].square().sum() / target[real].square().sum())

    assert error(built.model) < (1.0 if layout_for(teacher.config).shared else 0.4)
    assert error(built.model) < 0.5 * error(drawn.model)
