"""`kdcli prune EMBEDDER --task embedding`: removes weights of an embedding model while it keeps its own vectors.

Texts -> the dense model's vectors, once -> the loss of `kdcli.losses.embedding` under the masks -> masked and compact
models that sentence-transformers loads, judged by their vectors. No labels.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.data.labelled.features import Array, TokenizedRows
from kdcli.data.text.sentences import Texts, held_out_count, read_texts
from kdcli.deploy.environment import versions
from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.compact import compact
from kdcli.deploy.sparse.mask_file import MaskInfo, facts_of, write_mask
from kdcli.engine.launch import Session, choose_output_dir
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import MachineError, UsageError
from kdcli.losses import build_objective
from kdcli.losses.embedding import check_dimensions
from kdcli.models.capture import capture
from kdcli.models.card import describe, describe_source
from kdcli.models.embedder import Pool, read_format, save_embedder
from kdcli.models.layout import PATHS
from kdcli.models.load import location
from kdcli.models.shape import shape_of
from kdcli.models.training_rows import training_rows
from kdcli.pruners import Pruner, build_pruner
from kdcli.pruners.selection import down_to_one
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    measure,
    quality_of,
    write_report,
)
from kdcli.run.stages import StageJob
from kdcli.targets.vectors import Targets, anchors_of, order_of_texts, signals_of, stored_vectors
from kdcli.types import Batch, Job, Needs, Outcome, StepLoss, Term
from kdcli.verbs.prune.job import TRACE, Trace, density_warnings
from kdcli.verbs.prune.save import COMPACT, DENSE, LOSSLESS, MASK, MASKED, SCORES, pruning_facts
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.embedding_scores import Judged, judged_sets, scored

TASK = "embedding"
HELD_OUT = 256  # Texts, or a tenth of few
KEPT = "cosine to the dense model's vectors, held-out texts"


@dataclass
class EmbeddingPruning:
    """A pruning of an embedding model, checked; its one stage."""

    resolved: Resolved[PruneRecipe]
    invocation: RunOptions
    folder: Path
    session: Session
    dense: Embedder
    texts: Texts
    rows: TokenizedRows
    judged: list[Judged]
    pruner: Pruner | None = None
    model: PreTrainedModel | None = None
    of_base: dict[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> "list[EmbeddingPruning]":
        return [self]

    def build(self) -> StageJob:
        recipe, session, dense = self.resolved.recipe, self.session, self.dense
        held, numbers = held_out_count(self.texts.texts, HELD_OUT), np.arange(len(self.texts))
        order, schedule = order_of_texts(recipe.train, self.rows.lengths[held:])
        # Before the dense model takes the compute dtype.
        model = copy.deepcopy(dense.model)
        card = describe_source(model, dense.source)
        self.of_base = facts_of(model, dense.source)
        vectors = stored_vectors(
            dense, self.rows, recipe.embedding.cache_gb, session, dry_run=self.invocation.dry_run
        )
        dense.model.cpu()
        how: dict[str, Any] = {
            "density": 1 - recipe.sparsity[0],
            "steps": schedule.steps,
            "lr": recipe.train.lr,
        }
        pruner = build_pruner(recipe.method, recipe.pruner, model, **how)
        for name, parameter in model.named_parameters():
            if name.startswith("pooler."):
                parameter.requires_grad_(False)  # No vector depends on it.
        for warning in density_warnings(recipe, pruner, schedule.steps):
            Progress.log(warning)
        shape = shape_of(model.config)
        objective = build_objective(TASK, recipe.loss, shape, shape)
        student = capture(model, objective.student_needs, Pool(dense.format).requires_grad_(False))
        anchors_RE = anchors_of(
            vectors, numbers[held:], recipe.embedding.anchors, recipe.train.seed
        ).to(session.device)
        trace = Trace(
            pruner,
            self.folder if session.is_main and not self.invocation.dry_run else None,
            schedule.steps,
        )

        def step(batch: Batch) -> StepLoss:
            own = (
                {n: Term(value, "rows") for n, value in pruner.terms().items()}
                if torch.is_grad_enabled()
                else {}
            )
            terms = objective.terms(signals_of(batch, anchors_RE), student(batch))
            return StepLoss(
                {name: Term(value, objective.over[name]) for name, value in terms.items()} | own
            )

        def on_step_end(done: int) -> None:
            pruner.after(done)
            trace.after(done)

        train, held_out = (
            Targets(self.rows, vectors, self.texts, n) for n in (numbers[held:], numbers[:held])
        )
        hooks: dict[str, Any] = {"param_group": pruner.param_group, "on_step_end": on_step_end}
        job = Job({"model": student}, step, train, order, held_out, **hooks)
        if not self.invocation.dry_run:
            self.pruner, self.model = pruner, model
        return StageJob(job, schedule, order.steps_of_pass, {DENSE: card})

    def finish(self, outcome: Outcome) -> None:
        if self.session.is_main:
            self._save_and_report(outcome)
        self.session.wait()

    def report(self) -> None:
        """The stage wrote it."""

    def _save_and_report(self, outcome: Outcome) -> None:
        recipe, dense, folder, pruner, model = (
            self.resolved.recipe,
            self.dense,
            self.folder,
            self.pruner,
            self.model,
        )
        assert pruner is not None
        assert model is not None
        model.cpu().eval()
        masks, scores, rows = (
            pruner.masks.masks(),
            pruner.masks.scores(),
            training_rows(location(dense.source)),
        )
        pruner.masks.fold()
        notes = [
            f"{dense.source}: {dense.note}",
            f"{len(self.texts):,} distinct texts",
            *down_to_one(masks),
        ]
        notes += density_warnings(recipe, pruner, outcome.steps)
        save_embedder(model, dense.tokenizer, dense.format, folder, rows)
        models = {DENSE: Embedder.open(dense.source, pooling=recipe.embedding.pooling)}
        models[MASKED] = Embedder.open(str(folder))
        card = describe(model, str(folder), folder)
        reported = [
            ReportedModel(DENSE, "baseline", describe_source(models[DENSE].model, dense.source)),
            ReportedModel(MASKED, "pruned", card, DENSE, folder),
        ]
        subjects = [Subject(DENSE, location(dense.source)), Subject(MASKED, str(folder))]
        if model.config.model_type in PATHS:
            small = compact(model, drop_rows_below=recipe.drop_rows_below)
            save_embedder(small, dense.tokenizer, dense.format, folder / COMPACT, rows)
            models[COMPACT] = Embedder.open(str(folder / COMPACT), compacted=True)
            card = describe(small, str(folder / COMPACT), folder / COMPACT)
            reported.append(ReportedModel(COMPACT, "pruned", card, DENSE))
            subjects.append(Subject(COMPACT, str(folder / COMPACT)))
        if self.session.device.type == "cpu":
            subjects.append(Subject("sparse", str(folder), "sparse"))
        evaluations, comparisons = scored(self.judged, models, self.session)
        kept, difference = self._kept(models)
        if recipe.drop_rows_below <= 1 and not difference <= LOSSLESS:
            raise MachineError(
                f"the compacted model differs from the masked one by {difference:.1e}, which is a bug"
            )
        if pruner.trains_weights:
            notes.append(
                f"no mask file: {recipe.method} trains the weights too, so a mask alone would not make the model"
            )
        else:
            metrics = {
                n: v for row in evaluations if row.model == MASKED for n, v in row.metrics.items()
            }
            facts = self.of_base | {
                "versions": versions(),
                "method": recipe.method,
                "metrics": metrics,
            }
            facts["pooling"] = None if read_format(dense.source) else dense.format.pooling
            info = MaskInfo(density=1 - recipe.sparsity[0], max_length=dense.max_length, **facts)
            write_mask(folder / MASK, info, masks, rows=rows)
            if scores:
                write_mask(folder / SCORES, info, masks, scores=scores, rows=rows)
        trace = json.loads((folder / TRACE).read_text("utf-8"))
        contents = ReportContents(
            "prune",
            recipe,
            reported,
            outcome=outcome,
            latency=measure(subjects, recipe.measure, self.session),
            evaluations=evaluations,
            comparisons=comparisons,
            quality=quality_of(evaluations) | {KEPT: kept},
            notes=notes,
            pruning=[pruning_facts(recipe, model, masks, trace)],
        )
        write_report(RunDir(folder), contents)

    def _kept(self, models: dict[str, Embedder]) -> tuple[dict[str, dict[str, float]], float]:
        """How near the vectors of held-out texts are to the dense model's, and how far the compact model's are from the
        masked one's."""
        held = held_out_count(self.texts.texts, HELD_OUT)
        of: dict[str, Array] = {
            n: m.vectors(self.texts.texts[:held], "", self.session) for n, m in models.items()
        }
        near = {name: cosines(vectors, of[DENSE]) for name, vectors in of.items() if name != DENSE}
        difference = float(np.abs(of[COMPACT] - of[MASKED]).max()) if COMPACT in of else 0.0
        size = max(1.0, float(np.abs(of[MASKED]).max()))
        return {
            n: {"mean": float(c.mean()), "least": float(c.min())} for n, c in near.items()
        }, difference / size


