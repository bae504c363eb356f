"""Save a pruned model in every form (masked, compact, mask file), measure the forms and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.deploy.environment import versions
from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.compact import compact
from kdcli.deploy.sparse.load import task_part
from kdcli.deploy.sparse.mask_file import MaskInfo, facts_of, write_mask
from kdcli.errors import MachineError
from kdcli.models.card import describe
from kdcli.models.custom_class import is_custom
from kdcli.models.layout import PATHS, layout_for
from kdcli.models.load import location
from kdcli.models.matrices import matrices
from kdcli.models.model import Model
from kdcli.models.training_rows import all_rows
from kdcli.pruners.selection import down_to_one
from kdcli.report import schema
from kdcli.report.finish import ReportContents, ReportedModel, quality_of
from kdcli.report.schema import PrunedMatrix
from kdcli.report.text import bytes_of
from kdcli.run.context import RunContext
from kdcli.types import Outcome
from kdcli.verbs.prune.job import TRACE, Pruning
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.labelled import WORST
from kdcli.workloads.predictions import summed_up
from kdcli.workloads.workload import ModelScores, Workload

DENSE, MASKED, COMPACT, SPARSE = "dense", "masked", "compact", "sparse"
"""Models of a report: as loaded, with zeros, without its empty rows, with sparse linears."""
MASK, SCORES = "mask/mask.safetensors", "mask/scores.safetensors"
"""In a folder of their own, because the safetensors next to a model's config.json are its
weights."""
LOSSLESS = 1e-4
"""Largest difference between the outputs of the masked and the compact model, relative to the
largest output."""


def save_and_report(
    context: RunContext[Any],
    workload: Workload,
    built: Pruning,
    recipe: PruneRecipe,
    folder: Path,
    outcome: Outcome,
    scores: ModelScores | None,
    base: PreTrainedModel | None,
    teacher: Model | None,
) -> None:
    """Save every form of a pruned model, measure them next to the dense model, and report.

    Args:
        scores: of the masked model; None if the workload has no sets to score it on.
        base: the encoder that the model was loaded from, unless its weights were trained.
    """
    model, pruner = built.model, built.pruner
    network = model.model.cpu().eval()
    masks, importance = pruner.masks.masks(), pruner.masks.scores()
    rows = all_rows(model.rows, workload.rows, *([teacher.rows] if teacher else []))
    notes = [*built.warnings, *down_to_one(masks), *workload.notes]
    if outcome.best_step is not None:
        notes.append(
            f"the weights of step {outcome.best_step} were kept, chosen by {workload.metric} on "
            f"{workload.evaluated_on}, on which the scores are also reported, among the "
            "evaluations "
            f"from step {built.job.best_from} on, which have the requested density"
        )
    loads = "anywhere"
    if is_custom(network):
        loads += " with trust_remote_code, because its class lies next to it"
    notes.append(f"masked: zeros in a model that is not faster and loads {loads}")
    pruner.masks.fold()
    workload.save(model, folder, rows)
    card = describe(network, str(folder), folder)
    models = [
        ReportedModel(
            DENSE, "baseline", built.dense, timed=Subject(DENSE, location(str(recipe.model)))
        ),
        ReportedModel(MASKED, "pruned", card, DENSE, folder, timed=Subject(MASKED, str(folder))),
    ]
    forms = {MASKED: model}
    scored = {MASKED: scores} if scores else {}
    if network.config.model_type in PATHS:
        small = replace(model, model=compact(network, drop_rows_below=recipe.drop_rows_below))
        place = folder / COMPACT
        workload.save(small, place, rows)
        card, timed = describe(small.model, str(place), place), Subject(COMPACT, str(place))
        models.append(ReportedModel(COMPACT, "pruned", card, DENSE, timed=timed))
        forms[COMPACT] = small
        if scores:
            scored[COMPACT] = scores
        notes.append(_check_compact(workload, model, small, recipe.drop_rows_below))
        if recipe.drop_rows_below > 1 and scores:
            on_cpu = replace(context.session, device=torch.device("cpu"))
            scored[COMPACT] = replace(workload, session=on_cpu).score(small, worst=WORST)  # type: ignore[type-var]
    else:
        known = ", ".join(sorted(PATHS))
        notes.append(f"no compact form: {network.config.model_type} has none ({known} have)")
    if context.session.device.type == "cpu":
        sparse = ReportedModel(
            SPARSE,
            "form",
            None,
            DENSE,
            of=MASKED,
            backend="sparse",
            dtype="fp32",
            timed=Subject(SPARSE, str(folder), "sparse"),
        )
        models.append(sparse)
    contents = ReportContents("prune", recipe, models, outcome=outcome, notes=notes)
    contents.evaluations = [row for name, each in scored.items() for row in each.rows(name)]
    if not workload.has_labels:
        # The dense model is a model of the workload too, and the others learned from it.
        dense = workload.load(str(recipe.model), head=recipe.head, new_head=False)
        forms = {DENSE: dense, **forms}
        result = workload.evaluate(forms)
        contents.evaluations, contents.comparisons = result.evaluations, result.comparisons
        contents.quality = quality_of(result.evaluations) | workload.resemblance(forms, DENSE)
    if base is None:
        notes.append(
            f"no mask file: {recipe.method} trains the weights too, so a mask alone would not make "
            "the model"
        )
    else:
        own = [e for e in contents.evaluations if (e.model, e.reference) == (MASKED, "labels")]
        metrics = summed_up({e.set: e.metrics for e in own}, None) if own else {}
        head, info = _mask_info(workload, recipe, network, base, metrics)
        write_mask(folder / MASK, info, masks, head=head, rows=rows)
        if importance:
            write_mask(folder / SCORES, info, masks, head=head, scores=importance, rows=rows)
        size = bytes_of((folder / MASK).stat().st_size)
        notes.append(f"mask: {size} in addition to the base ({MASK})")
    contents.auto_class, contents.pipeline = workload.auto_class, workload.pipeline
    trace = json.loads((folder / TRACE).read_text("utf-8"))
    contents.pruning = [pruning_facts(recipe, network, masks, trace)]
    context.report(contents, recipe.measure, folder)


def _mask_info(
    workload: Workload,
    recipe: PruneRecipe,
    model: PreTrainedModel,
    base: PreTrainedModel,
    metrics: Mapping[str, float],
) -> tuple[dict[str, Tensor], MaskInfo]:
    """Head and header of a mask file, from the pruned model and the encoder as it was loaded."""
    facts: dict[str, Any] = facts_of(base, str(recipe.model)) | workload.mask_facts(recipe.head)
    head: dict[str, Tensor] = {}
    if model.base_model is not model:
        head, config = task_part(model, base)
        facts |= {"architecture": type(model).__name__, "config": config}
    info = MaskInfo(
        **facts,
        versions=versions(),
        method=recipe.method,
        density=1 - recipe.sparsity[0],
        metrics=dict(metrics),
    )
    return head, info


def _check_compact(workload: Workload, masked: Model, small: Model, dropped: int) -> str:
    """Check that the compact model computes what the masked model does; returns a note.

    Raises:
        MachineError: it does not, although no weight was dropped.
    """
    if dropped > 1:
        return f"compact: rows with fewer than {dropped} weights are gone too"
    held_out = workload.held_out
    batch = held_out.batch(np.arange(min(8, len(held_out))))
    pairs = list(zip(workload.encode(masked, batch), workload.encode(small, batch), strict=True))
    largest = max(float(ours.abs().max()) for ours, _ in pairs)
    difference = max(float((ours - other).abs().max()) for ours, other in pairs)
    difference /= max(1.0, largest)
    # Not `>`: a NaN must fail too.
    if not difference <= LOSSLESS:
        raise MachineError(
            f"the compacted model differs from the masked one by {difference:.1e}, which is a bug"
        )
    return (
        f"compact: nothing but what was empty is gone; outputs differ by at most {difference:.0e}"
    )


def pruning_facts(
    recipe: PruneRecipe,
    model: PreTrainedModel,
    masks: Mapping[str, Tensor],
    trace: Mapping[str, object],
) -> schema.Pruning:
    """Report which share of the weights is kept in each matrix and attention head.

    Args:
        trace: the curve of densities and the histograms of scores.
    """
    rows = [
        PrunedMatrix(
            name=m.name,
            layer=m.layer,
            kind=m.kind,
            weights=m.numel,
            kept=int(masks[m.name].sum()),
        )
        for m in matrices(model)
    ]
    layout = layout_for(model.config)
    layers, numbers = layout.modules(model.base_model), dict.fromkeys(row.layer for row in rows)
    heads = [_kept_by_head(masks, number, layout.heads(layers[number - 1])) for number in numbers]
    return schema.Pruning.model_validate(
        {
            "model": MASKED,
            "method": recipe.method,
            "masking": recipe.pruner.get("masking"),
            "sparsity": recipe.sparsity[0],
            "density": sum(row.kept for row in rows) / sum(row.weights for row in rows),
            "matrices": rows,
            "heads": heads,
            **trace,
        }
    )


def _kept_by_head(masks: Mapping[str, Tensor], layer: int, heads: int) -> list[float]:
    """Share of the weights of Q, K, V (rows) and O (columns) that each head keeps. Grouped K and V
    count for each head."""
    width = len(masks[f"{layer}.Q"]) // heads
    shares = []
    for kind in "QKVO":
        mask = masks[f"{layer}.{kind}"]
        by_group = (mask.T if kind == "O" else mask).float().mean(1).view(-1, width).mean(1)
        shares.append(by_group.repeat_interleave(heads // len(by_group)))
    return torch.stack(shares).mean(0).tolist()
