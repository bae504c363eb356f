"""Writing a report: report.json and its views, each file atomic; report.json last, since it says the run is done."""

from __future__ import annotations

from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kdcli.disk import write_atomic
from kdcli.report.pictures import loss_curve, size_latency
from kdcli.report.schema import Report
from kdcli.report.views import duration, latency_csv, markdown, overview


def write_report(folder: Path, report: Report) -> None:
    """Write latency.csv, report.md, report.html and report.json.

    Raises:
        MachineError: the disk is full or not writable.
    """
    write_atomic(folder / "latency.csv", latency_csv(report))
    write_atomic(folder / "report.md", markdown(report))
    write_atomic(folder / "report.html", html(report))
    write_atomic(folder / "report.json", report.to_json())


def html(report: Report) -> str:
    """report.html: one file, nothing loaded from elsewhere, everything from outside escaped."""
    environment = Environment(
        loader=PackageLoader("kdcli.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    header, rows = overview(report)
    teacher, *students = report.models.items()
    pictures = [
        ("Loss over steps: training, and held-out text never trained on", loss_curve(report)),
        ("Size and latency", size_latency(report)),
    ]
    return environment.get_template("report.html.jinja").render(
        report=report,
        teacher=teacher[1],
        students=[f"{card.layers}x{card.hidden}" for _, card in students],
        facts=_facts(report),
        header=header,
        rows=rows,
        # The SVG is made by matplotlib, which escapes the names in it.
        pictures=[(caption, Markup(svg)) for caption, svg in pictures if svg],  # noqa: S704
        duration=duration,
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump({**report.environment, **report.versions}, sort_keys=False, allow_unicode=True),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: of the last student, beside the teacher."""
    (_, teacher), *_, (name, student) = report.models.items()
    facts = [(f"{teacher.bytes / student.bytes:.1f}x", "smaller on disk")]
    found = [s for key, s in report.speedup.items() if key.startswith(f"{name}_vs_") and "@" not in key]
    if found:
        s = found[0]
        facts.append((f"{s.median:.1f}x", f"faster, {s.batch_size} x {s.seq_len} tokens ({s.low:.1f}–{s.high:.1f})"))
    facts.append((f"{teacher.multiply_adds / student.multiply_adds:.1f}x", "fewer multiply-adds"))
    for task, of in report.quality.items():
        metric = next(iter(next(iter(of.values()))))
        if name in of and "teacher" in of and metric == "accuracy":
            facts.append((f"{of[name][metric]:.1%}", f"{task}; teacher {of['teacher'][metric]:.1%}"))
    return facts
