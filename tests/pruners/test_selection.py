"""Masking functions: exact counts, ordered ties, the paper's densities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.pruners import selection
from kdcli.pruners.selection import (
    apportion,
    down_to_one,
    global_,
    keep_top,
    local,
    proportional,
    shares,
    threshold,
)

pytestmark = pytest.mark.slow


def by_sorting(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """The definition: descending by score, then ascending by index."""
    flat = scores.flatten().double().numpy()
    order = np.lexsort((np.arange(len(flat)), -flat))
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[torch.from_numpy(order[:keep].copy())] = True
    return mask.view(scores.shape)


@pytest.fixture(scope="module", autouse=True, params=["cpu", "accelerator"])
def _scores_on(request):
    """As on a CPU, and as on an accelerator, which is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "accelerator":
            patch.setattr(selection, "_on_cpu", lambda pieces: False)
        yield


def random(seed: int, *shape: int, levels: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * levels).round() / levels if levels else drawn


@given(
    **{
        "seed": st.integers(0, 99),
        "rows": st.integers(1, 40),
        "columns": st.integers(1, 40),
        "share": st.floats(0, 1),
    },
    levels=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_exactly_the_largest_are_kept_and_the_first_among_equals(
    seed, rows, columns, levels, share, dtype
):
    scores = random(seed, rows, columns, levels=levels).to(dtype)
    keep = round(share * scores.numel())
    assert torch.equal(keep_top(scores, keep), by_sorting(scores, keep))


@pytest.mark.parametrize("keep", [1, 2, 3000, 30_000, 149_999, 299_999])
@pytest.mark.parametrize("kind", ["normal", "one value", "mostly one value", "rising"])
def test_large_matrices_are_selected_exactly_through_a_sample(keep, kind):
    scores = random(1, 300, 1000)
    if kind == "one value":
        scores.zero_()
    elif kind == "mostly one value":
        scores[scores < 2] = 0
    elif kind == "rising":
        scores = torch.arange(300_000.0).view(300, 1000)
    assert scores.numel() > 4 * selection.MIN_SAMPLE
    assert torch.equal(keep_top(scores, keep), by_sorting(scores, keep))


@pytest.mark.parametrize("at", ["above", "below"])
def test_the_mask_is_exact_when_the_sample_misleads(at):
    scores = random(2, 300, 1000)
    # The sample takes these scores, and the one that is searched lies above or below all of them.
    scores.view(-1)[::67] = -9.0 if at == "above" else 9.0
    assert torch.equal(keep_top(scores, 10_000), by_sorting(scores, 10_000))


def test_a_transposed_matrix_is_selected_as_it_is_indexed():
    scores = random(3, 7, 5, levels=1).T
    assert torch.equal(keep_top(scores, 11), by_sorting(scores, 11))


@pytest.mark.parametrize("keep", [-1, 13])
def test_a_count_outside_the_scores_is_refused(keep):
    with pytest.raises(ValueError, match="of 12"):
        keep_top(torch.zeros(3, 4), keep)


def model_scores(
    seed: int, layers: int, levels: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    shapes = {"Q": (8, 12), "U": (24, 12), "D": (12, 24)}
    scores = {
        f"{n}.{k}": random(seed + 10 * n, *shape, levels=levels) * n - n
        for n in range(1, layers + 1)
        for k, shape in shapes.items()
    }
    return scores, {name: name.split(".")[1] for name in scores}


def kept(chosen: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(mask.sum()) for name, mask in chosen.items()}


@settings(max_examples=50)
@given(
    seed=st.integers(0, 99),
    layers=st.integers(1, 5),
    density=st.floats(0.0, 1),
    levels=st.sampled_from([0, 1]),
)
def test_local_keeps_the_top_of_each_matrix_and_global_of_all_together(
    seed, layers, density, levels
):
    scores, _ = model_scores(seed, layers, levels)
    for name, mask in local(scores, density).items():
        assert torch.equal(
            mask, by_sorting(scores[name], max(1, round(density * scores[name].numel())))
        )
    together = torch.cat([s.flatten() for s in scores.values()])
    expected = by_sorting(together, round(density * len(together))).split(
        [s.numel() for s in scores.values()]
    )
    for (name, mask), of_all in zip(global_(scores, density).items(), expected, strict=True):
        assert torch.equal(
            mask, of_all.view(mask.shape) if of_all.any() else by_sorting(scores[name], 1)
        )


def densities_of_the_paper(sums: np.ndarray, density: float) -> np.ndarray:
    """Equal sizes; bisection over the factor of min(1, factor · r), in float64."""
    low, high = 0.0, 1 / sums.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(1, middle * sums).mean() < density else (low, middle)
        )
    return np.minimum(1, high * sums)


@settings(max_examples=50)
@given(
    **{"seed": st.integers(0, 99), "layers": st.integers(1, 6), "density": st.floats(0.02, 1)},
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_proportional_densities_are_the_papers_clipped_and_redistributed(
    seed, layers, density, temperature
):
    scores, kinds = model_scores(seed, layers)
    chosen = proportional(scores, kinds, density, temperature)
    counts = kept(chosen)
    for kind in "QUD":
        names = [n for n in scores if kinds[n] == kind]
        sums = np.array(
            [(1 / (1 + np.exp(-scores[n].double().numpy() / temperature))).mean() for n in names]
        )
        expected = densities_of_the_paper(sums, density)
        for name, share in zip(names, expected, strict=True):
            assert abs(counts[name] - max(1.0, share * scores[name].numel())) <= 1 + 1e-3
            assert torch.equal(chosen[name], by_sorting(scores[name], counts[name]))
    total = sum(s.numel() for s in scores.values())
    # Beyond the total are only matrices that would have been empty.
    assert (
        0
        <= sum(counts.values()) - round(density * total)
        <= sum(count == 1 for count in counts.values())
    )


def test_proportional_without_clipping_is_the_formula():
    scores = {
        "1.Q": torch.full((10, 10), -2.0),
        "2.Q": torch.zeros(10, 10),
        "3.Q": torch.full((10, 10), 1.0),
    }
    r = torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64).sigmoid()
    counts = kept(proportional(scores, dict.fromkeys(scores, "Q"), 0.4))
    expected = (0.4 * 3 * 100 * r / r.sum()).tolist()
    assert all(abs(counts[n] - e) < 1 for n, e in zip(scores, expected, strict=True))
    assert sum(counts.values()) == 120


def test_a_share_above_one_goes_to_the_others():
    # 0.6 · 3 / (0.9 + 0.5 + 0.1) = 1.2: 1.08, 0.6, 0.12; then 0.8 for 0.5 and 0.1.
    assert shares([100, 100, 100], np.log([0.9, 0.5, 0.1]), 0.6) == pytest.approx(
        [100, 66.66667, 13.33333]
    )
    assert shares([100, 300], [0.5, 0.5], 1.0) == [100, 300]


def test_the_largest_remainders_are_rounded_up():
    assert apportion({"a": 1.2, "b": 2.7, "c": 0.1}, 4) == {"a": 1, "b": 3, "c": 0}


def test_threshold_compares_the_sigmoid_and_leaves_no_matrix_empty():
    scores = {"1.Q": torch.tensor([[-3.0, -2.0, 0.5]]), "2.Q": torch.tensor([[-9.0, -8.0, -7.0]])}
    chosen = threshold(scores, 0.1)
    assert (chosen["1.Q"].tolist(), chosen["2.Q"].tolist()) == (
        [[False, True, True]],
        [[False, False, True]],
    )
    assert down_to_one(chosen) == [
        "1 of 2 matrices keep a single weight, the minimum that a mask leaves: 2.Q"
    ]
    assert all(mask.all() for mask in threshold(scores, 0.0).values())
    assert down_to_one(threshold(scores, 0.0)) == []


@given(
    levels=st.lists(st.floats(-1e4, 100), min_size=1, max_size=6),
    **{
        "seed": st.integers(0, 99),
        "density": st.floats(0.01, 1),
        "temperature": st.sampled_from([0.5, 1.0, 4.0]),
    },
)
def test_a_kind_shares_by_mean_sigmoid_however_low_all_its_scores_are(
    levels, seed, density, temperature
):
    scores = {f"{n}.Q": random(seed + n, 20, 30) + level for n, level in enumerate(levels)}
    kept = [
        int(mask.sum())
        for mask in proportional(scores, dict.fromkeys(scores, "Q"), density, temperature).values()
    ]
    # The definition in float64 logarithms: those above 1 are full, largest first, and the others
    # share what is left.
    logs = [
        float(np.logaddexp.reduce(-np.logaddexp(0, -s.double().numpy().ravel() / temperature)))
        for s in scores.values()
    ]
    order, left, ideal = np.argsort(logs)[::-1], density * 600 * len(logs), np.zeros(len(logs))
    for place, n in enumerate(order):
        share = left * np.exp(logs[n] - np.logaddexp.reduce([logs[i] for i in order[place:]]))
        ideal[n] = min(600, share)
        left -= ideal[n]
    assert np.abs(np.maximum(ideal, 1) - kept).max() < 1.01
