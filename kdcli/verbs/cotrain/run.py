"""`kdcli cotrain`: train two models that learn from each other.

The same two models are then trained alone, for comparison. Data flow: a batch -> one forward pass
of each model -> hard and soft terms -> engine.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kdcli.engine.launch import check_machine
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT_MODEL, TEACHER_MODEL, Weights, ctcd, reverse_kl
from kdcli.messages import log
from kdcli.models.capture import Capture
from kdcli.models.card import describe
from kdcli.models.grammar import is_shape
from kdcli.models.load import location, save_model
from kdcli.models.model import Model, all_rows
from kdcli.recipe.resolve import Resolved, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import Entry, ReportContents, RunResult, quality_of
from kdcli.report.schema import Quality, Report
from kdcli.report.text import data_name, short
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import Teacher
from kdcli.types import (
    Batch,
    Job,
    Outcome,
    Schedule,
    Signals,
    StepLoss,
    Term,
    task_title,
)
from kdcli.verbs.cotrain.models import (
    PAIR_ROLES,
    ModelPair,
    head_of,
    load_task_pair,
    load_text_pair,
    tokenizer_of,
)
from kdcli.verbs.cotrain.settings import ONLY_ON_TASK, ONLY_ON_TEXT, CotrainRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.blocks import TextWorkload, check_masking, read_corpus
from kdcli.workloads.detect import as_trained
from kdcli.workloads.finetune_recipes import as_finetune
from kdcli.workloads.finetuning import (
    DOWNSTREAM,
    Downstream,
    check_downstream,
    compare_downstream,
    learning_notes,
    notes_on_change,
    open_downstream,
    request_of,
    scores_as_given,
    with_trivial_answer,
)
from kdcli.workloads.labelled import WORST
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.study import Member, compare, run_study, seeds_of, with_seed
from kdcli.workloads.training import first_rows, freeze_unused, total_loss, training_job
from kdcli.workloads.workload import Workload


def cotrain(
    resolved: Resolved[CotrainRecipe],
    options: RunOptions,
    variants: Mapping[str, Resolved[CotrainRecipe]] | None = None,
) -> RunResult | Estimate | None:
    """Co-train on text or on a task, once for each variant and seed; then measure and report.

    Args:
        resolved: The recipe.
        options: Where and how to run.
        variants: The recipe of each variant, by its name; None for the recipe alone.

    Returns:
        The report, or the estimate of a dry run. None in a process that prints nothing.

    Raises:
        KdcliError: The run fails. If the recipe, a model or the data cannot be used, nothing is
            written.
    """
    # Without a task, the pair learns from text, whatever trained the teacher.
    completed = {
        variant: as_trained(own, own.recipe.teacher, task=False)
        for variant, own in (variants or {"": resolved}).items()
    }
    resolved = completed.get("", resolved)
    recipe = resolved.recipe
    members: list[Member[CotrainRecipe]] = []
    for variant, own in completed.items():
        check(own)
        if own.recipe.task is None:
            _read_text(own.recipe, options)
        for seed, folder in seeds_of(own, own.recipe.seeds, variant):
            members.append(Member(variant, folder, with_seed(own, seed), _prepare))
    names = [Path(str(source)).name for source in (recipe.teacher, recipe.student)]
    task = [] if recipe.task is None else [str(recipe.task)]
    name = "-".join(["cotrain", *names, *task])
    return run_study(members, resolved, options, name, partial(compare, _names))


def _names(report: Report, variant: str) -> dict[str, str]:
    """Name both models of a run by their variant."""
    return {peer.name: f"{variant} {peer.name}".strip() for peer in report.with_role("peer")}


def check(resolved: Resolved[CotrainRecipe]) -> None:
    """Check a recipe before models and data are read.

    Raises:
        UsageError: A model is missing, a shape has no model to be copied from, the weights teach
            nothing, or a key is set that this kind of data has no use for.
    """
    recipe = resolved.recipe
    on_task = recipe.task is not None
    if (name := set_among(resolved, ONLY_ON_TEXT if on_task else ONLY_ON_TASK)) is not None:
        if on_task:
            raise UsageError(f"{name} belongs to co-training on text, not to co-training on a task")
        raise UsageError(f"{name} needs --task", "it belongs to co-training on a task")
    for role in PAIR_ROLES:
        if getattr(recipe, role) is None:
            raise UsageError(
                f"no {role} given",
                "kdcli cotrain TEACHER STUDENT; each is a shape such as 6x768, a hub id or "
                "directory",
            )
    weights_of(recipe)
    if on_task and recipe.base is None and is_shape(str(recipe.teacher)):
        raise UsageError(
            f"on a task the teacher {recipe.teacher} would start from nothing",
            "give a model in its place, or --base MODEL, from which shapes are copied",
        )


@dataclass
class Cotraining:
    """One training of both models, checked.

    Attributes:
        context: The run.
        workload: The data that both models learn from.
        resolved: The recipe of this training's stage.
        folder: The directory of this training's stage.
        notes: Notes for the report.
        tasks: The tasks on which the models are compared afterwards.
        pair: The models, if they are loaded already.
        alone: Whether the models learn without each other, for comparison.
        contents: The content of the report, once the models are trained.
    """

    context: RunContext[CotrainRecipe]
    workload: Workload
    resolved: Resolved[CotrainRecipe]
    folder: Path
    notes: list[str]
    tasks: Downstream
    pair: ModelPair | None = None
    alone: bool = False
    contents: ReportContents | None = None

    @property
    def folders(self) -> dict[str, Path]:
        """The directory of each model by name."""
        return {name: self.folder / name for name in pair_names(self.resolved.recipe).values()}

    @property
    def stage(self) -> Stage:
        """The stage that trains both models."""
        return Stage(self.folder, self.resolved, self.build)

    def build(self) -> StageJob:
        """Load both models and build the job."""
        if self.alone:
            log("training the same models without each other")
        pair = self.pair or load_pair(self.resolved.recipe, self.workload)
        self.pair = None
        job, schedule, steps_per_pass = pair_job(self.resolved.recipe, self.workload, pair)
        models = zip(self.folders, pair.models.values(), strict=True)
        cards = {name: describe(loaded.model, name, None) for name, loaded in models}

        def finish(outcome: Outcome) -> None:
            self._finish(pair, outcome)

        return StageJob(job, schedule, steps_per_pass, finish, cards)

    def _finish(self, pair: ModelPair, outcome: Outcome) -> None:
        workload, recipe, entries = self.workload, self.resolved.recipe, list[Entry]()
        origin, made = origin_of(recipe), how_made(recipe)
        # Each model learns from the other, so both depend on the same rows.
        rows = all_rows(pair.rows, workload.rows)
        for (name, folder), loaded in zip(self.folders.items(), pair.models.values(), strict=True):
            if self.context.is_main:
                workload.save(loaded, folder, rows)
                entries.append(
                    Entry.saved(name, "peer", loaded.model, folder, made=made, source=origin)
                )
        contents = workload.report("cotrain", recipe, entries, outcome)
        contents.notes = self.notes
        if workload.has_metrics:
            for name, loaded in pair.models.items():
                scores, before = workload.score(loaded, worst=WORST), self._scores_before(name)
                if self.context.is_main:
                    scores = with_trivial_answer(workload, loaded, scores)
                    contents.notes += _learning_notes(workload, name, before, scores)
                contents.evaluations += scores.rows(name)
            contents.quality = quality_of(contents.evaluations)
        else:
            losses = held_out_mlm_losses(recipe, RunDir(self.folder))
            contents.quality = {
                HELD_OUT_MLM: {n: {"loss": after} for n, (_, after) in losses.items()}
            }
        self.contents = contents
        # The comparison run writes its report now, the main run after the comparison.
        if self.alone and self.context.is_main:
            self.context.report(contents, folder=self.folder)

    def _scores_before(self, role: str) -> ModelScores | None:
        """Score a model before its training; None of a new head, and of the comparison run."""
        recipe = self.resolved.recipe
        source = str(getattr(recipe, role))
        if self.alone or is_shape(source):
            return None
        return scores_as_given(self.workload, source, head_of(recipe, role))


def _learning_notes(
    workload: Workload, name: str, before: ModelScores | None, after: ModelScores
) -> list[str]:
    """Compare a model's scores with the trivial answer, and with its scores before the training."""
    model = f"the {name}"
    if before is None:
        return learning_notes(model, after.evaluations, None)
    notes = learning_notes(model, after.evaluations, None, KEEP_SCORE)
    changes = notes_on_change(workload, model, before, after, KEEP_SCORE)
    is_said = any(KEEP_SCORE in note for note in notes)
    return [*notes, *(note for note in changes if note != KEEP_SCORE or not is_said)]


