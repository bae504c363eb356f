"""Choose the integers of a model's linears from the activations of calibration texts.

For int8 in ONNX Runtime, a tensor of activations has one scale, so a few large channels leave most
of the 255 steps unused. Dividing each channel by its size and multiplying the weights by it removes
this, at the cost of one elementwise product (SmoothQuant, arXiv 2211.10438, equation 4). It is done
only for inputs where it removes a noticeable part of the model's rounding error. The weights are
then rounded with error compensation; see `kdcli.deploy.rounding`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdcli.deploy.codebook import CODED_ROWS, max_exact_rows, packed_grid, round_by_codebook
from kdcli.deploy.rounding import (
    INT4_BLOCKS,
    INT8,
    INT8_PAIRS,
    PACKED_16,
    Grid,
    InputStatistics,
    Integers,
    round_weight,
)
from kdcli.models.least_squares import add_products, mirrored
from kdcli.types import Array, Batch

MIGRATION = (0.5, 0.7, 0.85, 1.0)
"""Shares of a channel's range that smoothing moves to the weights; 1 makes all channels equal."""
MIN_GAIN, MIN_OWN_GAIN, SURE_OWN_GAIN = 0.2, 0.1, 0.5
"""Smoothing an input must lower the squared rounding error of its products by at least
`MIN_OWN_GAIN` of this error, and by `MIN_GAIN` of the mean over all inputs. Smaller gains cost time
and change the outputs little. The second bound does not apply from `SURE_OWN_GAIN` of its own error
on."""
# Number of activation values that share a scale under OpenVINO. 128 is the fastest of 32, 64, 128
# and 384 with VNNI.
ACTIVATION_GROUP = 128
COMPARED_TOKENS = 512
"""Number of tokens that measure the errors. They are not among the statistics."""
COMPARED_OUTPUTS = 256
"""Largest number of an input's outputs whose errors are measured."""


def _unsigned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor to 0 ... 255 with one scale and one zero point.

    Returns the integers, the scale and the zero point.
    """
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(x.dtype).tiny)
    zero = torch.round(-low / scale)
    return torch.clamp(torch.round(x / scale) + zero, 0, 255), scale, zero


def _with_one_scale(x: Tensor) -> Tensor:
    """Fake-quantise to integers in [0, 255] with one scale and one zero point."""
    integers, scale, zero = _unsigned(x)
    return (integers - zero) * scale


def _in_groups(x: Tensor) -> Tensor:
    """Fake-quantise to integers in [-127, 127] with a scale per `ACTIVATION_GROUP` values."""
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % ACTIVATION_GROUP))
    groups = padded.reshape(*x.shape[:-1], -1, ACTIVATION_GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(x.dtype).tiny)
    return (torch.round(groups / scale) * scale).reshape(*x.shape[:-1], -1)[..., :width]


@dataclass(frozen=True)
class Kernel:
    """How a runtime multiplies activations by integers.

    Attributes:
        grid: The integers of a linear's weights.
        round_input: Fake-quantises the activations.
        is_unsigned: Whether a tensor of activations has one scale and integers in [0, 255].
    """

    grid: Grid
    round_input: Callable[[Tensor], Tensor]
    is_unsigned: bool = False


KERNELS = {
    ("onnx", "int8"): Kernel(INT8_PAIRS, _with_one_scale, is_unsigned=True),
    ("onnx", "int8-packed"): Kernel(PACKED_16, _with_one_scale, is_unsigned=True),
    ("onnx", "q4"): Kernel(INT4_BLOCKS, nn.Identity()),
    ("openvino", "int8"): Kernel(INT8, _in_groups),
}
"""The kernel of each format and precision."""


def kernel_for(format: str, precision: str, model: nn.Module) -> Kernel:
    """Return the kernel of a model's products."""
    kernel = KERNELS[format, precision]
    if kernel.grid.max_factor is None:
        return kernel
    parts = products(model).values()
    matrices = [part.weight.numel() for part in parts if isinstance(part, nn.Linear)]
    tables = [part.weight.shape for part in parts if isinstance(part, nn.Embedding)]
    return replace(kernel, grid=packed_grid(sum(matrices), tables))


