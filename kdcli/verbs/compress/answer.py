"""Verify the best candidate, put it into best/, and write the report."""

import shlex
from dataclasses import dataclass, replace

from kdcli.deploy.backends import kept_in
from kdcli.deploy.latency import Latency
from kdcli.deploy.measurements import MEASURE_AGAIN, Speedup
from kdcli.disk import REPORT_FILE, atomic_dir, read_json, write_atomic
from kdcli.engine.processes import stop_requests
from kdcli.engine.run_dir import RunDir
from kdcli.kept import delete_oldest_results
from kdcli.listing import joined
from kdcli.messages import warn
from kdcli.metrics.cascade import rows_needed
from kdcli.metrics.resolution import exceeds, rows_within
from kdcli.models.files import FACTS
from kdcli.report import schema
from kdcli.report.finish import BEST, Entry, ReportContents, RunResult, write_report
from kdcli.report.front import Score, hub_data_set
from kdcli.report.schema import Compression
from kdcli.report.sections.summary import machine
from kdcli.report.sections.timings import milliseconds, price_sentence
from kdcli.report.text import (
    data_name,
    duration,
    loses,
    megabytes,
    number,
    percent,
    points_interval,
    short,
)
from kdcli.report.titles import SELECTION, VERIFICATION
from kdcli.verbs.compress.cascade import describe_needed, loss_name
from kdcli.verbs.compress.limits import POINT, QUALITY, MaxDropOfClass, ScoredModel, conflict
from kdcli.verbs.compress.record import Answer
from kdcli.verbs.compress.scored import ERROR, P95, TEACHER, CandidateScores, Verification
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.ship import (
    Shipped,
    check_temperature,
    fill_best,
    fit_temperature,
    never_predicted,
)
from kdcli.verbs.compress.steps import OUTPUTS, PAGE, STEPS
from kdcli.workloads.decisions import checked_classes, for_limit

PICTURE = "pareto.png"
WAYS = "a longer training (plan.distill.train.epochs)", "smaller plan.shapes"
"""Ways to a better and to a smaller model."""
WAYS_OF_STEPS = (
    "a longer training (train.epochs of a distill step)",
    "a smaller student (student.to of a distill step)",
)
"""The same ways in a recipe with steps, which ignores `plan:`."""
WAYS_WITHOUT_SHAPES = "", "students (remove plan.shapes=null)"
"""The same ways in a plan that trains no student."""
NOTABLE_POINTS = 0.5
"""Smallest difference between two losses, in points, that can change a decision."""


