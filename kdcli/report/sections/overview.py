"""What a report is of and how its models were made, its main table, and the few numbers to see first."""

import re
from statistics import fmean

from kdcli.report.schema import (
    ASSISTANT,
    FINETUNED,
    TEACHER,
    UNDISTILLED,
    LatencyRow,
    Report,
    Speedup,
)
from kdcli.report.sections.evaluations import set_name, tasks
from kdcli.report.sections.latency import (
    BENCHMARK,
    cells,
    compared_with,
    interval,
    ran_as,
    scored_as,
    speedup_of,
)
from kdcli.report.sections.pruning import best_pruned
from kdcli.report.text import (
    Section,
    Table,
    count,
    duration,
    filled,
    names_of,
    number,
    on_disk,
    percent,
    short,
)

COTRAIN = "cotrain"  # The command whose reports are of two models trained together
FEW_NAMES = 5  # Models up to which a title names each that was measured beside another
SHAPE = re.compile(r"\d+x\d+\S*")
FEW_SETS = 3  # Sets of a task up to which each stands in the main table too


def title(report: Report) -> str:
    """`bert-base-uncased → 12x384 (assistant) → 6x384`, `bert-base-uncased on sst2`, `bert-base-uncased on sst2, smp
    90 %`, `6x384, 3x384 beside 12x768`, or `6x128 and 3x128, co-distillation`."""
    if report.command == BENCHMARK:
        baseline, *others = report.models
        more = f" and {len(others) - FEW_NAMES} more" if len(others) > FEW_NAMES else ""
        return f"{', '.join(others[:FEW_NAMES])}{more} beside {baseline}" if others else baseline
    if report.command == COTRAIN:
        return _pair(report)
    if report.pruning:
        methods = ", ".join(dict.fromkeys(p.method for p in report.pruning))
        sparsities = ", ".join(
            f"{100 * s:g} %" for s in dict.fromkeys(p.sparsity for p in report.pruning)
        )
        return f"{_on_tasks(report, short(origin(report)))}, {methods} {sparsities}"
    if TEACHER not in report.models:
        models = [short(origin(report)) if name == FINETUNED else name for name in report.models]
        return _on_tasks(report, ", ".join(models))
    (_, teacher), *others_of = report.models.items()
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in others_of}
    steps = [short(teacher.id)]
    if len(shapes) > 1 and ASSISTANT in shapes:
        steps.append(f"{shapes.pop(ASSISTANT)} (assistant)")
    alike = variants(report)
    students = (
        f"{shapes[alike[0]]} in {len(alike)} variants" if alike else ", ".join(shapes.values())
    )
    chain = " → ".join(filter(None, [*steps, students]))
    # Tasks that only score a distillation on text are no part of what it was.
    return f"{chain} on {short(_task(report))}" if _task(report) else chain


def variants(report: Report) -> list[str]:
    """The students of an ablation, which have one shape and differ in how they were made; the first is the recipe
    itself. Empty where students differ in shape, or there is one."""
    students = {
        name: card for name, card in report.models.items() if name not in (TEACHER, ASSISTANT)
    }
    alike = (
        TEACHER in report.models
        and len({(card.layers, card.hidden) for card in students.values()}) == 1
    )
    return list(students) if alike and len(students) > 1 else []


def origin(report: Report) -> str:
    """What the models of a report were made from: the teacher, or the recipe's model; empty where there was none."""
    recipe = report.recipe
    if report.command == COTRAIN:
        frozen = (recipe.get("community") or {}).get("model")
        sources = [frozen, recipe.get("base"), recipe["teacher"], recipe["student"]]
        return next(
            (str(source) for source in sources if source and not SHAPE.fullmatch(str(source))), ""
        )
    if TEACHER in report.models and not report.pruning:
        return report.models[TEACHER].id
    return str(recipe.get("model") or next(iter(report.models.values())).id)


def how_made(report: Report) -> str:
    """How the models were made, as the second half of a sentence."""
    recipe, source = report.recipe, (report.recipe.get("data") or {}).get("source")
    text = f" on {short(str(source))}" if source else ""
    if report.command == COTRAIN:
        weights = ":".join(f"{weight:g}" for weight in recipe["weights"])
        how = (
            f"trained together as {_pair(report)}{'' if _task(report) else text}, weights {weights}"
        )
    elif report.pruning:
        shares = ", ".join(f"{percent(p.density, 1)} %" for p in report.pruning)
        how = f"{_on_tasks(report, f'pruned from {short(origin(report))}')} with {report.pruning[0].method}"
        how += f", {shares} of the weights of its layers kept and the others zero"
    elif TEACHER in report.models:
        teacher, method = report.models[TEACHER], recipe.get("method")
        how = f"distilled from {short(teacher.id)} ({teacher.layers}x{teacher.hidden})"
        how += (f" with {method}" if method else "") + text
    else:
        how = _on_tasks(report, f"fine-tuned from {short(origin(report))}")
    if t := report.training:
        how += f": {t.steps:,} steps, {t.tokens:,} tokens, {duration(t.seconds)}"
    return how


