"""Show the head of a report: its title and the main table."""

from collections.abc import Iterable
from dataclasses import replace

from kdcli.data.tasks import named_tasks
from kdcli.deploy.measurements import LatencyRow
from kdcli.listing import listed
from kdcli.report.schema import Pruning, Quality, Report
from kdcli.report.sections.candidates import compressed_name
from kdcli.report.sections.evaluations import evaluations_by_task, set_name
from kdcli.report.sections.kept_weights import best_pruned
from kdcli.report.sections.timings import (
    NOISY_NOTE,
    UNSTABLE_NOTE,
    cells,
    first_cell,
    interval,
)
from kdcli.report.text import (
    LOWER_IS_BETTER,
    ReportSection,
    card_shape,
    count,
    data_name,
    duration,
    filled,
    names_in,
    number,
    on_disk,
    percent,
    short,
)
from kdcli.types import OWN

MAX_TITLE_NAMES = 5  # models that a title names
MAX_COLUMNS = 6  # with more models, the main table has a row for each
MAX_SETS = 3  # with more sets, a task has a table of its own only


def title(report: Report) -> str:
    """Return the title of a report.

    Examples: `bert-base-uncased → 12x384 (assistant) → 6x384`, `bert-base-uncased on sst2`,
    `bert-base-uncased on sst2, smp 90 %`, `6x384, 3x384 compared with 12x768`, and
    `6x128 and 3x128, co-distillation`.
    """
    name, task = short(origin(report)), _task(report)
    scored, end = ", ".join(evaluations_by_task(report)) or task, ""
    if report.compression is not None:
        what = f"{compressed_name(report)} compressed to {report.compression.chosen}"
        where = task if is_benchmark(task) else ""
    elif report.focus == "latency":
        baseline, *others = report.cards
        what = f"{listed(others, MAX_TITLE_NAMES)} compared with {baseline}" if others else baseline
        where = ""
    elif report.with_role("peer"):
        what, where = _pair(report), task
    elif report.pruning:
        methods = ", ".join(dict.fromkeys(p.method for p in report.pruning))
        sparsities = dict.fromkeys(f"{100 * p.sparsity:g} %" for p in report.pruning)
        what, where, end = name, scored, f", {methods} {', '.join(sparsities)}"
    elif report.with_role("teacher"):
        # Tasks that only score a distillation on text do not belong to its title.
        what, where = _chain(report), task
    elif report.with_role("trimmed"):
        what, where = f"{name} with a smaller vocabulary", ""
    elif report.with_role("adapted"):
        what, where = f"{name} adapted to an index", ""
    else:
        models = [report.model(card) for card in report.cards]
        names = (name if model.role == "finetuned" else model.name for model in models)
        what = listed(names, MAX_TITLE_NAMES)
        where = scored
    return f"{' on '.join(filter(None, [what, where]))}{end}"


def card_title(report: Report, name: str) -> str:
    """Return the title of a model's card: what it was made from, and what it is.

    Example: `bert-base-uncased distilled to 6x384 on sst2`.
    """
    model = report.model(name)
    roles = {"finetuned": "fine-tuned", "pruned": "pruned", "adapted": "adapted to an index"}
    how = roles.get(model.role, "")
    if model.role in ("student", "assistant") and model.card is not None:
        how = f"distilled to {card_shape(model.card)}"
    if not how:
        return title(report)
    what = f"{short(model.source or origin(report))} {how}"
    return " on ".join(filter(None, [what, _task(report)]))


def is_benchmark(task: str) -> bool:
    """Return whether a task has data of its own, unlike the task of a user's files."""
    return task != OWN and task in named_tasks()


def shown_name(report: Report, name: str) -> str:
    """Name a model in a sentence: the model's own name where the report's names its role."""
    model, source = report.model(name), short(origin(report))
    if report.pruning:
        own = [p for p in report.pruning if p.model == name]
        alike = [p for p in own for q in report.pruning if _pruning(p) == _pruning(q)]
        if len(alike) > 1:
            return f"{source}, pruned as {name},"
        if own and len(report.pruning) > 1:
            return f"{source} with {own[0].method} {100 * own[0].sparsity:g} %"
        return f"{name} {source}"
    if model.card is not None and report.with_role("student") == [model]:
        return card_shape(model.card)
    if model.role == "finetuned":
        return f"{source}, fine-tuned,"
    if model.role == "trimmed":
        return f"{source} with a smaller vocabulary"
    is_original = model.role == "teacher" or bool(report.with_role("trimmed"))
    if model.card is not None and is_original:
        return short(model.card.id)
    return name