@dataclass(frozen=True)
class Outcome:
    """The chosen candidate, in sentences and next to the others.

    Attributes:
        scores: The scores of all candidates.
        verified: The scores of the chosen candidate on the verification rows.
        missed: How it misses the goal, by limit.
        has_labels: Whether labels are the reference; otherwise it is the teacher.
        has_steps: Whether the recipe has steps, whose last model is always chosen.
        has_shapes: Whether the plan may train students.
    """

    scores: CandidateScores
    verified: Verification
    missed: dict[str, str]
    has_labels: bool
    has_steps: bool = False
    has_shapes: bool = True

    @property
    def selected(self) -> ScoredModel:
        """The chosen candidate on the selection rows."""
        return self.scores.named(self.verified.chosen.name)

    def next_candidate(self) -> ScoredModel | None:
        """Return the candidate that the same command verifies next, after a failure.

        The result is None if the chosen candidate misses the goal on the selection rows too, or if
        no other candidate meets it there. Steps have no next candidate.
        """
        if self.has_steps or not self.missed or self.scores.selected_misses(self.selected):
            return None
        known = {**self.scores.verified, self.selected.name: self.verified}
        other, missed = replace(self.scores, verified=known).choose()
        return None if missed else other

    def rows(self) -> list[schema.Candidate]:
        """Return the rows of the report's table: the teacher and the scored candidates."""
        scores = self.scores
        worse, missed = scores.dominated(), scores.all_misses()

        def outcome(name: str) -> str:
            if name == self.verified.chosen.name:
                return "chosen"
            better = [f"no better than {worse[name]}"] if name in worse else []
            return "; ".join([*missed[name].values(), *better]) or "meets the goal"

        return [
            _row(scores.teacher, ""),
            *(_row(one, outcome(one.name), worse.get(one.name)) for one in scores.candidates),
        ]

    def sentence(self, model: str) -> str:
        """Summarise gain and loss of the chosen candidate.

        `model` is the name of the model that was compressed.
        """
        teacher, chosen = self.verified.teacher, self.verified.chosen
        ratio, times = self._speed()
        smaller = (
            f"{_size_change(teacher.mb, chosen.mb)} ({megabytes(chosen.mb)} MB instead of "
            f"{megabytes(teacher.mb)})"
        )
        if ratio.is_inconclusive:
            unstable = f"Its times are unstable ({times}) and give no speed-up; {MEASURE_AGAIN}"
            won = f"{chosen.name} is {smaller}. {unstable}"
        else:
            faster = f"{ratio.phrase()} as {model} ({ratio.trust()}; {times})"
            won = f"{chosen.name} is {faster} and {smaller}"
        cascade = self._describe_cascade()
        won += f". It {self._lost()}{f'. {cascade}' if cascade else ''}"
        is_beyond = not self.missed and not self._is_shown
        beyond = "; the interval reaches beyond the goal" if is_beyond else ""
        return f"{won}{beyond}.{self._selection_loss()}"

    def miss(self) -> str:
        """Say by how much the nearest candidate misses the goal; empty if the goal is met."""
        if not self.missed:
            return ""
        rows, name = f"{self.verified.rows:,} verification rows", self._title(self.selected)
        if not self.scores.selected_misses(self.selected):
            whys = "; ".join(self.missed.values())
            return f"{name} meets it on the selection rows, but not on the {rows}: {whys}"
        whys = "; ".join(
            f"{why}, on {rows}" if limit in QUALITY else why for limit, why in self.missed.items()
        )
        return f"the nearest candidate is {name}: {whys}"

    def advice(self) -> list[str]:
        """Return sentences on what may meet the goal, or show that it is met."""
        is_quality = not self.missed.keys().isdisjoint(QUALITY)
        sentences = [self._rows_needed() if is_quality or not self.missed else ""]
        if self.missed and self.next_candidate() is None:
            both = conflict(list(self.scores.all_misses().values()))
            better, smaller = self._ways
            unchecked = {MaxDropOfClass.key} if self._lacks_examples else set()
            ways = ["more verification rows"] * bool(unchecked)
            ways += [better] * bool((self.missed.keys() & QUALITY) - unchecked)
            ways += [smaller] * bool(self.missed.keys() - QUALITY)
            tries = joined(list(filter(None, ways)))
            sentences += [both and f"{both}.", f"Loosen the goal{tries and f', or try {tries}'}."]
        return list(filter(None, sentences))

    @property
    def _ways(self) -> tuple[str, str]:
        """Ways to a better and to a smaller model; an empty text is no way."""
        if self.has_steps:
            return WAYS_OF_STEPS
        return WAYS if self.has_shapes else WAYS_WITHOUT_SHAPES

    @property
    def _lacks_examples(self) -> bool:
        """Whether `max_class_drop` is missed because no class has enough verification rows."""
        bound = self.scores.goal.max_class_drop
        if bound is None or MaxDropOfClass.key not in self.missed:
            return False
        return not all(checked_classes(one, bound) for one in self.verified.chosen.decisions)

    def _title(self, one: ScoredModel) -> str:
        """Name a candidate, and say that it is no cascade if the goal asks for one."""
        is_other = self.scores.goal.cascade and one.cascade is None
        return f"{one.name} (no cascade)" if is_other else one.name

    @property
    def _is_shown(self) -> bool:
        """Whether the end of the interval, or a cascade's limit, is within `max_drop`."""
        chosen, bound = self.verified.chosen, self.scores.goal.max_drop
        _, high = _loss(self.verified.teacher, chosen)
        limit = high if chosen.cascade is None else chosen.cascade.risk / POINT
        return bound is None or not exceeds(limit, bound)

    def _rows_needed(self) -> str:
        """Say how many verification rows would show that the loss is within `max_drop`.

        The result is empty if these rows show it, or if the loss itself misses the goal.
        """
        goal, verified = self.scores.goal, self.verified
        facts, bound = verified.chosen.cascade, goal.max_drop
        if bound is None or self._is_shown:
            return ""
        if facts is not None and verified.losses_N is not None:
            loss, error = loss_name(ranks=facts.ranks), 1 - verified.confidence
            needed = rows_needed(verified.losses_N, bound * POINT, error)
        else:
            loss, lost = "loss", (verified.teacher.score - verified.chosen.score) / POINT
            _, high = _loss(verified.teacher, verified.chosen)
            needed = rows_within(lost, high, bound, verified.rows)
            if needed is None and not goal.strict:
                return ""
        return describe_needed(needed, loss, "verification")

    def _speed(self) -> tuple[Speedup, str]:
        """Return the speed-up of the chosen candidate, and its time next to the teacher's."""
        teacher, chosen = self.verified.teacher, self.verified.chosen
        ratio = chosen.speedup
        assert ratio is not None  # It is None for the teacher only.
        times = f"{'at most ' if chosen.unstable else ''}{milliseconds(chosen.ms)} ms a text"
        return ratio, times + ("" if ratio.unstable else f" instead of {milliseconds(teacher.ms)}")

    def card_facts(self, on: str) -> list[str]:
        """Return the loss, the size and the speed for a model card, as predicates.

        `on` names the machine that measured, as in ` on AMD EPYC`.
        """
        teacher, chosen = self.verified.teacher, self.verified.chosen
        ratio, times = self._speed()
        if ratio.is_inconclusive:
            speed = f"shows no speed-up (its times are unstable: {times}{on})"
        else:
            speed = f"is {ratio.phrase()} ({ratio.trust()}; {times}{on})"
        size = f"takes {megabytes(chosen.mb)} MB instead of {megabytes(teacher.mb)}"
        return [self._lost(), size, speed]

    def remarks(self, model: str) -> str:
        """Return what the reader of a model card needs besides loss, size and speed.

        `model` is the name of the compressed model, the teacher.
        """
        teacher = f"The teacher is {model}, and its answers are the reference."
        reference = "" if self.has_labels else teacher
        missed = f"It misses the goal: {'; '.join(self.missed.values())}." if self.missed else ""
        cascade = self._describe_cascade()
        apart = self._selection_loss().strip()
        parts = [missed, f"{cascade}." if cascade else "", reference, apart]
        return " ".join(filter(None, parts))

    def describe_next(self, one: ScoredModel, command: str) -> str:
        """Describe the next candidate, with the command that verifies it."""
        ratio = one.speedup
        assert ratio is not None  # It is None for the teacher only.
        speed = "unstable times" if ratio.is_inconclusive else ratio.phrase()
        return (
            f"The next candidate is {self._title(one)}: {number(one.score)} {self.scores.metric} "
            f"on the selection rows, {speed}, {megabytes(one.mb)} MB. To verify it, run: {command}"
        )

    def _lost(self) -> str:
        """Write the points that were lost, with their interval and the rows, as a predicate."""
        verified = self.verified
        teacher, score = verified.teacher.score, verified.chosen.score
        low, high = _loss(verified.teacher, verified.chosen)
        ends = points_interval(low, high, verified.confidence, " of the loss")
        if self.has_labels:
            ends = f"{number(score)} instead of {number(teacher)}; {ends}"
        lost = loses((teacher - score) / POINT, self._metric)
        return f"{lost} ({ends}) on {verified.rows:,} verification rows"

    def _describe_cascade(self) -> str:
        """Describe how a cascade works, and how many answers it may change; empty for others."""
        chosen, verified = self.verified.chosen, self.verified
        facts = chosen.cascade
        if facts is None:
            return ""
        level, most = f"{100 * verified.confidence:.4g} % confidence", f"{facts.risk / POINT:.2f}"
        share, slowest = percent(facts.asked, 1), milliseconds(chosen.costs[P95])
        if facts.ranks:
            how = (
                f"{facts.first} scores all passages of a query, and {facts.second} the best "
                f"{facts.setting:g} of them, which are {share} % of the passages"
            )
            item = "passages"
            bound = f"a ranking scores on average at most {most} points less than the teacher's"
        else:
            how = (
                f"{facts.first} reads every text, and {facts.second} reads {share} % of them, "
                f"where {facts.first} is unsure"
            )
            item = "texts"
            bound = f"at most {most} % of the answers on such texts differ from the teacher's"
            if self.scores.metric == "agreement":
                bound += "; this limit is one-sided, so it is below the interval's upper end"
        return (
            f"It is a cascade: {how}, so the time is a mean; 95 % of the {item} take at most "
            f"{slowest} ms. With {level}, {bound}"
        )

    def _selection_loss(self) -> str:
        """Write the loss on the selection rows if it clearly differs from the verified loss.

        The result is empty if the intervals of the two losses overlap, or if the losses differ too
        little to change a decision.
        """
        scores, verified, selected = self.scores, self.verified, self.selected
        low, high = _loss(scores.teacher, selected)
        verified_low, verified_high = _loss(verified.teacher, verified.chosen)
        points = (scores.teacher.score - selected.score) / POINT
        verified_points = (verified.teacher.score - verified.chosen.score) / POINT
        overlaps = low <= verified_high and verified_low <= high
        if overlaps or abs(points - verified_points) < NOTABLE_POINTS:
            return ""
        ends = points_interval(low, high, 1 - ERROR, " of the loss")
        return (
            f" On the {scores.rows:,} selection rows it {loses(points, self._metric)} ({ends}). "
            "These losses differ by more than chance explains: expect the one whose rows resemble "
            "your own texts."
        )

    @property
    def _metric(self) -> str:
        """The name of the metric, as agreement if the teacher is the reference."""
        metric = self.scores.metric
        if self.has_labels:
            return metric
        return f"agreement with the teacher{'' if metric == 'agreement' else f' ({metric})'}"


