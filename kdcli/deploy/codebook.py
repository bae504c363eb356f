"""Round the rows of a table to codewords.

Each row is divided by its size, and each three numbers of it become the nearest of 256 codewords
(product quantisation, Jegou et al. 2011). This takes 8 bits for three numbers.
"""

import torch
from torch import Tensor

from kdcli.deploy.rounding import LIMIT, Integers

GROUP = 3
"""Number of neighbouring numbers of a row that share a code."""
CODES = 256
"""Number of codewords of each group."""
CODED_ROWS = 4096
"""Minimum number of rows of a table for which codewords save space."""
FITTED_ROWS, ROUNDS = 8192, 10
"""Number of rows that the codewords are fitted to, and of rounds of k-means."""
UNIT = 30.0
"""The integer of a number as large as the root mean square of its row."""


def round_by_codebook(weight_VH: Tensor, exact_V: Tensor) -> Integers:
    """Round a table to codewords.

    Args:
        weight_VH: The table.
        exact_V: Whether a row has 8 bits for each number instead.
    """
    weight_VH = weight_VH.detach().float()
    largest_V1 = weight_VH.abs().amax(1, keepdim=True)
    exact_V1 = exact_V[:, None] & (largest_V1 > 0)
    size_V1 = weight_VH.square().mean(1, keepdim=True).sqrt()
    scale_V1 = torch.where(exact_V1, largest_V1 / LIMIT, size_V1 / UNIT)
    scale_V1 = torch.where(scale_V1 > 0, scale_V1, 1.0)
    wanted_VH = weight_VH / scale_V1
    values_VH = torch.round(wanted_VH)
    coded = torch.where(~exact_V)[0]
    fitted = coded[torch.linspace(0, len(coded) - 1, FITTED_ROWS).long()]
    for begin in range(0, weight_VH.shape[1], GROUP):
        group = slice(begin, begin + GROUP)
        book_CG = _codewords(wanted_VH[fitted, group])
        values_VH[coded, group] = book_CG[_nearest(wanted_VH[coded, group], book_CG)]
    values_VH = values_VH.clamp(-LIMIT, LIMIT)
    # The scale with the least squared error.
    length_V1 = values_VH.square().sum(1, keepdim=True)
    scale_V1 *= (wanted_VH * values_VH).sum(1, keepdim=True) / length_V1.clamp(min=1)
    return Integers(values_VH.to(torch.int8), scale_V1, weight_VH.shape[1])


def _codewords(x_RG: Tensor) -> Tensor:
    """Return integers that are near to many points, [CODES, G], by k-means."""
    order = x_RG.sum(1).argsort(stable=True)
    book_CG = x_RG[order[torch.linspace(0, len(order) - 1, CODES).long()]]
    for _ in range(ROUNDS):
        nearest_R = _nearest(x_RG, book_CG)
        counts_C1 = torch.bincount(nearest_R, minlength=CODES)[:, None]
        sums_CG = torch.zeros_like(book_CG).index_add_(0, nearest_R, x_RG)
        book_CG = torch.where(counts_C1 > 0, sums_CG / counts_C1.clamp(min=1), book_CG)
    return torch.round(book_CG).clamp(-LIMIT, LIMIT)


def _nearest(x_RG: Tensor, book_CG: Tensor) -> Tensor:
    """Return the number of the nearest codeword of each point, [R]."""
    lengths_C = book_CG.square().sum(1)
    return torch.addmm(lengths_C, x_RG, book_CG.T, alpha=-2).argmin(1)
