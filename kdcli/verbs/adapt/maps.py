"""Maps from one model's vectors to another model's, fitted to the vectors of the same texts.

All are solved in closed form from sums of products, so memory does not grow with the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.models.embedding_format import dense_layer
from kdcli.models.least_squares import second_moments, sum_of_products
from kdcli.types import Array

FOLDS = 5
"""Number of parts of the texts for the cross-validation of a ridge."""
RIDGES = [10.0**n for n in range(-6, 2)]
"""Strengths of a ridge that are tried, relative to the mean variance of an input."""
HIDDEN = 512
"""Number of hidden units of a residual layer."""
SHARE_OFF = 0.5
"""Share of the texts for which a hidden unit is 0."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Dense:
    """A dense layer: its weight [out, in], its bias [out], and whether a ReLU follows."""

    weight_OI: Array
    bias_O: Array
    relu: bool = False

    def __call__(self, x_NI: Array) -> Array:
        y_NO = x_NI @ self.weight_OI.T + self.bias_O
        return np.asarray(np.maximum(y_NO, 0) if self.relu else y_NO)


@dataclass(frozen=True)
class VectorMap:
    """A map of vectors, as dense layers.

    Attributes:
        name: `orthogonal`, `linear` or `residual`.
        layers: The layers.
        ridge: The strength of the ridge, relative to the mean variance of an input; None if there
            is no ridge.
    """

    name: str
    layers: tuple[Dense, ...]
    ridge: float | None = None

    @property
    def details(self) -> str:
        """The ridge in brackets, for a sentence."""
        return "" if self.ridge is None else f" (ridge {self.ridge:g})"

    def __call__(self, x_ND: Array) -> Array:
        """Map vectors, [N, E] float32."""
        for layer in self.layers:
            x_ND = layer(x_ND)
        return np.asarray(x_ND, np.float32)

    def modules(self, width: int) -> tuple[nn.Module, ...]:
        """Return the map as modules of sentence-transformers for vectors of `width` numbers.

        Numbers that the model cuts from its vectors have no weight.
        """
        first = self.layers[0].weight_OI
        padded_OI = np.pad(first, ((0, 0), (0, width - first.shape[1])))
        weights = [padded_OI, *(layer.weight_OI for layer in self.layers[1:])]
        return tuple(
            dense_layer(
                torch.from_numpy(weight_OI).float(),
                torch.from_numpy(layer.bias_O).float(),
                "ReLU" if layer.relu else "Identity",
            )
            for weight_OI, layer in zip(weights, self.layers, strict=True)
        )