def _size_change(before: float, after: float) -> str:
    """Write how much smaller or larger a model became: `1.5 times smaller`."""
    if after > before:
        return f"{after / before:.1f} times as large"
    return f"{before / after:.1f} times smaller"


def _loss(teacher: ScoredModel, model: ScoredModel) -> tuple[float, float]:
    """Return the ends of the interval of the points that a candidate lost."""
    return (teacher.score - model.high) / POINT, (teacher.score - model.low) / POINT


def _row(one: ScoredModel, outcome: str, better: str | None = None) -> schema.Candidate:
    """Return a measured candidate's row. `better` names the one that dominates it, if any."""
    shared = {
        key: value for key, value in vars(one).items() if key in schema.Candidate.model_fields
    }
    return schema.Candidate(**shared, outcome=outcome, dominated_by=better)


def ship(search: Search) -> RunResult:
    """Verify the best candidate, put it into best/, and write the report."""
    recipe, goal, scores = search.recipe, search.goal, search.scores
    assert scores is not None
    last = scores.candidates[-1]
    chosen, missed = (last, scores.selected_misses(last)) if recipe.steps else scores.choose()
    verified, verification_notes = verify_decisions(search, scores, chosen)
    missed = verified.misses(goal, missed)
    outcome = Outcome(
        scores,
        verified,
        missed,
        has_labels=search.has_labels,
        has_steps=bool(recipe.steps),
        has_shapes=recipe.plan.shapes is not None,
    )
    compression = _compression(search, outcome)
    following = compression.next_candidate
    held = "the candidate nearest to the goal" if missed and not following else "the chosen model"
    after = f". It misses the goal; {following} may meet it" if following else ""
    notes = [
        f"{BEST}/ holds {held}, and its README.md says how to run it{after}",
        *search.notes,
        *verification_notes,
        *notes_on_search(search, scores, verified),
    ]
    report, source = verified.report, recipe.data.source
    cut = search.shortened.get(chosen.name.partition("-")[0])
    of_budget = f"It is {cut}, because the budget ended. " if cut else ""
    first = chosen.cascade and search.candidates[chosen.cascade.first]
    shipped = Shipped(
        model=short(str(recipe.model)),
        name=chosen.name,
        facts=outcome.card_facts(machine(report, "cpu")),
        remarks=of_budget + outcome.remarks(short(str(recipe.model))),
        scores=[
            Score(data_name(e.task, source), e.set, e.split, e.metrics)
            for e in report.evaluations
            if e.model == chosen.name
        ],
        dataset=hub_data_set(str(recipe.task), source),
        first=search.steps.absolute(first.folder) if first else None,
    )
    steps, one = search.steps, search.candidates[chosen.name]
    folders = steps.absolute(one.model), steps.absolute(one.folder)
    # A stop waits for the report, so that best/ holds the model that the report names.
    with stop_requests():
        with atomic_dir(steps.folder / BEST) as aside:
            fill_best(aside, folders, steps.options, shipped)
            # A process that is killed from here on leaves no report, so the run is continued.
            (steps.folder / REPORT_FILE).unlink(missing_ok=True)
        result = _write(search, scores, verified, compression, notes)
        steps.record.add(Answer())
    return result


