"""How long a forward pass would take on a card that is not here: a projection, never a measurement.

A roofline by operator. A matrix product takes the longer of its arithmetic and its traffic, everything else takes its
traffic, and every kernel takes its launch. Rates and what of them is reached stand in devices.toml, one row a card, the
same for every shape.

A matrix product is cut into tiles of its result, a multiprocessor works on one tile after the other, and all wait for
the last (its wave): a width of 312 pays for 384 or 320 columns, heads of 26 for 32, a batch of 1 leaves most of the
card idle. Starting a tile and writing it back costs as much time as `TILE_START` steps along the inner dimension, which
is why a product with an inner dimension of 384 runs slower than one with 3072. The tile is the fastest of `TILES`.

Two constants are fitted: `TILE_START` and the share of the peak that Kepler's inner loop reaches (`gemm` of the k80).
They come from cuBLAS 7.0 SGEMM on a K40 (clBLAS, doc/performance/cuBLAS_7.0/Tesla_K40/sgemm.csv, 35 square products
from 256 to 4352), which they give back within 4.5 % root mean square and 17 % at worst. Nothing is fitted to the
published speed-ups, so `check_against_published` tests the projection; it finds them within 7 %. It says nothing about
absolute times: read as seconds of 100 batches of 128, MiniLM's table 4 is half as long again as projected, and neither
paper states its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdcli.bench.shapes import PRESETS, shape
from kdcli.errors import UsageError, did_you_mean
from kdcli.training.device import device_table
from kdcli.types import ModelShape

TILES = ((128, 128), (128, 64), (64, 64), (32, 32))
TILE_START = 208
"""Steps along the inner dimension of a 128×128 tile that take as long as starting and writing back one tile."""

STEP = 8
"""Inner dimensions are padded to multiples of this."""

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
KERNELS = {
    "composed": "kernels as in the papers' code of 2019 and 2020",
    "fused": "kernels of today's PyTorch",
}


@dataclass(frozen=True)
class Operator:
    """One operator of a forward pass, all its repetitions in all layers.

    Attributes:
        kind: operator class.
        times: how often it runs.
        values: numbers read and written each time.
        kernels: launches each time.
        product: rows, columns, inner dimension and count of a (batched) matrix product; None if it is none.
    """

    kind: str
    times: int
    values: int
    kernels: int = 1
    product: tuple[int, int, int, int] | None = None

    @property
    def multiply_adds(self) -> int:
        """Of all repetitions."""
        return self.times * math.prod(self.product or (0,))


@dataclass(frozen=True)
class Projection:
    """What a forward pass would take. `shares` are of the seconds, by operator class; `launches` is one."""

    shape: ModelShape
    device: str
    batch_size: int
    seq_len: int
    precision: str
    kernels: str
    seconds: float
    shares: Mapping[str, float]

    @property
    def label(self) -> str:
        """What has to stand beside the number wherever it is shown."""
        return (
            f"projection, not measured: roofline for {self.device.upper()} in {self.precision}, "
            f"{KERNELS[self.kernels]}, rates as of {device_table()['as_of']}"
        )


@dataclass(frozen=True)
class Check:
    """A published speed-up beside the projected one; `error` is relative to the published one."""

    preset: str
    shape: str
    device: str
    published: float
    projected: float
    error: float
    label: str


def known_cards() -> list[str]:
    """Names that `project` takes."""
    return [card["name"] for card in device_table()["card"]]


def project(
    of: str | ModelShape,
    device: str,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    kernels: str = "composed",
) -> Projection:
    """Project one forward pass of BERT in a shape over full-length inputs.

    Args:
        of: `6x384`, `4x312:1200@12` …, or its sizes.
        device: a name of `known_cards`, in any case.
        batch_size, seq_len: sequences and tokens of each.
        precision: `fp32` (without TF32), `fp16` or `bf16`.
        kernels: `composed` is what the papers' code ran: bias, scale, mask, GELU and LayerNorm put together from
            elementary operators; the one that `check_against_published` checks. `fused` is what PyTorch runs today:
            bias in the product, one kernel each for attention, GELU and LayerNorm; unchecked.

    Raises:
        UsageError: unknown card, precision or kernels; no such products on the card; a shape that cannot be; batch or
            length below 1.
    """
    card = _card(device, precision)
    if kernels not in KERNELS:
        raise UsageError(f"unknown kernels '{kernels}'; allowed: {', '.join(KERNELS)}{did_you_mean(kernels, KERNELS)}")
    if batch_size < 1 or seq_len < 1:
        raise UsageError(f"batch size {batch_size} and length {seq_len}: both must be at least 1")
    sizes = shape(of) if isinstance(of, str) else of
    seconds: dict[str, float] = {}
    for op in operators(sizes, batch_size, seq_len, kernels):
        seconds[op.kind] = seconds.get(op.kind, 0.0) + op.times * _busy(op, card, precision)
        seconds["launches"] = seconds.get("launches", 0.0) + op.times * op.kernels * card["launch_us"] * 1e-6
    total = sum(seconds.values())
    shares = {kind: spent / total for kind, spent in seconds.items()}
    return Projection(sizes, card["name"], batch_size, seq_len, precision, kernels, total, shares)


def operators(of: ModelShape, batch_size: int, seq_len: int, kernels: str) -> list[Operator]:
    """Every operator of a forward pass of BERT, dropout and views left out; `kernels` as in `project`."""
    n, width = of.layers, of.hidden
    rows, heads = batch_size * seq_len, batch_size * of.heads
    hidden, inner, scores = rows * width, rows * of.ffn, heads * seq_len * seq_len
    head = width // of.heads
    common = [
        _product("projections", 4 * n, rows, width, width),
        _product("feed-forward", n, rows, of.ffn, width),
        _product("feed-forward", n, rows, width, of.ffn),
        _product("pooler", 1, batch_size, width, width),
        Operator("pooler", 1, 2 * batch_size * width),
        Operator("embeddings", 3, 2 * hidden),
        Operator("embeddings", 2, 3 * hidden),
        Operator("residuals", 2 * n, 3 * hidden),
    ]
    if kernels == "fused":
        return [
            *common,
            # Both products of one head share their tiles; scores never reach the memory.
            Operator("attention", n, 4 * hidden, product=(seq_len, seq_len, 2 * head, heads)),
            Operator("GELU", n, 2 * inner),
            Operator("LayerNorm", 2 * n + 1, 2 * hidden),
        ]
    return [
        *common,
        _product("attention", n, seq_len, seq_len, head, heads),
        _product("attention", n, seq_len, head, seq_len, heads),
        # Batched products want whole matrices: query, key and value are copied head by head, the context back.
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


def check_against_published() -> list[Check]:
    """The published speed-ups of the presets beside the projected ones, in fp32 on the card of the paper."""
    checks = []
    for name, preset in PRESETS.items():
        if preset.device is None:
            continue
        batch_size, seq_len = preset.cells[0]
        rows = table(preset.shapes, [preset.device], cells=[(batch_size, seq_len)])
        for row in rows:
            published, projected = preset.published[row["shape"]], row["projected_speedup"]
            error = projected / published - 1
            checks.append(Check(name, row["shape"], row["device"], published, projected, error, row["label"]))
    return checks


def table(
    shapes: Sequence[str | ModelShape],
    devices: Sequence[str],
    *,
    cells: Sequence[tuple[int, int]] = PRESETS["minilm"].cells,
    precision: str = "fp32",
    kernels: str = "composed",
) -> list[dict[str, Any]]:
    """Plain rows for a report, card by card, cell by cell, shape by shape.

    Args:
        shapes: the first is the baseline of every `projected_speedup`.
        devices, precision, kernels: as in `project`.
        cells: (batch size, tokens).

    Returns:
        Rows of `shape`, `device`, `batch_size`, `seq_len`, `precision`, `kernels`, `projected_ms`,
        `projected_speedup` over the first shape in the same cell, `shares` and `label`.

    Raises:
        UsageError: as `project`.
    """
    rows: list[dict[str, Any]] = []
    for device in devices:
        for batch_size, seq_len in cells:
            baseline: float | None = None
            for of in shapes:
                found = project(
                    of, device, batch_size=batch_size, seq_len=seq_len, precision=precision, kernels=kernels
                )
                baseline = baseline or found.seconds
                rows.append(
                    {
                        "shape": str(of).strip(),
                        "device": found.device,
                        "batch_size": batch_size,
                        "seq_len": seq_len,
                        "precision": precision,
                        "kernels": kernels,
                        "projected_ms": found.seconds * 1e3,
                        "projected_speedup": baseline / found.seconds,
                        "shares": dict(found.shares),
                        "label": found.label,
                    }
                )
    return rows


def product_seconds(
    product: tuple[int, int, int, int], *, flops: float, efficiency: float, multiprocessors: int
) -> float:
    """Arithmetic of a matrix product: rows, columns, inner dimension, count; `flops` is the peak of the card."""
    rows, columns, inner, count = product
    steps = math.ceil(inner / STEP) * STEP
    a_square = TILES[0][0] * TILES[0][1]
    a_tile = []
    for high, wide in TILES:
        waves = math.ceil(math.ceil(rows / high) * math.ceil(columns / wide) * count / multiprocessors)
        a_tile.append(waves * (high * wide * steps + a_square * TILE_START))
    return 2 * min(a_tile) / (flops / multiprocessors * efficiency)


def _product(kind: str, times: int, rows: int, columns: int, inner: int, count: int = 1) -> Operator:
    values = count * (rows * inner + inner * columns + rows * columns)
    return Operator(kind, times, values, product=(rows, columns, inner, count))


def _busy(op: Operator, card: Mapping[str, Any], precision: str) -> float:
    """Seconds of one repetition on the card, its launches left out."""
    moving: float = op.values * BYTES[precision] / (card["memory"] * 1e9 * card["bandwidth"])
    if op.product is None:
        return moving
    rates = {"flops": card[precision] * 1e12, "efficiency": card["gemm"], "multiprocessors": card["multiprocessors"]}
    return max(moving, product_seconds(op.product, **rates))


def _card(name: str, precision: str) -> dict[str, Any]:
    cards: dict[str, dict[str, Any]] = {card["name"]: card for card in device_table()["card"]}
    card = cards.get(name.strip().lower())
    if card is None:
        raise UsageError(
            f"nothing is known of a card '{name}'; known: {', '.join(cards)}{did_you_mean(name.lower(), cards)}"
        )
    if precision not in BYTES:
        raise UsageError(f"unknown precision '{precision}'; allowed: {', '.join(BYTES)}")
    if precision not in card:
        raise UsageError(
            f"a {card['name']} has no {precision} products", f"it has {', '.join(p for p in BYTES if p in card)}"
        )
    return card
