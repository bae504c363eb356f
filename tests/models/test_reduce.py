"""Fitting a narrower student to its teacher, next to numpy in float64."""

import functools
import math
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from encoders import CountingRows, assert_same_state, padded_batch, tiny_encoder
from torch import nn

from kdcli.models import reduce
from kdcli.models.capture import capture
from kdcli.models.grammar import parse_shape
from kdcli.models.layout import LAYOUTS, layout_for, linears
from kdcli.models.sample import sample_of
from kdcli.models.shape import build_student, shape_of
from kdcli.types import Needs, Start

pytestmark = pytest.mark.slow


def test_components_fall_in_weight_and_have_one_sign():
    turn = torch.linalg.qr(
        torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ).Q
    moment = turn @ torch.tensor([1.0, 5.0, 3.0, 2.0, 4.0]).double().diag() @ turn.T
    basis = reduce.components(moment, 3)
    torch.testing.assert_close(
        (basis.T @ turn).abs(), torch.eye(5).double()[[1, 4, 2]], atol=1e-9, rtol=0
    )
    assert (basis.max(0).values > -basis.min(0).values).all()


def second(x, letter):
    """Return the second moments, or only their diagonal for feed-forward units."""
    return (x**2).mean(0) if letter == "D" else x.T @ x / len(x)


def recorded(teacher, layout, layers, sample, letters):
    """Return the moments of a run of the teacher."""
    with reduce._moments(teacher, layout, layers, sample, letters) as moments:
        reduce.run_sample(teacher, sample)
    return moments


@torch.no_grad()
def test_moments_are_those_of_the_tokens_that_are_no_padding():
    torch.manual_seed(0)
    teacher = tiny_encoder("bert", initializer_range=0.3).eval()
    sample = sample_of(CountingRows(width=8), teacher.config, None)
    layer, real = teacher.encoder.layer[0], sample["attention_mask"].bool().numpy()
    w = {name: x.double().numpy() for name, x in layer.state_dict().items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normalised(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = teacher.embeddings(sample["input_ids"]).double().numpy()
    q, k, v = (linear(f"attention.self.{name}", x) for name in ("query", "key", "value"))
    by_head = [y.reshape(*y.shape[:2], 4, 8).transpose(0, 2, 1, 3) for y in (q, k, v)]
    scores = by_head[0] @ by_head[1].transpose(0, 1, 3, 2) / np.sqrt(8)
    scores = np.exp(np.where(real[:, None, None], scores, -np.inf))
    context = scores / scores.sum(-1, keepdims=True) @ by_head[2]
    context = context.transpose(0, 2, 1, 3).reshape(x.shape)
    attended = normalised(
        "attention.output.LayerNorm", linear("attention.output.dense", context) + x
    )
    before = linear("intermediate.dense", attended)
    units = before / 2 * (1 + np.vectorize(math.erf)(before / math.sqrt(2)))
    activations = {"Q": q[real], "K": k[real], "O": context[real], "D": units[real]}
    moments = recorded(teacher, LAYOUTS["bert"], [layer], sample, "QKOD")[layer]
    assert moments.keys() == activations.keys()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for letter, x in activations.items():
        close(moments[letter].mean_E.numpy(), x.mean(0))
        close(moments[letter].about(None).numpy(), second(x, letter))
        close(moments[letter].variance.numpy(), second(x - x.mean(0), letter))


@torch.no_grad()
def test_a_shared_layer_has_the_mean_of_its_runs_moments():
    torch.manual_seed(0)
    teacher = tiny_encoder("albert", initializer_range=0.3, num_hidden_layers=3).eval()
    sample = sample_of(CountingRows(width=8), teacher.config, None)
    layout, real = LAYOUTS["albert"], sample["attention_mask"].bool().numpy()
    layer = layout.modules(teacher)[0]
    states = teacher(**sample, output_hidden_states=True).hidden_states[:-1]
    inputs = []
    with layer.ffn_output.register_forward_hook(lambda _, args, output: inputs.append(args[0])):
        teacher(**sample)
    runs = zip(states, inputs, strict=True)
    by_run = [[x.double().numpy()[real] for x in run] for run in runs]
    w = {name: x.double().numpy() for name, x in layer.attention.state_dict().items()}
    q, k = (
        [x @ w[f"{name}.weight"].T + w[f"{name}.bias"] for x, _ in by_run]
        for name in ("query", "key")
    )
    moments = recorded(teacher, layout, [layer] * 2, sample, "QKD")[layer]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for letter, runs in {"Q": q, "K": k, "D": [x for _, x in by_run]}.items():
        together = np.concatenate(runs)
        close(moments[letter].mean_E.numpy(), together.mean(0))
        close(moments[letter].second.numpy(), second(together, letter))
        close(moments[letter].variance.numpy(), second(together - together.mean(0), letter))


@torch.no_grad()
def test_a_sample_of_one_token_has_moments():
    teacher = tiny_encoder("bert")
    sample = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])}
    layers = list(teacher.encoder.layer)
    moments = recorded(teacher, LAYOUTS["bert"], layers, sample, "QKOD")
    found = [moment for layer in layers for moment in moments[layer].values()]
    assert all(x.isfinite().all() for moment in found for x in (moment.mean_E, moment.second))


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


