"""Make the steps that train models: the verb, its recipe and its data.

Labelled tasks train on rows, rerankers on lists of candidates, and embedding models on text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kdcli.errors import UsageError
from kdcli.models.grammar import is_static_shape
from kdcli.recipe.resolve import recipe_keys
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.front import EMBEDDER
from kdcli.types import Kind
from kdcli.verbs.compress.recipes import RecipeKeys, base_recipe, dotted
from kdcli.verbs.compress.runner import Step
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.steps import task_data
from kdcli.verbs.compress.verbs import Verbs
from kdcli.verbs.distill.recipes import distill_recipe, embedding_recipe
from kdcli.verbs.distill.settings import at_width
from kdcli.verbs.prune.recipes import prune_recipes
from kdcli.workloads.embedding import METHOD
from kdcli.workloads.embedding_texts import column_of_texts
from kdcli.workloads.eval_sets import by_vectors
from kdcli.workloads.labelled import ROW_KINDS
from kdcli.workloads.recipes import finetune_recipe
from kdcli.workloads.rerank import TASKS
from kdcli.workloads.retrieval import RETRIEVAL

DISTILL = {"method": "tinybert", "stage": "joint"}
"""A single stage, whose one learning curve shows how good a student is."""
LEARNING_RATE = 3e-4
"""The learning rate under a teacher of width 384."""
ROWS_SEEN = 90_000
"""Number of rows that a student reads in all, each of them at least once."""
LIST_KEYS = ("source", "partition", "labels", "max_length", "split_seed")
"""Keys of `data` that lists of candidates have."""
MAX_EPOCHS = 10.0
"""Maximum number of times that a student reads each row."""


@dataclass
class Trainer:
    """Makes the steps that train models.

    Attributes:
        recipe: the recipe of the compression, with its `data.partition`.
        verbs: the verbs that train.
        reads: what students learn from. Models with a head learn from the rows of a task, embedding
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
            kind: the kind of the task's labels; None for workloads other than labelled tasks.
        """
        return self.reads == "text" or (self.reads == "rows" and kind in ROW_KINDS)

    def distill_defaults(
        self, shape: str, teacher_width: int, count_rows: Callable[[], int]
    ) -> dict[str, object]:
        """Return the keys of a distillation that the plan does not give.

        Args:
            shape: the student's shape.
            teacher_width: the teacher's hidden size.
            count_rows: returns the number of training rows.
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

    def finetune(self, name: str, model: str, keys: RecipeKeys) -> Step:
        """Fine-tune a model on the task."""

        def call(options: RunOptions) -> object:
            values = self._values("finetune", keys) | {"model": model}
            resolved = finetune_recipe(recipe=base_recipe(keys), options=values)
            return self.verbs.finetune(resolved, options)

        return Step(name, "finetune", {"model": model, **keys}, call)

    def distill(self, name: str, teacher: str, keys: RecipeKeys, shape: str | None = None) -> Step:
        """Distil a student from a teacher. Without `shape`, the keys give the student."""

        def call(options: RunOptions) -> object:
            values = self._values("distill", keys) | {"teacher": teacher}
            values |= {} if shape is None else {"student.to": [shape]}
            named = base_recipe(keys)
            if self.reads == "text":
                named = named or embedding_recipe(teacher)
            return self.verbs.distill(distill_recipe(recipe=named, options=values), options)

        return Step(name, "distill", {"teacher": teacher, "shape": shape, **keys}, call)

    def prune(self, name: str, model: str, keys: RecipeKeys, teacher: str | None = None) -> Step:
        """Prune a model while it learns the task, or its own vectors.

        Args:
            name: the name of the step.
            model: the model.
            keys: keys of the recipe of `prune`.
            teacher: the model that the pruned model was made from. A model that reads rows then
                learns its outputs too.
        """

        def call(options: RunOptions) -> object:
            values = self._values("prune", keys) | {"model": model}
            values |= {"teacher": teacher} if teacher is not None and self.supervised else {}
            methods = [values["method"]] if "method" in values else []
            resolved = prune_recipes(methods, recipe=base_recipe(keys), sets=(), options=values)
            return self.verbs.prune(resolved, options)

        return Step(name, "prune", {"model": model, "teacher": teacher, **keys}, call)

    def _values(self, verb: str, keys: RecipeKeys) -> RecipeValues:
        """Return the dotted keys of a training. The step's keys replace all but the source and the
        partition."""
        recipe, own = self.recipe, dict[str, object]()
        if self.reads == "text" and verb != "finetune":
            data = self._text("data.column" if verb == "distill" else "data.columns.text")
            own = {"method" if verb == "distill" else "task": METHOD}
            own |= {"workload.pooling": recipe.pooling}
        else:
            data, own = task_data(recipe), {"task": recipe.task}
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


def trainer_of(recipe: CompressRecipe, verbs: Verbs) -> Trainer:
    """Return how models of a recipe's task are trained.

    Raises UsageError: `pooling` is given for models that are not scored by vectors.
    """
    task = str(recipe.task)
    has_lists = task in TASKS
    is_vectors = not has_lists and by_vectors(task, str(recipe.model), recipe.pooling)
    if task in (RETRIEVAL, METHOD) or is_vectors:
        return Trainer(recipe, verbs, "text")
    if recipe.pooling is not None:
        raise UsageError(
            f"--pooling is for embedding models, and task {task} is not scored by vectors",
            "remove --pooling",
        )
    return Trainer(recipe, verbs, "lists" if has_lists else "rows")