def origin_of(recipe: CotrainRecipe) -> str | None:
    """Return the model that both models were made from; None if they began with random weights."""
    sources = [recipe.community.model, recipe.base, recipe.teacher, recipe.student]
    return next((str(s) for s in sources if s is not None and not is_shape(str(s))), None)


def how_made(recipe: CotrainRecipe) -> str:
    """Describe how both models are trained."""
    pair = f"{short(str(recipe.teacher))} and {short(str(recipe.student))}, {recipe.mode}"
    if recipe.task is not None:
        data = data_name(str(recipe.task), recipe.data.source)
    else:
        data = short(str(recipe.data.source))
        if recipe.community.model is not None:
            pair += f" under {short(str(recipe.community.model))}"
    weights = ":".join(f"{weight:g}" for weight in recipe.weights)
    return f"trained together as {pair} on {data}, weights {weights}"


def load_pair(recipe: CotrainRecipe, workload: Workload) -> ModelPair:
    """Load or make both models."""
    if recipe.task is not None:
        return load_task_pair(recipe, workload)
    return load_text_pair(recipe)


def _report(main: Cotraining, others: list[Cotraining], community: Model | None) -> None:
    """Report on both models, compared with each other and with the same models trained alone."""
    context, workload, contents = main.context, main.workload, main.contents
    assert contents is not None
    sources: dict[str, str | Path] = {**main.folders}
    if community is not None:
        sources = {TEACHER_MODEL: location(community.source), **sources}
    for each in others:
        sources |= {f"{name} {STANDALONE}": folder for name, folder in each.folders.items()}
    baselines = {name: f"{name} {STANDALONE}" for name in main.folders} if others else {}
    recipe = context.recipe
    seeds = recipe.eval.seeds if main.tasks else 1
    folder = context.folder / DOWNSTREAM
    result = compare_downstream(
        context, main.tasks, sources, folder, seeds=seeds, baselines=baselines
    )
    if not context.is_main:
        return
    models = []
    if community is not None:
        models.append(Entry.loaded(TEACHER_MODEL, "teacher", community))
    # The student comes last, because the report's first numbers describe the last model.
    first, last = (replace(model, baseline=baselines.get(model.name)) for model in contents.models)
    models.append(first)
    quality = contents.quality or {}
    contents.compared_runs = {each.folder.name: RunResult.read(each.folder) for each in others}
    for run in contents.compared_runs.values():
        alone = run.report.renamed({name: f"{name} {STANDALONE}" for name in run.report.cards})
        models += [
            Entry(f"{name} {STANDALONE}", "baseline", card, of=name)
            for name, card in run.report.cards.items()
        ]
        contents.evaluations += alone.evaluations
        for row, values in alone.quality.items():
            quality[row] |= values
    contents.models = [*models, last]
    if not workload.has_metrics:
        contents.notes = contents.notes + gains(context.recipe, RunDir(context.folder), quality)
        for name, task in main.tasks.items():
            contents.notes += [f"{name}: {note}" for note in task.workload.notes]
        contents.evaluations = result.evaluations
        contents.comparisons = result.comparisons
        quality = quality_of(result.evaluations) | quality
    contents.quality = quality
    context.report(contents, context.recipe.measure)


