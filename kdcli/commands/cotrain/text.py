"""Co-training on text: two masked language models in one loop, then the same two without each other, then a report.

Data flow: masked blocks → one forward of each model → hard and soft terms → engine → a directory for each model.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Subject
from kdcli.commands.cotrain.job import on_text
from kdcli.commands.cotrain.models import Pair, load_pair
from kdcli.commands.cotrain.plan import STANDALONE, due_alone, name_of, names_of, standalone
from kdcli.commands.cotrain.report import HELD_OUT, Trained, finished, gains, quality_of_pair
from kdcli.commands.cotrain.settings import CotrainRecipe
from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import check_share, tokens_of
from kdcli.downstream.compare import DOWNSTREAM, Tasks, opened, scored
from kdcli.downstream.task import quality_of
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER
from kdcli.models.card import describe
from kdcli.models.load import location, save_model
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.report.finish import RunResult, measure
from kdcli.training.engine import train
from kdcli.training.launch import already_done, choose_output_dir, claim_or_resume, make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Schedule


@dataclass(frozen=True)
class PairRun:
    """Co-training on text, checked and ready to run; `first` is spent by the first training."""

    resolved: Resolved[CotrainRecipe]
    invocation: Invocation
    session: Session
    first: Pair
    corpus: Corpus
    schedule: Schedule
    downstream: Tasks
    folder: Path

    @property
    def recipe(self) -> CotrainRecipe:
        """What to do."""
        return self.resolved.recipe


def prepare_pair(resolved: Resolved[CotrainRecipe], invocation: Invocation, session: Session) -> PairRun:
    """Check everything there is to check, train a tokenizer and tokenise where that is due; claims nothing.

    Raises:
        KdcliError: see `kdcli.errors`; the recipe, models or data cannot be used.
    """
    recipe = resolved.recipe
    check_share(recipe.data.mask.share)
    folder = choose_output_dir(name_of(recipe), resolved, invocation, session)
    with session.accelerator.main_process_first():
        pair = load_pair(recipe, trust_remote_code=invocation.trust_remote_code)
    tokens_of(pair.tokenizer, str(recipe.teacher))
    for note in pair.notes:
        Progress.log(note)
    tasks = _tasks(recipe, pair, invocation, session)
    data, batch = recipe.data, recipe.train.batch_size
    with session.accelerator.main_process_first():
        corpus = open_corpus(
            data.source,
            pair.tokenizer,
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
    return PairRun(resolved, invocation, session, pair, corpus, schedule, tasks, folder)


def _tasks(recipe: CotrainRecipe, pair: Pair, invocation: Invocation, session: Session) -> Tasks:
    """The tasks of `eval`, checked against the student before it is trained."""
    if not recipe.eval.tasks:
        return {}
    with tempfile.TemporaryDirectory() as aside:
        save_model(pair.models[STUDENT], pair.tokenizer, Path(aside))
        return opened(recipe.eval, aside, recipe.train.seed, invocation, session)


def run_pair(run: PairRun) -> RunResult | None:
    """Train, save, compare and report in a claimed directory; only the main process writes."""
    if already_done(run.folder):
        return RunResult.read(run.folder)
    trained = _trained(run, run.resolved, run.first, run.folder)
    alone = _standalone(run)
    sources = {name: str(folder) for name, folder in trained.folders.items()}
    if run.first.community is not None:
        sources = {TEACHER: run.first.community.source} | sources
    if alone is not None:
        sources |= {f"{name} {STANDALONE}": str(folder) for name, folder in _folders(run, STANDALONE).items()}
    scores = scored(run.session, run.downstream, sources, run.folder / DOWNSTREAM)
    result = _report(run, trained, alone, scores) if run.session.is_main else None
    run.session.wait()
    return result


def _folders(run: PairRun, *inside: str) -> dict[str, Path]:
    return {name: run.folder.joinpath(*inside, name) for name in names_of(run.recipe).values()}


def _trained(run: PairRun, resolved: Resolved[CotrainRecipe], pair: Pair, folder: Path) -> Trained:
    """Train a pair in a claimed directory, on from its last checkpoint, and save it."""
    job = on_text(pair, run.corpus, resolved.recipe, run.schedule, run.session)
    outcome = train(run.session, job, run.schedule, RunDir(folder))
    names = names_of(resolved.recipe)
    folders = {name: folder / name for name in names.values()}
    cards = {}
    for role, name in names.items():
        if run.session.is_main:
            save_model(pair.models[role], pair.tokenizer, folders[name])
            cards[name] = describe(pair.models[role], str(folders[name]), folders[name])
    run.session.wait()
    held = [r["held_out"] for r in RunDir(folder).read_log() if "held_out" in r]
    losses = {name: (held[0][f"{name}/hard"], held[-1][f"{name}/hard"]) for name in names.values()}
    return Trained(cards, folders, outcome, losses)


def _standalone(run: PairRun) -> RunResult | None:
    """The same two models, each by itself, in a run that is gone on with and never repeated."""
    if not due_alone(run.recipe):
        return None
    folder, resolved = run.folder / STANDALONE, standalone(run.resolved)
    if claim_or_resume(run.session, folder, resolved):
        return RunResult.read(folder)
    Progress.log("the same models without each other")
    pair = load_pair(run.recipe, trust_remote_code=run.invocation.trust_remote_code)
    trained = _trained(run, resolved, pair, folder)
    if run.session.is_main:
        finished(
            folder, resolved.recipe, trained, cards=trained.cards, quality=quality_of_pair(trained), notes=pair.notes
        )
    run.session.wait()
    return RunResult.read(folder)


def _report(run: PairRun, trained: Trained, alone: RunResult | None, scores: list[dict[str, Any]]) -> RunResult:
    """The report of both models beside what they are alone, and beside the frozen one."""
    cards, subjects = {}, []
    community = run.first.community
    if community is not None:
        where = Path(location(community.source))
        cards[TEACHER] = describe(community.model, community.source, where if where.is_dir() else None)
        subjects.append(Subject(TEACHER, str(where)))
    subjects += [Subject(name, str(folder)) for name, folder in trained.folders.items()]
    quality = quality_of_pair(trained)
    first, *others = trained.cards
    cards[first] = trained.cards[first]
    if alone is not None:
        cards |= {f"{name} {STANDALONE}": card.model_dump() for name, card in alone.report.models.items()}
        of_alone = alone.report.quality[HELD_OUT]
        quality[HELD_OUT] |= {f"{name} {STANDALONE}": values for name, values in of_alone.items()}
    # The student last: it is what the report's first numbers are about.
    cards |= {name: trained.cards[name] for name in others}
    notes = [*run.first.notes, *gains(trained, quality[HELD_OUT], alone is not None)]
    notes += [f"{name}: {note}" for name, (task, _) in run.downstream.items() for note in task.notes if scores]
    latency = measure(subjects, run.recipe.measure, run.session)
    return finished(
        run.folder,
        run.recipe,
        trained,
        cards=cards,
        quality=quality_of(scores) | quality,
        notes=notes,
        latency=latency,
        scores=scores,
        alone=alone,
    )


def probe_pair(run: PairRun) -> Estimate:
    """Train for a few steps, together and without each other, for what that takes, and leave nothing behind."""
    names, passes = names_of(run.recipe), len(run.corpus.train) / run.schedule.batch_size
    cards = {names[role]: describe(model, names[role], None) for role, model in run.first.models.items()}
    runs = {run.folder: run.resolved}
    if due_alone(run.recipe):
        runs[run.folder / STANDALONE] = standalone(run.resolved)
    found: list[StageEstimate] = []
    for folder, resolved in runs.items():
        pair = run.first
        if found:
            pair = load_pair(run.recipe, trust_remote_code=run.invocation.trust_remote_code)
        job = on_text(pair, run.corpus, resolved.recipe, run.schedule, run.session)
        found.append(estimate_stage(run.session, job, run.schedule, folder, passes))
    return Estimate(cards, found)
