"""Which candidates are tried, from cheap to dear, and how far each is trained.

1. The model itself on every backend. 2. Shapes from large to small; those whose untrained latency misses the goal are
left out before any training, the others are trained by successive halving (Jamieson and Talwalkar 2016,
https://arxiv.org/abs/1502.07943). 3. The model pruned and compacted.
"""

import json
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from kdcli.deploy.latency import CELLS, Protocol, Subject, measure_latency
from kdcli.deploy.runners import check_backend
from kdcli.engine.device import choose_device
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import MachineError, UsageError
from kdcli.models.card import describe
from kdcli.models.layout import PATHS
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.shape import build_student, parse_shape, shape_of
from kdcli.models.training_rows import NO_ROWS
from kdcli.report.text import duration
from kdcli.report.views import short
from kdcli.types import ModelShape
from kdcli.verbs.compress.judge import LIMITS, POINT, Judged, choose, is_bounded, is_sure, judge
from kdcli.verbs.compress.recipes import RERANK, set_options
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.verbs.compress.work import Work, export_arguments, product

DISTILL = {"method": "tinybert", "stage": "joint"}
"""One stage, so that one learning curve tells how far a student is: layers, logits and labels together."""
RUNGS = (1, 2)  # Quarters of the steps after which the worse half is dropped
QUARTERS = 4
PRUNE = {"sparsity": [0.9]}
TEACHER = "teacher"


@dataclass
class Candidate:
    """What is known of a way to a smaller model: `left_out` says why it was not finished, `parent` is the shape that
    was trained for it."""

    name: str
    folder: Path | None = None
    left_out: str = ""
    parent: str | None = None


@dataclass
class Search:
    """The state of a planned compression; `untrained` has milliseconds and speed-up of each shape."""

    work: Work
    teacher: str
    fastest: str = ""  # Backend that shapes are exported to
    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    judged: Judged | None = None

    @property
    def goal(self) -> GoalSettings:
        return self.work.recipe.goal

    def leave_out(self, name: str, why: str, parent: str | None = None) -> None:
        """Say that a candidate is not tried, or not finished."""
        Progress.log(f"{name} is left out: {why}")
        self.candidates[name] = Candidate(name, None, why, parent)

    def made(self, name: str, arguments: list[str], parent: str | None = None) -> bool:
        """Run a step; False, with its candidate left out, where it failed or had no time."""
        if why := self.work.step(name, arguments):
            self.leave_out(name, why, parent)
        return not why

    def write(
        self,
        name: str,
        model: Path | str,
        backend: str,
        parent: str | None,
        *,
        needed: bool = False,
    ) -> str:
        """Write a model for a backend; returns why that failed, or an empty string. `parent` is the step that trained
        it. int8 keeps the products in float32 without which it loses more than the goal allows, if that helps."""
        plain, bound = (
            [*export_arguments(model, backend), *self.work.pooling],
            self.int8_bound(parent),
        )
        if backend.endswith("-int8") and bound > 0:
            gated = [*plain, *self.work.on_task(), "--max-drop", f"{bound:.4g}"]
            if not (
                why := self.work.step(name, gated, key=f"run {name} within {bound:.4g} points")
            ):
                return ""
            Progress.log(f"{name} is quantised without a bound: {why}")
        return self.work.step(name, plain, needed=needed)

    def int8_bound(self, parent: str | None) -> float:
        """Points that int8 may lose: of `max_drop` what training left over; 0 where nothing is bounded or left."""
        bound = self.goal.max_drop or 0.0
        if self.work.kind == RERANK:
            return 0.0  # Exports are not judged by rankings
        rows = self.work.judged(parent).report.evaluations if parent else []
        scores: dict[str, list[float]] = {}
        for row in rows:
            scores.setdefault(row.model, []).append(next(iter(row.metrics.values())))
        if TEACHER not in scores or len(scores) == 1:
            return bound  # What training lost is not known
        own = next(name for name in scores if name != TEACHER)
        return bound - max(0.0, fmean(scores[TEACHER]) - fmean(scores[own])) / POINT

    def export(self, name: str, model: Path | str, backend: str, parent: str | None = None) -> None:
        """Write a model for a backend as a candidate; `parent` is the step that trained it."""
        if why := self.write(name, model, backend, parent):
            self.leave_out(name, why, parent)
        else:
            self.candidates[name] = Candidate(name, self.work.path(name), "", parent)

    @property
    def backends(self) -> list[str]:
        """The backends that can be used here."""
        return [
            name
            for name in self.work.recipe.plan.backends
            if not self.candidates.get(name, Candidate("")).left_out
        ]

    def judge(self, name: str) -> bool:
        """Judge what is there; True where the goal is met with confidence and nothing faster is asked for."""
        finished = {c.name: c.folder for c in self.candidates.values() if c.folder is not None}
        if not finished:
            whys = "; ".join(f"{c.name}: {c.left_out}" for c in self.candidates.values())
            raise MachineError(f"no candidate could be made: {whys}")
        self.judged = judge(self.work, name, self.teacher, finished)
        chosen, missed = choose(self.goal, self.judged)
        return not missed and is_bounded(self.goal) and is_sure(self.goal, self.judged, chosen)

    @property
    def met(self) -> bool:
        """Whether a candidate that was judged meets the goal."""
        return self.judged is not None and not choose(self.goal, self.judged)[1]


