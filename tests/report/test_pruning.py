"""What a pruning left: tables and pictures that hold the numbers of the schema, and the views around them."""

import re

import pytest
from reports import Page, printed, prune_values, pruned_values, sparsities_values, words

from kdcli.report.pictures.charts import pictures
from kdcli.report.pictures.drawing import MOST_NUMBERS
from kdcli.report.pictures.pruning import MOST_RIDGES, density_curve, head_map, model_pictures, score_ridges, type_map
from kdcli.report.schema import Pruning, Report
from kdcli.report.sections.overview import overview, title
from kdcli.report.sections.pruning import best_pruned, by_layer, by_type, density_points, kept, types_of
from kdcli.report.text import Picture
from kdcli.report.views import html, markdown, model_card


def entry(**changes: object) -> Pruning:
    return Pruning.model_validate(pruned_values(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", ["QKVOUD", "QKVOUGD"])
def test_table_by_layer_holds_the_numbers_of_the_schema(kinds):
    one = entry(kinds=kinds)
    made = by_layer(one)
    assert made.header == ["layer", *kinds, "all"]
    assert [row[0] for row in made.rows] == ["1", "2", "3", "4", "5", "6", "all"]
    cells = {(row[0], kind): cell for row in made.rows for kind, cell in zip(made.header[1:], row[1:], strict=True)}
    for m in one.matrices:
        assert cells[str(m.layer), m.kind] == f"{100 * m.kept / m.weights:.2f}"
    for key, found in {
        ("all", "Q"): [m for m in one.matrices if m.kind == "Q"],
        ("3", "all"): [m for m in one.matrices if m.layer == 3],
        ("all", "all"): one.matrices,
    }.items():
        assert cells[key] == f"{100 * sum(m.kept for m in found) / sum(m.weights for m in found):.2f}"
    assert made.marked == len(made.rows) - 1


def test_shares_over_all_count_weights_and_not_matrices():
    small = {"name": "1.Q", "layer": 1, "kind": "Q", "weights": 100, "kept": 100}
    large = {"name": "1.U", "layer": 1, "kind": "U", "weights": 900, "kept": 0}
    one = entry(matrices=[small, large], heads=[[1.0]])
    assert (kept(one), kept(one, kind="U"), kept(one, kind="D")) == (0.1, 0.0, None)
    assert by_layer(one).rows == [["1", "100.00", "0.00", "10.00"], ["all", "100.00", "0.00", "10.00"]]


def test_table_by_type_has_a_row_a_model(sparsities):
    made = by_type(sparsities)
    assert made.header == ["model", "Q", "K", "V", "O", "U", "D", "all", "target"]
    assert [row[0] for row in made.rows] == ["0.5", "0.9", "0.97"]
    assert [row[-1] for row in made.rows] == ["50.00", "10.00", "3.00"]
    for row, one in zip(made.rows, sparsities.pruning, strict=True):
        assert row[-2] == f"{100 * one.density:.2f}"
        of_u = [m for m in one.matrices if m.kind == "U"]
        assert row[5] == f"{100 * sum(m.kept for m in of_u) / sum(m.weights for m in of_u):.2f}"
    assert "U: up projection, D: down projection." in made.note
    assert "gate" not in made.note


def test_models_of_other_types_share_a_table():
    values = sparsities_values()
    values["pruning"] = [pruned_values("a"), pruned_values("b", kinds="QKVOUGD", layers=2)]
    made = by_type(Report.model_validate(values))
    assert (made.header[5:8], made.rows[0][6]) == (["U", "G", "D"], "")
    assert float(made.rows[1][6]) > 0


def test_layers_that_are_not_alike_leave_cells_empty(odd):
    (one,) = odd.pruning
    rows = {row[0]: row for row in by_layer(one).rows}
    assert by_layer(one).header == ["layer", "Q", "K", "V", "O", "U", "G", "D", "all"]
    assert rows["1"][6] == rows["3"][7] == ""
    assert rows["2"][6] != ""
    assert rows["1"][1] == "<0.01", "one weight is not none"


def test_types_keep_their_order_and_unknown_ones_come_last():
    kinds = ("Z", "P2", "P", "D", "Q")
    matrices = [{"name": f"1.{k}", "layer": 1, "kind": k, "weights": 4, "kept": 1} for k in kinds]
    assert types_of(entry(matrices=matrices)) == ["Q", "D", "P", "P2", "Z"]


def test_titles(pruned, sparsities, tmp_path):
    assert title(pruned) == "bert-base-uncased on sst2, smp 90 %"
    assert title(sparsities) == "bert-base-uncased on sst2, smp 50 %, 90 %, 97 %"
    without_scores = Report.model_validate(prune_values() | {"evaluations": [], "quality": {}})
    assert title(without_scores) == "bert-base-uncased on sst2, smp 90 %"
    (tmp_path / "mine").mkdir()
    values = prune_values()
    values["recipe"] |= {"model": str(tmp_path / "mine")}  # type: ignore[operator]
    assert title(Report.model_validate(values)) == "mine on sst2, smp 90 %"


def test_of_several_methods_the_best_comes_first():
    values = sparsities_values()
    runs = {"0.5": ("smp", 0.5), "0.9": ("smp", 0.9), "0.97": ("movement", 0.9)}
    values["pruning"] = [pruned_values(name, s, method=m) for name, (m, s) in runs.items()]
    report = Report.model_validate(values)
    assert title(report) == "bert-base-uncased on sst2, smp, movement 50 %, 90 %"
    assert best_pruned(report) == "0.9", "the densest is not compared with the others"
    text = words(report)
    for part in ("In short, for 0.9:", "of the layers' weights kept, smp", "0.9000 accuracy on sst2"):
        assert part in text


def test_main_table_shows_what_is_not_zero_and_the_form_without_files(pruned):
    table = overview(pruned)
    of = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert list(of) == ["dense", "masked", "compact", "sparse"]
    assert [of[name]["not zero"] for name in of] == ["22.7 M", "13.1 M", "13.1 M", ""]
    assert of["masked"]["weights kept, %"] == f"{100 * pruned.pruning[0].density:.1f}"
    assert of["dense"]["weights kept, %"] == ""
    shown = {"model": "sparse", "ms 1x128": "6.2", "speed-up 1x128": "1.60x (1.50–1.70)"}
    assert of["sparse"] == dict.fromkeys(table.header, "") | shown


def test_terminal_is_compact_and_every_view_says_what_failed(pruned):
    text = printed(pruned)
    assert "Weights kept, in percent" in text
    assert "by layer" not in text
    failure = {"model": "sparse", "backend": "sparse", "dtype": "fp32", "reason": "out of memory"}
    failed = Report.model_validate(prune_values() | {"failures": [failure]})
    for view in (printed(failed), markdown(failed), html(failed)):
        assert "sparse on sparse fp32: out of memory" in view


def test_markdown_has_layers_and_density_over_training(sparsities):
    text = markdown(sparsities)
    for one in sparsities.pruning:
        assert f"### {one.model}: weights kept by layer and type, in percent" in text
        for row in by_layer(one).rows:
            assert f"| {' | '.join(row)} |" in text
    assert "| step | 0.5 | 0.9 | 0.97 |" in text
    assert "| 0 | 100.0 | 100.0 | 100.0 |" in text
    last = " | ".join(f"{100 * one.density:#.4g}" for one in sparsities.pruning)
    assert f"| 1,000 | {last} |" in text


def test_density_of_runs_of_other_lengths():
    values = sparsities_values()
    short = [{"step": 0, "density": 1.0}, {"step": 25, "density": 0.5}]
    values["pruning"] = [pruned_values("a"), pruned_values("b", curve=short)]
    points = dict(density_points(Report.model_validate(values)))
    assert (list(points), points[25], points[0]) == (sorted(points), {"b": 50.0}, {"a": 100.0, "b": 100.0})


def test_html_shows_what_stands_out_and_every_model(pruned, sparsities):
    text = words(pruned)
    assert f"{100 * pruned.pruning[0].density:.1f} % of the layers' weights kept, smp" in text
    assert "1.6× the speed of dense: sparse, 1 × 128 tokens (1.5–1.7)" in text
    assert "Undistilled" not in text
    page = Page(html(sparsities))
    described = [value for name, value in page.attributes if name == "aria-label"]
    assert len(described) == page.tags.count("svg") == 14
    for one in sparsities.pruning:
        assert sum(caption.startswith(f"{one.model}: ") for caption in described) == 4
        assert f"{one.model}: weights kept by layer and type, in percent" in page.text


def test_model_card_tells_what_was_pruned(pruned):
    text = model_card(pruned, "masked", "AutoModelForSequenceClassification")
    assert "# bert-base-uncased on sst2, smp 90 %, made by kdcli prune" in text
    density = f"{100 * pruned.pruning[0].density:.1f}"
    assert f"pruned from bert-base-uncased on sst2 with smp, {density} % of the weights of its layers kept" in text
    assert "base_model: bert-base-uncased" in text


def test_other_reports_do_not_mention_pruning(report, finetuned, benchmark):
    for one in (report, finetuned, benchmark):
        assert "not zero" not in overview(one).header
        for view in (html(one), markdown(one), printed(one)):
            assert "eights kept" not in view


def written(picture: Picture | None) -> list[str]:
    """The text in a picture."""
    assert picture is not None
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)]


