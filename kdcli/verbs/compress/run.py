"""`kdcli compress`: make a smaller model that can be shipped.

Data flow: goal -> untrained latencies -> teacher -> candidates, each made by other verbs -> scores
next to the teacher on held-out rows -> the best one in best/, and a report with the whole table.
"""

import functools
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kdcli.data.labelled.kept import keep_rows
from kdcli.data.labelled.partition import VERIFICATION, Partition
from kdcli.deploy.exported import FACTS
from kdcli.deploy.latency import Latency
from kdcli.disk import as_directory, atomic_dir, read_json, write_atomic
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report import schema
from kdcli.report.entry import Entry
from kdcli.report.finish import BEST, ReportContents, RunResult, write_report
from kdcli.report.own_data import directory_word
from kdcli.report.schema import Compression
from kdcli.report.sections.price import price_sentence
from kdcli.report.text import duration, short
from kdcli.run.context import cpu_session
from kdcli.run.stages import telling_how_to_continue
from kdcli.targets.outputs import delete_oldest_outputs
from kdcli.types import Kind, task_title
from kdcli.verbs.compress.budget import (
    TIMED,
    BudgetError,
    check_budget,
    check_timing,
    finetuning,
)
from kdcli.verbs.compress.choice import all_misses, choose, dominated, misses, verified_misses
from kdcli.verbs.compress.inputs import check_inputs, warn_of_changes
from kdcli.verbs.compress.journal import SPENT, Journal
from kdcli.verbs.compress.judge import TEACHER, CandidateScores, ScoredModel, Verification, verify
from kdcli.verbs.compress.moved import PARTITION, STEPS
from kdcli.verbs.compress.plan import check_reachable, follow_plan, follow_steps
from kdcli.verbs.compress.question import (
    GOAL,
    choose_folder,
    compression_of,
    limits_of,
    scored_before,
    verified_before,
)
from kdcli.verbs.compress.recipes import BY_MODEL, detected
from kdcli.verbs.compress.rows import divide_rows, goal_notes
from kdcli.verbs.compress.runner import (
    OUTPUTS,
    PAGE,
    StepRunner,
    evaluation_request,
    step_of,
)
from kdcli.verbs.compress.search import Candidate, Search, check_backends
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.shapes import measure_untrained
from kdcli.verbs.compress.ship import (
    check_temperature,
    fill_best,
    fit_temperature,
    never_predicted,
    with_thresholds,
)
from kdcli.verbs.compress.summary import describe_next, sentence
from kdcli.verbs.compress.teacher import log_teacher
from kdcli.verbs.compress.trainers import trainer_of
from kdcli.verbs.compress.verbs import VERBS, Verbs
from kdcli.workloads import open_evaluation
from kdcli.workloads.decisions import KINDS, for_limit
from kdcli.workloads.labelled import LabelledWorkload

PICTURE = "pareto.png"
LOOK = f"run {VERIFICATION}-"
"""The beginning of the journal's keys of looks at the verification rows."""


def run(resolved: Resolved[CompressRecipe], options: RunOptions, verbs: Verbs = VERBS) -> RunResult:
    """Compress a model and report.

    A finished run whose recipe differs in its goal alone answers from what it has tried, and trains
    only what is missing. The same command goes on in it if its report names a next candidate.

    Raises GateError: no candidate meets the goal. The report and the nearest candidate are written.
    Raises KdcliError: the run fails. If the goal, the model or the data cannot be used, nothing is
        written.
    """
    recipe = resolved.recipe
    data = directory_word(str(recipe.task), recipe.data.source)
    name = as_directory(f"compress-{Path(str(recipe.model)).name}-{data}")
    folder, question = choose_folder(name, resolved, options)
    if question is not None and question.is_answered:
        Progress.log(f"{folder} is done already")
        warn_of_changes(recipe, folder)
        return checked(question.earlier)
    options = replace(options, resume=options.resume or question is not None)
    run_dir = RunDir(folder)
    resumed = run_dir.check(
        resolved.to_yaml(), resume=options.resume, overwrite=options.overwrite, free_keys=GOAL
    )
    if question is None:
        Progress.log(f"output directory: {folder}")
    if resolved.origins["task"] == BY_MODEL:
        Progress.log(f"{recipe.model}: {detected(str(recipe.task))}")
    with (
        telling_how_to_continue(options, folder),
        stop_requests(at_once=True) as stop,
    ):
        journal = Journal(recipe.budget, stop, clock=verbs.clock)
        runner = StepRunner(recipe, trainer_of(recipe), options, folder, journal, verbs)
        with runner.stopping(), keep_rows(), Progress.facts_once():
            if resumed:
                journal.read(run_dir)
            if question is not None:
                runner.asks_again = True
                runner.verified_before = verified_before(question, journal)
                runner.scored_before = scored_before(question, journal)
            result = _compress(resolved, runner)
    return checked(result)


