"""Runs the steps of a compression, each in a directory that is found by what it depends on.

A step whose directory is complete is not run again, and a training that was stopped continues. So
a run that is resumed, moved, or asked for another goal does only what is missing.
"""

import contextlib
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from kdcli.disk import as_directory, cache_key, read_json, write_atomic
from kdcli.engine.pool import Pool
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import (
    ChildFailed,
    GateError,
    Interrupted,
    KdcliError,
    MachineError,
    Stopped,
    UsageError,
)
from kdcli.kept import keep_results
from kdcli.messages import log, silenced
from kdcli.models.files import FACTS
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.text import duration
from kdcli.report.titles import step_title
from kdcli.run.dry_run import Estimate
from kdcli.run.side_by_side import alone
from kdcli.verbs.compress.record import Attempt, Look, Record

T = TypeVar("T")
STEPS = "steps"
"""The directory of the steps."""
OUTPUTS = "outputs"
"""The directory of the outputs of scored models and of fitted students, so that another goal and
another step do not compute them again."""
LATENCIES = "latencies"
"""The name of the latencies of scored models."""
TIMINGS, SHAPE_TIMINGS = "timings", "timings-of-shapes"
"""The names of the latencies of the model on each backend, and of untrained shapes."""
COST = "cost-"
"""The beginning of the name of a dry run."""
COMPACT = "compact"
PAGE = "report.html"
LATENCIES_OVER_EXPORT, SCORES_OVER_EXPORT = 3.0, 0.5
"""Seconds of what was never measured, as multiples of an export. Of the embedded classifier, the
latencies of three models took 3.2 times as long as an export, and their scores half as long."""
OVER = "--budget ended before its training did"
TRY_AGAIN = "fix it and run the same command with --resume"
TRAININGS = ("finetune", "distill", "prune")
"""The verbs that train. They resume from a checkpoint and count against the budget."""
RHYTHM = ("train.eval_every", "train.checkpoint_every")
"""Keys that do not change a trained model, so that they do not name its directory."""