def cells_of(picture: Picture | None) -> str:
    """The cells of a map."""
    assert picture is not None
    cells = re.search(r'<g id="PatchCollection_1">(.*?)</g>', picture.svg, re.S)
    assert cells is not None
    return cells[1]


def test_picture_by_type_writes_every_share():
    one = entry()
    picture = type_map(one)
    texts = written(picture)
    for m in one.matrices:
        assert f"{100 * m.kept / m.weights:.1f}" in texts
    assert (texts.count("all"), len([text for text in texts if re.fullmatch(r"\d+\.\d", text)])) == (2, 7 * 7)
    low, high = min(one.matrices, key=lambda m: m.kept / m.weights), max(one.matrices, key=lambda m: m.kept / m.weights)
    assert picture is not None
    assert f"Least {100 * low.kept / low.weights:.1f} % ({low.layer}.{low.kind})" in picture.caption
    assert f"most {100 * high.kept / high.weights:.1f} % ({high.layer}.{high.kind})" in picture.caption


def test_noise_looks_like_noise():
    def spread_of_reds(one: Pruning) -> int:
        reds = [int(red, 16) for red in re.findall(r"fill: #([0-9a-f]{2})", cells_of(type_map(one)))]
        return max(reds) - min(reds)

    matrices = [{"name": f"1.{k}", "layer": 1, "kind": k, "weights": 1000, "kept": 100 + i} for i, k in enumerate("QK")]
    assert spread_of_reds(entry(matrices=matrices, heads=[[0.1]], density=0.1005)) < 15
    assert spread_of_reds(entry()) > 100