@dataclass(frozen=True)
class Rounding:
    """How a product is computed in integers.

    Attributes:
        integers: The rounded weights.
        smoothing_I: Divides each channel of the input. The integers include its inverse.
        largest_input_I: The largest integer of each channel on the calibration texts, if ONNX
            Runtime rounds the input to 0 ... 255.
    """

    integers: Integers
    smoothing_I: Tensor | None = None
    largest_input_I: Tensor | None = None

    def smoothed(self, x: Tensor) -> Tensor:
        """Return an input as the integers expect it."""
        return x if self.smoothing_I is None else x / self.smoothing_I

    def with_outputs(self, factor_O: Tensor) -> "Rounding":
        """Return the rounding of a product whose outputs are multiplied by factors."""
        scale_OG = self.integers.scale_OG * factor_O[:, None]
        return replace(self, integers=replace(self.integers, scale_OG=scale_OG))


@dataclass(eq=False)
class _Input:
    """An input that linears share; q, k and v share one.

    Attributes:
        linears: The linears that read it, by name.
        range_I: The largest magnitude of each channel.
        compared: Activations that measure errors, and which of them belong to real tokens.
        smoothing_I: Divides each channel.
        gram_II: The Gram matrix of the smoothed and rounded activations.
        largest_I: The largest integer of each channel; None in other runtimes than ONNX Runtime.
    """

    linears: dict[str, nn.Linear] = field(default_factory=dict)
    range_I: Tensor | None = None
    compared: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    smoothing_I: Tensor | None = None
    gram_II: Tensor | None = None
    largest_I: Tensor | None = None

    @property
    def weight_OI(self) -> Tensor:
        """The weights of all linears, one below the other."""
        return torch.cat([linear.weight for linear in self.linears.values()])


@torch.no_grad()
def calibrate(
    model: nn.Module,
    run: Callable[[Batch], object],
    batches: Sequence[Batch],
    kernel: Kernel,
) -> dict[str, Rounding]:
    """Choose the integers of each linear that calibration texts reach.

    Args:
        model: The model, in float32 and eval mode. It is not changed.
        run: Computes the model's outputs for a batch.
        batches: The texts, padded. Activations that are computed together share a scale, and those
            of padding can be the largest.
        kernel: How the products are computed.

    Returns:
        The rounding of each linear by name. Each step is kept only if it lowers the error of the
        product on texts that the statistics do not include. With fewer than four batches, nothing
        could be compared, so the result is empty.
    """
    compared, counted = _divide(batches)
    if not compared:
        return {}
    inputs = _find_inputs(model, run, counted, compared)
    if kernel.is_unsigned:
        _choose_smoothing(inputs, kernel)
    _measure_statistics(inputs, model, run, counted, kernel)
    roundings = {}
    for shared in inputs:
        if shared.gram_II is None or not shared.compared:
            continue  # Only some texts reach it.
        statistics = InputStatistics.of(shared.gram_II)
        shared.gram_II = None
        roundings.update(_better_roundings(shared, statistics, kernel))
        shared.compared.clear()
    return roundings


