"""What a pruning left: tables and pictures that hold the numbers of the schema, and the views
around them."""

import re

import pytest
from reports import (
    Page,
    made,
    missing,
    model,
    printed,
    prune_values,
    pruned_values,
    sparsities_values,
    views,
    words,
)

from kdcli.report.charts.charts import report_pictures
from kdcli.report.charts.drawing import MAX_NUMBERS
from kdcli.report.charts.pruning import (
    MAX_RIDGES,
    head_map,
    model_pictures,
    score_ridges,
    type_map,
)
from kdcli.report.schema import Pruning
from kdcli.report.sections.overview import overview, title
from kdcli.report.sections.pruning import (
    best_pruned,
    by_layer,
    by_type,
    kept,
)
from kdcli.report.text import Picture
from kdcli.report.views import html, markdown, model_card

pytestmark = pytest.mark.slow


def entry(**changes: object) -> Pruning:
    return Pruning.model_validate(pruned_values(**changes))  # type: ignore[arg-type]


def sparsities_of(*pruning: dict[str, object]):
    values = sparsities_values()
    models = {str(one["model"]): model("pruned", "dense") for one in pruning}
    return made(values, models=models | values["models"], pruning=list(pruning))  # type: ignore[operator]


def share(one: Pruning, kind: str = "", layer: int = 0) -> str:
    """The weights kept, in percent."""
    found = [m for m in one.matrices if kind in ("", m.kind) and layer in (0, m.layer)]
    return f"{100 * sum(m.kept for m in found) / sum(m.weights for m in found):.2f}"


@pytest.mark.parametrize("kinds", ["QKVOUD", "QKVOUGD"])
def test_table_by_layer_holds_the_numbers_of_the_schema(kinds):
    one = entry(kinds=kinds)
    table = by_layer(one)
    assert table.columns == ["layer", *kinds, "all"]
    rows = [[f"{n}", *(share(one, kind, n) for kind in [*kinds, ""])] for n in range(1, 7)]
    assert table.rows == [*rows, ["all", *(share(one, kind) for kind in [*kinds, ""])]]
    assert table.marked == len(table.rows) - 1


def test_shares_over_all_count_weights_and_not_matrices():
    small = {"name": "1.Q", "layer": 1, "kind": "Q", "weights": 100, "kept": 100}
    large = {"name": "1.U", "layer": 1, "kind": "U", "weights": 900, "kept": 0}
    one = entry(matrices=[small, large], heads=[[1.0]])
    assert (kept(one), kept(one, kind="U"), kept(one, kind="D")) == (0.1, 0.0, None)
    assert by_layer(one).rows == [
        ["1", "100.00", "0.00", "10.00"],
        ["all", "100.00", "0.00", "10.00"],
    ]


def test_table_by_type_has_a_row_a_model(sparsities):
    made = by_type(sparsities)
    assert made.columns == ["model", "Q", "K", "V", "O", "U", "D", "all", "target"]
    assert [row[0] for row in made.rows] == ["0.5", "0.9", "0.97"]
    assert [row[-1] for row in made.rows] == ["50.00", "10.00", "3.00"]
    for row, one in zip(made.rows, sparsities.pruning, strict=True):
        assert (row[-2], row[5]) == (f"{100 * one.density:.2f}", share(one, "U"))
    assert missing(made.note, "U: up projection, D: down projection.", "gate") == ["gate"]


def test_layers_that_are_not_alike_leave_cells_empty(odd):
    (one,) = odd.pruning
    table, cells = by_layer(one), {row[0]: row for row in by_layer(one).rows}
    assert table.columns == ["layer", "Q", "K", "V", "O", "U", "G", "D", "all"]
    assert (cells["1"][6], cells["3"][7], bool(cells["2"][6])) == ("", "", True)
    assert cells["1"][1] == "<0.01", "one weight is not none"


