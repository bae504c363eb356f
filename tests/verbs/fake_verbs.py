"""Verbs for `compress` that train nothing: they write small runs with scores, times and sizes.

A model is known by its path below `steps/`. Scores, milliseconds and megabytes are given for the
first name in it that a table has, so `2x16-onnx` falls back on `2x16`.
"""

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from own_files import headed, write
from own_files import rows as own_rows

from kdcli.deploy.latency import Latency
from kdcli.deploy.measurements import Speedup
from kdcli.disk import HASHES
from kdcli.engine.processes import stop_requests
from kdcli.engine.run_dir import RunDir
from kdcli.errors import KdcliError, MachineError, Stopped
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Comparison, Evaluation, ModelEntry, Report
from kdcli.run.dry_run import Estimate, StageEstimate
from kdcli.types import Card
from kdcli.verbs.compress.run import run
from kdcli.verbs.compress.settings import compress_recipe
from kdcli.verbs.compress.verb_steps import VERBS, Verbs

LABELS = ("brisk", "calm")
OPTIONS = ("output_dir", "resume", "overwrite", "processes", "trust_remote_code")
STEPS = 8
"""Optimiser steps of a training."""


class Killed(BaseException):
    """The end of a process that had no time to write anything."""


def killed_once(marker: Path, *arguments, **settings) -> object:
    """Export a model, or be killed in a process of a pool unless the marker exists."""
    if multiprocessing.parent_process() is not None and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return VERBS.export(*arguments, **settings)


