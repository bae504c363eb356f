"""What a pruning left: tables that hold the numbers of the schema, and the views around them."""

from __future__ import annotations

import io

import pytest
from pruning_reports import prune_values, pruned_values, sparsities_values
from reports import HOSTILE
from rich.console import Console
from test_views import Page

from kdcli.report.build import html
from kdcli.report.markdown import markdown
from kdcli.report.schema import Pruning, Report
from kdcli.report.sections.pruning import by_layer, by_type, density_points, foremost, kept, types_of
from kdcli.report.text import percent
from kdcli.report.views import model_card, overview, terminal, title


def shown(report: Report) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in terminal(report):
        console.print(part)
    return console.export_text()


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
    of_q = [m for m in one.matrices if m.kind == "Q"]
    assert cells["all", "Q"] == f"{100 * sum(m.kept for m in of_q) / sum(m.weights for m in of_q):.2f}"
    of_layer = [m for m in one.matrices if m.layer == 3]
    assert cells["3", "all"] == f"{100 * sum(m.kept for m in of_layer) / sum(m.weights for m in of_layer):.2f}"
    assert cells["all", "all"] == f"{100 * one.density:.2f}"
    assert made.marked == len(made.rows) - 1


def test_what_is_over_all_counts_weights_and_not_matrices():
    small = {"name": "1.Q", "layer": 1, "kind": "Q", "weights": 100, "kept": 100}
    large = {"name": "1.U", "layer": 1, "kind": "U", "weights": 900, "kept": 0}
    one = entry(matrices=[small, large], heads=[[1.0]])
    assert kept(one) == 0.1
    assert kept(one, kind="U") == 0.0
    assert kept(one, kind="D") is None
    assert by_layer(one).rows == [["1", "100.00", "0.00", "10.00"], ["all", "100.00", "0.00", "10.00"]]


def test_table_by_type_has_a_row_a_model(sparsities):
    made = by_type(sparsities)
    assert made is not None
    assert made.header == ["model", "Q", "K", "V", "O", "U", "D", "all", "asked"]
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
    assert made is not None
    assert made.header[5:8] == ["U", "G", "D"]
    assert made.rows[0][6] == ""
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


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, ""), (0.0, "0.00"), (1e-6, "<0.01"), (5e-5, "0.01"), (0.12345, "12.35"), (1.0, "100.00")],
)
def test_percent(share, text):
    assert percent(share) == text


def test_title(pruned, sparsities):
    assert title(pruned) == "bert-base-uncased on sst2, smp 90 %"
    assert title(sparsities) == "bert-base-uncased on sst2, smp 50 %, 90 %, 97 %"
    unjudged = Report.model_validate(prune_values() | {"evaluations": [], "quality": {}})
    assert title(unjudged) == "bert-base-uncased on sst2, smp 90 %"


def test_of_several_methods_the_best_is_told_of():
    values = sparsities_values()
    asked = {"0.5": ("smp", 0.5), "0.9": ("smp", 0.9), "0.97": ("movement", 0.9)}
    values["pruning"] = [pruned_values(name, s, method=m) for name, (m, s) in asked.items()]
    report = Report.model_validate(values)
    assert title(report) == "bert-base-uncased on sst2, smp, movement 50 %, 90 %"
    assert foremost(report) == "0.9", "the densest is not compared with the others"
    text = " ".join(" ".join(Page(html(report)).text).split())
    assert "In short, for 0.9:" in text
    assert "of the layers' weights kept, smp" in text
    assert "0.9 accuracy on sst2" in text


def test_title_keeps_directories_to_itself(tmp_path):
    (tmp_path / "mine").mkdir()
    values = prune_values()
    values["recipe"] |= {"model": str(tmp_path / "mine")}  # type: ignore[operator]
    assert title(Report.model_validate(values)) == "mine on sst2, smp 90 %"


