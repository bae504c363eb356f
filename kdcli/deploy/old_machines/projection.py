"""Projects the time of a forward pass on a card that is not here. It is never a measurement.

A roofline by operator: a matrix product takes the longer of arithmetic and memory traffic, every other operator takes
its traffic, and every kernel adds its launch. Rates of each card are rows of devices.toml.

A matrix product is cut into tiles of its result. Multiprocessors work on one tile each, and all wait for the last one.
So a width of 312 pays for 320 or 384 columns, and a batch of 1 leaves most of the card idle. Starting and writing back
a tile costs `TILE_START` steps of the inner dimension. The fastest tile of `TILES` is taken.

`TILE_START` and Kepler's share of the peak (`gemm` of the k80) are fitted to cuBLAS 7.0 SGEMM on a K40, within 4.5 %
root mean square. Nothing is fitted to published speed-ups, which come out within 7 %. Absolute times are unchecked.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdcli.deploy.shapes import PRESETS
from kdcli.engine.device import device_table
from kdcli.errors import UsageError, did_you_mean
from kdcli.types import ModelShape

TILES = ((128, 128), (128, 64), (64, 64), (32, 32))
TILE_START = 208  # Start and write-back of a 128x128 tile, in steps along the inner dimension
STEP = 8  # Inner dimensions are padded to multiples of this
BYTES = 4  # Of a number in fp32


@dataclass(frozen=True)
class Operator:
    """One operator of a forward pass, with its repetitions in all layers."""

    kind: str
    times: int  # Repetitions
    values: int  # Numbers read and written by one repetition
    kernels: int = 1  # Launches of one repetition
    product: tuple[int, int, int, int] | None = (
        None  # Rows, columns, inner dimension and count of a matrix product
    )


def project(
    model: ModelShape, card: Mapping[str, Any], batch_size: int, seq_len: int
) -> dict[str, float]:
    """Seconds of one forward pass of BERT in float32 (without TF32) over full-length inputs, by operator class. `card`:
    a row of devices.toml."""
    seconds = {"launches": 0.0}
    for op in operators(model, batch_size, seq_len):
        seconds[op.kind] = seconds.get(op.kind, 0.0) + op.times * _operator_seconds(op, card)
        seconds["launches"] += op.times * op.kernels * card["launch_us"] * 1e-6
    return seconds


def find_card(name: str) -> dict[str, Any]:
    """A card of devices.toml, in any case. Raises UsageError: unknown."""
    cards: dict[str, dict[str, Any]] = {card["name"]: card for card in device_table()["card"]}
    if (key := name.strip().lower()) not in cards:
        raise UsageError(
            f"unknown card '{name}'; known: {', '.join(cards)}{did_you_mean(key, cards)}"
        )
    return cards[key]


def operators(model: ModelShape, batch_size: int, seq_len: int) -> list[Operator]:
    """Every operator of BERT's forward pass, as composed by the papers' code; dropout and views left out."""
    n, width = model.layers, model.hidden
    rows, heads = batch_size * seq_len, batch_size * model.heads
    hidden, inner, scores = rows * width, rows * model.ffn, heads * seq_len * seq_len
    head = width // model.heads
    return [
        _product("projections", 4 * n, rows, width, width),
        _product("feed-forward", n, rows, model.ffn, width),
        _product("feed-forward", n, rows, width, model.ffn),
        _product("pooler", 1, batch_size, width, width),
        Operator("pooler", 1, 2 * batch_size * width),
        Operator("embeddings", 3, 2 * hidden),
        Operator("embeddings", 2, 3 * hidden),
        Operator("residuals", 2 * n, 3 * hidden),
        _product("attention", n, seq_len, seq_len, head, heads),
        _product("attention", n, seq_len, head, seq_len, heads),
        # Batched products need whole matrices: query, key and value are copied head by head, the context back.
        Operator("attention", 4 * n, 2 * hidden),
        # Scale, mask and softmax, each read and written.
        Operator("softmax", 3 * n, 2 * scores),
        # A linear map of three-dimensional input adds its bias afterwards.
        Operator("biases", 5 * n, 2 * hidden),
        Operator("biases", n, 2 * inner),
        # x * 0.5 * (1 + erf(x / sqrt 2)): four of one argument, one of two.
        Operator("GELU", n, 11 * inner, kernels=5),
        # Mean, x - u, square, mean, x - u again, quotient, weight, bias, and the root of a column.
        Operator("LayerNorm", 2 * n + 1, 14 * hidden, kernels=9),
    ]


def table(
    models: Mapping[str, ModelShape], devices: Sequence[str], cells: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Rows of report.json by card, cell (batch size, tokens) and model, with the published speed-up if there is one.
    The first model is the baseline of every `speedup`. Raises as `find_card`."""
    published = {
        (p.device, p.cells[0], name): s for p in PRESETS.values() for name, s in p.published.items()
    }
    rows: list[dict[str, Any]] = []
    for card, cell in itertools.product(map(find_card, devices), cells):
        seconds = {
            name: sum(project(sizes, card, *cell).values()) for name, sizes in models.items()
        }
        baseline, device = next(iter(seconds.values())), card["name"]
        note = f"projection, not measured: roofline for {device.upper()} in fp32, kernels as in the papers' code of "
        note += f"2019 and 2020, rates as of {device_table()['as_of']}"
        for name, total in seconds.items():
            row = {"model": name, "device": device, "batch_size": cell[0], "seq_len": cell[1]}
            speedup, printed = baseline / total, published.get((device, tuple(cell), name))
            error = speedup / printed - 1 if printed else None
            ratios = {"speedup": speedup, "published": printed, "error": error}
            rows.append(row | {"milliseconds": total * 1e3} | ratios | {"note": note})
    return rows


def product_seconds(
    product: tuple[int, int, int, int], *, flops: float, efficiency: float, multiprocessors: int
) -> float:
    """Arithmetic of a matrix product: rows, columns, inner dimension, count; `flops` is the peak of the card."""
    rows, columns, inner, count = product
    steps, start = math.ceil(inner / STEP) * STEP, TILES[0][0] * TILES[0][1] * TILE_START
    by_tile = []
    for high, wide in TILES:
        waves = math.ceil(
            math.ceil(rows / high) * math.ceil(columns / wide) * count / multiprocessors
        )
        by_tile.append(waves * (high * wide * steps + start))
    return 2 * min(by_tile) / (flops / multiprocessors * efficiency)


def _product(
    kind: str, times: int, rows: int, columns: int, inner: int, count: int = 1
) -> Operator:
    values = count * (rows * inner + inner * columns + rows * columns)
    return Operator(kind, times, values, product=(rows, columns, inner, count))


def _operator_seconds(op: Operator, card: Mapping[str, Any]) -> float:
    """Seconds of one repetition without its launches."""
    traffic: float = op.values * BYTES / (card["memory"] * 1e9 * card["bandwidth"])
    if op.product is None:
        return traffic
    rates = {
        "flops": card["fp32"] * 1e12,
        "efficiency": card["gemm"],
        "multiprocessors": card["multiprocessors"],
    }
    return max(traffic, product_seconds(op.product, **rates))