def _pair(report: Report) -> str:
    """Two models trained together, what they did it on and which frozen model they learned from."""
    recipe = report.recipe
    frozen = (recipe.get("community") or {}).get("model")
    both = f"{short(str(recipe['teacher']))} and {short(str(recipe['student']))}, {recipe['mode']}"
    return (
        both
        + (f" under {short(str(frozen))}" if frozen else "")
        + (f" on {_task(report)}" if _task(report) else "")
    )


def _on_tasks(report: Report, what: str) -> str:
    """With the tasks that were scored; before any was, with that of the recipe."""
    names = list(tasks(report)) or ([short(_task(report))] if _task(report) else [])
    return " on ".join(filter(None, [what, ", ".join(names)]))


def _task(report: Report) -> str:
    return str(report.recipe.get("task") or "")


def overview(report: Report) -> Table:
    """One row a model, teacher first, then undistilled students and forms of a model without files of their own."""
    # Those of a benchmark have a table of their own for each cell.
    batches = [] if report.command == BENCHMARK else sorted(cells(report))
    further = [
        n + UNDISTILLED
        for n in report.models
        if any(n + UNDISTILLED in m for m in report.quality.values())
    ]
    further += dict.fromkeys(
        row.model for row in report.latency if batches and row.model not in report.models
    )
    quality = _quality(report)
    columns = [
        (task, metric) for task, models in quality.items() for metric in names_of(models.values())
    ]
    # The first row of each model in a cell.
    firsts = {
        f"{c[0]}x{c[1]}": {row.model: row for row in reversed(cells(report)[c])} for c in batches
    }
    rows = []
    for name in [*report.models, *further]:
        measured = {cell: by_model.get(name) for cell, by_model in firsts.items()}
        row = {"model": name} | (_sizes(report, name) if name in report.models else {})
        row |= {f"ms {cell}": _median(r) if r else "" for cell, r in measured.items()}
        row |= {
            f"speed-up {cell}": interval(speedup_of(report, r)) if r else ""
            for cell, r in measured.items()
        }
        for task, metric in columns:
            column = task if metric == "loss" else f"{task} {metric}"
            row[column] = number(quality[task].get(name, {}).get(metric))
        rows.append(row)
    return filled(rows)


def _sizes(report: Report, name: str) -> dict[str, str]:
    """What a model weighs."""
    card, shapes = (
        report.models[name],
        {name: f"{c.layers}x{c.hidden}" for name, c in report.models.items()},
    )
    named = report.command == BENCHMARK and all(name == shape for name, shape in shapes.items())
    embedding, transformer = card.paper_params_embedding, card.paper_params_transformer
    return {
        "shape": "" if named else shapes[name],
        "parameters": count(card.params_total),
        "(embedding)": count(card.params_embedding),
        "(transformer)": count(card.params_transformer),
        "papers: embedding": "" if embedding is None else count(embedding),
        "papers: transformer": "" if transformer is None else count(transformer),
        "not zero": count(card.params_nonzero) if report.pruning else "",
        "size": on_disk(card),
        "multiply-adds": count(card.multiply_adds),
        "weights kept, %": next(
            (percent(p.density, 1) for p in report.pruning if p.model == name), ""
        ),
    }


def _median(row: LatencyRow) -> str:
    return f"{row.p50_ms:.1f}" + ("" if row.status == "ok" else f" ({row.status})")


