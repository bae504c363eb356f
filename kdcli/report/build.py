"""Writing a report: report.json and its views, each file atomic; report.json last, since it says the run is done."""

from __future__ import annotations

from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kdcli.disk import write_atomic
from kdcli.report.pictures import pictures
from kdcli.report.schema import Report
from kdcli.report.views import UNDISTILLED, duration, latency_csv, markdown, megabytes, number, overview, title


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
    return environment.get_template("report.html.jinja").render(
        report=report,
        title=title(report),
        facts=_facts(report),
        about=list(report.models)[-1],
        header=header,
        rows=rows,
        # The SVG is made by matplotlib, which escapes the names in it.
        pictures=[(p.caption, Markup(p.svg)) for p in pictures(report)],  # noqa: S704
        published=list(dict.fromkeys(key for row in report.published for key in row.values)),
        duration=duration,
        megabytes=megabytes,
        number=number,
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump({**report.environment, **report.versions}, sort_keys=False, allow_unicode=True),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: of the last student, beside the teacher."""
    (_, teacher), *_, (name, student) = report.models.items()
    facts = [(f"{teacher.bytes / student.bytes:.1f}×", "smaller on disk")]
    found = [s for key, s in report.speedup.items() if key.startswith(f"{name}_vs_") and "@" not in key]
    if found:
        s = found[0]
        facts.append((f"{s.median:.1f}×", f"faster, {s.batch_size} × {s.seq_len} tokens ({s.low:.1f}–{s.high:.1f})"))
    facts.append((f"{teacher.multiply_adds / student.multiply_adds:.1f}×", "fewer multiply-adds"))
    for task, of in report.quality.items():
        own, before = of.get(name, {}), of.get(name + UNDISTILLED, {})
        if "accuracy" in own and "accuracy" in of.get("teacher", {}):
            facts.append((f"{own['accuracy']:.1%}", f"{task}; teacher {of['teacher']['accuracy']:.1%}"))
        elif own.get("loss") and "loss" in before:
            facts.append((f"{before['loss'] / own['loss']:.1f}×", f"lower loss on {task} than before distillation"))
    return facts