def _pruning(model: Pruning) -> tuple[str, float]:
    """Return the method and the sparsity, which the variants of an ablation have in common."""
    return model.method, model.sparsity


def _chain(report: Report) -> str:
    """Name the teacher, the assistant and the students of a distillation."""
    cards = report.cards
    students = [m for m in report.with_role("student", "candidate") if m.card is not None]
    shapes = [card_shape(cards[model.name]) for model in students]
    steps = [short(cards[model.name].id) for model in report.with_role("teacher")]
    for assistant in report.with_role("assistant"):
        shape = card_shape(cards[assistant.name])
        steps.append(f"{shape} (assistant)" if students else shape)
    if same := variants(report):
        shapes = [f"{card_shape(cards[same[0]])} in {len(same)} variants"]
    return " → ".join([*steps, *filter(None, [", ".join(shapes)])])


def variants(report: Report) -> list[str]:
    """Return the students of an ablation, the recipe itself first, if they have one shape."""
    cards = report.cards
    names = [model.name for model in report.models if model.variant is not None]
    return names if len({card_shape(cards[name]) for name in names}) == 1 else []


def origin(report: Report) -> str:
    """Return the model that the report's models were made from; empty if there was none."""
    sources = (model.source for model in report.models if model.source is not None)
    # Reports of an earlier version name the model in the recipe only.
    return next(sources, None) or str(report.recipe.get("model") or "")


def how_trained(report: Report) -> str:
    """Describe the length of the training; empty if there was none."""
    t = report.training
    if t is None or not t.steps:
        return ""
    others = len(report.with_role("student", "peer")) - 1
    together = f", together with {others} other model{'s' * (others > 1)}" if others > 0 else ""
    return f"{t.steps:,} steps, {t.tokens:,} tokens, {duration(t.seconds)}{together}"


def _pair(report: Report) -> str:
    """Name two models that were trained together, and their frozen teacher."""
    recipe = report.recipe
    frozen = (recipe.get("community") or {}).get("model")
    under = f" under {short(str(frozen))}" if frozen else ""
    teacher, student = short(str(recipe["teacher"])), short(str(recipe["student"]))
    return f"{teacher} and {student}, {recipe['mode']}{under}"


def _task(report: Report) -> str:
    """Return the task of the recipe, or the name of the user's own data."""
    return data_name(str(report.recipe.get("task") or ""), report.source)


def overview(report: Report) -> ReportSection:
    """Return the main table: a row for each model, the teacher first.

    Models without a card come last: students before their training, and forms of other models.
    """
    # A report about latency has a table for each cell instead.
    by_cell = {} if report.focus == "latency" else dict(sorted(cells(report).items()))
    measured = {row.model for rows in by_cell.values() for row in rows}
    quality = _quality(report)
    scored = {name for models in report.quality.values() for name in models}
    names = list(report.cards)
    for model in report.with_role("untrained", "undistilled"):
        if model.name in scored and model.name not in names:
            names.append(model.name)
    names += [m.name for m in report.with_role("form") if m.card is None and m.name in measured]
    rows = []
    for name in names:
        row = {"model": name} | (_sizes(report, name) if name in report.cards else {})
        row |= _times(name, by_cell.values())
        for task, models in quality.items():
            for metric in names_in(models.values()):
                column = task if metric == "loss" else f"{task} {metric}"
                row[column] = number(models.get(name, {}).get(metric))
        rows.append(row)
    return filled("Models" if len(report.cards) > 1 else "Model", rows, style="tight")


def _times(name: str, tables: Iterable[list[LatencyRow]]) -> dict[str, str]:
    """Return a model's times, then its speed-ups, by cell; of several rows the first counts."""
    times, speedups = {}, {}
    for rows in tables:
        row = next((row for row in rows if row.model == name), None)
        cell = f"{rows[0].batch_size}x{rows[0].seq_len}"
        times[f"ms {cell}"] = "" if row is None else _time(row)
        speedups[f"speed-up {cell}"] = "" if row is None else interval(row.speedup)
    return times | speedups


