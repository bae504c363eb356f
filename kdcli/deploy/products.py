"""Name the products of a model, and measure the error that rounding causes in each.

A product is named after the linear whose weights it multiplies by. An embedding, which multiplies
its table by one-hot rows, counts as a product too. Graphs rename weights and fold transposes, so a
product is identified by the content of its matrix.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.deploy.calibrate import Kernel, Rounding
from kdcli.deploy.rounding import round_weight
from kdcli.types import Array, Batch

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
    is_table = isinstance(module, nn.Embedding)
    # The rows of a table are not added, so no sum can saturate.
    grid = replace(kernel.grid, pair_limit=None) if is_table else kernel.grid
    return Rounding(round_weight(module.weight, grid))


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
