"""`kdcli cotrain`: train two models that learn from each other, then the same two alone, and compare.

Data flow: masked blocks or rows of a task -> one forward pass of each model -> hard and soft terms -> engine.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency, Subject
from kdcli.commands.cotrain.job import STANDALONE, OnTask, OnText, Quality, Recipe, names_of, weights_of
from kdcli.commands.cotrain.models import ROLES, Pair, load_task_pair, load_text_pair
from kdcli.commands.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.data.text.corpus import open_corpus
from kdcli.data.text.masking import check_share, tokens_of
from kdcli.downstream.compare import opened
from kdcli.downstream.recipes import as_finetune
from kdcli.downstream.task import order_and_schedule, prepare, quality_of
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER
from kdcli.models.card import describe
from kdcli.models.load import location, save_model
from kdcli.models.shape import is_shape
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.stages import StageJob, run_command
from kdcli.training.launch import choose_output_dir, make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Outcome


def run(resolved: Resolved[Any], invocation: Invocation) -> RunResult | Estimate | None:
    """Co-train on text or, with a `CotrainTaskRecipe`, on a task; measure and report.

    Returns:
        The report, or a dry run's estimate; None in a process that prints nothing.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was written if recipe, models or data cannot be used.
    """
    check(resolved.recipe)
    return run_command(resolved, invocation, _prepare)


def check(recipe: Recipe) -> None:
    """Check what needs no model and no data.

    Raises:
        UsageError: a missing model or task, a shape with nothing to copy from, weights that leave nothing to learn.
    """
    for role in ROLES:
        if getattr(recipe, role) is None:
            raise UsageError(
                f"no {role} given",
                "kdcli cotrain TEACHER STUDENT; each is a shape such as 6x768, a hub id or directory",
            )
    weights_of(recipe)
    if isinstance(recipe, CotrainTaskRecipe):
        if recipe.task is None:
            raise UsageError("no task given", "add --task, for example --task sst2, or --task own for your own files")
        if recipe.base is None and is_shape(str(recipe.teacher)):
            raise UsageError(
                f"on a task the teacher {recipe.teacher} would start from nothing",
                "give a model in its place, or --base MODEL, from which shapes are copied",
            )


@dataclass
class PairStage:
    """One training of both models; see `kdcli.report.stages.Stage`. The comparison run reports itself."""

    data: OnText | OnTask
    session: Session
    resolved: Resolved[Any]
    folder: Path
    alone: bool = False
    pair: Pair | None = None
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcome: Outcome | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    quality: Quality = field(default_factory=dict)

    @property
    def folders(self) -> dict[str, Path]:
        """Name -> where that model is saved."""
        return {name: self.folder / name for name in names_of(self.resolved.recipe).values()}

    def build(self) -> StageJob:
        """Load both models and make the job."""
        if self.alone:
            Progress.log("the same models without each other")
        self.pair = self.data.load()
        job, schedule, steps_per_pass = self.data.build(self.resolved.recipe, self.pair)
        models = zip(self.folders, self.pair.models.values(), strict=True)
        cards = {name: describe(loaded.model, name, None) for name, loaded in models}
        return StageJob(job, schedule, steps_per_pass, cards)

    def finish(self, outcome: Outcome) -> None:
        """Save and evaluate both models."""
        assert self.pair is not None
        for (name, folder), loaded in zip(self.folders.items(), self.pair.models.values(), strict=True):
            if isinstance(self.data, OnTask):
                # Anyone who loads the model reads here at how many tokens rows were cut.
                loaded.tokenizer.model_max_length = self.data.task.max_length
            if self.session.is_main:
                save_model(loaded.model, loaded.tokenizer, folder)
                self.cards[name] = describe(loaded.model, str(folder), folder)
        self.evaluations, self.quality = self.data.evaluate(self.pair, self.folder)
        self.outcome, self.pair = outcome, None
        if self.alone and self.session.is_main:
            self.write(self.cards, self.evaluations, self.quality, self.data.notes)

    def write(
        self,
        cards: dict[str, dict[str, Any]],
        evaluations: list[dict[str, Any]],
        quality: Quality,
        notes: list[str],
        latency: Latency | None = None,
        beside: dict[str, RunResult] | None = None,
    ) -> None:
        """Write report.json of the stage's directory."""
        write_report(
            RunDir(self.folder),
            command="cotrain",
            recipe=self.resolved.recipe.model_dump(),
            cards=cards,
            folders=self.folders,
            latency=latency or Latency(),
            outcome=self.outcome,
            quality=quality,
            notes=notes,
            auto_class=self.data.auto_class,
            evaluations=evaluations,
            beside=beside,
        )


