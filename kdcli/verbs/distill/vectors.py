"""Distil an embedding model: texts -> the teacher's vectors, once -> students -> reports.

A student's target is the teacher's vector. If the student's vectors are narrower, or the loss cuts
them (Matryoshka), the target is projected onto the principal components of the teacher's space, so
that the first components carry most of the energy.
"""

import copy
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.data.text.sentences import read_texts
from kdcli.disk import atomic_dir, read_json, write_atomic
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.losses.embedding import check_dimensions, check_pairs
from kdcli.messages import log, log_fact
from kdcli.models.choose import MIN_ROWS
from kdcli.models.embedding_format import (
    PROMPTS_FILE,
    EmbeddingFormat,
    Pool,
    read_format,
    save_embedder,
)
from kdcli.models.files import LIBRARY, MODULES_FILE
from kdcli.models.grammar import (
    goal_of,
    is_static_shape,
    match_shape,
    shapes_in,
    static_shape,
)
from kdcli.models.load import load_config, location
from kdcli.models.model import training_rows
from kdcli.models.shape import InitializedStudent, shape_of
from kdcli.models.source import is_address
from kdcli.models.static import as_static
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.report.finish import Entry, quality_of
from kdcli.report.schema import HELD_OUT_LOSS, TEACHER, UNDISTILLED
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import Teacher, Vectors, VectorTargets, anchors_of
from kdcli.targets.vector_shards import read_vectors
from kdcli.types import Array, ModelShape, Needs, Outcome
from kdcli.verbs.distill.distillation import (
    Distillation,
    Planned,
    card_of,
    held_out_losses,
    log_notes,
    start_of,
    student_shapes,
    with_measured_layers,
)
from kdcli.verbs.distill.fast import shape_notes, with_shape
from kdcli.verbs.distill.recipe_checks import check_signals
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.space import (
    VectorSpace,
    join_vectors,
    projected,
    student_format,
    vector_settings,
)
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unused_weights,
    objective_of,
    relation_kernel,
    teacher_needs,
)
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embedding_texts import divided_texts
from kdcli.workloads.embeddings import EmbeddingWorkload
from kdcli.workloads.eval_sets import open_eval_sets
from kdcli.workloads.scores import EvaluationResult
from kdcli.workloads.static_students import static_student
from kdcli.workloads.training import first_rows

DEEP = 12
"""From 12 layers on, evenly spaced ones were not the best choice (docs/evidence/start.md)."""
TRIED = "trial, because the teacher is deep"
"""The origin of `student.layers=measured` if the user did not set it."""
MAX_WIDTH = 16_384
"""The widest vectors that teach, whose second moments take 2 GB."""
ROUTER = "router"
"""The directory of the model, in the student's."""


