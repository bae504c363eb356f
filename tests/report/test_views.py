"""The views: what they must show, and that nothing from outside becomes markup."""

import base64
import hashlib
import io
import re

import pytest
import yaml
from huggingface_hub import ModelCard
from reports import (
    HOSTILE,
    Page,
    evaluation,
    finetune_values,
    made,
    missing,
    model,
    printed,
    views,
    words,
)
from rich.console import Console

from kdcli.errors import UsageError
from kdcli.report.charts.charts import report_pictures
from kdcli.report.charts.weight_maps import model_pictures
from kdcli.report.schema import Report
from kdcli.report.sections.overview import overview, title
from kdcli.report.sections.timings import latency_csv
from kdcli.report.text import (
    ReportSection,
    View,
    bytes_of,
    number,
    percent,
)
from kdcli.report.views import FittedTable, html, markdown, model_card, short, shown, write_views

pytestmark = pytest.mark.slow

LOADS = {
    "src",
    "srcset",
    "href",
    "xlink:href",
    "data",
    "action",
    "formaction",
    "poster",
    "background",
}


@pytest.mark.parametrize("kind", ["report", "compared", "benchmark"])
def test_views_hold_the_report_and_speak_of_a_teacher_only_where_there_is_one(
    request, tmp_path, kind
):
    report = request.getfixturevalue(kind)
    write_views(tmp_path, report)
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
        "latency.csv",
    }
    assert Report.model_validate_json((tmp_path / "report.json").read_text("utf-8")) == report
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")
    found = [text for one in report.evaluations for text in (one.split, str(one.n))]
    for text in views(report):
        assert not missing(text, title(report), *found)
        named = re.search(
            "teacher|student|undistilled", re.sub("their (own )?teacher", "", text), re.I
        )
        assert bool(named) == (kind == "report")


