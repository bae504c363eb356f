"""Successive halving: shapes are trained a part of their steps, and only the better ones go on.

Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from kdcli.deploy.untrained import UntrainedTimes
from kdcli.disk import RECIPE_FILE, as_directory
from kdcli.engine.run_dir import RunDir, flatten_recipe
from kdcli.messages import WARNING, log
from kdcli.models.grammar import is_static_shape
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config
from kdcli.models.shape import shape_of
from kdcli.recipe.resolve import flatten
from kdcli.report.finish import RunResult
from kdcli.report.text import duration
from kdcli.verbs.compress.budget import paid_steps
from kdcli.verbs.compress.limits import POINT, GoalSettings
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.shape_timings import closest_first, too_slow
from kdcli.verbs.compress.steps import Step, TrainingCost
from kdcli.verbs.compress.verb_steps import DISTILL, OUTPUTS_ALONE

NEVER = 10**9
"""An evaluation interval that no training reaches, so that it is evaluated only at the end."""
RUNGS = (1, 2)  # Quarters of the steps after which the worse half is stopped
QUARTERS = 4


@dataclass(frozen=True)
class RungScore:
    """The held-out score of a shape after a part of its steps.

    `metric` is the task's first metric, or None if `value` is the held-out loss.
    """

    value: float
    metric: str | None = None

    @property
    def quality(self) -> float:
        """A number that is higher for the better shape."""
        return -self.value if self.metric is None else self.value

    def __str__(self) -> str:
        return f"{self.metric or 'held-out loss'} {self.value:.4f}"


@dataclass(frozen=True)
class _Stopped:
    """A shape that was stopped at a rung."""

    shape: str
    score: RungScore
    steps: int


def try_shapes(search: Search, shapes: Mapping[str, UntrainedTimes]) -> None:
    """Train the shapes that can meet the goal, the best ones to the end, until one meets it."""
    alive = search.without(shapes, too_slow(search.goal, shapes))
    if not alive:
        return
    if len(alive) == 1 and search.recipe.budget is None:
        # A shape without rivals or a budget needs no dry run, and is evaluated only at the end.
        finish_best(search, alive[0], training(search, alive[0], None))
        search.score()
        return
    costs = costs_of(search, sorted(alive, key=lambda shape: -shapes[shape].ms))
    alive = [shape for shape in alive if shape in costs]
    whole = seconds_of_halving(costs) + search.steps.seconds_after_training()
    if search.steps.too_long(whole):
        spend_budget(search, alive)
        return
    stopped: list[_Stopped] = []
    for rung in RUNGS:
        if len(alive) < 2:
            break
        total = {shape: costs[shape].steps for shape in alive}
        tasks = [partial(rung_score, shape=shape, total=total[shape], rung=rung) for shape in alive]
        rung_scores = zip(alive, search.side_by_side(tasks), strict=True)
        scores = {shape: score for shape, score in rung_scores if score is not None}
        alive, worse = halve(search.goal, scores, shapes, last=rung == RUNGS[-1])
        stopped += [_Stopped(one, scores[one], rung_steps(total[one], rung)) for one in worse]
    for best in alive[:1]:
        finish_best(search, best, training(search, best, costs[best].steps))
    search.score()
    # While the goal is missed, the stopped shapes are trained on, the best one first.
    for one in sorted(stopped, key=lambda one: (one.score.quality, one.shape), reverse=True):
        cost = costs[one.shape]
        if why := why_not_finished(search, one, cost):
            search.skip(one.shape, why)
            continue
        train_fully(search, one.shape, training(search, one.shape, cost.steps))
        search.score()


def try_family(search: Search, shapes: Mapping[str, UntrainedTimes]) -> None:
    """Train all shapes at once, and export those that can meet the goal.

    The students share their layers, and each of them is a candidate. The training does not depend
    on the goal, so that another goal only exports and scores members. The largest member has the
    teacher's shape, and is no candidate.
    """
    fast = search.without(shapes, too_slow(search.goal, shapes))
    if not fast:
        return
    teacher = shape_of(load_config(search.teacher))
    family = ",".join([teacher.short, *shapes])
    whole = training(search, family, None)
    step = whole if search.recipe.budget is None else paid_training(search, family)
    if step is None or not all(search.side_by_side([partial(Search.finishes, step=step)])):
        return
    folder = search.steps.path(step)
    tasks = [
        partial(export_student, shape=shape, model=folder / as_directory(shape), parent=folder)
        for shape in fast
    ]
    search.side_by_side(tasks)
    search.score()


def why_not_finished(search: Search, one: _Stopped, cost: TrainingCost) -> str:
    """Return why a stopped shape is not trained to the end and exported; empty if it is."""
    if one.steps >= cost.steps:
        return ""
    is_done = search.steps.is_complete(distilling(search, one.shape))
    met = f"{search.met} meets the goal" if search.met else ""
    if is_done:
        return f"trained for an earlier goal, and not considered now: {met}" if met else ""
    trained = f"trained for {one.steps} of {cost.steps} steps only"
    if met:
        return f"{trained}: {met}"
    if not has_time_to_finish(search, one, cost):
        return f"{trained}: no time is left to finish its training"
    return ""


def has_time_to_finish(search: Search, one: _Stopped, cost: TrainingCost) -> bool:
    """Return whether the budget has time for the remaining steps of a stopped shape.

    `cost` may be the cost of a larger shape. If there is no time for it, the shape's own training
    is estimated.
    """
    rest, after = 1 - one.steps / max(1, cost.steps), search.steps.seconds_after_training()
    if not search.steps.too_long(rest * cost.seconds + after):
        return True
    own = search.cost(distilling(search, one.shape))
    return not own.error and not search.steps.too_long(rest * own.seconds + after)


def costs_of(search: Search, shapes: Sequence[str]) -> dict[str, TrainingCost]:
    """Return the costs of trainings, and skip the shapes whose training would fail.

    `shapes` has the slowest first. Shapes of the same kind that are trained with the same values
    have as many steps, and no other takes longer than the slowest of them, so only its training is
    estimated, unless it would fail.
    """
    costs: dict[str, TrainingCost] = {}
    largest: list[tuple[object, TrainingCost]] = []
    for shape in shapes:
        # Static students have defaults of their own, such as another batch size.
        kind = is_static_shape(shape), distill_keys(search, shape)
        alike = next((cost for known, cost in largest if known == kind), None)
        cost = alike or search.cost(distilling(search, shape))
        if cost.error:
            search.skip(shape, cost.error)
            continue
        if alike is None:
            log(f"{shape}: its training takes about {duration(cost.seconds)}")
            largest.append((kind, cost))
        costs[shape] = cost
    return costs


def seconds_of_halving(costs: Mapping[str, TrainingCost]) -> float:
    """Return the seconds that successive halving takes at most."""
    left = sorted((cost.seconds for cost in costs.values()), reverse=True)
    quarters, done = 0.0, 0
    for rung in RUNGS:
        if len(left) < 2:
            break
        quarters += sum(left) * (rung - done)
        left = left[: 1 if rung == RUNGS[-1] else -(-len(left) // 2)]
        done = rung
    return (quarters + sum(left[:1]) * (QUARTERS - done)) / QUARTERS


def spend_budget(search: Search, shapes: Sequence[str]) -> None:
    """Train the shape that is closest to the teacher for as many steps as the budget pays for, and
    then the others while time is left.

    Halving would give half of the time to shapes that it stops.
    """
    least = 0.0
    for shape in closest_first(search, shapes):
        if search.met and search.goal.is_bounded:
            search.skip(shape, f"not trained: {search.met} meets the goal")
        elif (step := paid_training(search, shape, least)) is not None:
            train_fully(search, shape, step)
            search.score()
            # Another shape is only better if it is trained too.
            least = 1 / QUARTERS


def paid_training(search: Search, shape: str, least: float = 0.0) -> Step | None:
    """Return the step that distils a shape for as many steps as the budget pays for.

    If it pays for none, or for a smaller share of the steps than `least`, skip the shape and return
    None.
    """
    steps, whole = search.steps, distilling(search, shape)
    soonest = steps.seconds_of_dry_run() + steps.seconds_after_training()
    if least and not steps.has_begun(whole) and (why := steps.too_long(soonest)):
        search.skip(shape, f"not trained: even without any steps, {why}")
        return None
    paid = paid_steps(search, whole, search.cost(whole))
    why = paid.why
    if not why and paid.steps < least * paid.total:
        why = f"not trained: the budget pays for {paid.steps:,} of {paid.total:,} steps"
    if why:
        search.skip(shape, why)
        return None
    if paid.steps >= paid.total:
        return training(search, shape, None)
    note = paid.note(shape, steps)
    log(note)
    search.notes.append(note)
    search.shortened[shape] = paid.done
    return distilling(search, shape, steps=paid.steps)


def distilling(
    search: Search,
    shape: str,
    keys: Mapping[str, object] | None = None,
    *,
    steps: int | None = None,
) -> Step:
    """Return the step that distils a shape. The plan's keys override `keys`.

    `steps` is the number of optimiser steps that the budget pays for; with 0 steps, the student is
    only fitted.
    """
    plan = search.recipe.plan.distill
    merged = {**distill_keys(search, shape), **(keys or {}), **dict(flatten(plan))}
    if steps is not None:
        merged = {key: value for key, value in merged.items() if key != "train.epochs"}
        merged |= {"train.max_steps": steps, "train.eval_every": NEVER}
    return search.make.distill(shape, search.teacher, merged, shape)


def distill_keys(search: Search, shape: str) -> dict[str, object]:
    """Return the keys of a distillation that neither the plan nor its recipe gives."""
    if "recipe" in search.recipe.plan.distill:
        return {}
    config = load_config(search.teacher)
    keys = search.make.distill_defaults(shape, config.hidden_size, search.training_rows)
    if keys.get("method") == DISTILL["method"] and layout_for(config).causal:
        # That method compares the attention of all tokens.
        keys |= OUTPUTS_ALONE
    return keys


def training(search: Search, shape: str, total: int | None) -> Step:
    """Return the step that distils a shape in `total` steps and evaluates it at every rung.

    If `total` is None, the shape is evaluated only at the end. A training that has begun keeps its
    evaluations, because it continues only with the same recipe.
    """
    interval = evaluation_interval(search, shape, total)
    keys = {"train.eval_every": interval}
    if interval != NEVER:
        keys["train.checkpoint_every"] = interval
    return distilling(search, shape, keys)


def evaluation_interval(search: Search, shape: str, total: int | None) -> int:
    """Return the number of steps between two evaluations of a training, which keeps the number with
    which it began."""
    step = distilling(search, shape)
    if search.steps.has_begun(step):
        # The step reports a damaged recipe.
        with suppress(OSError, TypeError, ValueError, yaml.YAMLError):
            text = (search.steps.path(step) / RECIPE_FILE).read_text("utf-8")
            if (known := flatten_recipe(text).get("train.eval_every")) is not None:
                return int(json.loads(known))
    # A student that is only fitted has no steps.
    return NEVER if total is None else max(1, rung_steps(total, 1))


def rung_steps(total: int, rung: int) -> int:
    """Return the number of optimiser steps until a rung, at most all of them."""
    return min(total, rung * max(1, total // QUARTERS))


def rung_score(search: Search, shape: str, total: int, rung: int) -> RungScore | None:
    """Train a shape up to a rung and read its score from the log.

    If the training fails or has no time, skip the shape and return None.
    """
    at, step = rung_steps(total, rung), training(search, shape, total)
    if evaluation_interval(search, shape, total) == NEVER:
        # It began without rivals, so it is scored only at its end.
        at = total
    if why := search.steps.run(step, until=at):
        search.skip(shape, why)
        return None
    records = [r for r in RunDir(search.steps.path(step)).read_log() if "held_out" in r]
    # A training that ended before the rung has its last score.
    record = next((r for r in records if r["step"] >= at), records[-1])
    metric, value = next(iter(record.get("metrics", {}).items()), (None, None))
    score = RungScore(float(record["held_out"]["loss"] if value is None else value), metric)
    log(f"{shape} after {at} of {total} steps: {score}")
    return score


def halve(
    goal: GoalSettings,
    scores: Mapping[str, RungScore],
    times: Mapping[str, UntrainedTimes],
    *,
    last: bool,
) -> tuple[list[str], list[str]]:
    """Return the better half of the shapes, after the last rung the best one, and the rest.

    Shapes within `max_drop` of the best one count as equal, and the faster one is better. A loss
    has no unit in common with `max_drop`, so two losses only count as equal if they are equal.
    """
    if not scores:
        return [], []
    best = max(scores, key=lambda shape: scores[shape].quality)
    points = 0.0 if scores[best].metric is None else goal.max_drop or 0.0
    near = scores[best].quality - POINT * points

    def rank(shape: str) -> tuple[bool, float]:
        far = scores[shape].quality < near
        return far, -scores[shape].quality if far else times[shape].ms

    order = sorted(scores, key=rank)
    keep = 1 if last else -(-len(order) // 2)
    for shape in order[keep:]:
        why = f"{best} has {scores[best]}"
        if scores[shape].quality >= near:
            equal = "within --max-drop of the best" if points else "as well"
            why = f"{order[0]} scores {equal} and is faster"
        log(f"stopping {shape} ({scores[shape]}): {why}")
    return order[:keep], order[keep:]


def finish_best(search: Search, shape: str, step: Step) -> None:
    """Train the best shape to the end, and also without the teacher, beside the deferred tasks."""
    fully = partial(train_fully, shape=shape, step=step)
    without = partial(train_without_teacher, shape=shape)
    compares = search.recipe.plan.undistilled and search.make.supervised and search.has_labels
    if search.steps.pool is None or not compares:
        # A training that runs alone is in this process, which has all threads.
        (is_trained,) = search.side_by_side([fully])
        if is_trained and compares:
            without(search)
        return
    is_trained, _ = search.side_by_side([fully, without])
    if not is_trained:
        search.candidates.pop(f"{shape}-undistilled-{search.fastest}", None)


def train_fully(search: Search, shape: str, step: Step) -> bool:
    """Train a shape to the end and export it. Return False if it failed or had no time."""
    if not search.finishes(step):
        return False
    folder = search.steps.path(step)
    export_student(search, shape, folder, folder)
    return True


def export_student(search: Search, shape: str, model: Path, parent: Path) -> None:
    """Export a trained student, also with a trimmed vocabulary where that pays.

    Args:
        search: The search.
        shape: The student's shape, which is its name in the report of a family.
        model: Its directory.
        parent: The directory of its training.
    """
    models, cards = {shape: model}, RunResult.read(parent).report.cards
    card = cards.get(shape) or list(cards.values())[-1]
    large = card.params_embedding > search.recipe.plan.trim_from * card.params_total
    if large:
        name = f"{shape}-trimmed"
        trim = search.make.trim(name, str(model), search.training_text(), {})
        if search.finishes(trim):
            models[name] = search.steps.path(trim)
            notes = search.steps.result(trim).report.notes
            search.notes += [f"{name}: {note}" for note in notes if note.startswith(WARNING)]

    def export(branch: Search, name: str, folder: Path) -> None:
        branch.export(f"{name}-{search.fastest}", folder, search.fastest, [parent])

    search.side_by_side([partial(export, name=name, folder=at) for name, at in models.items()])


def train_without_teacher(search: Search, shape: str) -> bool:
    """Train a shape on the labels alone and export it, to show what the teacher adds.

    Return False if it was not trained.
    """
    default, plan = distill_keys(search, shape), search.recipe.plan.distill
    schedule = {key: value for key, value in default.items() if key.startswith("train.")}
    own = {key: value for key, value in plan.items() if key != "loss"}
    keys = {**schedule, **dict(flatten(own))}
    keys |= OUTPUTS_ALONE | {"kd.weight": 0.0}
    name = f"{shape}-undistilled"
    step = search.make.distill(name, search.teacher, keys, shape)
    if not search.finishes(step):
        return False
    model = search.steps.path(step)
    search.export(f"{name}-{search.fastest}", model, search.fastest, [model])
    return True