def _compression(search: Search, outcome: Outcome) -> Compression:
    """Return what the report holds about the search."""
    recipe, goal = search.recipe, search.goal
    scores, verified = outcome.scores, outcome.verified
    following = outcome.next_candidate()
    unfinished = [
        schema.Candidate(name=one.name, outcome=one.skipped)
        for one in search.candidates.values()
        if one.skipped
    ]
    verification = schema.Verified(
        rows=verified.rows,
        teacher=verified.teacher.score,
        score=verified.chosen.score,
        low=verified.chosen.low,
        high=verified.chosen.high,
        confidence=verified.confidence,
        look=verified.look,
        reference="labels" if search.has_labels else "teacher",
        risk=None if verified.chosen.cascade is None else verified.chosen.cascade.risk,
    )
    return Compression(
        task=str(recipe.task),
        metric=scores.metric,
        rows=scores.rows,
        goal={limit.key: limit.value for limit in goal.limits},
        limits=[limit.of_report(scores.teacher) for limit in goal.limits],
        strict=goal.strict,
        cascade=goal.cascade,
        met=not outcome.missed,
        chosen=verified.chosen.name,
        next_candidate=None if following is None else following.name,
        missed=outcome.miss(),
        sentence=_sentence(search, outcome),
        advice=_advice(search, outcome, following),
        candidates=[*outcome.rows(), *unfinished],
        steps=step_reports(search),
        verification=verification,
    )