def _quality(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """Quality but that of the sets of a task with many, which have a table of their own."""
    many = [
        same_task
        for same_task in tasks(report).values()
        if len({e.set for e in same_task}) > FEW_SETS
    ]
    left_out = {set_name(e.task, e.set) for same_task in many for e in same_task}
    return {task: models for task, models in report.quality.items() if task not in left_out}


def models_section(report: Report) -> Section:
    """The main table: a row a model of a benchmark; else a column a model, for there are few models and many facts."""
    table = overview(report)
    title = "Models" if len(report.models) > 1 else "Model"
    if report.command == BENCHMARK:
        return Section(title, Table(table.header, table.rows, style="tight"))
    if TEACHER in report.models:
        title = "Teacher and student"
    note = ""
    if any(row[0].endswith(UNDISTILLED) for row in table.rows):
        chain = (
            "; the notes say from which model"
            if ASSISTANT in report.models and len(report.models) > 2
            else ""
        )
        how = "fine-tuned without a teacher" if report.recipe.get("task") else f"not trained{chain}"
        note = f"Undistilled: a student of the same shape, started in the same way and {how}."
    first, *facts = map(list, zip(table.header, *table.rows, strict=True))
    return Section(
        title,
        Table(
            ["", *first[1:]], facts, note, style="models narrow" if len(first) == 2 else "models"
        ),
    )


def about(report: Report) -> str:
    """The model that the facts are about, where several could be meant."""
    return foremost(report) if len(report.models.keys() - {TEACHER, ASSISTANT}) > 1 else ""


def foremost(report: Report) -> str:
    """The model of the first numbers: the fastest of a benchmark, the best pruned one, the recipe itself of variants,
    else the last."""
    if report.command == BENCHMARK and (fastest := _fastest(report)):
        return fastest[1].model
    return best_pruned(report) or (variants(report) or list(report.models)[-1:])[0]


def facts(report: Report) -> list[tuple[str, str]]:
    """The few numbers to see first: of one model, beside the first."""
    first, name = next(iter(report.models)), foremost(report)
    card, baseline = report.models[name], report.models[first]
    pruned, fastest = (
        [p for p in report.pruning if p.model == name] or report.pruning[:1],
        _fastest(report),
    )
    shown = [
        (f"{percent(p.density, 1)} %", f"of the layers' weights kept, {p.method}", "")
        for p in pruned
    ]
    for task, models in (_quality(report) | _means(report)).items():
        # The score of what was as fast as is said, such as an int8 form.
        scored = scored_as(fastest[1], models) if fastest and report.command == BENCHMARK else name
        own, before, other = (models.get(n, {}) for n in (scored, name + UNDISTILLED, first))
        # The first metric of a task is the one that matters.
        metric = next(iter(own), "loss")
        if metric != "loss":
            shown.append((number(own[metric]), f"{metric} on {task}", number(other.get(metric))))
        elif own.get("loss") and "loss" in before:
            shown.append(
                (
                    f"{before['loss'] / own['loss']:.1f}×",
                    f"lower {task} than before distillation",
                    "",
                )
            )
    if fastest:
        best, row = fastest
        ran = ran_as(row) if report.command == BENCHMARK else row.model
        where = f"{best.batch_size} × {best.seq_len} tokens ({best.low:.1f}–{best.high:.1f})"
        shown.append(
            (
                f"{best.median:.1f}×",
                f"the speed of {compared_with(report, row)}: {ran}, {where}",
                "",
            )
        )
    rows = [row for row in report.latency if row.model == name and not pruned and not fastest]
    shown += [
        (f"{row.p50_ms:.1f} ms", f"{row.batch_size} × {row.seq_len} tokens", "") for row in rows[:1]
    ]
    shown.append((on_disk(card), "on disk", on_disk(baseline)))
    if card.multiply_adds != baseline.multiply_adds:
        shown.append((count(card.multiply_adds), "multiply-adds", count(baseline.multiply_adds)))
    return [
        (v, f"{what}; {first} {beside}" if beside and first != name else what)
        for v, what, beside in shown
    ]


def _fastest(report: Report) -> tuple[Speedup, LatencyRow] | None:
    """The best speed-up of the first cell: of the foremost student, else of any model."""
    rows = next(iter(cells(report).values()), [])
    if TEACHER in report.models and report.command != BENCHMARK and not report.pruning:
        rows = [row for row in rows if row.model == foremost(report)]
    ratios = [(s, row) for row in rows if (s := speedup_of(report, row))]
    return max(ratios, key=lambda pair: pair[0].median, default=None)


def _means(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """Means over the sets of a task with many, as `quality`."""
    quality: dict[str, dict[str, dict[str, float]]] = {}
    for task, evaluations in tasks(report).items():
        sets = len({e.set for e in evaluations})
        for model in dict.fromkeys(e.model for e in evaluations) if sets > FEW_SETS else ():
            own = [e.metrics for e in evaluations if e.model == model]
            means = {
                metric: fmean(m[metric] for m in own)
                for metric in own[0]
                if all(metric in m for m in own)
            }
            quality.setdefault(f"{task} (mean of {sets} sets)", {})[model] = means
    return quality
