"""`kdcli prune`: remove weights of an encoder while it learns.

Every method and sparsity is a stage. A batch of token ids gives outputs under the masks. The loss
adds the labels' terms, the teacher's terms and the method's own. After training, the masked, the
compact and the sparse form are compared with the dense model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from kdcli.deploy.environment import versions
from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.compact import compact_class_of, compact_model
from kdcli.deploy.sparse.loading import task_part
from kdcli.deploy.sparse.mask_file import MaskInfo, base_facts, write_mask
from kdcli.errors import UsageError
from kdcli.messages import log, warn
from kdcli.models.custom_class import is_custom
from kdcli.models.layout import COMPACT_PATHS, layout_for
from kdcli.models.load import load_weights, location
from kdcli.models.matrices import matrices
from kdcli.models.model import Model, all_rows
from kdcli.pruners import check_settings, defaults, smp
from kdcli.pruners.selection import down_to_one
from kdcli.recipe.resolve import Resolved, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report import schema
from kdcli.report.finish import Entry, ReportContents, RunResult, quality_of
from kdcli.report.schema import PrunedMatrix, Report
from kdcli.report.sections.summary import change_text
from kdcli.report.text import bytes_of, data_name, directory_word, percent, short
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import delete_signals
from kdcli.types import Outcome, RowHashes
from kdcli.verbs.prune.build import TRACE, BuiltPruning, build_pruning, restore_precision
from kdcli.verbs.prune.method_recipes import with_defaults
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.decisions import decisions
from kdcli.workloads.detect import as_trained
from kdcli.workloads.finetuning import (
    learning_notes,
    request_of,
    scores_after_training,
    scores_as_given,
    with_trivial_answer,
)
from kdcli.workloads.labelled import WORST
from kdcli.workloads.predictions import summed_up
from kdcli.workloads.requests import WorkloadRequest
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.scores import compare as compare_scores
from kdcli.workloads.study import Member, compare, run_study, seeds_of, with_seed
from kdcli.workloads.workload import Workload

Recipes = Sequence[Resolved[PruneRecipe]]
REMEDY = "Keep more of the weights (--sparsity), or train longer (--epochs or --max-steps)"
EMBEDDING_TASK = "embedding"
MAX_LOSS = 0.05
"""A model that lost more of a metric than this is not ready to ship."""


def prune(
    recipes: Recipes, options: RunOptions, variants: Mapping[str, Recipes] | None = None
) -> RunResult | Estimate | None:
    """Prune once for each variant, seed, method and sparsity. If there are several, compare them.

    Args:
        recipes: One recipe for each method; they differ in the method's own settings only.
        options: Where and how to run.
        variants: The recipes of each variant, by its name; None for the recipes alone.
    """
    members = [
        Member(name, seed_folder / folder, with_seed(own, seed), _prepare)
        for variant, of_variant in (variants or {"": recipes}).items()
        for known in [complete(of_variant)]
        for seed, seed_folder in seeds_of(known[0], known[0].recipe.seeds, variant)
        for name, folder, own in runs_of(known, variant)
    ]
    options.check_pushed(len(members))
    whole = complete(recipes)[0]
    recipe = whole.recipe
    data = directory_word(str(recipe.task), recipe.data.source)
    name = f"prune-{Path(str(recipe.model)).name}-{data}"
    return run_study(members, whole, options, name, partial(compare, _names))


def complete(recipes: Recipes) -> list[Resolved[PruneRecipe]]:
    """Check the recipes of a run, and fill in what the model, the teacher and the methods say."""
    origin = recipes[0].recipe
    for source in dict.fromkeys([origin.model, origin.teacher]):
        recipes = [as_trained(each, source) for each in recipes]
    first, methods = recipes[0].recipe, [r.recipe.method for r in recipes]
    if first.model is None or first.task is None:
        raise UsageError(
            "prune needs a model and a task", "kdcli prune MODEL --task TASK --sparsity 0.9"
        )
    for each in recipes:
        check_settings(each.recipe.method, each.recipe.pruner)
    sparsities = [f"{s:g}" for s in first.sparsity]
    for name, values in (("method", methods), ("sparsity", sparsities)):
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UsageError(f"{name} {repeated[0]} was given twice", "give each once")
    named = (set_among(each, ("workload.pooling", "loss", "eval")) for each in recipes)
    wrong = next(filter(None, named), None)
    if wrong is not None and first.task != EMBEDDING_TASK:
        raise UsageError(
            f"{wrong} is for --task {EMBEDDING_TASK}, not for task {first.task}", "omit it"
        )
    return [with_defaults(each) for each in recipes]


def _names(report: Report, variant: str) -> dict[str, str]:
    """Name the pruned model of a run by its variant, next to the dense model."""
    # Only the compact form is smaller: a model with zeros is as big as the dense one.
    return {DENSE: DENSE, COMPACT if COMPACT in report.cards else MASKED: variant}


def _prepare(context: RunContext[PruneRecipe]) -> Run:
    """Check model and data against each other and tokenise, without claiming the directory."""
    recipe = context.recipe
    others = [recipe.teacher] if recipe.teacher is not None else []
    workload, model = open_workload(prune_request(recipe, others), context.session)
    teacher: Model | None = None
    if recipe.teacher is not None:
        teacher = workload.load_teacher(recipe.teacher, model, head=recipe.head)
    if not workload.has_labels:
        workload = workload.with_reference(teacher or model)
    schedule = workload.plan(recipe.train).schedule
    settings = check_settings(recipe.method, recipe.pruner)
    if isinstance(settings, smp.Settings):
        settings.rising(schedule.steps)
    return Run([_stage(context, workload, model, teacher)])


def prune_request(recipe: PruneRecipe, other_models: Sequence[str]) -> WorkloadRequest:
    """Build the request for a recipe's workload."""
    # Without labels, the model learns from its own head or from a teacher's.
    own_head = recipe.data.labels == "teacher" and recipe.teacher is None
    request = request_of(
        recipe, str(recipe.model), new_head=not own_head, other_models=other_models
    )
    return replace(request, loss=recipe.loss, evaluation=recipe.eval)