@dataclass(frozen=True)
class PairRun:
    """A checked co-training: the stage of the output directory, then the comparison run."""

    resolved: Resolved[Any]
    invocation: Invocation
    folder: Path
    stages: list[PairStage]

    def report(self) -> None:
        """Compare both models with the comparison run and the community teacher."""
        main, *others = self.stages
        data, session, recipe = main.data, main.session, self.resolved.recipe
        beside = {stage.folder.name: RunResult.read(stage.folder) for stage in others}
        cards: dict[str, dict[str, Any]] = {}
        sources = {name: str(folder) for name, folder in main.folders.items()}
        if data.community is not None:
            sources = {TEACHER: location(data.community.source)} | sources
        subjects = [Subject(name, source) for name, source in sources.items()]
        sources |= {f"{name} {STANDALONE}": str(folder) for stage in others for name, folder in stage.folders.items()}
        scores, notes = data.scores(sources, self.folder)
        if not session.is_main:
            return
        if data.community is not None:
            where = Path(sources[TEACHER])
            cards[TEACHER] = describe(data.community.model, data.community.source, where if where.is_dir() else None)
        first, last = main.cards
        cards[first] = main.cards[first]
        quality, evaluations = main.quality, list(main.evaluations)
        for result in beside.values():
            cards |= {f"{name} {STANDALONE}": card.model_dump() for name, card in result.report.models.items()}
            evaluations += [e.model_dump() | {"model": f"{e.model} {STANDALONE}"} for e in result.report.evaluations]
            for row, values in result.report.quality.items():
                quality[row] |= {f"{name} {STANDALONE}": metrics for name, metrics in values.items()}
        # The last model is the one that the report's first numbers are about.
        cards[last] = main.cards[last]
        main.write(
            cards,
            evaluations + scores,
            quality_of(scores) | quality,
            [*data.notes, *data.gains(self.folder, quality), *notes],
            measure(subjects, recipe.measure, session),
            beside,
        )


def _prepare(resolved: Resolved[Any], invocation: Invocation, session: Session) -> PairRun:
    """Check models and data, and tokenise; claims nothing.

    Raises:
        KdcliError: recipe, models or data cannot be used.
    """
    recipe = resolved.recipe
    models = [Path(str(source)).name.replace(":", "_") for source in (recipe.teacher, recipe.student)]
    on_task = [str(recipe.task)] if isinstance(recipe, CotrainTaskRecipe) else []
    folder = choose_output_dir("-".join(["cotrain", *models, *on_task]), resolved, invocation, session)
    data = _on_task(recipe, session) if on_task else _on_text(recipe, invocation, session)
    stages = [PairStage(data, session, resolved, folder)]
    weights = weights_of(recipe)
    if recipe.standalone and weights.mutual and weights.teacher_hard + weights.student_hard > 0:
        changes = {"mode": STANDALONE, "standalone": False}
        alone = Resolved(
            recipe.model_copy(update=changes), dict(resolved.origins) | dict.fromkeys(changes, "to compare with")
        )
        stages.append(PairStage(data, session, alone, folder / STANDALONE, alone=True))
    return PairRun(resolved, invocation, folder, stages)


def _on_task(recipe: CotrainTaskRecipe, session: Session) -> OnTask:
    given = not is_shape(str(recipe.teacher))
    first = as_finetune(recipe, str(recipe.teacher if given else recipe.base), head=recipe.head if given else None)
    task, _ = prepare(first, session)
    order_and_schedule(task, first)
    return OnTask(recipe, load_task_pair(recipe, task), task)


def _on_text(recipe: CotrainRecipe, invocation: Invocation, session: Session) -> OnText:
    data, batch = recipe.data, recipe.train.batch_size
    check_share(data.mask.share)
    with session.accelerator.main_process_first():
        pair = load_text_pair(recipe, trust_remote_code=session.trust_remote_code)
    tokenizer, tasks = pair.models[STUDENT].tokenizer, {}
    tokens_of(tokenizer, str(recipe.teacher))
    for note in pair.notes:
        Progress.log(note)
    if recipe.eval.tasks:
        with tempfile.TemporaryDirectory() as aside:
            save_model(pair.models[STUDENT].model, tokenizer, Path(aside))
            tasks = opened(recipe.eval, aside, recipe.train.seed, invocation, session)
    with session.accelerator.main_process_first():
        corpus = open_corpus(
            data.source,
            tokenizer,
            max_length=data.max_length,
            column=data.column,
            isolated=data.pack_isolated,
            held_out_blocks=data.held_out_blocks,
            log=Progress.log,
        )
    if len(corpus.train) < batch:
        raise UsageError(
            f"{data.source} makes {len(corpus.train)} blocks of {data.max_length} tokens to train on, less than one "
            f"batch of {batch}",
            "give more text, or lower train.batch_size or data.max_length",
        )
    schedule = make_schedule(recipe.train, len(corpus.train) / batch)
    return OnText(recipe, session, pair, corpus, schedule, tasks, pair.notes, pair.community)
