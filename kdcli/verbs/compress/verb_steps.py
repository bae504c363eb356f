"""Make the steps of a compression: a verb, its recipe and its data.

Labelled tasks train on rows, rerankers on lists of candidates, and embedding models on text. The
recipe of a step is resolved when the step runs, so that an error in it fails the step and not the
compression.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from typing import Protocol as CallProtocol

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.deploy.backends import PACKED
from kdcli.deploy.latency import Latency, Protocol, Subject, measure_latency
from kdcli.deploy.runners import check_backend
from kdcli.errors import UsageError, in_words
from kdcli.models.grammar import goal_of, is_static_shape
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config
from kdcli.recipe.resolve import Resolved, combinations, recipe_keys, resolve
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.front import EMBEDDER
from kdcli.report.schema_decisions import Decision
from kdcli.report.titles import SELECTION
from kdcli.types import Kind
from kdcli.verbs.compress.settings import CompressRecipe, RecipeKeys, base_recipe, dotted
from kdcli.verbs.compress.steps import Step
from kdcli.verbs.distill.distill_recipes import distill_recipe, embedding_recipe
from kdcli.verbs.distill.recipe_checks import check_recipe
from kdcli.verbs.distill.run import complete as complete_distillation
from kdcli.verbs.distill.run import distill
from kdcli.verbs.distill.settings import DistillRecipe, at_width
from kdcli.verbs.evaluate.run import Extras, evaluate
from kdcli.verbs.evaluate.settings import EvaluateRecipe
from kdcli.verbs.export.gate import QUANTISED
from kdcli.verbs.export.run import export
from kdcli.verbs.finetune.run import finetune
from kdcli.verbs.prune.method_recipes import prune_recipes
from kdcli.verbs.prune.run import Recipes, prune
from kdcli.verbs.prune.run import complete as complete_pruning
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.verbs.trim.run import trim
from kdcli.verbs.trim.settings import TrimRecipe
from kdcli.workloads import check_settings
from kdcli.workloads.beir import RETRIEVAL
from kdcli.workloads.embedding_texts import column_of_texts
from kdcli.workloads.embeddings import METHOD
from kdcli.workloads.eval_sets import by_vectors
from kdcli.workloads.finetune_recipes import finetune_recipe
from kdcli.workloads.labelled import ROW_KINDS
from kdcli.workloads.rerank import TASKS
from kdcli.workloads.scores import RESAMPLES
from kdcli.workloads.settings import FinetuneRecipe, LabelledSettings, PoolingName

DISTILL = {"method": "tinybert", "stage": "joint"}
"""A single stage, whose one learning curve shows how good a student is."""
OUTPUTS_ALONE = {"method": "soft-targets", "stage": "none"}
"""The keys of a distillation that compares no states."""
LEARNING_RATE = 3e-4
"""The learning rate under a teacher of width 384."""
ROWS_SEEN = 90_000
"""Number of rows that a student reads in all, each of them at least once."""
LIST_KEYS = ("source", "partition", "labels", "max_length", "split_seed")
"""Keys of `data` that lists of candidates have."""
ANSWERS = "answers.json"
"""The file of an evaluation with the answers of its models, from which cascades are made."""
MAX_EPOCHS = 10.0
"""Maximum number of times that a student reads each row."""
MAX_RESAMPLES = 20_000
"""Maximum number of bootstrap resamples for the interval of a late look at the rows."""


class ExportCall(CallProtocol):
    """The arguments of `export` that a compression gives."""

    def __call__(
        self,
        source: str,
        *,
        format: str,
        precisions: Sequence[str],
        data: LabelledSettings,
        pooling: PoolingName | None,
        task: str | None,
        max_drop: float | None,
        exact: bool,
        steps: int,
        output_dir: Path | None,
        overwrite: bool,
    ) -> object: ...


@dataclass(frozen=True)
class Verbs:
    """The verbs that a compression calls. A test gives its own.

    Attributes:
        measure: Measures latencies until a deadline. Its type names the arguments, because a test
            replaces it.
        check_backend: Raises an error if a backend cannot be used on this machine.
        clock: The seconds from which durations are computed.
    """

    finetune: Callable[[Resolved[FinetuneRecipe], RunOptions], object]
    distill: Callable[[Resolved[DistillRecipe], RunOptions], object]
    prune: Callable[[Recipes, RunOptions], object]
    trim: Callable[[Resolved[TrimRecipe], RunOptions], object]
    export: ExportCall
    evaluate: Callable[[Resolved[EvaluateRecipe], RunOptions, Extras], RunResult | None]
    measure: Callable[[Sequence[Subject], Protocol, float], Latency] = measure_latency
    check_backend: Callable[[str, str], None] = check_backend
    clock: Callable[[], float] = time.monotonic


VERBS = Verbs(finetune, distill, prune, trim, export, evaluate)


@dataclass
class VerbSteps:
    """Makes the steps.

    Attributes:
        recipe: The recipe of the compression, with its `data.partition`.
        verbs: The functions that the steps call.
        reads: The data of the students. Models with a head learn from the rows of a task, embedding
            models from text, and rerankers from lists of candidates.
    """

    recipe: CompressRecipe
    verbs: Verbs
    reads: Literal["rows", "text", "lists"]

    @property
    def supervised(self) -> bool:
        """Whether a student can be trained on the labels alone."""
        return self.reads == "rows"

    @property
    def auto_class(self) -> str:
        """The class that loads a student, for the report."""
        return EMBEDDER if self.reads == "text" else "AutoModel"

    def allows_static(self, kind: Kind | None) -> bool:
        """Return whether a student may be static, which has no outputs for single tokens.

        Args:
            kind: The kind of the task's labels; None for workloads other than labelled tasks.
        """
        return self.reads == "text" or (self.reads == "rows" and kind in ROW_KINDS)

    def distill_defaults(
        self, shape: str, teacher_width: int, count_rows: Callable[[], int]
    ) -> dict[str, object]:
        """Return the keys of a distillation that the plan does not give.

        Args:
            shape: The student's shape.
            teacher_width: The teacher's hidden size.
            count_rows: Returns the number of training rows.
        """
        # `count_rows` counts the rows of `data`, not the texts of `text`.
        is_counted = self.recipe.data.source is not None and self.recipe.text is None
        if is_static_shape(shape) or self.reads == "lists":
            return {}
        if self.reads == "rows":
            epochs = min(MAX_EPOCHS, max(1.0, round(ROWS_SEEN / count_rows(), 1)))
            rate = at_width(LEARNING_RATE, teacher_width)
            return {**DISTILL, "train.lr": rate, "train.epochs": epochs}
        if not is_counted:
            return {}
        defaults = recipe_keys(embedding_recipe(str(self.recipe.model)), "distill")
        keys = defaults | dotted(self.recipe.plan.distill)
        steps, batch_size = keys.get("train.max_steps"), keys["train.batch_size"]
        used = keys.get("workload.rows")
        if not isinstance(steps, int) or not isinstance(batch_size, int):
            return {}
        rows = min(count_rows(), used) if isinstance(used, int) else count_rows()
        return {"train.epochs": MAX_EPOCHS} if steps * batch_size > MAX_EPOCHS * rows else {}

    def check_trainings(self) -> None:
        """Check the settings of all planned trainings as the trainings do.

        Raises:
            UsageError: An unknown key or a wrong value, also below a section such as `loss`.
        """
        model, plan = str(self.recipe.model), self.recipe.plan
        planned: list[tuple[str, str, RecipeKeys]] = [("plan.finetune", "finetune", plan.finetune)]
        if not self.recipe.steps:
            keys: RecipeKeys = plan.distill
            is_static = self._a_shape is not None and is_static_shape(self._a_shape)
            if self.reads == "rows" and "recipe" not in keys and not is_static:
                is_causal = layout_for(load_config(model)).causal
                keys = {**(OUTPUTS_ALONE if is_causal else DISTILL), **keys}
            planned += [
                ("plan.distill", "distill", keys),
                ("plan.prune", "prune", plan.prune or {}),
            ]
        for n, step in enumerate(self.recipe.steps):
            planned += [(f"steps[{n}].{verb}", verb, keys) for verb, keys in step.items()]
        for section, verb, keys in planned:
            try:
                self._check_training(verb, model, keys)
            except UsageError as error:
                raise error.of(in_words(section)) from None

    def _check_training(self, verb: str, model: str, keys: RecipeKeys) -> None:
        recipe: FinetuneRecipe | PruneRecipe | DistillRecipe
        if verb == "finetune":
            fine_tuning = self._finetune_recipe(model, keys)
            combinations(fine_tuning)
            recipe = fine_tuning.recipe
        elif verb == "prune":
            (pruning,) = complete_pruning(self._prune_recipes(model, keys, None))
            recipe = pruning.recipe
        elif verb == "distill":
            recipe = complete_distillation(self._distill_recipe(model, keys, self._a_shape)).recipe
            check_recipe(recipe)
        else:
            return
        if recipe.task is not None:
            check_settings(recipe.task, recipe.workload)

    @property
    def _a_shape(self) -> str | None:
        """A shape of the plan, if there is one with layers; None if the recipe has steps."""
        shapes = self.recipe.plan.shapes or []
        if self.recipe.steps:
            return None
        if goal_of(shapes) is not None:
            shapes = []
        return next((one for one in shapes if not is_static_shape(one)), [*shapes, "1x32"][0])

    def finetune(self, name: str, model: str, keys: RecipeKeys) -> Step:
        """Fine-tune a model on the task."""

        call = partial(self._finetune, model, keys)
        return Step(name, "finetune", {"model": model, **keys}, call)

    def _finetune(self, model: str, keys: RecipeKeys, options: RunOptions) -> object:
        return self.verbs.finetune(self._finetune_recipe(model, keys), options)

    def _finetune_recipe(self, model: str, keys: RecipeKeys) -> Resolved[FinetuneRecipe]:
        values = self._values("finetune", keys) | {"model": model}
        return finetune_recipe(recipe=base_recipe(keys), options=values)

    def distill(self, name: str, teacher: str, keys: RecipeKeys, shape: str | None = None) -> Step:
        """Distil a student from a teacher. Without `shape`, the keys give the student."""

        call = partial(self._distill, teacher, keys, shape)
        return Step(name, "distill", {"teacher": teacher, "shape": shape, **keys}, call)

    def _distill(
        self, teacher: str, keys: RecipeKeys, shape: str | None, options: RunOptions
    ) -> object:
        return self.verbs.distill(self._distill_recipe(teacher, keys, shape), options)

    def _distill_recipe(
        self, teacher: str, keys: RecipeKeys, shape: str | None
    ) -> Resolved[DistillRecipe]:
        values = self._values("distill", keys) | {"teacher": teacher}
        values |= {} if shape is None else {"student.to": [shape]}
        named = base_recipe(keys)
        if self.reads == "text":
            named = named or embedding_recipe(teacher)
        return distill_recipe(recipe=named, options=values)

    def prune(self, name: str, model: str, keys: RecipeKeys, teacher: str | None = None) -> Step:
        """Prune a model while it learns the task, or its own vectors.

        Args:
            name: The name of the step.
            model: The model.
            keys: Keys of the recipe of `prune`.
            teacher: The model that the pruned model was made from. A model that reads rows then
                learns its outputs too.
        """

        def call(options: RunOptions) -> object:
            return self.verbs.prune(self._prune_recipes(model, keys, teacher), options)

        return Step(name, "prune", {"model": model, "teacher": teacher, **keys}, call)

    def _prune_recipes(self, model: str, keys: RecipeKeys, teacher: str | None) -> Recipes:
        values = self._values("prune", keys) | {"model": model}
        values |= {"teacher": teacher} if teacher is not None and self.supervised else {}
        methods = [values["method"]] if "method" in values else []
        return prune_recipes(methods, recipe=base_recipe(keys), sets=(), options=values)

    def trim(self, name: str, model: str, text: Path, keys: RecipeKeys) -> Step:
        """Trim a model's vocabulary to the tokens of a text, unless the keys name another text."""

        values = {"data.source": str(text)} | dotted(keys) | {"model": model}
        call = partial(self._trim, values)
        return Step(name, "trim", {"model": model, "keys": keys}, call)

    def _trim(self, values: RecipeValues, options: RunOptions) -> object:
        return self.verbs.trim(resolve(TrimRecipe, recipe=None, options=values), options)

    def export(self, name: str, model: str, backend: str, *, max_drop: float | None = None) -> Step:
        """Write a model for a backend, such as `onnx-int8`.

        With `max_drop`, products stay in float32 until the file loses at most this many points of
        the task's metric.
        """
        values: RecipeValues = {"model": model, "backend": backend, "max_drop": max_drop}
        steps = self.recipe.plan.pack_steps if backend.endswith(PACKED) else 0
        values |= {"steps": steps} if steps else {}
        call = partial(self._export, model, backend, max_drop, steps)
        return Step(name, "export", values, call)

    def _export(
        self, model: str, backend: str, max_drop: float | None, steps: int, options: RunOptions
    ) -> object:
        format, _, precision = backend.partition("-")
        recipe = self.recipe
        # The texts of the rows choose the integers.
        reads_rows = max_drop is not None or precision in QUANTISED
        return self.verbs.export(
            model,
            format=format,
            precisions=[precision or "fp32"],
            data=recipe.data if reads_rows else LabelledSettings(),
            pooling=recipe.pooling,
            task=recipe.task if reads_rows else None,
            max_drop=max_drop,
            # The file must meet the goal, which allows no excess.
            exact=True,
            steps=steps,
            output_dir=options.output_dir,
            overwrite=options.overwrite,
        )

    def outputs(self, name: str, model: str, split: str) -> Step:
        """Compute a model's outputs on the selection or verification rows, which later scores read
        from the disk."""
        keys: RecipeValues = {"data.split": VERIFICATION} if split == VERIFICATION else {}
        call = partial(self._evaluate, {name: model}, keys, outputs_only=True)
        values = {"model": model, "split": split}
        return Step(f"{split}-{name}", "evaluate", values, call, leaves=ANSWERS)

    def score(self, name: str, models: Mapping[str, str]) -> Step:
        """Score models, given by name, on the selection rows. Their outputs are stored."""
        call = partial(self._evaluate, models, {"worst": 0})
        return Step(name, "evaluate", {"models": dict(sorted(models.items()))}, call)

    def verify(
        self, models: Mapping[str, str], confidence: float, selected: Sequence[Decision]
    ) -> Step:
        """Score the teacher and the chosen model, given by name, on the verification rows.

        `selected` are the comparisons on the selection rows, which choose the thresholds.
        """
        # The ends of wider intervals need more resamples.
        resamples = min(round(RESAMPLES * 0.05 / (1 - confidence)), MAX_RESAMPLES)
        keys: RecipeValues = {"data.split": VERIFICATION}
        chosen = [one.model_copy(update={"thresholds_on": SELECTION}) for one in selected]
        keys |= {"confidence": confidence, "resamples": resamples}
        call = partial(self._evaluate, models, keys, thresholds_from=chosen)
        name = f"{VERIFICATION}-{list(models)[-1]}"
        return Step(name, "evaluate", {"models": dict(models)}, call, is_look=True)

    def _evaluate(
        self,
        models: Mapping[str, str],
        keys: RecipeKeys,
        options: RunOptions,
        *,
        thresholds_from: Sequence[Decision] = (),
        outputs_only: bool = False,
    ) -> object:
        recipe = self.recipe
        values = self.task_data() | {"models": list(models.values()), "task": recipe.task}
        values |= {"pooling": recipe.pooling, "max_class_drop": recipe.goal.max_class_drop}
        resolved = resolve(EvaluateRecipe, recipe=None, options=values | dict(keys))
        assert options.output_dir is not None
        answers = options.output_dir / ANSWERS
        extras = Extras(
            names=list(models),
            thresholds_from=thresholds_from,
            answers=answers,
            outputs_only=outputs_only,
        )
        return self.verbs.evaluate(resolved, options, extras)

    def task_data(self) -> RecipeValues:
        """Return the keys of `data:` for a verb that reads the task's rows."""
        own = self.recipe.data.model_dump(
            exclude_defaults=True, exclude={"selection_rows", "verification_rows"}
        )
        return dotted({"data": own})

    def _values(self, verb: str, keys: RecipeKeys) -> RecipeValues:
        """Return the dotted keys of a training. The step's keys replace all but the source and the
        partition."""
        recipe, own = self.recipe, dict[str, object]()
        if self.reads == "text" and verb != "finetune":
            data = self._text("data.column" if verb == "distill" else "data.columns.text")
            own = {"method" if verb == "distill" else "task": METHOD}
            own |= {"workload.pooling": recipe.pooling}
        else:
            data, own = self.task_data(), {"task": recipe.task}
            if self.reads == "lists" and verb != "prune":
                known = {f"data.{name}" for name in LIST_KEYS}
                data = {key: value for key, value in data.items() if key in known}
        fixed = {k: v for k, v in data.items() if k in ("data.source", "data.partition")}
        defaults: RecipeValues = {"measure.latency": False, "train.seed": recipe.seed}
        if self.supervised and verb == "distill":
            defaults["undistilled.use"] = False
        return {**data, **defaults, **dotted(keys), **fixed, **own}

    def _text(self, column_key: str) -> RecipeValues:
        data, text = self.recipe.data, self.recipe.text
        keys = {"data.source": text or data.source, "data.partition": data.partition}
        # The rows of other tasks are pairs, and `text` is another file.
        is_text = self.recipe.task == METHOD and text is None
        keys[column_key] = column_of_texts(data) if is_text else None
        return {key: value for key, value in keys.items() if value is not None}


def verb_steps(recipe: CompressRecipe, verbs: Verbs) -> VerbSteps:
    """Return how models of a recipe's task are trained.

    Raises:
        UsageError: `pooling` is given for models that are not scored by vectors.
    """
    task = str(recipe.task)
    has_lists = task in TASKS
    is_vectors = not has_lists and by_vectors(task, str(recipe.model), recipe.pooling)
    if task in (RETRIEVAL, METHOD) or is_vectors:
        return VerbSteps(recipe, verbs, "text")
    if recipe.pooling is not None:
        raise UsageError(
            f"--pooling is for embedding models, and task {task} is not scored by vectors",
            "remove --pooling",
        )
    return VerbSteps(recipe, verbs, "lists" if has_lists else "rows")
