"""Runs the steps of a compression, each in a run directory of its own.

A step's result is read from its directory: a finished training is never repeated, and a stopped
training continues from its checkpoint.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kdcli.data.labelled.partition import DividedRows, Partition
from kdcli.data.text.sentences import read_texts
from kdcli.deploy.environment import describe_environment
from kdcli.disk import as_directory, disk_errors, write_atomic
from kdcli.engine.device import choose_device
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import (
    ChildFailed,
    GateError,
    Interrupted,
    KdcliError,
    MachineError,
    Stopped,
)
from kdcli.models.training_rows import NO_ROWS
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.titles import step_title
from kdcli.run.context import cpu_session
from kdcli.run.dry_run import Estimate
from kdcli.targets.outputs import keep_outputs
from kdcli.types import Kind
from kdcli.verbs.compress.journal import Journal, Unrecorded
from kdcli.verbs.compress.moved import STEPS, TRAINING_TEXT, follow_move
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.steps import Step, is_done
from kdcli.verbs.compress.trainers import Trainer
from kdcli.verbs.compress.verbs import VERBS, Verbs
from kdcli.workloads import open_rows
from kdcli.workloads.requests import EvaluationRequest

COMPACT = "compact"
OUTPUTS = "outputs"
"""The directory of the outputs of scored models, so that another goal does not compute them again.
"""
PAGE = "report.html"
OVER = "--budget ended before its training did"
TRY_AGAIN = "fix it and run the same command with --resume"


@dataclass
class StepRunner:
    """Runs the steps of a compression in `folder` and keeps their outcomes in the journal.

    Attributes:
        recipe: the recipe. Its `data.partition` names the selection and verification rows.
        trainer_class: makes the steps that train models.
        options: the options of the run.
        folder: the directory of the run.
        journal: what was measured and decided.
        verbs: the verbs that the steps call.
        has_labels: whether the rows have labels; otherwise the teacher is the reference.
        kind: the kind of the rows' labels; None for workloads other than labelled tasks.
        asks_again: whether a finished run is asked again, with another goal or after a failure.
        verified_before: the steps that scored candidates on the verification rows for the
            questions before this one.
        scored_before: the journal's keys of the candidates among which a question chooses.
        claim: claims the directory before the first step writes to it. Later calls do nothing.
    """

    recipe: CompressRecipe
    trainer_class: type[Trainer]
    options: RunOptions
    folder: Path
    journal: Journal
    verbs: Verbs = VERBS
    has_labels: bool = True
    kind: Kind | None = None
    asks_again: bool = False
    verified_before: Sequence[str] = ()
    scored_before: Sequence[str] = ()
    claim: Callable[[], None] = lambda: None

    @property
    def replaces_run(self) -> bool:
        """Whether the directory holds a run that `overwrite` would delete."""
        return self.options.overwrite and RunDir(self.folder).is_run

    @property
    def trainer(self) -> Trainer:
        """The maker of the training steps, with the current recipe."""
        return self.trainer_class(self.recipe, self.verbs)

    def path(self, name: str) -> Path:
        """Return the run directory of a step."""
        return self.folder / STEPS / as_directory(name)

    @property
    def has_steps(self) -> bool:
        """Whether an earlier process, or an earlier goal, has begun the steps."""
        return not self.options.overwrite and (self.folder / STEPS).is_dir()

    def has_begun(self, name: str) -> bool:
        """Whether a training has begun, so that it continues from its checkpoint."""
        return not self.options.overwrite and RunDir(self.path(name)).is_run

    @property
    def place(self) -> list[object]:
        """What latencies depend on besides the models: the machine, and how long it measures."""
        machine, measure = describe_environment(), self.recipe.measure
        facts = [machine["cpu"], machine["gpus"], machine["latency_threads"]]
        device = str(choose_device(self.options.device))
        return [*facts, device, measure.min_runs, measure.min_seconds]

    def training_text(self) -> Path:
        """Return the text whose tokens a trimmed model keeps: the distillation's, else the training
        rows'.

        It is written to a file once, without the selection and verification rows.
        """
        file = self.folder / STEPS / TRAINING_TEXT
        if not file.is_file():
            texts = self.training_texts(Partition.read(str(self.recipe.data.partition)))
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            with disk_errors(file):
                file.parent.mkdir(exist_ok=True)
            write_atomic(file, "".join(lines))
        return file

    def training_texts(self, partition: Partition) -> list[str]:
        """Return the different texts on which students are trained."""
        session = cpu_session()
        rows: DividedRows
        if (text := self.recipe.text) is not None:
            rows = read_texts(text, column=None, unit="sentence", rows=None, log=Progress.log_fact)
        else:
            rows = open_rows(evaluation_request(self.recipe), session)
        return list(dict.fromkeys(rows.training_texts(partition)))

    def training_rows(self) -> int:
        """Return the number of rows on which a student is trained."""
        recipe = self.recipe

        def count() -> int:
            partition = Partition.read(str(recipe.data.partition))
            session = cpu_session()
            rows = open_rows(evaluation_request(recipe), session).pools(NO_ROWS).train
            number = int(partition.is_training(rows).sum())
            return max(1, min(number, recipe.data.train_rows or number))

        return self.journal.once("training rows", int, count)

    def result(self, name: str) -> RunResult:
        """Return the report of a finished step."""
        return RunResult.read(self.path(name))

    def step(
        self,
        name: str,
        step: Step,
        *,
        key: str = "",
        stop_after: int | None = None,
        required: bool = False,
    ) -> str:
        """Run a step unless it is done. Return why it failed, or an empty string.

        `stop_after` pauses a training after this many optimiser steps. A training is also stopped
        when the budget ends.

        Raises:
            Stopped, Interrupted: the user stopped the compression.
            GateError: the step is `required`, and the budget ended.
            KdcliError: the step is `required`, and it failed with an error of this class.
        """

        def run() -> str:
            # An error keeps the failure out of the journal, so a later process tries again.
            try:
                is_over = self._run(name, step, stop_after)
            except (Interrupted, ChildFailed, Stopped):
                raise
            except KdcliError as error:
                # Ctrl-C may have caused the error.
                self.journal.check()
                if required:
                    error.prefix(f"{step_title(name)} failed", TRY_AGAIN)
                    raise
                if isinstance(error, MachineError):
                    raise Unrecorded(error.message) from None
                return error.message
            if is_over:
                command = self.continuing_command(2 * (self.recipe.budget or 0.0))
                raise GateError(
                    f"{step_title(name)}: {OVER}",
                    f"continue from its checkpoint with a larger budget: {command}",
                )
            return ""

        try:
            return self.journal.once(key or f"run {name}", str, run)
        except GateError:
            if required:
                raise
            return OVER
        except Unrecorded as why:
            return str(why)

    def continuing_command(self, budget: float) -> str:
        """Return the command that continues the compression with a budget of these seconds."""
        changes = {"--budget": f"{math.ceil(budget / 60)}m"}
        return self.options.continuing_command("compress", self.folder, changes)

    def require(self, name: str, step: Step) -> Path:
        """Run a step that the compression cannot go on without, and return its directory."""
        self.step(name, step, required=True)
        return self.path(name)

    def _run(self, name: str, step: Step, stop_after: int | None) -> bool:
        """Run a step. Return whether the budget ended before the step did."""
        self.claim()
        place, stop = self.path(name), self.journal.stop
        if step.trains and is_done(place):
            return False
        deadline = time.monotonic() + self.journal.left if step.trains else math.inf
        if time.monotonic() >= deadline:
            return True
        Progress.log(f"{step_title(name)}: {step.verb}")
        if step.trains:
            follow_move(place, self.folder, self.recipe)
        options = self._step_options(resume=step.trains, overwrite=not step.trains)
        stop.deadline = deadline
        outputs = keep_outputs(self.folder / OUTPUTS)
        try:
            with outputs if step.is_evaluation else contextlib.nullcontext():
                step.run(replace(options, output_dir=place, stop_after=stop_after))
        except Stopped:
            if stop.signalled:
                raise
            return True
        finally:
            stop.deadline = math.inf
        return False

    def estimate(self, step: Step) -> Estimate:
        """Return the estimate of a step's dry run, which prints nothing."""
        console = Progress.console
        quiet, console.quiet = console.quiet, True
        try:
            return step.estimate(self._step_options(dry_run=True))
        finally:
            console.quiet = quiet

    def _step_options(
        self, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False
    ) -> RunOptions:
        return RunOptions(
            device=self.options.device,
            processes=1,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
        )

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Turn the ways in which a step ends on a signal into the error of a stopped run."""
        stop = self.journal.stop
        try:
            yield
        except KeyboardInterrupt:
            if stop.insisted or not stop.signalled:
                raise
            raise self.journal.stopped() from None
        except Stopped:
            raise self.journal.stopped() from None


def product(folder: Path) -> Path:
    """Return the model that a step left: after a pruning its compact form, if it has one."""
    compact = folder / COMPACT
    return compact if (compact / "config.json").is_file() else folder


def step_folder(model: Path) -> Path:
    """Return the step's directory that holds a model; see `product`."""
    return model.parent if model.name == COMPACT else model


def step_of(model: Path) -> str:
    """Return the name of the step's directory that holds a model."""
    return step_folder(model).name


def evaluation_request(recipe: CompressRecipe) -> EvaluationRequest:
    """Return the request for the rows of a recipe, whether or not they trained the model."""
    return EvaluationRequest(
        str(recipe.task), [str(recipe.model)], recipe.data, pooling=recipe.pooling
    )
