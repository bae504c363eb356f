"""Show a compression: the result in words, a table of the candidates, and pictures."""

from dataclasses import replace
from functools import partial

from kdcli.report.schema import Candidate, Compression, Report
from kdcli.report.sections.timings import (
    UNSTABLE_NOTE,
    interval,
    milliseconds,
    price_columns,
    price_note,
)
from kdcli.report.text import (
    Picture,
    ReportSection,
    filled,
    lost_points,
    megabytes,
    number,
    percent,
    short,
)

LOST = "points lost (+), selection"


def compression_section(
    compression: Compression, price_per_hour: float | None = None
) -> ReportSection:
    """Show the candidates, the teacher first, and list the skipped ones."""
    tried = [one for one in compression.candidates if one.score is not None]
    priced = price_per_hour is not None
    rows = [_row(one, tried[0], compression, priced=priced) for one in tried]
    marked = next(n for n, one in enumerate(tried) if one.name == compression.chosen)
    goal = ", ".join(limit.phrase for limit in compression.limits) or "none given"
    note = (
        f"Goal: {goal}. Selection: on {compression.rows:,} selection rows. Points lost: the "
        "teacher's score minus the candidate's, so a gain is negative. These rows chose among the "
        "candidates, so the values of the chosen one are optimistic. The summary at the top gives "
        "its loss on the verification rows, which chose nothing. ms: one sequence of 128 tokens. "
        "Speed-up: over the teacher on torch in float32. MB: what one deployment needs, the "
        "weights, the tokenizer and the configuration."
    )
    batches = [one.throughput for one in tried if one.throughput is not None]
    if priced and batches:
        note += (
            f" texts/s: in batches of {batches[0].batch_size} × {batches[0].seq_len} tokens. "
            f"{price_note(price_per_hour)}"
        )
    if any(one.cascade for one in tried):
        note += (
            " A candidate with + is a cascade: the second model reads the texts about which the "
            "first one is unsure, or the passages that it ranks best, so ms is a mean."
        )
    if any(one.unstable or (one.speedup and one.speedup.unstable) for one in tried) or (
        priced and any(batch.unstable for batch in batches)
    ):
        note += f" {UNSTABLE_NOTE}"
    return replace(
        filled("What was tried", rows, note, marked=marked, narrow=len(rows[0]) - 2, style="tight"),
        items=[
            (f"{one.name}: {one.outcome}",) for one in compression.candidates if one.score is None
        ],
        draw=partial(_pictures, compression),
    )


def _row(
    one: Candidate, teacher: Candidate, compression: Compression, *, priced: bool
) -> dict[str, str]:
    """Return the columns of a candidate, the ones for a narrow terminal first."""
    lost = bounds = ""
    if one is not teacher:
        difference, low, high = (
            (each or 0.0) - (teacher.score or 0.0) for each in (one.score, one.low, one.high)
        )
        lost, bounds = lost_points(difference, low, high)
    asked = ""
    if one.cascade is not None:
        facts, item = one.cascade, "passages" if one.cascade.ranks else "texts"
        asked = f"; asks {facts.second} about {percent(facts.asked, 1)} % of the {item}"
    # The word marks the row where there is no bold type.
    mark = " (chosen)" * (one.name == compression.chosen)
    return {
        "candidate": one.name + mark,
        f"{compression.metric}, selection": number(one.score),
        LOST: lost,
        "ms": milliseconds(one.ms, unstable=one.unstable),
        "speed-up": "1 (baseline)" if one is teacher else interval(one.speedup),
        "MB": megabytes(one.mb or 0),
        **price_columns(one.throughput if priced else None),
        **{name: number(value) for name, value in one.costs.items()},
        f"{LOST}: 95% interval": bounds,
        "outcome": one.outcome + asked,
    }


def compressed_name(report: Report) -> str:
    """Name the model that was compressed, from which the teacher may be fine-tuned."""
    return short(str(report.recipe.get("model")))


def _pictures(compression: Compression) -> list[Picture]:
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts.tradeoff import compression_pictures

    return compression_pictures(compression)