def test_heads_take_their_dimensions_from_the_same_place():
    weak = torch.ones(32).double().diag()
    strong = torch.arange(1, 33).double().diag()
    bases = reduce._components_in_heads(weak, strong, reduce.Heads(5, 5, 20))
    basis_EN = torch.block_diag(*[basis_EN for _, basis_EN in bases])
    # The 5 heads' spans of the 32 dimensions start at 0, 6, 12, 19 and 25. Each keeps its 4 best.
    kept = [n for end in (6, 12, 19, 25, 32) for n in range(end - 1, end - 5, -1)]
    torch.testing.assert_close(basis_EN, torch.eye(32).double()[:, kept])


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


@pytest.mark.parametrize(
    ("heads", "narrow", "kept"),
    [
        ((8, 8, 64), (4, 4, 32), [0, 3, 4, 7]),
        # Groups contribute 9, 10, 11 and 8; the best head of each 9, 7, 6 and 8.
        ((8, 4, 64), (4, 2, 32), [2, 3, 4, 5]),
        ((8, 4, 64), (2, 2, 16), [0, 7]),
        ((8, 4, 64), (4, 4, 32), [0, 3, 4, 7]),
        # These students combine heads.
        ((8, 4, 64), (5, 1, 40), range(8)),
        ((8, 8, 64), (4, 4, 64), range(8)),
        ((8, 8, 64), (16, 16, 64), range(8)),
    ],
)
def test_groups_of_heads_stay_together(heads, narrow, kept):
    contributions = torch.tensor([9.0, 0, 3, 7, 6, 5, 0, 8])
    wide, small = (reduce.Heads(*sizes) for sizes in (heads, narrow))
    query_RE, key_E = reduce._kept_dimensions(wide, small, contributions)
    query_EA = query_RE.view(len(query_RE), -1, 8).permute(1, 0, 2)
    assert (query_EA[..., 0] // 8).flatten().tolist() == list(kept)
    # The dimensions of k are at the same places as those of q.
    assert torch.equal(query_RE // 8 // wide.group, (key_E // 8).expand(len(query_RE), -1))
    assert torch.equal(query_RE % 8, (key_E % 8).expand(len(query_RE), -1))


@pytest.mark.parametrize(
    ("heads", "narrow"),
    [((8, 4, 64), (5, 1, 40)), ((8, 4, 64), (4, 2, 64)), ((8, 8, 64), (3, 3, 48))],
)
def test_a_dimension_of_q_has_the_basis_of_the_dimension_of_k_it_meets(heads, narrow):
    wide, small = (reduce.Heads(*sizes) for sizes in (heads, narrow))
    query_RE, key_E = reduce._kept_dimensions(wide, small, torch.ones(8))
    parts = reduce._parts(len(key_E), small.key_value)
    bases = [(part, torch.rand(part.stop - part.start, small.each).double()) for part in parts]
    query_EN, key_EN = reduce._bases_of_heads(bases, query_RE, key_E, wide, small)
    # Each row is in one head.
    for rows_EN, count in ((query_EN, small.count), (key_EN, small.key_value)):
        assert (rows_EN.view(len(rows_EN), count, -1).any(2).sum(1) == 1).all()
    own_EN, met_EN = (x_EN[x_EN > 0].view(-1, small.each) for x_EN in (query_EN, key_EN))
    met_EN = met_EN.view(wide.key_value, 8, -1).repeat_interleave(wide.group, 0).flatten(0, 1)
    assert torch.equal(own_EN, met_EN)


@pytest.mark.parametrize("kind", ["bert", *ROTARY])
@torch.no_grad()
def test_values_in_a_part_of_each_head_are_kept(kind):
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, initializer_range=0.3).eval()
    layout = layout_for(teacher.config)
    heads = reduce.heads_of(layout, teacher)
    for layer in layout.modules(teacher):
        part_GKN = torch.linalg.qr(torch.randn(heads.key_value, 8, 4)).Q
        project_GKK = part_GKN @ part_GKN.mT
        (value, rows), (output, _) = (linears(layout, layer)[letter][0] for letter in "VO")
        value.weight[rows] = (
            project_GKK @ value.weight[rows].view(heads.key_value, 8, -1)
        ).flatten(0, 1)
        project_AKK = project_GKK.repeat_interleave(heads.group, 0)
        output.weight.copy_(
            torch.einsum("dak,akj->daj", output.weight.view(32, 4, 8), project_AKK).flatten(1)
        )
    shape = parse_shape(f"{len(layout.modules(teacher))}x16", shape_of(teacher.config))
    built = build_student(teacher, shape, Start(init="copied"))
    for wide, narrow in attentions(teacher, built):
        torch.testing.assert_close(outputs_of(*narrow[2:]), outputs_of(*wide[2:]), **CLOSE)


def test_all_query_heads_of_a_group_choose_the_dimensions_of_k_and_v():
    output = nn.Linear(16, 16)
    nn.init.eye_(output.weight)
    # The heads of the only group have 8 dimensions each, and use two of them.
    used = {"Q": [0, 1, 10, 11], "O": [4, 5, 14, 15], "K": []}
    moments = {}
    for letter, strong in used.items():
        diagonal = torch.ones(8 if letter == "K" else 16).double()
        diagonal[strong] = 9
        moments[letter] = reduce.Moment(torch.zeros_like(diagonal), diagonal.diag())
    wide, narrow = reduce.Heads(2, 1, 16), reduce.Heads(2, 1, 8)
    linears_of = {"O": [(output, slice(None))]}
    q, k, v, o = reduce._head_maps(LAYOUTS["bert"], wide, narrow, linears_of, moments)
    for of_queries, basis_EN, kept in ((q, k, [0, 1, 2, 3]), (o, v, [4, 5, 6, 7])):
        torch.testing.assert_close(basis_EN[kept].square().sum(1), torch.ones(4).double())
        assert torch.equal(of_queries, torch.block_diag(basis_EN, basis_EN))


@pytest.mark.parametrize("kind", ["bert", "eurobert"])
@torch.no_grad()
def test_narrower_heads_have_their_teachers_attention_scores(kind, monkeypatch):
    # No supported type has groups of heads without rotary embeddings.
    monkeypatch.setitem(LAYOUTS, kind, replace(LAYOUTS[kind], rotary=None))
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, initializer_range=0.3).eval()
    layout = LAYOUTS[kind]
    for layer in layout.modules(teacher):
        # Half of each head's dimensions are idle, so a student's head can hold all others.
        for letter in "QK":
            linears(layout, layer)[letter][0][0].weight.view(-1, 8, 32)[:, 4:] = 0
    built = build_student(
        teacher, parse_shape("2x16", shape_of(teacher.config)), Start(init="copied")
    )
    for wide, narrow in attentions(teacher, built):
        forms_ADD = [q.mT @ k / math.sqrt(q.shape[1]) for q, k in (wide[:2], narrow[:2])]
        torch.testing.assert_close(*forms_ADD, **CLOSE)


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


