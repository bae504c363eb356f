"""Linear probes on the last hidden states of a frozen encoder."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.demo import TASKS, demo_task

BATCH = 64
ITERATIONS = 2000
INVERSE_PENALTY = 0.1
FeatureArray = NDArray[np.float32]


def probe_demo(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, float]]:
    """Fit a logistic regression for each demo task, and score it on the validation split.

    Returns task -> {"accuracy": share}.
    """
    model.eval()
    scores = {}
    for task in TASKS:
        train, validation = (demo_task(task, split) for split in ("train", "validation"))
        logits_MC = fitted_logits(
            _means(model, tokenizer, [e.text for e in train]),
            [int(e.label) for e in train],
            _means(model, tokenizer, [e.text for e in validation]),
        )
        right_M = logits_MC.argmax(dim=1) == torch.tensor([int(e.label) for e in validation])
        scores[task] = {"accuracy": float(right_M.double().mean())}
    return scores


def fitted_logits(train_ND: FeatureArray, classes: list[int], other_MD: FeatureArray) -> Tensor:
    """Fit a logistic regression on standardised features; return logits of other rows, [M, C].

    The weights, but not the biases, have an L2 penalty. The fit minimises
    0.1 * (summed negative log likelihood) + 1/2 * (summed squares of the weights), as
    scikit-learn's `LogisticRegression(C=0.1)` does.

    Args:
        train_ND: the features of the training rows.
        classes: the class of each training row, from 0.
        other_MD: the features of the other rows.
    """
    x_ND, other = (torch.from_numpy(x.astype(np.float64)) for x in (train_ND, other_MD))
    deviation_D, mean_D = torch.std_mean(x_ND, dim=0, correction=0)
    deviation_D[deviation_D == 0] = 1.0
    x_ND, classes_N = (x_ND - mean_D) / deviation_D, torch.tensor(classes)
    count = int(classes_N.max()) + 1
    weight_CD, bias_C = x_ND.new_zeros(count, x_ND.shape[1]), x_ND.new_zeros(count)
    # With two classes, only the difference of their weights is penalised.
    penalty = 1.0 if count == 2 else 0.5

    def loss(parameters: list[Tensor]) -> Tensor:
        weight_CD, bias_C = parameters
        likelihood = F.cross_entropy(F.linear(x_ND, weight_CD, bias_C), classes_N, reduction="sum")
        return INVERSE_PENALTY * likelihood + penalty * weight_CD.square().sum()

    _minimise(loss, [weight_CD, bias_C])
    return F.linear((other - mean_D) / deviation_D, weight_CD, bias_C)


def _minimise(loss: Callable[[list[Tensor]], Tensor], parameters: list[Tensor]) -> None:
    """Minimise a smooth convex function of some tensors in place, with L-BFGS."""
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=ITERATIONS, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in parameters]
            value = loss(leaves)
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, leaves), strict=True):
            parameter.grad = gradient
        return value.detach()

    optimizer.step(closure)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _means(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> FeatureArray:
    """Return the mean of the last hidden states over real tokens, [texts, D].

    Texts of similar length share a batch.
    """
    device = next(model.parameters()).device
    order = np.argsort([len(text) for text in texts], kind="stable")
    rows = []
    for start in range(0, len(texts), BATCH):
        chosen = [texts[i] for i in order[start : start + BATCH]]
        batch = tokenizer(chosen, padding=True, truncation=True, return_tensors="pt").to(device)
        hidden_BLD = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        real_BL1 = batch["attention_mask"][:, :, None].to(hidden_BLD.dtype)
        rows.append(((hidden_BLD * real_BL1).sum(1) / real_BL1.sum(1)).float().cpu().numpy())
    return np.concatenate(rows)[np.argsort(order)]