def _stage(
    context: RunContext[PruneRecipe], workload: Workload, model: Model, teacher: Model | None
) -> Stage:
    recipe, folder = context.recipe, context.folder

    def build() -> StageJob:
        log(f"{recipe.method}, sparsity {recipe.sparsity[0]:g}")
        inside = None if context.dry_run else folder
        built = build_pruning(context, workload, recipe, model, teacher, inside)
        warn(*built.warnings)

        def finish(outcome: Outcome) -> None:
            base = None
            if not built.pruner.trains_weights:
                base = load_weights(str(recipe.model), AutoModel)
                # Restore before scoring, so that the scored model is the saved one.
                restore_precision(built.model.model, base)
            scores, of_dense, notes = None, None, list[str]()
            if workload.has_metrics:
                scores = scores_after_training(workload, built.model, outcome)
            if scores is not None and workload.has_labels:
                of_dense = scores_as_given(workload, str(recipe.model), recipe.head)
            if context.is_main:
                delete_signals(folder)
                if scores is not None:
                    scores = with_trivial_answer(workload, built.model, scores)
                    # The loss also has the regulariser of the scores.
                    notes = learning_notes("the pruned model", scores.evaluations, None, REMEDY)
                dense = {DENSE: of_dense} if of_dense is not None else {}
                save_pruned(context, workload, built, folder, outcome, scores, dense, base, notes)

        cards = {DENSE: built.dense}
        return StageJob(built.job, built.schedule, built.steps_per_pass, finish, cards)

    return Stage(folder, context.resolved, build)