def check_backends(search: Search) -> None:
    """Leave out the backends that are not installed. Raises UsageError: an unknown one; MachineError: none is left."""
    for backend in search.work.recipe.plan.backends:
        name, _, precision = backend.partition("-")
        try:
            check_backend(name, precision or "fp32")
        except MachineError as error:
            search.leave_out(backend, error.message)
    if not search.backends:
        raise MachineError("none of the backends is installed here", "pip install 'kdcli[onnx]'")


def measure_untrained(search: Search, model: str) -> dict[str, Any]:
    """Milliseconds of one sequence of 128 tokens and speed-up over torch in float32, median and better quartile, of the
    model on every backend and of each shape, untrained, on the fastest of them; with the parameters of the shapes'
    layers. Raises UsageError: a shape that cannot be made of the model."""
    work = search.work
    trusted = work.invocation.trust_remote_code
    loaded = load_encoder(model, trust_remote_code=trusted)
    teacher = shape_of(loaded.model.config)
    device, measure = str(choose_device(work.invocation.device)), work.recipe.measure
    protocol = Protocol(
        device, measure.min_runs, measure.min_seconds, CELLS[:1], trust_remote_code=trusted
    )

    def measured(subjects: list[Subject]) -> dict[str, dict[str, Any]]:
        latency = measure_latency([Subject(TEACHER, location(model)), *subjects], protocol)
        by_name = {}
        for row in latency.rows:
            key = f"{row['model']}/{row['backend']}-{row['dtype']}_vs_{TEACHER}"
            ratio = latency.speedups.get(key, {"median": 1.0, "high": 1.0})
            ms, speedup, best = row["p50_ms"], ratio["median"], ratio["high"]
            by_name[row["model"]] = {
                "ms": ms,
                "speedup": speedup,
                "best_ms": ms * speedup / best,
                "best_speedup": best,
            }
        return by_name

    def subject(name: str, source: str, backend: str) -> Subject:
        engine, _, precision = backend.partition("-")
        return Subject(name, source, engine, precision or "fp32")

    Progress.log(f"measuring {short(model)} on {', '.join(search.backends)}")
    found = measured([subject(backend, location(model), backend) for backend in search.backends])
    fastest = min(search.backends, key=lambda name: found.get(name, {"ms": float("inf")})["ms"])
    shapes = {str_of(s): s for s in shapes_of(work.recipe.plan.shapes, teacher)}
    Progress.log(f"measuring {', '.join(shapes)} untrained on {fastest}")
    with tempfile.TemporaryDirectory() as aside:
        subjects, students = [], {}
        for name, shape in shapes.items():
            built = build_student(loaded.model, shape, init="random", seed=work.recipe.seed).model
            save_model(built, loaded.tokenizer, Path(aside) / name, NO_ROWS)
            subjects.append(subject(name, str(Path(aside) / name), fastest))
            students[name] = {"layers_mb": describe(built, name, None).params_transformer / 1e6}
        times = measured(subjects)
        students = {name: times.get(name, {}) | of for name, of in students.items()}
    backends = {name: found[name] for name in search.backends if name in found}
    return {"teacher": found[TEACHER], "backends": backends, "fastest": fastest, "shapes": students}


def shapes_of(given: list[str], teacher: ModelShape) -> list[ModelShape]:
    """The shapes to try, from large to small: those given, else two thirds, half and a third of the layers, and half
    and a third of them at half the width."""
    layers, width = teacher.layers, teacher.hidden
    if given:
        chosen = [parse_shape(text, teacher) for text in given]
    else:
        texts = [f"{max(1, round(layers * share))}x{width}" for share in (2 / 3, 1 / 2, 1 / 3)]
        if width % (2 * teacher.heads) == 0:
            texts += [f"{max(1, round(layers * share))}x{width // 2}" for share in (1 / 2, 1 / 3)]
        chosen = [shape for text in texts if (shape := parse_shape(text, teacher)) != teacher]
    size = {
        shape: shape.layers * shape.hidden * (4 * shape.hidden + 2 * shape.ffn) for shape in chosen
    }
    return sorted(size, key=lambda shape: -size[shape])