@dataclass
class Fakes:
    """Fake verbs, and what they answer.

    Attributes:
        scores: a model's score on the selection rows.
        verified: its score on the verification rows, if it is another one.
        ms: the latency of a model, or of a backend on which an untrained model is measured.
        mb: the size of a model.
        seconds: what each training takes, and each call of another verb or of `dry-run`.
        estimates: what its dry run says, if it is something else.
        errors: the error that a step ends with.
        calls: the steps that were called, as `verb name`.
        recipes: the recipe of each training.
        exports: the arguments of each export.
        missing: the backends that are not installed.
        unmeasured: models whose latency cannot be measured.
        steps: the optimiser steps of a whole training.
        in_earnest: train and score, and only take the times from the tables.
        killed: train in earnest, also in other processes; the first export in one is killed,
            unless this file exists.
        ends: a step, and how the process ends when it begins: a signal or an exception. Without a
            name, it ends once at each step, and at each part of a training.
    """

    scores: dict[str, float]
    verified: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    mb: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    estimates: dict[str, float] = field(default_factory=dict)
    errors: dict[str, KdcliError] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    recipes: dict[str, dict] = field(default_factory=dict)
    exports: list[dict] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    unmeasured: set[str] = field(default_factory=set)
    steps: int = STEPS
    in_earnest: bool = False
    killed: Path | None = None
    ends: tuple[str, signal.Signals | BaseException] = ("none", signal.SIGTERM)
    ended: set[tuple[str, int]] = field(default_factory=set)
    now: float = 0.0

    @property
    def verbs(self) -> Verbs:
        trainings = {name: self._training(name) for name in ("finetune", "distill", "prune")}
        if self.killed is not None:
            return replace(
                VERBS,
                export=partial(killed_once, self.killed),
                measure=self._measure,
            )
        if self.in_earnest:
            names = ("finetune", "distill", "prune", "trim", "export", "evaluate")
            own = {name: self._recorded(name) for name in names}
            return replace(VERBS, **own, measure=self._measure)
        return Verbs(
            **trainings,
            trim=self._trim,
            export=self._export,
            evaluate=self._evaluate,
            measure=self._measure,
            check_backend=self._check_backend,
            clock=lambda: self.now,
        )

    def compress(self, **keys: object) -> RunResult:
        """Run the verb with keys of the recipe, where `__` is a dot, and options of the run."""
        # Every command reads its files anew.
        HASHES.clear()
        options = {name: keys.pop(name) for name in list(keys) if name in OPTIONS}
        recipe = {name.replace("__", "."): value for name, value in keys.items()}
        sets = [f"{name}=null" for name, value in recipe.items() if value is None]
        task = recipe.pop("task", "own")
        sets = [line for line in sets if line != "task=null"]
        resolved = compress_recipe(recipe=None, sets=sets, options={"task": task} | recipe)
        return run(resolved, RunOptions(device="cpu", **options), self.verbs)

    def begins(self, verb: str, folder: Path, done: int = 0) -> str:
        """Take a call, which may end the process, and return the step's name."""
        name = folder.name
        self.calls.append(f"{verb} {name}")
        ended, how = self.ends
        if ended in ("", name) and (name, done) not in self.ended:
            self.ended.add((name, done))
            if isinstance(how, BaseException):
                raise how
            os.kill(os.getpid(), how)
        if name in self.errors:
            raise self.errors[name]
        return name

    def _value(self, table: dict[str, float], name: str, default: float) -> float:
        """Return the value of the longest name that the step's name begins with."""
        # A time does not depend on the feed-forward units.
        name = name.partition(":")[0]
        known = [each for each in table if name == each or name.startswith(f"{each}-")]
        return table[max(known, key=len)] if known else default

    def _training(self, verb: str):
        def train(resolved, options: RunOptions) -> object:
            # `prune` takes a recipe for each method.
            (resolved,) = resolved if isinstance(resolved, list) else [resolved]
            recipe = resolved.recipe
            if options.dry_run:
                student = getattr(recipe, "student", None)
                (shape,) = getattr(student, "to", None) or [verb]
                self.calls.append(f"dry run {shape}")
                self.now += self.seconds.get("dry-run", 0.0)
                seconds = self._value({**self.seconds, **self.estimates}, shape, 0.0)
                return Estimate({}, [StageEstimate("", self.steps, 1.0, seconds, 1.0, 0)])
            folder = options.output_dir
            run_dir = RunDir.claim(folder, resolved.to_yaml(), resume=options.resume)
            done = max((line["step"] for line in run_dir.read_log()), default=0)
            name = self.begins(verb, folder, done)
            self.recipes[name] = recipe.model_dump()
            limit = recipe.train.max_steps
            whole = self.steps if limit is None else min(self.steps, limit)
            total = min(whole, options.stop_after or whole)
            with stop_requests() as stop:
                for step in range(done + 1, total + 1):
                    # The request counts real seconds, in which this training takes no time.
                    left = stop.deadline - time.monotonic()
                    spent = self._value(self.seconds, name, 0.0) / self.steps
                    if spent > left:
                        self.now += max(0.0, left)
                        raise Stopped("stopped with a checkpoint")
                    self.now += spent
                    stop.deadline -= spent
                    score = self._value(self.scores, name, 0.5)
                    metrics = {"accuracy": score, "f1": 0.0}
                    run_dir.log({"step": step, "held_out": {"loss": 1 - score}, "metrics": metrics})
                    if stop.signalled:
                        raise Stopped("stopped with a checkpoint")
            if total == whole:
                source = getattr(recipe, "teacher", None) or recipe.model
                places = [folder]
                if "," in name:
                    places += [folder / member for member in name.split(",")]
                for place in places:
                    copy_model(Path(source), place)
                self._report(folder, verb, self._training_scores(verb, name))
            return None

        return train

    def _training_scores(self, verb: str, name: str) -> dict[str, float]:
        score = self._value(self.scores, name, 0.5)
        if verb == "finetune":
            return {"finetuned": score}
        first = ("teacher", "student") if verb == "distill" else ("baseline", "pruned")
        return dict(zip(first, (self._value(self.scores, "teacher", 0.9), score), strict=True))

    def _trim(self, resolved, options: RunOptions) -> object:
        folder = options.output_dir
        RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
        self.begins("trim", folder)
        copy_model(Path(resolved.recipe.model), folder)
        self._report(folder, "trim", {})
        return None

    def _export(self, source, *, format, precisions, output_dir, **settings) -> object:
        shutil.rmtree(output_dir, ignore_errors=True)
        self.begins("export", output_dir)
        self.now += self.seconds.get("export", 0.0)
        self.exports.append(settings)
        copy_model(Path(source), output_dir)
        file = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}[format]
        (output_dir / format).mkdir()
        (output_dir / file).write_bytes(b"model")
        facts = {"format": format, "precision": precisions[0], "files": {file: 5}}
        (output_dir / "export.json").write_text(json.dumps(facts), "utf-8")
        return None

    def _evaluate(self, resolved, options: RunOptions, extras) -> RunResult:
        folder, recipe = options.output_dir, resolved.recipe
        RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
        self.begins("evaluate", folder)
        self.now += self.seconds.get("evaluate", 0.0)
        # Without a trained teacher, its directory is the model's.
        names = ["teacher", *(Path(model).name for model in recipe.models[1:])]
        scores = {name: self._value(self.scores, name, 0.9) for name in names}
        if recipe.data.split == "verification":
            scores |= {n: self._value(self.verified, n, score) for n, score in scores.items()}
        by_label = dict(zip(extras.names, scores.values(), strict=True))
        sizes = [self._value(self.mb, name, 8.0) for name in names]
        self._report(folder, "evaluate", by_label, sizes)
        return RunResult.read(folder)

    def _measure(self, subjects, protocol, deadline) -> Latency:
        self.calls.append(f"measure {' '.join(subject.name for subject in subjects)}")
        spent = self._value(self.seconds, "measure", 0.0)
        self.now += spent
        if spent > deadline - time.monotonic():
            return Latency(prepared=1, interrupted=True)
        latency = latency_of(
            {
                one.name: self._value(self.ms, one.name, 10.0)
                for one in subjects
                if one.name not in self.unmeasured
            }
        )
        for name in self.unmeasured & {one.name for one in subjects}:
            failure = {"model": name, "backend": "onnx", "dtype": "fp32"}
            latency.read({"failures": [failure | {"reason": "out of memory"}]})
        return latency

    def _recorded(self, name: str):
        """Return a verb of kdcli whose calls are recorded, and at which the process may end."""

        def call(*arguments, **settings) -> object:
            # `export` takes no options.
            options = arguments[1] if len(arguments) > 1 else RunOptions()
            if not options.dry_run:
                self.begins(name, settings.get("output_dir", options.output_dir))
            return getattr(VERBS, name)(*arguments, **settings)

        return call

    def _check_backend(self, name: str, precision: str) -> None:
        if name in self.missing:
            raise MachineError(f"{name} needs a library")

    def _report(self, folder, command, scores, sizes=()) -> None:
        """Write a report with the scores, and a page of it."""
        first = next(iter(scores), "")
        sizes = [*sizes, *[8.0] * (len(scores) - len(sizes))]
        report = Report(
            command=command,
            status="done",
            created="2026-01-01T00:00:00+00:00",
            versions={},
            environment={},
            recipe={},
            models=[
                ModelEntry(name=name, role=role_of(name), card=card(mb))
                for name, mb in zip(scores, sizes, strict=True)
            ],
            training=None,
            curve=[],
            quality={},
            latency=[],
            failures=[],
            published=[],
            notes=[],
            evaluations=[
                Evaluation(model=n, task="own", set="", split="x", n=400, metrics={"accuracy": s})
                for n, s in scores.items()
            ],
            comparisons=[
                Comparison(
                    model=name,
                    baseline=first,
                    task="own",
                    set="",
                    metric="accuracy",
                    difference=score - scores[first],
                    low=score - scores[first] - 0.005,
                    high=score - scores[first] + 0.005,
                )
                for name, score in scores.items()
                if name != first
            ],
        )
        (folder / "report.html").write_text("<p>", "utf-8")
        text = report.model_dump_json(by_alias=True)
        (folder / "report.json").write_text(text, "utf-8")
        RunDir(folder).release()


