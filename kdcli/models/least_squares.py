"""Fit linears and normalisations to wanted outputs by least squares."""

from functools import cached_property

import torch
from torch import Tensor, nn

RIDGE = 1e-2
"""Strength of a ridge, relative to the sum of squares of each input."""
LEAST_SHARE, BIAS_RIDGE = 1e-3, 1e-6
"""Lower bound of an input's sum of squares for its ridge, relative to the mean of all, and the
relative strength of the ridge of a bias."""
TINY = 1e-30
"""Replaces sums of squares that are zero. A pruned head has such sums."""
ROWS_AT_ONCE = 4096
"""Number of rows whose products are added in float32, before the sums are added in float64."""
CHANNELS_AT_ONCE = 384
"""Number of channels whose products with all later channels are computed at once."""


class Inputs:
    """The inputs that one or more linears read, and what their fits share.

    Args:
        x_RI: The inputs, float32 or float64.
        has_bias: Whether the linears have a bias. It is the weight of one more input, a column of
            ones.
        ridge: How strongly a fit keeps the weights that a linear has, relative to the sum of
            squares of each input. So the scale of an input does not matter.
    """

    def __init__(self, x_RI: Tensor, *, has_bias: bool, ridge: float = RIDGE) -> None:
        self.has_bias, self.ridge = has_bias, ridge
        self.x_RI = torch.cat([x_RI, torch.ones_like(x_RI[:, :1])], 1) if has_bias else x_RI

    @cached_property
    def ridge_I(self) -> Tensor:
        """The ridge of each column, float64."""
        squares_I = self._squares_I
        inputs_I = squares_I[:-1] if self.has_bias else squares_I
        ridge_I = self.ridge * inputs_I.clamp(min=float(LEAST_SHARE * inputs_I.mean()))
        if self.has_bias:
            ridge_I = torch.cat([ridge_I, BIAS_RIDGE * squares_I[-1:]])
        return ridge_I.clamp(min=TINY)

    @cached_property
    def _squares_I(self) -> Tensor:
        """The sum of squares of each column, float64."""
        return self.x_RI.double().square().sum(0) if self.is_wide else self._gram_II.diagonal()

    @cached_property
    def _gram_II(self) -> Tensor:
        """X'X, float64."""
        return second_moments(self.x_RI)

    @property
    def is_wide(self) -> bool:
        """Whether there are fewer rows than columns."""
        return len(self.x_RI) < self.x_RI.shape[1]

    @cached_property
    def factor(self) -> Tensor:
        """The Cholesky factor of X'X + D, [I, I], where D has the ridge on its diagonal. With fewer
        rows than columns, of X D^-1 X' + 1, [R, R]. float64."""
        if self.is_wide:
            scaled_RI = self.x_RI.double() / self.ridge_I.sqrt()
            gram = scaled_RI @ scaled_RI.T
            gram.diagonal().add_(1)
        else:
            gram = self._gram_II.clone()
            gram.diagonal().add_(self.ridge_I)
        factor: Tensor = torch.linalg.cholesky(gram)
        return factor

    def weights(self, target_RO: Tensor, around_OI: Tensor) -> Tensor:
        """Return the weights with the least squared error to a target, [O, I] float64.

        Args:
            target_RO: The wanted outputs.
            around_OI: The weights that the ridge pulls towards, float64.
        """
        if self.is_wide:
            # The same solution, with the smaller of the two matrices.
            wide_RI = self.x_RI.double()
            error_RO = target_RO.double() - wide_RI @ around_OI.T
            change_OI = torch.cholesky_solve(error_RO, self.factor).T @ wide_RI
            return around_OI + change_OI / self.ridge_I
        wanted_IO = sum_of_products(self.x_RI, target_RO) + self.ridge_I[:, None] * around_OI.T
        return torch.cholesky_solve(wanted_IO, self.factor).T


def fit_linear(linear: nn.Linear, inputs: Inputs, target_RO: Tensor) -> None:
    """Fit a linear by ridge regression about its current weights and bias."""
    weight_OI = linear.weight.double()
    if linear.bias is not None:
        weight_OI = torch.cat([weight_OI, linear.bias.double()[:, None]], 1)
    fitted_OI = inputs.weights(target_RO, weight_OI)
    linear.weight.copy_(fitted_OI[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(fitted_OI[:, -1])


def fit_norm(norm: nn.Module, y_RN: Tensor, target_RN: Tensor) -> None:
    """Fit a normalisation's gain and bias by least squares.

    `y_RN` is its output with the current gain and bias.
    """
    bias_N = getattr(norm, "bias", None)
    y_N, t_N = (
        (torch.zeros(()), torch.zeros(())) if bias_N is None else (y_RN.mean(0), target_RN.mean(0))
    )
    gain_N = ((y_RN - y_N) * (target_RN - t_N)).sum(0) / (y_RN - y_N).square().sum(0).clamp(
        min=1e-12
    )
    norm.get_parameter("weight").mul_(gain_N)
    if bias_N is not None:
        bias_N.mul_(gain_N).add_(t_N - gain_N * y_N)


def sum_of_products(x_RI: Tensor, y_RO: Tensor) -> Tensor:
    """Return X'Y, [I, O] float64."""
    parts = zip(*(torch.split(each, ROWS_AT_ONCE) for each in (x_RI, y_RO)), strict=True)
    total_IO = torch.zeros(x_RI.shape[1], y_RO.shape[1], dtype=torch.float64)
    # A hook calls this while a model runs in bfloat16.
    with torch.autocast("cpu", enabled=False):
        for x, y in parts:
            total_IO += x.T @ y
    return total_IO


def second_moments(x_RI: Tensor) -> Tensor:
    """Return X'X, [I, I] float64."""
    total_II = torch.zeros(x_RI.shape[1], x_RI.shape[1], dtype=torch.float64)
    for part in torch.split(x_RI, ROWS_AT_ONCE):
        add_products(total_II, part)
    return mirrored(total_II)


def add_products(gram_II: Tensor, x_RI: Tensor) -> None:
    """Add the products of all pairs of channels to the upper triangle of a Gram matrix.

    Values below the diagonal have no meaning until the matrix is `mirrored`.
    """
    width = len(gram_II)
    with torch.autocast("cpu", enabled=False):
        for begin in range(0, width, CHANNELS_AT_ONCE):
            end = min(begin + CHANNELS_AT_ONCE, width)
            gram_II[begin:end, begin:] += x_RI[:, begin:end].T @ x_RI[:, begin:]


def mirrored(gram_II: Tensor) -> Tensor:
    """Return a symmetric matrix from its upper triangle."""
    return gram_II.triu() + gram_II.triu(1).T