@dataclass(frozen=True)
class Step:
    """A verb that is ready to run in a directory of its own.

    Attributes:
        name: The name in the log and the report.
        verb: The verb.
        values: Everything that its result depends on, besides the inputs of the whole run.
        call: Runs it.
        is_look: Whether it scores models on the verification rows.
        leaves: The file that it writes last, unless it ends with a report.
    """

    name: str
    verb: str
    values: Mapping[str, object]
    call: Callable[[RunOptions], object]
    is_look: bool = False
    leaves: str = FACTS

    @property
    def trains(self) -> bool:
        """Whether the verb trains a model."""
        return self.verb in TRAININGS

    @property
    def identity(self) -> list[object]:
        """The verb, and the values that its result depends on."""
        return [self.verb, {key: one for key, one in self.values.items() if key not in RHYTHM}]


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a training.

    Attributes:
        steps, seconds: Its optimiser steps, and their seconds.
        error: Why it would fail; empty if it would not.
        setup: The seconds of the dry run without a fit that is kept, which the training does not
            repeat.
    """

    steps: int
    seconds: float
    error: str = ""
    setup: float = 0.0


@dataclass
class Steps:
    """The steps of a compression in `folder`.

    Attributes:
        folder: The directory of the run.
        options: The options of the run.
        budget: The seconds that the steps may take together; infinity without a budget.
        stop: Whether the user asked the compression to stop.
        record: The time spent, and the looks at the verification rows.
        clock: The seconds from which durations are computed.
        claim_run: Claims the directory.
        passed: The directories of the steps on the way to this answer, and the optimiser steps
            until which their trainings were needed. Only these steps count against the budget, so
            a run that is resumed decides as it did when it had spent less.
        refused: The directories of the steps that this process could not run -> why.
        pool: The processes that run independent steps; None if there is only this one.
        running: The directories of the steps that are running, and the seconds that each one has
            taken. Steps that run side by side share the time that passes, so that the seconds of
            all steps are those of the run.
    """

    folder: Path
    options: RunOptions
    budget: float
    stop: StopRequest
    record: Record
    clock: Callable[[], float]
    claim_run: Callable[[], None] = lambda: None
    passed: dict[str, float] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    unwritten: dict[Path, str] = field(default_factory=dict)
    current: str = ""
    pool: Pool | None = None
    running: dict[str, float] = field(default_factory=dict)
    _counted_until: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _uses_pool: bool = False

    def side_by_side(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run independent tasks and return their results in order.

        With a pool, they run at the same time, and each of their steps in a process of the pool.
        A task may have tasks of its own.
        """
        if self.pool is None or len(tasks) < 2:
            return [task() for task in tasks]
        is_inner, self._uses_pool = self._uses_pool, True
        try:
            return self.pool.side_by_side(tasks)
        finally:
            self._uses_pool = is_inner

    @property
    def seconds(self) -> float:
        """The seconds of the steps so far, including the steps that are running."""
        with self._lock:
            self._count()
            return self.record.seconds(dict(self.passed)) + sum(self.running.values())

    def _count(self) -> None:
        """Divide the seconds since the last call among the running steps."""
        now = self.clock()
        for at in self.running:
            self.running[at] += (now - self._counted_until) / len(self.running)
        self._counted_until = now

    @contextlib.contextmanager
    def _timed(self, at: str, until: int | None = None, verb: str = "") -> Iterator[list[str]]:
        """Record the seconds of a step, and the error that the block adds to the list."""
        errors: list[str] = []
        with self._lock:
            self._count()
            self.running[at] = 0.0
        try:
            yield errors
        finally:
            with self._lock:
                self._count()
                seconds = round(self.running.pop(at), 3)
                self.record.add(Attempt(at, seconds, until, "; ".join(errors), verb))

    @property
    def left(self) -> float:
        """The seconds of the budget that are left."""
        return self.budget - self.seconds

    @property
    def spare(self) -> float:
        """The seconds of the budget that are left for candidates.

        The latencies of all candidates and the scores on the verification rows come after them.
        """
        latencies = self._slowest(LATENCIES) or self._slowest(TIMINGS, SHAPE_TIMINGS)
        return self.left - (latencies or LATENCIES_OVER_EXPORT * self._export) - self._scores

    @property
    def _export(self) -> float:
        """The seconds of an export, or of a dry run before there is one."""
        timed = self._slowest(TIMINGS, SHAPE_TIMINGS) / 2
        return self._slowest("export") or timed or self.seconds_of_dry_run()

    @property
    def _scores(self) -> float:
        """The seconds in which all candidates are scored."""
        return self._slowest("evaluate") or SCORES_OVER_EXPORT * self._export

    def seconds_after_training(self) -> float:
        """Return the seconds in which a trained student becomes a candidate.

        It is exported, also with a trimmed vocabulary, and evaluated. Each step takes as long as
        the slowest so far. The timing of untrained models has exports, so it counts where there was
        none.
        """
        return 2 * self._export + self._scores

    def seconds_of_dry_run(self) -> float:
        """Return the seconds that the slowest dry run took so far."""
        return self._slowest(*(one.verb for one in self.record.attempts if COST in one.verb))

    def _slowest(self, *verbs: str) -> float:
        """Return the seconds of the slowest of these steps on the way to this answer."""
        passed = [one for one in self.record.attempts if one.place in self.passed]
        return max((one.seconds for one in passed if one.verb in verbs), default=0.0)

    def relative(self, path: str | Path) -> str:
        """Return a path relative to the run, if it is inside."""
        if Path(path).is_relative_to(self.folder / STEPS):
            return Path(path).relative_to(self.folder).as_posix()
        # A path outside may look like one inside.
        return str(Path(path).absolute() if str(path).startswith(f"{STEPS}/") else path)

    def absolute(self, path: str) -> Path:
        """Return the place of a path that `relative` returned."""
        return self.folder / path if path.startswith(f"{STEPS}/") else Path(path)

    def place(self, name: str, values: object) -> Path:
        """Return the directory of a result that depends on these values.

        Paths inside the run count as relative to it, so a run that was moved finds its results.
        """
        text = json.dumps(self._in_run(values))
        return self.folder / STEPS / cache_key(text)[:8] / as_directory(name)

    def _in_run(self, values: object) -> object:
        if isinstance(values, Mapping):
            return {key: self._in_run(value) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return [self._in_run(value) for value in values]
        if values is None or isinstance(values, bool | int | float):
            return values
        return str(values).removeprefix(f"{self.folder}/")

    def path(self, step: Step) -> Path:
        """Return the directory of a step."""
        return self.place(step.name, step.identity)

    def at(self, step: Step) -> str:
        """Return the directory of a step as the record has it."""
        return self.path(step).relative_to(self.folder / STEPS).as_posix()

    @property
    def replaces_run(self) -> bool:
        """Whether the directory holds a run that `overwrite` will delete."""
        return self.options.overwrite and self.record.run is None and RunDir(self.folder).is_run

    @property
    def has_measured(self) -> bool:
        """Whether a later run with a larger budget finds measurements of this one."""
        stored = (self.folder / STEPS).glob("*/timings*.json")
        return not self.replaces_run and (bool(self.unwritten) or any(stored))

    def claim(self) -> None:
        """Claim the run, and write what was measured before."""
        self.claim_run()
        while self.unwritten:
            write_atomic(*self.unwritten.popitem())

    def has_begun(self, step: Step) -> bool:
        """Whether a training has begun, so that it continues from its checkpoint."""
        return not self.replaces_run and RunDir(self.path(step)).is_run

    def result(self, step: Step) -> RunResult:
        """Return the report of a finished step."""
        return RunResult.read(self.path(step))

    def is_complete(self, step: Step, until: int | None = None) -> bool:
        """Whether a step has written all its files, or a training has got so far."""
        place = self.path(step)
        if self.replaces_run:
            return False
        if (place / step.leaves).is_file() or RunDir(place).done:
            return True
        if until is None or not step.trains:
            return False
        return any("held_out" in r and r["step"] >= until for r in RunDir(place).read_log())

    def run(self, step: Step, *, until: int | None = None, required: bool = False) -> str:
        """Run a step unless it is complete. Return why it failed, or an empty string.

        `until` pauses a training after this many optimiser steps. A training is also stopped when
        the budget ends.

        Raises:
            Stopped, Interrupted: The user stopped the compression.
            GateError: The step is `required`, and the budget ended.
            KdcliError: The step is `required`, and it failed with an error of this class.
        """
        place, at = self.path(step), self.at(step)
        self.passed[at] = max(self.passed.get(at, 0), math.inf if until is None else until)
        if self.is_complete(step, until):
            return ""
        whys = [one.error for one in self.record.attempts if one.place == at and one.error]
        whys += self.refused.get(at, [])
        if whys and not required:
            return whys[-1]
        self.check()
        self.claim()
        self.current = step.name
        with self._timed(at, until, step.verb) as errors:
            try:
                is_over = self._call(step, at, place, until)
                self.check()
            except (Interrupted, ChildFailed, Stopped):
                raise
            except KdcliError as failure:
                # Ctrl-C may have caused the error.
                self.check()
                if required:
                    failure.prefix(f"{step_title(step.name)} failed", TRY_AGAIN)
                    raise
                # What the machine failed at is tried again, and after a resumption also what the
                # user may have put right, such as a package that was not installed.
                if isinstance(failure, UsageError):
                    self.refused[at] = [failure.message]
                elif not isinstance(failure, MachineError):
                    errors += [failure.message]
                return failure.message
        self.current = ""
        if is_over and required:
            command = self.continuing_command(2 * self.budget)
            raise GateError(
                f"{step_title(step.name)}: {OVER}",
                f"continue from its checkpoint with a larger budget: {command}",
            )
        return OVER if is_over else ""

    def require(self, step: Step) -> Path:
        """Run a step that the compression cannot go on without, and return its directory."""
        self.run(step, required=True)
        return self.path(step)

    def _call(self, step: Step, at: str, place: Path, until: int | None) -> bool:
        """Call a step's verb. Return whether the budget ended before it did."""
        left = self.left if step.trains else math.inf
        if left <= 0:
            return True
        log(f"{step_title(step.name)}: {step.verb}")
        if step.is_look and at not in self.record.looks():
            self.record.add(Look(at))
        options = replace(
            self.step_options,
            output_dir=place,
            resume=step.trains,
            overwrite=not step.trains,
            stop_after=until,
        )
        call = functools.partial(call_with_outputs, self.folder / OUTPUTS, step)
        try:
            if self._uses_pool and self.pool is not None:
                self.pool.call(step.name, call, options, left)
            else:
                self.stop.deadline = time.monotonic() + left
                call(options)
        except Stopped:
            if self.stop.signalled:
                raise
            return True
        finally:
            self.stop.deadline = math.inf
        return False

    @property
    def step_options(self) -> RunOptions:
        """The options of every step."""
        return RunOptions(device=self.options.device, processes=1)

    def has(self, name: str, values: object) -> bool:
        """Whether `once` has a result for these values."""
        file = self.place(name, values).with_suffix(".json")
        return file in self.unwritten or (file.is_file() and not self.replaces_run)

    def once(self, name: str, values: object, kind: type[T], compute: Callable[[], T]) -> T:
        """Return what `compute` returned the first time for these values, also in an earlier
        process."""
        folder, adapter = self.place(name, values), TypeAdapter(kind)
        file = folder.with_suffix(".json")
        at = file.relative_to(self.folder / STEPS).as_posix()
        self.passed[at] = math.inf
        if self.has(name, values):
            text = self.unwritten.get(file)
            stored = read_json(file) if text is None else json.loads(text)
            return adapter.validate_python(stored["value"])
        self.check()
        with self._timed(at, verb=name):
            value = compute()
            # The latency worker takes Ctrl-C itself and returns what it has measured until then.
            self.check()
        dumped = adapter.dump_python(value, mode="json", exclude_defaults=True)
        text = json.dumps({"value": dumped})
        if self.record.run is None:
            self.unwritten[file] = text
        else:
            write_atomic(file, text)
        return value

    def cost(self, step: Step, place: object) -> TrainingCost:
        """Return the cost of a training by a dry run on this machine, which prints nothing."""

        def estimate() -> TrainingCost:
            began, kept = self.clock(), 0.0
            options = replace(self.step_options, dry_run=True)
            with silenced():
                if self.record.run is None:
                    # Nothing is written yet.
                    found = call_alone(step, options)
                else:
                    with keep_results(self.folder / OUTPUTS) as keeper:
                        found = call_alone(step, options)
                    kept = keeper.seconds
            assert isinstance(found, Estimate)
            stages = found.stages
            seconds = sum(stage.seconds for stage in stages)
            setup = max(0.0, self.clock() - began - kept)
            return TrainingCost(stages[-1].steps, seconds, setup=setup)

        values = [*step.identity, place]
        try:
            return self.once(f"{COST}{step.name}", values, TrainingCost, estimate)
        except (Stopped, Interrupted):
            raise
        except KdcliError as error:
            return TrainingCost(0, 0.0, error.message)

    def too_long(self, seconds: float) -> str:
        """Return why a training takes longer than the time that is left; empty if it does not."""
        if seconds <= self.spare:
            return ""
        left = duration(max(0.0, self.spare))
        return f"it takes about {duration(seconds)}, {left} are left"

    def why_not_begun(self, step: Step, cost: TrainingCost) -> str:
        """Return why a training cannot begin; empty if it can, or if it has begun already."""
        if cost.error or self.has_begun(step):
            return cost.error
        why = self.too_long(cost.seconds + self.seconds_after_training())
        if not why:
            log(f"{step.name}: its training takes about {duration(cost.seconds)}")
        return why

    def continuing_command(self, budget: float) -> str:
        """Return the command that continues the compression with a budget of these seconds."""
        changes = {"--budget": f"{math.ceil(budget / 60)}m"}
        return self.options.continuing_command("compress", self.folder, changes)

    def check(self) -> None:
        """Raise Stopped or Interrupted if the user asked the compression to stop."""
        if self.stop.signalled:
            raise self.stopped()

    def stopped(self) -> KdcliError:
        """Return the error of a compression that the user stopped."""
        if self.record.run is None:
            return Interrupted("stopped before anything was written")
        where = f"in {step_title(self.current)}" if self.current else "between two steps"
        return Stopped(f"stopped {where}", "continue with --resume")

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Turn the ways in which a step ends on a signal into the error of a stopped run."""
        try:
            yield
        except KeyboardInterrupt:
            if self.stop.insisted or not self.stop.signalled:
                raise
            raise self.stopped() from None
        except Stopped:
            raise self.stopped() from None


def call_alone(step: Step, options: RunOptions) -> object:
    """Call a verb as if it were alone in this process."""
    with alone(options.output_dir):
        return step.call(options)


def call_with_outputs(folder: Path, step: Step, options: RunOptions) -> None:
    """Call a verb that keeps the outputs of scored models in a directory."""
    with keep_results(folder):
        call_alone(step, options)


def product(folder: Path) -> Path:
    """Return the model that a step left: after a pruning its compact form, if it has one."""
    compact = folder / COMPACT
    return compact if (compact / "config.json").is_file() else folder