def latency_of(times: dict[str, float]) -> Latency:
    """What the latency worker measures: models by name, the baseline first, and milliseconds."""
    latency, (first, *_) = Latency(prepared=len(times)), times
    for name, ms in times.items():
        ratio = dict.fromkeys(("median", "low", "high"), times[first] / ms)
        row = {"model": name, "backend": "onnx", "device": "cpu", "dtype": "fp32"}
        row |= {"batch_size": 1, "seq_len": 128, "padding": "full", "n": 9, "status": "ok"}
        row |= dict.fromkeys(("p50_ms", "p75_ms", "p90_ms", "p95_ms", "mean_ms"), ms)
        row |= {"iqr_over_p50": 0.0}
        if name != first:
            row["speedup"] = Speedup(baseline=first, unstable=False, **ratio).model_dump()
        latency.read({"rows": [row]})
    return latency


def role_of(name: str) -> str:
    known = ("teacher", "student", "baseline", "pruned", "finetuned")
    return name if name in known else "candidate"


def card(mb: float) -> Card:
    shape = {"layers": 1, "hidden": 32, "ffn": 64, "heads": 2}
    counts = {"params_total": 100, "params_embedding": 10, "params_transformer": 90}
    counts |= {"params_nonzero": 100, "multiply_adds": 100, "bytes": int(mb * 1e6)}
    return Card(id="m", model_type="bert", sha256=None, **shape, **counts)


def copy_model(source: Path, folder: Path) -> None:
    """Copy the files of a model, as if a verb had made another one from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "README.md").write_text("# A model\n", "utf-8")


def tuned(folder: Path) -> dict[str, object]:
    """Write a fine-tuned classifier and its labelled rows, and return the keys that name them."""
    model = headed(folder / "model", LABELS, num_hidden_layers=4)
    data = write(folder / "rows.jsonl", own_rows("class", 400))
    return {"model": str(model), "data__source": str(data), "data__max_length": 24}
