"""Fitting a student to its teacher, layer by layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from encoders import CountingRows, tiny_encoder
from reading import logged_to

from kdcli.kept import keep_results
from kdcli.models import fit
from kdcli.models.layout import layout_for, linears
from kdcli.models.least_squares import BIAS_RIDGE, LEAST_SHARE
from kdcli.models.sample import sample_of
from kdcli.models.shape import build_student, shape_of
from kdcli.types import FITTED, Start


@pytest.mark.parametrize(
    ("memory", "tokens"), [(1, 8192), (2176 * 10_000, 10_000), (2176 * 100_000, 32_768)]
)
def test_the_fit_reads_as_many_tokens_as_the_memory_holds(memory, tokens, monkeypatch):
    monkeypatch.setattr(fit, "FIT_BYTES", memory)
    # Two inputs of 32 numbers, a layer's 4 * 32 + 128 + 32 + 2 * 32 outputs, and 128 units.
    teacher = tiny_encoder("bert")
    found = fit.tokens_to_fit(teacher, layout_for(teacher.config), 2)
    assert found == tokens


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert"])
@torch.no_grad()
def test_each_layer_reproduces_its_teachers_outputs_from_the_students_input(kind):
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, num_hidden_layers=4, initializer_range=0.5).eval()
    layout = layout_for(teacher.config)
    source = shape_of(teacher.config)
    tokens = fit.tokens_to_fit(teacher, layout, 2)
    sample = sample_of(CountingRows(width=8), teacher.config, None, tokens)
    student = build_student(
        teacher, replace(source, layers=2), Start(layers=[2, 4]), text=CountingRows(width=8)
    ).model.eval()
    down = [linears(layout, layer)["D"][0][0] for layer in layout.modules(student)]
    origins = [linears(layout, layout.modules(teacher)[n])["D"][0][0] for n in (1, 3)]
    seen = {}
    for linear in [*down, *origins]:
        linear.register_forward_hook(
            lambda linear, args, out: seen.update({linear: (args[0], out)})
        )
    for model in (teacher, student):
        model(**{k: sample[k] for k in ("input_ids", "attention_mask")})
    real = sample["attention_mask"].bool()
    for linear, origin in zip(down, origins, strict=True):
        x, wanted = seen[linear][0][real].double().numpy(), seen[origin][1][real].double().numpy()
        start = origin.weight.double().numpy().T
        if linear.bias is not None:
            x = np.hstack([x, np.ones((len(x), 1))])
            start = np.vstack([start, origin.bias.double().numpy()])
        squares = np.square(x).sum(0)
        inputs = squares[:-1] if linear.bias is not None else squares
        root = np.sqrt(fit.RIDGE * np.maximum(squares, LEAST_SHARE * inputs.mean()))
        if linear.bias is not None:
            root[-1] = np.sqrt(BIAS_RIDGE * len(x))
        targets = np.vstack([wanted, root[:, None] * start])
        expected = np.linalg.lstsq(np.vstack([x, np.diag(root)]), targets, rcond=None)[0]
        found = linear.weight.double().numpy().T
        np.testing.assert_allclose(found, expected[: len(found)], atol=2e-3)
        assert np.abs(found - origin.weight.double().numpy().T).max() > 0.1


def test_a_narrow_student_needs_two_runs_of_its_teacher_and_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(fit, "SILENCE", 0.0)
    teacher = tiny_encoder("bert", num_hidden_layers=4)
    runs, lines = [], []
    teacher.register_forward_hook(lambda *_: runs.append(1))
    narrow = replace(shape_of(teacher.config), layers=2, hidden=16, heads=2)
    with logged_to(lines):
        build_student(teacher, narrow, text=CountingRows(width=8))
    assert len(runs) == 2
    assert lines[1:] == ["0 of 2 layers fitted", "1 of 2 layers fitted"]


@pytest.mark.parametrize(
    ("kind", "dtype", "format_of_products"),
    [
        ("bert", torch.bfloat16, torch.bfloat16),
        ("modernbert", torch.bfloat16, torch.bfloat16),
        ("deberta", torch.bfloat16, torch.float32),
        ("bert", torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("width", [16, 32])
@torch.no_grad()
def test_a_fit_in_half_precision_is_as_close_to_the_teacher(kind, dtype, format_of_products, width):
    """DeBERTa masks with the smallest float32 number, and states could overflow in float16."""
    torch.manual_seed(0)
    teacher = tiny_encoder(kind, num_hidden_layers=4, initializer_range=0.2).eval()
    output = linears(layout_for(teacher.config), layout_for(teacher.config).modules(teacher)[3])
    seen = set()
    handle = output["D"][0][0].register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    heads = shape_of(teacher.config).heads * width // 32
    shape = replace(shape_of(teacher.config), layers=2, hidden=width, heads=heads)
    rows = CountingRows(width=8)
    sample = sample_of(rows, teacher.config, None, 1024)
    in_half = build_student(teacher, shape, text=rows, dtype=dtype)
    assert seen == {format_of_products}
    handle.remove()
    wanted = teacher(**sample).last_hidden_state[sample["attention_mask"].bool()]

    def unlike(built):
        states = built.model.eval()(**sample).last_hidden_state[sample["attention_mask"].bool()]
        kept = wanted if built.basis_DN is None else wanted @ built.basis_DN.float()
        return float((states - kept).square().mean() / kept.square().mean())

    in_float32 = build_student(teacher, shape, text=rows)
    assert unlike(in_half) == pytest.approx(unlike(in_float32), rel=0.05, abs=1e-3)
    assert unlike(in_half) < 1


class Block:
    """The same tokens in rows of another length."""

    def __init__(self, width):
        self.width = width

    def __len__(self):
        return 1024 // self.width

    def batch(self, indices):
        ids_BL = (torch.arange(1024) * 7 % 50 + 5).reshape(-1, self.width)[torch.as_tensor(indices)]
        return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}


def test_the_length_of_the_rows_belongs_to_a_fit(tmp_path):
    teacher = tiny_encoder("bert", num_hidden_layers=4)
    shape = replace(shape_of(teacher.config), layers=2)
    alone = build_student(teacher, shape, text=Block(8)).model.state_dict()
    with keep_results(tmp_path):
        build_student(teacher, shape, text=Block(4))
        after = build_student(teacher, shape, text=Block(8)).model.state_dict()
    for name, weight in alone.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("width", [16, 32])
def test_a_fit_is_kept_to_the_bit_and_only_for_the_same_student(width, tmp_path):
    teacher = tiny_encoder("bert", num_hidden_layers=4)
    heads = shape_of(teacher.config).heads * width // 32
    shape = replace(shape_of(teacher.config), layers=2, hidden=width, heads=heads)
    rows, others = CountingRows(width=8), CountingRows(width=3)

    def fits(start=FITTED, text=rows):
        lines = []
        with logged_to(lines):
            built = build_student(teacher, shape, start, text=text)
        return built, any(line.startswith("fitting a ") for line in lines)

    alone, _ = fits()
    with keep_results(tmp_path):
        found = [fits(), fits(), fits(text=others), fits(Start(layers=(1, 4))), fits(Start(seed=1))]
        assert [is_new for _, is_new in found] == [True, False, True, True, True]
        first, again, *_ = [built for built, _ in found]
    for built in (first, again):
        weights = built.model.state_dict()
        assert weights.keys() == alone.model.state_dict().keys()
        for name, weight in alone.model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)
        assert built.notes == alone.notes
        assert built.model.training == alone.model.training
    assert (again.basis_DN is None) == (width == 32)
    if width == 16:
        torch.testing.assert_close(again.basis_DN, alone.basis_DN, rtol=0, atol=0)
