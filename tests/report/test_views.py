"""The views: what they must show, and that nothing from outside becomes markup."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

import pytest
import yaml
from reports import HOSTILE, card
from rich.console import Console

from kdcli.errors import MachineError
from kdcli.report.build import html, write_views
from kdcli.report.console import rich_table
from kdcli.report.markdown import markdown
from kdcli.report.pictures.curves import pictures
from kdcli.report.schema import Report
from kdcli.report.sections.latency import latency_csv
from kdcli.report.text import Listing, bytes_of
from kdcli.report.views import model_card, overview, short, terminal, title

LOADS = {"src", "srcset", "href", "xlink:href", "data", "action", "formaction", "poster", "background"}


class Page(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def shown(report: Report, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in terminal(report):
        console.print(part)
    return console.export_text()


def test_html_loads_nothing_and_runs_nothing(report):
    text = html(report)
    page = Page(text)
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(page.tags)
    assert all(value.startswith("#") for name, value in page.attributes if name in LOADS)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    namespaces = {value for name, value in page.attributes if name.startswith("xmlns")}
    assert not re.findall(r"https?://", re.sub("|".join(map(re.escape, namespaces)), "", text))


def test_html_shows_hostile_names_as_text(hostile):
    page = Page(html(hostile))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert any(HOSTILE in text for text in page.text)


def test_html_describes_its_pictures_in_words(report):
    page = Page(html(report))
    described = [value for name, value in page.attributes if name == "aria-label"]
    assert len(described) == 2
    assert "6x384/attention 0.5 → 0.1" in described[0]
    assert "3x384 69.6 MB, 6 ms" in described[1]
    assert ("lang", "en") in page.attributes
    assert {"h1", "h2", "th"} <= set(page.tags)


def test_html_says_what_stands_out(report):
    text = " ".join(" ".join(Page(html(report)).text).split())
    for fact in ("google-bert/bert-base-uncased → 6x384, 3x384", "6.3× smaller", "10.0× faster", "16.0× fewer"):
        assert fact in text
    assert "10.0× lower held-out loss than before distillation" in text
    assert "90.0% sst2; teacher 93.0%" in text
    assert "In short, for 3x384" in text
    assert "Noisy or unstable" in text
    assert "Resumed after step 100" in text


@pytest.mark.parametrize("rows", [3, 9])
def test_names_of_models_are_whole_on_a_narrow_terminal(rows):
    header = ["model", "shape", "parameters", "(embedding)", "(transformer)", "size", "multiply-adds"]
    facts = ["6x384", "22.7 M", "11.9 M", "10.8 M", "90.9 MB", "1.43 G"]
    listing = Listing("models", header, [[f"name{i}", *facts] for i in range(rows)], "")
    console = Console(width=80, file=io.StringIO())
    console.print(rich_table(listing))
    text = console.file.getvalue()
    assert all(f"name{i} " in text for i in range(rows))
    assert text.count("90.9 MB") == rows
    assert max(map(len, text.splitlines())) <= 80


def test_what_stands_out_of_a_task_is_its_first_metric(values):
    names = ("teacher", "6x384", "3x384")
    values["quality"] = {
        "mrpc": {name: {"f1": 0.9 - i / 100, "accuracy": 0.8} for i, name in enumerate(names)},
        "stsb": {name: {"pearson": 0.85 - i / 100, "spearman": 0.7} for i, name in enumerate(names)},
    }
    text = " ".join(" ".join(Page(html(Report.model_validate(values))).text).split())
    assert "0.88 mrpc f1; teacher 0.9" in text
    assert "0.83 stsb pearson; teacher 0.85" in text


def test_html_of_a_bare_report(values):
    values |= {"training": None, "curve": [], "quality": {}, "latency": [], "speedup": {}, "published": [], "notes": []}
    report = Report.model_validate(values)
    page = Page(html(report))
    assert "svg" not in page.tags
    assert latency_csv(report) == ""
    assert "Latency" not in page.text


@pytest.mark.filterwarnings("error")
def test_curve_of_a_student_that_equals_its_teacher(values):
    values["curve"] = [{"step": i, "loss": 0.0, "held_out": {"attention": 0.0}} for i in range(3)]
    assert "attention 0 → 0" in pictures(Report.model_validate(values))[0].caption


def test_pictures_take_the_colour_of_the_page(report):
    for picture in pictures(report):
        assert "currentColor" in picture.svg
        assert "#778899" not in picture.svg
        assert "#000000" not in picture.svg


def test_pictures_do_not_change_between_two_runs(report):
    assert pictures(report) == pictures(report)


def test_overview_has_a_row_a_model_and_one_for_the_undistilled(report):
    header, rows = overview(report)
    assert [row[0] for row in rows] == ["teacher", "6x384", "3x384", "3x384 undistilled"]
    of = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert of["teacher"]["parameters"] == "109 M"
    assert of["3x384"]["(embedding)"] == "11.9 M"
    assert of["3x384"]["(transformer)"] == "5.47 M"
    assert of["3x384"]["ms 1x128"] == "6.0 (unstable)"
    assert of["3x384"]["speed-up 8x128"] == "11.00x (10.00–12.00)"
    assert of["3x384 undistilled"]["held-out loss"] == "0.5"
    assert of["6x384"]["sst2"] == ""


def test_terminal_shows_hostile_names_as_text(report, hostile):
    assert "10.00x (9.00–11.50)" in shown(report)
    assert "[bold]" in shown(hostile, 600)


def test_markdown_tables_hold(report, hostile):
    for one in (report, hostile):
        tables = [line for line in markdown(one).splitlines() if line.startswith("|")]
        columns = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
        assert columns[0] == columns[1] == columns[2]
        assert "<script" not in markdown(one)
    assert "| 200 | 0.1 |" in markdown(report)
    assert "arXiv 2002.10957" in markdown(report)


def test_latency_csv_is_the_latency_of_the_report(report):
    rows = list(csv.DictReader(io.StringIO(latency_csv(report))))
    assert [row["p50_ms"] for row in rows] == [str(r.p50_ms) for r in report.latency]


def front_matter(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---")[1])


def test_model_card(report, hostile):
    text = model_card(report, "3x384")
    assert front_matter(text) == {
        "library_name": "transformers",
        "tags": ["kdcli", "distill", "bert"],
        "base_model": "google-bert/bert-base-uncased",
    }
    for part in (
        "AutoModel.from_pretrained",
        "with minilm on corpus.txt: 200 steps",
        "| 3x384 |",
        "--recipe recipe.yaml",
        "kdcli 0.1.0",
    ):
        assert part in text
    assert "base_model" not in front_matter(model_card(hostile, HOSTILE))
    assert "<script" not in model_card(hostile, HOSTILE).split("---", 2)[2]


def test_model_card_keeps_directories_to_itself(values, tmp_path):
    folder = tmp_path / "somebody" / "teacher-of-mine"
    folder.mkdir(parents=True)
    values["models"]["teacher"] = card(id=str(folder))
    report = Report.model_validate(values)
    for text in (model_card(report, "3x384"), html(report), markdown(report)):
        assert "teacher-of-mine" in text
        assert "somebody" not in text
    assert "base_model" not in front_matter(model_card(report, "3x384"))


def test_title_names_the_chain(values):
    models = values["models"]
    values["models"] = {"teacher": models["teacher"], "assistant": card(hidden=384), "student": models["3x384"]}
    assert title(Report.model_validate(values)) == "google-bert/bert-base-uncased → 12x384 (assistant) → 3x384"
    values["models"] = {"teacher": models["teacher"], "assistant": card(hidden=384)}
    assert title(Report.model_validate(values)) == "google-bert/bert-base-uncased → 12x384"
    values["models"] = {"teacher": models["teacher"], "full": card(hidden=384), "map-top": card(hidden=384)}
    ablation = Report.model_validate(values)
    assert title(ablation) == "google-bert/bert-base-uncased → 12x384 in 2 variants"
    assert "In short, for full:" in html(ablation)


def test_short_name_of_a_directory_is_its_last_part(monkeypatch, tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short("models/mine") == short("./models/mine/") == "mine"
    assert short("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"
    assert short("bert-base-uncased") == "bert-base-uncased"
    assert short("demo") == "demo"
    assert short("Salesforce/wikitext:wikitext-103-raw-v1") == "Salesforce/wikitext:wikitext-103-raw-v1"


def test_report_is_written_last_of_all(report, tmp_path, monkeypatch):
    write_views(tmp_path, report)
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "report.md", "report.html", "latency.csv"}
    assert Report.model_validate_json((tmp_path / "report.json").read_text("utf-8")) == report
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "report.html").mkdir()
    with pytest.raises(MachineError, match=r"report.html could not be written"):
        write_views(empty, report)
    assert not (empty / "report.json").exists(), "a run without all its views is not done"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0.0 kB"),
        (51_671, "51.7 kB"),
        (838_400, "0.8 MB"),
        (10**6, "1.0 MB"),
        (438_000_000, "438.0 MB"),
        (12 * 10**8, "1.20 GB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_shows_them(value, said):
    assert bytes_of(value) == said


def test_half_the_bytes_of_other_weights_are_not_taken_for_fewer(report):
    first, *others = report.models.values()
    half = report.model_copy(
        update={
            "models": dict(zip(report.models, [first.model_copy(update={"held_in": "fp16"}), *others], strict=True))
        }
    )
    header, rows = overview(half)
    sizes = [row[header.index("size")] for row in rows]
    assert sizes[0] == f"{bytes_of(first.bytes)}, fp16"
    assert sizes[1] == bytes_of(others[0].bytes)