def test_main_table_shows_what_is_not_zero_and_the_form_without_files(pruned):
    header, rows = overview(pruned)
    of = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(of) == ["dense", "masked", "compact", "sparse"]
    assert [of[name]["not zero"] for name in of] == ["22.7 M", "13.1 M", "13.1 M", ""]
    assert of["masked"]["weights kept, %"] == f"{100 * pruned.pruning[0].density:.1f}"
    assert of["dense"]["weights kept, %"] == ""
    assert of["sparse"] == dict.fromkeys(header, "") | {
        "model": "sparse",
        "ms 1x128": "6.2",
        "speed-up 1x128": "1.60x (1.50–1.70)",
    }


def test_terminal_is_compact_and_says_what_failed(pruned):
    text = shown(pruned)
    assert "Weights kept, in percent" in text
    assert "by layer" not in text
    failure = {"model": "sparse", "backend": "sparse", "dtype": "fp32", "reason": "out of memory"}
    failed = Report.model_validate(prune_values() | {"failures": [failure]})
    for view in (shown(failed), markdown(failed), html(failed)):
        assert "sparse on sparse fp32: out of memory" in view


def test_markdown_has_layers_and_density_over_training(sparsities):
    text = markdown(sparsities)
    for one in sparsities.pruning:
        assert f"### {one.model}: weights kept by layer and type, in percent" in text
        for row in by_layer(one).rows:
            assert f"| {' | '.join(row)} |" in text
    assert "| step | 0.5 | 0.9 | 0.97 |" in text
    assert "| 0 | 100 | 100 | 100 |" in text
    last = " | ".join(f"{100 * one.density:.4g}" for one in sparsities.pruning)
    assert f"| 1000 | {last} |" in text


def test_density_of_runs_of_other_lengths():
    values = sparsities_values()
    short = [{"step": 0, "density": 1.0}, {"step": 25, "density": 0.5}]
    values["pruning"] = [pruned_values("a"), pruned_values("b", curve=short)]
    points = dict(density_points(Report.model_validate(values)))
    assert list(points) == sorted(points)
    assert points[25] == {"b": 50.0}
    assert points[0] == {"a": 100.0, "b": 100.0}


def test_html_says_what_stands_out(pruned):
    text = " ".join(" ".join(Page(html(pruned)).text).split())
    density = f"{100 * pruned.pruning[0].density:.1f}"
    assert f"{density} % of the layers' weights kept, smp" in text
    assert "1.6× the speed of dense: sparse, 1 × 128 tokens (1.5–1.7)" in text
    assert "Undistilled" not in text


def test_html_has_the_pictures_and_the_layers_of_every_model(sparsities):
    page = Page(html(sparsities))
    described = [value for name, value in page.attributes if name == "aria-label"]
    assert len(described) == page.tags.count("svg") == 14
    for one in sparsities.pruning:
        assert sum(caption.startswith(f"{one.model}: ") for caption in described) == 4
        assert f"{one.model}: weights kept by layer and type, in percent" in page.text
    assert not {"script", "img", "image"} & set(page.tags)


def test_html_shows_hostile_names_as_text(hostile_pruning):
    page = Page(html(hostile_pruning))
    assert not {"script", "img", "image"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert sum(HOSTILE in text for text in page.text) > 5
    assert "<script" not in markdown(hostile_pruning)
    assert "[bold]" in shown(hostile_pruning)


def test_model_card_says_what_was_done(pruned):
    text = model_card(pruned, "masked", "AutoModelForSequenceClassification")
    assert "# bert-base-uncased on sst2, smp 90 %, made by kdcli prune" in text
    density = f"{100 * pruned.pruning[0].density:.1f}"
    assert f"pruned from bert-base-uncased on sst2 with smp, {density} % of the weights of its layers kept" in text
    assert "base_model: bert-base-uncased" in text


def test_without_pruning_nothing_is_said_of_it(report, finetuned, benchmark):
    for one in (report, finetuned, benchmark):
        assert by_type(one) is None
        assert "not zero" not in overview(one)[0]
        for view in (html(one), markdown(one), shown(one)):
            assert "eights kept" not in view