def _compress(resolved: Resolved[CompressRecipe], runner: StepRunner) -> RunResult:
    """Check goal, model and data, claim the directory, run all steps, and report."""
    recipe, journal = resolved.recipe, runner.journal
    fits, runner.has_labels, runner.kind = check_model(resolved)
    divided = divide_rows(runner)
    check_inputs(runner)
    search = Search(runner, str(recipe.model))
    few_rows = goal_notes(recipe.goal, divided.selection_rows, divided.verification_rows)
    for note in [*divided.notes, *few_rows]:
        Progress.log(note)
        search.notes.append(note)
    check_backends(search)

    @functools.cache
    def claim() -> None:
        claim_folder(resolved, runner, divided.partition)

    runner.claim = claim
    if runner.asks_again and not recipe.steps:
        use_partition(runner, divided.partition)
        if not fits:
            search.teacher = str(runner.path(TEACHER))
        if search.answers_from_earlier():
            if not fits:
                search.notes += log_teacher(runner)
            runner.claim()
            return ship(search)
    if not recipe.steps:
        check_timing(search)
    untrained = None
    try:
        if not recipe.steps:
            untrained = measure_untrained(search, str(recipe.model), divided.partition)
            search.fastest = untrained.fastest
            check_reachable(search, untrained, is_fine_tuned=fits)
        check_budget(runner, is_fine_tuned=fits)
    except BudgetError:
        # A later run with a larger budget reuses the timings.
        if journal.known(TIMED) and not runner.replaces_run:
            runner.claim()
        raise
    runner.claim()
    if not fits:
        search.teacher = str(runner.require(TEACHER, finetuning(runner)))
        search.notes += log_teacher(runner)
    if untrained is None:
        follow_steps(search)
    else:
        follow_plan(search, untrained)
    return ship(search)


def claim_folder(
    resolved: Resolved[CompressRecipe], runner: StepRunner, partition: Partition
) -> None:
    """Claim the directory, and write the chosen rows and the journal to it.

    Raises UsageError: another process uses the directory, or has answered a question since this one
        read the journal, so that this one does not know what failed.
    """
    options = runner.options
    claimed = RunDir.claim(
        runner.folder,
        resolved.to_yaml(),
        resume=options.resume,
        overwrite=options.overwrite,
        free_keys=GOAL,
    )
    use_partition(runner, partition)
    before = runner.journal.known(LOOK)
    runner.journal.claim(claimed)
    if runner.asks_again and runner.journal.known(LOOK) != before:
        raise UsageError(
            f"another kdcli process finished in {runner.folder} while this one was starting",
            "run the same command with --resume",
        )


def use_partition(runner: StepRunner, partition: Partition) -> None:
    """Let every step read the chosen rows.

    They are written first, unless the recipe names a file or an earlier process wrote one.
    """
    data, file = runner.recipe.data, runner.folder / PARTITION
    if data.partition is None:
        if runner.options.overwrite or not file.is_file():
            partition.write(file)
        data = data.model_copy(update={"partition": str(file)})
        runner.recipe = runner.recipe.model_copy(update={"data": data})


def checked(result: RunResult) -> RunResult:
    """Return the result of a compression. Raises GateError: it missed the goal."""
    compression = compression_of(result)
    if not compression.met:
        raise GateError(
            compression.sentence,
            f"the whole table is in {result.folder} (report.html)",
            folder=result.folder,
        )
    return result


def check_model(
    resolved: Resolved[CompressRecipe],
) -> tuple[bool, bool, Kind | None]:
    """Return whether the model can do the task as it is, whether the rows have labels, and the kind
    of the labels, which only labelled tasks have.

    Raises UsageError: the data or the model cannot be used.
    """
    recipe = resolved.recipe
    session = cpu_session()
    workload = open_evaluation(evaluation_request(recipe), session)
    misfit = workload.misfit(str(recipe.model))
    fits = misfit is None
    if workload.needs_reference and not fits:
        raise UsageError(
            f"the rows have no labels, and {recipe.model} is not fine-tuned for them",
            "give rows with labels, or a fine-tuned model",
        )
    if not fits and resolved.origins["task"] == BY_MODEL:
        raise UsageError(
            f"the labels of {recipe.data.source} do not fit the head of {recipe.model}: {misfit}",
            "add --set data.labels=teacher to ignore them, or "
            f"--task {recipe.task} to train a new head on them first",
        )
    kind = workload.kind if isinstance(workload, LabelledWorkload) else None
    if recipe.goal.max_class_drop is not None and kind not in KINDS:
        raise UsageError(
            f"--max-class-drop is for classes, and {task_title(workload.name)} has none",
            "use --max-drop",
        )
    return fits, not workload.needs_reference, kind


