"""Round the weights of a linear to integers, with error compensation.

The columns of a weight matrix are rounded one after the other. Each column's error is spread over
the columns that are still exact, weighted by how the inputs correlate, so that the product changes
as little as possible (GPTQ, arXiv 2210.17323, algorithm 1). Without statistics of the inputs, each
weight is rounded to the nearest integer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

DAMPING = 0.01  # relative to the mean squared input
COLUMNS = 128  # number of columns whose errors are applied to the later columns together
LIMIT = 127
"""Largest magnitude of an integer in 8 bits."""
PAIR_LIMIT = 128
"""Largest sum of two neighbouring weights of the same sign.

On processors without VNNI, ONNX Runtime multiplies unsigned activations by signed weights, and adds
the products of inputs 2k and 2k + 1 in 16 bits with saturation. 255 * 128 is 32,640, which fits.
"""


@dataclass(frozen=True)
class Grid:
    """The integers to which weights are rounded.

    Attributes:
        low, high: The range of the integers.
        block: Number of an output's weights that share a scale; None for all of them.
        pair_limit: Maximum sum of the weights 2k and 2k + 1 of an output, if they have the same
            sign; None for no limit.
    """

    low: int
    high: int
    block: int | None = None
    pair_limit: int | None = None

    def scales(self, weight_OI: Tensor) -> Tensor:
        """Return the scale of each block, [O, G]: the smallest that can hold the weights.

        With a negative lower end that is larger than the upper end, the scale's sign lets the
        largest weight of a block become the lower end.
        """
        groups_OGN = _blocks(weight_OI, self.block)
        largest_OG1 = groups_OGN.gather(-1, groups_OGN.abs().argmax(-1, keepdim=True))
        scale_OG = largest_OG1.squeeze(-1)
        scale_OG = scale_OG / self.low if -self.low > self.high else scale_OG.abs() / self.high
        if self.pair_limit is not None:
            pairs_OGK2 = _blocks(F.pad(weight_OI, (0, weight_OI.shape[1] % 2)), 2)[:, None]
            sums_OG = [pairs_OGK2.clamp(min=0).sum(-1), -pairs_OGK2.clamp(max=0).sum(-1)]
            largest_OG = torch.maximum(*sums_OG).amax(-1)
            scale_OG = torch.maximum(scale_OG, largest_OG / self.pair_limit)
        return torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG)


INT8 = Grid(-LIMIT, LIMIT)
"""The integers of OpenVINO's weights."""
INT8_PAIRS = Grid(-LIMIT, LIMIT, pair_limit=PAIR_LIMIT)
"""The integers of ONNX Runtime's weights. No sum of their products saturates on any processor."""
INT4_BLOCKS = Grid(-8, 7, block=32)
"""The integers of ONNX Runtime's weights in 4 bits."""


@dataclass(frozen=True)
class Integers:
    """A rounded weight matrix.

    Attributes:
        values_OI: The integers.
        scale_OG: The scale of each block of an output's weights.
        block: Number of weights in a block.
    """

    values_OI: Tensor
    scale_OG: Tensor
    block: int

    def weight(self) -> Tensor:
        """Return the weights that the integers stand for, [O, I]."""
        scale_OI = self.scale_OG.repeat_interleave(self.block, 1)[:, : self.values_OI.shape[1]]
        return self.values_OI * scale_OI

    def outputs(self, some: slice) -> "Integers":
        """Return the rounded weights of some outputs."""
        return Integers(self.values_OI[some], self.scale_OG[some], self.block)


@dataclass(frozen=True)
class InputStatistics:
    """The order in which columns are rounded, and how their errors spread.

    Attributes:
        order_I: The columns, the one with the largest inputs first.
        factor_II: Upper triangular R in this order, where R R' is the Gram matrix of the inputs.
    """

    order_I: Tensor
    factor_II: Tensor

    @classmethod
    def of(cls, gram_II: Tensor) -> "InputStatistics":
        """Prepare the Gram matrix of the inputs, X'X for inputs X [R, I]."""
        sizes_I = gram_II.diagonal().double()
        damping = DAMPING * sizes_I.mean().clamp(min=torch.finfo(torch.float32).tiny)
        order_I = sizes_I.argsort(descending=True, stable=True)
        # The Cholesky factor of the reversed matrix is lower triangular. Reversed, it is R.
        reversed_I = order_I.flip(0)
        reversed_II = gram_II[reversed_I[:, None], reversed_I].double()
        reversed_II.diagonal().add_(damping)
        return cls(order_I, torch.linalg.cholesky(reversed_II).flip(0, 1))


