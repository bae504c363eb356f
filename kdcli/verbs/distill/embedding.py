"""Distilling an embedding model: texts -> the teacher's vectors, once -> students of one pass -> reports.

A student's target is the teacher's vector; where its own vectors are narrower, or the loss cuts them (Matryoshka), the
vector in the principal components of the teacher's space, so that its first components say most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.data.labelled.features import Array, TokenizedRows
from kdcli.data.text.sentences import Texts, held_out_count, read_texts
from kdcli.deploy.latency import Subject
from kdcli.engine.launch import Session, choose_output_dir
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings
from kdcli.losses.embedding import check_dimensions
from kdcli.models.card import describe, describe_source
from kdcli.models.embedder import EmbeddingFormat, Pool, read_format, save_embedder
from kdcli.models.load import location
from kdcli.models.reduce import components
from kdcli.models.shape import InitializedStudent, build_student, shape_of
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    measure,
    quality_of,
    write_report,
)
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import TEACHER, UNDISTILLED
from kdcli.run.stages import StageJob
from kdcli.targets.given import read_vectors
from kdcli.targets.task_teacher import same_tokens
from kdcli.targets.teacher import Teacher
from kdcli.targets.vectors import (
    Targets,
    Vectors,
    anchors_of,
    order_of_texts,
    signals_of,
    stored_vectors,
)
from kdcli.types import Batch, ModelShape, Needs, Objective, Outcome, Signals
from kdcli.verbs.distill.plan import as_directory, short_name, student_shapes
from kdcli.verbs.distill.settings import DistillRecipe, EmbeddingSettings
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unused,
    relation_kernel,
    teacher_needs,
)
from kdcli.verbs.distill.text import HELD_OUT, held_out_losses
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding_scores import Judged, judged_sets, scored

METHOD = "embedding"
DEFAULTS: dict[str, Any] = {"train.lr": 5e-4, "train.batch_size": 64, "train.epochs": 1.0}
"""Of recipe keys that nobody set."""
BASIS_ROWS = 50_000  # Vectors that give the principal components
TURNED_ROWS = 1000  # Vectors of a student before training, to which these are turned


def with_method(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """The recipe with the method that its teacher wants where none was named, and the defaults of that method."""
    recipe = resolved.recipe
    if (
        "method" not in resolved.origins
        and recipe.teacher is not None
        and read_format(recipe.teacher) is not None
    ):
        resolved = defaulted(resolved, {"method": METHOD}, "the teacher is an embedding model")
    if resolved.recipe.method == METHOD:
        return defaulted(resolved, DEFAULTS, f"default of {METHOD}")
    if recipe.student.source is not None:
        raise UsageError(
            f"--student: method {recipe.method} compares token states, so its student starts from the teacher",
            f"another encoder learns by --method {METHOD}, or on a task by --task T --method soft-targets",
        )
    if recipe.embedding != EmbeddingSettings():
        raise UsageError(
            f"the keys of embedding: are for --method {METHOD}, not for {recipe.method}"
        )
    return resolved


class Basis(nn.Module):
    """The teacher's principal components that a student learns, [E, D]; no parameter, but checkpointed."""

    basis_ED: Tensor

    def __init__(self, basis_ED: Tensor, inner: nn.Module) -> None:
        super().__init__()
        self.register_buffer("basis_ED", basis_ED)
        self.inner = inner

    def forward(self, vectors: Tensor | None) -> Tensor | None:
        return None if vectors is None else vectors @ self.basis_ED


def projected(objective: Objective, basis_ED: Array | None) -> Objective:
    """The objective against the teacher's vectors in another basis."""
    if basis_ED is None:
        return objective
    basis = Basis(torch.from_numpy(basis_ED), objective.projections)

    def terms(t: Signals, s: Signals) -> Mapping[str, Tensor]:
        others = {
            "anchors": basis(t.anchors),
            "positive": basis(t.positive),
            "negatives": basis(t.negatives),
        }
        return objective.terms(replace(t, pooled=basis(t.pooled), **others), s)

    return replace(objective, projections=basis, terms=terms)


def principal_basis(vectors_NE: Array, width: int) -> Array:
    """The `width` directions of most energy, [E, width] float32, orthonormal; of second moments, because cosines are
    about the origin and not about the mean."""
    x_NE = torch.from_numpy(vectors_NE.astype(np.float64))
    return np.ascontiguousarray(components(x_NE.T @ x_NE, width).float().numpy())