def _prepare(context: RunContext[CotrainRecipe]) -> Run:
    """Check models and data, and tokenise, without claiming the run directory."""
    recipe, resolved = context.recipe, context.resolved
    tasks: Downstream = {}
    if recipe.task is not None:
        workload, pair = _on_task(recipe, context)
        notes = list(workload.notes)
    else:
        workload, pair, tasks = _on_text(recipe, context)
        notes = list(pair.notes)
    log(*pair.notes)
    community = pair.community
    main = Cotraining(context, workload, resolved, context.folder, notes, tasks, pair)
    others = []
    weights = weights_of(recipe)
    if recipe.standalone and weights.mutual and weights.teacher_hard + weights.student_hard > 0:
        changes = {"mode": STANDALONE, "standalone": False}
        origins = dict(resolved.origins) | dict.fromkeys(changes, "to compare with")
        alone = Resolved(recipe.model_copy(update=changes), origins)
        folder = context.folder / STANDALONE
        others = [Cotraining(context, workload, alone, folder, list(notes), {}, alone=True)]
    stages = [each.stage for each in (main, *others)]
    return Run(stages, lambda: _report(main, others, community))


def _read_text(recipe: CotrainRecipe, options: RunOptions) -> None:
    """Train a tokenizer and tokenise the text, unless both are cached.

    Call it before the processes join. It may take hours, but a process group times out after
    minutes if all processes wait for one.
    """
    check_machine(recipe.train.dtype, options)
    check_downstream(recipe.eval, recipe.train.seed)
    tokenizer = tokenizer_of(recipe)
    check_masking(recipe.data, tokenizer, str(recipe.teacher))
    read_corpus(recipe.data, tokenizer)


