"""Saves a pruned model in every form (masked, compact, mask file), measures the forms and writes the report."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.deploy.environment import versions
from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.compact import compact
from kdcli.deploy.sparse.load import task_part
from kdcli.deploy.sparse.mask_file import MaskInfo, facts_of, write_mask
from kdcli.engine.run_dir import RunDir
from kdcli.errors import MachineError
from kdcli.models.card import describe
from kdcli.models.custom_class import is_custom
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.layout import PATHS, layout_for
from kdcli.models.load import location, save_model
from kdcli.models.matrices import matrices
from kdcli.models.model import Model
from kdcli.pruners.selection import down_to_one
from kdcli.report import schema
from kdcli.report.finish import ReportContents, ReportedModel, measure, write_report
from kdcli.report.schema import Evaluation, PrunedMatrix
from kdcli.report.text import bytes_of
from kdcli.types import Outcome, RowHashes
from kdcli.verbs.prune.job import TRACE, Pruning
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.predictions import Prediction, summed_up
from kdcli.workloads.run import chosen_on
from kdcli.workloads.task import PreparedTask, predict

DENSE, MASKED, COMPACT, SPARSE = "dense", "masked", "compact", "sparse"
"""Models of a report: as loaded, with zeros, without its empty rows, with sparse linears."""
MASK, SCORES = "mask/mask.safetensors", "mask/scores.safetensors"
"""In a folder of their own: the safetensors beside a model's config.json are its weights."""
WORST = 20  # Mistakes of a model that its report shows
LOSSLESS = 1e-4
"""Largest difference between the logits of the masked and the compact model, relative to the largest logit."""


def save_and_report(
    task: PreparedTask,
    built: Pruning,
    base: PreTrainedModel | None,
    folder: Path,
    outcome: Outcome,
    predictions: list[Prediction],
    rows: RowHashes,
) -> None:
    """Save every form of the model that `rows` trained, measure them beside the dense one, report. `base`: the encoder
    it was loaded from, unless its weights were trained."""
    recipe, headed, pruner = built.recipe, built.headed, built.pruner
    model, masks, scores = headed.model.cpu(), pruner.masks.masks(), pruner.masks.scores()
    evaluations = task.evaluator.evaluations(MASKED, task.data.split, predictions, WORST)
    loads = (
        "anywhere with trust_remote_code, for its class lies beside it"
        if is_custom(model)
        else "anywhere"
    )
    notes = [*built.warnings, *down_to_one(masks), *task.notes]
    if outcome.best_step is not None:
        on, metric = chosen_on(task, recipe), task.data.task.metrics[0]
        chosen = f"by {metric} on {on}, on which the scores are also reported"
        first = f"of the evaluations from step {built.job.best_from} on, which have the density asked for"
        notes.append(f"the weights of step {outcome.best_step} were kept, {first}, {chosen}")
    notes.append(f"masked: zeros in a model that is not faster and loads {loads}")
    pruner.masks.fold()
    if base is None:
        notes.append(
            f"no mask file: {recipe.method} trains the weights too, so a mask alone would not make the model"
        )
    else:
        metrics = summed_up({e.set: e.metrics for e in evaluations}, None)
        head, info = _mask_info(task, recipe, model, base, metrics)
        write_mask(folder / MASK, info, masks, head=head, rows=rows)
        if scores:
            write_mask(folder / SCORES, info, masks, head=head, scores=scores, rows=rows)
        notes.append(f"mask: {bytes_of((folder / MASK).stat().st_size)} beside the base ({MASK})")
    save_model(model, headed.tokenizer, folder, rows)
    models = [
        ReportedModel(DENSE, "baseline", built.dense),
        ReportedModel(MASKED, "pruned", describe(model, str(folder), folder), DENSE, folder),
    ]
    subjects = [Subject(MASKED, str(folder))]
    if task.session.device.type == "cpu":
        subjects.append(Subject(SPARSE, str(folder), "sparse"))
    if model.config.model_type in PATHS:
        small = compact(model, drop_rows_below=recipe.drop_rows_below)
        save_model(small, headed.tokenizer, folder / COMPACT, rows)
        card = describe(small, str(folder / COMPACT), folder / COMPACT)
        models.append(ReportedModel(COMPACT, "pruned", card, DENSE))
        subjects.insert(1, Subject(COMPACT, str(folder / COMPACT)))
        further, note = _evaluate_compact(task, headed, small, evaluations, recipe.drop_rows_below)
        evaluations += further
        notes.append(note)
    else:
        notes.append(
            f"no compact form: {model.config.model_type} has none ({', '.join(sorted(PATHS))} have)"
        )
    latency = measure(
        [Subject(DENSE, location(str(recipe.model))), *subjects], recipe.measure, task.session
    )
    trace = json.loads((folder / TRACE).read_text("utf-8"))
    contents = ReportContents(
        "prune",
        recipe,
        models,
        outcome=outcome,
        latency=latency,
        evaluations=evaluations,
        notes=notes,
        auto_class=AUTO_CLASS[task.data.task.kind].__name__,
        pruning=[pruning_facts(recipe, model, masks, trace)],
    )
    write_report(RunDir(folder), contents)


