"""What a report is of and how its models were made, in a line."""

from __future__ import annotations

import re

from kdcli.report.schema import ASSISTANT, FINETUNED, TEACHER, Report
from kdcli.report.sections.evaluations import tasks
from kdcli.report.sections.latency import BENCHMARK
from kdcli.report.text import duration, percent, short

COTRAIN = "cotrain"  # The command whose reports are of two models trained together
FEW_NAMES = 5  # Models up to which a title names each that was measured beside another
SHAPE = re.compile(r"\d+x\d+\S*")


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
        sparsities = ", ".join(f"{100 * s:g} %" for s in dict.fromkeys(p.sparsity for p in report.pruning))
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
    students = f"{shapes[alike[0]]} in {len(alike)} variants" if alike else ", ".join(shapes.values())
    chain = " → ".join(filter(None, [*steps, students]))
    # Tasks that only score a distillation on text are no part of what it was.
    return f"{chain} on {short(_task(report))}" if _task(report) else chain


def variants(report: Report) -> list[str]:
    """The students of an ablation, which have one shape and differ in how they were made; the first is the recipe
    itself. Empty where students differ in shape, or there is one."""
    students = {name: card for name, card in report.models.items() if name not in (TEACHER, ASSISTANT)}
    alike = TEACHER in report.models and len({(card.layers, card.hidden) for card in students.values()}) == 1
    return list(students) if alike and len(students) > 1 else []


def origin(report: Report) -> str:
    """What the models of a report were made from: the teacher, or the recipe's model; empty where there was none."""
    recipe = report.recipe
    if report.command == COTRAIN:
        frozen = (recipe.get("community") or {}).get("model")
        sources = [frozen, recipe.get("base"), recipe["teacher"], recipe["student"]]
        return next((str(source) for source in sources if source and not SHAPE.fullmatch(str(source))), "")
    if TEACHER in report.models and not report.pruning:
        return report.models[TEACHER].id
    return str(recipe.get("model") or next(iter(report.models.values())).id)


def how_made(report: Report) -> str:
    """How the models were made, as the second half of a sentence."""
    recipe, source = report.recipe, (report.recipe.get("data") or {}).get("source")
    text = f" on {short(str(source))}" if source else ""
    if report.command == COTRAIN:
        weights = ":".join(f"{weight:g}" for weight in recipe["weights"])
        how = f"trained together as {_pair(report)}{'' if _task(report) else text}, weights {weights}"
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
    if report.training:
        t = report.training
        how += f": {t.steps:,} steps, {t.tokens:,} tokens, {duration(t.seconds)}"
    return how


def _pair(report: Report) -> str:
    """Two models trained together, what they did it on and which frozen model they learned from."""
    recipe = report.recipe
    frozen = (recipe.get("community") or {}).get("model")
    both = f"{short(str(recipe['teacher']))} and {short(str(recipe['student']))}, {recipe['mode']}"
    return both + (f" under {short(str(frozen))}" if frozen else "") + (f" on {_task(report)}" if _task(report) else "")


def _on_tasks(report: Report, what: str) -> str:
    """With the tasks that were scored; before any was, with that of the recipe."""
    names = list(tasks(report)) or ([short(_task(report))] if _task(report) else [])
    return " on ".join(filter(None, [what, ", ".join(names)]))


def _task(report: Report) -> str:
    return str(report.recipe.get("task") or "")
