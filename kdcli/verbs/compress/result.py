"""Verify the best candidate, put it into best/, and write the report."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

from kdcli.deploy.exported import FACTS
from kdcli.deploy.latency import Latency
from kdcli.disk import REPORT_FILE, atomic_dir, read_json, write_atomic
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.report import schema
from kdcli.report.entry import Entry
from kdcli.report.finish import BEST, ReportContents, RunResult, write_report
from kdcli.report.schema import Compression
from kdcli.report.sections.price import price_sentence
from kdcli.report.text import duration, short
from kdcli.report.titles import SELECTION, VERIFICATION
from kdcli.targets.outputs import delete_oldest_outputs
from kdcli.verbs.compress.choice import all_misses, choose, dominated, verified_misses
from kdcli.verbs.compress.record import Answer
from kdcli.verbs.compress.runner import OUTPUTS, PAGE, STEPS
from kdcli.verbs.compress.scores import TEACHER, CandidateScores, ScoredModel, Verification
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.ship import (
    check_temperature,
    fill_best,
    fit_temperature,
    never_predicted,
    with_thresholds,
)
from kdcli.verbs.compress.summary import describe_next, sentence
from kdcli.workloads.decisions import for_limit

PICTURE = "pareto.png"


def ship(search: Search) -> RunResult:
    """Verify the best candidate, put it into best/, and write the report."""
    recipe, steps, goal, scores = search.recipe, search.steps, search.goal, search.scores
    assert scores is not None
    last = scores.candidates[-1]
    chosen, missed = (
        (last, goal.misses(last, scores.teacher)) if recipe.steps else choose(goal, scores)
    )
    verified, verification_notes = verify_decisions(search, scores, chosen)
    missed = verified_misses(goal, missed, verified)
    answer = sentence(
        scores,
        verified,
        missed,
        goal,
        model=short(str(recipe.model)),
        has_labels=search.has_labels,
    )
    # The price stays on this machine: README.md of best/ is for everybody.
    cost = price_sentence(
        recipe.price_per_hour, verified.chosen.throughput, verified.teacher.throughput
    )
    following = next_candidate(search, missed, verified)
    described = ""
    if following is not None:
        command = steps.options.changed_command("compress", steps.folder, {})
        described = describe_next(scores, following, command)
    compression = Compression(
        task=str(recipe.task),
        metric=scores.metric,
        rows=scores.rows,
        goal={limit.key: limit.value for limit in goal.limits},
        limits=[limit.of_report(scores.teacher) for limit in goal.limits],
        strict=goal.strict,
        met=not missed,
        chosen=chosen.name,
        next_candidate=None if following is None else following.name,
        sentence=" ".join(filter(None, [answer, cost, described])),
        candidates=candidate_rows(search, chosen),
        steps=step_reports(search),
        verification=schema.Verified(
            rows=verified.rows,
            teacher=verified.teacher.score,
            score=verified.chosen.score,
            low=verified.chosen.low,
            high=verified.chosen.high,
            confidence=verified.confidence,
            look=verified.look,
            reference="labels" if search.has_labels else "teacher",
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
        with atomic_dir(steps.folder / BEST) as aside:
            one = search.candidates[chosen.name]
            folders = steps.absolute(one.model), steps.absolute(one.folder)
            fill_best(aside, folders, steps.options, answer)
            # A process that is killed from here on leaves no report, so the run is continued.
            (steps.folder / REPORT_FILE).unlink(missing_ok=True)
        result = _write(search, verified, compression, notes)
        steps.record.add(Answer())
        return result


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
    if not missed or search.goal.misses(selected, scores.teacher) or search.recipe.steps:
        return None
    known = {**scores.verified, verified.chosen.name: verified}
    other, misses_of_other = choose(search.goal, replace(scores, verified=known))
    return None if misses_of_other else other


def verify_decisions(
    search: Search, scores: CandidateScores, chosen: ScoredModel
) -> tuple[Verification, list[str]]:
    """Verify the best candidate, with the temperature and thresholds of the selection rows.

    Returns:
        The verification, and notes for the report.
    """
    selected = scores.report.decisions
    fit_temperature(chosen.folder, selected, chosen.name)
    verified = search.verify(chosen)
    # The rows may have been scored for another goal.
    limit = search.goal.max_class_drop
    decisions = [
        for_limit(with_thresholds(decision, selected), limit)
        for decision in verified.report.decisions
    ]
    report = verified.report.model_copy(update={"decisions": decisions})
    notes = check_temperature(chosen.folder, decisions, chosen.name)
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


def step_reports(search: Search) -> list[schema.StepReport]:
    """List the steps that wrote a report, in the order in which they first ran."""
    steps = search.steps
    places = dict.fromkeys(one.place for one in steps.record.attempts)
    folders = {place: steps.folder / STEPS / place for place in places}
    return [
        schema.StepReport(
            name=folder.name,
            command=RunResult.read(folder).report.command,
            folder=f"{STEPS}/{place}",
        )
        for place, folder in folders.items()
        if (folder / PAGE).is_file() and RunDir(folder).done
    ]


def notes_on_search(search: Search, chosen: ScoredModel, verified: Verification) -> list[str]:
    """Return notes on the time, on products in float32, on the latencies and on the interval."""
    scores = search.scores
    assert scores is not None
    notes = [
        f"The run took {duration(search.steps.record.seconds())}; "
        f"{duration(seconds_dropped(search, chosen))} went into models that were not chosen"
    ]
    notes += [note for one in scores.candidates if (note := in_float(one))]
    if any(row.status != "ok" for row in scores.report.latency):
        folders = str(scores.teacher.folder), str(search.steps.folder / BEST)
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
    shared = {
        key: value for key, value in vars(one).items() if key in schema.Candidate.model_fields
    }
    return schema.Candidate(**shared, outcome=outcome, dominated_by=better)


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
    if search.recipe.steps:
        return 0.0
    one = search.candidates[chosen.name]
    kept = {one.folder, one.model, one.parent, search.steps.relative(search.teacher)}
    shared = (SELECTION, VERIFICATION)
    return sum(
        attempt.seconds
        for attempt in search.steps.record.attempts
        if f"{STEPS}/{attempt.place}" not in kept
        and not attempt.place.partition("/")[2].startswith(shared)
        and not attempt.place.endswith(".json")
    )


def _write(
    search: Search, verified: Verification, compression: Compression, notes: list[str]
) -> RunResult:
    """Report the teacher and the chosen model in full, and all candidates in one table.

    The evaluations on the selection rows have reports of their own.
    """
    folder, scores, chosen = search.steps.folder, search.scores, compression.chosen
    assert scores is not None
    report = verified.report
    models = [
        Entry(TEACHER, "teacher", report.cards[TEACHER]),
        Entry(chosen, "candidate", report.cards[chosen], TEACHER),
    ]
    rows = [row for row in scores.report.latency if row.model in report.cards]
    contents = ReportContents(
        "compress",
        search.recipe,
        models,
        latency=Latency(rows),
        evaluations=report.evaluations,
        comparisons=report.comparisons,
        quality=report.quality,
        notes=notes,
        auto_class=search.trainer.auto_class,
        compression=compression,
        command_line=search.steps.options.command_line("compress"),
        price_per_hour=search.recipe.price_per_hour,
        decisions=report.decisions,
    )
    # Import here: only a finished compression needs matplotlib.
    from kdcli.report.charts.compression import png

    write_atomic(folder / PICTURE, png(compression))
    delete_oldest_outputs(folder / OUTPUTS)
    return write_report(RunDir(folder), contents)
