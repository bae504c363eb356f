"""`kdcli cotrain`: train two models that learn from each other, then the same two alone, and compare.

Data flow: masked blocks or rows of a task -> one forward pass of each model -> hard and soft terms -> engine.
"""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import check_share, tokens_of
from kdcli.deploy.latency import Subject
from kdcli.engine.launch import Session, check_machine, choose_output_dir, make_schedule
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER
from kdcli.models.card import describe, describe_source
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.load import location, save_model
from kdcli.models.model import Model
from kdcli.models.shape import is_shape
from kdcli.models.training_rows import all_rows, training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
    measure,
    quality_of,
    write_report,
)
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import StageJob, run_command
from kdcli.types import Outcome
from kdcli.verbs.cotrain.job import STANDALONE, OnTask, OnText, Recipe, names_of, weights_of
from kdcli.verbs.cotrain.models import ROLES, Pair, load_task_pair, load_text_pair, tokenizer_of
from kdcli.verbs.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.workloads.compare import DOWNSTREAM, check_tasks, opened, scored
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.task import order_and_schedule, prepare


def run(resolved: Resolved[Any], invocation: RunOptions) -> RunResult | Estimate | None:
    """Co-train on text or, with a `CotrainTaskRecipe`, on a task; measure and report. Returns the report, or a dry
    run's estimate; None in a process that prints nothing. Raises KdcliError: see `kdcli.errors`; nothing was written if
    recipe, models or data cannot be used."""
    recipe = resolved.recipe
    check(recipe)
    if isinstance(recipe, CotrainRecipe):
        _read_text(recipe, invocation)
    return run_command(resolved, invocation, _prepare)


def check(recipe: Recipe) -> None:
    """Raise a `UsageError` for a missing model or task, a shape with nothing to copy from, or useless weights."""
    for role in ROLES:
        if getattr(recipe, role) is None:
            raise UsageError(
                f"no {role} given",
                "kdcli cotrain TEACHER STUDENT; each is a shape such as 6x768, a hub id or directory",
            )
    weights_of(recipe)
    if isinstance(recipe, CotrainTaskRecipe):
        if recipe.task is None:
            raise UsageError(
                "no task given",
                "add --task, for example --task sst2, or --task own for your own files",
            )
        if recipe.base is None and is_shape(str(recipe.teacher)):
            raise UsageError(
                f"on a task the teacher {recipe.teacher} would start from nothing",
                "give a model in its place, or --base MODEL, from which shapes are copied",
            )


@dataclass
class PairStage:
    """One training of both models; see `kdcli.run.stages.Stage`. Only the comparison run reports itself. `pair` None
    is loaded in `build`; `contents` is the report that `finish` begins."""

    data: OnText | OnTask
    session: Session
    resolved: Resolved[Any]
    folder: Path
    notes: list[str]
    alone: bool = False
    pair: Pair | None = None
    contents: ReportContents = field(init=False)

    @property
    def folders(self) -> dict[str, Path]:
        return {name: self.folder / name for name in names_of(self.resolved.recipe).values()}

    def build(self) -> StageJob:
        if self.alone:
            Progress.log("the same models without each other")
        self.pair = self.pair or self.data.load()
        job, schedule, steps_per_pass = self.data.build(self.resolved.recipe, self.pair)
        models = zip(self.folders, self.pair.models.values(), strict=True)
        cards = {name: describe(loaded.model, name, None) for name, loaded in models}
        return StageJob(job, schedule, steps_per_pass, cards)

    def finish(self, outcome: Outcome) -> None:
        assert self.pair is not None
        # Each learns from the other.
        models, rows = list[ReportedModel](), all_rows(self.pair.rows, self.data.rows)
        for (name, folder), loaded in zip(
            self.folders.items(), self.pair.models.values(), strict=True
        ):
            if isinstance(self.data, OnTask):
                # Saved with the model: other users of it cut rows at this length too.
                loaded.tokenizer.model_max_length = self.data.task.max_length
            if self.session.is_main:
                save_model(loaded.model, loaded.tokenizer, folder, rows)
                card = describe(loaded.model, str(folder), folder)
                models.append(ReportedModel(name, "peer", card, folder=folder))
        evaluations, quality = self.data.evaluate(self.pair, self.folder)
        self.pair = None
        self.contents = ReportContents(
            "cotrain",
            self.resolved.recipe,
            models,
            outcome=outcome,
            evaluations=evaluations,
            quality=quality,
            notes=self.notes,
            auto_class=self.data.auto_class,
        )
        if self.alone and self.session.is_main:
            self.write()

    def write(self) -> None:
        """Write the report of this training."""
        write_report(RunDir(self.folder), self.contents)