def _mask_info(
    task: PreparedTask,
    recipe: PruneRecipe,
    model: PreTrainedModel,
    base: PreTrainedModel,
    metrics: dict[str, float],
) -> tuple[dict[str, Tensor], MaskInfo]:
    """Head and header of a mask file, from the pruned model and the encoder as it was loaded."""
    (head, config), about = task_part(model, base), task.data.task
    words = tuple(recipe.head.words or about.words) if recipe.head.kind != "scratch" else ()
    facts = facts_of(base, str(recipe.model)) | {"versions": versions()}
    facts |= {"architecture": type(model).__name__, "config": config}
    facts |= {
        "method": recipe.method,
        "density": 1 - recipe.sparsity[0],
        "metrics": metrics,
        "label_words": words,
    }
    return head, MaskInfo(task=about.name, labels=about.labels, max_length=task.max_length, **facts)


def _evaluate_compact(
    task: PreparedTask,
    headed: Model,
    small: PreTrainedModel,
    evaluations: list[Evaluation],
    dropped: int,
) -> tuple[list[Evaluation], str]:
    """Evaluations of the compact model and a note: those of the masked one, after a check, unless rows were dropped."""
    if dropped > 1:
        session = replace(task.session, device=torch.device("cpu"))
        predictions = predict(session, task.evaluator, replace(headed, model=small))
        found = task.evaluator.evaluations(COMPACT, task.data.split, predictions, WORST)
        return found, f"compact: rows with fewer than {dropped} weights are gone too"
    rows = task.evaluator.features.rows
    batch = {k: v for k, v in rows.batch(np.arange(min(8, len(rows)))).items() if k != "labels"}
    with torch.no_grad():
        masked, compacted = headed.model(**batch), small(**batch)
    names = [name for name in ("logits", "start_logits", "end_logits") if name in masked]
    largest = max(float(masked[name].abs().max()) for name in names)
    difference = max(float((masked[name] - compacted[name]).abs().max()) for name in names) / max(
        1.0, largest
    )
    # Not `>`: a NaN must fail too.
    if not difference <= LOSSLESS:
        raise MachineError(
            f"the compacted model differs from the masked one by {difference:.1e}, which is a bug"
        )
    note = f"compact: nothing but what was empty is gone; logits differ by at most {difference:.0e}"
    return [e.model_copy(update={"model": COMPACT}) for e in evaluations], note


def pruning_facts(
    recipe: PruneRecipe,
    model: PreTrainedModel,
    masks: Mapping[str, Tensor],
    trace: Mapping[str, object],
) -> schema.Pruning:
    """Report which share of the weights is kept in each matrix and attention head.

    `trace` has the curve of densities and the histograms of scores.
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
    """Share of the weights of Q, K, V (rows) and O (columns) that each head keeps; grouped K and V count for each."""
    width = len(masks[f"{layer}.Q"]) // heads
    shares = []
    for kind in "QKVO":
        mask = masks[f"{layer}.{kind}"]
        by_group = (mask.T if kind == "O" else mask).float().mean(1).view(-1, width).mean(1)
        shares.append(by_group.repeat_interleave(heads // len(by_group)))
    return torch.stack(shares).mean(0).tolist()
