"""report.html in a real browser, at the width of a telephone and of a desk."""

import html as escaping
import json
import re
import shutil
import subprocess

import pytest

from kdcli.report.views import html

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
WIDTHS = (390, 1280)
PAPER = 690  # A4 between the margins

# The page is laid out in frames of exactly the widths: a headless window has a least width of its
# own.
PROBE = """<!doctype html><meta charset="utf-8"><pre></pre>
<script>
const found = {{}};
for (const width of {widths}) {{
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style = `border: 0; width: ${{width}}px; height: 900px`;
  frame.onload = () => {{
    const page = frame.contentDocument, root = page.documentElement;
    const wide = [...page.querySelectorAll("main *")].filter(e => !e.closest(".scroll, pre, svg"));
    found[width] = {{
      inner: frame.contentWindow.innerWidth,
      scroll: root.scrollWidth,
      beyond: wide.filter(e => e.getBoundingClientRect().right > width + 0.5)
        .map(e => e.tagName + " " + e.className),
      scripts: page.scripts.length,
      resources: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
      cut: [...page.querySelectorAll(".scores.stacked, .scores.differences")]
        .map(e => e.closest(".scroll")).filter(e => e.scrollWidth > e.clientWidth + 1).length,
      tables: [...page.querySelectorAll(".scroll")]
        .filter(e => e.scrollWidth > e.clientWidth + 1).length,
      pictures: [...page.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width),
    }};
    document.querySelector("pre").textContent = JSON.stringify(found);
  }};
  frame.srcdoc = {page};
}}
</script>"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(
    ("kind", "pictures"),
    [
        ("report", 1),
        ("hostile", 3),
        ("finetuned", 2),
        ("grid", 3),
        ("labels", 2),
        ("compared", 0),
        ("languages", 0),
        ("benchmark", 2),
        ("runs", 2),
        ("hostile_latency", 7),
        ("compressed", 2),
        ("pruned", 5),
        ("sparsities", 14),
        ("odd", 4),
        ("hostile_pruning", 12),
    ],
)
def test_page_never_scrolls_sideways(request, tmp_path, kind, pictures):
    opened = html(request.getfixturevalue(kind)).replace("<details", "<details open")
    laid_out = measured(opened, WIDTHS, tmp_path)
    for width in WIDTHS:
        found = laid_out[str(width)]
        assert (found["inner"], found["beyond"], found["scripts"], found["resources"]) == (
            width,
            [],
            1,
            [],
        )
        assert found["scroll"] <= width
        # On a telephone no score, difference or latency lies beyond the edge.
        assert width > 640 or found["cut"] == 0
        assert len(found["pictures"]) == pictures
        assert all(0.3 * width < w < width for w in found["pictures"])


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("kind", ["report", "compressed", "benchmark"])
def test_on_paper_no_table_is_cut(request, tmp_path, kind):
    page = html(request.getfixturevalue(kind)).replace("@media print", "@media all")
    found = measured(page, [PAPER], tmp_path)[str(PAPER)]
    assert (found["beyond"], found["tables"]) == ([], 0)


USE = """
const names = table => [...table.tBodies[0].rows].filter(row => !row.hidden)
  .map(row => row.cells[0].querySelector("small")?.previousSibling.textContent.trim()
    ?? row.cells[0].textContent.trim());
const [first, last] = [...page.querySelectorAll("table.scores")].filter((_, n, all) =>
  n == 0 || n == all.length - 1);
const found = [names(first)];
const button = [...first.querySelectorAll("th button")].find(b => b.textContent == "ms");
for (const turn of [1, 2]) { button?.click(); found.push(names(first)); }
const field = page.querySelector(".filter input");
if (field) {
  field.value = "CARD REASON_00"; field.dispatchEvent(new Event("input"));
  found.push(names(last), page.querySelector(".filter output").value);
}
"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_click_sorts_a_table_and_a_word_filters_its_rows(compressed, labels, tmp_path):
    before, down, up = used(html(compressed), tmp_path)
    assert before == ["teacher", "onnx-int8", "3x384-onnx-int8"] == down == up[::-1]
    *_, kept, count = used(html(labels), tmp_path)
    assert kept == [f"card_payment_reason_00{n}" for n in range(10)]
    assert count == "10 of 77 rows"


def used(page, tmp_path):
    """Click and type on a page, and return what it shows."""
    probe = re.sub(r"found\[width\] = \{\{.*?\n    \}\};", lambda _: "{use}", PROBE, flags=re.S)
    return measured(page, [1280], tmp_path, probe.replace("const found = {{}};", ""), use=USE)


def measured(page, widths, tmp_path, probe=PROBE, **parts):
    """Lay a page out in frames of these widths, and return what the probe finds, by width."""
    text = json.dumps(page).replace("</", "<\\/")
    (tmp_path / "probe.html").write_text(
        probe.format(widths=list(widths), page=text, **parts), "utf-8"
    )
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += [
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"file://{tmp_path}/probe.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    return json.loads(escaping.unescape(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)[0]))
