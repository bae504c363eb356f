"""Round the weights of a linear to integers, with error compensation.

The columns of a weight matrix are rounded one after the other. Each column's error is spread over
the columns that are still exact, weighted by how the inputs correlate, so that the product changes
as little as possible (GPTQ, arXiv 2210.17323, algorithm 1). Without statistics of the inputs, each
weight is rounded to the nearest integer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kdcli.types import Array

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
        max_factor: If given, an output has one scale, and each of its blocks has an integer factor
            from 1 to this number. A weight is the product of an integer in the range, or in the
            range with the opposite sign, and the factor.
    """

    low: int
    high: int
    block: int | None = None
    pair_limit: int | None = None
    max_factor: int | None = None

    def for_width(self, width: int) -> "Grid":
        """Return the grid of a matrix with this many inputs.

        Without whole blocks, there are no factors, and the integers have 8 bits.
        """
        if self.max_factor is None or self.block is None or width % self.block == 0:
            return self
        return Grid(-LIMIT, LIMIT, pair_limit=self.pair_limit)

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


BLOCK = 32
"""Number of an output's packed weights that share a factor."""
PACKED_16 = Grid(-8, 7, block=BLOCK, pair_limit=PAIR_LIMIT, max_factor=15)
PACKED_40 = Grid(-20, 19, block=BLOCK, pair_limit=PAIR_LIMIT, max_factor=6)
"""The integers of ONNX Runtime's packed weights: a number of 16 or 40 values and a factor, whose
product fits 8 bits."""


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
    grid = grid.for_width(exact_OI.shape[1])
    if grid.max_factor is None:
        scale_OG = grid.scales(exact_OI)
        block = grid.block or exact_OI.shape[1]
        levels = _Levels.plain(grid, exact_OI)
    else:
        scale_OG, levels = _levels_with_factors(exact_OI, grid, inputs)
        block = exact_OI.shape[1]
    scale_OI = scale_OG.repeat_interleave(block, 1)[:, : exact_OI.shape[1]]
    if inputs is None:
        values_OI = _nearest(exact_OI, scale_OI, levels, grid)
    else:
        values_OI = _compensated(exact_OI, scale_OI, levels, grid, inputs)
    return Integers(values_OI.to(torch.int8), scale_OG.float(), block)


@dataclass(frozen=True)
class _Levels:
    """The integers that each weight may have.

    Attributes:
        step_OI: They are multiples of this integer.
        low_OI, high_OI: The range of the multiples.
    """

    step_OI: Tensor
    low_OI: Tensor
    high_OI: Tensor

    @classmethod
    def plain(cls, grid: Grid, weight_OI: Tensor) -> "_Levels":
        """Return all integers of a grid without factors, for every weight."""
        one = weight_OI.new_ones(1, 1).expand_as(weight_OI)
        low, high = (weight_OI.new_full((1, 1), end) for end in (grid.low, grid.high))
        return cls(one, low.expand_as(weight_OI), high.expand_as(weight_OI))

    def transposed(self) -> "_Levels":
        """Return the same with the weights of an input in a contiguous row."""
        parts = (self.step_OI, self.low_OI, self.high_OI)
        return _Levels(*(part.T.contiguous() for part in parts))

    def of_row(self, place: int) -> "_Levels":
        """Return the integers of one row."""
        return _Levels(self.step_OI[place], self.low_OI[place], self.high_OI[place])

    def round(self, x: Tensor) -> Tensor:
        """Return the nearest integers."""
        return torch.round(x / self.step_OI).clamp(self.low_OI, self.high_OI) * self.step_OI


SCALES = (1.0, 1.25, 1.6)
"""The scales of an output that are tried, relative to the smallest that holds its weights."""
SMALLER_FACTORS = (0, 1, 2, 3)
"""How much smaller than needed for the largest weight of a block its factor may be."""


