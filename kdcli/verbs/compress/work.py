"""The steps of a compression: other verbs as processes of their own, each in a run directory, and a journal.

What a step made is read from its directory, so a finished one is never repeated and a stopped one goes on. What was
measured or decided is read from log.jsonl, so a resumed compression decides as before.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kdcli.deploy.exported import FACTS
from kdcli.engine.processes import StopRequest
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import ChildFailed, GateError, Interrupted, Stopped, UsageError
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.verbs.compress.recipes import RERANK, set_options
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.verbs import Verbs
from kdcli.workloads.embedding import by_vectors
from kdcli.workloads.retrieval import RETRIEVAL

T = TypeVar("T")
ENDS = (Stopped.exit_code, Interrupted.exit_code, 1)
"""Exit codes of a step that end the compression: a stop that was asked for, and a bug."""
RESUMABLE = ("finetune", "distill", "prune")
STEPS, COMPACT = "steps", "compact"
OVER = "--budget ended before its training did"


@dataclass
class Work:
    """A compression under way.

    Attributes:
        kind: `task`, `embedding` or `rerank`: how models are trained and judged.
        records: the journal, as in log.jsonl; before the directory is claimed it is kept in memory alone.
    """

    recipe: CompressRecipe
    invocation: RunOptions
    folder: Path
    stop: StopRequest
    kind: str
    records: list[dict[str, Any]] = field(default_factory=list)
    run: RunDir | None = None
    verbs: Verbs = field(default_factory=Verbs)

    @property
    def seconds(self) -> float:
        """What was spent so far, over all resumed runs."""
        return float(sum(record.get("seconds", 0.0) for record in self.records))

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return (self.recipe.budget or math.inf) - self.seconds

    def claim(self, run: RunDir) -> None:
        """Write the journal into a claimed directory from now on."""
        self.run, earlier = run, run.read_log()
        run.cut_log(len(earlier))
        known = {record["key"] for record in earlier}
        new = [record for record in self.records if record["key"] not in known]
        self.records = earlier
        for record in new:
            self._log(record)

    def _log(self, record: dict[str, Any]) -> None:
        record = record | {"step": len(self.records) + 1}
        self.records.append(record)
        if self.run is not None:
            self.run.log(record)

    def once(self, key: str, compute: Callable[[], T]) -> T:
        """What `compute` returns the first time, as JSON; later, and after a resume, what the journal says."""
        for record in self.records:
            if record["key"] == key:
                return record["value"]  # type: ignore[no-any-return]
        if self.stop.signalled and self.run is None:
            raise Interrupted("stopped before anything was written")
        if self.stop.signalled:
            raise Stopped("stopped between two steps", "go on with the same command and --resume")
        began = time.monotonic()
        value = compute()
        self._log({"key": key, "value": value, "seconds": round(time.monotonic() - began, 3)})
        return value

    def path(self, name: str) -> Path:
        """The run directory of a step."""
        return self.folder / STEPS / name

    def step(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        until: Callable[[], bool] | None = None,
        key: str = "",
        needed: bool = False,
    ) -> str:
        """Run a verb in the directory of a step, unless it is done; returns why it failed, or an empty string. `until`
        stops it with a checkpoint, and a training is stopped where the budget ends. Raises Stopped, Interrupted: the
        user stopped it; ChildFailed: a bug, shown; UsageError, GateError: it failed, or had no time, and is `needed`.
        """
        place, verb = self.path(name), arguments[0]
        ends = time.monotonic() + (self.left if verb in RESUMABLE else math.inf)

        def reached() -> bool:
            return until is not None and until()

        def late() -> bool:
            return time.monotonic() >= ends

        def ended() -> bool:
            # A signal that came before the verb was there has not reached it.
            return self.stop.signalled or reached() or late()

        def go() -> str:
            why = made()
            # Raised in here, so that the journal does not hold it and a resumed run tries again.
            if why == OVER and needed:
                raise GateError(f"{name}: {OVER}", "raise it, and start again with --overwrite")
            if why and needed:
                raise UsageError(
                    f"{name} failed: {why}", "mend it and run the same command with --resume"
                )
            return why

        def made() -> str:
            if _is_done(place) or reached():
                return ""
            if late():
                return OVER
            more = ["--resume"] if verb in RESUMABLE else ["--overwrite"]
            more += [
                "-o",
                str(place),
                *(["--trust-remote-code"] if self.invocation.trust_remote_code else []),
            ]
            more += [] if verb == "export" else ["--device", self.invocation.device]
            Progress.log(f"{name}: {verb}")
            more += ["--quiet"] if Progress.console.quiet else []
            code, _, why = self.verbs.run([*arguments, *more], until=ended)
            if code == Stopped.exit_code and (reached() or late()):
                return "" if reached() else OVER
            if code == Stopped.exit_code:
                raise Stopped(f"stopped in {name}", "go on with the same command and --resume")
            if code in ENDS:
                raise ChildFailed(code)
            return why or f"exit {code}" if code else ""

        return self.once(key or f"run {name}", go)

    def must(self, name: str, arguments: Sequence[str]) -> Path:
        """As `step`, for what nothing goes on without."""
        self.step(name, arguments, needed=True)
        return self.path(name)

    def judged(self, name: str) -> RunResult:
        """The report of a finished step."""
        return RunResult.read(self.path(name))

    def on_task(self) -> list[str]:
        """Options that give a verb the task and its data."""
        given = self.recipe.data.model_dump(exclude_defaults=True)
        source = given.pop("source", None)
        options = ["--task", str(self.recipe.task), *(["--data", source] if source else [])]
        return options + set_options({"data": given})

    @property
    def pooling(self) -> list[str]:
        """The option that makes a plain encoder an embedding model."""
        return ["--pooling", self.recipe.pooling] if self.recipe.pooling else []

    def training(self, verb: str, model: str, keys: Mapping[str, Any], *more: str) -> list[str]:
        """The command of a verb that trains `model`, or learns from it, with keys of its recipe; `recipe` among them
        names another to start from."""
        own = {"measure.latency": False, "train.seed": self.recipe.seed}
        own |= {"undistilled.use": False} if (verb, self.kind) == ("distill", "task") else {}
        pairs = set_options(own) + set_options(
            {key: value for key, value in keys.items() if key != "recipe"}
        )
        named = ["--recipe", keys["recipe"]] if "recipe" in keys else []
        task = self.on_task()
        if self.kind == "embedding":
            source = self.recipe.text or self.recipe.data.source
            task = [
                "--task" if verb == "prune" else "--method",
                "embedding",
                *(["--data", source] if source else []),
            ]
            task += self.pooling
        return [verb, model, *task, *named, *more, *pairs]


def export_arguments(model: Path | str, backend: str) -> list[str]:
    """The command that writes a model for a backend, such as `onnx-int8`."""
    name, _, precision = backend.partition("-")
    return ["export", str(model), "--format", name, *(["--int8"] if precision == "int8" else [])]


def product(folder: Path) -> Path:
    """The model that a step left: of a pruning its compact form, if it has one."""
    return folder / COMPACT if (folder / COMPACT / "config.json").is_file() else folder


def kind_of(recipe: CompressRecipe) -> str:
    """How models are trained and judged. Raises UsageError: `pooling` of what is not judged by vectors."""
    vectors = (
        by_vectors(str(recipe.task), str(recipe.model), recipe.pooling) and recipe.task != RERANK
    )
    if vectors or recipe.task == RETRIEVAL:
        return "embedding"
    if recipe.pooling is not None:
        raise UsageError(
            f"--pooling is for embedding models, and task {recipe.task} is not judged by vectors"
        )
    return RERANK if recipe.task == RERANK else "task"


def _is_done(place: Path) -> bool:
    return (place / FACTS).is_file() or RunDir(place).done
