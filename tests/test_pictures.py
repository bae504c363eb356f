"""The pictures of the README, and the tools that draw them."""

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import front, record

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("theme", front.THEMES)
def test_the_readme_describes_its_picture(theme):
    picture = ROOT / "docs" / "images" / f"front-{theme}.svg"
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"docs/images/{picture.name}" in readme
    (alternative,) = re.findall(r'<img src="docs/images/front-[^>]*alt="([^"]+)"', readme)
    title = ElementTree.parse(picture).getroot().find(f"{SVG}title")
    assert title is not None
    assert title.text == unescape(alternative)


def test_a_recording_loads_nothing_from_the_internet():
    svg = record.picture(["kdcli"], "a line")
    addresses = [word for word in svg.split('"') if word.startswith("http")]
    assert "@font-face" not in svg
    assert addresses == ["http://www.w3.org/2000/svg"]