def _divide(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Divide the texts: some measure errors, and the others give the statistics."""
    compared: list[Batch] = []
    tokens = 0
    for batch in batches:
        if tokens >= COMPARED_TOKENS or len(compared) >= len(batches) // 4:
            break
        compared.append(batch)
        tokens += int(batch["attention_mask"].sum())
    counted = list(batches[len(compared) :])
    return compared, counted


def _find_inputs(
    model: nn.Module,
    run: Callable[[Batch], object],
    counted: Sequence[Batch],
    compared: Sequence[Batch],
) -> list[_Input]:
    """Find the inputs that linears share, their ranges, and the activations to compare."""
    names = {module: name for name, module in model.named_modules()}
    by_linear: dict[nn.Linear, _Input] = {}
    latest: list[tuple[Tensor, _Input]] = []

    def find(linear: nn.Linear, x: Tensor) -> _Input | None:
        """Return the input of a linear, or None if another linear has read it just now."""
        is_read = bool(latest) and latest[0][0] is x
        if linear not in by_linear:
            by_linear[linear] = latest[0][1] if is_read else _Input()
            by_linear[linear].linears[names[linear]] = linear
        latest[:] = [(x, by_linear[linear])]
        return None if is_read else by_linear[linear]

    def add_range(linear: nn.Linear, x: Tensor, is_real: Tensor) -> None:
        if (shared := find(linear, x)) is not None:
            largest_I = x.reshape(-1, x.shape[-1]).abs().amax(0)
            known_I = largest_I if shared.range_I is None else shared.range_I
            shared.range_I = torch.maximum(known_I, largest_I)

    def keep(linear: nn.Linear, x: Tensor, is_real: Tensor) -> None:
        if (shared := find(linear, x)) is not None:
            shared.compared.append((x, is_real))

    _each_input(model, run, counted, add_range)
    _each_input(model, run, compared, keep)
    return list(dict.fromkeys(by_linear.values()))


def _each_input(
    model: nn.Module,
    run: Callable[[Batch], object],
    batches: Sequence[Batch],
    read: Callable[[nn.Linear, Tensor, Tensor], None],
) -> None:
    """Call `read` for each linear that a batch reaches, with its input.

    The third argument tells which vectors of the input belong to real tokens.
    """
    mask_BL = torch.zeros(0, 0)

    def before(linear: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(linear, nn.Linear)
        x = args[0]
        has_tokens = x.shape[:-1] == mask_BL.shape
        read(linear, x, mask_BL.bool() if has_tokens else torch.ones(x.shape[:-1]).bool())

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_pre_hook(before).remove)
        for batch in batches:
            mask_BL = batch["attention_mask"]
            run(batch)


def _choose_smoothing(inputs: Sequence[_Input], kernel: Kernel) -> None:
    """Smooth the inputs where it removes a noticeable part of the rounding error."""
    inputs = [shared for shared in inputs if shared.range_I is not None]
    if not inputs:
        return  # A static model has no linears.
    smoothings = [[None, *_smoothings(shared)] for shared in inputs]
    errors = [
        _nearest_errors(shared, each, kernel)
        for shared, each in zip(inputs, smoothings, strict=True)
    ]
    mean_error = sum(plain for plain, *_ in errors) / len(errors)
    for shared, each, (plain, *smoothed) in zip(inputs, smoothings, errors, strict=True):
        noticeable = min(MIN_GAIN * mean_error, SURE_OWN_GAIN * plain)
        least_gain = max(noticeable, MIN_OWN_GAIN * plain)
        if smoothed and min(smoothed) < plain - least_gain:
            shared.smoothing_I = each[1 + smoothed.index(min(smoothed))]


def _smoothings(shared: _Input) -> Iterator[Tensor]:
    """Yield the divisors of the channels to try, [I] each."""
    assert shared.range_I is not None
    # A channel that is quiet here may be used by another text, so only large ones are divided.
    range_I = shared.range_I.clamp(min=float(shared.range_I.median()))
    size_I = shared.weight_OI.abs().amax(0)
    size_I = size_I.clamp(min=float(size_I.median()))
    if min(float(range_I.min()), float(size_I.min())) <= 0:
        return
    for share in MIGRATION:
        yield range_I**share / size_I ** (1 - share)


def _nearest_errors(
    shared: _Input, smoothings: Sequence[Tensor | None], kernel: Kernel
) -> list[float]:
    """Return the error of an input's products with the nearest integers, for each smoothing."""
    weight_OI = shared.weight_OI
    weight_OI = weight_OI[_some_outputs(weight_OI)]
    roundings = []
    for smoothing_I in smoothings:
        smoothed_OI = weight_OI if smoothing_I is None else weight_OI * smoothing_I
        roundings.append(Rounding(round_weight(smoothed_OI, kernel.grid), smoothing_I))
    return _errors(shared, weight_OI, roundings, kernel)


def _errors(
    shared: _Input, weight_OI: Tensor, roundings: Sequence[Rounding], kernel: Kernel
) -> list[float]:
    """Return the error of a product on the compared activations, for each rounding.

    It is the mean relative squared error of the outputs. Each output counts the same, because a
    layer normalisation can make the outputs with small values as important as those with large
    ones.
    """
    reference_O = torch.zeros(len(weight_OI))
    squared = [torch.zeros(len(weight_OI)) for _ in roundings]
    rounded = [rounding.integers.weight().to(weight_OI.dtype) for rounding in roundings]
    for x, is_real in shared.compared:
        y_RO = F.linear(x[is_real], weight_OI)
        reference_O += y_RO.square().sum(0)
        for sum_O, rounding, rounded_OI in zip(squared, roundings, rounded, strict=True):
            low_RI = kernel.round_input(rounding.smoothed(x))[is_real]
            sum_O += (F.linear(low_RI, rounded_OI) - y_RO).square().sum(0)
    is_used = reference_O > 0
    return [float((sum_O / reference_O)[is_used].sum()) / len(reference_O) for sum_O in squared]


def _measure_statistics(
    inputs: Sequence[_Input],
    model: nn.Module,
    run: Callable[[Batch], object],
    counted: Sequence[Batch],
    kernel: Kernel,
) -> None:
    """Measure each input as the file's products receive it."""
    by_linear = {linear: shared for shared in inputs for linear in shared.linears.values()}
    latest: list[Tensor] = []

    def add(linear: nn.Linear, x: Tensor, is_real: Tensor) -> None:
        is_read = bool(latest) and latest[0] is x
        latest[:] = [x]
        if not is_read and (shared := by_linear.get(linear)) is not None:
            smoothed = x if shared.smoothing_I is None else x / shared.smoothing_I
            if kernel.is_unsigned:
                integers, scale, zero = _unsigned(smoothed)
                rounded = (integers - zero).mul_(scale)
                largest_I = integers.reshape(-1, x.shape[-1]).amax(0).int()
                known_I = largest_I if shared.largest_I is None else shared.largest_I
                shared.largest_I = torch.maximum(known_I, largest_I)
            else:
                rounded = kernel.round_input(smoothed)
            if shared.gram_II is None:
                shared.gram_II = torch.zeros(x.shape[-1], x.shape[-1])
            add_products(shared.gram_II, rounded[is_real].float())

    _each_input(model, run, counted, add)
    for shared in inputs:
        if shared.gram_II is not None:
            shared.gram_II = mirrored(shared.gram_II)


def _better_roundings(
    shared: _Input, statistics: InputStatistics, kernel: Kernel
) -> dict[str, Rounding]:
    """Return the rounding of each linear that reads an input.

    It is the one with the smaller error: with compensation, or to the nearest integers.
    """
    weight_OI = shared.weight_OI
    smoothed_OI = weight_OI if shared.smoothing_I is None else weight_OI * shared.smoothing_I
    some = _some_outputs(weight_OI)
    compensated = round_weight(smoothed_OI, kernel.grid, statistics)
    choices = [compensated.outputs(some), round_weight(smoothed_OI[some], kernel.grid)]
    roundings = [Rounding(integers, shared.smoothing_I) for integers in choices]
    error, nearest_error = _errors(shared, weight_OI[some], roundings, kernel)
    integers = compensated if error <= nearest_error else round_weight(smoothed_OI, kernel.grid)
    result, begin = {}, 0
    for name, linear in shared.linears.items():
        end = begin + len(linear.weight)
        part = integers.outputs(slice(begin, end))
        result[name] = Rounding(part, shared.smoothing_I, shared.largest_I)
        begin = end
    return result


def _some_outputs(weight_OI: Tensor) -> slice:
    """Return evenly spaced outputs. Their errors are representative of all outputs."""
    return slice(None, None, -(-len(weight_OI) // COMPARED_OUTPUTS))


Keys = Set[str]
SMALL_TABLE = 32
"""Largest number of rows of a table that stays in float32. Every text reads such a table, token
types or relative positions for example, and rounding it would save almost nothing."""
Outputs = Callable[[Batch], Array]  # returns the model's outputs that are scored, as one vector


def key_of(weight: Array) -> str:
    """Return the key of a matrix [out, in]."""
    return hashlib.sha256(
        repr(weight.shape).encode() + np.ascontiguousarray(weight, np.float32).tobytes()
    ).hexdigest()


def key_of_module(module: nn.Linear | nn.Embedding) -> str:
    """Return the key of a product's weights."""
    return key_of(module.weight.detach().float().cpu().numpy())


def products(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Return a model's linears and embeddings by name; one that layers share appears once.

    Embeddings of at most `SMALL_TABLE` rows are never rounded, so they are left out.
    """
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
        or (isinstance(part, nn.Embedding) and part.num_embeddings > SMALL_TABLE)
    }


def keys_of(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the keys of the named products."""
    by_name = products(model)
    return {key_of_module(by_name[name]) for name in names}


def by_key(model: nn.Module, roundings: Mapping[str, Rounding]) -> dict[str, Rounding]:
    """Return the roundings of named products by the key of their weights."""
    modules = products(model)
    return {key_of_module(modules[name]): rounding for name, rounding in roundings.items()}


def product_errors(
    model: nn.Module,
    outputs: Outputs,
    batches: Sequence[Batch],
    kernel: Kernel,
    roundings: Mapping[str, Rounding],
) -> dict[str, float]:
    """Measure how much each product's own rounding changes the outputs; the largest error first.

    Args:
        model: The model, in float32 and eval mode.
        outputs: Computes the outputs that are scored.
        batches: The calibration texts.
        kernel: How the products are computed.
        roundings: The rounding of linears by name. The other weights are rounded to the nearest
            integers.

    Returns:
        The relative error of the outputs if only one product is rounded, by product.
    """
    with torch.no_grad():
        exact = np.concatenate([outputs(batch) for batch in batches])
        errors = {}
        for name, module in products(model).items():
            rounding = roundings.get(name) or nearest_rounding(module, kernel)
            with _rounded(module, rounding, kernel):
                changed = np.concatenate([outputs(batch) for batch in batches])
            errors[name] = float(np.linalg.norm(changed - exact) / np.linalg.norm(exact))
    return dict(sorted(errors.items(), key=lambda each: -each[1]))


def nearest_rounding(module: nn.Linear | nn.Embedding, kernel: Kernel) -> Rounding:
    """Return the rounding of a product without calibration."""
    grid = kernel.grid
    if isinstance(module, nn.Embedding):
        if grid.max_factor is not None:
            return Rounding(round_table(module.weight))
        # The rows of a table are not added, so no sum can saturate.
        grid = replace(grid, pair_limit=None)
    return Rounding(round_weight(module.weight, grid))


def round_table(weight_VH: Tensor, counts_V: Tensor | None = None) -> Integers:
    """Round a table for a packed file.

    Args:
        weight_VH: The table.
        counts_V: How often texts read each row; None if that is unknown. The rows that they read
            most keep 8 bits per number, because few rows are read in most places.
    """
    rows = len(weight_VH)
    if rows < CODED_ROWS:
        return round_weight(weight_VH, INT8)
    is_exact_V = torch.zeros(rows, dtype=torch.bool)
    if counts_V is not None:
        most_read = counts_V.argsort(descending=True, stable=True)[: max_exact_rows(rows)]
        is_exact_V[most_read] = counts_V[most_read] > 0
    return round_by_codebook(weight_VH, is_exact_V)


@torch.no_grad()
def round_tables(
    model: nn.Module, run: Callable[[Batch], object], batches: Sequence[Batch]
) -> dict[str, Rounding]:
    """Round each table for a packed file, by name. See `calibrate` for the arguments."""
    counts: dict[str, Tensor] = {}

    def count(name: str, table: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(table, nn.Embedding)
        own_V = torch.bincount(args[0].flatten(), minlength=table.num_embeddings)
        counts[name] = own_V + counts.get(name, torch.zeros_like(own_V))

    tables = {n: part for n, part in products(model).items() if isinstance(part, nn.Embedding)}
    with ExitStack() as hooks:
        for name, table in tables.items():
            hooks.callback(table.register_forward_pre_hook(partial(count, name)).remove)
        for batch in batches:
            run(batch)
    return {
        name: Rounding(round_table(table.weight, counts.get(name)))
        for name, table in tables.items()
    }


@contextmanager
def _rounded(
    module: nn.Linear | nn.Embedding, rounding: Rounding, kernel: Kernel
) -> Iterator[None]:
    """Let a module compute with rounded weights and, if it is a linear, with rounded inputs."""
    exact = module.weight.data

    def round_input(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return kernel.round_input(rounding.smoothed(inputs[0]))

    handle = None
    if isinstance(module, nn.Linear):
        handle = module.register_forward_pre_hook(round_input)
    module.weight.data = rounding.integers.weight().to(exact.dtype)
    try:
        yield
    finally:
        module.weight.data = exact
        if handle is not None:
            handle.remove()


def smallest_count(limit: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count in 0 ... `limit` for which `holds` is true, or None.

    A larger count must never be worse. The search doubles the count until it holds, then halves the
    gap. The result is None if `limit` itself does not hold.
    """
    below, count = -1, 0
    while not holds(count):
        if count == limit:
            return None
        below, count = count, min(limit, max(1, 2 * count))
    while count - below > 1:
        middle = (below + count) // 2
        below, count = (below, middle) if holds(middle) else (middle, count)
    return count
