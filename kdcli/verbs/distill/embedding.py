"""Distil an embedding model: texts -> the teacher's vectors, once -> students -> reports.

A student's target is the teacher's vector. If the student's vectors are narrower, or the loss cuts
them (Matryoshka), the target is projected onto the principal components of the teacher's space, so
that the first components carry most of the energy.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.data.text.sentences import read_texts
from kdcli.disk import as_directory
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.losses import build_objective
from kdcli.losses.embedding import check_dimensions, check_pairs
from kdcli.models.card import describe
from kdcli.models.embedder import EmbeddingFormat, Pool, read_format, save_embedder
from kdcli.models.grammar import goal_of, static_shape
from kdcli.models.load import load_config, location
from kdcli.models.shape import InitializedStudent, shape_of
from kdcli.models.static import as_static
from kdcli.models.training_rows import all_rows, training_rows
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.report.entry import Entry
from kdcli.report.finish import ReportContents, quality_of
from kdcli.report.front import EMBEDDER
from kdcli.report.schema import HELD_OUT_LOSS, TEACHER, UNDISTILLED
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.precomputed import read_vectors
from kdcli.targets.targets import Vectors, VectorTargets, anchors_of
from kdcli.targets.teacher import Teacher
from kdcli.types import Array, ModelShape, Needs, Outcome, RowHashes
from kdcli.verbs.distill.basis import projected
from kdcli.verbs.distill.embedding_checks import check_signals
from kdcli.verbs.distill.fast import how_distilled, shape_notes, with_shape
from kdcli.verbs.distill.held_out import held_out_losses
from kdcli.verbs.distill.layers import start_of, with_measured_layers
from kdcli.verbs.distill.plan import student_shapes
from kdcli.verbs.distill.router import ROUTER, check_router, save_router
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.space import VectorSpace, vector_settings
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unused_weights,
    relation_kernel,
    teacher_needs,
)
from kdcli.verbs.distill.teachers import join_vectors, open_more_teachers
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding import METHOD, EmbeddingWorkload
from kdcli.workloads.embedding_texts import divided_texts
from kdcli.workloads.eval_sets import open_eval_sets
from kdcli.workloads.static_students import static_student
from kdcli.workloads.training import first_rows


def with_learning_rate(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """Set the learning rate for the width of the model that the student starts from.

    The rate stays as it is if the user or the recipe set it, or if `--to` names shapes.

    Raises KdcliError: the model that the student starts from cannot be read.
    """
    student = resolved.recipe.student
    if "train.lr" in resolved.origins:
        return resolved
    config = load_config(str(student.source or resolved.recipe.teacher))
    [(origin, rate)] = resolved.recipe.rate_at(shape_of(config).hidden).items()
    return defaulted(resolved, rate, origin)


@dataclass(frozen=True)
class EmbeddingDistillation:
    """A distillation of an embedding model, checked.

    Attributes:
        context: The run.
        teacher: The model whose vectors are learned.
        workload: The texts, tokenised for the model that the students start from.
        shapes: The students' shapes by name.
        precomputed_NE: The teacher's vectors from a file; None computes them.
        more_teachers: Teachers whose vectors are joined to those of the first one.
    """

    context: RunContext[DistillRecipe]
    teacher: Embedder
    workload: EmbeddingWorkload
    shapes: Mapping[str, ModelShape]
    precomputed_NE: Array | None
    more_teachers: Sequence[Embedder] = ()

    @property
    def origin(self) -> Embedder:
        """The encoder that students start from, with their tokenizer."""
        assert self.workload.reader is not None
        return self.workload.reader

    def model_folder(self, name: str) -> Path:
        """Return where a student is saved: the run directory, or a directory of its own in it."""
        folder = self.context.folder
        return folder if len(self.shapes) == 1 else folder / as_directory(name)

    def build(self) -> StageJob:
        """Make the students, compute the teacher's vectors, and build the job that trains them."""
        recipe, session, workload = self.context.recipe, self.context.session, self.workload
        # Before the teacher computes vectors, it is cast to the compute dtype.
        encoders = {n: self._initialized(to) for n, to in self.shapes.items() if not to.is_static}
        vectors = self._vectors()
        space = VectorSpace(recipe, session, workload, vectors, self.teacher_width)
        train = workload.train_numbers
        anchors_RE = anchors_of(vectors, train, vector_settings(recipe).anchors, recipe.train.seed)
        kernel = relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
        students: dict[str, Student] = {}
        formats: dict[str, EmbeddingFormat] = {}
        starts = {name: copy.deepcopy(built.model) for name, built in encoders.items()}
        for name, to in self.shapes.items():
            if to.is_static:
                fmt, basis_ED = space.of_static(to)
                built = self._static(to, vectors, basis_ED)
                starts[name] = copy.deepcopy(built.model)
            else:
                built = encoders[name]
                torch.manual_seed(recipe.train.seed)
                fmt, basis_ED = space.of_student(to, built.model)
            objective = build_objective(METHOD, recipe.loss, self.teacher.shape, to, kernel=kernel)
            students[name] = Student(built.model, projected(objective, basis_ED), Pool(fmt))
            formats[name] = fmt
            for note in built.notes:
                Progress.log(f"{name}: {note}")
        needs = teacher_needs(students)
        # The teacher reads the students' rows, so it needs their tokens.
        reader = (self.teacher if recipe.student.source else self.origin).model
        live = None
        if needs != Needs():
            live = Teacher.frozen(self.teacher.source, reader, needs, session)
        targets = VectorTargets(vectors, workload.all_texts, anchors_RE, live)
        # The students are still on the CPU.
        reader.cpu()
        for student in students.values():
            fit_projections(student.objective, reader, student.encoder, workload.examples)
        if recipe.train.trains:
            examples, _ = targets.attach(workload.examples, workload.held_out)
            batch = first_rows(examples)
            signals = targets.signals(batch)
            assert signals is not None
            freeze_unused_weights(students, batch, signals)
        reader.to(session.device)
        targets = replace(targets, anchors_RE=anchors_RE.to(session.device))
        plan = workload.plan(recipe.train)
        job = distill_job(students, targets, workload, plan.order)
        cards = {}
        if self.context.dry_run:
            cards[TEACHER] = describe(self.teacher.model, self.teacher.source, None)
            for name, student in students.items():
                cards[name] = describe(student.encoder, str(self.model_folder(name)), None)

        def finish(outcome: Outcome) -> None:
            self._finish(students, formats, starts, outcome)

        return StageJob(job, plan.schedule, plan.steps_per_pass, finish, cards)

    def _finish(
        self,
        students: Mapping[str, Student],
        formats: dict[str, EmbeddingFormat],
        starts: Mapping[str, PreTrainedModel],
        outcome: Outcome,
    ) -> None:
        context = self.context
        if context.is_main:
            for name, student in students.items():
                pool = student.captured.pool
                assert isinstance(pool, Pool)
                formats[name] = replace(formats[name], dense=pool.format_of_dense)
                folder = self.model_folder(name)
                tokenizer, fmt = self.origin.tokenizer, formats[name]
                save_embedder(student.encoder, tokenizer, fmt, folder, self.rows)
                if vector_settings(context.recipe).router:
                    self._save_router(name, student, formats[name])
        context.session.wait()
        if context.is_main:
            self._report(students, formats, starts, outcome)

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that trained the students' teachers or the encoder they start from."""
        models = (self.origin, self.teacher, *self.more_teachers)
        return all_rows(*(model.rows for model in models))

    @property
    def teacher_width(self) -> int:
        """The number of components of the teacher's vectors."""
        if self.precomputed_NE is not None:
            return int(self.precomputed_NE.shape[1])
        teachers = [self.teacher, *self.more_teachers]
        return sum(each.format.width(each.shape.hidden) for each in teachers)

    def _vectors(self) -> Vectors:
        precomputed_NE = self.precomputed_NE
        if precomputed_NE is not None:
            return lambda at: np.take(precomputed_NE, at, axis=0)
        first = self._vectors_of(self.teacher)
        if not self.more_teachers:
            return first
        return join_vectors([first, *map(self._vectors_of, self.more_teachers)])

    def _vectors_of(self, teacher: Embedder) -> Vectors:
        workload = self.workload
        tokens, texts = workload.tokens, workload.all_texts
        if teacher is not self.origin:
            max_length = self.context.recipe.data.max_length
            tokens = teacher.tokenize(texts.texts, texts.roles, max_length)
        trains, dry_run = self.context.recipe.train.trains, self.context.dry_run
        vectors = workload.vectors_of(teacher, tokens, dry_run=dry_run, stored=trains)
        if trains and teacher in self.more_teachers:
            teacher.model.cpu()
        return vectors

    def _static(
        self, to: ModelShape, vectors: Vectors, basis_ED: Array | None
    ) -> InitializedStudent:
        """Make a static student, whose token vectors are fitted to the vectors of texts."""
        numbers = self.workload.train_numbers
        if self.context.dry_run:
            vocab_size = int(self.origin.model.config.vocab_size)
            return InitializedStudent(as_static(torch.zeros(vocab_size, to.hidden)), [])
        return static_student(
            self.workload.tokens,
            numbers,
            vectors,
            basis_ED,
            self.origin,
            self.context.session,
        )

    def _initialized(self, to: ModelShape) -> InitializedStudent:
        recipe = self.context.recipe
        start = start_of(recipe.student, recipe.train.seed)
        return self.workload.make_student(self.origin, to, start)

    def _save_router(self, name: str, student: Student, fmt: EmbeddingFormat) -> None:
        queries = Embedder(student.encoder, self.origin.tokenizer, "", format=fmt)
        router = self.model_folder(name) / ROUTER
        save_router(router, queries, self._teacher_in_float32)
        Progress.log(f"{router}: queries by the student, documents by the teacher")

    @functools.cached_property
    def _teacher_in_float32(self) -> Embedder:
        recipe = self.context.recipe
        return Embedder.open(str(recipe.teacher), pooling=vector_settings(recipe).pooling)

    def _report(
        self,
        students: Mapping[str, Student],
        formats: Mapping[str, EmbeddingFormat],
        starts: Mapping[str, PreTrainedModel],
        outcome: Outcome,
    ) -> None:
        context, teacher, origin = self.context, self.teacher, self.origin
        recipe, names = context.recipe, list(self.shapes)
        scored: dict[str, Embedder] = {TEACHER: teacher}
        if self.workload.eval_sets:
            # The targets were computed in the compute dtype, but models are scored in float32.
            pooling = vector_settings(recipe).pooling
            scored[TEACHER] = self._teacher_in_float32
            for number, more in enumerate(self.more_teachers, 2):
                scored[f"{TEACHER} {number}"] = Embedder.open(more.source, pooling=pooling)
            for name, to in self.shapes.items():
                scored[name] = Embedder.open(str(self.model_folder(name)), compacted=True)
                if not recipe.train.trains:
                    continue
                if to.is_static:
                    untrained = replace(scored[name], model=starts[name], source="")
                    scored[name + UNDISTILLED] = untrained
                    continue
                copied = starts[name].eval()
                untrained = Embedder(copied, origin.tokenizer, "", format=origin.format)
                if to.hidden != origin.shape.hidden:
                    fmt = replace(origin.format, dense=None)
                    untrained = replace(untrained, format=fmt)
                scored[name + UNDISTILLED] = untrained
        result = self.workload.evaluate(scored)
        models = [Entry.loaded(TEACHER, "teacher", teacher)]
        assert models[0].card is not None
        made = how_distilled(models[0].card, recipe)
        for number, more in enumerate(self.more_teachers, 2):
            entry = Entry.loaded(f"{TEACHER} {number}", "teacher", more)
            models.append(replace(entry, timed=None))
        for name in names:
            encoder, folder = students[name].encoder, self.model_folder(name)
            student = Entry.saved(name, "student", encoder, folder, TEACHER)
            models.append(replace(student, made=made, source=teacher.source))
        if recipe.train.trains:
            models += map(Entry.without_distillation, names)
        notes = [
            *(f"{each.source}: {each.note}" for each in (teacher, *self.more_teachers)),
            f"{len(self.workload.all_texts):,} distinct texts",
            *shape_notes(recipe.student),
        ]
        if recipe.student.source is not None:
            notes.append(
                f"the student starts from {origin.source} and reads with its tokenizer: "
                f"{origin.note}"
            )
        if given_vectors := vector_settings(recipe).vectors:
            notes.append(
                f"the student learned the vectors in {given_vectors}, not the teacher's own"
            )
        contents = ReportContents("distill", recipe, models, outcome=outcome, notes=notes)
        losses = held_out_losses(RunDir(context.folder), names)
        contents.quality = quality_of(result.evaluations) | {HELD_OUT_LOSS: losses}
        contents.evaluations, contents.comparisons = result.evaluations, result.comparisons
        contents.auto_class = EMBEDDER
        context.report(contents, recipe.measure)


