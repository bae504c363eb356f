"""State the result of a report in one paragraph, for a reader who stops after it.

A model card states the result of its model in its first sentence.
"""

from kdcli.deploy.measurements import MEASURE_AGAIN, UNSTABLE_PHRASE, LatencyRow
from kdcli.listing import joined
from kdcli.models.grammar import is_family
from kdcli.report.schema import HELD_OUT_LOSS, Comparison, Evaluation, Report, Throughput
from kdcli.report.sections.evaluations import set_name
from kdcli.report.sections.overview import (
    best_candidate,
    fastest_row,
    foremost,
    is_benchmark,
    shown_name,
)
from kdcli.report.sections.timings import cell_name, form_of, milliseconds, price_sentence, ran_as
from kdcli.report.text import bytes_of, loses, number, percent, plain, points_interval, short

NEIGHBOURS = "neighbours"
"""The task of `adapt`: the nearest texts of each text."""
QUANTISED = ("int8", "int8-packed", "q4")
FEW_ROWS = 50
"""With fewer rows, a score is hardly more than a guess: one row is more than two points."""
SAME_SIZE = 1.05
"""Sizes within this factor are not compared."""


def summary(report: Report) -> list[str]:
    """Return what was made, how fast and how small it is, and what it lost on how many rows.

    Returns:
        The paragraphs, the first of which is the result.
    """
    if (compression := report.compression) is not None:
        phrases = joined([limit.phrase for limit in compression.limits])
        met = f"Goal met: {phrases}. " if compression.met and phrases else ""
        missed = f"Goal missed: {compression.missed}." if compression.missed else ""
        return [*filter(None, [missed, f"{met}{compression.sentence}", compression.advice])]
    if not report.cards:
        return []
    name, first = foremost(report), next(iter(report.cards))
    row = _row(report, name)
    facts = [
        *_pruned(report, name),
        *([_speed(report, row)] if row is not None else []),
        *_size(report, name, first, row),
    ]
    what = (
        ran_as(row) if row is not None and report.focus == "latency" else shown_name(report, name)
    )
    sentences = []
    if name == best_candidate(report):
        sentences.append(f"{what} is the best of {len(report.with_role('candidate'))} candidates.")
        what = "It"
    if facts:
        sentences.append(f"{what} {joined(facts)}.")
    scored = form_of(report, row).name if row and report.focus == "latency" else name
    sentences += [f"It {fact}." for fact in _quality(report, scored)]
    sentences += _raised_losses(report)
    if row is not None:
        sentences.append(_price(report, row))
    return [" ".join(filter(None, sentences))]


def card_sentence(made: str, facts: list[str], library: str) -> str:
    """Return the first sentence of a model card.

    Args:
        made: How the model was made, such as `distilled from bert-base-uncased`.
        facts: What it lost, its size and its speed, such as `takes 3 MB`.
        library: What runs it, as Markdown.
    """
    start = plain(f"{made[:1].upper()}{made[1:]}")
    return f"{start}, it {joined([*map(plain, facts), f'runs with {library}'])}."


def card_facts(report: Report, name: str) -> list[str]:
    """Return what a model lost on how many rows, its size, and its speed on which machine."""
    row = next((row for row in report.latency if row.model == name), None)
    speed = [_speed(report, row, machine(report, row.device))] if row is not None else []
    size = _size(report, name, next(iter(report.cards)), row)
    return [*_pruned(report, name), *_quality(report, name), *size, *speed]


def machine(report: Report, device: str) -> str:
    """Return ` on ` and the name of the processor or accelerator that measured; empty if unknown.

    Args:
        report: The report of the measurement.
        device: The device of the measurement, such as `cpu` or `cuda:0`.
    """
    environment = report.environment
    names = [environment.get("cpu")] if device == "cpu" else environment.get("gpus") or []
    return f" on {names[0]}" if names and names[0] else ""


def _row(report: Report, name: str) -> LatencyRow | None:
    """Return the fastest measurement of the model in the first cell, or its first one."""
    fastest = fastest_row(report)
    if fastest is not None and fastest.model == name:
        return fastest
    return next((row for row in report.latency if row.model == name), None)


def _pruned(report: Report, name: str) -> list[str]:
    # Of a single pruning, all models but the baseline are forms.
    is_form = len(report.pruning) == 1 and report.model(name).role != "baseline"
    return [
        f"keeps {percent(p.density, 1)} % of its layers' weights"
        for p in report.pruning
        if p.model == name or is_form
    ]


def _speed(report: Report, row: LatencyRow, on: str = "") -> str:
    """Write the speed-up and the time of a row."""
    where = f"{cell_name(row.cell)}{on}"
    time = f"{'at most ' if row.unstable else ''}{milliseconds(row.stated_ms)} ms"
    ratio = row.speedup
    if ratio is None:
        trust = f" ({UNSTABLE_PHRASE})" if row.unstable else ""
        return f"takes {time} for {where}{trust}"
    baseline = shown_name(report, ratio.baseline)
    if ratio.is_inconclusive:
        unstable = f"the times are unstable; {MEASURE_AGAIN}"
        return f"shows no speed-up over {baseline} ({unstable}; {time} for {where})"
    return f"is {ratio.phrase()} as {baseline} ({ratio.trust()}; {time} for {where})"