def test_titles(pruned, sparsities, tmp_path):
    assert title(pruned) == "bert-base-uncased on sst2, smp 90 %"
    assert title(sparsities) == "bert-base-uncased on sst2, smp 50 %, 90 %, 97 %"
    assert (
        title(made(prune_values(), evaluations=[], quality={}))
        == "bert-base-uncased on sst2, smp 90 %"
    )
    (tmp_path / "mine").mkdir()
    values = prune_values()
    values["models"]["masked"]["source"] = str(tmp_path / "mine")
    assert title(made(values)) == "mine on sst2, smp 90 %"


def test_of_several_methods_the_best_comes_first():
    runs = {"0.5": ("smp", 0.5), "0.9": ("smp", 0.9), "0.97": ("movement", 0.9)}
    report = sparsities_of(*(pruned_values(name, s, method=m) for name, (m, s) in runs.items()))
    assert title(report) == "bert-base-uncased on sst2, smp, movement 50 %, 90 %"
    assert best_pruned(report) == "0.9", "the densest is not compared with the others"
    parts = (
        "bert-base-uncased with smp 90 % keeps ",
        "of the layers' weights kept, smp",
        "0.9000 accuracy on sst2",
    )
    assert not missing(words(report), *parts)


def test_main_table_shows_what_is_not_zero_and_the_form_without_files(pruned):
    table = overview(pruned)
    of = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(of) == ["dense", "masked", "compact", "sparse"]
    assert [of[name]["not zero"] for name in of] == ["22.7 M", "13.1 M", "13.1 M", ""]
    assert [of[name]["weights kept, %"] for name in ("masked", "dense")] == [
        f"{100 * pruned.pruning[0].density:.1f}",
        "",
    ]
    shown = {"model": "sparse", "ms 1x128": "6.2", "speed-up 1x128": "1.60x (1.50–1.70)"}
    assert of["sparse"] == dict.fromkeys(table.columns, "") | shown


def test_terminal_is_compact_and_every_view_says_what_failed(pruned):
    assert missing(printed(pruned), "Weights kept, in percent", "by layer") == ["by layer"]
    failure = {"model": "sparse", "backend": "sparse", "dtype": "fp32", "reason": "out of memory"}
    assert all(
        "sparse on sparse fp32: out of memory" in text
        for text in views(made(prune_values(), failures=[failure]))
    )


def test_markdown_has_layers_and_density_over_training(sparsities):
    last = [f"{100 * one.density:#.4g}" for one in sparsities.pruning]
    lines = [["step", "0.5", "0.9", "0.97"], ["0", *["100.0"] * 3], ["1,000", *last]]
    lines += [row for one in sparsities.pruning for row in by_layer(one).rows]
    titles = [
        f"### {one.model}: weights kept by layer and type, in percent" for one in sparsities.pruning
    ]
    assert not missing(markdown(sparsities), *titles, *(f"| {' | '.join(row)} |" for row in lines))


def test_html_shows_what_stands_out_and_every_model(pruned, sparsities):
    kept = f"{100 * pruned.pruning[0].density:.1f} % of the layers' weights kept, smp"
    speed = "1.6× the speed of dense: sparse, 1 × 128 tokens (1.5–1.7)"
    assert missing(words(pruned), kept, speed, "Undistilled") == ["Undistilled"]
    page = Page(html(sparsities))
    described = [value for name, value in page.attributes if name == "aria-label"]
    assert len(described) == page.tags.count("svg") == 14
    for one in sparsities.pruning:
        assert sum(caption.startswith(f"{one.model}: ") for caption in described) == 4
        assert f"{one.model}: weights kept by layer and type, in percent" in page.text


def test_model_card_tells_what_was_pruned(pruned):
    assert not missing(
        model_card(pruned, "masked", "AutoModelForSequenceClassification"),
        "# bert-base-uncased on sst2, smp 90 %, made by kdcli prune",
        "pruned from bert-base-uncased on sst2 with smp: ",
        "base_model: bert-base-uncased",
    )


def written(picture: Picture | None) -> list[str]:
    """The text in a picture."""
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)]


