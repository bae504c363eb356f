"""Pictures of a pruning: what they show is what the schema holds."""

from __future__ import annotations

import re

import pytest
from pruning_reports import pruned_values, sparsities_values

from kdcli.report.pictures.curves import pictures
from kdcli.report.pictures.drawing import Picture
from kdcli.report.pictures.pruning import (
    MOST_NUMBERS,
    MOST_RIDGES,
    density_curve,
    head_map,
    of_model,
    score_ridges,
    type_map,
)
from kdcli.report.schema import Pruning, Report


def entry(**changes: object) -> Pruning:
    return Pruning.model_validate(pruned_values(**changes))  # type: ignore[arg-type]


def words(picture: Picture) -> list[str]:
    """The text in a picture."""
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)]


def test_picture_by_type_writes_every_share():
    one = entry()
    picture = type_map(one)
    assert picture is not None
    found = words(picture)
    for m in one.matrices:
        assert f"{100 * m.kept / m.weights:.1f}" in found
    assert found.count("all") == 2
    assert len([text for text in found if re.fullmatch(r"\d+\.\d", text)]) == 7 * 7
    low, high = min(one.matrices, key=lambda m: m.kept / m.weights), max(one.matrices, key=lambda m: m.kept / m.weights)
    assert f"Least {100 * low.kept / low.weights:.1f} % ({low.layer}.{low.kind})" in picture.caption
    assert f"most {100 * high.kept / high.weights:.1f} % ({high.layer}.{high.kind})" in picture.caption


def spread_of_colours(one: Pruning) -> int:
    """How far the reds of a map's cells lie apart, of 255."""
    picture = type_map(one)
    assert picture is not None
    cells = re.search(r'<g id="PatchCollection_1">(.*?)</g>', picture.svg, re.S)
    assert cells is not None
    reds = [int(red, 16) for red in re.findall(r"fill: #([0-9a-f]{2})", cells[1])]
    return max(reds) - min(reds)


def test_noise_looks_like_noise():
    matrices = [{"name": f"1.{k}", "layer": 1, "kind": k, "weights": 1000, "kept": 100 + i} for i, k in enumerate("QK")]
    assert spread_of_colours(entry(matrices=matrices, heads=[[0.1]], density=0.1005)) < 15
    assert spread_of_colours(entry()) > 100


def test_picture_of_heads_has_a_cell_a_head(odd):
    few = entry(number_of_heads=4)
    picture = head_map(few)
    assert picture is not None
    assert all(f"{100 * share:.1f}" in words(picture) for row in few.heads for share in row)
    (one,) = odd.pruning
    many = head_map(one)
    assert many is not None
    assert len(one.heads[1]) > MOST_NUMBERS
    assert "Least" in many.caption
    assert len([text for text in words(many) if text.endswith(" %")]) == 5, "a scale instead of numbers"
    cells = re.search(r'<g id="PatchCollection_1">(.*?)</g>', many.svg, re.S)
    assert cells is not None
    assert cells[1].count("<path") == sum(map(len, one.heads)) == 6 + 3 * 24
    assert head_map(one.model_copy(update={"heads": []})) is None


def test_density_begins_and_ends_as_noted():
    one = entry()
    picture = density_curve(one)
    assert picture is not None
    assert picture.caption.startswith(f"masked: weights kept while training, 100.0 → {100 * one.density:.1f} %")
    assert picture.caption.endswith("dashed what was asked, 10 %.")
    assert density_curve(one.model_copy(update={"curve": one.curve[:1]})) is None


def test_scores_are_drawn_at_a_few_steps_and_the_last():
    one = entry()
    picture = score_ridges(one)
    assert picture is not None
    steps = [int(text.replace(",", "")) for text in words(picture) if re.fullmatch(r"[1-9][\d,]+", text)]
    assert len(steps) == MOST_RIDGES
    assert max(steps) == 1000
    assert 0 not in steps, "all scores are the same before the first step"
    same = one.histograms[:1]
    assert score_ridges(one.model_copy(update={"histograms": same})) is None
    assert score_ridges(one.model_copy(update={"histograms": []})) is None


def test_a_rare_score_does_not_widen_the_picture():
    edges = [float(i) for i in range(-50, 51)]
    counts = [1, *[0] * 48, 50_000, 50_000, *[0] * 48, 1]
    picture = score_ridges(entry(histograms=[{"step": 5, "edges": edges, "counts": counts}]))
    assert picture is not None
    assert "From -1 to 1 at first" in picture.caption


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_or_everything_kept(share):
    matrices = [{"name": "1.Q", "layer": 1, "kind": "Q", "weights": 10, "kept": int(10 * share)}]
    one = entry(matrices=matrices, heads=[[share, share]], density=share)
    assert len(of_model(one)) == 4


def test_pictures_take_the_colour_of_the_page_and_do_not_change(pruned):
    (one,) = pruned.pruning
    for picture in of_model(one):
        assert "currentColor" in picture.svg
        assert "#778899" not in picture.svg
        assert "#000000" not in picture.svg
        assert "<image" not in picture.svg
    assert of_model(one) == of_model(one)


def test_quality_against_density_and_size(sparsities, pruned):
    density, size = pictures(sparsities)
    shares = [
        f"{name} {100 * p.density:.4g} %" for name, p in zip(("0.5", "0.9", "0.97"), sparsities.pruning, strict=True)
    ]
    assert density.caption.startswith("accuracy on sst2 against density (weights kept, %): ")
    assert all(share in density.caption for share in shares)
    assert "On the line: 0.97, 0.9, 0.5." in density.caption
    assert size.caption.startswith("accuracy on sst2 against size (weights, MB): 0.5 68.17 MB, 0.91")
    assert not [p for p in pictures(pruned) if "against" in p.caption], "one sparsity is no curve"


def test_a_judged_dense_model_stands_at_all_its_weights():
    values = sparsities_values()
    values["quality"]["sst2"]["dense"] = {"accuracy": 0.92}  # type: ignore[index]
    density, *_ = pictures(Report.model_validate(values))
    assert "dense 100 %, 0.92" in density.caption


def test_no_picture_of_sizes_that_are_all_the_same():
    values = sparsities_values()
    cards = values["models"]
    values["models"] = {name: card | {"bytes": 90_900_000} for name, card in cards.items()}  # type: ignore[attr-defined]
    (density,) = pictures(Report.model_validate(values))
    assert "against density" in density.caption
    values["pruning"] = [pruned_values(name, 0.9, method=name) for name in ("0.5", "0.9", "0.97")]
    assert not pictures(Report.model_validate(values)), "nor of densities"