def _on_task(
    recipe: CotrainRecipe, context: RunContext[CotrainRecipe]
) -> tuple[Workload, ModelPair]:
    """Open the task and load both models.

    Raises:
        UsageError: The task has no labels.
    """
    has_teacher = not is_shape(str(recipe.teacher))
    origin = str(recipe.teacher if has_teacher else recipe.base)
    first = as_finetune(recipe, origin, head=recipe.head if has_teacher else None)
    sources = [str(s) for s in (recipe.teacher, recipe.student, recipe.base) if s]
    others = [source for source in sources if not is_shape(source)]
    workload, _ = open_workload(request_of(first, origin, other_models=others), context.session)
    if not workload.has_labels:
        raise UsageError(
            f"{task_title(workload.name)} has no labels, but co-training learns from labels",
            "use kdcli distill, which learns from a teacher alone",
        )
    workload.plan(recipe.train)
    return workload, load_task_pair(recipe, workload)


def _on_text(
    recipe: CotrainRecipe, context: RunContext[CotrainRecipe]
) -> tuple[TextWorkload, ModelPair, Downstream]:
    """Open the text and the tasks, and load both models.

    Raises:
        UsageError: Too little text.
    """
    data, batch = recipe.data, recipe.train.batch_size
    pair = load_text_pair(recipe)
    student = pair.models[STUDENT_MODEL]
    tokenizer, source = student.tokenizer, str(recipe.teacher)
    check_masking(data, tokenizer, source)
    with tempfile.TemporaryDirectory() as aside:
        if recipe.eval.tasks:
            save_model(student.model, tokenizer, Path(aside), pair.rows)
        tasks = open_downstream(recipe.eval, aside, recipe.train.seed, context)
    corpus = read_corpus(data, tokenizer)
    if len(corpus.train) < batch:
        raise UsageError(
            f"{data.source} gives {len(corpus.train)} training blocks of {data.max_length} tokens, "
            f"less than one batch of {batch}",
            "give more text, or lower train.batch_size or data.max_length",
        )
    seed = recipe.train.seed
    workload = TextWorkload(context.session, corpus, data, tokenizer, source, seed=seed)
    return workload, pair, tasks


KEEP_SCORE = (
    "To keep the score, lower the learning rate (--lr), or give the labels more weight (--weights)"
)
PARTNERS = ("student-1", "student-2")
"""Names of the two models if a community teacher teaches both."""
STANDALONE = "standalone"
"""Directory of the comparison run, and suffix of its models' names."""
HELD_OUT_MLM = "held-out MLM loss"
"""Name of the loss on masked tokens of held-out text in the table of qualities."""

SoftDivergence = Callable[[Signals, Signals], Tensor]


def pair_names(recipe: CotrainRecipe) -> dict[str, str]:
    """Return the name of each role in logs, reports and directories."""
    return dict(
        zip(PAIR_ROLES, PARTNERS if weights_of(recipe).community else PAIR_ROLES, strict=True)
    )


def weights_of(recipe: CotrainRecipe) -> Weights:
    """Return the weights of the loss terms.

    Raises:
        UsageError: The weights are wrong, or leave a mode nothing to learn.
    """
    community = recipe.community.model is not None
    return Weights.of(recipe.weights, recipe.mode, community=community)