def runs_of(recipes: Recipes, variant: str) -> list[tuple[str, Path, Resolved[PruneRecipe]]]:
    """Return a run for each method and sparsity: its name in a comparison, directory and recipe.

    If there are several methods or sparsities, the directory is `METHOD/`, `sparsity-S/` or both.
    A method whose density cannot be chosen has one run.
    """
    runs = []
    for resolved in recipes:
        recipe = resolved.recipe
        exact = defaults(recipe.method).exact and recipe.pruner.get("masking") != "threshold"
        several = exact and len(recipe.sparsity) > 1
        shows_sparsity = several or (len(recipes) == 1 and (exact or not variant))
        for sparsity in recipe.sparsity if exact else recipe.sparsity[:1]:
            own = Resolved(recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
            method = [recipe.method] * (len(recipes) > 1)
            folder = Path(*method, *[f"sparsity-{sparsity:g}"] * several)
            name = [variant, *method, *[f"{100 * sparsity:g} %"] * shows_sparsity]
            runs.append((" ".join(filter(None, name)), folder, own))
    return runs


DENSE, MASKED, COMPACT, SPARSE = "dense", "masked", "compact", "sparse"
"""The models of a report: as loaded, with zeros, without empty rows, and with sparse linears."""
MASK_FILE, SCORES_FILE = "mask/mask.safetensors", "mask/scores.safetensors"
"""Paths of the mask files.

They have a folder of their own, because the safetensors next to a config.json are the model's
weights.
"""
LOSSLESS = 1e-4
"""Largest difference between the outputs of the masked and the compact model, relative to the
largest output."""


@dataclass(frozen=True)
class _Form:
    """A saved form of a pruned model.

    Attributes:
        entry: Its entry in the report.
        model: The model.
        scores: Its scores; None without sets to score on.
        note: A sentence for the report.
    """

    entry: Entry
    model: Model
    scores: ModelScores | None
    note: str


def save_pruned(
    context: RunContext[PruneRecipe],
    workload: Workload,
    built: BuiltPruning,
    folder: Path,
    outcome: Outcome,
    scores: ModelScores | None,
    dense_scores: Mapping[str, ModelScores],
    base: PreTrainedModel | None,
    notes: Sequence[str],
) -> None:
    """Save every form of a pruned model, measure the forms next to the dense model, and report.

    Args:
        context: Where and how the verb runs.
        workload: The rows that the model was trained and scored on.
        built: The model, its pruner, its recipe and its teacher.
        folder: The directory of the run.
        outcome: The outcome of the training.
        scores: The scores of the masked model; None if the workload has no sets to score it on.
        dense_scores: The scores of the dense model by its name; empty if they are unknown.
        base: The encoder that the model was loaded from; None if its weights were trained.
        notes: What the scores of the model say about it.
    """
    model, pruner, recipe, teacher = built.model, built.pruner, built.recipe, built.teacher
    # The other processes do not have the saved forms.
    alone = replace(workload.session, alone=True)
    workload = replace(workload, session=alone)  # type: ignore[type-var]
    network, source = model.model.cpu().eval(), str(recipe.model)
    masks, importance = pruner.masks.masks(), pruner.masks.scores()
    rows = all_rows(model.rows, workload.rows, *([teacher.rows] if teacher else []))
    pruner.masks.fold()
    notes = [*notes, *built.warnings, *down_to_one(masks)]
    notes += _chosen_step(workload, built, outcome)
    trace = json.loads((folder / TRACE).read_text("utf-8"))
    facts = pruning_facts(recipe, network, masks, trace)
    data = data_name(workload.name, recipe.data.source)
    made = (
        f"pruned from {short(source)} on {data} with {recipe.method}, "
        f"{percent(facts.density, 1)} % of the weights of its layers kept and the others zero"
    )
    workload.save(model, folder, rows)
    masked = Entry.saved(MASKED, "pruned", network, folder, DENSE, made=made, source=source)
    forms = [_Form(masked, model, scores, f"masked: {_where_it_loads(network)}")]
    if compact_class_of(network) is not None:
        forms.append(_save_compact(context, workload, forms[0], recipe, folder / COMPACT, rows))
    ships = [f"{COMPACT}/ for one task"] if len(forms) > 1 else []
    ships += [f"{MASK_FILE} and its base for many tasks"] if base is not None else []
    notes += [form.note for form in forms]
    if len(forms) == 1:
        notes.append(_no_compact_form(network))
    dense = Entry(DENSE, "baseline", built.dense, timed=Subject(DENSE, location(source)))
    entries = [dense, *(form.entry for form in forms)]
    if context.session.device.type == "cpu":
        timed = Subject(SPARSE, str(folder), "sparse")
        sparse = Entry(SPARSE, "form", None, DENSE, of=MASKED, backend="sparse", dtype="fp32")
        entries.append(replace(sparse, timed=timed))
    contents = workload.report("prune", recipe, entries, outcome, notes=notes)
    scored = {form.entry.name: form.scores for form in forms if form.scores is not None}
    if scored and workload.has_labels:
        baselines = dict.fromkeys(scored, DENSE) if dense_scores else {}
        chosen = scored if outcome.best_step is not None else ()
        every = {**dense_scores, **scored}
        result = compare_scores(workload.name, every, baselines, chosen=chosen)
        contents.evaluations, contents.comparisons = result.evaluations, result.comparisons
    if not workload.has_labels:
        models = {form.entry.name: form.model for form in forms}
        _compare_with_dense(workload, recipe, models, contents)
    if base is None:
        contents.notes.append(
            f"no mask file: {recipe.method} trains the weights too, so a mask alone would not make "
            "the model"
        )
    else:
        own = [e for e in contents.evaluations if (e.model, e.reference) == (MASKED, "labels")]
        metrics = summed_up({e.set: e.metrics for e in own}, None) if own else {}
        head, info = _mask_info(workload, recipe, network, base, metrics)
        size = _write_masks(folder, info, masks, head, importance, rows)
        contents.notes.append(f"mask: {size} in addition to the base ({MASK_FILE})")
    contents.pruning = [facts]
    contents.notes[:0] = _advice(contents, ships, latency=recipe.measure.latency)
    context.report(contents, recipe.measure, folder)


def _advice(contents: ReportContents, ships: Sequence[str], *, latency: bool) -> list[str]:
    """Say what to ship, or what to do first. Of a model that learned little, other notes say it."""
    trivial = [one.trivial for one in contents.evaluations if one.trivial is not None]
    if not all(answer.is_beaten for answer in trivial):
        return []
    ship = ", or ".join(ships) or "the masked model"
    of_masked = [one for one in contents.comparisons if one.model == MASKED]
    of_metric = [one for one in of_masked if one.metric == of_masked[0].metric]
    worst = min(of_metric, key=lambda one: one.difference, default=None)
    if worst is not None and -worst.difference > MAX_LOSS:
        change = change_text(worst, worst.metric)
        return [f"before you ship {ship}: the pruned model {change}. {REMEDY}"]
    judged = "if the times above say so" if latency else "if a measurement says so"
    return [f"ship {ship}; it is only faster than the dense model {judged}"]


def _where_it_loads(network: PreTrainedModel) -> str:
    loads = "zeros in a model that is not faster and loads anywhere"
    if is_custom(network):
        loads += " with trust_remote_code, because its class lies next to it"
    return loads


def _no_compact_form(network: PreTrainedModel) -> str:
    kind = network.config.model_type
    what = type(network).__name__ if kind in COMPACT_PATHS else kind
    return f"no compact form: {what} has none ({', '.join(sorted(COMPACT_PATHS))} have)"


def _write_masks(
    folder: Path,
    info: MaskInfo,
    masks: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    importance: Mapping[str, Tensor],
    rows: RowHashes,
) -> str:
    """Write the masks, and the scores that chose them if there are any; return the masks' size."""
    write_mask(folder / MASK_FILE, info, masks, head=head, rows=rows)
    if importance:
        write_mask(folder / SCORES_FILE, info, masks, head=head, scores=importance, rows=rows)
    return bytes_of((folder / MASK_FILE).stat().st_size)


def _chosen_step(workload: Workload, built: BuiltPruning, outcome: Outcome) -> list[str]:
    """Return a note on the step whose weights were kept, if it was chosen by a metric."""
    if outcome.best_step is None:
        return []
    return [
        f"the weights of step {outcome.best_step} were kept, chosen by {workload.metric} on "
        f"{workload.evaluated_on}, on which the scores are also reported, among the evaluations "
        f"from step {built.job.best_from} on, which have the requested density"
    ]


def _save_compact(
    context: RunContext[PruneRecipe],
    workload: Workload,
    masked: _Form,
    recipe: PruneRecipe,
    place: Path,
    rows: RowHashes,
) -> _Form:
    """Save the compact model to `place`, and check it.

    It has the scores of the masked one. It is scored anew if weights were dropped.
    """
    whole, fewest, scores = masked.model.model, recipe.drop_rows_below, masked.scores
    small = replace(masked.model, model=compact_model(whole, drop_rows_below=fewest))
    workload.save(small, place, rows)
    entry = Entry.saved(COMPACT, "pruned", small.model, place, DENSE, source=str(recipe.model))
    note = _check_compact(workload, masked.model, small, fewest)
    if scores is not None and fewest > 1:
        on_cpu = replace(workload.session, device=torch.device("cpu"))
        scores = replace(workload, session=on_cpu).score(small, worst=WORST)  # type: ignore[type-var]
    return _Form(replace(entry, folder=None), small, scores, note)


def _compare_with_dense(
    workload: Workload, recipe: PruneRecipe, forms: Mapping[str, Model], contents: ReportContents
) -> None:
    """Evaluate the forms and the dense model, which taught them, on a workload without labels."""
    dense = workload.load(str(recipe.model), head=recipe.head, new_head=False)
    models = {DENSE: dense, **forms}
    result = workload.evaluate(models)
    contents.evaluations, contents.comparisons = result.evaluations, result.comparisons
    if result.scores:
        contents.decisions = decisions(result.scores)
    contents.quality = quality_of(result.evaluations) | workload.resemblance(models, DENSE)


def _mask_info(
    workload: Workload,
    recipe: PruneRecipe,
    model: PreTrainedModel,
    base: PreTrainedModel,
    metrics: Mapping[str, float],
) -> tuple[dict[str, Tensor], MaskInfo]:
    """Return the head and the header of a mask file.

    Args:
        workload: The rows that the model was trained on.
        recipe: The recipe of the run.
        model: The pruned model.
        base: The encoder as it was loaded.
        metrics: The metrics of the masked model.
    """
    head: dict[str, Tensor] = {}
    architecture: str | None = None
    config: dict[str, object] = {}
    if model.base_model is not model:
        head, config = task_part(model, base)
        architecture = type(model).__name__
    info = MaskInfo(
        **base_facts(base, str(recipe.model)),
        **workload.mask_facts(recipe.head),
        architecture=architecture,
        config=config,
        versions=versions(),
        method=recipe.method,
        density=1 - recipe.sparsity[0],
        metrics=dict(metrics),
    )
    return head, info


def _check_compact(workload: Workload, masked: Model, small: Model, drop_rows_below: int) -> str:
    """Check that the compact model computes what the masked model does. Returns a note.

    Raises:
        AssertionError: It does not, although no weight was dropped.
    """
    if drop_rows_below > 1:
        return f"compact: rows with fewer than {drop_rows_below} weights were also removed"
    held_out = workload.held_out
    batch = held_out.batch(np.arange(min(8, len(held_out))))
    pairs = list(zip(workload.encode(masked, batch), workload.encode(small, batch), strict=True))
    largest = max(float(ours.abs().max()) for ours, _ in pairs)
    difference = max(float((ours - other).abs().max()) for ours, other in pairs)
    difference /= max(1.0, largest)
    # Not `>`: a NaN must fail too.
    if not difference <= LOSSLESS:
        # This is a bug in kdcli, so it ends with a traceback.
        raise AssertionError(f"the compacted model differs from the masked one by {difference:.1e}")
    return (
        f"compact: only empty rows and columns were removed; outputs differ by at most "
        f"{difference:.0e}"
    )


def pruning_facts(
    recipe: PruneRecipe,
    model: PreTrainedModel,
    masks: Mapping[str, Tensor],
    trace: Mapping[str, object],
) -> schema.Pruning:
    """Return the share of the weights that each matrix and each attention head keeps.

    Args:
        recipe: The recipe of the run.
        model: The pruned model.
        masks: The masks by matrix.
        trace: The curve of densities and the histograms of scores.
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
    """Return the share of its weights that each head keeps.

    A head has rows of Q, K and V, and columns of O. K and V that heads share count for each head.
    """
    size = len(masks[f"{layer}.Q"])
    shares = []
    for kind in "QKVO":
        mask = masks[f"{layer}.{kind}"]
        # ConvBERT's O also reads a convolution, whose outputs come after the heads.
        rows = mask.T[:size] if kind == "O" else mask
        by_group = rows.float().mean(1).view(-1, size // heads).mean(1)
        shares.append(by_group.repeat_interleave(heads // len(by_group)))
    return torch.stack(shares).mean(0).tolist()
