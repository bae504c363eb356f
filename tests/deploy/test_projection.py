"""Projections beside published speed-ups, a measured curve of matrix products, and arithmetic by hand."""

import itertools
import math

import pytest
from transformers import BertModel

from kdcli.deploy.old_machines import projection
from kdcli.deploy.old_machines.projection import (
    TILE_START,
    find_card,
    operators,
    product_seconds,
    project,
    table,
)
from kdcli.deploy.shapes import PRESETS, config_of, shape
from kdcli.engine.device import device_table, known_devices
from kdcli.errors import UsageError
from kdcli.models.card import multiply_adds

# GFLOP/s of cuBLAS 7.0 SGEMM on a K40 at 875 MHz by size of a square product: what the two constants come from.
K40 = {
    256: 732.31, 320: 1185.96, 384: 1279.18, 512: 1378.57, 640: 2180.63, 768: 2077.67, 896: 2394.47, 960: 2716.16,
    1024: 2274.73, 1152: 2703.3, 1280: 3009.58, 1408: 2817.5, 1536: 2701.02, 1600: 2858.5, 1664: 2971.45, 1792: 2911.38,
    1920: 3187.09, 2048: 3159.47, 2176: 3113.98, 2304: 3137.38, 2432: 3107.17, 2560: 3208.24, 2688: 3133.47,
    2816: 3188.94, 2944: 3188.38, 3072: 3240.27, 3200: 3186.85, 3328: 3241.21, 3456: 3230.72, 3584: 3240.97,
    3712: 3230.99, 3840: 3296.57, 3968: 3238.14, 4096: 3275.29, 4352: 3282.08,
}  # fmt: skip


def kepler(size: int, efficiency: float = 0.695) -> float:
    """Seconds of a square product on a K40: 15 multiprocessors of 192 lanes."""
    return product_seconds(
        (size, size, size, 1), flops=2 * 2880 * 875e6, efficiency=efficiency, multiprocessors=15
    )


def k40_error(efficiency: float) -> float:
    off = [
        math.log(2 * n**3 / kepler(n, efficiency) / 1e9 / measured) for n, measured in K40.items()
    ]
    return math.sqrt(sum(x * x for x in off) / len(off))


def published_errors():
    """(card, relative error of the projected speed-up) for every published one."""
    for preset in (PRESETS["minilm"], PRESETS["tinybert"]):
        rows = table({text: shape(text) for text in preset.shapes}, [preset.device], preset.cells)
        assert [row["published"] for row in rows] == list(preset.published.values())
        for row in rows:
            assert row["error"] == pytest.approx(row["speedup"] / row["published"] - 1)
            yield row["device"], row["error"]


def test_published_speedups():
    errors = list(published_errors())
    assert len(errors) == 9
    assert all(abs(error) < 0.07 for _, error in errors)


@pytest.mark.parametrize("gemm", [0.6, 0.7, 0.9, 1.0])
def test_published_speedups_with_another_share_of_the_peak(monkeypatch, gemm):
    cards = [{**card, "gemm": gemm} for card in device_table()["card"]]
    monkeypatch.setattr(projection, "device_table", lambda: {**device_table(), "card": cards})
    assert all(abs(error) < 0.09 for card, error in published_errors() if card == "p100")


def test_constants_are_those_of_a_measured_curve(monkeypatch):
    k80 = next(card for card in device_table()["card"] if card["name"] == "k80")
    fitted = k40_error(k80["gemm"])
    assert fitted < 0.046
    for efficiency, start in (
        (0.65, TILE_START),
        (0.74, TILE_START),
        (k80["gemm"], 150),
        (k80["gemm"], 270),
    ):
        monkeypatch.setattr(projection, "TILE_START", start)
        assert k40_error(efficiency) > fitted


@pytest.mark.parametrize("text", ["4x312:1200@12", "2x96:200@6"])
def test_operators_do_the_work_of_the_shape(text):
    work = multiply_adds(BertModel(config_of(text, vocab_size=300)))
    for batch in (1, 5):
        parts = [
            op.times * math.prod(op.product or (0,)) for op in operators(shape(text), batch, 128)
        ]
        assert sum(parts) == batch * work