@dataclass(frozen=True)
class PairRun:
    """A checked co-training: the stage of the output directory, then the comparison run."""

    resolved: Resolved[Any]
    invocation: RunOptions
    folder: Path
    stages: list[PairStage]
    community: Model | None

    def report(self) -> None:
        main, *others = self.stages
        data, session, contents, community = main.data, main.session, main.contents, self.community
        sources: dict[str, str | Path] = {**main.folders}
        if community is not None:
            sources = {TEACHER: location(community.source), **sources}
        subjects = [Subject(name, str(source)) for name, source in sources.items()]
        sources |= {
            f"{name} {STANDALONE}": folder
            for stage in others
            for name, folder in stage.folders.items()
        }
        tasks = data.tasks if isinstance(data, OnText) else {}
        baselines = {name: f"{name} {STANDALONE}" for name in main.folders} if others else {}
        seeds = self.resolved.recipe.eval.seeds if tasks else 1
        scores = scored(
            session, tasks, sources, self.folder / DOWNSTREAM, seeds=seeds, baselines=baselines
        )
        if not session.is_main:
            return
        models, quality = [], contents.quality or {}
        if community is not None:
            card = describe_source(community.model, community.source)
            models.append(ReportedModel(TEACHER, "teacher", card))
        # The last model, which the report's first numbers are about, is the student.
        first, last = (
            replace(model, baseline=baselines.get(model.name)) for model in contents.models
        )
        models.append(first)
        contents.compared_runs = {
            stage.folder.name: RunResult.read(stage.folder) for stage in others
        }
        for report in (result.report for result in contents.compared_runs.values()):
            models += [
                ReportedModel(f"{name} {STANDALONE}", "baseline", card)
                for name, card in report.cards.items()
            ]
            contents.evaluations += [
                e.model_copy(update={"model": f"{e.model} {STANDALONE}"})
                for e in report.evaluations
            ]
            for row, values in report.quality.items():
                quality[row] |= {
                    f"{name} {STANDALONE}": metrics for name, metrics in values.items()
                }
        contents.models = [*models, last]
        if isinstance(data, OnText):
            contents.notes += data.gains(self.folder, quality)
            contents.notes += [
                f"{name}: {note}" for name, (task, _) in tasks.items() for note in task.notes
            ]
            contents.evaluations, contents.comparisons = scores.evaluations, scores.comparisons
            quality = quality_of(scores.evaluations) | quality
        contents.quality = quality
        contents.latency = measure(subjects, self.resolved.recipe.measure, session)
        main.write()


def _prepare(resolved: Resolved[Any], invocation: RunOptions, session: Session) -> PairRun:
    """Check models and data, and tokenise; claims nothing."""
    recipe = resolved.recipe
    models = [
        Path(str(source)).name.replace(":", "_") for source in (recipe.teacher, recipe.student)
    ]
    on_task = [str(recipe.task)] if isinstance(recipe, CotrainTaskRecipe) else []
    folder = choose_output_dir(
        "-".join(["cotrain", *models, *on_task]), resolved, invocation, session
    )
    data, pair = _on_task(recipe, session) if on_task else _on_text(recipe, invocation, session)
    Progress.log(*pair.notes)
    notes = data.task.notes if isinstance(data, OnTask) else pair.notes
    stages = [PairStage(data, session, resolved, folder, list(notes), pair=pair)]
    weights = weights_of(recipe)
    if recipe.standalone and weights.mutual and weights.teacher_hard + weights.student_hard > 0:
        changes = {"mode": STANDALONE, "standalone": False}
        origins = dict(resolved.origins) | dict.fromkeys(changes, "to compare with")
        alone = Resolved(recipe.model_copy(update=changes), origins)
        stages.append(PairStage(data, session, alone, folder / STANDALONE, list(notes), alone=True))
    return PairRun(resolved, invocation, folder, stages, pair.community)


def _read_text(recipe: CotrainRecipe, invocation: RunOptions) -> None:
    """Train a tokenizer and tokenise the text, unless they are cached. Called before the processes join: it may take
    hours, and a group in which all wait for one ends after minutes."""
    check_machine(recipe.train.dtype, invocation)
    check_share(recipe.data.mask.share)
    check_tasks(recipe.eval, recipe.train.seed)
    _corpus(recipe, tokenizer_of(recipe, trust_remote_code=invocation.trust_remote_code))


def _corpus(recipe: CotrainRecipe, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    data = recipe.data
    how = data.model_dump(include={"max_length", "column", "held_out_blocks"})
    return open_corpus(data.source, tokenizer, isolated=data.pack_isolated, log=Progress.log, **how)


def _on_task(recipe: CotrainTaskRecipe, session: Session) -> tuple[OnText | OnTask, Pair]:
    given = not is_shape(str(recipe.teacher))
    first = as_finetune(
        recipe, str(recipe.teacher if given else recipe.base), head=recipe.head if given else None
    )
    sources = [
        str(s) for s in (recipe.teacher, recipe.student, recipe.base) if s and not is_shape(str(s))
    ]
    task, _ = prepare(
        first, session, beside={source: training_rows(location(source)) for source in sources}
    )
    order_and_schedule(task, first)
    auto_class = AUTO_CLASS[task.data.task.kind].__name__
    return OnTask(recipe, task, auto_class), load_task_pair(recipe, task)


def _on_text(
    recipe: CotrainRecipe, invocation: RunOptions, session: Session
) -> tuple[OnText | OnTask, Pair]:
    data, batch = recipe.data, recipe.train.batch_size
    pair = load_text_pair(recipe, trust_remote_code=session.trust_remote_code)
    tokenizer = pair.models[STUDENT].tokenizer
    tokens_of(tokenizer, str(recipe.teacher))
    with tempfile.TemporaryDirectory() as aside:
        if recipe.eval.tasks:
            save_model(pair.models[STUDENT].model, tokenizer, Path(aside), pair.rows)
        tasks = opened(recipe.eval, aside, recipe.train.seed, invocation, session)
    corpus = _corpus(recipe, tokenizer)
    if len(corpus.train) < batch:
        raise UsageError(
            f"{data.source} makes {len(corpus.train)} blocks of {data.max_length} tokens to train on, less than one "
            f"batch of {batch}",
            "give more text, or lower train.batch_size or data.max_length",
        )
    return OnText(
        recipe, session, corpus, make_schedule(recipe.train, len(corpus.train) / batch), tasks
    ), pair