def with_learning_rate(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """Set the learning rate for the width of the model that the student starts from.

    The rate stays as it is if the user or the recipe set it, or if `--to` names shapes.

    Raises:
        KdcliError: The model that the student starts from cannot be read.
    """
    start = _start(resolved.recipe)
    # A server, which has no encoder to start from, is refused where it is opened.
    if "train.lr" in resolved.origins or is_address(start):
        return resolved
    [(origin, rate)] = resolved.recipe.rate_at(shape_of(load_config(start)).hidden).items()
    return defaulted(resolved, rate, origin)


def with_layers(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """Let the students' layers be chosen by trial if their teacher is deep.

    Raises:
        KdcliError: The model that the student starts from cannot be read.
    """
    student, start = resolved.recipe.student, _start(resolved.recipe)
    if student.init != "teacher" or not student.to or is_address(start):
        return resolved
    teacher = shape_of(load_config(start))
    if teacher.layers < DEEP:
        return resolved
    # The shape for a goal is chosen later.
    if goal_of(student.to) is None:
        shapes = shapes_in(student.to, teacher)
        if any(map(is_static_shape, shapes)):
            return resolved
        if not any(int(match_shape(shape)[1]) < teacher.layers for shape in shapes):
            return resolved
    return defaulted(resolved, {"student.layers": "measured"}, TRIED)


def _start(recipe: DistillRecipe) -> str:
    """Return the model that the students start from."""
    return str(recipe.student.source or recipe.teacher)


@dataclass(eq=False)
class VectorDistillation(Distillation):
    """Students that learn vectors of texts. The vectors of several teachers are joined.

    Attributes:
        precomputed_NE: The teacher's vectors from a file; None computes them.
    """

    workload: EmbeddingWorkload
    teachers: Sequence[Embedder]
    origin: Embedder
    precomputed_NE: Array | None

    def build(self) -> StageJob:
        """Make the students, compute the teacher's vectors, and build the job that trains them."""
        recipe, session, workload = self.recipe, self.context.session, self.workload
        shapes = {name: planned.shape for name, planned in self.students.items()}
        # Before the teacher computes vectors, it is cast to the compute dtype.
        encoders = self.initialized(
            {n: to for n, to in shapes.items() if not to.is_static}, self._initialized
        )
        vectors = self._vectors()
        space = VectorSpace(recipe, session, workload, vectors, self.teacher_width)
        train = workload.train_numbers
        anchors_RE = anchors_of(vectors, train, vector_settings(recipe).anchors, recipe.train.seed)
        students: dict[str, Student] = {}
        formats: dict[str, EmbeddingFormat] = {}
        starts: dict[str, PreTrainedModel] = {}
        for name, to in shapes.items():
            if to.is_static:
                fmt, basis_ED = space.of_static(to)
                built = self._static(to, vectors, basis_ED)
            else:
                built = encoders[name]
                # Members of a family share the last layer, and so the space of their vectors.
                fmt, basis_ED = space.of_student(to, built.whole or built.model)
            starts[name] = copy.deepcopy(built.model)
            objective = objective_of(recipe, self.teachers[0].shape, to, session)
            students[name] = Student(built.model, projected(objective, basis_ED), Pool(fmt))
            formats[name] = fmt
            log_notes(name, built.notes)
        targets = self._targets(students, vectors, anchors_RE)
        plan = workload.plan(recipe.train)
        job = distill_job(students, targets, workload, plan.order)
        cards = self.cards({name: student.encoder for name, student in students.items()})
        finish = functools.partial(self._finish, students, formats, starts)
        return StageJob(job, plan.schedule, plan.steps_per_pass, finish, cards)

    def _targets(
        self, students: Mapping[str, Student], vectors: Vectors, anchors_RE: Tensor
    ) -> VectorTargets:
        """Return the targets, with a teacher that runs in each step if a loss compares tokens.

        The students are still on the CPU. Their projections are fitted, and the weights that no
        loss reaches are frozen.
        """
        session, workload, needs = self.context.session, self.workload, teacher_needs(students)
        # The teacher reads the students' rows, so it needs their tokens.
        reader = (self.teachers[0] if self.recipe.student.source else self.origin).model
        live = None
        if needs != Needs():
            live = Teacher.frozen(self.teachers[0].source, reader, needs, session)
        targets = VectorTargets(vectors, workload.all_texts, anchors_RE, live)
        reader.cpu()
        for student in students.values():
            fit_projections(student.objective, reader, student.encoder, workload.examples)
        if self.recipe.train.trains:
            examples, _ = targets.attach(workload.examples, workload.held_out)
            batch = first_rows(examples)
            signals = targets.signals(batch)
            assert signals is not None
            freeze_unused_weights(students, batch, signals)
        reader.to(session.device)
        return replace(targets, anchors_RE=anchors_RE.to(session.device))

    def _finish(
        self,
        students: Mapping[str, Student],
        formats: Mapping[str, EmbeddingFormat],
        starts: Mapping[str, PreTrainedModel],
        outcome: Outcome,
    ) -> None:
        for name, student in students.items() if self.context.is_main else ():
            pool = student.captured.pool
            assert isinstance(pool, Pool)
            fmt = replace(formats[name], layers=tuple(copy.deepcopy(pool.layers).cpu()))
            tokenizer, folder = self.origin.tokenizer, self.model_folder(name)
            save_embedder(student.encoder, tokenizer, fmt, folder, self.rows)
            if vector_settings(self.recipe).router:
                queries = Embedder(student.encoder, tokenizer, "", format=fmt)
                save_router(folder / ROUTER, queries, self._teacher_in_float32)
                log(f"{folder / ROUTER}: queries by the student, documents by the teacher")
        self.context.session.wait()
        if self.context.is_main:
            self._report(students, starts, outcome)

    @property
    def teacher_width(self) -> int:
        """The number of components of the teacher's vectors."""
        if self.precomputed_NE is not None:
            return int(self.precomputed_NE.shape[1])
        return sum(each.format.width(each.shape.hidden) for each in self.teachers)

    def _vectors(self) -> Vectors:
        precomputed_NE = self.precomputed_NE
        if precomputed_NE is not None:
            return lambda at: np.take(precomputed_NE, at, axis=0)
        vectors = list(map(self._vectors_of, self.teachers))
        return vectors[0] if len(vectors) == 1 else join_vectors(vectors)

    def _vectors_of(self, teacher: Embedder) -> Vectors:
        tokens, texts = self.workload.tokens, self.workload.all_texts
        if teacher is not self.origin:
            tokens = teacher.tokenize(texts.texts, texts.roles, self.recipe.data.max_length)
        trains, dry_run = self.recipe.train.trains, self.context.dry_run
        vectors = self.workload.vectors_of(teacher, tokens, dry_run=dry_run, stored=trains)
        if trains and teacher is not self.teachers[0]:
            teacher.model.cpu()
        return vectors

    def _static(
        self, to: ModelShape, vectors: Vectors, basis_ED: Array | None
    ) -> InitializedStudent:
        """Make a static student, whose token vectors are fitted to the vectors of texts."""
        if self.context.dry_run:
            vocab_size = int(self.origin.model.config.vocab_size)
            return InitializedStudent(as_static(torch.zeros(vocab_size, to.hidden)), [])
        texts, session = self.workload, self.context.session
        return static_student(
            texts.tokens, texts.train_numbers, vectors, basis_ED, self.origin, session
        )

    def _initialized(self, to: ModelShape) -> InitializedStudent:
        start = start_of(self.recipe.student, to.layers, self.recipe.train.seed)
        return self.workload.make_student(self.origin, to, start)

    @functools.cached_property
    def _teacher_in_float32(self) -> Embedder:
        return open_teacher(self.recipe, str(self.recipe.teacher))

    def _scored(self, starts: Mapping[str, PreTrainedModel]) -> dict[str, Embedder]:
        """Return the teachers, the students, and the students before training, in float32."""
        # The targets were computed in the compute dtype.
        scored = {TEACHER: self._teacher_in_float32}
        for number, more in enumerate(self.teachers[1:], 2):
            scored[f"{TEACHER} {number}"] = open_teacher(self.recipe, more.source)
        for name, planned in self.students.items():
            scored[name] = Embedder.open(str(self.model_folder(name)), compacted=True)
            if not self.recipe.train.trains:
                continue
            if planned.shape.is_static:
                untrained = replace(scored[name], model=starts[name], source="")
            else:
                fmt = self.origin.format
                if planned.shape.hidden != self.origin.shape.hidden:
                    fmt = replace(fmt, layers=())
                copied = starts[name].eval()
                untrained = Embedder(copied, self.origin.tokenizer, "", format=fmt)
            scored[name + UNDISTILLED] = untrained
        return scored

    def _report(
        self,
        students: Mapping[str, Student],
        starts: Mapping[str, PreTrainedModel],
        outcome: Outcome,
    ) -> None:
        recipe, names = self.recipe, list(self.students)
        result = EvaluationResult()
        if self.workload.eval_sets:
            result = self.workload.evaluate(self._scored(starts))
        first, *own = self.entries({name: student.encoder for name, student in students.items()})
        more = [
            replace(Entry.loaded(f"{TEACHER} {number}", "teacher", teacher), timed=None)
            for number, teacher in enumerate(self.teachers[1:], 2)
        ]
        models = [first, *more, *own]
        if recipe.train.trains:
            models += map(Entry.without_distillation, names)
        notes = [
            *(f"{each.source}: {each.note}" for each in self.teachers),
            f"{len(self.workload.all_texts):,} distinct texts",
            *shape_notes(recipe.student),
        ]
        if recipe.student.source is not None:
            notes.append(
                f"the student starts from {self.origin.source} and reads with its tokenizer: "
                f"{self.origin.note}"
            )
        if given_vectors := vector_settings(recipe).vectors:
            notes.append(
                f"the student learned the vectors in {given_vectors}, not the teacher's own"
            )
        contents = self.workload.report(
            "distill", recipe, models, outcome, result=result, notes=notes
        )
        losses = held_out_losses(RunDir(self.folder), names)
        contents.quality = quality_of(result.evaluations) | {HELD_OUT_LOSS: losses}
        self.context.report(contents, recipe.measure)


def open_vectors(context: RunContext[DistillRecipe]) -> Run:
    """Check everything and read the texts, without claiming the run directory."""
    recipe, session = context.recipe, context.session
    relation_kernel(recipe.relation.kernel, session.device, session.compute_dtype)
    share = max(1, recipe.train.batch_size // session.accelerator.num_processes)
    micro = recipe.train.micro_batch_size or share
    check_pairs(recipe.loss, share // math.ceil(share / micro))
    teachers = _open_teachers(recipe)
    teacher = teachers[0]
    origin = _origin(recipe, teacher) if recipe.student.source else teacher
    if origin.format.library:
        raise UsageError(
            f"{origin.source} gives vectors alone, so that no student can be made of its parts",
            "name an encoder to start from: --student MODEL",
        )
    # A shape for a goal is chosen on the texts, which are not read yet.
    shapes = {} if goal_of(recipe.student.to) else _shapes_of(context, teacher, origin)
    workload, precomputed_NE = _read_texts(recipe, session, teachers, origin)
    if goal_of(recipe.student.to) is not None:
        context = with_shape(context, workload, origin)
        recipe = context.recipe
        shapes = _shapes_of(context, teacher, origin)
    if context.resolved.origins.get("student.layers") == TRIED:
        context = _without_trial_on_few(context, workload)
    context = with_measured_layers(context, workload, origin, shapes.values())
    students = {name: Planned(name, to, context.recipe) for name, to in shapes.items()}
    card = card_of(teachers)
    whole = VectorDistillation(context, workload, teachers, origin, students, card, precomputed_NE)
    for name, to in shapes.items():
        if to.is_static:
            # The vectors of a file may be narrower than the teacher's own.
            static_shape(to.hidden, whole.teacher_width)
        check_dimensions(recipe.loss, min(to.hidden, whole.teacher_width))
        check_router(recipe, name, to, origin, whole.teacher_width)
    # A text that cannot be tokenised is an error before the run starts.
    assert workload.tokens is not None
    resolved = context.resolved
    return Run([Stage(context.folder, resolved, whole.build)], resolved=resolved)


def _without_trial_on_few(
    context: RunContext[DistillRecipe], workload: EmbeddingWorkload
) -> RunContext[DistillRecipe]:
    """Keep evenly spaced layers if there are too few texts for a trial that nobody asked for."""
    if workload.sample is None or len(workload.sample) >= MIN_ROWS:
        return context
    log(f"evenly spaced layers stay, because a trial needs at least {MIN_ROWS} training texts")
    student = context.recipe.student.model_copy(update={"layers": None})
    recipe = context.recipe.model_copy(update={"student": student})
    return replace(context, resolved=Resolved(recipe, context.resolved.origins))


def open_teacher(recipe: DistillRecipe, source: str) -> Embedder:
    """Open a model that is only asked for vectors."""
    settings = vector_settings(recipe)
    return Embedder.open(source, pooling=settings.pooling, library=True, server=settings.server)


def _open_teachers(recipe: DistillRecipe) -> list[Embedder]:
    """Open the teachers.

    Raises:
        UsageError: A model is named twice, or there are several teachers and the vectors of one
            have a length that counts.
    """
    sources = [str(recipe.teacher), *recipe.more_teachers]
    for source in recipe.more_teachers:
        if sources.count(source) > 1:
            raise UsageError(f"--also-teacher {source}: this model is already a teacher")
    teachers = [open_teacher(recipe, source) for source in sources]
    for teacher in teachers if recipe.more_teachers else []:
        if teacher.format.similarity != "cosine" and not teacher.format.normalize:
            raise UsageError(
                f"--also-teacher joins vectors of length 1, but those of {teacher.source} are "
                f"compared by {teacher.format.similarity}, so that their length counts",
                "choose teachers that are compared by the cosine",
            )
    for teacher in teachers:
        width = teacher.format.width(teacher.shape.hidden)
        if width > MAX_WIDTH:
            raise UsageError(
                f"the vectors of {teacher.source} have {width:,} numbers, and a student learns "
                f"principal components of at most {MAX_WIDTH:,}",
                "give a teacher with dense vectors",
            )
        log_fact(f"{teacher.source}: {teacher.note}")
    return teachers


def _read_texts(
    recipe: DistillRecipe, session: Session, teachers: Sequence[Embedder], origin: Embedder
) -> tuple[EmbeddingWorkload, Array | None]:
    """Read the texts and the sets that score vectors, and the teacher's vectors from a file."""
    sources = [one.source for one in (*teachers, origin)]
    trained = {source: training_rows(location(source)) for source in sources}
    eval_sets = open_eval_sets(recipe.eval, trained, session)
    settings, data = vector_settings(recipe), recipe.data
    if settings.vectors and data.share < 1:
        raise UsageError(
            f"data.share={data.share:g}: {settings.vectors} has a vector for every text of the "
            "source",
            "use --set workload.rows=N",
        )
    texts = read_texts(
        data.text,
        column=data.column,
        share=data.share,
        # A file of vectors has one vector for each whole text.
        unit="document" if settings.vectors else settings.unit,
        rows=settings.rows,
        paired=recipe.loss.get("contrastive_weight", 0) > 0,
    )
    texts, partitioned = divided_texts(texts, data.partition)
    precomputed_NE = None
    if settings.vectors:
        precomputed_NE = read_vectors(settings.vectors, texts, data.text, data.column)
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
    return workload, precomputed_NE


def _shapes_of(
    context: RunContext[DistillRecipe], teacher: Embedder, origin: Embedder
) -> dict[str, ModelShape]:
    """Return the shapes of the students by name, checked.

    Raises:
        UsageError: A shape, or the number of shapes, does not fit the recipe.
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
        fmt = replace(teacher.format, layers=(), max_length=max_length)
        note = f"{fmt.pooling} pooling, as its teacher has"
        if fmt.library:
            # The teacher's pooling is unknown.
            fmt = EmbeddingFormat(normalize=fmt.normalize, similarity=fmt.similarity)
            note = "mean pooling"
        origin = replace(origin, format=fmt, note=note)
    log_fact(f"{source}: {origin.note}")
    return origin


def check_router(
    recipe: DistillRecipe, name: str, to: ModelShape, origin: Embedder, teacher_width: int
) -> None:
    """Check that a student's vectors can be compared with its teacher's.

    Args:
        recipe: The recipe.
        name: The student's name.
        to: The student's shape.
        origin: The model that the student starts from.
        teacher_width: The number of components of the teacher's vectors.

    Raises:
        UsageError: The student's vectors lie in another space.
    """
    if not vector_settings(recipe).router:
        return
    if is_address(str(recipe.teacher)):
        raise UsageError(
            f"workload.router saves the teacher too, and {recipe.teacher} gives only vectors",
            "omit it, or give a teacher on this machine or on the hub",
        )
    if recipe.more_teachers or vector_settings(recipe).vectors:
        other = "--also-teacher" if recipe.more_teachers else "--teacher-vectors"
        raise UsageError(
            f"workload.router needs documents' vectors of the teacher alone, not {other}",
            "omit one of them",
        )
    width = to.hidden if to.is_static else student_format(recipe, origin, to).width(to.hidden)
    reaches_width = width == teacher_width or (vector_settings(recipe).dense and not to.is_static)
    if reaches_width and not recipe.loss.get("dimensions"):
        return
    raise UsageError(
        f"workload.router: the vectors of {name} are principal components of the teacher's, so "
        "that they cannot be compared with the teacher's vectors of documents",
        f"choose a student of width {teacher_width}, or a shape with layers and "
        "workload.dense=true; leave loss.dimensions unset",
    )


def save_router(folder: Path, queries: Embedder, documents: Embedder) -> None:
    """Save two models as one model of sentence-transformers.

    Args:
        folder: The directory to write. An earlier one is replaced.
        queries: The model of `encode_query`.
        documents: The model of `encode_document` and `encode`.

    Raises:
        MachineError: The disk is full or not writable.
    """
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    with atomic_dir(folder) as whole:
        for route, model in (("query", queries), ("document", documents)):
            structure[route] = []
            for name, kind in _save_route(whole, route, model):
                structure[route].append(name)
                types[name] = kind
        parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
        router = {"types": types, "structure": structure, "parameters": parameters}
        write_atomic(whole / "router_config.json", json.dumps(router, indent=2))
        module = {"idx": 0, "name": "0", "path": "", "type": f"{LIBRARY}models.Router"}
        write_atomic(whole / MODULES_FILE, json.dumps([module], indent=2))


def _save_route(folder: Path, route: str, model: Embedder) -> Iterator[tuple[str, str]]:
    """Save the modules of a model, each in a directory of its own, and yield their names and types.

    The prompts of the documents' model, which is saved last, become the prompts of the router.
    """
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary)
        save_embedder(model.model, model.tokenizer, model.format, whole)
        shutil.move(whole / PROMPTS_FILE, folder / PROMPTS_FILE)
        modules = read_json(whole / MODULES_FILE, kind=list)
        (whole / MODULES_FILE).unlink()
        for module in modules:
            kind = str(module["type"])
            name = f"{route}_{module['idx']}_{kind.rpartition('.')[2]}"
            (folder / name).mkdir(exist_ok=True)
            for file in (whole / module["path"]).iterdir():
                if file.is_file():
                    shutil.move(file, folder / name / file.name)
            yield name, kind
