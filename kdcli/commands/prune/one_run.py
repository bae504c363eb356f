"""One pruning in a directory of its own: trained, saved in every form, measured and reported."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from kdcli.bench.environment import versions
from kdcli.bench.latency import Subject
from kdcli.commands.prune.job import TRACE, Prepared, prepared, to_full_precision
from kdcli.commands.prune.settings import PruneRecipe
from kdcli.downstream.predictions import summed_up
from kdcli.downstream.task import PreparedTask, TrainedModel, load_model, predict, quality_of, train_job
from kdcli.errors import MachineError
from kdcli.models.card import describe
from kdcli.models.custom_class import is_custom
from kdcli.models.heads import AUTO_CLASS, TaskModel
from kdcli.models.layout import PATHS, layout_for
from kdcli.models.load import load_weights, location, save_model
from kdcli.models.matrices import Matrix, matrices
from kdcli.pruners.selection import down_to_one
from kdcli.recipe.resolve import Resolved
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.text import bytes_of
from kdcli.sparse.compact import compact
from kdcli.sparse.load import task_part
from kdcli.sparse.mask_file import MaskInfo, base_hash, write_mask
from kdcli.teachers.task_teacher import delete_signals, store_in
from kdcli.training.launch import already_done, claim_or_resume
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir

DENSE, MASKED, COMPACT, SPARSE = "dense", "masked", "compact", "sparse"
"""Names of the models of a report: as it was, with zeros, without what is empty, its linears sparse."""

MASK, SCORES = "mask/mask.safetensors", "mask/scores.safetensors"
"""Apart from the model, whose weights are all safetensors in its own directory."""

WORST = 20
"""Mistakes of a model that its report shows."""

LOSSLESS = 1e-4
"""Largest difference between the logits of the masked and of the compacted model, relative to the largest logit."""


@dataclass(frozen=True)
class PruneRun:
    """One method and sparsity: what it is called beside others, its recipe and its directory."""

    name: str
    resolved: Resolved[PruneRecipe]
    folder: Path


def run_inside(task: PreparedTask, of: PruneRun, teacher: TaskModel | None, folder: Path) -> RunResult:
    """One run in its directory, read back when it is done."""
    recipe, main = of.resolved.recipe, task.session.is_main
    inside = of.folder != folder
    if claim_or_resume(task.session, of.folder, of.resolved) if inside else already_done(of.folder):
        return RunResult.read(of.folder)
    Progress.log(f"{recipe.method}, sparsity {recipe.sparsity[0]:g}")
    headed = load_model(recipe, task.data.task, trust_remote_code=task.session.trust_remote_code)
    store = store_in(of.folder, recipe.cache_gb)
    ready = prepared(task, recipe, headed, teacher, folder=of.folder if main else None, store=store)
    for warning in _warnings(recipe, ready):
        Progress.log(warning)
    fitted = train_job(task, headed, ready.job, ready.schedule, RunDir(of.folder))
    if main:
        delete_signals(of.folder)
        _finished(task, of, ready, fitted)
    task.session.wait()
    return RunResult.read(of.folder)


def _finished(task: PreparedTask, of: PruneRun, ready: Prepared, fitted: TrainedModel) -> None:
    """Save every form of the model, measure them beside the dense one, report."""
    headed, pruner = fitted.headed, ready.pruner
    recipe, folder, model = of.resolved.recipe, of.folder, headed.model.cpu()
    # As it was, and only now: a copy kept all along would be as large as the model.
    dense = load_model(recipe, task.data.task, trust_remote_code=task.session.trust_remote_code).model
    masks, scores, warnings = pruner.masks.masks(), pruner.masks.scores(), _warnings(recipe, ready)
    to_full_precision(model, dense)
    pruner.masks.fold()
    evaluations = task.evaluator.evaluations(MASKED, task.data.split, fitted.predictions, WORST)
    save_model(model, headed.tokenizer, folder)
    loads = "anywhere with trust_remote_code, for its class lies beside it" if is_custom(model) else "anywhere"
    notes = [
        *warnings,
        *down_to_one(masks),
        *task.notes,
        f"masked: zeros in a model that is not faster and loads {loads}",
    ]
    if pruner.trains_weights:
        notes.append(f"no mask file: {recipe.method} trains the weights too, so a mask alone would not make the model")
    else:
        _write_masks(task, recipe, folder, headed, dense, masks, scores, evaluations)
        notes.append(f"mask: {bytes_of((folder / MASK).stat().st_size)} beside the base ({MASK})")
    cards = {
        DENSE: describe(dense, str(recipe.model), _directory(recipe.model)),
        MASKED: describe(model, str(folder), folder),
    }
    subjects = [Subject(MASKED, str(folder))]
    if task.session.device.type == "cpu":
        subjects.append(Subject(SPARSE, str(folder), "sparse"))
    if model.config.model_type in PATHS:
        small = compact(model, drop_rows_below=recipe.drop_rows_below)
        save_model(small, headed.tokenizer, folder / COMPACT)
        cards[COMPACT] = describe(small, str(folder / COMPACT), folder / COMPACT)
        subjects.insert(1, Subject(COMPACT, str(folder / COMPACT)))
        evaluations += _of_compact(task, headed, small, evaluations, recipe, notes)
    else:
        notes.append(f"no compact form: {model.config.model_type} has none ({', '.join(sorted(PATHS))} have)")
    latency = measure([Subject(DENSE, location(str(recipe.model))), *subjects], recipe.measure, task.session)
    write_report(
        RunDir(folder),
        command="prune",
        recipe=recipe.model_dump(),
        cards=cards,
        folders={MASKED: folder},
        latency=latency,
        outcome=fitted.outcome,
        quality=quality_of(evaluations),
        notes=notes,
        auto_class=AUTO_CLASS[task.data.task.kind].__name__,
        evaluations=evaluations,
        pruning=[_pruning(MASKED, recipe, model, masks, json.loads((folder / TRACE).read_text("utf-8")))],
    )
    (folder / TRACE).unlink()


AT_ONCE = 0.001
"""Share of the weights that may go in one step by scores alone: of a fine-tuned encoder a tenth of it changed nothing,
three times as much cost three points, ten times as much everything (docs/results.md, benchmarks/movement.py)."""


def _warnings(recipe: PruneRecipe, ready: Prepared) -> list[str]:
    """What to know of a method and a number of steps before hours are spent on them."""
    pruner, steps = ready.pruner, ready.schedule.steps
    if pruner.density is None:
        return [
            f"{recipe.method} here has no density that can be asked for: its regularizer, its learning rate of "
            f"scores and the number of steps decide how much goes, and sparsity {recipe.sparsity[0]:g} is what it is "
            "compared with"
        ]
    densities = [pruner.density(done) for done in range(steps + 1)]
    most = max((a - b for a, b in itertools.pairwise(densities)), default=0.0)
    if most <= AT_ONCE or pruner.regularise is not None or not pruner.masks.scores():
        return []
    return [
        f"{recipe.method} removes up to {most:.2%} of the weights in one of these {steps:,} steps, chosen by their "
        f"scores alone; models lost what they had learned above about {AT_ONCE:.1%}: take more steps, or prune less"
    ]


def _directory(model: str | None) -> Path | None:
    where = Path(location(str(model)))
    return where if where.is_dir() else None


def _write_masks(
    task: PreparedTask,
    recipe: PruneRecipe,
    folder: Path,
    headed: TaskModel,
    dense: PreTrainedModel,
    masks: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
    evaluations: list[dict[str, Any]],
) -> None:
    """The only file a task costs beside its base; and the scores, from which other densities can be cut."""
    base = load_weights(str(recipe.model), AutoModel, trust_remote_code=task.session.trust_remote_code)
    head, config = task_part(headed.model, base)
    of = task.data.task
    info = MaskInfo(
        base=str(recipe.model),
        base_sha256=base_hash(base),
        model_type=str(base.config.model_type),
        method=recipe.method,
        density=1 - recipe.sparsity[0],
        task=of.name,
        architecture=type(headed.model).__name__,
        config=config,
        labels=of.labels,
        label_words=tuple(recipe.head.words or of.words) if recipe.head.kind != "scratch" else (),
        max_length=task.max_length,
        metrics=summed_up({e["set"]: e["metrics"] for e in evaluations}, None),
        versions=versions(),
    )
    write_mask(folder / MASK, info, masks, head=head)
    if scores:
        write_mask(folder / SCORES, info, masks, head=head, scores=scores)


def _of_compact(
    task: PreparedTask,
    headed: TaskModel,
    small: PreTrainedModel,
    evaluations: list[dict[str, Any]],
    recipe: PruneRecipe,
    notes: list[str],
) -> list[dict[str, Any]]:
    """What the compacted model scores: what the masked one does where nothing but empty rows was dropped, which is
    checked; else it is judged."""
    rows = task.evaluator.features.rows
    batch = {k: v for k, v in rows.batch(np.arange(min(8, len(rows)))).items() if k != "labels"}
    with torch.no_grad():
        expected, found = headed.model(**batch), small(**batch)
    names = [name for name in ("logits", "start_logits", "end_logits") if name in expected]
    largest = max(float(expected[name].abs().max()) for name in names)
    difference = max(float((expected[name] - found[name]).abs().max()) for name in names) / max(1.0, largest)
    if recipe.drop_rows_below > 1:
        notes.append(f"compact: rows with fewer than {recipe.drop_rows_below} weights are gone too")
        said = predict(replace(task.session, device=torch.device("cpu")), task.evaluator, replace(headed, model=small))
        return task.evaluator.evaluations(COMPACT, task.data.split, said, WORST)
    if not difference <= LOSSLESS:
        raise MachineError(f"the compacted model differs from the masked one by {difference:.1e}, which is a bug")
    notes.append(f"compact: nothing but what was empty is gone; logits differ by at most {difference:.0e}")
    return [e | {"model": COMPACT} for e in evaluations]


def _pruning(
    name: str, recipe: PruneRecipe, model: PreTrainedModel, masks: Mapping[str, Tensor], trace: Mapping[str, Any]
) -> dict[str, Any]:
    """What is kept where, as `kdcli.report.schema.Pruning` takes it."""
    found, layout = matrices(model), layout_for(model.config)
    by_layer: dict[int, list[Matrix]] = {}
    for matrix in found:
        by_layer.setdefault(matrix.layer, []).append(matrix)
    layers = layout.modules(model.base_model)
    heads = [
        _kept_by_head({m.kind: masks[m.name] for m in of}, layout.heads(layers[number - 1]))
        for number, of in by_layer.items()
    ]
    kept, total = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
    return {
        "model": name,
        "method": recipe.method,
        "masking": recipe.pruner.get("masking"),
        "sparsity": recipe.sparsity[0],
        "density": kept / total,
        "matrices": [
            {"name": m.name, "layer": m.layer, "kind": m.kind, "weights": m.numel, "kept": int(masks[m.name].sum())}
            for m in found
        ],
        "heads": heads,
        "curve": trace["curve"],
        "histograms": trace["histograms"],
    }


def _kept_by_head(masks: Mapping[str, Tensor], heads: int) -> list[float]:
    """Share of the weights of Q, K, V (rows) and O (columns) that each head keeps; K and V of several may be one."""
    width = len(masks["Q"]) // heads
    shares = []
    for kind in "QKVO":
        by_row = (masks[kind].T if kind == "O" else masks[kind]).float().mean(1)
        of_one = by_row.view(-1, width).mean(1)
        shares.append(of_one.repeat_interleave(heads // len(of_one)))
    return torch.stack(shares).mean(0).tolist()