def test_a_wider_rotary_head_has_the_pairs_of_several_heads():
    wide = reduce.Heads(1, 1, 16)
    for rotary, pairs in (
        ("halves", [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]),
        ("pairs", [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]),
    ):
        layout = replace(LAYOUTS["esm"], rotary=rotary)
        ((span, basis_EN),) = reduce._pairs_in_heads(layout, 16, 8, wide)
        assert (span, basis_EN.argmax(0).tolist()) == (slice(0, 16), pairs)
    # The 24 dimensions are one and a half heads for each of the student's two.
    bases = reduce._pairs_in_heads(layout, 24, 8, reduce.Heads(2, 2, 24))
    assert [span for span, _ in bases] == [slice(0, 16), slice(8, 24)]


@torch.no_grad()
def test_rotated_values_keep_the_pairs_of_q_and_k():
    torch.manual_seed(0)
    teacher = tiny_encoder("roformer", initializer_range=0.3, rotary_value=True).eval()
    built = build_student(
        teacher, parse_shape("2x16", shape_of(teacher.config)), Start(init="copied")
    )
    kept = [0, 1, 4, 5]
    for wide, narrow in attentions(teacher, built):
        torch.testing.assert_close(narrow[2], wide[2][:, kept], **CLOSE)
        torch.testing.assert_close(narrow[3], wide[3][..., kept], **CLOSE)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_a_student_of_the_same_shape_is_its_teacher(kind):
    teacher = tiny_encoder(kind)
    student = build_student(teacher, shape_of(teacher.config), text=CountingRows(width=8)).model
    assert_same_state(student, teacher)


