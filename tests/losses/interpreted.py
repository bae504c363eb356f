"""What Triton's interpreter can say of the kernels: `test_relation_triton.py` runs this file in a
process of its own.

Whether a function of Triton, its library's included, is compiled or interpreted is settled when it
is imported.
"""

import pytest
import torch
from references import kl_of_row, mse_of_row, normal, relation_reference

from kdcli.losses.relation import computed_by, relation_kl, score_mse

EACH = pytest.mark.parametrize(
    ("loss", "of_row"), [(relation_kl, kl_of_row), (score_mse, mse_of_row)]
)
BATCH, HEADS, LENGTH = 2, 3, 37
DOCUMENTS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 9
ISOLATED = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None].contiguous()
ISOLATED[1, 0, 4] = False  # a query that may attend to nothing
PADDED = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5]])).long()
MASKS = {"none": None, "padded": PADDED, "isolated": ISOLATED, "empty": torch.zeros(BATCH, LENGTH)}
# Width of teacher and student, dtype, largest relative error of a gradient.
KINDS = [(8, 8, torch.float32, 1e-5), (20, 5, torch.float32, 1e-5), (16, 40, torch.float16, 2e-3)]


def vectors(teacher, student, dtype=torch.float32, length=LENGTH):
    return [
        normal(BATCH, HEADS, length, w, seed=i).to(dtype)
        for i, w in enumerate((teacher, teacher, student, student))
    ]


def of_kernel(loss, tx, ty, sx, sy, mask):
    sx, sy = sx.detach().requires_grad_(), sy.detach().requires_grad_()
    with computed_by("triton"):
        value = loss(tx, ty, sx, sy, mask)
    (3 * value).backward()
    return value, sx.grad, sy.grad


def exact(of_row, tx, ty, sx, sy, mask):
    sx, sy = sx.detach().double().requires_grad_(), sy.detach().double().requires_grad_()
    value = relation_reference(of_row, tx, ty, sx, sy, mask)
    if value.requires_grad:
        (3 * value).backward()
    return value, *(torch.zeros_like(x) if x.grad is None else x.grad for x in (sx, sy))


def agree(found, expected, near):
    """Of the value and both gradients, as norms; an expected 0 is found exactly."""
    assert found[0].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert (one.detach().cpu().double() - other.detach()).norm() <= near * other.detach().norm()


@EACH
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("teacher", "student", "dtype", "near"), KINDS)
def test_value_and_gradients_equal_the_float64_reference(
    loss, of_row, kind, teacher, student, dtype, near
):
    inputs = vectors(teacher, student, dtype)
    agree(of_kernel(loss, *inputs, MASKS[kind]), exact(of_row, *inputs, MASKS[kind]), near)


@EACH
@pytest.mark.parametrize("length", [1, 16, 70])
def test_any_length(loss, of_row, length):
    inputs = vectors(8, 6, length=length)
    agree(of_kernel(loss, *inputs, None), exact(of_row, *inputs, None), 1e-5)


@EACH
def test_strided_vectors_and_masks_are_read_as_they_lie(loss, of_row):
    tx, ty, sx, sy = vectors(8, 6)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (tx, ty, sx)] + [
        sy.mT.contiguous().mT
    ]
    mask = torch.stack([PADDED, PADDED], -1)[..., 0]
    assert not any(x.is_contiguous() for x in (*strided, mask))
    agree(of_kernel(loss, *strided, mask), exact(of_row, tx, ty, sx, sy, PADDED), 1e-5)


@pytest.mark.parametrize("kind", ["none", "documents"])
def test_small_errors_over_many_keys_are_not_subnormal_in_half(kind):
    """Before its product, the gradient of y must not be divided by the number of keys."""
    from kdcli.losses.relation_triton import compare_relations

    length, wide = 256, (1, 1, 256, 16)
    tx, ty = ((normal(*wide, seed=seed) / 4).half() for seed in (0, 1))
    sx, sy = (x + (normal(*wide, seed=9) / 1300).half() for x in (tx, ty))
    document = torch.arange(length) // 160
    isolated = (document[:, None] == document)[None, None]
    mask = isolated if kind == "documents" else None
    _, grads = compare_relations((sx, sy), (tx, ty), mask, kl=False, grad=True)
    exact_inputs = [x.double().requires_grad_() for x in (sx, sy)]
    relation_reference(mse_of_row, tx, ty, *exact_inputs, mask).backward()
    for grad, exact_input in zip(grads, exact_inputs, strict=True):
        assert (grad.double() - exact_input.grad).norm() <= 5e-4 * exact_input.grad.norm()


def test_extreme_scores_stay_finite_and_exact():
    inputs = [40 * x for x in vectors(8, 8)]
    agree(of_kernel(relation_kl, *inputs, None), exact(kl_of_row, *inputs, None), 1e-5)


@EACH
def test_a_perfect_student_has_no_loss_and_no_gradient(loss, of_row):
    tx, ty, _, _ = vectors(8, 8)
    assert [float(x.abs().max()) for x in of_kernel(loss, tx, ty, tx, ty, PADDED)] == [0, 0, 0]


@EACH
def test_without_a_gradient_the_value_is_the_same(loss, of_row):
    inputs = vectors(8, 6)
    with torch.no_grad(), computed_by("triton"):
        alone = loss(*inputs, PADDED)
    assert torch.equal(alone, of_kernel(loss, *inputs, PADDED)[0].detach())