class PairStep:
    """The step of a job: sums the terms of `kdcli.losses.ctcd.ctcd` with their weights."""

    def __init__(
        self,
        recipe: CotrainRecipe,
        workload: Workload,
        models: Mapping[str, Capture],
        community: Teacher | None = None,
    ) -> None:
        self.workload, self.models, self.community = workload, models, community
        self.recipe = recipe
        self.names, self.weights = pair_names(recipe), weights_of(recipe)
        self.modules = {name: models[role] for role, name in self.names.items()}

    def __call__(self, batch: Batch) -> StepLoss:
        workload = self.workload
        frozen = self.community.signals(batch) if self.community is not None else None
        signals = {role: workload.forward(model, batch) for role, model in self.models.items()}
        student = signals[STUDENT_MODEL]

        def hard(of: Signals) -> Tensor:
            return total_loss(workload.hard(of, batch), of)

        def soft(source: Signals, learner: Signals) -> Tensor:
            losses = workload.soft(source, learner, batch, self.recipe.temperature)
            return total_loss(losses, learner)

        terms = ctcd(hard, soft, signals, self.weights, frozen, self._community_divergence())
        if not torch.is_grad_enabled():
            # Runs are compared by their held-out losses against the labels, even if the models
            # learn nothing from labels.
            for role in PAIR_ROLES:
                if f"{role}/hard" not in terms:
                    terms[f"{role}/hard"] = 0.0, hard(signals[role])
        named: dict[str, Term] = {}
        for key, (weight, value) in terms.items():
            role, _, name = key.partition("/")
            named[f"{self.names[role]}/{name}"] = Term(value, workload.over, weight)
        return StepLoss(named, workload.outputs(student, batch))

    def _community_divergence(self) -> SoftDivergence | None:
        recipe = self.recipe
        if not recipe.community.printed_order:
            return None

        def divergence(frozen: Signals, learner: Signals) -> Tensor:
            assert frozen.logits is not None
            assert learner.logits is not None
            return reverse_kl(frozen.logits, learner.logits, recipe.temperature)

        return divergence

    def freeze_idle(self, batch: Batch) -> None:
        """Freeze the parameters without a gradient.

        Otherwise several processes would sum zeros, and weight decay would shrink the parameters.
        """
        for role, name in self.names.items():
            if self.weights.reaches(role):
                outputs = self.workload.forward(self.models[role], batch).logits
                assert outputs is not None
                freeze_unused(self.models[role], outputs.sum())
            else:
                self.models[role].requires_grad_(False)
                log(f"{name} learns nothing with these weights and stays unchanged")


def pair_job(
    recipe: CotrainRecipe, workload: Workload, pair: ModelPair
) -> tuple[Job, Schedule, float]:
    """Build the job that trains both models.

    Returns:
        The job, its schedule, and the number of steps in one pass over the examples.
    """
    frozen = pair.community
    community = None
    if frozen is not None:
        community = Teacher.frozen(frozen.source, frozen.model, workload.needs, workload.session)
    models = pair.captured(recipe.dropout, workload)
    step = PairStep(recipe, workload, models, community)
    step.freeze_idle(first_rows(workload.examples))
    plan = workload.plan(recipe.train)
    job = training_job(workload, step.modules, step, plan.order, recipe.keep)
    return job, plan.schedule, plan.steps_per_pass


def held_out_mlm_losses(recipe: CotrainRecipe, run_dir: RunDir) -> dict[str, tuple[float, float]]:
    """Return each model's held-out loss against the labels, before and after training."""
    held = [r["held_out"] for r in run_dir.read_log() if "held_out" in r]
    return {n: (held[0][f"{n}/hard"], held[-1][f"{n}/hard"]) for n in pair_names(recipe).values()}


def gains(recipe: CotrainRecipe, run_dir: RunDir, quality: Quality) -> list[str]:
    """Describe what each model gained from the other, and which of two students is better."""
    losses, lines = held_out_mlm_losses(recipe, run_dir), []
    for name, (before, after) in losses.items():
        line = f"{name}: {HELD_OUT_MLM} {before:.4f} before, {after:.4f} after"
        alone = f"{name} {STANDALONE}"
        if alone in quality[HELD_OUT_MLM]:
            other = quality[HELD_OUT_MLM][alone]["loss"]
            word = "better" if after < other else "worse"
            line += (
                f", {other:.4f} {STANDALONE}: {abs(other - after):.4f} {word} with the other model"
            )
        lines.append(line)
    if TEACHER_MODEL not in losses:
        best, worse = sorted(losses, key=lambda name: losses[name][1])
        both = f"{losses[best][1]:.4f} against {losses[worse][1]:.4f}"
        lines.append(f"{best} is the better student: {HELD_OUT_MLM} {both}")
    return lines