@dataclass
class EmbeddingRun:
    """A distillation of an embedding model, checked; its one stage."""

    resolved: Resolved[DistillRecipe]
    invocation: RunOptions
    folder: Path
    session: Session
    teacher: Embedder
    origin: (
        Embedder  # that students start from, with their tokenizer: the teacher, or another encoder
    )
    shapes: Mapping[str, ModelShape]
    texts: Texts
    rows: TokenizedRows  # of the students
    teacher_rows: TokenizedRows
    judged: list[Judged]
    given: Array | None  # vectors from a file
    students: dict[str, Student] = field(default_factory=dict)
    formats: dict[str, EmbeddingFormat] = field(default_factory=dict)

    @property
    def stages(self) -> "list[EmbeddingRun]":
        return [self]

    def model_folder(self, name: str) -> Path:
        """Where a student is saved: the run directory, or with several students one directory each."""
        return self.folder if len(self.shapes) == 1 else self.folder / as_directory(name)

    def build(self) -> StageJob:
        recipe, session, shape = (
            self.resolved.recipe,
            self.session,
            shape_of(self.teacher.model.config),
        )
        held, settings = (
            held_out_count(self.texts.texts, recipe.data.held_out_blocks),
            recipe.embedding,
        )
        everything = np.arange(len(self.texts))
        vectors = self._vectors()
        anchors_RE = anchors_of(vectors, everything[held:], settings.anchors, recipe.train.seed)
        kernel = relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
        self.students = {}
        for name, to in self.shapes.items():
            built = self._initialized(to)
            torch.manual_seed(recipe.train.seed)
            fmt, basis_ED = self._format(to, built.model, vectors, everything[held:])
            objective = projected(
                build_objective(METHOD, recipe.loss, shape, to, kernel=kernel), basis_ED
            )
            self.students[name], self.formats[name] = (
                Student(built.model, objective, Pool(fmt)),
                fmt,
            )
            for note in built.notes:
                Progress.log(f"{name}: {note}")
        needs = teacher_needs(self.students)
        reader = self.teacher.model
        live = (
            None
            if needs == Needs()
            else Teacher.frozen(self.teacher.source, reader, needs, session)
        )

        def signals(batch: Batch) -> Signals:
            return signals_of(batch, anchors_RE, live)

        train = Targets(self.rows, vectors, self.texts, everything[held:])
        held_out = Targets(self.rows, vectors, self.texts, everything[:held])
        # The students are on the CPU still.
        reader.cpu()
        batch = train.batch(np.arange(min(2, len(train))))
        of_teacher = signals(batch)
        for made in self.students.values():
            fit_projections(made.objective, reader, made.encoder, train)
        freeze_unused(self.students, batch, of_teacher)
        reader.to(session.device)
        anchors_RE = anchors_RE.to(session.device)
        order, schedule = order_of_texts(recipe.train, self.rows.lengths[train.numbers])
        job = distill_job(self.students, signals, train, order, held_out)
        cards = {}
        if self.invocation.dry_run:
            cards = {TEACHER: describe(self.teacher.model, self.teacher.source, None)}
            cards |= {
                n: describe(s.encoder, str(self.model_folder(n)), None)
                for n, s in self.students.items()
            }
        return StageJob(job, schedule, order.steps_of_pass, cards)

    def finish(self, outcome: Outcome) -> None:
        if self.session.is_main:
            for name, student in self.students.items():
                pool = student.captured.pool
                assert isinstance(pool, Pool)
                self.formats[name] = replace(self.formats[name], dense=pool.format_of_dense)
                save_embedder(
                    student.encoder,
                    self.origin.tokenizer,
                    self.formats[name],
                    self.model_folder(name),
                )
        self.session.wait()
        if self.session.is_main:
            self._report(outcome)

    def report(self) -> None:
        """The stage wrote it."""

    @property
    def teacher_width(self) -> int:
        """Components of the teacher's vectors."""
        if self.given is not None:
            return int(self.given.shape[1])
        return self.teacher.format.width(self.teacher.model.config.hidden_size)

    def _vectors(self) -> Vectors:
        if (given := self.given) is not None:
            return lambda at: np.take(given, at, axis=0)
        how = self.resolved.recipe.embedding.cache_gb, self.session
        return stored_vectors(
            self.teacher, self.teacher_rows, *how, dry_run=self.invocation.dry_run
        )

    def _format(
        self, to: ModelShape, model: PreTrainedModel, vectors: Vectors, texts: Array
    ) -> tuple[EmbeddingFormat, Array | None]:
        """How a student of a shape, initialised as `model`, makes vectors, and the basis of its targets."""
        recipe, fmt = self.resolved.recipe, self.origin.format
        wide, dimensions = self.teacher_width, recipe.loss.get("dimensions")
        foreign = self.given is not None or recipe.student.source is not None
        if to.hidden != self.origin.model.config.hidden_size or foreign or dimensions:
            fmt = replace(fmt, dense=None)
        width, basis_ED = fmt.width(to.hidden), None
        if width == wide and not (foreign or dimensions):
            return fmt, None
        if dimensions or (width < wide and not recipe.embedding.dense):
            sample = np.sort(
                np.random.default_rng(recipe.train.seed).permutation(texts)[:BASIS_ROWS]
            )
            basis_ED = principal_basis(vectors(sample), min(width, wide))
            x = vectors(sample).astype(np.float64)
            share = np.square(x @ basis_ED).sum() / np.square(x).sum()
            Progress.log(
                f"targets: {basis_ED.shape[1]} principal components of the teacher's {wide}, {share:.1%} of the energy"
            )
        turn_ED = self._turn(
            basis_ED, Embedder("", model.eval(), self.origin.tokenizer, fmt, ""), vectors
        )
        if basis_ED is not None and not dimensions:
            return fmt, basis_ED @ turn_ED
        # Components that are to be cut, and the space of another model, stay: a dense layer turns the student to them.
        return replace(fmt, dense=(torch.from_numpy(turn_ED), None, False)), basis_ED

    def _turn(self, basis_ED: Array | None, student: Embedder, vectors: Vectors) -> Array:
        """The rotation [E, D] from targets, the teacher's vectors in a basis, to where the student's vectors are before
        training (orthogonal Procrustes). Every rotation keeps all cosines, so the nearest one leaves least to learn."""
        at = np.sort(
            np.random.default_rng(self.resolved.recipe.train.seed).permutation(len(self.texts))[
                :TURNED_ROWS
            ]
        )
        own_ND = student.vectors(
            [self.texts.texts[n] for n in at], "", replace(self.session, device=torch.device("cpu"))
        )
        targets_NE = vectors(at).astype(np.float64)
        targets_NE = targets_NE if basis_ED is None else targets_NE @ basis_ED
        u, _, v = np.linalg.svd(targets_NE.T @ own_ND, full_matrices=False)
        return np.asarray(u @ v, dtype=np.float32)

    def _initialized(self, to: ModelShape) -> InitializedStudent:
        how = self.resolved.recipe.student.model_dump(include={"init", "layers", "dropout"})
        held = held_out_count(self.texts.texts, self.resolved.recipe.data.held_out_blocks)
        text = self.rows.take(
            np.arange(held, len(self.rows))[:: max(1, (len(self.rows) - held) // 1000)]
        )
        return build_student(
            self.origin.model.base_model, to, **how, text=text, seed=self.resolved.recipe.train.seed
        )

    def _report(self, outcome: Outcome) -> None:
        recipe, teacher, origin, session = (
            self.resolved.recipe,
            self.teacher,
            self.origin,
            self.session,
        )
        models = {TEACHER: teacher}
        for name, to in self.shapes.items():
            models[name] = Embedder.open(str(self.model_folder(name)))
            # In memory: the same shape, copied and not trained.
            copied = self._initialized(to).model.eval()
            same = to.hidden == origin.model.config.hidden_size
            fmt = replace(self.formats[name], dense=origin.format.dense if same else None)
            models[name + UNDISTILLED] = Embedder(
                name, copied, origin.tokenizer, fmt, "copied, not distilled"
            )
        evaluations, comparisons = scored(self.judged, models, session)
        folders = {name: self.model_folder(name) for name in self.shapes}
        card = describe_source(teacher.model, teacher.source)
        reported = [ReportedModel(TEACHER, "teacher", card)]
        for name, folder in folders.items():
            card = describe(self.students[name].encoder, str(folder), folder)
            reported.append(ReportedModel(name, "student", card, TEACHER, folder))
        subjects = [
            Subject(TEACHER, location(teacher.source)),
            *(Subject(n, str(f)) for n, f in folders.items()),
        ]
        quality = quality_of(evaluations) | {
            HELD_OUT: held_out_losses(RunDir(self.folder), list(self.shapes))
        }
        notes = [
            f"{teacher.source}: {teacher.note}",
            f"{len(self.texts):,} distinct texts",
        ]
        if recipe.student.source is not None:
            notes.append(
                f"the student starts from {origin.source} and reads with its tokenizer: {origin.note}"
            )
        if recipe.embedding.vectors:
            notes.append(
                f"the student learnt the vectors in {recipe.embedding.vectors}, not the teacher's own"
            )
        contents = ReportContents(
            "distill",
            recipe,
            reported,
            outcome=outcome,
            latency=measure(subjects, recipe.measure, session),
            evaluations=evaluations,
            comparisons=comparisons,
            quality=quality,
            notes=notes,
            auto_class=EMBEDDER,
        )
        write_report(RunDir(self.folder), contents)


def check_embedding(recipe: DistillRecipe) -> None:
    """Raise a `UsageError` for a mistake in the recipe alone."""
    if recipe.teacher is None or not (recipe.student.to or recipe.student.source):
        missing = "no teacher" if recipe.teacher is None else "no student shape"
        raise UsageError(
            f"{missing} given", "kdcli distill TEACHER --to LxH --method embedding --data TEXT"
        )
    check_settings(METHOD, recipe.loss)
    if recipe.data.pack_isolated:
        raise UsageError(
            "data.pack_isolated is for methods that read blocks of text, not for embedding"
        )
    if recipe.variants or recipe.eval.at:
        raise UsageError(
            f"--ablate and eval.at are for methods that read blocks of text, not for {METHOD}"
        )


def prepare_embedding(
    resolved: Resolved[DistillRecipe], invocation: RunOptions, session: Session
) -> EmbeddingRun:
    """Check everything and read the texts; claims nothing. Raises KdcliError: recipe, model or texts cannot be used."""
    recipe = resolved.recipe
    trusted = session.trust_remote_code
    relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    teacher = Embedder.open(
        str(recipe.teacher), pooling=recipe.embedding.pooling, trust_remote_code=trusted
    )
    Progress.log(f"{teacher.source}: {teacher.note}")
    origin = _origin(recipe, teacher, session) if recipe.student.source else teacher
    shape = shape_of(origin.model.config)
    shapes = student_shapes(recipe, shape) if recipe.student.to else {"student": shape}
    invocation.check_pushed(len(shapes))
    for to in shapes.values():
        objective = build_objective(METHOD, recipe.loss, shape_of(teacher.model.config), to)
        other = recipe.student.source and not same_tokens(teacher.tokenizer, origin.tokenizer)
        if objective.teacher_needs != Needs() and other:
            raise UsageError(
                f"loss.relations_weight and loss.hidden_weight compare tokens, and {origin.source} has others than "
                f"{teacher.source}",
                "leave them at 0: vectors, similarity and contrastive compare whole texts",
            )
    name = f"{Path(teacher.source).name}-{'+'.join(short_name(s, shape) for s in shapes.values())}"
    folder = choose_output_dir(as_directory(f"distill-{name}"), resolved, invocation, session)
    sources = [one.source for one in (teacher, origin)]
    judged = judged_sets(
        recipe.eval, {source: training_rows(location(source)) for source in sources}
    )
    settings, data = recipe.embedding, recipe.data
    # A file has a vector for each text as it stands.
    unit = "document" if settings.vectors else settings.unit
    how: dict[str, Any] = {
        "rows": settings.rows,
        "paired": recipe.loss.get("contrastive_weight", 0) > 0,
    }
    texts = read_texts(data.source, column=data.column, unit=unit, log=Progress.log, **how)
    given = read_vectors(Path(settings.vectors), texts) if settings.vectors else None
    wide = (
        teacher.format.width(teacher.model.config.hidden_size) if given is None else given.shape[1]
    )
    for to in shapes.values():
        check_dimensions(recipe.loss, min(to.hidden, wide))
    rows = origin.rows(texts.texts, texts.roles, data.max_length)
    of_teacher = (
        rows if origin is teacher else teacher.rows(texts.texts, texts.roles, data.max_length)
    )
    Progress.log(f"{len(rows):,} texts of {rows.lengths.mean():.0f} tokens")
    return EmbeddingRun(
        resolved,
        invocation,
        folder,
        session,
        teacher,
        origin,
        shapes,
        texts,
        rows,
        of_teacher,
        judged,
        given,
    )


def _origin(recipe: DistillRecipe, teacher: Embedder, session: Session) -> Embedder:
    """The encoder of `student.source`. One without modules of its own makes vectors as the teacher does."""
    source = str(recipe.student.source)
    own = read_format(source) is not None
    origin = Embedder.open(source, trust_remote_code=session.trust_remote_code)
    if not own:
        longest = teacher.format.max_length
        if longest is not None:
            longest = min(longest, origin.max_length)
        fmt = replace(teacher.format, dense=None, max_length=longest)
        origin = replace(origin, format=fmt, note=f"{fmt.pooling} pooling, as its teacher has")
    Progress.log(f"{source}: {origin.note}")
    return origin
