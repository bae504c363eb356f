"""The pictures of the README, and the tools that draw them."""

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kdcli.report.schema import Compression
from tools import front, record

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def compression():
    candidate = {"score": 0.9, "low": None, "high": None, "unstable": False, "speedup": None}
    return Compression.model_validate(
        {
            "task": "own",
            "metric": "accuracy",
            "rows": 100,
            "goal": {"max_drop": 1.0, "speedup": 5.0},
            "strict": False,
            "met": True,
            "chosen": "2x<64>",
            "sentence": "",
            "candidates": [
                {**candidate, "name": "teacher", "ms": 20.0, "mb": 90.0, "outcome": ""},
                {**candidate, "name": "2x<64>", "ms": 3.0, "mb": 9.0, "outcome": "chosen"},
            ],
            "verification": {
                "rows": 1000,
                "teacher": 0.92,
                "score": 0.915,
                "low": 0.91,
                "high": 0.918,
                "confidence": 0.95,
                "look": 1,
                "reference": "labels",
            },
        }
    )


@pytest.mark.parametrize("theme", front.THEMES)
def test_the_readme_describes_its_picture(theme):
    picture = ROOT / "docs" / "images" / f"front-{theme}.svg"
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"docs/images/{picture.name}" in readme
    (alternative,) = re.findall(r'<img [^>]*alt="([^"]+)"', readme)
    title = ElementTree.parse(picture).getroot().find(f"{SVG}title")
    assert title is not None
    assert title.text == unescape(alternative)


def test_a_picture_has_the_numbers_and_the_goal():
    drawn = compression()
    root = ElementTree.fromstring(front.picture(drawn, drawn.verification, front.THEMES["dark"]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"2x<64>", "0.9150 (-0.50 points), 3.0 ms", "0.9200, 20.0 ms"} <= set(texts)
    assert "goal: 5 times as fast, at most 1 point lost" in texts
    goal = root.find(f"{SVG}rect")
    teacher, chosen = root.findall(f"{SVG}circle")
    assert float(teacher.get("cx")) > float(chosen.get("cx"))
    assert float(teacher.get("cy")) < float(chosen.get("cy"))
    # The chosen model is inside the goal.
    assert float(chosen.get("cx")) < float(goal.get("x")) + float(goal.get("width"))
    assert float(chosen.get("cy")) < float(goal.get("y")) + float(goal.get("height"))


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
