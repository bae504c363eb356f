"""Round the rows of a table to codewords.

Each row is divided by its size, and each three numbers of it become the nearest of 256 codewords
(product quantisation, Jegou et al. 2011). This takes 8 bits for three numbers.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kdcli.deploy.rounding import BLOCK, LIMIT, PACKED_16, PACKED_40, Grid, Integers

GROUP = 3
"""Number of neighbouring numbers of a row that share a code."""
CODES = 256
"""Number of codewords of each group."""
CODED_ROWS = 4096
"""Minimum number of rows of a table for which codewords save space."""
FITTED_ROWS = 8192
"""Number of rows that the codewords are fitted to, and that are compared with them at once."""
ROUNDS = 10
"""Number of rounds of k-means."""
UNIT = 30.0
"""The integer of a number as large as the root mean square of its row."""
EXACT_ROWS = 1024
"""Maximum number of a table's rows that keep 8 bits per number."""
EXACT_SHARE = 16
"""Minimum number of a table's rows for each row that keeps 8 bits per number."""
MAX_SHARE = 0.53
"""Maximum size of the packed weights of a model with finer numbers, relative to 8 bits."""


def max_exact_rows(rows: int) -> int:
    """Return how many rows of a table may keep 8 bits per number."""
    return min(EXACT_ROWS, rows // EXACT_SHARE)


def packed_grid(matrices: int, tables: Iterable[Sequence[int]]) -> Grid:
    """Return the integers of a model's packed matrices.

    They have 40 values if the tables, whose codes are small, leave room for them.

    Args:
        matrices: The number of weights of matrices.
        tables: The shapes of the tables, [rows, width].
    """
    # Three numbers share 16 bits, and 32 numbers a factor.
    size = matrices * (2 / 3 + 1 / BLOCK)
    size_in_int8 = matrices
    for rows, width in tables:
        if rows >= CODED_ROWS:
            size += (rows / GROUP + CODES + max_exact_rows(rows)) * width
            size_in_int8 += rows * width
    return PACKED_40 if size <= MAX_SHARE * size_in_int8 else PACKED_16


def round_by_codebook(weight_VH: Tensor, exact_V: Tensor) -> Integers:
    """Round a table to codewords.

    Args:
        weight_VH: The table.
        exact_V: Whether a row keeps 8 bits per number.
    """
    weight_VH = weight_VH.detach().float()
    largest_V1 = torch.maximum(weight_VH.amax(1, keepdim=True), -weight_VH.amin(1, keepdim=True))
    exact_V1 = exact_V[:, None] & (largest_V1 > 0)
    squares_V1 = [
        part.square().mean(1, keepdim=True) for part in torch.split(weight_VH, FITTED_ROWS)
    ]
    size_V1 = torch.cat(squares_V1).sqrt()
    scale_V1 = torch.where(exact_V1, largest_V1 / LIMIT, size_V1 / UNIT)
    scale_V1 = torch.where(scale_V1 > 0, scale_V1, 1.0)
    values_VH = torch.empty(weight_VH.shape, dtype=torch.int8)
    product_V1, length_V1 = torch.zeros_like(scale_V1), torch.zeros_like(scale_V1)
    coded = torch.where(~exact_V)[0]
    fitted = coded[torch.linspace(0, len(coded) - 1, FITTED_ROWS).long()]
    for begin in range(0, weight_VH.shape[1], GROUP):
        group = slice(begin, begin + GROUP)
        wanted_VG = weight_VH[:, group] / scale_V1
        values_VG = torch.round(wanted_VG)
        book_CG = _codewords(wanted_VG[fitted])
        values_VG[coded] = book_CG[_nearest(wanted_VG[coded], book_CG)]
        product_V1 += (wanted_VG * values_VG).sum(1, keepdim=True)
        length_V1 += values_VG.square().sum(1, keepdim=True)
        values_VH[:, group] = values_VG.to(torch.int8)
    # The scale with the least squared error.
    scale_V1 *= product_V1 / length_V1.clamp(min=1)
    return Integers(values_VH, scale_V1, weight_VH.shape[1])


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
    parts = torch.split(x_RG, FITTED_ROWS)
    return torch.cat([torch.addmm(lengths_C, x, book_CG.T, alpha=-2).argmin(1) for x in parts])
