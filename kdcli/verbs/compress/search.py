"""The search of a compression: its candidates, and the steps that make and score them."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar, cast

from kdcli.data.labelled.partition import DividedRows, Partition
from kdcli.data.text.sentences import read_texts
from kdcli.deploy.environment import describe_environment
from kdcli.deploy.latency import Latency, Protocol, Subject
from kdcli.deploy.old_machines.measure_encoders import MAX_MEASUREMENTS
from kdcli.disk import atomic_dir, read_json
from kdcli.engine.device import choose_device
from kdcli.errors import MachineError
from kdcli.messages import log
from kdcli.metrics.cascade import upper_limit
from kdcli.models.files import FACTS
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config, location
from kdcli.models.model import NO_ROWS
from kdcli.recipe.sections import RecipeValues
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report, Role
from kdcli.report.titles import SELECTION
from kdcli.run.context import cpu_session
from kdcli.types import Kind
from kdcli.verbs.compress.cascade import is_cascade, verified_losses, with_cascades
from kdcli.verbs.compress.limits import POINT, GoalSettings, ScoredModel
from kdcli.verbs.compress.record import Candidate, Scored
from kdcli.verbs.compress.scored import (
    TEACHER,
    CandidateScores,
    Verification,
    confidence_of,
    latency_rows,
    read,
    read_verification,
)
from kdcli.verbs.compress.settings import EXPORTS, CompressRecipe, backend_of
from kdcli.verbs.compress.steps import LATENCIES, Step, Steps, TrainingCost, product
from kdcli.verbs.compress.verb_steps import Verbs, VerbSteps
from kdcli.version import install_command
from kdcli.workloads import open_rows
from kdcli.workloads.requests import EvaluationRequest

T = TypeVar("T")
PRUNE: RecipeValues = {"sparsity": [0.9]}
TRAINING_TEXT = "training-text"
"""The directory of the training texts among the steps."""
MIN_OTHERS = 20
"""Minimum number of texts that show how new texts change; fewer tell less than an estimate."""


@dataclass
class Search:
    """The candidates that were tried so far, and their scores.

    Attributes:
        make: Makes the steps. The `data.partition` of its recipe names the selection and
            verification rows.
        steps: Runs the steps.
        teacher: The model in torch that candidates are made from and compared with.
        has_labels: Whether the rows have labels; otherwise the teacher is the reference.
        kind: The kind of the rows' labels; None for workloads other than labelled tasks.
        fits: Whether the model can do the task without fine-tuning.
        known: The number of lines of the record that were known when the goal was asked.
        missing: The backends that are not installed, with the reasons.
        fastest: The backend that trained shapes are exported to.
        shortened: Shape -> what was done to it, if the budget did not pay for its training.
        no_cascade: Why there is no cascade although the goal asks for one.
        deferred: Tasks that are left for the next ones that run side by side.
    """

    make: VerbSteps
    steps: Steps
    teacher: str
    has_labels: bool
    kind: Kind | None
    fits: bool
    known: int
    missing: Mapping[str, str]
    fastest: str = ""
    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shortened: dict[str, str] = field(default_factory=dict)
    no_cascade: str = ""
    scores: CandidateScores | None = None
    deferred: list[Callable[["Search"], object]] = field(default_factory=list)

    @property
    def recipe(self) -> CompressRecipe:
        """The recipe."""
        return self.make.recipe

    @property
    def goal(self) -> GoalSettings:
        """The limits that the user set."""
        return self.recipe.goal

    @property
    def backends(self) -> list[str]:
        """The backends that can be used on this machine."""
        return [name for name in self.recipe.plan.backends if name not in self.missing]

    @property
    def met(self) -> str:
        """The name of a candidate that meets the goal; empty if none does so far."""
        if self.scores is None:
            return ""
        chosen, missed = self.scores.choose()
        return "" if missed else chosen.name

    @property
    def is_timed(self) -> bool:
        """Whether latencies are measured before the end.

        A limit of size needs none, unless the fastest model is wanted and time is not limited.
        """
        goal = self.goal
        wants_fastest = goal.max_drop is not None and self.recipe.budget is None
        is_of_speed = goal.is_of_speed or goal.cascade or not goal.is_bounded
        return is_of_speed or wants_fastest

    @functools.cached_property
    def machine(self) -> list[object]:
        """The facts that latencies depend on besides the models: the machine and the protocol."""
        machine, measure = describe_environment(), self.recipe.measure
        facts = [machine["cpu"], machine["gpus"], machine["latency_threads"]]
        device = str(choose_device(self.steps.options.device))
        return [*facts, device, measure.min_runs, measure.min_seconds]

    def training_text(self) -> Path:
        """Return the text whose tokens a trimmed model keeps: the distillation's, else the training
        rows'.

        It is written to a directory once, without the selection and verification rows. If enough
        selection rows are from the training split, they are its validation split, which shows how
        new texts change.
        """
        folder = self.steps.place(TRAINING_TEXT, self.recipe.text)
        if not folder.is_dir():
            partition = Partition.read(str(self.recipe.data.partition))
            with_selection = replace(partition, selection=partition.selection[:0])
            rows, written = self._rows_of_students(), set[str]()

            def unwritten(texts: Iterable[str]) -> Iterator[str]:
                for text in texts:
                    if text not in written:
                        written.add(text)
                        yield text

            with atomic_dir(folder) as aside:
                train = unwritten(rows.training_texts(partition))
                _write_texts(aside / "text.train.jsonl", train)
                others = list(unwritten(rows.training_texts(with_selection)))
                if len(others) >= MIN_OTHERS:
                    _write_texts(aside / "text.validation.jsonl", others)
        return folder

    def training_texts(self, partition: Partition) -> Iterable[str]:
        """Return the different texts on which students are trained."""
        return self._rows_of_students().training_texts(partition)

    def _rows_of_students(self) -> DividedRows:
        """Read the rows on which students are trained: the distillation's text, else the data."""
        if (text := self.recipe.text) is not None:
            return read_texts(text, column=None, unit="sentence", rows=None)
        return open_rows(evaluation_request(self.recipe), cpu_session())

    def training_rows(self) -> int:
        """Return the number of rows on which a student is trained."""

        def count() -> int:
            data, session = self.recipe.data, cpu_session()
            rows = open_rows(evaluation_request(self.recipe), session).pools(NO_ROWS).train
            number = int(Partition.read(str(data.partition)).is_training(rows).sum())
            return max(1, min(number, data.train_rows or number))

        return self.steps.once("training-rows", self.recipe.data.train_rows, int, count)

    def cost(self, step: Step) -> TrainingCost:
        """Return the cost of a training on this machine."""
        return self.steps.cost(step, self.machine)

    def side_by_side(self, tasks: Sequence[Callable[["Search"], T]] = ()) -> list[T]:
        """Run independent tasks and the deferred ones at the same time if there is a pool.

        Each task has candidates of its own, which come into the list after those of the deferred
        tasks, in the order of the tasks, whichever ends first. The deferred tasks take less time
        than a training, so they begin last.

        Returns:
            The results of `tasks`, in order.
        """
        deferred, self.deferred = self.deferred, []
        branches = [
            replace(self, candidates={}, notes=[], deferred=[]) for _ in (*tasks, *deferred)
        ]
        calls = [
            functools.partial(task, branch)
            for task, branch in zip((*tasks, *deferred), branches, strict=True)
        ]
        results = self.steps.side_by_side(calls)[: len(tasks)]
        for branch in (*branches[len(tasks) :], *branches[: len(tasks)]):
            self.candidates |= branch.candidates
            self.notes += branch.notes
        return cast(list[T], results)

    def compute_outputs(self, name: str, model: Path | str, split: str = SELECTION) -> None:
        """Compute a model's outputs beside other steps if there is a pool.

        A later evaluation reads them. It also reports an error that ends this step.
        """
        if self.steps.pool is not None:
            self.steps.run(self.make.outputs(name, str(model), split))

    def skip(self, name: str, why: str) -> None:
        """Log and record that a candidate is not tried, or not finished."""
        log(f"{name} is skipped: {why}")
        self.candidates[name] = Candidate(name, skipped=why)

    def without(self, names: Iterable[str], whys: Mapping[str, str]) -> list[str]:
        """Skip the candidates for which there is a reason, and return the others."""
        for name in names:
            if name in whys:
                self.skip(name, whys[name])
        return [name for name in names if name not in whys]

    def finishes(self, step: Step) -> bool:
        """Run a step. If it fails or has no time, skip its candidate and return False."""
        if why := self.steps.run(step):
            self.skip(step.name, why)
        return not why

    def export(
        self,
        name: str,
        model: Path | str,
        backend: str,
        parents: Sequence[Path] = (),
        *,
        required: bool = False,
    ) -> None:
        """Write a model for a backend as a candidate, or skip the candidate if that fails.

        In int8, the products without which the model loses more than the goal allows stay in
        float32. If that does not help, all products are quantised. The bound is part of the
        directory's name, so the file for another goal never replaces this one.

        Args:
            name: The name of the candidate.
            model: The model.
            backend: The backend, such as `onnx-int8`.
            parents: The directories of the trainings that made the model, one after another.
            required: Whether a failure ends the compression.
        """
        bound, why = self.int8_bound(parents, Path(model).name), ""
        for limit in [bound, None] if "-int8" in backend and bound > 0 else [None]:
            title = name if limit is None else f"{name}-within-{limit:.4g}"
            step = self.make.export(title, str(model), backend, max_drop=limit)
            why = self.steps.run(step, required=required and limit is None)
            if not why:
                self.add(name, self.steps.path(step), model, parents)
                self.compute_outputs(name, self.steps.path(step))
                return
            if limit is not None:
                log(f"{name} is quantised without a bound: {why}")
        self.skip(name, why)

    def add(self, name: str, folder: Path, model: Path | str, parents: Sequence[Path]) -> None:
        """Record a finished candidate."""
        parent = self.steps.relative(parents[-1]) if parents else None
        place, source = map(self.steps.relative, (folder, model))
        self.candidates[name] = Candidate(name, place, "", parent, source)

    def int8_bound(self, parents: Sequence[Path], name: str) -> float:
        """Return the points that int8 may lose: what the trainings left over of `max_drop`.

        Zero means that nothing is bounded, or that nothing is left. `name` is the directory of the
        model, which is the name of a member of a family.
        """
        bound = self.goal.max_drop or 0.0
        if not parents:
            return bound
        first, last = (RunResult.read(parents[n]).report for n in (0, -1))
        before = _score(first, name, "teacher", "baseline")
        after = _score(last, name, "student", "pruned")
        if before is None and self.scores is not None:
            # Pruning on labels does not score the model that it prunes.
            before = self.scores.teacher.score
        if before is None or after is None:
            return bound  # Without both scores, the drop that training caused is unknown.
        return bound - max(0.0, before - after) / POINT

    def answers_from_earlier(self) -> bool:
        """Whether a candidate that was scored for another goal meets this one.

        If so, all these candidates are in `scores`, and nothing needs to be trained. Candidates
        that were scored for other `plan.backends` or `plan.shapes` do not count.
        """
        skipped, record = dict(self.candidates), self.steps.record
        known = record.candidates(self.recipe, self.known)
        earlier = {name: one for name, one in known.items() if self._runs_here(one)}
        if not earlier:
            return False
        self.candidates |= earlier
        self.score()
        if self.met:
            self.notes.append("an earlier candidate meets the goal, so nothing was trained")
            return True
        self.candidates, self.scores = skipped, None
        return False

    def _runs_here(self, one: Candidate) -> bool:
        """Whether a candidate is an export for a backend of the plan that is installed.

        Every candidate of a plan is an export; only steps leave models in torch.
        """
        file = self.steps.absolute(one.folder) / FACTS
        if not file.is_file():
            return False
        facts = read_json(file)
        backend = f"{facts['format']}-{facts['precision']}".removesuffix("-fp32")
        return backend in self.backends

    def score(self) -> bool:
        """Score all finished candidates on the selection rows, if there are any.

        Latencies are only measured if they decide, or by `measure` at the end. Return True if a
        candidate meets the goal with confidence, and no faster one is wanted.
        """
        self.side_by_side()
        finished = {
            name: one
            for name, one in self.candidates.items()
            if one.folder and not is_cascade(self.steps.absolute(one.folder))
        }
        if not finished:
            return False
        folders = {TEACHER: Path(self.teacher)}
        folders |= {name: self.steps.absolute(one.folder) for name, one in finished.items()}
        models = {name: str(folder) for name, folder in folders.items()}
        step = self.make.score(SELECTION, models)
        self.steps.require(step)
        scores = read(self.steps.result(step).report, folders, self.goal)
        line = Scored(list(finished.values()))
        if line not in self.steps.record.lines[self.known :]:
            self.steps.record.add(line)
        self.scores = scores
        looks = self.steps.record.looks(self.known)
        if not (scores.keep_quality or self.goal.cascade or looks):
            return False
        if self.is_timed or looks:
            self.measure()
        chosen, missed = self.scores.choose()
        return not missed and self.goal.is_bounded and self.scores.is_sure(chosen)

    def measure(self) -> None:
        """Add the latencies of all scored models, which take turns, unless they are known.

        The rows of a larger batch decide nothing, so they are measured once even if they are
        unstable, and so is everything if no candidate keeps the quality or the budget ends.
        """
        scores = self.scores
        if scores is None or scores.is_measured:
            return
        models = {one.name: str(one.folder) for one in (scores.teacher, *scores.candidates)}
        settings, device = self.recipe.measure, str(choose_device(self.steps.options.device))
        repeats = (scores.keep_quality or self.goal.cascade) and self.steps.spare >= 0
        count = MAX_MEASUREMENTS if repeats else 1
        protocol = Protocol(
            device,
            settings.min_runs,
            settings.min_seconds,
            max_measurements=count,
            only_first_again=True,
        )
        report = scores.report

        def measured() -> Latency:
            log("measuring the latencies of the candidates")
            subjects = [Subject(name, location(source)) for name, source in models.items()]
            latency = self.make.verbs.measure(subjects, protocol, math.inf)
            self.steps.check()
            latency_rows(with_rows(report, latency))
            return latency

        subject = [dict(sorted(models.items())), self.machine]
        # Another goal may have measured them, with more repetitions or fewer.
        counts = (count, MAX_MEASUREMENTS, 1)
        known = [n for n in counts if self.steps.has(LATENCIES, [*subject, n])]
        latency = self.steps.once(LATENCIES, [*subject, *(known or counts)[:1]], Latency, measured)
        if known[:1] == [1] and count > 1 and any(row.unstable for row in latency.rows):
            latency = self.steps.once(LATENCIES, [*subject, count], Latency, measured)
        scores = scores.with_latencies(with_rows(report, latency), self.recipe.price_per_hour)
        if self.goal.cascade:
            scores = with_cascades(
                self, scores, self.steps.path(self.make.score(SELECTION, models))
            )
        scored = [replace(o, parent=self.candidates[o.name].parent) for o in scores.candidates]
        self.scores = replace(scores, candidates=scored)
        looks = self.steps.record.looks(self.known)
        verified = {one.name: self.verify(one) for one in scored if self._look(one) in looks}
        self.scores = replace(self.scores, verified=verified)

    def _verification(self, one: ScoredModel, confidence: float) -> Step:
        assert self.scores is not None
        models = {TEACHER: self.teacher, one.name: str(one.folder)}
        return self.make.verify(models, confidence, self.scores.report.decisions)

    def _look(self, one: ScoredModel) -> str:
        """Return the directory of the look at a candidate, as the record has it."""
        return self.steps.at(self._verification(one, confidence_of(1)))

    def verify(self, one: ScoredModel) -> Verification:
        """Score the teacher and a candidate on the verification rows.

        Each other model that was verified before counts as a look at the rows. Later looks have
        wider intervals, because the best of several looks is optimistic.

        Raises:
            KdcliError: The models cannot be scored.
        """
        assert self.scores is not None
        looks, own = self.steps.record.looks(), self._look(one)
        look = 1 + (looks.index(own) if own in looks else len(looks))
        step = self._verification(one, confidence_of(look))
        self.steps.require(step)
        verified = read_verification(self.steps.result(step).report, self.scores, one, look)
        if one.cascade is None:
            return verified
        losses_N = verified_losses(self.steps.path(step), one.name)
        risk = upper_limit(losses_N, 1 - verified.confidence)
        chosen = replace(verified.chosen, cascade=one.cascade.model_copy(update={"risk": risk}))
        return replace(verified, chosen=chosen, losses_N=losses_N)

    def try_pruning(self) -> None:
        """Prune the model and compact it."""
        name, keys = "pruned", self.recipe.plan.prune
        if keys is None:
            return
        config = load_config(self.teacher)
        if not layout_for(config).compact:
            self.skip(name, f"{config.model_type} has no compact form")
            return
        step = self.make.prune(name, self.teacher, PRUNE | keys)
        if not self.steps.has_begun(step) and (
            why := self.steps.too_long(self.steps.seconds_of_dry_run())
        ):
            self.skip(name, f"even a dry run has no time: {why}")
        elif why := self.steps.why_not_begun(step, self.cost(step)):
            self.skip(name, why)
        elif self.finishes(step):
            folder = self.steps.path(step)
            self.export(f"{name}-{self.fastest}", product(folder), self.fastest, [folder])
            self.score()

    def follow_steps(self) -> None:
        """Run the steps of a recipe one after another, and score the model that each of them
        left."""
        model, trained = Path(self.teacher), list[Path]()
        for number, named in enumerate(self.recipe.steps, 1):
            ((verb, keys),) = named.items()
            name = f"{number}-{verb}"
            if verb in EXPORTS:
                self.export(name, model, backend_of(verb, keys), trained, required=True)
                continue
            if verb == "trim":
                step = self.make.trim(name, str(model), self.training_text(), keys)
            elif verb == "prune":
                step = self.make.prune(name, str(model), keys, self.teacher)
            else:
                step = self.make.distill(name, str(model), keys)
            folder = self.steps.require(step)
            model = product(folder)
            trained += [folder] if step.trains else []
            self.add(name, model, model, trained)
        self.score()