def str_of(shape: ModelShape) -> str:
    """`3x384`, or `3x384:600` where the feed-forward width is another."""
    ffn = "" if shape.ffn == 4 * shape.hidden else f":{shape.ffn}"
    return f"{shape.layers}x{shape.hidden}{ffn}"


def missed_untrained(
    goal: GoalSettings, measured: dict[str, Any], *, best: bool = False
) -> dict[str, str]:
    """Limit -> why a shape misses it whatever it learns; empty where it may meet the goal. `best`: by the better
    quartile of its times, as a busy machine slows short ones most."""
    if "ms" not in measured:
        return dict.fromkeys(LIMITS, "it gave wrong output on the backend and was not measured")
    found = {}
    ms, speedup = (measured[f"best_{key}" if best else key] for key in ("ms", "speedup"))
    if goal.speedup is not None and speedup < goal.speedup:
        found["speedup"] = f"untrained it is {speedup:.1f} times as fast, not {goal.speedup:g}"
    if goal.max_latency_ms is not None and ms > goal.max_latency_ms:
        found["max_latency_ms"] = (
            f"untrained it takes {ms:.2f} ms, more than {goal.max_latency_ms:g}"
        )
    if goal.max_mb is not None and measured.get("layers_mb", 0.0) > goal.max_mb:
        found["max_mb"] = (
            f"its layers alone take {measured['layers_mb']:.1f} MB in int8, more than {goal.max_mb:g}"
        )
    return found


def try_shapes(search: Search, measured: dict[str, dict[str, Any]]) -> None:
    """Train the shapes that can meet the goal, the promising ones to the end, until one that was judged meets it."""
    work = search.work
    # By the better quartile only where the medians leave none.
    missed = {shape: missed_untrained(search.goal, found) for shape, found in measured.items()}
    if all(missed.values()):
        missed = {
            shape: missed_untrained(search.goal, found, best=True)
            for shape, found in measured.items()
        }
    for shape, whys in missed.items():
        if whys:
            search.leave_out(shape, "; ".join(dict.fromkeys(whys.values())))
    alive = [shape for shape, whys in missed.items() if not whys]
    if not alive:
        return
    # The largest comes first, so no other takes longer.
    cost, why = estimate(work, alive[0], distilling(search, alive[0]))
    if why:
        for shape in alive:
            search.leave_out(shape, why)
        return
    dropped: list[tuple[float, str]] = []
    for rung in RUNGS:
        if len(alive) < 2:
            break
        scores = {shape: curve_score(search, shape, cost["steps"], rung) for shape in alive}
        alive, worse = halve(search, scores, measured, last=rung == RUNGS[-1])
        dropped += [(scores[shape], shape) for shape in worse]
    # Those that were dropped are trained on, the best first, while the goal is missed.
    for number, shape in enumerate(alive + [shape for _, shape in sorted(dropped, reverse=True)]):
        if number and (search.met or work.left < cost["seconds"]):
            why = (
                "another one was better and met the goal"
                if search.met
                else "no time is left to train it on"
            )
            search.leave_out(shape, f"{why}; it was dropped after a part of its steps")
            continue
        finish(search, shape, cost["steps"], first=number == 0)
        search.judge(f"judged-{shape}")


def distilling(search: Search, shape: str, *more: str) -> list[str]:
    """The command that distils a shape."""
    work = search.work
    keys = (DISTILL if work.kind == "task" else {}) | work.recipe.plan.distill
    return work.training("distill", search.teacher, keys, "--to", shape, *more)


def estimate(work: Work, name: str, command: list[str]) -> tuple[dict[str, Any], str]:
    """Steps and seconds of a training, and why it is not begun: it would fail, or take longer than is left."""
    cost = work.once(f"estimate {name}", partial(dry_run, work, command))
    late = f"it takes about {duration(cost['seconds'])}, {duration(max(0.0, work.left))} are left"
    return cost, cost.get("error") or (late if cost["seconds"] > work.left else "")


def dry_run(work: Work, command: list[str]) -> dict[str, Any]:
    """Steps and seconds of a command, by its dry run."""
    code, output, error = work.verbs.run([*command, "--dry-run", "--json", "--quiet"])
    if code:
        return {"steps": 0, "seconds": 0.0, "error": error or f"exit {code}"}
    legs = json.loads(output)["legs"]
    return {"steps": legs[-1]["steps"], "seconds": sum(leg["seconds"] for leg in legs)}


