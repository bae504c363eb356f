"""Show a compression: the result in words, a table of the candidates, and pictures."""

from functools import partial

from kdcli.report.schema import Candidate, Compression
from kdcli.report.sections.latency import UNSTABLE_NOTE, interval, milliseconds
from kdcli.report.text import Picture, ReportSection, ReportTable, number

GOALS = {
    "max_drop": "points lost, at most {:g}",
    "max_class_drop": "points lost by a class, at most {:g}",
    "speedup": "at least {:g} times as fast",
    "max_latency_ms": "at most {:g} ms",
    "max_mb": "at most {:g} MB",
}


def compression_section(compression: Compression) -> ReportSection:
    """Show the candidates, the teacher first, and list the skipped ones."""
    tried = [one for one in compression.candidates if one.score is not None]
    header = ["candidate", compression.metric, "lost", "ms", "speed-up", "MB"]
    header += ["lost, 95% interval", "outcome"]
    rows = [_row(one, tried[0]) for one in tried]
    marked = next(n for n, one in enumerate(tried) if one.name == compression.chosen)
    # The word marks the row where there is no bold type.
    rows[marked][0] += " (chosen)"
    limits = [GOALS[name].format(limit) for name, limit in compression.goal.items()]
    goal = ", ".join(limits) or "none given"
    strict = ", for the far end of the interval" if compression.strict else ""
    note = (
        f"Goal: {goal}{strict}. Lost: points of {compression.metric} on {compression.rows:,} "
        "selection rows, paired with the teacher's. These rows chose among the candidates, so the "
        "values of the chosen one are optimistic. The summary sentence gives its values on the "
        "verification rows. ms and speed-up: one sequence of 128 tokens, over the teacher on torch "
        "in float32."
    )
    if any(one.unstable or (one.speedup and one.speedup.unstable) for one in tried):
        note += f" {UNSTABLE_NOTE}"
    return ReportSection(
        "What was tried",
        ReportTable(header, rows, note, marked, narrow=6, style="tight"),
        [compression.sentence],
        [(f"{one.name}: {one.outcome}",) for one in compression.candidates if one.score is None],
        draw=partial(_pictures, compression),
    )


def _row(one: Candidate, teacher: Candidate) -> list[str]:
    lost = bounds = ""
    if one is not teacher:
        far, most, near = (
            100 * ((teacher.score or 0.0) - (end or 0.0)) for end in (one.low, one.score, one.high)
        )
        lost, bounds = f"{most:+.2f}", f"{near:+.2f} to {far:+.2f}"
    speedup = "1 (baseline)" if one is teacher else interval(one.speedup)
    costs = [milliseconds(one.ms, unstable=one.unstable), speedup, f"{one.mb:.1f}"]
    return [one.name, number(one.score), lost, *costs, bounds, one.outcome]


def _pictures(compression: Compression) -> list[Picture]:
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts.compression import compression_pictures

    return compression_pictures(compression)