def test_a_product_pays_for_whole_tiles_and_waves():
    rates = {"flops": 1e12, "efficiency": 0.5, "multiprocessors": 4}
    one = product_seconds((256, 256, 4096, 1), **rates)
    assert one == pytest.approx(2 * 128 * 128 * (4096 + TILE_START) / (1e12 / 4 * 0.5))
    assert product_seconds((256, 256, 4089, 1), **rates) == one
    assert product_seconds((256, 256, 4088, 1), **rates) < one
    assert product_seconds((129, 129, 4096, 1), **rates) > 0.7 * one
    # A wave more, and a smaller tile where a large one would leave multiprocessors idle.
    assert product_seconds((256, 256, 4096, 2), **rates) == pytest.approx(2 * one)
    assert product_seconds((257, 256, 4096, 1), **rates) > 1.2 * one
    assert one / 4 < product_seconds((128, 128, 4096, 1), **rates) < one / 3


def test_time_is_the_longer_of_arithmetic_and_traffic_and_the_launches():
    card = find_card(" P100 ")
    seconds = project(shape("1x768"), card, 128, 128)
    rows = 128 * 128
    bytes_moved = 3 * 2 * rows * 768 * 4 + 2 * 3 * rows * 768 * 4
    assert seconds["embeddings"] == pytest.approx(bytes_moved / (732e9 * card["bandwidth"]))
    rates = {
        "flops": 9.3e12,
        "efficiency": card["gemm"],
        "multiprocessors": card["multiprocessors"],
    }
    products = [product_seconds((rows, *sizes, 1), **rates) for sizes in ((3072, 768), (768, 3072))]
    assert seconds["feed-forward"] == pytest.approx(sum(products))
    launches = sum(op.times * op.kernels for op in operators(shape("1x768"), 128, 128))
    assert seconds["launches"] == pytest.approx(launches * card["launch_us"] * 1e-6)


def test_faster_cards_and_smaller_inputs():
    def seconds(text="6x384", card="v100", batch_size=32, seq_len=128):
        return sum(project(shape(text), find_card(card), batch_size, seq_len).values())

    assert seconds() < min(seconds(batch_size=64), seconds(seq_len=256), seconds("12x384"))
    ordered = [seconds(card=name) for name in ("k80", "p100", "v100", "a100", "h200")]
    assert ordered == sorted(ordered, reverse=True)


def test_rows_for_a_report():
    names = ("12x768", "6x384")
    rows = table({name: shape(name) for name in names}, ["k80", "P100"], [(1, 16), (8, 128)])
    expected = itertools.product(("k80", "p100"), (1, 8), names)
    assert [(r["device"], r["batch_size"], r["model"]) for r in rows] == list(expected)
    for baseline, row in zip(rows[::2], rows[1::2], strict=True):
        assert baseline["speedup"] == 1 < row["speedup"]
        assert row["speedup"] == pytest.approx(baseline["milliseconds"] / row["milliseconds"])
        assert row["published"] is None, "the papers' cell is 128 x 128"
        assert row["note"].startswith(
            f"projection, not measured: roofline for {row['device'].upper()}"
        )
        assert device_table()["as_of"] in row["note"]


def test_an_unknown_card_is_refused():
    with pytest.raises(
        UsageError, match=r"unknown card 'p10'; known: k80, p100, .*did you mean 'p100'"
    ):
        table({"6x384": shape("6x384")}, ["p10"], [(1, 128)])


def test_cards_are_complete():
    generations, cards = {row["capability"]: row for row in known_devices()}, device_table()["card"]
    assert len({card["name"] for card in cards}) == len(cards)
    for card in cards:
        row = generations[card["capability"]]
        assert card["name"].split("-")[0].upper() in row["name"]
        assert ("bf16" in card) == row["bf16"]
        assert not row["tensor_cores"] or card["fp16"] > 2 * card["fp32"]
        assert (
            0.4 < min(card["gemm"], card["bandwidth"]) <= max(card["gemm"], card["bandwidth"]) < 1
        )
