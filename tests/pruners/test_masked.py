"""Masks inside a model: values, gradients, types, copies, checkpoints, and a stock model at the
end."""

import copy

import pytest
import torch
from encoders import tiny_encoder
from torch import nn

from kdcli.models.matrices import matrices
from kdcli.pruners.masked import MaskedWeight, attach, is_score
from kdcli.pruners.selection import local

KINDS = ["bert", "modernbert", "distilbert", "deberta-v2", "albert"]
IDS = torch.tensor([[2, 9, 11, 3, 0, 0], [2, 8, 30, 31, 32, 3]])
PADDED = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def masked(kind: str, density: float = 0.5, frozen: bool = False, **config):
    torch.manual_seed(0)
    model = tiny_encoder(kind, **config)
    masks, drawn = attach(model, frozen=frozen), torch.Generator().manual_seed(1)
    masks.set(
        local({m.name: torch.randn(m.shape, generator=drawn) for m in masks.matrices}, density)
    )
    return model, masks


def out(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**PADDED).last_hidden_state


def drawn_weight():
    """A weight and the gradient of its product with a mask."""
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("trained", [False, True])
def test_scores_of_kept_and_removed_weights_get_gradients(trained):
    weight, grad = drawn_weight()
    parametrisation = MaskedWeight(weight)
    parametrisation.mask.copy_(torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.4)
    given = weight.clone().requires_grad_(trained)
    product = parametrisation(given)
    product.backward(grad)
    mask, found = parametrisation.mask, parametrisation.score.grad
    assert torch.equal(product.double(), weight.double() * mask)
    assert torch.allclose(found.double(), weight.double() * grad.double(), atol=1e-6)
    assert (found[~mask] != 0).all()
    assert torch.equal(given.grad.double(), mask * grad.double()) if trained else given.grad is None


def test_half_precision_weights_have_float32_scores_and_exact_gradients():
    weight, grad = (x.mul(1e-3).bfloat16() for x in drawn_weight())
    parametrisation = MaskedWeight(weight)
    product = parametrisation(weight)
    product.backward(grad)
    assert (product.dtype, parametrisation.score.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(parametrisation.score.grad, weight.float() * grad.float())


def test_only_weight_and_mask_are_saved_for_the_backward_pass():
    weight = torch.randn(6, 5)
    parametrisation = MaskedWeight(weight)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        parametrisation(weight)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr(), parametrisation.mask.data_ptr()]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_fused_linears_are_split_by_rows(kind):
    model, masks = masked(kind, initializer_range=0.3)
    # The sum of squares after a layer norm is constant, so its gradients are nothing but rounding.
    model(**PADDED).last_hidden_state.pow(3).sum().backward()
    for path, parametrisation in masks.held.items():
        with torch.no_grad():
            parametrisation.score.copy_(parametrisation.score.grad)
        assert parametrisation.score.grad.abs().max() > 1e-4, path
    scores, weights = masks.scores(), masks.weights()
    for matrix in masks.matrices:
        assert scores[matrix.name].shape == weights[matrix.name].shape == matrix.shape
        assert torch.equal(scores[matrix.name], matrix.of(masks.held[matrix.path].score.grad))
    means = torch.stack([s.double().sigmoid().mean() for s in scores.values()])
    assert masks.mean_sigmoid().item() == pytest.approx(means.mean().item(), rel=1e-5)


def test_the_regularizer_has_the_gradient_of_autograd():
    _, masks = masked("modernbert")
    for parametrisation in masks.held.values():
        nn.init.normal_(parametrisation.score)
    masks.mean_sigmoid(shift=-0.7).backward()
    for path, parametrisation in masks.held.items():
        score = parametrisation.score.detach().double().requires_grad_()
        parts = [m.of((score + 0.7).sigmoid()).mean() for m in masks.matrices if m.path == path]
        (torch.stack(parts).sum() / len(masks.matrices)).backward()
        assert torch.allclose(parametrisation.score.grad.double(), score.grad, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_folding_gives_a_stock_model_of_the_masked_weights(kind, tmp_path):
    model, masks = masked(kind, frozen=True)
    torch.manual_seed(0)
    plain = {m.name: m.of(m.linear.weight.detach()) for m in matrices(tiny_encoder(kind))}
    before, kept = out(model), masks.masks()
    assert masks.kept() == {m.name: round(0.5 * m.numel) for m in masks.matrices}
    assert masks.density() == pytest.approx(0.5, abs=1e-3)
    masks.fold()
    assert (out(model) - before).abs().max() <= 1e-6
    assert not any("parametrizations" in name for name in model.state_dict())
    assert all(type(m.linear) is nn.Linear for m in matrices(model))
    for matrix in matrices(model):
        weight = matrix.of(matrix.linear.weight)
        assert torch.equal(weight, plain[matrix.name].masked_fill(~kept[matrix.name], 0))
        assert not weight[~kept[matrix.name]].signbit().any()
    model.save_pretrained(tmp_path)
    assert torch.equal(out(type(model).from_pretrained(tmp_path).eval()), out(model))


def test_a_checkpoint_holds_scores_and_no_masks():
    model, masks = masked("modernbert")
    for parametrisation in masks.held.values():
        nn.init.normal_(parametrisation.score)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert sum(is_score(name) for name in state) == len(masks.held)
    assert not any(tensor.dtype == torch.bool for tensor in state.values())
    other = tiny_encoder("modernbert")
    restored = attach(other)
    other.load_state_dict(state)
    restored.set(local(restored.scores(), 0.3))
    masks.set(local(masks.scores(), 0.3))
    assert torch.equal(out(model), out(other))


def test_a_copy_has_masks_of_its_own():
    model, masks = masked("bert")
    before = out(model)
    copied = copy.deepcopy(model)
    masks.set({m.name: torch.zeros(m.shape, dtype=torch.bool) for m in masks.matrices})
    assert torch.equal(out(copied), before)
    assert not torch.equal(out(model), before)


def test_mixed_precision_reaches_the_scores():
    model, masks = masked("bert", frozen=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**PADDED).last_hidden_state.float().square().mean()
    loss.backward()
    assert all(p.score.grad.dtype == torch.float32 for p in masks.held.values())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [name for name in trained if is_score(name)] != []


def test_a_model_has_one_set_of_masks():
    model, _ = masked("bert")
    with pytest.raises(ValueError, match="already"):
        attach(model)