def _sizes(report: Report, name: str) -> dict[str, str]:
    """Return the columns that describe the size of a model."""
    cards = report.cards
    card = cards[name]
    # Skip a column that only repeats the models' names.
    repeated = all(name == card_shape(card) for name, card in cards.items())
    embedding, transformer = card.paper_params_embedding, card.paper_params_transformer
    kept = next((percent(p.density, 1) for p in report.pruning if p.model == name), "")
    columns = {
        "shape": "" if repeated else card_shape(card),
        "parameters": count(card.params_total),
        "(embedding)": count(card.params_embedding),
        "(transformer)": count(card.params_transformer),
        "papers: embedding": "" if embedding is None else count(embedding),
        "papers: transformer": "" if transformer is None else count(transformer),
        "not zero": count(card.params_nonzero) if report.pruning else "",
        "weights": on_disk(card),
        "multiply-adds": count(card.multiply_adds),
        "weights kept, %": kept,
    }
    if card.is_served:
        return dict.fromkeys(columns, "") | {"shape": columns["shape"]}
    return columns


def _time(row: LatencyRow) -> str:
    text = f"{row.stated_ms:.1f}"
    if row.unstable:
        return f"≤{text}, unstable"
    return text if row.status == "ok" else f"{text} ({row.status})"


def _quality(report: Report) -> Quality:
    """Return the quality without tasks of many sets, which have tables of their own."""
    skipped = set()
    for evaluations in evaluations_by_task(report).values():
        if len({e.set for e in evaluations}) > MAX_SETS:
            skipped |= {set_name(e.task, e.set) for e in evaluations}
    return {task: models for task, models in report.quality.items() if task not in skipped}


def models_section(report: Report) -> ReportSection:
    """Return the main table.

    The models are its rows in a report about latency, and if there are more than `MAX_COLUMNS`.
    Otherwise they are its columns, because there are few models and many facts.
    """
    table = overview(report)
    if report.focus == "latency" or len(table.rows) > MAX_COLUMNS:
        return table
    is_distilled = report.with_role("teacher") and report.with_role("student")
    first, *facts = map(list, zip(table.columns, *table.rows, strict=True))
    return replace(
        table,
        title="Teacher and student" if is_distilled else table.title,
        columns=["", *first[1:]],
        rows=facts,
        note=_models_note(report, first),
        style="models narrow" if len(first) == 2 else "models",
    )


def _models_note(report: Report, names: list[str]) -> str:
    """Explain the students without distillation and the unstable measurements in the table."""
    start = "Undistilled: a student of the same shape, started in the same way and "
    notes = []
    if any(model.name in names for model in report.with_role("untrained")):
        through = report.with_role("assistant") and report.with_role("student")
        notes.append(f"{start}not trained{'; the notes say from which model' if through else ''}.")
    if any(model.name in names for model in report.with_role("undistilled")):
        notes.append(f"{start}fine-tuned without a teacher.")
    shown = [row for row in report.latency if row.model in names]
    if any(row.unstable or (row.speedup and row.speedup.unstable) for row in shown):
        notes.append(UNSTABLE_NOTE)
    if any(row.status == "noisy" and not row.unstable for row in shown):
        notes.append(NOISY_NOTE)
    return " ".join(notes)


def foremost(report: Report) -> str:
    """Return the model of the first sentence.

    That is the fastest model of a report about latency, the best candidate of several, the best
    pruned model, the recipe itself among its variants, or else the last model.
    """
    if report.focus == "latency" and (fastest := fastest_row(report)):
        return fastest.model
    if (best := best_candidate(report)) is not None:
        return best
    return best_pruned(report) or (variants(report) or list(report.cards)[-1:])[0]


def best_candidate(report: Report) -> str | None:
    """Return the candidate with the best scores, of several candidates with the same scores.

    The first metric of each task decides. The result is None if the candidates cannot be compared.
    """
    names = [model.name for model in report.with_role("candidate")]
    values = {
        name: {
            task: next(iter(models[name].items()))
            for task, models in report.quality.items()
            if models.get(name)
        }
        for name in names
    }
    metrics = {
        tuple((task, metric) for task, (metric, _) in each.items()) for each in values.values()
    }
    if report.focus == "latency" or len(names) < 2 or len(metrics) != 1:
        return None
    (scored,) = metrics
    if not scored or any(metric in LOWER_IS_BETTER for _, metric in scored):
        return None
    return max(names, key=lambda name: sum(value for _, value in values[name].values()))


def fastest_row(report: Report) -> LatencyRow | None:
    """Return the row with the highest stated speed-up of the first cell.

    With a teacher, only the foremost student counts.
    """
    rows = [row for row in first_cell(report) if row.speedup is not None]
    if report.with_role("teacher") and report.focus == "quality":
        rows = [row for row in rows if row.model == foremost(report)]
    return max(rows, key=lambda row: (row.speedup and row.speedup.stated) or 0.0, default=None)