def _sentence(search: Search, outcome: Outcome) -> str:
    """Return what was won and lost, and its price."""
    verified = outcome.verified
    # The price stays on this machine: README.md of best/ is for everybody.
    cost = price_sentence(
        search.recipe.price_per_hour, verified.chosen.throughput, verified.teacher.throughput
    )
    sentence = outcome.sentence(short(str(search.recipe.model)))
    return f"{sentence} {cost}" if cost else sentence


def _advice(search: Search, outcome: Outcome, following: ScoredModel | None) -> str:
    """Return what to try next, with the command at the end."""
    steps, sentences = search.steps, outcome.advice()
    if search.no_cascade:
        sentences.insert(0, f"There is no cascade: {search.no_cascade}")
    if following is not None:
        command = steps.options.continuing_command("compress", steps.folder, more=())
        sentences.append(outcome.describe_next(following, command))
    return " ".join(sentences)


def verify_decisions(
    search: Search, scores: CandidateScores, chosen: ScoredModel
) -> tuple[Verification, list[str]]:
    """Verify the best candidate, with the temperature of the selection rows.

    Returns:
        The verification, and notes for the report.
    """
    selected = scores.report.decisions
    fit_temperature(chosen.folder, selected, chosen.name)
    verified = search.verify(chosen)
    # The rows may have been scored for another goal.
    limit = search.goal.max_class_drop
    decisions = [for_limit(decision, limit) for decision in verified.report.decisions]
    report = verified.report.model_copy(update={"decisions": decisions})
    notes = check_temperature(chosen.folder, decisions, chosen.name)
    for warning in never_predicted(decisions):
        warn(warning)
        notes.append(warning)
    return replace(verified, report=report), [*notes, *report.notes]


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


