"""`kdcli compress`: make a smaller model that can be shipped.

Data flow: goal -> untrained latencies -> teacher -> candidates, each made by other verbs -> scores
next to the teacher on held-out rows -> the best one in best/, and a report with the whole table.
"""

import shutil
from pathlib import Path

from kdcli.deploy.exported import FACTS
from kdcli.deploy.latency import Latency
from kdcli.disk import atomic_dir, read_json, write_atomic
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir, numbered
from kdcli.errors import GateError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report import schema
from kdcli.report.charts.compression import png
from kdcli.report.finish import ReportContents, ReportedModel, RunResult, write_report
from kdcli.report.schema import Compression
from kdcli.report.text import duration
from kdcli.run.context import cpu_session
from kdcli.verbs.compress.budget import check_budget, check_timing, finetuning
from kdcli.verbs.compress.journal import Journal
from kdcli.verbs.compress.judge import (
    CandidateScores,
    ScoredModel,
    check_rows,
    choose,
    misses,
    sentence,
)
from kdcli.verbs.compress.plan import check_reachable, follow_plan, follow_steps
from kdcli.verbs.compress.runner import StepRunner, kind_of
from kdcli.verbs.compress.search import TEACHER, Candidate, Search, check_backends
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings
from kdcli.verbs.compress.shapes import Untrained, measure_untrained
from kdcli.workloads import open_evaluation
from kdcli.workloads.workload import EvaluationRequest

BEST, PICTURE = "best", "pareto.png"
NOT_SHIPPED = (
    "checkpoints",
    "start",
    "intermediate",
    "student-undistilled",
    "mask",
    "compact",
    ".lock",
    "log.jsonl",
)
"""Files of a run directory that do not belong to its model."""


def run(resolved: Resolved[CompressRecipe], options: RunOptions) -> RunResult:
    """Compress a model and report.

    Raises GateError: no candidate meets the goal. The report and the nearest candidate are written.
    Raises KdcliError: the run fails. If the goal, the model or the data cannot be used, nothing is
        written.
    """
    recipe = resolved.recipe
    name = f"compress-{Path(str(recipe.model)).name}-{recipe.task}"
    taken = options.resume or options.overwrite
    folder = options.output_dir or numbered(name, taken=taken)
    run_dir = RunDir(folder)
    resumed = run_dir.check(resolved.to_yaml(), resume=options.resume, overwrite=options.overwrite)
    with stop_requests(at_once=True) as stop:
        journal = Journal(recipe.budget, stop)
        runner = StepRunner(recipe, kind_of(recipe), options, folder, journal)
        with runner.stopping():
            if resumed:
                journal.read(run_dir)
                if run_dir.done:
                    Progress.log(f"{folder} is done already")
                    return checked(recipe, RunResult.read(folder))
            result = _compress(resolved, runner)
    return checked(recipe, result)


def _compress(resolved: Resolved[CompressRecipe], runner: StepRunner) -> RunResult:
    """Check goal, model and data, claim the directory, run all steps, and report."""
    recipe, options, journal = resolved.recipe, runner.options, runner.journal
    rows, fits = check_model(recipe, trusted=options.trust_remote_code)
    search = Search(runner, str(recipe.model))
    for note in check_rows(recipe, rows):
        Progress.log(note)
        search.notes.append(note)
    untrained = None
    if not recipe.steps:
        check_backends(search)
        check_timing(search)
        untrained = journal.once(
            "untrained", Untrained, lambda: measure_untrained(search, str(recipe.model))
        )
        search.fastest = untrained.fastest
        check_reachable(search, untrained)
    check_budget(runner, is_fine_tuned=fits)
    claimed = RunDir.claim(
        runner.folder, resolved.to_yaml(), resume=options.resume, overwrite=options.overwrite
    )
    journal.claim(claimed)
    if not fits:
        search.teacher = str(runner.require(TEACHER, finetuning(runner)))
    scores = follow_steps(search) if untrained is None else follow_plan(search, untrained)
    return finish(search, scores)


def checked(recipe: CompressRecipe, result: RunResult) -> RunResult:
    """Return the result of a compression. Raises GateError: it missed the goal."""
    compression = result.report.compression
    assert compression is not None
    if not compression.met:
        raise GateError(
            compression.sentence, f"the whole table is in {result.folder} (report.html)"
        )
    return result


def check_model(recipe: CompressRecipe, *, trusted: bool) -> tuple[int, bool]:
    """Return the number of held-out rows, and whether the model can do the task as it is.

    Raises UsageError: the data or the model cannot be used, or no row has a label.
    """
    model, task = str(recipe.model), str(recipe.task)
    request = EvaluationRequest(task, [model], recipe.data, pooling=recipe.pooling)
    workload = open_evaluation(request, cpu_session(trust_remote_code=trusted))
    return workload.row_count, workload.fits(model)