def prepare_embedding(
    recipes: Sequence[Resolved[PruneRecipe]],
    first: Resolved[PruneRecipe],
    invocation: RunOptions,
    session: Session,
) -> EmbeddingPruning:
    """Check everything and read the texts; claims nothing. Raises KdcliError: recipe, model or texts cannot be used."""
    recipe = first.recipe
    if len(recipes) > 1 or len(recipe.sparsity) > 1:
        raise UsageError(
            "--task embedding takes one method and one sparsity", "start a run for each"
        )
    if recipe.teacher is not None or recipe.keep == "best":
        raise UsageError(
            "--task embedding learns the model's own vectors: no --teacher, and the last masks are kept"
        )
    dense = Embedder.open(
        str(recipe.model),
        pooling=recipe.embedding.pooling,
        trust_remote_code=session.trust_remote_code,
    )
    Progress.log(f"{dense.source}: {dense.note}")
    shape = shape_of(dense.model.config)
    if build_objective(TASK, recipe.loss, shape, shape).teacher_needs != Needs():
        raise UsageError(
            "loss.relations_weight and loss.hidden_weight are for kdcli distill, not for prune"
        )
    check_dimensions(recipe.loss, dense.format.width(shape.hidden))
    if recipe.data.source is None:
        raise UsageError("no text given", "kdcli prune EMBEDDER --task embedding --data TEXT")
    folder = choose_output_dir(
        f"prune-{Path(dense.source).name}-{TASK}", first, invocation, session
    )
    judged = judged_sets(recipe.eval, {dense.source: training_rows(location(dense.source))})
    settings = recipe.embedding
    how: dict[str, Any] = {
        "rows": settings.rows,
        "paired": recipe.loss.get("contrastive_weight", 0) > 0,
    }
    texts = read_texts(recipe.data.source, column=None, unit=settings.unit, log=Progress.log, **how)
    rows = dense.rows(texts.texts, texts.roles, recipe.data.max_length)
    Progress.log(f"{len(rows):,} texts of {rows.lengths.mean():.0f} tokens")
    return EmbeddingPruning(first, invocation, folder, session, dense, texts, rows, judged)