def _size(report: Report, name: str, first: str, row: LatencyRow | None) -> list[str]:
    """Write the size of the weights, next to the first model's if that is larger.

    Weights that a backend quantised when it was measured have another size than on disk.
    """
    card, first_card = report.cards[name], report.cards[first]
    own, other = card.bytes, first_card.bytes
    quantised = row is not None and row.dtype in QUANTISED and row.dtype != card.held_in
    if not own or (quantised and report.focus == "latency"):
        return []
    if other > SAME_SIZE * own:
        return [f"takes {bytes_of(own)} instead of {bytes_of(other)}"]
    if own > other and card.held_in != first_card.held_in:
        types = f"in {card.held_in} instead of {bytes_of(other)} in {first_card.held_in}"
        return [f"takes {bytes_of(own)} {types}"]
    return [f"has {bytes_of(own)} of weights"]


def _quality(report: Report, name: str) -> list[str]:
    """Write the first metric of the model, or its difference from the baseline."""
    evaluations = [e for e in report.evaluations if e.model == name and e.metrics]
    if not evaluations:
        return []
    one = evaluations[0]
    metric = next(iter(one.metrics))
    where = f"{one.n:,} rows of {_data(report, one)} ({one.split})"
    if one.n < FEW_ROWS:
        where = f"only {where}, too few to rely on"
    pairs = (
        c
        for c in report.comparisons
        if (c.model, c.set, c.metric) == (name, one.set, metric)
        and (c.task == one.task or one.reference == "teacher")
    )
    if (pair := next(pairs, None)) is not None:
        if one.task == NEIGHBOURS:
            return [_found(report, pair, one, where)]
        return [_difference(report, pair, one, where)]
    text = f"reaches {number(one.metrics[metric])} {metric} on {where}"
    baseline = report.model(name).baseline or next(iter(report.cards))
    same = (
        f"; {shown_name(report, e.model)} has {number(e.metrics[metric])}"
        for e in report.evaluations
        if (e.model, e.task, e.set, e.n) == (baseline, one.task, one.set, one.n)
        and baseline != name
        and metric in e.metrics
    )
    return [f"{text}{next(same, '')}"]


def _raised_losses(report: Report) -> list[str]:
    """Name the students whose held-out loss rose during training.

    The largest member of a family starts as the teacher, so its loss can only rise.
    """
    losses, cards = report.quality.get(HELD_OUT_LOSS, {}), report.cards
    teacher_params = next(iter(cards.values())).params_total
    student = report.recipe.get("student")
    # Of two models that are trained together, it is the name of the second.
    settings = student if isinstance(student, dict) else {}
    is_copied = is_family(settings.get("to") or []) and settings.get("init") != "random"
    raised = []
    for start in report.with_role("untrained"):
        name = start.of or ""
        if is_copied and name in cards and cards[name].params_total == teacher_params:
            continue
        before, after = (losses.get(model, {}).get("loss") for model in (start.name, name))
        # Rounded values differ, so it is no rounding error.
        if before is not None and after is not None and after > before:
            shown = number(before), number(after)
            if shown[0] != shown[1]:
                raised.append(f"of {shown_name(report, name)} from {shown[0]} to {shown[1]}")
    if not raised:
        return []
    return [
        f"Training raised the {HELD_OUT_LOSS} {joined(raised)}: train longer, or with a lower "
        "learning rate."
    ]


def _data(report: Report, one: Evaluation) -> str:
    """Name the data of an evaluation: the benchmark, or the user's file."""
    if report.source is None or is_benchmark(one.task):
        return set_name(one.task, one.set)
    return set_name(short(report.source), one.set)


def _difference(report: Report, pair: Comparison, one: Evaluation, where: str) -> str:
    """Write a gain or a loss in points, with its interval and its rows."""
    baseline = shown_name(report, pair.baseline)
    what = f"{pair.metric} against {baseline}"
    if one.reference == "teacher":
        named = "" if pair.metric == "agreement" else f" ({pair.metric})"
        what = f"agreement with {baseline}{named}"
    return f"{change_text(pair, what)} on {where}"


def _found(report: Report, pair: Comparison, one: Evaluation, where: str) -> str:
    """Write the share of re-embedding's texts that a model finds, and that the old model finds."""
    share, low, high = (percent(1 + x, 1) for x in (pair.difference, pair.low, pair.high))
    others = (
        f"; the {each.model} finds {percent(each.metrics[pair.metric], 1)} %"
        for each in report.evaluations
        if each.task == one.task and each.model not in (pair.model, pair.baseline)
    )
    interval = f"{100 * pair.confidence:.3g} % interval {low} to {high}"
    _, _, cut = pair.metric.partition("@")
    return (
        f"finds {share} % of the {cut} nearest texts of {pair.baseline} "
        f"({interval}{next(others, '')}) on {where}"
    )


def change_text(row: Comparison, what: str) -> str:
    """Write a gain or a loss in points, with its interval, as a predicate."""
    points, low, high = (100 * x for x in (row.difference, row.low, row.high))
    if round(points, 2) > 0:
        change = f"gains {points:.2f} points of {what}"
    else:
        change, low, high = loses(-points, what), -high, -low
    return f"{change} ({points_interval(low, high, row.confidence)})"


def _price(report: Report, row: LatencyRow) -> str:
    """Write the cost in the largest cell of the row's model and of its baseline."""
    form = (row.model, row.backend, row.dtype)
    same = [r for r in report.latency if (r.model, r.backend, r.dtype) == form]
    largest = max(same, key=lambda r: r.cell)
    name = largest.speedup.baseline if largest.speedup else None
    others = (r for r in report.latency if (r.model, r.cell) == (name, largest.cell))
    baseline, price = next(others, None), report.price_per_hour
    return price_sentence(
        price,
        Throughput.of(largest, price),
        Throughput.of(baseline, price) if baseline is not None else None,
    )