def notes_on_search(search: Search, scores: CandidateScores, verified: Verification) -> list[str]:
    """Return notes on the time, on products in float32, on the latencies and on the interval."""
    spent, steps = duration(search.steps.record.seconds()), search.steps
    took = f"The run took {spent}"
    if steps.seconds > steps.budget and spent != (budget := duration(steps.budget)):
        took += f", longer than --budget {budget}"
    dropped = duration(seconds_dropped(search, verified.chosen))
    if dropped != duration(0):
        took += f"; {dropped} went into models that were not chosen"
    notes = [took]
    notes += [note for one in scores.candidates if (note := kept_products(one))]
    if any(row.status != "ok" for row in scores.report.latency):
        facts, folders = verified.chosen.cascade, [search.steps.folder / BEST]
        if facts is not None:
            # The time of a cascade itself depends on the texts.
            folders = [scores.named(name).folder for name in (facts.first, facts.second)]
        models = [str(folder) for folder in (scores.teacher.folder, *folders)]
        notes.append(
            "some latencies are noisy or unstable: the machine had other work, so measure again "
            f"when it has none: kdcli benchmark {shlex.join(models)}"
        )
    if verified.look > 1:
        notes.append(
            f"this is answer number {verified.look} from these verification rows, so its interval "
            f"has {100 * verified.confidence:.5g} % confidence"
        )
    return notes


def kept_products(one: ScoredModel) -> str:
    """Name the products that a quantised candidate keeps in float32 or int8; empty for none."""
    file = one.folder / FACTS
    facts = read_json(file) if file.is_file() else {}
    products = facts.get("products", [])
    names = [product["name"] for product in products if product["float"]]
    if not names:
        return ""
    return (
        f"{one.name}: {len(names)} of {len(products)} products stay in "
        f"{kept_in(facts['precision'])}: {', '.join(names)}"
    )


def seconds_dropped(search: Search, chosen: ScoredModel) -> float:
    """Return the seconds spent on candidates that were not chosen.

    In a pipeline, every step contributes to the last model.
    """
    if search.recipe.steps:
        return 0.0
    names, facts = {chosen.name}, chosen.cascade
    if facts is not None:
        names |= {facts.first, facts.second}
    parts = [search.candidates[name] for name in names]
    kept = {place for one in parts for place in (one.folder, one.model, one.parent)}
    kept.add(search.steps.relative(search.teacher))
    shared = (SELECTION, VERIFICATION)
    return sum(
        attempt.seconds
        for attempt in search.steps.record.attempts
        if f"{STEPS}/{attempt.place}" not in kept
        and not attempt.place.partition("/")[2].startswith(shared)
        and not attempt.place.endswith(".json")
    )


def _write(
    search: Search,
    scores: CandidateScores,
    verified: Verification,
    compression: Compression,
    notes: list[str],
) -> RunResult:
    """Report the teacher and the chosen model in full, and all candidates in one table.

    The evaluations on the selection rows have reports of their own.
    """
    folder, chosen = search.steps.folder, compression.chosen
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
        auto_class=search.make.auto_class,
        compression=compression,
        command_line=search.steps.options.command_line("compress"),
        price_per_hour=search.recipe.price_per_hour,
        decisions=report.decisions,
    )
    # Import here: only a finished compression needs matplotlib.
    from kdcli.report.charts.tradeoff import png

    write_atomic(folder / PICTURE, png(compression))
    delete_oldest_results(folder / OUTPUTS)
    return write_report(RunDir(folder), contents)