def ship(search: Search) -> RunResult:
    """Verify the best candidate, put it into best/, and write the report."""
    runner, goal, scores = search.runner, search.goal, search.scores
    assert scores is not None
    last = scores.candidates[-1]
    chosen, missed = (
        (last, misses(goal, scores.teacher, last)) if runner.recipe.steps else choose(goal, scores)
    )
    verified, verification_notes = verify_decisions(runner, scores, chosen)
    missed = verified_misses(goal, missed, verified)
    answer = sentence(
        scores,
        verified,
        missed,
        goal,
        model=short(str(runner.recipe.model)),
        has_labels=runner.has_labels,
    )
    # The price stays on this machine: README.md of best/ is for everybody.
    cost = price_sentence(
        runner.recipe.price_per_hour, verified.chosen.throughput, verified.teacher.throughput
    )
    following = next_candidate(search, missed, verified)
    described = ""
    if following is not None:
        command = runner.options.changed_command("compress", runner.folder, {})
        described = describe_next(scores, following, command)
    compression = Compression(
        task=str(runner.recipe.task),
        metric=scores.metric,
        rows=scores.rows,
        goal=limits_of(goal),
        strict=goal.strict,
        met=not missed,
        chosen=chosen.name,
        next_candidate=None if following is None else following.name,
        sentence=" ".join(filter(None, [answer, cost, described])),
        candidates=candidate_rows(search, chosen),
        steps=step_reports(runner),
        verification=schema.Verified(
            rows=verified.rows,
            teacher=verified.teacher.score,
            score=verified.chosen.score,
            low=verified.chosen.low,
            high=verified.chosen.high,
            confidence=verified.confidence,
            look=verified.look,
            reference="labels" if runner.has_labels else "teacher",
        ),
    )
    held = "the candidate nearest to the goal" if missed else "the chosen model"
    notes = [
        f"{BEST}/ holds {held}, and its README.md says how to run it",
        *search.notes,
        *verification_notes,
        *notes_on_search(search, chosen, verified),
    ]
    # A stop waits for the report, so that best/ holds the model that the report names.
    with stop_requests():
        with atomic_dir(runner.folder / BEST) as aside:
            fill_best(aside, search.candidates[chosen.name], runner.options, answer)
        return _write(search, verified, compression, notes)


def next_candidate(
    search: Search, missed: Mapping[str, str], verified: Verification
) -> ScoredModel | None:
    """Return the candidate that the same command verifies next, after a failure of `verified`.

    The result is None if the chosen candidate misses the goal on the selection rows too, or if no
    other candidate meets it there.
    """
    scores = search.scores
    assert scores is not None
    selected = next(one for one in scores.candidates if one.name == verified.chosen.name)
    if not missed or misses(search.goal, scores.teacher, selected) or search.runner.recipe.steps:
        return None
    known = {**scores.verified, verified.chosen.name: verified}
    other, misses_of_other = choose(search.goal, replace(scores, verified=known))
    return None if misses_of_other else other


def verify_decisions(
    runner: StepRunner, scores: CandidateScores, chosen: ScoredModel
) -> tuple[Verification, list[str]]:
    """Verify the best candidate, with the temperature and thresholds of the selection rows.

    Returns:
        The verification, and notes for the report.
    """
    selected = scores.report.decisions
    teacher_name, chosen_name = (scores.report_names[one] for one in (TEACHER, chosen.name))
    fit_temperature(chosen.folder, selected, chosen_name)
    verified = verify(runner, scores, chosen)
    # The rows may have been scored for another goal.
    limit = runner.recipe.goal.max_class_drop
    decisions = [
        for_limit(with_thresholds(decision, selected, teacher_name, chosen_name), limit)
        for decision in verified.report.decisions
    ]
    report = verified.report.model_copy(update={"decisions": decisions})
    notes = check_temperature(chosen.folder, decisions, list(report.cards)[1])
    for warning in never_predicted(decisions):
        Progress.log(warning)
        notes.append(warning)
    return replace(verified, report=report), [*notes, *report.notes]


def candidate_rows(search: Search, chosen: ScoredModel) -> list[schema.Candidate]:
    """Return the rows of the report's table: the teacher, the scored and the skipped candidates."""
    scores = search.scores
    assert scores is not None
    worse, missed = dominated(search.goal, scores), all_misses(search.goal, scores)

    def outcome(one: ScoredModel) -> str:
        if one is chosen:
            return "chosen"
        better = [f"no better than {worse[one.name]}"] if one.name in worse else []
        return "; ".join([*missed[one.name].values(), *better]) or "meets the goal"

    scored = [row_of(scores.teacher, "")]
    scored += [row_of(one, outcome(one), worse.get(one.name)) for one in scores.candidates]
    skipped = [
        schema.Candidate(name=candidate.name, outcome=candidate.skipped)
        for candidate in search.candidates.values()
        if candidate.skipped
    ]
    return [*scored, *skipped]


