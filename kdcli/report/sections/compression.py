"""What a compression tried: the sentence, the table with the chosen row marked, and the picture."""

from functools import partial

from kdcli.report.schema import Candidate, Compression
from kdcli.report.sections.latency import milliseconds
from kdcli.report.text import Picture, Section, Table, number

NAMES = {"max_drop": "points lost, at most {:g}", "speedup": "at least {:g} times as fast"}
NAMES |= {"max_latency_ms": "at most {:g} ms", "max_mb": "at most {:g} MB"}


def compression_section(compression: Compression) -> Section:
    """Candidates from the teacher on, those that were left out last."""
    tried = [one for one in compression.candidates if one.score is not None]
    header = [
        "candidate",
        compression.metric,
        "lost",
        "ms",
        "speed-up",
        "MB",
        "lost, 95% interval",
        "outcome",
    ]
    rows = [_row(one, tried[0]) for one in tried]
    # Where there is no bold type the word marks the row.
    rows = [
        [f"{name} (chosen)" if name == compression.chosen else name, *cells]
        for name, *cells in rows
    ]
    marked = next(n for n, one in enumerate(tried) if one.name == compression.chosen)
    goal = (
        ", ".join(NAMES[name].format(limit) for name, limit in compression.goal.items())
        or "none given"
    )
    strict = ", for the far end of the interval" if compression.strict else ""
    note = f"Goal: {goal}{strict}. Lost: points of {compression.metric} on {compression.rows:,} held-out rows, paired "
    note += "with the teacher's; ms and speed-up: one sequence of 128 tokens, over the teacher on torch in float32."
    table = Table(header, rows, note, marked, narrow=6, style="tight")
    left_out = [
        (f"{one.name}: {one.outcome}",) for one in compression.candidates if one.score is None
    ]
    return Section(
        "What was tried",
        table,
        [compression.sentence],
        left_out,
        draw=partial(_pictures, compression),
    )


def _row(one: Candidate, teacher: Candidate) -> list[str]:
    scores = [number(one.score), milliseconds(one.ms), f"{one.speedup:.2f}x", f"{one.mb:.1f}"]
    lost = interval = ""
    if one is not teacher:
        far, most, near = (
            100 * ((teacher.score or 0.0) - (end or 0.0)) for end in (one.low, one.score, one.high)
        )
        lost, interval = f"{most:+.2f}", f"{near:+.2f} to {far:+.2f}"
    return [one.name, scores[0], lost, *scores[1:], interval, one.outcome]


def _pictures(compression: Compression) -> list[Picture]:
    # Imported here, since matplotlib takes a third of a second.
    from kdcli.report.charts.compression import pictures

    return pictures(compression)