@dataclass(frozen=True)
class Moments:
    """Sums over pairs of inputs x and targets y: their number, sums and products. float64."""

    count: int
    x_D: Tensor
    y_E: Tensor
    xx_DD: Tensor
    xy_DE: Tensor
    yy: Tensor

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Add up parts of the pairs."""
        parts = (
            cls(
                *(len(x), x.double().sum(0), y.double().sum(0)),
                *(second_moments(x), sum_of_products(x, y), y.double().square().sum()),
            )
            for x, y in pairs
        )
        total = next(parts)
        for part in parts:
            total = total.plus(part)
        return total

    def plus(self, other: Self, sign: int = 1) -> Self:
        """Add the sums of other pairs; subtract them if `sign` is -1."""
        sums = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(a + sign * b for a, b in sums))

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The means of x and y."""
        return self.x_D / self.count, self.y_E / self.count

    def about(self, x_D: Tensor, y_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the products of x and x, x and y, y and y, with both measured from a point."""
        xx_DD = self.xx_DD - torch.outer(self.x_D, x_D) - torch.outer(x_D, self.x_D)
        xy_DE = self.xy_DE - torch.outer(self.x_D, y_E) - torch.outer(x_D, self.y_E)
        yy = self.yy - 2 * self.y_E @ y_E + self.count * y_E @ y_E
        between_DD, between_DE = torch.outer(x_D, x_D), torch.outer(x_D, y_E)
        return xx_DD + self.count * between_DD, xy_DE + self.count * between_DE, yy


def fit_maps(x_RD: Array, y_RE: Array) -> Iterator[VectorMap]:
    """Fit every kind of map to pairs of vectors x and y.

    * `orthogonal`: a rotation, a scale and a shift (Procrustes)
    * `linear`: a matrix and a shift, by ridge regression
    * `residual`: a matrix and a shift, plus a matrix times the ReLU of hidden units, by ridge
      regression. The hidden units are not trained: each looks in the direction of a text.
    """
    x_RD, y_RE = np.asarray(x_RD, np.float32), np.asarray(y_RE, np.float32)
    folds = list(_folds(x_RD, y_RE, None))
    yield _orthogonal(_total(folds))
    weight_DE, bias_E, ridge = _ridge(folds)
    yield VectorMap("linear", (Dense(weight_DE.T, bias_E),), ridge)
    hidden = _hidden_units(x_RD)
    weight_IE, bias_E, ridge = _ridge(list(_folds(x_RD, y_RE, hidden)))
    # A vector passes a ReLU as its positive and its negative part.
    width = x_RD.shape[1]
    identity = np.eye(width, dtype=np.float32)
    first = Dense(
        np.concatenate([identity, -identity, hidden.weight_OI]),
        np.concatenate([np.zeros(2 * width, np.float32), hidden.bias_O]),
        relu=True,
    )
    second_EI = np.concatenate([weight_IE[:width], -weight_IE[:width], weight_IE[width:]]).T
    yield VectorMap("residual", (first, Dense(second_EI, bias_E)), ridge)


def _folds(x_RD: Array, y_RE: Array, hidden: Dense | None) -> Iterator[Moments]:
    """Add up the products of each fold, with hidden units as further inputs."""
    for fold in range(FOLDS):
        x_FD, y_FE = x_RD[fold::FOLDS], y_RE[fold::FOLDS]

        def parts(x_FD: Array = x_FD, y_FE: Array = y_FE) -> Iterator[tuple[Tensor, Tensor]]:
            for begin in range(0, len(x_FD), ROWS_AT_ONCE):
                x, y = x_FD[begin : begin + ROWS_AT_ONCE], y_FE[begin : begin + ROWS_AT_ONCE]
                x = x if hidden is None else np.concatenate([x, hidden(x)], 1)
                yield torch.from_numpy(x), torch.from_numpy(y)

        yield Moments.of(parts())


def _total(folds: list[Moments]) -> Moments:
    total = folds[0]
    for fold in folds[1:]:
        total = total.plus(fold)
    return total


def _orthogonal(moments: Moments) -> VectorMap:
    """Fit a rotation with a scale and a shift."""
    x_D, y_E = moments.means
    xx_DD, xy_DE, _ = moments.about(x_D, y_E)
    u, s, v = torch.linalg.svd(xy_DE, full_matrices=False)
    rotation_DE = u @ v
    scale = s.sum() / ((xx_DD @ rotation_DE) * rotation_DE).sum()
    return VectorMap("orthogonal", (_dense(scale * rotation_DE, x_D, y_E),))


def _dense(weight_DE: Tensor, x_D: Tensor, y_E: Tensor) -> Dense:
    """Return the layer that maps the point x to the point y."""
    return Dense(weight_DE.T.float().numpy(), (y_E - x_D @ weight_DE).float().numpy())


def _ridge(folds: list[Moments]) -> tuple[Array, Array, float]:
    """Fit a matrix [D, E] and a shift [E] by ridge regression, and return the ridge's strength.

    The strength is the one with the least squared error on the texts that each fold leaves out.
    """
    total = _total(folds)
    errors = sum(_errors(total.plus(fold, -1), fold) for fold in folds)
    ridge = RIDGES[int(np.argmin(errors))]
    x_D, y_E = total.means
    values_D, vectors_DD, xy_DE = _solve(total)
    layer = _dense(vectors_DD @ (xy_DE / _penalised(values_D, ridge)), x_D, y_E)
    return layer.weight_OI.T, layer.bias_O, ridge


def _solve(moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of the centred X'X, and X'Y in their basis."""
    xx_DD, xy_DE, _ = moments.about(*moments.means)
    values_D, vectors_DD = torch.linalg.eigh(xx_DD)
    return values_D, vectors_DD, vectors_DD.T @ xy_DE


def _penalised(values_D: Tensor, ridge: float) -> Tensor:
    return (values_D.clamp(min=0) + ridge * values_D.mean())[:, None]


def _errors(fitted: Moments, left_out: Moments) -> Array:
    """Return the squared error of each ridge on the pairs that were left out."""
    values_D, vectors_DD, xy_DE = _solve(fitted)
    xx_DD, other_DE, yy = left_out.about(*fitted.means)
    xx_DD, other_DE = vectors_DD.T @ xx_DD @ vectors_DD, vectors_DD.T @ other_DE
    errors = []
    for ridge in RIDGES:
        weight_DE = xy_DE / _penalised(values_D, ridge)
        errors.append(
            yy - 2 * (weight_DE * other_DE).sum() + ((xx_DD @ weight_DE) * weight_DE).sum()
        )
    return np.array(errors)


def _hidden_units(x_RD: Array) -> Dense:
    """Return hidden units, each active for the texts that are close to a text of the sample."""
    generator = np.random.default_rng(0)
    mean_D = x_RD.mean(0)
    count = min(HIDDEN, len(x_RD) // 4)
    anchors_HD = x_RD[generator.permutation(len(x_RD))[:count]] - mean_D
    sample_SD = x_RD[generator.permutation(len(x_RD))[:ROWS_AT_ONCE]] - mean_D
    threshold_H = np.quantile(sample_SD @ anchors_HD.T, SHARE_OFF, axis=0)
    return Dense(anchors_HD, np.asarray(-anchors_HD @ mean_D - threshold_H, np.float32), relu=True)