def _write_texts(file: Path, texts: Iterable[str]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def with_rows(report: Report, latency: Latency) -> Report:
    """Return a report of scores with latencies."""
    return report.model_copy(update={"latency": latency.rows, "failures": latency.failures})


def _score(report: Report, name: str, *roles: Role) -> float | None:
    """Return the score of the model with one of some roles, the mean over all sets.

    Of several models, it is the one called `name`, or else the first.
    """
    with_role = [model.name for model in report.with_role(*roles)]
    names = [name] if name in with_role else with_role[:1]
    scores = [next(iter(e.metrics.values())) for e in report.evaluations if e.model in names]
    return fmean(scores) if scores else None


def check_backends(recipe: CompressRecipe, verbs: Verbs) -> Mapping[str, str]:
    """Return the backends of the plan that are not installed, with the reasons.

    Raises:
        UsageError: An unknown backend.
        MachineError: None is installed, or a pipeline, which needs all of its backends, lacks one.
    """

    def check(backend: str) -> None:
        name, _, precision = backend.partition("-")
        verbs.check_backend(name, precision or "fp32")

    for verb, keys in (one for step in recipe.steps for one in step.items()):
        if verb in EXPORTS:
            check(backend_of(verb, keys))
    if recipe.steps:
        return {}
    missing = {}
    for backend in recipe.plan.backends:
        try:
            check(backend)
        except MachineError as error:
            missing[backend] = error.message
    if len(missing) == len(set(recipe.plan.backends)):
        raise MachineError("none of the backends is installed here", install_command("onnx"))
    return missing


def evaluation_request(recipe: CompressRecipe) -> EvaluationRequest:
    """Return the request for the rows of a recipe, whether or not they trained the model."""
    return EvaluationRequest(
        str(recipe.task), [str(recipe.model)], recipe.data, pooling=recipe.pooling
    )
