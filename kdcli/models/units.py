"""Choose the feed-forward units that a narrower student keeps, by their activations on a sample.

A feed-forward block adds W a to the residual stream, where a are the activations of its units. In a
student with fewer units, the remaining units can take over a part of the work of the removed ones:
ridge regression of W a on their activations, with a constant. Without unit j, whose coefficients
are w_j, the regression's squared error rises by

    ‖w_j‖² / [C⁻¹]_jj

where C is the covariance of the activations plus the ridge (the optimal brain surgeon,
https://doi.org/10.1109/ICNN.1993.298572). The units with the smallest rise are removed in a few
rounds, because each removal changes the values of the others.
"""

import torch
from torch import Tensor

ROUNDS = 4
RIDGE = 1e-3  # relative to the mean variance


def kept_units(covariance_FF: Tensor, down_DF: Tensor, count: int, rounds: int = ROUNDS) -> Tensor:
    """Return the indices of the `count` units to keep, in increasing order.

    * `covariance_FF`: the covariance of the units' activations, float64.
    * `down_DF`: the weights that map the activations to the layer's output.
    * `rounds`: the number of rounds in which units are removed.
    """
    target_FD = covariance_FF @ down_DF.T.to(covariance_FF)
    covariance_FF = covariance_FF.clone()
    # Without any variance, as after complete pruning, all units are equal.
    ridge = RIDGE * covariance_FF.diagonal().mean().clamp(min=1e-30)
    covariance_FF.diagonal().add_(ridge)
    kept = torch.arange(len(covariance_FF))
    for n in torch.linspace(len(kept), count, rounds + 1).round().long()[1:].tolist():
        inverse_KK = torch.linalg.inv(covariance_FF[kept][:, kept])
        rise_K = (inverse_KK @ target_FD[kept]).square().sum(1) / inverse_KK.diagonal()
        kept = kept[rise_K.topk(n).indices.sort().values]
    return kept