def cells_of(picture: Picture | None) -> str:
    """The cells of a map."""
    return re.search(r'<g id="PatchCollection_1">(.*?)</g>', picture.svg, re.S)[1]


def test_picture_by_type_writes_every_share():
    one = entry()
    picture = type_map(one)
    texts = written(picture)
    shares = {f"{m.layer}.{m.kind}": 100 * m.kept / m.weights for m in one.matrices}
    assert {f"{x:.1f}" for x in shares.values()} <= set(texts)
    assert (
        texts.count("all"),
        len([text for text in texts if re.fullmatch(r"\d+\.\d", text)]),
    ) == (2, 7 * 7)
    ends = [
        f"{word} {shares[n]:.1f} % ({n})"
        for word, f in (("Least", min), ("most", max))
        for n in [f(shares, key=shares.get)]
    ]
    assert not missing(picture.caption, *ends)


def test_noise_looks_like_noise():
    def spread_of_reds(one: Pruning) -> int:
        reds = [
            int(red, 16) for red in re.findall(r"fill: #([0-9a-f]{2})", cells_of(type_map(one)))
        ]
        return max(reds) - min(reds)

    matrices = [
        {"name": f"1.{k}", "layer": 1, "kind": k, "weights": 1000, "kept": 100 + i}
        for i, k in enumerate("QK")
    ]
    assert spread_of_reds(entry(matrices=matrices, heads=[[0.1]], density=0.1005)) < 15
    assert spread_of_reds(entry()) > 100


def test_picture_of_heads_has_a_cell_a_head(odd):
    few = entry(number_of_heads=4)
    assert {f"{100 * share:.1f}" for row in few.heads for share in row} <= set(
        written(head_map(few))
    )
    (one,) = odd.pruning
    many = head_map(one)
    assert len(one.heads[1]) > MAX_NUMBERS
    assert "Least" in many.caption
    assert len([text for text in written(many) if text.endswith(" %")]) == 5, (
        "a scale instead of numbers"
    )
    assert cells_of(many).count("<path") == sum(map(len, one.heads)) == 6 + 3 * 24
    assert head_map(one.model_copy(update={"heads": []})) is None


def test_scores_are_drawn_at_a_few_steps_and_the_last():
    one = entry()
    steps = [
        int(t.replace(",", ""))
        for t in written(score_ridges(one))
        if re.fullmatch(r"[1-9][\d,]+", t)
    ]
    assert (len(steps), max(steps)) == (MAX_RIDGES, 1000)
    assert 0 not in steps, "all scores are the same before the first step"
    for histograms in (one.histograms[:1], []):
        assert score_ridges(one.model_copy(update={"histograms": histograms})) is None


def test_a_rare_score_does_not_widen_the_picture():
    edges = [float(i) for i in range(-50, 51)]
    counts = [1, *[0] * 48, 50_000, 50_000, *[0] * 48, 1]
    picture = score_ridges(entry(histograms=[{"step": 5, "edges": edges, "counts": counts}]))
    assert "From -1 to 1 at first" in picture.caption


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_or_everything_kept(share):
    matrices = [{"name": "1.Q", "layer": 1, "kind": "Q", "weights": 10, "kept": int(10 * share)}]
    assert len(model_pictures(entry(matrices=matrices, heads=[[share, share]], density=share))) == 4


def test_quality_against_density_and_size(sparsities, pruned):
    density, size = report_pictures(sparsities)
    shares = [f"{p.model} {100 * p.density:.4g} %" for p in sparsities.pruning]
    assert density.caption.startswith("accuracy on sst2 against density (weights kept, %): ")
    assert not missing(density.caption, *shares, "On the line: 0.97, 0.9, 0.5.")
    assert size.caption.startswith(
        "accuracy on sst2 against size (weights, MB): 0.5 68.17 MB, 0.91"
    )
    assert not [p for p in report_pictures(pruned) if "against" in p.caption], (
        "one sparsity is no curve"
    )