def prepare_embedding(context: RunContext[DistillRecipe]) -> Run:
    """Check everything and read the texts, without claiming the run directory.

    Raises KdcliError: the recipe, a model or the texts cannot be used.
    """
    recipe, session = context.recipe, context.session
    relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    share = max(1, recipe.train.batch_size // session.accelerator.num_processes)
    micro = recipe.train.micro_batch_size or share
    check_pairs(recipe.loss, share // math.ceil(share / micro))
    teacher = Embedder.open(str(recipe.teacher), pooling=vector_settings(recipe).pooling)
    others = open_more_teachers(recipe, teacher)
    for each in (teacher, *others):
        Progress.log_fact(f"{each.source}: {each.note}")
    origin = _origin(recipe, teacher) if recipe.student.source else teacher
    # A shape for a goal is chosen on the texts, which are not read yet.
    shapes = {} if goal_of(recipe.student.to) else _shapes_of(context, teacher, origin)
    sources = [one.source for one in (teacher, *others, origin)]
    trained = {source: training_rows(location(source)) for source in sources}
    eval_sets = open_eval_sets(recipe.eval, trained, session)
    settings, data = vector_settings(recipe), recipe.data
    texts = read_texts(
        data.text,
        column=data.column,
        # A file of vectors has one vector for each whole text.
        unit="document" if settings.vectors else settings.unit,
        rows=settings.rows,
        paired=recipe.loss.get("contrastive_weight", 0) > 0,
        log=Progress.log_fact,
    )
    texts, partitioned = divided_texts(texts, data.partition)
    precomputed_NE = read_vectors(Path(settings.vectors), texts) if settings.vectors else None
    workload = EmbeddingWorkload(
        session,
        origin,
        texts,
        eval_sets,
        settings,
        recipe.loss,
        data.max_length,
        data.held_out_blocks,
        recipe.train.seed,
        partitioned=partitioned,
    )
    if goal_of(recipe.student.to) is not None:
        context = with_shape(context, workload, origin)
        recipe = context.recipe
        shapes = _shapes_of(context, teacher, origin)
    depths = {to.layers for to in shapes.values()}
    context = with_measured_layers(context, workload, origin, depths)
    whole = EmbeddingDistillation(context, teacher, workload, shapes, precomputed_NE, others)
    for name, to in shapes.items():
        if to.is_static:
            # The vectors of a file may be narrower than the teacher's own.
            static_shape(to.hidden, whole.teacher_width)
        check_dimensions(recipe.loss, min(to.hidden, whole.teacher_width))
        check_router(recipe, name, to, origin, whole.teacher_width)
    assert workload.tokens is not None
    resolved = context.resolved
    return Run([Stage(context.folder, resolved, whole.build)], resolved=resolved)


def _shapes_of(
    context: RunContext[DistillRecipe], teacher: Embedder, origin: Embedder
) -> dict[str, ModelShape]:
    """Return the shapes of the students by name, checked.

    Raises UsageError: a shape, or the number of shapes, does not fit the recipe.
    """
    recipe = context.recipe
    width = teacher.format.width(teacher.shape.hidden)
    shapes = {"student": origin.shape}
    if recipe.student.to:
        shapes = student_shapes(recipe, origin.shape, width)
    context.options.check_pushed(len(shapes))
    check_signals(recipe, teacher, origin, shapes)
    return shapes


def _origin(recipe: DistillRecipe, teacher: Embedder) -> Embedder:
    """Load the encoder of `student.source`.

    If it is not an embedding model, it makes vectors in the same way as the teacher.
    """
    source = str(recipe.student.source)
    origin = Embedder.open(source)
    if read_format(source) is None:
        max_length = teacher.format.max_length
        if max_length is not None:
            max_length = min(max_length, origin.max_length)
        fmt = replace(teacher.format, dense=None, max_length=max_length)
        origin = replace(origin, format=fmt, note=f"{fmt.pooling} pooling, as its teacher has")
    Progress.log_fact(f"{source}: {origin.note}")
    return origin
