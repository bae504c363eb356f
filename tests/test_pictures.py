"""The pictures of the README, and the tools that draw them."""

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kdcli.report.schema import Comparison, Evaluation
from tests.report.reports import report_of
from tools import front, record

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def points():
    return [
        front.Point("teacher", 26.0, 0.92, 0.92, 0.92, "teacher"),
        front.Point("3x<64>", 4.0, 0.9, 0.88, 0.91, "student"),
        front.Point("theirs", 0.05, 0.85, 0.84, 0.86, "published"),
    ]


@pytest.mark.parametrize("theme", front.THEMES)
def test_the_readme_describes_its_picture(theme):
    picture = ROOT / "docs" / "images" / f"front-{theme}.svg"
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"docs/images/{picture.name}" in readme
    (alternative,) = re.findall(r'<img src="docs/images/front-[^>]*alt="([^"]+)"', readme)
    title = ElementTree.parse(picture).getroot().find(f"{SVG}title")
    assert title is not None
    assert title.text == unescape(alternative)


@pytest.mark.parametrize("ink", front.THEMES.values())
def test_a_picture_has_every_model_in_the_colour_of_its_page(ink):
    svg = front.picture(points(), "mrr@10", ink)
    root = ElementTree.fromstring(svg)
    texts = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    for words in ("3x<64>", "0.920, 26 ms", "0.900, 4 ms", "0.850, 0.05 ms", "MRR@10"):
        assert words in texts
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == front.description(points(), "mrr@10")
    assert ink in svg
    assert "currentColor" not in svg


def test_the_points_of_a_picture_come_from_an_evaluation():
    def row(model, status="ok"):
        first = report_of().latency[0]
        return first.model_copy(update={"model": model, "batch_size": 1, "status": status})

    def score(model, value):
        return Evaluation(
            model=model, task="t", set="", split="test", n=9, metrics={"mrr@10": value}
        )

    difference = Comparison(
        model="b", baseline="a", task="t", set="", metric="mrr@10",
        difference=-0.1, low=-0.12, high=-0.09,
    )  # fmt: skip
    report = report_of().model_copy(
        update={
            "latency": [row("a"), row("b")],
            "evaluations": [score("a", 0.9), score("b", 0.8)],
            "comparisons": [difference],
        }
    )
    first, second = front.points_of(report, "mrr@10", ["b"])
    assert (first.role, first.low, first.high) == ("teacher", 0.9, 0.9)
    assert second.role == "published"
    assert (second.low, second.high) == pytest.approx((0.78, 0.81))
    report.latency[1] = row("b", "unstable")
    with pytest.raises(ValueError, match="b has no stable latency"):
        front.points_of(report, "mrr@10", [])


def test_a_recording_shows_the_command_and_its_output():
    root = ElementTree.fromstring(record.picture(["kdcli", "a b"], "first\n[bold]second[/bold]\n"))
    texts = "".join(text.text or "" for text in root.iter(f"{SVG}text")).replace("\xa0", " ")
    assert "kdcli 'a b'" in texts
    assert "[bold]second[/bold]" in texts


def test_a_recording_loads_nothing_from_the_internet():
    svg = record.picture(["kdcli"], "a line")
    addresses = [word for word in svg.split('"') if word.startswith("http")]
    assert "@font-face" not in svg
    assert addresses == ["http://www.w3.org/2000/svg"]


def test_a_long_recording_keeps_its_first_and_last_lines():
    text = "\n".join("abcdef")
    assert record.shortened(text, 1, 2) == "a\n... 3 lines ...\ne\nf"
    assert record.shortened(text, 1, 4) == text
    assert record.shortened(text, 1, None) == text