def round_weight(weight_OI: Tensor, grid: Grid, inputs: InputStatistics | None = None) -> Integers:
    """Round a weight matrix to the integers of a grid.

    Args:
        weight_OI: The weights.
        grid: The integers, and the weights that share a scale.
        inputs: The statistics of the inputs that the weights multiply; None rounds each weight to
            the nearest integer that the grid allows.
    """
    exact_OI = weight_OI.detach().double()
    scale_OG = grid.scales(exact_OI)
    block = grid.block or exact_OI.shape[1]
    scale_OI = scale_OG.repeat_interleave(block, 1)[:, : exact_OI.shape[1]]
    if inputs is None:
        values_OI = _nearest(exact_OI, scale_OI, grid)
    else:
        values_OI = _compensated(exact_OI, scale_OI, grid, inputs)
    return Integers(values_OI.to(torch.int8), scale_OG.float(), block)


def _nearest(exact_OI: Tensor, scale_OI: Tensor, grid: Grid) -> Tensor:
    """Round each weight by itself."""
    values_OI = torch.round(exact_OI / scale_OI).clamp(grid.low, grid.high)
    second_OK = values_OI[:, 1::2]
    values_OI[:, 1::2] = _within_pair(second_OK, values_OI[:, ::2][:, : second_OK.shape[1]], grid)
    return values_OI


def _compensated(exact_OI: Tensor, scale_OI: Tensor, grid: Grid, inputs: InputStatistics) -> Tensor:
    """Round column by column, and correct the later columns for the errors of the earlier ones.

    For errors e of a row of weights, the squared error of the product is |R'e|^2. Once the first
    columns are rounded, it is smallest if all later entries of R'e are zero. This determines the
    value that the next column should have.
    """
    width, outputs = exact_OI.shape[1], len(exact_OI)
    # A column is contiguous in the transposed matrices.
    values_IO = torch.zeros(width, outputs, dtype=torch.float64)
    exact_IO, scale_IO = exact_OI.T[inputs.order_I].contiguous(), scale_OI.T.contiguous()
    spread_IO = torch.zeros_like(exact_IO)  # R'e, from the errors of the blocks that are done
    order, is_done = inputs.order_I.tolist(), [False] * width
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        errors_CO = torch.zeros(end - begin, outputs, dtype=torch.float64)
        # A column of R is contiguous in its transpose.
        factor_CC = inputs.factor_II[begin:end, begin:end].T.contiguous()
        for place in range(begin, end):
            column, done = order[place], place - begin
            factor_C, scale_O = factor_CC[done], scale_IO[column]
            spread_O = spread_IO[place]
            spread_O.addmv_(errors_CO[:done].T, factor_C[:done])
            wanted_O = exact_IO[place] + spread_O / factor_C[done]
            value_O = torch.round(wanted_O / scale_O).clamp(grid.low, grid.high)
            partner = column ^ 1
            if partner < width and is_done[partner]:
                value_O = _within_pair(value_O, values_IO[partner], grid)
            values_IO[column] = value_O
            is_done[column] = True
            errors_CO[done] = exact_IO[place] - value_O * scale_O
        spread_IO[end:].addmm_(inputs.factor_II[begin:end, end:].T, errors_CO)
    return values_IO.T


def _within_pair(values: Tensor, partner: Tensor, grid: Grid) -> Tensor:
    """Limit integers so that their sums with their neighbours of the same sign are allowed."""
    if grid.pair_limit is None:
        return values
    lowest = -grid.pair_limit - partner.clamp(max=0)
    return torch.clamp(values, lowest, grid.pair_limit - partner.clamp(min=0))


def largest_pair(values_OI: Tensor) -> int:
    """Return the largest sum, in magnitude, of two neighbouring weights of the same sign."""
    pairs_OK2 = _blocks(F.pad(values_OI.int(), (0, values_OI.shape[1] % 2)), 2)
    sums = pairs_OK2.clamp(min=0).sum(-1).max(), -pairs_OK2.clamp(max=0).sum(-1).min()
    return int(max(sums))


def _blocks(x_OI: Tensor, block: int | None) -> Tensor:
    """Return the blocks of each row, padded with zeros, [O, G, block]."""
    width = x_OI.shape[1]
    block = block or width
    return F.pad(x_OI, (0, -width % block)).reshape(len(x_OI), -1, block)