def finish(search: Search, scores: CandidateScores) -> RunResult:
    """Put the best candidate into best/ and write the report."""
    runner, goal = search.runner, search.goal
    last = scores.candidates[-1]
    chosen, missed = (
        (last, misses(goal, scores.teacher, last)) if runner.recipe.steps else choose(goal, scores)
    )
    with atomic_dir(runner.folder / BEST) as aside:
        shutil.copytree(
            chosen.folder, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED)
        )
    rows = [
        row_of(one, scores.teacher, goal, chosen) for one in (scores.teacher, *scores.candidates)
    ]
    rows += [
        schema.Candidate(name=c.name, outcome=c.skipped)
        for c in search.candidates.values()
        if c.skipped
    ]
    dropped = seconds_dropped(search, chosen)
    limits = goal.model_dump(exclude={"strict"}, exclude_none=True)
    compression = Compression(
        task=str(runner.recipe.task),
        metric=scores.metric,
        rows=scores.rows,
        goal=limits,
        strict=goal.strict,
        met=not missed,
        chosen=chosen.name,
        sentence=sentence(scores, chosen, missed, goal),
        candidates=rows,
    )
    notes = [f"{BEST}/ is what to ship, and its README.md says how to run it", *search.notes]
    notes += [
        f"it took {duration(runner.journal.seconds)}, "
        f"{duration(dropped)} of it for what is not in {BEST}/"
    ]
    notes += [note for one in scores.candidates if (note := in_float(one))]
    if any(row.status != "ok" for row in scores.report.latency):
        notes.append(
            "some latencies are noisy or unstable: the machine had other work, "
            "so measure again when it has none"
        )
    if len(scores.candidates) > 1 and not runner.recipe.steps:
        notes.append(
            f"the held-out rows also chose among {len(scores.candidates)} candidates: "
            f"judge {BEST}/ on others"
        )
    return _write(runner, scores, chosen, compression, notes)


def row_of(
    one: ScoredModel, teacher: ScoredModel, goal: GoalSettings, chosen: ScoredModel
) -> schema.Candidate:
    """Report what became of a candidate."""
    outcome = ""
    if one is chosen:
        outcome = "chosen"
    elif one is not teacher:
        outcome = "; ".join(misses(goal, teacher, one).values()) or "meets the goal"
    return schema.Candidate(
        name=one.name,
        score=one.score,
        low=one.low,
        high=one.high,
        ms=one.ms,
        unstable=one.unstable,
        speedup=one.speedup,
        mb=one.mb,
        outcome=outcome,
    )


def in_float(one: ScoredModel) -> str:
    """Name the products that a quantised candidate keeps in float32; empty for none."""
    file = one.folder / FACTS
    products = read_json(file).get("products", []) if file.is_file() else []
    names = [product["name"] for product in products if product["float"]]
    if not names:
        return ""
    return (
        f"{one.name}: {len(names)} of {len(products)} products stay in float32: {', '.join(names)}"
    )


def seconds_dropped(search: Search, chosen: ScoredModel) -> float:
    """Return the seconds spent on candidates that were not chosen.

    In a pipeline, every step contributes to the last model.
    """
    if search.runner.recipe.steps:
        return 0.0
    parent = search.candidates.get(chosen.name, Candidate(chosen.name)).parent
    spent = [
        (record.key.split()[1], record.seconds)
        for record in search.runner.journal.records
        if record.key.startswith("run ")
    ]
    kept = [TEACHER, "judged", chosen.name, *([parent, f"{parent}-trimmed"] if parent else [])]
    return float(
        sum(
            seconds for name, seconds in spent if name not in kept and not name.startswith("judged")
        )
    )


def _write(
    runner: StepRunner,
    scores: CandidateScores,
    chosen: ScoredModel,
    compression: Compression,
    notes: list[str],
) -> RunResult:
    """Report the teacher and the chosen model in full, and all candidates in one table.

    The evaluation's own report has the rest.
    """
    source, cards = scores.report, scores.report.cards
    teacher, *candidates = cards
    own = candidates[scores.candidates.index(chosen)]
    names = {teacher: TEACHER, own: chosen.name}
    latency = Latency()
    for row in source.latency:
        if row.model in names:
            ratio = row.speedup
            if ratio is not None:
                ratio = ratio.model_copy(update={"baseline": names[ratio.baseline]})
            update = {"model": names[row.model], "speedup": ratio}
            latency.rows.append(row.model_copy(update=update))
    several = len(candidates) > 1 and not runner.recipe.steps
    contents = ReportContents(
        "compress",
        runner.recipe,
        [
            ReportedModel(TEACHER, "teacher", cards[teacher]),
            ReportedModel(chosen.name, "candidate", cards[own], TEACHER),
        ],
        latency=latency,
        comparisons=[
            c.model_copy(
                update={
                    "model": chosen.name,
                    "baseline": TEACHER,
                    "chosen_on_these_rows": several,
                }
            )
            for c in source.comparisons
            if c.model == own
        ],
        quality={
            task: {names[model]: values for model, values in models.items() if model in names}
            for task, models in source.quality.items()
        },
        notes=notes,
        compression=compression,
    )
    write_atomic(runner.folder / PICTURE, png(compression))
    return write_report(RunDir(runner.folder), contents)
