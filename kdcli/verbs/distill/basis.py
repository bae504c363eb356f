"""Project a teacher's vectors onto the principal components that a student learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.models.reduce import components
from kdcli.types import Array, Objective, Signals


class Basis(nn.Module):
    """Projects vectors onto the teacher's principal components that a student learns, [E, D].

    The components are not trained, but checkpoints hold them.
    """

    basis_ED: Tensor

    def __init__(self, basis_ED: Tensor, inner: nn.Module) -> None:
        super().__init__()
        self.register_buffer("basis_ED", basis_ED)
        self.inner = inner

    def forward(self, vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        with torch.autocast(vectors.device.type, enabled=False):
            return vectors.float() @ self.basis_ED


def projected(objective: Objective, basis_ED: Array | None) -> Objective:
    """Return the objective with the teacher's vectors in another basis."""
    if basis_ED is None:
        return objective
    basis = Basis(torch.from_numpy(basis_ED), objective.projections)

    def terms(t: Signals, s: Signals) -> Mapping[str, Tensor]:
        in_basis = replace(
            t,
            pooled=basis(t.pooled),
            anchors=basis(t.anchors),
            positive=basis(t.positive),
            negatives=basis(t.negatives),
        )
        return objective.terms(in_basis, s)

    return replace(objective, projections=basis, terms=terms)


def principal_basis(vectors_NE: Array, width: int) -> Array:
    """Return the `width` orthonormal directions with the most energy, [E, width] in float32.

    They come from the second moments rather than the covariance, because cosines are measured
    from the origin and not from the mean.
    """
    x_NE = torch.from_numpy(vectors_NE.astype(np.float64))
    return np.ascontiguousarray(components(x_NE.T @ x_NE, width).float().numpy())