def test_picture_of_heads_has_a_cell_a_head(odd):
    few = entry(number_of_heads=4)
    assert {f"{100 * share:.1f}" for row in few.heads for share in row} <= set(written(head_map(few)))
    (one,) = odd.pruning
    many = head_map(one)
    assert many is not None
    assert len(one.heads[1]) > MOST_NUMBERS
    assert "Least" in many.caption
    assert len([text for text in written(many) if text.endswith(" %")]) == 5, "a scale instead of numbers"
    assert cells_of(many).count("<path") == sum(map(len, one.heads)) == 6 + 3 * 24
    assert head_map(one.model_copy(update={"heads": []})) is None


def test_density_begins_and_ends_as_noted():
    one = entry()
    picture = density_curve(one)
    assert picture is not None
    assert picture.caption.startswith(f"masked: weights kept while training, 100.0 → {100 * one.density:.1f} %")
    assert picture.caption.endswith("the dashed line is the requested share, 10 %.")
    assert density_curve(one.model_copy(update={"curve": one.curve[:1]})) is None


def test_scores_are_drawn_at_a_few_steps_and_the_last():
    one = entry()
    steps = [int(t.replace(",", "")) for t in written(score_ridges(one)) if re.fullmatch(r"[1-9][\d,]+", t)]
    assert (len(steps), max(steps)) == (MOST_RIDGES, 1000)
    assert 0 not in steps, "all scores are the same before the first step"
    assert score_ridges(one.model_copy(update={"histograms": one.histograms[:1]})) is None
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
    assert len(model_pictures(entry(matrices=matrices, heads=[[share, share]], density=share))) == 4


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


def test_the_dense_model_stands_at_all_its_weights_where_it_has_scores():
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