@pytest.mark.parametrize("shape", ["2x32:96@4", "2x16:96@2"])
@torch.no_grad()
def test_what_is_left_out_keeps_its_mean(shape):
    torch.manual_seed(0)
    teacher = tiny_encoder("bert", initializer_range=0.3).eval()
    for layer in teacher.encoder.layer:
        # Units with a large constant part and hardly any variance, and a head like them.
        layer.intermediate.dense.weight[::4] *= 1e-3
        layer.intermediate.dense.bias[::4] = 3.0
        for rows in (slice(0, 8), slice(16, 24)):
            layer.attention.self.value.weight[rows] *= 1e-3
            layer.attention.self.value.bias[rows] = 0.3
    sample = sample_of(None, teacher.config, None)
    real = sample["attention_mask"].bool()
    built = build_student(
        teacher, parse_shape(shape, shape_of(teacher.config)), Start(init="copied")
    )
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
    inputs = []
    for layer in teacher.layers:
        layer.mlp.Wo.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    shape = parse_shape("4x32:96", shape_of(teacher.config))
    sample = sample_of(None, teacher.config, None)
    student = build_student(teacher, shape, Start(init="copied")).model
    inputs.clear()
    teacher(**sample)
    for weight_DF, x_BLF, narrow in zip(down_DF, inputs, student.layers, strict=True):
        size_F = x_BLF.double().flatten(0, -2).square().mean(0) * weight_DF.square().sum(0)
        kept = size_F.topk(96).indices.sort().values
        assert torch.equal(narrow.mlp.Wo.weight.double(), weight_DF[:, kept])


@torch.no_grad()
def test_every_layer_counts_equally_in_the_principal_components():
    torch.manual_seed(0)
    teacher = tiny_encoder("bert", initializer_range=0.3).eval()
    # One layer's states are far longer than the others'.
    loud = teacher.encoder.layer[1].output.LayerNorm
    loud.weight.mul_(30)
    loud.bias.normal_()
    batch = sample_of(CountingRows(width=8), teacher.config, None)
    states = teacher(
        **{k: batch[k] for k in ("input_ids", "attention_mask")}, output_hidden_states=True
    )
    real = batch["attention_mask"].bool().numpy()
    moment = np.zeros((32, 32))
    for state in states.hidden_states:
        x = state.double().numpy()[real]
        moment += x.T @ x / np.square(x).sum()
    expected = np.linalg.eigh(moment)[1][:, -8:]
    with reduce._streams(teacher, LAYOUTS["bert"], batch) as streams:
        reduce.run_sample(teacher, batch)
    found = reduce.components(torch.stack(streams).sum(0), 8).numpy()
    # Both span the same space.
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
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

    assert error(built.model) < (1.0 if LAYOUTS[kind].shared else 0.4)
    assert error(built.model) < 0.5 * error(drawn.model)