def _levels_with_factors(
    exact_OI: Tensor, grid: Grid, inputs: InputStatistics | None
) -> tuple[Tensor, _Levels]:
    """Choose the scale of each output, [O, 1], and the factor of each block.

    The errors of the nearest integers, weighted by the squared inputs, decide. The end of the range
    with the larger magnitude is on the side of a block's largest weight.
    """
    assert grid.max_factor is not None
    importance_1I = torch.ones(1, exact_OI.shape[1])
    if inputs is not None:
        importance_1I[0, inputs.order_I] = inputs.factor_II.square().sum(1).float()
    weight_OI = exact_OI.float()
    blocks_OGN = _blocks(weight_OI, grid.block)
    importance_1GN = _blocks(importance_1I, grid.block)
    largest_OG = blocks_OGN.gather(-1, blocks_OGN.abs().argmax(-1, keepdim=True)).squeeze(-1)
    low_OG = grid.low + (largest_OG > 0).float()
    high_OG = low_OG + grid.high - grid.low
    most = -grid.low * grid.max_factor
    least_O1 = Grid(-most, most, pair_limit=grid.pair_limit).scales(weight_OI)

    def by_weight(factor_OG: Tensor) -> _Levels:
        parts = (factor_OG, low_OG, high_OG)
        return _Levels(*(part.repeat_interleave(blocks_OGN.shape[-1], 1) for part in parts))

    best_error_O = torch.full((len(weight_OI),), torch.inf)
    best_O1, best_OG = least_O1, largest_OG
    for ratio in SCALES if grid.pair_limit else SCALES[:1]:
        scale_O1 = least_O1 * ratio
        error_OG = torch.full_like(largest_OG, torch.inf)
        factor_OG = torch.ones_like(largest_OG)
        needed_OG = torch.ceil(largest_OG.abs() / (-grid.low * scale_O1))
        for less in SMALLER_FACTORS:
            tried_OG = (needed_OG - less).clamp(1, grid.max_factor)
            unit_OG1 = (tried_OG * scale_O1)[..., None]
            rounded_OGN = torch.round(blocks_OGN / unit_OG1)
            rounded_OGN = rounded_OGN.clamp(low_OG[..., None], high_OG[..., None]) * unit_OG1
            tried_error_OG = ((rounded_OGN - blocks_OGN).square() * importance_1GN).sum(-1)
            factor_OG = torch.where(tried_error_OG < error_OG, tried_OG, factor_OG)
            error_OG = torch.minimum(tried_error_OG, error_OG)
        values_OI = _nearest(weight_OI, scale_O1, by_weight(factor_OG), grid)
        error_O = ((values_OI * scale_O1 - weight_OI).square() * importance_1I).sum(1)
        is_better_O = error_O < best_error_O
        best_error_O = torch.minimum(error_O, best_error_O)
        best_O1 = torch.where(is_better_O[:, None], scale_O1, best_O1)
        best_OG = torch.where(is_better_O[:, None], factor_OG, best_OG)
    return best_O1.double(), by_weight(best_OG.double())


def _nearest(exact_OI: Tensor, scale_OI: Tensor, levels: _Levels, grid: Grid) -> Tensor:
    """Round each weight by itself."""
    return within_pairs(levels.round(exact_OI / scale_OI), levels.step_OI, grid)


def _compensated(
    exact_OI: Tensor, scale_OI: Tensor, levels: _Levels, grid: Grid, inputs: InputStatistics
) -> Tensor:
    """Round column by column, and correct the later columns for the errors of the earlier ones.

    For errors e of a row of weights, the squared error of the product is |R'e|^2. Once the first
    columns are rounded, it is smallest if all later entries of R'e are zero. This determines the
    value that the next column should have.
    """
    width, outputs = exact_OI.shape[1], len(exact_OI)
    # A column is contiguous in the transposed matrices.
    values_IO = torch.zeros(width, outputs, dtype=torch.float64)
    exact_IO, scale_IO = exact_OI.T[inputs.order_I].contiguous(), scale_OI.T.contiguous()
    levels_by_column = levels.transposed()
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
            levels_O = levels_by_column.of_row(column)
            value_O = levels_O.round(wanted_O / scale_O)
            partner = column ^ 1
            if partner < width and is_done[partner]:
                value_O = _within_pair(value_O, values_IO[partner], levels_O.step_OI, grid)
            values_IO[column] = value_O
            is_done[column] = True
            errors_CO[done] = exact_IO[place] - value_O * scale_O
        spread_IO[end:].addmm_(inputs.factor_II[begin:end, end:].T, errors_CO)
    return values_IO.T


def within_pairs(values_OI: Tensor, step_OI: Tensor, grid: Grid) -> Tensor:
    """Limit every second weight, a multiple of a step, so that the sums of pairs are allowed."""
    values_OI = values_OI.clone()
    second_OK = values_OI[:, 1::2]
    first_OK = values_OI[:, ::2][:, : second_OK.shape[1]]
    values_OI[:, 1::2] = _within_pair(second_OK, first_OK, step_OI[:, 1::2], grid)
    return values_OI


def _within_pair(values: Tensor, partner: Tensor, step: Tensor, grid: Grid) -> Tensor:
    """Limit multiples of a step so that sums with neighbours of the same sign are allowed."""
    if grid.pair_limit is None:
        return values
    low, high = -grid.pair_limit - partner.clamp(max=0), grid.pair_limit - partner.clamp(min=0)
    return torch.clamp(values, torch.ceil(low / step) * step, torch.floor(high / step) * step)


def largest_pair(values_OI: Tensor) -> int:
    """Return the largest sum, in magnitude, of two neighbouring weights of the same sign."""
    pairs_OK2 = _blocks(F.pad(values_OI.int(), (0, values_OI.shape[1] % 2)), 2)
    sums = pairs_OK2.clamp(min=0).sum(-1).max(), -pairs_OK2.clamp(max=0).sum(-1).min()
    return int(max(sums))


def block_factors(blocks: Array, axis: int, most: int) -> Array:
    """Return the factor of each block of integers: each integer is a small number times it.

    The numbers reach from -`most` to `most - 1`, so the factor is negative if `most` occurs.
    """
    factors = np.maximum(np.gcd.reduce(blocks, axis=axis, keepdims=True), 1)
    is_turned = (blocks // factors).max(axis, keepdims=True) == most
    return np.where(is_turned, -factors, factors)


def _blocks(x_OI: Tensor, block: int | None) -> Tensor:
    """Return the blocks of each row, padded with zeros, [O, G, block]."""
    width = x_OI.shape[1]
    block = block or width
    return F.pad(x_OI, (0, -width % block)).reshape(len(x_OI), -1, block)