def step_reports(runner: StepRunner) -> list[schema.StepReport]:
    """List the steps that wrote a report, in the order in which they first ran."""
    names = [key.removeprefix("run ") for key in runner.journal.known("run ")]
    return [
        schema.StepReport(
            name=name,
            command=runner.result(name).report.command,
            folder=f"{STEPS}/{runner.path(name).name}",
        )
        for name in dict.fromkeys(names)
        if (runner.path(name) / PAGE).is_file() and RunDir(runner.path(name)).done
    ]


def notes_on_search(search: Search, chosen: ScoredModel, verified: Verification) -> list[str]:
    """Return notes on the time, on products in float32, on the latencies and on the interval."""
    scores = search.scores
    assert scores is not None
    notes = [
        f"The run took {duration(search.runner.journal.seconds)}; "
        f"{duration(seconds_dropped(search, chosen))} went into models that were not chosen"
    ]
    notes += [note for one in scores.candidates if (note := in_float(one))]
    if any(row.status != "ok" for row in scores.report.latency):
        folders = str(scores.teacher.folder), str(search.runner.folder / BEST)
        notes.append(
            "some latencies are noisy or unstable: the machine had other work, so measure again "
            f"when it has none: kdcli benchmark {shlex.join(folders)}"
        )
    if verified.look > 1:
        notes.append(
            f"this is answer number {verified.look} from these verification rows, so its interval "
            f"has {100 * verified.confidence:.5g} % confidence"
        )
    return notes


def row_of(one: ScoredModel, outcome: str, better: str | None = None) -> schema.Candidate:
    """Return a measured candidate's row. `better` names the one that dominates it, if any."""
    return schema.Candidate(
        name=one.name,
        score=one.score,
        low=one.low,
        high=one.high,
        ms=one.ms,
        unstable=one.unstable,
        speedup=one.speedup,
        throughput=one.throughput,
        mb=one.mb,
        outcome=outcome,
        dominated_by=better,
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
        (key.split()[1], record.seconds)
        for record in search.runner.journal.records
        if (key := record.key.removeprefix(SPENT)).startswith("run ")
    ]
    parents = [parent, f"{parent}-trimmed"] if parent else []
    kept = {TEACHER, step_of(chosen.folder), *map(as_directory, parents)}
    scoring = ("selection-", "verification-")
    dropped = [
        seconds
        for name, seconds in spent
        if as_directory(name) not in kept and not name.startswith(scoring)
    ]
    return float(sum(dropped))


def _write(
    search: Search, verified: Verification, compression: Compression, notes: list[str]
) -> RunResult:
    """Report the teacher and the chosen model in full, and all candidates in one table.

    The evaluations on the selection rows have reports of their own.
    """
    runner, scores = search.runner, search.scores
    assert scores is not None
    names = {scores.report_names[one]: one for one in (TEACHER, verified.chosen.name)}
    latency = Latency()
    for row in scores.report.latency:
        if row.model in names:
            ratio = row.speedup
            if ratio is not None:
                ratio = ratio.model_copy(update={"baseline": names[ratio.baseline]})
            update = {"model": names[row.model], "speedup": ratio}
            latency.rows.append(row.model_copy(update=update))
    report = verified.report
    both = dict(zip(report.cards, (TEACHER, verified.chosen.name), strict=True))
    models = [
        Entry(
            name,
            "teacher" if name == TEACHER else "candidate",
            report.cards[label],
            None if name == TEACHER else TEACHER,
        )
        for label, name in both.items()
    ]
    contents = ReportContents(
        "compress",
        runner.recipe,
        models,
        latency=latency,
        evaluations=[e.model_copy(update={"model": both[e.model]}) for e in report.evaluations],
        comparisons=[
            c.model_copy(update={"model": both[c.model], "baseline": both[c.baseline]})
            for c in report.comparisons
        ],
        quality={
            task: {both[model]: values for model, values in of_task.items()}
            for task, of_task in report.quality.items()
        },
        notes=notes,
        auto_class=runner.trainer.auto_class,
        compression=compression,
        command_line=runner.options.command_line("compress"),
        price_per_hour=runner.recipe.price_per_hour,
        decisions=[
            d.model_copy(
                update={
                    "model": both[d.model],
                    "baseline": both[d.baseline],
                    "calibration": {both[m]: c for m, c in d.calibration.items()},
                }
            )
            for d in report.decisions
        ],
    )
    # Import here: only a finished compression needs matplotlib.
    from kdcli.report.charts.compression import png

    write_atomic(runner.folder / PICTURE, png(compression))
    delete_oldest_outputs(runner.folder / OUTPUTS)
    return write_report(RunDir(runner.folder), contents)
