"""The state of a planned compression: its candidates, and the steps that make and score them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from kdcli.deploy.exported import FACTS
from kdcli.disk import read_json
from kdcli.engine.progress import Progress
from kdcli.errors import MachineError
from kdcli.report.schema import Report, Role
from kdcli.verbs.compress import steps
from kdcli.verbs.compress.choice import choose, is_bounded, is_sure
from kdcli.verbs.compress.journal import SCORED
from kdcli.verbs.compress.judge import POINT, CandidateScores, judge
from kdcli.verbs.compress.moved import STEPS
from kdcli.verbs.compress.recipes import EXPORTS, backend_of
from kdcli.verbs.compress.runner import StepRunner, step_folder, step_of
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.verbs.compress.steps import Step


@dataclass
class Candidate:
    """A way to a smaller model.

    Attributes:
        folder: the model, once it is written.
        skipped: why it was not finished; empty if it was.
        parent: the step that trained the model for it.
        model: the model in torch that it is made from.
    """

    name: str
    folder: Path | None = None
    skipped: str = ""
    parent: str | None = None
    model: str = ""


@dataclass
class Search:
    """The candidates that were tried so far, and their scores."""

    runner: StepRunner
    teacher: str
    fastest: str = ""  # The backend that trained shapes are exported to
    candidates: dict[str, Candidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scores: CandidateScores | None = None

    @property
    def goal(self) -> GoalSettings:
        """The limits that the user set."""
        return self.runner.recipe.goal

    @property
    def backends(self) -> list[str]:
        """The backends that can be used on this machine."""
        return [
            name
            for name in self.runner.recipe.plan.backends
            if name not in self.candidates or not self.candidates[name].skipped
        ]

    @property
    def met(self) -> str:
        """The name of a candidate that meets the goal; empty if none does so far."""
        if self.scores is None:
            return ""
        chosen, missed = choose(self.goal, self.scores)
        return "" if missed else chosen.name

    def skip(self, name: str, why: str, parent: str | None = None) -> None:
        """Log and record that a candidate is not tried, or not finished."""
        Progress.log(f"{name} is skipped: {why}")
        self.candidates[name] = Candidate(name, None, why, parent)

    def finishes(self, name: str, step: Step, parent: str | None = None) -> bool:
        """Run a step. If it fails or has no time, skip its candidate and return False."""
        if why := self.runner.step(name, step):
            self.skip(name, why, parent)
        return not why

    def export(
        self,
        name: str,
        model: Path | str,
        backend: str,
        parents: Sequence[str] = (),
        *,
        required: bool = False,
    ) -> None:
        """Write a model for a backend as a candidate, or skip the candidate if that fails.

        In int8, the products without which the model loses more than the goal allows stay in
        float32. If that does not help, all products are quantised. The bound is part of the
        directory's name, so the file for another goal never replaces this one.

        Args:
            name: the name of the candidate.
            model: the model.
            backend: the backend, such as `onnx-int8`.
            parents: the steps that trained the model, one after another.
            required: whether a failure ends the compression.
        """
        bound, why = self.int8_bound(parents), ""
        parent = parents[-1] if parents else None
        for limit in [bound, None] if backend.endswith("-int8") and bound > 0 else [None]:
            place = name if limit is None else f"{name}-within-{limit:.4g}"
            step = steps.export_step(
                self.runner.verbs, self.runner.recipe, str(model), backend, max_drop=limit
            )
            why = self.runner.step(place, step, required=required and limit is None)
            if not why:
                folder = self.runner.path(place)
                self.candidates[name] = Candidate(name, folder, "", parent, str(model))
                return
            if limit is not None:
                Progress.log(f"{name} is quantised without a bound: {why}")
        self.skip(name, why, parent)

    def int8_bound(self, parents: Sequence[str]) -> float:
        """Return the points that int8 may lose: what the trainings left over of `max_drop`.

        Zero means that nothing is bounded, or that nothing is left.
        """
        bound = self.goal.max_drop or 0.0
        if not parents:
            return bound
        first, last = (self.runner.result(parents[n]).report for n in (0, -1))
        before, after = _score(first, "teacher", "baseline"), _score(last, "student", "pruned")
        if before is None and self.scores is not None:
            # Pruning on labels does not score the model that it prunes.
            before = self.scores.teacher.score
        if before is None or after is None:
            return bound  # Without both scores, the drop that training caused is unknown.
        return bound - max(0.0, before - after) / POINT

    def answers_from_earlier(self) -> bool:
        """Whether a candidate that was scored for another goal meets this one.

        If so, all these candidates are in `scores`, and nothing needs to be trained.
        """
        journal = self.runner.journal
        # The file of a later goal replaces an earlier one with the same name.
        earlier = {
            one.name: one
            for key in self.runner.scored_before
            for one in map(self._in_this_run, journal.once(key, list[Candidate], list))
            if one.folder is not None and one.folder.is_dir() and self._runs_here(one.folder)
        }
        if not earlier:
            return False
        self.candidates |= earlier
        self._score([one for one in self.candidates.values() if one.folder is not None])
        if self.met:
            self.notes.append("an earlier candidate meets the goal, so nothing was trained")
            return True
        self.candidates = {name: one for name, one in self.candidates.items() if one.skipped}
        self.scores = None
        return False

    def _runs_here(self, folder: Path) -> bool:
        """Whether a model's backend is installed, see `check_backends`. Torch always is."""
        if not (folder / FACTS).is_file():
            return True
        facts = read_json(folder / FACTS)
        backend = f"{facts['format']}-{facts['precision']}".removesuffix("-fp32")
        return backend not in self.candidates or not self.candidates[backend].skipped

    def _in_this_run(self, candidate: Candidate) -> Candidate:
        """Return an earlier candidate with its directories in this run, which may have been moved.

        The model of a candidate may be the user's own, which is where it was.
        """
        assert candidate.folder is not None  # Only finished candidates are scored.
        steps = step_folder(candidate.folder).parent

        def here(path: str) -> str:
            if not Path(path).is_relative_to(steps):
                return path
            return str(self.runner.folder / STEPS / Path(path).relative_to(steps))

        return replace(
            candidate, folder=Path(here(str(candidate.folder))), model=here(candidate.model)
        )

    def judge(self) -> bool:
        """Score all finished candidates on the selection rows, if there are any.

        Return True if one meets the goal with confidence, and no faster one is wanted.
        """
        finished = [one for one in self.candidates.values() if one.folder is not None]
        if not finished:
            return False
        self._score(finished)
        assert self.scores is not None
        chosen, missed = choose(self.goal, self.scores)
        return not missed and is_bounded(self.goal) and is_sure(self.goal, self.scores, chosen)

    def _score(self, candidates: list[Candidate]) -> None:
        folders = {one.name: one.folder for one in candidates if one.folder is not None}
        scores = judge(self.runner, self.teacher, folders)
        parents = {one.name: one.parent for one in candidates}
        scored = [replace(one, parent=parents[one.name]) for one in scores.candidates]
        self.scores = replace(scores, candidates=scored)
        key = f"{SCORED}{' '.join(sorted(map(step_of, folders.values())))}"
        self.runner.journal.once(key, list[Candidate], lambda: candidates)


def _score(report: Report, *roles: Role) -> float | None:
    """Return the score of the first model with one of some roles, the mean over all sets."""
    names = [model.name for model in report.with_role(*roles)][:1]
    scores = [next(iter(e.metrics.values())) for e in report.evaluations if e.model in names]
    return fmean(scores) if scores else None


def check_backends(search: Search) -> None:
    """Skip the backends of the plan that are not installed. A pipeline needs all of its backends.

    Raises UsageError: an unknown backend; MachineError: none is installed, or a pipeline lacks one.
    """
    recipe = search.runner.recipe
    for verb, keys in (one for step in recipe.steps for one in step.items()):
        if verb in EXPORTS:
            _check_backend(search, backend_of(verb, keys))
    if recipe.steps:
        return
    for backend in recipe.plan.backends:
        try:
            _check_backend(search, backend)
        except MachineError as error:
            search.skip(backend, error.message)
    if not search.backends:
        raise MachineError("none of the backends is installed here", "pip install 'kdcli[onnx]'")


def _check_backend(search: Search, backend: str) -> None:
    name, _, precision = backend.partition("-")
    search.runner.verbs.check_backend(name, precision or "fp32")