def curve_score(search: Search, shape: str, steps: int, rung: int) -> float:
    """Train a shape up to a rung and read its curve: the task's first metric, or minus the held-out loss."""
    work = search.work
    target, run = rung * max(1, steps // QUARTERS), RunDir(work.path(shape))

    def evaluated() -> list[dict[str, Any]]:
        return [
            record for record in run.read_log() if record["step"] >= target and "held_out" in record
        ]

    def score() -> float:
        first = evaluated()[0]
        values = first.get("metrics") or {"loss": -sum(first["held_out"].values())}
        return float(next(iter(values.values())))

    key = f"run {shape} to {rung}/{QUARTERS}"
    if why := work.step(
        shape, halving(search, shape, steps), until=lambda: bool(evaluated()), key=key
    ):
        Progress.log(f"{shape} failed: {why}")
        return float("-inf")
    found = work.once(f"score {shape} at {rung}", score)
    Progress.log(f"{shape} after {target} of {steps} steps: {found:.4f}")
    return found


def halving(search: Search, shape: str, steps: int) -> list[str]:
    """The command that distils a shape with an evaluation and a checkpoint at every rung."""
    every = max(1, steps // QUARTERS)
    return distilling(
        search, shape, *set_options({"train": {"eval_every": every, "checkpoint_every": every}})
    )


def halve(
    search: Search, scores: dict[str, float], measured: dict[str, dict[str, Any]], *, last: bool
) -> tuple[list[str], list[str]]:
    """The better half, after the last rung the best one, and the rest. Shapes within `max_drop` of the best count as
    equal, and the faster is better."""
    near = max(scores.values()) - POINT * (search.goal.max_drop or 0.0)

    def rank(shape: str) -> tuple[bool, float]:
        far = scores[shape] < near
        return far, -scores[shape] if far else measured[shape]["ms"]

    order = sorted(scores, key=rank)
    keep = 1 if last else -(-len(order) // 2)
    for shape in order[keep:]:
        Progress.log(
            f"{shape} is dropped: {scores[shape]:.4f}, the best has {max(scores.values()):.4f}"
        )
    return order[:keep], order[keep:]


def finish(search: Search, shape: str, steps: int, *, first: bool) -> None:
    """Train a shape to the end; trim it where that pays; export; beside the first, the same without its teacher."""
    work, plan = search.work, search.work.recipe.plan
    if not search.made(shape, halving(search, shape, steps)):
        return
    models = {shape: work.path(shape)}
    card = list(work.judged(shape).report.models.values())[-1]
    source = work.recipe.trimmed_to
    if card.params_embedding >= plan.trim_from * card.params_total and source is not None:
        name = f"{shape}-trimmed"
        if search.made(name, ["trim", str(models[shape]), "--data", source], shape):
            models[name] = work.path(name)
    for name, model in models.items():
        search.export(f"{name}-{search.fastest}", model, search.fastest, shape)
    if first and plan.undistilled and work.kind == "task":
        name = f"{shape}-undistilled"
        keys = plan.distill | {
            "method": "soft-targets",
            "stage": "none",
            "kd": {"weight": 0.0},
            "loss": {},
        }
        if search.made(name, work.training("distill", search.teacher, keys, "--to", shape)):
            search.export(f"{name}-{search.fastest}", work.path(name), search.fastest, name)


def try_pruning(search: Search) -> None:
    """Prune the model and compact it."""
    work, name = search.work, "pruned"
    given = work.recipe.plan.prune
    if given is None or work.kind == "rerank":
        return
    loaded = load_encoder(search.teacher, trust_remote_code=work.invocation.trust_remote_code).model
    if loaded.config.model_type not in PATHS:
        search.leave_out(name, f"{loaded.config.model_type} has no compact form")
        return
    command = work.training("prune", search.teacher, PRUNE | given)
    if why := estimate(work, name, command)[1]:
        search.leave_out(name, why)
    elif search.made(name, command):
        search.export(f"{name}-{search.fastest}", product(work.path(name)), search.fastest, name)
        search.judge("judged-pruned")


def check_timing(search: Search) -> None:
    """Refuse a budget that timing the backends breaks. Raises UsageError."""
    least = search.work.recipe.measure.min_seconds * (1 + len(search.backends))
    if search.work.left < least:
        raise too_small(f"timing the backends takes {duration(least)} at least")


def check_budget(work: Work, *, fits: bool) -> None:
    """Refuse a budget that no candidate keeps, before anything is written. Raises UsageError."""
    if work.recipe.budget is None:
        return
    why = ""
    if work.left <= 0:
        why = f"timing the backends and the untrained shapes took {duration(work.seconds)}"
    elif not fits:
        cost, late = estimate(work, TEACHER, finetuning(work))
        if "error" in cost:
            raise UsageError(f"{TEACHER} failed: {late}")
        why = late and f"fine-tuning comes first, and {late}"
    if why:
        raise too_small(why)


def too_small(why: str) -> UsageError:
    """The error of a budget that no candidate keeps."""
    hint = "raise it, or give a fine-tuned model and fewer plan.shapes"
    return UsageError(f"--budget is too small for any candidate: {why}", hint)


def finetuning(work: Work) -> list[str]:
    """The command that fine-tunes the model."""
    return work.training("finetune", str(work.recipe.model), work.recipe.plan.finetune)
