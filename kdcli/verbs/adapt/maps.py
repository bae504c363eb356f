"""Maps from one model's vectors to another model's, fitted to the vectors of the same texts.

All are solved in closed form from sums of products, so memory does not grow with the texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.models.embedding_format import dense_layer
from kdcli.models.least_squares import second_moments, sum_of_products
from kdcli.types import Array

FOLDS = 5
"""Number of parts of the texts for the cross-validation of a ridge."""
RIDGES = [10.0**n for n in range(-6, 3)]
"""Strengths of a ridge that are tried, relative to the mean variance of an input."""


@dataclass(frozen=True)
class VectorMap:
    """A map of vectors: a matrix and a shift.

    Attributes:
        name: `orthogonal` or `linear`.
        weight_ED: The matrix.
        bias_E: The shift.
        ridge: The strength of the ridge, relative to the mean variance of an input; None if there
            is no ridge.
    """

    name: str
    weight_ED: Array
    bias_E: Array
    ridge: float | None = None

    @property
    def details(self) -> str:
        """The ridge in brackets, for a sentence."""
        return "" if self.ridge is None else f" (ridge {self.ridge:g})"

    def __call__(self, x_ND: Array) -> Array:
        """Map vectors, [N, E] float32."""
        return np.asarray(x_ND @ self.weight_ED.T + self.bias_E, np.float32)

    def layer(self, width: int) -> nn.Module:
        """Return the map as a module of sentence-transformers for vectors of `width` numbers.

        Numbers that the model cuts from its vectors have no weight.
        """
        weight_ED = np.pad(self.weight_ED, ((0, 0), (0, width - self.weight_ED.shape[1])))
        return dense_layer(torch.from_numpy(weight_ED), torch.from_numpy(self.bias_E))


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
    def of(cls, x_RD: Tensor, y_RE: Tensor) -> Self:
        """Add up the pairs."""
        x_D, y_E = (part.sum(0, dtype=torch.float64) for part in (x_RD, y_RE))
        yy, xx_DD = y_RE.square().sum(dtype=torch.float64), second_moments(x_RD)
        return cls(len(x_RD), x_D, y_E, xx_DD, sum_of_products(x_RD, y_RE), yy)

    def plus(self, other: Self, sign: int = 1) -> Self:
        """Add the sums of other pairs; subtract them if `sign` is -1."""
        sums = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(a + sign * b for a, b in sums))

    def beyond(self, weight_DE: Tensor) -> Self:
        """Return the sums of the pairs of x and what is left of y without x times a matrix."""
        fitted_DE = self.xx_DD @ weight_DE
        return replace(
            self,
            y_E=self.y_E - self.x_D @ weight_DE,
            xy_DE=self.xy_DE - fitted_DE,
            yy=self.yy + (weight_DE * (fitted_DE - 2 * self.xy_DE)).sum(),
        )

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
    * `linear`: a matrix and a shift, by a ridge regression that shrinks the matrix to the rotation
    """
    x, y = (torch.from_numpy(np.asarray(part, np.float32)) for part in (x_RD, y_RE))
    folds = [Moments.of(x[fold::FOLDS], y[fold::FOLDS]) for fold in range(FOLDS)]
    total = _total(folds)
    rotation_DE = _rotation(total)
    yield _vector_map("orthogonal", rotation_DE, total)
    change_DE, ridge = _ridge([fold.beyond(rotation_DE) for fold in folds])
    yield _vector_map("linear", rotation_DE + change_DE, total, ridge)


def _total(folds: list[Moments]) -> Moments:
    total = folds[0]
    for fold in folds[1:]:
        total = total.plus(fold)
    return total


def _rotation(moments: Moments) -> Tensor:
    """Fit a rotation with a scale, [D, E]."""
    xx_DD, xy_DE, _ = moments.about(*moments.means)
    u, s, v = torch.linalg.svd(xy_DE, full_matrices=False)
    rotation_DE: Tensor = u @ v
    scale: Tensor = s.sum() / ((xx_DD @ rotation_DE) * rotation_DE).sum()
    return scale * rotation_DE


def _vector_map(
    name: str, weight_DE: Tensor, moments: Moments, ridge: float | None = None
) -> VectorMap:
    """Return the map with a matrix that takes the mean of x to the mean of y."""
    x_D, y_E = moments.means
    bias_E = y_E - x_D @ weight_DE
    return VectorMap(name, weight_DE.T.float().numpy(), bias_E.float().numpy(), ridge)


def _ridge(folds: list[Moments]) -> tuple[Tensor, float]:
    """Fit a matrix [D, E] by ridge regression, and return the ridge's strength.

    The strength is the one with the least squared error on the texts that each fold leaves out.
    """
    total = _total(folds)
    errors = sum(_errors(total.plus(fold, -1), fold) for fold in folds)
    ridge = RIDGES[int(np.argmin(errors))]
    values_D, vectors_DD, xy_DE = _solve(total)
    return vectors_DD @ (xy_DE / _penalised(values_D, ridge)), ridge


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