@pytest.mark.parametrize(
    "kind",
    [
        "report",
        "grid",
        "labels",
        "languages",
        "benchmark",
        "hostile",
        "hostile_latency",
        "hostile_pruning",
    ],
)
def test_html_loads_nothing_and_runs_only_its_own_script(request, kind):
    text = html(request.getfixturevalue(kind))
    assert len(text) < 1_000_000
    page = Page(text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.attributes[page.attributes.index(("http-equiv", "Content-Security-Policy")) + 1]
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert f"script-src 'sha256-{digest}';" in policy[1]
    assert page.tags.count("script") == 1
    tags = {"link", "iframe", "img", "image", "object", "embed", "base", "form"}
    assert not tags & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(value.startswith("#") for name, value in page.attributes if name in LOADS)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    namespaces = {value for name, value in page.attributes if name.startswith("xmlns")}
    assert not re.findall(r"https?://", re.sub("|".join(map(re.escape, namespaces)), "", text))


@pytest.mark.drawn
def test_points_of_a_picture_have_their_exact_values(compressed, report, pruned):
    def values(one):
        return re.findall("<title>([^<]*)</title></", html(one))

    point = "onnx-int8: accuracy, selection rows 0.929 (0.927 to 0.931)"
    assert f"{point}, median ms, 1 × 128 tokens 20" in values(compressed)
    assert values(report)[1] == "held-out 6x384/attention: 0.166667, step: 100"
    assert any(re.fullmatch(r"layer \d+, \d+: \d+\.\d\d %", value) for value in values(pruned))


@pytest.mark.parametrize("kind", ["hostile", "hostile_latency", "hostile_pruning"])
def test_hostile_names_stay_text(request, kind):
    report = request.getfixturevalue(kind)
    page = Page(html(report))
    assert sum(HOSTILE in text for text in page.text) > 5
    assert HOSTILE in [value for name, value in page.attributes if name == "title"]
    styles = [value for name, value in page.attributes if name == "style"]
    assert (
        styles == [style for style in styles if re.fullmatch(r"--share:\d+%|[^<>]*", style)] != []
    )
    text = markdown(report)
    # Names are literal inside a fence, which they cannot end.
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", text, flags=re.S | re.M)
    assert missing(outside, "<script", "](") == ["<script", "]("]
    assert "## How to repeat it" in outside
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "[bold]" in printed(report, 600)


def test_markdown_neither_loads_pictures_nor_breaks_cells():
    texts = ["![x](http://example.org/x.png)", "a \\| b"]
    mistake = evaluation("m")["worst"][0] | {"texts": texts}  # type: ignore[index]
    text = markdown(made(finetune_values(), evaluations=[evaluation("finetuned", worst=[mistake])]))
    assert missing(text, "![x](", "!\\[x\\](http", "a \\\\\\| b") == ["![x]("]


@pytest.mark.parametrize(
    ("head", "pipeline"),
    [
        ("TokenClassification", "token-classification"),
        ("QuestionAnswering", "question-answering"),
    ],
)
def test_card_of_a_model_with_another_head(grid, head, pipeline):
    text = model_card(grid, "finetuned", f"AutoModelFor{head}")
    assert front_matter(text)["pipeline_tag"] == pipeline
    assert f"from transformers import AutoModelFor{head}, AutoTokenizer" in text
    (result,) = ModelCard(text).data.eval_results
    assert (result.metric_type, result.dataset_type) == ("accuracy", "nyu-mll/glue")


def test_a_bare_report(values):
    lists = {"curve": [], "quality": {}, "latency": [], "published": [], "notes": []}
    report = made(values, training=None, **lists)
    page = Page(html(report))
    assert latency_csv(report) == ""
    assert not {"Latency", "Pictures", "Training", "Published", "Notes"} & set(page.text) | {
        "svg"
    } & set(page.tags)


def test_a_teacher_alone_has_no_facts_to_divide_by(values):
    lists = {"curve": [], "quality": {}, "latency": []}
    report = made(values, models={"teacher": model("teacher")}, **lists)
    assert "438.0 MB" in words(report)
    assert title(report) == "google-bert/bert-base-uncased"


@pytest.mark.parametrize("rows", [3, 9])
def test_no_name_or_number_is_folded_on_a_narrow_terminal(rows):
    header = [
        "model",
        "shape",
        "parameters",
        "(embedding)",
        "(transformer)",
        "size",
        "multiply-adds",
    ]
    facts = ["6x384", "22.7 M", "11.9 M", "10.8 M", "90.9 MB", "1.43 G"]
    console = Console(width=80, file=io.StringIO())
    console.print(
        FittedTable(ReportSection("", header, [[f"name{i}", *facts] for i in range(rows)]))
    )
    text = console.file.getvalue()
    assert not missing(text, *(f"name{i} " for i in range(rows)))
    assert text.count("90.9 MB") == rows
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_of_many_variants_becomes_several_and_no_cell_is_cut():
    names = [f"variant-{i}{end}" for end in ("", " undistilled") for i in range(6)]
    rows = [[f"loss number {i}", *(f"{i}.{k:03}" for k in range(12))] for i in range(14)]
    console = Console(width=80, file=io.StringIO())
    console.print(
        FittedTable(
            ReportSection("", ["", *names], [*rows, ["the first alone", "9.9", *[""] * 11]])
        )
    )
    text = console.file.getvalue()
    assert not missing(text, *(cell for row in rows for cell in row[1:]))
    assert text.count("undistilled") == 6
    assert text.count("the first alone") == 1
    assert text.count("┏") == 3
    assert max(map(len, text.splitlines())) <= 80


def test_every_part_of_a_wide_table_has_the_columns_that_tell_its_rows_apart():
    header = ["metric", "model", "baseline", "difference", "95% interval", ""]
    metrics = [f"neighbours recall@{k}" for k in (1, 5, 10, 100)]
    rows = [
        [metric, model, "re-embedding", "-0.4824", "-0.4975 to -0.4662", "lower"]
        for metric in metrics
        for model in ("adapted", "old-model")
    ]
    lines = columns_of(header, *rows, width=70)
    assert sum("metric" in line and "model" in line for line in lines) == 2
    assert sum("95% interval" in line for line in lines) == 1
    assert sum("adapted" in line for line in lines) == 2 * len(metrics)
    assert max(map(len, lines)) <= 70
    # Few rows become columns.
    lines = columns_of(header, *rows[:2], width=70)
    assert sum("adapted" in line for line in lines) == 1
    assert max(map(len, lines)) <= 70


def columns_of(header, *rows, width=80):
    """Return the lines of the cells of a table, without its frame."""
    console = Console(width=width, file=io.StringIO())
    console.print(FittedTable(ReportSection("", header, [list(row) for row in rows])))
    return [line for line in console.file.getvalue().splitlines() if line[0] in "│┃"]


@pytest.mark.parametrize(
    ("cells", "is_right"),
    [
        (["6.00x (5.50–6.60)", "≥9.00x, unstable"], True),
        (["1e-5", "1.2e-05", ""], True),
        (["+0.46 to +1.38", "-0.1"], True),
        (["22.7 M", "1,024", "5%"], True),
        (["6x384", "3x192"], False),
        (["7B", "0.5B"], False),
        (["3-layer", "teacher"], False),
        (["teacher", "student", "3"], False),
    ],
)
def test_numbers_are_aligned_to_the_right_and_names_to_the_left(cells, is_right):
    widest = max(cells, key=len)
    lines = columns_of(["name", "x" * (len(widest) + 2)], *(["a", cell] for cell in cells))
    assert f"│   {widest} │" in lines[1 + cells.index(widest)] or not is_right
    assert f"│ {widest}   │" in lines[1 + cells.index(widest)] or is_right


def test_long_names_break_after_hyphens_so_that_one_table_is_enough():
    header = ["metric", "model", "baseline", "points lost (+)", "95% interval", ""]
    model = "2x384-trimmed-onnx-int8"
    row = ["reviews accuracy", model, "teacher", "+0.91", "+0.46 to +1.38", "lost"]
    text = "\n".join(columns_of(header, row, width=70))
    assert not missing(text, "2x384-trimmed-", "onnx-int8", " +0.46 to +1.38 ", "lost")


def test_a_range_folds_before_a_table_is_divided():
    header = ["metric", "model", "baseline", "difference", "95% interval", ""]
    row = ["neighbours neighbours@10", "adapted", "re-embedding", "-0.8050", "-0.8322 to -0.7779"]
    assert len(columns_of(header, [*row, "higher"], width=80)) == 3
    assert "│ -0.8322 to -0.7779 │" in columns_of(header, [*row, "higher"], width=90)[1]


def test_a_column_without_text_is_empty():
    assert "│ a    │     1 │  │" in columns_of(["name", "score", ""], ["a", "1", ""])[1]


def test_a_terminal_folds_before_brackets(report):
    text = printed(report, 50)
    assert max(map(len, text.splitlines())) <= 50
    assert not missing(text, "6.00x (5.50–6.60) │", "  11.00x │", "(10.00–12.00) │")
    assert "6.00x (5.50–6.60)" in printed(report)


def test_each_view_shows_its_sections_and_markdown_counts_the_others():
    parts = [ReportSection(view.name, sentences=["x"], least=view) for view in View]
    top = ReportSection("top", parts=parts)
    titles = ["TERMINAL", "MARKDOWN", "HTML"]
    assert [[p.title for p in shown([top], view)[0].parts] for view in View] == [
        titles[:1],
        titles[:2],
        titles,
    ]
    assert shown([top], View.MARKDOWN)[0].sentences == ["Also in report.html: HTML."]
    assert shown([ReportSection("top", parts=parts[2:])], View.TERMINAL) == []


def test_pictures_take_the_colour_of_the_page_and_do_not_change(report, pruned):
    def drawn():
        return [*report_pictures(report), *model_pictures(pruned.pruning[0])]

    assert drawn() == drawn()
    black = ["#778899", "#000000", "<image"]
    assert [missing(picture.svg, *black, "currentColor") for picture in drawn()] == [black] * len(
        drawn()
    )


def front_matter(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---")[1])


def test_hostile_names_in_a_card_stay_text(hostile):
    assert "base_model" not in front_matter(model_card(hostile, HOSTILE))
    assert "<script" not in model_card(hostile, HOSTILE).split("---", 2)[2]


def test_licence_and_languages_are_the_base_s_and_a_directory_names_the_model_it_came_from(
    values, tmp_path
):
    base = {
        "license": "apache-2.0",
        "language": ["en"],
        "datasets": ["org/texts"],
        "base_model": "org/first",
        "tags": ["kdcli", "distillation", "bert", "pruned"],
    }
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(base)}---\n# Base\n")
    values["models"]["3x384"]["source"] = str(tmp_path)
    front = front_matter(model_card(made(values), "3x384"))
    assert {key: front[key] for key in base} == base
    (tmp_path / "README.md").write_text("---\n- no: [card\n---\n")
    assert "license" not in front_matter(model_card(made(values), "3x384"))


def test_directories_stay_private(values, tmp_path):
    folder = tmp_path / "somebody" / "mine"
    folder.mkdir(parents=True)
    values["models"]["teacher"] = model("teacher", id=str(folder))
    values["models"]["3x384"] |= {"source": str(folder), "made": "distilled from mine"}
    report = made(values)
    tuned = finetune_values()
    tuned["models"]["finetuned"] |= {"source": str(folder), "made": "fine-tuned from mine"}
    tuned = made(tuned)
    texts = [
        model_card(report, "3x384"),
        html(report),
        markdown(report),
        model_card(tuned, "finetuned", "AutoModelX"),
    ]
    assert [missing(text, "mine", "somebody") for text in texts] == [["somebody"]] * 4
    assert not {"base_model"} & {*front_matter(texts[0]), *front_matter(texts[-1])}


def test_title_names_the_chain(values):
    teacher, student = values["models"]["teacher"], values["models"]["3x384"]
    wide = model("assistant", "teacher", hidden=384)
    variants = {
        name: model("student", "teacher", hidden=384, variant=name) for name in ("full", "map-top")
    }
    narrow = model("student", "teacher", layers=3, hidden=384, ffn=1216)
    values |= {"curve": [], "quality": {}, "latency": []}
    for models, text in (
        ({"student": narrow}, "3x384:1216"),
        ({"assistant": wide, "student": student}, "12x384 (assistant) → 3x384"),
        ({"assistant": wide}, "12x384"),
        (variants, "12x384 in 2 variants"),
    ):
        report = made(values, models={"teacher": teacher} | models)
        assert title(report) == f"google-bert/bert-base-uncased → {text}"
    assert '<p class="summary">full has' in html(report)


def test_undistilled_is_explained_with_and_without_an_assistant(values):
    assert "started in the same way and not trained." in words(made(values))
    values["models"]["assistant"] = model("assistant", "teacher", hidden=384)
    assert "not trained; the notes say from which model." in words(made(values))
    values["models"]["3x384 undistilled"] |= {"role": "undistilled"}
    report = made(values, recipe={"task": "sst2"})
    assert "started in the same way and fine-tuned without a teacher." in words(report)
    assert title(report).endswith("3x384 on sst2")


def test_short_name_of_a_directory_is_its_last_part(monkeypatch, tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short("models/mine") == short("./models/mine/") == "mine"
    names = [
        "google-bert/bert-base-uncased",
        "bert-base-uncased",
        "demo",
        "Salesforce/wikitext:wikitext-103",
    ]
    assert list(map(short, names)) == names


def test_report_json_is_written_last(report, tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UsageError, match=r"report.html is not a regular file"):
        write_views(tmp_path, report)
    assert not (tmp_path / "report.json").exists(), "a run without all its views is not done"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (number(1.0), "1.000"),
        (number(0.93), "0.9300"),
        (number(0.0), "0.000"),
        (number(0.012346), "0.01235"),
        (number(100), "100.0"),
        (number(1234.5), "1234"),
        (number(None), ""),
        (bytes_of(0), "0.0 kB"),
        (bytes_of(51_671), "51.7 kB"),
        (bytes_of(838_400), "0.838 MB"),
        (bytes_of(10**6), "1.00 MB"),
        (bytes_of(9_996_000), "10.0 MB"),
        (bytes_of(12 * 10**8), "1.20 GB"),
        (percent(None), ""),
        (percent(0.0), "0.00"),
        (percent(1e-6), "<0.01"),
        (percent(5e-5), "0.01"),
        (percent(0.12345), "12.35"),
        (percent(1.0), "100.00"),
    ],
)
def test_numbers_keep_their_digits_and_show_in_their_unit(written, text):
    assert written == text


def test_sizes_name_the_type_of_weights_that_are_not_float32(values):
    values["models"]["teacher"]["card"] |= {"held_in": "fp16"}
    table = overview(made(values))
    assert [row[table.columns.index("weights")] for row in table.rows[:2]] == [
        "438.0 MB, fp16",
        "90.9 MB",
    ]
