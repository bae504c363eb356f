"""`kdcli evaluate`: fine-tuned models on a labelled task: metrics, mistakes, differences, prediction files.

Data flow: examples → rows of tokens → logits of each model → predictions → evaluations and paired differences → report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Subject
from kdcli.commands.evaluate.settings import EvaluateRecipe
from kdcli.data.labelled.submission import check_submission, write_submission
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.disk import disk_errors, write_atomic
from kdcli.downstream.predictions import Evaluator, Prediction, compared, shown_label, summed_up
from kdcli.downstream.task import features_of, open_judged, predict, quality_of
from kdcli.errors import GateError, UsageError, did_you_mean
from kdcli.models.card import describe
from kdcli.models.heads import TaskModel, load_for_task, tokenizer_for
from kdcli.models.load import location
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.views import short
from kdcli.sparse.load import load
from kdcli.sparse.mask_file import read_mask
from kdcli.training.launch import choose_output_dir, launch
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Task


@dataclass(frozen=True)
class Extras:
    """What `evaluate` may write or demand besides its report.

    Attributes:
        predictions: a jsonl file, one object a model and example.
        submission: directory of files for the GLUE server, from the test split.
        gates: metric → least value that every model must reach, see `hold_gates`.
    """

    predictions: Path | None = None
    submission: Path | None = None
    gates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Judged:
    """A model and what it said of all judged examples, of which it read at most `max_length` tokens a row."""

    headed: TaskModel
    max_length: int
    evaluator: Evaluator
    predictions: list[Prediction] = field(default_factory=list)


def run(resolved: Resolved[EvaluateRecipe], invocation: Invocation, extras: Extras) -> RunResult | None:
    """Judge every model and compare the later ones with the first.

    Returns:
        The report; None in a process that has nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was written if recipe, models or data cannot be used.
    """
    recipe = resolved.recipe
    if not recipe.models or recipe.task is None:
        missing = "no model" if not recipe.models else "no task"
        raise UsageError(f"{missing} given", "kdcli evaluate MODEL [MODEL…] --task TASK [--data SOURCE]")
    if recipe.masks and (len(recipe.models) > 1 or recipe.measure.latency):
        raise UsageError(
            "--mask is of one model, the base of every mask, and measures no latency",
            "kdcli evaluate BASE --mask FILE [--mask FILE]; kdcli mask apply saves a model to measure",
        )
    session = launch(recipe.dtype, invocation)
    if session is None:
        return None
    name = f"evaluate-{Path(recipe.models[0]).name}-{recipe.task}"
    run_dir = RunDir(choose_output_dir(name, resolved, invocation, session))
    data = open_judged(str(recipe.task), recipe.data, recipe.models[0], trust_remote_code=invocation.trust_remote_code)
    _check_gates(data, extras)
    if extras.submission is not None:
        check_submission(data.task)
        if (given := max(len(recipe.models), len(recipe.masks))) > 1:
            raise UsageError(f"--submission is of one model, {given} were given")
    sources = recipe.masks or recipe.models
    # All are loaded before the first is judged, for the last may be the one that cannot be.
    ready = [_ready(recipe, invocation, data, source) for source in sources]
    found = {
        name: replace(of, predictions=predict(session, of.evaluator, of.headed))
        for name, of in zip(_names(sources), ready, strict=True)
    }
    to_submit: dict[str, list[Any]] = {}
    if extras.submission is not None:
        (only,) = found.values()
        to_submit = _said_of_test(recipe, only.headed, session)
    session.accelerator.end_training()
    if not session.is_main:
        return None
    # Files may be asked for within the directory, so only now.
    RunDir.claim(run_dir.path, resolved.to_yaml(), overwrite=invocation.overwrite)
    if extras.submission is not None:
        for name, values in to_submit.items():
            Progress.log(f"to submit: {write_submission(extras.submission, data.task, name, values)}")
    if extras.predictions is not None:
        _write_predictions(extras.predictions, data, found)
    return _report(recipe, session, run_dir, data, found)


def _names(models: list[str]) -> list[str]:
    """Short names, numbered where two models share one."""
    names: list[str] = []
    for model in models:
        name = short(model)
        count = sum(n == name or n.startswith(f"{name} (") for n in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def _ready(recipe: EvaluateRecipe, invocation: Invocation, data: Labelled, source: str) -> _Judged:
    """A model, or the base under a mask, with the examples as it reads them; it has said nothing yet."""
    if recipe.masks:
        headed = _under_mask(recipe.models[0], Path(source), data.task, invocation)
    else:
        headed = load_for_task(
            source,
            data.task,
            label_map=recipe.head.label_map,
            new_head=False,
            compacted=True,
            trust_remote_code=invocation.trust_remote_code,
        )
    Progress.log(f"{source}: {headed.note}")
    how = features_of(recipe.data, data.task, headed, as_tuned=True)
    evaluator = Evaluator.of(data.task, data.sets, headed.tokenizer, **how)
    return _Judged(headed, how["max_length"], evaluator)


def _under_mask(base: str, file: Path, task: Task, invocation: Invocation) -> TaskModel:
    """A base under a mask with the head that the mask brings.

    Raises:
        UsageError: see `kdcli.sparse.load.load`; the mask is of another task, or of other labels.
    """
    info = read_mask(file).info
    if (info.task, info.labels) != (task.name, task.labels):
        raise UsageError(
            f"{file} is of task {info.task} with labels {', '.join(info.labels) or 'none'}; {task.name} has "
            f"{', '.join(task.labels) or 'none'}",
            "a mask can be judged on its own task only",
        )
    trusted = invocation.trust_remote_code
    model = load(base, file, trust_remote_code=trusted)
    tokenizer = tokenizer_for(base, of_words=task.kind == "tokens", trust_remote_code=trusted)
    return TaskModel(model, tokenizer, str(file), f"{base} under a mask, with the head of the mask", info.max_length)


def _report(
    recipe: EvaluateRecipe,
    session: Session,
    run_dir: RunDir,
    data: Labelled,
    found: Mapping[str, _Judged],
) -> RunResult:
    evaluations, cards, notes = [], {}, []
    for name, of in found.items():
        evaluations += of.evaluator.evaluations(name, data.split, of.predictions, recipe.worst)
        where = Path(location(of.headed.source))
        cards[name] = describe(of.headed.model, of.headed.source, where if where.is_dir() else None)
        rows = of.evaluator.features.rows
        cut = rows.truncated / max(1, sum(map(len, data.sets.values())))
        said = "need more than one window of" if data.task.kind == "span" else "were cut at"
        notes.append(f"{name}: {of.headed.note}; {cut:.1%} of the examples {said} {of.max_length} tokens")
    return write_report(
        run_dir,
        command="evaluate",
        recipe=recipe.model_dump(),
        cards=cards,
        folders={},
        latency=measure(
            [Subject(name, location(of.headed.source)) for name, of in found.items()],
            recipe.measure,
            session,
        ),
        outcome=None,
        quality=quality_of(evaluations),
        notes=notes,
        evaluations=evaluations,
        comparisons=_comparisons(recipe, found),
    )


def _comparisons(recipe: EvaluateRecipe, found: Mapping[str, _Judged]) -> list[dict[str, Any]]:
    """Every later model beside the first, on every set; both were asked the same examples in the same order."""
    if len(found) < 2:
        return []
    (baseline, first), *others = [
        (name, (of.evaluator, of.evaluator.scorers(of.predictions))) for name, of in found.items()
    ]
    rows = []
    for name, (evaluator, scorers) in others:
        Progress.log(f"{recipe.resamples:,} resamples: {name} beside {baseline}")
        rows += compared(evaluator, (name, scorers), (baseline, first[1]), recipe.resamples)
    return rows


def _write_predictions(file: Path, data: Labelled, found: Mapping[str, _Judged]) -> None:
    lines = []
    for name, of in found.items():
        examples = of.evaluator.features.examples
        for of_set, (begin, end) in of.evaluator.bounds.items():
            for example, said in zip(examples[begin:end], of.predictions[begin:end], strict=True):
                row: dict[str, Any] = {"model": name, "set": of_set, "id": example.id, "texts": list(example.texts)}
                row |= {"label": shown_label(data.task, example), "predicted": said.shown}
                # JSON has no infinity: it stands where a window holds no span at all.
                row["scores"] = [s if math.isfinite(s) else None for s in said.scores]
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(lines))
    Progress.log(f"{len(lines):,} predictions in {file}")


def _said_of_test(recipe: EvaluateRecipe, headed: TaskModel, session: Session) -> dict[str, list[Any]]:
    """Set → the value predicted for each example of the test split, whose labels are withheld."""
    data = open_labelled(
        str(recipe.task), source=recipe.data.source, split="test", training=False, withheld=True, log=Progress.log
    )
    found = {}
    for name, examples in data.sets.items():
        # Some test files come with labels; they are not looked at.
        blind = {name: [replace(e, label=None) for e in examples]}
        how = features_of(recipe.data, data.task, headed, as_tuned=True)
        evaluator = Evaluator.of(data.task, blind, headed.tokenizer, **how)
        found[name] = [p.value for p in predict(session, evaluator, headed)]
    return found


def _check_gates(data: Labelled, extras: Extras) -> None:
    least = [m for m in data.task.metrics if m != "mse" and not m.endswith("_threshold")]
    metrics = [*least, *(f"{of_set}/{m}" for of_set in data.sets if of_set for m in least)]
    for metric in extras.gates:
        if metric not in metrics:
            raise UsageError(
                f"--min-metric {metric}: task {data.task.name} has no such metric of which more is better"
                f"{did_you_mean(metric, metrics)}",
                f"it has {', '.join(metrics)}",
            )


def hold_gates(result: RunResult, extras: Extras) -> None:
    """Compare every model's metrics with the gates; of several sets their mean counts, or `SET/METRIC`.

    Raises:
        GateError: one was missed.
    """
    missed = []
    for name in result.report.models if extras.gates else ():
        of_model = {e.set: e.metrics for e in result.report.evaluations if e.model == name}
        reached = summed_up(of_model, None)
        missed += [
            f"{name} has {metric} {reached[metric]:.4f}, below {least:g}"
            for metric, least in extras.gates.items()
            if reached[metric] < least
        ]
    if missed:
        raise GateError("; ".join(missed), f"the report is in {result.folder}")
